"""The backend on the package causal-conv1d: with a stand-in that is as strict as its C++ code, and
(mark gpu) with the package itself."""

import importlib.machinery
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from canon_pretrain.kernels import causal_conv1d
from canon_pretrain.kernels.causal_conv1d import (
    canon_causal_conv1d,
    canon_causal_conv1d_forward,
    causal_conv1d_problem,
)
from canon_pretrain.kernels.reference import canon_reference
from canon_pretrain.model.documents import NOWHERE, PADDING
from tests.fake_causal_conv1d import FLOATS, backward, calls, forward

KINDS = [(True, False), (False, False), (True, True), (False, True)]
every_kind = pytest.mark.parametrize(("residual", "activation"), KINDS)


def _module(name: str, **contents: Any) -> ModuleType:
    module = ModuleType(name)
    module.__spec__ = importlib.machinery.ModuleSpec(name, None)
    vars(module).update(contents)
    return module


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The stand-in, for CPU tensors."""
    top = _module("causal_conv1d", __version__="1.7.0", __path__=[])
    functions = _module(
        "causal_conv1d.cpp_functions",
        causal_conv1d_fwd_function=forward,
        causal_conv1d_bwd_function=backward,
    )
    monkeypatch.setitem(sys.modules, "causal_conv1d", top)
    monkeypatch.setitem(sys.modules, "causal_conv1d.cpp_functions", functions)
    monkeypatch.setattr(causal_conv1d, "DEVICE_TYPES", ("cpu", "cuda"))
    monkeypatch.delenv("CAUSAL_CONV1D_DETERMINISTIC", raising=False)
    calls.clear()
    yield top


def _given(
    num_tokens: int = 11,
    channels: int = 16,
    width: int = 4,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> tuple[Tensor, Tensor, Tensor]:
    """x_BTC, weight_C1K and what y is weighed with; leaves where they can be."""
    generator = torch.Generator().manual_seed(num_tokens)
    shapes = ((2, num_tokens, channels), (channels, 1, width), (2, num_tokens, channels))
    x, weight, dy = (torch.randn(s, generator=generator).to(dtype).to(device) for s in shapes)
    return x.requires_grad_(), weight.requires_grad_(), dy


def _segments(num_tokens: int, reach: int, device: str = "cpu") -> Tensor:
    """Documents in the first row, padding and a document in the second."""
    numbers = torch.arange(num_tokens, dtype=torch.int32).div(3, rounding_mode="floor").int()
    padded = torch.full((num_tokens,), PADDING, dtype=torch.int32)
    padded[num_tokens // 2 :] = 0
    segments = F.pad(torch.stack((numbers, padded)), (reach, 0), value=NOWHERE)
    return segments.to(device)


def _truth(
    x: Tensor, weight: Tensor, dy: Tensor, segments: Tensor | None, **kind: bool
) -> tuple[Tensor, ...]:
    """y, dx and dW of the reference in float64."""
    x64, w64 = x.detach().double().requires_grad_(), weight.detach().double().requires_grad_()
    y = canon_reference(x64, w64, **kind, segments_BN=segments)
    return y.detach(), *torch.autograd.grad(y, (x64, w64), dy.double())


def _found(
    x: Tensor, weight: Tensor, dy: Tensor, segments: Tensor | None, **kind: bool
) -> tuple[Tensor, ...]:
    y = canon_causal_conv1d(x, weight, **kind, segments_BN=segments)
    assert y.dtype == x.dtype and y.is_contiguous()
    return y.detach(), *torch.autograd.grad(y, (x, weight), dy)


@every_kind
@pytest.mark.parametrize("width", [2, 3, 4])
@pytest.mark.parametrize("num_tokens", [1, 2, 3, 11])
@pytest.mark.parametrize("documents", [False, True])
def test_outputs_and_gradients_are_the_references(
    package: ModuleType,
    num_tokens: int,
    width: int,
    documents: bool,
    residual: bool,
    activation: bool,
) -> None:
    given = _given(num_tokens, width=width)
    segments = _segments(num_tokens, width - 1) if documents else None
    kind = {"residual": residual, "activation": activation}
    expected = _truth(*given, segments, **kind)
    for found, truth in zip(_found(*given, segments, **kind), expected, strict=True):
        torch.testing.assert_close(found, truth.float(), rtol=1e-5, atol=1e-5)
    assert calls == ["forward", "backward"]


@every_kind
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_rounded_once(
    package: ModuleType, dtype: torch.dtype, residual: bool, activation: bool
) -> None:
    """As near the truth as the reference in that dtype; twice where a residual follows silu."""
    x, weight, dy = given = _given(64, dtype=dtype)
    kind = {"residual": residual, "activation": activation}
    truth = _truth(*given, None, **kind)
    y = canon_reference(x, weight, **kind)
    reference = y.detach(), *torch.autograd.grad(y, (x, weight), dy)
    allowed = 1.5 if residual and activation else 1.01
    for found, other, true in zip(_found(*given, None, **kind), reference, truth, strict=True):
        assert found.dtype == dtype
        error, theirs = (float((part.double() - true).norm()) for part in (found, other))
        assert error <= allowed * theirs + 1e-9


def _tilted(x: Tensor) -> Tensor:
    return x.detach().transpose(0, 2).contiguous().transpose(0, 2).requires_grad_()


def _sliced(x: Tensor) -> Tensor:
    wider = F.pad(x.detach(), (3, 5))
    return wider[..., 3 : 3 + x.shape[2]].requires_grad_()


def _off_by_one(x: Tensor) -> Tensor:
    """Contiguous, but not at a multiple of 16 bytes."""
    flat = torch.empty(x.numel() + 1)
    flat[1:] = x.detach().flatten()
    return flat[1:].view(x.shape).requires_grad_()


@pytest.mark.parametrize("change", [_tilted, _sliced, _off_by_one])
def test_any_strides_will_do(package: ModuleType, change: Any) -> None:
    x, weight, dy = _given()
    kind = {"residual": True, "activation": False}
    moved = change(x)
    assert not moved.is_contiguous() or moved.data_ptr() % 16
    for upstream in (dy, _tilted(dy).detach(), dy[:1, :1, :1].expand_as(dy)):
        expected = _truth(x, weight, upstream, None, **kind)
        for found, truth in zip(
            _found(moved, weight, upstream, None, **kind), expected, strict=True
        ):
            torch.testing.assert_close(found, truth.float(), rtol=1e-5, atol=1e-5)
    assert calls == ["forward", "backward"] * 3


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (_given(channels=12), "channels"),
        (_given(dtype=torch.float64), "dtype"),
        (_given(width=1), "width"),
    ],
    ids=["channels", "dtype", "width"],
)
def test_what_the_kernels_do_not_take_is_computed_all_the_same(
    package: ModuleType, given: tuple[Tensor, Tensor, Tensor], why: str
) -> None:
    kind = {"residual": True, "activation": True}
    expected = _truth(*given, None, **kind)
    for found, truth in zip(_found(*given, None, **kind), expected, strict=True):
        torch.testing.assert_close(found, truth.to(found.dtype), rtol=1e-5, atol=1e-5)
    assert not calls


def test_a_cpu_needs_no_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "causal_conv1d", None)
    given = _given()
    kind = {"residual": True, "activation": False}
    for found, truth in zip(
        _found(*given, None, **kind), _truth(*given, None, **kind), strict=True
    ):
        torch.testing.assert_close(found, truth.float(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("frozen", ["x", "weight"])
def test_no_gradient_where_none_is_asked(package: ModuleType, frozen: str) -> None:
    x, weight, dy = _given()
    (x if frozen == "x" else weight).requires_grad_(False)
    expected = _truth(x, weight, dy, None, residual=True, activation=False)
    (canon_causal_conv1d(x, weight, residual=True, activation=False) * dy).sum().backward()
    found = weight.grad if frozen == "x" else x.grad
    assert (x.grad is None) is (frozen == "x") and (weight.grad is None) is (frozen == "weight")
    assert found is not None
    truth = expected[2 if frozen == "x" else 1].float()
    torch.testing.assert_close(found, truth, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("flag", [(False, False), (True, False), (True, True)])
def test_torchs_flag_is_as_it_was(package: ModuleType, flag: tuple[bool, bool]) -> None:
    given = _given()
    torch.use_deterministic_algorithms(flag[0], warn_only=flag[1])
    try:
        _found(*given, None, residual=True, activation=False)
        assert torch.are_deterministic_algorithms_enabled() is flag[0]
        assert torch.is_deterministic_algorithms_warn_only_enabled() is flag[1]
        wrong = _module("causal_conv1d.cpp_functions", causal_conv1d_fwd_function=forward)
        y = canon_causal_conv1d(*given[:2], residual=True, activation=False)
        sys.modules["causal_conv1d.cpp_functions"] = wrong  # its backward is missing
        with pytest.raises(AttributeError, match="causal_conv1d_bwd_function"):
            y.sum().backward()
        assert torch.are_deterministic_algorithms_enabled() is flag[0]
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("activation", [False, True])
def test_the_operator_is_what_torch_expects(
    package: ModuleType, documents: bool, activation: bool
) -> None:
    x, weight, _ = _given()
    taps = weight.detach()[:, 0].clone().requires_grad_()
    segments = _segments(11, 3)[:, 3:] + 1 if documents else None
    torch.library.opcheck(canon_causal_conv1d_forward, (x, taps, segments, activation))


@every_kind
def test_one_graph_with_the_same_numbers(
    package: ModuleType, residual: bool, activation: bool
) -> None:
    kind = {"residual": residual, "activation": activation}

    def block(x: Tensor, weight: Tensor, segments: Tensor) -> Tensor:
        return F.silu(canon_causal_conv1d(x * 2, weight, **kind, segments_BN=segments))

    x, weight, dy = _given()
    results = []
    for function in (block, torch.compile(block, fullgraph=True, backend="aot_eager")):
        y = function(x, weight, _segments(11, 3))
        results.append((y.detach(), *torch.autograd.grad(y, (x, weight), dy)))
    for eager, compiled in zip(*results, strict=True):
        torch.testing.assert_close(compiled, eager, rtol=1e-6, atol=1e-6)
    assert calls == ["forward", "backward"] * 2
    torch._dynamo.reset()


def test_why_it_can_not_be_had(package: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert causal_conv1d_problem() is None
    monkeypatch.setenv("CAUSAL_CONV1D_DETERMINISTIC", "0")
    assert "unset it" in str(causal_conv1d_problem())
    monkeypatch.setenv("CAUSAL_CONV1D_DETERMINISTIC", "1")
    assert causal_conv1d_problem() is None
    monkeypatch.setattr(package, "__version__", "1.5.3.post1")
    assert "causal-conv1d 1.5.3.post1 adds up" in str(causal_conv1d_problem())
    monkeypatch.setattr(package, "__version__", "1.10.0")
    assert causal_conv1d_problem() is None
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "needs a CUDA device" in str(causal_conv1d_problem())
    # built for another torch: the shared library does not load
    monkeypatch.setitem(sys.modules, "causal_conv1d.cpp_functions", None)
    assert "can't be imported: ModuleNotFoundError" in str(causal_conv1d_problem())
    monkeypatch.delitem(sys.modules, "causal_conv1d")
    monkeypatch.setattr(causal_conv1d.importlib.util, "find_spec", lambda name: None)
    assert "is not installed" in str(causal_conv1d_problem())


@pytest.mark.gpu
@every_kind
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("num_tokens", [1, 3, 130, 1000])
@pytest.mark.parametrize("documents", [False, True])
def test_the_packages_kernels(
    num_tokens: int, documents: bool, dtype: torch.dtype, residual: bool, activation: bool
) -> None:
    if problem := causal_conv1d_problem():
        pytest.skip(problem)
    given = _given(num_tokens, channels=72, dtype=dtype, device="cuda")
    segments = _segments(num_tokens, 3, "cuda") if documents else None
    kind = {"residual": residual, "activation": activation}
    found, truth = _found(*given, segments, **kind), _truth(*given, segments, **kind)
    # bounds of rounding: of each number for y and dx, of a sum of 2 T of them for dW
    eps = torch.finfo(dtype).eps
    for one, true in zip(found, truth, strict=True):
        assert (one.double() - true).norm() <= 4 * eps * true.norm()
    again = _found(*given, segments, **kind)
    assert all(torch.equal(one, other) for one, other in zip(found, again, strict=True))
