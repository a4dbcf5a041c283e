"""The questions of a task's evaluation windows and their scores, in training and in `eval`."""

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from canon_pretrain.synthetic.task import EVALUATION, Question, Span, Task
from canon_pretrain.synthetic.tasks import build_task

SEED = 0
"""Of the windows: the same for runs that differ in seeds, so that their items can be paired."""
END = 0
"""The unused id: an answer ends before it."""
VERDICTS = ("right", "wrong", "malformed", "too_long", "empty")
_SETTING = "data.task."


def task_of_run(identity: Mapping[str, Any]) -> Task | None:
    """Return the task of a run's identity, None for a run on shards. Raises UserError."""
    settings = {
        key.removeprefix(_SETTING): value
        for key, value in identity.items()
        if key.startswith(_SETTING)
    }
    name = settings.pop("name", None)
    return name and build_task(name, settings | {"seq_len": identity["training.seq_len"]})


class WindowQuestions(NamedTuple):
    """The questions of one window of `task`; `label` precedes its metrics' names."""

    task: Task
    label: str
    window: int
    ids: np.ndarray
    questions: list[Question]

    def limit(self, question: Question) -> int:
        """Return how many tokens to generate: one too many, if the window has room."""
        return min(self.task.answer_limit + 1, self.task.seq_len - len(question.prompt))

    def score(
        self,
        answers: Sequence[Sequence[int]],
        spans: Sequence[Span],
        logs: Sequence[float],
        num_parameters: int,
    ) -> tuple[dict[str, float], Counter[str]]:
        """Return the window's scores, means over its questions, and the number of each verdict."""
        values: dict[str, list[float]] = {}
        verdicts: Counter[str] = Counter()
        for question, answer in zip(self.questions, answers, strict=True):
            found = self.task.judge(question.prompt, self._complete(list(answer)))
            verdicts[found.verdict] += 1
            for metric, value in found.values.items():
                values.setdefault(metric, []).append(value)
        scores = {metric: sum(each) / len(each) for metric, each in values.items()}
        scores |= self.task.score_spans(self.ids, spans, logs, num_parameters)
        return {self.label + metric: value for metric, value in scores.items()}, verdicts

    def _complete(self, answer: list[int]) -> list[int]:
        """Return the answer up to its end; a model of another library may not stop there."""
        ends = (end for end in range(1, len(answer)) if self.task.is_complete(answer[:end]))
        return answer[: next(ends, len(answer))]


def window_questions(task: Task, count: int) -> list[WindowQuestions]:
    """Return the questions of `count` windows of each of the task's evaluations, by window."""
    hardest, *others = task.evaluations()
    found = list[WindowQuestions]()
    for one in (hardest, *others):
        label, asked = _label(one, hardest), list(one.questions(SEED, 0, count))
        for number, ids in enumerate(one.windows(SEED, 0, count, EVALUATION).ids):
            own = [question for question in asked if question.window == number]
            if own or one.span_metrics:
                found.append(WindowQuestions(one, label, number, ids, own))
    return sorted(found, key=lambda each: each.window)


def _label(task: Task, hardest: Task) -> str:
    """Return the settings that differ, as in "any_l/" or "k4/"; empty for the hardest setting."""
    own, other = dataclasses.asdict(task), dataclasses.asdict(hardest)
    parts = [
        key.replace("exact", "any") if own[key] is False else f"{key}{own[key]}"
        for key in own
        if own[key] != other[key]
    ]
    return "".join(f"{part}/" for part in parts)


def metrics(task: Task) -> dict[str, bool]:
    """Return the names of all scores, the main one first, and whether higher is better."""
    hardest, *others = task.evaluations()
    return {
        _label(one, hardest) + name: higher
        for one in (hardest, *others)
        for name, higher in {**dict.fromkeys(one.metrics, True), **one.span_metrics}.items()
    }


def mean_scores(windows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the mean over windows of each score."""
    names = dict.fromkeys(name for scores in windows for name in scores)
    found = {name: [scores[name] for scores in windows if name in scores] for name in names}
    return {name: sum(each) / len(each) for name, each in found.items()}
