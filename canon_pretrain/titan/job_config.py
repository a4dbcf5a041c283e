"""torchtitan's JobConfig with our sections, our defaults and our checks.

train.py calls `parse_job` with the command line; what comes back is complete and checked, so that
everything behind it can trust it. torchtitan's silent defaults for the optimizer, the schedule,
activation checkpointing and the last checkpoint are replaced here, in the open.
"""

import contextlib
import dataclasses
import functools
import io
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import tyro
from torchtitan.config import job_config as titan
from torchtitan.config.manager import custom_registry

from canon_pretrain import config as experiment
from canon_pretrain.data.mixture import check_order, exact_weight
from canon_pretrain.errors import UserError
from canon_pretrain.model.args import ModelArgs
from canon_pretrain.model.args import flavor as model_flavor

DESCRIPTION = """Train one job: --config FILE.toml, and any key below on top of it.

With --dry_run [--gpu h100|h200|a100] [--world N] [--mfu F] print what it would take instead:
parameters, memory, disk, time.
"""
USAGE = "torchrun -m canon_pretrain.train --config FILE.toml [--section.key value ...]"


@dataclass
class Model(titan.Model):
    """The model: a flavor (a size), and what differs from it. An unset key is the flavor's."""

    name: str = "canon"
    flavor: str = "debug"
    vocab_size: int | None = None
    """Must equal the vocabulary of the shards."""
    position: str | None = None
    """rope, nope, or partial_rope_a, _b, _c (the layouts of the paper's Figure 22)."""
    canon_set: str | None = None
    """Any subset of ABCD; empty for no Canon layers."""
    canon_kernel: int | None = None
    canon_residual: bool | None = None
    canon_activation: bool | None = None
    qk_norm: str | None = None
    """none; full: over all heads, before Canon-B; per_head: over each head, after Canon-B."""
    init: str | None = None
    """paper: N(0, 0.02); lingua: truncated normal with std D^-1/2."""
    init_seed: int | None = None
    """Seed of the initial weights alone; they are the same at every world size."""


@dataclass
class Optimizer(titan.Optimizer):
    """AdamW as in the paper's appendix B."""

    lr: float = 1e-3
    beta1: float = 0.9
    beta2: float = 0.98
    eps: float = 1e-6
    weight_decay: float = 0.03


@dataclass
class LRScheduler(titan.LRScheduler):
    """1000 warm-up steps, cosine to 10 % (assumed: the paper states none)."""

    warmup_steps: int = 1000
    decay_type: Literal["linear", "sqrt", "cosine"] = "cosine"
    min_lr_factor: float = 0.1
    decay_steps: int | None = None
    """Length of the decay after warm-up, whatever `training.steps` is; the rate then stays at
    `min_lr_factor` (InfiniteLR). Unset: the decay ends with the run, as in torchtitan."""


@dataclass
class Training(titan.Training):
    """Gradients are clipped at norm 1 (assumed: the paper states no clipping)."""

    max_norm: float | int = 1.0


@dataclass
class Checkpoint(titan.Checkpoint):
    """Always on, in the background, and the last one can be resumed."""

    enable: bool = True
    last_save_model_only: bool = False
    async_mode: Literal["disabled", "async", "async_with_pinned_mem"] = "async"
    """`async` copies to (on a GPU pinned) CPU memory and writes from there while training goes on;
    `async_with_pinned_mem`, torchtitan's other name, is the same here."""
    fresh: bool = False
    """Begin again at step 1 though there are checkpoints; the run so far moves to RUN/archive."""
    max_held: int = 4
    """Steps past `keep_latest_k` that are kept, as weights alone, for evaluations that wait."""


@dataclass
class ActivationCheckpoint(titan.ActivationCheckpoint):
    """Off unless asked for: the 1.3B states leave room for the activations."""

    mode: Literal["selective", "full", "memory_budget", "none"] = "none"


@dataclass
class CanonJobConfig(titan.JobConfig):
    """One training job: torchtitan's sections, and `[data]`, `[run]` and `[guards]`."""

    model: Model = field(default_factory=Model)
    training: Training = field(default_factory=Training)
    optimizer: Optimizer = field(default_factory=Optimizer)
    lr_scheduler: LRScheduler = field(default_factory=LRScheduler)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    activation_checkpoint: ActivationCheckpoint = field(default_factory=ActivationCheckpoint)
    data: experiment.Data = field(default_factory=experiment.Data)
    run: experiment.Run = field(default_factory=experiment.Run)
    guards: experiment.Guards = field(default_factory=experiment.Guards)

    @property
    def last_step(self) -> int:
        """The step after which this launch ends."""
        return self.run.stop_at or self.training.steps

    @property
    def model_args(self) -> ModelArgs:
        """The model's arguments: the flavor with this job's keys on top, checked by ModelArgs."""
        base = model_flavor(self.model.flavor)
        names = {f.name for f in dataclasses.fields(ModelArgs)}
        own = {
            key: value
            for key, value in vars(self.model).items()
            if key in names and value is not None
        }
        return dataclasses.replace(base, max_seq_len=self.training.seq_len, **own)


def parse_job(arguments: list[str], *, quiet: bool = False) -> CanonJobConfig:
    """The job that a command line describes.

    `arguments` is `--config FILE.toml` and any `--section.key value`; those win over the file.
    With `quiet` nothing is printed (the ranks above 0). Raises UserError; a fault in the overrides
    is printed by tyro, with the nearest option, and leaves with exit code 2.
    """
    path, overrides = _split_config(arguments)
    if path is None:
        if not any(word in ("-h", "--help") for word in overrides):
            raise UserError(f"no config file given. Usage: {USAGE}")
        base = CanonJobConfig()
    else:
        values = experiment.read_experiment(path)
        base = experiment.build(CanonJobConfig, values, source=str(path))
    with contextlib.ExitStack() as silence:
        if quiet:  # tyro's own switch does not cover wrong values
            silence.enter_context(contextlib.redirect_stdout(io.StringIO()))
            silence.enter_context(contextlib.redirect_stderr(io.StringIO()))
        job = tyro.cli(
            CanonJobConfig,
            args=overrides,
            default=base,
            registry=custom_registry,
            prog="torchrun -m canon_pretrain.train",
            description=DESCRIPTION,
        )
    job.job.config_file = str(path)
    check_job(job)
    return job


def _split_config(arguments: list[str]) -> tuple[Path | None, list[str]]:
    """Take `--config FILE` (or torchtitan's `--job.config_file FILE`) out of the command line."""
    names = ("--config", "--job.config_file", "--job.config-file")
    path: Path | None = None
    rest = []
    words = iter(arguments)
    for word in words:
        name, equals, value = word.partition("=")
        if name not in names:
            rest.append(word)
            continue
        value = value if equals else next(words, "")
        if not value:
            raise UserError(f"{name} needs a file. Usage: {USAGE}")
        path = Path(value)
    return path, rest


def check_job(job: CanonJobConfig) -> None:
    """Refuse what would train something else than the file says; raises UserError."""
    if job.model.name != "canon":
        raise UserError(f"model.name = '{job.model.name}': this trainer trains 'canon' only")
    _ = job.model_args  # ModelArgs checks itself
    training = job.training
    if training.global_batch_size < 1:
        raise UserError(
            f"training.global_batch_size = {training.global_batch_size}: set it in sequences; it "
            "is what every architecture shares, at any number of ranks"
        )
    for name, value in (
        ("training.steps", training.steps),
        ("training.seq_len", training.seq_len),
        ("training.local_batch_size", training.local_batch_size),
        ("checkpoint.interval", job.checkpoint.interval),
        ("metrics.log_freq", job.metrics.log_freq),
    ):
        if value < 1:
            raise UserError(f"{name} = {value}: expected at least 1")
    if job.run.stop_at is not None and not 1 <= job.run.stop_at <= training.steps:
        raise UserError(
            f"run.stop_at = {job.run.stop_at}: expected a step from 1 to training.steps = "
            f"{training.steps}"
        )
    schedule = job.lr_scheduler
    if schedule.decay_steps is not None:
        if schedule.decay_steps < 1:
            raise UserError(f"lr_scheduler.decay_steps = {schedule.decay_steps}: expected >= 1")
        if schedule.decay_ratio is not None or schedule.total_steps is not None:
            raise UserError(
                "lr_scheduler.decay_steps sets the decay's length by itself; unset decay_ratio and "
                "total_steps"
            )
    ends_with_run = schedule.decay_steps is None and schedule.total_steps is None
    if schedule.warmup_steps > training.steps and ends_with_run:
        raise UserError(
            f"lr_scheduler.warmup_steps = {schedule.warmup_steps} is more than "
            f"training.steps = {training.steps}: the schedule would be cut short in silence"
        )
    _check_numbers(job)
    _check_data(job.data)
    _check_checkpoint(job)
    defaults = CanonJobConfig()
    for name in UNSUPPORTED:
        given, default = _value(job, name), _value(defaults, name)
        if given != default:
            raise UserError(
                f"{name} = {given!r}: this trainer does not have it (it shards with FSDP2 over all "
                f"ranks and reads `data.path`); leave it at {default!r}"
            )


UNSUPPORTED = (
    "job.custom_config_module",
    "model.converters",
    "model.hf_assets_path",
    "model.tokenizer_path",
    "optimizer.early_step_in_backward",
    "training.dataset",
    "training.dataset_path",
    "training.dataloader",
    "parallelism.data_parallel_replicate_degree",
    "parallelism.data_parallel_shard_degree",
    "parallelism.tensor_parallel_degree",
    "parallelism.pipeline_parallel_degree",
    "parallelism.context_parallel_degree",
    "parallelism.expert_parallel_degree",
    "checkpoint.create_seed_checkpoint",
    "checkpoint.initial_load_in_hf",
    "checkpoint.last_save_in_hf",
    "checkpoint.last_save_model_only",
    "checkpoint.load_only",
    "checkpoint.exclude_from_loading",
    "checkpoint.export_dtype",
    "checkpoint.initial_load_in_hf_quantized",
    "checkpoint.enable_ft_dataloader_checkpoints",
    "quantize",
    "comm.mode",
    "memory_estimation.enable",
    "fault_tolerance.enable",
    "experimental",
    "validation.enable",
)
"""torchtitan's keys that would crash, be ignored, or leave a run that can't be resumed."""


def _value(job: CanonJobConfig, dotted: str) -> Any:
    return functools.reduce(getattr, dotted.split("."), job)


def _check_numbers(job: CanonJobConfig) -> None:
    """Raise UserError for numbers outside their range."""
    for name, low in (
        ("optimizer.lr", 0.0),
        ("optimizer.eps", 0.0),
        ("optimizer.weight_decay", 0.0),
        ("training.max_norm", 0.0),
        ("lr_scheduler.warmup_steps", 0),
        ("lr_scheduler.min_lr_factor", 0.0),
    ):
        value = _value(job, name)
        if not (math.isfinite(value) and value >= low):
            raise UserError(f"{name} = {value}: expected a finite number of at least {low}")
    guards = job.guards
    if guards.max_bad_steps < 1:
        raise UserError(f"guards.max_bad_steps = {guards.max_bad_steps}: expected at least 1")
    if not 2 <= guards.outlier_window <= 1024:
        raise UserError(f"guards.outlier_window = {guards.outlier_window}: expected 2 to 1024")
    if guards.outlier_sigma is not None and not guards.outlier_sigma > 0:
        raise UserError(f"guards.outlier_sigma = {guards.outlier_sigma}: expected more than 0")
    if not job.run.heartbeat_s > 0:
        raise UserError(f"run.heartbeat_s = {job.run.heartbeat_s}: expected more than 0")


def _check_data(data: experiment.Data) -> None:
    """Raise UserError for data options that contradict each other; no file is looked at."""
    if not 0 <= data.data_seed < 1 << 64:
        raise UserError(f"data.data_seed = {data.data_seed}: expected 0 to 2**64 - 1")
    if data.path and data.paths:
        raise UserError(
            f"data.path = {data.path!r} and data.paths = {data.paths!r}: give one of the two "
            f'(data.path = "" unsets what a base file set)'
        )
    if len(data.weights) != len(data.paths):
        raise UserError(
            f"data.weights has {len(data.weights)} numbers for {len(data.paths)} folders of "
            f"data.paths; give one for each, in their order"
        )
    for weight in data.weights:
        exact_weight(weight)
    check_order(data.order, len(data.folders))


def _check_checkpoint(job: CanonJobConfig) -> None:
    """Raise UserError for checkpoint options that can't do what they say."""
    checkpoint = job.checkpoint
    if checkpoint.keep_latest_k == 1 or checkpoint.keep_latest_k < 0:
        raise UserError(
            f"checkpoint.keep_latest_k = {checkpoint.keep_latest_k}: expected 0 (all) or at least "
            "2, since the newest may still be in writing"
        )
    if checkpoint.fresh and checkpoint.load_step != -1:
        raise UserError(
            f"checkpoint.fresh begins again at step 1, checkpoint.load_step = "
            f"{checkpoint.load_step} goes on from there: give one of the two"
        )
    if not checkpoint.enable and job.run.stop_at is not None:
        raise UserError("run.stop_at leaves a checkpoint, but checkpoint.enable is false")


def valid_world_sizes(global_batch_size: int) -> list[int]:
    """The numbers of ranks that can share a global batch: its divisors."""
    return [n for n in range(1, global_batch_size + 1) if global_batch_size % n == 0]


def micro_batch_size(job: CanonJobConfig, world_size: int) -> int:
    """Sequences in one forward pass of one rank: a divisor of the rank's share of the global batch.

    It is the largest one that is at most `training.local_batch_size`, which therefore is an upper
    bound set by memory and never changes what a step computes on. Raises UserError where
    `world_size` does not divide `training.global_batch_size`, naming the ones that do.
    """
    total = job.training.global_batch_size
    if total % world_size:
        valid = ", ".join(map(str, valid_world_sizes(total)))
        raise UserError(
            f"training.global_batch_size = {total} can't be shared by {world_size} ranks. World "
            f"sizes that divide it: {valid}"
        )
    share = total // world_size
    bound = min(share, job.training.local_batch_size)
    return next(size for size in range(bound, 0, -1) if share % size == 0)
