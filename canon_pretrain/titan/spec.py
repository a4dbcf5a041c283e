"""The TrainSpec of our model, loss, schedule, data and metrics, and a bare step for benchmarks.

Losses are sums over tokens: the trainer divides them by the tokens of the global batch.
"""

import contextlib
import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torchtitan.train
from torch import nn
from torch.distributed.tensor import DTensor
from torchtitan.components.lr_scheduler import LRSchedulersContainer, build_lr_schedulers
from torchtitan.components.optimizer import OptimizersContainer
from torchtitan.config import TORCH_DTYPE_MAP
from torchtitan.distributed import ParallelDims
from torchtitan.protocols import train_spec
from torchtitan.protocols.model import BaseModelArgs

from canon_pretrain.kernels.linear_cross_entropy import linear_cross_entropy
from canon_pretrain.model.args import ModelArgs, flavor
from canon_pretrain.model.counts import flops_per_token, num_parameters
from canon_pretrain.model.transformer import HeadLoss, Transformer
from canon_pretrain.run.sections import Loss
from canon_pretrain.titan.device import single_rank_environment
from canon_pretrain.titan.job_config import CanonJobConfig, LRScheduler
from canon_pretrain.titan.optimizers import build_optimizers
from canon_pretrain.titan.parallelize import clip_gradients, parallelize, write_shard

BACKENDS = ("attention_backend", "canon_backend", "mixer_backend")


@dataclass
class TitanModelArgs(BaseModelArgs):
    """A mutable wrapper of ModelArgs, which torchtitan's Trainer updates from the job."""

    args: ModelArgs = field(default_factory=ModelArgs)
    backends: dict[str, str] = field(default_factory=dict)

    def update_from_config(self, job_config: CanonJobConfig, **kwargs: object) -> None:
        self.args = job_config.model_args
        self.backends = {name: getattr(job_config.model, name) for name in BACKENDS}

    def get_nparams_and_flops(self, model: nn.Module, seq_len: int) -> tuple[int, int]:
        return num_parameters(self.args), flops_per_token(self.args, seq_len)


class _NewModelArgs(dict[str, BaseModelArgs]):
    """New arguments of each flavor that is looked up: the Trainer updates them."""

    def __missing__(self, name: str) -> TitanModelArgs:
        return TitanModelArgs(args=flavor(name))


class TitanTransformer(Transformer):
    """The model as the Trainer builds it, with initial weights written shard by shard."""

    def __init__(self, model_args: TitanModelArgs) -> None:
        super().__init__(model_args.args, **model_args.backends)

    def init_weights(self, buffer_device: torch.device | None = None) -> None:  # type: ignore[override]
        super().init_weights(write=write_shard, buffer_device=buffer_device)


def head_loss(config: Loss, compile_backend: str | None = None) -> HeadLoss:
    """Return the loss of `[loss]`, a function of the head's input, weight and labels."""
    return functools.partial(
        linear_cross_entropy,
        chunk_tokens=config.chunk_tokens or 1 << 31,  # 0: one chunk
        z_loss=config.z_loss,
        squared_loss=config.squared_loss,
        compile_backend=compile_backend,
    )


def build_loss(job_config: CanonJobConfig, **kwargs: object) -> HeadLoss:
    """Build the loss; compiled if compile.components has "loss"."""
    config = job_config.compile
    if config.enable and "loss" in config.components:
        return head_loss(job_config.loss, compile_backend=config.backend)
    return head_loss(job_config.loss)


def learning_rate_factor(step: int, *, config: LRScheduler) -> float:
    """Return the factor of the peak rate at `step` (from 0), for a decay of `decay_steps`."""
    if step < config.warmup_steps:
        return (step + 1) / config.warmup_steps

    # After warm-up the factor decays from 1 to min_lr_factor, and stays there.
    assert config.decay_steps is not None
    progress = min(1.0, (step - config.warmup_steps) / config.decay_steps)
    if config.decay_type == "linear":
        remaining = 1 - progress
    elif config.decay_type == "sqrt":
        remaining = 1 - math.sqrt(progress)
    else:
        remaining = 0.5 * (1 + math.cos(math.pi * progress))
    return config.min_lr_factor + (1 - config.min_lr_factor) * remaining


class Schedules(LRSchedulersContainer):
    """torchtitan's container; of a checkpoint it loads the step, but no rates.

    Its state has lists with an entry per group of parameters, of which a run may resume with more
    or fewer. The trainer sets this job's rates after loading.
    """

    def __init__(self, schedules: LRSchedulersContainer) -> None:
        self.schedulers = schedules.schedulers

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        own = self.state_dict()
        of_groups = {name: own[name] for name in ("base_lrs", "_last_lr", "lr_lambdas")}
        super().load_state_dict(state_dict | of_groups)


def build_schedule(
    optimizers: OptimizersContainer, config: LRScheduler, training_steps: int
) -> Schedules:
    """Build our schedule if `decay_steps` is set, else torchtitan's."""
    if config.decay_steps is None:
        return Schedules(build_lr_schedulers(optimizers, config, training_steps))
    factor = functools.partial(learning_rate_factor, config=config)
    return Schedules(LRSchedulersContainer(optimizers, factor))


@contextlib.contextmanager
def use_train_spec(build_checkpointer: Callable[..., Any], **builders: Any) -> Iterator[None]:
    """Make torchtitan's Trainer build `model.name = "canon"` by these functions, in the block."""
    # register_train_spec() would reject a second Trainer and keep `builders` alive
    specs = train_spec._extra_train_specs
    original_manager = torchtitan.train.CheckpointManager
    specs["canon"] = train_spec.TrainSpec(
        model_cls=TitanTransformer,
        model_args=_NewModelArgs(),
        parallelize_fn=parallelize,
        pipelining_fn=None,
        build_optimizers_fn=build_optimizers,
        build_lr_schedulers_fn=build_schedule,
        build_tokenizer_fn=None,
        build_loss_fn=build_loss,
        **builders,
    )
    torchtitan.train.CheckpointManager = build_checkpointer
    try:
        yield
    finally:
        torchtitan.train.CheckpointManager = original_manager
        del specs["canon"]


@contextlib.contextmanager
def one_rank(*, start: bool = True) -> Iterator[None]:
    """Set the environment of a single rank and, with `start`, create its process group.

    The group is destroyed at the end, also if the caller has created it.
    """
    with single_rank_environment():
        try:
            if start:
                has_gpu = torch.cuda.is_available()
                dist.init_process_group("cpu:gloo,cuda:nccl" if has_gpu else "gloo")
            yield
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()


def job_of(
    args: ModelArgs, *, num_tokens: int, micro_batch: int, dtype: torch.dtype, **backends: str
) -> CanonJobConfig:
    """Return a job whose step is one micro-batch, compiled, with the paper's optimizer."""
    job = CanonJobConfig()
    for name, value in (vars(args) | backends).items():
        if name in vars(job.model):  # but for max_seq_len, which is training.seq_len
            setattr(job.model, name, value)

    job.training.seq_len = num_tokens
    job.training.global_batch_size = job.training.local_batch_size = micro_batch
    job.training.mixed_precision_param = "float32" if dtype == torch.float32 else "bfloat16"
    job.compile.enable = True
    return job


@torch.no_grad()
def fill(model: Transformer) -> None:
    """Fill a model with random values of typical scale on its own device, which is fast."""
    for name, parameter in model.named_parameters():
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        if name.endswith("norm.weight"):
            local.fill_(1.0)
        else:
            local.normal_(std=0.02)

    # buffers
    for bias in model.expert_biases():
        bias.zero_()
    model.reset_ropes(model.tok_embeddings.weight.device)


def on_meta(args: ModelArgs, **backends: str) -> Transformer:
    """Return the model of `args` on the meta device."""
    with torch.device("meta"):
        return Transformer(args, **backends)


def random_model(
    args: ModelArgs, device: torch.device, dtype: torch.dtype = torch.float32, **backends: str
) -> Transformer:
    """Return a model for inference with random values of typical scale."""
    model = on_meta(args, **backends).to(dtype)
    model.to_empty(device=device).requires_grad_(False).eval()
    fill(model)
    return model


class BareStep:
    """A training step of `rounds` micro-batches and its two halves; needs a process group.

    `plain`: without FSDP2 and optimizer, so forward and backward only.
    """

    def __init__(
        self, job: CanonJobConfig, device: torch.device, *, rounds: int = 1, plain: bool = False
    ) -> None:
        training = job.training
        model_args = TitanModelArgs()
        model_args.update_from_config(job)
        with torch.device("meta"):
            model = TitanTransformer(model_args)
        dims = None if plain else ParallelDims(1, 1, 1, 1, 1, 1, 1, 1)
        parallelize(model, dims, job)
        model.to_empty(device=device)
        fill(model)
        self.model = model
        self.loss = build_loss(job)
        self.max_norm = training.max_norm

        self.optimizer: torch.optim.Optimizer | None = None
        if plain:
            for parameter in model.parameters():  # FSDP2 does not cast buffers either
                parameter.data = parameter.to(TORCH_DTYPE_MAP[training.mixed_precision_param])
        else:
            self.optimizer = torch.optim.AdamW(
                model.parameters(),
                lr=job.optimizer.lr,
                betas=(job.optimizer.beta1, job.optimizer.beta2),
                eps=job.optimizer.eps,
                weight_decay=job.optimizer.weight_decay,
                fused=True,
            )

        # random ids; the first three are special tokens
        shape = (rounds, training.local_batch_size, training.seq_len + 1)
        self.batches = torch.randint(3, job.model_args.vocab_size, shape).to(device)
        self.num_tokens = self.batches[:, :, 1:].numel()

    def forward_backward(self) -> None:
        """Add up the gradients of the mean loss over all micro-batches."""
        self.model.zero_grad()
        for batch in self.batches:
            inputs_BT = batch[:, :-1]
            labels_BT = batch[:, 1:]
            _, objective = self.model(inputs_BT, labels_BT=labels_BT, loss=self.loss)
            (objective / self.num_tokens).backward()

    def update(self) -> None:
        assert self.optimizer is not None, "a plain step has none"
        clip_gradients(list(self.model.parameters()), self.max_norm)
        self.optimizer.step()

    def __call__(self) -> None:
        self.forward_backward()
        if self.optimizer is not None:
            self.update()
