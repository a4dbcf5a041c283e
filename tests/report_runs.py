"""Run folders as the trainer and eval leave them, with planted numbers, for tests of the report."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from canon_pretrain.run.folder import RunFolder
from canon_pretrain.run.results import Results, Score, results_folder, write_results

TOKENS_A_STEP = 2048
FINGERPRINT = "3ae1b18e23821c84" * 4

IDENTITY = {
    "model.vocab_size": 2048,
    "model.num_layers": 3,
    "model.dim": 128,
    "model.num_heads": 4,
    "model.ffn_dim": 344,
    "model.max_seq_len": 256,
    "model.position": "nope",
    "model.canon_set": "ABCD",
    "model.init_seed": 7,
    "optimizer.name": "AdamW",
    "optimizer.lr": 0.004,
    "lr_scheduler.decay_type": "cosine",
    "data_fingerprint": FINGERPRINT,
    "data.data_seed": 3,
    "training.seq_len": 256,
    "training.global_batch_size": 8,
    "training.steps": 500,
}


def launch(event: str, world_size: int = 2, **fields: Any) -> dict[str, Any]:
    """A `start` or `resume` event."""
    return {
        "event": event,
        "time": "2026-11-20T10:05:52.404+00:00",
        "world_size": world_size,
        "torch": "2.13.0+cpu",
        "torchtitan": "0.2.2",
        "data_fingerprint": FINGERPRINT,
        **fields,
    }


def step(number: int, loss: Any, grad_norm: Any = 1.0, speed: Any = 9000.0) -> dict[str, Any]:
    """A `step` event."""
    return {
        "event": "step",
        "time": "2026-11-20T10:06:00.000+00:00",
        "step": number,
        "tokens": TOKENS_A_STEP * number,
        "loss": loss,
        "grad_norm": grad_norm,
        "tokens_per_second": speed,
    }


def plant_run(
    folder: Path,
    events: Sequence[Mapping[str, Any]],
    *,
    description: str = "a planted run",
    done: bool = False,
    **identity: Any,
) -> RunFolder:
    """A run folder with that log; `identity` changes fields, `model__dim` for `model.dim`."""
    run = RunFolder(folder)
    changes = {name.replace("__", "."): value for name, value in identity.items()}
    config = {"job": {"description": description}, "model": {"flavor": "quickstart"}}
    run.write_config(config, IDENTITY | changes)
    run.log_file.write_text("".join(json.dumps(event) + "\n" for event in events))
    if done:
        run.write_done(max(event.get("step", 0) for event in events))
    return run


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
    """Results of `run` at step `at`, where `eval run` leaves them; returns results.json."""
    asked = {
        "checkpoint": str(run.path / "checkpoint" / f"step-{at}"),
        "step": at,
        "suite": suite,
        "limit": limit,
        "train_fingerprint": run.read_config()["identity"]["data_fingerprint"],
        **asked,
    }
    folder = results_folder(run, asked)
    planted = {task: dict(metrics) for task, metrics in scores.items()}
    write_results(folder, Results(asked, planted, dict.fromkeys(scores, items)), samples or {})
    return folder / "results.json"


def plant_items(
    run: RunFolder,
    at: int,
    suite: str,
    values: Mapping[str, Mapping[str, Sequence[float]]],
    **asked: Any,
) -> Path:
    """Results with item records, `values[task][metric]` one value an item; scores are means.

    A value of a metric with "perplexity" in its name is an item's log-likelihood.
    """
    scores: dict[str, dict[str, Score]] = {}
    samples = {}
    for task, metrics in values.items():
        scores[task] = {name: _score(name, found) for name, found in metrics.items()}
        count = len(next(iter(metrics.values())))
        samples[task] = [
            {
                "doc_id": k,
                "filter": "none",
                "doc_hash": f"{task}-{k}",
                "prompt_hash": f"prompt-{k}",
                "target": "",
                "answers": [],
                **{name: found[k] for name, found in metrics.items()},
            }
            for k in range(count)
        ]
    count = max((len(records) for records in samples.values()), default=0)
    return plant_results(run, at, suite, scores, items=count, samples=samples, **asked)


def _score(metric: str, values: Sequence[float]) -> Score:
    mean = math.fsum(values) / len(values)
    if "perplexity" in metric:
        return Score(math.exp(-mean))
    return Score(mean, math.sqrt(mean * (1 - mean) / (len(values) - 1)))
