"""The plan of a build, fixed before it starts: inputs, input groups, tokenizer, options, one hash.

Shards depend on plan.json alone, not on the number of workers or on when a run was killed; a second
run on a folder must have the same plan.
"""

import hashlib
import json
from collections.abc import Iterable, Sequence
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
MIN_CUT_BYTES = 100
HASH_AHEAD_BYTES = 256 << 20
"""Inputs of at most this total size are hashed before the plan is made (about a second)."""
MIN_HELD_OUT = 20
"""Held-out documents that comparisons need."""
AIMED_HELD_OUT = 30
"""Expected number, with which a hash nearly always chooses MIN_HELD_OUT."""
MAX_HOLDOUT = 0.2
"""The largest share to propose."""
MAX_DIFFERENCES = 8
"""Shown in an error: another Python version changes hundreds of inputs."""


@dataclass(frozen=True)
class Input:
    """An input: path below the source's root, bytes, SHA-256 ("" if unknown before it is read)."""

    path: str
    size: int
    sha256: str


@dataclass(frozen=True)
class TokenizerRecord:
    """The tokenizer of a plan, and how it was requested ("train:N" or "file")."""

    requested: str
    sha256: str
    vocab_size: int
    bos_id: int
    eos_id: int
    probe_ids: dict[str, list[int]] = field(hash=False)


@dataclass(frozen=True)
class Options:
    """Options that determine the bytes of shards.

    An input group has `unit_files` inputs, or inputs of about `unit_bytes` bytes. Documents of more
    than `max_document_bytes` are cut.
    """

    holdout: float
    bos: bool = False
    unit_files: int | None = None
    unit_bytes: int | None = None
    max_part_tokens: int = MAX_SHARD_TOKENS
    max_line_bytes: int = MAX_LINE_BYTES
    max_document_bytes: int | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.holdout < 1:
            raise UserError(
                "option.invalid",
                f"--holdout {self.holdout}: expected at least 0 and less than 1",
                option="--holdout",
            )
        if self.max_document_bytes is not None and self.max_document_bytes < MIN_CUT_BYTES:
            raise UserError(
                "option.invalid",
                f"--max-document-bytes {self.max_document_bytes}: expected {MIN_CUT_BYTES} or more",
                option="--max-document-bytes",
            )


@dataclass(frozen=True)
class Limits:
    """Where the training stream ends."""

    max_documents: int | None = None
    max_tokens: int | None = None

    def reached(self, documents: int, tokens: int) -> bool:
        """Return whether so many documents and tokens reach a limit."""
        if self.max_documents is not None and documents >= self.max_documents:
            return True
        return self.max_tokens is not None and tokens >= self.max_tokens


NO_LIMITS = Limits()


@dataclass(frozen=True)
class Plan:
    """A build's inputs in order, `units` (input groups as ranges [first, end)), and options.

    `root` (the folder of the inputs) and `version` (of the format) are not part of its identity.
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
        """Hex SHA-256 of the plan's canonical JSON."""
        identity = self.record()
        del identity["root"]
        canonical = json.dumps(identity, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()

    def record(self) -> dict[str, Any]:
        """Return the fields as JSON values, without the version and defaults of later options."""
        fields = asdict(self)
        del fields["version"]

        # Plans of builds before these options keep their hash.
        if self.options.max_line_bytes == MAX_LINE_BYTES:
            del fields["options"]["max_line_bytes"]
        if self.options.max_document_bytes is None:
            del fields["options"]["max_document_bytes"]
        return fields

    def header(self) -> dict[str, Any]:
        """Return the fields that the manifests of both splits share."""
        return {
            "vocab_size": self.tokenizer.vocab_size,
            "eos_id": self.tokenizer.eos_id,
            "tokenizer_sha256": self.tokenizer.sha256,
            "plan_sha256": self.sha256,
            "version": self.version,
        }


def total_size(inputs: Iterable[Input]) -> int:
    return sum(source_input.size for source_input in inputs)


def hash_small_inputs(root: Path, inputs: tuple[Input, ...]) -> tuple[Input, ...]:
    """Return the inputs, with hashes if their total size is small."""
    if total_size(inputs) > HASH_AHEAD_BYTES:
        return inputs

    hashed_inputs = []
    for source_input in inputs:
        sha256 = source_input.sha256 or sha256_file(root / source_input.path)
        hashed_inputs.append(replace(source_input, sha256=sha256))
    return tuple(hashed_inputs)


def make_input_groups(inputs: Sequence[Input], options: Options) -> tuple[tuple[int, int], ...]:
    """Return ranges [first, end) of consecutive inputs, each of at least one."""
    ends = [0]
    num_bytes = 0
    for end, source_input in enumerate(inputs, 1):
        num_bytes += source_input.size
        if options.unit_files is not None:
            is_full = end - ends[-1] == options.unit_files
        else:
            is_full = num_bytes >= (options.unit_bytes or 0)
        if is_full or end == len(inputs):
            ends.append(end)
            num_bytes = 0
    return tuple(pairwise(ends))


def save_plan(folder: Path, plan: Plan) -> None:
    content = {"version": plan.version, "sha256": plan.sha256, **plan.record()}
    write_json(folder / PLAN, content)


@dataclass(frozen=True)
class _Header:
    version: Literal[2, 3]
    sha256: str


def load_plan(folder: Path) -> Plan:
    """Read plan.json. Raises UserError if it is missing, damaged or of another version."""
    path = folder / PLAN
    if not path.exists():
        raise UserError(
            "plan.missing", f"{folder}: no {PLAN}, so not a folder of `canon data build`", path=path
        )

    try:
        # The hash is in the file, but not a field of the plan.
        header = read_record(path, _Header, max_bytes=MAX_PLAN_BYTES)
        plan = read_record(path, Plan, max_bytes=MAX_PLAN_BYTES)
        if plan.sha256 != header.sha256:
            raise UserError("plan.damaged", "its content does not match its hash")
    except UserError as error:
        raise UserError(
            "plan.damaged",
            f"{path}: damaged ({error}); restore it from a copy, or build into a new folder",
            path=path,
        ) from None
    return plan


def check_same_plan(folder: Path, old: Plan, new: Plan) -> None:
    """Raise UserError with each difference if `new` is not the plan of `folder`."""
    lines = differences(old, new)
    if not lines:
        return

    shown_lines = lines[:MAX_DIFFERENCES]
    if len(lines) > MAX_DIFFERENCES:
        shown_lines.append(f"and {len(lines) - MAX_DIFFERENCES} more")
    text = "".join(f"\n  {line}" for line in shown_lines)
    raise UserError(
        "plan.changed",
        f"{folder} was built from another plan:{text}\nPass the old values or another --out",
        path=folder,
        differences=lines,
    )


def differences(old: Plan, new: Plan) -> list[str]:
    """Return each difference as "field: old -> new", options first, then inputs by path."""
    old_values = _values_by_name(old)
    new_values = _values_by_name(new)
    lines = []
    for name in old_values | new_values:
        old_value = old_values.get(name)
        new_value = new_values.get(name)
        if old_value != new_value:
            lines.append(f"{name}: {old_value} -> {new_value}")

    # The values have no order, and not the ranges of the input groups.
    if not lines and old != new:
        return ["inputs: in another order or in other groups"]
    return lines


def _values_by_name(plan: Plan) -> dict[str, Any]:
    """Return what can differ between plans, by the names that a user reads."""
    values: dict[str, Any] = {
        "source": plan.source,
        "source_version": plan.source_version,
        "text_field": plan.text_field,
        "group_field": plan.group_field,
        **asdict(plan.options),
        **{f"tokenizer {name}": value for name, value in asdict(plan.tokenizer).items()},
    }

    for source_input in plan.inputs:
        sha256 = source_input.sha256[:12] or "unknown"
        values[f"input {source_input.path}"] = f"{source_input.size} bytes, sha256 {sha256}"
    return values


def is_held_out(utf8: bytes, holdout: float) -> bool:
    """Return whether a document is for validation, by a hash of its text alone."""
    digest = hashlib.sha256(b"holdout" + utf8).digest()
    uniform = int.from_bytes(digest[:8], "big") / 2**64  # in [0, 1)
    return uniform < holdout


def all_held_out(prefix: str, num_documents: int, holdout: float) -> UserError:
    """Return the error of a build without a document to train on."""
    return UserError(
        "data.all_held_out",
        f"{prefix}all {num_documents:,} documents were held out: --holdout {holdout:g} chooses by "
        "a hash of the text, so equal texts go together; add other documents, or lower --holdout",
        given=holdout,
        documents=num_documents,
    )


def holdout_for(num_documents: float) -> float:
    """Return the share that holds out AIMED_HELD_OUT documents, or MAX_HOLDOUT if they are few."""
    return min(MAX_HOLDOUT, AIMED_HELD_OUT / max(num_documents, 1.0))
