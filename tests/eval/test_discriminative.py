"""The suite `discriminative`: lm_eval's own tasks, on staged rows."""

import socket

import lm_eval.api.task
import lm_eval.tasks
import pytest
from lm_eval.tasks import TaskManager

from eval.harness import HARNESS_FOLDERS
from eval.staged import CATALOGUE, DISCRIMINATIVE
from eval.suite_names import harness_tasks
from tests.eval_fixtures import fixture, rows_of, stage_fixtures
from tests.support import ROOT

TASKS = ROOT / "eval" / "tasks"
NAMES = [data.key for data in CATALOGUE.values() if data.suite == DISCRIMINATIVE]
HARNESS = [harness_tasks() / folder for folder in HARNESS_FOLDERS]


def load(wanted, folders, **metadata):
    """Load tasks by name from folders."""
    manager = TaskManager(include_path=folders, include_defaults=False, metadata=metadata)
    return manager.load(wanted)["tasks"]


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    """The members of the group, without network."""

    def refuse(*_, **__):
        raise AssertionError("the network was used")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket.socket, "connect", refuse)
        patch.setattr(lm_eval.api.task.datasets, "load_dataset", refuse)
        staged = stage_fixtures(tmp_path_factory.mktemp("staged"), NAMES)
        return load(["discriminative"], [*HARNESS, TASKS], staged=str(staged))


def test_the_group_has_the_suites_tasks(tasks):
    assert list(tasks) == NAMES
    for name, task in tasks.items():
        assert len(task.eval_docs) == len(rows_of(name))
        assert task.config.num_fewshot == 0

    primary = {name: task.config.metadata["primary"] for name, task in tasks.items()}
    assert primary == {
        **dict.fromkeys(NAMES[:7], "acc"),
        "hellaswag": "acc_norm",
        "arc_challenge": "acc_norm",
        "lambada_openai": ["acc", "perplexity"],
        "wikitext": "word_perplexity",
    }


def test_sources_are_columns_that_items_share(tasks):
    for name, task in tasks.items():
        field = task.config.metadata.get("source")
        if field is not None:
            sources = [doc[field] for doc in task.eval_docs]
            assert field in CATALOGUE[name].columns
            assert 1 < len(set(sources)) < len(sources)


@pytest.mark.system
def test_tasks_equal_those_of_lm_eval(tasks, monkeypatch):
    """Configuration, version and requests are equal for the same rows from the "hub"."""
    requested: list[tuple[str, str | None]] = []

    def from_hub(path, name=None, **_):
        requested.append((path, name))
        (key,) = [k for k in NAMES if (CATALOGUE[k].path, CATALOGUE[k].config) == (path, name)]
        return dict.fromkeys(("train", "validation", "test"), fixture(key))

    monkeypatch.setattr(lm_eval.api.task.datasets, "load_dataset", from_hub)
    of_lm_eval = load(NAMES, HARNESS)
    assert requested == [(CATALOGUE[key].path, CATALOGUE[key].config) for key in NAMES]

    may_differ = {
        "custom_dataset",
        "dataset_kwargs",
        "num_fewshot",
        "metadata",
        "training_split",
        "validation_split",
        "fewshot_split",
    }
    for name in NAMES:
        our_task = tasks[name]
        their_task = of_lm_eval[name]
        ours = our_task.dump_config()
        theirs = their_task.dump_config()
        differing = {key for key in {*ours, *theirs} if ours.get(key) != theirs.get(key)}
        assert differing <= may_differ, name
        assert our_task.VERSION == their_task.VERSION

        our_task.build_all_requests()
        their_task.build_all_requests()
        our_requests = [request.args for request in our_task.instances]
        assert our_requests == [request.args for request in their_task.instances]

        # the split that is scored is the one that is staged
        scored_split = theirs.get("test_split") or theirs["validation_split"]
        assert scored_split == CATALOGUE[name].split
