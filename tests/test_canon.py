"""The command `canon`: its table, what it starts, and the shells' completions of it."""

import importlib.util
import json
import shutil
import subprocess
import sys
import tomllib

import pytest

from canon_pretrain.__main__ import main, start
from canon_pretrain.commands import COMMANDS, Group
from tests.support import ROOT, command_error

DEBUG = "train_configs/debug.toml"
GROUPS = {name: stage for name, stage in COMMANDS.items() if isinstance(stage, Group)}


def test_entry_points_and_stages_exist():
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert scripts["canon"] == f"{start.__module__}:{start.__name__}"
    for script in scripts.values():
        module = script.partition(":")[0]
        assert importlib.util.find_spec(module), module


def run_python(code):
    """Run code in a process of its own, and return the lines that it prints."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    return done.stdout.splitlines()


TABLE = """
import json, sys
from canon_pretrain.__main__ import main
main([])
print(json.dumps([*sys.modules]))
"""


def test_the_table_fits_a_terminal_and_imports_no_stage():
    *lines, loaded = run_python(TABLE)

    assert [line.split()[0] for line in lines if line.startswith("  ")] == [*COMMANDS]
    assert max(map(len, lines)) <= 80

    modules = {*json.loads(loaded)}
    ours = {name for name in modules if name.startswith(("canon_pretrain.", "eval"))}
    assert {name for name in ours if name.count(".") == 1} <= {
        "canon_pretrain.core",
        "canon_pretrain.__main__",
        "canon_pretrain.commands",
    }
    assert not {"torch", "numpy", "pydantic"} & modules


@pytest.mark.parametrize(
    ("words", "exit_code"),
    [
        ("train --help", 0),
        ("train --typo", 2),
        (f"train --config {DEBUG} --model.dims 3", 2),
        ("eval run --help", 0),
    ],
)
def test_help_and_typos_need_no_torch(words, exit_code):
    code = f"""
import sys, time
from canon_pretrain.__main__ import main
try:
    main({words.split()})
except SystemExit as left:
    print([left.code, "torch" in sys.modules, time.process_time() < 1.0])
"""
    assert run_python(code)[-1] == str([exit_code, False, True])


@pytest.mark.parametrize("word", ["evl", "--bogus"])
def test_an_unknown_word_is_an_error(word, capsys):
    assert command_error(capsys, main, [word]) == "cli.unknown_stage"


def test_a_stage_gets_the_rest_of_the_words(capsys, tmp_path):
    words = ["checkpoint", "list", str(tmp_path)]
    assert command_error(capsys, main, words) == "checkpoint.none"


@pytest.mark.parametrize("name", GROUPS)
def test_a_stage_without_its_command_prints_help(name, capsys):
    with pytest.raises(SystemExit) as left:
        main([name])
    output = capsys.readouterr()
    assert (left.value.code, output.out) == (2, "")
    assert "--help" in output.err
    assert "required" not in output.err


@pytest.mark.parametrize("name", ["data", "run", "checkpoint", "eval", "hf", "sweep"])
def test_help_names_what_was_typed(name, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["/usr/bin/canon", name, "--help"])
    with pytest.raises(SystemExit):
        main()
    assert capsys.readouterr().out.startswith(f"usage: canon {name} ")


# arguments: the script of `canon completion bash`, then the words of the line
COMPLETE = """
source "$1"
shift
COMP_WORDS=("$@")
COMP_CWORD=$(($# - 1))
name=$(complete -p canon)
name=${name##*-F }
${name% canon}
printf "%s\\n" "${COMPREPLY[@]}"
"""


@pytest.fixture(scope="module")
def bash(tmp_path_factory):
    """Return a function from words to what bash completes the last of them to."""
    script = tmp_path_factory.mktemp("completion") / "canon.bash"
    command = [sys.executable, "-m", "canon_pretrain", "completion", "bash"]
    with script.open("w") as out:
        subprocess.run(command, stdout=out, check=True, cwd=ROOT)

    def complete(*words):
        command = ["bash", "--norc", "-c", COMPLETE, "bash", script, "canon", *words]
        done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
        return done.stdout.split()

    return complete


@pytest.mark.system
def test_bash_completes_stages_and_commands(bash):
    assert bash("") == [*COMMANDS]
    assert bash("che") == ["check", "checkpoint"]
    for name, group in GROUPS.items():
        shown = {word for word, command in group.commands.items() if not command.is_hidden}
        assert {*bash(name, "")} == shown, name


@pytest.mark.system
@pytest.mark.parametrize(
    "words, expected",
    [
        ("data build --sou", ["--source"]),
        ("data build --files train_configs/quick", ["train_configs/quickstart.toml"]),
        ("eval run --dtype ", ["auto", "float32", "bfloat16"]),
        ("eval compare train_c", ["train_configs"]),
        ("hf export outputs --dt", ["--dtype"]),
        ("bench step --js", ["--json"]),
        ("checkpoint prune outputs --dry", ["--dry-run"]),
        ("train --config train_configs/nope_c", ["train_configs/nope_canon.toml"]),
        ("train --dry", ["--dry-run"]),
        ("train --model.canon_se", ["--model.canon_set"]),
        ("train --model.mixer g", ["gla", "gated_deltanet"]),
        ("train --lr_scheduler.decay_type ", ["linear", "sqrt", "cosine"]),
        ("train --compile.no_e", ["--compile.no_enable"]),
        ("train --parallelism.tensor", []),
        ("train --training.steps train_c", []),
    ],
)
def test_bash_completes_options_values_and_files(bash, words, expected):
    assert bash(*words.split(" ")) == expected


@pytest.mark.system
@pytest.mark.skipif(not shutil.which("zsh"), reason="needs zsh")
def test_zsh_reads_its_script(tmp_path):
    command = [sys.executable, "-m", "canon_pretrain", "completion", "zsh"]
    script = subprocess.run(command, capture_output=True, check=True, cwd=ROOT).stdout
    (tmp_path / "_canon").write_bytes(script)
    assert script.startswith(b"#compdef canon\n")
    subprocess.run(["zsh", "-f", "-n", tmp_path / "_canon"], check=True)
