"""Stand-ins for the packages of FlashAttention 2, 3 and 4, which need a GPU."""

import importlib.machinery
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from canon_pretrain.model import attend

CPU = torch.device("cpu")


def flash_attn_func(
    q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0,
    alibi_slopes=None, deterministic=False, return_attn_probs=False,
):  # fmt: skip
    """The package's documented contract, query by query: causality at the bottom right corner."""
    assert causal and dropout_p == softcap == 0.0 and window_size == (-1, -1)
    assert alibi_slopes is None or alibi_slopes.dtype == torch.float32
    num_queries, num_heads, num_keys = q.shape[1], q.shape[2], k.shape[1]
    scale = softmax_scale or q.shape[3] ** -0.5
    out = torch.zeros_like(q)
    for head in range(num_heads):
        kv_head = head * k.shape[2] // num_heads
        slope = 0.0 if alibi_slopes is None else alibi_slopes[head]
        for i in range(num_queries):
            place = i + num_keys - num_queries
            j = torch.arange(place + 1)
            scores = (k[:, : place + 1, kv_head] * q[:, i : i + 1, head]).sum(-1) * scale
            scores = scores - slope * (place - j).abs()
            weights = scores.softmax(dim=-1)[..., None]
            out[:, i, head] = (weights * v[:, : place + 1, kv_head]).sum(dim=1)
    return out


@contextmanager
def flash_attn_package(function=flash_attn_func) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        _add(patch, "flash_attn", **({"flash_attn_func": function} if function else {}))
        yield


@contextmanager
def flash_impl(backend: str, capability: tuple[int, int] = (9, 0)) -> Iterator[None]:
    """`fa3` or `fa4` as torch's registry finds it, on what looks like a GPU; then neither again."""
    check = attend.flash_problem
    try:
        with pytest.MonkeyPatch.context() as patch:
            if backend == "fa3":
                library = torch.library.Library("flash_attn_3", "FRAGMENT")
                for name in ("fwd", "bwd"):
                    library.define(f"{name}(Tensor q) -> Tensor")
                _add(patch, "flash_attn_interface")
            else:
                kernels = {"_flash_attn_fwd": flash_attn_func, "_flash_attn_bwd": flash_attn_func}
                for name in ("flash_attn", "flash_attn.cute"):
                    _add(patch, name, __path__=[])
                _add(patch, "flash_attn.cute.interface", **kernels)
            patch.setattr(attend, "flash_problem", lambda args, device: check(args, CPU))
            patch.setattr(torch.cuda, "is_available", lambda: True)
            patch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
            yield
    finally:
        torch.nn.attention.restore_flash_attention_impl(_raise_warn=False)


def _add(patch: pytest.MonkeyPatch, name: str, **contents: object) -> None:
    module = types.ModuleType(name)
    module.__spec__ = importlib.machinery.ModuleSpec(name, loader=None)
    vars(module).update(contents)
    patch.setitem(sys.modules, name, module)
