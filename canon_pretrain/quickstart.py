"""`make quickstart`: text to shards, a stopped and resumed model, scores, a page; what Canon does.

Each stage prints the command that it stands for, and skips what is finished. On CPUs the commands
are forks of one process that has imported torch (stages.py).
"""

import json
import os
import shlex
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from canon_pretrain.boards.board import read_board
from canon_pretrain.boards.driver import train_sweep, trainer_environment
from canon_pretrain.boards.plan import plan_board
from canon_pretrain.core.cli import command, run_process
from canon_pretrain.core.files import read_bytes
from canon_pretrain.core.terminal import duration
from canon_pretrain.machine.hardware import threads_per_process, visible_gpus
from canon_pretrain.report.evaluations import full_results
from canon_pretrain.report.items import ScoreKey
from canon_pretrain.report.record import read_runs
from canon_pretrain.run.config import read_experiment
from canon_pretrain.run.folder import RunFolder
from canon_pretrain.run.results import BITS, VALIDATION
from canon_pretrain.stages import Stages

CONFIG = Path("train_configs/quickstart.toml")
BOARD = Path("train_configs/playground/boards/quickstart.toml")
FOLDER = Path("outputs/quickstart")
RANKS = 2
BUILD = "--tokenizer train:1024 --max-tokens 2000000 --max-document-bytes 16000 --holdout 0.05"
PROMPT = "This module provides"
ARMS = {"nope_canon": "with Canon", "nope": "without Canon"}
BAR_WIDTH = 40
MAX_THREADS = 4


class Quickstart:
    """The stages, of which each does what is left to do; `prefix` comes before shown commands."""

    def __init__(self, stages: Stages, prefix: str) -> None:
        self.stages = stages
        self.prefix = prefix
        self.run = FOLDER / "run"
        self.board = FOLDER / "canon"
        self.steps = read_experiment(CONFIG)["training"]["steps"]

    def all(self) -> None:
        """Run all stages, and print what they show. Raises UserError."""
        self._stage(
            "1/7 text -> tokenizer -> shards",
            f"data build --source stdlib {BUILD} --out {FOLDER / 'data'}",
        )
        self._train_and_resume()

        checkpoint = self._checkpoint(self.steps)
        self._stage(
            "4/7 held-out loss next to models that count tokens",
            f"eval run --checkpoint {checkpoint} --suite {VALIDATION} --must-beat bigram",
        )
        gain = self._gain_over_bigram()
        print(f"{gain:.2f} bits per byte better than a bigram of the text")

        self._stage("5/7 a page to look at", f"eval report {self.run}")
        self._stage(
            "6/7 a sample", f"sample {self.run} --prompt {PROMPT!r} --max-tokens 60 --seed 0"
        )
        self._show_canon()

        print(f"\npages: {self.run}/report/index.html, {self.board}/report.html")
        print("next:")
        print("  source .venv/bin/activate")
        for next_command, purpose in NEXT.items():
            command_line = next_command.format(run=self.run)
            print(f"  {command_line:37} # {purpose}")

    def _train_and_resume(self) -> None:
        """Train on two ranks, stop in the middle, and resume."""
        middle = self.steps // 2
        if RunFolder(self.run).done_file.exists():
            return

        if not self._checkpoint(middle).exists():
            self._train(
                "2/7 train on two FSDP2 ranks and stop in the middle",
                "--run.stop_at",
                str(middle),
            )
        self._train("3/7 resume and finish")

    def _checkpoint(self, step: int) -> Path:
        return self.run / "checkpoint" / f"step-{step}"

    def _train(self, title: str, *options: str) -> None:
        arguments = ("--config", str(CONFIG), *options)
        launcher = f"torchrun --nproc-per-node {RANKS} -m canon_pretrain.train"
        with self._titled(title, f"{launcher} {shlex.join(arguments)}"):
            self.stages.call_ranks(RANKS, *arguments)

    def _gain_over_bigram(self) -> float:
        """Return by how many bits per byte the model is better than a bigram of its shards."""
        [run], _ = read_runs([self.run])
        evaluation = full_results(run, VALIDATION)[self.steps]
        model = evaluation.score(ScoreKey(VALIDATION, VALIDATION, BITS))
        bigram = evaluation.score(ScoreKey(VALIDATION, "bigram", BITS))
        assert model is not None and bigram is not None  # --must-beat has compared them
        return bigram - model

    def _show_canon(self) -> None:
        """Train a small board with Canon and without, and print its scores as bars."""
        with self._titled(
            "7/7 what Canon layers do: copying, with and without",
            f"canon playground run {BOARD} --out {self.board}",
        ):
            board = read_board(BOARD)
            sweep, _ = plan_board(board, self.board)
            train_sweep(
                sweep,
                self.board,
                threads=threads(),
                server=self.stages.server,
            )
            self.stages.call("playground", "report", BOARD, "--out", self.board)
            report = json.loads(read_bytes(self.board / "report.json"))
            print(bars(report))

    def _stage(self, title: str, arguments: str) -> None:
        """Run `canon ARGUMENTS` as a stage."""
        with self._titled(title, f"canon {arguments}"):
            self.stages.call(*shlex.split(arguments))

    @contextmanager
    def _titled(self, title: str, command_line: str) -> Iterator[None]:
        """Print a stage's title and command before the block, and its time after it."""
        print(f"\n== {title}")
        print(f"   {self.prefix}{command_line}\n", flush=True)
        start = time.monotonic()
        yield
        seconds = time.monotonic() - start
        print(f"   took {duration(seconds)}", flush=True)


NEXT = {
    "canon sample {run}": "a prompt of your own",
    "canon try FOLDER": "does Canon help on your own text?",
    "make playground": "which architecture is better at what",
}


def bars(report: Mapping[str, Any]) -> str:
    """Return a line of text for each of ARMS: its score on the board's task as a bar."""
    cells = {cell["arm"]: cell for cell in report["cells"]}
    lines = []
    for arm, label in ARMS.items():
        mean = cells[arm]["mean"]
        low, high = cells[arm]["interval"]
        bar = "#" * round(BAR_WIDTH * mean)
        bar = bar.ljust(BAR_WIDTH)
        interval = f"95 % {low:.2f} to {high:.2f}"
        lines.append(f"   {label:14} {bar} {mean:.2f}  ({interval})")
    return "\n".join(lines)


def threads() -> int:
    """Return the CPU threads of each rank and model; more would wait for each other."""
    return min(MAX_THREADS, threads_per_process(RANKS))


def main(argv: list[str] | None = None) -> None:
    """Run `python -m canon_pretrain.quickstart`, in the repository's folder."""
    with command(interrupted="stopped: `make quickstart` continues"):
        prefix = ""
        if len(visible_gpus()) == 1:  # it cannot hold two ranks: the CPU then does
            os.environ["CUDA_VISIBLE_DEVICES"] = ""
            prefix = "CUDA_VISIBLE_DEVICES= "
        environ = trainer_environment(threads())
        with Stages(None, environ, forks=not visible_gpus()) as stages:
            Quickstart(stages, prefix).all()


if __name__ == "__main__":
    run_process(main)
