"""The evaluated model's tokenizer and maximum length for tasks that cut or measure texts.

A task's metadata names them: `tokenizer` from `eval run`, `pretrained` (an exported folder) from
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
from canon_pretrain.data.hf_tokenizer import RANDOM_OPTIONS
from canon_pretrain.data.shards import TokenShards
from canon_pretrain.data.tokenizer import HF_FILE, load_tokenizer

HF_CONFIG = "tokenizer_config.json"
TOKENIZER_HINT = """pass --metadata '{"tokenizer": "PATH"}' with a data folder, an exported \
folder or a tokenizer's file"""
# the config keys of a model's length, in lm_eval's order
POSITIONS = ("n_positions", "max_position_embeddings", "n_ctx")


@dataclass(frozen=True, eq=False)
class TaskTokenizer:
    """Text to ids and back without BOS and EOS; `sha256`: of the training tokenizer, if known."""

    sha256: str
    encode: Callable[[str], list[int]]
    decode: Callable[[Sequence[int]], str]


def task_tokenizer(metadata: Mapping[str, Any]) -> TaskTokenizer:
    """Return the tokenizer that a task's metadata names, a data folder's or an export's."""
    name = metadata.get("tokenizer") or metadata.get("pretrained")
    if not name:
        raise UserError(
            "eval.task_tokenizer",
            f"this task needs the evaluated model's tokenizer: {TOKENIZER_HINT}",
        )
    path = Path(str(name)).expanduser()
    if path.exists() and not (path / HF_CONFIG).is_file():
        return _of_data(path)
    # an exported folder, or a model on the hub
    return _of_export(str(path if path.exists() else name), metadata.get("revision"))


@functools.lru_cache(maxsize=4)
def _of_data(folder: Path) -> TaskTokenizer:
    """Load the tokenizer of a data folder, or a tokenizer's file."""
    eos = None
    try:
        if (folder / HF_FILE).is_file() and (folder / "train").is_dir():
            # this file may not define EOS; the shards do
            with TokenShards.open(folder / "train") as shards:
                eos = shards.eos_id
        tokenizer = load_tokenizer(folder, eos=eos)
    except UserError as error:
        raise UserError("eval.task_tokenizer", f"{error}; {TOKENIZER_HINT}") from None

    return TaskTokenizer(
        sha256=tokenizer.sha256,
        encode=lambda text: tokenizer.encode(text).tolist(),
        decode=lambda ids: tokenizer.decode(list(ids)),
    )


@functools.lru_cache(maxsize=4)
def _of_export(name: str, revision: str | None) -> TaskTokenizer:
    """Load the tokenizer of an exported folder, or of a model on the hub, with transformers."""
    import transformers  # takes seconds, and `eval run` does not need it

    from canon_pretrain.hf.export import RECORD  # imports torch

    folder = Path(name)
    tokenizer: Any
    try:
        if (folder / HF_FILE).is_file():
            # not AutoTokenizer, which would ask whether to trust the model's code
            tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(name)
        else:
            tokenizer = transformers.AutoTokenizer.from_pretrained(
                name,
                trust_remote_code=False,
                revision=revision or "main",
                sp_model_kwargs={},  # no SentencePiece sampling, even if the config asks for it
            )
    except (OSError, ValueError, ImportError, KeyError) as error:
        reason = " ".join(f"no tokenizer can be loaded ({error})".split())
        raise UserError("eval.task_tokenizer", f"{name}: {reason}; {TOKENIZER_HINT}") from None

    # The same text always has the same ids.
    if tokenizer.is_fast:
        model = tokenizer.backend_tokenizer.model
        for option in RANDOM_OPTIONS:
            if hasattr(model, option):
                setattr(model, option, None)

    # Of our own export, the hash of the training tokenizer is recorded.
    try:
        sha256 = str(read_json(folder / RECORD)["tokenizer"]["sha256"])
    except (UnreadableFile, KeyError, TypeError):
        # not our export, or its tokenizer was added later
        vocabulary = json.dumps(sorted(tokenizer.get_vocab().items())).encode()
        sha256 = hashlib.sha256(vocabulary).hexdigest()

    def encode(text: str) -> list[int]:
        # not verbose: documents may exceed the model's length before they are cut
        return list(tokenizer.encode(text, add_special_tokens=False, verbose=False))

    def decode(ids: Sequence[int]) -> str:
        return str(
            tokenizer.decode(
                list(ids),
                skip_special_tokens=True,
                clean_up_tokenization_spaces=False,
            )
        )

    return TaskTokenizer(sha256, encode, decode)


def known_max_length(metadata: Mapping[str, Any]) -> int | None:
    """Return the model's maximum length in tokens from metadata or config.json, if known."""
    for name in ("max_length", *POSITIONS):
        if metadata.get(name) is not None:
            return int(metadata[name])
    try:
        folder = Path(str(metadata.get("pretrained")))
        config = read_json(folder / "config.json", finite=False)
        for name in POSITIONS:
            if config.get(name) is not None:
                return int(config[name])
    except (UnreadableFile, ValueError, TypeError):
        pass  # not an exported folder but the name of a model on the hub, or none
    return None


def lengths_over(prompts: Iterable[str], room: int, metadata: Mapping[str, Any]) -> list[int]:
    """Return the lengths in tokens of the prompts with more than `room` tokens."""
    # in ASCII a token has at least one character, and one may be put before the text
    unsure = [text for text in prompts if len(text) + 1 > room or not text.isascii()]
    if not unsure:
        return []  # without a tokenizer, which may not be known

    encode = task_tokenizer(metadata).encode
    lengths = [len(encode(text)) for text in unsure]
    return [length for length in lengths if length > room]


def check_fit(name: str, longest: int, *, answer_tokens: int, metadata: Mapping[str, Any]) -> None:
    """Raise UserError if the longest prompt and its answer exceed the model's length, if known.

    lm_eval would cut the beginning, and with it statements that the answer needs.
    """
    max_length = known_max_length(metadata)
    needed = longest + answer_tokens
    if max_length is not None and needed > max_length:
        raise UserError(
            "eval.prompt_too_long",
            f"{name}: prompts and answers of up to {needed} tokens exceed max_length "
            f"{max_length}: pass --max-length {needed}; for lm_eval, --model_args "
            f"max_length={needed},max_position_embeddings={needed}",
            expected=needed,
        )
