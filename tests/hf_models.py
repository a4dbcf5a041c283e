"""LlamaCanonForCausalLM next to our model of the same weights, and what it generates."""

from typing import Any

import pytest
import torch

from canon_pretrain.hf.classes import to_hf
from canon_pretrain.hf.config import to_fields
from canon_pretrain.hf.modeling_canon import LlamaCanonConfig, LlamaCanonForCausalLM
from tests.variants import PATTERNS, build, variant

DECODED = [
    "nope ABCD",
    "rope A k3 cst relu2 qk_per_head documents",
    "partial_rope_c ABCD qk_full",
    "alibi ABCD k3 cst relu2 qk_per_head tied",
    "h_alibi AC k2 cst standard qk_full gqa documents",
    "relative FKOV distances6 embed_norm qk_per_head gqa documents",
    "gla_elu A k3 conv gate_rank",
    "mamba2 AB documents",
    "mamba2_mlp k3 conv standard",
    "gdn BD no_res documents",
    "gdn AC conv",
    "nope ABC moe capacity",
    *PATTERNS,
]
OTHERS = [
    "gla A k3 conv gate_rank cst",
    "mamba2 conv",
    "mamba2_mlp conv documents tied",
    "mamba2 AB mimetic",
    "gdn ABCD dynamic",
    "gdn ABC gated_moe capacity",
    "rope AC moe tied",
    "nope FO moe",
]
decoded = pytest.mark.parametrize("name", DECODED)


def args_of(name):
    """Return the args of a variant or of a pattern."""
    return PATTERNS.get(name) or variant(name)


def wrapped_model(name, **fields):
    """Return the Hugging Face class of a variant and our model, with the same weights."""
    ours = build(args_of(name)).eval()
    model = LlamaCanonForCausalLM(LlamaCanonConfig(**(to_fields(ours.args) | fields))).eval()
    state = {to_hf(name): tensor for name, tensor in ours.state_dict().items()}

    keys = model.load_state_dict(state, strict=False)

    assert keys.missing_keys == (["lm_head.weight"] if ours.args.tie_embeddings else [])
    assert not keys.unexpected_keys
    return model, ours


@torch.no_grad()
def greedy(model, tokens, count):
    """Continue tokens by `count` likeliest ones, without a cache."""
    for _ in range(count):
        tokens = [*tokens, int(model(torch.tensor([tokens]))[0, -1].argmax())]
    return tokens


def padded(rows):
    """Return rows padded on the left, and the mask."""
    longest = max(map(len, rows))
    ids = torch.tensor([[2] * (longest - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows])
    return ids, mask


PROMPTS = [[5, 9, 3], [7, 2, 11, 4, 30, 8, 2, 19, 6, 3, 21], [2, 13]]
CLOSE = {"atol": 1e-4, "rtol": 0}
PLAIN: dict[str, Any] = {"eos_token_id": None, "pad_token_id": 2}
