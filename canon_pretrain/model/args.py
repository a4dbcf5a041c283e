"""The description of a model: its sizes, its variant, and its parameter and FLOP counts.

Letters: L layers, D hidden, H heads, G key-value heads, K head dim, F ffn dim, V vocabulary.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from canon_pretrain.core.errors import UserError, check_choice, nearest, suggestion

ROTARY = ("rope", "partial_rope_a", "partial_rope_b", "partial_rope_c")
POSITIONS = ("rope", "nope", "alibi", "h_alibi", *ROTARY[1:])
QK_NORMS = ("none", "full", "per_head")
CHOICES = {
    "position": POSITIONS,
    "init": ("paper", "lingua"),
    "qk_norm": QK_NORMS,
    "ffn": ("gated", "standard"),
    "ffn_activation": ("silu", "relu2", "gelu"),
    "norm": ("rmsnorm", "layernorm"),
}
CANON_SITES = "ABCD"
CANON_KERNELS = range(2, 17)


@dataclass(frozen=True)
class ModelArgs:
    """All options of one model; equal args mean equal initial weights.

    `num_kv_heads`: G, the heads of k and v (grouped-query attention); 0 means H.
    `position`: the partial layouts rotate one quarter of the dimensions (Figure 22): `a` half of
    the heads, half of each one's dims; `b` a quarter of the heads, all dims; `c` all heads, a
    quarter of each one's dims, or `partial_rope_dim` of them (stored as 0 for a quarter). `alibi`
    adds -2^(-8h/H) per token of distance to the scores of head h (1 .. H); in `h_alibi` head h of
    the first half attends to the last h tokens only.
    `canon_set`: any subset of the sites A, B, C, D of section 4; stored sorted and upper-case.
    `canon_trainable=False`: cst-Canon, fixed at its initial values (Figure 20).
    `ffn`: `gated` w2(act(w1 x) * w3 x), `standard` w2(act(w1 x)); `ffn_activation`: `silu`, or
    `relu2`, the square of relu (Figure 21), or `gelu`, GPT2's tanh form, in the standard one only.
    `norm`, `bias`: `layernorm`, and biases in it and in the blocks' linear layers (Figure 11).
    `qk_norm`: `full` RMSNorm over the whole vector of q and of k, before Canon-B (the released
    models); `per_head` over each head's K dims, one gain for all heads, after Canon-B (Qwen3's).
    `tie_embeddings`: the output matrix is the token embedding.
    `document_mask`: attention and Canon stop at the start of a document; `eos_id` ends one.
    `init`: `paper` N(0, 0.02); `lingua` a normal of std fan_in^-1/2 cut at 3 sigma.

    The default of a field added later means what earlier versions did. Raises UserError for a
    value that is out of range or conflicts with the others.
    """

    vocab_size: int = 32000
    num_layers: int = 24
    dim: int = 2048
    num_heads: int = 32
    num_kv_heads: int = 0
    ffn_dim: int = 5504
    ffn: str = "gated"
    ffn_activation: str = "silu"
    norm: str = "rmsnorm"
    bias: bool = False
    max_seq_len: int = 4096
    norm_eps: float = 1e-5
    position: str = "rope"
    partial_rope_dim: int = 0
    rope_theta: float = 10000.0
    canon_set: str = ""
    canon_kernel: int = 4
    canon_residual: bool = True
    canon_activation: bool = False
    canon_trainable: bool = True
    qk_norm: str = "none"
    tie_embeddings: bool = False
    document_mask: bool = False
    eos_id: int = 2
    init: str = "paper"
    init_seed: int = 0

    def __post_init__(self) -> None:
        letters = "".join(sorted(self.canon_set.upper()))
        if not set(letters) <= set(CANON_SITES) or len(set(letters)) < len(letters):
            raise UserError(
                "model.canon_set",
                f'canon_set = "{self.canon_set}": expected each of the sites A, B, C and D at most '
                'once, such as "AC", or "" for no Canon',
                given=self.canon_set,
            )
        # normalize, so that "ca" and "AC" are equal args
        object.__setattr__(self, "canon_set", letters)
        if self.num_kv_heads == self.num_heads:
            object.__setattr__(self, "num_kv_heads", 0)
        _check(self)
        if 4 * self.partial_rope_dim == self.head_dim:
            object.__setattr__(self, "partial_rope_dim", 0)

    @property
    def head_dim(self) -> int:
        return self.dim // self.num_heads

    @property
    def kv_heads(self) -> int:
        return self.num_kv_heads or self.num_heads

    @property
    def qkv_dims(self) -> tuple[int, int, int]:
        """The widths of q, k and v: H K, G K, G K."""
        kv_dim = self.kv_heads * self.head_dim
        return self.num_heads * self.head_dim, kv_dim, kv_dim

    @property
    def ffn_in_dim(self) -> int:
        """Channels between the feed-forward's two products, and of Canon-D: 2F gated, else F."""
        return 2 * self.ffn_dim if self.ffn == "gated" else self.ffn_dim

    @property
    def canon_channels(self) -> dict[str, int]:
        """The channels of each of this model's Canon sites."""
        channels = {"A": self.dim, "B": sum(self.qkv_dims), "C": self.dim, "D": self.ffn_in_dim}
        return {site: channels[site] for site in self.canon_set}

    @property
    def canon_bound(self) -> float:
        """Canon weights start in U(-bound, bound): PyTorch's Conv1d default, 1/2 at kernel 4."""
        return self.canon_kernel**-0.5

    @property
    def rope_share(self) -> int:
        """One in this many heads rotates, of q and of k: the first ones."""
        return {"partial_rope_a": 2, "partial_rope_b": 4}.get(self.position, 1)

    @property
    def rope_heads(self) -> int:
        """How many heads of q rotate: the first ones; 0 if positions are not rotary."""
        return self.num_heads // self.rope_share if self.position in ROTARY else 0

    @property
    def rope_dim(self) -> int:
        """How many dims of a rotating head rotate: the first ones; 0 if none does."""
        if self.partial_rope_dim:
            return self.partial_rope_dim
        divisor = {"partial_rope_a": 2, "partial_rope_c": 4}.get(self.position, 1)
        return self.head_dim // divisor if self.position in ROTARY else 0


def _check(args: ModelArgs) -> None:
    least = dict.fromkeys(("vocab_size", "num_layers", "dim", "num_heads", "ffn_dim"), 1)
    least |= {"max_seq_len": 1, "init_seed": 0, "num_kv_heads": 0, "partial_rope_dim": 0}
    for name, smallest in least.items():
        if (value := getattr(args, name)) < smallest:
            raise _out_of_range(name, value, f"an integer of at least {smallest}")
    for name in ("norm_eps", "rope_theta"):
        value = getattr(args, name)
        if not (math.isfinite(value) and value > 0):
            raise _out_of_range(name, value, "a finite number above 0")
    for name, choices in CHOICES.items():
        check_choice(name, getattr(args, name), choices)
    if args.canon_kernel not in CANON_KERNELS:
        raise _out_of_range("canon_kernel", args.canon_kernel, "2 to 16 (the paper's is 4)")
    if args.document_mask and not 0 <= args.eos_id < args.vocab_size:
        expected = f"a token id below vocab_size = {args.vocab_size}, for document_mask"
        raise _out_of_range("eos_id", args.eos_id, expected)
    if args.ffn_activation == "gelu" and args.ffn != "standard":
        message = 'ffn_activation = "gelu" needs ffn = "standard"'
        raise UserError("model.conflict", message, name="ffn_activation")
    for whole, part in (("dim", "num_heads"), ("num_heads", "kv_heads")):
        if getattr(args, whole) % getattr(args, part):
            raise UserError(
                "model.not_divisible",
                f"{whole} = {getattr(args, whole)} is not a multiple of "
                f"{part.replace('kv_', 'num_kv_')} = {getattr(args, part)}; change one of the two",
                name=whole,
                divisor=getattr(args, part),
            )
    _check_position(args)
    for name in ("canon_kernel", "canon_residual", "canon_activation", "canon_trainable"):
        if not args.canon_set and (given := getattr(args, name)) != getattr(ModelArgs, name):
            raise UserError(
                "model.conflict",
                f'{name} = {str(given).lower()} needs Canon layers, but canon_set = ""',
                name=name,
            )


def _out_of_range(name: str, given: float, expected: str) -> UserError:
    message = f"{name} = {given}: expected {expected}"
    return UserError("model.out_of_range", message, name=name, given=given)


def _check_position(args: ModelArgs) -> None:
    if args.partial_rope_dim:
        if args.position != "partial_rope_c":
            message = f'partial_rope_dim needs position = "partial_rope_c", not "{args.position}"'
            raise UserError("model.conflict", message, name="partial_rope_dim")
        if args.partial_rope_dim % 2 or args.partial_rope_dim >= args.head_dim:
            expected = f"an even number below the head dim, {args.head_dim}, or 0 for a quarter"
            raise _out_of_range("partial_rope_dim", args.partial_rope_dim, expected)
    # position -> divisors of the number of heads and of the head dim
    divisors = {"rope": (1, 2), "h_alibi": (2, 1), "partial_rope_a": (2, 4)}
    divisors |= {"partial_rope_b": (4, 2), "partial_rope_c": (1, 2 if args.partial_rope_dim else 8)}
    heads_divisor, dims_divisor = divisors.get(args.position, (1, 1))
    name = "num_heads" if args.position == "h_alibi" or not args.num_kv_heads else "num_kv_heads"
    sizes = {name: (getattr(args, name), heads_divisor), "head_dim": (args.head_dim, dims_divisor)}
    for size, (given, divisor) in sizes.items():
        if given % divisor:
            raise UserError(
                "model.not_divisible",
                f'position = "{args.position}" needs a {size} (dim / num_heads for head_dim) that '
                f"is a multiple of {divisor}, not {given}",
                name=size,
                divisor=divisor,
            )


def num_parameters(args: ModelArgs) -> int:
    """Return N, the parameters of `Transformer(args)`, in closed form; those of cst-Canon too."""
    q_dim, k_dim, v_dim = args.qkv_dims
    layer = args.dim * (2 * q_dim + k_dim + v_dim + args.ffn_in_dim + args.ffn_dim + 2)
    layer += sum(args.canon_channels.values()) * args.canon_kernel
    layer += {"none": 0, "full": q_dim + k_dim, "per_head": 2 * args.head_dim}[args.qk_norm]
    if args.bias:
        layer += q_dim + k_dim + v_dim + args.dim + args.ffn_in_dim + args.dim
    has_norm_bias = args.bias and args.norm == "layernorm"
    layer += 2 * args.dim * has_norm_bias
    ends = (1 if args.tie_embeddings else 2) * args.vocab_size * args.dim
    ends += args.dim * (1 + has_norm_bias)
    return ends + args.num_layers * layer


FLOPS_FORMULA = "PaLM's formula, 6(N - embeddings) + 12LHKT, causality not halved"


def flops_per_token(args: ModelArgs, seq_len: int) -> int:
    """Return 6 (N - V D) + 12 L H K T (PaLM, Chowdhery et al. 2022), as torchtitan does."""
    embedding = 0 if args.tie_embeddings else args.vocab_size * args.dim
    attention = 12 * args.num_layers * args.num_heads * args.head_dim * seq_len
    return 6 * (num_parameters(args) - embedding) + attention


# The paper's F = 8D/3 is rounded up to a multiple of 8: Canon-D's fast kernels need that.
FLAVORS: Mapping[str, ModelArgs] = MappingProxyType(
    {
        name: ModelArgs(v, n, d, h, ffn_dim=f, max_seq_len=t)
        for name, (v, n, d, h, f, t) in {
            "debug": (512, 2, 64, 4, 176, 128),
            "quickstart": (2048, 3, 128, 4, 344, 256),
            "4M": (2000, 4, 256, 4, 768, 512),  # seed 000: TinyStories
            "162M": (32000, 16, 768, 8, 2048, 4096),  # seed 001: Llama medium
            # the synthetic tasks' sizes, section 3
            "8L512D": (32000, 8, 512, 8, 1368, 4096),
            "8L768D": (32000, 8, 768, 12, 2048, 4096),
            "12L512D": (32000, 12, 512, 8, 1368, 4096),
            "12L768D": (32000, 12, 768, 12, 2048, 4096),
            "1b3": (32000, 24, 2048, 32, 5504, 4096),  # section 9 and appendix B
            # the released LlamaCanon checkpoints are wider
            "1b3_released": (32000, 24, 2048, 32, 5632, 4096),
            "1b7": (32000, 24, 2304, 24, 6144, 4096),  # SlimPajama, 300B tokens
        }.items()
    }
)


def flavor(name: str) -> ModelArgs:
    """Return the flavor `name`. Raises UserError for an unknown name."""
    if name not in FLAVORS:
        known = f"expected one of {', '.join(FLAVORS)}.{suggestion(name, FLAVORS)}"
        raise UserError(
            "model.unknown_flavor",
            f'model flavor "{name}" is not known; {known}',
            nearest=nearest(name, FLAVORS),
        )
    return FLAVORS[name]
