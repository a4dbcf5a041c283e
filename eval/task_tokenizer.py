"""The evaluated model's tokenizer, inside a task: JRT cuts and Babilong measures with it.

A task's `custom_dataset` is called with metadata: ours from `eval run` (`tokenizer`: the data
folder), the harness's own from `lm_eval --model_args` (`pretrained`: an exported folder). Both name
the same tokenizer, and give the same ids and texts.
"""

import functools
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from canon_pretrain.core.errors import UserError
from canon_pretrain.data.shards import TokenShards
from canon_pretrain.data.tokenizer import FILE_NAMES, HF_FILE, load_tokenizer

HF_CONFIG = "tokenizer_config.json"
WAY_OUT = """name it with --metadata '{"tokenizer": "FOLDER"}': a data folder, an exported \
folder, or the file of a tokenizer"""


@dataclass(frozen=True, eq=False)
class TaskTokenizer:
    """Text to ids and back. `encode` adds neither BOS nor EOS, `decode` gives nothing for them.

    `name` is where it is from. `sha256` is that of its file; of an export of ours that of the
    training tokenizer which it was made from.
    """

    name: str
    sha256: str
    encode: Callable[[str], list[int]]
    decode: Callable[[Sequence[int]], str]


def task_tokenizer(metadata: Mapping[str, Any]) -> TaskTokenizer:
    """The tokenizer that a task's metadata names; loaded once in a process.

    `tokenizer` (folder or file) goes before `pretrained` (an exported folder, or a model's name).
    A folder with a tokenizer_config.json is read as `lm_eval --model hf` reads it, any other as the
    data folder that it is. Raises UserError where none is named or it can't be read.
    """
    given = metadata.get("tokenizer") or metadata.get("pretrained")
    if not given:
        raise UserError(f"this task needs the evaluated model's tokenizer: {WAY_OUT}")
    path = Path(str(given)).expanduser()
    if path.exists() and not (path / HF_CONFIG).is_file():
        return _ours(str(path), _stamp(path))
    # never left to its default: transformers would ask on the terminal
    options = {"trust_remote_code": bool(metadata.get("trust_remote_code", False))}
    if "revision" in metadata:
        options["revision"] = metadata["revision"]
    return _exported(str(path) if path.exists() else str(given), _stamp(path), **options)


def _stamp(path: Path) -> tuple[int, ...]:
    """Changes when the tokenizer there is written anew."""
    files = [path, *(path / name for name in (*FILE_NAMES, HF_CONFIG))]
    return tuple(file.stat().st_mtime_ns if file.is_file() else 0 for file in files)


@functools.lru_cache(maxsize=4)
def _ours(path: str, stamp: tuple[int, ...]) -> TaskTokenizer:
    folder, eos = Path(path), None
    try:
        if (folder / HF_FILE).is_file() and (folder / "train").is_dir():
            # such a file may leave open which token ends a document; the shards know
            with TokenShards.open(folder / "train") as shards:
                eos = shards.eos_id
        found = load_tokenizer(folder, eos=eos)
    except UserError as error:
        raise UserError(f"{error}. This task reads text: {WAY_OUT}") from None
    return TaskTokenizer(
        name=str(folder / found.file_name if folder.is_dir() else folder),
        sha256=found.sha256,
        encode=lambda text: found.encode(text).tolist(),
        decode=lambda ids: found.decode(list(ids)),
    )


@functools.lru_cache(maxsize=4)
def _exported(name: str, stamp: tuple[int, ...], **options: Any) -> TaskTokenizer:
    import transformers  # takes seconds, and runs of ours do without

    try:
        if (Path(name) / HF_FILE).is_file():
            # its files alone: config.json may name code of the model's, which is not needed here
            found = transformers.PreTrainedTokenizerFast.from_pretrained(name)
        else:
            found = transformers.AutoTokenizer.from_pretrained(name, **options)
    except (OSError, ValueError, ImportError, KeyError) as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise UserError(
            f"{name}: no tokenizer can be loaded from there ({reason}); {WAY_OUT}"
        ) from None

    def encode(text: str) -> list[int]:
        # not verbose: a document longer than the model's length is no mistake before it is cut
        return [int(i) for i in found.encode(text, add_special_tokens=False, verbose=False)]

    def decode(ids: Sequence[int]) -> str:
        settings = {"skip_special_tokens": True, "clean_up_tokenization_spaces": False}
        return str(found.decode(list(ids), **settings))

    return TaskTokenizer(name, _sha256(Path(name), found), encode, decode)


def _sha256(folder: Path, loaded: Any) -> str:
    from canon_pretrain.hf.export import RECORD  # imports torch

    if (folder / RECORD).is_file():
        try:
            return str(json.loads((folder / RECORD).read_bytes())["tokenizer"]["sha256"])
        except (ValueError, KeyError, TypeError):
            pass  # an export without a tokenizer, which got one from elsewhere since
    for file in FILE_NAMES:
        if (folder / file).is_file():
            return hashlib.sha256((folder / file).read_bytes()).hexdigest()
    words = json.dumps(sorted(loaded.get_vocab().items()))
    return hashlib.sha256(words.encode()).hexdigest()
