"""The papers' formulas of train_configs/mixers, token by token and head by head in float64.

Each function receives the parameters by name, the layer's args and one document x [T, D], and
returns y [T, D]. Nothing is shared with the files: matrices are written out, there are no chunks.
"""

import math

import torch

from canon_pretrain.model.args import ModelArgs

Weights = dict[str, torch.Tensor]


def causal_filter(x_TC: torch.Tensor, weight_C1K: torch.Tensor) -> torch.Tensor:
    """sum_i weight_i x_{t-K+1+i}, zeros before the first token."""
    num_taps = weight_C1K.shape[2]
    rows = []
    for t in range(len(x_TC)):
        row = torch.zeros_like(x_TC[0])
        for i in range(num_taps):
            if t - num_taps + 1 + i >= 0:
                row = row + weight_C1K[:, 0, i] * x_TC[t - num_taps + 1 + i]
        rows.append(row)
    return torch.stack(rows)


def canon_b(w: Weights, *parts: torch.Tensor, prefix: str = "") -> list[torch.Tensor]:
    """Canon-B with its residual, if the layer has one, over the channels of all parts."""
    weight = w.get(f"{prefix}canon_b.weight")
    if weight is None:
        return list(parts)
    x_TC = torch.cat(parts, dim=1)
    return list((x_TC + causal_filter(x_TC, weight)).split([part.shape[1] for part in parts], 1))


def rms_norm(x: torch.Tensor, gain: torch.Tensor, eps: float) -> torch.Tensor:
    return gain * x / (x.square().mean(-1, keepdim=True) + eps).sqrt()


def silu(x: torch.Tensor) -> torch.Tensor:
    return x / (1 + (-x).exp())


def softplus(x: torch.Tensor) -> torch.Tensor:
    return (1 + x.exp()).log()


def rotated(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """Return x with pairs (2i, 2i + 1) turned by angle i; further dims stay."""
    num_rotated = 2 * len(angles)
    first = x[0:num_rotated:2]
    second = x[1:num_rotated:2]
    turned_first = first * angles.cos() - second * angles.sin()
    turned_second = first * angles.sin() + second * angles.cos()
    turned = torch.stack((turned_first, turned_second), dim=1).flatten()
    return torch.cat((turned, x[num_rotated:]))


def rope_angles(position: int, dim: int, theta: float) -> torch.Tensor:
    return torch.tensor(
        [position * theta ** (-2 * i / dim) for i in range(dim // 2)], dtype=torch.float64
    )


def softmax_row(q: torch.Tensor, keys: list[torch.Tensor], scale: float) -> torch.Tensor:
    scores = torch.stack([q @ key for key in keys]) * scale
    weights = (scores - scores.max()).exp()
    return weights / weights.sum()


def gated_attention(w: Weights, args: ModelArgs, x_TD: torch.Tensor, start: int) -> torch.Tensor:
    heads, width = args.num_heads, args.head_dim
    q, k, v = (x_TD @ w[f"attend.{name}.weight"].T for name in ("wq", "wk", "wv"))
    q, k, v = canon_b(w, q, k, v, prefix="attend.")
    angles = [rope_angles(start + t, args.rope_dim, args.rope_theta) for t in range(len(x_TD))]
    columns = []
    for h in range(heads):
        own = slice(h * width, (h + 1) * width)
        group = h * args.kv_heads // heads
        shared = slice(group * width, (group + 1) * width)
        keys = [rotated(k_s, angle) for k_s, angle in zip(k[:, shared], angles, strict=True)]
        outputs = []
        for t in range(len(x_TD)):
            first = max(0, t - args.window + 1) if args.window else 0
            shares = softmax_row(rotated(q[t, own], angles[t]), keys[first : t + 1], width**-0.5)
            gate = 1 / (1 + (-(w["wg.weight"][own] @ x_TD[t])).exp())
            outputs.append(shares @ v[first : t + 1, shared] * gate)
        columns.append(torch.stack(outputs))
    return torch.cat(columns, dim=1) @ w["attend.wo.weight"].T


def kimi_delta_attention(
    w: Weights, args: ModelArgs, x_TD: torch.Tensor, start: int
) -> torch.Tensor:
    heads, key_width, value_width = args.num_heads, args.key_dim, args.value_dim
    q, k, v = canon_b(w, *(x_TD @ w[f"{name}.weight"].T for name in ("wq", "wk", "wv")))
    if "conv1d.weight" in w:
        widths = [part.shape[1] for part in (q, k, v)]
        q, k, v = causal_filter(torch.cat((q, k, v), 1), w["conv1d.weight"]).split(widths, 1)
    q, k, v = silu(q), silu(k), silu(v)

    states = torch.zeros(heads, key_width, value_width, dtype=x_TD.dtype)
    rows = []
    for t, x in enumerate(x_TD):
        outputs = []
        for h in range(heads):
            keys = slice(h * key_width, (h + 1) * key_width)
            values = slice(h * value_width, (h + 1) * value_width)
            q_t, k_t = (p[t, keys] / (p[t, keys].square().sum() + 1e-6).sqrt() for p in (q, k))
            raw = (w["decay_up.weight"] @ (w["decay_down.weight"] @ x))[keys] + w["dt_bias"][keys]
            a_t = (-w["A_log"][h].exp() * softplus(raw)).exp()
            b_t = 1 / (1 + (-(w["wb.weight"][h] @ x)).exp())

            # S = (I - b k k^T) Diag(a) S + b k v^T
            erase = torch.eye(key_width, dtype=x.dtype) - b_t * torch.outer(k_t, k_t)
            states[h] = erase @ torch.diag(a_t) @ states[h] + b_t * torch.outer(k_t, v[t, values])
            o_t = states[h].T @ q_t * key_width**-0.5
            gate = (w["gate_up.weight"] @ (w["gate_down.weight"] @ x))[values]
            outputs.append(rms_norm(o_t, w["o_norm.weight"], args.norm_eps) / (1 + (-gate).exp()))
        rows.append(w["wo.weight"] @ torch.cat(outputs))
    return torch.stack(rows)


def latent_attention(w: Weights, args: ModelArgs, x_TD: torch.Tensor, start: int) -> torch.Tensor:
    heads, width = args.num_heads, args.head_dim
    turning = width // 2
    q, c, r = canon_b(w, *(x_TD @ w[f"{name}.weight"].T for name in ("wq", "w_latent", "w_rope")))
    c = rms_norm(c, w["latent_norm.weight"], args.norm_eps)
    angles = [rope_angles(start + t, turning, args.rope_theta) for t in range(len(x_TD))]
    columns = []
    for h in range(heads):
        own = slice(h * width, (h + 1) * width)
        keys = []
        for s in range(len(x_TD)):
            keys.append(torch.cat((w["wk.weight"][own] @ c[s], rotated(r[s], angles[s]))))
        outputs = []
        for t in range(len(x_TD)):
            query = q[t, h * (width + turning) : (h + 1) * (width + turning)]
            query = torch.cat((query[:width], rotated(query[width:], angles[t])))
            shares = softmax_row(query, keys[: t + 1], (width + turning) ** -0.5)
            outputs.append(w["wv.weight"][own] @ (shares @ c[: t + 1]))
        columns.append(torch.stack(outputs))
    return torch.cat(columns, dim=1) @ w["wo.weight"].T


def rwkv7(w: Weights, args: ModelArgs, x_TD: torch.Tensor, start: int) -> torch.Tensor:
    heads, width = args.num_heads, args.head_dim
    wkv = torch.zeros(heads, width, width, dtype=x_TD.dtype)  # the paper's: [value, key]
    before = torch.zeros_like(x_TD[0])
    rows = []
    for x in x_TD:
        x_r, x_w, x_k, x_v, x_a, x_g = (x + (before - x) * mix for mix in w["mix"])
        before = x
        r, k, v = w["wr.weight"] @ x_r, w["wk.weight"] @ x_k, w["wv.weight"] @ x_v
        d = w["w_0"] + w["decay.2.weight"] @ torch.tanh(w["decay.0.weight"] @ x_w)
        decay = (-math.exp(-0.5) / (1 + (-d).exp())).exp()
        a = 1 / (1 + (-(w["a_0"] + w["rate.2.weight"] @ (w["rate.0.weight"] @ x_a))).exp())
        g = w["gate.2.weight"] @ (1 / (1 + (-(w["gate.0.weight"] @ x_g)).exp()))
        kappa = k * w["xi"]
        k = k * (1 + (a - 1) * w["alpha"])

        outputs = []
        for h in range(heads):
            own = slice(h * width, (h + 1) * width)
            removed = kappa[own] / kappa[own].norm()
            transition = torch.diag(decay[own]) - torch.outer(removed, a[own] * removed)
            wkv[h] = wkv[h] @ transition + torch.outer(v[own], k[own])
            p = wkv[h] @ r[own]
            p = (p - p.mean()) / (p.var(correction=0) + width * 1e-5).sqrt()
            p = p * w["o_norm.weight"][own] + w["o_norm.bias"][own]
            outputs.append(p + (r[own] * w["rho"][own] * k[own]).sum() * v[own])
        rows.append(w["wo.weight"] @ (torch.cat(outputs) * g))
    return torch.stack(rows)


def mamba3(w: Weights, args: ModelArgs, x_TD: torch.Tensor, start: int) -> torch.Tensor:
    heads, width, num_states = args.num_heads, args.value_dim, args.state_dim
    inner = heads * width
    widths = (inner, inner, num_states, num_states, heads, heads, heads, num_states // 4)
    z, u, b, c, d, rate, trap, theta = (x_TD @ w["in_proj.weight"].T).split(widths, dim=1)
    u, b, c = canon_b(w, u, b, c)
    b = rms_norm(b, w["B_norm.weight"], args.norm_eps)
    c = rms_norm(c, w["C_norm.weight"], args.norm_eps)

    states = torch.zeros(heads, width, num_states, dtype=x_TD.dtype)
    angles = torch.zeros(heads, num_states // 4, dtype=x_TD.dtype)
    before = torch.zeros(heads, width, num_states, dtype=x_TD.dtype)  # x B^T of the last token
    rows = []
    for t in range(len(x_TD)):
        outputs = []
        for h in range(heads):
            own = slice(h * width, (h + 1) * width)
            dt = softplus(d[t, h] + w["dt_bias"][h])
            alpha = (-softplus(rate[t, h]).clamp(min=1e-4) * dt).exp()
            share = 1 / (1 + (-trap[t, h]).exp())
            angles[h] += dt * math.pi * torch.tanh(theta[t])
            b_t = rotated(b[t] + w["B_bias"][h], angles[h])
            c_t = rotated(c[t] + w["C_bias"][h], angles[h])

            # h_t = alpha h + (1 - lambda) dt alpha (x B^T)_{t-1} + lambda dt (x B^T)_t
            now = torch.outer(u[t, own], b_t)
            states[h] = alpha * states[h] + (1 - share) * dt * alpha * before[h] + share * dt * now
            before[h] = now
            outputs.append((states[h] @ c_t + w["D"][h] * u[t, own]) * silu(z[t, own]))
        rows.append(w["out_proj.weight"] @ torch.cat(outputs))
    return torch.stack(rows)
