"""Run folders with planted numbers, as the trainer and eval write them."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np

from canon_pretrain.cluster.planned import planned_identity, planned_values
from canon_pretrain.cluster.sweep import PlannedRun, Sweep
from canon_pretrain.core.files import write_json
from canon_pretrain.run.folder import RunFolder
from canon_pretrain.run.launches import begin_launch
from canon_pretrain.run.results import Results, Score, results_folder, write_results
from canon_pretrain.run.status import Status
from tests.support import canon_stage

main = canon_stage("run")

TOKENS_A_STEP = 2048
FINGERPRINT = "3ae1b18e23821c84" * 4

IDENTITY = {
    **{"model.vocab_size": 2048, "model.num_layers": 3, "model.dim": 128, "model.num_heads": 4},
    **{"model.ffn_dim": 344, "model.max_seq_len": 256, "model.position": "nope"},
    **{"model.canon_set": "ABCD", "model.init_seed": 7},
    **{"optimizer.name": "AdamW", "optimizer.lr": 0.004, "lr_scheduler.decay_type": "cosine"},
    **{"data_fingerprint": FINGERPRINT, "data.data_seed": 3},
    **{"training.seq_len": 256, "training.global_batch_size": 8, "training.steps": 500},
}


def run_command(*words: object) -> int:
    """Run `canon run` in this process; return its exit code."""
    try:
        main(words)
    except SystemExit as left:
        return int(left.code or 0)
    return 0


def launch(event: str, world_size: int = 2, **fields: Any) -> dict[str, Any]:
    """A `start` or `resume` event."""
    versions = {"torch": "2.13.0+cpu", "torchtitan": "0.2.2", "data_fingerprint": FINGERPRINT}
    time = "2026-11-20T10:05:52.404+00:00"
    return {"event": event, "time": time, "world_size": world_size, **versions, **fields}


def step(number: int, loss: Any, grad_norm: Any = 1.0, speed: Any = 9000.0) -> dict[str, Any]:
    """A `step` event."""
    time, tokens = "2026-11-20T10:06:00.000+00:00", TOKENS_A_STEP * number
    values = {"loss": loss, "grad_norm": grad_norm, "tokens_per_second": speed}
    return {"event": "step", "time": time, "step": number, "tokens": tokens, **values}


def plant_run(
    folder: Path,
    events: Sequence[Mapping[str, Any]],
    *,
    description: str = "a planted run",
    done: bool = False,
    **identity: Any,
) -> RunFolder:
    """Write a run folder with that log; `identity` changes fields, `model__dim` for `model.dim`."""
    run = RunFolder(folder)
    changes = {name.replace("__", "."): value for name, value in identity.items()}
    config = {"job": {"description": description}, "model": {"flavor": "quickstart"}}
    run.write_config(config, IDENTITY | changes)
    run.log_file.write_text("".join(json.dumps(event) + "\n" for event in events))
    if done:
        run.write_done(max(event.get("step", 0) for event in events))
    return run


def plant_planned_run(
    folder: Path,
    sweep: Sweep,
    run: PlannedRun,
    events: Sequence[Mapping[str, Any]],
    **options: Any,
) -> RunFolder:
    """Plant a run of a sweep in `folder` with the planned identity."""
    identity = planned_identity(planned_values(Path(run.config), sweep.settings(run)))
    identity |= options
    changes = {name.replace(".", "__"): value for name, value in identity.items()}
    return plant_run(folder / run.name, events, **changes)


def plant_results(
    run: RunFolder,
    at: int,
    suite: str,
    scores: Mapping[str, Mapping[str, Score]],
    *,
    limit: int | None = None,
    items: int = 1000,
    samples: Mapping[str, Sequence[Mapping[str, Any]]] | None = None,
    **asked: Any,
) -> Path:
    """Write results of `run` at step `at`; return the path of results.json."""
    checkpoint, data = run.path / "checkpoint" / f"step-{at}", run.read_config()["identity"]
    known = {"checkpoint": str(checkpoint), "train_fingerprint": data["data_fingerprint"]}
    asked = {**known, "step": at, "suite": suite, "limit": limit, **asked}
    folder = results_folder(run, asked)
    planted = {task: dict(metrics) for task, metrics in scores.items()}
    write_results(folder, Results(asked, planted, dict.fromkeys(scores, items)), samples or {})
    return folder / "results.json"


EVENTS = [launch("start"), step(10, 7.25), step(20, 6.125)]
ACC = {"primary": ["acc"], "higher_is_better": {"acc": True}, "chance": 0.5}
NOT_METRICS = ("doc_id", "filter", "doc_hash", "prompt_hash", "target", "answers", "source")


def planted_run(folder: Path, seed: int = 0, **identity: Any) -> RunFolder:
    return plant_run(folder, EVENTS, model__init_seed=seed, data__data_seed=seed, **identity)


def validations(losses: Mapping[int, Any]) -> list[dict[str, Any]]:
    return [*EVENTS, *({"event": "validation", "step": at, "loss": losses[at]} for at in losses)]


def records(
    values: Mapping[str, Sequence[Any]],
    *,
    names: Sequence[str] | None = None,
    sources: Sequence[str] | None = None,
) -> list[dict[str, Any]]:
    """Return item records with `values` by metric; items with equal `names` are the same."""
    found: list[dict[str, Any]] = []
    for k, scores in enumerate(zip(*values.values(), strict=True)):
        name = names[k] if names else f"document {k}"
        one = {"doc_id": k, "filter": "none", "target": "x", "answers": ["x"]}
        one |= {"doc_hash": f"doc {name}", "prompt_hash": f"prompt {name}"}
        source = {"source": sources[k]} if sources else {}
        found.append(one | source | dict(zip(values, scores, strict=True)))
    return found


def plant_answers(
    run: RunFolder,
    at: int,
    suite: str,
    tasks: Mapping[str, Sequence[Mapping[str, Any]]],
    *,
    scores: Mapping[str, Mapping[str, float | Score]] | None = None,
    described: Mapping[str, Mapping[str, Any]] | None = None,
    **asked: Any,
) -> Path:
    """Write results with item records; return the path of results.json.

    `tasks`: records by task. Scores are means over the items, unless in `scores`; `described`
    updates asked["tasks"].
    """
    found: dict[str, dict[str, Score]] = {}
    for name, items in tasks.items():
        metrics = [metric for metric in (items[0] if items else ()) if metric not in NOT_METRICS]
        scored = [item for item in items if "error" not in item]
        found[name] = {x: _score(x, [item[x] for item in scored]) for x in metrics}
        given = (scores or {}).get(name, {}).items()
        found[name] |= {
            x: value if isinstance(value, Score) else Score(value) for x, value in given
        }
    about = {name: {"version": 1.0, **(described or {}).get(name, {})} for name in tasks}
    more = {"items": max(map(len, tasks.values())), "samples": tasks, "max_length": 256} | asked
    return plant_results(run, at, suite, found, tasks=about, **more)


def _score(metric: str, values: Sequence[Any]) -> Score:
    if isinstance(values[0], list):
        total, weight = (sum(value[k] for value in values) for k in (0, 1))
        nats = -total / weight
        scores = {"bits": nats / np.log(2), "nats": -nats}
        return Score(float(scores.get(metric[:4], np.exp(nats))))
    mean = float(np.mean(values))
    if "perplexity" in metric:
        return Score(float(np.exp(-mean)))
    return Score(mean, float(np.sqrt(mean * (1 - mean) / len(values))) if 0 < mean < 1 else None)


def right_or_wrong(count: int, share: float, generator: np.random.Generator) -> list[float]:
    """Return `count` answers 0 or 1 in random order, exactly that share of them 1."""
    answers = np.zeros(count)
    answers[: round(count * share)] = 1
    return [float(x) for x in generator.permutation(answers)]


def evaluated(
    folder: Path, canon: str, loss: float, seed: int = 0, count: int = 400, at: int = 20
) -> Path:
    """Plant a run with that held-out loss and a record per document; all have equal documents."""
    run = planted_run(folder, seed, model__canon_set=canon)
    rng = np.random.default_rng(5)
    tokens = rng.integers(10, 2000, count)
    own = np.random.default_rng([seed, len(canon)]).normal(0, 0.1, count)
    nats = tokens * (rng.gamma(20, 1 / 20, count) - 1 + own)
    nats += tokens * (loss - nats.sum() / tokens.sum())
    pairs = [[float(x), int(n)] for x, n in zip(nats, tokens, strict=True)]
    tasks = {"validation": records({"nats_per_token": pairs}), "unigram": []}
    scores = {"validation": {"nats_per_token": loss}, "unigram": {"nats_per_token": 7.0}}
    described = {"validation": {"primary": ["nats_per_token"]}}
    plant_answers(run, at, "validation", tasks, scores=scores, described=described)
    return folder


NOW = datetime(2026, 11, 20, 12, 30, tzinfo=UTC)


def plant_status(run: RunFolder, *, age_s: float = 1.0, **values: Any) -> None:
    """Write the status.json of a running trainer at `age_s` before NOW."""
    then = (NOW - timedelta(seconds=age_s)).isoformat()
    status = Status("running", 20, 500, then, then, phase="training", seconds_per_step=2.0)
    write_json(run.status_file, asdict(replace(status, **values)))


def training_run(folder: Path, **values: Any) -> RunFolder:
    """Plant a run that trains: at step 20 of 500, one skipped, in its third launch."""
    events = [launch("start"), *(step(n, 6.0 - n / 10) for n in range(1, 21))]
    events[-1] |= {"mfu": 0.431, "seconds_per_step": 1.0, "skipped_steps": 1}
    folder.mkdir(parents=True, exist_ok=True)
    for _ in range(3):
        begin_launch(RunFolder(folder))
    run = plant_run(folder, events)
    plant_status(run, **values)
    return run
