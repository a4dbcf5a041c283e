"""A second, slow and plain implementation of the whole model, for the tests of `model/` only.

Shares no code with `canon_pretrain`: explicit loops, einsum, an explicit mask, complex numbers. It
reads the parameters from a dict by name and the variant from the fields of a config object.

Shapes: B batch, T tokens, D hidden, H heads, K head dim.
"""

from typing import Any

import torch
from torch import Tensor


def reference_logits(cfg: Any, params: dict[str, Tensor], tokens_BT: Tensor) -> Tensor:
    """Return logits_BTV of the model that `cfg` and `params` describe."""
    h = params["tok_embeddings.weight"][tokens_BT]
    for i in range(cfg.num_layers):
        layer = {
            name.removeprefix(f"layers.{i}."): p
            for name, p in params.items()
            if name.startswith(f"layers.{i}.")
        }
        x = _rms(h, layer["attention_norm.weight"], cfg.norm_eps)
        if "A" in cfg.canon_set:
            x = canon_by_loops(x, layer["canon_a.weight"], cfg)
        h = h + _attention(cfg, layer, x)
        x = _rms(h, layer["ffn_norm.weight"], cfg.norm_eps)
        if "C" in cfg.canon_set:
            x = canon_by_loops(x, layer["canon_c.weight"], cfg)
        h = h + _feed_forward(cfg, layer, x)
    return _rms(h, params["norm.weight"], cfg.norm_eps) @ params["output.weight"].T


def canon_by_loops(x_BTC: Tensor, weight_C1K: Tensor, cfg: Any) -> Tensor:
    """Canon with one loop over tokens and one over taps; needs canon_residual and _activation."""
    num_taps = weight_C1K.shape[2]
    rows = []
    for t in range(x_BTC.shape[1]):
        total = torch.zeros_like(x_BTC[:, 0])
        for j in range(num_taps):
            if t - j >= 0:
                total = total + weight_C1K[:, 0, num_taps - 1 - j] * x_BTC[:, t - j]
        if cfg.canon_activation:
            total = total * torch.sigmoid(total)
        rows.append(x_BTC[:, t] + total if cfg.canon_residual else total)
    return torch.stack(rows, dim=1)


def _rms(x: Tensor, gain: Tensor, eps: float) -> Tensor:
    return gain * x / torch.sqrt((x * x).mean(dim=-1, keepdim=True) + eps)


def _attention(cfg: Any, layer: dict[str, Tensor], x: Tensor) -> Tensor:
    q, k, v = (x @ layer[f"attention.{name}.weight"].T for name in ("wq", "wk", "wv"))
    if cfg.qk_norm == "full":
        q = _rms(q, layer["attention.q_norm.weight"], cfg.norm_eps)
        k = _rms(k, layer["attention.k_norm.weight"], cfg.norm_eps)
    if "B" in cfg.canon_set:
        of_q, of_k, of_v = layer["attention.canon_b.weight"].split(cfg.dim)
        q, k, v = (
            canon_by_loops(part, weight, cfg) for part, weight in ((q, of_q), (k, of_k), (v, of_v))
        )
    head_dim = cfg.dim // cfg.num_heads
    outputs = []
    for head in range(cfg.num_heads):
        dims = slice(head * head_dim, (head + 1) * head_dim)
        q_head, k_head = q[..., dims], k[..., dims]
        if cfg.qk_norm == "per_head":
            q_head = _rms(q_head, layer["attention.q_norm.weight"], cfg.norm_eps)
            k_head = _rms(k_head, layer["attention.k_norm.weight"], cfg.norm_eps)
        q_head, k_head = _rotate(cfg, q_head, head), _rotate(cfg, k_head, head)
        scores = torch.einsum("btk,bsk->bts", q_head, k_head) / head_dim**0.5
        future = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1)
        weights = scores.masked_fill(future, -torch.inf).softmax(dim=-1)
        outputs.append(torch.einsum("bts,bsk->btk", weights, v[..., dims]))
    return torch.cat(outputs, dim=-1) @ layer["attention.wo.weight"].T


def _rotate(cfg: Any, x_BTK: Tensor, head: int) -> Tensor:
    head_dim = x_BTK.shape[-1]
    heads, dims = {
        "rope": (cfg.num_heads, head_dim),
        "nope": (0, 0),
        "partial_rope_a": (cfg.num_heads // 2, head_dim // 2),
        "partial_rope_b": (cfg.num_heads // 4, head_dim),
        "partial_rope_c": (cfg.num_heads, head_dim // 4),
    }[cfg.position]
    if head >= heads:
        return x_BTK
    out = x_BTK.clone()
    for i in range(dims // 2):
        pair = torch.complex(x_BTK[..., 2 * i].contiguous(), x_BTK[..., 2 * i + 1].contiguous())
        angle = torch.arange(x_BTK.shape[1]) * cfg.rope_theta ** (-2 * i / dims)
        turned = pair * torch.polar(torch.ones_like(angle), angle).to(pair.dtype)
        out[..., 2 * i], out[..., 2 * i + 1] = turned.real, turned.imag
    return out


def _feed_forward(cfg: Any, layer: dict[str, Tensor], x: Tensor) -> Tensor:
    gate = x @ layer["feed_forward.w1.weight"].T
    up = x @ layer["feed_forward.w3.weight"].T
    if "D" in cfg.canon_set:
        of_gate, of_up = layer["feed_forward.canon_d.weight"].split(cfg.ffn_dim)
        gate, up = canon_by_loops(gate, of_gate, cfg), canon_by_loops(up, of_up, cfg)
    return (gate * torch.sigmoid(gate) * up) @ layer["feed_forward.w2.weight"].T
