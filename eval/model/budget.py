"""The tokens per batch: on a CPU a share of its memory, on a GPU found by doubling.

It is stored with the results, so that later calls, on any number of ranks, take the same
batches.
"""

import json
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import torch
from pydantic import Field

from canon_pretrain.core.errors import UserError
from canon_pretrain.core.files import UnreadableFile, read_record, write_json
from canon_pretrain.machine.memory import physical_memory
from canon_pretrain.model.cache import Cache
from canon_pretrain.model.counts import state_bytes, state_size
from eval.model.lm import OUT_OF_MEMORY_HINT, CanonLM, none_if_out_of_memory
from eval.model.score import Pair, Planner, score_batch

FILE = "batch_tokens.json"
MIN_TOKENS, MAX_TOKENS, MAX_CPU_TOKENS = 512, 1 << 19, 32768
MIN_SPEEDUP = 1.05  # of tokens per second, for a doubling to be kept
ROW_TOKENS = 1024
# of a row as short as most: a recurrence's state is per row, and the budget is in tokens
SHORT_ROW = 64
# generated tokens that are timed, and those of a whole answer, to which the time is scaled
TRIAL_STEPS, ANSWER_STEPS = 4, 48
SHARE_OF_MEMORY = 0.125  # of a CPU's memory, for keys, values, states and logits


def batch_tokens_for(lm: CanonLM, folder: Path, log: Callable[[str], None]) -> int:
    """Return the tokens per batch for `lm`, as rank 0 finds them or reads them from `folder`."""
    args, found, weight = lm.model.args, 0, lm.model.tok_embeddings.weight
    if lm.ranks.rank == 0 and weight.device.type == "cpu":
        itemsize = weight.element_size()
        per_token = state_bytes(args, itemsize)[0] + 2 * args.vocab_size * itemsize
        per_token += 4 * args.num_layers * state_size(args) // SHORT_ROW
        fit = int(SHARE_OF_MEMORY * physical_memory() / per_token)
        found = max(MIN_TOKENS, min(MAX_CPU_TOKENS, fit))
    elif lm.ranks.rank == 0:
        properties = torch.cuda.get_device_properties(weight.device)
        key = [
            f"{properties.name}, {properties.total_memory} bytes",
            asdict(args) | {"max_seq_len": 0, "init_seed": 0},
            str(weight.dtype),
            lm.max_length,
            torch.__version__,
        ]
        found = load_or_find(
            folder / FILE, json.dumps(key), lambda: find_largest(make_trial(lm)), log
        )
    return int(lm.ranks.broadcast(found))


def load_or_find(path: Path, key: str, find: Callable[[], int], log: Callable[[str], None]) -> int:
    """Return the entry `key` of the JSON file `path`; if missing, call `find` and store it."""
    try:
        known = read_record(path, dict[str, Annotated[int, Field(ge=1)]])
    except UnreadableFile:  # missing, damaged or of another version
        known = {}
    if key not in known:
        known[key] = find()
        log(f"batches of {known[key]:,} tokens, found by trying; stored in {path}")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_json(path, known)
        except OSError as error:
            log(f"{path} can't be written ({error.strerror}); the next run searches again")
    return known[key]


def find_largest(trial: Callable[[int], float | None]) -> int:
    """Double MIN_TOKENS while `trial` (seconds; None if out of memory) gains MIN_SPEEDUP."""
    trial(MIN_TOKENS)  # warm up: compile and load kernels
    tokens, seconds = MIN_TOKENS, trial(MIN_TOKENS)
    if seconds is None:
        raise UserError("eval.out_of_memory", f"{MIN_TOKENS} tokens: {OUT_OF_MEMORY_HINT}")
    while 2 * tokens <= MAX_TOKENS:
        doubled = trial(2 * tokens)
        if doubled is None or 2 * seconds < MIN_SPEEDUP * doubled:
            break
        tokens, seconds = 2 * tokens, doubled
    return tokens


def make_trial(lm: CanonLM) -> Callable[[int], float | None]:
    """Return a function: the seconds to score and answer so many tokens, None if out of memory."""
    model, device = lm.model, lm.model.tok_embeddings.weight.device

    def now() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.monotonic()

    @torch.inference_mode()
    def seconds(tokens: int) -> float:
        length = min(ROW_TOKENS, max(1, lm.max_length - TRIAL_STEPS), tokens)
        shape = (max(1, tokens // length), length + 1)
        generator = torch.Generator().manual_seed(0)
        rows = torch.randint(model.args.vocab_size, shape, generator=generator)
        pairs, planner = [Pair(row, length) for row in rows.tolist()], Planner(tokens, tokens)
        start = now()
        for batch in planner.plan(pairs):
            score_batch(model, planner, pairs, batch)
        reading = now() - start
        prompts = rows[:, :-1].to(device)
        cache = Cache(model.args.num_layers, capacity=length + TRIAL_STEPS)
        model(prompts, cache=cache, logits_to_keep=1)
        start = now()
        for _ in range(TRIAL_STEPS):
            model(prompts[:, :1], cache=cache)
        return reading + (now() - start) * ANSWER_STEPS / TRIAL_STEPS

    return lambda tokens: none_if_out_of_memory(lambda: seconds(tokens))
