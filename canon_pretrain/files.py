"""Small file operations that survive a crash: atomic writes, folder sync, hashes.

A leaf of the package: data shards, run folders and results are written through it.
"""

import hashlib
import json
import os
import secrets
import shutil
from pathlib import Path
from typing import Any, BinaryIO

READ_BYTES = 1 << 20


def fsync_folder(folder: Path) -> None:
    """Make the names in `folder` durable: until then a crash may undo a rename."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def publish(temporary: Path, final: Path) -> None:
    """Give a finished and synced `temporary` file its `final` name, durably and in one step."""
    os.replace(temporary, final)
    fsync_folder(final.parent)


def create_file(path: Path, mode: int = 0o666) -> BinaryIO:
    """Create `path` for writing; raises FileExistsError also for a link, which is not followed."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    return os.fdopen(os.open(path, flags, mode), "wb")


def write_atomic(path: Path, content: bytes) -> None:
    """Write `content` to `path` so that a reader sees the old file or the new one, never a part.

    The temporary file beside it, `path`.XXXXXXXX.tmp, has a random name; an error removes it.
    """
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(4)}.tmp")
    file = create_file(temporary)
    try:
        with file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        publish(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def remove_leftovers(folder: Path, name: str = "*") -> None:
    """Remove what killed calls of `write_atomic` left of files called `name` in `folder`.

    For the holder of a lock on these files: a live call's temporary file looks the same.
    """
    for left in folder.glob(f"{name}.{'[0-9a-f]' * 8}.tmp"):
        left.unlink(missing_ok=True)


def write_json(path: Path, value: Any) -> None:
    """`write_atomic` of `value` as indented JSON; keys keep their order."""
    write_atomic(path, (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode())


def free_bytes(path: Path) -> int:
    """Bytes that this user may still write where `path` is, or will be."""
    while not path.exists():
        path = path.parent
    return shutil.disk_usage(path).free


def sha256_file(path: Path) -> str:
    """The hex SHA-256 of a file's bytes, read in pieces."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while piece := file.read(READ_BYTES):
            digest.update(piece)
    return digest.hexdigest()
