"""Parameters, FLOPs and bytes of state of a model, in closed form and without torch.

Of a recurrent mixer, the closed forms are in mixer_table.py; of a mixer of the user's own, they are
counted by running it. Functions of `layer` take the arguments of one layer
(`ModelArgs.layer_args`).

Letters: L layers, D hidden, H heads, K key width and V value width of a head, F ffn dim, E experts,
V D the size of the embedding.
"""

from typing import TYPE_CHECKING, NamedTuple

from canon_pretrain.model.args import ModelArgs
from canon_pretrain.model.mixer_table import RecurrentMixer

if TYPE_CHECKING:
    from canon_pretrain.model.mixers import Measures

DYNAMIC_RANK = 15
"""Rank of what a dynamic Canon filter adds to its taps."""
STATE_BYTES = 4  # recurrent states and Canon's sums are float32


def num_parameters(args: ModelArgs) -> int:
    """Return N, the parameters of `Transformer(args)`, in closed form; those of cst-Canon too."""
    embedding = args.vocab_size * args.dim
    number = embedding + _norm_parameters(args)
    for layer, count in args.layer_counts:
        number += count * layer_parameters(layer)
    if not args.tie_embeddings:
        number += embedding  # the output matrix
    if args.embed_norm:
        number += _norm_parameters(args)
    if args.smear:
        number += args.smear_dim + 1  # gate and scale
    return number


def active_parameters(args: ModelArgs) -> int:
    """Return the parameters that one token is computed with: of its own experts only."""
    number = num_parameters(args)
    for layer, count in args.layer_counts:
        if layer.ffn == "moe":
            num_idle = layer.num_experts - layer.experts_per_token
            number -= count * num_idle * _expert_parameters(layer)
    return number


def routed_parameters(args: ModelArgs) -> int:
    """Return the parameters of all experts to which tokens are sent."""
    number = 0
    for layer, count in args.layer_counts:
        if layer.ffn == "moe":
            number += count * layer.num_experts * _expert_parameters(layer)
    return number


def layer_parameters(args: ModelArgs) -> int:
    """Return the parameters of one block."""
    # The mixer, and the norm of its input or output
    number = _mixer_parameters(args) + _norm_parameters(args)

    number += _canon_parameters(args)

    # The feed-forward, and its norm
    if args.ffn == "none":
        return number
    number += _norm_parameters(args)
    if args.ffn == "moe":
        num_experts = args.num_experts + args.num_shared_experts
        router = args.dim * args.num_experts
        return number + router + num_experts * _expert_parameters(args)
    if args.bias:
        number += args.ffn_in_dim + args.dim
    return number + args.dim * (args.ffn_in_dim + args.ffn_dim)


def _canon_parameters(args: ModelArgs) -> int:
    """Return the parameters of a layer's Canon sites but those in a mixer of the user's own."""
    num_channels = sum(args.canon_channels.values())
    if args.canon_filter == "scalar":
        return len(args.canon_channels) * args.canon_kernel
    if args.canon_filter == "shift":
        return num_channels

    # taps, and with dynamic filters `up` (R per tap) and `down`
    taps = num_channels * args.canon_kernel
    if args.canon_filter == "dynamic":
        return taps + DYNAMIC_RANK * (taps + args.dim * sum(args.canon_parts.values()))
    if args.canon_filter == "dynamic_heads":
        dynamic_sites = filter(args.is_dynamic_at, args.canon_channels)
        num_heads = sum(map(args.canon_heads_at, dynamic_sites))
        return taps + args.dim * num_heads * args.canon_kernel
    return taps


def _norm_parameters(args: ModelArgs) -> int:
    if args.bias and args.norm == "layernorm":
        return 2 * args.dim
    return args.dim


def _expert_parameters(args: ModelArgs) -> int:
    num_matrices = 3 if args.moe_gated else 2
    return num_matrices * args.dim * args.ffn_dim


def _mixer_parameters(args: ModelArgs) -> int:
    if args.mixer == "attention":
        return _attention_parameters(args)
    if args.recurrent is not None:
        return args.recurrent.num_parameters(args)
    return _measures(args).num_parameters


def _attention_parameters(args: ModelArgs) -> int:
    q_dim, k_dim, v_dim = args.qkv_dims
    number = args.dim * (2 * q_dim + k_dim + v_dim)  # wo is as large as wq
    if args.qk_norm == "full":
        number += q_dim + k_dim
    elif args.qk_norm == "per_head":
        number += 2 * args.head_dim
    if args.bias:
        number += q_dim + k_dim + v_dim + args.dim
    if args.attention_gate == "per_channel":
        number += args.dim * q_dim
        if args.bias:
            number += q_dim
    if args.bias_extent:  # wr and the profiles of the learned biases
        number += args.relative_dim * (args.dim * args.num_heads + args.bias_extent)
    return number


def _measures(layer: ModelArgs) -> "Measures":
    from canon_pretrain.model.mixers import measure  # torch, for a class of the user's own only

    return measure(layer)


def flops_per_token(args: ModelArgs, seq_len: int) -> int:
    """Return 6 (N - V D) + 12 L H K T (PaLM, Chowdhery et al. 2022), as torchtitan does.

    N counts the token's own experts, T at most the window. A recurrence writes and reads a state of
    V columns instead of T keys and values: 12 L H K V, and 18 for the delta rule, which reads it
    once more; chunks do more. Biases by distance multiply their C E parameters once per head.
    Products of the user's own mixer are counted.
    """
    number = active_parameters(args)
    if not args.tie_embeddings:  # a tied embedding is also the output matrix
        number -= args.vocab_size * args.dim
    mixing = sum(count * _mixing_flops(layer, seq_len) for layer, count in args.layer_counts)
    # 6 FLOPs per parameter: a multiply-add forward, and two backward
    return 6 * number + mixing


def _mixing_flops(layer: ModelArgs, seq_len: int) -> int:
    """Return the FLOPs of a token in a layer's mixer that are no products with parameters."""
    if layer.is_own_mixer:
        measures = _measures(layer)
        return round(measures.flops_per_token(seq_len) - 6 * measures.num_parameters)
    if layer.mixer == "attention":
        num_keys = min(seq_len, layer.window or seq_len)
        # q k^T and the sum of values are 2 FLOPs each per key and dim, 3 times with backward
        flops = 12 * layer.num_heads * layer.head_dim * num_keys
        # each head multiplies the profiles of biases by distance, which 6 N counts once
        return flops + 6 * (layer.num_heads - 1) * layer.relative_dim * layer.bias_extent
    assert layer.recurrent is not None
    return _flops_per_state_element(layer.recurrent) * state_size(layer)


def flops_formula(args: ModelArgs) -> str:
    """Return the formula of `flops_per_token`."""
    if args.pattern:
        return "6(N - embeddings) + the mixing of each layer"
    if args.is_own_mixer:
        return "6(N - embeddings) + further products of the mixer, counted"
    if args.bias_extent:
        return "PaLM's formula, 6(N - embeddings) + 12LHKT, + 6LHCE of biases by distance"
    if args.window:
        return "PaLM's formula with a window of W tokens, 6(N - embeddings) + 12LHKW"
    if args.mixer == "attention":
        return "PaLM's formula, 6(N - embeddings) + 12LHKT, causality not halved"
    assert args.recurrent is not None
    factor = _flops_per_state_element(args.recurrent)
    return f"6(N - embeddings) + {factor}LHKV, a recurrence of states; chunks do more"


def _flops_per_state_element(mixer: RecurrentMixer) -> int:
    return 6 * mixer.state_products  # 2 FLOPs each, times 3 with backward


def state_size(args: ModelArgs) -> int:
    """Return the numbers of a recurrent mixer's state, of one layer; 0 for attention."""
    if args.mixer == "attention":
        return 0
    if args.is_own_mixer:
        return _measures(args).state_per_row
    return args.num_heads * args.key_dim * args.value_dim


class StateBytes(NamedTuple):
    """What decoding holds of each row."""

    per_token: int
    per_row: int
    """At any length."""


def state_bytes(args: ModelArgs, itemsize: int) -> StateBytes:
    """Return the bytes that decoding holds per token, and per row at any length.

    Per token: keys and values, of `itemsize` bytes; of a window, per row. Per row, in float32:
    states, and the sums of Canon and of the native conv1d; inputs of dynamic Canon, of `itemsize`
    bytes.
    """
    per_token = 0
    per_row = 0
    for layer, count in args.layer_counts:
        layer_bytes = _layer_state_bytes(layer, itemsize)
        per_token += count * layer_bytes.per_token
        per_row += count * layer_bytes.per_row
    if args.smear:
        per_row += args.dim * itemsize  # the last embedding
    return StateBytes(per_token, per_row)


def _layer_state_bytes(args: ModelArgs, itemsize: int) -> StateBytes:
    per_token = 0
    if args.is_own_mixer:
        per_token = _measures(args).state_per_token * itemsize
    elif args.mixer == "attention":
        _, k_dim, v_dim = args.qkv_dims
        per_token = (k_dim + v_dim) * itemsize

    # for each of the K - 1 tokens in reach
    per_reached_token = 0
    for site, num_channels in args.canon_channels.items():
        canon_itemsize = itemsize if args.is_dynamic_at(site) else STATE_BYTES
        per_reached_token += canon_itemsize * num_channels
    if args.mixer_conv:
        per_reached_token += STATE_BYTES * args.conv_channels
    per_row = STATE_BYTES * state_size(args) + (args.canon_kernel - 1) * per_reached_token
    if args.window and not args.is_own_mixer:  # whose window is part of its state
        return StateBytes(0, per_row + args.window * per_token)
    return StateBytes(per_token, per_row)
