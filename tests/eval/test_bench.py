"""`eval bench`: both sides are measured on equal requests; unequal answers are not compared."""

import io
import json
import os
import subprocess
import sys
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
from eval.bench.cases import CASES, Case, make_cases
from eval.bench.command import print_result
from eval.bench.model import parse_model, trained_tokenizer
from eval.bench.run import Sides, agreement, best_batch_size, measure
from eval.model.lm import CanonLM
from tests.data_folders import plant_data, sentence
from tests.hf_exports import plant_run
from tests.support import ROOT
from tests.variants import build, variant

TINY = "debug,vocab_size=400"


def bench(*words: object) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "eval", "bench", *map(str, words)]
    return subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120
    )


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The arguments of a small measurement."""
    modules = str(tmp_path / "modules")
    monkeypatch.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE", modules)
    monkeypatch.syspath_prepend(modules)
    monkeypatch.setenv("HF_MODULES_CACHE", modules)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    return {"dtype": "auto", "repeats": 2, "scale": 0.1, "say": lambda line: None}


@pytest.mark.slow
def test_every_case_is_measured_and_agrees(tiny: dict[str, Any], tmp_path: Path) -> None:
    result = measure(TINY, None, only=None, **tiny)
    json.dumps(result)
    assert [case["case"] for case in result["cases"]] == list(CASES)
    for case in result["cases"]:
        assert case["ratio_low"] <= case["ratio"] <= case["ratio_high"]
        assert case["hf"]["CPU"] > 0 < case["ours"]["CPU"]
    generated = [case for case in result["cases"] if case["group"] == "generation"]
    for case in generated:
        assert case["agreement"] == f"{case['requests']} of {case['requests']} texts"
    assert [g["target"] for g in result["groups"]] == [1.2, None, 1.5]
    assert result["dtype"] == "float32" and result["args"]["canon_set"] == "ABCD"
    console = Console(width=100, record=True, file=io.StringIO())
    print_result(result, console)
    text = console.export_text()
    assert "hellaswag" in text and "generation: " in text and "; goal 1.5 " in text
    assert not list(tmp_path.glob("canon-eval-bench-*"))


def test_unequal_answers_are_not_compared(
    tiny: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    right = CanonLM.loglikelihood

    def wrong(self: CanonLM, *args: Any, **options: Any) -> list[tuple[float, bool]]:
        return [(score + 0.01, greedy) for score, greedy in right(self, *args, **options)]

    monkeypatch.setattr(CanonLM, "loglikelihood", wrong)
    with pytest.raises(UserError, match=r"piqa: the two sides answer differently \(to 1e-02 nat"):
        measure(TINY, None, only=["piqa"], **tiny)


def case(name: str, requests: int = 8) -> Case:
    group, kind, _, _ = CASES[name]
    asked = [Instance(kind, {}, ("a", "b"), i) for i in range(requests)]
    return Case(name, group, kind, asked, 1)


def test_what_counts_as_the_same_answer() -> None:
    float32 = torch.float32
    same = [(-1.0, True), (-2.0, False)]
    assert (
        agreement(case("boolq"), same, [(-1.0005, True), (-2.0, False)], float32) == "to 5e-04 nat"
    )
    for other in ([(-1.002, True), (-2.0, False)], [(-1.0, True), (-2.0, True)]):
        with pytest.raises(UserError, match="boolq: the two sides"):
            agreement(case("boolq"), same, other, float32)
        agreement(case("boolq"), same, other, torch.bfloat16)
    # of a document, in proportion
    assert agreement(case("wikitext"), [-9000.0], [-9000.05], float32) == "to 5e-02 nat"
    with pytest.raises(UserError):
        agreement(case("wikitext"), [-9000.0], [-9000.2], float32)
    assert agreement(case("jrt"), [" a b", "c"], ["a b", "c"], float32) == "2 of 2 texts"
    assert agreement(case("jrt"), ["a\ufffd b"], ["a b"], float32) == "1 of 1 texts"
    with pytest.raises(UserError, match="1 of 2 texts"):
        agreement(case("jrt"), [" a b", "c"], ["a b", " c"], float32)


class Theirs:
    """A side whose time depends on its batch size alone."""

    device = torch.device("cpu")
    batch_size_per_gpu = 0

    def __init__(self, clocks: dict[int, float]) -> None:
        self.clocks, self.tried = clocks, []  # type: ignore[var-annotated]


@pytest.mark.parametrize(
    ("clocks", "best", "tried"),
    [
        ({1: 3.0, 4: 2.0, 16: 1.0}, 16, [1, 4, 16]),
        ({1: 3.0, 4: 2.0, 16: 2.5}, 4, [1, 4, 16]),
        ({1: 1.0, 4: 2.0, 16: 0.5}, 1, [1, 4]),
        ({1: 3.0, 4: float("inf"), 16: 0.5}, 1, [1, 4]),  # out of memory
    ],
)
def test_theirs_get_their_best_batch_size(
    clocks: dict[int, float], best: int, tried: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = Theirs(clocks)
    sides = Sides(ours=None, hf=theirs)  # type: ignore[arg-type]

    def answer(side: str, asked: Case, requests: list[Instance]) -> tuple[list[Any], Any]:
        assert side == "hf"
        if len(requests) > 1:
            theirs.tried.append(theirs.batch_size_per_gpu)
        if clocks[theirs.batch_size_per_gpu] == float("inf"):
            raise torch.OutOfMemoryError
        return [], {"clock": 1.0, "CPU": clocks[theirs.batch_size_per_gpu]}

    monkeypatch.setattr(sides, "answer", answer)
    assert best_batch_size(sides, case("piqa"), "CPU") == best
    assert theirs.tried == tried


def test_requests_are_of_the_lengths_of_the_suites() -> None:
    tokenizer = Tokenizer(trained_tokenizer(32000), "test")
    cases = {made.name: made for made in make_cases(tokenizer, list(CASES), 1.0)}
    again = make_cases(tokenizer, list(CASES), 1.0)
    assert [[r.args for r in c.requests] for c in again] == [
        [r.args for r in c.requests] for c in cases.values()
    ]

    def lengths(name: str) -> list[int]:
        return [len(tokenizer.encode(request.args[0])) for request in cases[name].requests]

    assert all(15 <= n <= 120 for n in lengths("hellaswag"))
    contexts = [request.args[0] for request in cases["hellaswag"].requests]
    assert all(len(set(contexts[i : i + 4])) == 1 for i in range(0, len(contexts), 4))
    assert all(850 <= n <= 1010 for n in lengths("jrt"))
    assert all(900 <= n <= 1300 for n in lengths("babilong"))
    heads = {request.args[0].partition("<context>")[0] for request in cases["babilong"].requests}
    assert len(heads) == 1 and len(tokenizer.encode(heads.pop())) > 200
    for request in cases["boolq"].requests:
        context, choice = request.args
        assert len(tokenizer.encode(context + choice)) == len(tokenizer.encode(context)) + 1
    for name, new in (("jrt", 48), ("babilong", 20), ("birth-year", 5)):
        assert {request.args[1]["max_gen_toks"] for request in cases[name].requests} == {new}


def test_the_model_that_is_asked_for() -> None:
    found = parse_model("8L512D")
    assert (found.num_layers, found.dim, found.position, found.canon_set) == (
        8,
        512,
        "nope",
        "ABCD",
    )
    found = parse_model("debug,position=rope,canon_set=,tie_embeddings=true,rope_theta=500")
    assert found == replace(
        flavor("debug"), position="rope", tie_embeddings=True, rope_theta=500.0, max_seq_len=2048
    )
    for words, message in (
        ("8L51D", "did you mean|Did you mean"),
        ("debug,positon=rope", "did you mean position"),
        ("debug,dim=wide", 'dim = "wide" is no int'),
    ):
        with pytest.raises(UserError, match=message):
            parse_model(words)


def test_bad_input_is_one_message() -> None:
    done = bench("--repeats", 0)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "--repeats 0 --scale None: expected at least 1" in done.stderr
    with pytest.raises(UserError, match="--cases jtr: .*did you mean jrt"):
        measure(TINY, None, dtype="auto", repeats=1, scale=None, only=["jtr"], say=print)


@pytest.mark.slow
def test_the_command_on_a_checkpoint(tmp_path: Path) -> None:
    """Trained on texts shorter than those that are asked about."""
    plant_data(tmp_path / "data", [[sentence(seed, 60) for seed in range(9)]], [sentence(9, 60)])
    model = build(replace(variant("rope ABCD k2 standard gqa"), vocab_size=300))
    checkpoint = plant_run(tmp_path / "run", model, data=tmp_path / "data")
    out = tmp_path / "bench.json"
    done = bench("--checkpoint", checkpoint, "--repeats", 1, "--scale", 0.2, "--json", out)
    assert done.returncode == 0, done.stderr
    assert "answers agree" in done.stdout and done.stderr == ""
    result = json.loads(out.read_text())
    assert len(result["cases"]) == len(CASES) and result["model"] == str(checkpoint)
