"""The lm_eval task of every synthetic task: a document is an evaluation window with its questions.

Texts are decimal ids (canon_pretrain/data/id_tokenizer.py). A window's score is the mean over its
questions, so that standard errors are over windows.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import lm_eval.api.task
from lm_eval.api.instance import Instance
from lm_eval.api.metrics import mean
from lm_eval.config.task import TaskConfig

from canon_pretrain.core.errors import UserError
from canon_pretrain.core.files import read_json
from canon_pretrain.hf.export import RECORD
from canon_pretrain.synthetic.evaluation import (
    END,
    VERDICTS,
    WindowQuestions,
    metrics,
    task_of_run,
    window_questions,
)
from canon_pretrain.synthetic.task import Task

WINDOWS = 200
"""Evaluation windows of each setting, unless `--option playground_windows=N`."""


class Playground(lm_eval.api.task.Task):
    """The task of the run or export that the metadata name; `VERDICTS` count all answers."""

    VERSION = 1
    OUTPUT_TYPE = "generate_until"

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._metadata = dict(config["metadata"])
        self.task = _find_task(self._metadata)
        super().__init__()
        options = {"until": [], "do_sample": False}
        self._config = TaskConfig(
            task=config["task"],
            num_fewshot=0,
            generation_kwargs=options,
            metadata=self._metadata,
        )

    def download(self, *_: Any, **__: Any) -> None:
        """Load nothing: windows are generated."""
        self.dataset: dict[str, Any] = {}

    @cached_property
    def _windows(self) -> list[WindowQuestions]:
        given = str(self._metadata.get("playground_windows", WINDOWS))
        if not given.isdecimal() or int(given) < 1:
            message = f"playground_windows = {given!r}: expected a number of windows"
            raise UserError("playground.windows", message, given=given)
        return window_questions(self.task, int(given))

    @cached_property
    def _docs(self) -> list[dict[str, Any]]:
        return [
            {
                "index": index,
                "task": {"name": each.task.name, **each.task.settings},
                "window": each.window,
                "answers": [_text(question.answer) for question in each.questions],
            }
            for index, each in enumerate(self._windows)
        ]

    def has_training_docs(self) -> bool:
        return False

    def has_validation_docs(self) -> bool:
        return False

    def has_test_docs(self) -> bool:
        return True

    def test_docs(self) -> list[dict[str, Any]]:
        return self._docs

    def doc_to_text(self, doc: Mapping[str, Any]) -> str:
        """Return the window's first prompt; construct_requests asks all."""
        return _text(self._windows[doc["index"]].questions[0].prompt)

    def doc_to_target(self, doc: Mapping[str, Any]) -> list[str]:
        return doc["answers"]

    def construct_requests(self, doc: dict[str, Any], ctx: str, **given: Any) -> list[Instance]:
        window = self._windows[doc["index"]]
        requests = []
        for number, question in enumerate(window.questions):
            options = {**self.config.generation_kwargs, "max_gen_toks": window.limit(question)}
            arguments = (_text(question.prompt), options)
            requests.append(Instance("generate_until", doc, arguments, number, given["metadata"]))
        return requests

    def process_results(self, doc: Mapping[str, Any], results: Sequence[str]) -> dict[str, float]:
        # a model of another library may have a tokenizer with words
        parse = lambda word: int(word) if word.isdecimal() else END  # noqa: E731
        answers = [list(map(parse, text.split())) for text in results]
        scores, verdicts = self._windows[doc["index"]].judge(answers)
        return scores | {kind: verdicts[kind] for kind in VERDICTS}

    def aggregation(self) -> dict[str, Callable[[Sequence[float]], float]]:
        return dict.fromkeys(metrics(self.task), mean) | dict.fromkeys(VERDICTS, sum)

    def higher_is_better(self) -> dict[str, bool]:
        counts = {kind: kind == "right" for kind in VERDICTS}
        return dict.fromkeys(metrics(self.task), True) | counts


def _find_task(metadata: Mapping[str, Any]) -> Task:
    """Return the task of a run's identity, which `eval run` passes, or of an export's record."""
    identity, folder = metadata.get("identity"), metadata.get("pretrained")
    if identity is None and folder and (path := Path(str(folder)) / RECORD).exists():
        identity = read_json(path, finite=False).get("identity")
    task = task_of_run(identity or {})
    if task is None:
        message = "the suite playground asks a model that was trained on a synthetic task "
        message += "(data.task.name): give such a run, or an export of one"
        raise UserError("playground.no_task", message)
    return task


def _text(ids: Sequence[int]) -> str:
    return " ".join(map(str, ids))
