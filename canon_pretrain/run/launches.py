"""RUN/run.json: the run's id and the number of its launches; and which launches have a record.

A launch takes its number under the run's lock, before it writes a line to the log, and gives it
back where it came to nothing. No torch here.
"""

import os
import uuid
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from canon_pretrain.core.files import UnreadableFile, parsing, read_json, read_lines, write_json
from canon_pretrain.core.holder import utc_now
from canon_pretrain.run.folder import RunFolder
from canon_pretrain.run.log import read_tail

OWN_TO_A_LAUNCH = (
    "job.config_file",
    "run.stop_at",
    "run.allow_changes",
    "run.code",
    "checkpoint.fresh",
    "checkpoint.load_step",
    "training.local_batch_size",
)
"""What belongs to one launch, or follows from its world size: no news when it differs."""


@dataclass(frozen=True)
class RunFacts:
    """The content of run.json."""

    run_id: str
    """8 hexadecimal digits, for as long as the run lives; a fresh start is a new run."""
    created: str
    """UTC, ISO 8601."""
    launches: int
    """Launches that began to train, or wrote to the log; the number of the newest one."""


def read_run(folder: RunFolder) -> RunFacts | None:
    """What stands in run.json; None where there is none, or it is damaged."""
    try:
        record = read_json(folder.run_file)
        with parsing(folder.run_file):
            return RunFacts(str(record["run_id"]), str(record["created"]), int(record["launches"]))
    except UnreadableFile:
        return None


def begin_launch(folder: RunFolder) -> tuple[RunFacts, str | None]:
    """Count one more launch in run.json, which is made if need be; and what went wrong with that.

    No number is given twice.
    """
    before = known_run(folder) or RunFacts(uuid.uuid4().hex[:8], utc_now(), 0)
    facts = RunFacts(before.run_id, before.created, before.launches + 1)
    try:
        write_json(folder.run_file, asdict(facts))
    except OSError as error:
        return facts, f"{folder.run_file} cannot be written ({error.strerror})"
    return facts, None


def take_back(folder: RunFolder, facts: RunFacts) -> None:
    """Undo `begin_launch`, which gave `facts`, unless the log has a line of that launch."""
    number = facts.launches
    try:
        if _last_event(folder.log_file).get("segment") == number:
            return
        if number == 1:
            folder.run_file.unlink(missing_ok=True)
        else:
            write_json(folder.run_file, asdict(replace(facts, launches=number - 1)))
    except (OSError, UnreadableFile):
        return  # then a number is left out: no harm


def known_run(folder: RunFolder) -> RunFacts | None:
    """run.json or, if it is lost, what the launches' records and the log say; None for a new run.

    A run that is older than its records has an id made up here.
    """
    if (facts := read_run(folder)) is not None:
        return facts
    newest, logged = newest_launch(folder), _launches_logged(folder.log_file)
    if newest is None and not logged:
        return None
    record = newest or _last_event(folder.log_file)
    run_id = str(record.get("run_id") or uuid.uuid4().hex[:8])
    number = max(int(record.get("launch", 0)), logged)
    return RunFacts(run_id, str(record.get("created", utc_now())), number)


def _launches_logged(log: Path) -> int:
    """Events that head a launch; the lines are not parsed, since an old log may be long."""
    heads = (b'{"event": "start"', b'{"event": "resume"')
    try:
        return sum(line.startswith(heads) for line in read_lines(log))
    except UnreadableFile:
        return 0


def _last_event(log: Path) -> dict[str, Any]:
    """The log's last line; {} without one."""
    try:
        events = read_tail(log, until=None)
    except UnreadableFile as error:
        if not error.is_missing:
            raise
        return {}
    return events[-1] if events else {}


def launch_numbers(folder: RunFolder) -> list[int]:
    """The numbers of the launches that have a record, ascending; none in an older run."""
    try:
        names = os.listdir(folder.launches)
    except OSError:
        return []
    return sorted(int(name) for name in names if name.isascii() and name.isdigit())


def newest_launch(folder: RunFolder) -> dict[str, Any] | None:
    """launch.json of the newest launch whose record can be read; None without one."""
    for number in reversed(launch_numbers(folder)):
        path = folder.launch_path(number) / "launch.json"
        try:
            record = read_json(path, finite=False)
            with parsing(path):
                if int(record["launch"]) >= 0 and record["run_id"]:
                    return record
        except UnreadableFile:
            continue
    return None
