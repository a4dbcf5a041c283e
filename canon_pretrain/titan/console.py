"""What a user sees of a running launch: a live view on a terminal, plain lines elsewhere."""

import atexit
import contextlib
import logging
import math
import os
import sys
import time
import warnings
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from datetime import datetime
from typing import Any

import rich.console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.segment import Segment
from rich.table import Column, Table
from rich.text import Text

from canon_pretrain.core import terminal
from canon_pretrain.core.text import duration, printable, size
from canon_pretrain.run.background import Background
from canon_pretrain.run.log import number

logger = logging.getLogger()
"""torchtitan's own, whose lines the trainer shows; not imported: this room needs no torch."""

HISTORY = 512
"""Logged losses that are remembered for the sparkline; as many are drawn as fit."""
SHOWN_EVENTS = 4
SILENT_S = 10.0
SILENT_STEPS = 5
"""A step that takes longer than this, and than so many of its like, is pointed out."""
MAX_LINES = 10_000
"""That wait while stdout takes none: it may be a file on a disk that is away."""
PRINT_TIMEOUT_S = 0.2


class Console:
    """Reports a launch of a run of `total_steps`; used by global rank 0 alone."""

    def __init__(self, total_steps: int, *, colour: bool = True) -> None:
        self.total_steps = total_steps
        self._colour = colour
        self._live: Live | None = None
        self._step, self._moved = 0, time.monotonic()
        self._ends: float | None = None
        self._fields: Mapping[str, Any] = {}
        self._losses: deque[float] = deque(maxlen=HISTORY)
        self._validation: tuple[int, Mapping[str, Any]] | None = None
        self._checkpoint: tuple[int, float | None] | None = None
        self._events: deque[str] = deque(maxlen=SHOWN_EVENTS)

    def begin(self, step: int, past: Iterable[Mapping[str, Any]] = ()) -> None:
        """Show a run that is at `step`; `past` holds events of its log so far."""
        self.stands_at(step)
        if not is_terminal():
            return
        try:
            for event in past:
                if event["event"] == "step":
                    self._losses.append(number(event.get("loss", "NaN")))
                elif event["event"] == "validation":
                    self._validation = (event["step"], event)
                elif event["event"] == "checkpoint":
                    self._checkpoint = (event["step"], None)
            live = _BottomOfTerminal(self, colour=self._colour)
            live.start()
        except Exception as error:  # whatever is wrong with the terminal, it is not the run
            logger.warning(f"no live view ({type(error).__name__}: {error}): plain lines")
            return
        self._live = live
        atexit.register(self.end)

    def stands_at(self, step: int) -> None:
        """Note every step's sign of life."""
        self._step, self._moved = step, time.monotonic()

    def report(self, step: int, fields: Mapping[str, Any], remaining_s: float) -> None:
        """Show one step's figures; `remaining_s` seconds are left until this launch ends."""
        self.stands_at(step)
        self._fields, self._ends = fields, self._moved + remaining_s
        self._losses.append(fields["loss"])
        if self._live is None:
            text = "  ".join([f"loss {fields['loss']:.4f}", *_figures(fields)])
            done = f"step {step}/{self.total_steps}  {100 * step / self.total_steps:.1f} %"
            logger.info(f"{done}  {text}  ETA {duration(remaining_s)}")

    def validation(self, step: int, fields: Mapping[str, Any]) -> None:
        """Show the held-out loss that step `step` has come to."""
        self._validation = (step, fields)
        if self._live is None:
            logger.info(
                f"validation at step {step}: {_held_out(fields)}, {fields['tokens_scored']:,} "
                f"tokens, {fields['seconds']:.1f} s"
            )

    def event(self, name: str, fields: Mapping[str, Any]) -> None:
        """Show in the view what has happened; its caller prints it as a plain line."""
        if name == "checkpoint":
            self._checkpoint = (fields["step"], time.monotonic())
        if name not in ("step", "validation"):  # they have a place of their own in the view
            self._events.append(f"{datetime.now():%H:%M:%S}  {describe_event(name, fields)}")

    def end(self) -> None:
        """Leave the last view above the cursor; idempotent."""
        live, self._live = self._live, None
        if live is not None:
            atexit.unregister(self.end)
            with contextlib.suppress(OSError, ValueError):  # the terminal has gone
                live.stop()

    def __rich_console__(
        self, console: rich.console.Console, options: rich.console.ConsoleOptions
    ) -> rich.console.RenderResult:
        # one column is left free: in the last one, some terminals go on to the next line
        options = options.update_width(max(1, options.max_width - 1))
        try:
            lines = list(self._lines(options, time.monotonic()))
        except Exception as error:  # raised here, it would end whoever prints a line
            lines = [Text(f"the view can't be drawn: {type(error).__name__}: {error}")]
        # the cursor waits on a line of its own, should the process be killed
        for line in console.render_lines(rich.console.Group(*lines, ""), options, pad=False):
            yield from (*line, Segment.line())

    def _lines(
        self, options: rich.console.ConsoleOptions, now: float
    ) -> Iterator[rich.console.RenderableType]:
        eta = "" if self._ends is None else f"  ETA {duration(max(0.0, self._ends - now))}"
        bar = Table.grid("", Column(ratio=1), "", padding=(0, 1), expand=True)
        bar.add_row(
            f"step {self._step}/{self.total_steps}",
            ProgressBar(self.total_steps, self._step),
            f"{self._step / self.total_steps:.1%}{eta}",
        )
        yield bar
        if self._losses:
            loss = f"loss {self._losses[-1]:.4f} "
            fitting = list(self._losses)[-max(1, options.max_width - len(loss)) :]
            drawn = sparkline(fitting, ascii_only=options.ascii_only)
            yield Text.assemble((loss, "bold"), (drawn, "cyan"), no_wrap=True, overflow="crop")
        if fields := self._fields:
            more = (
                f"{fields['seconds_per_step']:.3g} s/step  data wait {fields['data_wait']:.1%}  "
                f"memory {fields['memory_gib']:.1f} GiB  {fields['tokens']:,} tokens"
            )
            yield Text("  ".join([*_figures(fields), more]))
        yield Text("  ".join(self._state(now)))
        for event in list(self._events):
            yield Text(event, "dim", no_wrap=True, overflow="crop")

    def _state(self, now: float) -> Iterator[str]:
        if self._checkpoint is None:
            yield "no checkpoint yet"
        else:
            step, saved = self._checkpoint
            age = "" if saved is None else f", {duration(now - saved)} ago"
            yield f"checkpoint of step {step}{age}"
        if self._validation is not None:
            step, fields = self._validation
            yield f"validation {_held_out(fields)} at step {step}"
        for name in ("skipped_steps", "restarts"):
            if count := self._fields.get(name):
                yield f"{name.replace('_', ' ')} {count}"
        silent = now - self._moved
        if silent > max(SILENT_S, SILENT_STEPS * self._fields.get("seconds_per_step", 0.0)):
            yield f"no step for {duration(silent)}"


def is_terminal() -> bool:
    """Return whether stdout is a terminal on which a view can be drawn over."""
    try:
        is_tty = sys.stdout.isatty()
    except (AttributeError, ValueError):  # None, or closed: there is no stdout at all
        return False
    return is_tty and os.environ.get("TERM", "dumb") not in ("dumb", "unknown", "")


def sparkline(values: Collection[float], *, ascii_only: bool = False) -> str:
    """Return a character per value, low to high; x if it is not finite."""
    levels = "_.-=^" if ascii_only else "▁▂▃▄▅▆▇█"
    finite = [value for value in values if math.isfinite(value)]
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    step = (high - low) / (len(levels) - 1) or 1.0
    return "".join(levels[round((v - low) / step)] if math.isfinite(v) else "x" for v in values)


def describe_event(name: str, fields: Mapping[str, Any]) -> str:
    """Return an event of the log as one printable line."""
    if name == "checkpoint":
        text = f"saved step {fields['step']}: {size(fields['bytes'])} in {fields['seconds']:.1f} s"
    else:
        facts = "  ".join(f"{key} {value}" for key, value in fields.items() if key != "tokens")
        text = f"{name.replace('_', ' ')}  {facts}"
    return printable(text)


def _figures(fields: Mapping[str, Any]) -> Iterator[str]:
    yield f"grad_norm {fields['grad_norm']:.3f}"
    yield f"lr {fields['lr']:.2e}"
    yield f"{fields['tokens_per_second']:,.0f} tok/s"
    if "mfu" in fields:
        yield f"MFU {fields['mfu']:.1%}"


def _held_out(fields: Mapping[str, Any]) -> str:
    return f"loss {number(fields['loss']):.4f} ({number(fields['bits_per_byte']):.4f} bits/byte)"


class _Terminal(terminal.Console):
    """Never hides the cursor: a killed process could not show it again."""

    def show_cursor(self, show: bool = True) -> bool:
        return False


class _BottomOfTerminal(Live):
    """rich's live display; it also finds its place after the terminal was made narrower.

    Terminals then wrap what was drawn, so that it takes more rows than it had lines.
    """

    def __init__(self, view: Console, *, colour: bool) -> None:
        # its size is asked of the terminal alone: variables don't follow a change
        environ = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES")}
        no_color = None if colour else True
        console = _Terminal(no_color=no_color, highlight=False, _environ=environ)
        self._lengths: list[int] = []
        self._width = console.size.width
        super().__init__(view, console=console, vertical_overflow="crop")

    def process_renderables(
        self, renderables: list[rich.console.ConsoleRenderable]
    ) -> list[rich.console.ConsoleRenderable]:
        with self._lock:
            width, height = self.console.size
            if width < self._width and self._live_render._shape is not None:
                rows = sum(max(1, -(-length // width)) for length in self._lengths)
                self._live_render._shape = (width, min(rows, height))
            self._width = width
            lines = self.console.render_lines(self._live_render.renderable, pad=False)
            self._lengths = [Segment.get_line_length(line) for line in lines]
            return super().process_renderables(renderables)


# -- torchtitan's log ----------------------------------------------------------------------------

# No news, does not hold here (a CPU's peak FLOP/s, autocast), or is said by our own lines
_NOISE = (
    *("[GC]", "ENV[TORCH_", "Building canon", "Building device mesh"),
    *("Successfully created meshes", "Mixed precision training is handled by"),
    *("Error running lspci", "Peak flops undefined", "Peak FLOPS used", "Training starts at step"),
    *("Training completed", "Saving a full checkpoint", "Sleeping 2 seconds"),
    *("Destroying the purge thread", "Synchronizing and adjusting timeout"),
)


class Printer(logging.Handler):
    """Prints from a thread to the present sys.stdout: the live view puts itself there.

    A line is waited for, so that what follows on stderr comes after it, but only for
    PRINT_TIMEOUT_S, and not at all while an earlier line is stuck.
    """

    def __init__(self) -> None:
        super().__init__()
        self._lines: deque[str] = deque()
        self._dropped = 0
        self._printing = Background(self._print, "print")

    def emit(self, record: logging.LogRecord) -> None:
        if len(self._lines) < MAX_LINES:
            self._lines.append(self.format(record))
        else:
            self._dropped += 1
        if self._printing.request():
            self._printing.wait(PRINT_TIMEOUT_S)

    def close(self) -> None:
        self._printing.close()
        super().close()

    def _print(self) -> None:
        while self._lines:
            print(self._lines.popleft(), flush=True)
        dropped, self._dropped = self._dropped, 0
        if dropped:
            print(f"{dropped} lines are missing here: stdout took none for too long", flush=True)


def init_logging(rank: int) -> None:
    """Let rank 0 print the story on stdout, the other ranks only what went wrong."""
    root = logging.getLogger()
    for handler in list(root.handlers):
        root.removeHandler(handler)
        if isinstance(handler, Printer):
            handler.close()
    printer = Printer()
    printer.setFormatter(logging.Formatter("%(asctime)s  %(message)s", datefmt="%H:%M:%S"))
    printer.addFilter(lambda record: not record.getMessage().startswith(_NOISE))
    root.addHandler(printer)
    root.setLevel(logging.INFO if rank == 0 else logging.WARNING)
    os.environ["KINETO_LOG_LEVEL"] = "5"
    for known in (
        "DTensor random operators may not have",  # weights and data have their own generators
        "DTensor manual_seed",
        "Set timeout is now only supported",  # torchtitan sets it on its fake groups as well
        "In CPU autocast, but the target dtype",  # torchtitan enters it at one rank; we leave it
    ):
        warnings.filterwarnings("ignore", message=known)
