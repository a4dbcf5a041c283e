"""`python -m eval run` on a run that has text: suites, files and every error."""

import argparse
import json
import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from lm_eval.tasks import TaskManager

from canon_pretrain.checkpoint.weights import strip_to_weights
from canon_pretrain.checkpoint.writer import save_alone
from canon_pretrain.core.files import write_json
from canon_pretrain.data.mixture import Mixture
from canon_pretrain.data.shard_writer import write_shards
from canon_pretrain.data.shards import TokenShards
from canon_pretrain.model.args import ModelArgs
from canon_pretrain.model.transformer import Transformer
from canon_pretrain.report.evaluations import read_runs
from canon_pretrain.run.folder import RunFolder
from canon_pretrain.run.results import Results, read_results, read_samples
from eval.__main__ import main
from eval.harness import open_tasks
from eval.model.target import load_model
from eval.run_command import add_evaluation_options
from eval.schedule import Request, Schedule, to_argv
from eval.suite_names import harness_names
from tests.checkpoint_folders import small_disk
from tests.eval_fixtures import stage_fixtures
from tests.eval_text_runs import WORDS, write_texts
from tests.scripted_lm import ScriptedLM

MAX_LENGTH = 900  # three lengths of probes fit, in pieces of a vocabulary of 300
SHORT = ("--max_length", MAX_LENGTH)  # else the probes are given 8,192 tokens


def document(seed: int) -> str:
    picks = np.random.Philox(key=seed).random_raw(400) % np.uint64(len(WORDS))
    words = [WORDS[int(pick)] for pick in picks]
    return "\n".join(" ".join(words[i : i + 8]).capitalize() + "." for i in range(0, 400, 8))


def write_run(base: Path, vocab_size: int = 300, more: Sequence[str] = ()) -> Path:
    """Shards of text in base/data, and untrained checkpoints of steps 2 and 3 in base/run."""
    texts = [document(seed) for seed in range(6)]
    write_texts(base / "data", texts[:3], texts[3:], vocab_size, more)
    args = ModelArgs(
        vocab_size=vocab_size, num_layers=1, dim=32, num_heads=2, ffn_dim=48, max_seq_len=1000,
        canon_set="ABCD", position="nope",
    )  # fmt: skip
    model = Transformer(args)
    model.init_weights()
    run = base / "run"
    for step in (2, 3):
        save_alone(dict(model.named_parameters()), run / "checkpoint" / f"step-{step}", step=step)
    identity = {f"model.{name}": value for name, value in asdict(args).items()}
    identity["data_fingerprint"] = TokenShards.open(base / "data" / "train").fingerprint
    config = {"data": {"path": str(base / "data")}, "training": {"seq_len": MAX_LENGTH}}
    RunFolder(run).write_config(config, identity)
    return run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="module")
def wikitext(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of staged data that has WikiText alone."""
    return stage_fixtures(tmp_path_factory.mktemp("staged"), ["wikitext"])


@pytest.fixture(autouse=True)
def staged(wikitext: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CANON_EVAL_DATA", str(wikitext))


@pytest.fixture
def copy(run: Path, tmp_path: Path) -> Path:
    """A run of one's own, with its data."""
    ignore = shutil.ignore_patterns("evals")
    shutil.copytree(run.parent, tmp_path / "copy", ignore=ignore)
    return tmp_path / "copy" / "run"


Ask = Callable[..., str]


@pytest.fixture
def ask(run: Path, capsys: pytest.CaptureFixture[str]) -> Ask:
    """Evaluate step 3 and give what was printed; `code` is the expected exit code."""

    def asking(suite: str, *words: object, of: Path = run, step: int = 3, code: int = 0) -> str:
        argv = ["run", "--checkpoint", of / "checkpoint" / f"step-{step}", "--suite", suite]
        if not code:
            main([*map(str, argv), *map(str, words)])
            return capsys.readouterr().out
        with pytest.raises(SystemExit) as left:
            main([*map(str, argv), *map(str, words)])
        assert left.value.code == code
        error = capsys.readouterr().err
        assert error.startswith("error: ") and error.count("\n") == 1
        return error

    return asking


def paths_of(run: Path, suite: str) -> list[Path]:
    return [*(run / "evals/step-3" / suite).glob("*/results.json")]


def result_of(run: Path, suite: str) -> Results:
    (path,) = paths_of(run, suite)
    return read_results(path)


Change = Callable[[dict[str, Any]], Any]


def change_config(run: Path, change: Change) -> None:
    record = json.loads((run / "config.json").read_text())
    change(record)
    (run / "config.json").write_text(json.dumps(record))


def test_birth_year_from_checkpoint_to_results(run, ask):
    printed = ask("birth-year", *SHORT, "--limit", 3)
    assert "freezing the probes 1-hop-0 in" in printed
    assert "left out" in printed and "2-hop-4096 (max_length 900)" in printed
    (path,) = paths_of(run, "birth-year")
    results = read_results(path)
    assert {"1-hop-0", "1-hop-random-0", "2-hop-0"} <= set(results.scores)
    asked, records = results.asked["tasks"], read_samples(path.parent)
    for name, scores in results.scores.items():
        samples = records[name]
        assert set(scores) == {"exact", "rank"} and results.num_samples[name] == 3
        for metric, score in scores.items():
            assert score.value == pytest.approx(np.mean([sample[metric] for sample in samples]))
        assert asked[name]["primary"] == ["exact"] and asked[name]["version"] == 2
        assert asked[f"{name}_rank"]["part_of"] == name
        assert set(samples[0]) >= {"exact", "rank", "answers", "answers_rank", "doc_hash"}
    # another step answers the same probes; the same question is not asked again
    assert "freezing" not in ask("birth-year", *SHORT, "--limit", 3, step=2)
    assert "as found in" in ask("birth-year", *SHORT, "--limit", 3)


def test_without_wikitext_the_sets_without_text_are_asked(copy, ask, tmp_path, monkeypatch):
    """Issue 17, item 2: what is left out is said, with the command that stages it."""
    monkeypatch.setenv("CANON_EVAL_DATA", str(tmp_path / "none"))
    printed = ask("birth-year", *SHORT, "--limit", 1, of=copy)
    assert "1-hop-256" in printed and "eval stage --suite discriminative --only wikit" in printed
    found = result_of(copy, "birth-year").scores
    assert set(found) == {"1-hop-0", "1-hop-random-0", "2-hop-0"}
    assert "eval stage" in ask("1-hop-256", *SHORT, of=copy, code=2)


def test_a_junk_file_is_another_question(copy, ask, tmp_path):
    """Issue 17, item 2: with its own sets and results, whatever was asked before."""
    words, junk = (*SHORT, "--limit", 1), tmp_path / "junk.txt"
    junk.write_text(" ".join(f"Here is a marked line of {word}." for word in WORDS * 5))
    for more in ((), ("--junk", junk)):
        assert "written to" in ask("birth-year", *words, *more, of=copy)
        assert "as found in" in ask("birth-year", *words, *more, of=copy)
    frozen = [path.read_text() for path in (copy / "evals/probes").glob("1-hop-256-*.jsonl")]
    assert sorted("Here is a marked line" in text for text in frozen) == [False, True]
    assert len(paths_of(copy, "birth-year")) == 2
    assert "1-hop-256" in ask("1-hop-256", *words, "--junk", junk, of=copy)


TASK = """
task: colours
custom_dataset: !function colours.load
output_type: multiple_choice
test_split: test
doc_to_text: "{{question}}"
doc_to_choice: [red, green, blue]
doc_to_target: "{{answer}}"
metric_list:
  - metric: acc
    aggregation: mean
    higher_is_better: true
"""
GENERATE = (
    TASK.replace("multiple_choice", "generate_until")
    .replace("metric: acc", "metric: exact_match")
    .replace("doc_to_choice: [red, green, blue]\n", "")
)
LOAD = """
import random, datasets
def load(**_):
    questions = ["Grass is", "Blood is", "The sky is"]
    rows = [{"question": q, "answer": a} for q, a in zip(questions, [1, 0, 2], strict=True)]
    return {"test": datasets.Dataset.from_list(rows)}
"""


@pytest.fixture
def task_file(tmp_path: Path) -> Path:
    (tmp_path / "colours.py").write_text(LOAD)
    (tmp_path / "colours.yaml").write_text(TASK)
    return tmp_path / "colours.yaml"


def test_a_task_file_of_ones_own(copy, ask, task_file):
    assert "acc" in ask(str(task_file), of=copy)
    results = result_of(copy, "colours")
    score = results.scores["colours"]["acc"]
    assert results.num_samples == {"colours": 3}
    assert score.stderr == pytest.approx((score.value * (1 - score.value) / 2) ** 0.5)
    assert "as found in" in ask(str(task_file), of=copy)
    task_file.with_name("colours.py").write_text(LOAD.replace("Blood", "Milk"))
    assert "as found in" not in ask(str(task_file), of=copy)  # another question
    # the tasks of a group may lie beside it, or be ours
    path = task_file.with_name("many.yaml")
    path.write_text("group: many\ntask:\n  - colours\n  - zen_of_python\n")
    ask(str(path), of=copy)
    assert list(result_of(copy, "many").scores) == ["colours", "zen_of_python"]


SHARED = """
import datasets
def load(**_):
    rows = [{"question": f"{k} {k % 3 if k < 9 else k}", "answer": str(k % 2), "page": k // 4}
            for k in range(12)]
    return {"test": datasets.Dataset.from_list(rows)}
"""


@pytest.mark.parametrize("kind", ["multiple_choice", "generate_until"])
def test_cut_contexts_are_counted(copy, ask, task_file, kind):
    """Issue 17, item 3: in results.json, by task, and said in one line."""
    task_file.with_name("colours.py").write_text(LOAD.replace('"Blood is"', '"Blood " * 40'))
    if kind == "generate_until":
        task_file.write_text(GENERATE + "generation_kwargs: {max_gen_toks: 20}\n")
    for _ in range(2):  # the second time as found
        printed = ask(str(task_file), "--max_length", 50, of=copy)
        assert result_of(copy, "colours").truncated == {"colours": 1}
        assert "colours 1 of 3" in printed and "lost their beginning" in printed
    assert "lost their beginning" not in ask(str(task_file), *SHORT, of=copy)


@pytest.mark.parametrize("source", ["", ", source: page"])
def test_exact_match_has_a_standard_error(task_file, source):
    """Issue 17, item 3: exact_match has a standard error, over the sources if a task names them."""
    task_file.with_name("colours.py").write_text(SHARED)
    task_file.write_text(GENERATE + f"metadata: {{version: 1{source}}}\n")
    task = open_tasks("colours", task_file, {}, None, None)["colours"]
    parrot = ScriptedLM(lambda request: request.args[0].split()[-1])
    score = task.run(parrot)["colours"].scores["exact_match"]  # type: ignore[arg-type]
    right = np.array([float(str(k % 3 if k < 9 else k) == str(k % 2)) for k in range(12)])
    assert 0 < score.value == right.mean() < 1 and score.bound is None
    means = right.reshape(3, 4).mean(axis=1) if source else right
    assert score.stderr == pytest.approx(np.sqrt(means.var(ddof=1) / len(means)))


def test_scores_of_0_and_1_have_wilsons_interval(copy, ask, task_file):
    """Issue 17, item 3: not a standard error of 0."""
    task_file.with_name("colours.py").write_text(LOAD.replace("[1, 0, 2]", "[1, 1, 1]"))
    task_file.write_text(TASK.replace("[red, green, blue]", "[x, ' grass', y]"))
    printed = ask(str(task_file), of=copy)
    score = result_of(copy, "colours").scores["colours"]["acc"]
    end = 1.959964**2 / (3 + 1.959964**2)
    expected = end if score.value == 0 else 1 - end
    assert score.value in (0, 1) and score.stderr is None
    assert score.bound == pytest.approx(expected) and f"{expected:.4f}" in printed


def test_what_cannot_be_asked(ask, task_file):
    base = task_file.parent
    for name in ("file", "zen_of_python.yaml"):
        (base / name).write_text("")
    refused: list[tuple[str, str, str]] = [
        ("zen_of_pyton", "", 'Did you mean "zen_of_python"'),
        (f"{base}/zen_of_python.yaml", "", "'zen_of_python' is the name of another suite"),
        ("birth-year", "--limit 0", "--limit 0"),
        ("birth-year", "--max_length 50", "no set of birth-year fits max_length 50"),
        ("birth-year", "--must_beat unigram", "--must_beat is for --suite validation"),
        ("validation", f"--out {base}/file/x", "can't hold the results"),
    ]
    for suite, words, message in refused:
        assert message in ask(suite, *words.split(), code=2)


def test_what_does_not_load(copy, ask, task_file):
    task_file.write_text(TASK.replace("colours.load", "colours.lead"))
    error = ask(str(task_file), code=2)
    assert re.search(f"{task_file}: this task file does not load: .*has no function", error)
    (copy.parent / "data" / "tokenizer.model").unlink()
    words = ("--data", copy.parent / "data")
    error = ask("birth-year", *SHORT, *words, of=copy, code=2)
    assert "only --suite validation does without" in error
    whole = (copy / "config.json").read_text()
    changes: tuple[tuple[Change, str], ...] = (
        (lambda r: r["identity"].update({"model.num_layers": 2}), r"another model.*layers\.1\..*"),
        (lambda r: r["config"]["data"].update(path="/nowhere"), "moved to with --data"),
        (lambda r: r["config"].update(data={}), "config.json is damaged"),
    )
    for change, reason in changes:
        change_config(copy, change)
        assert re.search(reason, ask("validation", of=copy, code=2))
        (copy / "config.json").write_text(whole)
    (copy / "checkpoint" / "step-3" / ".metadata").write_bytes(b"\x80\x04garbage")
    assert "step-3 is damaged: .metadata has" in ask("validation", of=copy, code=2)


def test_a_full_disk_for_the_probes_is_one_message(ask, tmp_path):
    with small_disk(tmp_path / "full", "size=64k"):
        error = ask("birth-year", *SHORT, "--out", tmp_path / "full/out", code=2)
    assert "full/out/probes can't hold the results: No space left" in error


def test_other_results_are_not_written_over(ask, tmp_path, copy):
    out = tmp_path / "out"
    ask("zen_of_python", "--out", out)
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    assert "as found in" in ask("zen_of_python", "--out", out, of=copy)
    error = ask("zen_of_python", "--out", out, code=2, step=2)
    assert re.search(r"--out .* holds results of another question \(step 3, asked for is 2", error)
    assert "(limit None" in ask("zen_of_python", "--limit", 1, "--out", out, code=2)
    assert before == {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}


def test_a_trial_or_another_length_replaces_no_result(copy, ask):
    ask("validation", of=copy)
    (whole,) = paths_of(copy, "validation")
    before = whole.read_bytes()
    ask("validation", "--limit", 2, of=copy)
    ask("validation", "--max_length", 100, of=copy)
    assert whole.read_bytes() == before and len(paths_of(copy, "validation")) == 3
    whole.write_text("{")  # torn: asked again
    assert "written to" in ask("validation", of=copy)
    assert read_results(whole).asked["limit"] is None


def test_results_belong_to_what_was_evaluated(copy, ask, tmp_path):
    """Issue 17, items 10 and 22: a renamed run, a copy, and the weights that retention keeps have
    the results; a copy that was trained on has its own at the steps that differ."""
    words = ("--data", copy.parent / "data")
    write_json(copy / "run.json", {"run_id": "0123abcd", "created": "", "launches": 1})
    RunFolder(copy).log_file.touch()
    ask("zen_of_python", *words, of=copy)
    assert result_of(copy, "zen_of_python").asked["run_id"] == "0123abcd"
    moved = copy.rename(copy.with_name("moved"))
    strip_to_weights(moved / "checkpoint/step-3", moved / "checkpoint/stripped")
    shutil.rmtree(moved / "checkpoint/step-3")
    (moved / "checkpoint/stripped").rename(moved / "checkpoint/step-3")
    assert "as found in" in ask("zen_of_python", *words, of=moved)

    other = tmp_path / "elsewhere" / "trained-on"
    shutil.copytree(moved, other, copy_function=shutil.copyfile)
    assert "as found in" in ask("zen_of_python", *words, of=other)
    shutil.rmtree(other / "checkpoint/step-3")
    weights = dict(load_model(other / "checkpoint/step-2", torch.device("cpu")).named_parameters())
    weights["tok_embeddings.weight"] = torch.zeros(300, 32)
    save_alone(weights, other / "checkpoint/step-3", step=3)
    assert "written to" in ask("zen_of_python", *words, of=other)
    found = [run.evaluations[-1].results for run in read_runs([moved, other])]
    scores = [results.scores["zen_of_python"]["bits_per_byte"].value for results in found]
    assert scores[0] != scores[1] and found[0].asked["content"] != found[1].asked["content"]


def test_submit_and_run_agree_on_what_is_answered(copy, ask, tmp_path, monkeypatch):
    """Issue 17, item 3: an option of another suite's tasks is not part of a question, a file is by
    its content; results are of the weights, however often they are written."""
    (tmp_path / "a.toml").write_text("x = 1")
    monkeypatch.chdir(tmp_path)
    words = ["--option", "jrt_tokens=500", "--option", "prompts=a.toml"]

    def known(suite: str, words: Sequence[str] = words) -> bool:
        parser = argparse.ArgumentParser()
        add_evaluation_options(parser)
        how = to_argv(vars(parser.parse_args([*words])))
        monkeypatch.chdir(tmp_path.parent)  # jobs run elsewhere
        answered = Schedule(copy, Request([suite], how=how)).has_results(3, suite)
        monkeypatch.chdir(tmp_path)
        return answered

    for suite in ("validation", "zen_of_python"):
        assert not known(suite)
        ask(suite, *words, of=copy)
        assert known(suite)
    assert not known("zen_of_python", ["--option", "jrt_tokens=500"])
    assert known("validation", []) and not known("validation", ["--max_length", "64"])
    (tmp_path / "a.toml").write_text("x = 2")
    assert not known("zen_of_python") and "written to" in ask("zen_of_python", *words, of=copy)

    checkpoint = copy / "checkpoint/step-3"
    weights = dict(load_model(checkpoint, torch.device("cpu")).named_parameters())
    for values, is_known in ((weights, True), ({n: 0 * p for n, p in weights.items()}, False)):
        shutil.rmtree(checkpoint)
        save_alone(values, checkpoint, step=3)
        assert known("validation") is is_known
    assert "written to" in ask("validation", of=copy)


def test_several_suites_and_tasks_of_lm_evals_by_name(copy, ask, monkeypatch, capsys):
    """Issue 17, item 10: `--suite a,b`, and any name of the installed lm_eval."""
    choices = {"text": ["river", "stone", "light", "house"], "label": list("ABCD")}
    row = {"id": "1", "question_stem": "What is in it?", "choices": choices, "answerKey": "B"}
    rows = datasets.Dataset.from_list([row] * 3)
    splits = datasets.DatasetDict(dict.fromkeys(("train", "validation", "test"), rows))
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: splits)
    ask("openbookqa,validation,openbookqa", of=copy)
    assert set(result_of(copy, "openbookqa").scores["openbookqa"]) == {"acc", "acc_norm"}
    assert len(paths_of(copy, "validation")) == 1
    assert ask("openbookqa", of=copy).count("as found in") == 1
    main(["tasks", "--grep", "^(openbookqa|jrt_fda|validation)$"])
    listed = [line.split()[:2] for line in capsys.readouterr().out.splitlines()]
    assert listed == [["validation", "suite"], ["jrt_fda", "ours"], ["openbookqa", "task"]]


@pytest.mark.system
def test_names_are_those_of_lm_evals_own_index():
    """Issue 17, item 10: it parses 14,000 files; a scan of their text finds the same names."""
    index = TaskManager().task_index
    ours = harness_names()
    # two tags are in templates that nothing includes
    assert index.keys() <= ours.keys() and len(ours.keys() - index.keys()) <= 2
    for name, entry in index.items():
        kind = "task" if entry.kind.name == "PY_TASK" else entry.kind.name.lower()
        assert ours[name].kind == kind
        assert kind == "tag" or ours[name].path == entry.yaml_path


def test_of_a_mixture_one_folder_is_named(copy, ask, tmp_path):
    first, second = copy.parent / "data", tmp_path / "second"
    shutil.copytree(first / "validation", second / "train")
    mixture = {"path": "", "paths": [str(first), str(second)], "weights": [0.25, 0.75]}
    fingerprint = Mixture.open([first, second], [0.25, 0.75]).fingerprint
    change_config(copy, lambda r: r["identity"].update(data_fingerprint=fingerprint))
    change_config(copy, lambda r: r["config"].update(data=mixture))
    assert f"a mixture of {first}, {second}: name the one" in ask("validation", of=copy, code=2)
    assert "bits/byte" in ask("validation", "--data", first, of=copy)
    change_config(copy, lambda r: r["config"].update(data=mixture | {"weights": [0.5, 0.5]}))
    assert "is not what" in ask("validation", "--data", first, of=copy, code=2)


def test_validation_is_of_the_runs_own_text(copy, ask, tmp_path):
    """Issue 17, items 4 and 17: another build's held-out part is refused, or scored on purpose and
    recorded as such; the text of `validation.path` is found where the data have none."""
    part = copy.parent / "data" / "validation"
    with TokenShards.open(part) as shards:
        own, names = shards.fingerprint, ("vocab_size", "eos_id", "tokenizer_sha256")
        header = {name: getattr(shards, name) for name in names}

    def change(path: str) -> None:
        def record(found: dict[str, Any]) -> None:
            found["config"] |= {"data": {"path": str(part.parent)}, "validation": {"path": path}}
            found["identity"]["held_out_fingerprint"] = f"none+{own}"  # a mixture's

        change_config(copy, record)

    change("")
    ask("validation", of=copy)
    shutil.move(part, tmp_path / "apart" / "validation")
    assert "no held-out text" in ask("validation", of=copy, code=2)
    document = [np.append(np.arange(5, 60), header["eos_id"])]
    write_shards(part, document, num_bytes=[99], **header)
    assert "is not the held-out text of" in ask("validation", of=copy, code=2)
    ask("validation", "--held_out", part.parent, of=copy)
    with TokenShards.open(part) as other:
        fingerprints = {own, other.fingerprint}
    paths = paths_of(copy, "validation")
    assert {read_results(path).asked["held_out_fingerprint"] for path in paths} == fingerprints
    shutil.rmtree(part)
    change(str(tmp_path / "apart"))
    assert "as found in" in ask("validation", of=copy)
