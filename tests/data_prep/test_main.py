"""The command line: every command explains itself, and none loads what another needs."""

import subprocess
import sys

import pytest

from data_prep.__main__ import COMMANDS, main
from tests.support import ROOT


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main([name, "--help"])
    printed = " ".join(capsys.readouterr().out.split())
    assert f"usage: python -m data_prep {name}" in printed
    assert COMMANDS[name][1:40] in printed


def test_an_unknown_command_is_refused() -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["biuld"])


def test_a_worker_loads_no_other_command() -> None:
    """A spawned worker imports the main module before it imports what it runs."""
    script = "import sys, data_prep.__main__, data_prep.units\n"
    script += "print([m for m in ('torch', 'plotly', 'pyarrow', 'data_prep.stats') "
    script += "if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "[]\n", done
