"""The bench measures what it says: equal ids, equal windows, a split that is really that large."""

import importlib.util

import pytest

from canon_pretrain.data.tokenizer import Tokenizer
from data_prep import bench
from data_prep.planning import train_tokenizer

TEXTS = [
    f"def value_{number}(x, y={number}):\n    return x[{number}:] + the_value.of(y)  # the end\n"
    for number in range(300)
]


@pytest.fixture(scope="module")
def model() -> Tokenizer:
    return Tokenizer(train_tokenizer(TEXTS, 330), "test")


def test_every_row_is_measured_of_the_same_tokens(model, tmp_path, monkeypatch):
    counted, count = [], bench.count_tokens
    monkeypatch.setattr(
        bench, "count_tokens", lambda out: counted.append(count(out)) or counted[-1]
    )
    rows = [
        *bench.measure_encoding(model, TEXTS, 2),
        *bench.measure_builds(model, TEXTS, tmp_path / "builds", 1),
        *bench.measure_reading(tmp_path / "reading", 1, tokens=1 << 17, batches=20),
        *bench.measure_start(tmp_path / "start", 1, parts=3, tokens=3_000_000),
    ]
    assert len(counted) >= 2
    assert set(counted) == {sum(len(model.encode(text)) + 1 for text in TEXTS)}  # an EOS each
    values = {row["what"]: row["value"] for row in rows}
    assert len(values) == len(rows) and set(bench.TARGETS) < set(values)
    without_datatrove = importlib.util.find_spec("datatrove") is None
    missing = {name for name, value in values.items() if value is None}
    assert missing == ({"build, CPU time: ours / datatrove"} if without_datatrove else set())
    assert all(value > 0 for name, value in values.items() if name not in missing)
