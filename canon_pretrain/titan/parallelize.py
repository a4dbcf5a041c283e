"""Prepare a model for training: Canon's backend, torch.compile, FSDP2, experts, initial weights."""

import contextlib
import hashlib
import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import distributions
from pathlib import Path
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
from canon_pretrain.core.files import read_record, write_json
from canon_pretrain.kernels.backends import (
    OPTIONAL,
    compile_options,
    fla_mixers,
    resolve_backend,
)
from canon_pretrain.model.init import InitialValue
from canon_pretrain.model.moe import GroupedExperts
from canon_pretrain.model.transformer import Transformer
from canon_pretrain.titan.job_config import CanonJobConfig

DEVICE_TYPES = ("cuda",)
"""Where `auto` tries triton, and optional backends are checked."""
PACKAGES = ("triton", "fla-core", "causal-conv1d")


CHUNKED_SLOWDOWN = {"gla": 1.8, "mamba2": 1.5, "gated_deltanet": 2.0}
"""Time of a step by the chunked form over that by fla, computed for the 1.3B models on an H100."""


@dataclass(frozen=True)
class CheckResult:
    problem: str | None


@dataclass(frozen=True)
class CanonChoice:
    """The backend of a run (never `auto`), and why the faster one was refused, if it was."""

    backend: str
    why: str = ""
    refused: str | None = None
    slowdown: float | None = None
    """Estimated time of a step over that of the refused backend."""

    def __str__(self) -> str:
        return f"{self.backend} ({self.why})" if self.why else self.backend


def choose_canon(
    job: CanonJobConfig, device: torch.device, code: Mapping[str, str]
) -> CanonChoice | None:
    """Return rank 0's choice; None if the model has no Canon layers. Collective."""
    asked = job.model.canon_backend
    if not job.model_args.canon_set:
        return None
    backend = "triton" if asked == "auto" else asked
    if device.type not in DEVICE_TYPES or backend not in OPTIONAL:
        return CanonChoice(resolve_backend(asked), "auto" if asked == "auto" else "")
    answer = [_check_backend(job, backend, device, code) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(answer, src=0)
    assert answer[0] is not None
    problem, how, is_lost = answer[0]
    if is_lost or (problem is not None and asked != "auto"):
        state = "the GPU is unusable now" if is_lost else f"on {_name(device)}"
        raise UserError(
            "canon.backend_failed",
            f'canon_backend = "{asked}": {backend} failed its check, {problem}, {state}. '
            'Restart with "auto" or "compiled"',
            shared=True,
            backend=backend,
            problem=problem,
        )
    if problem is None:
        return CanonChoice(backend, f"{asked}; {how}" if asked == "auto" else how)
    if dist.get_rank() == 0:
        logger.warning(f"Canon uses compiled instead of triton, which is slower: {problem}")
    return CanonChoice("compiled", "auto; triton failed its check", refused=problem)


def choose_mixer(job: CanonJobConfig, device: torch.device) -> CanonChoice | None:
    """Return rank 0's choice for the recurrence; None if the model has none. Collective."""
    asked, args = job.model.mixer_backend, job.model_args
    if args.mixer == "attention":
        return None
    # fla autotunes: another process may add in another order
    tries = asked == "auto" and device.type in DEVICE_TYPES and not job.debug.deterministic
    if not tries and asked != "fla":
        return CanonChoice("chunked")
    answer: list[str | None] = [None]
    if dist.get_rank() == 0:
        dtype = TORCH_DTYPE_MAP[job.training.mixed_precision_param]
        problem = fla_mixers().check_mixer(args.mixer, args.key_dim, args.value_dim, dtype, device)
        answer = [problem]
    dist.broadcast_object_list(answer, src=0)
    if (problem := answer[0]) is None:
        return CanonChoice("fla", "equal to chunked")
    if asked == "fla":
        raise UserError(
            "mixer.unavailable",
            f'mixer_backend = "fla", but {problem}; or choose "auto"',
            shared=True,
            backend=asked,
            problem=problem,
        )
    slowdown = CHUNKED_SLOWDOWN[args.mixer]
    if dist.get_rank() == 0:
        logger.warning(
            f"{args.mixer} uses chunked instead of fla: about {slowdown} times as slow (computed "
            f"for 1.3B on an H100). fla was refused: {problem}"
        )
    return CanonChoice("chunked", "auto; fla was refused", refused=problem, slowdown=slowdown)


def _check_backend(
    job: CanonJobConfig, backend: str, device: torch.device, code: Mapping[str, str]
) -> tuple[str | None, str, bool]:
    """Return the problem of `backend`, the source of this result, and whether the GPU is lost."""
    shape = (job.training.local_batch_size, job.training.seq_len)
    dtype = TORCH_DTYPE_MAP[job.training.mixed_precision_param]
    key = {
        "backend": backend,
        "device": _name(device),
        "torch": f"{torch.__version__} {torch.version.cuda} {torch.version.hip}",
        "packages": {d.name: d.version for name in PACKAGES for d in distributions(name=name)},
        "code": {p: h for p, h in code.items() if p.startswith(("kernels/", "model/"))},
        "shape": shape,
        "dtype": str(dtype),
        "model": vars(job.model_args),
    }
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:32]
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    path = Path(home) / "canon_pretrain" / "canon_check" / f"{digest}.json"
    with contextlib.suppress(UserError, OSError):  # missing or damaged
        problem = read_record(path, CheckResult).problem
        return problem and f"{problem} (recorded in {path})", f"checked before, {path}", False
    from canon_pretrain.model import canon_check  # slow to import, needed on a GPU only

    start = time.monotonic()
    problem = canon_check.training_problem(job.model_args, backend, shape, dtype, device)
    is_lost = _is_lost(device)
    if problem is None or is_lost:  # other failures are checked again next time
        with contextlib.suppress(OSError):  # the next launch checks again
            path.parent.mkdir(parents=True, exist_ok=True)
            write_json(path, {"problem": problem, **key})
    return problem, f"equal to float64, checked in {time.monotonic() - start:.1f} s", is_lost


def _is_lost(device: torch.device) -> bool:
    """Return whether a kernel fault made the GPU unusable in this process; free memory."""
    if device.type != "cuda":
        return False
    try:
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    except RuntimeError:
        return True
    return False


def _name(device: torch.device) -> str:
    if device.type != "cuda":
        return device.type
    major, minor = torch.cuda.get_device_capability(device)
    return f"{torch.cuda.get_device_name(device)}, compute capability {major}.{minor}"


def parallelize(
    model: Transformer, parallel_dims: ParallelDims | None, job: CanonJobConfig
) -> Transformer:
    """Apply activation checkpointing, torch.compile, FSDP2 (unless no dims), to a meta model."""
    check_attention(model, job, device_type)
    exchanges = parallel_dims is not None and parallel_dims.ep_enabled
    if parallel_dims is not None and exchanges:
        for experts in all_experts(model):
            parallelize_module(experts, parallel_dims.get_mesh("ep"), ExpertExchange())
    compiled = job.compile.enable and "model" in job.compile.components
    if job.activation_checkpoint.mode != "none":
        apply_ac(
            model,
            job.activation_checkpoint,
            model_compile_enabled=compiled,
            # without it, selective checkpointing by operator would save nothing
            op_sac_save_list=_op_sac_save_list,
            base_folder=job.job.dump_folder,
        )
    if compiled:
        compile_blocks(model, job, whole=not exchanges)
    if parallel_dims is None:
        return model
    shard(
        model,
        fsdp_mesh(parallel_dims),
        experts_mesh=fsdp_mesh(parallel_dims, of_experts=True) if exchanges else None,
        param_dtype=TORCH_DTYPE_MAP[job.training.mixed_precision_param],
        reduce_dtype=TORCH_DTYPE_MAP[job.training.mixed_precision_reduce],
        cpu_offload=job.training.enable_cpu_offload,
        policy=job.parallelism.fsdp_reshard_after_forward,
    )
    return model


def compile_blocks(model: Transformer, job: CanonJobConfig, *, whole: bool = True) -> None:
    """Compile each block like torchtitan's `apply_compile`, with inductor options for Canon.

    If not `whole`, its attention only: what ranks exchange has sizes that a graph cannot know.
    """
    backend, options = job.compile.backend, {}
    if backend == "inductor":
        options = compile_options(device_type, model.canon_backend)
    for name, block in model.layers.named_children():
        if not whole:
            attention = block.get_submodule("attention")
            attention.compile(backend=backend, fullgraph=True, options=options)
            continue
        compiled: Any = torch.compile(block, backend=backend, fullgraph=True, options=options)
        model.layers.register_module(name, compiled)
    logger.info("Compiling each TransformerBlock with torch.compile")


def check_attention(model: Transformer, job: CanonJobConfig, device: str) -> None:
    """Raise UserError if the requested attention cannot be trained on this device and dtype."""
    if model.attend is None:
        return
    dtype = job.training.mixed_precision_param
    way = model.attend.implementation(device, masked=model.args.document_mask)
    selected = f'model.attention_backend = "{job.model.attention_backend}" selects {way}'
    if way != "sdpa" and device == "cpu":
        raise UserError(
            "attention.unsupported",
            f"{selected}, which cannot be trained on a CPU: choose auto",
            shared=True,
            selected=way,
        )
    if way not in ("sdpa", "flex") and dtype == "float32":
        raise UserError(
            "attention.unsupported",
            f"{selected}, which cannot use training.mixed_precision_param = {dtype}: "
            "choose auto or bfloat16",
            shared=True,
            selected=way,
        )


def fsdp_mesh(parallel_dims: ParallelDims, *, of_experts: bool = False) -> DeviceMesh:
    """Return the mesh to shard over, also for a single rank, where torchtitan has none."""
    kind, name = ("sparse", "efsdp") if of_experts else ("dense", "fsdp")
    if parallel_dims.dp_replicate > 1:
        if not parallel_dims._meshes:
            parallel_dims.build_mesh()
        # get_mesh() fails for replicas of a single rank
        return parallel_dims._global_meshes[kind]["dp_replicate", name]
    mesh = parallel_dims.get_optional_mesh(name)
    return mesh or init_device_mesh(device_type, (1,), mesh_dim_names=(name,))


def all_experts(module: nn.Module) -> list[GroupedExperts]:
    return [each for each in module.modules() if isinstance(each, GroupedExperts)]


class ExpertExchange(ExpertParallel):
    """torchtitan's ExpertParallel without its sorting kernel, which needs a GPU and pads."""

    def _token_dispatch(
        self, mod: nn.Module, inputs: tuple[Tensor, Tensor], device_mesh: DeviceMesh
    ) -> tuple[Tensor, Tensor]:
        """Return all ranks' tokens of this rank's experts, sorted by expert, and their numbers."""
        x_SD, count_E = inputs
        group, degree = device_mesh.get_group(), device_mesh.size()
        with torch.no_grad():
            # of each rank, for each of this rank's experts
            received_RE = all_to_all_single(count_E, None, None, group).view(degree, -1)
            # the host must know the sizes of the exchange: it waits here, and nowhere else
            sent_RE = count_E.view(degree, -1)
            splits_2R = torch.stack([sent_RE.sum(dim=1), received_RE.sum(dim=1)])
            self.input_splits, self.output_splits = splits_2R.tolist()

        x_SD = all_to_all_single_autograd(x_SD, self.output_splits, self.input_splits, group)

        # tokens came sorted by rank, then by expert
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
    """
    check_choice("parallelism.fsdp_reshard_after_forward", policy, ("default", "never", "always"))
    options: dict[str, Any] = {
        "mesh": mesh,
        "mp_policy": MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=reduce_dtype),
    }
    if cpu_offload:
        options["offload_policy"] = CPUOffloadPolicy()
    units: list[nn.Module] = list(model.layers.values())
    if model.output is not None:
        units.insert(0, model.tok_embeddings)
    for experts in all_experts(model) if experts_mesh is not None else []:
        own = options | {"mesh": experts_mesh}
        fully_shard(experts, **own, reshard_after_forward=policy != "never")
    for unit in units:
        fully_shard(unit, **options, reshard_after_forward=policy != "never")
    anew = policy == "always"
    if model.output is not None:
        fully_shard([model.norm, model.output], **options, reshard_after_forward=anew)
    fully_shard(model, **options, reshard_after_forward=anew)
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
    groups: dict[DeviceMesh | None, list[Tensor]] = {}  # an operator's tensors are of one mesh
    for parameter in parameters:
        if (grad := parameter.grad) is not None:
            mesh = grad.device_mesh if isinstance(grad, DTensor) else None
            groups.setdefault(mesh, []).append(parameter)
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
    norm = norms[0] if len(norms) == 1 else torch.stack(norms).norm()
    if max_norm:
        for group in groups.values():
            torch.nn.utils.clip_grads_with_norm_(group, max_norm, norm, foreach=True)
    return norm


def write_shard(parameter: Tensor, value: InitialValue) -> None:
    """Write this rank's rows of an initial value into its shard of `parameter`."""
    if not isinstance(parameter, DTensor):
        parameter.copy_(value.rows(0, value.shape[0]))
        return
    shape, offset = compute_local_shape_and_global_offset(
        parameter.shape, parameter.device_mesh, parameter.placements
    )
    assert tuple(shape[1:]) == tuple(value.shape[1:]), "FSDP2 shards the first dimension"
    local = parameter.to_local()
    if local.numel():  # empty on a rank past the last row
        local.copy_(value.rows(offset[0], offset[0] + shape[0]))


def reshard(model: nn.Module) -> None:
    """Free what FSDP gathered: after a forward pass, the last unit waits for a backward pass."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
