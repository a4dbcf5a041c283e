"""torchtitan's JobConfig with our sections, defaults and checks."""

import dataclasses
import functools
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, get_type_hints

import tyro
from torchtitan.config import job_config as titan

from canon_pretrain.core.errors import UserError, check_choice
from canon_pretrain.core.fields import help_of, optional_fields
from canon_pretrain.data.mixture import check_order, exact_weight
from canon_pretrain.kernels.backends import BACKENDS, MIXER_BACKENDS
from canon_pretrain.model.args import ModelArgs, fill_model
from canon_pretrain.model.args import flavor as model_flavor
from canon_pretrain.model.attend import check_backend_fits
from canon_pretrain.run import sections
from canon_pretrain.run.config import valid_world_sizes
from canon_pretrain.run.identity import GROUP_KEYS, IDENTITY
from canon_pretrain.run.limits import (
    LIMITS,
    check_groups,
    check_limits,
    schedule_faults,
)
from canon_pretrain.synthetic.task import Task
from canon_pretrain.synthetic.tasks import TaskSection, build_task


def _model_overrides() -> Any:
    """Return a dataclass of ModelArgs' fields as optional keys, but for training.seq_len."""
    kinds: dict[str, Any] = get_type_hints(ModelArgs)
    del kinds["max_seq_len"]
    # as TOML has them; sections of layers are not on the command line
    kinds["pattern"] = list[str]
    kinds["layers"] = tyro.conf.Fixed[tyro.conf.Suppress[dict[str, dict[str, Any]]]]
    return optional_fields(kinds, help_of(ModelArgs))


@dataclass
class Model(_model_overrides(), titan.Model):  # type: ignore[misc]  # a class is made by a call
    """The model: a flavor (a size) and overrides. An unset key has the flavor's value."""

    name: str = "canon"
    flavor: str = "debug"
    attention_backend: str = "auto"
    """auto, sdpa, flex, flash_attn; SDPA with cudnn or flash first; or the packages fa3, fa4."""
    canon_backend: str = "auto"
    """reference, compiled, causal_conv1d, fla, triton; auto: triton if it passes its check."""
    mixer_backend: str = "auto"
    """chunked, triton, fla; auto: on a GPU the first of triton and fla that passes its check."""


@dataclass
class Optimizer(sections.Optimizer, titan.Optimizer):
    """The values of the paper's appendix B, and torch's of Muon."""


@dataclass
class LRScheduler(sections.LRScheduler, titan.LRScheduler):
    """1000 warmup steps, then cosine to 10 % (assumed: the paper states no schedule)."""


@dataclass
class Training(sections.Training, titan.Training):
    """Clip gradients to norm 1 (assumed: the paper states no clipping)."""


@dataclass
class Checkpoint(sections.Checkpoint, titan.Checkpoint):
    """Enabled, asynchronous, and the last checkpoint is a full one."""


@dataclass
class Metrics(sections.Metrics, titan.Metrics):
    """Other tools get copies of RUN/log.jsonl live, by separate processes."""


@dataclass
class Validation(sections.Validation, titan.Validation):
    """Loss on the held-out split while training, and after the last step."""


@dataclass
class ActivationCheckpoint(titan.ActivationCheckpoint):
    """Off by default: the 1.3B states leave enough memory for activations."""

    mode: Literal["selective", "full", "memory_budget", "none"] = "none"


@dataclass
class CanonJobConfig(titan.JobConfig):
    """A training job: torchtitan's sections and those of run/sections.py."""

    model: Model = field(default_factory=Model)
    training: Training = field(default_factory=Training)
    optimizer: Optimizer = field(default_factory=Optimizer)
    lr_scheduler: LRScheduler = field(default_factory=LRScheduler)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    activation_checkpoint: ActivationCheckpoint = field(default_factory=ActivationCheckpoint)
    metrics: Metrics = field(default_factory=Metrics)
    validation: Validation = field(default_factory=Validation)
    data: sections.Data = field(default_factory=sections.Data)
    run: sections.Run = field(default_factory=sections.Run)
    guards: sections.Guards = field(default_factory=sections.Guards)
    loss: sections.Loss = field(default_factory=sections.Loss)
    samples: sections.Samples = field(default_factory=sections.Samples)

    @property
    def last_step(self) -> int:
        return self.run.stop_at or self.training.steps

    @property
    def tokens_per_step(self) -> int:
        return self.training.global_batch_size * self.training.seq_len

    @property
    def compiles_model(self) -> bool:
        return self.compile.enable and "model" in self.compile.components

    @property
    def task(self) -> Task | None:
        """The task of `[data.task]`, None for shards. Raises UserError for bad settings."""
        section = self.data.task
        if not section.name:
            return None
        # the length of a task's sequences is the job's
        settings = section.settings | {"seq_len": self.training.seq_len}
        return build_task(section.name, settings)

    @property
    def model_args(self) -> ModelArgs:
        """The flavor's arguments with this job's overrides, checked by ModelArgs."""
        base = model_flavor(self.model.flavor)
        overrides: dict[str, Any] = {}
        for argument in dataclasses.fields(ModelArgs):
            # unset keys are None
            value = getattr(self.model, argument.name, None)
            if value is not None:
                overrides[argument.name] = value
        overrides["max_seq_len"] = self.training.seq_len

        # a mixer changes sizes that are not set
        return fill_model(base, overrides)


def shard_degree(job: CanonJobConfig, world_size: int) -> int:
    """Return the ranks per replica; UserError if the degrees do not divide `world_size`."""
    # Experts are split over ranks of one replica.
    replicas = job.parallelism.data_parallel_replicate_degree
    expert_degree = job.parallelism.expert_parallel_degree
    step = replicas * expert_degree
    if world_size % step:
        valid = valid_world_sizes(job.training.global_batch_size, step)
        experts = ""
        if expert_degree > 1:
            experts = f"times expert_parallel_degree = {expert_degree} "
        raise UserError(
            "config.world_size",
            f"parallelism.data_parallel_replicate_degree = {replicas} {experts}"
            f"does not divide {world_size} ranks. "
            f"Valid world sizes: {', '.join(map(str, valid)) or 'none'}",
            given=world_size,
            valid=valid,
        )
    return world_size // replicas


def check_cpu_offload(job: CanonJobConfig, *, on_gpu: bool) -> None:
    """Raise UserError if parameters would be offloaded from a GPU.

    Gradient clipping and the guards keep their flags on the GPU, but norms of offloaded gradients
    are on the CPU: the first step fails.
    """
    if on_gpu and job.training.enable_cpu_offload:
        raise UserError(
            "config.cpu_offload",
            "training.enable_cpu_offload = True is not supported on a GPU. Unset it; to save "
            "memory, lower training.local_batch_size (it changes no result), set "
            "--activation_checkpoint.mode full, or use more ranks",
            key="training.enable_cpu_offload",
        )


def micro_batch_size(job: CanonJobConfig, world_size: int) -> int:
    """Return the sequences per rank and forward pass.

    That is the largest divisor of a rank's share of the batch up to training.local_batch_size.
    Raises UserError if the ranks do not divide the batch.
    """
    # Every rank has the same share.
    batch_size = job.training.global_batch_size
    share, remainder = divmod(batch_size, world_size)
    if remainder:
        valid = valid_world_sizes(batch_size)
        raise UserError(
            "config.world_size",
            f"training.global_batch_size = {batch_size} is not divisible by {world_size} ranks. "
            f"Valid world sizes: {', '.join(map(str, valid))}",
            given=world_size,
            valid=valid,
        )

    # The largest divisor up to local_batch_size; 1 at the latest.
    size = min(share, job.training.local_batch_size)
    while share % size:
        size -= 1
    return size


UNSUPPORTED = """
    model.name job.custom_config_module model.converters model.hf_assets_path model.tokenizer_path
    optimizer.early_step_in_backward training.dataset training.dataset_path training.dataloader
    quantize comm.mode experimental parallelism.data_parallel_shard_degree
    parallelism.tensor_parallel_degree parallelism.pipeline_parallel_degree
    parallelism.pipeline_parallel_first_stage_less_layers
    parallelism.pipeline_parallel_last_stage_less_layers
    parallelism.pipeline_parallel_layers_per_stage parallelism.pipeline_parallel_schedule
    parallelism.pipeline_parallel_schedule_csv parallelism.pipeline_parallel_microbatch_size
    parallelism.module_fqns_per_model_part parallelism.context_parallel_degree
    parallelism.context_parallel_load_balancer parallelism.context_parallel_rotate_method
    parallelism.expert_tensor_parallel_degree parallelism.expert_parallel_comm_backend
    checkpoint.create_seed_checkpoint checkpoint.initial_load_in_hf checkpoint.last_save_in_hf
    checkpoint.last_save_model_only checkpoint.load_only checkpoint.exclude_from_loading
    checkpoint.export_dtype checkpoint.initial_load_in_hf_quantized
    checkpoint.enable_ft_dataloader_checkpoints memory_estimation.enable
    metrics.save_for_all_ranks fault_tolerance debug.seed validation.dataset validation.dataset_path
    validation.dataloader validation.local_batch_size validation.seq_len validation.steps
""".split()
"""torchtitan's keys that would crash, be ignored, or make the run impossible to resume."""
INSTEAD = {"debug.seed": "set model.init_seed and data.data_seed"}
"""Our keys for some of those."""

FOLDERS = """
    checkpoint.folder profiling.save_traces_folder profiling.save_memory_snapshot_folder
    comm.save_traces_folder metrics.save_tb_folder
""".split()
"""Folders in the run folder (a checkpoint's may be elsewhere), and not that folder itself."""
PATHS = """
    job.dump_folder job.save_config_file checkpoint.initial_load_path comm.save_traces_file_prefix
    data.path data.paths data.exclude validation.path
""".split()
"""Other paths. Their files may be written after a dry run, so only their form is checked."""

CODE = "code"
"""Name of the source code in `run.allow_changes`; not part of the identity."""
FINGERPRINT = "data_fingerprint"
"""Name of the training data in a run's identity."""
MIXER_CODE = "mixer_code"
"""Name of the hashes of the files of own mixers in a run's identity; absent without one."""
EXCLUDED = "data.exclude"
"""Name of the hash of the excluded documents in a run's identity; absent without any."""
HELD_OUT = "held_out_fingerprint"
"""Name of the held-out split in a run's identity; absent if validation is off."""


def check_job(job: CanonJobConfig) -> None:
    """Raise UserError for a job that would not train what its file states."""
    # Keys of torchtitan that must keep their defaults.
    defaults = CanonJobConfig()
    for name in UNSUPPORTED:
        value = value_of(job, name)
        default = value_of(defaults, name)
        if value != default:
            instead = ""
            if name in INSTEAD:
                instead = f" ({INSTEAD[name]})"
            raise UserError(
                "config.unsupported",
                f"{name} = {value!r} is not supported by this trainer; expected {default!r}"
                f"{instead}",
                key=name,
            )

    # Each setting alone.
    check_backend_fits(job.model_args, job.model.attention_backend)  # ModelArgs checks itself
    check_choice("canon_backend", job.model.canon_backend, BACKENDS)
    check_choice("mixer_backend", job.model.mixer_backend, MIXER_BACKENDS)
    check_choice("optimizer.name", job.optimizer.name, sections.OPTIMIZERS)
    _check_compile_backend(job.compile.backend)
    check_allowed_changes(job.run.allow_changes, _identity_names())
    check_limits({name: value_of(job, name) for name in LIMITS})
    check_groups(job.optimizer.groups)

    # Settings together.
    for fault in schedule_faults(job.lr_scheduler, job.training.steps):
        raise UserError("config.schedule", fault)
    for name, fault in _conflicts(job):
        raise UserError("config.conflict", fault, key=name)
    _ = job.task  # which checks its settings
    for weight in job.data.weights:
        exact_weight(weight)
    check_order(job.data.order, len(job.data.folders))


def split_names(entries: list[str]) -> list[str]:
    """Return the names in `run.allow_changes`; an entry may hold several, comma-separated."""
    return [name for name in ",".join(entries).split(",") if name]


def check_allowed_changes(allowed: list[str], identity: Iterable[str]) -> None:
    """Raise UserError unless `run.allow_changes` has names in a run's `identity` only, or CODE."""
    valid = {*identity, HELD_OUT, MIXER_CODE, EXCLUDED, *GROUP_KEYS}
    unknown = []
    for name in split_names(allowed):
        if name != CODE and name not in valid and re.sub(r"\[\d+\]", "[N]", name) not in valid:
            unknown.append(name)
    if unknown:
        raise UserError(
            "run.unknown_change",
            f"run.allow_changes: {', '.join(unknown)} is not part of a run's identity. Expected "
            f"{CODE}, {', '.join(sorted(valid))}",
            names=unknown,
        )


def _identity_names() -> Iterator[str]:
    """Yield the names that the identity of any job may have."""
    yield FINGERPRINT
    yield from IDENTITY
    yield from (f"model.{f.name}" for f in dataclasses.fields(ModelArgs))
    yield from (f"data.task.{f.name}" for f in dataclasses.fields(TaskSection))


def _check_compile_backend(name: str) -> None:
    """Raise UserError unless torch.compile has the backend `name`."""
    if name == CanonJobConfig().compile.backend:
        return
    from torch._dynamo import list_backends  # slow to import

    check_choice("compile.backend", name, list_backends(exclude_tags=()))


def value_of(job: CanonJobConfig, dotted: str) -> Any:
    return functools.reduce(getattr, dotted.split("."), job)


def _conflicts(job: CanonJobConfig) -> Iterator[tuple[str, str]]:
    """Yield (key, fault) of each value that contradicts another key or is no path."""
    for name in (*FOLDERS, *PATHS):
        value = value_of(job, name)
        if not _is_path(name, value):
            yield name, f"{name} = {value!r}: expected a path (only a shell expands ~)"
    yield from _data_conflicts(job)
    yield from _launch_conflicts(job)
    yield from _computation_conflicts(job)


def _data_conflicts(job: CanonJobConfig) -> Iterator[tuple[str, str]]:
    """Yield the conflicts of data, task, validation and samples."""
    data = job.data
    if data.path and data.paths:
        yield "data.path", f"data.path = {data.path!r}, data.paths = {data.paths!r}: set only one"

    # A task replaces shards and what is done with text.
    if data.task.name:
        is_set = {
            "data.path": data.path,
            "data.paths": data.paths,
            "data.exclude": data.exclude,
            "validation.path": job.validation.path,
            "data.order": data.order != "random",
            "samples.interval": job.samples.interval,
            "model.document_mask": job.model_args.document_mask,
        }
        # the names whose value is true
        for name in filter(is_set.get, is_set):
            yield name, f"{name} = {value_of(job, name)!r} and a task: unset it, or data.task.name"
        if job.validation.windows == -1:
            yield "validation.windows", "validation.windows = -1, but a task has no end"
    elif data.task.settings:
        yield "data.task.name", f"data.task.name is unset, but has {', '.join(data.task.settings)}"

    prompts = job.samples.prompts
    if job.samples.interval and not prompts:
        yield "samples.prompts", "samples.interval is set, but samples.prompts is empty: set both"
    repeated = [prompt for k, prompt in enumerate(prompts) if prompt in prompts[:k]]
    if repeated:
        yield "samples.prompts", f"samples.prompts has {repeated[0]!r} more than once: list it once"

    if len(data.weights) != len(data.paths):
        yield "data.weights", f"data.weights: expected {len(data.paths)} numbers, one per path"


def _launch_conflicts(job: CanonJobConfig) -> Iterator[tuple[str, str]]:
    """Yield the conflicts of where a launch begins and ends."""
    stop_at = job.run.stop_at
    steps = job.training.steps

    # A launch that stops early must save what it has trained.
    if stop_at is not None and not 1 <= stop_at <= steps:
        yield "run.stop_at", f"run.stop_at = {stop_at}: expected 1 to training.steps = {steps}"
    if stop_at is not None and not job.checkpoint.enable:
        yield "checkpoint.enable", "run.stop_at requires checkpoint.enable = true"

    if job.checkpoint.fresh and job.checkpoint.load_step != -1:
        yield "checkpoint.load_step", "checkpoint.fresh and checkpoint.load_step: set only one"


def _computation_conflicts(job: CanonJobConfig) -> Iterator[tuple[str, str]]:
    """Yield the conflicts of how a step is computed: experts, loss, profiling, checkpointing."""
    # Each rank has equally many experts.
    args = job.model_args
    degree = job.parallelism.expert_parallel_degree
    num_experts = args.num_experts if args.num_expert_layers else 0
    if degree > 1 and (num_experts == 0 or num_experts % degree):
        name = "parallelism.expert_parallel_degree"
        yield name, f"{name} = {degree} does not divide the model's {num_experts or 'no'} experts"

    if job.loss.z_loss and job.loss.squared_loss:
        yield "loss.squared_loss", "loss.z_loss and loss.squared_loss: set only one"

    profiling = job.profiling
    num_profiled = profiling.profiler_warmup + profiling.profiler_active
    if profiling.enable_profiling and profiling.profile_freq < num_profiled:
        yield (
            "profiling.profile_freq",
            f"profiling.profile_freq = {profiling.profile_freq}: expected at least "
            f"profiler_warmup = {profiling.profiler_warmup} plus profiler_active = "
            f"{profiling.profiler_active}",
        )

    name = "activation_checkpoint.selective_ac_option"
    option = job.activation_checkpoint.selective_ac_option
    if not re.fullmatch("op|[0-9]+", option):
        yield name, f'{name} = {option!r}: expected "op", or N to recompute every N-th layer'
    if job.activation_checkpoint.mode == "memory_budget" and not job.compiles_model:
        name = "activation_checkpoint.mode"
        yield name, f'{name} = "memory_budget" requires compile.enable = true'


def _is_path(name: str, value: str | list[str] | None) -> bool:
    """Return whether a path's value, which may be unset or a list, has the form of one."""
    paths = value if isinstance(value, list) else [value or ""]
    for path in paths:
        if "\0" in path or path.startswith("~"):
            return False
    if name in FOLDERS:
        return os.path.normpath(paths[0]) != os.curdir
    return name not in ("job.dump_folder", "job.save_config_file") or value != ""
