"""torchtitan's JobConfig with our sections and defaults, and what is refused."""

import dataclasses
import functools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter, ValidationError
from torchtitan.config import job_config as titan

from canon_pretrain.core.errors import UserError, check_choice
from canon_pretrain.data.mixture import check_order, exact_weight
from canon_pretrain.kernels.backends import BACKENDS
from canon_pretrain.model.args import ModelArgs
from canon_pretrain.model.args import flavor as model_flavor
from canon_pretrain.model.attend import check_backend_fits
from canon_pretrain.run import config as experiment
from canon_pretrain.run.config import valid_world_sizes


@dataclass
class Model(titan.Model):
    """The model: a flavor (a size), and what differs from it. An unset key is the flavor's."""

    name: str = "canon"
    flavor: str = "debug"
    vocab_size: int | None = None
    """Unset: that of the shards; given, it must equal theirs."""
    num_layers: int | None = None
    dim: int | None = None
    num_heads: int | None = None
    num_kv_heads: int | None = None
    """Heads of k and v (grouped-query attention); 0 for as many as num_heads."""
    ffn_dim: int | None = None
    """Width of the feed-forward. Unset: the flavor's, or 4 dim where ffn = "standard"."""
    ffn: str | None = None
    """gated: w2(act(w1 x) * w3 x); standard: w2(act(w1 x)), the paper's GPT2(RoPE)."""
    ffn_activation: str | None = None
    """silu, relu2 (the paper's R2), or gelu (GPT2's, with ffn = "standard")."""
    norm: str | None = None
    """rmsnorm, or layernorm (GPT2's)."""
    bias: bool | None = None
    """Biases in the blocks' linear layers and in LayerNorm (GPT2's)."""
    norm_eps: float | None = None
    position: str | None = None
    """rope, nope, alibi, h_alibi, or partial_rope_a, _b, _c (the paper's Figure 22)."""
    partial_rope_dim: int | None = None
    """How many dims of each head rotate in partial_rope_c; 0 for a quarter."""
    rope_theta: float | None = None
    canon_set: str | None = None
    """Any subset of ABCD; empty for no Canon layers."""
    canon_kernel: int | None = None
    canon_residual: bool | None = None
    canon_activation: bool | None = None
    canon_trainable: bool | None = None
    """false: cst-Canon, fixed at its initial values (the paper's Figure 20)."""
    qk_norm: str | None = None
    """none; full: over all heads, before Canon-B; per_head: over each head, after Canon-B."""
    tie_embeddings: bool | None = None
    """The output matrix is the token embedding."""
    document_mask: bool | None = None
    """Attention and Canon stop at the start of a document; the paper's do not."""
    eos_id: int | None = None
    """The token that ends a document, for document_mask; must be that of the shards."""
    init: str | None = None
    """paper: N(0, 0.02); lingua: truncated normal with std D^-1/2."""
    init_seed: int | None = None
    """Seed of the initial weights alone; they are the same at every world size."""
    attention_backend: str = "auto"
    """auto, sdpa, flex or flash_attn; cudnn, flash: SDPA, that kernel first; fa3, fa4: flash by
    that package (`python -m canon_pretrain.bench attention` times them)."""
    canon_backend: str = "auto"
    """reference, compiled, causal_conv1d, fla or triton; auto: triton on a GPU that passes the
    check at start-up, else compiled."""


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
    decay_ratio: float | None = None
    """WSD: the rate is stable after warm-up, and decays in this last share of the run."""
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
    """async copies to (pinned) CPU memory and writes from there; the other name is the same."""
    fresh: bool = False
    """Begin again at step 1 though there are checkpoints; the run so far moves to RUN/archive."""
    max_held: int = 4
    """Steps past `keep_latest_k` that are kept, as weights alone, for evaluations that wait."""


@dataclass
class Metrics(titan.Metrics):
    """`enable_wandb` and `enable_tensorboard` copy RUN/log.jsonl live, from their own processes."""

    wandb_mode: Literal["online", "offline", "disabled"] | None = None
    """Unset: $WANDB_MODE, or online. Offline runs lie in RUN/wandb, for `wandb sync`."""
    wandb_project: str = ""
    """Unset: $WANDB_PROJECT, or canon_pretrain."""
    wandb_entity: str = ""
    """Unset: $WANDB_ENTITY, or the account's own."""
    wandb_name: str = ""
    """Unset: $WANDB_NAME, or the run folder's name."""
    wandb_tags: list[str] = field(default_factory=list)
    """Beside the flavor, the position and the Canon set, which every run is tagged with."""


@dataclass
class Validation(titan.Validation):
    """Loss on the held-out part of the data while training, and after the last step."""

    enable: bool | None = None
    """Unset: wherever the data has a held-out part. True: an error where it has none."""
    path: str = ""
    """A folder of data_prep, of the same tokenizer, to validate on: its held-out part, or all of it
    if built with --holdout 0. Unset: the held-out part of each folder of the data."""
    freq: int = 100
    """Steps between two validations."""
    windows: int | None = None
    """Windows of training.seq_len tokens, the same ones each time; -1: the whole held-out part.
    Unset: training.global_batch_size of them for each 100 steps of `freq`, at most 2**21 tokens."""


@dataclass
class ActivationCheckpoint(titan.ActivationCheckpoint):
    """Off unless asked for: the 1.3B states leave room for the activations."""

    mode: Literal["selective", "full", "memory_budget", "none"] = "none"


@dataclass
class CanonJobConfig(titan.JobConfig):
    """One training job: torchtitan's sections, and `[data]`, `[run]`, `[guards]`, `[loss]`."""

    model: Model = field(default_factory=Model)
    training: Training = field(default_factory=Training)
    optimizer: Optimizer = field(default_factory=Optimizer)
    lr_scheduler: LRScheduler = field(default_factory=LRScheduler)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    activation_checkpoint: ActivationCheckpoint = field(default_factory=ActivationCheckpoint)
    metrics: Metrics = field(default_factory=Metrics)
    validation: Validation = field(default_factory=Validation)
    data: experiment.Data = field(default_factory=experiment.Data)
    run: experiment.Run = field(default_factory=experiment.Run)
    guards: experiment.Guards = field(default_factory=experiment.Guards)
    loss: experiment.Loss = field(default_factory=experiment.Loss)

    @property
    def last_step(self) -> int:
        """The step after which this launch ends."""
        return self.run.stop_at or self.training.steps

    @property
    def model_args(self) -> ModelArgs:
        """The model's arguments: the flavor with this job's keys on top, checked by ModelArgs."""
        base = model_flavor(self.model.flavor)
        names = {f.name for f in dataclasses.fields(ModelArgs)}
        own = {k: v for k, v in vars(self.model).items() if k in names and v is not None}
        if own.get("ffn") == "standard":
            own.setdefault("ffn_dim", 4 * own.get("dim", base.dim))
        return dataclasses.replace(base, max_seq_len=self.training.seq_len, **own)


def shard_degree(job: CanonJobConfig, world_size: int) -> int:
    """Return how many ranks share one copy of the weights; UserError if replicas don't divide."""
    replicas, batch = job.parallelism.data_parallel_replicate_degree, job.training.global_batch_size
    if world_size % replicas:
        fitting = ", ".join(map(str, valid_world_sizes(batch, replicas))) or "none"
        text = f"{world_size} ranks can't be that many equal replicas. World sizes that fit: "
        raise UserError(
            "todo.job_config",
            f"parallelism.data_parallel_replicate_degree = {replicas}: {text}{fitting}",
        )
    return world_size // replicas


def micro_batch_size(job: CanonJobConfig, world_size: int) -> int:
    """Return how many sequences a rank takes at once: at most local_batch_size, equal parts."""
    total = job.training.global_batch_size
    share, rest = divmod(total, world_size)
    if rest:
        fitting = ", ".join(map(str, valid_world_sizes(total)))
        text = f"can't be shared by {world_size} ranks. World sizes that divide it: {fitting}"
        raise UserError("todo.job_config", f"training.global_batch_size = {total} {text}")
    bound = min(share, job.training.local_batch_size)
    return next(size for size in range(bound, 0, -1) if share % size == 0)


COUNT = Annotated[int, Field(ge=1, le=1 << 31)]
SIZE = Annotated[int, Field(ge=0, le=1 << 31)]
SECONDS = Annotated[int, Field(ge=1, le=86_400)]
AMOUNT = Annotated[float, Field(ge=0, allow_inf_nan=False)]
LIMITS: tuple[tuple[Any, str], ...] = (
    (COUNT, "training.seq_len training.global_batch_size training.local_batch_size"),
    (COUNT, "training.gc_freq checkpoint.interval metrics.log_freq validation.freq"),
    (COUNT, "guards.max_bad_steps parallelism.data_parallel_replicate_degree"),
    (SIZE, "lr_scheduler.warmup_steps checkpoint.max_held comm.trace_buf_size"),
    (SIZE, "loss.chunk_tokens data.read_ahead"),
    (AMOUNT, "optimizer.lr optimizer.eps optimizer.weight_decay training.max_norm"),
    (AMOUNT, "lr_scheduler.min_lr_factor loss.z_loss loss.squared_loss"),
    (Annotated[float, Field(ge=0, lt=1)], "optimizer.beta1 optimizer.beta2"),
    (SECONDS, "comm.init_timeout_seconds comm.train_timeout_seconds"),
    (Annotated[int, Field(ge=1, le=1 << 40)], "training.steps"),
    (Annotated[int, Field(ge=1)] | None, "lr_scheduler.decay_steps"),
    (Annotated[float, Field(gt=0, le=1)] | None, "lr_scheduler.decay_ratio"),
    (Annotated[float, Field(ge=0, le=1)], "activation_checkpoint.memory_budget"),
    (Annotated[float, Field(ge=0.01, le=3600)], "run.heartbeat_s"),
    (Annotated[int, Field(ge=2, le=1024)], "guards.outlier_window"),
    (Annotated[float, Field(gt=0, allow_inf_nan=False)] | None, "guards.outlier_sigma"),
    (Annotated[int, Field(ge=0, lt=1 << 64)], "data.data_seed"),
    # -1: the whole held-out part
    (Literal[-1] | Annotated[int, Field(ge=1)] | None, "validation.windows"),
    # 0: all; not 1, since the newest may still be in writing
    (Literal[0] | Annotated[int, Field(ge=2)], "checkpoint.keep_latest_k"),
)
"""By name: a field of torchtitan's that is declared again would lose its text in --help."""

UNSUPPORTED = """
    model.name job.custom_config_module model.converters model.hf_assets_path model.tokenizer_path
    optimizer.early_step_in_backward training.dataset training.dataset_path training.dataloader
    quantize comm.mode experimental parallelism.data_parallel_shard_degree
    parallelism.tensor_parallel_degree parallelism.pipeline_parallel_degree
    parallelism.context_parallel_degree parallelism.expert_parallel_degree
    checkpoint.create_seed_checkpoint checkpoint.initial_load_in_hf checkpoint.last_save_in_hf
    checkpoint.last_save_model_only checkpoint.load_only checkpoint.exclude_from_loading
    checkpoint.export_dtype checkpoint.initial_load_in_hf_quantized
    checkpoint.enable_ft_dataloader_checkpoints memory_estimation.enable
    metrics.save_for_all_ranks fault_tolerance.enable validation.dataset validation.dataset_path
    validation.dataloader validation.local_batch_size validation.seq_len validation.steps
""".split()
"""torchtitan's keys that would crash, be ignored, or leave a run that can't be resumed."""


def check_job(job: CanonJobConfig) -> None:
    """Raise UserError for a job that would train something else than its file says."""
    defaults = CanonJobConfig()
    for name in UNSUPPORTED:
        given, default = _value(job, name), _value(defaults, name)
        if given != default:
            raise UserError(
                "todo.job_config",
                f"{name} = {given!r}: not in this trainer; leave it at {default!r}",
            )
    check_backend_fits(job.model_args, job.model.attention_backend)  # ModelArgs checks itself
    check_choice("canon_backend", job.model.canon_backend, BACKENDS)
    for kind, names in LIMITS:
        for name in names.split():
            try:
                _adapter(kind).validate_python(_value(job, name))
            except ValidationError as error:
                expected = " or ".join(dict.fromkeys(each["msg"] for each in error.errors()))
                expected = expected.replace("Input should be", "expected")
                raise UserError(
                    "todo.job_config", f"{name} = {_value(job, name)!r}: {expected}"
                ) from None
    for fault in (*_schedule_faults(job), *_faults(job)):
        raise UserError("todo.job_config", fault)
    for weight in job.data.weights:
        exact_weight(weight)
    check_order(job.data.order, len(job.data.folders))


def _value(job: CanonJobConfig, dotted: str) -> Any:
    return functools.reduce(getattr, dotted.split("."), job)


_adapter = functools.cache(TypeAdapter)


def _schedule_faults(job: CanonJobConfig) -> Iterator[str]:
    """Yield why torchtitan would cut the schedule short, or let it run past its end."""
    schedule, steps = job.lr_scheduler, job.training.steps
    warmup, ratio, total = schedule.warmup_steps, schedule.decay_ratio, schedule.total_steps
    if schedule.decay_steps is not None:
        if ratio is not None or total is not None:
            yield "lr_scheduler.decay_steps: unset decay_ratio and total_steps beside it"
        return
    if total is not None and total < steps:
        yield f"lr_scheduler.total_steps = {total} is less than training.steps = {steps}: unset it"
    name, length = ("training.steps", steps) if total is None else ("total_steps", total)
    decay = 0 if ratio is None else round(length * ratio)
    if warmup + decay > length:
        text = f"{warmup} and a decay of {decay} steps (decay_ratio = {ratio}) do not fit into "
        yield f"lr_scheduler.warmup_steps = {text}{name} = {length}: shorten one"


def _faults(job: CanonJobConfig) -> Iterator[str]:
    """Yield what keys ask for together and can't have."""
    data, stop_at, steps, loss = job.data, job.run.stop_at, job.training.steps, job.loss
    checkpoint, profiling = job.checkpoint, job.profiling
    for name in ("job.dump_folder", "checkpoint.folder"):
        if not (value := _value(job, name)) or "\0" in value or value.startswith("~"):
            yield f"{name} = {value!r}: expected a folder's path (only a shell expands ~)"
    if data.path and data.paths:
        yield f"data.path = {data.path!r} and data.paths = {data.paths!r}: set one of them to empty"
    if len(data.weights) != len(data.paths):
        yield f"data.weights has {len(data.weights)} numbers for {len(data.paths)} data.paths"
    if stop_at is not None and not 1 <= stop_at <= steps:
        yield f"run.stop_at = {stop_at}: expected a step from 1 to training.steps = {steps}"
    if stop_at is not None and not checkpoint.enable:
        yield "run.stop_at leaves a checkpoint, but checkpoint.enable is false"
    if loss.z_loss and loss.squared_loss:
        yield f"loss.z_loss = {loss.z_loss}, loss.squared_loss = {loss.squared_loss}: set one to 0"
    if checkpoint.fresh and checkpoint.load_step != -1:
        yield f"checkpoint.fresh, checkpoint.load_step = {checkpoint.load_step}: give one of them"
    warmup, active = profiling.profiler_warmup, profiling.profiler_active
    possible = warmup >= 0 and active >= 1 and profiling.profile_freq >= warmup + active
    if profiling.enable_profiling and not possible:
        yield (
            f"profiling.profiler_warmup = {warmup}, .profiler_active = {active}: expected at least "
            f"0 and 1, in all at most .profile_freq = {profiling.profile_freq} steps"
        )
