"""How often a claim over a grid is wrong, on simulated grids.

    python -m tests.simulate_grids [--boards 1000]

Null grids have two exchangeable architectures; `NULLS` are their kinds of noise. `rates`: each side
shows the best of so many learning rates. "flat against peaked" is null at the best rates only: all
rates of `better` are equally good, one of `worse` is.

Twelve cells, 1,000 grids each (2026-11-30), in %: claims seen on null grids (at most 5 but for the
error of the simulation, 0.7), and intervals that cover 0.

    null                    1 seed       3 seeds
    normal                 5.3  94.7    4.5  94.4
    own spreads            3.9  95.0    4.6  95.5
    unequal spreads        6.4  94.8    3.8  96.1    (6,000 more grids of 1 seed: 5.2)
    stuck                  4.3  95.7    5.3  94.6
    learned or not         1.4  99.3    2.8  97.6
    ends                   2.9  97.4    5.1  94.7
    copy                   1.8  99.4    3.7  96.3
    mqar                   3.9  97.9    5.3  94.4
    depo                   5.3  96.4    5.4  94.6
    mano                   3.6  96.2    5.1  94.6
    state                  3.8  96.7    4.0  96.4
    brevo                  5.5  96.1    5.2  95.6
    lano                   3.6  95.7    4.1  95.8
    flat against peaked, 4 rates  4.2  96.9    4.5  97.6

A bootstrap of the twelve gains of one seed covers 91, 89 and 86 % (normal, own spreads, stuck).
True gains that are seen, one seed per cell, alone or as the only true one of twelve claims:

    gain 0.3, noise 0.1   100   99.9    (spread of true gains 0.2: 98.6; 1 of 8 runs stuck: 84.8;
    gain 0.3, noise 0.2    96   65       six cells: 99.2)
    gain 0.2, noise 0.1   99.9  92
    gain 0.1, noise 0.1    72   25
    gain 0.1, noise 0.05  99.9  92
    gain 0.05, noise 0.05  72   25
"""

import argparse
import json

import numpy as np

from canon_pretrain.stats.grid import GridCell, grid_gain

CELLS = 12
ITEMS = 256
MEASURED = {
    # scores of three seeds per cell: of places.toml and `compare`; brevo and lano of results.toml
    "copy": [
        (0, 0, 0),
        (0, 0, 1),
        (0, 1, 1),
        (0.773, 0, 0),
        (0, 0.938, 1),
        (1, 1, 1),
        (1, 0.969, 1),
    ],
    "mqar": [
        (0.059, 0.057, 0.061),
        (1, 1, 1),
        (1, 1, 0.049),
        (1, 0.053, 0.051),
        (1, 0.555, 0.396),
        (0.998, 0.998, 0.348),
        (0.836, 0.998, 0.898),
        (0.039, 0.352, 0.055),
        (0.994, 1, 0.710),
    ],
    "depo": [
        (0.161, 0.156, 0.156),
        (0.307, 0.346, 0.268),
        (0.232, 0.388, 0.383),
        (0.607, 0.570, 0.674),
        (0.617, 0.505, 0.570),
        (0.583, 0.456, 0.547),
        (0.695, 0.680, 0.698),
        (0.432, 0.297, 0.594),
    ],
    "mano": [
        (0.272, 0.316, 0.275),
        (0.300, 0.447, 0.313),
        (0.341, 0.419, 0.397),
        (0.466, 0.472, 0.466),
        (0.588, 0.650, 0.619),
        (0.806, 0.738, 0.750),
    ],
    "state": [
        (0.531, 0.547, 0.555),
        (0.617, 0.563, 0.461),
        (0.695, 0.688, 0.586),
        (0.508, 0.508, 0.477),
    ],
    "brevo": [
        (0.013, 0.029, 0.005),
        (0.408, 0.439, 0.384),
        (0.429, 0.413, 0.374),
        (0.437, 0.455, 0.5),
        (0.368, 0.384, 0.339),
        (0.026, 0.008, 0.024),
        (0.016, 0.011, 0.013),
        (0.392, 0.376, 0.321),
        (0.018, 0.05, 0.066),
        (0.389, 0.426, 0.368),
        (0.024, 0.011, 0.016),
        (0.184, 0.205, 0.253),
        (0.408, 0.374, 0.474),
        (0.489, 0.497, 0.555),
        (0.063, 0.05, 0.068),
        (0.471, 0.508, 0.416),
        (0.126, 0.055, 0.137),
        (0.442, 0.453, 0.503),
        (0.482, 0.432, 0.445),
    ],
    "lano": [
        (0.025, 0.03, 0.035),
        (0.38, 0.37, 0.345),
        (0.365, 0.37, 0.28),
        (0.225, 0.265, 0.225),
        (0.345, 0.345, 0.315),
        (0.025, 0.015, 0.01),
        (0.005, 0.005, 0),
        (0.23, 0.235, 0.255),
        (0.005, 0, 0.005),
        (0.305, 0.205, 0.285),
        (0.015, 0.01, 0),
        (0.075, 0.09, 0.1),
        (0.35, 0.315, 0.29),
        (0.38, 0.28, 0.31),
        (0.02, 0.03, 0.015),
        (0.375, 0.35, 0.28),
        (0.025, 0.01, 0.015),
        (0.425, 0.31, 0.32),
        (0.26, 0.275, 0.205),
    ],
}
NULLS = ("normal", "own spreads", "unequal spreads", "stuck", "learned or not", "ends")


def scores_of(rng, kind, seeds, rates=1):
    """Return the scores of both sides of a null grid: [side, cell, seed, rate]."""
    shape = (2, CELLS, seeds, rates)
    level = rng.uniform(0.3, 0.7, (CELLS, 1, 1))
    if kind == "normal":
        return level + rng.normal(0, 0.1, shape)
    if kind == "own spreads":
        return level + rng.normal(size=shape) * np.exp(rng.normal(-2.5, 1, (CELLS, 1, 1)))
    if kind == "unequal spreads":  # one side varies five times as much
        return level + rng.normal(size=shape) * rng.permutation([0.05, 0.25])[:, None, None, None]
    if kind == "stuck":  # one run of eight does not learn
        learned = rng.random(shape) >= 1 / 8
        return np.where(learned, rng.normal(0.95, 0.03, shape).clip(0, 1), 0.0)
    if kind == "learned or not":
        return np.where(rng.random(shape) < rng.random((CELLS, 1, 1)), 1.0, 0.02)
    if kind == "ends":  # a third at the floor, a third at the ceiling
        share = rng.permutation(np.repeat([0.001, 0.999, 0.5], CELLS // 3))[:, None, None]
        logit = np.log(share / (1 - share)) + rng.normal(size=shape)
        return rng.binomial(ITEMS, 1 / (1 + np.exp(-logit))) / ITEMS

    # of measured scores: any three seeds of a cell, with their spread
    cells = MEASURED[kind]
    scores = np.empty(shape)
    for c in range(CELLS):
        scores[:, c] = rng.choice(cells[rng.integers(len(cells))], (2, seeds, rates))
    return scores


def grid_of(scores, better_rates=None, worse_rates=None):
    """Return the cells of scores [side, cell, seed, rate], at the best rates of each side."""
    cells = []
    for better, worse in zip(*scores, strict=True):
        better = better[:, :better_rates]
        worse = worse[:, :worse_rates]
        better_means = better.mean(axis=0)
        worse_means = worse.mean(axis=0)
        gains = better[:, better_means.argmax()] - worse[:, worse_means.argmax()]
        cells.append(GridCell(gains, better_means, worse_means))
    return cells


def null_grids(kind, seeds, boards, rng, rates=1, worse_rates=None):
    """Return the shares of null grids with a claim that is seen, and of intervals that cover 0."""
    false_claims = 0
    covered = 0
    for _ in range(boards):
        tested = grid_gain(grid_of(scores_of(rng, kind, seeds, rates), None, worse_rates))
        false_claims += tested.p <= 0.05
        low, high = tested.interval
        covered += low <= 0 <= high
    return {"false": false_claims / boards, "coverage": covered / boards}


def true_gains(gain, noise, seeds, boards, rng, cells=CELLS, *, spread=0.0, stuck=0.0, claims=1):
    """Return the share of grids in which a true gain is seen by Holm's correction over `claims`.

    Only this claim is true, so that its p must be below 0.05 / claims. `spread`: of the true gains
    over cells; `stuck`: share of the runs of both sides that score 0. Coverage is of the mean over
    the cells' true gains.
    """
    seen = 0
    covered = 0
    for _ in range(boards):
        true = gain + spread * rng.normal(size=cells)
        scores = rng.normal(0.4, noise, (2, cells, seeds))
        scores[0] += true[:, None]
        scores *= rng.random(scores.shape) >= stuck
        tested = grid_gain([GridCell(each) for each in scores[0] - scores[1]])
        seen += tested.p <= 0.05 / claims
        low, high = tested.interval
        covered += low <= (1 - stuck) * true.mean() <= high
    return {"seen": seen / boards, "coverage": covered / boards}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--boards", type=int, default=1000)
    boards = parser.parse_args().boards

    for kind in (*NULLS, *MEASURED):
        for seeds in (1, 3):
            print_row({"null": kind, "seeds": seeds}, null_grids(kind, seeds, boards, new_rng()))
    for seeds, rates in ((1, 2), (1, 4), (2, 4), (3, 4)):
        rows = {
            "both flat": null_grids("normal", seeds, boards, new_rng(), rates),
            "flat against peaked": null_grids("normal", seeds, boards, new_rng(), rates, 1),
            "own spreads, flat against peaked": null_grids(
                "own spreads", seeds, boards, new_rng(), rates, 1
            ),
        }
        for name, row in rows.items():
            print_row({"rates": rates, "of": name, "seeds": seeds}, row)

    for gain in (0.3, 0.2, 0.1, 0.05):
        for noise in (0.05, 0.1, 0.2):
            for claims in (1, 12):
                row = true_gains(gain, noise, 1, boards, new_rng(), claims=claims)
                print_row({"gain": gain, "noise": noise, "claims": claims}, row)
    for settings in ({"spread": 0.2}, {"stuck": 1 / 8}, {"cells": 6}):
        row = true_gains(0.3, 0.1, 1, boards, new_rng(), **settings)
        print_row({"gain": 0.3, "noise": 0.1} | settings, row)


def new_rng():
    return np.random.default_rng(0)


def print_row(settings, rates):
    """Print a line of JSON."""
    print(json.dumps(settings | rates), flush=True)


if __name__ == "__main__":
    main()
