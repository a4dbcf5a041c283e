"""Whether the Triton kernels of this folder can run here; asked before they are imported.

`backends.py` and the bench ask by importlib. Nothing here imports triton, which exists on Linux
only and reads TRITON_INTERPRET when it is imported.
"""

import importlib.util
import os

import torch

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MIN_COMPUTE_CAPABILITY = (8, 0)  # bfloat16 arithmetic


def triton_problem(device_type: str, dtype: torch.dtype) -> str | None:
    """Why the Triton kernels can't take tensors of `dtype` on `device_type`; None where they can.

    They run on a CUDA (or ROCm) device, and on a CPU in Triton's interpreter, for tests.
    """
    if dtype not in DTYPES:
        names = ", ".join(str(known).removeprefix("torch.") for known in DTYPES)
        return f"the Triton kernels take {names}, not {str(dtype).removeprefix('torch.')}"
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed"
    if device_type == "cpu":
        if _interpreting():
            return None
        return (
            "on a CPU Triton only interprets (slowly, for tests), where TRITON_INTERPRET=1 is set"
        )
    if device_type != "cuda":
        return f'the Triton kernels run on "cuda", not on "{device_type}"'
    if not torch.cuda.is_available():
        return "no CUDA device is available"
    capability = torch.cuda.get_device_capability()
    if capability < MIN_COMPUTE_CAPABILITY:
        return f"the GPU's compute capability is {capability}, below {MIN_COMPUTE_CAPABILITY}"
    return None


def _interpreting() -> bool:
    # as triton reads it
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "yes", "y")
