"""The tables of each suite: every score of every run with its standard error, and their warnings.

A part of the report's content (content.py): numbers unrounded, JSON values only. No torch.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from canon_pretrain.core.text import printable
from canon_pretrain.report.evaluations import Run, is_outdated, suite_order
from canon_pretrain.run.log import json_value
from canon_pretrain.run.results import OWN_TO_A_CHECKPOINT, Results

OWN_TO_A_RUN = (*OWN_TO_A_CHECKPOINT, "suite", "limit")
"""What `asked` may differ in while two runs were still asked the same question."""

MAX_DIFFERENCES = 5
"""Sentences at most on how the questions of one suite differ."""

MAX_NAMED = 6
"""Runs at most that a sentence names one by one."""


def suites_content(runs: Sequence[Run], steps: Mapping[str, int]) -> list[dict[str, Any]]:
    """The tables of all suites that any run was asked; `steps`: of the verdicts, by suite."""
    names = {results.asked["suite"] for run in runs for results in run.evaluations}
    return [
        _suite_content(suite, runs, steps.get(suite)) for suite in sorted(names, key=suite_order)
    ]


def _suite_content(suite: str, runs: Sequence[Run], step: int | None) -> dict[str, Any]:
    """One suite's tables: the latest step of each run, and every step where there are several."""
    by_run = {
        run.label: [results for results in run.evaluations if results.asked["suite"] == suite]
        for run in runs
    }
    latest = {label: found[-1] for label, found in by_run.items() if found}
    metrics_of: dict[str, dict[str, None]] = {}  # the newest results say the order
    for found in by_run.values():
        for results in reversed(found):
            for task, metrics in results.scores.items():
                metrics_of.setdefault(task, {}).update(dict.fromkeys(metrics))
    rows = [(task, metric) for task, metrics in metrics_of.items() for metric in metrics]
    several = any(len(found) > 1 for found in by_run.values())
    outdated = [
        run.label
        for run in runs
        if run.label in latest and is_outdated(run.folder, latest[run.label])
    ]
    return {
        "suite": suite,
        "suite_step": max(r.asked["step"] for r in latest.values()) if step is None else step,
        "warnings": _suite_warnings(latest, outdated),
        "columns": [
            {"run": label, "step": results.asked["step"], "limit": results.asked["limit"]}
            for label, results in latest.items()
        ],
        "rows": [
            {
                "task": printable(task),
                "metric": printable(metric),
                "cells": [_cell(results, task, metric) for results in latest.values()],
            }
            for task, metric in rows
        ],
        "every_step": [
            {
                "task": printable(task),
                "metric": printable(metric),
                "run": label,
                "step": results.asked["step"],
                "limit": results.asked["limit"],
                **cell,
            }
            for task, metric in rows
            for label, found in by_run.items()
            for results in sorted(found, key=lambda results: results.asked["step"])
            if (cell := _cell(results, task, metric))
        ]
        if several
        else [],
    }


def _cell(results: Results, task: str, metric: str) -> dict[str, Any] | None:
    """A score as JSON holds it; a value that is not finite is a string, as in the log."""
    score = results.scores.get(task, {}).get(metric)
    if score is None:
        return None
    return {
        "value": json_value(score.value),
        "stderr": None if score.stderr is None else json_value(score.stderr),
        "bound": score.bound,
        "num_samples": results.num_samples.get(task),
    }


def _suite_warnings(latest: dict[str, Results], outdated: Sequence[str]) -> list[str]:
    """Sentences where a column is no result, or the columns do not answer the same question."""
    limits = {label: results.asked["limit"] for label, results in latest.items()}
    warnings = [
        f"{labels}: the first {limit} items only: not a result."
        for limit, labels in _by_value(limits)
        if limit is not None
    ]
    if outdated:
        one = len(outdated) == 1
        warnings.append(
            f"{named(outdated)}: {'its checkpoint is' if one else 'their checkpoints are'} no "
            f"longer what was evaluated; evaluate {'it' if one else 'them'} again."
        )
    if len({results.asked["step"] for results in latest.values()}) > 1:
        warnings.append("The columns are at different steps.")
    asked = {label: _flat(results.asked) for label, results in latest.items()}
    names = dict.fromkeys(name for leaves in asked.values() for name in leaves)
    differing = [
        name
        for name in names
        if name not in OWN_TO_A_RUN and len({leaves.get(name) for leaves in asked.values()}) > 1
    ]
    for name in differing[:MAX_DIFFERENCES]:
        values = {label: leaves.get(name) for label, leaves in asked.items()}
        each = "; ".join(f"{labels}: {_short(value)}" for value, labels in _by_value(values))
        warnings.append(printable(f"Not the same question: `{name}` differs ({each})."))
    if len(differing) > MAX_DIFFERENCES:
        warnings.append(f"{len(differing) - MAX_DIFFERENCES} more parts of the question differ.")
    return warnings


def _by_value(values: dict[str, Any]) -> list[tuple[Any, str]]:
    """(value, who has it) for each value of a dictionary by label, in its order."""
    return [
        (value, named([label for label, other in values.items() if other == value]))
        for value in dict.fromkeys(values.values())
    ]


def named(labels: Sequence[str]) -> str:
    """Some labels in a sentence; of many the first few and how many more."""
    if len(labels) <= MAX_NAMED:
        return ", ".join(labels)
    return f"{', '.join(labels[: MAX_NAMED - 1])} and {len(labels) - MAX_NAMED + 1} more"


def _flat(value: dict[str, Any], prefix: str = "") -> dict[str, str]:
    """The leaves of nested dictionaries as JSON, under dotted names."""
    leaves: dict[str, str] = {}
    for name, inner in value.items():
        if isinstance(inner, dict):
            leaves |= _flat(inner, f"{prefix}{name}.")
        else:
            leaves[prefix + name] = json.dumps(inner, sort_keys=True, ensure_ascii=False)
    return leaves


def _short(value: str | None, length: int = 24) -> str:
    """`value` cut to `length` characters, visibly; – where there is none."""
    value = "–" if value is None else value.strip('"')
    return value if len(value) <= length else value[:length] + "…"
