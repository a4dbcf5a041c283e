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
    """A run on text."""
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
        checkpoint = of / "checkpoint" / f"step-{step}"
        argv = ["run", "--checkpoint", str(checkpoint), "--suite", suite, *map(str, words)]
        if not refused:
            main(argv)
            return capsys.readouterr().out

        with pytest.raises(SystemExit, match="2"):
            main(argv)
        error = capsys.readouterr().err
        assert error_codes(error) == [refused]
        assert error.count("\n") == 1
        return error

    return evaluating


def is_new(printed):
    """Whether a suite was evaluated, and not read from its results."""
    assert ("written to" in printed) != ("read from" in printed)
    return "written to" in printed


def paths_of(run, suite):
    """Return the paths of a suite's results."""
    return [*(run / "evals/step-3" / suite).glob("*/results.json")]


def result_of(run, suite):
    """Return the only results of a suite."""
    (path,) = paths_of(run, suite)
    return read_results(path)


def value_of(results, task, metric):
    """Return the value of a score."""
    return results.scores[task][metric].value


def change_config(run, change):
    """Apply `change` to a run's config.json."""
    record = json.loads((run / "config.json").read_text())
    change(record)
    (run / "config.json").write_text(json.dumps(record))


def test_without_wikitext_only_sets_without_text(copy, evaluate, tmp_path, monkeypatch):
    """The command that stages the missing text is printed (issue 17, item 2)."""
    monkeypatch.setenv("CANON_EVAL_DATA", str(tmp_path / "none"))

    printed = evaluate("birth-year", *SHORT, "--limit", 1, of=copy)

    assert "1-hop-256" in printed
    assert "--only wikitext" in printed
    assert set(result_of(copy, "birth-year").scores) == {"1-hop-0", "1-hop-random-0", "2-hop-0"}
    error = evaluate("1-hop-256", *SHORT, of=copy, refused="probes.missing")
    assert "eval stage" in error


def test_a_full_disk_has_no_sets(evaluate, tmp_path, monkeypatch):
    monkeypatch.setenv("CANON_EVAL_DATA", str(tmp_path / "none"))
    with small_disk(tmp_path / "full", "size=64k"):
        out = tmp_path / "full/out"

        error = evaluate("birth-year", *SHORT, "--out", out, refused="eval.cannot_write")

        assert "full/out/probes" in error


@pytest.mark.system
def test_a_junk_file_is_another_question(copy, evaluate, tmp_path):
    """It has its own sets and results (issue 17, item 2)."""
    junk = tmp_path / "junk.txt"
    junk.write_text(" ".join(f"Here is a marked line of {word}." for word in WORDS * 5))

    for option in ((), ("--junk", junk)):
        assert is_new(evaluate("1-hop-256", *SHORT, "--limit", 1, *option, of=copy))
        assert not is_new(evaluate("1-hop-256", *SHORT, "--limit", 1, *option, of=copy))

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
    """The path of a user's task file, with three multiple-choice questions."""
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

    # another question
    task_file.with_name("colours.py").write_text(LOAD.replace("Blood", "Milk"))
    assert is_new(evaluate(str(task_file), of=copy))


def test_a_users_group_has_tasks_of_its_folder_and_ours(copy, evaluate, task_file):
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


WILSON_Z = 1.959964


@pytest.mark.parametrize("source", ["", ", source: page"], ids=["items", "sources"])
def test_standard_errors_and_bounds_of_scores(task_file, source):
    """Over items, or over the sources that a task names; Wilson's interval for 0 and 1 (issue 17,
    item 3)."""
    task_file.with_name("colours.py").write_text(SHARED)
    task_file.write_text(GENERATE + f"metadata: {{version: 1{source}}}\n")
    task = open_tasks("colours", task_file, {}, None, None)["colours"]

    def score_of(answer):
        result = task.run(ScriptedLM(answer), operator.call)["colours"]
        return result.scores["exact_match"]

    # the model copies the last word of the question, which is right for some items
    score = score_of(lambda request: request.args[0].split()[-1])
    is_right = np.array([float(str(k % 3 if k < 9 else k) == str(k % 2)) for k in range(12)])
    means = is_right.reshape(3, 4).mean(axis=1) if source else is_right
    assert 0 < score.value == is_right.mean() < 1
    assert score.bound is None
    assert score.stderr == pytest.approx(np.sqrt(means.var(ddof=1) / len(means)))

    upper_bound_of_0 = WILSON_Z**2 / (len(means) + WILSON_Z**2)
    wrong = score_of(lambda request: "none")
    assert (wrong.value, wrong.stderr) == (0, None)
    assert wrong.bound == pytest.approx(upper_bound_of_0)

    right = score_of(lambda request: request.doc["answer"])
    assert (right.value, right.stderr) == (1, None)
    assert right.bound == pytest.approx(1 - upper_bound_of_0)


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
    for _ in ("written", "read again"):
        error = evaluate(f"{fragile_group},validation", of=copy, refused="eval.incomplete")
        assert "colours" in error
        assert "ZeroDivisionError" in error

        results = result_of(copy, "many")
        failed = results.scores["colours"]["acc"]
        assert failed.value is None
        assert "ZeroDivisionError" in failed.why
        assert value_of(results, "zen_of_python", "bits_per_byte") > 0
        (path,) = paths_of(copy, "many")
        assert len(read_samples(path.parent)["colours"]) == 3
        assert value_of(result_of(copy, "validation"), "validation", "bits_per_byte") > 0

    assert not [*copy.glob("evals/*/many/*/unfinished")]


INTERRUPT = """
import os
def _interrupt():
    if 'INTERRUPT' in os.environ:
        raise KeyboardInterrupt
"""


def test_answers_outlive_a_metric_that_never_ends(copy, evaluate, fragile_group, monkeypatch):
    """Ctrl-C in an aggregation: the next call asks the model only what was not answered."""
    module = fragile_group.with_name("colours.py")
    module.write_text(module.read_text().replace("1 / 0", "_interrupt()") + INTERRUPT)
    monkeypatch.setenv("INTERRUPT", "1")
    with pytest.raises(SystemExit, match="130"):
        evaluate(str(fragile_group), of=copy)

    (stored,) = copy.glob("evals/*/many/*/unfinished/colours.answers.json")
    answers = json.loads(stored.read_text())["responses"]
    assert len(answers) == 9

    asked_tasks: list[str] = []

    def ask_and_record(lm, task):
        asked_tasks.append(task.task_name)
        return ask(lm, task)

    monkeypatch.setattr(eval.harness, "ask", ask_and_record)
    monkeypatch.delenv("INTERRUPT")
    with pytest.raises(SystemExit, match="2"):
        evaluate(str(fragile_group), of=copy)

    assert asked_tasks == ["zen_of_python"]
    (path,) = paths_of(copy, "many")
    items = read_samples(path.parent)["colours"]
    assert [pair for item in items for pair in item["answers"]] == [pair for (pair,) in answers]
    assert value_of(result_of(copy, "many"), "colours", "acc") is None


def test_invalid_requests(evaluate, task_file):
    folder = task_file.parent
    (folder / "file").write_text("")
    (folder / "zen_of_python.yaml").write_text("")

    for suite, words, code in (
        (f"{folder}/none.yaml", (), "eval.unknown_suite"),
        (f"{folder}/zen_of_python.yaml", (), "eval.ambiguous_suite"),
        ("birth-year", ("--limit", "0"), "eval.option_range"),
        ("birth-year", ("--max_length", "50"), "eval.max_length"),
        ("birth-year", ("--must_beat", "unigram"), "eval.option_suite"),
        ("validation", ("--out", folder / "file" / "x"), "eval.cannot_write"),
    ):
        evaluate(suite, *words, refused=code)


def test_a_task_file_that_does_not_load(evaluate, task_file):
    task_file.write_text(TASK.replace("colours.load", "colours.lead"))

    assert str(task_file) in evaluate(str(task_file), refused="eval.task_file")


def test_runs_that_do_not_load(copy, evaluate):
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


def test_other_results_are_not_overwritten(evaluate, copy):
    """By trials and by other lengths; damaged ones are replaced."""
    evaluate("validation", of=copy)
    (whole,) = paths_of(copy, "validation")
    content = whole.read_bytes()

    evaluate("validation", "--limit", 2, of=copy)
    evaluate("validation", "--max_length", 100, of=copy)
    assert whole.read_bytes() == content
    assert len(paths_of(copy, "validation")) == 3

    whole.write_text("{")
    assert is_new(evaluate("validation", of=copy))
    assert read_results(whole).asked["limit"] is None


def test_other_results_in_out_are_not_overwritten(evaluate, copy, tmp_path):
    out = tmp_path / "out"

    def contents():
        return {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}

    evaluate("zen_of_python", "--out", out)
    before = contents()

    assert not is_new(evaluate("zen_of_python", "--out", out, of=copy))
    evaluate("zen_of_python", "--out", out, step=2, refused="eval.other_results")
    evaluate("zen_of_python", "--limit", 1, "--out", out, refused="eval.other_results")
    assert contents() == before


def test_results_belong_to_what_was_evaluated(copy, evaluate, tmp_path):
    """A renamed run, a copy, and weights kept by retention share results; a copy that was trained
    further has its own at the steps that differ (issue 17, items 10 and 22)."""
    data = copy.parent / "data"

    def zen_is_new(run):
        return is_new(evaluate("zen_of_python", "--data", data, of=run))

    write_json(copy / "run.json", {"run_id": "0123abcd", "created": "", "launches": 1})
    RunFolder(copy).log_file.touch()
    assert zen_is_new(copy)
    assert result_of(copy, "zen_of_python").asked["run_id"] == "0123abcd"

    # renamed, with the weights alone
    moved = copy.rename(copy.with_name("moved"))
    strip_to_weights(moved / "checkpoint/step-3", moved / "checkpoint/stripped")
    shutil.rmtree(moved / "checkpoint/step-3")
    (moved / "checkpoint/stripped").rename(moved / "checkpoint/step-3")
    assert not zen_is_new(moved)

    # copied, then trained further
    other = tmp_path / "elsewhere" / "trained-on"
    shutil.copytree(moved, other, copy_function=shutil.copyfile)
    assert not zen_is_new(other)
    shutil.rmtree(other / "checkpoint/step-3")
    weights = dict(load_model(other / "checkpoint/step-2", torch.device("cpu")).named_parameters())
    weights["tok_embeddings.weight"] = torch.zeros(300, 32)
    save_no_dist(weights, other / "checkpoint/step-3", step=3)
    assert zen_is_new(other)

    runs, _ = read_runs([moved, other])
    ours, theirs = [run.evaluations[-1].results for run in runs]
    score = value_of(ours, "zen_of_python", "bits_per_byte")
    assert score != value_of(theirs, "zen_of_python", "bits_per_byte")
    assert ours.asked["content"] != theirs.asked["content"]


OPTIONS = ("--option", "jrt_tokens=500", "--option", "prompts=a.toml")


@pytest.fixture
def has_results(copy, tmp_path, monkeypatch):
    """Return the function that tells whether `submit` finds results; a.toml is in the folder."""
    (tmp_path / "a.toml").write_text("x = 1")
    monkeypatch.chdir(tmp_path)

    def ask_schedule(suite, words=OPTIONS):
        parser = Parser()
        add_evaluation_options(parser)
        how = to_argv(vars(parser.parse_args([*words])))
        with monkeypatch.context() as patch:
            patch.chdir(tmp_path.parent)  # jobs run elsewhere
            return Schedule(copy, Request([suite], how=how)).has_results(3, suite)

    return ask_schedule


def test_submit_and_run_agree_on_options(copy, evaluate, tmp_path, has_results):
    """Options of other suites do not count, files count by content (issue 17, item 3)."""
    for suite in ("validation", "zen_of_python"):
        assert not has_results(suite)
        evaluate(suite, *OPTIONS, of=copy)
        assert has_results(suite)

    assert not has_results("zen_of_python", ["--option", "jrt_tokens=500"])
    assert has_results("validation", [])
    assert not has_results("validation", ["--max_length", "64"])

    (tmp_path / "a.toml").write_text("x = 2")
    assert not has_results("zen_of_python")
    assert is_new(evaluate("zen_of_python", *OPTIONS, of=copy))


def test_submit_and_run_agree_on_checkpoints(copy, evaluate, has_results):
    """They count by their weights (issue 17, item 3)."""
    evaluate("validation", *OPTIONS, of=copy)
    checkpoint = copy / "checkpoint/step-3"
    weights = dict(load_model(checkpoint, torch.device("cpu")).named_parameters())
    zeros = {name: 0 * weight for name, weight in weights.items()}

    shutil.rmtree(checkpoint)
    save_no_dist(weights, checkpoint, step=3)
    assert has_results("validation") is True

    shutil.rmtree(checkpoint)
    save_no_dist(zeros, checkpoint, step=3)
    assert has_results("validation") is False
    assert is_new(evaluate("validation", of=copy))


@pytest.mark.system
def test_several_suites_and_tasks_of_lm_eval(copy, evaluate, monkeypatch):
    """`--suite a,b`, with any name of the installed lm_eval (issue 17, item 10)."""
    choices = {"text": ["river", "stone", "light", "house"], "label": list("ABCD")}
    row = {"id": "1", "question_stem": "What is in it?", "choices": choices, "answerKey": "B"}
    rows = datasets.Dataset.from_list([row] * 3)
    splits = datasets.DatasetDict(dict.fromkeys(("train", "validation", "test"), rows))
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: splits)

    evaluate("openbookqa,validation,openbookqa", of=copy)

    metrics = set(result_of(copy, "openbookqa").scores["openbookqa"])
    assert metrics == {"acc", "acc_norm", "gold_bits_per_byte"}
    assert len(paths_of(copy, "validation")) == 1
    assert not is_new(evaluate("openbookqa", of=copy))


@pytest.mark.system
def test_names_of_suites_and_tasks_are_found(evaluate, capsys):
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
    assert index.keys() <= ours.keys()
    assert len(ours.keys() - index.keys()) <= 2
    for name, entry in index.items():
        kind = "task" if entry.kind.name == "PY_TASK" else entry.kind.name.lower()
        assert ours[name].kind == kind
        assert kind == "tag" or ours[name].path == entry.yaml_path


def test_of_a_mixture_one_folder_is_named(copy, evaluate, tmp_path):
    first = copy.parent / "data"
    second = tmp_path / "second"
    shutil.copytree(first / "validation", second / "train")
    mixture = {"path": "", "paths": [str(first), str(second)], "weights": [0.25, 0.75]}
    fingerprint = Mixture.open([first, second], [0.25, 0.75]).fingerprint
    change_config(copy, lambda r: r["identity"].update(data_fingerprint=fingerprint))
    change_config(copy, lambda r: r["config"].update(data=mixture))

    evaluate("validation", of=copy, refused="eval.mixture")
    assert is_new(evaluate("validation", "--data", first, of=copy))

    change_config(copy, lambda r: r["config"].update(data=mixture | {"weights": [0.5, 0.5]}))
    evaluate("validation", "--data", first, of=copy, refused="eval.mismatch")


def record_held_out(run, fingerprint, data, validation_path=""):
    """Write a held-out text and the paths of data into a run's config.json."""

    def change(record):
        record["config"] |= {
            "data": {"path": str(data)},
            "validation": {"path": str(validation_path)},
        }
        record["identity"]["held_out_fingerprint"] = f"none+{fingerprint}"  # a mixture's

    change_config(run, change)


def test_validation_is_of_the_runs_own_text(copy, evaluate, tmp_path):
    """Another build's held-out part is refused, or scored with --held_out and recorded as such;
    the text of `validation.path` is used if the data have none (issue 17, items 4 and 17)."""
    data = copy.parent / "data"
    part = data / "validation"
    with TokenShards.open(part) as shards:
        own_fingerprint = shards.fingerprint
        vocab_size = shards.vocab_size
        eos_id = shards.eos_id
        tokenizer_sha256 = shards.tokenizer_sha256
    record_held_out(copy, own_fingerprint, data)
    evaluate("validation", of=copy)

    # without it, and with that of another build
    shutil.move(part, tmp_path / "apart" / "validation")
    evaluate("validation", of=copy, refused="eval.no_held_out")
    write_shards(
        part,
        [np.append(np.arange(5, 60), eos_id)],
        num_bytes=[99],
        vocab_size=vocab_size,
        eos_id=eos_id,
        tokenizer_sha256=tokenizer_sha256,
    )
    evaluate("validation", of=copy, refused="eval.mismatch")
    evaluate("validation", "--held_out", data, of=copy)
    with TokenShards.open(part) as other:
        fingerprints = {own_fingerprint, other.fingerprint}
    results = [read_results(path) for path in paths_of(copy, "validation")]
    assert {result.asked["held_out_fingerprint"] for result in results} == fingerprints

    # from validation.path
    shutil.rmtree(part)
    record_held_out(copy, own_fingerprint, data, tmp_path / "apart")
    assert not is_new(evaluate("validation", of=copy))


@pytest.fixture
def partial_results(tmp_path):
    """Results of two tasks, and answers of one, that were kept for a question."""
    kept = PartialResults(tmp_path, QUESTION)
    kept.add("first", RESULT)
    kept.add("a/b", RESULT)
    kept.add_answers("a/b", ANSWERS)
    return kept


QUESTION = {"checkpoint": "c", "step": 3, "suite": "s", "limit": None, "train_fingerprint": "f"}


RESULT = TaskResult({"acc": Score(0.5, 0.1)}, 2, [{"doc_id": 0, "acc": 1}, {"doc_id": 1, "acc": 0}])


ANSWERS = TaskAnswers([[(-1.5, True)], [(math.nan, False)], ["a", "b"], [-3.0]], [4], {1: "no"})


def test_partial_results_are_kept_per_question(partial_results, tmp_path):
    assert PartialResults(tmp_path, QUESTION).read() == {"first": RESULT, "a/b": RESULT}
    answers = partial_results.read_answers("a/b")
    expected = [[[-1.5, True]], [[math.nan, False]], ["a", "b"], [-3.0]]
    assert repr(answers.responses) == repr(expected)
    assert (answers.truncated, answers.failures) == ([4], {1: "no"})
    assert partial_results.read_answers("first") is None

    other_question = PartialResults(tmp_path, QUESTION | {"content": 1})
    assert other_question.read() == {}
    assert other_question.read_answers("a/b") is None


@pytest.mark.parametrize("torn", ["", "{", '{"task": "first"}', "null"])
def test_torn_partial_results_are_evaluated_again(partial_results, tmp_path, torn):
    (tmp_path / "unfinished" / "first.task.json").write_text(torn)
    (tmp_path / "unfinished" / "a%2Fb.answers.json").write_text(torn)

    assert list(partial_results.read()) == ["a/b"]
    assert partial_results.read_answers("a/b") is None

    partial_results.remove()
    assert not [*tmp_path.iterdir()]
