"""`python -m eval run` on a run with text: suites, task files, stored results and errors."""

import json
import math
import operator
import shutil

import datasets
import numpy as np
import pytest
import torch
from lm_eval.tasks import TaskManager

import eval.harness
from canon_pretrain.checkpoint.weights import strip_to_weights
from canon_pretrain.checkpoint.writer import save_no_dist
from canon_pretrain.core.cli import Parser
from canon_pretrain.core.files import write_json
from canon_pretrain.data.mixture import Mixture
from canon_pretrain.data.shard_writer import write_shards
from canon_pretrain.data.shards import TokenShards
from canon_pretrain.hf.loading import load_model
from canon_pretrain.report.record import read_runs
from canon_pretrain.run.folder import RunFolder
from canon_pretrain.run.results import (
    PartialResults,
    Score,
    TaskAnswers,
    TaskResult,
    read_results,
    read_samples,
)
from eval.__main__ import main
from eval.harness import open_tasks
from eval.run_command import add_evaluation_options
from eval.schedule import Request, Schedule, to_argv
from eval.scoring import ask
from eval.suite_names import harness_names
from tests.checkpoint_folders import small_disk
from tests.eval_fixtures import stage_fixtures
from tests.eval_text_runs import MAX_LENGTH, WORDS, write_run
from tests.scripted_lm import ScriptedLM
from tests.support import error_codes

SHORT = ("--max_length", MAX_LENGTH)  # instead of 8,192 for the probes


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return write_run(tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="module", autouse=True)
def staged(tmp_path_factory):
    """WikiText is the only staged data set."""
    folder = stage_fixtures(tmp_path_factory.mktemp("staged"), ["wikitext"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CANON_EVAL_DATA", str(folder))
        yield


@pytest.fixture
def copy(run, tmp_path):
    """A copy of the run and its data."""
    ignore = shutil.ignore_patterns("evals")
    shutil.copytree(run.parent, tmp_path / "copy", ignore=ignore)
    return tmp_path / "copy" / "run"


@pytest.fixture
def evaluate(run, capsys):
    """Evaluate a suite and return what was printed; `refused`: the expected error's code."""

    def evaluating(suite, *words, of=run, step=3, refused=""):
        argv = ["run", "--checkpoint", of / "checkpoint" / f"step-{step}", "--suite", suite]
        if not refused:
            main([*map(str, argv), *map(str, words)])
            return capsys.readouterr().out
        with pytest.raises(SystemExit, match="2"):
            main([*map(str, argv), *map(str, words)])
        error = capsys.readouterr().err
        assert error_codes(error) == [refused] and error.count("\n") == 1
        return error

    return evaluating


def is_new(printed):
    """Whether a suite was evaluated, and not read from its results."""
    assert ("written to" in printed) != ("read from" in printed)
    return "written to" in printed


def paths_of(run, suite):
    return [*(run / "evals/step-3" / suite).glob("*/results.json")]


def result_of(run, suite):
    (path,) = paths_of(run, suite)
    return read_results(path)


def change_config(run, change):
    record = json.loads((run / "config.json").read_text())
    change(record)
    (run / "config.json").write_text(json.dumps(record))


def test_without_wikitext_only_sets_without_text(copy, evaluate, tmp_path, monkeypatch):
    """The command that stages the missing text is printed (issue 17, item 2)."""
    monkeypatch.setenv("CANON_EVAL_DATA", str(tmp_path / "none"))
    printed = evaluate("birth-year", *SHORT, "--limit", 1, of=copy)
    assert "1-hop-256" in printed and "--only wikitext" in printed
    assert set(result_of(copy, "birth-year").scores) == {"1-hop-0", "1-hop-random-0", "2-hop-0"}
    assert "eval stage" in evaluate("1-hop-256", *SHORT, of=copy, refused="probes.missing")
    with small_disk(tmp_path / "full", "size=64k"):
        words = (*SHORT, "--out", tmp_path / "full/out")
        assert "full/out/probes" in evaluate("birth-year", *words, refused="eval.cannot_write")


@pytest.mark.system
def test_a_junk_file_is_another_question(copy, evaluate, tmp_path):
    """It has its own sets and results (issue 17, item 2)."""
    words, junk = ("1-hop-256", *SHORT, "--limit", 1), tmp_path / "junk.txt"
    junk.write_text(" ".join(f"Here is a marked line of {word}." for word in WORDS * 5))
    for more in ((), ("--junk", junk)):
        assert is_new(evaluate(*words, *more, of=copy))
        assert not is_new(evaluate(*words, *more, of=copy))
    frozen = [path.read_text() for path in (copy / "evals/probes").glob("1-hop-256-*.jsonl")]
    assert sorted("marked line" in text for text in frozen) == [False, True]


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
def task_file(tmp_path):
    (tmp_path / "colours.py").write_text(LOAD)
    (tmp_path / "colours.yaml").write_text(TASK)
    return tmp_path / "colours.yaml"


def test_a_users_task_file(copy, evaluate, task_file):
    assert is_new(evaluate(str(task_file), of=copy))
    results = result_of(copy, "colours")
    score = results.scores["colours"]["acc"]
    assert results.num_samples == {"colours": 3}
    assert score.stderr == pytest.approx((score.value * (1 - score.value) / 2) ** 0.5)
    assert not is_new(evaluate(str(task_file), of=copy))
    task_file.with_name("colours.py").write_text(LOAD.replace("Blood", "Milk"))
    assert is_new(evaluate(str(task_file), of=copy))  # another question
    # a group's tasks may be in its folder, or ours
    path = task_file.with_name("many.yaml")
    path.write_text("group: many\ntask:\n  - colours\n  - zen_of_python\n")
    evaluate(str(path), of=copy)
    assert list(result_of(copy, "many").scores) == ["colours", "zen_of_python"]


@pytest.mark.parametrize("kind", ["multiple_choice", "generate_until"])
def test_cut_contexts_are_counted(copy, evaluate, task_file, kind):
    """By task in results.json, and printed (issue 17, item 3)."""
    task_file.with_name("colours.py").write_text(LOAD.replace('"Blood is"', '"Blood " * 40'))
    if kind == "generate_until":
        task_file.write_text(GENERATE + "generation_kwargs: {max_gen_toks: 20}\n")
    for _ in range(2):  # also from stored results
        printed = evaluate(str(task_file), "--max_length", 50, of=copy)
        assert result_of(copy, "colours").truncated == {"colours": 1}
        assert "1 of 3" in printed
    assert "of 3" not in evaluate(str(task_file), *SHORT, of=copy)


SHARED = """
import datasets
def load(**_):
    rows = [{"question": f"{k} {k % 3 if k < 9 else k}", "answer": str(k % 2), "page": k // 4}
            for k in range(12)]
    return {"test": datasets.Dataset.from_list(rows)}
"""


@pytest.mark.parametrize("source", ["", ", source: page"])
def test_standard_errors_and_bounds_of_scores(task_file, source):
    """Over items, or over the sources that a task names; Wilson's interval for 0 and 1 (issue 17,
    item 3)."""
    task_file.with_name("colours.py").write_text(SHARED)
    task_file.write_text(GENERATE + f"metadata: {{version: 1{source}}}\n")
    task = open_tasks("colours", task_file, {}, None, None)["colours"]

    def score_of(answer):
        return task.run(ScriptedLM(answer), operator.call)["colours"].scores["exact_match"]

    score = score_of(lambda request: request.args[0].split()[-1])
    right = np.array([float(str(k % 3 if k < 9 else k) == str(k % 2)) for k in range(12)])
    assert 0 < score.value == right.mean() < 1 and score.bound is None
    means = right.reshape(3, 4).mean(axis=1) if source else right
    assert score.stderr == pytest.approx(np.sqrt(means.var(ddof=1) / len(means)))
    end = 1.959964**2 / (len(means) + 1.959964**2)
    for answer, value, bound in ((None, 0, end), ("answer", 1, 1 - end)):
        score = score_of(lambda request, answer=answer: request.doc.get(answer, "none"))
        assert score.value == value and score.stderr is None
        assert score.bound == pytest.approx(bound)


FRAGILE = TASK.replace("aggregation: mean", "aggregation: !function colours.aggregate")


@pytest.fixture
def fragile_group(task_file):
    """Two tasks, of which the first has an aggregate that divides by zero."""
    module = task_file.with_name("colours.py")
    module.write_text(LOAD + "def aggregate(values):\n    return 1 / 0\n")
    task_file.write_text(FRAGILE)
    path = task_file.with_name("many.yaml")
    path.write_text("group: many\ntask:\n  - colours\n  - zen_of_python\n")
    return path


def test_a_failing_metric_ends_neither_task_nor_command(copy, evaluate, fragile_group):
    """Its score is null, what follows is evaluated, and the exit code is 2, also when read again;
    readers of results show the reason."""
    for how in ("written to", "read from"):
        said = evaluate(f"{fragile_group},validation", of=copy, refused="eval.incomplete")
        assert "colours" in said and "ZeroDivisionError" in said
        results = result_of(copy, "many")
        failed = results.scores["colours"]["acc"]
        assert failed.value is None and "ZeroDivisionError" in failed.why
        assert results.scores["zen_of_python"]["bits_per_byte"].value > 0, how
        assert len(read_samples(paths_of(copy, "many")[0].parent)["colours"]) == 3
        assert result_of(copy, "validation").scores["validation"]["bits_per_byte"].value > 0
    assert not [*copy.glob("evals/*/many/*/unfinished")]


def test_answers_outlive_a_metric_that_never_ends(copy, evaluate, fragile_group, monkeypatch):
    """Ctrl-C in an aggregation: the next call asks the model only what was not answered."""
    module = fragile_group.with_name("colours.py")
    module.write_text(module.read_text().replace("1 / 0", "_interrupt()"))
    interrupt = "    if 'INTERRUPT' in os.environ:\n        raise KeyboardInterrupt\n"
    module.write_text(f"{module.read_text()}import os\ndef _interrupt():\n{interrupt}")
    monkeypatch.setenv("INTERRUPT", "1")
    with pytest.raises(SystemExit, match="130"):
        evaluate(str(fragile_group), of=copy)
    (stored,) = copy.glob("evals/*/many/*/unfinished/colours.answers.json")
    answers = json.loads(stored.read_text())["responses"]
    assert len(answers) == 9

    asked: list[str] = []
    monkeypatch.setattr(
        eval.harness, "ask", lambda lm, task: asked.append(task.task_name) or ask(lm, task)
    )
    monkeypatch.delenv("INTERRUPT")
    with pytest.raises(SystemExit, match="2"):
        evaluate(str(fragile_group), of=copy)
    assert asked == ["zen_of_python"]
    items = read_samples(paths_of(copy, "many")[0].parent)["colours"]
    assert [pair for item in items for pair in item["answers"]] == [a for (a,) in answers]
    assert result_of(copy, "many").scores["colours"]["acc"].value is None


def test_invalid_requests(evaluate, task_file):
    base = task_file.parent
    for name in ("file", "zen_of_python.yaml"):
        (base / name).write_text("")
    for suite, words, code in (
        (f"{base}/none.yaml", "", "eval.unknown_suite"),
        (f"{base}/zen_of_python.yaml", "", "eval.ambiguous_suite"),
        ("birth-year", "--limit 0", "eval.option_range"),
        ("birth-year", "--max_length 50", "eval.max_length"),
        ("birth-year", "--must_beat unigram", "eval.option_suite"),
        ("validation", f"--out {base}/file/x", "eval.cannot_write"),
    ):
        evaluate(suite, *words.split(), refused=code)


def test_what_does_not_load(copy, evaluate, task_file):
    task_file.write_text(TASK.replace("colours.load", "colours.lead"))
    assert str(task_file) in evaluate(str(task_file), refused="eval.task_file")
    data = copy.parent / "data"
    (data / "tokenizer.model").unlink()
    evaluate("birth-year", *SHORT, "--data", data, of=copy, refused="eval.no_tokenizer")
    whole = (copy / "config.json").read_text()
    for change, code in (
        (lambda r: r["identity"].update({"model.num_layers": 2}), "checkpoint.other_model"),
        (lambda r: r["config"]["data"].update(path="/nowhere"), "eval.data_moved"),
        (lambda r: r["config"].update(data={}), "eval.run_damaged"),
    ):
        change_config(copy, change)
        evaluate("validation", of=copy, refused=code)
        (copy / "config.json").write_text(whole)
    (copy / "checkpoint" / "step-3" / ".metadata").write_bytes(b"\x80\x04garbage")
    evaluate("validation", of=copy, refused="checkpoint.damaged")


def test_other_results_are_not_overwritten(evaluate, tmp_path, copy):
    """By trials, by other lengths and with --out; damaged ones are replaced."""
    evaluate("validation", of=copy)
    (whole,) = paths_of(copy, "validation")
    content = whole.read_bytes()
    evaluate("validation", "--limit", 2, of=copy)
    evaluate("validation", "--max_length", 100, of=copy)
    assert whole.read_bytes() == content and len(paths_of(copy, "validation")) == 3
    whole.write_text("{")
    assert is_new(evaluate("validation", of=copy)) and read_results(whole).asked["limit"] is None

    out = tmp_path / "out"
    evaluate("zen_of_python", "--out", out)
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    assert not is_new(evaluate("zen_of_python", "--out", out, of=copy))
    evaluate("zen_of_python", "--out", out, step=2, refused="eval.other_results")
    evaluate("zen_of_python", "--limit", 1, "--out", out, refused="eval.other_results")
    assert before == {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}


def test_results_belong_to_what_was_evaluated(copy, evaluate, tmp_path):
    """A renamed run, a copy, and weights kept by retention share results; a copy that was trained
    further has its own at the steps that differ (issue 17, items 10 and 22)."""
    words = ("--data", copy.parent / "data")
    write_json(copy / "run.json", {"run_id": "0123abcd", "created": "", "launches": 1})
    RunFolder(copy).log_file.touch()
    evaluate("zen_of_python", *words, of=copy)
    assert result_of(copy, "zen_of_python").asked["run_id"] == "0123abcd"
    moved = copy.rename(copy.with_name("moved"))
    strip_to_weights(moved / "checkpoint/step-3", moved / "checkpoint/stripped")
    shutil.rmtree(moved / "checkpoint/step-3")
    (moved / "checkpoint/stripped").rename(moved / "checkpoint/step-3")
    assert not is_new(evaluate("zen_of_python", *words, of=moved))

    other = tmp_path / "elsewhere" / "trained-on"
    shutil.copytree(moved, other, copy_function=shutil.copyfile)
    assert not is_new(evaluate("zen_of_python", *words, of=other))
    shutil.rmtree(other / "checkpoint/step-3")
    weights = dict(load_model(other / "checkpoint/step-2", torch.device("cpu")).named_parameters())
    weights["tok_embeddings.weight"] = torch.zeros(300, 32)
    save_no_dist(weights, other / "checkpoint/step-3", step=3)
    assert is_new(evaluate("zen_of_python", *words, of=other))
    found = [run.evaluations[-1].results for run in read_runs([moved, other])[0]]
    scores = [results.scores["zen_of_python"]["bits_per_byte"].value for results in found]
    assert scores[0] != scores[1] and found[0].asked["content"] != found[1].asked["content"]


def test_submit_and_run_agree_on_stored_results(copy, evaluate, tmp_path, monkeypatch):
    """Options of other suites do not count, files count by content, checkpoints by their weights
    (issue 17, item 3)."""
    (tmp_path / "a.toml").write_text("x = 1")
    monkeypatch.chdir(tmp_path)
    words = ["--option", "jrt_tokens=500", "--option", "prompts=a.toml"]

    def known(suite, words=words):
        parser = Parser()
        add_evaluation_options(parser)
        how = to_argv(vars(parser.parse_args([*words])))
        monkeypatch.chdir(tmp_path.parent)  # jobs run elsewhere
        is_known = Schedule(copy, Request([suite], how=how)).has_results(3, suite)
        monkeypatch.chdir(tmp_path)
        return is_known

    for suite in ("validation", "zen_of_python"):
        assert not known(suite)
        evaluate(suite, *words, of=copy)
        assert known(suite)
    assert not known("zen_of_python", ["--option", "jrt_tokens=500"])
    assert known("validation", []) and not known("validation", ["--max_length", "64"])
    (tmp_path / "a.toml").write_text("x = 2")
    assert not known("zen_of_python") and is_new(evaluate("zen_of_python", *words, of=copy))

    checkpoint = copy / "checkpoint/step-3"
    weights = dict(load_model(checkpoint, torch.device("cpu")).named_parameters())
    for values, is_known in ((weights, True), ({n: 0 * p for n, p in weights.items()}, False)):
        shutil.rmtree(checkpoint)
        save_no_dist(values, checkpoint, step=3)
        assert known("validation") is is_known
    assert is_new(evaluate("validation", of=copy))


@pytest.mark.system
def test_several_suites_and_tasks_of_lm_eval(copy, evaluate, monkeypatch, capsys):
    """`--suite a,b`, with any name of the installed lm_eval (issue 17, item 10)."""
    choices = {"text": ["river", "stone", "light", "house"], "label": list("ABCD")}
    row = {"id": "1", "question_stem": "What is in it?", "choices": choices, "answerKey": "B"}
    rows = datasets.Dataset.from_list([row] * 3)
    splits = datasets.DatasetDict(dict.fromkeys(("train", "validation", "test"), rows))
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: splits)
    evaluate("openbookqa,validation,openbookqa", of=copy)
    assert set(result_of(copy, "openbookqa").scores["openbookqa"]) == {
        "acc",
        "acc_norm",
        "gold_bits_per_byte",
    }
    assert len(paths_of(copy, "validation")) == 1
    assert not is_new(evaluate("openbookqa", of=copy))
    assert "zen_of_python" in evaluate("zen_of_pyton", refused="eval.unknown_suite")
    main(["tasks", "--grep", "^(openbookqa|jrt_fda|validation)$"])
    listed = [line.split()[:2] for line in capsys.readouterr().out.splitlines()]
    assert listed == [["validation", "suite"], ["jrt_fda", "ours"], ["openbookqa", "task"]]


@pytest.mark.system
def test_names_equal_lm_evals_index():
    """A scan of the files' text finds the names of lm_eval's index (issue 17, item 10)."""
    index = TaskManager().task_index
    ours = harness_names()
    # two tags are in templates that nothing includes
    assert index.keys() <= ours.keys() and len(ours.keys() - index.keys()) <= 2
    for name, entry in index.items():
        kind = "task" if entry.kind.name == "PY_TASK" else entry.kind.name.lower()
        assert ours[name].kind == kind
        assert kind == "tag" or ours[name].path == entry.yaml_path


def test_of_a_mixture_one_folder_is_named(copy, evaluate, tmp_path):
    first, second = copy.parent / "data", tmp_path / "second"
    shutil.copytree(first / "validation", second / "train")
    mixture = {"path": "", "paths": [str(first), str(second)], "weights": [0.25, 0.75]}
    fingerprint = Mixture.open([first, second], [0.25, 0.75]).fingerprint
    change_config(copy, lambda r: r["identity"].update(data_fingerprint=fingerprint))
    change_config(copy, lambda r: r["config"].update(data=mixture))
    evaluate("validation", of=copy, refused="eval.mixture")
    assert is_new(evaluate("validation", "--data", first, of=copy))
    change_config(copy, lambda r: r["config"].update(data=mixture | {"weights": [0.5, 0.5]}))
    evaluate("validation", "--data", first, of=copy, refused="eval.mismatch")


def test_validation_is_of_the_runs_own_text(copy, evaluate, tmp_path):
    """Another build's held-out part is refused, or scored with --held_out and recorded as such;
    the text of `validation.path` is used if the data have none (issue 17, items 4 and 17)."""
    part = copy.parent / "data" / "validation"
    with TokenShards.open(part) as shards:
        own, names = shards.fingerprint, ("vocab_size", "eos_id", "tokenizer_sha256")
        header = {name: getattr(shards, name) for name in names}

    def change(path):
        def record(found):
            found["config"] |= {"data": {"path": str(part.parent)}, "validation": {"path": path}}
            found["identity"]["held_out_fingerprint"] = f"none+{own}"  # a mixture's

        change_config(copy, record)

    change("")
    evaluate("validation", of=copy)
    shutil.move(part, tmp_path / "apart" / "validation")
    evaluate("validation", of=copy, refused="eval.no_held_out")
    document = [np.append(np.arange(5, 60), header["eos_id"])]
    write_shards(part, document, num_bytes=[99], **header)
    evaluate("validation", of=copy, refused="eval.mismatch")
    evaluate("validation", "--held_out", part.parent, of=copy)
    with TokenShards.open(part) as other:
        fingerprints = {own, other.fingerprint}
    paths = paths_of(copy, "validation")
    assert {read_results(path).asked["held_out_fingerprint"] for path in paths} == fingerprints
    shutil.rmtree(part)
    change(str(tmp_path / "apart"))
    assert not is_new(evaluate("validation", of=copy))


def test_partial_results_are_kept_per_question(tmp_path):
    asked = {"checkpoint": "c", "step": 3, "suite": "s", "limit": None, "train_fingerprint": "f"}
    items = [{"doc_id": 0, "acc": 1}, {"doc_id": 1, "acc": 0}]
    result = TaskResult({"acc": Score(0.5, 0.1)}, 2, items)
    kept, other = PartialResults(tmp_path, asked), PartialResults(tmp_path, asked | {"content": 1})
    kept.add("first", result)
    kept.add("a/b", result)
    answers = TaskAnswers([[(-1.5, True)], [(math.nan, False)], ["a", "b"], [-3.0]], [4], {1: "no"})
    kept.add_answers("a/b", answers)
    assert PartialResults(tmp_path, asked).read() == {"first": result, "a/b": result}
    found = kept.read_answers("a/b")
    assert repr(found.responses) == repr([[[-1.5, True]], [[math.nan, False]], ["a", "b"], [-3.0]])
    assert (found.truncated, found.failures) == ([4], {1: "no"})
    assert other.read() == {} and other.read_answers("a/b") is kept.read_answers("first") is None
    for torn in ("", "{", '{"task": "first"}', "null"):  # evaluated again
        (tmp_path / "unfinished" / "first.task.json").write_text(torn)
        assert list(kept.read()) == ["a/b"]
        (tmp_path / "unfinished" / "a%2Fb.answers.json").write_text(torn)
        assert kept.read_answers("a/b") is None
    kept.remove()
    assert not [*tmp_path.iterdir()]
