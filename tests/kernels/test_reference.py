"""The Canon formula against explicit loops, against nn.Conv1d, and at its borders."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from canon_pretrain.kernels.reference import canon_reference
from tests.reference_model import canon_by_loops

OPTIONS = [(True, False), (False, False), (True, True), (False, True)]


def _inputs(num_tokens: int, num_taps: int, dtype: torch.dtype = torch.float64):
    generator = torch.Generator().manual_seed(num_tokens * 10 + num_taps)
    x = torch.randn(2, num_tokens, 5, generator=generator, dtype=dtype)
    weight = torch.randn(5, 1, num_taps, generator=generator, dtype=dtype)
    return x, weight


@pytest.mark.parametrize("num_taps", [2, 3, 4])
@pytest.mark.parametrize("num_tokens", [1, 2, 3, 4, 9])
@pytest.mark.parametrize(("residual", "activation"), OPTIONS)
def test_equals_explicit_loops(num_tokens, num_taps, residual, activation):
    x, weight = _inputs(num_tokens, num_taps)
    cfg = SimpleNamespace(canon_residual=residual, canon_activation=activation)
    y = canon_reference(x, weight, residual=residual, activation=activation)
    torch.testing.assert_close(y, canon_by_loops(x, weight, cfg), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("num_taps", [2, 3, 4])
@pytest.mark.parametrize(("residual", "activation"), OPTIONS)
def test_equals_depthwise_conv1d_with_its_weight_layout(num_taps, residual, activation):
    x, _ = _inputs(7, num_taps)
    conv = torch.nn.Conv1d(5, 5, num_taps, groups=5, bias=False, dtype=torch.float64)
    expected = conv(F.pad(x.transpose(1, 2), (num_taps - 1, 0))).transpose(1, 2)
    expected = F.silu(expected) if activation else expected
    expected = x + expected if residual else expected
    y = canon_reference(x, conv.weight, residual=residual, activation=activation)
    torch.testing.assert_close(y, expected, rtol=1e-12, atol=1e-12)


def test_gradients_pass_gradcheck():
    x, weight = _inputs(5, 4)
    x.requires_grad_(True)
    weight.requires_grad_(True)
    assert torch.autograd.gradcheck(
        lambda a, b: canon_reference(a, b, residual=True, activation=True), (x, weight)
    )


@pytest.mark.parametrize("weight_dtype", [torch.bfloat16, torch.float32])
def test_bfloat16_in_is_bfloat16_out_summed_in_float32(weight_dtype):
    x, weight = _inputs(9, 4, torch.bfloat16)
    y = canon_reference(x, weight.to(weight_dtype), residual=True, activation=False)
    assert y.dtype == torch.bfloat16
    exact = canon_reference(x.float(), weight.float(), residual=True, activation=False)
    # one rounding at the end: equal to the rounded float32 result, bit for bit
    assert torch.equal(y, exact.to(torch.bfloat16))


@pytest.mark.parametrize(
    ("x_shape", "weight_shape"), [((2, 3, 4), (5, 1, 4)), ((3, 4), (4, 1, 4)), ((2, 3, 4), (4, 4))]
)
def test_wrong_shapes_are_refused_with_both_shapes(x_shape, weight_shape):
    with pytest.raises(ValueError, match="expected") as error:
        canon_reference(
            torch.zeros(x_shape), torch.zeros(weight_shape), residual=True, activation=False
        )
    assert str(x_shape) in str(error.value) and str(weight_shape) in str(error.value)
