"""The compiled backend against the reference: values, gradients, dtypes."""

import itertools

import pytest
import torch
import torch.nn.functional as F

from canon_pretrain.kernels import compiled
from canon_pretrain.kernels.backends import canon_reference
from canon_pretrain.kernels.compiled import canon_compiled, canon_gate_compiled
from tests.canon_inputs import KINDS, every_kind, randoms, segments_of

# from inside dynamo
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]


@pytest.fixture(params=["eager", "CPU", "GPU"])
def form(request, monkeypatch):
    """The forms of kernels/compiled.py; those for torch.compile run as plain torch."""
    if request.param != "eager":
        monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    monkeypatch.setattr(compiled, "is_cuda", lambda _: request.param == "GPU")


every_form = pytest.mark.usefixtures("form")


def _gate_reference(gate, up, weight, *, relu2, **options):
    """Compute Canon-D's gate by the reference."""
    gate_weight, up_weight = weight.split(gate.shape[2])
    gate = canon_reference(gate, gate_weight, activation=False, **options)
    up = canon_reference(up, up_weight, activation=False, **options)
    return (F.relu(gate).square() if relu2 else F.silu(gate)) * up


def _assert_same(function, reference, inputs, **options):
    """Values, gradients and dtypes are equal; inputs and the output's gradient are not changed."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    reference_leaves = [x.detach().requires_grad_() for x in inputs]
    expected = reference(*reference_leaves, **options)
    (dy,) = randoms(expected.shape, dtype=expected.dtype, seed=1)
    dy_before = dy.clone()

    y = function(*leaves, **options)
    grads = torch.autograd.grad(y, leaves, dy)

    torch.testing.assert_close(y, expected)
    torch.testing.assert_close(grads, torch.autograd.grad(expected, reference_leaves, dy))
    assert torch.equal(dy, dy_before)
    assert all(torch.equal(x, leaf) for x, leaf in zip(inputs, leaves, strict=True))


@every_form
@pytest.mark.parametrize("num_taps", [2, 4, 5, 16])
@pytest.mark.parametrize("num_tokens", [1, 3, 5, 64])
def test_values_and_gradients_equal_the_reference(num_tokens, num_taps):
    shape = (3, num_tokens, 7)
    gate, up, weight = randoms(shape, shape, (14, 1, num_taps))

    for every in (0, 3):
        segments = segments_of(num_tokens, num_taps - 1, every)
        for kind in KINDS:
            _assert_same(
                canon_compiled, canon_reference, [gate, weight[:7]], segments_BN=segments, **kind
            )
        for residual, relu2 in itertools.product((True, False), repeat=2):
            _assert_same(
                canon_gate_compiled,
                _gate_reference,
                [gate, up, weight],
                segments_BN=segments,
                residual=residual,
                relu2=relu2,
            )


def _transposed(x):
    """Return x [B, T, C] with the tokens innermost in memory."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


@every_form
@every_kind
def test_inputs_and_gradients_need_not_be_contiguous(kind):
    x, weight, other = randoms((2, 21, 6), (6, 1, 4), (2, 21, 6))
    leaves = [x.requires_grad_(), weight.requires_grad_()]

    for dy in (torch.ones(()).double().expand(x.shape), _transposed(other)):
        y = canon_compiled(_transposed(x), weight, **kind)
        grads = torch.autograd.grad(y, leaves, dy)

        expected = torch.autograd.grad(canon_reference(x, weight, **kind), leaves, dy)
        torch.testing.assert_close(grads, expected)


def _outputs_and_grads(function, inputs, dy, dtype, **kind):
    """Return the output and the gradients of the inputs, computed in `dtype`."""
    leaves = [x.to(dtype).requires_grad_() for x in inputs]
    y = function(*leaves, **kind)
    assert y.dtype == dtype
    return [y, *torch.autograd.grad(y, leaves, dy.to(dtype))]


@every_form
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_errors_equal_the_references(dtype):
    x, weight, dy = randoms((3, 129, 16), (16, 1, 4), (3, 129, 16), dtype=dtype)
    inputs = [x, weight]

    for kind in KINDS:
        truth = _outputs_and_grads(canon_reference, inputs, dy, torch.float64, **kind)
        compiled_form = _outputs_and_grads(canon_compiled, inputs, dy, dtype, **kind)
        reference = _outputs_and_grads(canon_reference, inputs, dy, dtype, **kind)

        for exact, ours, theirs in zip(truth, compiled_form, reference, strict=True):
            error = (ours.double() - exact).abs().mean()
            reference_error = (theirs.double() - exact).abs().mean()
            assert error <= 1.02 * reference_error


TRACED = [
    (canon_compiled, canon_reference, {"residual": True, "activation": True}, 4),
    (canon_gate_compiled, _gate_reference, {"residual": True, "relu2": False}, 4),
    (canon_gate_compiled, _gate_reference, {"residual": True, "relu2": True}, 5),
]


@pytest.mark.system
@pytest.mark.parametrize(
    ("function", "reference", "options", "num_taps"), TRACED, ids=["canon", "gate", "relu2"]
)
def test_the_traced_gpu_form(function, reference, options, num_taps, monkeypatch):
    """By dynamo, and inductor's decompositions and partitioner."""
    monkeypatch.setattr(compiled, "is_cuda", lambda _: True)
    torch.compiler.reset()
    num_parts = 1 if function is canon_compiled else 2
    inputs = randoms(*[(3, 32, 6)] * num_parts, (6 * num_parts, 1, num_taps))
    segments = segments_of(32, num_taps - 1)

    traced = torch.compile(function, backend="aot_eager_decomp_partition", fullgraph=True)

    _assert_same(traced, reference, inputs, segments_BN=segments, **options)
