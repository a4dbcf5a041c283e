"""What a job may not ask for: refused before anything is built, with the way out.

Called by titan/command_line.py, so that everything behind it can trust the job that it is given.
"""

import functools
import math
import os
from typing import Any

from canon_pretrain.core.errors import UserError
from canon_pretrain.data.mixture import check_order, exact_weight
from canon_pretrain.kernels.backends import check_canon_backend_fits
from canon_pretrain.model.attend import check_backend_fits
from canon_pretrain.run import config as experiment
from canon_pretrain.titan.job_config import CanonJobConfig

DAY_S = 86_400


def check_job(job: CanonJobConfig) -> None:
    """Refuse what would train something else than the file says; raises UserError."""
    if job.model.name != "canon":
        raise UserError(f"model.name = '{job.model.name}': this trainer trains 'canon' only")
    # ModelArgs checks itself
    check_backend_fits(job.model_args, job.model.attention_backend)
    check_canon_backend_fits(job.model.canon_backend)
    training = job.training
    if training.global_batch_size < 1:
        raise UserError(
            f"training.global_batch_size = {training.global_batch_size}: set it in sequences; it "
            "is what every architecture shares, at any number of ranks"
        )
    for name, value in (
        ("training.steps", training.steps),
        ("training.seq_len", training.seq_len),
        ("training.local_batch_size", training.local_batch_size),
        ("checkpoint.interval", job.checkpoint.interval),
        ("metrics.log_freq", job.metrics.log_freq),
        ("validation.freq", job.validation.freq),
    ):
        if value < 1:
            raise UserError(f"{name} = {value}: expected at least 1")
    if job.run.stop_at is not None and not 1 <= job.run.stop_at <= training.steps:
        raise UserError(
            f"run.stop_at = {job.run.stop_at}: expected a step from 1 to training.steps = "
            f"{training.steps}"
        )
    _check_schedule(job)
    _check_loss(job.loss)
    _check_numbers(job)
    _check_folders(job)
    _check_data(job.data)
    _check_checkpoint(job)
    _check_extras(job)
    defaults = CanonJobConfig()
    for name in UNSUPPORTED:
        given, default = _value(job, name), _value(defaults, name)
        if given != default:
            raise UserError(
                f"{name} = {given!r}: this trainer does not have it (it shards with FSDP2 over the "
                f"ranks of a replica and reads `data.path`); leave it at {default!r}"
            )


UNSUPPORTED = (
    "job.custom_config_module",
    "model.converters",
    "model.hf_assets_path",
    "model.tokenizer_path",
    "optimizer.early_step_in_backward",
    "training.dataset",
    "training.dataset_path",
    "training.dataloader",
    "parallelism.data_parallel_shard_degree",
    "parallelism.tensor_parallel_degree",
    "parallelism.pipeline_parallel_degree",
    "parallelism.context_parallel_degree",
    "parallelism.expert_parallel_degree",
    "checkpoint.create_seed_checkpoint",
    "checkpoint.initial_load_in_hf",
    "checkpoint.last_save_in_hf",
    "checkpoint.last_save_model_only",
    "checkpoint.load_only",
    "checkpoint.exclude_from_loading",
    "checkpoint.export_dtype",
    "checkpoint.initial_load_in_hf_quantized",
    "checkpoint.enable_ft_dataloader_checkpoints",
    "quantize",
    "comm.mode",
    "memory_estimation.enable",
    "metrics.save_for_all_ranks",
    "fault_tolerance.enable",
    "experimental",
    "validation.dataset",
    "validation.dataset_path",
    "validation.dataloader",
    "validation.local_batch_size",
    "validation.seq_len",
)
"""torchtitan's keys that would crash, be ignored, or leave a run that can't be resumed."""


def _value(job: CanonJobConfig, dotted: str) -> Any:
    return functools.reduce(getattr, dotted.split("."), job)


def _check_numbers(job: CanonJobConfig) -> None:
    """Raise UserError for numbers outside their range."""
    for name, low in (
        ("optimizer.lr", 0.0),
        ("optimizer.eps", 0.0),
        ("optimizer.weight_decay", 0.0),
        ("training.max_norm", 0.0),
        ("lr_scheduler.warmup_steps", 0),
        ("lr_scheduler.min_lr_factor", 0.0),
    ):
        value = _value(job, name)
        if not (math.isfinite(value) and value >= low):
            raise UserError(f"{name} = {value}: expected a finite number of at least {low}")
    for name in ("optimizer.beta1", "optimizer.beta2"):
        if not 0 <= _value(job, name) < 1:
            raise UserError(f"{name} = {_value(job, name)}: expected at least 0 and less than 1")
    for name, low, high in (
        ("training.gc_freq", 1, 1 << 31),
        ("parallelism.data_parallel_replicate_degree", 1, 1 << 31),
        ("training.steps", 1, 1 << 40),
        ("training.global_batch_size", 1, 1 << 31),
        ("checkpoint.max_held", 0, 1 << 31),
        ("comm.init_timeout_seconds", 1, DAY_S),
        ("comm.train_timeout_seconds", 1, DAY_S),
        ("comm.trace_buf_size", 0, 1 << 31),
        ("run.heartbeat_s", 0.01, 3600),
        ("activation_checkpoint.memory_budget", 0, 1),
        ("guards.max_bad_steps", 1, 1 << 31),
        ("guards.outlier_window", 2, 1024),
    ):
        value = _value(job, name)
        if not low <= value <= high:
            raise UserError(f"{name} = {value}: expected {low} to {high}")
    sigma = job.guards.outlier_sigma
    if sigma is not None and not sigma > 0:
        raise UserError(f"guards.outlier_sigma = {sigma}: expected more than 0")


def _check_folders(job: CanonJobConfig) -> None:
    """Raise UserError for folders that would be made where nobody looks for them."""
    for name in ("job.dump_folder", "checkpoint.folder"):
        value = _value(job, name)
        if not value or "\0" in value:
            raise UserError(f"{name} = {value!r}: expected the path of a folder")
        if value.startswith("~"):
            raise UserError(
                f"{name} = {value!r}: only a shell expands ~; write {os.path.expanduser(value)!r}"
            )


def _check_schedule(job: CanonJobConfig) -> None:
    """Raise UserError for a schedule that torchtitan would cut short, or let run past its end."""
    schedule, steps = job.lr_scheduler, job.training.steps
    warmup, ratio, total = schedule.warmup_steps, schedule.decay_ratio, schedule.total_steps
    if schedule.decay_steps is not None:
        if schedule.decay_steps < 1:
            raise UserError(f"lr_scheduler.decay_steps = {schedule.decay_steps}: expected >= 1")
        if ratio is not None or total is not None:
            raise UserError(
                "lr_scheduler.decay_steps sets the decay's length by itself; unset decay_ratio and "
                "total_steps"
            )
        return
    if total is not None and total < steps:
        raise UserError(
            f"lr_scheduler.total_steps = {total} is less than training.steps = {steps}: nothing is "
            "known of the rate after that. Unset it, or set decay_steps, after which the rate stays"
        )
    name, length = ("training.steps", steps) if total is None else ("total_steps", total)
    if warmup > length:
        raise UserError(
            f"lr_scheduler.warmup_steps = {warmup} is more than {name} = {length}: the schedule "
            "would be cut short in silence"
        )
    if ratio is None:
        return
    if not 0 < ratio <= 1:
        raise UserError(
            f"lr_scheduler.decay_ratio = {ratio}: expected the decay's share of the run, more than "
            "0 and at most 1. For a rate that stays, set min_lr_factor = 1; for a decay after the "
            "warm-up, unset it"
        )
    decay = round(length * ratio)
    if warmup + decay > length:
        raise UserError(
            f"lr_scheduler: a warm-up of {warmup} steps and a decay of {decay} (decay_ratio = "
            f"{ratio}) do not fit into {name} = {length}; shorten one, or unset decay_ratio: the "
            "decay then begins where the warm-up ends"
        )


def _check_loss(loss: experiment.Loss) -> None:
    """Raise UserError for coefficients that are none, or that exclude each other."""
    for name, value in (("z_loss", loss.z_loss), ("squared_loss", loss.squared_loss)):
        if not (math.isfinite(value) and value >= 0):
            raise UserError(f"loss.{name} = {value}: expected a finite number of at least 0")
    if loss.chunk_tokens < 0:
        raise UserError(
            f"loss.chunk_tokens = {loss.chunk_tokens}: expected a number of tokens such as 4096, "
            "or 0 for the logits of a whole micro-batch at once"
        )
    if loss.z_loss and loss.squared_loss:
        raise UserError(
            f"loss.z_loss = {loss.z_loss} and loss.squared_loss = {loss.squared_loss} are two "
            "forms of one thing (PaLM's, and what the released models call z-loss); set one to 0"
        )


def _check_extras(job: CanonJobConfig) -> None:
    """Raise UserError for a validation or a profile that can't be."""
    windows, profiling = job.validation.windows, job.profiling
    if job.validation.steps != -1:
        raise UserError(
            f"validation.steps = {job.validation.steps}: set validation.windows, in windows of "
            "training.seq_len tokens, which are the same ones at any number of ranks"
        )
    if windows is not None and windows != -1 and windows < 1:
        raise UserError(
            f"validation.windows = {windows}: expected at least 1, or -1 for the whole held-out "
            "part"
        )
    warmup, active = profiling.profiler_warmup, profiling.profiler_active
    possible = warmup >= 0 and active >= 1 and profiling.profile_freq >= warmup + active
    if profiling.enable_profiling and not possible:
        raise UserError(
            f"profiling.profile_freq = {profiling.profile_freq}, .profiler_warmup = {warmup}, "
            f".profiler_active = {active}: expected a warm-up of 0 or more steps and at least one "
            "active one, both within a cycle of profile_freq steps"
        )


def _check_data(data: experiment.Data) -> None:
    """Raise UserError for data options that contradict each other; no file is looked at."""
    if not 0 <= data.data_seed < 1 << 64:
        raise UserError(f"data.data_seed = {data.data_seed}: expected 0 to 2**64 - 1")
    if data.read_ahead < 0:
        raise UserError(f"data.read_ahead = {data.read_ahead}: expected 0 or more micro-batches")
    if data.path and data.paths:
        raise UserError(
            f"data.path = {data.path!r} and data.paths = {data.paths!r}: give one of the two "
            f'(data.path = "" unsets what a base file set)'
        )
    if len(data.weights) != len(data.paths):
        raise UserError(
            f"data.weights has {len(data.weights)} numbers for {len(data.paths)} folders of "
            f"data.paths; give one for each, in their order"
        )
    for weight in data.weights:
        exact_weight(weight)
    check_order(data.order, len(data.folders))


def _check_checkpoint(job: CanonJobConfig) -> None:
    """Raise UserError for checkpoint options that can't do what they say."""
    checkpoint = job.checkpoint
    if checkpoint.keep_latest_k == 1 or checkpoint.keep_latest_k < 0:
        raise UserError(
            f"checkpoint.keep_latest_k = {checkpoint.keep_latest_k}: expected 0 (all) or at least "
            "2, since the newest may still be in writing"
        )
    if checkpoint.fresh and checkpoint.load_step != -1:
        raise UserError(
            f"checkpoint.fresh begins again at step 1, checkpoint.load_step = "
            f"{checkpoint.load_step} goes on from there: give one of the two"
        )
    if not checkpoint.enable and job.run.stop_at is not None:
        raise UserError("run.stop_at leaves a checkpoint, but checkpoint.enable is false")
