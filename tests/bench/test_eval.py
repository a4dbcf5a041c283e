"""`eval bench`: equal requests for both sides; different answers are an error."""

import json
from dataclasses import replace

import pytest
import torch

from tests.bench.__main__ import main
from tests.bench.eval import CASES, agreement
from tests.data_folders import make_data_folder, sentence
from tests.hf_exports import isolate_remote_code, plant_run
from tests.support import refused
from tests.variants import build, variant

SAME = [(-1.0, True), (-2.0, False)]


@pytest.mark.parametrize(
    ("name", "ours", "theirs", "description"),
    [
        ("boolq", SAME, [(-1.0005, True), (-2.0, False)], "to 5e-04 nat"),
        ("wikitext", [-9000.0], [-9000.05], "to 5e-02 nat"),  # of a document, in proportion
        ("jrt", [" a b", "c"], ["a b", "c"], "2 of 2 texts"),
        ("jrt", ["a\ufffd b"], ["a b"], "1 of 1 texts"),
    ],
    ids=["choice", "document", "texts", "cut text"],
)
def test_answers_that_agree(name, ours, theirs, description):
    assert agreement(name, ours, theirs, torch.float32) == description


@pytest.mark.parametrize(
    ("name", "ours", "theirs"),
    [
        ("boolq", SAME, [(-1.002, True), (-2.0, False)]),
        ("boolq", SAME, [(-1.0, True), (-2.0, True)]),
        ("wikitext", [-9000.0], [-9000.2]),
        ("jrt", [" a b", "c"], ["a b", " c"]),
    ],
    ids=["choice", "greedy", "document", "texts"],
)
def test_answers_that_differ_are_refused_in_float32(name, ours, theirs):
    agreement(name, ours, theirs, torch.bfloat16)
    with refused("eval.bench_differs", case=name):
        agreement(name, ours, theirs, torch.float32)


@pytest.mark.system
@pytest.mark.parametrize("trained", [False, True])
def test_every_case_is_measured_and_agrees(trained, tmp_path, monkeypatch):
    """A trained model may have a shorter max_seq_len than the requests."""
    isolate_remote_code(monkeypatch, tmp_path / "modules")
    options = ["--model", "debug,vocab_size=400"]
    if trained:
        texts = [sentence(seed, 60) for seed in range(10)]
        make_data_folder(tmp_path / "data", [texts[:9]], texts[9:])
        model = build(replace(variant("rope ABCD k2 standard gqa"), vocab_size=300))
        checkpoint = plant_run(tmp_path / "run", model, data=tmp_path / "data")
        options = ["--checkpoint", str(checkpoint)]
    out = tmp_path / "bench.json"

    main(["eval", *options, "--repeats", "2", "--scale", "0.1", "--json", str(out)])

    result = json.loads(out.read_text())
    assert [case["case"] for case in result["cases"]] == list(CASES)
    for case in result["cases"]:
        assert case["ratio_low"] <= case["ratio"] <= case["ratio_high"]
        assert case["base_s"] > 0
        assert case["other_s"] > 0
        if case["group"] == "generation":
            assert case["agreement"] == f"{case['requests']} of {case['requests']} texts"
    assert [g["target"].split(":")[0] for g in result["groups"]] == ["1.2 x", "", "1.5 x"]
