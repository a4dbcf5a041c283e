"""What the runs of a board take, on this machine and on GPUs, from the FLOPs of their models.

A quick estimate for `plan` and `status`; `plan --gpu h100` computes the kernels of each model. Once
runs of the board have ended on this machine, their time corrects the estimate for it. No torch.
"""

import platform
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from canon_pretrain.boards.board import Board
from canon_pretrain.boards.models import PlannedModel
from canon_pretrain.boards.stops import FIRST_SEEDS
from canon_pretrain.cluster.sweep import PlannedRun
from canon_pretrain.core.cli import available_cores
from canon_pretrain.core.errors import UserError
from canon_pretrain.core.terminal import duration
from canon_pretrain.machine.gpus import GPUS, GPUS_PER_NODE, peak_flops
from canon_pretrain.machine.hardware import gpu_names
from canon_pretrain.model.mixer_table import RECURRENT
from canon_pretrain.report.record import RunRecord

RACE_SHARES = {True: (0.59, 0.68), False: (0.71, 0.83)}
"""Share of the tokens that simulated races took, by whether there are several learning rates."""


@dataclass(frozen=True)
class Processor:
    """A core or a GPU that trains one run at a time; what is assumed of it."""

    name: str
    flops: float
    """Counted FLOPs per second."""
    step_s: float
    layer_s: float
    """Host time per step, and per layer: added to that of the products, or its lower bound if
    `overlaps`."""
    start_s: float
    """Start, compilation and last validation of a run."""
    factors: Mapping[str, float]
    """Time of a step over that of attention, at equal FLOPs, by mixer."""
    overlaps: bool
    """Whether the host's part of a step overlaps with the products."""
    is_gpu: bool

    def seconds(self, model: PlannedModel) -> float:
        """Return what a run of the model takes."""
        return self.start_s + self.training_s(model)

    def training_s(self, model: PlannedModel) -> float:
        """Return what the steps of a run take, without `start_s`."""
        products_s = model.tokens_per_step * model.flops_per_token / self.flops
        host_s = self.step_s + model.num_layers * self.layer_s
        step_s = max(products_s, host_s) if self.overlaps else products_s + host_s
        factor = max(self.factors.get(mixer, 1.0) for mixer in model.mixers)
        return model.steps * step_s * factor


# Of runs on a core of a Xeon and an EPYC: 366 steps of 1.2 GFLOP in two layers take 29 CPU seconds
# with RoPE + Canon (these give 30) and 35 with GatedDeltaNet (37), whose factor the other
# recurrences have too; the 90 runs of laptop.toml 42 to 47 CPU minutes (56), the 14 of lm.toml 72
# (73).
CORE = Processor(
    name="CPU core",
    flops=70e9,
    step_s=0.02,
    layer_s=0.015,
    start_s=5,
    factors=dict.fromkeys(RECURRENT, 1.3),
    overlaps=False,
    is_gpu=False,
)
# Computed from kernels, `plan --gpu h100`, for depo1_n225 at 12L768D and 8L512D: counted FLOPs are
# 44 and 39 % of the peak with attention, 30 and 24 % with GLA + Canon, 28 and 22 % with
# GatedDeltaNet, 24 and 18 % with Mamba2, 36 and 33 % with experts. The host's part and the
# start are assumed.
PEAK_SHARE = 0.42
H100 = Processor(
    name="H100",
    flops=PEAK_SHARE * GPUS["h100"].peak_flops,
    step_s=0.008,
    layer_s=0.001,
    start_s=60,
    factors={name: row.h100_step_factor for name, row in RECURRENT.items()},
    overlaps=True,
    is_gpu=True,
)


def this_machine() -> tuple[Processor, int]:
    """Return a core or GPU of this machine, and how many there are for runs at once."""
    names = gpu_names()
    if not names:
        return CORE, available_cores()
    peak = peak_flops(names[0]) or GPUS["a100"].peak_flops
    flops = H100.flops * peak / GPUS["h100"].peak_flops
    return replace(H100, name=names[0], flops=flops), len(names)


class Cost(NamedTuple):
    """What runs take on one processor, and the longest of them, in seconds."""

    total_s: float
    longest_s: float

    def on(self, num_processors: int) -> float:
        """Return the wall time on several at once, in seconds."""
        return max(self.total_s / num_processors, self.longest_s)


@dataclass(frozen=True)
class BoardPrice:
    """The price of a board's runs, and of those that are left."""

    num_runs: int
    num_left: int
    here: Processor
    num_here: int
    cost_here: Cost
    left_here: Cost
    cost_h100: Cost
    left_h100: Cost
    race_shares: tuple[float, float] | None
    """None: a task has fewer than FIRST_SEEDS seeds, of which a race stops nothing."""
    measured_runs: int
    measured_factor: float
    """Their training time over the estimate, by which that of all runs here was multiplied."""


def board_price(
    board: Board,
    runs: Sequence[PlannedRun],
    models: Mapping[tuple[str, str], PlannedModel],
    ended: Collection[str] = (),
    folder: Path | None = None,
) -> BoardPrice | None:
    """Return the price of a planned board; None if no model can be counted.

    `ended`: names of runs that are over. `folder`: of the runs, whose time here is read.
    """
    counted = [run for run in runs if board.place_of(run.config) in models]
    if not counted:
        return None
    here, num_here = this_machine()

    def model_of(run: PlannedRun) -> PlannedModel:
        return models[board.place_of(run.config)]

    # The runs that have ended here say how far the estimate of training is off. Their logs have
    # neither the start of the process nor the last validation.
    measured_s = {}
    if folder is not None:
        for run in counted:
            if run.name in ended and (run_s := _seconds_here(folder / run.name)) is not None:
                measured_s[run.name] = run_s
    factor = 1.0
    if measured_s:
        measured = [run for run in counted if run.name in measured_s]
        estimated_s = sum(here.training_s(model_of(run)) for run in measured)
        factor = sum(measured_s.values()) / estimated_s

    def seconds_here(run: PlannedRun) -> float:
        return here.start_s + factor * here.training_s(model_of(run))

    def seconds_h100(run: PlannedRun) -> float:
        return H100.seconds(model_of(run))

    left = [run for run in counted if run.name not in ended]
    places = {(run.config, run.seed) for run in counted}
    several_rates = len(counted) > len(places)
    least_seeds = min(len(board.seeds_of(setting)) for setting in board.settings)
    return BoardPrice(
        num_runs=len(runs),
        num_left=len([run for run in runs if run.name not in ended]),
        here=here,
        num_here=num_here,
        cost_here=_cost(list(map(seconds_here, counted))),
        left_here=_cost(list(map(seconds_here, left))),
        cost_h100=_cost(list(map(seconds_h100, counted))),
        left_h100=_cost(list(map(seconds_h100, left))),
        race_shares=RACE_SHARES[several_rates] if least_seeds >= FIRST_SEEDS else None,
        measured_runs=len(measured_s),
        measured_factor=factor,
    )


def _cost(seconds: Sequence[float]) -> Cost:
    return Cost(sum(seconds), max(seconds, default=0.0))


def _seconds_here(folder: Path) -> float | None:
    """Return the training time of a run that is DONE, if this machine has trained it."""
    record = RunRecord(folder)
    with suppress(UserError, OSError):
        hosts = {host for event in record.launch_events for host in event.get("hosts") or ()}
        hours = record.clock.training_hours
        if record.is_done and hosts == {platform.node()} and hours is not None:
            return 3600 * float(hours[-1])
    return None


# -- sentences


def price_lines(price: BoardPrice) -> Iterator[str]:
    """Yield what runs take here and on 8 H100, also with a race, and how that is known."""
    left = ""
    if price.num_left < price.num_runs:
        left = f", {price.num_left} left"
    yield f"Price of {price.num_runs} runs{left}:"

    unit = "GPU-hours" if price.here.is_gpu else "CPU-hours"
    here = _place(price.num_here, price.here.name)
    yield _line(f"here, {here}", unit, price.cost_here, price.left_here, price.num_here, price)
    yield _line(
        f"{GPUS_PER_NODE} H100",
        "GPU-hours",
        price.cost_h100,
        price.left_h100,
        GPUS_PER_NODE,
        price,
    )

    here_text = f"{price.here.flops / 1e9:,.0f} GFLOP/s"
    source = f"assumed: {here_text} here"
    if price.measured_runs:
        source = (
            f"here by {price.measured_runs} runs that have ended, whose training took "
            f"{price.measured_factor:.2f} of the time that {here_text} give"
        )
    race = f"; a race of fewer than {FIRST_SEEDS} seeds stops nothing"
    if price.race_shares is not None:
        low, high = price.race_shares
        race = f"; --race took {100 * low:.0f} to {100 * high:.0f} % of the tokens in simulations"
    yield f"  from counted FLOPs; {source}, {PEAK_SHARE:.0%} of an H100's peak{race}"


def _place(count: int, name: str) -> str:
    return f"{count} {name}" + ("s" if count > 1 else "")


def _line(place: str, unit: str, cost: Cost, left: Cost, count: int, price: BoardPrice) -> str:
    """Return the price in one place: hours and wall time, of all runs and of those left."""
    with_race = ""
    if price.race_shares is not None:
        low, high = (duration(share * cost.on(count)) for share in price.race_shares)
        with_race = f", with --race {low} to {high}"

    left_text = ""
    if 0 < price.num_left < price.num_runs:
        left_text = f"; left {_hours(left.total_s)} {unit}, {duration(left.on(count))}"

    hours = f"{_hours(cost.total_s)} {unit}"
    return f"  {place}: {hours}, {duration(cost.on(count))}{with_race}{left_text}"


def _hours(seconds: float) -> str:
    hours = seconds / 3600
    return f"{hours:,.0f}" if hours >= 10 else f"{hours:.2g}"
