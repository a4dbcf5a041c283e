"""The evaluations of a run, checkpoints x suites, and their states.

    RUN/evals/schedule.json                        suites, steps and options
    RUN/evals/step-N/SUITE/leases/                 which job evaluates it (cluster/leases.py)
    RUN/evals/step-N/SUITE/leases/restarts.json    restarts of the job and its progress

No torch.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from canon_pretrain.checkpoint.architecture import find_checkpoint
from canon_pretrain.checkpoint.folder import CheckpointFolder
from canon_pretrain.checkpoint.manifest import DamagedCheckpoint, verify
from canon_pretrain.checkpoint.retention import held_steps, hold_step, release_step
from canon_pretrain.cluster.leases import CLAIM_EXPIRY_S, Lease, Leases, Slurm
from canon_pretrain.core.cli import Parser, command, run_process
from canon_pretrain.core.errors import UserError
from canon_pretrain.core.files import UnreadableFile, read_record, write_json
from canon_pretrain.core.lock import live_holder, locked
from canon_pretrain.data.held_out import open_validation
from canon_pretrain.report.record import is_outdated
from canon_pretrain.run.folder import EVALS, RunFolder
from canon_pretrain.run.results import RESULTS, read_results
from eval.run_command import add_arguments, add_evaluation_options, check_options
from eval.staged import check_staged, staged_folder
from eval.suite_names import SUITES, is_file, suite_name, suite_settings, task_files, task_folder

DEFAULT_RETRIES = 2
LOCK_TIMEOUT_S = 600.0  # for a watcher that waits for Slurm
HOLD_NAME = "submit"  # RUN/evals/holds/step-N.submit
EXIT_NO_PROGRESS = 1
EXIT_TAKEN_OVER = 3

ACTIVE_STATES = ("claimed", "queued", "running")
FINAL_STATES = ("done", "failed", "missing", "damaged")
# files added to a suite's folder as tasks are evaluated
PROGRESS_FILES = (
    "*/unfinished/*.answers.json",
    "*/unfinished/*.task.json",
    "*/samples-*.jsonl",
    "*/results.json",
)


@dataclass(frozen=True)
class Request:
    """The content of schedule.json; `how`: options of `eval run`, `every`: in steps."""

    suites: list[str]
    every: int | None = None
    how: list[str] = field(default_factory=list)
    sbatch: list[str] = field(default_factory=list)
    retries: int = DEFAULT_RETRIES


def _parse_options(argv: Sequence[str]) -> argparse.Namespace:
    parser = Parser()
    add_evaluation_options(parser)
    return parser.parse_args(list(argv))


def matches_options(
    recorded: dict[str, Any], suite: str, argv: Sequence[str], seq_len: int
) -> bool:
    """Return whether results with `recorded` settings are those of `eval run` with `argv`."""
    options = _parse_options(argv)
    settings = suite_settings(suite_name(suite), options, seq_len)
    # settings that are not set must not be recorded either
    expected = {"options": None, "junk": None, **settings}
    if options.held_out is not None and suite == "validation":
        expected["held_out_fingerprint"] = open_validation(options.held_out).fingerprint
    if options.dtype != "auto":
        expected["dtype"] = options.dtype
    return all(recorded.get(name) == value for name, value in expected.items())


def to_argv(options: dict[str, Any]) -> list[str]:
    """Return evaluation options as a command line with absolute paths, without defaults."""
    argv: list[str] = []
    for name, default in vars(_parse_options([])).items():
        value = options[name]
        if isinstance(value, list):  # of --option NAME=VALUE
            # a job has another working directory
            for key, text in value:
                absolute = os.path.abspath(text) if is_file(text) else text
                argv += [f"--{name}", f"{key}={absolute}"]
        elif value is True:
            argv.append(f"--{name}")
        elif isinstance(value, Path):
            argv += [f"--{name}", os.path.abspath(value)]
        elif value != default:
            argv += [f"--{name}", str(value)]
    return argv


def lock_schedule(run: Path) -> AbstractContextManager[None]:
    """Return a lock for the block that changes a run's schedule, holds or leases."""
    path = run / EVALS / "schedule.json"
    return locked(path.with_name(".schedule.lock"), str(path), patience_s=LOCK_TIMEOUT_S)


def read_request(run: Path, *, change: bool = False) -> Request | None:
    """Return schedule.json, None if missing, or damaged with `change`."""
    RunFolder(run).read_config()  # raises UserError unless it is a run
    try:
        return read_record(run / EVALS / "schedule.json", Request)
    except UnreadableFile as error:
        if error.is_missing or change:
            return None
        raise UserError(
            "schedule.damaged",
            f"{error}: replace it with --change and all options",
        ) from None


def update_request(
    run: Path, options: dict[str, Any], *, change: bool = False, keep: bool = True
) -> Request:
    """Update schedule.json (if `keep`) and return it; fields that differ need `change`."""
    path = run / EVALS / "schedule.json"
    with lock_schedule(run) if keep else nullcontext():
        stored = read_request(run, change=change)
        request = replace(stored or Request(list(SUITES)), **options)

        # two watchers with different requests would hold and release the same checkpoints
        if stored is not None and request != stored and not change:
            name = next(name for name in options if getattr(stored, name) != options[name])
            raise UserError(
                "schedule.changed",
                f"{path} has {name} = {getattr(stored, name)!r}, not {options[name]!r}: omit the "
                "options to keep it, or replace it with --change",
                field=name,
            )

        if keep and request != stored:
            write_json(path, asdict(request))
    return request


@dataclass(frozen=True)
class Entry:
    """One suite (a name or a task's YAML) of one checkpoint, its state and number of jobs."""

    step: int
    suite: str
    state: str  # one of ACTIVE_STATES, FINAL_STATES, "to come" and "waiting"
    lease: Lease | None = None
    attempts: int = 0
    why: str = ""


class CheckpointState(NamedTuple):
    """The state of the evaluations of a checkpoint without jobs, and the reason."""

    state: str  # "waiting", "to come", "missing" or "damaged"
    reason: str = ""


class Schedule:
    """The evaluations of one run.

    `max_waiting`: the number of unpruned checkpoints that the trainer keeps; 0: all.
    """

    def __init__(self, path: Path, request: Request, *, expiry_s: float = CLAIM_EXPIRY_S) -> None:
        self.run = RunFolder(path)
        self.request = request
        self._expiry_s = expiry_s
        self._is_settled = False
        self.checkpoints = CheckpointFolder.of_run(self.run)

        config = self.run.read_config().get("config", {})
        training = config.get("training", {})
        self._seq_len = int(training.get("seq_len", 0))
        last_step = int(training.get("steps", 0))

        # The trainer keeps the newest checkpoints, and the weights of some that are held.
        checkpoint = config.get("checkpoint", {})
        self.max_waiting = checkpoint.get("keep_latest_k", 0)
        if self.max_waiting:
            self.max_waiting += checkpoint.get("max_held", 4)

        # The steps to evaluate: multiples of `every` that are saved, and the last step.
        interval = int(checkpoint.get("interval", 1))
        every = request.every or interval
        if every < 1 or every % interval:
            raise UserError(
                "schedule.every",
                f"--every {request.every}: expected a multiple of {path}'s {interval} steps",
                given=request.every,
                expected=interval,
            )
        steps = set(range(every, last_step + 1, every))
        if last_step:
            steps.add(last_step)
        self.steps = sorted(steps)

    def is_training(self) -> bool:
        """Return whether a launch trains the run now."""
        return live_holder(self.run.lock_file) is not None

    def settle(self) -> None:
        """Wait for no further checkpoints: the run was stopped, or has failed."""
        newest = max(self.checkpoints.steps(), default=0)
        self.steps = [step for step in self.steps if step <= newest]
        self._is_settled = True

    def entries(self, queue: Slurm) -> list[Entry]:
        """Return every suite of every step; poll `queue` before, or new results may be missed."""
        newest = max(self.checkpoints.steps(), default=0)
        entries: list[Entry] = []
        for step in self.steps:
            checkpoint = self._checkpoint_state(step, newest)
            for suite in self.request.suites:
                entries.append(self._entry(step, suite, checkpoint, queue))
        return entries

    def options_for(self, suite: str) -> list[str]:
        """Return the options for one suite: --junk only for the birth-year probes."""
        if task_folder(task_files().get(suite_name(suite))) == "birth_year":
            return self.request.how
        return to_argv(vars(_parse_options(self.request.how)) | {"junk": None})

    def is_finished(self, entries: Sequence[Entry]) -> bool:
        """Return whether training is complete, or settled, and nothing is left to evaluate."""
        is_complete = self.run.done_file.exists() and not self.checkpoints.leftovers()
        has_all_steps = is_complete or self._is_settled
        return has_all_steps and all(entry.state in FINAL_STATES for entry in entries)

    def has_results(self, step: int, suite: str) -> bool:
        """Return whether this checkpoint has a complete results.json with the request's options."""
        name = suite_name(suite)
        folder = self.run.path / EVALS / f"step-{step}" / name
        for path in folder.glob(f"*/{RESULTS}"):
            try:
                results = read_results(path)
            except UserError:
                continue  # damaged, or of an older version

            # not a trial (--limit), not with other options, not of a checkpoint replaced since
            if (
                (results.suite, results.step, results.limit) == (name, step, None)
                and matches_options(results.asked, suite, self.request.how, self._seq_len)
                and not is_outdated(self.run, results)
            ):
                return True
        return False

    def update_holds(self, entries: Sequence[Entry]) -> None:
        """Hold the checkpoints of steps to be evaluated, saved or not, and release all others."""
        needed: set[int] = set()
        if not self.is_finished(entries):
            needed = {entry.step for entry in entries if entry.state not in ("done", "failed")}
        held = held_steps(self.run.path, HOLD_NAME)
        for step in sorted(needed - held):
            hold_step(self.run.path, step, HOLD_NAME)
        for step in sorted(held - needed):
            release_step(self.run.path, step, HOLD_NAME)

    def _checkpoint_state(self, step: int, newest: int) -> CheckpointState:
        """Return the state of the step's checkpoint; `newest`: the newest step that is saved."""
        path = self.checkpoints.step_path(step)
        if not path.is_dir():
            # it returns soon if it is just being replaced by its weights
            is_replaced = path.with_name(f".replaced-{path.name}") in self.checkpoints.leftovers()
            if is_replaced or (step > newest and not self.run.done_file.exists()):
                return CheckpointState("to come")
            return CheckpointState("missing", "its checkpoint was removed")

        try:
            verify(path, hashes=False)  # the job verifies the hashes
        except DamagedCheckpoint as error:
            faults: Any = error.fields["faults"]
            return CheckpointState("damaged", faults[0])
        return CheckpointState("waiting")

    def _entry(self, step: int, suite: str, checkpoint: CheckpointState, queue: Slurm) -> Entry:
        """Return the state of an evaluation: done, else that of its job, else its checkpoint's."""
        leases = leases_of(self.run.path, step, suite)
        lease = leases.current()
        if self.has_results(step, suite):
            return Entry(step, suite, "done", lease, num_attempts(leases))

        # No results: a job may have the work, or has failed too often.
        job_state, lease, reason = leases.work_state(lease, queue, self._expiry_s)
        # after `judge`, which records a job that it found by its name
        attempts = num_attempts(leases)
        if job_state is not None:
            return Entry(step, suite, job_state, lease, attempts, reason)
        if attempts > self.request.retries:
            return Entry(step, suite, "failed", lease, attempts, reason)
        return Entry(step, suite, checkpoint.state, lease, attempts, checkpoint.reason or reason)


def leases_of(run: Path, step: int | str, suite: str) -> Leases:
    """Return the leases of one suite (or suites `a,b`) of one checkpoint."""
    name = step if isinstance(step, str) else f"step-{step}"
    return Leases(run / EVALS / name / suite_name(suite) / "leases")


def num_attempts(leases: Leases) -> int:
    """Return the number of claims with a job; claims that sbatch refused have none."""
    return sum(lease.job is not None for lease in leases.all())


@dataclass(frozen=True)
class Restarts:
    """The content of restarts.json; `fruitless`: consecutive starts without a further task."""

    job: str = ""
    tasks: int = 0
    fruitless: int = 0


class JobStart(NamedTuple):
    """Whether a job may work: an exit code (0: it may), and the reason."""

    exit_code: int
    reason: str = ""


def start_job(leases: Leases, job: str, lease_id: str | None, max_restarts: int) -> JobStart:
    """Record a job's start; refuse it without its lease, or after restarts without progress."""
    # Only the job with the current lease may work.
    if lease_id is not None:
        current = leases.current()
        if current is None or current.id != lease_id:
            return JobStart(
                EXIT_TAKEN_OVER,
                f"another job has this work, or it is archived: {leases.folder}",
            )
        if current.job is None:
            leases.record(current, job=job)  # its watcher was killed before recording it

    # Progress is measured in files. A job may have several suites: the folder is named `a,b` then.
    folder = leases.folder.parent
    num_files = 0
    for suite in folder.name.split(","):
        for pattern in PROGRESS_FILES:
            num_files += len(list(folder.with_name(suite).glob(pattern)))

    # Compare with the last start of this job, if it is a restart.
    path = leases.folder / "restarts.json"
    before = Restarts()
    with suppress(UnreadableFile):
        before = read_record(path, Restarts)
    fruitless = 0
    if before.job == job and num_files <= before.tasks:
        fruitless = before.fruitless + 1
    if fruitless > max_restarts:
        return JobStart(EXIT_NO_PROGRESS, f"{fruitless} restarts without progress")

    leases.folder.mkdir(parents=True, exist_ok=True)
    write_json(path, asdict(Restarts(job, num_files, fruitless)))
    return JobStart(0)


def check_work(argv: Sequence[str]) -> None:
    """Raise UserError if `eval run` would refuse these arguments of slurm/eval.sh in a job."""
    if len(argv) < 2 or argv[0].startswith("-") or argv[1].startswith("-"):
        raise UserError(
            "slurm.usage", "expected RUN/checkpoint/step-N and SUITE; see bash slurm/eval.sh --help"
        )

    # The options and the suites' data.
    path, suite, *options = argv
    parser = Parser(prog="slurm/eval.sh")
    add_arguments(parser)
    arguments = parser.parse_args(["--checkpoint", path, "--suite", suite, *options])
    suites = check_options(arguments)
    check_staged(suites, staged_folder(arguments.staged))

    # The checkpoint, without its hashes. The job verifies them, and finds the newest of a RUN.
    checkpoint = Path(os.path.abspath(path))
    if checkpoint.name.startswith("step-"):
        verify(checkpoint, hashes=False)
    elif not checkpoint.is_dir():
        raise UserError(
            "checkpoint.none",
            f"{path} does not exist: expected RUN/checkpoint/step-N",
            path=checkpoint,
        )


def main(argv: list[str] | None = None) -> None:
    """For slurm/eval.sh: `begin CHECKPOINT SUITE --job ID [--lease ID] [--restarts K]` in a job,
    and before it is queued `check CHECKPOINT SUITE [options of eval run]`."""
    if argv is None:
        argv = sys.argv[1:]
    with command():
        if argv[:1] == ["check"]:
            check_work(argv[1:])
        else:
            _begin(argv)


def _begin(argv: Sequence[str]) -> None:
    """Record the start of a job; exit with its code if it must not work."""
    parser = Parser(prog="python -m eval.schedule")
    parser.add_argument("command", choices=("begin", "check"))
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("suite")
    parser.add_argument("--job", required=True)
    parser.add_argument("--lease")
    parser.add_argument("--restarts", type=int, default=3)
    arguments = parser.parse_args(argv)

    # not resolved: RUN/checkpoint may be a link to a larger disk
    checkpoint, run = find_checkpoint(Path(os.path.abspath(arguments.checkpoint)))
    leases = leases_of(run.path, checkpoint.name, arguments.suite)
    start = start_job(leases, arguments.job, arguments.lease, arguments.restarts)
    if start.exit_code:
        print(start.reason, file=sys.stderr)
        raise SystemExit(start.exit_code)


if __name__ == "__main__":
    run_process(main)
