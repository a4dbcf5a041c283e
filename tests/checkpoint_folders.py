"""Checkpoints of a few small files, kills between two file operations, small disks."""

import itertools
import json
import os
import shutil
import signal
import subprocess
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

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
    name: str | None = None,
    num_bytes: int = 64,
    run_id: str | None = None,
) -> Path:
    """Create a checkpoint named step-N or `name`, whose content depends on step and kind."""
    path = folder / (name or f"step-{step}")
    (path / "more").mkdir(parents=True)
    text = f"{kind} {step} ".encode()
    content = (text * (1 + num_bytes // len(text)))[:num_bytes]
    (path / "__0_0.distcp").write_bytes(content)
    if kind == "full":
        (path / "more" / "__1_0.distcp").write_bytes(content[::-1])
    write_manifest(path, step, kind, run_id)
    return path


def write_manifest(path: Path, step: int, kind: Kind, run_id: str | None = None) -> None:
    """Write the manifest of the files in `path`."""
    files = {
        name: FileEntry((path / name).stat().st_size, sha256_file(path / name))
        for name in files_of(path)
    }
    saved = "2026-11-20T12:00:00+00:00"  # the same in all: folders are compared byte by byte
    Manifest(
        step, kind, world_size=1, torch="2.13.0", files=files, saved=saved, run_id=run_id
    ).write(path)


def set_manifest(checkpoint: Path, **fields: object) -> None:
    """Change fields of a manifest."""
    path = checkpoint / MANIFEST
    write_json(path, json.loads(path.read_bytes()) | fields)


def fake_strip(checkpoint: Path, temporary: Path) -> None:
    """Do what `strip_to_weights` does, for checkpoints of `make_step`."""
    step = int(checkpoint.name.removeprefix("step-"))
    make_step(temporary.parent, step, "weights", name=temporary.name)


def flip_byte(path: Path) -> None:
    """Change one byte in the middle, but not size and mtime."""
    before = path.stat()
    content = bytearray(path.read_bytes())
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
        code = run_forked(lambda: (_kill_at(survived), action(folder)))  # noqa: B023
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


def _kill_at(survived: int) -> None:
    """Kill this process before its operation number `survived` of OPERATIONS."""
    left = itertools.count(survived, -1)

    def guarded(operation: Callable[..., object]) -> Callable[..., object]:
        def call(*arguments: object, **options: object) -> object:
            if next(left) == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return operation(*arguments, **options)

        return call

    for name in OPERATIONS:
        setattr(os, name, guarded(getattr(os, name)))


@contextmanager
def small_disk(folder: Path, options: str) -> Iterator[Path]:
    """Mount a tmpfs with `options` at `folder`; skip the test if mounting is not allowed."""
    folder.mkdir(parents=True, exist_ok=True)
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)], capture_output=True
    )
    if done.returncode:
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
