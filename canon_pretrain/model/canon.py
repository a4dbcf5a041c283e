"""The Canon layer as a module: the weight and its options; the arithmetic is in `kernels/`.

Sits at up to four sites of a block: A before attention, B on q, k and v, C before the feed-forward,
D on its gate and up projections (paper, section 4).

Shapes: B batch, T tokens, C channels, K taps of the kernel.
"""

import torch
from torch import Tensor, nn

from canon_pretrain.kernels.reference import canon_reference
from canon_pretrain.model.args import ModelArgs


class Canon(nn.Module):
    """Canon over `channels` channels, with kernel, residual and activation from `args`.

    `weight` is [C, 1, K], the layout of a depthwise `nn.Conv1d`: the last tap is the current token.
    """

    def __init__(self, args: ModelArgs, channels: int) -> None:
        super().__init__()
        self.residual = args.canon_residual
        self.activation = args.canon_activation
        self.weight = nn.Parameter(torch.empty(channels, 1, args.canon_kernel))
        nn.init.uniform_(self.weight, -args.canon_bound, args.canon_bound)

    def forward(self, x_BTC: Tensor) -> Tensor:
        """Return y_BTC of equation 4.1, in the dtype of x."""
        return canon_reference(
            x_BTC, self.weight, residual=self.residual, activation=self.activation
        )


def canon_at(site: str, args: ModelArgs, channels: int) -> Canon | None:
    """Return the Canon layer of `site` ("A" to "D"), or None where `args` leave it out."""
    return Canon(args, channels) if site in args.canon_set else None
