"""Standard streams, the encoding, usage errors, Ctrl-C while importing, and what output says."""

import errno
import os
import signal
import subprocess
import sys

import pytest

from canon_pretrain import __main__ as canon
from canon_pretrain.core import files
from canon_pretrain.core.cli import EXIT_INTERRUPTED, command, run_process
from canon_pretrain.core.errors import reason_in
from canon_pretrain.core.terminal import printable
from tests.support import HANGS_AFTER_S, ROOT, command_error, error_codes

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
        (">/dev/full", [], 0),
        ("| true", [], 0),
        (">/dev/full 2>&1", [], 0),
        (">&-", [], 0),
        ("2>&-", [], 0),
        ("<&- >&- 2>&-", [], 0),
        # of a command whose output is its result, but a reader may stop early
        (">/dev/full", ["prints"], 2),
        ("; exit $?", ["prints"], 0),
        ("", ["fails"], 2),
    ],
)
def test_output_streams(redirection, words, code, tmp_path):
    """Output that cannot be written costs no result; no control character reaches a terminal."""
    out = tmp_path / "out"
    command = ["sh", "-c", f'"$@" {redirection}', "sh", sys.executable, "-c", SCRIPT]

    done = subprocess.run(
        [*command, out, *words], cwd=ROOT, capture_output=True, timeout=HANGS_AFTER_S
    )

    assert done.returncode == code, done.stderr
    assert out.read_text() == "results"
    assert b"Traceback" not in done.stderr
    if "fails" in words:
        printed = (done.stdout + done.stderr).decode()
        assert printed.count("\x1b[31m") == 1
        assert "\u00a0end" in printed
        assert error_codes(done.stderr.decode()) == ["file.os_error"]

        # apart from the colors of rich, nothing that a terminal would interpret
        uncolored = printed.replace("\x1b[31m", "").replace("\x1b[0m", "")
        assert printable(uncolored, keep="\n\ufffd") == uncolored
        assert "\u202e" not in uncolored


@pytest.mark.parametrize(
    "words", ["canon_pretrain.train --config debug.toml --job.dump_folder", "data_prep show"]
)
def test_a_locale_that_is_not_utf8_is_refused(words, tmp_path):
    path = str(tmp_path / "caf\u00e9")
    ascii_locale = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    command = [sys.executable, "-m", *words.split(), path]

    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | ascii_locale, capture_output=True, timeout=HANGS_AFTER_S
    )

    assert done.returncode == 2
    assert error_codes(done.stderr.decode()) == ["cli.encoding"]
    assert not os.path.exists(path)


ENDING = """
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


@pytest.mark.parametrize(
    ("ending", "code", "error"),
    [("0", 0, ""), ("3", 3, ""), ("raise", 1, "ValueError: unexpected")],
)
def test_a_process_ends_as_python_would_end_it(ending, code, error, tmp_path):
    """run_process frees no modules, but loses nothing: threads, exit functions, output, code."""
    command = [sys.executable, "-c", ENDING, tmp_path / "out", ending]

    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=HANGS_AFTER_S)

    assert done.returncode == code, done.stderr
    assert done.stdout == "no newline exit function\n"
    assert (tmp_path / "out").read_text() == "thread"
    if error:
        assert error in done.stderr
    else:
        assert done.stderr == ""


@pytest.mark.parametrize(
    "words",
    [
        "run stauts",
        "run status",
        "run plot x",
        "checkpoint prune x --keep 0",
        "sample",
        "doctor --jsn",
        "eval run",
        "data build --workers x",
        "hf export",
        "completion fish",
        "sweep plan",
        "playground run",
        "synthetic score",
        "bench steps",
        "new",
    ],
)
def test_a_usage_error_has_a_code(words, capsys):
    assert command_error(capsys, canon.main, words.split()) == "cli.usage"


def test_the_version_is_printed(capsys):
    canon.main(["--version"])
    assert capsys.readouterr().out.split()[0] == "canon_pretrain"


SLOW_IMPORT = """
import sys, types
from canon_pretrain import __main__ as canon
from canon_pretrain.commands import COMMANDS, Command
COMMANDS["slow"] = Command("slow_module", "")
sys.argv[1:] = ["slow"]
canon.start()
"""
SLOW_MODULE = """
import sys, time
print("importing", flush=True)
try:
    time.sleep(60)
except BaseException:
    print("caught")
"""


def test_an_interrupt_while_importing_leaves_no_traceback(tmp_path):
    """Even if the module that is being imported would catch the exception."""
    (tmp_path / "slow_module.py").write_text(SLOW_MODULE)
    environ = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}

    # a background job of a shell, as this suite may be, ignores SIGINT, and so would its children
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    with subprocess.Popen(
        [sys.executable, "-c", SLOW_IMPORT],
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        signal.signal(signal.SIGINT, before)
        assert process.stdout.readline() == b"importing\n"
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=HANGS_AFTER_S)

    assert (process.returncode, out, err) == (EXIT_INTERRUPTED, b"", b"")


def test_an_interrupt_ends_a_process_with_its_code(monkeypatch):
    def interrupted():
        raise KeyboardInterrupt

    codes = []
    monkeypatch.setattr(os, "_exit", codes.append)
    run_process(interrupted)
    assert codes == [EXIT_INTERRUPTED]


def test_a_full_disk_names_the_file(tmp_path, monkeypatch, capsys):
    def full(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    page = tmp_path / "page.html"
    writers = (
        lambda: files.write_atomic(page, b"x"),
        lambda: files.write_json(page, {}),
        lambda: files.write_folder(tmp_path / "folder", {"page.html": b"x"}),
    )

    for write in writers:
        with pytest.raises(SystemExit), command():
            write()

        err = capsys.readouterr().err
        assert error_codes(err) == ["file.os_error"]
        assert "page.html" in err
    assert not [*tmp_path.iterdir()]


TRACEBACK = "Traceback (most recent call last):\n  File x\n"
BANNER = """torch.distributed.elastic.multiprocessing.errors.ChildFailedError: 
====
[0]:
  time      : 2026-11-28
  rank      : 1 (local_rank: 1)
"""


@pytest.mark.parametrize(
    ("output", "reason"),
    [
        (f"W1128 x\n{BANNER}", None),
        (f"error[config.x]: 33 heads\n{BANNER}", "error[config.x]: 33 heads"),
        # two ranks print at once, one after the beginning of a line
        ("[rank1]: error[a.b]: no\nload error[a.b]: no\n", "error[a.b]: no"),
        ("error[a.b]: one\nValueError: x\nerror[c.d]: two", "error[a.b]: one\nerror[c.d]: two"),
        (f"[rank1]: {TRACEBACK}[rank1]: RuntimeError: one\n{BANNER}", "RuntimeError: one"),
        (f"[rank1]: ValueError: one\n[rank0]: OSError: zero\n{BANNER}", "OSError: zero"),
        (f"{TRACEBACK}torch.OutOfMemoryError: CUDA\n{BANNER}", "torch.OutOfMemoryError: CUDA"),
        ("", None),
    ],
)
def test_the_reason_of_failed_ranks(output, reason):
    assert reason_in(output) == reason
