"""What a training step reports: a line in log.jsonl, and progress for the person who watches.

torchtitan's MetricsProcessor measures; this one also knows the whole run (all ranks, all steps),
so that it can say how far the run is and when it will end.
"""

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.distributed import ParallelDims
from torchtitan.protocols.model import BaseModelArgs
from torchtitan.tools.logging import logger
from torchtitan.tools.utils import device_type

from canon_pretrain.model.args import FLOPS_FORMULA
from canon_pretrain.run.folder import RunFolder
from canon_pretrain.run.log import RunLog
from canon_pretrain.titan.data import CanonDataLoader
from canon_pretrain.titan.device import has_accelerator
from canon_pretrain.titan.job_config import CanonJobConfig


class CanonMetrics(MetricsProcessor):
    """torchtitan's processor with the run's log and a console that knows the end of the run.

    Rank 0 writes; the other ranks only measure.
    """

    def __init__(self, job: CanonJobConfig, parallel_dims: ParallelDims) -> None:
        super().__init__(job, parallel_dims)
        self.world_size = parallel_dims.world_size
        self.last_step = job.last_step
        self.may_write: Callable[[], bool] = lambda: True  # set by the trainer, as is the next
        self.must_log = False
        """Set by the trainer before a step that is the last or leaves a checkpoint: a line for each
        means that the digests of all that a checkpoint has seen stand in the log."""
        self.total_steps = job.training.steps
        self.ntokens_since_last_log: int = 0
        self.is_writer = torch.distributed.get_rank() == 0
        self.run_log: RunLog | None = None
        self.dataloader: CanonDataLoader | None = None  # set by the trainer, which builds it later
        self.console = Console(self.total_steps)
        if self.is_writer:
            self.run_log = RunLog(RunFolder(Path(job.job.dump_folder)).log_file)

    def should_log(self, step: int) -> bool:
        return super().should_log(step) or self.must_log

    def event(self, name: str, **fields: Any) -> None:
        """Append an event to the run's log (rank 0 only), while the folder is this launch's."""
        if self.run_log is not None and self.may_write():
            self.run_log.write(name, **fields)

    def begin(self, step: int) -> None:
        """Start the clocks of a (resumed) run that stands at `step`."""
        self._logged_at = step
        self.time_last_log = time.perf_counter()
        if self.is_writer:
            self.console.begin(step)

    def log(
        self,
        step: int,
        global_avg_loss: float,
        global_max_loss: float,
        grad_norm: float,
        extra_metrics: dict[str, Any] | None = None,
    ) -> None:
        """Report `step`: losses in nats a token, gradient norm before clipping; see the class."""
        seconds = time.perf_counter() - self.time_last_log
        steps = step - self._logged_at
        tokens_per_second = self.world_size * self.ntokens_since_last_log / seconds
        data_wait = sum(self.data_loading_times) / seconds
        memory = self.device_memory_monitor.get_peak_stats()
        extra = extra_metrics or {}
        fields: dict[str, Any] = {
            "step": step,
            "tokens": int(extra.get("n_tokens_seen", 0)),
            "loss": global_avg_loss,
            "max_loss": global_max_loss,
            "grad_norm": grad_norm,
            "lr": extra.get("lr"),
            "tokens_per_second": tokens_per_second,
            "tokens_per_second_per_device": tokens_per_second / self.world_size,
            "seconds_per_step": seconds / steps,
            "data_wait": data_wait,
            "memory_gib": memory.max_reserved_gib,
        }
        if has_accelerator():  # a CPU has no stated peak to be a fraction of
            flops = self.num_flops_per_token * tokens_per_second / self.world_size
            fields["mfu"] = flops / self.gpu_peak_flops
            fields["mfu_formula"] = FLOPS_FORMULA
        fields["data_digests"] = self._global_digests()
        if self.dataloader is not None:
            fields["source_tokens"] = self.dataloader.source_tokens
        self.event("step", **fields)
        self.logger.log({k: v for k, v in fields.items() if isinstance(v, int | float)}, step)
        if self.is_writer:
            remaining = (self.last_step - step) * seconds / steps
            self.console.report(step, fields, remaining)
        self._logged_at = step
        self.ntokens_since_last_log = 0
        self.data_loading_times.clear()
        self.time_last_log = time.perf_counter()
        self.device_memory_monitor.reset_peak_stats()

    def _global_digests(self) -> list[str]:
        """A digest of each global batch since the last line, the last of them this step's.

        Two runs with equal digests saw the same samples, at any world size.
        """
        own = self.dataloader.take_digests() if self.dataloader is not None else []
        # int64 holds the bits; its sum wraps as the digests do
        signed = [digest - (1 << 64) if digest >= 1 << 63 else digest for digest in own]
        total = torch.tensor(signed, dtype=torch.int64, device=device_type)
        torch.distributed.all_reduce(total)
        return [f"{digest % (1 << 64):016x}" for digest in total.tolist()]

    def close(self) -> None:
        self.console.end()
        if self.run_log is not None:
            self.run_log.close()
            self.run_log = None
        super().close()


class Console:
    """A bar on a terminal, plain lines elsewhere."""

    def __init__(self, total_steps: int) -> None:
        self.total_steps = total_steps
        self._bar: Progress | None = None
        self._task: TaskID | None = None

    def begin(self, step: int) -> None:
        """Show a run that stands at `step`."""
        if not sys.stdout.isatty():
            return
        self._bar = Progress(
            TextColumn("step {task.completed}/{task.total}"),
            BarColumn(),
            TextColumn("{task.percentage:>5.1f} %  {task.fields[report]}"),
            TimeRemainingColumn(),
        )
        self._task = self._bar.add_task("train", total=self.total_steps, completed=step, report="")
        self._bar.start()

    def report(self, step: int, fields: dict[str, Any], remaining_s: float) -> None:
        """Show one step's figures; `remaining_s` seconds are left until this launch ends."""
        text = (
            f"loss {fields['loss']:.4f}  grad_norm {fields['grad_norm']:.3f}  "
            f"lr {fields['lr']:.2e}  {fields['tokens_per_second']:,.0f} tok/s"
        )
        if "mfu" in fields:
            text += f"  MFU {fields['mfu']:.1%}"
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=step, report=text)
        else:
            percent = 100 * step / self.total_steps
            logger.info(
                f"step {step}/{self.total_steps}  {percent:.1f} %  {text}  ETA {_hms(remaining_s)}"
            )

    def end(self) -> None:
        """Leave the terminal as it was."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


def _hms(seconds: float) -> str:
    """1:02:03, or 2:03 under an hour."""
    minutes, s = divmod(round(seconds), 60)
    hours, m = divmod(minutes, 60)
    return f"{hours}:{m:02}:{s:02}" if hours else f"{m}:{s:02}"


def build_metrics(
    job_config: CanonJobConfig, parallel_dims: ParallelDims, model_args: BaseModelArgs
) -> CanonMetrics:
    """The TrainSpec's builder."""
    return CanonMetrics(job_config, parallel_dims)
