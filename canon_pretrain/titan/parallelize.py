"""From one model to one sharded over all ranks: compile each block, FSDP2, then its weights.

Called by torchtitan's Trainer through the TrainSpec. FSDP2 is applied at one rank too, so that a
run has the same numerics (mixed precision above all) and the same checkpoint at any world size.
"""

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torchtitan.config import TORCH_DTYPE_MAP
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.activation_checkpoint import apply_ac
from torchtitan.models.llama3.infra.parallelize import apply_compile, apply_fsdp
from torchtitan.tools.utils import device_type

from canon_pretrain.model.init import InitialValue
from canon_pretrain.titan.job_config import CanonJobConfig


def parallelize(model: nn.Module, parallel_dims: ParallelDims, job: CanonJobConfig) -> nn.Module:
    """Activation checkpointing, torch.compile per block and FSDP2, as the job asks; in place.

    `model` is on the meta device. Gradients are summed, not averaged: the trainer divides the loss
    by the tokens of the whole global batch.
    """
    compiled = job.compile.enable and "model" in job.compile.components
    if job.activation_checkpoint.mode != "none":
        apply_ac(
            model,
            job.activation_checkpoint,
            model_compile_enabled=compiled,
            base_folder=job.job.dump_folder,
        )
    if compiled:
        apply_compile(model, job.compile)
    shard(
        model,
        fsdp_mesh(parallel_dims),
        param_dtype=TORCH_DTYPE_MAP[job.training.mixed_precision_param],
        reduce_dtype=TORCH_DTYPE_MAP[job.training.mixed_precision_reduce],
        cpu_offload=job.training.enable_cpu_offload,
        policy=job.parallelism.fsdp_reshard_after_forward,
    )
    return model


def fsdp_mesh(parallel_dims: ParallelDims) -> DeviceMesh:
    """The mesh to shard over; torchtitan gives none for a single rank, we do."""
    mesh = parallel_dims.get_optional_mesh("fsdp")
    return mesh or init_device_mesh(device_type, (1,), mesh_dim_names=("fsdp",))


def shard(
    model: nn.Module,
    mesh: DeviceMesh,
    *,
    param_dtype: torch.dtype = torch.float32,
    reduce_dtype: torch.dtype = torch.float32,
    cpu_offload: bool = False,
    policy: str = "default",
) -> None:
    """FSDP2 over `mesh`, in place: the embedding, each block, and norm with output are units."""
    apply_fsdp(
        model,
        mesh,
        param_dtype=param_dtype,
        reduce_dtype=reduce_dtype,
        pp_enabled=False,
        cpu_offload=cpu_offload,
        reshard_after_forward_policy=policy,
    )
    if mesh.device_type == "cpu":
        # gloo has no PREMUL_SUM, which FSDP2 would otherwise use to divide while it reduces
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)


def write_shard(parameter: Tensor, value: InitialValue) -> None:
    """Copy this rank's rows of an initial value into its shard of `parameter`.

    FSDP2's own initialisation draws each shard from the same generator state, which on a CPU gives
    every rank the same rows. Here a row depends on the seed and its place in the whole parameter.
    """
    if not isinstance(parameter, DTensor):
        parameter.copy_(value.rows(0, value.shape[0]))
        return
    shape, offset = compute_local_shape_and_global_offset(
        parameter.shape, parameter.device_mesh, parameter.placements
    )
    assert tuple(shape[1:]) == tuple(value.shape[1:]), "FSDP2 shards the first dimension"
    local = parameter.to_local()
    if local.numel():  # a rank past the last row holds nothing
        local.copy_(value.rows(offset[0], offset[0] + shape[0]))
