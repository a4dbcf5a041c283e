"""The GPU's form of the chunked recurrences on a CPU: rounded operands, states in groups."""

import contextlib
from collections.abc import Iterator, Sequence
from unittest import mock

import torch
from torch import Tensor

from canon_pretrain.kernels import delta, gla, products, ssd


def wide_bmm(a: Tensor, b: Tensor, out_dtype: torch.dtype) -> Tensor:
    """Compute aten::bmm.dtype, which a CPU lacks: bfloat16 products are exact in float32."""
    return torch.bmm(a.to(out_dtype), b.to(out_dtype))


@contextlib.contextmanager
def on_gpu() -> Iterator[None]:
    """Let the recurrences take the form for a GPU."""
    library = torch.library.Library("aten", "IMPL")
    library.impl("bmm.dtype", wide_bmm, "CPU")
    is_on_gpu = lambda x: True  # noqa: E731
    try:
        with contextlib.ExitStack() as patches:
            for module in (products, gla, ssd, delta):
                patches.enter_context(mock.patch.object(module, "is_on_gpu", is_on_gpu))
            yield
    finally:
        library._destroy()


def relative_errors(computed: Sequence[Tensor], expected: Sequence[Tensor]) -> list[float]:
    """Return the norm of each error over that of the expected value, or over 1 if it is larger."""
    errors = []
    for value, exact in zip(computed, expected, strict=True):
        error = (value.double() - exact.double()).norm()
        errors.append((error / exact.double().norm().clamp(min=1)).item())
    return errors
