"""The chunked gated delta rule against the recurrence in float64 and transformers' forms."""

import functools
import itertools

import pytest
import torch
import torch.nn.functional as F
from transformers.models.qwen3_next import modeling_qwen3_next as qwen3_next

from canon_pretrain.kernels import delta
from canon_pretrain.kernels.delta import chunked_delta
from tests.delta_cases import derived, recurrence
from tests.gpu_form import on_gpu, relative_errors

DECAYS = {
    "none": (0.0,),
    "weak": (-1e-5, -1e-3),
    "usual": (-0.01, -0.1, -1.0),
    "strong": (0.0, -1e-3, -40.0, -99.0, -1e4, -torch.inf),
}


def problem(num_tokens, decay="usual", dtype=torch.float32, largest_step=1.0):
    """Return the inputs, a state, and starts of documents and after padding."""
    generator = torch.Generator().manual_seed(0)

    def randn(*shape):
        return torch.randn(2, *shape, generator=generator, dtype=torch.float64)

    # The order of the draws is part of the problem.
    q = F.normalize(randn(num_tokens, 2, 8), dim=-1)
    k = F.normalize(randn(num_tokens, 2, 8), dim=-1)
    k = F.normalize(k + 2 * k[:, :1], dim=-1)  # similar keys, which overwrite each other
    v = randn(num_tokens, 2, 6)
    beta = largest_step * randn(num_tokens, 2).sigmoid()
    state = randn(2, 8, 6)
    logs = torch.tensor(DECAYS[decay], dtype=torch.float64)
    g = logs[torch.randint(len(logs), (2, num_tokens, 2), generator=generator)]

    starts = torch.zeros(2, num_tokens, dtype=torch.bool)
    starts[0, 3::7] = True
    starts[0, 4::9] = True
    starts[1, num_tokens // 2] = True

    wide = torch.promote_types(dtype, torch.float32)
    inputs = [q.to(dtype), k.to(dtype), v.to(dtype), g.to(wide), beta.to(wide)]
    return inputs, state.to(wide), starts


def assert_same(computed, expected, tolerance=1e-5):
    torch.testing.assert_close(computed, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("num_tokens", [1, 2, 16, 37])
def test_values_and_gradients_equal_the_recurrence(num_tokens, decay):
    inputs, state, starts = problem(num_tokens, decay)

    for first_state, cuts in itertools.product((None, state), (None, starts)):
        expected = derived(recurrence, inputs, first_state, cuts)
        for chunk in (16, 64):
            chunked = functools.partial(chunked_delta, chunk=chunk)
            assert_same(derived(chunked, inputs, first_state, cuts), expected)


@pytest.mark.parametrize("decay", ["usual", "strong"])
def test_the_default_chunk_over_many_chunks(decay):
    inputs, state, starts = problem(2 * delta.CHUNK + 5, decay)

    chunked = derived(chunked_delta, inputs, state, starts)

    assert_same(chunked, derived(recurrence, inputs, state, starts))


@pytest.mark.parametrize("decay", ["none", "usual"])
@pytest.mark.parametrize("num_tokens", [1, 37, 2 * delta.CHUNK + 5])
def test_steps_up_to_2_equal_the_recurrence(num_tokens, decay):
    """With negative eigenvalues, 1 - step, a state is reflected; nothing grows."""
    inputs, state, starts = problem(num_tokens, decay, largest_step=2.0)
    assert num_tokens == 1 or inputs[-1].max() > 1.5

    chunked = derived(chunked_delta, inputs, state, starts)

    assert_same(chunked, derived(recurrence, inputs, state, starts), tolerance=2e-5)


def test_float64_is_exact():
    inputs, state, starts = problem(40, "weak", torch.float64)

    chunked = derived(functools.partial(chunked_delta, chunk=16), inputs, state, starts)

    assert_same(chunked, derived(recurrence, inputs, state, starts), 1e-12)


def test_bfloat16_inputs_and_a_float32_state():
    inputs, state, starts = problem(100, dtype=torch.bfloat16)
    exact_output, exact_last_state = recurrence(*inputs, state, starts)

    output, last_state = chunked_delta(*inputs, state, starts)

    assert (output.dtype, last_state.dtype) == (torch.bfloat16, torch.float32)
    torch.testing.assert_close(output.double(), exact_output, rtol=2**-8, atol=1e-5)
    assert_same(last_state.double(), exact_last_state)


@pytest.mark.parametrize("largest_step", [1.0, 2.0])
@pytest.mark.parametrize("decay", DECAYS)
def test_the_form_for_a_gpu(decay, largest_step):
    """In float32 nothing is rounded; with bfloat16 operands errors grow with the system's norm."""
    single, state, starts = problem(300, decay, largest_step=largest_step)
    rounded, _, _ = problem(300, decay, torch.bfloat16, largest_step)
    expected = derived(recurrence, single, state, starts)
    expected_rounded = derived(recurrence, rounded, state, starts)

    with on_gpu():
        computed = derived(chunked_delta, single, state, starts)
        computed_rounded = derived(chunked_delta, rounded, state, starts)

    assert_same(computed, expected, tolerance=2e-5)
    errors = relative_errors(computed_rounded, expected_rounded)
    assert 1e-3 < errors[0]  # the output is rounded
    assert max(errors) < 5e-2


@pytest.mark.parametrize("split", [1, 16, 23, 39])
def test_two_calls_equal_one(split):
    inputs, state, starts = problem(40)
    expected = chunked_delta(*inputs, state, starts)

    outputs = []
    for part in (slice(split), slice(split, None)):
        inputs_of_part = [x[:, part] for x in inputs]
        output, state = chunked_delta(*inputs_of_part, state, starts[:, part], chunk=16)
        outputs.append(output)

    assert_same((torch.cat(outputs, dim=1), state), expected)


def test_tokens_before_a_start_change_nothing_after_it():
    inputs, state, starts = problem(40)
    starts[:, 20] = True
    other_inputs = [torch.cat((x[:, :20].flip(0, 1), x[:, 20:]), dim=1) for x in inputs]

    output, last_state = chunked_delta(*inputs, state, starts, chunk=16)
    other_output, other_last_state = chunked_delta(*other_inputs, -state, starts, chunk=16)

    assert torch.equal(output[:, 20:], other_output[:, 20:])
    assert torch.equal(last_state, other_last_state)


@pytest.mark.parametrize("form", ["chunk", "recurrent"])
def test_transformers_forms(form):
    rule = getattr(qwen3_next, f"torch_{form}_gated_delta_rule")
    inputs, state, _ = problem(70)

    def theirs(q, k, v, g, beta, state, starts):
        return rule(q, k, v, g, beta, initial_state=state, output_final_state=True)

    assert_same(derived(chunked_delta, inputs, state, None), derived(theirs, inputs, state, None))


def saved_bytes(num_tokens):
    """Return the size of the tensors that a forward pass saves for the backward pass."""
    inputs, state, starts = problem(num_tokens)
    saved = {}

    def pack(x):
        return saved.setdefault(x.data_ptr(), x)

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        chunked_delta(*(x.requires_grad_() for x in inputs), state, starts)
    return sum(x.nbytes for x in saved.values())


def test_memory_is_linear_in_tokens():
    assert 0 < saved_bytes(2048) <= 2 * saved_bytes(1024)


# from torch, tracing an autograd function
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.system
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_one_graph(backend):
    torch._dynamo.reset()
    inputs, state, starts = problem(2 * delta.CHUNK + 5)
    expected = derived(chunked_delta, inputs, state, starts)

    compiled = torch.compile(chunked_delta, backend=backend, fullgraph=True)

    assert_same(derived(compiled, inputs, state, starts), expected)


@pytest.mark.system
def test_the_operator_follows_torchs_rules():
    generator = torch.Generator().manual_seed(0)
    shapes = [(3, 2, 5, 5), (3, 2, 5, 6), (3, 2, 5, 4), (3, 2, 5, 4), (3, 2, 1, 1), (2, 4, 6)]
    inputs = [torch.randn(shape, generator=generator, requires_grad=True) for shape in shapes]
    torch.library.opcheck(delta._scan, inputs)
