"""How many tokens a batch holds: found by trying, once for each model and kind of device.

`eval run` asks before its first suite. What is found is remembered in a file beside the results,
with what it was found for: later calls, on one rank or several, take the same batches. On a GPU the
number doubles until memory is full or nothing is gained.
On a CPU memory decides how many tokens a batch remembers, and a few passes, a second or two in all,
how many are read at once.
"""

import json
import os
import platform
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from canon_pretrain.core.errors import UserError
from canon_pretrain.core.files import UnreadableFile, parsing, read_json, write_atomic
from canon_pretrain.core.terminal import Console
from canon_pretrain.model.cache import Cache
from canon_pretrain.model.transformer import Transformer
from eval.model.lm import READ_TOKENS, CanonLM
from eval.model.score_plan import Pair, Planner, one_pass
from eval.model.scoring import score_batch

FILE = "batch_tokens.json"
VERSION = 1
LEAST, MOST = 512, 1 << 19
CPU_LEAST, CPU_MOST = 256, 8192
"""Of the tokens that a CPU reads at once."""
CPU_REMEMBERED = 32768
GAIN = 1.05
"""A doubling is worth it where it is as much faster."""
CPU_SECONDS = 1.0
"""No further trial begins on a CPU after this long."""
ROW_TOKENS = 1024
STEPS, STEPS_OF_AN_ANSWER = 4, 48
"""New tokens of a trial, and those that it stands for: a prompt of 1,000 tokens and an answer."""
SHARE_OF_MEMORY = 0.25
"""Of a CPU's free memory, for keys, values and logits."""


@dataclass(frozen=True)
class Budget:
    """The tokens that a batch remembers, and those that are read at once (None: as many)."""

    batch_tokens: int
    read_tokens: int | None = None


def batch_tokens_for(lm: CanonLM, folder: Path, console: Console) -> int:
    """The tokens of a batch for `lm`, and sets its read_tokens: remembered, or found by trying.

    In `folder`/batch_tokens.json. Rank 0 looks, and all ranks get the same. Raises UserError where
    the least does not fit in memory.
    """
    found = _remembered(lm, folder, console) if lm.ranks.rank == 0 else None
    budget: Budget = lm.ranks.broadcast(found)
    lm.read_tokens = budget.read_tokens
    return budget.batch_tokens


def _remembered(lm: CanonLM, folder: Path, console: Console) -> Budget:
    path = folder / FILE
    key = _key(lm.model, lm.max_length)
    entries = _read(path)
    for entry in entries:
        if entry["for"] == key:
            return Budget(**entry["found"])
    budget = find_budget(lm.model, lm.max_length)
    console.print(
        f"batches of {budget.batch_tokens:,} tokens, as found by trying; remembered in {path}",
        soft_wrap=True,
        highlight=False,
    )
    record = {"version": VERSION, "entries": [*entries, {"for": key, "found": asdict(budget)}]}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_atomic(path, (json.dumps(record, indent=1) + "\n").encode())
    except OSError as error:
        console.print(f"{path} can't be written ({error.strerror}): found anew next time")
    return budget


def _read(path: Path) -> list[dict[str, Any]]:
    """The entries of a file; none where it is missing, damaged or of another version."""
    try:
        record = read_json(path)
        with parsing(path):
            entries = record["entries"] if record["version"] == VERSION else []
            return [entry for entry in entries if _is_whole(entry["for"], entry["found"])]
    except UnreadableFile:
        return []


def _is_whole(key: Any, found: dict[str, Any]) -> bool:
    values = [found["batch_tokens"], found["read_tokens"] or 1]
    numbers = all(type(value) is int and value >= 1 for value in values)
    return isinstance(key, dict) and numbers and len(found) == 2


def _key(model: Transformer, max_length: int) -> dict[str, Any]:
    """What the number depends on; JSON values."""
    weight = model.tok_embeddings.weight
    device = {"name": platform.processor() or platform.machine()}
    if weight.device.type == "cuda":
        properties = torch.cuda.get_device_properties(weight.device)
        device = {"name": properties.name, "bytes": str(properties.total_memory)}
    else:  # not its threads: one rank and several take the same batches, and so answer alike
        device |= {"cores": str(os.cpu_count())}
    args = asdict(model.args) | {"max_seq_len": 0, "init_seed": 0}
    return {
        "device": device,
        "model": args,
        "dtype": str(weight.dtype).removeprefix("torch."),
        "max_length": max_length,
        "torch": torch.__version__,
    }


def find_budget(model: Transformer, max_length: int) -> Budget:
    """What suits `model` on its device, see the module.

    Raises UserError where LEAST tokens do not fit in memory.
    """
    device = model.tok_embeddings.weight.device
    if device.type == "cpu":
        fits = max(LEAST, min(CPU_REMEMBERED, _cpu_tokens(model)))
        return Budget(fits, fastest(lambda tokens: _reading(model, tokens, max_length)))

    def trial(tokens: int) -> float:
        return _reading(model, tokens, max_length) + _writing(model, tokens, max_length)

    _tried(trial, LEAST)  # kernels are compiled and loaded the first time
    return Budget(largest(trial))


def largest(trial: Callable[[int], float], least: int = LEAST, most: int = MOST) -> int:
    """The first of `least`, twice that, .. whose double is not faster by GAIN, or does not fit.

    `trial(n)` gives the seconds that n tokens take. Raises UserError where `least` does not fit.
    """
    tokens, seconds = least, _tried(trial, least)
    if seconds is None:
        raise UserError(
            f"a batch of {least} tokens does not fit in the device's memory: lower --max_length, "
            "take --dtype bfloat16, or a device with more memory"
        )
    while 2 * tokens <= most:
        doubled = _tried(trial, 2 * tokens)
        if doubled is None or 2 * seconds < GAIN * doubled:
            break
        tokens, seconds = 2 * tokens, doubled
    return tokens


def fastest(
    trial: Callable[[int], float],
    seconds: float = CPU_SECONDS,
    least: int = CPU_LEAST,
    most: int = CPU_MOST,
) -> int:
    """The fastest of `least`, twice that, .. up to the first that is slower.

    No trial begins after so many seconds of them; where that leaves open what is fastest, it is the
    number that was so on the machine of READ_TOKENS, if that was not tried.
    """
    speeds: dict[int, float] = {}
    tokens, spent = least, 0.0
    while tokens <= most and spent < seconds:
        took = trial(tokens)
        spent += took
        speeds[tokens] = tokens / took
        if speeds[tokens] < max(speeds.values()):
            break
        tokens *= 2
    best = max(speeds, key=lambda tokens: speeds[tokens])
    is_open = best == max(speeds) and best < most
    return max(best, READ_TOKENS["cpu"]) if is_open else best


def _tried(trial: Callable[[int], float], tokens: int) -> float | None:
    """The seconds of a trial; None where it ran out of memory."""
    try:
        return trial(tokens)
    except torch.OutOfMemoryError:
        pass  # outside of this block: the error holds on to the frames and their tensors
    torch.cuda.empty_cache()
    return None


@torch.inference_mode()
def _reading(model: Transformer, tokens: int, max_length: int) -> float:
    """The seconds of a pass over so many tokens, each of which is scored."""
    rows = _rows(model, tokens, max_length)
    pairs = [Pair(row, len(row) - 1) for row in rows]
    device = model.tok_embeddings.weight.device
    started = _now(device)
    score_batch(model, Planner(tokens, tokens), pairs, one_pass(pairs))
    return _now(device) - started


@torch.inference_mode()
def _writing(model: Transformer, tokens: int, max_length: int) -> float:
    """The seconds of answers to prompts of so many tokens, without reading those."""
    device = model.tok_embeddings.weight.device
    prompts = torch.tensor(_rows(model, tokens, max_length), device=device)[:, :-1]
    cache = Cache(model.args.num_layers, capacity=prompts.shape[1] + STEPS)
    model(prompts, cache=cache, logits_to_keep=1)
    started = _now(device)
    for _ in range(STEPS):
        model(prompts[:, :1], cache=cache)
    return (_now(device) - started) * STEPS_OF_AN_ANSWER / STEPS


def _rows(model: Transformer, tokens: int, max_length: int) -> list[list[int]]:
    """Random rows that add up to `tokens`, and one more each."""
    length = min(ROW_TOKENS, max(1, max_length - STEPS), tokens)
    shape = (max(1, tokens // length), length + 1)
    generator = torch.Generator().manual_seed(0)
    return torch.randint(model.args.vocab_size, shape, generator=generator).tolist()


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.monotonic()


def _cpu_tokens(model: Transformer) -> int:
    """How many tokens' keys, values and logits take SHARE_OF_MEMORY of what is free."""
    args = model.args
    numbers = 2 * args.num_layers * args.kv_heads * args.head_dim + 2 * args.vocab_size
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return int(SHARE_OF_MEMORY * free / (numbers * model.tok_embeddings.weight.element_size()))
