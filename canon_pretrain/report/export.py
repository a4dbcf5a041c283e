"""`python -m canon_pretrain.run export wandb|tensorboard RUN`: the log, in another tool's form.

RUN/log.jsonl is the run; wandb and TensorBoard show copies that can be made again at any time. A
copy begins from the whole log, without superseded steps, so a run of many launches is one curve,
and replaces the copy before it. With `--follow` it continues as the log grows: that is how
metrics.enable_wandb and metrics.enable_tensorboard show a run live (run/background.py), and what a
machine with a network can do for a cluster that has none.
"""

import argparse
import hashlib
import json
import math
import os
import re
import select
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from canon_pretrain.core.errors import UserError
from canon_pretrain.core.lock import live_holder
from canon_pretrain.report.export_targets import MODES, About, Row, TensorBoardTarget, WandbTarget
from canon_pretrain.report.record import RunRecord
from canon_pretrain.run.log import LogFollower, drop_superseded, number

POLL_S = 1.0
FINISH_S = 60.0
"""What a live copy has to end in once its trainer has gone: then it is killed."""

GROUPS = {
    "train": ("loss", "max_loss", "grad_norm", "lr", "skipped_steps", "restarts"),
    "speed": (
        *("tokens_per_second", "tokens_per_second_per_device", "seconds_per_step", "mfu"),
        *("data_wait", "memory_gib", "checkpoint_seconds", "checkpoint_stall_seconds"),
    ),
}
"""Fields of `step` events, under the heading that the tools group them by."""

Event = Mapping[str, Any]
Target = TensorBoardTarget | WandbTarget


# -- rows


def row_of(event: Event) -> Row | None:
    """Return the row of a `step` or `validation` event; None for other kinds.

    Values that the log does not have are left out; NaN and infinities stay.
    """
    values: dict[str, Any] = {}
    if event["event"] == "step":
        values = {f"{g}/{name}": event.get(name) for g, names in GROUPS.items() for name in names}
        sources = event.get("source_tokens") or {}
        if len(sources) > 1:
            values |= {f"data/tokens/{plain(name)}": tokens for name, tokens in sources.items()}
    elif event["event"] == "validation":
        sources = event.get("sources") or {}
        parts = {f"/{plain(name)}": part for name, part in sources.items()}
        for heading, part in {"": event, **(parts if len(parts) > 1 else {})}.items():
            names = ("loss", "bits_per_byte")
            values |= {f"validation{heading}/{name}": part.get(name) for name in names}
    else:
        return None
    try:
        numbers = {name: number(value) for name, value in values.items() if value is not None}
        return Row(int(event["step"]), int(event.get("tokens") or 0), _seconds(event), numbers)
    except (TypeError, ValueError) as error:
        raise UserError(f"the log is damaged at step {event['step']}: {error}") from None


def _evaluations(run: RunRecord, last_time: float) -> Iterable[Row]:
    """Yield the scores of evaluations, at their checkpoints' steps.

    A score is named eval/SUITE/TASK/METRIC, that of a trial eval/SUITE-firstN/...
    """
    sizes = [run.identity.get(f"training.{k}") for k in ("global_batch_size", "seq_len")]
    tokens_per_step = math.prod(n if isinstance(n, int) else 0 for n in sizes)
    for (suite, step), results in run.latest.items():
        limit = results.asked["limit"]
        heading = f"eval/{plain(suite if limit is None else f'{suite}-first{limit}')}"
        values = {
            f"{heading}/{plain(task)}/{plain(metric)}": score.value
            for task, metrics in results.scores.items()
            for metric, score in metrics.items()
        }
        yield Row(step, step * tokens_per_step, last_time, values)


def joined(rows: Iterable[Row]) -> list[Row]:
    """Return a row per step, in order: a validation or an evaluation joins the row of its step."""
    by_step: dict[int, Row] = {}
    for row in rows:
        before = by_step.get(row.step, row)
        values = {**before.values, **row.values}
        by_step[row.step] = before._replace(tokens=before.tokens or row.tokens, values=values)
    return [by_step[step] for step in sorted(by_step)]


def plain(name: str) -> str:
    """Return `name` as both tools take it in a chart's name: other characters become `_`."""
    return re.sub(r"[^A-Za-z0-9._-]", "_", name)


def _seconds(event: Event) -> float:
    """Return an event's time in seconds since 1970; 0 if it has none."""
    try:
        return datetime.fromisoformat(event["time"]).timestamp()
    except (KeyError, TypeError, ValueError):
        return 0.0


def about(run: RunRecord, events: list[dict[str, Any]]) -> About:
    """Return what the run is called and what it is, from config.json and its log."""
    run_id = next((event["run_id"] for event in reversed(events) if "run_id" in event), None)
    flavor = str(run.config.get("model", {}).get("flavor", "model"))
    position = str(run.identity.get("model.position", ""))
    canon = str(run.identity.get("model.canon_set", ""))
    tags = tuple(filter(None, (flavor, position, f"canon{canon}" if canon else "no-canon")))
    heads = [event for event in events if event["event"] in ("start", "resume")]
    newest = {name: value for name, value in (heads or [{}])[-1].items() if name != "event"}
    path = run.folder.path.resolve()
    return About(
        run_id=str(run_id or _digest(json.dumps(events[:1], sort_keys=True))),
        # `run` says nothing if every experiment has a folder of that name
        name=f"{path.parent.name}/{path.name}" if path.name in ("run", "runs") else path.name,
        group="-".join((*tags, _digest(run.recipe)[:6])),
        tags=tags,
        config=run.config | {"identity": run.identity, "launches": len(heads), "launch": newest},
        began=_seconds(events[0]) if events else 0.0,
    )


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:8]


# -- copying


def copy(
    run: RunRecord,
    open_target: Callable[[About], Target],
    ended: Callable[[float], bool] | None = None,
) -> str:
    """Copy what there is, evaluations too; returns where it is, in words.

    With `ended` the log alone, also what comes, until `ended(seconds to wait)` or the run is done.
    """
    log = LogFollower(run.folder.log_file)
    events = drop_superseded(log.poll()) if ended else run.events
    wait, is_over = ended or bool, ended is None
    while not is_over and not any(e["event"] in ("step", "start", "resume") for e in events):
        is_over = wait(POLL_S)
        events = drop_superseded([*events, *log.poll()])
    rows = joined(row for event in events if (row := row_of(event)))
    if ended is None:
        rows = joined([*rows, *_evaluations(run, rows[-1].time if rows else 0.0)])
    target = open_target(about(run, events))
    for row in rows:
        target.write(row)
    turns = [e["event"] for e in events if e["event"] in ("start", "resume", "done")]
    is_over |= turns[-1:] == ["done"]
    while not is_over:
        target.flush()
        is_over = wait(POLL_S)  # asked first: what was written before the end is still read
        for event in log.poll():
            if event["event"] in ("start", "resume"):
                target.restart(int(event.get("from_step", 0)))
            if row := row_of(event):
                target.write(row)
            is_over |= event["event"] == "done"
    place = target.finish()
    if ended:
        return place
    return f"{len(rows)} steps and {len(run.latest)} evaluations of {run.folder.path}: {place}"


# -- the command


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "export",
        help="show a run in wandb or TensorBoard",
        description="Make a run's log.jsonl and evaluations into a run of wandb or TensorBoard: "
        "one clean curve over all launches, in the place of what was there before.",
        epilog="example: python -m canon_pretrain.run export wandb RUN --mode online --follow",
    )
    add, given = parser.add_argument, os.environ.get
    add("target", choices=("wandb", "tensorboard"))
    add("folder", type=Path, metavar="RUN", help="a run folder")
    add("--out", type=Path, metavar="DIR", help="as DIR/wandb, DIR/tb (default: RUN)")
    add("--follow", action="store_true", help="continue while the run does")
    mode, project = given("WANDB_MODE") or "offline", given("WANDB_PROJECT") or "canon_pretrain"
    add("--mode", choices=MODES, default=mode, help="wandb's (default: %(default)s)")
    add("--project", default=project, help="wandb's (default: %(default)s)")
    entity, name = (
        given("WANDB_ENTITY") or given("WANDB_TEAM"),
        given("WANDB_NAME") or given("WANDB_RUN_NAME"),
    )
    add("--entity", default=entity, help="wandb's (default: $WANDB_ENTITY, or the account's own)")
    add("--name", default=name, help="wandb's (default: $WANDB_NAME, or the run folder's name)")
    add("--tags", nargs="*", default=[], metavar="TAG")
    # metrics.save_tb_folder; and how the trainer starts it: until its end of the pipe closes, and
    # deaf to its signals
    add("--tb_folder", default="tb", help=argparse.SUPPRESS)
    add("--beside_trainer", action="store_true", help=argparse.SUPPRESS)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Export one run; returns the exit code. Raises UserError."""
    record = RunRecord(arguments.folder)
    record.folder.read_config()  # refuses what is no run
    follows, out = arguments.follow, arguments.out or arguments.folder
    if arguments.out is None and not follows and live_holder(record.folder.lock_file):
        raise UserError(
            f"{record.folder.path} is being trained, and may show itself live in the default "
            "place; name another with --out, or add --follow"
        )

    def opened(facts: About) -> Target:
        if arguments.target == "tensorboard":
            return TensorBoardTarget(out / arguments.tb_folder, facts, live=follows)
        names = ("mode", "project", "entity", "name", "tags")
        return WandbTarget(out, facts, live=follows, **{n: getattr(arguments, n) for n in names})

    ended: Callable[[float], bool] | None = None
    if arguments.beside_trainer:
        ended = _trainer_ended
        for name in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(name, signal.SIG_IGN)
    elif follows:
        interrupted = threading.Event()
        ended = interrupted.wait
        signal.signal(signal.SIGINT, lambda *_: interrupted.set())
    else:
        for notice in record.notices:
            print(f"NOTE: {notice}", file=sys.stderr)
    print(copy(record, opened, ended))
    return 0


def _trainer_ended(wait_s: float) -> bool:
    """Return whether stdin, a pipe from the trainer, was closed within `wait_s`.

    From then on this process has FINISH_S to live, whatever a network does.
    """
    readable, _, _ = select.select([sys.stdin], [], [], wait_s)
    if ended := bool(readable) and not os.read(sys.stdin.fileno(), 1):
        watchdog = threading.Timer(FINISH_S, os._exit, (1,))
        watchdog.daemon = True
        watchdog.start()
    return ended
