"""The token budget: found by trying, once; and read back only where it was found for the same."""

import json
import stat
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from canon_pretrain.core.errors import UserError
from eval.model import budget
from eval.model.budget import FILE, Budget, batch_tokens_for, fastest, find_budget, largest
from eval.model.lm import CanonLM
from tests.variants import VARIANTS, build


def lm_of(**changes: object) -> CanonLM:
    args = replace(VARIANTS["nope ABCD"], **changes)  # type: ignore[arg-type]
    return CanonLM(build(args).eval(), None, max_length=60)


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How often a budget was looked for, and a different one each time."""
    calls: list[int] = []

    def find(model: object, max_length: int) -> Budget:
        calls.append(max_length)
        return Budget(1000 + len(calls), 100 + len(calls))

    monkeypatch.setattr(budget, "find_budget", find)
    return calls


def found(lm: CanonLM, folder: Path) -> tuple[int, int | None, list[str]]:
    lines: list[str] = []
    tokens = batch_tokens_for(lm, folder, lines.append)
    return tokens, lm.read_tokens, lines


def test_it_is_looked_for_once_for_each_model_and_length(tried: list[int], tmp_path: Path) -> None:
    longer, half = lm_of(), lm_of()
    longer.max_length = 100
    half.model.to(torch.bfloat16)
    assert found(lm_of(), tmp_path)[:2] == (1001, 101)
    assert found(lm_of(init_seed=5), tmp_path) == (1001, 101, [])  # other weights, same shape
    for number, other in enumerate((lm_of(ffn_dim=48), longer, half), 1002):
        tokens, read, lines = found(other, tmp_path)
        assert (tokens, read) == (number, number - 900) and str(tmp_path / FILE) in lines[0]
    assert found(lm_of(), tmp_path)[0] == 1001 and len(tried) == 4


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: "",
        lambda text: "[1, 2]",
        lambda text: '{"version": 2, "entries": 7}',
        lambda text: text.replace('"version": 2', '"version": 99'),
        lambda text: text.replace("1001", '"many"'),
        lambda text: text.replace("1001", "-3"),
        lambda text: text.replace("101", "0.5"),
        lambda text: text.replace('"batch_tokens"', '"other"'),
    ],
)
def test_a_damaged_file_is_found_anew(
    tried: list[int], tmp_path: Path, damage: Callable[[str], str]
) -> None:
    found(lm_of(), tmp_path)
    path = tmp_path / FILE
    path.write_text(damage(path.read_text()))
    assert found(lm_of(), tmp_path)[0] == 1002
    assert found(lm_of(), tmp_path)[0] == 1002


def test_a_folder_that_cannot_be_written_is_no_error(tried: list[int], tmp_path: Path) -> None:
    (tmp_path / "evals").write_text("a file, so that no folder can be made")
    tokens, _, lines = found(lm_of(), tmp_path / "evals")
    assert tokens == 1001 and len(lines) == 2
    assert stat.S_ISREG((tmp_path / "evals").stat().st_mode)


@pytest.mark.parametrize(
    ("memory", "start", "expected", "num_trials"),
    [
        (5000, 1.0, 4096, 5),  # doubles until memory is full, and steps back
        # 8192 takes 0.092 s and twice as many 0.174 s: 6 % faster; the next is 3 %
        (1 << 40, 0.01, 16384, 7),
        (1 << 40, 1e6, budget.MOST, 11),
    ],
)
def test_a_gpus_budget_is_doubled(
    memory: int, start: float, expected: int, num_trials: int
) -> None:
    calls: list[int] = []

    def trial(tokens: int) -> float | None:
        calls.append(tokens)
        return start + tokens / 1e5 if tokens <= memory else None

    assert largest(trial) == expected
    assert calls == [512 << doubling for doubling in range(num_trials)]


def test_what_holds_nothing_is_refused() -> None:
    with pytest.raises(UserError, match="512 tokens .*--max_length"):
        largest(lambda tokens: None)


def test_on_a_cpu_the_fastest_is_taken() -> None:
    seconds = {256: 0.06, 512: 0.1, 1024: 0.19, 2048: 0.5, 4096: 1.5}
    assert fastest(lambda tokens: seconds[tokens]) == 1024
    # a slow one: one trial, then the number that is known
    assert fastest(lambda tokens: {256: 30.0}[tokens]) == 512


def test_a_budget_is_really_found_on_this_machine(tmp_path: Path) -> None:
    lm = lm_of()
    tokens, read, _ = found(lm, tmp_path)
    assert tokens >= 512 and 256 <= (read or 0) <= 8192
    (entry,) = json.loads((tmp_path / FILE).read_text())["entries"]
    assert entry["found"] == {"batch_tokens": tokens, "read_tokens": read}
    assert entry["key"]["dtype"] == "float32" and entry["key"]["max_length"] == 60
    # a GPU's trials, here on the CPU: both kinds of work take time, and more for more tokens
    few, many = (min(budget._writing(lm.model, n, 60) for _ in range(3)) for n in (64, 4096))
    assert 0 < few < many
    assert find_budget(lm.model, 60).batch_tokens == tokens
