"""A claim on two architectures that is planned before their runs."""

from dataclasses import dataclass
from typing import Annotated

from pydantic import Field


@dataclass(frozen=True)
class Claim:
    """A planned one-sided test: `better` beats `worse`, or is at most `margin` worse if set.

    `score`: one of the task's scores, "" for its first.
    """

    task: str
    better: str
    worse: str
    margin: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    score: str = ""
