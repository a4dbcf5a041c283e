"""Canon as a module by itself: at each site's widths, alone and with what stands beside it.

What `bench canon` times and checks. All is made of the model's own modules, so that a backend with
a kernel for the two together takes it here as in a training step: the norm before A and C, the
rotation after B, the activation after D. Where it has none, torch.compile fuses what it can.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor, nn

from canon_pretrain.kernels.backends import check_canon_backend
from canon_pretrain.model.args import ModelArgs
from canon_pretrain.model.attend import Attend
from canon_pretrain.model.attention import Attention
from canon_pretrain.model.canon import Canon, CanonGate, CanonOfParts, for_readers
from canon_pretrain.model.positions import Rope


@dataclass(frozen=True)
class Form:
    """A module of activations [B, T, C] of `widths`; it gives a tuple of such.

    `moved`: how many values of a token forward and backward must read or write at least.
    """

    name: str
    widths: tuple[int, ...]
    moved: tuple[int, int]
    build: Callable[[str], nn.Module]
    """From a backend's name."""

    def make(self, backend: str) -> nn.Module:
        """The module by `backend`. Raises UserError where that can't be had."""
        check_canon_backend(backend)
        return self.build(backend)


def forms(args: ModelArgs) -> list[Form]:
    """Those of a gated model of `args`; B has a neighbour where positions are rotary."""
    args = dataclasses.replace(args, canon_set="ABCD")
    qkv, ffn = args.qkv_dims, (args.ffn_dim, args.ffn_dim)
    found = [_alone("A, C", "A", (args.dim,), args), _alone("B", "B", qkv, args)]
    found.append(_alone("D", "D", ffn, args))
    # forward reads both and writes both; backward reads their gradients and h, and writes dh
    moved = (4 * args.dim, 4 * args.dim)
    found.append(Form("norm + A, C", (args.dim,) * 2, moved, lambda name: _Norm(args, name)))
    if args.rope_dim:
        moved = (2 * sum(qkv), 3 * sum(qkv))
        found.append(Form("B + rotation", qkv, moved, lambda name: _Heads(args, name)))
    moved = (3 * args.ffn_dim, 5 * args.ffn_dim)
    found.append(Form("D + activation", ffn, moved, lambda name: _Gate(args, name)))
    return found


def _alone(name: str, site: str, widths: tuple[int, ...], args: ModelArgs) -> Form:
    moved = (2 * sum(widths), 3 * sum(widths))
    return Form(name, widths, moved, lambda backend: _Parts(args, site, backend))


class _Parts(nn.Module):
    def __init__(self, args: ModelArgs, site: str, backend: str) -> None:
        super().__init__()
        self.canon = CanonOfParts(args, site, backend)

    def forward(self, *parts: Tensor) -> tuple[Tensor, ...]:
        mixed: tuple[Tensor, ...] = self.canon(parts)
        return mixed


class _Norm(nn.Module):
    def __init__(self, args: ModelArgs, backend: str) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(args.dim, eps=args.norm_eps)
        self.canon = Canon(args, "A", backend)

    def forward(self, h_BTD: Tensor, added_BTD: Tensor) -> tuple[Tensor, ...]:
        # the residual stream goes on, and its gradient meets the norm's
        h_BTD, x_BTD = self.canon.after_norm(self.norm, h_BTD)
        return h_BTD + added_BTD, *for_readers(x_BTD, 1)


class _Heads(Attention):
    """What stands between attention's projections and its softmax."""

    def __init__(self, args: ModelArgs, backend: str) -> None:
        super().__init__(args, Rope(args), Attend(args), backend)
        del self.wq, self.wk, self.wv, self.wo

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        return self._heads_at_once(q, k, v, None) or self._heads(q, k, v, None, None)


class _Gate(nn.Module):
    def __init__(self, args: ModelArgs, backend: str) -> None:
        super().__init__()
        self.canon = CanonGate(args, backend)

    def forward(self, gate_BTF: Tensor, up_BTF: Tensor) -> tuple[Tensor, ...]:
        return (self.canon((gate_BTF, up_BTF)),)
