"""Chunked gated linear attention against the recurrence, token by token."""

import pytest
import torch
from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.tensor import TensorVariable
from torch.utils._python_dispatch import TorchDispatchMode

from canon_pretrain.kernels import backends
from canon_pretrain.kernels.gla import chunked_gla
from tests.canon_inputs import randoms

B, H, K, V, SCALE = 2, 2, 8, 6, 0.3
DECAYS = ["model", "near 0", "near 1", "mixed", "some 0"]


def recurrence(q, k, v, log_decay, state, starts):
    outputs = []
    for t in range(q.shape[1]):
        state = torch.where(starts[:, t, None, None, None], 0, state)
        state = log_decay[:, t, :, :, None].exp() * state + k[:, t, :, :, None] * v[:, t, :, None]
        outputs.append(SCALE * (q[:, t, :, None] @ state)[:, :, 0])
    return torch.stack(outputs, dim=1), state


def gla(q, k, v, log_decay, state=None, starts=None, **options):
    return chunked_gla(q, k, v, log_decay, SCALE, state=state, starts_BT=starts, **options)


def problem(num_tokens, decays="model", dtype=torch.float64, starts_every=0):
    """Return q, k, v, log decays, a state and starts; all are exact in float32."""
    keys, values = (B, num_tokens, H, K), (B, num_tokens, H, V)
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
        starts[0, ::starts_every] = starts[1, num_tokens // 2] = True
    return [x.to(dtype) for x in (q, k, v, log_decay, state)], starts


def outputs_and_grads(function, inputs, starts, **options):
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    found = function(*leaves, starts, **options)
    given = [d.to(x.dtype) for d, x in zip(randoms(*(x.shape for x in found)), found, strict=True)]
    return [*found, *torch.autograd.grad(found, leaves, given)]


def assert_equal_to_scale(found, expected, tolerance):
    """Errors are at most `tolerance` times the largest value, or 1 if that is larger."""
    for ours, true in zip(found, expected, strict=True):
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
            found = outputs_and_grads(gla, [x.to(dtype) for x in exact], starts)
            assert_equal_to_scale(found, expected, tolerance)


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


def test_documents_and_padding_do_not_see_each_other():
    (*inputs, state), starts = problem(90, "model", torch.float32)
    starts[:, [30, 75]] = True
    inputs[1][:, 60:75] = inputs[2][:, 60:75] = 0  # left padding of the last document
    output, end = gla(*inputs, state, starts)
    alone, _ = gla(*(x[:, 30:60] for x in inputs))
    assert_equal_to_scale([output[:, 30:60]], [alone], 1e-6)
    assert_equal_to_scale((output[:, 75:], end), gla(*(x[:, 75:] for x in inputs)), 1e-6)
    # nothing crosses a start, in either direction, not even rounded
    leaves = [x.requires_grad_() for x in (*inputs, state)]
    grads = torch.autograd.grad(gla(*leaves, starts)[0][:, 30:60].sum(), leaves)
    outside = [part for grad in grads[:3] for part in (grad[:, :30], grad[:, 60:])]
    assert not any(part.any() for part in (*outside, grads[4]))


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.system
def test_compiled_for_a_gpu_only_inputs_are_saved(monkeypatch):
    def saved(backend="aot_eager_decomp_partition"):
        torch._dynamo.reset()
        leaves = [x.requires_grad_() for x in problem(140, dtype=torch.float32)[0][:4]]
        run = torch.compile(backends.recurrence("gla", "chunked"), backend=backend, fullgraph=True)
        sizes = {}

        def pack(x):
            sizes[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
            return x

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            o, _ = run(*leaves, scale=SCALE)
        own = sum(x.numel() * x.itemsize for x in leaves)
        return sum(sizes.values()) / own, torch.autograd.grad(o.square().sum(), leaves)

    (on_cpu, expected), is_cuda = saved(), lambda x, tx: VariableTracker.build(tx, True)
    monkeypatch.setattr(TensorVariable, "method_attr_is_cuda", is_cuda)
    on_gpu, found = saved()
    assert on_gpu < 1.1 < 2 < on_cpu  # the zeros of the first state are saved too
    for ours, true in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, true)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_inputs_have_a_float32_state(dtype):
    exact, starts = problem(130, dtype=torch.float32, starts_every=50)
    inputs = [x.to(dtype) for x in exact[:3]] + exact[3:]
    found = outputs_and_grads(gla, inputs, starts)
    assert [found[0].dtype, *(x.dtype for x in found[2:])] == [dtype, *(x.dtype for x in inputs)]
    expected = outputs_and_grads(recurrence, [x.double() for x in inputs], starts)
    # the output's gradient is rounded too
    assert_equal_to_scale(found, expected, 2 * torch.finfo(dtype).eps)
    assert found[1].dtype == torch.float32
    assert_equal_to_scale([found[1]], [expected[1]], 1e-6)


@pytest.mark.system
@pytest.mark.parametrize("form", ["chunk", "recurrent"])
def test_the_delta_rule_of_transformers_without_its_correction(form):
    # Kimi's S + b k (v - k S) is GLA's for v / b and a tiny power of two b
    kimi = pytest.importorskip("transformers.models.kimi_linear.modeling_kimi_linear")
    (q, k, v, log_decay, state), _ = problem(100, dtype=torch.float32)
    beta = torch.full(q.shape[:3], 2.0**-40)
    rule = getattr(kimi, f"{form}_kimi_delta_attention")
    options = {"initial_state": state, "output_final_state": True}
    output, end = rule(q, k, v / beta[..., None], log_decay, beta, **options)
    assert_equal_to_scale(gla(q, k, v, log_decay, state), (SCALE * K**0.5 * output, end), 2e-6)


class CreatedBytes(TorchDispatchMode):
    total = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor):
            self.total += out.nbytes
        return out


def test_time_and_memory_are_linear_and_only_inputs_are_saved():
    created, saved = [], []
    save = torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x)
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
    given = problem(num_tokens, "mixed", torch.float32, starts_every=40)
    compiled = torch.compile(gla, backend=backend, fullgraph=True)
    assert_equal_to_scale(outputs_and_grads(compiled, *given), outputs_and_grads(gla, *given), 2e-6)
