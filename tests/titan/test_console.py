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

FIELDS: dict[str, Any] = {"step": 240, "loss": 3.25, "grad_norm": 0.837, "lr": 2.52e-3}
FIELDS |= {"tokens_per_second": 5047.4, "seconds_per_step": 15.0}


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
    ends: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), child)
    environment = os.environ | {"TERM": "xterm-256color"}
    process = subprocess.Popen([sys.executable, "-c", script], env=environment, **ends)
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
    plain = re.sub(r"\x1b\[[\d;]*[A-Za-z]", "", output).replace("\r", "")
    assert "printed\n" in plain and "  logged\n" in plain
    assert plain.index("logged") < plain.rindex("step 7/500")  # the view is below the output
    if code == 0:
        assert plain.rstrip().endswith("after") and "step 8/500" in plain
