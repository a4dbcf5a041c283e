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
from canon_pretrain.run.results import (
    BITS,
    NATS,
    RESULTS,
    PartialResults,
    Results,
    Score,
    TaskAnswers,
    TaskResult,
    format_bound,
    question_of,
    read_results,
    read_samples,
    results_folder,
    source_of_record,
    write_results,
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
    """One suite of the command: the settings (`asked` of its results), folder and tasks."""

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

    def skip(self, cost: int) -> None:
        """Take work out of the total that an earlier call or another process has done."""
        self.total -= cost


def evaluate(arguments: argparse.Namespace, suites: Mapping[str, Path | None]) -> None:
    """Evaluate each of `arguments.checkpoint`; print tables and write results.json."""
    if arguments.out and len(arguments.checkpoint) > 1:
        raise UserError("option.conflict", "--out is for one --checkpoint", option="--out")
    check_cuda()

    problems: list[str] = []
    # on an error, exit without waiting for busy ranks
    with Ranks.from_environment() as ranks:
        for checkpoint in arguments.checkpoint:
            problems += Evaluation(checkpoint, arguments, ranks).run(suites)
    if problems and ranks.rank == 0:
        raise UserError(
            "eval.incomplete",
            f"all else is evaluated and stored, but {len(problems)} scores are missing or without "
            f"some items. The first: {problems[0]}",
            problems=problems,
        )


class Evaluation:
    """One checkpoint opened with the options of `eval run`, on one rank."""

    def __init__(self, checkpoint: Path, arguments: argparse.Namespace, ranks: Ranks) -> None:
        self.arguments = arguments
        self.ranks = ranks
        self.console = Console(quiet=ranks.rank > 0)
        self.device = ranks.device
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)  # Triton launches on the current one
        self.dtype = dtype_for(arguments.dtype, self.device)

        # finding a run's newest checkpoint reads all of it: only on rank 0
        folder, run = ranks.on_rank_zero(lambda: locate(checkpoint))
        self.target = EvalTarget.open(folder, arguments.data, run, arguments.held_out)
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
            lambda: [self._plan(name, path, len(suites)) for name, path in suites.items()]
        )
        missing = [plan for plan in plans if not self._report_stored(plan)]
        if not missing:
            return self._problems

        # One model for all suites: it is loaded for the longest sequences.
        longest = max(plan.max_length for plan in missing)
        needs_tokenizer = any(plan.name != VALIDATION for plan in missing)
        lm = CanonLM(
            self.target.load(self.device, self.dtype, longest),
            self.target.tokenizer if needs_tokenizer else None,
            max_length=longest,
            add_bos=self.arguments.add_bos,
            ranks=self.ranks,
            log=self.log,
        )
        lm.batch_tokens = self.arguments.batch_tokens or batch_tokens_for(
            lm,
            self.target.evals or self.arguments.out,
            self.log,
        )

        # Evaluate suite by suite, each with its own maximum length.
        with Progress(self.console) as progress:
            total = TotalProgress(progress, sum(plan.cost for plan in missing))
            for plan in missing:
                lm.max_length = plan.max_length
                self._run_suite(plan, lm, total)
        return self._problems

    def _plan(self, name: str, path: Path | None, num_suites: int) -> SuitePlan:
        """Open the tasks of a suite, and create the folder of its results."""
        target = self.target
        arguments = self.arguments
        suite_options = suite_settings(name, arguments, target.seq_len)
        max_length = suite_options["max_length"]

        # The suite's tasks: `validation` reads shards, all others are lm_eval's.
        if path is None:
            target.check_held_out(arguments.held_out)
            task = validation_task(
                target.train_shards,
                target.held_out_shards,
                max_length,
                arguments.limit,
                self.log,
                target.order,
            )
            tasks = {name: task}
        else:
            tasks = self._open_tasks(name, path, max_length)

        # All that the scores depend on: stored results with equal settings are reused.
        settings = {
            **target.identity,
            "suite": name,
            "limit": arguments.limit,
            "dtype": str(self.dtype).removeprefix("torch."),
            **suite_options,
            "lm_eval": version("lm_eval"),
            "tasks": {task: plan.description for task, plan in tasks.items()},
        }

        # The folder of the results: of several suites in --out, one each.
        if arguments.out is not None and num_suites > 1:
            folder = arguments.out / name
        elif arguments.out is not None:
            folder = arguments.out
        elif target.folder is not None and target.evals is not None:
            folder = results_folder(target.folder, settings)
        else:
            raise UserError(
                "eval.no_out",
                f"{target.checkpoint} belongs to no run or an abandoned branch: pass --out",
            )
        # before the evaluation, which may take hours
        with report_disk_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
        return SuitePlan(name, settings, folder, tasks)

    def _open_tasks(self, name: str, path: Path, max_length: int) -> dict[str, TaskPlan]:
        """Load the tasks of a suite's file, and pass them what their documents depend on."""
        arguments = self.arguments
        staged = staged_folder(arguments.staged)
        metadata: dict[str, Any] = {
            "tokenizer": str(self.target.tokenizer_path),
            "staged": str(staged),
            "max_length": max_length,
            **dict(arguments.option),
        }
        only = None

        # The run's synthetic task, or its frozen probes: of a suite those that fit, or one task.
        if task_folder(path) == "playground":
            metadata["identity"] = self.target.trained_on
        if task_folder(path) == "birth_year":
            probes = (arguments.out or self.target.evals or staged) / "probes"
            metadata |= {"probes": str(probes), "junk": str(arguments.junk or "")}
            fitting_tasks = self._freeze_probes(probes, max_length, staged)
            only = fitting_tasks if name == "birth-year" else [name]
        return open_tasks(name, path, metadata, arguments.limit, only)

    def _freeze_probes(self, folder: Path, max_length: int, staged: Path) -> list[str]:
        """Write the birth-year sets that `folder` lacks; return the tasks that fit `max_length`."""
        frozen = FrozenSets(
            folder,
            self.target.tokenizer,
            lambda: find_corpus(self.arguments.junk, staged),
        )
        with report_disk_errors(folder):
            fitting = frozen.sets(
                max_length,
                lambda probe: self.log(f"freezing the probes {probe} in {folder}"),
            )
        if fitting.left_out:
            self.log(f"probes left out: {'; '.join(fitting.left_out)}")
        # two tasks per set: the greedy answer, and the rank of its years
        names = [probe_set.name for probe_set in fitting.sets]
        return [task for name in names for task in (name, f"{name}_rank")]

    def _report_stored(self, plan: SuitePlan) -> bool:
        """Report stored results of the same settings and return whether there are any."""
        results: Results | None = self.ranks.broadcast(self._read_stored(plan))
        if results is None:
            return False
        self._report(plan, results, "read from")
        return True

    def _read_stored(self, plan: SuitePlan) -> Results | None:
        """Return the results in the plan's folder if they answer the same question."""
        try:
            results = read_results(plan.folder / RESULTS)
            stored = question_of(results.asked)
            asked_now = question_of(plan.settings)
            if stored == asked_now:
                read_samples(plan.folder)  # raises if they are damaged
                return results
        except UserError:
            return None  # missing, damaged or of an older version: evaluated again
        if self.arguments.out is None:
            return None

        # A folder chosen by the user: do not overwrite other results.
        names = sorted({*stored, *asked_now})
        name = next(name for name in names if stored.get(name) != asked_now.get(name))
        raise UserError(
            "eval.other_results",
            f"--out {plan.folder} holds other results ({name} {stored.get(name)!r}, not "
            f"{asked_now.get(name)!r}): choose another folder",
            field=name,
        )

    def _run_suite(self, plan: SuitePlan, lm: CanonLM, total: TotalProgress) -> None:
        """Evaluate a suite, store and report its results, unless another process just did."""
        unfinished = PartialResults(plan.folder, plan.settings)
        with ExitStack() as locks:
            # one process at a time evaluates into a folder
            if self.ranks.rank == 0:
                with report_disk_errors(plan.folder):
                    locks.enter_context(unfinished.hold(self.log))
            if self._report_stored(plan):  # evaluated by another process, which held the lock
                total.skip(plan.cost)
                return

            task_results = self._run_tasks(plan, unfinished, lm, total)
            results, samples = merge_tasks(plan.settings, task_results)
            if self.ranks.rank == 0:
                with report_disk_errors(plan.folder):
                    write_results(plan.folder, results, samples)
                    unfinished.remove()
            self.ranks.barrier()
        self._report(plan, results, "written to")

    def _run_tasks(
        self, plan: SuitePlan, unfinished: PartialResults, lm: CanonLM, total: TotalProgress
    ) -> dict[str, TaskResult]:
        """Return the results of the suite's tasks; those of an earlier call are read."""
        # rank 0's file counts, and answers may take a gigabyte: the others do not read it
        finished = self.ranks.on_rank_zero(unfinished.read)
        if finished:
            self.log(f"{plan.name}: resumed after {len(finished)} tasks of an earlier call")

        results: dict[str, TaskResult] = {}
        for name, task in plan.tasks.items():
            if name in finished:
                total.skip(task.cost)
                results[name] = finished[name]
                continue

            label = name if name == plan.name else f"{plan.name} {name}"
            lm.on_done = partial(total.advance, label)
            results |= task.run(lm, partial(self._remember, plan, unfinished, name, total))
            # the result of the only task is written with the suite's
            if self.ranks.rank == 0 and len(plan.tasks) > 1:
                with report_disk_errors(plan.folder):
                    unfinished.add(name, results[name])
        return results

    def _remember(
        self,
        plan: SuitePlan,
        unfinished: PartialResults,
        name: str,
        total: TotalProgress,
        ask: Callable[[], TaskAnswers],
    ) -> TaskAnswers:
        """Return the answers to a task that an earlier call stored, or ask and store them."""
        stored_answers = self.ranks.on_rank_zero(lambda: unfinished.read_answers(name))
        if stored_answers is not None:
            self.log(f"{name}: answered by an earlier call")
            total.skip(plan.tasks[name].cost)
            return stored_answers

        answers = ask()
        if self.ranks.rank == 0:
            with report_disk_errors(plan.folder):
                unfinished.add_answers(name, answers)
        return answers

    def _report(self, plan: SuitePlan, results: Results, origin: str) -> None:
        """Print the scores and `origin`, then check --must-beat."""
        print_results(self.console, str(self.target.checkpoint), results)
        self.log(f"{origin} {plan.folder / RESULTS}")
        self._problems += results.problems()

        # --must-beat: the loss of a count model, which `validation` has scored too.
        rival = self.arguments.must_beat
        if rival is None or plan.name != VALIDATION:
            return
        our_bits = results.scores[VALIDATION][BITS].number
        rival_bits = results.scores[rival][BITS].number
        if not our_bits < rival_bits:  # also if NaN
            raise UserError(
                "eval.not_beaten",
                f"{our_bits:.4f} bits/byte do not beat the {rival} model's {rival_bits:.4f}",
                ours=our_bits,
                rival=rival_bits,
            )


def merge_tasks(
    settings: Mapping[str, Any], task_results: Mapping[str, TaskResult]
) -> tuple[Results, dict[str, list[dict[str, Any]]]]:
    """Return results and samples by reported task, of which lm_eval's tasks may be parts."""
    results = Results(asked=dict(settings), scores={}, num_samples={})
    records_by_item: dict[str, dict[tuple[int, str], dict[str, Any]]] = {}
    for name, part in task_results.items():
        reported = results.tasks.get(name, {}).get("part_of", name)
        results.scores.setdefault(reported, {}).update(part.scores)
        results.num_samples.setdefault(reported, part.num_samples)

        # The parts have the same items: report the worst part, not the sum.
        truncated = results.truncated.get(reported, 0)
        results.truncated[reported] = max(truncated, part.truncated)
        failures = results.failures.setdefault(reported, part.failures)
        if part.failures.count > failures.count:
            results.failures[reported] = part.failures

        # One record per item, with the fields of all parts. The first part's prompt hash counts. A
        # task without records, such as a count model, has no file of them.
        for record in part.samples:
            records = records_by_item.setdefault(reported, {})
            merged = records.setdefault((record["doc_id"], record["filter"]), {})
            for field, value in record.items():
                merged.setdefault(field, value)

    samples = {name: list(records.values()) for name, records in records_by_item.items()}
    for name, item_records in samples.items():
        results.num_sources[name] = len(set(map(source_of_record, item_records)))
    return results, samples


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
    """Print the scores of one suite for the checkpoint `target`."""
    if results.suite == VALIDATION:
        console.print(_loss_table(target, results))
    else:
        console.print(_score_table(target, results))

    # Below the table: what its scores lack, and which documents they are of.
    notes = [
        f"{task}: {count:,} of {results.num_samples[task]:,} contexts were cut to "
        f"{results.asked['max_length']} tokens"
        for task, count in results.truncated.items()
        if count
    ]
    notes += results.problems()
    for task, description in results.tasks.items():
        if counts := description.get("counts"):
            texts = [f"{name} {count:,}" for name, count in counts.items()]
            notes.append(f"documents of {task}: {', '.join(texts)}")
    for note in notes:
        console.print(Text(note), soft_wrap=True)


def _loss_table(target: str, results: Results) -> Table:
    """Return the losses of the checkpoint and of the count models in ascending order."""
    source = ""
    num_documents = results.num_sources.get(VALIDATION)
    if num_documents is not None:  # else of an older version
        source = f" of {num_documents:,} document{'s' * (num_documents != 1)}"
    num_tokens = results.num_samples[VALIDATION]
    title = f"held-out loss over {num_tokens:,} tokens{source}: {target}"
    table = _new_table(title, ["model"], ["nats/token", "+-", "bits/byte"])

    bits_and_names = [(scores[BITS].number, name) for name, scores in results.scores.items()]
    for bits, name in sorted(bits_and_names):
        model = "this checkpoint" if name == VALIDATION else f"{name} of the training shards"
        nats = results.scores[name][NATS]
        table.add_row(
            Text(model),
            f"{nats.number:.4f}",
            _format_noise(nats),
            f"{bits:.4f}",
        )
    return table


def _score_table(target: str, results: Results) -> Table:
    """Return the metrics of a suite's tasks."""
    title = f"{results.suite}: {target}"
    if results.limit is not None:
        title = f"{title}; only the first {results.limit:,} items"
    table = _new_table(title, ["task", "metric"], ["score", "+-", "items"])

    for task, metrics in results.scores.items():
        for metric, score in metrics.items():
            value = "none" if score.value is None else f"{score.value:.4f}"
            num_items = f"{results.num_samples[task]:,}"
            table.add_row(
                Text(task),
                Text(metric),
                value,
                _format_noise(score),
                num_items,
            )
    return table


def _new_table(title: str, text_columns: list[str], number_columns: list[str]) -> Table:
    """Return an empty table; its columns of numbers are justified to the right."""
    table = Table(title=Text(title), title_justify="left")
    for column in text_columns:
        table.add_column(column, no_wrap=True)
    for column in number_columns:
        table.add_column(column, justify="right", no_wrap=True)
    return table


def _format_noise(score: Score) -> str:
    """Return the standard error or, of a value of 0 or 1, the bound of its interval."""
    if score.bound is not None:
        return format_bound(score.number, score.bound)
    return "" if score.stderr is None else f"{score.stderr:.4f}"
