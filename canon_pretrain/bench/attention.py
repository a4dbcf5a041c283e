"""The ways of causal attention one against another, so that the choice is made by measurement.

Every kernel of scaled_dot_product_attention, the packages of FlashAttention 2 to 4 and flex
attention, where they can be had, forward and backward, on the shapes of a training step.
`model.attention_backend` takes what is the fastest on this machine.
"""

import argparse
import dataclasses
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import attention
from torch.nn.attention import SDPBackend
from torch.nn.attention.flex_attention import create_block_mask

from canon_pretrain.bench import tables, variants
from canon_pretrain.bench.machine import Machine
from canon_pretrain.bench.timing import NotMeasured, Step, compare_steps
from canon_pretrain.core.errors import UserError, check_choice
from canon_pretrain.core.terminal import Console
from canon_pretrain.model.args import ModelArgs
from canon_pretrain.model.attend import FLASH_IMPLS, Attend, activate_flash

Way = Callable[..., Tensor]
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
    about = f"of {', '.join(WAYS)} (default: all here)"
    parser.add_argument("--ways", nargs="+", metavar="WAY", help=about)
    names = (*variants.SHAPE, *variants.TIMING)
    shapes = {"cuda": (6, 4096), "cpu": (2, 1024)}
    variants.add_options(parser, *names, shapes=shapes, pairs=11, block_seconds=0.1)


def measure(
    arguments: argparse.Namespace, machine: Machine, say: Callable[[str], None]
) -> dict[str, Any]:
    """Return the figures as JSON can hold them; seconds, FLOPs. Raises UserError."""
    work = variants.workload(arguments, machine)
    args, shape, device = work.args, (work.micro_batch, work.num_tokens), work.device
    tensors = [  # q, k and v, [B, T, heads, K], laid out as the block's projections leave them
        torch.randn(*shape, heads, args.head_dim, device=device).to(work.dtype).requires_grad_()
        for heads in (args.num_heads, args.kv_heads, args.kv_heads)
    ]
    usable: dict[str, Way] = {}
    errors, missing, both, rows = {}, {}, {}, []
    # math makes all scores, which at 4,096 tokens are more than most GPUs hold
    for name in arguments.ways or [n for n in WAYS if n != "math" or not machine.on_gpu]:
        check_choice("--ways", name, WAYS)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch tells there why it refuses a kernel
                way = make_way(name, args, tensors)
                errors[name] = check(way, tensors)
            usable[name] = way
        except (UserError, RuntimeError) as why:
            missing[name] = (str(why).strip() or type(why).__name__).splitlines()[0]
    if not usable:
        reasons = "; ".join(f"{name}: {why}" for name, why in missing.items())
        raise UserError(f"--ways {' '.join(missing)}: none can be had here. {reasons}")
    base = next(iter(usable))
    # two products, of the half of the scores that causality leaves
    forward_flops = 2 * shape[0] * args.num_heads * shape[1] ** 2 * args.head_dim
    for name in usable:
        for direction, times in DIRECTIONS.items():
            steps = (make_step(one, usable[one], tensors, direction) for one in (base, name))
            found = compare_steps(*steps, pairs=arguments.pairs, block_s=arguments.block_seconds)
            flops = round(forward_flops * times)
            per_second = flops / found["other_s"]
            row = {"way": name, "direction": direction, **found, "max_error": errors[name]}
            row |= {"flops": flops, "flops_per_second": per_second}
            rows.append(row | {"of_matmul": per_second / machine.matmul_flops(work.dtype)})
            both[name] = both.get(name, 0.0) + found["other_s"]
        say(f"{name}: {tables.ms(both[name], 3)} ms forward and backward")
    use_flash("flash")
    return {
        **work.facts(),
        "heads": [args.num_heads, args.kv_heads, args.head_dim],
        "peaks": machine.peaks(work.dtype),
        "base": base,
        "unavailable": missing,
        "rows": rows,
        "fastest": min(both, key=both.__getitem__),
    }


def make_way(name: str, args: ModelArgs, tensors: list[Tensor]) -> Way:
    """Return the function of q_BTHK, k_BTGK and v_BTGK called `name`; it returns y_BTHK.

    Raises UserError, or RuntimeError when it is first called, if it can't be had.
    """
    on_gpu, num_tokens = tensors[0].is_cuda, tensors[0].shape[1]
    if name in ("cudnn", "efficient", "flex") and not on_gpu:
        raise NotMeasured("needs a GPU")
    if name in FLASH_IMPLS and (why := activate_flash(name)):
        raise NotMeasured(why)
    if name in ("flash_attn", "flex"):
        attend, mask = Attend(dataclasses.replace(args, position="nope"), name), None
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
    """Make SDPA's flash kernel the one that `name` is; 0.2 ms if it was another (CPU, measured).

    It is the process's, and forward and backward of several ways take turns here.
    """
    wanted = FLASH_IMPLS[name].name if name in FLASH_IMPLS else None
    if (wanted or name == "flash") and attention.current_flash_attention_impl() != wanted:
        attention.restore_flash_attention_impl(_raise_warn=False)
        if wanted:
            attention.activate_flash_attention_impl(wanted)


def check(way: Way, tensors: list[Tensor]) -> float:
    """Return the first head's largest error against float64, as a share of its largest value.

    Raises NotMeasured if it is more than rounding.
    """
    with torch.no_grad(), attention.sdpa_kernel(SDPBackend.MATH):
        q, k, v = (part[:1, :, :1].double().transpose(1, 2) for part in tensors)
        true_TK = F.scaled_dot_product_attention(q, k, v, is_causal=True)[0, 0]
        error = ((way(*tensors)[0, :, 0] - true_TK).abs().max() / true_TK.abs().max()).item()
    if not error <= WORST_ERROR:
        raise NotMeasured(f"it is {error:.2g} away from softmax(q k^T) v")
    return error


def make_step(name: str, way: Way, tensors: list[Tensor], direction: str) -> Step:
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
        **tables.PASS,
        "TFLOP/s": lambda row: f"{row['flops_per_second'] / 1e12:,.2f}",
        "of matmul": lambda row: f"{row['of_matmul']:.0%}",
    }
    line = (
        f"{result['work']}, {heads} heads (k and v: {kv_heads}) of {head_dim}, causal; factor over "
        f"{result['base']}; {tables.peaks_line(result['peaks'])}; FLOPs of the half of the scores "
        "that causality leaves, backward 2.5 times forward's. The fastest for both passes: "
        f"{result['fastest']}"
    )
    tables.print_table(console, result["rows"], columns, line)
