"""The Canon layer as a module: the weight and its options; the arithmetic is in `kernels/`.

Sits at up to four sites of a block: A before attention, B on q, k and v, C before the feed-forward,
D on its inner projections (paper, section 4).

Shapes: B batch, T tokens, C channels, K taps of the kernel, N = K - 1 + T.
"""

import torch
from torch import Tensor, nn

from canon_pretrain.kernels.backends import canon
from canon_pretrain.model.args import ModelArgs
from canon_pretrain.model.cache import LayerCache


class Canon(nn.Module):
    """The Canon layer of `site`, a letter of args.canon_set, with the options of `args`.

    `weight` is [C, 1, K], the layout of a depthwise `nn.Conv1d`: the last tap is the current token.
    It asks for no gradient in cst-Canon. `backend`: see `kernels/backends.py`.
    """

    def __init__(self, args: ModelArgs, site: str, backend: str = "auto") -> None:
        super().__init__()
        self.site, self.backend = site, backend
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
        return self._apply_to(x_BTC, self.weight, near_BN, before)

    def _apply_to(
        self,
        x_BTC: Tensor,
        weight_C1K: Tensor,
        near_BN: Tensor | None,
        before_BPC: Tensor | None = None,
    ) -> Tensor:
        return canon(
            x_BTC,
            weight_C1K,
            residual=self.residual,
            activation=self.activation,
            before_BPC=before_BPC,
            segments_BN=near_BN,
            backend=self.backend,
        )


class CanonOfParts(Canon):
    """One Canon layer over several tensors side by side: [q|k|v] at B, [gate|up] at D.

    Channels do not mix, so each part is mixed by its own rows of the weight: the concatenation that
    the paper writes would be one more copy of everything.
    """

    def forward(  # type: ignore[override]
        self,
        parts: tuple[Tensor, ...],
        near_BN: Tensor | None = None,
        cache: LayerCache | None = None,
    ) -> tuple[Tensor, ...]:
        """Return y_BTC of each part; see `Canon.forward`."""
        sizes = [part.shape[-1] for part in parts]
        if cache is not None:  # few tokens: fewer calls count for more than a small copy
            return super().forward(torch.cat(parts, dim=-1), near_BN, cache).split(sizes, dim=-1)
        weights = self.weight.split(sizes)
        return tuple(
            self._apply_to(part, weight, near_BN)
            for part, weight in zip(parts, weights, strict=True)
        )


def canon_at(site: str, args: ModelArgs, backend: str = "auto") -> Canon | None:
    """Return the Canon layer of `site` ("A" to "D"), or None where `args` leave it out."""
    return Canon(args, site, backend) if site in args.canon_set else None


def canon_of_parts_at(site: str, args: ModelArgs, backend: str = "auto") -> CanonOfParts | None:
    """`canon_at` for a site that holds several tensors side by side."""
    return CanonOfParts(args, site, backend) if site in args.canon_set else None
