"""Statistics of a finished data folder: counts, lengths, tokens, duplicates, groups.

Every token is read once, with its CRC32. Duplicates are found by 8-byte BLAKE2b digests of the ids:
for 97 million documents, the probability of a false duplicate is 0.0003.
"""

import argparse
import hashlib
import html
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import rich.table
from rich.markup import escape

from canon_pretrain.core.errors import UserError
from canon_pretrain.core.terminal import Console, Progress, printable, size
from canon_pretrain.data.blocks import BlockReader
from canon_pretrain.data.shards import CommitRecord, Shard, TokenShards, dtype_for
from canon_pretrain.data.tokenizer import Tokenizer
from data_prep.finish import list_reasons, sum_reasons
from data_prep.folder import (
    SPLITS,
    TRAIN,
    VALIDATION,
    add_workers,
    disk_errors,
    load_tokenizer,
    log,
)
from data_prep.input_groups import worker_pool
from data_prep.plan import Plan, TokenizerRecord, load_plan

TEMPLATES = Path(__file__).parent / "templates"
CHUNK_TOKENS = 1 << 20
"""Tokens per read; a document may be longer."""
MOST_COPIED = 10
TOP_TOKENS = 30
MAX_GROUPS = 100
MAX_DRAWN_GROUPS = 20
MAX_RANKS = 200
MAX_PRINTED_ROWS = 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("folder", type=Path, metavar="DIR", help="the --out of a build")
    add("--html", type=Path, metavar="FILE", help="also write a page with plots")
    add_workers(parser, "processes")


def run(arguments: argparse.Namespace) -> None:
    stats(arguments.folder, arguments.html, workers=arguments.workers)


def stats(folder: Path, page: Path | None = None, *, workers: int = 1) -> "DataStatistics":
    # checked first: reading all tokens may take minutes
    if page is not None and (page.is_dir() or not page.parent.is_dir()):
        raise UserError(
            "option.invalid",
            f"--html {page}: expected a file in an existing folder",
            option="--html",
        )

    statistics = data_statistics(folder, load_plan(folder), workers)
    print_tables(statistics, Console())
    if page is not None:
        with disk_errors(page.parent):
            write_html(page, statistics)
        log(f"stats: {page}")
    return statistics


# ---- one pass over the tokens


@dataclass
class Counts:
    """Counts of ids, int64 [vocab_size]; documents' lengths, uint32, and digests, uint64."""

    tokens: np.ndarray
    lengths: np.ndarray
    digests: np.ndarray

    @classmethod
    def joined(cls, counts: Sequence["Counts"]) -> "Counts":
        """Return the counts of a split from those of its shards, in order."""
        return cls(
            tokens=np.sum([shard.tokens for shard in counts], axis=0),
            lengths=np.concatenate([shard.lengths for shard in counts]),
            digests=np.concatenate([shard.digests for shard in counts]),
        )


def count_shards(shards: Sequence[Shard], vocab_size: int, workers: int) -> Iterator[Counts]:
    """Yield the counts of each shard, computed in `workers` processes."""
    count = partial(count_shard, vocab_size=vocab_size)
    if workers == 1 or len(shards) < 2:
        yield from map(count, shards)
        return
    with worker_pool(min(workers, len(shards))) as pool:
        yield from pool.map(count, shards)


def count_shard(shard: Shard, vocab_size: int) -> Counts:
    """Count one shard. Raises ShardError."""
    ends = shard.document_ends()
    tokens = np.zeros(vocab_size, dtype=np.int64)
    digests = []
    with closing(BlockReader(shard.folder, dtype_for(vocab_size))) as reader:
        first = 0
        start_token = 0
        while first < len(ends):
            # Read the documents [first, last): at most CHUNK_TOKENS in total, or a longer one.
            num_fitting = int(np.searchsorted(ends, start_token + CHUNK_TOKENS, side="right"))
            last = max(first + 1, num_fitting)
            ids = np.empty(int(ends[last - 1]) - start_token, dtype=np.int64)
            reader.read(shard.entry.name, shard.files, start_token, ids)

            # Count their ids, and hash each of them; the last end is that of `ids`.
            tokens += np.bincount(ids, minlength=vocab_size)
            inner_ends = ends[first : last - 1] - start_token
            for document in np.split(ids.astype("<u4"), inner_ends):
                digests.append(hashlib.blake2b(document.data, digest_size=8).digest())

            first = last
            start_token += len(ids)

    return Counts(
        tokens=tokens,
        lengths=np.diff(ends, prepend=0).astype("<u4"),
        digests=np.frombuffer(b"".join(digests), dtype="<u8"),
    )


# ---- the statistics


@dataclass(frozen=True)
class LengthBin:
    """The documents with `first` to `last` tokens, including EOS, and their tokens."""

    first: int
    last: int
    documents: int
    tokens: int


@dataclass(frozen=True)
class Lengths:
    """Lengths of documents in tokens, including EOS; bin k is [2^k, 2^(k+1))."""

    quantiles: tuple[int, ...] = (0, 0, 0)
    """The 1 %, 50 % and 99 % quantiles."""
    longest: int = 0
    longest_document: int | None = None
    bins: list[LengthBin] = field(default_factory=list)


@dataclass(frozen=True)
class TokenCount:
    """How often an id occurs, and its text."""

    id: int
    text: str
    count: int


@dataclass(frozen=True)
class Frequencies:
    """The counts of some ids by rank, the most frequent first."""

    ranks: list[int]
    counts: list[int]


@dataclass(frozen=True)
class Group:
    """Documents of one group, of whole shards; `share` is that of the tokens."""

    group: str
    documents: int
    tokens: int
    bytes: int
    share: float


@dataclass(frozen=True)
class CopiedDocument:
    """A document that occurs `count` times, and the number of its first copy."""

    count: int
    tokens: int
    first: int


@dataclass(frozen=True)
class Duplicates:
    """Exact duplicates within a split, and documents that are `elsewhere`, in the other split."""

    copies: int
    copied_tokens: int
    elsewhere: int
    most_copied: list[CopiedDocument]


@dataclass(frozen=True)
class SplitStatistics:
    split: str
    fingerprint: str
    parts: int
    documents: int
    tokens: int
    bytes: int
    stored_bytes: int
    lengths: Lengths
    top_tokens: list[TokenCount]
    unused_ids: int
    frequencies: Frequencies
    groups: list[Group]
    """The largest first, at most MAX_GROUPS."""
    num_groups: int
    groups_count_more: bool
    """Whether the manifest's cut ends the last shard early: commit records count whole shards."""
    skipped: dict[str, int]
    repaired: dict[str, int]
    duplicates: Duplicates


@dataclass(frozen=True)
class DataStatistics:
    """The statistics of a data folder, and what it was built from."""

    folder: str
    source: str
    source_version: str
    plan_sha256: str
    tokenizer: TokenizerRecord
    splits: list[SplitStatistics]


def data_statistics(folder: Path, plan: Plan, workers: int) -> DataStatistics:
    """Return the statistics of a data folder. Raises UserError."""
    tokenizer = load_tokenizer(folder, plan.tokenizer)
    train = TokenShards.open(folder / TRAIN)
    validation = TokenShards.open(folder / VALIDATION)

    # Read every token once.
    total = max(train.num_tokens + validation.num_tokens, 1)
    num_read = 0
    counts: list[Counts] = []
    with Progress() as progress:
        shards = [*train.shards, *validation.shards]
        for shard_counts in count_shards(shards, plan.tokenizer.vocab_size, workers):
            counts.append(shard_counts)
            num_read += int(shard_counts.lengths.sum())
            progress.update(num_read / total, f"stats: {num_read:,} of {total:,} tokens")

    # Each split is also compared with the other, for documents that are in both.
    train_counts = Counts.joined(counts[: len(train.shards)])
    validation_counts = Counts.joined(counts[len(train.shards) :])
    return DataStatistics(
        folder=printable(str(folder)),
        source=plan.source,
        source_version=plan.source_version,
        plan_sha256=plan.sha256,
        tokenizer=plan.tokenizer,
        splits=[
            split_statistics(TRAIN, tokenizer, train, train_counts, validation_counts),
            split_statistics(VALIDATION, tokenizer, validation, validation_counts, train_counts),
        ],
    )


def split_statistics(
    name: str, tokenizer: Tokenizer, split: TokenShards, counts: Counts, other: Counts
) -> SplitStatistics:
    records = [shard.read_record() for shard in split.shards]
    groups = sum_groups(records)
    stored_files = [file for shard in split.shards for file in vars(shard.files).values()]

    return SplitStatistics(
        split=name,
        fingerprint=split.fingerprint,
        parts=len(records),
        documents=split.num_documents,
        tokens=split.num_tokens,
        bytes=split.num_bytes,
        stored_bytes=sum(file.size for file in stored_files),
        lengths=summarize_lengths(counts.lengths),
        top_tokens=top_tokens(tokenizer, counts.tokens),
        unused_ids=int((counts.tokens == 0).sum()),
        frequencies=rank_frequencies(counts.tokens),
        groups=groups[:MAX_GROUPS],
        num_groups=len(groups),
        groups_count_more=sum(record.documents for record in records) > split.num_documents,
        skipped=sum_reasons(record.skipped for record in records),
        repaired=sum_reasons(record.repaired for record in records),
        duplicates=find_duplicates(counts, other),
    )


def find_duplicates(counts: Counts, other: Counts) -> Duplicates:
    """Return the exact duplicates within a split, and those in the `other` split."""
    # Texts that occur more than once, as their first documents.
    _, first, times = np.unique(counts.digests, return_index=True, return_counts=True)
    first = first[times > 1]
    times = times[times > 1]
    lengths = counts.lengths[first].astype(np.int64)
    num_copies = times - 1

    # lexsort sorts by the last key first: most copies, then longest, then earliest
    ranking = np.lexsort((first, -lengths, -times))[:MOST_COPIED]
    most_copied = np.stack([times, lengths, first], axis=1)[ranking]
    return Duplicates(
        copies=int(num_copies.sum()),
        copied_tokens=int(num_copies @ lengths),
        elsewhere=int(np.isin(counts.digests, other.digests).sum()),
        most_copied=[CopiedDocument(*row) for row in most_copied.tolist()],
    )


def summarize_lengths(lengths: np.ndarray) -> Lengths:
    """Return quantiles, the longest and a histogram of documents' lengths."""
    if not len(lengths):
        return Lengths()

    quantiles = np.quantile(lengths, [0.01, 0.5, 0.99], method="inverted_cdf").astype(int)
    # frexp is exact: length = m 2^e with 1/2 <= m < 1, so that bin e - 1 has it
    _, exponents = np.frexp(lengths.astype(np.float64))
    bins = exponents - 1
    documents = np.bincount(bins).tolist()
    tokens = np.bincount(bins, weights=lengths).astype(int).tolist()
    return Lengths(
        quantiles=tuple(quantiles.tolist()),
        longest=int(lengths.max()),
        longest_document=int(lengths.argmax()),
        bins=[
            LengthBin(2**k, 2 ** (k + 1) - 1, documents[k], tokens[k])
            for k in range(int(bins.min()), len(documents))
        ],
    )


def top_tokens(tokenizer: Tokenizer, counts: np.ndarray) -> list[TokenCount]:
    top = np.argsort(-counts, kind="stable")[:TOP_TOKENS].tolist()
    return [TokenCount(i, token_text(tokenizer, i), int(counts[i])) for i in top if counts[i]]


def token_text(tokenizer: Tokenizer, token: int) -> str:
    """Return the text of one id in quotes; "EOS" or "no text" if it has none."""
    if token == tokenizer.eos_id:
        return "EOS"

    # decode it after itself: SentencePiece drops a leading space at the beginning of a text
    text = tokenizer.decode([token])
    text_of_two = tokenizer.decode([token, token])
    if text_of_two.startswith(text):
        text = text_of_two.removeprefix(text)
    return f'"{printable(text)}"' if text else "no text"


def rank_frequencies(counts: np.ndarray) -> Frequencies:
    """Return the counts at ranks that are evenly spaced on a logarithmic axis."""
    descending = np.sort(counts[counts > 0])[::-1]
    if not len(descending):
        return Frequencies([], [])

    spaced = np.geomspace(1, len(descending), MAX_RANKS)
    ranks = np.unique(spaced.round().astype(np.int64))
    return Frequencies(ranks.tolist(), descending[ranks - 1].tolist())


def sum_groups(records: Sequence[CommitRecord]) -> list[Group]:
    """Return documents, tokens and bytes by group, of whole shards, the largest group first."""
    sums: dict[str, np.ndarray] = {}  # documents, tokens, bytes
    for record in records:
        for name, record_sums in record.groups.items():
            sums[name] = sums.get(name, 0) + np.array(record_sums, dtype=np.int64)

    total_tokens = max(1, sum(record.tokens for record in records))
    groups = []
    for name, group_sums in sums.items():
        documents, tokens, num_bytes = group_sums.tolist()
        groups.append(Group(printable(name), documents, tokens, num_bytes, tokens / total_tokens))
    return sorted(groups, key=lambda group: (-group.tokens, group.group))


# ---- output


@dataclass(frozen=True)
class Table:
    """A table of text for the terminal and the page."""

    title: str
    columns: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]

    def is_number(self, column: int) -> bool:
        return self.columns[column] not in ("", "group", "text")


def print_tables(statistics: DataStatistics, console: Console) -> None:
    """Print the tables, with their first rows, and the notes."""
    for table in tables(statistics):
        drawn_table = rich.table.Table(title=escape(table.title), title_justify="left")
        for i, column in enumerate(table.columns):
            justify: Any = "right" if table.is_number(i) else "left"
            drawn_table.add_column(escape(column), justify=justify)
        for row in table.rows[:MAX_PRINTED_ROWS]:
            drawn_table.add_row(*map(escape, row))
        console.print(drawn_table)

    for sentence in notes(statistics):
        console.print(sentence, markup=False, highlight=False, soft_wrap=True)


def tables(statistics: DataStatistics) -> list[Table]:
    """Return tables of both splits: summary, lengths, groups, frequent tokens, duplicates."""
    train, validation = map(summary, statistics.splits)
    all_tables = [
        Table(
            f"{statistics.folder} ({statistics.source}, {statistics.source_version}, "
            f"plan {statistics.plan_sha256[:12]})",
            ("", *SPLITS),
            [(quantity, train[quantity], validation[quantity]) for quantity in train],
        )
    ]
    for split in statistics.splits:
        all_tables += split_tables(split)

    # a split may have no documents, groups or duplicates
    return [table for table in all_tables if table.rows]


def split_tables(split: SplitStatistics) -> Iterator[Table]:
    yield Table(
        f"{split.split}: documents by length",
        ("tokens", "documents", "share", "tokens in them", "share"),
        [
            (
                f"{length_bin.first:,} to {length_bin.last:,}",
                *_count_and_share(length_bin.documents, split.documents),
                *_count_and_share(length_bin.tokens, split.tokens),
            )
            for length_bin in split.lengths.bins
        ],
    )

    # a single group is the whole split
    groups = split.groups if split.num_groups > 1 else []
    yield Table(
        f"{split.split}: by group",
        ("group", "documents", "tokens", "share", "bytes per token"),
        [
            (
                group.group or "(none)",
                f"{group.documents:,}",
                f"{group.tokens:,}",
                f"{100 * group.share:.2f} %",
                _ratio(group.bytes, group.tokens),
            )
            for group in groups
        ],
    )

    yield Table(
        f"{split.split}: most frequent tokens",
        ("id", "text", "count", "share"),
        [
            (str(token.id), token.text, *_count_and_share(token.count, split.tokens))
            for token in split.top_tokens
        ],
    )

    yield Table(
        f"{split.split}: most copied documents",
        ("times", "tokens", "first document"),
        [
            (str(copied.count), str(copied.tokens), str(copied.first))
            for copied in split.duplicates.most_copied
        ],
    )


def summary(split: SplitStatistics) -> dict[str, str]:
    """Return the main numbers of a split by name."""
    lengths = split.lengths
    duplicates = split.duplicates
    low, median, high = lengths.quantiles
    longest = "–" if lengths.longest_document is None else lengths.longest_document
    return {
        "documents": f"{split.documents:,}",
        "tokens": f"{split.tokens:,}",
        "text": size(split.bytes),
        "bytes per token": _ratio(split.bytes, split.tokens),
        "on disk": size(split.stored_bytes),
        "tokens per document": _ratio(split.tokens, split.documents),
        "median (1 % to 99 %)": f"{median:,} ({low:,} to {high:,})",
        "longest document": f"{lengths.longest:,} (number {longest})",
        "exact copies": " = ".join(_count_and_share(duplicates.copies, split.documents)),
        "tokens in them": " = ".join(_count_and_share(duplicates.copied_tokens, split.tokens)),
        "in both splits": f"{duplicates.elsewhere:,}",
        "unused ids": f"{split.unused_ids:,}",
        "fingerprint": split.fingerprint[:12],
    }


def notes(statistics: DataStatistics) -> Iterator[str]:
    """Yield notes on skipped rows, repaired documents and groups."""
    for split in statistics.splits:
        if split.skipped:
            yield f"{split.split}: skipped rows: {list_reasons(split.skipped)}."
        if split.repaired:
            yield f"{split.split}: repaired documents: {list_reasons(split.repaired)}."
        if split.groups_count_more:
            yield f"{split.split}: groups include all of the shard in which the limit ends."
        if split.num_groups > MAX_GROUPS:
            yield f"{split.split}: {split.num_groups:,} groups, the largest of them shown."


def _ratio(numerator: int, denominator: int) -> str:
    return f"{numerator / denominator:.3f}" if denominator else "–"


def _count_and_share(count: int, total: int) -> tuple[str, str]:
    return f"{count:,}", f"{100 * count / max(total, 1):.2f} %"


# ---- the page


def write_html(path: Path, statistics: DataStatistics) -> None:
    from canon_pretrain.core.page import write_page  # imports plotly

    write_page(
        path,
        TEMPLATES,
        "stats",
        figures(statistics),
        content=statistics,
        tables=tables(statistics),
        notes=notes(statistics),
    )


Json = dict[str, Any]


def figures(statistics: DataStatistics) -> dict[str, Json]:
    """Return plotly traces and axes by the id of their plot; `meta` is a trace's CSS color."""
    splits = [split for split in statistics.splits if split.documents]
    plots: dict[str, Json] = {}

    # Bars: how many documents have a length, how many of the tokens are in them, and by group.
    for unit in ("documents", "tokens"):
        plots[unit] = {
            "traces": [_lengths(split, unit) for split in splits],
            "xaxis": {"title": "tokens in a document, from", "type": "category"},
            "yaxis": {"title": unit, "tickformat": ".0%"},
        }
    plots["groups"] = {
        "traces": [_groups(split) for split in splits],
        "xaxis": {"title": "tokens", "tickformat": ".0%"},
        "yaxis": {"type": "category"},
    }

    # A line, straight if frequencies fall as a power of the rank (Zipf's law).
    log_axis = {"type": "log", "dtick": 1}
    plots["frequencies"] = {
        "traces": [_frequencies(split) for split in splits],
        "xaxis": {"title": "rank", **log_axis},
        "yaxis": {"title": "share of the tokens", "tickformat": ".0e", **log_axis},
    }
    return plots


def _lengths(split: SplitStatistics, unit: str) -> Json:
    """Return bars of the shares of the documents, or of their tokens (`unit`), by length."""
    bins = split.lengths.bins
    total = getattr(split, unit)
    counts = [getattr(length_bin, unit) for length_bin in bins]

    # of each bar: its documents' lengths, and how many documents or tokens they are
    hover_texts = []
    for length_bin, count in zip(bins, counts, strict=True):
        length = f"{length_bin.first:,} to {length_bin.last:,} tokens"
        hover_texts.append([length, f"{count:,}"])
    return {
        **_trace(split, "bar"),
        "x": [f"{length_bin.first:,}" for length_bin in bins],
        "y": [count / total for count in counts],
        "customdata": hover_texts,
        "hovertemplate": f"%{{fullData.name}}: <b>%{{y:.2%}}</b>, %{{customdata[1]}} {unit}"
        "<br>in documents of %{customdata[0]}<extra></extra>",
    }


def _groups(split: SplitStatistics) -> Json:
    """Return horizontal bars of the largest groups; plotly draws the last one at the top."""
    groups = split.groups[:MAX_DRAWN_GROUPS][::-1]
    names = [group.group or "(none)" for group in groups]
    labels = [name if len(name) <= 30 else f"{name[:29]}…" for name in names]
    return {
        **_trace(split, "bar"),
        "orientation": "h",
        "x": [group.share for group in groups],
        # plotly renders some HTML in texts
        "y": [html.escape(label, quote=False) for label in labels],
        "customdata": [[f"{group.tokens:,}", f"{group.documents:,}"] for group in groups],
        "hovertemplate": "%{fullData.name}, %{y}: <b>%{x:.2%}</b><br>%{customdata[0]} tokens, "
        "%{customdata[1]} documents<extra></extra>",
    }


def _frequencies(split: SplitStatistics) -> Json:
    """Return a line of the ids' shares of the tokens by rank."""
    counts = split.frequencies.counts
    return {
        **_trace(split, "scatter"),
        "mode": "lines",
        "x": split.frequencies.ranks,
        "y": [count / split.tokens for count in counts],
        "customdata": [f"{count:,}" for count in counts],
        "hovertemplate": "%{fullData.name}: rank %{x:,d}, <b>%{customdata}</b> times, "
        "%{y:.2~%}<extra></extra>",
    }


def _trace(split: SplitStatistics, plotly_type: str) -> Json:
    color = f"--split-{SPLITS.index(split.split)}"
    return {"type": plotly_type, "name": split.split, "meta": color}
