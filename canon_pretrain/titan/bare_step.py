"""A training step for benches, of the trainer's model, sharding and loss with nothing around."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torchtitan.config import TORCH_DTYPE_MAP
from torchtitan.distributed import ParallelDims
from torchtitan.distributed import utils as dist_utils

from canon_pretrain.model.args import ModelArgs
from canon_pretrain.model.transformer import Transformer
from canon_pretrain.titan.device import stand_alone
from canon_pretrain.titan.job_config import CanonJobConfig
from canon_pretrain.titan.parallelize import parallelize
from canon_pretrain.titan.spec import TitanModelArgs, TitanTransformer, build_loss

ONE_RANK = {"dp_replicate": 1, "dp_shard": 1, "cp": 1, "tp": 1, "pp": 1, "ep": 1, "etp": 1}


@contextmanager
def one_rank(*, start: bool = True) -> Iterator[None]:
    """Provide the environment of a single rank and, with `start`, a process group."""
    with stand_alone():
        try:
            if start:
                on_gpu = torch.cuda.is_available()
                dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo")
            yield
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()


def job_of(
    args: ModelArgs,
    *,
    num_tokens: int,
    micro_batch: int,
    dtype: torch.dtype,
    canon_backend: str = "auto",
    attention_backend: str = "auto",
) -> CanonJobConfig:
    """A job whose step is one micro-batch of `args`, compiled, with the paper's optimizer."""
    job = CanonJobConfig()
    values = vars(args) | {"canon_backend": canon_backend, "attention_backend": attention_backend}
    for name, value in values.items():
        if name in vars(job.model):
            setattr(job.model, name, value)
    training = job.training
    training.seq_len = num_tokens
    training.global_batch_size = training.local_batch_size = micro_batch
    training.mixed_precision_param = str(dtype).removeprefix("torch.")
    job.compile.enable = True
    return job


@torch.no_grad()
def fill(model: Transformer) -> None:
    """Give a model values of the usual size, drawn on its own device: in no time."""
    for name, parameter in model.named_parameters():
        own = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        if name.endswith("norm.weight"):
            own.fill_(1.0)
        else:
            own.normal_(std=0.02)
    if model.rope is not None:
        model.rope.reset(model.tok_embeddings.weight.device)


class BareStep:
    """A step of `rounds` micro-batches, and its two halves; needs a process group."""

    def __init__(
        self,
        job: CanonJobConfig,
        device: torch.device,
        *,
        parallel_dims: ParallelDims | None = None,
        rounds: int = 1,
        plain: bool = False,
    ) -> None:
        box = TitanModelArgs(args=job.model_args)
        box.update_from_config(job)
        with torch.device("meta"):
            model = TitanTransformer(box)
        dims = parallel_dims or ParallelDims(**ONE_RANK, world_size=1)
        parallelize(model, None if plain else dims, job)
        model.to_empty(device=device)
        fill(model)
        self.model, self.loss, self.max_norm = model, build_loss(job), job.training.max_norm
        self.optimizer: torch.optim.Optimizer | None = None
        if plain:
            for parameter in model.parameters():  # buffers stay, as FSDP2 leaves them
                parameter.data = parameter.to(TORCH_DTYPE_MAP[job.training.mixed_precision_param])
        else:
            asked, parameters = job.optimizer, model.parameters()
            numbers = {"lr": asked.lr, "eps": asked.eps, "weight_decay": asked.weight_decay}
            betas = (asked.beta1, asked.beta2)
            self.optimizer = torch.optim.AdamW(parameters, betas=betas, fused=True, **numbers)
        shape = (rounds, job.training.local_batch_size, job.training.seq_len + 1)
        self.batches = torch.randint(3, job.model_args.vocab_size, shape).to(device)
        self.num_tokens = self.batches[:, :, 1:].numel()

    def forward_backward(self) -> None:
        """Gradients of all micro-batches."""
        self.model.zero_grad()
        for batch in self.batches:
            _, objective = self.model(batch[:, :-1], labels_BT=batch[:, 1:], loss=self.loss)
            (objective / self.num_tokens).backward()

    def update(self) -> None:
        """Clipping and AdamW."""
        assert self.optimizer is not None, "a plain step has none"
        parameters = list(self.model.parameters())
        dist_utils.clip_grad_norm_(parameters, self.max_norm, foreach=True)
        self.optimizer.step()

    def __call__(self) -> None:
        self.forward_backward()
        if self.optimizer is not None:
            self.update()
