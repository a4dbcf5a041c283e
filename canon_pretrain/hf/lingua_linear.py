"""Fields, names and weights of the released linear models, GLA5, GDN2 and Mamba2, and ours.

Their classes are in PhysicsLM4, lingua_modified/huggingface; apps/gla has them as its module
`trans`. `model` of params.json selects the class by `model_name`, and the class derives most of its
config from it (`build_config_from_yaml`): widths, the gates' rank and Mamba2's epsilon are fixed,
and head_dim, n_kv_heads, qk_norm, the rope_ fields, multiple_of and ffn_dim_multiplier have no
effect.

In canon_set, A, C and D are ours, b is the native conv1d, and letters may be repeated ("AbbCD").
Otherwise they differ from our models in names only, but for

- the rows of w1 and w3, which are one tensor (in GDN2: with Canon-D),
- the rows of conv1d, of which GLA5 and GDN2 have one module each for q, k and v,
- Mamba2 without b, which has a conv1d that it does not use, of zeros.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from canon_pretrain.hf.config import Naming, checked, raise_unsupported
from canon_pretrain.hf.standard import Packed, Part, Tensors, TheirWeights
from canon_pretrain.model.args import ModelArgs

FIELDS = {
    "vocab_size": "vocab_size",
    "dim": "dim",
    "n_layers": "num_layers",
    "n_heads": "num_heads",
    "hidden_dim": "ffn_dim",
    "norm_eps": "norm_eps",
    "canon_kernel": "canon_kernel",
    "canon_residual": "canon_residual",
    "canon_activation": "canon_activation",
    "weight_tying": "tie_embeddings",
}
"""ModelArgs' names of the fields that have the same meaning; null means the default."""
REFUSED = ("canon_bias", "zeyuan_linearT", "zeyuan_alternate", "zeyuan_double")
"""Fields that our models, or the released code itself, do not have."""
NOT_READ = (
    "head_dim",
    "n_kv_heads",
    "qk_norm",
    "ffn_dim_multiplier",
    "multiple_of",
    "rope_theta",
    "rope_dim",
    "sliding_window",
)
READ = {"model_name", "canon_set", "mlp_type", "mamba_ssm", *FIELDS, *REFUSED}
# the same norms by other code, whose module has another name in GLA5 (`old_names`)
CHANGES_NOTHING = {*NOT_READ, "zeyuan_layernorm"}

_OPTIONS = {
    "mlp_type": None,
    "mamba_ssm": None,
    "zeyuan_linearT": False,
    "zeyuan_alternate": False,
    "zeyuan_layernorm": False,
    "zeyuan_double": None,
}
"""Fields that only these models have, and their defaults."""

_CONV = "b"
_CONV_TAPS = 4
"""Of conv1d, for any canon_kernel."""
_GATE_RANK = 16
_FFN_EXPANSION = 2
_NORM_EPS = 1e-5
"""Of Mamba2, for any norm_eps."""
_STATE_DIMS = (64, 128, 256)
_DEFAULT_STATE_DIM = 256
_GATED_FFN = "mlp10"


@dataclass(frozen=True)
class LinearClass:
    """A released class: the fields of `model`, names and weights."""

    name: str
    """Its `model_name`."""
    mixer: str
    """Ours."""
    to_args: Callable[[Mapping[str, Any]], dict[str, Any]]
    """Return the arguments of ModelArgs that are not those of FIELDS. Raises UserError."""
    computed_fields: Callable[[ModelArgs], dict[str, Any]]
    """Return the fields of `model` that are computed from arguments, or fixed in the class."""
    weights: TheirWeights
    module: str
    """Its name in lingua_modified/huggingface, for READMEs."""

    def to_section(self, args: ModelArgs) -> dict[str, Any]:
        """Return `model` of params.json for `args`.

        Arguments that the class lacks are left out: whoever calls this must read the section back
        by `to_args` and compare.
        """
        section = {theirs: getattr(args, ours) for theirs, ours in FIELDS.items()}
        section |= _OPTIONS
        section["model_name"] = self.name
        section["max_seqlen"] = args.max_seq_len
        section |= self.computed_fields(args)
        return section


def ffn_dim(model: Mapping[str, Any]) -> int:
    """Return the width of the feed-forward, which a null stands for."""
    return model.get("hidden_dim") or _FFN_EXPANSION * model["dim"]


# -- fields -------------------------------------------------------------------------------------


def _canon_fields(model: Mapping[str, Any], *, takes_b: bool = False) -> dict[str, Any]:
    """Return the arguments for Canon layers and conv1d. Raises UserError for what ours lack.

    `takes_b`: whether the class's Canon-B is ours, without conv1d.
    """
    canon_set = checked("model.canon_set", model.get("canon_set") or "", str)
    sites = {*canon_set}
    if sites - {*"ABCD", _CONV}:
        raise_unsupported("model.canon_set", canon_set, "expected letters of A, b, B, C and D")
    has_conv = _CONV in sites
    if "B" in sites and not takes_b:
        raise_unsupported("model.canon_set", canon_set, "B after silu is unsupported")
    if "B" in sites and has_conv:
        raise_unsupported("model.canon_set", canon_set, "expected one of b and B")

    # Canon layers have canon_kernel taps, and conv1d has its own number; ours have one for both.
    has_canon = bool(sites - {_CONV})
    num_taps = model.get("canon_kernel") or _CONV_TAPS
    if has_canon and has_conv and num_taps != _CONV_TAPS:
        raise_unsupported(
            "model.canon_kernel", num_taps, f"expected {_CONV_TAPS}, the taps of conv1d"
        )
    return {"canon_set": "".join(sorted(sites - {_CONV})), "mixer_conv": has_conv}


def _canon_set(args: ModelArgs) -> str:
    """Return the letters, as the released files write them: "AbbCD"."""
    conv = 2 * _CONV if args.mixer_conv else ""
    sites = [site for site in args.canon_set if site > "A"]
    first = "A" if "A" in args.canon_set else ""
    return "".join([first, conv, *sites])


def _gated_args(mixer: str, model: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of GLA5 or GDN2."""
    return {
        "mixer": mixer,
        "position": "nope",
        "expand_k": 1.0,
        "expand_v": 2.0,
        "output_gate_rank": _GATE_RANK,
        "ffn_dim": ffn_dim(model),
        **_canon_fields(model),
    }


def _gla5_args(model: Mapping[str, Any]) -> dict[str, Any]:
    args = _gated_args("gla", model)
    if not args["mixer_conv"]:
        raise_unsupported(
            "model.canon_set",
            model.get("canon_set"),
            f"expected {_CONV} in it: without conv1d, the class has silu of q, k and v",
        )
    return args


def _gdn2_args(model: Mapping[str, Any]) -> dict[str, Any]:
    return _gated_args("gated_deltanet", model)


def _gated_fields(args: ModelArgs) -> dict[str, Any]:
    """Return the computed fields of GLA5 or GDN2."""
    return {"canon_set": _canon_set(args), "hidden_dim": _hidden_dim(args)}


def _hidden_dim(args: ModelArgs) -> int | None:
    is_default = args.ffn_dim == _FFN_EXPANSION * args.dim or args.ffn == "none"
    return None if is_default else args.ffn_dim


def _mamba2_args(model: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of Mamba2."""
    state_dim = model.get("mamba_ssm")
    if state_dim is None:
        state_dim = _DEFAULT_STATE_DIM
    if checked("model.mamba_ssm", state_dim, int) not in _STATE_DIMS:
        raise_unsupported("model.mamba_ssm", state_dim, f"expected one of {_STATE_DIMS}")
    norm_eps = model.get("norm_eps")
    if norm_eps not in (None, _NORM_EPS):
        raise_unsupported(
            "model.norm_eps", norm_eps, f"expected {_NORM_EPS}, with which the class computes"
        )

    args = {
        "mixer": "mamba2",
        "position": "nope",
        "state_dim": state_dim,
        **_canon_fields(model, takes_b=True),
    }
    mlp_type = model.get("mlp_type")
    if mlp_type is None:
        # Canon-C and D are parts of the feed-forward
        args["canon_set"] = "".join(site for site in args["canon_set"] if site in "AB")
        return args | {"ffn": "none"}
    if mlp_type != _GATED_FFN:
        raise_unsupported("model.mlp_type", mlp_type, f'expected "{_GATED_FFN}" or null')
    return args | {"ffn_dim": ffn_dim(model)}


def _mamba2_fields(args: ModelArgs) -> dict[str, Any]:
    """Return the computed fields of Mamba2."""
    return {
        "canon_set": _canon_set(args),
        "hidden_dim": _hidden_dim(args),
        "norm_eps": _NORM_EPS,
        "mlp_type": None if args.ffn == "none" else _GATED_FFN,
        "mamba_ssm": args.state_dim,
    }


# -- names and weights --------------------------------------------------------------------------


def _packed(module: str, args: ModelArgs, layers: str) -> Iterator[Packed]:
    """Yield the tensors of the feed-forwards, which have the rows of w1 and w3."""
    for number in range(args.num_layers if args.ffn != "none" else 0):
        ours = f"layers.{number}.feed_forward"
        rows = (
            Part(f"{ours}.w1.weight", args.ffn_dim),
            Part(f"{ours}.w3.weight", args.ffn_dim),
        )
        yield Packed(f"{layers}.{number}.mlp.{module}.weight", 1, rows)


def _gla5_packed(args: ModelArgs) -> Iterator[Packed]:
    return _packed("gate_proj", args, _GLA5_NAMING.layers)


def _gdn2_packed(args: ModelArgs) -> Iterator[Packed]:
    if "D" in args.canon_set:
        yield from _packed("both_proj", args, _GDN2_NAMING.layers)


def _mamba2_packed(args: ModelArgs) -> Iterator[Packed]:
    return _packed("both_proj", args, _MAMBA2_NAMING.layers)


def _with_unused(tensors: Tensors, args: ModelArgs) -> Iterator[tuple[str, Tensor]]:
    """Yield also the tensors that the classes store and ours do not: a tied head, an unused conv1d.

    The conv1d has zeros, as in the class.
    """
    for name, tensor in tensors:
        yield name, tensor
        if name == "tok_embeddings.weight" and args.tie_embeddings:
            yield "output.weight", tensor
        prefix = name.removesuffix("in_proj.weight")
        if prefix != name and not args.mixer_conv:
            zeros_C1K = tensor.new_zeros(args.conv_channels, 1, _CONV_TAPS)
            yield f"{prefix}conv1d.weight", zeros_C1K


_BLOCK = {"canon_a": "canonA", "canon_c": "canonC"}
_FEED_FORWARD = {"feed_forward.w2": "mlp.down_proj", "feed_forward.canon_d": "mlp.canonD"}
_GATED_ENDS = {
    "tok_embeddings": "trans.model.embeddings",
    "norm": "trans.model.norm",
    "output": "trans.lm_head",
}
_GATED_BLOCK = {
    **_BLOCK,
    "attention_norm": "attn_norm",
    "attention.wq": "attn.q_proj",
    "attention.wk": "attn.k_proj",
    "attention.wv": "attn.v_proj",
    "attention.conv1d": "attn.conv1d",
    "attention.wg.down": "attn.g_proj.0",
    "attention.wg.up": "attn.g_proj.1",
    "attention.wo": "attn.o_proj",
    "ffn_norm": "mlp_norm",
    **_FEED_FORWARD,
}
_GATED_CONV = "attn.conv1d"
_GATED_CONV_PARTS = ("attn.q_conv1d", "attn.k_conv1d", "attn.v_conv1d")
_GLA5_NAMING = Naming(
    layers="trans.model.layers",
    ends=_GATED_ENDS,
    block={
        **_GATED_BLOCK,
        "attention.gk.down": "attn.gk_proj.0",
        "attention.gk.up": "attn.gk_proj.1",
        "attention.o_norm": "attn.g_norm_swish_gate",
    },
    bare={},
)
_GDN2_NAMING = Naming(
    layers="trans.model.layers",
    ends=_GATED_ENDS,
    block={
        **_GATED_BLOCK,
        "attention.wa": "attn.a_proj",
        "attention.wb": "attn.b_proj",
        "attention.o_norm": "attn.o_norm",
        "feed_forward.w1": "mlp.gate_proj",
        "feed_forward.w3": "mlp.up_proj",
    },
    bare={"attention.A_log": "attn.A_log", "attention.dt_bias": "attn.dt_bias"},
)
_MAMBA2_NAMING = Naming(
    layers="trans.backbone.layers",
    ends={
        "tok_embeddings": "trans.backbone.embeddings",
        "norm": "trans.backbone.norm_f",
        "output": "trans.lm_head",
    },
    block={
        **_BLOCK,
        "attention_norm": "norm",
        "attention.in_proj": "mixer.in_proj",
        "attention.canon_b": "mixer.canonB",
        "attention.conv1d": "mixer.conv1d",
        "attention.norm": "mixer.norm",
        "attention.out_proj": "mixer.out_proj",
        "ffn_norm": "pre_mlp_layernorm",
        **_FEED_FORWARD,
    },
    bare={
        "attention.A_log": "mixer.A_log",
        "attention.dt_bias": "mixer.dt_bias",
        "attention.D": "mixer.D",
    },
)

CLASSES: tuple[LinearClass, ...] = (
    LinearClass(
        name="GLA5",
        mixer="gla",
        module="modeling_gla_canon.GLACanonForCausalLM",
        to_args=_gla5_args,
        computed_fields=_gated_fields,
        weights=TheirWeights(
            naming=_GLA5_NAMING,
            old_names={"g_norm": "g_norm_swish_gate"},  # with zeyuan_layernorm
            conv=_GATED_CONV,
            conv_parts=_GATED_CONV_PARTS,
            packed_tensors=_gla5_packed,
            with_unused=_with_unused,
        ),
    ),
    LinearClass(
        name="GDN2",
        mixer="gated_deltanet",
        module="modeling_gated_deltanet_canon.GatedDeltaNetCanonForCausalLM",
        to_args=_gdn2_args,
        computed_fields=_gated_fields,
        weights=TheirWeights(
            naming=_GDN2_NAMING,
            conv=_GATED_CONV,
            conv_parts=_GATED_CONV_PARTS,
            packed_tensors=_gdn2_packed,
            with_unused=_with_unused,
        ),
    ),
    LinearClass(
        name="Mamba2",
        mixer="mamba2",
        module="modeling_mamba2_canon.Mamba2CanonForCausalLM",
        to_args=_mamba2_args,
        computed_fields=_mamba2_fields,
        weights=TheirWeights(
            naming=_MAMBA2_NAMING,
            ignored=r".*\.mixer\.conv1d\.weight",  # of a model without conv1d
            packed_tensors=_mamba2_packed,
            with_unused=_with_unused,
        ),
    ),
)


def of_name(name: object) -> LinearClass | None:
    """Return the class of a `model_name`, if there is one."""
    return next((linear for linear in CLASSES if linear.name == name), None)


def of_mixer(mixer: str) -> LinearClass | None:
    """Return the class of one of our mixers, if there is one."""
    return next((linear for linear in CLASSES if linear.mixer == mixer), None)
