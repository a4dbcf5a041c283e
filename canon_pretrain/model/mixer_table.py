"""The product's recurrent mixers: what other code must know about them without building one.

A mixer is a class in its own file, which keeps the contract of `mixers.Mixer`, and a row here. No
torch. Not attention, of which the options of ModelArgs are.

Letters: D hidden, H heads, K key width and V value width of a head.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

DECAY_RANK = 16
"""Rank of GLA's gate of the decay."""


class Args(Protocol):
    """What the rows read of a layer's ModelArgs, which import this file."""

    @property
    def dim(self) -> int: ...
    @property
    def num_heads(self) -> int: ...
    @property
    def expand_k(self) -> float: ...
    @property
    def expand_v(self) -> float: ...
    @property
    def output_gate_rank(self) -> int: ...
    @property
    def state_dim(self) -> int: ...
    @property
    def mixer_conv(self) -> bool: ...
    @property
    def canon_kernel(self) -> int: ...


class Widths(NamedTuple):
    """The channels of a recurrent mixer."""

    key_dim: int
    """K: the rows of a head's state."""
    value_dim: int
    """V: the columns of a head's state."""
    parts: tuple[int, ...]
    """The outputs that Canon-B mixes: of three linear layers, which make q, k and v, or of one."""
    conv_channels: int
    """The channels of the native conv1d."""


class RecurrentMixer(NamedTuple):
    """A mixer that writes and reads states [H, K, V], without positions."""

    module: str
    """The file in this folder."""
    class_name: str
    label: str
    """For model cards; may have {num_heads}."""

    # keys of [model]
    options: tuple[str, ...]
    """Fields of ModelArgs that only some mixers have, and this one."""
    sizes: Mapping[str, Any]
    """Fields that the paper changes for it, where they are unset."""
    has_conv: bool
    """Whether the paper has its native conv1d, unless a Canon layer replaces it."""
    gated_ffn_expansion: int | None
    """F / D of a gated feed-forward that is unset; None: as the flavor's."""

    # sizes
    widths: Callable[[Args], Widths]
    per_head: Callable[[Args], Mapping[str, float]]
    """Numbers that must be multiples of num_heads, by their names in messages."""
    num_parameters: Callable[[Args], int]
    state_products: int
    """Products with the state per token: 2 if it is written and read once."""

    # costs, see their readers in titan/
    is_one_projection: bool
    """Whether one linear layer makes all that Canon-B and conv1d mix. They are then never `triton`:
    Inductor fuses them with the split of its result, and of its gradient (kernels/NOTES.md)."""
    temporary_bytes: int
    """Per token and channel of the values, in the backward graph of the chunked form: counted by
    the trainer on fake GPUs at 1.3B."""
    step_times: Mapping[str, float]
    """Time of a step by the backends of the recurrence, computed for the 1.3B models on an H100;
    that by triton is 1. Of fla only roughly: from the operands of its forward kernels."""
    h100_step_factor: float
    """Time of a training step on an H100 over that of attention at equal FLOPs, with what
    mixer_backend = "auto" takes; computed for boards/price.py."""

    # initial values of a model whose layers have it, with init = "paper"
    embedding_std: float | None
    """Of the embedding, if matrices start as those of nn.Linear, U(-in^-1/2, in^-1/2). None: all
    start as N(0, 0.02)."""

    has_llama_names: bool = False
    """Whether hf/config.py has names for its modules, those of the first exports; a new mixer keeps
    its own."""


# -- q, k and v, an output gate, and a decay


def gated_widths(args: Args) -> Widths:
    """Return H K = expand_k D and H V = expand_v D, also for a mixer of the user's own."""
    key_dim = round(args.expand_k * args.dim) // args.num_heads
    value_dim = round(args.expand_v * args.dim) // args.num_heads
    q_dim = args.num_heads * key_dim
    v_dim = args.num_heads * value_dim
    return Widths(key_dim, value_dim, (q_dim, q_dim, v_dim), conv_channels=2 * q_dim + v_dim)


def _gated_per_head(args: Args) -> dict[str, float]:
    # a width that was divided by dim, and is multiplied by it again, may be 120.00000000000001
    return {
        "expand_k dim": round(args.expand_k * args.dim, 6),
        "expand_v dim": round(args.expand_v * args.dim, 6),
    }


def _gla_parameters(args: Args) -> int:
    # the decay, of a low-rank product with a bias
    k_dim, _, _ = gated_widths(args).parts
    return _gated_parameters(args) + DECAY_RANK * (args.dim + k_dim) + k_dim


def _gated_deltanet_parameters(args: Args) -> int:
    # the decay and the step of each head: wa, wb; A_log, dt_bias
    return _gated_parameters(args) + 2 * args.dim * args.num_heads + 2 * args.num_heads


def _gated_parameters(args: Args) -> int:
    """Return the parameters of `GatedRecurrence`."""
    dim = args.dim
    widths = gated_widths(args)
    k_dim, _, v_dim = widths.parts
    number = dim * (2 * k_dim + 2 * v_dim) + widths.value_dim  # wq, wk, wv, wo; the norm

    # The output gate
    rank = args.output_gate_rank
    if rank:
        number += rank * (dim + v_dim) + v_dim  # down and up, with its bias
    else:
        number += dim * v_dim
    if args.mixer_conv:
        number += widths.conv_channels * args.canon_kernel
    return number


# -- Mamba2


def _mamba2_widths(args: Args) -> Widths:
    """Return K = state_dim and H V = 2 D; in_proj makes [z|x|B|C|dt] at once."""
    inner_dim = 2 * args.dim
    conv_channels = inner_dim + 2 * args.state_dim  # of x, B and C
    return Widths(
        key_dim=args.state_dim,
        value_dim=inner_dim // args.num_heads,
        parts=(inner_dim + conv_channels + args.num_heads,),
        conv_channels=conv_channels,
    )


def _mamba2_per_head(args: Args) -> dict[str, float]:
    return {"2 dim": 2 * args.dim}


def _mamba2_parameters(args: Args) -> int:
    widths = _mamba2_widths(args)
    inner_dim = args.num_heads * widths.value_dim
    projections = args.dim * (sum(widths.parts) + inner_dim)
    number = projections + 3 * args.num_heads + inner_dim  # dt_bias, A_log and D; the norm
    if args.mixer_conv:
        number += widths.conv_channels * (args.canon_kernel + 1)  # taps and bias
    return number


RECURRENT: Mapping[str, RecurrentMixer] = MappingProxyType(
    {
        "gla": RecurrentMixer(
            # kernels/gla.py has the other name; an export has both in one folder
            module="gated_linear_attention",
            class_name="GLA",
            label="gated linear attention (GLA), {num_heads} heads",
            options=(
                "mixer_conv",
                "expand_k",
                "expand_v",
                "output_gate_rank",
                "o_norm_eps",
                "gla_feature_map",
            ),
            sizes={"num_heads": 4},
            has_conv=False,
            gated_ffn_expansion=None,
            widths=gated_widths,
            per_head=_gated_per_head,
            num_parameters=_gla_parameters,
            state_products=2,
            is_one_projection=False,
            temporary_bytes=66,  # 63 to 69
            step_times={"triton": 1.0, "fla": 1.07, "chunked": 1.24},
            h100_step_factor=1.5,
            embedding_std=None,
            has_llama_names=True,
        ),
        "mamba2": RecurrentMixer(
            module="mamba2",
            class_name="Mamba2",
            label="Mamba2, {num_heads} heads",
            options=("mixer_conv", "state_dim", "mimetic_init", "mimetic_rate"),
            sizes={"num_heads": 16, "ffn": "none"},
            has_conv=True,
            # to its 6 D^2 parameters, a gated feed-forward of F = 2 D adds another 6 D^2
            gated_ffn_expansion=2,
            widths=_mamba2_widths,
            per_head=_mamba2_per_head,
            num_parameters=_mamba2_parameters,
            state_products=2,
            is_one_projection=True,
            temporary_bytes=28,  # 24 to 31
            step_times={"triton": 1.0, "fla": 1.05, "chunked": 1.43},
            h100_step_factor=1.95,
            # `initializer_range` of transformers 4.47, which the paper's code requires
            embedding_std=0.1,
            has_llama_names=True,
        ),
        "gated_deltanet": RecurrentMixer(
            module="gated_deltanet",
            class_name="GatedDeltaNet",
            label="Gated DeltaNet, {num_heads} heads",
            options=(
                "mixer_conv",
                "expand_k",
                "expand_v",
                "output_gate_rank",
                "o_norm_eps",
                "allow_neg_eigval",
            ),
            sizes={"num_heads": 12, "expand_k": 0.75, "expand_v": 1.5},
            has_conv=True,
            gated_ffn_expansion=2,  # as with Mamba2: 6 D^2 parameters each
            widths=gated_widths,
            per_head=_gated_per_head,
            num_parameters=_gated_deltanet_parameters,
            state_products=3,  # the delta rule reads it once more
            is_one_projection=False,
            temporary_bytes=37,  # 36 to 38
            step_times={"triton": 1.0, "fla": 1.17, "chunked": 1.37},
            h100_step_factor=1.7,
            embedding_std=None,
            has_llama_names=True,
        ),
    }
)
