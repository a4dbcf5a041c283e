"""Canon by the CUDA kernels of the package causal-conv1d, where it is installed.

`backends.py` reaches this module at run time only, and this module the package. Custom operators
around the package's functions, because its own autograd function is opaque to torch.compile: blocks
stay one graph. The kernels read [B, T, C] as it is, as "channel-last" [B, C, T].

Shapes: B batch, T tokens, C channels, K taps of the kernel, P = K - 1, N = P + T.
"""

import importlib
import importlib.util
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from canon_pretrain.kernels.compiled import canon_compiled

DEVICE_TYPES = ("cuda",)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
WIDTHS = (2, 3, 4)
FIRST_VERSION = (1, 6)
"""1.5 adds up the weight's gradient by atomics, in another order at every run."""


def canon_causal_conv1d(
    x_BTC: Tensor,
    weight_C1K: Tensor,
    *,
    residual: bool,
    activation: bool,
    segments_BN: Tensor | None = None,
) -> Tensor:
    """`canon_reference` of a whole sequence by the package's kernels; see there.

    Sums are float32, and rounded once; with `activation` and `residual` they are rounded before
    the residual is added, too. What the kernels don't take (a CPU, float64, channels that are no
    multiple of 8, weights of another device or of no such width) goes to `canon_compiled`. The
    weight's gradient is the same at every run.
    """
    if not _fits(x_BTC, weight_C1K):
        return canon_compiled(
            x_BTC, weight_C1K, residual=residual, activation=activation, segments_BN=segments_BN
        )
    taps_CK = weight_C1K[:, 0].float()
    if residual and not activation:  # the residual is 1 more of a token's own tap
        taps_CK = taps_CK + F.pad(taps_CK.new_ones(1), (taps_CK.shape[1] - 1, 0))
    # the kernels leave out places below 0, which padding is with us
    segments_BT = None if segments_BN is None else segments_BN[:, taps_CK.shape[1] - 1 :] + 1
    y_BTC: Tensor = canon_causal_conv1d_forward(x_BTC, taps_CK, segments_BT, activation)
    return x_BTC + y_BTC if residual and activation else y_BTC


def causal_conv1d_problem() -> str | None:
    """Why the package can't be had here; None where it can. Its kernels are not tried."""
    if importlib.util.find_spec("causal_conv1d") is None:
        return (
            "the package causal-conv1d is not installed: "
            "pip install --no-build-isolation 'causal-conv1d>=1.6,<2'"
        )
    try:
        version = importlib.import_module("causal_conv1d").__version__
        importlib.import_module("causal_conv1d.cpp_functions")
    except (ImportError, OSError, RuntimeError, AttributeError) as error:
        return f"the package causal-conv1d can't be imported: {type(error).__name__}: {error}"
    if tuple(int(part) for part in version.split(".")[:2]) < FIRST_VERSION:
        return (
            f"causal-conv1d {version} adds up the weight's gradient in another order at every run; "
            "pip install --no-build-isolation 'causal-conv1d>=1.6,<2'"
        )
    if os.environ.get("CAUSAL_CONV1D_DETERMINISTIC", "").startswith("0"):
        return "CAUSAL_CONV1D_DETERMINISTIC=0 is set, so weight gradients would differ; unset it"
    if not torch.cuda.is_available():
        return "causal-conv1d needs a CUDA device, and there is none"
    return None


def _fits(x_BTC: Tensor, weight_C1K: Tensor) -> bool:
    return (
        x_BTC.device.type in DEVICE_TYPES
        and weight_C1K.device == x_BTC.device
        and x_BTC.dtype in DTYPES
        and weight_C1K.dtype in DTYPES
        and weight_C1K.shape[2] in WIDTHS
        and x_BTC.shape[2] % 8 == 0
        and x_BTC.numel() > 0
    )


@torch.library.custom_op("canon_pretrain::canon_causal_conv1d", mutates_args=())
def canon_causal_conv1d_forward(
    x_BTC: Tensor, taps_CK: Tensor, segments_BT: Tensor | None, activation: bool
) -> Tensor:
    """[silu of] the convolution, y_BTC in the dtype of x; `segments_BT` int32, none below 0."""
    y_BCT = _package().causal_conv1d_fwd_function(
        _channel_last(x_BTC), taps_CK, None, _dense(segments_BT), None, None, activation
    )
    return y_BCT.transpose(1, 2).contiguous()  # is so, unless the package changes its ways


@canon_causal_conv1d_forward.register_fake
def _(
    x_BTC: Tensor, taps_CK: Tensor, segments_BT: Tensor | None, activation: bool
) -> Tensor:  # fmt: skip
    return x_BTC.new_empty(x_BTC.shape)


@torch.library.custom_op("canon_pretrain::canon_causal_conv1d_backward", mutates_args=())
def canon_causal_conv1d_backward(
    dy_BTC: Tensor, x_BTC: Tensor, taps_CK: Tensor, segments_BT: Tensor | None, activation: bool
) -> tuple[Tensor, Tensor]:
    """dx_BTC in the dtype of x, and dtaps_CK in float32."""
    dx_BTC = x_BTC.new_empty(x_BTC.shape)
    with _repeatable():
        gradients = _package().causal_conv1d_bwd_function(
            _channel_last(x_BTC),
            taps_CK,
            None,
            _channel_last(dy_BTC),
            _dense(segments_BT),
            None,
            None,
            _channel_last(dx_BTC),
            False,
            activation,
        )
    return dx_BTC, gradients[1]


@canon_causal_conv1d_backward.register_fake
def _(
    dy_BTC: Tensor, x_BTC: Tensor, taps_CK: Tensor, segments_BT: Tensor | None, activation: bool
) -> tuple[Tensor, Tensor]:
    return x_BTC.new_empty(x_BTC.shape), torch.empty_like(taps_CK)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x_BTC, taps_CK, segments_BT, ctx.activation = inputs
    ctx.save_for_backward(x_BTC, taps_CK, segments_BT)


def _backward(ctx: Any, dy_BTC: Tensor) -> tuple[Tensor | None, ...]:
    dx_BTC, dtaps_CK = canon_causal_conv1d_backward(dy_BTC, *ctx.saved_tensors, ctx.activation)
    wants_x, wants_taps = ctx.needs_input_grad[:2]
    return dx_BTC if wants_x else None, dtaps_CK if wants_taps else None, None, None


canon_causal_conv1d_forward.register_autograd(_backward, setup_context=_save)


def _package() -> Any:
    return importlib.import_module("causal_conv1d.cpp_functions")


def _channel_last(x_BTC: Tensor) -> Tensor:
    """[B, C, T], in memory as [B, T, C]: what the kernels want, the strides of size 1 included.

    They read 16 bytes at once, so it begins at a multiple of that.
    """
    x_BTC = x_BTC.contiguous()
    if x_BTC.data_ptr() % 16:
        x_BTC = x_BTC.clone()
    rows, num_tokens, channels = x_BTC.shape
    return x_BTC.as_strided((rows, channels, num_tokens), (num_tokens * channels, 1, channels))


def _dense(segments_BT: Tensor | None) -> Tensor | None:
    return None if segments_BT is None else segments_BT.contiguous()


@contextmanager
def _repeatable() -> Iterator[None]:
    """Have the package add up in a fixed order: it asks for torch's flag, and there is no other.

    The flag itself, not torch.use_deterministic_algorithms, which sets inductor's options too.
    """
    wanted = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    torch._C._set_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch._C._set_deterministic_algorithms(wanted, warn_only=warn_only)
