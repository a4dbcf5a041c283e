"""`canon run export wandb|trackio|tensorboard RUN`: copies of RUN/log.jsonl.

    DIR/tb/events.out.tfevents.TIME.RUN_ID.canon    one file, which replaces earlier ones
    DIR/wandb/offline-run-TIME-ID                   for `wandb sync`; one folder per run, since
                                                    syncing a second one would replace the first
    online                                          the run with the log's run_id
    $TRACKIO_DIR, or DIR/trackio                    trackio's database of the project, in which the
                                                    run with the log's run_id is replaced

A copy starts from the whole log, without superseded steps; with `--follow` it continues as the log
grows (run/background.py). No torch.
"""

import argparse
import hashlib
import json
import math
import os
import re
import select
import shutil
import signal
import sqlite3
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from html import escape
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from canon_pretrain.core.errors import UserError
from canon_pretrain.core.files import fsync_folder
from canon_pretrain.core.lock import live_holder
from canon_pretrain.report.record import RunRecord, unix_time
from canon_pretrain.run.launches import allowed_environment
from canon_pretrain.run.log import SEGMENT_EVENTS, Event, LogFollower, drop_superseded

POLL_S = 1.0
FINISH_S = 60.0  # a live copy is killed this long after its trainer has ended
WANDB_INIT_S = 60.0
WANDB_FINISH_S = 40.0  # below FINISH_S, so that wandb can report unsent data
MODES = ("online", "offline")
SUFFIX = ".canon"  # of our files, which a new copy may remove

# Fields of `step` events by the group that both tools show them in.
GROUPS = {
    "train": (
        "loss",
        "max_loss",
        "grad_norm",
        "lr",
        "skipped_steps",
        "restarts",
    ),
    "speed": (
        "tokens_per_second",
        "tokens_per_second_per_device",
        "seconds_per_step",
        "mfu",
        "data_wait",
        "memory_gib",
        "checkpoint_seconds",
        "checkpoint_stall_seconds",
    ),
}


class Row(NamedTuple):
    """The numbers of one step, by name, and its samples; `time` in seconds since 1970."""

    step: int
    tokens: int
    time: float
    values: Mapping[str, float]
    samples: Sequence[tuple[str, str]] = ()  # prompts and texts


class RunMetadata(NamedTuple):
    """What identifies a run in the copy; `group` is equal for runs that differ in seeds only."""

    run_id: str
    name: str
    group: str
    tags: tuple[str, ...]
    config: Mapping[str, Any]
    began: float


def row_from_event(event: Event) -> Row | None:
    """Return the row of a step, validation or samples, NaN included; None for other events."""
    values: dict[str, Any] = {}
    samples: list[tuple[str, str]] = []
    if event.kind == "step":
        values = _step_values(event)
    elif event.kind == "validation":
        values = _validation_values(event)
    elif event.kind == "samples":
        recorded = event.get("samples") or ()
        samples = [(sample["prompt"], sample["text"]) for sample in recorded]
    else:
        return None
    return Row(
        step=event.step,
        tokens=event.tokens,
        time=_time(event),
        values={name: value for name, value in values.items() if value is not None},
        samples=samples,
    )


def _step_values(event: Event) -> dict[str, Any]:
    """Return the fields of GROUPS, and the tokens of each source of a mixture."""
    values = {}
    for group, names in GROUPS.items():
        for name in names:
            values[f"{group}/{name}"] = event.get(name)

    sources = event.get("source_tokens") or {}
    if len(sources) > 1:
        for source, tokens in sources.items():
            values[f"data/tokens/{chart_name(source)}"] = tokens
    return values


def _validation_values(event: Event) -> dict[str, Any]:
    """Return the losses on all held-out text and on each source of a mixture, and task scores."""
    losses: dict[str, Mapping[str, Any]] = {"validation": event}
    sources = event.get("sources") or {}
    if len(sources) > 1:
        for source, loss in sources.items():
            losses[f"validation/{chart_name(source)}"] = loss

    values = {}
    for heading, loss in losses.items():
        for name in ("loss", "bits_per_byte"):
            values[f"{heading}/{name}"] = loss.get(name)
    scores = event.get("scores") or {}
    for name, score in scores.items():
        values[f"scores/{chart_name(name)}"] = score
    return values


def _evaluations(run: RunRecord, last_time: float) -> Iterable[Row]:
    """Yield scores as eval/SUITE/TASK/METRIC, of a trial as eval/SUITE-firstN/TASK/METRIC."""
    batch_size = run.identity.get("training.global_batch_size") or 0  # unknown
    seq_len = run.identity.get("training.seq_len") or 0
    for (suite, step), results in run.latest.items():
        heading = suite
        if results.limit is not None:
            heading = f"{suite}-first{results.limit}"

        values = {}
        for task, metrics in results.scores.items():
            for metric, score in metrics.items():
                if score.value is not None:
                    names = map(chart_name, (heading, task, metric))
                    values["/".join(("eval", *names))] = score.value
        tokens = step * batch_size * seq_len
        yield Row(step, tokens, last_time, values)


def merge_rows(rows: Iterable[Row]) -> list[Row]:
    """Return one row per step, in order, joined by its validation, samples and evaluations."""
    by_step: dict[int, Row] = {}
    for row in rows:
        merged = by_step.get(row.step, row)
        by_step[row.step] = merged._replace(
            tokens=merged.tokens or row.tokens,
            values={**merged.values, **row.values},
            samples=merged.samples or row.samples,
        )
    return [by_step[step] for step in sorted(by_step)]


def _rows(events: Iterable[Event]) -> list[Row]:
    return merge_rows(filter(None, map(row_from_event, events)))


def _time(event: Event) -> float:
    """Return when an event was logged, in seconds since 1970; 0 if unknown."""
    time_s = unix_time(event.get("time"))
    return time_s if math.isfinite(time_s) else 0.0


def chart_name(name: str) -> str:
    """Replace the characters that a chart's name may not have by `_`."""
    return re.sub(r"[^A-Za-z0-9._-]", "_", name)


def run_metadata(run: RunRecord, events: list[Event]) -> RunMetadata:
    """Return the metadata of a run from config.json and its log."""
    # A log without a run id, of an old version, is identified by its first event.
    run_id = None
    launches = []
    for event in events:
        run_id = event.get("run_id", run_id)
        if event.kind in SEGMENT_EVENTS:
            launches.append(event)
    if not run_id:
        run_id = _digest(json.dumps(events[:1], sort_keys=True))
    newest_launch = {**launches[-1]} if launches else {}
    newest_launch.pop("event", None)

    # The architecture, as tags: flavor, mixer (or the positions of attention) and Canon layers. Of
    # layers that differ, the names of their kinds.
    mixer = run.identity.get("model.mixer")
    if mixer in (None, "attention"):
        mixer = run.identity.get("model.position")
    pattern = run.identity.get("model.pattern")
    mixers = [str(name).rpartition("/")[2] for name in pattern] if pattern else [mixer]
    canon_set = run.identity.get("model.canon_set")
    canon = f"canon{canon_set}" if canon_set else "no-canon"
    tags = tuple(filter(None, dict.fromkeys((run.flavor, *mixers, canon))))

    # A folder named "run" is distinguished by its parent.
    path = run.folder.path.resolve()
    name = path.name
    if name in ("run", "runs"):
        name = f"{path.parent.name}/{name}"

    return RunMetadata(
        run_id=str(run_id),
        name=name,
        group="-".join((*tags, _digest(run.recipe)[:6])),
        tags=tags,
        config={
            **run.config,
            "identity": run.identity,
            "launches": len(launches),
            "launch": newest_launch,
        },
        began=_time(events[0]) if events else 0.0,
    )


def _digest(text: str) -> str:
    sha256 = hashlib.sha256(text.encode())
    return sha256.hexdigest()[:8]


class TensorBoardTarget:
    """Writes rows to an event file in `folder`; a `live` file can be read while it grows."""

    def __init__(self, folder: Path, metadata: RunMetadata, *, live: bool) -> None:
        from tensorboard.compat.proto import event_pb2  # type: ignore[import-untyped]
        from tensorboard.summary.writer import record_writer  # type: ignore[import-untyped]

        self._events = event_pb2
        self._folder = folder
        self._began = metadata.began
        self._step = -1

        # TensorBoard reads files by name: a live one must come after earlier ones.
        began = int(time.time() if live else metadata.began)
        ending = f"{metadata.run_id}{SUFFIX}"
        self._final = folder / f"events.out.tfevents.{began:010d}.{ending}"
        copies = folder.glob(f"events.out.tfevents.*.{ending}")
        self._earlier = set(copies) - {self._final}
        self._path = self._final
        if not live:
            self._path = folder / f".{self._final.name}.tmp"

        folder.mkdir(parents=True, exist_ok=True)
        self._file: BinaryIO = open(self._path, "wb")  # noqa: SIM115 - as long as the target lives
        self._writer = record_writer.RecordWriter(self._file)
        self._write(wall_time=metadata.began, file_version="brain.Event:2")
        self.restart(-1)  # an open TensorBoard still has the steps of the earlier file
        if live:
            self.flush()

    def write(self, row: Row) -> None:
        """Write the numbers as scalars, the samples as texts."""
        values = dict(row.values)
        if row.step != self._step:  # else a row of this step has written its tokens
            values["tokens"] = row.tokens
        self._step = row.step

        summaries: list[dict[str, Any]] = []
        for name, value in values.items():
            summaries.append({"tag": name, "simple_value": value})
        for k, (prompt, text) in enumerate(row.samples):
            sample = f"{prompt}|{text}"
            summaries.append(
                {
                    "tag": f"samples/{k}",
                    "tensor": {"dtype": "DT_STRING", "string_val": [sample.encode()]},
                    "metadata": {"plugin_data": {"plugin_name": "text"}},
                }
            )
        self._write(
            wall_time=row.time or self._began,
            step=row.step,
            summary={"value": summaries},
        )

    def restart(self, step: int) -> None:
        """Invalidate the steps after `step`, by a SessionLog event."""
        log = {"status": self._events.SessionLog.START}
        self._write(wall_time=self._began, step=step + 1, session_log=log)

    def flush(self) -> None:
        """Make all rows readable and remove earlier copies, which they supersede."""
        self._writer.flush()
        while self._earlier:
            self._earlier.pop().unlink(missing_ok=True)

    def finish(self) -> str:
        """Complete the copy; return a description of where it is."""
        self._writer.flush()
        os.fsync(self._file.fileno())
        os.replace(self._path, self._final)
        self.flush()
        self._writer.close()
        fsync_folder(self._folder)
        return f"{self._final}; `tensorboard --logdir {self._folder}` shows it"

    def _write(self, **fields: Any) -> None:
        event = self._events.Event(**fields)
        self._writer.write(event.SerializeToString())


class WandbTarget:
    """Writes rows to a wandb run, over tokens; `options` of wandb.init. Raises UserError."""

    def __init__(
        self,
        folder: Path,
        metadata: RunMetadata,
        *,
        live: bool,
        mode: Any,
        tags: list[str],
        **options: Any,
    ) -> None:
        if mode not in MODES:
            raise UserError(
                "export.wandb_mode",
                f"WANDB_MODE = {mode!r}: expected one of {', '.join(MODES)}",
                given=mode,
                expected=MODES,
            )
        if mode != "online":
            os.environ["WANDB_ERROR_REPORTING"] = "false"  # else it sends reports, even offline
        import wandb

        # A live wandb sends this process's arguments and all SLURM_ variables, which may be secret.
        del sys.argv[1:]
        slurm = {name for name in os.environ if name.startswith("SLURM")}
        for variable in slurm - set(allowed_environment(os.environ)):
            del os.environ[variable]

        self._metadata = metadata
        self._mode = mode
        self._folder = folder / "wandb"
        self._html = wandb.Html
        self._earlier = self._offline_folders()
        folder.mkdir(parents=True, exist_ok=True)
        try:
            settings = wandb.Settings(
                console="off",
                disable_code=True,
                disable_git=True,
                save_code=False,
                symlink=False,
                silent=live or mode != "online",
                # A later copy would show the machine that makes it.
                x_disable_stats=not live,
                x_disable_meta=not live,
                init_timeout=WANDB_INIT_S,
                finish_timeout=WANDB_FINISH_S if live else 0.0,
            )
            self._run = wandb.init(
                mode=mode,
                dir=folder,
                id=metadata.run_id,
                group=metadata.group,
                # A whole copy replaces the run; offline, wandb cannot check.
                resume="allow" if mode == "online" and live else None,
                tags=[tag[:64] for tag in dict.fromkeys((*metadata.tags, *tags))],
                config=dict(metadata.config),
                settings=settings,
                **options,
            )
        except (wandb.Error, ValueError, OSError) as error:  # ValueError: bad WANDB_ variables
            raise UserError("export.wandb", f"wandb.init failed: {error}") from None

        # Every chart is over tokens.
        self._run.define_metric("tokens")
        self._run.define_metric("*", step_metric="tokens")
        self._next = self._run.starting_step

    def write(self, row: Row) -> None:
        """Log a row, unless wandb is past its step: it cannot go back."""
        if row.step < self._next:
            return
        self._next = row.step

        values: dict[str, Any] = {
            "step": row.step,
            "tokens": row.tokens,
            "time": row.time,
            **row.values,
        }
        if row.samples:
            texts = []
            for prompt, text in row.samples:
                heading = f"<b>{escape(prompt)}</b>"
                texts.append(heading + escape(text))
            # Not a Table, which offline runs keep in the user's cache.
            samples = "\n\n".join(texts)
            values["samples"] = self._html(f"<pre>{samples}</pre>")
        self._run.log(values, step=row.step)

    def restart(self, step: int) -> None:
        """Do nothing: wandb keeps the first of repeated steps, until a whole copy is made."""

    def flush(self) -> None:
        """Remove earlier copies; wandb sends the rows by itself."""
        while self._earlier:
            shutil.rmtree(self._earlier.pop(), ignore_errors=True)

    def finish(self) -> str:
        """Complete the copy; return a description of where it is."""
        self._run.finish()
        self.flush()
        if self._mode == "online":
            return self._run.url or "wandb"

        # An offline folder is named by the time of the copy: name it by that of the run.
        began = datetime.fromtimestamp(self._metadata.began, UTC)
        name = f"offline-run-{began:%Y%m%d_%H%M%S}-{self._metadata.run_id}"
        final = self._folder / name
        (offline_folder,) = self._offline_folders()
        offline_folder.rename(final)
        return f"{final}; `wandb sync {final}` uploads it"

    def _offline_folders(self) -> list[Path]:
        return sorted(self._folder.glob(f"offline-run-*-{self._metadata.run_id}"))


class TrackioTarget:
    """Writes rows to a run of trackio's local database of a project. Raises UserError."""

    def __init__(
        self, folder: Path | None, metadata: RunMetadata, *, project: str, name: str
    ) -> None:
        # Local only: what a Space or a server has cannot be replaced.
        for variable in ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL"):
            os.environ.pop(variable, None)
        if folder is not None:  # which trackio reads when it is imported
            os.environ["TRACKIO_DIR"] = str(folder.resolve())
        try:
            import trackio
        except ImportError:
            raise UserError(
                "export.no_trackio",
                "trackio is not installed: pip install -e '.[trackio]'",
            ) from None

        self._project = project
        self._markdown = trackio.Markdown
        try:
            for copy in self._copies(trackio, metadata.run_id):
                copy.delete()
            self._run = trackio.init(
                project=project,
                name=name,
                group=metadata.group,
                config={"run_id": metadata.run_id, **metadata.config},
                embed=False,
                # the log has the load of the machine
                auto_log_gpu=False,
                auto_log_cpu=False,
            )
        except (ValueError, OSError, sqlite3.Error) as error:
            raise UserError("export.trackio", f"trackio.init failed: {error}") from None

    def _copies(self, trackio: Any, run_id: str) -> list[Any]:
        """Return earlier copies of the run with this id."""
        try:
            runs = trackio.Api().runs(self._project)
        except ValueError:  # the project does not exist yet
            return []
        return [run for run in runs if (run.config or {}).get("run_id") == run_id]

    def write(self, row: Row) -> None:
        """Log a row: its numbers, and its samples as Markdown."""
        values: dict[str, Any] = {"tokens": row.tokens, **row.values}
        if row.samples:
            texts = [f"**{escape(prompt)}**{escape(text)}" for prompt, text in row.samples]
            values["samples"] = self._markdown("\n\n".join(texts))
        self._run.log(values, step=row.step)

    def restart(self, step: int) -> None:
        """Do nothing: the steps that are repeated are shown twice until the next copy."""

    def flush(self) -> None:
        """Do nothing: trackio writes rows by itself."""

    def finish(self) -> str:
        """Complete the copy; return a description of where it is."""
        self._run.finish()
        return f"trackio's project {self._project}; `trackio show --project {self._project}`"


Target = TensorBoardTarget | WandbTarget | TrackioTarget


def copy(
    run: RunRecord,
    open_target: Callable[[RunMetadata], Target],
    wait: Callable[[float], bool] | None = None,
) -> str:
    """Copy log and evaluations; return a description of where the copy is.

    With `wait`, follow the log only, until `wait(seconds)` returns true or a `done` event.
    """
    if wait is not None:
        return _follow(run, open_target, wait)

    rows = _rows(run.events)
    last_time = rows[-1].time if rows else 0.0
    rows = merge_rows([*rows, *_evaluations(run, last_time)])
    target = open_target(run_metadata(run, run.events))
    for row in rows:
        target.write(row)
    location = target.finish()
    counts = f"{len(rows)} steps and {len(run.latest)} evaluations"
    return f"{counts} of {run.folder.path}: {location}"


def _follow(
    run: RunRecord, open_target: Callable[[RunMetadata], Target], wait: Callable[[float], bool]
) -> str:
    """Copy the log while it grows; see `copy`."""
    # Wait for the first event of a launch: it has the metadata that the target needs.
    log = LogFollower(run.folder.log_file)
    events = drop_superseded(log.poll())
    is_over = False
    while not is_over:
        if any(event.kind in ("step", *SEGMENT_EVENTS) for event in events):
            break
        is_over = wait(POLL_S)
        events = drop_superseded([*events, *log.poll()])

    # Copy the log so far. It is complete if no launch has begun after the last `done`.
    target = open_target(run_metadata(run, events))
    for row in _rows(events):
        target.write(row)
    kinds = [event.kind for event in events if event.kind in (*SEGMENT_EVENTS, "done")]
    is_over |= kinds[-1:] == ["done"]

    # Copy each event as it is logged. Wait before polling, so that the last events are still read.
    while not is_over:
        target.flush()
        is_over = wait(POLL_S)
        for event in log.poll():
            if event.kind in SEGMENT_EVENTS:
                target.restart(event.from_step)
            new_row = row_from_event(event)
            if new_row is not None:
                target.write(new_row)
            is_over |= event.kind == "done"
    return target.finish()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Copy log.jsonl and evaluations of a run to wandb, trackio or TensorBoard: one curve "
        "over all launches, which replaces earlier copies."
    )
    parser.epilog = "example: canon run export wandb RUN --mode online --follow"
    variable = os.environ.get
    add = parser.add_argument
    add("target", choices=("wandb", "trackio", "tensorboard"))
    add("folder", type=Path, metavar="RUN", help="a run folder")
    add(
        "--out",
        type=Path,
        metavar="DIR",
        help="write DIR/wandb, DIR/trackio or DIR/tb (default: RUN; trackio's own folder)",
    )
    add("--follow", action="store_true", help="continue while the run trains")
    add(
        "--mode",
        choices=MODES,
        default=variable("WANDB_MODE") or "offline",
        help="wandb mode (default: %(default)s)",
    )
    add(
        "--project",
        default=variable("WANDB_PROJECT") or "canon_pretrain",
        help="project of wandb or trackio (default: %(default)s)",
    )
    add(
        "--entity",
        default=variable("WANDB_ENTITY"),
        help="wandb entity (default: $WANDB_ENTITY, or your default)",
    )
    add(
        "--name",
        default=variable("WANDB_NAME"),
        help="name in wandb or trackio (default: $WANDB_NAME, or the run folder's name)",
    )
    add("--tags", nargs="*", default=[], metavar="TAG", help="wandb tags")
    # metrics.save_tb_folder; and how the trainer starts it: until the pipe closes, ignoring signals
    add("--tb-folder", default="tb", help=argparse.SUPPRESS)
    add("--beside-trainer", action="store_true", help=argparse.SUPPRESS)


def run(arguments: argparse.Namespace) -> int:
    """Export one run; return the exit code. Raises UserError."""
    record = RunRecord(arguments.folder)
    record.folder.read_config()  # raises UserError if it is not a run
    follows = arguments.follow
    out = arguments.out or arguments.folder
    # Its trainer may be writing a live copy to the same folder.
    if arguments.out is None and not follows and live_holder(record.folder.lock_file):
        raise UserError(
            "export.run_is_live",
            f"{record.folder.path} is being trained and may be live: add --out or --follow",
        )

    def open_target(metadata: RunMetadata) -> Target:
        if arguments.target == "tensorboard":
            return TensorBoardTarget(out / arguments.tb_folder, metadata, live=follows)
        name = arguments.name or metadata.name
        if arguments.target == "trackio":
            trackio_folder = None if arguments.out is None else out / "trackio"
            return TrackioTarget(trackio_folder, metadata, project=arguments.project, name=name)
        return WandbTarget(
            out,
            metadata,
            live=follows,
            mode=arguments.mode,
            tags=arguments.tags,
            project=arguments.project,
            entity=arguments.entity or None,
            name=name,
        )

    # What ends a copy that follows the log: the end of its trainer, or Ctrl-C.
    wait: Callable[[float], bool] | None = None
    if arguments.beside_trainer:
        wait = _trainer_ended
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(number, signal.SIG_IGN)
    elif follows:
        interrupted = threading.Event()
        wait = interrupted.wait
        signal.signal(signal.SIGINT, lambda *_: interrupted.set())
    else:
        for notice in record.notices:
            print(f"NOTE: {notice}", file=sys.stderr)
    print(copy(record, open_target, wait))
    return 0


def _trainer_ended(wait_s: float) -> bool:
    """Return whether stdin, a pipe from the trainer, was closed; then exit after FINISH_S."""
    readable, _, _ = select.select([sys.stdin], [], [], wait_s)
    if not readable or os.read(sys.stdin.fileno(), 1):
        return False
    watchdog = threading.Timer(FINISH_S, os._exit, (1,))
    watchdog.daemon = True
    watchdog.start()
    return True
