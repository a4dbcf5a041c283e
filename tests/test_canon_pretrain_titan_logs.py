"""What the trainer prints, never at the price of the run."""

import logging
import subprocess
import sys
import textwrap

import pytest

from tests.support import ROOT

SCRIPT = textwrap.dedent(
    """
    import logging, os, sys
    from canon_pretrain.titan.logs import init_logging
    init_logging(0)
    if sys.argv[1:] == ["closed"]:
        sys.stdout.close()
    for k in range(3):
        logging.getLogger().info(f"line {k}")
    print("trained on", file=sys.stderr)
    """
)


def run_script(*words: str, stdout: int | str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", SCRIPT, *words]
    if isinstance(stdout, str):
        command = ["sh", "-c", f'"$@" {stdout}', "sh", *command]
        stdout = subprocess.PIPE
    return subprocess.run(
        command, cwd=ROOT, stdout=stdout, stderr=subprocess.PIPE, text=True, timeout=60
    )


@pytest.mark.parametrize(
    ("redirection", "words", "said"),
    [
        ("> /dev/full", [], "No space left on device"),  # a log file on a full disk
        (">&-", [], None),  # Python has no sys.stdout then, and print() is silent
        ("", ["closed"], "closed file"),
    ],
)
def test_a_stdout_that_takes_nothing_ends_no_run(
    redirection: str, words: list[str], said: str | None
) -> None:
    done = run_script(*words, stdout=redirection)
    assert done.returncode == 0, done.stderr
    assert done.stderr.endswith("trained on\n")
    assert done.stderr.count("stdout takes no lines") == (said is not None)
    assert said is None or said in done.stderr


def test_noise_is_left_out() -> None:
    from canon_pretrain.titan.logs import _is_news

    def record(text: str) -> logging.LogRecord:
        return logging.LogRecord("x", logging.INFO, "f", 1, text, (), None)

    assert _is_news(record("step 1/3"))
    assert not _is_news(record("[GC] Initial GC collection"))
