"""From a text to a verdict: `canon try TEXT` trains a model with Canon layers and one without.

It proposes a model as `canon new` does, builds the shards, trains two seeds of both models, scores
them on the held-out documents, compares them, writes a page, and lets both write. All of it is in
outputs/NAME. A stage that has finished is skipped: after an interruption, the same command
continues.
"""

import argparse
import json
import math
import os
import re
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

from canon_pretrain.boards.driver import (
    read_failures,
    train_sweep,
    trainer_environment,
)
from canon_pretrain.boards.results import NOT_FINITE
from canon_pretrain.cluster.sweep import make_sweep, write_plan
from canon_pretrain.core.children import end_with
from canon_pretrain.core.cli import (
    EXIT_INTERRUPTED,
    command,
    number_type,
)
from canon_pretrain.core.errors import UserError
from canon_pretrain.core.files import (
    UnreadableFile,
    read_record,
    remove_leftovers,
    write_atomic,
    write_json,
)
from canon_pretrain.core.lock import locked
from canon_pretrain.core.terminal import printable
from canon_pretrain.machine.hardware import threads_per_process, visible_gpus
from canon_pretrain.new import (
    FILES_HELP,
    Machine,
    add_text_options,
    build_options,
    check_name,
    choose,
    first_words,
    inspect_text,
    toml,
)
from canon_pretrain.report.comparison import compare_sides
from canon_pretrain.report.content import BETTER, WORSE, Verdict
from canon_pretrain.report.evaluations import full_results
from canon_pretrain.report.items import Evaluation, ScoreKey
from canon_pretrain.report.record import RunRecord, read_runs
from canon_pretrain.report.speed import speed_sentence
from canon_pretrain.report.verdicts import Options, held_out_difference
from canon_pretrain.run.results import BITS, VALIDATION
from canon_pretrain.stages import Stages

RECORD = "try.json"
LOG = "log.txt"
SEEDS = ("0", "1")
MODELS = {"without-canon": "without Canon", "canon": "with Canon"}
"""Name of a config and of its runs -> what it is called; the first one is the baseline."""
NUM_RUNS = len(MODELS) * len(SEEDS)

TRAINING_SHARE = 0.75
"""Of the time that is left when the plan is made."""
OTHER_S = 15.0
"""What the other stages take at least: they build shards, evaluate, compare and sample."""
MINUTES_HELP = "for the whole trial (default: %(default)s); below 0.5 it takes longer than that"
SAMPLE_TOKENS = 60
SPLITS = ("train", "validation")
CUT = "--max-document-bytes"


@dataclass(frozen=True)
class Request:
    """The user's arguments; a trial with other arguments needs another folder."""

    files: list[str]
    minutes: float
    text_field: str | None
    text_suffixes: list[str]


@dataclass(frozen=True)
class Record:
    """The content of outputs/NAME/try.json: the request, and what was decided at its start."""

    request: Request
    build: list[str]
    """Options of `canon data build`."""
    prompt: str
    version: Literal[1] = 1

    @property
    def documents(self) -> str:
        """What is held out: documents are cut if there are few."""
        return "pieces of documents" if CUT in self.build else "documents"


class Trial:
    """The stages of a trial in `folder`, each of which does only what is left to do."""

    def __init__(self, folder: Path, stages: Stages) -> None:
        self.folder = folder
        self.stages = stages
        self.runs = folder / "runs"
        # earlier versions called the model without Canon "none"
        is_old = (folder / "none.toml").exists()
        names = ("none", "canon") if is_old else tuple(MODELS)
        self.models = dict(zip(names, MODELS.values(), strict=True))
        self.configs = {model: folder / f"{model}.toml" for model in self.models}

    def run(self, request: Request) -> None:
        """Go from the text to the verdict. Raises UserError, KeyboardInterrupt."""
        record = self._read(request)
        if record is None:
            _in_fork(lambda: self._plan(request))
            record = self._read(request)
            assert record is not None

        # Shards, then runs. Those that diverge have no score.
        self._build(record)
        diverged = self._train()
        finished = {
            model: [run for run in run_names(model) if run not in diverged] for model in self.models
        }
        folders = [self.runs / name for names in finished.values() for name in names]
        if folders:
            # --data: the runs only know where the shards were, and the folder may have moved
            self.stages.run(
                "score on held-out documents",
                "eval",
                "run",
                *folders,
                "--suite",
                VALIDATION,
                "--data",
                self.folder / "data",
            )
        self.stages.run("write the page", "eval", "report", self.runs, "--out", self.folder)
        self._sample(record, finished)
        self._conclude(record, finished, diverged)

    # -- the plan

    def _read(self, request: Request) -> Record | None:
        """Return the plan of an earlier call; None without one.

        Raises UserError if the request differs, or the folder is not that of a trial.
        """
        path = self.folder / RECORD
        if not path.exists():
            # the record is written last, after the configs
            remove_leftovers(self.folder)
            entries = {entry.name for entry in self.folder.glob("*")}
            if entries - {config.name for config in self.configs.values()}:
                raise UserError(
                    "try.exists",
                    f"{self.folder} exists, and is not of `canon try`: choose another --name",
                    path=self.folder,
                )
            return None

        try:
            record = read_record(path, Record)
        except UnreadableFile as error:
            raise UserError("try.damaged", f"{error}: remove {self.folder}") from None
        for key, before in asdict(record.request).items():
            now = getattr(request, key)
            if now != before:
                raise UserError(
                    "try.other",
                    f"{self.folder} was started with {key} = {before!r}, not {now!r}: choose "
                    "another --name, or repeat the first command to continue it",
                    key=key,
                    before=before,
                    now=now,
                )
        return record

    def _plan(self, request: Request) -> None:
        """Inspect the text and the machine; write the configs of both models and the record."""
        start = time.monotonic()
        files = [Path(name) for name in request.files]
        text = inspect_text(files, request.text_field, request.text_suffixes, "TEXT")

        # A machine trains some of the runs at once. The runs share the time that is left after
        # this inspection, though at least half of all.
        machine = Machine.find(models=NUM_RUNS)
        rounds = math.ceil(NUM_RUNS / machine.parallel)
        total_s = 60 * request.minutes
        left_s = max(total_s - (time.monotonic() - start), total_s / 2)
        proposal = choose(machine, text, training_seconds(left_s) / rounds)

        shards = str(self.folder / "data")
        record = Record(
            request=request,
            build=build_options(shards, files, text, request.text_field, proposal),
            prompt=first_words(text.sample),
        )

        # The record last: without it, the next call makes a new plan.
        self.folder.mkdir(parents=True, exist_ok=True)
        names = ", ".join(request.files)
        config = toml(self.folder.name, names, record.prompt, proposal, command="canon try")
        write_atomic(self.configs["canon"], config.encode())
        baseline = 'extends = "canon.toml"\n\n[model]\ncanon_set = ""\n'
        write_atomic(self.configs["without-canon"], baseline.encode())
        write_json(self.folder / RECORD, asdict(record))
        print()

    # -- the stages

    def _build(self, record: Record) -> None:
        """Build the shards, unless they are there: the text may be gone since."""
        manifests = [self.folder / "data" / part / "manifest.json" for part in SPLITS]
        if not all(manifest.exists() for manifest in manifests):
            self.stages.run("text to shards", "data", "build", *record.build)

    def _train(self) -> set[str]:
        """Train all runs; return the names of those that have diverged.

        Raises KeyboardInterrupt; UserError if a run failed for another reason.
        """
        configs = list(map(str, self.configs.values()))
        sweep = make_sweep(configs, (), SEEDS, "both", ())
        self.runs.mkdir(exist_ok=True)
        sweep, _ = write_plan(self.runs, sweep)

        # A run that has diverged would diverge again.
        diverged = self._diverged()
        remaining = [run for run in sweep.runs if run.name not in diverged]
        try:
            if remaining:
                train_sweep(
                    replace(sweep, runs=remaining),
                    self.runs,
                    threads=threads_per_process(NUM_RUNS),
                    server=self.stages.server,
                )
        except UserError as error:
            other_failures = read_failures(self.runs).keys() - self._diverged()
            if error.code != "sweep.failed_runs" or other_failures:
                raise
        return self._diverged()

    def _diverged(self) -> set[str]:
        """Return the names of the runs whose losses were not finite any more."""
        return {name for name, reason in read_failures(self.runs).items() if NOT_FINITE in reason}

    def _sample(self, record: Record, finished: Mapping[str, Sequence[str]]) -> None:
        """Print what a model of each kind writes after the same prompt."""
        for model, names in finished.items():
            if not names:
                continue

            output = self.stages.call(
                "sample",
                self.runs / names[0],
                f"--prompt={record.prompt}",
                "--tokenizer",
                self.folder / "data",
                "--max-tokens",
                SAMPLE_TOKENS,
                "--json",
            )
            # the last line is the sample
            sample = json.loads(output.strip().splitlines()[-1])
            text = printable(record.prompt + sample["text"], keep="\n")
            print(f"\n== a sample {self.models[model]} ({names[0]})\n{text}")

    def _conclude(
        self, record: Record, finished: Mapping[str, Sequence[str]], diverged: Iterable[str]
    ) -> None:
        """Print the losses, the verdict and the page, the last lines.

        Raises SystemExit with code 1 if a model has no run that finished.
        """
        runs_by_model: dict[str, list[RunRecord]] = {model: [] for model in finished}
        for model, names in finished.items():
            if names:
                runs_by_model[model], errors = read_runs([self.runs / name for name in names])
                if errors:
                    raise errors[0]
        self._print_losses(record, runs_by_model)
        self._print_diverged(sorted(diverged))

        # A verdict needs a run of each model.
        missing = [self.models[model] for model, runs in runs_by_model.items() if not runs]
        if missing:
            print(f"\nNo verdict: no run {' and '.join(missing)} has finished.")
        else:
            comparison = compare_sides([*runs_by_model.values()], Options(suites=[VALIDATION]))
            [row] = comparison.pairs
            if sentence := speed_sentence(comparison.speed, "the model without Canon"):
                print(f"\n{sentence}")
            print(f"\n{verdict(row, record.documents)}")
        print(f"Page: {self.folder / 'index.html'}")
        if missing:
            raise SystemExit(1)

    def _print_losses(self, record: Record, runs_by_model: Mapping[str, list[RunRecord]]) -> None:
        """Print the mean loss of each model with that of each seed, and a bigram's; best first.

        Each seed's, because two seeds may differ much.
        """
        losses: dict[str, float] = {}  # by line
        for model, runs in runs_by_model.items():
            if not runs:
                continue
            evaluations = [last_result(run) for run in runs]
            losses["a bigram model of the same text"] = _value(evaluations[0], "bigram", BITS)
            seed_losses = [_value(evaluation, VALIDATION, BITS) for evaluation in evaluations]
            seeds = ", ".join(f"{loss:.3f}" for loss in seed_losses)
            line = f"{self.models[model]} (seeds: {seeds})"
            losses[line] = math.fsum(seed_losses) / len(seed_losses)

        if losses:
            print(f"\nbits per byte of the held-out {record.documents}:")
        for line, loss in sorted(losses.items(), key=lambda pair: pair[1]):
            print(f"  {loss:.3f}  {line}")

    def _print_diverged(self, names: Sequence[str]) -> None:
        """Print which runs have diverged, at which step, and how to train with a lower rate."""
        if not names:
            return

        runs, _ = read_runs([self.runs / name for name in names])
        print()
        for run in runs:
            step = "" if run.failure is None else f" after step {run.failure[0]:,}"
            print(f"{run.label} has diverged{step}: it is left out.")

        if runs:
            rate = min(float(run.identity["optimizer.lr"]) for run in runs)
            sweep = self.folder / "lower-rate"
            configs = " ".join(map(str, self.configs.values()))
            plan = f"{sweep} --configs {configs} --lr {rate / 2:g} --seeds {' '.join(SEEDS)}"
            print(
                f"A learning rate below {rate:g} may help. To train both models with half of it: "
                f"`canon sweep plan {plan}`, then `canon sweep run {sweep} NUMBER`, for 1 to "
                f"{NUM_RUNS}"
            )


def run_names(model: str) -> list[str]:
    return [f"{model}-seed{seed}" for seed in SEEDS]


def _in_fork(function: Callable[[], None]) -> None:
    """Call `function` in a forked process, which frees torch's memory, a GPU's too, as it ends.

    Raises SystemExit with the exit code if it fails, after it has printed the error.
    """
    parent = os.getpid()
    sys.stdout.flush()  # else the child prints again what is in the buffer
    child = os.fork()
    if not child:
        end_with(parent)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        code = 1
        try:
            with command():
                function()
            code = 0
        except SystemExit as stop:
            code = stop.code if isinstance(stop.code, int) else 1
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os._exit(code)

    # Ctrl-C ends both processes; a child that was interrupted has the parent interrupted too.
    try:
        _, status = os.waitpid(child, 0)
    except KeyboardInterrupt:
        with suppress(ProcessLookupError):
            os.kill(child, signal.SIGTERM)
        os.waitpid(child, 0)
        raise
    code = os.waitstatus_to_exitcode(status)
    if code == EXIT_INTERRUPTED:
        raise KeyboardInterrupt
    if code:
        raise SystemExit(code if code > 0 else 1)


def last_result(run: RunRecord) -> Evaluation:
    """Return the newest result on the held-out text at the last step. Raises UserError."""
    results_by_step = full_results(run, VALIDATION)
    if not results_by_step:
        raise UserError("try.no_score", f"{run.label} has no result on its held-out text")
    return results_by_step[max(results_by_step)]


def _value(evaluation: Evaluation, task: str, metric: str) -> float:
    key = ScoreKey(VALIDATION, task, metric)
    value = evaluation.score(key)
    if value is None:
        raise UserError("try.no_score", evaluation.why_missing(key), task=task)
    return value


def training_seconds(left_s: float) -> float:
    """Return how much of the time that is left is for training: at least a quarter."""
    return max(min(TRAINING_SHARE * left_s, left_s - OTHER_S), left_s / 4)


def verdict(row: Verdict, documents: str = "documents") -> str:
    """Return a sentence on the comparison `row` of held-out losses, with Canon against without."""
    sentence = f"With Canon: {held_out_difference(row, documents)}"
    if row.p is None:
        return f"{sentence}: not judged, {row.why}."
    if row.verdict not in (BETTER, WORSE):
        return f"{sentence}: within the noise. More --minutes, with another --name, may show it."
    return f"{sentence}."


def folder_name(text: str) -> str:
    """Return a name for the trial of a file or folder, of the characters that --name may have."""
    name = re.sub(r"[^A-Za-z0-9_.-]+", "_", Path(text).absolute().stem).lstrip(".-")
    return name or "text"


def _stop(number: int, frame: object) -> None:
    raise KeyboardInterrupt


_minutes = number_type(float, lambda number: 0 < number < math.inf, "a number above 0")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Does Canon help on your text? Train a model with Canon layers and one "
        "without, two seeds each, and compare them. After an interruption, the same command "
        "continues."
    )
    add = parser.add_argument
    add("text", nargs="+", metavar="TEXT", help=FILES_HELP)
    add("--minutes", type=_minutes, default=10.0, help=MINUTES_HELP)
    add("--name", help="of the folder outputs/NAME (default: that of TEXT)")
    add_text_options(parser)


def run(arguments: argparse.Namespace) -> None:
    """Try Canon on a text. Raises UserError if it cannot go on; exits with 130 if interrupted."""
    name = arguments.name or folder_name(arguments.text[0])
    check_name(name)
    folder = Path("outputs", name)
    paths = [os.path.normpath(path) for path in arguments.text]
    request = Request(paths, arguments.minutes, arguments.text_field, [*arguments.text_suffixes])

    signal.signal(signal.SIGTERM, _stop)
    folder.parent.mkdir(exist_ok=True)
    with locked(folder.with_name(f".{name}.lock"), f"the trial {folder}"):
        environ = trainer_environment(threads_per_process(NUM_RUNS))
        try:
            if (folder / RECORD).exists():
                print(f"{folder}: continues", flush=True)
            with Stages(folder / LOG, environ, forks=not visible_gpus()) as stages:
                Trial(folder, stages).run(request)
        except KeyboardInterrupt:
            print("\nstopped: the same command continues")
            raise SystemExit(EXIT_INTERRUPTED) from None
