"""The reference against independent formulas, and the choice of a backend."""

import itertools
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from canon_pretrain.kernels import backends
from canon_pretrain.kernels.backends import canon, canon_gate, canon_reference
from canon_pretrain.model.transformer import Transformer
from tests.canon_inputs import PLAIN, randoms
from tests.reference_model import canon_by_loops
from tests.support import refused
from tests.variants import variant


@pytest.mark.parametrize("num_taps", [2, 3, 4])
@pytest.mark.parametrize("num_tokens", [1, 2, 3, 4, 9])
def test_the_reference_equals_loops_and_conv1d(num_tokens, num_taps):
    x, weight = randoms((2, num_tokens, 5), (5, 1, num_taps))
    convolved = F.conv1d(F.pad(x.transpose(1, 2), (num_taps - 1, 0)), weight, groups=5)
    convolved = convolved.transpose(1, 2)
    for residual, activation in itertools.product((True, False), repeat=2):
        y = canon_reference(x, weight, residual=residual, activation=activation)
        cfg = SimpleNamespace(canon_residual=residual, canon_activation=activation)
        torch.testing.assert_close(y, canon_by_loops(x, weight, cfg), rtol=1e-12, atol=1e-12)
        expected = (F.silu(convolved) if activation else convolved) + residual * x
        torch.testing.assert_close(y, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("weight_dtype", [torch.bfloat16, torch.float32])
def test_bfloat16_is_summed_in_float32(weight_dtype):
    x, weight = randoms((2, 9, 5), (5, 1, 4), dtype=torch.bfloat16)
    y = canon_reference(x, weight.to(weight_dtype), **PLAIN)
    exact = canon_reference(x.float(), weight.float(), **PLAIN)
    # rounded once, at the end
    assert y.dtype == torch.bfloat16 and torch.equal(y, exact.to(torch.bfloat16))


def test_bad_shapes_and_unavailable_backends_are_refused(monkeypatch):
    for x_shape, weight_shape in (((2, 3, 4), (5, 1, 4)), ((3, 4), (4, 1, 4)), ((2, 3, 4), (4, 4))):
        with pytest.raises(ValueError, match="expected"):
            canon_reference(torch.zeros(x_shape), torch.zeros(weight_shape), **PLAIN)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with refused("canon.unavailable", backend="triton"):
        backends.check_canon_backend("triton", "cpu")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for backend in ("triton", "causal_conv1d", "fla"):
        with refused("canon.unavailable", backend=backend):
            Transformer(variant("nope ABCD"), canon_backend=backend)
    with refused("config.unknown_choice", name="canon_backend"):
        Transformer(variant("nope ABCD"), canon_backend="tritan")


def test_why_triton_is_unavailable(monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for device, dtype, interpret, reason in (
        ("cpu", torch.float32, "0", "TRITON_INTERPRET=1"),
        ("cpu", torch.float32, "1", "None"),
        ("cpu", torch.float64, "1", "float64"),
        ("mps", torch.float32, "0", '"mps"'),
        ("cuda", torch.bfloat16, "0", "CUDA"),
    ):
        monkeypatch.setenv("TRITON_INTERPRET", interpret)
        assert reason in str(backends.backend_problem("triton", device, dtype))


@pytest.mark.parametrize("backend", ["compiled", "causal_conv1d", "fla", "triton"])
def test_backends_fall_back_to_compiled(monkeypatch, backend):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    gate, up, weight = randoms((2, 9, 8), (2, 9, 8), (16, 1, 4))
    expected = canon(gate, weight[:8], **PLAIN, backend="reference")
    torch.testing.assert_close(canon(gate, weight[:8], **PLAIN, backend=backend), expected)
    for relu2 in (False, True):
        expected = canon_gate(gate, up, weight, **PLAIN, relu2=relu2, backend="reference")
        given = canon_gate(gate, up, weight, **PLAIN, relu2=relu2, backend=backend)
        torch.testing.assert_close(given, expected)
