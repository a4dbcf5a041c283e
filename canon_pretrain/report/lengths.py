"""Accuracy over length: the birth-year probes over L (the paper's Figure 17, right), and Babilong.

A part of the report's content (content.py): numbers unrounded, JSON values only. No torch.
"""

import math
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from canon_pretrain.report.evaluations import Run, chance_of
from canon_pretrain.run.results import Results, Score

PROBES = re.compile(r"(1-hop|1-hop-random|2-hop)-(\d+)")
BABILONG = re.compile(r"babilong_(qa[1-5])_(\d+)k")
MEAN = "mean of qa1 to qa5"

CHANCE = {("1-hop", "rank"): 1 / 5, ("1-hop-random", "rank"): 1 / 5, ("2-hop", "rank"): 1 / 3}
"""Of ranking the years that stand in the context, see eval/tasks/birth_year/probes.py."""


@dataclass(frozen=True)
class Entry:
    """One line of each figure: an architecture, and the labels of the runs that stand for it."""

    label: str
    runs: tuple[str, ...]


@dataclass(frozen=True)
class Figure:
    """A family of tasks that differ in length alone: `series` of them over `unit`."""

    name: str
    title: str
    unit: str
    pattern: re.Pattern[str]


FIGURES = (
    Figure("probes", "1-hop and 2-hop over L", "tokens of junk text (L)", PROBES),
    Figure("babilong", "Babilong over context length", "thousand tokens of context", BABILONG),
)


def length_figures(
    runs: Sequence[Run], entries: Sequence[Entry], steps: Mapping[str, Mapping[str, int]]
) -> list[dict[str, Any]]:
    """The figures that any run was asked for: of each series and metric a line an entry.

    `steps`: suite -> entry -> the step to show, as in the tables. A line's value is the mean over
    the entry's runs at that length; `low` and `high` are the lowest and highest of them, `n` how
    many there are. `step` is that of the line if it is not the others', else None.
    """
    figures = []
    for figure in FIGURES:
        shown = {run.label: _shown(run, figure, entries, steps) for run in runs}
        tables = {label: _by_length(found, figure) for label, found in shown.items()}
        at = {
            entry.label: max(
                (r.asked["step"] for label in entry.runs for r in shown.get(label, ())),
                default=None,
            )
            for entry in entries
        }
        first = next((step for step in at.values() if step is not None), None)
        other = {label: None if step == first else step for label, step in at.items()}
        names = dict.fromkeys(name for table in tables.values() for name in sorted(table))
        panels = [
            _panel(name, figure, tables, entries, other) for name in sorted(names, key=_order)
        ]
        if panels:
            limited = sorted(
                label
                for label, found in shown.items()
                if any(results.asked["limit"] is not None for results in found)
            )
            figures.append(
                {
                    "name": figure.name,
                    "title": figure.title,
                    "unit": figure.unit,
                    "limited": limited,
                    "panels": panels,
                }
            )
    return figures


def _shown(
    run: Run, figure: Figure, entries: Sequence[Entry], steps: Mapping[str, Mapping[str, int]]
) -> list[Results]:
    """The results to show of each suite with tasks of `figure`; none if at another step."""
    by_suite: dict[str, Results] = {}
    owner = next((entry.label for entry in entries if run.label in entry.runs), "")
    for results in run.evaluations:
        suite, step = results.asked["suite"], results.asked["step"]
        expected = steps.get(suite, {}).get(owner, step)
        is_whole = results.asked["limit"] is None
        if any(figure.pattern.fullmatch(task) for task in results.scores):
            if step == expected or not is_whole:
                by_suite[suite] = results
    return list(by_suite.values())


Series = dict[tuple[str, str], dict[int, tuple[float, float | None]]]
"""(series, metric) -> length -> (value, chance)."""


def _by_length(shown: Sequence[Results], figure: Figure) -> Series:
    """What a run scored; Babilong with the mean of its five tasks where all of them are there."""
    series: Series = {}
    for results in shown:
        for task, metrics in results.scores.items():
            if not (match := figure.pattern.fullmatch(task)):
                continue
            for metric, score in metrics.items():
                if math.isfinite(_number(score)):
                    chance = chance_of(results, task, metric)
                    if chance is None:
                        chance = CHANCE.get((match[1], metric))
                    series.setdefault((match[1], metric), {})[int(match[2])] = (
                        score.value,
                        chance,
                    )
    if figure.name == "babilong":
        for metric in {metric for _, metric in series}:
            parts = [series.get((f"qa{k}", metric), {}) for k in range(1, 6)]
            common = set.intersection(*(set(part) for part in parts))
            if common:
                series[MEAN, metric] = {
                    length: (statistics.fmean(part[length][0] for part in parts), None)
                    for length in common
                }
    return series


def _number(score: Score) -> float:
    return float(score.value)


def _order(name: tuple[str, str]) -> tuple[bool, str, str]:
    """Exact scores before ranks, the mean before its parts."""
    return (name[1] == "rank", "" if name[0] == MEAN else name[0], name[1])


def _panel(
    name: tuple[str, str],
    figure: Figure,
    tables: Mapping[str, Series],
    entries: Sequence[Entry],
    steps: Mapping[str, int | None],
) -> dict[str, Any]:
    found = {label: table[name] for label, table in tables.items() if name in table}
    lengths = sorted({length for values in found.values() for length in values})
    chances = {
        chance for values in found.values() for _, chance in values.values() if chance is not None
    }
    lines = []
    for entry in entries:
        members = [found[label] for label in entry.runs if label in found]
        at = [[m[length][0] for m in members if length in m] for length in lengths]
        if any(at):
            lines.append(
                {
                    "label": entry.label,
                    "step": steps[entry.label],
                    "values": [statistics.fmean(v) if v else None for v in at],
                    "low": [min(v, default=None) for v in at],
                    "high": [max(v, default=None) for v in at],
                    "n": [len(v) for v in at],
                }
            )
    series, metric = name
    return {
        "series": series,
        "metric": metric,
        "lengths": lengths,
        "chance": chances.pop() if len(chances) == 1 else None,
        "lines": lines,
    }
