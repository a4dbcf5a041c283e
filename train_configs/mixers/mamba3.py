"""Mamba-3's mixer: a trapezoidal rule and rotating states (Lahoti et al., ICLR 2026, 2603.15569).

Per head, with the state h [N, P], the input x [P], and B and C [N] after their rotations (the
exponential-trapezoidal recurrence; complex states as a rotary embedding that depends on the data):

    h_t = alpha_t h_{t-1} + beta_t B_{t-1} x_{t-1}^T + gamma_t B_t x_t^T,    y_t = h_t^T C_t + D x_t
    alpha = exp(dt A),    beta = (1 - lambda) dt alpha,    gamma = lambda dt
    A = -softplus(a) < -1e-4,    dt = softplus(d + dt_bias),    lambda = sigmoid(l)

    angle_t = angle_{t-1} + dt pi tanh(theta),    B = R(angle) (RMSNorm(B) + B_bias), and so C
    out = W (y * silu(z)),    [z, x, B, C, d, a, l, theta] = W_in u

B, C and theta are shared by the heads, dt and the biases are not. As in the authors' code
(github.com/state-spaces/mamba, modules/mamba3.py, and the step reference of its kernel's test),
one half of the N dims rotates, in pairs (0, 1), (2, 3), .., and there is no norm after y. P is
expand_v D / H (the paper: expand_v = 2) and N is state_dim. Canon-B, if canon_set has it, is over
[x, B, C], where Mamba-2 has its convolution; Mamba-3 has none. Left out: MIMO (rank above 1).

The sum of two gated linear attentions, each in chunks: keys B_t with values gamma_t x_t, and keys
B_{t-1} with values beta_t x_{t-1}. Where a document starts, alpha = beta = 0; the angle goes on,
since only differences of angles matter.

Shapes: B batch, T tokens, D hidden, H heads, P head dim, N state, R = N / 4 angles, I = H P.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from canon_pretrain.kernels.gla import chunked_gla
from canon_pretrain.model.cache import NO_CONTEXT, Context
from canon_pretrain.model.canon import make_canon
from canon_pretrain.model.mixers import Mixer, ModelArgs

SMALLEST_RATE = 1e-4  # of -A


class Mamba3(Mixer):
    """[z|x|B|C|dt|A|lambda|theta] = in_proj -> recurrence -> times silu(z) -> out_proj."""

    init = {
        "dt_bias": ("step", 0.0),
        "B_bias": ("constant", 1.0),
        "C_bias": ("constant", 1.0),
        "D": ("constant", 1.0),
    }

    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        self.num_heads = args.num_heads

        # Widths of in_proj's outputs: z; x, B and C, which Canon-B mixes; and dt, a, lambda by
        # head, with theta for one of every 4 states: half of the N dims, in pairs.
        inner = args.num_heads * args.value_dim
        num_states = args.state_dim
        self.ssm_widths = (inner, num_states, num_states)
        self.head_widths = (args.num_heads, args.num_heads, args.num_heads, num_states // 4)
        widths = (inner, *self.ssm_widths, *self.head_widths)
        self.in_proj = nn.Linear(args.dim, sum(widths), bias=False)
        self.canon_b = make_canon("B", args, widths=self.ssm_widths)

        # Biases and D are by head; the norms of B and C are not.
        self.dt_bias = nn.Parameter(torch.empty(args.num_heads))
        self.B_norm = nn.RMSNorm(num_states, eps=args.norm_eps)
        self.C_norm = nn.RMSNorm(num_states, eps=args.norm_eps)
        self.B_bias = nn.Parameter(torch.empty(args.num_heads, num_states))
        self.C_bias = nn.Parameter(torch.empty(args.num_heads, num_states))
        self.D = nn.Parameter(torch.empty(args.num_heads))
        self.out_proj = nn.Linear(inner, args.dim, bias=False)

    def forward(self, x_BTD: Tensor, context: Context = NO_CONTEXT) -> Tensor:
        # The projections; z is the gate, `heads` is [dt|a|lambda|theta].
        inner = self.ssm_widths[0]
        z_BTI, *parts, heads = self.in_proj(x_BTD).split(
            (inner, *self.ssm_widths, sum(self.head_widths)), dim=-1
        )
        if self.canon_b is not None:
            parts = self.canon_b(tuple(parts), context, x_BTD)

        # B and C are normalized before their biases and rotations.
        x_BTI, b_BTN, c_BTN = parts
        b_BTN = self.B_norm(b_BTN)
        c_BTN = self.C_norm(c_BTN)

        # Steps, rates and angles, in float32, or float64 if x is.
        dtype = torch.promote_types(x_BTD.dtype, torch.float32)
        x_BTHP = x_BTI.to(dtype).unflatten(-1, (self.num_heads, -1))
        dt, rate, lambda_, theta = heads.to(dtype).split(self.head_widths, dim=-1)
        dt_BTH = F.softplus(dt + self.dt_bias.to(dtype))
        log_alpha_BTH = -F.softplus(rate).clamp(min=SMALLEST_RATE) * dt_BTH
        lambda_BTH = lambda_.sigmoid()

        # B and C of each head: with its bias, rotated by the sum of angles so far. theta is shared
        # by the heads, [B, T, R]; dt makes the angles different.
        angle_BTHR = dt_BTH[..., None] * math.pi * theta.tanh()[:, :, None]
        angle_BTHR = self.total_angle(angle_BTHR, context)
        b_BTHN = rotate(b_BTN.to(dtype)[:, :, None] + self.B_bias.to(dtype), angle_BTHR)
        c_BTHN = rotate(c_BTN.to(dtype)[:, :, None] + self.C_bias.to(dtype), angle_BTHR)

        # The factors of a token's own input and of the one before it. At a document's start there
        # is none before: beta = 0.
        starts_BT = context.starts(x_BTD.shape[1])
        gamma_BTH = lambda_BTH * dt_BTH
        beta_BTH = (1 - lambda_BTH) * dt_BTH * log_alpha_BTH.exp()
        if starts_BT is not None:
            beta_BTH = beta_BTH.masked_fill(starts_BT[..., None], 0.0)
        x_before = before(x_BTHP, "x", context)
        b_before = before(b_BTHN, "B", context)

        # h is a sum of two states, one per term of the rule: gated linear attentions with the same
        # queries C and decays, by head and therefore the same for all N. The rule is linear in h:
        # the first continues from the whole earlier h, the second from 0, and the sum is kept.
        log_decay = log_alpha_BTH[..., None].expand_as(b_BTHN)
        own = (c_BTHN, b_BTHN, gamma_BTH[..., None] * x_BTHP, log_decay, 1.0)
        earlier = (c_BTHN, b_before, beta_BTH[..., None] * x_before, log_decay, 1.0)
        state = context.recall("state")
        y_BTHP, state = chunked_gla(*own, state=state, starts_BT=starts_BT)
        y_earlier, state_earlier = chunked_gla(*earlier, starts_BT=starts_BT)
        context.keep("state", state + state_earlier)

        # y = h^T C + D x, gated by silu(z).
        y_BTHP = y_BTHP + y_earlier + self.D.to(dtype)[:, None] * x_BTHP
        y_BTI = y_BTHP.flatten(2) * F.silu(z_BTI.to(dtype))
        return self.out_proj(y_BTI.to(x_BTD.dtype))

    def total_angle(self, change_BTHR: Tensor, context: Context) -> Tensor:
        """Return the sums of changes up to each token, below 2 pi; keep the last one."""
        # Sums in float64, reduced to one turn before they are rounded: an angle of thousands of
        # turns would have few correct digits in float32.
        angle_BTHR = change_BTHR.double().cumsum(1)
        before_BHR = context.recall("angle")
        if before_BHR is not None:
            angle_BTHR = angle_BTHR + before_BHR[:, None]
        angle_BTHR = (angle_BTHR % (2 * math.pi)).to(change_BTHR.dtype)
        context.keep("angle", angle_BTHR[:, -1])
        return angle_BTHR


def before(x_BTHX: Tensor, name: str, context: Context) -> Tensor:
    """Return the x of the token before each, zeros before the first; keep the last one."""
    first_B1HX = context.recall(name)
    if first_B1HX is None:
        first_B1HX = torch.zeros_like(x_BTHX[:, :1])
    context.keep(name, x_BTHX[:, -1:])
    return torch.cat((first_B1HX, x_BTHX[:, :-1]), dim=1)


def rotate(x_BTHN: Tensor, angle_BTHR: Tensor) -> Tensor:
    """Return x with its first R pairs of dims (0, 1), (2, 3), .. rotated."""
    # (p, q) -> (p cos - q sin, p sin + q cos) for each pair; the other dims stay as they are.
    num_rotated = 2 * angle_BTHR.shape[-1]
    p_BTHR, q_BTHR = x_BTHN[..., :num_rotated].unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = angle_BTHR.cos(), angle_BTHR.sin()
    rotated = torch.stack((p_BTHR * cos - q_BTHR * sin, p_BTHR * sin + q_BTHR * cos), dim=-1)
    return torch.cat((rotated.flatten(-2), x_BTHN[..., num_rotated:]), dim=-1)
