"""What is in a finished data folder: counts, lengths, tokens, duplicates, groups.

    python -m data_prep stats DATA [--html FILE] [--workers N]

Every token is read once, its CRC32 checked (`stats_pass.py`). Tables go to the terminal; `--html`
also writes a page with plots.
"""

import argparse
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from rich.markup import escape
from rich.table import Column, Table

from canon_pretrain.core.cli import available_cores
from canon_pretrain.core.errors import UserError
from canon_pretrain.core.files import free_bytes, write_atomic
from canon_pretrain.core.terminal import Console, Progress
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

TEMPLATES = Path(__file__).parent / "templates"
PLOTTED = ("split", "documents", "tokens", "lengths", "frequencies", "groups")
TOP_TOKENS = 30
MAX_GROUPS = 100
RANKS = 200
SHOWN_TOKENS = 15
SHOWN_GROUPS = 20
BAR_WIDTH = 20


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
    content = data_content(folder, load_plan(folder), workers)
    print_tables(content)
    if html is not None:
        with disk_errors(html.parent):
            write_atomic(html, html_page(content).encode())
        say(f"stats: {html}")
    return content


# ---- the figures


def data_content(folder: Path, plan: Plan, workers: int) -> dict[str, Any]:
    """All that the tables and the page show of `folder`, JSON values only. Raises UserError."""
    tokenizer = load_tokenizer(folder, plan.tokenizer)
    opened = []
    for split in SPLITS:
        with TokenShards.open(folder / split) as shards:
            opened.append(shards)
    parts = [(at, part) for at, shards in enumerate(opened) for part in shards.parts]
    num_documents = sum(shards.num_documents for shards in opened)
    scratch, needed = Path(tempfile.gettempdir()), num_documents * RECORD.itemsize
    if (free := free_bytes(scratch)) < needed:
        raise UserError(
            f"{scratch}: {size(free)} are free, finding duplicates needs {size(needed)} for a "
            f"while; make room, or name another folder with TMPDIR"
        )
    bits = bucket_bits(num_documents)
    vocab_size = plan.tokenizer.vocab_size
    totals = [Counts(vocab_size) for _ in SPLITS]
    with tempfile.TemporaryDirectory(prefix="canon-stats-") as buckets, Progress() as progress:
        total = sum(shards.num_tokens for shards in opened) or 1
        done = 0
        counted = count_parts(parts, vocab_size, Path(buckets), bits, workers)
        for (at, part), counts in zip(parts, counted, strict=True):
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
            name: getattr(plan.tokenizer, name) for name in ("requested", "sha256", "vocab_size")
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
    marks = [part.read_mark() for part in shards.parts]
    sizes = [known.size for part in shards.parts for known in vars(part.files).values()]
    order = np.argsort(-counts.tokens, kind="stable")[:TOP_TOKENS].tolist()
    # ranks are evenly far apart on a logarithmic axis
    ordered = np.sort(counts.tokens[counts.tokens > 0])[::-1]
    ranks = np.unique(np.geomspace(1, max(len(ordered), 1), RANKS).round().astype(np.int64))
    ranks = ranks[ranks <= len(ordered)]
    return {
        "fingerprint": shards.fingerprint,
        "parts": len(marks),
        "documents": shards.num_documents,
        "tokens": shards.num_tokens,
        "bytes": shards.num_bytes,
        "stored_bytes": sum(sizes),
        "lengths": _length_content(counts, shards.num_documents, shards.num_tokens),
        "duplicates": asdict(duplicates),
        "top_tokens": [
            {
                "id": i,
                "text": token_text(tokenizer, i),
                "count": int(counts.tokens[i]),
                "share": int(counts.tokens[i]) / shards.num_tokens,
            }
            for i in order
            if counts.tokens[i]
        ],
        "unused_ids": int((counts.tokens == 0).sum()),
        "frequencies": {"ranks": ranks.tolist(), "counts": ordered[ranks - 1].tolist()},
        **_groups(marks),
        # marks know nothing of the limit that ends the stream inside a part
        "groups_count_more": sum(mark.documents for mark in marks) > shards.num_documents,
        "skipped": _summed(mark.skipped for mark in marks),
        "repaired": _summed(mark.repaired for mark in marks),
    }


def _length_content(counts: Counts, documents: int, tokens: int) -> dict[str, Any]:
    """Lengths in tokens, the EOS among them; a quantile beyond MAX_COUNTED_LENGTH is None."""
    quantiles: dict[str, int | None] = {}
    below = np.cumsum(counts.lengths)
    for percent in (1, 25, 50, 75, 99):
        # the smallest length that this share of the documents does not exceed
        length = int(np.searchsorted(below, percent / 100 * documents, side="left"))
        quantiles[str(percent)] = length if documents and length < MAX_COUNTED_LENGTH else None
    used = np.flatnonzero(counts.bin_documents)
    return {
        "mean": tokens / documents if documents else None,
        "quantiles": quantiles,
        "counted_to": MAX_COUNTED_LENGTH - 1,
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


def _groups(marks: list[CommitMark]) -> dict[str, Any]:
    """Documents, tokens and bytes by group, of the whole parts; the largest groups first."""
    sums: dict[str, np.ndarray] = {}
    for mark in marks:
        for group, numbers in mark.groups.items():
            sums[group] = sums.get(group, 0) + np.array(numbers, dtype=np.int64)
    total = sum(int(numbers[1]) for numbers in sums.values())
    rows: list[dict[str, Any]] = []
    for group, summed in sums.items():
        row = dict(zip(("documents", "tokens", "bytes"), summed.tolist(), strict=True))
        rows.append({"group": printable(group), **row, "share": row["tokens"] / max(total, 1)})
    rows.sort(key=lambda row: (-row["tokens"], row["group"]))
    return {"groups": rows[:MAX_GROUPS], "num_groups": len(rows)}


def _summed(counts: Iterable[dict[str, int]]) -> dict[str, int]:
    """Counts by reason, over all parts."""
    total: Counter[str] = Counter()
    for more in counts:
        total.update(more)
    return {printable(reason): count for reason, count in sorted(total.items())}


# ---- what is shown


def html_page(content: dict[str, Any]) -> str:
    """The page of `data_content`: tables and plots in one self-contained file."""
    # plotly's script takes a while to import, and only the page needs it
    from canon_pretrain.core import page

    return page.html_page(
        TEMPLATES,
        "stats",
        [{key: split[key] for key in PLOTTED} for split in content["splits"]],
        filters={"facts": facts, "notes": notes, "span": span},
        ratio=ratio,
        content=content,
    )


def print_tables(content: dict[str, Any], console: Console | None = None) -> None:
    """Print `data_content`: an overview, then lengths, tokens and groups of the splits."""
    console = console or Console()
    splits, tokenizer = content["splits"], content["tokenizer"]
    title = (
        f"{content['folder']}: {content['source']} ({content['source_version']}), tokenizer "
        f"{tokenizer['requested']} {tokenizer['sha256'][:12]}, {tokenizer['vocab_size']:,} ids"
    )
    table = _table(title, "", *_numbers(*(split["split"] for split in splits)))
    for row in zip(*(facts(split) for split in splits), strict=True):
        table.add_row(row[0][0], *(escape(words) for _, words in row))
    console.print(table)
    for split in splits:
        if split["documents"]:
            console.print(_lengths(split))
            if any(row["group"] for row in split["groups"]):
                console.print(_group_table(split))
    table = _table(
        "train: most frequent tokens", *_numbers("id"), "text", *_numbers("count", "share")
    )
    for row in splits[0]["top_tokens"][:SHOWN_TOKENS]:
        table.add_row(
            str(row["id"]), escape(row["text"]), f"{row['count']:,}", f"{100 * row['share']:.2f} %"
        )
    console.print(table)
    for split in splits:
        for sentence in notes(split):
            console.print(
                f"{split['split']}: {sentence}", markup=False, highlight=False, soft_wrap=True
            )


def _table(title: str, *columns: str | Column) -> Table:
    return Table(*columns, title=escape(title), title_justify="left")


def _numbers(*names: str) -> Iterator[Column]:
    return (Column(name, justify="right") for name in names)


def _lengths(split: dict[str, Any]) -> Table:
    table = _table(
        f"{split['split']}: documents by length in tokens",
        *_numbers("tokens", "documents", "share", "tokens in them"),
        Column("share of the tokens", min_width=BAR_WIDTH),
    )
    for entry in split["lengths"]["bins"]:
        part = entry["tokens"] / split["tokens"]
        table.add_row(
            span(entry),
            f"{entry['documents']:,}",
            f"{100 * entry['documents'] / split['documents']:.2f} %",
            f"{entry['tokens']:,}",
            "█" * round(BAR_WIDTH * part) or ("▏" if part else ""),
        )
    return table


def _group_table(split: dict[str, Any]) -> Table:
    columns = _numbers("documents", "tokens", "share", "bytes a token")
    table = _table(f"{split['split']}: by group", "group", *columns)
    for row in split["groups"][:SHOWN_GROUPS]:
        table.add_row(
            escape(row["group"] or "(none)"),
            f"{row['documents']:,}",
            f"{row['tokens']:,}",
            f"{100 * row['share']:.2f} %",
            ratio(row["bytes"], row["tokens"]),
        )
    return table


def facts(split: dict[str, Any]) -> list[tuple[str, str]]:
    """The figures of a split: (name, words)."""
    lengths, duplicates = split["lengths"], split["duplicates"]
    documents, tokens = split["documents"], split["tokens"]
    mean = median = longest = "–"
    if documents:
        low, middle, high = (
            f"over {lengths['counted_to']:,}" if length is None else f"{length:,}"
            for length in (lengths["quantiles"][percent] for percent in ("1", "50", "99"))
        )
        mean, median = f"{lengths['mean']:,.1f}", f"{middle} ({low} to {high})"
        longest = f"{lengths['longest']:,}"
    return [
        ("documents", f"{documents:,}"),
        ("tokens", f"{tokens:,}"),
        ("text", size(split["bytes"])),
        ("bytes a token", ratio(split["bytes"], tokens)),
        ("on disk", size(split["stored_bytes"])),
        ("text to disk", ratio(split["bytes"], split["stored_bytes"])),
        ("tokens a document", mean),
        ("median (1 % to 99 %)", median),
        ("longest document", longest),
        ("exact copies", share(duplicates["copies"], documents)),
        ("tokens in them", share(duplicates["copied_tokens"], tokens)),
        ("also in the other split", f"{duplicates['elsewhere']:,}"),
        ("ids never used", f"{split['unused_ids']:,}"),
        ("fingerprint", split["fingerprint"][:12]),
    ]


def notes(split: dict[str, Any]) -> list[str]:
    """Sentences on what is worth knowing beside the figures."""
    sentences = []
    for field, words in (("skipped", "rows skipped"), ("repaired", "documents repaired")):
        if split[field]:
            counts = ", ".join(f"{count:,} {reason}" for reason, count in split[field].items())
            sentences.append(f"{words}: {counts}.")
    for best in split["duplicates"]["most_copied"][:1]:
        sentences.append(
            f"the document that is there most often: {best['count']:,} times, "
            f"{best['tokens']:,} tokens, first as number {best['first']} "
            f"(show --split {split['split']} --document {best['first']})."
        )
    if split["documents"]:
        sentences.append(f"the longest document is number {split['lengths']['longest_document']}.")
    if split["groups_count_more"]:
        sentences.append("groups are counted to the end of the part in which the limit falls.")
    if split["num_groups"] > len(split["groups"]):
        sentences.append(f"{split['num_groups']:,} groups; the largest are shown.")
    return sentences


def span(entry: dict[str, Any]) -> str:
    """The lengths of a bin."""
    return f"{entry['from']:,} to {entry['to']:,}" if entry["to"] > 1 else "1"


def ratio(one: int, other: int) -> str:
    """A quotient; a dash if there is nothing to divide by."""
    return f"{one / other:.3f}" if other else "–"


def share(count: int, total: int) -> str:
    """A count with its percentage."""
    return f"{count:,} ({100 * count / total:.2f} %)" if total else f"{count:,}"
