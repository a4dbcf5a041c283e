"""The Canon layer as a module: the weight and its options; the arithmetic is in `kernels/`.

Up to four sites of a block have one: A before attention, B on q, k and v, C before the
feed-forward, D on its inner projections (paper, section 4).

Dynamic filters (`canon_filter`) are those of Sieberling et al., arXiv 2606.03825, in the low-rank
form of its code (github.com/OliverSieberling/dynamic-conv1d): tap i of token t and channel c is
W[c, i] + sum_r up[c, r, i] (down s_t)_r, R = 15, without nonlinearity; s is the input of the linear
layer whose outputs are mixed, and every such layer (wq, wk, wv, ..) has filters of its own. Initial
values are the code's: W as Canon's, down U(-D^-1/2, D^-1/2), up 0. Assumed, since we had the code
and not the paper's text: at A and C, which the code lacks, s is the site's own input; Mamba2's
in_proj is one layer; residual and activation are Canon's options (the code: residual, none).

Shapes: B batch, T tokens, D hidden, C channels, K taps of the kernel, R rank, N = K - 1 + T.
"""

from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from canon_pretrain.kernels.backends import (
    canon,
    canon_gate,
    ffn_activation,
    resolve_backend,
    triton_kernels,
)
from canon_pretrain.kernels.compiled import Segments
from canon_pretrain.kernels.decode_step import CanonMemory, DynamicMemory, Parts
from canon_pretrain.model.args import ModelArgs
from canon_pretrain.model.cache import LayerCache, Memory
from canon_pretrain.model.counts import DYNAMIC_RANK

Stream = Tensor | Parts


class Canon(nn.Module):
    """The Canon layer of `site`, a letter of args.canon_set.

    `weight` is [C, 1, K] as in a depthwise `nn.Conv1d`: the last tap is the current token's.
    Dynamic filters add `up` [C, R, K] and `down`, R rows for each part that the site mixes.
    """

    def __init__(self, args: ModelArgs, site: str, backend: str = "auto") -> None:
        super().__init__()
        dynamic = args.canon_filter == "dynamic"
        self.site = site
        self.backend = resolve_backend(backend, args.canon_kernel, dynamic=dynamic)
        self.residual = args.canon_residual
        self.activation = args.canon_activation
        channels, num_taps = args.canon_channels[site], args.canon_kernel
        weight = torch.empty(channels, 1, num_taps)
        self.weight = nn.Parameter(weight, requires_grad=args.canon_trainable)
        nn.init.uniform_(self.weight, -args.canon_bound, args.canon_bound)
        self.down: nn.Parameter | None = None
        self.up: nn.Parameter | None = None
        if dynamic:
            self.down = nn.Parameter(torch.empty(DYNAMIC_RANK * args.canon_parts[site], args.dim))
            self.up = nn.Parameter(torch.empty(channels, DYNAMIC_RANK, num_taps))

    def forward(
        self,
        x_BTC: Tensor,
        segments_BN: Segments = None,
        cache: Memory = None,
        source_BTD: Tensor | None = None,
    ) -> Tensor:
        """Return y_BTC of equation 4.1, in the dtype of x.

        `segments_BN` (int32): the segments of the tokens and of the K - 1 before them, if a row has
        several. `cache`: this block's cache of the tokens before x; x is added to it. `source_BTD`:
        what dynamic filters depend on, x by default.
        """
        if self.up is not None:
            source_BTD = x_BTC if source_BTD is None else source_BTD
            return self._dynamic((x_BTC,), segments_BN, cache, source_BTD)[0]
        if cache is not None:
            return self._read((x_BTC,), segments_BN, cache)[0]
        return canon(x_BTC, self.weight, **self.options(segments_BN), backend=self.backend)

    def _dynamic(
        self, parts: Parts, segments_BN: Segments, cache: Memory, source_BTD: Tensor | None
    ) -> Parts:
        """Mix with taps that depend on `source_BTD`; the static ones are one more rank, z = 1."""
        assert self.down is not None and source_BTD is not None

        def weights() -> tuple[Tensor, ...]:
            assert self.up is not None
            weight_CRK = torch.cat((self.up, self.weight), dim=1)
            return weight_CRK.split([part.shape[-1] for part in parts])

        zs = F.linear(source_BTD, self.down).split(DYNAMIC_RANK, dim=-1)
        zs = tuple(F.pad(z_BTR, (0, 1), value=1.0) for z_BTR in zs)
        options = self.options(segments_BN) | {"backend": self.backend}
        if cache is not None:
            memory = cache.canon.setdefault(self.site, DynamicMemory())
            assert isinstance(memory, DynamicMemory)
            return memory.read(parts, weights, zs, **options)
        each = zip(parts, weights(), zs, strict=True)
        return tuple(canon(x, weight, z_BTR=z_BTR, **options) for x, weight, z_BTR in each)

    def _read(self, parts: Parts, segments_BN: Segments, cache: LayerCache) -> Parts:
        memory = cache.canon.get(self.site)
        assert not isinstance(memory, DynamicMemory)
        if memory is None:
            memory = cache.canon[self.site] = CanonMemory(
                parts[0], self.weight, residual=self.residual, activation=self.activation
            )
        return memory.read(parts, self.weight, segments_BN, self.backend)

    def options(self, segments_BN: Segments) -> dict[str, Any]:
        """Return the options of every kernel: residual, activation, segments."""
        if segments_BN is not None and self.backend == "compiled" and torch.compiler.is_compiling():
            # Only equality counts. If all sites of a block shared one comparison, torch's
            # partitioner would save each shifted product (float32, one per tap) for backward
            # instead of recomputing it.
            segments_BN = segments_BN + ord(self.site[0])
        return {
            "residual": self.residual,
            "activation": self.activation,
            "segments_BN": segments_BN,
        }


class CanonOfParts(Canon):
    """One Canon layer over several tensors, each with its own rows of the weight."""

    def forward(  # type: ignore[override]
        self,
        parts: Parts,
        segments_BN: Segments = None,
        cache: Memory = None,
        source_BTD: Tensor | None = None,
    ) -> Parts:
        """Return y_BTC of each part; see `Canon.forward`."""
        if self.up is not None:
            return self._dynamic(parts, segments_BN, cache, source_BTD)
        if cache is not None:
            return self._read(parts, segments_BN, cache)
        weights = self.weight.split([part.shape[-1] for part in parts])
        return tuple(
            canon(part, weight, **self.options(segments_BN), backend=self.backend)
            for part, weight in zip(parts, weights, strict=True)
        )


class ShortConv(CanonOfParts):
    """The native conv1d of a recurrent mixer: silu(conv(x) + bias), no residual."""

    def __init__(self, args: ModelArgs, backend: str = "auto", *, bias: bool = False) -> None:
        nn.Module.__init__(self)
        self.site, self.backend = "conv1d", resolve_backend(backend, args.canon_kernel)
        self.residual, self.activation = False, not bias
        self.down = self.up = None
        self.weight = nn.Parameter(torch.empty(args.conv_channels, 1, args.canon_kernel))
        self.bias = nn.Parameter(torch.empty(args.conv_channels)) if bias else None

    def forward(  # type: ignore[override]
        self,
        parts: Parts,
        segments_BN: Segments = None,
        cache: Memory = None,
        source_BTD: Tensor | None = None,
    ) -> Parts:
        """Return each part convolved; see `Canon.forward`."""
        parts = super().forward(parts, segments_BN, cache)
        if self.bias is None:
            return parts
        biases = self.bias.split([part.shape[-1] for part in parts])
        return tuple(F.silu(part + bias) for part, bias in zip(parts, biases, strict=True))


class CanonGate(CanonOfParts):
    """Canon-D of a gated feed-forward, with the gate."""

    def __init__(self, args: ModelArgs, site: str = "D", backend: str = "auto") -> None:
        super().__init__(args, site, backend)
        self.relu2 = args.ffn_activation == "relu2"

    def forward(  # type: ignore[override]
        self,
        parts: tuple[Tensor, Tensor],
        segments_BN: Segments = None,
        cache: Memory = None,
        source_BTD: Tensor | None = None,
    ) -> Tensor:
        """Return act(Canon(gate)) * Canon(up), [B, T, F], of the parts (gate, up)."""
        if cache is not None or self.up is not None:
            gate_BTF, up_BTF = super().forward(parts, segments_BN, cache, source_BTD)
            return ffn_activation(gate_BTF, self.relu2) * up_BTF
        options = self.options(segments_BN) | {"relu2": self.relu2, "backend": self.backend}
        return canon_gate(*parts, self.weight, **options)


def norm_canon(
    norm: nn.RMSNorm | nn.LayerNorm,
    canon: nn.Module | None,
    h_BTD: Tensor,
    added_BTD: Tensor | None = None,
    segments_BN: Segments = None,
    cache: Memory = None,
    *,
    readers: int = 1,
) -> tuple[Tensor, Stream]:
    """Return h + added and Canon(norm(h + added)), [B, T, D]; if fused, once per reader."""
    # in an export, an adapter (PEFT) may wrap `canon`
    if isinstance(canon, Canon) and isinstance(norm, nn.RMSNorm) and cache is None:
        if fused := triton_kernels(canon.backend, h_BTD):
            options = canon.options(segments_BN) | {"added_BTD": added_BTD, "readers": readers}
            h_BTD, *x_BTD = fused.norm_canon_stream_triton(
                h_BTD, norm.weight, canon.weight, eps=norm.eps, **options
            )
            return h_BTD, tuple(x_BTD)
    h_BTD = h_BTD if added_BTD is None else h_BTD + added_BTD
    y_BTD = norm(h_BTD)
    return h_BTD, y_BTD if canon is None else canon(y_BTD, segments_BN, cache)


def per_reader(x_BTD: Stream, readers: int) -> Parts:
    """Return x once per reader, as `norm_canon` returned it."""
    return x_BTD if isinstance(x_BTD, tuple) else (x_BTD,) * readers


CanonT = TypeVar("CanonT", bound=Canon)


def make_canon(kind: type[CanonT], site: str, args: ModelArgs, backend: str) -> CanonT | None:
    """Return the Canon layer of `site` ("A" to "D") as a `kind`; None if `args` have none."""
    return kind(args, site, backend) if site in args.canon_set else None
