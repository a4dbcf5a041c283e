"""The state of one run, from its small files and the end of its log, whatever the size of the run.

Nothing is written. A damaged file leaves its facts out and is named in `problems`. No torch.
"""

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from canon_pretrain.checkpoint.folder import HOLDS, CheckpointFolder, entries, step_number
from canon_pretrain.checkpoint.manifest import verify
from canon_pretrain.core.errors import UserError
from canon_pretrain.core.files import UnreadableFile
from canon_pretrain.core.holder import Holder, process_lives
from canon_pretrain.core.link_lock import EXPIRY_BEATS, HEARTBEAT_S, read_holder
from canon_pretrain.core.text import duration
from canon_pretrain.report.record import RunRecord
from canon_pretrain.run.folder import CHECKPOINTS, EVALS
from canon_pretrain.run.launches import read_run
from canon_pretrain.run.log import read_tail
from canon_pretrain.run.results import RESULTS
from canon_pretrain.run.status import Status, health

CHECKED = "its manifest, and that each file it names is there with its size; no hash is read"
ALIVE = ("starting", "loading", "training", "validating", "saving", "slow", "hung")
"""States of a run whose process lives."""


@dataclass(frozen=True)
class Saved:
    """The newest checkpoint that a launch can resume, as far as CHECKED proves it."""

    step: int
    saved: str
    """UTC, ISO 8601."""
    age_s: float
    checked: str = CHECKED


@dataclass(frozen=True)
class Evaluations:
    """The results in RUN/evals, and the holds of steps that an evaluation still waits for."""

    done: int = 0
    done_steps: list[int] = field(default_factory=list)
    pending: int = 0
    pending_steps: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class RunSummary:
    """The facts; their names are the keys of `status --json`. None: not known."""

    path: str
    name: str
    state: str = "unknown"
    """starting, loading, training, validating, saving; slow, hung (the process lives, its steps
    come late or not at all); dead (no sign of life); stopped, done, failed; unknown."""
    reason: str | None = None
    run_id: str | None = None
    step: int | None = None
    steps: int | None = None
    """training.steps."""
    loss: float | str | None = None
    """Of the newest step in the log, as the next; "NaN", "Infinity" or "-Infinity" if such."""
    tokens: int | None = None
    tokens_per_second: float | str | None = None
    mfu: float | str | None = None
    eta_s: float | None = None
    """Until `steps`, at the present pace; None for a run that does not continue."""
    restarts: int | None = None
    """Launches after the first."""
    skipped_steps: int | None = None
    checkpoint: Saved | None = None
    checkpoint_failures: int | None = None
    """Failed saves in a row."""
    heartbeat_age_s: float | None = None
    """Since the trainer's last progress."""
    written_age_s: float | None = None
    """Since the process's last sign of life."""
    holder: str | None = None
    """Who holds the lock, alive or not."""
    evaluations: Evaluations = Evaluations()
    world_size: int | None = None
    host: str | None = None
    job_id: str | None = None
    restart_count: int | None = None
    """Slurm's, of that job."""
    nodes: str | None = None
    problems: list[str] = field(default_factory=list)


def summarize_run(path: Path, name: str, now: datetime) -> RunSummary:
    """Return the facts of a run at `now`; never raises."""
    problems: list[str] = []
    facts: dict[str, Any] = {}
    try:
        facts = _Summary(RunRecord(path), now.astimezone(UTC), problems).facts()
    except Exception as error:  # an unforeseen fault in one run must not hide the others
        problems.append(f"{type(error).__name__}: {error}")
    return RunSummary(path=str(path), name=name, problems=problems, **facts)


class _Summary:
    """The facts of one run at one time; `problems` names what could not be read."""

    def __init__(self, run: RunRecord, now: datetime, problems: list[str]) -> None:
        self.run, self.folder, self.now, self.problems = run, run.folder, now, problems
        config = self._tried(lambda: run.config) if self.folder.config_file.exists() else None
        self.config: dict[str, Any] = config or {}
        self.status: Status | None = self._tried(lambda: run.status)
        if not self.folder.status_file.exists():
            self.problems.append(f"no {self.folder.status_file.name}")
        self.holder: Holder | None = self._tried(lambda: read_holder(self.folder.lock_file))
        self.last = self._last_step()

    def _tried(self, read: Callable[[], Any]) -> Any:
        """Return what `read` finds; None, and a problem, if it fails."""
        try:
            return read()
        except (UserError, OSError) as error:
            self._note(error)
            return None

    def _note(self, error: Exception) -> None:
        self.problems.append(str(error).replace(f"{self.folder.path}{os.sep}", ""))

    def _last_step(self) -> dict[str, Any]:
        """Return the newest `step` event that counts; {} without one."""
        try:
            events = read_tail(self.folder.log_file)
        except UnreadableFile as error:
            if not error.is_missing:
                self._note(error)
            return {}
        return next((event for event in reversed(events) if event["event"] == "step"), {})

    def _setting(self, section: str, key: str) -> Any:
        keys = self.config.get(section)
        return keys.get(key) if isinstance(keys, dict) else None

    def _age_s(self, time: str) -> float:
        """Return the seconds since `time`; 0 if our clock is behind."""
        return max(0.0, (self.now - datetime.fromisoformat(time)).total_seconds())

    def facts(self) -> dict[str, Any]:
        status, last = self.status, self.last
        # status.json is a heartbeat old, and a launch that loads has step 0 in it
        known = [status.step if status else None, last.get("step")]
        step = max((n for n in known if n is not None), default=None)
        steps = status.steps if status else self._setting("training", "steps")
        counts = read_run(self.folder)
        if counts is None and self.folder.run_file.exists():
            self.problems.append(f"{self.folder.run_file.name} is damaged")
        launches = counts.launches if counts else status.launches if status else None
        skipped = [status.skipped_steps if status else None, last.get("skipped_steps")]
        state, reason = self._state()
        pace = status.seconds_per_step if status else None
        pace = pace if pace is not None else _finite(last.get("seconds_per_step"))
        eta_s = None
        if state in ALIVE and step is not None and steps is not None and pace is not None:
            eta_s = max(steps - step, 0) * pace
        facts = {
            "state": state,
            "reason": reason,
            "run_id": counts.run_id if counts else None,
            "step": step,
            "steps": steps,
            "loss": last.get("loss"),
            "tokens": last.get("tokens"),
            "tokens_per_second": last.get("tokens_per_second"),
            "mfu": last.get("mfu"),
            "eta_s": eta_s,
            "restarts": None if launches is None else max(launches - 1, 0),
            "skipped_steps": max((n for n in skipped if isinstance(n, int)), default=None),
            "checkpoint": self._newest_checkpoint(),
            "holder": str(self.holder) if self.holder else None,
            "evaluations": self._evaluations(),
        }
        if status is not None:
            names = ("checkpoint_failures", "world_size", "host", "job_id", "restart_count")
            facts |= {name: getattr(status, name) for name in (*names, "nodes")}
            facts["heartbeat_age_s"] = self._age_s(status.heartbeat)
            facts["written_age_s"] = self._age_s(status.written)
        elif state == "starting" and self.holder:
            facts |= {"host": self.holder.host, "job_id": self.holder.job_id}
        return facts

    def _state(self) -> tuple[str, str | None]:
        """Return the state and the reason for it."""
        status, holder, is_done = self.status, self.holder, self.run.is_done
        if status is None:
            lives = holder is not None and process_lives(holder)
            return "starting" if lives else "done" if is_done else "unknown", None
        heartbeat_s = _finite(self._setting("run", "heartbeat_s")) or HEARTBEAT_S
        state = health(status, self.now, dead_after_s=EXPIRY_BEATS * heartbeat_s)
        if status.state == "running":
            is_gone = (
                holder is not None
                and (holder.pid, holder.host) == (status.pid, status.host)
                and process_lives(holder) is False
            )
            if is_gone or state == "dead":
                silent = f"no sign of life for {duration(self._age_s(status.written))}"
                reason = "its process is gone" if is_gone else silent
                if is_done:  # each launch that trains removes DONE first
                    return "done", f"a launch since then died: {reason}"
                return "dead", reason
            if state == "running":
                return status.phase, status.reason or None
            silent = duration(self._age_s(status.heartbeat))
            return state, f"no progress for {silent} ({status.phase})"
        if state == "failed" and is_done:
            return "done", f"a launch since then failed: {status.reason}"
        return state, None if state == "done" else status.reason or None

    def _newest_checkpoint(self) -> Saved | None:
        """Return the newest step-N that is whole by CHECKED; newer damaged ones are problems."""
        name = self._setting("checkpoint", "folder") or CHECKPOINTS
        folder = CheckpointFolder(self.folder.path / str(name))
        for step in reversed(folder.steps()):
            path = folder.step_path(step)
            try:
                manifest = verify(path, hashes=False)
                if manifest.kind == "full":
                    return Saved(step, manifest.saved, self._age_s(manifest.saved))
            except (UserError, OSError, ValueError) as error:
                if path.exists():  # else retention has deleted it since
                    self._note(error)
        return None

    def _evaluations(self) -> Evaluations:
        evals = self.folder.path / EVALS
        found = ((step_number(path.name), path) for path in entries(evals))
        counts = {
            step: sum(1 for _ in path.glob(f"*/*/{RESULTS}"))
            for step, path in found
            if step is not None
        }
        holds = (path.name.partition(".") for path in entries(evals / HOLDS))
        steps = (step_number(stem) for stem, dot, _ in holds if dot)
        waiting = [step for step in steps if step is not None]
        done = sorted(step for step, count in counts.items() if count)
        return Evaluations(sum(counts.values()), done, len(waiting), sorted(set(waiting)))


def _finite(value: Any) -> float | None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and abs(value) <= sys.float_info.max else None
