"""The values that a job's numbers may have, whether it is planned or about to train. No torch."""

import functools
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter, ValidationError

from canon_pretrain.core.errors import UserError

COUNT = Annotated[int, Field(ge=1, le=1 << 31)]
SIZE = Annotated[int, Field(ge=0, le=1 << 31)]
SECONDS = Annotated[int, Field(ge=1, le=86_400)]
AMOUNT = Annotated[float, Field(ge=0, allow_inf_nan=False)]
LIMITS: tuple[tuple[Any, str], ...] = (
    (COUNT, "training.seq_len training.global_batch_size training.local_batch_size"),
    (COUNT, "training.gc_freq checkpoint.interval metrics.log_freq validation.freq"),
    (COUNT, "guards.max_bad_steps parallelism.data_parallel_replicate_degree"),
    (COUNT, "parallelism.expert_parallel_degree samples.max_tokens"),
    (COUNT, "profiling.profile_freq profiling.profiler_active"),
    (SIZE, "lr_scheduler.warmup_steps checkpoint.max_held comm.trace_buf_size"),
    (SIZE, "loss.chunk_tokens data.read_ahead samples.interval profiling.profiler_warmup"),
    (AMOUNT, "optimizer.lr optimizer.weight_decay training.max_norm"),
    (AMOUNT, "lr_scheduler.min_lr_factor loss.z_loss loss.squared_loss samples.temperature"),
    (Annotated[float, Field(ge=0, lt=1)], "optimizer.beta1 optimizer.beta2"),
    # not 0: the update of a weight without gradients, such as a rare token's row, would be 0 / 0
    (Annotated[float, Field(gt=0, allow_inf_nan=False)], "optimizer.eps"),
    (SECONDS, "comm.init_timeout_seconds comm.train_timeout_seconds"),
    (Annotated[int, Field(ge=1, le=1 << 40)], "training.steps"),
    (Annotated[int, Field(ge=1)] | None, "lr_scheduler.decay_steps"),
    (int | None, "lr_scheduler.total_steps"),  # see schedule_faults
    (Annotated[float, Field(gt=0, le=1)] | None, "lr_scheduler.decay_ratio"),
    (Annotated[float, Field(ge=0, le=1)], "activation_checkpoint.memory_budget"),
    (Annotated[float, Field(ge=0.01, le=3600)], "run.heartbeat_s"),
    (Annotated[int, Field(ge=2, le=1024)], "guards.outlier_window"),
    (Annotated[float, Field(gt=0, allow_inf_nan=False)] | None, "guards.outlier_sigma"),
    (Annotated[int, Field(ge=0, lt=1 << 64)], "data.data_seed"),
    # -1: the whole held-out split
    (Literal[-1] | Annotated[int, Field(ge=1)] | None, "validation.windows"),
    # -1: the newest
    (Literal[-1] | Annotated[int, Field(ge=0)], "checkpoint.load_step"),
    # 0: all; not 1, because the newest may be incomplete
    (Literal[0] | Annotated[int, Field(ge=2)], "checkpoint.keep_latest_k"),
    (Literal["default", "none"], "activation_checkpoint.determinism_check"),
    (list[Literal["model", "loss"]], "compile.components"),
)
"""By name, since redeclaring a torchtitan field would drop its text in --help-all."""
LIMITED = [name for _, names in LIMITS for name in names.split()]

OPTIMIZERS = ("Adam", "AdamW")
"""Those that torchtitan builds."""

_adapter = functools.cache(TypeAdapter)


def check_limits(values: Mapping[str, Any]) -> None:
    """Raise UserError for a value, by dotted name, that is out of its limits."""
    for kind, names in LIMITS:
        for name in filter(values.__contains__, names.split()):
            try:
                _adapter(kind).validate_python(values[name], strict=True)
            except ValidationError as error:
                expected = " or ".join(dict.fromkeys(each["msg"] for each in error.errors()))
                expected = expected.replace("Input should be", "expected")
                raise UserError(
                    "config.invalid_value", f"{name} = {values[name]!r}: {expected}", key=name
                ) from None


def schedule_faults(schedule: Any, steps: int) -> Iterator[str]:
    """Yield conflicts that would make torchtitan truncate the schedule or run past its end.

    `schedule` has the fields of `[lr_scheduler]`.
    """
    warmup, ratio, total = schedule.warmup_steps, schedule.decay_ratio, schedule.total_steps
    if schedule.decay_steps is not None:
        if ratio is not None or total is not None:
            yield "lr_scheduler.decay_steps: unset decay_ratio and total_steps beside it"
        return
    if total is not None and total < steps:
        yield f"lr_scheduler.total_steps = {total} < training.steps = {steps}: unset total_steps"
    name, length = ("training.steps", steps) if total is None else ("total_steps", total)
    decay = 0 if ratio is None else round(length * ratio)
    if warmup + decay > length:
        text = f"{warmup} + {decay} decay steps (decay_ratio = {ratio}) exceed "
        yield f"lr_scheduler.warmup_steps = {text}{name} = {length}: shorten one"
