"""Standard streams of commands that can fail or hold control characters; the encoding."""

import os
import subprocess
import sys

import pytest

from canon_pretrain.core.terminal import printable
from tests.support import ROOT, error_codes

SCRIPT = r"""
import logging, os, sys
from canon_pretrain.core.cli import command
from canon_pretrain.core.terminal import Console
with command(prints="prints" in sys.argv), open(sys.argv[1], "w") as file:
    print("plain \x1b[2J\x9b2J\x07\ud800\u202e\u00a0end", flush=True)
    os.system("echo more")
    console = Console(force_terminal=True, markup=False, highlight=False)
    console.print("rich \x1b]0;title\x07", style="red")
    logging.warning("log \x1b[31m")
    file.write("results")
    print("x" * 100_000)
    if "fails" in sys.argv:
        raise OSError(28, "No space left on device", "some\x1b[2Jfile")
"""


@pytest.mark.parametrize(
    ("redirection", "words", "code"),
    [
        *((redirection, [], 0) for redirection in (">/dev/full", "| true", ">/dev/full 2>&1")),
        # closed: the next file to be opened must not get the descriptor, and the output
        (">&- 2>&-", [], 0),
        # of a command whose output is its result, but a reader may stop early
        *((">/dev/full", ["prints"], 2), ("; exit $?", ["prints"], 0), (">&-", ["prints"], 0)),
        ("", ["fails"], 2),
    ],
)
def test_output_streams(redirection, words, code, tmp_path):
    """Output that cannot be written costs no result; no control character reaches a terminal."""
    out = tmp_path / "out"
    command = ["sh", "-c", f'"$@" {redirection}', "sh", sys.executable, "-c", SCRIPT]
    done = subprocess.run([*command, out, *words], cwd=ROOT, capture_output=True, timeout=60)
    assert done.returncode == code, done.stderr
    assert out.read_text() == "results" and b"Traceback" not in done.stderr
    if "fails" in words:
        printed = (done.stdout + done.stderr).decode()
        ours = printed.replace("\x1b[31m", "").replace("\x1b[0m", "")
        assert printable(ours, keep="\n\ufffd") == ours and "\u202e" not in ours
        assert printed.count("\x1b[31m") == 1 and "\u00a0end" in printed
        assert error_codes(done.stderr.decode()) == ["file.os_error"]


@pytest.mark.parametrize(
    "words", ["canon_pretrain.train --config debug.toml --job.dump_folder", "data_prep show"]
)
def test_a_locale_that_is_not_utf8_is_refused(words, tmp_path):
    path = str(tmp_path / "caf\u00e9")
    other = os.environ | {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    command = [sys.executable, "-m", *words.split(), path]
    done = subprocess.run(command, cwd=ROOT, env=other, capture_output=True, timeout=60)
    assert done.returncode == 2 and not os.path.exists(path)
    assert error_codes(done.stderr.decode()) == ["cli.encoding"]


def test_a_process_ends_as_python_would_end_it(tmp_path):
    """run_process frees no modules, but loses nothing: threads, exit functions, output, code."""
    script = """
import atexit, os, sys, threading, time
from canon_pretrain.core.cli import run_process
class Kept:
    def __del__(self):
        os.write(2, b"freed")
sys.modules["kept"] = Kept()
def late():
    time.sleep(0.3)
    open(sys.argv[1], "w").write("thread")
def main():
    atexit.register(print, "exit function")
    threading.Thread(target=late).start()
    sys.stdout.write("no newline ")
    if sys.argv[2] == "raise":
        raise ValueError("unexpected")
    raise SystemExit(int(sys.argv[2]))
run_process(main)
"""
    for given, code, error in (("0", 0, ""), ("3", 3, ""), ("raise", 1, "ValueError: unexpected")):
        words = [sys.executable, "-c", script, tmp_path / given, given]
        done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=60)
        assert done.returncode == code and error in done.stderr, done.stderr
        assert done.stdout == "no newline exit function\n"
        assert (tmp_path / given).read_text() == "thread"
        assert error or done.stderr == ""
