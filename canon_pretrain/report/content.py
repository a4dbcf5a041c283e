"""The content of a report as one JSON value: report.json is it, the page and the Markdown show it.

Numbers are unrounded; words.py formats them. No torch.
"""

from collections.abc import Sequence
from typing import Any

from canon_pretrain.core.errors import UserError
from canon_pretrain.core.text import printable
from canon_pretrain.model.args import ModelArgs, num_parameters
from canon_pretrain.report.evaluations import (
    Evaluation,
    differences,
    evaluations_of,
    suite_order,
    tokens_at,
)
from canon_pretrain.report.figures import (
    CURVES,
    held_out_curves,
    late_loss,
    length_figures,
    score_curves,
    training_curve,
)
from canon_pretrain.report.record import RunRecord, differing, in_turn, is_outdated
from canon_pretrain.report.score_tables import anchors, suite_step
from canon_pretrain.report.verdicts import verdict_summary
from canon_pretrain.run.log import json_value

VERSION = 2
MAX_DIFFERENCES = 5
"""Sentences at most on how the questions of one suite differ."""
MAX_NAMED = 6
"""Runs at most that a sentence names one by one."""


def report_content(runs: Sequence[RunRecord], comparison: dict[str, Any]) -> dict[str, Any]:
    """Return everything that the report shows of `runs`, JSON values only.

    `comparison` is the value of comparison.comparison_content.
    """
    comparison = {name: _in_order(value) for name, value in comparison.items()}
    steps = {suite: suite_step(shown) for suite, shown in comparison["steps"].items()}
    names = {each.suite for run in runs for each in evaluations_of(run)}
    suites = [_suite(name, runs, steps.get(name)) for name in sorted(names, key=suite_order)]
    # an architecture is drawn by the runs of its chosen learning rate; else by all
    lines = {
        each["label"]: tuple((each["chosen"] or each)["runs"])
        for each in comparison["architectures"]
    }
    baseline = lines[comparison["baseline"]] if len(lines) > 1 else ()
    return {
        "version": VERSION,
        "title": runs[0].label if len(runs) == 1 else f"{len(runs)} runs",
        "warnings": _data_warnings(runs) + [line for run in runs for line in run.left_out],
        "comparison": comparison,
        "verdicts": verdict_summary(comparison["pairs"], comparison["refused"]),
        "anchors": anchors((r["task"], r["metric"]) for suite in suites for r in suite["rows"]),
        "held_out": held_out_curves(runs, lines),
        "score_curves": score_curves(runs),
        "lengths": length_figures(runs, lines, comparison["steps"]),
        "runs": [_run(run) for run in runs],
        "differing_settings": differing(runs),
        "curves": [training_curve(runs, curve) for curve in CURVES],
        "late_loss": late_loss(runs, baseline),
        "suites": suites,
        "without_evaluations": [run.label for run in runs if not run.evaluations],
    }


def _in_order(value: Any) -> Any:
    """The rows of a table by suite; anything else as it is."""
    is_table = isinstance(value, list) and all(isinstance(x, dict) and "suite" in x for x in value)
    return sorted(value, key=lambda row: suite_order(row["suite"])) if is_table else value


def _data_warnings(runs: Sequence[RunRecord]) -> list[str]:
    data = [str(run.identity.get("data_fingerprint")) for run in runs]
    if len(set(data)) < 2:
        return []
    each = "; ".join(f"{run.label}: {x[:12]}" for run, x in zip(runs, data, strict=True))
    return [
        f"These runs were trained on different data ({each}). A difference between their curves "
        "or scores may come from the data as well as from the model."
    ]


def _run(run: RunRecord) -> dict[str, Any]:
    """The header of one run: raw facts."""
    identity, heads, failure = run.identity, run.heads, run.failure
    prefix = "model."
    model = {k.removeprefix(prefix): v for k, v in identity.items() if k.startswith(prefix)}
    try:
        parameters = num_parameters(ModelArgs(**model))
    except (TypeError, UserError):  # another version recorded other fields than ours
        parameters = None
    return {
        "label": run.label,
        "folder": printable(str(run.folder.path)),
        "description": printable(str(run.config.get("job", {}).get("description") or "")),
        "state": _state(run),
        "failure": failure[1] if failure else None,
        "step": failure[0] if failure else _current_step(run),
        "total_steps": identity.get("training.steps"),
        "tokens": run.steps[-1]["tokens"] if run.steps else 0,
        "num_parameters": parameters,
        "flavor": run.config.get("model", {}).get("flavor"),
        "model": model,
        "optimizer": identity.get("optimizer.name"),
        "learning_rate": identity.get("optimizer.lr"),
        "schedule": identity.get("lr_scheduler.decay_type"),
        "seq_len": identity.get("training.seq_len"),
        "global_batch_size": identity.get("training.global_batch_size"),
        "data_fingerprint": identity.get("data_fingerprint"),
        "data_seed": identity.get("data.data_seed"),
        "init_seed": identity.get("model.init_seed"),
        "world_sizes": in_turn(event.get("world_size") for event in heads),
        "torch": in_turn(event.get("torch") for event in heads),
        "torchtitan": in_turn(event.get("torchtitan") for event in heads),
        "first_event": run.events[0].get("time") if run.events else None,
        "last_event": run.events[-1].get("time") if run.events else None,
        "restarts": [
            {
                "from_step": event["from_step"],
                "tokens": tokens_at(run, event["from_step"]),
                "world_size": event.get("world_size"),
                "time": event.get("time"),
            }
            for event in heads
            if event["event"] == "resume"
        ],
    }


def _current_step(run: RunRecord) -> int:
    """The run's step by its log: a resume goes back to its checkpoint."""
    step = 0
    for event in run.events:
        if event["event"] in ("step", "stop", "done"):
            step = event.get("step", step)
        elif event["event"] in ("start", "resume"):
            step = event.get("from_step", 0)
    return step


def _state(run: RunRecord) -> str:
    """done, failed, stopped (on request), or unfinished: running or killed."""
    if run.failure:
        return "failed"
    if run.is_done:
        return "done"
    return "stopped" if run.events and run.events[-1]["event"] == "stop" else "unfinished"


def _suite(suite: str, runs: Sequence[RunRecord], step: int | None) -> dict[str, Any]:
    """One suite's tables: the latest step of each run, and every step if there are several."""
    by_run = {run: [e for e in evaluations_of(run) if e.suite == suite] for run in runs}
    found = [evaluations for evaluations in by_run.values() if evaluations]
    latest = [evaluations[-1] for evaluations in found]
    metrics: dict[str, dict[str, None]] = {}  # in the order of the newest results
    for evaluations in found:
        for each in reversed(evaluations):
            for task, scores in each.results.scores.items():
                metrics.setdefault(task, {}).update(dict.fromkeys(scores))
    outdated = [
        run.label
        for run, evaluations in by_run.items()
        if evaluations and is_outdated(run.folder, evaluations[-1].results)
    ]
    rows, every_step = [], []
    for task, metric in [(task, metric) for task, names in metrics.items() for metric in names]:
        names = {"task": printable(task), "metric": printable(metric)}
        rows.append({**names, "cells": [_cell(each, task, metric) for each in latest]})
        for evaluations in found:
            for each in sorted(evaluations, key=lambda each: each.step):
                if cell := _cell(each, task, metric):
                    at = {"run": each.run, "step": each.step, "limit": each.limit}
                    every_step.append({**names, **at, **cell})
    return {
        "suite": suite,
        "suite_step": max(each.step for each in latest) if step is None else step,
        "warnings": _suite_warnings(latest, outdated),
        "columns": [{"run": e.run, "step": e.step, "limit": e.limit} for e in latest],
        "rows": rows,
        "every_step": every_step if any(len(each) > 1 for each in found) else [],
    }


def _cell(each: Evaluation, task: str, metric: str) -> dict[str, Any] | None:
    """A score as JSON holds it; a value that is not finite is a string, as in the log."""
    score = each.results.scores.get(task, {}).get(metric)
    if score is None:
        return None
    return {
        "value": json_value(score.value),
        "stderr": None if score.stderr is None else json_value(score.stderr),
        "bound": score.bound,
        "num_samples": each.results.num_samples.get(task),
    }


def _suite_warnings(latest: Sequence[Evaluation], outdated: Sequence[str]) -> list[str]:
    """Sentences if a column is not a result, or the columns do not answer the same question."""
    labels = [each.run for each in latest]
    warnings = [
        f"{who}: the first {limit} items only: not a result."
        for limit, who in _by_value(labels, [each.limit for each in latest])
        if limit is not None
    ]
    if outdated:
        one = len(outdated) == 1
        warnings.append(
            f"{named(outdated)}: {'its checkpoint is' if one else 'their checkpoints are'} no "
            f"longer what was evaluated; evaluate {'it' if one else 'them'} again."
        )
    if len({each.step for each in latest}) > 1:
        warnings.append("The columns are at different steps.")
    found = differences(latest)
    for name, values in list(found.items())[:MAX_DIFFERENCES]:
        each = "; ".join(f"{who}: {_short(value)}" for value, who in _by_value(labels, values))
        warnings.append(printable(f"Not the same question: `{name}` differs ({each})."))
    if len(found) > MAX_DIFFERENCES:
        warnings.append(f"{len(found) - MAX_DIFFERENCES} more parts of the question differ.")
    return warnings


def _by_value(labels: Sequence[str], values: Sequence[Any]) -> list[tuple[Any, str]]:
    """(value, who has it) for each value, in its order."""
    pairs = list(zip(labels, values, strict=True))
    return [
        (value, named([label for label, other in pairs if other == value]))
        for value in dict.fromkeys(values)
    ]


def named(labels: Sequence[str]) -> str:
    """Return labels as a sentence has them; of many the first few and how many more."""
    if len(labels) <= MAX_NAMED:
        return ", ".join(labels)
    return f"{', '.join(labels[: MAX_NAMED - 1])} and {len(labels) - MAX_NAMED + 1} more"


def _short(value: str | None, length: int = 24) -> str:
    value = "–" if value is None else value.strip('"')
    return value if len(value) <= length else value[:length] + "…"
