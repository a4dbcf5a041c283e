"""The time left is that of all tasks together."""

import io

import pytest
from rich.console import Console

from eval import progress
from eval.progress import Work, duration


class Clock:
    now = 0.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(progress, "time", clock)
    return clock


def test_lines_say_how_much_of_all_is_left(clock: Clock) -> None:
    console = Console(file=io.StringIO(), width=200)
    with Work(console, {"first": 100, "second": 300}).shown() as work:
        with work.part("first") as advance:
            clock.now = 2.0
            advance(10)  # too soon after the last line
            clock.now = 10.0
            advance(40)
            clock.now = 20.0
        with work.part("second") as advance:
            clock.now = 70.0
            advance(150)
            clock.now = 80.0
            advance(100)
            clock.now = 110.0
            advance(900)  # more than was known: no more than all of it
    assert isinstance(console.file, io.StringIO)
    assert console.file.getvalue().splitlines() == [
        "first: 50%; 12% of all, about 70 s left",
        "first: 100%; 25% of all, about 60 s left",
        "second: 50%; 62% of all, about 42 s left",
        "second: 100%; took 2 min",
    ]


def test_what_others_did_is_no_part_of_the_work(clock: Clock) -> None:
    console = Console(file=io.StringIO(), width=200)
    with Work(console, {"first": 100, "second": 100}).shown() as work:
        work.skip("first")
        work.skip("never due")
        with work.part("second") as advance:
            clock.now = 10.0
            advance(50)
    assert isinstance(console.file, io.StringIO)
    assert console.file.getvalue().splitlines() == [
        "second: 50%; 50% of all, about 10 s left",
        "second: 100%; took 10 s",
    ]


def test_a_terminal_has_a_bar_and_no_lines(clock: Clock) -> None:
    console = Console(file=io.StringIO(), width=80, force_terminal=True)
    with Work(console, {"first": 10}).shown() as work, work.part("first") as advance:
        advance(10)
    assert isinstance(console.file, io.StringIO)
    assert "first" in console.file.getvalue() and "100%" in console.file.getvalue()
    assert "of all" not in console.file.getvalue()


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0.2, "0 s"), (89, "89 s"), (91, "2 min"), (3599, "1 h 00 min"), (7500, "2 h 05 min")],
)
def test_durations(seconds: float, words: str) -> None:
    assert duration(seconds) == words
