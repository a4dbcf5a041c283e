"""The table of `python -m canon_pretrain.run status`: a line a run where the window is wide (or
there is none: a pipe), else a line of the main figures with a line of the rest below.

overview.py looks at the runs, glance.py finds the facts of each.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any

import rich.console
from rich.cells import cell_len
from rich.console import ConsoleOptions, RenderResult
from rich.text import Text

from canon_pretrain.core.text import printable
from canon_pretrain.report.glance import ALIVE, CHECKED, Glance, span

_GAP = "  "
_COLOURS = {
    **dict.fromkeys(ALIVE, "cyan"),
    "training": "green",
    "slow": "yellow",
    "hung": "bold red",
    "dead": "bold red",
    "failed": "bold red",
    "stopped": "yellow",
    "done": "blue",
    "unknown": "yellow",
}


@dataclass(frozen=True)
class _Column:
    title: str
    text: Callable[[Glance], str]
    right: bool = True
    """Whether its cells stand at the right."""
    label: str | None = None
    """What stands before (or in, at {}) the cell in a line of the rest; None: a main figure."""


def _count(value: int | None) -> str:
    return "" if value is None else f"{value:,}"


def _of(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def _since(seconds: float | None) -> str:
    return "" if seconds is None else span(seconds)


def _step(glance: Glance) -> str:
    return f"{_count(glance.step) or '-'}/{_count(glance.steps) or '?'}"


def _percent(glance: Glance) -> str:
    if glance.step is None or not glance.steps:
        return ""
    return f"{100 * glance.step / glance.steps:.1f} %"


def _loss(glance: Glance) -> str:
    value = glance.loss
    return "" if value is None else f"{value:.4f}" if isinstance(value, float | int) else value


def _checkpoint(glance: Glance) -> str:
    saved = glance.checkpoint
    text = "none" if saved is None else f"{saved.step:,} ({span(saved.age_s)} ago)"
    failures = glance.checkpoint_failures
    return f"{text}, then {failures} failed" if failures else text


def _evaluations(glance: Glance) -> str:
    done, pending = glance.evaluations.done, glance.evaluations.pending
    return f"{done}+{pending}" if done or pending else ""


def _job(glance: Glance) -> str:
    if not glance.job_id:
        return ""
    nodes = f" on {glance.nodes}" if glance.nodes else ""
    restart = f".{glance.restart_count}" if glance.restart_count else ""
    return f"{glance.job_id}{restart}{nodes}"


COLUMNS = (
    _Column("run", lambda g: g.name, right=False),
    _Column("state", lambda g: g.state, right=False),
    _Column("step", _step),
    _Column("", _percent),
    _Column("loss", _loss),
    _Column("tokens/s", lambda g: _of(g.tokens_per_second, ",.0f")),
    _Column("ETA", lambda g: _since(g.eta_s)),
    _Column("MFU", lambda g: _of(g.mfu, ".1%"), label="MFU {}"),
    _Column("restarts", lambda g: _count(g.restarts), label="restarts {}"),
    _Column("skipped", lambda g: _count(g.skipped_steps), label="skipped {}"),
    _Column("checkpoint", _checkpoint, label="checkpoint {}"),
    _Column("heartbeat", lambda g: _since(g.heartbeat_age_s), label="heartbeat {}"),
    _Column("evals done+pending", _evaluations, label="evals {}"),
    _Column("job", _job, right=False, label="job {}"),
)


@dataclass(frozen=True)
class Table:
    """What was seen at `now`: the runs in `base` ("": named in full), and words that name none."""

    now: datetime
    base: str
    glances: list[Glance]
    others: list[str]
    is_screen: bool = False
    """Whether it must not be higher than the window."""

    def document(self) -> dict[str, Any]:
        """The content of --json; the keys of a run are the fields of Glance."""
        return {
            "time": self.now.isoformat(timespec="seconds"),
            "runs": [asdict(glance) for glance in self.glances],
            "no_run_in": self.others,
        }

    def __rich_console__(
        self, console: rich.console.Console, options: ConsoleOptions
    ) -> RenderResult:
        lines = list(self._lines(options.max_width))
        height = console.height
        if self.is_screen and len(lines) > height:
            hidden = len(lines) - height + 1
            lines[height - 1 :] = [Text(f"... {hidden} more lines: make the window taller")]
        for line in lines:
            line.no_wrap, line.overflow = True, "crop"
            yield line

    def _lines(self, width: int) -> Iterator[Text]:
        count = len(self.glances)
        place = f" in {self.base}" if self.base else ""
        when = self.now.strftime("%Y-%m-%d %H:%M:%S UTC")
        yield from _fold(f"{count} run{'' if count == 1 else 's'}{place}, {when}", width, "bold")
        rows = [[column.text(glance) for column in COLUMNS] for glance in self.glances]
        shown = [k for k, column in enumerate(COLUMNS) if any(r[k] for r in rows) or not k]
        widths = {k: max(map(cell_len, [COLUMNS[k].title, *(r[k] for r in rows)])) for k in shown}
        is_wide = sum(widths.values()) + len(_GAP) * (len(shown) - 1) <= width
        main = [k for k in shown if is_wide or COLUMNS[k].label is None]
        others = sum(widths[k] + len(_GAP) for k in main if k != 0)
        names_apart = widths[0] > width - others  # a name that is too long has a line of its own
        if names_apart:
            widths[0] = max(width - others, 4)
        yield _line([COLUMNS[k].title for k in main], main, widths, dict.fromkeys(main, "dim"))
        for glance, row in zip(self.glances, rows, strict=True):
            styles = {0: "bold", 1: _COLOURS.get(glance.state, "")}
            if names_apart and cell_len(row[0]) > widths[0]:
                yield Text(_shortened(row[0], width), "bold")
                row = ["", *row[1:]]
            yield _line([row[k] for k in main], main, widths, styles)
            if not is_wide:
                rest = ((COLUMNS[k].label, row[k]) for k in shown if k not in main)
                told = ", ".join(label.format(cell) for label, cell in rest if label and cell)
                yield from _fold(told, width, "dim", indent=4)
            if glance.reason:
                yield from _fold(f"{glance.state}: {glance.reason}", width, "", indent=4)
            if glance.state == "dead" and glance.holder:
                yield from _fold(f"lock held by {glance.holder}", width, "", indent=4)
            for problem in glance.problems:
                yield from _fold(problem, width, "yellow", indent=4)
        for word in self.others:
            yield from _fold(f"no run in {printable(word)}", width, "yellow")
        if any(glance.checkpoint for glance in self.glances):
            yield from _fold(f"checkpoint: the newest, by {CHECKED}", width, "dim")


def _line(
    cells: Sequence[str], keys: Sequence[int], widths: dict[int, int], styles: dict[int, str]
) -> Text:
    """One line of the table; a name that is too long loses its middle."""
    line = Text()
    for position, (k, cell) in enumerate(zip(keys, cells, strict=True)):
        short = _shortened(cell, widths[k])
        padding = " " * (widths[k] - cell_len(short))
        line.append(_GAP if position else "")
        line.append(f"{padding}{short}" if COLUMNS[k].right else f"{short}{padding}", styles.get(k))
    line.rstrip()
    return line


def _shortened(text: str, width: int) -> str:
    """`text` in at most `width` cells: its beginning and its end, which tell runs apart."""
    if cell_len(text) <= width:
        return text
    tail = ""
    while cell_len(text[-len(tail) - 1 :]) <= (width - 1) // 2:
        tail = text[-len(tail) - 1 :]
    head = ""
    while cell_len(text[: len(head) + 1]) <= width - 1 - cell_len(tail):
        head = text[: len(head) + 1]
    return f"{head}\N{HORIZONTAL ELLIPSIS}{tail}"


def _fold(text: str, width: int, style: str, indent: int = 0) -> Iterator[Text]:
    """`text` in as many indented lines as it takes, broken at spaces; nothing for no text."""
    line = ""
    for word in printable(text).split(" ") if text else []:
        longer = f"{line} {word}" if line else word
        if line and indent + cell_len(longer) > width:
            yield Text(" " * indent + line, style)
            longer = word
        line = longer
    if line:
        yield Text(" " * indent + line, style)
