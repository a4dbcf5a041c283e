"""A job's data: opened once per node, broadcast by rank 0, prefetched in batches of tensors."""

import contextlib
import copy
import json
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from queue import Empty, Queue
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.loss import IGNORE_INDEX
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.tools.logging import logger

from canon_pretrain.core.errors import UserError
from canon_pretrain.data.held_out import joined_fingerprint, open_held_out, open_validation
from canon_pretrain.data.loader import BatchLoader, samples_digest
from canon_pretrain.data.mixture import Mixture
from canon_pretrain.data.sampler import least_tokens
from canon_pretrain.data.shards import ShardError, TokenShards
from canon_pretrain.titan.device import has_accelerator
from canon_pretrain.titan.job_config import EXCLUDED, HELD_OUT, CanonJobConfig
from canon_pretrain.titan.tasks import TaskWindows

T = TypeVar("T")
OFF_HINT = "To skip validation: --validation.enable False"
IDENTITY_FIELDS = ("fingerprint", "seed", "mode", "seq_len", "global_batch")
"""Fields of the loader's state that are also part of the run's identity."""
LOADER_CLOSE_TIMEOUT_S = 10.0
"""How long to wait for a pending read when the run ends."""
ITERATOR_CLOSE_TIMEOUT_S = 0.5


@dataclass(frozen=True)
class OpenedData:
    """Training data and the held-out split of each folder, with verified commit records."""

    training: Mixture | TaskWindows
    held_out: list[TokenShards | None]
    notices: list[str]
    identity: dict[str, Any]
    """EXCLUDED and HELD_OUT, each if there is any; a task's name and settings."""
    prompts: list[list[int]] = field(default_factory=list)
    """Token ids of `samples.prompts`, if samples are on."""

    @property
    def fingerprints(self) -> list[str]:
        return [self.training.fingerprint, *map(str, self.identity.values())]


def open_data(job: CanonJobConfig) -> OpenedData:
    """Open all data of `job`; set its `model.vocab_size` and `validation.enable`."""
    windows = open_task(job)
    if windows is not None:
        return _open_task_data(job, windows)

    with open_shards(job) as training:
        identity = {}
        if training.excluded is not None:
            identity[EXCLUDED] = training.excluded.sha256
        notices = []
        vocab_size = job.model_args.vocab_size
        if vocab_size != training.vocab_size:  # as imported models may have
            notices.append(
                f"model.vocab_size = {vocab_size:,}: no text has the ids from "
                f"{training.vocab_size:,} on"
            )
        prompts: list[list[int]] = []
        if job.samples.interval:
            from canon_pretrain.titan.samples import read_prompts  # which loads a tokenizer

            prompts = read_prompts(job, training)
        if job.validation.enable is False:
            return OpenedData(
                training=training,
                held_out=[],
                notices=notices,
                identity=identity,
                prompts=prompts,
            )

        held_out = _open_held_out(job, training)
        notices += _resolve_validation(job, held_out)
        return OpenedData(
            training=training,
            held_out=held_out,
            notices=notices,
            identity=identity | {HELD_OUT: joined_fingerprint(held_out)},
            prompts=prompts,
        )


def _open_task_data(job: CanonJobConfig, windows: TaskWindows) -> OpenedData:
    """Return the data of a task. Its settings are part of the run's identity."""
    settings = windows.task.settings | {"name": windows.task.name}
    del settings["seq_len"]  # as training.seq_len
    # lists for tuples, as read from JSON
    task_keys = {f"data.task.{name}": value for name, value in settings.items()}
    identity = json.loads(json.dumps(task_keys))
    if job.validation.enable is None:
        job.validation.enable = True
    if job.validation.enable:
        identity[HELD_OUT] = windows.fingerprint
    return OpenedData(windows, [], [], identity)


def _open_held_out(job: CanonJobConfig, training: Mixture) -> list[TokenShards | None]:
    """Open the text to validate on, of each folder. Raises UserError if it does not fit."""
    # data of `validation.path` may be all for validation
    open_part = open_validation if job.validation.path else open_held_out
    try:
        parts = [open_part(folder) for folder in validation_folders(job)]
    except ShardError as error:
        raise UserError("data.held_out", f"held-out split: {error}. {OFF_HINT}") from None

    # Losses are comparable only in the same tokens, and mean something only on other text.
    training_fingerprints = {source.fingerprint for source in training.sources}
    for part in filter(None, parts):
        part.close()
        origin = f"{part.folder} (validation.path = {job.validation.path!r})"
        has_same_size = part.vocab_size == training.vocab_size
        if not has_same_size or part.tokenizer_sha256 != training.tokenizer_sha256:
            raise UserError(
                "data.tokenizers_differ",
                f"{origin} has another tokenizer: rebuild it with the training data's. {OFF_HINT}",
            )
        if part.fingerprint in training_fingerprints:
            raise UserError(
                "data.overlap",
                f"{origin} is also training data: choose another text. {OFF_HINT}",
            )
    return parts


def open_task(job: CanonJobConfig) -> TaskWindows | None:
    """Return the windows of the job's task, if any. Raises UserError if its ids do not fit."""
    task = job.task
    if task is None:
        return None
    if job.model.vocab_size is None:
        job.model.vocab_size = task.vocab_size

    vocab_size = job.model_args.vocab_size
    if vocab_size < task.vocab_size:
        raise UserError(
            "data.vocab_size",
            f"model.vocab_size = {vocab_size}, but task {task.name} has ids up to "
            f"{task.vocab_size - 1}: unset model.vocab_size",
            given=vocab_size,
            expected=task.vocab_size,
        )
    return TaskWindows(task)


def open_shards(job: CanonJobConfig) -> Mixture:
    """Open the training data. Raises UserError if they do not fit the job."""
    if not job.data.folders:
        raise UserError("data.path_unset", "data.path is not set: expected a data_prep folder")
    mixture = Mixture.open(job.data.folders, job.data.shares, job.data.exclude)

    # Shards may have fewer ids than the model, but no more.
    if job.model.vocab_size is None:
        job.model.vocab_size = mixture.vocab_size
    args = job.model_args
    if mixture.vocab_size > args.vocab_size:
        raise UserError(
            "data.vocab_size",
            f"model.vocab_size = {args.vocab_size}, but {job.data.folders[0]} has "
            f"{mixture.vocab_size}: unset model.vocab_size, or choose other shards",
            given=args.vocab_size,
            expected=mixture.vocab_size,
        )

    num_needed = least_tokens(job.data.order, job.training.seq_len)
    for folder, source in zip(job.data.folders, mixture.sources, strict=True):
        if args.document_mask and source.eos_id != args.eos_id:
            raise UserError(
                "data.eos_id",
                f"model.document_mask: model.eos_id = {args.eos_id}, but documents of {folder} "
                f"end with {source.eos_id}: set model.eos_id = {source.eos_id}",
                folder=folder,
                expected=source.eos_id,
            )
        if source.num_tokens < num_needed:
            raise UserError(
                "data.too_short",
                f"{folder} has {source.num_tokens:,} training tokens; data.order = "
                f"{job.data.order!r} with training.seq_len = {job.training.seq_len} needs at "
                f"least {num_needed}",
                folder=folder,
                num_tokens=source.num_tokens,
            )
    return mixture


def validation_folders(job: CanonJobConfig) -> list[str]:
    return [job.validation.path] if job.validation.path else job.data.folders


def _resolve_validation(job: CanonJobConfig, parts: Sequence[TokenShards | None]) -> list[str]:
    """Set `validation.enable`; return notices. Raises UserError if it is on without data."""
    folders = validation_folders(job)
    missing = [folder for folder, part in zip(folders, parts, strict=True) if part is None]
    problem = f"no held-out split in {', '.join(missing)} (--holdout): set validation.path"
    if job.validation.enable and missing:
        raise UserError(
            "data.no_validation",
            f"validation.enable = True, but {problem}, or unset validation.enable",
            folders=missing,
        )

    # unset: on if any folder has a held-out split
    job.validation.enable = len(missing) < len(folders)
    return [problem] if missing else []


def broadcast_data(
    job: CanonJobConfig, local_data: OpenedData | None, compared: T | None
) -> tuple[OpenedData, T]:
    """Return rank 0's data and `compared` on all ranks; UserError if a node's data differ.

    `local_data`: of the first rank of a node, which has opened the data there.
    """
    # Rank 0 has set these keys of the job when it opened the data.
    answer = [(local_data, compared, job.model.vocab_size, job.validation.enable)]
    dist.broadcast_object_list(answer, src=0)
    data, compared, job.model.vocab_size, job.validation.enable = answer[0]
    assert data is not None and compared is not None

    local_fingerprints = local_data and (socket.gethostname(), local_data.fingerprints)
    all_fingerprints: list[tuple[str, list[str]] | None] = [None] * dist.get_world_size()
    dist.all_gather_object(all_fingerprints, local_fingerprints)
    different = {
        host: fingerprints
        for host, fingerprints in filter(None, all_fingerprints)
        if fingerprints != data.fingerprints
    }
    if different:
        raise UserError(
            "data.differs_between_nodes",
            f"{', '.join(job.data.folders) or 'data.task'} differs between nodes: "
            f"{data.fingerprints} on rank 0's, {different} on others. "
            "Copy rank 0's data, or use a shared folder",
            shared=True,
            nodes=different,
        )
    return data, compared


class ReadAhead(Generic[T]):
    """Results of `read()` in order, prefetched by a thread that is about `depth` ahead."""

    def __init__(self, read: Callable[[], T], depth: int) -> None:
        self._read = read
        self._is_closed = False
        # a result is packed in a tuple, in case it is an exception itself
        self._results: Queue[tuple[T] | BaseException] = Queue(depth)
        # a daemon, so that a hanging disk does not keep the process from exiting
        self._thread = threading.Thread(target=self._run, name="read ahead", daemon=True)
        self._thread.start()

    def take(self) -> T:
        if self._is_closed:
            raise RuntimeError("take() after close()")
        result = self._results.get()
        if isinstance(result, BaseException):
            raise result
        return result[0]

    def close(self, timeout_s: float | None = None) -> bool:
        """Stop the thread after its current read; return whether it stopped within the timeout."""
        self._is_closed = True
        with contextlib.suppress(Empty):  # the thread may wait for a free slot
            while True:
                self._results.get_nowait()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            while not self._is_closed:
                self._results.put((self._read(),))
        except BaseException as error:
            self._results.put(error)


class _Batch(NamedTuple):
    inputs: torch.Tensor
    labels: torch.Tensor
    digest: int
    begins_step: bool
    state: dict[str, Any]


class CanonDataLoader(BaseDataLoader):
    """Endless micro-batches of this rank; the state is that of the last one taken.

    Yields ({"input": int64 [b, T]}, labels int64 [b, T]), labels one token ahead, pinned for a GPU.
    A thread prefetches `read_ahead` of them. A loaded state may differ in `may_change`.
    """

    def __init__(
        self, loader: BatchLoader, read_ahead: int = 0, may_change: Sequence[str] = ()
    ) -> None:
        self.loader = loader
        self.is_masked = loader.is_masked
        self._depth = read_ahead
        self._may_change = may_change
        self._ahead: ReadAhead[_Batch] | None = None
        self._state = loader.state_dict()
        self._device = torch.cuda.current_device() if has_accelerator() else None
        self._digests: list[int] = []

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        try:
            while True:
                if self._depth and self._ahead is None:
                    self._ahead = ReadAhead(self._read, self._depth)
                batch = self._ahead.take() if self._ahead else self._read()

                # The digest of a step: the sum of those of its micro-batches, modulo 2**64.
                if batch.begins_step:
                    self._digests.append(0)
                step_digest = self._digests[-1] + batch.digest
                self._digests[-1] = step_digest % (1 << 64)
                self._state = batch.state
                yield {"input": batch.inputs}, batch.labels
        finally:
            self._stop_reading(ITERATOR_CLOSE_TIMEOUT_S)

    def _read(self) -> _Batch:
        begins_step = self.loader.at_step_start
        samples = self.loader.next_batch()
        ids = targets = samples
        if self.is_masked:  # ~id: no label
            ids = np.where(samples < 0, ~samples, samples)
            targets = np.where(samples < 0, IGNORE_INDEX, samples)

        # copied by numpy, because torch would start its own threads for a large copy
        inputs = torch.from_numpy(np.ascontiguousarray(ids[:, :-1]))
        labels = torch.from_numpy(np.ascontiguousarray(targets[:, 1:]))
        if self._device is not None:
            torch.cuda.set_device(self._device)  # a new thread starts on the first GPU
            inputs = inputs.pin_memory()
            labels = labels.pin_memory()
        return _Batch(
            inputs,
            labels,
            digest=samples_digest(samples),
            begins_step=begins_step,
            state=self.loader.state_dict(),
        )

    def close(self, timeout_s: float | None = LOADER_CLOSE_TIMEOUT_S) -> None:
        """Stop the thread; prefetched batches that were not taken will be read again."""
        if not self._stop_reading(timeout_s):
            logger.warning(f"data loader not closed: a read takes more than {timeout_s} s")

    def _stop_reading(self, timeout_s: float | None) -> bool:
        if self._ahead is not None:
            if not self._ahead.close(timeout_s):
                return False
            self._ahead = None
            self.loader.load_state_dict(self._state)
        return True

    @property
    def source_tokens(self) -> dict[str, int]:
        """Tokens drawn by all ranks so far, by folder name."""
        return dict(zip(self.loader.source_names, self._state["source_tokens"], strict=True))

    def take_digests(self) -> list[int]:
        """Return the digests of the steps since the last call."""
        digests = self._digests
        self._digests = []
        return digests

    def state_dict(self) -> dict[str, Any]:
        return copy.deepcopy(self._state)  # loading a checkpoint writes into this dict

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.close(timeout_s=None)
        self.loader.load_state_dict(state_dict, self._may_change)
        self._state = self.loader.state_dict()


def build_dataloader(
    dp_world_size: int,
    dp_rank: int,
    tokenizer: BaseTokenizer | None,
    job_config: CanonJobConfig,
    *,
    data: Mixture | TaskWindows,
    may_change: Sequence[str] = (),
) -> CanonDataLoader:
    """Build the loader for the TrainSpec; `tokenizer` is None: data are token ids."""
    # `loader` cuts the batches; CanonDataLoader makes tensors of them, ahead of training.
    training = job_config.training
    loader = BatchLoader(
        data,
        data_seed=job_config.data.data_seed,
        order=job_config.data.order,
        seq_len=training.seq_len,
        global_batch_size=training.global_batch_size,
        local_batch_size=training.local_batch_size,
        dp_rank=dp_rank,
        dp_world_size=dp_world_size,
    )
    return CanonDataLoader(loader, job_config.data.read_ahead, may_change)
