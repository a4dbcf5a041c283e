"""Tokens per second of CPU time of each synthetic task, in windows as the trainer reads them."""

import argparse
import time

from canon_pretrain.synthetic.tasks import TASKS, build_task

WINDOWS = 64
SECONDS = 1.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the tasks to time."""
    parser.add_argument("tasks", metavar="TASK", nargs="*", help="default: all")


def run(arguments: argparse.Namespace) -> None:
    """Print a rate per task."""
    for task in [build_task(name, {}) for name in arguments.tasks or TASKS]:
        task.windows(0, 0, WINDOWS)  # warm up

        rounds = 0
        start = time.process_time()
        while time.process_time() - start < SECONDS:
            rounds += 1
            task.windows(0, rounds * WINDOWS, WINDOWS)
        seconds = time.process_time() - start

        rate = rounds * WINDOWS * task.seq_len / seconds
        print(f"{task.name:8} {rate / 1e6:5.1f}M tokens/s per core", flush=True)
