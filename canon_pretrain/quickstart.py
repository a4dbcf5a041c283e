"""`make quickstart`: text to shards, a stopped and resumed model, scores, a page; what Canon does.

Each stage prints the command that it stands for, and skips what is finished. On CPUs the commands
are forks of one process that has imported torch (stages.py).
"""

import json
import os
import shlex
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from canon_pretrain.core.cli import available_cores, command, run_process
from canon_pretrain.core.errors import UserError
from canon_pretrain.core.files import read_bytes
from canon_pretrain.core.terminal import duration
from canon_pretrain.playground import (
    Driver,
    plan_board,
    read_board,
    trainer_environment,
    visible_gpus,
)
from canon_pretrain.report.record import read_runs
from canon_pretrain.run.config import read_experiment
from canon_pretrain.run.folder import RunFolder
from canon_pretrain.run.results import VALIDATION
from canon_pretrain.stages import Stages

CONFIG = Path("train_configs/quickstart.toml")
BOARD = Path("train_configs/playground/boards/quickstart.toml")
FOLDER = Path("outputs/quickstart")
RANKS = 2
BUILD = "--tokenizer train:1024 --max-tokens 2000000 --max-document-bytes 16000 --holdout 0.05"
PROMPT = "This module provides"
ARMS = {"nope_canon": "with Canon", "nope": "without Canon"}
BAR_WIDTH = 40


class Quickstart:
    """The stages, of which each does what is left to do."""

    def __init__(self, stages: Stages, num_gpus: int) -> None:
        self.stages, self.num_gpus = stages, num_gpus
        self.run = FOLDER / "run"
        self.steps = read_experiment(CONFIG)["training"]["steps"]

    def all(self) -> None:
        """Run all stages, and print what they show. Raises UserError."""
        data = FOLDER / "data"
        build = ("data", "build", "--source", "stdlib", *BUILD.split(), "--out", data)
        self._stage("1/7 text -> tokenizer -> shards", *build)

        done = RunFolder(self.run).done_file
        stop = ("--run.stop_at", self.steps // 2)
        if not done.exists() and not (self.run / "checkpoint" / f"step-{stop[1]}").exists():
            self._train("2/7 train on two FSDP2 ranks and stop in the middle", *stop)
        if not done.exists():
            self._train("3/7 resume and finish")

        checkpoint = self.run / "checkpoint" / f"step-{self.steps}"
        scores = ("eval", "run", "--checkpoint", checkpoint, "--suite", VALIDATION,
                  "--must_beat", "bigram")  # fmt: skip
        self._stage("4/7 held-out loss beside models that count tokens", *scores)
        print(self._gain_over_bigram())
        self._stage("5/7 a page to look at", "eval", "report", self.run)
        sample = ("--prompt", PROMPT, "--max_tokens", 60, "--seed", 0)
        self._stage("6/7 a sample", "sample", self.run, *sample)

        board = FOLDER / "canon"
        words = ("playground", "run", BOARD, "--out", board)
        self._show("7/7 what Canon layers do: copying, with and without", "canon", *words)
        start = time.monotonic()
        self._train_board(board)
        self.stages.call("playground", "report", BOARD, "--out", board)
        print(bars(json.loads(read_bytes(board / "report.json"))))
        self._took(start)

        print(f"\npages: {self.run}/report/index.html, {board}/report.html\nnext:")
        print("  source .venv/bin/activate")
        for text, about in NEXT.items():
            print(f"  {text.format(run=self.run):37} # {about}")

    def _train(self, title: str, *words: object) -> None:
        launcher = f"torchrun --nproc-per-node {RANKS} -m canon_pretrain.train".split()
        self._show(title, *launcher, "--config", CONFIG, *words)
        start = time.monotonic()
        self.stages.call_ranks(RANKS, "--config", CONFIG, *words)
        self._took(start)

    def _train_board(self, folder: Path) -> None:
        """Train the models of BOARD. Raises UserError, KeyboardInterrupt."""
        sweep, _ = plan_board(read_board(BOARD), folder)
        gpus = visible_gpus() if self.num_gpus else []
        driver = Driver(
            sweep,
            folder,
            min(len(sweep.runs), len(gpus) or available_cores()),
            gpus=gpus,
            threads=threads(),
            server=self.stages.server,
        )
        driver.train()
        if driver.stops:
            raise KeyboardInterrupt
        for name, reason in driver.failures.items():
            raise UserError("quickstart.failed", f"{name} failed: {reason}", run=name)

    def _gain_over_bigram(self) -> str:
        """Return how much the model is better than a bigram of its shards."""
        [run], _ = read_runs([self.run])
        scores = run.evaluations[-1].results.scores
        own, bigram = (scores[task]["bits_per_byte"].value for task in (VALIDATION, "bigram"))
        if own is None or bigram is None:
            return "the held-out loss is not finite"
        better = "better" if own < bigram else "worse"
        return f"{abs(bigram - own):.2f} bits per byte {better} than a bigram model of the text"

    def _stage(self, title: str, *words: object) -> None:
        self._show(title, "canon", *words)
        start = time.monotonic()
        self.stages.call(*words)
        self._took(start)

    def _show(self, title: str, *words: object) -> None:
        print(f"\n== {title}\n   {shlex.join(map(str, words))}\n", flush=True)

    def _took(self, start: float) -> None:
        print(f"   took {duration(time.monotonic() - start)}", flush=True)


NEXT = {
    "canon sample {run}": "a prompt of your own",
    "canon try FOLDER": "does Canon help on your own text?",
    "make playground": "which architecture is better at what",
}


def bars(report: Mapping[str, Any]) -> str:
    """Return a line of text for each of ARMS: its score on the board's task as a bar."""
    cells = {cell["arm"]: cell for cell in report["cells"]}
    lines = []
    for arm, about in ARMS.items():
        cell = cells[arm]
        low, high = cell["interval"]
        bar = "#" * round(BAR_WIDTH * cell["mean"])
        lines.append(
            f"   {about:14} {bar:{BAR_WIDTH}} {cell['mean']:.2f}  (95 % {low:.2f} to {high:.2f})"
        )
    return "\n".join(lines)


def threads() -> int:
    """Return the CPU threads of each rank and model."""
    return max(1, available_cores() // RANKS)


def main(argv: list[str] | None = None) -> None:
    """Run `python -m canon_pretrain.quickstart`, in the repository's folder."""
    with command(interrupted="stopped: `make quickstart` continues"):
        num_gpus = len(visible_gpus())
        if num_gpus < RANKS:  # a single GPU cannot hold two ranks: the CPU then does
            os.environ["CUDA_VISIBLE_DEVICES"] = ""
            num_gpus = 0
        with Stages(None, trainer_environment(threads()), forks=not num_gpus) as stages:
            Quickstart(stages, num_gpus).all()


if __name__ == "__main__":
    run_process(main)
