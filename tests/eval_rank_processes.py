"""Ranks of an evaluation as real processes, all scenarios in one call, for eval/test_ranks.py.

    python -m tests.eval_rank_processes OUT.json

One process imports lm_eval, which takes seconds, and forks the ranks of every scenario.
"""

import json
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from canon_pretrain.core.errors import UserError
from eval.model.lm import CanonLM
from eval.model.ranks import Ranks
from tests.ports import free_port
from tests.scripted_lm import Letters, LimitedMemory, requests
from tests.variants import VARIANTS, build

TIMEOUT_S = 60
TEXT = "now is better than never although never is often better than right now"


def answers(ranks: Ranks) -> dict[str, Any]:
    """All three kinds of request, floats as hex: bitwise."""
    costs: list[int] = []
    lm = CanonLM(
        build(VARIANTS["nope ABCD"]).eval(),
        Letters(),
        max_length=40,
        batch_tokens=150,
        ranks=ranks,
        on_done=costs.append,
    )
    choices = [(TEXT[: 5 + n], TEXT[n : n + k]) for n in range(30) for k in (3, 5, 9)]
    texts = [(TEXT[:n],) for n in (1, 39, 40, 41, 60, 70)]
    prompts = [(TEXT[:n], {"until": ["j"], "max_gen_toks": 9}) for n in range(3, 40, 2)]

    scores = lm.loglikelihood(requests("loglikelihood", choices))
    rolling = lm.loglikelihood_rolling(requests("loglikelihood_rolling", texts))
    return {
        "scores": [(score.hex(), greedy) for score, greedy in scores],
        "rolling": [score.hex() for score in rolling],
        "generated": lm.generate_until(requests("generate_until", prompts)),
        "done": sum(costs),
        "rank": (lm.rank, lm.world_size),
    }


def plumbing(ranks: Ranks) -> Any:
    """Order, distribution and reported costs of items."""
    costs: list[int] = []
    mine: list[int] = []

    def work(item: int) -> tuple[int, int]:
        mine.append(item)
        time.sleep(0.02)
        return item * item, ranks.rank

    results = ranks.map(work, list(range(40)), [1] * 40, costs.append)
    return {
        "squares": [square for square, _ in results],
        "workers": [worker for _, worker in results],
        "mine": sorted(mine),
        "done": sum(costs),
        "empty": ranks.map(work, [], []),
        "again": ranks.map(lambda item: item + 1, [1, 2, 3], [1] * 3),
        "turn": ranks.rank_zero_first(time.monotonic),
        "broadcast": ranks.broadcast({"from": ranks.rank}),
    }


def memory(ranks: Ranks) -> Any:
    """The last rank has less memory than the others."""
    lines: list[str] = []
    max_tokens = 60 if ranks.rank == ranks.world_size - 1 else 10_000
    model: Any = LimitedMemory(build(VARIANTS["rope"]).eval(), max_tokens)
    # or one rank would do all batches before the other begins
    model.register_forward_pre_hook(lambda *_: time.sleep(0.005))
    lm = CanonLM(model, Letters(), max_length=30, batch_tokens=300, ranks=ranks, log=lines.append)
    choices = [(TEXT[:n], TEXT[n : n + 4]) for n in range(3, 60)]

    for _ in range(3):
        scores = lm.loglikelihood(requests("loglikelihood", choices))
    return {
        "scores": [score for score, _ in scores],
        "batch_tokens": lm.batch_tokens,
        "logged": len(lines),
    }


def ending(who: int, act: Callable[[], Any]) -> Callable[[Ranks], None]:
    """A scenario in which one rank ends by `act` after some items."""

    def scenario(ranks: Ranks) -> None:
        def work(item: int) -> None:
            time.sleep(0.05)
            if ranks.rank == who and item > 3:
                act()

        ranks.map(work, list(range(60)), [1] * 60)

    return scenario


def fails(error: Exception) -> Any:
    raise error


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def raises_between(ranks: Ranks) -> None:
    if ranks.rank == 1:
        time.sleep(0.2)
        raise ValueError("between two maps")
    ranks.map(lambda item: time.sleep(0.05), list(range(40)), [1] * 40)


def refuses(ranks: Ranks) -> None:
    ranks.rank_zero_first(lambda: ranks.rank or fails(UserError("test.refused", "refused")))


SCENARIOS: dict[str, tuple[Callable[[Ranks], Any], tuple[int, ...]]] = {
    "answers": (answers, (1, 3)),
    "plumbing": (plumbing, (3,)),
    "memory": (memory, (2,)),
    "raises": (ending(1, lambda: fails(UserError("test.broken", "broken"))), (3,)),
    "raises_first": (ending(0, lambda: fails(KeyError("nothing"))), (3,)),
    "raises_between": (raises_between, (3,)),
    "is_killed": (ending(1, kill), (3,)),
    "first_is_killed": (ending(0, kill), (3,)),
    "refuses": (refuses, (3,)),
}


def in_ranks(function: Callable[[Ranks], Any], world_size: int, folder: Path) -> list[dict]:
    """How each rank ended: result or error, exit code (-9 after SIGKILL), seconds."""
    port = free_port()
    started = time.monotonic()
    ranks: dict[int, int] = {}
    for rank in range(world_size):
        pid = os.fork()
        if not pid:
            signal.alarm(TIMEOUT_S)
            os.environ |= {
                "RANK": str(rank),
                "WORLD_SIZE": str(world_size),
                "LOCAL_RANK": str(rank),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
            }
            os._exit(_rank(function, folder / f"{rank}.json"))
        ranks[pid] = rank

    outcomes: dict[int, dict[str, Any]] = {}
    while len(outcomes) < world_size:
        pid, status = os.waitpid(-1, 0)
        path = folder / f"{ranks[pid]}.json"
        outcome = json.loads(path.read_text()) if path.exists() else {}
        path.unlink(missing_ok=True)
        outcome["code"] = os.waitstatus_to_exitcode(status)
        outcome["seconds"] = time.monotonic() - started
        outcomes[ranks[pid]] = outcome
    return [outcomes[rank] for rank in range(world_size)]


def _rank(function: Callable[[Ranks], Any], path: Path) -> int:
    try:
        with Ranks.from_environment() as ranks:
            result = function(ranks)
        path.write_text(json.dumps({"result": result}))
        return 0
    except BaseException as error:
        outcome: dict[str, Any] = {"type": type(error).__name__}
        if isinstance(error, UserError):
            outcome |= {"error": error.code, "fields": error.fields}
        path.write_text(json.dumps(outcome))
        traceback.print_exc()
        return 2 if isinstance(error, UserError) else 1


def main(out: Path) -> None:
    """Run all scenarios and write {name and world size: outcome per rank}."""
    torch.set_num_threads(1)
    outcomes = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, (function, sizes) in SCENARIOS.items():
            for world_size in sizes:
                outcomes[f"{name} {world_size}"] = in_ranks(function, world_size, Path(folder))
    out.write_text(json.dumps(outcomes))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
