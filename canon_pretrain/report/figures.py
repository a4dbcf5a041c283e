"""The figures of a report: training curves, scores over training, accuracy over length. No torch.

Parts of the report's content (content.py): JSON values, numbers unrounded.
"""

import math
import re
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from canon_pretrain.core.terminal import printable
from canon_pretrain.report.curves import stretches, thin
from canon_pretrain.report.evaluations import (
    Evaluation,
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
Json = dict[str, Any]


class Curve(NamedTuple):
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


def points_per_line(num_lines: int) -> int:
    """Return how many points each of `num_lines` lines may have."""
    return max(FEWEST_POINTS, min(MAX_POINTS, ALL_POINTS // num_lines))


def _logged(run: RunRecord, field: str) -> np.ndarray:
    """Return float64 [3, n]: step, tokens and value, NaN for one that is absent or not finite."""
    rows = []
    for event in run.steps:
        value = event.get(field)
        is_number = isinstance(value, int | float) and math.isfinite(value)
        rows.append((event["step"], event["tokens"], value if is_number else math.nan))
    return np.array(rows, dtype=np.float64).reshape(-1, 3).T


def _nulls(values: np.ndarray) -> list[float | None]:
    return [None if math.isnan(value) else value for value in values.tolist()]


def training_curve(runs: Sequence[RunRecord], curve: Curve) -> Json:
    """Return one field over tokens: a line per run with thinned points and key figures."""
    most = points_per_line(len(runs) * len(CURVES))
    lines = [{"run": run.label, **_line(_logged(run, curve.field), most)} for run in runs]
    return {**curve._asdict(), "lines": lines}


def _line(logged: np.ndarray, most: int) -> Json:
    """Return thinned points, None for a gap, with counts and key figures."""
    (steps, tokens), values = logged[:2].astype(np.int64), logged[2]
    gaps = np.isnan(values)
    figures: Json | None = None
    if not gaps.all():
        places = (np.flatnonzero(~gaps)[-1], np.nanargmin(values), np.nanargmax(values))
        figures = {
            name: {"value": float(values[k]), "step": int(steps[k])}
            for name, k in zip(("last", "lowest", "highest"), places, strict=True)
        }
        figures["median"] = float(np.nanmedian(values))
    kept = np.arange(len(values))
    if len(values) > most:
        kept = thin(values, stretches(len(values), (most - 2) // 3))
    return {
        "logged": len(values),
        "not_finite": int(gaps.sum()),
        "first_not_finite_step": int(steps[gaps.argmax()]) if gaps.any() else None,
        "figures": figures,
        "steps": steps[kept].tolist(),
        "tokens": tokens[kept].tolist(),
        "values": _nulls(values[kept]),
    }


def late_loss(runs: Sequence[RunRecord], baseline: Sequence[str]) -> Json | None:
    """Return the last half of the training losses, smoothed; None without enough steps.

    Half of the most tokens of any run is cut into equally long stretches: `values` are a run's
    means over them (None without a finite loss), `differences` those less the mean of the
    `baseline` runs.
    """
    points = {run.label: _logged(run, "loss")[1:] for run in runs}
    points = {label: found[:, ~np.isnan(found[1])] for label, found in points.items()}
    most = max((found[0].max() for found in points.values() if found.size), default=0.0)
    longest = max((int((found[0] > most / 2).sum()) for found in points.values()), default=0)
    count = min(MOST_STRETCHES, longest // FEWEST_PER_STRETCH)
    if count < FEWEST_STRETCHES:
        return None
    edges = np.linspace(most / 2, most, count + 1)
    means = {}
    for label, (tokens, losses) in points.items():
        late = tokens > most / 2
        sums, _ = np.histogram(tokens[late], edges, weights=losses[late])
        with np.errstate(invalid="ignore"):
            means[label] = sums / np.histogram(tokens[late], edges)[0]
    lines: list[Json] = [
        {"run": label, "values": _nulls(own), "differences": []} for label, own in means.items()
    ]
    if baseline:
        rows = np.ma.masked_invalid([means[label] for label in baseline])
        base = rows.mean(axis=0).filled(np.nan)
        for line in lines:
            line["differences"] = _nulls(means[line["run"]] - base)
    return {"tokens": ((edges[:-1] + edges[1:]) / 2).tolist(), "lines": lines}


def score_curves(runs: Sequence[RunRecord]) -> list[Json]:
    """Return a curve per (suite, task, primary metric) that some run was asked at several steps.

    A line per run: `steps`, `tokens` (None if the log does not tell), `values`, `stderrs`, `bounds`
    (see Score), `counts` (items) and `limits` (None unless cut short), equally long.
    """
    curves = []
    for suite, task, metric in _primaries(runs):
        texts: dict[str, list[Json]] = {}  # losses of different texts are not comparable
        for run in runs:
            # in order: a whole result takes the place of a trial, the newest that of all
            by_step = {e.step: e for e in evaluations_of(run) if e.suite == suite}
            scored = [e for e in by_step.values() if metric in e.results.scores.get(task, {})]
            scored.sort(key=lambda each: each.step)
            for text in dict.fromkeys(each.text for each in scored):
                of_text = [each for each in scored if each.text == text]
                texts.setdefault(text, []).append(_score_line(run, of_text, task, metric))
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


def _score_line(run: RunRecord, points: Sequence[Evaluation], task: str, metric: str) -> Json:
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


def held_out_curves(runs: Sequence[RunRecord], architectures: Lines) -> Json | None:
    """Return held-out loss of one text over tokens, a line per architecture; None without any.

    From the suite `validation` or the training logs, and of the text, that have most points. A
    value is the mean over the runs at a step that all of them have; `low` and `high` are the lowest
    and highest, `n` their number.
    """
    found: list[Json] = []
    readers = {"the suite validation": suite_losses, "training logs": logged_losses}
    for source, losses_of in readers.items():
        losses = {run: losses_of(run) for run in runs}
        for text in sorted({text for each in losses.values() for _, text in each}):
            lines = []
            for label, labels in architectures.items():
                by_run = {
                    run: {step: loss for (step, of), loss in losses[run].items() if of == text}
                    for run in runs
                    if run.label in labels
                }
                lines.append({"label": label} | _mean_line({k: v for k, v in by_run.items() if v}))
            found.append({"source": source, "lines": [x for x in lines if x["steps"]]})
    best = max(found, key=lambda x: sum(len(each["steps"]) for each in x["lines"]), default=None)
    return best if best and best["lines"] else None


def _mean_line(losses: Mapping[RunRecord, Mapping[int, float]]) -> Json:
    common = set.intersection(*map(set, losses.values())) if losses else set()
    rows = {step: [by_step[step] for by_step in losses.values()] for step in sorted(common)}
    rows = {step: row for step, row in rows.items() if all(map(math.isfinite, row))}
    tokens = [tokens_at(next(iter(losses)), step) for step in rows]
    return {"steps": list(rows), "tokens": tokens, **_spread(list(rows.values()))}


def _spread(at: Sequence[Sequence[float]]) -> dict[str, list[Any]]:
    """Return mean, lowest, highest and number of the values at each place."""
    return {
        "values": [statistics.fmean(v) if v else None for v in at],
        "low": [min(v, default=None) for v in at],
        "high": [max(v, default=None) for v in at],
        "n": [len(v) for v in at],
    }


class _Point(NamedTuple):
    """What a run scored at one length."""

    run: str
    each: Evaluation
    series: str
    metric: str
    length: int
    value: float
    chance: float | None


def length_figures(
    runs: Sequence[RunRecord], architectures: Lines, steps: Mapping[str, Mapping[str, int]]
) -> list[Json]:
    """Return the birth-year probes over L (the paper's Figure 17, right) and Babilong over length.

    A line per architecture in each panel (series and metric), as in held_out_curves; `steps`:
    suite -> architecture -> the step to show. `step` is that of the line if others have another.
    """
    figures = []
    for name, title, unit, pattern in (
        ("probes", "1-hop and 2-hop over L", "tokens of junk text (L)", PROBES),
        ("babilong", "Babilong over context length", "thousand tokens of context", BABILONG),
    ):
        points: list[_Point] = []
        for run in runs:
            owners = [label for label, labels in architectures.items() if run.label in labels]
            own = {
                suite: at[owners[0]] for suite, at in steps.items() if owners and owners[0] in at
            }
            points += _points(run, pattern, own)
        panels = _panels(points, architectures)
        limited = sorted({point.run for point in points if point.each.limit is not None})
        if panels:
            about = {"name": name, "title": title, "unit": unit}
            figures.append({**about, "limited": limited, "panels": panels})
    return figures


def _points(run: RunRecord, pattern: re.Pattern[str], steps: Mapping[str, int]) -> list[_Point]:
    """Return what a run scored in each suite with such tasks, in a trial or at the step to show.

    Babilong has the mean of its five tasks where all of them are there.
    """
    shown = {
        each.suite: each
        for each in evaluations_of(run)
        if each.limit or steps.get(each.suite, each.step) == each.step
        if any(pattern.fullmatch(task) for task in each.results.scores)
    }
    points: dict[tuple[str, str, int], _Point] = {}
    for each in shown.values():
        for task, metrics in each.results.scores.items():
            if (match := pattern.fullmatch(task)) is None:
                continue
            for metric, score in metrics.items():
                chance, key = each.chance(task, metric), (match[1], metric, int(match[2]))
                chance = CHANCE.get(key[:2]) if chance is None else chance
                if math.isfinite(score.value):
                    points[key] = _Point(run.label, each, *key, score.value, chance)
    found = list(points.values())
    for metric, length in {(p.metric, p.length) for p in found if pattern is BABILONG}:
        parts = [points[key] for k in range(1, 6) if (key := (f"qa{k}", metric, length)) in points]
        if len(parts) == 5:
            value = statistics.fmean(part.value for part in parts)
            found.append(parts[0]._replace(series=MEAN, value=value, chance=None))
    return found


def _panels(points: Sequence[_Point], architectures: Lines) -> list[Json]:
    at = {
        label: max((p.each.step for p in points if p.run in labels), default=None)
        for label, labels in architectures.items()
    }
    first = next((step for step in at.values() if step is not None), None)
    panels = []
    # exact scores before ranks, the mean before its parts
    for series, metric in sorted(
        {(p.series, p.metric) for p in points},
        key=lambda x: (x[1] == "rank", "" if x[0] == MEAN else x[0], x[1]),
    ):
        shown = [p for p in points if (p.series, p.metric) == (series, metric)]
        lengths = sorted({p.length for p in shown})
        lines: list[Json] = []
        for label, labels in architectures.items():
            own = [p for p in shown if p.run in labels]
            values = [[p.value for p in own if p.length == length] for length in lengths]
            step = None if at[label] == first else at[label]
            lines += [{"label": label, "step": step, **_spread(values)}] if own else []
        chances = {p.chance for p in shown} - {None}
        chance = chances.pop() if len(chances) == 1 else None
        names = {"series": series, "metric": metric, "lengths": lengths}
        panels.append({**names, "chance": chance, "lines": lines})
    return panels
