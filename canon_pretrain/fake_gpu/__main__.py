"""The process of a fake run: `python -m canon_pretrain.fake_gpu OPTIONS ARGUMENTS...`.

OPTIONS: JSON of `record.Options`; ARGUMENTS: those of `canon train`. The report is written as JSON
to the file that the environment variable CANON_FAKE_REPORT names.
"""

import json
import os
import sys
from pathlib import Path

from canon_pretrain.core.cli import run_process
from canon_pretrain.core.errors import UserError, exit_with
from canon_pretrain.fake_gpu import hooks
from canon_pretrain.fake_gpu.record import REPORT, Options


def main(argv: list[str] | None = None) -> None:
    """Run, and write the report. Exits with code 2 on bad input."""
    encoded, *arguments = sys.argv[1:] if argv is None else argv
    try:
        hooks.load(hooks.build())  # before torch is imported
        from canon_pretrain.fake_gpu import run

        options = Options(**json.loads(encoded))
        report = run.FakeNode(options.gpu).run(arguments, options)
    except UserError as error:
        exit_with(error)
    Path(os.environ[REPORT]).write_text(json.dumps(report, default=vars))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # the modes are never left, and threads may wait for a device


if __name__ == "__main__":
    run_process(main)
