"""Build input groups, in one or several processes: read, encode, write the shards of both splits.

An input group is a range of the plan's inputs; its shards depend on the plan alone.
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
from data_prep.readers import InputReader, Skipped, cut_documents


@dataclass(frozen=True)
class InputGroupJob:
    """One input group to build from inputs below `root`; `plan` has its inputs only."""

    folder: Path
    root: Path
    group: int
    plan: Plan
    plan_sha256: str

    @classmethod
    def of(cls, folder: Path, root: Path, plan: Plan, group: int) -> Self:
        first, end = plan.units[group]
        group_plan = replace(plan, inputs=plan.inputs[first:end], units=())
        return cls(folder, root, group, group_plan, plan.sha256)

    def writer(self, split: str) -> ShardWriter:
        return ShardWriter(
            self.folder / split,
            self.group,
            vocab_size=self.plan.tokenizer.vocab_size,
            eos_id=self.plan.tokenizer.eos_id,
            plan_sha256=self.plan_sha256,
            max_shard_tokens=self.plan.options.max_part_tokens,
            version=self.plan.version,
        )


# one per process, for its word cache
_cached_tokenizer = lru_cache(maxsize=1)(load_tokenizer)
# in a worker process: the shared array of `new_counts`
_counts: Any = None


def new_counts(num_groups: int) -> Any:
    """Return shared memory of documents and tokens so far, int64 [input groups, 2]."""
    return multiprocessing.get_context("spawn").RawArray("q", 2 * num_groups)


def build_input_group(job: InputGroupJob, counts: Any = None) -> None:
    """Write an input group's shards in both splits, or none of them."""
    with input_group_lock(job.folder, job.group):
        # another run may have committed it since the job was made
        if is_complete(job.folder, job.group, job.plan_sha256):
            return

        # Download before removing earlier shards.
        tokenizer = _cached_tokenizer(job.folder, job.plan.tokenizer)
        sources.fetch(job.plan.source, job.plan.source_version, job.root, job.plan.inputs)
        for split in SPLITS:
            (job.folder / split).mkdir(exist_ok=True)
            remove_input_group(job.folder / split, job.group)

        try:
            _write_input_group(job, tokenizer, counts)
        except BaseException:
            # half an input group is useless to the next run, and takes disk space
            for split in SPLITS:
                with suppress(OSError):
                    remove_input_group(job.folder / split, job.group)
            raise


def _write_input_group(job: InputGroupJob, tokenizer: Tokenizer, counts: Any) -> None:
    """Encode the documents of the inputs into the shards of their splits."""
    plan = job.plan
    options = plan.options
    bos = np.array([plan.tokenizer.bos_id] if options.bos else [], dtype=np.int64)
    eos = np.array([plan.tokenizer.eos_id], dtype=np.int64)

    skipped: Counter[str] = Counter()
    hashes: dict[str, str] = {}
    row = -1  # of the group, counting all rows of its inputs
    with job.writer(TRAIN) as train, job.writer(VALIDATION) as validation:
        for source_input in plan.inputs:
            reader = InputReader(
                job.root, source_input, plan.text_field, plan.group_field, options.max_line_bytes
            )
            for document in cut_documents(reader.rows(), options.max_document_bytes):
                row += 1
                if isinstance(document, Skipped):
                    skipped[document.reason] += 1
                    continue

                # The split depends on the text alone.
                ids = np.concatenate([bos, tokenizer.encode(document.text), eos])
                writer = validation if is_held_out(document.utf8, options.holdout) else train
                writer.add(
                    ids,
                    num_bytes=len(document.utf8),
                    row=row,
                    group=document.group,
                    repaired=document.repaired,
                )
                if counts is not None:  # only this process writes these two
                    counts[2 * job.group] += 1
                    counts[2 * job.group + 1] += len(ids)
            hashes[source_input.path] = reader.sha256

        validation.finish()
        # skipped rows belong to no split: counted once, in train's last commit record
        train.finish(skipped, hashes)


# ---- processes


def start_worker(counts: Any) -> None:
    """Let this worker process end with its parent, silently at Ctrl-C."""
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
    """Start processes that end with this one; a killed one raises UserError in the block."""
    # spawn: fork would copy the threads of SentencePiece and rich in an unknown state
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, context, start_worker, (counts,)) as pool:
        try:
            yield pool
        except BrokenProcessPool:
            raise UserError(
                "data.worker_killed",
                "a worker process was killed (out of memory?); run the same command again, "
                "which resumes, perhaps with fewer --workers",
            ) from None
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _build_in_worker(job: InputGroupJob) -> int:
    build_input_group(job, _counts)
    return job.group


def run_jobs(
    jobs: Sequence[InputGroupJob], workers: int, is_needed: Callable[[int], bool], counts: Any
) -> Iterator[int]:
    """Run the jobs in order, in `workers` processes; yield finished input groups.

    `is_needed` says at the start of a job whether its input group is still needed.
    """
    # Without other processes.
    if workers == 1 or len(jobs) < 2:
        for job in jobs:
            if is_needed(job.group):
                build_input_group(job, counts)
                yield job.group
        return

    queue = iter(jobs)
    running: set[Future[int]] = set()
    with worker_pool(min(workers, len(jobs)), counts) as pool:
        try:
            while True:
                # One job per worker: what a later one needs depends on the finished ones.
                while len(running) < workers and (next_job := next(queue, None)):
                    if is_needed(next_job.group):
                        running.add(pool.submit(_build_in_worker, next_job))
                if not running:
                    return

                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    group = future.result()
                    running.remove(future)
                    yield group
        except (UserError, OSError) as error:
            # The other workers finish their input groups, which a resumed build then keeps.
            num_others = len(running) - 1
            if num_others:
                log(f"failed: {error}\nwaiting for {num_others} other input group(s)")
            wait(running)  # shutdown(wait=False) does not
            raise
