"""What the page of `run plot` shows of several runs, as one JSON value: figures, settings, charts.

Between `history.py` (one run's past) and templates/plot.* (the page). No torch.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from canon_pretrain.report.curves import (
    MAX_MARKS,
    MAX_STRETCHES,
    Entry,
    axis,
    band,
    join_seeds,
    line,
)
from canon_pretrain.report.history import Curve, Evaluation, History
from canon_pretrain.run.log import json_value

TOTAL_STRETCHES = 16_000
"""Shared by the runs of a page, so that one of many runs stays a few MB too."""


@dataclass(frozen=True)
class Chart:
    """How one quantity is shown; `form` is d3's, of a value on hover."""

    id: str
    title: str
    unit: str
    about: str
    form: str
    log_scale: bool = False
    smooth: bool = True
    restarts: bool = False
    skips: bool = False
    over_time: bool = False
    """Drawn over hours, whatever the other charts are drawn over."""
    same_as: str | None = None
    """The chart whose lines these are: the page holds them once."""


LOSS = Chart(
    "loss", "Loss", "nats a token", "training loss, mean over the global batch", ",.4f", skips=True
)
LOSS_OVER_TIME = Chart(
    "loss_time",
    "Loss over time",
    "nats a token",
    "the same over hours; a dotted line is a restart",
    ",.4f",
    restarts=True,
    over_time=True,
    same_as="loss",
)
BY_FIELD = {
    "grad_norm": Chart(
        "grad_norm",
        "Gradient norm",
        "L2 norm",
        "before clipping; a triangle below is a step that was skipped",
        ",.4~g",
        log_scale=True,
        skips=True,
    ),
    "tokens_per_second": Chart(
        "tokens_per_second",
        "Throughput",
        "tokens a second",
        "all devices together; a dotted line is a restart",
        ",.0f",
        restarts=True,
    ),
    "mfu": Chart(
        "mfu",
        "MFU",
        "share of the devices' peak",
        "model FLOPs utilization; a dotted line is a restart",
        ".1%",
        restarts=True,
    ),
    "lr": Chart("lr", "Learning rate", "", "of the step", ".3~e", smooth=False),
}
VALIDATION = Chart(
    "validation",
    "Validation",
    "bits per byte",
    "held-out part, measured while training",
    ",.4f",
    smooth=False,
)


def page_content(runs: Sequence[History]) -> dict[str, Any]:
    """All that the page says and draws of `runs`, JSON values only."""
    entries = join_seeds(runs)
    most = min(MAX_STRETCHES, TOTAL_STRETCHES // len(runs))
    make = _Maker(runs, entries, most)
    training: list[dict[str, Any]] = []
    for drawn in make.chart(LOSS, {"": [run.curves.get("loss") for run in runs]}):
        training += [drawn, asdict(LOSS_OVER_TIME) | {"variants": []}]
    for field, chart in BY_FIELD.items():
        training += make.chart(chart, {"": [run.curves.get(field) for run in runs]})
    names = dict.fromkeys(name for run in runs for name in run.validation)
    variants = {
        (name and f"source {name}") or "all sources": [run.validation.get(name) for run in runs]
        for name in names
    }
    validation = make.chart(VALIDATION, variants)
    evaluations = make.evaluations()
    return {
        "title": runs[0].label if len(runs) == 1 else f"{len(runs)} runs",
        "runs": [_run_content(run) for run in runs],
        "entries": [{"label": entry.label, "runs": list(entry.runs)} for entry in entries],
        "figures": [_figures(run) for run in runs],
        "differing": _differing(runs),
        "sections": [
            {"title": "Training", "charts": training},
            {"title": "Evaluation", "charts": validation + evaluations},
        ],
        "notes": _notes(runs, entries, most),
    }


@dataclass(frozen=True)
class _Maker:
    """Makes the JSON of charts over the same runs."""

    runs: Sequence[History]
    entries: Sequence[Entry]
    most: int

    def chart(self, chart: Chart, variants: dict[str, list[Curve | None]]) -> list[dict[str, Any]]:
        """The chart in a list; empty where no run has a value. `variants` are shown by turns."""
        known = {
            name: curves for name, curves in variants.items() if any(c is not None for c in curves)
        }
        if not known:
            return []
        drawn = [
            {
                "name": name,
                "lines": [None if c is None else line(c, self.most) for c in curves],
                "bands": self._bands(curves),
            }
            for name, curves in known.items()
        ]
        return [asdict(chart) | {"variants": drawn}]

    def _bands(self, curves: Sequence[Curve | None]) -> list[dict[str, Any] | None]:
        """By entry; None for an entry that is one run."""
        return [
            band([curves[k] for k in entry.runs], self.most) if len(entry.runs) > 1 else None
            for entry in self.entries
        ]

    def evaluations(self) -> list[dict[str, Any]]:
        """A chart for each suite that a run was evaluated on; its variants are tasks' metrics."""
        found = [each for run in self.runs for each in run.evaluations]
        suites: dict[str, dict[tuple[str, str], None]] = {}
        for each in found:
            suites.setdefault(each.suite, {})[each.task, each.metric] = None
        charts = []
        for k, (suite, measures) in enumerate(sorted(suites.items())):
            chart = Chart(
                f"eval_{k}",
                suite,
                "",
                "checkpoints' scores, ± standard error over items",
                ",.4f",
                smooth=False,
            )
            variants = {
                f"{task}, {metric}": [_scores_of(run, suite, task, metric) for run in self.runs]
                for task, metric in measures
            }
            made = self.chart(
                chart,
                {name: [_as_curve(scores) for scores in rows] for name, rows in variants.items()},
            )
            for variant in made[0]["variants"] if made else []:
                scores_by_run = variants[variant["name"]]
                for drawn, scores in zip(variant["lines"], scores_by_run, strict=True):
                    if drawn is not None:
                        _add_errors(drawn, scores)
                # what was cut short is no result, and no part of a mean
                whole = [[s for s in scores if s.limit is None] for scores in scores_by_run]
                variant["bands"] = self._bands([_as_curve(scores) for scores in whole])
            charts += made
        return charts


def _scores_of(run: History, suite: str, task: str, metric: str) -> list[Evaluation]:
    return [e for e in run.evaluations if (e.suite, e.task, e.metric) == (suite, task, metric)]


def _as_curve(scores: Sequence[Evaluation]) -> Curve | None:
    return Curve.of((each.step, each.value) for each in scores) if scores else None


def _add_errors(drawn: dict[str, Any], scores: Sequence[Evaluation]) -> None:
    """Put standard errors, and the limits of evaluations cut short, beside a line's points."""
    by_step = {each.step: each for each in scores}
    shown = [by_step[step] for step in drawn["steps"]]
    drawn["errors"] = [None if e.stderr is None else json_value(e.stderr) for e in shown]
    drawn["limits"] = [each.limit for each in shown]


def _run_content(run: History) -> dict[str, Any]:
    """What the page needs to place a run's points, and its marks."""
    kept = _spread(run.skips, MAX_MARKS)
    return {
        "label": run.label,
        "axis": axis(run),
        "launches": [asdict(launch) for launch in run.launches[1:]],
        "skips": [
            {
                "step": skip["step"],
                "reason": str(skip.get("reason", "")),
                "loss": json_value(skip.get("loss")),
                "grad_norm": json_value(skip.get("grad_norm")),
            }
            for skip in kept
        ],
    }


def _spread(rows: Sequence[Any], most: int) -> list[Any]:
    """At most `most` of `rows`, evenly spread."""
    if len(rows) <= most:
        return list(rows)
    return [rows[k] for k in np.linspace(0, len(rows) - 1, most).round().astype(int)]


def _figures(run: History) -> dict[str, Any]:
    """A run's key figures; None for what is not known."""
    loss = run.curves.get("loss")
    tail = None if loss is None else loss.values[-max(1, len(loss.values) // 100) :]
    bits = run.validation.get("")
    hours = run.clock.training_hours

    def median(field: str) -> float | None:
        curve = run.curves.get(field)
        finite = None if curve is None else curve.values[np.isfinite(curve.values)]
        return None if finite is None or not len(finite) else float(np.median(finite))

    def shown(value: float | None) -> float | str | None:
        return json_value(value)

    return {
        "label": run.label,
        "folder": str(run.folder.path),
        "step": run.last_step,
        "total_steps": run.identity.get("training.steps"),
        "tokens": int(run.clock.tokens[-1]),
        "hours": None if hours is None else float(hours[-1]),
        "loss": None if tail is None else shown(float(tail.mean())),
        "bits_per_byte": None if bits is None else shown(float(bits.values[-1])),
        "tokens_per_second": median("tokens_per_second"),
        "mfu": median("mfu"),
        "restarts": len(run.launches[1:]),
        "world_sizes": _in_turn([launch.world_size for launch in run.launches]),
        "skipped": len(run.skips),
        "init_seed": run.identity.get("model.init_seed"),
        "data_seed": run.identity.get("data.data_seed"),
    }


def _in_turn(values: Sequence[Any]) -> list[Any]:
    """`values` without those that repeat the one before, and without None."""
    known = [value for value in values if value is not None]
    return [value for k, value in enumerate(known) if k == 0 or value != known[k - 1]]


def _differing(runs: Sequence[History]) -> list[dict[str, Any]]:
    """The fields of `identity` in which the runs are not all alike."""
    names = dict.fromkeys(name for run in runs for name in run.identity)
    rows = [{"setting": name, "values": [run.identity.get(name) for run in runs]} for name in names]
    return [row for row in rows if any(value != row["values"][0] for value in row["values"])]


def _notes(runs: Sequence[History], entries: Sequence[Entry], most: int) -> list[str]:
    """Sentences on how the charts are to be read, and on what is not in them."""
    said = [
        "Steps that a restart took anew are there once, as they were taken last.",
        "Training hours join the launches: each counts from its first event, and neither the time "
        "between launches counts nor work that was done again. Wall-clock hours count from the "
        "first event of the run's log and show those gaps.",
        "Smoothing is an exponential moving average over steps, without the bias of its first "
        "values: a value that is N steps old weighs exp(-N / S), S as chosen above. The values as "
        "logged stay behind it, faint.",
        "A cross at the bottom of a chart is a value that is not a finite number; the line has a "
        "gap there.",
    ]
    joined = [entry for entry in entries if len(entry.runs) > 1]
    if joined:
        said.append(
            "Runs that differ in their seeds alone are one line, their mean, in a band from the "
            "lowest to the highest of them, at the steps that all of them have logged; what a "
            "longer one has after that is a thin line of its own. Smoothed, each run is smoothed "
            "before they are joined."
        )
    said += [
        f"{entry.label}: {len(entry.runs)} runs, "
        f"{len({runs[k].seeds for k in entry.runs})} pairs of seeds."
        for entry in joined
    ]
    for run in runs:
        lines = len(run.clock.steps) - 1
        if lines > most:
            said.append(
                f"{run.label}: of {lines:,} logged steps {most:,} stretches are drawn, of each the "
                "lowest, the highest and the first value that is not finite, so that no spike is "
                "lost; smoothing and bands use each stretch's mean."
            )
        if len(run.skips) > MAX_MARKS:
            said.append(f"{run.label}: {MAX_MARKS} of {len(run.skips):,} skipped steps are marked.")
        if run.clock.training_hours is None:
            said.append(
                f"{run.label}: its log's times cannot be read, so it has no place over hours."
            )
        said += [f"{run.label}: {sentence}" for sentence in run.notices]
    return said
