"""The trainer's step against a bare PyTorch loop, and what a save costs the step.

The bare loop (titan/bare_step.py) has the same model, sharded and compiled alike, the same loss,
fused AdamW and clipping. The two take turns in blocks; on a GPU, which they would share, the loop
is measured before the trainer and after it, each alone in memory.
"""

import argparse
import dataclasses
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from canon_pretrain.bench import tables
from canon_pretrain.bench.machine import Machine
from canon_pretrain.bench.timing import (
    STEP,
    Comparison,
    Step,
    around,
    block_of,
    no_garbage,
    paired,
    seconds_of,
    synchronize,
)
from canon_pretrain.checkpoint.manifest import Manifest
from canon_pretrain.core.terminal import Console
from canon_pretrain.data.shard_writer import write_shards
from canon_pretrain.run.config import Data
from canon_pretrain.run.folder import RunFolder
from canon_pretrain.run.session import Session
from canon_pretrain.titan.bare_step import BareStep, one_rank
from canon_pretrain.titan.command_line import parse_job
from canon_pretrain.titan.data import open_data
from canon_pretrain.titan.job_config import CanonJobConfig, micro_batch_size
from canon_pretrain.titan.trainer import CanonTrainer

WARM_UP = 3
SAVES = 3
CONFIG = Path("train_configs/quickstart.toml")
GPU_JOB = (
    *("train_configs/nope_canon.toml", "--model.num_layers", "6"),
    *("--training.global_batch_size", "6"),
)
"""A quarter of the 1.3B model's layers, compiled, in bfloat16; a rank's share of 8 GPUs' batch."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    parser.epilog = "Any --section.key value goes on top of the config, as for training."
    add("--config", type=Path, help=f"(default: {CONFIG}; on a GPU {' '.join(GPU_JOB)})")
    add("--repeats", type=int, default=30, help="blocks of steps of each (default: %(default)s)")
    add("--steps", type=int, default=3, help="steps in a block (default: %(default)s)")


def measure(
    arguments: argparse.Namespace, machine: Machine, say: Callable[[str], None]
) -> dict[str, Any]:
    """Return the figures as JSON can hold them; seconds and bytes. Raises UserError."""
    repeats, steps = arguments.repeats, arguments.steps
    config, overrides = arguments.config or CONFIG, arguments.overrides
    if arguments.config is None and machine.on_gpu:
        config, overrides = Path(GPU_JOB[0]), [*GPU_JOB[1:], *overrides]
    with tempfile.TemporaryDirectory(prefix="canon-bench-") as scratch:
        folder = Path(scratch)
        job = _job(config, overrides, folder, (repeats + 2) * steps + WARM_UP + SAVES)
        compare = measure_alone if machine.on_gpu else measure_in_turns
        found, saves, drift = compare(job, folder, machine, repeats, steps)
    return {
        "config": str(config),
        "overrides": overrides,
        "tokens_per_step": job.training.global_batch_size * job.training.seq_len,
        **dataclasses.asdict(found),
        "drift": drift,
        "steps_a_block": steps,
        "saves": saves,
    }


Found = tuple[Comparison, list[dict[str, float]], float | None]
"""Ours beside the bare loop, our saves, and how the bare loop's speed has drifted meanwhile."""


def measure_in_turns(
    job: CanonJobConfig, folder: Path, machine: Machine, repeats: int, steps: int
) -> Found:
    """Measure with both in memory, blocks in turn."""
    with _trainer(job, folder) as (trainer, data):
        rounds, dims = trainer.gradient_accumulation_steps, trainer.parallel_dims
        bare = BareStep(job, trainer.device, parallel_dims=dims, rounds=rounds)
        ours = partial(trainer.advance, data)
        for step in (ours, bare):
            seconds_of(step, WARM_UP)
        found = paired(block_of(bare, steps), block_of(ours, steps), repeats)[STEP]
        return found, [_save(trainer, data) for _ in range(SAVES)], None


def measure_alone(
    job: CanonJobConfig, folder: Path, machine: Machine, repeats: int, steps: int
) -> Found:
    """Measure the bare loop, ours, and the bare loop again, each alone in memory."""

    def seconds(step: Step) -> list[float]:
        seconds_of(step, WARM_UP)
        block = block_of(step, steps)
        return [block()[STEP] for _ in range(repeats)]

    def bare() -> list[float]:
        machine.free_memory()
        with one_rank():
            rounds = job.training.global_batch_size // job.training.local_batch_size
            return seconds(BareStep(job, machine.device, rounds=rounds))

    def ours() -> tuple[list[float], list[dict[str, float]]]:
        machine.free_memory()
        with _trainer(job, folder) as (trainer, data):
            took = seconds(partial(trainer.advance, data))
            return took, [_save(trainer, data) for _ in range(SAVES)]

    before, (took, saves), after = bare(), ours(), bare()
    found, drift = around(before, took, after)
    return found, saves, drift


def _job(config: Path, overrides: list[str], folder: Path, total: int) -> CanonJobConfig:
    """Return the job on random shards in `folder`; it saves only on request."""
    job = parse_job(["--config", str(config), *overrides])
    job.training.steps, job.training.local_batch_size = total, micro_batch_size(job, 1)
    job.lr_scheduler.warmup_steps = min(job.lr_scheduler.warmup_steps, total)
    job.job.dump_folder, job.checkpoint.folder = str(folder / "run"), "checkpoint"
    job.checkpoint.interval = job.metrics.log_freq = total + 1
    job.data = Data(path=str(folder / "data"), data_seed=job.data.data_seed)
    vocab_size, shape = job.model_args.vocab_size, (64, 4 * job.training.seq_len + 1)
    tokens = list(np.random.default_rng(0).integers(3, vocab_size, size=shape))
    num_bytes = [3 * len(row) for row in tokens]
    split = folder / "data" / "train"
    write_shards(split, tokens, vocab_size=vocab_size, eos_id=2, num_bytes=num_bytes)
    return job


@contextmanager
def _trainer(job: CanonJobConfig, folder: Path) -> Iterator[tuple[CanonTrainer, Any]]:
    run, steps = RunFolder(folder / "run"), job.training.steps
    # torchtitan's Trainer turns the collection of garbage off, and leaves it so
    with (
        no_garbage(),
        one_rank(start=False),
        Session(run, rank=0, world_size=1, steps=steps) as session,
    ):
        # a run saves and stops at these; a bench has nothing to save
        session.stop.let_through([signal.SIGINT, signal.SIGTERM])
        trainer = CanonTrainer(job, world_size=1, data=open_data(job), session=session)
        trainer.metrics_processor.begin(0)
        try:
            yield trainer, trainer.batch_generator(trainer.dataloader)
        finally:
            trainer.close()


def _save(trainer: CanonTrainer, data: Any) -> dict[str, float]:
    """Make a step and save its state; return how long it stalled, and until it was whole."""
    trainer.advance(data)
    synchronize()
    manager = trainer.checkpointer
    begin = time.perf_counter()
    manager.begin_save(trainer.step)
    stall = time.perf_counter() - begin
    manager.wait()
    path = manager.folder.step_path(trainer.step)
    return {
        "stall_s": stall,
        "whole_s": time.perf_counter() - begin,
        "bytes": Manifest.read(path).total_bytes,
    }


def print_result(result: dict[str, Any], console: Console) -> None:
    tokens = result["tokens_per_step"]
    step: tables.Columns = {
        "step": lambda row: row[0],
        "ms": lambda row: tables.ms(row[1]),
        "tokens/s": lambda row: f"{tokens / row[1]:,.0f}",
    }
    both = [("ours", result["other_s"]), ("bare PyTorch loop", result["base_s"])]
    tables.print_table(console, both, step)
    drift = ""
    if result["drift"] is not None:
        drift = f", the bare loop's before and after ours: {result['drift'] - 1:+.1%}"
    tables.print_lines(
        console,
        f"{result['config']} {' '.join(result['overrides'])}, {tokens:,} tokens per step",
        f"ours takes {tables.extra(result)} ({tables.spread(result)}, {result['pairs']} pairs of "
        f"blocks of {result['steps_a_block']} steps{drift}); target "
        f"{tables.TRAINER.verdict(result['ratio'] - 1)}",
    )
    saves: tables.Columns = {
        "save of bytes": lambda save: f"{save['bytes']:,}",
        "stall ms": lambda save: tables.ms(save["stall_s"], 1),
        "whole after ms": lambda save: tables.ms(save["whole_s"], 1),
        "GB/s": lambda save: f"{save['bytes'] / save['whole_s'] / 1e9:.2f}",
    }
    tables.print_table(console, result["saves"], saves)
