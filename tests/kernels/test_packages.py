"""Canon by other packages: strict fakes of their functions, and (mark gpu) the packages."""

import importlib.machinery
import itertools
import sys
from functools import partial
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F

from canon_pretrain.kernels import packages
from canon_pretrain.kernels.backends import canon_reference
from canon_pretrain.kernels.packages import DTYPES, PACKAGES, canon_by_package
from tests.canon_inputs import PLAIN, every_kind, randoms, segments_of

calls: list[str] = []
each_package = pytest.mark.parametrize("backend", PACKAGES)


# -- fakes, from the packages' sources (NOTES.md)


def _shifted(x, seq_idx, lag):
    """x_{t - lag} in float32, [B, T, C]; 0 before a row and in another document."""
    shifted = F.pad(x.float(), (0, 0, lag, 0))[:, : x.shape[1]]
    if seq_idx is None:
        return shifted
    same = F.pad(seq_idx, (lag, 0), value=-1)[:, : x.shape[1]] == seq_idx
    return shifted * same[..., None]


def _convolved(x, weight, seq_idx, silu):
    """[B, T, C] in float32; seq_idx below 0 is padding (causal_conv1d_fwd.cu of 1.6 and 1.7)."""
    taps = weight.float().flip(1).unbind(1)
    y = sum(tap * _shifted(x, seq_idx, lag) for lag, tap in enumerate(taps))
    if seq_idx is not None:
        y = y * (seq_idx >= 0)[..., None]
    return F.silu(y) if silu else y


def _differentiated(x, dy, weight, seq_idx, silu):
    """dx and dW in float32, without autograd."""
    inner = dy.float()
    if silu:
        y = _convolved(x, weight, seq_idx, False)
        inner = inner * y.sigmoid() * (1 + y * (1 - y.sigmoid()))

    reversed_seq_idx = None if seq_idx is None else seq_idx.flip(1)
    dx = torch.zeros_like(inner)
    dweight = []
    for lag in range(weight.shape[1]):
        shifted_back = _shifted(inner.flip(1), reversed_seq_idx, lag).flip(1)
        dx = dx + weight[:, -1 - lag] * shifted_back
        dweight.insert(0, (_shifted(x, seq_idx, lag) * inner).sum((0, 1)))
    return dx, torch.stack(dweight, dim=1)


def _check_conv1d(x, weight, seq_idx, *others):
    """The TORCH_CHECKs of causal_conv1d.cpp for channel-last tensors."""
    batch, dim, num_tokens = x.shape
    assert x.dtype in DTYPES
    assert weight.dtype in DTYPES
    assert weight.shape == (dim, weight.shape[1])
    assert 2 <= weight.shape[1] <= 4

    for tensor in (x, *others):
        assert tensor.shape == x.shape
        assert tensor.dtype == x.dtype
        assert tensor.stride(1) == 1
        assert tensor.stride(2) > 1
        assert not any(n % 8 for n in (dim, tensor.stride(2), tensor.stride(0)))
        assert tensor.data_ptr() % 16 == 0  # vector loads, unchecked in the package

    if seq_idx is not None:
        assert seq_idx.dtype == torch.int32
        assert seq_idx.is_contiguous()
        assert seq_idx.shape == (batch, num_tokens)


def conv1d_forward(x, weight, bias, seq_idx, states, final_states, silu):
    assert bias is states is final_states is None
    _check_conv1d(x, weight, seq_idx)
    calls.append("forward")
    y_BTC = _convolved(x.transpose(1, 2), weight, seq_idx, silu)
    return torch.empty_like(x).copy_(y_BTC.transpose(1, 2))


def conv1d_backward(x, weight, bias, dout, seq_idx, states, final_states, dx, want_states, silu):
    assert bias is states is final_states is None
    assert not want_states
    _check_conv1d(x, weight, seq_idx, dout, dx)
    # at::globalContext().deterministicAlgorithms(); otherwise it uses atomics
    assert torch.are_deterministic_algorithms_enabled()
    calls.append("backward")
    x_BTC = x.transpose(1, 2)
    dy_BTC = dout.transpose(1, 2)
    dx_BTC, dweight = _differentiated(x_BTC, dy_BTC, weight, seq_idx, silu)
    return dx.copy_(dx_BTC.transpose(1, 2)), dweight, None, None


def fla_forward(x, weight, bias, residual, activation=None):
    """fla/modules/causal_conv1d/ops.py of 0.6, which takes contiguous [B, T, D] only."""
    assert weight.shape == (x.shape[2], weight.shape[1])
    assert bias is None
    assert weight.is_contiguous()
    assert residual is None or residual.is_contiguous()
    calls.append("forward")
    y = _convolved(x, weight, None, activation == "silu")
    return (y if residual is None else y + residual.float()).to(x.dtype), None


def fla_backward(x, dy, dht, weight, activation=None):
    assert dht is None
    assert dy.shape == x.shape
    calls.append("backward")
    dx, dweight = _differentiated(x, dy, weight, None, activation == "silu")
    return dx.to(x.dtype), dweight, None, None, None


# version, forward and backward
FAKES = {
    "causal_conv1d": ("1.7.0", conv1d_forward, conv1d_backward),
    "fla": ("0.6.0", fla_forward, fla_backward),
}


@pytest.fixture
def fakes(monkeypatch):
    """Install the fakes as modules; return them by name."""
    modules = {}

    def install(path, **contents):
        module = ModuleType(path)
        module.__spec__ = importlib.machinery.ModuleSpec(path, None)
        vars(module).update(contents)
        monkeypatch.setitem(sys.modules, path, module)
        modules[path] = module

    for name, (version, *functions) in FAKES.items():
        package = PACKAGES[name]
        install(name, __version__=version, __path__=[])
        install(package.functions, **dict(zip(package.needed, functions, strict=True)))
    monkeypatch.setattr(packages, "DEVICE_TYPES", ("cpu", "cuda"))
    monkeypatch.delenv("CAUSAL_CONV1D_DETERMINISTIC", raising=False)
    calls.clear()
    return modules


with_fakes = pytest.mark.usefixtures("fakes")


def _inputs(num_tokens=11, channels=16, width=4, dtype=torch.float32):
    """Return x, the weight of `width` taps, and a gradient of the output."""
    x_shape = (3, num_tokens, channels)
    x, weight, dy = randoms(x_shape, (channels, 1, width), x_shape, dtype=dtype)
    return [x.requires_grad_(), weight.requires_grad_(), dy]


def _with_gradients(function, x, weight, dy, **options):
    """Return the output and the gradients of x and the weight."""
    y = function(x, weight, **options)
    return y.detach(), *torch.autograd.grad(y, (x, weight), dy)


def _exact(x, weight, dy, **options):
    """Return what the reference computes in float64."""
    x = x.detach().double().requires_grad_()
    weight = weight.detach().double().requires_grad_()
    return _with_gradients(canon_reference, x, weight, dy.double(), **options)


def _by_package(backend, x, weight, dy, **options):
    y, *grads = _with_gradients(partial(canon_by_package, backend), x, weight, dy, **options)
    assert y.dtype == x.dtype
    assert y.is_contiguous()
    return [y, *grads]


def _assert_exact(backend, *inputs, **options):
    computed = _by_package(backend, *inputs, **options)
    exact = _exact(*inputs, **options)
    for ours, true in zip(computed, exact, strict=True):
        torch.testing.assert_close(ours, true.to(ours.dtype), rtol=1e-5, atol=1e-5)


@with_fakes
@every_kind
@each_package
@pytest.mark.parametrize("num_tokens", [1, 2, 11])
def test_outputs_and_gradients_equal_the_reference(backend, num_tokens, kind):
    for width in (2, 3, 4):
        masks = [None]
        if backend == "causal_conv1d":
            masks.append(segments_of(num_tokens, width - 1))
        for segments in masks:
            calls.clear()
            _assert_exact(backend, *_inputs(num_tokens, width=width), segments_BN=segments, **kind)
            assert calls == ["forward", "backward"]


@with_fakes
@each_package
def test_any_strides_and_alignment(backend):
    x, weight, dy = _inputs()
    strided = x.detach().transpose(0, 2).contiguous().transpose(0, 2)
    unaligned = torch.empty(x.numel() + 1)[1:].view(x.shape).copy_(x.detach())
    strided_dy = dy.transpose(0, 2).contiguous().transpose(0, 2)
    expanded_dy = dy[:1, :1, :1].expand_as(dy)
    assert not strided.is_contiguous()
    assert unaligned.data_ptr() % 16

    for values, upstream in itertools.product((strided, unaligned), (strided_dy, expanded_dy)):
        _assert_exact(backend, values.requires_grad_(), weight, upstream, **PLAIN)
    assert calls == ["forward", "backward"] * 4


@with_fakes
def test_unsupported_inputs_fall_back_to_compiled():
    unsupported = [
        ("causal_conv1d", {"channels": 12}),
        ("causal_conv1d", {"width": 1}),
        *((backend, {"dtype": torch.float64}) for backend in PACKAGES),
    ]
    for backend, change in unsupported:
        _assert_exact(backend, *_inputs(**change), residual=True, activation=True)
    _assert_exact("fla", *_inputs(), residual=True, activation=True, segments_BN=segments_of(11, 3))
    assert not calls


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@with_fakes
@each_package
@pytest.mark.system
def test_it_compiles_to_one_graph(backend):
    segments = segments_of(11, 3) if backend == "causal_conv1d" else None

    def block(x, weight):
        return F.silu(canon_by_package(backend, x * 2, weight, **PLAIN, segments_BN=segments))

    torch._dynamo.reset()
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")

    eager_results = _with_gradients(block, *_inputs())
    compiled_results = _with_gradients(compiled, *_inputs())

    torch.testing.assert_close(compiled_results, eager_results, rtol=1e-6, atol=1e-6)
    assert calls == ["forward", "backward"] * 2


@each_package
def test_why_a_package_is_unavailable(fakes, monkeypatch, backend):
    package = PACKAGES[backend]

    def problem():
        return str(packages.package_problem(backend))

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert problem() == "None"

    with monkeypatch.context() as patch:
        patch.setenv("CAUSAL_CONV1D_DETERMINISTIC", "0")
        assert (problem() == "None") == (backend == "fla")

    major, minor = package.first_version
    for version, is_old in ((f"{major}.{minor - 1}.3.post1", True), (f"{major}.10.0", False)):
        monkeypatch.setattr(fakes[package.module], "__version__", version)
        assert (version in problem()) == is_old

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "CUDA device" in problem()

    # built for another torch: the shared library does not load
    monkeypatch.setitem(sys.modules, package.functions, None)
    assert "ModuleNotFoundError" in problem()


@pytest.mark.gpu
@every_kind
@each_package
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_tokens", [1, 130, 1000])
@pytest.mark.parametrize("documents", [False, True])
def test_the_real_kernels(backend, num_tokens, documents, dtype, kind):
    if problem := packages.package_problem(backend):
        pytest.skip(problem)
    inputs = [
        part.detach().cuda().requires_grad_()
        for part in _inputs(num_tokens, channels=72, dtype=dtype)
    ]
    segments = segments_of(num_tokens, 3).cuda() if documents else None
    exact = _exact(*inputs, segments_BN=segments, **kind)

    computed = _by_package(backend, *inputs, segments_BN=segments, **kind)
    repeated = _by_package(backend, *inputs, segments_BN=segments, **kind)

    for ours, again, true in zip(computed, repeated, exact, strict=True):
        assert (ours.double() - true).norm() <= 4 * torch.finfo(dtype).eps * true.norm()
        assert torch.equal(ours, again)
