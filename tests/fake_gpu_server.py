"""Fake runs for tests: a process that has faked its GPUs, and forks a child for each run.

Words of a request: OUT.json, FAULT ("" for none), JSON of `Options`, arguments of `canon train`.
"""

import json
import os
import sys
import time
from pathlib import Path

from canon_pretrain.core.children import ForkServer, serve
from canon_pretrain.fake_gpu.record import Options, Report, report_from
from tests.support import ROOT

TIMEOUT_S = 300.0


class FakeRuns:
    """The server, and the runs that it has made."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._count = 0
        environment = os.environ | {
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(ROOT),
            "JE_ARROW_MALLOC_CONF": "background_thread:false",  # which could not be forked
        }
        self._server = ForkServer([sys.executable, "-m", "tests.fake_gpu_server"], environment)

    def run(self, *arguments: object, fault: str = "", **options: object) -> Report:
        """Return the report of a fake run, with a fault of `fake_gpu_faults` planted."""
        self._count += 1
        out = self._folder / f"{self._count}.json"
        log = out.with_suffix(".log")
        words = [str(out), fault, json.dumps(options), *map(str, arguments)]
        with log.open("wb") as output:
            child = self._server.start(words, output)
        assert child is not None
        deadline = time.monotonic() + TIMEOUT_S
        while child.poll() is None:
            assert time.monotonic() < deadline, log.read_text()[-2000:]
            time.sleep(0.05)
        assert out.exists(), log.read_text()[-3000:]
        return report_from(json.loads(out.read_text()))

    def close(self) -> None:
        self._server.close()


def main() -> None:
    from canon_pretrain.fake_gpu import hooks

    hooks.load(hooks.build())  # before torch is imported
    from canon_pretrain.fake_gpu.run import FakeNode

    node = FakeNode("h100")
    # it imports the trainer, which must find what the node has replaced
    from tests import fake_gpu_faults

    def run(words: list[str]) -> None:
        out, fault, options, *arguments = words
        if fault:
            getattr(fake_gpu_faults, fault)()
        report = node.run(arguments, Options(**json.loads(options)))
        unfinished = Path(out).with_suffix(".part")
        unfinished.write_text(json.dumps(report, default=vars))
        unfinished.rename(out)
        os._exit(0)

    serve(run)


if __name__ == "__main__":
    main()
