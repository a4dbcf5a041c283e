"""`eval run`: ask one checkpoint one suite or several, print the scores and record them.

A question that was answered is read from RUN/evals; what can be refused is refused before the model
is loaded. Under torchrun the batches of each task are shared out (model/ranks.py).
"""

import argparse
from collections.abc import Iterator, Mapping
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
from canon_pretrain.kernels.hardware import check_cuda
from canon_pretrain.run import results as stored
from canon_pretrain.run.results import RESULTS, PartialResults, Results, TaskResult
from eval.harness import TaskPlan, open_tasks
from eval.model.budget import batch_tokens_for
from eval.model.lm import CanonLM
from eval.model.ranks import Ranks
from eval.model.target import EvalTarget, dtype_for, locate
from eval.staged import staged_folder
from eval.suite_names import VALIDATION, asked_how, find_suite, folder_of, split_suites
from eval.tasks.birth_year.task import FrozenSets, find_corpus
from eval.validation import validation_task


@dataclass(frozen=True)
class Plan:
    """One suite of the command: what is asked, where answers go, and its tasks."""

    name: str
    asked: dict[str, Any]
    folder: Path
    tasks: dict[str, TaskPlan]

    @property
    def cost(self) -> int:
        return sum(task.cost for task in self.tasks.values())


@dataclass
class Work:
    """The progress of several suites, in the costs of all their tasks."""

    progress: Progress
    total: int
    done: int = 0

    def advance(self, name: str, cost: int) -> None:
        self.done += cost
        share = min(1.0, self.done / self.total)
        self.progress.update(share, f"{name}: {share:.0%} of all")


def run(arguments: argparse.Namespace) -> None:
    """Ask `arguments.suite` of `arguments.checkpoint`; print tables and write results.json."""
    suites = check_options(arguments)
    check_cuda()
    # an exception leaves without waiting for ranks that are busy
    with Ranks.from_environment() as ranks:
        Evaluation(arguments, ranks).run(suites)


def check_options(arguments: argparse.Namespace) -> dict[str, Path | None]:
    """Return the task file by suite, if the options fit together."""
    for name in ("limit", "max_length", "batch_tokens"):
        value = getattr(arguments, name)
        if value is not None and value < 1:
            raise UserError("todo.run", f"--{name} {value}: expected at least 1")
    found = [find_suite(suite) for suite in split_suites(arguments.suite)]
    suites = dict(found)
    if len(suites) < len(found):
        raise UserError(
            "todo.run", f"--suite {arguments.suite}: two suites of one name; rename a file"
        )
    has_probes = any(folder_of(path) == "birth_year" for path in suites.values())
    for name, suite, is_served in (
        ("must_beat", VALIDATION, VALIDATION in suites),
        ("junk", "birth-year", has_probes),
    ):
        if getattr(arguments, name) is not None and not is_served:
            raise UserError(
                "todo.run", f"--{name} is for --suite {suite}, not for {arguments.suite}"
            )
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
        self.target = EvalTarget.open(checkpoint, arguments.data, run, arguments.held_out)

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
        longest = max(plan.asked["max_length"] for plan in missing)
        lm = CanonLM(
            self.target.load(self.device, self.dtype, longest),
            None if {plan.name for plan in missing} == {VALIDATION} else self.target.tokenizer,
            max_length=longest,
            add_bos=self.arguments.add_bos,
            ranks=self.ranks,
            say=self.say,
        )
        lm.batch_tokens = self.arguments.batch_tokens or batch_tokens_for(
            lm, self.target.evals or self.arguments.out, self.say
        )
        with Progress(self.console) as progress:
            work = Work(progress, sum(plan.cost for plan in missing))
            for plan in missing:
                lm.max_length = plan.asked["max_length"]
                self._answer(plan, lm, work)

    def _plan(self, name: str, path: Path | None, num_suites: int) -> Plan:
        target, arguments = self.target, self.arguments
        how = asked_how(name, arguments, target.seq_len)
        length = how["max_length"]
        if path is None:
            target.check_held_out(arguments.held_out)
            shards = target.train_shards, target.held_out_shards
            tasks = {name: validation_task(*shards, length, arguments.limit, self.say)}
        else:
            tasks = self._open_tasks(name, path, length)
        asked = {
            **target.identity,
            "suite": name,
            "limit": arguments.limit,
            "dtype": str(self.dtype).removeprefix("torch."),
            **how,
            "lm_eval": version("lm_eval"),
            "tasks": {task: plan.described for task, plan in tasks.items()},
        }
        if arguments.out is not None:
            folder = arguments.out / name if num_suites > 1 else arguments.out
        elif target.folder is not None and target.evals is not None:
            folder = stored.results_folder(target.folder, asked)
        else:
            raise UserError(
                "todo.run", f"{target.checkpoint} is of no run, or its run left it: give --out"
            )
        # now: nobody waits hours to learn that it can't be
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
        return Plan(name, asked, folder, tasks)

    def _open_tasks(self, name: str, path: Path, max_length: int) -> dict[str, TaskPlan]:
        arguments, only, staged = self.arguments, None, staged_folder(self.arguments.staged)
        metadata: dict[str, Any] = {
            "tokenizer": str(self.target.tokenizer_path),
            "staged": str(staged),
            "max_length": max_length,
            **dict(arguments.option),
        }
        if folder_of(path) == "birth_year":
            folder = (arguments.out or self.target.evals or staged) / "probes"
            corpus = lambda: find_corpus(arguments.junk, staged)  # noqa: E731
            advance = lambda probe: self.say(f"freezing the probes {probe} in {folder}")  # noqa: E731
            frozen = FrozenSets(folder, self.target.tokenizer, corpus)
            with writing(folder):
                sets, left_out = frozen.sets(max_length, advance)
            metadata |= {"probes": str(folder), "junk": str(arguments.junk or "")}
            # each is asked for its greedy answer, and for the rank of its years
            asked = [task for one in sets for task in (one.name, f"{one.name}_rank")]
            only = asked if name == "birth-year" else [name]
            if left_out:
                self.say(f"probes left out: {'; '.join(left_out)}")
        return open_tasks(name, path, metadata, arguments.limit, only)

    def _is_known(self, plan: Plan) -> bool:
        """Report earlier results of the question, if any; --out may hold no other's."""
        known: Results | None = self.ranks.broadcast(self._read(plan))
        if known:
            self._report(plan, known, "as found in")
        return known is not None

    def _read(self, plan: Plan) -> Results | None:
        try:
            results = stored.read_results(plan.folder / RESULTS)
            before, now = stored.question_of(results.asked), stored.question_of(plan.asked)
            if before == now:
                stored.read_samples(plan.folder)
                return results
        except UserError:
            return None  # none, damaged, or of an older version: asked again
        if self.arguments.out is None:
            return None
        name = next(n for n in sorted({*before, *now}) if before.get(n) != now.get(n))
        what = f"{name} {before.get(name)!r}, asked for is {now.get(name)!r}"
        raise UserError(
            "todo.run", f"--out {plan.folder} holds results of another question ({what})"
        )

    def _answer(self, plan: Plan, lm: CanonLM, work: Work) -> None:
        unfinished = PartialResults(plan.folder, plan.asked)
        with ExitStack() as held:
            if self.ranks.rank == 0:
                with writing(plan.folder):
                    held.enter_context(unfinished.hold(self.say))
            if self._is_known(plan):  # another process has answered it meanwhile
                work.total -= plan.cost
                return
            results, samples = merged(plan.asked, self._answers(plan, unfinished, lm, work))
            if self.ranks.rank == 0:
                with writing(plan.folder):
                    stored.write_results(plan.folder, results, samples)
                    unfinished.remove()
            self.ranks.barrier()
        self._report(plan, results, "written to")

    def _answers(
        self, plan: Plan, unfinished: PartialResults, lm: CanonLM, work: Work
    ) -> dict[str, TaskResult]:
        done: dict[str, TaskResult] = self.ranks.broadcast(unfinished.read())
        if done:
            self.say(f"{plan.name}: going on after {len(done)} tasks of an earlier call")
        answers = {}
        for name, task in plan.tasks.items():
            if name in done:
                work.total -= task.cost
                answers[name] = done[name]
                continue
            lm.answered = partial(work.advance, " ".join(dict.fromkeys([plan.name, name])))
            answers |= task.ask(lm)
            if self.ranks.rank == 0 and len(plan.tasks) > 1:
                with writing(plan.folder):
                    unfinished.add(name, answers[name])
        return answers

    def _report(self, plan: Plan, results: Results, how: str) -> None:
        print_results(self.console, str(self.target.checkpoint), results)
        self.say(f"{how} {plan.folder / RESULTS}")
        rival = self.arguments.must_beat
        if rival is None or plan.name != VALIDATION:
            return
        ours, theirs = (results.scores[t]["bits_per_byte"].value for t in (VALIDATION, rival))
        if ours >= theirs:
            raise UserError(
                "todo.run", f"{ours:.4f} bits/byte do not beat the {rival} model's {theirs:.4f}"
            )


def merged(
    asked: Mapping[str, Any], answers: Mapping[str, TaskResult]
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
            "todo.run",
            f"{folder} can't hold the results: {error.strerror}. Make room and give the same "
            "command again: it goes on from what it wrote; --out DIR writes elsewhere",
        ) from None


def print_results(console: Console, target: str, results: Results) -> None:
    """Print the scores of one suite; losses best first. `target` names what was evaluated."""
    asked, counts = results.asked, results.num_samples
    columns: tuple[str, ...]
    rows: list[tuple[str, ...]] = []
    if asked["suite"] == VALIDATION:
        title = f"held-out loss over {counts[VALIDATION]:,} tokens: {target}"
        columns, num_labels = ("model", "nats/token", "bits/byte"), 1
        losses = [(scores["bits_per_byte"].value, name) for name, scores in results.scores.items()]
        for bits, name in sorted(losses):
            model = "this checkpoint" if name == VALIDATION else f"{name} of the training shards"
            nats = results.scores[name]["nats_per_token"].value
            rows.append((model, f"{nats:.4f}", f"{bits:.4f}"))
    else:
        limit = asked["limit"]
        cut = "" if limit is None else f"; the first {limit:,} items only: not a result"
        title = f"{asked['suite']}: {target}{cut}"
        columns, num_labels = ("task", "metric", "score", "+-", "items"), 2
        for task, metrics in results.scores.items():
            for metric, score in metrics.items():
                noise = "" if score.stderr is None else f"{score.stderr:.4f}"
                if score.bound is not None:
                    noise = stored.format_bound(score.value, score.bound)
                rows.append((task, metric, f"{score.value:.4f}", noise, f"{counts[task]:,}"))
    table = Table(title=Text(title), title_justify="left")
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number < num_labels else "right", no_wrap=True)
    for row in rows:
        table.add_row(*map(Text, row))
    console.print(table)
    lines = [
        f"{task} {count:,} of {counts[task]:,} contexts longer than max_length "
        f"{asked['max_length']} lost their beginning (--max_length)"
        for task, count in results.truncated.items()
        if count
    ]
    for task, described in asked["tasks"].items():
        if found := described.get("counts"):
            words = ", ".join(f"{name} {count:,}" for name, count in found.items())
            lines.append(f"documents of {task}: {words}")
    for line in lines:
        console.print(Text(line), soft_wrap=True)
