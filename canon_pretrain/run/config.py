"""Experiment files (TOML with `extends`) and this project's own sections. No torchtitan."""

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
class Task:
    """The `[data.task]` section: a synthetic task instead of shards. Unset: the task's value."""

    name: str = ""
    """Generate the data: depo1, depo2, brevo1, brevo2, capo, mano, lano or copy."""
    n: int | None = None
    """Depo, Brevo: the most vertices; Copy: the tokens to copy."""
    k: int | None = None
    """Depo: the most hops of a query."""
    vocab: int | None = None
    """Depo, Brevo: names have tokens 1 to vocab, the last one vocab + 1 to 2 vocab."""
    name_tokens: int | list[int] | None = None
    """Depo, Brevo: the tokens of a name, or the fewest and the most."""
    n_weight: str | None = None
    """Depo, Brevo: sizes n are drawn with weight 1 / this: "n+sqrt(N)" or "sqrt(N+n)"."""
    exact_n: bool | None = None
    """Depo, Brevo: n vertices in each instance."""
    exact_k: bool | None = None
    """Depo: k hops in each query."""
    last_query: bool | None = None
    """Brevo: query the last vertex, as the released generator."""
    l: int | None = None  # noqa: E741
    """Mano: the most operators of an expression."""
    modulus: int | None = None
    """Mano: the modulus of the arithmetic."""
    synonyms: bool | None = None
    """Mano: two ids for each mark, as the released generator."""
    exact_l: bool | None = None
    """Mano: l operators in each expression."""
    grammar: str | None = None
    """Lano: cfg3f, cfg3j or cfg3k."""
    root: int | None = None
    """Lano: the symbol that sentences derive from; 0: the grammar's."""
    people: int | None = None
    """Capo: the number of biographies."""
    exposures: int | None = None
    """Capo: how often each person is seen, each time in other words."""
    loss_on: Literal["answers", "all"] | None = None
    """Labels that the loss counts."""

    @property
    def given(self) -> dict[str, Any]:
        """The settings that are set."""
        own = ((key, value) for key, value in vars(self).items() if key != "name")
        return {key: value for key, value in own if value is not None}


@dataclass(frozen=True)
class Data:
    """The `[data]` section: which shards, in which order; or which task."""

    path: str = ""
    """Folder written by `canon data build`; holds train/ and validation/."""
    paths: list[str] = field(default_factory=list)
    """Instead of `path`: several such folders, sampled by `weights`."""
    weights: list[float] = field(default_factory=list)
    """Relative sampling weight of each of `paths`: [7, 3] is [0.7, 0.3]."""
    order: Literal["random", "permute"] = "random"
    """random: windows at random offsets, with replacement (as in the paper). permute: each window
    once per epoch, reshuffled every epoch; one folder only."""
    data_seed: int = 0
    """Seed of the sample order: window i of a run is a function of (data_seed, i)."""
    read_ahead: int = 8
    """Micro-batches that each rank reads ahead in a thread; 0: read when needed."""
    task: Task = field(default_factory=Task)

    @property
    def folders(self) -> list[str]:
        """All folders, in order; empty without data."""
        return self.paths or ([self.path] if self.path else [])

    @property
    def shares(self) -> list[float]:
        """The sampling weight of each of `folders`."""
        return self.weights or [1.0] * len(self.folders)


@dataclass(frozen=True)
class Run:
    """The `[run]` section: settings of a launch, none of which changes the computation."""

    stop_at: int | None = None
    """Save and stop after this step; the schedule remains that of `training.steps`."""
    allow_changes: list[str] = field(default_factory=list)
    """Keys (such as `optimizer.lr`) that may differ from those of the resumed run. `code`: a job
    script uses the current program instead of the snapshot in RUN/code."""
    code: Literal["note", "refuse"] = "note"
    """If source files differ from the last launch's: log them, or refuse to resume."""
    heartbeat_s: float = 10.0
    """Interval of heartbeats in lock.json and status.json; a lock expires after six."""


@dataclass(frozen=True)
class Guards:
    """The `[guards]` section: which steps are skipped."""

    max_bad_steps: int = 5
    """After this many consecutive steps with a non-finite loss or gradient the run fails; none of
    them changed the weights."""
    outlier_sigma: float | None = None
    """Skip a step whose gradient norm is more than this many standard deviations above the mean of
    the last `outlier_window` norms (OLMo's SkipStep: 6). Default: never."""
    outlier_window: int = 128
    """Number of gradient norms to compare with; at least half of them must be known."""


@dataclass(frozen=True)
class Loss:
    """The `[loss]` section: a term added to the cross-entropy, one at most; it is not logged."""

    z_loss: float = 0.0
    """Weight of logsumexp(logits)^2 per token (PaLM: 1e-4)."""
    squared_loss: float = 0.0
    """Weight of the squared cross-entropy per token: the z-loss of the released Part 4.2 models
    (1e-4)."""
    chunk_tokens: int = 4096
    """Tokens whose logits are in memory at a time; 0: a micro-batch's. Affects rounding only."""


@dataclass(frozen=True)
class Samples:
    """The `[samples]` section: texts that the model writes while training; changes no result."""

    interval: int = 0
    """Steps between two samples, and after the last step; 0: none."""
    prompts: list[str] = field(default_factory=list)
    """Texts to continue; an empty one begins a document."""
    max_tokens: int = 64
    """Tokens after a prompt, unless the document ends before."""
    temperature: float = 0.8
    """0: always the most likely token."""


def valid_world_sizes(global_batch_size: int, multiple_of: int = 1) -> list[int]:
    """Return the divisors of a global batch that are multiples of `multiple_of`."""
    counts = range(multiple_of, global_batch_size + 1, multiple_of)
    return [n for n in counts if global_batch_size % n == 0]


def read_experiment(path: Path, chain: tuple[Path, ...] = ()) -> dict[str, Any]:
    """Read a TOML file and those it `extends`, relative to it; `chain`: files that extend it."""
    resolved = path.resolve()
    if resolved in chain:
        names = " -> ".join(map(str, (*chain, resolved)))
        raise UserError("config.extends_loop", f"`extends` is circular: {names}", path=path)
    try:
        own = tomllib.loads(read_bytes(path, 1 << 20).decode())
    except UnreadableFile as error:
        named_by = f" (named by `extends` in {chain[-1]})" if chain else ""
        raise UserError("config.unreadable", f"config file {error}{named_by}", path=path) from None
    except (ValueError, RecursionError) as error:
        why = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise UserError("config.toml", f"{path} is not valid TOML: {why}", path=path) from None
    given = own.pop("extends", [])
    bases = [given] if isinstance(given, str) else given
    if not isinstance(bases, list) or not all(isinstance(base, str) for base in bases):
        raise UserError(
            "config.type",
            f"{path}: `extends` = {given!r}: expected a path or a list of paths",
            key="extends",
        )
    read = (read_experiment(path.parent / base, (*chain, resolved)) for base in bases)
    return functools.reduce(merge, [*read, own], {})


def merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Return `base` updated by `over`: tables are merged, any other value is replaced."""
    both = [k for k, v in over.items() if isinstance(v, dict) and isinstance(base.get(k), dict)]
    return {**base, **over, **{key: merge(base[key], over[key]) for key in both}}


def to_toml(values: Mapping[str, Any]) -> str:
    """Return `values`, as read by `read_experiment`, as TOML with one line per section."""
    return "".join(f"{_text(key)} = {_text(value)}\n" for key, value in values.items())


def _text(value: Any) -> str:
    """Return a key or a value in TOML syntax."""
    if isinstance(value, list):
        return f"[{', '.join(map(_text, value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{_text(key)} = {_text(v)}' for key, v in value.items())}}}"
    if isinstance(value, bool | str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return str(value)  # numbers, and dates by ISO 8601


def build(cls: type[T], values: Mapping[str, Any], source: str, prefix: str = "") -> T:
    """Return an instance of dataclass `cls` from TOML `values`, with all keys and types checked."""
    hints = typing.get_type_hints(cls, include_extras=True)
    names = [field.name for field in dataclasses.fields(cls)]  # type: ignore[arg-type]
    arguments = dict(values)
    for key, value in values.items():
        dotted, hint = f"{prefix}{key}", cast(Any, hints.get(key))
        if key not in names:
            near, known = nearest(key, names), f"expected one of {', '.join(sorted(names))}"
            raise UserError(
                "config.unknown_key",
                f"{source}: unknown {'key' if prefix else 'section'} '{dotted}': "
                + (f"did you mean '{near}'?" if near else known),
                key=dotted,
                nearest=near,
            )
        if isinstance(hint, type) and dataclasses.is_dataclass(hint):
            if not isinstance(value, dict):
                raise UserError(
                    "config.type",
                    f"{source}: '{dotted}' = {value!r}: expected a section, [{dotted}]",
                    key=dotted,
                )
            arguments[key] = build(hint, value, source, prefix=f"{dotted}.")
            continue
        try:
            TypeAdapter(hint).validate_python(value, strict=True)
        except ValidationError as error:
            raise UserError(
                "config.type",
                f"{source}: '{dotted}' = {value!r}: {error.errors()[0]['msg']}",
                key=dotted,
            ) from None
    return cls(**arguments)
