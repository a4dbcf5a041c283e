"""Leases: who does a piece of work, so that several watchers never give out the same piece twice.

    FOLDER/K.json    the K-th claim of that work, and its job

A watcher claims work and records the job that it then submits; the job asks, before it begins,
whether the work is still its own. A claim is a name of its own, made once, by a link, which NFS and
Lustre keep atomic: of many that claim only one wins. The highest number counts. A claim is never
deleted: whoever finds its job gone makes the next number.
"""

import os
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from canon_pretrain.checkpoint.folder import entries
from canon_pretrain.cluster.jobs import Slurm
from canon_pretrain.core.files import UnreadableFile, read_record, write_json
from canon_pretrain.core.holder import Holder, link, process_lives, remove

BEAT_S = 10.0
"""Work without a job touches its lease so often (`Leases.beat`)."""
CLAIM_EXPIRY_S = 600.0
"""A claim without a job is its watcher's death after this long; sbatch takes seconds."""
LOCAL_EXPIRY_S = 120.0
LOCAL = "local"

InFlight = Literal["claimed", "queued", "running"]


@dataclass(frozen=True)
class Lease:
    """One claim of a piece of work: its file's name and who claimed it, then its job."""

    number: int
    holder: Holder
    name: str = ""
    """Of the job, unlike any other's: it is found by it if its id was not written down."""
    cluster: str | None = None
    """Slurm's name of the cluster that knows `job`."""
    job: str | None = None
    """The job's id; None until it is submitted, LOCAL for a process of the holder's."""
    ended: str | None = None
    """How the job ended, or why the claim was given back; None while it holds."""

    @property
    def id(self) -> str:
        return self.holder.id


def new_lease(number: int, name: str = "", **more: Any) -> Lease:
    """Return a claim of this process; its job's name begins with `name`."""
    holder = Holder.of_this_process()
    return Lease(number, holder, name and f"{name}-{holder.id[:8]}", **more)


class Leases:
    """The claims of one piece of work, in `folder`, which need not exist yet."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def all(self) -> list[Lease]:
        """Return every claim, by number. An unreadable one is nobody's, without a job."""
        numbers = [int(path.stem) for path in entries(self.folder) if path.stem.isdecimal()]
        return [self._read(number) for number in sorted(numbers)]

    def current(self) -> Lease | None:
        """Return the claim that counts."""
        return next(reversed(self.all()), None)

    def is_current(self, lease_id: str) -> bool:
        current = self.current()
        return current is not None and current.id == lease_id

    def claim(self, lease: Lease) -> bool:
        """Make `lease` the current one; return False if another has its number already."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with self._temporary() as temporary:
            write_json(temporary, asdict(lease))
            return link(temporary, self._path(lease.number))

    def record(self, lease: Lease, **values: Any) -> Lease:
        """Write `values` into the claim, unless it was archived meanwhile."""
        lease = replace(lease, **values)
        if self.folder.is_dir():
            write_json(self._path(lease.number), asdict(lease))
        return lease

    def beat(self, lease: Lease) -> None:
        """Show that the holder lives, if it does the work itself."""
        os.utime(self._path(lease.number))

    def judge(
        self, lease: Lease | None, queue: Slurm, expiry_s: float = CLAIM_EXPIRY_S
    ) -> tuple[InFlight | None, Lease | None, str]:
        """Return the state of work that is claimed, None if nobody is at it; and why.

        A job that is found gone is noted in the lease, so that Slurm is not asked again.
        """
        if lease is None or lease.ended is not None:
            return None, lease, (lease and lease.ended) or ""
        if lease.job == LOCAL:
            lives = process_lives(lease.holder)
            if lives is None:  # on another machine: until it is silent for long
                lives = self._age_s(lease) <= LOCAL_EXPIRY_S
            if lives:
                return "running", lease, f"on {lease.holder.host}"
            ended = "its process is gone"
            return None, self.record(lease, ended=ended), ended
        if lease.job is None:
            if self._age_s(lease) <= expiry_s:
                return "claimed", lease, f"by {lease.holder.host}"
            # the watcher died after sbatch, before it could write down the job?
            job = queue.find(lease.name) if lease.name else None
            if job is None:
                return None, lease, ""
            lease = self.record(lease, job=job)
        assert lease.job is not None
        if lease.cluster not in (None, queue.name):
            return "queued", lease, f"job {lease.job} of cluster {lease.cluster}"
        lives, word = queue.verdict(lease.job)
        if lives:
            return "queued" if word == "pending" else "running", lease, f"job {lease.job}"
        ended = f"job {lease.job} {word}"
        return None, self.record(lease, ended=ended), ended

    def _age_s(self, lease: Lease) -> float:
        """Return seconds since the claim's last sign of life, by the folder's clock."""
        with self._temporary() as probe, suppress(OSError):
            written = self._path(lease.number).stat().st_mtime
            probe.touch()
            return max(0.0, probe.stat().st_mtime - written)
        return 0.0  # no sign that it is old

    def _read(self, number: int) -> Lease:
        for _ in range(3):
            try:
                return replace(read_record(self._path(number), Lease), number=number)
            except UnreadableFile:
                time.sleep(0.01)  # NFS: replaced while we read
        return Lease(number, Holder(f"damaged-{number}", "unknown", 1, None, None, 0, ""))

    def _path(self, number: int) -> Path:
        return self.folder / f"{number}.json"

    @contextmanager
    def _temporary(self) -> Iterator[Path]:
        """Yield a name in the folder; what has it at the end is removed."""
        path = self.folder / f".{uuid.uuid4().hex}.tmp"
        try:
            yield path
        finally:
            remove(path)
