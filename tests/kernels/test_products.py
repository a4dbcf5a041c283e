"""Products of rounded operands against float64, and that a CPU rounds nothing."""

import pytest
import torch

from canon_pretrain.kernels import products
from canon_pretrain.kernels.products import differentiable_product, operand_dtype, product
from canon_pretrain.kernels.recurrences import CHUNKED
from tests.gpu_form import on_gpu


def test_operands_are_rounded_on_a_gpu_in_bfloat16_only():
    dtypes = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
    wide = [operand_dtype(torch.zeros(1, dtype=dtype)) for dtype in dtypes]
    with on_gpu():
        on_a_gpu = [operand_dtype(torch.zeros(1, dtype=dtype)) for dtype in dtypes]

    assert wide == [torch.float32, torch.float32, torch.float32, torch.float64]
    assert on_a_gpu == [torch.bfloat16, *wide[1:]]


def matrices():
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(2, 3, 5, 512, generator=generator)
    b = torch.randn(2, 3, 512, 4, generator=generator)
    return a.requires_grad_(), b.requires_grad_()


def test_sums_of_rounded_operands_are_float32():
    a, b = matrices()
    exact_a, exact_b = (x.detach().bfloat16().double().requires_grad_() for x in (a, b))
    dy = torch.randn(2, 3, 5, 4, generator=torch.Generator().manual_seed(1)).bfloat16().float()

    with on_gpu():
        y = differentiable_product(a, b, torch.bfloat16)
        da, db = torch.autograd.grad(y, (a, b), dy)

    exact = exact_a @ exact_b
    exact_grads = torch.autograd.grad(exact, (exact_a, exact_b), dy.double())
    assert y.dtype == torch.float32
    torch.testing.assert_close(y, exact.float(), rtol=1e-5, atol=1e-5)
    for grad, exact_grad in zip((da, db), exact_grads, strict=True):
        torch.testing.assert_close(grad, exact_grad.float(), rtol=2**-8, atol=1e-5)


def test_two_products_are_one_of_joined_operands():
    a, b = matrices()
    with on_gpu():
        joined = products.sum_of_two_products((a, b), (2 * a, b), torch.bfloat16)
        expected = 3 * product(a, b, torch.bfloat16)
    torch.testing.assert_close(joined, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("mixer", CHUNKED)
def test_a_cpu_rounds_outputs_only(mixer):
    """bfloat16 inputs give what their float32 values give, rounded once."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 90, 2, 8, generator=generator).bfloat16() for _ in range(3))
    gate = torch.rand(1, 90, 2, 8, generator=generator)
    decay = gate[..., 0]
    inputs = {
        "gla": (q, k, v, -gate, 0.3),
        "mamba2": (v, decay, -gate[0, 0, :, 0], k[:, :, 0], q[:, :, 0], gate[0, 0, :, 1]),
        "gated_deltanet": (q, k, v, -decay, decay),
    }[mixer]
    wide = [x.float() if isinstance(x, torch.Tensor) else x for x in inputs]

    y, state = CHUNKED[mixer](*inputs)

    wide_y, wide_state = CHUNKED[mixer](*wide)
    assert torch.equal(y, wide_y.bfloat16())
    assert torch.equal(state, wide_state)


@pytest.mark.system
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("mixer", CHUNKED)
def test_the_form_for_a_gpu_is_one_graph(mixer):
    torch._dynamo.reset()
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 300, 2, 8, generator=generator).bfloat16() for _ in range(3))
    gate = torch.rand(1, 300, 2, 8, generator=generator)
    decay = gate[..., 0]
    inputs = {
        "gla": (q, k, v, -gate),
        "mamba2": (v, decay, -gate[0, 0, :, 0], k[:, :, 0], q[:, :, 0], gate[0, 0, :, 1]),
        "gated_deltanet": (q, k / 8, v, -decay, decay),
    }[mixer]
    options = {"scale": 0.3} if mixer == "gla" else {}
    leaves = [x.requires_grad_() for x in inputs]

    def run(form):
        y, _ = form(*leaves, **options)
        return [y, *torch.autograd.grad(y.float().square().sum(), leaves)]

    with on_gpu():
        expected = run(CHUNKED[mixer])
        compiled = run(torch.compile(CHUNKED[mixer], backend="aot_eager", fullgraph=True))

    for value, expected_value in zip(compiled, expected, strict=True):
        torch.testing.assert_close(value, expected_value, rtol=2e-2, atol=2e-2)
