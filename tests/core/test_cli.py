"""What commands print: words that end nothing and act on no terminal; the encoding."""

import os
import subprocess
import sys

import pytest

from canon_pretrain.core.terminal import printable
from tests.support import ROOT

SCRIPT = r"""
import logging, os, sys
from pathlib import Path
from canon_pretrain.core.cli import command
from canon_pretrain.core.terminal import Console
with command(prints="prints" in sys.argv):
    print("plain \x1b[2J\x9b2J\x07\ud800\u202e\u00a0end")
    console = Console(force_terminal=True, markup=False, highlight=False)
    console.print("rich \x1b]0;title\x07", style="red")
    logging.warning("log \x1b[31m")
    Path(sys.argv[1]).write_text("results")
    print("x" * 100_000)
    if "fails" in sys.argv:
        raise OSError(28, "No space left on device", "some\x1b[2Jfile")
"""


def run(redirection: str, *words: str) -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-c", SCRIPT, *words]
    command = ["sh", "-c", f'"$@" {redirection}', "sh", *command]
    return subprocess.run(command, cwd=ROOT, capture_output=True, timeout=60)


@pytest.mark.parametrize("redirection", [">/dev/full", ">&- 2>&-", "| true", ">/dev/full 2>&1"])
def test_words_that_nobody_takes_cost_no_result(tmp_path, redirection):
    """Issue 17, item 24: results first, words after; exit code 0."""
    out = tmp_path / "out"
    done = run(redirection, str(out))
    assert done.returncode == 0, done.stderr
    assert out.read_text() == "results" and b"Traceback" not in done.stderr


@pytest.mark.parametrize(("redirection", "code"), [(">/dev/full", 2), ("; exit $?", 0), (">&-", 0)])
def test_a_view_that_is_lost_is_an_error(tmp_path, redirection, code):
    """Issue 17, item 24: unless its reader has seen enough."""
    assert run(redirection, str(tmp_path / "out"), "prints").returncode == code


def test_no_control_character_reaches_a_terminal(tmp_path):
    """Issue 17, item 23: from print, rich, logging and errors alike; rich's own colors stay."""
    done = run("", str(tmp_path / "out"), "fails")
    assert done.returncode == 2
    said = (done.stdout + done.stderr).decode()
    own = said.replace("\x1b[31m", "").replace("\x1b[0m", "")
    assert printable(own, keep="\n\ufffd") == own and "\u202e" not in own
    assert said.count("\x1b[31m") == 1 and "\u00a0end" in said
    assert b"error: some\xef\xbf\xbd[2Jfile: No space left on device" in done.stderr


def test_the_descriptor_of_a_closed_stdout_is_no_files(tmp_path):
    """Issue 17, item 24: the next file to be opened would get the words."""
    script = (
        "import os, sys\nfrom canon_pretrain.core.cli import words\nwith words():\n"
        "    file = open(sys.argv[1], 'w')\n    print('words', flush=True)\n"
        "    os.system('echo more')\n    file.write('content')"
    )
    command = ["sh", "-c", '"$@" >&-', "sh", sys.executable, "-c", script, str(tmp_path / "out")]
    subprocess.run(command, cwd=ROOT, check=True, timeout=60)
    assert (tmp_path / "out").read_text() == "content"


@pytest.mark.parametrize(
    "words",
    ["canon_pretrain.train --config debug.toml --job.dump_folder", "data_prep show"],
)
def test_a_locale_that_is_not_utf8_is_refused(words, tmp_path):
    """Issue 17, item 25: paths with an e acute ended in tracebacks of ours and of torch."""
    path = str(tmp_path / "caf\u00e9")
    other = os.environ | {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    command = [sys.executable, "-m", *words.split(), path]
    done = subprocess.run(command, cwd=ROOT, env=other, capture_output=True, timeout=60)
    assert done.returncode == 2 and not os.path.exists(path)
    assert b"error: " in done.stderr and b"PYTHONUTF8=1" in done.stderr
    assert b"Traceback" not in done.stderr
