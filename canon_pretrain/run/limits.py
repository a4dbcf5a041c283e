"""The values that a job's numbers may have, whether it is planned or about to train. No torch."""

import functools
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pydantic import TypeAdapter, ValidationError

from canon_pretrain.core.errors import UserError
from canon_pretrain.run.identity import GROUPS
from canon_pretrain.run.sections import SETTINGS, ParameterGroup
from canon_pretrain.run.setting import limits_of, settings

_kinds = {name: limits_of(hint) for name, hint in SETTINGS.items()}
LIMITS = {name: kind for name, kind in _kinds.items() if kind is not None}
"""Dotted name of a setting with limits -> the type that pydantic checks."""

_adapter = functools.cache(TypeAdapter)


def check_limits(values: Mapping[str, Any]) -> None:
    """Raise UserError for a value, by dotted name, that is out of its limits."""
    for name in filter(values.__contains__, LIMITS):
        _check_limit(name, values[name], LIMITS[name])


def _check_limit(name: str, value: Any, kind: Any) -> None:
    try:
        _adapter(kind).validate_python(value, strict=True)
    except ValidationError as error:
        # of a union, each type has its error
        messages = dict.fromkeys(fault["msg"] for fault in error.errors())
        expected = " or ".join(messages).replace("Input should be", "expected")
        raise UserError(
            "config.invalid_value", f"{name} = {value!r}: {expected}", key=name
        ) from None


def check_groups(groups: Sequence[ParameterGroup]) -> None:
    """Raise UserError for a group of parameters whose values are invalid, whatever the model."""
    for number, group in enumerate(groups):
        prefix = f"{GROUPS}[{number}]."
        for key, hint in settings(ParameterGroup):
            kind = limits_of(hint)
            if kind is not None:
                _check_limit(prefix + key, getattr(group, key), kind)

        fault = None
        if not group.match:
            fault = "expected norm, embedding, head, canon, bias or a regular expression"
        try:
            re.compile(group.match)
        except re.error as error:
            fault = f"not a regular expression: {error}"
        if fault:
            raise UserError(
                "config.invalid_value",
                f"{prefix}match = {group.match!r}: {fault}",
                key=f"{prefix}match",
            )


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
