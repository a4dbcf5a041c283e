"""The Canon formula, its backends, and their choice.

Shapes: B batch, T tokens, C channels, K taps of the kernel, N = K - 1 + T, F ffn dim.
"""

import importlib
import importlib.util
import os
import sys
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from canon_pretrain.core.errors import UserError, check_choice
from canon_pretrain.kernels.compiled import Segments, canon_compiled, canon_gate_compiled, sum_dtype
from canon_pretrain.kernels.dynamic import canon_dynamic
from canon_pretrain.kernels.recurrences import CHUNKED, Recurrence, recurrence_problem, values_of

BACKENDS = ("auto", "reference", "compiled", "causal_conv1d", "fla", "triton")
OPTIONAL = {
    "causal_conv1d": "canon_pretrain.kernels.packages",
    "fla": "canon_pretrain.kernels.packages",
    "triton": "canon_pretrain.kernels.triton.fused",
}
"""Backends that need a GPU or a package -> their modules."""
MIXER_BACKENDS = ("auto", "chunked", "fla", "triton")
RECURRENCES = {
    "triton": "canon_pretrain.kernels.triton.recurrence.forms",
    "fla": "canon_pretrain.kernels.fla_mixers",
}
"""Backends of recurrences that need a GPU -> their modules, in the order that `auto` tries.

Each module has FORMS, recurrences by mixer.
"""
TRITON_TAPS = 4
TRITON_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
TRITON_CAPABILITY = (8, 0)
"""The first compute capability with bfloat16 arithmetic."""


def canon_reference(
    x: Tensor,
    weight_CRK: Tensor,
    *,
    residual: bool,
    activation: bool,
    segments_BN: Segments = None,
    z_BTR: Tensor | None = None,
    num_heads: int = 0,
) -> Tensor:
    """Mix every token with its K - 1 predecessors, per channel; [B, T, C] in x's dtype.

        y_t = [x_t +] act(sum_{j=0..K-1} W[:, 0, K-1-j] * x_{t-j}),    x_{<0} = 0

    Paper section 4, equation 4.1 (K = 4); act is silu (Figure 10, rows "Act") or the identity. The
    weight has the layout of a depthwise `nn.Conv1d`. Sums are float32 (float64 for float64).
    `segments_BN`: the segments of the tokens and of the K - 1 before them, which are not mixed with
    each other; None: one segment. With `z_BTR` the taps of token t are W = sum_r z_tr weight[:, r];
    with `num_heads` they are weight[c, 0] + z_t[g] for the channels c of head g, R = num_heads K.
    Raises ValueError if the shapes do not fit.
    """
    rank = 1 if z_BTR is None or num_heads else z_BTR.shape[-1]
    has_dims = x.ndim == weight_CRK.ndim == 3
    if not has_dims or weight_CRK.shape[:2] != (x.shape[2], rank):
        raise ValueError(
            f"Canon got x of shape {tuple(x.shape)} and a weight of shape "
            f"{tuple(weight_CRK.shape)}; expected [B, T, C] and [C, {rank}, K] with the same C."
        )
    num_tokens = x.shape[1]
    num_taps = weight_CRK.shape[2]
    dtype = x.dtype
    x = x.to(sum_dtype(x))
    weight_CRK = weight_CRK.to(x.dtype)

    # The taps of all tokens, [C, K], or of each, [B, T, C, K].
    if z_BTR is None:
        taps = weight_CRK[:, 0]
    elif num_heads:
        heads_BTGK = z_BTR.to(x.dtype).unflatten(-1, (num_heads, num_taps))
        channels_per_head = x.shape[2] // num_heads
        taps = weight_CRK[:, 0] + heads_BTGK.repeat_interleave(channels_per_head, dim=2)
    else:
        taps = torch.einsum("btr,crk->btck", z_BTR.to(x.dtype), weight_CRK)

    # x_{t-j} for j > 0, and 0 where it is in another segment. One pad for all taps: with a pad per
    # tap autograd saves a copy of each, 1.75x slower.
    padded_BNC = F.pad(x, (0, 0, num_taps - 1, 0))
    y = taps[..., -1] * x
    for j in range(1, num_taps):
        start = num_taps - 1 - j
        shifted = padded_BNC.narrow(1, start, num_tokens)
        if segments_BN is not None:
            segments_BT = segments_BN[:, num_taps - 1 :]
            is_same_BT = segments_BT == segments_BN.narrow(1, start, num_tokens)
            shifted = shifted * is_same_BT[..., None]
        y = y + taps[..., start] * shifted

    if activation:
        y = F.silu(y)
    if residual:
        y = x + y
    return y.to(dtype)


def resolve_backend(backend: str, num_taps: int = 0, *, dynamic: bool = False) -> str:
    """Return the backend: `compiled` for `auto` and for a kernel that it does not support."""
    is_too_wide = backend == "triton" and num_taps > TRITON_TAPS
    is_static_only = backend in OPTIONAL  # no kernel for taps that depend on the token
    if backend == "auto" or is_too_wide or (dynamic and is_static_only):
        return "compiled"
    return backend


def compile_options(device_type: str, backend: str) -> dict[str, Any]:
    """Return `options` of torch.compile for a block: on a GPU without intermediates (NOTES.md)."""
    if device_type != "cuda" or resolve_backend(backend) != "compiled":
        return {}
    return {
        "realize_acc_reads_threshold": 128,
        "realize_reads_threshold": 128,
        "realize_opcount_threshold": 1000,
    }


def check_canon_backend(backend: str, device_type: str | None = None) -> None:
    """Import the kernels of `backend`; raise UserError if it is unknown or unavailable."""
    check_choice("canon_backend", backend, BACKENDS)
    if device_type is None:
        device_type = "cuda" if torch.cuda.is_available() else "cpu"
    if problem := backend_problem(backend, device_type):
        raise UserError(
            "canon.unavailable",
            f'canon_backend = "{backend}", but {problem}; or choose "auto"',
            backend=backend,
        )
    if backend in OPTIONAL:
        _module(backend)


def backend_problem(
    backend: str, device_type: str, dtype: torch.dtype = torch.float32
) -> str | None:
    """Return why `backend` is unavailable for such tensors, or None; runs no kernel."""
    if backend not in OPTIONAL:
        return None
    if backend != "triton":
        return _module(backend).package_problem(backend)

    # Triton: the dtype, the package, then the device.
    if dtype not in TRITON_DTYPES:
        return f"the Triton kernels support float32, bfloat16 and float16, not {dtype}"
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed"
    if device_type == "cpu":
        if _is_interpreted():
            return None
        return "on a CPU Triton needs TRITON_INTERPRET=1, which is slow and for tests"
    if device_type != "cuda":
        return f'the Triton kernels run on "cuda", not on "{device_type}"'
    if not torch.cuda.is_available():
        return "no CUDA device is available"
    capability = torch.cuda.get_device_capability()
    if capability < TRITON_CAPABILITY:
        return f"the GPU's compute capability is {capability}, below {TRITON_CAPABILITY}"
    return None


def recurrence(mixer: str, backend: str) -> Recurrence:
    """Return the recurrence of `mixer` for its heads: in chunks, or by the kernels of `backend`."""
    form = partial(chunked, mixer)
    if backend == "triton":
        form = partial(_triton_or_chunked, recurrence_module(backend), mixer)
    elif backend == "fla":
        form = partial(_fla_or_chunked, recurrence_module(backend), mixer)
    return partial(_without_autocast, form)


def recurrence_module(backend: str) -> Any:
    """Import the kernels of a backend in RECURRENCES, which are not part of exports."""
    return importlib.import_module(RECURRENCES[backend])


def _triton_or_chunked(
    kernels: Any, mixer: str, *heads: Tensor, state: Tensor | None = None, **past: Any
) -> tuple[Tensor, Tensor]:
    """Compute by our kernels, or by the chunked form what they do not support.

    A single token updates the state in place, unless autograd or a compiled graph needs the old.
    """
    v_BTHV = values_of(mixer, heads)
    form: Recurrence = CHUNKED[mixer]
    if supports_triton(v_BTHV):
        has_state = state is not None and state.dtype == torch.float32 and state.is_contiguous()
        needs_old = torch.is_grad_enabled() or torch.compiler.is_compiling()
        if v_BTHV.shape[1] > 1:
            form = kernels.FORMS[mixer]
        elif has_state and not needs_old:
            form = kernels.STEPS[mixer]
    return form(*heads, state=state, **past)


def _fla_or_chunked(adapter: Any, mixer: str, *heads: Tensor, **past: Any) -> tuple[Tensor, Tensor]:
    """Compute by fla, or by the chunked form values it does not support, and single tokens."""
    v_BTHV = values_of(mixer, heads)
    form: Recurrence = CHUNKED[mixer]
    if v_BTHV.shape[1] > 1 and adapter.supports(v_BTHV):
        form = adapter.FORMS[mixer]
    return form(*heads, **past)


def _without_autocast(form: Recurrence, *heads: Any, **past: Any) -> tuple[Tensor, Tensor]:
    """Compute in the dtypes of `form`: autocast would round its sums and states."""
    device_type = heads[0].device.type
    if not torch.is_autocast_enabled(device_type):
        return form(*heads, **past)
    with torch.autocast(device_type, enabled=False):
        return form(*heads, **past)


def chunked(mixer: str, *heads: Tensor, **past: Any) -> tuple[Tensor, Tensor]:
    """Compute the chunked form; compiled for a GPU it saves its inputs only.

    Otherwise the partitioner merges what backward recomputes with forward's, and saves it: a 1b3
    block of GLA saves 172 KB per token instead of 64 (NOTES.md).
    """
    form = CHUNKED[mixer]
    if not (heads[0].is_cuda and torch.compiler.is_compiling() and torch.is_grad_enabled()):
        return form(*heads, **past)
    return checkpoint(form, *heads, use_reentrant=False, **past)


def check_mixer_backend(mixer: str, key_dim: int, backend: str) -> None:
    """Raise UserError if `backend` is unknown or cannot compute this mixer on this machine."""
    check_choice("mixer_backend", backend, MIXER_BACKENDS)
    if problem := mixer_problem(mixer, key_dim, backend):
        raise UserError(
            "mixer.unavailable",
            f'mixer_backend = "{backend}", but {problem}; or choose "auto"',
            backend=backend,
            problem=problem,
        )


def mixer_problem(mixer: str, key_dim: int, backend: str) -> str | None:
    """Return why `backend` can't compute `mixer` on this machine, or None; runs no kernel."""
    if backend not in RECURRENCES:
        return None
    if problem := recurrence_problem(mixer, key_dim):
        return problem
    if backend == "triton":
        device_type = "cuda" if torch.cuda.is_available() else "cpu"
        return backend_problem("triton", device_type)
    fla_problem: str | None = recurrence_module("fla").fla_problem(mixer)
    return fla_problem


def triton_kernels(backend: str, x: Tensor) -> Any:
    """Return the module of Canon's Triton kernels, or None if they can't compute `x`."""
    if backend != "triton" or not supports_triton(x):
        return None
    return _module(backend)


def supports_triton(x: Tensor) -> bool:
    """Return whether our Triton kernels compute tensors like x."""
    if x.dtype not in TRITON_DTYPES:
        return False
    device_type = x.device.type
    return device_type == "cuda" or (device_type == "cpu" and _is_interpreted())


def canon(x_BTC: Tensor, weight_C1K: Tensor, *, backend: str = "auto", **options: Any) -> Tensor:
    """Compute `canon_reference` by `backend`, or by `compiled` if it does not support the input."""
    y_BTC: Tensor
    if backend == "reference":
        y_BTC = canon_reference(x_BTC, weight_C1K, **options)
    elif options.get("z_BTR") is not None:
        y_BTC = canon_dynamic(x_BTC, weight_C1K, **options)
    elif fused := triton_kernels(backend, x_BTC):
        y_BTC = fused.canon_triton(x_BTC, weight_C1K, **options)
    elif backend in ("causal_conv1d", "fla"):
        y_BTC = _module(backend).canon_by_package(backend, x_BTC, weight_C1K, **options)
    else:
        y_BTC = canon_compiled(x_BTC, weight_C1K, **options)
    return y_BTC


def canon_gate(
    gate_BTF: Tensor,
    up_BTF: Tensor,
    weight_C1K: Tensor,
    *,
    residual: bool,
    activation: bool,
    relu2: bool,
    segments_BN: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """Compute act(canon(gate)) * canon(up), [B, T, F]; the weight's first F rows are gate's."""
    options: dict[str, Any] = {"residual": residual, "segments_BN": segments_BN}
    if fused := triton_kernels(backend, gate_BTF):
        return fused.canon_gate_triton(
            gate_BTF, up_BTF, weight_C1K, activation=activation, relu2=relu2, **options
        )
    if resolve_backend(backend) == "compiled" and not activation:
        return canon_gate_compiled(gate_BTF, up_BTF, weight_C1K, relu2=relu2, **options)

    # Canon of both parts, then the gate.
    gate_weight, up_weight = weight_C1K.chunk(2)
    gate_BTF = canon(gate_BTF, gate_weight, activation=activation, backend=backend, **options)
    up_BTF = canon(up_BTF, up_weight, activation=activation, backend=backend, **options)
    return ffn_activation(gate_BTF, "relu2" if relu2 else "silu") * up_BTF


def ffn_activation(x: Tensor, name: str) -> Tensor:
    """Return silu, relu squared ("relu2") or GPT-2's gelu of x."""
    if name == "gelu":
        return F.gelu(x, approximate="tanh")
    if name == "relu2":
        return F.relu(x).square()
    return F.silu(x)


def _is_interpreted() -> bool:
    """Return whether Triton runs its kernels in its interpreter, by the variable's same values."""
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "yes", "y")


def _module(backend: str) -> Any:
    # torch.compile can trace sys.modules, but not an import
    name = OPTIONAL[backend]
    module = sys.modules.get(name)
    return importlib.import_module(name) if module is None else module
