"""What a build will do, fixed before it starts: inputs, units, tokenizer, options, one hash.

plan.json makes a part's content depend on the plan alone, never on the number of workers or on when
a run was killed: a second run on a folder must have the same plan, and is refused otherwise.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

from canon_pretrain.core.errors import UserError
from canon_pretrain.core.files import read_record, sha256_file, write_json
from canon_pretrain.data.shards import MAX_SHARD_TOKENS, VERSION

PLAN = "plan.json"
MAX_PLAN_BYTES = 1 << 32
MAX_LINE_BYTES = 64_000_000
HASH_AHEAD_BYTES = 256 << 20
"""Inputs of no more in all are hashed before the plan is made: a second of reading."""
MAX_DIFFERENCES = 8
"""Named in an error: an upgraded Python changes hundreds of inputs."""


@dataclass(frozen=True)
class Input:
    """An input's path below the source's root, bytes, and SHA-256; "" where only marks know it."""

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
    """What else decides the bytes; a unit is `unit_files` inputs, or about `unit_bytes` of them."""

    holdout: float
    bos: bool = False
    unit_files: int | None = None
    unit_bytes: int | None = None
    max_part_tokens: int = MAX_SHARD_TOKENS
    max_line_bytes: int = MAX_LINE_BYTES

    def __post_init__(self) -> None:
        if not 0 <= self.holdout < 1:
            raise UserError(
                "todo.plan", f"--holdout {self.holdout} is outside [0, 1); 0.02 holds out 2 %"
            )


@dataclass(frozen=True)
class Limits:
    """Where the training stream ends: which of the plan's parts the manifest lists."""

    max_documents: int | None = None
    max_tokens: int | None = None

    def reached(self, documents: int, tokens: int) -> bool:
        """Whether a stream of so many documents and tokens is long enough to be cut."""
        pairs = ((documents, self.max_documents), (tokens, self.max_tokens))
        return any(limit is not None and count >= limit for count, limit in pairs)


NO_LIMITS = Limits()


@dataclass(frozen=True)
class Plan:
    """The inputs in the stream's order, the units as ranges [first, end) of them, and the rest.

    `root`, where the inputs were, and `version`, the parts' format, are not part of its identity.
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
        identity = {key: value for key, value in self.record().items() if key != "root"}
        canonical = json.dumps(identity, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()

    def record(self) -> dict[str, Any]:
        """Return the fields as JSON values, without the version and a default limit of lines."""
        fields = asdict(self)
        del fields["version"]
        if self.options.max_line_bytes == MAX_LINE_BYTES:
            del fields["options"]["max_line_bytes"]
        return fields

    def header(self) -> dict[str, Any]:
        """Return what the manifests of both splits take from the plan."""
        return {
            "vocab_size": self.tokenizer.vocab_size,
            "eos_id": self.tokenizer.eos_id,
            "tokenizer_sha256": self.tokenizer.sha256,
            "plan_sha256": self.sha256,
            "version": self.version,
        }


def hash_small_inputs(root: Path, inputs: Sequence[Input]) -> tuple[Input, ...]:
    """Return the inputs with their hashes, if all are small together and on disk."""
    if sum(known.size for known in inputs) > HASH_AHEAD_BYTES:
        return tuple(inputs)
    return tuple(
        replace(known, sha256=known.sha256 or sha256_file(root / known.path)) for known in inputs
    )


def make_input_groups(inputs: Sequence[Input], options: Options) -> tuple[tuple[int, int], ...]:
    """Return ranges [first, end) of consecutive inputs, at least one each, as the options say."""
    ends = []
    files = size = 0
    for index, known in enumerate(inputs, 1):
        files, size = files + 1, size + known.size
        is_full = size >= (options.unit_bytes or 0)
        if options.unit_files is not None:
            is_full = files == options.unit_files
        if is_full or index == len(inputs):
            ends.append(index)
            files = size = 0
    return tuple(pairwise([0, *ends]))


def save_plan(folder: Path, plan: Plan) -> None:
    write_json(folder / PLAN, {"version": plan.version, "sha256": plan.sha256, **plan.record()})


@dataclass(frozen=True)
class _Header:
    version: Literal[2, 3]
    sha256: str


def load_plan(folder: Path) -> Plan:
    """Read plan.json. Raises UserError if it is missing, damaged or of another version."""
    path = folder / PLAN
    if not path.exists():
        raise UserError(
            "todo.plan", f"{folder}: no {PLAN}, so not a folder of `python -m data_prep build`"
        )
    try:
        header = read_record(path, _Header, max_bytes=MAX_PLAN_BYTES)
        plan = read_record(path, Plan, max_bytes=MAX_PLAN_BYTES)
        if plan.sha256 != header.sha256:
            raise UserError("todo.plan", "its content does not fit its hash")
    except UserError as error:
        raise UserError(
            "todo.plan",
            f"{path}: damaged ({error}); restore this file from a copy, or build into a new folder",
        ) from None
    return plan


def check_same_plan(folder: Path, old: Plan, new: Plan) -> None:
    """Raise UserError naming each field old -> new where `new` is not the plan of `folder`."""
    if lines := differences(old, new):
        more = len(lines) - MAX_DIFFERENCES
        shown = lines[:MAX_DIFFERENCES] + ([f"and {more} more"] if more > 0 else [])
        raise UserError(
            "todo.plan",
            f"{folder} was built from another plan; nothing was written. What differs:\n  "
            + "\n  ".join(shown)
            + "\nGive the old values again, or another --out.",
        )


def differences(old: Plan, new: Plan) -> list[str]:
    """Return each difference as "field: old -> new", options first, then inputs by path."""

    def fields(plan: Plan) -> dict[str, Any]:
        names = ("source", "source_version", "text_field", "group_field")
        named = {name: getattr(plan, name) for name in names} | asdict(plan.options)
        named |= {f"tokenizer {key}": value for key, value in asdict(plan.tokenizer).items()}
        for known in plan.inputs:
            sha256 = known.sha256[:12] or "unknown"
            named[f"input {known.path}"] = f"{known.size} bytes, sha256 {sha256}"
        return named

    before, after = fields(old), fields(new)
    both = [(name, before.get(name), after.get(name)) for name in before | after]
    lines = [f"{name}: {was} -> {now}" for name, was, now in both if was != now]
    if not lines and old != new:
        return ["inputs: in another order or in other units"]
    return lines


def is_held_out(utf8: bytes, holdout: float) -> bool:
    """Whether a document, by its text alone, is of validation: equal texts are on one side."""
    digest = hashlib.sha256(b"holdout" + utf8).digest()
    return int.from_bytes(digest[:8], "big") / 2**64 < holdout
