"""The bench measures what it says: equal ids, equal windows, a split that is really that large."""

import argparse
import importlib.util
from typing import Any

import numpy as np
import pytest

from canon_pretrain.core.errors import UserError
from canon_pretrain.core.terminal import Console
from canon_pretrain.data.shards import TokenShards
from canon_pretrain.data.tokenizer import Tokenizer
from data_prep import bench
from data_prep.bench import PARTS, TOKENS
from data_prep.settle import train_tokenizer

TEXTS = [
    f"def value_{number}(x, y={number}):\n    return x[{number}:] + the_value.of(y)  # the end\n"
    for number in range(300)
]


@pytest.fixture(scope="module")
def model() -> Tokenizer:
    return Tokenizer(train_tokenizer(TEXTS, 330), "test")


@pytest.fixture(scope="module")
def rows(model: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("bench")
    return [
        *bench.measure_encoding(model, TEXTS, 2),
        *bench.measure_builds(model, TEXTS, folder / "builds", 1),
        *bench.measure_reading(folder / "reading", 1, tokens=1 << 17, batches=20),
        *bench.measure_start(folder / "start", 1, parts=3, tokens=3_000_000),
    ]


def test_every_row_is_measured_and_every_target_has_one(rows):
    values = {row["what"]: row["value"] for row in rows}
    assert len(values) == len(rows) and set(bench.TARGETS) < set(values)
    without_datatrove = importlib.util.find_spec("datatrove") is None
    missing = {name for name, value in values.items() if value is None}
    assert missing == ({"build, CPU time: ours / datatrove"} if without_datatrove else set())
    assert all(value > 0 for name, value in values.items() if name not in missing)
    for name in ("sp.encode", "tokenizers"):
        assert {f"encoding, {name}", f"encoding, empty word cache / {name}"} < set(values)


def test_a_builds_tokens_are_those_of_its_texts(model, tmp_path):
    counted, count = [], bench.count_tokens
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bench, "count_tokens", lambda out: counted.append(count(out)) or counted[-1])
        bench.measure_builds(model, TEXTS, tmp_path, 1)
    assert len(counted) >= 2
    assert set(counted) == {sum(len(model.encode(text)) + 1 for text in TEXTS)}  # an EOS each
    with pytest.raises(UserError, match="(?s)failed:\n.*--tokenizer, --out"):
        bench.run_python("-m", "data_prep", "build", "--source", "local", "--files", "x")


def test_the_table_says_what_holds():
    measured = [("loader, CRC checked, one core", 99.0, "Mtok/s", "MISSED")]
    measured += [("opening all parts", 0.05, "s", "goal met")]
    facts = {"time": "now", "cpu": "test", "documents": 1, "bytes": 1, "vocab_size": 300}
    console = Console(record=True, width=120)
    rows = [bench.row(what, value, unit) for what, value, unit, _ in measured]
    rows.append(bench.row("build, CPU time: ours / datatrove", None, "x"))
    bench.print_result(facts | {"rows": rows}, console)
    lines = [line for line in console.export_text().splitlines() if line.strip()][2:]
    for line, (what, value, unit, verdict) in zip(lines, measured, strict=False):
        assert what in line and f"{value:g} {unit}" in line and line.rstrip().endswith(verdict)
    assert "not measured" in lines[2] and "met" not in lines[2]


def test_the_sparse_split_is_as_large_as_it_says_and_can_be_read(tmp_path):
    bench.write_sparse(tmp_path / "split", 5, 5 * (TOKENS // PARTS))
    with TokenShards.open(tmp_path / "split") as shards:
        assert shards.num_tokens == 5 * (TOKENS // PARTS)
        for offset in (0, TOKENS // PARTS - 3, shards.num_tokens - 10):
            assert np.array_equal(shards.read(offset, 10), np.zeros(10))
    files = list((tmp_path / "split").glob("*.bin"))
    assert sum(file.stat().st_size for file in files) == 2 * shards.num_tokens
    assert sum(file.stat().st_blocks for file in files) * 512 < 1_000_000


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--repeats", "0"], "--repeats 0"),
        (["--megabytes", "0"], "--megabytes 0"),
        (["--tokenizer", "/no/model"], "/no/model: cannot be read"),
        (["--tokenizer", "train:many"], "train:many"),
    ],
)
def test_what_cannot_be_measured(words, message):
    parser = argparse.ArgumentParser()
    bench.add_arguments(parser)
    with pytest.raises(UserError, match=message):
        bench.run(parser.parse_args(words))


def test_texts_come_from_packages():
    packages = bench.collect(300_000)
    assert 100_000 < sum(len(text.encode()) for text in packages) <= 300_000
