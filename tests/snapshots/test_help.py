"""What every command prints for --help."""

import importlib

import pytest

from canon_pretrain.__main__ import main as canon
from canon_pretrain.commands import COMMANDS, Group

# not in the table: programs of slurm/
SCRIPTS = ("canon_pretrain.cluster.preflight", "canon_pretrain.cluster.chain")


def stages():
    for name, stage in COMMANDS.items():
        yield name
        for command in stage.commands if isinstance(stage, Group) else ():
            yield f"{name} {command}"


def help_of(main, words, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "100")
    with pytest.raises(SystemExit) as left:
        main([*words, "--help"])
    assert not left.value.code
    return capsys.readouterr().out


@pytest.mark.parametrize("words", [*stages()])
def test_help(words, snapshot, monkeypatch, capsys):
    printed = help_of(canon, words.split(), monkeypatch, capsys)
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
