"""The smallest mixer: each channel is a decaying average of the values so far.

h_t = a h_{t-1} + (1 - a) v_t and y_t = W_o h_t, with v = W_v x and a in (0, 1) per channel.

Shapes: B batch, T tokens, D hidden.
"""

import torch
from torch import Tensor, nn

from canon_pretrain.model.cache import NO_CONTEXT, Context
from canon_pretrain.model.mixers import Mixer, ModelArgs


class DecayingAverage(Mixer):
    """y = W_o average(W_v x)."""

    init = {"decay": ("uniform", 4.0)}  # U(-4, 4): sigmoid gives averages of 1 to 56 tokens

    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        self.wv = nn.Linear(args.dim, args.dim, bias=False)
        self.wo = nn.Linear(args.dim, args.dim, bias=False)
        self.decay = nn.Parameter(torch.empty(args.dim))

    def forward(self, x_BTD: Tensor, context: Context = NO_CONTEXT) -> Tensor:
        # What does not depend on earlier tokens, for all tokens at once.
        a_D = self.decay.sigmoid()
        v_BTD = (1 - a_D) * self.wv(x_BTD)
        starts_BT = context.starts(x_BTD.shape[1])

        # The average so far: after the tokens before these, or empty.
        h_BD = context.recall("average")
        if h_BD is None:
            h_BD = torch.zeros_like(v_BTD[:, 0])

        # Token by token: plain, but slow on long texts. The mixers of papers next to this one loop
        # over chunks.
        averages = []
        for t in range(x_BTD.shape[1]):
            if starts_BT is not None:  # a document, or a row after its padding, starts here
                h_BD = h_BD.masked_fill(starts_BT[:, t, None], 0.0)
            h_BD = a_D * h_BD + v_BTD[:, t]
            averages.append(h_BD)

        # For the next tokens of these rows, in generation.
        context.keep("average", h_BD)
        return self.wo(torch.stack(averages, dim=1))
