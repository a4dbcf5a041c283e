"""The live view in a real pseudo-terminal, plain lines elsewhere; a stdout that fails."""

import contextlib
import logging
import os
import pty
import re
import subprocess
import sys
import textwrap
from typing import Any

import pytest

from canon_pretrain.titan.console import Console
from tests.support import ROOT

FIELDS: dict[str, Any] = {
    "step": 240,
    "loss": 3.25,
    "grad_norm": 0.837,
    "lr": 2.52e-3,
    "tokens_per_second": 5047.4,
    "seconds_per_step": 15.0,
}
COUNTED = {"unigram": 5.6636, "bigram": 3.5175, "tokens_counted": 9, "tokens_scored": 8}


def test_without_a_live_view_steps_are_plain_lines(caplog, monkeypatch):
    """The view's failure is one line; what the lines and the view say: tests/snapshots."""
    console = Console(500, 500)
    monkeypatch.setattr("canon_pretrain.titan.console.is_terminal", lambda: True)
    monkeypatch.setattr("rich.live.Live.start", lambda view: 1 / 0)

    with caplog.at_level(logging.INFO, logger="root"):
        console.begin(3)
        console.event("step", FIELDS | {"step": 4})

    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]
    assert "step 4/500" in caplog.text


def printed_steps(caplog):
    return [int(step) for step in re.findall(r"step (\d+)/", caplog.text)]


@pytest.fixture
def clock(monkeypatch):
    """Return a list of one item, the seconds that time.monotonic() returns."""
    seconds = [1000.0]
    monkeypatch.setattr("canon_pretrain.titan.console.time.monotonic", lambda: seconds[0])
    return seconds


@pytest.mark.parametrize("pace, shown", [(0.3, [1, 8, 15, 20]), (1.0, [*range(1, 20, 2), 20])])
def test_at_most_a_line_each_two_seconds_and_the_last_step(caplog, clock, pace, shown):
    """Steps come each 0.3 or 1 s; the launch ends at step 20. Other events are not limited."""
    console = Console(500, 20)
    validation = FIELDS | {"bits_per_byte": 1.5, "tokens_scored": 10, "seconds": 0.1}
    with caplog.at_level(logging.INFO, logger="root"):
        console.begin(0)
        for step in range(1, 21):
            console.event("step", FIELDS | {"step": step})
            console.event("validation", validation)
            clock[0] += pace
        console.end()

    assert printed_steps(caplog) == shown
    assert caplog.text.count("validation at step") == 20


@pytest.mark.parametrize("last_event", ["stop", "halt", None])
def test_a_launch_that_ends_early_prints_its_last_step_once(caplog, clock, last_event):
    """A stop signal, bad steps, or an error: before the line that says so, if there is one."""
    console = Console(500, 20)
    with caplog.at_level(logging.INFO, logger="root"):
        for step in range(1, 6):
            console.event("step", FIELDS | {"step": step})
        if last_event is not None:
            console.event(last_event, {"step": 5})
            assert printed_steps(caplog) == [1, 5]
        console.end()
        console.end()
    assert printed_steps(caplog) == [1, 5]


def test_the_view_prints_no_step_as_a_line(caplog, monkeypatch):
    console = Console(500, 2)
    monkeypatch.setattr("canon_pretrain.titan.console.is_terminal", lambda: True)
    monkeypatch.setattr("rich.live.Live.start", lambda view: None)
    monkeypatch.setattr("rich.live.Live.stop", lambda view: None)

    with caplog.at_level(logging.INFO, logger="root"):
        console.begin(0)
        console.event("count_models", COUNTED)
        for step in (1, 2):
            console.event("step", FIELDS | {"step": step})
        console.end()

    assert not caplog.records


def test_the_loss_is_next_to_the_bigram_s_once_that_is_known(caplog, clock):
    console = Console(500, 500)
    with caplog.at_level(logging.INFO, logger="root"):
        for name, fields in (("step", FIELDS), ("count_models", COUNTED), ("step", FIELDS)):
            console.event(name, fields)
            clock[0] += 10

    step_before, count_models, step_after = (record.getMessage() for record in caplog.records)
    unigram = "5.66"
    bigram = "3.52"
    assert bigram not in step_before
    assert unigram in count_models
    assert bigram in count_models
    assert bigram in step_after
    assert unigram not in step_after


SCRIPT = textwrap.dedent(
    """
    import logging, sys, time
    sys.path.insert(0, {root!r})
    from canon_pretrain.titan.console import Console, init_logging

    FIELDS = {fields!r}
    init_logging(0)
    console = Console(500, 9)
    console.begin(0)
    stdout = sys.stdout
    console.event("step", FIELDS | {{"step": 7}})
    print("printed")
    logging.getLogger().info("logged")
    time.sleep(0.6)
    console.event("step", FIELDS | {{"step": 8}})
    {end}
    """
)


ENDS = [
    (0, "console.end(); assert sys.stdout is not stdout; console.end(); print('after')"),
    (-9, "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"),
]


@pytest.mark.system
@pytest.mark.parametrize(("code", "end"), ENDS)
def test_a_terminal_is_left_as_it_was(code, end):
    parent, child = pty.openpty()
    script = SCRIPT.format(root=str(ROOT), fields=FIELDS, end=end)
    process = subprocess.Popen(
        [sys.executable, "-c", script],
        env=os.environ | {"TERM": "xterm-256color"},
        stdin=child,
        stdout=child,
        stderr=child,
    )
    os.close(child)
    content = b""
    with contextlib.suppress(OSError):  # Linux's end of a pseudo-terminal
        while True:
            content += os.read(parent, 65536)
    os.close(parent)
    output = content.decode()
    assert process.wait() == code, output

    # no hidden cursor, alternate screen or mode, which a killed process could not restore
    assert re.findall(r"\x1b\[\?[\d;]*[hl]", output) == []

    # the output, and below it the view
    plain = re.sub(r"\x1b\[[\d;]*[A-Za-z]", "", output).replace("\r", "")
    assert "printed\n" in plain
    assert "  logged\n" in plain
    assert plain.index("logged") < plain.rindex("step 7/500")
    if code == 0:
        assert "step 8/500" in plain
        assert plain.rstrip().endswith("after")
