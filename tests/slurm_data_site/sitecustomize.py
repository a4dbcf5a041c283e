"""Small units for the jobs of data_prep's Slurm tests, which wait where a test wants them to.

TEST_UNIT_BYTES   the bytes of inputs that end a unit
TEST_HELD         a folder: a unit is not built while a file there has the name of one of its inputs
"""

import os
import time
from pathlib import Path

if "TEST_UNIT_BYTES" in os.environ:
    from data_prep import sources

    _fetch = sources.fetch

    def fetch(source, version, root, inputs, *more):  # type: ignore[no-untyped-def]
        while any(Path(os.environ["TEST_HELD"], Path(each.path).name).exists() for each in inputs):
            time.sleep(0.05)
        _fetch(source, version, root, inputs, *more)

    sources.UNIT_BYTES = int(os.environ["TEST_UNIT_BYTES"])
    sources.fetch = fetch
