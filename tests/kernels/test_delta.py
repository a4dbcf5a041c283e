"""The chunked gated delta rule against the recurrence in float64 and transformers' forms."""

import pytest
import torch
import torch.nn.functional as F
from transformers.models.qwen3_next import modeling_qwen3_next as qwen3_next

from canon_pretrain.kernels import delta
from canon_pretrain.kernels.delta import chunked_delta

NAMES = "q_BTHK", "k_BTHK", "v_BTHV", "g_BTH", "beta_BTH"
DECAYS = {
    "none": (0.0,),
    "weak": (-1e-5, -1e-3),
    "usual": (-0.01, -0.1, -1.0),
    "strong": (0.0, -1e-3, -40.0, -99.0, -1e4, -torch.inf),
}
every_decay = pytest.mark.parametrize("decay", DECAYS)


def problem(num_tokens, decay="usual", dtype=torch.float32, rows=2, seed=0):
    """Return the inputs, a state, and starts: of documents, after padding, and none."""
    generator = torch.Generator().manual_seed(seed)
    heads, key_width, value_width = 2, 8, 6

    def randn(*shape):
        return torch.randn(rows, *shape, generator=generator, dtype=torch.float64)

    q, k = (F.normalize(randn(num_tokens, heads, key_width), dim=-1) for _ in range(2))
    k = F.normalize(k + 2 * k[:, :1], dim=-1)  # similar keys, which overwrite each other
    inputs = [q, k, randn(num_tokens, heads, value_width)]
    logs = torch.tensor(DECAYS[decay], dtype=torch.float64)
    inputs.append(logs[torch.randint(len(logs), (rows, num_tokens, heads), generator=generator)])
    inputs.append(randn(num_tokens, heads).sigmoid())
    state = randn(heads, key_width, value_width)
    starts = torch.zeros(rows, num_tokens, dtype=torch.bool)
    starts[0, 3::7] = starts[0, 4::9] = starts[1, num_tokens // 2] = True
    inputs = [x.to(dtype) for x in inputs[:3]] + [x.to(state.dtype) for x in inputs[3:]]
    if dtype != torch.float64:
        inputs[3:], state = [x.float() for x in inputs[3:]], state.float()
    return inputs, state, starts


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
    leaves = [x.clone().requires_grad_() for x in (*inputs, *(() if state is None else (state,)))]
    given = leaves if state is not None else [*leaves, None]
    outputs = function(*given, starts)
    generator = torch.Generator().manual_seed(9)
    dys = [torch.randn(y.shape, generator=generator, dtype=torch.float64) for y in outputs]
    objective = sum((y.double() * dy).sum() for y, dy in zip(outputs, dys, strict=True))
    return [x.double() for x in (*outputs, *torch.autograd.grad(objective, leaves))]


def assert_same(found, expected, tolerance=1e-5):
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


@every_decay
@pytest.mark.parametrize("num_tokens", [1, 2, 16, 37])
def test_values_and_gradients_equal_the_recurrence(num_tokens, decay):
    inputs, state, starts = problem(num_tokens, decay)
    for given in ((None, None), (state, None), (None, starts), (state, starts)):
        expected = derived(recurrence, inputs, *given)
        for chunk in (16, 64):
            chunked = lambda *x, chunk=chunk: chunked_delta(*x, chunk=chunk)  # noqa: E731
            assert_same(derived(chunked, inputs, *given), expected)


@pytest.mark.parametrize("decay", ["usual", "strong"])
def test_the_default_chunk_over_many_chunks(decay):
    given = problem(2 * delta.CHUNK + 5, decay)
    assert_same(derived(chunked_delta, *given), derived(recurrence, *given))


def test_float64_is_exact():
    given = problem(40, "weak", torch.float64)
    chunked = lambda *x: chunked_delta(*x, chunk=16)  # noqa: E731
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


@pytest.mark.parametrize(
    "oracle", ["torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule"]
)
def test_transformers_forms(oracle):
    inputs, state, _ = problem(70)

    def theirs(*given):
        state, _ = given[5:]
        return getattr(qwen3_next, oracle)(*given[:5], initial_state=state, output_final_state=True)

    assert_same(derived(chunked_delta, inputs, state, None), derived(theirs, inputs, state, None))


def saved_bytes(num_tokens):
    sizes = {}

    def pack(x):
        sizes[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    inputs, state, starts = problem(num_tokens)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        kept = chunked_delta(*(x.requires_grad_() for x in inputs), state, starts)
    assert kept[0].requires_grad
    return sum(sizes.values())


def test_memory_is_linear_in_tokens():
    assert saved_bytes(2048) <= 2 * saved_bytes(1024)


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
