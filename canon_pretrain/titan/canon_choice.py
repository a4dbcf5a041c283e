"""Which backend computes a run's Canon layers: decided once, before the model is built."""

import contextlib
import hashlib
import json
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torchtitan.config import TORCH_DTYPE_MAP
from torchtitan.tools.logging import logger

from canon_pretrain.core.errors import UserError
from canon_pretrain.core.files import read_record, write_json
from canon_pretrain.kernels.backends import OPTIONAL, choose
from canon_pretrain.titan.job_config import CanonJobConfig

DEVICE_TYPES = ("cuda",)
"""Where `auto` is `triton` if the check passes, and a named backend is checked."""
PACKAGES = ("triton", "fla-core", "causal-conv1d")


@dataclass(frozen=True)
class Verdict:
    problem: str | None


@dataclass(frozen=True)
class CanonChoice:
    """The backend that a run takes, never `auto`, and what the check of `triton` found."""

    backend: str
    why: str = ""
    refused: str | None = None

    def __str__(self) -> str:
        return f"{self.backend} ({self.why})" if self.why else self.backend


def choose_canon(
    job: CanonJobConfig, device: torch.device, code: Mapping[str, str]
) -> CanonChoice | None:
    """Decide for all ranks; collective. None if the model has no Canon layers."""
    asked = job.model.canon_backend
    if not job.model_args.canon_set:
        return None
    backend = "triton" if asked == "auto" else asked
    if device.type not in DEVICE_TYPES or backend not in OPTIONAL:
        return CanonChoice(choose(asked), "auto" if asked == "auto" else "")
    answer: list[Any] = [None]
    if dist.get_rank() == 0:
        answer[0] = _checked(job, backend, device, code)
    dist.broadcast_object_list(answer, src=0)
    problem, how, is_lost = answer[0]
    if is_lost or (problem is not None and asked != "auto"):
        state = (
            "which has left the GPU unusable: start" if is_lost else f"on {_name(device)}: start"
        )
        raise UserError(
            f'canon_backend = "{asked}": {backend} failed its check, {problem}, {state} again with '
            '"auto", or with --model.canon_backend compiled',
            shared=True,
        )
    if problem is None:
        return CanonChoice(backend, f"{asked}; {how}" if asked == "auto" else how)
    if dist.get_rank() == 0:
        logger.warning(
            f"canon_backend triton is NOT used, and Canon is slower than it could be: {problem}. "
            "All ranks take compiled"
        )
    return CanonChoice("compiled", "auto; triton failed its check", refused=problem)


def _checked(
    job: CanonJobConfig, backend: str, device: torch.device, code: Mapping[str, str]
) -> tuple[str | None, str, bool]:
    """Return what is wrong with `backend`, how that is known, and whether the GPU is lost by it."""
    shape = (job.training.local_batch_size, job.training.seq_len)
    dtype = TORCH_DTYPE_MAP[job.training.mixed_precision_param]
    key = {
        "backend": backend,
        "device": _name(device),
        "torch": f"{torch.__version__} {torch.version.cuda} {torch.version.hip}",
        "packages": {d.name: d.version for name in PACKAGES for d in distributions(name=name)},
        "code": {p: h for p, h in code.items() if p.startswith(("kernels/", "model/"))},
        "shape": shape,
        "dtype": str(dtype),
        "model": vars(job.model_args),
    }
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:32]
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    path = Path(home) / "canon_pretrain" / "canon_check" / f"{digest}.json"
    with contextlib.suppress(UserError, OSError):  # there is none, or it is damaged
        problem = read_record(path, Verdict).problem
        return problem and f"{problem} (known from {path})", f"checked before, {path}", False
    from canon_pretrain.model import canon_check  # only a GPU needs it

    start = time.monotonic()
    problem = canon_check.training_problem(job.model_args, backend, shape, dtype, device)
    is_lost = _is_lost(device)
    if problem is None or is_lost:  # else the cause may be mended: look again
        with contextlib.suppress(OSError):  # the next launch checks again
            path.parent.mkdir(parents=True, exist_ok=True)
            write_json(path, {"problem": problem, **key})
    return problem, f"equal to float64, checked in {time.monotonic() - start:.1f} s", is_lost


def _is_lost(device: torch.device) -> bool:
    """Return whether a kernel's fault has ended this process's use of the GPU; free memory."""
    if device.type != "cuda":
        return False
    try:
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    except RuntimeError:
        return True
    return False


def _name(device: torch.device) -> str:
    if device.type != "cuda":
        return device.type
    major, minor = torch.cuda.get_device_capability(device)
    return f"{torch.cuda.get_device_name(device)}, compute capability {major}.{minor}"
