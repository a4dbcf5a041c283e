"""Small file operations that survive a crash: atomic writes, folder sync, hashes.

A leaf of the package: data shards, run folders and results are written through it.
"""

import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

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


def write_atomic(path: Path, content: bytes) -> None:
    """Write `content` to `path` so that a reader sees the old file or the new one, never a part."""
    temporary = path.with_name(path.name + ".tmp")
    with open(temporary, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    publish(temporary, path)


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
