"""Kimi Delta Attention: the delta rule with a decay of each channel (Kimi Linear, 2510.26692).

Per head, with the state S [K, V], column vectors q, k, v, and a in (0, 1)^K (equation 1):

    S_t = (I - b_t k_t k_t^T) Diag(a_t) S_{t-1} + b_t k_t v_t^T,    o_t = S_t^T q_t / sqrt(K)

    q, k = L2Norm(Swish(ShortConv(W x))),    v = Swish(ShortConv(W x)),    b = sigmoid(W_b x)
    log a = -exp(A) softplus(W_up W_down x + dt_bias)
    y = W_o (sigmoid(G_up G_down x) * RMSNorm(o))

The low-rank products have V channels inside. The parametrization of a, the factor 1 / sqrt(K) and
the initial values are those of flash-linear-attention's `KimiDeltaAttention` and of transformers'
`KimiLinearDeltaAttention`, which this equals. The short convolution is Canon-B if canon_set has
it, else the native one with mixer_conv = true, else there is none. K and V are expand_k D / H and
expand_v D / H. Left out: grouped values, and a step size b up to 2.

In a chunk that starts with S, z_i = v_i - k_i^T (decayed state) is what the state gets wrong about
v_i. With d_ij = a_{j+1} * .. * a_i per channel, and d_i from the chunk's start:

    z_i + sum_{j<i} (k_i^T Diag(d_ij) k_j) b_j z_j = v_i - (d_i * k_i)^T S

d_ij is a tensor [C, C, K], so that no exponential is above 1; chunks are short.

Shapes: B batch, T tokens, D hidden, H heads, K key width, V value width, N chunks of C tokens.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from canon_pretrain.model.cache import NO_CONTEXT, Context
from canon_pretrain.model.canon import ShortConv, make_canon
from canon_pretrain.model.mixers import Mixer, ModelArgs

CHUNK = 16  # tokens; d_ij takes CHUNK * K numbers for each token and head
FORGET = -1000.0
"""The log decay at the start of a document: its exponential is exactly 0."""


class KimiDeltaAttention(Mixer):
    """q, k, v -> short convolution -> delta rule -> RMSNorm times sigmoid(gate) -> wo."""

    init = {"A_log": ("log_uniform", 16.0), "dt_bias": ("step", 0.0)}

    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        self.num_heads = args.num_heads

        # Projections of x: q, k, v and b, and the low-rank ones of the decay and of the gate.
        k_dim, _, v_dim = args.mixer_parts
        rank = args.value_dim
        self.wq = nn.Linear(args.dim, k_dim, bias=False)
        self.wk = nn.Linear(args.dim, k_dim, bias=False)
        self.wv = nn.Linear(args.dim, v_dim, bias=False)
        self.wb = nn.Linear(args.dim, args.num_heads, bias=False)
        self.decay_down = nn.Linear(args.dim, rank, bias=False)
        self.decay_up = nn.Linear(rank, k_dim, bias=False)
        self.gate_down = nn.Linear(args.dim, rank, bias=False)
        self.gate_up = nn.Linear(rank, v_dim, bias=False)

        # The norm of o, one gain [V] for all heads, and the output.
        self.o_norm = nn.RMSNorm(args.value_dim, eps=args.norm_eps)
        self.wo = nn.Linear(v_dim, args.dim, bias=False)

        # A of each head and dt_bias of each key channel: how fast the state decays.
        self.A_log = nn.Parameter(torch.empty(args.num_heads))
        self.dt_bias = nn.Parameter(torch.empty(k_dim))

        # The short convolution: one of these, or none (see above).
        self.canon_b = make_canon("B", args, widths=(k_dim, k_dim, v_dim))
        self.conv1d = ShortConv(args) if args.mixer_conv else None  # with its own Swish

    def forward(self, x_BTD: Tensor, context: Context = NO_CONTEXT) -> Tensor:
        # q, k [B, T, H K] and v [B, T, H V], convolved.
        qkv = (self.wq(x_BTD), self.wk(x_BTD), self.wv(x_BTD))
        if self.canon_b is not None:
            qkv = self.canon_b(qkv, context, x_BTD)
        if self.conv1d is not None:
            qkv = self.conv1d(qkv, context)
        else:
            qkv = tuple(F.silu(part) for part in qkv)

        # By head, q and k of length 1, and q with the scores' factor. All sums from here on are in
        # float32, or float64 if x is. 1e-6 is that of flash-linear-attention's L2 norm.
        dtype = torch.promote_types(x_BTD.dtype, torch.float32)
        q, k, v = (part.to(dtype).unflatten(-1, (self.num_heads, -1)) for part in qkv)
        q = q * torch.rsqrt(q.square().sum(-1, keepdim=True) + 1e-6) * q.shape[-1] ** -0.5
        k = k * torch.rsqrt(k.square().sum(-1, keepdim=True) + 1e-6)

        # The log decays [B, T, H, K]: -exp(A) softplus(..), A by head. The state is forgotten where
        # a document starts.
        raw = self.decay_up(self.decay_down(x_BTD)).to(dtype) + self.dt_bias.to(dtype)
        log_a = -self.A_log.to(dtype).exp()[:, None] * F.softplus(raw.unflatten(-1, k.shape[2:]))
        starts_BT = context.starts(x_BTD.shape[1])
        if starts_BT is not None:
            log_a = log_a.masked_fill(starts_BT[..., None, None], FORGET)

        # The delta rule, with the step size b [B, T, H]. A decay that is as strong as FORGET is as
        # good as FORGET: the clamp bounds the sums of logs.
        b = self.wb(x_BTD).to(dtype).sigmoid()

        o, state = delta_rule(q, k, v, log_a.clamp(min=FORGET), b, context.recall("state"))
        context.keep("state", state)

        # y = W_o (gate * RMSNorm(o)); the gain is cast, so that F.rms_norm stays in `dtype`.
        gate = self.gate_up(self.gate_down(x_BTD)).to(dtype).sigmoid()
        o = F.rms_norm(o, o.shape[3:], self.o_norm.weight.to(dtype), self.o_norm.eps)
        return self.wo((o.flatten(-2) * gate).to(x_BTD.dtype))


def delta_rule(
    q: Tensor, k: Tensor, v: Tensor, log_a: Tensor, b: Tensor, state_BHKV: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return o [B, T, H, V] and the last state; q, k and log_a are [B, T, H, K], b [B, T, H]."""
    # Split into chunks: [N, B, H, C, K], [.., V] for v, [.., 1] for b.
    num_tokens = q.shape[1]
    size = min(CHUNK, num_tokens)
    if state_BHKV is None:
        state_BHKV = v.new_zeros(v.shape[0], v.shape[2], k.shape[3], v.shape[3])
    q, k, v, log_a, b = (by_chunks(x, size) for x in (q, k, v, log_a, b[..., None]))

    # Products of decays: d_i [N, B, H, C, K] and d_ij [N, B, H, C, C, K], i before j. Their logs
    # are differences of sums since the chunk's start. The sums are in float64: in float32, the
    # digits of weak decays would be lost after a FORGET. Above the diagonal (j > i) d_ij has no
    # meaning and is not read; the clamp keeps it from overflowing.
    since = log_a.double().cumsum(-2)
    d_i = since.to(q.dtype).exp()
    d_ij = (since[..., :, None, :] - since[..., None, :, :]).clamp(max=0).to(q.dtype).exp()

    # What does not depend on the states, of all chunks at once. written_ij = d_ij * b_j k_j is the
    # key with which z_j is in the state after token i. Then (I + L) z = v - (d * k) S, with L_ij =
    # k_i^T written_ij for j < i: `system` below its diagonal, which is all that the solver reads.
    # It is solved for v and for d * k: z = from_v - from_state S.
    written = d_ij * (b * k)[..., None, :, :]
    system = (written @ k[..., None]).squeeze(-1)
    from_v, from_state = torch.linalg.solve_triangular(
        system, torch.cat((v, d_i * k), dim=-1), upper=False, unitriangular=True
    ).split((v.shape[-1], k.shape[-1]), dim=-1)

    # Token i reads z_j by its score q_i^T written_ij, with its own z_i.
    scores = (written @ q[..., None]).squeeze(-1).tril()

    # Chunk after chunk: z of the chunk [B, H, C, V], its outputs, and the state at its end, where
    # d and `written` are those of its last token.
    outputs = []
    for n in range(q.shape[0]):
        z = from_v[n] - from_state[n] @ state_BHKV
        outputs.append(scores[n] @ z + (d_i[n] * q[n]) @ state_BHKV)
        state_BHKV = d_i[n, ..., -1, :, None] * state_BHKV + written[n, ..., -1, :, :].mT @ z

    # Without the padding of the last chunk.
    o_BHTV = torch.cat(outputs, dim=2)[:, :, :num_tokens]
    return o_BHTV.transpose(1, 2), state_BHKV


def by_chunks(x_BTHX: Tensor, size: int) -> Tensor:
    """Return x as [N, B, H, C, X], padded with zeros, which change no state."""
    # A padded token has log decay 0 and b = 0: the state does not decay, nothing is written to it.
    x_BTHX = F.pad(x_BTHX, (0, 0, 0, 0, 0, -x_BTHX.shape[1] % size))
    return x_BTHX.unflatten(1, (-1, size)).permute(1, 0, 3, 2, 4)
