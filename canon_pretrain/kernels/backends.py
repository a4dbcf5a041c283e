"""One door to Canon's arithmetic: every way to compute it, and which one a model takes.

`model/canon.py` calls these with the name that `model.canon_backend` gave. All ways are the same
function of the same arguments; `reference.py` says which. The optional ones are reached by their
module's name: `check_canon_backend` imports it when a model is built, and the traced functions
only look it up.

Shapes: B batch, T tokens, C channels, K taps of the kernel, N = K - 1 + T, F ffn dim.
"""

import importlib
import sys
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from canon_pretrain.core.errors import UserError, check_choice
from canon_pretrain.kernels.compiled import canon_compiled
from canon_pretrain.kernels.compiled_gate import canon_gate_compiled
from canon_pretrain.kernels.reference import canon_reference

BACKENDS = ("auto", "reference", "compiled", "causal_conv1d", "fla", "triton")
OPTIONAL = ("causal_conv1d", "fla", "triton")
"""Those that need a GPU, or a package, and can be missing."""
_CAUSAL_CONV1D = "canon_pretrain.kernels.causal_conv1d"
_FLA = "canon_pretrain.kernels.fla"
_TRITON = "canon_pretrain.kernels.triton.fused"
_TRITON_PROBLEM = "canon_pretrain.kernels.triton.problem"
TRITON_TAPS = 4
"""The most taps that `triton` takes."""
_TRITON_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def choose(backend: str) -> str:
    """The backend that `auto` stands for outside training; any other name is itself.

    A run on a GPU takes `triton` where its start-up check passes: titan/canon_choice.py decides
    before the model is built, and passes on a concrete name.
    """
    return "compiled" if backend == "auto" else backend


def compile_options(device_type: str, backend: str) -> dict[str, Any]:
    """`options` of torch.compile for a block by inductor, of models with and without Canon.

    On a GPU inductor stores whatever has more than 8 reads or 30 operations, which the sums of
    `compiled` have, in float32; with these it computes them where they are used. Without Canon a
    block's code is the same (NOTES.md). On a CPU inductor's own limits are kept.
    """
    if device_type != "cuda" or choose(backend) != "compiled":
        return {}
    return {
        "realize_acc_reads_threshold": 128,
        "realize_opcount_threshold": 1000,
        "realize_reads_threshold": 128,
    }


def check_canon_backend_fits(backend: str) -> None:
    """Raise UserError unless `backend` is known; no look at this machine."""
    check_choice("canon_backend", backend, BACKENDS)


def check_canon_backend(backend: str, device_type: str | None = None) -> None:
    """Raise UserError unless `backend` is known and can run on this machine; make it ready.

    `device_type`: where it is to run, by default "cuda" where there is one.
    """
    check_canon_backend_fits(backend)
    if device_type is None:
        device_type = "cuda" if torch.cuda.is_available() else "cpu"
    if problem := backend_problem(backend, device_type):
        raise UserError(f'canon_backend = "{backend}", but {problem}; or choose "auto"')
    if backend == "triton":
        importlib.import_module(_TRITON)


def backend_problem(
    backend: str, device_type: str, dtype: torch.dtype = torch.float32
) -> str | None:
    """Why `backend` can't run on such tensors here; None if it can. Its kernels are not tried."""
    problem: str | None = None
    if backend == "causal_conv1d":
        problem = importlib.import_module(_CAUSAL_CONV1D).causal_conv1d_problem()
    elif backend == "fla":
        problem = importlib.import_module(_FLA).fla_problem()
    elif backend == "triton":
        problem = importlib.import_module(_TRITON_PROBLEM).triton_problem(device_type, dtype)
    return problem


def canon(
    x_BTC: Tensor,
    weight_C1K: Tensor,
    *,
    residual: bool,
    activation: bool,
    segments_BN: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """`canon_reference` by `backend`; see there.

    What a backend can't take goes to `compiled`: float64, and on a CPU whatever needs a GPU.
    """
    options: dict[str, Any] = {"residual": residual, "activation": activation}
    options["segments_BN"] = segments_BN
    backend = choose(backend)
    if backend == "reference":
        return canon_reference(x_BTC, weight_C1K, **options)
    y_BTC: Tensor
    if fused := triton_kernels(backend, x_BTC):
        y_BTC = fused.canon_triton(x_BTC, weight_C1K, **options)
    elif backend == "causal_conv1d":
        y_BTC = _module(_CAUSAL_CONV1D).canon_causal_conv1d(x_BTC, weight_C1K, **options)
    elif backend == "fla":
        y_BTC = _module(_FLA).canon_fla(x_BTC, weight_C1K, **options)
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
    """act(canon(gate)) * canon(up), [B, T, F]: Canon-D and the gate behind it.

    The weight's rows are gate's and then up's. act is silu, or relu squared with `relu2`.
    `activation` is Canon's own.
    """
    options: dict[str, Any] = {"residual": residual, "segments_BN": segments_BN}
    if fused := triton_kernels(backend, gate_BTF):
        name = "relu2" if relu2 else "silu"
        options |= {"activation": activation, "ffn_activation": name}
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
    """The feed-forward's own activation: silu, or relu squared."""
    return F.relu(x).square() if relu2 else F.silu(x)


def triton_kernels(backend: str, x: Tensor) -> Any:
    """The module of the Triton kernels, fused.py, where `backend` asks for them; else None.

    None as well for a tensor that they don't take: float64, or on a CPU outside the interpreter.
    """
    if backend != "triton" or x.dtype not in _TRITON_DTYPES:
        return None
    if x.device.type != "cuda" and _module(_TRITON_PROBLEM).triton_problem(x.device.type, x.dtype):
        return None
    return _module(_TRITON)


def _module(name: str) -> Any:
    # torch.compile can look into sys.modules, and can't import
    module = sys.modules.get(name)
    return importlib.import_module(name) if module is None else module
