"""The command line: every command explains itself, and none loads what another needs."""

import pytest

from data_prep.__main__ import COMMANDS, main


@pytest.mark.parametrize("name", [*COMMANDS, "biuld"])
def test_every_command_has_help(name, capsys):
    with pytest.raises(SystemExit, match="0" if name in COMMANDS else "2"):
        main([name, "--help"])
    assert (f"usage: python -m data_prep {name}" in capsys.readouterr().out) == (name in COMMANDS)
