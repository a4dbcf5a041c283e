"""Print documents, or windows as the model sees them, as text.

A window is sample I of a run with data_seed S: seq_len + 1 tokens. Lines of text begin with "│ ";
control characters become U+FFFD.
"""

import argparse
import textwrap
import typing
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from canon_pretrain.core.cli import positive
from canon_pretrain.core.errors import UserError
from canon_pretrain.core.terminal import printable
from canon_pretrain.data.sampler import (
    Order,
    check_length,
    permuted,
    permuted_offset,
    window_offset,
)
from canon_pretrain.data.shards import TokenShards
from canon_pretrain.data.tokenizer import Tokenizer
from data_prep.folder import SPLITS, TRAIN, load_tokenizer
from data_prep.plan import load_plan

WIDTH = 100
DEFAULT_SEQ_LEN = 4096


def show_document(folder: Path, number: int, *, split: str = TRAIN, ids: bool = False) -> str:
    """Return document `number` of a split, from 0, as text. Raises UserError."""
    tokenizer = load_tokenizer(folder, load_plan(folder).tokenizer)
    with TokenShards.open(folder / split) as shards:
        if not 0 <= number < shards.num_documents:
            raise UserError(
                "option.invalid",
                f"--document {number}: "
                f"{folder / split} has {shards.num_documents} documents, numbered from 0",
                option="--document",
            )
        # the last shard that starts at the document or before it
        shard = [shard for shard in shards.shards if shard.entry.first_document <= number][-1]
        start, end = shards.document(number)
        tokens = shards.read(start, end - start)

    lines = [
        f"== {split}, document {number}: "
        f"{len(tokens):,} tokens from {start:,}, in {shard.entry.name}",
        *_lines(tokenizer, tokens, ids),
        "== end of the document",
    ]
    return "\n".join(lines)


def show_window(
    folder: Path,
    sample: int,
    seed: int,
    *,
    seq_len: int = DEFAULT_SEQ_LEN,
    order: Order = "random",
    split: str = TRAIN,
    ids: bool = False,
) -> str:
    """Return sample `sample` of a run with data_seed `seed` as text. Raises UserError."""
    # Philox, which draws the windows, takes 64-bit numbers.
    for option, value in (("--window", sample), ("--seed", seed)):
        if not 0 <= value < 1 << 64:
            raise UserError(
                "option.invalid", f"{option} {value}: expected 0 to 2**64 - 1", option=option
            )

    # The window is the tokens [offset, stop) of the split.
    tokenizer = load_tokenizer(folder, load_plan(folder).tokenizer)
    offset_of = permuted_offset if order == "permute" else window_offset
    with TokenShards.open(folder / split) as shards:
        if order == "documents":
            check_length(shards.num_tokens, 1)
            offset, end = shards.document(permuted(seed, sample, shards.num_documents))
            stop = min(end, offset + seq_len + 1)
        else:
            offset = offset_of(seed, sample, shards.num_tokens, seq_len)
            stop = offset + seq_len + 1
        tokens = shards.read(offset, stop - offset)
        documents = list(shards.documents_in(offset, stop))

    # The part of each document that is in the window.
    lines = [
        f"== {split}, window {sample} of seed {seed}: tokens {offset:,} to {stop - 1:,} "
        f"(seq_len {seq_len:,} and the last target)"
    ]
    for document in documents:
        start = max(document.start, offset)
        end = min(document.end, stop)
        title = (
            f"== document {document.number}: {end - start:,} of "
            f"{document.end - document.start:,} tokens"
        )
        if start > document.start:
            title = f"{title}, after {start - document.start:,} outside the window"
        document_tokens = tokens[start - offset : end - offset]
        lines += [title, *_lines(tokenizer, document_tokens, ids)]

    lines.append("== end of the window")
    return "\n".join(lines)


def _lines(tokenizer: Tokenizer, tokens: np.ndarray, ids: bool) -> Iterator[str]:
    """Yield the text in lines, with `ids` the token ids, and a last line if EOS ends them."""
    text = printable(tokenizer.decode(tokens), keep="\n\t")
    # splitlines would also split at other characters
    for line in text.split("\n"):
        yield f"│ {line}"

    if ids:
        numbers = " ".join(map(str, tokens.tolist()))
        yield from textwrap.wrap(numbers, WIDTH, initial_indent="ids: ", subsequent_indent="     ")

    if len(tokens) and int(tokens[-1]) == tokenizer.eos_id:
        yield f"-- EOS ({tokenizer.eos_id})"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("folder", type=Path, metavar="DIR", help="the --out of a build")

    target = parser.add_mutually_exclusive_group(required=True)
    target.add_argument("--document", type=int, metavar="K", help="document K, from 0")
    target.add_argument(
        "--window",
        type=int,
        metavar="I",
        help="sample I of a run (of a mixture: one drawn from this folder)",
    )

    # A window depends on these settings of the run.
    add("--seed", type=int, default=0, metavar="S", help="the run's data.data_seed (default: 0)")
    add(
        "--seq-len",
        type=positive,
        default=DEFAULT_SEQ_LEN,
        metavar="T",
        help="the run's training.seq_len (default: %(default)s)",
    )
    add(
        "--order",
        choices=typing.get_args(Order),
        default="random",
        help="the run's data.order (default: random)",
    )

    add("--split", choices=SPLITS, default=TRAIN, help="default: %(default)s")
    add("--ids", action="store_true", help="print the token ids as well")


def run(arguments: argparse.Namespace) -> None:
    if arguments.document is not None:
        text = show_document(
            arguments.folder, arguments.document, split=arguments.split, ids=arguments.ids
        )
    else:
        text = show_window(
            arguments.folder,
            arguments.window,
            arguments.seed,
            seq_len=arguments.seq_len,
            order=arguments.order,
            split=arguments.split,
            ids=arguments.ids,
        )
    print(text)
