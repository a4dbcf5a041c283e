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
"""For operations that wait for a disk: an outage may exceed a training step's timeout."""


class RankZero:
    """Run functions on rank 0 and broadcast the result over a separate gloo group; collective."""

    def __init__(self) -> None:
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        self._store_calls = 0

    @cached_property
    def group(self) -> dist.ProcessGroup:
        """A gloo group of all ranks with IO_TIMEOUT, created at first use."""
        return dist.new_group(backend="gloo", timeout=IO_TIMEOUT)

    def run(self, function: Callable[[], Any]) -> Any:
        """Return rank 0's result; raise its UserError, or an OSError as one, on all ranks."""
        group = self.group  # create it first: its creation has a shorter timeout than `function`
        result: Any = None
        failure: UserError | None = None

        # Any other error is raised here, and relayed as one that the other ranks can print.
        try:
            if self.rank == 0:
                result = function()
        except UserError as error:
            failure = error
        except OSError as error:
            failure = UserError("file.os_error", str(error))
        except BaseException as error:
            failure = UserError("rank_zero.failed", f"{type(error).__name__}: {error}")
            raise
        finally:  # always: the other ranks are waiting
            # an error without its class, which others may fail to unpickle
            failure_parts = failure and (failure.code, failure.message, failure.fields)
            answer: list[Any] = [result, failure_parts]
            dist.broadcast_object_list(answer, src=0, group=group)

        result, failure_parts = answer
        if failure_parts is not None:
            code, message, fields = failure_parts
            relayed = UserError  # by another name: error_codes.txt lists codes that are literals
            raise relayed(code, message, shared=True, **fields)
        return result

    def run_by_store(self, function: Callable[[], bool]) -> bool:
        """As `run`, by the store: usable while a thread uses the group; not for slow functions."""
        store = dist.distributed_c10d._get_default_store()
        self._store_calls += 1
        key = f"rank_zero/{self._store_calls}"
        if self.rank == 0:
            store.set(key, str(int(function())))
        return store.get(key) == b"1"

    def gather(self, texts: list[str]) -> dict[int, list[str]]:
        """Return the texts of all ranks, by rank; without the ranks that have none."""
        by_rank: list[list[str]] = [[]] * self.world_size
        dist.all_gather_object(by_rank, texts, group=self.group)
        return {rank: rank_texts for rank, rank_texts in enumerate(by_rank) if rank_texts}


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
        self.folder = folder
        self.run = run
        self._rank_zero = rank_zero
        self._model = model
        self._states = states
        self._event = event

    def resume(self, load_step: int, *, initial: str, initial_model_only: bool) -> int | None:
        """Load step `load_step` (-1: the newest complete one), without checkpoints `initial`.

        Return the step, None if there is none. UserError if all are damaged. Collective.
        """
        is_newest = load_step == -1
        if is_newest:
            self._rank_zero.run(self._quarantine_stale_saves)

        # Try steps, newest first, until one is intact; quarantine the damaged ones.
        while (step := self._rank_zero.run(lambda: self._next_candidate(load_step))) is not None:
            path = self.folder.step_path(step)
            begin = time.monotonic()
            checkpoint = self._verify(path)
            if isinstance(checkpoint, Verified):
                self._read(path, checkpoint)
                version = "" if checkpoint.manifest.run_id else " (from a version without run ids)"
                seconds = time.monotonic() - begin
                logger.info(f"resumed from {path}{version}, verified and read in {seconds:.1f} s")
                return int(step)

            faults = "; ".join(checkpoint)
            if not is_newest:
                raise UserError(
                    "checkpoint.damaged",
                    f"checkpoint.load_step = {load_step}: {path} is damaged: {faults}",
                    shared=True,
                    path=path,
                )
            self._rank_zero.run(functools.partial(self._quarantine, path, faults))

        # A new run.
        if initial:
            self._load_initial(Path(initial), initial_model_only)
        return None

    def _quarantine_stale_saves(self) -> None:
        """Quarantine what a launch saved after another took the run over; rank 0 only."""
        last_launch = newest_launch(self.run) or {}
        begin = last_launch.get("from_step")
        taker = last_launch.get("launch")
        if not isinstance(begin, int) or taker is None:
            return

        # Those after the step from which the newest launch trained, unless it saved them itself.
        for step in self.folder.steps():
            path = self.folder.step_path(step)
            manifest = _value_or_fault(Manifest.read, path)
            if isinstance(manifest, str) or manifest.launch is None:
                continue
            if step > begin and manifest.launch < taker:
                self._quarantine(
                    path,
                    f"launch {manifest.launch} saved step {step} after launch {taker} took the "
                    f"run over at step {begin}",
                    "STALE CHECKPOINT",
                )

    def _next_candidate(self, load_step: int) -> int | None:
        """Return the step to try next, or None if nothing was saved; UserError if none is left."""
        steps = self.folder.steps()
        if load_step != -1:
            if load_step in steps:
                return load_step
            raise UserError(
                "checkpoint.missing",
                f"checkpoint.load_step = {load_step}: not in {self.folder.path}. "
                f"Available: {', '.join(map(str, steps)) or 'none'}",
                given=load_step,
                available=steps,
            )

        for step in reversed(steps):
            manifest = _value_or_fault(Manifest.read, self.folder.step_path(step))
            # a manifest that is damaged itself: let _verify() say so
            if isinstance(manifest, str) or manifest.kind == "full":
                return step

        # None is left. If there ever was one, do not start the run again.
        quarantined = [entry.path.name for entry in self.folder.quarantined()]
        traces: dict[str, list[Any]] = {
            "weights only": steps,
            "in quarantine": [name for name in quarantined if not name.startswith(".")],
            "saved according to the log": self._logged_saves()[-3:],
        }
        texts = []
        for title, names in traces.items():
            if names:
                listing = ", ".join(map(str, names))
                texts.append(f"{title}: {listing}")
        if texts:
            raise UserError(
                "checkpoint.none",
                f"no complete checkpoint in {self.folder.path} ({'; '.join(texts)}): restore "
                "one, or restart at step 1 with --checkpoint.fresh, which archives the run",
                facts=traces,
            )
        return None

    def _logged_saves(self) -> list[int]:
        """Return the steps that the log records as saved: it may outlive purged checkpoints."""
        if not self.run.log_file.exists():
            return []

        saved: list[int] = []
        for event in read_log(self.run.log_file):
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

        # This rank's share: the largest files are dealt out first.
        names = [name for name in manifest.files if name != METADATA]
        names.sort(key=lambda name: (-manifest.files[name].bytes, name))
        share = names[self._rank_zero.rank :: self._rank_zero.world_size]

        faults: list[str] = []
        metadata = b""
        unreadable: OSError | None = None
        try:
            # a rank without a share must see the folder, too
            checked = share or names[-1:]
            faults = manifests.find_faults(path, manifest, checked, hashes=bool(share))
            if self._rank_zero.rank == 0:
                faults += _folder_faults(path, manifest, weights_suffice)
                if METADATA in manifest.files:
                    metadata = manifests.read_file(path, manifest, METADATA)
        except DamagedCheckpoint as error:
            faults.append(str(error))
        except OSError as error:
            faults = [str(error)]
            unreadable = error
        host = socket.gethostname()
        host_faults = [f"{host}: {fault}" for fault in faults]
        faults_by_rank = self._rank_zero.gather(host_faults)

        def judge() -> Verified | list[str]:
            """Decide on rank 0: it moves files, so its view of them counts."""
            if unreadable is not None:
                raise UserError(
                    "checkpoint.unreadable",
                    f"{path} cannot be read on {host}: {unreadable}",
                    path=path,
                )
            if 0 in faults_by_rank:
                return faults

            if faults_by_rank:  # of other ranks only: perhaps one node's bad mount
                verified = _value_or_fault(lambda: manifests.verify(path, workers=4))
                if isinstance(verified, str):
                    return [verified]
                rank, rank_faults = next(iter(faults_by_rank.items()))
                raise UserError(
                    "checkpoint.node_mismatch",
                    f"{path} is complete for rank 0 on {host}, but rank {rank} reports: "
                    f"{rank_faults[0]}. "
                    "Check that node's mount; nothing was moved",
                    path=path,
                    rank=rank,
                )

            # last, because pickles of a damaged file must not be opened
            contents = _value_or_fault(check_safe, path, metadata)
            if isinstance(contents, str):
                return [contents]
            return Verified(manifest, contents)

        return self._rank_zero.run(judge)

    def _quarantine(self, path: Path, reason: str, title: str = "DAMAGED CHECKPOINT") -> None:
        """Move a checkpoint to quarantine and log it; rank 0 only."""
        new_path = self.folder.quarantine(path, reason)
        logger.warning(f"{title}: {path}: {reason}. Moved to {new_path}")
        self._event(
            "quarantine",
            checkpoint=path.name,
            reason=reason,
            moved_to=str(new_path),
        )

    def _read(self, path: Path, checkpoint: Verified, *, model_only: bool = False) -> None:
        """Load into this rank's shards. Raises UserError if the model differs."""
        model = self._model.state_dict()
        _check_model(path, checkpoint.metadata, model)

        optimizer = self._states.get("optimizer")
        if optimizer is not None and not model_only:
            _check_optimizer(path, checkpoint.metadata, optimizer.state_dict())

        # dcp reads into the tensors of `state`, and lets Stateful objects load theirs.
        state = dict(model) if model_only else self._states | model
        dcp.load(
            state,
            storage_reader=SafeReader(path, checkpoint.metadata),
            planner=SafePlanner(),
            process_group=self._rank_zero.group,
        )
        self._model.load_state_dict(state)

    def _load_initial(self, path: Path, model_only: bool) -> None:
        """Start a run from the checkpoint folder `path`."""
        checkpoint = self._verify(path, weights_suffice=model_only)
        if not isinstance(checkpoint, Verified):
            raise _initial_load_error(path, checkpoint)
        self._read(path, checkpoint, model_only=model_only)

        manifest = checkpoint.manifest
        content = "weights" if model_only else "full state"
        logger.info(f"started from {path}: {content} of step {manifest.step}")
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
    faults = manifests.unknown_files(path, manifest)
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
            state = "missing" if size is None else f"of shape {tuple(size)}"
            raise UserError(
                "checkpoint.other_model",
                f"{path} is of another model: {name} is {state}, expected {tuple(tensor.shape)}",
                shared=True,
                name=name,
            )


def _check_optimizer(path: Path, metadata: Metadata, optimizer: Mapping[str, Any]) -> None:
    """Raise UserError unless the checkpoint has the state of this job's optimizer."""
    for name in optimizer:
        if name.startswith("state.") and f"optimizer.{name}" not in metadata.state_dict_metadata:
            raise UserError(
                "checkpoint.other_optimizer",
                f"{path} has no {name.removeprefix('state.')}: it is of another optimizer. Restore "
                "optimizer.name, or start a new run from the weights: "
                f"--checkpoint.initial_load_path {path} and another --job.dump_folder",
                shared=True,
                name=name,
            )
