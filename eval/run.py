"""`eval run`: one checkpoint on one suite or all of them: open, ask, print, record.

Reads what training left in the run folder and the data that it names; writes results.json and a
line an item to RUN/evals (results.py). The same question is answered from there, and a suite that
was interrupted goes on with the task that it was at.

Everything that can be refused is refused before the model is loaded. Under torchrun every rank
goes through the same tasks, and the batches of each are shared out (ranks.py).
"""

import argparse
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial

import torch

from canon_pretrain.core.errors import UserError
from canon_pretrain.core.terminal import Console
from canon_pretrain.data.held_out import HeldOutLoss, windows
from canon_pretrain.kernels.hardware import check_cuda
from canon_pretrain.run.results import RESULTS, Answers, Results, Score, write_results
from eval.harness import ask
from eval.model.budget import batch_tokens_for
from eval.model.lm import CanonLM
from eval.model.load import dtype_for
from eval.model.ranks import Ranks
from eval.model.subject import Subject, locate
from eval.plan import Plan, check_options, known_results, merged, open_plans, writing
from eval.progress import Work
from eval.show_results import print_results
from eval.suite_names import VALIDATION
from eval.validation import baseline_losses, model_loss


def run(arguments: argparse.Namespace) -> None:
    """Ask `arguments.suite` of `arguments.checkpoint`; prints tables and writes results.json."""
    check_options(arguments)
    check_cuda()
    # an exception leaves without waiting for ranks that are busy
    with Ranks.from_environment() as ranks:
        try:
            _run(arguments, ranks)
        except KeyboardInterrupt:
            if ranks.rank == 0:
                words = "interrupted: the tasks that ended are kept, the same command goes on"
                print(words, file=sys.stderr)
            raise


def _run(arguments: argparse.Namespace, ranks: Ranks) -> None:
    console = Console(quiet=ranks.rank > 0)
    device = ranks.device
    if device.type == "cuda":
        torch.cuda.set_device(device)  # Triton launches on the current one
    dtype = dtype_for(arguments.dtype, device)
    # to find a run's newest checkpoint is to read all of it: one rank does
    given = arguments.checkpoint
    found = ranks.in_turn(lambda: locate(given) if ranks.rank == 0 else None)
    checkpoint, run = ranks.broadcast(found)
    subject = Subject.open(checkpoint, arguments.data, run, arguments.held_out)
    # the first rank alone reads and makes what lies in the run folder; the others find it
    plans = ranks.in_turn(lambda: open_plans(console, subject, dtype, arguments))
    for plan in plans:
        plan.known = ranks.broadcast(known_results(plan, arguments.out is not None))
        if plan.known:
            _report(console, subject, plan, plan.known, "as found in", arguments.must_beat)
    missing = [plan for plan in plans if not plan.known]
    if not missing:
        return
    done = {plan.name: ranks.broadcast(plan.unfinished.read()) for plan in missing}
    longest = max(plan.max_length for plan in missing)
    lm = CanonLM(
        subject.load(device, dtype, longest),
        subject.tokenizer if any(plan.tasks for plan in missing) else None,
        max_length=longest,
        add_bos=arguments.add_bos,
        ranks=ranks,
        say=lambda line: console.print(line, soft_wrap=True),
    )
    lm.batch_tokens = arguments.batch_tokens or batch_tokens_for(
        lm, subject.evals or arguments.out, console
    )
    costs = {
        _part(plan, name): cost
        for plan in missing
        for name, cost in _costs(subject, plan, arguments.limit).items()
        if name not in done[plan.name]
    }
    with Work(console, costs).shown() as work:
        for plan in missing:
            lm.max_length = plan.max_length
            with _alone(console, plan, ranks):
                results, how = _ask(console, subject, plan, lm, work, arguments)
            _report(console, subject, plan, results, how, arguments.must_beat)


@contextmanager
def _alone(console: Console, plan: Plan, ranks: Ranks) -> Iterator[None]:
    """The first rank holds the question, for all; see Unfinished.hold."""
    with ExitStack() as held:
        if ranks.rank == 0:
            with writing(plan.folder):
                log = partial(console.print, soft_wrap=True)
                held.enter_context(plan.unfinished.hold(log))
        yield


def _ask(
    console: Console,
    subject: Subject,
    plan: Plan,
    lm: CanonLM,
    work: Work,
    arguments: argparse.Namespace,
) -> tuple[Results, str]:
    """The results of one suite, or those that another process has got meanwhile; and which."""
    ranks = lm.ranks
    known: Results | None = ranks.broadcast(known_results(plan, arguments.out is not None))
    if known:
        for name in plan.tasks or [VALIDATION]:
            work.skip(_part(plan, name))
        return known, "as found in"
    done = ranks.broadcast(plan.unfinished.read())
    results, samples = merged(plan, _answers(console, subject, plan, lm, work, done, arguments))
    if ranks.rank == 0:
        with writing(plan.folder):
            write_results(plan.folder, results, samples)
            plan.unfinished.remove()
    ranks.barrier()
    return results, "written to"


def _costs(subject: Subject, plan: Plan, limit: int | None) -> dict[str, int]:
    if plan.tasks:
        return {name: task.cost for name, task in plan.tasks.items()}
    shards = subject.held_out_shards
    return {VALIDATION: sum(size for _, size in windows(shards.num_tokens, plan.max_length, limit))}


def _part(plan: Plan, task: str) -> str:
    return task if task == plan.name else f"{plan.name} {task}"


def _answers(
    console: Console,
    subject: Subject,
    plan: Plan,
    lm: CanonLM,
    work: Work,
    done: dict[str, Answers],
    arguments: argparse.Namespace,
) -> dict[str, Answers]:
    """Every task's answers; each is kept on disk as it ends, unless it was `done` before."""
    if not plan.tasks:
        with work.part(VALIDATION) as advance:
            return _validate(console, subject, lm, arguments.limit, advance)
    if done:
        console.print(f"{plan.name}: going on after {len(done)} tasks of an earlier call")
    answers = {}
    for name, task in plan.tasks.items():
        if name in done:
            work.skip(_part(plan, name))
            answers[name] = done[name]
            continue
        with work.part(_part(plan, name)) as advance:
            lm.answered = advance
            lm.truncated.clear()
            found = ask(lm, name, task.task, arguments.limit)
            answers[name] = replace(found, truncated=len(lm.truncated))
        if lm.ranks.rank == 0 and len(plan.tasks) > 1:
            with writing(plan.folder):
                plan.unfinished.add(name, answers[name])
    return answers


def _validate(
    console: Console,
    subject: Subject,
    lm: CanonLM,
    limit: int | None,
    advance: Callable[[int], None],
) -> dict[str, Answers]:
    """The held-out loss of the model and of the count models."""
    seq_len, held_out, train = lm.max_length, subject.held_out_shards, subject.train_shards
    lm.answered = advance
    loss, documents = model_loss(lm, held_out, seq_len=seq_len, limit=limit)
    console.print("counting the training shards' unigrams and bigrams")
    losses = {VALIDATION: loss}
    losses |= baseline_losses(train, held_out, seq_len=seq_len, limit=limit)
    samples = {VALIDATION: documents}
    return {
        name: Answers(_loss_scores(loss), loss.num_tokens, samples.get(name, []))
        for name, loss in losses.items()
    }


def _loss_scores(loss: HeldOutLoss) -> dict[str, Score]:
    # tokens are no independent items: no standard error
    return {
        "nats_per_token": Score(loss.nats_per_token),
        "bits_per_byte": Score(loss.bits_per_byte),
    }


def _report(
    console: Console, subject: Subject, plan: Plan, results: Results, how: str, rival: str | None
) -> None:
    print_results(console, str(subject.checkpoint), results)
    console.print(f"{how} {plan.folder / RESULTS}", soft_wrap=True)
    if rival is not None and plan.name == VALIDATION:
        _check_beaten(results, rival)


def _check_beaten(results: Results, name: str) -> None:
    """Raise UserError unless the model has fewer bits per byte than the count model `name`."""
    ours, theirs = (results.scores[t]["bits_per_byte"].value for t in (VALIDATION, name))
    if ours >= theirs:
        raise UserError(
            f"the checkpoint's {ours:.4f} bits per byte do not beat the {name} model's "
            f"{theirs:.4f}, as --must_beat asks"
        )
