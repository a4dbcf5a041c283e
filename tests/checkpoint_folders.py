"""Checkpoints of a few small files, kills between two file operations, small disks."""

import itertools
import json
import os
import shutil
import signal
import subprocess
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from canon_pretrain.checkpoint.manifest import MANIFEST, FileEntry, Kind, Manifest, files_of
from canon_pretrain.core.files import sha256_file, write_json

OPERATIONS = ("rename", "replace", "unlink", "rmdir", "mkdir")
"""The calls that move and delete files, also in pathlib and shutil."""


def make_step(
    folder: Path,
    step: int,
    kind: Kind = "full",
    *,
    name: str = "",
    num_bytes: int = 64,
    **facts: str,
) -> Path:
    """Create a checkpoint named step-N or `name`, whose content depends on step and kind."""
    path = folder / (name or f"step-{step}")
    (path / "more").mkdir(parents=True)
    text = f"{kind} {step} ".encode()
    content = (text * (1 + num_bytes // len(text)))[:num_bytes]
    (path / "__0_0.distcp").write_bytes(content)
    if kind == "full":
        (path / "more" / "__1_0.distcp").write_bytes(content[::-1])
    write_manifest(path, step, kind, **facts)
    return path


def write_manifest(path: Path, step: int, kind: Kind, **facts: Any) -> None:
    """Write the manifest of the files in `path`."""
    found = {name: (path / name, sha256_file(path / name)) for name in files_of(path)}
    files = {name: FileEntry(file.stat().st_size, digest) for name, (file, digest) in found.items()}
    # the same time in all: folders are compared byte by byte
    facts |= {"world_size": 1, "torch": "2.13.0", "saved": "2026-11-20T12:00:00+00:00"}
    Manifest(step, kind, files=files, **facts).write(path)


def set_manifest(checkpoint: Path, **fields: object) -> None:
    """Change fields of a manifest."""
    path = checkpoint / MANIFEST
    write_json(path, json.loads(path.read_bytes()) | fields)


class Plant:
    """Pickles to a call of the function `call[0]`."""

    def __init__(self, *call: Any) -> None:
        self.call = call

    def __reduce__(self) -> tuple[Any, tuple[object, ...]]:
        return self.call[0], self.call[1:]


def fake_strip(checkpoint: Path, temporary: Path) -> None:
    """Do what `strip_to_weights` does, for checkpoints of `make_step`."""
    step = int(checkpoint.name.removeprefix("step-"))
    make_step(temporary.parent, step, "weights", name=temporary.name)


def flip_byte(path: Path) -> None:
    """Change one byte in the middle, but not size and mtime."""
    before, content = path.stat(), bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def contents(folder: Path) -> list[bytes]:
    """Return the contents of all files below `folder`, sorted."""
    return sorted(path.read_bytes() for path in folder.rglob("*") if path.is_file())


def killed_everywhere(
    action: Callable[[Path], object], build: Callable[[], Path]
) -> Iterator[Path]:
    """Yield folders of `build` in which a process running `action` was killed.

    SIGKILL comes before the first of OPERATIONS, in the next folder before the second, and so on
    until `action` completes.
    """
    for survived in itertools.count():
        folder = build()
        code = run_forked(lambda: (kill_at(survived), action(folder)))  # noqa: B023
        if code == 0:
            return
        assert code == -signal.SIGKILL
        yield folder
        shutil.rmtree(folder)


def run_forked(action: Callable[[], object]) -> int:
    """Run `action` in a forked process; return its exit code."""
    with warnings.catch_warnings():
        # Python 3.12 warns of forks beside threads; this child takes no lock of theirs
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        try:
            action()
            os._exit(0)
        finally:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def kill_at(survived: int, operations: Sequence[str] = OPERATIONS) -> None:
    """Let this process be killed before its call number `survived` of `operations`."""
    left = itertools.count(survived, -1)

    def call(operation: Callable[..., object], *arguments: object, **options: object) -> object:
        if next(left) == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return operation(*arguments, **options)

    for name in operations:
        setattr(os, name, partial(call, getattr(os, name)))


@contextmanager
def small_disk(folder: Path, options: str) -> Iterator[Path]:
    """Mount a tmpfs with `options` at `folder`; skip the test if mounting is not allowed."""
    folder.mkdir(parents=True, exist_ok=True)
    command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
    if (done := subprocess.run(command, capture_output=True)).returncode:
        pytest.skip(f"no mount here: {done.stderr.decode().strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def fill(folder: Path) -> Path:
    """Write a file until the disk is full."""
    path = folder / "filler"
    with pytest.raises(OSError, match="No space left"), open(path, "wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    return path
