"""step-N/manifest.json: size and SHA-256 of every other file, written last. No torch."""

import errno
import hashlib
import json
import os
import stat
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from canon_pretrain.core.errors import UserError
from canon_pretrain.core.files import UnreadableFile, read_record, sha256_file, write_json

MANIFEST = "manifest.json"
HASH_WORKERS = 4
PATH_MAX = 4096  # bytes of a path on Linux

Kind = Literal["full", "weights"]

DAMAGE = (
    errno.EIO,
    errno.ENODATA,
    errno.ELOOP,
    errno.ENOTDIR,
    errno.EISDIR,
    errno.ENAMETOOLONG,
    errno.ENXIO,  # not a regular file
)
"""Errors that mean a damaged file; others, such as EACCES, do not."""


class DamagedCheckpoint(UserError):
    """A checkpoint that differs from what was saved; `faults` names each difference."""


def _check_inside(name: str) -> str:
    path = PurePosixPath(name)
    is_path = name and "\0" not in name and len(os.fsencode(name)) < PATH_MAX
    if not is_path or path.is_absolute() or ".." in path.parts:
        raise ValueError(f"{name[:80]!r} is not a file of this folder")
    return name


@dataclass(frozen=True)
class FileEntry:
    """A file of a checkpoint as it was saved."""

    bytes: Annotated[int, Field(ge=0, lt=1 << 63)]
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """The content of manifest.json."""

    step: int
    kind: Kind  # `full` can be resumed; `weights` holds only the model, for an evaluation
    world_size: int
    torch: str  # version that wrote it
    files: dict[Annotated[str, AfterValidator(_check_inside)], FileEntry]  # all but the manifest
    saved: str  # UTC, ISO 8601
    run_id: str | None = None
    launch: int | None = None  # its number within the run
    version: Literal[1] = 1  # of this format
    weights_of: str | None = None  # `content` of the full checkpoint whose weights these are

    @property
    def total_bytes(self) -> int:
        return sum(entry.bytes for entry in self.files.values())

    @property
    def content(self) -> str:
        """A SHA-256 of what was saved: the same for copies and for weights taken from it."""
        if self.weights_of:
            return self.weights_of
        # torch's metadata contains a random id per save
        hashes = {name: entry.sha256 for name, entry in self.files.items()}
        hashes.pop(".metadata", None)
        text = json.dumps(hashes, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()

    def write(self, folder: Path) -> None:
        write_json(folder / MANIFEST, asdict(self))

    @classmethod
    def read(cls, folder: Path) -> "Manifest":
        """Return the manifest in `folder`. Raises DamagedCheckpoint or OSError."""
        path = folder / MANIFEST
        try:
            return read_record(path, cls)
        except UnreadableFile as error:
            # a disk that cannot be reached now does not mean a damaged checkpoint
            if error.errno is not None and error.errno not in (errno.ENOENT, *DAMAGE):
                raise OSError(error.errno, os.strerror(error.errno), str(path)) from None
            fault = str(error)
            if error.is_missing:
                fault = f"{folder} has no {MANIFEST}: it was never finished"
        raise DamagedCheckpoint("checkpoint.damaged", fault, path=folder, faults=[fault])


def files_of(folder: Path) -> list[str]:
    """Return the relative paths of all files in `folder` that its manifest must name."""
    names: set[str] = set()
    for path in folder.rglob("*"):
        if path.is_file() or path.is_symlink():
            names.add(path.relative_to(folder).as_posix())
    return sorted(names - {MANIFEST})


def find_faults(
    folder: Path,
    manifest: Manifest,
    names: Iterable[str] | None = None,
    *,
    hashes: bool = True,
    workers: int = 1,
) -> list[str]:
    """Return how the files differ from the manifest, including unknown ones. Raises OSError."""
    checked = sorted(manifest.files if names is None else names)
    sha256 = sha256_file if hashes else None
    check = partial(_fault, folder, manifest, sha256=sha256)
    with ThreadPoolExecutor(workers) as pool:
        faults = list(filter(None, pool.map(check, checked)))
    if names is None:
        faults += unknown_files(folder, manifest)
    return faults


def unknown_files(folder: Path, manifest: Manifest) -> list[str]:
    """Return a fault for each file in `folder` that the manifest does not name."""
    return [
        f"{name} is not in the manifest" for name in files_of(folder) if name not in manifest.files
    ]


def read_file(folder: Path, manifest: Manifest, name: str) -> bytes:
    """Return the verified content of a file. Raises DamagedCheckpoint or OSError."""
    content = b""

    # read once: the bytes that are verified are those returned
    def sha256(path: Path) -> str:
        nonlocal content
        content = path.read_bytes()
        return hashlib.sha256(content).hexdigest()

    if fault := _fault(folder, manifest, name, sha256=sha256):
        raise DamagedCheckpoint("checkpoint.damaged", fault, path=folder, faults=[fault])
    return content


def _fault(
    folder: Path, manifest: Manifest, name: str, *, sha256: Callable[[Path], str] | None
) -> str | None:
    """Return how a file differs from its entry, by size and, with `sha256`, by content."""
    path = folder / name
    entry = manifest.files[name]
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            return f"{name} is not a regular file"
        if status.st_size != entry.bytes:
            return f"{name} has {status.st_size:,} bytes, expected {entry.bytes:,}"
        # after the size, which takes no reading
        if sha256 is not None:
            digest = sha256(path)
            if digest != entry.sha256:
                return f"{name} has SHA-256 {digest[:12]}..., expected {entry.sha256[:12]}..."
    except OSError as error:
        if error.errno == errno.ENOENT:
            return f"{name} is missing"
        if error.errno not in DAMAGE:
            raise
        return f"{name} cannot be read: {error.strerror}"
    return None


def verify(folder: Path, *, hashes: bool = True, workers: int = 1) -> Manifest:
    """Return the manifest of a complete checkpoint. Raises DamagedCheckpoint or OSError."""
    manifest = Manifest.read(folder)
    faults = find_faults(folder, manifest, hashes=hashes, workers=workers)
    if folder.name != f"step-{manifest.step}":
        faults.insert(0, f"its manifest is that of step {manifest.step}")

    if faults:
        raise DamagedCheckpoint(
            "checkpoint.damaged",
            f"{folder} is damaged: {'; '.join(faults)}",
            path=folder,
            faults=faults,
        )
    return manifest
