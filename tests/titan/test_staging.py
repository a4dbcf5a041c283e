"""Copies of a state for a checkpoint: into the same buffers each time, and nothing else."""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode

from canon_pretrain.titan.checkpoint import Staging
from canon_pretrain.titan.spec import one_rank

COPIES = ("aten::copy_", "aten::_to_copy", "aten::clone", "aten::_pin_memory")


class Copies(TorchDispatchMode):
    """Records copies: the operator, the target's address, whether it is non-blocking."""

    def __init__(self):
        super().__init__()
        self.records = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # look at the shards
        options = kwargs or {}
        result = func(*args, **options)
        name = func._schema.name
        if name in COPIES:
            is_non_blocking = args[2] if len(args) > 2 else options.get("non_blocking")
            self.records.append((name, result.data_ptr(), is_non_blocking))
        return result


@pytest.mark.parametrize(
    "device",
    [
        "cpu",
        pytest.param(
            "cuda",
            marks=[
                pytest.mark.gpu,
                pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
            ],
        ),
    ],
)
def test_the_first_save_copies_as_later_ones_do(device):
    with one_rank():
        mesh = init_device_mesh(device, (1,))
        sharded = distribute_tensor(torch.arange(12.0, device=device).view(4, 3), mesh, [Shard(0)])
        state = {
            "weight": sharded,
            "optimizer": {"moment": sharded * 2, "step": torch.tensor(7.0, device=device)},
            "plain": torch.arange(5, device=device),
            "empty": torch.zeros(0, 3, device=device),
            "numbers": {"tokens": 3, "names": ["a"], "none": None},
        }

        staging = Staging()
        copies_of_saves = []
        for factor in (1, 10):
            sharded.mul_(factor)
            state["numbers"]["tokens"] += factor

            with Copies() as copies:
                staged = staging.copy(state)
            if staging.copied is not None:
                staging.copied.synchronize()
            copies_of_saves.append(copies.records)

            # the copy is complete
            assert isinstance(staged["weight"], DTensor)
            assert staged["weight"].placements == sharded.placements
            weight = staged["weight"].to_local()
            moment = staged["optimizer"]["moment"].to_local()
            step = staged["optimizer"]["step"]
            assert torch.equal(weight, factor * torch.arange(12.0).view(4, 3))
            assert torch.equal(moment, torch.arange(12.0).view(4, 3) * 2)
            assert step == 7
            assert torch.equal(staged["plain"], torch.arange(5))
            assert staged["empty"].shape == (0, 3)
            assert staged["numbers"] == state["numbers"]

            # it is on the host, pinned for a GPU
            for tensor in (weight, moment, step, staged["plain"]):
                assert tensor.device.type == "cpu"
                assert tensor.is_pinned() == (device == "cuda")

        # one copy for each tensor, none of them blocking; the same for both saves
        first, later = copies_of_saves
        assert first == later
        assert [name for name, *_ in first] == ["aten::copy_"] * 5
        assert all(is_non_blocking is True for *_, is_non_blocking in first), first
