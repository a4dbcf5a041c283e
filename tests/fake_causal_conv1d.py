"""A stand-in for the kernels of the package causal-conv1d, as strict as its C++ code, on a CPU.

For test_canon_pretrain_kernels_causal_conv1d.py; written after causal_conv1d.cpp and its kernels.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
calls: list[str] = []
"""What was called since a test cleared it."""


def _convolved(x: Tensor, weight: Tensor, seq_idx: Tensor | None, silu: bool) -> Tensor:
    """What the channel-last kernel computes, in float32 (causal_conv1d_fwd.cu of 1.6 and 1.7)."""
    num_tokens, width = x.shape[2], weight.shape[1]
    y = torch.zeros_like(x, dtype=torch.float32)
    for w in range(width):
        lag = width - 1 - w
        shifted = F.pad(x.float(), (lag, 0))[..., :num_tokens]
        if seq_idx is not None:
            same = F.pad(seq_idx, (lag, 0), value=-1)[:, :num_tokens] == seq_idx
            shifted = shifted * same[:, None]
        y = y + weight.float()[:, w, None] * shifted
    if seq_idx is not None:
        y = y * (seq_idx >= 0)[:, None]
    return F.silu(y) if silu else y


def _check(x: Tensor, weight: Tensor, seq_idx: Tensor | None, *same_layout: Tensor) -> None:
    """The TORCH_CHECKs of causal_conv1d.cpp, on the channel-last path, which seq_idx needs."""
    batch, dim, num_tokens = x.shape
    assert x.dtype in FLOATS and weight.dtype in FLOATS
    assert weight.shape == (dim, weight.shape[1]) and 2 <= weight.shape[1] <= 4
    for tensor in (x, *same_layout):
        assert tensor.shape == x.shape and tensor.dtype == x.dtype
        assert tensor.stride(1) == 1 and tensor.stride(2) > 1
        assert dim % 8 == 0 and tensor.stride(2) % 8 == 0 and tensor.stride(0) % 8 == 0
        assert tensor.data_ptr() % 16 == 0  # vector loads; no check in the package, but a fault
    if seq_idx is not None:
        assert seq_idx.dtype == torch.int32 and seq_idx.is_contiguous()
        assert seq_idx.shape == (batch, num_tokens)


def forward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    seq_idx: Tensor | None,
    initial_states: Tensor | None,
    final_states_out: Tensor | None,
    silu_activation: bool,
) -> Tensor:
    assert bias is None and initial_states is None and final_states_out is None
    _check(x, weight, seq_idx)
    calls.append("forward")
    return torch.empty_like(x).copy_(_convolved(x, weight, seq_idx, silu_activation))


def backward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    dout: Tensor,
    seq_idx: Tensor | None,
    initial_states: Tensor | None,
    dfinal_states: Tensor | None,
    dx: Tensor,
    return_dinitial_states: bool,
    silu_activation: bool,
) -> tuple[Tensor, Tensor, None, None]:
    assert bias is None and initial_states is None and dfinal_states is None
    assert not return_dinitial_states
    _check(x, weight, seq_idx, dout, dx)
    # at::globalContext().deterministicAlgorithms(): else it adds by atomics
    assert torch.are_deterministic_algorithms_enabled()
    calls.append("backward")
    # by hand: below autograd there is no autograd
    inner, num_tokens, width = dout.float(), x.shape[2], weight.shape[1]
    if silu_activation:
        y = _convolved(x, weight, seq_idx, False)
        inner = inner * y.sigmoid() * (1 + y * (1 - y.sigmoid()))
    dx32, dweight = torch.zeros_like(x, dtype=torch.float32), torch.zeros_like(weight)
    for t in range(num_tokens):
        for w in range(width):
            source = t - (width - 1 - w)
            if source < 0:
                continue
            reaches = torch.ones(len(x), 1)
            if seq_idx is not None:
                reaches = (seq_idx[:, t] == seq_idx[:, source])[:, None].float()
            dx32[:, :, source] += reaches * weight[:, w] * inner[:, :, t]
            dweight[:, w] += (reaches * x[:, :, source].float() * inner[:, :, t]).sum(0)
    return dx.copy_(dx32), dweight.type_as(weight), None, None
