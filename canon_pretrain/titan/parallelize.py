"""Prepare a model for training: torch.compile, FSDP2, experts, initial weights."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single, all_to_all_single_autograd
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.parallel import parallelize_module
from torchtitan.config import TORCH_DTYPE_MAP
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.activation_checkpoint import apply_ac
from torchtitan.distributed.expert_parallel import ExpertParallel
from torchtitan.models.llama3.infra.parallelize import _op_sac_save_list
from torchtitan.tools.logging import logger
from torchtitan.tools.utils import device_type

from canon_pretrain.core.errors import UserError, check_choice
from canon_pretrain.kernels.backends import (
    compile_options,
)
from canon_pretrain.model.initial_value import InitialValue
from canon_pretrain.model.moe import GroupedExperts, loop_reason
from canon_pretrain.model.transformer import Transformer
from canon_pretrain.titan.job_config import CanonJobConfig


def parallelize(
    model: Transformer, parallel_dims: ParallelDims | None, job: CanonJobConfig
) -> Transformer:
    """Apply activation checkpointing, torch.compile, FSDP2 (unless no dims), to a meta model."""
    check_attention(model, job, device_type)
    log_expert_loop(model, job, device_type)

    # Experts first: the rows that their ranks exchange have sizes that a graph cannot know.
    exchanges = parallel_dims is not None and parallel_dims.ep_enabled
    if parallel_dims is not None and exchanges:
        for experts in all_experts(model):
            parallelize_module(experts, parallel_dims.get_mesh("ep"), ExpertExchange())

    if job.activation_checkpoint.mode != "none":
        apply_ac(
            model,
            job.activation_checkpoint,
            model_compile_enabled=job.compiles_model,
            # without it, selective checkpointing by operator would save nothing
            op_sac_save_list=_op_sac_save_list,
            base_folder=job.job.dump_folder,
        )
    if job.compiles_model:
        compile_blocks(model, job, whole=not exchanges)

    # FSDP2 last: its hooks run around the compiled blocks.
    if parallel_dims is not None:
        experts_mesh = None
        if exchanges:
            experts_mesh = fsdp_mesh(parallel_dims, of_experts=True)
        shard(
            model,
            fsdp_mesh(parallel_dims),
            experts_mesh=experts_mesh,
            param_dtype=TORCH_DTYPE_MAP[job.training.mixed_precision_param],
            reduce_dtype=TORCH_DTYPE_MAP[job.training.mixed_precision_reduce],
            cpu_offload=job.training.enable_cpu_offload,
            policy=job.parallelism.fsdp_reshard_after_forward,
        )
    return model


def compile_blocks(model: Transformer, job: CanonJobConfig, *, whole: bool = True) -> None:
    """Compile each block like torchtitan's `apply_compile`, with inductor options for Canon.

    If not `whole`, only its attention: what ranks exchange has sizes that a graph cannot know.
    """
    # each kind of layer is one graph of the same code
    torch._dynamo.config.recompile_limit = max(
        torch._dynamo.config.recompile_limit, 2 * len(model.args.kinds)
    )
    backend = job.compile.backend
    options = {}
    if backend == "inductor":
        options = compile_options(device_type, model.canon_backend)

    for name, block in model.layers.named_children():
        if whole:
            compiled: Any = torch.compile(block, backend=backend, fullgraph=True, options=options)
            model.layers.register_module(name, compiled)
        else:
            attention = block.get_submodule("attention")
            attention.compile(backend=backend, fullgraph=True, options=options)
    logger.info("Compiling each TransformerBlock with torch.compile")


def check_attention(model: Transformer, job: CanonJobConfig, device: str) -> None:
    """Raise UserError if the requested attention cannot be trained on this device and dtype."""
    for attend in model.attends.values():
        selected = attend.implementation(device, masked=model.args.document_mask)
        _check_implementation(selected, job, device)


def _check_implementation(selected: str, job: CanonJobConfig, device: str) -> None:
    """Raise UserError if an implementation of attention cannot be trained here.

    Flex attention has no backward pass on a CPU; the other kernels are for half precision.
    """
    dtype = job.training.mixed_precision_param
    setting = f'model.attention_backend = "{job.model.attention_backend}" selects {selected}'
    if selected != "sdpa" and device == "cpu":
        raise UserError(
            "attention.unsupported",
            f"{setting}, which cannot be trained on a CPU: choose auto",
            shared=True,
            selected=selected,
        )
    if selected not in ("sdpa", "flex") and dtype == "float32":
        raise UserError(
            "attention.unsupported",
            f"{setting}, which cannot use training.mixed_precision_param = {dtype}: "
            "choose auto or bfloat16",
            shared=True,
            selected=selected,
        )


def log_expert_loop(model: Transformer, job: CanonJobConfig, device: str) -> None:
    """Warn if a GPU computes the experts one after the other, which is slower."""
    if device != "cuda":
        return
    dtype = TORCH_DTYPE_MAP[job.training.mixed_precision_param]
    for name, layer in model.args.kinds.items():
        reason = loop_reason(dtype, layer.dim, layer.ffn_dim)
        if layer.ffn == "moe" and reason is not None:
            logger.warning(f"{name}: experts in a loop, not one grouped product, since {reason}")


def fsdp_mesh(parallel_dims: ParallelDims, *, of_experts: bool = False) -> DeviceMesh:
    """Return the mesh to shard over, also for a single rank, where torchtitan has none."""
    # torchtitan's names of its global meshes, and of the dimensions that shard
    kind, name = ("sparse", "efsdp") if of_experts else ("dense", "fsdp")
    if parallel_dims.dp_replicate > 1:
        if not parallel_dims._meshes:
            parallel_dims.build_mesh()
        # get_mesh() fails for replicas of a single rank
        return parallel_dims._global_meshes[kind]["dp_replicate", name]

    mesh = parallel_dims.get_optional_mesh(name)
    return mesh or init_device_mesh(device_type, (1,), mesh_dim_names=(name,))


def all_experts(module: nn.Module) -> list[GroupedExperts]:
    return [child for child in module.modules() if isinstance(child, GroupedExperts)]


class ExpertExchange(ExpertParallel):
    """torchtitan's ExpertParallel without its sorting kernel, which needs a GPU and pads.

    Shapes: S token rows, D channels, E all experts, R ranks. Inside `_token_dispatch`, [R, E]
    tables have only the experts of one rank.
    """

    def _token_dispatch(
        self, mod: nn.Module, inputs: tuple[Tensor, Tensor], device_mesh: DeviceMesh
    ) -> tuple[Tensor, Tensor]:
        """Return all ranks' tokens of this rank's experts, sorted by expert, and their numbers."""
        x_SD, count_E = inputs
        group = device_mesh.get_group()
        num_ranks = device_mesh.size()

        # How many rows each rank sends to each expert of each other rank. The host must know the
        # sizes of the exchange: it waits here, and nowhere else.
        with torch.no_grad():
            received_RE = all_to_all_single(count_E, None, None, group).view(num_ranks, -1)
            sent_RE = count_E.view(num_ranks, -1)
            sent_R = sent_RE.sum(dim=1)
            received_R = received_RE.sum(dim=1)
            splits_2R = torch.stack([sent_R, received_R])
            self.input_splits, self.output_splits = splits_2R.tolist()

        x_SD = all_to_all_single_autograd(x_SD, self.output_splits, self.input_splits, group)

        # Rows came sorted by rank, then by expert; a stable sort by expert groups them.
        expert_RE = torch.arange(received_RE.shape[1], device=x_SD.device).expand_as(received_RE)
        expert_S = expert_RE.flatten().repeat_interleave(
            received_RE.flatten(), output_size=sum(self.output_splits)
        )
        self.permuted_indices = expert_S.argsort(stable=True)
        self.input_shape = (len(x_SD) + 1, x_SD.shape[1])  # _token_combine drops one row of padding
        return x_SD[self.permuted_indices], received_RE.sum(dim=0)


def shard(
    model: Transformer,
    mesh: DeviceMesh,
    *,
    param_dtype: torch.dtype = torch.float32,
    reduce_dtype: torch.dtype = torch.float32,
    cpu_offload: bool = False,
    policy: str = "default",
    experts_mesh: DeviceMesh | None = None,
) -> None:
    """Apply FSDP2 over `mesh`, in place; units: embedding, each block, norm with output.

    A tied embedding is used first and last in a step, so it and the norm belong to the root unit.
    `experts_mesh`: the ranks with the same experts, which are then units of their own.
    `policy`: which units free their gathered weights after forward. By default all but the last,
    which the backward pass needs first.
    """
    check_choice("parallelism.fsdp_reshard_after_forward", policy, ("default", "never", "always"))
    reshard_blocks = policy != "never"
    reshard_last = policy == "always"
    options: dict[str, Any] = {
        "mp_policy": MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=reduce_dtype)
    }
    if cpu_offload:
        options["offload_policy"] = CPUOffloadPolicy()

    # From the inside out: a unit takes the parameters that no earlier one has.
    if experts_mesh is not None:
        for experts in all_experts(model):
            fully_shard(experts, mesh=experts_mesh, reshard_after_forward=reshard_blocks, **options)
    if model.output is not None:
        fully_shard(
            model.tok_embeddings, mesh=mesh, reshard_after_forward=reshard_blocks, **options
        )
    for block in model.layers.values():
        fully_shard(block, mesh=mesh, reshard_after_forward=reshard_blocks, **options)
    if model.output is not None:
        last: list[nn.Module] = [model.norm, model.output]
        fully_shard(last, mesh=mesh, reshard_after_forward=reshard_last, **options)
    fully_shard(model, mesh=mesh, reshard_after_forward=reshard_last, **options)

    # Gradients are sums: the loss is already divided by the labels of the global batch.
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            # else FSDP2 multiplies by 1.0 (PREMUL_SUM): unsupported by gloo, slower with NCCL
            module.set_force_sum_reduction_for_comms(True)


@torch.no_grad()
def clip_gradients(parameters: Sequence[Tensor], max_norm: float) -> Tensor:
    """Clip the gradients' total norm to `max_norm`, if it is not 0.

    Return the norm before clipping, which is equal on all ranks.
    """
    # By mesh, because all tensors of a foreach operator must be of one.
    groups: dict[DeviceMesh | None, list[Tensor]] = {}
    for parameter in parameters:
        grad = parameter.grad
        if grad is not None:
            mesh = grad.device_mesh if isinstance(grad, DTensor) else None
            groups.setdefault(mesh, []).append(parameter)

    # A norm per group. Ranks hold shards, of which full_tensor() adds up the squares.
    norms = []
    for mesh, group in groups.items():
        grads = [p.grad for p in group if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(grads, foreach=True)
        if isinstance(norm, DTensor):
            norm = norm.full_tensor()
        if mesh is not None and mesh.ndim > 1:  # average over replicas: all skip the same steps
            dist.all_reduce(norm, group=mesh.get_group(0))
            norm /= mesh.size(0)
        norms.append(norm)

    # The norm of the norms is that of all gradients.
    total_norm = norms[0]
    if len(norms) > 1:
        total_norm = torch.stack(norms).norm()
    if max_norm:
        for group in groups.values():
            torch.nn.utils.clip_grads_with_norm_(group, max_norm, total_norm, foreach=True)
    return total_norm


def write_shard(parameter: Tensor, value: InitialValue) -> None:
    """Write this rank's rows of an initial value into its shard of `parameter`."""
    if not isinstance(parameter, DTensor):
        parameter.copy_(value.rows(0, value.shape[0]))
        return

    # Each rank makes its own rows only: the whole tensor may not fit.
    shape, offset = compute_local_shape_and_global_offset(
        parameter.shape, parameter.device_mesh, parameter.placements
    )
    assert tuple(shape[1:]) == tuple(value.shape[1:]), "FSDP2 shards the first dimension"
    local = parameter.to_local()
    if local.numel():  # empty on a rank past the last row
        first_row = offset[0]
        local.copy_(value.rows(first_row, first_row + shape[0]))


def reshard(model: nn.Module) -> None:
    """Free what FSDP gathered: after a forward pass, the last unit waits for a backward pass."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
