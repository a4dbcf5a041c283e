"""What a build says: a line a minute, one per unit where they are few, an honest rest."""

import io
import re

import pytest

from data_prep import progress as progress_module
from data_prep.progress import BuildProgress, Counts


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def lines(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return capsys.readouterr().out.splitlines()


def test_a_line_a_minute_in_a_log(capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock()
    with BuildProgress(140, 20, Counts(read=240_000_000_000), clock) as progress:
        for second in range(1, 241):
            clock.now = second
            read = second * 10_000_000
            progress.update(Counts(second * 50, second * 1_000_000, read, second * 500_000))
        assert len(printed := lines(capsys)) == 4
        progress.unit_done(20, 1000, 2000)
        assert not lines(capsys)
    # 2.4 of 240 GB in 240 s: 99 times as long is left
    expected = (
        "20/140 units, 2.4 GB of 240.0 GB read, 120.0 MB downloaded; 50 documents/s, "
        "1,000,000 tokens/s, 10.0 MB/s; 6:36:00 left"
    )
    assert printed[-1] == expected
    assert lines(capsys) == [expected.replace("20/140", "21/140")]


def test_few_units_have_a_line_each(capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock()
    with BuildProgress(3, 1, Counts(read=1000), clock) as progress:
        clock.now = 2.0
        progress.update(Counts(10, 100, 500))
        progress.unit_done(2, 10, 100)
    (line,) = lines(capsys)
    assert line.startswith("unit 2: 10 documents, 100 tokens; 2/3 units")
    assert line.endswith("5 documents/s, 50 tokens/s, 0.0 MB/s; 0:00:02 left")


def test_a_limit_that_ends_the_run_sooner_counts(capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock()
    progress = BuildProgress(9, 0, Counts(tokens=400, read=1000), clock)
    clock.now = 60.0
    progress.update(Counts(1, 100, 1))
    assert progress.share() == 0.25 and lines(capsys)[0].endswith("0:03:00 left")
    progress.update(Counts(1, 500, 1))
    assert progress.share() == 1.0
    assert BuildProgress(9, 0, Counts(), clock).share() == 0.0


def test_a_bar_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    monkeypatch.setattr(progress_module.sys, "stdout", terminal)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("TERM", "xterm")
    clock = Clock()
    with BuildProgress(2, 0, Counts(read=100_000_000), clock) as progress:
        clock.now = 10.0
        progress.update(Counts(20, 2_000_000, 50_000_000))
        progress.unit_done(0, 20, 2_000_000)
    shown = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", terminal.getvalue())
    assert "━" in shown and "50.0 MB of 100.0 MB read; 2 documents/s" in shown
    assert "unit 0:" not in shown
