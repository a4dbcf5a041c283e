"""Whole builds, text files to shards, each a process of its own: ours and datatrove's."""

import importlib.util
import json
import resource
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from canon_pretrain.core.errors import UserError
from canon_pretrain.data.shards import MANIFEST
from canon_pretrain.data.tokenizer import HF_FILE, Tokenizer
from data_prep.bench_encode import as_tokenizer_json

FILE_BYTES = 2_000_000
"""Of an input file: `local` makes a unit of about as many, so that workers have enough of them."""
WORKERS = (1, 2)


def measure_builds(
    model: Tokenizer, texts: Sequence[str], folder: Path, repeats: int
) -> dict[str, Any]:
    """Builds of the same JSONL files that take turns: seconds by the clock and of CPU, rates.

    Rates and ratios include the start of a process, as a user has it. datatrove runs in one task,
    without its shuffling, and is left out where it is not installed or has no tokenizer.json.
    """
    folder.mkdir(parents=True)
    files = folder / "files"
    _write_files(files, texts)
    (folder / model.file_name).write_bytes(model.model)
    commands = {
        f"ours, {workers} worker{'s'[: workers - 1]}": [
            *("-m", "data_prep", "build", "--source", "local", "--files", str(files)),
            *("--tokenizer", str(folder / model.file_name)),
            *("--holdout", "0", "--workers", str(workers)),
        ]
        for workers in WORKERS
    }
    notes = []
    found, why = _datatrove(model, folder, files)
    if found:
        commands["datatrove, 1 task"] = found
    else:
        notes.append(f"datatrove: not measured, {why}")
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in commands}
    for turn in range(repeats):
        for number, (name, command) in enumerate(commands.items()):
            out = folder / f"out-{turn}-{number}"
            runs[name].append(_run([*command, "--out", str(out)]))
            tokens = _tokens(out)
            runs[name][-1]["tokens"] = tokens
    return _summary(runs, notes)


def _summary(runs: dict[str, list[dict[str, float]]], notes: list[str]) -> dict[str, Any]:
    one, two = list(runs)[:2]
    counts = {name: int(taken[0]["tokens"]) for name, taken in runs.items()}
    for name, tokens in counts.items():
        if tokens != counts[one]:
            notes.append(
                f"{name}: {tokens:,} tokens, ours {counts[one]:,}; datatrove matches special "
                f"tokens that a text only names"
            )
    theirs = next((name for name in runs if name.startswith("datatrove")), None)

    def least(name: str, unit: str) -> float:
        """Of the run that whatever else the machine does disturbed least."""
        return min(run[unit] for run in runs[name])

    return {
        "runs": {
            name: {
                "clock_s": least(name, "clock_s"),
                "cpu_s": least(name, "cpu_s"),
                "tokens": counts[name],
                "tokens_per_cpu_s": counts[name] / least(name, "cpu_s"),
            }
            for name in runs
        },
        "2 workers / 1": least(one, "clock_s") / least(two, "clock_s"),
        "ours / datatrove": least(theirs, "cpu_s") / least(one, "cpu_s") if theirs else None,
        "notes": notes,
    }


def _write_files(folder: Path, texts: Sequence[str]) -> None:
    folder.mkdir()
    lines: list[str] = []
    count = size = 0
    for text in (*texts, None):
        if lines and (text is None or size >= FILE_BYTES):
            (folder / f"{count:05d}.jsonl").write_text("".join(lines), encoding="utf-8")
            lines, size, count = [], 0, count + 1
        if text is not None:
            lines.append(json.dumps({"text": text}, ensure_ascii=False) + "\n")
            size += len(lines[-1])


def _datatrove(model: Tokenizer, folder: Path, files: Path) -> tuple[list[str] | None, str]:
    """The arguments of datatrove's run, or why there is none."""
    if importlib.util.find_spec("datatrove") is None:
        return None, "it is not installed"
    is_json = model.file_name == HF_FILE
    content = model.model.decode() if is_json else as_tokenizer_json(model.model)
    if content is None:
        return None, "it reads a tokenizer.json, which this model cannot be written as"
    path = folder / "datatrove.json"
    path.write_text(content, encoding="utf-8")
    found = ["-m", "data_prep.bench_datatrove", "--files", str(files), "--tokenizer", str(path)]
    return [*found, "--eos", model.eos_token], ""


def _run(command: list[str]) -> dict[str, float]:
    """Run Python with `command`: its seconds by the clock and, with its children, of CPU."""
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True)
    clock_s = time.perf_counter() - started
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        raise UserError(f"bench: {' '.join(command[:4])} failed:\n{done.stderr[-2000:]}")
    cpu_s = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
    return {"clock_s": clock_s, "cpu_s": cpu_s}


def _tokens(out: Path) -> int:
    """How many tokens a build wrote: ours by its manifest, datatrove by its files' sizes."""
    manifest = out / "train" / MANIFEST
    if manifest.exists():
        return int(json.loads(manifest.read_bytes())["num_tokens"])
    width = int((out / "token_size").read_text())
    return sum(path.stat().st_size for path in out.glob("tokens/*.ds")) // width
