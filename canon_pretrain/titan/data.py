"""Our numpy loader behind torchtitan's dataloader interface, read ahead by a thread of its own.

The state that it gives away is that of the batches that were taken from it, whatever is read ahead.
"""

import copy
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.tools.logging import logger

from canon_pretrain.core.errors import UserError
from canon_pretrain.data.loader import BatchLoader, samples_digest
from canon_pretrain.data.mixture import Mixture
from canon_pretrain.run.config import Data
from canon_pretrain.titan.device import has_accelerator
from canon_pretrain.titan.job_config import CanonJobConfig
from canon_pretrain.titan.read_ahead import ReadAhead

STATE_FIELDS = {
    "data_fingerprint": "fingerprint",
    "data.data_seed": "seed",
    "data.order": "mode",
    "training.seq_len": "seq_len",
    "training.global_batch_size": "global_batch",
}
"""What of a run's identity stands in the loader's state, and under which name."""


CLOSE_S = 10.0
"""How long the end of a run waits for a thread that is still reading."""

LEAVE_S = 0.5
"""How long the end of its steps does: the last checkpoint is still to be saved."""


@dataclass(frozen=True)
class _Batch:
    """A micro-batch, and what is known of it once it was taken."""

    inputs: torch.Tensor
    labels: torch.Tensor
    digest: int
    begins_step: bool
    state: dict[str, Any]
    """The loader's, with this batch behind it."""


class CanonDataLoader(BaseDataLoader):
    """Endless micro-batches of this rank; its state is the same on every rank.

    Yields ({"input": int64 [b, T]}, labels int64 [b, T]), labels one token ahead of the input; in
    pinned memory where there is a GPU. With `read_ahead` above 0, a thread reads so many of them
    ahead, from the first one asked for until the iterator is closed, or `close`.
    """

    def __init__(self, loader: BatchLoader, read_ahead: int = 0) -> None:
        self.loader = loader
        self._depth = read_ahead
        self._ahead: ReadAhead[_Batch] | None = None
        self._state = loader.state_dict()
        self._device = torch.cuda.current_device() if has_accelerator() else None
        self._allowed: set[str] = set()
        self._digests: list[int] = []

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        try:
            while True:
                batch = self._take()
                if batch.begins_step:
                    self._digests.append(0)
                self._digests[-1] = (self._digests[-1] + batch.digest) % (1 << 64)
                self._state = batch.state
                yield {"input": batch.inputs}, batch.labels
        finally:
            self._let_go(LEAVE_S)

    def _take(self) -> _Batch:
        if not self._depth:
            return self._read()
        if self._ahead is None:
            self._ahead = ReadAhead(self._read, self._depth)
        return self._ahead.take()

    def _read(self) -> _Batch:
        begins_step = self.loader.at_step_start
        samples = self.loader.next_batch()
        # copied by numpy: torch would start threads of its own for a large one, in this thread too
        inputs, labels = (
            torch.from_numpy(np.ascontiguousarray(part))
            for part in (samples[:, :-1], samples[:, 1:])
        )
        if self._device is not None:
            torch.cuda.set_device(self._device)  # a new thread is at the first GPU
            inputs, labels = inputs.pin_memory(), labels.pin_memory()
        digest = samples_digest(samples)
        return _Batch(inputs, labels, digest, begins_step, self.loader.state_dict())

    def close(self, timeout_s: float | None = CLOSE_S) -> None:
        """End the thread; what it has read and nobody took will be read again."""
        if not self._let_go(timeout_s):
            logger.warning(f"the data could not be let go: a read takes more than {timeout_s} s")

    def _let_go(self, timeout_s: float | None) -> bool:
        """`close`; whether the thread has ended."""
        if self._ahead is not None:
            if not self._ahead.close(timeout_s):
                return False
            self._ahead = None
            self.loader.load_state_dict(self._state)
        return True

    @property
    def source_tokens(self) -> dict[str, int]:
        """Tokens that each folder of the data has given to all ranks so far, by its name."""
        return dict(zip(self.loader.source_names, self._state["source_tokens"], strict=True))

    def take_digests(self) -> list[int]:
        """The digest of this rank's samples of each step since the last call, oldest first."""
        digests, self._digests = self._digests, []
        return digests

    def allow_changes(self, names: Iterable[str]) -> None:
        """Let a checkpoint's order differ in these parts of the run's identity."""
        self._allowed = {STATE_FIELDS[name] for name in names if name in STATE_FIELDS}

    def state_dict(self) -> dict[str, Any]:
        return copy.deepcopy(self._state)  # loading a checkpoint writes into what it is given

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.close(timeout_s=None)
        self.loader.load_state_dict(state_dict, self._allowed)
        self._state = self.loader.state_dict()


def build_dataloader(
    dp_world_size: int,
    dp_rank: int,
    tokenizer: BaseTokenizer | None,
    job_config: CanonJobConfig,
    training_data: Mixture | None = None,
) -> CanonDataLoader:
    """The TrainSpec's builder; `tokenizer` is None, since shards hold token ids.

    `training_data` is that of `open_shards`, if it was opened.
    """
    training = job_config.training
    loader = BatchLoader(
        training_data or open_shards(job_config),
        data_seed=job_config.data.data_seed,
        order=job_config.data.order,
        seq_len=training.seq_len,
        global_batch_size=training.global_batch_size,
        local_batch_size=training.local_batch_size,
        dp_rank=dp_rank,
        dp_world_size=dp_world_size,
    )
    return CanonDataLoader(loader, job_config.data.read_ahead)


def absolute_folders(data: Data) -> dict[str, Any]:
    """The `path` and `paths` of `[data]` for a reader who may stand in another folder."""
    return {
        "path": str(Path(data.path).resolve()) if data.path else "",
        "paths": [str(Path(folder).resolve()) for folder in data.paths],
    }


def open_shards(job: CanonJobConfig) -> Mixture:
    """The training data of `data.path` or `data.paths`, the latter with their weights.

    Sets `model.vocab_size` to that of the data if it is unset. Raises UserError if the data do not
    fit the job's model.
    """
    if not job.data.folders:
        raise UserError(
            "data.path is not set: name the folder that `python -m data_prep build` wrote"
        )
    mixture = Mixture.open(job.data.folders, job.data.shares)
    if job.model.vocab_size is None:
        job.model.vocab_size = mixture.vocab_size
    args = job.model_args
    if mixture.vocab_size != args.vocab_size:
        raise UserError(
            f"model.vocab_size = {args.vocab_size}, but the tokenizer of {job.data.folders[0]} has "
            f"{mixture.vocab_size}: leave model.vocab_size unset, or choose other shards"
        )
    for folder, source in zip(job.data.folders, mixture.sources, strict=True):
        if args.document_mask and source.eos_id != args.eos_id:
            raise UserError(
                f"model.document_mask looks for the token model.eos_id = {args.eos_id}, but "
                f"documents of {folder} end with {source.eos_id}: set model.eos_id = "
                f"{source.eos_id}, or choose other shards"
            )
        if source.num_tokens <= job.training.seq_len:
            raise UserError(
                f"{folder} holds {source.num_tokens:,} training tokens, fewer than one window of "
                f"training.seq_len + 1 = {job.training.seq_len + 1}"
            )
    return mixture
