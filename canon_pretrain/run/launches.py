"""The launches of a run: their numbers, their records, and the options that only the first obeys.

    RUN/run.json       the run's id, and the number of its newest launch
    RUN/obeyed.json    option -> the job that obeyed it, and its count of restarts then

A launch takes its number under the run's lock, and returns it if it has trained nothing. A requeued
job repeats `--checkpoint.fresh` and `--checkpoint.load_step`: obeyed again, they would discard what
it has trained since. No torch here.
"""

import contextlib
import os
import uuid
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

from canon_pretrain.core.files import UnreadableFile, parsing, read_json, read_record, write_json
from canon_pretrain.core.holder import boot_of, read_count, utc_now
from canon_pretrain.run.folder import RunFolder
from canon_pretrain.run.log import RunFacts, read_tail

OWN_TO_A_LAUNCH = (
    *("job.config_file", "run.stop_at", "run.allow_changes", "run.code"),
    *("checkpoint.fresh", "checkpoint.load_step", "training.local_batch_size"),
)
"""Settings of one launch, or that follow from its world size: not reported when they differ."""
FRESH = "checkpoint.fresh"


def read_run(folder: RunFolder) -> RunFacts | None:
    """Return the content of run.json; None if it is missing or damaged."""
    with contextlib.suppress(UnreadableFile):
        return read_record(folder.run_file, RunFacts)
    return None


def begin_launch(folder: RunFolder) -> tuple[RunFacts, str | None]:
    """Count one more launch in run.json; return it, and why that could not be written."""
    before = known_run(folder) or RunFacts(uuid.uuid4().hex[:8], utc_now(), 0)
    facts = replace(before, launches=before.launches + 1)
    try:
        write_json(folder.run_file, asdict(facts))
    except OSError as error:
        return facts, f"{folder.run_file} cannot be written ({error.strerror})"
    return facts, None


def take_back(folder: RunFolder, facts: RunFacts) -> None:
    """Undo `begin_launch`, which returned `facts`, unless the log has a line of that launch."""
    number = facts.launches
    with contextlib.suppress(OSError, UnreadableFile):  # then a number is left out: no harm
        if _last_event(folder.log_file).get("segment") == number:
            return
        if number == 1:
            folder.run_file.unlink(missing_ok=True)
        else:
            write_json(folder.run_file, asdict(replace(facts, launches=number - 1)))


def known_run(folder: RunFolder) -> RunFacts | None:
    """Return run.json or, if lost, the same from launch records and log; None for a new run."""
    if (facts := read_run(folder)) is not None:
        return facts
    record, last = newest_launch(folder) or {}, _last_event(folder.log_file)
    if not record and not last:
        return None
    run_id = str(record.get("run_id") or last.get("run_id") or uuid.uuid4().hex[:8])
    number = max(int(record.get("launch", 0)), int(last.get("segment", 1)))
    return RunFacts(run_id, str(record.get("created", utc_now())), number)


def _last_event(log: Path) -> dict[str, Any]:
    """Return the log's last event; {} without one."""
    return ([{}] + (read_tail(log, until=None) if os.path.lexists(log) else []))[-1]


def launch_numbers(folder: RunFolder) -> list[int]:
    """Return the numbers of the launches that have a record, ascending."""
    return sorted(int(path.name) for path in folder.launches.glob("*") if path.name.isdecimal())


def newest_launch(folder: RunFolder) -> dict[str, Any] | None:
    """Return launch.json of the newest launch whose record can be read; None without one."""
    for number in reversed(launch_numbers(folder)):
        path = folder.launch_path(number) / "launch.json"
        with contextlib.suppress(UnreadableFile), parsing(path):
            record = read_json(path, finite=False)
            if int(record["launch"]) >= 0 and record["run_id"]:
                return record
    return None


# -- options that act once


class _Attempt(NamedTuple):
    """One start of a command: Slurm's job and its restarts, torchrun's run and its attempts."""

    job: str
    restart: int
    run: str
    attempt: int


def _attempt(environ: Mapping[str, str]) -> _Attempt:
    run = environ.get("TORCHELASTIC_RUN_ID", "")
    if run == "none":  # torchrun without --rdzv_id: its process names the command
        run = f"agent {os.getppid()} {boot_of(os.getppid())}"
    restart = read_count(environ, "SLURM_RESTART_COUNT")
    attempt = read_count(environ, "TORCHELASTIC_RESTART_COUNT")
    return _Attempt(environ.get("SLURM_JOB_ID", ""), restart, run, attempt)


def was_obeyed(path: Path, option: str, environ: Mapping[str, str] = os.environ) -> bool:
    """Whether this launch is a restart, by Slurm or torchrun, of one that obeyed `option`."""
    before, now = _read_obeyed(path).get(option), _attempt(environ)
    if before is None or now.job != before.job:
        return False
    is_requeued = bool(now.job) and now.restart > before.restart
    return is_requeued or (bool(now.run) and now.run == before.run and now.attempt > before.attempt)


def mark_obeyed(path: Path, option: str, environ: Mapping[str, str] = os.environ) -> None:
    obeyed = _read_obeyed(path) | {option: _attempt(environ)}
    write_json(path, {name: attempt._asdict() for name, attempt in obeyed.items()})


def _read_obeyed(path: Path) -> dict[str, _Attempt]:
    with contextlib.suppress(UnreadableFile):
        return read_record(path, dict[str, _Attempt])
    return {}
