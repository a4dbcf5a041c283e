"""Kernel launches and bytes of a 1.3B block on an H100, counted in Inductor's code without a GPU.

A `TransformerBlock` is compiled as in training, with the code generator's queries of a GPU patched.
Nothing is executed. Inductor caches the answers: use a separate process.
"""

import argparse
import contextlib
import dataclasses
import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor, is_tensor
from torch._dynamo.device_interface import CudaInterface

from canon_pretrain import kernels
from canon_pretrain.bench.limits import Machine, min_block_bytes
from canon_pretrain.bench.tables import Columns, print_lines
from canon_pretrain.bench.variants import Bench, Log, Result, normalize_canon_sets, with_canon
from canon_pretrain.core.errors import check_choice
from canon_pretrain.core.files import write_atomic
from canon_pretrain.core.terminal import Console
from canon_pretrain.kernels.backends import compile_options
from canon_pretrain.kernels.gpus import GPUS
from canon_pretrain.kernels.graphs import Generated, generate_code, results_of
from canon_pretrain.kernels.work import Work
from canon_pretrain.model.args import ModelArgs, flavor
from canon_pretrain.model.attention import Rope
from canon_pretrain.model.counts import flops_per_token
from canon_pretrain.model.transformer import TransformerBlock
from canon_pretrain.titan.costs import OpaqueAttend, empty_results, seen_on_gpu
from canon_pretrain.titan.step_time import (
    GPUS_PER_NODE,
    Layout,
    StepCounts,
    count_model,
    step_seconds,
)

GPU = torch.device("cuda", 0)
ATTENTION = "torch.ops.canon_pretrain_opaque.attention"
H100 = GPUS["h100"]
PROPERTIES = H100.properties
Row = dict[str, Any]
KIB = 1024
RECORD = Path(kernels.__file__).with_name("codegen.json")
PAGE = RECORD.with_name("CODEGEN.md")
MICRO_BATCH, NUM_TOKENS = 6, 4096
OWN_OPERATORS, GEMM = "torch.ops.canon_pretrain.", "extern_kernels."
BACKENDS = ("compiled", "triton")
SETS = ("A", "B", "C", "D", "AC", "ABCD")
DEFAULT_SETS = ("AC", "ABCD")
NOPE, STANDARD = {"position": "nope"}, {"ffn": "standard"}
MODELS: dict[str, dict[str, Any]] = {
    "nope": NOPE,
    "rope": {},
    "partial_rope_a": {"position": "partial_rope_a"},
    "partial_rope_b": {"position": "partial_rope_b"},
    "partial_rope_c": {"position": "partial_rope_c"},
    "nope_documents": NOPE | {"document_mask": True},
    "rope_documents": {"document_mask": True},
    "rope_relu2": {"ffn_activation": "relu2"},
    "rope_standard_relu2": STANDARD | {"ffn_activation": "relu2"},
    "rope_standard_gelu": STANDARD | {"ffn_activation": "gelu"},
    "nope_qk_per_head": NOPE | {"qk_norm": "per_head"},
    "released_1b": {"position": "partial_rope_c", "qk_norm": "full"},
}
"""Name -> changes to 1b3 (released_1b: to 1b3_released)."""


class Case(NamedTuple):
    """A model of MODELS with a Canon set (may be empty) and a backend."""

    model: str
    canon_set: str
    backend: str

    @property
    def args(self) -> ModelArgs:
        base = flavor("1b3_released" if self.model == "released_1b" else "1b3")
        return with_canon(dataclasses.replace(base, **MODELS[self.model]), self.canon_set)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--models", nargs="+", default=list(MODELS), metavar="M", help=f"of {', '.join(MODELS)}")
    add("--sets", nargs="+", metavar="SET", help="Canon sets (default: more for nope)")
    about = f"count all, and write kernels/{RECORD.name} and kernels/{PAGE.name}"
    add("--record", action="store_true", help=about)


def measure(arguments: argparse.Namespace, machine: Machine, log: Log) -> Result:
    versions = {name: machine.facts()["versions"][name] for name in ("torch", "triton")}
    result: Row = {"counted_for": H100.name, "micro_batch": MICRO_BATCH, "num_tokens": NUM_TOKENS}
    result |= {"versions": versions, "rows": []}
    chosen = (MODELS, None) if arguments.record else (arguments.models, arguments.sets)
    for case in cases(*chosen):
        result["rows"].append(case._asdict() | count(case))
        log(f"{case.model}: {case.canon_set or 'no Canon'} {case.backend}")
    rows = result["rows"]
    if arguments.record:
        lines = ",\n".join(map(json.dumps, rows))
        head = json.dumps(result | {"rows": []}).removesuffix("]}")
        write_atomic(RECORD, f"{head}\n{lines}\n]}}\n".encode())
        write_atomic(PAGE, page(result).encode())
    return result | {"computed": [computed(row, rows) for row in rows]}


def cases(models: Iterable[str], sets: Sequence[str] | None) -> Iterator[Case]:
    """Yield the cases, each model first without Canon. Raises UserError."""
    for model in models:
        check_choice("--models", model, MODELS)
        yield Case(model, "", "compiled")
        for canon_set in normalize_canon_sets(sets or (SETS if model == "nope" else DEFAULT_SETS)):
            yield from (Case(model, canon_set, backend) for backend in BACKENDS)


# -- a fake GPU


@contextlib.contextmanager
def fake_gpu() -> Iterator[None]:
    """Make Inductor generate code for an H100, and traced code treat CPU tensors as CUDA's."""
    import triton
    from triton.backends.compiler import GPUTarget

    driver = SimpleNamespace(  # no kernel is compiled or launched
        get_current_target=lambda: GPUTarget("cuda", 90, PROPERTIES.warp_size),
        get_current_device=lambda: 0,
        get_current_stream=lambda device=None: 0,
        get_active_torch_device=lambda: GPU,
    )
    answers: dict[str, Any] = {
        "get_device_properties": lambda device=None: PROPERTIES,
        "current_device": lambda: 0,
        "device_count": lambda: 1,
        "set_device": lambda device: None,
        "synchronize": lambda device=None: None,
    }
    there = {"is_available": lambda: True, "is_bf16_supported": lambda *_, **__: True}
    for_dynamo = {name: staticmethod(answer) for name, answer in (answers | there).items()}
    device: Any = contextlib.nullcontext

    # a pass over slices copies fake tensors to learn a shape, which fails without CUDA
    scatter = "torch._inductor.fx_passes.reinplace._inplace_generalized_scatter"
    patch: Any = mock.patch.multiple
    with (
        patch(torch.cuda, device=device, get_device_capability=lambda *_: (9, 0), **answers),
        patch(CudaInterface, device=device, **for_dynamo),
        seen_on_gpu(),
        mock.patch(scatter, lambda out, source, views: out),
        mock.patch.object(triton.runtime.driver, "_active", driver),
    ):
        yield


def lower(gm: torch.fx.GraphModule, is_backward: bool) -> Generated:
    """Move a graph of CPU fake tensors to CUDA, and generate its code."""
    mode = next(node.meta["val"].fake_mode for node in gm.graph.nodes if node.op == "placeholder")
    inputs = []
    for node in gm.graph.nodes:
        if "device" in node.kwargs:
            node.update_kwarg("device", GPU)
        if node.op == "placeholder":
            like = node.meta["val"]
            stride, dtype = like.stride(), like.dtype
            with mode:
                inputs.append(torch.empty_strided(like.shape, stride, dtype=dtype, device=GPU))
    return generate_code(gm, inputs, mode, is_backward=is_backward)


# -- counts


def count(case: Case) -> Row:
    """Compile a block for the fake GPU; return each pass's `_count`, and saved bytes per token."""
    from torch._inductor.compile_fx import compile_fx

    if case.backend == "triton":  # a traced function can't import
        import_module("canon_pretrain.kernels.triton.fused")
    found: Row = {}

    def inner(gm: torch.fx.GraphModule, _: Any, *, is_backward: bool = False, **__: Any) -> Any:
        """Count a graph's code; return a function that makes empty results."""
        if not is_backward:  # the block's parameters and inputs are placeholders
            nodes = [out for out in results_of(gm)[1:] if isinstance(out, torch.fx.Node)]
            kept = [node.meta["val"] for node in nodes if node.op != "placeholder"]
            num_bytes = sum(math.prod(v.shape) * v.itemsize for v in kept if is_tensor(v))
            found["saved_bytes"] = num_bytes / (MICRO_BATCH * NUM_TOKENS)
        found["backward" if is_backward else "forward"] = _count(lower(gm, is_backward))

        return empty_results(gm)

    def backend(gm: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        options = compile_options("cuda", case.backend)
        return compile_fx(gm, inputs, inner_compile=inner, config_patches=options)

    with fake_gpu():
        torch._dynamo.reset()
        args = dataclasses.replace(case.args, max_seq_len=NUM_TOKENS)
        rope = Rope(args) if args.rope_dim else None
        with torch.device("meta"):
            block = TransformerBlock(args, rope, OpaqueAttend(args), case.backend)
        block.to(torch.bfloat16).to_empty(device="cpu")
        near_shape = MICRO_BATCH, args.canon_kernel - 1 + NUM_TOKENS
        segments_BN = torch.empty(near_shape, dtype=torch.int32) if args.document_mask else None
        shape = MICRO_BATCH, NUM_TOKENS, args.dim
        h_BTD = torch.empty(shape, dtype=torch.bfloat16, requires_grad=True)
        # compiled as in titan/parallelize.py; only empty tensors are computed
        y_BTD = torch.compile(block, backend=backend, fullgraph=True)(h_BTD, None, segments_BN)
        y_BTD.backward(torch.empty_like(y_BTD))
    return found


def _count(generated: Generated) -> Row:
    """Return launches, and KiB per token by kind of kernel."""
    kernels = generated.kernels
    kib = {"gemm": 0.0, "attention": 0.0, "other": 0.0}
    for kernel in kernels:
        kind = "attention" if kernel.name.startswith(ATTENTION) else "other"
        kind = "gemm" if kernel.name.startswith(GEMM) else kind
        kib[kind] += kernel.num_bytes / (MICRO_BATCH * NUM_TOKENS) / KIB
    return {
        "launches": generated.num_launches,
        "operators": sum(kernel.name.startswith(OWN_OPERATORS) for kernel in kernels),
        "gemms": sum(kernel.name.startswith(GEMM) for kernel in kernels),
        "kib": {kind: round(value, 2) for kind, value in kib.items()},
    }


def _passes(row: Row) -> tuple[Row, Row]:
    return row["forward"], row["backward"]


def _args(row: Row) -> ModelArgs:
    return Case(row["model"], row["canon_set"], row["backend"]).args


def _step(row: Row) -> StepCounts:
    """Return the counts of a step of the whole model on a node, by those of a row's block."""
    args, tokens = _args(row), MICRO_BATCH * NUM_TOKENS
    layout = Layout(world_size=GPUS_PER_NODE, num_shards=GPUS_PER_NODE, tokens=tokens)
    launches = sum(one["launches"] + one["operators"] + one["gemms"] for one in _passes(row))
    other_bytes, product_bytes = (
        tokens * KIB * sum(one["kib"][kind] for one in _passes(row)) for kind in ("other", "gemm")
    )
    block_flops = 6 * tokens * args.dim * (sum(args.qkv_dims) + args.qkv_dims[0] + args.ffn_in_dim)
    block_flops += 6 * tokens * args.dim * args.ffn_dim
    block = Work(
        # and the second stage of weight gradients
        launches=launches + row["backward"]["operators"],
        bytes_moved=other_bytes,
        product_bytes=product_bytes,
        flops=Counter({"bfloat16": block_flops}),
    )
    return count_model(args, layout, block)


def computed(row: Row, rows: Sequence[Row]) -> Row:
    """Return what follows from a row's counts: KiB per token, and a step with low to high rates."""

    none = next(one for one in rows if one["model"] == row["model"] and not one["canon_set"])
    least = sum(map(sum, min_block_bytes(_args(row), itemsize=2).values())) / KIB
    counted = sum(one["kib"]["other"] for one in _passes(row))
    total, base = (sum(sum(one["kib"].values()) for one in _passes(each)) for each in (row, none))
    flops = flops_per_token(_args(row), NUM_TOKENS) * MICRO_BATCH * NUM_TOKENS
    own, others = (step_seconds(_step(one), H100) for one in (row, none))
    return {
        **{"least_kib": least, "counted_kib": counted, "ratio": counted / least},
        **{"total_kib": total, "extra_kib": total - base, "seconds": own},
        "mfu": [flops / seconds / H100.peak_flops for seconds in own],
        "over_none": [one / other - 1 for one, other in zip(own, others, strict=True)],
    }


COLUMNS: Columns = {
    "model": lambda row: row["model"],
    "Canon": lambda row: row["canon_set"] or "none",
    "backend": lambda row: row["backend"] if row["canon_set"] else "",
    "launches": lambda row: " + ".join(str(one["launches"]) for one in _passes(row)),
    "own": lambda row: " + ".join(str(one["operators"]) for one in _passes(row)),
    "KiB": lambda row: f"{row['total_kib']:.1f}",
    "extra": lambda row: f"{row['extra_kib']:+.1f}" if row["canon_set"] else "",
    "least": lambda row: f"{row['least_kib']:.1f}",
    "ratio": lambda row: f"{row['ratio']:.2f}",
    "saved B": lambda row: f"{row['saved_bytes']:,.0f}",
    "step s": lambda row: f"{row['seconds'][1]:.3f}",
    "MFU": lambda row: f"{row['mfu'][1]:.0%}",
    "cost": lambda row: f"{row['over_none'][1]:+.1%}" if row["canon_set"] else "",
}


def page(result: Row) -> str:
    """Return PAGE: an explanation of the columns, the rates, and the table."""
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    speeds = vars(H100.speeds)
    rates = [f"{name} {speed.likely:.3g}" for name, speed in speeds.items()]
    lines = [
        "# Launches and bytes of a block on an H100, counted without one",
        f"Written by `python -m canon_pretrain.bench codegen --record` ({versions}) for "
        f"{result['counted_for']}: one block of 1.3B, {result['micro_batch']} x "
        f"{result['num_tokens']:,} tokens, bfloat16; nothing was run.",
        "launches: Inductor's kernels, forward + backward; own: our operators. KiB: read and "
        "written per token and layer; extra: over no Canon; least: lower bound outside matmuls "
        "and attention (limits.py); ratio: counted over least. saved B: bytes per token saved for "
        "backward, without the block's input.",
        f"Computed, not measured: a training step of the whole model on {GPUS_PER_NODE} GPUs, one "
        f"micro-batch each; cost: over no Canon. Rates assumed: {', '.join(rates)}; MFU of "
        f"{H100.peak_flops / 1e12:.0f} TFLOP/s.",
    ]
    rows = [row | computed(row, result["rows"]) for row in result["rows"]]
    cells = [[cell(row) for cell in COLUMNS.values()] for row in rows]
    table = [f"|{'|'.join(each)}|\n" for each in (COLUMNS, ["---"] * len(COLUMNS), *cells)]
    return "".join([*(f"{line}\n\n" for line in lines), *table])


def print_result(result: Row, console: Console) -> None:
    print_lines(console, *page(result).splitlines())


BENCHES = {"codegen": Bench(add_arguments, measure, print_result)}
