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
    for name in ("wq", "wk", "wv", "wo", "q_norm", "k_norm", "canon_b"):
        layer.add(f"attention.{name}")
    for name in ("w1", "w2", "w3", "canon_d"):
        layer.add(f"feed_forward.{name}")
    assert names == {"tok_embeddings", "norm", "output"} | {f"layers.0.{name}" for name in layer}
    assert set(model.state_dict()) == {name for name, _ in model.named_parameters()}
    ropes = {id(block.attention.rope) for block in model.layers.values()}
    assert len(ropes) == 1


@pytest.mark.parametrize("changes", [{}, {"position": "alibi", "document_mask": True}], ids=str)
def test_blocks_receive_no_float_but_the_hidden_state(changes):
    # FSDP2's mixed precision would cast any other floating-point argument to bfloat16
    model = build(replace(BASE, canon_set="ABCD", **changes))
    calls = []
    for block in model.layers.values():
        hook = lambda _module, args, kwargs: calls.append((args[1:], kwargs))  # noqa: E731
        block.register_forward_pre_hook(hook, with_kwargs=True)

    model(torch.zeros(1, 3, dtype=torch.int64))

    assert len(calls) == BASE.num_layers
    for others, kwargs in calls:
        tensors = [leaf for leaf in tree_leaves(others) if isinstance(leaf, torch.Tensor)]
        assert not kwargs
        assert len(tensors) == (2 if changes else 0)
        assert not any(tensor.is_floating_point() for tensor in tensors)


@pytest.mark.parametrize("position", ["rope", "partial_rope_a", "partial_rope_b", "partial_rope_c"])
def test_rotation_continues_and_is_computed_in_float32(position):
    # reference_model.py has the angles
    x = torch.randn(2, 50, 4, 16, generator=torch.Generator().manual_seed(1))
    rope = Rope(replace(flavor("debug"), position=position))
    y, y_of_k = rope(x, x[:, :, :2])
    assert torch.equal(y[:, 0], x[:, 0])
    rotating_heads = 2 // rope.args.rope_share
    assert torch.equal(y_of_k[:, :, :rotating_heads], y[:, :, :rotating_heads])
    assert torch.equal(y_of_k[:, :, rotating_heads:], x[:, :, rotating_heads:2])
    assert not torch.equal(y[:, 1:], x[:, 1:])

    # a later start continues the angles
    for start in (1, 40):
        assert torch.equal(rope(x[:, start:], x[:, start:], start)[0], y[:, start:])

    # bfloat16 is rotated in float32
    x_bfloat16 = x.bfloat16()
    expected = rope(x_bfloat16.float(), x)[0].bfloat16()
    assert torch.equal(rope.to(torch.bfloat16)(x_bfloat16, x)[0], expected)
    assert rope.cos_TR.dtype == torch.float32
    assert not rope.state_dict()


@pytest.mark.parametrize("position", ["rope", "partial_rope_a", "partial_rope_b", "partial_rope_c"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_inference_rotates_by_the_same_angles(position, dtype):
    q = torch.randn(3, 7, 8, 16, generator=torch.Generator().manual_seed(1)).to(dtype)
    k = q[:, :, :4]
    rope = Rope(replace(flavor("debug"), position=position))
    # from position 0 on, later, and of rows at their own positions
    rows_B1 = torch.tensor([[5], [0], [90]])
    for start, num_tokens in ((0, 7), (0, 7), (40, 7), (41, 1), (rows_B1, 1), (rows_B1[:1, 0], 1)):
        inputs = (q[:, :num_tokens], k[:, :num_tokens], start)
        expected = rope(*inputs)
        with torch.no_grad():
            torch.testing.assert_close(rope(*inputs), expected)

    # tables that have changed, such as after `to_empty`, are read again
    with torch.no_grad():
        before, _ = rope(q, k, 3)
        rope.args = replace(rope.args, rope_theta=100.0)
        rope.reset(torch.device("cpu"))
        after, _ = rope(q, k, 3)
    assert not torch.equal(before, after)


def _relative_error(computed, expected, floor=0.0):
    """Return the largest error over the largest value, or over `floor` if that is larger."""
    expected = expected.detach()
    error = (computed.detach() - expected).abs().max()
    return float(error / expected.abs().max().clamp_min(floor))


@every_variant
def test_logits_and_gradients_equal_the_reference(args):
    model = build(args)
    tokens = random_tokens(args, rows=2, num_tokens=11)
    assert num_parameters(args) == sum(p.numel() for p in model.parameters())

    exact = {}
    for name, parameter in model.named_parameters():
        exact[name] = parameter.detach().double().requires_grad_()
    expected = reference_logits(args, exact, tokens)
    weights = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1))
    (expected * weights).sum().backward()
    # some gradients are exactly zero: compare their rounding with the others
    floor = 1e-2 * max(float(p.grad.abs().max()) for p in exact.values())

    tolerances = {torch.float32: 5e-5}
    if args.mixer != "attention":
        # the rotary tables are float32, the recurrences are as exact as their inputs
        tolerances[torch.float64] = 1e-10
    for dtype, tolerance in tolerances.items():
        model.to(dtype).zero_grad()
        logits = model(tokens)
        (logits * weights).sum().backward()

        assert logits.shape == (*tokens.shape, args.vocab_size)
        assert _relative_error(logits, expected) < tolerance
        for name, parameter in model.named_parameters():
            if "canon" in name and not args.canon_trainable:
                assert not parameter.requires_grad, name
                assert parameter.grad is None, name
            else:
                error = _relative_error(parameter.grad, exact[name].grad, floor)
                assert error < tolerance, name


def _influence(model, tokens_T):
    """Return the largest gradient of each logits by each token's embedding, [T, T]."""
    embeddings = []

    def keep(_module, _inputs, output):
        output.retain_grad()
        embeddings.append(output)

    handle = model.tok_embeddings.register_forward_hook(keep)
    # row t of the batch uses logits[t] only: one backward pass computes the whole matrix
    logits = model(tokens_T.expand(len(tokens_T), -1))
    handle.remove()
    weights = torch.randn(logits.shape[-1], generator=torch.Generator().manual_seed(0))
    (logits.diagonal(dim1=0, dim2=1).T @ weights).sum().backward()
    return embeddings[0].grad.abs().amax(dim=-1)


# 2 is EOS, which ends its document
TOKENS = (7, 5, 2, 9, 11, 4, 2, 2, 6)
DOCUMENTS = ((0, 1, 2), (3, 4, 5, 6), (7,), (8,))


@every_variant
def test_tokens_depend_on_earlier_ones_of_their_document(args):
    influence = _influence(build(args), torch.tensor(TOKENS))

    expected = torch.zeros_like(influence, dtype=torch.bool)
    documents = DOCUMENTS if args.document_mask else (tuple(range(len(TOKENS))),)
    for document in documents:
        for t, s in itertools.product(document, document):
            expected[t, s] = s <= t
    assert torch.equal(influence != 0, expected)


# ---- sizes against the specification; arguments

GPT2 = {
    "ffn": "standard",
    "ffn_dim": 8192,
    "ffn_activation": "gelu",
    "norm": "layernorm",
    "bias": True,
}
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
        ("1b3", {"embed_norm": True}, 1_345_423_360 + 2048),
        # 16 channels of 32 heads, and as many of 1024 distances
        ("1b3", {"position": "relative"}, 1_345_423_360 + 24 * 16 * (32 * 2048 + 1024)),
        ("1b3", {**SHIFT, "canon_set": "AC"}, 1_345_423_360 + 24 * 2 * 2048),
        # OLMo 2's: norms in other places, and two gains of D for all heads of q and of k
        ("1b3", {"norm_place": "output", "qk_norm": "full"}, 1_345_423_360 + 24 * 2 * 2048),
    ],
)
def test_parameter_counts_equal_the_specification(name, changes, expected):
    assert num_parameters(replace(flavor(name), **changes)) == expected


def test_flops_exclude_only_the_token_embedding():
    assert round(flops_per_token(flavor("1b3"), 4096) / 1e9, 2) == 10.10

    args = flavor("debug")
    # one more token costs one more row of the head, and nothing in the embedding
    wider = replace(args, vocab_size=args.vocab_size + 1)
    assert flops_per_token(wider, 8) - flops_per_token(args, 8) == 6 * args.dim
    assert flops_per_token(args, 9) - flops_per_token(args, 8) == 12 * args.num_layers * args.dim
    # a tied embedding is the output matrix
    assert flops_per_token(replace(args, tie_embeddings=True), 64) == flops_per_token(args, 64)


ROPE_A = {"position": "partial_rope_a"}
ROPE_B = {"position": "partial_rope_b"}
ROPE_C = {"position": "partial_rope_c"}


def test_equivalent_args_are_equal():
    for canon_set in ("CA", "ca", "Ac"):
        assert ModelArgs(canon_set=canon_set) == ModelArgs(canon_set="AC")
    assert ModelArgs(num_heads=8, num_kv_heads=8) == ModelArgs(num_heads=8)
    assert ModelArgs(num_heads=8, num_kv_heads=4) != ModelArgs(num_heads=8)
    h_alibi = ModelArgs(num_heads=12, dim=96, position="h_alibi")
    assert replace(h_alibi, h_alibi_heads=6) == h_alibi
    assert replace(h_alibi, h_alibi_heads=4) != h_alibi
    gla = ModelArgs(mixer="gla", position="nope")
    assert replace(gla, o_norm_eps=gla.norm_eps) == gla
    assert replace(gla, o_norm_eps=1e-3) != gla
    relative = ModelArgs(position="relative")
    assert replace(relative, relative_extent=1024) == relative
    assert replace(relative, relative_extent=9, window=9) == replace(relative, window=9)
    assert replace(relative, relative_extent=9) != relative


# the last key is the one that is refused
OUT_OF_RANGE = [
    {"canon_kernel": 17},
    {"canon_kernel": 1},
    {"init_seed": -1},
    {"num_kv_heads": -1},
    ROPE_C | {"partial_rope_dim": 64},
    ROPE_C | {"partial_rope_dim": 7},
    {"position": "h_alibi", "h_alibi_heads": 33},
    {"position": "h_alibi", "h_alibi_heads": -1},
    {"position": "relative", "relative_dim": 0},
    {"position": "relative", "relative_extent": -1},
    {"position": "relative", "window": 8, "relative_extent": 9},
    {"vocab_size": 0},
    {"num_heads": 0},
    {"norm_eps": 0.0},
    {"rope_theta": float("nan")},
    {"document_mask": True, "eos_id": 32000},
    {"document_mask": True, "eos_id": -1},
    {"state_dim": 0},
    {"output_gate_rank": -1},
    {"o_norm_eps": -1e-5},
    {"expand_k": 0.0},
    {"expand_v": float("inf")},
]
# each alone is refused: it needs another option
CONFLICTS = {
    "partial_rope_dim": 32,
    "h_alibi_heads": 4,
    "relative_dim": 8,
    "relative_extent": 64,
    "canon_kernel": 3,
    "canon_residual": False,
    "canon_trainable": False,
    "ffn_activation": "gelu",
    "canon_scale": "sqrt",
    "canon_filter": "shift",
}
SQRT = {"canon_set": "A", "canon_scale": "sqrt"}
# the refused key, and the settings
OF_FILTERS = [
    ("canon_residual", SQRT | {"canon_residual": False}),
    ("canon_activation", SQRT | {"canon_activation": True}),
    ("canon_residual", SHIFT | {"canon_residual": False}),
    ("canon_activation", SHIFT | {"canon_activation": True}),
    ("canon_kernel", SHIFT | {"canon_kernel": 3}),
    ("mimetic_rate", {"mixer": "mamba2", "position": "nope", "mimetic_rate": 4.0}),
]
ATTENTION = {}
GLA = {"mixer": "gla", "position": "nope", "num_heads": 4}
MAMBA2 = {"mixer": "mamba2", "position": "nope", "num_heads": 4}
DELTANET = {"mixer": "gated_deltanet", "position": "nope", "num_heads": 4}
RECURRENT = [{"mixer": name, "position": "nope", "num_heads": 4} for name in MIXERS[1:]]
# the refused key, the mixers that refuse it, and its setting
ONLY_SOME_MIXERS = [
    ("position", RECURRENT, {"position": "rope"}),
    ("qk_norm", RECURRENT, {"qk_norm": "full"}),
    ("attention_gate", RECURRENT, {"attention_gate": "per_channel"}),
    ("num_kv_heads", RECURRENT, {"num_kv_heads": 2}),
    ("bias", RECURRENT, {"bias": True}),
    ("partial_rope_dim", [GLA], {"partial_rope_dim": 8}),
    ("h_alibi_heads", RECURRENT, {"h_alibi_heads": 2}),
    ("mixer_conv", RECURRENT, {"mixer_conv": True, "canon_set": "AB"}),
    ("mixer_conv", [ATTENTION], {"mixer_conv": True}),
    ("expand_k", [ATTENTION, MAMBA2], {"expand_k": 1.0}),
    ("expand_v", [ATTENTION, MAMBA2], {"expand_v": 2.0}),
    ("output_gate_rank", [ATTENTION, MAMBA2], {"output_gate_rank": 16}),
    ("o_norm_eps", [ATTENTION, MAMBA2], {"o_norm_eps": 1e-3}),
    ("allow_neg_eigval", [ATTENTION, GLA, MAMBA2], {"allow_neg_eigval": True}),
    ("gla_feature_map", [ATTENTION, MAMBA2, DELTANET], {"gla_feature_map": "elu"}),
    ("state_dim", [ATTENTION, GLA, DELTANET], {"state_dim": 32}),
    ("mimetic_init", [ATTENTION, GLA, DELTANET], {"mimetic_init": True}),
    ("mimetic_rate", [ATTENTION, GLA, DELTANET], {"mimetic_rate": 4.0}),
    ("canon_set", [MAMBA2], {"ffn": "none", "canon_set": "AC"}),
    ("canon_set", [MAMBA2], {"ffn": "none", "canon_set": "BD"}),
    ("canon_set", [MAMBA2], {"ffn": "none", "canon_set": "F"}),
    ("canon_set", [ATTENTION], {"canon_set": "BK"}),
    ("canon_set", [ATTENTION], {"canon_set": "ABCDQ"}),
    ("canon_set", [ATTENTION], {"canon_set": "BV"}),
    ("canon_set", [MAMBA2], {"canon_set": "Q"}),
    ("canon_set", [MAMBA2], {"canon_set": "K"}),
    ("canon_set", [MAMBA2], {"canon_set": "V"}),
    ("mixer_conv", [GLA], {"mixer_conv": True, "canon_set": "K"}),
    ("mixer_conv", [GLA], {"mixer_conv": True, "canon_set": "QV"}),
    ("canon_kernel", [GLA], {"canon_kernel": 3}),
    ("ffn_activation", [MAMBA2], {"ffn": "none", "ffn_activation": "relu2"}),
]
# the size, its divisor, and the args
NOT_DIVISIBLE = [
    ("2 dim", 5, MAMBA2 | {"num_heads": 5, "dim": 32}),
    ("expand_k dim", 6, DELTANET | {"dim": 36, "num_heads": 6, "expand_k": 0.75}),
    ("expand_v dim", 4, GLA | {"dim": 32, "expand_v": 0.7}),
    ("dim", 8, {"dim": 100, "num_heads": 8}),
    ("num_heads", 3, {"num_heads": 4, "num_kv_heads": 3}),
    ("head_dim", 2, {"dim": 12, "num_heads": 4}),
    ("num_heads", 2, ROPE_A | {"dim": 24, "num_heads": 3}),
    ("head_dim", 4, ROPE_A | {"dim": 24, "num_heads": 4}),
    ("num_heads", 4, ROPE_B | {"dim": 24, "num_heads": 6}),
    ("head_dim", 2, ROPE_B | {"dim": 12, "num_heads": 4}),
    ("head_dim", 8, ROPE_C | {"dim": 48, "num_heads": 4}),
    ("num_heads", 2, {"position": "h_alibi", "dim": 24, "num_heads": 3}),
    ("num_kv_heads", 2, ROPE_A | {"num_heads": 32, "num_kv_heads": 1}),
    ("num_kv_heads", 4, ROPE_B | {"num_heads": 32, "num_kv_heads": 2}),
]
UNKNOWN_CHOICES = {
    "position": "ropes",
    "mixer": "gdn",
    "gla_feature_map": "relu",
    "ffn_activation": "relu",
    "norm_place": "post",
}


@pytest.mark.parametrize("canon_set", ["ABX", "AAB", "KAK"])
def test_bad_canon_sets_are_refused(canon_set):
    with refused("model.canon_set", given=canon_set):
        ModelArgs(canon_set=canon_set)


@pytest.mark.parametrize("changes", OUT_OF_RANGE, ids=str)
def test_values_out_of_range_are_refused(changes):
    with refused("model.out_of_range", name=list(changes)[-1]):
        ModelArgs(**changes)


@pytest.mark.parametrize("name", CONFLICTS)
def test_options_without_those_that_they_need_are_refused(name):
    with refused("model.conflict", name=name):
        ModelArgs(**{name: CONFLICTS[name]})


@pytest.mark.parametrize(("name", "changes"), OF_FILTERS)
def test_options_of_other_filters_are_refused(name, changes):
    with refused("model.conflict", name=name):
        ModelArgs(**changes)


@pytest.mark.parametrize(("name", "mixers", "changes"), ONLY_SOME_MIXERS)
def test_options_of_other_mixers_are_refused(name, mixers, changes):
    for mixer in mixers:
        with refused("model.conflict", name=name):
            ModelArgs(**mixer | changes)


@pytest.mark.parametrize(("name", "divisor", "changes"), NOT_DIVISIBLE)
def test_sizes_that_are_not_divisible_are_refused(name, divisor, changes):
    with refused("model.not_divisible", name=name, divisor=divisor):
        ModelArgs(**changes)


@pytest.mark.parametrize("name", UNKNOWN_CHOICES)
def test_unknown_choices_are_refused(name):
    with refused("config.unknown_choice", name=name):
        ModelArgs(**{name: UNKNOWN_CHOICES[name]})


# what a user sets, and what else the paper sets for it
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


@pytest.mark.parametrize(("changes", "filled"), SIZES, ids=str)
def test_a_flavor_gets_the_papers_sizes_of_a_mixer(changes, filled):
    base = flavor("12L768D")
    is_attention = changes.get("mixer", "attention") == "attention"
    position = {} if is_attention else {"position": "nope"}

    sizes = fill_sizes(base, changes)

    assert sizes == changes | filled | position
    args = replace(base, **sizes)
    if "num_heads" not in changes and args.ffn != "moe":
        # 12 D^2 a layer of Llama, as there
        layers = num_parameters(args) - 2 * args.vocab_size * args.dim
        assert abs(layers / (12 * 12 * args.dim**2) - 1) < 0.05


def _visited(args):
    """Count by hooks what one token visits.

    Return the multiply-adds of its matrices, the numbers of each layer's state, and those of all
    Canon memories.
    """
    model = build(args)
    products = []
    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            hook = lambda linear, _inputs, _y: products.append(linear.weight.numel())  # noqa: E731
            module.register_forward_hook(hook)
    cache = Cache.of(args)
    with torch.no_grad():
        model(torch.tensor([[5]]), cache=cache)

    states = [layer.states["state"].numel() for layer in cache.layers]
    memories = 0
    for layer in cache.layers:
        memories += sum(memory._sums_PB1C.numel() for memory in layer.canon.values())
    return sum(products), states, memories


@pytest.mark.parametrize("name", ["gla BD", "mamba2 conv", "mamba2_mlp ABCD", "gdn conv expand"])
def test_flops_and_states_equal_a_direct_count(name):
    args = variant(name)

    products, states, memories = _visited(args)

    assert states == [state_size(args)] * args.num_layers
    assert state_bytes(args, 2) == (0, 4 * (sum(states) + memories))
    # 6 per weight that is not the embedding, of which all but norms, taps and such are matrices
    small = num_parameters(args) - args.vocab_size * args.dim - products
    assert 0 < small < 0.3 * products
    flops_per_state = 18 if args.mixer == "gated_deltanet" else 12
    expected = 6 * (products + small) + flops_per_state * sum(states)
    assert flops_per_token(args, 64) == expected
    assert flops_per_token(args, 128) == expected


def test_an_unknown_flavor_is_refused_with_the_nearest():
    with refused("model.unknown_flavor", nearest="1b3_released"):
        flavor("1b3_relased")
