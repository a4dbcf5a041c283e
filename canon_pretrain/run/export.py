"""`python -m canon_pretrain.run export wandb|tensorboard RUN`: the log, in another tool's form.

RUN/log.jsonl is the run; what wandb or TensorBoard show is a copy that can be made again at any
time. A copy begins from the whole log, without superseded steps, so a run of many launches is one
curve, and replaces the copy that was there. With `--follow` it goes on as the log grows: that is
how metrics.enable_wandb and metrics.enable_tensorboard show a run live (run/live_export.py), and
what a machine with a network can do for a cluster that has none.

    log.jsonl, evals/  ->  rows (a step's numbers by name)  ->  a target: wandb, TensorBoard
"""

import argparse
import hashlib
import json
import math
import os
import select
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Protocol

from canon_pretrain.errors import UserError
from canon_pretrain.run.folder import RunFolder
from canon_pretrain.run.history import Evaluation, read_evaluations, read_events
from canon_pretrain.run.lock import live_holder
from canon_pretrain.run.log import LogFollower, drop_superseded, number
from canon_pretrain.run.redaction import publishable

POLL_S = 1.0
FINISH_S = 60.0
"""What a live copy has to end in, once its trainer has gone: then it is ended as it stands."""
MODES = ("online", "offline", "disabled")

GROUPS = {
    "train": ("loss", "max_loss", "grad_norm", "lr", "skipped_steps", "restarts"),
    "speed": (
        *("tokens_per_second", "tokens_per_second_per_device", "seconds_per_step", "mfu"),
        *("data_wait", "memory_gib", "checkpoint_seconds", "checkpoint_stall_seconds"),
    ),
    "validation": ("loss", "bits_per_byte"),
}
"""Fields of `step` and `validation` events, under the heading that the tools group them by."""
SEEDS = ("model.init_seed", "data.data_seed")


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


class Target(Protocol):
    """Where rows go. A target is made with the place and the `About`, and replaces what it made
    before in that place."""

    def write(self, row: Row) -> None:
        """Take a row; steps come in order, but for those that a `restart` takes back."""

    def restart(self, step: int) -> None:
        """What was given of later steps than `step` is void."""

    def flush(self) -> None: ...

    def finish(self) -> str:
        """Complete the copy; a sentence that says where it is."""


# -- the log as rows ---------------------------------------------------------------------------


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


def about(
    folder: RunFolder, events: list[dict[str, Any]], environ: Mapping[str, str] = os.environ
) -> About:
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
        config=publishable(config, environ),
        began=seconds(first.get("time")),
    )


# -- copying -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Export:
    """A run on its way into a target, which `open_target` makes of the run's `About`."""

    folder: RunFolder
    open_target: Callable[[About], Target]

    def whole(self, say: Callable[[str], None]) -> str:
        """Copy what there is, evaluations too; gives the target's sentence on it."""
        events = read_events(self.folder)
        facts = about(self.folder, events)
        rows = rows_of(events)
        evaluations, notices = read_evaluations(self.folder, facts.config["identity"])
        for notice in notices:
            say(f"NOTE: {notice}")
        identity = facts.config["identity"]
        per_step = [identity.get(f"training.{k}") for k in ("global_batch_size", "seq_len")]
        tokens = math.prod(n if isinstance(n, int) else 0 for n in per_step)
        rows = with_evaluations(rows, evaluations, tokens)
        target = self.open_target(facts)
        for row in rows:
            target.write(row)
        scores = len({(each.suite, each.step) for each in evaluations})
        told = target.finish()
        return f"{len(rows)} steps and {scores} evaluations of {self.folder.path}: {told}"

    def follow(self, ended: Callable[[float], bool]) -> str:
        """Copy what there is and what comes, until `ended(seconds to wait)`, or the run is done."""
        log = LogFollower(self.folder.log_file)
        events = drop_superseded(log.poll())
        while not any(event["event"] in ("step", "start", "resume") for event in events):
            if ended(POLL_S):
                break
            events = drop_superseded([*events, *log.poll()])
        target = self.open_target(about(self.folder, events))
        for row in rows_of(events):
            target.write(row)
        target.flush()
        turns = [e["event"] for e in events if e["event"] in ("start", "resume", "done")]
        over = turns[-1:] == ["done"]
        while not over:
            over = ended(POLL_S)  # asked first: what was written before the end is still read
            for event in log.poll():
                if event["event"] in ("start", "resume"):
                    target.restart(int(event.get("from_step", 0)))
                new = row_of(event)
                if new is not None:
                    target.write(new)
                over |= event["event"] == "done"
            target.flush()
        return target.finish()


# -- the command -------------------------------------------------------------------------------


def add_parser(subparsers: Any) -> None:
    """`export`, for `python -m canon_pretrain.run`."""
    parser = subparsers.add_parser(
        "export",
        help="show a run in wandb or TensorBoard",
        description="Make a run's log.jsonl and evaluations into a run of wandb or TensorBoard: "
        "one clean curve over all launches, in the place of what was there before.",
        epilog="examples:\n"
        "  python -m canon_pretrain.run export tensorboard RUN && tensorboard --logdir RUN/tb\n"
        "  python -m canon_pretrain.run export wandb RUN && wandb sync RUN/wandb/offline-run-*\n"
        "  python -m canon_pretrain.run export wandb RUN --mode online --project canon\n"
        "  python -m canon_pretrain.run export wandb RUN --mode online --follow",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("target", choices=("wandb", "tensorboard"))
    parser.add_argument("folder", type=Path, metavar="RUN", help="a run folder")
    parser.add_argument("--out", type=Path, metavar="DIR", help="as DIR/wandb, DIR/tb (RUN)")
    parser.add_argument("--follow", action="store_true", help="go on while the run goes on")
    wandb = parser.add_argument_group("wandb")
    wandb.add_argument("--mode", choices=MODES, help="default: $WANDB_MODE, or offline")
    wandb.add_argument("--project", help="default: $WANDB_PROJECT, or canon_pretrain")
    wandb.add_argument("--entity", help="default: $WANDB_ENTITY, or the account's own")
    wandb.add_argument("--name", help="default: $WANDB_NAME, or the run folder's name")
    wandb.add_argument("--tags", nargs="*", default=[], metavar="TAG")
    # metrics.save_tb_folder; and how the trainer starts it: until its end of the pipe closes, and
    # deaf to its signals
    parser.add_argument("--tb_folder", default="tb", help=argparse.SUPPRESS)
    parser.add_argument("--beside_trainer", action="store_true", help=argparse.SUPPRESS)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Export one run; the exit code."""
    folder = RunFolder(arguments.folder)
    folder.read_config()
    if arguments.out is None and not arguments.follow and live_holder(folder.lock_file):
        raise UserError(
            f"{folder.path} is being trained, and may show itself live in the default place; name "
            "another with --out, or add --follow"
        )
    export = Export(folder, lambda facts: open_target(arguments, facts))
    if not arguments.follow:
        print(export.whole(lambda line: print(line, file=sys.stderr)))
        return 0
    if arguments.beside_trainer:
        for name in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(name, signal.SIG_IGN)
        print(export.follow(_trainer_ended))
        return 0
    interrupted = threading.Event()
    before = signal.signal(signal.SIGINT, lambda *_: interrupted.set())
    try:
        print(export.follow(interrupted.wait))
    finally:
        signal.signal(signal.SIGINT, before)
    return 0


def open_target(arguments: argparse.Namespace, facts: About) -> Target:
    """The target that the command line names. Raises UserError where its package is missing."""
    out = arguments.out or arguments.folder
    if arguments.target == "tensorboard":
        from canon_pretrain.run.export_tensorboard import TensorBoardTarget

        return TensorBoardTarget(out / arguments.tb_folder, facts, live=arguments.follow)
    from canon_pretrain.run.export_wandb import WandbTarget, settings_of

    return WandbTarget(out, facts, settings_of(arguments, os.environ))


def _trainer_ended(wait_s: float) -> bool:
    """Whether stdin, a pipe from the trainer, was closed within `wait_s`: by it, or by its death.

    From then on this process has FINISH_S to live, whatever a network does.
    """
    readable, _, _ = select.select([sys.stdin], [], [], wait_s)
    ended = bool(readable) and not os.read(sys.stdin.fileno(), 1)
    if ended:
        watchdog = threading.Timer(FINISH_S, os._exit, (1,))
        watchdog.daemon = True
        watchdog.start()
    return ended
