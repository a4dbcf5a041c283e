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
from collections.abc import Callable, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich import box
from rich.table import Table
from rich.text import Text

from canon_pretrain.core.cli import positive, usage_error
from canon_pretrain.core.errors import UserError
from canon_pretrain.core.terminal import Console, printable

if TYPE_CHECKING:  # imports torch
    from canon_pretrain.hf.sampling import Answer, Sampler, Segment, Settings

PROGRAM = "canon sample"
TEMPERATURE = 0.8
MAX_TOKENS = 128
STDIN = Path("-")
MAX_PROMPT = 16 << 20  # characters: about 4M tokens, more than any model reads
SHOWN_PROMPT = 300  # characters, the last ones, in a terminal
SHOWN_SEGMENTS = 64  # of a compared prompt, the last ones
COLORS = ((1.0, "green"), (3.0, "default"), (6.0, "yellow"), (math.inf, "red"))
"""Upper bounds of a token's nats, and its color."""


def run(arguments: argparse.Namespace) -> None:
    """Load the models that `arguments` name, and print what they ask for. Raises UserError."""
    _check(arguments)
    prompt = read_prompt(arguments.file) if arguments.prompt is None else arguments.prompt
    from canon_pretrain.hf.sampling import Sampler, Settings, compare  # imports torch

    given = arguments.compare or [arguments.checkpoint]
    samplers = [Sampler.load(path, arguments.dtype, arguments.tokenizer) for path in given]
    first, temperature = samplers[0], arguments.temperature
    if temperature is None:
        temperature = 0.0 if first.has_ids else TEMPERATURE
        if first.has_ids and (arguments.top_k or arguments.top_p < 1):
            raise UserError(
                "sample.temperature",
                "a synthetic task is sampled at temperature 0: give --temperature as well",
            )
    settings = Settings(temperature, arguments.top_k, arguments.top_p, arguments.seed)
    limit, num = arguments.max_tokens, arguments.num or 1
    is_plain = prompt is None and arguments.num is None and not arguments.json
    for sampler in samplers if not arguments.json else ():
        _note(describe(sampler, settings))
    if arguments.compare:
        pair = samplers[0], samplers[1]
        answers, parts = compare(pair, prompt or "", limit, settings, _note)
        print_compared(pair, answers, parts, settings, as_json=arguments.json)
    elif is_plain and not first.has_ids and sys.stdin.isatty() and sys.stdout.isatty():
        converse(first, settings, limit)
    else:
        ids = first.encode(prompt or "")
        answers = [first.answer(ids, limit) for _ in range(num)]
        if arguments.json:
            print_records(first, answers, settings)
        else:
            Stream(first, answers, prompt or "", limit).run(settings)


def read_prompt(file: Path | None) -> str | None:
    """Return the text of `file` or of a stdin that is no terminal, less one line end, as $(<FILE).

    None if there is none: without `file`, an empty stdin is no prompt.
    """
    try:
        if file is not None and file != STDIN:
            with open(file, encoding="utf-8") as opened:
                text = opened.read(MAX_PROMPT + 1)
        elif sys.stdin is None or (file is None and sys.stdin.isatty()):
            return None
        else:
            text = sys.stdin.read(MAX_PROMPT + 1)
    except UnicodeDecodeError as error:
        raise UserError(
            "sample.not_utf8",
            f"{file or STDIN} is not UTF-8: {error.reason} at byte {error.start}",
            path=file,
        ) from None
    if len(text) > MAX_PROMPT:
        raise UserError(
            "sample.prompt_too_long",
            f"{file or STDIN} has more than {MAX_PROMPT:,} characters: no model reads so many",
            path=file,
            expected=MAX_PROMPT,
        )
    text = text.removesuffix("\n")
    return text if file else text or None


def print_records(sampler: "Sampler", answers: Sequence["Answer"], settings: "Settings") -> None:
    """Sample, and print an object per answer once it and those before it are done."""
    losses, waiting = sampler.losses(answers[0].prompt), list(enumerate(answers))

    def print_done() -> None:
        while waiting and waiting[0][1].is_done:
            number, answer = waiting.pop(0)
            one = record(sampler, answer, settings, losses) | {"sample": number}
            print(json.dumps(one), flush=True)
            _stop_if_closed()

    sampler.extend(answers, settings, print_done)


def _stop_if_closed() -> None:
    """Exit if nothing reads stdout any more, as after `| head`."""
    raw = getattr(getattr(sys.stdout, "buffer", None), "raw", None)
    if isinstance(getattr(raw, "failure", None), BrokenPipeError):
        raise SystemExit(0)


def record(
    sampler: "Sampler", answer: "Answer", settings: "Settings", losses: Sequence[float]
) -> dict[str, Any]:
    """Return a sample with its ids and log-probabilities, as --json prints it.

    `losses`: those of the prompt, of all tokens but the first.
    """
    return {
        "checkpoint": str(sampler.checkpoint),
        "prompt": sampler.decode(answer.prompt),
        "prompt_ids": answer.prompt,
        "prompt_logps": [-nats for nats in losses],
        "text": answer.text,
        "ids": answer.ids,
        "logps": answer.logps,
        "ended": answer.has_ended,
        **settings._asdict(),
    }


def describe(sampler: "Sampler", drawn: "Settings") -> str:
    """Return a line: the model, its device and how tokens are drawn."""
    weight, count = sampler.model.tok_embeddings.weight, sum(map(_size, sampler.model.parameters()))
    how = f"temperature {drawn.temperature:g}, top_k {drawn.top_k or 'all'}, top_p {drawn.top_p:g}"
    kind = f"{str(weight.dtype).removeprefix('torch.')} on {weight.device.type}"
    return f"{sampler.checkpoint}: {count:,} parameters, {kind}; {how}, seed {drawn.seed}"


def _size(parameter: Any) -> int:
    return int(parameter.numel())


def _note(text: str) -> None:
    Console(stderr=True, highlight=False).print(Text(text, style="dim"), soft_wrap=True)


class Stream:
    """Prints answers in order, each as its tokens come; a later one waits for those before it."""

    def __init__(
        self, sampler: "Sampler", answers: Sequence["Answer"], prompt: str, max_tokens: int
    ) -> None:
        self._sampler, self._answers, self._prompt = sampler, answers, prompt
        self._max_tokens, self._number, self._shown = max_tokens, -1, (0, False)

    def run(self, settings: "Settings", first: int = 0) -> None:
        """Sample, print, and say how fast; Ctrl-C ends all answers."""
        start = time.perf_counter()
        self._begin_next()
        try:
            self._sampler.extend(self._answers, settings, self._show, first)
        finally:
            if not self._answers[-1].is_done:
                print(flush=True)
        logps = [logp for answer in self._answers for logp in answer.logps]
        speed = len(logps) / (time.perf_counter() - start)
        loss = f", {-math.fsum(logps) / len(logps):.2f} nats per token" if logps else ""
        _note(f"[{len(logps):,} tokens, {speed:,.0f} tokens/s{loss}{self._reason()}]")

    def _reason(self) -> str:
        """Return why there are fewer tokens than asked for."""
        reasons = [""]
        num_texts = len(self._answers)
        if num_ended := sum(answer.has_ended for answer in self._answers):
            texts = "the text" if num_texts == 1 else f"{num_ended} of {num_texts}"
            reasons.append(f"{texts} ended")
        if any(len(answer.ids) == answer.limit < self._max_tokens for answer in self._answers):
            max_seq_len = self._sampler.model.args.max_seq_len
            reasons.append(f"the context of {max_seq_len:,} tokens is full")
        return ", ".join(reasons)

    def _begin_next(self) -> None:
        self._number += 1
        if self._number < len(self._answers):
            if len(self._answers) > 1:
                _note(f"-- {self._number + 1} of {len(self._answers)}")
            if not sys.stdout.isatty():
                sys.stdout.write(printable(self._prompt, "\n\t"))
                return
            cut = "\u2026" if len(self._prompt) > SHOWN_PROMPT else ""
            prompt = Text(cut + self._prompt[-SHOWN_PROMPT:], style="bold")
            Console(highlight=False).print(prompt, end="", soft_wrap=True)

    def _show(self) -> None:
        while self._number < len(self._answers):
            answer = self._answers[self._number]
            state = len(answer.ids), answer.is_done
            if state == self._shown:
                break
            self._shown = state
            sys.stdout.write(printable(answer.new_text(), "\n\t"))
            if not answer.is_done:
                break
            print(flush=True)  # before the next one's heading on stderr
            self._begin_next()
            self._shown = 0, False
        sys.stdout.flush()
        _stop_if_closed()


def converse(sampler: "Sampler", settings: "Settings", max_tokens: int) -> None:
    """Read lines and continue the text so far, until Ctrl-D; Ctrl-C stops an answer."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 (input() then edits lines)
    longest = sampler.model.args.max_seq_len
    limit = min(max_tokens, max(1, longest // 2))
    room, text, turn = longest + 1 - limit, "", 0
    ids: list[int] = []
    _note(f"The model continues what you type, by at most {limit} tokens; Enter continues again.")
    _note("Ctrl-C stops it, Ctrl-D ends.")
    while True:
        try:
            line = input("> ")
            # a text is encoded again where it was typed, or ends within a character
            if line or not text or text.endswith("\ufffd"):
                longer = text + ("\n" if text and line else "") + line
                ids = sampler.encode(longer)
                text = longer
            if len(ids) > room:
                kept = f"reads the last {room:,} (max_seq_len {longest:,} less the answer)"
                _note(f"[the text has {len(ids):,} tokens: the model {kept}]")
            answer = sampler.answer(ids[-room:], limit)
        except EOFError:
            print()
            return
        except (UserError, UnicodeDecodeError) as error:
            _note(f"[{error}]")
            continue
        except KeyboardInterrupt:
            print()
            continue
        with contextlib.suppress(KeyboardInterrupt):
            Stream(sampler, [answer], "", limit).run(settings, turn)
        ids, text, turn = [*ids, *answer.ids], text + answer.text, turn + 1
        if answer.has_ended:
            _note("[the text has ended: what you type begins another]")
            text = ""


# -- two models


def print_compared(
    pair: tuple["Sampler", "Sampler"],
    answers: Sequence["Answer"],
    parts: Sequence[Sequence["Segment"]],
    settings: "Settings",
    *,
    as_json: bool,
) -> None:
    """Print losses of prompt and answers under both models, the answers, and each token's nats."""
    if as_json:
        for sampler, answer, part in zip(pair, answers, parts[1:], strict=True):
            both = {"prompt_segments": parts[0], "segments": part}  # [text, [nats of A, of B]]
            losses = sampler.losses(answer.prompt)
            print(json.dumps(record(sampler, answer, settings, losses) | both))
        return
    console = Console(highlight=False)
    console.print("\n".join(f"{k}  {one.checkpoint}" for k, one in zip("AB", pair, strict=True)))
    table = _table("loss of", "pieces", "bytes", "A nats", "B nats", "A bits/byte", "B bits/byte")
    for name, part in zip(("the prompt", "A's text", "B's text"), parts, strict=True):
        size = sum(len(segment.text.encode()) for segment in part)
        nats = [math.fsum(segment.nats[k] for segment in part) for k in (0, 1)]
        # bytes that are no character are shown as U+FFFD
        is_known = size and not any("\ufffd" in segment.text for segment in part)
        bits = [f"{n / math.log(2) / size:.3f}" if is_known else "-" for n in nats]
        table.add_row(name, f"{len(part):,}", f"{size:,}", *(f"{n:.2f}" for n in nats), *bits)
    console.print(table)
    table = Table("A", "B", box=box.SIMPLE_HEAD, pad_edge=False, expand=True)
    table.add_row(*(_colored(answers[k].text, parts[1 + k], k) for k in (0, 1)))
    console.print(table)
    table = _table("prompt", "A", "B", "B - A")
    if len(parts[0]) > SHOWN_SEGMENTS:
        table.title = f"the last {SHOWN_SEGMENTS} of {len(parts[0]):,}"
    for text, (a, b) in parts[0][-SHOWN_SEGMENTS:]:
        table.add_row(_visible(text), _nats(a), _nats(b), f"{b - a:+.2f}")
    if parts[0]:
        console.print(table)
    table = _table("A's text", "A", "B", "B's text", "A", "B")
    for row in zip_longest(*parts[1:]):
        cells = [(_visible(s.text), *map(_nats, s.nats)) if s else ("", "", "") for s in row]
        table.add_row(*cells[0], *cells[1])
    if table.row_count:
        console.print(table)
    console.print("nats per token; where tokenizers differ, per shortest piece in common")


def _table(*columns: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in columns:
        is_text = name in ("loss of", "prompt") or name.endswith("text")
        table.add_column(name, justify="left" if is_text else "right", overflow="fold")
    return table


def _colored(text: str, part: Sequence["Segment"], k: int) -> Text:
    """Return `text`, of which `part` may lack the beginning and the end, by the nats of model k."""
    read = "".join(segment.text for segment in part)
    before, _, after = text.partition(read) if read else ("", "", text)
    return Text.assemble(before, *((s.text, _color(s.nats[k])) for s in part), after)


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
        raise usage_error(PROGRAM, "--compare shows one sample of each: leave out --num")
    if arguments.temperature == 0 and (arguments.top_k or arguments.top_p < 1):
        raise usage_error(
            PROGRAM, "--temperature 0 takes the likeliest token: leave out --top-k and --top-p"
        )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Sample from a checkpoint or an export, or compare two. Without a prompt, in a "
        "terminal, it continues what you type."
    )
    add = parser.add_argument
    about = "a run (its newest step), RUN/checkpoint/step-N, or an export"
    add("checkpoint", nargs="?", type=Path, metavar="CHECKPOINT", help=about)
    about = "continuations side by side, with the losses of all tokens under both"
    add("--compare", nargs=2, type=Path, metavar=("A", "B"), help=about)
    given = parser.add_mutually_exclusive_group()
    given.add_argument("--prompt", metavar="TEXT", help="what to continue (default: a new text)")
    given.add_argument(
        "--file", type=Path, help="read the prompt from it (-: stdin), less one line end"
    )
    about = "of an answer, at most (default: %(default)s)"
    add("--max-tokens", type=positive, default=MAX_TOKENS, metavar="N", help=about)
    about = f"0: the likeliest token (default: {TEMPERATURE}; 0 on a synthetic task)"
    add("--temperature", type=_temperature, metavar="T", help=about)
    add("--top-k", type=_count, default=0, metavar="K", help="of the K likeliest tokens (0: all)")
    about = "of the likeliest with joint probability P (default: 1)"
    add("--top-p", type=_probability, default=1.0, metavar="P", help=about)
    about = "of the draws; sample k is the same for any --num (default: 0)"
    add("--seed", type=_count, default=0, metavar="N", help=about)
    add("--num", type=positive, metavar="N", help="samples of the prompt, in batches")
    about = "an object per sample: ids, text, log-probabilities (nats, at temperature 1)"
    add("--json", action="store_true", help=about)
    add("--tokenizer", type=Path, metavar="PATH", help="the tokenizer, if the data were moved")
    about = "(default: bfloat16 on a GPU, else float32)"
    add("--dtype", default="auto", choices=("auto", "float32", "bfloat16"), help=about)


def _count(text: str) -> int:
    return int(_checked(text, int, lambda number: number >= 0, "an integer of at least 0"))


def _temperature(text: str) -> float:
    return _checked(text, float, lambda number: 0 <= number < math.inf, "a number of at least 0")


def _probability(text: str) -> float:
    return _checked(text, float, lambda number: 0 < number <= 1, "a number above 0, up to 1")


def _checked(
    text: str, kind: Callable[[str], float], fits: Callable[[float], bool], expected: str
) -> float:
    with contextlib.suppress(ValueError):
        if fits(number := kind(text)):
            return number
    raise argparse.ArgumentTypeError(f"{text}, expected {expected}")
