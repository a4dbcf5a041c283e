"""Fakes of the packages of FlashAttention 2, 3 and 4, which need a GPU."""

import importlib.machinery
import sys
import types
from contextlib import contextmanager

import pytest
import torch

from canon_pretrain.model import attend

CPU = torch.device("cpu")


def flash_attn_func(q, k, v, *, causal=False, alibi_slopes=None):
    """The package's documented contract: causal, aligned at the bottom right corner."""
    assert causal and (alibi_slopes is None or alibi_slopes.dtype == torch.float32)
    num_queries, num_heads, num_keys = q.shape[1], q.shape[2], k.shape[1]
    k, v = (part.repeat_interleave(num_heads // k.shape[2], dim=2) for part in (k, v))
    scores = torch.einsum("bthk,bshk->bhts", q, k) * q.shape[3] ** -0.5
    distance = torch.arange(num_keys)[-num_queries:, None] - torch.arange(num_keys)
    if alibi_slopes is not None:
        scores = scores - alibi_slopes[:, None, None] * distance
    weights = scores.masked_fill(distance < 0, -torch.inf).softmax(dim=-1)
    return torch.einsum("bhts,bshk->bthk", weights, v)


@contextmanager
def flash_attn_package(function=flash_attn_func):
    with pytest.MonkeyPatch.context() as patch:
        _add(patch, "flash_attn", **({"flash_attn_func": function} if function else {}))
        yield


@contextmanager
def flash_impl(backend, capability=(9, 0)):
    """Add `fa3` or `fa4` to torch's registry, on a fake GPU; remove it at the end."""
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


def _add(patch, name, **contents):
    module = types.ModuleType(name)
    module.__spec__ = importlib.machinery.ModuleSpec(name, loader=None)
    vars(module).update(contents)
    patch.setitem(sys.modules, name, module)
