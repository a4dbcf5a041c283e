"""The live view at any width, in a real pseudo-terminal and in tmux; plain lines elsewhere."""

import logging
import os
import pty
import re
import subprocess
import sys
import textwrap
from typing import Any

import pytest
import rich.console

from canon_pretrain.titan.console import _FILTERED, Console
from tests.support import ROOT

FIELDS: dict[str, Any] = {"step": 240, "loss": 3.25, "grad_norm": 0.837, "lr": 2.52e-3}
FIELDS |= {"tokens_per_second": 5047.4, "seconds_per_step": 15.0, "data_wait": 0.0123}
FIELDS |= {"memory_gib": 54.2, "tokens": 512_000, "skipped_steps": 2, "restarts": 1}
HELD_OUT: dict[str, Any] = {"step": 200, "loss": 3.5, "bits_per_byte": 1.75}
HELD_OUT |= {"tokens_scored": 131072, "seconds": 1.25}


def a_view() -> Console:
    view = Console(500, 500)
    for k in range(600):
        view.event("step", FIELDS | {"loss": 10.0 - k / 100})
    view.event("step", FIELDS | {"step": 250, "mfu": 0.451})
    view.event("checkpoint", {"step": 250, "bytes": 14_700_000, "seconds": 0.25})
    view.event("skip", {"step": 249, "reason": "not finite [x]\x1b[2J\n"})
    view.event("validation", HELD_OUT)
    return view


def lines_of(view: Console, width: int) -> list[str]:
    console = rich.console.Console(width=width, color_system="standard", force_terminal=True)
    lines = console.render_lines(view)
    return ["".join(segment.text for segment in line).rstrip() for line in lines]


def test_plain_lines_are_those_that_scripts_know(caplog):
    """Where stdout is no terminal: one line per report."""
    console = Console(500, 255)
    with caplog.at_level(logging.INFO, logger="root"):
        console.begin(0)
        console.event("step", FIELDS | {"step": 250})
        console.event("step", FIELDS | {"step": 5, "mfu": 0.451})
        console.event("checkpoint", {"step": 250, "bytes": 1, "seconds": 1.0})
        console.event("validation", HELD_OUT)
        console.end()
    assert [record.getMessage() for record in caplog.records] == [
        "step 250/500  50.0 %  loss 3.2500  grad_norm 0.837  lr 2.52e-03  5,047 tok/s  ETA 75 s",
        "step 5/500  1.0 %  loss 3.2500  grad_norm 0.837  lr 2.52e-03  5,047 tok/s  MFU 45.1%"
        "  ETA 62 min",
        "validation at step 200: loss 3.5000 (1.7500 bits/byte), 131,072 tokens, 1.2 s",
    ]


def test_a_view_that_fails_is_one_line_and_plain_lines_go_on(caplog, monkeypatch):
    console = Console(500, 500)
    monkeypatch.setattr("canon_pretrain.titan.console.is_terminal", lambda: True)
    monkeypatch.setattr("rich.live.Live.start", lambda view: 1 / 0)
    with caplog.at_level(logging.INFO, logger="root"):
        console.begin(3)
        console.event("step", FIELDS | {"step": 4})
    assert "no live view" in caplog.text and "step 4/500" in caplog.text


def test_the_view_shows_what_the_readme_names():
    lines = lines_of(a_view(), 100)
    text = " ".join(" ".join(lines).split())
    for fact in (
        *("step 250/500", "50.0%", "ETA 62 min", "loss 3.2500", "grad_norm 0.837", "MFU 45.1%"),
        *("lr 2.52e-03", "5,047 tok/s", "data wait 1.2%", "memory 54.2 GiB", "512,000 tokens"),
        *("checkpoint of step 250, 0 s ago", "skipped steps 2", "restarts 1"),
        *(
            "validation loss 3.5000 (1.7500 bits/byte) at step 200",
            "of step 250: 14.70 MB in 0.2 s",
        ),
    ):
        assert fact in text, fact
    assert len(lines) <= 11


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


def in_a_terminal(end: str) -> tuple[int, str]:
    """Exit code and all that a script which shows a view and then does `end` sends a terminal."""
    parent, child = pty.openpty()
    script = SCRIPT.format(root=str(ROOT), fields=FIELDS, end=end)
    ends: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), child)
    environment = os.environ | {"TERM": "xterm-256color"}
    process = subprocess.Popen([sys.executable, "-c", script], env=environment, **ends)
    os.close(child)
    output = b""
    while True:
        try:
            piece = os.read(parent, 65536)
        except OSError:  # Linux's end of a pseudo-terminal
            break
        output += piece
    os.close(parent)
    return process.wait(), output.decode()


@pytest.mark.parametrize(
    ("end", "code"),
    [
        ("console.end(); assert sys.stdout is not stdout; console.end(); print('after')", 0),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", -9),
    ],
)
def test_a_terminal_is_left_as_it_was(end, code):
    exit_code, output = in_a_terminal(end)
    assert exit_code == code, output
    # no hidden cursor, no other screen, no mode: a killed process could not put them back
    assert re.findall(r"\x1b\[\?[\d;]*[hl]", output) == []
    plain = re.sub(r"\x1b\[[\d;]*[A-Za-z]", "", output).replace("\r", "")
    assert "printed\n" in plain and "  logged\n" in plain
    assert plain.index("logged") < plain.rindex("step 7/500"), "the view is below what is printed"
    if code == 0:
        assert plain.rstrip().endswith("after") and "step 8/500" in plain


@pytest.mark.parametrize(
    ("redirection", "said"),
    [
        ("> /dev/full", "No space left on device"),  # a log file on a full disk
        (">&-", None),
    ],
)
def test_a_stdout_that_takes_nothing_ends_no_run(redirection, said):
    script = textwrap.dedent(
        """
        import logging, sys
        from canon_pretrain.core.cli import resilient_output
        from canon_pretrain.titan.console import init_logging
        with resilient_output():
            init_logging(0)
            for k in range(3):
                logging.getLogger().info(f"line {k}")
            print("trained on", file=sys.stderr)
        """
    )
    command = ["sh", "-c", f'"$@" {redirection}', "sh", sys.executable, "-c", script]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stderr.endswith("trained on\n")
    assert done.stderr.count("NOTE: stdout") == (said is not None)
    assert said is None or said in done.stderr
    assert not "step 1/3".startswith(_FILTERED) and "[GC] Initial GC collection".startswith(
        _FILTERED
    )
