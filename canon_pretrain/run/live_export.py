"""wandb and TensorBoard while a run trains: processes beside global rank 0 that follow its log.

They are `python -m canon_pretrain.run export ... --follow`, so that neither tool ends, slows or
hangs a run. One ends by itself when its pipe from the trainer closes, also because it was killed.
"""

import contextlib
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

Process = subprocess.Popen[bytes]
WAIT_S = 30.0
"""How long a launch's end waits for the last lines to arrive."""


class LiveExports:
    """The live copies of one launch; none until `start`."""

    def __init__(self) -> None:
        self._running: dict[str, Process] = {}
        self._folder = Path()

    def start(self, settings: Any, folder: Path) -> None:
        """Start those that the job's `metrics` section asks for; report what does not start."""
        self._folder = folder
        for target, command in follow_commands(settings, folder):
            try:
                with open(self._output(target), "wb") as file:
                    self._running[target] = subprocess.Popen(
                        command,
                        stdin=subprocess.PIPE,
                        stdout=file,
                        stderr=subprocess.STDOUT,
                        # Ctrl-C and a launcher's signals are the trainer's, which then ends it
                        start_new_session=True,
                    )
            except OSError as error:
                self._report(target, f"does not start: {error}")

    def check(self) -> None:
        """Report once each that has ended before the run did."""
        for target, process in list(self._running.items()):
            if process.poll() is not None:
                del self._running[target]
                given = (target, process, 0.0, "has ended")
                # in a thread: the trainer calls this between two steps
                threading.Thread(target=self._end, args=given, daemon=True).start()

    def finish(self, wait_s: float = WAIT_S) -> None:
        """Let them copy what is left; kill those that take longer than `wait_s` together."""
        deadline = time.monotonic() + wait_s
        for process in self._running.values():
            _close_pipe(process)
        for target, process in self._running.items():
            self._end(target, process, max(deadline - time.monotonic(), 0.1), "failed")
        self._running.clear()

    def _end(self, target: str, process: Process, wait_s: float, failure: str) -> None:
        _close_pipe(process)
        output = self._output(target)
        try:
            if process.wait(wait_s):
                words = output.read_text(errors="replace").strip() or "it left no word"
                self._report(target, f"{failure}: {words.splitlines()[-1].rstrip('.')}")
            else:
                output.unlink(missing_ok=True)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # and what it has started itself
            with contextlib.suppress(subprocess.TimeoutExpired):  # it hangs in a dead disk
                process.wait(1.0)
            self._report(target, f"did not end within {wait_s:.0f} s")
        except OSError as error:
            self._report(target, f"{failure}: {error}")

    def _output(self, target: str) -> Path:
        return self._folder / f".export-{target}.log"

    def _report(self, target: str, what: str) -> None:
        logger.warning(
            f"the live copy for {target} {what}. The run does not need it; `python -m "
            f"canon_pretrain.run export {target} {self._folder}` makes a whole one from the log"
        )


def follow_commands(settings: Any, folder: Path) -> Iterator[tuple[str, list[str]]]:
    """Yield (target, command) of each live copy that the job's `metrics` section asks for."""
    base = [sys.executable, "-m", "canon_pretrain.run", "export"]
    last = [str(folder.resolve()), "--follow", "--beside_trainer"]
    if settings.enable_tensorboard:
        yield "tensorboard", [*base, "tensorboard", *last, f"--tb_folder={settings.save_tb_folder}"]
    mode = settings.wandb_mode or os.environ.get("WANDB_MODE") or "online"
    if settings.enable_wandb and mode != "disabled":
        options = {"project": settings.wandb_project, "entity": settings.wandb_entity}
        options |= {"name": settings.wandb_name, "mode": mode}
        words = [f"--{name}={value}" for name, value in options.items() if value]
        tags = ["--tags", *settings.wandb_tags] if settings.wandb_tags else []
        yield "wandb", [*base, "wandb", *last, *words, *tags]


def _close_pipe(process: Process) -> None:
    with contextlib.suppress(OSError):
        process.stdin.close()  # type: ignore[union-attr]  # it is a pipe
