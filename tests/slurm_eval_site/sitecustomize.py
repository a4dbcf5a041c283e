"""Faults for evaluation jobs of the Slurm tests: Python imports this at its start.

TEST_EVAL_GATE   a file: while it exists, a job waits after each answered task
TEST_PACE        a file with the seconds that each training step takes longer; read at each step
"""

import os
import time
from pathlib import Path

if "RANK" in os.environ and "TEST_EVAL_GATE" in os.environ:
    from canon_pretrain.run.results import Unfinished

    _gate, _add = Path(os.environ["TEST_EVAL_GATE"]), Unfinished.add

    def add(self, task, answers):  # type: ignore[no-untyped-def]
        _add(self, task, answers)
        while _gate.exists():
            time.sleep(0.1)

    Unfinished.add = add  # type: ignore[method-assign]

if "RANK" in os.environ and "TEST_PACE" in os.environ:
    from canon_pretrain.run.session import Session

    _progress = Session.progress

    def progress(self, step, phase, *rest):  # type: ignore[no-untyped-def]
        _progress(self, step, phase, *rest)
        if phase == "training":
            time.sleep(float(Path(os.environ["TEST_PACE"]).read_text()))

    Session.progress = progress  # type: ignore[method-assign]
