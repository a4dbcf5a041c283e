"""What the report says, as one JSON value: report.json is it, the page and the Markdown show it.

Numbers are unrounded here; `page.py` formats them. No torch.
"""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from canon_pretrain.core.errors import UserError
from canon_pretrain.core.text import printable
from canon_pretrain.model.args import ModelArgs, num_parameters
from canon_pretrain.report.evaluations import Run, suite_order
from canon_pretrain.report.lengths import length_figures
from canon_pretrain.report.over_steps import held_out_curves, score_curves, tokens_at
from canon_pretrain.report.published import anchors
from canon_pretrain.report.score_tables import suite_step
from canon_pretrain.report.suite_tables import suites_content
from canon_pretrain.report.training_curves import CURVES, late_loss, line, points_a_line
from canon_pretrain.report.verdict_summary import entries, verdict_summary

VERSION = 2


def report_content(runs: Sequence[Run], comparison: dict[str, Any]) -> dict[str, Any]:
    """Everything that the report shows of `runs`, JSON values only.

    `comparison` is the value of `canon_pretrain.report.comparison.comparison_content`.
    """
    comparison = {name: _in_order(value) for name, value in comparison.items()}
    most = points_a_line(len(runs) * len(CURVES))
    steps = comparison["steps"]
    suites = suites_content(runs, {suite: suite_step(shown) for suite, shown in steps.items()})
    return {
        "version": VERSION,
        "title": runs[0].label if len(runs) == 1 else f"{len(runs)} runs",
        "warnings": _data_warnings(runs) + [line for run in runs for line in run.left_out],
        "comparison": comparison,
        "verdicts": verdict_summary(comparison),
        "anchors": anchors((r["task"], r["metric"]) for suite in suites for r in suite["rows"]),
        "held_out": held_out_curves(runs, entries(comparison)),
        "score_curves": score_curves(runs),
        "lengths": length_figures(runs, entries(comparison), steps),
        "runs": [_run_content(run) for run in runs],
        "differing_settings": _differing_settings(runs),
        "curves": [
            {
                **asdict(curve),
                "lines": [{"run": run.label, **line(run.steps, curve.field, most)} for run in runs],
            }
            for curve in CURVES
        ],
        "late_loss": late_loss(
            [(run.label, run.steps) for run in runs], _baseline_runs(comparison)
        ),
        "suites": suites,
        "without_evaluations": [run.label for run in runs if not run.evaluations],
    }


def _baseline_runs(comparison: dict[str, Any]) -> Sequence[str]:
    """The runs of the baseline whose losses the others' are compared with; none if it is alone."""
    if len(comparison["architectures"]) < 2:
        return []
    return next(each.runs for each in entries(comparison) if each.label == comparison["baseline"])


def _in_order(value: Any) -> Any:
    """The rows of a table by suite, otherwise as they were; what is no table of tasks as it is."""
    if (
        isinstance(value, list)
        and value
        and all(isinstance(x, dict) and "suite" in x for x in value)
    ):
        return sorted(value, key=lambda row: suite_order(row["suite"]))
    return value


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
        "failure": run.failure[1] if run.failure else None,
        "step": run.failure[0] if run.failure else _current_step(run),
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
    """done, failed, stopped (on request), or unfinished: running or killed, which no log tells."""
    if run.failure:
        return "failed"
    if run.folder.done_file.exists():
        return "done"
    return "stopped" if run.events and run.events[-1]["event"] == "stop" else "unfinished"


def _restarts(run: Run) -> list[dict[str, Any]]:
    """Each `resume`, with the tokens seen by then."""
    return [
        {
            "from_step": event["from_step"],
            "tokens": tokens_at(run, event["from_step"]),
            "world_size": event.get("world_size"),
            "time": event.get("time"),
        }
        for event in run.launches
        if event["event"] == "resume"
    ]


def _differing_settings(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """The fields of `identity` in which the runs are not all alike."""
    names = dict.fromkeys(name for run in runs for name in run.identity)
    rows = [{"setting": name, "values": [run.identity.get(name) for run in runs]} for name in names]
    return [row for row in rows if any(value != row["values"][0] for value in row["values"])]
