"""GPU-hours of planned runs, computed by `canon_pretrain.titan.prices` in a process with torch."""

import json
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.table import Table

from canon_pretrain.core.errors import UserError, reason_in
from canon_pretrain.core.terminal import Console, duration
from canon_pretrain.machine.gpus import GPUS_PER_NODE, Range


@dataclass(frozen=True)
class Price:
    """What the runs of one config take, each on `world_size` GPUs."""

    config: str
    num_runs: int
    steps: int
    world_size: int
    step_seconds: Range
    mixer_backend: str = ""
    """The kernels by which these assume that recurrences run; "" without one."""

    @property
    def gpu_hours(self) -> Range:
        steps = self.num_runs * self.steps
        gpu_seconds = [steps * step_s * self.world_size for step_s in self.step_seconds]
        return Range(*(seconds / 3600 for seconds in gpu_seconds))


def compute_prices(
    configs: Sequence[tuple[str, int]], arguments: Sequence[str], gpu: str, world_size: int
) -> list[Price]:
    """Return the price of each (config, number of runs). Raises UserError.

    `arguments`: --section.key value ..., of every run. Takes seconds per architecture and size.
    """
    options = json.dumps({"gpu": gpu, "world_size": world_size})
    jobs = [["--config", config, *arguments] for config, _ in configs]
    done = subprocess.run(
        [sys.executable, "-m", "canon_pretrain.titan.prices", options],
        input=json.dumps(jobs),
        capture_output=True,
        text=True,
    )

    # The message of its error, without the code before it.
    if done.returncode:
        reason = reason_in(done.stderr) or done.stderr.strip()[-500:]
        reason = re.sub(r"^error(\[.*?\])?: ", "", reason)
        raise UserError("plan.price", f"no price: {reason}")

    rows = json.loads(done.stdout.splitlines()[-1])  # libraries may print before
    return [
        Price(
            config,
            num_runs,
            steps=row["steps"],
            world_size=world_size,
            step_seconds=Range(*row["seconds"]),
            mixer_backend=row["mixer_backend"],
        )
        for (config, num_runs), row in zip(configs, rows, strict=True)
    ]


def print_prices(prices: Sequence[Price], gpu: str, console: Console) -> None:
    """Print a row per config, and the total in GPU-hours and days."""
    # A row per config, with the likely figures.
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("config")
    for title in ("runs", "steps", "ms per step", "GPU-hours"):
        table.add_column(title, justify="right")

    for price in prices:
        table.add_row(
            Path(price.config).stem,
            str(price.num_runs),
            f"{price.steps:,}",
            f"{1000 * price.step_seconds.likely:,.1f}",
            _hours(price.gpu_hours.likely),
        )
    console.print(table)

    # The total, with its bounds.
    num_runs = sum(price.num_runs for price in prices)
    gpu_hours = [price.gpu_hours for price in prices]
    hours = Range(
        slow=sum(bounds.slow for bounds in gpu_hours),
        likely=sum(bounds.likely for bounds in gpu_hours),
        fast=sum(bounds.fast for bounds in gpu_hours),
    )
    seconds = 3600 * hours.likely
    console.print(
        f"{num_runs} runs, {prices[0].world_size} {gpu.upper()} each: "
        f"{_hours(hours.likely)} GPU-hours ({_hours(hours.fast)} to {_hours(hours.slow)}), "
        f"{duration(seconds)} on one GPU, {duration(seconds / GPUS_PER_NODE)} on {GPUS_PER_NODE}; "
        "computed, not measured, without start-up and evaluation"
    )
    kernels = {price.mixer_backend for price in prices} - {"", "chunked"}
    if kernels:
        console.print(
            f"recurrences by {' or '.join(sorted(kernels))}; in chunks about twice as long"
        )


def _hours(hours: float) -> str:
    """Return hours with one decimal, or two digits if they are few."""
    if hours >= 10:
        return f"{hours:,.1f}"
    return f"{hours:.2g}"
