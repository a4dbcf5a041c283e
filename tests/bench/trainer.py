"""The trainer's step against a bare PyTorch loop, and the cost of a checkpoint save.

The bare loop (titan/spec.py) has the same model, sharding, compilation, loss, fused AdamW and
clipping. Both alternate in blocks; on a GPU the loop runs before and after the trainer instead,
each alone in memory.
"""

import argparse
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from canon_pretrain.checkpoint.manifest import Manifest
from canon_pretrain.core.cli import positive
from canon_pretrain.core.terminal import Console
from canon_pretrain.data.shard_writer import write_shards
from canon_pretrain.run.folder import RunFolder
from canon_pretrain.run.sections import Data
from canon_pretrain.run.session import Session
from canon_pretrain.titan.command_line import parse_job
from canon_pretrain.titan.data import open_data
from canon_pretrain.titan.job_config import CanonJobConfig, micro_batch_size
from canon_pretrain.titan.spec import BareStep, one_rank
from canon_pretrain.titan.trainer import CanonTrainer
from tests.bench import tables, timing, variants
from tests.bench.limits import Machine
from tests.bench.timing import STEP, Candidate, Step
from tests.bench.variants import Log, Result

WARM_UP_STEPS = 3
NUM_SAVES = 3
CONFIG = Path("train_configs/quickstart.toml")
GPU_JOB = (
    *("train_configs/nope_canon.toml", "--model.num_layers", "6"),
    *("--training.global_batch_size", "6"),
)
"""A quarter of the 1.3B model's layers, with the batch of one of 8 GPUs."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    parser.epilog = "Any --section.key value overrides the config, as for training."
    add("--config", type=Path, help=f"(default: {CONFIG}; on a GPU {' '.join(GPU_JOB)})")
    add("--repeats", type=positive, default=30, help="blocks of each (default: %(default)s)")
    add("--steps", type=positive, default=3, help="steps in a block (default: %(default)s)")


def measure(arguments: argparse.Namespace, machine: Machine, log: Log) -> Result:
    repeats = arguments.repeats
    steps = arguments.steps
    config = arguments.config or CONFIG
    overrides = arguments.overrides
    if arguments.config is None and machine.on_gpu:
        config = Path(GPU_JOB[0])
        overrides = [*GPU_JOB[1:], *overrides]

    with tempfile.TemporaryDirectory(prefix="canon-bench-") as scratch, ExitStack() as held:
        folder = Path(scratch)
        total_steps = (repeats + 2) * steps + WARM_UP_STEPS + NUM_SAVES
        job = _job(config, overrides, folder, total_steps)
        # if both are in memory at a time, they share one process group
        shared = None if machine.exclusive else held.enter_context(_trainer(job, folder))

        def free_memory() -> None:
            if machine.exclusive:
                held.close()
            machine.free_memory()

        def warmed_up(step: Step, facts: Callable[[], dict[str, Any]] = dict) -> Candidate:
            timing.seconds_of(step, WARM_UP_STEPS)
            return Candidate(timing.make_block(step, steps), facts)

        def build_bare_loop() -> Candidate:
            if machine.exclusive:
                held.enter_context(one_rank())
            rounds = job.training.global_batch_size // job.training.local_batch_size
            return warmed_up(BareStep(job, machine.device, rounds=rounds))

        def build_trainer() -> Candidate:
            trainer, data = shared or held.enter_context(_trainer(job, folder))
            saves = lambda: {"saves": [_save(trainer, data) for _ in range(NUM_SAVES)]}  # noqa: E731
            return warmed_up(partial(trainer.advance, data), saves)

        parts, facts, _ = timing.compare_candidates(
            build_bare_loop,
            {"ours": build_trainer},
            pairs=repeats,
            exclusive=machine.exclusive,
            free_memory=free_memory,
        )
    return {
        "config": str(config),
        "overrides": overrides,
        "tokens_per_step": job.training.global_batch_size * job.training.seq_len,
        **parts["ours"][STEP],
        "steps_a_block": steps,
        **facts["ours"],
    }


def _job(config: Path, overrides: list[str], folder: Path, total_steps: int) -> CanonJobConfig:
    """Return a job on random shards in `folder` that saves only on request."""
    job = parse_job(["--config", str(config), *overrides])
    job.training.steps = total_steps
    job.training.local_batch_size = micro_batch_size(job, 1)
    job.lr_scheduler.warmup_steps = min(job.lr_scheduler.warmup_steps, total_steps)
    job.job.dump_folder = str(folder / "run")
    job.checkpoint.folder = "checkpoint"
    job.checkpoint.interval = total_steps + 1
    job.metrics.log_freq = total_steps + 1
    job.data = Data(path=str(folder / "data"), data_seed=job.data.data_seed)

    vocab_size = job.model_args.vocab_size
    shape = (64, 4 * job.training.seq_len + 1)
    documents = list(np.random.default_rng(0).integers(3, vocab_size, size=shape))
    write_shards(
        folder / "data" / "train",
        documents,
        vocab_size=vocab_size,
        eos_id=2,
        num_bytes=[3 * len(document) for document in documents],
    )
    return job


@contextmanager
def _trainer(job: CanonJobConfig, folder: Path) -> Iterator[tuple[CanonTrainer, Any]]:
    run = RunFolder(folder / "run")
    # torchtitan's Trainer disables garbage collection and leaves it disabled
    with (
        timing.gc_disabled(),
        one_rank(start=False),
        Session(run, rank=0, world_size=1, steps=job.training.steps) as session,
    ):
        # a run saves and stops at these signals; a bench has nothing to save
        session.stop.restore([signal.SIGINT, signal.SIGTERM])
        trainer = CanonTrainer(job, world_size=1, data=open_data(job), session=session)
        trainer.metrics_processor.begin(0)
        try:
            yield trainer, trainer.batch_generator(trainer.dataloader)
        finally:
            trainer.close()


def _save(trainer: CanonTrainer, data: Any) -> dict[str, float]:
    """Run a step and save; return the seconds of the stall and until the save is complete."""
    trainer.advance(data)
    timing.synchronize()

    manager = trainer.checkpointer
    begin = time.perf_counter()
    manager.begin_save(trainer.step)
    stall_s = time.perf_counter() - begin
    manager.wait()
    whole_s = time.perf_counter() - begin

    size = Manifest.read(manager.folder.step_path(trainer.step)).total_bytes
    return {"stall_s": stall_s, "whole_s": whole_s, "bytes": size}


def print_result(result: dict[str, Any], console: Console) -> None:
    tokens = result["tokens_per_step"]
    columns: tables.Columns = {
        "step": lambda row: row[0],
        "ms": lambda row: tables.ms(row[1]),
        "tokens/s": lambda row: f"{tokens / row[1]:,.0f}",
    }
    lines = [
        f"{result['config']} {' '.join(result['overrides'])}, {tokens:,} tokens per step",
        f"trainer: {tables.extra(result)} ({tables.spread(result)}, {result['pairs']} pairs of "
        f"blocks of {result['steps_a_block']} steps); target "
        f"{tables.TRAINER.verdict(result['ratio'] - 1)}",
    ]
    for save in result["saves"]:
        lines.append(
            f"save of {save['bytes'] / 1e6:,.1f} MB: stalls the step "
            f"{tables.ms(save['stall_s'], 1)} ms, complete after "
            f"{tables.ms(save['whole_s'], 1)} ms"
        )
    rows = [("trainer", result["other_s"]), ("bare PyTorch loop", result["base_s"])]
    tables.print_table(console, rows, columns, *lines)


BENCHES = {"trainer": variants.Bench(add_arguments, measure, print_result)}
