"""Helpers of the fault tests: launches of a run, an unharmed one to copy, and damage."""

import functools
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from canon_pretrain.checkpoint.folder import CheckpointFolder
from tests.checkpoint_folders import flip_byte
from tests.ranks import Ended, Launch, events, launch
from tests.support import ROOT, debug_run

STEPS = 12
EVERY_2 = ("--checkpoint.interval", 2, "--checkpoint.async_mode", "disabled")


@dataclass(frozen=True)
class Trial:
    """A run of the debug experiment, launched on two ranks as often as a test needs it."""

    data: Path
    folder: Path

    @property
    def run(self) -> Path:
        return self.folder / "run"

    def command(self, *more: object) -> list[object]:
        return [*debug_run(self.data, self.run), *more]

    def start(self, *more: object, **options: Any) -> Launch:
        return Launch(*self.command(*more), output=self.folder / "out", **options)

    def launch(self, *more: object, **options: Any) -> Ended:
        return launch(*self.command(*more), output=self.folder / "out", **options)


def wrap(
    owner: Any,
    name: str,
    before: Callable[..., object] = lambda *arguments: None,
    after: Callable[..., object] = lambda *arguments: None,
) -> None:
    """Call `before` and `after`, with the same arguments, around each `owner.name`."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def wrapper(*arguments: Any, **options: Any) -> Any:
        before(*arguments)
        result = original(*arguments, **options)
        after(*arguments)
        return result

    setattr(owner, name, wrapper)


@functools.cache
def unharmed_run(data: Path) -> Path:
    """Return a finished debug run of 2 ranks with checkpoints of steps 2, 4 ... 12; one for all."""
    folder = data.with_name("unharmed")
    trial = Trial(data, folder)
    trial.launch(*EVERY_2)
    return trial.run


def copy(base: Path, target: Path, *, last: int = STEPS) -> Path:
    """Copy a run without the checkpoints after step `last`."""
    shutil.copytree(base, target)
    for step in CheckpointFolder(target / "checkpoint").steps():
        if step > last:
            shutil.rmtree(checkpoint(target, step))
    return target


def checkpoint(run: Path, step: int) -> Path:
    return run / "checkpoint" / f"step-{step}"


def steps(run: Path) -> list[int]:
    return CheckpointFolder(run / "checkpoint").steps()


def quarantine(run: Path) -> dict[str, str]:
    """Return the names and reasons of quarantined checkpoints."""
    found = CheckpointFolder(run / "checkpoint").quarantined()
    return {entry.path.name: entry.reason for entry in found}


def resumed_from(run: Path) -> list[int]:
    return [event["from_step"] for event in events(run, "resume")]


flip = flip_byte  # one byte, with the file's size and time as they were


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size * 2 // 3)


def empty(path: Path) -> None:
    os.truncate(path, 0)


def grow(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\0")


def zero_4k(path: Path) -> None:
    content = bytearray(path.read_bytes())
    start = 4096 * (len(content) // 8192)
    assert any(content[start : start + 4096])
    content[start : start + 4096] = bytes(len(content[start : start + 4096]))
    path.write_bytes(content)


missing = Path.unlink


def a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


FAULTS = [flip, truncate, empty, grow, zero_4k, missing, a_folder]


def start_torchrun(
    *arguments: object, output: IO[str], environment: dict[str, str] | None = None, ranks: int = 2
) -> subprocess.Popen[bytes]:
    """Start the trainer, under torchrun for more than one rank."""
    launcher = ["torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "-m"]
    command = [sys.executable, "-m", *launcher * (ranks > 1), "canon_pretrain.train"]
    own = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.Popen(
        [*command, *map(str, arguments)],
        cwd=ROOT,
        env=os.environ | own | (environment or {}),
        stdout=output,
        stderr=subprocess.STDOUT,
    )


def wait_for(
    condition: Callable[[], bool],
    process: subprocess.Popen[bytes] | None = None,
    timeout_s: float = 120,
) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline and (process is None or process.poll() is None)
        time.sleep(0.02)


def current_step() -> list[int]:
    """Return a list that holds this rank's step from now on."""
    from canon_pretrain.titan.trainer import CanonTrainer

    reached = [0]
    wrap(CanonTrainer, "train_step", before=lambda trainer, _: reached.__setitem__(0, trainer.step))
    return reached
