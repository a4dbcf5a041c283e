"""Scores over training: of each task's primary metrics one value a run and evaluated step.

A part of the report's content (content.py): numbers unrounded, JSON values only. No torch.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from canon_pretrain.core.text import printable
from canon_pretrain.report.architectures import Scored, logged_losses, suite_losses
from canon_pretrain.report.evaluations import Run, described, primary_metrics, suite_order, text_of
from canon_pretrain.report.lengths import Entry
from canon_pretrain.run.log import json_value
from canon_pretrain.run.results import Results


def score_curves(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """One entry a (suite, task, primary metric) that some run was asked at several steps.

    Its `lines` have one entry a run that was asked: `steps`, `tokens` (None where the log does not
    tell), `values`, `stderrs`, `bounds` (see Score), `counts` (items) and `limits` (None unless
    cut short), alike long.
    """
    by_step = {
        run.label: {
            (results.asked["suite"], results.asked["step"]): results for results in run.evaluations
        }
        for run in runs
    }  # evaluations are sorted: a whole result takes the place of a trial, the newest that of all
    tokens = {
        run.label: {step: tokens_at(run, step) for _, step in by_step[run.label]} for run in runs
    }
    curves = []
    for suite, task, metric in _primaries(runs):
        texts: dict[str, list[dict[str, Any]]] = {}  # losses of different texts make no one chart
        for run in runs:
            points: dict[str, list[tuple[int, Results]]] = {}
            for (name, step), results in sorted(by_step[run.label].items()):
                if name == suite and metric in results.scores.get(task, {}):
                    points.setdefault(text_of(results), []).append((step, results))
            for text, scored in points.items():
                line = _line(run, scored, task, metric, tokens[run.label])
                texts.setdefault(text, []).append(line)
        for text, lines in texts.items():
            if any(len(line["steps"]) > 1 for line in lines):
                label = f"{task} of text {text[:8]}" if len(texts) > 1 else task
                names = {"suite": suite, "task": printable(label), "metric": printable(metric)}
                curves.append({**names, "lines": lines})
    return curves


def held_out_curves(runs: Sequence[Run], entries: Sequence[Entry]) -> dict[str, Any] | None:
    """Held-out loss of one text over tokens, a line per architecture; None without any.

    From the suite `validation` or the training logs, and of the text, that have most points: the
    two may score other windows. A line's value is the mean over the entry's runs at a step that all
    of them have; `low` and `high` are the lowest and highest, `n` how many there are.
    """
    found: list[dict[str, Any]] = []
    for words, losses_of in (
        ("the suite validation", suite_losses),
        ("training logs", logged_losses),
    ):
        members = {
            entry.label: [(run, losses_of(run)) for run in runs if run.label in entry.runs]
            for entry in entries
        }
        texts = {text for each in members.values() for _, losses in each for _, text in losses}
        for text in sorted(texts):
            lines = [_mean_line(label, each, text) for label, each in members.items()]
            found.append({"source": words, "lines": [line for line in lines if line["steps"]]})
    best = max(found, key=lambda x: sum(len(line["steps"]) for line in x["lines"]), default=None)
    return best if best and best["lines"] else None


def _mean_line(
    label: str, members: Sequence[tuple[Run, Mapping[Scored, float]]], text: str
) -> dict[str, Any]:
    """The mean of the losses of `text` at the steps that all members with any have."""
    by_step = [
        (run, {step: loss for (step, of), loss in losses.items() if of == text})
        for run, losses in members
    ]
    by_step = [(run, losses) for run, losses in by_step if losses]
    steps = sorted(set.intersection(*(set(losses) for _, losses in by_step))) if by_step else []
    at = {step: [losses[step] for _, losses in by_step] for step in steps}
    at = {step: v for step, v in at.items() if all(map(math.isfinite, v))}
    return {
        "label": label,
        "steps": list(at),
        "tokens": [tokens_at(by_step[0][0], step) for step in at],
        "values": [math.fsum(v) / len(v) for v in at.values()],
        "low": [min(v) for v in at.values()],
        "high": [max(v) for v in at.values()],
        "n": [len(v) for v in at.values()],
    }


def _primaries(runs: Sequence[Run]) -> list[tuple[str, str, str]]:
    """(suite, task, metric) of all that was asked, in the order of the newest results.

    What a suite gives beside its tasks (the count models that `validation` stands beside) is none.
    """
    found: dict[str, dict[tuple[str, str, str], None]] = {}
    for run in runs:
        for results in reversed(run.evaluations):
            suite = results.asked["suite"]
            known = found.setdefault(suite, {})
            for task in results.scores:
                if results.asked.get("tasks") and not described(results, task):
                    continue
                for metric in primary_metrics(results, task):
                    known[suite, task, metric] = None
    return [key for suite in sorted(found, key=suite_order) for key in found[suite]]


def _line(
    run: Run,
    points: Sequence[tuple[int, Results]],
    task: str,
    metric: str,
    tokens: Mapping[int, int | None],
) -> dict[str, Any]:
    scores = [results.scores[task][metric] for _, results in points]
    return {
        "run": run.label,
        "steps": [step for step, _ in points],
        "tokens": [tokens[step] for step, _ in points],
        "values": [json_value(score.value) for score in scores],
        "stderrs": [None if s.stderr is None else json_value(s.stderr) for s in scores],
        "bounds": [score.bound for score in scores],
        "counts": [results.num_samples.get(task) for _, results in points],
        "limits": [results.asked["limit"] for _, results in points],
    }


def tokens_at(run: Run, step: int) -> int | None:
    """The tokens seen by `step`; None without a logged step.

    A checkpoint's step need not be a logged one; tokens a step are the same all along.
    """
    near = min(run.steps, key=lambda event: abs(event["step"] - step), default=None)
    return round(step * near["tokens"] / near["step"]) if near and near["step"] else None
