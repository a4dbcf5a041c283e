"""The links of a chain: what a job script asks before and after each launch of a run.

    python -m canon_pretrain.chain code --job ID -- --config FILE.toml [--section.key value ...]
    python -m canon_pretrain.chain begin RUN --job ID [--restarts K] [--take_code] -- --config ...
    python -m canon_pretrain.chain end RUN --job ID [--restarts K] --asked none

slurm/lib.sh calls it; a job that is requeued is one chain, and each start of it a link. torchrun
turns every exit code of a worker into 1, so what a launch came to is read from the run folder:
status.json, the checkpoints, and RUN/restarts.json, which this module keeps. All links use the code
of the run's first one, a snapshot in RUN/code (run/snapshot.py), and the config of their chain's,
RUN/restarts.toml. No torch here, since it runs while a node's time is paid for.
"""

import argparse
import dataclasses
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from canon_pretrain.checkpoint.folder import CheckpointFolder
from canon_pretrain.core.cli import command
from canon_pretrain.core.errors import UserError
from canon_pretrain.core.files import UnreadableFile, parsing, read_json, write_atomic, write_json
from canon_pretrain.core.holder import Holder, process_lives, read_count
from canon_pretrain.core.link_lock import live_holder, look
from canon_pretrain.run.config import read_experiment, to_toml
from canon_pretrain.run.folder import CHECKPOINTS, RunFolder
from canon_pretrain.run.snapshot import (
    check_snapshot,
    differences,
    newest_snapshot,
    take_snapshot,
)
from canon_pretrain.run.status import Status, read_status
from canon_pretrain.titan.key_names import split_config

RESTARTS = 3
"""Restarts without a new checkpoint after which a chain stops."""
WAIT_S = 30.0
"""Three heartbeats, and Slurm's default KillWait: a launch that is cancelled has ended by then."""

Asked = Literal["none", "limit", "preempted", "term"]
"""Who asked the launch to stop, as far as the job script knows: nobody; the script itself, since
the time limit is near; Slurm, which has marked the job as preempted and lets it run for its grace
time; SIGTERM, with which Slurm ends a job that is cancelled or already back in the queue."""
Next = Literal["done", "requeue", "stop", "failed", "leave"]
"""What the job script does: end well; requeue; end, since a person said so; end as failed; nothing
at all: it was told to end, and Slurm has put the job back into the queue, or not."""


@dataclass(frozen=True)
class Link:
    """The content of RUN/restarts.json: the newest start of the job that writes the run."""

    job: str
    launches: int
    """status.json's number of launches when this link began."""
    checkpoint: int
    """The newest checkpoint's step when this link began; 0 without one."""
    is_restart: bool = False
    futile: int = 0
    """Restarts in a row that failed and left no newer checkpoint than they began with."""
    ended: str | None = None
    """What it came to, one of `Next`; None while it runs, and for good where it was killed."""


class Decision(NamedTuple):
    """What is next, and why, in a sentence."""

    next: Next
    why: str


def restarts_file(run: RunFolder) -> Path:
    return run.path / "restarts.json"


def config_file(run: RunFolder) -> Path:
    """The config, with all that it extends, of the newest chain's first link."""
    return run.path / "restarts.toml"


def newest_checkpoint(run: RunFolder) -> int:
    """The newest step that is saved under its final name; 0 without one."""
    name = CHECKPOINTS
    try:
        name = run.read_config()["config"]["checkpoint"]["folder"]
    except (UserError, OSError, KeyError, TypeError):
        pass  # no launch has come so far, or an older layout
    return max(CheckpointFolder(run.path / name).steps(), default=0)


def code_of(job: str, arguments: Sequence[str]) -> tuple[Path | None, Path | None]:
    """The snapshot that a link of `job` is launched from, None for the program as it is here; and
    the config in the place of its own, None for its own.

    `arguments` are those of canon_pretrain.train. A run without a checkpoint begins at step 1 with
    the program as it is, and so does a fresh one; `--run.allow_changes code` resumes with it. A
    restart of the same job repeats its options, and stays with what it began with. Raises UserError
    for a snapshot that is damaged.
    """
    try:
        path, words = split_config(arguments)
        values = read_experiment(path) if path is not None else {}
    except UserError:
        return None, None  # the check of the job comes next, and says it better
    folder = _option("job.dump_folder", words, values) or ["./outputs"]
    run = RunFolder(Path(folder[-1]).absolute())
    snapshot, link = newest_snapshot(run), _read_link(run)
    if snapshot is None:
        return None, None
    config = config_file(run) if config_file(run).is_file() else None
    if link is None or link.job != job:
        config = None
        allowed = ",".join(_option("run.allow_changes", words, values)).split(",")
        is_fresh = _option("checkpoint.fresh", words, values) in (["True"], ["true"])
        if "code" in allowed or is_fresh or not newest_checkpoint(run):
            return None, None
    check_snapshot(snapshot)
    return snapshot, config


def _option(name: str, words: Sequence[str], values: dict[str, Any]) -> list[str]:
    """The words that set `name`: those behind it on the command line, else the file's."""
    found, taking = None, False
    for word in words:
        key, equals, value = word.partition("=")
        if word.startswith("--"):
            taking = key.replace("-", "_") == f"__{name}"
            found = ([value] if equals else []) if taking else found
        elif taking and found is not None:
            found.append(word)
    if found is not None:
        return found or ["True"]  # a switch
    section, _, key = name.partition(".")
    own = values.get(section)
    given = own.get(key, []) if isinstance(own, dict) else []
    return [str(each) for each in given] if isinstance(given, list) else [str(given)]


def begin(
    run: RunFolder,
    job: str,
    *,
    restarts: int = RESTARTS,
    wait_s: float = WAIT_S,
    take_code: bool = False,
    config: Path | None = None,
) -> Decision | None:
    """Record that a link of `job` begins; a Decision where it must not.

    That is where another job's launch lives in the folder, whose own count this would spoil; and
    the links before it, killed with their scripts, have used up `restarts`. Waits for up to
    `wait_s` while another job has the folder. With `take_code` the program as it is becomes the
    run's newest snapshot. The first link of `job` keeps its `config` for the next ones.
    """
    if (other := _live_other(run, job, wait_s)) is not None:
        return Decision("failed", _in_use(other))
    before, newest = _read_link(run), newest_checkpoint(run)
    status = _read_status(run)
    link = Link(job, status.launches if status else 0, newest)
    if before is not None and before.job == job:
        futile = before.futile
        if before.ended is None:  # its script was killed too: a node that is gone, kill -9
            futile = _futile_after(before, newest)
            if futile >= restarts:
                why = _out_of_restarts(futile, newest, "its job script was killed")
                _write_link(run, dataclasses.replace(before, futile=futile, ended="failed"))
                return Decision("failed", why)
        link = dataclasses.replace(link, is_restart=True, futile=futile)
    if take_code:  # before the link is known: a restart of it looks for its code
        take_snapshot(run)
    if config is not None and not link.is_restart:
        write_atomic(config_file(run), to_toml(read_experiment(config)).encode())
    _write_link(run, link)
    return None


def end(run: RunFolder, job: str, asked: Asked, *, restarts: int = RESTARTS) -> Decision:
    """What comes after the link of `job` that has just ended; recorded, and shown in status.json.

    Raises UserError where `begin` was not called for it.
    """
    link, status, newest = _read_link(run), _read_status(run), newest_checkpoint(run)
    if link is None or link.job != job:
        if link is not None and (decision := _end_beside(status, job, asked)) is not None:
            return decision
        raise UserError(f"{restarts_file(run)} knows no link of job {job}: call `begin` before")
    own = status if status is not None and status.launches > link.launches else None
    if own is not None and own.job_id not in (None, job):
        own = None
    if own is None and asked == "none":
        other = live_holder(run.lock_file)
        if other is not None and other.job_id not in (None, job):
            _write_link(run, dataclasses.replace(link, ended="failed"))
            return Decision("failed", _in_use(other))
    futile = 0 if newest > link.checkpoint else link.futile
    decision = _asked_for(own, asked)
    idle = decision is not None and decision.next == "requeue" and newest <= link.checkpoint
    if decision is None or (idle and asked != "preempted"):
        # a limit that comes before a first new step would be met again, and for ever
        futile = _futile_after(link, newest)
        what = _last_words(own, asked) if decision is None else decision.why
        decision = decision or Decision("requeue", f"the launch failed: {what}")
        if futile >= restarts:
            decision = Decision("failed", _out_of_restarts(futile, newest, what))
    _write_link(run, dataclasses.replace(link, futile=futile, ended=decision.next))
    if decision.next == "failed" and own is not None and own.state == "running":
        # the trainer was killed and can't say so: whoever looks at the run should see why it rests
        failed = dataclasses.replace(own, state="failed", phase="ended", reason=decision.why)
        write_json(run.status_file, asdict(failed))
    return decision


def _end_beside(status: Status | None, job: str, asked: Asked) -> Decision | None:
    """The decision for `job` where another job has begun in its folder meanwhile.

    Of two that begin at once one gets the lock, and goes on as ever; the count is the other's. None
    where nothing says that this one had it.
    """
    restart = read_count(os.environ, "SLURM_RESTART_COUNT")
    if status is None or (status.job_id, status.restart_count) != (job, restart):
        return None
    return _asked_for(status, asked)


def _live_other(run: RunFolder, job: str, wait_s: float) -> Holder | None:
    """The launch of another job that has the folder's lock and shows life; None without one.

    Waits for up to `wait_s`, as it may be about to end: cancelled a moment ago, and still saving.
    """
    first, alive = look(run.lock_file), False
    end_s = time.monotonic() + wait_s
    while True:
        sight = look(run.lock_file)
        if first is None or sight is None or sight.holder.job_id == job:
            return None
        lives = process_lives(sight.holder)
        if lives is False:
            return None
        alive = alive or bool(lives) or sight != first
        if time.monotonic() > end_s:
            return sight.holder if alive else None  # the trainer watches a silent one for longer
        time.sleep(min(1.0, wait_s / 10))


def _in_use(holder: Holder) -> str:
    return (
        f"the run folder is in use by another launch ({holder}). Wait for its end, scancel one of "
        "the two, or choose another folder with --job.dump_folder"
    )


def _asked_for(own: Status | None, asked: Asked) -> Decision | None:
    """The decision on a launch that did what it was asked to; None where it failed.

    `own` is the launch's status, None where it never had one.
    """
    if own is not None and own.state == "done":
        return Decision("done", f"step {own.step} of {own.steps} is reached")
    stopped = own is not None and own.state == "stopped"
    where = f"at step {own.step} of {own.steps}" if own is not None else "before its first step"
    if asked == "term":
        return Decision("leave", f"ended by SIGTERM {where}; whether it is requeued is Slurm's")
    if asked == "preempted":
        return Decision("requeue", f"preempted {where}")
    if not stopped or own is None:
        if own is not None and own.state == "failed" and own.reason.startswith("UserError"):
            # a refusal that names its way out: the same command would be refused again
            return Decision("failed", own.reason)
        return None
    if asked == "limit":
        return Decision("requeue", f"stopped {where} before the time limit")
    if "SIGUSR" in own.reason:
        return Decision("requeue", f"stopped {where} by {own.reason}")
    return Decision("stop", f"stopped {where} by {own.reason}, which no job script asked for")


def _futile_after(link: Link, newest: int) -> int:
    """`Link.futile` for the link that follows `link`, which failed."""
    return 0 if newest > link.checkpoint else link.futile + link.is_restart


def _out_of_restarts(futile: int, newest: int, last: str) -> str:
    where = f"step {newest}" if newest else "the start"
    return (
        f"{futile} restart(s) in a row from {where} failed and left no newer checkpoint; the last "
        f"one: {last}. Look at slurm.log, then submit the same command again"
    )


def _last_words(own: Status | None, asked: Asked) -> str:
    if own is None and asked == "limit":
        return (
            "the time limit's signal came before the trainer ran; give a link more time (--time), "
            "or have the signal later (--signal=B:USR1@SECONDS)"
        )
    if own is None:
        return "it did not come as far as its status"
    if own.state == "running":
        return f"it was killed at step {own.step} (phase {own.phase})"
    return own.reason or own.state


def _read_status(run: RunFolder) -> Status | None:
    """status.json; None where there is none, or it is damaged: it is a view."""
    try:
        return read_status(run.status_file)
    except UserError:
        return None


def _read_link(run: RunFolder) -> Link | None:
    """restarts.json; None where there is none, or it is damaged: counting begins anew."""
    path = restarts_file(run)
    try:
        record = read_json(path)
        with parsing(path):
            return Link(**record)
    except UnreadableFile:
        return None


def _write_link(run: RunFolder, link: Link) -> None:
    """Keep `link`; a full disk stops no run, it only costs the count."""
    try:
        run.path.mkdir(parents=True, exist_ok=True)
        write_json(restarts_file(run), asdict(link))
    except OSError as error:
        print(f"{restarts_file(run)} cannot be written: {error.strerror}", file=sys.stderr)


def main(argv: list[str] | None = None) -> None:
    """Print the next step and its reason, a line each; `begin` prints nothing to go ahead.

    `code` prints the snapshot's folder, what this program differs in and the config, or nothing;
    `begin --take_code` prints the folder behind the word code.
    """
    parser = argparse.ArgumentParser(
        prog="python -m canon_pretrain.chain", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("command", choices=("code", "begin", "end"))
    parser.add_argument("run", type=Path, metavar="RUN", nargs="?", default=Path())
    parser.add_argument("--job", required=True, help="the id that all links of the chain share")
    parser.add_argument("--restarts", type=int, default=RESTARTS)
    parser.add_argument("--asked", choices=get_args(Asked), default="none")
    parser.add_argument("--take_code", action="store_true")
    own = sys.argv[1:] if argv is None else argv
    place = own.index("--") if "--" in own else len(own)
    arguments = parser.parse_args(own[:place])
    run = RunFolder(arguments.run)
    with command(prints=True):
        if arguments.restarts < 1:
            raise UserError(f"--restarts {arguments.restarts}: expected at least 1")
        decision: Decision | None
        if arguments.command == "code":
            snapshot, config = code_of(arguments.job, own[place + 1 :])
            if snapshot is not None:
                others = ", ".join(differences(snapshot)[:10])
                note = f"not this repository's: {others}" if others else ""
                print(snapshot, note, config or "", sep="\n")
            return
        if arguments.command == "begin":
            decision = begin(
                run,
                arguments.job,
                restarts=arguments.restarts,
                take_code=arguments.take_code,
                config=split_config(own[place + 1 :])[0],
            )
            if decision is None and arguments.take_code:
                print("code", newest_snapshot(run), sep="\n")
        else:
            decision = end(run, arguments.job, arguments.asked, restarts=arguments.restarts)
        if decision is not None:
            print(decision.next, decision.why, sep="\n")


if __name__ == "__main__":
    main()
