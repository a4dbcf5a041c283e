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
    num_queries, num_heads, head_dim = q.shape[1:]
    num_keys = k.shape[1]
    q_heads_per_k_head = num_heads // k.shape[2]
    k = k.repeat_interleave(q_heads_per_k_head, dim=2)
    v = v.repeat_interleave(q_heads_per_k_head, dim=2)

    scores = torch.einsum("bthk,bshk->bhts", q, k) * head_dim**-0.5
    distance = torch.arange(num_keys)[-num_queries:, None] - torch.arange(num_keys)
    if alibi_slopes is not None:
        scores = scores - alibi_slopes[:, None, None] * distance
    weights = scores.masked_fill(distance < 0, -torch.inf).softmax(dim=-1)
    return torch.einsum("bhts,bshk->bthk", weights, v)


@contextmanager
def flash_attn_package(function=flash_attn_func):
    """Add a package flash_attn with this function, without it if None."""
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
                for name in ("flash_attn", "flash_attn.cute"):
                    _add(patch, name, __path__=[])
                _add(
                    patch,
                    "flash_attn.cute.interface",
                    _flash_attn_fwd=flash_attn_func,
                    _flash_attn_bwd=flash_attn_func,
                )
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
