"""The Canon layer as a module: the weight and its options; the arithmetic is in `kernels/`.

Sites of a block that may have one: A before attention, B on q, k and v, C before the feed-forward,
D on its inner projections (paper, section 4); Q, K or V alone; O and F on the outputs of attention
and feed-forward before they are added (K, V, O and F: `InklingShortConvolution` of transformers).

Dynamic filters (`canon_filter`) are those of Sieberling et al., arXiv 2606.03825, in the low-rank
form of its code (github.com/OliverSieberling/dynamic-conv1d): tap i of token t and channel c is
W[c, i] + sum_r up[c, r, i] (down s_t)_r, R = 15, without nonlinearity; s is the input of the linear
layer whose outputs are mixed, and every such layer (wq, wk, wv, ..) has its own filters. Initial
values are the code's: W as Canon's, down U(-D^-1/2, D^-1/2), up 0. Assumed, since we had the code
and not the paper's text: at A, C, O and F, which the code lacks, s is the site's own input;
Mamba2's in_proj is one layer; residual and activation are Canon's options (the code: residual,
none).

Dynamic filters of heads (`dynamic_heads`, at Q, K and V) are transformers'
`Inkling2DynamicShortConvolution`: tap i of token t and channel c of head g is
W[c, i] + (per_head s_t)[g, i], where s is the input of the linear layer. Initial values are ours:
W as Canon's, per_head 0 (transformers: 0, N(0, 0.02)).

Taps of other filters: `scalar` has one row of taps for all channels. `shift` has a share mu of each
channel, and y_t = x_t + mu (x_{t-1} - x_t), RWKV's token shift (Peng et al., arXiv 2404.05892).

`canon_scale = "sqrt"` divides the sum of convolution and residual by the root of the number of its
terms, as transformers' `Inkling2ShortConvolution` and `Inkling2DynamicShortConvolution` do. Static
taps take up the factor and the residual, so that no kernel needs to know of it.

Shapes: B batch, T tokens, D hidden, C channels, K taps of the kernel, R rank, N = K - 1 + T.
"""

from typing import Any

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
from canon_pretrain.kernels.compiled import Segments, sum_dtype
from canon_pretrain.kernels.decode_step import CanonMemory, DynamicMemory, Parts
from canon_pretrain.model.args import ModelArgs
from canon_pretrain.model.cache import NO_CONTEXT, Context, LayerCache
from canon_pretrain.model.counts import DYNAMIC_RANK

Stream = Tensor | Parts
"""The input of a mixer or feed-forward: x_BTD, or a copy of it per reader (`per_reader`)."""


class CausalFilter(nn.Module):
    """Mix each token with the K - 1 before it in its segment, per channel.

    `weight` is [C, 1, K] as in a depthwise `nn.Conv1d`: the last tap is the current token's. The C
    channels are those of all tensors that are mixed. `site` is the filter's key in a LayerCache.
    """

    def __init__(
        self,
        site: str,
        num_channels: int,
        num_taps: int,
        backend: str,
        *,
        residual: bool,
        activation: bool,
    ) -> None:
        super().__init__()
        self.site = site
        self.backend = backend
        self.residual = residual
        self.activation = activation
        self.weight = nn.Parameter(torch.empty(num_channels, 1, num_taps))

    def forward(
        self, parts: Parts, context: Context = NO_CONTEXT, source_BTD: Tensor | None = None
    ) -> Parts:
        """Return y_BTC of equation 4.1 for each x_BTC of `parts`, in its dtype.

        With a cache, the tokens are added to it. `source_BTD` is what dynamic filters depend on.
        """
        segments_BN = context.segments_BN
        if context.cache is not None:
            memory = self._static_memory(context.cache, parts[0])
            return memory.read(parts, self.taps, segments_BN, self.backend)

        # A kernel per part, such as q, k and v, with the rows of its channels.
        weights = self._split_by_part(self.taps(), parts)
        return tuple(
            canon(x_BTC, weight_C1K, **self.options(segments_BN), backend=self.backend)
            for x_BTC, weight_C1K in zip(parts, weights, strict=True)
        )

    def taps(self) -> Tensor:
        """Return what the kernels multiply with, [C, 1, K]."""
        return self.weight

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

    def _static_memory(self, cache: LayerCache, x_BTC: Tensor) -> CanonMemory:
        """Return this filter's memory in `cache`, empty before the first token."""
        memory = cache.canon.get(self.site)
        if memory is None:
            memory = cache.canon[self.site] = CanonMemory(
                x_BTC, self.taps(), residual=self.residual, activation=self.activation
            )
        assert isinstance(memory, CanonMemory)
        return memory

    @staticmethod
    def _split_by_part(weight: Tensor, parts: Parts) -> Parts:
        """Split [C, ..] into the rows of each part's channels."""
        if len(parts) == 1:
            return (weight,)
        return weight.split([part.shape[-1] for part in parts])


class Canon(CausalFilter):
    """The Canon layer of `site`, a letter of args.canon_set.

    Dynamic filters add `up` [C, R, K] and `down`, R rows for each part that the site mixes; those
    of heads `per_head`, K rows for each head.
    `widths`: of the parts, if the mixer is the user's own and the site its Canon-B.
    """

    def __init__(
        self, args: ModelArgs, site: str, backend: str = "auto", widths: tuple[int, ...] = ()
    ) -> None:
        self.filter = args.canon_filter
        # The sizes: `widths` of the parts, the outputs of linear layers that one Canon layer mixes,
        # if not those of the args. `scalar` has one row of taps for all channels, `shift` one share
        # per channel.
        is_dynamic = args.is_dynamic_at(site)
        self.num_channels = channels = sum(widths) or args.canon_channels[site]
        num_parts = len(widths) or args.canon_parts[site]
        self.num_taps = args.canon_kernel
        self.factor = args.canon_factor_at(site)

        # With a factor, `taps` adds the residual to static taps, so the kernel must not add it
        # again. The outputs of dynamic filters are multiplied instead (`_scaled`).
        has_residual_in_taps = self.factor != 1.0 and not is_dynamic
        super().__init__(
            site,
            1 if self.filter == "scalar" else channels,
            1 if self.filter == "shift" else self.num_taps,
            resolve_backend(backend, self.num_taps, dynamic=is_dynamic),
            residual=args.canon_residual and not has_residual_in_taps,
            activation=args.canon_activation,
        )

        self.weight.requires_grad_(args.canon_trainable)
        nn.init.uniform_(self.weight, -args.canon_bound, args.canon_bound)

        # Written by `Transformer.init_weights`.
        self.down: nn.Parameter | None = None
        self.up: nn.Parameter | None = None
        self.per_head: nn.Parameter | None = None
        self.num_heads = 0  # that have taps of their own
        if is_dynamic and self.filter == "dynamic_heads":
            self.num_heads = args.canon_heads_at(site)
            num_rows = self.num_heads * self.num_taps
            self.per_head = nn.Parameter(torch.empty(num_rows, args.dim))
        elif is_dynamic:
            self.down = nn.Parameter(torch.empty(DYNAMIC_RANK * num_parts, args.dim))
            self.up = nn.Parameter(torch.empty(channels, DYNAMIC_RANK, args.canon_kernel))

    def taps(self) -> Tensor:
        """Return the static taps, [C, 1, K]; with `canon_scale` those of the whole sum."""
        taps_C1K: Tensor = self.weight
        if self.filter == "scalar":
            taps_C1K = taps_C1K.expand(self.num_channels, -1, -1).contiguous()
        if self.filter == "shift":  # to x_t, mu (x_{t-1} - x_t) is added
            taps_C1K = torch.cat((taps_C1K, -taps_C1K), dim=2)
        if self.factor == 1.0:
            return taps_C1K

        # The residual adds 1 to the current token's tap; in float32, as the kernels add it.
        taps_C1K = taps_C1K.to(sum_dtype(taps_C1K))
        one_K = F.pad(taps_C1K.new_ones(1), (self.num_taps - 1, 0))
        return self.factor * (taps_C1K + one_K)

    def forward(
        self, parts: Parts, context: Context = NO_CONTEXT, source_BTD: Tensor | None = None
    ) -> Parts:
        """Return y_BTC for each part; `source_BTD` is the first part if it is not passed."""
        if not self.is_dynamic:
            return super().forward(parts, context)

        source_BTD = parts[0] if source_BTD is None else source_BTD
        zs = self._token_terms(source_BTD)

        # split by part; a function, since a cached step keeps copies of its own
        def weights() -> Parts:
            return self._split_by_part(self._weight_of_terms(), parts)

        options = self.options(context.segments_BN)
        options |= {"backend": self.backend, "num_heads": self.num_heads}
        if context.cache is not None:
            memory = context.cache.canon.setdefault(self.site, DynamicMemory())
            assert isinstance(memory, DynamicMemory)
            return self._scaled(memory.read(parts, weights, zs, **options))

        outputs = tuple(
            canon(x_BTC, weight_CRK, z_BTR=z_BTR, **options)
            for x_BTC, weight_CRK, z_BTR in zip(parts, weights(), zs, strict=True)
        )
        return self._scaled(outputs)

    @property
    def is_dynamic(self) -> bool:
        return self.up is not None or self.per_head is not None

    def _token_terms(self, source_BTD: Tensor) -> Parts:
        """Return z of `canon_reference` for each part, on which the taps of the tokens depend."""
        if self.per_head is not None:
            return (F.linear(source_BTD, self.per_head),)  # q, k or v are alone at their sites
        assert self.down is not None
        # Taps are sum_r z_r weight[:, r]: the static taps are one more rank, with z = 1.
        z_parts = F.linear(source_BTD, self.down).split(DYNAMIC_RANK, dim=-1)
        return tuple(F.pad(z_BTR, (0, 1), value=1.0) for z_BTR in z_parts)

    def _weight_of_terms(self) -> Tensor:
        """Return the weight that belongs to `_token_terms`: [C, R + 1, K], of heads [C, 1, K]."""
        if self.up is None:
            return self.weight
        return torch.cat((self.up, self.weight), dim=1)

    def _scaled(self, outputs: Parts) -> Parts:
        """Return the outputs of a dynamic filter times the factor."""
        if self.factor == 1.0:
            return outputs
        return tuple(self.factor * y_BTC for y_BTC in outputs)


class CanonGate(Canon):
    """Canon-D of a gated feed-forward, with the gate."""

    def __init__(self, args: ModelArgs, site: str = "D", backend: str = "auto") -> None:
        super().__init__(args, site, backend)
        self.ffn_activation = args.ffn_activation

    def forward(
        self, parts: Parts, context: Context = NO_CONTEXT, source_BTD: Tensor | None = None
    ) -> Parts:
        """Return one part, act(Canon(gate)) * Canon(up), [B, T, F], of the parts (gate, up)."""
        # the fused kernels have neither a cache nor dynamic filters
        if context.cache is not None or self.is_dynamic:
            gate_BTF, up_BTF = super().forward(parts, context, source_BTD)
            return (ffn_activation(gate_BTF, self.ffn_activation) * up_BTF,)

        gate_BTF, up_BTF = parts
        y_BTF = canon_gate(
            gate_BTF,
            up_BTF,
            self.taps(),
            relu2=self.ffn_activation == "relu2",
            backend=self.backend,
            **self.options(context.segments_BN),
        )
        return (y_BTF,)


class ShortConv(CausalFilter):
    """The native conv1d of a recurrent mixer: silu(conv(x) + bias), no residual."""

    def __init__(self, args: ModelArgs, backend: str = "auto", *, bias: bool = False) -> None:
        super().__init__(
            "conv1d",
            args.conv_channels,
            args.canon_kernel,
            resolve_backend(backend, args.canon_kernel),
            residual=False,
            activation=not bias,  # silu comes after the bias, which the kernels do not have
        )
        self.bias: nn.Parameter | None = None
        if bias:
            self.bias = nn.Parameter(torch.empty(args.conv_channels))

    def forward(
        self, parts: Parts, context: Context = NO_CONTEXT, source_BTD: Tensor | None = None
    ) -> Parts:
        """Return each part convolved; see `CausalFilter.forward`."""
        parts = super().forward(parts, context)
        if self.bias is None:
            return parts
        biases = self._split_by_part(self.bias, parts)
        return tuple(F.silu(part + bias) for part, bias in zip(parts, biases, strict=True))


def make_canon(
    site: str, args: ModelArgs, backend: str = "auto", widths: tuple[int, ...] = ()
) -> Canon | None:
    """Return the Canon layer of `site`, a letter; None if `args` have none.

    `widths`: of the projections that a mixer of the user's own lets Canon-B mix, or Q, K or V.
    """
    if site not in args.canon_set:
        return None
    if site == "D" and args.ffn == "gated":
        return CanonGate(args, site, backend)
    return Canon(args, site, backend, widths)


def canon_or_same(
    canon: nn.Module | None, x_BTC: Tensor, context: Context, source_BTD: Tensor | None = None
) -> Tensor:
    """Return Canon of a single tensor [B, T, C]; x itself if the model lacks that site."""
    if canon is None:
        return x_BTC
    (x_BTC,) = canon((x_BTC,), context, source_BTD)
    return x_BTC


def add_norm_canon(
    h_BTD: Tensor,
    added_BTD: Tensor | None,
    norm: nn.RMSNorm | nn.LayerNorm | None,
    canon: nn.Module | None,
    context: Context,
    *,
    readers: int = 1,
) -> tuple[Tensor, Stream]:
    """Return h = h + added and x = Canon(norm(h)), [B, T, D], by one fused kernel if possible.

    Without a `norm`, x = Canon(h), which no kernel fuses with the sum.
    The kernel returns a copy of x for each of the `readers`, the linear layers that x is passed to:
    so it also adds up their gradients. Pass x through `per_reader`; of one reader, x is a tensor.
    """
    # One kernel. In an export, an adapter (PEFT) may wrap `canon`: then its forward must run.
    if isinstance(canon, Canon) and isinstance(norm, nn.RMSNorm) and context.cache is None:
        kernels = triton_kernels(canon.backend, h_BTD)
        if kernels is not None and is_loaded(canon) and is_loaded(norm):
            h_BTD, *xs_BTD = kernels.norm_canon_stream_triton(
                h_BTD,
                norm.weight,
                canon.taps(),
                eps=norm.eps,
                added_BTD=added_BTD,
                readers=readers,
                **canon.options(context.segments_BN),
            )
            return h_BTD, xs_BTD[0] if readers == 1 else tuple(xs_BTD)

    # The same step by step.
    if added_BTD is not None:
        h_BTD = h_BTD + added_BTD
    x_BTD = h_BTD if norm is None else norm(h_BTD)
    return h_BTD, canon_or_same(canon, x_BTD, context)


def is_loaded(module: nn.Module | None) -> bool:
    """Return whether a module's weight is here, for a kernel that reads it without a call.

    In an export, accelerate may load it from the CPU or the disk when the module is called.
    """
    weight: Any = None if module is None else module.weight
    return weight is None or not weight.is_meta


def per_reader(x_BTD: Stream, readers: int) -> Parts:
    """Return x once per reader: the copies of `add_norm_canon`, or x itself that often."""
    return x_BTD if isinstance(x_BTD, tuple) else (x_BTD,) * readers
