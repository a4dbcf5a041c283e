"""The TrainSpec that plugs our model, schedule, data and metrics into torchtitan's Trainer.

After the warm-up, the learning rate is a cosine, a line or 1 - sqrt down to `min_lr_factor` at the
run's end; with `decay_ratio` (WSD) it is stable first and decays in that last share of the run;
with `decay_steps` (InfiniteLR, seed 000) the decay does not depend on `training.steps`.
"""

import contextlib
import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torchtitan.train
from torch import nn
from torchtitan.components.lr_scheduler import LRSchedulersContainer, build_lr_schedulers
from torchtitan.components.optimizer import OptimizersContainer, build_optimizers
from torchtitan.protocols import train_spec
from torchtitan.protocols.model import BaseModelArgs

from canon_pretrain.model.args import FLAVORS, ModelArgs, flops_per_token, num_parameters
from canon_pretrain.model.transformer import Transformer
from canon_pretrain.titan.job_config import CanonJobConfig, LRScheduler
from canon_pretrain.titan.loss import build_loss
from canon_pretrain.titan.parallelize import parallelize, write_shard


@dataclass
class TitanModelArgs(BaseModelArgs):
    """Our frozen ModelArgs in the mutable box that torchtitan's Trainer fills from the job."""

    args: ModelArgs = field(default_factory=ModelArgs)
    attention_backend: str = "auto"
    canon_backend: str = "auto"

    def update_from_config(self, job_config: CanonJobConfig, **kwargs: object) -> None:
        self.args = job_config.model_args
        self.attention_backend = job_config.model.attention_backend
        self.canon_backend = job_config.model.canon_backend

    def get_nparams_and_flops(self, model: nn.Module, seq_len: int) -> tuple[int, int]:
        return num_parameters(self.args), flops_per_token(self.args, seq_len)


class TitanTransformer(Transformer):
    """The model as the Trainer builds it: from the box, with weights written shard by shard."""

    def __init__(self, model_args: TitanModelArgs) -> None:
        super().__init__(
            model_args.args,
            attention_backend=model_args.attention_backend,
            canon_backend=model_args.canon_backend,
        )

    def init_weights(self, buffer_device: torch.device | None = None) -> None:  # type: ignore[override]
        super().init_weights(write=write_shard, buffer_device=buffer_device)


def learning_rate_factor(step: int, *, config: LRScheduler) -> float:
    """Return what the peak rate is multiplied with at `step` (0 is the first).

    (step + 1) / warmup_steps in warm-up, 1 at its end, then from 1 to `min_lr_factor` within
    `decay_steps` steps (linear, sqrt or cosine as in torchtitan), and `min_lr_factor` from there.
    """
    if step < config.warmup_steps:
        return (step + 1) / config.warmup_steps
    assert config.decay_steps is not None
    progress = min(1.0, (step - config.warmup_steps) / config.decay_steps)
    left = {
        "linear": 1 - progress,
        "sqrt": 1 - math.sqrt(progress),
        "cosine": 0.5 * (1 + math.cos(math.pi * progress)),
    }[config.decay_type]
    return config.min_lr_factor + (1 - config.min_lr_factor) * left


def build_schedule(
    optimizers: OptimizersContainer, config: LRScheduler, training_steps: int
) -> LRSchedulersContainer:
    """Build our schedule where `decay_steps` is set, torchtitan's elsewhere."""
    if config.decay_steps is None:
        return build_lr_schedulers(optimizers, config, training_steps)
    return LRSchedulersContainer(optimizers, functools.partial(learning_rate_factor, config=config))


@contextlib.contextmanager
def plugged_in(
    *,
    build_dataloader: Callable[..., Any],
    build_metrics: Callable[..., Any],
    build_validator: Callable[..., Any],
    build_checkpointer: Callable[..., Any],
) -> Iterator[None]:
    """Let torchtitan's Trainer build `model.name = "canon"` by these functions, within the block.

    register_train_spec() would refuse a second Trainer, and keep what the functions are bound to.
    """
    specs, manager = train_spec._extra_train_specs, torchtitan.train.CheckpointManager
    specs["canon"] = train_spec.TrainSpec(
        model_cls=TitanTransformer,
        # boxes of its own: the Trainer fills the one that it looks up
        model_args={name: TitanModelArgs(args=args) for name, args in FLAVORS.items()},
        parallelize_fn=parallelize,
        pipelining_fn=None,
        build_optimizers_fn=build_optimizers,
        build_lr_schedulers_fn=build_schedule,
        build_dataloader_fn=build_dataloader,
        build_tokenizer_fn=None,
        build_loss_fn=build_loss,
        build_metrics_processor_fn=build_metrics,
        build_validator_fn=build_validator,
    )
    torchtitan.train.CheckpointManager = build_checkpointer
    try:
        yield
    finally:
        torchtitan.train.CheckpointManager = manager
        del specs["canon"]
