"""The suite `discriminative`: lm_eval's own tasks on staged rows, complete, and what they measure.

`asked` builds every request by hand from the raw rows, beside the task files; models that prefer
what they are told to prove the scores.
"""

import hashlib
import math
import re
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import datasets
import lm_eval.api.task
import lm_eval.tasks
import pytest
from lm_eval.api.task import Task
from lm_eval.evaluator import evaluate
from lm_eval.tasks import TaskManager

from eval.staging.catalogue import CATALOGUE, DISCRIMINATIVE, of_suites
from tests.eval_fixtures import fixture, rows_of, stage_fixtures
from tests.scripted_lm import ScriptedLM
from tests.support import ROOT

TASKS = ROOT / "eval" / "tasks"
NAMES = [data.key for data in of_suites([DISCRIMINATIVE])]
CHOICES = NAMES[:7]
# to index all of the harness's tasks takes ten seconds
FOLDERS = "piqa hellaswag winogrande arc siqa super_glue/boolq lambada wikitext".split()
HARNESS = [Path(lm_eval.tasks.__file__).parent / folder for folder in FOLDERS]

Pair = tuple[str, str]
Score = Callable[[Pair], float]


def scripted(score: Score) -> ScriptedLM:
    """A model that finds (context, continuation) as likely as `score` says; a text has none."""
    return ScriptedLM(score=lambda request: score(("", *request.args)[-2:]))


def arbitrary(pair: Pair) -> float:
    """A number in (-10, 0) that only depends on the pair."""
    digest = hashlib.sha256(repr(pair).encode()).digest()
    return -10 * int.from_bytes(digest[:6], "big") / 2**48


@pytest.fixture(scope="module")
def staged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return stage_fixtures(tmp_path_factory.mktemp("staged"), NAMES)


def load(folder: Path, *wanted: str, ours: bool = True) -> dict[str, Task]:
    manager = TaskManager(
        include_path=[*HARNESS, *([TASKS] if ours else [])],
        include_defaults=False,
        metadata={"staged": str(folder)},
    )
    return manager.load(list(wanted))["tasks"]


@pytest.fixture(scope="module")
def tasks(staged: Path) -> dict[str, Task]:
    """The members of the group, without network."""

    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise AssertionError("the network was used")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket.socket, "connect", refuse)
        patch.setattr(lm_eval.api.task.datasets, "load_dataset", refuse)
        return load(staged, "discriminative")


def results(tasks: dict[str, Task], score: Score) -> dict[str, dict[str, float]]:
    """The metrics of each task for a model that scores so."""
    found = evaluate(scripted(score), {"tasks": dict(tasks)}, bootstrap_iters=0)
    return {
        name: {
            key.partition(",")[0]: value
            for key, value in metrics.items()
            if key.endswith(",none") and "_stderr" not in key
        }
        for name, metrics in found["results"].items()
        if name in tasks
    }


# ---- the requests, by hand


def hellaswag_text(text: str) -> str:
    text = text.strip().replace(" [title]", ". ")
    return re.sub(r"\[[^\]]*\]", "", text).replace("  ", " ")


def asked(name: str, row: dict[str, Any]) -> tuple[list[Pair], int]:
    """Context and continuation of each choice, and which is right; 0-shot."""
    if name == "piqa":
        texts, right = [row["sol1"], row["sol2"]], row["label"]
        context = f"Question: {row['goal']}\nAnswer:"
    elif name == "hellaswag":
        texts, right = [hellaswag_text(e) for e in row["endings"]], int(row["label"])
        begun = f"{row['activity_label']}: {row['ctx_a']} {row['ctx_b'].capitalize()}"
        context = hellaswag_text(begun)
    elif name == "winogrande":
        before, after = row["sentence"].split("_")
        pairs = [(before + row[f"option{k}"], f" {after.strip()}") for k in (1, 2)]
        return pairs, int(row["answer"]) - 1
    elif name.startswith("arc"):
        texts, labels = row["choices"]["text"], row["choices"]["label"]
        context, right = f"Question: {row['question']}\nAnswer:", labels.index(row["answerKey"])
    elif name == "social_iqa":
        texts, right = [row[f"answer{letter}"] for letter in "ABC"], int(row["label"]) - 1
        context = f"Q: {row['context']} {row['question']}\nA:"
    elif name == "boolq":
        texts, right = ["no", "yes"], row["label"]
        context = f"{row['passage']}\nQuestion: {row['question']}?\nAnswer:"
    elif name == "lambada_openai":
        context, _, last = row["text"].rpartition(" ")
        return [(context, f" {last}")], 0
    else:
        raise AssertionError(name)
    return [(context, f" {text}") for text in texts], right


def every_pair(name: str) -> list[tuple[list[Pair], int]]:
    return [asked(name, row) for row in rows_of(name)]


RIGHT = {pair[right] for name in NAMES[:8] for pair, right in every_pair(name)}


# ---- tests


def test_the_group_has_the_suites_tasks(tasks: dict[str, Task]) -> None:
    assert list(tasks) == NAMES
    for name, task in tasks.items():
        assert len(task.eval_docs) == len(rows_of(name))
        assert task.config.num_fewshot == 0
        metadata = task.config.metadata
        primary = metadata["primary"]
        primary = primary if isinstance(primary, list) else [primary]
        assert set(primary) <= set(task.aggregation())
        if "source" in metadata:
            assert metadata["source"] in CATALOGUE[name].columns
            sources = [doc[metadata["source"]] for doc in task.eval_docs]
            assert 1 < len(set(sources)) < len(sources)
    primary = {name: task.config.metadata["primary"] for name, task in tasks.items()}
    assert primary == {
        **dict.fromkeys(CHOICES, "acc"),
        "hellaswag": "acc_norm",
        "arc_challenge": "acc_norm",
        "lambada_openai": ["acc", "perplexity"],
        "wikitext": "word_perplexity",
    }
    chance = {name: task.config.metadata.get("chance") for name, task in tasks.items()}
    sizes = [2, 4, 2, 4, 4, 3, 2]
    assert [chance[name] for name in CHOICES] == [round(1 / size, 3) for size in sizes]
    assert chance["lambada_openai"] is chance["wikitext"] is None


@pytest.mark.parametrize("name", NAMES[:8])
def test_requests_are_those_of_the_specification(tasks: dict[str, Task], name: str) -> None:
    task = tasks[name]
    task.build_all_requests()
    expected = [pair for pairs, _ in every_pair(name) for pair in pairs]
    assert [instance.args for instance in task.instances] == expected


def test_tasks_are_the_harnesss_own(
    staged: Path, tasks: dict[str, Task], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Configuration, version, requests and results, for the same rows from the "hub"."""
    asked_hub: list[tuple[str, str | None]] = []

    def from_hub(path: str, name: str | None = None, **_: Any) -> dict[str, datasets.Dataset]:
        asked_hub.append((path, name))
        (key,) = [k for k in NAMES if (CATALOGUE[k].path, CATALOGUE[k].config) == (path, name)]
        return dict.fromkeys(("train", "validation", "test"), fixture(key))

    monkeypatch.setattr(lm_eval.api.task.datasets, "load_dataset", from_hub)
    own = load(staged, *NAMES, ours=False)
    assert asked_hub == [(CATALOGUE[key].path, CATALOGUE[key].config) for key in NAMES]
    replaced = {"custom_dataset", "dataset_kwargs", "num_fewshot", "metadata"}
    replaced |= {"training_split", "validation_split", "fewshot_split"}
    for name in NAMES:
        ours, theirs = tasks[name].dump_config(), own[name].dump_config()
        differing = {k for k in {*ours, *theirs} if ours.get(k) != theirs.get(k)}
        assert differing <= replaced, name
        assert tasks[name].VERSION == own[name].VERSION
        for task in (tasks[name], own[name]):
            task.build_all_requests()
        # the split that is scored is the one that is staged
        assert [i.args for i in tasks[name].instances] == [i.args for i in own[name].instances]
        scored = theirs.get("test_split") or theirs["validation_split"]
        assert scored == CATALOGUE[name].split
    assert results(tasks, arbitrary) == results(own, arbitrary)


def test_a_model_that_knows_scores_1_and_one_that_is_wrong_0(tasks: dict[str, Task]) -> None:
    chosen = {name: task for name, task in tasks.items() if name != "wikitext"}
    knows = results(chosen, lambda pair: -1.0 if pair in RIGHT else -500.0)
    wrong = results(chosen, lambda pair: -500.0 if pair in RIGHT else -1.0)
    for name in chosen:
        for metric in {"acc", "acc_norm"} & set(knows[name]):
            assert (knows[name][metric], wrong[name][metric]) == (1.0, 0.0), (name, metric)
    with_norm = [name for name in CHOICES if "acc_norm" in knows[name]]
    assert with_norm == ["piqa", "hellaswag", "arc_easy", "arc_challenge"]
    assert knows["lambada_openai"]["perplexity"] == pytest.approx(math.e)


def test_scores_of_an_arbitrary_model(tasks: dict[str, Task]) -> None:
    found = results(tasks, arbitrary)
    for name in CHOICES:
        hits, hits_norm = [], []
        for pairs, right in every_pair(name):
            scores = [arbitrary(pair) for pair in pairs]
            normed = [s / len(pair[1][1:]) for s, pair in zip(scores, pairs, strict=True)]
            hits.append(scores.index(max(scores)) == right)
            hits_norm.append(normed.index(max(normed)) == right)
        assert found[name]["acc"] == pytest.approx(sum(hits) / len(hits))
        if "acc_norm" in found[name]:
            assert found[name]["acc_norm"] == pytest.approx(sum(hits_norm) / len(hits))
    scores = [arbitrary(pairs[0]) for pairs, _ in every_pair("lambada_openai")]
    lambada = found["lambada_openai"]
    assert lambada["perplexity"] == pytest.approx(math.exp(-sum(scores) / len(scores)))
    assert lambada["acc"] == sum(score > -5 for score in scores) / len(scores)
    assert 0 < lambada["acc"] < 1


def test_wikitext_counts_the_words_of_the_original(tasks: dict[str, Task]) -> None:
    seen: list[str] = []

    def score(pair: Pair) -> float:
        seen.append(pair[1])
        return -3.5 * len(pair[1])

    found = results({"wikitext": tasks["wikitext"]}, score)["wikitext"]
    pages = [row["page"] for row in rows_of("wikitext")]
    total = sum(3.5 * len(text) for text in seen)
    words = sum(len(re.split(r"\s+", page)) for page in pages)
    size = sum(len(page.encode()) for page in pages)
    assert found["word_perplexity"] == pytest.approx(math.exp(total / words))
    assert found["byte_perplexity"] == pytest.approx(math.exp(total / size))
    assert found["bits_per_byte"] == pytest.approx(total / size / math.log(2))
    # what the model reads is running text again
    first = seen[0]
    assert first.startswith(" = Lamp =\n\nThe lamp is a well-known lamp of 1,000 m, and Ada's.")
    assert " @" not in "".join(seen) and len(seen) == len(pages)
