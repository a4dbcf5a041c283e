"""`python -m canon_pretrain.run export wandb|tensorboard RUN`: the log, in another tool's form.

RUN/log.jsonl is the run; what wandb or TensorBoard show is a copy that can be made again at any
time. A copy begins from the whole log, without superseded steps, so a run of many launches is one
curve, and replaces the copy that was there. With `--follow` it goes on as the log grows: that is
how metrics.enable_wandb and metrics.enable_tensorboard show a run live (run/live_export.py), and
what a machine with a network can do for a cluster that has none.

    log.jsonl, evals/  ->  rows (export_rows.py)  ->  a target (export_wandb.py, ..._tensorboard.py)
"""

import argparse
import math
import os
import select
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from canon_pretrain.core.errors import UserError
from canon_pretrain.core.link_lock import live_holder
from canon_pretrain.report.export_rows import About, Row, about, row_of, rows_of, with_evaluations
from canon_pretrain.report.history import read_evaluations
from canon_pretrain.run.folder import RunFolder
from canon_pretrain.run.log import LogFollower, drop_superseded

POLL_S = 1.0
FINISH_S = 60.0
"""What a live copy has to end in, once its trainer has gone: then it is ended as it stands."""
MODES = ("online", "offline", "disabled")


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


# -- copying -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Export:
    """A run on its way into a target, which `open_target` makes of the run's `About`."""

    folder: RunFolder
    open_target: Callable[[About], Target]

    def whole(self, say: Callable[[str], None]) -> str:
        """Copy what there is, evaluations too; gives the target's sentence on it."""
        events = self.folder.read_log()
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
        from canon_pretrain.report.export_tensorboard import TensorBoardTarget

        return TensorBoardTarget(out / arguments.tb_folder, facts, live=arguments.follow)
    from canon_pretrain.report.export_wandb import WandbTarget, settings_of

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
