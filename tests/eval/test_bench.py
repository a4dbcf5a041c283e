"""`eval bench`: both sides are measured on equal requests; unequal answers are not compared."""

import argparse
import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers.dynamic_module_utils
from rich.console import Console

from canon_pretrain.core.errors import UserError
from eval import bench
from eval.__main__ import main
from eval.bench import CASES, agreement, measure
from tests.data_folders import plant_data, sentence
from tests.hf_exports import plant_run
from tests.variants import build, variant


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> argparse.Namespace:
    modules = str(tmp_path / "modules")
    monkeypatch.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE", modules)
    monkeypatch.syspath_prepend(modules)
    monkeypatch.setenv("HF_MODULES_CACHE", modules)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    parser = argparse.ArgumentParser()
    bench.add_arguments(parser)
    return parser.parse_args("--model debug,vocab_size=400 --repeats 2 --scale 0.1".split())


@pytest.mark.slow
def test_every_case_is_measured_and_agrees(tiny, tmp_path):
    result = measure(tiny, print)
    json.dumps(result)
    assert [case["case"] for case in result["cases"]] == list(CASES)
    for case in result["cases"]:
        assert case["ratio_low"] <= case["ratio"] <= case["ratio_high"]
        assert case["base_s"] > 0 < case["other_s"]
        if case["group"] == "generation":
            assert case["agreement"] == f"{case['requests']} of {case['requests']} texts"
    assert [g["target"].split(":")[0] for g in result["groups"]] == ["1.2 x", "", "1.5 x"]
    assert result["dtype"] == "float32" and result["args"]["canon_set"] == "ABCD"
    console = Console(width=100, record=True, file=io.StringIO())
    bench.print_result(result, console)
    text = console.export_text()
    assert "generation: " in text and "; target 1.5 x: " in text
    assert not list(tmp_path.glob("canon-eval-bench-*"))


SAME = [(-1.0, True), (-2.0, False)]


@pytest.mark.parametrize(
    ("name", "ours", "theirs", "found"),
    [
        ("boolq", SAME, [(-1.0005, True), (-2.0, False)], "to 5e-04 nat"),
        ("boolq", SAME, [(-1.002, True), (-2.0, False)], None),
        ("boolq", SAME, [(-1.0, True), (-2.0, True)], None),
        ("wikitext", [-9000.0], [-9000.05], "to 5e-02 nat"),  # of a document, in proportion
        ("wikitext", [-9000.0], [-9000.2], None),
        ("jrt", [" a b", "c"], ["a b", "c"], "2 of 2 texts"),
        ("jrt", ["a\ufffd b"], ["a b"], "1 of 1 texts"),
        ("jrt", [" a b", "c"], ["a b", " c"], None),
    ],
)
def test_what_counts_as_the_same_answer(name, ours, theirs, found):
    if found is None:
        agreement(name, ours, theirs, torch.bfloat16)
        with pytest.raises(UserError, match=name):
            agreement(name, ours, theirs, torch.float32)
    else:
        assert agreement(name, ours, theirs, torch.float32) == found


@pytest.mark.parametrize("words", [["--repeats", "0"], ["--scale", "0"], ["--cases", "jtr"]])
def test_bad_input_is_one_message(words, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["bench", *words])
    error = capsys.readouterr().err
    assert ended.value.code == 2 and error.count("\n") == 1 and all(word in error for word in words)


@pytest.mark.slow
def test_the_command_on_a_checkpoint(tiny, tmp_path, capsys):
    """Trained on texts shorter than those that are asked about."""
    plant_data(tmp_path / "data", [[sentence(seed, 60) for seed in range(9)]], [sentence(9, 60)])
    model = build(replace(variant("rope ABCD k2 standard gqa"), vocab_size=300))
    checkpoint = plant_run(tmp_path / "run", model, data=tmp_path / "data")
    out = tmp_path / "bench.json"
    words = ["--repeats", "1", "--scale", "0.2", "--json", str(out)]
    main(["bench", "--checkpoint", str(checkpoint), *words])
    assert "answers" in capsys.readouterr().out
    result = json.loads(out.read_text())
    assert len(result["cases"]) == len(CASES) and result["model"] == str(checkpoint)
