"""Build units, in this process or in several: read inputs, encode them, write both splits' parts.

A unit is a range of the plan's inputs, and its parts depend on the plan alone, not on who builds it
or when. Worker processes are spawned and end with their parent; each writes its unit's counts into
slots of its own in a shared array, so that no kill can leave a lock held.
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
from contextlib import suppress
from ctypes import Array, c_longlong
from dataclasses import dataclass, replace
from functools import lru_cache
from multiprocessing.sharedctypes import RawArray
from pathlib import Path
from typing import NamedTuple, Self

import numpy as np

from canon_pretrain.core.errors import UserError
from canon_pretrain.data.shard_writer import UnitWriter, remove_unit
from canon_pretrain.data.tokenizer import Tokenizer
from data_prep import sources
from data_prep.folder import SPLITS, TRAIN, VALIDATION, is_complete, load_tokenizer, say, unit_lock
from data_prep.plan import Plan, is_held_out
from data_prep.readers import InputReader
from data_prep.rows import Skipped

REPORT_DOCUMENTS = 64
"""Progress is reported after so many."""
TICK_S = 0.5


class Counts(NamedTuple):
    """How far a unit is, or a run: documents, tokens, bytes of inputs read."""

    documents: int = 0
    tokens: int = 0
    read: int = 0


WIDTH = len(Counts())
Report = Callable[[Counts], None]


@dataclass(frozen=True)
class UnitJob:
    """What a worker process needs to build one unit: `plan` has the unit's inputs alone."""

    folder: Path
    root: Path
    unit: int
    plan: Plan
    plan_sha256: str

    @classmethod
    def of(cls, folder: Path, root: Path, plan: Plan, unit: int) -> Self:
        """The job that builds `unit` below `folder` from the inputs below `root`."""
        own = replace(plan, inputs=plan.unit_inputs(unit), units=())
        return cls(folder, root, unit, own, plan.sha256)

    @property
    def size(self) -> int:
        return sum(known.size for known in self.plan.inputs)

    def writer(self, split: str) -> UnitWriter:
        return UnitWriter(
            self.folder / split,
            self.unit,
            vocab_size=self.plan.tokenizer.vocab_size,
            eos_id=self.plan.tokenizer.eos_id,
            plan_sha256=self.plan_sha256,
            max_part_tokens=self.plan.options.max_part_tokens,
            version=self.plan.version,
        )


# once per process: what it has learned of the text's words stays warm
_kept_tokenizer = lru_cache(maxsize=1)(load_tokenizer)


def build_unit(job: UnitJob, report: Report = lambda counts: None) -> None:
    """Write one unit's parts in both splits; if that fails, leave none of them.

    `report` is called now and then with how far it is. Raises UserError, OSError.
    """
    with unit_lock(job.folder, job.unit):
        # a killed run's worker may have committed it, or may come here after another run did
        if is_complete(job.folder, job.unit, job.plan_sha256):
            return
        tokenizer = _kept_tokenizer(job.folder, job.plan.tokenizer)
        # before anything that the inputs made is removed
        sources.fetch(job.plan.source, job.plan.source_version, job.root, job.plan.inputs)
        for split in SPLITS:
            (job.folder / split).mkdir(exist_ok=True)
            remove_unit(job.folder / split, job.unit)
        try:
            _write_unit(job, tokenizer, report)
        except BaseException:
            # half a unit is of no use to the next run, and may be what fills the disk
            for split in SPLITS:
                with suppress(OSError):
                    remove_unit(job.folder / split, job.unit)
            raise


def _write_unit(job: UnitJob, tokenizer: Tokenizer, report: Report) -> None:
    plan = job.plan
    bos = np.array([plan.tokenizer.bos_id] if plan.options.bos else [], dtype=np.int64)
    eos = np.array([plan.tokenizer.eos_id], dtype=np.int64)
    skipped: Counter[str] = Counter()
    hashes: dict[str, str] = {}
    row = -1
    documents = tokens = finished = 0
    with job.writer(TRAIN) as train, job.writer(VALIDATION) as validation:
        for known in plan.inputs:
            reader = InputReader(
                job.root, known, plan.text_field, plan.group_field, plan.options.max_line_bytes
            )
            for document in reader.rows():
                row += 1
                if isinstance(document, Skipped):
                    skipped[document.reason] += 1
                    continue
                ids = np.concatenate([bos, tokenizer.encode(document.text), eos])
                held_out = is_held_out(document.utf8, plan.options.holdout)
                (validation if held_out else train).add(
                    ids,
                    num_bytes=len(document.utf8),
                    row=row,
                    group=document.group,
                    repaired=document.repaired,
                )
                documents += 1
                tokens += len(ids)
                if documents % REPORT_DOCUMENTS == 0:
                    report(Counts(documents, tokens, finished + reader.bytes_read))
            finished += known.size
            hashes[known.path] = reader.sha256
        validation.finish()
        # rows that made no document belong to no split: counted once, in train's last mark
        train.finish(skipped, hashes)
    report(Counts(documents, tokens, job.size))


# ---- processes


def end_with_parent() -> None:
    """Let this worker process end with its parent (else it would go on), silently at Ctrl-C."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        multiprocessing.connection.wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def worker_killed() -> UserError:
    """The error for a BrokenProcessPool."""
    return UserError(
        "a worker process was killed (out of memory?); run the same command again, which "
        "continues, perhaps with fewer --workers"
    )


# Shared memory can only be handed over to a worker at its start.
_counts: "Array[c_longlong]"


def _start_worker(counts: "Array[c_longlong]") -> None:
    global _counts
    _counts = counts
    end_with_parent()


def _run(job: UnitJob, slot: int, after: Callable[[], None] = lambda: None) -> None:
    """Build a unit, its counts in `slot` of the shared memory."""

    def report(so_far: Counts) -> None:
        _counts[WIDTH * slot : WIDTH * (slot + 1)] = list(so_far)
        after()

    build_unit(job, report)


def run_jobs(
    jobs: Sequence[UnitJob],
    workers: int,
    tick: Report,
    wanted: Callable[[int], bool] = lambda unit: True,
) -> Iterator[int]:
    """Run the jobs in order, here or in `workers` processes; yield each unit once it is committed.

    `tick` is called now and then with how far the run is, `wanted(unit)` right before a job starts.
    """
    global _counts
    counts = _counts = RawArray(c_longlong, WIDTH * len(jobs))

    def show() -> None:
        tick(Counts(*(sum(counts[at::WIDTH]) for at in range(WIDTH))))

    if workers == 1 or len(jobs) < 2:
        for slot, job in enumerate(jobs):
            if wanted(job.unit):
                _run(job, slot, show)
                yield job.unit
        return
    with ProcessPoolExecutor(
        min(workers, len(jobs)),
        # spawn: a fork would copy SentencePiece's and rich's threads in an unknown state
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_start_worker,
        initargs=(counts,),
    ) as pool:
        waiting = iter(enumerate(jobs))
        running: dict[Future[None], int] = {}
        try:
            while True:
                while len(running) < workers and (next_job := next(waiting, None)):
                    slot, job = next_job
                    if wanted(job.unit):
                        running[pool.submit(_run, job, slot)] = job.unit
                if not running:
                    return
                done = wait(running, TICK_S, FIRST_COMPLETED).done
                show()
                for future in done:
                    future.result()
                    yield running.pop(future)
        except (UserError, OSError) as error:
            if others := len(running) - 1:
                say(f"failed: {error}\nending once {others} other unit(s) in work are built")
            wait(running)  # shutdown does not, once it was told not to
            raise
        except BrokenProcessPool:
            raise worker_killed() from None
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
