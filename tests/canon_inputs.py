"""Inputs of Canon's kernels: random tensors, documents, and every kind of layer."""

import pytest
import torch
import torch.nn.functional as F

from canon_pretrain.model.cache import BEFORE_START, PADDING

PLAIN = {"residual": True, "activation": False}
KINDS = [{"residual": r, "activation": a} for r in (True, False) for a in (True, False)]
every_kind = pytest.mark.parametrize("kind", KINDS, ids=str)


def randoms(*shapes, dtype=torch.float64, seed=0):
    """Return a tensor per shape, for each dtype the same values up to rounding."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(s, generator=generator, dtype=torch.float64).to(dtype) for s in shapes]


def segments_of(num_tokens, reach, every=3):
    """Return int32 [3, reach + T]: documents of `every` tokens; padding before a document; one."""
    if not every:
        return None
    tokens = torch.arange(num_tokens)
    padded = torch.where(tokens < num_tokens // 2, PADDING, 0)
    rows = torch.stack((tokens // every, padded, torch.zeros_like(tokens))).int()
    return F.pad(rows, (reach, 0), value=BEFORE_START)
