"""Held-out loss while training: the same windows at every step, seed, architecture and world size.

Shards' windows are those of `canon eval run --suite validation`. The ranks share them, and
run equally many forward passes. Losses are cross-entropy in float32, summed in float64.
"""

import contextlib
import math
import time
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.profiler import record_function
from torchtitan.components.loss import IGNORE_INDEX
from torchtitan.components.validate import BaseValidator
from torchtitan.tools.utils import device_type

from canon_pretrain.core.files import UnreadableFile
from canon_pretrain.data.held_out import (
    HeldOutLoss,
    count_windows,
    divide_windows,
    held_out_loss,
    windows,
)
from canon_pretrain.data.mixture import exact_weight, short_names
from canon_pretrain.data.shards import TokenShards
from canon_pretrain.machine.device import to_device
from canon_pretrain.run.folder import VALIDATION
from canon_pretrain.run.log import json_value, read_log
from canon_pretrain.synthetic.task import EVALUATION, EVALUATION_SEED
from canon_pretrain.titan.data import validation_folders
from canon_pretrain.titan.job_config import CanonJobConfig
from canon_pretrain.titan.parallelize import reshard
from canon_pretrain.titan.spec import head_loss
from canon_pretrain.titan.tasks import TaskWindows

if TYPE_CHECKING:
    from canon_pretrain.titan.scores import TaskScores

STEPS_PER_BATCH = 100
MAX_TOKENS = 1 << 21


def num_windows(job: CanonJobConfig) -> int | None:
    """Return the number of windows per validation, None for all; see `Validation.windows`."""
    given = job.validation.windows
    if given is not None:
        return None if given < 0 else given
    training, batch = job.training, job.training.global_batch_size
    most = max(1, MAX_TOKENS // training.seq_len)
    steps = min(job.validation.freq, training.steps)
    if steps >= STEPS_PER_BATCH:
        return min(batch * min(steps // STEPS_PER_BATCH, max(1, most // batch)), most)
    return max(1, batch * steps // STEPS_PER_BATCH)


def _window_counts(job: CanonJobConfig, sources: Sequence[TokenShards | None]) -> list[int | None]:
    """Return the number of windows per existing source, by the mixture's shares; None for all."""
    shares = [1.0] if job.validation.path else job.data.shares
    weights = map(exact_weight, shares)
    found = [(s, w) for s, w in zip(sources, weights, strict=True) if s is not None]
    if (total := num_windows(job)) is None:
        return [None] * len(found)
    whole = sum((weight for _, weight in found), Fraction(0))
    available = [count_windows(source.num_tokens, job.training.seq_len) for source, _ in found]
    return [*divide_windows(total, [weight / whole for _, weight in found], available)]


class CanonValidator(BaseValidator):
    """Score this rank's windows of `parts`, the held-out splits, or of the job's task."""

    def __init__(
        self, job: CanonJobConfig, parts: Sequence[TokenShards | None], rank: int, world_size: int
    ) -> None:
        super().__init__(job)
        self._last_step = job.last_step
        self._loss = head_loss(job.loss)
        length, sources = job.training.seq_len + 1, [part for part in parts if part is not None]
        task = job.task
        self._scores: TaskScores | None = None
        if task is not None:
            # only tasks need them
            from canon_pretrain.synthetic.evaluation import SCORED_WINDOWS
            from canon_pretrain.titan import scores

            self._scores = scores.TaskScores(task, job.validation.windows or SCORED_WINDOWS)
            self.names, self._bytes_per_token = [task.name], [math.nan]
            places = [(0, index, length) for index in range(num_windows(job) or 0)]
        else:
            names = short_names(validation_folders(job))
            self.names = [name for name, part in zip(names, parts, strict=True) if part is not None]
            self._bytes_per_token = [source.num_bytes / source.num_tokens for source in sources]
            places = [
                (index, offset, count)
                for index, limit in enumerate(_window_counts(job, parts))
                for offset, count in windows(sources[index].num_tokens, length - 1, limit)
            ]
        self.num_windows = len(places)
        rows = job.training.local_batch_size
        if not (job.compile.enable and "model" in job.compile.components):
            rows = min(rows, -(-self.num_windows // world_size))
        self.num_passes = -(-self.num_windows // (rows * world_size))
        # token ids, ~id if the label is ignored, padded with ~0; int32 to halve the memory
        self._windows = torch.full((self.num_passes, rows, length), ~0, dtype=torch.int32)
        self._sources = torch.zeros((self.num_passes, rows), dtype=torch.int64)
        for index, (source, offset, count) in enumerate(places):
            turn, place = divmod(index, rows * world_size)
            if place // rows == rank:
                if task is not None:
                    ids = TaskWindows(task).windows(EVALUATION_SEED, offset, 1, EVALUATION)[0]
                else:
                    ids = sources[source].read(offset, count)
                self._windows[turn, place % rows, :count] = torch.from_numpy(ids).int()
                self._sources[turn, place % rows] = source
        for part in sources:
            part.close()

    def should_validate(self, step: int) -> bool:
        return step > 0 and (step % self.job_config.validation.freq == 0 or step == self._last_step)

    @torch.no_grad()
    def measure(self, model: nn.Module) -> list[tuple[float, int]]:
        """Return (summed nats, tokens predicted) of each source, over all ranks; collective."""
        shape = (2, len(self.names))
        sums = torch.zeros(shape, dtype=torch.float64, device=device_type)  # nats, tokens
        for windows_BT, source_B in zip(self._windows, self._sources, strict=True):
            windows_BT = to_device(windows_BT, device_type).long()
            is_ignored_BT = windows_BT < 0
            inputs_BT = torch.where(is_ignored_BT, ~windows_BT, windows_BT)[:, :-1]
            labels_BT = windows_BT.masked_fill(is_ignored_BT, IGNORE_INDEX)[:, 1:].contiguous()
            nats_BT, _ = model(inputs_BT, labels_BT=labels_BT, loss=self._loss)
            is_predicted_BT = labels_BT != IGNORE_INDEX
            rows_2B = torch.stack([nats_BT.double().sum(1), is_predicted_BT.double().sum(1)])
            is_of_BS = to_device(F.one_hot(source_B, shape[1]).bool(), device_type)
            # not a product, in which a source's NaN would spread to all
            sums += torch.where(is_of_BS, rows_2B[:, :, None], 0.0).sum(1)
        reshard(model)
        dist.all_reduce(sums)
        nats_S, counts_S = sums.tolist()
        return [(nats, round(count)) for nats, count in zip(nats_S, counts_S, strict=True)]

    def loss(self, sums: Sequence[tuple[float, int]]) -> HeldOutLoss:
        """Return the mean loss over all sources, from the result of `measure`."""
        nats, counts = zip(*sums, strict=True)
        return held_out_loss(nats, counts, self._bytes_per_token)

    def validate(self, model_parts: list[nn.Module], step: int) -> dict[str, Any]:
        """Score the model and return the fields of the log event; collective."""
        if device_type == "cuda":  # so that the running step does not count as validation time
            torch.cuda.synchronize()
        begin = time.perf_counter()
        with record_function(VALIDATION):
            model_parts[0].eval()  # experts drop no tokens
            sums = self.measure(model_parts[0])
            scores = self._scores.measure(model_parts[0]) if self._scores else None  # type: ignore[arg-type]
        model_parts[0].train()
        whole, by_source = self.loss(sums), {}
        for name, (nats, count), width in zip(self.names, sums, self._bytes_per_token, strict=True):
            part = held_out_loss([nats], [count], [width])
            by_source[name] = json_value(self._losses(part)) | {"tokens": count}
        fields = self._losses(whole)
        fields |= {"scores": scores} if scores else {}
        fields |= {"tokens_scored": whole.num_tokens, "seconds": time.perf_counter() - begin}
        return fields | {"sources": by_source}

    def _losses(self, loss: HeldOutLoss) -> dict[str, Any]:
        per_byte = {} if self._scores else {"bits_per_byte": loss.bits_per_byte}
        return {"loss": loss.nats_per_token} | per_byte


def logged_at(log_file: Path, step: int) -> set[str]:
    """Return the names of the events of `step` that no later launch has undone."""
    with contextlib.suppress(UnreadableFile):  # then validate again, which is harmless
        return {each.kind for each in read_log(log_file) if each.get("step") == step}
    return set()
