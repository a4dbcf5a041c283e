"""What bounds a figure: the bytes that Canon must move, and the products that a step must make.

Two forms of Canon are counted, by hand from the formula (spec: one read or write of every operand,
whose neighbours in time stay in caches): one kernel a site, and fused with what stands beside it,
where only what no neighbour touches anyway is left.
"""

from dataclasses import dataclass, replace

from canon_pretrain.model.args import ModelArgs, flops_per_token


@dataclass(frozen=True)
class Traffic:
    """Bytes per token and layer that Canon adds, forward and backward."""

    forward: int
    backward: int

    @property
    def total(self) -> int:
        return self.forward + self.backward


def one_kernel_a_site(args: ModelArgs, itemsize: int) -> Traffic:
    """Forward reads x and writes y; backward reads x and dy and writes dx."""
    channels = sum(args.canon_channels.values())
    return Traffic(2 * channels * itemsize, 3 * channels * itemsize)


def fused(args: ModelArgs, itemsize: int) -> Traffic:
    """Canon inside the kernels that read and write the same values without it as well.

    A and C are part of the norm, D of the activation: nothing is added. At B the rotation reads and
    writes its heads of q and k; Canon adds the other channels' (2 forward, 3 backward), and in
    backward x of the rotated ones, which the rotation by itself does not need.
    """
    if "B" not in args.canon_set:
        return Traffic(0, 0)
    rotated = args.rope_heads * args.head_dim
    rotated += (args.rope_heads * args.kv_heads // args.num_heads) * args.head_dim
    others = sum(args.qkv_dims) - rotated
    return Traffic(2 * others * itemsize, (3 * others + rotated) * itemsize)


def block_flops_per_token(args: ModelArgs, seq_len: int) -> int:
    """FLOPs of one token in one block, forward and backward, as `flops_per_token` counts them."""
    one, two = (flops_per_token(replace(args, num_layers=n), seq_len) for n in (1, 2))
    return two - one
