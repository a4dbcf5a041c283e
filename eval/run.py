"""`eval run`: evaluate one checkpoint on suites, print the scores and record them.

Stored results are reused from RUN/evals, and input is checked before the model is loaded. Under
torchrun the batches of each task are distributed over the ranks (model/ranks.py).
"""

import argparse
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from rich.text import Text

from canon_pretrain.core.errors import UserError
from canon_pretrain.core.terminal import Console, Progress
from canon_pretrain.hf.loading import dtype_for, locate
from canon_pretrain.machine.device import check_cuda
from canon_pretrain.run import results as stored
from canon_pretrain.run.results import (
    RESULTS,
    Failures,
    PartialResults,
    Results,
    TaskAnswers,
    TaskResult,
    source_of_record,
)
from eval.harness import TaskPlan, open_tasks
from eval.model.budget import batch_tokens_for
from eval.model.lm import CanonLM
from eval.model.ranks import Ranks
from eval.model.target import EvalTarget
from eval.staged import staged_folder
from eval.suite_names import VALIDATION, suite_settings, task_folder
from eval.tasks.birth_year.task import FrozenSets, find_corpus
from eval.validation import validation_task


@dataclass(frozen=True)
class SuitePlan:
    """One suite of the command: the settings recorded as `asked`, its folder and tasks."""

    name: str
    settings: dict[str, Any]
    folder: Path
    tasks: dict[str, TaskPlan]

    @property
    def max_length(self) -> int:
        return int(self.settings["max_length"])

    @property
    def cost(self) -> int:
        return sum(task.cost for task in self.tasks.values())


@dataclass
class TotalProgress:
    """The progress over several suites, weighted by the cost of their tasks."""

    progress: Progress
    total: int
    done: int = 0

    def advance(self, name: str, cost: int) -> None:
        self.done += cost
        share = min(1.0, self.done / self.total)
        self.progress.update(share, f"{name}: {share:.0%} of all")


def evaluate(arguments: argparse.Namespace, suites: Mapping[str, Path | None]) -> None:
    """Evaluate each of `arguments.checkpoint`; print tables and write results.json."""
    if arguments.out and len(arguments.checkpoint) > 1:
        raise UserError("option.conflict", "--out is for one --checkpoint", option="--out")
    check_cuda()
    problems: list[str] = []
    # on an error, exit without waiting for busy ranks
    with Ranks.from_environment() as ranks:
        for checkpoint in arguments.checkpoint:
            one = argparse.Namespace(**{**vars(arguments), "checkpoint": checkpoint})
            problems += Evaluation(one, ranks).run(suites)
    if problems and ranks.rank == 0:
        raise UserError(
            "eval.incomplete",
            f"all else is evaluated and stored, but {len(problems)} scores are missing or without "
            f"some items. The first: {problems[0]}",
            problems=problems,
        )


class Evaluation:
    """One checkpoint opened with the options of `eval run`, on one rank."""

    def __init__(self, arguments: argparse.Namespace, ranks: Ranks) -> None:
        self.arguments, self.ranks = arguments, ranks
        self.console = Console(quiet=ranks.rank > 0)
        self.device = ranks.device
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)  # Triton launches on the current one
        self.dtype = dtype_for(arguments.dtype, self.device)
        # finding a run's newest checkpoint reads all of it: only on rank 0
        given = arguments.checkpoint
        found = ranks.rank_zero_first(lambda: locate(given) if ranks.rank == 0 else None)
        checkpoint, run = ranks.broadcast(found)
        self.target = EvalTarget.open(checkpoint, arguments.data, run, arguments.held_out)
        self._problems: list[str] = []

    def log(self, line: str) -> None:
        """Print a line on rank 0."""
        self.console.print(line, soft_wrap=True, highlight=False, markup=False)

    def run(self, suites: Mapping[str, Path | None]) -> list[str]:
        """Evaluate the suites without stored results, and print the scores of all.

        Returns what could not be scored.
        """
        # rank 0 reads and writes the run folder before the others
        plans = self.ranks.rank_zero_first(
            lambda: [self._plan(*suite, len(suites)) for suite in suites.items()]
        )
        missing = [plan for plan in plans if not self._report_stored(plan)]
        if not missing:
            return self._problems
        longest = max(plan.max_length for plan in missing)
        lm = CanonLM(
            self.target.load(self.device, self.dtype, longest),
            None if {plan.name for plan in missing} == {VALIDATION} else self.target.tokenizer,
            max_length=longest,
            add_bos=self.arguments.add_bos,
            ranks=self.ranks,
            log=self.log,
        )
        lm.batch_tokens = self.arguments.batch_tokens or batch_tokens_for(
            lm, self.target.evals or self.arguments.out, self.log
        )
        with Progress(self.console) as progress:
            work = TotalProgress(progress, sum(plan.cost for plan in missing))
            for plan in missing:
                lm.max_length = plan.max_length
                self._run_suite(plan, lm, work)
        return self._problems

    def _plan(self, name: str, path: Path | None, num_suites: int) -> SuitePlan:
        target, arguments = self.target, self.arguments
        how = suite_settings(name, arguments, target.seq_len)
        length = how["max_length"]
        if path is None:
            target.check_held_out(arguments.held_out)
            task = validation_task(
                target.train_shards, target.held_out_shards, length, arguments.limit, self.log
            )
            tasks = {name: task}
        else:
            tasks = self._open_tasks(name, path, length)
        asked = {
            **target.identity,
            "suite": name,
            "limit": arguments.limit,
            "dtype": str(self.dtype).removeprefix("torch."),
            **how,
            "lm_eval": version("lm_eval"),
            "tasks": {task: plan.description for task, plan in tasks.items()},
        }
        if arguments.out is not None:
            folder = arguments.out / name if num_suites > 1 else arguments.out
        elif target.folder is not None and target.evals is not None:
            folder = stored.results_folder(target.folder, asked)
        else:
            raise UserError(
                "eval.no_out",
                f"{target.checkpoint} belongs to no run or an abandoned branch: give --out",
            )
        # before the evaluation, which may take hours
        with report_disk_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
        return SuitePlan(name, asked, folder, tasks)

    def _open_tasks(self, name: str, path: Path, max_length: int) -> dict[str, TaskPlan]:
        arguments, only, staged = self.arguments, None, staged_folder(self.arguments.staged)
        metadata: dict[str, Any] = {
            "tokenizer": str(self.target.tokenizer_path),
            "staged": str(staged),
            "max_length": max_length,
            **dict(arguments.option),
        }
        if task_folder(path) == "playground":
            metadata["identity"] = self.target.trained_on
        if task_folder(path) == "birth_year":
            folder = (arguments.out or self.target.evals or staged) / "probes"
            corpus = lambda: find_corpus(arguments.junk, staged)  # noqa: E731
            advance = lambda probe: self.log(f"freezing the probes {probe} in {folder}")  # noqa: E731
            frozen = FrozenSets(folder, self.target.tokenizer, corpus)
            with report_disk_errors(folder):
                sets, left_out = frozen.sets(max_length, advance)
            metadata |= {"probes": str(folder), "junk": str(arguments.junk or "")}
            # two tasks per set: the greedy answer, and the rank of its years
            tasks = [task for one in sets for task in (one.name, f"{one.name}_rank")]
            only = tasks if name == "birth-year" else [name]
            if left_out:
                self.log(f"probes left out: {'; '.join(left_out)}")
        return open_tasks(name, path, metadata, arguments.limit, only)

    def _report_stored(self, plan: SuitePlan) -> bool:
        """Report stored results of the same settings and return whether there are any."""
        known: Results | None = self.ranks.broadcast(self._read_stored(plan))
        if known:
            self._report(plan, known, "read from")
        return known is not None

    def _read_stored(self, plan: SuitePlan) -> Results | None:
        try:
            results = stored.read_results(plan.folder / RESULTS)
            before, now = stored.question_of(results.asked), stored.question_of(plan.settings)
            if before == now:
                stored.read_samples(plan.folder)
                return results
        except UserError:
            return None  # missing, damaged or of an older version: evaluated again
        if self.arguments.out is None:
            return None
        name = next(n for n in sorted({*before, *now}) if before.get(n) != now.get(n))
        what = f"{name} {before.get(name)!r}, not {now.get(name)!r}"
        raise UserError(
            "eval.other_results",
            f"--out {plan.folder} holds other results ({what}): choose another folder",
            field=name,
        )

    def _run_suite(self, plan: SuitePlan, lm: CanonLM, work: TotalProgress) -> None:
        unfinished = PartialResults(plan.folder, plan.settings)
        with ExitStack() as held:
            if self.ranks.rank == 0:
                with report_disk_errors(plan.folder):
                    held.enter_context(unfinished.hold(self.log))
            if self._report_stored(plan):  # another process has evaluated it meanwhile
                work.total -= plan.cost
                return
            tasks = self._run_tasks(plan, unfinished, lm, work)
            results, samples = merge_tasks(plan.settings, tasks)
            if self.ranks.rank == 0:
                with report_disk_errors(plan.folder):
                    stored.write_results(plan.folder, results, samples)
                    unfinished.remove()
            self.ranks.barrier()
        self._report(plan, results, "written to")

    def _run_tasks(
        self, plan: SuitePlan, unfinished: PartialResults, lm: CanonLM, work: TotalProgress
    ) -> dict[str, TaskResult]:
        # rank 0's file counts, and answers may take a gigabyte: the others do not read it
        is_reader = self.ranks.rank == 0
        done: dict[str, TaskResult] = self.ranks.broadcast(unfinished.read() if is_reader else None)
        if done:
            self.log(f"{plan.name}: resumed after {len(done)} tasks of an earlier call")
        answers = {}
        for name, task in plan.tasks.items():
            if name in done:
                work.total -= task.cost
                answers[name] = done[name]
                continue
            lm.on_done = partial(work.advance, " ".join(dict.fromkeys([plan.name, name])))
            answers |= task.run(lm, partial(self._remember, plan, unfinished, name, work))
            if self.ranks.rank == 0 and len(plan.tasks) > 1:
                with report_disk_errors(plan.folder):
                    unfinished.add(name, answers[name])
        return answers

    def _remember(
        self,
        plan: SuitePlan,
        unfinished: PartialResults,
        name: str,
        work: TotalProgress,
        ask: Callable[[], TaskAnswers],
    ) -> TaskAnswers:
        """Return the answers to a task that an earlier call stored, or ask and store them."""
        stored_answers = unfinished.read_answers(name) if self.ranks.rank == 0 else None
        known: TaskAnswers | None = self.ranks.broadcast(stored_answers)
        if known is not None:
            self.log(f"{name}: answered by an earlier call")
            work.total -= plan.tasks[name].cost
            return known
        answers = ask()
        if self.ranks.rank == 0:
            with report_disk_errors(plan.folder):
                unfinished.add_answers(name, answers)
        return answers

    def _report(self, plan: SuitePlan, results: Results, how: str) -> None:
        print_results(self.console, str(self.target.checkpoint), results)
        self.log(f"{how} {plan.folder / RESULTS}")
        self._problems += results.problems()
        rival = self.arguments.must_beat
        if rival is None or plan.name != VALIDATION:
            return
        ours, theirs = (results.scores[t]["bits_per_byte"].number for t in (VALIDATION, rival))
        if not ours < theirs:
            raise UserError(
                "eval.not_beaten",
                f"{ours:.4f} bits/byte do not beat the {rival} model's {theirs:.4f}",
                ours=ours,
                rival=theirs,
            )


def merge_tasks(
    asked: Mapping[str, Any], answers: Mapping[str, TaskResult]
) -> tuple[Results, dict[str, list[dict[str, Any]]]]:
    """Return results and samples by reported task, of which lm_eval's tasks may be parts."""
    results = Results(dict(asked), {}, {}, {})
    records: dict[str, dict[tuple[int, str], dict[str, Any]]] = {}
    for name, given in answers.items():
        reported = results.tasks.get(name, {}).get("part_of", name)
        results.scores.setdefault(reported, {}).update(given.scores)
        results.num_samples.setdefault(reported, given.num_samples)
        truncated = max(results.truncated.get(reported, 0), given.truncated)
        results.truncated[reported] = truncated
        failures = results.failures.get(reported, Failures()), given.failures
        results.failures[reported] = max(failures, key=lambda each: each.count)
        for item in given.samples:
            kept = records.setdefault(reported, {}).setdefault((item["doc_id"], item["filter"]), {})
            kept.update({**item, **kept})  # the first task's prompt hash counts
    for name, items in records.items():
        results.num_sources[name] = len({source_of_record(item) for item in items.values()})
    return results, {name: [*items.values()] for name, items in records.items()}


@contextmanager
def report_disk_errors(folder: Path) -> Iterator[None]:
    """Raise UserError if the block can't write to `folder`."""
    try:
        yield
    except OSError as error:
        raise UserError(
            "eval.cannot_write",
            f"{folder}: results can't be written: {error.strerror}. Make room and repeat the "
            "command, which resumes; or choose another folder with --out",
            path=folder,
        ) from None


def print_results(console: Console, target: str, results: Results) -> None:
    """Print the scores of one suite for the checkpoint `target`; losses in ascending order."""
    counts = results.num_samples
    columns: tuple[str, ...]
    rows: list[tuple[str, ...]] = []
    if results.suite == VALIDATION:
        documents = results.num_sources.get(VALIDATION)
        source = "" if documents is None else f" of {documents:,} document{'s' * (documents != 1)}"
        title = f"held-out loss over {counts[VALIDATION]:,} tokens{source}: {target}"
        columns, num_labels = ("model", "nats/token", "+-", "bits/byte"), 1
        losses = [(scores["bits_per_byte"].number, name) for name, scores in results.scores.items()]
        for bits, name in sorted(losses):
            model = "this checkpoint" if name == VALIDATION else f"{name} of the training shards"
            nats = results.scores[name]["nats_per_token"]
            noise = "" if nats.stderr is None else f"{nats.stderr:.4f}"
            rows.append((model, f"{nats.number:.4f}", noise, f"{bits:.4f}"))
    else:
        limit = results.limit
        cut = "" if limit is None else f"; only the first {limit:,} items"
        title = f"{results.suite}: {target}{cut}"
        columns, num_labels = ("task", "metric", "score", "+-", "items"), 2
        for task, metrics in results.scores.items():
            for metric, score in metrics.items():
                noise = "" if score.stderr is None else f"{score.stderr:.4f}"
                if score.bound is not None:
                    noise = stored.format_bound(score.number, score.bound)
                shown = "none" if score.value is None else f"{score.value:.4f}"
                rows.append((task, metric, shown, noise, f"{counts[task]:,}"))
    table = Table(title=Text(title), title_justify="left")
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number < num_labels else "right", no_wrap=True)
    for row in rows:
        table.add_row(*map(Text, row))
    console.print(table)
    lines = [
        f"{task}: {count:,} of {counts[task]:,} contexts were cut to "
        f"{results.asked['max_length']} tokens"
        for task, count in results.truncated.items()
        if count
    ]
    lines += results.problems()
    for task, described in results.tasks.items():
        if found := described.get("counts"):
            words = ", ".join(f"{name} {count:,}" for name, count in found.items())
            lines.append(f"documents of {task}: {words}")
    for line in lines:
        console.print(Text(line), soft_wrap=True)
