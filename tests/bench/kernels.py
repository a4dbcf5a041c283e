"""Canon kernels and attention implementations by themselves, forward and backward.

`canon`: every case of model/canon_check.py with every backend, compiled, over the reference.
`attention`: the fused kernels of SDPA, FlashAttention 2 to 4 and flex attention, on the shapes of a
training step. Values (for Canon also gradients) are first compared with the formula in float64.
"""

import argparse
import dataclasses
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import attention
from torch.nn.attention import SDPBackend
from torch.nn.attention.flex_attention import create_block_mask

from canon_pretrain.core.errors import UserError
from canon_pretrain.core.terminal import Console
from canon_pretrain.kernels.backends import compile_options
from canon_pretrain.model import canon_check
from canon_pretrain.model.args import ModelArgs
from canon_pretrain.model.attend import FLASH_IMPLS, Attend, activate_flash
from canon_pretrain.model.canon_check import Case
from tests.bench import tables, variants
from tests.bench.limits import Machine
from tests.bench.timing import NotMeasured, Step, compare_steps
from tests.bench.variants import Log, Result

PASS: tables.Columns = {
    "pass": lambda row: row["direction"],
    "ms": lambda row: tables.ms(row["other_s"], 3),
    **tables.FACTOR,
    "max error": lambda row: f"{row['max_error']:.0e}",
}
SHAPE_AND_TIMING = (*variants.SHAPE, *variants.TIMING)


def passes(
    call: Callable[[], Sequence[Tensor]],
    leaves: Sequence[Tensor],
    prepare: Callable[[], object] = lambda: None,
) -> dict[str, Callable[[], Step]]:
    """Return factories of steps: forward, and backward repeated after one forward pass."""

    def backward() -> Step:
        outputs = call()
        grads = [torch.randn_like(y) for y in outputs]

        def step() -> Any:
            prepare()
            return torch.autograd.grad(outputs, leaves, grads, retain_graph=True)

        return step

    return {"forward": lambda: call, "backward": backward}


# -- canon


@dataclasses.dataclass(frozen=True)
class BenchCase:
    """A case, and the least elements per token that forward and backward must move."""

    case: Case
    moved: tuple[int, int]


def bench_cases(args: ModelArgs) -> list[BenchCase]:
    """Return each site of a gated model alone and with its neighbors."""
    args = dataclasses.replace(args, canon_set="ABCD")
    dim = args.dim

    def of_canon(case: Case) -> BenchCase:
        # forward reads x and writes y; backward reads dy and x, and writes dx
        return BenchCase(case, (2 * sum(case.widths), 3 * sum(case.widths)))

    cases = [
        of_canon(canon_check.canon_case("A, C", "A", (dim,), args)),
        of_canon(canon_check.canon_case("B", "B", args.qkv_dims, args)),
        of_canon(canon_check.canon_case("D", "D", (args.ffn_dim, args.ffn_dim), args)),
        # forward reads both and writes both; backward reads their gradients and h, and writes dh
        BenchCase(canon_check.norm_case("norm + A, C", args, "A"), (4 * dim, 4 * dim)),
    ]
    if args.rope_dim:
        cases.append(of_canon(canon_check.heads_case(args)))
    # forward reads gate and up, and writes their product; backward reads the three, writes two
    cases.append(BenchCase(canon_check.gate_case(args), (3 * args.ffn_dim, 5 * args.ffn_dim)))
    return cases


def add_canon_arguments(parser: argparse.ArgumentParser) -> None:
    shapes = {"cuda": (16, 4096), "cpu": (4, 1024)}
    names = ("backends", *SHAPE_AND_TIMING)
    variants.add_options(parser, names, shapes=shapes, pairs=11, block_seconds=0.05)
    parser.set_defaults(position="rope")  # B's neighbor is the rotation


def measure_canon(arguments: argparse.Namespace, machine: Machine, log: Log) -> Result:
    work = variants.workload(arguments, machine)
    backends, missing = variants.available_backends(arguments.backends, work)
    num_values = work.micro_batch * work.num_tokens
    rows: list[dict[str, Any]] = []

    def measure_case(bench_case: BenchCase, base: Timed, timed: Timed) -> None:
        case = bench_case.case
        error = canon_check.compare(case, timed.module, timed.compiled, timed.inputs)
        for direction, moved in zip(("forward", "backward"), bench_case.moved, strict=True):
            times = compare_steps(
                base.passes[direction](),
                timed.passes[direction](),
                pairs=arguments.pairs,
                block_s=arguments.block_seconds,
            )
            least_bytes = moved * num_values * work.dtype.itemsize
            bandwidth = least_bytes / times["other_s"]
            row = {
                "form": case.name,
                "backend": timed.backend,
                "direction": direction,
                **times,
                "least_bytes": least_bytes,
                "bandwidth": bandwidth,
                "max_error": error,
                "of_copy": bandwidth / machine.copy_bandwidth,
            }
            rows.append(row)
            log(f"{case.name} {direction} by {timed.backend}: {times['ratio']:.2f}")

    # backward is repeated on the buffers that one forward pass saved
    with torch._functorch.config.patch(donated_buffer=False):
        for bench_case in bench_cases(work.args):
            case = bench_case.case
            shape = (work.micro_batch, work.num_tokens)
            inputs = canon_check.make_inputs(case, shape, work.dtype, work.device)
            base = Timed(case, "reference", inputs)
            for backend in backends:
                try:
                    with variants.failures_as_not_measured(backend):
                        is_base = backend == base.backend
                        timed = base if is_base else Timed(case, backend, inputs)
                        measure_case(bench_case, base, timed)
                except (NotMeasured, canon_check.CanonMismatch) as error:
                    missing[f"{case.name} by {backend}"] = str(error)
    peaks = machine.peaks(work.dtype)
    return {**work.facts(), "peaks": peaks, "unavailable": missing, "rows": rows}


class Timed:
    """A case's module, compiled, its inputs, and the two passes."""

    def __init__(self, case: Case, backend: str, inputs: Sequence[Tensor]) -> None:
        self.backend = backend
        self.inputs = inputs
        self.module = canon_check.make_module(case, backend, inputs[0].dtype, inputs[0].device)
        options = compile_options(inputs[0].device.type, backend)
        self.compiled = torch.compile(self.module, fullgraph=True, dynamic=False, options=options)
        leaves = (*inputs, *self.module.parameters())
        self.passes = passes(lambda: self.compiled(*inputs), leaves)


def print_canon(result: dict[str, Any], console: Console) -> None:
    columns: tables.Columns = {
        "kernel": lambda row: row["form"],
        "backend": lambda row: row["backend"],
        **PASS,
        "MB at least": lambda row: f"{row['least_bytes'] / 1e6:,.2f}",
        "GB/s": lambda row: f"{row['bandwidth'] / 1e9:,.1f}",
        "of copy": lambda row: f"{row['of_copy']:.0%}",
    }
    line = (
        f"{result['work']}, each compiled; factor over the reference; "
        f"{tables.peaks_line(result['peaks'])}; of copy: 100 % is every operand read or written "
        "once at the copy bandwidth"
    )
    tables.print_table(console, result["rows"], columns, line)


# -- attention

AttentionFunction = Callable[..., Tensor]
KERNELS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}
METHODS = (*KERNELS, "flex", "flash_attn", *FLASH_IMPLS)
DIRECTIONS = {"forward": 1.0, "backward": 2.5}  # FLOPs: five products instead of two
WORST_ERROR = 3e-2  # of the largest value; bfloat16 products, summed in float32


def add_attention_arguments(parser: argparse.ArgumentParser) -> None:
    shapes = {"cuda": (6, 4096), "cpu": (2, 1024)}
    variants.add_options(parser, SHAPE_AND_TIMING, shapes=shapes, pairs=11, block_seconds=0.1)


def measure_attention(arguments: argparse.Namespace, machine: Machine, log: Log) -> Result:
    work = variants.workload(arguments, machine)
    args = work.args
    shape = (work.micro_batch, work.num_tokens)
    tensors = [  # q, k and v, [B, T, heads, K], laid out as the block's projections leave them
        torch.randn(*shape, heads, args.head_dim, device=work.device)
        .to(work.dtype)
        .requires_grad_()
        for heads in (args.num_heads, args.kv_heads, args.kv_heads)
    ]

    # The implementations that run here and are right.
    usable: dict[str, dict[str, Any]] = {}
    errors: dict[str, float] = {}
    missing: dict[str, str] = {}
    for name in METHODS:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch warns why it refuses a kernel
                attend = make_attention(name, args, tensors)
                errors[name] = check_output(attend, tensors)
            call = partial(lambda attend: [attend(*tensors)], attend)
            usable[name] = passes(call, tensors, partial(use_flash, name))
        except (UserError, RuntimeError) as error:
            missing[name] = (str(error).strip() or type(error).__name__).splitlines()[0]
    variants.require_any("attention by", usable, missing)

    # Each of them over the first.
    base = next(iter(usable))
    rows = []
    both_passes_s = dict.fromkeys(usable, 0.0)
    # two products, half of them masked by causality
    forward_flops = 2 * shape[0] * args.num_heads * shape[1] ** 2 * args.head_dim
    for name in usable:
        for direction, times_forward in DIRECTIONS.items():
            times = compare_steps(
                usable[base][direction](),
                usable[name][direction](),
                pairs=arguments.pairs,
                block_s=arguments.block_seconds,
            )
            flops = round(forward_flops * times_forward)
            flops_per_second = flops / times["other_s"]
            row = {
                "way": name,
                "direction": direction,
                **times,
                "max_error": errors[name],
                "flops": flops,
                "flops_per_second": flops_per_second,
                "of_matmul": flops_per_second / machine.matmul_flops(work.dtype),
            }
            rows.append(row)
            both_passes_s[name] += times["other_s"]
        log(f"{name}: {tables.ms(both_passes_s[name], 3)} ms forward and backward")
    use_flash("flash")
    return {
        **work.facts(),
        "heads": [args.num_heads, args.kv_heads, args.head_dim],
        "peaks": machine.peaks(work.dtype),
        "base": base,
        "unavailable": missing,
        "rows": rows,
        "fastest": min(both_passes_s, key=both_passes_s.__getitem__),
    }


def make_attention(name: str, args: ModelArgs, tensors: list[Tensor]) -> AttentionFunction:
    """Return the attention `name`, a function of q_BTHK, k_BTGK, v_BTGK. Raises NotMeasured."""
    on_gpu = tensors[0].is_cuda
    num_tokens = tensors[0].shape[1]
    if name in ("cudnn", "efficient", "flex") and not on_gpu:
        raise NotMeasured("bench.unavailable", "needs a GPU")
    if name in FLASH_IMPLS and (problem := activate_flash(name)):
        raise NotMeasured("bench.unavailable", problem)

    if name in ("flash_attn", "flex"):
        attend = Attend(dataclasses.replace(args, position="nope"), name)
        mask = None
        if name == "flex":
            causal = lambda b, h, q, s: q >= s  # noqa: E731
            mask = create_block_mask(causal, None, None, num_tokens, num_tokens, device="cuda")
        return lambda q, k, v: attend(q, k, v, mask)

    kernel = KERNELS.get(name, SDPBackend.FLASH_ATTENTION)
    grouped: dict[str, Any] = {"enable_gqa": True} if args.kv_heads != args.num_heads else {}

    def sdpa(*tensors: Tensor) -> Tensor:
        use_flash(name)
        q, k, v = (part.transpose(1, 2) for part in tensors)
        with attention.sdpa_kernel(kernel):
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True, **grouped)
        return y.transpose(1, 2)

    return sdpa


def use_flash(name: str) -> None:
    """Activate the flash kernel of `name` in this process; 0.2 ms if another one was active."""
    if name not in FLASH_IMPLS and name != "flash":
        return
    impl = FLASH_IMPLS[name].name if name in FLASH_IMPLS else None
    if attention.current_flash_attention_impl() != impl:
        attention.restore_flash_attention_impl(_raise_warn=False)
        if impl:
            attention.activate_flash_attention_impl(impl)


def check_output(attend: AttentionFunction, tensors: list[Tensor]) -> float:
    """Return the first head's largest error over its largest value. Raises NotMeasured."""
    with torch.no_grad(), attention.sdpa_kernel(SDPBackend.MATH):
        q, k, v = (part[:1, :, :1].double().transpose(1, 2) for part in tensors)
        true_TK = F.scaled_dot_product_attention(q, k, v, is_causal=True)[0, 0]
        difference = (attend(*tensors)[0, :, 0] - true_TK).abs().max()
        error = (difference / true_TK.abs().max()).item()
    if not error <= WORST_ERROR:
        raise NotMeasured("bench.wrong_result", f"it is {error:.2g} away from softmax(q k^T) v")
    return error


def print_attention(result: dict[str, Any], console: Console) -> None:
    heads, kv_heads, head_dim = result["heads"]
    columns: tables.Columns = {
        "attention": lambda row: row["way"],
        **PASS,
        "TFLOP/s": lambda row: f"{row['flops_per_second'] / 1e12:,.2f}",
        "of matmul": lambda row: f"{row['of_matmul']:.0%}",
    }
    line = (
        f"{result['work']}, {heads} heads (k and v: {kv_heads}) of {head_dim}, causal; factor over "
        f"{result['base']}; {tables.peaks_line(result['peaks'])}; FLOPs of the causal half, "
        f"backward 2.5 times forward's. The fastest for both passes: {result['fastest']}"
    )
    tables.print_table(console, result["rows"], columns, line)


BENCHES = {
    "canon": variants.Bench(add_canon_arguments, measure_canon, print_canon),
    "attention": variants.Bench(add_attention_arguments, measure_attention, print_attention),
}
