"""RunRecord: the contents of a run folder, for every view of finished and running runs.

Each file is read once, on first use; a missing or damaged one raises UserError there. No torch.
"""

import contextlib
import itertools
import json
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from canon_pretrain.checkpoint.architecture import model_args
from canon_pretrain.checkpoint.folder import CheckpointFolder
from canon_pretrain.checkpoint.manifest import Manifest
from canon_pretrain.core.errors import EXIT_CODE, UserError
from canon_pretrain.core.files import UnreadableFile
from canon_pretrain.core.terminal import printable
from canon_pretrain.model.args import ModelArgs
from canon_pretrain.report.items import HELD_OUT, Evaluation
from canon_pretrain.run.folder import EVALS, IMPORTED_FROM, RunFolder, unique_labels
from canon_pretrain.run.launches import read_run
from canon_pretrain.run.log import SEGMENT_EVENTS, Event
from canon_pretrain.run.results import RESULTS, VALIDATION, Results, read_results
from canon_pretrain.run.status import Status, read_status

SEEDS = ("model.init_seed", "data.data_seed")
# Types of the settings that views compute with, in identity and config; null if unknown.
TYPES: dict[str, type] = {
    "data_fingerprint": str,
    HELD_OUT: str,
    "data.task.name": str,
    "job.description": str,
    "model.flavor": str,
    "checkpoint.folder": str,
    "data.path": str,
    "model.mixer": str,
    "model.pattern": list,
    "model.position": str,
    "model.canon_set": str,
    "training.steps": int,
    "training.seq_len": int,
    "training.global_batch_size": int,
    "optimizer.lr": float,
    "run.heartbeat_s": float,
    "validation.windows": int,
    **dict.fromkeys(SEEDS, int),
}


class Curve(NamedTuple):
    """Sorted int64 [n] steps and their float64 [n] values, NaN and infinities included."""

    steps: np.ndarray
    values: np.ndarray

    @classmethod
    def of(cls, pairs: Iterable[tuple[int, float | None]]) -> "Curve | None":
        """Return the curve of (step, value) pairs, the last per step; None without values."""
        by_step = {step: value for step, value in pairs if value is not None}
        if not by_step:
            return None
        steps = sorted(by_step)
        return cls(
            steps=np.array(steps, np.int64),
            values=np.array([by_step[step] for step in steps], np.float64),
        )


class Failure(NamedTuple):
    """Why the last launch failed, after which step."""

    step: int
    reason: str


class Launch(NamedTuple):
    """A `start` or `resume` event: the step it continues from, and its hours (see `Clock`)."""

    from_step: int
    time: str | None
    world_size: int | None
    training_hours: float | None
    wall_hours: float | None


class Clock(NamedTuple):
    """When each logged step ended, arrays [n] from step 0 on; hours are None if times are unknown.

    Training hours exclude the time between launches and repeated work.
    """

    steps: np.ndarray
    tokens: np.ndarray
    training_hours: np.ndarray | None
    wall_hours: np.ndarray | None
    launches: list[Launch]


class StoredResults(NamedTuple):
    """What is in RUN/evals; see the properties of `RunRecord` with these names."""

    evaluations: list[Evaluation]
    left_out: list[str]
    damaged: list[UserError]


class RunRecord:
    """One run folder; `label` names it among other runs."""

    def __init__(self, path: Path, label: str = "") -> None:
        self.folder = RunFolder(path)
        self.label = label or path.name

    def _section(self, name: str) -> dict[str, Any]:
        section = self.folder.read_config().get(name)
        if not isinstance(section, dict):
            raise UnreadableFile(self.folder.config_file, f"is damaged: it has no `{name}`")
        return section

    def _check_types(self, settings: Mapping[str, Any]) -> None:
        """Raise UserError if a setting of TYPES has another type; an integer is a float."""
        for name, expected in TYPES.items():
            value = settings.get(name)
            is_integer = expected is float and type(value) is int
            if value is not None and type(value) is not expected and not is_integer:
                raise UnreadableFile(
                    self.folder.config_file,
                    f"is damaged: {name} is {value!r:.40}, expected {expected.__name__}",
                    field=name,
                )

    @cached_property
    def identity(self) -> dict[str, Any]:
        """The settings that make a run what it is, by dotted name."""
        identity = self._section("identity")
        self._check_types(identity)
        return identity

    @cached_property
    def config(self) -> dict[str, Any]:
        """The settings by section; each section is a dict (see IMPORTED_FROM)."""
        config = self._section("config")
        for name, section in config.items():
            if not isinstance(section, dict) and name != IMPORTED_FROM:
                raise UnreadableFile(
                    self.folder.config_file,
                    f"is damaged: config.{name} is {section!r:.40}, expected an object",
                    field=name,
                )
        self._check_types(flatten(config))
        return config

    def check(self) -> None:
        """Read all that views of several runs show. Raises UserError if a file is damaged."""
        _ = self.config, self.identity, self.steps, self.clock, self.evaluations

    @property
    def flavor(self) -> str | None:
        """The name of the model's sizes, from config.json."""
        model: dict[str, Any] = self.config.get("model", {})
        return model.get("flavor")

    @property
    def description(self) -> str:
        """The user's description of the run, from config.json; "" if there is none."""
        job = self.config.get("job", {})
        return printable(str(job.get("description") or ""))

    @property
    def seeds(self) -> tuple[Any, ...]:
        return tuple(self.identity.get(name) for name in SEEDS)

    @property
    def model_args(self) -> ModelArgs | None:
        """The model's settings; None if another version with other fields wrote them."""
        with contextlib.suppress(UserError):
            return model_args(self.identity, self.folder.config_file)
        return None

    @property
    def recipe(self) -> str:
        """The identity without the seeds as JSON: equal for runs that differ in seeds only."""
        rest = dict(self.identity)
        for name in SEEDS:
            rest.pop(name, None)
        return json.dumps(rest, sort_keys=True)

    @cached_property
    def status(self) -> Status | None:
        return read_status(self.folder.status_file)

    @property
    def is_done(self) -> bool:
        return self.folder.done_file.exists()

    @property
    def failure(self) -> Failure | None:
        """Why the last launch failed; None if it did not."""
        with contextlib.suppress(UserError):  # log and results are usable without status.json
            if self.status and self.status.state == "failed" and not self.is_done:
                return Failure(self.status.step, printable(self.status.reason))
        return None

    @cached_property
    def events(self) -> list[Event]:
        """All events but superseded ones: of repeated steps, the last run."""
        return self.folder.read_log()

    def _events(self, *kinds: str) -> list[Event]:
        return [event for event in self.events if event.kind in kinds]

    @cached_property
    def steps(self) -> list[Event]:
        steps = self._events("step")
        if any("tokens" not in event for event in steps):
            raise UnreadableFile(self.folder.log_file, "is damaged: a step has no tokens")
        return steps

    @cached_property
    def launch_events(self) -> list[Event]:
        """The `start` and `resume` events."""
        return self._events(*SEGMENT_EVENTS)

    @property
    def initial_load(self) -> str | None:
        """From which checkpoint of another run this one started; None if it began untrained."""
        event = next(iter(self._events("initial_load")), None)
        if event is None:
            return None
        loaded = "the weights" if event.get("model_only") else "the full state"
        sha256 = str(event.get("manifest_sha256"))[:12]
        return f"{loaded} of step {event['checkpoint_step']:,} of manifest {sha256}"

    def curve(self, field: str) -> Curve | None:
        """Return one field of the `step` events; None if no event has it."""
        points = [(event.step, event.get(field)) for event in self.steps]
        return Curve.of(points)

    @cached_property
    def own_validations(self) -> list[Event]:
        """The `validation` events on the run's own held-out text."""
        own_text = self.identity.get(HELD_OUT)
        return [
            event
            for event in self._events("validation")
            if event.get(HELD_OUT, own_text) == own_text
        ]

    @cached_property
    def validation(self) -> dict[str, Curve]:
        """Bits per byte of the held-out text, by source; "" is the whole text."""
        return _curves_by_name(
            (name, event.step, part.get("bits_per_byte"))
            for event in self.own_validations
            for name, part in {"": event, **(event.get("sources") or {})}.items()
        )

    @cached_property
    def scores(self) -> dict[str, Curve]:
        """Held-out loss and scores of a synthetic task while training, by name."""
        return _curves_by_name(
            (name, event.step, value)
            for event in self.own_validations
            if event.get("scores")
            for name, value in {"loss": event.get("loss"), **event["scores"]}.items()
        )

    @cached_property
    def samples(self) -> dict[str, dict[int, str | None]]:
        """Texts written while training, by prompt and step; None if logits were not finite."""
        by_prompt: dict[str, dict[int, str | None]] = {}
        for event in self._events("samples"):
            for sample in event.get("samples") or ():
                prompt = printable(sample["prompt"], "\n\t")
                text = printable(sample["text"], "\n\t")
                by_step = by_prompt.setdefault(prompt, {})
                by_step[event.step] = None if "reason" in event else text
        return by_prompt

    @cached_property
    def skips(self) -> list[Event]:
        """The `skip` events of steps that were not repeated later."""
        # A launch repeats the steps after the one that it continues from.
        skips: list[Event] = []
        for event in self._events("skip", *SEGMENT_EVENTS):
            if event.kind == "skip":
                skips.append(event)
            else:
                skips = [skip for skip in skips if skip.step <= event.from_step]
        return skips

    @cached_property
    def clock(self) -> Clock:
        events = self._events("step", *SEGMENT_EVENTS)
        hours = [unix_time(event.get("time")) / 3600 for event in events]
        first_hour = next(iter(hours), 0.0)

        # The clock begins with step 0, which is not logged.
        steps = [0]
        tokens = [0]
        training_hours = [0.0]
        wall_hours = [0.0]
        launches: list[Launch] = []

        # Of the current launch: the hour at which it began, and the training hours before it.
        launch_hour = first_hour
        hours_before = 0.0
        for event, hour in zip(events, hours, strict=True):
            if event.kind != "step":
                launch_hour = hour
                hours_before = training_hours[-1]
                launches.append(
                    Launch(
                        from_step=event.from_step,
                        time=event.get("time"),
                        world_size=event.get("world_size"),
                        training_hours=hours_before,
                        wall_hours=hour - first_hour,
                    )
                )
            elif event.step > steps[-1]:
                steps.append(event.step)
                tokens.append(event.tokens)
                # Hours never decrease, even if the clock was set back.
                training_hour = hours_before + hour - launch_hour
                training_hours.append(max(training_hours[-1], training_hour))
                wall_hours.append(max(wall_hours[-1], hour - first_hour))

        clock = Clock(
            np.array(steps),
            np.array(tokens),
            np.array(training_hours),
            np.array(wall_hours),
            launches,
        )
        has_times = all(map(math.isfinite, hours))
        if has_times and wall_hours[-1] > 0:
            return clock

        # An event has no time, or all have the same.
        launches = [x._replace(training_hours=None, wall_hours=None) for x in launches]
        return clock._replace(training_hours=None, wall_hours=None, launches=launches)

    @property
    def evaluations(self) -> list[Evaluation]:
        """The results in RUN/evals, sorted by suite, trials first, then step.

        The last of a step counts: results of the run's own checkpoint, then of its own text, then
        the newest.
        """
        return self._results.evaluations

    @property
    def left_out(self) -> list[str]:
        """One sentence per result that belongs to another run."""
        return self._results.left_out

    @property
    def damaged(self) -> list[UserError]:
        """The errors of results that could not be read."""
        return self._results.damaged

    @property
    def latest(self) -> dict[tuple[str, int], Results]:
        """The result that counts, by suite and step: a complete one rather than a trial."""
        return {(x.suite, x.step): x.results for x in self.evaluations}

    @cached_property
    def _results(self) -> StoredResults:
        stored = StoredResults([], [], [])
        evals = self.folder.path / EVALS
        for path in sorted(evals.glob(f"step-*/*/*/{RESULTS}")):
            try:
                evaluation = Evaluation(self.label, read_results(path), path.parent)
                if evaluation.step is None:
                    raise UnreadableFile(path, "is damaged: step is None")
            except UserError as error:
                stored.damaged.append(error)
                continue

            # A copied folder may have the results of another run.
            owner = self._other_owner(evaluation.results.asked)
            if owner is not None:
                stored.left_out.append(f"{path} is left out: it belongs to {owner}.")
            else:
                stored.evaluations.append(evaluation)

        stored.evaluations.sort(key=self._sort_key)
        return stored

    def _sort_key(self, evaluation: Evaluation) -> tuple[Any, ...]:
        """Return the place in `evaluations`: of one suite and step, the last counts."""
        own_texts = str(self.identity.get(HELD_OUT)).split("+")
        return (
            evaluation.suite,
            evaluation.limit is None,
            evaluation.step,
            not is_outdated(self.folder, evaluation.results),
            evaluation.suite == VALIDATION and evaluation.text in own_texts,
            evaluation.results.written,
            (evaluation.folder / RESULTS).stat().st_mtime_ns,
        )

    def _other_owner(self, options: dict[str, Any]) -> str | None:
        """Describe the run that an evaluation belongs to; None if it is this one.

        `options` of the evaluation have its run id and the fingerprint of its training data.
        """
        path = self.folder.path
        run = read_run(self.folder)
        run_id = options.get("run_id")
        if run is not None and run_id not in (None, run.run_id):
            checkpoint = options["checkpoint"]
            return f"run {run_id} ({checkpoint}), and {path} is run {run.run_id}"

        # An id may be missing on either side: the training data must be the same, too.
        data = options["train_fingerprint"]
        own_data = self.identity.get("data_fingerprint")
        if data != own_data:
            return f"a model trained on data {data}, and {path} was trained on {own_data}"
        return None

    @property
    def notices(self) -> list[str]:
        """One sentence per item that is left out of the curves and evaluations."""
        sentences = list(self.left_out)
        sentences += [f"{error}; it is left out" for error in self.damaged]
        num_others = len(self._events("validation")) - len(self.own_validations)
        if num_others:
            sentences.append(f"{num_others} validation(s) on another held-out text are left out")
        return sentences


def _curves_by_name(points: Iterable[tuple[str, int, float | None]]) -> dict[str, Curve]:
    """Return the curves of (name, step, value) points, by printable name; None is no value."""
    by_name: dict[str, list[tuple[int, float | None]]] = {}
    for name, step, value in points:
        pairs = by_name.setdefault(printable(name), [])
        pairs.append((step, value))

    curves = {}
    for name, pairs in by_name.items():
        curve = Curve.of(pairs)
        if curve is not None:
            curves[name] = curve
    return curves


def read_runs(paths: Sequence[Path]) -> tuple[list[RunRecord], list[UserError]]:
    """Return the runs that can be read, with unique labels, and the errors of the others.

    Raises the first error if no run can be read, and UserError if a path occurs twice.
    """
    runs: list[RunRecord] = []
    errors: list[UserError] = []
    for path, label in zip(paths, unique_labels(paths), strict=True):
        run = RunRecord(path, label)
        try:
            run.check()
        except UserError as error:
            errors.append(error)
        else:
            runs.append(run)
    if errors and not runs:
        raise errors[0]
    return runs, errors


def exit_if_left_out(errors: Sequence[UserError]) -> None:
    """Print the errors of what a view has left out, and exit with code 2 if there are any."""
    for error in errors:
        print(f"error[{error.code}]: {error}; it is left out", file=sys.stderr)
    if errors:
        raise SystemExit(EXIT_CODE)


def is_outdated(folder: RunFolder, results: Results) -> bool:
    """Return whether the run's checkpoint of that step has changed since the evaluation."""
    evaluated = results.asked.get("content")
    try:
        checkpoint = CheckpointFolder.of_run(folder).step_path(results.step)
        return evaluated is not None and Manifest.read(checkpoint).content != evaluated
    except (UserError, OSError):
        return False


def differing_settings(runs: Sequence[RunRecord]) -> dict[str, list[Any]]:
    """Return the identity fields in which `runs` differ, with the value per run."""
    names = dict.fromkeys(name for run in runs for name in run.identity)
    settings = {name: [run.identity.get(name) for run in runs] for name in names}
    return {
        name: values
        for name, values in settings.items()
        if any(value != values[0] for value in values)
    }


def collapse_repeats(values: Iterable[Any]) -> list[Any]:
    """Return `values` without None and without consecutive duplicates."""
    present = (value for value in values if value is not None)
    return [value for value, _ in itertools.groupby(present)]


def flatten(value: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the leaves of nested dicts by dotted name; lists and {} are leaves."""
    leaves: dict[str, Any] = {}
    for name, inner in value.items():
        if isinstance(inner, dict) and inner:
            leaves |= flatten(inner, f"{prefix}{name}.")
        else:
            leaves[prefix + name] = inner
    return leaves


def unix_time(time: Any) -> float:
    """Return an event's `time` as Unix seconds; NaN if it has none."""
    try:
        return datetime.fromisoformat(time).timestamp()
    except (TypeError, ValueError):
        return math.nan
