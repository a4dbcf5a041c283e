"""Where `run export` copies a run to: TensorBoard's event file, or a run of wandb.

    DIR/tb/events.out.tfevents.TIME.RUN_ID.canon    one file, that replaces the run's others
    DIR/wandb/offline-run-TIME-ID                   for `wandb sync`: one folder per run, since
                                                    syncing a second one would replace the first's
    online                                          the run with the log's run_id

TensorBoard's own format is used, not torch: a laptop can make it, with the same bytes every time.
wandb gets no console output, source code or git data: they may hold anything.
"""

import os
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from canon_pretrain.core.errors import UserError
from canon_pretrain.core.files import fsync_folder
from canon_pretrain.run.launches import allowed_environment

MODES = ("online", "offline", "disabled")
ENDING = ".canon"
"""Marks the files that a new copy of the run may remove; others in the folder are kept."""
INIT_S = 60.0
WANDB_FINISH_S = 40.0
"""Less than a live copy has in all, so that wandb itself reports what it could not send."""


class Row(NamedTuple):
    """The numbers of one step, by name; `time` in seconds since 1970."""

    step: int
    tokens: int
    time: float
    values: Mapping[str, float]


class About(NamedTuple):
    """What a copy holds of the run beside its curves; `group` is equal for repeats of a recipe."""

    run_id: str
    name: str
    group: str
    tags: tuple[str, ...]
    config: Mapping[str, Any]
    began: float


class TensorBoardTarget:
    """Writes rows to an event file in `folder`; a `live` one can be read while it grows."""

    def __init__(self, folder: Path, facts: About, *, live: bool) -> None:
        try:
            from tensorboard.compat.proto import event_pb2  # type: ignore[import-untyped]
            from tensorboard.summary.writer.record_writer import (  # type: ignore[import-untyped]
                RecordWriter,
            )
        except ImportError:
            raise UserError("TensorBoard is not installed: pip install tensorboard") from None
        self._events, self._folder, self._began = event_pb2, folder, facts.began
        self._step = -1
        folder.mkdir(parents=True, exist_ok=True)
        # TensorBoard reads files in the order of their names: a live one comes after the last
        began = time.time() if live else facts.began
        self._final = folder / f"events.out.tfevents.{int(began):010d}.{facts.run_id}{ENDING}"
        ours = folder.glob(f"events.out.tfevents.*.{facts.run_id}{ENDING}")
        self._before = set(ours) - {self._final}
        self._path = self._final if live else folder / f".{self._final.name}.tmp"
        self._file: BinaryIO = open(self._path, "wb")  # noqa: SIM115 - as long as the target lives
        self._writer = RecordWriter(self._file)
        self._write(wall_time=facts.began, file_version="brain.Event:2")
        self.restart(-1)  # a TensorBoard that is open has the steps of the file before
        if live:
            self.flush()

    def write(self, row: Row) -> None:
        values = dict(row.values)
        if row.step != self._step:  # a live validation comes in a row of its own
            values["tokens"] = row.tokens
        self._step = row.step
        summary = {"value": [{"tag": k, "simple_value": v} for k, v in values.items()]}
        self._write(wall_time=row.time or self._began, step=row.step, summary=summary)

    def restart(self, step: int) -> None:
        """Void the steps after `step`, by the mark that TensorBoard knows."""
        log = {"status": self._events.SessionLog.START}
        self._write(wall_time=self._began, step=step + 1, session_log=log)

    def flush(self) -> None:
        """Make all rows readable, and remove earlier copies: this one has what they have."""
        self._writer.flush()
        while self._before:
            self._before.pop().unlink(missing_ok=True)

    def finish(self) -> str:
        """Complete the copy; return where it is, in words."""
        self._writer.flush()
        os.fsync(self._file.fileno())
        os.replace(self._path, self._final)
        self.flush()
        self._writer.close()
        fsync_folder(self._folder)
        return f"{self._final}; `tensorboard --logdir {self._folder}` shows it"

    def _write(self, **fields: Any) -> None:
        self._writer.write(self._events.Event(**fields).SerializeToString())


class WandbTarget:
    """Writes rows to a wandb run, over tokens. Raises UserError if wandb does not begin.

    Online, a copy of the whole replaces the run; a live one continues where wandb says it is.
    """

    def __init__(
        self,
        folder: Path,
        facts: About,
        *,
        live: bool,
        mode: Any,
        project: str,
        entity: str | None,
        name: str | None,
        tags: Sequence[str],
    ) -> None:
        if mode not in MODES:
            raise UserError(f"WANDB_MODE = {mode!r}: expected one of {', '.join(MODES)}")
        if mode != "online":
            os.environ["WANDB_ERROR_REPORTING"] = "false"  # else it tells its makers, offline too
        try:
            import wandb
        except ImportError:
            raise UserError("wandb is not installed: pip install wandb") from None
        # a live wandb sends this process's arguments and all SLURM_ variables: a job's comment may
        # hold anything
        del sys.argv[1:]
        slurm = {name for name in os.environ if name.startswith("SLURM")}
        for variable in slurm - set(allowed_environment(os.environ)):
            del os.environ[variable]
        self._facts, self._mode, self._folder = facts, mode, folder / "wandb"
        self._before = self._offline_folders()
        folder.mkdir(parents=True, exist_ok=True)
        settings: dict[str, Any] = {
            **{"console": "off", "disable_code": True, "disable_git": True, "save_code": False},
            **{"symlink": False, "silent": live or mode != "online", "init_timeout": INIT_S},
            # a copy that is made later would show the machine that makes it
            **{"x_disable_stats": not live, "x_disable_meta": not live},
            "finish_timeout": WANDB_FINISH_S if live else 0.0,
        }
        try:
            self._run = wandb.init(
                mode=mode,
                dir=folder,
                id=facts.run_id,
                project=project,
                entity=entity or None,
                name=name or facts.name,
                group=facts.group,
                # a whole copy replaces what is there; offline, wandb cannot look
                resume="allow" if mode == "online" and live else None,
                tags=[tag[:64] for tag in dict.fromkeys((*facts.tags, *tags))],
                config=dict(facts.config),
                settings=wandb.Settings(**settings),
            )
        except (wandb.Error, ValueError, OSError) as error:  # ValueError: its variables
            raise UserError(f"wandb does not begin: {error}") from None
        self._run.define_metric("tokens")
        self._run.define_metric("*", step_metric="tokens")
        self._next = self._run.starting_step

    def write(self, row: Row) -> None:
        """Log a row; one of a step that wandb has passed is left out, since it takes none back."""
        if row.step < self._next:
            return
        self._next = row.step
        values = {"step": row.step, "tokens": row.tokens, "time": row.time, **row.values}
        self._run.log(values, step=row.step)

    def restart(self, step: int) -> None:
        """Do nothing: wandb keeps the first of repeated steps; a whole copy puts that right."""

    def flush(self) -> None:
        while self._before:
            shutil.rmtree(self._before.pop(), ignore_errors=True)

    def finish(self) -> str:
        self._run.finish()
        self.flush()
        if self._mode == "disabled":
            return "wandb is disabled, nothing was written"
        if self._mode == "online":
            return f"{self._run.url or 'wandb'}"
        # the time of the run, not of this copy: every copy has the same name
        began = datetime.fromtimestamp(self._facts.began, UTC)
        final = self._folder / f"offline-run-{began:%Y%m%d_%H%M%S}-{self._facts.run_id}"
        (made,) = self._offline_folders()
        made.rename(final)
        return f"{final}; `wandb sync {final}` uploads it"

    def _offline_folders(self) -> list[Path]:
        return sorted(self._folder.glob(f"offline-run-*-{self._facts.run_id}"))
