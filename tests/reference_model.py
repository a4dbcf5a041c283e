"""An independent, slow implementation of the whole model, for tests only.

It shares no code with `canon_pretrain`: loops over documents, heads, tokens and taps, complex
numbers. Sources: paper sections 4 and 5, appendix C; ALiBi: Press et al. 2022, section 3; GLA:
arXiv 2312.06635, section 4; Mamba2: 2405.21060, section 7; GatedDeltaNet: 2412.06464, section 3;
the gate of attention: 2505.06708, section 2.2.
"""

import math
from collections.abc import Callable
from types import SimpleNamespace
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


def layer_config(model: Any, i: int) -> Any:
    """Return the config of layer i: the model's with what its name in the pattern changes."""
    if not model.pattern:
        return model
    name = model.pattern[i % len(model.pattern)]
    changes = {"mixer": name} if name in MIXERS else {}
    return SimpleNamespace(**vars(model) | changes | model.layers.get(name, {}))


def _sequence_logits(model: Any, params: dict[str, Tensor], tokens_BT: Tensor) -> Tensor:
    h = params["tok_embeddings.weight"][tokens_BT]
    if model.embed_norm:
        h = _norm(model, params, "embed_norm", h)
    h = _smeared(model, params, h)
    for i in range(model.num_layers):
        cfg = layer_config(model, i)
        layer = {
            name.removeprefix(f"layers.{i}."): p
            for name, p in params.items()
            if name.startswith(f"layers.{i}.")
        }
        h = h + _branch(cfg, layer, h, MIXERS[cfg.mixer], "attention_norm", "AO")
        if cfg.ffn != "none":
            h = h + _branch(cfg, layer, h, _feed_forward, "ffn_norm", "CF")
    head = params["tok_embeddings.weight" if model.tie_embeddings else "output.weight"]
    return _norm(model, params, "norm", h) @ head.T


def _branch(
    cfg: Any,
    layer: dict[str, Tensor],
    h: Tensor,
    compute: Callable[[Any, dict[str, Tensor], Tensor], Tensor],
    norm: str,
    sites: str,
) -> Tensor:
    """What is added to h, whose Canon sites are before and after `compute`.

    OLMo 2, arXiv 2501.00656: h := x + RMSNorm(Attention(x)), h_out := h + RMSNorm(MLP(h)).
    """
    before, after = sites
    x = h
    if cfg.norm_place == "input":
        x = _norm(cfg, layer, norm, x)
    x = _canon_at(cfg, layer, before, f"canon_{before.lower()}", x)
    x = compute(cfg, layer, x)
    x = _canon_at(cfg, layer, after, f"canon_{after.lower()}", x)
    return _norm(cfg, layer, norm, x) if cfg.norm_place == "output" else x


def _smeared(cfg: Any, params: dict[str, Tensor], embeddings: Tensor) -> Tensor:
    """Each embedding plus a gate, of its first 12 channels, times the one before."""
    if not cfg.smear:
        return embeddings
    rows = [embeddings[:, 0]]
    for t in range(1, embeddings.shape[1]):
        dot = (embeddings[:, t, :12] * params["smear.gate.weight"][0]).sum(dim=1, keepdim=True)
        gate = params["smear.scale"] / (1 + torch.exp(-dot))
        rows.append(embeddings[:, t] + gate * embeddings[:, t - 1])
    return torch.stack(rows, dim=1)


def _canon_at(
    cfg: Any,
    layer: dict[str, Tensor],
    site: str,
    name: str,
    x: Tensor,
    source_BTD: Tensor | None = None,
) -> Tensor:
    """Canon of one tensor, if the site has it; dynamic taps depend on the source, or x itself."""
    if site not in cfg.canon_set:
        return x
    source_BTD = x if source_BTD is None else source_BTD
    return _filtered(cfg, x, layer[f"{name}.weight"], taps(layer, name, source_BTD))


def _filtered(cfg: Any, x: Tensor, weight: Tensor, moved_BTCK: Tensor | None = None) -> Tensor:
    """Canon of any filter and scale; a scalar weight has one row, a shift's are shares."""
    if cfg.canon_filter == "shift":
        plain = SimpleNamespace(canon_residual=False, canon_activation=False)
        y = canon_by_loops(x, torch.cat((weight, 1 - weight), dim=2), plain)
    else:
        y = canon_by_loops(x, weight, cfg, moved_BTCK)
    if cfg.canon_scale == "sqrt":
        num_taps = cfg.canon_kernel if moved_BTCK is None else 2 * cfg.canon_kernel
        y = y / math.sqrt(num_taps + 1)
    return y


def _canon_qkv(cfg: Any, layer: dict[str, Tensor], qkv: list[Tensor], x: Tensor) -> list[Tensor]:
    """Canon-B, or Canon of q, k or v alone; all of them depend on x if dynamic."""
    if "B" in cfg.canon_set:
        return _canon_of_parts(cfg, layer, "attention.canon_b", qkv, x)
    return [
        _canon_at(cfg, layer, site, f"attention.canon_{site.lower()}", part, x)
        for site, part in zip("QKV", qkv, strict=True)
    ]


def taps(
    layer: dict[str, Tensor], name: str, x_BTD: Tensor, part: int = 0, rows: slice = slice(None)
) -> Tensor | None:
    """Return what x adds to each token's taps [B, T, C, K], None if static.

    Of low rank (Sieberling et al.), or the same in all channels of a head (Inkling2).
    """
    if f"{name}.per_head" in layer:
        num_channels, _, num_taps = layer[f"{name}.weight"].shape
        rows_RD = layer[f"{name}.per_head"]
        channels_per_head = num_channels * num_taps // len(rows_RD)
        moved = []
        for channel in range(num_channels):
            first = channel // channels_per_head * num_taps
            moved.append(x_BTD @ rows_RD[first : first + num_taps].T)
        return torch.stack(moved, dim=2)
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


def _canon_of_parts(
    cfg: Any, layer: dict[str, Tensor], name: str, parts: list[Tensor], x_BTD: Tensor
) -> list[Tensor]:
    """Canon on the concatenation of `parts`, which are projections of x."""
    found, start = [], 0
    for i, part in enumerate(parts):
        rows = slice(start, start := start + part.shape[-1])
        moved = taps(layer, name, x_BTD, i, rows)
        weight = layer[f"{name}.weight"]
        if cfg.canon_filter != "scalar":
            weight = weight[rows]
        found.append(_filtered(cfg, part, weight, moved))
    return found


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
    q, k, v = _canon_qkv(cfg, layer, [q, k, v], x)
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
        if cfg.position == "relative":
            scores = scores + learned_bias_by_loops(cfg, layer, x, head)
        y_head = torch.einsum("bts,bsk->btk", scores.softmax(dim=-1), v_head)
        if cfg.attention_gate == "per_channel":
            gate = _linear(layer, "attention.wg", x)
            y_head = y_head / (1 + torch.exp(-gate[..., head * head_dim : (head + 1) * head_dim]))
        outputs.append(y_head)
    return _linear(layer, "attention.wo", torch.cat(outputs, dim=-1))


def bias_by_loops(cfg: Any, head: int, num_tokens: int) -> Tensor:
    """Return the bias of a head's scores (from 0), [T, T]; -inf if masked.

    With h = 1 .. H, ALiBi: -2^(-8h/H) per token of distance. H-ALiBi: head h of the first half, or
    of h_alibi_heads, attends to the last h tokens.
    """
    h = head + 1
    last_with_window = cfg.h_alibi_heads if cfg.h_alibi_heads > 0 else cfg.num_heads // 2
    window = h if cfg.position == "h_alibi" and h <= last_with_window else num_tokens
    window = min(window, cfg.window or window)
    slope = 2.0 ** (-8 * h / cfg.num_heads) if cfg.position == "alibi" else 0.0
    rows = [[-math.inf] * num_tokens for _ in range(num_tokens)]
    for t in range(num_tokens):
        for s in range(max(0, t - window + 1), t + 1):
            rows[t][s] = -slope * (t - s)
    return torch.tensor(rows, dtype=torch.float64)


def learned_bias_by_loops(cfg: Any, layer: dict[str, Tensor], x: Tensor, head: int) -> Tensor:
    """Inkling's bias of a head's scores (from 0), [B, T, T]: token t's at each distance.

    A token's channels times the profile of the distance, for `relative_extent` distances, or the
    window, or 1024; beyond, 0.
    """
    rows = slice(head * cfg.relative_dim, (head + 1) * cfg.relative_dim)
    channels = x @ layer["attention.relative.wr.weight"][rows].T
    profiles = layer["attention.relative.profiles.weight"]
    assert len(profiles) == (cfg.relative_extent or cfg.window or 1024)
    num_tokens = x.shape[1]
    bias = torch.zeros(len(x), num_tokens, num_tokens, dtype=x.dtype)
    for t in range(num_tokens):
        for s in range(t + 1):
            if t - s < len(profiles):
                bias[:, t, s] = channels[:, t] @ profiles[t - s]
    return bias


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


def _gla(cfg: Any, layer: dict[str, Tensor], x: Tensor) -> Tensor:
    """S_t = Diag(a_t) S_{t-1} + k_t^T v_t, o_t = q_t S_t / sqrt(K), a_t = sigmoid(gate)^(1/16)."""
    q, k, v = _convolved_qkv(cfg, layer, x)
    if cfg.gla_feature_map == "elu":
        q, k = (torch.where(part > 0, part + 1, torch.exp(part)) for part in (q, k))
    gate = _linear(layer, "attention.gk.up", _linear(layer, "attention.gk.down", x))
    parts = (q, k, v, torch.sigmoid(gate) ** (1 / 16))
    outputs = []
    for q, k, v, a in zip(*(part.chunk(cfg.num_heads, -1) for part in parts), strict=True):
        state, o = torch.zeros_like(_outer(k[:, 0], v[:, 0])), []
        for t in range(x.shape[1]):
            state = a[:, t, :, None] * state + _outer(k[:, t], v[:, t])
            o.append(_read(q[:, t], state) / k.shape[-1] ** 0.5)
        outputs.append(torch.stack(o, dim=1))
    return _gated_heads(cfg, layer, x, outputs)


def _gated_deltanet(cfg: Any, layer: dict[str, Tensor], x: Tensor) -> Tensor:
    """S_t = a_t (I - b_t k_t^T k_t) S_{t-1} + b_t k_t^T v_t, o_t = q_t S_t / sqrt(K)."""
    qkv = _convolved_qkv(cfg, layer, x)
    if not cfg.mixer_conv:
        qkv = [_silu(part) for part in qkv]
    q, k, v = (part.chunk(cfg.num_heads, -1) for part in qkv)
    steps = _softplus(_linear(layer, "attention.wa", x) + layer["attention.dt_bias"])
    a = torch.exp(-torch.exp(layer["attention.A_log"]) * steps)
    largest_step = 2 if cfg.allow_neg_eigval else 1
    b = largest_step * torch.sigmoid(_linear(layer, "attention.wb", x))
    outputs = []
    for h in range(cfg.num_heads):
        state, o = torch.zeros_like(_outer(k[h][:, 0], v[h][:, 0])), []
        for t in range(x.shape[1]):
            q_t, k_t = (part[h][:, t] for part in (q, k))
            q_t, k_t = (y / torch.sqrt((y * y).sum(-1, keepdim=True) + 1e-6) for y in (q_t, k_t))
            a_t, b_t = (part[:, t, h, None, None] for part in (a, b))
            forget = torch.eye(k_t.shape[-1], dtype=x.dtype) - b_t * _outer(k_t, k_t)
            state = a_t * forget @ state + b_t * _outer(k_t, v[h][:, t])
            o.append(_read(q_t, state) / k_t.shape[-1] ** 0.5)
        outputs.append(torch.stack(o, dim=1))
    return _gated_heads(cfg, layer, x, outputs)


def _mamba2(cfg: Any, layer: dict[str, Tensor], x: Tensor) -> Tensor:
    """S_t = exp(-dt_t exp(A_log)) S_{t-1} + dt_t B_t^T x_t, y_t = C_t S_t + D x_t, per head."""
    inner, states, heads = 2 * cfg.dim, cfg.state_dim, cfg.num_heads
    projected = _linear(layer, "attention.in_proj", x)
    if "B" in cfg.canon_set:
        (projected,) = _canon_of_parts(cfg, layer, "attention.canon_b", [projected], x)
    z, xbc, dt = projected.split([inner, inner + 2 * states, heads], dim=-1)
    if cfg.mixer_conv:
        xbc = _short_conv(xbc, layer["attention.conv1d.weight"], layer["attention.conv1d.bias"])
    inputs, b, c = xbc.split([inner, states, states], dim=-1)
    dt = _softplus(dt + layer["attention.dt_bias"])
    outputs = []
    for h, x_head in enumerate(inputs.chunk(heads, -1)):
        state, y = torch.zeros_like(_outer(b[:, 0], x_head[:, 0])), []
        for t in range(x.shape[1]):
            dt_t = dt[:, t, h, None, None]
            decay = torch.exp(-dt_t * torch.exp(layer["attention.A_log"][h]))
            state = decay * state + dt_t * _outer(b[:, t], x_head[:, t])
            y.append(_read(c[:, t], state) + layer["attention.D"][h] * x_head[:, t])
        outputs.append(torch.stack(y, dim=1))
    gated = torch.cat(outputs, dim=-1) * _silu(z)
    gated = _rms(gated, layer["attention.norm.weight"], cfg.norm_eps)
    return _linear(layer, "attention.out_proj", gated)


MIXERS = {
    "attention": _attention, "gla": _gla, "mamba2": _mamba2, "gated_deltanet": _gated_deltanet,
}  # fmt: skip


def _outer(k: Tensor, v: Tensor) -> Tensor:
    return k[:, :, None] * v[:, None, :]


def _read(q: Tensor, state: Tensor) -> Tensor:
    return (q[:, :, None] * state).sum(dim=1)


def _silu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(x)


def _softplus(x: Tensor) -> Tensor:
    return torch.log1p(torch.exp(x))


def _short_conv(x: Tensor, weight_C1K: Tensor, bias: Tensor | float = 0.0) -> Tensor:
    """silu(conv1d(x)), without residual."""
    plain = SimpleNamespace(canon_residual=False, canon_activation=False)
    return _silu(canon_by_loops(x, weight_C1K, plain) + bias)


def _convolved_qkv(cfg: Any, layer: dict[str, Tensor], x: Tensor) -> list[Tensor]:
    """Return q, k and v after Canon-B or the native conv1d, if there is one."""
    qkv = [_linear(layer, f"attention.{name}", x) for name in ("wq", "wk", "wv")]
    if cfg.mixer_conv:
        weights = layer["attention.conv1d.weight"].split([part.shape[-1] for part in qkv])
        return [_short_conv(part, w) for part, w in zip(qkv, weights, strict=True)]
    return _canon_qkv(cfg, layer, qkv, x)


def _gated_heads(cfg: Any, layer: dict[str, Tensor], x: Tensor, outputs: list[Tensor]) -> Tensor:
    """RMSNorm of each head's output, one gain for all, times silu of the output gate."""
    if cfg.output_gate_rank:
        gate = _linear(layer, "attention.wg.up", _linear(layer, "attention.wg.down", x))
    else:
        gate = _linear(layer, "attention.wg", x)
    eps = cfg.o_norm_eps if cfg.o_norm_eps > 0 else cfg.norm_eps
    normed = [_rms(o, layer["attention.o_norm.weight"], eps) for o in outputs]
    return _linear(layer, "attention.wo", torch.cat(normed, dim=-1) * _silu(gate))


def _feed_forward(cfg: Any, layer: dict[str, Tensor], x: Tensor) -> Tensor:
    names = ("w1", "w3") if cfg.ffn == "gated" else ("w1",)
    inner = [_linear(layer, f"feed_forward.{name}", x) for name in names]
    if "D" in cfg.canon_set:
        inner = _canon_of_parts(cfg, layer, "feed_forward.canon_d", inner, x)
    gate = inner[0]
    if cfg.ffn_activation == "relu2":
        y = torch.where(gate > 0, gate * gate, torch.zeros_like(gate))
    elif cfg.ffn_activation == "gelu":  # Hendrycks and Gimpel 2016, section 2, as in GPT2
        cubic = gate + 0.044715 * gate**3
        y = 0.5 * gate * (1 + torch.tanh(math.sqrt(2 / math.pi) * cubic))
    else:
        y = gate * torch.sigmoid(gate)
    return _linear(layer, "feed_forward.w2", y * inner[1] if cfg.ffn == "gated" else y)
