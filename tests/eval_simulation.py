"""Evaluations on disk with planted answers to every item, for tests of comparisons."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from canon_pretrain.run.folder import RunFolder
from canon_pretrain.run.results import Results, Score, results_folder, write_results
from tests.report_runs import launch, plant_run, step

EVENTS = [launch("start"), step(10, 7.25), step(20, 6.125)]


def planted_run(folder: Path, seed: int = 0, **identity: Any) -> RunFolder:
    """A run with seeds of its own; `identity` as in `plant_run`."""
    return plant_run(folder, EVENTS, model__init_seed=seed, data__data_seed=seed, **identity)


def validations(losses: Mapping[int, Any]) -> list[dict[str, Any]]:
    """A run's log with a held-out loss by step."""
    found = [
        {"event": "validation", "step": at, "loss": loss, "time": "2026-11-20T10:06:00.000+00:00"}
        for at, loss in losses.items()
    ]
    return [*EVENTS, *found]


def records(
    values: Mapping[str, Sequence[Any]],
    *,
    names: Sequence[str] | None = None,
    sources: Sequence[str] | None = None,
) -> list[dict[str, Any]]:
    """Item records as `eval run` writes them: `values` by metric; `names` tell documents apart."""
    count = len(next(iter(values.values())))
    known = names or [f"document {k}" for k in range(count)]
    return [
        {
            "doc_id": k,
            "filter": "none",
            "doc_hash": f"doc {known[k]}",
            "prompt_hash": f"prompt {known[k]}",
            "target": "x",
            "answers": ["x"],
            **({} if sources is None else {"source": sources[k]}),
            **{metric: each[k] for metric, each in values.items()},
        }
        for k in range(count)
    ]


def plant_answers(
    run: RunFolder,
    at: int,
    suite: str,
    tasks: Mapping[str, Sequence[Mapping[str, Any]]],
    *,
    scores: Mapping[str, Mapping[str, float]] | None = None,
    described: Mapping[str, Mapping[str, Any]] | None = None,
    limit: int | None = None,
    **asked: Any,
) -> Path:
    """Results with samples, where `eval run` leaves them; returns results.json.

    `tasks`: records by task. Scores are the means over the items, a perplexity's of pairs or of
    log-likelihoods, unless `scores` says otherwise; `described` is asked["tasks"].
    """
    question = {
        "checkpoint": str(run.path / "checkpoint" / f"step-{at}"),
        "step": at,
        "suite": suite,
        "limit": limit,
        "train_fingerprint": run.read_config()["identity"]["data_fingerprint"],
        "max_length": 256,
        "tasks": {name: {"version": 1.0, **(described or {}).get(name, {})} for name in tasks},
        **asked,
    }
    found = {name: {m: Score(x) for m, x in _means(items).items()} for name, items in tasks.items()}
    for name, metrics in (scores or {}).items():
        found[name] |= {metric: Score(value) for metric, value in metrics.items()}
    folder = results_folder(run, question)
    counts = {name: len(items) for name, items in tasks.items()}
    write_results(folder, Results(question, found, counts), tasks)
    return folder / "results.json"


def _means(items: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    known = ("doc_id", "filter", "doc_hash", "prompt_hash", "target", "answers", "source")
    means: dict[str, float] = {}
    if not items:
        return means
    for metric in (name for name in items[0] if name not in known):
        values = [item[metric] for item in items]
        if isinstance(values[0], list):
            total, weight = (sum(value[k] for value in values) for k in (0, 1))
            nats = -total / weight
            scores = {"bits": nats / np.log(2), "nats": -nats}
            means[metric] = float(scores.get(metric[:4], np.exp(nats)))
        elif "perplexity" in metric:
            means[metric] = float(np.exp(-np.mean(values)))
        else:
            means[metric] = float(np.mean(values))
    return means


def right_or_wrong(count: int, share: float, generator: np.random.Generator) -> list[float]:
    """Answers 0 or 1 to `count` items, exactly that share of them right."""
    answers = np.zeros(count)
    answers[: round(count * share)] = 1
    return [float(x) for x in generator.permutation(answers)]


def evaluated(
    folder: Path, canon: str, loss: float, seed: int = 0, count: int = 400, at: int = 20
) -> Path:
    """A run with that held-out loss and a record per document; documents are alike in all runs."""
    run = planted_run(folder, seed, model__canon_set=canon)
    rng = np.random.default_rng(5)
    tokens = rng.integers(10, 2000, count)
    own = np.random.default_rng([seed, len(canon)]).normal(0, 0.1, count)
    nats = tokens * (rng.gamma(20, 1 / 20, count) - 1 + own)
    nats += tokens * (loss - nats.sum() / tokens.sum())
    pairs = [[float(x), int(n)] for x, n in zip(nats, tokens, strict=True)]
    items = records({"nats_per_token": pairs})
    described = {"validation": {"primary": ["nats_per_token"]}}
    scores = {"validation": {"nats_per_token": loss}, "unigram": {"nats_per_token": 7.0}}
    plant_answers(
        run,
        at,
        "validation",
        {"validation": items, "unigram": []},
        scores=scores,
        described=described,
    )
    return folder
