"""The description of a model: its sizes and its variant.

Letters: L layers, D hidden, H heads, G key-value heads, K head dim, F ffn dim, V vocabulary.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from canon_pretrain.core.errors import UserError, check_choice, nearest, suggestion

ROTARY = ("rope", "partial_rope_a", "partial_rope_b", "partial_rope_c")
POSITIONS = ("rope", "nope", "alibi", "h_alibi", *ROTARY[1:])
QK_NORMS = ("none", "full", "per_head")
MIXERS = ("attention", "gla", "mamba2", "gated_deltanet")
CHOICES = {
    "mixer": MIXERS,
    "position": POSITIONS,
    "init": ("paper", "lingua"),
    "qk_norm": QK_NORMS,
    "gla_feature_map": ("identity", "elu"),
    "ffn": ("gated", "standard", "moe", "none"),
    "ffn_activation": ("silu", "relu2", "gelu"),
    "moe_balance": ("bias", "loss", "none"),
    "norm": ("rmsnorm", "layernorm"),
    "canon_filter": ("static", "dynamic"),
}
_NEEDS = {
    **dict.fromkeys(("position", "qk_norm", "num_kv_heads", "partial_rope_dim"), ("attention",)),
    "bias": ("attention",),
    "mixer_conv": MIXERS[1:],
    **dict.fromkeys(("expand_k", "expand_v", "output_gate_rank"), ("gla", "gated_deltanet")),
    "gla_feature_map": ("gla",),
    **dict.fromkeys(("state_dim", "mimetic_init"), ("mamba2",)),
}
"""The mixers of which a field is an option; `position` is then "nope"."""
_MOE_FIELDS = """num_experts experts_per_token num_shared_experts moe_gated moe_capacity moe_balance
    moe_balance_rate""".split()
_CANON_FIELDS = "canon_kernel canon_residual canon_activation canon_trainable canon_filter".split()
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
    `canon_filter`: `dynamic` adds to each tap what the token itself asks for (model/canon.py).
    `mixer`: what mixes tokens in a block: attention, or a recurrence of states (H heads, K key
    width, V value width): `gla` and `gated_deltanet` with H K = `expand_k` D, H V = `expand_v` D
    and a gate of the output (of rank `output_gate_rank`, 0 for full), `mamba2` with K =
    `state_dim`, H V = 2 D. They have no positions (`nope`). `mixer_conv`: their native conv1d with
    SiLU, of `canon_kernel` taps, which Canon-B replaces. `gla_feature_map`: `elu` is elu + 1 of q
    and k. `mimetic_init`: Trockman et al.'s initial values of Mamba2.
    `ffn`: `gated` w2(act(w1 x) * w3 x), `standard` w2(act(w1 x)), `none` (Mamba2's), or `moe`:
    each token goes to `experts_per_token` of `num_experts` feed-forwards of width F, standard or
    gated (`moe_gated`), and to `num_shared_experts` more. `moe_capacity`: in training an expert
    takes at most this many times its share of a sequence (paper: 2), 0 for any number.
    `moe_balance`: a `loss` of each sequence (Switch) or a `bias` of the routing scores
    (DeepSeek-V3) evens the load, by `moe_balance_rate`.
    `ffn_activation`: `silu`, or `relu2`, the square of relu (Figure 21), or `gelu`, GPT2's tanh
    form, in the standard one only.
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
    mixer: str = "attention"
    mixer_conv: bool = False
    expand_k: float = 0.5
    expand_v: float = 1.0
    output_gate_rank: int = 0
    gla_feature_map: str = "identity"
    state_dim: int = 64
    mimetic_init: bool = False
    ffn_dim: int = 5504
    ffn: str = "gated"
    ffn_activation: str = "silu"
    num_experts: int = 32
    experts_per_token: int = 1
    num_shared_experts: int = 0
    moe_gated: bool = False
    moe_capacity: float = 0.0
    moe_balance: str = "bias"
    moe_balance_rate: float = 1e-3
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
    canon_filter: str = "static"
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
    def key_dim(self) -> int:
        """K of a recurrent mixer: the rows of a head's state."""
        if self.mixer == "mamba2":
            return self.state_dim
        return round(self.expand_k * self.dim) // self.num_heads

    @property
    def value_dim(self) -> int:
        """V of a recurrent mixer: the columns of a head's state."""
        expand = 2.0 if self.mixer == "mamba2" else self.expand_v
        return round(expand * self.dim) // self.num_heads

    @property
    def mixer_parts(self) -> tuple[int, ...]:
        """Channels of Canon-B: of q, k and v, or of all that Mamba2 projects its input to."""
        if self.mixer == "attention":
            return self.qkv_dims
        if self.mixer == "mamba2":  # z, [x|B|C] and dt
            return 2 * self.dim, 2 * self.dim + 2 * self.state_dim, self.num_heads
        k_dim = self.num_heads * self.key_dim
        return k_dim, k_dim, self.num_heads * self.value_dim

    @property
    def conv_channels(self) -> int:
        """Channels of the native conv1d: those of q, k and v, or of Mamba2's x, B and C."""
        return self.mixer_parts[1] if self.mixer == "mamba2" else sum(self.mixer_parts)

    @property
    def reach(self) -> int:
        """How many tokens before a token its block's convolutions and state depend on directly."""
        has_conv = self.canon_set or self.mixer != "attention"
        return self.canon_kernel - 1 if has_conv else 0

    @property
    def ffn_in_dim(self) -> int:
        """Channels between the feed-forward's two products, and of Canon-D: 2F gated, else F."""
        return 2 * self.ffn_dim if self.ffn == "gated" else self.ffn_dim

    @property
    def canon_channels(self) -> dict[str, int]:
        """The channels of each of this model's Canon sites."""
        channels = {"A": self.dim, "B": sum(self.mixer_parts), "C": self.dim, "D": self.ffn_in_dim}
        return {site: channels[site] for site in self.canon_set}

    @property
    def canon_parts(self) -> dict[str, int]:
        """Of how many linear layers each of this model's Canon sites mixes the outputs, or 1."""
        parts = {"B": 1 if self.mixer == "mamba2" else 3, "D": 2 if self.ffn == "gated" else 1}
        return {site: parts.get(site, 1) for site in self.canon_set}

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
    least |= {"state_dim": 1, "output_gate_rank": 0, "num_experts": 1, "experts_per_token": 1}
    least |= {"num_shared_experts": 0, "eos_id": 0}
    for name, smallest in least.items():
        if (value := getattr(args, name)) < smallest:
            raise _out_of_range(name, value, f"an integer of at least {smallest}")
    for name in ("norm_eps", "rope_theta", "expand_k", "expand_v"):
        value = getattr(args, name)
        if not (math.isfinite(value) and value > 0):
            raise _out_of_range(name, value, "a finite number above 0")
    for name in ("moe_capacity", "moe_balance_rate"):
        value = getattr(args, name)
        if not (math.isfinite(value) and value >= 0):
            raise _out_of_range(name, value, "a finite number of at least 0")
    for name, choices in CHOICES.items():
        check_choice(name, getattr(args, name), choices)
    if args.canon_kernel not in CANON_KERNELS:
        raise _out_of_range("canon_kernel", args.canon_kernel, "2 to 16 (the paper's is 4)")
    if args.document_mask and not 0 <= args.eos_id < args.vocab_size:
        raise _out_of_range(
            "eos_id",
            args.eos_id,
            f"a token id below vocab_size = {args.vocab_size}, for document_mask",
        )
    if args.ffn_activation == "gelu" and args.ffn not in ("standard", "moe"):
        raise UserError(
            "model.conflict",
            'ffn_activation = "gelu" needs ffn = "standard"',
            name="ffn_activation",
        )
    _check_divisible(args)
    _check_position(args)
    _check_mixer(args)
    _check_ffn(args)
    if args.canon_filter == "dynamic" and not args.canon_trainable:
        _refuse(args, ["canon_trainable"], 'canon_filter = "static"')
    if not args.canon_set:
        has_conv = {"canon_kernel"} if args.mixer_conv else set()
        _refuse(args, set(_CANON_FIELDS) - has_conv, 'Canon layers, but canon_set = ""')


def _check_divisible(args: ModelArgs) -> None:
    parts: list[tuple[str, float, str, int]]
    parts = [("dim", args.dim, "num_heads", args.num_heads)]
    if args.mixer == "attention":
        parts.append(("num_heads", args.num_heads, "num_kv_heads", args.kv_heads))
    elif args.mixer == "mamba2":
        parts = [("2 dim", 2 * args.dim, "num_heads", args.num_heads)]
    else:
        widths = {"expand_k": args.expand_k * args.dim, "expand_v": args.expand_v * args.dim}
        heads = "num_heads", args.num_heads
        parts = [(f"{name} dim", width, *heads) for name, width in widths.items()]
    for whole, width, part, number in parts:
        if width % number:
            raise UserError(
                "model.not_divisible",
                f"{whole} = {width:g} is not a multiple of {part} = {number}; "
                "change one of the two",
                name=whole,
                divisor=number,
            )


def _refuse(args: ModelArgs, names: Iterable[str], needed: str) -> None:
    """Raise UserError if one of the fields is not its default, because it needs something else."""
    for name in names:
        if (given := getattr(args, name)) != getattr(ModelArgs, name):
            raise UserError(
                "model.conflict", f"{name} = {str(given).lower()} needs {needed}", name=name
            )


def _check_mixer(args: ModelArgs) -> None:
    if args.mixer != "attention" and args.position != "nope":
        message = f'mixer = "{args.mixer}" has no positions: set position = "nope", not '
        raise UserError("model.conflict", f'{message}"{args.position}"', name="position")
    for name, mixers in _NEEDS.items():
        if args.mixer not in mixers and name != "position":
            _refuse(args, [name], f"mixer = {' or '.join(mixers)}, not {args.mixer}")
    if args.mixer_conv and "B" in args.canon_set:
        message = "mixer_conv = true beside Canon-B, which replaces it: set mixer_conv = false, or "
        raise UserError("model.conflict", f"{message}canon_set without B", name="mixer_conv")


def _check_ffn(args: ModelArgs) -> None:
    if args.ffn != "moe":
        _refuse(args, _MOE_FIELDS, f'ffn = "moe", not "{args.ffn}"')
    elif args.experts_per_token > args.num_experts:
        raise _out_of_range(
            "experts_per_token", args.experts_per_token, f"at most num_experts = {args.num_experts}"
        )
    elif args.bias or args.moe_gated and args.ffn_activation == "gelu":
        name = "bias" if args.bias else "ffn_activation"
        raise UserError(
            "model.conflict",
            f'{name} = {getattr(args, name)} is no option of these experts (ffn = "moe")',
            name=name,
        )
    if args.ffn == "none":
        _refuse(args, ["ffn_activation"], 'a feed-forward, but ffn = "none"')
    reasons = {
        "none": 'ffn = "none" has no feed-forward for C and D: choose from A and B',
        "moe": 'ffn = "moe" sends neighboring tokens to different experts, whose inner channels D '
        "could not mix: choose from A, B and C",
    }
    refused = {"none": "CD", "moe": "D"}.get(args.ffn, "")
    if set(refused) & set(args.canon_set):
        raise UserError(
            "model.conflict",
            f'canon_set = "{args.canon_set}": {reasons[args.ffn]}',
            name="canon_set",
        )


def _out_of_range(name: str, given: float, expected: str) -> UserError:
    message = f"{name} = {given}: expected {expected}"
    return UserError("model.out_of_range", message, name=name, given=given)


def _check_position(args: ModelArgs) -> None:
    if args.partial_rope_dim:
        if args.position != "partial_rope_c":
            raise UserError(
                "model.conflict",
                f'partial_rope_dim needs position = "partial_rope_c", not "{args.position}"',
                name="partial_rope_dim",
            )
        if args.partial_rope_dim % 2 or args.partial_rope_dim >= args.head_dim:
            raise _out_of_range(
                "partial_rope_dim",
                args.partial_rope_dim,
                f"an even number below the head dim, {args.head_dim}, or 0 for a quarter",
            )
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


def fill_sizes(base: ModelArgs, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return `given` with what the paper changes in a flavor `base` for its mixer and feed-forward.

    A layer has about 12 D^2 parameters as Llama's, or 6 D^2 of Mamba2 without feed-forward, of
    which there are twice as many (appendix C).
    """
    found = dict(given)
    dim, mixer = found.get("dim", base.dim), found.get("mixer", base.mixer)
    if mixer != base.mixer:
        found.setdefault("position", "nope")
        heads = {"gla": 4, "mamba2": 16, "gated_deltanet": 12}
        found.setdefault("num_heads", heads.get(mixer, base.num_heads))  # refused by ModelArgs
        has_canon_b = "B" in str(found.get("canon_set", base.canon_set)).upper()
        found.setdefault("mixer_conv", mixer != "gla" and not has_canon_b)
    if mixer == "gated_deltanet" != base.mixer:
        found = {"expand_k": 0.75, "expand_v": 1.5} | found
    if mixer == "mamba2" != base.mixer:
        found.setdefault("ffn", "none")
    ffn = found.get("ffn", base.ffn)
    if ffn == "none" != base.ffn:
        found.setdefault("num_layers", 2 * base.num_layers)
    if mixer in ("mamba2", "gated_deltanet") and mixer != base.mixer and ffn == "gated":
        found.setdefault("ffn_dim", 2 * dim)
    if ffn in (widths := {"standard": 4 * dim, "moe": dim}) and ffn != base.ffn:
        found.setdefault("ffn_dim", widths[ffn])
    return found
