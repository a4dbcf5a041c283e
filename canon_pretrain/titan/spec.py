"""The TrainSpec that plugs our model, data and metrics into torchtitan's Trainer."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import nn
from torchtitan.components.optimizer import build_optimizers
from torchtitan.protocols import train_spec
from torchtitan.protocols.model import BaseModelArgs

from canon_pretrain.model.args import FLAVORS, ModelArgs, flops_per_token, num_parameters
from canon_pretrain.model.transformer import Transformer
from canon_pretrain.titan.data import build_dataloader
from canon_pretrain.titan.job_config import CanonJobConfig
from canon_pretrain.titan.loss import build_loss
from canon_pretrain.titan.metrics import build_metrics
from canon_pretrain.titan.opened import OpenedData
from canon_pretrain.titan.parallelize import parallelize, write_shard
from canon_pretrain.titan.schedule import build_schedule
from canon_pretrain.titan.validation import build_validator


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


class TitanFlavors(Mapping[str, TitanModelArgs]):
    """The flavors, each look-up a fresh box: the Trainer mutates what it is given."""

    def __getitem__(self, name: str) -> TitanModelArgs:
        return TitanModelArgs(args=FLAVORS[name])

    def __iter__(self) -> Iterator[str]:
        return iter(FLAVORS)

    def __len__(self) -> int:
        return len(FLAVORS)


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


def register(data: OpenedData | None = None) -> None:
    """Make `model.name = "canon"` known to torchtitan, for the next Trainer of this process.

    `data` is what it trains and validates on; unless given, it opens that by itself.
    """
    spec = train_spec.TrainSpec(
        model_cls=TitanTransformer,
        model_args=TitanFlavors(),
        parallelize_fn=parallelize,
        pipelining_fn=None,
        build_optimizers_fn=build_optimizers,
        build_lr_schedulers_fn=build_schedule,
        build_dataloader_fn=partial(
            build_dataloader, training_data=data.training if data else None
        ),
        build_tokenizer_fn=None,
        build_loss_fn=build_loss,
        build_metrics_processor_fn=build_metrics,
        build_validator_fn=partial(build_validator, parts=data.held_out if data else None),
    )
    # register_train_spec() refuses a second time in one process
    train_spec._extra_train_specs["canon"] = spec
