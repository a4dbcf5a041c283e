"""A run's log as TensorBoard's event file; a target of export.py, which says when and why.

    DIR/tb/events.out.tfevents.TIME.RUN_ID.canon    one file, that replaces the run's others

Only TensorBoard's own format is used, not torch: a laptop can make it. Each scalar stands at its
step and at the time of the log's line, so the axes `step`, `relative` and `wall` are the run's own.
A whole copy has the same bytes every time.
"""

import os
import time
from pathlib import Path
from typing import Any, BinaryIO

from canon_pretrain.core.errors import UserError
from canon_pretrain.core.files import fsync_folder
from canon_pretrain.report.export_rows import About, Row

ENDING = ".canon"
"""Marks the files that a new copy of the run may remove; others in the folder are left alone."""


class TensorBoardTarget:
    """Rows go to an event file in `folder`; a `live` one can be read while it grows."""

    def __init__(self, folder: Path, facts: About, *, live: bool) -> None:
        try:
            from tensorboard.compat.proto import event_pb2  # type: ignore[import-untyped]
            from tensorboard.summary.writer.record_writer import (  # type: ignore[import-untyped]
                RecordWriter,
            )
        except ImportError:
            raise UserError("TensorBoard is not installed: pip install tensorboard") from None
        self._events, self._folder, self._live = event_pb2, folder, live
        self._began = facts.began
        self._step = -1
        folder.mkdir(parents=True, exist_ok=True)
        # TensorBoard reads files in the order of their names: a live one comes after the last
        began = time.time() if live else facts.began
        name = f"events.out.tfevents.{int(began):010d}.{facts.run_id}{ENDING}"
        ours = folder.glob(f"events.out.tfevents.*.{facts.run_id}{ENDING}")
        self._before = [each for each in ours if each.name != name]
        self._final = folder / name
        self._path = self._final if live else folder / f".{name}.tmp"
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
        """Void what is there of the steps after `step`, by the mark that TensorBoard knows."""
        log = {"status": self._events.SessionLog.START}
        self._write(wall_time=self._began, step=step + 1, session_log=log)

    def flush(self) -> None:
        self._writer.flush()
        self._remove_before()

    def finish(self) -> str:
        self._writer.flush()
        os.fsync(self._file.fileno())
        self._writer.close()
        os.replace(self._path, self._final)
        self._remove_before()
        fsync_folder(self._folder)
        return f"{self._final}; `tensorboard --logdir {self._folder}` shows it"

    def _remove_before(self) -> None:
        """Remove earlier copies, once this one has what they have."""
        while self._before:
            self._before.pop().unlink(missing_ok=True)

    def _write(self, **fields: Any) -> None:
        self._writer.write(self._events.Event(**fields).SerializeToString())
