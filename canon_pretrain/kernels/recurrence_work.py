"""What the Triton kernels of recurrences launch, move and multiply, in closed form.

It needs no Triton: `--dry-run` computes times on a GPU from any machine. Bytes are those of each
tensor that a launch reads or writes, once: tiles that several programs read are near in time, so
that the cache has them. FLOPs are those of matrix products.

All sizes are per token and head: C tokens of a chunk, K key dim, V value dim, K V / C of a state
per chunk; `half` bytes of an activation (2 or 4), FULL of a float32.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from typing import NamedTuple

from canon_pretrain.kernels.work import Work

FULL = 4
CHUNK = 64
"""Tokens of a chunk: `triton/recurrence/chunks.py`."""
SSD_VALUES = 64
"""The most values of a head of Mamba2 that a program holds without spills."""
DELTA_KEYS = 128
"""The most keys of the delta rule with such chunks."""


class Sizes(NamedTuple):
    """The sizes of a recurrence, and the bytes of an activation."""

    num_heads: int
    K: int
    V: int
    half: int


class Costs(NamedTuple):
    """The costs of a pass per token and head; launches: per pass."""

    launches: int
    num_bytes: float
    flops: float

    def __add__(self, other: "Costs") -> "Costs":  # type: ignore[override]
        return Costs(
            launches=self.launches + other.launches,
            num_bytes=self.num_bytes + other.num_bytes,
            flops=self.flops + other.flops,
        )


def triton_work(
    mixer: str, direction: str, num_heads: int, key_dim: int, value_dim: int, itemsize: int
) -> Work:
    """Return the work of a "forward" or "backward" pass per token; launches: of the pass."""
    if mixer == "mamba2":  # wide heads are cut into parts
        num_parts = parts_of_head(value_dim)
        num_heads *= num_parts
        value_dim //= num_parts
    sizes = Sizes(num_heads, key_dim, value_dim, itemsize)
    forward, backward = _PASSES[mixer]
    costs = forward(sizes) if direction == "forward" else backward(sizes)

    # at the rate of attention, whose FLOPs are counted without causality's half
    flops = Counter({"attention": 2 * num_heads * costs.flops})
    return Work(
        launches=costs.launches,
        bytes_moved=num_heads * costs.num_bytes,
        flops=flops,
    )


def triton_kept_bytes(mixer: str, key_dim: int, itemsize: int) -> int:
    """Return the bytes per token and head that forward keeps for backward, beside its inputs."""
    if mixer != "gated_deltanet":
        return 0
    return 2 * _delta_chunk(key_dim) * itemsize  # T and P


def parts_of_head(head_dim: int) -> int:
    """Return into how many parts Mamba2's kernels cut a head's values: the fewest that fit."""
    for num_parts in range(1, head_dim):
        if head_dim % num_parts == 0 and head_dim // num_parts <= SSD_VALUES:
            return num_parts
    return 1


# -- GLA: kernels of triton/recurrence/gla.py


def _gla_forward(sizes: Sizes) -> Costs:
    return _gla_scores(sizes) + _gla_walk(sizes)


def _gla_backward(sizes: Sizes) -> Costs:
    _, K, V, half = sizes
    levels = CHUNK.bit_length() - 1
    score_gradients = Costs(
        launches=1,
        num_bytes=half * (2 * V + CHUNK),  # do, v; dA
        flops=2 * CHUNK * V,
    )
    # v, do, S, dS', and what passes through them: two of q's size, a sum per chunk
    state_gradients = Costs(
        launches=1,
        num_bytes=half * (2 * K + 2 * V + 2 * K * V / CHUNK) + FULL * K / CHUNK,
        flops=4 * K * V,
    )
    # q, k, dA, what passes through the states, and dq and dk in its place; log decays, their
    # gradients
    pair_gradients = Costs(
        launches=1,
        num_bytes=half * (6 * K + CHUNK) + FULL * (2 * K + K / CHUNK),
        flops=(6 * levels + 4) * CHUNK * K,
    )
    # k~, v, S; the decay of a chunk
    states = Costs(
        launches=1,
        num_bytes=half * (K + V + K * V / CHUNK) + FULL * K / CHUNK,
        flops=2 * K * V,
    )
    # dv, and dS, which is written
    backward_walk = _gla_walk(sizes) + Costs(0, half * K * V / CHUNK, 0)
    gradients = score_gradients + state_gradients + pair_gradients
    return _gla_scores(sizes) + states + backward_walk + gradients


def _gla_scores(sizes: Sizes) -> Costs:
    _, K, _, half = sizes
    levels = CHUNK.bit_length() - 1
    # q, k and their decayed ones, the scores; log decays, the decay of a chunk
    return Costs(
        launches=1,
        num_bytes=half * (4 * K + CHUNK) + FULL * (K + K / CHUNK),
        flops=2 * levels * CHUNK * K,
    )


def _gla_walk(sizes: Sizes) -> Costs:
    _, K, V, half = sizes
    # q~, k~, values, outputs, scores; the decay of a chunk
    return Costs(
        launches=1,
        num_bytes=half * (2 * K + 2 * V + CHUNK) + FULL * K / CHUNK,
        flops=2 * CHUNK * V + 4 * K * V,
    )


# -- Mamba2: kernels of triton/recurrence/ssd.py; K is its state N, of which all heads share B and C


def _ssd_forward(sizes: Sizes) -> Costs:
    num_heads, K, V, half = sizes
    # x, y, S, C; dt and two sums of log decays, scores
    outputs = Costs(
        launches=1,
        num_bytes=half * (2 * V + K * V / CHUNK + K / num_heads) + FULL * (3 + CHUNK / num_heads),
        flops=2 * CHUNK * V + 2 * K * V,
    )
    return _ssd_shared(sizes) + _ssd_states(sizes) + outputs


def _ssd_backward(sizes: Sizes) -> Costs:
    num_heads, K, V, half = sizes
    # x, dy, dx, dS', B; dt and two sums, ddt and the log decays' so far, scores, dscores, dB
    value_gradients = Costs(
        launches=1,
        num_bytes=half * (3 * V + K * V / CHUNK + K / num_heads)
        + FULL * (5 + (2 * CHUNK + K) / num_heads),
        flops=4 * CHUNK * V + 4 * K * V,
    )
    # dy, S, dS', C; dt and two sums, what was written of dt and log decays, ddt, dC
    state_gradients = Costs(
        launches=1,
        num_bytes=half * (V + 2 * K * V / CHUNK + K / num_heads) + FULL * (6 + K / num_heads),
        flops=4 * K * V,
    )
    # B, C, dB, dC; dscores, and dB and dC of the heads
    shared_gradients = Costs(
        launches=1,
        num_bytes=(half * 4 * K + FULL * (CHUNK + 2 * K)) / num_heads,
        flops=4 * CHUNK * K / num_heads,
    )
    states = _ssd_states(sizes) + _ssd_states(sizes)  # S again, and dS
    gradients = value_gradients + state_gradients + shared_gradients
    return _ssd_shared(sizes) + states + gradients


def _ssd_shared(sizes: Sizes) -> Costs:
    """Return the costs of the sums of log decays, and of the scores of all heads."""
    num_heads, K, _, half = sizes
    return Costs(
        launches=2,
        num_bytes=FULL * 4 + (half * 2 * K + FULL * CHUNK) / num_heads,
        flops=2 * CHUNK * K / num_heads,
    )


def _ssd_states(sizes: Sizes) -> Costs:
    num_heads, K, V, half = sizes
    return Costs(
        launches=1,
        num_bytes=half * (V + K * V / CHUNK + K / num_heads) + FULL * 3,
        flops=2 * K * V,
    )


# -- the gated delta rule: kernels of triton/recurrence/delta.py


def _delta_forward(sizes: Sizes) -> Costs:
    _, K, V, half = sizes
    C = _delta_chunk(K)
    # q, k, v, o, T, P; the log decay and the step
    walk = Costs(
        launches=1,
        num_bytes=half * (2 * K + 2 * V + 2 * C) + FULL * 2,
        flops=6 * K * V + 4 * C * V,
    )
    return _delta_chunks(sizes) + walk


def _delta_backward(sizes: Sizes) -> Costs:
    _, K, V, half = sizes
    C = _delta_chunk(K)
    # forward again: k, v, z, T, S
    forward_walk = Costs(
        launches=1,
        num_bytes=half * (K + 2 * V + C + K * V / C) + FULL * 2,
        flops=4 * K * V + 2 * C * V,
    )
    # q, k, do, dv, T, P, dS'
    backward_walk = Costs(
        launches=1,
        num_bytes=half * (2 * K + 2 * V + 2 * C + K * V / C) + FULL * 2,
        flops=6 * K * V + 4 * C * V,
    )
    # q, k, dq, dk, z, do, dv, S, dS'; the log decay, the step and their gradients
    gradients = Costs(
        launches=1,
        num_bytes=half * (4 * K + 3 * V + 2 * K * V / C) + FULL * 4,
        flops=6 * K * V + 4 * C * V + 10 * C * K,
    )
    return forward_walk + backward_walk + gradients


def _delta_chunks(sizes: Sizes) -> Costs:
    _, K, _, half = sizes
    C = _delta_chunk(K)
    # q, k, T, P; the inverse by substitution and joins is about another C^2
    return Costs(
        launches=1,
        num_bytes=half * (2 * K + 2 * C) + FULL * 2,
        flops=4 * C * K + C**2,
    )


def _delta_chunk(key_dim: int) -> int:
    """Return C: wide keys take half as many tokens."""
    return CHUNK // 2 if key_dim > DELTA_KEYS else CHUNK


_PASSES: Mapping[str, tuple[Callable[[Sizes], Costs], Callable[[Sizes], Costs]]] = {
    "gla": (_gla_forward, _gla_backward),
    "mamba2": (_ssd_forward, _ssd_backward),
    "gated_deltanet": (_delta_forward, _delta_backward),
}
