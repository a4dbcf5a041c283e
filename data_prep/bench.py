"""What data preparation and reading cost on this machine, beside what else there is, as ratios.

    python -m data_prep bench [--files FILE_OR_FOLDER ...] [--tokenizer PATH|train:N] [--json FILE]

Encoding and reading are counted in CPU time of one process; they take turns with what they are
compared with, so that whatever else the machine does meets both. Whole builds are separate
processes, compared by CPU time with datatrove (where it is installed) and by the clock with
themselves at two workers. The text is the library and installed packages of the running Python, or
`--files`.
"""

import argparse
import os
import platform
import sysconfig
import tempfile
from collections.abc import Iterator
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

from rich.table import Table

from canon_pretrain.core.errors import UserError
from canon_pretrain.core.files import write_json
from canon_pretrain.core.terminal import Console
from canon_pretrain.data.tokenizer import Tokenizer
from data_prep.bench_build import measure_builds
from data_prep.bench_encode import measure_encoding
from data_prep.bench_reading import measure_reading, measure_start
from data_prep.parts import available_cores
from data_prep.progress import say
from data_prep.rows import Document
from data_prep.sources import LOCAL, open_input, select
from data_prep.train_tokenizer import train_tokenizer

TEXT_FILES = (".py", ".md", ".rst", ".txt")
ENCODED_BYTES = 12_000_000
"""The part of the text that is encoded again and again, and that a tokenizer is trained on."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command line of `bench`."""
    add = parser.add_argument
    add(
        "--files",
        nargs="+",
        type=Path,
        default=(),
        metavar="PATH",
        help="text to measure on, as --source local takes it (default: this Python's packages)",
    )
    add("--text-field", metavar="F", help="the field with the text, in files of rows")
    add(
        "--tokenizer",
        default="train:32000",
        metavar="train:N|PATH",
        help="a SentencePiece model, or one trained on the text (default: %(default)s)",
    )
    add("--megabytes", type=float, default=96.0, help="text at most (default: %(default)g)")
    add("--repeats", type=int, default=3, help="how often each is measured (default: %(default)s)")
    add("--json", type=Path, metavar="FILE", help="write the figures to this file too")


def run(arguments: argparse.Namespace) -> None:
    """Measure and print. Raises UserError."""
    if arguments.repeats < 1 or arguments.megabytes <= 0:
        raise UserError(
            f"--repeats {arguments.repeats} --megabytes {arguments.megabytes:g}: expected at least "
            f"1, and more than 0"
        )
    result = measure(
        arguments.files,
        arguments.text_field,
        arguments.tokenizer,
        megabytes=arguments.megabytes,
        repeats=arguments.repeats,
    )
    print_result(result, Console())
    if arguments.json:
        write_json(arguments.json, result)


def measure(
    files: tuple[Path, ...] | list[Path],
    text_field: str | None,
    tokenizer: str,
    *,
    megabytes: float,
    repeats: int,
) -> dict[str, Any]:
    """The figures of one run, as JSON can hold them; seconds, bytes and tokens."""
    size = _asked_size(tokenizer)
    given = Tokenizer.load(Path(tokenizer)) if size is None else None
    texts = _collect(files, text_field, int(megabytes * 1e6))
    sizes = [len(text.encode()) for text in texts]
    step = max(1, round(sum(sizes) / ENCODED_BYTES))
    sample = texts[::step]
    model = given or Tokenizer(train_tokenizer(sample, size or 0), tokenizer)
    say(f"{len(texts):,} documents, {sum(sizes) / 1e6:.1f} MB; {model.method}")
    with tempfile.TemporaryDirectory(prefix="canon-data-bench-") as scratch:
        folder = Path(scratch)
        result = {
            "bench": "data_prep",
            "time": datetime.now(UTC).isoformat(timespec="seconds"),
            "cpu": f"{platform.machine()}, {available_cores()} cores",
            "versions": {name: version(name) for name in ("sentencepiece", "tokenizers", "numpy")},
            "documents": len(texts),
            "bytes": sum(sizes),
            "vocab_size": model.vocab_size,
            "method": model.method,
            "encoding": measure_encoding(model, sample, repeats),
            "builds": measure_builds(model, texts, folder / "builds", repeats),
            "reading": measure_reading(folder / "reading", repeats),
            "start": measure_start(folder / "start", repeats),
        }
    return result


def _collect(files: tuple[Path, ...] | list[Path], field: str | None, limit: int) -> list[str]:
    """Texts of `limit` bytes in all, or of what there is."""
    texts: list[str] = []
    size = 0
    for text in _rows(files, field) if files else _packages():
        size += len(text.encode())
        if texts and size > limit:
            break
        texts.append(text)
    if len(texts) < 2:
        raise UserError(f"--files {files}: {len(texts)} document(s), expected 2 at least")
    return texts


def _rows(files: tuple[Path, ...] | list[Path], text_field: str | None) -> Iterator[str]:
    chosen = select(LOCAL, files, text_field=text_field)
    for known in chosen.inputs:
        reader = open_input(chosen.root, known, chosen.text_field, chosen.group_field)
        yield from (row.text for row in reader.rows() if isinstance(row, Document))


def _packages() -> Iterator[str]:
    """The text files of the library and then of the installed packages, in the order of paths."""
    for place in ("stdlib", "purelib"):
        for folder, names, files in os.walk(sysconfig.get_path(place)):
            names[:] = sorted(name for name in names if name != "site-packages")
            for name in sorted(name for name in files if name.endswith(TEXT_FILES)):
                try:
                    text = Path(folder, name).read_bytes().decode()
                except (OSError, UnicodeDecodeError):
                    continue  # a package's test of just that; any other text serves as well
                if text:
                    yield text


def _asked_size(tokenizer: str) -> int | None:
    """The N of train:N, None for a path."""
    size = tokenizer.removeprefix("train:")
    if size == tokenizer:
        return None
    if not size.isdecimal():
        raise UserError(f"--tokenizer {tokenizer}: expected train:N with a number N, or a path")
    return int(size)


class _Claim(NamedTuple):
    """A line of the table: `value` (`unit`) against `target`, at least or at most."""

    what: str
    value: float | None
    unit: str = "x"
    target: float | None = None
    at_most: bool = False

    @property
    def verdict(self) -> str:
        if self.target is None or self.value is None:
            return ""
        held = self.value <= self.target if self.at_most else self.value >= self.target
        return "yes" if held else "no"

    @property
    def goal(self) -> str:
        sign = "at most" if self.at_most else "at least"
        return "" if self.target is None else f"{sign} {self.target:g} {self.unit}"


def claims(result: dict[str, Any]) -> list[_Claim]:
    """Each figure that is compared, with what it should be."""
    encoding, builds = result["encoding"], result["builds"]
    ratio = encoding["ratios"]
    beside = "encoding, one core: "
    return [
        _Claim(beside + "empty word cache / sp.encode", ratio["cold / sp.encode"], "x", 1.0),
        _Claim(beside + "new text, after as much of its kind", ratio["new text / sp.encode"]),
        _Claim(beside + "the same text again / sp.encode", ratio["warm / sp.encode"], "x", 2.0),
        _Claim(beside + "empty word cache / tokenizers", ratio.get("cold / tokenizers")),
        _Claim("build, CPU time: ours / datatrove", builds["ours / datatrove"], "x", 1.0),
        _Claim("build, clock: 2 workers / 1", builds["2 workers / 1"], "x", 1.8),
        _Claim("loader, CRC checked, one core", result["reading"]["loader"] / 1e6, "Mtok/s", 100.0),
        _Claim("loader / unchecked memmap", result["reading"]["loader / memmap"]),
        _Claim("opening 433 parts, 116B tokens", result["start"]["open_s"], "s", 0.1, True),
        _Claim("  and the first batch", result["start"]["first_batch_s"], "s"),
        _Claim("  memory of both", result["start"]["memory"] / 1e6, "MB", 20.0, True),
    ]


def print_result(result: dict[str, Any], console: Console) -> None:
    """Rates and ratios as tables."""
    text = f"{result['bytes'] / 1e6:.1f} MB in {result['documents']:,} documents"
    rates = Table("Mtok/s", "one core", title=f"{text}, {result['vocab_size']:,} pieces")
    for name, rate in result["encoding"]["rates"].items():
        rates.add_row(f"encoding: {name}", f"{rate / 1e6:.2f}")
    for name, build in result["builds"]["runs"].items():
        rates.add_row(f"text to shards: {name}", f"{build['tokens_per_cpu_s'] / 1e6:.2f}")
    rates.add_row("windows of 4096: loader", f"{result['reading']['loader'] / 1e6:.1f}")
    rates.add_row("windows of 4096: memmap, no check", f"{result['reading']['memmap'] / 1e6:.1f}")
    console.print(rates)
    ratios = Table("side by side", "", "goal", "held", title=f"{result['cpu']}, {result['time']}")
    for claim in claims(result):
        shown = "not measured" if claim.value is None else f"{claim.value:.3g} {claim.unit}"
        ratios.add_row(claim.what, shown, claim.goal, claim.verdict)
    console.print(ratios)
    for note in (*result["encoding"]["notes"], *result["builds"]["notes"]):
        console.print(note, soft_wrap=True)
