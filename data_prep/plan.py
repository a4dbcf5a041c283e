"""What a build will do, fixed before it starts: inputs, units, tokenizer, options, one hash.

Between the sources and the build. plan.json makes a part's content depend on the plan alone, never
on the number of workers or on when a run was killed: a second run on a folder must have the same
plan, and is otherwise refused with what differs.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from canon_pretrain.data.shards import MAX_PART_TOKENS
from canon_pretrain.errors import UserError
from canon_pretrain.files import write_json

VERSION = 1
PLAN = "plan.json"
UNIT_BYTES = 2_000_000
# Enough to see what happened; an upgraded Python changes hundreds of inputs.
MAX_DIFFERENCES = 8


@dataclass(frozen=True)
class Input:
    """One input file: its path below the source's root, its size in bytes and its content."""

    path: str
    size: int
    sha256: str


@dataclass(frozen=True)
class TokenizerRecord:
    """The tokenizer of a plan: how it was asked for ("train:N" or "file") and what it is."""

    requested: str
    sha256: str
    vocab_size: int
    bos_id: int
    eos_id: int
    probe_ids: dict[str, list[int]]


@dataclass(frozen=True)
class Options:
    """What else decides the bytes of the parts."""

    holdout: float
    unit_bytes: int = UNIT_BYTES
    max_part_tokens: int = MAX_PART_TOKENS

    def __post_init__(self) -> None:
        if not 0 <= self.holdout < 1:
            raise UserError(f"--holdout {self.holdout} is outside [0, 1); 0.02 holds out 2 %")


@dataclass(frozen=True)
class Plan:
    """The inputs in the stream's order, the units as ranges [first, end) of them, and the rest."""

    source: str
    source_version: str
    options: Options
    tokenizer: TokenizerRecord
    units: tuple[tuple[int, int], ...]
    inputs: tuple[Input, ...]

    @property
    def sha256(self) -> str:
        """The hex SHA-256 of the plan's canonical JSON."""
        canonical = json.dumps(asdict(self), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()


def hash_inputs(root: Path, paths: Sequence[str]) -> tuple[Input, ...]:
    """Size and hash of every input. Raises UserError for one that cannot be read."""
    inputs = []
    for path in paths:
        content = read_bytes(root / path)
        inputs.append(Input(path, len(content), hashlib.sha256(content).hexdigest()))
    return tuple(inputs)


def read_input(root: Path, known: Input) -> bytes:
    """The bytes of an input of the plan. Raises UserError where they are not the plan's."""
    content = read_bytes(root / known.path)
    if hashlib.sha256(content).hexdigest() != known.sha256:
        raise UserError(
            f"{root / known.path}: changed since the plan was made ({known.size} bytes then, "
            f"{len(content)} now); restore it, or build into a new folder"
        )
    return content


def read_bytes(path: Path) -> bytes:
    """The file's bytes. Raises UserError."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise UserError(
            f"{path}: cannot be read: {error.strerror}; every input is needed"
        ) from None


def cut_units(inputs: Sequence[Input], unit_bytes: int) -> tuple[tuple[int, int], ...]:
    """Ranges [first, end) of consecutive inputs of about `unit_bytes` each, at least one input."""
    units = []
    first = size = 0
    for index, known in enumerate(inputs):
        size += known.size
        if size >= unit_bytes:
            units.append((first, index + 1))
            first, size = index + 1, 0
    if first < len(inputs):
        units.append((first, len(inputs)))
    return tuple(units)


def save_plan(folder: Path, plan: Plan) -> None:
    """Write plan.json, with its own hash in front."""
    write_json(folder / PLAN, {"version": VERSION, "sha256": plan.sha256, **asdict(plan)})


def load_plan(folder: Path) -> Plan:
    """Read plan.json. Raises UserError where it is missing, damaged or of another version."""
    path = folder / PLAN
    try:
        stored: dict[str, Any] = json.loads(path.read_bytes())
        version = stored.pop("version")
        sha256 = stored.pop("sha256")
    except FileNotFoundError:
        raise UserError(
            f"{folder}: no {PLAN}, so not a folder of `python -m data_prep build`"
        ) from None
    except (ValueError, KeyError, AttributeError, TypeError):
        raise UserError(f"{path}: damaged; {_RESTORE}") from None
    if version != VERSION:
        raise UserError(
            f"{path}: version {version!r}, this program reads {VERSION}; build into a new folder"
        )
    try:
        plan = Plan(
            source=stored.pop("source"),
            source_version=stored.pop("source_version"),
            options=Options(**stored.pop("options")),
            tokenizer=TokenizerRecord(**stored.pop("tokenizer")),
            units=tuple((first, end) for first, end in stored.pop("units")),
            inputs=tuple(Input(**entry) for entry in stored.pop("inputs")),
        )
    except (KeyError, TypeError, ValueError, UserError):
        raise UserError(f"{path}: damaged; {_RESTORE}") from None
    if stored or plan.sha256 != sha256:
        raise UserError(f"{path}: damaged: its content does not fit its hash; {_RESTORE}")
    return plan


_RESTORE = "restore this file from a copy, or build into a new folder"


def refuse_changes(folder: Path, old: Plan, new: Plan) -> None:
    """Raise UserError naming each field old -> new where `new` is not the plan of `folder`."""
    lines = differences(old, new)
    if lines:
        more = len(lines) - MAX_DIFFERENCES
        shown = lines[:MAX_DIFFERENCES] + ([f"and {more} more"] if more > 0 else [])
        raise UserError(
            f"{folder} was built from another plan; nothing was written. What differs:\n  "
            + "\n  ".join(shown)
            + "\nGive the old values again, or another --out."
        )


def differences(old: Plan, new: Plan) -> list[str]:
    """Each difference as "field: old -> new", options first, then inputs by path."""
    lines = []
    pairs = [("source", old.source, new.source)]
    pairs += [("source_version", old.source_version, new.source_version)]
    pairs += [(key, value, asdict(new.options)[key]) for key, value in asdict(old.options).items()]
    old_tokenizer, new_tokenizer = asdict(old.tokenizer), asdict(new.tokenizer)
    pairs += [(f"tokenizer {key}", old_tokenizer[key], new_tokenizer[key]) for key in old_tokenizer]
    lines += [f"{name}: {before} -> {after}" for name, before, after in pairs if before != after]
    before = {known.path: known for known in old.inputs}
    after = {known.path: known for known in new.inputs}
    for path in [*before, *(path for path in after if path not in before)]:
        one, other = _describe(before.get(path)), _describe(after.get(path))
        if before.get(path) != after.get(path):
            lines.append(f"input {path}: {one} -> {other}")
    if not lines and old != new:
        lines.append("inputs: the same, in another order or other units")
    return lines


def _describe(known: Input | None) -> str:
    return f"{known.size} bytes, sha256 {known.sha256[:12]}" if known else "none"


def is_held_out(utf8: bytes, holdout: float) -> bool:
    """Whether a document, by its UTF-8 text alone, belongs to the validation split.

    So equal texts fall on the same side, and stay there when documents are added.
    """
    digest = hashlib.sha256(b"holdout" + utf8).digest()
    return int.from_bytes(digest[:8], "big") / 2**64 < holdout
