"""An independent, slow implementation of the whole model, for tests only.

It shares no code with `canon_pretrain`: loops over documents, heads, tokens and taps, complex
numbers. Sources: paper sections 4 and 5, appendix C; ALiBi: Press et al. 2022, section 3.
"""

import math
from typing import Any

import torch
from torch import Tensor


def reference_logits(cfg: Any, params: dict[str, Tensor], tokens_BT: Tensor) -> Tensor:
    """Return logits_BTV in the params' dtype; documents are separate sequences if masked."""
    if not cfg.document_mask:
        return _sequence_logits(cfg, params, tokens_BT)
    rows = []
    for row in tokens_BT.tolist():
        logits = [_sequence_logits(cfg, params, torch.tensor([d])) for d in documents_of(row, cfg)]
        rows.append(torch.cat(logits, dim=1))
    return torch.cat(rows)


def documents_of(row: list[int], cfg: Any) -> list[list[int]]:
    """Cut a row of tokens into its documents: each ends with its EOS, the last perhaps without."""
    documents: list[list[int]] = [[]]
    for token in row:
        if documents[-1] and documents[-1][-1] == cfg.eos_id:
            documents.append([])
        documents[-1].append(token)
    return documents


def _sequence_logits(cfg: Any, params: dict[str, Tensor], tokens_BT: Tensor) -> Tensor:
    h = params["tok_embeddings.weight"][tokens_BT]
    for i in range(cfg.num_layers):
        layer = {
            name.removeprefix(f"layers.{i}."): p
            for name, p in params.items()
            if name.startswith(f"layers.{i}.")
        }
        x = _norm(cfg, layer, "attention_norm", h)
        if "A" in cfg.canon_set:
            x = canon_by_loops(x, layer["canon_a.weight"], cfg, taps(layer, "canon_a", x))
        h = h + _attention(cfg, layer, x)
        x = _norm(cfg, layer, "ffn_norm", h)
        if "C" in cfg.canon_set:
            x = canon_by_loops(x, layer["canon_c.weight"], cfg, taps(layer, "canon_c", x))
        h = h + _feed_forward(cfg, layer, x)
    head = params["tok_embeddings.weight" if cfg.tie_embeddings else "output.weight"]
    return _norm(cfg, params, "norm", h) @ head.T


def taps(
    layer: dict[str, Tensor], name: str, x_BTD: Tensor, part: int = 0, rows: slice = slice(None)
) -> Tensor | None:
    """Return what x adds to each token's taps [B, T, C, K] (Sieberling et al.), None if static."""
    if f"{name}.up" not in layer:
        return None
    down = layer[f"{name}.down"][15 * part : 15 * (part + 1)]
    return torch.einsum("btd,rd,crk->btck", x_BTD, down, layer[f"{name}.up"][rows])


def canon_by_loops(
    x_BTC: Tensor, weight_C1K: Tensor, cfg: Any, moved_BTCK: Tensor | None = None
) -> Tensor:
    """Canon with one loop over tokens and one over taps; needs canon_residual and _activation."""
    num_taps = weight_C1K.shape[2]
    rows = []
    for t in range(x_BTC.shape[1]):
        total = torch.zeros_like(x_BTC[:, 0])
        for j in range(num_taps):
            if t - j >= 0:
                tap = weight_C1K[:, 0, num_taps - 1 - j]
                if moved_BTCK is not None:
                    tap = tap + moved_BTCK[:, t, :, num_taps - 1 - j]
                total = total + tap * x_BTC[:, t - j]
        if cfg.canon_activation:
            total = total * torch.sigmoid(total)
        rows.append(x_BTC[:, t] + total if cfg.canon_residual else total)
    return torch.stack(rows, dim=1)


def _rms(x: Tensor, gain: Tensor, eps: float) -> Tensor:
    return gain * x / torch.sqrt((x * x).mean(dim=-1, keepdim=True) + eps)


def _norm(cfg: Any, params: dict[str, Tensor], name: str, x: Tensor) -> Tensor:
    """RMSNorm, or LayerNorm (Ba et al. 2016, equation 4) with its bias if there is one."""
    gain = params[f"{name}.weight"]
    if cfg.norm != "layernorm":
        return _rms(x, gain, cfg.norm_eps)
    centered = x - x.mean(dim=-1, keepdim=True)
    return _rms(centered, gain, cfg.norm_eps) + params.get(f"{name}.bias", 0.0)


def _linear(params: dict[str, Tensor], name: str, x: Tensor) -> Tensor:
    return x @ params[f"{name}.weight"].T + params.get(f"{name}.bias", 0.0)


def _attention(cfg: Any, layer: dict[str, Tensor], x: Tensor) -> Tensor:
    q, k, v = (_linear(layer, f"attention.{name}", x) for name in ("wq", "wk", "wv"))
    if cfg.qk_norm == "full":
        q = _rms(q, layer["attention.q_norm.weight"], cfg.norm_eps)
        k = _rms(k, layer["attention.k_norm.weight"], cfg.norm_eps)
    if "B" in cfg.canon_set:
        widths = [part.shape[-1] for part in (q, k, v)]
        weights = layer["attention.canon_b.weight"].split(widths)
        starts = (0, widths[0], widths[0] + widths[1])
        q, k, v = (
            canon_by_loops(
                part,
                weights[i],
                cfg,
                taps(layer, "attention.canon_b", x, i, slice(starts[i], starts[i] + widths[i])),
            )
            for i, part in enumerate((q, k, v))
        )
    head_dim = cfg.dim // cfg.num_heads
    kv_heads = cfg.num_kv_heads or cfg.num_heads
    outputs = []
    for head in range(cfg.num_heads):
        # as many neighbouring heads of q share one of k and v
        kv_head = head // (cfg.num_heads // kv_heads)
        q_head = q[..., head * head_dim : (head + 1) * head_dim]
        k_head, v_head = (x[..., kv_head * head_dim : (kv_head + 1) * head_dim] for x in (k, v))
        if cfg.qk_norm == "per_head":
            q_head = _rms(q_head, layer["attention.q_norm.weight"], cfg.norm_eps)
            k_head = _rms(k_head, layer["attention.k_norm.weight"], cfg.norm_eps)
        q_head = _rotate(cfg, q_head, head, cfg.num_heads)
        k_head = _rotate(cfg, k_head, kv_head, kv_heads)
        scores = torch.einsum("btk,bsk->bts", q_head, k_head) / head_dim**0.5
        scores = scores + bias_by_loops(cfg, head, x.shape[1]).to(x.dtype)
        outputs.append(torch.einsum("bts,bsk->btk", scores.softmax(dim=-1), v_head))
    return _linear(layer, "attention.wo", torch.cat(outputs, dim=-1))


def bias_by_loops(cfg: Any, head: int, num_tokens: int) -> Tensor:
    """Return the bias of a head's scores (from 0), [T, T]; -inf if masked.

    With h = 1 .. H, ALiBi: -2^(-8h/H) per token of distance. H-ALiBi: head h of the first half
    attends to the last h tokens.
    """
    h = head + 1
    window = h if cfg.position == "h_alibi" and h <= cfg.num_heads // 2 else num_tokens
    slope = 2.0 ** (-8 * h / cfg.num_heads) if cfg.position == "alibi" else 0.0
    rows = [[-math.inf] * num_tokens for _ in range(num_tokens)]
    for t in range(num_tokens):
        for s in range(max(0, t - window + 1), t + 1):
            rows[t][s] = -slope * (t - s)
    return torch.tensor(rows, dtype=torch.float64)


def _rotate(cfg: Any, x_BTK: Tensor, head: int, num_heads: int) -> Tensor:
    """Rotate head number `head` (from 0) of `num_heads`."""
    head_dim = x_BTK.shape[-1]
    heads, dims = {
        "rope": (num_heads, head_dim),
        "partial_rope_a": (num_heads // 2, head_dim // 2),
        "partial_rope_b": (num_heads // 4, head_dim),
        "partial_rope_c": (num_heads, cfg.partial_rope_dim or head_dim // 4),
    }.get(cfg.position, (0, 0))
    if head >= heads:
        return x_BTK
    out = x_BTK.clone()
    for i in range(dims // 2):
        pair = torch.complex(x_BTK[..., 2 * i].contiguous(), x_BTK[..., 2 * i + 1].contiguous())
        angle = torch.arange(x_BTK.shape[1]).double() * cfg.rope_theta ** (-2 * i / dims)
        turned = pair * torch.polar(torch.ones_like(angle), angle).to(pair.dtype)
        out[..., 2 * i], out[..., 2 * i + 1] = turned.real, turned.imag
    return out


def _feed_forward(cfg: Any, layer: dict[str, Tensor], x: Tensor) -> Tensor:
    names = ("w1", "w3") if cfg.ffn == "gated" else ("w1",)
    inner = [_linear(layer, f"feed_forward.{name}", x) for name in names]
    if "D" in cfg.canon_set:
        weights = layer["feed_forward.canon_d.weight"].split(cfg.ffn_dim)
        rows = [slice(i * cfg.ffn_dim, (i + 1) * cfg.ffn_dim) for i in range(len(inner))]
        inner = [
            canon_by_loops(y, weights[i], cfg, taps(layer, "feed_forward.canon_d", x, i, rows[i]))
            for i, y in enumerate(inner)
        ]
    gate = inner[0]
    if cfg.ffn_activation == "relu2":
        y = torch.where(gate > 0, gate * gate, torch.zeros_like(gate))
    elif cfg.ffn_activation == "gelu":  # Hendrycks and Gimpel 2016, section 2, as in GPT2
        cubic = gate + 0.044715 * gate**3
        y = 0.5 * gate * (1 + torch.tanh(math.sqrt(2 / math.pi) * cubic))
    else:
        y = gate * torch.sigmoid(gate)
    return _linear(layer, "feed_forward.w2", y * inner[1] if cfg.ffn == "gated" else y)
