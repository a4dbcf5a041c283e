"""How many tokens a batch holds: found by trying, once for each model and kind of device.

`eval run` asks before its first suite. What is found is remembered in a file beside the results,
with what it was found for. On a GPU the number doubles until memory is full or nothing is gained.
On a CPU a few passes of a second or two show whether more tokens at a time are any slower.
"""

import json
import os
import platform
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from canon_pretrain.errors import UserError
from canon_pretrain.files import write_atomic
from canon_pretrain.model.cache import Cache
from canon_pretrain.model.transformer import Transformer
from eval.lm import BATCH_TOKENS, CanonLM
from eval.scoring import Pair, Planner, one_pass, score_batch

FILE = "batch_tokens.json"
VERSION = 1
LEAST, MOST = 512, 1 << 19
GAIN = 1.05
"""A doubling is worth it where it is as much faster."""
SLOWER = 0.95
CPU_SECONDS = 1.0
"""No further trial begins on a CPU after this long."""
ROW_TOKENS = 1024
STEPS, STEPS_OF_AN_ANSWER = 4, 48
"""New tokens of a trial, and those that it stands for: a prompt of 1,000 tokens and an answer."""
SHARE_OF_MEMORY = 0.25
"""Of a CPU's free memory, for keys, values and logits."""


def batch_tokens_for(lm: CanonLM, folder: Path, console: Console) -> int:
    """The tokens of a batch for `lm`: from `folder`/batch_tokens.json, or found and kept there.

    Rank 0 looks; all ranks get the same. Raises UserError where the least does not fit in memory.
    """
    found = None
    if lm.ranks.rank == 0:
        found = _remembered(lm, folder, console)
    return int(lm.ranks.broadcast(found))


def _remembered(lm: CanonLM, folder: Path, console: Console) -> int:
    path = folder / FILE
    key = _key(lm.model, lm.max_length)
    entries = _read(path)
    for entry in entries:
        if entry["for"] == key:
            return int(entry["batch_tokens"])
    found = find_batch_tokens(lm.model, lm.max_length)
    console.print(
        f"batches of {found:,} tokens, as found by trying; remembered in {path}", soft_wrap=True
    )
    record = {"version": VERSION, "found": [*entries, {"for": key, "batch_tokens": found}]}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_atomic(path, (json.dumps(record, indent=1) + "\n").encode())
    except OSError as error:
        console.print(f"{path} can't be written ({error.strerror}): found anew next time")
    return found


def _read(path: Path) -> list[dict[str, Any]]:
    """The entries of a file; none where it is missing, damaged or of another version."""
    try:
        record = json.loads(path.read_text("utf-8"))
        entries = record["found"] if record["version"] == VERSION else []
        return [
            {"for": dict(entry["for"]), "batch_tokens": int(entry["batch_tokens"])}
            for entry in entries
            if int(entry["batch_tokens"]) >= 1
        ]
    except (OSError, ValueError, TypeError, KeyError):
        return []


def _key(model: Transformer, max_length: int) -> dict[str, Any]:
    """What the number depends on; JSON values."""
    weight = model.tok_embeddings.weight
    device = {"name": platform.processor() or platform.machine()}
    if weight.device.type == "cuda":
        properties = torch.cuda.get_device_properties(weight.device)
        device = {"name": properties.name, "bytes": str(properties.total_memory)}
    else:
        device |= {"threads": str(torch.get_num_threads()), "cores": str(os.cpu_count())}
    args = asdict(model.args) | {"max_seq_len": 0, "init_seed": 0}
    return {
        "device": device,
        "model": args,
        "dtype": str(weight.dtype).removeprefix("torch."),
        "max_length": max_length,
        "torch": torch.__version__,
    }


def find_batch_tokens(
    model: Transformer,
    max_length: int,
    trial: Callable[[int], float] | None = None,
) -> int:
    """The number of tokens that suits `model` on its device; `trial(n)` takes n, gives seconds.

    Raises UserError where LEAST tokens do not fit in memory.
    """
    device = model.tok_embeddings.weight.device
    if trial is None:

        def trial(tokens: int) -> float:
            return _seconds(model, tokens, max_length)

    if device.type != "cpu":
        _tried(trial, LEAST)  # kernels are compiled and loaded the first time
        return search(trial)
    fits = max(LEAST, min(BATCH_TOKENS, _cpu_tokens(model)))
    found, ended = search_for(trial, CPU_SECONDS, fits)
    # without a sign that more at a time is slower, as many as fit: answers are written faster
    return found if ended else fits


def search(trial: Callable[[int], float], least: int = LEAST, most: int = MOST) -> int:
    """The first of `least`, twice that, .. whose double is not faster by GAIN, or does not fit.

    Raises UserError where `least` does not fit.
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


def search_for(
    trial: Callable[[int], float], seconds: float, most: int, least: int = LEAST
) -> tuple[int, bool]:
    """The fastest of `least`, twice that, .., and whether its double was seen to be slower.

    No trial begins after so many seconds of them.
    """
    best, best_speed, spent = least, 0.0, 0.0
    tokens = least
    while tokens <= most and spent < seconds:
        took = trial(tokens)
        spent += took
        if tokens / took < SLOWER * best_speed:
            return best, True
        if tokens / took > best_speed:
            best, best_speed = tokens, tokens / took
        tokens *= 2
    return best, False


def _tried(trial: Callable[[int], float], tokens: int) -> float | None:
    """The seconds of a trial; None where it ran out of memory."""
    try:
        return trial(tokens)
    except torch.OutOfMemoryError:
        pass  # outside of this block: the error holds on to the frames and their tensors
    torch.cuda.empty_cache()
    return None


@torch.inference_mode()
def _seconds(model: Transformer, tokens: int, max_length: int) -> float:
    """The time of scoring so many tokens, each of them, and of answers to prompts of as many."""
    device = model.tok_embeddings.weight.device
    length = min(ROW_TOKENS, max(1, max_length - STEPS), tokens)
    count = max(1, tokens // length)
    generator = torch.Generator().manual_seed(0)
    shape = (count, length + 1)
    rows = torch.randint(model.args.vocab_size, shape, generator=generator).tolist()
    pairs = [Pair(row, length) for row in rows]
    started = _now(device)
    score_batch(model, Planner(tokens), pairs, one_pass(pairs))  # logits of all tokens
    scored = _now(device)
    cache = Cache(model.args.num_layers, capacity=length + STEPS)
    prompts = torch.tensor(rows, device=device)[:, :-1]
    model(prompts, cache=cache, logits_to_keep=1)
    read = _now(device)
    for _ in range(STEPS):
        model(prompts[:, :1], cache=cache)
    written = _now(device)
    return (scored - started) + (written - read) * STEPS_OF_AN_ANSWER / STEPS


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
