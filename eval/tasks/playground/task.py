"""The lm_eval task of every synthetic task: a document is an evaluation window with its questions.

Texts are decimal ids (canon_pretrain/data/id_tokenizer.py). A score is the mean over all questions,
and standard errors are over windows: of each the sum and the number of questions are kept.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import lm_eval.api.task
from lm_eval.api.instance import Instance
from lm_eval.config.task import TaskConfig

from canon_pretrain.checkpoint.architecture import model_args
from canon_pretrain.core.errors import UserError
from canon_pretrain.core.files import read_json
from canon_pretrain.hf.export import RECORD
from canon_pretrain.model.args import ModelArgs
from canon_pretrain.model.counts import num_parameters
from canon_pretrain.synthetic.evaluation import (
    END,
    VERDICTS,
    EvaluationWindow,
    evaluation_windows,
    metrics,
    pooled_mean,
    score_window,
    task_of_run,
)
from canon_pretrain.synthetic.task import Task

WINDOWS = 200  # of each setting, unless `--option playground_windows=N`
POSITIONS = 32  # of a window, at which Lano's distribution is compared


class Playground(lm_eval.api.task.Task):
    """The task of the run or export that the metadata name; `VERDICTS` count all answers."""

    VERSION = 2
    OUTPUT_TYPE = "generate_until"

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._metadata = dict(config["metadata"])
        self.task, args = _find_task(self._metadata)
        self._num_parameters = num_parameters(args)
        super().__init__()

        # lm_eval reads the options of generation from the config
        temperature = self.task.temperature
        self._config = TaskConfig(
            task=config["task"],
            metadata=self._metadata,
            num_fewshot=0,
            generation_kwargs={
                "until": [],
                "do_sample": temperature > 0,
                "temperature": temperature,
            },
        )

    def download(self, *_: Any, **__: Any) -> None:
        """Load nothing: windows are generated."""
        self.dataset: dict[str, Any] = {}

    @cached_property
    def _windows(self) -> list[list[EvaluationWindow]]:
        num_windows = str(self._metadata.get("playground_windows", WINDOWS))
        if not num_windows.isdecimal() or int(num_windows) < 1:
            raise UserError(
                "playground.windows",
                f"playground_windows = {num_windows!r}: expected a number of windows",
                given=num_windows,
            )
        return evaluation_windows(self.task, int(num_windows), POSITIONS)

    def test_docs(self) -> list[dict[str, Any]]:
        documents = []
        for number, window in enumerate(self._windows):
            settings = [{"name": text.task.name, **text.task.settings} for text in window]
            answers = [_text(question.answer) for text in window for question in text.questions]
            documents.append(
                {
                    "window": number,
                    "settings": settings,
                    "answers": answers,
                }
            )
        return documents

    def has_training_docs(self) -> bool:
        return False

    def has_validation_docs(self) -> bool:
        return False

    def has_test_docs(self) -> bool:
        return True

    def doc_to_text(self, doc: Mapping[str, Any]) -> str:
        """Return nothing: `construct_requests` asks several questions."""
        return ""

    def doc_to_target(self, doc: Mapping[str, Any]) -> list[str]:
        return doc["answers"]

    def construct_requests(self, doc: dict[str, Any], ctx: str, **kwargs: Any) -> list[Instance]:
        """Return the requests of a window: all questions, then the spans to be scored."""
        window = self._windows[doc["window"]]
        requests: list[Instance] = []

        def add(kind: Literal["generate_until", "loglikelihood"], *arguments: Any) -> None:
            requests.append(
                Instance(kind, doc, arguments, idx=len(requests), metadata=kwargs["metadata"])
            )

        for text in window:
            for question in text.questions:
                options = {**self.config.generation_kwargs, "max_gen_toks": text.limit(question)}
                add("generate_until", _text(question.prompt), options)

        # a span is scored after all tokens before it; in texts of ids a space separates the two
        for text in window:
            for span in text.spans:
                context = _text(text.ids[: span.start])
                add("loglikelihood", context, " " + _text(span.tokens))
        return requests

    def process_results(self, doc: Mapping[str, Any], results: Sequence[Any]) -> dict[str, Any]:
        """Return the scores and verdicts of a window, pooled over its questions."""
        # The results are in the order of `construct_requests`.
        num_questions = len(doc["answers"])
        answers = []
        for text in results[:num_questions]:
            answers.append([_id(word) for word in text.split()])
        log_likelihoods = [log_likelihood for log_likelihood, _ in results[num_questions:]]

        window = self._windows[doc["window"]]
        scores, verdicts = score_window(window, answers, log_likelihoods, self._num_parameters)
        return scores | {kind: verdicts[kind] for kind in VERDICTS}

    def aggregation(self) -> dict[str, Callable[[Sequence[Any]], float]]:
        return dict.fromkeys(metrics(self.task), pooled_mean) | dict.fromkeys(VERDICTS, sum)

    def higher_is_better(self) -> dict[str, bool]:
        return metrics(self.task) | {kind: kind == "right" for kind in VERDICTS}


def _find_task(metadata: Mapping[str, Any]) -> tuple[Task, ModelArgs]:
    """Return task and model of a run's identity, from `eval run`, or of an export's record."""
    identity = metadata.get("identity")
    if identity is None and metadata.get("pretrained"):
        record = Path(str(metadata["pretrained"])) / RECORD
        if record.exists():
            identity = read_json(record, finite=False).get("identity")

    identity = identity or {}
    task = task_of_run(identity)
    if task is None:
        raise UserError(
            "playground.no_task",
            "the suite playground asks a model that was trained on a synthetic task "
            "(data.task.name): pass such a run, or an export of one",
        )
    return task, model_args(identity, Path("the model"))


def _id(word: str) -> int:
    # a model of another library may have a tokenizer with words
    return int(word) if word.isdecimal() else END


def _text(ids: Iterable[int]) -> str:
    return " ".join(map(str, ids))
