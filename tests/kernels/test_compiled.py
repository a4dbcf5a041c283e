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
    both = zip((gate, up), weight.split(gate.shape[2]), strict=True)
    gate, up = (canon_reference(x, w, activation=False, **options) for x, w in both)
    return (F.relu(gate).square() if relu2 else F.silu(gate)) * up


def _assert_same(function, reference, inputs, options):
    """Values, gradients and dtypes are equal; inputs and the output's gradient are not changed."""
    copies = [[x.detach().requires_grad_() for x in inputs] for _ in range(2)]
    found, expected = function(*copies[0], **options), reference(*copies[1], **options)
    (dy,) = randoms(expected.shape, dtype=expected.dtype, seed=1)
    kept = dy.clone()
    ours = [found, *torch.autograd.grad(found, copies[0], dy)]
    torch.testing.assert_close(ours, [expected, *torch.autograd.grad(expected, copies[1], dy)])
    assert torch.equal(dy, kept)
    assert all(torch.equal(x, copied) for x, copied in zip(inputs, copies[0], strict=True))


@every_form
@pytest.mark.parametrize("num_taps", [2, 4, 5, 16])
@pytest.mark.parametrize("num_tokens", [1, 3, 5, 64])
def test_values_and_gradients_equal_the_reference(num_tokens, num_taps):
    channels = (3, num_tokens, 7)
    gate = randoms(channels, channels, (14, 1, num_taps))
    for every in (0, 3):
        segments = {"segments_BN": segments_of(num_tokens, num_taps - 1, every)}
        for kind in KINDS:
            inputs = gate[0], gate[2][:7]
            _assert_same(canon_compiled, canon_reference, inputs, kind | segments)
        for residual, relu2 in itertools.product((True, False), repeat=2):
            options = {"residual": residual, "relu2": relu2}
            _assert_same(canon_gate_compiled, _gate_reference, gate, options | segments)


def _transposed(x):
    return x.transpose(1, 2).contiguous().transpose(1, 2)


@every_form
@every_kind
def test_inputs_and_gradients_need_not_be_contiguous(kind):
    x, weight, other = (v.requires_grad_() for v in randoms((2, 21, 6), (6, 1, 4), (2, 21, 6)))
    for dy in (torch.ones(()).double().expand(x.shape), _transposed(other.detach())):
        expected = torch.autograd.grad(canon_reference(x, weight, **kind), (x, weight), dy)
        y = canon_compiled(_transposed(x), weight, **kind)
        torch.testing.assert_close(torch.autograd.grad(y, (x, weight), dy), expected)


@every_form
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_errors_equal_the_references(dtype):
    *inputs, dy = randoms((3, 129, 16), (16, 1, 4), (3, 129, 16), dtype=dtype)
    runs = (torch.float64, canon_reference), (dtype, canon_compiled), (dtype, canon_reference)
    for kind in KINDS:
        found = []
        for each, function in runs:
            leaves = [x.to(each).requires_grad_() for x in inputs]
            y = function(*leaves, **kind)
            assert y.dtype == each
            found.append([y, *torch.autograd.grad(y, leaves, dy.to(each))])
        for exact, ours, theirs in zip(*found, strict=True):
            errors = [(one.double() - exact).abs().mean() for one in (ours, theirs)]
            assert errors[0] <= 1.02 * errors[1]


GATE = canon_gate_compiled, _gate_reference
TRACED = [
    (canon_compiled, canon_reference, {"residual": True, "activation": True}, 4),
    (*GATE, {"residual": True, "relu2": False}, 4),
    (*GATE, {"residual": True, "relu2": True}, 5),
]


@pytest.mark.system
@pytest.mark.parametrize(("function", "reference", "options", "taps"), TRACED)
def test_the_traced_gpu_form(function, reference, options, taps, monkeypatch):
    """By dynamo, and inductor's decompositions and partitioner."""
    monkeypatch.setattr(compiled, "is_cuda", lambda _: True)
    torch.compiler.reset()
    count = 2 if "relu2" in options else 1
    inputs = randoms(*[(3, 32, 6)] * count, (6 * count, 1, taps))
    traced = torch.compile(function, backend="aot_eager_decomp_partition", fullgraph=True)
    _assert_same(traced, reference, inputs, options | {"segments_BN": segments_of(32, taps - 1)})
