"""The command line: every command explains itself, and none loads what another needs."""

import subprocess
import sys

import pytest

from data_prep.__main__ import COMMANDS, main
from tests.support import ROOT


@pytest.mark.parametrize("name", [*COMMANDS, "biuld"])
def test_every_command_has_help(name, capsys):
    with pytest.raises(SystemExit, match="0" if name in COMMANDS else "2"):
        main([name, "--help"])
    assert (f"usage: python -m data_prep {name}" in capsys.readouterr().out) == (name in COMMANDS)


def test_a_worker_loads_no_other_command():
    """A spawned worker imports the main module before it imports what it runs."""
    script = "import sys, data_prep.__main__, data_prep.units\n"
    script += "print({'torch', 'plotly', 'pyarrow', 'data_prep.stats'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "set()\n", done
