"""Canon by the GPU kernels of causal-conv1d (CUDA) and fla-core (Triton).

Custom operators wrap the packages' functions, so that blocks compile to one graph.

Shapes: B batch, T tokens, C channels, K taps of the kernel, N = K - 1 + T.
"""

import importlib
import importlib.util
import os
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from canon_pretrain.kernels.compiled import Segments, canon_compiled, needed_grads

DEVICE_TYPES = ("cuda",)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
CONV1D_TAPS = (2, 3, 4)
CONV1D_ALIGNMENT = 8
"""The number of channels must be a multiple of this."""


class Package(NamedTuple):
    """A package's functions, and how to install it."""

    module: str
    functions: str
    """The module of the functions."""
    needed: tuple[str, ...]
    """Names of functions; of Canon: forward, then backward."""
    first_version: tuple[int, int]
    install: str


PACKAGES = {
    "causal_conv1d": Package(
        module="causal_conv1d",
        functions="causal_conv1d.cpp_functions",
        needed=("causal_conv1d_fwd_function", "causal_conv1d_bwd_function"),
        first_version=(1, 6),  # earlier versions sum the weight's gradient by atomics
        install="pip install --no-build-isolation 'causal-conv1d>=1.6,<2'",
    ),
    "fla": Package(
        module="fla",
        functions="fla.modules.causal_conv1d",
        needed=("causal_conv1d_fwd", "causal_conv1d_bwd"),
        first_version=(0, 6),  # autotunes: its weight gradient may differ between processes
        install="pip install 'fla-core>=0.6,<0.7'",
    ),
}


def package_problem(backend: str, package: Package | None = None) -> str | None:
    """Return why the package of `backend` is unavailable, or None; runs no kernel."""
    package = package or PACKAGES[backend]

    # Is it installed, with these functions, in a version that we know?
    if importlib.util.find_spec(package.module) is None:
        return f"the package {package.module} is not installed: {package.install}"
    try:
        version = importlib.import_module(package.module).__version__
        for name in package.needed:
            getattr(importlib.import_module(package.functions), name)
        is_old = tuple(map(int, version.split(".")[:2])) < package.first_version
    except (ImportError, OSError, RuntimeError, AttributeError, ValueError) as error:
        return f"the package {package.module} can't be imported: {type(error).__name__}: {error}"
    if is_old:
        return f"{package.module} {version} is too old: {package.install}"

    by_atomics = os.environ.get("CAUSAL_CONV1D_DETERMINISTIC", "").startswith("0")
    if backend == "causal_conv1d" and by_atomics:
        return "CAUSAL_CONV1D_DETERMINISTIC=0 is set, so weight gradients would differ; unset it"
    if not torch.cuda.is_available():
        return f"{package.module} needs a CUDA device, and there is none"
    return None


def canon_by_package(
    backend: str,
    x_BTC: Tensor,
    weight_C1K: Tensor,
    segments_BN: Segments = None,
    *,
    residual: bool,
    activation: bool,
) -> Tensor:
    """Compute `canon_reference` by a package, or by `canon_compiled` if unsupported."""
    is_supported = (
        x_BTC.device.type in DEVICE_TYPES
        and weight_C1K.device == x_BTC.device
        and x_BTC.dtype in DTYPES
        and weight_C1K.dtype in DTYPES
        and x_BTC.numel() > 0
    )
    if backend == "fla":
        fits = segments_BN is None
    else:
        is_aligned = x_BTC.shape[2] % CONV1D_ALIGNMENT == 0
        fits = is_aligned and weight_C1K.shape[2] in CONV1D_TAPS
    if not (is_supported and fits):
        return canon_compiled(
            x_BTC,
            weight_C1K,
            residual=residual,
            activation=activation,
            segments_BN=segments_BN,
        )

    # Without an activation the residual adds 1 to the current token's tap.
    taps_CK = weight_C1K[:, 0].float()
    reach = taps_CK.shape[1] - 1
    if residual and not activation:
        taps_CK = taps_CK + F.pad(taps_CK.new_ones(1), (reach, 0))

    # causal-conv1d skips segments below 0, which are our padding.
    segments_BT = None if segments_BN is None else segments_BN[:, reach:] + 1
    return package_forward(
        x_BTC,
        taps_CK,
        segments_BT,
        backend,
        adds=residual and activation,
        silu=activation,
    )


@torch.library.custom_op("canon_pretrain::canon_package", mutates_args=())
def package_forward(
    x_BTC: Tensor, taps_CK: Tensor, segments_BT: Segments, backend: str, adds: bool, silu: bool
) -> Tensor:
    """Return [x +] [silu of] the convolution, contiguous, in x's dtype; segments are int32 >= 0."""
    forward = _function(backend, 0)
    if backend == "fla":
        x_BTC = x_BTC.contiguous()
        y_BTC: Tensor
        y_BTC, _ = forward(
            x=x_BTC,
            weight=taps_CK,
            bias=None,
            residual=x_BTC if adds else None,
            activation="silu" if silu else None,
        )
        return y_BTC

    segments_BT = None if segments_BT is None else segments_BT.contiguous()
    # x, weight, bias, seq_idx, initial_states, final_states_out, silu_activation
    y_BCT = forward(_channels_last(x_BTC), taps_CK, None, segments_BT, None, None, silu)
    y_BTC = y_BCT.transpose(1, 2).contiguous()
    return x_BTC + y_BTC if adds else y_BTC


@torch.library.custom_op("canon_pretrain::canon_package_backward", mutates_args=())
def package_backward(
    dy: Tensor, x: Tensor, taps: Tensor, segments: Segments, backend: str, adds: bool, silu: bool
) -> tuple[Tensor, Tensor]:
    """Return dx_BTC in the dtype of x, and dtaps_CK in float32."""
    backward = _function(backend, 1)
    if backend == "fla":
        x = x.contiguous()
        dy = dy.contiguous()
        with torch.cuda.device_of(x):  # Triton launches on the current device
            dx_BTC, dtaps_CK, *_ = backward(
                x=x,
                dy=dy,
                dht=None,
                weight=taps,
                activation="silu" if silu else None,
            )
        return dx_BTC + dy if adds else dx_BTC, dtaps_CK

    # causal-conv1d writes dx into a tensor with the strides of x.
    dx_BTC = x.new_empty(x.shape)
    segments = None if segments is None else segments.contiguous()
    x_BCT, dy_BCT, dx_BCT = map(_channels_last, (x, dy, dx_BTC))

    # Deterministic only under this flag; use_deterministic_algorithms also sets inductor's options
    was_deterministic = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    torch._C._set_deterministic_algorithms(True, warn_only=True)
    try:
        _, dtaps_CK, *_ = backward(
            x_BCT,
            taps,
            None,  # bias
            dy_BCT,
            segments,
            None,  # initial states
            None,  # gradient of the final states
            dx_BCT,
            False,  # whether to return the gradient of the initial states
            silu,
        )
    finally:
        torch._C._set_deterministic_algorithms(was_deterministic, warn_only=warn_only)
    return dx_BTC + dy if adds else dx_BTC, dtaps_CK


@package_forward.register_fake
def _(x_BTC: Tensor, *_: Any) -> Tensor:
    return x_BTC.new_empty(x_BTC.shape)


@package_backward.register_fake
def _(dy_BTC: Tensor, x_BTC: Tensor, taps_CK: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return x_BTC.new_empty(x_BTC.shape), torch.empty_like(taps_CK)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:3])
    ctx.options = inputs[3:]


def _backward(ctx: Any, dy_BTC: Tensor) -> tuple[Tensor | None, ...]:
    dx_BTC, dtaps_CK = package_backward(dy_BTC, *ctx.saved_tensors, *ctx.options)
    return needed_grads(ctx, dx_BTC, dtaps_CK)


package_forward.register_autograd(_backward, setup_context=_save)


def _function(backend: str, index: int) -> Any:
    package = PACKAGES[backend]
    return getattr(importlib.import_module(package.functions), package.needed[index])


def _channels_last(x_BTC: Tensor) -> Tensor:
    """Return [B, C, T], in memory as [B, T, C] aligned to 16 bytes."""
    x_BTC = x_BTC.contiguous()
    if x_BTC.data_ptr() % 16:
        x_BTC = x_BTC.clone()
    rows, num_tokens, channels = x_BTC.shape
    shape = (rows, channels, num_tokens)
    strides = (num_tokens * channels, 1, channels)  # also of dims of size 1
    return x_BTC.as_strided(shape, strides)
