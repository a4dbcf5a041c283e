"""The compiled backend against the reference: numbers, gradients, shapes, dtypes, what is kept."""

import itertools

import pytest
import torch
import torch.nn.functional as F

from canon_pretrain.kernels import compiled, shifts
from canon_pretrain.kernels.compiled import canon_compiled, canon_gate_compiled
from canon_pretrain.kernels.reference import canon_reference
from canon_pretrain.model.cache import NOWHERE

OPTIONS = [
    {"residual": residual, "activation": activation}
    for residual, activation in itertools.product((True, False), repeat=2)
]


@pytest.fixture(params=["eager", "compile", "compile for a GPU"], autouse=True)
def form(request, monkeypatch):
    """The forms of kernels/shifts.py; those for torch.compile are run as plain torch here."""
    if request.param != "eager":
        monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    monkeypatch.setattr(shifts, "is_cuda", lambda _: request.param == "compile for a GPU")
    return request.param


def _random(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def _segments(rows: int, num_tokens: int, num_taps: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randint(0, num_tokens // 3 + 2, (rows, num_tokens), generator=generator)
    return F.pad(numbers.sort(dim=1).values.int(), (num_taps - 1, 0), value=NOWHERE)


def _gate_reference(gate, up, weight, *, relu2, **options):
    """The composition that the model's parts would be without a function for both."""
    weights = weight.split(gate.shape[2])
    gate, up = (
        canon_reference(x, w, activation=False, **options)
        for x, w in zip((gate, up), weights, strict=True)
    )
    return (F.relu(gate).square() if relu2 else F.silu(gate)) * up


def _same(function, reference, inputs, options, **tolerance):
    """Equal results, and equal gradients of a random combination of them."""
    copies = [[x.detach().requires_grad_() for x in inputs] for _ in range(2)]
    given, expected = function(*copies[0], **options), reference(*copies[1], **options)
    assert given.dtype == expected.dtype
    torch.testing.assert_close(given, expected, **tolerance)
    dy = _random(*expected.shape, dtype=expected.dtype, seed=1)
    for one, other in zip(
        torch.autograd.grad(given, copies[0], dy),
        torch.autograd.grad(expected, copies[1], dy),
        strict=True,
    ):
        assert one.dtype == other.dtype
        torch.testing.assert_close(one, other, **tolerance)


@pytest.mark.parametrize("num_taps", [2, 3, 4, 5, 16])
@pytest.mark.parametrize("num_tokens", [1, 2, 3, 5, 64])
def test_equals_the_reference_with_its_gradients(num_tokens, num_taps):
    x, weight = _random(2, num_tokens, 11), _random(11, 1, num_taps)
    for options, segments in itertools.product(OPTIONS, (None, _segments(2, num_tokens, num_taps))):
        _same(canon_compiled, canon_reference, (x, weight), options | {"segments_BN": segments})


@pytest.mark.parametrize("num_taps", [2, 4, 5, 16])
@pytest.mark.parametrize("num_tokens", [1, 2, 3, 5, 64])
def test_the_gate_equals_canon_and_the_activation_after_it(num_tokens, num_taps):
    inputs = _random(2, num_tokens, 7), _random(2, num_tokens, 7, seed=1), _random(14, 1, num_taps)
    for residual, relu2 in itertools.product((True, False), repeat=2):
        for segments in (None, _segments(2, num_tokens, num_taps)):
            options = {"residual": residual, "relu2": relu2, "segments_BN": segments}
            _same(canon_gate_compiled, _gate_reference, inputs, options)


def _transposed(x):
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def _strided(x):
    return x.repeat_interleave(2, dim=2)[..., ::2]


@pytest.mark.parametrize("layout", [_transposed, _strided])
def test_inputs_need_not_be_contiguous(layout):
    x, weight = _random(2, 21, 6), _random(6, 1, 4)
    assert not layout(x).is_contiguous() and torch.equal(layout(x), x)
    for options in OPTIONS:
        inputs = [layout(x).detach().requires_grad_(), weight.clone().requires_grad_()]
        expected = [x.clone().requires_grad_(), weight.clone().requires_grad_()]
        y, y_expected = canon_compiled(*inputs, **options), canon_reference(*expected, **options)
        torch.testing.assert_close(y, y_expected)
        for dy in (torch.ones(()).double().expand(y.shape), layout(_random(2, 21, 6, seed=2))):
            given = torch.autograd.grad(y, inputs, dy, retain_graph=True)
            wanted = torch.autograd.grad(y_expected, expected, dy, retain_graph=True)
            torch.testing.assert_close(given, wanted)


@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_each_dtype_is_summed_like_the_reference(dtype, weight_dtype):
    x, weight = _random(2, 37, 5, dtype=dtype), _random(5, 1, 4, dtype=weight_dtype)
    for options in OPTIONS:
        _same(canon_compiled, canon_reference, (x, weight), options, rtol=1.6e-2, atol=1e-2)


def _errors(function, inputs, dtype, options):
    """Mean errors of the result and of the gradients in `dtype`, against float64."""
    found = []
    for each, used in ((torch.float64, canon_reference), (dtype, function)):
        leaves = [x.to(dtype).to(each).requires_grad_() for x in inputs]
        y = used(*leaves, **options)
        dy = _random(*y.shape, dtype=dtype, seed=5).to(each)
        found.append([y, *torch.autograd.grad(y, leaves, dy)])
    return [(one.double() - truth).abs().mean() for truth, one in zip(*found, strict=True)]


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_is_as_near_to_the_truth_as_the_reference(dtype, options):
    inputs = _random(3, 129, 16), 0.5 * _random(16, 1, 4)
    ours = _errors(canon_compiled, inputs, dtype, options)
    theirs = _errors(canon_reference, inputs, dtype, options)
    for mine, other in zip(ours, theirs, strict=True):
        assert mine <= 1.02 * other


def test_the_weights_gradient_repeats_bit_by_bit():
    x, weight = _random(4, 131, 24, dtype=torch.float32), _random(24, 1, 4, dtype=torch.float32)
    weight.requires_grad_()
    first, *others = (
        torch.autograd.grad(
            canon_compiled(x, weight, residual=True, activation=True).square().sum(), weight
        )[0]
        for _ in range(5)
    )
    assert all(torch.equal(first, other) for other in others)


@pytest.mark.parametrize("wanted", [(True, False), (False, True), (False, False)])
def test_only_the_gradients_that_are_asked_for_are_computed(monkeypatch, wanted):
    def refused(*_):
        raise AssertionError("computed for nothing")

    if not wanted[0]:
        monkeypatch.setattr(compiled, "convolve_back", refused)
    if not wanted[1]:
        monkeypatch.setattr(compiled, "weight_sums", refused)
        monkeypatch.setattr(compiled, "token_sums", refused)
    x = _random(2, 20, 3).requires_grad_(wanted[0])
    weight = _random(3, 1, 4).requires_grad_(wanted[1])
    y = canon_compiled(x, weight, residual=True, activation=False)
    assert y.requires_grad == any(wanted)
    if any(wanted):
        y.sum().backward()
    assert [x.grad is not None, weight.grad is not None] == list(wanted)
    if wanted == (True, False):
        pair = [_random(2, 20, 3, seed=i).requires_grad_() for i in range(2)]
        canon_gate_compiled(*pair, _random(6, 1, 4), residual=True, relu2=False).sum().backward()
        assert all(x.grad is not None for x in pair)


def test_the_input_and_the_gradient_that_is_given_stay_as_they_are():
    for options in OPTIONS:
        x, weight = _random(2, 20, 3).requires_grad_(), _random(3, 1, 4).requires_grad_()
        dy, before = _random(2, 20, 3, seed=3), x.detach().clone()
        kept = dy.clone()
        canon_compiled(x, weight, **options).backward(dy)
        assert torch.equal(x, before) and torch.equal(dy, kept)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # dynamo
@pytest.mark.parametrize("layer", [0, 3, "silu 4", "relu2 5"])
def test_traced_for_a_gpu_the_numbers_are_the_same(layer, form, monkeypatch):
    """By dynamo, and inductor's decompositions and partitioner."""
    if form != "compile for a GPU":
        pytest.skip("traced by other tests")
    monkeypatch.undo()
    monkeypatch.setattr(shifts, "is_cuda", lambda _: True)
    torch.compiler.reset()
    if isinstance(layer, int):
        function, reference, options = canon_compiled, canon_reference, OPTIONS[layer]
        num_taps, inputs = 4, [_random(2, 32, 6), _random(6, 1, 4)]
    else:
        function, reference, num_taps = canon_gate_compiled, _gate_reference, int(layer[-1])
        options = {"residual": True, "relu2": layer.startswith("relu2")}
        inputs = [_random(2, 32, 6), _random(2, 32, 6, seed=1), _random(12, 1, num_taps)]
    traced = torch.compile(function, backend="aot_eager_decomp_partition", fullgraph=True)
    _same(traced, reference, inputs, options | {"segments_BN": _segments(2, 32, num_taps)})
