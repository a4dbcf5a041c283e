"""Several processes answer as one does, bit for bit; and none waits for one that is gone."""

import json
import os
import re
import signal
import subprocess
import sys
from typing import Any

import pytest

from canon_pretrain.core.errors import UserError
from eval.model.ranks import Ranks
from tests.support import ROOT

Ended = list[dict[str, Any]]
NOTICED_S = 20.0  # far below any timeout of torch's


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ended]:
    """By scenario and world size, how each rank ended; see eval_rank_processes.py."""
    out = tmp_path_factory.mktemp("ranks") / "ended.json"
    command = [sys.executable, "-m", "tests.eval_rank_processes", str(out)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    told = {"capture_output": True, "text": True, "timeout": 300}
    done = subprocess.run(command, cwd=ROOT, env=environment, **told)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(out.read_text())


def results(found: Ended) -> list[Any]:
    assert [rank["code"] for rank in found] == [0] * len(found), found
    return [rank["result"] for rank in found]


def test_answers_are_bitwise_those_of_one_rank(ended):
    (alone,) = results(ended["answers 1"])
    assert results(ended["answers 3"]) == [alone] * 3
    assert len(alone["scores"]) == 90 and len(set(map(tuple, alone["scores"]))) > 60
    assert len(set(alone["written"])) > 5 and alone["told"] > 0
    assert alone["rank"] == [0, 1]


def test_items_are_shared_out_and_every_rank_has_all_results(ended):
    found = results(ended["plumbing 3"])
    for rank, result in enumerate(found):
        assert result["squares"] == [n * n for n in range(40)]
        assert result["workers"] == found[0]["workers"]
        assert result["mine"] == [n for n, by in enumerate(result["workers"]) if by == rank]
        assert result["told"] == 40
        assert (result["empty"], result["again"]) == ([], [2, 3, 4])
        assert result["broadcast"] == {"from": 0}
    # whoever is free takes the next: equal work is shared about equally
    assert min(len(result["mine"]) for result in found) >= 5
    assert found[0]["turn"] < min(result["turn"] for result in found[1:])


def test_a_rank_with_less_memory_lowers_the_budget_of_all(ended):
    first, last = results(ended["memory 2"])
    assert first["scores"] == pytest.approx(last["scores"], abs=1e-5)
    assert first["batch_tokens"] == last["batch_tokens"]
    assert first["batch_tokens"] in (150, 75, 37)  # 300, halved until 60 are enough
    assert first["said"] == []
    assert last["said"] == ["out of memory with 300 tokens a batch: going on with fewer"]


@pytest.mark.parametrize(
    ("scenario", "failed", "own", "others"),
    [
        ("raises", 1, "this item is broken", "rank 1 of 3 failed: this item is broken"),
        ("raises_first", 0, "'nothing'", "rank 0 of 3 failed: KeyError: 'nothing'"),
        ("raises_between", 1, "between two maps", "lost another rank, whose own output says why"),
        ("refuses", 0, "no such data set", "rank 0 of 3 failed: no such data set"),
        ("is_killed", 1, None, "lost another rank|is gone"),
        ("first_is_killed", 0, None, "lost another rank|is gone"),
    ],
)
def test_a_rank_that_fails_or_dies_ends_all(ended, scenario, failed, own, others):
    for number, rank in enumerate(ended[f"{scenario} 3"]):
        if number != failed:
            assert rank["code"] == 2 and rank["type"] == "RankFailed", rank
            assert rank["seconds"] < NOTICED_S and re.search(others, rank["error"])
        elif own is None:
            assert rank["code"] == -signal.SIGKILL
        else:
            assert rank["error"] == own


def test_without_torchrun_there_is_one_rank(monkeypatch):
    for name in ("WORLD_SIZE", "RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with Ranks.from_environment() as alone:
        assert (alone.rank, alone.world_size) == (0, 1)
        assert alone.map(lambda item: -item, [3, 4], [5, 6]) == [-3, -4]
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match="of 2 .*could not connect.*RANK .*with torchrun"):
        Ranks.from_environment()
