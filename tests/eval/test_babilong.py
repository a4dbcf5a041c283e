"""Babilong: what is asked, what counts as right, and who can answer it."""

import re
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lm_eval.api.task import Task
from lm_eval.evaluator import evaluate
from lm_eval.tasks import TaskManager
from lm_eval.tasks._yaml_loader import load_yaml

from canon_pretrain.core.errors import UserError
from eval.harness import quiet_harness
from eval.staged import BABILONG_TASKS, write_staged
from eval.suite_names import harness_tasks
from eval.tasks.babilong.task import LABELS, OWN_PROMPTS, is_right, load, read_prompts
from tests import data_folders
from tests.eval_fixtures import rows_of, stage_fixtures
from tests.scripted_lm import ScriptedLM
from tests.support import ROOT

TASKS = ROOT / "eval" / "tasks"
PLACES = ["bathroom", "bedroom", "garden", "hallway", "kitchen", "office"]
GIVING = ["Bill", "Fred", "Jeff", "Mary", "apple", "football", "milk"]
NAMES = [f"babilong_qa{qa}_{length}" for qa in range(1, 6) for length in ("0k", "1k", "2k", "4k")]


# ---- the score


def judged_again(labels: list[str], question: str, target: str, answer: str) -> bool:
    """The rule once more, from spec/eval.md section 3, letter by letter."""
    kept = ""
    for letter in answer.lower():
        kept += letter
        if end := next((e for e in (".", "<context>", "<example>") if kept.endswith(e)), ""):
            kept = kept.removesuffix(end)
            break
    remaining = []
    for label in labels:
        found = any(kept[at:].startswith(label.lower()) for at in range(len(kept)))
        if found and re.search(re.escape(label), question, re.IGNORECASE) is None:
            remaining.append(label)
    return remaining == [target]


def texts(labels: list[str]) -> st.SearchStrategy[str]:
    """Answers and questions: labels in any case, pieces of them, marks, and what is between."""
    words = [*labels, *(label[:3] for label in labels), "room", "billion", "went to the"]
    marks = [".", "<context>", "<Context>", "<EXAMPLE>", "<conte", " ", "\n", "?", "É"]
    cases = st.sampled_from([str, str.upper, str.title])
    piece = st.builds(lambda text, case: case(text), st.sampled_from([*words, *marks]), cases)
    return st.lists(piece, max_size=9).map(" ".join)


@settings(derandomize=True, deadline=None, max_examples=600)
@given(st.data())
def test_the_score_equals_an_independent_one(data):
    assert is_right("qa1", "Where is Mary?", "kitchen", "The KITCHEN. Not the garden")
    assert not is_right("qa1", "Where is Mary?", "kitchen", "kitchen, or else the garden")
    task = data.draw(st.sampled_from(BABILONG_TASKS))
    labels = GIVING if task == "qa5" else PLACES
    target = data.draw(st.sampled_from(labels))
    question, answer = data.draw(texts(labels)), data.draw(texts(labels))
    # so that right answers are not rare
    answer = data.draw(st.sampled_from([answer, target, f"{target} {answer}", f"{answer}{target}"]))
    found = is_right(task, question, target, answer)
    assert found == judged_again(labels, question, target, answer)


# ---- the prompts


def laid_out(instruction: str, examples: list[tuple[str, str, str]]) -> str:
    """The prompt of context C and question "Q ", whose last space is kept."""
    text = f"{instruction}\n\n"
    for context, question, answer in examples:
        text += f"<context>\n{context}\n</context>\n\nQuestion: {question}\nAnswer: {answer}.\n\n"
    return f"{text}<context>\nC\n</context>\n\nQuestion: Q \nAnswer:"


@pytest.mark.parametrize("task", BABILONG_TASKS)
def test_our_prompts_and_those_of_lm_eval(task):
    """Issue 17, item 3: the layout of the specification; ours give nothing away."""
    part = tomllib.loads(OWN_PROMPTS.read_text())[task]
    assert len(part["examples"]) == (3 if task == "qa5" else 2)
    examples = [(one["context"], one["question"], one["answer"]) for one in part["examples"]]
    prompt = read_prompts(task).of("C", "Q ")
    assert prompt == laid_out(f"{part['instruction']} {part['answer_format']}", examples)
    assert not [label for label in LABELS[task] if label.lower() in prompt.lower()]
    assert 100 <= len(prompt.split()) <= 260
    known = load_yaml(harness_tasks() / "babilong" / f"babilong_{task}.yaml", resolve_func=False)
    samples = known["fewshot_config"]["samples"]
    examples = [(one["input"], one["question"], one["target"].rstrip(".")) for one in samples]
    found = read_prompts(task, "lm_eval")
    assert found.of("C", "Q ") == laid_out(known["description"].strip(), examples)
    assert found.sha256 != read_prompts(task).sha256


OWN = """
[qa1]
instruction = " Say it. "
[[qa1.examples]]
context = "C1"
question = "Q1"
answer = "A1"
"""


def test_prompts_can_be_replaced(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(OWN)
    prompts = read_prompts("qa1", path)
    assert prompts.of("C", "Q ") == laid_out("Say it.", [("C1", "Q1", "A1")])
    path.write_text(OWN.replace("C1", "C3"))
    assert read_prompts("qa1", path).sha256 != prompts.sha256


NAME = "DEFAULT_PROMPTS_ZEYUAN"
RELEASE = """
import os  # code beside the data is not run
os._exit(1)
DEFAULT_PROMPTS_ZEYUAN = {
    'qa1': {'instruction': 'Do ' 'it. Say so.', 'examples': 'E1\\n\\nE2 {x}', 'post_prompt': ''},
    'qa2': {'instruction': 'Do it.', 'examples': 'E', 'post_prompt': 'Say so.'},
}
"""
RELEASED_LAYOUT = (
    "DEFAULT_TEMPLATE_ZEYUAN = '{instruction}|{examples}|{post_prompt}|{context}|{question}|A:'"
)


def test_the_wording_of_the_papers_release(tmp_path):
    """Issue 17, item 3: a clone's prompts.py is read as data, its layout too if it has one."""
    path = tmp_path / "prompts.py"
    path.write_text(RELEASE)
    end = "\n\n<context>\nC\n</context>\n\nQuestion: Q \nAnswer:"
    assert read_prompts("qa1", path).of("C", "Q ") == f"Do it. Say so.\n\nE1\n\nE2 {{x}}{end}"
    assert read_prompts("qa2", str(path)).of("C", "Q ") == f"Do it. Say so.\n\nE{end}"
    path.write_text(RELEASE + RELEASED_LAYOUT)
    assert read_prompts("qa2", path).of("C {x}", "Q ") == "Do it.|E|Say so.|C {x}|Q |A:"


REFUSED: list[tuple[str, str, str]] = [
    ("mine.toml", "[qa1", "Expected '\\]'"),
    ("mine.toml", "[qa2]", "qa2.instruction: Field required"),
    ("mine.toml", OWN.replace('"A1"', '"A1"\nmore = 1'), r"examples\.0\.more"),
    ("mine.toml", OWN.replace('"A1"', '"A1."'), r"examples\.0\.answer: .*'A1\.'"),
    ("mine.toml", OWN.replace("qa1", "qa2"), "has no 'qa1'"),
    # what is not literal data
    ("prompts.py", f"{NAME} = {{'qa1': {{'instruction': open('/etc/passwd').read()}}}}", ""),
    ("prompts.py", f"{NAME} = {{'qa1': {{'instruction': ' ', 'examples': 'b'}}}}", ""),
    ("prompts.py", f"{NAME} = " + "[" * 5000, ""),
    ("prompts.py", RELEASE + "DEFAULT_TEMPLATE_ZEYUAN = '{context} {question} {context.x}'", ""),
]


@pytest.mark.parametrize(("name", "content", "message"), REFUSED)
def test_prompts_are_checked(tmp_path, name, content, message):
    path = tmp_path / name
    path.write_text(content)
    with pytest.raises(UserError, match=f"babilong_prompts .*{name}.*{message}"):
        read_prompts("qa1", path)


# ---- the tasks


@pytest.fixture(scope="module")
def staged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return stage_fixtures(tmp_path_factory.mktemp("staged"), NAMES)


def load_tasks(**metadata: object) -> dict[str, Task]:
    """The group as the harness finds it beside its own of the same name."""
    with quiet_harness():
        folders = [str(harness_tasks() / "babilong"), str(TASKS)]
        manager = TaskManager(include_path=folders, include_defaults=False, metadata=dict(metadata))
        assert "babilong_qa20" in manager.all_subtasks  # the harness's own are there
        return dict(manager.load(["babilong"])["tasks"])


def scores(tasks: dict[str, Task], answer: Callable[[dict[str, str]], str]) -> dict[str, float]:
    """The scores of a model that makes answers of the rows that prompts ask about."""
    rows = {
        read_prompts(name.split("_")[1]).of(row["input"], row["question"]): row
        for name in NAMES
        for row in rows_of(name)
    }
    model = ScriptedLM(lambda request: answer(rows[request.args[0]]))
    with quiet_harness():
        found = evaluate(model, {"tasks": dict(tasks)}, bootstrap_iters=0)
    assert found is not None
    options = {"until": ["."], "max_gen_toks": 20, "do_sample": False}
    assert all(request.args[1] == options for request in model.asked)
    return {name: found["results"][name]["acc,none"] for name in tasks}


def test_the_suite_complete(staged):
    tasks = load_tasks(staged=str(staged))
    assert list(tasks) == NAMES
    for name, task in tasks.items():
        qa = name.split("_")[1]
        assert task.VERSION == 2.0 and task.config.metadata["primary"] == "acc"
        chance = 1 / len(LABELS[qa])
        assert task.config.metadata["chance"] == pytest.approx(chance, abs=1e-4)
        for row, document in zip(rows_of(name), list(task.eval_docs), strict=True):
            prompt = read_prompts(qa).of(row["input"], row["question"])
            assert task.doc_to_text(document) == prompt
            assert prompt.endswith(f"\n\nQuestion: {row['question']}\nAnswer:")
            assert task.doc_to_target(document) == row["target"]
    # the question's own places are dropped
    right = scores(tasks, lambda row: f"{row['question']} {row['target'].upper()}")
    assert set(right.values()) == {1.0}
    wrong = scores(tasks, lambda row: " ".join([*PLACES, *GIVING]))
    assert set(wrong.values()) == {0.0}


def test_what_would_be_cut_is_refused(staged, tmp_path):
    tokenizer = data_folders.tokenizer()
    (tmp_path / tokenizer.file_name).write_bytes(tokenizer.model)
    asked = {"qa": "qa2", "context": "1k", "staged": str(staged)}
    documents = load(**asked, max_length=10**6)["test"]  # surely short: needs no tokenizer
    longest = max(len(tokenizer.encode(prompt)) for prompt in documents["prompt"])
    known = {**asked, "tokenizer": str(tmp_path)}
    assert len(load(**known, max_length=longest + 20)["test"]) == len(documents)
    with pytest.raises(UserError, match=f"up to {longest} tokens .* at least {longest + 20} "):
        load(**known, max_length=longest + 19)


def test_rows_of_something_else_are_refused(tmp_path):
    row = {"input": "Mary went to the cellar.", "question": "Where is Mary? ", "target": "cellar"}
    write_staged(tmp_path, "babilong_qa1_0k", [row], revision="f" * 40)
    with pytest.raises(UserError, match="qa1_0k, row 0: the target 'cellar' is none"):
        load(qa="qa1", context="0k", staged=str(tmp_path))
