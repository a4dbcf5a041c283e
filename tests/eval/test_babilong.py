"""Babilong: the score, the prompts and the complete tasks."""

import os
import re
import runpy
import tomllib
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lm_eval.evaluator import evaluate
from lm_eval.tasks import TaskManager
from lm_eval.tasks._yaml_loader import load_yaml

from eval.harness import quiet_harness
from eval.staged import BABILONG_TASKS, write_staged
from eval.suite_names import harness_tasks
from eval.tasks.babilong.task import LABELS, OWN_PROMPTS, is_right, load, read_prompts
from tests import data_folders
from tests.eval_fixtures import rows_of, stage_fixtures
from tests.scripted_lm import ScriptedLM
from tests.support import ROOT, refused

PLACES = ["bathroom", "bedroom", "garden", "hallway", "kitchen", "office"]
GIVING = ["Bill", "Fred", "Jeff", "Mary", "apple", "football", "milk"]
NAMES = [f"babilong_qa{qa}_{length}" for qa in range(1, 6) for length in ("0k", "1k", "2k", "4k")]


# ---- the score


END_MARKS = (".", "<context>", "<example>")


def until_end_mark(answer):
    """Return a lower-case answer up to the first end mark."""
    kept = ""
    for letter in answer.lower():
        kept += letter
        for mark in END_MARKS:
            if kept.endswith(mark):
                return kept.removesuffix(mark)
    return kept


def reference_is_right(labels, question, target, answer):
    """The rule of spec/eval.md section 3, letter by letter."""
    kept = until_end_mark(answer)
    labels_in_answer = []
    for label in labels:
        is_in_answer = any(kept[at:].startswith(label.lower()) for at in range(len(kept)))
        is_in_question = re.search(re.escape(label), question, re.IGNORECASE) is not None
        if is_in_answer and not is_in_question:
            labels_in_answer.append(label)
    return labels_in_answer == [target]


def texts(labels):
    """Answers and questions of labels in any case, parts of them, and end marks."""
    parts = [*labels, *(label[:3] for label in labels), "room", "billion", "went to the"]
    marks = [".", "<context>", "<Context>", "<EXAMPLE>", "<conte", " ", "\n", "?", "É"]
    cases = st.sampled_from([str, str.upper, str.title])
    piece = st.builds(lambda text, case: case(text), st.sampled_from([*parts, *marks]), cases)
    return st.lists(piece, max_size=9).map(" ".join)


def test_one_label_is_right_and_two_are_not():
    assert is_right("qa1", "Where is Mary?", "kitchen", "KITCHEN. Not garden")
    assert not is_right("qa1", "Where is Mary?", "kitchen", "kitchen or garden")


@settings(derandomize=True, deadline=None, max_examples=200)
@given(st.data())
def test_the_score_equals_a_reference(data):
    task = data.draw(st.sampled_from(BABILONG_TASKS))
    labels = GIVING if task == "qa5" else PLACES
    target = data.draw(st.sampled_from(labels))
    question = data.draw(texts(labels))
    answer = data.draw(texts(labels))
    # make right answers frequent
    answer = data.draw(st.sampled_from([answer, target, f"{target} {answer}", f"{answer}{target}"]))

    score = is_right(task, question, target, answer)

    assert score == reference_is_right(labels, question, target, answer)


# ---- the prompts


def filled(instruction, examples):
    """The prompt of context C and question "Q ", with its trailing space."""
    shots = [
        f"<context>\n{context}\n</context>\n\nQuestion: {question}\nAnswer: {answer}.\n\n"
        for context, question, answer in examples
    ]
    return f"{instruction}\n\n{''.join(shots)}<context>\nC\n</context>\n\nQuestion: Q \nAnswer:"


OWN = """
[qa1]
instruction = " Say it. "
[[qa1.examples]]
context = "C1"
question = "Q1"
answer = "A1"
"""
NAME = "DEFAULT_PROMPTS_ZEYUAN"
RELEASE = """
import os  # code beside the data must not run
os._exit(1)
DEFAULT_PROMPTS_ZEYUAN = {
    'qa1': {'instruction': 'Do ' 'it.', 'examples': 'E1\\n\\nE2 {x}', 'post_prompt': ''},
    'qa2': {'instruction': 'Do it.', 'examples': 'E', 'post_prompt': 'Say so.'},
}
"""
PARTS = {"instruction": "Do it.", "examples": "E", "post_prompt": "Say so."}
LAYOUT = "{instruction}|{examples}|{post_prompt}|{context}|{question}|A:"

# the layout of the prompts.py of the paper's release, with other words
LAID_OUT = """
# a comment
TASK_TEMPLATE = '{instruction}\\n\\n{examples}\\n\\n{post_prompt}'
USER_TEMPLATE = '<context>\\n{context}\\n</context>\\n\\nQuestion: {question}'
DEFAULT_TEMPLATE = f'{TASK_TEMPLATE}\\n\\n{USER_TEMPLATE}'

# an edit
DEFAULT_TEMPLATE_ZEYUAN = {
    'qa1': f'{TASK_TEMPLATE}{USER_TEMPLATE}\\nAnswer: ',
    'qa2': f'{TASK_TEMPLATE}{USER_TEMPLATE}\\nAnswer: ',
}

CUSTOM_SYSTEM_PROMPTS = {
    # https://example.org
    'OTHER':
        'Be kind, '
        'if you don\\'t mind.'
}


def get_formatted_input(context, question, examples, instruction, post_prompt,
                        template=DEFAULT_TEMPLATE):
    # instruction - task instruction
    formatted_input = template.format(instruction=instruction, examples=examples,
                                      post_prompt=post_prompt,
                                      context=context.strip(), question=question)
    return formatted_input.strip()

# another
DEFAULT_PROMPTS_ZEYUAN = {
    'qa1': {
        'instruction':
            'Facts are hidden in a text. '
            'Say where ’somebody’ is.\\n'
            'Nothing else.',
        'examples':
            '<context>\\n'
            'Ruth is in {the} cellar.\\n'
            '</context>\\n\\n'
            'Question: Where is Ruth?\\n'
            'Answer: cellar.',
        'post_prompt': '',
    },
    'qa2': {
        'instruction': 'Two.',
        'examples': 'E2',
        'post_prompt': ' Stop. '
    }
}

DEFAULT_PROMPTS = {
    'qa1': {'instruction': 'Another one.', 'examples': 'E', 'post_prompt': 'P'},
    'qa2': {'instruction': 'Another two.', 'examples': 'E', 'post_prompt': 'P'},
}
"""
PAPER = ("DEFAULT_PROMPTS_ZEYUAN", "DEFAULT_TEMPLATE_ZEYUAN")
ORIGINAL = ("DEFAULT_PROMPTS", "DEFAULT_TEMPLATE")
REAL_PROMPTS = os.environ.get("CANON_BABILONG_PROMPTS")


@pytest.mark.parametrize("task", BABILONG_TASKS)
def test_our_prompts(task):
    """The specification's layout; our examples name no label (issue 17, item 3)."""
    stored = tomllib.loads(OWN_PROMPTS.read_text())[task]
    assert len(stored["examples"]) == (3 if task == "qa5" else 2)

    prompt = read_prompts(task).of("C", "Q ")

    examples = [(shot["context"], shot["question"], shot["answer"]) for shot in stored["examples"]]
    assert prompt == filled(f"{stored['instruction']} {stored['answer_format']}", examples)
    assert not [label for label in LABELS[task] if label.lower() in prompt.lower()]
    assert 100 <= len(prompt.split()) <= 260


@pytest.mark.parametrize("task", BABILONG_TASKS)
def test_prompts_of_lm_eval(task):
    config = load_yaml(harness_tasks() / "babilong" / f"babilong_{task}.yaml", resolve_func=False)

    prompts = read_prompts(task, "lm_eval")

    examples = [
        (shot["input"], shot["question"], shot["target"].rstrip("."))
        for shot in config["fewshot_config"]["samples"]
    ]
    assert prompts.of("C", "Q ") == filled(config["description"].strip(), examples)
    assert prompts.sha256 != read_prompts(task).sha256


def assert_equals_its_own_code(path, names, tasks):
    """The prompts are those of the file's function, called as the paper's evaluation does."""
    prompts_name, template_name = names
    module = runpy.run_path(str(path))
    for task in tasks:
        parts = module[prompts_name][task]
        template = module[template_name]
        if isinstance(template, dict):
            template = template[task]
        for context in ("C {x}", " \n C\n"):
            expected = module["get_formatted_input"](context, "Q? ", template=template, **parts)
            assert read_prompts(task, path).of(context, "Q? ") == expected


@pytest.mark.parametrize("names", [PAPER, ORIGINAL], ids=["paper", "original"])
def test_a_release_is_read_as_it_is_laid_out(tmp_path, names):
    """f-strings of earlier names, in dicts; BABILong's own file has only ORIGINAL."""
    path = tmp_path / "prompts.py"
    text = LAID_OUT
    if names == ORIGINAL:
        for of_paper, original in zip(PAPER, ORIGINAL, strict=True):
            text = text.replace(f"{of_paper} =", f"_{original} =")
    path.write_text(text)

    assert_equals_its_own_code(path, names, ["qa1", "qa2"])

    before = read_prompts("qa1", path).sha256
    path.write_text(text.replace("Question: {question}", "Asked: {question}"))
    assert read_prompts("qa1", path).sha256 != before


@pytest.mark.skipif(not REAL_PROMPTS, reason="CANON_BABILONG_PROMPTS names no prompts.py")
def test_the_real_release():
    names = PAPER if PAPER[0] in Path(REAL_PROMPTS).read_text() else ORIGINAL
    assert_equals_its_own_code(REAL_PROMPTS, names, BABILONG_TASKS)


REFUSED = {
    "mine.toml": (
        "[qa1",
        "[qa2]",
        OWN.replace('"A1"', '"A1"\nmore = 1'),
        OWN.replace('"A1"', '"A1."'),
        OWN.replace("qa1", "qa2"),
    ),
    "prompts.py": (  # not literal data
        f"{NAME} = {{'qa1': {{'instruction': open('/etc/passwd').read()}}}}",
        f"{NAME} = {{'qa1': {{'instruction': ' ', 'examples': 'b'}}}}",
        f"{NAME} = " + "[" * 5000,
        RELEASE.replace("'Do it.', 'examples'", "'Do it.'.upper(), 'examples'").replace("qa1", "x"),
        RELEASE + f"{NAME}['qa1']['instruction'] = os.environ['HOME']",
        RELEASE + f"{NAME} |= {{'qa1': 1}}",
        RELEASE + f"for {NAME} in ({{}},): pass",
        RELEASE + f"{NAME}.update(qa1=1)",
        RELEASE + f"{NAME} = open('/etc/passwd').read()",
        f"{NAME} = {{'qa1': {{'instruction': f'{{1 + 1}}', 'examples': 'E'}}}}",
        f"T = 'x'\n{NAME} = {{'qa1': {{'instruction': f'{{T!r:>9}}', 'examples': 'E'}}}}",
        "A = 'xxxxxxxx'\n" + "A = A + A\n" * 60 + f"{NAME} = {{'qa1': {{'instruction': A}}}}",
        RELEASE + "DEFAULT_TEMPLATE_ZEYUAN = {'qa2': '{context} {question}'}",
        RELEASE + "DEFAULT_TEMPLATE_ZEYUAN = '{context!r} {question:>9}'",
        RELEASE + "DEFAULT_TEMPLATE_ZEYUAN = '{context} {question} {context.x}'",
    ),
}


def test_prompts_can_be_replaced_by_a_toml(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(OWN)

    prompts = read_prompts("qa1", path)

    assert prompts.of("C", "Q ") == filled("Say it.", [("C1", "Q1", "A1")])
    path.write_text(OWN.replace("C1", "C3"))
    assert read_prompts("qa1", path).sha256 != prompts.sha256


def test_prompts_can_be_replaced_by_a_clones(tmp_path):
    """A prompts.py is read as data with its layout (issue 17, item 3)."""
    path = tmp_path / "prompts.py"
    path.write_text(RELEASE)
    instructions = {"qa1": "Do it.\n\nE1\n\nE2 {x}", "qa2": "Do it. Say so.\n\nE"}
    for task, instruction in instructions.items():
        assert read_prompts(task, path).of("C", "Q ") == filled(instruction, [])

    path.write_text(RELEASE + f"DEFAULT_TEMPLATE_ZEYUAN = {LAYOUT!r}")
    expected = LAYOUT.format(**PARTS, context="C {x}", question="Q ")
    assert read_prompts("qa2", path).of("C {x}", "Q ") == expected


@pytest.mark.parametrize("name", REFUSED)
def test_prompts_are_checked(tmp_path, name):
    for content in REFUSED[name]:
        (tmp_path / name).write_text(content)
        with refused("babilong.prompts"):
            read_prompts("qa1", tmp_path / name)


# ---- the tasks


@pytest.fixture(scope="module")
def staged(tmp_path_factory):
    """The folder of the staged rows of all tasks."""
    return stage_fixtures(tmp_path_factory.mktemp("staged"), NAMES)


def load_tasks(**metadata):
    """Load the group, of which lm_eval has one of the same name."""
    with quiet_harness():
        folders = [str(harness_tasks() / "babilong"), str(ROOT / "eval" / "tasks")]
        manager = TaskManager(include_path=folders, include_defaults=False, metadata=dict(metadata))
        assert "babilong_qa20" in manager.all_subtasks  # lm_eval's own
        return dict(manager.load(["babilong"])["tasks"])


def scores(tasks, answer):
    """The scores of a model that answers from the prompts' rows."""
    rows = {}
    for name in NAMES:
        prompts = read_prompts(name.split("_")[1])
        rows |= {prompts.of(row["input"], row["question"]): row for row in rows_of(name)}
    model = ScriptedLM(lambda request: answer(rows[request.args[0]]))

    with quiet_harness():
        evaluated = evaluate(model, {"tasks": dict(tasks)}, bootstrap_iters=0)

    assert evaluated is not None
    options = {"until": ["."], "max_gen_toks": 20, "do_sample": False}
    assert all(request.args[1] == options for request in model.asked)
    return {name: evaluated["results"][name]["acc,none"] for name in tasks}


@pytest.mark.system
def test_the_suite_complete(staged):
    tasks = load_tasks(staged=str(staged))

    assert list(tasks) == NAMES
    for name, task in tasks.items():
        qa = name.split("_")[1]
        description = task.config.metadata
        assert task.VERSION == 2.0
        assert description["primary"] == "acc"
        assert description["chance"] == pytest.approx(1 / len(LABELS[qa]), abs=1e-4)
        for row, document in zip(rows_of(name), list(task.eval_docs), strict=True):
            prompt = read_prompts(qa).of(row["input"], row["question"])
            assert task.doc_to_text(document) == prompt
            assert prompt.endswith(f"\n\nQuestion: {row['question']}\nAnswer:")
            assert task.doc_to_target(document) == row["target"]

    # labels of the question are ignored
    right = scores(tasks, lambda row: f"{row['question']} {row['target'].upper()}")
    assert set(right.values()) == {1.0}
    wrong = scores(tasks, lambda row: " ".join([*PLACES, *GIVING]))
    assert set(wrong.values()) == {0.0}


def test_rows_of_other_data_are_refused(tmp_path):
    row = {"input": "Mary went to the cellar.", "question": "Where is Mary? ", "target": "cellar"}
    write_staged(tmp_path, "babilong_qa1_0k", [row], revision="f" * 40)

    with refused("babilong.target", row=0):
        load(qa="qa1", context="0k", staged=str(tmp_path))


def test_cut_prompts_are_refused(staged, tmp_path):
    tokenizer = data_folders.tokenizer()
    (tmp_path / tokenizer.file_name).write_bytes(tokenizer.model)
    answer_tokens = 20

    def load_documents(**options):
        return load(qa="qa2", context="1k", staged=str(staged), **options)["test"]

    documents = load_documents(max_length=10**6)  # needs no tokenizer
    longest = max(len(tokenizer.encode(prompt)) for prompt in documents["prompt"]) + answer_tokens

    fitting = load_documents(tokenizer=str(tmp_path), max_length=longest)
    assert len(fitting) == len(documents)
    with refused("eval.prompt_too_long", expected=longest):
        load_documents(tokenizer=str(tmp_path), max_length=longest - 1)
