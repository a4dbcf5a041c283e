"""Benchmark of data preparation and reading, as ratios to other libraries on this machine.

Encoding and reading: CPU time of one process, in alternation with the reference. Builds:
subprocesses, by CPU time against datatrove (if installed), by wall clock with 2 workers against 1.
The text is that of the running Python's packages.
"""

import argparse
import hashlib
import importlib.util
import itertools
import json
import os
import platform
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import version
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import sentencepiece
import tokenizers

from canon_pretrain.core.cli import available_cores, positive
from canon_pretrain.core.errors import UserError
from canon_pretrain.core.files import read_json, write_json
from canon_pretrain.core.terminal import Console
from canon_pretrain.data.blocks import BLOCK_BYTES, block_crcs
from canon_pretrain.data.loader import BatchLoader
from canon_pretrain.data.shard_writer import write_manifest, write_shards
from canon_pretrain.data.shards import TokenShards, read_manifest, shard_name
from canon_pretrain.data.tokenizer import HF_FILE, Tokenizer
from canon_pretrain.hf.tokenizer_files import tokenizer_files
from data_prep.folder import TRAIN, log
from data_prep.planning import train_tokenizer
from tests.bench.tables import Columns, Target, make_console, print_table

TEXT_FILES = (".py", ".md", ".rst", ".txt")
ENCODED_BYTES = 12_000_000  # of the sample that is encoded and trains the tokenizer
FILE_BYTES = 2_000_000  # per input file: about an input group of the source `local`
SPLIT_TOKENS = 1 << 26
VOCAB_SIZE = 32_000
EOS_ID = 2
SEQ_LEN = 4096
BATCH = 8
BATCHES = 400
# FineWeb-Edu 100BT with Llama-2's tokenizer
SHARDS = 433
TOKENS = 116_000_000_000
DOCUMENTS_PER_SHARD = 224_000

TARGETS = {
    "encoding, empty word cache / sp.encode": Target((1.0,), True, "x"),
    "encoding, the same text again / sp.encode": Target((2.0,), True, "x"),
    "build, CPU time: ours / datatrove": Target((1.0,), True, "x"),
    "build, clock: 2 workers / 1": Target((1.8,), True, "x"),
    "loader, CRC checked, one core": Target((100.0,), True, "Mtok/s"),
    "opening all shards": Target((0.1,), unit="s"),
    "memory, with the first batch": Target((20.0,), unit="MB"),
}

DATATROVE = """
import sys
from pathlib import Path
from datatrove.executor import LocalPipelineExecutor
from datatrove.pipeline.readers import JsonlReader
from datatrove.pipeline.tokens import DocumentTokenizer
files, tokenizer, eos, _, out = sys.argv[1:]
writer = DocumentTokenizer(f"{out}/tokens", tokenizer, eos_token=eos, save_final_metadata=False,
                           shuffle_documents=False)
logs = f"{out}/logs"
LocalPipelineExecutor([JsonlReader(files), writer], tasks=1, workers=1, logging_dir=logs).run()
Path(out, "token_size").write_text(str(writer.token_size))
"""
Rows = list[dict[str, Any]]
"""Rows with `what`, `value` (None if not measured), `unit` and `target` as text."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    text = "maximum amount of text (default: %(default)s)"
    add("--megabytes", type=positive, default=96, metavar="N", help=text)
    times = "measurements of each (default: %(default)s)"
    add("--repeats", type=positive, default=3, metavar="N", help=times)
    add("--json", type=Path, metavar="FILE", help="also write the results to this file")


def run(arguments: argparse.Namespace) -> None:
    """Measure and print."""
    repeats = arguments.repeats
    texts = collect(arguments.megabytes * 1_000_000)
    num_bytes = sum(len(text.encode()) for text in texts)
    sample = texts[:: max(1, round(num_bytes / ENCODED_BYTES))]
    log(f"{len(texts):,} documents, {num_bytes / 1e6:.1f} MB")

    model = Tokenizer(train_tokenizer(sample, VOCAB_SIZE), f"train:{VOCAB_SIZE}")
    with tempfile.TemporaryDirectory(prefix="canon-data-bench-") as scratch:
        folder = Path(scratch)
        rows = measure_encoding(model, sample, repeats)
        rows += measure_builds(model, texts, folder / "builds", repeats)
        rows += measure_reading(folder / "reading", repeats)
        rows += measure_start(folder / "start", repeats)

    result = {
        "bench": "data_prep",
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "cpu": f"{platform.machine()}, {available_cores()} cores",
        "versions": {name: version(name) for name in ("sentencepiece", "tokenizers", "numpy")},
        "documents": len(texts),
        "bytes": num_bytes,
        "vocab_size": model.vocab_size,
        "rows": rows,
    }
    print_result(result, make_console())
    if arguments.json:
        write_json(arguments.json, result)


def row(what: str, value: float | None, unit: str) -> dict[str, Any]:
    """Return a row of the results; `value` is None if it was not measured."""
    target = ""
    if what in TARGETS and value is not None:
        target = TARGETS[what].verdict(value)
    return {"what": what, "value": value, "unit": unit, "target": target}


def collect(limit: int) -> list[str]:
    """Return text files of the stdlib, then of installed packages, up to `limit` bytes."""
    texts: list[str] = []
    for place in map(sysconfig.get_path, ("stdlib", "purelib")):
        for path in sorted(Path(place).rglob("*")):
            is_of_place = "site-packages" not in path.relative_to(place).parts
            if path.suffix not in TEXT_FILES or not is_of_place or not path.is_file():
                continue
            # packages' test files may be invalid UTF-8
            text = path.read_bytes().decode(errors="ignore")
            limit -= len(text.encode())
            if limit < 0 and len(texts) > 1:
                return texts
            if text:
                texts.append(text)
    return texts


def measure_encoding(model: Tokenizer, texts: list[str], repeats: int) -> Rows:
    """Return tokens per second of CPU time and their ratios, measured alternately."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one core
    processor = sentencepiece.SentencePieceProcessor(model_proto=model.model)
    plain = tokenizers.Tokenizer.from_str(as_tokenizer_json(model))
    plain.encode_special_tokens = True

    ours = ("empty word cache", "the same text again")
    others = ("sp.encode", "tokenizers")
    seconds: dict[str, list[float]] = {name: [] for name in (*ours, *others)}
    for _ in range(repeats):
        tokenizer = Tokenizer(model.model, "bench", eos=model.eos_id)
        encoders: dict[str, Callable[[list[str]], Iterable[Any]]] = {
            "empty word cache": partial(map, tokenizer.encode),
            "the same text again": partial(map, tokenizer.encode),
            "sp.encode": partial(map, processor.encode),
            "tokenizers": partial(plain.encode_batch_fast, add_special_tokens=False),
        }
        for name, encode in encoders.items():
            started = time.process_time()
            deque(encode(texts), maxlen=0)
            seconds[name].append(time.process_time() - started)

    num_tokens = sum(len(model.encode(text)) for text in texts)
    rows = []
    for name, measured in seconds.items():
        rate = num_tokens / statistics.median(measured) / 1e6
        rows.append(row(f"encoding, {name}", rate, "Mtok/s"))
    for name, other in itertools.product(ours, others):
        pairs = zip(seconds[name], seconds[other], strict=True)
        ratio = statistics.median(other_s / our_s for our_s, other_s in pairs)
        rows.append(row(f"encoding, {name} / {other}", ratio, "x"))
    return rows


def as_tokenizer_json(model: Tokenizer) -> str:
    """Return `model` as a tokenizer.json with the same ids."""
    return json.dumps(tokenizer_files(model, SEQ_LEN)[HF_FILE], ensure_ascii=False)


def measure_builds(model: Tokenizer, texts: Sequence[str], folder: Path, repeats: int) -> Rows:
    """Build the same JSONL files alternately; return rates of CPU time, and ratios.

    Times are minima and include process startup. datatrove runs one task without shuffling.
    """
    files = folder / "files"
    files.mkdir(parents=True)
    texts_per_file = max(1, len(texts) * FILE_BYTES // sum(map(len, texts)))
    for start in range(0, len(texts), texts_per_file):
        part = texts[start : start + texts_per_file]
        lines = (json.dumps({"text": text}) + "\n" for text in part)
        (files / f"{start:08d}.jsonl").write_text("".join(lines))
    tokenizer = folder / model.file_name
    tokenizer.write_bytes(model.model)

    build = [
        *("-m", "data_prep", "build", "--source", "local", "--files", str(files)),
        *("--holdout", "0", "--tokenizer", str(tokenizer), "--workers"),
    ]
    commands = {"ours, 1 worker": [*build, "1"], "ours, 2 workers": [*build, "2"]}
    if importlib.util.find_spec("datatrove"):
        path = folder / "datatrove.json"
        path.write_text(as_tokenizer_json(model), encoding="utf-8")
        commands["datatrove, 1 task"] = ["-c", DATATROVE, str(files), str(path), model.eos_token]

    clock_s = dict.fromkeys(commands, float("inf"))
    cpu_s = dict.fromkeys(commands, float("inf"))
    tokens: dict[str, int] = {}
    for turn in range(repeats):
        for number, (name, command) in enumerate(commands.items()):
            out = folder / f"out-{turn}-{number}"
            before = os.times()
            run_build(name, [*command, "--out", str(out)])
            after = os.times()

            children_s = after.children_user + after.children_system
            children_s -= before.children_user + before.children_system
            cpu_s[name] = min(cpu_s[name], children_s)
            clock_s[name] = min(clock_s[name], after.elapsed - before.elapsed)
            tokens[name] = count_tokens(out)

    rows = []
    for name in commands:
        rate = tokens[name] / cpu_s[name] / 1e6
        rows.append(row(f"text to shards: {name}", rate, "Mtok/s"))
    ratio = None
    if "datatrove, 1 task" in commands:
        ratio = cpu_s["datatrove, 1 task"] / cpu_s["ours, 1 worker"]
    rows.append(row("build, CPU time: ours / datatrove", ratio, "x"))
    ratio = clock_s["ours, 1 worker"] / clock_s["ours, 2 workers"]
    rows.append(row("build, clock: 2 workers / 1", ratio, "x"))
    return rows


def run_build(name: str, command: Sequence[str]) -> None:
    """Run a build by this Python. Raises UserError."""
    done = subprocess.run(
        [sys.executable, *command],
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
    )
    if done.returncode:
        raise UserError("bench.failed", f"{name} failed: {done.stderr[-2000:]}", name=name)


def count_tokens(out: Path) -> int:
    """Return the tokens that a build wrote: ours by manifest, datatrove's by file size."""
    if (out / TRAIN).exists():
        return read_manifest(out / TRAIN).num_tokens
    width = int((out / "token_size").read_text())
    return sum(path.stat().st_size for path in out.glob("tokens/*.ds")) // width


def measure_reading(
    folder: Path, repeats: int, *, tokens: int = SPLIT_TOKENS, batches: int = BATCHES
) -> Rows:
    """Return the loader's median tokens per second of CPU time, with all checks."""
    rng = np.random.default_rng(0)
    documents = [rng.integers(3, VOCAB_SIZE, size=1 << 16) for _ in range(tokens >> 16)]
    write_shards(folder, documents, vocab_size=VOCAB_SIZE, eos_id=EOS_ID)
    rates = []
    with TokenShards.open(folder) as shards:
        loader = _loader(shards)
        for _ in range(repeats):
            started = time.process_time()
            for _ in range(batches):
                loader.next_batch()
            rates.append(batches * BATCH * SEQ_LEN / (time.process_time() - started))
    return [row("loader, CRC checked, one core", statistics.median(rates) / 1e6, "Mtok/s")]


def _loader(shards: TokenShards) -> BatchLoader:
    return BatchLoader(
        shards, data_seed=0, seq_len=SEQ_LEN, global_batch_size=BATCH, local_batch_size=BATCH
    )


def measure_start(
    folder: Path, repeats: int, *, shards: int = SHARDS, tokens: int = TOKENS
) -> Rows:
    """Return the minimum time and memory of new processes to open a split and read a batch."""
    write_sparse(folder, shards, tokens)
    with ProcessPoolExecutor(1, get_context("spawn"), max_tasks_per_child=1) as pool:
        runs = list(pool.map(time_opening, [folder] * repeats))
    open_s, memory = (min(values) for values in zip(*runs, strict=True))
    return [
        row("opening all shards", open_s, "s"),
        row("memory, with the first batch", memory / 1e6, "MB"),
    ]


def time_opening(folder: Path) -> tuple[float, int]:
    """Return the seconds and bytes that opening a split costs this new process."""

    def memory() -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return 1024 * int(next(line.split()[1] for line in lines if "VmHWM" in line))

    memory_before = memory()
    started = time.perf_counter()
    with TokenShards.open(folder) as shards:
        open_s = time.perf_counter() - started
        _loader(shards).next_batch()
    return open_s, memory() - memory_before


def write_sparse(folder: Path, shards: int, tokens: int) -> None:
    """Write a split of `tokens` zeros in equal sparse shards, with correct CRCs."""
    shard_tokens = tokens // shards
    whole_blocks, rest = divmod(2 * shard_tokens, BLOCK_BYTES)
    crcs = [np.repeat(block_crcs(bytes(BLOCK_BYTES)), whole_blocks), block_crcs(bytes(rest))]
    crc = np.concatenate(crcs).astype("<u4").tobytes()

    # The record of a real shard, with the sizes of these.
    write_shards(folder, [np.array([EOS_ID])], vocab_size=VOCAB_SIZE, eos_id=EOS_ID)
    record = read_json(folder / f"{shard_name(0, 0)}.json")
    sizes = {"bin": 2 * shard_tokens, "docs": 16 * DOCUMENTS_PER_SHARD, "crc": len(crc)}
    files = {name: {"size": size, "sha256": "0" * 64} for name, size in sizes.items()}
    files["crc"]["sha256"] = hashlib.sha256(crc).hexdigest()
    record |= {
        "tokens": shard_tokens,
        "documents": DOCUMENTS_PER_SHARD,
        "text_bytes": 4 * shard_tokens,
        "max_id": 0,
        "rows": [0, DOCUMENTS_PER_SHARD],
        "files": files,
        "groups": {f"CC-MAIN-2024-{week:03d}": [1, 1, 1] for week in range(108)},
    }

    for group in range(shards):
        stem = folder / shard_name(group, 0)
        stem.with_suffix(".crc").write_bytes(crc)
        for suffix in ("bin", "docs"):
            with open(stem.with_suffix(f".{suffix}"), "wb") as file:
                file.truncate(sizes[suffix])
        inputs = {f"sample/100BT/{group:03d}_00000.parquet": "0" * 64}
        write_json(stem.with_suffix(".json"), record | {"unit": group, "inputs": inputs})
    write_manifest(folder, shards, vocab_size=VOCAB_SIZE, eos_id=EOS_ID)


def print_result(result: dict[str, Any], console: Console) -> None:
    """Print the rows, and whether they meet their targets."""
    columns: Columns = {
        "measured": lambda row: row["what"],
        "": lambda row: f"{row['value']:.3g} {row['unit']}" if row["value"] else "not measured",
        "target": lambda row: row["target"],
    }
    line = (
        f"{result['bytes'] / 1e6:.1f} MB in {result['documents']:,} documents, "
        f"vocab_size {result['vocab_size']:,}; {SHARDS} shards of {TOKENS / 1e9:.0f}B tokens; "
        f"{result['cpu']}, {result['time']}"
    )
    print_table(console, result["rows"], columns, line)
