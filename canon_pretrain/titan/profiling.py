"""torchtitan's `[profiling]` keys in our loop: traces of single steps, and memory snapshots.

torchtitan's own profiler hands torch a None for a missing accelerator, its trace can end a run on a
full disk, and it knows no Canon. The files are where it puts them, profile_traces/iteration_N/
rankK_trace.json in the run folder, and `python -m canon_pretrain.run profile RUN` reads them.
"""

import contextlib
import os
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function, schedule
from torchtitan.tools.logging import logger
from torchtitan.tools.profiling import maybe_enable_memory_snapshot

from canon_pretrain.model.canon import Canon
from canon_pretrain.run.trace import CANON, DATA
from canon_pretrain.titan.device import has_accelerator
from canon_pretrain.titan.job_config import CanonJobConfig


@contextlib.contextmanager
def profiling(job: CanonJobConfig, model: nn.Module, *, step: int) -> Iterator[list[Any]]:
    """Yield what wants its `step()` called after each step: nothing unless the job asks for it.

    `step` is where the launch begins; cycles of `profiling.profile_freq` count from step 0.
    """
    config, folder = job.profiling, job.job.dump_folder
    with contextlib.ExitStack() as stack:
        tools = []
        if config.enable_profiling:
            compiled = job.compile.enable and "model" in job.compile.components
            if not compiled:  # it would have to leave its graph for them
                stack.enter_context(_named_canon(model))
            traces = Path(folder) / config.save_traces_folder
            tools.append(stack.enter_context(_tracing(config, traces, step)))
        if config.enable_memory_snapshot and has_accelerator():
            snapshot = maybe_enable_memory_snapshot(config, global_step=step, base_folder=folder)
            tools.append(stack.enter_context(snapshot))
        elif config.enable_memory_snapshot:
            logger.warning("profiling.enable_memory_snapshot: only a GPU's memory can be recorded")
        yield tools


def named_data(batches: Iterator[Any]) -> Iterator[Any]:
    """Yield the same batches; a trace shows the time that each one was waited for."""
    while True:
        with record_function(DATA):
            batch = next(batches)
        yield batch


@contextlib.contextmanager
def _tracing(config: Any, folder: Path, step: int) -> Iterator[profile]:
    written: list[int] = []

    def write(profiler: profile) -> None:
        path = folder / f"iteration_{profiler.step_num}" / f"rank{dist.get_rank()}_trace.json"
        unfinished = path.with_name(f".{path.name}")  # a reader finds whole ones only
        begin = time.monotonic()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            profiler.export_chrome_trace(str(unfinished))
            os.replace(unfinished, path)
        except (OSError, RuntimeError) as error:  # what torch makes of a file it can't write
            logger.warning(f"the trace {path} could not be written: {error}; training goes on")
            with contextlib.suppress(OSError):
                unfinished.unlink()
            return
        written.append(profiler.step_num)
        logger.info(f"wrote {path} in {time.monotonic() - begin:.1f} s")

    cycle = schedule(
        wait=config.profile_freq - config.profiler_warmup - config.profiler_active,
        warmup=config.profiler_warmup,
        active=config.profiler_active,
    )
    activities = [ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * has_accelerator()]
    logger.info(f"tracing {config.profiler_active} of every {config.profile_freq} steps: {folder}")
    # each trace is of its own cycle: that is what is wanted
    warnings.filterwarnings("ignore", message="Warning: Profiler clears events")
    with profile(
        activities=activities, schedule=cycle, on_trace_ready=write, record_shapes=True
    ) as profiler:
        profiler.step_num = step
        yield profiler
    if not written:
        logger.warning(
            f"no trace was written: this launch ended before a cycle of profiling.profile_freq = "
            f"{config.profile_freq} steps did"
        )


@contextlib.contextmanager
def _named_canon(model: nn.Module) -> Iterator[None]:
    """Let traces show where each Canon layer begins and ends, by hooks that are removed again."""
    open_scopes: list[record_function] = []

    def enter(module: nn.Module, inputs: Any) -> None:
        open_scopes.append(record_function(CANON).__enter__())

    def leave(module: nn.Module, inputs: Any, output: Any) -> None:
        open_scopes.pop().__exit__(None, None, None)

    layers = [layer for layer in model.modules() if isinstance(layer, Canon)]
    handles = [layer.register_forward_pre_hook(enter) for layer in layers]
    handles += [layer.register_forward_hook(leave, always_call=True) for layer in layers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
