"""One rank of a fake world: torchrun's variables, and process groups that exchange nothing."""

import os
from typing import Any

import torch.distributed as dist
import torch.distributed._tools.fake_collectives  # registers fake collectives
import torch.testing._internal.distributed.fake_pg  # noqa: F401 - registers the backend "fake"
from torch.distributed import device_mesh, distributed_c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._python_dispatch import _disable_current_modes

from canon_pretrain.machine.gpus import GPUS_PER_NODE


def set_environment(world_size: int) -> None:
    """Set torchrun's variables for rank 0 of `world_size`."""
    os.environ.update(
        RANK="0",
        LOCAL_RANK="0",
        WORLD_SIZE=str(world_size),
        LOCAL_WORLD_SIZE=str(min(GPUS_PER_NODE, world_size)),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT="29500",
    )


def install() -> None:
    """Make torch.distributed create fake groups, in which all ranks have what this one has."""
    init_real_group = dist.init_process_group
    make_real_group = dist.new_group

    def init_process_group(*args: Any, **kwargs: Any) -> None:
        world_size = int(os.environ["WORLD_SIZE"])
        init_real_group("fake", store=dist.HashStore(), rank=0, world_size=world_size)

    def new_group(*args: Any, **kwargs: Any) -> Any:
        kwargs.pop("timeout", None)
        return make_real_group(*args, **kwargs | {"backend": "fake"})

    def all_gather_object(gathered: list[Any], value: Any, *args: Any, **kwargs: Any) -> None:
        gathered[:] = [value] * len(gathered)

    def do_nothing(*args: Any, **kwargs: Any) -> None:
        pass

    # callers have imported these functions from either module
    modules: list[Any] = [dist, distributed_c10d]
    for module in modules:
        module.init_process_group = init_process_group
        module.new_group = new_group
        module.broadcast_object_list = do_nothing
        module.all_gather_object = all_gather_object
        module.barrier = do_nothing
    distributed_c10d._set_pg_timeout = do_nothing

    # a mesh is made of real tensors, also within FakeTensorMode
    device_mesh.init_device_mesh = _without_modes(device_mesh.init_device_mesh)
    for name in ("__init__", "__getitem__", "_concatenate", "_flatten", "_unflatten"):
        method = vars(DeviceMesh).get(name)
        if method is not None:  # not in every version of torch
            setattr(DeviceMesh, name, _without_modes(method))


def _without_modes(method: Any) -> Any:
    """Return a function or (static) method that runs with real tensors."""
    if isinstance(method, staticmethod):
        return staticmethod(_without_modes(method.__func__))

    def run(*args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes():
            return method(*args, **kwargs)

    return run
