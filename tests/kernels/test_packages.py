"""Canon by other packages: strict stand-ins for their functions, and (mark gpu) they themselves."""

import importlib.machinery
import sys
from collections.abc import Iterator
from functools import partial
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from canon_pretrain.kernels import packages
from canon_pretrain.kernels.backends import canon_reference
from canon_pretrain.kernels.packages import DTYPES, PACKAGES, canon_by_package
from canon_pretrain.model import canon_check
from canon_pretrain.model.args import ModelArgs
from canon_pretrain.model.cache import BEFORE_START, PADDING

calls: list[str] = []
PLAIN = {"residual": True, "activation": False}
KINDS = [{"residual": r, "activation": a} for r in (True, False) for a in (True, False)]
every_kind = pytest.mark.parametrize("kind", KINDS, ids=str)
each_package = pytest.mark.parametrize("backend", PACKAGES)


# -- stand-ins, written after the packages' sources (NOTES.md) --------------------------------


def _shifted(x: Tensor, seq_idx: Tensor | None, lag: int) -> Tensor:
    """x_{t - lag} in float32, [B, T, C]; 0 before a row and in another document."""
    shifted = F.pad(x.float(), (0, 0, lag, 0))[:, : x.shape[1]]
    if seq_idx is not None:
        same = F.pad(seq_idx, (lag, 0), value=-1)[:, : x.shape[1]] == seq_idx
        shifted = shifted * same[..., None]
    return shifted


def _convolved(x: Tensor, weight: Tensor, seq_idx: Tensor | None, silu: bool) -> Tensor:
    """[B, T, C] in float32; places below 0 are padding (causal_conv1d_fwd.cu of 1.6 and 1.7)."""
    taps = weight.float().flip(1).unbind(1)
    y = sum(tap * _shifted(x, seq_idx, lag) for lag, tap in enumerate(taps))
    if seq_idx is not None:
        y = y * (seq_idx >= 0)[..., None]
    return F.silu(y) if silu else y


def _differentiated(
    x: Tensor, dy: Tensor, weight: Tensor, seq_idx: Tensor | None, silu: bool
) -> tuple[Tensor, Tensor]:
    """dx and dW in float32, by hand: below autograd there is no autograd."""
    inner = dy.float()
    if silu:
        y = _convolved(x, weight, seq_idx, False)
        inner = inner * y.sigmoid() * (1 + y * (1 - y.sigmoid()))
    back = None if seq_idx is None else seq_idx.flip(1)
    lags = range(weight.shape[1])
    dx = sum(weight[:, -1 - lag] * _shifted(inner.flip(1), back, lag).flip(1) for lag in lags)
    sums = [(_shifted(x, seq_idx, lag) * inner).sum((0, 1)) for lag in reversed(lags)]
    return dx, torch.stack(sums, dim=1)


def _check_conv1d(x: Tensor, weight: Tensor, seq_idx: Tensor | None, *others: Tensor) -> None:
    """The TORCH_CHECKs of causal_conv1d.cpp, on the channel-last path, which seq_idx needs."""
    batch, dim, num_tokens = x.shape
    assert x.dtype in DTYPES and weight.dtype in DTYPES
    assert weight.shape == (dim, weight.shape[1]) and 2 <= weight.shape[1] <= 4
    for tensor in (x, *others):
        assert tensor.shape == x.shape and tensor.dtype == x.dtype
        assert tensor.stride(1) == 1 and tensor.stride(2) > 1
        assert dim % 8 == 0 and tensor.stride(2) % 8 == 0 and tensor.stride(0) % 8 == 0
        assert tensor.data_ptr() % 16 == 0  # vector loads; no check in the package, but a fault
    if seq_idx is not None:
        assert seq_idx.dtype == torch.int32 and seq_idx.is_contiguous()
        assert seq_idx.shape == (batch, num_tokens)


def conv1d_forward(x, weight, bias, seq_idx, initial_states, final_states_out, silu):  # type: ignore
    assert bias is initial_states is final_states_out is None
    _check_conv1d(x, weight, seq_idx)
    calls.append("forward")
    y_BTC = _convolved(x.transpose(1, 2), weight, seq_idx, silu)
    return torch.empty_like(x).copy_(y_BTC.transpose(1, 2))


def conv1d_backward(  # type: ignore
    x, weight, bias, dout, seq_idx, initial_states, dfinal_states, dx, return_dinitial_states, silu
):
    assert bias is initial_states is dfinal_states is None and not return_dinitial_states
    _check_conv1d(x, weight, seq_idx, dout, dx)
    # at::globalContext().deterministicAlgorithms(): else it adds by atomics
    assert torch.are_deterministic_algorithms_enabled()
    calls.append("backward")
    turned = x.transpose(1, 2), dout.transpose(1, 2)
    dx_BTC, dweight = _differentiated(*turned, weight, seq_idx, silu)
    return dx.copy_(dx_BTC.transpose(1, 2)), dweight, None, None


def fla_forward(x, weight, bias, residual, activation=None):  # type: ignore
    """fla/modules/causal_conv1d/ops.py of 0.6, which reads dense [B, T, D] only."""
    assert x.ndim == 3 and weight.shape[0] == x.shape[2] and weight.ndim == 2 and bias is None
    assert weight.is_contiguous() and (residual is None or residual.is_contiguous())
    assert activation in (None, "silu", "swish")
    calls.append("forward")
    y = _convolved(x, weight, None, activation is not None)
    return (y if residual is None else y + residual.float()).to(x.dtype), None


def fla_backward(x, dy, dht, weight, activation=None):  # type: ignore
    """dx without the residual's part."""
    assert dht is None and dy.shape == x.shape
    calls.append("backward")
    dx, dweight = _differentiated(x, dy, weight, None, activation is not None)
    return dx.to(x.dtype), dweight, None, None, None


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, ModuleType]]:
    contents: dict[str, dict[str, Any]] = {}
    functions = {"causal_conv1d": (conv1d_forward, conv1d_backward)}
    functions["fla"] = (fla_forward, fla_backward)
    for name, version in (("causal_conv1d", "1.7.0"), ("fla", "0.6.0")):
        contents[name] = {"__version__": version, "__path__": []}
        needed = zip(PACKAGES[name].needed, functions[name], strict=True)
        contents[PACKAGES[name].functions] = dict(needed)
    modules = {name: ModuleType(name) for name in contents}
    for name, module in modules.items():
        module.__spec__ = importlib.machinery.ModuleSpec(name, None)
        vars(module).update(contents[name])
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(packages, "DEVICE_TYPES", ("cpu", "cuda"))
    monkeypatch.delenv("CAUSAL_CONV1D_DETERMINISTIC", raising=False)
    calls.clear()
    yield modules


with_stand_ins = pytest.mark.usefixtures("stand_ins")


def _given(
    num_tokens: int = 11, channels: int = 16, width: int = 4, dtype: Any = torch.float32
) -> list[Tensor]:
    generator = torch.Generator().manual_seed(num_tokens)
    shapes = ((2, num_tokens, channels), (channels, 1, width), (2, num_tokens, channels))
    x, weight, dy = (torch.randn(s, generator=generator).to(dtype) for s in shapes)
    return [x.requires_grad_(), weight.requires_grad_(), dy]


def _segments(num_tokens: int, reach: int, device: str = "cpu") -> Tensor:
    numbers = torch.arange(num_tokens, dtype=torch.int32) // 3
    padded = torch.full((num_tokens,), PADDING, dtype=torch.int32)
    padded[num_tokens // 2 :] = 0
    return F.pad(torch.stack((numbers, padded)), (reach, 0), value=BEFORE_START).to(device)


def _with_gradients(
    function: Any, x: Tensor, weight: Tensor, dy: Tensor, **options: Any
) -> tuple[Tensor, ...]:
    y = function(x, weight, **options)
    return y.detach(), *torch.autograd.grad(y, (x, weight), dy)


def _truth(*given: Tensor, **options: Any) -> tuple[Tensor, ...]:
    x, weight, dy = (part.detach().double() for part in given)
    leaves = x.requires_grad_(), weight.requires_grad_()
    return _with_gradients(canon_reference, *leaves, dy, **options)


def _found(backend: str, *given: Tensor, **options: Any) -> tuple[Tensor, ...]:
    found = _with_gradients(partial(canon_by_package, backend), *given, **options)
    assert found[0].dtype == given[0].dtype and found[0].is_contiguous()
    return found


def _assert_true(backend: str, *given: Tensor, **options: Any) -> None:
    pairs = zip(_found(backend, *given, **options), _truth(*given, **options), strict=True)
    for found, truth in pairs:
        torch.testing.assert_close(found, truth.to(found.dtype), rtol=1e-5, atol=1e-5)


@with_stand_ins
@every_kind
@each_package
@pytest.mark.parametrize("num_tokens", [1, 2, 11])
def test_outputs_and_gradients_are_the_references(backend, num_tokens, kind):
    for width in (2, 3, 4):
        masks = [None, _segments(num_tokens, width - 1)] if backend == "causal_conv1d" else [None]
        for segments in masks:
            calls.clear()
            _assert_true(backend, *_given(num_tokens, width=width), segments_BN=segments, **kind)
            assert calls == ["forward", "backward"]


@with_stand_ins
@each_package
@pytest.mark.parametrize("moved", ["strides", "by 4 bytes"])
def test_any_strides_will_do(backend, moved):
    x, weight, dy = _given()
    tilted = (dy.transpose(0, 2).contiguous().transpose(0, 2), dy[:1, :1, :1].expand_as(dy))
    if moved == "strides":
        x = x.detach().transpose(0, 2).contiguous().transpose(0, 2)
        assert not x.is_contiguous()
    else:
        flat = torch.empty(x.numel() + 1)
        flat[1:] = x.detach().flatten()
        x = flat[1:].view(x.shape)
        assert x.data_ptr() % 16
    for upstream in tilted:
        _assert_true(backend, x.requires_grad_(), weight, upstream, **PLAIN)
    assert calls == ["forward", "backward"] * 2


@with_stand_ins
def test_what_the_kernels_do_not_take_goes_to_compiled():
    changes = [("causal_conv1d", {"channels": 12}), ("causal_conv1d", {"width": 1})]
    changes += [(backend, {"dtype": torch.float64}) for backend in PACKAGES]
    for backend, change in changes:
        _assert_true(backend, *_given(**change), residual=True, activation=True)
    _assert_true("fla", *_given(), residual=True, activation=True, segments_BN=_segments(11, 3))
    assert not calls


# dynamo on itself
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@with_stand_ins
@each_package
def test_it_is_in_one_graph_with_the_same_numbers(backend):
    segments = _segments(11, 3) if backend == "causal_conv1d" else None

    def block(x: Tensor, weight: Tensor) -> Tensor:
        return F.silu(canon_by_package(backend, x * 2, weight, **PLAIN, segments_BN=segments))

    torch._dynamo.reset()
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    eager, found = (_with_gradients(each, *_given()) for each in (block, compiled))
    torch.testing.assert_close(found, eager, rtol=1e-6, atol=1e-6)
    assert calls == ["forward", "backward"] * 2


@each_package
def test_why_it_can_not_be_had(stand_ins, monkeypatch, backend):
    package = PACKAGES[backend]

    def refused(match: str) -> None:
        assert match in str(packages.package_problem(backend))

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    refused("None")
    if backend == "causal_conv1d":
        with monkeypatch.context() as patch:
            patch.setenv("CAUSAL_CONV1D_DETERMINISTIC", "0")
            refused("unset it")
    major, minor = package.first_version
    for version, match in ((f"{major}.{minor - 1}.3.post1", "too old"), (f"{major}.10.0", "None")):
        monkeypatch.setattr(stand_ins[package.module], "__version__", version)
        refused(match)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    refused("CUDA device")
    # built for another torch: the shared library does not load
    monkeypatch.setitem(sys.modules, package.functions, None)
    refused("ModuleNotFoundError")


def test_it_passes_the_check_and_a_wrong_package_does_not(stand_ins, monkeypatch):
    args = ModelArgs(dim=16, num_heads=2, ffn_dim=24, max_seq_len=40, canon_set="ABCD")
    where = ((2, 40), torch.bfloat16, torch.device("cpu"))
    monkeypatch.setattr(canon_check, "backend_problem", lambda *where: None)  # it is on a CPU
    monkeypatch.setattr(canon_check, "check_canon_backend", lambda *where: None)
    assert canon_check.training_problem(args, "fla", *where) is None
    assert set(calls) == {"forward", "backward"}

    def forgets_the_first(*tensors: Any, **options: Any) -> Any:
        dx, dweight, *rest = fla_backward(*tensors, **options)
        dweight[:, 0] = 0
        return dx, dweight, *rest

    stand_ins["fla.modules.causal_conv1d"].causal_conv1d_bwd = forgets_the_first
    problem = canon_check.training_problem(args, "fla", *where)
    assert (problem or "").startswith("norm + A: gradient of canon.weight is 0.")


@pytest.mark.gpu
@every_kind
@each_package
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_tokens", [1, 130, 1000])
@pytest.mark.parametrize("documents", [False, True])
def test_the_packages_kernels(backend, num_tokens, documents, dtype, kind):
    if problem := packages.package_problem(backend):
        pytest.skip(problem)
    parts = _given(num_tokens, channels=72, dtype=dtype)
    given = [part.detach().cuda().requires_grad_() for part in parts]
    options = kind | {"segments_BN": _segments(num_tokens, 3, "cuda") if documents else None}
    found = _found(backend, *given, **options)
    # bounds of rounding: of each number for y and dx, of a sum of 2 T of them for dW
    eps = torch.finfo(dtype).eps
    for one, true in zip(found, _truth(*given, **options), strict=True):
        assert (one.double() - true).norm() <= 4 * eps * true.norm()
    again = _found(backend, *given, **options)
    assert all(torch.equal(one, other) for one, other in zip(found, again, strict=True))
