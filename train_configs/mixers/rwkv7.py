"""The time mixing of RWKV-7 "Goose": a generalized delta rule (Peng et al., arXiv 2503.14456).

With row vectors, x' the previous token, and a mix m of r, w, k, v, a and g each (time mixing):

    x_r, .. = x + (x' - x) m,    r, k, v = x W,    g = sigmoid(x_g G_1) G_2
    w = exp(-exp(-1/2) sigmoid(w_0 + tanh(x_w W_1) W_2)),    a = sigmoid(a_0 + x_a A_1 A_2)
    kappa = k * xi, normalized in each head,    k~ = k * (1 + (a - 1) alpha)

Per head, with the state S [K, K], the transpose of the paper's wkv:

    S_t = (Diag(w_t) - (a_t * kappa_t)^T kappa_t) S_{t-1} + k~_t^T v_t,    o_t = r_t S_t
    y = ((GroupNorm(o) + (r (rho * k~)^T) v) * g) W_o

Left out: the value residual (v mixed with the first layer's, which a mixer does not see), channel
mixing (the block's feed-forward takes its place), initial values by layer: mixes start at 1/2, w_0
at log U(0, 1). Ranks are those of github.com/BlinkDL/RWKV-LM. Token shift is in Canon-B's place.

In a chunk that starts with S: z_i = -kappa_i S_{i-1}, b = a * kappa, and the products of decays per
channel d_ij = w_{j+1} * .. * w_i, and d_i from the chunk's start. With c_ij = kappa_i * d_{i-1,j}:

    z_i + sum_{j<i} c_ij b_j^T z_j = -(kappa_i * d_{i-1}) S - sum_{j<i} c_ij k~_j^T v_j

Shapes: B batch, T tokens, D hidden, H heads, K head dim, I = H K, N chunks of C tokens.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from canon_pretrain.model.cache import NO_CONTEXT, Context
from canon_pretrain.model.mixers import Mixer, ModelArgs

CHUNK = 16  # tokens; d_ij takes CHUNK * K numbers for each token and head
FORGET = -1000.0  # log decay at the start of a document: its exponential is exactly 0


class RWKV7(Mixer):
    """Token shift -> r, w, k, v, a, g -> delta rule -> GroupNorm, bonus and gate -> wo."""

    # a_0, xi, alpha and rho: the constants of RWKV-LM, without its ramps over channels.
    init = {
        "mix": ("constant", 0.5),
        "w_0": ("log_uniform", 1.0),
        "a_0": ("constant", -0.19),
        "xi": ("constant", 0.71),
        "alpha": ("constant", 1.02),
        "rho": ("constant", -0.04),
    }

    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        self.num_heads = args.num_heads
        inner = args.num_heads * args.head_dim

        # A mix for each of r, w, k, v, a and g, in this order, and the products of the mixed
        # inputs. W_1, W_2 are `decay`, A_1, A_2 `rate`, G_1, G_2 `gate`.
        self.mix = nn.Parameter(torch.empty(6, args.dim))
        self.wr, self.wk, self.wv = (nn.Linear(args.dim, inner, bias=False) for _ in range(3))
        self.decay = low_rank(args.dim, 2.5, nn.Tanh(), inner)
        self.rate = low_rank(args.dim, 2.5, nn.Identity(), inner)
        self.gate = low_rank(args.dim, 5.0, nn.Sigmoid(), inner)

        # Vectors of I channels.
        vectors = (nn.Parameter(torch.empty(inner)) for _ in range(5))
        self.w_0, self.a_0, self.xi, self.alpha, self.rho = vectors

        # A group for each head. RWKV-LM's eps is 64e-5, at its head dim of 64.
        self.o_norm = nn.GroupNorm(args.num_heads, inner, eps=args.head_dim * 1e-5)
        self.wo = nn.Linear(inner, args.dim, bias=False)

    def forward(self, x_BTD: Tensor, context: Context = NO_CONTEXT) -> Tensor:
        # Token shift: the token before each, zeros where there is none in the document.
        before_B1D = context.recall("token")
        if before_B1D is None:
            before_B1D = torch.zeros_like(x_BTD[:, :1])
        context.keep("token", x_BTD[:, -1:])

        shifted_BTD = torch.cat((before_B1D, x_BTD[:, :-1]), dim=1)
        starts_BT = context.starts(x_BTD.shape[1])
        if starts_BT is not None:
            shifted_BTD = shifted_BTD.masked_fill(starts_BT[..., None], 0.0)

        # x + (x' - x) m, for each mix.
        x_r, x_w, x_k, x_v, x_a, x_g = (torch.lerp(x_BTD, shifted_BTD, m) for m in self.mix)

        # r, k, v, a and the log decays, [B, T, I], in float32, or float64 if x is. log w is between
        # -exp(-1/2) and 0.
        dtype = torch.promote_types(x_BTD.dtype, torch.float32)
        r, k, v = (part.to(dtype) for part in (self.wr(x_r), self.wk(x_k), self.wv(x_v)))
        a = (self.a_0.to(dtype) + self.rate(x_a)).sigmoid()
        log_w = -(torch.e**-0.5) * (self.w_0.to(dtype) + self.decay(x_w)).sigmoid()

        # kappa is of the plain k, which then becomes k~. The bonus, by head [B, T, H, 1], is what
        # the token reads of its own value besides the state.
        kappa = k * self.xi.to(dtype)
        k = k * (1 + (a - 1) * self.alpha.to(dtype))
        bonus = (r * self.rho.to(dtype) * k).unflatten(-1, (self.num_heads, -1)).sum(-1, True)

        # By head, [B, T, H, K]; kappa has length 1 in each.
        r, k, v, a, log_w, kappa = (
            part.unflatten(-1, (self.num_heads, -1)) for part in (r, k, v, a, log_w, kappa)
        )
        kappa = F.normalize(kappa, dim=-1)

        # A start forgets the state: nothing is left, and nothing is removed from it.
        if starts_BT is not None:
            log_w = log_w.masked_fill(starts_BT[..., None, None], FORGET)
            kappa = kappa.masked_fill(starts_BT[..., None, None], 0.0)
        o, state = delta_rule(r, k, v, log_w, kappa, a * kappa, context.recall("state"))
        context.keep("state", state)

        # y = ((GroupNorm(o) + bonus v) * g) W_o. A layer norm of each head is GroupNorm over heads.
        o = F.layer_norm(o, o.shape[3:], eps=self.o_norm.eps).flatten(2)
        o = o * self.o_norm.weight.to(dtype) + self.o_norm.bias.to(dtype)
        y_BTI = (o + (bonus * v).flatten(2)) * self.gate(x_g)
        return self.wo(y_BTI.to(x_BTD.dtype))


def low_rank(dim: int, factor: float, activation: nn.Module, out_dim: int) -> nn.Sequential:
    """Return activation(x W_1) W_2, of a rank of about `factor` sqrt(D)."""
    # a multiple of 32, and at least 32, as in RWKV-LM
    rank = max(32, 32 * round(factor * dim**0.5 / 32))
    up = nn.Linear(rank, out_dim, bias=False)
    return nn.Sequential(nn.Linear(dim, rank, bias=False), activation, up)


def delta_rule(
    r: Tensor, k: Tensor, v: Tensor, log_w: Tensor, kappa: Tensor, b: Tensor, state: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return o and the last state [B, H, K, K]; the inputs are [B, T, H, K]."""
    # Without an earlier state, it is 0.
    num_tokens = r.shape[1]
    size = min(CHUNK, num_tokens)
    if state is None:
        state = v.new_zeros(v.shape[0], v.shape[2], k.shape[3], v.shape[3])

    # Split into chunks, [N, B, H, C, K]. A padded token has log decay 0, and k, kappa and b are 0:
    # it changes no state.
    padding = (0, 0, 0, 0, 0, -num_tokens % size)
    r, k, v, log_w, kappa, b = (
        F.pad(x, padding).unflatten(1, (-1, size)).permute(1, 0, 3, 2, 4)
        for x in (r, k, v, log_w, kappa, b)
    )

    # Products of decays: d_i [N, B, H, C, K] and d_ij [N, B, H, C, C, K], i before j. Their logs
    # are differences of sums since the chunk's start. The sums are in float64: in float32, the
    # digits of weak decays would be lost after a FORGET. Above the diagonal (j > i) d_ij has no
    # meaning and is not read; the clamp keeps it from overflowing.
    since = log_w.double().cumsum(-2)
    d_i = since.to(r.dtype).exp()
    d_ij = (since[..., :, None, :] - since[..., None, :, :]).clamp(max=0).to(r.dtype).exp()

    # kappa_i reads the state before token i decays it: d_{i-1} and d_{i-1,j}, rows moved down by
    # one. No decay comes before the first token; it has no j before it either.
    before_i = F.pad(d_i[..., :-1, :], (0, 0, 1, 0), value=1.0)
    before_ij = F.pad(d_ij[..., :-1, :, :], (0, 0, 0, 0, 1, 0))

    # What does not depend on the states, of all chunks at once. The equation at the top is
    # (I + L) z = -(M v + (kappa * d_{i-1}) S), with L_ij = c_ij b_j^T and M_ij = c_ij k~_j^T for
    # j < i. The solver reads `system` below its diagonal only, which is L. It is solved for M v and
    # for kappa * d_{i-1}: z = -(from_v + from_state S).
    system = products(kappa, before_ij, b)
    right = torch.cat((products(kappa, before_ij, k).tril(-1) @ v, before_i * kappa), dim=-1)
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    from_v, from_state = solved.chunk(2, dim=-1)

    # What token i reads of the values, [.., C, K], and of z by its scores [.., C, C], its own token
    # included; and what reaches the end of the chunk, where d_ij has the last i.
    read_of_v = products(r, d_ij, k).tril() @ v
    scores_of_z = products(r, d_ij, b).tril()
    b_to_end = d_ij[..., -1, :, :] * b
    added = (d_ij[..., -1, :, :] * k).mT @ v

    # Chunk after chunk: z of the chunk [B, H, C, K], its outputs, and the state at its end.
    outputs = []
    for n in range(r.shape[0]):
        z = -(from_v[n] + from_state[n] @ state)
        outputs.append(read_of_v[n] + scores_of_z[n] @ z + (d_i[n] * r[n]) @ state)
        state = d_i[n, ..., -1, :, None] * state + b_to_end[n].mT @ z + added[n]

    # [B, T, H, K], without the padding of the last chunk.
    return torch.cat(outputs, dim=2)[:, :, :num_tokens].transpose(1, 2), state


def products(x: Tensor, decay: Tensor, y: Tensor) -> Tensor:
    """Return sum_K x_i decay_ij y_j, [.., C, C]."""
    # decay_ij y_j is [.., C, C, K]; the product with x_i sums over K.
    return ((decay * y[..., None, :, :]) @ x[..., None]).squeeze(-1)
