"""The Canon formula in plain torch: what every other backend of `kernels/` is compared with.

Under torch.compile its shifts fuse with the norm before and the activation after them; depthwise
`F.conv1d` stays an external call.

Shapes: B batch, T tokens, C channels, K taps of the kernel, P = K - 1, N = P + T.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def canon_reference(
    x_BTC: Tensor,
    weight_C1K: Tensor,
    *,
    residual: bool,
    activation: bool,
    segments_BN: Tensor | None = None,
) -> Tensor:
    """Mix every token with its K - 1 predecessors, each channel by itself.

        y_t = [x_t +] act(sum_{j=0..K-1} W[:, 0, K-1-j] * x_{t-j}),    x_{<0} = 0

    Paper section 4, equation 4.1 (K = 4); `residual=False` is Canon(no-res). `activation` puts silu
    on the convolution's output, so the residual stays linear (Figure 10, rows "Act").

    `segments_BN` are the segments of the tokens and of the P places before them: a token is mixed
    with those of its own segment only. None if there is one segment.

    The weight is in depthwise `nn.Conv1d` layout: the last tap multiplies the current token.
    Sums are taken in float32 (float64 for float64 input); the result is y_BTC in x's dtype.
    Raises ValueError where the shapes do not fit.
    """
    if x_BTC.ndim != 3 or weight_C1K.ndim != 3 or weight_C1K.shape[:2] != (x_BTC.shape[2], 1):
        raise ValueError(
            f"Canon got x of shape {tuple(x_BTC.shape)} and a weight of shape "
            f"{tuple(weight_C1K.shape)}; expected [B, T, C] and [C, 1, K] with the same C."
        )
    num_tokens, num_taps = x_BTC.shape[1], weight_C1K.shape[2]
    sum_dtype = torch.promote_types(x_BTC.dtype, torch.float32)
    x = x_BTC.to(sum_dtype)
    taps_CK = weight_C1K[:, 0].to(sum_dtype)
    # One pad for all taps: a pad per tap saves a copy each for backward, and ran 1.75x slower
    # (compiled, forward and backward, float32, C 512, 2 CPU cores).
    padded = F.pad(x, (0, 0, num_taps - 1, 0))
    y = taps_CK[:, -1] * x
    for j in range(1, num_taps):
        start = num_taps - 1 - j  # where x_{t-j} begins in the padded sequence
        shifted = padded[:, start : start + num_tokens]
        if segments_BN is not None:
            own = segments_BN[:, num_taps - 1 :] == segments_BN[:, start : start + num_tokens]
            shifted = shifted * own[..., None]
        y = y + taps_CK[:, num_taps - 1 - j] * shifted
    if activation:
        y = F.silu(y)
    if residual:
        y = x + y
    return y.to(x_BTC.dtype)
