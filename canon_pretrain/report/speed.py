"""The training speed of one kind of model relative to another. No torch."""

import math
import statistics
from collections.abc import Sequence
from typing import Any

from canon_pretrain.report.record import RunRecord
from canon_pretrain.run.folder import RunFolder
from canon_pretrain.run.launches import launch_numbers, read_launch

Machine = tuple[Any, ...]
"""Hosts, number of ranks, and the type and names of the devices."""

MAX_SPREAD = 1.1
"""Speeds of seeds of one model that differ by a larger factor were disturbed by other programs."""


def speed_ratio(baseline: Sequence[RunRecord], others: Sequence[RunRecord]) -> float | None:
    """Return the tokens per second of `others` over those of `baseline`, medians over steps.

    None if it is not known, if not all runs had the same machine, or if they were disturbed.
    """
    if not same_machine([*baseline, *others]):
        return None

    # Each side's median over its seeds of each run's median over its steps.
    medians = []
    for side in (baseline, others):
        speeds = []
        for run in side:
            speed = median_speed(run)
            if speed is None:
                return None
            speeds.append(speed)
        if max(speeds) > MAX_SPREAD * min(speeds):
            return None
        medians.append(statistics.median(speeds))
    baseline_speed, other_speed = medians
    return other_speed / baseline_speed


def speed_sentence(ratio: float | None, baseline: str) -> str | None:
    """Return what `speed_ratio` says in words; None if it is not known."""
    if ratio is None:
        return None
    return f"Speed: {ratio:.2f} of the tokens per second of {baseline}, median over steps."


def same_machine(runs: Sequence[RunRecord]) -> bool:
    """Return whether all launches of the runs were on one known machine, with equal ranks."""
    return _common_machine([_machine(run.folder) for run in runs]) is not None


def _machine(folder: RunFolder) -> Machine | None:
    """Return hosts, ranks and devices of a run; None if unknown, or if launches differ in them."""
    machines: list[Machine | None] = []
    for number in launch_numbers(folder):
        launch = read_launch(folder, number) or {}
        hosts = launch.get("hosts")
        devices = launch.get("devices")
        if not hosts or not devices:
            return None
        machine = (
            hosts,
            launch["world_size"],
            devices.get("type"),
            devices.get("names"),
        )
        machines.append(machine)
    return _common_machine(machines)


def _common_machine(machines: Sequence[Machine | None]) -> Machine | None:
    """Return the machine of all; None if they differ, or if there are none."""
    if not machines or any(machine != machines[0] for machine in machines):
        return None
    return machines[0]


def median_speed(run: RunRecord) -> float | None:
    """Return the median of the logged tokens per second; None if there are none."""
    curve = run.curve("tokens_per_second")
    if curve is None:
        return None
    speeds = [speed for speed in curve.values.tolist() if 0 < speed < math.inf]
    if not speeds:
        return None
    return statistics.median(speeds)
