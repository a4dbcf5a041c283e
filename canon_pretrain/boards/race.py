"""Races: arms of a board that are worse at equal steps are stopped; DIR/race.json lists the stops.

An arm is an architecture at a learning rate. Its first FIRST_SEEDS seeds train in stages, of all
arms of a task to the same step; further seeds are trained of the arms that are left.
"""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from itertools import chain
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from scipy.special import ndtr

from canon_pretrain.boards.results import LOSS, Score, score_curve
from canon_pretrain.core.errors import UserError
from canon_pretrain.core.files import UnreadableFile, read_record, write_json
from canon_pretrain.report.record import RunRecord
from canon_pretrain.stats.cells import (
    ITEMS,
    UNBOUNDED,
    Cell,
    difference_p,
    measure_task,
    num_choices,
    pooled_p,
    with_all_or_nothing,
)
from canon_pretrain.stats.claims import Claim
from canon_pretrain.stats.decide import ALPHA

RACE = "race.json"
DIVERGED = "error[train.not_finite]"  # in the reason of a failed run
FIRST_SEEDS = 3  # of two seeds of a task that not every run learns, both often fail
RUNGS = (0.25, 0.5, 1.0)  # shares of the steps after which a race looks
RACE_SHARE = 0.4  # of ALPHA, for the looks; the rest is for the final scores
Arm = tuple[str, float | None]
"""An architecture and a learning rate; None: that of the config."""


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

    def __str__(self) -> str:
        names = [
            name if rate is None else f"{name} at {rate:g}"
            for name, rate in ((self.arm, self.learning_rate), (self.better, self.better_rate))
        ]
        if self.p is None:
            return f"{names[0]} has diverged at step {self.step:,}"
        text = f"{names[0]} is worse than {names[1]} at step {self.step:,}"
        return f"{text} ({self.num_seeds} seeds, p {self.p:.2g})"


@dataclass(frozen=True)
class RaceRecord:
    """The content of DIR/race.json; `share` of ALPHA is left for the final scores."""

    stops: list[Stop] = field(default_factory=list)
    orders: list[Stop] = field(default_factory=list)
    """Decided orders of two architectures; both continue while a claim needs them."""
    stages: dict[str, int] = field(default_factory=dict)
    share: float = 1 - RACE_SHARE
    version: Literal[1] = 1


class Stage(NamedTuple):
    """The first `num_seeds` seeds of all arms that are left train to `step`."""

    num_seeds: int
    step: int


def race_stages(num_seeds: int, steps: int) -> list[Stage]:
    """Return the stages of a task; after each but the last, arms may be stopped."""
    first = min(num_seeds, FIRST_SEEDS)
    rungs = [Stage(first, math.ceil(steps * share)) for share in RUNGS]
    more = (Stage(count, steps) for count in range(first + 1, num_seeds + 1))
    return [*dict.fromkeys(rungs), *more]


@dataclass
class Race:
    """Stops arms of a task that are worse at equal steps.

    Two families of hypotheses. (1) Of two architectures: the best rate of the one is not worse
    than the best of the other. A false order anywhere on the board has at most RACE_SHARE * ALPHA;
    1 - RACE_SHARE is left for the final scores. All rates of the worse one must be worse than the
    best of the other (Berger 1982, doi:10.2307/1267823), which was chosen: that is corrected for.
    (2) Of two rates of an architecture: a false stop has at most ALPHA per architecture and task.

    Confidence sequences by the union bound over looks (Darling and Robbins 1967; Howard et al.
    2021, doi:10.1214/20-AOS1991): the scores of one run are dependent, so that martingales over
    steps would not be valid. Within a look Holm's correction counts what was not decided before.
    That an arm would not have overtaken later is not tested: of simulated boards with level arms of
    which one learns at half the speed, about one in five stops it (tests/simulate_boards.py).
    """

    task: str
    stages: Sequence[Stage]
    num_races: int = 1  # of the board
    claims: Sequence[Claim] = ()  # on this task; until they are decided, both sides are needed
    stopped: dict[Arm, Stop] = field(default_factory=dict)
    decided: dict[tuple[str, str], Stop] = field(default_factory=dict)  # by (worse, better)
    seen: dict[tuple[str, str, float | None], Cell] = field(default_factory=dict)
    """The newest cells of all races of the board, by task and arm: which are all-or-nothing."""

    def look(
        self,
        stage: Stage,
        scores: Mapping[Arm, Sequence[float | None]],
        *,
        lower_is_better: bool = False,
        items: int = ITEMS,
    ) -> list[Stop]:
        """Return the arms to stop after a stage.

        An arm with an unknown score (None) decides nothing; one that has diverged (NaN) cannot be
        shown, and is stopped if there is another.
        """
        sign = -1 if lower_is_better else 1
        known = {
            arm: [x for x in own if x is not None]
            for arm, own in scores.items()
            if arm not in self.stopped and None not in own
        }
        arms = [arm for arm, own in known.items() if np.isfinite(own).all()]
        if not arms:
            return []

        cells = self._cells({arm: known[arm] for arm in arms}, items, sign)
        rates: dict[str, list[Arm]] = {}
        for arm in sorted(arms, key=lambda arm: -cells[arm].mean):
            rates.setdefault(arm[0], []).append(arm)
        share = 1 / max(len(self.stages) - 1, 1)
        time = datetime.now(UTC).isoformat(timespec="seconds")

        def tested(worse: Arm, better: Arm, p: float) -> Stop:
            return Stop(self.task, *worse, *better, *stage, p, time)

        new: dict[Arm, Stop] = {}
        for arm in (arm for arm in known if arm not in cells):
            better = rates.get(arm[0], arms)[0]
            new[arm] = Stop(self.task, *arm, *better, *stage, None, time)
        for own in rates.values():
            pairs = itertools.combinations(own, 2)
            tests = [(_worse_p(cells, [y], x, share * ALPHA), y, x) for x, y in pairs]
            for p, worse, better in _rejected(tests, share):
                new.setdefault(worse, tested(worse, better, p))
        share *= RACE_SHARE / self.num_races
        tests = []
        for best, own in itertools.combinations(rates.values(), 2):
            if not {(best[0][0], own[0][0]), (own[0][0], best[0][0])} & {*self.decided}:
                choices = num_choices(cells[best[0]], [cells[arm] for arm in best])
                p = _worse_p(cells, own, best[0], share * ALPHA / choices) * choices
                tests.append((p, own[0], best[0]))
        for p, worse, better in _rejected(tests, share):
            self.decided[worse[0], better[0]] = tested(worse, better, p)
        for (name, _), stop in self.decided.items():
            if not self._needs(name):
                for arm in rates.get(name, ()):
                    new.setdefault(arm, replace(stop, learning_rate=arm[1]))
        self.stopped |= new
        return [*new.values()]

    def _cells(
        self, scores: Mapping[Arm, Sequence[float]], items: int, sign: int
    ) -> dict[Arm, Cell]:
        """Return the cells, of which a higher mean is better, and add them to `seen`."""
        for arm, cell in measure_task(scores, items=items).items():
            self.seen[(self.task, *arm)] = cell._replace(mean=sign * cell.mean)
        return {arm: with_all_or_nothing(self.seen, (self.task, *arm)) for arm in scores}

    def _needs(self, name: str) -> bool:
        """Return whether a claim on this architecture is open."""
        for claim in self.claims:
            ahead, behind = ((claim.worse, claim.better), (claim.better, claim.worse))
            is_refuted = not claim.margin and behind in self.decided
            if name in ahead and ahead not in self.decided and not is_refuted:
                return True
        return False


def _worse_p(cells: Mapping[Arm, Cell], arms: Sequence[Arm], best: Arm, level: float) -> float:
    """Return the largest p of the arms being as good as `best`; 1 if it is above `level`."""
    y, largest = cells[best], 0.0
    for arm in arms:
        x = cells[arm]
        size = y.mean - x.mean
        if size <= 0 or x.df <= 0 or y.df <= 0 or pooled_p(size, x, y) > level:
            return 1.0
        # the normal bound: the exact p is larger, and slow
        bound = 2 * ndtr(-size / math.sqrt(x.variance + y.variance))
        if bound > level or (p := difference_p(size, x, y)) is None or p > level:
            return 1.0
        largest = max(largest, p)
    return largest


def _rejected(
    tests: Sequence[tuple[float, Arm, Arm]], share: float
) -> Iterator[tuple[float, Arm, Arm]]:
    """Yield the tests that Holm rejects at this share of ALPHA, with their p corrected."""
    for place, (p, worse, better) in enumerate(sorted(tests, key=lambda test: test[0])):
        adjusted = p * (len(tests) - place) / share
        if adjusted > ALPHA:
            return
        yield adjusted, worse, better


@dataclass
class Entry:
    """A race, the runs of its arms by seed, and its current stage."""

    race: Race
    runs: Mapping[Arm, Sequence[str]]
    size: str = ""
    score: str = ""  # default: the task's main one
    stage: int = 0

    @property
    def name(self) -> str:
        return f"{self.race.task}@{self.size}" if self.size else self.race.task

    @property
    def left(self) -> dict[Arm, Sequence[str]]:
        """The runs of the current stage by arm, of those that are not stopped."""
        count = self.race.stages[self.stage].num_seeds
        return {arm: own[:count] for arm, own in self.runs.items() if arm not in self.race.stopped}


class BoardRace:
    """The races of a board in `folder`: to which step a run may train now, and what is stopped."""

    def __init__(self, folder: Path, entries: Sequence[Entry]) -> None:
        self.folder, self.entries = folder, entries
        self._places = {
            run: (x, arm) for x in entries for arm, runs in x.runs.items() for run in runs
        }
        record = read_race(folder)
        seen: dict[tuple[str, str, float | None], Cell] = {}
        for entry in entries:
            entry.race.seen = seen
            race, stages = entry.race, entry.race.stages
            entry.stage = min(record.stages.get(entry.name, 0), len(stages) - 1)
            own = [stop for stop in record.stops if stop.task == race.task]
            race.stopped |= {(stop.arm, stop.learning_rate): stop for stop in own}
            own = [stop for stop in record.orders if stop.task == race.task]
            race.decided |= {(stop.arm, stop.better): stop for stop in own}
        self._write()

    def is_stopped(self, run: str) -> bool:
        entry, arm = self._places[run]
        return arm in entry.race.stopped

    def target(self, run: str) -> int:
        """Return the step to which a run may train; 0 if none, or if its arm is stopped."""
        entry, arm = self._places[run]
        return entry.race.stages[entry.stage].step if run in entry.left.get(arm, ()) else 0

    def advance(self, at: Mapping[str, int], failed: Mapping[str, str]) -> list[Stop]:
        """Look at each race whose runs have reached their stage; return the new stops.

        Failed runs, by reason, are not waited for; unless they have diverged, their arms decide
        nothing.
        """
        new, before = list[Stop](), [entry.stage for entry in self.entries]
        for entry in self.entries:
            last = len(entry.race.stages) - 1
            while entry.stage < last:
                stage, left = entry.race.stages[entry.stage], entry.left
                runs = chain.from_iterable(left.values())
                if any(at[run] < stage.step and run not in failed for run in runs):
                    break
                new += self._look(entry, stage, left, failed)
                # the last arm has nothing to race with: the rest of its seeds
                entry.stage = entry.stage + 1 if len(entry.left) > 1 else last
        if before != [entry.stage for entry in self.entries]:
            self._write()
        return new

    def _look(
        self,
        entry: Entry,
        stage: Stage,
        runs: Mapping[Arm, Sequence[str]],
        failed: Mapping[str, str],
    ) -> list[Stop]:
        kind: Score | None = None  # of the task: equal for all runs
        scores = dict[Arm, list[float | None]]()
        for arm, names in runs.items():
            scores[arm] = [None] * len(names)
            for place, name in enumerate(names):
                if name in failed:  # it may be a run of another plan
                    if DIVERGED in failed[name]:
                        scores[arm][place] = math.nan
                    continue
                with suppress(UserError, OSError, KeyError, TypeError, ValueError):  # no score
                    record = RunRecord(self.folder / name)
                    kind = kind or Score.of(record, entry.score)
                    scores[arm][place] = score_curve(record, kind.name)[stage.step]
        kind = kind or Score(LOSS, True, None)
        how: dict[str, Any] = {"lower_is_better": kind.lower_is_better}
        return entry.race.look(stage, scores, **how, items=kind.items or UNBOUNDED)

    def _write(self) -> None:
        """Write race.json; stops of arms that are not in the board any more stay in it."""
        old = read_race(self.folder)
        stops, orders = (
            {(x.task, x.arm, x.learning_rate): x for x in old.stops},
            {(x.task, x.arm, x.better): x for x in old.orders},
        )
        for race in (entry.race for entry in self.entries):
            stops |= {(race.task, *arm): stop for arm, stop in race.stopped.items()}
            orders |= {(race.task, *pair): stop for pair, stop in race.decided.items()}
        stages = old.stages | {entry.name: entry.stage for entry in self.entries}
        record = RaceRecord([*stops.values()], [*orders.values()], stages)
        write_json(self.folder / RACE, asdict(record))


def read_race(folder: Path) -> RaceRecord:
    """Return the race of a board; empty if there was none. Raises UnreadableFile."""
    try:
        return read_record(folder / RACE, RaceRecord)
    except UnreadableFile as error:
        if error.is_missing:
            return RaceRecord(share=1.0)
        raise
