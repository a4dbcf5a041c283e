"""The evaluated model's tokenizer and length, inside a task: to cut documents and measure prompts.

A task's metadata name them: `tokenizer` from `eval run`, `pretrained` (an exported folder) from
`lm_eval --model_args`.
"""

import functools
import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from canon_pretrain.core.errors import UserError
from canon_pretrain.core.files import UnreadableFile, read_json
from canon_pretrain.data.shards import TokenShards
from canon_pretrain.data.tokenizer import HF_FILE, load_tokenizer

HF_CONFIG = "tokenizer_config.json"
TOKENIZER_HINT = """name it with --metadata '{"tokenizer": "FOLDER"}': a data folder, an exported \
folder, or the file of a tokenizer"""
# the names under which lm_eval looks a model's length up, in its order
POSITIONS = ("n_positions", "max_position_embeddings", "n_ctx")


@dataclass(frozen=True, eq=False)
class TaskTokenizer:
    """Text to ids and back, without BOS and EOS; `sha256` is the training tokenizer's, if known."""

    sha256: str
    encode: Callable[[str], list[int]]
    decode: Callable[[Sequence[int]], str]


def task_tokenizer(metadata: Mapping[str, Any]) -> TaskTokenizer:
    """Return the tokenizer that a task's metadata names, a data folder's or an export's."""
    given = metadata.get("tokenizer") or metadata.get("pretrained")
    if not given:
        raise UserError(
            "todo.task_tokenizer",
            f"this task needs the evaluated model's tokenizer: {TOKENIZER_HINT}",
        )
    path = Path(str(given)).expanduser()
    if path.exists() and not (path / HF_CONFIG).is_file():
        return _of_data(path)
    return _of_export(str(path if path.exists() else given), metadata.get("revision"))


@functools.lru_cache(maxsize=4)
def _of_data(folder: Path) -> TaskTokenizer:
    eos = None
    try:
        if (folder / HF_FILE).is_file() and (folder / "train").is_dir():
            # such a file may leave open which token ends a document; the shards know
            with TokenShards.open(folder / "train") as shards:
                eos = shards.eos_id
        found = load_tokenizer(folder, eos=eos)
    except UserError as error:
        raise UserError(
            "todo.task_tokenizer", f"{error}. This task reads text: {TOKENIZER_HINT}"
        ) from None
    encode = lambda text: found.encode(text).tolist()  # noqa: E731
    return TaskTokenizer(found.sha256, encode, lambda ids: found.decode(list(ids)))


@functools.lru_cache(maxsize=4)
def _of_export(name: str, revision: str | None) -> TaskTokenizer:
    import transformers  # takes seconds, and runs of ours do without

    from canon_pretrain.hf.export import RECORD  # imports torch

    folder = Path(name)
    # config.json may name code of the model's, which is not needed here, nor asked about
    kind: Any = transformers.PreTrainedTokenizerFast
    options: dict[str, Any] = {}
    if not (folder / HF_FILE).is_file():
        kind = transformers.AutoTokenizer
        options = {"trust_remote_code": False, "revision": revision or "main"}
    try:
        found = kind.from_pretrained(name, **options)
    except (OSError, ValueError, ImportError, KeyError) as error:
        reason = " ".join(f"no tokenizer can be loaded from there ({error})".split())
        raise UserError("todo.task_tokenizer", f"{name}: {reason}; {TOKENIZER_HINT}") from None
    try:
        sha256 = str(read_json(folder / RECORD)["tokenizer"]["sha256"])
    except (UnreadableFile, KeyError, TypeError):
        # no export of ours, or one that got its tokenizer from elsewhere since
        vocabulary = json.dumps(sorted(found.get_vocab().items())).encode()
        sha256 = hashlib.sha256(vocabulary).hexdigest()
    plain = {"skip_special_tokens": True, "clean_up_tokenization_spaces": False}
    # not verbose: a document longer than the model's length is no mistake before it is cut
    encode = lambda text: list(found.encode(text, add_special_tokens=False, verbose=False))  # noqa: E731
    return TaskTokenizer(sha256, encode, lambda ids: str(found.decode(list(ids), **plain)))


def known_max_length(metadata: Mapping[str, Any]) -> int | None:
    """Return the tokens that the model reads at most, if a task's metadata or config.json tell."""
    for name in ("max_length", *POSITIONS):
        if (given := metadata.get(name)) is not None:
            return int(given)
    try:
        config = read_json(Path(str(metadata.get("pretrained"))) / "config.json", finite=False)
        return next((int(config[name]) for name in POSITIONS if config.get(name) is not None), None)
    except (UnreadableFile, ValueError, TypeError):
        return None  # no exported folder: the name of a model on the hub, or none


def lengths_over(prompts: Iterable[str], room: int, metadata: Mapping[str, Any]) -> list[int]:
    """Return the lengths in tokens of those prompts that have more than `room`."""
    # a token is a letter at least, and one may be put before the text: what is short needs no count
    # (beyond ASCII, normalisation makes several letters of one)
    unsure = [text for text in prompts if len(text) + 1 > room or not text.isascii()]
    encode = task_tokenizer(metadata).encode if unsure else list
    return [length for text in unsure if (length := len(encode(text))) > room]


def check_fit(name: str, longest: int, *, answer_tokens: int, metadata: Mapping[str, Any]) -> None:
    """Raise UserError if the longest prompt and its answer exceed the model's length, if known.

    A harness would cut the beginning off, and with it the facts that a long context hides.
    """
    max_length = known_max_length(metadata)
    if max_length is not None and longest + answer_tokens > max_length:
        raise UserError(
            "todo.task_tokenizer",
            f"{name}: prompts of up to {longest} tokens and an answer of {answer_tokens} do not "
            f"fit max_length {max_length}: give the model at least {longest + answer_tokens} "
            "(--max_length N; lm_eval --model_args max_length=N,max_position_embeddings=N)",
        )
