"""Faults for jobs of the Slurm tests; Python imports this module if it is on PYTHONPATH.

TEST_PACE        JSON file, read at each use: seconds to sleep by phase ("training": per step)
TEST_RANK_0_ON   the node of rank 0
TEST_FULL_NODE   a node with a full disk
TEST_DEAD_NODE   a node without a report in the preflight
TEST_EVAL_GATE   a file: while it exists, an evaluation waits after each task
TEST_UNIT_BYTES  size of data_prep's input groups
TEST_HELD        a folder: an input group waits while there is a file named as one of its inputs
"""

import json
import os
import shutil
import sys
import time
from collections import namedtuple
from pathlib import Path

_node = os.environ.get("SLURMD_NODENAME", "")

if {"RANK", "TEST_PACE"} <= os.environ.keys():
    from canon_pretrain.run.session import Session

    _progress = Session.progress

    def progress(self, step, phase, *rest):  # type: ignore[no-untyped-def]
        _progress(self, step, phase, *rest)
        seconds = json.loads(Path(os.environ["TEST_PACE"]).read_text())
        time.sleep(seconds.get(phase, 0))

    Session.progress = progress

if {"RANK", "TEST_EVAL_GATE"} <= os.environ.keys():
    from canon_pretrain.run.results import PartialResults

    _gate = Path(os.environ["TEST_EVAL_GATE"])
    _add = PartialResults.add

    def add(self, task, answers):  # type: ignore[no-untyped-def]
        _add(self, task, answers)
        while _gate.exists():
            time.sleep(0.1)

    PartialResults.add = add  # type: ignore[method-assign]

if "TEST_UNIT_BYTES" in os.environ:
    from data_prep import sources

    _fetch = sources.fetch

    def fetch(source, version, root, inputs, *more):  # type: ignore[no-untyped-def]
        held = Path(os.environ["TEST_HELD"])
        while any((held / Path(file.path).name).exists() for file in inputs):
            time.sleep(0.05)
        _fetch(source, version, root, inputs, *more)

    sources.INPUT_GROUP_BYTES = int(os.environ["TEST_UNIT_BYTES"])
    sources.fetch = fetch

if "TEST_RANK_0_ON" in os.environ and _node:
    # agents are numbered in the order of their addresses
    is_first = _node == os.environ["TEST_RANK_0_ON"]
    os.environ["PET_LOCAL_ADDR"] = "127.0.0.1" if is_first else "127.0.0.2"

if _node and _node == os.environ.get("TEST_FULL_NODE"):
    Usage = namedtuple("Usage", "total used free")
    shutil.disk_usage = lambda path: Usage(1 << 40, 1 << 40, 0)  # type: ignore[assignment]

if _node and _node == os.environ.get("TEST_DEAD_NODE") and sys.orig_argv[3:4] == ["node"]:
    os._exit(1)
