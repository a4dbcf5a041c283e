"""What a model is: its sizes, its variant, and the numbers that follow without building it.

The first stop of `model/`: `titan/job_config.py` fills a `ModelArgs` from TOML, starting from a
named flavor, and `Transformer` is built from it. A flavor is a size; Canon, positions and QK-norm
are set on top.

Letters: L layers, D hidden, H heads, K head dim, F ffn dim, V vocabulary, T tokens.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from canon_pretrain.errors import UserError, nearest

POSITIONS = ("rope", "nope", "partial_rope_a", "partial_rope_b", "partial_rope_c")
INITS = ("paper", "lingua")
QK_NORMS = ("none", "full", "per_head")
CANON_SITES = "ABCD"
CANON_KERNELS = (2, 3, 4)


@dataclass(frozen=True)
class ModelArgs:
    """The whole description of one model; equal args give equal initial weights.

    `position`: the partial layouts rotate one quarter of the dimensions (Figure 22): `a` half of
    the heads, half of each one's dims; `b` a quarter of the heads, all dims; `c` all heads, a
    quarter of each one's dims.
    `canon_set`: any subset of the sites A, B, C, D of section 4; stored sorted and upper-case.
    `qk_norm`: `full` RMSNorm over the whole H*K vector of q and of k, before Canon-B (the released
    models); `per_head` over each head's K dims, one gain for all heads, after Canon-B (Qwen3's).
    `init`: `paper` N(0, 0.02); `lingua` a normal of std fan_in^-1/2 cut at 3 sigma.

    Raises UserError for any value outside its range or that does not fit the others.
    """

    vocab_size: int = 32000
    num_layers: int = 24
    dim: int = 2048
    num_heads: int = 32
    ffn_dim: int = 5504
    max_seq_len: int = 4096
    norm_eps: float = 1e-5
    position: str = "rope"
    rope_theta: float = 10000.0
    canon_set: str = ""
    canon_kernel: int = 4
    canon_residual: bool = True
    canon_activation: bool = False
    qk_norm: str = "none"
    init: str = "paper"
    init_seed: int = 0

    def __post_init__(self) -> None:
        # frozen: the one place where a field is rewritten, so that "ca" and "AC" are equal args
        object.__setattr__(self, "canon_set", _normalised_canon_set(self.canon_set))
        _check_ranges(self)
        _check_choice("position", self.position, POSITIONS)
        _check_choice("init", self.init, INITS)
        _check_choice("qk_norm", self.qk_norm, QK_NORMS)
        _check_heads(self)

    @property
    def head_dim(self) -> int:
        """K, the width of one head."""
        return self.dim // self.num_heads

    @property
    def canon_bound(self) -> float:
        """Canon weights start in U(-bound, bound): PyTorch's Conv1d default, 1/2 at kernel 4."""
        return self.canon_kernel**-0.5

    @property
    def rope_heads(self) -> int:
        """How many heads rotate: always the first ones; 0 for nope."""
        divisor = {"partial_rope_a": 2, "partial_rope_b": 4}.get(self.position, 1)
        return 0 if self.position == "nope" else self.num_heads // divisor

    @property
    def rope_dim(self) -> int:
        """How many dims of a rotating head rotate: always the first ones; 0 for nope."""
        divisor = {"partial_rope_a": 2, "partial_rope_c": 4}.get(self.position, 1)
        return 0 if self.position == "nope" else self.head_dim // divisor


def _normalised_canon_set(canon_set: str) -> str:
    """Return the letters sorted and upper-case; raise UserError for unknown or repeated ones."""
    letters = canon_set.upper()
    for letter in letters:
        if letter not in CANON_SITES:
            raise UserError(
                f'canon_set = "{canon_set}" names the Canon site "{letter}"; only A, B, C and D '
                'exist. Write any subset of them, such as "AC" or "ABCD", or "" for no Canon.'
            )
        if letters.count(letter) > 1:
            raise UserError(
                f'canon_set = "{canon_set}" names the Canon site "{letter}" '
                f"{letters.count(letter)} times; each site can hold one Canon layer. "
                "Name every letter once."
            )
    return "".join(sorted(letters))


def _check_ranges(args: ModelArgs) -> None:
    """Raise UserError unless every number is in its own range."""
    sizes = ("vocab_size", "num_layers", "dim", "num_heads", "ffn_dim", "max_seq_len")
    for name in sizes:
        if getattr(args, name) < 1:
            raise UserError(
                f"{name} = {getattr(args, name)} is too small; expected an integer of at least 1."
            )
    for name in ("norm_eps", "rope_theta"):
        value = getattr(args, name)
        if not (math.isfinite(value) and value > 0):
            raise UserError(f"{name} = {value} is not usable; expected a finite number above 0.")
    if args.canon_kernel not in CANON_KERNELS:
        raise UserError(
            f"canon_kernel = {args.canon_kernel} is not a width that Canon has; "
            "expected 2, 3 or 4 (the paper's is 4)."
        )
    if args.init_seed < 0:
        raise UserError(f"init_seed = {args.init_seed} is negative; expected 0 or more.")


def _check_choice(name: str, given: str, choices: Iterable[str]) -> None:
    """Raise UserError, with the nearest choice, unless `given` is one of `choices`."""
    if given not in choices:
        raise UserError(
            f'{name} = "{given}" is not known; expected one of {", ".join(choices)}.'
            f"{_suggestion(given, choices)}"
        )


def _suggestion(given: str, choices: Iterable[str]) -> str:
    near = nearest(given, choices)
    return f' Did you mean "{near}"?' if near else ""


def _check_heads(args: ModelArgs) -> None:
    """Raise UserError unless the heads divide the width and rotated dims come in pairs."""
    if args.dim % args.num_heads:
        raise UserError(
            f"dim = {args.dim} is not a multiple of num_heads = {args.num_heads}; every head needs "
            "the same whole number of dims. Change one of the two."
        )
    # position -> what the number of heads, and the dims of a head, must be a multiple of
    divisors = {
        "rope": (1, 2),
        "nope": (1, 1),
        "partial_rope_a": (2, 4),
        "partial_rope_b": (4, 2),
        "partial_rope_c": (1, 8),
    }
    heads_divisor, dims_divisor = divisors[args.position]
    if args.num_heads % heads_divisor or args.head_dim % dims_divisor:
        raise UserError(
            f'position = "{args.position}" got num_heads = {args.num_heads} and a head dim of '
            f"{args.head_dim} (dim / num_heads); it needs num_heads to be a multiple of "
            f"{heads_divisor} and the head dim a multiple of {dims_divisor}, because dims rotate "
            "in pairs. Change dim or num_heads, or choose another position."
        )


def num_parameters(args: ModelArgs) -> int:
    """Return N, the parameters of `Transformer(args)`, in closed form.

    Untied embedding and head, no biases; Canon-A and -C have D channels, -B 3D, -D 2F.
    """
    canon_channels = {"A": args.dim, "B": 3 * args.dim, "C": args.dim, "D": 2 * args.ffn_dim}
    layer = 4 * args.dim**2 + 3 * args.dim * args.ffn_dim + 2 * args.dim
    layer += sum(canon_channels[site] for site in args.canon_set) * args.canon_kernel
    layer += {"none": 0, "full": 2 * args.dim, "per_head": 2 * args.head_dim}[args.qk_norm]
    return 2 * args.vocab_size * args.dim + args.num_layers * layer + args.dim


FLOPS_FORMULA = "PaLM's formula, 6(N - embeddings) + 12LHKT, causality not halved"


def flops_per_token(args: ModelArgs, seq_len: int) -> int:
    """Return the training FLOPs of one token: 6 (N - V D) + 12 L H K T.

    FLOPS_FORMULA: the model FLOPs of PaLM (Chowdhery et al. 2022, appendix B), as torchtitan counts
    them: the token embedding is a look-up and left out; attention counts all T x T scores, so
    causality does not halve it. Forward plus backward, nothing recomputed. T is `seq_len`.
    """
    matmul_parameters = num_parameters(args) - args.vocab_size * args.dim
    return 6 * matmul_parameters + 12 * args.num_layers * args.dim * seq_len


# F of the paper's 8D/3 widths is rounded up to a multiple of 8: Canon-D's fast kernels need that.
FLAVORS: Mapping[str, ModelArgs] = MappingProxyType(
    {
        # CPU tests
        "debug": ModelArgs(
            vocab_size=512, num_layers=2, dim=64, num_heads=4, ffn_dim=176, max_seq_len=128
        ),
        # the README's first run
        "quickstart": ModelArgs(
            vocab_size=2048, num_layers=3, dim=128, num_heads=4, ffn_dim=344, max_seq_len=256
        ),
        # seed 000: TinyStories
        "4M": ModelArgs(
            vocab_size=2000, num_layers=4, dim=256, num_heads=4, ffn_dim=768, max_seq_len=512
        ),
        # seed 001: Llama medium
        "162M": ModelArgs(num_layers=16, dim=768, num_heads=8, ffn_dim=2048),
        # the synthetic tasks' sizes, section 3
        "8L512D": ModelArgs(num_layers=8, dim=512, num_heads=8, ffn_dim=1368),
        "8L768D": ModelArgs(num_layers=8, dim=768, num_heads=12, ffn_dim=2048),
        "12L512D": ModelArgs(num_layers=12, dim=512, num_heads=8, ffn_dim=1368),
        "12L768D": ModelArgs(num_layers=12, dim=768, num_heads=12, ffn_dim=2048),
        # section 9 and appendix B
        "1b3": ModelArgs(),
        # the released LlamaCanon checkpoints are wider
        "1b3_released": ModelArgs(ffn_dim=5632),
        # the SlimPajama run of 300B tokens
        "1b7": ModelArgs(dim=2304, num_heads=24, ffn_dim=6144),
    }
)


def flavor(name: str) -> ModelArgs:
    """Return the flavor called `name`; raise UserError, with the nearest name, if there is none."""
    if name not in FLAVORS:
        raise UserError(
            f'model flavor "{name}" is not known; expected one of {", ".join(FLAVORS)}.'
            f"{_suggestion(name, FLAVORS)}"
        )
    return FLAVORS[name]
