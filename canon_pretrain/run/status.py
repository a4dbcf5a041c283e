"""status.json: where a run stands, and whether its trainer lives, hangs or is dead.

Global rank 0 keeps it while it holds the run's lock and writes it at every heartbeat; scripts,
`status` commands and people read it. It is a view: what the run is stands in config.json and
log.jsonl, and nothing goes on from it. No torch here.
"""

import os
import threading
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, get_args

from canon_pretrain.core.errors import UserError
from canon_pretrain.core.files import UnreadableFile, parsing, read_json, write_json
from canon_pretrain.core.holder import Holder, utc_now

States = Literal["running", "stopped", "done", "failed"]
Phases = Literal["starting", "loading", "training", "validating", "saving", "ended"]

DEAD_AFTER_S = 60.0
"""Six heartbeats: older than that, `written` says that the process is gone."""
HUNG_AFTER_S = 60.0
HUNG_AFTER_STEPS = 10
SLOW_AFTER_STEPS = 3
PATIENCE_S = 1800.0
"""What a phase without steps may take: data, a checkpoint or a first compilation."""


@dataclass(frozen=True)
class Status:
    """The content of status.json; times are UTC, ISO 8601.

    `written` and `heartbeat` are two things, since a trainer that waits for a collective for ever
    makes no progress while its process, and the thread that writes this file, live on.
    """

    state: States
    step: int
    steps: int
    """training.steps."""
    heartbeat: str
    """The trainer's last sign of progress: a step, or a change of phase."""
    written: str
    """When this was written: the process lived then."""
    reason: str = ""
    """Why it is in this state; empty while it runs."""
    phase: Phases = "starting"
    seconds_per_step: float | None = None
    """None before the launch's first step."""
    world_size: int = 1
    host: str = ""
    pid: int = 0
    job_id: str | None = None
    restart_count: int = 0
    nodes: str | None = None
    """Slurm's list of them."""
    launches: int = 1
    """How often the run was started, this time included."""
    checkpoint_step: int | None = None
    """The newest verified checkpoint; None until this launch has found or saved one."""
    checkpoint_saved: str | None = None
    checkpoint_failures: int = 0
    """Failed saves in a row."""
    weights_only: list[int] = field(default_factory=list)
    """Steps kept for evaluations, without optimizer state."""
    skipped_steps: int = 0


class StatusWriter:
    """Keeps a launch's status in memory and writes it when asked to; for several threads.

    Made under the run's lock: the file of the launch before is read, for the number of launches.
    """

    def __init__(
        self,
        path: Path,
        *,
        steps: int,
        world_size: int,
        environ: Mapping[str, str] = os.environ,
    ) -> None:
        self.path = path
        launch = Holder.of_this_process(environ)
        try:
            before = read_status(path)
        except UserError:
            before = None  # a damaged view must not keep a run from starting; the count begins anew
        self._status = Status(
            state="running",
            step=0,
            steps=steps,
            heartbeat=launch.taken,
            written=launch.taken,
            world_size=world_size,
            host=launch.host,
            pid=launch.pid,
            job_id=launch.job_id,
            restart_count=launch.restart_count,
            nodes=environ.get("SLURM_JOB_NODELIST"),
            launches=1 if before is None else before.launches + 1,
        )
        self._memory = threading.Lock()  # held for microseconds only
        self._disk = threading.Lock()  # one writer at a time: they share a temporary name

    @property
    def status(self) -> Status:
        """As it is now; `written` is the time of the last `write`."""
        return self._status

    def progress(
        self,
        *,
        step: int | None = None,
        phase: str | None = None,
        seconds_per_step: float | None = None,
    ) -> None:
        """Note a sign of life of the trainer, in memory alone; what is None stays as it was."""
        given = {"step": step, "phase": phase, "seconds_per_step": seconds_per_step}
        self.set(heartbeat=utc_now(), **{k: v for k, v in given.items() if v is not None})

    def set(self, **values: Any) -> None:
        """Set fields of `Status` by name, in memory alone."""
        with self._memory:
            if "phase" in values and values["phase"] not in get_args(Phases):
                raise ValueError(f"phase {values['phase']!r}, expected one of {get_args(Phases)}")
            self._status = replace(self._status, **values)

    def write(self) -> bool:
        """Write the file in one step; False where that failed, since a full disk ends no run."""
        with self._disk:
            self.set(written=utc_now())
            try:
                write_json(self.path, asdict(self._status))
            except OSError:
                return False
            return True

    def end(self, state: States, reason: str, step: int) -> bool:
        """Write the launch's last state at once; after `failed` no other state is taken."""
        with self._memory:
            if self._status.state != "failed":
                now = utc_now()
                self._status = replace(
                    self._status,
                    state=state,
                    reason=reason,
                    step=step,
                    phase="ended",
                    heartbeat=now,
                )
        return self.write()


def read_status(path: Path) -> Status | None:
    """What stands in status.json; None where there is none, UserError where it is damaged.

    Keys that this version does not know are left out, those that it misses have their defaults.
    """
    try:
        record = read_json(path)
        names = {each.name for each in fields(Status)}
        with parsing(path):
            status = Status(**{name: value for name, value in record.items() if name in names})
            _check(status)
    except UnreadableFile as error:
        if error.is_missing:
            return None
        raise UserError(
            f"{error}. Expected what the trainer writes; a running one replaces it within seconds, "
            "else remove it"
        ) from None
    return status


def _check(status: Status) -> None:
    """Raise ValueError or TypeError for a value that is not of its field's type."""
    for name, allowed in (("state", get_args(States)), ("phase", get_args(Phases))):
        if getattr(status, name) not in allowed:
            raise ValueError(f"{name} {getattr(status, name)!r}, expected one of {allowed}")
    for name in ("step", "steps", "launches", "skipped_steps", "checkpoint_failures"):
        if not isinstance(getattr(status, name), int):
            raise ValueError(f"{name} {getattr(status, name)!r}, expected an integer")
    for name in ("reason", "host"):
        if not isinstance(getattr(status, name), str):
            raise ValueError(f"{name} {getattr(status, name)!r}, expected a string")
    if not isinstance(status.seconds_per_step, int | float | None):
        raise ValueError(f"seconds_per_step {status.seconds_per_step!r}, expected a number")
    for time in (status.heartbeat, status.written):
        if datetime.fromisoformat(time).tzinfo is None:
            raise ValueError(f"the time {time!r} has no time zone")


def health(status: Status, now: datetime, *, dead_after_s: float = DEAD_AFTER_S) -> str:
    """Whether the run goes on: "running", "slow", "hung" or "dead", or its end state.

    Dead: not written for `dead_after_s`. Hung, then slow: at the time of writing the trainer had
    made no progress for so long, both times by its own clock; `now` is the reader's and only tells
    dead, so a clock that is wrong by less than `dead_after_s` does no harm.
    """
    if status.state != "running":
        return status.state
    written = datetime.fromisoformat(status.written)
    if (now.astimezone(UTC) - written).total_seconds() > dead_after_s:
        return "dead"
    silent_s = (written - datetime.fromisoformat(status.heartbeat)).total_seconds()
    step_s = status.seconds_per_step
    if status.phase != "training" or step_s is None:
        return "hung" if silent_s > PATIENCE_S else "running"
    if silent_s > max(HUNG_AFTER_S, HUNG_AFTER_STEPS * step_s):
        return "hung"
    return "slow" if silent_s > SLOW_AFTER_STEPS * step_s else "running"
