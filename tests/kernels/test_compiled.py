"""The compiled backend against the reference: numbers, gradients, dtypes."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from canon_pretrain.kernels import compiled
from canon_pretrain.kernels.backends import canon_reference
from canon_pretrain.kernels.compiled import canon_compiled, canon_gate_compiled
from canon_pretrain.model.cache import BEFORE_START

# dynamo on itself
pytestmark = [
    pytest.mark.filterwarnings(f"ignore:{warning}")
    for warning in (
        ".*should not be instantiated:DeprecationWarning",
        "The .grad attribute of a Tensor that is not a leaf:UserWarning",
    )
]
OPTIONS = [{"residual": r, "activation": a} for r in (True, False) for a in (True, False)]


@pytest.fixture(params=["eager", "compile", "compile for a GPU"])
def form(request, monkeypatch):
    """The forms of kernels/compiled.py; those for torch.compile are run as plain torch here."""
    if request.param != "eager":
        monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    monkeypatch.setattr(compiled, "is_cuda", lambda _: request.param == "compile for a GPU")


every_form = pytest.mark.usefixtures("form")


def _random(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def _segments(num_tokens: int, num_taps: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randint(0, num_tokens // 3 + 2, (2, num_tokens), generator=generator)
    return F.pad(numbers.sort(dim=1).values.int(), (num_taps - 1, 0), value=BEFORE_START)


def _gate_reference(gate, up, weight, *, relu2, **options):
    both = zip((gate, up), weight.split(gate.shape[2]), strict=True)
    gate, up = (canon_reference(x, w, activation=False, **options) for x, w in both)
    return (F.relu(gate).square() if relu2 else F.silu(gate)) * up


def _same(function, reference, inputs, options, **tolerance):
    copies = [[x.detach().requires_grad_() for x in inputs] for _ in range(2)]
    given, expected = function(*copies[0], **options), reference(*copies[1], **options)
    dy = _random(*expected.shape, dtype=expected.dtype, seed=1)
    kept = dy.clone()
    ours = given, *torch.autograd.grad(given, copies[0], dy)
    theirs = expected, *torch.autograd.grad(expected, copies[1], dy)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, **tolerance)  # dtypes too
    assert torch.equal(dy, kept)
    assert all(torch.equal(x, copied) for x, copied in zip(inputs, copies[0], strict=True))


@every_form
@pytest.mark.parametrize("num_taps", [2, 4, 5, 16])
@pytest.mark.parametrize("num_tokens", [1, 3, 5, 64])
def test_equals_the_reference_with_its_gradients(num_tokens, num_taps):
    x, weight = _random(2, num_tokens, 11), _random(11, 1, num_taps)
    gate = x[..., :7], _random(2, num_tokens, 7, seed=1), _random(14, 1, num_taps)
    for segments in (None, _segments(num_tokens, num_taps)):
        for options in OPTIONS:
            _same(canon_compiled, canon_reference, (x, weight), options | {"segments_BN": segments})
        for residual, relu2 in itertools.product((True, False), repeat=2):
            options = {"residual": residual, "relu2": relu2, "segments_BN": segments}
            _same(canon_gate_compiled, _gate_reference, gate, options)


def _transposed(x):
    return x.transpose(1, 2).contiguous().transpose(1, 2)


@every_form
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_inputs_and_gradients_need_not_be_contiguous(options):
    x, weight = _random(2, 21, 6).requires_grad_(), _random(6, 1, 4).requires_grad_()
    for dy in (torch.ones(()).double().expand(x.shape), _transposed(_random(2, 21, 6, seed=2))):
        wanted = torch.autograd.grad(canon_reference(x, weight, **options), (x, weight), dy)
        y = canon_compiled(_transposed(x), weight, **options)
        torch.testing.assert_close(torch.autograd.grad(y, (x, weight), dy), wanted)


@every_form
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_is_as_near_to_the_truth_as_the_reference(dtype):
    inputs = _random(3, 129, 16).to(dtype), 0.5 * _random(16, 1, 4).to(dtype)
    dy = _random(3, 129, 16, seed=5).to(dtype)
    for options in OPTIONS:
        found = []
        ways = (torch.float64, canon_reference), (dtype, canon_compiled), (dtype, canon_reference)
        for each, used in ways:
            leaves = [x.to(each).requires_grad_() for x in inputs]
            y = used(*leaves, **options)
            assert y.dtype == each
            found.append([y, *torch.autograd.grad(y, leaves, dy.to(each))])
        for truth, ours, theirs in zip(*found, strict=True):
            errors = [(one.double() - truth).abs().mean() for one in (ours, theirs)]
            assert errors[0] <= 1.02 * errors[1]


@every_form
def test_the_weights_gradient_repeats_bit_by_bit():
    x, weight = _random(4, 131, 24, dtype=torch.float32), _random(24, 1, 4, dtype=torch.float32)
    weight.requires_grad_()
    grads = []
    for _ in range(5):
        y = canon_compiled(x, weight, residual=True, activation=True)
        grads += torch.autograd.grad(y.square().sum(), weight)
    assert all(torch.equal(grads[0], other) for other in grads)


GATE = canon_gate_compiled, _gate_reference
TRACED = [
    *((canon_compiled, canon_reference, OPTIONS[i], 4) for i in (0, 3)),
    (*GATE, {"residual": True, "relu2": False}, 4),
    (*GATE, {"residual": True, "relu2": True}, 5),
]


@pytest.mark.system
@pytest.mark.parametrize(("function", "reference", "options", "num_taps"), TRACED)
def test_traced_for_a_gpu_the_numbers_are_the_same(
    function, reference, options, num_taps, monkeypatch
):
    """By dynamo, and inductor's decompositions and partitioner."""
    monkeypatch.setattr(compiled, "is_cuda", lambda _: True)
    torch.compiler.reset()
    inputs = [_random(2, 32, 6, seed=i) for i in range(2 if "relu2" in options else 1)]
    inputs.append(_random(6 * len(inputs), 1, num_taps))
    traced = torch.compile(function, backend="aot_eager_decomp_partition", fullgraph=True)
    _same(traced, reference, inputs, options | {"segments_BN": _segments(32, num_taps)})
