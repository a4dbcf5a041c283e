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
            progress.tick(Counts(second * 50, second * 1_000_000, read, second * 500_000))
        printed = capsys.readouterr().out.splitlines()
        assert 4 < len(printed) < 25
        progress.unit_done()
        assert not capsys.readouterr().out
    for fact in ("20/140 units", "GB of 240.00 GB", "MB downloaded", "50 documents/s"):
        assert fact in printed[-1]
    # 1 % in 240 s: 99 times as long is left
    assert printed[-1].endswith("about 6.6 h left")


def test_a_limit_that_ends_the_run_sooner_counts() -> None:
    progress = BuildProgress(9, 0, Counts(tokens=400, read=1000))
    progress.tick(Counts(1, 100, 1))
    assert progress.share() == 0.25
    progress.tick(Counts(1, 500, 1))
    assert progress.share() == 1.0
    assert BuildProgress(9, 0, Counts()).share() == 0.0
