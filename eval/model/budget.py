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
from canon_pretrain.model.args import ModelArgs
from canon_pretrain.model.cache import Cache
from canon_pretrain.model.counts import state_bytes, state_size
from eval.model.lm import OUT_OF_MEMORY_HINT, CanonLM, none_if_out_of_memory
from eval.model.score import Pair, Planner, score_batch

FILE = "batch_tokens.json"
MIN_TOKENS = 512
MAX_TOKENS = 1 << 19
MAX_CPU_TOKENS = 32768
MIN_SPEEDUP = 1.05  # of tokens per second, for a doubling to be kept
ROW_TOKENS = 1024  # of the rows that are timed
# tokens of a row as short as most: a recurrence's state is per row, and the budget is in tokens
SHORT_ROW = 64
TRIAL_STEPS = 4  # generated tokens that are timed
ANSWER_STEPS = 48  # generated tokens of a whole answer, to which the time is scaled
SHARE_OF_MEMORY = 0.125  # of a CPU's memory, for keys, values, states and logits


def batch_tokens_for(lm: CanonLM, folder: Path, log: Callable[[str], None]) -> int:
    """Return the tokens per batch for `lm`, as rank 0 finds them or reads them from `folder`."""
    weight = lm.model.tok_embeddings.weight
    if weight.device.type == "cpu":
        return lm.ranks.on_rank_zero(
            lambda: _cpu_batch_tokens(lm.model.args, weight.element_size())
        )

    properties = torch.cuda.get_device_properties(weight.device)
    # all that the largest batch depends on
    key = [
        f"{properties.name}, {properties.total_memory} bytes",
        asdict(lm.model.args) | {"max_seq_len": 0, "init_seed": 0},
        str(weight.dtype),
        lm.max_length,
        torch.__version__,
    ]
    return lm.ranks.on_rank_zero(
        lambda: load_or_find(
            folder / FILE,
            json.dumps(key),
            lambda: find_largest(make_trial(lm)),
            log,
        )
    )


def _cpu_batch_tokens(args: ModelArgs, itemsize: int) -> int:
    """Return the tokens whose keys, values, states and logits fit in a share of the memory."""
    logits_bytes = 2 * args.vocab_size * itemsize  # and what is computed from them
    recurrent_bytes = 4 * args.num_layers * state_size(args) // SHORT_ROW  # float32, per row
    cache_bytes, _ = state_bytes(args, itemsize)
    bytes_per_token = cache_bytes + logits_bytes + recurrent_bytes
    fitting = int(SHARE_OF_MEMORY * physical_memory() / bytes_per_token)
    return max(MIN_TOKENS, min(MAX_CPU_TOKENS, fitting))


def load_or_find(path: Path, key: str, find: Callable[[], int], log: Callable[[str], None]) -> int:
    """Return the entry `key` of the JSON file `path`; if missing, call `find` and store it."""
    try:
        entries = read_record(path, dict[str, Annotated[int, Field(ge=1)]])
    except UnreadableFile:  # missing, damaged or of another version
        entries = {}

    if key not in entries:
        entries[key] = find()
        log(f"batches of {entries[key]:,} tokens, found by trying; stored in {path}")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_json(path, entries)
        except OSError as error:
            log(f"{path} can't be written ({error.strerror}); the next run searches again")
    return entries[key]


def find_largest(trial: Callable[[int], float | None]) -> int:
    """Double MIN_TOKENS while `trial` (seconds; None if out of memory) gains MIN_SPEEDUP."""
    trial(MIN_TOKENS)  # warm up: compile and load kernels

    tokens = MIN_TOKENS
    seconds = trial(tokens)
    if seconds is None:
        raise UserError("eval.out_of_memory", f"{MIN_TOKENS} tokens: {OUT_OF_MEMORY_HINT}")

    while 2 * tokens <= MAX_TOKENS:
        doubled_seconds = trial(2 * tokens)
        # twice the tokens must take less than twice the time
        if doubled_seconds is None or 2 * seconds < MIN_SPEEDUP * doubled_seconds:
            break
        tokens *= 2
        seconds = doubled_seconds
    return tokens


def make_trial(lm: CanonLM) -> Callable[[int], float | None]:
    """Return a function: the seconds to score and answer so many tokens, None if out of memory."""
    model = lm.model
    device = model.tok_embeddings.weight.device

    def now() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.monotonic()

    @torch.inference_mode()
    def measure(tokens: int) -> float:
        """Return the seconds to score `tokens` tokens and to generate as many answers as rows."""
        # Rows of random ids that fill the budget. One token more is only predicted.
        length = min(ROW_TOKENS, max(1, lm.max_length - TRIAL_STEPS), tokens)
        rows_BT = torch.randint(
            model.args.vocab_size,
            (max(1, tokens // length), length + 1),
            generator=torch.Generator().manual_seed(0),
        )

        # Score all tokens of the rows.
        pairs = [Pair(row, length) for row in rows_BT.tolist()]
        planner = Planner(tokens, tokens)
        start = now()
        for batch in planner.plan(pairs, range(len(pairs))):
            score_batch(model, planner, pairs, batch)
        scoring_s = now() - start

        # Generate after the same rows, a few tokens for an answer's.
        prompts_BT = rows_BT[:, :-1].to(device)
        cache = Cache.of(model.args, capacity=length + TRIAL_STEPS)
        model(prompts_BT, cache=cache, logits_to_keep=1)
        start = now()
        for _ in range(TRIAL_STEPS):
            model(prompts_BT[:, :1], cache=cache)
        return scoring_s + (now() - start) * ANSWER_STEPS / TRIAL_STEPS

    return lambda tokens: none_if_out_of_memory(lambda: measure(tokens))
