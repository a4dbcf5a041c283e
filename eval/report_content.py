"""What the report says, as one JSON value: report.json is it, the page and the Markdown show it.

Numbers are unrounded here; `report_page` formats them. No torch.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from canon_pretrain.errors import UserError
from canon_pretrain.model.args import ModelArgs, num_parameters
from canon_pretrain.run.log import json_value
from canon_pretrain.run.names import printable
from eval.report_curves import CURVES, line
from eval.report_runs import Run
from eval.results import Results

VERSION = 1

OWN_TO_A_RUN = ("checkpoint", "written_ns", "step", "suite", "limit", "train_fingerprint")
"""What `asked` may differ in while two runs were still asked the same question."""

MAX_DIFFERENCES = 5
"""Sentences at most on how the questions of one suite differ."""


def report_content(runs: Sequence[Run]) -> dict[str, Any]:
    """Everything that the report shows of `runs`, JSON values only."""
    return {
        "version": VERSION,
        "title": runs[0].label if len(runs) == 1 else f"{len(runs)} runs",
        "warnings": _data_warnings(runs),
        "runs": [_run_content(run) for run in runs],
        "differing_settings": _differing_settings(runs),
        "curves": [
            {
                **asdict(curve),
                "lines": [{"run": run.label, **line(run.steps, curve.field)} for run in runs],
            }
            for curve in CURVES
        ],
        "suites": [_suite_content(suite, runs) for suite in _suites(runs)],
        "without_evaluations": [run.label for run in runs if not run.evaluations],
    }


def _data_warnings(runs: Sequence[Run]) -> list[str]:
    """A sentence where the runs did not learn from the same data."""
    fingerprints = [str(run.identity.get("data_fingerprint")) for run in runs]
    if len(set(fingerprints)) < 2:
        return []
    each = "; ".join(
        f"{run.label}: {fingerprint[:12]}"
        for run, fingerprint in zip(runs, fingerprints, strict=True)
    )
    return [
        f"These runs were trained on different data ({each}). A difference between their curves "
        "or scores may come from the data as well as from the model."
    ]


def _run_content(run: Run) -> dict[str, Any]:
    """The header of one run: raw facts."""
    identity, launches = run.identity, run.launches
    job = run.config.get("config", {}).get("job", {})
    model = {
        name.removeprefix("model."): value
        for name, value in identity.items()
        if name.startswith("model.")
    }
    last = run.steps[-1] if run.steps else {"tokens": 0}
    return {
        "label": run.label,
        "folder": printable(str(run.folder.path)),
        "description": printable(str(job.get("description") or "")),
        "state": _state(run),
        "step": _current_step(run),
        "total_steps": identity.get("training.steps"),
        "tokens": last["tokens"],
        "num_parameters": _num_parameters(model),
        "flavor": run.config.get("config", {}).get("model", {}).get("flavor"),
        "model": model,
        "optimizer": identity.get("optimizer.name"),
        "learning_rate": identity.get("optimizer.lr"),
        "schedule": identity.get("lr_scheduler.decay_type"),
        "seq_len": identity.get("training.seq_len"),
        "global_batch_size": identity.get("training.global_batch_size"),
        "data_fingerprint": identity.get("data_fingerprint"),
        "data_seed": identity.get("data.data_seed"),
        "init_seed": identity.get("model.init_seed"),
        "world_sizes": _in_turn([event.get("world_size") for event in launches]),
        "torch": _in_turn([event.get("torch") for event in launches]),
        "torchtitan": _in_turn([event.get("torchtitan") for event in launches]),
        "first_event": run.events[0].get("time") if run.events else None,
        "last_event": run.events[-1].get("time") if run.events else None,
        "restarts": _restarts(run),
    }


def _num_parameters(model: dict[str, Any]) -> int | None:
    """N of the recorded model; None where another version recorded other fields than ours."""
    try:
        return num_parameters(ModelArgs(**model))
    except (TypeError, UserError):
        return None


def _in_turn(values: Sequence[Any]) -> list[Any]:
    """`values` without those that repeat the one before, and without None."""
    known = [value for value in values if value is not None]
    return [value for k, value in enumerate(known) if k == 0 or value != known[k - 1]]


def _current_step(run: Run) -> int:
    """Where the run stands by its log: a resume goes back to the checkpoint it took up."""
    step = 0
    for event in run.events:
        if event["event"] in ("step", "stop", "done"):
            step = event.get("step", step)
        elif event["event"] == "resume":
            step = event["from_step"]
        elif event["event"] == "start":
            step = 0
    return step


def _state(run: Run) -> str:
    """done, stopped (on request), or unfinished: running or killed, which no log can tell."""
    if run.folder.done_file.exists():
        return "done"
    return "stopped" if run.events and run.events[-1]["event"] == "stop" else "unfinished"


def _restarts(run: Run) -> list[dict[str, Any]]:
    """Each `resume`, with the tokens seen by then."""
    steps = run.steps
    restarts = []
    for event in run.launches:
        if event["event"] != "resume":
            continue
        step = event["from_step"]
        # a checkpoint's step need not be a logged one; tokens a step are the same all along
        near = min(steps, key=lambda e: abs(e["step"] - step), default=None)
        tokens = round(step * near["tokens"] / near["step"]) if near and near["step"] else None
        restarts.append(
            {
                "from_step": step,
                "tokens": tokens,
                "world_size": event.get("world_size"),
                "time": event.get("time"),
            }
        )
    return restarts


def _differing_settings(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """The fields of `identity` in which the runs are not all alike."""
    names = dict.fromkeys(name for run in runs for name in run.identity)
    rows = [{"setting": name, "values": [run.identity.get(name) for run in runs]} for name in names]
    return [row for row in rows if any(value != row["values"][0] for value in row["values"])]


def _suites(runs: Sequence[Run]) -> list[str]:
    return sorted({results.asked["suite"] for run in runs for results in run.evaluations})


def _suite_content(suite: str, runs: Sequence[Run]) -> dict[str, Any]:
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
    return {
        "suite": suite,
        "warnings": _suite_warnings(latest),
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
        "num_samples": results.num_samples.get(task),
    }


def _suite_warnings(latest: dict[str, Results]) -> list[str]:
    """Sentences where a column is no result, or the columns do not answer the same question."""
    warnings = [
        f"{label}: the first {results.asked['limit']} items only: not a result."
        for label, results in latest.items()
        if results.asked["limit"] is not None
    ]
    warnings += [
        f"{label}: its checkpoint was written again after this was asked; evaluate it again."
        for label, results in latest.items()
        if _was_rewritten(results)
    ]
    if len({results.asked["step"] for results in latest.values()}) > 1:
        warnings.append("The columns stand at different steps.")
    asked = {label: _flat(results.asked) for label, results in latest.items()}
    names = dict.fromkeys(name for leaves in asked.values() for name in leaves)
    differing = [
        name
        for name in names
        if name not in OWN_TO_A_RUN and len({leaves.get(name) for leaves in asked.values()}) > 1
    ]
    for name in differing[:MAX_DIFFERENCES]:
        each = "; ".join(f"{label}: {_short(leaves.get(name))}" for label, leaves in asked.items())
        warnings.append(printable(f"Not the same question: `{name}` differs ({each})."))
    if len(differing) > MAX_DIFFERENCES:
        warnings.append(f"{len(differing) - MAX_DIFFERENCES} more parts of the question differ.")
    return warnings


def _was_rewritten(results: Results) -> bool:
    """Whether the checkpoint is there and was written at another time than what was asked."""
    written = results.asked.get("written_ns")
    try:
        now = (Path(results.asked["checkpoint"]) / ".metadata").stat().st_mtime_ns
    except OSError:
        return False
    return written is not None and now != written


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
