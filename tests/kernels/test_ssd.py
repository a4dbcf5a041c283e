"""Mamba2's recurrence in chunks against the formula, token by token, and against transformers."""

import pytest
import torch
from torch._dynamo.testing import CompileCounter
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.models.mamba2.modeling_mamba2 import mamba2_chunk_scan

from canon_pretrain.kernels.ssd import chunked_ssd
from tests.canon_inputs import randoms
from tests.gpu_form import on_gpu, relative_errors

ROWS = 2
HEADS = 3
HEAD_DIM = 5
STATES = 4
LENGTH = 29
"""Tokens of the problem that is cut into two calls."""

DECAYS = {
    "mixed": (1e-3, 0.3, 30.0),
    "near one": (1e-6, 1e-5, 1e-4),
    "near zero": (80.0, 2e3, 1e6),  # beyond float32's exp, and beyond CUT
}


def problem(num_tokens, decays="mixed", dtype=torch.float64):
    """Return x, dt, A, B, C, D and a state; dt is of another scale for each head."""
    x, dt, B, C, D, state = randoms(
        (ROWS, num_tokens, HEADS, HEAD_DIM),
        (ROWS, num_tokens, HEADS),
        (ROWS, num_tokens, STATES),
        (ROWS, num_tokens, STATES),
        (HEADS,),
        (ROWS, HEADS, STATES, HEAD_DIM),
    )
    dt = dt.sigmoid() * torch.tensor(DECAYS[decays], dtype=torch.float64)
    A = torch.tensor([-0.5, -1.0, -3.0], dtype=torch.float64)
    return [value.to(dtype).requires_grad_() for value in (x, dt, A, B, C, D, state)]


def starts_of(num_tokens, share=0.15):
    """Return bool [ROWS, T]: at about this share of the tokens a document starts."""
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


def assert_close(computed, expected, tolerance):
    """Errors are at most `tolerance` times the largest value, or 1 if that is larger."""
    for ours, true in zip(computed, expected, strict=True):
        error = (ours.double() - true).abs().max()
        assert error <= tolerance * max(1, true.abs().max())


@pytest.mark.parametrize("decays", DECAYS)
@pytest.mark.parametrize(("num_tokens", "chunk"), [(1, 4), (3, 4), (16, 4), (37, 8), (75, 2)])
def test_values_states_and_gradients_equal_the_recurrence(num_tokens, chunk, decays):
    single = problem(num_tokens, decays, torch.float32)
    double = [value.detach().double().requires_grad_() for value in single]

    for starts in (None, starts_of(num_tokens)):
        expected = results(recurrence, double, starts=starts)
        in_float64 = results(chunked_ssd, double, starts_BT=starts, chunk=chunk)
        in_float32 = results(chunked_ssd, single, starts_BT=starts, chunk=chunk)

        assert_close(in_float64, expected, 1e-8)
        assert all(value.dtype == torch.float32 for value in in_float32)
        assert_close(in_float32, expected, 1e-5)


def test_groups_of_groups_of_chunks():
    num_tokens = 275  # more than 16 x 16 chunks
    inputs = problem(num_tokens)
    starts = starts_of(num_tokens, share=0.01)

    chunked = results(chunked_ssd, inputs, starts_BT=starts, chunk=1)

    assert_close(chunked, results(recurrence, inputs, starts=starts), 1e-8)


def test_a_weak_decay_after_strong_ones_is_exact_in_float32():
    inputs = problem(64, dtype=torch.float32)
    dt = inputs[1]
    with torch.no_grad():
        dt[:, :32] = 3e3  # sums of -3e5, at which float32 resolves 0.03
        dt[:, 32:] = 1e-2

    chunked = results(chunked_ssd, inputs)

    expected = results(recurrence, [value.double() for value in inputs])
    assert_close(chunked, expected, 1e-5)


@pytest.mark.parametrize("cut", [1, 8, 28])
def test_two_calls_equal_one(cut):
    x, dt, A, B, C, D, state = (value.detach() for value in problem(LENGTH))
    starts = starts_of(LENGTH)
    whole_y, whole_state = chunked_ssd(x, dt, A, B, C, D, state, starts, chunk=8)

    y_before, state = chunked_ssd(
        x[:, :cut], dt[:, :cut], A, B[:, :cut], C[:, :cut], D, state, starts[:, :cut], chunk=8
    )
    y_after, state = chunked_ssd(
        x[:, cut:], dt[:, cut:], A, B[:, cut:], C[:, cut:], D, state, starts[:, cut:], chunk=8
    )

    torch.testing.assert_close(torch.cat((y_before, y_after), dim=1), whole_y)
    torch.testing.assert_close(state, whole_state)


def test_padding_before_a_start_is_cut():
    x, dt, A, B, C, D, state = (value.detach() for value in problem(LENGTH))
    start = 7
    starts = torch.zeros(ROWS, LENGTH, dtype=torch.bool)
    starts[:, start] = True

    y, last_state = chunked_ssd(x, dt, A, B, C, D, state, starts, chunk=8)

    alone = chunked_ssd(x[:, start:], dt[:, start:], A, B[:, start:], C[:, start:], D)
    torch.testing.assert_close((y[:, start:], last_state), alone)


@pytest.mark.parametrize("num_tokens", [1, 40])
def test_bfloat16_inputs_are_rounded_once(num_tokens):
    names = ("x", "dt", "A", "B", "C", "D", "state")
    dtypes = [torch.bfloat16 if name in ("x", "B", "C") else torch.float32 for name in names]
    inputs = [
        value.detach().to(dtype).requires_grad_()
        for value, dtype in zip(problem(num_tokens), dtypes, strict=True)
    ]
    exact_y, exact_state = recurrence(*(value.double() for value in inputs))

    computed = results(chunked_ssd, inputs, chunk=8)

    assert [value.dtype for value in computed] == [torch.bfloat16, torch.float32, *dtypes]
    y, last_state = computed[:2]
    assert_close([last_state], [exact_state], 1e-6)
    assert (y.double() - exact_y).norm() <= 2**-8 * exact_y.norm()


@pytest.mark.parametrize("decays", DECAYS)
def test_the_form_for_a_gpu(decays):
    """In float32 nothing is rounded; bfloat16 operands cost about the rounding of the output."""
    single = problem(300, decays, torch.float32)
    rounded = [
        value.detach().to(torch.bfloat16 if number in (0, 3, 4) else torch.float32).requires_grad_()
        for number, value in enumerate(single)
    ]
    double, double_rounded = (
        [value.detach().double().requires_grad_() for value in inputs]
        for inputs in (single, rounded)
    )
    starts = starts_of(300, share=0.02)
    expected = results(recurrence, double, starts=starts)
    expected_rounded = results(recurrence, double_rounded, starts=starts)

    with on_gpu():
        computed = results(chunked_ssd, single, starts_BT=starts)
        computed_rounded = results(chunked_ssd, rounded, starts_BT=starts)

    assert_close(computed, expected, 1e-5)
    errors = relative_errors(computed_rounded, expected_rounded)
    assert 1e-3 < errors[0]  # the output is rounded
    assert max(errors) < 2e-2  # so is the output's gradient


def test_transformers_chunk_scan_is_equal():
    x, dt, A, B, C, D, state = (value.detach().float() for value in problem(37))
    y, last_state = mamba2_chunk_scan(
        x,
        dt,
        A,
        B[:, :, None],
        C[:, :, None],
        8,
        D=D,
        initial_states=state.transpose(2, 3),
        return_final_states=True,
    )

    computed = chunked_ssd(x, dt, A, B, C, D, state, chunk=16)

    expected = (y, last_state.transpose(2, 3))
    torch.testing.assert_close(computed, expected, rtol=1e-5, atol=1e-5)


class LargestTensor(TorchDispatchMode):
    """Keep the number of elements of the largest tensor that an operator returns."""

    size = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if torch.is_tensor(out):
            self.size = max(self.size, out.numel())
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
@pytest.mark.parametrize("has_starts", [False, True])
@pytest.mark.parametrize("num_tokens", [1, 21])
def test_one_graph(num_tokens, has_starts):
    torch.compiler.reset()
    inputs = problem(num_tokens)
    starts = starts_of(num_tokens) if has_starts else None
    expected = results(chunked_ssd, inputs, starts_BT=starts, chunk=4)

    counter = CompileCounter()
    compiled = torch.compile(chunked_ssd, backend=counter, fullgraph=True)

    torch.testing.assert_close(results(compiled, inputs, starts_BT=starts, chunk=4), expected)
    assert counter.frame_count == 1
