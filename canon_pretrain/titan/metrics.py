"""Metrics of training steps: log.jsonl, the console, and profiler traces.

torchtitan's profiler fails without an accelerator, ends a run on a full disk, and does not label
Canon layers; ours writes the same files.
"""

import contextlib
import copy
import os
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.profiler import profile, record_function, schedule
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.distributed import ParallelDims
from torchtitan.tools.logging import logger
from torchtitan.tools.profiling import maybe_enable_memory_snapshot
from torchtitan.tools.utils import device_type

from canon_pretrain.data.mixture import Mixture
from canon_pretrain.machine.gpus import peak_flops
from canon_pretrain.model.canon import Canon
from canon_pretrain.model.counts import flops_formula
from canon_pretrain.run.background import LiveExports
from canon_pretrain.run.folder import CANON, DATA, RunFolder
from canon_pretrain.run.log import RunLog
from canon_pretrain.titan.baselines import Baselines
from canon_pretrain.titan.console import Console
from canon_pretrain.titan.data import CanonDataLoader
from canon_pretrain.titan.device import has_accelerator
from canon_pretrain.titan.job_config import CanonJobConfig


class CanonMetrics(MetricsProcessor):
    """torchtitan's MetricsProcessor with the run's log and console; rank 0 writes.

    `text`: the training text, if any. The loss is compared with that of its count models.
    """

    def __init__(
        self,
        job: CanonJobConfig,
        parallel_dims: ParallelDims,
        *,
        dataloader: CanonDataLoader,
        may_write: Callable[[], bool],
        text: Mixture | None,
        color: bool,
    ) -> None:
        # torchtitan would run wandb and TensorBoard in this process; ours follow the log in others
        silent = copy.copy(job)
        silent.metrics = copy.copy(job.metrics)
        silent.metrics.enable_wandb = silent.metrics.enable_tensorboard = False
        super().__init__(silent, parallel_dims)
        self.job_config = job
        self.world_size = parallel_dims.world_size
        self._dataloader = dataloader

        # torchtitan's takes lspci's "GH100 [H20]" for an H100, and an unknown device for an A100
        self._peak_flops: float | None = None
        if has_accelerator():
            name = torch.cuda.get_device_name()
            self._peak_flops = peak_flops(name)
            if self._peak_flops is None:
                logger.info(f"NOTE: no MFU is logged: the peak FLOP/s of {name} are not known")

        # The current step, and sums since the last logged one.
        self._step = 0
        self._tokens = 0
        self._tokens_per_step = job.tokens_per_step
        self._logged_at = 0
        self.ntokens_since_last_log: int = 0
        self._checkpoint_seconds = 0.0
        self._stall_seconds = 0.0

        # Where events go; the log and the count of the training text on rank 0 only.
        self._exports = LiveExports()
        self.console = Console(job.training.steps, job.last_step, color=color)
        self.run_log: RunLog | None = None
        self._baselines: Baselines | None = None
        if dist.get_rank() == 0:
            run = RunFolder(Path(job.job.dump_folder))
            self.run_log = RunLog(run.log_file, may_write)
            if text is not None:
                self._baselines = Baselines(text)

    def event(self, name: str, **fields: Any) -> None:
        """Append an event to the run's log without waiting for the disk; rank 0 only."""
        if self.run_log is None:
            return
        if name == "checkpoint":
            self._checkpoint_seconds += fields["seconds"]
            self._stall_seconds += fields["stall_seconds"]
        if "step" in fields and "tokens" not in fields:
            # an event may be of an earlier step, such as the end of a save
            steps_ago = self._step - fields["step"]
            fields["tokens"] = self._tokens - steps_ago * self._tokens_per_step
        self.run_log.write(name, **fields)
        self.console.event(name, fields)

    def flush(self) -> None:
        """Wait until the log is on disk, before writing what must not exist without it."""
        if self.run_log is not None:
            self.run_log.flush()

    def set_position(self, step: int, tokens: int) -> None:
        """Set the current step and tokens; called after a load and after each step."""
        self._step = step
        self._tokens = tokens
        self.console.set_step(step)

    def begin(self, step: int) -> None:
        """Start the timers, the console and the exports of a run at `step`."""
        self._logged_at = step
        self.time_last_log = time.perf_counter()
        if self.run_log is None:
            return
        self.console.begin(step)
        self._exports.start(self.job_config.metrics, self.run_log.path.parent)

    def interlude(self, name: str, step: int, fields: dict[str, Any]) -> None:
        """Report a validation or samples; their `seconds` do not count as training time."""
        self.event(name, step=step, **fields)
        self.time_last_log += fields["seconds"]

    def log(self, step: int, measured: dict[str, Any]) -> None:
        """Report `step`: losses in nats per token, gradient norm before clipping; collective."""
        seconds = time.perf_counter() - self.time_last_log
        speed = self.ntokens_since_last_log / seconds  # of this rank
        fields: dict[str, Any] = {
            "step": step,
            **measured,
            "tokens_per_second": self.world_size * speed,
            "tokens_per_second_per_device": speed,
            "seconds_per_step": seconds / (step - self._logged_at),
            "data_wait": sum(self.data_loading_times) / seconds,
            "memory_gib": self.device_memory_monitor.get_peak_stats().max_reserved_gib,
            "restarts": self.run_log.segment - 1 if self.run_log is not None else 0,
            "checkpoint_seconds": self._checkpoint_seconds,
            "checkpoint_stall_seconds": self._stall_seconds,
        }
        if self._peak_flops is not None:
            fields["mfu"] = self.num_flops_per_token * speed / self._peak_flops
            fields["mfu_formula"] = flops_formula(self.job_config.model_args)

        # What was read, for comparing runs.
        fields["data_digests"] = self._global_digests()
        fields["source_tokens"] = self._dataloader.source_tokens

        # Losses of count models, once they are known, then the step.
        if self._baselines is not None and (count_losses := self._baselines.take()):
            self.event("count_models", **asdict(count_losses))
        self.event("step", **fields)
        self._exports.check()

        # Start the next interval; what logging took does not count.
        self._logged_at = step
        self._checkpoint_seconds = 0.0
        self._stall_seconds = 0.0
        self.ntokens_since_last_log = 0
        self.data_loading_times.clear()
        self.time_last_log = time.perf_counter()
        self.device_memory_monitor.reset_peak_stats()

    def _global_digests(self) -> list[str]:
        """Return a digest of each global batch since the last logged step; collective."""
        # int64 sums wrap modulo 2**64, as the digests do
        digests = self._dataloader.take_digests()
        signed = []
        for digest in digests:
            signed.append(digest - (1 << 64) if digest >= 1 << 63 else digest)
        sums = torch.tensor(signed, dtype=torch.int64, device=device_type)
        dist.all_reduce(sums)
        return [f"{digest % (1 << 64):016x}" for digest in sums.tolist()]

    def close(self) -> None:
        self.console.end()
        if self.run_log is not None:
            self.run_log.close()
            self.run_log = None
        self._exports.finish()
        super().close()


@contextlib.contextmanager
def profiling(job: CanonJobConfig, model: nn.Module, *, step: int) -> Iterator[list[Any]]:
    """Yield the job's profilers. Call the `step()` of each after each training step."""
    config = job.profiling
    folder = job.job.dump_folder
    with contextlib.ExitStack() as stack:
        profilers: list[Any] = []
        if config.enable_profiling:
            # in compiled blocks, the labels would break the graph
            if not job.compiles_model:
                _name_canon(model, stack)
            traces = Path(folder) / config.save_traces_folder
            profilers.append(stack.enter_context(_tracing(config, traces, step)))

        if config.enable_memory_snapshot and has_accelerator():
            snapshot = maybe_enable_memory_snapshot(config, global_step=step, base_folder=folder)
            profilers.append(stack.enter_context(snapshot))
        elif config.enable_memory_snapshot:
            logger.warning("profiling.enable_memory_snapshot needs a GPU")
        yield profilers


def named_data(batches: Iterator[Any]) -> Iterator[Any]:
    """Yield the same batches, with the wait for each one labeled in traces."""
    while True:
        with record_function(DATA):
            batch = next(batches)
        yield batch


def _tracing(config: Any, folder: Path, step: int) -> profile:
    """Return a profiler that traces the last steps of each cycle, from `step` on."""

    def write(profiler: profile) -> None:
        step_folder = folder / f"iteration_{profiler.step_num}"
        path = step_folder / f"rank{dist.get_rank()}_trace.json"
        unfinished = path.with_name(f".{path.name}")  # renamed when complete
        try:
            step_folder.mkdir(parents=True, exist_ok=True)
            profiler.export_chrome_trace(str(unfinished))
            os.replace(unfinished, path)
        except (OSError, RuntimeError) as error:  # torch raises either if it cannot write
            logger.warning(f"cannot write the trace {path}: {error}; training continues")
            with contextlib.suppress(OSError):
                unfinished.unlink()

    warmup = config.profiler_warmup
    active = config.profiler_active
    wait = config.profile_freq - warmup - active
    cycle = schedule(wait=wait, warmup=warmup, active=active)
    logger.info(f"tracing {active} of every {config.profile_freq} steps: {folder}")
    # intended: each trace covers one cycle
    warnings.filterwarnings("ignore", message="Warning: Profiler clears events")
    tracer = profile(schedule=cycle, on_trace_ready=write, record_shapes=True)
    tracer.step_num = step
    return tracer


def _name_canon(model: nn.Module, stack: contextlib.ExitStack) -> None:
    """Label Canon layers in traces, until `stack` is closed."""
    scopes: list[record_function] = []  # that are open, innermost last

    def enter(*_: Any) -> None:
        scopes.append(record_function(CANON).__enter__())

    def leave(*_: Any) -> None:
        scopes.pop().__exit__(None, None, None)

    for layer in model.modules():
        if isinstance(layer, Canon):
            stack.callback(layer.register_forward_pre_hook(enter).remove)
            stack.callback(layer.register_forward_hook(leave, always_call=True).remove)
