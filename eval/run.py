"""`eval run`: ask one checkpoint one suite or several, print the scores and record them.

A question that was answered is read from RUN/evals; an interrupted suite resumes with its task.
What can be refused is refused before the model is loaded. Under torchrun every rank goes through
the same tasks, and the batches of each are shared out (model/ranks.py).
"""

import argparse
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from rich.text import Text

from canon_pretrain.core.errors import UserError
from canon_pretrain.core.terminal import Console, Progress
from canon_pretrain.kernels.hardware import check_cuda
from canon_pretrain.run.results import (
    RESULTS,
    Answers,
    Results,
    Unfinished,
    bound_words,
    question_of,
    read_results,
    read_samples,
    results_folder,
    write_results,
)
from eval.harness import TaskPlan, open_tasks
from eval.model.budget import batch_tokens_for
from eval.model.lm import CanonLM
from eval.model.load import dtype_for
from eval.model.ranks import Ranks
from eval.model.subject import Subject, locate
from eval.staging.staged import staged_folder
from eval.suite_names import (
    ALL,
    BIRTH_YEAR,
    VALIDATION,
    asked_how,
    find_suite,
    folder_of,
    split_suites,
)
from eval.tasks.birth_year.task import FrozenSets, find_corpus, open_probes
from eval.validation import validation_task


@dataclass(frozen=True)
class Plan:
    """One suite of the command: what is asked, where answers go, and its tasks."""

    name: str
    asked: dict[str, Any]
    max_length: int
    folder: Path
    tasks: dict[str, TaskPlan]

    @property
    def unfinished(self) -> Unfinished:
        return Unfinished(self.folder, self.asked)

    def part(self, task: str) -> str:
        """Return what `task` is called in the progress."""
        return task if task == self.name else f"{self.name} {task}"


class Work:
    """The progress of several suites, the costs of whose tasks are known at the start."""

    def __init__(self, progress: Progress, plans: Iterable[Plan]) -> None:
        self._progress, self._done = progress, 0
        tasks = [(plan.part(name), task) for plan in plans for name, task in plan.tasks.items()]
        self._costs = {part: max(1, task.cost) for part, task in tasks}
        self._total = sum(self._costs.values())

    @contextmanager
    def part(self, name: str) -> Iterator[Callable[[int], None]]:
        """Yield `advance(cost)` to report work done in a task, which is complete at the end."""
        cost, done = self._costs.pop(name), 0

        def advance(more: int, final: bool = False) -> None:
            nonlocal done
            done = min(done + more, cost)
            share = (self._done + done) / self._total
            text = f"{name}: {done / cost:.0%}; {share:.0%} of all"
            self._progress.update(share, text, final=final)

        advance(0)
        yield advance
        advance(cost, final=True)
        self._done += cost

    def skip(self, name: str) -> None:
        """Remove a task that another process has done."""
        self._total -= self._costs.pop(name)


def run(arguments: argparse.Namespace) -> None:
    """Ask `arguments.suite` of `arguments.checkpoint`; print tables and write results.json."""
    suites = check_options(arguments)
    check_cuda()
    # an exception leaves without waiting for ranks that are busy
    with Ranks.from_environment() as ranks:
        try:
            Evaluation(arguments, ranks).run(suites)
        except KeyboardInterrupt:
            if ranks.rank == 0:
                text = "interrupted: finished tasks are kept, the same command resumes"
                print(text, file=sys.stderr)
            raise


def check_options(arguments: argparse.Namespace) -> dict[str, Path | None]:
    """Return the task file by suite. Raises UserError for options that do not fit together."""
    for name in ("limit", "max_length", "batch_tokens"):
        value = getattr(arguments, name)
        if value is not None and value < 1:
            raise UserError(f"--{name} {value}: expected at least 1")
    suites: dict[str, Path | None] = {}
    for suite, path in map(find_suite, split_suites(arguments.suite)):
        if suite in suites:
            raise UserError(f"--suite {arguments.suite} names two suites {suite}: rename one file")
        suites[suite] = path
    has_probes = any(folder_of(path) == "birth_year" for path in suites.values())
    for name, suite, serves in (
        ("must_beat", VALIDATION, VALIDATION in suites),
        ("junk", BIRTH_YEAR, has_probes),
    ):
        if getattr(arguments, name) is not None and not serves and arguments.suite != ALL:
            raise UserError(f"--{name} is for --suite {suite}, not for {arguments.suite}")
    return suites


class Evaluation:
    """One checkpoint opened for the options of `eval run`, on one of the ranks."""

    def __init__(self, arguments: argparse.Namespace, ranks: Ranks) -> None:
        self.arguments, self.ranks = arguments, ranks
        self.console = Console(quiet=ranks.rank > 0)
        self.device = ranks.device
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)  # Triton launches on the current one
        self.dtype = dtype_for(arguments.dtype, self.device)
        # to find a run's newest checkpoint is to read all of it: one rank does
        given = arguments.checkpoint
        found = ranks.in_turn(lambda: locate(given) if ranks.rank == 0 else None)
        checkpoint, run = ranks.broadcast(found)
        self.subject = Subject.open(checkpoint, arguments.data, run, arguments.held_out)

    def say(self, line: str) -> None:
        """Print a line on the first rank."""
        self.console.print(line, soft_wrap=True, highlight=False, markup=False)

    def run(self, suites: Mapping[str, Path | None]) -> None:
        """Answer the suites that are not answered yet, and print the scores of all."""
        # the first rank alone reads and makes what is in the run folder; the others find it
        plans = self.ranks.in_turn(
            lambda: [self._plan(*suite, len(suites)) for suite in suites.items()]
        )
        missing = [plan for plan in plans if not self._is_known(plan)]
        if not missing:
            return
        longest = max(plan.max_length for plan in missing)
        lm = CanonLM(
            self.subject.load(self.device, self.dtype, longest),
            None if {plan.name for plan in missing} == {VALIDATION} else self.subject.tokenizer,
            max_length=longest,
            add_bos=self.arguments.add_bos,
            ranks=self.ranks,
            say=self.say,
        )
        lm.batch_tokens = self.arguments.batch_tokens or batch_tokens_for(
            lm, self.subject.evals or self.arguments.out, self.say
        )
        with Progress(self.console) as progress:
            work = Work(progress, missing)
            for plan in missing:
                lm.max_length = plan.max_length
                self._answer(plan, lm, work)

    def _answer(self, plan: Plan, lm: CanonLM, work: Work) -> None:
        with ExitStack() as held:
            if self.ranks.rank == 0:
                with writing(plan.folder):
                    held.enter_context(plan.unfinished.hold(self.say))
            if self._is_known(plan):  # another process has answered it meanwhile
                for name in plan.tasks:
                    work.skip(plan.part(name))
                return
            results, samples = merged(plan.asked, self._answers(plan, lm, work))
            if self.ranks.rank == 0:
                with writing(plan.folder):
                    write_results(plan.folder, results, samples)
                    plan.unfinished.remove()
            self.ranks.barrier()
        self._report(plan, results, "written to")

    def _plan(self, name: str, path: Path | None, num_suites: int) -> Plan:
        subject, arguments = self.subject, self.arguments
        how = asked_how(name, arguments, subject.seq_len)
        length = how["max_length"]
        if path is None:
            subject.check_held_out(arguments.held_out)
            train, held_out = subject.train_shards, subject.held_out_shards
            tasks = {name: validation_task(train, held_out, length, arguments.limit, self.say)}
            if subject.folder is not None and subject.recorded_held_out is None:
                self.say(
                    f"{subject.folder.path} does not record its held-out text; taken: "
                    f"{held_out.folder}"
                )
        else:
            tasks = self._open_tasks(name, path, length)
        asked = {
            **subject.identity,
            "suite": name,
            "limit": arguments.limit,
            "dtype": str(self.dtype).removeprefix("torch."),
            **how,
            "lm_eval": version("lm_eval"),
            "tasks": {task: plan.described for task, plan in tasks.items()},
        }
        if arguments.out is not None:
            folder = arguments.out / name if num_suites > 1 else arguments.out
        elif subject.folder is not None and subject.evals is not None:
            folder = results_folder(subject.folder, asked)
        else:
            raise UserError(
                f"{subject.checkpoint} belongs to no run, or to a branch that its run left: "
                "give a folder with --out"
            )
        # now: nobody waits hours to learn that it can't be
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
        return Plan(name, asked, length, folder, tasks)

    def _open_tasks(self, name: str, path: Path, max_length: int) -> dict[str, TaskPlan]:
        arguments, only, staged = self.arguments, None, staged_folder(self.arguments.staged)
        metadata: dict[str, Any] = {
            "tokenizer": str(self.subject.tokenizer_path),
            "staged": str(staged),
            "max_length": max_length,
            **dict(arguments.option),
        }
        if folder_of(path) == "birth_year":
            folder = (arguments.out or self.subject.evals or staged) / "probes"
            corpus = lambda: find_corpus(arguments.junk, staged)  # noqa: E731
            frozen = FrozenSets(folder, self.subject.tokenizer, corpus)
            only, left_out = open_probes(frozen, max_length=max_length, say=self.say)
            metadata |= {"probes": str(folder), "junk": str(arguments.junk or "")}
            only = only if name == BIRTH_YEAR else [name]
            if left_out:
                self.say(f"probes left out: {'; '.join(left_out)}")
        return open_tasks(name, path, metadata, arguments.limit, only)

    def _is_known(self, plan: Plan) -> bool:
        is_foreign = self.arguments.out is not None
        known: Results | None = self.ranks.broadcast(known_results(plan, is_foreign))
        if known:
            self._report(plan, known, "as found in")
        return known is not None

    def _answers(self, plan: Plan, lm: CanonLM, work: Work) -> dict[str, Answers]:
        done: dict[str, Answers] = self.ranks.broadcast(plan.unfinished.read())
        if done:
            self.say(f"{plan.name}: going on after {len(done)} tasks of an earlier call")
        answers = {}
        for name, task in plan.tasks.items():
            if name in done:
                work.skip(plan.part(name))
                answers[name] = done[name]
                continue
            with work.part(plan.part(name)) as lm.answered:
                answers |= task.ask(lm)
            if self.ranks.rank == 0 and len(plan.tasks) > 1:
                with writing(plan.folder):
                    plan.unfinished.add(name, answers[name])
        return answers

    def _report(self, plan: Plan, results: Results, how: str) -> None:
        print_results(self.console, str(self.subject.checkpoint), results)
        self.say(f"{how} {plan.folder / RESULTS}")
        rival = self.arguments.must_beat
        if rival is None or plan.name != VALIDATION:
            return
        ours, theirs = (results.scores[t]["bits_per_byte"].value for t in (VALIDATION, rival))
        if ours >= theirs:
            raise UserError(
                f"the checkpoint's {ours:.4f} bits per byte do not beat the {rival} model's "
                f"{theirs:.4f}, as --must_beat asks"
            )


def known_results(plan: Plan, is_foreign: bool) -> Results | None:
    """Return what an earlier call found for exactly the same question, if any.

    Raises UserError if it is of another question in a folder that the user named (`is_foreign`).
    """
    try:
        results = read_results(plan.folder / RESULTS)
        before, now = question_of(results.asked), question_of(plan.asked)
        if before == now:
            read_samples(plan.folder)
            return results
    except UserError:
        return None  # none, damaged, or of an older version: asked again
    if is_foreign:
        names = sorted(before.keys() | now.keys())
        name = next(name for name in names if before.get(name) != now.get(name))
        raise UserError(
            f"--out {plan.folder} holds results of another question ({name} {before.get(name)!r}, "
            f"asked for is {now.get(name)!r}): choose another folder"
        )
    return None


def merged(
    asked: Mapping[str, Any], answers: Mapping[str, Answers]
) -> tuple[Results, dict[str, list[dict[str, Any]]]]:
    """Return the results and samples by reported task: the harness may see its parts as several."""
    results = Results(dict(asked), {}, {}, {})
    records: dict[str, dict[tuple[int, str], dict[str, Any]]] = {}
    for name, given in answers.items():
        reported = asked["tasks"].get(name, {}).get("part_of", name)
        results.scores.setdefault(reported, {}).update(given.scores)
        results.num_samples.setdefault(reported, given.num_samples)
        truncated = max(results.truncated.get(reported, 0), given.truncated)
        results.truncated[reported] = truncated
        for item in given.samples:
            kept = records.setdefault(reported, {}).setdefault((item["doc_id"], item["filter"]), {})
            kept.update({**item, **kept})  # the prompt's hash is that of the whole's own task
    return results, {name: [*items.values()] for name, items in records.items()}


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Raise UserError with the way out if `folder` can't hold what the block writes."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"{folder} can't hold the results: {error.strerror}. What earlier calls wrote is kept, "
            "and the same command goes on from there; --out DIR writes elsewhere"
        ) from None


def print_results(console: Console, subject: str, results: Results) -> None:
    """Print the scores of one suite; losses best first. `subject` names what was evaluated."""
    asked = results.asked
    rows: list[tuple[Text | str, ...]] = []
    if asked["suite"] == VALIDATION:
        title = f"held-out loss over {results.num_samples[VALIDATION]:,} tokens: {subject}"
        columns: tuple[str, ...] = ("model", "nats/token", "bits/byte")
        losses = [
            (scores["bits_per_byte"].value, scores["nats_per_token"].value, name)
            for name, scores in results.scores.items()
        ]
        for bits, nats, name in sorted(losses):
            model = "this checkpoint" if name == VALIDATION else f"{name} of the training shards"
            rows.append((Text(model), f"{nats:.4f}", f"{bits:.4f}"))
    else:
        limit = asked["limit"]
        cut = "" if limit is None else f"; the first {limit:,} items only: not a result"
        title = f"{asked['suite']}: {subject}{cut}"
        columns = ("task", "metric", "score", "+-", "items")
        for task, metrics in results.scores.items():
            primary = asked["tasks"].get(task, {}).get("primary", ())
            for metric, score in metrics.items():
                noise = "" if score.stderr is None else f"{score.stderr:.4f}"
                if score.bound is not None:
                    noise = bound_words(score.value, score.bound)
                label = Text(metric, "bold" if metric in primary else "")
                count = f"{results.num_samples[task]:,}"
                rows.append((Text(task), label, f"{score.value:.4f}", noise, count))
    table = Table(title=Text(title), title_justify="left")
    for column in columns:
        is_text = column in ("model", "task", "metric")
        table.add_column(column, justify="left" if is_text else "right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    console.print(table)
    lost = [f"{task} {n:,} of {results.num_samples[task]:,}"
            for task, n in results.truncated.items() if n]  # fmt: skip
    if lost:
        words = (
            f"contexts longer than max_length {asked['max_length']} lost their beginning "
            f"(--max_length reads more): {', '.join(lost)}"
        )
        console.print(Text(words), soft_wrap=True)
    for task, described in asked["tasks"].items():
        if counts := described.get("counts"):
            words = ", ".join(f"{name} {count:,}" for name, count in counts.items())
            console.print(Text(f"documents of {task}: {words}"), soft_wrap=True)
