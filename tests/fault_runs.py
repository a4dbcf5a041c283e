"""What tests of the fault table share: an unharmed run to copy, and damage to put into copies."""

import os
import shutil
import signal
from functools import cache
from pathlib import Path

from canon_pretrain.checkpoint.folder import CheckpointFolder
from tests.checkpoint_folders import flip_byte
from tests.ranks import Ended, events, launch
from tests.support import debug_run

STEPS = 12
EVERY_2 = ("--checkpoint.interval", 2, "--checkpoint.async_mode", "disabled")


@cache
def unharmed_run(data: Path) -> Path:
    """A finished debug run of 2 ranks with checkpoints of steps 2, 4 ... 12; one for all files."""
    folder = data.with_name("unharmed")
    launch(*debug_run(data, folder / "run"), *EVERY_2, output=folder / "out")
    return folder / "run"


def copy(base: Path, target: Path, *, last: int = STEPS) -> Path:
    """A copy of the run without the checkpoints after step `last`."""
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
    """What was set aside, and why."""
    found = CheckpointFolder(run / "checkpoint").quarantined()
    return {entry.path.name: entry.reason for entry in found}


def resumed_from(run: Path) -> list[int]:
    return [event["from_step"] for event in events(run, "resume")]


def assert_refused(ended: Ended) -> None:
    """Exit code 2, and the error told once. One that was first to go had the others ended by
    SIGTERM, as torchrun does it: that may meet them on their own way out."""
    assert 2 in ended.codes and {*ended.codes} <= {2, -signal.SIGTERM}, ended
    assert ended.output.count("error: ") == 1 and "Traceback" not in ended.output, ended


# ---- damage of a file


def flip(path: Path) -> None:
    """One byte, with the file's size and time as they were."""
    flip_byte(path)


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


def missing(path: Path) -> None:
    path.unlink()


def a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()
