"""Rewrite the golden losses after an intended change: `python -m tests.golden.write`.

The commit states why they changed.
"""

import json
import tempfile
from pathlib import Path

from tests.ranks import events
from tests.support import ROOT, debug_run, train, write_data


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder, "data")
        run = Path(folder, "run")
        write_data(data)
        train(*debug_run(data, run), ranks=2)
        steps = events(run, "step")

    golden = {
        "loss": [step["loss"] for step in steps],
        "grad_norm": [step["grad_norm"] for step in steps],
    }
    path = ROOT / "tests" / "golden" / "debug_losses.json"
    path.write_text(json.dumps(golden, indent=1) + "\n")


if __name__ == "__main__":
    main()
