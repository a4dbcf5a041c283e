"""Our parameter names and those of LlamaCanonForCausalLM (and Llama), one to one.

Used by export.py and reading.py; a copy travels with every export, where modeling_canon.py hangs
the model's parts up under the second name of each pair. No tensor is transposed. What the released
class does not have (a standard feed-forward, QK-norm per head) keeps the names of its nearest kin.
"""

import re

# {} is the number of a block
ENDS = (
    ("tok_embeddings", "model.embed_tokens"),
    ("norm", "model.norm"),
    ("output", "lm_head"),
)
BLOCK = (
    ("attention_norm", "input_layernorm"),
    ("canon_a", "canonA"),
    ("attention.wq", "self_attn.q_proj"),
    ("attention.wk", "self_attn.k_proj"),
    ("attention.wv", "self_attn.v_proj"),
    ("attention.wo", "self_attn.o_proj"),
    ("attention.q_norm", "self_attn.q_norm"),
    ("attention.k_norm", "self_attn.k_norm"),
    ("attention.canon_b", "self_attn.canonB"),
    ("ffn_norm", "post_attention_layernorm"),
    ("canon_c", "canonC"),
    ("feed_forward.w1", "mlp.gate_proj"),
    ("feed_forward.w3", "mlp.up_proj"),
    ("feed_forward.w2", "mlp.down_proj"),
    ("feed_forward.canon_d", "mlp.canonD"),
)
_OURS, _THEIRS = "layers.", "model.layers."


def to_hf(name: str) -> str:
    """The name there of our parameter `name`; ValueError for one that we do not have."""
    return _translate(name, _OURS, _THEIRS, dict(ENDS + BLOCK))


def to_ours(name: str) -> str:
    """Our name of their parameter `name`; ValueError for one that we have none for."""
    return _translate(name, _THEIRS, _OURS, {theirs: ours for ours, theirs in ENDS + BLOCK})


def _translate(name: str, before: str, after: str, modules: dict[str, str]) -> str:
    match = re.fullmatch(rf"({re.escape(before)}(0|[1-9]\d*)\.)?(.+)\.(weight|bias)", name)
    module = modules.get(match[3]) if match else None
    if match is None or module is None or _is_end(module) != (match[2] is None):
        raise ValueError(f"{name} is no parameter of this family of models")
    block = "" if match[2] is None else f"{after}{match[2]}."
    return f"{block}{module}.{match[4]}"


def _is_end(module: str) -> bool:
    return any(module in pair for pair in ENDS)
