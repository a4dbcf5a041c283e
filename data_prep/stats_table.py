"""What `python -m data_prep stats` shows: tables on a terminal, and a page with the same."""

from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.table import Table

from canon_pretrain.core.terminal import Console
from canon_pretrain.core.text import size

TEMPLATES = Path(__file__).parent / "templates"
PLOTTED = ("split", "documents", "tokens", "lengths", "frequencies", "groups")
SHOWN_TOKENS = 15
SHOWN_GROUPS = 20
BAR_WIDTH = 20


def print_tables(content: dict[str, Any], console: Console | None = None) -> None:
    """Print `stats.data_content`: an overview, then lengths, tokens and groups of the splits."""
    console = console or Console()
    splits = content["splits"]
    console.print(_overview(content))
    for split in splits:
        if not split["documents"]:
            continue
        console.print(_lengths(split))
        if split["groups"] and split["groups"] != [{**split["groups"][0], "group": ""}]:
            console.print(_groups(split))
    console.print(_tokens(splits[0]))
    for split in splits:
        for sentence in notes(split):
            console.print(
                f"{split['split']}: {sentence}", markup=False, highlight=False, soft_wrap=True
            )


def html_page(content: dict[str, Any]) -> str:
    """The page of `stats.data_content`: tables and plots in one self-contained file."""
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


def facts(split: dict[str, Any]) -> list[tuple[str, str]]:
    """The figures of a split: (name, words)."""
    lengths, duplicates = split["lengths"], split["duplicates"]
    documents, tokens = split["documents"], split["tokens"]
    quantiles = lengths["quantiles"]
    return [
        ("documents", f"{documents:,}"),
        ("tokens", f"{tokens:,}"),
        ("text", size(split["bytes"])),
        ("bytes a token", ratio(split["bytes"], tokens)),
        ("on disk", size(split["stored_bytes"])),
        ("text to disk", ratio(split["bytes"], split["stored_bytes"])),
        ("tokens a document", f"{lengths['mean']:,.1f}" if documents else "–"),
        (
            "median (1 % to 99 %)",
            f"{length(quantiles['50'], lengths)} ({length(quantiles['1'], lengths)} to "
            f"{length(quantiles['99'], lengths)})"
            if documents
            else "–",
        ),
        ("longest document", f"{lengths['longest']:,}" if documents else "–"),
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
    best = split["duplicates"]["most_copied"]
    if best:
        first = best[0]
        sentences.append(
            f"the document that is there most often: {first['count']:,} times, "
            f"{first['tokens']:,} tokens, first as number {first['first']} "
            f"(show --split {split['split']} --document {first['first']})."
        )
    if split["documents"]:
        at = split["lengths"]["longest_document"]
        sentences.append(f"the longest document is number {at}.")
    if split["groups_count_more"]:
        sentences.append("groups are counted to the end of the part in which the limit falls.")
    if split["num_groups"] > len(split["groups"]):
        sentences.append(f"{split['num_groups']:,} groups; the largest are shown.")
    return sentences


def span(entry: dict[str, Any]) -> str:
    """The lengths of a bin."""
    return f"{entry['from']:,} to {entry['to']:,}" if entry["to"] > 1 else "1"


def ratio(one: int, other: int) -> str:
    """A quotient; a dash where there is nothing to divide by."""
    return f"{one / other:.3f}" if other else "–"


def share(count: int, total: int) -> str:
    """A count with its percentage."""
    return f"{count:,} ({100 * count / total:.2f} %)" if total else f"{count:,}"


def length(tokens: int | None, lengths: dict[str, Any]) -> str:
    """A quantile of the lengths; they are counted one by one up to a bound only."""
    return f"over {lengths['counted_to']:,}" if tokens is None else f"{tokens:,}"


def _overview(content: dict[str, Any]) -> Table:
    splits = content["splits"]
    tokenizer = content["tokenizer"]
    table = Table(
        title=escape(
            f"{content['folder']}: {content['source']} ({content['source_version']}), tokenizer "
            f"{tokenizer['requested']} {tokenizer['sha256'][:12]}, {tokenizer['vocab_size']:,} ids"
        ),
        title_justify="left",
    )
    table.add_column("")
    for split in splits:
        table.add_column(split["split"], justify="right")
    for row in zip(*(facts(split) for split in splits), strict=True):
        table.add_row(row[0][0], *(escape(words) for _, words in row))
    return table


def _lengths(split: dict[str, Any]) -> Table:
    table = Table(title=f"{split['split']}: documents by length in tokens", title_justify="left")
    for name in ("tokens", "documents", "share", "tokens in them"):
        table.add_column(name, justify="right")
    table.add_column("share of the tokens", min_width=BAR_WIDTH)
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


def _groups(split: dict[str, Any]) -> Table:
    table = Table(title=f"{split['split']}: by group", title_justify="left")
    table.add_column("group")
    for name in ("documents", "tokens", "share", "bytes a token"):
        table.add_column(name, justify="right")
    for row in split["groups"][:SHOWN_GROUPS]:
        table.add_row(
            escape(row["group"] or "(none)"),
            f"{row['documents']:,}",
            f"{row['tokens']:,}",
            f"{100 * row['share']:.2f} %",
            ratio(row["bytes"], row["tokens"]),
        )
    return table


def _tokens(split: dict[str, Any]) -> Table:
    table = Table(title=f"{split['split']}: most frequent tokens", title_justify="left")
    table.add_column("id", justify="right")
    table.add_column("text")
    for name in ("count", "share"):
        table.add_column(name, justify="right")
    for row in split["top_tokens"][:SHOWN_TOKENS]:
        table.add_row(
            str(row["id"]), escape(row["text"]), f"{row['count']:,}", f"{100 * row['share']:.2f} %"
        )
    return table
