"""A run's log as what wandb and TensorBoard take: a row of numbers a step, and what the run is.

Between log.jsonl and the targets of export.py. Superseded steps are gone by then (read_log), and
names are such that both tools can show them.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from canon_pretrain.core.errors import UserError
from canon_pretrain.report.history import SEEDS, Evaluation
from canon_pretrain.run.folder import RunFolder
from canon_pretrain.run.log import number

GROUPS = {
    "train": ("loss", "max_loss", "grad_norm", "lr", "skipped_steps", "restarts"),
    "speed": (
        *("tokens_per_second", "tokens_per_second_per_device", "seconds_per_step", "mfu"),
        *("data_wait", "memory_gib", "checkpoint_seconds", "checkpoint_stall_seconds"),
    ),
    "validation": ("loss", "bits_per_byte"),
}
"""Fields of `step` and `validation` events, under the heading that the tools group them by."""


@dataclass(frozen=True)
class Row:
    """The numbers that belong to one step, by name; `time` is when, in seconds since 1970."""

    step: int
    tokens: int
    time: float
    values: Mapping[str, float]


@dataclass(frozen=True)
class About:
    """What the copy says of the run beside its curves."""

    run_id: str
    name: str
    group: str
    """Equal for runs that differ in their seeds alone."""
    tags: tuple[str, ...]
    config: Mapping[str, Any]
    """The resolved job and its identity, without secrets."""
    began: float
    """The log's first time, in seconds since 1970."""


def row_of(event: Mapping[str, Any]) -> Row | None:
    """The row of a `step` or `validation` event; None for other kinds, and where it has no number.

    Values that the log does not have are left out; NaN and infinities stay.
    """
    kind = event["event"]
    if kind == "step":
        values = {
            f"{group}/{name}": event[name]
            for group in ("train", "speed")
            for name in GROUPS[group]
            if event.get(name) is not None
        }
        sources = event.get("source_tokens") or {}
        if len(sources) > 1:
            values |= {f"data/tokens/{plain(name)}": given for name, given in sources.items()}
    elif kind == "validation":
        measured = {"": event}
        if len(event.get("sources") or {}) > 1:
            measured |= event["sources"]
        values = {
            "/".join(filter(None, ("validation", plain(source), name))): figures[name]
            for source, figures in measured.items()
            for name in GROUPS["validation"]
            if figures.get(name) is not None
        }
    else:
        return None
    try:
        numbers = {name: number(value) for name, value in values.items()}
        tokens = int(event.get("tokens") or 0)
        return Row(int(event["step"]), tokens, seconds(event.get("time")), numbers)
    except (TypeError, ValueError) as error:
        raise UserError(f"the log is damaged: {kind} of step {event['step']}: {error}") from None


def rows_of(events: Iterable[Mapping[str, Any]]) -> list[Row]:
    """One row a step, in order; a validation joins the row of its step."""
    rows: dict[int, Row] = {}
    for event in events:
        row = row_of(event)
        if row is None:
            continue
        before = rows.get(row.step, row)
        values = {**before.values, **row.values}
        rows[row.step] = Row(row.step, before.tokens or row.tokens, before.time, values)
    return [rows[step] for step in sorted(rows)]


def with_evaluations(
    rows: list[Row], evaluations: Iterable[Evaluation], tokens_per_step: int
) -> list[Row]:
    """`rows` with each evaluation's scores at its checkpoint's step, in a new row if need be.

    A score is named eval/SUITE/TASK/METRIC; of results that were cut short, eval/SUITE-firstN/...
    """
    by_step = {row.step: row for row in rows}
    last_time = rows[-1].time if rows else 0.0
    for each in evaluations:
        suite = each.suite if each.limit is None else f"{each.suite}-first{each.limit}"
        name = "/".join(("eval", plain(suite), plain(each.task), plain(each.metric)))
        own = Row(each.step, each.step * tokens_per_step, last_time, {})
        row = by_step.get(each.step, own)
        by_step[each.step] = Row(row.step, row.tokens, row.time, {**row.values, name: each.value})
    return [by_step[step] for step in sorted(by_step)]


def plain(name: str) -> str:
    """`name` as both tools take it in a chart's name: other characters become underscores."""
    allowed = "-_."
    return "".join(c if c.isascii() and c.isalnum() or c in allowed else "_" for c in name)


def seconds(time_text: Any) -> float:
    """An ISO time of the log in seconds since 1970; 0 where there is none."""
    try:
        return datetime.fromisoformat(time_text).timestamp()
    except (TypeError, ValueError):
        return 0.0


def about(folder: RunFolder, events: list[dict[str, Any]]) -> About:
    """What the run is called and what it is, from config.json and the log. Raises UserError."""
    record = folder.read_config()
    identity = record.get("identity") if isinstance(record, dict) else None
    if not isinstance(identity, dict):
        raise UserError(f"{folder.config_file} is damaged: it has no `identity`")
    first = events[0] if events else {}
    run_id = next((event["run_id"] for event in reversed(events) if "run_id" in event), None)
    if run_id is None:  # a run from before run.json: the first line's time names it
        run_id = hashlib.sha256(json.dumps(first, sort_keys=True).encode()).hexdigest()[:8]
    flavor = str(record.get("config", {}).get("model", {}).get("flavor", "model"))
    position = str(identity.get("model.position", ""))
    canon = str(identity.get("model.canon_set", ""))
    sites = f"canon{canon}" if canon else "no-canon"
    same = {name: value for name, value in identity.items() if name not in SEEDS}
    digest = hashlib.sha256(json.dumps(same, sort_keys=True).encode()).hexdigest()[:6]
    path = folder.path.resolve()
    launches = [event for event in events if event["event"] in ("start", "resume")]
    config = {
        **record.get("config", {}),
        "identity": identity,
        "launches": len(launches),
        "launch": {k: v for k, v in (launches[-1] if launches else {}).items() if k != "event"},
    }
    return About(
        run_id=str(run_id),
        # `run` says nothing where every experiment has a folder of that name
        name=f"{path.parent.name}/{path.name}" if path.name in ("run", "runs") else path.name,
        group="-".join(filter(None, (flavor, position, sites, digest))),
        tags=tuple(filter(None, (flavor, position, sites))),
        config=config,
        began=seconds(first.get("time")),
    )
