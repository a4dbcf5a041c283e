"""What the chunked recurrences do otherwise on a GPU: bfloat16 operands, longer chunks.

Products of rounded operands are added up in float32. On a CPU, and for inputs of other dtypes,
operands are in the dtype of sums: a CPU gains nothing by rounding. Which values are operands is the
caller's choice (NOTES.md).
"""

from typing import Any

import torch
from torch import Tensor

from canon_pretrain.kernels.compiled import sum_dtype

GPU_CHUNK = 128
"""Tokens of a chunk on a GPU: half the states of 64, which are most of the bytes."""


def is_on_gpu(x: Tensor) -> bool:
    """Return whether the form for a GPU is used; tests replace this to run it on a CPU."""
    return x.is_cuda


def operand_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype of the operands of products, for a recurrence whose values are like `x`."""
    if x.dtype == torch.bfloat16 and is_on_gpu(x):
        return torch.bfloat16
    return sum_dtype(x)


def product(a: Tensor, b: Tensor, dtype: torch.dtype, *, is_operand: bool = False) -> Tensor:
    """Return a @ b in the dtype of sums; `dtype`: of the operands, which are rounded to it.

    `a` and `b` have the same batch dimensions. `is_operand`: so is the result, which is read by
    other products only.
    """
    if dtype != torch.bfloat16:
        return a @ b
    batch = a.shape[:-2]
    a_ZIK = a.to(dtype).reshape(-1, *a.shape[-2:])
    b_ZKJ = b.to(dtype).reshape(-1, *b.shape[-2:])
    if is_operand:
        return torch.bmm(a_ZIK, b_ZKJ).unflatten(0, batch)
    return torch.bmm(a_ZIK, b_ZKJ, out_dtype=torch.float32).unflatten(0, batch)


def sum_of_two_products(
    first: tuple[Tensor, Tensor], second: tuple[Tensor, Tensor], dtype: torch.dtype
) -> Tensor:
    """Return a @ b + c @ d; with rounded operands, one product of [a | c] and [b ; d].

    It writes the sum only, not both products in float32.
    """
    a, b = first
    c, d = second
    if dtype != torch.bfloat16:
        return a @ b + c @ d
    left = torch.cat((a.to(dtype), c.to(dtype)), dim=-1)
    right = torch.cat((b.to(dtype), d.to(dtype)), dim=-2)
    return differentiable_product(left, right, dtype)


def differentiable_product(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """Return `product`, whose gradients are products of rounded operands too."""
    if dtype != torch.bfloat16:
        return a @ b
    result: Tensor = _Product.apply(a.to(dtype), b.to(dtype))
    return result


class _Product(torch.autograd.Function):
    """The product of two matrices of operands; their gradients are rounded as they are."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(a, b)
        return product(a, b, a.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        a, b = ctx.saved_tensors
        da = product(grad, b.mT, a.dtype, is_operand=True)
        db = product(a.mT, grad, a.dtype, is_operand=True)
        return da, db
