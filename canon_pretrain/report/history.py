"""One run's past as arrays: what its log and its evaluations say, for plots and comparisons.

The log is read through `RunFolder.read_log`, so that steps which a restart did again are there
once, as they were done last. No torch.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from canon_pretrain.core.errors import UserError
from canon_pretrain.core.files import UnreadableFile, parsing, read_json
from canon_pretrain.core.text import printable
from canon_pretrain.run.folder import RunFolder
from canon_pretrain.run.log import number

HELD_OUT = "held_out_fingerprint"
STEP_FIELDS = ("loss", "grad_norm", "tokens_per_second", "mfu", "lr")
SEEDS = ("model.init_seed", "data.data_seed")


class Curve(NamedTuple):
    """One quantity: int64 [n] steps in order, float64 [n] values, NaN and infinities among them."""

    steps: np.ndarray
    values: np.ndarray

    @classmethod
    def of(cls, pairs: Iterable[tuple[int, float]]) -> "Curve":
        """From (step, value); of a step that is there twice the last one counts."""
        rows = sorted(dict(pairs).items())
        return cls(
            np.array([step for step, _ in rows], dtype=np.int64),
            np.array([value for _, value in rows], dtype=np.float64),
        )


@dataclass(frozen=True)
class Launch:
    """A `start` or `resume`: the step that it goes on from, and when, in hours (see `Clock`)."""

    from_step: int
    time: str | None
    world_size: int | None
    training_hours: float | None
    wall_hours: float | None


@dataclass(frozen=True)
class Clock:
    """When each logged step was taken. Hours are None where the log's times cannot be read.

    Training hours join the launches: each counts from its first event, and neither the time
    between launches counts nor work that a restart did again. Wall hours count from the log's
    first event on, whatever was done.
    """

    steps: np.ndarray
    """int64 [n], as the next three; the first is step 0."""
    tokens: np.ndarray
    training_hours: np.ndarray | None
    wall_hours: np.ndarray | None


@dataclass(frozen=True)
class Evaluation:
    """One score of one checkpoint; `limit` as it was asked, None unless cut short."""

    suite: str
    task: str
    metric: str
    step: int
    value: float
    stderr: float | None
    limit: int | None


@dataclass(frozen=True)
class History:
    """A run as it lies on disk."""

    label: str
    folder: RunFolder
    identity: dict[str, Any]
    clock: Clock
    launches: list[Launch]
    curves: dict[str, Curve]
    """By STEP_FIELDS; a field that no line has is absent."""
    validation: dict[str, Curve]
    """Bits per byte on the held-out part, by source; "" is the whole."""
    skips: list[dict[str, Any]]
    """The `skip` events of steps that count."""
    evaluations: list[Evaluation]
    notices: list[str]
    """Sentences on what could not be read and is left out."""

    @property
    def seeds(self) -> tuple[Any, ...]:
        return tuple(self.identity.get(name) for name in SEEDS)

    @property
    def last_step(self) -> int:
        return int(self.clock.steps[-1])


def read_history(path: Path, label: str) -> History:
    """Read the run in the folder `path`. Raises UserError for what is no run or has no log."""
    folder = RunFolder(path)
    identity = folder.read_config().get("identity")
    if not isinstance(identity, dict):
        raise UserError(f"{folder.config_file} is damaged: it has no `identity`")
    events = folder.read_log()
    with parsing(folder.log_file):
        steps = [event for event in events if event["event"] == "step"]
        clock, launches = _clock(events)
        curves = {
            field: Curve.of(
                (event["step"], number(event[field])) for event in steps if _has(event, field)
            )
            for field in STEP_FIELDS
        }
        scored = [event for event in events if event["event"] == "validation"]
        own = [
            each
            for each in scored
            if each.get(HELD_OUT, identity.get(HELD_OUT)) == identity.get(HELD_OUT)
        ]
        validation = _validation(own)
        skips = _that_count(events, "skip")
    evaluations, notices = read_evaluations(folder, identity)
    if left := len(scored) - len(own):
        notices.append(f"{left} validation(s) are of another held-out text and left out")
    return History(
        label=label,
        folder=folder,
        identity=identity,
        clock=clock,
        launches=launches,
        curves={field: curve for field, curve in curves.items() if len(curve.steps)},
        validation=validation,
        skips=skips,
        evaluations=evaluations,
        notices=notices,
    )


def _has(event: dict[str, Any], field: str) -> bool:
    return event.get(field) is not None


def _that_count(events: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    """The events of one kind whose step no later launch went back over."""
    kept: list[dict[str, Any]] = []
    for event in events:
        if event["event"] in ("start", "resume"):
            kept = [each for each in kept if each["step"] <= event.get("from_step", 0)]
        elif event["event"] == kind:
            kept.append(event)
    return kept


def _clock(events: list[dict[str, Any]]) -> tuple[Clock, list[Launch]]:
    """When each step was taken, and the launches."""
    steps, tokens, training, wall = [0], [0], [0.0], [0.0]
    launches = []
    first = began = base = math.nan
    is_first = all_known = True
    for event in events:
        is_launch = event["event"] in ("start", "resume")
        if event["event"] != "step" and not is_launch:
            continue
        now = _hours(event.get("time"))
        all_known = all_known and math.isfinite(now)
        if is_first:
            first, began, base, is_first = now, now, 0.0, False
        if is_launch:
            began, base = now, training[-1]
            launches.append(
                Launch(
                    from_step=int(event.get("from_step", 0)),
                    time=event.get("time"),
                    world_size=event.get("world_size"),
                    training_hours=_finite(base),
                    wall_hours=_finite(now - first),
                )
            )
        elif event["step"] > steps[-1]:
            steps.append(int(event["step"]))
            tokens.append(int(event["tokens"]))
            # a clock that was set back makes no curve run back
            training.append(max(training[-1], base + now - began))
            wall.append(max(wall[-1], now - first))
    known = all_known and wall[-1] > 0
    clock = Clock(
        np.array(steps, dtype=np.int64),
        np.array(tokens, dtype=np.int64),
        np.array(training) if known else None,
        np.array(wall) if known else None,
    )
    return clock, launches


def _hours(time: Any) -> float:
    """An ISO time as hours; NaN where it is none."""
    try:
        return datetime.fromisoformat(time).timestamp() / 3600
    except (TypeError, ValueError):
        return math.nan


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _validation(events: list[dict[str, Any]]) -> dict[str, Curve]:
    """Bits per byte of `validation` events by source."""
    pairs: dict[str, list[tuple[int, float]]] = {}
    for event in events:
        named = {"": event} | (event.get("sources") or {})
        for name, measured in named.items():
            if _has(measured, "bits_per_byte"):
                value = number(measured["bits_per_byte"])
                pairs.setdefault(printable(name), []).append((event["step"], value))
    return {name: Curve.of(rows) for name, rows in pairs.items()}


def read_evaluations(
    folder: RunFolder, identity: dict[str, Any]
) -> tuple[list[Evaluation], list[str]]:
    """The scores under RUN/evals as `python -m eval run` leaves them, and what was left out.

    Of several results of one suite at one step a whole one counts before one cut short, then the
    newest one.
    """
    best: dict[tuple[str, int], tuple[Any, list[Evaluation]]] = {}
    notices = []
    for path in sorted((folder.path / "evals").glob("step-*/*/*/results.json")):
        try:
            stored = read_json(path, finite=False)
            with parsing(path):
                asked = stored["asked"]
                step, suite, limit = int(asked["step"]), str(asked["suite"]), asked["limit"]
                if asked["train_fingerprint"] != identity.get("data_fingerprint"):
                    raise ValueError("it is of a model that was trained on other data")
                scores = [
                    Evaluation(
                        suite=printable(suite),
                        task=printable(task),
                        metric=printable(metric),
                        step=step,
                        value=number(score["value"]),
                        stderr=None if score["stderr"] is None else number(score["stderr"]),
                        limit=limit,
                    )
                    for task, metrics in stored["scores"].items()
                    for metric, score in metrics.items()
                ]
            written = str(stored.get("written", ""))
            order = (limit is None, written, path.stat().st_mtime_ns)
        except (UnreadableFile, OSError) as error:
            notices.append(f"{path.relative_to(folder.path)} is left out: {error}")
            continue
        key = (suite, step)
        if key not in best or best[key][0] < order:
            best[key] = (order, scores)
    return [each for _, scores in best.values() for each in scores], notices
