"""What every command prints for --help."""

import importlib

import pytest

from canon_pretrain.__main__ import main as canon

COMMANDS = (
    "canon_pretrain.new",
    "canon_pretrain.train",
    "canon_pretrain.report",
    *(f"canon_pretrain.report {name}" for name in ("status", "plot", "diff", "export", "profile")),
    "canon_pretrain.checkpoint",
    *(f"canon_pretrain.checkpoint {name}" for name in ("list", "verify", "prune")),
    "canon_pretrain.cluster.sweep",
    *(f"canon_pretrain.cluster.sweep {name}" for name in ("plan", "table", "run")),
    "canon_pretrain.boards",
    *(f"canon_pretrain.boards {name}" for name in ("plan", "run", "status")),
    "canon_pretrain.cluster.preflight",
    "canon_pretrain.cluster.doctor",
    "canon_pretrain.cluster.chain",
    "canon_pretrain.sample",
    "canon_pretrain.synthetic",
    *(f"canon_pretrain.synthetic {name}" for name in ("show", "score", "stats")),
    "canon_pretrain.hf",
    *(f"canon_pretrain.hf {name}" for name in ("export", "push", "import")),
    "canon_pretrain.bench",
    *(f"canon_pretrain.bench {name}" for name in ("step", "generate")),
    "data_prep",
    *(f"data_prep {name}" for name in ("build", "finish", "verify", "stats", "show")),
    "eval",
    *(f"eval {name}" for name in ("stage", "run", "tasks", "submit", "report", "compare")),
)


@pytest.mark.parametrize("words", COMMANDS)
def test_help(words, snapshot, monkeypatch, capsys):
    name, *command = words.split()
    # else a package with a __main__
    is_module = name.endswith(
        (".new", ".sample", ".train", ".sweep", ".preflight", ".chain", ".doctor")
    )
    module = importlib.import_module(name if is_module else f"{name}.__main__")
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setattr("sys.argv", [name, *command, "--help"])
    with pytest.raises(SystemExit) as left:
        module.main()
    printed = capsys.readouterr().out
    assert not left.value.code
    assert printed == snapshot
    assert len(printed.splitlines()) <= 60 or "--help-all" in printed


def test_canon(snapshot, capsys):
    canon([])
    assert capsys.readouterr().out == snapshot


@pytest.mark.parametrize("word", ["evl", "export", "xyzzy"])
def test_canon_suggests(word, snapshot, capsys):
    with pytest.raises(SystemExit):
        canon([word])
    assert capsys.readouterr().err == snapshot
