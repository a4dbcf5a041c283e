"""Delete old checkpoints: keep the newest K verified ones, and weights for pending evaluations.

    RUN/evals/holds/step-N.NAME    an evaluation that still needs step N; any content

A checkpoint is verified if its hashes were computed while it was written, or were checked since;
damaged ones do not count. No torch.
"""

import contextlib
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path

from canon_pretrain.checkpoint.folder import (
    HOLDS,
    CheckpointFolder,
    entries,
    remove_tree,
    step_number,
)
from canon_pretrain.checkpoint.manifest import DamagedCheckpoint, Manifest, find_faults, verify
from canon_pretrain.core.files import fsync_folder
from canon_pretrain.run.folder import EVALS

_Signature = dict[str, tuple[int, ...]]


@dataclass
class Outcome:
    """What retention did or would do; all lists are ascending.

    `kept`: verified full steps; if too few, none is deleted. `stripped`: reduced to weights, for an
    evaluation. `weights_only`: in a plan, those that are so already. `over_bound`: deleted though
    an evaluation needs them. `bad`: damaged steps, quarantined, with the fault. `errors`: of steps
    that do not count and stay.
    """

    kept: list[int] = field(default_factory=list)
    deleted: list[int] = field(default_factory=list)
    stripped: list[int] = field(default_factory=list)
    weights_only: list[int] = field(default_factory=list)
    over_bound: list[int] = field(default_factory=list)
    bad: dict[int, str] = field(default_factory=dict)
    errors: list[str] = field(default_factory=list)
    bytes_freed: int = 0


@dataclass
class Retention:
    """Keeps the newest `keep` verified full checkpoints of `folder`; 0 keeps all.

    Nothing is deleted unless there are `keep` verified ones. An older step in `holds()` is replaced
    by its weights, which `strip(step_path, temporary)` writes; the newest `max_held` of these stay
    while they are held. Links, and steps of another run than `run_id()`, stay.
    """

    folder: CheckpointFolder
    keep: int
    _: KW_ONLY
    holds: Callable[[], set[int]]
    strip: Callable[[Path, Path], None]
    max_held: int = 4
    run_id: Callable[[], str | None] = lambda: None
    workers: int = 1

    def __post_init__(self) -> None:
        self._verified: dict[int, _Signature] = {}

    def mark_verified(self, step: int) -> None:
        """Treat `step`, hashed by its writer, as verified until one of its files changes."""
        with contextlib.suppress(OSError):
            self._verified[step] = _signature(self.folder.step_path(step))

    def plan(self) -> Outcome:
        """Return what `apply` would do; hashes unverified steps, and changes nothing."""
        plan = Outcome()
        if not self.keep:
            return plan
        older, weights = self._classify(plan)
        if len(plan.kept) < self.keep:
            plan.weights_only = weights
            return plan

        # Of the older steps, the newest `max_held` that evaluations need stay, as weights.
        retained: list[int] = []
        held = self.holds().intersection(older + weights)
        for step in sorted(held, reverse=True):
            if len(retained) == self.max_held:
                plan.over_bound.insert(0, step)
            elif step in older and (fault := self._fault(step)):
                plan.bad[step] = fault
            else:
                retained.append(step)
        plan.stripped = [step for step in older if step in retained]
        plan.weights_only = [step for step in weights if step in retained]
        staying = plan.bad.keys() | retained
        plan.deleted = sorted(set(older + weights) - staying)
        return plan

    def _classify(self, plan: Outcome) -> tuple[list[int], list[int]]:
        """Fill `kept`, `bad` and `errors`; return older full steps and weights-only steps."""
        older: list[int] = []
        weights: list[int] = []
        # Newest first: of the full steps that are not damaged, the first `keep` are kept. Insertion
        # at the front makes all lists ascending.
        for step in reversed(self.folder.steps()):
            path = self.folder.step_path(step)
            if path.is_symlink():
                continue
            try:
                manifest = Manifest.read(path)
                if manifest.run_id not in (None, self.run_id()):
                    continue

                if manifest.kind == "weights":
                    weights.insert(0, step)
                elif len(plan.kept) == self.keep:
                    older.insert(0, step)  # not verified: hashing takes minutes
                elif fault := self._fault(step):
                    plan.bad[step] = fault
                else:
                    plan.kept.insert(0, step)
            except DamagedCheckpoint as error:
                plan.bad[step] = str(error)
            except OSError as error:
                plan.errors.append(f"{path} cannot be read: {error}")
        return older, weights

    def _fault(self, step: int) -> str | None:
        """Return how a step is damaged; None if it is verified."""
        path = self.folder.step_path(step)
        # before reading: a file that changes while it is read has another signature next time
        signature = _signature(path)
        if self._verified.get(step) == signature:
            return None

        self._verified.pop(step, None)
        try:
            verify(path, workers=self.workers)
        except DamagedCheckpoint as error:
            return str(error)
        self._verified[step] = signature
        return None

    def apply(self) -> Outcome:
        """Quarantine damaged steps, delete old ones, strip held ones. Raises OSError."""
        plan = self.plan()
        outcome = Outcome(plan.kept, weights_only=plan.weights_only, errors=plan.errors)

        # deletions first: on a full disk they make room for the weights
        actions = [(self._quarantine, step) for step in sorted(plan.bad)]
        actions += [(self._delete, step) for step in plan.deleted]
        actions += [(self._strip, step) for step in plan.stripped]

        # An action that fails does not stop the others: its step stays.
        for action, step in actions:
            if not self.folder.may_change():
                outcome.errors.append("stopped: another launch took over the folder")
                break
            try:
                action(step, plan, outcome)
            except Exception as error:  # torch raises RuntimeError and more on a full disk
                fault = "not needed"
                if step in plan.bad:
                    fault = f"damaged ({plan.bad[step]})"
                outcome.errors.append(f"step {step}, {fault}, stays: {error}")
                self._verified.pop(step, None)

        outcome.weights_only.sort()
        return outcome

    def _quarantine(self, step: int, plan: Outcome, outcome: Outcome) -> None:
        fault = plan.bad[step]
        self.folder.quarantine(self.folder.step_path(step), fault)
        outcome.bad[step] = fault

    def _delete(self, step: int, plan: Outcome, outcome: Outcome) -> None:
        # an evaluation may have requested it during the plan, whose hashing takes minutes
        if step not in plan.over_bound and step in self.holds():
            return
        try:
            outcome.bytes_freed += self.folder.delete_step(step)
        finally:
            if not self.folder.step_path(step).exists():  # renamed, if not deleted
                outcome.deleted.append(step)
                if step in plan.over_bound:
                    outcome.over_bound.append(step)

    def _strip(self, step: int, plan: Outcome, outcome: Outcome) -> None:
        """Replace a full checkpoint by its weights, unless they are not whole."""
        final = self.folder.step_path(step)
        temporary = self.folder.saving_path(step)
        try:
            remove_tree(temporary)
            self.strip(final, temporary)

            # the weights must be whole before they replace the full checkpoint
            manifest = Manifest.read(temporary)
            faults = find_faults(temporary, manifest, hashes=False)
            is_of_step = manifest.kind == "weights" and manifest.step == step
            if faults or not is_of_step:
                raise DamagedCheckpoint(
                    "checkpoint.damaged",
                    f"{temporary} does not hold the weights of step {step}: {faults}",
                    path=temporary,
                    faults=faults,
                )
            outcome.bytes_freed += self.folder.replace_step(step)
        finally:
            with contextlib.suppress(OSError):
                remove_tree(temporary)
            # read the folder: the replacement may succeed and its last deletion fail
            with contextlib.suppress(DamagedCheckpoint, OSError):
                if Manifest.read(final).kind == "weights":
                    outcome.stripped.append(step)
                    outcome.weights_only.append(step)


def _signature(folder: Path) -> _Signature:
    """Return sizes, inodes and times of the files: mtime can be set back, ctime cannot."""
    signature: _Signature = {}
    for path in folder.rglob("*"):
        if not path.is_dir():
            status = path.lstat()
            signature[str(path)] = (
                status.st_size,
                status.st_ino,
                status.st_mtime_ns,
                status.st_ctime_ns,
            )
    return signature


def held_steps(run: Path, name: str | None = None) -> set[int]:
    """Return the steps that an evaluation of `run` still needs; with `name`, its own holds."""
    steps: set[int] = set()
    for path in entries(run / EVALS / HOLDS):
        step_name, dot, hold_name = path.name.partition(".")
        step = step_number(step_name)
        if step is not None and dot and name in (None, hold_name):
            steps.add(step)
    return steps


def hold_step(run: Path, step: int, name: str) -> None:
    """Make retention keep the weights of `step` until `release_step` with the same `name`."""
    path = _hold_file(run, step, name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    fsync_folder(path.parent)


def release_step(run: Path, step: int, name: str) -> None:
    """Undo `hold_step`, if it was called."""
    _hold_file(run, step, name).unlink(missing_ok=True)


def _hold_file(run: Path, step: int, name: str) -> Path:
    return run / EVALS / HOLDS / f"step-{step}.{name}"
