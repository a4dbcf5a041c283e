"""Print documents, or windows as the model sees them, as text.

    canon data show DATA --document K [--split train|validation] [--ids]
    canon data show DATA --window I --seed S [--seq-len T] [--order permute]

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
from canon_pretrain.data.sampler import Order, permuted_offset, window_offset
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
            count = f"{folder / split} has {shards.num_documents} documents, numbered from 0"
            raise UserError("option.invalid", f"--document {number}: {count}", option="--document")
        shard = [one for one in shards.shards if one.entry.first_document <= number][-1]
        entry = shard.entry
        at = number - entry.first_document
        start, end = np.append(0, shard.document_ends())[at : at + 2].tolist()
        first = entry.first_token + start
        tokens = shards.read(first, end - start)
    where = f"{len(tokens):,} tokens from {first:,}, in {entry.name}"
    head = f"== {split}, document {number}: {where}"
    return "\n".join([head, *_lines(tokenizer, tokens, ids), "== end of the document"])


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
    for name, value in (("--window", sample), ("--seed", seed)):
        if not 0 <= value < 1 << 64:
            raise UserError(
                "option.invalid", f"{name} {value}: expected 0 to 2**64 - 1", option=name
            )
    tokenizer = load_tokenizer(folder, load_plan(folder).tokenizer)
    with TokenShards.open(folder / split) as shards:
        place = permuted_offset if order == "permute" else window_offset
        offset = place(seed, sample, shards.num_tokens, seq_len)
        tokens = shards.read(offset, seq_len + 1)
        documents = list(_documents(shards, offset, seq_len + 1))
    where = f"tokens {offset:,} to {offset + seq_len:,} (seq_len {seq_len:,} and the last target)"
    lines = [f"== {split}, window {sample} of seed {seed}: {where}"]
    begin = offset
    for number, start, end in documents:
        stop = min(end, offset + seq_len + 1)
        before = f", after {begin - start:,} outside the window" if begin > start else ""
        lines.append(f"== document {number}: {stop - begin:,} of {end - start:,} tokens{before}")
        lines += _lines(tokenizer, tokens[begin - offset : stop - offset], ids)
        begin = stop
    return "\n".join([*lines, "== end of the window"])


def _documents(shards: TokenShards, offset: int, count: int) -> Iterator[tuple[int, int, int]]:
    """Yield (number, first token, end) of each document in the tokens [offset, offset + count)."""
    for shard in shards.shards:
        first_token = shard.entry.first_token
        if offset - shard.entry.tokens < first_token < offset + count:
            ends = shard.document_ends() + first_token
            first, last = np.searchsorted(ends, [offset, offset + count - 1], side="right")
            for at in range(first, min(last + 1, len(ends))):
                start = int(ends[at - 1]) if at else first_token
                yield shard.entry.first_document + at, start, int(ends[at])


def _lines(tokenizer: Tokenizer, tokens: np.ndarray, ids: bool) -> Iterator[str]:
    text = printable(tokenizer.decode(tokens), keep="\n\t")
    # splitlines would also split at other characters
    yield from (f"│ {line}" for line in text.split("\n"))
    if ids:
        numbers = " ".join(str(i) for i in tokens.tolist())
        yield from textwrap.wrap(numbers, WIDTH, initial_indent="ids: ", subsequent_indent="     ")
    if len(tokens) and int(tokens[-1]) == tokenizer.eos_id:
        yield f"-- EOS ({tokenizer.eos_id})"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("folder", type=Path, metavar="DIR", help="the --out of a build")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--document", type=int, metavar="K", help="document K, from 0")
    window = "sample I of a run (of a mixture: one drawn from this folder)"
    what.add_argument("--window", type=int, metavar="I", help=window)
    add("--seed", type=int, default=0, metavar="S", help="the run's data.data_seed (default: 0)")
    seq_len = "the run's training.seq_len (default: %(default)s)"
    add("--seq-len", type=positive, default=DEFAULT_SEQ_LEN, metavar="T", help=seq_len)
    orders = typing.get_args(Order)
    add("--order", choices=orders, default="random", help="the run's data.order (default: random)")
    add("--split", choices=SPLITS, default=TRAIN, help="default: %(default)s")
    add("--ids", action="store_true", help="print the token ids as well")


def run(arguments: argparse.Namespace) -> None:
    options = {name: getattr(arguments, name) for name in ("folder", "split", "ids")}
    if arguments.document is not None:
        print(show_document(number=arguments.document, **options))
    else:
        more = {name: getattr(arguments, name) for name in ("seed", "seq_len", "order")}
        print(show_window(sample=arguments.window, **more, **options))
