"""Sample from a checkpoint or an export, or compare two.

    canon sample RUN --prompt "Once upon a time"     a run, step or export
    canon sample RUN                                 a loop, in a terminal
    canon sample RUN < FILE                          the prompt from a pipe
    canon sample --compare RUN OTHER --prompt TEXT   side by side, with losses

On the GPU if there is one. Text goes to stdout, the rest to stderr.
"""

import argparse
import contextlib
import json
import math
import sys
import time
from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich import box
from rich.table import Table
from rich.text import Text

from canon_pretrain.core.cli import number_type, positive, usage_error
from canon_pretrain.core.errors import UserError
from canon_pretrain.core.terminal import Console, is_tty, printable
from canon_pretrain.hf.options import add_loading_options

if TYPE_CHECKING:  # imports torch
    from canon_pretrain.hf.sampling import Answer, Sampler, Segment, Settings

PROGRAM = "canon sample"
TEMPERATURE = 0.8
MAX_TOKENS = 128
STDIN = Path("-")
MAX_PROMPT = 16 << 20  # characters: about 4M tokens, more than any model reads
SHOWN_PROMPT = 300  # characters, the last ones, in a terminal
SHOWN_SEGMENTS = 64  # of a compared prompt, the last ones
COLORS = ((1.0, "green"), (3.0, "default"), (6.0, "yellow"))
"""Upper bounds of a token's nats, and its color; red above."""


def run(arguments: argparse.Namespace) -> None:
    """Load the checkpoints in `arguments` and sample from them, or compare. Raises UserError."""
    # Before torch is imported: these errors come at once.
    _check(arguments)
    prompt = arguments.prompt
    if prompt is None:
        prompt = read_prompt(arguments.file)
    from canon_pretrain.hf.sampling import Sampler, Settings, compare

    paths = arguments.compare or [arguments.checkpoint]
    samplers = [Sampler.load(path, arguments.dtype, arguments.tokenizer) for path in paths]
    sampler = samplers[0]

    # A synthetic task has one right answer: it is sampled greedily, unless an option is set.
    temperature = arguments.temperature
    if temperature is None:
        temperature = TEMPERATURE
        if sampler.has_ids:
            temperature = 0.0
            if arguments.top_k or arguments.top_p < 1:
                raise UserError(
                    "sample.temperature",
                    "a synthetic task is sampled at temperature 0: set --temperature as well",
                )
    settings = Settings(temperature, arguments.top_k, arguments.top_p, arguments.seed)
    if not arguments.json:
        for loaded in samplers:
            _note(describe(loaded, settings))

    text = prompt or ""
    max_tokens = arguments.max_tokens
    if arguments.compare:
        pair = samplers[0], samplers[1]
        answers, parts = compare(pair, text, max_tokens, settings, _note)
        if arguments.json:
            print_compared_records(pair, answers, parts, settings)
        else:
            print_compared(pair, answers, parts)
        return

    # In a terminal, a user types the prompts, if they are texts.
    is_plain = prompt is None and arguments.num is None and not arguments.json
    has_user = is_tty(sys.stdin) and is_tty(sys.stdout)
    if is_plain and not sampler.has_ids and has_user:
        converse(sampler, settings, max_tokens)
        return

    prompt_ids = sampler.encode(text)
    answers = [sampler.answer(prompt_ids, max_tokens) for _ in range(arguments.num or 1)]
    if arguments.json:
        print_records(sampler, answers, settings)
    else:
        Stream(sampler, answers, text, max_tokens).run(settings)


def read_prompt(file: Path | None) -> str | None:
    """Return the text of `file` or of a stdin that is no terminal, less one line end.

    None if there is none: without `file`, an empty stdin is no prompt.
    """
    # One character more than the maximum tells whether there are more.
    try:
        if file is not None and file != STDIN:
            with open(file, encoding="utf-8") as opened:
                text = opened.read(MAX_PROMPT + 1)
        elif sys.stdin is None or (file is None and is_tty(sys.stdin)):
            return None
        else:
            text = sys.stdin.read(MAX_PROMPT + 1)
    except UnicodeDecodeError as error:
        raise UserError(
            "sample.not_utf8",
            f"{file or STDIN} is not UTF-8: {error.reason} at byte {error.start}",
            path=file,
        ) from None

    if len(text) > MAX_PROMPT:  # /dev/zero, for example, has no end
        raise UserError(
            "sample.prompt_too_long",
            f"{file or STDIN} has more than {MAX_PROMPT:,} characters: no model reads so many",
            path=file,
            expected=MAX_PROMPT,
        )

    # An empty FILE is a prompt, the beginning of a text; an empty stdin is not.
    text = text.removesuffix("\n")
    if file is None and not text:
        return None
    return text


def print_records(sampler: "Sampler", answers: Sequence["Answer"], settings: "Settings") -> None:
    """Sample, and print an object per answer once it and those before it are done."""
    prompt_losses = sampler.losses(answers[0].prompt)
    num_printed = 0

    def print_done() -> None:
        nonlocal num_printed
        for answer in answers[num_printed:]:
            if not answer.is_done:
                return
            sample = record(sampler, answer, settings, prompt_losses)
            print(json.dumps(sample | {"sample": num_printed}), flush=True)
            num_printed += 1
            _stop_if_closed()

    sampler.extend(answers, settings, print_done)


def _stop_if_closed() -> None:
    """Exit if nothing reads stdout any more, as after `| head`."""
    raw = getattr(getattr(sys.stdout, "buffer", None), "raw", None)
    if isinstance(getattr(raw, "failure", None), BrokenPipeError):
        raise SystemExit(0)


def record(
    sampler: "Sampler", answer: "Answer", settings: "Settings", prompt_losses: Sequence[float]
) -> dict[str, Any]:
    """Return a sample with its ids and log-probabilities, as --json prints it.

    `prompt_losses`: nats of all tokens of the prompt but the first.
    """
    return {
        "checkpoint": str(sampler.checkpoint),
        "prompt": sampler.decode(answer.prompt),
        "prompt_ids": answer.prompt,
        "prompt_logps": [-nats for nats in prompt_losses],
        "text": answer.text,
        "ids": answer.ids,
        "logps": answer.logps,
        "ended": answer.has_ended,
        **settings._asdict(),
    }


def describe(sampler: "Sampler", settings: "Settings") -> str:
    """Return a line: the model, its device and how tokens are drawn."""
    weight = sampler.model.tok_embeddings.weight
    num_parameters = sum(parameter.numel() for parameter in sampler.model.parameters())
    return (
        f"{sampler.checkpoint}: {num_parameters:,} parameters, "
        f"{str(weight.dtype).removeprefix('torch.')} on {weight.device.type}; "
        f"temperature {settings.temperature:g}, top_k {settings.top_k or 'all'}, "
        f"top_p {settings.top_p:g}, seed {settings.seed}"
    )


def _note(text: str) -> None:
    Console(stderr=True, highlight=False).print(Text(text, style="dim"), soft_wrap=True)


class Stream:
    """Prints answers in order, each as its tokens come; a later one waits for those before it."""

    def __init__(
        self, sampler: "Sampler", answers: Sequence["Answer"], prompt: str, max_tokens: int
    ) -> None:
        self._sampler = sampler
        self._answers = answers
        self._prompt = prompt
        self._max_tokens = max_tokens
        self._index = -1  # of the answer that is being printed
        self._num_shown = 0  # tokens of it

    def run(self, settings: "Settings", first_sample: int = 0) -> None:
        """Sample, print, and say how fast; Ctrl-C ends all answers.

        `first_sample`: number of the first answer, which sets its draws.
        """
        start = time.perf_counter()
        self._begin_next()
        try:
            self._sampler.extend(self._answers, settings, self._show, first_sample)
        finally:
            if not self._answers[-1].is_done:
                print(flush=True)

        # The figures of all answers.
        logps = [logp for answer in self._answers for logp in answer.logps]
        speed = len(logps) / (time.perf_counter() - start)
        loss = ""
        if logps:
            mean_nats = -math.fsum(logps) / len(logps)
            loss = f", {mean_nats:.2f} nats per token"
        ends = self._early_ends()
        _note(f"[{len(logps):,} tokens, {speed:,.0f} tokens/s{loss}{ends}]")

    def _early_ends(self) -> str:
        """Say why answers have fewer than the maximum of tokens; empty if none has."""
        reasons = [""]  # the text follows others after a comma
        num_texts = len(self._answers)
        if num_ended := sum(answer.has_ended for answer in self._answers):
            texts = "the text" if num_texts == 1 else f"{num_ended} of {num_texts}"
            reasons.append(f"{texts} ended")
        if any(len(answer.ids) == answer.limit < self._max_tokens for answer in self._answers):
            max_seq_len = self._sampler.model.args.max_seq_len
            reasons.append(f"the context of {max_seq_len:,} tokens is full")
        return ", ".join(reasons)

    def _begin_next(self) -> None:
        """Print the heading and the prompt of the next answer, if there is one."""
        self._index += 1
        self._num_shown = 0
        if self._index == len(self._answers):
            return
        if len(self._answers) > 1:
            _note(f"-- {self._index + 1} of {len(self._answers)}")

        # A terminal shows the end of the prompt only.
        if not is_tty(sys.stdout):
            sys.stdout.write(printable(self._prompt, "\n\t"))
            return
        cut = "\u2026" if len(self._prompt) > SHOWN_PROMPT else ""
        prompt = Text(cut + self._prompt[-SHOWN_PROMPT:], style="bold")
        Console(highlight=False).print(prompt, end="", soft_wrap=True)

    def _show(self) -> None:
        """Print the new tokens of the current answer; if it is done, go on with the next."""
        while self._index < len(self._answers):
            answer = self._answers[self._index]
            if len(answer.ids) > self._num_shown or answer.is_done:
                self._num_shown = len(answer.ids)
                sys.stdout.write(printable(answer.new_text(), "\n\t"))
            if not answer.is_done:
                break
            print(flush=True)  # before the next one's heading on stderr
            self._begin_next()
        sys.stdout.flush()
        _stop_if_closed()


def converse(sampler: "Sampler", settings: "Settings", max_tokens: int) -> None:
    """Read lines and continue the text so far, until Ctrl-D; Ctrl-C stops an answer."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 (input() then edits lines)

    # An answer takes up to half of the context. The last of its tokens is not read by the model:
    # hence the + 1.
    max_seq_len = sampler.model.args.max_seq_len
    limit = min(max_tokens, max(1, max_seq_len // 2))
    max_prompt = max_seq_len + 1 - limit
    _note(f"The model continues what you type, by at most {limit} tokens; Enter continues again.")
    _note("Ctrl-C stops it, Ctrl-D ends.")

    text = ""
    ids: list[int] = []  # of `text`, as typed and as sampled
    turn = 0
    while True:
        # A prompt that cannot be read or encoded leaves the text as it was.
        try:
            line = input("> ")
            # a text is encoded again where it was typed, or ends within a character
            if line or not text or text.endswith("\ufffd"):
                separator = "\n" if text and line else ""
                longer = text + separator + line
                ids = sampler.encode(longer)
                text = longer
            if len(ids) > max_prompt:
                _note(
                    f"[the text has {len(ids):,} tokens: the model reads the last "
                    f"{max_prompt:,} (max_seq_len {max_seq_len:,} less the answer)]"
                )
            answer = sampler.answer(ids[-max_prompt:], limit)
        except EOFError:
            print()
            return
        except (UserError, UnicodeDecodeError) as error:
            _note(f"[{error}]")
            continue
        except KeyboardInterrupt:
            print()
            continue

        # What was sampled before Ctrl-C is part of the text.
        with contextlib.suppress(KeyboardInterrupt):
            Stream(sampler, [answer], "", limit).run(settings, turn)
        ids = ids + answer.ids
        text += answer.text
        turn += 1
        if answer.has_ended:
            _note("[the text has ended: what you type begins another]")
            text = ""


# -- two models


def print_compared_records(
    pair: tuple["Sampler", "Sampler"],
    answers: Sequence["Answer"],
    parts: Sequence[Sequence["Segment"]],
    settings: "Settings",
) -> None:
    """Print an object per answer; `parts` as of `print_compared`."""
    prompt, *answer_parts = parts
    for sampler, answer, part in zip(pair, answers, answer_parts, strict=True):
        sample = record(sampler, answer, settings, sampler.losses(answer.prompt))
        # each segment: [text, [nats of A, of B]]
        sample["prompt_segments"] = prompt
        sample["segments"] = part
        print(json.dumps(sample))


def print_compared(
    pair: tuple["Sampler", "Sampler"],
    answers: Sequence["Answer"],
    parts: Sequence[Sequence["Segment"]],
) -> None:
    """Print losses of prompt and answers under both models, the answers, and each token's nats.

    `parts`: the segments of the prompt, of A's answer and of B's.
    """
    prompt, *answer_parts = parts
    console = Console(highlight=False)

    # Which model is which, and the loss of each text.
    for label, sampler in zip("AB", pair, strict=True):
        console.print(f"{label}  {sampler.checkpoint}")
    table = _table("loss of", "pieces", "bytes", "A nats", "B nats", "A bits/byte", "B bits/byte")
    for name, part in zip(("the prompt", "A's text", "B's text"), parts, strict=True):
        table.add_row(name, *_loss_cells(part))
    console.print(table)

    # The answers side by side, each in the colors of the model that wrote it.
    table = Table("A", "B", box=box.SIMPLE_HEAD, pad_edge=False, expand=True)
    colored_answers = []
    for k, (answer, part) in enumerate(zip(answers, answer_parts, strict=True)):
        colored_answers.append(_colored(answer.text, part, k))
    table.add_row(*colored_answers)
    console.print(table)

    # Each token of the prompt.
    table = _table("prompt", "A", "B", "B - A")
    if len(prompt) > SHOWN_SEGMENTS:
        table.title = f"the last {SHOWN_SEGMENTS} of {len(prompt):,}"
    for text, (a, b) in prompt[-SHOWN_SEGMENTS:]:
        table.add_row(
            _visible(text),
            _nats(a),
            _nats(b),
            f"{b - a:+.2f}",
        )
    if prompt:
        console.print(table)

    # Each token of the answers, of which one may be longer.
    table = _table("A's text", "A", "B", "B's text", "A", "B")
    columns: list[list[tuple[Text | str, ...]]] = []
    for part in answer_parts:
        column: list[tuple[Text | str, ...]] = []
        for text, (a, b) in part:
            column.append((_visible(text), _nats(a), _nats(b)))
        columns.append(column)
    no_cells: tuple[Text | str, ...] = ("", "", "")
    for left, right in zip_longest(*columns, fillvalue=no_cells):
        table.add_row(*left, *right)
    if table.row_count:
        console.print(table)
    console.print("nats per token; where tokenizers differ, per shortest piece in common")


def _loss_cells(part: Sequence["Segment"]) -> list[str]:
    """Return the number of pieces and bytes of a text, and under both models its nats and bits."""
    num_bytes = sum(len(segment.text.encode()) for segment in part)
    nats_a = math.fsum(segment.nats[0] for segment in part)
    nats_b = math.fsum(segment.nats[1] for segment in part)
    bits_per_byte = ["-", "-"]
    # bytes that are no character are shown as U+FFFD, so their number is not known
    if num_bytes and not any("\ufffd" in segment.text for segment in part):
        bits_per_byte = [
            f"{nats_a / math.log(2) / num_bytes:.3f}",
            f"{nats_b / math.log(2) / num_bytes:.3f}",
        ]
    return [
        f"{len(part):,}",
        f"{num_bytes:,}",
        f"{nats_a:.2f}",
        f"{nats_b:.2f}",
        *bits_per_byte,
    ]


def _table(*columns: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in columns:
        is_text = name in ("loss of", "prompt") or name.endswith("text")
        table.add_column(name, justify="left" if is_text else "right", overflow="fold")
    return table


def _colored(text: str, part: Sequence["Segment"], k: int) -> Text:
    """Return `text`, of which `part` may lack the beginning and the end, by the nats of model k."""
    read_text = "".join(segment.text for segment in part)
    if not read_text:
        return Text(text)
    before, _, after = text.partition(read_text)
    colored = [(segment.text, _color(segment.nats[k])) for segment in part]
    return Text.assemble(before, *colored, after)


def _visible(text: str) -> Text:
    return Text(text.replace(" ", "\u00b7").replace("\n", "\\n").replace("\t", "\\t"))


def _color(nats: float) -> str:
    return next((color for bound, color in COLORS if nats < bound), "red")


def _nats(nats: float) -> Text:
    return Text(f"{nats:.2f}", style=_color(nats))


def _check(arguments: argparse.Namespace) -> None:
    """Raise UserError for options that do not go together."""
    if (arguments.checkpoint is None) == (arguments.compare is None):
        raise usage_error(PROGRAM, "expected a CHECKPOINT, or --compare A B")
    if arguments.compare and arguments.num:
        raise usage_error(PROGRAM, "--compare shows one sample of each: omit --num")
    if arguments.temperature == 0 and (arguments.top_k or arguments.top_p < 1):
        raise usage_error(
            PROGRAM, "--temperature 0 takes the likeliest token: omit --top-k and --top-p"
        )


_count = number_type(int, lambda number: number >= 0, "an integer of at least 0")
_temperature = number_type(float, lambda number: 0 <= number < math.inf, "a number of at least 0")
_probability = number_type(float, lambda number: 0 < number <= 1, "a number above 0, up to 1")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Sample from a checkpoint or an export, or compare two. Without a prompt, in a "
        "terminal, it continues what you type."
    )
    # What is sampled from.
    add = parser.add_argument
    add(
        "checkpoint",
        nargs="?",
        type=Path,
        metavar="CHECKPOINT",
        help="a run (its newest step), RUN/checkpoint/step-N, or an export",
    )
    add(
        "--compare",
        nargs=2,
        type=Path,
        metavar=("A", "B"),
        help="continuations side by side, with the losses of all tokens under both",
    )

    # The prompt.
    prompt = parser.add_mutually_exclusive_group()
    prompt.add_argument("--prompt", metavar="TEXT", help="what to continue (default: a new text)")
    prompt.add_argument(
        "--file", type=Path, help="read the prompt from it (-: stdin), less one line end"
    )

    # How many tokens are drawn, and how.
    add(
        "--max-tokens",
        type=positive,
        default=MAX_TOKENS,
        metavar="N",
        help="of an answer, at most (default: %(default)s)",
    )
    add(
        "--temperature",
        type=_temperature,
        metavar="T",
        help=f"0: the likeliest token (default: {TEMPERATURE}; 0 on a synthetic task)",
    )
    add("--top-k", type=_count, default=0, metavar="K", help="of the K likeliest tokens (0: all)")
    add(
        "--top-p",
        type=_probability,
        default=1.0,
        metavar="P",
        help="of the likeliest with joint probability P (default: 1)",
    )
    add(
        "--seed",
        type=_count,
        default=0,
        metavar="N",
        help="of the draws; sample k is the same for any --num (default: 0)",
    )

    # Samples and output.
    add("--num", type=positive, metavar="N", help="samples of the prompt, in batches")
    add(
        "--json",
        action="store_true",
        help="an object per sample: ids, text, log-probabilities (nats, at temperature 1)",
    )

    add_loading_options(parser)
