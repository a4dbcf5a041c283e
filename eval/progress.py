"""How far an evaluation is: a bar on a terminal, plain lines elsewhere."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

LINE_EVERY_S = 5.0


@contextmanager
def progress(console: Console, what: str, total: int) -> Iterator[Callable[[int], None]]:
    """Yields `advance(count)`, to be told of work done out of `total`."""
    if console.is_terminal:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
        with Progress(*columns, TimeRemainingColumn(), console=console) as bar:
            task = bar.add_task(what, total=total)
            yield lambda count: bar.advance(task, count)
        return
    done = 0
    started = shown = time.monotonic()

    def advance(count: int) -> None:
        nonlocal done, shown
        done += count
        now = time.monotonic()
        if done < total and now - shown < LINE_EVERY_S:
            return
        shown = now
        left = (now - started) / done * (total - done)
        when = f"about {left:.0f} s left" if done < total else f"took {now - started:.0f} s"
        console.print(f"{what}: {done}/{total}, {when}", highlight=False)

    yield advance
