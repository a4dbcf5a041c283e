"""The files of a run folder's lock and the chain that they form; run/lock.py has the rules.

A lock file is JSON of one size, padded. It is made whole under a name that did not exist, read by
anybody, and changed by its holder alone, in place.
"""

import errno
import hashlib
import json
import os
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

from canon_pretrain.core.files import open_at_once, parse_json
from canon_pretrain.run.holder import Holder

LOCK_BYTES = 1024
"""Size of every lock file: a heartbeat overwrites in place and so needs no space on the disk."""
NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)
DAMAGED = "damaged-"
"""How the id of a holder begins that no process can be."""


@dataclass(frozen=True)
class Sight:
    """What one look at the lock shows; two equal ones mean no sign of life between them."""

    holder: Holder
    mtime_ns: int
    chain: tuple[str, ...]
    """Ids from lock.json to the holder."""


def look(path: Path) -> Sight | None:
    """The end of the chain that begins at lock.json; None where that does not exist."""
    sight, chain, name = None, [], path
    while (found := read(name)) is not None and found[0].id not in chain:
        chain.append(found[0].id)
        sight = Sight(*found, tuple(chain))
        name = claim_of(path, found[0].id)
    return sight


def age_s(path: Path, sight: Sight) -> float:
    """Seconds since the holder's last sign of life, by the clock that stamps files in its folder.

    That is the file server's, or near it, so the clocks of two nodes need not agree.
    """
    probe = path.with_name(f"{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        probe.touch()
        now_ns = probe.stat().st_mtime_ns
    except OSError:
        now_ns = time.time_ns()  # we may not write there
    finally:
        remove(probe)
    return max(0.0, (now_ns - sight.mtime_ns) / 1e9)


def claim_of(path: Path, holder_id: str) -> Path:
    return path.with_name(f"{path.name}.after-{holder_id}")


def remove(path: Path) -> None:
    """Remove a file that harms nobody if it stays."""
    try:
        path.unlink()
    except OSError:
        pass


def content_of(holder: Holder) -> bytes:
    return json.dumps(asdict(holder), indent=2).encode().ljust(LOCK_BYTES - 1) + b"\n"


def parse(content: bytes) -> Holder | None:
    """The holder that `content` names; None where it is damaged."""
    try:
        holder = Holder(**parse_json(content))
        if "/" in holder.id or holder.pid <= 0 or not isinstance(holder.beats, int):
            return None
    except (ValueError, TypeError):
        return None
    return holder


def read(path: Path) -> tuple[Holder, int] | None:
    """Return the holder in one file and the file's time of change; None if there is no such file.

    Of anything but a lock, such as a FIFO, the holder is DAMAGED.
    """
    for attempt in range(3):
        try:
            with open(path, "rb", opener=open_at_once) as file:
                content, status = file.read(2 * LOCK_BYTES) or b"", os.fstat(file.fileno())
        except FileNotFoundError:
            return None
        except OSError as error:
            if error.errno != errno.ESTALE or attempt == 2:  # NFS: replaced while we read
                raise
            continue
        holder = parse(content)
        if holder is not None:
            return holder, status.st_mtime_ns
        time.sleep(0.01)  # the holder may be writing
    changed = datetime.fromtimestamp(status.st_mtime, UTC).isoformat(timespec="milliseconds")
    name = DAMAGED + hashlib.sha256(content).hexdigest()[:32]
    return Holder(name, "unknown", 0, None, None, 0, changed, changed), status.st_mtime_ns


@contextmanager
def temporary_file(path: Path, holder: Holder) -> Iterator[Path]:
    """A whole lock file beside `path`; what is left of it at the end is removed."""
    temporary = path.with_name(f"{path.name}.{holder.id}.tmp")
    try:
        temporary.write_bytes(content_of(holder))
        yield temporary
    finally:
        remove(temporary)


def link(temporary: Path, name: Path) -> bool:
    """Make `name` with the content of `temporary` in one step; False where it exists."""
    try:
        os.link(temporary, name)
        return True
    except FileExistsError:
        # NFS: the server made it, its answer was lost, and the second try met the first
        return temporary.stat().st_nlink > 1
    except OSError as error:
        if error.errno not in NO_LINKS:
            raise
    try:
        with open(name, "xb") as file:
            file.write(temporary.read_bytes())
    except FileExistsError:
        return False
    return True
