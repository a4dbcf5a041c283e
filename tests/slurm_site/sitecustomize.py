"""Faults for jobs of the Slurm tests: Python imports this at its start where PYTHONPATH says so.

TEST_PACE       a file with what a phase takes longer at each of its signs of life: JSON, seconds by
                phase ("training": each step); read each time
TEST_CRASH_AT   kill -9 of rank 0 after this step, in every launch
TEST_RANK_0_ON  the node whose agent comes first in the rendezvous
TEST_FULL_NODE  a node where no byte is free, as shutil.disk_usage has it
TEST_DEAD_NODE  a node that does not report to the preflight
"""

import json
import os
import shutil
import signal
import sys
import time
from collections import namedtuple
from pathlib import Path

_node = os.environ.get("SLURMD_NODENAME", "")

if "RANK" in os.environ and ("TEST_PACE" in os.environ or "TEST_CRASH_AT" in os.environ):
    from canon_pretrain.run.session import Session

    _progress = Session.progress

    def progress(self, step, phase, *rest):  # type: ignore[no-untyped-def]
        _progress(self, step, phase, *rest)
        if "TEST_PACE" in os.environ:
            time.sleep(json.loads(Path(os.environ["TEST_PACE"]).read_text()).get(phase, 0))
        if phase == "training" and step == int(os.environ.get("TEST_CRASH_AT", -1)):
            if os.environ["RANK"] == "0":
                os.kill(os.getpid(), signal.SIGKILL)

    Session.progress = progress

if "TEST_RANK_0_ON" in os.environ and _node:
    # agents are numbered in the order of their addresses
    _is_first = _node == os.environ["TEST_RANK_0_ON"]
    os.environ["PET_LOCAL_ADDR"] = "127.0.0.1" if _is_first else "127.0.0.2"

if _node and _node == os.environ.get("TEST_FULL_NODE"):
    Usage = namedtuple("Usage", "total used free")
    shutil.disk_usage = lambda path: Usage(1 << 40, 1 << 40, 0)  # type: ignore[assignment]

if _node and _node == os.environ.get("TEST_DEAD_NODE") and sys.orig_argv[3:4] == ["node"]:
    os._exit(1)
