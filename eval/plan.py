"""What one `eval run` asks: its suites with their tasks, questions and folders, before any is run.

Everything that can be refused is refused here: a data set that is not staged, a task file that does
not load, a folder that can't be written. run.py then asks.
"""

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from canon_pretrain.core.errors import UserError
from canon_pretrain.core.terminal import Console
from canon_pretrain.run.results import (
    RESULTS,
    Answers,
    Results,
    Score,
    Unfinished,
    question_of,
    read_results,
    read_samples,
    results_folder,
)
from eval.model.subject import Subject
from eval.staging.staged import staged_folder
from eval.suite_names import (
    ALL,
    BIRTH_YEAR,
    VALIDATION,
    asked_how,
    find_suite,
    is_birth_year,
    split_suites,
)
from eval.suites import TaskPlan, open_tasks
from eval.tasks.birth_year.frozen import open_probes

VALIDATION_VERSION = 3


@dataclass
class Plan:
    """One suite of the command: what is asked, where its answers go, and those that are there."""

    name: str
    asked: dict[str, Any]
    max_length: int
    folder: Path
    tasks: dict[str, TaskPlan]
    known: Results | None = None

    @property
    def unfinished(self) -> Unfinished:
        return Unfinished(self.folder, self.asked)


def check_options(arguments: argparse.Namespace) -> None:
    for name in ("limit", "max_length", "batch_tokens"):
        value = getattr(arguments, name)
        if value is not None and value < 1:
            raise UserError(f"--{name} {value}: expected at least 1")
    if arguments.suite == ALL:
        return
    paths = [path for _, path in _find_suites(arguments)]
    for name, suite, serves in (
        ("must_beat", VALIDATION, None in paths),
        ("junk", BIRTH_YEAR, any(map(is_birth_year, paths))),
    ):
        if getattr(arguments, name) is not None and not serves:
            raise UserError(f"--{name} is for --suite {suite}, not for {arguments.suite}")


def _find_suites(arguments: argparse.Namespace) -> list[tuple[str, Path | None]]:
    """The suites of --suite with their task files."""
    found = [find_suite(suite) for suite in split_suites(arguments.suite)]
    names = [name for name, _ in found]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise UserError(f"--suite {arguments.suite} names two suites {twice}: rename one task file")
    return found


def open_plans(
    console: Console, subject: Subject, dtype: torch.dtype, arguments: argparse.Namespace
) -> list[Plan]:
    """The suites of the command, opened: their data is there, and their folders can be written."""
    found = _find_suites(arguments)
    plans = []
    for name, path in found:
        how = asked_how(name, arguments, subject.seq_len)
        max_length = how["max_length"]
        tasks = _open(console, subject, name, path, max_length, arguments)
        described = {task: plan.described for task, plan in tasks.items()}
        asked = {
            **subject.identity,
            "suite": name,
            "limit": arguments.limit,
            "dtype": str(dtype).removeprefix("torch."),
            **how,
            "lm_eval": version("lm_eval"),
            "tasks": described or {VALIDATION: _validation_described()},
        }
        if arguments.out is None:
            if subject.folder is None or subject.evals is None:
                raise UserError(
                    f"{subject.checkpoint} belongs to no run, or to a branch that its run left: "
                    "give a folder with --out"
                )
            folder = results_folder(subject.folder, asked)
        else:
            folder = arguments.out / name if len(found) > 1 else arguments.out
        # now: nobody waits hours to learn that it can't be
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
        plans.append(Plan(name, asked, max_length, folder, tasks))
    return plans


def _validation_described() -> dict[str, Any]:
    return {
        "version": VALIDATION_VERSION,
        "primary": ["nats_per_token"],
        "higher_is_better": {"nats_per_token": False, "bits_per_byte": False},
    }


def _open(
    console: Console,
    subject: Subject,
    name: str,
    path: Path | None,
    max_length: int,
    arguments: argparse.Namespace,
) -> dict[str, TaskPlan]:
    """The suite's tasks; none for `validation`, which needs no text."""
    if path is None:
        subject.check_held_out(arguments.held_out)
        if subject.folder is not None and subject.recorded_held_out is None:
            words = f"{subject.folder.path} does not record its held-out text; taken: "
            console.print(words + str(subject.held_out_shards.folder), soft_wrap=True)
        return {}
    metadata: dict[str, Any] = {
        "tokenizer": str(subject.tokenizer_path),
        "staged": str(staged_folder(arguments.staged)),
        "max_length": max_length,
        **dict(arguments.option),
    }
    only = None
    if is_birth_year(path):
        folder, only, left_out = open_probes(subject, arguments, console, max_length)
        metadata |= {"probes": str(folder), "junk": str(arguments.junk or "")}
        if name != BIRTH_YEAR:
            only = [name]
        if left_out:
            words = f"probes left out: {'; '.join(left_out)}"
            console.print(words, soft_wrap=True, highlight=False)
    tasks = open_tasks(name, path, metadata, arguments.limit, only)
    cut = [
        f"{task} {counts['too_long']:,} of {counts['kept']:,}"
        for task, plan in tasks.items()
        if (counts := plan.described.get("counts", {})).get("too_long")
    ]
    if cut:
        console.print(
            f"prompts that lose their beginning at max_length {max_length} (--max_length): "
            f"{', '.join(cut)}",
            soft_wrap=True,
            highlight=False,
        )
    return tasks


def known_results(plan: Plan, foreign: bool) -> Results | None:
    """What an earlier call found for exactly the same question; None where there is none.

    `foreign`: the caller named the folder, so it may hold anyone's results. Those of another
    question are not written over: UserError. The run's own folder is named after the question.
    """
    try:
        results = read_results(plan.folder / RESULTS)
        before_asked, now_asked = question_of(results.asked), question_of(plan.asked)
        if before_asked == now_asked:
            read_samples(plan.folder)
            return results
    except UserError:
        return None  # none, damaged, or of an older version: asked again
    for name in sorted(before_asked.keys() | now_asked.keys()):
        before, now = before_asked.get(name), now_asked.get(name)
        if foreign and before != now:
            raise UserError(
                f"--out {plan.folder} holds results of another question ({name} {before!r}, asked "
                f"for is {now!r}): choose another folder"
            )
    return None


def merged(
    plan: Plan, answers: dict[str, Answers]
) -> tuple[Results, dict[str, list[dict[str, Any]]]]:
    """What the harness saw as several tasks as one where they are parts of it."""
    scores: dict[str, dict[str, Score]] = {}
    num_samples: dict[str, int] = {}
    truncated: dict[str, int] = {}
    records: dict[str, dict[tuple[int, str], dict[str, Any]]] = {}
    for name, given in answers.items():
        described = plan.asked["tasks"].get(name, {})
        reported = described.get("part_of", name)
        scores.setdefault(reported, {}).update(given.scores)
        num_samples.setdefault(reported, given.num_samples)
        truncated[reported] = max(truncated.get(reported, 0), given.truncated)
        for item in given.samples:
            kept = records.setdefault(reported, {}).setdefault((item["doc_id"], item["filter"]), {})
            kept.update({**item, **kept})  # the prompt's hash is that of the whole's own task
    samples = {name: [*items.values()] for name, items in records.items()}
    return Results(plan.asked, scores, num_samples, truncated), samples


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Says what is to be done where `folder` can't take what is written to it inside."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"{folder} can't hold the results: {error.strerror}. What earlier calls wrote is kept, "
            "and the same command goes on from there; --out DIR writes elsewhere"
        ) from None
