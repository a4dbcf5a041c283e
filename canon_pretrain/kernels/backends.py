"""Every way to compute Canon, and which one a model takes.

`model/canon.py` calls these with the name in `model.canon_backend`. All ways are the same function
of the same arguments, `reference.py`'s. The optional ones are reached by their module's name:
`check_canon_backend` imports it when a model is built, and traced functions only look it up.

Shapes: B batch, T tokens, C channels, K taps of the kernel, N = K - 1 + T, F ffn dim.
"""

import importlib
import importlib.util
import os
import sys
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from canon_pretrain.core.errors import UserError, check_choice
from canon_pretrain.kernels.compiled import canon_compiled, canon_gate_compiled
from canon_pretrain.kernels.reference import canon_reference

BACKENDS = ("auto", "reference", "compiled", "causal_conv1d", "fla", "triton")
OPTIONAL = ("causal_conv1d", "fla", "triton")
"""The backends that need a GPU or a package."""
_PACKAGES = "canon_pretrain.kernels.packages"
_TRITON = "canon_pretrain.kernels.triton.fused"
TRITON_TAPS = 4
"""The most taps that `triton` takes."""
TRITON_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
TRITON_CAPABILITY = (8, 0)
"""The first compute capability with bfloat16 arithmetic."""


def choose(backend: str, num_taps: int = 0) -> str:
    """Return the backend for a kernel of `num_taps`: `compiled` for `auto`, and for too many taps.

    A run on a GPU takes `triton` if its start-up check passes: titan/canon_choice.py decides before
    the model is built, and passes on a name that is not `auto`.
    """
    too_wide = backend == "triton" and num_taps > TRITON_TAPS
    return "compiled" if backend == "auto" or too_wide else backend


def compile_options(device_type: str, backend: str) -> dict[str, Any]:
    """Return `options` of torch.compile for a block by inductor, with and without Canon.

    On a GPU inductor stores whatever has more than 8 reads or 30 operations, which the sums of
    `compiled` have, in float32; with these it computes them where they are used. A block without
    Canon has the same code (NOTES.md). On a CPU inductor's own limits are kept.
    """
    if device_type != "cuda" or choose(backend) != "compiled":
        return {}
    return {
        "realize_acc_reads_threshold": 128,
        "realize_opcount_threshold": 1000,
        "realize_reads_threshold": 128,
    }


def check_canon_backend_fits(backend: str) -> None:
    """Raise UserError unless `backend` is known, whatever this machine has."""
    check_choice("canon_backend", backend, BACKENDS)


def check_canon_backend(backend: str, device_type: str | None = None) -> None:
    """Raise UserError unless `backend` is known and can run on this machine; import its kernels.

    `device_type`: where it is to run, by default "cuda" if there is one.
    """
    check_canon_backend_fits(backend)
    if device_type is None:
        device_type = "cuda" if torch.cuda.is_available() else "cpu"
    if problem := backend_problem(backend, device_type):
        raise UserError(f'canon_backend = "{backend}", but {problem}; or choose "auto"')
    if backend in OPTIONAL:
        _module(_TRITON if backend == "triton" else _PACKAGES)


def backend_problem(
    backend: str, device_type: str, dtype: torch.dtype = torch.float32
) -> str | None:
    """Return why `backend` can't run on such tensors here, or None; no kernel is tried."""
    if backend == "triton":
        return _triton_problem(device_type, dtype)
    if backend in OPTIONAL:
        problem: str | None = _module(_PACKAGES).package_problem(backend)
        return problem
    return None


def _triton_problem(device_type: str, dtype: torch.dtype) -> str | None:
    """Return why the Triton kernels can't run; asked before triton, Linux only, is imported.

    They run on a CUDA (or ROCm) device, and on a CPU in Triton's interpreter, for tests.
    """
    if dtype not in TRITON_DTYPES:
        names = ", ".join(str(known).removeprefix("torch.") for known in TRITON_DTYPES)
        return f"the Triton kernels take {names}, not {str(dtype).removeprefix('torch.')}"
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed"
    if device_type == "cpu":
        if _is_interpreted():
            return None
        return "on a CPU Triton only interprets (slowly, for tests), if TRITON_INTERPRET=1 is set"
    if device_type != "cuda":
        return f'the Triton kernels run on "cuda", not on "{device_type}"'
    if not torch.cuda.is_available():
        return "no CUDA device is available"
    if (capability := torch.cuda.get_device_capability()) < TRITON_CAPABILITY:
        return f"the GPU's compute capability is {capability}, below {TRITON_CAPABILITY}"
    return None


def _is_interpreted() -> bool:
    # as triton reads it
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "yes", "y")


def triton_kernels(backend: str, x: Tensor) -> Any:
    """Return the module of the Triton kernels, fused.py, if `backend` is theirs; else None.

    None too for a tensor that they don't take: float64, or on a CPU outside the interpreter. This
    is the one place where a model asks for them, at each of its sites.
    """
    if backend != "triton" or x.dtype not in TRITON_DTYPES:
        return None
    if x.device.type != "cuda" and not (x.device.type == "cpu" and _is_interpreted()):
        return None
    return _module(_TRITON)


def canon(
    x_BTC: Tensor,
    weight_C1K: Tensor,
    *,
    residual: bool,
    activation: bool,
    segments_BN: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """Compute `canon_reference` by `backend`; what it can't take goes to `compiled`."""
    options: dict[str, Any] = {"residual": residual, "activation": activation}
    options["segments_BN"] = segments_BN
    if backend == "reference":
        return canon_reference(x_BTC, weight_C1K, **options)
    y_BTC: Tensor
    if fused := triton_kernels(backend, x_BTC):
        y_BTC = fused.canon_triton(x_BTC, weight_C1K, **options)
    elif backend in ("causal_conv1d", "fla"):
        y_BTC = _module(_PACKAGES).canon_by_package(backend, x_BTC, weight_C1K, **options)
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
    """Compute act(canon(gate)) * canon(up), [B, T, F]: Canon-D and the gate behind it.

    The weight's rows are gate's and then up's. act is silu, or relu squared with `relu2`;
    `activation` is Canon's own.
    """
    options: dict[str, Any] = {"residual": residual, "segments_BN": segments_BN}
    if fused := triton_kernels(backend, gate_BTF):
        options |= {"activation": activation, "relu2": relu2}
        y_BTF: Tensor = fused.canon_gate_triton(gate_BTF, up_BTF, weight_C1K, **options)
        return y_BTF
    if choose(backend) == "compiled" and not activation:
        return canon_gate_compiled(gate_BTF, up_BTF, weight_C1K, relu2=relu2, **options)
    gate_weight, up_weight = weight_C1K.split((gate_BTF.shape[-1], up_BTF.shape[-1]))
    options |= {"activation": activation, "backend": backend}
    gate_BTF = canon(gate_BTF, gate_weight, **options)
    up_BTF = canon(up_BTF, up_weight, **options)
    return ffn_activation(gate_BTF, relu2) * up_BTF


def ffn_activation(x: Tensor, relu2: bool) -> Tensor:
    """Return the feed-forward's own activation: silu, or relu squared."""
    return F.relu(x).square() if relu2 else F.silu(x)


def _module(name: str) -> Any:
    # torch.compile can look into sys.modules, and can't import
    module = sys.modules.get(name)
    return importlib.import_module(name) if module is None else module
