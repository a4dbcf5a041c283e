"""The questions of a task's evaluation windows and their scores, in training and in `eval`."""

import dataclasses
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np

from canon_pretrain.synthetic.task import EVALUATION, EVALUATION_SEED, Question, Span, Task
from canon_pretrain.synthetic.tasks import build_task

END = 0
"""The unused id: an answer ends before it."""
SCORED_WINDOWS = 16
"""Windows per setting whose questions training asks, unless validation.windows is set."""
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


class Asked(NamedTuple):
    """What is asked about one window of `task`; `label` precedes the names of its metrics."""

    task: Task
    label: str
    ids: np.ndarray
    questions: list[Question]
    spans: list[Span]

    def limit(self, question: Question) -> int:
        """Return how many tokens to generate: one too many, if the window has room."""
        return min(self.task.answer_limit + 1, self.task.seq_len - len(question.prompt))


def evaluation_windows(task: Task, count: int, most: int | None = None) -> list[list[Asked]]:
    """Return what is asked about `count` windows of each setting of `task`, by window.

    `most`: positions of spans per window, as in `Task.spans`.
    """
    found: list[list[Asked]] = [[] for _ in range(count)]
    hardest, *others = task.evaluations()
    for one in (hardest, *others):
        label, questions = _label(one, hardest), one.questions(EVALUATION_SEED, 0, count)
        windows = one.windows(EVALUATION_SEED, 0, count, EVALUATION).ids
        own = {n: list(each) for n, each in groupby(questions, key=lambda each: each.window)}
        for number, (ids, asked) in enumerate(zip(windows, found, strict=True)):
            asked.append(Asked(one, label, ids, own.get(number, []), one.spans(ids, most)))
    return [asked for asked in found if any(one.questions or one.spans for one in asked)]


Pooled = tuple[float, int]
"""The sum of a score over questions, and their number; of a score of a whole window, it and 1."""


def score_window(
    window: Sequence[Asked],
    answers: Iterable[Sequence[int]],
    logs: Iterable[float],
    num_parameters: int,
) -> tuple[dict[str, Pooled], Counter[str]]:
    """Return a window's scores, to be pooled over windows, and the number of each verdict.

    `answers` and log-likelihoods `logs` are to all questions and spans, in the order of `window`.
    """
    answers, logs = iter(answers), iter(logs)
    scores: dict[str, Pooled] = {}
    verdicts: Counter[str] = Counter()
    for asked in window:
        task = asked.task
        judged = [
            task.judge(question.prompt, _complete(task, list(next(answers))))
            for question in asked.questions
        ]
        verdicts.update(each.verdict for each in judged)
        by_metric: dict[str, list[float]] = {}
        for each in judged:
            for metric, value in each.values.items():
                by_metric.setdefault(metric, []).append(value)
        own = [next(logs) for _ in asked.spans]
        of_window = task.score_spans(asked.ids, asked.spans, own, num_parameters)

        found = {metric: (sum(values), len(values)) for metric, values in by_metric.items()}
        found |= {metric: (value, 1) for metric, value in of_window.items()}
        scores |= {asked.label + metric: each for metric, each in found.items()}
    return scores, verdicts


def _complete(task: Task, answer: list[int]) -> list[int]:
    """Return the answer up to its end; a model of another library may not stop there."""
    ends = (end for end in range(1, len(answer)) if task.is_complete(answer[:end]))
    return answer[: next(ends, len(answer))]


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


def num_questions(task: Task, score: str, num_windows: int) -> int | None:
    """Return how many questions a score is the mean of; None for one of log-likelihoods."""
    hardest, *others = task.evaluations()
    for one in (hardest, *others):
        metric = score.removeprefix(_label(one, hardest))
        if _label(one, hardest) + metric == score and metric in one.metrics:
            asked = one.questions(EVALUATION_SEED, 0, num_windows)
            if metric == one.metrics[0]:  # of every question; some judge slowly
                return sum(1 for _ in asked)
            return sum(metric in one.judge(each.prompt, each.answer).values for each in asked)
    return None


def pooled_scores(windows: Iterable[Mapping[str, Pooled]]) -> dict[str, float]:
    """Return the mean of each score over all questions, so that parts add up to the whole."""
    found: dict[str, list[Pooled]] = {}
    for scores in windows:
        for name, each in scores.items():
            found.setdefault(name, []).append(each)
    return {name: pooled_mean(each) for name, each in found.items()}


def pooled_mean(parts: Iterable[Pooled]) -> float:
    """Return the sum of the sums over the sum of the counts."""
    sums, counts = zip(*parts, strict=True)
    return float(math.fsum(sums) / sum(counts))
