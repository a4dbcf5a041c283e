"""Sharding: the weights that a seed gives, on any number of ranks."""

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import DeviceMesh

from canon_pretrain.model.args import ModelArgs
from canon_pretrain.model.transformer import Transformer
from canon_pretrain.titan.device import prepare_device

WORLD_SIZES = (1, 2, 3, 4)
# widths that 2, 3 and 4 ranks cannot share evenly, and a norm with fewer rows than ranks would like
ARGS = [
    ModelArgs(
        vocab_size=37,
        num_layers=2,
        dim=24,
        num_heads=2,
        ffn_dim=40,
        max_seq_len=16,
        position="partial_rope_a",
        canon_set="ABCD",
        qk_norm="full",
        init=init,
        init_seed=seed,
    )
    for init, seed in (("paper", 0), ("lingua", 5))
]


def _init_on_ranks(rank: int, folder: str) -> None:
    """On a world of 4: shard over its first n ranks, initialise, and let rank 0 save the whole."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # the CPU, on a machine with GPUs too
    prepare_device()
    from canon_pretrain.titan.parallelize import shard, write_shard

    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=4)
    for n in WORLD_SIZES:
        mesh = DeviceMesh("cpu", torch.arange(n), mesh_dim_names=("fsdp",))
        if rank >= n:
            continue
        for k, args in enumerate(ARGS):
            with torch.device("meta"):
                model = Transformer(args)
            shard(model, mesh)
            model.to_empty(device="cpu")
            model.init_weights(write=write_shard)
            whole = {name: p.full_tensor().detach() for name, p in model.named_parameters()}
            local = {name: p.to_local().numel() for name, p in model.named_parameters()}
            if rank == 0:
                torch.save((whole, local, dict(model.named_buffers())), f"{folder}/{n}-{k}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def initialised(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("init")
    mp.spawn(_init_on_ranks, args=(str(folder),), nprocs=4)
    return folder


@pytest.mark.parametrize("n", WORLD_SIZES)
@pytest.mark.parametrize("k", range(len(ARGS)))
def test_initial_weights_are_the_same_at_every_world_size(
    initialised: Path, n: int, k: int
) -> None:
    whole, local, buffers = torch.load(initialised / f"{n}-{k}.pt")
    alone = Transformer(ARGS[k])
    alone.init_weights()
    expected = dict(alone.named_parameters())
    assert whole.keys() == expected.keys()
    for name, parameter in expected.items():
        assert torch.equal(whole[name], parameter), name
        if n > 1:  # it was sharded at all
            assert local[name] < parameter.numel()
    for name, buffer in alone.named_buffers():
        assert torch.equal(buffers[name], buffer), name
