"""The values that a job's numbers may have, whether it is planned or about to train. No torch."""

import functools
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import TypeAdapter, ValidationError

from canon_pretrain.core.errors import UserError
from canon_pretrain.run.sections import SETTINGS
from canon_pretrain.run.setting import limits_of

_kinds = {name: limits_of(hint) for name, hint in SETTINGS.items()}
LIMITS = {name: kind for name, kind in _kinds.items() if kind is not None}
"""Dotted name of a setting with limits -> the type that pydantic checks."""
OPTIMIZERS = ("Adam", "AdamW")
"""Those that torchtitan builds."""

_adapter = functools.cache(TypeAdapter)


def check_limits(values: Mapping[str, Any]) -> None:
    """Raise UserError for a value, by dotted name, that is out of its limits."""
    for name in filter(values.__contains__, LIMITS):
        try:
            _adapter(LIMITS[name]).validate_python(values[name], strict=True)
        except ValidationError as error:
            # of a union, each type has its error
            messages = dict.fromkeys(fault["msg"] for fault in error.errors())
            expected = " or ".join(messages).replace("Input should be", "expected")
            raise UserError(
                "config.invalid_value", f"{name} = {values[name]!r}: {expected}", key=name
            ) from None


def schedule_faults(schedule: Any, steps: int) -> Iterator[str]:
    """Yield conflicts that would make torchtitan truncate the schedule or run past its end.

    `schedule` has the fields of `[lr_scheduler]`.
    """
    warmup = schedule.warmup_steps
    ratio = schedule.decay_ratio
    total = schedule.total_steps
    if schedule.decay_steps is not None:  # InfiniteLR decays once, then is constant
        if ratio is not None or total is not None:
            yield "lr_scheduler.decay_steps: unset decay_ratio and total_steps"
        return

    if total is not None and total < steps:
        yield f"lr_scheduler.total_steps = {total} < training.steps = {steps}: unset total_steps"
    # WSD: warmup and decay must fit in the schedule.
    name = "training.steps"
    length = steps
    if total is not None:
        name = "total_steps"
        length = total
    decay = 0
    if ratio is not None:
        decay = round(length * ratio)
    if warmup + decay > length:
        yield (
            f"lr_scheduler.warmup_steps = {warmup} + {decay} decay steps (decay_ratio = {ratio}) "
            f"exceed {name} = {length}: shorten one"
        )
