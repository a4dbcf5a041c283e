"""`eval run`: one checkpoint on one suite: load, ask, print, record.

Reads what training left in the run folder and the data that it names; writes results.json and a
line an item to RUN/evals (results.py). The same question is answered from there.
"""

import argparse
import contextlib
import hashlib
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from canon_pretrain.checkpoint.weights import METADATA, check_checkpoint, checkpoint_step
from canon_pretrain.data.held_out import HeldOutLoss, windows
from canon_pretrain.data.mixture import Mixture
from canon_pretrain.data.shards import TokenShards
from canon_pretrain.data.tokenizer import Tokenizer
from canon_pretrain.errors import UserError
from canon_pretrain.run.folder import RunFolder
from eval.birth_year import FrozenSets, held_out_sentences, split_sentences
from eval.lm import CanonLM
from eval.model import load_model
from eval.progress import progress
from eval.results import RESULTS, Results, Score, read_results, results_folder, write_results
from eval.suites import (
    BIRTH_YEAR,
    VALIDATION,
    Samples,
    Scores,
    Suite,
    ask,
    birth_year_suite,
    file_suite,
    find_suite,
)
from eval.validation import baseline_losses, model_loss

DTYPE = "float32"  # of weights and arithmetic, see eval/model.py


@dataclass(frozen=True)
class Subject:
    """A checkpoint, and what its run says about it."""

    checkpoint: Path
    folder: RunFolder
    step: int
    data: Path
    train: TokenShards
    held_out: TokenShards
    max_length: int

    @classmethod
    def open(cls, checkpoint: Path, data: Path | None, max_length: int | None) -> "Subject":
        """Raises UserError where the checkpoint, its run or its data are not there or not whole."""
        check_checkpoint(checkpoint)
        folder = RunFolder.of_checkpoint(checkpoint)
        config = folder.read_config()
        try:
            section = config["config"]["data"]
            mixed = [Path(folder) for folder in section.get("paths") or []]
            recorded = Path(section["path"])
            seq_len = int(config["config"]["training"]["seq_len"])
            trained_on = config["identity"]["data_fingerprint"]
        except (KeyError, TypeError) as error:
            raise UserError(
                f"{folder.config_file} is damaged, or another version of this program wrote it: it "
                f"lacks {error}"
            ) from None
        if mixed and data is None:
            raise UserError(
                f"{folder.path} was trained on a mixture of {', '.join(map(str, mixed))}: name the "
                "one whose held-out part and tokenizer to use with --data"
            )
        if data is None and not recorded.is_dir():
            raise UserError(
                f"{recorded}, the data of {folder.path}, is not there: name the folder that it was "
                "moved to with --data"
            )
        data = data or recorded
        train, held_out = TokenShards.open(data / "train"), TokenShards.open(data / "validation")
        if mixed:
            try:
                with contextlib.closing(Mixture.open(mixed, section["weights"])) as mixture:
                    known = {source.fingerprint for source in mixture.sources}
                    found = mixture.fingerprint if train.fingerprint in known else train.fingerprint
            except UserError as error:
                raise UserError(
                    f"{folder.path} was trained on a mixture, whose folders must be where they "
                    f"were (links will do) for --data to be checked: {error}"
                ) from None
        else:
            found = train.fingerprint
        if found != trained_on:
            raise UserError(
                f"{data} is not what {folder.path} was trained on: its fingerprint is "
                f"{found[:12]}, the run's {trained_on[:12]}. Name the run's shards "
                "with --data"
            )
        max_length = max_length or seq_len
        step = checkpoint_step(checkpoint)
        return cls(checkpoint.resolve(), folder, step, data, train, held_out, max_length)

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer that the data was written with; raises UserError where it is not there."""
        try:
            tokenizer = Tokenizer.find(self.data, eos=self.train.eos_id)
        except UserError as error:
            raise UserError(
                f"{error}. This suite reads text; only --suite {VALIDATION} does without"
            ) from None
        if tokenizer.sha256 != self.train.tokenizer_sha256:
            raise UserError(
                f"{self.data / tokenizer.file_name} is not the tokenizer that {self.data} was "
                f"written with: its sha256 is {tokenizer.sha256[:16]}, expected "
                f"{self.train.tokenizer_sha256[:16]}"
            )
        return tokenizer


def run_suite(arguments: argparse.Namespace) -> None:
    """Run `arguments.suite` on `arguments.checkpoint`; prints a table and writes results.json."""
    _check_options(arguments)
    name, path = find_suite(arguments.suite)
    subject = Subject.open(arguments.checkpoint, arguments.data, arguments.max_length)
    console = Console()
    suite = _open_suite(console, subject, name, path, arguments)
    asked = {
        "checkpoint": str(subject.checkpoint),
        "written_ns": (subject.checkpoint / METADATA).stat().st_mtime_ns,
        "step": subject.step,
        "suite": name,
        "limit": arguments.limit,
        "max_length": subject.max_length,
        "dtype": DTYPE,
        "train_fingerprint": subject.train.fingerprint,
        "held_out_fingerprint": subject.held_out.fingerprint,
        "tokenizer_sha256": subject.train.tokenizer_sha256,
        "lm_eval": version("lm_eval"),
        "tasks": suite.described if suite else {VALIDATION: {"version": 2}},
    }
    out = arguments.out or results_folder(subject.folder, asked)
    try:
        out.mkdir(parents=True, exist_ok=True)  # now: nobody waits hours to learn that it can't be
    except OSError as error:
        raise UserError(f"{out} can't hold the results: {error.strerror}") from None
    if known := _known(out, asked, foreign=arguments.out is not None):
        _print(console, subject, known)
        console.print(f"as found in {out / RESULTS}", soft_wrap=True)
        _check_beaten(known, arguments.must_beat)
        return
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    lm = CanonLM(
        load_model(subject.checkpoint, device, subject.max_length),
        subject.tokenizer if suite else None,
        max_length=subject.max_length,
        batch_tokens=arguments.batch_tokens,
        console=console,
    )
    samples: Samples = {}
    if suite:
        scores, num_samples, samples = ask(lm, suite.tasks(), arguments.limit)
    else:
        scores, num_samples = _validate(console, subject, lm, arguments.limit)
    results = Results(asked, scores, num_samples)
    _print(console, subject, results)
    write_results(out, results, samples)
    console.print(f"written to {out / RESULTS}", soft_wrap=True)
    _check_beaten(results, arguments.must_beat)


def _check_options(arguments: argparse.Namespace) -> None:
    for name in ("limit", "max_length", "batch_tokens"):
        value = getattr(arguments, name)
        if value is not None and value < 1:
            raise UserError(f"--{name} {value}: expected at least 1")
    for name, suite in (("must_beat", VALIDATION), ("junk", BIRTH_YEAR)):
        if getattr(arguments, name) is not None and arguments.suite != suite:
            raise UserError(f"--{name} is for --suite {suite}, not for {arguments.suite}")


def _open_suite(
    console: Console, subject: Subject, name: str, path: Path | None, arguments: argparse.Namespace
) -> Suite | None:
    """The suite's tasks; None for `validation`, which needs no text."""
    if path is not None:
        subject.tokenizer  # noqa: B018  (its errors come before those of the task)
        return file_suite(name, path)
    if name == BIRTH_YEAR:
        return _open_probes(console, subject, arguments)
    if subject.held_out.num_tokens < 2:
        raise UserError(
            f"{subject.data / 'validation'} holds no text: build the data with --holdout above 0"
        )
    return None


def _open_probes(console: Console, subject: Subject, arguments: argparse.Namespace) -> Suite:
    """The frozen probes that fit, made if need be; says which do not."""
    tokenizer, junk = subject.tokenizer, arguments.junk
    if junk is None:
        origin = f"held-out text {subject.held_out.fingerprint}"
    else:
        try:
            text = junk.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"--junk {junk}: cannot be read as UTF-8 text: {error}") from None
        origin = f"file {hashlib.sha256(text.encode()).hexdigest()}"
    frozen = FrozenSets(
        (arguments.out or subject.folder.path / "evals") / "probes",
        tokenizer=tokenizer,
        tokenizer_sha256=tokenizer.sha256,
        origin=origin,
        load_junk=lambda: (
            held_out_sentences(subject.held_out, tokenizer.decode)
            if junk is None
            else split_sentences(text)
        ),
    )

    def making(name: str) -> None:
        console.print(f"freezing the probes {name} in {frozen.folder}", soft_wrap=True)

    sets, missing = frozen.sets(subject.max_length, making)
    if missing:
        console.print(
            f"left out, not fitting max_length {subject.max_length}: {', '.join(missing)}",
            soft_wrap=True,
        )
    if not sets:
        raise UserError(
            f"no set of {BIRTH_YEAR} fits max_length {subject.max_length}: raise it with "
            "--max_length; it may be longer than what training saw"
        )
    return birth_year_suite(sets)


def _validate(
    console: Console, subject: Subject, lm: CanonLM, limit: int | None
) -> tuple[Scores, dict[str, int]]:
    """The held-out loss of the model and of the count models."""
    seq_len, held_out = subject.max_length, subject.held_out
    total = sum(1 for _ in windows(held_out.num_tokens, seq_len, limit))
    with progress(console, "held-out windows", total) as advance:
        loss = model_loss(lm, held_out, seq_len=seq_len, limit=limit, advance=advance)
    console.print("counting the training shards' unigrams and bigrams")
    losses = {VALIDATION: loss}
    losses |= baseline_losses(subject.train, held_out, seq_len=seq_len, limit=limit)
    scores = {name: _loss_scores(loss) for name, loss in losses.items()}
    return scores, {name: loss.num_tokens for name, loss in losses.items()}


def _loss_scores(loss: HeldOutLoss) -> dict[str, Score]:
    # tokens are no independent items: no standard error
    return {
        "nats_per_token": Score(loss.nats_per_token),
        "bits_per_byte": Score(loss.bits_per_byte),
    }


def _check_beaten(results: Results, name: str | None) -> None:
    """Raise UserError unless the model has fewer bits per byte than the count model `name`."""
    if name is None:
        return
    ours, theirs = (results.scores[t]["bits_per_byte"].value for t in (VALIDATION, name))
    if ours >= theirs:
        raise UserError(
            f"the checkpoint's {ours:.4f} bits per byte do not beat the {name} model's "
            f"{theirs:.4f}, as --must_beat asks"
        )


def _known(out: Path, asked: dict[str, Any], *, foreign: bool) -> Results | None:
    """What an earlier call found for exactly the same question; None where there is none.

    `foreign`: `out` is a folder that the caller named, so it may hold anyone's results. Those of
    another question are not written over: UserError. In the run's own folder, which is named after
    the question, only the checkpoint's file can differ (written again, or the run was moved).
    """
    try:
        results = read_results(out / RESULTS)
    except UserError:
        return None  # none, torn, or of an older version: asked again
    if results.asked == asked:
        return results
    for name in sorted(results.asked.keys() | asked.keys()):
        before, now = results.asked.get(name), asked.get(name)
        if foreign and before != now and name != "written_ns":
            raise UserError(
                f"--out {out} holds results of another question ({name} {before!r}, asked for is "
                f"{now!r}): choose another folder"
            )
    return None


def _print(console: Console, subject: Subject, results: Results) -> None:
    """The scores as a table; losses best first."""
    if results.asked["suite"] == VALIDATION:
        table = _loss_table(subject, results)
    else:
        table = Table(title=f"{results.asked['suite']}: {subject.checkpoint}", title_justify="left")
        for column in ("task", "metric"):
            table.add_column(column)
        for column in ("score", "+-", "items"):
            table.add_column(column, justify="right")
        for task, metrics in results.scores.items():
            for metric, score in metrics.items():
                error = "" if score.stderr is None else f"{score.stderr:.4f}"
                count = str(results.num_samples[task])
                table.add_row(task, metric, f"{score.value:.4f}", error, count)
    console.print(table)


def _loss_table(subject: Subject, results: Results) -> Table:
    tokens = results.num_samples[VALIDATION]
    title = f"held-out loss over {tokens:,} tokens: {subject.checkpoint}"
    table = Table(title=title, title_justify="left")
    table.add_column("model")
    table.add_column("nats/token", justify="right")
    table.add_column("bits/byte", justify="right")
    for name, metrics in sorted(
        results.scores.items(), key=lambda item: item[1]["bits_per_byte"].value
    ):
        label = f"{name} of the training shards" if name != VALIDATION else "this checkpoint"
        nats, bits = metrics["nats_per_token"].value, metrics["bits_per_byte"].value
        table.add_row(label, f"{nats:.4f}", f"{bits:.4f}")
    return table
