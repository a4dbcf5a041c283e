"""How many tokens a batch holds: on a CPU a share of its memory, on a GPU found by doubling.

It is remembered beside the results, so that later calls, on any number of ranks, take the same
batches.
"""

import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import torch
from pydantic import Field

from canon_pretrain.core.errors import UserError
from canon_pretrain.core.files import UnreadableFile, read_record, write_json
from canon_pretrain.model.cache import Cache
from eval.model.lm import NO_ROOM, CanonLM, unless_out_of_memory
from eval.model.score import Pair, Planner, score_batch

FILE = "batch_tokens.json"
LEAST, MOST, CPU_MOST = 512, 1 << 19, 32768
GAIN = 1.05  # a doubling is worth it if it is as much faster
ROW_TOKENS = 1024
# new tokens of a trial, and those that it stands for: a prompt of 1,000 tokens and an answer
STEPS, STEPS_OF_AN_ANSWER = 4, 48
SHARE_OF_MEMORY = 0.125  # of a CPU's, for keys, values and logits


def batch_tokens_for(lm: CanonLM, folder: Path, say: Callable[[str], None]) -> int:
    """Return the tokens of a batch for `lm`, as rank 0 finds or remembers them in `folder`."""
    args, found, weight = lm.model.args, 0, lm.model.tok_embeddings.weight
    if lm.ranks.rank == 0 and weight.device.type == "cpu":
        numbers = 2 * args.num_layers * args.kv_heads * args.head_dim + 2 * args.vocab_size
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        fit = int(SHARE_OF_MEMORY * memory / (numbers * weight.element_size()))
        found = max(LEAST, min(CPU_MOST, fit))
    elif lm.ranks.rank == 0:
        properties = torch.cuda.get_device_properties(weight.device)
        key = [
            f"{properties.name}, {properties.total_memory} bytes",
            asdict(args) | {"max_seq_len": 0, "init_seed": 0},
            str(weight.dtype),
            lm.max_length,
            torch.__version__,
        ]
        found = remembered(folder / FILE, json.dumps(key), lambda: largest(trial_of(lm)), say)
    return int(lm.ranks.broadcast(found))


def remembered(path: Path, key: str, find: Callable[[], int], say: Callable[[str], None]) -> int:
    """Return what `path` has for `key`, else what `find` returns, and keep it there."""
    try:
        known = read_record(path, dict[str, Annotated[int, Field(ge=1)]])
    except UnreadableFile:  # missing, damaged or of another version
        known = {}
    if key not in known:
        known[key] = find()
        say(f"batches of {known[key]:,} tokens, as found by trying; remembered in {path}")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_json(path, known)
        except OSError as error:
            say(f"{path} can't be written ({error.strerror}): found again next time")
    return known[key]


def largest(trial: Callable[[int], float | None]) -> int:
    """Return the most tokens, doubled from LEAST, that `trial` runs and that pay by GAIN."""
    trial(LEAST)  # kernels are compiled and loaded the first time
    tokens, seconds = LEAST, trial(LEAST)
    if seconds is None:
        raise UserError("todo.budget", f"a batch of {LEAST} tokens {NO_ROOM}")
    while 2 * tokens <= MOST:
        doubled = trial(2 * tokens)
        if doubled is None or 2 * seconds < GAIN * doubled:
            break
        tokens, seconds = 2 * tokens, doubled
    return tokens


def trial_of(lm: CanonLM) -> Callable[[int], float | None]:
    """Return the seconds of scoring so many tokens, and of answers to so many, if they fit."""
    model, device = lm.model, lm.model.tok_embeddings.weight.device

    def now() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.monotonic()

    @torch.inference_mode()
    def seconds(tokens: int) -> float:
        length = min(ROW_TOKENS, max(1, lm.max_length - STEPS), tokens)
        shape = (max(1, tokens // length), length + 1)
        generator = torch.Generator().manual_seed(0)
        rows = torch.randint(model.args.vocab_size, shape, generator=generator)
        pairs, planner = [Pair(row, length) for row in rows.tolist()], Planner(tokens, tokens)
        start = now()
        for batch in planner.plan(pairs):
            score_batch(model, planner, pairs, batch)
        reading = now() - start
        prompts = rows[:, :-1].to(device)
        cache = Cache(model.args.num_layers, capacity=length + STEPS)
        model(prompts, cache=cache, logits_to_keep=1)
        start = now()
        for _ in range(STEPS):
            model(prompts[:, :1], cache=cache)
        return reading + (now() - start) * STEPS_OF_AN_ANSWER / STEPS

    return lambda tokens: unless_out_of_memory(lambda: seconds(tokens))
