"""The loader: windows per second with every check on, and the cost of opening a large split.

python -m data_prep.bench_reading SPLIT     open SPLIT, read a batch, print seconds and memory
"""

import hashlib
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from canon_pretrain.core.errors import UserError
from canon_pretrain.core.files import write_json
from canon_pretrain.data.loader import BatchLoader
from canon_pretrain.data.sampler import window_offset
from canon_pretrain.data.shard_writer import write_shards
from canon_pretrain.data.shards import (
    BLOCK_BYTES,
    FORMAT,
    MANIFEST,
    VERSION,
    TokenShards,
    block_crcs,
    make_manifest,
    part_name,
)

VOCAB_SIZE = 32_000
EOS_ID = 2
SEQ_LEN = 4096
BATCH = 8
SPLIT_TOKENS = 1 << 26
BATCHES = 400
# FineWeb-Edu's 100B tokens in Llama-2's pieces.
PARTS = 433
TOKENS = 116_000_000_000
DOCUMENTS_A_PART = 224_000


def measure_reading(
    folder: Path, repeats: int, *, tokens: int = SPLIT_TOKENS, batches: int = BATCHES
) -> dict[str, float]:
    """Tokens per second of CPU time, of the loader and of the same windows of a plain memmap."""
    rng = np.random.default_rng(0)
    documents = [rng.integers(3, VOCAB_SIZE, size=1 << 16) for _ in range(tokens >> 16)]
    write_shards(folder, documents, vocab_size=VOCAB_SIZE, eos_id=EOS_ID)
    stream = np.memmap(folder / f"{part_name(0, 0)}.bin", dtype="<u2", mode="r")
    with TokenShards.open(folder) as shards:
        loader = _loader(shards)
        sample = 0

        def unchecked() -> np.ndarray:
            nonlocal sample
            batch = np.empty((BATCH, SEQ_LEN + 1), dtype=np.int64)
            for window in batch:
                at = window_offset(0, sample, len(stream), SEQ_LEN)
                window[:] = stream[at : at + SEQ_LEN + 1]
                sample += 1
            return batch

        if not np.array_equal(loader.next_batch(), unchecked()):
            raise AssertionError("the loader and the memmap read different windows")
        pairs = [
            (_rate(loader.next_batch, batches), _rate(unchecked, batches)) for _ in range(repeats)
        ]
    return {
        "loader": statistics.median(ours for ours, _ in pairs),
        "memmap": statistics.median(other for _, other in pairs),
        "loader / memmap": statistics.median(ours / other for ours, other in pairs),
    }


def measure_start(
    folder: Path, repeats: int, *, parts: int = PARTS, tokens: int = TOKENS
) -> dict[str, float]:
    """Seconds and bytes to open a split of `parts` parts and `tokens` tokens and to read a batch.

    The least of `repeats` fresh processes: of the one that others disturbed least. The split's
    files are sparse: zeros that no disk holds, with their true CRCs.
    """
    write_sparse(folder, parts, tokens)
    runs = [_start_once(folder) for _ in range(repeats)]
    return {name: min(run[name] for run in runs) for name in runs[0]}


def write_sparse(folder: Path, parts: int, tokens: int) -> None:
    """A split of `tokens` tokens, all 0, in `parts` parts of equal length."""
    folder.mkdir(parents=True)
    count = tokens // parts
    size, docs_size = 2 * count, 8 * DOCUMENTS_A_PART
    whole, rest = divmod(size, BLOCK_BYTES)
    crcs = np.repeat(block_crcs(bytes(BLOCK_BYTES)), whole)
    crc = np.concatenate([crcs, block_crcs(bytes(rest))]).astype("<u4").tobytes()
    marks = []
    for unit in range(parts):
        stem = folder / part_name(unit, 0)
        (folder / f"{stem.name}.crc").write_bytes(crc)
        for suffix, length in (("bin", size), ("docs", docs_size)):
            with open(folder / f"{stem.name}.{suffix}", "wb") as file:
                file.truncate(length)
        mark = {
            "format": FORMAT,
            "version": VERSION,
            "unit": unit,
            "part": 0,
            "last_in_unit": True,
            "tokens": count,
            "documents": DOCUMENTS_A_PART,
            "text_bytes": 4 * count,
            "rows": [0, DOCUMENTS_A_PART],
            "max_id": 0,
            "groups": {f"CC-MAIN-{year}-{week:02d}": [1, 1, 1] for year in range(2013, 2025)
                       for week in range(0, 50, 6)},
            "repaired": {},
            "skipped": {},
            "inputs": {f"sample/100BT/{unit:03d}_00000.parquet": "0" * 64},
            "plan_sha256": "0" * 64,
            "files": {
                "bin": {"size": size, "sha256": "0" * 64},
                "docs": {"size": docs_size, "sha256": "0" * 64},
                "crc": {"size": len(crc), "sha256": hashlib.sha256(crc).hexdigest()},
            },
        }  # fmt: skip
        write_json(folder / f"{stem.name}.json", mark)
        marks.append((stem.name, (folder / f"{stem.name}.json").read_bytes()))
    header: dict[str, Any] = {"vocab_size": VOCAB_SIZE, "eos_id": EOS_ID}
    header |= {"tokenizer_sha256": "0" * 64, "plan_sha256": "0" * 64}
    write_json(folder / MANIFEST, make_manifest(header, marks))


def _loader(shards: TokenShards) -> BatchLoader:
    return BatchLoader(
        shards, data_seed=0, seq_len=SEQ_LEN, global_batch_size=BATCH, local_batch_size=BATCH
    )


def _rate(next_batch: Callable[[], np.ndarray], batches: int) -> float:
    """Tokens per second of CPU time."""
    started = time.process_time()
    for _ in range(batches):
        next_batch()
    return batches * BATCH * SEQ_LEN / (time.process_time() - started)


def _start_once(folder: Path) -> dict[str, float]:
    command = [sys.executable, "-m", "data_prep.bench_reading", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise UserError(f"bench: opening {folder} failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout)


def _main(folder: Path) -> None:
    before, started = _memory(), time.perf_counter()
    with TokenShards.open(folder) as shards:
        loader = _loader(shards)
        opened = time.perf_counter()
        loader.next_batch()
        done = time.perf_counter()
        print(
            json.dumps(
                {
                    "open_s": opened - started,
                    "first_batch_s": done - opened,
                    "memory": _memory() - before,
                }
            )
        )


def _memory() -> int:
    """The most bytes of memory that this process has had."""
    peak = next(
        line for line in Path("/proc/self/status").read_text().splitlines() if "VmHWM" in line
    )
    return int(peak.split()[1]) * 1024


if __name__ == "__main__":
    _main(Path(sys.argv[1]))
