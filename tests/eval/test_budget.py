"""The token budget: found by trying, once; and read back only where it was found for the same."""

import pytest

from canon_pretrain.core.errors import UserError
from eval.model.budget import FILE, MAX_TOKENS, find_largest, load_or_find


def test_it_is_looked_for_once_per_model(tmp_path):
    lines: list[str] = []

    def found(key: str, tokens: int) -> int:
        lines.clear()
        return load_or_find(tmp_path / FILE, key, lambda: tokens, lines.append)

    assert found("a", 1000) == 1000
    assert found("b", 2000) == 2000 and str(tmp_path / FILE) in lines[0]
    assert found("a", 3000) == 1000 and not lines
    for damage in ("", '{"version": 2, "entries": []}', '{"a": -3}'):
        (tmp_path / FILE).write_text(damage)
        assert found("a", 1002) == found("a", 1003) == 1002


@pytest.mark.parametrize(
    ("memory", "start", "expected"),
    [
        (5000, 1.0, 4096),  # doubles until memory is full, and steps back
        (1 << 40, 0.01, 16384),  # 8192 takes 0.092 s, twice as many 6 % less each; the next 3 %
        (1 << 40, 1e6, MAX_TOKENS),
    ],
)
def test_a_gpus_budget_is_doubled(memory, start, expected):
    assert find_largest(lambda n: start + n / 1e5 if n <= memory else None) == expected
    with pytest.raises(UserError, match="512 tokens .*--max_length"):
        find_largest(lambda tokens: None)
