"""The token budget: found by trying, once; and read back only where it was found for the same."""

import io
import json
import stat
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console

from canon_pretrain.errors import UserError
from eval.model import budget
from eval.model.budget import FILE, Budget, batch_tokens_for, fastest, find_budget, largest
from eval.model.lm import CanonLM
from tests.variants import VARIANTS, build

ARGS = VARIANTS["nope ABCD"]


def lm_of(**changes: object) -> CanonLM:
    return CanonLM(build(replace(ARGS, **changes)).eval(), None, max_length=60)  # type: ignore[arg-type]


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How often a budget was looked for, and a different one each time."""
    calls: list[int] = []

    def find(model: object, max_length: int) -> Budget:
        calls.append(max_length)
        return Budget(1000 + len(calls), 100 + len(calls))

    monkeypatch.setattr(budget, "find_budget", find)
    return calls


def found(lm: CanonLM, folder: Path) -> tuple[int, int | None, str]:
    out = io.StringIO()
    tokens = batch_tokens_for(lm, folder, Console(file=out, width=200))
    return tokens, lm.read_tokens, out.getvalue()


def test_it_is_looked_for_once_for_each_model_and_length(tried: list[int], tmp_path: Path) -> None:
    assert found(lm_of(), tmp_path / "evals")[:2] == (1001, 101)
    again = found(lm_of(init_seed=5), tmp_path / "evals")  # other weights of the same shape
    assert again == (1001, 101, "")
    wide = found(lm_of(ffn_dim=48), tmp_path / "evals")
    assert wide[:2] == (1002, 102) and "as found by trying; remembered in" in wide[2]
    longer = lm_of()
    longer.max_length = 100
    assert found(longer, tmp_path / "evals")[0] == 1003
    half = lm_of()
    half.model.to(torch.bfloat16)
    assert found(half, tmp_path / "evals")[0] == 1004
    assert found(lm_of(), tmp_path / "evals")[0] == 1001 and len(tried) == 4


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: "",
        lambda text: text[: len(text) // 2],
        lambda text: "[1, 2]",
        lambda text: '{"version": 1, "entries": 7}',
        lambda text: text.replace('"version": 1', '"version": 99'),
        lambda text: text.replace("1001", '"many"'),
        lambda text: text.replace("1001", "-3"),
        lambda text: text.replace("101", "0.5"),
        lambda text: text.replace('"batch_tokens"', '"other"'),
        lambda text: "\x00\x01",
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
    assert json.loads(path.read_text())["version"] == 1


def test_a_folder_that_cannot_be_written_is_no_error(tried: list[int], tmp_path: Path) -> None:
    (tmp_path / "evals").write_text("a file, so that no folder can be made")
    tokens, _, said = found(lm_of(), tmp_path / "evals")
    assert tokens == 1001 and "can't be written" in said
    assert stat.S_ISREG((tmp_path / "evals").stat().st_mode)


def device(memory: int, rate: float, start: float) -> tuple[Callable[[int], float], list[int]]:
    """A device that holds so many tokens: a pass takes `start` seconds and 1 / rate a token."""
    calls: list[int] = []

    def trial(tokens: int) -> float:
        calls.append(tokens)
        if tokens > memory:
            raise torch.OutOfMemoryError("made up")
        return start + tokens / rate

    return trial, calls


def test_it_doubles_until_memory_is_full_and_steps_back() -> None:
    trial, calls = device(memory=5000, rate=1e5, start=1.0)
    assert largest(trial) == 4096 and calls == [512, 1024, 2048, 4096, 8192]


def test_it_doubles_until_nothing_is_gained() -> None:
    trial, calls = device(memory=1 << 40, rate=1e5, start=0.01)
    # 8192 takes 0.092 s and twice as many 0.174 s: 6 % faster; the next is 3 %
    assert largest(trial) == 16384 and calls[-1] == 32768
    trial, _ = device(memory=1 << 40, rate=1e5, start=1e6)
    assert largest(trial) == budget.MOST


def test_what_holds_nothing_is_said() -> None:
    trial, _ = device(memory=100, rate=1e5, start=0.0)
    with pytest.raises(UserError, match="512 tokens does not fit in the device's memory: lower"):
        largest(trial)


def test_on_a_cpu_the_fastest_is_taken() -> None:
    seconds = {256: 0.06, 512: 0.1, 1024: 0.19, 2048: 0.5, 4096: 1.5}
    calls: list[int] = []

    def trial(tokens: int) -> float:
        calls.append(tokens)
        return seconds[tokens]

    assert fastest(trial) == 1024 and calls == [256, 512, 1024, 2048]
    # a slow one: one trial, then the number that is known
    calls.clear()
    slow = fastest(lambda tokens: calls.append(tokens) or 30.0)  # type: ignore[func-returns-value]
    assert slow == 512 and calls == [256]


def test_a_budget_is_really_found_on_this_machine(tmp_path: Path) -> None:
    lm = lm_of()
    tokens, read, _ = found(lm, tmp_path)
    assert tokens >= 512 and 256 <= (read or 0) <= 8192
    record = json.loads((tmp_path / FILE).read_text())
    (entry,) = record["entries"]
    assert entry["found"] == {"batch_tokens": tokens, "read_tokens": read}
    assert entry["for"]["dtype"] == "float32" and entry["for"]["max_length"] == 60
    # a GPU's trials, here on the CPU: both kinds of work take time, and more for more tokens
    few, many = (min(budget._writing(lm.model, n, 60) for _ in range(3)) for n in (64, 4096))
    assert 0 < few < many
    assert find_budget(lm.model, 60).batch_tokens == tokens
