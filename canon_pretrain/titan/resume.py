"""Where a launch resumes: the newest checkpoint that is whole, proved by all ranks.

newest first -> every file's hash, shared out over the ranks -> pickles against an allow-list
damaged: into quarantine, and the next one; none left: an error, never step 1 by itself
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
"""Of what is decided by the state of a disk, whose faults last longer than a step's timeout."""


class RankZero:
    """Decisions of rank 0 that all ranks share, over a gloo group of their own; all collective."""

    def __init__(self) -> None:
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self._asked = 0

    @cached_property
    def group(self) -> dist.ProcessGroup:
        """A gloo group of all ranks that waits for disks; made at its first use, on all at once."""
        return dist.new_group(backend="gloo", timeout=IO_TIMEOUT)

    def run(self, decision: Callable[[], Any]) -> Any:
        """Return rank 0's result of `decision`; its UserError or OSError is one on all ranks."""
        group = self.group  # before a decision takes its time: making it waits for minutes only
        answer: list[Any] = [None, None]
        try:
            if self.rank == 0:
                answer[0] = decision()
        except BaseException as error:
            is_known = isinstance(error, (UserError, OSError))
            answer[1] = str(error) if is_known else f"{type(error).__name__}: {error}"
            if not is_known:
                raise
        finally:  # the others must not wait for an answer that never comes
            dist.broadcast_object_list(answer, src=0, group=group)
        if answer[1] is not None:
            raise UserError("todo.resume", answer[1], shared=True)
        return answer[0]

    def run_by_store(self, decision: Callable[[], bool]) -> bool:
        """Do as `decide` does, by the store: for no disk, also while a thread uses the group."""
        self._asked += 1
        store, key = dist.distributed_c10d._get_default_store(), f"rank_zero/{self._asked}"
        if self.rank == 0:
            store.set(key, str(int(decision())))
        return store.get(key) == b"1"

    def gather(self, own: list[str]) -> dict[int, list[str]]:
        """Return the texts of each rank that has some, by rank."""
        everyone: list[list[str]] = [[] for _ in range(self.world_size)]
        dist.all_gather_object(everyone, own, group=self.group)
        return {rank: texts for rank, texts in enumerate(everyone) if texts}


class Verified(NamedTuple):
    """What rank 0 has read of a checkpoint whose every byte is what was saved."""

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
        """Load step `asked`, or with -1 the newest whole one; return the step, if any; collective.

        Without checkpoints the state may come from `initial`. UserError if none is whole.
        """
        if asked == -1:
            self._rank_zero.run(self._quarantine_stale_saves)
        while (step := self._rank_zero.run(lambda: self._next_candidate(asked))) is not None:
            path, begin = self.folder.step_path(step), time.monotonic()
            found = self._verify(path)
            if isinstance(found, Verified):
                self._read(path, found)
                older = "" if found.manifest.run_id else " (it names no run, as older ones)"
                seconds = time.monotonic() - begin
                logger.info(f"took up {path}{older}, verified and read in {seconds:.1f} s")
                return int(step)
            text = "; ".join(found)
            if asked != -1:
                fault = f"checkpoint.load_step = {asked}: {path} is damaged: {text}"
                raise UserError("todo.resume", fault, shared=True)
            self._rank_zero.run(functools.partial(self._quarantine, path, text))
        if initial:
            self._load_initial(Path(initial), initial_model_only)
        return None

    def _quarantine_stale_saves(self) -> None:
        """Move checkpoints that a launch committed after another took the run over; rank 0 only."""
        newest = newest_launch(self.run) or {}
        begin, taker = newest.get("from_step"), newest.get("launch")
        if not isinstance(begin, int) or taker is None:
            return
        for step in self.folder.steps():
            path = self.folder.step_path(step)
            manifest = _value_or_fault(Manifest.read, path)
            launch = None if isinstance(manifest, str) else manifest.launch
            if step > begin and launch is not None and launch < taker:
                text = f"launch {launch} saved step {step} after launch {taker} had taken the run "
                text += f"over at step {begin}"
                self._quarantine(path, text, "CHECKPOINT OF A LAUNCH THAT WAS TAKEN OVER")

    def _next_candidate(self, asked: int) -> int | None:
        """Return the step to try next, None to start at step 1; rank 0 only. Raises UserError."""
        steps = self.folder.steps()
        if asked != -1 and asked not in steps:
            there = f"steps that are there: {', '.join(map(str, steps)) or 'none'}"
            raise UserError(
                "todo.resume", f"checkpoint.load_step = {asked}: not in {self.folder.path}; {there}"
            )
        if asked != -1:
            return asked
        for step in reversed(steps):
            manifest = _value_or_fault(Manifest.read, self.folder.step_path(step))
            if isinstance(manifest, str) or manifest.kind == "full":  # or to be found damaged
                return step
        aside = [entry.path.name for entry in self.folder.quarantined()]
        facts: dict[str, list[Any]] = {
            "steps with weights alone": steps,
            "in quarantine": [name for name in aside if not name.startswith(".")],
            "steps that the log says were saved": self._logged_saves()[-3:],
        }
        if texts := [f"{what}: {', '.join(map(str, x))}" for what, x in facts.items() if x]:
            raise UserError(
                "todo.resume",
                f"{self.folder.path} holds no whole checkpoint to go on from ({'; '.join(texts)}): "
                "put one there, or begin again at step 1 with --checkpoint.fresh, which moves all "
                f"to {self.run.path / 'archive'}",
            )
        return None

    def _logged_saves(self) -> list[int]:
        """Return the steps saved by the log, which a purge of old files may spare."""
        saved: list[int] = []
        for event in read_log(self.run.log_file) if self.run.log_file.exists() else []:
            if event["event"] == "checkpoint":
                saved.append(event["step"])
            elif event["event"] == "archive":
                saved = [step for step in saved if step <= event["step"]]
        return saved

    def _verify(self, path: Path, *, weights_suffice: bool = False) -> Verified | list[str]:
        """Return a checkpoint proved whole, or its faults; each rank reads its share of files."""
        manifest = self._rank_zero.run(lambda: _value_or_fault(Manifest.read, path))
        if isinstance(manifest, str):
            return [manifest]
        faults: list[str] = []
        unreadable, metadata = None, b""
        names = [name for name in manifest.files if name != METADATA]
        names.sort(key=lambda name: (-manifest.files[name].bytes, name))
        own = names[self._rank_zero.rank :: self._rank_zero.world_size]
        try:
            # a rank without a share has to see the folder, too
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
                raise UserError("todo.resume", f"{path} cannot be read on {host}: {unreadable}")
            if 0 in found:
                return faults
            if found:  # by others alone: perhaps one node's bad mount
                whole = _value_or_fault(lambda: manifests.verify(path, workers=4))
                if isinstance(whole, str):
                    return [whole]
                rank, (text, *_) = next(iter(found.items()))
                text = f"whole for rank 0 on {host}, but rank {rank} reports: {text}"
                raise UserError(
                    "todo.resume", f"{path} is {text}. Check that node's mount; nothing was moved"
                )
            # only now: the pickles of a damaged file are not even opened
            safe = _value_or_fault(check_safe, path, metadata)
            return [safe] if isinstance(safe, str) else Verified(manifest, safe)

        return self._rank_zero.run(judge)

    def _quarantine(self, path: Path, text: str, what: str = "DAMAGED CHECKPOINT") -> None:
        """Move a checkpoint out of the way, loudly; rank 0 only."""
        kept = self.folder.quarantine(path, text)
        logger.warning(f"{what}: {path}: {text}. Moved to {kept}")
        self._event("quarantine", checkpoint=path.name, reason=text, moved_to=str(kept))

    def _read(self, path: Path, found: Verified, *, model_only: bool = False) -> None:
        """Load into this rank's shards. Raises UserError for a checkpoint of another model."""
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
        """Begin a run from the checkpoint folder `path`."""
        found = self._verify(path, weights_suffice=model_only)
        if not isinstance(found, Verified):
            raise _initial_load_error(path, found)
        self._read(path, found, model_only=model_only)
        what, manifest = "weights" if model_only else "whole state", found.manifest
        logger.info(f"began from {path}: the {what} of step {manifest.step}")
        self._event(
            "initial_load",
            checkpoint=str(path.resolve()),
            checkpoint_step=manifest.step,
            saved=manifest.saved,
            manifest_sha256=self._rank_zero.run(lambda: sha256_file(path / manifests.MANIFEST)),
            model_only=model_only,
        )


def check_initial(initial: str, model: Mapping[str, Tensor], *, model_only: bool) -> None:
    """Raise UserError unless a run of `model` can begin from `initial`; reads every file."""
    path = Path(initial)
    try:
        if faults := _folder_faults(path, manifests.verify(path, workers=4), model_only):
            raise _initial_load_error(path, faults)
        metadata = check_safe(path)
    except DamagedCheckpoint as error:
        raise _initial_load_error(path, [str(error)]) from None
    _check_model(path, metadata, model)


def _initial_load_error(initial: Path, faults: list[str]) -> UserError:
    text = "; ".join(faults) + ". Expected a whole RUN/checkpoint/step-N, or what an import wrote"
    return UserError(
        "todo.resume", f"checkpoint.initial_load_path = {initial}: {text}", shared=True
    )


def _value_or_fault(read: Callable[..., T], *arguments: Any) -> T | str:
    """Return what `read` returns, or what is wrong with the checkpoint that it reads."""
    try:
        return read(*arguments)
    except DamagedCheckpoint as error:
        return str(error)


def _folder_faults(path: Path, manifest: Manifest, weights_suffice: bool) -> list[str]:
    """Return what is wrong besides the content of the files that the manifest names."""
    strange = set(manifests.files_of(path)) - manifest.files.keys()
    faults = [f"{name} is not in the manifest" for name in sorted(strange)]
    if manifest.kind != "full" and not weights_suffice:
        faults.append("it holds weights alone and can't be resumed")
    if path.name != f"step-{manifest.step}":
        faults.append(f"its manifest is that of step {manifest.step}")
    return faults


def _check_model(path: Path, metadata: Metadata, model: Mapping[str, Tensor]) -> None:
    """Raise UserError unless the checkpoint has each tensor of `model` in its shape."""
    for name, tensor in model.items():
        size = getattr(metadata.state_dict_metadata.get(name), "size", None)
        if size != tensor.shape:
            there = "absent" if size is None else f"of shape {tuple(size)}"
            text = f"{name} is {there} there, expected {tuple(tensor.shape)}"
            raise UserError("todo.resume", f"{path} is of another model: {text}", shared=True)
