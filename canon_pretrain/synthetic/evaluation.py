"""The questions of a task's evaluation windows and their scores, in training and in `eval`."""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from canon_pretrain.synthetic.task import EVALUATION, EVALUATION_SEED, Question, Span, Task
from canon_pretrain.synthetic.tasks import build_task

END = 0
"""The unused id: an answer ends before it."""
SCORED_WINDOWS = 16
"""Windows per setting whose questions training asks, unless validation.windows is set."""
OF_ALL_QUESTIONS = ("exact", "valid")
"""Metrics that every question of a setting has."""
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
    if not name:
        return None
    return build_task(name, settings | {"seq_len": identity["training.seq_len"]})


class EvaluationWindow(NamedTuple):
    """A window of `task` with its questions and spans; `label` precedes the names of metrics."""

    task: Task
    label: str
    ids: np.ndarray
    questions: list[Question]
    spans: list[Span]

    def limit(self, question: Question) -> int:
        """Return how many tokens to generate: one too many, if the window has room."""
        room = self.task.seq_len - len(question.prompt)
        return min(self.task.answer_limit + 1, room)


def evaluation_windows(
    task: Task, count: int, max_positions: int | None = None
) -> list[list[EvaluationWindow]]:
    """Return the windows of each number below `count`, one per setting of `task`.

    Numbers without any question or span are left out. `max_positions` is that of `Task.spans`.
    """
    by_number: list[list[EvaluationWindow]] = [[] for _ in range(count)]
    for label, setting in _labeled(task):
        windows = setting.windows(EVALUATION_SEED, 0, count, EVALUATION).ids
        questions = defaultdict[int, list[Question]](list)
        for question in setting.questions(EVALUATION_SEED, 0, count):
            questions[question.window].append(question)
        for number, ids in enumerate(windows):
            spans = setting.spans(ids, max_positions)
            window = EvaluationWindow(setting, label, ids, questions[number], spans)
            by_number[number].append(window)
    return [
        windows
        for windows in by_number
        if any(window.questions or window.spans for window in windows)
    ]


Pooled = tuple[float, int]
"""The sum of a score over questions, and their number; of a score of a whole window, it and 1."""


def score_window(
    windows: Sequence[EvaluationWindow],
    answers: Iterable[Sequence[int]],
    logs: Iterable[float],
    num_parameters: int,
) -> tuple[dict[str, Pooled], Counter[str]]:
    """Return the scores of a number's windows, to be pooled, and the number of each verdict.

    `answers` and log-likelihoods `logs` are to all questions and spans, in the order of `windows`.
    """
    answers = iter(answers)
    logs = iter(logs)
    scores: dict[str, Pooled] = {}
    verdicts: Counter[str] = Counter()
    for window in windows:
        task = window.task

        # Scores of answers are pooled over the questions of the window.
        values = defaultdict[str, list[float]](list)
        for question in window.questions:
            answer = _complete(task, list(next(answers)))
            judgement = task.judge(question.prompt, answer)
            verdicts[judgement.verdict] += 1
            for metric, value in judgement.values.items():
                values[metric].append(value)
        for metric in task.metrics:
            if metric in values:
                scores[window.label + metric] = sum(values[metric]), len(values[metric])

        # A score of log-likelihoods is one number for the window.
        span_logs = [next(logs) for _ in window.spans]
        span_scores = task.score_spans(window.ids, window.spans, span_logs, num_parameters)
        for metric, value in span_scores.items():
            scores[window.label + metric] = value, 1
    return scores, verdicts


def _complete(task: Task, answer: list[int]) -> list[int]:
    """Return the answer up to its end; a model of another library may not stop there."""
    for end in range(1, len(answer)):
        if task.is_complete(answer[:end]):
            return answer[:end]
    return answer


def _labeled(task: Task) -> Iterator[tuple[str, Task]]:
    """Yield the settings to evaluate on, with labels that precede the names of their metrics.

    A label holds what differs from the hardest setting, as in "any_l/" or "k4/"; its own is "".
    """
    hardest = task.evaluations()[0]
    for setting in task.evaluations():
        label = ""
        for key, value in setting.settings.items():
            if value != hardest.settings[key]:
                part = key.replace("exact", "any") if value is False else f"{key}{value}"
                label = f"{label}{part}/"
        yield label, setting


def metrics(task: Task) -> dict[str, bool]:
    """Return the names of all scores, the main one first, and whether higher is better."""
    higher_is_better = {}
    for label, setting in _labeled(task):
        scores = dict.fromkeys(setting.metrics, True) | dict(setting.span_metrics)
        for metric, is_better in scores.items():
            higher_is_better[label + metric] = is_better
    return higher_is_better


def num_questions(task: Task, score: str, num_windows: int) -> int | None:
    """Return how many questions a score is the mean of; None for one of log-likelihoods."""
    for label, setting in _labeled(task):
        metric = score.removeprefix(label)
        if label + metric != score or metric not in setting.metrics:
            continue
        questions = setting.questions(EVALUATION_SEED, 0, num_windows)
        # Every question has this metric, so that none has to be judged, which may be slow.
        if metric in OF_ALL_QUESTIONS:
            return sum(1 for _ in questions)
        return sum(
            metric in setting.judge(question.prompt, question.answer).values
            for question in questions
        )
    return None


class PooledScore(NamedTuple):
    """The mean of a score over all questions; `stderr`: its standard error, None of one window."""

    mean: float
    stderr: float | None


def pooled_scores(windows: Iterable[Mapping[str, Pooled]]) -> dict[str, PooledScore]:
    """Return each score over all questions, so that parts add up to the whole."""
    parts = defaultdict[str, list[Pooled]](list)
    for scores in windows:
        for name, part in scores.items():
            parts[name].append(part)
    return {
        name: PooledScore(pooled_mean(of_name), pooled_stderr(of_name))
        for name, of_name in parts.items()
    }


def pooled_mean(parts: Iterable[Pooled]) -> float:
    """Return the sum of the sums over the sum of the counts."""
    sums, counts = zip(*parts, strict=True)
    return float(math.fsum(sums) / sum(counts))


def pooled_stderr(parts: Sequence[Pooled]) -> float | None:
    """Return the standard error of `pooled_mean`: windows are independent, their questions are not.

    Of a ratio of two sums over windows, by the jackknife over windows, as in `eval`.
    """
    from canon_pretrain.stats.noise import Clusters, mean_variance  # scipy takes a while to import

    sums, counts = zip(*parts, strict=True)
    clusters = Clusters(np.array(sums, np.float64), np.array(counts, np.float64))
    variance = mean_variance(clusters)
    return math.sqrt(variance) if math.isfinite(variance) else None
