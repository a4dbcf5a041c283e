"""`eval bench`: both sides are measured on equal requests; unequal answers are not compared."""

import argparse
import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers.dynamic_module_utils
from lm_eval.api.instance import Instance
from rich.console import Console

from canon_pretrain.core.errors import UserError
from canon_pretrain.data.tokenizer import Tokenizer
from canon_pretrain.model.args import flavor
from eval import bench
from eval.__main__ import main
from eval.bench import CASES, agreement, best_batch_size, make_requests, measure, parse_model
from eval.model.lm import CanonLM
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


def test_unequal_answers_are_not_compared(tiny, monkeypatch):
    right = CanonLM.loglikelihood

    def wrong(self: CanonLM, *args: Any, **options: Any) -> list[tuple[float, bool]]:
        return [(score + 0.01, greedy) for score, greedy in right(self, *args, **options)]

    monkeypatch.setattr(CanonLM, "loglikelihood", wrong)
    with pytest.raises(UserError, match=r"piqa: .*1e-02"):
        measure(argparse.Namespace(**vars(tiny) | {"cases": ["piqa"]}), print)


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


class Theirs:
    """A side whose time depends on its batch size alone."""

    device = torch.device("cpu")
    batch_size_per_gpu = 0


@pytest.mark.parametrize(
    ("seconds", "best", "tried"),
    [
        ({1: 3.0, 4: 2.0, 16: 1.0}, 16, [1, 4, 16]),
        ({1: 3.0, 4: 2.0, 16: 2.5}, 4, [1, 4, 16]),
        ({1: 1.0, 4: 2.0, 16: 0.5}, 1, [1, 4]),
        ({1: 3.0, 4: float("inf"), 16: 0.5}, 1, [1, 4]),  # out of memory
    ],
)
def test_theirs_get_their_best_batch_size(seconds, best, tried, monkeypatch):
    sizes: list[int] = []

    def answer(theirs: Theirs, requests: list[Instance]) -> tuple[list[Any], Any]:
        size = theirs.batch_size_per_gpu
        if len(requests) > 1:
            sizes.append(size)
        if seconds[size] == float("inf"):
            raise torch.OutOfMemoryError
        return [], seconds[size]

    monkeypatch.setattr(bench, "answer", answer)
    requests = [Instance("loglikelihood", {}, ("a", "b"), i) for i in range(8)]
    assert best_batch_size(Theirs(), requests) == best
    assert sizes == tried


def test_requests_are_of_the_lengths_of_the_suites():
    tokenizer = Tokenizer(bench.trained_tokenizer(32000), "test")
    asked, again = (
        {name: [request.args for request in requests] for name, requests in made.items()}
        for made in (make_requests(tokenizer, list(CASES), 1.0) for _ in range(2))
    )
    assert asked == again
    for name, least, most in (("hellaswag", 15, 120), ("jrt", 850, 1010), ("babilong", 900, 1300)):
        assert all(least <= len(tokenizer.encode(args[0])) <= most for args in asked[name])
    contexts = [args[0] for args in asked["hellaswag"]]
    assert all(len(set(contexts[i : i + 4])) == 1 for i in range(0, len(contexts), 4))
    heads = {args[0].partition("<context>")[0] for args in asked["babilong"]}
    assert len(heads) == 1 and len(tokenizer.encode(heads.pop())) > 200
    for context, choice in asked["boolq"]:
        assert len(tokenizer.encode(context + choice)) == len(tokenizer.encode(context)) + 1
    for name, new in (("jrt", 48), ("babilong", 20), ("birth-year", 5)):
        assert {args[1]["max_gen_toks"] for args in asked[name]} == {new}


def test_the_model_that_is_asked_for():
    expected = replace(flavor("8L512D"), position="nope", canon_set="ABCD")
    assert parse_model("8L512D") == expected
    found = parse_model("debug,position=rope,canon_set=,tie_embeddings=true,rope_theta=500")
    assert found == replace(
        flavor("debug"), position="rope", tie_embeddings=True, rope_theta=500.0, max_seq_len=2048
    )
    for text, message in (
        ("8L51D", "8L51D"),
        ("debug,positon=rope", 'Did you mean "position"'),
        ("debug,dim=wide", 'dim = "wide": Input should be a valid integer'),
    ):
        with pytest.raises(UserError, match=message):
            parse_model(text)


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
