"""The Canon layer as a module: the weight and its options; the arithmetic is in `kernels/`.

Sits at up to four sites of a block: A before attention, B on q, k and v, C before the feed-forward,
D on its inner projections (paper, section 4).

Shapes: B batch, T tokens, C channels, K taps of the kernel, N = K - 1 + T.
"""

from typing import Any

import torch
from torch import Tensor, nn

from canon_pretrain.kernels.backends import (
    TRITON_TAPS,
    canon,
    canon_gate,
    choose,
    ffn_activation,
    triton_kernels,
)
from canon_pretrain.kernels.decode_step import CanonMemory
from canon_pretrain.model.args import ModelArgs
from canon_pretrain.model.cache import LayerCache


class Canon(nn.Module):
    """The Canon layer of `site`, a letter of args.canon_set, with the options of `args`.

    `weight` is [C, 1, K], the layout of a depthwise `nn.Conv1d`: the last tap is the current token.
    It asks for no gradient in cst-Canon. `backend`: see `kernels/backends.py`.
    """

    def __init__(self, args: ModelArgs, site: str, backend: str = "auto") -> None:
        super().__init__()
        # what a backend can't take goes to `compiled`, as in kernels/backends.py
        too_wide = backend == "triton" and args.canon_kernel > TRITON_TAPS
        self.site, self.backend = site, "compiled" if too_wide else backend
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
        row has several. `cache`: this block's memory of the tokens before x; it is added to.
        """
        if cache is not None:
            return self._read((x_BTC,), near_BN, cache)[0]
        return self._apply_to(x_BTC, self.weight, near_BN)

    def _read(
        self, parts: tuple[Tensor, ...], near_BN: Tensor | None, cache: LayerCache
    ) -> tuple[Tensor, ...]:
        memory = cache.canon.get(self.site)
        if memory is None:
            options = {"residual": self.residual, "activation": self.activation}
            memory = cache.canon[self.site] = CanonMemory(parts[0], self.weight, **options)
        return memory.read(parts, self.weight, near_BN, self.backend)

    def after_norm(
        self,
        norm: nn.RMSNorm | nn.LayerNorm,
        h_BTD: Tensor,
        added_BTD: Tensor | None = None,
        near_BN: Tensor | None = None,
        cache: LayerCache | None = None,
        readers: int = 1,
    ) -> tuple[Tensor, Tensor | tuple[Tensor, ...]]:
        """Return h + added and Canon(norm(h + added)), [B, T, D]: the block goes on with both.

        In one kernel, where the backend has one (for RMSNorm). It adds up their gradients too, and
        gives each of the `readers` a result of its own for that: a tuple (`for_readers`).
        """
        fused = triton_kernels(self.backend, h_BTD) if cache is None else None
        if fused is None or isinstance(norm, nn.LayerNorm):
            h_BTD = h_BTD if added_BTD is None else h_BTD + added_BTD
            return h_BTD, self(norm(h_BTD), near_BN, cache)
        options = self._options(near_BN) | {"added_BTD": added_BTD, "readers": readers}
        h_BTD, *x_BTD = fused.norm_canon_stream_triton(
            h_BTD, norm.weight, self.weight, eps=norm.eps, **options
        )
        return h_BTD, tuple(x_BTD)

    def _options(self, near_BN: Tensor | None) -> dict[str, Any]:
        traced = torch.compiler.is_compiling() and choose(self.backend) == "compiled"
        if near_BN is not None and traced:
            # Only whether two are equal counts. A comparison that all sites of a block share would
            # be far from some of them, and for those torch's partitioner saves every shifted
            # product of it (float32, one a tap) instead of making it anew in backward.
            near_BN = near_BN + ord(self.site)
        return {
            "residual": self.residual,
            "activation": self.activation,
            "segments_BN": near_BN,
        }

    def _apply_to(self, x_BTC: Tensor, weight_C1K: Tensor, near_BN: Tensor | None) -> Tensor:
        return canon(x_BTC, weight_C1K, **self._options(near_BN), backend=self.backend)


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
        if cache is not None:
            return self._read(parts, near_BN, cache)
        weights = self.weight.split([part.shape[-1] for part in parts])
        return tuple(
            self._apply_to(part, weight, near_BN)
            for part, weight in zip(parts, weights, strict=True)
        )

    def has_heads(self, x_BTC: Tensor) -> bool:
        """Whether the backend has a kernel that `heads` can call for such tensors."""
        return triton_kernels(self.backend, x_BTC) is not None

    def heads(
        self, parts: tuple[Tensor, Tensor, Tensor], near_BN: Tensor | None, **neighbours: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return q_BTHK, k_BTGK and v_BTGK with their `neighbours`, QK-norm and rotation, in one.

        Only where `has_heads`. `neighbours`: as `canon_qkv_triton` names them.
        """
        fused = triton_kernels(self.backend, parts[0])
        mixed: tuple[Tensor, Tensor, Tensor] = fused.canon_qkv_triton(
            *parts, self.weight, **self._options(near_BN), **neighbours
        )
        return mixed


class CanonGate(CanonOfParts):
    """Canon-D of a gated feed-forward together with the gate behind it.

    One module: its forward is what hooks (a profile's, an offloading library's) take for Canon-D.
    """

    def __init__(self, args: ModelArgs, backend: str = "auto") -> None:
        super().__init__(args, "D", backend)
        self.relu2 = args.ffn_activation == "relu2"

    def forward(  # type: ignore[override]
        self,
        parts: tuple[Tensor, Tensor],
        near_BN: Tensor | None = None,
        cache: LayerCache | None = None,
    ) -> Tensor:
        """Return act(Canon(gate)) * Canon(up), [B, T, F], of the parts (gate, up).

        act is silu, or relu squared. See `Canon.forward`.
        """
        if cache is not None:
            gate_BTF, up_BTF = self._read(parts, near_BN, cache)
            return ffn_activation(gate_BTF, self.relu2) * up_BTF
        options = self._options(near_BN) | {"relu2": self.relu2, "backend": self.backend}
        return canon_gate(*parts, self.weight, **options)


def for_readers(x_BTD: Tensor | tuple[Tensor, ...], readers: int) -> tuple[Tensor, ...]:
    """x for each of those that read it: itself, or the results that `Canon.after_norm` made."""
    return x_BTD if isinstance(x_BTD, tuple) else (x_BTD,) * readers


def canon_at(site: str, args: ModelArgs, backend: str = "auto") -> Canon | None:
    """Return the Canon layer of `site` ("A" to "D"), or None where `args` leave it out."""
    return Canon(args, site, backend) if site in args.canon_set else None


def canon_of_parts_at(site: str, args: ModelArgs, backend: str = "auto") -> CanonOfParts | None:
    """`canon_at` for a site that holds several tensors side by side."""
    return CanonOfParts(args, site, backend) if site in args.canon_set else None


def canon_gate_at(args: ModelArgs, backend: str = "auto") -> CanonGate | None:
    """`canon_at` for site D of a gated feed-forward."""
    return CanonGate(args, backend) if "D" in args.canon_set else None
