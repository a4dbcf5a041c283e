"""The description of a model: its sizes and its variant.

Letters: L layers, D hidden, H heads, G key-value heads, K head dim, F ffn dim, V vocabulary.
"""

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields, replace
from functools import cache
from types import MappingProxyType, SimpleNamespace
from typing import Annotated, Any, get_type_hints

from canon_pretrain.core.errors import UserError, check_choice, nearest, suggestion
from canon_pretrain.model.mixer_table import RECURRENT, RecurrentMixer, Widths, gated_widths

MIXERS = ("attention", *RECURRENT)
ROTARY = ("rope", "partial_rope_a", "partial_rope_b", "partial_rope_c")
POSITIONS = ("rope", "nope", "alibi", "h_alibi", "relative", *ROTARY[1:])
CANON_SITES = "ABCDFKOQV"
"""The places of a convolution: those of the paper (A to D), Q, K and V, which are parts of B, and
the outputs of mixer (O) and feed-forward (F), before they are added (Inkling's: K, V, O, F)."""
# the smear gate adds the embedding of one token before
SMEAR_REACH = 1
SMEAR_DIM = 12
"""The first channels of an embedding, which its gate depends on."""
FULL_EXTENT = 1024
"""Distances with a bias in position = "relative" without a window, Inkling's rel_extent."""
MIXER_SITES = "BQKV"
"""Those inside the mixer."""
FFN_SITES = "CDF"
"""Those that need a feed-forward."""
# of the layouts that rotate a part of the heads, or of each rotating head's dims (Figure 22):
# one head in so many rotates, and one dim in so many of a rotating head; 1 if not listed
_HEADS_PER_ROTATED = {"partial_rope_a": 2, "partial_rope_b": 4}
_DIMS_PER_ROTATED = {"partial_rope_a": 2, "partial_rope_c": 4}


@dataclass(frozen=True)
class Range:
    """The numbers that a field may have, in words and as a test, which NaN does not pass."""

    expected: str
    contains: Callable[[float], bool]


Count = Annotated[int, Range("an integer of at least 1", lambda value: value >= 1)]
Size = Annotated[int, Range("an integer of at least 0", lambda value: value >= 0)]
Positive = Annotated[float, Range("a finite number above 0", lambda value: 0 < value < math.inf)]
Amount = Annotated[
    float, Range("a finite number of at least 0", lambda value: 0 <= value < math.inf)
]
Taps = Annotated[int, Range("2 to 16 (the paper's is 4)", lambda value: value in range(2, 17))]


class Table(dict[str, Any]):
    """A dict that is not changed after it was made, so that it has a hash."""

    def __hash__(self) -> int:  # type: ignore[override]
        # ModelArgs is a key of caches (`_kinds`, `measure`), so each of its fields needs a hash.
        # Values may be lists, which have none, and 1 equals 1.0: the keys are enough.
        return hash(frozenset(self))


@dataclass(frozen=True)
class ModelArgs:
    """All options of one model; equal args mean equal initial weights.

    A field is declared here only: its annotation has its type and its range or its choices, and the
    string below it is its help. `[model]`, the command line and the checks follow from it.

    The default of a field added later means what earlier versions did. Raises UserError for a
    value that is out of range or conflicts with the others.
    """

    vocab_size: Count = 32000
    """Unset: the vocabulary size of the shards, which it must equal, or of the task, which may be
    smaller."""
    num_layers: Count = 24
    dim: Count = 2048
    num_heads: Count = 32
    num_kv_heads: Size = 0
    """Heads of k and v (grouped-query attention); 0: as many as num_heads."""

    # What mixes tokens: attention, or a recurrence of states (H heads, K key width, V value width)
    # without positions, a row of model/mixer_table.py. The native conv1d has SiLU and canon_kernel
    # taps; Canon-B replaces it.
    mixer: str = "attention"
    """attention, gla, mamba2 or gated_deltanet, with the paper's heads, layers and widths; or
    FILE.py:Name, a class of your own (train_configs/mixers/README.md)."""
    mixer_conv: bool = False
    """The recurrent mixer's native conv1d. Unset: on for mamba2 and gated_deltanet without Canon-B
    or its parts."""
    expand_k: Positive = 0.5
    """Width of all keys over dim. Unset: gla 0.5, gated_deltanet 0.75."""
    expand_v: Positive = 1.0
    """Width of all values over dim. Unset: gla 1, gated_deltanet 1.5."""
    output_gate_rank: Size = 0
    """Rank of the output gate of gla and gated_deltanet; 0: full."""
    o_norm_eps: Amount = 0.0
    """Epsilon of the norm of each head's output of gla and gated_deltanet; 0: norm_eps."""
    allow_neg_eigval: bool = False
    """Steps of gated_deltanet from 0 to 2 instead of 1, so that a state can change its sign (Grazzi
    et al., arXiv 2411.12537; OLMo Hybrid)."""
    gla_feature_map: Annotated[str, ("identity", "elu")] = "identity"
    """identity, or elu: elu + 1 of q and k (the paper's Figure 23)."""
    state_dim: Count = 64
    """Mamba2's state size."""
    mimetic_init: bool = False
    """Mamba2's mimetic initial values (the paper's Figures 14 and 29)."""
    mimetic_rate: Positive = 8.0
    """c of mimetic_init: a state decays by exp(-exp(-c)) per token (the paper tries 2, 4 and 8)."""

    # An expert is a feed-forward of width F, standard or gated. A loss of each sequence (Switch) or
    # a bias of the routing scores (DeepSeek-V3) evens their load. "gelu" is GPT-2's tanh form.
    ffn_dim: Count = 5504
    """Width of the feed-forward. Unset: the flavor's; 4 dim if ffn = "standard", dim if "moe",
    2 dim with mamba2 or gated_deltanet."""
    ffn: Annotated[str, ("gated", "standard", "moe", "none")] = "gated"
    """gated: w2(act(w1 x) * w3 x); standard: w2(act(w1 x)), the paper's GPT2(RoPE); moe; none
    (unset with mamba2: none, with twice the layers)."""
    ffn_activation: Annotated[str, ("silu", "relu2", "gelu")] = "silu"
    """silu, relu2 (the paper's R2), or gelu (as GPT-2; requires ffn = "standard")."""
    num_experts: Count = 32
    """Experts of a layer with ffn = "moe" (32)."""
    experts_per_token: Count = 1
    """Experts that each token goes to (1)."""
    num_shared_experts: Size = 0
    """Further experts that every token goes to (0)."""
    moe_gated: bool = False
    """Gated experts; the paper's are standard."""
    moe_capacity: Amount = 0.0
    """In training, an expert takes at most this many times its share of a sequence, in the tokens'
    order (the paper's tutel: 2, of a micro-batch); 0: dropless."""
    moe_balance: Annotated[str, ("bias", "loss", "none")] = "bias"
    """How the load is evened: bias (of the scores, by each global batch's load), loss (Switch's, of
    each sequence), none."""
    moe_balance_rate: Amount = 1e-3
    """Step of the bias, or factor of the loss."""

    norm: Annotated[str, ("rmsnorm", "layernorm")] = "rmsnorm"
    """rmsnorm, or layernorm (as GPT-2)."""
    norm_place: Annotated[str, ("input", "output")] = "input"
    """input: norms of what mixer and feed-forward read (pre-norm); output: of what they add to the
    residual stream (OLMo 2's reordered norm)."""
    bias: bool = False
    """Biases in the blocks' linear layers and in LayerNorm (as GPT-2)."""
    max_seq_len: Count = 4096
    norm_eps: Positive = 1e-5

    # The partial layouts rotate one quarter of the dimensions (Figure 22): a half of the heads,
    # half of each one's dims; b a quarter of the heads, all dims; c all heads, partial_rope_dim of
    # each one's dims. alibi adds -2^(-8h/H) per token of distance to the scores of head h (1 .. H);
    # in h_alibi head h of the first half, or h_alibi_heads, attends to the last h tokens only.
    # relative adds a learned bias per token, head and distance (Inkling's, model/attention.py).
    position: Annotated[str, POSITIONS] = "rope"
    """rope, nope, alibi, h_alibi, relative (Inkling's), or partial_rope_a, _b, _c (the paper's
    Figure 22)."""
    partial_rope_dim: Size = 0
    """Rotated dims per head in partial_rope_c; 0: a quarter."""
    h_alibi_heads: Size = 0
    """Heads with a window in h_alibi, the first ones; 0: half of them (the paper's)."""
    relative_dim: Count = 16
    """Channels per head of which relative makes the biases (Inkling's: 16)."""
    relative_extent: Size = 0
    """Distances with a bias in relative, from 0 on; 0: the window, or 1024 without one
    (Inkling's)."""
    rope_theta: Positive = 10000.0
    window: Size = 0
    """Number of last tokens that attention sees, the token itself included; 0: all."""

    # Canon layers at the sites of section 4 and others, stored sorted and in upper case. A dynamic
    # filter adds to each tap what the token itself asks for (model/canon.py).
    canon_set: str = ""
    """Any subset of ABCD, or O and F (outputs of mixer and feed-forward), Q, K and V (parts of B);
    empty: no Canon layers."""
    canon_kernel: Taps = 4
    canon_residual: bool = True
    canon_activation: bool = False
    canon_trainable: bool = True
    """false: cst-Canon, which keeps its initial values (the paper's Figure 20)."""
    canon_filter: Annotated[str, ("static", "dynamic", "dynamic_heads", "scalar", "shift")] = (
        "static"
    )
    """static; dynamic: taps that depend on the token (arXiv 2606.03825); dynamic_heads: at Q, K and
    V, by the same amount in all channels of a head (Inkling2's); scalar: the same taps for
    all channels, at first 1, .4, .2, .1 (the paper's footnote 10); shift: a learned mix with the
    token before (RWKV's token shift; needs canon_kernel = 2)."""
    canon_scale: Annotated[str, ("none", "sqrt")] = "none"
    """none, or sqrt: Canon's sum over K taps and the residual is divided by sqrt(K + 1), if dynamic
    by sqrt(2 K + 1) (Inkling2's)."""

    # RMSNorm of q and k. full: over the whole vector (the released models); per_head: over the K
    # dims of each head, with one gain for all heads (Qwen3's).
    qk_norm: Annotated[str, ("none", "full", "per_head")] = "none"
    """none; full: over all heads, before Canon-B; per_head: over each head, after Canon-B."""
    attention_gate: Annotated[str, ("none", "per_channel")] = "none"
    """none; per_channel: what attention returns, times sigmoid of a linear layer of its input, for
    each head and channel (arXiv 2505.06708, elementwise at G1; Qwen3-Next)."""
    embed_norm: bool = False
    """Normalize the embeddings (Inkling's)."""
    smear: bool = False
    """Add to each embedding that of the token before, times a learned gate (modded-nanogpt's)."""
    tie_embeddings: bool = False
    """The output matrix is the token embedding."""
    document_mask: bool = False
    """Stop attention and Canon at document boundaries (the paper does not)."""
    eos_id: Size = 2
    """Token that ends a document, for document_mask; must equal the shards' EOS."""
    init: Annotated[str, ("paper", "lingua")] = "paper"
    """paper: N(0, 0.02); lingua: truncated normal with std D^-1/2."""
    init_seed: Size = 0
    """Seed of the initial weights, which are the same at every world size."""

    # A model whose layers differ. `layers` has for each name in `pattern` the fields that differ
    # from those above; a field of which such a layer has no use is its default there.
    pattern: tuple[str, ...] = ()
    """Names of the layers, repeated over num_layers, such as ["gdn", "gdn", "gdn", "attention"]."""
    layers: Table = Table()
    """[model.layers.NAME]: the keys of [model] that differ in the layers NAME of the pattern."""

    def __post_init__(self) -> None:
        # each site at most once, and nothing else
        letters = "".join(sorted(self.canon_set.upper()))
        sites = "".join(site for site in CANON_SITES if site in letters)
        if letters != sites:
            raise UserError(
                "model.canon_set",
                f'canon_set = "{self.canon_set}": expected each of the sites A, B, C, D, F, K, O, '
                'Q and V at most once, such as "AC", or "" for no Canon',
                given=self.canon_set,
            )

        # Normalize, so that "ca" and "AC", or a default and its value, are equal args.
        # `object.__setattr__`, because the dataclass is frozen.
        object.__setattr__(self, "canon_set", sites)
        object.__setattr__(self, "pattern", tuple(self.pattern))
        layers = {name: Table(overrides) for name, overrides in self.layers.items()}
        object.__setattr__(self, "layers", Table(layers))
        if self.num_kv_heads == self.num_heads:
            object.__setattr__(self, "num_kv_heads", 0)
        if self.o_norm_eps == self.norm_eps:
            object.__setattr__(self, "o_norm_eps", 0.0)
        _check(self)

        # Once the numbers of heads and their dims are checked; layers of a pattern, which may have
        # others, are ModelArgs of their own.
        if self.pattern:
            return
        if 2 * self.h_alibi_heads == self.num_heads:
            object.__setattr__(self, "h_alibi_heads", 0)
        if 4 * self.partial_rope_dim == self.head_dim:
            object.__setattr__(self, "partial_rope_dim", 0)
        if self.relative_extent == (self.window or FULL_EXTENT):
            object.__setattr__(self, "relative_extent", 0)

    @property
    def layer_names(self) -> list[str]:
        """The name of each layer in `pattern`, from the first layer on; without one, "layer"."""
        names = self.pattern or ("layer",)
        return [names[i % len(names)] for i in range(self.num_layers)]

    @property
    def kinds(self) -> Mapping[str, "ModelArgs"]:
        """The arguments of a layer of each name that the model has, in the order of the layers."""
        return _kinds(self)

    @property
    def layer_args(self) -> list["ModelArgs"]:
        """The arguments of each layer, from the first on: those of its kind."""
        return [self.kinds[name] for name in self.layer_names]

    @property
    def layer_counts(self) -> list[tuple["ModelArgs", int]]:
        """The arguments of each kind, and its number of layers."""
        names = self.pattern or ("layer",)
        num_rounds, num_more = divmod(self.num_layers, len(names))
        counts = []
        for name, args in self.kinds.items():
            count = num_rounds * names.count(name) + names[:num_more].count(name)
            counts.append((args, count))
        return counts

    @property
    def num_expert_layers(self) -> int:
        """Number of layers with a mixture of experts."""
        return sum(count for layer, count in self.layer_counts if layer.ffn == "moe")

    @property
    def is_own_mixer(self) -> bool:
        """Whether the mixer is a class of the user's: FILE.py:Name."""
        return is_own_mixer(self.mixer)

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
    def recurrent(self) -> RecurrentMixer | None:
        """The row of the mixer, if it is a recurrent one of the product."""
        return RECURRENT.get(self.mixer)

    @property
    def _widths(self) -> Widths:
        """The widths of a recurrent mixer; of others those that expand_k and expand_v set."""
        return gated_widths(self) if self.recurrent is None else self.recurrent.widths(self)

    @property
    def key_dim(self) -> int:
        """K of a recurrent mixer: the rows of a head's state."""
        return self._widths.key_dim

    @property
    def value_dim(self) -> int:
        """V of a recurrent mixer: the columns of a head's state."""
        return self._widths.value_dim

    @property
    def has_conv_kernel(self) -> bool:
        """Whether the layer has a native conv1d that Canon's kernels compute."""
        row = self.recurrent
        return self.mixer_conv and row is not None and not row.is_one_projection

    @property
    def mixer_parts(self) -> tuple[int, ...]:
        """Channels of each linear-layer output that Canon-B mixes: q, k and v, or a single one."""
        return self.qkv_dims if self.mixer == "attention" else self._widths.parts

    @property
    def has_qkv(self) -> bool:
        """Whether the mixer makes q, k and v apart: they may have sites Q, K and V."""
        return len(self.mixer_parts) == 3

    @property
    def conv_channels(self) -> int:
        """Channels of the native conv1d."""
        return self._widths.conv_channels

    @property
    def reach(self) -> int:
        """How many tokens before a token its block's convolutions and state depend on directly."""
        if self.pattern:
            return max(args.reach for args in self.kinds.values())

        if self.mixer == "attention" and not self.canon_set:
            return SMEAR_REACH if self.smear else 0

        # Convolutions reach K - 1 tokens back. A recurrence alone needs one, to see where its
        # segment starts; K - 1 is never less.
        return self.canon_kernel - 1

    @property
    def ffn_in_dim(self) -> int:
        """Channels between the feed-forward's two products, and of Canon-D: 2F gated, else F."""
        return 2 * self.ffn_dim if self.ffn == "gated" else self.ffn_dim

    @property
    def canon_channels(self) -> dict[str, int]:
        """The channels of each of this model's Canon sites."""
        channels = dict.fromkeys("ACFO", self.dim)
        channels["D"] = self.ffn_in_dim
        if not self.is_own_mixer:  # whose Canon layers are part of the class
            channels["B"] = sum(self.mixer_parts)
            if self.has_qkv:
                channels |= zip("QKV", self.mixer_parts, strict=True)
        return {site: channels[site] for site in self.canon_set if site in channels}

    @property
    def canon_parts(self) -> dict[str, int]:
        """Number of linear-layer outputs that each of this model's Canon sites mixes."""
        parts = dict.fromkeys(CANON_SITES, 1)
        parts["B"] = len(self.mixer_parts)
        if self.ffn == "gated":
            parts["D"] = 2  # of w1 and w3
        return {site: parts[site] for site in self.canon_channels}

    @property
    def smear_dim(self) -> int:
        """Channels of an embedding that its smear gate depends on; 0 without one."""
        return min(SMEAR_DIM, self.dim) if self.smear else 0

    def is_dynamic_at(self, site: str) -> bool:
        """Return whether the taps of Canon at `site` depend on the token."""
        if self.canon_filter == "dynamic_heads":
            return site in "QKV"
        return self.canon_filter == "dynamic"

    def canon_heads_at(self, site: str) -> int:
        """Return the number of heads of q, k or v, for the filters of `dynamic_heads`."""
        return self.num_heads if site == "Q" else self.kv_heads

    def canon_factor_at(self, site: str) -> float:
        """Return what Canon's sum of convolution and residual is multiplied by."""
        if self.canon_scale == "none":
            return 1.0
        # 1 over the root of the number of terms, which are the taps and the residual. A dynamic
        # filter has the static taps and as many of the token's own.
        taps_per_token = 2 if self.is_dynamic_at(site) else 1
        return (taps_per_token * self.canon_kernel + 1) ** -0.5

    @property
    def canon_bound(self) -> float:
        """Canon weights start in U(-bound, bound): PyTorch's Conv1d default, 1/2 at kernel 4."""
        return self.canon_kernel**-0.5

    @property
    def num_windowed(self) -> int:
        """Number of heads with a window of their own, the first ones: of H-ALiBi."""
        if self.position != "h_alibi":
            return 0
        return self.h_alibi_heads or self.num_heads // 2

    @property
    def bias_extent(self) -> int:
        """Number of distances with a learned bias, from 0 on; 0 if there is none."""
        if self.position != "relative":
            return 0
        return self.relative_extent or self.window or FULL_EXTENT

    @property
    def rope_share(self) -> int:
        """One in this many heads rotates, of q and of k: the first ones."""
        return _HEADS_PER_ROTATED.get(self.position, 1)

    @property
    def rope_dim(self) -> int:
        """Number of dims of a rotating head that rotate: the first ones; 0 if none does."""
        if self.position not in ROTARY:
            return 0
        return self.partial_rope_dim or self.head_dim // _DIMS_PER_ROTATED.get(self.position, 1)


def is_own_mixer(mixer: str) -> bool:
    """Return whether `mixer` is FILE.py:Name and not one of MIXERS."""
    return ".py:" in mixer


@cache
def _kinds(args: ModelArgs) -> Mapping[str, ModelArgs]:
    if not args.pattern:
        return {"layer": args}
    names = args.pattern[: args.num_layers]
    return {name: _layer_args(args, name) for name in dict.fromkeys(names)}


def _layer_args(args: ModelArgs, name: str) -> ModelArgs:
    """Return the arguments of a layer `name`: the model's with the fields that differ there."""
    overrides = dict(args.layers.get(name, {}))
    if name in MIXERS or is_own_mixer(name):
        overrides.setdefault("mixer", name)
    values = {f.name: getattr(args, f.name) for f in fields(args)} | overrides
    # a layer is a model without a pattern
    values |= {"pattern": (), "layers": Table()}

    # What the model sets for its other layers, and this one has no use for.
    if values["mixer"] in RECURRENT:
        values["position"] = overrides.get("position", "nope")
    # `_unused` reads `values` while the loop changes them: once mimetic_init is reset, mimetic_rate
    # has no use either.
    for unused, _ in _unused(values):
        if unused not in overrides:
            values[unused] = getattr(ModelArgs, unused)
    return ModelArgs(**values)


def without_positions(args: ModelArgs) -> ModelArgs:
    """Return `args` of a model whose layers are all of one kind, with position = "nope"."""
    values = vars(args) | {"position": "nope"}
    unused = [name for name, _ in _unused(values)]
    return replace(args, position="nope", **{name: getattr(ModelArgs, name) for name in unused})


def own_mixers(args: ModelArgs) -> list[str]:
    """Return the mixers FILE.py:Name of the model's layers, each once."""
    mixers = dict.fromkeys(layer.mixer for layer in args.kinds.values())
    return [mixer for mixer in mixers if is_own_mixer(mixer)]


def with_mixers_in(args: ModelArgs, folder: str) -> ModelArgs:
    """Return `args` with FILE.py:Name as the file of that name in `folder` ("": without one)."""

    def moved(mixer: str) -> str:
        file_name = mixer.rpartition("/")[2]
        return f"{folder}/{file_name}" if folder else file_name

    return map_mixers(args, moved)


def map_mixers(args: ModelArgs, moved: Callable[[str], str]) -> ModelArgs:
    """Return `args` with each FILE.py:Name replaced by `moved` of it.

    A layer that is called by its mixer has its section, and a name without the folder.
    """
    # A layer that is called by its mixer's path would lose that path with the folder: write it into
    # the layer's section first.
    layers = {_without_folder(name): dict(section) for name, section in args.layers.items()}
    for name in filter(is_own_mixer, args.pattern):
        layers.setdefault(_without_folder(name), {}).setdefault("mixer", name)

    # Move the mixers of the sections, then that of the model.
    for section in layers.values():
        if is_own_mixer(section.get("mixer", "")):
            section["mixer"] = moved(section["mixer"])
    return replace(
        args,
        mixer=moved(args.mixer) if args.is_own_mixer else args.mixer,
        pattern=tuple(map(_without_folder, args.pattern)),
        layers=Table(layers),
    )


def _without_folder(name: str) -> str:
    return name.rpartition("/")[2] if is_own_mixer(name) else name


def to_json(args: ModelArgs) -> dict[str, Any]:
    """Return the fields as a run's config.json holds them: mixers without their folder."""
    values = asdict(with_mixers_in(args, ""))
    layers = {name: dict(section) for name, section in values["layers"].items()}
    return values | {"pattern": list(args.pattern), "layers": layers}


def _annotated_fields(kind: type) -> Mapping[str, Any]:
    """Return the annotation of type `kind` of each field of ModelArgs that has one."""
    annotations = {}
    for name, hint in get_type_hints(ModelArgs, include_extras=True).items():
        # what follows the type in Annotated[type, ...]
        for annotation in getattr(hint, "__metadata__", ()):
            if isinstance(annotation, kind):
                annotations[name] = annotation
    return MappingProxyType(annotations)


RANGES: Mapping[str, Range] = _annotated_fields(Range)
CHOICES: Mapping[str, tuple[str, ...]] = _annotated_fields(tuple)

NOT_OF_LAYERS = (
    "vocab_size",
    "num_layers",
    "dim",
    "max_seq_len",
    "norm",
    "norm_eps",
    "embed_norm",
    "smear",
    "num_experts",
    "experts_per_token",
    "moe_balance",
    "moe_balance_rate",
    "tie_embeddings",
    "document_mask",
    "eos_id",
    "init",
    "init_seed",
    "pattern",
    "layers",
)
"""Fields that are the same in all layers of a model."""
LAYER_FIELDS = tuple(f.name for f in fields(ModelArgs) if f.name not in NOT_OF_LAYERS)

_ATTENTION_FIELDS = (
    "qk_norm",
    "attention_gate",
    "num_kv_heads",
    "partial_rope_dim",
    "bias",
    "window",
)


def _mixers_by_option() -> Mapping[str, tuple[str, ...]]:
    """Return the mixers of which a field is an option, for each field that not all of them have."""
    mixers: dict[str, tuple[str, ...]] = dict.fromkeys(_ATTENTION_FIELDS, ("attention",))
    for mixer, row in RECURRENT.items():
        for name in row.options:
            mixers[name] = (*mixers.get(name, ()), mixer)
    return MappingProxyType(mixers)


_MIXERS_OF = _mixers_by_option()
_MOE_FIELDS = (
    "num_experts",
    "experts_per_token",
    "num_shared_experts",
    "moe_gated",
    "moe_capacity",
    "moe_balance",
    "moe_balance_rate",
)
_CANON_FIELDS = (
    "canon_residual",
    "canon_activation",
    "canon_trainable",
    "canon_filter",
    "canon_scale",
)


def _check(args: ModelArgs) -> None:
    # Each field alone.
    for name, range_ in RANGES.items():
        value = getattr(args, name)
        if not range_.contains(value):
            raise _out_of_range(name, value, range_.expected)
    for name, choices in CHOICES.items():
        check_choice(name, getattr(args, name), choices)
    if not args.is_own_mixer:
        check_choice("mixer", args.mixer, MIXERS)

    # Fields together: of each kind of layer, if layers differ.
    if args.pattern or args.layers:
        _check_pattern(args)
        return

    if args.document_mask and args.eos_id >= args.vocab_size:
        raise _out_of_range(
            "eos_id",
            args.eos_id,
            f"a token id below vocab_size = {args.vocab_size}, for document_mask",
        )

    if args.ffn_activation == "gelu" and args.ffn not in ("standard", "moe"):
        raise _conflict("ffn_activation", 'ffn_activation = "gelu" needs ffn = "standard"')

    for name, requirement in _unused(vars(args)):
        _refuse(args, name, requirement)
    _check_divisible(args)
    _check_position(args)
    _check_mixer(args)
    _check_ffn(args)
    _check_canon(args)


def _unused(values: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield each field of which a model with these fields has no use, and what it needs."""
    mixer, ffn = values["mixer"], values["ffn"]
    if not is_own_mixer(mixer):
        for name, mixers in _MIXERS_OF.items():
            if mixer not in mixers:
                yield name, f"mixer = {' or '.join(mixers)}, not {mixer}"

    if ffn != "moe":
        for name in _MOE_FIELDS:
            yield name, f'ffn = "moe", not "{ffn}"'
    if ffn == "none":
        yield "ffn_activation", 'a feed-forward, but ffn = "none"'

    position = values["position"]
    if position != "h_alibi":
        yield "h_alibi_heads", f'position = "h_alibi", not "{position}"'
    if position != "relative":
        for name in ("relative_dim", "relative_extent"):
            yield name, f'position = "relative", not "{position}"'
    if not values["mimetic_init"]:
        yield "mimetic_rate", "mimetic_init = true"

    # the native conv1d has canon_kernel taps too, and a convolution of the user's own may have them
    if not values["canon_set"]:
        has_taps = values["mixer_conv"] or is_own_mixer(mixer)
        names = _CANON_FIELDS if has_taps else ("canon_kernel", *_CANON_FIELDS)
        for name in names:
            yield name, 'Canon layers, but canon_set = ""'


def _check_pattern(args: ModelArgs) -> None:
    """Raise UserError unless each name has its layer, whose fields fit together."""
    # Each name in the pattern must have a meaning, and each section a layer.
    names = set(args.pattern)
    for name in names - args.layers.keys():
        if name not in MIXERS and not is_own_mixer(name):
            raise UserError(
                "model.pattern",
                f'pattern has "{name}", which is neither a mixer nor a section '
                f"[model.layers.{name}]",
                given=name,
            )

    for name, overrides in args.layers.items():
        # A smaller num_layers may leave out the last names, as when a config is tried out.
        if name not in args.pattern:
            raise UserError(
                "model.pattern",
                f"[model.layers.{name}] is the section of no layer: pattern = {list(args.pattern)}",
                given=name,
            )
        for field in overrides:
            check_choice(f"key of [model.layers.{name}]", field, LAYER_FIELDS)

    for name in names:
        try:
            _layer_args(args, name)
        except UserError as error:
            error.message = f"[model.layers.{name}]: {error}"
            raise

    # A field of the model must be of use in a layer.
    unused_names = [{unused for unused, _ in _unused(vars(kind))} for kind in args.kinds.values()]
    for name in set.intersection(*unused_names):
        _refuse(args, name, "a layer of the pattern that has a use for it")


def _check_divisible(args: ModelArgs) -> None:
    if args.mixer == "attention":
        _divide("dim", args.dim, "num_heads", args.num_heads)
        _divide("num_heads", args.num_heads, "num_kv_heads", args.kv_heads)
    elif args.recurrent is not None:
        for name, number in args.recurrent.per_head(args).items():
            _divide(name, number, "num_heads", args.num_heads)


def _divide(name: str, number: float, divisor_name: str, divisor: int) -> None:
    if number % divisor:
        raise UserError(
            "model.not_divisible",
            f"{name} = {number:g} is not a multiple of {divisor_name} = {divisor}; "
            "change one of the two",
            name=name,
            divisor=divisor,
        )


def _check_position(args: ModelArgs) -> None:
    if args.partial_rope_dim:
        if args.position != "partial_rope_c":
            raise _conflict(
                "partial_rope_dim",
                f'partial_rope_dim needs position = "partial_rope_c", not "{args.position}"',
            )
        if args.partial_rope_dim % 2 or args.partial_rope_dim >= args.head_dim:
            raise _out_of_range(
                "partial_rope_dim",
                args.partial_rope_dim,
                f"an even number below the head dim, {args.head_dim}, or 0 for a quarter",
            )

    if args.h_alibi_heads > args.num_heads:
        raise _out_of_range(
            "h_alibi_heads", args.h_alibi_heads, f"at most num_heads = {args.num_heads}, or 0"
        )

    if args.window and args.bias_extent > args.window:
        raise _out_of_range(
            "relative_extent",
            args.relative_extent,
            f"at most the window, {args.window}, or 0 for as many",
        )

    # half of H-ALiBi's heads have a window; one in `rope_share` heads rotates, of q and of k
    if args.position == "h_alibi":
        if not args.h_alibi_heads:
            _divide_for_position(args, "num_heads", 2)
    elif args.num_kv_heads:  # num_heads is a multiple of it
        _divide_for_position(args, "num_kv_heads", args.rope_share)
    else:
        _divide_for_position(args, "num_heads", args.rope_share)

    # dims rotate in pairs
    if args.partial_rope_dim:
        _divide_for_position(args, "head_dim", 2)
    elif args.position in ROTARY:
        _divide_for_position(args, "head_dim", 2 * _DIMS_PER_ROTATED.get(args.position, 1))


def _divide_for_position(args: ModelArgs, name: str, divisor: int) -> None:
    number = getattr(args, name)
    if number % divisor:
        raise UserError(
            "model.not_divisible",
            f'position = "{args.position}" needs a {name} (dim / num_heads for head_dim) that '
            f"is a multiple of {divisor}, not {number}",
            name=name,
            divisor=divisor,
        )


def _check_mixer(args: ModelArgs) -> None:
    if args.recurrent is not None and args.position != "nope":
        raise _conflict(
            "position",
            f'mixer = "{args.mixer}" has no positions: set position = "nope", not '
            f'"{args.position}"',
        )
    if args.mixer_conv and {*MIXER_SITES} & {*args.canon_set}:
        raise _conflict(
            "mixer_conv",
            "mixer_conv = true with Canon-B, or Q, K and V, which replace it: set mixer_conv = "
            "false, or canon_set without them",
        )


def _check_ffn(args: ModelArgs) -> None:
    if args.ffn != "moe":
        return

    # Mixtures of experts.
    if args.experts_per_token > args.num_experts:
        raise _out_of_range(
            "experts_per_token", args.experts_per_token, f"at most num_experts = {args.num_experts}"
        )
    if args.bias:
        raise _conflict("bias", 'bias = True is no option of these experts (ffn = "moe")')
    if args.moe_gated and args.ffn_activation == "gelu":
        raise _conflict(
            "ffn_activation",
            'ffn_activation = gelu is no option of these experts (ffn = "moe")',
        )


def _check_canon(args: ModelArgs) -> None:
    sites = {*args.canon_set}
    # Sites that the block does not have.
    if args.ffn == "none" and {*FFN_SITES} & sites:
        raise _conflict(
            "canon_set",
            f'canon_set = "{args.canon_set}": ffn = "none" has no feed-forward for C, D and F: '
            "choose from the other sites",
        )
    if args.ffn == "moe" and "D" in args.canon_set:
        raise _conflict(
            "canon_set",
            f'canon_set = "{args.canon_set}": ffn = "moe" sends neighboring tokens to different '
            "experts, whose inner channels D could not mix: choose from the other sites",
        )

    if "B" in sites and {*"QKV"} & sites:
        raise _conflict(
            "canon_set",
            f'canon_set = "{args.canon_set}": B mixes all of q, k and v, of which Q, K and V are '
            "the parts: choose B or some of Q, K and V",
        )
    if not args.has_qkv and {*"QKV"} & sites:
        raise _conflict(
            "canon_set",
            f'canon_set = "{args.canon_set}": mixer = "{args.mixer}" projects its input at once, '
            "without q, k and v: choose B",
        )

    # Options that contradict the filter or the scale. Dynamic taps are trained by definition: a
    # constant filter has none.
    if args.canon_filter in ("dynamic", "dynamic_heads"):
        _refuse(args, "canon_trainable", 'canon_filter = "static"')
    has_heads = {*"QKV"} & sites and not args.is_own_mixer
    if args.canon_filter == "dynamic_heads" and not has_heads:
        raise _conflict(
            "canon_filter",
            'canon_filter = "dynamic_heads" is of the heads of q, k and v: set a canon_set with '
            f'some of Q, K and V, not "{args.canon_set}", and a mixer that is no FILE.py:Name',
        )

    # The factor is folded into static taps with the residual's 1, before which no activation fits.
    if args.canon_scale == "sqrt":
        _refuse(
            args, "canon_residual", 'canon_scale = "none": sqrt is of the sum with the residual'
        )
        _refuse(args, "canon_activation", 'canon_scale = "none"')

    if args.canon_filter == "shift":
        _refuse(args, "canon_residual", 'canon_filter = "static": a shift mixes with the token')
        _refuse(args, "canon_activation", 'canon_filter = "static"')
        if args.canon_kernel != 2:
            raise _conflict(
                "canon_kernel",
                f'canon_filter = "shift" mixes two tokens: set canon_kernel = 2, not '
                f"{args.canon_kernel}",
            )


def _refuse(args: ModelArgs, name: str, requirement: str) -> None:
    """Raise UserError if a field is not its default: its option needs the `requirement`."""
    value = getattr(args, name)
    if value != getattr(ModelArgs, name):
        raise _conflict(name, f"{name} = {str(value).lower()} needs {requirement}")


def _conflict(name: str, message: str) -> UserError:
    return UserError("model.conflict", message, name=name)


def _out_of_range(name: str, value: float, expected: str) -> UserError:
    return UserError(
        "model.out_of_range", f"{name} = {value}: expected {expected}", name=name, given=value
    )


def _flavor(
    vocab_size: int, num_layers: int, dim: int, num_heads: int, ffn_dim: int, max_seq_len: int
) -> ModelArgs:
    return ModelArgs(
        vocab_size, num_layers, dim, num_heads, ffn_dim=ffn_dim, max_seq_len=max_seq_len
    )


# The paper's F = 8D/3 is rounded up to a multiple of 8: Canon-D's fast kernels need that.
FLAVORS: Mapping[str, ModelArgs] = MappingProxyType(
    {
        # V, L, D, H, F, tokens
        "debug": _flavor(512, 2, 64, 4, 176, 128),
        "quickstart": _flavor(2048, 3, 128, 4, 344, 256),
        "4M": _flavor(2000, 4, 256, 4, 768, 512),  # the TinyStories ablation
        "162M": _flavor(32000, 16, 768, 8, 2048, 4096),  # Llama medium
        # the synthetic tasks' sizes, section 3
        "8L512D": _flavor(32000, 8, 512, 8, 1368, 4096),
        "8L768D": _flavor(32000, 8, 768, 12, 2048, 4096),
        "12L512D": _flavor(32000, 12, 512, 8, 1368, 4096),
        "12L768D": _flavor(32000, 12, 768, 12, 2048, 4096),
        "1b3": _flavor(32000, 24, 2048, 32, 5504, 4096),  # section 9 and appendix B
        # the released LlamaCanon checkpoints are wider
        "1b3_released": _flavor(32000, 24, 2048, 32, 5632, 4096),
        "1b7": _flavor(32000, 24, 2304, 24, 6144, 4096),  # SlimPajama, 300B tokens
    }
)


HEAD_DIM = 64
"""Of the paper's Transformers."""
CAPO_SIZE = re.compile(r"([1-9]\d{0,3})-([1-9]\d{0,3})", re.ASCII)


def flavor(name: str) -> ModelArgs:
    """Return the flavor `name`: one of FLAVORS, or l-h, a size of the paper's Capo.

    l-h has l layers, h heads and width 64 h (section 3). Raises UserError for an unknown name.
    """
    if match := CAPO_SIZE.fullmatch(name):
        num_layers, num_heads = map(int, match.groups())
        dim = HEAD_DIM * num_heads
        ffn_dim = 8 * math.ceil(dim / 3)
        return _flavor(32000, num_layers, dim, num_heads, ffn_dim, 4096)
    if name not in FLAVORS:
        raise UserError(
            "model.unknown_flavor",
            f'model flavor "{name}" is not known; expected one of {", ".join(FLAVORS)}, or l-h '
            f"such as 8-6 (8 layers, 6 heads, width 384).{suggestion(name, FLAVORS)}",
            nearest=nearest(name, FLAVORS),
        )
    return FLAVORS[name]


FILLED_SIZES = (
    "mixer",
    "position",
    "num_heads",
    "mixer_conv",
    "expand_k",
    "expand_v",
    "ffn",
    "ffn_dim",
)
"""Fields of a layer that `fill_model` fills in, or that decide how it does."""
SHAPE_FIELDS = ("num_layers", "dim", "num_heads", "ffn_dim")
"""Fields in which flavors differ and which `fill_sizes` reads, with those that it fills in."""
# F / D
_FFN_EXPANSION = {"standard": 4, "moe": 1}


def fill_sizes(base: ModelArgs, overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Fill in the sizes that the paper changes in the flavor `base` for a mixer or feed-forward.

    A layer has about 12 D^2 parameters as Llama's, or 6 D^2 of Mamba2 without feed-forward, of
    which there are twice as many (appendix C).
    """
    # The mixer: its heads and widths, without positions.
    sizes = dict(overrides)
    mixer = sizes.get("mixer", base.mixer)
    # None: attention, or the user's own; ModelArgs refuses an unknown mixer
    row = RECURRENT.get(mixer)
    is_new_mixer = mixer != base.mixer
    if is_new_mixer:
        canon_set = str(sizes.get("canon_set", base.canon_set)).upper()
        has_canon_inside = bool({*MIXER_SITES} & {*canon_set})
        defaults = {
            "position": "nope",
            "num_heads": base.num_heads,
            "mixer_conv": row is not None and row.has_conv and not has_canon_inside,
        }
        if row is not None:
            defaults |= row.sizes
        sizes = defaults | sizes

    # The feed-forward's F / D; without it twice the layers.
    ffn = sizes.get("ffn", base.ffn)
    expansion = None
    if ffn != base.ffn:
        expansion = _FFN_EXPANSION.get(ffn)
        if ffn == "none":
            sizes.setdefault("num_layers", 2 * base.num_layers)
    if is_new_mixer and row is not None and ffn == "gated":
        expansion = row.gated_ffn_expansion or expansion
    if expansion is not None:
        sizes.setdefault("ffn_dim", expansion * sizes.get("dim", base.dim))
    return sizes


def fill_model(base: ModelArgs, overrides: Mapping[str, Any]) -> ModelArgs:
    """Return the model of the flavor `base` with the keys of a `[model]` section.

    `fill_sizes` fills in what a mixer changes, also in each layer of a pattern.
    """
    names = tuple(overrides.get("pattern", ()))
    sections = overrides.get("layers", {})
    values = {name: value for name, value in overrides.items() if name not in ("pattern", "layers")}
    if not names:
        return replace(base, **fill_sizes(base, values), layers=Table(sections))

    # A model whose layers differ: its keys are of all layers that have a use for them. Unlike a
    # model of Mamba2 alone, a layer has the feed-forward that the others have.
    values = fill_sizes(base, values)
    # Not ModelArgs: the layers' sizes are not filled in yet, so its checks could refuse the values.
    shared: Any = SimpleNamespace(**vars(base) | values)
    # A layer takes the feed-forward of [model], and its width only if [model] sets one: the
    # flavor's width may not be the paper's for that layer.
    inherited = {name: overrides[name] for name in ("ffn_dim",) if name in overrides}

    layers = {}
    for name in dict.fromkeys((*names, *sections)):
        section = dict(sections.get(name, {}))
        if name in MIXERS or is_own_mixer(name):
            section.setdefault("mixer", name)
        layers[name] = fill_sizes(shared, {"ffn": shared.ffn} | inherited | section)
        layers[name].pop("num_layers", None)  # of a model without feed-forward
    return replace(base, **values, pattern=names, layers=Table(layers))
