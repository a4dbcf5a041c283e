"""What a person sees of a running launch: a live view on a terminal, plain lines elsewhere.

titan/metrics.py tells it what is reported and what happens. The view keeps itself at the bottom of
the terminal, whatever is printed goes above it, and nothing of the terminal is changed (the cursor
stays visible, no other screen is taken): a process that is killed leaves nothing to put right.
"""

import atexit
import contextlib
import logging
import math
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any

import rich.console
from rich.cells import cell_len
from rich.live import Live
from rich.text import Text

from canon_pretrain.core import terminal
from canon_pretrain.run.log import number

logger = logging.getLogger()
"""torchtitan's own, whose lines the trainer shows; not imported: this room needs no torch."""

HISTORY = 512
"""Logged losses that are remembered for the sparkline; as many are drawn as fit."""
SHOWN_EVENTS = 4
REFRESHES_PER_SECOND = 4.0
SILENT_S = 10.0
SILENT_STEPS = 5
"""A step that takes longer than this, and than so many of its like, is pointed out."""
QUIET = ("step", "validation")
"""Events that have a place of their own in the view."""


class Console:
    """Reports a launch of a run of `total_steps`; used by global rank 0 alone.

    A view that fails, or whose terminal has gone, is one line, and plain lines go on in its place.
    """

    def __init__(self, total_steps: int, *, colour: bool = True) -> None:
        self.total_steps = total_steps
        self._colour = colour
        self._view: View | None = None
        self._live: _BottomOfTerminal | None = None

    def begin(self, step: int, past: Iterable[Mapping[str, Any]] = ()) -> None:
        """Show a run that stands at `step`; `past` holds events of its log so far."""
        if not is_terminal():
            return
        try:
            self._begin_view(step, past)
        except Exception as error:  # whatever is wrong with the terminal, it is not the run
            self._give_up(error)

    def _begin_view(self, step: int, past: Iterable[Mapping[str, Any]]) -> None:
        # its size is asked of the terminal alone: variables don't hear of a change
        environ = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES")}
        terminal = _Terminal(
            no_color=None if self._colour else True, highlight=False, _environ=environ
        )
        self._view = View(self.total_steps, step, ascii_only=terminal.options.ascii_only)
        for event in past:
            self._view.take_past(event)
        self._live = _BottomOfTerminal(self._view, terminal)
        self._live.start()
        atexit.register(self.end)

    def stands_at(self, step: int) -> None:
        """Every step's sign of life."""
        self._tell_view("stands_at", step)

    def report(self, step: int, fields: Mapping[str, Any], remaining_s: float) -> None:
        """Show one step's figures; `remaining_s` seconds are left until this launch ends."""
        if self._tell_view("report", step, fields, remaining_s):
            return
        text = (
            f"loss {fields['loss']:.4f}  grad_norm {fields['grad_norm']:.3f}  "
            f"lr {fields['lr']:.2e}  {fields['tokens_per_second']:,.0f} tok/s"
        )
        if "mfu" in fields:
            text += f"  MFU {fields['mfu']:.1%}"
        percent = 100 * step / self.total_steps
        logger.info(
            f"step {step}/{self.total_steps}  {percent:.1f} %  {text}  ETA {hms(remaining_s)}"
        )

    def validation(self, step: int, fields: Mapping[str, Any]) -> None:
        """Show the held-out loss that step `step` has come to."""
        if self._tell_view("validation", step, fields):
            return
        logger.info(
            f"validation at step {step}: {_held_out(fields)}, {fields['tokens_scored']:,} tokens, "
            f"{fields['seconds']:.1f} s"
        )

    def event(self, name: str, fields: Mapping[str, Any]) -> None:
        """Show in the view what has happened; as a plain line it is its caller's to say."""
        if name not in QUIET:
            self._tell_view("event", name, fields)

    def _tell_view(self, method: str, *facts: Any) -> bool:
        """Hand it to the view; whether there is one, and it took it."""
        if self._view is None:
            return False
        try:
            getattr(self._view, method)(*facts)
        except Exception as error:
            self._give_up(error)
            return False
        return True

    def _give_up(self, error: Exception) -> None:
        self.end()
        logger.warning(f"no live view any more ({type(error).__name__}: {error}): plain lines")

    def end(self) -> None:
        """Leave the last view above the cursor; more than once does no harm."""
        live, self._live, self._view = self._live, None, None
        if live is not None:
            atexit.unregister(self.end)
            with contextlib.suppress(OSError, ValueError):  # the terminal has gone
                live.stop()


def is_terminal() -> bool:
    """Whether stdout is a terminal on which a view can be drawn over."""
    try:
        is_tty = sys.stdout.isatty()
    except (AttributeError, ValueError):  # None, or closed: there is no stdout at all
        return False
    return is_tty and os.environ.get("TERM", "dumb") not in ("dumb", "unknown", "")


class View:
    """What the live view shows, and how it is laid out; for several threads.

    `lines` gives it at any width: figures flow over as many lines as they need.
    """

    def __init__(self, total_steps: int, step: int, *, ascii_only: bool = False) -> None:
        self.total_steps = total_steps
        self.ascii_only = ascii_only
        self._lock = threading.Lock()
        self._step = step
        self._moved = time.monotonic()
        self._ends: float | None = None
        self._fields: dict[str, Any] = {}
        self._losses: deque[float] = deque(maxlen=HISTORY)
        self._validation: tuple[int, dict[str, Any]] | None = None
        self._checkpoint: tuple[int, float | None] | None = None
        self._events: deque[tuple[str, str]] = deque(maxlen=SHOWN_EVENTS)

    def take_past(self, event: Mapping[str, Any]) -> None:
        """Note an event of an earlier launch, as the log has it."""
        if event["event"] == "step":
            self._losses.append(number(event.get("loss", "NaN")))
        elif event["event"] == "validation":
            self._validation = (event["step"], dict(event))
        elif event["event"] == "checkpoint":
            self._checkpoint = (event["step"], None)

    def stands_at(self, step: int) -> None:
        with self._lock:
            self._step, self._moved = step, time.monotonic()

    def report(self, step: int, fields: Mapping[str, Any], remaining_s: float) -> None:
        with self._lock:
            self._step, self._moved = step, time.monotonic()
            self._fields = dict(fields)
            self._ends = self._moved + remaining_s
            self._losses.append(fields["loss"])

    def validation(self, step: int, fields: Mapping[str, Any]) -> None:
        with self._lock:
            self._validation = (step, dict(fields))

    def event(self, name: str, fields: Mapping[str, Any]) -> None:
        with self._lock:
            if name == "checkpoint":
                self._checkpoint = (fields["step"], time.monotonic())
            self._events.append((f"{datetime.now():%H:%M:%S}", describe_event(name, fields)))

    def lines(self, width: int) -> list[Text]:
        """The view as lines of at most `width` cells."""
        with self._lock:
            now = time.monotonic()
            result = [self._bar(width, now)]
            if self._losses:
                result.append(self._loss(width))
            result += flow(self._figures(), width)
            result += flow(self._state(now), width)
            result += [Text(f"{when}  {what}", style="dim") for when, what in self._events]
        for line in result:
            line.truncate(width, overflow="crop" if self.ascii_only else "ellipsis")
        return result

    def _bar(self, width: int, now: float) -> Text:
        share = self._step / self.total_steps
        eta = "" if self._ends is None else f"  ETA {hms(max(0.0, self._ends - now))}"
        before, after = f"step {self._step}/{self.total_steps} ", f" {100 * share:.1f} %{eta}"
        room = max(0, width - cell_len(before + after))
        full = min(room, int(share * room))
        done, rest = "#." if self.ascii_only else "━─"
        return Text.assemble(
            before, (done * full, "green"), (rest * (room - full), "bright_black"), after
        )

    def _loss(self, width: int) -> Text:
        text = f"loss {self._losses[-1]:.4f} "
        room = max(0, min(HISTORY, width - cell_len(text)))
        drawn = sparkline(list(self._losses)[-room:] if room else [], ascii_only=self.ascii_only)
        return Text.assemble((text, "bold"), (drawn, "cyan"))

    def _figures(self) -> list[str]:
        fields = self._fields
        if not fields:
            return []
        figures = [
            f"grad_norm {fields['grad_norm']:.3f}",
            f"lr {fields['lr']:.2e}",
            f"{fields['tokens_per_second']:,.0f} tok/s",
        ]
        if "mfu" in fields:
            figures.append(f"MFU {fields['mfu']:.1%}")
        figures += [
            f"{fields['seconds_per_step']:.3g} s/step",
            f"data wait {fields['data_wait']:.1%}",
            f"memory {fields['memory_gib']:.1f} GiB",
            f"{fields['tokens']:,} tokens",
        ]
        return figures

    def _state(self, now: float) -> list[str]:
        state = []
        if self._checkpoint is None:
            state.append("no checkpoint yet")
        else:
            step, saved = self._checkpoint
            age = "" if saved is None else f", {hms(now - saved)} ago"
            state.append(f"checkpoint of step {step}{age}")
        if self._validation is not None:
            step, fields = self._validation
            state.append(f"validation {_held_out(fields)} at step {step}")
        for name in ("skipped_steps", "restarts"):
            if count := self._fields.get(name):
                state.append(f"{name.replace('_', ' ')} {count}")
        silent = now - self._moved
        if silent > max(SILENT_S, SILENT_STEPS * self._fields.get("seconds_per_step", 0.0)):
            state.append(f"no step for {hms(silent)}")
        return state


def flow(words: Sequence[str], width: int) -> list[Text]:
    """`words` on as few lines of `width` cells as they need, in order, two spaces apart."""
    lines: list[str] = []
    for word in words:
        if lines and cell_len(lines[-1]) + 2 + cell_len(word) <= width:
            lines[-1] += f"  {word}"
        else:
            lines.append(word)
    return [Text(line) for line in lines]


def sparkline(values: Sequence[float], *, ascii_only: bool = False) -> str:
    """A character a value, low to high between the least and the largest; x where it is not finite.

    Values that are all alike are drawn low.
    """
    levels = "_.-=^" if ascii_only else "▁▂▃▄▅▆▇█"
    finite = [value for value in values if math.isfinite(value)]
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    step = (high - low) / (len(levels) - 1) or 1.0
    return "".join(
        levels[round((value - low) / step)] if math.isfinite(value) else "x" for value in values
    )


def describe_event(name: str, fields: Mapping[str, Any]) -> str:
    """An event of the log as one line for a person."""
    step = fields.get("step")
    match name:
        case "start":
            text = f"started on {fields['world_size']} ranks"
        case "resume":
            text = (
                f"resumed from step {fields.get('from_step')} on {fields.get('world_size')} ranks"
            )
        case "checkpoint":
            text = (
                f"saved step {step}: {fields['bytes'] / 1e6:,.1f} MB in {fields['seconds']:.1f} s"
            )
        case "checkpoint_failed":
            text = f"step {step} is NOT SAVED: {fields['reason']}"
        case "skip":
            text = f"skipped step {step}: {fields['reason']}"
        case "stop":
            text = f"stopped at step {step} by {fields['reason']}"
        case "done":
            text = f"finished: step {step}"
        case _:
            facts = "  ".join(f"{key} {value}" for key, value in fields.items() if key != "tokens")
            text = f"{name.replace('_', ' ')}  {facts}"
    return "".join(character if character.isprintable() else " " for character in text)


def _held_out(fields: Mapping[str, Any]) -> str:
    return f"loss {number(fields['loss']):.4f} ({number(fields['bits_per_byte']):.4f} bits/byte)"


def hms(seconds: float) -> str:
    """1:02:03, or 2:03 under an hour."""
    minutes, s = divmod(round(seconds), 60)
    hours, m = divmod(minutes, 60)
    return f"{hours}:{m:02}:{s:02}" if hours else f"{m}:{s:02}"


class _Terminal(terminal.Console):
    """Never hides the cursor: a killed process could not show it again."""

    def show_cursor(self, show: bool = True) -> bool:
        return False


class _BottomOfTerminal(Live):
    """rich's live display of a View; it also finds its place after the terminal was made narrower.

    Terminals then wrap what was drawn, so that it takes more rows than it had lines.
    """

    def __init__(self, view: View, terminal: _Terminal) -> None:
        self._drawn_view = view
        self._drawn: list[Text] = []
        self._width = terminal.size.width
        self._started = False  # rich draws once while it is being made
        super().__init__(
            console=terminal,
            get_renderable=self._draw,
            refresh_per_second=REFRESHES_PER_SECOND,
            vertical_overflow="crop",
        )

    def _draw(self) -> Text:
        # one column is left free: in the last one, some terminals go on to the next line
        try:
            self._drawn = self._drawn_view.lines(max(1, self.console.size.width - 1))
        except Exception as error:  # raised here, it would end whoever prints a line
            self._drawn = [Text(f"the view can't be drawn: {type(error).__name__}: {error}")]
        if self.is_started:  # the cursor waits on a line of its own, should the process be killed
            self._drawn.append(Text())
        return Text("\n").join(self._drawn)

    def refresh(self) -> None:
        with self._lock:
            self._note_width()
            super().refresh()

    def process_renderables(
        self, renderables: list[rich.console.ConsoleRenderable]
    ) -> list[rich.console.ConsoleRenderable]:
        with self._lock:
            self._note_width()
            return super().process_renderables(renderables)

    def _note_width(self) -> None:
        """Before anything is drawn anew: how many rows the last drawing takes now."""
        width = self.console.size.width
        if width < self._width and self._live_render._shape is not None:
            rows = sum(max(1, math.ceil(line.cell_len / width)) for line in self._drawn)
            self._live_render._shape = (width, min(rows, self.console.size.height))
        self._width = width
