"""How one run stands, at a glance: what `status` shows of it, from the small files of its folder.

Reads status.json, config.json, run.json, the lock, the end of the log, manifests and the names in
evals/; writes nothing, and reads no file whose size grows with the run. A file that is missing or
damaged leaves its facts out and is named in `problems`. No torch.
"""

import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from canon_pretrain.core.errors import UserError
from canon_pretrain.core.files import UnreadableFile, parsing, read_json
from canon_pretrain.core.holder import Holder, process_lives
from canon_pretrain.core.link_lock import EXPIRY_BEATS, HEARTBEAT_S, read_holder
from canon_pretrain.run.folder import CHECKPOINTS, RunFolder
from canon_pretrain.run.launches import read_run
from canon_pretrain.run.log import json_value, number, read_tail
from canon_pretrain.run.status import Status, health, read_status

CHECKED = "its manifest, and that each file it names is there with its size; no hash is read"
ALIVE = ("starting", "loading", "training", "validating", "saving", "slow", "hung")
"""States of a run whose process lives."""
_STEP = re.compile(r"step-(0|[1-9][0-9]*)")


@dataclass(frozen=True)
class Saved:
    """The newest checkpoint that a launch can go on from, as far as CHECKED proves it."""

    step: int
    saved: str
    """UTC, ISO 8601."""
    age_s: float
    checked: str = CHECKED


@dataclass(frozen=True)
class Evaluations:
    """What lies in RUN/evals: results, and holds of steps that an evaluation still waits for."""

    done: int = 0
    done_steps: list[int] = field(default_factory=list)
    pending: int = 0
    pending_steps: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Glance:
    """The facts; their names are the keys of `status --json`. None: not known."""

    path: str
    name: str
    state: str = "unknown"
    """starting, loading, training, validating, saving; slow, hung (the process lives, its steps
    come late or not at all); dead (no sign of life); stopped, done, failed; unknown."""
    reason: str | None = None
    """Why it is in that state, where there is something to say."""
    run_id: str | None = None
    step: int | None = None
    steps: int | None = None
    """training.steps."""
    loss: float | str | None = None
    """Of the newest step in the log; "NaN", "Infinity" or "-Infinity" where it is no number."""
    tokens: int | None = None
    tokens_per_second: float | None = None
    mfu: float | None = None
    eta_s: float | None = None
    """Until `steps`, at the present pace; None for a run that does not go on."""
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


def look_at_run(path: Path, name: str, now: datetime) -> Glance:
    """The run's facts at `now`; never raises."""
    look = _Look(RunFolder(path), now)
    facts: dict[str, Any] = {}
    try:
        facts = look.facts()
    except Exception as error:  # one run that nobody thought of must not hide the others
        look.problems.append(f"{type(error).__name__}: {error}")
    return Glance(path=str(path), name=name, problems=look.problems, **facts)


class _Look:
    """One look at one run; `problems` gathers what could not be read."""

    def __init__(self, run: RunFolder, now: datetime) -> None:
        self.run, self.now = run, now.astimezone(UTC)
        self.problems: list[str] = []

    def facts(self) -> dict[str, Any]:
        config, status, holder = self._config(), self._status(), self._holder()
        last = self._last_step()
        facts = self._state(config, status, holder) | self._course(config, status, last)
        if facts["state"] in ALIVE and facts["step"] is not None:
            facts["eta_s"] = _eta(facts["step"], facts["steps"], status, last)
        if holder is not None:
            facts["holder"] = str(holder)
        facts["checkpoint"] = self._newest_checkpoint(config)
        facts["evaluations"] = self._evaluations()
        return facts

    # -- what the files say ------------------------------------------------------------------

    def _config(self) -> dict[str, Any]:
        """The job; {} where config.json does not tell."""
        try:
            config = self.run.read_config().get("config", {})
            return config if isinstance(config, dict) else {}
        except UserError as error:
            # a launch writes it when it begins to train
            if self.run.config_file.exists():
                self.problems.append(_said("config.json", error))
            return {}

    def _status(self) -> Status | None:
        try:
            status = read_status(self.run.status_file)
        except UserError as error:
            self.problems.append(_said("status.json", error))
            return None
        if status is None:
            self.problems.append("no status.json")
        return status

    def _holder(self) -> Holder | None:
        try:
            return read_holder(self.run.lock_file)
        except OSError as error:
            self.problems.append(_said("lock.json", error))
            return None

    def _last_step(self) -> dict[str, Any]:
        """The newest `step` event that stands; {} without one."""
        try:
            events = read_tail(self.run.log_file)
        except UnreadableFile as error:
            if not error.is_missing:
                self.problems.append(_said("log.jsonl", error))
            return {}
        steps = [event for event in events if event["event"] == "step"]
        return steps[-1] if steps else {}

    # -- what follows from it ----------------------------------------------------------------

    def _state(
        self, config: Mapping[str, Any], status: Status | None, holder: Holder | None
    ) -> dict[str, Any]:
        if status is None:
            return self._state_without_status(holder)
        heartbeat_s = _number(_inner(config, "run", "heartbeat_s")) or HEARTBEAT_S
        state = health(status, self.now, dead_after_s=EXPIRY_BEATS * heartbeat_s)
        reason = status.reason or None
        written_age_s = self._age_s(status.written)
        gone = (
            holder is not None
            and (holder.pid, holder.host) == (status.pid, status.host)
            and process_lives(holder) is False
        )
        if status.state == "running" and (gone or state == "dead"):
            state, reason = "dead", f"no sign of life for {span(written_age_s)}"
            reason = "its process is gone" if gone else reason
            if self.run.done_file.exists():  # each launch that trains removes it first
                state, reason = "done", f"a launch since then died: {reason}"
        elif state == "running":
            state = status.phase
        elif state == "failed" and self.run.done_file.exists():
            state, reason = "done", f"a launch since then failed: {reason}"
        elif state == "done":
            reason = None
        elif state in ("slow", "hung"):
            reason = f"no progress for {span(self._age_s(status.heartbeat))} ({status.phase})"
        return {
            "state": state,
            "reason": reason,
            "heartbeat_age_s": self._age_s(status.heartbeat),
            "written_age_s": written_age_s,
            "checkpoint_failures": status.checkpoint_failures,
            "world_size": status.world_size,
            "host": status.host,
            "job_id": status.job_id,
            "restart_count": status.restart_count,
            "nodes": status.nodes,
        }

    def _state_without_status(self, holder: Holder | None) -> dict[str, Any]:
        if holder is not None and process_lives(holder):
            return {"state": "starting", "host": holder.host, "job_id": holder.job_id}
        return {"state": "done" if self.run.done_file.exists() else "unknown"}

    def _course(
        self, config: Mapping[str, Any], status: Status | None, last: Mapping[str, Any]
    ) -> dict[str, Any]:
        """How far it is and how it goes."""
        # status.json is a heartbeat old, and a launch that loads stands at 0 in it
        stands = [status.step if status else None, last.get("step")]
        known = [step for step in stands if step is not None]
        run = read_run(self.run)
        if run is None and self.run.run_file.exists():
            self.problems.append("run.json is damaged")
        launches = run.launches if run else status.launches if status else None
        skipped = [status.skipped_steps if status else None, last.get("skipped_steps")]
        return {
            "run_id": run.run_id if run else None,
            "step": max(known, default=None),
            "steps": status.steps if status else _inner(config, "training", "steps"),
            "loss": _logged(last.get("loss")),
            "tokens": last["tokens"] if isinstance(last.get("tokens"), int) else None,
            "tokens_per_second": _number(last.get("tokens_per_second")),
            "mfu": _number(last.get("mfu")),
            "restarts": None if launches is None else max(launches - 1, 0),
            "skipped_steps": max((n for n in skipped if isinstance(n, int)), default=None),
        }

    def _newest_checkpoint(self, config: Mapping[str, Any]) -> Saved | None:
        """The newest step-N that is whole by CHECKED; newer ones that are not are problems."""
        name = _inner(config, "checkpoint", "folder") or CHECKPOINTS
        folder = self.run.path / str(name)
        found = (_STEP.fullmatch(entry) for entry in _names(folder))
        for step in sorted((int(match[1]) for match in found if match), reverse=True):
            path = folder / f"step-{step}"
            try:
                manifest = read_json(path / "manifest.json")
                with parsing(path / "manifest.json"):
                    fault = _fault(path, manifest)
                    if manifest["kind"] == "full" and not fault:
                        return Saved(step, manifest["saved"], self._age_s(manifest["saved"]))
            except (UnreadableFile, OSError) as error:
                if not path.exists():  # retention was faster than this look
                    continue
                fault = _said("manifest.json", error)
            if fault:
                self.problems.append(f"{path.name}: {fault}")
        return None

    def _evaluations(self) -> Evaluations:
        evals = self.run.path / "evals"
        steps: dict[int, int] = {}
        for name in _names(evals):
            if match := _STEP.fullmatch(name):
                results = evals.glob(f"{name}/*/*/results.json")
                steps[int(match[1])] = sum(1 for _ in results)
        holds = [name.partition(".") for name in _names(evals / "holds")]
        waiting = [
            int(match[1]) for stem, dot, _ in holds if dot and (match := _STEP.fullmatch(stem))
        ]
        done_steps = sorted(step for step, count in steps.items() if count)
        return Evaluations(
            sum(steps.values()), done_steps, len(waiting), sorted(dict.fromkeys(waiting))
        )

    def _age_s(self, time: str) -> float:
        """Seconds since `time`; 0 where our clock is behind."""
        return max(0.0, (self.now - datetime.fromisoformat(time)).total_seconds())


def _fault(path: Path, manifest: Mapping[str, Any]) -> str | None:
    """How the files of a checkpoint differ from its manifest, by presence and size."""
    if f"step-{manifest['step']}" != path.name:
        return f"its manifest is of step {manifest['step']}"
    for name, entry in manifest["files"].items():
        try:
            size = os.stat(path / name).st_size
        except FileNotFoundError:
            if not path.exists():
                return None
            return f"{name} is missing"
        if size != entry["bytes"]:
            return f"{name} has {size:,} bytes, expected {entry['bytes']:,}"
    return None


def _eta(
    step: int, steps: int | None, status: Status | None, last: Mapping[str, Any]
) -> float | None:
    pace = status.seconds_per_step if status else None
    pace = pace if pace is not None else _number(last.get("seconds_per_step"))
    return None if pace is None or steps is None else max(steps - step, 0) * pace


def _names(folder: Path) -> list[str]:
    """Names in a folder that need not be there."""
    try:
        return os.listdir(folder)
    except (FileNotFoundError, NotADirectoryError):
        return []


def _inner(config: Mapping[str, Any], section: str, key: str) -> Any:
    keys = config.get(section)
    return keys.get(key) if isinstance(keys, Mapping) else None


def _logged(value: Any) -> float | str | None:
    """A number of the log, with the strings that stand for NaN and infinities; else None."""
    try:
        return json_value(number(value))
    except ValueError:
        return None


def _number(value: Any) -> float | None:
    """A finite number, or None."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and abs(value) <= sys.float_info.max else None


def _said(name: str, error: Exception) -> str:
    """What is wrong with the file `name`, without its whole path."""
    text = str(getattr(error, "strerror", None) or error).strip()
    _, found, rest = text.partition(f"{name} ")
    return f"{name} {rest}" if found else f"{name}: {text}"


def span(seconds: float) -> str:
    """How long, short: 12 s, 12 min, 5.2 h, 3.1 d."""
    for unit, scale, limit in (("s", 1, 100), ("min", 60, 100)):
        if seconds < limit * scale:
            return f"{seconds / scale:.0f} {unit}"
    hours = seconds / 3600
    return f"{hours:.1f} h" if hours < 48 else f"{hours / 24:.1f} d"
