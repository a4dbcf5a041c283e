"""Held-out loss while training: the same windows at every step, seed, architecture and world size.

The held-out part of each data folder, or the text of `validation.path`, gives some windows, the
same ones that `python -m eval run --suite validation` scores. They are dealt out to the ranks;
every rank takes as many forward passes, since FSDP2's collectives must meet, and what fills up the
last pass has no weight. Losses are plain cross-entropy in float32, summed in float64 with the
tokens they are of, so the mean is the same at any number of ranks. The order of the training data,
random state, weights and gradients are not touched.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.profiler import record_function
from torchtitan.components.loss import IGNORE_INDEX
from torchtitan.components.validate import BaseValidator
from torchtitan.tools.utils import device_type

from canon_pretrain.core.errors import UserError
from canon_pretrain.core.files import UnreadableFile, read_lines
from canon_pretrain.data.held_out import (
    HeldOutLoss,
    allot,
    count_windows,
    held_out_loss,
    open_apart,
    open_held_out,
    part_fingerprint,
    windows,
)
from canon_pretrain.data.mixture import Mixture, exact_weight, short_names
from canon_pretrain.data.shards import ShardError, TokenShards
from canon_pretrain.run.log import drop_superseded, json_value, parse_events
from canon_pretrain.run.trace import VALIDATION
from canon_pretrain.titan.job_config import CanonJobConfig
from canon_pretrain.titan.loss import head_loss

STEPS_A_BATCH = 100
"""A global batch of windows for so many steps between two validations: see `num_windows`."""
MAX_TOKENS = 1 << 21
"""The most that is scored at a time, unless `validation.windows` says so."""
OFF = "--validation.enable False turns it off"


def num_windows(job: CanonJobConfig) -> int | None:
    """How many windows are scored at a time; None for all that there are.

    Unless `validation.windows` says it: one global batch for every 100 steps of `validation.freq`,
    at most 2**21 tokens. Without a backward pass, a batch costs a third of a step, so this is a
    third of a percent of the run's arithmetic, and up to twice that where the validation of the
    last step comes soon after another. A run shorter than `freq` is validated once, at its end, on
    that share of its steps. Independent of the world size.
    """
    given = job.validation.windows
    if given is not None:
        return None if given < 0 else given
    training = job.training
    batch = training.global_batch_size
    most = max(1, MAX_TOKENS // training.seq_len)
    steps = min(job.validation.freq, training.steps)
    if steps >= STEPS_A_BATCH:
        return min(batch * min(steps // STEPS_A_BATCH, max(1, most // batch)), most)
    return max(1, batch * steps // STEPS_A_BATCH)


def open_parts(job: CanonJobConfig) -> list[TokenShards | None]:
    """The held-out part of each folder that is scored; none if validation is turned off.

    Raises UserError for a damaged one.
    """
    if job.validation.enable is False:
        return []
    try:
        return [_open_part(job, folder) for folder in _folders(job)]
    except ShardError as error:
        raise UserError(f"the held-out part can't be read: {error}. {OFF}") from None


def settle_validation(
    job: CanonJobConfig,
    training: Mixture | None = None,
    parts: Sequence[TokenShards | None] | None = None,
) -> tuple[list[str], dict[str, Any]]:
    """Set `validation.enable` to whether there is something to validate on.

    Returns notices, and what the run's identity says of the held-out part: nothing if validation
    is turned off. Raises UserError where it was asked for and can't be, and where a held-out part
    is damaged, or does not fit the model or the `training` data. `parts`: see `open_parts`.
    """
    if job.validation.enable is False:
        return [], {}
    folders = _folders(job)
    parts = open_parts(job) if parts is None else parts
    for part in parts:
        if part is not None:
            part.close()
            _check_part(part, job, training)
    held_out = {"held_out_fingerprint": part_fingerprint(parts)}
    without = [folder for folder, part in zip(folders, parts, strict=True) if part is None]
    how = "build the data with --holdout above 0, or set validation.path"
    if job.validation.enable and without:
        raise UserError(
            f"validation.enable = True, but {', '.join(without)} has no held-out part: {how}, or "
            "leave validation.enable unset to validate on what there is"
        )
    job.validation.enable = len(without) < len(folders)
    if not without:
        return [], held_out
    if not job.validation.enable:
        return [f"no validation: {', '.join(without)} has no held-out part ({how})"], held_out
    return [f"no validation on {', '.join(without)}: no held-out part ({how})"], held_out


def _folders(job: CanonJobConfig) -> list[str]:
    """The folders whose held-out part is scored."""
    return [job.validation.path] if job.validation.path else job.data.folders


def _open_part(job: CanonJobConfig, folder: str) -> TokenShards | None:
    return open_apart(folder) if job.validation.path else open_held_out(folder)


def _check_part(part: TokenShards, job: CanonJobConfig, training: Mixture | None) -> None:
    """Raise UserError for a part of another vocabulary or tokenizer, or that is trained on."""
    if part.vocab_size != job.model_args.vocab_size:
        raise UserError(
            f"{part.folder} has a vocabulary of {part.vocab_size}, the model one of "
            f"{job.model_args.vocab_size}: build it with the training data's tokenizer. {OFF}"
        )
    if training is None:
        return
    if part.tokenizer_sha256 != training.tokenizer_sha256:
        raise UserError(
            f"{part.folder} was written with another tokenizer than the training data: its sha256 "
            f"is {part.tokenizer_sha256[:16]}, expected {training.tokenizer_sha256[:16]}. {OFF}"
        )
    if part.fingerprint in {source.fingerprint for source in training.sources}:
        raise UserError(
            f"validation.path = {job.validation.path!r} holds the text that is trained on: name "
            f"another folder. {OFF}"
        )


@dataclass(frozen=True)
class _Windows:
    """What is scored: windows (source, offset, count), and of each source its name and more."""

    places: list[tuple[int, int, int]]
    names: list[str]
    sources: list[TokenShards]
    bytes_per_token: list[float]


def _choose(job: CanonJobConfig, opened: Sequence[TokenShards | None]) -> _Windows:
    """The windows of each source that has a held-out part, in the shares of the mixture."""
    names = short_names(_folders(job))
    weights = [exact_weight(share) for share in job.data.shares]
    if job.validation.path:
        weights = [Fraction(1)]
    found = [
        (name, shards, weight)
        for name, shards, weight in zip(names, opened, weights, strict=True)
        if shards is not None
    ]
    seq_len, total = job.training.seq_len, num_windows(job)
    available = [count_windows(shards.num_tokens, seq_len) for _, shards, _ in found]
    limits: Sequence[int | None] = [None] * len(found)
    if total is not None:
        whole = sum((weight for *_, weight in found), Fraction(0))
        limits = allot(total, [weight / whole for *_, weight in found], available)
    places = [
        (index, offset, count)
        for index, (_, shards, _) in enumerate(found)
        for offset, count in windows(shards.num_tokens, seq_len, limits[index])
    ]
    sources = [shards for _, shards, _ in found]
    return _Windows(
        places,
        [name for name, *_ in found],
        sources,
        [shards.num_bytes / shards.num_tokens for shards in sources],
    )


class CanonValidator(BaseValidator):
    """Scores this rank's windows; `measure` is collective.

    All windows are read when it is made, so that damage shows before anything is trained. `rows`
    is the most that a forward pass takes: that of a training step, and exactly that many where
    blocks are compiled, which are compiled for one shape. `parts`: see `open_parts`.
    """

    def __init__(
        self,
        job: CanonJobConfig,
        *,
        rank: int,
        world_size: int,
        parts: Sequence[TokenShards | None] | None = None,
    ) -> None:
        super().__init__(job)
        self._last_step = job.training.steps
        self._loss = head_loss(job.loss)
        chosen = _choose(job, open_parts(job) if parts is None else parts)
        self.names, self._bytes_per_token = chosen.names, chosen.bytes_per_token
        self.num_windows = len(chosen.places)
        rows = job.training.local_batch_size
        if not (job.compile.enable and "model" in job.compile.components):
            rows = min(rows, -(-self.num_windows // world_size))
        self.num_passes = -(-self.num_windows // (rows * world_size))
        length = job.training.seq_len + 1
        # token ids and, behind a window's end, nothing to predict; int32 is half the memory
        self._windows = torch.full((self.num_passes, rows, length), IGNORE_INDEX, dtype=torch.int32)
        self._sources = torch.zeros((self.num_passes, rows), dtype=torch.int64)
        for index, (source, offset, count) in enumerate(chosen.places):
            turn, place = divmod(index, rows * world_size)
            if place // rows == rank:
                tokens = torch.from_numpy(chosen.sources[source].read(offset, count))
                self._windows[turn, place % rows, :count] = tokens.int()
                self._sources[turn, place % rows] = source
        for shards in chosen.sources:
            shards.close()

    def should_validate(self, step: int) -> bool:
        """Every `validation.freq` steps and after the run's last: whatever the launches are."""
        return step > 0 and (step % self.job_config.validation.freq == 0 or step == self._last_step)

    @torch.no_grad()
    def measure(self, model: nn.Module) -> list[tuple[float, int]]:
        """(summed nats, tokens predicted) of each source, over all ranks.

        `model` is a Transformer; it stays in the mode it is in, since Canon models have no dropout
        and compiled blocks would be compiled anew for another mode.
        """
        shape = (2, len(self.names))
        sums = torch.zeros(shape, dtype=torch.float64, device=device_type)  # nats, tokens
        for windows_BT, source_B in zip(self._windows, self._sources, strict=True):
            windows_BT = windows_BT.to(device_type).long()
            labels_BT = windows_BT[:, 1:].contiguous()
            nats_BT, _ = model(
                windows_BT[:, :-1].clamp(min=0), labels_BT=labels_BT, loss=self._loss
            )
            is_predicted_BT = labels_BT != IGNORE_INDEX
            rows_2B = torch.stack([nats_BT.double().sum(1), is_predicted_BT.double().sum(1)])
            is_of_BS = F.one_hot(source_B, shape[1]).bool().to(device_type)
            # no product: NaN in one source would be NaN in all
            sums += torch.where(is_of_BS, rows_2B[:, :, None], 0.0).sum(1)
        for module in model.modules():
            if isinstance(module, FSDPModule):  # the last unit stays gathered for a backward pass
                module.reshard()
        dist.all_reduce(sums)
        nats_S, counts_S = sums.tolist()
        return [(nats, round(count)) for nats, count in zip(nats_S, counts_S, strict=True)]

    def loss(self, sums: Sequence[tuple[float, int]]) -> HeldOutLoss:
        """The mean over all sources of what `measure` gives."""
        nats, counts = zip(*sums, strict=True)
        return held_out_loss(nats, counts, self._bytes_per_token)

    def validate(self, model_parts: list[nn.Module], step: int) -> dict[str, Any]:
        """Score the model, on all ranks at once; gives the fields of the log's event."""
        _synchronize()
        begin = time.perf_counter()
        with record_function(VALIDATION):
            sums = self.measure(model_parts[0])
        whole = self.loss(sums)
        by_source = {}
        for name, (nats, count), width in zip(self.names, sums, self._bytes_per_token, strict=True):
            part = held_out_loss([nats], [count], [width])
            by_source[name] = {
                "loss": json_value(part.nats_per_token),
                "bits_per_byte": json_value(part.bits_per_byte),
                "tokens": count,
            }
        return {
            "loss": whole.nats_per_token,
            "bits_per_byte": whole.bits_per_byte,
            "tokens_scored": whole.num_tokens,
            "seconds": time.perf_counter() - begin,
            "sources": by_source,
        }


def knows_validation(log_file: Path, step: int) -> bool:
    """Whether the log has a validation of `step`, by rank 0's look at it; collective."""
    found = torch.zeros((), device=device_type)
    if dist.get_rank() == 0:
        found += stands_in_log(log_file, step)
    dist.all_reduce(found)
    return bool(found)


def stands_in_log(log_file: Path, step: int) -> bool:
    """Whether the log has a validation of `step` that no later launch went back over."""
    kinds = ("validation", "start", "resume")
    heads = tuple(f'{{"event": "{kind}"'.encode() for kind in kinds)
    try:
        # of a long run 100 MB: only what counts is parsed
        events = parse_events(line for line in read_lines(log_file) if line.startswith(heads))
    except UnreadableFile:
        return False  # a second one does no harm
    standing = drop_superseded(events)
    return any(each["event"] == "validation" and each["step"] == step for each in standing)


def _synchronize() -> None:
    """Wait for the step that still runs, so that its time is not counted as validation's."""
    if device_type == "cuda":
        torch.cuda.synchronize()


def build_validator(
    job_config: CanonJobConfig,
    dp_world_size: int,
    dp_rank: int,
    parts: Sequence[TokenShards | None] | None = None,
    **_: Any,
) -> CanonValidator:
    """The TrainSpec's builder, called where `validation.enable` is true."""
    return CanonValidator(job_config, rank=dp_rank, world_size=dp_world_size, parts=parts)
