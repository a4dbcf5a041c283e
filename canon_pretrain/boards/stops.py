"""DIR/race.json: the arms of a board that a race has stopped, and the orders that it decided."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from canon_pretrain.core.files import UnreadableFile, read_record

RACE = "race.json"
FIRST_SEEDS = 3  # of two seeds of a task that not every run learns, both often fail
RACE_SHARE = 0.4  # share of ALPHA for the looks; the rest is for the final scores


Place = tuple[str, str, float | None]
"""A task, an arm and a learning rate; None: that of the config."""


@dataclass(frozen=True)
class Stop:
    """An arm that was worse than `better` at `step`, over its first `num_seeds` seeds.

    `p` is corrected for all looks, and for the board's orders or the architecture's rates; None if
    the arm had diverged, which needs no test.
    """

    task: str
    arm: str
    learning_rate: float | None
    better: str  # `arm` itself if another of its learning rates is better
    better_rate: float | None
    num_seeds: int
    step: int
    p: float | None
    time: str = ""

    @property
    def place(self) -> Place:
        return self.task, self.arm, self.learning_rate

    @property
    def worse_arm(self) -> tuple[str, float | None]:
        return self.arm, self.learning_rate

    @property
    def better_arm(self) -> tuple[str, float | None]:
        return self.better, self.better_rate

    def __str__(self) -> str:
        arm = _at_rate(self.arm, self.learning_rate)
        if self.p is None:
            return f"{arm} has diverged at step {self.step:,}"
        better = _at_rate(self.better, self.better_rate)
        return (
            f"{arm} is worse than {better} at step {self.step:,} "
            f"({self.num_seeds} seeds, p {self.p:.2g})"
        )


def _at_rate(name: str, rate: float | None) -> str:
    if rate is None:
        return name
    return f"{name} at {rate:g}"


@dataclass(frozen=True)
class RaceRecord:
    """The content of DIR/race.json; `share` of ALPHA is left for the final scores."""

    stops: list[Stop] = field(default_factory=list)
    orders: list[Stop] = field(default_factory=list)
    """Decided orders of two architectures; both continue while a claim needs them."""
    stages: dict[str, int] = field(default_factory=dict)
    share: float = 1 - RACE_SHARE
    version: Literal[1] = 1


def read_race(folder: Path) -> RaceRecord:
    """Return the race of a board; empty if there was none. Raises UnreadableFile."""
    try:
        return read_record(folder / RACE, RaceRecord)
    except UnreadableFile as error:
        if error.is_missing:
            return RaceRecord(share=1.0)
        raise
