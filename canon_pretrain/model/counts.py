"""Parameters, FLOPs and bytes of state of a model, in closed form; no torch.

Letters: L layers, D hidden, H heads, K key width and V value width of a head, F ffn dim, E experts,
V D the size of the embedding.
"""

from canon_pretrain.model.args import ModelArgs

DECAY_RANK = 16
"""Rank of GLA's gate of the decay."""
DYNAMIC_RANK = 15
"""Rank of what a dynamic Canon filter adds to its taps."""


def num_parameters(args: ModelArgs) -> int:
    """Return N, the parameters of `Transformer(args)`, in closed form; those of cst-Canon too."""
    ends = (1 if args.tie_embeddings else 2) * args.vocab_size * args.dim
    return ends + _norm_parameters(args) + args.num_layers * layer_parameters(args)


def active_parameters(args: ModelArgs) -> int:
    """Return the parameters that one token is computed with: of its own experts only."""
    idle = args.num_experts - args.experts_per_token if args.ffn == "moe" else 0
    return num_parameters(args) - args.num_layers * idle * _expert_parameters(args)


def routed_parameters(args: ModelArgs) -> int:
    """Return the parameters of all experts to which tokens are sent."""
    if args.ffn != "moe":
        return 0
    return args.num_layers * args.num_experts * _expert_parameters(args)


def layer_parameters(args: ModelArgs) -> int:
    """Return the parameters of one block."""
    norms = 1 if args.ffn == "none" else 2
    layer = _mixer_parameters(args) + norms * _norm_parameters(args)
    taps = sum(args.canon_channels.values()) * args.canon_kernel
    layer += taps
    if args.canon_filter == "dynamic":
        layer += DYNAMIC_RANK * (taps + args.dim * sum(args.canon_parts.values()))
    if args.ffn == "moe":
        experts = args.num_experts + args.num_shared_experts
        layer += args.dim * args.num_experts + experts * _expert_parameters(args)
    elif args.ffn != "none":
        layer += args.dim * (args.ffn_in_dim + args.ffn_dim)
        layer += args.bias * (args.ffn_in_dim + args.dim)
    return layer


def _norm_parameters(args: ModelArgs) -> int:
    return args.dim * (1 + (args.bias and args.norm == "layernorm"))


def _expert_parameters(args: ModelArgs) -> int:
    return (3 if args.moe_gated else 2) * args.dim * args.ffn_dim


def _mixer_parameters(args: ModelArgs) -> int:
    dim, heads = args.dim, args.num_heads
    if args.mixer == "attention":
        q_dim, k_dim, v_dim = args.qkv_dims
        number = dim * (2 * q_dim + k_dim + v_dim)
        number += {"none": 0, "full": q_dim + k_dim, "per_head": 2 * args.head_dim}[args.qk_norm]
        return number + args.bias * (q_dim + k_dim + v_dim + dim)
    conv = args.conv_channels * args.canon_kernel * args.mixer_conv
    if args.mixer == "mamba2":
        inner = heads * args.value_dim
        conv += args.conv_channels * args.mixer_conv  # its biases
        return dim * (sum(args.mixer_parts) + inner) + 3 * heads + inner + conv
    k_dim, _, v_dim = args.mixer_parts
    rank = args.output_gate_rank
    gate = rank * (dim + v_dim) + v_dim if rank else dim * v_dim
    number = dim * (2 * k_dim + 2 * v_dim) + gate + args.value_dim + conv
    if args.mixer == "gla":
        return number + DECAY_RANK * (dim + k_dim) + k_dim
    return number + 2 * dim * heads + 2 * heads


def flops_per_token(args: ModelArgs, seq_len: int) -> int:
    """Return 6 (N - V D) + 12 L H K T (PaLM, Chowdhery et al. 2022), as torchtitan does.

    N counts the token's own experts. A recurrence writes and reads a state of V columns instead of
    T keys and values: 12 L H K V, and 18 for the delta rule, which reads it once more; chunks do
    more.
    """
    embedding = 0 if args.tie_embeddings else args.vocab_size * args.dim
    if args.mixer == "attention":
        mixing = 12 * args.num_heads * args.head_dim * seq_len
    else:
        mixing = _per_state(args) * state_size(args)
    return 6 * (active_parameters(args) - embedding) + args.num_layers * mixing


def flops_formula(args: ModelArgs) -> str:
    """Return the formula of `flops_per_token`."""
    if args.mixer == "attention":
        return "PaLM's formula, 6(N - embeddings) + 12LHKT, causality not halved"
    return f"6(N - embeddings) + {_per_state(args)}LHKV, a recurrence of states; chunks do more"


def _per_state(args: ModelArgs) -> int:
    return 18 if args.mixer == "gated_deltanet" else 12


def state_size(args: ModelArgs) -> int:
    """Return the numbers of a recurrent mixer's state, of one layer; 0 for attention."""
    if args.mixer == "attention":
        return 0
    return args.num_heads * args.key_dim * args.value_dim


def state_bytes(args: ModelArgs, itemsize: int) -> tuple[int, int]:
    """Return the bytes that decoding holds per token, and per row at any length.

    Per token: keys and values, of `itemsize` bytes. Per row, in float32: states, and the sums of
    Canon and of the native conv1d; inputs of dynamic Canon, of `itemsize` bytes.
    """
    kv = sum(args.qkv_dims[1:]) * itemsize if args.mixer == "attention" else 0
    row = 4 * args.conv_channels * args.mixer_conv
    row += (4 if args.canon_filter == "static" else itemsize) * sum(args.canon_channels.values())
    row = 4 * state_size(args) + (args.canon_kernel - 1) * row
    return args.num_layers * kv, args.num_layers * row
