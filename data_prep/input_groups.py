"""Build units, in this process or in several: read inputs, encode them, write both splits' parts.

A unit is a range of the plan's inputs, and its parts depend on the plan alone.
"""

import multiprocessing
import multiprocessing.connection
import os
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Self

import numpy as np

from canon_pretrain.core.errors import UserError
from canon_pretrain.data.shard_writer import ShardWriter, remove_input_group
from canon_pretrain.data.tokenizer import Tokenizer
from data_prep import sources
from data_prep.folder import (
    SPLITS,
    TRAIN,
    VALIDATION,
    input_group_lock,
    is_complete,
    load_tokenizer,
    log,
)
from data_prep.plan import Plan, is_held_out
from data_prep.readers import InputReader, Skipped


@dataclass(frozen=True)
class InputGroupJob:
    """What a worker process needs to build one unit: `plan` has the unit's inputs alone."""

    folder: Path
    root: Path
    unit: int
    plan: Plan
    plan_sha256: str

    @classmethod
    def of(cls, folder: Path, root: Path, plan: Plan, unit: int) -> Self:
        """The job that builds `unit` below `folder` from the inputs below `root`."""
        own = replace(plan, inputs=plan.inputs[slice(*plan.units[unit])], units=())
        return cls(folder, root, unit, own, plan.sha256)

    def writer(self, split: str) -> ShardWriter:
        return ShardWriter(
            self.folder / split,
            self.unit,
            vocab_size=self.plan.tokenizer.vocab_size,
            eos_id=self.plan.tokenizer.eos_id,
            plan_sha256=self.plan_sha256,
            max_shard_tokens=self.plan.options.max_part_tokens,
            version=self.plan.version,
        )


# once per process: what it has learned of the text's words stays warm
_cached_tokenizer = lru_cache(maxsize=1)(load_tokenizer)
# in a worker process: the build's `new_counts`
_counts: Any = None


def new_counts(num_units: int) -> Any:
    """Return what a build's processes share, int64 [units, 2]: documents and tokens so far."""
    return multiprocessing.get_context("spawn").RawArray("q", 2 * num_units)


def build_input_group(job: InputGroupJob, counts: Any = None) -> None:
    """Write one unit's parts in both splits, or none of them."""
    with input_group_lock(job.folder, job.unit):
        # a killed run's worker may have committed it, or may come here after another run did
        if is_complete(job.folder, job.unit, job.plan_sha256):
            return
        tokenizer = _cached_tokenizer(job.folder, job.plan.tokenizer)
        # before anything that the inputs made is removed
        sources.fetch(job.plan.source, job.plan.source_version, job.root, job.plan.inputs)
        for split in SPLITS:
            (job.folder / split).mkdir(exist_ok=True)
            remove_input_group(job.folder / split, job.unit)
        try:
            _write_input_group(job, tokenizer, counts)
        except BaseException:
            # half a unit is of no use to the next run, and may be what fills the disk
            for split in SPLITS:
                with suppress(OSError):
                    remove_input_group(job.folder / split, job.unit)
            raise


def _write_input_group(job: InputGroupJob, tokenizer: Tokenizer, counts: Any) -> None:
    plan, options = job.plan, job.plan.options
    bos = np.array([plan.tokenizer.bos_id] if options.bos else [], dtype=np.int64)
    eos = np.array([plan.tokenizer.eos_id], dtype=np.int64)
    skipped: Counter[str] = Counter()
    hashes: dict[str, str] = {}
    row = -1
    with job.writer(TRAIN) as train, job.writer(VALIDATION) as validation:
        for known in plan.inputs:
            fields = plan.text_field, plan.group_field
            reader = InputReader(job.root, known, *fields, options.max_line_bytes)
            for document in reader.rows():
                row += 1
                if isinstance(document, Skipped):
                    skipped[document.reason] += 1
                    continue
                ids = np.concatenate([bos, tokenizer.encode(document.text), eos])
                held_out = is_held_out(document.utf8, options.holdout)
                (validation if held_out else train).add(
                    ids,
                    num_bytes=len(document.utf8),
                    row=row,
                    group=document.group,
                    repaired=document.repaired,
                )
                if counts is not None:  # no lock: this process alone builds the unit
                    counts[2 * job.unit] += 1
                    counts[2 * job.unit + 1] += len(ids)
            hashes[known.path] = reader.sha256
        validation.finish()
        # rows that made no document belong to no split: counted once, in train's last mark
        train.finish(skipped, hashes)


# ---- processes


def start_worker(counts: Any) -> None:
    """Let this worker process end with its parent (else it would go on), silently at Ctrl-C."""
    global _counts
    _counts = counts
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        multiprocessing.connection.wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


@contextmanager
def worker_pool(workers: int, counts: Any = None) -> Iterator[ProcessPoolExecutor]:
    """Start processes that end with this one; a killed one is a UserError in the block."""
    # spawn: a fork would copy SentencePiece's and rich's threads in an unknown state
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, context, start_worker, (counts,)) as pool:
        try:
            yield pool
        except BrokenProcessPool:
            raise UserError(
                "todo.units",
                "a worker process was killed (out of memory?); run the same command again, which "
                "continues, perhaps with fewer --workers",
            ) from None
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _build_in_worker(job: InputGroupJob) -> int:
    build_input_group(job, _counts)
    return job.unit


def run_jobs(
    jobs: Sequence[InputGroupJob], workers: int, wanted: Callable[[int], bool], counts: Any
) -> Iterator[int]:
    """Run the `wanted` jobs in order, here or in `workers` processes; yield the finished units."""
    if workers == 1 or len(jobs) < 2:
        for each in jobs:
            if wanted(each.unit):
                build_input_group(each, counts)
                yield each.unit
        return
    waiting, running = iter(jobs), set[Future[int]]()
    with worker_pool(min(workers, len(jobs)), counts) as pool:
        try:
            while True:
                while len(running) < workers and (job := next(waiting, None)):
                    if wanted(job.unit):
                        running.add(pool.submit(_build_in_worker, job))
                if not running:
                    return
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    unit = future.result()
                    running.remove(future)
                    yield unit
        except (UserError, OSError) as error:
            if others := len(running) - 1:
                log(f"failed: {error}\nending once {others} other unit(s) in work are built")
            wait(running)  # shutdown does not, once it was told not to
            raise
