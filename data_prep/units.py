"""Build one unit, once and whole: read its inputs, encode them, write its parts in both splits.

The working half of `build.py`: a unit is a range of the plan's inputs, and its parts depend on the
plan alone, not on who builds it or when. Memory holds one batch of documents at a time.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

import numpy as np

from canon_pretrain.core.errors import UserError
from canon_pretrain.core.lock import locked
from canon_pretrain.data.shard_writer import UnitWriter, remove_unit, unit_marks
from canon_pretrain.data.tokenizer import Tokenizer
from data_prep import sources
from data_prep.plan import Input, Options, Plan, TokenizerRecord, is_held_out
from data_prep.progress import Counts
from data_prep.rows import Document, Skipped

TRAIN = "train"
VALIDATION = "validation"
SPLITS = (TRAIN, VALIDATION)
UNIT_LOCKS = "locks"
# A killed run's worker notices within milliseconds; more means a second run is at work.
UNIT_PATIENCE_S = 10.0
# Encoded together, and the progress is told after each.
BATCH_DOCUMENTS = 256
BATCH_BYTES = 1 << 20


@dataclass(frozen=True)
class UnitJob:
    """All that a worker process needs to build one unit."""

    folder: Path
    root: Path
    unit: int
    source: str
    source_version: str
    text_field: str
    group_field: str | None
    inputs: tuple[Input, ...]
    plan_sha256: str
    tokenizer: TokenizerRecord
    options: Options

    @property
    def size(self) -> int:
        """Bytes of the inputs."""
        return sum(known.size for known in self.inputs)


def unit_job(folder: Path, root: Path, plan: Plan, unit: int) -> UnitJob:
    """The job that builds `unit` of `plan` below `folder` from the inputs below `root`."""
    return UnitJob(
        folder=folder,
        root=root,
        unit=unit,
        source=plan.source,
        source_version=plan.source_version,
        text_field=plan.text_field,
        group_field=plan.group_field,
        inputs=plan.unit_inputs(unit),
        plan_sha256=plan.sha256,
        tokenizer=plan.tokenizer,
        options=plan.options,
    )


def load_tokenizer(out: Path, record: TokenizerRecord) -> Tokenizer:
    """The folder's tokenizer. Raises UserError where it is not, or encodes not as, the plan's."""
    tokenizer = Tokenizer.find(out, eos=record.eos_id)
    path = out / tokenizer.file_name
    if tokenizer.sha256 != record.sha256:
        raise UserError(
            f"{path}: sha256 {tokenizer.sha256[:16]}..., the plan's is {record.sha256[:16]}...: it "
            f"was changed; delete it and run the same `python -m data_prep build` again"
        )
    for text, ids in tokenizer.probe_ids().items():
        if ids != record.probe_ids[text]:
            raise UserError(
                f"{path}: {text!r} gives the ids {ids}, the plan has {record.probe_ids[text]}: "
                f"this version of the tokenizer's library encodes otherwise than the one that made "
                f"the plan; install that one, or build into a new folder"
            )
    return tokenizer


@lru_cache(maxsize=1)
def _kept_tokenizer(out: Path, record: TokenizerRecord) -> Tokenizer:
    """`load_tokenizer`, once a process: what it has learned of the text's words stays warm."""
    return load_tokenizer(out, record)


def is_complete(out: Path, unit: int, plan_sha256: str) -> bool:
    """Whether the unit is committed in both splits."""
    return all(unit_marks(out / split, unit, plan_sha256) is not None for split in SPLITS)


def build_unit(job: UnitJob, report: Callable[[Counts], None] | None = None) -> None:
    """Write one unit's parts in both splits; where that fails, leave none of them.

    `report` is called now and then with how far it is. Raises UserError, OSError where the disk is
    full.
    """
    lock = job.folder / UNIT_LOCKS / f"unit-{job.unit:05d}.lock"
    with locked(lock, f"unit {job.unit} of {job.folder}", patience_s=UNIT_PATIENCE_S):
        # a killed run's worker may have committed it, or may come here after another run did
        if is_complete(job.folder, job.unit, job.plan_sha256):
            return
        tokenizer = _kept_tokenizer(job.folder, job.tokenizer)
        report = report or (lambda counts: None)
        downloaded = _fetch(job, report)
        for split in SPLITS:
            (job.folder / split).mkdir(exist_ok=True)
            remove_unit(job.folder / split, job.unit)
        try:
            _write_unit(job, tokenizer, report, downloaded)
        except BaseException:
            # half a unit is of no use to the next run, and may be what fills the disk
            for split in SPLITS:
                with suppress(OSError):
                    remove_unit(job.folder / split, job.unit)
            raise


def _fetch(job: UnitJob, report: Callable[[Counts], None]) -> int:
    """Make sure of the unit's inputs, before anything that they made is removed; bytes that came.

    Raises UserError where one is not there.
    """
    downloaded = 0

    def advance(more: int) -> None:
        nonlocal downloaded
        downloaded += more
        report(Counts(downloaded=downloaded))

    sources.fetch(job.source, job.source_version, job.root, job.inputs, advance)
    return downloaded


def _write_unit(
    job: UnitJob, tokenizer: Tokenizer, report: Callable[[Counts], None], downloaded: int
) -> None:
    rows = Rows(job)
    documents = tokens = 0
    with _writer(job, TRAIN) as train, _writer(job, VALIDATION) as validation:
        for batch in _batches(rows):
            encoded = tokenizer.encode_batch([document.text for _, document in batch])
            for (row, document), ids in zip(batch, encoded, strict=True):
                held_out = is_held_out(document.utf8, job.options.holdout)
                framed = _framed(ids, job)
                (validation if held_out else train).add(
                    framed,
                    num_bytes=len(document.utf8),
                    row=row,
                    group=document.group,
                    repaired=document.repaired,
                )
                tokens += len(framed)
            documents += len(batch)
            report(Counts(documents, tokens, rows.bytes_read, downloaded))
        validation.finish()
        # rows that made no document belong to no split: counted once, in train's last mark
        train.finish(rows.skipped, rows.sha256)
    report(Counts(documents, tokens, job.size, downloaded))


def _framed(ids: np.ndarray, job: UnitJob) -> np.ndarray:
    """The document as it is stored: BOS where asked for, the ids, EOS."""
    before = int(job.options.bos)
    framed = np.empty(before + len(ids) + 1, dtype=np.int64)
    framed[before:-1] = ids
    framed[-1] = job.tokenizer.eos_id
    if before:
        framed[0] = job.tokenizer.bos_id
    return framed


@dataclass
class Rows:
    """The documents of a unit's inputs with their row numbers, and what reading them tells.

    `skipped` counts the rows without a document by reason, `sha256` has each input's hash once it
    was read to its end, `bytes_read` grows while rows are read.
    """

    job: UnitJob
    skipped: Counter[str] = field(default_factory=Counter)
    sha256: dict[str, str] = field(default_factory=dict)
    bytes_read: int = 0

    def __iter__(self) -> Iterator[tuple[int, Document]]:
        job = self.job
        row = finished = 0
        for known in job.inputs:
            limit = job.options.max_line_bytes
            reader = sources.open_input(job.root, known, job.text_field, job.group_field, limit)
            for document in reader.rows():
                if isinstance(document, Skipped):
                    self.skipped[document.reason] += 1
                else:
                    yield row, document
                row += 1
                self.bytes_read = finished + reader.bytes_read
            finished += known.size
            self.sha256[known.path] = reader.sha256


def _batches(rows: Rows) -> Iterator[list[tuple[int, Document]]]:
    """Documents in batches of at most BATCH_DOCUMENTS and of about BATCH_BYTES."""
    batch: list[tuple[int, Document]] = []
    size = 0
    for row, document in rows:
        batch.append((row, document))
        size += len(document.utf8)
        if len(batch) == BATCH_DOCUMENTS or size >= BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _writer(job: UnitJob, split: str) -> UnitWriter:
    return UnitWriter(
        job.folder / split,
        job.unit,
        vocab_size=job.tokenizer.vocab_size,
        eos_id=job.tokenizer.eos_id,
        plan_sha256=job.plan_sha256,
        max_part_tokens=job.options.max_part_tokens,
    )
