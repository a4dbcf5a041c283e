"""How many tokens a batch holds: found by trying, once per model and kind of device.

It is remembered beside the results: later calls, on one rank or several, take the same batches. On
a GPU the number doubles until memory is full or nothing is gained; on a CPU memory bounds the cache
and a few passes find how many tokens are read at once.
"""

import os
import platform
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import Field

from canon_pretrain.core.errors import UserError
from canon_pretrain.core.files import UnreadableFile, read_record, write_json
from canon_pretrain.model.cache import Cache
from canon_pretrain.model.transformer import Transformer
from eval.model.lm import READ_TOKENS, CanonLM
from eval.model.ranks import unless_out_of_memory
from eval.model.score import Pair, Planner, one_pass, score_batch

FILE = "batch_tokens.json"
VERSION: Literal[2] = 2
LEAST, MOST = 512, 1 << 19
CPU_LEAST, CPU_MOST = 256, 8192
"""Of the tokens that a CPU reads at once."""
CPU_CACHED = 32768
GAIN = 1.05
"""A doubling is worth it if it is as much faster."""
CPU_SECONDS = 1.0
"""No further trial begins on a CPU after this long."""
ROW_TOKENS = 1024
STEPS, STEPS_OF_AN_ANSWER = 4, 48
"""New tokens of a trial, and those that it stands for: a prompt of 1,000 tokens and an answer."""
SHARE_OF_MEMORY = 0.25
"""Of a CPU's free memory, for keys, values and logits."""

Count = Annotated[int, Field(ge=1)]


@dataclass(frozen=True)
class Budget:
    """The tokens that a batch keeps in its cache, and those read at once (None: as many)."""

    batch_tokens: Count
    read_tokens: Count | None


@dataclass(frozen=True)
class Entry:
    """A budget, and the device, model and length that it was found for (`_key`)."""

    key: dict[str, Any]
    found: Budget


@dataclass(frozen=True)
class Entries:
    """The content of FILE."""

    version: Literal[2]
    entries: list[Entry]


def batch_tokens_for(lm: CanonLM, folder: Path, say: Callable[[str], None]) -> int:
    """Return the tokens of a batch for `lm`, and set its read_tokens; equal on all ranks.

    Remembered in `folder`, or found by rank 0. Raises UserError if the least does not fit in
    memory.
    """
    found = _remembered(lm, folder, say) if lm.ranks.rank == 0 else None
    budget: Budget = lm.ranks.broadcast(found)
    lm.read_tokens = budget.read_tokens
    return budget.batch_tokens


def _remembered(lm: CanonLM, folder: Path, say: Callable[[str], None]) -> Budget:
    path, key = folder / FILE, _key(lm.model, lm.max_length)
    try:
        entries = read_record(path, Entries).entries
    except UnreadableFile:  # missing, damaged or of another version
        entries = []
    for entry in entries:
        if entry.key == key:
            return entry.found
    budget = find_budget(lm.model, lm.max_length)
    say(f"batches of {budget.batch_tokens:,} tokens, as found by trying; remembered in {path}")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_json(path, asdict(Entries(VERSION, [*entries, Entry(key, budget)])))
    except OSError as error:
        say(f"{path} can't be written ({error.strerror}): found again next time")
    return budget


def _key(model: Transformer, max_length: int) -> dict[str, Any]:
    """Return what the budget depends on, as JSON values."""
    weight = model.tok_embeddings.weight
    device = {"name": platform.processor() or platform.machine()}
    if weight.device.type == "cuda":
        properties = torch.cuda.get_device_properties(weight.device)
        device = {"name": properties.name, "bytes": str(properties.total_memory)}
    else:  # not its threads: one rank and several take the same batches, and so answer alike
        device |= {"cores": str(os.cpu_count())}
    return {
        "device": device,
        "model": asdict(model.args) | {"max_seq_len": 0, "init_seed": 0},
        "dtype": str(weight.dtype).removeprefix("torch."),
        "max_length": max_length,
        "torch": torch.__version__,
    }


def find_budget(model: Transformer, max_length: int) -> Budget:
    """Find what suits `model` on its device; raises UserError if LEAST tokens do not fit."""
    weight = model.tok_embeddings.weight
    if weight.device.type == "cpu":
        args = model.args
        numbers = 2 * args.num_layers * args.kv_heads * args.head_dim + 2 * args.vocab_size
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        fit = int(SHARE_OF_MEMORY * free / (numbers * weight.element_size()))
        read_tokens = fastest(lambda tokens: _reading(model, tokens, max_length))
        return Budget(max(LEAST, min(CPU_CACHED, fit)), read_tokens)

    def trial(tokens: int) -> float | None:
        return unless_out_of_memory(
            lambda: _reading(model, tokens, max_length) + _writing(model, tokens, max_length)
        )

    trial(LEAST)  # kernels are compiled and loaded the first time
    return Budget(largest(trial), None)


def largest(trial: Callable[[int], float | None], least: int = LEAST, most: int = MOST) -> int:
    """Return the first of `least`, twice that, .. whose double is not faster by GAIN or fails.

    `trial(n)` returns the seconds of n tokens, None if they do not fit; UserError if `least` does
    not.
    """
    tokens, seconds = least, trial(least)
    if seconds is None:
        raise UserError(
            f"a batch of {least} tokens does not fit in the device's memory: lower --max_length, "
            "take --dtype bfloat16, or a device with more memory"
        )
    while 2 * tokens <= most:
        doubled = trial(2 * tokens)
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
    """Return the fastest of `least`, twice that, .. up to the first that is slower.

    If the time is over before that, it is READ_TOKENS, or more if more was tried.
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


@torch.inference_mode()
def _reading(model: Transformer, tokens: int, max_length: int) -> float:
    """Return the seconds of a pass over so many tokens, each of which is scored."""
    pairs = [Pair(row, len(row) - 1) for row in _rows(model, tokens, max_length)]
    started = _now(model)
    score_batch(model, Planner(tokens, tokens), pairs, one_pass(pairs))
    return _now(model) - started


@torch.inference_mode()
def _writing(model: Transformer, tokens: int, max_length: int) -> float:
    """Return the seconds of answers to prompts of so many tokens, without reading those."""
    device = model.tok_embeddings.weight.device
    prompts = torch.tensor(_rows(model, tokens, max_length), device=device)[:, :-1]
    cache = Cache(model.args.num_layers, capacity=prompts.shape[1] + STEPS)
    model(prompts, cache=cache, logits_to_keep=1)
    started = _now(model)
    for _ in range(STEPS):
        model(prompts[:, :1], cache=cache)
    return (_now(model) - started) * STEPS_OF_AN_ANSWER / STEPS


def _rows(model: Transformer, tokens: int, max_length: int) -> list[list[int]]:
    """Return random rows that add up to `tokens`, and one more each."""
    length = min(ROW_TOKENS, max(1, max_length - STEPS), tokens)
    shape = (max(1, tokens // length), length + 1)
    generator = torch.Generator().manual_seed(0)
    return torch.randint(model.args.vocab_size, shape, generator=generator).tolist()


def _now(model: Transformer) -> float:
    if model.tok_embeddings.weight.device.type == "cuda":
        torch.cuda.synchronize(model.tok_embeddings.weight.device)
    return time.monotonic()
