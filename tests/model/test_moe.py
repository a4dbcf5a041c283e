"""The mixture of experts against loops in float64, torchtitan's MoE, and its own decoding."""

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torchtitan.models.moe.moe import MoE as TitanMoE
from torchtitan.models.moe.moe import MoEArgs

from canon_pretrain.model import counts
from canon_pretrain.model.args import ModelArgs
from canon_pretrain.model.cache import Cache
from canon_pretrain.model.init import initial_value
from canon_pretrain.model.moe import MoE, grouped_linear, sort_choices
from canon_pretrain.model.transformer import Transformer, make_feed_forward
from canon_pretrain.run.sections import Loss
from canon_pretrain.titan.spec import head_loss
from tests.support import refused
from tests.variants import build, random_tokens, variant

ARGS = ModelArgs(
    vocab_size=40,
    num_layers=2,
    dim=24,
    num_heads=2,
    ffn_dim=20,
    max_seq_len=64,
    init="lingua",
    ffn="moe",
    num_experts=5,
    document_mask=True,
)
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
        law = None
        if value.ndim > 1:
            law = initial_value(args, f"layers.0.feed_forward.{name}", value.shape)
        if law:
            value.copy_(law.rows(0, len(value)))
        else:
            value.copy_(torch.randn(len(value), generator=generator) / 9)
    return moe


def activate(args, x):
    if args.ffn_activation == "gelu":
        return F.gelu(x, approximate="tanh")
    if args.ffn_activation == "relu2":
        return F.relu(x) ** 2
    return F.silu(x)


def expert_by_formula(args, x, w1, w2, w3):
    """Compute an expert for one token; w3 is None unless it is gated."""
    inner = activate(args, w1 @ x)
    if w3 is not None:
        inner = inner * (w3 @ x)
    return w2 @ inner


def loops(args, weights, x_BTD, *, drops):
    """Compute a mixture token by token as the formulas say.

    Return y, the tokens per expert followed by the number of dropped ones, and a balance per row.
    """
    num_experts = args.num_experts
    top_k = args.experts_per_token
    capacity = math.ceil(args.moe_capacity * top_k * x_BTD.shape[1] / num_experts)
    router = weights["router.gate.weight"]
    bias = weights.get("router.expert_bias", 0.0)
    y_BTD = torch.zeros_like(x_BTD)
    load = [0] * num_experts
    num_dropped = 0
    balance = []

    for b, row in enumerate(x_BTD):
        taken = [0] * num_experts
        mean_p = torch.zeros(num_experts, dtype=x_BTD.dtype)
        for t, x in enumerate(row):
            p = (router @ x).softmax(0)
            mean_p = mean_p + p / len(row)
            chosen = (p + bias).argsort(descending=True)[:top_k].tolist()
            scale = sum(p[e] for e in chosen) if top_k > 1 else 1.0

            for e in chosen:
                taken[e] += 1
                if drops and taken[e] > capacity:
                    num_dropped += 1
                    continue
                w1 = weights["experts.w1"][e]
                w2 = weights["experts.w2"][e]
                w3 = weights["experts.w3"][e] if args.moe_gated else None
                y_BTD[b, t] += p[e] / scale * expert_by_formula(args, x, w1, w2, w3)

            if args.num_shared_experts:
                w1 = weights["shared_experts.w1.weight"]
                w2 = weights["shared_experts.w2.weight"]
                w3 = weights["shared_experts.w3.weight"] if args.moe_gated else None
                y_BTD[b, t] += expert_by_formula(args, x, w1, w2, w3)

        load = [a + b for a, b in zip(load, taken, strict=True)]
        shares = [count / sum(taken) for count in taken]
        balance.append(num_experts * sum(mean_p[e] * shares[e] for e in range(num_experts)))
    return y_BTD, [*load, num_dropped], torch.stack(balance)


@pytest.mark.parametrize("changes", CASES)
@pytest.mark.parametrize("training", [True, False])
def test_outputs_and_gradients_equal_loops_over_tokens(changes, training):
    args = replace(ARGS, **changes)
    moe = make_moe(args).train(training)
    x = torch.randn(2, 10, args.dim, generator=torch.Generator().manual_seed(1)).requires_grad_()
    state = moe.state_dict().items()
    exact_weights = {name: w.detach().double().requires_grad_() for name, w in state}
    exact_x = x.detach().double().requires_grad_()
    exact_y, exact_load, exact_balance = loops(
        args, exact_weights, exact_x, drops=bool(training and args.moe_capacity)
    )

    # Only a training pass also returns the load and the balance.
    if training:
        y, load, balance = moe(x)
        outputs = [y, balance]
        expected = [exact_y, exact_balance]
        assert load.tolist() == exact_load
        assert load[:-1].sum() == 20 * args.experts_per_token
        assert (load[-1] > 0) == (args.moe_capacity > 0)
        torch.testing.assert_close(balance, exact_balance.float())
    else:
        outputs = [moe(x)]
        expected = [exact_y]

    torch.testing.assert_close(outputs[0], exact_y.float(), rtol=1e-5, atol=1e-5)
    weights = dict(moe.named_parameters())
    upstream = [torch.randn(y.shape, dtype=torch.float64) for y in expected]
    grads = torch.autograd.grad(outputs, [x, *weights.values()], [dy.float() for dy in upstream])
    exact_leaves = [exact_x, *(exact_weights[name] for name in weights)]
    exact_grads = torch.autograd.grad(expected, exact_leaves, upstream)
    for name, grad, exact in zip(["x", *weights], grads, exact_grads, strict=True):
        torch.testing.assert_close(grad, exact.float(), rtol=1e-5, atol=1e-5, msg=name)


@pytest.mark.parametrize("top_k", [1, 2])
def test_gated_experts_equal_torchtitans_moe(monkeypatch, top_k):
    count = torch.histc  # of integers only on CUDA
    monkeypatch.setattr(torch, "histc", lambda x, **kw: count(x.float(), **kw).long())
    args = replace(ARGS, moe_gated=True, num_shared_experts=2, experts_per_token=top_k)
    ours = make_moe(args)
    theirs = TitanMoE(
        MoEArgs(
            num_experts=args.num_experts,
            num_shared_experts=args.num_shared_experts,
            top_k=top_k,
            score_func="softmax",
            route_norm=top_k > 1,
            score_before_experts=False,
            use_grouped_mm=False,
        ),
        dim=args.dim,
        hidden_dim=args.ffn_dim,
    )
    state = ours.state_dict()
    state["expert_bias"] = state.pop("router.expert_bias")
    theirs.load_state_dict(state)
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(3, 16, args.dim, generator=generator)

    y, load, _ = ours(x)
    expected = theirs(x)

    torch.testing.assert_close(y, expected)
    assert load[:-1].tolist() == theirs.tokens_per_expert.tolist()
    dy = torch.randn(y.shape, generator=generator)
    names, parameters = zip(*ours.named_parameters(), strict=True)
    grads = torch.autograd.grad(y, parameters, dy)
    their_parameters = [theirs.get_parameter(name) for name in names]
    expected_grads = torch.autograd.grad(expected, their_parameters, dy)
    for name, grad, expected_grad in zip(names, grads, expected_grads, strict=True):
        torch.testing.assert_close(grad, expected_grad, msg=name)


def test_choices_are_sorted_by_expert_then_row_then_token():
    expert_BC = torch.randint(5, (3, 40), generator=torch.Generator().manual_seed(0))
    expert_BC[expert_BC == 2] = 4
    numbered = sorted((e, number) for number, e in enumerate(expert_BC.flatten().tolist()))

    choices = sort_choices(expert_BC, 5)

    order = [number for _, number in numbered]
    assert choices.order_S.tolist() == order
    assert choices.place_S.tolist() == [order.index(number) for number in range(120)]
    counts = [[row.tolist().count(e) for e in range(5)] for row in expert_BC]
    assert choices.count_BE.tolist() == counts


class Calls(TorchDispatchMode):
    """Collect the names of operators, and the elements of int64 results."""

    def __init__(self):
        super().__init__()
        self.names = []
        self.largest_index = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.names.append(func._schema.name)
        if isinstance(out, torch.Tensor) and out.dtype == torch.int64:
            self.largest_index = max(self.largest_index, out.numel())
        return out


def test_one_sort_and_no_table_of_choices_by_expert():
    args = replace(ARGS, experts_per_token=2, moe_capacity=1.0)
    moe = make_moe(args)
    x = torch.randn(2, 50, args.dim)

    with Calls() as calls:
        moe(x)

    assert [name for name in calls.names if "sort" in name] == ["aten::sort"]
    assert calls.largest_index == 200  # choices


def test_an_expert_without_tokens_gets_a_gradient_of_zero():
    x = torch.randn(6, 4).requires_grad_()
    weight = torch.randn(4, 3, 4).requires_grad_()
    ends = torch.tensor([2, 2, 5, 5], dtype=torch.int32)  # and a row of padding

    y = grouped_linear(x, weight, ends)
    y.sum().backward()

    assert not y[5:].any()
    assert [bool(grad.any()) for grad in weight.grad] == [True, False, True, False]
    assert not x.grad[5:].any()
    double = [t.detach().double().requires_grad_() for t in (x, weight)]
    assert torch.autograd.gradcheck(lambda x, weight: grouped_linear(x, weight, ends), double)
    operator = torch.ops.canon_pretrain.canon_pretrain_model_moe_grouped_linear
    torch.library.opcheck(operator, (x, weight, ends))


def objective(model, tokens, labels, load=None):
    """Return the objective of a batch; add the tokens per expert to `load`."""
    loss = head_loss(Loss(chunk_tokens=0))
    _, total = model(tokens, labels_BT=labels, loss=loss, expert_load_LE=load)
    return total


@pytest.mark.parametrize("balance", ["bias", "loss", "none"])
def test_micro_batches_change_no_number(balance):
    """Capacity and loss count by row; rows with fewer labels weigh less."""
    args = replace(ARGS, moe_capacity=1.0, moe_balance=balance, moe_balance_rate=0.5)
    model = build(args)
    tokens = random_tokens(args, 6, 33)
    inputs = tokens[:, :-1]
    labels = tokens[:, 1:].clone()
    labels[1, 5:] = -100

    def step(rows_per_micro_batch):
        """Return the objective, the load and the gradients of all rows."""
        load = torch.zeros(2, 6, dtype=torch.int64)
        model.zero_grad()
        total = 0.0
        for inputs_part, labels_part in zip(
            inputs.split(rows_per_micro_batch), labels.split(rows_per_micro_batch), strict=True
        ):
            part = objective(model, inputs_part, labels_part, load)
            part.backward()
            total += part.item()
        return total, load, [p.grad.clone() for p in model.parameters()]

    whole_total, whole_load, whole_grads = step(6)
    for rows_per_micro_batch in (2, 1):
        total, load, grads = step(rows_per_micro_batch)

        assert abs(total - whole_total) < 1e-6 * total
        assert torch.equal(load, whole_load)
        assert load[:, -1].all()
        torch.testing.assert_close(grads, whole_grads, rtol=1e-4, atol=1e-4)


def test_the_loss_is_added_to_the_training_objective_only():
    rate = 0.1
    args = replace(ARGS, moe_balance="loss", moe_balance_rate=rate, document_mask=False)
    plain = build(replace(args, moe_balance="none"))
    model = build(args)
    tokens = random_tokens(args, 4, 33)
    inputs = tokens[:, :-1]
    labels = tokens[:, 1:]

    added = objective(model, inputs, labels) - objective(plain, inputs, labels)

    per_label = added.item() / labels.numel()
    assert 0.9 < per_label / (rate * args.num_layers) < 2  # near 1 in each layer
    assert objective(model.eval(), inputs, labels) == objective(plain.eval(), inputs, labels)


def skew_after_training(moe_balance):
    """Train the router on the balance alone; return the largest load over the mean one."""
    moe = make_moe(replace(ARGS, moe_balance=moe_balance))
    x = torch.randn(4, 32, 24, generator=torch.Generator().manual_seed(3)) + 1.0
    optimizer = torch.optim.SGD(moe.router.parameters(), lr=0.1)
    weight = 1.0 if moe_balance == "loss" else 0.0
    for _ in range(60):
        _, load, balance = moe(x)
        optimizer.zero_grad()
        (balance.mean() * weight).backward()
        optimizer.step()
    return (load.max() / load[:-1].float().mean()).item()


def test_the_balance_loss_evens_the_load():
    assert skew_after_training("none") > 1.5
    assert skew_after_training("loss") < 1.2


def load_of(model, tokens):
    """Return the tokens per layer and expert of a pass, float32 [L, E]."""
    load = torch.zeros(2, 6, dtype=torch.int64)
    model(tokens, expert_load_LE=load)
    return load[:, :-1].float()


def test_the_bias_moves_towards_an_even_load_and_keeps_its_mean():
    rate = 0.02
    model = build(replace(ARGS, moe_balance_rate=rate, document_mask=False))
    tokens = random_tokens(ARGS, 8, 32)
    assert [bias.tolist() for bias in model.expert_biases()] == [[0.0] * 5] * 2
    assert "layers.1.feed_forward.router.expert_bias" in model.state_dict()

    # A skipped step changes nothing.
    before = load_of(model, tokens)
    model.balance_experts(before, 0.0)
    assert not any(bias.any() for bias in model.expert_biases())

    # One step is of the size of the rate, and has no mean.
    model.balance_experts(before)
    for bias, row in zip(model.expert_biases(), before, strict=True):
        sign = (row.mean() - row).sign()
        torch.testing.assert_close(bias, rate * (sign - sign.mean()))

    # Many steps even the load.
    for _ in range(25):
        after = load_of(model, tokens)
        model.balance_experts(after)
    spread_before = before.std(dim=1) / before.mean(dim=1)
    spread_after = after.std(dim=1) / after.mean(dim=1)
    assert (spread_after < 0.4 * spread_before).all()
    assert all(abs(bias.sum()) < 1e-5 for bias in model.expert_biases())


@pytest.mark.parametrize("name", ["rope ABC k3 moe documents", "gla AC gated_moe"])
@torch.no_grad()
def test_decoding_equals_a_full_pass_in_any_chunks(name):
    """A capacity, under which most tokens would be dropped in training, drops none here."""
    args = replace(variant(name), moe_capacity=0.1)
    model = build(args).eval()
    for bias in model.expert_biases():
        bias.normal_(generator=torch.Generator().manual_seed(1))
    tokens = random_tokens(args, 3, 24)
    is_real = torch.ones_like(tokens, dtype=torch.bool)
    is_real[1, :5] = False
    whole = model(tokens, is_real_BT=is_real)

    cache = Cache.of(args)
    chunks = []
    for start, stop in ((0, 9), (9, 10), (10, 21), (21, 22), (22, 24)):
        chunk = slice(start, stop)
        chunks.append(model(tokens[:, chunk], is_real_BT=is_real[:, chunk], cache=cache))
    without_padding = model(tokens[1:2, 5:])

    chunked = torch.cat(chunks, dim=1)
    torch.testing.assert_close(chunked[is_real], whole[is_real], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(without_padding[0], whole[1, 5:], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("changes", CASES)
def test_parameters_and_those_of_a_token_are_counted(changes):
    args = replace(ARGS, **changes, canon_set="ABC")
    model = Transformer(args)

    num_parameters = sum(p.numel() for p in model.parameters())
    experts = model.layers["0"].feed_forward.experts
    parameters_of_expert = sum(p[0].numel() for p in experts.parameters())
    num_idle = args.num_experts - args.experts_per_token

    assert counts.num_parameters(args) == num_parameters
    idle_parameters = args.num_layers * num_idle * parameters_of_expert
    assert counts.active_parameters(args) == num_parameters - idle_parameters


@pytest.mark.parametrize(("matrix", "fan_in"), [("w1", 24), ("w3", 24), ("w2", 20)])
def test_initial_experts_are_functions_of_their_names(matrix, fan_in):
    model = Transformer(replace(ARGS, moe_gated=True))
    model.init_weights()
    name = f"layers.1.feed_forward.experts.{matrix}"
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
