"""The mixture of experts against loops in float64, torchtitan's MoE, and its own decoding."""

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torchtitan.models.moe.moe import MoE as TitanMoE
from torchtitan.models.moe.moe import MoEArgs

from canon_pretrain.model import counts
from canon_pretrain.model.args import ModelArgs
from canon_pretrain.model.cache import Cache
from canon_pretrain.model.init import initial_value
from canon_pretrain.model.moe import MoE, grouped_linear
from canon_pretrain.model.transformer import Transformer, make_feed_forward
from canon_pretrain.run.sections import Loss
from canon_pretrain.titan.spec import head_loss
from tests.support import refused
from tests.variants import build, random_tokens, variant

ARGS = ModelArgs(
    vocab_size=40, num_layers=2, dim=24, num_heads=2, ffn_dim=20, max_seq_len=64, init="lingua",
    ffn="moe", num_experts=5, document_mask=True,
)  # fmt: skip
CASES = [
    {},
    {"experts_per_token": 2, "ffn_activation": "relu2", "moe_balance": "none"},
    {"experts_per_token": 3, "moe_gated": True, "num_shared_experts": 2, "moe_capacity": 0.8},
    {"ffn_activation": "gelu", "num_shared_experts": 1, "moe_capacity": 1.0},
]


def make_moe(args, seed=0):
    """Return a mixture of experts with random weights and biases that change choices."""
    moe = make_feed_forward(args)
    generator = torch.Generator().manual_seed(seed)
    for name, value in moe.state_dict().items():
        law = (
            initial_value(args, f"layers.0.feed_forward.{name}", value.shape)
            if value.ndim > 1
            else 0
        )
        value.copy_(
            law.rows(0, len(value)) if law else torch.randn(len(value), generator=generator) / 9
        )
    return moe


def activate(args, x):
    if args.ffn_activation == "gelu":
        return F.gelu(x, approximate="tanh")
    return F.relu(x) ** 2 if args.ffn_activation == "relu2" else F.silu(x)


def loops(args, weights, x_BTD, *, drops):
    """Compute a mixture token by token as the formulas say; also (load, dropped), balance."""
    y_BTD, load, dropped, balance = torch.zeros_like(x_BTD), [0] * args.num_experts, 0, []
    top_k, gate = args.experts_per_token, weights["router.gate.weight"]
    most = math.ceil(args.moe_capacity * top_k * x_BTD.shape[1] / args.num_experts)
    for b, row in enumerate(x_BTD):
        taken, mean = [0] * args.num_experts, torch.zeros(args.num_experts, dtype=x_BTD.dtype)
        for t, x in enumerate(row):
            p = (gate @ x).softmax(0)
            mean = mean + p / len(row)
            order = (p + weights.get("router.expert_bias", 0.0)).argsort(descending=True)
            chosen = order[:top_k].tolist()
            scale = sum(p[e] for e in chosen) if top_k > 1 else 1.0
            for e in chosen:
                taken[e] += 1
                if drops and taken[e] > most:
                    dropped += 1
                    continue
                w1, w2 = weights["experts.w1"][e], weights["experts.w2"][e]
                inner = activate(args, w1 @ x)
                inner = inner * (weights["experts.w3"][e] @ x) if args.moe_gated else inner
                y_BTD[b, t] += p[e] / scale * (w2 @ inner)
            if args.num_shared_experts:
                inner = activate(args, weights["shared_experts.w1.weight"] @ x)
                if args.moe_gated:
                    inner = inner * (weights["shared_experts.w3.weight"] @ x)
                y_BTD[b, t] += weights["shared_experts.w2.weight"] @ inner
        load = [a + b for a, b in zip(load, taken, strict=True)]
        total = sum(taken)
        balance.append(args.num_experts * sum(mean[e] * taken[e] / total for e in range(len(load))))
    return y_BTD, [*load, dropped], torch.stack(balance)


@pytest.mark.parametrize("changes", CASES)
@pytest.mark.parametrize("training", [True, False])
def test_outputs_and_gradients_equal_loops_over_tokens(changes, training):
    args = replace(ARGS, **changes)
    moe = make_moe(args).train(training)
    x = torch.randn(2, 10, args.dim, generator=torch.Generator().manual_seed(1)).requires_grad_()
    exact = {n: v.detach().double().requires_grad_() for n, v in moe.state_dict().items()}
    exact_x = x.detach().double().requires_grad_()
    expected, load, balance = loops(
        args, exact, exact_x, drops=bool(training and args.moe_capacity)
    )
    found = moe(x)
    if training:
        found, found_load, found_balance = found
        assert found_load.tolist() == load and found_load[:-1].sum() == 20 * args.experts_per_token
        assert (load[-1] > 0) == (args.moe_capacity > 0)
        torch.testing.assert_close(found_balance, balance.float())
        found, expected = (found, found_balance), (expected, balance)
    else:
        found, expected = (found,), (expected,)
    weights = dict(moe.named_parameters())
    seeds = [torch.randn(y.shape, dtype=torch.float64) for y in expected]
    grads = torch.autograd.grad(found, [x, *weights.values()], [s.float() for s in seeds])
    wanted = [exact_x, *(exact[name] for name in weights)]
    for name, grad, other in zip(
        ["x", *weights], grads, torch.autograd.grad(expected, wanted, seeds), strict=True
    ):
        torch.testing.assert_close(grad, other.float(), rtol=1e-5, atol=1e-5, msg=name)
    torch.testing.assert_close(found[0], expected[0].float(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("top_k", [1, 2])
def test_gated_experts_equal_torchtitans_moe(monkeypatch, top_k):
    count = torch.histc  # of integers only on CUDA
    monkeypatch.setattr(torch, "histc", lambda x, **kw: count(x.float(), **kw).long())
    changes = {"moe_gated": True, "num_shared_experts": 2, "experts_per_token": top_k}
    args = replace(ARGS, **changes)
    moe, generator = make_moe(args), torch.Generator().manual_seed(2)
    theirs = TitanMoE(
        MoEArgs(
            num_experts=5, num_shared_experts=2, top_k=top_k, score_func="softmax",
            route_norm=top_k > 1, score_before_experts=False, use_grouped_mm=False,
        ), dim=24, hidden_dim=20,
    )  # fmt: skip
    moved = {"router.expert_bias": "expert_bias"}
    theirs.load_state_dict({moved.get(name, name): v for name, v in moe.state_dict().items()})
    x = torch.randn(3, 16, 24, generator=generator)
    ours, load, _ = moe(x)
    expected = theirs(x)
    torch.testing.assert_close(ours, expected)
    assert load[:-1].tolist() == theirs.tokens_per_expert.tolist()
    seed = torch.randn(ours.shape, generator=generator)
    names, parameters = zip(*moe.named_parameters(), strict=True)
    grads = torch.autograd.grad(ours, parameters, seed)
    others = torch.autograd.grad(expected, [theirs.get_parameter(n) for n in names], seed)
    for name, grad, other in zip(names, grads, others, strict=True):
        torch.testing.assert_close(grad, other, msg=name)


def test_an_expert_without_tokens_gets_a_gradient_of_zero():
    x, weight = torch.randn(6, 4).requires_grad_(), torch.randn(4, 3, 4).requires_grad_()
    ends = torch.tensor([2, 2, 5, 5], dtype=torch.int32)  # and a row of padding
    y = grouped_linear(x, weight, ends)
    assert not y[5:].any()
    y.sum().backward()
    assert [bool(g.any()) for g in weight.grad] == [True, False, True, False]
    assert not x.grad[5:].any()
    double = [t.detach().double().requires_grad_() for t in (x, weight)]
    assert torch.autograd.gradcheck(lambda *t: grouped_linear(*t, ends), double)
    torch.library.opcheck(
        torch.ops.canon_pretrain.canon_pretrain_model_moe_grouped_linear, (x, weight, ends)
    )


def objective(model, tokens, labels, load=None):
    return model(
        tokens, labels_BT=labels, loss=head_loss(Loss(chunk_tokens=0)), expert_load_LE=load
    )[1]


@pytest.mark.parametrize("balance", ["bias", "loss", "none"])
def test_micro_batches_change_no_number(balance):
    """Capacity and loss count by row; rows with fewer labels weigh less."""
    args = replace(ARGS, moe_capacity=1.0, moe_balance=balance, moe_balance_rate=0.5)
    model, tokens = build(args), random_tokens(args, 6, 33)
    inputs, labels = tokens[:, :-1], tokens[:, 1:].clone()
    labels[1, 5:] = -100
    results = []
    for size in (6, 2, 1):
        load = torch.zeros(2, 6, dtype=torch.int64)
        model.zero_grad()
        total = 0.0
        for i in range(0, 6, size):
            part = objective(model, inputs[i : i + size], labels[i : i + size], load)
            part.backward()
            total += part.item()
        grads = [p.grad.clone() for p in model.parameters()]
        results.append((total, load, grads))
    for total, load, grads in results[1:]:
        assert abs(total - results[0][0]) < 1e-6 * total
        assert torch.equal(load, results[0][1]) and load[:, -1].all()
        torch.testing.assert_close(grads, results[0][2], rtol=1e-4, atol=1e-4)


def test_the_loss_is_added_to_the_objective_and_evens_the_load():
    args = replace(ARGS, moe_balance="loss", moe_balance_rate=0.1, document_mask=False)
    plain, model = build(replace(args, moe_balance="none")), build(args)
    tokens = random_tokens(args, 4, 33)
    inputs, labels = tokens[:, :-1], tokens[:, 1:]
    added = objective(model, inputs, labels) - objective(plain, inputs, labels)
    assert 0.2 * 0.9 < added.item() / labels.numel() < 0.2 * 2  # two layers, near 1 each
    assert objective(model.eval(), inputs, labels) == objective(plain.eval(), inputs, labels)
    skewed = {}
    for moe_balance in ("none", "loss"):
        moe = make_moe(replace(ARGS, moe_balance=moe_balance))
        x = torch.randn(4, 32, 24, generator=torch.Generator().manual_seed(3)) + 1.0
        optimizer = torch.optim.SGD(moe.router.parameters(), lr=0.1)
        for _ in range(60):
            _, load, balance = moe(x)
            optimizer.zero_grad()
            (balance.mean() * (moe_balance == "loss")).backward()
            optimizer.step()
        skewed[moe_balance] = (load.max() / load[:-1].float().mean()).item()
    assert skewed["none"] > 1.5 > 1.2 > skewed["loss"]


def test_the_bias_moves_towards_an_even_load_and_keeps_its_mean():
    args = replace(ARGS, moe_balance_rate=0.02, document_mask=False)
    model, tokens = build(args), random_tokens(ARGS, 8, 32)
    assert [b.tolist() for b in model.expert_biases()] == [[0.0] * 5] * 2
    load = torch.zeros(2, 6, dtype=torch.int64)
    model(tokens, expert_load_LE=load)
    before = load[:, :-1].float()
    model.balance_experts(before, 0.0)  # a skipped step
    assert not any(bias.any() for bias in model.expert_biases())
    model.balance_experts(before)
    for bias, row in zip(model.expert_biases(), before, strict=True):
        sign = (row.mean() - row).sign()
        torch.testing.assert_close(bias, 0.02 * (sign - sign.mean()))
    for _ in range(25):
        load.zero_()
        model(tokens, expert_load_LE=load)
        model.balance_experts(load[:, :-1].float())
    after = load[:, :-1].float()
    spread = [x.std(dim=1) / x.mean(dim=1) for x in (before, after)]
    assert (spread[1] < 0.4 * spread[0]).all()
    assert all(abs(bias.sum()) < 1e-5 for bias in model.expert_biases())
    assert "layers.1.feed_forward.router.expert_bias" in model.state_dict()


@pytest.mark.parametrize("name", ["rope ABC k3 moe documents", "gla AC gated_moe"])
def test_decoding_equals_a_full_pass_in_any_chunks(name):
    """A capacity, under which most tokens would be dropped in training, drops none here."""
    args = replace(variant(name), moe_capacity=0.1)
    model, tokens = build(args).eval(), random_tokens(args, 3, 24)
    for bias in model.expert_biases():
        bias.normal_(generator=torch.Generator().manual_seed(1))
    is_real = torch.ones_like(tokens, dtype=torch.bool)
    is_real[1, :5] = False
    with torch.no_grad():
        whole, cache, parts = model(tokens, is_real_BT=is_real), Cache(args.num_layers), []
        for start, stop in ((0, 9), (9, 10), (10, 21), (21, 22), (22, 24)):
            part = slice(start, stop)
            parts.append(model(tokens[:, part], is_real_BT=is_real[:, part], cache=cache))
        alone = model(tokens[1:2, 5:])
    torch.testing.assert_close(torch.cat(parts, 1)[is_real], whole[is_real], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(alone[0], whole[1, 5:], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("changes", CASES)
def test_parameters_and_those_of_a_token_are_counted(changes):
    args = replace(ARGS, **changes, canon_set="ABC")
    model = Transformer(args)
    number = sum(p.numel() for p in model.parameters())
    assert counts.num_parameters(args) == number
    expert = sum(p[0].numel() for p in model.layers["0"].feed_forward.experts.parameters())
    idle = args.num_experts - args.experts_per_token
    assert counts.active_parameters(args) == number - args.num_layers * idle * expert


def test_initial_experts_are_functions_of_their_names():
    model = Transformer(replace(ARGS, moe_gated=True))
    model.init_weights()
    for name, fan_in in (("w1", 24), ("w3", 24), ("w2", 20)):
        name = f"layers.1.feed_forward.experts.{name}"
        weight = model.get_parameter(name)
        value = initial_value(model.args, name, weight.shape)
        rows = [value.rows(i, i + 1) for i in range(5)]
        assert torch.equal(torch.cat(rows), weight)
        assert abs(weight.std().item() * fan_in**0.5 - 0.98) < 0.05
        assert not torch.equal(rows[0], rows[1])


def test_canon_d_and_too_many_experts_per_token_are_refused():
    with refused("model.conflict", name="canon_set"):
        replace(ARGS, canon_set="ABCD")
    with refused("model.out_of_range", name="experts_per_token"):
        replace(ARGS, experts_per_token=6)
    assert isinstance(make_feed_forward(replace(ARGS, canon_set="ABC")), MoE)
