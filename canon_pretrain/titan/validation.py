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
from typing import TYPE_CHECKING, Any, NamedTuple

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
    count_split_windows,
    divide_windows,
    held_out_loss,
    split_windows,
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
"""By default, a validation scores a global batch per so many steps since the last one."""
MAX_TOKENS = 1 << 21


def num_windows(job: CanonJobConfig) -> int | None:
    """Return the number of windows per validation, None for all; see `Validation.windows`."""
    requested = job.validation.windows
    if requested is not None:
        return None if requested < 0 else requested

    batch_size = job.training.global_batch_size
    limit = max(1, MAX_TOKENS // job.training.seq_len)
    steps = min(job.validation.freq, job.training.steps)
    if steps < STEPS_PER_BATCH:
        return max(1, batch_size * steps // STEPS_PER_BATCH)
    max_batches = max(1, limit // batch_size)
    num_batches = min(steps // STEPS_PER_BATCH, max_batches)
    return min(batch_size * num_batches, limit)


def _window_counts(job: CanonJobConfig, sources: Sequence[TokenShards | None]) -> list[int | None]:
    """Return the number of windows per existing source, by the mixture's shares; None for all."""
    shares = [1.0] if job.validation.path else job.data.shares
    available = []
    weights = []
    for source, share in zip(sources, shares, strict=True):
        if source is not None:
            available.append(count_split_windows(source, job.training.seq_len, job.data.order))
            weights.append(exact_weight(share))

    total = num_windows(job)
    if total is None:
        return [None] * len(available)
    total_weight = sum(weights, Fraction(0))
    fractions = [weight / total_weight for weight in weights]
    return [*divide_windows(total, fractions, available)]


class _Window(NamedTuple):
    source: int
    offset: int
    num_tokens: int


class SourceSums(NamedTuple):
    """A source's sums over its windows of all ranks."""

    nats: float
    num_tokens: int
    """Tokens predicted."""


class CanonValidator(BaseValidator):
    """Score this rank's windows of `parts`, the held-out splits, or of the job's task."""

    def __init__(
        self, job: CanonJobConfig, parts: Sequence[TokenShards | None], rank: int, world_size: int
    ) -> None:
        super().__init__(job)
        self._last_step = job.last_step
        self._loss = head_loss(job.loss)
        self._scores: TaskScores | None = None
        self._last_scores: TaskScores | None = None
        length = job.training.seq_len + 1
        task = job.task

        # The windows of all ranks, by source. A mixture may have folders without a held-out part.
        sources = [part for part in parts if part is not None]
        if task is not None:
            # only tasks need them
            from canon_pretrain.synthetic.evaluation import SCORED_WINDOWS
            from canon_pretrain.titan import scores

            num_scored = job.validation.windows or SCORED_WINDOWS
            num_scored_last = job.validation.last_windows or num_scored
            self._scores = scores.TaskScores(task, num_scored)
            self._last_scores = self._scores
            if num_scored_last != num_scored:
                self._last_scores = scores.TaskScores(task, num_scored_last)
            self.names = [task.name]
            self._bytes_per_token = [math.nan]
            num_task_windows = num_windows(job) or 0
            all_windows = [_Window(0, index, length) for index in range(num_task_windows)]
        else:
            names = short_names(validation_folders(job))
            self.names = [name for name, part in zip(names, parts, strict=True) if part is not None]
            self._bytes_per_token = [source.num_bytes / source.num_tokens for source in sources]
            all_windows = []
            for index, limit in enumerate(_window_counts(job, parts)):
                chosen = split_windows(sources[index], length - 1, job.data.order, limit)
                for offset, count in chosen:
                    all_windows.append(_Window(index, offset, count))

        # Compiled blocks run in the shape of training; others may have fewer rows.
        self.num_windows = len(all_windows)
        rows = job.training.local_batch_size
        if not job.compiles_model:
            rows = min(rows, -(-self.num_windows // world_size))
        rows_of_all_ranks = rows * world_size
        self.num_passes = -(-self.num_windows // rows_of_all_ranks)

        # Read this rank's rows: a pass takes the next `rows` windows for each rank in turn.
        # Token ids, ~id if the label is ignored, padded with ~0; int32 to halve the memory.
        shape = (self.num_passes, rows, length)
        self._windows = torch.full(shape, ~0, dtype=torch.int32)
        self._sources = torch.zeros((self.num_passes, rows), dtype=torch.int64)
        for index, (source, offset, count) in enumerate(all_windows):
            pass_index, row = divmod(index, rows_of_all_ranks)
            row_rank, row = divmod(row, rows)
            if row_rank != rank:
                continue
            if task is not None:
                ids = TaskWindows(task).windows(EVALUATION_SEED, offset, 1, EVALUATION)[0]
            else:
                ids = sources[source].read(offset, count)
            self._windows[pass_index, row, :count] = torch.from_numpy(ids).int()
            self._sources[pass_index, row] = source
        for part in sources:
            part.close()

    def should_validate(self, step: int) -> bool:
        is_multiple = step % self.job_config.validation.freq == 0
        return step > 0 and (is_multiple or step == self._last_step)

    @torch.no_grad()
    def measure(self, model: nn.Module) -> list[SourceSums]:
        """Return the sums of each source over all ranks; collective.

        Shapes: B rows, T tokens, S sources.
        """
        num_sources = len(self.names)
        sums_2S = torch.zeros((2, num_sources), dtype=torch.float64, device=device_type)
        for windows_BT, source_B in zip(self._windows, self._sources, strict=True):
            windows_BT = to_device(windows_BT, device_type).long()
            is_ignored_BT = windows_BT < 0
            ids_BT = torch.where(is_ignored_BT, ~windows_BT, windows_BT)
            targets_BT = windows_BT.masked_fill(is_ignored_BT, IGNORE_INDEX)
            labels_BT = targets_BT[:, 1:].contiguous()
            nats_BT, _ = model(ids_BT[:, :-1], labels_BT=labels_BT, loss=self._loss)

            # Nats and tokens of each row, added to its source; not by a product, in which a
            # source's NaN would spread to all.
            is_predicted_BT = labels_BT != IGNORE_INDEX
            nats_B = nats_BT.double().sum(1)
            num_predicted_B = is_predicted_BT.double().sum(1)
            rows_2B = torch.stack([nats_B, num_predicted_B])
            is_of_BS = F.one_hot(source_B, num_sources).bool()
            is_of_BS = to_device(is_of_BS, device_type)
            rows_2BS = torch.where(is_of_BS, rows_2B[:, :, None], 0.0)
            sums_2S += rows_2BS.sum(1)
        reshard(model)
        dist.all_reduce(sums_2S)
        return [SourceSums(nats, round(count)) for nats, count in sums_2S.T.tolist()]

    def loss(self, sums: Sequence[tuple[float, int]]) -> HeldOutLoss:
        """Return the mean loss over all sources, from the result of `measure`."""
        nats, counts = zip(*sums, strict=True)
        return held_out_loss(nats, counts, self._bytes_per_token)

    def validate(self, model_parts: list[nn.Module], step: int) -> dict[str, Any]:
        """Score the model and return the fields of the log event; collective."""
        if device_type == "cuda":  # so that the running step does not count as validation time
            torch.cuda.synchronize()
        begin = time.perf_counter()

        model = model_parts[0]
        with record_function(VALIDATION):
            model.eval()  # experts drop no tokens
            sums = self.measure(model)
            # The last step of the schedule, not that of a launch that stops before.
            is_last = step == self.job_config.training.steps
            task_scores = self._last_scores if is_last else self._scores
            scores = task_scores.measure(model) if task_scores else None  # type: ignore[arg-type]
        model.train()

        whole = self.loss(sums)
        fields = self._loss_fields(whole)
        if scores:
            fields["scores"] = {name: score.mean for name, score in scores.items()}
            fields["score_stderrs"] = {name: score.stderr for name, score in scores.items()}
        fields["tokens_scored"] = whole.num_tokens
        fields["seconds"] = time.perf_counter() - begin

        # Each source as well, by name.
        fields["sources"] = {}
        for name, source, width in zip(self.names, sums, self._bytes_per_token, strict=True):
            loss = held_out_loss([source.nats], [source.num_tokens], [width])
            source_fields = json_value(self._loss_fields(loss))
            fields["sources"][name] = source_fields | {"tokens": source.num_tokens}
        return fields

    def _loss_fields(self, loss: HeldOutLoss) -> dict[str, Any]:
        fields = {"loss": loss.nats_per_token}
        if self._scores is None:  # else there is no text
            fields["bits_per_byte"] = loss.bits_per_byte
        return fields


def logged_at(log_file: Path, step: int) -> set[str]:
    """Return the names of the events of `step` that no later launch has undone."""
    with contextlib.suppress(UnreadableFile):  # then validate again, which is harmless
        return {event.kind for event in read_log(log_file) if event.get("step") == step}
    return set()
