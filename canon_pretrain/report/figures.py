"""The figures of a report: training curves, scores over training, accuracy over length. No torch.

Parts of the report's content (content.py): JSON values, numbers unrounded.
"""

import math
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from canon_pretrain.core.text import printable
from canon_pretrain.report.curves import stretches, thin
from canon_pretrain.report.evaluations import (
    Evaluation,
    Scored,
    evaluations_of,
    logged_losses,
    suite_losses,
    suite_order,
    tokens_at,
)
from canon_pretrain.report.record import RunRecord
from canon_pretrain.report.verdicts import BABILONG
from canon_pretrain.run.log import json_value

MAX_POINTS, ALL_POINTS, FEWEST_POINTS = 4000, 40_000, 300
"""Of one line; of all lines together, so that the page opens at once; of one of very many lines."""
MOST_STRETCHES, FEWEST_STRETCHES, FEWEST_PER_STRETCH = 100, 8, 5
"""Points of a smoothed line, and logged steps that each is a mean of."""

PROBES = re.compile(r"(1-hop|1-hop-random|2-hop)-(\d+)")
MEAN = "mean of qa1 to qa5"
CHANCE = {("1-hop", "rank"): 1 / 5, ("1-hop-random", "rank"): 1 / 5, ("2-hop", "rank"): 1 / 3}
"""Of ranking the years that are in the context, see eval/tasks/birth_year/probes.py."""

Lines = Mapping[str, Sequence[str]]
"""Label of an architecture -> the labels of the runs that it is drawn by."""


@dataclass(frozen=True)
class Curve:
    """A field of the step events, and how it is shown."""

    field: str
    title: str
    unit: str
    about: str
    decimals: int
    log_scale: bool = False


CURVES = (
    Curve("loss", "Loss", "nats a token", "training loss, mean over the global batch", 4),
    Curve("grad_norm", "Gradient norm", "L2 norm", "before clipping", 4, True),
    Curve("tokens_per_second", "Throughput", "tokens a second", "of all ranks", 0),
)


def _finite(value: Any) -> float | None:
    """A value of the log as a number; None for what is absent, or "NaN" and its like."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return value


def points_per_line(num_lines: int) -> int:
    """Return how many points each of `num_lines` lines may have."""
    return max(FEWEST_POINTS, min(MAX_POINTS, ALL_POINTS // num_lines))


def training_curve(runs: Sequence[RunRecord], curve: Curve) -> dict[str, Any]:
    """Return one field over tokens: a line per run with thinned points and key figures."""
    most = points_per_line(len(runs) * len(CURVES))
    lines = [{"run": run.label, **line(run.steps, curve.field, most)} for run in runs]
    return {**asdict(curve), "lines": lines}


def line(
    steps: Sequence[dict[str, Any]], field: str, max_points: int = MAX_POINTS
) -> dict[str, Any]:
    """Return one field of the `step` events: thinned points, counts and key figures.

    A value that is not finite is None in `values`: a gap.
    """
    values = [_finite(event.get(field)) for event in steps]
    numbers = np.array([math.nan if value is None else value for value in values])
    gaps = np.flatnonzero(np.isnan(numbers)).tolist()
    figures: dict[str, Any] | None = None
    if len(gaps) < len(values):
        places = {
            "last": int(np.flatnonzero(~np.isnan(numbers))[-1]),
            "lowest": int(np.nanargmin(numbers)),
            "highest": int(np.nanargmax(numbers)),
        }
        figures = {n: {"value": values[k], "step": steps[k]["step"]} for n, k in places.items()}
        figures["median"] = float(np.nanmedian(numbers))
    kept = list(range(len(values)))
    if len(values) > max_points:
        kept = thin(numbers, stretches(len(values), (max_points - 2) // 3)).tolist()
    return {
        "logged": len(values),
        "not_finite": len(gaps),
        "first_not_finite_step": steps[gaps[0]]["step"] if gaps else None,
        "figures": figures,
        "steps": [steps[k]["step"] for k in kept],
        "tokens": [steps[k]["tokens"] for k in kept],
        "values": [values[k] for k in kept],
    }


def late_loss(runs: Sequence[RunRecord], baseline: Sequence[str]) -> dict[str, Any] | None:
    """Return the last half of the training losses, smoothed; None without enough steps.

    Half of the most tokens of any run is cut into equally long stretches: `values` are a run's
    means over them (None without a finite loss), `differences` those less the mean of the
    `baseline` runs.
    """
    points = {
        run.label: np.array(
            [(e["tokens"], x) for e in run.steps if (x := _finite(e.get("loss"))) is not None]
        ).reshape(-1, 2)
        for run in runs
    }
    most = max((found[:, 0].max() for found in points.values() if len(found)), default=0.0)
    late = {label: found[found[:, 0] > most / 2] for label, found in points.items()}
    count = min(MOST_STRETCHES, max(map(len, late.values()), default=0) // FEWEST_PER_STRETCH)
    if count < FEWEST_STRETCHES:
        return None
    edges = np.linspace(most / 2, most, count + 1)
    means = {}
    with np.errstate(invalid="ignore"):
        for label, found in late.items():
            sums, _ = np.histogram(found[:, 0], edges, weights=found[:, 1])
            means[label] = sums / np.histogram(found[:, 0], edges)[0]
    rows = np.ma.masked_invalid([means[label] for label in baseline])
    base = rows.mean(axis=0).filled(np.nan) if len(baseline) else np.empty(0)

    def listed(values: np.ndarray) -> list[float | None]:
        return [None if math.isnan(value) else value for value in values.tolist()]

    lines = [
        {
            "run": label,
            "values": listed(own),
            "differences": listed(own - base) if baseline else [],
        }
        for label, own in means.items()
    ]
    return {"tokens": ((edges[:-1] + edges[1:]) / 2).tolist(), "lines": lines}


def _mean(values: Sequence[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None


def score_curves(runs: Sequence[RunRecord]) -> list[dict[str, Any]]:
    """Return a curve per (suite, task, primary metric) that some run was asked at several steps.

    A line per run: `steps`, `tokens` (None if the log does not tell), `values`, `stderrs`, `bounds`
    (see Score), `counts` (items) and `limits` (None unless cut short), equally long.
    """
    curves = []
    for suite, task, metric in _primaries(runs):
        texts: dict[str, list[dict[str, Any]]] = {}  # losses of different texts are not comparable
        for run in runs:
            # in order: a whole result takes the place of a trial, the newest that of all
            by_step = {e.step: e for e in evaluations_of(run) if e.suite == suite}
            points: dict[str, list[Evaluation]] = {}
            for _, each in sorted(by_step.items()):
                if metric in each.results.scores.get(task, {}):
                    points.setdefault(each.text, []).append(each)
            for text, scored in points.items():
                texts.setdefault(text, []).append(_score_line(run, scored, task, metric))
        for text, lines in texts.items():
            if any(len(each["steps"]) > 1 for each in lines):
                label = f"{task} of text {text[:8]}" if len(texts) > 1 else task
                names = {"suite": suite, "task": printable(label), "metric": printable(metric)}
                curves.append({**names, "lines": lines})
    return curves


def _primaries(runs: Sequence[RunRecord]) -> list[tuple[str, str, str]]:
    """(suite, task, metric) of all that was asked, in the order of the newest results.

    Without what a suite scores beside its tasks: the count models of `validation`.
    """
    found: dict[tuple[str, str, str], None] = {}
    for run in runs:
        for each in reversed(evaluations_of(run)):
            for task in each.results.scores:
                if not each.results.asked.get("tasks") or each.described(task):
                    names = each.primary_metrics(task)
                    found |= dict.fromkeys((each.suite, task, name) for name in names)
    return sorted(found, key=lambda key: suite_order(key[0]))


def _score_line(
    run: RunRecord, points: Sequence[Evaluation], task: str, metric: str
) -> dict[str, Any]:
    scores = [each.results.scores[task][metric] for each in points]
    return {
        "run": run.label,
        "steps": [each.step for each in points],
        "tokens": [tokens_at(run, each.step) for each in points],
        "values": [json_value(score.value) for score in scores],
        "stderrs": [None if s.stderr is None else json_value(s.stderr) for s in scores],
        "bounds": [score.bound for score in scores],
        "counts": [each.results.num_samples.get(task) for each in points],
        "limits": [each.limit for each in points],
    }


def held_out_curves(runs: Sequence[RunRecord], architectures: Lines) -> dict[str, Any] | None:
    """Return held-out loss of one text over tokens, a line per architecture; None without any.

    From the suite `validation` or the training logs, and of the text, that have most points. A
    value is the mean over the runs at a step that all of them have; `low` and `high` are the lowest
    and highest, `n` their number.
    """
    found: list[dict[str, Any]] = []
    for source, losses_of in (
        ("the suite validation", suite_losses),
        ("training logs", logged_losses),
    ):
        members = {
            label: [(run, losses_of(run)) for run in runs if run.label in labels]
            for label, labels in architectures.items()
        }
        texts = {text for each in members.values() for _, losses in each for _, text in losses}
        for text in sorted(texts):
            lines = [_mean_line(label, each, text) for label, each in members.items()]
            found.append({"source": source, "lines": [x for x in lines if x["steps"]]})
    best = max(found, key=lambda x: sum(len(each["steps"]) for each in x["lines"]), default=None)
    return best if best and best["lines"] else None


def _mean_line(
    label: str, members: Sequence[tuple[RunRecord, Mapping[Scored, float]]], text: str
) -> dict[str, Any]:
    of_text = [
        (run, {step: loss for (step, of), loss in losses.items() if of == text})
        for run, losses in members
    ]
    of_text = [(run, losses) for run, losses in of_text if losses]
    common = set.intersection(*(set(losses) for _, losses in of_text)) if of_text else set()
    at = {step: [losses[step] for _, losses in of_text] for step in sorted(common)}
    at = {step: values for step, values in at.items() if all(map(math.isfinite, values))}
    tokens = [tokens_at(of_text[0][0], step) for step in at]
    return {"label": label, "steps": list(at), "tokens": tokens, **_spread(list(at.values()))}


def _spread(at: Sequence[Sequence[float]]) -> dict[str, list[Any]]:
    """Return mean, lowest, highest and number of the values at each place."""
    return {
        "values": [_mean(v) for v in at],
        "low": [min(v, default=None) for v in at],
        "high": [max(v, default=None) for v in at],
        "n": [len(v) for v in at],
    }


Series = dict[tuple[str, str], dict[int, tuple[float, float | None]]]
"""(series, metric) -> length -> (value, chance)."""


def length_figures(
    runs: Sequence[RunRecord], architectures: Lines, steps: Mapping[str, Mapping[str, int]]
) -> list[dict[str, Any]]:
    """Return the birth-year probes over L (the paper's Figure 17, right) and Babilong over length.

    A line per architecture in each panel (series and metric), as in held_out_curves; `steps`:
    suite -> architecture -> the step to show. `step` is that of the line if others have another.
    """
    figures = []
    for name, title, unit, pattern in (
        ("probes", "1-hop and 2-hop over L", "tokens of junk text (L)", PROBES),
        ("babilong", "Babilong over context length", "thousand tokens of context", BABILONG),
    ):
        shown = {run.label: _shown(run, pattern, architectures, steps) for run in runs}
        tables = {label: _by_length(found, pattern) for label, found in shown.items()}
        at = {
            label: max((e.step for x in labels for e in shown.get(x, ())), default=None)
            for label, labels in architectures.items()
        }
        first = next((step for step in at.values() if step is not None), None)
        other = {label: None if step == first else step for label, step in at.items()}
        names = {key for table in tables.values() for key in table}
        # exact scores before ranks, the mean before its parts
        ordered = sorted(names, key=lambda x: (x[1] == "rank", "" if x[0] == MEAN else x[0], x[1]))
        limited = sorted(
            label for label, found in shown.items() if any(e.limit is not None for e in found)
        )
        panels = [_panel(key, tables, architectures, other) for key in ordered]
        if panels:
            about = {"name": name, "title": title, "unit": unit}
            figures.append({**about, "limited": limited, "panels": panels})
    return figures


def _shown(
    run: RunRecord,
    pattern: re.Pattern[str],
    architectures: Lines,
    steps: Mapping[str, Mapping[str, int]],
) -> list[Evaluation]:
    """The evaluation to show of each suite with such tasks: a trial, or of the step to show."""
    owner = next((label for label, labels in architectures.items() if run.label in labels), "")
    return list(
        {
            each.suite: each
            for each in evaluations_of(run)
            if any(pattern.fullmatch(task) for task in each.results.scores)
            and (each.limit or steps.get(each.suite, {}).get(owner, each.step) == each.step)
        }.values()
    )


def _by_length(shown: Sequence[Evaluation], pattern: re.Pattern[str]) -> Series:
    """What a run scored; Babilong with the mean of its five tasks where all of them are there."""
    series: Series = {}
    for each in shown:
        for task, metrics in each.results.scores.items():
            if not (match := pattern.fullmatch(task)):
                continue
            for metric, score in metrics.items():
                chance = each.chance(task, metric)
                if chance is None:
                    chance = CHANCE.get((match[1], metric))
                if math.isfinite(score.value):
                    key = match[1], metric
                    series.setdefault(key, {})[int(match[2])] = score.value, chance
    for metric in {metric for _, metric in series} if pattern is BABILONG else ():
        parts = [series.get((f"qa{k}", metric), {}) for k in range(1, 6)]
        if common := set.intersection(*(set(part) for part in parts)):
            means = {x: statistics.fmean(part[x][0] for part in parts) for x in common}
            series[MEAN, metric] = {x: (mean, None) for x, mean in means.items()}
    return series


def _panel(
    key: tuple[str, str],
    tables: Mapping[str, Series],
    architectures: Lines,
    steps: Mapping[str, int | None],
) -> dict[str, Any]:
    found = {label: table[key] for label, table in tables.items() if key in table}
    lengths = sorted({length for values in found.values() for length in values})
    chances = {x for values in found.values() for _, x in values.values() if x is not None}
    lines = []
    for label, labels in architectures.items():
        members = [found[x] for x in labels if x in found]
        at = [[m[length][0] for m in members if length in m] for length in lengths]
        if any(at):
            lines.append({"label": label, "step": steps[label], **_spread(at)})
    return {
        "series": key[0],
        "metric": key[1],
        "lengths": lengths,
        "chance": chances.pop() if len(chances) == 1 else None,
        "lines": lines,
    }
