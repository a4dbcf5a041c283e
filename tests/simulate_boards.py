"""Coverage, error rates and tokens of a board's statistics, on simulated boards.

    python -m tests.simulate_boards [--boards 1000]

A board has 8 tasks x 4 architectures. Kinds of seed noise: `normal` (one variance per task),
`mixed` (of every cell its own), `logit` (256 items, normal on the logit scale, cells from chance to
ceiling), `bimodal` (a run learns the task, or does not), `beside steady` (one architecture is
bimodal, the others always score what it does on average). Races are of learning curves: sigmoids
whose seeds differ in when they learn and in their final level; with `failing`, a run that fails
stays where it began.
"""

import argparse
import itertools
import json
from typing import NamedTuple

import numpy as np
from scipy.special import ndtri

from canon_pretrain.boards import race as racing
from canon_pretrain.boards.stops import RACE_SHARE
from canon_pretrain.stats import cells as board
from canon_pretrain.stats.claims import Claim
from tests.simulate_grids import MEASURED

TASKS, NAMES, ITEMS = 8, ("a", "b", "c", "d"), 256
KINDS = ("normal", "mixed", "logit", "bimodal", "beside steady")
LEVELS = (0.1, 0.3, 0.5, 0.8, 0.95, 0.995)
OTHERS = [
    ("equal", (), 1.0),
    ("equal, one slower", (), 2.0),
    ("not learned", (0.05, 0.15), 1.0),
    ("far", (0.05, 0.15, 0.3), 1.0),
    ("half", (0.05, 0.3, 0.5), 1.0),
    ("near", (0.05, 0.5, 0.75), 1.0),
    ("some equal", (0.05, 0.5, 0.9), 1.0),
]
DESIGNS = [(4, 4, 3), (6, 4, 5), (4, 1, 3)]  # architectures, learning rates, seeds
LOOKS = 16


def _sigmoid(x):
    return 1 / (1 + np.exp(-x))


def _cell(rng, kind, level, spread, seeds):
    """Return the true mean and the scores of one cell."""
    if kind in ("normal", "mixed"):
        return 5 * level, rng.normal(5 * level, spread, seeds)  # like losses: not bounded
    if kind == "logit":
        center = np.log(level / (1 - level))
        scores = rng.binomial(ITEMS, _sigmoid(center + spread * rng.normal(size=seeds))) / ITEMS
        return _sigmoid(center + spread * rng.normal(size=10_000)).mean(), scores
    mean = 0.12 + 0.86 * level
    scores = mean + rng.normal(0, 0.01, seeds)
    if kind == "bimodal":
        scores += np.where(rng.random(seeds) < level, 0.98, 0.12) - mean
    return mean, np.clip(scores, 0, 1)


def scores_of(rng, kind, seeds, *, null):
    """Return true means and scores [name][task]; `null`: equal means; `mixed`: unequal noise."""
    means = {name: {} for name in NAMES}
    scores = {name: {} for name in NAMES}
    for task in map(str, range(TASKS)):
        level = rng.choice(LEVELS)
        spread = np.exp(rng.normal(-0.7, 0.5))

        for name in NAMES:
            if not null:
                level = rng.choice(LEVELS)
            if kind == "mixed" or (kind == "logit" and not null):
                spread = np.exp(rng.normal(-0.7, 0.5))
            cell_kind = "bimodal" if kind == "beside steady" and name == NAMES[0] else kind
            mean, cell_scores = _cell(rng, cell_kind, level, spread, seeds)
            means[name][task] = mean
            scores[name][task] = cell_scores
    return means, scores


def fixed_boards(kind, seeds, boards, rng):
    """Return the share of intervals that cover, and of null boards with any difference called."""
    covered = []
    false_calls = 0
    false_claims = 0
    claims = [Claim(str(task), *NAMES[:2]) for task in range(TASKS)]

    for _ in range(boards):
        means, scores = scores_of(rng, kind, seeds, null=False)
        for task, by_name in board.measure(scores).items():
            for name, cell in by_name.items():
                low, high = cell.interval
                covered.append(low <= means[name][task] <= high)

        _, null_scores = scores_of(rng, kind, seeds, null=True)
        cells = board.measure(null_scores)
        false_calls += any(each.better for each in board.differences(cells))
        false_claims += any(each.is_seen for each in board.check_claims(cells, claims))
    return float(np.mean(covered)), false_calls / boards, false_claims / boards


def learned_or_not(tasks, steady, seeds, boards, rng, *, learns=0.5, scale=1.0):
    """Return the share of boards with a false claim on two architectures that learn equally often.

    A claim per task; `steady`: other architectures with a noise of 0.01. With a `scale` above 1
    scores are no shares.
    """
    claims = [Claim(str(task), *NAMES[:2]) for task in range(tasks)]
    false_claims = 0
    for _ in range(boards):
        scores = {}
        for name in (*NAMES[:2], *(f"steady{k}" for k in range(steady))):
            values = 0.5 + 0.01 * rng.normal(size=(tasks, seeds))
            if name in NAMES:
                jumps = rng.random((tasks, seeds)) < learns
                values = np.where(jumps, 0.98, 0.02) + 0.005 * rng.normal(size=(tasks, seeds))
            values = scale * values.clip(0, 1)
            scores[name] = {str(task): list(values[task]) for task in range(tasks)}
        tested = board.check_claims(board.measure(scores), claims)
        false_claims += any(claim.is_seen for claim in tested)
    return false_claims / boards


def chosen_boards(rates, seeds, boards, rng):
    """Return as `fixed_boards` of cells at the best of several rates, equal at their best rates.

    Noise is normal. The other rates of an architecture are worse by a curvature of its own.
    """
    covered, false_calls, false_claims = [], 0, 0
    claims = [Claim(str(task), *NAMES[:2]) for task in range(TASKS)]
    for _ in range(boards):
        named, choices, means = {}, {}, {}
        for name, task in itertools.product(NAMES, map(str, range(TASKS))):
            away = np.arange(rates) - rng.integers(rates)
            mean = -rng.choice([0, 0.1, 0.3, 1, 3]) * away**2
            arms = {(name, rate): rng.normal(mean[rate], 1, seeds) for rate in range(rates)}
            ((group, count, rate),) = chosen(arms).values()
            named.setdefault(name, {})[task], choices[name, task] = group, count
            means[name, task] = mean[int(rate)]
        cells = board.measure(named, choices=choices)
        for task, name in itertools.product(cells, NAMES):
            low, high = cells[task][name].interval
            covered.append(low <= means[name, task] <= high)
        false_calls += any(each.better for each in board.differences(cells))
        false_claims += any(each.is_seen for each in board.check_claims(cells, claims))
    return float(np.mean(covered)), false_calls / boards, false_claims / boards


class Curves(NamedTuple):
    """Simulated scores, of every step / LOOKS, and the true final levels."""

    scores: np.ndarray  # [task, name, rate, seed, look]
    level: np.ndarray  # [task, name, rate]


def curves(rng, design, levels=(), slower=1.0, failing=0.0):
    """Return the curves of a board; `levels` are of the architectures but the first.

    At its best rate an architecture has its level (the first 0.9; without `levels` all are equal).
    Other rates are worse by a curvature of its own, which may be 0, and learn later. The last
    architecture learns `slower`; a share `failing` of all runs does not learn.
    """
    names, rates, seeds = design
    level = rng.choice([0.05, 0.5, 0.9], (TASKS, 1)).repeat(names, 1)
    if levels:
        level[:, 0], level[:, 1:] = 0.9, rng.choice(levels, (TASKS, names - 1))
    away = np.arange(rates) - rng.integers(0, rates, (TASKS, names, 1))
    center = np.log(level / (1 - level))[..., None]
    center = center - rng.choice([0, 0.3, 1.0], (TASKS, names, 1)) * away**2
    middle = rng.choice([0.05, 0.1, 0.2, 0.4], (TASKS, 1, 1)) * np.exp(0.2 * abs(away))
    if slower > 1:
        middle /= slower
        middle[:, -1] *= slower
    shape = (TASKS, names, rates, seeds, 1)
    at = np.arange(1, LOOKS + 1) / LOOKS
    middle = middle[..., None, None] * np.exp(0.15 * rng.normal(size=shape))
    learned = _sigmoid((at - middle) / (0.2 * middle))
    learned *= rng.random(shape) >= failing
    seen = _sigmoid(center[..., None, None] + 0.3 * rng.normal(size=shape)) * learned
    return Curves(rng.binomial(ITEMS, seen) / ITEMS, _sigmoid(center))


MEASURED_BOARDS = [[task] * 4 for task in MEASURED] + [["copy"], [*MEASURED]]
JUMPING = ("copy", "mqar")  # tasks that a run learns at once, or not


def measured_curves(rng, tasks, names, seeds, jump_spread=0.5, failing=None, floors=0):
    """Return curves of equal architectures, with the spread over seeds that was measured.

    `tasks`: of MEASURED, one per task of the board. All architectures of a task draw their final
    scores from the same cell. A run of a JUMPING task has its floor until it jumps, at a time whose
    log varies by `jump_spread`; a share `failing` of all runs, by default a random one below a
    half, jumps too late, and the others end as the learned ones of the cell. Other curves rise.
    `floors`: so many of the architectures never leave the floor.
    """
    at = np.arange(1, LOOKS + 1) / LOOKS
    scores = np.empty((len(tasks), names, 1, seeds, LOOKS))
    for t, task in enumerate(tasks):
        cells = MEASURED[task]
        final = rng.choice(cells[rng.integers(len(cells))], (names, 1, seeds, 1)).astype(float)
        floor = min(map(min, cells))
        if task in JUMPING:
            learned = [score for cell in cells for score in cell if score > 0.3]
            share = rng.uniform(0, 0.5) if failing is None else failing
            final = rng.choice(learned, final.shape)
            log_times = jump_spread * (rng.normal(size=final.shape) + ndtri(share))
            rise = at >= np.exp(log_times)
        else:
            middle = 0.3 * np.exp(0.15 * rng.normal(size=final.shape))
            rise = _sigmoid((at - middle) / (0.2 * middle))
        rise = rise * (np.arange(names) < names - floors)[:, None, None, None]
        true = (floor + (final - floor) * rise).clip(0, 1)
        scores[t] = rng.binomial(ITEMS, true) / ITEMS
    level = np.zeros(scores.shape[:3])
    level[:, names - floors :] = -1
    return Curves(scores, level)


def null_races(boards, rng, tasks, names, seeds, **settings):
    """Return the shares of boards of equal architectures with a false order: by races, and all."""
    raced = 0
    wrong = 0
    for _ in range(boards):
        drawn = measured_curves(rng, tasks, names, seeds, **settings)
        raced += _rates_of(race(drawn, final=False)[0], drawn.level)[0]
        wrong += _rates_of(race(drawn)[0], drawn.level)[0]
    return {"raced": raced / boards, "false": wrong / boards}


def chosen(arms):
    """Return by name, of arms {(name, rate): scores}, those of the best rate, choices, rate."""
    by_name = {}
    for (name, rate), group in arms.items():
        by_name.setdefault(name, {})[rate] = group
    best = {name: board.rate_optimum(groups) for name, groups in by_name.items()}
    return {
        name: (by_name[name][each.rate], each.choices, each.rate) for name, each in best.items()
    }


def calls(arms_by_task, share=1.0):
    """Return {(task, worse, better)} of the final scores."""
    named, choices = {}, {}
    for task, arms in arms_by_task.items():
        for name, (group, count, _) in chosen(arms).items():
            named.setdefault(name, {})[task], choices[name, task] = group, count
    cells = board.measure(named, choices=choices)
    found = board.differences(cells)
    return {
        (each.task, each.b if each.better == each.a else each.a, each.better)
        for each in found
        if each.better and each.p_holm <= share * board.ALPHA
    }


def race(drawn, final=True):
    """Return the orders called by the race and, if `final`, at its end; and its share of tokens."""
    seen = drawn.scores
    names, rates, seeds = seen.shape[1:4]
    stages = racing.race_stages(seeds, LOOKS)
    orders = set()
    final_scores = {}
    spent = 0
    cells = {}
    for t in range(len(seen)):
        run = racing.Race(str(t), stages, len(seen), seen=cells)
        steps = np.zeros(seen.shape[1:4], int)
        arms = {(f"a{k}", float(r)): (k, r) for k in range(names) for r in range(rates)}

        for stage in stages:
            for place in arms.values():
                steps[place][: stage.num_seeds] = stage.step
            scores = {
                arm: seen[t, k, r, : stage.num_seeds, stage.step - 1]
                for arm, (k, r) in arms.items()
            }
            if stage == stages[-1]:
                final_scores[str(t)] = scores
                break
            for stop in run.look(stage, scores):
                del arms[stop.arm, stop.learning_rate]

        spent += steps.sum()
        orders |= {(str(t), *pair) for pair in run.decided}
    if final:
        orders |= calls(final_scores, 1 - RACE_SHARE)
    return orders, spent / seen.size


def fixed(drawn):
    """Return the orders that the fixed design calls."""
    names, rates = drawn.scores.shape[1:3]
    return calls(
        {
            str(t): {
                (f"a{k}", float(r)): drawn.scores[t, k, r, :, -1]
                for k in range(names)
                for r in range(rates)
            }
            for t in range(TASKS)
        }
    )


def _rates_of(orders, level):
    """Return whether an order is false, and the number of worse architectures found."""
    best = level.max(axis=2)
    pairs = [(int(t), int(a[1:]), int(b[1:])) for t, a, b in orders]
    is_false = any(best[t, a] >= best[t, b] for t, a, b in pairs)
    worse = {(t, a) for t, a, b in pairs if best[t, a] < best[t, b]}
    return is_false, len(worse)


def races(boards, rng, design, levels=(), slower=1.0, failing=0.0, final=True):
    """Return the error rates of both designs, and the race's power and tokens.

    Without `final`, only of the orders that the race decides before its last stage.

    Power is the share of architectures below the best of their task that are called worse than
    another.
    """
    sums = np.zeros(6)
    for _ in range(boards):
        drawn = curves(rng, design, levels, slower, failing)
        race_orders, tokens = race(drawn, final)
        fixed_orders = fixed(drawn) if final else set()

        false, power = _rates_of(race_orders, drawn.level)
        fixed_false, fixed_power = _rates_of(fixed_orders, drawn.level)
        best = drawn.level.max(axis=2)
        worse = (best < best.max(axis=1, keepdims=True)).sum()
        sums += (false, fixed_false, tokens, power, fixed_power, worse)

    false, fixed_false, tokens, power, fixed_power, worse = sums
    row = {"false": false / boards, "fixed_false": fixed_false / boards, "tokens": tokens / boards}
    if worse:
        row |= {"power": power / worse, "fixed_power": fixed_power / worse}
    return row


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--boards", type=int, default=1000)
    boards = parser.parse_args().boards
    names = ("coverage", "false_calls", "false_claims")

    for kind in KINDS:
        for seeds in (3, 5):
            rates = fixed_boards(kind, seeds, boards, np.random.default_rng(0))
            print_row({"kind": kind, "seeds": seeds}, dict(zip(names, rates, strict=True)))
    for seeds in (3, 5):
        rates = chosen_boards(4, seeds, boards, np.random.default_rng(0))
        print_row({"rates": 4, "seeds": seeds}, dict(zip(names, rates, strict=True)))

    for tasks, steady, seeds in itertools.product((1, 10), (0, 6), (2, 3, 5)):
        for scale in (1, 10):
            rate = learned_or_not(
                tasks, steady, seeds, boards, np.random.default_rng(0), scale=scale
            )
            settings = {"learned or not": tasks, "steady": steady, "seeds": seeds, "scale": scale}
            print_row(settings, {"false_claims": rate})
    for tasks, names, seeds in itertools.product(MEASURED_BOARDS, (2, 4, 10), (3, 5)):
        rng = np.random.default_rng(0)
        floors = names // 2 if names > 2 else 0
        rates = null_races(boards, rng, tasks, names, seeds, floors=floors)
        settings = {"names": names, "at the floor": floors, "tasks": tasks, "seeds": seeds}
        print_row(settings, rates)

    for failing in (0.05, 0.1, 0.2, 0.4):
        rates = races(boards, np.random.default_rng(0), (4, 1, 3), failing=failing)
        print_row({"failing": failing, "design": (4, 1, 3)}, rates)
    for design in DESIGNS:
        for name, levels, slower in OTHERS:
            rates = races(boards, np.random.default_rng(0), design, levels, slower)
            print_row({"others": name, "design": design}, rates)


def print_row(settings, rates):
    """Print a line of JSON."""
    print(json.dumps(settings | rates), flush=True)


if __name__ == "__main__":
    main()
