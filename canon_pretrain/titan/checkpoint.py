"""Save a run's state; replaces torchtitan's CheckpointManager. resume.py loads it.

    preflight -> copy to CPU memory -> VerifiedWriter in the background -> retention

Global rank 0 decides, over the group of RankZero; a save uses that group while it is written.
"""

import functools
import shutil
import socket
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed._state_dict_utils import _copy_state_dict
from torch.distributed.checkpoint.state_dict_saver import _stateful_to_state_dict
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only
from torchtitan.components.checkpoint import ModelWrapper
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.lr_scheduler import LRSchedulersContainer
from torchtitan.tools.logging import logger

from canon_pretrain.checkpoint.folder import CheckpointFolder, remove_tree
from canon_pretrain.checkpoint.retention import Retention, held_steps
from canon_pretrain.checkpoint.safe_load import describe
from canon_pretrain.checkpoint.weights import strip_to_weights
from canon_pretrain.checkpoint.writer import VerifiedWriter
from canon_pretrain.core.errors import UserError
from canon_pretrain.core.files import reserve
from canon_pretrain.run.background import Background
from canon_pretrain.run.folder import RunFolder
from canon_pretrain.run.launches import RunFacts, already_applied, mark_applied
from canon_pretrain.run.session import LOST_LOCK, Session
from canon_pretrain.titan.device import has_accelerator
from canon_pretrain.titan.job_config import Checkpoint
from canon_pretrain.titan.metrics import CanonMetrics
from canon_pretrain.titan.optimizers import Optimizers
from canon_pretrain.titan.resume import RankZero, Resume

CLOSE_TIMEOUT_S = 5.0
DISK_HINT = "Make room, or save elsewhere with --job.dump_folder or --checkpoint.folder"
ALERT_AFTER_FAILURES = 3
"""Consecutive failed saves from which on each one logs an alert."""


def full_bytes(weights: Mapping[str, Tensor], num_moments: int) -> int:
    """Return the bytes of a full checkpoint: weights, as wide moments, and 1 % + 1 MiB."""
    num_bytes = 0
    itemsize = 0
    for tensor in weights.values():
        num_bytes += tensor.nbytes
        itemsize = max(itemsize, tensor.itemsize)
    num_bytes += num_moments * itemsize
    return int(1.01 * num_bytes) + (1 << 20)


def check_room(folder: CheckpointFolder, num_bytes: int) -> None:
    """Raise UserError if `folder` cannot be created or lacks room for `num_bytes`."""
    if problem := folder.make_room(num_bytes):
        raise UserError("checkpoint.no_room", f"{problem}. {DISK_HINT}", path=folder.path)

    # Free space does not tell whether this user may write there.
    try:
        folder.make_trial()
    except OSError as error:
        raise UserError(
            "checkpoint.not_writable",
            f"{folder.path}: {error.strerror}. {DISK_HINT}",
            path=folder.path,
        ) from None


def host_buffer(tensor: Tensor) -> Tensor:
    """Return an uninitialized tensor like `tensor` in CPU memory, pinned if there is a GPU.

    Of a DTensor, a DTensor with this rank's shard. torch's `_create_cpu_state_dict` copies each
    tensor into pageable memory, for which the host waits, and leaves scalars there.
    """
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    can_pin = has_accelerator() and local.numel() > 0
    return torch.empty_like(tensor, device="cpu", pin_memory=can_pin)


class Staging:
    """A copy of the state in (pinned) CPU memory, complete at the CUDA event `copied`."""

    def __init__(self) -> None:
        self._buffers: dict[str, Any] | None = None
        self._stream: torch.cuda.Stream | None = None
        self.copied: torch.cuda.Event | None = None
        self._pending: torch.cuda.Event | None = None
        """`copied`, until the main stream waits for it."""

    def copy(self, state: dict[str, Any]) -> dict[str, Any]:
        """Start to copy `state` (tensors, numbers, Stateful objects); return the copy."""
        state = _stateful_to_state_dict(state)
        if self._buffers is None or self._buffers.keys() != state.keys():
            self._buffers = tree_map_only(Tensor, host_buffer, state)
        if not has_accelerator():
            return self._copy(state)

        # In a separate stream, so that the next forward and backward passes overlap with the copy.
        self._stream = self._stream or torch.cuda.Stream()
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            staged = self._copy(state)
            self.copied = self._pending = self._stream.record_event()
        return staged

    def _copy(self, state: dict[str, Any]) -> dict[str, Any]:
        assert self._buffers is not None
        return _copy_state_dict(state, self._buffers, non_blocking=True, type_check=False)

    def wait_on_stream(self) -> None:
        """Make the current stream wait for the copy; call before the state changes."""
        if self._pending is not None:
            torch.cuda.current_stream().wait_event(self._pending)
            self._pending = None


class CanonCheckpointManager:
    """A run's checkpoints. Public methods are collective and called in the same order."""

    def __init__(
        self,
        dataloader: BaseDataLoader | None,
        model_parts: list[nn.Module],
        optimizers: Optimizers,
        lr_schedulers: LRSchedulersContainer,
        states: dict[str, Any],
        checkpoint_config: Checkpoint,
        sd_adapter: object | None = None,
        base_folder: str = "",
        *,
        session: Session,
        metrics: CanonMetrics,
        launch: RunFacts | None,
    ) -> None:
        self.config = checkpoint_config
        self.enable = checkpoint_config.enable
        self.run = RunFolder(Path(base_folder))
        self.folder = CheckpointFolder(
            self.run.path / checkpoint_config.folder, may_change=session.is_owner
        )
        self._event = metrics.event
        self._flush = metrics.flush
        self._note = session.note
        self._is_owner = session.is_owner
        self._run_id = launch.run_id if launch is not None else None
        self._launch_number = launch.launches if launch is not None else None

        # What is saved: the model's tensors, and everything else by name.
        self._model = ModelWrapper(model_parts)
        self._num_moments = optimizers.num_moments
        self.states = states | {
            "optimizer": optimizers,
            "dataloader": dataloader,
            "lr_scheduler": lr_schedulers,
        }

        # The save in progress and the outcome of earlier ones.
        self.staging = Staging()
        self.rank_zero = RankZero()
        self._rank = self.rank_zero.rank
        self._device = torch.cuda.current_device() if torch.cuda.is_available() else 0
        self._save: _Save | None = None
        self.saved_step = 0
        """The newest step with a complete checkpoint that this launch knows of."""
        self.failures = 0
        """Consecutive failed saves."""
        self._one_shot_option: str | None = None
        """A one-shot option, marked as applied when training begins."""

        self._retaining = Background(self._retain, "retention")
        self._retention = Retention(
            self.folder,
            checkpoint_config.keep_latest_k,
            holds=lambda: held_steps(self.run.path),
            max_held=checkpoint_config.max_held,
            strip=strip_to_weights,
            run_id=lambda: launch.run_id if launch else None,
        )

    def load(self, step: int = -1) -> bool:
        """Resume from `step` (-1: the newest complete one); return whether there was one."""
        if not self.enable:
            return False

        # A restart of the same job must not go back to `step` once more.
        if step != -1:
            option = f"checkpoint.load_step={step}"
            if self.rank_zero.run(lambda: already_applied(self.run.applied_file, option)):
                logger.info(
                    f"NOTE: {option} was already applied by this job: resuming from the newest"
                )
                step = -1
            else:
                self._one_shot_option = option

        search = Resume(
            folder=self.folder,
            run=self.run,
            rank_zero=self.rank_zero,
            model=self._model,
            states=self.states,
            event=self._event,
        )
        loaded_step = search.resume(
            step,
            initial=self.config.initial_load_path or "",
            initial_model_only=self.config.initial_load_model_only,
        )
        if loaded_step is None:
            return False
        self.saved_step = loaded_step
        self._note(checkpoint_step=loaded_step)
        return True

    def begin(self) -> None:
        """Archive later steps of an abandoned branch; call after `load`, before training."""
        if not self.enable:
            return
        if not self.rank_zero.run(self._is_owner):
            raise UserError("lock.lost", f"stopped before step 1: {LOST_LOCK}", shared=True)
        self.check_room()
        if self.saved_step:
            self.rank_zero.run(lambda: self._archive_later_steps(self.saved_step))

    def _archive_later_steps(self, step: int) -> bool:
        """Archive checkpoints after `step`; return whether `step` is saved; rank 0 only."""
        archive = self.folder.archive_after(step, self.run.path, f"resumed from step {step}")
        if archive is not None:
            logger.warning(
                f"archived checkpoints after step {step}, an abandoned branch: {archive}"
            )
            self._event("archive", step=step, moved_to=str(archive))

        # only now has the run changed: a launch that fails earlier may apply the option again
        if self._one_shot_option:
            mark_applied(self.run.applied_file, self._one_shot_option)
        return step in self.folder.steps()

    def roll_back(self, step: int) -> None:
        """Make `step` the newest checkpoint: archive later ones."""
        self.wait()
        if self.rank_zero.run(lambda: self._archive_later_steps(step)):
            self.saved_step = step

    def is_due(self, step: int) -> bool:
        if step == 1 and self.config.enable_first_step_checkpoint:
            return self.enable
        return self.enable and step % self.config.interval == 0

    def save(self, curr_step: int, last_step: bool = False) -> None:
        """Begin a checkpoint if it is due; wait for the last one."""
        if self.enable and last_step:
            self.wait()  # it may be the one being written, which ranks finish at different times
            if curr_step != self.saved_step:
                self.begin_save(curr_step)
            self.wait()
        elif self.is_due(curr_step):
            self.begin_save(curr_step)

    def begin_save(self, step: int) -> None:
        """Begin a checkpoint of the present state as `step`, due or not."""
        begin = time.monotonic()

        # Preflight. A step is skipped while the previous save is being written: asked by the store,
        # as the save's thread uses the group. And there must be room.
        if self.rank_zero.run_by_store(lambda: self._is_saving(step)):
            return
        self.wait()
        problem = self.rank_zero.run(self._save_problem)
        if problem is not None:
            self._remove_unfinished(step)
            self._report_failure(step, problem)
            return

        # Copy, which training waits for only before it changes the state; write in a thread.
        staged = self.staging.copy(self.states | self._model.state_dict())
        writer = VerifiedWriter(
            self.folder.step_path(step),
            self.folder.saving_path(step),
            step=step,
            world_size=self.rank_zero.world_size,
            run_id=self._run_id,
            launch=self._launch_number,
            may_commit=self._may_commit,
        )
        write = functools.partial(self._write, staged, writer, self.staging.copied)
        self._save = _Save(step, begin, writer, write)
        if self.config.async_mode == "disabled":
            self.wait()
        else:
            self._save.stall_s = time.monotonic() - begin

    def _is_saving(self, step: int) -> bool:
        """Return whether the previous save is in progress, and report it; rank 0 only."""
        if self._save is None or self._save.future.done():
            return False
        self._event("checkpoint_slow", step=step, saving=self._save.step)
        logger.warning(f"step {step} not saved: step {self._save.step} is still being written")
        return True

    def _save_problem(self) -> str | None:
        """Return why a save cannot begin now, or None; rank 0 only."""
        if not self._is_owner():
            return LOST_LOCK
        try:
            return self.folder.make_room(self.checkpoint_bytes())
        except OSError as error:  # such as a stale NFS handle
            return f"{self.folder.path} cannot be read: {error}"

    def checkpoint_bytes(self) -> int:
        return full_bytes(self._model.state_dict(), self._num_moments)

    def check_room(self) -> None:
        """Raise UserError on all ranks if one could not save its file."""
        total_bytes = self.checkpoint_bytes()
        self.rank_zero.run(lambda: check_room(self.folder, total_bytes))

        # Each rank reserves the size of its file, under the name that it will have.
        trial = self.folder.trial_path
        num_bytes = total_bytes // self.rank_zero.world_size
        faults = []
        try:
            reserve(trial / f"__{self._rank}_0.distcp", num_bytes)
        except OSError as error:
            host = socket.gethostname()
            faults.append(f"{host}, rank {self._rank}: {error.strerror}")
        faults_by_rank = self.rank_zero.gather(faults)
        self.rank_zero.run(lambda: remove_tree(trial))
        if faults_by_rank:
            text = "; ".join(faults[0] for faults in faults_by_rank.values())
            raise UserError(
                "checkpoint.not_writable",
                f"cannot write {num_bytes:,} bytes in {self.folder.path}: {text}. {DISK_HINT}",
                shared=True,
                ranks=list(faults_by_rank),
            )

    def _write(
        self, staged: dict[str, Any], writer: VerifiedWriter, copied: torch.cuda.Event | None
    ) -> None:
        """Write the state once it is copied; in a thread of the save, on all ranks."""
        if copied is not None:
            torch.cuda.set_device(self._device)  # a new thread starts on the first GPU
            copied.synchronize()
        try:
            dcp.save(staged, storage_writer=writer, process_group=self.rank_zero.group)
        except BaseException:
            self._remove_unfinished(writer.step)
            raise

        # its files were hashed as they were written: retention need not read them again
        if self._rank == 0:
            self._retention.mark_verified(writer.step)

    def _remove_unfinished(self, step: int) -> None:
        if self._rank == 0 and self._is_owner():  # else another launch may be saving there
            shutil.rmtree(self.folder.saving_path(step), ignore_errors=True)  # to free its room

    def _may_commit(self) -> bool:
        self._flush()
        return self._is_owner()

    def poll(self) -> None:
        """Report a save that has ended; does not wait."""
        if self._save is not None and self._save.future.done():
            self.wait()

    def wait(self) -> None:
        """Wait for the save in progress and report its outcome."""
        save = self._save
        if save is None:
            return
        self._save = None
        if error := save.future.exception():
            self._report_failure(save.step, describe(error))
            return
        self.saved_step = save.step
        self.failures = 0

        # Rank 0 logs it, and deletes old checkpoints in the background.
        manifest = save.writer.manifest
        if manifest is None:  # not rank 0
            return
        seconds = time.monotonic() - save.begin
        self._event(
            "checkpoint",
            step=save.step,
            bytes=manifest.total_bytes,
            seconds=seconds,
            stall_seconds=save.stall_s or seconds,
        )
        self._note(
            checkpoint_step=save.step,
            checkpoint_saved=manifest.saved,
            checkpoint_failures=0,
        )
        self._retaining.request()

    def _report_failure(self, step: int, reason: str) -> None:
        """Report a failed save, with an alert from ALERT_AFTER_FAILURES in a row."""
        self.failures += 1
        if self._rank:
            return
        self._event("checkpoint_failed", step=step, reason=reason, in_a_row=self.failures)
        self._note(checkpoint_failures=self.failures)

        alert = ""
        if self.failures >= ALERT_AFTER_FAILURES:
            alert = (
                f"\n!!! {self.failures} saves in a row failed: a crash loses all steps after "
                f"{self.saved_step} !!!"
            )
        logger.warning(
            f"step {step} NOT SAVED: {reason}. Training continues; the next interval tries again"
            f"{alert}"
        )

    def _retain(self) -> None:
        """Delete old checkpoints; in the background, rank 0 only."""
        try:
            outcome = self._retention.apply()
        except Exception as error:  # retention must not end the run
            logger.warning(f"old checkpoints: {type(error).__name__}: {error}")
            return

        for step, reason in outcome.bad.items():
            logger.warning(f"DAMAGED CHECKPOINT: step {step}: {reason}. Moved to quarantine")
            self._event("quarantine", checkpoint=f"step-{step}", reason=reason)
        for problem in outcome.errors:
            logger.warning(f"old checkpoints: {problem}")

        if outcome.deleted or outcome.stripped:
            self._event("retention", deleted=outcome.deleted, weights_only=outcome.weights_only)
        self._note(weights_only=outcome.weights_only)

    def finish_retention(self) -> None:
        """Wait for retention in the background; after the last step only."""
        self._retaining.wait(threading.TIMEOUT_MAX)

    def close(self) -> None:
        """Wait briefly for background work: ranks that a save needs may be gone."""
        if self._save is not None:
            wait([self._save.future], timeout=CLOSE_TIMEOUT_S)
        self._retaining.wait(CLOSE_TIMEOUT_S)
        self._retaining.close()


class _Save:
    """A save in progress, in a daemon thread."""

    def __init__(
        self, step: int, begin: float, writer: VerifiedWriter, write: Callable[[], None]
    ) -> None:
        self.step = step
        self.begin = begin
        self.writer = writer
        self.stall_s = 0.0
        """How long training waited; 0: for the whole save."""
        self.future: Future[None] = Future()
        threading.Thread(target=self._run, args=(write,), daemon=True).start()

    def _run(self, write: Callable[[], None]) -> None:
        try:
            write()
            self.future.set_result(None)
        except BaseException as error:
            self.future.set_exception(error)
