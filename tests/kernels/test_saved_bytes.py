"""What Canon-ABCD adds to the memory of a block for backward, counted by hooks on what is saved."""

import pytest
import torch

from canon_pretrain.kernels import shifts
from tests.saved_bytes import canon_bytes

# dynamo on itself
pytestmark = [
    pytest.mark.filterwarnings(f"ignore:{warning}")
    for warning in (
        ".*should not be instantiated:DeprecationWarning",
        "The .grad attribute of a Tensor that is not a leaf:UserWarning",
    )
]
LIMITS = {torch.bfloat16: 2, torch.float32: 4}
"""Bytes a token, site and channel."""
slow = pytest.mark.slow


@pytest.mark.parametrize(
    ("dtype", "changes"),
    [
        (torch.bfloat16, {}),
        pytest.param(torch.bfloat16, {"documents": True}, marks=slow),
        pytest.param(torch.bfloat16, {"ffn": "standard"}, marks=slow),
        pytest.param(torch.float32, {}, marks=slow),
    ],
)
@pytest.mark.parametrize("on_gpu", [False, True])
def test_a_compiled_block_keeps_few_bytes_more(dtype, changes, on_gpu, monkeypatch):
    monkeypatch.setattr(shifts, "is_cuda", lambda _: on_gpu)
    assert 0 < canon_bytes(dtype, compiled=True, **changes) <= LIMITS[dtype]


@pytest.mark.parametrize("documents", [False, True])
def test_so_does_an_eager_block(documents):
    assert 0 < canon_bytes(torch.bfloat16, compiled=False, documents=documents) <= 2
