"""What every command prints for --help."""

import importlib

import pytest

from canon_pretrain.__main__ import main as canon
from canon_pretrain.commands import COMMANDS, Group

# not in the table: programs of slurm/
SCRIPTS = ("canon_pretrain.cluster.preflight", "canon_pretrain.cluster.chain")


def stages():
    """Yield each command, and those of groups, as they are typed."""
    for name, stage in COMMANDS.items():
        yield name
        if isinstance(stage, Group):
            for command in stage.commands:
                yield f"{name} {command}"


def help_of(main, command, monkeypatch, capsys):
    """Return what --help prints at 100 columns."""
    monkeypatch.setenv("COLUMNS", "100")
    with pytest.raises(SystemExit) as exit_info:
        main([*command, "--help"])
    assert not exit_info.value.code
    return capsys.readouterr().out


@pytest.mark.parametrize("stage", [*stages()])
def test_help(stage, snapshot, monkeypatch, capsys):
    printed = help_of(canon, stage.split(), monkeypatch, capsys)
    assert printed == snapshot
    assert len(printed.splitlines()) <= 60 or "--help-all" in printed


@pytest.mark.parametrize("module", SCRIPTS)
def test_help_of_scripts(module, snapshot, monkeypatch, capsys):
    main = importlib.import_module(module).main
    assert help_of(main, [], monkeypatch, capsys) == snapshot


def test_canon(snapshot, capsys):
    canon([])
    assert capsys.readouterr().out == snapshot


@pytest.mark.parametrize("word", ["evl", "export", "xyzzy"])
def test_canon_suggests(word, snapshot, capsys):
    with pytest.raises(SystemExit):
        canon([word])
    assert capsys.readouterr().err == snapshot
