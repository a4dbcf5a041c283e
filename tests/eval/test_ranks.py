"""Several ranks answer bitwise as one does, and none waits for a dead one."""

import json
import signal

import pytest

from eval.model.ranks import Ranks
from tests.commands import run_command
from tests.support import refused

NOTICED_S = 20.0  # far below torch's timeouts


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    """How each rank ended, by scenario and world size; see eval_rank_processes.py."""
    out = tmp_path_factory.mktemp("ranks") / "ended.json"
    run_command("tests.eval_rank_processes", out, check=True)
    return json.loads(out.read_text())


def results(ranks):
    """Return the results of ranks that all ended well."""
    assert [rank["code"] for rank in ranks] == [0] * len(ranks), ranks
    return [rank["result"] for rank in ranks]


@pytest.mark.system
def test_answers_are_bitwise_those_of_one_rank(ended):
    (alone,) = results(ended["answers 1"])

    assert results(ended["answers 3"]) == [alone] * 3
    assert len(alone["scores"]) == 90
    assert len(set(map(tuple, alone["scores"]))) > 60
    assert len(set(alone["generated"])) > 5
    assert alone["done"] > 0
    assert alone["rank"] == [0, 1]


@pytest.mark.system
def test_every_rank_has_the_results_of_shared_items(ended):
    by_rank = results(ended["plumbing 3"])

    workers = by_rank[0]["workers"]
    for rank, result in enumerate(by_rank):
        assert result["squares"] == [n * n for n in range(40)]
        assert result["workers"] == workers
        assert result["mine"] == [n for n, worker in enumerate(workers) if worker == rank]
        assert result["done"] == 40
        assert (result["empty"], result["again"]) == ([], [2, 3, 4])
        assert result["broadcast"] == {"from": 0}

    # a free rank takes the next item: equal work is shared about equally
    assert min(len(result["mine"]) for result in by_rank) >= 5
    assert by_rank[0]["turn"] < min(result["turn"] for result in by_rank[1:])


@pytest.mark.system
def test_one_rank_out_of_memory_lowers_all_budgets(ended):
    first, last = results(ended["memory 2"])
    assert first["scores"] == pytest.approx(last["scores"], abs=1e-5)
    assert first["batch_tokens"] == last["batch_tokens"]
    assert first["batch_tokens"] in (150, 75, 37)  # 300, halved until 60 are enough
    assert (first["logged"], last["logged"]) == (0, 1)


@pytest.mark.system
@pytest.mark.parametrize(
    ("scenario", "failed", "expected", "code"),
    [
        ("raises", 1, {"code": 2, "error": "test.broken"}, "ranks.failed"),
        ("raises_first", 0, {"code": 1, "type": "KeyError"}, "ranks.failed"),
        ("raises_between", 1, {"code": 1, "type": "ValueError"}, "ranks.lost"),
        ("refuses", 0, {"code": 2, "error": "test.refused"}, "ranks.failed"),
        ("is_killed", 1, {"code": -signal.SIGKILL}, "ranks.lost"),
        ("first_is_killed", 0, {"code": -signal.SIGKILL}, "ranks.lost"),
    ],
)
def test_a_rank_that_fails_or_dies_ends_all(ended, scenario, failed, expected, code):
    for number, rank in enumerate(ended[f"{scenario} 3"]):
        if number == failed:
            assert rank == rank | expected
        else:
            assert (rank["code"], rank["type"], rank["error"]) == (2, "RankFailed", code)
            assert rank["fields"] == ({"rank": failed} if code == "ranks.failed" else {})
            assert rank["seconds"] < NOTICED_S


def test_without_torchrun_there_is_one_rank(monkeypatch):
    for name in ("WORLD_SIZE", "RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)

    with Ranks.from_environment() as alone:
        assert (alone.rank, alone.world_size) == (0, 1)
        assert alone.map(lambda item: -item, [3, 4], [5, 6]) == [-3, -4]

    monkeypatch.setenv("WORLD_SIZE", "2")
    with refused("ranks.connect"):
        Ranks.from_environment()
