"""Several processes answer as one does, bit for bit; and none waits for one that is gone."""

import json
import os
import signal
import subprocess
import sys
from typing import Any

import pytest

from canon_pretrain.core.errors import UserError
from eval.model.ranks import Ranks
from tests.support import ROOT

Ended = list[dict[str, Any]]
NOTICED_S = 20.0
"""Far below any timeout of torch's."""


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ended]:
    """By scenario and world size, how each rank ended; see eval_rank_processes.py."""
    out = tmp_path_factory.mktemp("ranks") / "ended.json"
    command = [sys.executable, "-m", "tests.eval_rank_processes", str(out)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300
    )
    if done.returncode:
        pytest.fail(done.stdout + done.stderr)
    return json.loads(out.read_text())


def results(ranks: Ended) -> list[Any]:
    assert [rank["code"] for rank in ranks] == [0] * len(ranks), ranks
    return [rank["result"] for rank in ranks]


@pytest.mark.parametrize("scenario", ["answers", "validation"])
def test_answers_are_bitwise_those_of_one_rank(ended: dict[str, Ended], scenario: str) -> None:
    (alone,) = results(ended[f"{scenario} 1"])
    for world_size in (2, 3):
        for found in results(ended[f"{scenario} {world_size}"]):
            assert found == alone
    if scenario == "answers":
        assert len(alone["scores"]) == 90 and len(set(map(tuple, alone["scores"]))) > 60
        assert len(set(alone["written"])) > 5 and alone["told"] > 0
        assert alone["rank"] == [0, 1]


def test_items_are_shared_out_and_every_rank_has_all_results(ended: dict[str, Ended]) -> None:
    found = results(ended["plumbing 3"])
    for rank, result in enumerate(found):
        assert result["squares"] == [n * n for n in range(40)]
        assert result["workers"] == found[0]["workers"]
        assert result["mine"] == [n for n, by in enumerate(result["workers"]) if by == rank]
        assert sorted(result["told"]) == list(range(40))
        assert (result["empty"], result["again"]) == ([], [2, 3, 4])
        assert result["broadcast"] == {"from": 0}
    # whoever is free takes the next: equal work is shared about equally
    assert min(len(result["mine"]) for result in found) >= 5
    assert found[0]["turn"] < min(result["turn"] for result in found[1:])


def test_a_rank_with_less_memory_lowers_the_budget_of_all(ended: dict[str, Ended]) -> None:
    first, last = results(ended["memory 2"])
    assert first["scores"] == pytest.approx(last["scores"], abs=1e-5)
    assert first["batch_tokens"] == last["batch_tokens"]
    assert first["batch_tokens"] in (150, 75, 37)  # 300, halved until 60 are enough
    assert first["said"] == []
    assert last["said"] == ["out of memory with 300 tokens a batch: going on with 150"]


@pytest.mark.parametrize("world_size", [2, 3])
def test_an_error_on_one_rank_ends_all(ended: dict[str, Ended], world_size: int) -> None:
    ranks = ended[f"raises {world_size}"]
    assert ranks[1]["type"] == "UserError" and ranks[1]["error"] == "this item is broken"
    for rank in (ranks[0], *ranks[2:]):
        assert rank["code"] == 2 and rank["seconds"] < NOTICED_S
        assert rank["error"] == f"rank 1 of {world_size} failed: this item is broken"


def test_an_error_on_the_rank_that_counts_the_work_ends_all(ended: dict[str, Ended]) -> None:
    ranks = ended["raises_first 3"]
    assert ranks[0]["type"] == "KeyError"
    for rank in ranks[1:]:
        assert rank["error"] == "rank 0 of 3 failed: KeyError: 'nothing'"
        assert rank["seconds"] < NOTICED_S


def test_an_error_between_two_maps_ends_all(ended: dict[str, Ended]) -> None:
    ranks = ended["raises_between 3"]
    assert ranks[1]["type"] == "ValueError"
    for rank in (ranks[0], ranks[2]):
        assert rank["type"] == "RankFailed" and rank["seconds"] < NOTICED_S
        assert "lost another rank, whose own output says why" in rank["error"]


@pytest.mark.parametrize(
    ("scenario", "killed", "world_size"),
    [
        ("is_killed", 1, 2),
        ("is_killed", 1, 3),
        ("first_is_killed", 0, 2),
        ("first_is_killed", 0, 3),
    ],
)
def test_nobody_waits_for_a_killed_rank(
    ended: dict[str, Ended], scenario: str, killed: int, world_size: int
) -> None:
    ranks = ended[f"{scenario} {world_size}"]
    assert ranks[killed]["code"] == -signal.SIGKILL
    for number, rank in enumerate(ranks):
        if number != killed:
            assert rank["code"] == 2 and rank["type"] == "RankFailed", rank
            assert rank["seconds"] < NOTICED_S
            assert "lost another rank" in rank["error"] or "is gone" in rank["error"]


def test_what_the_first_rank_refuses_is_said_by_all(ended: dict[str, Ended]) -> None:
    ranks = ended["refuses 3"]
    assert ranks[0]["error"] == "no such data set"
    for rank in ranks[1:]:
        assert rank["error"] == "rank 0 of 3 failed: no such data set"


def test_ranks_that_take_different_ways_are_told(ended: dict[str, Ended]) -> None:
    for rank in ended["strays 2"]:
        assert rank["error"] == "the ranks are not at the same place: barrier, broadcast"


def test_without_torchrun_there_is_one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WORLD_SIZE", "RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with Ranks.from_environment() as ranks:
        told: list[int] = []
        assert (ranks.rank, ranks.world_size) == (0, 1)
        assert ranks.map(lambda item: -item, [3, 4], told.append) == [-3, -4]
        assert told == [0, 1]
        assert ranks.broadcast("x") == "x" and ranks.in_turn(lambda: 5) == 5
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(UserError, match="WORLD_SIZE is 4, but RANK, MASTER_ADDR, MASTER_PORT is"):
        Ranks.from_environment()


def test_no_rank_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is started alone with the variables of several says so, after a while."""
    from datetime import timedelta

    from eval.model import ranks

    monkeypatch.setattr(ranks, "START_TIMEOUT", timedelta(seconds=1))
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_PORT", "9")
    with pytest.raises(UserError, match="rank 1 of 2 could not connect to the others at 127.0.0.1"):
        Ranks.from_environment()
