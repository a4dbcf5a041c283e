"""status.json: the state of a run and of its trainer, for display; nothing resumes from it."""

import contextlib
import os
import threading
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from canon_pretrain.core.errors import UserError
from canon_pretrain.core.files import Count, UnreadableFile, find_record, read_record, write_json
from canon_pretrain.core.holder import Holder, utc_now

States = Literal["running", "stopped", "done", "failed"]
Phases = Literal["starting", "loading", "training", "validating", "sampling", "saving", "ended"]

DEAD_AFTER_S = 60.0  # six heartbeats
HUNG_AFTER_S = 60.0
HUNG_AFTER_STEPS = 10  # of which `seconds_per_step` is the time
SLOW_AFTER_STEPS = 3
PHASE_TIMEOUT_S = 1800.0  # of a phase without steps: data, a checkpoint, compilation


Time = Annotated[str, Field(pattern=r"^\d{4}-[01]\d-[0-3]\dT[0-2]\d(:[0-5]\d){2}.*\+00:00$")]


@dataclass(frozen=True)
class Status:
    """The content of status.json; times are UTC, ISO 8601.

    The process writes the file (`written`) even if training hangs (`heartbeat`).
    """

    state: States
    step: Count
    steps: Count
    heartbeat: Time  # of the last step or change of phase
    written: Time
    reason: str = ""  # of the state; empty while running
    error_code: str = ""  # of a refusal, after which the same command would fail again
    phase: Phases = "starting"
    seconds_per_step: float | None = None
    world_size: Count = 1
    host: str = ""
    pid: int = 0
    job_id: str | None = None
    restart_count: Count = 0
    nodes: str | None = None
    launches: Count = 1  # including this one
    checkpoint_step: int | None = None  # the newest verified one
    checkpoint_saved: str | None = None
    checkpoint_failures: Count = 0  # in a row
    weights_only: list[int] = field(default_factory=list)  # steps kept for evaluations
    skipped_steps: Count = 0


class StatusWriter:
    """The status of a launch, in memory and on request on disk; thread-safe."""

    def __init__(
        self, path: Path, *, steps: int, world_size: int, environ: Mapping[str, str] = os.environ
    ) -> None:
        self.path = path
        self._memory = threading.Lock()  # held for microseconds only
        # one writer at a time, so that the newest status is written last
        self._disk = threading.Lock()

        # a damaged status must not prevent a launch
        previous = find_record(path, Status)
        launches = 1
        if previous is not None:
            launches += previous.launches
        process = Holder.of_this_process(environ)
        self.status = Status(
            state="running",
            step=0,
            steps=steps,
            heartbeat=process.taken,
            written=process.taken,
            world_size=world_size,
            host=process.host,
            pid=process.pid,
            job_id=process.job_id,
            restart_count=process.restart_count,
            nodes=environ.get("SLURM_JOB_NODELIST"),
            launches=launches,
        )

    def progress(self, **values: Any) -> None:
        """Record progress in memory; a field passed as None keeps its value."""
        changes = {name: value for name, value in values.items() if value is not None}
        self.set(heartbeat=utc_now(), **changes)

    def set(self, **values: Any) -> None:
        """Set fields of `Status` in memory."""
        with self._memory:
            self.status = replace(self.status, **values)

    def write(self) -> bool:
        """Write the file; return False on failure: a full disk must not end the run."""
        with self._disk:
            self.set(written=utc_now())
            with contextlib.suppress(OSError):
                write_json(self.path, asdict(self.status))
                return True
            return False

    def end(self, state: States, reason: str, step: int, error_code: str = "") -> bool:
        """Write the final state; `failed` is never replaced."""
        if self.status.state != "failed":
            self.set(
                state=state,
                step=step,
                phase="ended",
                heartbeat=utc_now(),
                reason=reason,
                error_code=error_code,
            )
        return self.write()


def read_status(path: Path) -> Status | None:
    """Return the content of status.json; None if missing. Raises UserError if damaged."""
    try:
        return read_record(path, Status)
    except UnreadableFile as error:
        if error.is_missing:
            return None
        raise UserError(
            "run.status_damaged",
            f"{error}; a running trainer rewrites it, else remove it",
            path=path,
        ) from None


def health(status: Status, now: datetime, *, dead_after_s: float = DEAD_AFTER_S) -> str:
    """Return "running", "slow", "hung" or "dead" for a running state, else the state.

    dead: not written for `dead_after_s`. slow, hung: written, but without progress of the trainer.
    """
    if status.state != "running":
        return status.state
    written = datetime.fromisoformat(status.written)
    unwritten_s = (now.astimezone(UTC) - written).total_seconds()
    if unwritten_s > dead_after_s:
        return "dead"

    # The process lives: has its trainer made progress? Steps tell best; other phases take long.
    heartbeat = datetime.fromisoformat(status.heartbeat)
    silent_s = (written - heartbeat).total_seconds()
    hung_after_s = PHASE_TIMEOUT_S
    slow_after_s = PHASE_TIMEOUT_S
    if status.phase == "training" and status.seconds_per_step is not None:
        hung_after_s = max(HUNG_AFTER_S, HUNG_AFTER_STEPS * status.seconds_per_step)
        slow_after_s = SLOW_AFTER_STEPS * status.seconds_per_step
    if silent_s > hung_after_s:
        return "hung"
    if silent_s > slow_after_s:
        return "slow"
    return "running"
