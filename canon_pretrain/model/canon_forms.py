"""Canon as a module by itself: at each site's widths, alone and with what stands beside it.

What `bench canon` times, and what the start-up check compares with float64. All is made of the
model's own modules, so that a backend with a kernel for the two together takes it here as in a
training step: the norm before A and C, the rotation after B, the activation after D. Where it has
none, torch.compile fuses what it can.
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
from canon_pretrain.model.transformer import norm_of


@dataclass(frozen=True)
class Form:
    """A module of activations [B, T, C] of `widths`, and near_BN or None; it returns a tuple.

    `moved`: how many values of a token forward and backward must read or write at least.
    """

    name: str
    widths: tuple[int, ...]
    moved: tuple[int, int]
    build: Callable[[str], nn.Module]
    """From a backend's name."""

    def make(self, backend: str, device_type: str | None = None) -> nn.Module:
        """The module by `backend`. Raises UserError where that can't be had."""
        check_canon_backend(backend, device_type)
        return self.build(backend)


def forms(args: ModelArgs) -> list[Form]:
    """Those of a gated model of `args`; B has a neighbour where positions are rotary."""
    args = dataclasses.replace(args, canon_set="ABCD")
    qkv, ffn = args.qkv_dims, (args.ffn_dim, args.ffn_dim)
    found = [_alone("A, C", "A", (args.dim,), args), _alone("B", "B", qkv, args)]
    found += [_alone("D", "D", ffn, args), _norm("norm + A, C", args, "A")]
    if args.rope_dim:
        found.append(_heads(args))
    return [*found, _gate(args)]


def forms_of(args: ModelArgs) -> list[Form]:
    """What a training step of `args` computes at its Canon sites, as model/transformer.py does."""
    found = []
    if "A" in args.canon_set:
        found.append(_norm("norm + A", args, "A", readers=3))
    if "C" in args.canon_set:
        readers = 2 if args.ffn == "gated" else 1
        found.append(_norm("norm + C", args, "C", adds=True, readers=readers))
    if "B" in args.canon_set:
        found.append(_heads(args))
    if "D" in args.canon_set:
        standard = _alone("D", "D", (args.ffn_dim,), args)
        found.append(_gate(args) if args.ffn == "gated" else standard)
    return found


def _alone(name: str, site: str, widths: tuple[int, ...], args: ModelArgs) -> Form:
    moved = (2 * sum(widths), 3 * sum(widths))
    return Form(name, widths, moved, lambda backend: _Parts(args, site, backend))


def _norm(name: str, args: ModelArgs, site: str, adds: bool = False, readers: int = 1) -> Form:
    # forward reads both and writes both; backward reads their gradients and h, and writes dh
    moved = (4 * args.dim, 4 * args.dim)

    def build(backend: str) -> nn.Module:
        return _Norm(args, site, backend, adds=adds, readers=readers)

    return Form(name, (args.dim,) * 2, moved, build)


def _heads(args: ModelArgs) -> Form:
    moved = (2 * sum(args.qkv_dims), 3 * sum(args.qkv_dims))
    name = "B + rotation" if args.rope_dim else "B + heads"
    return Form(name, args.qkv_dims, moved, lambda backend: _Heads(args, backend))


def _gate(args: ModelArgs) -> Form:
    moved = (3 * args.ffn_dim, 5 * args.ffn_dim)
    return Form("D + activation", (args.ffn_dim,) * 2, moved, lambda name: _Gate(args, name))


class _Parts(nn.Module):
    def __init__(self, args: ModelArgs, site: str, backend: str) -> None:
        super().__init__()
        self.canon = CanonOfParts(args, site, backend)

    def forward(self, *parts: Tensor, near_BN: Tensor | None = None) -> tuple[Tensor, ...]:
        mixed: tuple[Tensor, ...] = self.canon(parts, near_BN)
        return mixed


class _Norm(nn.Module):
    def __init__(
        self, args: ModelArgs, site: str, backend: str, *, adds: bool = False, readers: int = 1
    ) -> None:
        super().__init__()
        self.norm = norm_of(args)
        self.canon = Canon(args, site, backend)
        self.adds, self.readers = adds, readers

    def forward(
        self, h_BTD: Tensor, added_BTD: Tensor, near_BN: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        # the residual stream goes on, and its gradient meets the norm's
        added = added_BTD if self.adds else None
        h_BTD, x_BTD = self.canon.after_norm(self.norm, h_BTD, added, near_BN, readers=self.readers)
        h_BTD = h_BTD if self.adds else h_BTD + added_BTD
        return h_BTD, *for_readers(x_BTD, self.readers)


class _Heads(Attention):
    """What stands between attention's projections and its softmax."""

    def __init__(self, args: ModelArgs, backend: str) -> None:
        super().__init__(args, Rope(args) if args.rope_dim else None, Attend(args), backend)
        del self.wq, self.wk, self.wv, self.wo

    def forward(  # type: ignore[override]
        self, q: Tensor, k: Tensor, v: Tensor, near_BN: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        return self._heads_at_once(q, k, v, near_BN) or self._heads(q, k, v, near_BN, None)


class _Gate(nn.Module):
    def __init__(self, args: ModelArgs, backend: str) -> None:
        super().__init__()
        self.canon = CanonGate(args, backend)

    def forward(
        self, gate_BTF: Tensor, up_BTF: Tensor, near_BN: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        return (self.canon((gate_BTF, up_BTF), near_BN),)
