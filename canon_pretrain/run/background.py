"""Work that must not block a training step: in a thread, or in a separate process.

A shared file system may block every call for minutes (a Lustre failover), and wandb, trackio or
TensorBoard may exit, slow down or hang. No torch.
"""

import contextlib
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from canon_pretrain.core.files import open_file

logger = logging.getLogger(__name__)

Process = subprocess.Popen[bytes]
EXPORT_TIMEOUT_S = 30.0  # for live exports to copy the last lines at the end of a launch


class Background:
    """Call `action`, which must not raise, in a daemon thread after each `request`, or several."""

    def __init__(self, action: Callable[[], None], name: str) -> None:
        self._action = action
        self._requested = 0  # number of requests
        self._served = 0  # of these, before the last call of `action` began
        self._is_closed = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def request(self) -> bool:
        """Request a call of `action`; return whether all earlier requests have been served."""
        with self._changed:
            was_idle = self._served == self._requested
            self._requested += 1
            if self._thread.ident is None and not self._is_closed:
                self._thread.start()
            self._changed.notify_all()
            return was_idle

    def wait(self, timeout_s: float) -> bool:
        """Wait until all requests so far are served; return False after `timeout_s`."""
        with self._changed:
            last = self._requested
            self._changed.wait_for(lambda: self._is_closed or self._served >= last, timeout_s)
            return self._served >= last

    def close(self) -> None:
        """End the thread after its current call; ignore later requests."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._is_closed or self._served < self._requested)
                if self._is_closed:
                    return
                last = self._requested
            self._action()
            with self._changed:
                self._served = last
                self._changed.notify_all()


class LiveExports:
    """Processes that copy the log to other tools; they exit when their pipes close."""

    def __init__(self) -> None:
        self._running: dict[str, Process] = {}
        self._folder = Path()

    def start(self, settings: Any, folder: Path) -> None:
        """Start the exports that the job's `metrics` section enables; log failures."""
        self._folder = folder
        for target, command in follow_commands(settings, folder):
            try:
                with open_file(self._output(target), "wb") as file:
                    self._running[target] = subprocess.Popen(
                        command,
                        stdin=subprocess.PIPE,
                        stdout=file,
                        stderr=subprocess.STDOUT,
                        # Ctrl-C and a launcher's signals are for the trainer, which then ends it
                        start_new_session=True,
                    )
            except OSError as error:
                self._report(target, f"failed to start: {error}")

    def check(self) -> None:
        """Log once each export that exited before the run."""
        for target, process in list(self._running.items()):
            if process.poll() is not None:
                del self._running[target]
                # in a thread: the trainer calls this between two steps
                threading.Thread(
                    target=self._end, args=(target, process, 0.0, "exited"), daemon=True
                ).start()

    def finish(self, wait_s: float = EXPORT_TIMEOUT_S) -> None:
        """Let them copy what is left; kill those that take longer than `wait_s` in total."""
        deadline = time.monotonic() + wait_s
        for process in self._running.values():
            _close_pipe(process)
        for target, process in self._running.items():
            left_s = max(deadline - time.monotonic(), 0.1)
            self._end(target, process, left_s, "failed")
        self._running.clear()

    def _end(self, target: str, process: Process, wait_s: float, failure: str) -> None:
        """Wait for an export and log its error, if any; kill it after `wait_s`."""
        _close_pipe(process)
        output = self._output(target)
        try:
            if process.wait(wait_s) == 0:
                output.unlink(missing_ok=True)
                return
            # the last line of output is the reason
            text = output.read_text(errors="replace").strip() or "it produced no output"
            last_line = text.splitlines()[-1].rstrip(".")
            self._report(target, f"{failure}: {last_line}")
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # and its child processes
            with contextlib.suppress(subprocess.TimeoutExpired):  # blocked on a disk
                process.wait(1.0)
            self._report(target, f"did not end within {wait_s:.0f} s")
        except OSError as error:
            self._report(target, f"{failure}: {error}")

    def _output(self, target: str) -> Path:
        """Return the file with an export's output, which is removed if it succeeds."""
        return self._folder / f".export-{target}.log"

    def _report(self, target: str, problem: str) -> None:
        logger.warning(
            f"the live {target} export {problem}. Training continues; `canon run "
            f"export {target} {self._folder}` exports the whole log later"
        )


def _close_pipe(process: Process) -> None:
    with contextlib.suppress(OSError):
        process.stdin.close()  # type: ignore[union-attr]  # it is a pipe


def follow_commands(settings: Any, folder: Path) -> Iterator[tuple[str, list[str]]]:
    """Yield (target, command) of each live export that the job's `metrics` section enables."""
    # They end with the trainer, which closes their stdin.
    export = [sys.executable, "-m", "canon_pretrain", "run", "export"]
    run = [str(folder.resolve()), "--follow", "--beside-trainer"]
    if settings.enable_tensorboard:
        tb_folder = f"--tb-folder={settings.save_tb_folder}"
        yield "tensorboard", [*export, "tensorboard", *run, tb_folder]

    if settings.enable_trackio:
        values = {"project": settings.wandb_project, "name": settings.wandb_name}
        yield "trackio", [*export, "trackio", *run, *_options(values)]

    mode = settings.wandb_mode or os.environ.get("WANDB_MODE") or "online"
    if settings.enable_wandb and mode != "disabled":
        values = {
            "project": settings.wandb_project,
            "entity": settings.wandb_entity,
            "name": settings.wandb_name,
            "mode": mode,
        }
        options = _options(values)
        if settings.wandb_tags:
            options += ["--tags", *settings.wandb_tags]
        yield "wandb", [*export, "wandb", *run, *options]


def _options(values: Mapping[str, str]) -> list[str]:
    """Return an option for each value that is set."""
    return [f"--{name}={value}" for name, value in values.items() if value]
