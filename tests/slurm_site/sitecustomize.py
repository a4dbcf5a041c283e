"""Faults for jobs of the Slurm tests: Python imports this at its start where PYTHONPATH says so.

TEST_PACE       a file with the seconds that each training step takes longer; read at each step
TEST_CRASH_AT   kill -9 of rank 0 after this step, in every launch
TEST_BAD_NODE   a node where no byte is free, for shutil.disk_usage
"""

import os
import shutil
import signal
import time
from collections import namedtuple
from pathlib import Path

if "RANK" in os.environ and ("TEST_PACE" in os.environ or "TEST_CRASH_AT" in os.environ):
    from canon_pretrain.run.session import Session

    _progress = Session.progress

    def progress(self, step, phase, *rest):  # type: ignore[no-untyped-def]
        _progress(self, step, phase, *rest)
        if phase != "training":
            return
        if "TEST_PACE" in os.environ:
            time.sleep(float(Path(os.environ["TEST_PACE"]).read_text() or 0))
        if step == int(os.environ.get("TEST_CRASH_AT", -1)) and os.environ["RANK"] == "0":
            os.kill(os.getpid(), signal.SIGKILL)

    Session.progress = progress

if os.environ.get("TEST_BAD_NODE", "-") == os.environ.get("SLURMD_NODENAME"):
    Usage = namedtuple("Usage", "total used free")
    shutil.disk_usage = lambda path: Usage(1 << 40, 1 << 40, 0)  # type: ignore[assignment]
