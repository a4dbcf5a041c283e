"""What a build will do, fixed before it starts: inputs, units, tokenizer, options, one hash.

Between the sources and the build. plan.json makes a part's content depend on the plan alone, never
on the number of workers or on when a run was killed: a second run on a folder must have the same
plan, and is otherwise refused with what differs.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from canon_pretrain.core.errors import UserError
from canon_pretrain.core.files import read_record, sha256_file, write_json
from canon_pretrain.data.shards import MAX_PART_TOKENS, VERSION, WITHOUT_BYTE_ENDS

PLAN = "plan.json"
MAX_PLAN_BYTES = 1 << 32
MAX_LINE_BYTES = 64_000_000
HASH_AHEAD_BYTES = 256 << 20
"""Inputs of no more in all are hashed before the plan is made: a second of reading."""
MAX_DIFFERENCES = 8
"""Named in an error: an upgraded Python changes hundreds of inputs."""


@dataclass(frozen=True)
class Input:
    """One input file: its path below the source's root, its size in bytes and its content.

    `sha256` is "" if it is not known and the inputs are too large to read them twice: they are then
    hashed while they are read, and the commit marks have what was found.
    """

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
    probe_ids: dict[str, list[int]] = field(hash=False)


@dataclass(frozen=True)
class Options:
    """What else decides the bytes of the parts.

    A unit is `unit_files` consecutive inputs or, if that is None, inputs of about `unit_bytes`
    together; both None: the source's own rule. `bos` puts the BOS id before every document.
    """

    holdout: float
    bos: bool = False
    unit_files: int | None = None
    unit_bytes: int | None = None
    max_part_tokens: int = MAX_PART_TOKENS
    max_line_bytes: int = MAX_LINE_BYTES

    def __post_init__(self) -> None:
        if self.max_line_bytes < 1:
            raise UserError(f"--max-line-bytes is {self.max_line_bytes}, expected at least 1")
        if not 0 <= self.holdout < 1:
            raise UserError(f"--holdout {self.holdout} is outside [0, 1); 0.02 holds out 2 %")


@dataclass(frozen=True)
class Limits:
    """Where the training stream ends: after so many documents, or tokens; None: no limit.

    Not part of the plan: they say which of its parts a manifest lists, not what is in them.
    """

    max_documents: int | None = None
    max_tokens: int | None = None

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if value is not None and value < 1:
                raise UserError(f"--{name.replace('_', '-')} is {value}, expected at least 1")

    def reached(self, documents: int, tokens: int) -> bool:
        """Whether a stream of so many documents and tokens is long enough to be cut."""
        return (self.max_documents is not None and documents >= self.max_documents) or (
            self.max_tokens is not None and tokens >= self.max_tokens
        )


NO_LIMITS = Limits()


@dataclass(frozen=True)
class Plan:
    """The inputs in the stream's order, the units as ranges [first, end) of them, and the rest.

    `root`, the folder of the inputs when the plan was made, and `version`, the format of the parts,
    are not part of the plan's identity: inputs may move, and a folder keeps its format.
    """

    source: str
    source_version: str
    text_field: str
    group_field: str | None
    options: Options
    tokenizer: TokenizerRecord
    units: tuple[tuple[int, int], ...]
    inputs: tuple[Input, ...]
    root: str = field(default="", compare=False)
    version: int = field(default=VERSION, compare=False)

    @cached_property
    def sha256(self) -> str:
        """The hex SHA-256 of the plan's canonical JSON."""
        identity = self.record()
        del identity["root"]
        canonical = json.dumps(identity, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()

    def record(self) -> dict[str, Any]:
        """Return the fields as JSON values, without the version and a default limit of lines."""
        fields = asdict(self)
        del fields["version"]
        if self.options.max_line_bytes == MAX_LINE_BYTES:
            del fields["options"]["max_line_bytes"]
        return fields

    def unit_inputs(self, unit: int) -> tuple[Input, ...]:
        """Return the inputs of a unit, in order."""
        first, end = self.units[unit]
        return self.inputs[first:end]


def hash_small(root: Path, inputs: Sequence[Input]) -> tuple[Input, ...]:
    """Return the inputs with their hashes, if all are small together and on disk.

    So a small input that was changed, at the same size too, is refused before anything is written.
    Raises UserError for an input that cannot be read or has another size than listed.
    """
    if sum(known.size for known in inputs) > HASH_AHEAD_BYTES:
        return tuple(inputs)
    hashed = []
    for known in inputs:
        if not known.sha256:
            path = root / known.path
            try:
                size, sha256 = path.stat().st_size, sha256_file(path)
            except OSError as error:
                raise UserError(
                    f"{path}: cannot be read: {error.strerror}; every input is needed"
                ) from None
            if size != known.size:
                raise UserError(
                    f"{path}: {size} bytes, {known.size} a moment ago; is it being written?"
                )
            known = replace(known, sha256=sha256)
        hashed.append(known)
    return tuple(hashed)


def cut_units(inputs: Sequence[Input], options: Options) -> tuple[tuple[int, int], ...]:
    """Return ranges [first, end) of consecutive inputs, at least one each, as the options say."""
    if options.unit_files is not None:
        step = options.unit_files
        return tuple((at, min(at + step, len(inputs))) for at in range(0, len(inputs), step))
    assert options.unit_bytes is not None
    units = []
    first = size = 0
    for index, known in enumerate(inputs):
        size += known.size
        if size >= options.unit_bytes:
            units.append((first, index + 1))
            first, size = index + 1, 0
    if first < len(inputs):
        units.append((first, len(inputs)))
    return tuple(units)


def save_plan(folder: Path, plan: Plan) -> None:
    """Write plan.json, with its own hash in front."""
    content = {"version": plan.version, "sha256": plan.sha256, **plan.record()}
    write_json(folder / PLAN, content)


@dataclass(frozen=True)
class _Header:
    version: int
    sha256: str


def load_plan(folder: Path) -> Plan:
    """Read plan.json. Raises UserError if it is missing, damaged or of another version."""
    path = folder / PLAN
    restore = "restore this file from a copy, or build into a new folder"
    if not path.exists():
        raise UserError(f"{folder}: no {PLAN}, so not a folder of `python -m data_prep build`")
    try:
        header = read_record(path, _Header, max_bytes=MAX_PLAN_BYTES)
        is_known = header.version in (WITHOUT_BYTE_ENDS, VERSION)
        plan = read_record(path, Plan, max_bytes=MAX_PLAN_BYTES) if is_known else None
    except UserError as error:
        raise UserError(f"{path}: damaged ({error}); {restore}") from None
    if plan is None:
        raise UserError(
            f"{path}: version {header.version}, this program reads {WITHOUT_BYTE_ENDS} and "
            f"{VERSION}; build into a new folder"
        )
    if plan.sha256 != header.sha256:
        raise UserError(f"{path}: damaged: its content does not fit its hash; {restore}")
    return plan


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
    """Return each difference as "field: old -> new", options first, then inputs by path."""

    def fields(plan: Plan) -> dict[str, Any]:
        names = ("source", "source_version", "text_field", "group_field")
        tokenizer = {f"tokenizer {key}": value for key, value in asdict(plan.tokenizer).items()}
        return {name: getattr(plan, name) for name in names} | asdict(plan.options) | tokenizer

    def described(known: Input | None) -> str:
        if known is None:
            return "none"
        return f"{known.size} bytes, sha256 {known.sha256[:12] or 'unknown'}"

    new_fields = fields(new)
    lines = [
        f"{name}: {before} -> {new_fields[name]}"
        for name, before in fields(old).items()
        if before != new_fields[name]
    ]
    before = {known.path: known for known in old.inputs}
    after = {known.path: known for known in new.inputs}
    lines += [
        f"input {path}: {described(before.get(path))} -> {described(after.get(path))}"
        for path in dict.fromkeys([*before, *after])
        if before.get(path) != after.get(path)
    ]
    if not lines and old != new:
        lines.append("inputs: the same, in another order or other units")
    return lines


def is_held_out(utf8: bytes, holdout: float) -> bool:
    """Whether a document, by its UTF-8 text alone, belongs to the validation split.

    So equal texts fall on the same side, and stay there when documents are added.
    """
    digest = hashlib.sha256(b"holdout" + utf8).digest()
    return int.from_bytes(digest[:8], "big") / 2**64 < holdout
