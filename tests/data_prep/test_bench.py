"""The bench measures what it says: equal ids, equal windows, a split that is really that large."""

import argparse
import importlib.util
from pathlib import Path
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
def results(model: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What is measured, of small parts."""
    folder = tmp_path_factory.mktemp("bench")
    return {
        "time": "now",
        "cpu": "test",
        "documents": len(TEXTS),
        "bytes": sum(map(len, TEXTS)),
        "vocab_size": model.vocab_size,
        "encoding": bench.measure_encoding(model, TEXTS, 2),
        "builds": bench.measure_builds(model, TEXTS, folder / "builds", 1),
        "loader": bench.measure_reading(folder / "reading", 1, tokens=1 << 17, batches=20),
        "start": bench.measure_start(folder / "start", 1, parts=3, tokens=3_000_000),
    }


def test_encodings_and_builds_have_all_tokens(results: dict[str, Any], model: Tokenizer) -> None:
    encoding, builds = results["encoding"], results["builds"]
    assert encoding["tokens"] == sum(len(model.encode(text)) for text in TEXTS)
    assert set(encoding["rates"]) == {"cold", "warm", "sp.encode", "tokenizers"}
    assert all(rate > 0 for rate in (*encoding["rates"].values(), *encoding["ratios"].values()))
    expected = encoding["tokens"] + len(TEXTS)  # an EOS each
    assert {build["tokens"] for build in builds["runs"].values()} == {expected}
    assert builds["2 workers / 1"] > 0
    there = importlib.util.find_spec("datatrove") is not None
    assert (builds["ours / datatrove"] is not None) == there


def test_an_hf_tokenizer_is_measured_beside_the_package(model: Tokenizer) -> None:
    converted = Tokenizer(bench.as_tokenizer_json(model).encode(), "x")
    ratios = bench.measure_encoding(converted, TEXTS[:20], 1)["ratios"]
    assert ratios["cold / tokenizers"] > 0 and "cold / sp.encode" not in ratios


def test_the_table_says_what_holds(results: dict[str, Any]) -> None:
    slow = {
        **results,
        "loader": 99e6,
        "start": {"open_s": 0.05, "memory": 5_000_000},
        "builds": {**results["builds"], "ours / datatrove": None},
    }
    console = Console(record=True, width=120)
    bench.print_result(slow, console)
    rows = console.export_text().splitlines()
    held = {
        name: line for line in rows for name in ("loader", "opening", "datatrove") if name in line
    }
    assert "99 Mtok/s" in held["loader"] and " no " in held["loader"]
    assert "0.05 s" in held["opening"] and " yes " in held["opening"]
    assert "not measured" in held["datatrove"] and " yes " not in held["datatrove"]


def test_the_sparse_split_is_as_large_as_it_says_and_can_be_read(tmp_path: Path) -> None:
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
def test_what_cannot_be_measured(words: list[str], message: str) -> None:
    parser = argparse.ArgumentParser()
    bench.add_arguments(parser)
    with pytest.raises(UserError, match=message):
        bench.run(parser.parse_args(words))


def test_a_failed_build_is_shown() -> None:
    with pytest.raises(UserError, match="(?s)failed:\n.*--tokenizer, --out"):
        bench.run_python("-m", "data_prep", "build", "--source", "local", "--files", "x")


def test_texts_come_from_packages() -> None:
    packages = bench.collect(300_000)
    assert 100_000 < sum(len(text.encode()) for text in packages) <= 300_000
