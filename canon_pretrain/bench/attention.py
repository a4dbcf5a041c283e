"""The ways of causal attention one against another, so that the choice is made by measurement.

Every kernel of scaled_dot_product_attention, the packages of FlashAttention 2 to 4 and flex
attention, where they can be had, forward and backward, on the shapes of a training step.
`model.attention_backend` takes what is the fastest on this machine.
"""

import argparse
import dataclasses
import importlib
import importlib.util
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import (
    SDPBackend,
    activate_flash_attention_impl,
    current_flash_attention_impl,
    restore_flash_attention_impl,
    sdpa_kernel,
)
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from canon_pretrain.bench import tables, variants
from canon_pretrain.bench.machine import Machine
from canon_pretrain.bench.timing import compare_steps
from canon_pretrain.core.errors import UserError, check_choice
from canon_pretrain.core.terminal import Console
from canon_pretrain.model.attend import FLASH_IMPLS, activate_flash

Way = Callable[[Tensor, Tensor, Tensor], Tensor]
KERNELS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
WAYS = (*KERNELS, "flex", "flash_attn", *FLASH_IMPLS)
DIRECTIONS = {"forward": 1.0, "backward": 2.5}
"""The passes, and the FLOPs of each as a multiple of forward's: five products instead of two."""
WORST_ERROR = 3e-2
"""Of the largest value; bfloat16 products, summed in float32."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    variants.add_model_arguments(parser, gpu=(6, 4096), cpu=(2, 1024))
    about = f"of {', '.join(WAYS)} (default: all here)"
    parser.add_argument("--ways", nargs="+", metavar="WAY", help=about)
    variants.add_timing_arguments(parser, pairs=11, block_s=0.1)


def measure(
    arguments: argparse.Namespace, machine: Machine, say: Callable[[str], None]
) -> dict[str, Any]:
    """Return the figures as JSON can hold them; seconds, FLOPs. Raises UserError."""
    for name in arguments.ways or ():
        check_choice("--ways", name, WAYS)
    work = variants.workload(arguments, machine)
    args, shape = work.args, (work.micro_batch, work.num_tokens)
    tensors = [  # q, k and v, [B, T, heads, K], laid out as the block's projections leave them
        torch.randn(*shape, heads, args.head_dim, device=work.device)
        .to(work.dtype)
        .requires_grad_()
        for heads in (args.num_heads, args.kv_heads, args.kv_heads)
    ]
    # math makes all scores, which at 4,096 tokens are more than most GPUs hold
    names = arguments.ways or [name for name in WAYS if name != "math" or not machine.on_gpu]
    usable, missing, errors = find_ways(names, tensors, machine)
    base = next(iter(usable))
    peak = machine.matmul_flops(work.dtype)
    # two products, of the half of the scores that causality leaves
    forward_flops = 2 * shape[0] * args.num_heads * shape[1] ** 2 * args.head_dim
    rows = []
    for name, way in usable.items():
        for direction, times in DIRECTIONS.items():
            found = compare_steps(
                make_step(base, usable[base], tensors, direction),
                make_step(name, way, tensors, direction),
                pairs=arguments.pairs,
                block_s=arguments.block_seconds,
            )
            flops = round(forward_flops * times)
            row = {"way": name, "direction": direction, **dataclasses.asdict(found)}
            row |= {"flops": flops, "flops_per_second": flops / found.other_s}
            row |= {"of_matmul": flops / found.other_s / peak, "max_error": errors[name]}
            rows.append(row)
        took = [f"{row['direction']} {tables.ms(row['other_s'], 3)} ms" for row in rows[-2:]]
        say(f"{name}: {', '.join(took)}")
    use_flash("flash")
    both = {name: sum(row["other_s"] for row in rows if row["way"] == name) for name in usable}
    return {
        **work.facts(),
        "heads": [args.num_heads, args.kv_heads, args.head_dim],
        "peaks": machine.peaks(work.dtype),
        "base": base,
        "unavailable": missing,
        "rows": rows,
        "fastest": min(both, key=both.__getitem__),
    }


def find_ways(
    names: Sequence[str], tensors: list[Tensor], machine: Machine
) -> tuple[dict[str, Way], dict[str, str], dict[str, float]]:
    """Return those of `names` that can be had, why others can't, and the usable ones' errors.

    Raises UserError if none is left, or one is wrong.
    """
    usable: dict[str, Way] = {}
    missing: dict[str, str] = {}
    errors: dict[str, float] = {}
    for name in names:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch tells there why it refuses a kernel
                way = make_way(name, machine, tensors[0].shape[1])
                errors[name] = check(name, way, tensors)
            usable[name] = way
        except (RuntimeError, ImportError) as why:
            missing[name] = (str(why).strip() or type(why).__name__).splitlines()[0]
    if not usable:
        told = "; ".join(f"{name}: {why}" for name, why in missing.items())
        raise UserError(f"--ways {' '.join(names)}: none can be had here. {told}")
    return usable, missing, errors


def make_way(name: str, machine: Machine, num_tokens: int) -> Way:
    """Return the function of q_BTHK, k_BTGK and v_BTGK called `name`; it returns y_BTHK.

    Raises RuntimeError or ImportError, here or when it is first called, if it can't be had.
    """
    if name == "flash_attn":
        if importlib.util.find_spec("flash_attn") is None:
            raise ImportError("the package flash-attn is not installed")
        function = importlib.import_module("flash_attn").flash_attn_func
        return lambda q, k, v: function(q, k, v, causal=True)
    if name == "flex":
        if not machine.on_gpu:
            raise RuntimeError("flex attention has no backward pass on a CPU")
        causal = lambda b, h, q, s: q >= s  # noqa: E731
        mask = create_block_mask(causal, None, None, num_tokens, num_tokens, device="cuda")
        compiled = torch.compile(flex_attention, dynamic=False)

        def flex(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            q, k, v = (part.transpose(1, 2) for part in (q, k, v))
            y: Any = compiled(q, k, v, block_mask=mask, enable_gqa=k.shape[1] != q.shape[1])
            return y.transpose(1, 2)

        return flex
    if name in FLASH_IMPLS and (why := activate_flash(name)):
        raise RuntimeError(why)
    if name in ("cudnn", "efficient") and not machine.on_gpu:
        raise RuntimeError("needs a GPU")
    kernel = KERNELS.get(name, SDPBackend.FLASH_ATTENTION)

    def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        use_flash(name)
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        grouped: dict[str, Any] = {"enable_gqa": True} if k.shape[1] != q.shape[1] else {}
        with sdpa_kernel(kernel):
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True, **grouped)
        return y.transpose(1, 2)

    return sdpa


def use_flash(name: str) -> None:
    """Make SDPA's flash kernel the one that `name` is; 0.2 ms if it was another (CPU, measured).

    It is the process's, and forward and backward of several ways take turns here.
    """
    wanted = FLASH_IMPLS[name].name if name in FLASH_IMPLS else None
    if (wanted or name == "flash") and current_flash_attention_impl() != wanted:
        restore_flash_attention_impl(_raise_warn=False)
        if wanted:
            activate_flash_attention_impl(wanted)


def check(name: str, way: Way, tensors: list[Tensor]) -> float:
    """Return the first head's largest error against float64, as a share of its largest value.

    Raises UserError if it is more than rounding.
    """
    with torch.no_grad():
        y_TK = way(*tensors)[0, :, 0].double()
        q, k, v = (part[0, :, 0].double() for part in tensors)
        scores = q @ k.T * q.shape[1] ** -0.5
        hidden = torch.ones_like(scores, dtype=torch.bool).triu(1)
        true_TK = scores.masked_fill(hidden, -torch.inf).softmax(-1) @ v
        error = ((y_TK - true_TK).abs().max() / true_TK.abs().max()).item()
    if not error <= WORST_ERROR:
        raise UserError(f"attention by {name} is {error:.2g} away from softmax(q k^T) v")
    return error


def make_step(name: str, way: Way, tensors: list[Tensor], direction: str) -> Callable[[], Any]:
    """Return forward, or backward from what one forward pass has kept, as a step."""
    if direction == "forward":
        return lambda: way(*tensors)
    y_BTHK = way(*tensors)
    grad_BTHK = torch.randn_like(y_BTHK)

    def backward() -> Any:
        use_flash(name)
        return torch.autograd.grad(y_BTHK, tensors, grad_BTHK, retain_graph=True)

    return backward


def print_result(result: dict[str, Any], console: Console) -> None:
    heads, kv_heads, head_dim = result["heads"]
    columns: tables.Columns = {
        "way": lambda row: row["way"],
        "pass": lambda row: row["direction"],
        "ms": lambda row: tables.ms(row["other_s"], 3),
        **tables.FACTOR,
        "TFLOP/s": lambda row: f"{row['flops_per_second'] / 1e12:,.2f}",
        "of matmul": lambda row: f"{row['of_matmul']:.0%}",
        "max error": lambda row: f"{row['max_error']:.0e}",
    }
    tables.print_table(console, result["rows"], columns)
    tables.print_lines(
        console,
        f"{tables.work_line(result)}, {heads} heads (k and v: {kv_heads}) of {head_dim}, causal; "
        f"factor over {result['base']}; {tables.peaks_line(result['peaks'])}; FLOPs of the half of "
        "the scores that causality leaves, backward 2.5 times forward's. The fastest for both "
        f"passes: {result['fastest']}",
    )
