"""The benchmark compares equal work: the same tokens everywhere."""

import importlib.util

import pytest

from canon_pretrain.data.tokenizer import Tokenizer
from data_prep import bench
from data_prep.planning import train_tokenizer

TEXTS = [f"def f{k}(x):\n    return x[{k}:] + the_value.of({k})  # the end\n" for k in range(300)]


@pytest.mark.system
def test_every_row_is_of_the_same_tokens(tmp_path, monkeypatch):
    model = Tokenizer(train_tokenizer(TEXTS, 330), "test")
    counted, count = [], bench.count_tokens
    monkeypatch.setattr(bench, "count_tokens", lambda out: counted.append(count(out)) or counted[0])
    rows = [
        *bench.measure_encoding(model, TEXTS, 2),
        *bench.measure_builds(model, TEXTS, tmp_path / "builds", 1),
        *bench.measure_reading(tmp_path / "reading", 1, tokens=1 << 17, batches=20),
        *bench.measure_start(tmp_path / "start", 1, shards=3, tokens=3_000_000),
    ]
    assert len(counted) >= 2
    assert set(counted) == {sum(len(model.encode(text)) + 1 for text in TEXTS)}  # an EOS each
    values = {row["what"]: row["value"] for row in rows}
    assert len(values) == len(rows) and set(bench.TARGETS) < set(values)
    missing = {name for name, value in values.items() if value is None}
    has_datatrove = importlib.util.find_spec("datatrove") is not None
    assert len(missing) == 1 - has_datatrove and all("datatrove" in name for name in missing)
    assert all(value > 0 for name, value in values.items() if name not in missing)
