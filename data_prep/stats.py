"""What is in a finished data folder: counts, lengths, tokens, duplicates, groups.

    python -m data_prep stats DATA [--html FILE] [--workers N]

Every token is read once, its CRC32 checked. Tables go to the terminal; `--html` also writes a page
with plots.
"""

import argparse
import tempfile
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from canon_pretrain.core.cli import available_cores
from canon_pretrain.core.errors import UserError
from canon_pretrain.core.files import free_bytes, write_atomic
from canon_pretrain.core.terminal import Progress
from canon_pretrain.core.text import printable, size
from canon_pretrain.data.shards import CommitMark, TokenShards
from canon_pretrain.data.tokenizer import Tokenizer
from data_prep.folder import SPLITS, disk_errors, load_tokenizer, say
from data_prep.plan import Plan, load_plan
from data_prep.stats_pass import (
    MAX_COUNTED_LENGTH,
    RECORD,
    Counts,
    Duplicates,
    bucket_bits,
    count_parts,
    find_duplicates,
)
from data_prep.stats_table import html_page, print_tables

TOP_TOKENS = 30
MAX_GROUPS = 100
RANKS = 200


def stats(folder: Path, html: Path | None = None, *, workers: int = 1) -> dict[str, Any]:
    """Print what `folder` holds, write the page `html`, and return the same as JSON values.

    Needs 29 bytes a document in the folder for temporary files (TMPDIR). Raises UserError.
    """
    if workers < 1:
        raise UserError(f"--workers is {workers}, expected at least 1")
    if html is not None and (html.is_dir() or not html.parent.is_dir()):
        raise UserError(
            f"--html {html}: expected the path of a file in a folder that exists; make "
            f"{html.parent}, or give another path"
        )
    plan = load_plan(folder)
    content = data_content(folder, plan, workers)
    print_tables(content)
    if html is not None:
        with disk_errors(html.parent):
            write_atomic(html, html_page(content).encode())
        say(f"stats: {html}")
    return content


def data_content(folder: Path, plan: Plan, workers: int) -> dict[str, Any]:
    """All that the tables and the page show of `folder`, JSON values only. Raises UserError."""
    tokenizer = load_tokenizer(folder, plan.tokenizer)
    opened = []
    for split in SPLITS:
        with TokenShards.open(folder / split) as shards:
            opened.append(shards)
    parts = [(at, part) for at, shards in enumerate(opened) for part in shards.parts]
    totals = [Counts.none(shards.vocab_size) for shards in opened]
    num_documents = sum(shards.num_documents for shards in opened)
    scratch, needed = Path(tempfile.gettempdir()), num_documents * RECORD.itemsize
    if (free := free_bytes(scratch)) < needed:
        raise UserError(
            f"{scratch}: {size(free)} are free, finding duplicates needs {size(needed)} for a "
            f"while; make room, or name another folder with TMPDIR"
        )
    bits = bucket_bits(num_documents)
    with tempfile.TemporaryDirectory(prefix="canon-stats-") as buckets, Progress() as progress:
        total = sum(part.entry.tokens for _, part in parts) or 1
        done = 0
        for at, part, counts in count_parts(folder, Path(buckets), bits, parts, workers):
            totals[at].add(counts)
            done += part.entry.tokens
            progress.update(done / total, f"stats: {done:,} of {total:,} tokens")
        duplicates = find_duplicates(Path(buckets), bits, len(SPLITS))
    return {
        "folder": printable(str(folder)),
        "source": plan.source,
        "source_version": plan.source_version,
        "plan_sha256": plan.sha256,
        "tokenizer": {
            "requested": plan.tokenizer.requested,
            "sha256": plan.tokenizer.sha256,
            "vocab_size": plan.tokenizer.vocab_size,
        },
        "splits": [
            {"split": split, **_split_content(shards, counts, copies, tokenizer)}
            for split, shards, counts, copies in zip(
                SPLITS, opened, totals, duplicates, strict=True
            )
        ],
    }


def _split_content(
    shards: TokenShards, counts: Counts, duplicates: Duplicates, tokenizer: Tokenizer
) -> dict[str, Any]:
    tokens, documents = shards.num_tokens, shards.num_documents
    marks = [part.read_mark() for part in shards.parts]
    sizes = [known.size for part in shards.parts for known in vars(part.files).values()]
    return {
        "fingerprint": shards.fingerprint,
        "parts": len(marks),
        "documents": documents,
        "tokens": tokens,
        "bytes": shards.num_bytes,
        "stored_bytes": sum(sizes),
        "lengths": _length_content(counts, documents, tokens),
        "duplicates": asdict(duplicates),
        "top_tokens": _top_tokens(counts.tokens, tokens, tokenizer),
        "unused_ids": int((counts.tokens == 0).sum()),
        "frequencies": _frequencies(counts.tokens),
        **_groups(marks),
        # marks know nothing of the limit that ends the stream inside a part
        "groups_count_more": sum(mark.documents for mark in marks) > documents,
        "skipped": _summed(mark.skipped for mark in marks),
        "repaired": _summed(mark.repaired for mark in marks),
    }


def _length_content(counts: Counts, documents: int, tokens: int) -> dict[str, Any]:
    """Lengths in tokens, the EOS among them."""
    below = np.cumsum(counts.lengths)

    def quantile(share: float) -> int | None:
        """The smallest length that this share of the documents does not exceed, if counted."""
        length = int(np.searchsorted(below, share * documents, side="left"))
        return length if length < MAX_COUNTED_LENGTH else None

    used = np.flatnonzero(counts.bin_documents)
    return {
        "mean": tokens / documents if documents else None,
        "quantiles": {
            str(percent): quantile(percent / 100) if documents else None
            for percent in (1, 25, 50, 75, 99)
        },
        "counted_to": MAX_COUNTED_LENGTH - 1,
        "shortest": counts.shortest[0] if documents else None,
        "shortest_document": counts.shortest[1] if documents else None,
        "longest": counts.longest[0] if documents else None,
        "longest_document": -counts.longest[1] if documents else None,
        "bins": [
            {
                "from": 1 << k,
                "to": (2 << k) - 1,
                "documents": int(counts.bin_documents[k]),
                "tokens": int(counts.bin_tokens[k]),
            }
            for k in (range(used[0], used[-1] + 1) if len(used) else ())
        ],
    }


def _top_tokens(counts: np.ndarray, total: int, tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """The ids that are there most, with what they stand for."""
    order = np.argsort(-counts, kind="stable")[:TOP_TOKENS]
    return [
        {
            "id": int(i),
            "text": token_text(tokenizer, int(i)),
            "count": int(counts[i]),
            "share": int(counts[i]) / total,
        }
        for i in order
        if counts[i]
    ]


def token_text(tokenizer: Tokenizer, token: int) -> str:
    """What one id adds to a text, in quotes; a name for the ids that add nothing."""
    if token == tokenizer.eos_id:
        return "EOS"
    if token == tokenizer.bos_id:
        return "BOS"
    # after itself: at a text's beginning SentencePiece drops a piece's leading space
    twice, once = tokenizer.decode([token, token]), tokenizer.decode([token])
    text = twice[len(once) :] if twice.startswith(once) else once
    return f'"{printable(text)}"' if text else "no text"


def _frequencies(counts: np.ndarray) -> dict[str, list[int]]:
    """Counts by rank, at most RANKS ranks that are evenly far apart on a logarithmic axis."""
    ordered = np.sort(counts[counts > 0])[::-1]
    if not len(ordered):
        return {"ranks": [], "counts": []}
    ranks = np.unique(np.geomspace(1, len(ordered), RANKS).round().astype(np.int64))
    return {"ranks": ranks.tolist(), "counts": ordered[ranks - 1].tolist()}


def _groups(marks: list[CommitMark]) -> dict[str, Any]:
    """Documents, tokens and bytes by group, of the whole parts; the largest groups first."""
    sums: dict[str, np.ndarray] = {}
    for mark in marks:
        for group, numbers in mark.groups.items():
            sums[group] = sums.get(group, 0) + np.array(numbers, dtype=np.int64)
    total = sum(int(numbers[1]) for numbers in sums.values())
    rows = [
        {
            "group": printable(group),
            "documents": documents,
            "tokens": tokens,
            "bytes": num_bytes,
            "share": tokens / max(total, 1),
        }
        for group, (documents, tokens, num_bytes) in (
            (group, numbers.tolist()) for group, numbers in sums.items()
        )
    ]
    rows.sort(key=lambda row: (-row["tokens"], row["group"]))
    return {"groups": rows[:MAX_GROUPS], "num_groups": len(rows)}


def _summed(counts: Iterable[dict[str, int]]) -> dict[str, int]:
    """Counts by reason, over all parts."""
    total: Counter[str] = Counter()
    for more in counts:
        total.update(more)
    return {printable(reason): count for reason, count in sorted(total.items())}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `python -m data_prep stats`."""
    parser.add_argument("folder", type=Path, metavar="DIR", help="the --out of a build")
    parser.add_argument(
        "--html", type=Path, metavar="FILE", help="also write a page with plots, one file"
    )
    parser.add_argument(
        "--workers",
        type=int,
        default=available_cores(),
        metavar="N",
        help=f"processes (default: the cores, %(default)s); duplicates need {RECORD.itemsize} "
        f"bytes a document in the folder for temporary files (TMPDIR)",
    )


def run(arguments: argparse.Namespace) -> None:
    """`python -m data_prep stats` with parsed arguments. Raises UserError."""
    stats(arguments.folder, arguments.html, workers=arguments.workers)
