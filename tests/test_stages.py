"""Several commands in order, and the quickstart, which is made of them (CI runs it whole)."""

import os
import signal
import sys
import time

import pytest

from canon_pretrain import quickstart
from canon_pretrain.core.children import start_child
from canon_pretrain.run.launches import own_version
from canon_pretrain.stages import Stages
from tests.support import refused


@pytest.fixture
def stages(tmp_path):
    with Stages(tmp_path / "log.txt", dict(os.environ), forks=False) as started:
        yield started


def test_output_is_returned_and_logged(stages, capsys):
    assert stages.call("--version").split() == ["canon_pretrain", own_version()]
    assert "doctor" in stages.run("list the stages", "--help")
    log = stages.log.read_text()
    assert log.index("canon_pretrain ") < log.index("doctor")
    assert capsys.readouterr().out.startswith("list the stages ... ")


def test_a_failure_has_the_reason_and_names_the_log(stages):
    with refused("command.failed", exit_code=2) as caught:
        stages.call("trian")
    message = caught.value.message
    assert "error[cli.unknown_stage]" in message
    assert str(stages.log) in message


def sleepers(stages, monkeypatch, *codes):
    """Let commands be programs that end after 0.2 s with these codes; None: they go on."""
    children = []

    def start(words, output):
        code = codes[len(children)]
        seconds = 100 if code is None else 0.2
        text = f"import sys, time; time.sleep({seconds}); sys.exit({code})"
        children.append(start_child([sys.executable, "-c", text], stdout=output))
        return children[-1]

    monkeypatch.setattr(stages, "_start", start)
    return children


def test_an_interruption_ends_the_command_first(stages, monkeypatch):
    """Ctrl-C while it waits; a test process may ignore the signal."""
    children = sleepers(stages, monkeypatch, None)
    real_sleep = time.sleep
    interrupts = [KeyboardInterrupt]

    def sleep(seconds):
        if interrupts:
            raise interrupts.pop()
        real_sleep(seconds)

    monkeypatch.setattr(time, "sleep", sleep)

    with pytest.raises(KeyboardInterrupt):
        stages.call("train")

    assert [child.returncode for child in children] == [-signal.SIGTERM]


def test_the_first_rank_that_fails_ends_the_others(stages, monkeypatch):
    monkeypatch.setattr(stages, "server", object())
    children = sleepers(stages, monkeypatch, None, 3, None)

    with refused("command.failed", exit_code=3):
        stages.call_ranks(3, "--config", "a.toml")

    assert [child.returncode for child in children] == [-signal.SIGTERM, 3, -signal.SIGTERM]
    stages.server = None


def test_a_server_that_ended_is_replaced_by_processes(tmp_path):
    with Stages(tmp_path / "log.txt", dict(os.environ), forks=True) as stages:
        stages.server._process.kill()
        assert stages.call("--version").split() == ["canon_pretrain", own_version()]
        assert stages.server is None


def test_bars_show_scores_and_intervals():
    cells = [
        {"arm": "nope", "mean": 0.05, "interval": [0.0, 0.1]},
        {"arm": "nope_canon", "mean": 1.0, "interval": [0.97, 1.0]},
    ]

    with_canon, without_canon = quickstart.bars({"cells": cells}).splitlines()

    assert "with Canon" in with_canon
    assert with_canon.count("#") == quickstart.BAR_WIDTH
    assert "1.00  (95 % 0.97 to 1.00)" in with_canon
    assert without_canon.count("#") == round(0.05 * quickstart.BAR_WIDTH)
    assert "0.05  (95 % 0.00 to 0.10)" in without_canon
