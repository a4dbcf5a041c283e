"""Canon by causal-conv1d and by fla-core: with stand-ins as strict as the packages' own functions,
and (mark gpu) with the packages themselves."""

import importlib.machinery
import itertools
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from canon_pretrain.kernels import packages
from canon_pretrain.kernels.backends import canon_reference
from canon_pretrain.kernels.packages import (
    DTYPES,
    PACKAGES,
    canon_by_package,
    package_forward,
    package_problem,
)
from canon_pretrain.model import canon_check
from canon_pretrain.model.args import ModelArgs
from canon_pretrain.model.cache import NOWHERE, PADDING

calls: list[str] = []
PLAIN = {"residual": True, "activation": False}
KINDS = [
    {"residual": residual, "activation": activation}
    for residual, activation in itertools.product((True, False), repeat=2)
]
every_kind = pytest.mark.parametrize("kind", KINDS, ids=str)
each_package = pytest.mark.parametrize("backend", PACKAGES)


# -- stand-ins, written after the packages' sources (NOTES.md) --------------------------------


def _convolved(x: Tensor, weight: Tensor, seq_idx: Tensor | None, silu: bool) -> Tensor:
    """[B, T, C] in float32; places below 0 are padding (causal_conv1d_fwd.cu of 1.6 and 1.7)."""
    y = torch.zeros_like(x, dtype=torch.float32)
    for lag in range(weight.shape[1]):
        shifted = F.pad(x.float(), (0, 0, lag, 0))[:, : x.shape[1]]
        if seq_idx is not None:
            same = F.pad(seq_idx, (lag, 0), value=-1)[:, : x.shape[1]] == seq_idx
            shifted = shifted * same[..., None]
        y = y + weight.float()[:, -1 - lag] * shifted
    if seq_idx is not None:
        y = y * (seq_idx >= 0)[..., None]
    return F.silu(y) if silu else y


def _differentiated(
    x: Tensor, dy: Tensor, weight: Tensor, seq_idx: Tensor | None, silu: bool
) -> tuple[Tensor, Tensor]:
    """dx and dW in float32, by hand: below autograd there is no autograd."""
    inner, num_tokens = dy.float(), x.shape[1]
    if silu:
        y = _convolved(x, weight, seq_idx, False)
        inner = inner * y.sigmoid() * (1 + y * (1 - y.sigmoid()))
    dx, dweight = torch.zeros_like(x, dtype=torch.float32), torch.zeros_like(weight)
    for t in range(num_tokens):
        for lag in range(min(weight.shape[1], t + 1)):
            reaches = torch.ones(len(x), 1)
            if seq_idx is not None:
                reaches = (seq_idx[:, t] == seq_idx[:, t - lag])[:, None].float()
            dx[:, t - lag] += reaches * weight[:, -1 - lag] * inner[:, t]
            dweight[:, -1 - lag] += (reaches * x[:, t - lag].float() * inner[:, t]).sum(0)
    return dx, dweight


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
    """Both packages, for CPU tensors: the modules by name."""
    contents: dict[str, dict[str, Any]] = {
        "causal_conv1d": {"__version__": "1.7.0", "__path__": []},
        "causal_conv1d.cpp_functions": {
            "causal_conv1d_fwd_function": conv1d_forward,
            "causal_conv1d_bwd_function": conv1d_backward,
        },
        "fla": {"__version__": "0.6.0", "__path__": []},
        "fla.modules.causal_conv1d": {
            "causal_conv1d_fwd": fla_forward,
            "causal_conv1d_bwd": fla_backward,
        },
    }
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
    num_tokens: int = 11,
    channels: int = 16,
    width: int = 4,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> tuple[Tensor, Tensor, Tensor]:
    """x_BTC, weight_C1K and what y is weighed with."""
    generator = torch.Generator().manual_seed(num_tokens)
    shapes = ((2, num_tokens, channels), (channels, 1, width), (2, num_tokens, channels))
    x, weight, dy = (torch.randn(s, generator=generator).to(dtype).to(device) for s in shapes)
    return x.requires_grad_(), weight.requires_grad_(), dy


def _segments(num_tokens: int, reach: int, device: str = "cpu") -> Tensor:
    """Documents in the first row, padding and a document in the second."""
    numbers = torch.arange(num_tokens, dtype=torch.int32) // 3
    padded = torch.full((num_tokens,), PADDING, dtype=torch.int32)
    padded[num_tokens // 2 :] = 0
    return F.pad(torch.stack((numbers, padded)), (reach, 0), value=NOWHERE).to(device)


def _with_gradients(
    function: Any, x: Tensor, weight: Tensor, dy: Tensor, **options: Any
) -> tuple[Tensor, ...]:
    y = function(x, weight, **options)
    return y.detach(), *torch.autograd.grad(y, (x, weight), dy)


def _truth(x: Tensor, weight: Tensor, dy: Tensor, **options: Any) -> tuple[Tensor, ...]:
    """y, dx and dW of the reference in float64."""
    leaves = [part.detach().double().requires_grad_() for part in (x, weight)]
    return _with_gradients(canon_reference, *leaves, dy.double(), **options)


def _found(backend: str, *given: Tensor, **options: Any) -> tuple[Tensor, ...]:
    def run(x: Tensor, weight: Tensor) -> Tensor:
        y = canon_by_package(backend, x, weight, **options)
        assert y.dtype == x.dtype and y.is_contiguous()
        return y

    return _with_gradients(run, *given)


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
@every_kind
@each_package
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_rounded_once(backend, dtype, kind):
    """As near the truth as the reference in that dtype; twice if a residual follows silu."""
    given = _given(64, dtype=dtype)
    truth, reference = _truth(*given, **kind), _with_gradients(canon_reference, *given, **kind)
    allowed = 1.5 if kind["residual"] and kind["activation"] else 1.01
    for found, other, true in zip(_found(backend, *given, **kind), reference, truth, strict=True):
        assert found.dtype == dtype
        error, theirs = (float((part.double() - true).norm()) for part in (found, other))
        assert error <= allowed * theirs + 1e-9


def _tilted(x: Tensor) -> Tensor:
    return x.detach().transpose(0, 2).contiguous().transpose(0, 2).requires_grad_()


def _off_by_one(x: Tensor) -> Tensor:
    """Contiguous, but not at a multiple of 16 bytes."""
    flat = torch.empty(x.numel() + 1)
    flat[1:] = x.detach().flatten()
    return flat[1:].view(x.shape).requires_grad_()


@with_stand_ins
@each_package
@pytest.mark.parametrize("change", [_tilted, _off_by_one])
def test_any_strides_will_do(backend, change):
    x, weight, dy = _given()
    moved = change(x)
    assert not moved.is_contiguous() or moved.data_ptr() % 16
    for upstream in (_tilted(dy).detach(), dy[:1, :1, :1].expand_as(dy)):
        _assert_true(backend, moved, weight, upstream, **PLAIN)
    assert calls == ["forward", "backward"] * 2


@with_stand_ins
@pytest.mark.parametrize(
    ("backend", "changes", "segments"),
    [
        ("causal_conv1d", {"channels": 12}, None),
        ("causal_conv1d", {"width": 1}, None),
        ("causal_conv1d", {"dtype": torch.float64}, None),
        ("fla", {"dtype": torch.float64}, None),
        ("fla", {}, _segments(11, 3)),
    ],
    ids=str,
)
def test_what_the_kernels_do_not_take_goes_to_compiled(backend, changes, segments):
    _assert_true(
        backend, *_given(**changes), residual=True, activation=True, segments_BN=segments
    )  # fmt: skip
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


@pytest.mark.parametrize("flag", [(False, False), (True, True)])
def test_torchs_flag_is_as_it_was(stand_ins, flag):
    torch.use_deterministic_algorithms(flag[0], warn_only=flag[1])
    try:
        _found("causal_conv1d", *_given(), **PLAIN)
        y = canon_by_package("causal_conv1d", *_given()[:2], **PLAIN)
        stand_ins["causal_conv1d.cpp_functions"].causal_conv1d_bwd_function = None
        with pytest.raises(TypeError):
            y.sum().backward()
        assert torch.are_deterministic_algorithms_enabled() is flag[0]
        assert torch.is_deterministic_algorithms_warn_only_enabled() is flag[1]
    finally:
        torch.use_deterministic_algorithms(False)


@with_stand_ins
@pytest.mark.parametrize(("backend", "documents"), [("causal_conv1d", True), ("fla", False)])
def test_the_operator_is_what_torch_expects(backend, documents):
    x, weight, _ = _given()
    taps = weight.detach()[:, 0].clone().requires_grad_()
    segments = _segments(11, 3)[:, 3:] + 1 if documents else None
    torch.library.opcheck(package_forward, (x, taps, segments, backend, True, True))


@each_package
def test_why_it_can_not_be_had(stand_ins, monkeypatch, backend):
    package = PACKAGES[backend]

    def problem() -> str:
        return str(package_problem(backend))

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert package_problem(backend) is None
    if backend == "causal_conv1d":
        with monkeypatch.context() as patch:
            patch.setenv("CAUSAL_CONV1D_DETERMINISTIC", "0")
            assert "unset it" in problem()
    major, minor = package.first_version
    for version, is_old in ((f"{major}.{minor - 1}.3.post1", True), (f"{major}.10.0", False)):
        monkeypatch.setattr(stand_ins[package.module], "__version__", version)
        assert (f"{package.name} {version}" in problem()) == is_old
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "CUDA device" in problem()
    monkeypatch.delattr(stand_ins[package.functions], package.needed[1])
    assert "AttributeError" in problem()
    # built for another torch: the shared library does not load
    monkeypatch.setitem(sys.modules, package.functions, None)
    assert "ModuleNotFoundError" in problem()
    monkeypatch.setattr(packages.importlib.util, "find_spec", lambda name: None)
    assert package.install in problem()


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
    if problem := package_problem(backend):
        pytest.skip(problem)
    given = _given(num_tokens, channels=72, dtype=dtype, device="cuda")
    options = kind | {"segments_BN": _segments(num_tokens, 3, "cuda") if documents else None}
    found = _found(backend, *given, **options)
    # bounds of rounding: of each number for y and dx, of a sum of 2 T of them for dW
    eps = torch.finfo(dtype).eps
    for one, true in zip(found, _truth(*given, **options), strict=True):
        assert (one.double() - true).norm() <= 4 * eps * true.norm()
    again = _found(backend, *given, **options)
    assert all(torch.equal(one, other) for one, other in zip(found, again, strict=True))
