"""What a job may not ask for: refused before anything is built, with the way out.

Called by titan/command_line.py, so that everything behind it can trust the job.
"""

import functools
import os
from typing import Annotated, Any

from pydantic import Field, TypeAdapter, ValidationError

from canon_pretrain.core.errors import UserError
from canon_pretrain.data.mixture import check_order, exact_weight
from canon_pretrain.kernels.backends import check_canon_backend_fits
from canon_pretrain.model.attend import check_backend_fits
from canon_pretrain.run.config import Data
from canon_pretrain.titan.job_config import CanonJobConfig

LIMITS: tuple[tuple[Any, tuple[str, ...]], ...] = (
    (
        Annotated[int, Field(ge=1, le=1 << 31)],
        (
            *("training.seq_len", "training.global_batch_size", "training.local_batch_size"),
            *("training.gc_freq", "checkpoint.interval", "metrics.log_freq", "validation.freq"),
            *("parallelism.data_parallel_replicate_degree", "guards.max_bad_steps"),
        ),
    ),
    (
        Annotated[int, Field(ge=0, le=1 << 31)],
        (
            *("lr_scheduler.warmup_steps", "checkpoint.max_held", "comm.trace_buf_size"),
            *("loss.chunk_tokens", "data.read_ahead"),
        ),
    ),
    (
        Annotated[float, Field(ge=0, allow_inf_nan=False)],
        (
            *("optimizer.lr", "optimizer.eps", "optimizer.weight_decay", "training.max_norm"),
            *("lr_scheduler.min_lr_factor", "loss.z_loss", "loss.squared_loss"),
        ),
    ),
    (
        Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False)],
        ("optimizer.beta1", "optimizer.beta2"),
    ),
    (
        Annotated[int, Field(ge=1, le=86_400)],
        ("comm.init_timeout_seconds", "comm.train_timeout_seconds"),
    ),
    (Annotated[int, Field(ge=1, le=1 << 40)], ("training.steps",)),
    (Annotated[int, Field(ge=1)] | None, ("lr_scheduler.decay_steps",)),
    (
        Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)] | None,
        ("lr_scheduler.decay_ratio",),
    ),
    (
        Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)],
        ("activation_checkpoint.memory_budget",),
    ),
    (Annotated[float, Field(ge=0.01, le=3600, allow_inf_nan=False)], ("run.heartbeat_s",)),
    (Annotated[int, Field(ge=2, le=1024)], ("guards.outlier_window",)),
    (Annotated[float, Field(gt=0, allow_inf_nan=False)] | None, ("guards.outlier_sigma",)),
    (Annotated[int, Field(ge=0, lt=1 << 64)], ("data.data_seed",)),
)
"""What a single key may be. By name, not on the dataclasses: most of the keys are torchtitan's, and
a field that is declared again loses its text in --help."""

UNSUPPORTED = (
    *("job.custom_config_module", "model.converters", "model.hf_assets_path"),
    *("model.tokenizer_path", "optimizer.early_step_in_backward", "training.dataset"),
    *("training.dataset_path", "training.dataloader", "quantize", "comm.mode", "experimental"),
    "parallelism.data_parallel_shard_degree",
    "parallelism.tensor_parallel_degree",
    "parallelism.pipeline_parallel_degree",
    "parallelism.context_parallel_degree",
    "parallelism.expert_parallel_degree",
    *("checkpoint.create_seed_checkpoint", "checkpoint.initial_load_in_hf"),
    *("checkpoint.last_save_in_hf", "checkpoint.last_save_model_only", "checkpoint.load_only"),
    *("checkpoint.exclude_from_loading", "checkpoint.export_dtype"),
    "checkpoint.initial_load_in_hf_quantized",
    "checkpoint.enable_ft_dataloader_checkpoints",
    *("memory_estimation.enable", "metrics.save_for_all_ranks", "fault_tolerance.enable"),
    *("validation.dataset", "validation.dataset_path", "validation.dataloader"),
    *("validation.local_batch_size", "validation.seq_len"),
)
"""torchtitan's keys that would crash, be ignored, or leave a run that can't be resumed."""


def _value(job: CanonJobConfig, dotted: str) -> Any:
    return functools.reduce(getattr, dotted.split("."), job)


_adapter = functools.cache(TypeAdapter)


def check_job(job: CanonJobConfig) -> None:
    """Raise UserError for a job that would train something else than its file says."""
    if job.model.name != "canon":
        raise UserError(f"model.name = '{job.model.name}': this trainer trains 'canon' only")
    # ModelArgs checks itself
    check_backend_fits(job.model_args, job.model.attention_backend)
    check_canon_backend_fits(job.model.canon_backend)
    for kind, names in LIMITS:
        for name in names:
            try:
                _adapter(kind).validate_python(_value(job, name))
            except ValidationError as error:
                expected = error.errors()[0]["msg"].replace("Input should be", "expected")
                raise UserError(f"{name} = {_value(job, name)}: {expected}") from None
    _check_schedule(job)
    _check_folders(job)
    _check_data(job.data)
    _check_pairs(job)
    defaults = CanonJobConfig()
    for name in UNSUPPORTED:
        given, default = _value(job, name), _value(defaults, name)
        if given != default:
            raise UserError(
                f"{name} = {given!r}: this trainer does not have it (it shards with FSDP2 over the "
                f"ranks of a replica and reads `data.path`); leave it at {default!r}"
            )


def _check_schedule(job: CanonJobConfig) -> None:
    """Raise UserError for a schedule that torchtitan would cut short, or let run past its end."""
    schedule, steps = job.lr_scheduler, job.training.steps
    warmup, ratio, total = schedule.warmup_steps, schedule.decay_ratio, schedule.total_steps
    if schedule.decay_steps is not None:
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
    if ratio is not None and warmup + round(length * ratio) > length:
        raise UserError(
            f"lr_scheduler: a warm-up of {warmup} steps and a decay of {round(length * ratio)} "
            f"(decay_ratio = {ratio}) do not fit into {name} = {length}; shorten one, or unset "
            "decay_ratio: the decay then begins where the warm-up ends"
        )


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


def _check_data(data: Data) -> None:
    """Raise UserError for data options that contradict each other; no file is opened."""
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


def _check_pairs(job: CanonJobConfig) -> None:
    """Raise UserError for other keys that can't do what they say, alone or together."""
    stop_at, steps, loss, checkpoint = job.run.stop_at, job.training.steps, job.loss, job.checkpoint
    if stop_at is not None and not 1 <= stop_at <= steps:
        raise UserError(
            f"run.stop_at = {stop_at}: expected a step from 1 to training.steps = {steps}"
        )
    if loss.z_loss and loss.squared_loss:
        raise UserError(
            f"loss.z_loss = {loss.z_loss} and loss.squared_loss = {loss.squared_loss} are two "
            "forms of one thing (PaLM's, and what the released models call z-loss); set one to 0"
        )
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
    if not checkpoint.enable and stop_at is not None:
        raise UserError("run.stop_at leaves a checkpoint, but checkpoint.enable is false")
    if job.validation.steps != -1:
        raise UserError(
            f"validation.steps = {job.validation.steps}: set validation.windows, in windows of "
            "training.seq_len tokens, which are the same ones at any number of ranks"
        )
    if (windows := job.validation.windows) is not None and (windows < -1 or windows == 0):
        raise UserError(
            f"validation.windows = {windows}: expected at least 1, or -1 for the whole held-out "
            "part"
        )
    profiling = job.profiling
    warmup, active = profiling.profiler_warmup, profiling.profiler_active
    possible = warmup >= 0 and active >= 1 and profiling.profile_freq >= warmup + active
    if profiling.enable_profiling and not possible:
        raise UserError(
            f"profiling.profile_freq = {profiling.profile_freq}, .profiler_warmup = {warmup}, "
            f".profiler_active = {active}: expected a warm-up of 0 or more steps and at least one "
            "active one, both within a cycle of profile_freq steps"
        )
