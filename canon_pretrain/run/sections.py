"""The sections of a job that this project declares, and limits of torchtitan's settings.

A setting is declared here once (run/setting.py says how); titan/job_config.py adds torchtitan's to
the section. Declared elsewhere: `[model]`, by ModelArgs (model/args.py), and `[data.task]`, by the
tasks (synthetic/). No torchtitan, no torch.
"""

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import Field

from canon_pretrain.run.setting import (
    Amount,
    Count,
    Decay,
    Identity,
    Limits,
    Mark,
    OneShot,
    PerLaunch,
    Positive,
    Seconds,
    Size,
    limits_of,
    metadata_of,
    settings,
)
from canon_pretrain.synthetic.tasks import TaskSection

_Beta = Annotated[float, Field(ge=0, lt=1)]
_Betas = Annotated[list[_Beta], Field(min_length=2, max_length=2)]


OPTIMIZERS = ("Adam", "AdamW", "Muon", "Lion")


def optimizer_name(name: str) -> str:
    """Return the one of OPTIMIZERS that is this name in another case, or `name` itself."""
    by_lower = {known.lower(): known for known in OPTIMIZERS}
    return by_lower.get(name.lower(), name)


@dataclass(frozen=True)
class ParameterGroup:
    """A table `[[optimizer.groups]]`: what differs for some parameters; part of the identity.

    A parameter belongs to the first group that matches its name.
    """

    match: str = ""
    """norm, embedding, head, canon, bias, or a regular expression to search for in the name."""
    lr_scale: Amount = 1.0
    """Multiplies the learning rate of each step."""
    weight_decay: Annotated[float | None, Limits(limits_of(Amount) | None)] = None
    """Of all parameters of the group. Unset: as `decay` says."""
    betas: Annotated[list[float] | None, Limits(_Betas | None)] = None
    """Unset: beta1 and beta2."""


@dataclass
class Optimizer:
    """Settings of `[optimizer]`: the values of the paper's appendix B."""

    name: Identity[str] = "AdamW"
    """Adam, AdamW, Muon or Lion, in any case."""
    lr: Identity[Amount] = 1e-3
    beta1: Identity[Decay] = 0.9
    beta2: Identity[Decay] = 0.98
    # not 0: the update of a weight without gradients, such as a rare token's row, would be 0 / 0
    eps: Identity[Positive] = 1e-6
    weight_decay: Identity[Amount] = 0.03
    decay: Identity[Literal["all", "matrices"]] = "all"
    """What weight_decay acts on. matrices: weights of linear layers, experts, embedding and head;
    no norms, biases, Canon filters and other convolutions, A_log, D, dt_bias."""
    groups: list[ParameterGroup] = field(default_factory=list)
    """[[optimizer.groups]], tables of the file: rates, decays and betas by a parameter's name."""
    muon_lr: Identity[Annotated[float | None, Limits(limits_of(Amount) | None)]] = None
    """Muon's learning rate, of the matrices in the blocks. Unset: lr, which AdamW has for the rest.
    """
    muon_momentum: Identity[Decay] = 0.95
    muon_ns_steps: Identity[Annotated[int, Limits(ge=1, lt=100)]] = 5
    """Newton-Schulz iterations that orthogonalize a matrix."""
    muon_adjust_lr: Identity[Literal["original", "match_rms_adamw"]] = "match_rms_adamw"
    """torch.optim.Muon's adjust_lr_fn. match_rms_adamw: updates as large as AdamW's, for its rates;
    original: Jordan's, for rates such as 0.02."""
    implementation: Identity[Literal["for-loop", "foreach", "fused"]] = "fused"
    early_step_in_backward: Identity[bool] = False

    def __post_init__(self) -> None:
        self.name = optimizer_name(self.name)


@dataclass
class LRScheduler:
    """Settings of `[lr_scheduler]`; `schedule_faults` checks them together."""

    warmup_steps: Identity[Size] = 1000
    total_steps: Identity[Annotated[int | None, Limits(int | None)]] = None
    decay_ratio: Identity[Annotated[float | None, Limits(gt=0, le=1)]] = None
    """WSD: constant after warmup, then decay over this last fraction of the run."""
    decay_type: Identity[Literal["linear", "sqrt", "cosine"]] = "cosine"
    min_lr_factor: Identity[Amount] = 0.1
    decay_steps: Identity[Annotated[int | None, Limits(ge=1)]] = None
    """InfiniteLR: steps of decay after warmup, then constant. Unset: decay to the run's end."""


@dataclass(frozen=True)
class Data:
    """The `[data]` section: which shards, in which order; or which task."""

    path: str = ""
    """Folder written by `canon data build`; holds train/ and validation/."""
    paths: list[str] = field(default_factory=list)
    """Instead of `path`: several such folders, sampled by `weights`."""
    weights: list[float] = field(default_factory=list)
    """Relative sampling weight of each of `paths`: [7, 3] is [0.7, 0.3]."""
    order: Identity[Literal["random", "permute", "documents"]] = "random"
    """random: windows at random offsets, with replacement (as in the paper). permute: each window
    once per epoch, reshuffled every epoch; one folder only. documents: the same, of windows with
    one document each, cut at training.seq_len or padded; tokens/s count the padding."""
    exclude: str = ""
    """File with documents that no window may contain, as `canon explain --exclude` writes it:
    windows with them are replaced by others of the same source."""
    data_seed: Identity[Annotated[int, Limits(ge=0, lt=1 << 64)]] = 0
    """Seed of the sample order: window i of a run is a function of (data_seed, i)."""
    read_ahead: Size = 8
    """Micro-batches that each rank reads ahead in a thread; 0: read when needed."""
    task: TaskSection = field(default_factory=TaskSection)

    @property
    def folders(self) -> list[str]:
        """All folders, in order; empty without data."""
        return self.paths or ([self.path] if self.path else [])

    @property
    def shares(self) -> list[float]:
        """The sampling weight of each of `folders`."""
        return self.weights or [1.0] * len(self.folders)


@dataclass(frozen=True)
class Loss:
    """The `[loss]` section: a term added to the cross-entropy, one at most; it is not logged."""

    z_loss: Identity[Amount] = 0.0
    """Weight of logsumexp(logits)^2 per token (PaLM: 1e-4)."""
    squared_loss: Identity[Amount] = 0.0
    """Weight of the squared cross-entropy per token: the z-loss of the released Part 4.2 models
    (1e-4)."""
    chunk_tokens: Size = 4096
    """Tokens whose logits are in memory at a time; 0: a micro-batch's. Affects rounding only."""


@dataclass(frozen=True)
class Guards:
    """The `[guards]` section: which steps are skipped."""

    max_bad_steps: Count = 5
    """After this many consecutive steps with a non-finite loss or gradient the run fails; none of
    them changed the weights."""
    outlier_sigma: Identity[Annotated[float | None, Limits(gt=0, allow_inf_nan=False)]] = None
    """Skip a step whose gradient norm is more than this many standard deviations above the mean of
    the last `outlier_window` norms (OLMo's SkipStep: 6). Default: never."""
    outlier_window: Identity[Annotated[int, Limits(ge=2, le=1024)]] = 128
    """Number of gradient norms to compare with; at least half of them must be known."""


@dataclass
class Training:
    """Settings of `[training]`."""

    seq_len: Identity[Count] = 2048
    global_batch_size: Identity[Count] = -1
    steps: Identity[Annotated[int, Limits(ge=1, le=1 << 40)]] = 10000
    max_norm: Identity[Annotated[float | int, Limits(limits_of(Amount))]] = 1.0
    """Gradient norm to clip to; 0: no clipping."""
    dtype: Identity[Literal["bfloat16", "float32"]] = "float32"
    mixed_precision_param: Identity[Literal["bfloat16", "float32"]] = "bfloat16"
    mixed_precision_reduce: Identity[Literal["float32"]] = "float32"
    local_batch_size: PerLaunch[Count] = 8


@dataclass
class Checkpoint:
    """Settings of `[checkpoint]`."""

    enable: bool = True
    last_save_model_only: bool = False
    async_mode: Literal["disabled", "async", "async_with_pinned_mem"] = "async"
    """async: copy to (pinned) CPU memory, write in the background; the third value is the same."""
    fresh: OneShot[bool] = False
    """Restart at step 1 despite existing checkpoints; the run so far moves to RUN/archive."""
    max_held: Size = 4
    """Checkpoints beyond `keep_latest_k` that keep their weights for pending evaluations."""


@dataclass
class Metrics:
    """Settings of `[metrics]`."""

    enable_trackio: bool = False
    """Copy the log to trackio's local database; `wandb_project` and `wandb_name` hold for it."""
    wandb_mode: Literal["online", "offline", "disabled"] | None = None
    """Unset: $WANDB_MODE, or online. Offline runs are in RUN/wandb, for `wandb sync`."""
    wandb_project: str = ""
    """Unset: $WANDB_PROJECT, or canon_pretrain."""
    wandb_entity: str = ""
    """Unset: $WANDB_ENTITY, or the account's default."""
    wandb_name: str = ""
    """Unset: $WANDB_NAME, or the run folder's name."""
    wandb_tags: list[str] = field(default_factory=list)
    """Additional tags; every run has its flavor, position and Canon set as tags."""


@dataclass
class Validation:
    """Settings of `[validation]`."""

    enable: bool | None = None
    """Unset: validate if the data has a held-out split or is a task. True: error if it has none."""
    path: str = ""
    """Folder to validate on: its held-out split, else all of it. Unset: the training folders'."""
    freq: Count = 100
    """Steps between two validations."""
    windows: Annotated[int | None, Limits(Literal[-1] | Annotated[int, Field(ge=1)] | None)] = None
    """Windows of training.seq_len tokens, the same each time; -1: all, which a task does not have.
    Unset: training.global_batch_size windows per 100 steps of `freq`, at most 2**21 tokens; a
    task's questions are asked about 16."""
    last_windows: Annotated[int | None, Limits(Annotated[int, Field(ge=1)] | None)] = None
    """Windows that a task's questions are asked about at the last step. Unset: as many as before
    it."""


@dataclass(frozen=True)
class Run:
    """The `[run]` section: settings of a launch, none of which changes the computation."""

    stop_at: OneShot[int | None] = None
    """Save and stop after this step; the schedule remains that of `training.steps`."""
    allow_changes: OneShot[list[str]] = field(default_factory=list)
    """Keys (such as `optimizer.lr`) that may differ from those of the resumed run. `code`: a job
    script uses the current program instead of the snapshot in RUN/code."""
    code: PerLaunch[Literal["note", "refuse"]] = "note"
    """If source files differ from the last launch's: log them, or refuse to resume."""
    heartbeat_s: Annotated[float, Limits(ge=0.01, le=3600)] = 10.0
    """Interval of heartbeats in lock.json and status.json; a lock expires after six."""


@dataclass(frozen=True)
class Samples:
    """The `[samples]` section: texts that the model writes while training; changes no result."""

    interval: Size = 0
    """Steps between two samples, and after the last step; 0: none."""
    prompts: list[str] = field(default_factory=list)
    """Texts to continue; an empty one begins a document."""
    max_tokens: Count = 64
    """Tokens after a prompt, unless the document ends before."""
    temperature: Amount = 0.8
    """0: always the most likely token."""


@dataclass(frozen=True)
class Sections:
    """The settings that are declared here; titan/job_config.py adds torchtitan's to them."""

    optimizer: Optimizer = field(default_factory=Optimizer)
    lr_scheduler: LRScheduler = field(default_factory=LRScheduler)
    data: Data = field(default_factory=Data)
    loss: Loss = field(default_factory=Loss)
    guards: Guards = field(default_factory=Guards)
    training: Training = field(default_factory=Training)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    metrics: Metrics = field(default_factory=Metrics)
    validation: Validation = field(default_factory=Validation)
    run: Run = field(default_factory=Run)
    samples: Samples = field(default_factory=Samples)


TORCHTITAN: dict[str, Any] = {
    "job.config_file": Annotated[str | None, Mark.PER_LAUNCH],
    "training.gc_freq": Count,
    "checkpoint.interval": Count,
    # 0: all; not 1, because the newest may be incomplete
    "checkpoint.keep_latest_k": Annotated[int, Limits(Literal[0] | Annotated[int, Field(ge=2)])],
    # -1: the newest
    "checkpoint.load_step": OneShot[
        Annotated[int, Limits(Literal[-1] | Annotated[int, Field(ge=0)])]
    ],
    "activation_checkpoint.memory_budget": Annotated[float, Limits(ge=0, le=1)],
    "activation_checkpoint.determinism_check": Annotated[str, Limits(Literal["default", "none"])],
    "compile.components": Annotated[list[str], Limits(list[Literal["model", "loss"]])],
    "metrics.log_freq": Count,
    "parallelism.data_parallel_replicate_degree": Count,
    "parallelism.expert_parallel_degree": Count,
    "profiling.profile_freq": Count,
    "profiling.profiler_active": Count,
    "profiling.profiler_warmup": Size,
    "comm.init_timeout_seconds": Seconds,
    "comm.train_timeout_seconds": Seconds,
    "comm.trace_buf_size": Size,
}
"""Limits and marks of torchtitan's settings that keep its type, default and help"""
SETTINGS: dict[str, Any] = dict(settings(Sections)) | TORCHTITAN
"""The annotation of each setting by its dotted name"""


def marked(*marks: Mark) -> tuple[str, ...]:
    """Return the dotted names of the settings that have one of these marks."""
    return tuple(name for name, hint in SETTINGS.items() if metadata_of(hint, Mark) in marks)
