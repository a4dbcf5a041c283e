"""What bounds a figure: bytes that a block must move, and products that a step must make."""

from dataclasses import dataclass, replace
from typing import NamedTuple

from canon_pretrain.model.args import ModelArgs, flops_per_token, num_parameters


class Traffic(NamedTuple):
    """Bytes per token and layer."""

    forward: int
    backward: int


def block_flops_per_token(args: ModelArgs, seq_len: int) -> int:
    """FLOPs of one token in one block, forward and backward, as `flops_per_token` counts them."""
    one, two = (flops_per_token(replace(args, num_layers=n), seq_len) for n in (1, 2))
    return two - one


def block_traffic(args: ModelArgs, itemsize: int) -> dict[str, Traffic]:
    """Least bytes per token and layer around the products and attention, by site of the block.

    Every operand is read and every result written once, by one kernel a site; each product writes
    a gradient of its own, and all inputs of products are kept, so that none is made anew.
    A, C: the norm, its Canon and the residual stream. B: Canon, QK-norm and rotation of q, k and v.
    D: Canon and the activation. residual: the addition at the block's end.
    """
    dim, width = args.dim, args.ffn_dim
    gated = args.ffn == "gated"
    rotated = args.rope_heads * args.head_dim * (args.num_heads + args.kv_heads) // args.num_heads
    changed = sum(args.qkv_dims[:2]) if args.qk_norm != "none" else rotated
    kept = args.qk_norm != "none"
    if "B" in args.canon_set:
        changed, kept = sum(args.qkv_dims), True
    values = {
        "A": (2 * dim, (3 + 3) * dim),  # backward: three products' gradients, h, stream in, out
        "B": (2 * changed, (2 + kept) * changed),
        "C": (4 * dim, (1 + gated + 3) * dim),
        "D": ((3 if gated else 2) * width, (5 if gated else 3) * width),
        "residual": (3 * dim, 0),
    }
    return {site: Traffic(a * itemsize, b * itemsize) for site, (a, b) in values.items()}


def least_extra(args: ModelArgs, itemsize: int) -> int:
    """Return the least bytes per token and layer that the Canon of `args` adds, both directions."""
    with_canon, without = (
        sum(map(sum, block_traffic(one, itemsize).values()))
        for one in (args, replace(args, canon_set=""))
    )
    return with_canon - without


Bars = tuple[float, float, float]
"""Low, middle and high."""


@dataclass(frozen=True)
class Rates:
    """What a GPU is assumed to sustain in a training step; nothing here was measured by us."""

    peak_flops: float
    gemm_flops: Bars
    attention_flops: Bars
    memory_bytes: Bars
    launch_gap_s: Bars = (3e-6, 2e-6, 1e-6)
    network_bytes: Bars = (250e9, 320e9, 370e9)
    exposed_network: Bars = (0.3, 0.15, 0.05)


RATES = {
    "h100": Rates(
        989e12, (560e12, 630e12, 700e12), (270e12, 340e12, 410e12), (2.5e12, 2.8e12, 3.05e12)
    ),
    "h200": Rates(
        989e12, (580e12, 650e12, 720e12), (280e12, 350e12, 420e12), (3.6e12, 4.0e12, 4.4e12)
    ),
}
"""Dense bfloat16; attention of head dim 64, of the causal half's FLOPs; 3.35 and 4.8 TB/s stated.

`launch_gap_s`: from the end of a kernel to the start of the next. `network_bytes`: a GPU's over
NVLink, of which `exposed_network` is not hidden behind compute.
"""


def step_seconds(
    args: ModelArgs,
    rates: Rates,
    bar: int,
    *,
    num_tokens: int,
    seq_len: int,
    world_size: int,
    layer_bytes: float,
    layer_launches: int,
) -> float:
    """Computed seconds of a training step of one micro-batch of `num_tokens` on each GPU.

    `layer_bytes` per token and `layer_launches`: of one layer, forward and backward, bytes without
    those of products and attention. With FSDP2 (weights gathered once), float32 AdamW, clipping,
    and the loss in chunks (linear_cross_entropy.py). `bar`: which of the rates.
    """
    gemm, memory = rates.gemm_flops[bar], rates.memory_bytes[bar]
    q_dim, k_dim, v_dim = args.qkv_dims
    products = args.num_layers * args.dim * (2 * q_dim + k_dim + v_dim + args.ffn_in_dim)
    products += args.num_layers * args.dim * args.ffn_dim + args.vocab_size * args.dim
    attention = 7 * args.num_layers * q_dim * seq_len  # 2 forward, 5 backward: the causal half
    # logits: written, read, written as gradients, read by two products; dW is added to in float32
    head_bytes = 5 * 2 * args.vocab_size + 8 * args.vocab_size * args.dim / 4096
    token_s = 6 * products / gemm + attention / rates.attention_flops[bar]
    token_s += (args.num_layers * layer_bytes + head_bytes) / memory
    share = num_parameters(args) / world_size
    optimizer_s = 32 * share / memory  # weight and moments both ways, gradient twice
    # bfloat16 weights in, float32 gradients out
    network_s = 6 * share * (world_size - 1) / rates.network_bytes[bar]
    launches_s = args.num_layers * layer_launches * rates.launch_gap_s[bar]
    return num_tokens * token_s + optimizer_s + rates.exposed_network[bar] * network_s + launches_s
