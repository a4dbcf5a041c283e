"""What the trainer prints, never at the price of the run."""

import logging
import subprocess
import sys
import textwrap

import pytest

from tests.support import ROOT

SCRIPT = textwrap.dedent(
    """
    import logging, sys
    from canon_pretrain.core.cli import words
    from canon_pretrain.titan.logs import init_logging
    with words():
        init_logging(0)
        for k in range(3):
            logging.getLogger().info(f"line {k}")
        print("trained on", file=sys.stderr)
    """
)


@pytest.mark.parametrize(
    ("redirection", "said"),
    [
        ("> /dev/full", "No space left on device"),  # a log file on a full disk
        (">&-", None),
    ],
)
def test_a_stdout_that_takes_nothing_ends_no_run(redirection: str, said: str | None) -> None:
    command = ["sh", "-c", f'"$@" {redirection}', "sh", sys.executable, "-c", SCRIPT]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
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
