"""Train the runs of a sweep on this machine, several at once, one core or GPU each.

The first Ctrl-C saves and stops, the second stops at once. A signal that is ignored, such as
nohup's SIGHUP, stays so. DIR/failures.json has the reason of each run that failed.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, BinaryIO

from rich.live import Live
from rich.text import Text

from canon_pretrain.cluster.planned import num_steps, planned_values
from canon_pretrain.cluster.sweep import PlannedRun, Sweep, train_command
from canon_pretrain.core.children import ForkedChild, ForkServer, ending, kill_tree, start_child
from canon_pretrain.core.cli import available_cores
from canon_pretrain.core.errors import UserError
from canon_pretrain.core.files import UnreadableFile, open_file, read_record, write_json
from canon_pretrain.core.lock import live_holder
from canon_pretrain.core.terminal import Console, duration
from canon_pretrain.machine.hardware import visible_gpus
from canon_pretrain.report.status import RunSummary, summarize_run
from canon_pretrain.run.folder import RunFolder, is_run_folder

if TYPE_CHECKING:  # scipy takes a while to import
    from canon_pretrain.boards.race import BoardRace

OUTPUT = "output.log"
FAILURES = "failures.json"
POLL_S = 0.2  # between looks at the children
SHOW_S = 1.0  # between updates of the progress on a terminal
REPORT_S = 30.0  # between lines of progress in a log; a sixth of it at the start
MISSING = "without output"
LOG_END = 4096  # bytes of a log in which its last error is looked for
KILL_S = 5.0  # most that a killed process needs to end, a large one on a busy machine
PATIENCE_S = 120.0  # a run whose driver was killed saves its last step before it ends
# imports what a trainer does once, for all runs
SERVER = (sys.executable, "-c", "from canon_pretrain.forks import serve_forks; serve_forks()")
TRAINER_ENVIRONMENT = {
    # the next run of an architecture loads its differentiated graphs
    "TORCHINDUCTOR_AUTOGRAD_CACHE_ALLOW_CUSTOM_AUTOGRAD": "1",
    "JE_ARROW_MALLOC_CONF": "background_thread:false",  # a process with threads is not forked
}


@dataclass
class _Child:
    run: PlannedRun
    process: "subprocess.Popen[bytes] | ForkedChild"
    first_step: int
    gpu: str | None


class Driver:
    """Trains a sweep's runs, `parallel` at once; `failures` has the reason by run."""

    def __init__(
        self,
        sweep: Sweep,
        folder: Path,
        parallel: int,
        race: "BoardRace | None" = None,
        *,
        gpus: Sequence[str] = (),
        threads: int = 1,
        server: ForkServer | None = None,
    ) -> None:
        self.sweep = sweep
        self.folder = folder
        self.parallel = parallel
        self.race = race
        self.gpus = gpus
        self.threads = threads
        self.console = Console(highlight=False, soft_wrap=True)
        self.failures: dict[str, str] = {}
        self.stops = 0
        """Requests to stop: the first saves, the second kills."""
        self._children: list[_Child] = []
        self._raced: list[PlannedRun] = []  # that a race has stopped
        self._server = server
        self._is_own_server = server is None
        self._began_s = time.monotonic()
        self._shown_s = 0.0  # when the progress was last shown
        self._shown_lines = [""]

        # By name, for runs whose folder holds a run of another plan: how it differs.
        self._other_plans: dict[str, str] = {}
        for run in sweep.runs:
            if problem := sweep.other_plan(run, folder):
                self._other_plans[run.name] = problem

        # By name: the length of each run, and its last known step.
        lengths = {}
        for config in sweep.configs:
            lengths[config] = num_steps(planned_values(Path(config)))
        self._planned_steps = {run.name: lengths[run.config] for run in sweep.runs}
        self._total_steps = dict(self._planned_steps)
        self._last_steps = {run.name: self._read_step(run) for run in sweep.runs}
        self._steps_before = sum(self._last_steps.values())  # not trained by this driver

    def _read_step(self, run: PlannedRun) -> int:
        """Return the last step in the run's folder."""
        if self._is_done(run):
            return self._total_steps[run.name]
        summary = self._summary(run)
        if summary is None:
            return 0
        return summary.step or 0

    def _is_done(self, run: PlannedRun) -> bool:
        is_planned = run.name not in self._other_plans
        return is_planned and RunFolder(self.folder / run.name).done_file.exists()

    def _summary(self, run: PlannedRun) -> RunSummary | None:
        """Return the state of a run; None if it has not started, or is not the planned one."""
        path = self.folder / run.name
        if run.name in self._other_plans or not is_run_folder(path):
            return None
        return summarize_run(path, datetime.now(UTC))

    def train(self) -> None:
        """Train until each run is DONE or has failed, or until a second request to stop."""
        waiting = []
        for planned in self.sweep.runs:
            if planned.name in self._other_plans:
                self._fail(planned, self._other_plans[planned.name])
            elif not self._is_done(planned):
                waiting.append(planned)

        screen = Live(console=self.console, auto_refresh=False, transient=True)
        with self._signals(), screen as live:
            while self._children or (waiting and not self.stops):
                # A child that has ended may complete a stage of the race, which continues or stops
                # other runs.
                waiting += self._reap()
                if self.race:
                    waiting = self._advance(self.race, waiting)

                # Keep `parallel` runs training.
                while len(self._children) < self.parallel and not self.stops:
                    if (run := self._next(waiting)) is None:
                        break
                    waiting.remove(run)
                    self._start(run)

                self._show(live)
                time.sleep(POLL_S)

    def _show(self, live: Live) -> None:
        """Show the progress: every second on a terminal, else less often and if it is new."""
        now_s = time.monotonic()
        is_terminal = self.console.is_terminal
        if is_terminal:
            pause_s = SHOW_S
        elif now_s - self._began_s < 2 * REPORT_S:
            pause_s = REPORT_S / 6
        else:
            pause_s = REPORT_S
        if now_s - self._shown_s < pause_s:
            return

        # A terminal is drawn again in place; a log has a line only if something has changed.
        lines = self._progress()
        if is_terminal:
            live.update(Text("\n".join(lines)), refresh=True)
        elif lines != self._shown_lines:
            self._say(*lines)
        self._shown_s = now_s
        self._shown_lines = lines

    def _say(self, *lines: str) -> None:
        for line in lines:
            self.console.print(Text(line))

    def _next(self, waiting: Sequence[PlannedRun]) -> PlannedRun | None:
        """Return the first run that no other process trains; after PATIENCE_S any."""
        due = [run for run in waiting if self._is_due(run)]
        for run in due:
            try:
                if live_holder(RunFolder(self.folder / run.name).lock_file) is None:
                    return run
            except OSError:
                return run  # starting it reports the error

        # All are trained by other processes: wait, then start one, which reports who holds it.
        passed_s = time.monotonic() - self._began_s
        if self._children or passed_s < PATIENCE_S or not due:
            return None
        return due[0]

    def _is_due(self, run: PlannedRun) -> bool:
        """Return whether a run may train further; one that only lacks DONE is due as well."""
        target = self._target(run)
        last_step = self._last_steps[run.name]
        return last_step < target or target == self._total_steps[run.name]

    def _target(self, run: PlannedRun) -> int:
        """Return the step to which a run may train now."""
        if self.race:
            return self.race.target(run.name)
        return self._total_steps[run.name]

    def _start(self, run: PlannedRun) -> None:
        """Train a run in a child process that is stopped if this one is killed."""
        failures = read_failures(self.folder)
        if failures.pop(run.name, None) is not None:
            write_failures(self.folder, failures)
        path = self.folder / run.name

        # The GPU with the fewest children.
        gpus_in_use = [child.gpu for child in self._children]
        gpu = min(self.gpus, key=gpus_in_use.count, default=None)

        try:
            # A run that the race has not let train to its end stops by itself at the stage's step.
            arguments = self.sweep.launch(run, self.folder)
            target = self._target(run)
            if target < self._total_steps[run.name]:
                arguments += ["--run.stop_at", str(target)]
            path.mkdir(parents=True, exist_ok=True)
            with open_file(path / OUTPUT, "ab") as output:
                process = self._launch(arguments, output, gpu)
        except UserError as error:
            return self._fail(run, str(error))
        except OSError as error:
            where = error.filename or path
            return self._fail(run, f"{where}: {error.strerror or error}")

        if process is not None:
            first_step = self._last_steps[run.name]
            self._children.append(_Child(run, process, first_step, gpu))
            if self.stops:  # since the child was started
                process.terminate()

    def _launch(
        self, arguments: Sequence[str], output: BinaryIO, gpu: str | None
    ) -> "subprocess.Popen[bytes] | ForkedChild | None":
        """Start a trainer, forked from a process that has imported torch if there is no GPU.

        Returns None if a request to stop comes first: the imports take seconds, or minutes on a
        busy machine.
        """
        environ = trainer_environment(self.threads)
        if gpu is not None:
            environ["CUDA_VISIBLE_DEVICES"] = gpu
        else:
            try:
                if self._server is None:
                    self._server = ForkServer(SERVER, environ)
                    self._is_own_server = True
                process = self._server.start(
                    ["train", "--config", *arguments], output, gives_up=lambda: self.stops > 0
                )
                if process is None:
                    self._close_server()
                return process
            except OSError:  # the trainer that is started next says why
                self._close_server()

        # With a GPU, or if the fork server has failed: a new process.
        return start_child(
            train_command(arguments),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environ,
        )

    def _close_server(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None

    def _fail(self, run: PlannedRun, reason: str) -> None:
        """Report a failure, and store it for the next command."""
        self.failures[run.name] = reason
        self._say(f"{run.name}: failed: {reason}")
        failures = read_failures(self.folder)
        failures[run.name] = reason
        write_failures(self.folder, failures)

    def _reap(self) -> list[PlannedRun]:
        """Report the children that have ended; return those that a race continues."""
        paused = []
        for child in list(self._children):
            if child.process.poll() is None:
                continue
            self._children.remove(child)
            run = child.run
            step = self._read_step(run)
            self._last_steps[run.name] = step

            if self._is_done(run):
                self._say(f"{run.name}: DONE")
                continue
            exit_code = child.process.returncode
            if exit_code and not self.stops:
                output = self.folder / run.name / OUTPUT
                last_line = _last_line(output)
                self._fail(run, f"{ending(exit_code)}, {last_line} ({output})")
                continue

            # It stopped by itself: at the end of a stage of the race, or because it was asked to.
            self._say(f"{run.name}: stopped at step {step:,}")
            if self._target(run) <= step < self._total_steps[run.name]:
                paused.append(run)
            elif not self.stops:
                self.failures[run.name] = "stopped"
        return paused

    def _advance(self, race: "BoardRace", waiting: Sequence[PlannedRun]) -> list[PlannedRun]:
        """Drop waiting runs whose arm the race has just stopped."""
        # A running child counts with its first step: the scores of later ones may not be written.
        steps = dict(self._last_steps)
        for child in self._children:
            steps[child.run.name] = child.first_step
        for stop in race.advance(steps, self.failures):
            self._say(f"{stop.task}, {stop}")

        # A stopped run has no steps left, which the total of the progress counts; it may return.
        remaining = []
        stopped = []
        for run in (*waiting, *self._raced):
            if race.is_stopped(run.name):
                self._total_steps[run.name] = self._last_steps[run.name]
                stopped.append(run)
                continue
            self._total_steps[run.name] = self._planned_steps[run.name]
            remaining.append(run)
            if run in self._raced:
                self._say(f"{run.name}: returns to the race")
        self._raced = stopped
        return remaining

    def _progress(self) -> list[str]:
        """Return a line per running run, and the total."""
        lines = []
        not_running = {*self._last_steps}
        for child in self._children:
            name = child.run.name
            not_running.remove(name)
            left = ""
            step = self._last_steps[name]
            if summary := self._summary(child.run):
                step = max(step, summary.step or 0)
                left = _time_left(summary.eta_s)
            self._last_steps[name] = step
            last_step = self._total_steps[name]
            lines.append(f"{name}: step {step:,} of {last_step:,}{left}")

        # The time left, at the steps per second of this driver's runs so far, ended ones included.
        total = sum(self._total_steps.values())
        done = sum(self._last_steps.values())
        trained = done - self._steps_before
        left_s = None
        if trained > 0 and done < total:
            passed_s = time.monotonic() - self._began_s
            left_s = passed_s / trained * (total - done)

        num_ended = sum(self._last_steps[name] >= self._total_steps[name] for name in not_running)
        stopping = ", stopping" if self.stops else ""
        lines.append(
            f"{num_ended} of {len(self.sweep.runs)} runs, step {done:,} of {total:,}"
            f"{_time_left(left_s)}{stopping}"
        )
        return lines

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """Stop the children at SIGINT, SIGTERM and SIGHUP, and whenever the block ends.

        A signal that is ignored stays so: nohup's SIGHUP.
        """
        before = {
            number: signal.signal(number, self._stop)
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
            if signal.getsignal(number) is not signal.SIG_IGN
        }
        try:
            yield
        finally:
            for child in self._children:
                child.process.terminate()
            if self._is_own_server:
                self._close_server()
            for number, handler in before.items():
                signal.signal(number, handler)
            if self.stops > 1:
                self._wait_for_killed()

    def _wait_for_killed(self) -> None:
        """Wait until the killed children have ended: the next command may continue their runs.

        A process that waits for a disk cannot be killed, hence the limit.
        """
        deadline = time.monotonic() + KILL_S
        while any(child.process.poll() is None for child in self._children):
            if time.monotonic() > deadline:
                return
            time.sleep(0.01)

    def _stop(self, number: int, frame: FrameType | None) -> None:
        """Ask the children to save and stop; the second time kill them, and end all waits."""
        self.stops += 1
        if self.stops == 1:
            for child in self._children:
                child.process.terminate()
            return
        for child in self._children:
            if child.process.returncode is None:
                kill_tree(child.process.pid)  # and its compilers
        raise KeyboardInterrupt


def _time_left(seconds: float | None) -> str:
    if seconds is None:
        return ""
    return f", about {duration(seconds)} left"


def train_sweep(sweep: Sweep, folder: Path, *, threads: int, server: ForkServer | None) -> None:
    """Train all runs, as many at once as there are GPUs, or cores for `threads` each.

    Raises KeyboardInterrupt if it was stopped, UserError if a run failed.
    """
    gpus = visible_gpus()
    max_parallel = len(gpus) or available_cores() // threads
    parallel = min(len(sweep.runs), max_parallel)
    driver = Driver(sweep, folder, parallel, gpus=gpus, threads=threads, server=server)
    driver.train()
    if driver.stops:
        raise KeyboardInterrupt
    if driver.failures:
        name, reason = next(iter(driver.failures.items()))
        raise UserError(
            "sweep.failed_runs",
            f"{len(driver.failures)} of {len(sweep.runs)} runs failed, such as {name}: {reason}. "
            "The same command tries again",
            failures=driver.failures,
        )


def trainer_environment(threads: int) -> dict[str, str]:
    """Return the environment of a trainer with `threads` CPU threads that a driver starts."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
    environ |= TRAINER_ENVIRONMENT
    environ["OMP_NUM_THREADS"] = str(threads)
    return environ


def read_failures(folder: Path) -> dict[str, str]:
    """Return why runs failed when they were last started, by name."""
    with suppress(UnreadableFile):
        return read_record(folder / FAILURES, dict[str, str])
    return {}


def write_failures(folder: Path, reasons: Mapping[str, str]) -> None:
    with suppress(OSError):  # a full disk, which is why runs fail
        write_json(folder / FAILURES, reasons)


def _last_line(path: Path) -> str:
    """Return the last error[...] in the end of a log, else its last line."""
    lines = []
    with suppress(OSError), open(path, "rb") as file:
        file.seek(max(0, path.stat().st_size - LOG_END))
        text = file.read().decode(errors="replace")
        lines = [line.strip() for line in text.split("\n") if line.strip()]
    errors = [line for line in lines if line.startswith("error[")]
    return [MISSING, *lines, *errors][-1]
