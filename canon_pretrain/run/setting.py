"""How a setting of a job is declared: one field of a dataclass in run/sections.py. No torch.

    lr: Identity[Amount] = 1e-3
    \"\"\"Learning rate after the warm-up.\"\"\"

The annotation has the type, the limits (`Amount`), and whether the setting is part of the run's
identity (`Identity`) or belongs to a launch (`PerLaunch`, `OneShot`). The string below the field is
its text in --help-all. TOML keys, options, checks and identity follow from the declaration.
"""

from collections.abc import Iterator
from dataclasses import is_dataclass
from enum import Enum
from typing import Annotated, Any, TypeVar, get_type_hints

from pydantic import Field

T = TypeVar("T")


class Mark(Enum):
    """Where a setting may change; one without a mark may differ between launches, and is logged."""

    IDENTITY = "only if --run.allow_changes names it"
    PER_LAUNCH = "at any launch: differences are not reported"
    ONE_SHOT = "as PER_LAUNCH, and it is left out of the command that resumes the run"


class Limits:
    """What `check_limits` accepts: the type within pydantic's bounds, or another type `kind`.

    A reader of TOML and the command line look at the type alone.
    """

    def __init__(self, kind: Any = None, **bounds: Any) -> None:
        self.kind = kind
        self.bounds = bounds


Identity = Annotated[T, Mark.IDENTITY]
PerLaunch = Annotated[T, Mark.PER_LAUNCH]
OneShot = Annotated[T, Mark.ONE_SHOT]

Count = Annotated[int, Limits(ge=1, le=1 << 31)]
Size = Annotated[int, Limits(ge=0, le=1 << 31)]
Amount = Annotated[float, Limits(ge=0, allow_inf_nan=False)]
Positive = Annotated[float, Limits(gt=0, allow_inf_nan=False)]
Decay = Annotated[float, Limits(ge=0, lt=1)]
Seconds = Annotated[int, Limits(ge=1, le=86_400)]


def settings(section: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted name and the annotation of each setting of a section, also of inner ones."""
    for name, hint in get_type_hints(section, include_extras=True).items():
        if is_dataclass(hint):
            yield from settings(hint, f"{prefix}{name}.")
        else:
            yield prefix + name, hint


def option_key(option: str) -> str:
    """Return the dotted key of an option, --section.key or --section.key=VALUE."""
    key, _, _ = option.removeprefix("--").partition("=")
    return key.replace("-", "_")


def limits_of(hint: Any) -> Any:
    """Return the type that pydantic checks for an annotation; None if it has no limits."""
    limits = metadata_of(hint, Limits)
    if limits is None:
        return None
    if limits.kind is not None:
        return limits.kind
    return Annotated[hint.__origin__, Field(**limits.bounds)]


def metadata_of(hint: Any, kind: type[T]) -> T | None:
    """Return the argument of an annotation that is a `kind`; None without one."""
    arguments = getattr(hint, "__metadata__", ())
    return next((argument for argument in arguments if isinstance(argument, kind)), None)
