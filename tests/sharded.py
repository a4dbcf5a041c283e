"""Training steps on a sharded model (`sharded_steps`, on gloo ranks) and on an unsharded one."""

import functools
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from canon_pretrain.model.args import ModelArgs
from canon_pretrain.model.transformer import Transformer
from canon_pretrain.run.config import Loss
from tests import ranks as _forkserver  # noqa: F401  (sets what the server of ranks imports)
from tests.variants import random_tokens

ROWS, NUM_TOKENS, STEPS = 6, 24, 2
ADAMW: dict[str, Any] = {"lr": 0.01, "betas": (0.9, 0.98), "weight_decay": 0.1}
# eps as large as the gradients, so that rounding of tiny ones does not change whole steps
ADAMW["eps"] = 1e-2
MAX_NORM = 0.5


@dataclass
class Steps:
    """Losses, norms, first gradients and weights of steps; of a rank: its rows of them."""

    losses: list[tuple[float, float]] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    first_gradients: dict[str, Tensor] = field(default_factory=dict)
    weights: dict[str, Tensor] = field(default_factory=dict)
    optimized: int = 0
    """Number of trained parameters."""


def on_ranks(function: Callable[..., None], count: int, folder: Path, *args: Any) -> None:
    """Run `function(rank, folder, *args)` on `count` gloo ranks, CPU only."""
    mp.start_processes(
        _on_rank, (function, count, str(folder), *args), nprocs=count, start_method="forkserver"
    )


def _on_rank(rank: int, function: Callable[..., None], count: int, folder: str, *args: Any) -> None:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # use the CPU on machines with GPUs too
    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=count)
    function(rank, Path(folder), *args)
    dist.destroy_process_group()


def batches(args: ModelArgs) -> list[Tensor]:
    """Return the global batches, [ROWS, NUM_TOKENS + 1], with several documents per row."""
    return [random_tokens(args, ROWS, NUM_TOKENS + 1, seed=step) for step in range(STEPS)]


def sharded_steps(
    model: Transformer, args: ModelArgs, loss: Loss, rank: int, world_size: int, rounds: int
) -> Steps:
    """Take the steps on this rank's rows, in `rounds` micro-batches, as the trainer does."""
    from canon_pretrain.model.init import plain_name
    from canon_pretrain.titan.parallelize import clip_gradients
    from canon_pretrain.titan.spec import head_loss

    out, function = Steps(), head_loss(loss)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, **ADAMW, fused=True)
    out.optimized = len(trained)
    for batch in batches(args):
        optimizer.zero_grad()
        own = batch.tensor_split(world_size)[rank]
        sums = torch.zeros(2)
        for micro_batch in own.chunk(rounds):
            nats, objective = model(
                micro_batch[:, :-1], labels_BT=micro_batch[:, 1:], loss=function
            )
            both = torch.stack([nats.sum(), objective]) / (ROWS * NUM_TOKENS)
            both[1].backward()
            sums += both.detach()
        norm = clip_gradients(list(model.parameters()), MAX_NORM)
        if not out.first_gradients:
            out.first_gradients = {
                plain_name(name): p.grad.to_local().clone()
                for name, p in model.named_parameters()
                if p.grad is not None
            }
        optimizer.step()
        out.losses.append((sums[0].item(), sums[1].item()))
        out.norms.append(norm.item())
    out.weights = {
        plain_name(name): p.detach().to_local().clone() for name, p in model.named_parameters()
    }
    return out


@functools.cache
def whole_steps(args: ModelArgs, loss: Loss) -> Steps:
    """Take the same steps in one process, without FSDP2, micro-batches and our loss."""
    model, out = Transformer(args), Steps()
    model.init_weights()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, **ADAMW)
    out.optimized = len(trained)
    for batch in batches(args):
        optimizer.zero_grad()
        logits = model(batch[:, :-1])
        z = logits.exp().sum(dim=-1).log()
        each = z - logits.gather(2, batch[:, 1:, None])[..., 0]
        objective = (each + loss.z_loss * z**2 + loss.squared_loss * each**2).mean()
        objective.backward()
        norm = torch.nn.utils.clip_grad_norm_(trained, MAX_NORM)
        if not out.first_gradients:
            named = model.named_parameters()
            out.first_gradients = {n: p.grad.clone() for n, p in named if p.grad is not None}
        optimizer.step()
        out.losses.append((each.mean().item(), objective.item()))
        out.norms.append(norm.item())
    out.weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    return out


def assert_equal_steps(parts: list[Steps], whole: Steps) -> None:
    """Check that the ranks' joined parts equal the unsharded steps, to float32's rounding."""
    for step, expected in enumerate(whole.losses):
        for k in range(2):
            total = sum(part.losses[step][k] for part in parts)
            assert abs(total - expected[k]) < 2e-5 * abs(expected[k]), (step, k)
        for part in parts:
            assert abs(part.norms[step] - whole.norms[step]) < 1e-4 * whole.norms[step], step
    for part in parts:
        assert part.optimized == whole.optimized
    for found, expected in (
        ([part.first_gradients for part in parts], whole.first_gradients),
        ([part.weights for part in parts], whole.weights),
    ):
        assert found[0].keys() == expected.keys()
        for name, value in expected.items():
            joined = torch.cat([part[name] for part in found])
            assert joined.shape == value.shape, name
            # a hundred-thousandth of the largest entry: float32 sums in another order
            worst = (joined - value).abs().max().item()
            assert worst <= 2e-5 * value.abs().max().item(), (name, worst)
