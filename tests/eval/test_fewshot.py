"""Few-shot prompts: an item is never among its own examples, however they are selected."""

import operator

import pytest
from lm_eval.tasks import TaskManager

from eval.harness import open_tasks, quiet_harness
from tests.scripted_lm import ScriptedLM
from tests.support import refused

TASK = """
task: shots
custom_dataset: !function shots.load
output_type: generate_until
doc_to_text: "{{q}}:"
doc_to_target: "{{a}}"
num_fewshot: 2
metric_list:
  - metric: exact_match
    aggregation: mean
    higher_is_better: true
"""
LOAD = """
import random, datasets
from lm_eval.api.samplers import ContextSampler

def rows(start, count):
    return [{"q": f"question {k}", "a": f"answer-{k}."} for k in range(start, start + count)]

def load(**_):
    splits = {"test": rows(0, 5), "other": rows(10, 5), "overlap": rows(3, 5)}
    return {name: datasets.Dataset.from_list(of) for name, of in splits.items()}

def copies():
    return rows(0, 2)

def upper(docs):
    return docs.map(lambda doc: {"q": doc["q"].upper()})

def shuffled(docs):
    order = random.sample(range(100), len(docs))
    return docs.map(lambda doc, k: {"order": order[k]}, with_indices=True)

class Careless(ContextSampler):
    def sample(self, n, eval_doc=None, df=None, **_):
        return self.df[:n]
"""

# what selects the examples of the asked items 0 to 4
SELECTED = {
    "the test split, for lack of another": "test_split: test",
    "the test split, by name": "test_split: test\nfewshot_split: test",
    "the first ones": "test_split: test\nfewshot_config: {sampler: first_n}",
    "the first ones of a name": "test_split: test\nfewshot_config: {sampler: first_n, split: test}",
    "a validation split": "validation_split: test",
    "a validation split, by name": "validation_split: test\nfewshot_split: test",
    "a list with copies": "test_split: test\nfewshot_config: {samples: !function shots.copies}",
    "a split with copies": "test_split: test\ntraining_split: overlap",
    "a sampler that ignores the item": (
        "test_split: test\nfewshot_config: {sampler: !function shots.Careless}"
    ),
    "documents processed alike": "test_split: test\nprocess_docs: !function shots.upper",
}


@pytest.fixture
def prompts(tmp_path):
    """Return the prompts of a task with more YAML lines, by document."""
    (tmp_path / "shots.py").write_text(LOAD)

    def prompts_of(more, text=TASK, name="shots"):
        path = tmp_path / f"{name}.yaml"
        path.write_text(f"{text}{more}\n")
        (plan,) = open_tasks(name, path, {}, None, None).values()
        model = ScriptedLM(lambda request: "")
        plan.run(model, operator.call)
        return {request.doc_id: request.args[0] for request in model.asked}

    prompts_of.folder = tmp_path
    return prompts_of


@pytest.mark.parametrize("more", SELECTED.values(), ids=SELECTED)
def test_no_prompt_holds_its_own_answer(prompts, more):
    by_item = prompts(more)

    assert sorted(by_item) == [0, 1, 2, 3, 4]
    for item, prompt in by_item.items():
        assert prompt.lower().endswith(f"question {item}:")
        assert f"answer-{item}." not in prompt

    # a list or split with a copy of the item has no other example in its place
    has_copies = any(word in more for word in ("copies", "overlap", "Careless"))
    counts = {prompt.count("answer-") for prompt in by_item.values()}
    assert counts <= ({1, 2} if has_copies else {2})
    assert max(counts) == 2


def test_a_group_that_asks_for_examples(prompts):
    text = TASK.replace("num_fewshot: 2\n", "test_split: test\n")
    (prompts.folder / "shots.yaml").write_text(text)
    group = "group: many\ntask:\n  - task: shots\n    num_fewshot: 2\n"

    by_item = prompts("", group, "many")

    for item, prompt in by_item.items():
        assert prompt.count("answer-") == 2
        assert f"answer-{item}." not in prompt


@pytest.mark.parametrize("more", ["training_split: other", "fewshot_split: other"])
def test_prompts_of_another_split_are_those_of_lm_eval(prompts, more):
    ours = prompts(f"test_split: test\n{more}")

    with quiet_harness():
        manager = TaskManager(include_defaults=False)
        (task,) = manager.load([str(prompts.folder / "shots.yaml")])["tasks"].values()
        task.set_fewshot_seed(1234)
        task.build_all_requests(rank=0, world_size=1)
    assert ours == {request.doc_id: request.args[0] for request in task.instances}


UNRECOGNIZABLE = {
    "upper": "fewshot_config: {split: test, process_docs: !function shots.upper}",
    "shuffled": "process_docs: !function shots.shuffled",
}


@pytest.mark.parametrize("more", UNRECOGNIZABLE.values(), ids=UNRECOGNIZABLE)
def test_items_that_cannot_be_recognized_are_refused(prompts, more):
    """The asked split, processed by another function, or at random."""
    with refused("eval.fewshot", split="test"):
        prompts(f"test_split: test\n{more}")

    # without examples there is nothing to leave out
    without_examples = TASK.replace("shot: 2", "shot: 0")
    assert len(prompts(f"test_split: test\n{more}", without_examples)) == 5
