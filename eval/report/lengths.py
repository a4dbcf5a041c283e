"""Accuracy over length: the birth-year probes over L (the paper's Figure 17, right), and Babilong.

A part of the report's content (content.py): numbers unrounded, JSON values only. No torch.
"""

import math
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from eval.report.runs import Run, chance_of
from eval.results import Results, Score

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


def length_figures(runs: Sequence[Run], entries: Sequence[Entry]) -> list[dict[str, Any]]:
    """The figures that any run was asked for: of each series and metric a line an entry.

    A line's value is the mean over the entry's runs at that length; `low` and `high` are the
    lowest and highest of them, `n` how many there are.
    """
    by_label = {run.label: run for run in runs}
    figures = []
    for figure in FIGURES:
        tables = {label: _by_length(run, figure) for label, run in by_label.items()}
        names = dict.fromkeys(name for table in tables.values() for name in sorted(table))
        panels = [_panel(name, figure, tables, entries) for name in sorted(names, key=_order)]
        if panels:
            limited = sorted(label for label, run in by_label.items() if _limited(run, figure))
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


def _latest(run: Run, figure: Figure) -> list[Results]:
    """The results to show of each suite that has tasks of `figure`."""
    by_suite = {
        results.asked["suite"]: results
        for results in run.evaluations
        if any(figure.pattern.fullmatch(task) for task in results.scores)
    }
    return list(by_suite.values())


def _limited(run: Run, figure: Figure) -> bool:
    return any(results.asked["limit"] is not None for results in _latest(run, figure))


Series = dict[tuple[str, str], dict[int, tuple[float, float | None]]]
"""(series, metric) -> length -> (value, chance)."""


def _by_length(run: Run, figure: Figure) -> Series:
    """What `run` scored; Babilong with the mean of its five tasks where all of them are there."""
    series: Series = {}
    for results in _latest(run, figure):
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
