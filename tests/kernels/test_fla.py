"""The backend on flash-linear-attention: with a stand-in that takes what fla-core 0.6's does."""

import importlib.machinery
import sys
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from canon_pretrain.kernels import fla
from canon_pretrain.kernels.fla import canon_fla, canon_fla_forward, fla_problem
from canon_pretrain.kernels.reference import canon_reference
from canon_pretrain.model import canon_check, canon_forms
from canon_pretrain.model.args import ModelArgs

KINDS = [(True, False), (False, False), (True, True), (False, True)]
calls: list[str] = []


def _convolved(x: Tensor, weight: Tensor) -> Tensor:
    """fla/modules/causal_conv1d/ops.py of 0.6: float32 sums, zeros before a row."""
    taps = range(weight.shape[1])
    rows = [F.pad(x.float(), (0, 0, i, 0))[:, : x.shape[1]] * weight[:, -1 - i] for i in taps]
    return torch.stack(rows).sum(0)


def causal_conv1d_fwd(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    initial_state: None = None,
    output_final_state: bool = False,
    activation: str | None = None,
) -> tuple[Tensor, None]:
    """Its kernel writes y with the strides of a dense [B, T, D], and reads the residual so."""
    assert x.ndim == 3 and weight.shape[0] == x.shape[2] and weight.ndim == 2 and bias is None
    assert weight.is_contiguous() and (residual is None or residual.is_contiguous())
    assert activation in (None, "silu", "swish")
    calls.append("forward")
    y = _convolved(x, weight)
    y = F.silu(y) if activation else y
    return (y if residual is None else y + residual.float()).to(x.dtype), None


def causal_conv1d_bwd(
    x: Tensor,
    dy: Tensor,
    dht: Tensor | None,
    weight: Tensor,
    bias: None = None,
    residual: Tensor | None = None,
    initial_state: None = None,
    activation: str | None = None,
) -> tuple[Tensor, Tensor, None, Tensor | None, None]:
    """dx without the residual's part, which is dy itself and returned beside it."""
    assert dht is None and dy.shape == x.shape
    calls.append("backward")
    inner, num_tokens = dy.float(), x.shape[1]
    if activation:
        y = _convolved(x, weight)
        inner = inner * y.sigmoid() * (1 + y * (1 - y.sigmoid()))
    dx, dw = torch.zeros_like(x, dtype=torch.float32), torch.zeros_like(weight)
    for i in range(min(weight.shape[1], num_tokens)):
        dx[:, : num_tokens - i] += inner[:, i:] * weight[:, -1 - i]
        dw[:, -1 - i] = (inner[:, i:] * x.float()[:, : num_tokens - i]).sum((0, 1))
    return dx.to(x.dtype), dw, None, dy if residual is not None else None, None


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The stand-in, for CPU tensors."""
    modules = {name: ModuleType(name) for name in ("fla", "fla.modules.causal_conv1d")}
    for name, module in modules.items():
        module.__spec__ = importlib.machinery.ModuleSpec(name, None)
        monkeypatch.setitem(sys.modules, name, module)
    functions = {"causal_conv1d_fwd": causal_conv1d_fwd, "causal_conv1d_bwd": causal_conv1d_bwd}
    vars(modules["fla.modules.causal_conv1d"]).update(functions)
    vars(modules["fla"]).update(__version__="0.6.0", __path__=[])
    monkeypatch.setattr(fla, "DEVICE_TYPES", ("cpu", "cuda"))
    calls.clear()
    return modules["fla"]


def _given(num_tokens: int = 11, width: int = 4) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(num_tokens)
    shapes = (2, num_tokens, 6), (6, 1, width), (2, num_tokens, 6)
    x, weight, dy = (torch.randn(shape, generator=generator) for shape in shapes)
    return x.requires_grad_(), weight.requires_grad_(), dy


@pytest.mark.parametrize(("residual", "activation"), KINDS)
def test_eager_and_in_one_graph_it_is_the_formula(
    package: ModuleType, residual: bool, activation: bool
) -> None:
    kind = {"residual": residual, "activation": activation}

    def block(x: Tensor, weight: Tensor) -> Tensor:
        return F.silu(canon_fla(x * 2, weight, **kind))

    for num_tokens, width in ((1, 4), (11, 4), (11, 2)):
        x, weight, dy = _given(num_tokens, width)
        x64, weight64 = (t.detach().double().requires_grad_() for t in (x, weight))
        truth = F.silu(canon_reference(x64 * 2, weight64, **kind))
        expected = truth, *torch.autograd.grad(truth, (x64, weight64), dy.double())
        functions = [block]
        if num_tokens > 1 and width == 4:
            functions.append(torch.compile(block, fullgraph=True, backend="aot_eager"))
        for function in functions:
            y = function(x, weight)
            found = y, *torch.autograd.grad(y, (x, weight), dy)
            for own, true in zip(found, expected, strict=True):
                torch.testing.assert_close(own, true.float(), rtol=1e-5, atol=1e-5)
    assert calls == ["forward", "backward"] * 4
    torch._dynamo.reset()


def test_the_operator_is_what_torch_expects(package: ModuleType) -> None:
    x, weight, _ = _given()
    taps = weight.detach()[:, 0].clone().requires_grad_()
    for residual in (False, True):
        torch.library.opcheck(canon_fla_forward, (x, taps, residual, True))


def test_what_it_does_not_take_goes_to_compiled(package: ModuleType) -> None:
    x, weight, _ = _given()
    options: dict[str, Any] = {"residual": True, "activation": False}
    segments = torch.arange(14).div(5, rounding_mode="floor").int().expand(2, 14)
    for inputs in ((x, weight, segments), (x.double(), weight.double(), None)):
        options["segments_BN"] = inputs[2]
        expected = canon_reference(*inputs[:2], **options)
        torch.testing.assert_close(canon_fla(*inputs[:2], **options), expected)
    assert calls == []


def test_it_passes_the_check_and_a_wrong_package_does_not(
    package: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = ModelArgs(dim=16, num_heads=2, ffn_dim=24, max_seq_len=40, canon_set="ABCD")
    where = ((2, 40), torch.bfloat16, torch.device("cpu"))
    monkeypatch.setattr(canon_check, "backend_problem", lambda *where: None)  # it is on a CPU
    monkeypatch.setattr(canon_forms, "check_canon_backend", lambda *where: None)
    assert canon_check.training_problem(args, "fla", *where) is None
    assert set(calls) == {"forward", "backward"}

    def forgets_the_first(*tensors: Any, **options: Any) -> Any:
        dx, dw, *rest = causal_conv1d_bwd(*tensors, **options)
        dw[:, 0] = 0
        return dx, dw, *rest

    module = sys.modules["fla.modules.causal_conv1d"]
    monkeypatch.setattr(module, "causal_conv1d_bwd", forgets_the_first)
    problem = canon_check.training_problem(args, "fla", *where)
    assert (problem or "").startswith("norm + A: gradient of canon.weight is 0.")


def test_why_it_can_not_be_had(package: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert fla_problem() is None
    monkeypatch.setattr(package, "__version__", "0.5.1")
    assert "fla-core 0.5.1 is older" in str(fla_problem())
    monkeypatch.setattr(package, "__version__", "0.10.0")
    assert fla_problem() is None
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "needs a CUDA device" in str(fla_problem())
    monkeypatch.delattr(sys.modules["fla.modules.causal_conv1d"], "causal_conv1d_bwd")
    assert "can't be imported: AttributeError" in str(fla_problem())
    monkeypatch.setitem(sys.modules, "fla.modules.causal_conv1d", None)
    assert "can't be imported: ModuleNotFoundError" in str(fla_problem())
    monkeypatch.setattr(fla.importlib.util, "find_spec", lambda name: None)
    assert "fla-core is not installed: pip install" in str(fla_problem())
