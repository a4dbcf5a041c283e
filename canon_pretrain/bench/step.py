"""The trainer's step against a bare PyTorch loop, and what a save costs the step.

The bare loop has the same model, sharded and compiled alike, the same fused AdamW and clipping, and
batches that lie in memory already: no data loader, log, guards, schedule or checkpoints. The two
take turns in blocks, so that whatever else the machine does meets both; the ratio is the median
over pairs of neighbouring blocks.
"""

import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torchtitan.distributed import utils as dist_utils

from canon_pretrain.checkpoint.manifest import Manifest
from canon_pretrain.config import Data
from canon_pretrain.data.shard_writer import write_shards
from canon_pretrain.data.shards import TokenShards
from canon_pretrain.errors import UserError
from canon_pretrain.run.folder import RunFolder
from canon_pretrain.run.session import Session
from canon_pretrain.titan.command_line import parse_job
from canon_pretrain.titan.environment import stand_alone
from canon_pretrain.titan.job_config import CanonJobConfig
from canon_pretrain.titan.parallelize import parallelize
from canon_pretrain.titan.spec import TitanModelArgs, TitanTransformer, register
from canon_pretrain.titan.trainer import CanonTrainer

TARGET = 0.03
"""The most that our step may take beyond the bare one."""
WARM_UP = 3
SAVES = 3


def measure(config: Path, overrides: list[str], *, repeats: int, steps: int) -> dict[str, Any]:
    """The figures of one run, as JSON can hold them; seconds and bytes. Raises UserError."""
    if repeats < 1 or steps < 1:
        raise UserError(f"--repeats {repeats} --steps {steps}: expected at least 1 each")
    with tempfile.TemporaryDirectory(prefix="canon-bench-") as folder:
        job = _job(config, overrides, Path(folder), total=(repeats + 2) * steps + WARM_UP + SAVES)
        with _one_rank(), _trainer(job, Path(folder)) as trainer:
            data = trainer.batch_generator(trainer.dataloader)
            ours = lambda: trainer.advance(data)  # noqa: E731
            bare = _bare_step(job, trainer)
            for step in (ours, bare):
                _block(step, WARM_UP)
            pairs = [(_block(ours, steps), _block(bare, steps)) for _ in range(repeats)]
            saves = [_save(trainer, data) for _ in range(SAVES)]
    ratios = sorted(own / other for own, other in pairs)
    return {
        "bench": "step",
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else _cpu(),
        "torch": torch.__version__,
        "config": str(config),
        "overrides": overrides,
        "tokens_per_step": trainer.tokens_per_step,
        "ours_s": statistics.median(own for own, _ in pairs) / steps,
        "bare_s": statistics.median(other for _, other in pairs) / steps,
        "ratio": statistics.median(ratios),
        "ratio_low": ratios[len(ratios) // 10],
        "ratio_high": ratios[-1 - len(ratios) // 10],
        "blocks": repeats,
        "steps_a_block": steps,
        "saves": saves,
    }


def _cpu() -> str:
    return f"{platform.machine()} CPU, {torch.get_num_threads()} threads"


def _job(config: Path, overrides: list[str], folder: Path, total: int) -> CanonJobConfig:
    """The job on random shards in `folder`, saving only when told to and logging at the end."""
    job = parse_job(["--config", str(config), *overrides])
    job.training.steps = total
    job.lr_scheduler.warmup_steps = min(job.lr_scheduler.warmup_steps, total)
    job.job.dump_folder, job.checkpoint.folder = str(folder / "run"), "checkpoint"
    job.checkpoint.interval = job.metrics.log_freq = total + 1
    job.data = Data(path=str(folder / "data"), data_seed=job.data.data_seed)
    tokens = np.random.default_rng(0).integers(
        3, job.model_args.vocab_size, size=(64, 4 * job.training.seq_len + 1)
    )
    write_shards(
        folder / "data" / "train",
        [row.astype(np.int64) for row in tokens],
        vocab_size=job.model_args.vocab_size,
        eos_id=2,
        num_bytes=[3 * len(row) for row in tokens],
    )
    return job


@contextmanager
def _one_rank() -> Iterator[None]:
    """The environment of a single rank, and no process group left behind."""
    with stand_alone():
        try:
            yield
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()


@contextmanager
def _trainer(job: CanonJobConfig, folder: Path) -> Iterator[CanonTrainer]:
    with TokenShards.open(folder / "data" / "train") as shards:
        fingerprint = shards.fingerprint
    register()
    run = RunFolder(folder / "run")
    with Session(run, rank=0, world_size=1, steps=job.training.steps) as session:
        trainer = CanonTrainer(job, world_size=1, fingerprint=fingerprint, session=session)
        trainer.metrics_processor.begin(0)
        try:
            yield trainer
        finally:
            trainer.close()


def _bare_step(job: CanonJobConfig, trainer: CanonTrainer) -> Callable[[], None]:
    """A function that takes one step of the bare loop, over a second copy of the model."""
    box = TitanModelArgs(args=job.model_args)
    with torch.device("meta"):
        model = TitanTransformer(box)
    parallelize(model, trainer.parallel_dims, job)
    model.to_empty(device=trainer.device)
    with torch.no_grad():
        model.init_weights()
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=job.optimizer.lr,
        betas=(job.optimizer.beta1, job.optimizer.beta2),
        eps=job.optimizer.eps,
        weight_decay=job.optimizer.weight_decay,
        fused=True,
    )
    rounds = trainer.gradient_accumulation_steps
    shape = (rounds, job.training.local_batch_size, job.training.seq_len + 1)
    batches = torch.randint(3, job.model_args.vocab_size, shape).to(trainer.device)

    def step() -> None:
        optimizer.zero_grad()
        for batch in batches:
            logits = model(batch[:, :-1])
            _, objective = trainer.loss_fn(logits, batch[:, 1:])
            del logits
            (objective / trainer.tokens_per_step).backward()
        dist_utils.clip_grad_norm_(list(model.parameters()), job.training.max_norm, foreach=True)
        optimizer.step()

    return step


def _block(step: Callable[[], Any], count: int) -> float:
    """Seconds of `count` steps, begun and ended with an idle device."""
    _synchronize()
    begin = time.perf_counter()
    for _ in range(count):
        step()
    _synchronize()
    return time.perf_counter() - begin


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _save(trainer: CanonTrainer, data: Any) -> dict[str, float]:
    """One step and one save of its state: how long it stalled, and until it was whole."""
    trainer.advance(data)
    _synchronize()
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
    """The table that a person reads."""
    console.print(
        f"{result['device']}, torch {result['torch']}, {result['config']} "
        f"{' '.join(result['overrides'])}, {result['tokens_per_step']:,} tokens a step"
    )
    table = Table("step", "ms", "tokens/s")
    for name, key in (("ours", "ours_s"), ("bare PyTorch loop", "bare_s")):
        seconds = result[key]
        table.add_row(name, f"{1000 * seconds:.2f}", f"{result['tokens_per_step'] / seconds:,.0f}")
    console.print(table)
    over, target = result["ratio"] - 1, "met" if result["ratio"] <= 1 + TARGET else "MISSED"
    console.print(
        f"ours takes {over:+.1%} ({result['ratio_low'] - 1:+.1%} to "
        f"{result['ratio_high'] - 1:+.1%}, {result['blocks']} pairs of blocks of "
        f"{result['steps_a_block']} steps); target at most {TARGET:+.0%}: {target}"
    )
    table = Table("save", "bytes", "stall ms", "whole after ms", "GB/s")
    for number, save in enumerate(result["saves"], 1):
        table.add_row(
            str(number),
            f"{save['bytes']:,}",
            f"{1000 * save['stall_s']:.1f}",
            f"{1000 * save['whole_s']:.1f}",
            f"{save['bytes'] / save['whole_s'] / 1e9:.2f}",
        )
    console.print(table)
