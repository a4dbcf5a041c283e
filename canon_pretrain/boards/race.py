"""Races: arms of a board that are worse at equal steps are stopped; DIR/race.json lists the stops.

An arm is an architecture at a learning rate. Its first FIRST_SEEDS seeds train in stages, of all
arms of a task to the same step; further seeds are trained of the arms that are left. If those of
the better arm show that it was better by chance, what it stopped returns.
"""

import functools
import itertools
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

import numpy as np
from scipy.special import ndtr

from canon_pretrain.boards.results import (
    HELD_OUT_LOSS,
    NOT_FINITE,
    Metric,
    finite_scores,
    score_curve,
)
from canon_pretrain.boards.stops import (
    FIRST_SEEDS,
    RACE,
    RACE_SHARE,
    Place,
    RaceRecord,
    Stop,
    read_race,
)
from canon_pretrain.core.errors import UserError
from canon_pretrain.core.files import write_json
from canon_pretrain.report.record import RunRecord
from canon_pretrain.stats.cells import (
    APART,
    ITEMS,
    UNBOUNDED,
    Cell,
    agree_p,
    difference_p,
    hidden_share,
    measure,
    measure_task,
    num_choices,
    with_all_or_nothing,
)
from canon_pretrain.stats.claims import Claim
from canon_pretrain.stats.decide import ALPHA

RUNGS = (0.25, 0.5, 1.0)  # shares of the steps after which a race looks
Arm = tuple[str, float | None]
"""An architecture and a learning rate; None: that of the config."""


class Stage(NamedTuple):
    """The first `num_seeds` seeds of all arms that are left train to `step`."""

    num_seeds: int
    step: int


def race_stages(num_seeds: int, steps: int) -> list[Stage]:
    """Return the stages of a task; after each but the last, arms may be stopped.

    A board with fewer than FIRST_SEEDS seeds stops nothing. In simulated boards of one task and two
    equal architectures whose runs learn or do not, a race with two seeds declared a false order in
    one of ten (tests/simulate_boards.py).
    """
    if num_seeds < FIRST_SEEDS:
        return [Stage(num_seeds, steps)]
    rungs = [Stage(FIRST_SEEDS, math.ceil(steps * share)) for share in RUNGS]
    further_counts = range(FIRST_SEEDS + 1, num_seeds + 1)
    further_seeds = [Stage(count, steps) for count in further_counts]
    return [*dict.fromkeys(rungs), *further_seeds]


class Comparison(NamedTuple):
    """The scores of both arms of a stop at one step; `items`: of each, as in `measure`."""

    worse: Sequence[float]
    better: Sequence[float]
    lower_is_better: bool = False
    items: int = ITEMS


class _Test(NamedTuple):
    """The p of an arm, or of all arms of its architecture, being as good as `better`."""

    p: float
    worse: Arm
    better: Arm


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
    Where runs jump from the floor to the ceiling, three seeds of each of two equal arms are all
    above and all below with a probability of up to 1 / 32, without any variance: `_chance_bound`.
    That an arm would not have overtaken later is not tested: of simulated boards with level arms of
    which one learns at half the speed, about one in five stops it (tests/simulate_boards.py).
    """

    task: str
    stages: Sequence[Stage]
    num_races: int = 1  # of the board
    claims: Sequence[Claim] = ()  # on this task; until they are decided, both sides are needed
    grid_arms: Collection[str] = ()  # that a claim over a grid needs: no order decides it
    stopped: dict[Arm, Stop] = field(default_factory=dict)
    decided: dict[tuple[str, str], Stop] = field(default_factory=dict)  # by (worse, better)
    seen: dict[Place, Cell] = field(default_factory=dict)
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
        # The arms whose scores are all known; those with a NaN have diverged.
        racing = {
            arm: [x for x in arm_scores if x is not None]
            for arm, arm_scores in scores.items()
            if arm not in self.stopped and None not in arm_scores
        }
        finite = {
            arm: arm_scores for arm, arm_scores in racing.items() if np.isfinite(arm_scores).all()
        }
        if not finite:
            return []

        # The arms of each architecture, which differ in their rates, the best first.
        cells = self._cells(finite, items, lower_is_better=lower_is_better)
        arms_of: dict[str, list[Arm]] = {}
        for arm in sorted(cells, key=lambda arm: -cells[arm].mean):
            architecture, _ = arm
            arms_of.setdefault(architecture, []).append(arm)

        # Arms that have diverged are worse than their architecture's best rate, or any arm. The
        # last one of an architecture that a claim needs trains on: diverged runs have a score.
        new: dict[Arm, Stop] = {}
        for arm in racing:
            architecture, _ = arm
            is_needed = architecture not in arms_of and self._needs(architecture)
            if arm not in finite and not is_needed:
                better = arms_of.get(architecture, [*finite])[0]
                new[arm] = self._stop(arm, better, stage, None)

        # Rates that are worse than another of their architecture. ALPHA is shared by the looks.
        num_looks = max(len(self.stages) - 1, 1)
        look_share = 1 / num_looks
        for arms in arms_of.values():
            level = look_share * ALPHA
            tests = [
                _Test(self._worse_p(cells, [worse], better, level, level), worse, better)
                for better, worse in itertools.combinations(arms, 2)
            ]
            for p, worse, better in _rejected(tests, look_share):
                new.setdefault(worse, self._stop(worse, better, stage, p))

        # Architectures of which all rates are worse than the best one of another. The best rate
        # was chosen, so that p counts as often as there are equal choices. ALPHA is shared by the
        # races and the final scores too.
        order_share = look_share * (RACE_SHARE / self.num_races)
        tests = []
        for better_arms, worse_arms in itertools.combinations(arms_of.values(), 2):
            better = better_arms[0]
            worse = worse_arms[0]
            pair = _architectures(worse, better)
            if pair in self.decided or pair[::-1] in self.decided:
                continue
            better_cells = [cells[arm] for arm in better_arms]
            choices = num_choices(cells[better], better_cells)
            level = order_share * ALPHA / choices
            chance_level = look_share * RACE_SHARE * ALPHA
            p = choices * self._worse_p(cells, worse_arms, better, level, chance_level)
            tests.append(_Test(p, worse, better))
        for p, worse, better in _rejected(tests, order_share):
            pair = _architectures(worse, better)
            self.decided[pair] = self._stop(worse, better, stage, p)

        # An architecture with a decided order is stopped at all rates, unless a claim needs it.
        for (architecture, _), order in self.decided.items():
            if not self._needs(architecture):
                for arm in arms_of.get(architecture, ()):
                    _, learning_rate = arm
                    new.setdefault(arm, replace(order, learning_rate=learning_rate))
        self.stopped |= new
        return [*new.values()]

    def reconsider(
        self,
        num_seeds: int,
        compare: Callable[[Stop], Comparison | None],
    ) -> list[Arm]:
        """Bring back the arms that are not worse than `num_seeds` seeds of what stopped them.

        That is if the p of this comparison alone is above ALPHA. `compare`: the finite scores of
        the seeds by which an arm was stopped, and of `num_seeds` of the better arm; None if one is
        unknown. An order is taken back with all that it stopped.
        """

        def holds(stop: Stop) -> bool:
            if stop.p is None or num_seeds <= stop.num_seeds:
                return True
            comparison = compare(stop)
            if comparison is None:
                return True
            scores = {"worse": comparison.worse, "better": comparison.better}
            cells = measure_task(scores, items=comparison.items)
            gain = cells["better"].mean - cells["worse"].mean
            if comparison.lower_is_better:
                gain = -gain
            p = difference_p(gain, cells["worse"], cells["better"])
            return gain > 0 and p is not None and p <= ALPHA

        revoked = {pair for pair, order in self.decided.items() if not holds(order)}
        for pair in revoked:
            del self.decided[pair]

        returned = []
        for arm, stop in [*self.stopped.items()]:
            is_rate = stop.better == stop.arm
            if (stop.arm, stop.better) in revoked or (is_rate and not holds(stop)):
                del self.stopped[arm]
                returned.append(arm)
        return returned

    def _stop(self, worse: Arm, better: Arm, stage: Stage, p: float | None) -> Stop:
        arm, learning_rate = worse
        better_arm, better_rate = better
        return Stop(
            task=self.task,
            arm=arm,
            learning_rate=learning_rate,
            better=better_arm,
            better_rate=better_rate,
            num_seeds=stage.num_seeds,
            step=stage.step,
            p=p,
            time=datetime.now(UTC).isoformat(timespec="seconds"),
        )

    def _cells(
        self, scores: Mapping[Arm, Sequence[float]], items: int, *, lower_is_better: bool
    ) -> dict[Arm, Cell]:
        """Return the cells, of which a higher mean is better, and add them to `seen`.

        How much variances differ between cells is learned from all newest cells of the board.
        """
        scores_by_arm: dict[str, dict[str, Sequence[float]]] = {}
        items_by_task = {self.task: items}
        for (task, *arm_of_cell), cell in self.seen.items():
            is_own = task == self.task
            if is_own and tuple(arm_of_cell) in self.stopped:
                continue  # of an earlier step
            seen_scores = cell.scores
            if is_own and lower_is_better:
                seen_scores = cell.negated().scores
            scores_by_arm.setdefault(str(arm_of_cell), {})[task] = seen_scores
            items_by_task.setdefault(task, cell.items)
        for arm, arm_scores in scores.items():
            scores_by_arm.setdefault(str([*arm]), {})[self.task] = arm_scores
        measured = measure(scores_by_arm, items=items_by_task)[self.task]

        for arm in scores:
            cell = measured[str([*arm])]
            if lower_is_better:
                cell = cell.negated()
            self.seen[(self.task, *arm)] = cell
        cells = {}
        for arm in scores:
            cells[arm] = with_all_or_nothing(self.seen, (self.task, *arm))
        return cells

    def _worse_p(
        self,
        cells: Mapping[Arm, Cell],
        arms: Sequence[Arm],
        best: Arm,
        level: float,
        chance_level: float,
    ) -> float:
        """Return the largest p of the arms being as good as `best`; 1 if it is above `level`.

        Return 1 also if an arm could equal `best` by chance with a probability above
        `chance_level`.
        """
        best_cell = cells[best]
        largest_p = 0.0
        for arm in arms:
            cell = cells[arm]
            size = best_cell.mean - cell.mean
            # The exact p is slow, and at least that of a normal distribution.
            stderr = math.sqrt(cell.variance + best_cell.variance)
            lower_bound = 2 * ndtr(-size / stderr)
            if size <= 0 or (lower_bound > level and not (cell.is_split or best_cell.is_split)):
                return 1.0
            p = difference_p(size, cell, best_cell)
            if p is None or p > level or self._chance_bound(cell, best_cell) > chance_level:
                return 1.0
            largest_p = max(largest_p, p)
        return largest_p

    def _chance_bound(self, low: Cell, high: Cell) -> float:
        """Return how probable it is that equal arms jumped with all seeds of `high`, none of `low`.

        0 if cells are split (tested as counts), if scores are not shares, or if no gap wider than
        APART separates both (learning is gradual). Else the two-sided p of the counts, times the
        probability that `high` is all-or-nothing. Its prior is from the share of split cells among
        those of the board that have left the floor, by the rule of succession.
        """
        if low.is_split or high.is_split or not high.is_share:
            return 0.0  # tested as counts anyway
        floors: dict[str, float] = {}
        task_scores: list[float] = []
        for (task, _, _), cell in self.seen.items():
            floors[task] = min(floors.get(task, math.inf), *cell.scores)
            if task == self.task:
                task_scores += cell.scores
        low_score = max(low.scores)
        high_score = min(high.scores)
        between = [score for score in task_scores if low_score <= score <= high_score]
        gaps = np.diff(np.sort([low_score, *between, high_score]))
        if max(gaps) <= APART:
            return 0.0

        has_left = [
            cell
            for (task, _, _), cell in self.seen.items()
            if cell is not high and (cell.is_split or min(cell.scores) > floors[task] + APART)
        ]
        num_split = sum(cell.is_split for cell in has_left)
        split_share = (num_split + 1) / (len(has_left) + 2)
        return 2 * agree_p(low.num_seeds, high.num_seeds) * hidden_share(high, split_share)

    def _needs(self, architecture: str) -> bool:
        """Return whether a claim on this architecture is open: neither confirmed nor refuted."""
        if architecture in self.grid_arms:
            return True
        for claim in self.claims:
            # Of other scores than that of the race, orders say nothing.
            if claim.score and architecture in (claim.worse, claim.better):
                return True
            is_confirmed = (claim.worse, claim.better) in self.decided
            # A claim with a margin may hold although `better` is worse.
            is_refuted = not claim.margin and (claim.better, claim.worse) in self.decided
            is_open = not is_confirmed and not is_refuted
            if is_open and architecture in (claim.worse, claim.better):
                return True
        return False


def _architectures(worse: Arm, better: Arm) -> tuple[str, str]:
    return worse[0], better[0]


def _rejected(tests: Sequence[_Test], share: float) -> Iterator[_Test]:
    """Yield the tests that Holm rejects at this share of ALPHA, with their p corrected."""
    for num_rejected, test in enumerate(sorted(tests, key=lambda test: test.p)):
        adjusted_p = test.p * (len(tests) - num_rejected) / share
        if adjusted_p > ALPHA:
            return
        yield test._replace(p=adjusted_p)


@dataclass
class Entry:
    """A race, the runs of its arms by seed, and its current stage."""

    race: Race
    runs: Mapping[Arm, Sequence[str]]
    size: str = ""
    score: str = ""  # default: the task's main one
    stage: int = 0
    is_over: bool = False  # all seeds have trained, and no arm has returned

    @property
    def name(self) -> str:
        """The key of the stage in race.json."""
        if not self.size:
            return self.race.task
        return f"{self.race.task}@{self.size}"

    @property
    def left(self) -> dict[Arm, Sequence[str]]:
        """The runs of the current stage by arm, of those that are not stopped."""
        num_seeds = self.race.stages[self.stage].num_seeds
        return {
            arm: runs[:num_seeds] for arm, runs in self.runs.items() if arm not in self.race.stopped
        }


def _have_reached(
    entry: Entry, stage: Stage, steps: Mapping[str, int], failed: Mapping[str, str]
) -> bool:
    """Return whether all runs that are left have reached a stage, or have failed."""
    runs = itertools.chain.from_iterable(entry.left.values())
    return all(steps[run] >= stage.step or run in failed for run in runs)


def _compare(
    entry: Entry,
    stop: Stop,
    num_seeds: int,
    read_curve: Callable[[str, int], tuple[Metric, dict[int, float]] | None],
) -> Comparison | None:
    """Return the scores of a stopped arm and of `num_seeds` seeds of the better one.

    They are of the last step up to that of the stop at which all of these runs have one: further
    seeds train straight past it, and validate only at multiples of validation.freq. None if there
    is no such step, if a run has not reached the stop, or if one has diverged.
    """
    worse_names = entry.runs.get(stop.worse_arm, ())[: stop.num_seeds]
    better_names = entry.runs.get(stop.better_arm, ())[:num_seeds]
    if len(worse_names) < stop.num_seeds or len(better_names) < num_seeds:
        return None

    curves = {}
    for name in (*worse_names, *better_names):
        read = read_curve(name, stop.step)
        if read is None:
            return None
        _, curves[name] = read
        if max(curves[name], default=0) < stop.step:
            return None

    shared_steps = [
        step
        for step in curves[better_names[0]]
        if step <= stop.step and all(step in curve for curve in curves.values())
    ]
    if not shared_steps:
        return None

    # The metric is of the compared step: at their last one runs are asked about more windows.
    step = max(shared_steps)
    read = read_curve(better_names[0], step)
    worse_scores = finite_scores(curves[name][step] for name in worse_names)
    better_scores = finite_scores(curves[name][step] for name in better_names)
    if read is None or len(worse_scores) < stop.num_seeds or len(better_scores) < num_seeds:
        return None
    metric, _ = read
    return Comparison(
        worse_scores,
        better_scores,
        lower_is_better=metric.lower_is_better,
        items=metric.items or UNBOUNDED,
    )


class BoardRace:
    """The races of a board in `folder`: to which step a run may train now, and what is stopped."""

    def __init__(self, folder: Path, entries: Sequence[Entry]) -> None:
        self.folder = folder
        self.entries = entries
        self._places = {
            run: (entry, arm)
            for entry in entries
            for arm, runs in entry.runs.items()
            for run in runs
        }

        # Continue from race.json, which may be of a plan with more stages. A task has a race per
        # size, each with the stops of its own arms; the races of a board see each other's cells.
        record = read_race(folder)
        seen: dict[Place, Cell] = {}
        for entry in entries:
            race = entry.race
            race.seen = seen
            stage = record.stages.get(entry.name, 0)
            entry.stage = min(stage, len(race.stages) - 1)
            architectures = {architecture for architecture, _ in entry.runs}
            for stop in record.stops:
                if stop.task == race.task and stop.arm in architectures:
                    race.stopped[stop.arm, stop.learning_rate] = stop
            for order in record.orders:
                if order.task == race.task and order.arm in architectures:
                    race.decided[order.arm, order.better] = order

        # Before the first look: from here on the final tests have only 1 - RACE_SHARE of alpha.
        self._write()

    def is_stopped(self, run: str) -> bool:
        entry, arm = self._places[run]
        return arm in entry.race.stopped

    def target(self, run: str) -> int:
        """Return the step to which a run may train; 0 if none, or if its arm is stopped."""
        entry, arm = self._places[run]
        if run not in entry.left.get(arm, ()):
            return 0
        return entry.race.stages[entry.stage].step

    def advance(self, steps: Mapping[str, int], failed: Mapping[str, str]) -> list[Stop]:
        """Look at each race whose runs have reached their stage; return the new stops.

        `steps`: the step of each run. Failed runs, by reason, are not waited for; unless they have
        diverged, their arms decide nothing.
        """
        new = list[Stop]()
        has_moved = False
        for entry in self.entries:
            last_stage = len(entry.race.stages) - 1
            while entry.stage < last_stage:
                stage = entry.race.stages[entry.stage]
                if not _have_reached(entry, stage, steps, failed):
                    break

                new += self._look(entry, stage, failed)
                self._reconsider(entry, stage)
                entry.stage += 1
                if len(entry.left) <= 1:  # nothing to race with: it trains the rest of its seeds
                    entry.stage = last_stage
                has_moved = True

            # The last seeds may bring arms back, which then train all of theirs.
            stage = entry.race.stages[entry.stage]
            is_last = entry.stage == last_stage and not entry.is_over
            if is_last and _have_reached(entry, stage, steps, failed):
                returned = self._reconsider(entry, stage)
                entry.is_over = not returned
                has_moved |= bool(returned)
        if has_moved:
            self._write()
        return new

    def _look(self, entry: Entry, stage: Stage, failed: Mapping[str, str]) -> list[Stop]:
        """Let the race look at the scores of a stage, if the runs have them."""
        metric = HELD_OUT_LOSS  # of the task: equal for all runs

        # By arm and seed: None if it is unknown, NaN if the run has diverged.
        scores = dict[Arm, list[float | None]]()
        for arm, names in entry.left.items():
            scores[arm] = [None] * len(names)
            for seed_index, name in enumerate(names):
                if name in failed:  # not read: it may be a run of another plan
                    if NOT_FINITE in failed[name]:
                        scores[arm][seed_index] = math.nan
                    continue
                metric, curve = self._curve(entry, name, stage.step) or (metric, {})
                scores[arm][seed_index] = curve.get(stage.step)

        return entry.race.look(
            stage,
            scores,
            lower_is_better=metric.lower_is_better,
            items=metric.items or UNBOUNDED,
        )

    def _curve(self, entry: Entry, name: str, step: int) -> tuple[Metric, dict[int, float]] | None:
        """Return the metric of a run's task at `step` and its scores by step; None without any."""
        with suppress(UserError, OSError, KeyError, TypeError, ValueError):
            record = RunRecord(self.folder / name)
            is_last_step = step == record.identity["training.steps"]
            metric = Metric.of(record, entry.score, is_last_step=is_last_step)
            return metric, score_curve(record, metric.name)
        return None

    def _reconsider(self, entry: Entry, stage: Stage) -> list[Arm]:
        """Bring back arms of a race by the scores that the seeds up to a stage have."""
        if not entry.race.stopped:
            return []
        # Many arms may have been stopped by the same one: each of its runs is read once.
        read_curve = functools.cache(functools.partial(self._curve, entry))
        return entry.race.reconsider(
            stage.num_seeds,
            lambda stop: _compare(entry, stop, stage.num_seeds, read_curve),
        )

    def _write(self) -> None:
        """Write race.json; stops of arms that are not in the board any more stay in it."""
        # What was written of other arms.
        old = read_race(self.folder)
        arms = {
            (entry.race.task, architecture)
            for entry in self.entries
            for architecture, _ in entry.runs
        }
        stops = {stop.place: stop for stop in old.stops if (stop.task, stop.arm) not in arms}
        orders = {
            (order.task, order.arm, order.better): order
            for order in old.orders
            if (order.task, order.arm) not in arms
        }

        # What the races of this board say of theirs.
        stages = dict(old.stages)
        for entry in self.entries:
            race = entry.race
            stages[entry.name] = entry.stage
            for stop in race.stopped.values():
                stops[stop.place] = stop
            for (worse, better), order in race.decided.items():
                orders[race.task, worse, better] = order

        record = RaceRecord(list(stops.values()), list(orders.values()), stages)
        write_json(self.folder / RACE, asdict(record))
