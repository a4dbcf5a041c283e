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
    repeats, steps = arguments.repeats, arguments.steps
    config, overrides = arguments.config or CONFIG, arguments.overrides
    if arguments.config is None and machine.on_gpu:
        config, overrides = Path(GPU_JOB[0]), [*GPU_JOB[1:], *overrides]
    with tempfile.TemporaryDirectory(prefix="canon-bench-") as scratch, ExitStack() as held:
        job = _job(
            config, overrides, Path(scratch), (repeats + 2) * steps + WARM_UP_STEPS + NUM_SAVES
        )
        shared = None if machine.exclusive else held.enter_context(_trainer(job, Path(scratch)))

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
            trainer, data = shared or held.enter_context(_trainer(job, Path(scratch)))
            saves = lambda: {"saves": [_save(trainer, data) for _ in range(NUM_SAVES)]}  # noqa: E731
            return warmed_up(partial(trainer.advance, data), saves)

        memory: Any = {"exclusive": machine.exclusive, "free_memory": free_memory}
        candidates = build_bare_loop, {"ours": build_trainer}
        parts, facts, _ = timing.compare_candidates(*candidates, pairs=repeats, **memory)
    return {
        "config": str(config),
        "overrides": overrides,
        "tokens_per_step": job.training.global_batch_size * job.training.seq_len,
        **parts["ours"][STEP],
        "steps_a_block": steps,
        **facts["ours"],
    }


def _job(config: Path, overrides: list[str], folder: Path, total: int) -> CanonJobConfig:
    """Return a job on random shards in `folder` that saves only on request."""
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
    manager, begin = trainer.checkpointer, time.perf_counter()
    manager.begin_save(trainer.step)
    stall = time.perf_counter() - begin
    manager.wait()
    whole = time.perf_counter() - begin
    size = Manifest.read(manager.folder.step_path(trainer.step)).total_bytes
    return {"stall_s": stall, "whole_s": whole, "bytes": size}


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
        wait, whole = (tables.ms(save[name], 1) for name in ("stall_s", "whole_s"))
        size = f"{save['bytes'] / 1e6:,.1f} MB"
        lines.append(f"save of {size}: stalls the step {wait} ms, complete after {whole} ms")
    rows = [("trainer", result["other_s"]), ("bare PyTorch loop", result["base_s"])]
    tables.print_table(console, rows, columns, *lines)


BENCHES = {"trainer": variants.Bench(add_arguments, measure, print_result)}
