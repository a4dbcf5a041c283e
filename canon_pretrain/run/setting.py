"""How a setting of a job is declared: one field of a dataclass in run/config.py. No torch.

    lr: Identity[Amount] = 1e-3
    \"\"\"Learning rate after the warm-up.\"\"\"

The annotation has the type, the limits (`Amount`), and whether the setting is part of the run's
identity (`Identity`) or belongs to a launch (`PerLaunch`, `OneShot`). The string below the field is
its text in --help-all. TOML keys, options, checks and identity follow from the declaration.
"""

from collections.abc import Iterator
from dataclasses import dataclass, is_dataclass
from enum import Enum
from typing import Annotated, Any, TypeVar, get_args, get_type_hints

from pydantic import Field

T = TypeVar("T")


class Mark(Enum):
    """Where a setting may change; one without a mark may differ between launches, and is logged."""

    IDENTITY = "only if --run.allow_changes names it"
    PER_LAUNCH = "at any launch: differences are not reported"
    ONE_SHOT = "as PER_LAUNCH, and it is left out of the command that resumes the run"


@dataclass(frozen=True)
class Limits:
    """What pydantic accepts, if it is not what the type of the option and the TOML key says."""

    kind: Any


Identity = Annotated[T, Mark.IDENTITY]
PerLaunch = Annotated[T, Mark.PER_LAUNCH]
OneShot = Annotated[T, Mark.ONE_SHOT]

Count = Annotated[int, Field(ge=1, le=1 << 31)]
Size = Annotated[int, Field(ge=0, le=1 << 31)]
Amount = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Decay = Annotated[float, Field(ge=0, lt=1)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Seconds = Annotated[int, Field(ge=1, le=86_400)]


def settings(section: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted name and the annotation of each setting of a section, also of inner ones."""
    for name, hint in get_type_hints(section, include_extras=True).items():
        if is_dataclass(hint):
            yield from settings(hint, f"{prefix}{name}.")
        else:
            yield prefix + name, hint


def mark_of(hint: Any) -> Mark | None:
    """Return the mark of an annotation."""
    return next((x for x in getattr(hint, "__metadata__", ()) if isinstance(x, Mark)), None)


def limits_of(hint: Any) -> Any:
    """Return the annotation that pydantic checks; None if it has no limits."""
    metadata = [x for x in getattr(hint, "__metadata__", ()) if not isinstance(x, Mark)]
    for x in metadata:
        if isinstance(x, Limits):
            return x.kind
    return hint if metadata or any(map(limits_of, get_args(hint))) else None
