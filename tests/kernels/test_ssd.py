"""Mamba2's recurrence in chunks against the formula, token by token, and against transformers."""

import pytest
import torch
from torch._dynamo.testing import CompileCounter
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.models.mamba2.modeling_mamba2 import mamba2_chunk_scan

from canon_pretrain.kernels.ssd import chunked_ssd
from tests.canon_inputs import randoms

ROWS, HEADS, HEAD_DIM, STATES = 2, 3, 5, 4
DECAYS = {
    "mixed": (1e-3, 0.3, 30.0),
    "near one": (1e-6, 1e-5, 1e-4),
    "near zero": (80.0, 2e3, 1e6),  # beyond float32's exp, and beyond CUT
}


def problem(num_tokens, decays="mixed", dtype=torch.float64):
    """Return x, dt, A, B, C, D and a state; dt is of another scale for each head."""
    shapes = (HEADS, HEAD_DIM), (HEADS,), (STATES,), (STATES,)
    by_token = [(ROWS, num_tokens, *shape) for shape in shapes]
    x, dt, B, C, D, state = randoms(*by_token, (HEADS,), (ROWS, HEADS, STATES, HEAD_DIM))
    dt = dt.sigmoid() * torch.tensor(DECAYS[decays], dtype=torch.float64)
    A = torch.tensor([-0.5, -1.0, -3.0], dtype=torch.float64)
    return [v.to(dtype).requires_grad_() for v in (x, dt, A, B, C, D, state)]


def starts_of(num_tokens, share=0.15):
    return torch.rand(ROWS, num_tokens, generator=torch.Generator().manual_seed(1)) < share


def recurrence(x, dt, A, B, C, D, state, starts=None):
    """S_t = exp(dt_t A) S_{t-1} + dt_t B_t^T x_t,  y_t = C_t S_t + D x_t."""
    outputs = []
    for t in range(x.shape[1]):
        decay = (dt[:, t] * A).exp()
        if starts is not None:
            decay = torch.where(starts[:, t, None], 0, decay)
        added = torch.einsum("bh, bn, bhp -> bhnp", dt[:, t], B[:, t], x[:, t])
        state = decay[..., None, None] * state + added
        outputs.append(torch.einsum("bn, bhnp -> bhp", C[:, t], state) + D[:, None] * x[:, t])
    return torch.stack(outputs, dim=1), state


def results(function, inputs, **options):
    """Return y, the last state, and the gradients of a weighted sum of both by all inputs."""
    y, state = function(*inputs, **options)
    dy, dstate = randoms(y.shape, state.shape, dtype=torch.float32, seed=2)
    objective = (y * dy.to(y.dtype)).sum() + (state * dstate.to(state.dtype)).sum()
    return [y, state, *torch.autograd.grad(objective, inputs, materialize_grads=True)]


def assert_close(found, expected, tolerance):
    for ours, true in zip(found, expected, strict=True):
        error = (ours.double() - true).abs().max()
        assert error <= tolerance * max(1, true.abs().max())


@pytest.mark.parametrize("decays", DECAYS)
@pytest.mark.parametrize(("num_tokens", "chunk"), [(1, 4), (3, 4), (16, 4), (37, 8), (75, 2)])
def test_values_states_and_gradients_equal_the_recurrence(num_tokens, chunk, decays):
    single = problem(num_tokens, decays, torch.float32)
    inputs = [v.detach().double().requires_grad_() for v in single]
    for starts in (None, starts_of(num_tokens)):
        expected = results(recurrence, inputs, starts=starts)
        exact = results(chunked_ssd, inputs, starts_BT=starts, chunk=chunk)
        assert_close(exact, expected, 1e-8)
        found = results(chunked_ssd, single, starts_BT=starts, chunk=chunk)
        assert all(v.dtype == torch.float32 for v in found)
        assert_close(found, expected, 1e-5)


def test_groups_of_groups_of_chunks():
    inputs, starts = problem(275), starts_of(275, share=0.01)  # more than 16 x 16 chunks
    found = results(chunked_ssd, inputs, starts_BT=starts, chunk=1)
    assert_close(found, results(recurrence, inputs, starts=starts), 1e-8)


def test_a_weak_decay_after_strong_ones_is_exact_in_float32():
    x, dt, A, B, C, D, state = problem(64, dtype=torch.float32)
    with torch.no_grad():
        dt[:, :32], dt[:, 32:] = 3e3, 1e-2  # sums of -3e5, beside which float32 resolves 0.03
    inputs = [x, dt, A, B, C, D, state]
    expected = results(recurrence, [v.double() for v in inputs])
    assert_close(results(chunked_ssd, inputs), expected, 1e-5)


def test_two_calls_equal_one_and_padding_is_cut():
    x, dt, A, B, C, D, state = (v.detach() for v in problem(29))
    starts = starts_of(29)
    whole_y, whole_state = chunked_ssd(x, dt, A, B, C, D, state, starts, chunk=8)
    for cut in (1, 8, 28):
        last, outputs = state, []
        for part in (slice(cut), slice(cut, None)):
            given = x[:, part], dt[:, part], A, B[:, part], C[:, part], D, last, starts[:, part]
            y, last = chunked_ssd(*given, chunk=8)
            outputs.append(y)
        torch.testing.assert_close(torch.cat(outputs, dim=1), whole_y)
        torch.testing.assert_close(last, whole_state)
    first = torch.zeros(ROWS, 29, dtype=torch.bool)
    first[:, 7] = True
    y, last = chunked_ssd(x, dt, A, B, C, D, state, first, chunk=8)
    alone = chunked_ssd(x[:, 7:], dt[:, 7:], A, B[:, 7:], C[:, 7:], D)
    torch.testing.assert_close((y[:, 7:], last), alone)


@pytest.mark.parametrize("num_tokens", [1, 40])
def test_bfloat16_inputs_are_rounded_once(num_tokens):
    low, dtypes = torch.bfloat16, [torch.float32] * 7
    dtypes[0] = dtypes[3] = dtypes[4] = low
    pairs = zip(problem(num_tokens), dtypes, strict=True)
    inputs = [v.detach().to(dtype).requires_grad_() for v, dtype in pairs]
    found = results(chunked_ssd, inputs, chunk=8)
    assert [v.dtype for v in found] == [low, torch.float32, *dtypes]
    y, last = recurrence(*(v.double() for v in inputs))
    assert_close(found[1:2], [last], 1e-6)
    assert (found[0].double() - y).norm() <= 2**-8 * y.norm()


def test_transformers_chunk_scan_is_equal():
    x, dt, A, B, C, D, state = (v.detach().float() for v in problem(37))
    options = {"D": D, "initial_states": state.transpose(2, 3), "return_final_states": True}
    y, last = mamba2_chunk_scan(x, dt, A, B[:, :, None], C[:, :, None], 8, **options)
    found = chunked_ssd(x, dt, A, B, C, D, state, chunk=16)
    torch.testing.assert_close(found, (y, last.transpose(2, 3)), rtol=1e-5, atol=1e-5)


class LargestTensor(TorchDispatchMode):
    size = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.size = max(self.size, out.numel() if torch.is_tensor(out) else 0)
        return out


def test_memory_is_linear_in_the_length():
    sizes = []
    for num_tokens in (1024, 2048):
        with LargestTensor() as largest:
            results(chunked_ssd, problem(num_tokens, dtype=torch.float32))
        sizes.append(largest.size / num_tokens)
    assert sizes[1] == sizes[0] <= ROWS * HEADS * 64


@pytest.mark.system
# from inside torch
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("starts", [None, True])
@pytest.mark.parametrize("num_tokens", [1, 21])
def test_one_graph(num_tokens, starts):
    torch.compiler.reset()
    counter, inputs = CompileCounter(), problem(num_tokens)
    compiled = torch.compile(chunked_ssd, backend=counter, fullgraph=True)
    options = {"starts_BT": starts and starts_of(num_tokens), "chunk": 4}
    found, expected = (results(f, inputs, **options) for f in (compiled, chunked_ssd))
    torch.testing.assert_close(found, expected)
    assert counter.frame_count == 1
