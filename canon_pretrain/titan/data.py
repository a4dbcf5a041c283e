"""A job's data: opened once per node, shared by rank 0, and read ahead in batches of tensors."""

import contextlib
import copy
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from queue import Empty, Queue
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.tools.logging import logger

from canon_pretrain.core.errors import UserError
from canon_pretrain.data.held_out import joined_fingerprint, open_held_out, open_validation
from canon_pretrain.data.loader import BatchLoader, samples_digest
from canon_pretrain.data.mixture import Mixture
from canon_pretrain.data.shards import ShardError, TokenShards
from canon_pretrain.titan.device import has_accelerator
from canon_pretrain.titan.job_config import CanonJobConfig

T = TypeVar("T")
HELD_OUT = "held_out_fingerprint"
"""The identity's name of the text that the held-out loss is of; absent with validation off."""
OFF_HINT = "--validation.enable False turns it off"
IDENTITY_FIELDS = ("fingerprint", "seed", "mode", "seq_len", "global_batch")
"""Fields of the loader's state that the run's identity has too."""
LOADER_CLOSE_TIMEOUT_S, ITERATOR_CLOSE_TIMEOUT_S = 10.0, 0.5
"""How long the ends of a run and of its steps wait for a thread that is still reading."""


@dataclass(frozen=True)
class OpenedData:
    """What a job trains on and the held-out part of each folder, every commit record checked."""

    training: Mixture
    held_out: list[TokenShards | None]
    notices: list[str]
    identity: dict[str, Any]
    """HELD_OUT and its value; empty if validation is turned off."""

    @property
    def fingerprints(self) -> list[str]:
        return [self.training.fingerprint, *map(str, self.identity.values())]


def open_data(job: CanonJobConfig) -> OpenedData:
    """Open what `job` trains and validates on; sets `model.vocab_size` and `validation.enable`."""
    with open_shards(job) as training:
        if job.validation.enable is False:
            return OpenedData(training, [], [], {})
        parts: list[TokenShards | None] = []
        try:
            for folder in validation_folders(job):
                parts.append((open_validation if job.validation.path else open_held_out)(folder))
        except ShardError as error:
            raise UserError(
                "todo.data", f"the held-out part can't be read: {error}. {OFF_HINT}"
            ) from None
        for part in filter(None, parts):
            part.close()
            text = f"{part.folder} (validation.path = {job.validation.path!r}) has "
            same = part.vocab_size == job.model_args.vocab_size
            if not same or part.tokenizer_sha256 != training.tokenizer_sha256:
                text += "another tokenizer than the training data: build one text with theirs"
                raise UserError("todo.data", f"{text}. {OFF_HINT}")
            if part.fingerprint in {source.fingerprint for source in training.sources}:
                raise UserError(
                    "todo.data",
                    f"{text}the text that is trained on: build another. {OFF_HINT}",
                )
        notices = _resolve_validation(job, parts)
        return OpenedData(training, parts, notices, {HELD_OUT: joined_fingerprint(parts)})


def open_shards(job: CanonJobConfig) -> Mixture:
    """Open the training data alone. Raises UserError for data that do not fit the job."""
    if not job.data.folders:
        raise UserError(
            "todo.data", "data.path is not set: name the folder that data_prep build wrote"
        )
    mixture = Mixture.open(job.data.folders, job.data.shares)
    if job.model.vocab_size is None:
        job.model.vocab_size = mixture.vocab_size
    args = job.model_args
    if mixture.vocab_size != args.vocab_size:
        raise UserError(
            "todo.data",
            f"model.vocab_size = {args.vocab_size}, but the tokenizer of {job.data.folders[0]} has "
            f"{mixture.vocab_size}: leave model.vocab_size unset, or choose other shards",
        )
    for folder, source in zip(job.data.folders, mixture.sources, strict=True):
        if args.document_mask and source.eos_id != args.eos_id:
            raise UserError(
                "todo.data",
                f"model.document_mask looks for model.eos_id = {args.eos_id}, but documents of "
                f"{folder} end with {source.eos_id}: set model.eos_id = {source.eos_id}",
            )
        if source.num_tokens <= (window := job.training.seq_len):
            text = f"fewer than one window of training.seq_len + 1 = {window + 1}"
            raise UserError(
                "todo.data", f"{folder} holds {source.num_tokens:,} training tokens, {text}"
            )
    return mixture


def validation_folders(job: CanonJobConfig) -> list[str]:
    """Return the folders whose held-out part is scored."""
    return [job.validation.path] if job.validation.path else job.data.folders


def _resolve_validation(job: CanonJobConfig, parts: Sequence[TokenShards | None]) -> list[str]:
    """Set `validation.enable`; return notices. Raises UserError if it was asked for in vain."""
    folders = validation_folders(job)
    without = [folder for folder, part in zip(folders, parts, strict=True) if part is None]
    text = f"{', '.join(without)} has no held-out part (--holdout): set validation.path"
    if job.validation.enable and without:
        raise UserError("todo.data", f"validation.enable = True, but {text}, or leave it unset")
    job.validation.enable = len(without) < len(folders)
    return [f"no validation where {text}"] if without else []


def broadcast_data(
    job: CanonJobConfig, data: OpenedData | None, compared: T | None
) -> tuple[OpenedData, T]:
    """Return what rank 0 has of both, on all ranks; UserError if a node's data are not rank 0's."""
    answer = [(data, compared, (job.model.vocab_size, job.validation.enable))]
    dist.broadcast_object_list(answer, src=0)
    first, compared, (job.model.vocab_size, job.validation.enable) = answer[0]
    assert first is not None and compared is not None
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, data and (socket.gethostname(), data.fingerprints))
    others = {host: own for host, own in filter(None, everyone) if own != first.fingerprints}
    if others:
        raise UserError(
            "todo.data",
            f"{', '.join(job.data.folders)} does not hold the same data on all nodes: rank 0's "
            f"has {first.fingerprints}, other nodes: {others}. Copy it, or use a shared folder",
            shared=True,
        )
    return first, compared


# -- reading -------------------------------------------------------------------------------------


class ReadAhead(Generic[T]):
    """Results of `read()` in order, by a thread about `depth` ahead of who takes them."""

    def __init__(self, read: Callable[[], T], depth: int) -> None:
        self._read, self._is_closed = read, False
        self._items: Queue[tuple[T] | BaseException] = Queue(depth)
        # a daemon: a disk that hangs must not keep a process from ending
        self._thread = threading.Thread(target=self._run, name="read ahead", daemon=True)
        self._thread.start()

    def take(self) -> T:
        if self._is_closed:
            raise RuntimeError("nothing is read ahead: close() was called")
        item = self._items.get()
        if isinstance(item, BaseException):
            raise item
        return item[0]

    def close(self, timeout_s: float | None = None) -> bool:
        """Let the thread end with what it is reading; return whether it has ended by then."""
        self._is_closed = True
        with contextlib.suppress(Empty):  # the thread may wait for a place
            while True:
                self._items.get_nowait()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            while not self._is_closed:
                self._items.put((self._read(),))
        except BaseException as error:
            self._items.put(error)


class _Batch(NamedTuple):
    inputs: torch.Tensor
    labels: torch.Tensor
    digest: int
    begins_step: bool
    state: dict[str, Any]


class CanonDataLoader(BaseDataLoader):
    """Endless micro-batches of this rank; its state, that of what was taken, is all ranks'.

    Yields ({"input": int64 [b, T]}, labels int64 [b, T]), labels one token ahead, pinned for a GPU.
    A thread reads `read_ahead` of them ahead. A loaded state may differ in `may_change`.
    """

    def __init__(
        self, loader: BatchLoader, read_ahead: int = 0, may_change: Sequence[str] = ()
    ) -> None:
        self.loader, self._depth, self._may_change = loader, read_ahead, may_change
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
                if batch.begins_step:
                    self._digests.append(0)
                self._digests[-1] = (self._digests[-1] + batch.digest) % (1 << 64)
                self._state = batch.state
                yield {"input": batch.inputs}, batch.labels
        finally:
            self._stop_reading(ITERATOR_CLOSE_TIMEOUT_S)

    def _read(self) -> _Batch:
        begins_step = self.loader.at_step_start
        samples = self.loader.next_batch()
        # copied by numpy: torch would start threads of its own for a large one, in this thread too
        parts = map(np.ascontiguousarray, (samples[:, :-1], samples[:, 1:]))
        inputs, labels = map(torch.from_numpy, parts)
        if self._device is not None:
            torch.cuda.set_device(self._device)  # a new thread is at the first GPU
            inputs, labels = inputs.pin_memory(), labels.pin_memory()
        digest, state = samples_digest(samples), self.loader.state_dict()
        return _Batch(inputs, labels, digest, begins_step, state)

    def close(self, timeout_s: float | None = LOADER_CLOSE_TIMEOUT_S) -> None:
        """End the thread; what it has read and nobody took will be read again."""
        if not self._stop_reading(timeout_s):
            logger.warning(f"the data could not be let go: a read takes more than {timeout_s} s")

    def _stop_reading(self, timeout_s: float | None) -> bool:
        if self._ahead is not None:
            if not self._ahead.close(timeout_s):
                return False
            self._ahead = None
            self.loader.load_state_dict(self._state)
        return True

    @property
    def source_tokens(self) -> dict[str, int]:
        """Tokens that all ranks have drawn so far, by the name of the data's folder."""
        return dict(zip(self.loader.source_names, self._state["source_tokens"], strict=True))

    def take_digests(self) -> list[int]:
        """Return the digest of this rank's samples of each step since the last call."""
        digests, self._digests = self._digests, []
        return digests

    def state_dict(self) -> dict[str, Any]:
        return copy.deepcopy(self._state)  # loading a checkpoint writes into what it is given

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
    data: Mixture,
    may_change: Sequence[str] = (),
) -> CanonDataLoader:
    """Build the loader for the TrainSpec; `tokenizer` is None, since shards hold token ids."""
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
