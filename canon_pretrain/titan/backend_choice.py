"""Choose the kernels of Canon layers and recurrences: rank 0 checks them, all ranks use its choice.

A pass is recorded in ~/.cache/canon_pretrain under a digest of all that it depends on. So is a
fault that made the GPU unusable, so that the next launch does not meet it again.
"""

import contextlib
import hashlib
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import distributions
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torchtitan.config import TORCH_DTYPE_MAP
from torchtitan.tools.logging import logger

from canon_pretrain.core.errors import UserError
from canon_pretrain.core.files import read_record, write_json
from canon_pretrain.kernels.backends import OPTIONAL, RECURRENCES, resolve_backend
from canon_pretrain.model.args import ModelArgs
from canon_pretrain.titan.costs import auto_backend
from canon_pretrain.titan.job_config import CanonJobConfig

DEVICE_TYPES = ("cuda",)
"""Where `auto` tries kernels, and optional backends are checked."""
PACKAGES = ("triton", "fla-core", "causal-conv1d")
AUTOTUNED = ("fla",)
"""Backends of recurrences whose order of additions may differ in another process."""

T = TypeVar("T")


@dataclass(frozen=True)
class CheckResult:
    """The outcome of a backend's check; only `problem` is recorded on disk."""

    problem: str | None
    source: str = ""
    """Where the result comes from, for the log."""
    is_lost: bool = False
    """Whether a kernel fault made the GPU unusable in this process."""


@dataclass(frozen=True)
class Refusal:
    """A faster backend that failed its check."""

    backend: str
    problem: str
    slowdown: float | None = None
    """Estimated time of a step over that by this backend."""


@dataclass(frozen=True)
class BackendChoice:
    """The backend of a run (never `auto`), and the faster ones that were refused."""

    backend: str
    reason: str = ""
    refused: tuple[Refusal, ...] = ()

    def __str__(self) -> str:
        if not self.reason:
            return self.backend
        return f"{self.backend} ({self.reason})"


# -- Canon


def choose_canon(
    job: CanonJobConfig, device: torch.device, code: Mapping[str, str]
) -> BackendChoice | None:
    """Return rank 0's choice for Canon and the native conv1d; None without both. Collective.

    `code`: hashes of the source files. Raises UserError if the requested backend fails its check,
    or a check made the GPU unusable.
    """
    layers = job.model_args.kinds.values()
    if not any(layer.canon_set or layer.has_conv_kernel for layer in layers):
        return None
    requested = job.model.canon_backend
    is_auto = requested == "auto"
    backend = auto_backend(job.model_args) if is_auto else requested
    if device.type not in DEVICE_TYPES or backend not in OPTIONAL:
        reason = "auto" if is_auto else ""
        return BackendChoice(resolve_backend(requested), reason)

    # A backend must pass its check. One that is requested by name must not be replaced silently.
    check = _from_rank_zero(lambda: _check_canon(job, backend, device, code))
    if check.is_lost or (check.problem is not None and not is_auto):
        raise UserError(
            "canon.backend_failed",
            f'canon_backend = "{requested}": {backend} failed its check, {check.problem}, '
            f'{_state(check, device)}. Restart with "auto" or "compiled"',
            shared=True,
            backend=backend,
            problem=check.problem,
        )
    if check.problem is None:
        reason = f"auto; {check.source}" if is_auto else check.source
        return BackendChoice(backend, reason)

    if dist.get_rank() == 0:
        logger.warning(f"Canon uses compiled instead of triton, which is slower: {check.problem}")
    return BackendChoice(
        backend="compiled",
        reason="auto; triton failed its check",
        refused=(Refusal("triton", check.problem),),
    )


def _check_canon(
    job: CanonJobConfig, backend: str, device: torch.device, code: Mapping[str, str]
) -> CheckResult:
    """Compare a backend of Canon with float64 at the shapes of a run."""
    shape = (job.training.local_batch_size, job.training.seq_len)
    dtype = TORCH_DTYPE_MAP[job.training.mixed_precision_param]
    subject = {
        "backend": backend,
        "shape": shape,
        "dtype": str(dtype),
        "model": asdict(job.model_args),
    }

    def problem() -> str | None:
        from canon_pretrain.model import canon_check  # slow to import, needed on a GPU only

        return canon_check.training_problem(job.model_args, backend, shape, dtype, device)

    return _recorded(problem, subject, device, code)


# -- recurrences


def choose_mixer(
    job: CanonJobConfig, device: torch.device, code: Mapping[str, str]
) -> BackendChoice | None:
    """Return rank 0's choice for the recurrence; None if the model has none. Collective.

    All recurrences of a model use one backend: of those in RECURRENCES the first that passes its
    check, else `chunked`. `code`: hashes of the source files. Raises UserError if the requested
    backend fails, or a check made the GPU unusable.
    """
    layers = [layer for layer in job.model_args.kinds.values() if layer.recurrent is not None]
    if not layers:
        return None
    requested = job.model.mixer_backend
    candidates: Sequence[str] = ()
    if requested in RECURRENCES:
        candidates = (requested,)
    elif requested == "auto" and device.type in DEVICE_TYPES:
        candidates = auto_recurrences(job)

    refusals: list[tuple[str, str]] = []
    for backend in candidates:
        check = _from_rank_zero(partial(_check_recurrences, job, layers, backend, device, code))
        if check.problem is None:
            reason = f"auto; {check.source}" if requested == "auto" else check.source
            return _mixer_choice(job.model_args, backend, reason, refusals)

        # One that is requested by name must not be replaced silently.
        if check.is_lost or requested == backend:
            raise UserError(
                "mixer.unavailable",
                f'mixer_backend = "{requested}", but {backend} failed: {check.problem}, '
                f'{_state(check, device)}. Restart with "auto" or "chunked"',
                shared=True,
                backend=backend,
                problem=check.problem,
            )
        refusals.append((backend, check.problem))

    reason = "auto; no kernels passed their check" if refusals else ""
    return _mixer_choice(job.model_args, "chunked", reason, refusals)


def auto_recurrences(job: CanonJobConfig) -> Sequence[str]:
    """Return the backends of recurrences that `auto` tries on a GPU, the fastest first."""
    if job.debug.deterministic:
        return [backend for backend in RECURRENCES if backend not in AUTOTUNED]
    return [*RECURRENCES]


def planned_recurrence(job: CanonJobConfig) -> str:
    """Return the backend of recurrences that a job takes on a GPU, unless its check fails."""
    if job.model.mixer_backend == "auto":
        return auto_recurrences(job)[0]
    return job.model.mixer_backend


def _mixer_choice(
    args: ModelArgs, backend: str, reason: str, refusals: Sequence[tuple[str, str]]
) -> BackendChoice:
    """Return the choice of `backend`; on rank 0 warn what the refused ones would have saved.

    `refusals`: faster backends, and why each was refused.
    """
    refused = []
    for faster, problem in refusals:
        refused.append(Refusal(faster, problem, recurrence_slowdown(args, backend, over=faster)))

    if refused and dist.get_rank() == 0:
        mixers = dict.fromkeys(layer.mixer for layer in args.layer_args if layer.recurrent)
        problems = "; ".join(f"{refusal.backend}: {refusal.problem}" for refusal in refused)
        logger.warning(
            f"{' and '.join(mixers)} uses {backend} instead of {refused[0].backend}: about "
            f"{refused[0].slowdown:.3g} times as slow (computed for 1.3B on an H100). "
            f"Refused: {problems}"
        )
    return BackendChoice(backend, reason, tuple(refused))


def recurrence_slowdown(args: ModelArgs, backend: str, *, over: str) -> float:
    """Return the time of a step by a backend over that by another, a mean over the layers."""
    slowdowns = []
    for layer in args.layer_args:
        slowdown = 1.0
        if layer.recurrent is not None:
            step_times = layer.recurrent.step_times
            slowdown = step_times[backend] / step_times[over]
        slowdowns.append(slowdown)
    return sum(slowdowns) / len(slowdowns)


def _check_recurrences(
    job: CanonJobConfig,
    layers: Sequence[ModelArgs],
    backend: str,
    device: torch.device,
    code: Mapping[str, str],
) -> CheckResult:
    """Compare a backend with the chunked form in float64, for each kind of layer."""
    dtype = TORCH_DTYPE_MAP[job.training.mixed_precision_param]
    kinds = sorted({(layer.mixer, layer.key_dim, layer.value_dim) for layer in layers})

    def problem() -> str | None:
        from canon_pretrain.kernels.recurrence_check import check_mixer  # needed on a GPU only

        for mixer, key_dim, value_dim in kinds:
            if problem := check_mixer(backend, mixer, key_dim, value_dim, dtype, device):
                return problem
        return None

    subject = {"backend": backend, "recurrences": kinds, "dtype": str(dtype)}
    return _recorded(problem, subject, device, code)


# -- both


def _from_rank_zero(compute: Callable[[], T]) -> T:
    """Call `compute` on rank 0, and return its result on all ranks."""
    results: list[Any] = [compute() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(results, src=0)
    return results[0]


def _recorded(
    check: Callable[[], str | None],
    subject: Mapping[str, Any],
    device: torch.device,
    code: Mapping[str, str],
) -> CheckResult:
    """Return the result of `check`, or what an earlier launch recorded of the same.

    `subject`: what is checked, as JSON; `code`: hashes of the source files.
    """
    # All that a result depends on: machine, packages, code, and what is checked.
    packages = {}
    for name in PACKAGES:
        for distribution in distributions(name=name):
            packages[distribution.name] = distribution.version
    key = {
        "device": _name(device),
        "torch": f"{torch.__version__} {torch.version.cuda} {torch.version.hip}",
        "packages": packages,
        "code": {
            path: file_hash
            for path, file_hash in code.items()
            if path.startswith(("kernels/", "model/"))
        },
        **subject,
    }

    # An earlier launch may have recorded a result.
    key_text = json.dumps(key, sort_keys=True)
    digest = hashlib.sha256(key_text.encode()).hexdigest()[:32]
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    path = Path(cache) / "canon_pretrain" / "canon_check" / f"{digest}.json"
    with contextlib.suppress(UserError, OSError):  # missing or damaged: check
        problem = read_record(path, CheckResult).problem
        return CheckResult(
            problem and f"{problem} (recorded in {path})", source=f"checked before, {path}"
        )

    start = time.monotonic()
    problem = check()
    is_lost = _is_lost(device)

    # Record a pass, and a fault that would end the next launch too. Other failures may pass.
    if problem is None or is_lost:
        with contextlib.suppress(OSError):  # the next launch checks again
            path.parent.mkdir(parents=True, exist_ok=True)
            write_json(path, {"problem": problem, **key})
    seconds = time.monotonic() - start
    return CheckResult(
        problem=problem,
        source=f"equal to float64, checked in {seconds:.1f} s",
        is_lost=is_lost,
    )


def _state(check: CheckResult, device: torch.device) -> str:
    return "the GPU is unusable now" if check.is_lost else f"on {_name(device)}"


def _is_lost(device: torch.device) -> bool:
    """Return whether a kernel fault made the GPU unusable in this process; free memory."""
    if device.type != "cuda":
        return False
    try:  # after a fault in a kernel, every call fails
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
