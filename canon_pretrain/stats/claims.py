"""A claim on two architectures that is planned before their runs."""

from dataclasses import dataclass, field
from typing import Annotated

from pydantic import Field


@dataclass(frozen=True)
class Claim:
    """A planned one-sided test: `better` beats `worse`, or is at most `margin` worse if set.

    On a cell, or on a grid of cells: all difficulties of `task`, or of several `tasks`, and all
    sizes of the two architectures (boards/claims.py). `score`: one of the tasks' scores, "" for the
    first.
    """

    task: str
    better: str
    worse: str
    margin: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    tasks: list[str] = field(default_factory=list, hash=False)
    score: str = ""

    @property
    def place(self) -> str:
        """The task or tasks, for a message or a table."""
        return ", ".join(self.tasks) or self.task
