"""Console output of a launch: a live view on a terminal, plain lines elsewhere."""

import atexit
import contextlib
import logging
import math
import os
import sys
import time
import warnings
from collections import deque
from collections.abc import Collection, Iterator, Mapping
from datetime import datetime
from typing import Any

import rich.console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.segment import Segment
from rich.table import Column, Table
from rich.text import Text

from canon_pretrain.core import terminal
from canon_pretrain.core.terminal import duration, is_tty, printable, size
from canon_pretrain.run.background import Background

logger = logging.getLogger()
"""The root logger, as torchtitan's; not imported from there, since this file needs no torch."""

HISTORY = 512
"""Losses kept for the sparkline, which shows as many as fit."""
SHOWN_EVENTS = 4
SHOWN_SCORES = 4
LINE_INTERVAL_S = 2.0
"""The least time between plain lines of steps; log.jsonl has all of them."""
REDRAWS_PER_SECOND = 1.0
PRINT_TIMEOUT_S = 0.2
# Formats of fields, separated by "|": those whose fields are missing are left out.
FIGURES = "grad_norm {grad_norm:.3f}|lr {lr:.2e}|{tokens_per_second:,.0f} tok/s|MFU {mfu:.1%}"
MORE = (
    "|{seconds_per_step:.3g} s/step|data wait {data_wait:.1%}|memory {memory_gib:.1f} GiB"
    "|{tokens:,} tokens|skipped steps {skipped_steps}|restarts {restarts}"
)
LINES = {
    "validation": "validation at step {step}: {}, {tokens_scored:,} tokens, {seconds:.1f} s",
    "count_models": (
        "models that count the training tokens have {unigram:.2f} (unigram) "
        "and {bigram:.2f} (bigram) nats per token of held-out text"
    ),
}
"""Lines of events without a place in the view's list of events."""


class Console:
    """Show a launch that ends at `last_step` of `total_steps`; for global rank 0."""

    def __init__(self, total_steps: int, last_step: int, *, color: bool = True) -> None:
        self.total_steps = total_steps
        self.last_step = last_step
        self._color = color
        self._live: Live | None = None

        # What the view shows.
        self._step = 0
        self._losses: deque[float] = deque(maxlen=HISTORY)
        self._latest: dict[str, Mapping[str, Any]] = {}
        """Fields of the newest event of each name."""
        self._checkpoint_at = 0.0
        self._events: deque[str] = deque(maxlen=SHOWN_EVENTS)

        # Without a view, at most a line of a step per LINE_INTERVAL_S.
        self._next_line_at = -math.inf
        self._held_back: Mapping[str, Any] | None = None
        """Fields of the newest step, until its line is printed."""

    def begin(self, step: int) -> None:
        """Start the view if stdout is a terminal; else steps are printed as lines."""
        self.set_step(step)
        if not is_terminal():
            return

        # ask the terminal for its size: the variables do not follow a change
        environ = dict(os.environ)
        environ.pop("COLUMNS", None)
        environ.pop("LINES", None)
        console = terminal.Console(
            highlight=False,
            no_color=None if self._color else True,  # None: as NO_COLOR says
            _environ=environ,
        )
        # a cursor that is hidden would stay so after kill -9
        console.show_cursor = lambda show=True: False  # type: ignore[method-assign]
        live = Live(
            self,
            console=console,
            vertical_overflow="crop",
            refresh_per_second=REDRAWS_PER_SECOND,
        )

        try:
            live.start()
        except Exception as error:  # a terminal's fault must not end the run
            logger.warning(f"no live view ({type(error).__name__}: {error}): using plain lines")
            return
        self._live = live
        atexit.register(self.end)

    def set_step(self, step: int) -> None:
        self._step = step

    def event(self, name: str, fields: Mapping[str, Any]) -> None:
        """Show a log event in the view; losses and samples as lines if there is no room or view."""
        self._latest[name] = fields
        if name == "checkpoint":
            self._checkpoint_at = time.monotonic()

        # Where it is shown: in the curve, in a separate line, or in the list of events.
        if name == "step":
            self._step = fields["step"]
            self._losses.append(fields["loss"])
            self._print_step_if_due(fields)
        elif name in LINES:
            self._print(LINES[name].format(_format_validation(fields), **fields))
        elif name == "samples":
            logger.info(_format_samples(fields))  # which a view has no room for
        else:
            text = printable(_format_event(name, fields))
            self._events.append(f"{datetime.now():%H:%M:%S}  {text}")
            if name in ("stop", "halt"):  # no later step will print it
                self._print_held_back()

    def _print(self, text: str) -> None:
        if self._live is None:
            logger.info(text)

    def _print_step_if_due(self, fields: Mapping[str, Any]) -> None:
        """Print a step's line, or hold it back if the last one is recent."""
        if self._live is not None:
            return
        self._held_back = fields
        if time.monotonic() >= self._next_line_at or self._step == self.last_step:
            self._print_held_back()

    def _print_held_back(self) -> None:
        """Print the newest step's line, unless it has been."""
        fields = self._held_back
        if fields is None:
            return
        self._held_back = None

        step = fields["step"]
        texts = [
            f"step {step}/{self.total_steps}",
            f"{100 * step / self.total_steps:.1f} %",
            self._format_loss(fields["loss"]),
            _format_fields(fields, FIGURES),
            f"ETA {self._eta(fields)}",
        ]
        logger.info("  ".join(texts))
        self._next_line_at = time.monotonic() + LINE_INTERVAL_S

    def _format_loss(self, loss: float) -> str:
        """Return the loss, and next to it the bigram's once that is known."""
        if "count_models" not in self._latest:
            return f"loss {loss:.4f}"
        bigram_loss = self._latest["count_models"]["bigram"]
        return f"loss {loss:.4f} (held-out bigram {bigram_loss:.2f})"

    def _eta(self, fields: Mapping[str, Any]) -> str:
        return duration((self.last_step - self._step) * fields["seconds_per_step"])

    def end(self) -> None:
        """Print what was held back; stop the view, leave it above the cursor. Idempotent."""
        self._print_held_back()
        live = self._live
        if live is None:
            return
        self._live = None
        atexit.unregister(self.end)
        with contextlib.suppress(OSError, ValueError):  # the terminal has gone
            live.stop()

    def __rich_console__(
        self, console: rich.console.Console, options: rich.console.ConsoleOptions
    ) -> rich.console.RenderResult:
        # leave the last column free, where some terminals wrap
        options = options.update_width(max(1, options.max_width - 1))
        try:
            lines = list(self._lines(options.max_width))
        except Exception as error:  # else it would be raised by any print
            lines = [Text(f"cannot draw the view: {type(error).__name__}: {error}")]
        # leave the cursor on an empty line, in case the process is killed
        lines.append("")
        for line in console.render_lines(rich.console.Group(*lines), options, pad=False):
            yield from (*line, Segment.line())

    def _lines(self, width: int) -> Iterator[rich.console.RenderableType]:
        # Progress
        step = self._latest.get("step", {})
        progress = f"{self._step / self.total_steps:.1%}"
        if step:
            progress = f"{progress}  ETA {self._eta(step)}"
        bar = Table.grid("", Column(ratio=1), "", padding=(0, 1), expand=True)
        bar.add_row(
            f"step {self._step}/{self.total_steps}",
            ProgressBar(self.total_steps, self._step),
            progress,
        )
        yield bar

        # Loss and other figures of the last step
        if self._losses:
            loss = f"{self._format_loss(self._losses[-1])} "
            num_values = max(1, width - len(loss))
            shown_losses = list(self._losses)[-num_values:]
            yield Text.assemble(
                (loss, "bold"),
                (sparkline(shown_losses), "cyan"),
                no_wrap=True,
                overflow="crop",
            )
        if step:
            yield Text(_format_fields(step, FIGURES + MORE))

        # Last checkpoint, validation and events
        text = "no checkpoint in this launch yet"
        if "checkpoint" in self._latest:
            age = duration(time.monotonic() - self._checkpoint_at)
            saved_step = self._latest["checkpoint"]["step"]
            text = f"checkpoint of step {saved_step}, {age} ago"
        if "validation" in self._latest:
            fields = self._latest["validation"]
            losses = _format_validation(fields)
            text = f"{text}  validation {losses} at step {fields['step']}"
        yield Text(text)
        for event in list(self._events):
            yield Text(event, "dim", no_wrap=True, overflow="crop")


def is_terminal() -> bool:
    """Return whether stdout is a terminal that can redraw lines."""
    terminal_type = os.environ.get("TERM", "")
    return is_tty(sys.stdout) and terminal_type not in ("dumb", "unknown", "")


def sparkline(values: Collection[float]) -> str:
    """Return a character per value, low to high; x for a value that is not finite."""
    levels = "▁▂▃▄▅▆▇█"
    finite = [value for value in values if math.isfinite(value)]
    low = min(finite, default=0.0)
    high = max(finite, default=0.0)
    step = (high - low) / (len(levels) - 1) or 1.0
    characters = []
    for value in values:
        if math.isfinite(value):
            characters.append(levels[round((value - low) / step)])
        else:
            characters.append("x")
    return "".join(characters)


def _format_fields(fields: Mapping[str, Any], formats: str, separator: str = "  ") -> str:
    """Return the texts of `formats`, such as FIGURES, that have all their fields."""
    texts = []
    for template in formats.split("|"):
        with contextlib.suppress(KeyError):
            texts.append(template.format_map(fields))
    return separator.join(texts)


def _format_samples(fields: Mapping[str, Any]) -> str:
    """Return the texts, indented, or the reason why there are none."""
    texts = "".join(map("\n{prompt}|{text}".format_map, fields["samples"]))
    indented = printable(texts, "\n").replace("\n", "\n    ")
    content = fields.get("reason") or indented
    return "samples at step {step}, {seconds:.1f} s: {}".format(content, **fields)


def _format_event(name: str, fields: Mapping[str, Any]) -> str:
    """Return the name and fields of an event without a format in LINES."""
    if name == "checkpoint":
        num_bytes = size(fields["bytes"])
        return "checkpoint  of step {step}: {} in {seconds:.1f} s".format(num_bytes, **fields)
    texts = []
    for key, value in fields.items():
        if key == "tokens":
            continue
        if isinstance(value, float):
            value = f"{value:.6g}"
        texts.append(f"{key} {value}")
    return f"{name.replace('_', ' ')}  {'  '.join(texts)}"


def _format_validation(fields: Mapping[str, Any]) -> str:
    text = _format_fields(fields, "loss {loss:.4f}|({bits_per_byte:.4f} bits/byte)", separator=" ")
    scores = fields.get("scores", {})
    texts = [f"{name} {score:.4g}" for name, score in scores.items()]
    return ", ".join([text, *texts[:SHOWN_SCORES]])


# torchtitan's lines that are not useful, wrong here (a CPU's peak FLOP/s, autocast), or redundant
_FILTERED = (
    "[GC]",
    "ENV[TORCH_",
    "Building canon",
    "Building device mesh",
    "Successfully created meshes",
    "Mixed precision training is handled by",
    "Error running lspci",
    "Peak flops undefined",
    "Peak FLOPS used",
    "Training starts at step",
    "Training completed",
    "Saving a full checkpoint",
    "Sleeping 2 seconds",
    "Destroying the purge thread",
    "Synchronizing and adjusting timeout",
)


class Printer(logging.Handler):
    """Print in a thread to the current sys.stdout, and wait at most PRINT_TIMEOUT_S for it."""

    def __init__(self) -> None:
        super().__init__()
        self._lines: deque[str] = deque(maxlen=10_000)  # stdout may be on a hanging disk
        self._printing = Background(self._print, "print")

    def emit(self, record: logging.LogRecord) -> None:
        self._lines.append(self.format(record))
        if self._printing.request():
            self._printing.wait(PRINT_TIMEOUT_S)

    def close(self) -> None:
        self._printing.close()
        super().close()

    def _print(self) -> None:
        while self._lines:
            print(self._lines.popleft(), flush=True)


def init_logging(rank: int) -> None:
    """Log INFO on rank 0 and WARNING on the others, to stdout."""
    # A filter of lines by their beginning; torchtitan logs to the root logger.
    printer = Printer()
    printer.addFilter(lambda record: not record.getMessage().startswith(_FILTERED))
    logging.basicConfig(
        format="%(asctime)s  %(message)s",
        datefmt="%H:%M:%S",
        level=logging.INFO if rank == 0 else logging.WARNING,
        handlers=[printer],
        force=True,  # replace torchtitan's handlers and those of an earlier launch
    )

    # Warnings of torch that do not concern this trainer.
    os.environ["KINETO_LOG_LEVEL"] = "5"
    for message in (
        "DTensor random operators may not have",  # we use our own generators
        "DTensor manual_seed",
        "Set timeout is now only supported",  # torchtitan also sets it on fake groups
        "In CPU autocast, but the target dtype",  # torchtitan enables it on one rank; we do not
    ):
        warnings.filterwarnings("ignore", message=message)
