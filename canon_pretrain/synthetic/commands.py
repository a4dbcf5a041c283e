"""Show, score and describe the synthetic tasks."""

import argparse
import json
import sys
import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import TypeAdapter, ValidationError

from canon_pretrain.core.cli import Parser, number_type, positive
from canon_pretrain.core.errors import UserError
from canon_pretrain.synthetic.task import ANSWER, Task
from canon_pretrain.synthetic.tasks import TASKS, build_task

WIDTH = 100
"""Columns of printed instances."""
WORDS_SHOWN = 40
FREQUENT_WORDS = 10
INSTANCES_PER_WINDOW = 10
"""How many instances `stats` takes for each window."""
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
    ids = windows.ids[0].tolist()
    kinds = windows.kinds[0]
    if arguments.json:
        mask = task.is_counted(kinds).astype(int).tolist()
        print(json.dumps({"ids": ids, "loss_mask": mask}))
        return

    # An instance starts at <bos>, unless that is the padding behind another <bos>.
    texts = [task.word(token) for token in ids]
    is_bos = np.array([text.startswith("<bos>") for text in texts])
    starts = np.flatnonzero(is_bos[1:] & ~is_bos[:-1]) + 1

    # +1 where an answer begins, -1 behind its end
    is_answer = (kinds == ANSWER).astype(int)
    edges = np.diff(is_answer, prepend=0, append=0)
    for begin in np.flatnonzero(edges > 0):
        texts[begin] = f"[{texts[begin]}"
    for end in np.flatnonzero(edges < 0):
        texts[end - 1] = f"{texts[end - 1]}]"

    for start, end in pairwise([0, *starts, len(texts)]):
        instance = " ".join(texts[start:end])
        lines = textwrap.wrap(instance, WIDTH, subsequent_indent="  ", break_on_hyphens=False)
        print(*lines, sep="\n")


def run_score(arguments: argparse.Namespace) -> None:
    """Print the numbers of right and wrong answers; those of the verdicts go to stderr."""
    verdicts = Counter(_verdicts(_task(arguments), arguments.file))
    right = verdicts.pop("right", 0)
    print(json.dumps({"right": right, "wrong": verdicts.total()}))
    if verdicts:
        counts = [f"{number:,} {verdict}" for verdict, number in verdicts.most_common()]
        print(f"not right: {', '.join(counts)}", file=sys.stderr)


def _task(arguments: argparse.Namespace) -> Task:
    return build_task(arguments.task, dict(arguments.set or ()))


def _verdicts(task: Task, path: Path) -> Iterator[str]:
    """Yield the verdict on each line of a file. Raises UserError with the number of a bad line."""
    adapter = TypeAdapter(ScoredLine)
    with path.open("rb") as file:
        for number, raw in enumerate(file, 1):
            try:
                line = adapter.validate_json(raw, strict=True)
                yield task.judge(line.prompt, line.answer).verdict
            except ValidationError as error:
                problem = error.errors()[0]["msg"]
                raise UserError(
                    "task.line",
                    f'{path}, line {number}: {problem}; expected {{"prompt": [id, ...], '
                    '"answer": [id, ...]}',
                    path=path,
                    line=number,
                ) from None
            except UserError as error:
                raise UserError(
                    "task.prompt", f"{path}, line {number}: {error}", path=path, line=number
                ) from None


def run_stats(arguments: argparse.Namespace) -> None:
    """Print the ids of words, lengths, and shares, over some windows and instances."""
    task = _task(arguments)
    seed = arguments.seed
    count = arguments.windows
    num_instances = INSTANCES_PER_WINDOW * count
    instances = task.instances(seed, 0, num_instances)
    lengths = np.diff(instances.ends, prepend=0)
    windows = task.windows(seed, 0, count)
    is_counted = task.is_counted(windows.kinds[:, 1:])
    answers = [question.answer for question in task.questions(seed, 0, count)]

    # How often each id occurs, and the ids of words that are no plain numbers
    frequencies = Counter(windows.ids.ravel().tolist())
    by_frequency = sorted(frequencies, key=lambda token: (-frequencies[token], token))
    shares = [
        f"{task.word(token)} {frequencies[token] / windows.ids.size:.1%}"
        for token in by_frequency[:FREQUENT_WORDS]
    ]
    marks = []
    for token in range(1, task.vocab_size):
        text = task.word(token)
        if not text.isdigit():
            marks.append(f"{text} {token}")
    ellipsis = " ..." if len(marks) > WORDS_SHOWN else ""

    settings = [f"{key}={json.dumps(value)}" for key, value in task.settings.items()]
    rows = {
        "settings": " ".join(settings),
        "vocab_size": f"{task.vocab_size:,}, of which {len(frequencies):,} ids occur",
        "ids": f"{', '.join(marks[:WORDS_SHOWN])}{ellipsis}",
        "tokens per instance": _quantiles(lengths),
        "instances per window": f"mean {task.seq_len / lengths.mean():.1f}",
        "counted labels": f"{is_counted.mean():.1%}",
        "questions per window": f"mean {len(answers) / count:.1f}",
        "tokens per answer": _quantiles(list(map(len, answers))),
        "frequent": ", ".join(shares),
    }
    print(f"{task.name}: {count:,} windows and {num_instances:,} instances of seed {seed}")
    for name, text in rows.items():
        print(f"  {name:20} {text}")


def _quantiles(lengths: Sequence[int] | np.ndarray) -> str:
    if not len(lengths):
        return "none"
    parts = []
    for name, share in QUANTILES.items():
        quantile = np.quantile(lengths, share)
        parts.append(f"{name} {quantile:,.0f}")
    return f"mean {np.mean(lengths):,.1f}; {', '.join(parts)}"


natural = number_type(int, lambda number: 0 <= number < 1 << 48, "0 to 2**48 - 1")


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
    help_text = 'lines {"prompt": [id, ...], "answer": [id, ...]}'
    parser.add_argument("file", metavar="FILE.jsonl", type=Path, help=help_text)


def add_stats_arguments(parser: Parser) -> None:
    _add_task(parser)
    parser.add_argument("--seed", type=natural, default=0, help="default 0")
    parser.add_argument("--windows", type=positive, default=100, help="default 100")


def _add_task(parser: Parser) -> None:
    parser.add_argument("task", metavar="TASK", help=f"one of {', '.join(TASKS)}")
    parser.add_argument(
        "--set",
        metavar="KEY=VALUE",
        type=setting,
        action="append",
        help="settings of the task, as n=8 or name_tokens=[1,2]",
    )
    parser.settings = "--set"
