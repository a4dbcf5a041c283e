"""Show, score and describe the synthetic tasks."""

import argparse
import json
import sys
import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import TypeAdapter, ValidationError

from canon_pretrain.core.cli import Parser, positive
from canon_pretrain.core.errors import UserError
from canon_pretrain.synthetic.task import ANSWER, Task
from canon_pretrain.synthetic.tasks import TASKS, build_task

WIDTH = 100
WORDS_SHOWN = 40
QUANTILES = {"least": 0.0, "5 %": 0.05, "median": 0.5, "95 %": 0.95, "most": 1.0}


@dataclass
class ScoredLine:
    """A line for `score`: the ids of a prompt and of the answer to its last question."""

    prompt: list[int]
    answer: list[int]


def run_show(arguments: argparse.Namespace) -> None:
    """Print a window: one instance after another, with answers in brackets, or as JSON."""
    task = _task(arguments)
    windows = task.windows(arguments.seed, arguments.index, 1)
    ids, kinds = windows.ids[0].tolist(), windows.kinds[0]
    if arguments.json:
        mask = task.is_counted(kinds).astype(int).tolist()
        print(json.dumps({"ids": ids, "loss_mask": mask}))
        return
    words = [task.word(token) for token in ids]
    edges = np.diff((kinds == ANSWER).astype(int), prepend=0, append=0).tolist()
    is_bos = [word.startswith("<bos>") for word in words]
    starts = [i for i in range(1, len(words)) if is_bos[i] > is_bos[i - 1]]  # padding is no start
    for i, word in enumerate(words):
        words[i] = "[" * (edges[i] > 0) + word + "]" * (edges[i + 1] < 0)
    for start, end in zip([0, *starts], [*starts, len(words)], strict=True):
        line = " ".join(words[start:end])
        print(*textwrap.wrap(line, WIDTH, subsequent_indent="  ", break_on_hyphens=False), sep="\n")


def run_score(arguments: argparse.Namespace) -> None:
    """Print the numbers of right and wrong answers; those of the verdicts go to stderr."""
    verdicts = Counter(_verdicts(_task(arguments), arguments.file))
    right = verdicts.pop("right", 0)
    print(json.dumps({"right": right, "wrong": verdicts.total()}))
    if verdicts:
        text = ", ".join(f"{number:,} {verdict}" for verdict, number in verdicts.most_common())
        print(f"not right: {text}", file=sys.stderr)


def _task(arguments: argparse.Namespace) -> Task:
    return build_task(arguments.task, dict(arguments.set or ()))


def _verdicts(task: Task, path: Path) -> Iterator[str]:
    line = TypeAdapter(ScoredLine)
    with path.open("rb") as file:
        for number, raw in enumerate(file, 1):
            try:
                given = line.validate_json(raw, strict=True)
                yield task.judge(given.prompt, given.answer).verdict
            except ValidationError as error:
                raise UserError(
                    "task.line",
                    f'{path}, line {number}: {error.errors()[0]["msg"]}; expected {{"prompt": '
                    '[id, ...], "answer": [id, ...]}',
                    path=path,
                    line=number,
                ) from None
            except UserError as error:
                raise UserError(
                    "task.prompt", f"{path}, line {number}: {error}", path=path, line=number
                ) from None


def run_stats(arguments: argparse.Namespace) -> None:
    """Print the ids of words, lengths, and shares, over some windows and instances."""
    task, seed, count = _task(arguments), arguments.seed, arguments.windows
    lengths = np.diff(task.instances(seed, 0, 10 * count).ends, prepend=0)
    windows = task.windows(seed, 0, count)
    questions = list(task.questions(seed, 0, count))
    numbers = np.bincount(windows.ids.ravel(), minlength=task.vocab_size)
    frequent = [i for i in np.argsort(-numbers, kind="stable")[:10].tolist() if numbers[i]]
    words = {token: task.word(token) for token in range(1, task.vocab_size)}
    marks = [f"{word} {token}" for token, word in words.items() if not word.isdigit()]
    rows = {
        "settings": " ".join(f"{key}={json.dumps(value)}" for key, value in task.settings.items()),
        "vocab_size": f"{task.vocab_size:,}, of which {np.count_nonzero(numbers):,} ids occur",
        "ids": ", ".join(marks[:WORDS_SHOWN]) + " ..." * (len(marks) > WORDS_SHOWN),
        "tokens per instance": _quantiles(lengths),
        "instances per window": f"mean {task.seq_len / lengths.mean():.1f}",
        "counted labels": f"{task.is_counted(windows.kinds[:, 1:]).mean():.1%}",
        "questions per window": f"mean {len(questions) / count:.1f}",
        "tokens per answer": _quantiles([len(question.answer) for question in questions]),
        "frequent": ", ".join(f"{words[i]} {numbers[i] / numbers.sum():.1%}" for i in frequent),
    }
    print(f"{task.name}: {count:,} windows and {10 * count:,} instances of seed {seed}")
    for name, text in rows.items():
        print(f"  {name:20} {text}")


def _quantiles(lengths: Sequence[int] | np.ndarray) -> str:
    if not len(lengths):
        return "none"
    values = np.quantile(lengths, list(QUANTILES.values()))
    parts = (f"{name} {value:,.0f}" for name, value in zip(QUANTILES, values, strict=True))
    return f"mean {np.mean(lengths):,.1f}; {', '.join(parts)}"


def natural(text: str) -> int:
    """Parse an integer from 0 to 2**48 - 1, for argparse."""
    if not 0 <= (number := int(text)) < 1 << 48:
        raise argparse.ArgumentTypeError(f"{number}, expected 0 to 2**48 - 1")
    return number


def setting(text: str) -> tuple[str, Any]:
    """Parse KEY=VALUE, for argparse; a value that is not JSON is a string."""
    key, is_setting, value = text.partition("=")
    if not is_setting:
        raise argparse.ArgumentTypeError(f"{text!r}, expected KEY=VALUE")
    try:
        return key, json.loads(value)
    except ValueError:
        return key, value


def add_show_arguments(parser: Parser) -> None:
    _add_task(parser)
    parser.add_argument("--seed", type=natural, default=0, help="default 0")
    parser.add_argument("--index", type=natural, default=0, help="of the window; default 0")
    parser.add_argument("--json", action="store_true", help="ids and loss_mask")


def add_score_arguments(parser: Parser) -> None:
    _add_task(parser)
    about = 'lines {"prompt": [id, ...], "answer": [id, ...]}'
    parser.add_argument("file", metavar="FILE.jsonl", type=Path, help=about)


def add_stats_arguments(parser: Parser) -> None:
    _add_task(parser)
    parser.add_argument("--seed", type=natural, default=0, help="default 0")
    parser.add_argument("--windows", type=positive, default=100, help="default 100")


def _add_task(parser: Parser) -> None:
    parser.add_argument("task", metavar="TASK", help=f"one of {', '.join(TASKS)}")
    about = "settings of the task, as n=8 or name_tokens=[1,2]"
    parser.add_argument("--set", metavar="KEY=VALUE", type=setting, action="append", help=about)
    parser.settings = "--set"
