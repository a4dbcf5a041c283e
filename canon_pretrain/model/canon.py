"""The Canon layer as a module: the weight and its options; the arithmetic is in `kernels/`.

Sits at up to four sites of a block: A before attention, B on q, k and v, C before the feed-forward,
D on its inner projections (paper, section 4).

Shapes: B batch, T tokens, C channels, K taps of the kernel, N = K - 1 + T.
"""

import torch
from torch import Tensor, nn

from canon_pretrain.kernels.reference import canon_reference
from canon_pretrain.model.args import ModelArgs
from canon_pretrain.model.cache import LayerCache


class Canon(nn.Module):
    """The Canon layer of `site`, a letter of args.canon_set, with the options of `args`.

    `weight` is [C, 1, K], the layout of a depthwise `nn.Conv1d`: the last tap is the current token.
    It asks for no gradient in cst-Canon.
    """

    def __init__(self, args: ModelArgs, site: str) -> None:
        super().__init__()
        self.site = site
        self.residual = args.canon_residual
        self.activation = args.canon_activation
        shape = (args.canon_channels[site], 1, args.canon_kernel)
        self.weight = nn.Parameter(torch.empty(shape), requires_grad=args.canon_trainable)
        nn.init.uniform_(self.weight, -args.canon_bound, args.canon_bound)

    def forward(
        self, x_BTC: Tensor, near_BN: Tensor | None = None, cache: LayerCache | None = None
    ) -> Tensor:
        """Return y_BTC of equation 4.1, in the dtype of x.

        `near_BN` (int32): the segments of the tokens and of the K - 1 places before them, where a
        row has several. `cache`: this block's memory, whose last inputs come before x.
        """
        before = None
        if cache is not None:
            before = cache.before(self.site, x_BTC, self.weight.shape[2] - 1)
        return canon_reference(
            x_BTC,
            self.weight,
            residual=self.residual,
            activation=self.activation,
            before_BPC=before,
            segments_BN=near_BN,
        )


def canon_at(site: str, args: ModelArgs) -> Canon | None:
    """Return the Canon layer of `site` ("A" to "D"), or None where `args` leave it out."""
    return Canon(args, site) if site in args.canon_set else None
