"""The job chain of a run: decide before and after each launch what the job script does.

    python -m canon_pretrain.cluster.chain code --job ID -- --config FILE.toml ...
    python -m canon_pretrain.cluster.chain begin RUN --job ID [--restarts K] [--take-code] -- ...
    python -m canon_pretrain.cluster.chain end RUN --job ID [--restarts K] --asked none

slurm/lib.sh calls it. torchrun turns every exit code of a worker into 1, so the outcome of a launch
is read from status.json, the checkpoints and RUN/restarts.json. Restarts use the snapshots of the
run's code, RUN/code, and of their job's config, RUN/restarts.toml. No torch.
"""

import contextlib
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, get_args

from pydantic import Field

from canon_pretrain.checkpoint.folder import CheckpointFolder
from canon_pretrain.core.cli import Parser, command, positive, run_process
from canon_pretrain.core.errors import EPILOG, UserError
from canon_pretrain.core.files import find_record, write_atomic, write_json
from canon_pretrain.core.holder import read_count
from canon_pretrain.core.lock import live_holder
from canon_pretrain.run.config import read_experiment, split_arguments, to_toml
from canon_pretrain.run.folder import CHECKPOINTS, RunFolder
from canon_pretrain.run.source import (
    check_private,
    check_snapshot,
    differences,
    newest_snapshot,
    take_snapshot,
)
from canon_pretrain.run.status import Status

RESTARTS = 3  # without a new checkpoint, after which a job chain ends
# three heartbeats, and Slurm's default KillWait: by then a cancelled launch has ended
LOCK_TIMEOUT_S = 30.0

# what requested the stop: nothing, the time limit, preemption, SIGTERM (cancelled or requeued)
StopCause = Literal["none", "limit", "preempted", "term"]
# what the job script does: exit with 0; requeue; exit with 0, as a user stopped the run; exit with
# 1; exit, as Slurm decides whether the job is requeued
Action = Literal["done", "requeue", "stop", "failed", "leave"]
RUN_IN_USE = (
    "the run folder is in use by another launch ({}). Wait for its end, scancel one of the two, or "
    "choose another folder with --job.dump_folder"
)


@dataclass(frozen=True)
class JobStart:
    """The content of RUN/restarts.json: the newest start of the job that writes the run."""

    job: str
    launches: int  # status.json's at this start
    checkpoint: int  # step of the newest one at this start; 0 without one
    is_restart: bool = False
    # consecutive failed restarts without a newer checkpoint
    restarts_without_progress: Annotated[int, Field(alias="futile")] = 0
    ended: str | None = None  # an `Action`; None while it runs, or if it was killed

    def count_failure(self, newest: int) -> int:
        """Return `restarts_without_progress` for the next start if this one failed."""
        if newest > self.checkpoint:
            return 0
        return self.restarts_without_progress + self.is_restart


class Decision(NamedTuple):
    """What the job script does next, and the reason, for its output."""

    next: Action
    reason: str


def restarts_file(run: RunFolder, suffix: str = ".json") -> Path:
    return run.path / f"restarts{suffix}"


def newest_checkpoint(run: RunFolder) -> int:
    """Return the step of the newest complete checkpoint; 0 without one."""
    folder = CheckpointFolder(run.path / CHECKPOINTS)
    with contextlib.suppress(UserError, OSError):  # before the first launch
        folder = CheckpointFolder.of_run(run)
    return max(folder.steps(), default=0)


class Launch(NamedTuple):
    """What a launch sets by options or its config, as canon_pretrain.train reads them."""

    config: Path | None
    folder: str
    allowed: list[str]
    """run.allow_changes"""
    is_fresh: bool


def parse_launch(arguments: Sequence[str]) -> Launch:
    """Return the settings of a launch. Raises UserError if its config cannot be read."""
    # An option without its value is an error too, which the check of the job reports: nargs.
    parser = Parser(add_help=False)
    add = parser.add_argument
    add("--config", "--job.config_file", type=Path, nargs="?")
    add("--job.dump_folder", dest="folder", nargs="?")
    add("--run.allow_changes", dest="allowed", nargs="*")
    add("--checkpoint.fresh", dest="fresh", nargs="?", const="true")
    options = parser.parse_known_args(arguments)[0]
    values: dict[str, Any] = {}
    if options.config is not None:
        values = read_experiment(options.config)

    # An option that is not set has the value of the config, else the default.
    def setting(section: str, key: str, default: Any) -> Any:
        keys = values.get(section)
        if isinstance(keys, dict):
            return keys.get(key, default)
        return default  # a wrong type is reported by the check of the job

    allowed = options.allowed
    if allowed is None:
        allowed = setting("run", "allow_changes", [])
    fresh = options.fresh
    if fresh is None:
        fresh = setting("checkpoint", "fresh", False)
    return Launch(
        options.config,
        folder=options.folder or setting("job", "dump_folder", "./outputs"),
        allowed=",".join(map(str, allowed)).split(","),  # `a b` and `a,b` are valid
        is_fresh=str(fresh).lower() == "true",
    )


class LaunchCode(NamedTuple):
    """The snapshot and the config that a job uses; None for the current ones."""

    snapshot: Path | None = None
    config: Path | None = None


def launch_code(job: str, arguments: Sequence[str]) -> LaunchCode:
    """Return the code that `job` uses.

    Restarts use the run's snapshot and config. Other jobs use the snapshot if the run has a
    checkpoint, except with --checkpoint.fresh or `--run.allow_changes code`. Raises UserError if
    others may write the run.
    """
    try:
        launch = parse_launch(arguments)
    except UserError:
        return LaunchCode()  # the check of the job comes next, with a better message

    run = RunFolder(Path(launch.folder).absolute())
    check_private(run)
    snapshot = newest_snapshot(run)
    start = find_record(restarts_file(run), JobStart)
    is_restart = start is not None and start.job == job
    uses_current = "code" in launch.allowed or launch.is_fresh or not newest_checkpoint(run)
    if snapshot is None or (uses_current and not is_restart):
        return LaunchCode()

    check_snapshot(snapshot)
    config = restarts_file(run, ".toml")
    if is_restart and config.is_file():
        return LaunchCode(snapshot, config)
    return LaunchCode(snapshot)


def begin(
    run: RunFolder,
    job: str,
    *,
    restarts: int = RESTARTS,
    wait_s: float = LOCK_TIMEOUT_S,
    take_code: bool = False,
    config: Path | None = None,
) -> Decision | None:
    """Record a start of `job`, or return the Decision that forbids it.

    Forbidden if a launch of another job is alive after `wait_s` (a cancelled one may still save),
    or if starts that were killed with their scripts have used up `restarts`.
    """
    # Wait for the launch of another job. A silent one on another node counts as dead after
    # `wait_s`; the trainer waits longer.
    deadline = time.monotonic() + wait_s
    while True:
        other = live_holder(run.lock_file, wait_s)
        if other is None or other.job_id == job:
            break
        if time.monotonic() > deadline:
            return Decision("failed", RUN_IN_USE.format(other))
        time.sleep(min(1.0, wait_s / 10))

    # A restart continues the count of the previous start, and adds it if that was killed together
    # with its job script (a failed node, kill -9), so that `end` was not called.
    previous = find_record(restarts_file(run), JobStart)
    status = find_record(run.status_file, Status)
    newest = newest_checkpoint(run)
    num_launches = 0
    if status is not None:
        num_launches = status.launches
    start = JobStart(job, num_launches, newest)
    if previous is not None and previous.job == job:
        count = previous.restarts_without_progress
        if previous.ended is None:
            count = previous.count_failure(newest)
            if count >= restarts:
                _write(run, replace(previous, restarts_without_progress=count, ended="failed"))
                return _out_of_restarts(count, newest, "its job script was killed")
        start = replace(start, is_restart=True, restarts_without_progress=count)

    # Before the start is recorded: its restarts need the snapshot and the config.
    if take_code:
        take_snapshot(run)
    if config is not None and not start.is_restart:
        text = to_toml(read_experiment(config))
        write_atomic(restarts_file(run, ".toml"), text.encode())
    _write(run, start)
    return None


def end(run: RunFolder, job: str, stop_cause: StopCause, *, restarts: int = RESTARTS) -> Decision:
    """Decide and record the action after a launch of `job`, for which `begin` was called."""
    start = find_record(restarts_file(run), JobStart)
    status = find_record(run.status_file, Status)
    if start is None or start.job != job:
        # two jobs started at once: this one may have got the lock, restarts.json is the other's
        if start is not None and status is not None and _is_of_this_start(status, job):
            decision = _requested(status, stop_cause)
            if decision is not None:
                return decision
        raise UserError("chain.not_begun", f"no start of job {job}: call `begin` first")

    # A status of an earlier launch says nothing of this one; without Slurm it has no job id.
    if status is not None:
        is_earlier = status.launches <= start.launches
        is_of_other_job = status.job_id not in (None, job)
        if is_earlier or is_of_other_job:
            status = None

    # Without one, and without a request to stop, another launch may have the lock.
    if status is None and stop_cause == "none":
        other = live_holder(run.lock_file)
        if other is not None and other.job_id not in (None, job):
            _write(run, replace(start, ended="failed"))
            return Decision("failed", RUN_IN_USE.format(other))

    newest = newest_checkpoint(run)
    has_progress = newest > start.checkpoint
    count = 0 if has_progress else start.restarts_without_progress
    decision = _requested(status, stop_cause)

    # A failure uses up a restart. So does a stop without a new checkpoint: a time limit that is too
    # short for one would be reached forever.
    is_idle = decision is not None and decision.next == "requeue" and not has_progress
    if decision is None or (is_idle and stop_cause != "preempted"):
        count = start.count_failure(newest)
        fault = _failure(status)
        if decision is not None:
            fault = decision.reason
        if count >= restarts:
            decision = _out_of_restarts(count, newest, fault)
        elif decision is None:
            decision = Decision("requeue", f"the launch failed: {fault}")

    _write(run, replace(start, restarts_without_progress=count, ended=decision.next))
    if decision.next == "failed" and status is not None and status.state == "running":
        # the trainer was killed before it could write its state
        failed = replace(status, state="failed", phase="ended", reason=decision.reason)
        write_json(run.status_file, asdict(failed))
    return decision


def _is_of_this_start(status: Status, job: str) -> bool:
    """Return whether this start of the job wrote the status."""
    restart_count = read_count(os.environ, "SLURM_RESTART_COUNT")
    return status.job_id == job and status.restart_count == restart_count


def _out_of_restarts(count: int, newest: int, last_fault: str) -> Decision:
    """Return the decision after a failure that no restart may follow."""
    since = f"step {newest}" if newest else "the start"
    return Decision(
        "failed",
        f"{count} consecutive restart(s) from {since} failed "
        f"without a newer checkpoint; the last one: {last_fault}. See slurm.log, then submit again",
    )


def _requested(status: Status | None, stop_cause: StopCause) -> Decision | None:
    """Return the decision on a launch that ended as requested; None if it failed.

    `status`: that the launch wrote, None if it wrote none.
    """
    if status is not None and status.state == "done":
        return Decision("done", f"reached step {status.step} of {status.steps}")
    where = "before its first step"
    if status is not None:
        where = f"at step {status.step} of {status.steps}"

    # The request of the job script comes before the trainer's own reason.
    if stop_cause == "term":
        return Decision("leave", f"ended by SIGTERM {where}; Slurm decides whether it is requeued")
    if stop_cause == "preempted":
        return Decision("requeue", f"preempted {where}")
    if status is not None and status.state == "failed" and status.error_code:
        # the same command would fail again
        return Decision("failed", status.reason)
    if status is None or status.state != "stopped":
        return None

    # The trainer has stopped and saved: for the time limit, a signal of Slurm, or a user.
    if stop_cause == "limit":
        return Decision("requeue", f"stopped {where} before the time limit")
    if "SIGUSR" in status.reason:
        return Decision("requeue", f"stopped {where} by {status.reason}")
    return Decision("stop", f"stopped {where} by {status.reason}, not by the job script")


def _failure(status: Status | None) -> str:
    """Say how a launch failed; `status`: that it wrote, None if it wrote none."""
    if status is None:
        return "it ended before it wrote status.json; it may need more time (--time)"
    if status.state == "running":
        return f"it was killed at step {status.step} (phase {status.phase})"
    return status.reason or status.state


def _write(run: RunFolder, start: JobStart) -> None:
    """Write restarts.json; a full disk must not end the run, only the count is lost."""
    content = asdict(start)
    content["futile"] = content.pop("restarts_without_progress")
    path = restarts_file(run)
    try:
        run.path.mkdir(parents=True, exist_ok=True)
        write_json(path, content)
    except OSError as error:
        print(f"{path} cannot be written: {error.strerror}", file=sys.stderr)


def main(argv: list[str] | None = None) -> None:
    """Print an action and its reason, one per line; `begin` prints none if the job may start."""
    parser = Parser(
        prog="python -m canon_pretrain.cluster.chain",
        description="Used by slurm/lib.sh.",
        epilog=EPILOG,
    )
    parser.add_argument("command", choices=("code", "begin", "end"))
    parser.add_argument("run", type=Path, metavar="RUN", nargs="?", default=Path())
    parser.add_argument("--job", required=True, help="id of the job, the same for all its restarts")
    parser.add_argument("--restarts", type=positive, default=RESTARTS)
    parser.add_argument("--asked", choices=get_args(StopCause), default="none")
    parser.add_argument("--take-code", action="store_true")

    # The trainer's arguments follow `--`.
    arguments, trainer_arguments = split_arguments(argv)
    options = parser.parse_args(arguments)
    run = RunFolder(options.run)
    with command(prints=True):
        if options.command == "code":
            snapshot, config = launch_code(options.job, trainer_arguments)
            if snapshot is not None:
                note = ""
                if different := differences(snapshot):
                    note = f"not this repository's: {', '.join(different[:10])}"
                print(snapshot, note, config or "", sep="\n")

        elif options.command == "end":
            action, reason = end(
                run,
                options.job,
                stop_cause=options.asked,
                restarts=options.restarts,
            )
            print(action, reason, sep="\n")

        else:  # begin
            decision = begin(
                run,
                options.job,
                restarts=options.restarts,
                take_code=options.take_code,
                config=parse_launch(trainer_arguments).config,
            )
            if decision is not None:
                print(*decision, sep="\n")
            elif options.take_code:
                print("code", newest_snapshot(run), sep="\n")


if __name__ == "__main__":
    run_process(main)
