"""Leases: who does a piece of work, so that several watchers never give out the same piece twice.

    RUN/evals/step-N/SUITE/leases/K.json           the K-th claim of that work, and its job
    RUN/evals/step-N/SUITE/leases/restarts.json    how often the job began again, and what it gained

`eval submit` claims work and records the job that it then submits; the job asks, before it begins,
whether the work is still its own (`python -m eval.schedule.leases begin`, by slurm/eval.sh). Only
what NFS and Lustre keep atomic is relied on: a name is made once, by a link, and a rename replaces
it. A claim is a name of its own, so of many that claim only one wins; the highest number counts. It
is never deleted: whoever finds its job gone makes the next number. No torch here.
"""

import argparse
import dataclasses
import json
import os
import sys
import time
import uuid
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from canon_pretrain.checkpoint.architecture import find_checkpoint
from canon_pretrain.checkpoint.folder import EVALS, entries
from canon_pretrain.core.files import UnreadableFile, parsing, read_json
from canon_pretrain.core.holder import Holder, link, process_lives, remove
from eval.suite_names import suite_name

LEASES = "leases"
RESTARTS = "restarts.json"
BEAT_S = 10.0
"""Work without a job touches its lease so often (`Leases.beat`)."""

EXIT_FRUITLESS, EXIT_ANOTHERS = 1, 3


@dataclass(frozen=True)
class Lease:
    """One claim of a piece of work. The first fields are its file's name and who claimed it."""

    number: int
    holder: Holder
    name: str = ""
    """Of the job, unlike any other's: it is found by it where its id was not written down."""
    cluster: str | None = None
    """Slurm's name of the cluster that knows `job`."""
    job: str | None = None
    """The job's id; None until it is submitted, LOCAL for a process of the holder's."""
    ended: str | None = None
    """How the job ended, or why the claim was given back; None while it holds."""

    @property
    def id(self) -> str:
        return self.holder.id


LOCAL = "local"


def new_lease(number: int, **more: Any) -> Lease:
    """A claim of this process."""
    return Lease(number, Holder.of_this_process(), **more)


class Leases:
    """The claims of one piece of work, in `folder`, which need not be there yet."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def all(self) -> list[Lease]:
        """Every claim, by number. One that can't be read is a claim of nobody's, without a job."""
        numbers = [int(path.stem) for path in entries(self.folder) if path.stem.isdecimal()]
        return [self._read(number) for number in sorted(numbers)]

    def current(self) -> Lease | None:
        """The claim that counts."""
        return next(reversed(self.all()), None)

    def claim(self, lease: Lease) -> bool:
        """Make `lease` the current one; False where another has its number already."""
        self.folder.mkdir(parents=True, exist_ok=True)
        temporary = self._temporary()
        try:
            temporary.write_bytes(_content(lease))
            return link(temporary, self._path(lease.number))
        finally:
            remove(temporary)

    def record(self, lease: Lease, **values: Any) -> Lease:
        """Write `values` into the claim; raises FileNotFoundError where it was archived."""
        lease = dataclasses.replace(lease, **values)
        temporary = self._temporary()
        try:
            temporary.write_bytes(_content(lease))
            os.replace(temporary, self._path(lease.number))
        finally:
            remove(temporary)
        return lease

    def beat(self, lease: Lease) -> None:
        """Show that the holder lives, where it does the work itself."""
        os.utime(self._path(lease.number))

    def age_s(self, lease: Lease) -> float:
        """Seconds since the claim was written or its holder showed life, by the folder's clock."""
        probe = self._temporary()
        try:
            written = self._path(lease.number).stat().st_mtime
            probe.touch()
            return max(0.0, probe.stat().st_mtime - written)
        except OSError:
            return 0.0  # no sign that it is old
        finally:
            remove(probe)

    def holder_lives(self, lease: Lease, expiry_s: float) -> bool:
        """Whether the process that claimed may still be at it.

        On this machine while it exists, elsewhere until it is silent for `expiry_s`.
        """
        lives = process_lives(lease.holder)
        return self.age_s(lease) <= expiry_s if lives is None else lives

    def _read(self, number: int) -> Lease:
        for _ in range(3):
            path = self._path(number)
            try:
                record = read_json(path)
                with parsing(path):
                    holder = Holder(**record["holder"])
                    return Lease(**{**record, "number": number, "holder": holder})
            except UnreadableFile:
                time.sleep(0.01)  # NFS: replaced while we read
        return Lease(number, Holder(f"damaged-{number}", "unknown", 1, None, None, 0, "", ""))

    def _path(self, number: int) -> Path:
        return self.folder / f"{number}.json"

    def _temporary(self) -> Path:
        return self.folder / f".{uuid.uuid4().hex}.tmp"


def _content(lease: Lease) -> bytes:
    return (json.dumps(asdict(lease), indent=2) + "\n").encode()


def leases_of(run: Path, step: int, suite: str) -> Leases:
    """The leases of one suite of one checkpoint; `suite` is a `suite_name`."""
    return Leases(run / EVALS / f"step-{step}" / suite / LEASES)


def begin(leases: Leases, job: str, lease_id: str | None, restarts: int) -> tuple[int, str]:
    """What a job must do that has started: an exit code (0: go on), and why, in a sentence.

    `lease_id` is the claim that it was submitted for; None for one that a person submitted. A job
    that began again `restarts` times in a row without a task more ends: it would for ever.
    """
    if lease_id is not None:
        current = leases.current()
        if current is None or current.id != lease_id:
            return EXIT_ANOTHERS, f"another job has this work, or it was archived: {leases.folder}"
        if current.job is None:
            leases.record(current, job=job)  # its watcher was killed before it could
    before, gained = _restarts(leases), _num_answered(leases.folder.parent)
    again = before.get("job") == job
    fruitless = before["fruitless"] + 1 if again and gained <= before["tasks"] else 0
    if fruitless > restarts:
        return EXIT_FRUITLESS, f"{fruitless} restarts in a row ended before another task was done"
    leases.folder.mkdir(parents=True, exist_ok=True)
    temporary = leases.folder / f".{uuid.uuid4().hex}.tmp"
    temporary.write_text(json.dumps({"job": job, "tasks": gained, "fruitless": fruitless}))
    os.replace(temporary, leases.folder / RESTARTS)
    return 0, ""


def _restarts(leases: Leases) -> Mapping[str, Any]:
    """The record of the last begin; an empty one where there is none, or it is damaged."""
    path = leases.folder / RESTARTS
    try:
        found = read_json(path)
        with parsing(path):
            counts = {name: int(found[name]) for name in ("tasks", "fruitless")}
            return {"job": found["job"], **counts}
    except UnreadableFile:
        return {"job": None, "tasks": 0, "fruitless": 0}


def _num_answered(suites: Path) -> int:
    """Tasks that earlier starts have answered (canon_pretrain/run/results.py), of suites `a,b`."""
    patterns = ("*/unfinished/*.task.json", "*/samples-*.jsonl", "*/results.json")
    folders = [suites.parent / name for name in suites.name.split(",")]
    return sum(1 for folder in folders for pattern in patterns for _ in folder.glob(pattern))


def main(argv: list[str] | None = None) -> None:
    """`... begin CHECKPOINT SUITE --job ID [--lease ID] [--restarts K]`, for slurm/eval.sh."""
    parser = argparse.ArgumentParser(prog="python -m eval.schedule.leases")
    parser.add_argument("command", choices=("begin",))
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("suite")
    parser.add_argument("--job", required=True)
    parser.add_argument("--lease")
    parser.add_argument("--restarts", type=int, default=3)
    arguments = parser.parse_args(argv)
    # not resolved: RUN/checkpoint may be a link to a larger disk
    run, checkpoint = find_checkpoint(Path(os.path.abspath(arguments.checkpoint)))
    folder = run.path / EVALS / checkpoint.name / suite_name(arguments.suite) / LEASES
    code, why = begin(Leases(folder), arguments.job, arguments.lease, arguments.restarts)
    if code:
        print(why, file=sys.stderr)
        raise SystemExit(code)


if __name__ == "__main__":
    main()
