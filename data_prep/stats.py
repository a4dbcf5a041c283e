"""Statistics of a finished data folder: counts, lengths, tokens, duplicates, groups.

    canon data stats DATA [--html FILE] [--workers N]

Every token is read once, with its CRC32. Duplicates are found by 8-byte BLAKE2b digests of the ids:
for 97 million documents, the probability of a false duplicate is 0.0003.
"""

import argparse
import hashlib
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
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
from data_prep.folder import SPLITS, add_workers, disk_errors, load_tokenizer, log
from data_prep.input_groups import worker_pool
from data_prep.plan import Plan, load_plan

TEMPLATES = Path(__file__).parent / "templates"
PLOTTED = ("split", "documents", "tokens", "lengths", "frequencies", "groups")
CHUNK_TOKENS = 1 << 20
"""Tokens per read; a document may be longer."""
MOST_COPIED = 10
TOP_TOKENS = 30
MAX_GROUPS = 100
MAX_RANKS = 200
MAX_PRINTED_ROWS = 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("folder", type=Path, metavar="DIR", help="the --out of a build")
    add("--html", type=Path, metavar="FILE", help="also write a page with plots")
    add_workers(parser, "processes")


def run(arguments: argparse.Namespace) -> None:
    stats(arguments.folder, arguments.html, workers=arguments.workers)


def stats(folder: Path, html: Path | None = None, *, workers: int = 1) -> dict[str, Any]:
    """Print statistics of `folder`, write the page `html`, and return them as JSON values."""
    if html is not None and (html.is_dir() or not html.parent.is_dir()):
        raise UserError(
            "option.invalid",
            f"--html {html}: expected a file in an existing folder",
            option="--html",
        )
    content = data_content(folder, load_plan(folder), workers)
    print_tables(content, Console())
    if html is not None:
        with disk_errors(html.parent):
            write_html(html, content)
        log(f"stats: {html}")
    return content


# ---- one pass over the tokens


@dataclass
class Counts:
    """Counts of ids, int64 [vocab_size]; documents' lengths, uint32, and digests, uint64."""

    tokens: np.ndarray
    lengths: np.ndarray
    digests: np.ndarray

    @classmethod
    def joined(cls, vocab_size: int, counts: Sequence["Counts"]) -> "Counts":
        """Return the counts of a split from those of its shards, in order."""
        empty = cls(np.zeros(vocab_size, np.int64), np.empty(0, "<u4"), np.empty(0, "<u8"))
        columns = zip(*(vars(each).values() for each in [empty, *counts]), strict=True)
        tokens, lengths, digests = columns
        return cls(np.sum(tokens, axis=0), np.concatenate(lengths), np.concatenate(digests))


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
    begin = first = 0
    with closing(BlockReader(shard.folder, dtype_for(vocab_size))) as reader:
        while first < len(ends):  # whole documents of about CHUNK_TOKENS in total
            fitting = int(np.searchsorted(ends, begin + CHUNK_TOKENS, side="right"))
            last = max(first + 1, fitting)
            ids = np.empty(int(ends[last - 1]) - begin, dtype=np.int64)
            reader.read(shard.entry.name, shard.files, begin, ids)
            tokens += np.bincount(ids, minlength=vocab_size)
            for document in np.split(ids.astype("<u4"), ends[first : last - 1] - begin):
                digests.append(hashlib.blake2b(document.data, digest_size=8).digest())
            begin, first = begin + len(ids), last
    lengths = np.diff(ends, prepend=0).astype("<u4")
    return Counts(tokens, lengths, np.frombuffer(b"".join(digests), dtype="<u8"))


def find_duplicates(own: Counts, other: Counts) -> dict[str, Any]:
    """Return counts of exact duplicates within a split, and of those in the `other` split."""
    _, first, counts = np.unique(own.digests, return_index=True, return_counts=True)
    first, counts = first[counts > 1], counts[counts > 1]
    lengths = own.lengths[first].astype(np.int64)
    best = np.lexsort((first, -lengths, -counts))[:MOST_COPIED]
    copied = np.stack([counts[best], lengths[best], first[best]], axis=1).tolist()
    return {
        "copies": int((counts - 1).sum()),
        "copied_tokens": int(((counts - 1) * lengths).sum()),
        "elsewhere": int(np.isin(own.digests, other.digests).sum()),
        "most_copied": [
            dict(zip(("count", "tokens", "first"), row, strict=True)) for row in copied
        ],
    }


# ---- the figures


def data_content(folder: Path, plan: Plan, workers: int) -> dict[str, Any]:
    """Return the statistics as JSON values. Raises UserError."""
    tokenizer = load_tokenizer(folder, plan.tokenizer)
    opened = [TokenShards.open(folder / split) for split in SPLITS]
    shards = [shard for split in opened for shard in split.shards]
    vocab_size = plan.tokenizer.vocab_size
    total = sum(split.num_tokens for split in opened) or 1
    done, counted = 0, []
    with Progress() as progress:
        for shard, counts in zip(shards, count_shards(shards, vocab_size, workers), strict=True):
            counted.append(counts)
            done += shard.entry.tokens
            progress.update(done / total, f"stats: {done:,} of {total:,} tokens")
    num_train = len(opened[0].shards)
    both = [Counts.joined(vocab_size, own) for own in (counted[:num_train], counted[num_train:])]
    splits = [
        {"split": name, **_split_content(tokenizer, split, own)}
        | {"duplicates": find_duplicates(own, other)}
        for name, split, own, other in zip(SPLITS, opened, both, both[::-1], strict=True)
    ]
    names = ("requested", "sha256", "vocab_size")
    return {
        "folder": printable(str(folder)),
        "source": plan.source,
        "source_version": plan.source_version,
        "plan_sha256": plan.sha256,
        "tokenizer": {name: getattr(plan.tokenizer, name) for name in names},
        "splits": splits,
    }


def _split_content(tokenizer: Tokenizer, split: TokenShards, counts: Counts) -> dict[str, Any]:
    records = [shard.read_record() for shard in split.shards]
    sizes = [known.size for shard in split.shards for known in vars(shard.files).values()]
    top = np.argsort(-counts.tokens, kind="stable")[:TOP_TOKENS]
    # ranks are evenly spaced on a logarithmic axis
    ordered = np.sort(counts.tokens[counts.tokens > 0])[::-1]
    ranks = np.unique(np.geomspace(1, max(len(ordered), 1), MAX_RANKS).round().astype(np.int64))
    ranks = ranks[ranks <= len(ordered)]
    reasons: dict[str, Counter[str]] = {"skipped": Counter(), "repaired": Counter()}
    for record in records:
        for what, total in reasons.items():
            total.update({printable(why): n for why, n in getattr(record, what).items()})
    return {
        "fingerprint": split.fingerprint,
        "parts": len(records),
        "documents": split.num_documents,
        "tokens": split.num_tokens,
        "bytes": split.num_bytes,
        "stored_bytes": sum(sizes),
        "lengths": _length_content(counts.lengths),
        "top_tokens": [
            {"id": i, "text": token_text(tokenizer, i), "count": count}
            for i, count in zip(top.tolist(), counts.tokens[top].tolist(), strict=True)
            if count
        ],
        "unused_ids": int((counts.tokens == 0).sum()),
        "frequencies": {"ranks": ranks.tolist(), "counts": ordered[ranks - 1].tolist()},
        **_groups(records),
        # commit records count whole shards, also if the manifest's cut ends the last one early
        "groups_count_more": sum(r.documents for r in records) > split.num_documents,
        **{what: dict(sorted(total.items())) for what, total in reasons.items()},
    }


def _length_content(lengths: np.ndarray) -> dict[str, Any]:
    """Return lengths in tokens including EOS; bin k is [2^k, 2^(k+1))."""
    if not len(lengths):
        return {"quantiles": (0, 0, 0), "longest": 0, "longest_document": "–", "bins": []}
    quantiles = np.quantile(lengths, [0.01, 0.5, 0.99], method="inverted_cdf").astype(int)
    bins = np.frexp(lengths.astype(np.float64))[1] - 1
    documents, tokens = np.bincount(bins), np.bincount(bins, weights=lengths)
    return {
        "quantiles": quantiles.tolist(),
        "longest": int(lengths.max()),
        "longest_document": int(lengths.argmax()),
        "bins": [
            {"from": 1 << k, "to": (2 << k) - 1}
            | {"documents": int(documents[k]), "tokens": int(tokens[k])}
            for k in range(int(bins.min()), len(documents))
        ],
    }


def token_text(tokenizer: Tokenizer, token: int) -> str:
    """Return the text of one id in quotes; "EOS" or "no text" if it has none."""
    if token == tokenizer.eos_id:
        return "EOS"
    # decode it after itself: SentencePiece drops a leading space at the beginning of a text
    twice, once = tokenizer.decode([token, token]), tokenizer.decode([token])
    text = twice[len(once) :] if twice.startswith(once) else once
    return f'"{printable(text)}"' if text else "no text"


def _groups(records: list[CommitRecord]) -> dict[str, Any]:
    """Return documents, tokens and bytes by group, of whole shards, the largest group first."""
    sums: dict[str, np.ndarray] = {}
    for record in records:
        for group, numbers in record.groups.items():
            sums[group] = sums.get(group, 0) + np.array(numbers, dtype=np.int64)
    rows: list[dict[str, Any]] = []
    for group, summed in sums.items():
        row = dict(zip(("documents", "tokens", "bytes"), summed.tolist(), strict=True))
        rows.append({"group": printable(group), **row})
    total = sum(row["tokens"] for row in rows)
    for row in rows:
        row["share"] = row["tokens"] / max(total, 1)
    rows.sort(key=lambda row: (-row["tokens"], row["group"]))
    return {"groups": rows[:MAX_GROUPS], "num_groups": len(rows)}


# ---- output


@dataclass(frozen=True)
class Table:
    """A table of text for the terminal and the page."""

    title: str
    columns: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]

    def is_number(self, column: int) -> bool:
        return self.columns[column] not in ("", "group", "text")


def print_tables(content: dict[str, Any], console: Console) -> None:
    for table in tables(content):
        drawn = rich.table.Table(title=escape(table.title), title_justify="left")
        for at, column in enumerate(table.columns):
            drawn.add_column(escape(column), justify="right" if table.is_number(at) else "left")
        for row in table.rows[:MAX_PRINTED_ROWS]:
            drawn.add_row(*map(escape, row))
        console.print(drawn)
    for sentence in notes(content):
        console.print(sentence, markup=False, highlight=False, soft_wrap=True)


def write_html(path: Path, content: dict[str, Any]) -> None:
    from canon_pretrain.core.page import write_page  # imports plotly

    plotted = [{name: split[name] for name in PLOTTED} for split in content["splits"]]
    more: dict[str, Any] = {"content": content, "tables": tables(content), "notes": notes(content)}
    write_page(path, TEMPLATES, "stats", plotted, **more)


def tables(content: dict[str, Any]) -> list[Table]:
    """Return tables of both splits: summary, lengths, groups, frequent tokens, duplicates."""
    splits = content["splits"]
    about = f"{content['source']}, {content['source_version']}, plan {content['plan_sha256'][:12]}"
    summaries = [summary(split) for split in splits]
    rows = [(name, *(each[name] for each in summaries)) for name in summaries[0]]
    found = [Table(f"{content['folder']} ({about})", ("", *SPLITS), rows)]
    for split in splits:
        documents, tokens = split["documents"], split["tokens"]
        lengths = [
            (
                f"{entry['from']:,} to {entry['to']:,}",
                *_share(entry["documents"], documents),
                *_share(entry["tokens"], tokens),
            )
            for entry in split["lengths"]["bins"]
        ]
        groups = [
            (
                row["group"] or "(none)",
                f"{row['documents']:,}",
                f"{row['tokens']:,}",
                f"{100 * row['share']:.2f} %",
                _ratio(row["bytes"], row["tokens"]),
            )
            for row in split["groups"]
            if split["num_groups"] > 1
        ]
        top = [(str(r["id"]), r["text"], *_share(r["count"], tokens)) for r in split["top_tokens"]]
        copied = [tuple(map(str, row.values())) for row in split["duplicates"]["most_copied"]]
        bodies: Sequence[tuple[str, str, Sequence[tuple[str, ...]]]] = (
            ("documents by length", "tokens/documents/share/tokens in them/share", lengths),
            ("by group", "group/documents/tokens/share/bytes per token", groups),
            ("most frequent tokens", "id/text/count/share", top),
            ("most copied documents", "times/tokens/first document", copied),
        )
        for title, columns, body in bodies:
            found.append(Table(f"{split['split']}: {title}", tuple(columns.split("/")), body))
    return [table for table in found if table.rows]


def summary(split: dict[str, Any]) -> dict[str, str]:
    """Return the main numbers of a split by name."""
    lengths, copies = split["lengths"], split["duplicates"]
    documents, tokens, num_bytes = split["documents"], split["tokens"], split["bytes"]
    return {
        "documents": f"{documents:,}",
        "tokens": f"{tokens:,}",
        "text": size(num_bytes),
        "bytes per token": _ratio(num_bytes, tokens),
        "on disk": size(split["stored_bytes"]),
        "tokens per document": _ratio(tokens, documents),
        "median (1 % to 99 %)": "{1:,} ({0:,} to {2:,})".format(*lengths["quantiles"]),
        "longest document": "{longest:,} (number {longest_document})".format(**lengths),
        "exact copies": " = ".join(_share(copies["copies"], documents)),
        "tokens in them": " = ".join(_share(copies["copied_tokens"], tokens)),
        "in both splits": f"{copies['elsewhere']:,}",
        "unused ids": f"{split['unused_ids']:,}",
        "fingerprint": split["fingerprint"][:12],
    }


def notes(content: dict[str, Any]) -> Iterator[str]:
    """Yield notes on skipped rows, repaired documents and groups."""
    for split in content["splits"]:
        for field, text in (("skipped", "skipped rows"), ("repaired", "repaired documents")):
            if split[field]:
                counts = ", ".join(f"{count:,} {why}" for why, count in split[field].items())
                yield f"{split['split']}: {text}: {counts}."
        if split["groups_count_more"]:
            yield f"{split['split']}: groups include all of the shard in which the limit ends."
        if split["num_groups"] > MAX_GROUPS:
            yield f"{split['split']}: {split['num_groups']:,} groups, of which the largest."


def _ratio(one: int, other: int) -> str:
    return f"{one / other:.3f}" if other else "–"


def _share(count: int, total: int) -> tuple[str, str]:
    return f"{count:,}", f"{100 * count / max(total, 1):.2f} %"
