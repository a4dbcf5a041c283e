"""Build units, each once and whole, in one process or several.

The working half of `build.py`: a unit is a range of the plan's inputs, and its parts depend on the
plan alone. Worker processes are spawned, hold the unit's lock while they write, and end with their
parent.
"""

import multiprocessing
import multiprocessing.connection
import os
import signal
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from canon_pretrain.data.shard_writer import UnitWriter, remove_unit, unit_marks
from canon_pretrain.data.tokenizer import Tokenizer
from canon_pretrain.errors import UserError
from data_prep.lock import locked
from data_prep.plan import Input, Options, TokenizerRecord, is_held_out, read_input
from data_prep.sources import Document, Skipped, read_documents

TRAIN = "train"
VALIDATION = "validation"
SPLITS = (TRAIN, VALIDATION)
TOKENIZER = "tokenizer.model"
UNIT_LOCKS = "locks"
# A killed run's worker notices within milliseconds; more means a second run is at work.
UNIT_PATIENCE_S = 10.0


@dataclass(frozen=True)
class UnitJob:
    """All that a worker process needs to build one unit."""

    folder: Path
    root: Path
    unit: int
    inputs: tuple[Input, ...]
    plan_sha256: str
    tokenizer: TokenizerRecord
    options: Options


def load_tokenizer(out: Path, record: TokenizerRecord) -> Tokenizer:
    """The folder's tokenizer. Raises UserError where it is not, or encodes not as, the plan's."""
    tokenizer = Tokenizer.load(out / TOKENIZER)
    if tokenizer.sha256 != record.sha256:
        raise UserError(
            f"{out / TOKENIZER}: sha256 {tokenizer.sha256[:16]}..., the plan's is "
            f"{record.sha256[:16]}...: it was changed; delete it and run the same "
            f"`python -m data_prep build` again"
        )
    for text, ids in tokenizer.probe_ids().items():
        if ids != record.probe_ids[text]:
            raise UserError(
                f"{out / TOKENIZER}: {text!r} gives the ids {ids}, the plan has "
                f"{record.probe_ids[text]}: this version of sentencepiece encodes otherwise than "
                f"the one that made the plan; install that one, or build into a new folder"
            )
    return tokenizer


def is_complete(out: Path, unit: int, plan_sha256: str) -> bool:
    """Whether the unit is committed in both splits."""
    return all(unit_marks(out / split, unit, plan_sha256) is not None for split in SPLITS)


def run_jobs(jobs: list[UnitJob], workers: int) -> Iterator[int]:
    """Run the jobs, here or in `workers` processes; yields each unit once it is committed."""
    if workers == 1 or len(jobs) < 2:
        for job in jobs:
            build_unit(job)
            yield job.unit
        return
    with ProcessPoolExecutor(
        min(workers, len(jobs)),
        # spawn: a fork would copy SentencePiece's and rich's threads in an unknown state
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_start_worker,
    ) as pool:
        futures = {pool.submit(build_unit, job): job.unit for job in jobs}
        try:
            for future in as_completed(futures):
                future.result()
                yield futures[future]
        except BrokenProcessPool:
            raise UserError(
                "a worker process was killed (out of memory?); run the same command again, which "
                "continues, perhaps with fewer --workers"
            ) from None
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _start_worker() -> None:
    """Let a worker end with its parent, and silently at Ctrl-C.

    Without it the workers of a killed run would go on writing beside the run that resumes it.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        multiprocessing.connection.wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def build_unit(job: UnitJob) -> None:
    """Write one unit's parts in both splits. Raises UserError."""
    lock = job.folder / UNIT_LOCKS / f"unit-{job.unit:05d}.lock"
    with locked(lock, f"unit {job.unit} of {job.folder}", patience_s=UNIT_PATIENCE_S):
        # a killed run's worker may have committed it, or may come here after another run did
        if is_complete(job.folder, job.unit, job.plan_sha256):
            return
        tokenizer = load_tokenizer(job.folder, job.tokenizer)
        for split in SPLITS:
            remove_unit(job.folder / split, job.unit)
        with _writer(job, TRAIN) as train, _writer(job, VALIDATION) as validation:
            skipped: Counter[str] = Counter()
            for row, document in enumerate(_rows(job)):
                if isinstance(document, Skipped):
                    skipped[document.reason] += 1
                    continue
                ids = np.append(tokenizer.encode(document.text), tokenizer.eos_id)
                held_out = is_held_out(document.utf8, job.options.holdout)
                writer = validation if held_out else train
                writer.add(ids, num_bytes=len(document.utf8), row=row)
            validation.finish()
            # rows that made no document belong to no split: counted once, in train's last mark
            train.finish(skipped)


def _rows(job: UnitJob) -> Iterator[Document | Skipped]:
    for known in job.inputs:
        yield from read_documents(known.path, read_input(job.root, known))


def _writer(job: UnitJob, split: str) -> UnitWriter:
    return UnitWriter(
        job.folder / split,
        job.unit,
        vocab_size=job.tokenizer.vocab_size,
        eos_id=job.tokenizer.eos_id,
        plan_sha256=job.plan_sha256,
        max_part_tokens=job.options.max_part_tokens,
    )
