"""Speeds measured on this machine."""

import pytest

from canon_pretrain.machine import timing


def test_the_best_of_several_measurements_counts(monkeypatch):
    now = 0.0
    monkeypatch.setattr(timing.time, "perf_counter", lambda: now)

    def step():
        nonlocal now
        now += 0.1 if now < 0.5 else 0.01

    assert timing.best_rate(step, seconds=1.0, measurements=3) == pytest.approx(100, rel=0.05)
    assert now == pytest.approx(1.0, rel=0.2)
