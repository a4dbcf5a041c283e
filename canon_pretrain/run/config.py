"""Experiment files: TOML with `extends`, checked key by key; our own sections. No torchtitan."""

import dataclasses
import functools
import json
import tomllib
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

from pydantic import TypeAdapter, ValidationError

from canon_pretrain.core.errors import UserError, nearest
from canon_pretrain.core.files import UnreadableFile, read_bytes

T = TypeVar("T")


@dataclass(frozen=True)
class Data:
    """The `[data]` section: which shards, in which order."""

    path: str = ""
    """Folder written by `python -m data_prep build`; holds train/ and validation/."""
    paths: list[str] = field(default_factory=list)
    """Instead of `path`: several such folders, whose windows are drawn by `weights`."""
    weights: list[float] = field(default_factory=list)
    """A number for each of `paths`, relative to the others: [7, 3] is [0.7, 0.3]."""
    order: Literal["random", "permute"] = "random"
    """random: windows begin anywhere, drawn with replacement (the paper's). permute: every window
    once an epoch, in a new order each epoch; of one folder only."""
    data_seed: int = 0
    """Seed of the sample order alone: window i of a run is a function of (data_seed, i)."""
    read_ahead: int = 8
    """Micro-batches that a thread of each rank reads ahead of the step; 0: read when needed."""

    @property
    def folders(self) -> list[str]:
        """All folders, in order; none where no data is named."""
        return self.paths or ([self.path] if self.path else [])

    @property
    def shares(self) -> list[float]:
        """A weight for each of `folders`."""
        return self.weights or [1.0] * len(self.folders)


@dataclass(frozen=True)
class Run:
    """The `[run]` section: how far this launch goes. It never changes what is computed."""

    stop_at: int | None = None
    """Stop after this step with a checkpoint; the schedule stays that of `training.steps`."""
    allow_changes: list[str] = field(default_factory=list)
    """Names (such as `optimizer.lr`) of what this launch may change in the run that it resumes.
    `code`: a job script takes the program as it is now, not the snapshot in RUN/code."""
    code: Literal["note", "refuse"] = "note"
    """Other source files than the last launch's: name them in the log, or refuse to resume."""
    heartbeat_s: float = 10.0
    """Between signs of life in lock.json and status.json; after six a lock may be taken over."""


@dataclass(frozen=True)
class Guards:
    """The `[guards]` section: which steps leave the weights as they are."""

    max_bad_steps: int = 5
    """In a row, of a loss or gradient that is not finite: the run ends as it was before them."""
    outlier_sigma: float | None = None
    """Skip a step whose gradient norm is more than this many standard deviations above the mean of
    the last `outlier_window` ones (OLMo's SkipStep: 6). Unset: never."""
    outlier_window: int = 128
    """Gradient norms that an outlier is judged by; nothing is, before half of them are there."""


@dataclass(frozen=True)
class Loss:
    """The `[loss]` section: what is minimised beside the cross-entropy; at most one of the two.

    The loss that is logged, judged and compared is the cross-entropy alone, in every run.
    """

    z_loss: float = 0.0
    """Adds this times logsumexp(logits)^2 for each token (PaLM: 1e-4)."""
    squared_loss: float = 0.0
    """Adds this times the token's own cross-entropy squared: what the released Part 4.2 models call
    z-loss (1e-4)."""
    chunk_tokens: int = 4096
    """Tokens whose logits exist at a time; 0: a micro-batch's. It changes nothing but rounding."""


def valid_world_sizes(global_batch_size: int, multiple_of: int = 1) -> list[int]:
    """Return the divisors of a global batch that are multiples of `multiple_of`."""
    counts = range(multiple_of, global_batch_size + 1, multiple_of)
    return [n for n in counts if global_batch_size % n == 0]


def read_experiment(path: Path, chain: tuple[Path, ...] = ()) -> dict[str, Any]:
    """Read a TOML file and all that it `extends`; later files win, key by key. Raises UserError.

    Paths are relative to the file that names them; `chain` are the files that led to this one.
    """
    resolved = path.resolve()
    if resolved in chain:
        names = " -> ".join(map(str, (*chain, resolved)))
        raise UserError("todo.config", f"{path}: `extends` goes in a circle: {names}")
    try:
        own = tomllib.loads(read_bytes(path, 1 << 20).decode())
    except UnreadableFile as error:
        named_by = f" (named by `extends` in {chain[-1]})" if chain else ""
        raise UserError(
            "todo.config", f"config file {error}{named_by}: expected a .toml file"
        ) from None
    except (ValueError, RecursionError) as error:
        why = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise UserError("todo.config", f"{path} is not valid TOML: {why}") from None
    given = own.pop("extends", [])
    bases = [given] if isinstance(given, str) else given
    if not isinstance(bases, list) or not all(isinstance(base, str) for base in bases):
        raise UserError(
            "todo.config", f"{path}: `extends` must be a path or a list of paths, not {given!r}"
        )
    read = (read_experiment(path.parent / base, (*chain, resolved)) for base in bases)
    return functools.reduce(merge, [*read, own], {})


def merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Return `base` updated by `over`: tables are merged, any other value is replaced."""
    both = [k for k, v in over.items() if isinstance(v, dict) and isinstance(base.get(k), dict)]
    return {**base, **over, **{key: merge(base[key], over[key]) for key in both}}


def to_toml(values: Mapping[str, Any]) -> str:
    """Return TOML that holds what `read_experiment` has returned, a line per section."""
    return "".join(f"{_text(key)} = {_text(value)}\n" for key, value in values.items())


def _text(value: Any) -> str:
    """Return a key or a value as TOML writes it."""
    if isinstance(value, list):
        return f"[{', '.join(map(_text, value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{_text(key)} = {_text(v)}' for key, v in value.items())}}}"
    if isinstance(value, bool | str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return str(value)  # numbers, and dates by ISO 8601


def build(cls: type[T], values: Mapping[str, Any], source: str, prefix: str = "") -> T:
    """Return an instance of dataclass `cls` from TOML `values`, every key and type checked."""
    hints = typing.get_type_hints(cls)
    names = [field.name for field in dataclasses.fields(cls)]  # type: ignore[arg-type]
    arguments = dict(values)
    for key, value in values.items():
        dotted, hint = f"{prefix}{key}", cast(Any, hints.get(key))
        if key not in names:
            near, known = nearest(key, names), f"known are: {', '.join(sorted(names))}"
            way_out = f"did you mean '{near}'?" if near else known
            kind = "key" if prefix else "section"
            raise UserError("todo.config", f"{source}: unknown {kind} '{dotted}': {way_out}")
        if isinstance(hint, type) and dataclasses.is_dataclass(hint):
            if not isinstance(value, dict):
                raise UserError(
                    "todo.config", f"{source}: '{dotted}' is a section, written [{dotted}]"
                )
            arguments[key] = build(hint, value, source, prefix=f"{dotted}.")
            continue
        try:
            TypeAdapter(hint).validate_python(value, strict=True)
        except ValidationError as error:
            expected = error.errors()[0]["msg"]
            raise UserError(
                "todo.config", f"{source}: '{dotted}' = {value!r}: {expected}"
            ) from None
    return cls(**arguments)
