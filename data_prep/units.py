"""Build one unit, once and whole: read its inputs, encode them, write its parts in both splits.

The working half of `build.py`: a unit is a range of the plan's inputs, and its parts depend on the
plan alone, not on who builds it or when. Memory holds one batch of documents at a time.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np

from canon_pretrain.data.shard_writer import UnitWriter, remove_unit
from canon_pretrain.data.tokenizer import Tokenizer
from data_prep import sources
from data_prep.folder import SPLITS, TRAIN, VALIDATION, is_complete, load_tokenizer, unit_lock
from data_prep.plan import Input, Options, Plan, TokenizerRecord, is_held_out
from data_prep.rows import Document, Skipped

# Encoded together, and the progress is reported after each.
BATCH_DOCUMENTS = 256
BATCH_BYTES = 1 << 20


class Counts(NamedTuple):
    """How far a unit is, or a run: documents, tokens, bytes of inputs read and downloaded."""

    documents: int = 0
    tokens: int = 0
    read: int = 0
    downloaded: int = 0


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
    version: int
    tokenizer: TokenizerRecord
    options: Options

    @classmethod
    def of(cls, folder: Path, root: Path, plan: Plan, unit: int) -> "UnitJob":
        """The job that builds `unit` of `plan` below `folder` from the inputs below `root`."""
        return cls(
            folder=folder,
            root=root,
            unit=unit,
            source=plan.source,
            source_version=plan.source_version,
            text_field=plan.text_field,
            group_field=plan.group_field,
            inputs=plan.unit_inputs(unit),
            plan_sha256=plan.sha256,
            version=plan.version,
            tokenizer=plan.tokenizer,
            options=plan.options,
        )

    @property
    def size(self) -> int:
        """Bytes of the inputs."""
        return sum(known.size for known in self.inputs)

    def writer(self, split: str) -> UnitWriter:
        """A writer of the unit's parts in one split."""
        return UnitWriter(
            self.folder / split,
            self.unit,
            vocab_size=self.tokenizer.vocab_size,
            eos_id=self.tokenizer.eos_id,
            plan_sha256=self.plan_sha256,
            max_part_tokens=self.options.max_part_tokens,
            version=self.version,
        )


@lru_cache(maxsize=1)
def _kept_tokenizer(out: Path, record: TokenizerRecord) -> Tokenizer:
    """`load_tokenizer`, once per process: what it has learned of the text's words stays warm."""
    return load_tokenizer(out, record)


def build_unit(job: UnitJob, report: Callable[[Counts], None] = lambda counts: None) -> None:
    """Write one unit's parts in both splits; where that fails, leave none of them.

    `report` is called now and then with how far it is. Raises UserError, OSError where the disk is
    full.
    """
    with unit_lock(job.folder, job.unit):
        # a killed run's worker may have committed it, or may come here after another run did
        if is_complete(job.folder, job.unit, job.plan_sha256):
            return
        tokenizer = _kept_tokenizer(job.folder, job.tokenizer)
        downloaded = 0

        def advance(more: int) -> None:
            nonlocal downloaded
            downloaded += more
            report(Counts(downloaded=downloaded))

        # before anything that the inputs made is removed
        sources.fetch(job.source, job.source_version, job.root, job.inputs, advance)
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


def _write_unit(
    job: UnitJob, tokenizer: Tokenizer, report: Callable[[Counts], None], downloaded: int
) -> None:
    rows = _Rows(job)
    bos = np.array([job.tokenizer.bos_id] if job.options.bos else [], dtype=np.int64)
    eos = np.array([job.tokenizer.eos_id], dtype=np.int64)
    documents = tokens = 0
    with job.writer(TRAIN) as train, job.writer(VALIDATION) as validation:
        for batch in _batches(rows):
            encoded = tokenizer.encode_batch([document.text for _, document in batch])
            for (row, document), ids in zip(batch, encoded, strict=True):
                held_out = is_held_out(document.utf8, job.options.holdout)
                framed = np.concatenate([bos, ids, eos])
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


class _Rows:
    """The documents of a unit's inputs with their row numbers, and what reading them finds.

    `skipped` counts the rows without a document by reason, `sha256` has each input's hash once it
    was read to its end, `bytes_read` grows while rows are read.
    """

    def __init__(self, job: UnitJob) -> None:
        self.job = job
        self.skipped: Counter[str] = Counter()
        self.sha256: dict[str, str] = {}
        self.bytes_read = 0

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


def _batches(rows: _Rows) -> Iterator[list[tuple[int, Document]]]:
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
