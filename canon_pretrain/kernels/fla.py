"""Canon by the Triton kernels of flash-linear-attention (package fla-core), if it is installed.

`backends.py` reaches this module at run time only, and this module the package. Custom operators
around its forward and backward functions, so that a block stays one graph under torch.compile.

Shapes: B batch, T tokens, C channels, K taps of the kernel, N = K - 1 + T.
"""

import importlib
import importlib.util
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from canon_pretrain.kernels.compiled import canon_compiled

DEVICE_TYPES = ("cuda",)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
FIRST_VERSION = (0, 6)
INSTALL = "pip install 'fla-core>=0.6,<0.7'"


def canon_fla(
    x_BTC: Tensor,
    weight_C1K: Tensor,
    *,
    residual: bool,
    activation: bool,
    segments_BN: Tensor | None = None,
) -> Tensor:
    """`canon_reference` of a whole sequence by the package's kernels; see there.

    Sums are float32, and rounded once (dx twice with `activation` and `residual`). The package
    picks its blocks by a stopwatch, so weight gradients may differ in rounding between processes.
    `canon_compiled` takes what its kernels don't: a CPU, float64, and documents, whose borders the
    package wants as cumulative lengths, which the host would have to wait for at every site.
    """
    fits = x_BTC.device.type in DEVICE_TYPES and weight_C1K.device == x_BTC.device
    fits &= x_BTC.dtype in DTYPES and weight_C1K.dtype in DTYPES and x_BTC.numel() > 0
    if segments_BN is not None or not fits:
        return canon_compiled(
            x_BTC, weight_C1K, residual=residual, activation=activation, segments_BN=segments_BN
        )
    taps_CK = weight_C1K[:, 0].float()
    if residual and not activation:  # 1 more of a token's own tap: x is read once, dx made at once
        taps_CK = taps_CK + F.pad(taps_CK.new_ones(1), (taps_CK.shape[1] - 1, 0))
    y_BTC: Tensor = canon_fla_forward(x_BTC, taps_CK, residual and activation, activation)
    return y_BTC


def fla_problem() -> str | None:
    """Why the package can't be had here; None if it can. Its kernels are not tried."""
    if importlib.util.find_spec("fla") is None:
        return f"the package fla-core is not installed: {INSTALL}"
    try:
        version = importlib.import_module("fla").__version__
        package = _package()
        if tuple(int(part) for part in version.split(".")[:2]) < FIRST_VERSION:
            return f"fla-core {version} is older than 0.6: {INSTALL}"
        for name in ("causal_conv1d_fwd", "causal_conv1d_bwd"):
            getattr(package, name)
    except (ImportError, OSError, RuntimeError, AttributeError, ValueError) as error:
        return f"the package fla-core can't be imported: {type(error).__name__}: {error}"
    return None if torch.cuda.is_available() else "fla needs a CUDA device, and there is none"


@torch.library.custom_op("canon_pretrain::canon_fla", mutates_args=())
def canon_fla_forward(x_BTC: Tensor, taps_CK: Tensor, residual: bool, activation: bool) -> Tensor:
    """[x +] [silu of] the convolution, y_BTC in the dtype of x."""
    x_BTC = x_BTC.contiguous()
    options = {"residual": x_BTC if residual else None, "activation": _activation(activation)}
    y_BTC: Tensor = _package().causal_conv1d_fwd(x=x_BTC, weight=taps_CK, bias=None, **options)[0]
    return y_BTC


@canon_fla_forward.register_fake
def _(x_BTC: Tensor, taps_CK: Tensor, residual: bool, activation: bool) -> Tensor:
    return x_BTC.new_empty(x_BTC.shape)


@torch.library.custom_op("canon_pretrain::canon_fla_backward", mutates_args=())
def canon_fla_backward(
    dy_BTC: Tensor, x_BTC: Tensor, taps_CK: Tensor, residual: bool, activation: bool
) -> tuple[Tensor, Tensor]:
    """dx_BTC in the dtype of x, and dtaps_CK in float32."""
    x_BTC, dy_BTC = x_BTC.contiguous(), dy_BTC.contiguous()
    with torch.cuda.device_of(x_BTC):  # Triton launches on the current device
        dx_BTC, dtaps_CK, *_ = _package().causal_conv1d_bwd(
            x=x_BTC, dy=dy_BTC, dht=None, weight=taps_CK, activation=_activation(activation)
        )
    return dx_BTC + dy_BTC if residual else dx_BTC, dtaps_CK


@canon_fla_backward.register_fake
def _(
    dy_BTC: Tensor, x_BTC: Tensor, taps_CK: Tensor, residual: bool, activation: bool
) -> tuple[Tensor, Tensor]:
    return x_BTC.new_empty(x_BTC.shape), torch.empty_like(taps_CK)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x_BTC, taps_CK, ctx.residual, ctx.activation = inputs
    ctx.save_for_backward(x_BTC, taps_CK)


def _backward(ctx: Any, dy_BTC: Tensor) -> tuple[Tensor | None, ...]:
    options = ctx.residual, ctx.activation
    dx_BTC, dtaps_CK = canon_fla_backward(dy_BTC, *ctx.saved_tensors, *options)
    wants_x, wants_taps = ctx.needs_input_grad[:2]
    return dx_BTC if wants_x else None, dtaps_CK if wants_taps else None, None, None


canon_fla_forward.register_autograd(_backward, setup_context=_save)


def _package() -> Any:
    return importlib.import_module("fla.modules.causal_conv1d")


def _activation(silu: bool) -> str | None:
    return "silu" if silu else None
