"""What data preparation and reading cost on this machine, beside what else there is, as ratios.

Encoding and reading are counted in CPU time of one process; they take turns with what they are
compared with. Whole builds are processes, compared by CPU time with datatrove (where it is
installed) and by the clock with themselves at two workers. The text is the library and the
installed packages of the running Python.
"""

import argparse
import contextlib
import hashlib
import importlib.util
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import sentencepiece
import tokenizers
from rich.table import Table

from canon_pretrain.core.cli import available_cores
from canon_pretrain.core.errors import UserError
from canon_pretrain.core.files import write_json
from canon_pretrain.core.terminal import Console
from canon_pretrain.data.blocks import BLOCK_BYTES, FileFacts, PartFiles, block_crcs
from canon_pretrain.data.loader import BatchLoader
from canon_pretrain.data.shard_writer import write_manifest, write_shards
from canon_pretrain.data.shards import (
    FORMAT,
    VERSION,
    CommitMark,
    TokenShards,
    part_name,
    read_manifest,
)
from canon_pretrain.data.tokenizer import HF_FILE, Tokenizer
from canon_pretrain.hf.tokenizer_files import tokenizer_files
from data_prep.folder import TRAIN, say
from data_prep.settle import TokenizerRequest, train_tokenizer

TEXT_FILES = (".py", ".md", ".rst", ".txt")
ENCODED_BYTES = 12_000_000
"""The part of the text that is encoded again and again, and that a tokenizer is trained on."""
FILE_BYTES = 2_000_000
"""Of an input file: `local` makes a unit of about as many, so that workers have enough of them."""
VOCAB_SIZE, EOS_ID = 32_000, 2
SEQ_LEN, BATCH, BATCHES = 4096, 8, 400
SPLIT_TOKENS = 1 << 26
# FineWeb-Edu's 100B tokens in Llama-2's pieces
PARTS, TOKENS, DOCUMENTS_A_PART = 433, 116_000_000_000, 224_000

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
START = """
import json, sys, time
from pathlib import Path
from data_prep.bench import open_once
print(json.dumps(open_once(Path(sys.argv[1]))))
"""

Encode = Callable[[list[str]], Any]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    about = "a SentencePiece model, or one trained on the text (default: %(default)s)"
    add("--tokenizer", default="train:32000", metavar="train:N|PATH", help=about)
    add("--megabytes", type=float, default=96.0, help="text at most (default: %(default)g)")
    add("--repeats", type=int, default=3, help="how often each is measured (default: %(default)s)")
    add("--json", type=Path, metavar="FILE", help="write the figures to this file too")


def run(arguments: argparse.Namespace) -> None:
    """Measure and print. Raises UserError."""
    repeats, megabytes = arguments.repeats, arguments.megabytes
    if repeats < 1 or megabytes <= 0:
        raise UserError(
            f"--repeats {repeats} --megabytes {megabytes:g}: expected at least 1, and more than 0"
        )
    request = TokenizerRequest.parse(arguments.tokenizer, None)
    texts = collect(int(megabytes * 1e6))
    num_bytes = sum(len(text.encode()) for text in texts)
    sample = texts[:: max(1, round(num_bytes / ENCODED_BYTES))]
    model = request.given or Tokenizer(train_tokenizer(sample, request.vocab_size), request.name)
    say(f"{len(texts):,} documents, {num_bytes / 1e6:.1f} MB; {model.method}")
    with tempfile.TemporaryDirectory(prefix="canon-data-bench-") as scratch:
        folder = Path(scratch)
        result = {
            "bench": "data_prep",
            "time": datetime.now(UTC).isoformat(timespec="seconds"),
            "cpu": f"{platform.machine()}, {available_cores()} cores",
            "versions": {name: version(name) for name in ("sentencepiece", "tokenizers", "numpy")},
            "documents": len(texts),
            "bytes": num_bytes,
            "vocab_size": model.vocab_size,
            "method": model.method,
            "encoding": measure_encoding(model, sample, repeats),
            "builds": measure_builds(model, texts, folder / "builds", repeats),
            "loader": measure_reading(folder / "reading", repeats),
            "start": measure_start(folder / "start", repeats),
        }
    print_result(result, Console())
    if arguments.json:
        write_json(arguments.json, result)


def collect(limit: int) -> list[str]:
    """Return text files of the library, then of the installed packages, up to `limit` bytes."""
    texts: list[str] = []
    for place in ("stdlib", "purelib"):
        for folder, names, found in os.walk(sysconfig.get_path(place)):
            names[:] = sorted(name for name in names if name != "site-packages")
            for name in sorted(name for name in found if name.endswith(TEXT_FILES)):
                # a package's test may be no UTF-8: any other text serves as well
                with contextlib.suppress(OSError, UnicodeDecodeError):
                    content = Path(folder, name).read_bytes()
                    limit -= len(content)
                    if limit < 0 and len(texts) > 1:
                        return texts
                    if content:
                        texts.append(content.decode())
    return texts


# ---- encoding


def measure_encoding(model: Tokenizer, texts: list[str], repeats: int) -> dict[str, Any]:
    """Return tokens per second of CPU time: medians over `repeats`, in which all take turns.

    A tokenizer.json has no sp.encode beside it, and a model that cannot be written as one no
    tokenizers.
    """
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one core
    others: dict[str, Encode] = {}
    if model.file_name != HF_FILE:
        processor = sentencepiece.SentencePieceProcessor(model_proto=model.model)
        others["sp.encode"] = _one_by_one(processor.encode)
    if content := as_tokenizer_json(model):
        plain = tokenizers.Tokenizer.from_str(content)
        plain.encode_special_tokens = True
        others["tokenizers"] = lambda b: plain.encode_batch_fast(b, add_special_tokens=False)
    seconds: dict[str, list[float]] = {}
    for _ in range(repeats):
        ours = Tokenizer(model.model, "bench", eos=model.eos_id)
        own = _one_by_one(ours.encode)
        for name, encode in {"cold": own, "warm": own, **others}.items():
            started = time.process_time()
            encode(texts)
            seconds.setdefault(name, []).append(time.process_time() - started)
    tokens = sum(len(model.encode(text)) for text in texts)

    def ratio(name: str, other: str) -> float:
        pairs = zip(seconds[name], seconds[other], strict=True)
        return statistics.median(theirs / ours for ours, theirs in pairs)

    return {
        "tokens": tokens,
        "rates": {name: tokens / statistics.median(taken) for name, taken in seconds.items()},
        "ratios": {f"{n} / {other}": ratio(n, other) for n in ("cold", "warm") for other in others},
    }


def _one_by_one(encode: Callable[[str], Any]) -> Encode:
    return lambda texts: [encode(text) for text in texts]


def as_tokenizer_json(model: Tokenizer) -> str:
    """Return the model as a tokenizer.json with the same ids; "" if there is none."""
    if model.file_name == HF_FILE:
        return model.model.decode()
    try:
        return json.dumps(tokenizer_files(model, SEQ_LEN)[HF_FILE], ensure_ascii=False)
    except UserError:
        return ""


# ---- whole builds


def measure_builds(
    model: Tokenizer, texts: Sequence[str], folder: Path, repeats: int
) -> dict[str, Any]:
    """Build the same JSONL files in turns; return seconds by the clock and of CPU, and rates.

    The start of a process is included. datatrove runs in one task, without its shuffling, and is
    left out if it is not installed or has no tokenizer.json.
    """
    files = folder / "files"
    files.mkdir(parents=True)
    every = max(1, len(texts) * FILE_BYTES // sum(map(len, texts)))
    for start in range(0, len(texts), every):
        rows = (json.dumps({"text": text}) + "\n" for text in texts[start : start + every])
        (files / f"{start:08d}.jsonl").write_text("".join(rows))
    (folder / model.file_name).write_bytes(model.model)
    build = ["-m", "data_prep", "build", "--source", "local", "--files", str(files), "--holdout"]
    build += ["0", "--tokenizer", str(folder / model.file_name), "--workers"]
    commands = {"ours, 1 worker": [*build, "1"], "ours, 2 workers": [*build, "2"]}
    content = as_tokenizer_json(model)
    if content and importlib.util.find_spec("datatrove"):
        path = folder / "datatrove.json"
        path.write_text(content, encoding="utf-8")
        commands["datatrove, 1 task"] = ["-c", DATATROVE, str(files), str(path), model.eos_token]
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in commands}
    for turn in range(repeats):
        for number, (name, command) in enumerate(commands.items()):
            out = folder / f"out-{turn}-{number}"
            before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
            run_python(*command, "--out", str(out))
            clock_s = time.perf_counter() - started
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            cpu_s = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
            runs[name].append({"clock_s": clock_s, "cpu_s": cpu_s, "tokens": _tokens(out)})
    # the least: of the run that whatever else the machine does disturbed least
    least = {
        name: {unit: min(run[unit] for run in taken) for unit in taken[0]}
        for name, taken in runs.items()
    }
    for known in least.values():
        known["tokens_per_cpu_s"] = known["tokens"] / known["cpu_s"]
    one, two = least["ours, 1 worker"], least["ours, 2 workers"]
    theirs = least.get("datatrove, 1 task")
    return {
        "runs": least,
        "2 workers / 1": one["clock_s"] / two["clock_s"],
        "ours / datatrove": theirs["cpu_s"] / one["cpu_s"] if theirs else None,
    }


def run_python(*words: str) -> str:
    """Run Python with these arguments; returns its stdout. Raises UserError where it fails."""
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True)
    if done.returncode:
        shown = " ".join(word for word in words if "\n" not in word)
        raise UserError(f"bench: python {shown} failed:\n{done.stderr[-2000:]}")
    return done.stdout


def _tokens(out: Path) -> int:
    """How many tokens a build wrote: ours by its manifest, datatrove by its files' sizes."""
    if (out / TRAIN).exists():
        return read_manifest(out / TRAIN).num_tokens
    width = int((out / "token_size").read_text())
    return sum(path.stat().st_size for path in out.glob("tokens/*.ds")) // width


# ---- reading


def measure_reading(
    folder: Path, repeats: int, *, tokens: int = SPLIT_TOKENS, batches: int = BATCHES
) -> float:
    """Tokens per second of CPU time of the loader, all checks on: the median."""
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
    return statistics.median(rates)


def _loader(shards: TokenShards) -> BatchLoader:
    return BatchLoader(
        shards, data_seed=0, seq_len=SEQ_LEN, global_batch_size=BATCH, local_batch_size=BATCH
    )


def measure_start(
    folder: Path, repeats: int, *, parts: int = PARTS, tokens: int = TOKENS
) -> dict[str, float]:
    """Seconds and bytes to open a split of `parts` parts and `tokens` tokens and to read a batch.

    The least of `repeats` fresh processes: of the one that others disturbed least. The split's
    files are sparse: zeros that no disk holds, with their true CRCs.
    """
    write_sparse(folder, parts, tokens)
    runs = [json.loads(run_python("-c", START, str(folder))) for _ in range(repeats)]
    return {name: min(run[name] for run in runs) for name in runs[0]}


def open_once(folder: Path) -> dict[str, float]:
    """What opening a split costs this process, which has not done it before."""

    def memory() -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return 1024 * int(next(line.split()[1] for line in lines if "VmHWM" in line))

    before, started = memory(), time.perf_counter()
    with TokenShards.open(folder) as shards:
        open_s = time.perf_counter() - started
        _loader(shards).next_batch()
    return {"open_s": open_s, "memory": memory() - before}


def write_sparse(folder: Path, parts: int, tokens: int) -> None:
    """A split of `tokens` tokens, all 0, in `parts` parts of equal length."""
    folder.mkdir(parents=True)
    count = tokens // parts
    whole, rest = divmod(2 * count, BLOCK_BYTES)
    crcs = np.repeat(block_crcs(bytes(BLOCK_BYTES)), whole)
    crc = np.concatenate([crcs, block_crcs(bytes(rest))]).astype("<u4").tobytes()
    dumps = [f"CC-MAIN-{year}-{week:02d}" for year in range(2013, 2025) for week in range(0, 50, 6)]
    for unit in range(parts):
        stem = part_name(unit, 0)
        (folder / f"{stem}.crc").write_bytes(crc)
        mark = CommitMark(
            format=FORMAT,
            version=VERSION,
            unit=unit,
            part=0,
            last_in_unit=True,
            tokens=count,
            documents=DOCUMENTS_A_PART,
            text_bytes=4 * count,
            rows=(0, DOCUMENTS_A_PART),
            max_id=0,
            groups=dict.fromkeys(dumps, (1, 1, 1)),
            repaired={},
            skipped={},
            inputs={f"sample/100BT/{unit:03d}_00000.parquet": "0" * 64},
            plan_sha256="0" * 64,
            files=PartFiles(
                bin=FileFacts(2 * count, "0" * 64),
                docs=FileFacts(16 * DOCUMENTS_A_PART, "0" * 64),
                crc=FileFacts(len(crc), hashlib.sha256(crc).hexdigest()),
            ),
        )
        for suffix in ("bin", "docs"):
            with open(folder / f"{stem}.{suffix}", "wb") as file:
                file.truncate(getattr(mark.files, suffix).size)
        write_json(folder / f"{stem}.json", asdict(mark))
    write_manifest(folder, parts, vocab_size=VOCAB_SIZE, eos_id=EOS_ID)


# ---- what is shown


def claims(result: dict[str, Any]) -> list[tuple[str, float | None, str, float | None]]:
    """What is compared: its name, value and unit, and the goal: of x and Mtok/s at least."""
    ratio, builds = result["encoding"]["ratios"], result["builds"]
    return [
        ("encoding, empty word cache / sp.encode", ratio.get("cold / sp.encode"), "x", 1.0),
        ("encoding, the same text again / sp.encode", ratio.get("warm / sp.encode"), "x", 2.0),
        ("encoding, empty word cache / tokenizers", ratio.get("cold / tokenizers"), "x", None),
        ("build, CPU time: ours / datatrove", builds["ours / datatrove"], "x", 1.0),
        ("build, clock: 2 workers / 1", builds["2 workers / 1"], "x", 1.8),
        ("loader, CRC checked, one core", result["loader"] / 1e6, "Mtok/s", 100.0),
        ("opening 433 parts, 116B tokens", result["start"]["open_s"], "s", 0.1),
        ("  memory, with the first batch", result["start"]["memory"] / 1e6, "MB", 20.0),
    ]


def print_result(result: dict[str, Any], console: Console) -> None:
    text = f"{result['bytes'] / 1e6:.1f} MB in {result['documents']:,} documents"
    rates = Table("Mtok/s", "one core", title=f"{text}, {result['vocab_size']:,} pieces")
    for name, rate in result["encoding"]["rates"].items():
        rates.add_row(f"encoding: {name}", f"{rate / 1e6:.2f}")
    for name, build in result["builds"]["runs"].items():
        rates.add_row(f"text to shards: {name}", f"{build['tokens_per_cpu_s'] / 1e6:.2f}")
    ratios = Table("side by side", "", "goal", "held", title=f"{result['cpu']}, {result['time']}")
    for what, value, unit, goal in claims(result):
        shown = "not measured" if value is None else f"{value:.3g} {unit}"
        aim = held = ""
        if value is not None and goal is not None:
            more = unit in ("x", "Mtok/s")
            aim = f"at {'least' if more else 'most'} {goal:g} {unit}"
            held = "yes" if (value >= goal if more else value <= goal) else "no"
        ratios.add_row(what, shown, aim, held)
    console.print(rates, ratios)
