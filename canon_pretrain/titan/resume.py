"""Resume from the newest complete checkpoint, verified by all ranks.

Newest first: each rank verifies the hashes of its share of files, then pickles are checked against
an allow-list. A damaged checkpoint is quarantined and the next one tried. If none is left, this is
an error: a run never restarts at step 1 by itself.
"""

import functools
import logging
import socket
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata
from torchtitan.components.checkpoint import ModelWrapper

from canon_pretrain.checkpoint import manifest as manifests
from canon_pretrain.checkpoint.folder import CheckpointFolder
from canon_pretrain.checkpoint.manifest import DamagedCheckpoint, Manifest
from canon_pretrain.checkpoint.safe_load import METADATA, SafePlanner, SafeReader, check_safe
from canon_pretrain.core.errors import UserError
from canon_pretrain.core.files import sha256_file
from canon_pretrain.run.folder import RunFolder
from canon_pretrain.run.launches import newest_launch
from canon_pretrain.run.log import read_log

logger = logging.getLogger(__name__)
T = TypeVar("T")

IO_TIMEOUT = timedelta(hours=2)
"""For operations that wait for a disk, whose outages exceed a training step's timeout."""


class RankZero:
    """Run functions on rank 0 and broadcast the result, over an own gloo group; collective."""

    def __init__(self) -> None:
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self._store_calls = 0

    @cached_property
    def group(self) -> dist.ProcessGroup:
        """A gloo group of all ranks with IO_TIMEOUT, created at first use."""
        return dist.new_group(backend="gloo", timeout=IO_TIMEOUT)

    def run(self, function: Callable[[], Any]) -> Any:
        """Return rank 0's result; raise its UserError, or an OSError as one, on all ranks."""
        group = self.group  # create it first: its creation has a shorter timeout than `function`
        answer: list[Any] = [None, None]
        failure: UserError | None = None
        try:
            if self.rank == 0:
                answer[0] = function()
        except UserError as error:
            failure = error
        except OSError as error:
            failure = UserError("file.os_error", str(error))
        except BaseException as error:
            failure = UserError("rank_zero.failed", f"{type(error).__name__}: {error}")
            raise
        finally:  # always: the other ranks are waiting
            if failure is not None:  # without its class, which others may fail to unpickle
                answer[1] = (failure.code, failure.message, failure.fields)
            dist.broadcast_object_list(answer, src=0, group=group)
        if answer[1] is not None:
            relayed, (code, message, fields) = UserError, answer[1]  # with rank 0's code
            raise relayed(code, message, shared=True, **fields)
        return answer[0]

    def run_by_store(self, function: Callable[[], bool]) -> bool:
        """As `run`, by the store: usable while a thread uses the group; not for slow functions."""
        self._store_calls += 1
        store, key = dist.distributed_c10d._get_default_store(), f"rank_zero/{self._store_calls}"
        if self.rank == 0:
            store.set(key, str(int(function())))
        return store.get(key) == b"1"

    def gather(self, own: list[str]) -> dict[int, list[str]]:
        """Return each rank's texts, by rank; without the ranks that have none."""
        everyone: list[list[str]] = [[] for _ in range(self.world_size)]
        dist.all_gather_object(everyone, own, group=self.group)
        return {rank: texts for rank, texts in enumerate(everyone) if texts}


class Verified(NamedTuple):
    """The manifest and metadata of a verified checkpoint."""

    manifest: Manifest
    metadata: Metadata


class Resume:
    """One launch's search for the state to resume from."""

    def __init__(
        self,
        folder: CheckpointFolder,
        run: RunFolder,
        rank_zero: RankZero,
        model: ModelWrapper,
        states: dict[str, Any],
        event: Callable[..., None],
    ) -> None:
        self.folder, self.run = folder, run
        self._rank_zero, self._model, self._states = rank_zero, model, states
        self._event = event

    def resume(self, asked: int, *, initial: str, initial_model_only: bool) -> int | None:
        """Load step `asked` (-1: the newest complete one), without checkpoints `initial`.

        Return the step, None if there is none. UserError if all are damaged. Collective.
        """
        if asked == -1:
            self._rank_zero.run(self._quarantine_stale_saves)
        while (step := self._rank_zero.run(lambda: self._next_candidate(asked))) is not None:
            path, begin = self.folder.step_path(step), time.monotonic()
            found = self._verify(path)
            if isinstance(found, Verified):
                self._read(path, found)
                older = "" if found.manifest.run_id else " (from a version without run ids)"
                seconds = time.monotonic() - begin
                logger.info(f"resumed from {path}{older}, verified and read in {seconds:.1f} s")
                return int(step)
            text = "; ".join(found)
            if asked != -1:
                raise UserError(
                    "checkpoint.damaged",
                    f"checkpoint.load_step = {asked}: {path} is damaged: {text}",
                    shared=True,
                    path=path,
                )
            self._rank_zero.run(functools.partial(self._quarantine, path, text))
        if initial:
            self._load_initial(Path(initial), initial_model_only)
        return None

    def _quarantine_stale_saves(self) -> None:
        """Quarantine what a launch saved after another took the run over; rank 0 only."""
        newest = newest_launch(self.run) or {}
        begin, taker = newest.get("from_step"), newest.get("launch")
        if not isinstance(begin, int) or taker is None:
            return
        for step in self.folder.steps():
            path = self.folder.step_path(step)
            manifest = _value_or_fault(Manifest.read, path)
            launch = None if isinstance(manifest, str) else manifest.launch
            if step > begin and launch is not None and launch < taker:
                self._quarantine(
                    path,
                    f"launch {launch} saved step {step} after launch {taker} took the run over "
                    f"at step {begin}",
                    "STALE CHECKPOINT",
                )

    def _next_candidate(self, asked: int) -> int | None:
        """Return the step to try next, or None if nothing was saved; UserError if none is left."""
        steps = self.folder.steps()
        if asked != -1 and asked not in steps:
            raise UserError(
                "checkpoint.missing",
                f"checkpoint.load_step = {asked}: not in {self.folder.path}. "
                f"Available: {', '.join(map(str, steps)) or 'none'}",
                given=asked,
                available=steps,
            )
        if asked != -1:
            return asked
        for step in reversed(steps):
            manifest = _value_or_fault(Manifest.read, self.folder.step_path(step))
            if isinstance(manifest, str) or manifest.kind == "full":  # a str: found damaged later
                return step
        aside = [entry.path.name for entry in self.folder.quarantined()]
        facts: dict[str, list[Any]] = {
            "weights only": steps,
            "in quarantine": [name for name in aside if not name.startswith(".")],
            "saved according to the log": self._logged_saves()[-3:],
        }
        if texts := [f"{what}: {', '.join(map(str, x))}" for what, x in facts.items() if x]:
            raise UserError(
                "checkpoint.none",
                f"no complete checkpoint in {self.folder.path} ({'; '.join(texts)}): restore "
                "one, or restart at step 1 with --checkpoint.fresh, which archives the run",
                facts=facts,
            )
        return None

    def _logged_saves(self) -> list[int]:
        """Return the steps that the log records as saved: it may outlive purged checkpoints."""
        saved: list[int] = []
        for event in read_log(self.run.log_file) if self.run.log_file.exists() else []:
            if event.kind == "checkpoint":
                saved.append(event.step)
            elif event.kind == "archive":
                saved = [step for step in saved if step <= event.step]
        return saved

    def _verify(self, path: Path, *, weights_suffice: bool = False) -> Verified | list[str]:
        """Return the verified checkpoint, or its faults; each rank reads its share of files."""
        manifest = self._rank_zero.run(lambda: _value_or_fault(Manifest.read, path))
        if isinstance(manifest, str):
            return [manifest]
        faults: list[str] = []
        unreadable, metadata = None, b""
        names = [name for name in manifest.files if name != METADATA]
        names.sort(key=lambda name: (-manifest.files[name].bytes, name))
        own = names[self._rank_zero.rank :: self._rank_zero.world_size]
        try:
            # a rank without a share must see the folder, too
            faults = manifests.find_faults(path, manifest, own or names[-1:], hashes=bool(own))
            if self._rank_zero.rank == 0:
                faults += _folder_faults(path, manifest, weights_suffice)
                if METADATA in manifest.files:
                    metadata = manifests.read_file(path, manifest, METADATA)
        except DamagedCheckpoint as error:
            faults.append(str(error))
        except OSError as error:
            faults, unreadable = [str(error)], error
        host = socket.gethostname()
        found = self._rank_zero.gather([f"{host}: {fault}" for fault in faults])

        def judge() -> Verified | list[str]:
            if unreadable is not None:
                raise UserError(
                    "checkpoint.unreadable",
                    f"{path} cannot be read on {host}: {unreadable}",
                    path=path,
                )
            if 0 in found:
                return faults
            if found:  # by other ranks only: perhaps one node's bad mount
                whole = _value_or_fault(lambda: manifests.verify(path, workers=4))
                if isinstance(whole, str):
                    return [whole]
                rank, (text, *_) = next(iter(found.items()))
                raise UserError(
                    "checkpoint.node_mismatch",
                    f"{path} is complete for rank 0 on {host}, but rank {rank} reports: {text}. "
                    "Check that node's mount; nothing was moved",
                    path=path,
                    rank=rank,
                )
            # last, because pickles of a damaged file must not be opened
            safe = _value_or_fault(check_safe, path, metadata)
            return [safe] if isinstance(safe, str) else Verified(manifest, safe)

        return self._rank_zero.run(judge)

    def _quarantine(self, path: Path, text: str, what: str = "DAMAGED CHECKPOINT") -> None:
        """Move a checkpoint to quarantine and log it; rank 0 only."""
        kept = self.folder.quarantine(path, text)
        logger.warning(f"{what}: {path}: {text}. Moved to {kept}")
        self._event("quarantine", checkpoint=path.name, reason=text, moved_to=str(kept))

    def _read(self, path: Path, found: Verified, *, model_only: bool = False) -> None:
        """Load into this rank's shards. Raises UserError if the model differs."""
        model = self._model.state_dict()
        state = dict(model) if model_only else self._states | model
        _check_model(path, found.metadata, model)
        dcp.load(
            state,
            storage_reader=SafeReader(path, found.metadata),
            planner=SafePlanner(),
            process_group=self._rank_zero.group,
        )
        self._model.load_state_dict(state)

    def _load_initial(self, path: Path, model_only: bool) -> None:
        """Start a run from the checkpoint folder `path`."""
        found = self._verify(path, weights_suffice=model_only)
        if not isinstance(found, Verified):
            raise _initial_load_error(path, found)
        self._read(path, found, model_only=model_only)
        what, manifest = "weights" if model_only else "full state", found.manifest
        logger.info(f"started from {path}: {what} of step {manifest.step}")
        self._event(
            "initial_load",
            checkpoint=str(path.resolve()),
            checkpoint_step=manifest.step,
            saved=manifest.saved,
            manifest_sha256=self._rank_zero.run(lambda: sha256_file(path / manifests.MANIFEST)),
            model_only=model_only,
        )


def check_initial(initial: str, model: Mapping[str, Tensor], *, model_only: bool) -> None:
    """Raise UserError unless a run of `model` can start from `initial`; reads every file."""
    path = Path(initial)
    try:
        if faults := _folder_faults(path, manifests.verify(path, workers=4), model_only):
            raise _initial_load_error(path, faults)
        metadata = check_safe(path)
    except DamagedCheckpoint as error:
        raise _initial_load_error(path, [str(error)]) from None
    _check_model(path, metadata, model)


def _initial_load_error(initial: Path, faults: list[str]) -> UserError:
    return UserError(
        "checkpoint.initial_load",
        f"checkpoint.initial_load_path = {initial}: {'; '.join(faults)}. Expected a complete "
        "RUN/checkpoint/step-N, or the output of hf import",
        shared=True,
        path=initial,
    )


def _value_or_fault(read: Callable[..., T], *arguments: Any) -> T | str:
    """Return the result of `read`, or the message of its DamagedCheckpoint."""
    try:
        return read(*arguments)
    except DamagedCheckpoint as error:
        return str(error)


def _folder_faults(path: Path, manifest: Manifest, weights_suffice: bool) -> list[str]:
    """Return faults other than in the content of the manifest's files."""
    strange = set(manifests.files_of(path)) - manifest.files.keys()
    faults = [f"{name} is not in the manifest" for name in sorted(strange)]
    if manifest.kind != "full" and not weights_suffice:
        faults.append("it holds weights only and cannot be resumed")
    if path.name != f"step-{manifest.step}":
        faults.append(f"its manifest is of step {manifest.step}")
    return faults


def _check_model(path: Path, metadata: Metadata, model: Mapping[str, Tensor]) -> None:
    """Raise UserError unless the checkpoint has each tensor of `model` in its shape."""
    for name, tensor in model.items():
        size = getattr(metadata.state_dict_metadata.get(name), "size", None)
        if size != tensor.shape:
            given = "missing" if size is None else f"of shape {tuple(size)}"
            raise UserError(
                "checkpoint.other_model",
                f"{path} is of another model: {name} is {given}, expected {tuple(tensor.shape)}",
                shared=True,
                name=name,
            )
