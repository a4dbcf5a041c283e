"""What can be asked of a checkpoint, as lm_eval tasks; and asking it, through lm_eval's evaluator.

Between the command (run.py) and the harness. `validation` is no lm_eval task (validation.py);
`birth-year` is made here from the frozen probes (birth_year.py); everything else is a task file.
"""

import hashlib
import json
import logging
import math
import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import lm_eval.api.task
import numpy as np
import torch
from lm_eval.api.model import LM
from lm_eval.api.task import ConfigurableTask, Task
from lm_eval.evaluator import evaluate
from lm_eval.tasks import TaskManager
from lm_eval.utils import handle_non_serializable

from canon_pretrain.errors import UserError, nearest
from eval.birth_year import ANSWER_TOKENS, VERSION, ProbeSet
from eval.results import Score

VALIDATION, BIRTH_YEAR = "validation", "birth-year"
TASKS = Path(__file__).parent / "tasks"
# those of lm_eval's simple_evaluate, for tasks that draw
PYTHON_SEED, OTHER_SEED = 0, 1234

Scores = dict[str, dict[str, Score]]
Samples = dict[str, list[dict[str, Any]]]


@dataclass(frozen=True)
class Suite:
    """What to ask: `described` says what it is made of, by task; `tasks` makes it.

    A harness task named TASK/PART is reported as a part of TASK.
    """

    name: str
    described: dict[str, dict[str, Any]]
    tasks: Callable[[], dict[str, Task]]


def task_files() -> dict[str, Path]:
    """The tasks in eval/tasks by name: a file has the name of its task; _NAME.yaml is a part."""
    files = sorted(TASKS.rglob("*.yaml"))
    return {path.stem: path for path in files if not path.name.startswith("_")}


def find_suite(given: str) -> tuple[str, Path | None]:
    """The suite's name, and its file unless it is built in. Raises UserError for an unknown one."""
    files = task_files()
    if given in (VALIDATION, BIRTH_YEAR):
        return given, None
    if given in files:
        return given, files[given]
    if given.endswith((".yaml", ".yml")):
        path = Path(given)
        if not path.is_file():
            raise UserError(f"--suite {given}: no such task file")
        ours = files.get(path.stem, path)
        if path.stem in (VALIDATION, BIRTH_YEAR) or path.resolve() != ours.resolve():
            raise UserError(
                f"--suite {given}: '{path.stem}' is the name of another suite; rename the file"
            )
        return path.stem, path
    known = [VALIDATION, BIRTH_YEAR, *files]
    near = nearest(given, known)
    raise UserError(
        f"unknown suite '{given}'{f', did you mean {near!r}?' if near else ''}; suites: "
        f"{VALIDATION}, {BIRTH_YEAR}; tasks in {TASKS}: {', '.join(files) or 'none'}; or give the "
        "path of a task's YAML"
    )


def file_suite(name: str, path: Path) -> Suite:
    """The tasks of a YAML file. Raises UserError, with the reason, where it does not load."""
    try:
        with _harness():
            manager = TaskManager(include_path=TASKS, include_defaults=False)
            tasks = manager.load([str(path)])["tasks"]
    except Exception as error:
        if re.search(r"^group:", path.read_text(errors="replace"), re.MULTILINE):
            raise UserError(f"{path}: is a group of tasks; give the file of one task") from error
        # anything may come out of a task file: it names YAML, templates, Python, data sets
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise UserError(f"{path}: this task file does not load: {reason}") from error
    files = sorted({path, *path.parent.glob("*.yaml"), *path.parent.glob("*.py")})
    content = b"".join(file.read_bytes() for file in files)
    described = {
        task_name: {
            "version": task.VERSION,
            "files_sha256": hashlib.sha256(content).hexdigest(),
            "documents_sha256": _documents_sha256(task),
        }
        for task_name, task in tasks.items()
    }
    return Suite(name, described, lambda: tasks)


def _documents_sha256(task: Task) -> str:
    digest = hashlib.sha256()
    for document in task.eval_docs:
        digest.update(json.dumps(document, default=handle_non_serializable).encode() + b"\n")
    return digest.hexdigest()


def birth_year_suite(sets: Sequence[ProbeSet]) -> Suite:
    """The probes; each set is scored twice: `exact` (greedy answer) and `rank` (of its years)."""

    def tasks() -> dict[str, Task]:
        made: dict[str, Task] = {}
        with _harness():
            for probes in sets:
                documents = datasets.Dataset.from_list(probes.read())
                made[f"{probes.name}/exact"] = exact_task(probes.name, documents)
                made[f"{probes.name}/rank"] = rank_task(probes.name, documents)
        return made

    described = {probes.name: {"version": VERSION, "sha256": probes.sha256} for probes in sets}
    return Suite(BIRTH_YEAR, described, tasks)


def exact_task(name: str, probes: datasets.Dataset) -> ConfigurableTask:
    """The primary score: the first four characters of a greedy answer are the year.

    The prompt ends with its space only where training had the space as a token of its own before
    a year (birth_year.ends_with_space); where not, the answer begins with it: it is stripped.
    """

    def process_results(doc: dict[str, Any], results: list[str]) -> dict[str, float]:
        return {"exact": float(results[0].strip()[:4] == doc["answer"])}

    return _probe_task(
        f"{name}/exact",
        "exact",
        probes,
        output_type="generate_until",
        doc_to_text="prompt",
        doc_to_target="answer",
        generation_kwargs={"until": [], "max_gen_toks": ANSWER_TOKENS, "do_sample": False},
        process_results=process_results,
    )


def rank_task(name: str, probes: datasets.Dataset) -> ConfigurableTask:
    """The secondary score: of the years in the context, the right one is the likeliest.

    The space is given to the continuation, where the harness would move it anyway: context and
    continuation are encoded together and then cut, so the tokens are those of training whatever
    the tokenizer. What all choices share (the space) changes no rank.
    """

    def process_results(doc: dict[str, Any], results: list[tuple[float, bool]]) -> dict[str, float]:
        best = int(np.argmax([score for score, _ in results]))
        return {"rank": float(best == doc["target"])}

    return _probe_task(
        f"{name}/rank",
        "rank",
        probes,
        output_type="multiple_choice",
        doc_to_text=lambda doc: doc["prompt"].rstrip(" "),
        target_delimiter=" ",
        doc_to_choice="choices",
        doc_to_target="target",
        process_results=process_results,
    )


def _probe_task(
    task: str, metric: str, probes: datasets.Dataset, **config: Any
) -> ConfigurableTask:
    return ConfigurableTask(
        config={
            "task": task,
            "custom_dataset": lambda **_: {"test": probes},
            "test_split": "test",
            "num_fewshot": 0,
            "metric_list": [{"metric": metric, "aggregation": "mean", "higher_is_better": True}],
            "metadata": {"version": VERSION},
            **config,
        }
    )


def ask(
    lm: LM, tasks: Mapping[str, Task], limit: int | None
) -> tuple[Scores, dict[str, int], Samples]:
    """Scores, item counts and item records of `lm` on the first `limit` items of each task."""
    for task in tasks.values():
        if task.get_config("num_fewshot") is None:
            task.set_config(key="num_fewshot", value=0)
        task.set_fewshot_seed(OTHER_SEED)
    with _harness():
        # `evaluate`, as `simple_evaluate` reseeds the global generators and leaves them so
        found = evaluate(lm, {"tasks": dict(tasks)}, limit=limit, bootstrap_iters=0)
    assert found is not None  # None is for ranks above 0
    scores: Scores = {}
    num_samples: dict[str, int] = {}
    records: dict[str, dict[tuple[int, str], dict[str, Any]]] = {}
    for name in tasks:
        reported, _, part = name.partition("/")
        items = found["samples"][name]
        scores.setdefault(reported, {}).update(_scores(found["results"][name], items))
        num_samples[reported] = found["n-samples"][name]["effective"]
        for item in items:
            key = (item["doc_id"], item["filter"])
            record = records.setdefault(reported, {}).setdefault(key, _identity(item))
            record[f"answers_{part}" if part else "answers"] = item["filtered_resps"]
            record |= {metric: item[metric] for metric in item["metrics"]}
    samples = {
        name: json.loads(json.dumps([*found.values()], default=handle_non_serializable))
        for name, found in records.items()
    }
    return scores, num_samples, samples


def _identity(item: Mapping[str, Any]) -> dict[str, Any]:
    """What names an item in the comparison of two checkpoints."""
    return {key: item[key] for key in ("doc_id", "filter", "doc_hash", "prompt_hash", "target")}


def _scores(results: Mapping[str, Any], items: Sequence[Mapping[str, Any]]) -> dict[str, Score]:
    """The metrics of one task; a mean of 0s and 1s has its standard error (n - 1, as lm_eval's)."""
    filters = {item["filter"] for item in items}
    scores = {}
    for key, value in results.items():
        metric, _, name = key.partition(",")
        if not name or metric.endswith("_stderr"):
            continue
        values = [i[metric] for i in items if i["filter"] == name and metric in i]
        stderr = None
        # perplexities have pairs (log-likelihood, weight) for items; other aggregates no mean
        if len(values) > 1 and set(map(type, values)) <= {bool, int, float}:
            mean = sum(values) / len(values)
            if set(values) <= {0, 1} and math.isclose(mean, value):
                stderr = math.sqrt(mean * (1 - mean) / (len(values) - 1))
        label = metric if len(filters) == 1 else f"{metric}, {name}"
        scores[label] = Score(float(value), stderr)
    return scores


@contextmanager
def _harness() -> Iterator[None]:
    """lm_eval as a guest: its seeds fixed and ours given back, no log lines, no bars of its own."""
    log = logging.getLogger("lm_eval")
    level, bar, bars = log.level, lm_eval.api.task.tqdm, datasets.are_progress_bars_disabled()
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    random.seed(PYTHON_SEED)
    np.random.seed(OTHER_SEED)
    torch.manual_seed(OTHER_SEED)
    log.setLevel(logging.ERROR)
    datasets.disable_progress_bars()
    lm_eval.api.task.tqdm = lambda items, **_: items
    try:
        yield
    finally:
        lm_eval.api.task.tqdm = bar
        if not bars:
            datasets.enable_progress_bars()
        log.setLevel(level)
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])
