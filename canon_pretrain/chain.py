"""The job chain of a run: what a job script asks before and after each launch.

    python -m canon_pretrain.chain code --job ID -- --config FILE.toml [--section.key value ...]
    python -m canon_pretrain.chain begin RUN --job ID [--restarts K] [--take_code] -- --config ...
    python -m canon_pretrain.chain end RUN --job ID [--restarts K] --asked none

slurm/lib.sh calls it. torchrun turns every exit code of a worker into 1, so the outcome of a launch
is read from status.json, the checkpoints, and RUN/restarts.json. Restarts use a snapshot of the
run's first code, RUN/code, and of their job's first config, RUN/restarts.toml. No torch here.
"""

import argparse
import contextlib
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal, NamedTuple, get_args

from canon_pretrain.checkpoint.folder import CheckpointFolder
from canon_pretrain.core.cli import command, positive
from canon_pretrain.core.errors import UserError
from canon_pretrain.core.files import UnreadableFile, read_record, write_atomic, write_json
from canon_pretrain.core.holder import read_count
from canon_pretrain.core.lock import live_holder
from canon_pretrain.run.config import read_experiment, to_toml
from canon_pretrain.run.folder import CHECKPOINTS, RunFolder
from canon_pretrain.run.source import check_snapshot, differences, newest_snapshot, take_snapshot
from canon_pretrain.run.status import Status, read_status

RESTARTS = 3  # without a new checkpoint, after which a job chain stops
# three heartbeats, and Slurm's default KillWait: by then a cancelled launch has ended
LOCK_TIMEOUT_S = 30.0

Asked = Literal["none", "limit", "preempted", "term"]
"""Who asked the launch to stop: nobody; the job script, near its time limit; Slurm, which preempts;
SIGTERM, which ends a job that is cancelled or requeued."""
Next = Literal["done", "requeue", "stop", "failed", "leave"]
"""What the job script does: end well; requeue; end, since a user said so; end as failed; nothing,
since Slurm has put the job back into the queue or not."""
RUN_IN_USE = (
    "the run folder is in use by another launch ({}). Wait for its end, scancel one of the two, or "
    "choose another folder with --job.dump_folder"
)


@dataclass(frozen=True)
class Link:
    """The content of RUN/restarts.json: the newest start of the job that writes the run."""

    job: str
    launches: int  # status.json's at this start
    checkpoint: int  # the newest one's step at this start; 0 without one
    is_restart: bool = False
    futile: int = 0  # restarts in a row that failed and left no newer checkpoint
    ended: str | None = None  # one of `Next`; None while it runs, and if it was killed

    def failed_restarts(self, newest: int) -> int:
        """Return `futile` for the next start if this one failed."""
        return 0 if newest > self.checkpoint else self.futile + self.is_restart


class Decision(NamedTuple):
    next: Next
    why: str


def restarts_file(run: RunFolder, suffix: str = ".json") -> Path:
    return run.path / f"restarts{suffix}"


def newest_checkpoint(run: RunFolder) -> int:
    """Return the newest step that is saved under its final name; 0 without one."""
    name = CHECKPOINTS
    with contextlib.suppress(UserError, OSError, KeyError, TypeError):  # before the first launch
        name = run.read_config()["config"]["checkpoint"]["folder"]
    return max(CheckpointFolder(run.path / name).steps(), default=0)


def parse_launch(arguments: Sequence[str]) -> argparse.Namespace:
    """Return `config`, `folder`, `allowed` and `fresh` as canon_pretrain.train would read them."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    add = parser.add_argument
    add("--config", "--job.config_file", "--job.config-file", type=Path, nargs="?")
    add("--job.dump_folder", "--job.dump-folder", dest="folder", nargs="?")
    add("--run.allow_changes", "--run.allow-changes", dest="allowed", nargs="*")
    add("--checkpoint.fresh", dest="fresh", nargs="?", const="true")
    launch = parser.parse_known_args(arguments)[0]
    values = read_experiment(launch.config) if launch.config is not None else {}
    sections = (values.get(name) for name in ("job", "run", "checkpoint"))
    own, more, saving = (each if isinstance(each, dict) else {} for each in sections)
    launch.folder = launch.folder or own.get("dump_folder", "./outputs")
    allowed = more.get("allow_changes", []) if launch.allowed is None else launch.allowed
    launch.allowed = ",".join(map(str, allowed)).split(",")
    fresh = saving.get("fresh") if launch.fresh is None else launch.fresh
    launch.fresh = str(fresh).lower() == "true"
    return launch


def launch_code(job: str, arguments: Sequence[str]) -> tuple[Path | None, Path | None]:
    """Return the snapshot that `job` launches from and the config that replaces its own.

    None is the program, or the config, as it is now: for a run without a checkpoint, a fresh one
    and `--run.allow_changes code`, but not for a restart. Raises UserError for a damaged snapshot.
    """
    try:
        launch = parse_launch(arguments)
    except UserError:
        return None, None  # the check of the job comes next, and says it better
    run = RunFolder(Path(launch.folder).absolute())
    snapshot, (link, _), config = newest_snapshot(run), _read_both(run), restarts_file(run, ".toml")
    is_restart = link is not None and link.job == job
    takes_new = "code" in launch.allowed or launch.fresh or not newest_checkpoint(run)
    if snapshot is None or (takes_new and not is_restart):
        return None, None
    check_snapshot(snapshot)
    return snapshot, config if is_restart and config.is_file() else None


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
    or if starts that were killed with their scripts used up `restarts`.
    """
    end_s = time.monotonic() + wait_s
    # one on another node that is silent for as long counts as dead; the trainer watches it longer
    while (other := live_holder(run.lock_file, wait_s)) is not None and other.job_id != job:
        if time.monotonic() > end_s:
            return Decision("failed", RUN_IN_USE.format(other))
        time.sleep(min(1.0, wait_s / 10))
    (before, status), newest = _read_both(run), newest_checkpoint(run)
    link = Link(job, status.launches if status else 0, newest)
    if before is not None and before.job == job:
        is_killed = before.ended is None  # with its script: a node that is gone, kill -9
        futile = before.failed_restarts(newest) if is_killed else before.futile
        if is_killed and futile >= restarts:
            _write_link(run, replace(before, futile=futile, ended="failed"))
            return _out_of_restarts(futile, newest, "its job script was killed")
        link = replace(link, is_restart=True, futile=futile)
    if take_code:  # before the link is known: a restart of it looks for its code
        take_snapshot(run)
    if config is not None and not link.is_restart:
        write_atomic(restarts_file(run, ".toml"), to_toml(read_experiment(config)).encode())
    _write_link(run, link)
    return None


def end(run: RunFolder, job: str, asked: Asked, *, restarts: int = RESTARTS) -> Decision:
    """Decide what follows the launch of `job` that has just ended; record it.

    Raises UserError if `begin` was not called for it.
    """
    (link, status), newest = _read_both(run), newest_checkpoint(run)
    if link is None or link.job != job:
        # of two jobs that begin at once one gets the lock and continues; the count is the other's
        named = (job, read_count(os.environ, "SLURM_RESTART_COUNT"))
        is_own = status is not None and (status.job_id, status.restart_count) == named
        if link is not None and is_own and (decision := _asked_for(status, asked)) is not None:
            return decision
        raise UserError(
            "todo.chain", f"{restarts_file(run)} knows no start of job {job}: call `begin` before"
        )
    is_own = status is not None and status.launches > link.launches
    own = status if is_own and status and status.job_id in (None, job) else None
    other = live_holder(run.lock_file) if own is None and asked == "none" else None
    if other is not None and other.job_id not in (None, job):
        _write_link(run, replace(link, ended="failed"))
        return Decision("failed", RUN_IN_USE.format(other))
    futile = 0 if newest > link.checkpoint else link.futile
    decision = _asked_for(own, asked)
    is_idle = decision is not None and decision.next == "requeue" and newest <= link.checkpoint
    if decision is None or (is_idle and asked != "preempted"):
        # a limit that comes before a first new step would be met again, and for ever
        futile = link.failed_restarts(newest)
        what = _failure(own) if decision is None else decision.why
        decision = decision or Decision("requeue", f"the launch failed: {what}")
        if futile >= restarts:
            decision = _out_of_restarts(futile, newest, what)
    _write_link(run, replace(link, futile=futile, ended=decision.next))
    if decision.next == "failed" and own is not None and own.state == "running":
        # the trainer was killed and can't say so
        failed = replace(own, state="failed", phase="ended", reason=decision.why)
        write_json(run.status_file, asdict(failed))
    return decision


def _out_of_restarts(futile: int, newest: int, last: str) -> Decision:
    return Decision(
        "failed",
        f"{futile} restart(s) in a row from {f'step {newest}' if newest else 'the start'} failed "
        f"and left no newer checkpoint; the last one: {last}. Look at slurm.log, then submit the "
        "same command again",
    )


def _asked_for(own: Status | None, asked: Asked) -> Decision | None:
    """Return the decision on a launch of status `own` that did as asked; None if it failed."""
    if own is not None and own.state == "done":
        return Decision("done", f"step {own.step} of {own.steps} is reached")
    where = f"at step {own.step} of {own.steps}" if own is not None else "before its first step"
    if asked == "term":
        return Decision("leave", f"ended by SIGTERM {where}; whether it is requeued is Slurm's")
    if asked == "preempted":
        return Decision("requeue", f"preempted {where}")
    if own is not None and own.state == "failed" and own.reason.startswith("UserError"):
        # a refusal that names its way out: the same command would be refused again
        return Decision("failed", own.reason)
    if own is None or own.state != "stopped":
        return None
    if asked == "limit":
        return Decision("requeue", f"stopped {where} before the time limit")
    if "SIGUSR" in own.reason:
        return Decision("requeue", f"stopped {where} by {own.reason}")
    return Decision("stop", f"stopped {where} by {own.reason}, which no job script asked for")


def _failure(own: Status | None) -> str:
    if own is None:
        return "it did not come as far as its status; it may need more time (--time)"
    if own.state == "running":
        return f"it was killed at step {own.step} (phase {own.phase})"
    return own.reason or own.state


def _read_both(run: RunFolder) -> tuple[Link | None, Status | None]:
    """Return the link and the status; None for a damaged one: a count or a view is lost."""
    link, status = None, None
    with contextlib.suppress(UnreadableFile):
        link = read_record(restarts_file(run), Link)
    with contextlib.suppress(UserError):
        status = read_status(run.status_file)
    return link, status


def _write_link(run: RunFolder, link: Link) -> None:
    """Keep `link`; a full disk stops no run, it only costs the count."""
    try:
        run.path.mkdir(parents=True, exist_ok=True)
        write_json(restarts_file(run), asdict(link))
    except OSError as error:
        print(f"{restarts_file(run)} cannot be written: {error.strerror}", file=sys.stderr)


def main(argv: list[str] | None = None) -> None:
    """Print the next step and its reason, a line each; `begin` prints nothing to go ahead."""
    parser = argparse.ArgumentParser(prog="python -m canon_pretrain.chain")
    parser.add_argument("command", choices=("code", "begin", "end"))
    parser.add_argument("run", type=Path, metavar="RUN", nargs="?", default=Path())
    parser.add_argument("--job", required=True, help="the id that all starts of the chain share")
    parser.add_argument("--restarts", type=positive, default=RESTARTS)
    parser.add_argument("--asked", choices=get_args(Asked), default="none")
    parser.add_argument("--take_code", action="store_true")
    own = sys.argv[1:] if argv is None else argv
    place = own.index("--") if "--" in own else len(own)
    given, launch = parser.parse_args(own[:place]), own[place + 1 :]
    run, job, restarts = RunFolder(given.run), given.job, given.restarts
    with command(prints=True):
        if given.command == "code":
            snapshot, config = launch_code(job, launch)
            if snapshot is not None:
                others = ", ".join(differences(snapshot)[:10])
                others = others and f"not this repository's: {others}"
                print(snapshot, others, config or "", sep="\n")
        elif given.command == "end":
            print(*end(run, job, given.asked, restarts=restarts), sep="\n")
        else:
            more = {"take_code": given.take_code, "config": parse_launch(launch).config}
            if (decision := begin(run, job, restarts=restarts, **more)) is not None:
                print(*decision, sep="\n")
            elif given.take_code:
                print("code", newest_snapshot(run), sep="\n")


if __name__ == "__main__":
    main()
