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
from typing import Any

from canon_pretrain.checkpoint import retention
from canon_pretrain.checkpoint.architecture import find_checkpoint
from canon_pretrain.checkpoint.folder import CheckpointFolder
from canon_pretrain.checkpoint.manifest import DamagedCheckpoint, Manifest, find_faults
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
EXIT_NO_PROGRESS, EXIT_TAKEN_OVER = 1, 3

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


def _parse_options(how: Sequence[str]) -> argparse.Namespace:
    parser = Parser()
    add_evaluation_options(parser)
    return parser.parse_args(list(how))


def matches_options(asked: dict[str, Any], suite: str, how: Sequence[str], seq_len: int) -> bool:
    """Return whether results with the settings `asked` are those of `eval run` with `how`."""
    options = _parse_options(how)
    wanted = {"options": None, "junk": None, **suite_settings(suite_name(suite), options, seq_len)}
    if options.held_out is not None and suite == "validation":
        wanted["held_out_fingerprint"] = open_validation(options.held_out).fingerprint
    if options.dtype != "auto":
        wanted["dtype"] = options.dtype
    return all(asked.get(name) == value for name, value in wanted.items())


def to_argv(given: dict[str, Any]) -> list[str]:
    """Return evaluation options as a command line with absolute paths, without defaults."""
    words: list[str] = []
    for name, default in vars(_parse_options([])).items():
        value = given[name]
        if isinstance(value, list):
            for key, text in value:
                words += [f"--{name}", f"{key}={os.path.abspath(text) if is_file(text) else text}"]
        elif value is True:
            words.append(f"--{name}")
        elif value != default:
            words += [f"--{name}", os.path.abspath(value) if isinstance(value, Path) else value]
    return list(map(str, words))


def lock_schedule(run: Path) -> AbstractContextManager[None]:
    """Return a lock for the block that changes a run's schedule, holds or leases."""
    path = run / EVALS / "schedule.json"
    return locked(path.with_name(".schedule.lock"), str(path), patience_s=LOCK_TIMEOUT_S)


def read_request(run: Path, *, change: bool = False) -> Request | None:
    """Return schedule.json, None if missing, or damaged with `change`."""
    RunFolder(run).read_config()
    try:
        return read_record(run / EVALS / "schedule.json", Request)
    except UnreadableFile as error:
        if error.is_missing or change:
            return None
        raise UserError(
            "schedule.damaged", f"{error}: replace it with --change and all options"
        ) from None


def update_request(
    run: Path, given: dict[str, Any], *, change: bool = False, keep: bool = True
) -> Request:
    """Update schedule.json (if `keep`) and return it; `given` fields that differ need `change`."""
    RunFolder(run).read_config()
    path = run / EVALS / "schedule.json"
    with lock_schedule(run) if keep else nullcontext():
        known = read_request(run, change=change)
        request = replace(known or Request(list(SUITES)), **given)
        # two watchers with different requests would hold and release the same checkpoints
        if known is not None and request != known and not change:
            before = {name: getattr(known, name) for name in given}
            name = next(name for name in given if before[name] != given[name])
            raise UserError(
                "schedule.changed",
                f"{path} has {name} = {before[name]!r}, given {given[name]!r}: omit the "
                "options to keep it, or replace it with --change",
                field=name,
            )
        if keep and request != known:
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


class Schedule:
    """The evaluations of one run."""

    def __init__(self, path: Path, request: Request, *, expiry_s: float = CLAIM_EXPIRY_S) -> None:
        self.run, self.request, self._expiry_s = RunFolder(path), request, expiry_s
        config = self.run.read_config().get("config", {})
        checkpoint, training = config.get("checkpoint", {}), config.get("training", {})
        self.checkpoints = CheckpointFolder.of_run(self.run)
        self._seq_len = int(training.get("seq_len", 0))
        self.kept, self.max_held = checkpoint.get("keep_latest_k", 0), checkpoint.get("max_held", 4)
        last, interval = int(training.get("steps", 0)), int(checkpoint.get("interval", 1))
        every = request.every or interval
        if every < 1 or every % interval:
            raise UserError(
                "schedule.every",
                f"--every {request.every}: expected a multiple of {path}'s {interval} steps",
                given=request.every,
                expected=interval,
            )
        self.steps = sorted({*range(every, last + 1, every), *([last] if last else [])})
        self._is_settled = False

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
        saved = {step: self._checkpoint(step, newest) for step in self.steps}
        pairs = ((step, suite) for step in saved for suite in self.request.suites)
        return [self._entry(step, suite, saved[step], queue) for step, suite in pairs]

    def options_for(self, suite: str) -> list[str]:
        """Return the options for one suite: --junk only for the birth-year probes."""
        how, given = self.request.how, vars(_parse_options(self.request.how))
        is_probe = task_folder(task_files().get(suite_name(suite))) == "birth_year"
        return how if is_probe else to_argv(given | {"junk": None})

    def is_finished(self, overview: Sequence[Entry]) -> bool:
        """Return whether training is complete, or settled, and nothing is left to evaluate."""
        is_done = self.run.done_file.exists() and not self.checkpoints.leftovers()
        is_last = is_done or self._is_settled
        return is_last and all(entry.state in FINAL_STATES for entry in overview)

    def has_results(self, step: int, suite: str) -> bool:
        """Return whether this checkpoint has a complete results.json with the request's options."""
        folder = self.run.path / EVALS / f"step-{step}" / suite_name(suite)
        for path in folder.glob(f"*/{RESULTS}"):
            try:
                results = read_results(path)
            except UserError:
                continue
            if (
                (results.suite, results.step, results.limit) == (suite_name(suite), step, None)
                and matches_options(results.asked, suite, self.request.how, self._seq_len)
                and not is_outdated(self.run, results)
            ):
                return True
        return False

    def update_holds(self, overview: Sequence[Entry]) -> None:
        """Hold the checkpoints of steps to be evaluated, saved or not, and release all others."""
        is_over = self.is_finished(overview)
        wanted = {e.step for e in overview if not is_over and e.state not in ("done", "failed")}
        holds = self.run.path / EVALS / "holds"
        held = retention.held_steps(self.run.path)
        ours = {step for step in held if (holds / f"step-{step}.{HOLD_NAME}").exists()}
        for step in sorted(wanted ^ ours):
            change = retention.hold_step if step in wanted else retention.release_step
            change(self.run.path, step, HOLD_NAME)

    def _checkpoint(self, step: int, newest: int) -> tuple[str, str]:
        """Return the state of the step's checkpoint (`waiting` if it is whole), and the reason."""
        path = self.checkpoints.step_path(step)
        if not path.is_dir():
            moving = f".replaced-step-{step}" in {p.name for p in self.checkpoints.leftovers()}
            if moving or (step > newest and not self.run.done_file.exists()):
                return "to come", ""
            return "missing", "its checkpoint was removed"
        try:
            faults = find_faults(path, Manifest.read(path), hashes=False)
        except DamagedCheckpoint as error:
            faults = [str(error)]
        return ("damaged", faults[0]) if faults else ("waiting", "")

    def _entry(self, step: int, suite: str, saved: tuple[str, str], queue: Slurm) -> Entry:
        leases = leases_of(self.run.path, step, suite)
        last = leases.current()
        state: str | None = "done"
        lease, why = last, ""
        if not self.has_results(step, suite):
            state, lease, why = leases.judge(last, queue, self._expiry_s)
        # after `judge`, which records a job that it found by its name
        attempts = sum(each.job is not None for each in leases.all())
        if state is None and attempts > self.request.retries:
            state = "failed"
        elif state is None:
            state, why = saved[0], saved[1] or why
        return Entry(step, suite, state, lease, attempts, why)


def leases_of(run: Path, step: int | str, suite: str) -> Leases:
    """Return the leases of one suite (or suites `a,b`) of one checkpoint."""
    name = step if isinstance(step, str) else f"step-{step}"
    return Leases(run / EVALS / name / suite_name(suite) / "leases")


@dataclass(frozen=True)
class Restarts:
    """The content of restarts.json; `fruitless`: consecutive starts without a further task."""

    job: str = ""
    tasks: int = 0
    fruitless: int = 0


def start_job(leases: Leases, job: str, lease_id: str | None, restarts: int) -> tuple[int, str]:
    """Record a job's start; return its exit code (0: continue) and the reason."""
    if lease_id is not None:
        current = leases.current()
        if current is None or current.id != lease_id:
            return EXIT_TAKEN_OVER, f"another job has this work, or it is archived: {leases.folder}"
        if current.job is None:
            leases.record(current, job=job)  # its watcher was killed before recording it
    path, suites, before = leases.folder / "restarts.json", leases.folder.parent, Restarts()
    with suppress(UnreadableFile):
        before = read_record(path, Restarts)
    folders = [suites.parent / name for name in suites.name.split(",")]
    gained = sum(len([*folder.glob(files)]) for folder in folders for files in PROGRESS_FILES)
    again = before.job == job and gained <= before.tasks
    fruitless = before.fruitless + 1 if again else 0
    if fruitless > restarts:
        return EXIT_NO_PROGRESS, f"{fruitless} restarts without progress"
    leases.folder.mkdir(parents=True, exist_ok=True)
    write_json(path, asdict(Restarts(job, gained, fruitless)))
    return 0, ""


def check_work(words: Sequence[str]) -> None:
    """Raise UserError if `eval run` would refuse these arguments of slurm/eval.sh in a job."""
    if len(words) < 2 or words[0].startswith("-") or words[1].startswith("-"):
        raise UserError(
            "slurm.usage", "expected RUN/checkpoint/step-N and SUITE; see bash slurm/eval.sh --help"
        )
    parser = Parser(prog="slurm/eval.sh")
    add_arguments(parser)
    given, suite, *options = words
    arguments = parser.parse_args(["--checkpoint", given, "--suite", suite, *options])
    suites = check_options(arguments)
    check_staged(suites, staged_folder(arguments.staged))

    # without the hashes, which the job verifies
    checkpoint = Path(os.path.abspath(given))
    if checkpoint.name.startswith("step-"):
        faults = find_faults(checkpoint, Manifest.read(checkpoint), hashes=False)
        if faults:
            raise DamagedCheckpoint("checkpoint.damaged", f"{checkpoint}: {faults[0]}")
    elif not checkpoint.is_dir():
        raise UserError(
            "checkpoint.none",
            f"{given} does not exist: expected RUN/checkpoint/step-N",
            path=checkpoint,
        )


def main(argv: list[str] | None = None) -> None:
    """For slurm/eval.sh: `begin CHECKPOINT SUITE --job ID [--lease ID] [--restarts K]` in a job,
    and before it is queued `check CHECKPOINT SUITE [options of eval run]`."""
    words = sys.argv[1:] if argv is None else argv
    with command():
        if words[:1] == ["check"]:
            check_work(words[1:])
        else:
            _begin(words)


def _begin(words: Sequence[str]) -> None:
    parser = Parser(prog="python -m eval.schedule")
    parser.add_argument("command", choices=("begin", "check"))
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("suite")
    parser.add_argument("--job", required=True)
    parser.add_argument("--lease")
    parser.add_argument("--restarts", type=int, default=3)
    given = parser.parse_args(words)
    # not resolved: RUN/checkpoint may be a link to a larger disk
    run, checkpoint = find_checkpoint(Path(os.path.abspath(given.checkpoint)))
    leases = leases_of(run.path, checkpoint.name, given.suite)
    code, why = start_job(leases, given.job, given.lease, given.restarts)
    if code:
        print(why, file=sys.stderr)
        raise SystemExit(code)


if __name__ == "__main__":
    run_process(main)
