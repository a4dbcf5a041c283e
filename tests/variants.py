"""Small models of every variant, for tests that must pass for all of them.

A variant's name is its definition: words of WORDS, applied to BASE. Every compatible pair of words
occurs in at least one variant.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch

from canon_pretrain.model.args import POSITIONS, ModelArgs
from canon_pretrain.model.transformer import Transformer

EOS_ID = 2
# distinct sizes show a wrong width; lingua's values are large enough for any fault to change logits
BASE = ModelArgs(
    vocab_size=40, num_layers=2, dim=32, num_heads=4, ffn_dim=24, max_seq_len=160, eos_id=EOS_ID,
    init="lingua",
)  # fmt: skip


def _mixer(name: str, **changes: Any) -> dict[str, Any]:
    return {"mixer": name, "position": "nope", **changes}


WORDS: dict[str, dict[str, Any]] = {
    **{position: {"position": position} for position in POSITIONS},
    **{canon_set: {"canon_set": canon_set} for canon_set in ("A", "AC", "BD", "ABCD")},
    **{f"k{taps}": {"canon_kernel": taps} for taps in (2, 3, 5)},
    "no_res": {"canon_residual": False},
    "act": {"canon_activation": True},
    "cst": {"canon_trainable": False},
    "dynamic": {"canon_filter": "dynamic"},
    "heads": {"canon_filter": "dynamic_heads"},
    "scalar": {"canon_filter": "scalar"},
    "shift": {"canon_filter": "shift", "canon_kernel": 2},
    "sqrt": {"canon_scale": "sqrt"},
    "smear": {"smear": True},
    "relu2": {"ffn_activation": "relu2"},
    "standard": {"ffn": "standard"},
    "standard_relu2": {"ffn": "standard", "ffn_activation": "relu2"},
    "gpt2": {"ffn": "standard", "ffn_activation": "gelu", "norm": "layernorm", "bias": True},
    "layernorm": {"norm": "layernorm"},
    "bias": {"bias": True},
    **{f"qk_{norm}": {"qk_norm": norm} for norm in ("full", "per_head")},
    "gated": {"attention_gate": "per_channel"},
    **{f"windows{number}": {"h_alibi_heads": number} for number in (1, 3, 4)},
    "half": {"partial_rope_dim": 4},
    "distances6": {"relative_dim": 3, "relative_extent": 6},
    "embed_norm": {"embed_norm": True},
    "gqa": {"num_kv_heads": 2},
    "tied": {"tie_embeddings": True},
    "documents": {"document_mask": True},
    "gla": _mixer("gla"),
    "gla_elu": _mixer("gla", gla_feature_map="elu"),
    "mamba2": _mixer("mamba2", ffn="none", state_dim=6),
    "mamba2_mlp": _mixer("mamba2", state_dim=6),
    "gdn": _mixer("gated_deltanet", expand_k=0.75, expand_v=1.5),
    "conv": {"mixer_conv": True},
    "expand": {"expand_k": 1.0, "expand_v": 2.0},
    "gate_rank": {"output_gate_rank": 6},
    "mimetic": {"mimetic_init": True},
    "reflect": {"allow_neg_eigval": True},
    "o_eps": {"o_norm_eps": 0.1},
    "post": {"norm_place": "output"},
    "moe": {"ffn": "moe", "num_experts": 4, "experts_per_token": 2},
    "gated_moe": {"ffn": "moe", "num_experts": 3, "moe_gated": True, "num_shared_experts": 2},
    "capacity": {"moe_capacity": 0.5},  # drops half of the choices, in training
    **{canon_set: {"canon_set": canon_set} for canon_set in ("AB", "B", "ABC", "ABCDFO")},
    **{canon_set: {"canon_set": canon_set} for canon_set in ("FKOV", "AKQ", "FO", "BF", "AO")},
}
NAMES = (
    """
rope, rope gpt2 tied, rope standard gqa, rope A k3 cst relu2 qk_per_head documents,
rope AC no_res act standard_relu2 qk_full gqa tied documents, rope BD k2 no_res gqa tied,
rope ABCD k2 standard gqa, nope qk_full gqa tied,
nope A k3 no_res act cst relu2 qk_per_head gqa tied, nope AC k3 no_res cst standard_relu2 tied,
nope BD k2 no_res cst standard qk_full gqa, nope ABCD, nope ABCD k2 no_res act standard documents,
alibi standard_relu2 qk_per_head documents, alibi A no_res act cst standard gqa tied documents,
alibi AC k3 act cst relu2 qk_per_head documents, alibi BD k2 act qk_full gqa,
alibi ABCD k3 cst relu2 qk_per_head tied, h_alibi relu2 qk_per_head tied documents,
h_alibi A k2 act relu2 gqa tied documents, h_alibi AC k2 cst standard qk_full gqa documents,
h_alibi BD k3 act standard_relu2 gqa, h_alibi ABCD k3 no_res cst tied documents,
partial_rope_a standard_relu2 tied documents,
partial_rope_a A k2 cst qk_per_head gqa tied documents, partial_rope_a AC k3 act standard,
partial_rope_a BD no_res act cst relu2 qk_full gqa, partial_rope_a ABCD k2 no_res act cst relu2,
partial_rope_b relu2 documents, partial_rope_b A k2 act standard_relu2 qk_full tied,
partial_rope_b AC k3 no_res act qk_per_head,
partial_rope_b BD k3 no_res act standard qk_per_head gqa documents,
partial_rope_b ABCD cst qk_per_head gqa, partial_rope_c standard qk_full gqa,
partial_rope_c A no_res act qk_full gqa, partial_rope_c AC k3 act relu2 gqa,
partial_rope_c BD k2 no_res cst relu2 qk_per_head tied documents, partial_rope_c ABCD qk_full,
partial_rope_c ABCD k3 cst standard_relu2 qk_full tied, partial_rope_c half ABCD k5 qk_full gqa,
partial_rope_c ABCD gpt2 qk_full gqa documents, nope ABCD bias qk_per_head, alibi AC layernorm,
rope ABCD dynamic gqa documents, nope BD k3 no_res act dynamic standard qk_full,
gla AC k3 no_res act cst conv tied gate_rank expand layernorm, gla A act documents relu2,
gla ABCD k2 no_res cst tied documents gate_rank standard, gla BD dynamic tied,
gla BD k3 no_res act cst documents expand, gla_elu BD k2 no_res act cst documents expand relu2,
gla_elu k3 conv tied gate_rank layernorm, gla_elu A tied gate_rank expand standard,
gla_elu AC k3 no_res conv tied documents gate_rank, gla_elu ABCD k3 no_res cst tied expand,
mamba2 AB dynamic documents, mamba2 AB k2 no_res act cst tied mimetic layernorm,
mamba2 B k3 no_res act cst mimetic layernorm, mamba2 AB documents mimetic layernorm,
mamba2 A k2 act conv tied mimetic layernorm, mamba2 k2 conv layernorm,
mamba2_mlp A no_res cst conv tied mimetic, mamba2_mlp AC k2 act documents standard,
mamba2_mlp k3 conv tied documents relu2, mamba2_mlp BD no_res act cst mimetic layernorm,
mamba2_mlp ABCD k3 no_res act tied documents layernorm, gdn ABCD act standard,
gdn AC k3 no_res cst conv tied documents gate_rank expand layernorm,
gdn BD k2 cst tied gate_rank, gdn A k2 no_res act cst tied documents expand,
gdn k2 conv tied, nope FKOV, rope FKOV k3 act qk_per_head gqa documents,
partial_rope_b AKQ qk_full no_res cst, rope FKOV dynamic standard documents, alibi BF,
nope ABCD sqrt documents qk_per_head, rope ABCD sqrt k2 standard, rope FKOV sqrt cst gqa,
nope BD dynamic sqrt, gla ABCD sqrt documents, gdn FKOV sqrt k3, mamba2 AB sqrt documents,
rope ABCD scalar documents, nope ABCD scalar no_res act gqa, rope FKOV scalar sqrt k3 cst,
gdn BD scalar k3, mamba2 AB scalar no_res, rope ABCD shift documents, nope AC shift sqrt,
rope FKOV shift gqa cst, gla ABCD shift, mamba2_mlp ABCD shift documents,
nope smear documents, rope smear gqa tied, nope ABCD smear k3 documents,
mamba2 smear conv documents,
h_alibi windows1 ABCD gqa documents, h_alibi windows3 FKOV tied, h_alibi windows4 documents,
nope FKOV heads documents gqa, rope FKOV heads sqrt qk_per_head k3, gla AKQ heads documents sqrt,
gdn FKOV heads no_res act k2, partial_rope_b AKQ heads gqa,
nope gated ABCD documents, rope gated gqa qk_per_head tied, rope gated A bias,
partial_rope_c half gated FKOV qk_per_head gqa documents,
rope post qk_full gqa, rope post ABCD documents tied, nope post FKOV qk_full k3,
nope post ABCDFO gpt2 documents, alibi post AC dynamic act, gla post AO k2 o_eps documents,
gdn post conv reflect o_eps, gdn reflect BD documents, mamba2_mlp post ABCD,
relative qk_per_head, relative FKOV distances6 embed_norm qk_per_head gqa documents,
relative ABCD distances6 qk_full gqa, relative BD dynamic distances6 tied smear embed_norm,
gla A embed_norm layernorm,
gdn FKOV, gla AKQ documents dynamic, gdn FO conv k3, mamba2 AO conv documents, mamba2_mlp FO tied
""".strip()
    .replace(",\n", ", ")
    .split(", ")
)


def variant(name: str) -> ModelArgs:
    """Return the args of a name such as "alibi ABCD gqa"."""
    words = name.split()
    changes = {field: value for word in words for field, value in WORDS[word].items()}
    if "partial_rope_b" in words and "gqa" in words:  # needs 4 heads of k
        changes |= {"num_heads": 8, "dim": 64, "num_kv_heads": 4}
    return replace(BASE, **changes)


VARIANTS: dict[str, ModelArgs] = {name: variant(name) for name in NAMES}
PATTERNS: dict[str, ModelArgs] = {
    "window": replace(BASE, window=5, canon_set="ABCD", num_kv_heads=2),
    "window_alibi_docs": replace(BASE, window=3, position="alibi", document_mask=True),
    "window_relative_docs": replace(
        BASE, window=5, position="relative", relative_dim=3, num_kv_heads=2, document_mask=True
    ),
    "relative_in_some": replace(
        BASE,
        num_layers=4,
        position="relative",
        relative_dim=3,
        relative_extent=7,
        canon_set="FKOV",
        qk_norm="per_head",
        embed_norm=True,
        pattern=("local", "full", "plain"),
        layers={
            "local": {"window": 4, "relative_extent": 0, "num_heads": 2},
            "full": {},
            "plain": {"position": "nope"},
        },
    ),
    "window_h_alibi": replace(BASE, window=4, position="h_alibi", document_mask=True),
    "last_attention": replace(
        BASE,
        num_layers=4,
        qk_norm="per_head",
        canon_set="ABCD",
        document_mask=True,
        pattern=("gdn", "gdn", "gdn", "attention"),
        layers={"gdn": _mixer("gated_deltanet", expand_k=0.75, expand_v=1.5, canon_kernel=3)},
    ),
    "canon_in_some": replace(
        BASE,
        num_layers=5,
        pattern=("canon", "plain"),
        layers={"canon": {"canon_set": "ABCD", "window": 7}, "plain": {"rope_theta": 100.0}},
    ),
    "olmo_hybrid": replace(
        BASE,
        num_layers=4,
        num_kv_heads=2,
        pattern=("gdn", "gdn", "gdn", "attention"),
        layers={
            "gdn": _mixer(
                "gated_deltanet",
                expand_k=0.75,
                expand_v=1.5,
                mixer_conv=True,
                o_norm_eps=0.1,
                allow_neg_eigval=True,
            ),
            "attention": {"qk_norm": "full", "norm_place": "output"},
        },
    ),
    "four_mixers": replace(
        BASE,
        num_layers=4,
        document_mask=True,
        pattern=("ssm", "gla", "wide", "attention"),
        layers={
            "ssm": _mixer("mamba2", ffn="none", state_dim=6, mixer_conv=True),
            "gla": {"canon_set": "AC"},
            "wide": {"ffn": "standard", "ffn_dim": 40, "window": 4, "num_kv_heads": 2},
            "attention": {"position": "nope", "canon_set": "BD", "canon_filter": "dynamic"},
        },
    ),
}
"""Models whose layers differ, or see a window."""
VARIANTS |= PATTERNS


def _words_with_mixer(name: str) -> set[tuple[str, str]]:
    """Return each word of a variant beside its mixer; all kinds of positions are attention."""
    words = name.split()
    mixer = "attention" if words[0] in POSITIONS else words[0]
    return {(mixer, word) for word in words}


def _some_variants() -> list[str]:
    """Return few variants in which every word occurs with every mixer that it occurs with."""
    missing = set[tuple[str, str]]().union(*map(_words_with_mixer, VARIANTS))
    chosen = []
    while missing:
        best = max(VARIANTS, key=lambda name: len(missing & _words_with_mixer(name)))
        chosen.append(best)
        missing -= _words_with_mixer(best)
    return chosen


SOME_VARIANTS = _some_variants()
"""For what takes seconds per variant; `make test-long` takes all."""
every_variant = pytest.mark.parametrize("args", VARIANTS.values(), ids=list(VARIANTS))


def build(args: ModelArgs, **options: Any) -> Transformer:
    """Return an initialized model with gains not 1, biases and dynamic filters not 0."""
    model = Transformer(args, **options)
    model.init_weights()
    generator = torch.Generator().manual_seed(args.init_seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.uniform_(0.5, 1.5, generator=generator)
            if name.endswith((".bias", ".up", ".per_head")):  # large filters amplify rounding
                bound = 0.5 if name.endswith(".bias") else 0.1
                parameter.uniform_(-bound, bound, generator=generator)
            if name.endswith((".D", ".A_log", ".dt_bias")) or name.startswith("smear."):
                parameter.uniform_(-1.5, 1.5, generator=generator)
    return model


@torch.no_grad()
def prefer_ids_from(model: Transformer, first: int) -> None:
    """Make an id of `first` or above the likeliest after every text."""
    assert model.output is not None
    model.output.weight[first:] *= 1000


def random_tokens(args: ModelArgs, rows: int, num_tokens: int, seed: int = 0) -> torch.Tensor:
    """Return int64 [rows, num_tokens], one in eight of them EOS."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(args.vocab_size, (rows, num_tokens), generator=generator)
    ends = torch.rand(rows, num_tokens, generator=generator) < 1 / 8
    return tokens.masked_fill(ends, args.eos_id)
