"""The bench measures what it says: equal ids, equal windows, a split that is really that large."""

import argparse
import importlib.util
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sentencepiece
from rich.console import Console
from tokenizers import Tokenizer as HF

from canon_pretrain.core.errors import UserError
from canon_pretrain.data.shards import TokenShards
from canon_pretrain.data.tokenizer import Tokenizer
from data_prep import bench, bench_build, bench_reading
from data_prep.bench_build import measure_builds
from data_prep.bench_encode import as_tokenizer_json, measure_encoding
from data_prep.bench_reading import PARTS, TOKENS, measure_reading, measure_start, write_sparse
from data_prep.train_tokenizer import train_tokenizer

TEXTS = [
    f"def value_{number}(x, y={number}):\n    return x[{number}:] + the_value.of(y)  # the end\n"
    for number in range(300)
]


@pytest.fixture(scope="module")
def model() -> Tokenizer:
    return Tokenizer(train_tokenizer(TEXTS, 330), "test")


@pytest.fixture(scope="module")
def results(model: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What `measure` returns, of small parts."""
    folder = tmp_path_factory.mktemp("bench")
    return {
        "time": "now",
        "cpu": "test",
        "documents": len(TEXTS),
        "bytes": sum(map(len, TEXTS)),
        "vocab_size": model.vocab_size,
        "encoding": measure_encoding(model, TEXTS, 2),
        "builds": measure_builds(model, TEXTS, folder / "builds", 1),
        "reading": measure_reading(folder / "reading", 1, tokens=1 << 17, batches=20),
        "start": measure_start(folder / "start", 1, parts=3, tokens=3_000_000),
    }


def arguments(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    bench.add_arguments(parser)
    return parser.parse_args(words)


def test_every_way_to_encode_is_measured(results: dict[str, Any], model: Tokenizer) -> None:
    encoding = results["encoding"]
    assert encoding["tokens"] == sum(len(model.encode(text)) for text in TEXTS)
    assert set(encoding["rates"]) == {
        *("ours, empty cache", "ours, the same text again", "ours, new text"),
        *("sp.encode", "tokenizers"),
    }
    assert all(rate > 0 for rate in (*encoding["rates"].values(), *encoding["ratios"].values()))
    assert encoding["notes"] == ["tokenizers: the same model, the same ids in 200 of 200 documents"]


def test_builds_end_with_all_tokens(results: dict[str, Any]) -> None:
    builds, documents = results["builds"], len(TEXTS)
    for name in ("ours, 1 worker", "ours, 2 workers"):
        build = builds["runs"][name]
        assert build["tokens"] == results["encoding"]["tokens"] + documents  # an EOS each
        assert 0 < build["cpu_s"]
    assert builds["2 workers / 1"] > 0
    if importlib.util.find_spec("datatrove") is None:
        assert builds["ours / datatrove"] is None
        assert builds["notes"] == ["datatrove: not measured, it is not installed"]
    else:
        assert builds["runs"]["datatrove, 1 task"]["tokens"] == build["tokens"]


def test_the_table_says_what_holds(results: dict[str, Any]) -> None:
    console = Console(record=True, width=120)
    slow = {**results, "reading": {"loader": 99e6, "memmap": 2e8, "loader / memmap": 0.495}}
    slow["start"] = {"open_s": 0.05, "first_batch_s": 0.01, "memory": 5_000_000}
    slow["builds"] = {**results["builds"], "ours / datatrove": None}
    bench.print_result(slow, console)
    lines = console.export_text().splitlines()

    def row(name: str) -> str:
        return next(line for line in lines if name in line)

    assert "99 Mtok/s" in row("loader, CRC") and "at least 100 Mtok/s │ no" in row("loader, CRC")
    assert "0.05 s" in row("433 parts") and "yes" in row("433 parts")
    assert "not measured" in row("datatrove") and "yes" not in row("ours / datatrove")


def test_a_converted_model_has_the_same_ids(model: Tokenizer) -> None:
    content = as_tokenizer_json(model.model)
    assert content is not None
    for converted in (HF.from_str(content), None):
        for text in ("", "the value  of\n\n x\u2581\u6f22", *TEXTS[:50]):
            if converted:
                ids = converted.encode(text, add_special_tokens=False).ids
            else:
                ids = Tokenizer(content.encode(), "converted").encode(text).tolist()
            assert ids == model.encode(text).tolist()


def test_a_model_that_is_no_bpe_is_not_converted() -> None:
    from io import BytesIO

    content = BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXTS),
        model_writer=content,
        model_type="unigram",
        vocab_size=60,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    assert as_tokenizer_json(content.getvalue()) is None
    encoding = measure_encoding(Tokenizer(content.getvalue(), "x"), TEXTS[:20], 1)
    assert "tokenizers" not in encoding["rates"] and "no BPE" in encoding["notes"][0]


def test_an_hf_tokenizer_is_measured_beside_the_package(model: Tokenizer) -> None:
    content = as_tokenizer_json(model.model)
    assert content is not None
    encoding = measure_encoding(Tokenizer(content.encode(), "x"), TEXTS[:20], 1)
    assert encoding["ratios"]["cold / tokenizers"] > 0
    assert encoding["ratios"]["cold / sp.encode"] is None


def test_the_sparse_split_is_as_large_as_it_says_and_can_be_read(tmp_path: Path) -> None:
    write_sparse(tmp_path / "split", 5, 5 * (TOKENS // PARTS))
    with TokenShards.open(tmp_path / "split") as shards:
        assert shards.num_tokens == 5 * (TOKENS // PARTS)
        for offset in (0, TOKENS // PARTS - 3, shards.num_tokens - 10):
            assert np.array_equal(shards.read(offset, 10), np.zeros(10))
    files = list((tmp_path / "split").glob("*.bin"))
    assert sum(file.stat().st_size for file in files) == 2 * shards.num_tokens
    assert sum(file.stat().st_blocks for file in files) * 512 < 1_000_000


def test_a_failed_build_is_shown(model: Tokenizer, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="(?s)build --source failed:\n.*--tokenizer, --out"):
        bench_build._run(["-m", "data_prep", "build", "--source", "local", "--files", "x"])
    with pytest.raises(UserError, match="(?s)bench: opening .*no such folder"):
        bench_reading._start_once(tmp_path / "none")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--repeats", "0"], "--repeats 0 --megabytes 96: expected at least 1"),
        (["--megabytes", "0"], "expected at least 1, and more than 0"),
        (["--files", "/no/where"], "/no/where"),
        (["--tokenizer", "/no/model"], "/no/model: cannot be read"),
        (["--tokenizer", "train:many"], "expected train:N with a number"),
    ],
)
def test_what_cannot_be_measured(words: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        bench.run(arguments(*words))


def test_texts_come_from_files_or_from_packages(tmp_path: Path) -> None:
    lines = "".join(json.dumps({"body": text}) + "\n" for text in TEXTS)
    (tmp_path / "some.jsonl").write_text(lines)
    assert bench._collect([tmp_path], "body", 10**9) == TEXTS
    assert len(bench._collect([tmp_path], "body", 1000)) < 20
    packages = bench._collect([], None, 300_000)
    assert 100_000 < sum(len(text.encode()) for text in packages) <= 300_000
    with pytest.raises(UserError, match="1 document.s., expected 2 at least"):
        bench._collect([tmp_path], "body", 1)
