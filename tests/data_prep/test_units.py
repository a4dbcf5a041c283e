"""What a build shows: lines now and then, one per unit where they are few, an honest share."""

import pytest

from data_prep.units import BuildProgress, Counts


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_lines_in_a_log(capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock()
    with BuildProgress(140, 20, Counts(read=240_000_000_000), clock) as progress:
        for second in range(1, 241):
            clock.now = second
            read = second * 10_000_000
            progress.update(Counts(second * 50, second * 1_000_000, read, second * 500_000))
        printed = capsys.readouterr().out.splitlines()
        assert 4 < len(printed) < 25
        progress.unit_done(20, 1000, 2000)
        assert not capsys.readouterr().out
    for fact in ("20/140 units", "GB of 240.00 GB", "MB downloaded", "50 documents/s"):
        assert fact in printed[-1]
    # 1 % in 240 s: 99 times as long is left
    assert printed[-1].endswith("about 6.6 h left")


def test_few_units_have_a_line_each(capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock()
    with BuildProgress(3, 1, Counts(read=1000), clock) as progress:
        clock.now = 2.0
        progress.update(Counts(10, 100, 500))
        progress.unit_done(2, 10, 100)
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("unit 2: 10 documents, 100 tokens; 2/3 units")
    assert "5 documents/s, 50 tokens/s" in line


def test_a_limit_that_ends_the_run_sooner_counts() -> None:
    progress = BuildProgress(9, 0, Counts(tokens=400, read=1000))
    progress.update(Counts(1, 100, 1))
    assert progress.share() == 0.25
    progress.update(Counts(1, 500, 1))
    assert progress.share() == 1.0
    assert BuildProgress(9, 0, Counts()).share() == 0.0
