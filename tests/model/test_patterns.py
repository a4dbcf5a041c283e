"""Models whose layers differ: ten random patterns, each against loops, caches and counts."""

import random
from dataclasses import replace

import pytest
import torch

from canon_pretrain.model.args import ModelArgs, fill_model, flavor, to_json
from canon_pretrain.model.cache import Cache
from canon_pretrain.model.counts import num_parameters, state_bytes
from canon_pretrain.model.init import initial_value
from canon_pretrain.model.transformer import Transformer
from tests.reference_model import reference_logits
from tests.support import refused
from tests.variants import BASE, build, random_tokens

SEEDS = range(10)
NUM_TOKENS = 22


def random_layer(rng, ffns):
    """Return the fields of a random layer, with one of the feed-forwards `ffns`."""
    mixer = rng.choice(["attention", "attention", "gla", "mamba2", "gated_deltanet"])
    layer = {"mixer": mixer, "ffn": rng.choice(ffns)}
    layer["norm_place"] = rng.choice(["input", "input", "output"])
    sites = "AB" if layer["ffn"] == "none" else "ABC" if layer["ffn"] == "moe" else "ABCD"
    layer["canon_set"] = "".join(site for site in sites if rng.random() < 0.5)
    if layer["canon_set"]:
        layer["canon_kernel"] = rng.choice([2, 3, 4])
        layer["canon_filter"] = rng.choice(["static", "static", "dynamic"])

    if mixer == "attention":
        layer["position"] = rng.choice(
            ["rope", "nope", "alibi", "h_alibi", "relative", "partial_rope_c"]
        )
        layer["window"] = rng.choice([0, 0, 1, 4, 9, 40])
        layer["num_kv_heads"] = rng.choice([0, 2])
        layer["qk_norm"] = rng.choice(["none", "full", "per_head"])
        layer["attention_gate"] = rng.choice(["none", "per_channel"])
        return layer
    layer["mixer_conv"] = "B" not in layer["canon_set"] and rng.random() < 0.5
    if mixer == "mamba2":
        layer["state_dim"] = 6
    return layer


def random_model(seed, ffns=("gated", "standard", "moe", "none")):
    """Return a model of two to four random kinds of layers in a random order."""
    rng = random.Random(seed)
    names = ["a", "b", "c", "d"][: rng.randint(2, 4)]
    pattern = [*names, rng.choice(names)]
    rng.shuffle(pattern)
    layers = {name: random_layer(rng, ffns) for name in names}
    has_experts = any(layer["ffn"] == "moe" for layer in layers.values())
    return replace(
        BASE,
        num_layers=rng.randint(len(pattern), 7),
        num_experts=4 if has_experts else BASE.num_experts,
        document_mask=rng.random() < 0.5,
        tie_embeddings=rng.random() < 0.5,
        pattern=tuple(pattern),
        layers=layers,
    )


@pytest.fixture(params=SEEDS)
def model(request):
    return build(random_model(request.param)).double().eval()


@torch.no_grad()
@pytest.mark.parametrize("seed", SEEDS)
def test_logits_equal_loops(seed):
    """The loops have no experts: those are compared in test_moe."""
    model = build(random_model(seed, ffns=("gated", "standard", "none"))).double().eval()
    tokens = random_tokens(model.args, rows=2, num_tokens=NUM_TOKENS)

    expected = reference_logits(model.args, dict(model.named_parameters()), tokens)

    # the rotary tables are float32
    torch.testing.assert_close(model(tokens), expected, rtol=1e-5, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("parts", [[1] * NUM_TOKENS, [9, 1, 1, 4, 7], [20, 2]], ids=len)
def test_a_cache_equals_the_full_pass(model, parts):
    tokens = random_tokens(model.args, rows=3, num_tokens=NUM_TOKENS)
    is_real = torch.ones_like(tokens, dtype=torch.bool)
    is_real[1, :4] = False
    is_real[2, :7] = False

    cache = Cache.of(model.args)
    outputs = []
    for part, real_part in zip(tokens.split(parts, 1), is_real.split(parts, 1), strict=True):
        outputs.append(model(part, is_real_BT=real_part, cache=cache))

    expected = model(tokens, is_real_BT=is_real)
    torch.testing.assert_close(torch.cat(outputs, dim=1)[is_real], expected[is_real])


@torch.no_grad()
def test_reordered_rows_and_a_fixed_cache_equal_the_full_pass(model):
    tokens = random_tokens(model.args, rows=3, num_tokens=NUM_TOKENS)
    rows = torch.tensor([2, 0, 0])

    cache = Cache.of(model.args, capacity=NUM_TOKENS)
    model(tokens[:, :9], cache=cache)
    cache.select_rows(rows)
    cache.fix(torch.device("cpu"))
    outputs = []
    for t in range(9, NUM_TOKENS):
        earlier = cache.replaced()
        outputs.append(model(tokens[rows, t : t + 1], cache=cache))
        cache.keep(earlier, copies=True)

    torch.testing.assert_close(torch.cat(outputs, dim=1), model(tokens)[rows, 9:])


def test_no_token_sees_a_later_one(model):
    args = model.args
    tokens = random_tokens(args, rows=1, num_tokens=NUM_TOKENS)
    inputs = model.tok_embeddings(tokens).detach().requires_grad_()
    model.tok_embeddings.forward = lambda _: inputs

    for t in (0, 5, NUM_TOKENS - 1):
        (grad,) = torch.autograd.grad(model(tokens)[0, t].sum(), inputs)

        reached = grad[0].abs().sum(-1) > 0
        assert reached[t]
        assert not reached[t + 1 :].any()


def test_counts_equal_the_model(model):
    args = model.args
    assert num_parameters(args) == sum(p.numel() for p in model.parameters())

    # two caches: what a token adds, and what is there at any length
    numbers = {}
    with torch.no_grad():
        for num_tokens in (45, 50):
            cache = Cache.of(args)
            model.float()(random_tokens(args, rows=1, num_tokens=num_tokens), cache=cache)
            per_row = sum(layer.numbers_per_row for layer in cache.layers)
            per_token = sum(layer.numbers_per_token for layer in cache.layers)
            numbers[num_tokens] = (4 * per_token, 4 * per_row)
    assert numbers[45] == numbers[50] == state_bytes(args, itemsize=4)


def test_initial_values_are_of_the_whole_model(model):
    args = model.args
    fresh = Transformer(args)
    fresh.init_weights()
    for name, parameter in fresh.named_parameters():
        value = initial_value(args, name, parameter.shape)
        half = parameter.shape[0] // 2
        assert torch.equal(parameter[half:], value.rows(half, parameter.shape[0])), name


@torch.no_grad()
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("seed", list(SEEDS)[:4])
def test_compiled_blocks_are_one_graph_per_kind(seed):
    args = random_model(seed)
    eager = build(args).double().eval()
    compiled = build(args).double().eval()
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    for name, block in compiled.layers.named_children():
        compiled.layers[name] = torch.compile(block, backend=backend, fullgraph=True)
    tokens = random_tokens(args, rows=2, num_tokens=NUM_TOKENS)

    torch.testing.assert_close(compiled(tokens), eager(tokens))

    assert len(graphs) == len(args.kinds)


# ---- arguments


def test_a_pattern_repeats_and_may_be_cut():
    args = replace(BASE, num_layers=5, pattern=("gla", "attention", "attention"))

    assert args.layer_names == ["gla", "attention", "attention", "gla", "attention"]
    assert [(layer.mixer, count) for layer, count in args.layer_counts] == [
        ("gla", 2),
        ("attention", 3),
    ]


def test_a_layer_drops_what_it_has_no_use_for():
    args = replace(BASE, qk_norm="full", position="rope", pattern=("gla", "attention"))

    assert args.kinds["gla"].qk_norm == "none"
    assert args.kinds["gla"].position == "nope"
    assert args.kinds["attention"].qk_norm == "full"


def test_without_a_pattern_a_model_is_its_only_layer():
    assert BASE.kinds == {"layer": BASE}
    assert BASE.layer_counts == [(BASE, BASE.num_layers)]


def test_json_and_back():
    args = random_model(3)

    assert ModelArgs(**to_json(args)) == args
    assert hash(ModelArgs(**to_json(args))) == hash(args)


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"pattern": ("gdn",)}, "model.pattern"),
        ({"layers": {"gdn": {}}}, "model.pattern"),
        ({"pattern": ("gla", "gla", "x"), "layers": {"y": {}}}, "model.pattern"),
        ({"pattern": ("gla",), "layers": {"gla": {"dim": 8}}}, "config.unknown_choice"),
        ({"pattern": ("gla",), "layers": {"gla": {"qk_norm": "full"}}}, "model.conflict"),
        ({"pattern": ("gla",), "qk_norm": "full"}, "model.conflict"),
        ({"pattern": ("gla",), "layers": {"gla": {"window": 4}}}, "model.conflict"),
        ({"mixer": "gla", "position": "nope", "window": 4}, "model.conflict"),
        ({"window": -1}, "model.out_of_range"),
    ],
    ids=[
        "no_section", "no_layer", "cut_off", "shared_key", "of_another_mixer", "of_no_layer",
        "window_in_layer", "window_of_gla", "negative",
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused(changes, code):
    with refused(code):
        replace(BASE, **changes)


def test_a_mixer_in_a_pattern_has_the_papers_sizes():
    base = flavor("debug")
    sections = {"gdn": {"mixer": "gated_deltanet"}, "ssm": {"mixer": "mamba2", "num_heads": 8}}

    args = fill_model(base, {"pattern": ["gdn", "ssm"], "layers": sections, "canon_set": "AC"})

    gdn = args.kinds["gdn"]
    assert (gdn.num_heads, gdn.expand_k, gdn.expand_v, gdn.mixer_conv) == (12, 0.75, 1.5, True)
    assert (gdn.ffn, gdn.ffn_dim) == ("gated", 2 * base.dim)
    ssm = args.kinds["ssm"]
    assert (ssm.num_heads, ssm.ffn, ssm.canon_set) == (8, "gated", "AC")
    assert args.num_layers == base.num_layers
