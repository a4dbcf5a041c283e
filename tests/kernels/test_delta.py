"""The chunked gated delta rule against the recurrence in float64 and transformers' forms."""

import functools

import pytest
import torch
import torch.nn.functional as F
from transformers.models.qwen3_next import modeling_qwen3_next as qwen3_next

from canon_pretrain.kernels import delta
from canon_pretrain.kernels.delta import chunked_delta

DECAYS = {
    "none": (0.0,),
    "weak": (-1e-5, -1e-3),
    "usual": (-0.01, -0.1, -1.0),
    "strong": (0.0, -1e-3, -40.0, -99.0, -1e4, -torch.inf),
}


def problem(num_tokens, decay="usual", dtype=torch.float32):
    """Return the inputs, a state, and starts of documents and after padding."""
    generator = torch.Generator().manual_seed(0)

    def randn(*shape):
        return torch.randn(2, *shape, generator=generator, dtype=torch.float64)

    q, k = (F.normalize(randn(num_tokens, 2, 8), dim=-1) for _ in range(2))
    k = F.normalize(k + 2 * k[:, :1], dim=-1)  # similar keys, which overwrite each other
    v, beta, state = randn(num_tokens, 2, 6), randn(num_tokens, 2).sigmoid(), randn(2, 8, 6)
    logs = torch.tensor(DECAYS[decay], dtype=torch.float64)
    g = logs[torch.randint(len(logs), (2, num_tokens, 2), generator=generator)]
    starts = torch.zeros(2, num_tokens, dtype=torch.bool)
    starts[0, 3::7] = starts[0, 4::9] = starts[1, num_tokens // 2] = True
    wide = torch.promote_types(dtype, torch.float32)
    return [*(x.to(dtype) for x in (q, k, v)), g.to(wide), beta.to(wide)], state.to(wide), starts


def recurrence(q, k, v, g, beta, state=None, starts=None):
    """The formula, token by token, in float64."""
    q, k, v, g, beta = (x.double() for x in (q, k, v, g, beta))
    (rows, num_tokens, heads, key_width), value_width = k.shape, v.shape[-1]
    identity = torch.eye(key_width, dtype=torch.float64)
    if state is None:
        state = torch.zeros(rows, heads, key_width, value_width)
    state, outputs = state.double(), []
    for t in range(num_tokens):
        if starts is not None:
            state = torch.where(starts[:, t, None, None, None], 0, state)
        q_t, k_t, v_t = (x[:, t, :, None] for x in (q, k, v))
        a_t, b_t = (x[:, t, :, None, None] for x in (g.exp(), beta))
        state = a_t * (identity - b_t * k_t.mT @ k_t) @ state + b_t * k_t.mT @ v_t
        outputs.append(key_width**-0.5 * (q_t @ state)[:, :, 0])
    return torch.stack(outputs, dim=1), state


def derived(function, inputs, state, starts):
    """Return the outputs and the gradients of all inputs, in float64."""
    given = [None if x is None else x.clone().requires_grad_() for x in (*inputs, state)]
    leaves = [x for x in given if x is not None]
    outputs = function(*given, starts)
    generator = torch.Generator().manual_seed(9)
    dys = [torch.randn(y.shape, generator=generator, dtype=torch.float64) for y in outputs]
    objective = sum((y.double() * dy).sum() for y, dy in zip(outputs, dys, strict=True))
    return [x.double() for x in (*outputs, *torch.autograd.grad(objective, leaves))]


def assert_same(found, expected, tolerance=1e-5):
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("num_tokens", [1, 2, 16, 37])
def test_values_and_gradients_equal_the_recurrence(num_tokens, decay):
    inputs, state, starts = problem(num_tokens, decay)
    for given in ((None, None), (state, None), (None, starts), (state, starts)):
        expected = derived(recurrence, inputs, *given)
        for chunk in (16, 64):
            chunked = functools.partial(chunked_delta, chunk=chunk)
            assert_same(derived(chunked, inputs, *given), expected)


@pytest.mark.parametrize("decay", ["usual", "strong"])
def test_the_default_chunk_over_many_chunks(decay):
    given = problem(2 * delta.CHUNK + 5, decay)
    assert_same(derived(chunked_delta, *given), derived(recurrence, *given))


def test_float64_is_exact():
    given = problem(40, "weak", torch.float64)
    chunked = functools.partial(chunked_delta, chunk=16)
    assert_same(derived(chunked, *given), derived(recurrence, *given), 1e-12)


def test_bfloat16_inputs_and_a_float32_state():
    inputs, state, starts = problem(100, dtype=torch.bfloat16)
    o, last = chunked_delta(*inputs, state, starts)
    assert (o.dtype, last.dtype) == (torch.bfloat16, torch.float32)
    expected = recurrence(*inputs, state, starts)
    torch.testing.assert_close(o.double(), expected[0], rtol=2**-8, atol=1e-5)
    assert_same(last.double(), expected[1])


@pytest.mark.parametrize("split", [1, 16, 23, 39])
def test_two_calls_equal_one(split):
    inputs, state, starts = problem(40)
    expected = chunked_delta(*inputs, state, starts)
    outputs = []
    for part in (slice(split), slice(split, None)):
        o, state = chunked_delta(*(x[:, part] for x in inputs), state, starts[:, part], chunk=16)
        outputs.append(o)
    assert_same((torch.cat(outputs, dim=1), state), expected)


def test_tokens_before_a_start_change_nothing_after_it():
    inputs, state, starts = problem(40)
    starts[:, 20] = True
    other = [torch.cat((x[:, :20].flip(0, 1), x[:, 20:]), dim=1) for x in inputs]
    found = [chunked_delta(*x, s, starts, chunk=16) for x, s in ((inputs, state), (other, -state))]
    assert torch.equal(found[0][0][:, 20:], found[1][0][:, 20:])
    assert torch.equal(found[0][1], found[1][1])


@pytest.mark.parametrize("form", ["chunk", "recurrent"])
def test_transformers_forms(form):
    oracle = getattr(qwen3_next, f"torch_{form}_gated_delta_rule")
    inputs, state, _ = problem(70)
    theirs = lambda *x: oracle(*x[:5], initial_state=x[5], output_final_state=True)  # noqa: E731
    assert_same(derived(chunked_delta, inputs, state, None), derived(theirs, inputs, state, None))


def test_memory_is_linear_in_tokens():
    totals = []
    for num_tokens in (1024, 2048):
        saved = {}
        pack = lambda x, saved=saved: saved.setdefault(x.data_ptr(), x)  # noqa: E731
        inputs, state, starts = problem(num_tokens)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            chunked_delta(*(x.requires_grad_() for x in inputs), state, starts)
        totals.append(sum(x.nbytes for x in saved.values()))
    assert 0 < totals[1] <= 2 * totals[0]


# from torch, tracing an autograd function
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.system
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_one_graph(backend):
    torch._dynamo.reset()
    compiled = torch.compile(chunked_delta, backend=backend, fullgraph=True)
    given = problem(2 * delta.CHUNK + 5)
    assert_same(derived(compiled, *given), derived(chunked_delta, *given))


@pytest.mark.system
def test_the_operator_follows_torchs_rules():
    generator = torch.Generator().manual_seed(0)
    shapes = (3, 2, 5, 5), (3, 2, 5, 6), (3, 2, 5, 4), (3, 2, 5, 4), (3, 2, 1, 1), (2, 4, 6)
    inputs = [torch.randn(s, generator=generator, requires_grad=True) for s in shapes]
    torch.library.opcheck(delta._scan, inputs)
