"""The model's structure, sizes and arguments, and every variant against the reference."""

import itertools
from dataclasses import replace

import pytest
import torch
from torch.utils._pytree import tree_leaves

from canon_pretrain.model.args import MIXERS, ModelArgs, fill_sizes, flavor
from canon_pretrain.model.attention import Rope
from canon_pretrain.model.cache import Cache
from canon_pretrain.model.counts import (
    flops_per_token,
    num_parameters,
    state_bytes,
    state_size,
)
from canon_pretrain.model.transformer import Transformer
from tests.reference_model import reference_logits
from tests.support import refused
from tests.variants import BASE, build, every_variant, random_tokens, variant


def test_parameter_names():
    args = replace(BASE, canon_set="ABCD", qk_norm="full", num_layers=1, canon_trainable=False)
    with torch.device("meta"):
        model = Transformer(args)
    names = {name.removesuffix(".weight") for name, _ in model.named_parameters()}
    layer = {"attention_norm", "ffn_norm", "canon_a", "canon_c"}
    layer |= {f"attention.{n}" for n in ("wq", "wk", "wv", "wo", "q_norm", "k_norm", "canon_b")}
    layer |= {f"feed_forward.{n}" for n in ("w1", "w2", "w3", "canon_d")}
    assert names == {"tok_embeddings", "norm", "output"} | {f"layers.0.{n}" for n in layer}
    assert set(model.state_dict()) == {name for name, _ in model.named_parameters()}
    ropes = {id(block.attention.rope) for block in model.layers.values()}
    assert len(ropes) == 1


@pytest.mark.parametrize("changes", [{}, {"position": "alibi", "document_mask": True}], ids=str)
def test_blocks_receive_no_float_but_the_hidden_state(changes):
    # FSDP2's mixed precision would cast any other floating-point argument to bfloat16
    seen = []
    model = build(replace(BASE, canon_set="ABCD", **changes))
    for block in model.layers.values():
        hook = lambda _module, args, kwargs: seen.append((args[1:], kwargs))  # noqa: E731
        block.register_forward_pre_hook(hook, with_kwargs=True)
    model(torch.zeros(1, 3, dtype=torch.int64))
    assert len(seen) == BASE.num_layers
    for others, kwargs in seen:
        tensors = [leaf for leaf in tree_leaves(others) if isinstance(leaf, torch.Tensor)]
        assert not kwargs and len(tensors) == (2 if changes else 0)
        assert not any(tensor.is_floating_point() for tensor in tensors)


@pytest.mark.parametrize("position", ["rope", "partial_rope_a", "partial_rope_b", "partial_rope_c"])
def test_rotation_continues_and_is_computed_in_float32(position):
    # reference_model.py has the angles
    x = torch.randn(2, 50, 4, 16, generator=torch.Generator().manual_seed(1))
    rope = Rope(replace(flavor("debug"), position=position))
    y = rope(x)
    assert torch.equal(y[:, 0], x[:, 0]) and not torch.equal(y[:, 1:], x[:, 1:])
    for start in (1, 40):  # continues the angles
        assert torch.equal(rope(x[:, start:], start), y[:, start:])
    low = x.bfloat16()  # in float32 inside
    assert torch.equal(rope.to(torch.bfloat16)(low), rope(low.float()).bfloat16())
    assert rope.cos_TR.dtype == torch.float32 and not rope.state_dict()


def _relative_error(found, expected, floor=0.0):
    found, expected = found.detach(), expected.detach()
    return float((found - expected).abs().max() / expected.abs().max().clamp_min(floor))


@every_variant
def test_logits_and_gradients_equal_the_reference(args):
    model, tokens = build(args), random_tokens(args, rows=2, num_tokens=11)
    assert num_parameters(args) == sum(p.numel() for p in model.parameters())
    params = {n: p.detach().double().requires_grad_() for n, p in model.named_parameters()}
    expected = reference_logits(args, params, tokens)
    weights = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1))
    (expected * weights).sum().backward()
    # some gradients are exactly zero: compare their rounding with the others
    floor = 1e-2 * max(float(p.grad.abs().max()) for p in params.values())
    # the rotary tables are float32, the recurrences are as exact as their inputs
    exact = [(torch.float64, 1e-10)] if args.mixer != "attention" else []
    for dtype, tolerance in ((torch.float32, 5e-5), *exact):
        model.to(dtype).zero_grad()
        logits = model(tokens)
        assert logits.shape == (*tokens.shape, args.vocab_size)
        assert _relative_error(logits, expected) < tolerance
        (logits * weights).sum().backward()
        for name, parameter in model.named_parameters():
            if "canon" in name and not args.canon_trainable:
                assert not parameter.requires_grad and parameter.grad is None, name
            else:
                error = _relative_error(parameter.grad, params[name].grad, floor)
                assert error < tolerance, name


def _influence(model, tokens_T):
    kept = []

    def keep(_module, _inputs, output):
        output.retain_grad()
        kept.append(output)

    handle = model.tok_embeddings.register_forward_hook(keep)
    # row t of the batch uses logits[t] only: one backward pass computes the whole matrix
    logits = model(tokens_T.expand(len(tokens_T), -1))
    handle.remove()
    weights = torch.randn(logits.shape[-1], generator=torch.Generator().manual_seed(0))
    (logits.diagonal(dim1=0, dim2=1).T @ weights).sum().backward()
    return kept[0].grad.abs().amax(dim=-1)


# 2 is EOS, which ends its document
TOKENS = (7, 5, 2, 9, 11, 4, 2, 2, 6)
DOCUMENTS = ((0, 1, 2), (3, 4, 5, 6), (7,), (8,))


@every_variant
def test_tokens_depend_on_earlier_ones_of_their_document(args):
    influence = _influence(build(args), torch.tensor(TOKENS))
    everything = tuple(range(len(TOKENS)))
    expected = torch.zeros_like(influence, dtype=torch.bool)
    for document in DOCUMENTS if args.document_mask else (everything,):
        for t, s in itertools.product(document, document):
            expected[t, s] = s <= t
    assert torch.equal(influence != 0, expected)


# ---- sizes against the specification; arguments

GPT2 = {"ffn": "standard", "ffn_dim": 8192, "ffn_activation": "gelu", "norm": "layernorm"}
GPT2 |= {"bias": True}
SHIFT = {"canon_set": "A", "canon_filter": "shift", "canon_kernel": 2}


@pytest.mark.parametrize(
    ("name", "changes", "expected"),
    [
        ("4M", {"canon_set": "ABCD"}, 4_479_232),
        ("1b3", {}, 1_345_423_360),
        ("1b3", {"canon_set": "ABCD"}, 1_345_423_360 + 2_039_808),
        ("1b3_released", {"canon_set": "ABCD"}, 1_364_297_728 + 2_064_384),
        # GPT2(RoPE), width 4D: 24 layers of 12 D^2 + 2 D, two ends of 32000 D, one D
        ("1b3", {"ffn": "standard", "ffn_dim": 8192}, 1_339_131_904),
        # its Canon-D has 4D channels, not 2F: 9 D channels a layer, 4 taps
        ("1b3", {"ffn": "standard", "ffn_dim": 8192, "canon_set": "ABCD"}, 1_340_901_376),
        # the original GPT2: 9 D biases in the matrices of a layer, 2 D and one D in the norms
        ("1b3", GPT2, 1_339_131_904 + 24 * 11 * 2048 + 2048),
        ("1b3", {"num_kv_heads": 8, "canon_set": "B"}, 1_194_428_416 + 24 * 4 * 3072),
        ("1b3", {"num_kv_heads": 8, "canon_set": "QKV"}, 1_194_428_416 + 24 * 4 * 3072),
        ("1b3", {"num_kv_heads": 8, "canon_set": "KV"}, 1_194_428_416 + 24 * 4 * 1024),
        ("1b3", {"canon_set": "KVOF"}, 1_345_423_360 + 24 * 4 * 4 * 2048),
        ("1b3", {"canon_set": "KVOF", "canon_scale": "sqrt"}, 1_345_423_360 + 24 * 16 * 2048),
        ("1b3", {"canon_set": "ABCD", "canon_filter": "scalar"}, 1_345_423_360 + 24 * 4 * 4),
        ("1b3", {"smear": True}, 1_345_423_360 + 12 + 1),
        ("1b3", {**SHIFT, "canon_set": "AC"}, 1_345_423_360 + 24 * 2 * 2048),
    ],
)
def test_parameter_counts_equal_the_specification(name, changes, expected):
    assert num_parameters(replace(flavor(name), **changes)) == expected


def test_flops_exclude_only_the_token_embedding():
    assert round(flops_per_token(flavor("1b3"), 4096) / 1e9, 2) == 10.10
    args = flavor("debug")
    wider = replace(args, vocab_size=args.vocab_size + 1)
    # one more token costs one more row of the head, and nothing in the embedding
    assert flops_per_token(wider, 8) - flops_per_token(args, 8) == 6 * args.dim
    assert flops_per_token(args, 9) - flops_per_token(args, 8) == 12 * args.num_layers * args.dim
    # a tied embedding is the output matrix
    assert flops_per_token(replace(args, tie_embeddings=True), 64) == flops_per_token(args, 64)


def test_equivalent_args_are_equal():
    for canon_set in ("CA", "ca", "Ac"):
        assert ModelArgs(canon_set=canon_set) == ModelArgs(canon_set="AC")
    assert ModelArgs(num_heads=8, num_kv_heads=8) == ModelArgs(num_heads=8)
    assert ModelArgs(num_heads=8, num_kv_heads=4) != ModelArgs(num_heads=8)


A, B, C = ({"position": f"partial_rope_{letter}"} for letter in "abc")
OUT_OF_RANGE = [
    *({"canon_kernel": 17}, {"canon_kernel": 1}, {"init_seed": -1}, {"num_kv_heads": -1}),
    *(C | {"partial_rope_dim": 64}, C | {"partial_rope_dim": 7}),
    *({"vocab_size": 0}, {"num_heads": 0}, {"norm_eps": 0.0}, {"rope_theta": float("nan")}),
    *({"document_mask": True, "eos_id": given} for given in (32000, -1)),
    *({"state_dim": 0}, {"output_gate_rank": -1}, {"expand_k": 0.0}, {"expand_v": float("inf")}),
]
CONFLICTS = {"partial_rope_dim": 32, "canon_kernel": 3, "canon_residual": False}
CONFLICTS |= {"canon_trainable": False, "ffn_activation": "gelu"}
CONFLICTS |= {"canon_scale": "sqrt", "canon_filter": "shift"}
SQRT = {"canon_set": "A", "canon_scale": "sqrt"}
OF_FILTERS = [
    ("canon_residual", SQRT | {"canon_residual": False}),
    ("canon_activation", SQRT | {"canon_activation": True}),
    ("canon_residual", SHIFT | {"canon_residual": False}),
    ("canon_activation", SHIFT | {"canon_activation": True}),
    ("canon_kernel", SHIFT | {"canon_kernel": 3}),
    ("mimetic_rate", {"mixer": "mamba2", "position": "nope", "mimetic_rate": 4.0}),
]
MIXED = {name: {"mixer": name, "position": "nope", "num_heads": 4} for name in MIXERS[1:]}
ONLY_SOME_MIXERS = [
    *(("position", given, {"position": "rope"}) for given in MIXED.values()),
    *(("qk_norm", given, {"qk_norm": "full"}) for given in MIXED.values()),
    *(("num_kv_heads", given, {"num_kv_heads": 2}) for given in MIXED.values()),
    *(("bias", given, {"bias": True}) for given in MIXED.values()),
    ("partial_rope_dim", MIXED["gla"], {"partial_rope_dim": 8}),
    *(("mixer_conv", given, {"mixer_conv": True, "canon_set": "AB"}) for given in MIXED.values()),
    ("mixer_conv", {}, {"mixer_conv": True}),
    *(
        (name, given, {name: value})
        for name, value in {"expand_k": 1.0, "expand_v": 2.0, "output_gate_rank": 16}.items()
        for given in ({}, MIXED["mamba2"])
    ),
    *(
        ("gla_feature_map", given, {"gla_feature_map": "elu"})
        for given in ({}, MIXED["mamba2"], MIXED["gated_deltanet"])
    ),
    *(
        (name, given, {name: value})
        for name, value in {"state_dim": 32, "mimetic_init": True, "mimetic_rate": 4.0}.items()
        for given in ({}, MIXED["gla"], MIXED["gated_deltanet"])
    ),
    *(("canon_set", MIXED["mamba2"], {"ffn": "none", "canon_set": c}) for c in ("AC", "BD", "F")),
    *(("canon_set", {}, {"canon_set": canon_set}) for canon_set in ("BK", "ABCDQ", "BV")),
    *(("canon_set", MIXED["mamba2"], {"canon_set": canon_set}) for canon_set in "QKV"),
    *(
        ("mixer_conv", MIXED["gla"], {"mixer_conv": True, "canon_set": canon_set})
        for canon_set in ("K", "QV")
    ),
    ("canon_kernel", MIXED["gla"], {"canon_kernel": 3}),
    ("ffn_activation", MIXED["mamba2"], {"ffn": "none", "ffn_activation": "relu2"}),
]
NOT_DIVISIBLE = [
    ("2 dim", 5, MIXED["mamba2"] | {"num_heads": 5, "dim": 32}),
    ("expand_k dim", 6, MIXED["gated_deltanet"] | {"dim": 36, "num_heads": 6, "expand_k": 0.75}),
    ("expand_v dim", 4, MIXED["gla"] | {"dim": 32, "expand_v": 0.7}),
    ("dim", 8, {"dim": 100, "num_heads": 8}),
    ("num_heads", 3, {"num_heads": 4, "num_kv_heads": 3}),
    ("head_dim", 2, {"dim": 12, "num_heads": 4}),
    ("num_heads", 2, A | {"dim": 24, "num_heads": 3}),
    ("head_dim", 4, A | {"dim": 24, "num_heads": 4}),
    ("num_heads", 4, B | {"dim": 24, "num_heads": 6}),
    ("head_dim", 2, B | {"dim": 12, "num_heads": 4}),
    ("head_dim", 8, C | {"dim": 48, "num_heads": 4}),
    ("num_heads", 2, {"position": "h_alibi", "dim": 24, "num_heads": 3}),
    ("num_kv_heads", 2, A | {"num_heads": 32, "num_kv_heads": 1}),
    ("num_kv_heads", 4, B | {"num_heads": 32, "num_kv_heads": 2}),
]
REFUSED = [
    *(("model.canon_set", {"given": given}, {"canon_set": given}) for given in ("ABX", "KAK")),
    *(("model.out_of_range", {"name": list(changes)[-1]}, changes) for changes in OUT_OF_RANGE),
    *(("model.conflict", {"name": name}, {name: given}) for name, given in CONFLICTS.items()),
    *(("model.conflict", {"name": n}, given | more) for n, given, more in ONLY_SOME_MIXERS),
    *(("model.conflict", {"name": name}, changes) for name, changes in OF_FILTERS),
    *(("model.not_divisible", {"name": n, "divisor": d}, c) for n, d, c in NOT_DIVISIBLE),
    ("config.unknown_choice", {"name": "position"}, {"position": "ropes"}),
    ("config.unknown_choice", {"name": "mixer"}, {"mixer": "gdn"}),
    ("config.unknown_choice", {"name": "gla_feature_map"}, {"gla_feature_map": "relu"}),
    ("config.unknown_choice", {"name": "ffn_activation"}, {"ffn_activation": "relu"}),
]


@pytest.mark.parametrize(("code", "fields", "changes"), REFUSED)
def test_bad_args_are_refused(code, fields, changes):
    with refused(code, **fields):
        ModelArgs(**changes)


SIZES = [
    ({}, {}),
    ({"mixer": "attention"}, {}),
    ({"mixer": "gla"}, {"num_heads": 4, "mixer_conv": False}),
    ({"mixer": "gla", "num_heads": 8, "mixer_conv": True}, {}),
    (
        {"mixer": "gated_deltanet", "canon_set": "kvof"},
        {
            "num_heads": 12,
            "mixer_conv": False,
            "expand_k": 0.75,
            "expand_v": 1.5,
            "ffn_dim": 1536,
        },
    ),
    ({"mixer": "mamba2"}, {"num_heads": 16, "mixer_conv": True, "ffn": "none", "num_layers": 24}),
    (
        {"mixer": "mamba2", "canon_set": "ab"},
        {"num_heads": 16, "mixer_conv": False, "ffn": "none", "num_layers": 24},
    ),
    (
        {"mixer": "mamba2", "ffn": "gated", "dim": 512},
        {"num_heads": 16, "mixer_conv": True, "ffn_dim": 1024},
    ),
    (
        {"mixer": "gated_deltanet"},
        {"num_heads": 12, "mixer_conv": True, "ffn_dim": 1536, "expand_k": 0.75, "expand_v": 1.5},
    ),
    ({"ffn": "standard"}, {"ffn_dim": 3072}),
    ({"ffn": "moe"}, {"ffn_dim": 768}),
]


@pytest.mark.parametrize(("given", "filled"), SIZES, ids=str)
def test_a_flavor_gets_the_papers_sizes_of_a_mixer(given, filled):
    base = flavor("12L768D")
    position = {"position": "nope"} if given.get("mixer", "attention") != "attention" else {}
    assert fill_sizes(base, given) == given | filled | position
    args = replace(base, **fill_sizes(base, given))
    per_layer = num_parameters(args) - 2 * args.vocab_size * args.dim
    if given.get("num_heads") is None and args.ffn != "moe":  # 12 D^2 a layer of Llama, as there
        assert abs(per_layer / (12 * 12 * args.dim**2) - 1) < 0.05


def _visited(args):
    """Count the multiply-adds of one token's matrices and the numbers of its states, by hooks."""
    model, found = build(args), []
    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            hook = lambda m, given, y: found.append(m.weight.numel())  # noqa: E731
            module.register_forward_hook(hook)
    cache = Cache(args.num_layers)
    with torch.no_grad():
        model(torch.tensor([[5]]), cache=cache)
    memories = [m._sums_PB1C.numel() for layer in cache.layers for m in layer.canon.values()]
    return sum(found), [layer.states["state"].numel() for layer in cache.layers], sum(memories)


@pytest.mark.parametrize("name", ["gla BD", "mamba2 conv", "mamba2_mlp ABCD", "gdn conv expand"])
def test_flops_and_states_equal_a_direct_count(name):
    args = variant(name)
    products, states, memories = _visited(args)
    assert states == [state_size(args)] * args.num_layers
    assert state_bytes(args, 2) == (0, 4 * (sum(states) + memories))
    # 6 per weight that is not the embedding, of which all but norms, taps and such are matrices
    small = num_parameters(args) - args.vocab_size * args.dim - products
    assert 0 < small < 0.3 * products
    mixing = (18 if args.mixer == "gated_deltanet" else 12) * sum(states)
    assert (
        flops_per_token(args, 64) == flops_per_token(args, 128) == 6 * (products + small) + mixing
    )


def test_an_unknown_flavor_is_refused_with_the_nearest():
    with refused("model.unknown_flavor", nearest="1b3_released"):
        flavor("1b3_relased")
