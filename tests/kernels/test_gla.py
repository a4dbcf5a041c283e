"""Chunked gated linear attention against the recurrence, token by token."""

import pytest
import torch
from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.tensor import TensorVariable
from torch.utils._python_dispatch import TorchDispatchMode

from canon_pretrain.kernels import backends
from canon_pretrain.kernels import gla as gla_kernels
from canon_pretrain.kernels.gla import chunked_gla
from tests.canon_inputs import randoms
from tests.gpu_form import on_gpu, relative_errors

B, H, K, V = 2, 2, 8, 6  # rows, heads, widths of keys and of values
SCALE = 0.3
DECAYS = ["model", "near 0", "near 1", "mixed", "some 0"]


def recurrence(q, k, v, log_decay, state, starts):
    """Compute the formula, token by token."""
    outputs = []
    for t in range(q.shape[1]):
        state = torch.where(starts[:, t, None, None, None], 0, state)
        decay_t = log_decay[:, t, :, :, None].exp()
        state = decay_t * state + k[:, t, :, :, None] * v[:, t, :, None]
        outputs.append(SCALE * (q[:, t, :, None] @ state)[:, :, 0])
    return torch.stack(outputs, dim=1), state


def gla(q, k, v, log_decay, state=None, starts=None, **options):
    return chunked_gla(q, k, v, log_decay, SCALE, state=state, starts_BT=starts, **options)


def problem(num_tokens, decays="model", dtype=torch.float64, starts_every=0):
    """Return q, k, v, log decays, a state and starts; all are exact in float32."""
    keys = (B, num_tokens, H, K)
    values = (B, num_tokens, H, V)
    q, k, v, gate, state = randoms(keys, keys, values, keys, (B, H, K, V), dtype=torch.float32)
    log_decay = {
        "model": torch.nn.functional.logsigmoid(gate) / 16,
        "near 0": -200 * gate.square() - 20,
        "near 1": -1e-8 * gate.square(),
        "mixed": -(8 * gate).exp(),
        "some 0": torch.where(gate > 1, -torch.inf, -gate.abs()),
    }[decays]

    starts = torch.zeros(B, num_tokens, dtype=torch.bool)
    if starts_every:
        starts[0, ::starts_every] = True
        starts[1, num_tokens // 2] = True
    return [x.to(dtype) for x in (q, k, v, log_decay, state)], starts


def outputs_and_grads(function, inputs, starts, **options):
    """Return the outputs and the gradients of all inputs for random gradients of the outputs."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    outputs = function(*leaves, starts, **options)
    upstream = randoms(*(output.shape for output in outputs))
    upstream = [dy.to(output.dtype) for dy, output in zip(upstream, outputs, strict=True)]
    return [*outputs, *torch.autograd.grad(outputs, leaves, upstream)]


def assert_equal_to_scale(computed, expected, tolerance):
    """Errors are at most `tolerance` times the largest value, or 1 if that is larger."""
    for ours, true in zip(computed, expected, strict=True):
        assert ours.shape == true.shape
        error = (ours.double() - true.double()).abs().max()
        assert error <= tolerance * true.double().abs().max().clamp(min=1)


@pytest.mark.parametrize("decays", DECAYS)
@pytest.mark.parametrize("num_tokens", [1, 2, 7, 64, 65, 140])
def test_values_states_and_gradients(num_tokens, decays):
    for every in (0, 1, 5):
        exact, starts = problem(num_tokens, decays, starts_every=every)
        expected = outputs_and_grads(recurrence, exact, starts)
        for dtype, tolerance in ((torch.float64, 1e-13), (torch.float32, 1e-5)):
            chunked = outputs_and_grads(gla, [x.to(dtype) for x in exact], starts)
            assert_equal_to_scale(chunked, expected, tolerance)


@pytest.mark.parametrize("chunk", [1, 2, 256])
def test_any_chunk_computes_the_same(chunk):
    exact, starts = problem(140, "mixed", starts_every=40)
    expected = outputs_and_grads(recurrence, exact, starts)
    assert_equal_to_scale(outputs_and_grads(gla, exact, starts, chunk=chunk), expected, 1e-13)


@pytest.mark.parametrize("decays", DECAYS)
def test_calls_in_sequence_equal_one_call(decays):
    (*inputs, state), starts = problem(100, decays, torch.float32, starts_every=9)
    expected = gla(*inputs, state, starts)

    outputs = []
    for begin, end in ((0, 37), (37, 96), (96, 97), (97, 98), (98, 99), (99, 100)):
        part = [x[:, begin:end] for x in inputs]
        output, state = gla(*part, state, starts[:, begin:end])
        outputs.append(output)

    assert_equal_to_scale((torch.cat(outputs, dim=1), state), expected, 1e-6)


def three_documents():
    """Return a problem of documents of 30, 45 and 15 tokens; the second ends in left padding."""
    (*inputs, state), starts = problem(90, "model", torch.float32)
    starts[:, [30, 75]] = True
    _, k, v, _ = inputs
    k[:, 60:75] = 0
    v[:, 60:75] = 0
    return inputs, state, starts


def test_documents_and_padding_equal_calls_alone():
    inputs, state, starts = three_documents()

    output, last_state = gla(*inputs, state, starts)

    second_alone, _ = gla(*(x[:, 30:60] for x in inputs))
    assert_equal_to_scale([output[:, 30:60]], [second_alone], 1e-6)
    last_alone = gla(*(x[:, 75:] for x in inputs))
    assert_equal_to_scale((output[:, 75:], last_state), last_alone, 1e-6)


def test_no_gradient_crosses_a_start():
    """In neither direction, not even rounded."""
    inputs, state, starts = three_documents()
    leaves = [x.requires_grad_() for x in (*inputs, state)]

    output, _ = gla(*leaves, starts)
    dq, dk, dv, _, dstate = torch.autograd.grad(output[:, 30:60].sum(), leaves)

    for grad in (dq, dk, dv):
        assert not grad[:, :30].any()
        assert not grad[:, 60:].any()
    assert not dstate.any()


def saved_share_and_grads(backend="aot_eager_decomp_partition"):
    """Compile the mixer; return the bytes that it saves per byte of its inputs, and gradients."""
    torch._dynamo.reset()
    (*inputs, _), _ = problem(140, dtype=torch.float32)
    leaves = [x.requires_grad_() for x in inputs]
    run = torch.compile(backends.recurrence("gla", "chunked"), backend=backend, fullgraph=True)
    sizes = {}

    def pack(x):
        storage = x.untyped_storage()
        sizes[storage.data_ptr()] = storage.nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        output, _ = run(*leaves, scale=SCALE)
    input_bytes = sum(x.numel() * x.itemsize for x in leaves)
    return sum(sizes.values()) / input_bytes, torch.autograd.grad(output.square().sum(), leaves)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.system
def test_compiled_for_a_gpu_only_inputs_are_saved(monkeypatch):
    share_on_cpu, expected = saved_share_and_grads()

    is_cuda = lambda x, tx: VariableTracker.build(tx, True)  # noqa: E731
    monkeypatch.setattr(TensorVariable, "method_attr_is_cuda", is_cuda)
    share_on_gpu, grads = saved_share_and_grads()

    assert share_on_gpu < 1.1  # the zeros of the first state are saved too
    assert share_on_cpu > 2
    assert_equal_to_scale(grads, expected, 1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_inputs_have_a_float32_state(dtype):
    exact, starts = problem(130, dtype=torch.float32, starts_every=50)
    inputs = [x.to(dtype) for x in exact[:3]] + exact[3:]
    expected = outputs_and_grads(recurrence, [x.double() for x in inputs], starts)

    computed = outputs_and_grads(gla, inputs, starts)

    output, last_state, *grads = computed
    assert output.dtype == dtype
    assert last_state.dtype == torch.float32
    assert [grad.dtype for grad in grads] == [x.dtype for x in inputs]
    # the output's gradient is rounded too
    assert_equal_to_scale(computed, expected, 2 * torch.finfo(dtype).eps)
    assert_equal_to_scale([last_state], [expected[1]], 1e-6)


@pytest.mark.parametrize("decays", DECAYS)
def test_the_form_for_a_gpu(decays):
    """In float32 nothing is rounded; bfloat16 operands cost about the rounding of the output."""
    exact, starts = problem(300, decays, torch.float32, starts_every=90)
    rounded = [x.bfloat16() for x in exact[:3]] + exact[3:]
    expected = outputs_and_grads(recurrence, [x.double() for x in exact], starts)
    expected_rounded = outputs_and_grads(recurrence, [x.double() for x in rounded], starts)

    with on_gpu():
        computed = outputs_and_grads(gla, exact, starts, chunk=4)  # three groups
        computed_rounded = outputs_and_grads(gla, rounded, starts)

    assert_equal_to_scale(computed, expected, 1e-5)
    errors = relative_errors(computed_rounded, expected_rounded)
    of_log_decays = errors.pop(5)
    assert 1e-3 < errors[0]  # the output is rounded
    assert max(errors) < 8e-3
    # sums over a chunk of differences, whose terms are rounded; near 0 they are all of it
    assert of_log_decays < (0.2 if decays == "near 0" else 0.02)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("num_chunks", [1, 5, 32, 33, 70])
def test_states_of_groups_equal_those_one_by_one(num_chunks, reverse):
    decay, left, right, state = randoms(
        (num_chunks, 4, 3), (num_chunks * 4, 5, 3), (num_chunks * 4, 5, 6), (4, 3, 6)
    )
    decay = decay.sigmoid() * (decay < 1)  # some are 0
    added = (left.mT @ right).unflatten(0, (num_chunks, 4))

    grouped = gla_kernels._grouped_states(decay, left, right, state, reverse)

    expected = gla_kernels._states(decay[..., None], added, state, reverse)
    torch.testing.assert_close(grouped, expected)


@pytest.mark.system
@pytest.mark.parametrize("form", ["chunk", "recurrent"])
def test_the_delta_rule_of_transformers_without_its_correction(form):
    # Kimi's S + b k (v - k S) is GLA's for v / b and a tiny power of two b
    kimi = pytest.importorskip("transformers.models.kimi_linear.modeling_kimi_linear")
    rule = getattr(kimi, f"{form}_kimi_delta_attention")
    (q, k, v, log_decay, state), _ = problem(100, dtype=torch.float32)
    beta = torch.full(q.shape[:3], 2.0**-40)

    output, last_state = rule(
        q,
        k,
        v / beta[..., None],
        log_decay,
        beta,
        initial_state=state,
        output_final_state=True,
    )

    expected = (SCALE * K**0.5 * output, last_state)
    assert_equal_to_scale(gla(q, k, v, log_decay, state), expected, 2e-6)


class CreatedBytes(TorchDispatchMode):
    """Count the bytes of all tensors that operators return."""

    total = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor):
            self.total += out.nbytes
        return out


def test_time_and_memory_are_linear_and_only_inputs_are_saved():
    saved = []
    save = torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x)

    created = []
    for num_tokens in (256, 512):
        inputs, starts = problem(num_tokens)
        with CreatedBytes() as counter, save:
            outputs_and_grads(gla, inputs, starts)
        created.append(counter.total)

    assert created[1] <= 2.02 * created[0]
    assert len(saved) == 2 * len((*inputs, starts))


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.system
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("num_tokens", [1, 150])
def test_it_is_one_graph(num_tokens, backend):
    torch.compiler.reset()
    inputs, starts = problem(num_tokens, "mixed", torch.float32, starts_every=40)
    expected = outputs_and_grads(gla, inputs, starts)

    compiled = torch.compile(gla, backend=backend, fullgraph=True)

    assert_equal_to_scale(outputs_and_grads(compiled, inputs, starts), expected, 2e-6)
