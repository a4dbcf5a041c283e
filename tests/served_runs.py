"""A run whose answers are text, and `canon serve` on it as a process."""

import contextlib
import json
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from tests.commands import Command
from tests.data_folders import make_data_folder, sentence
from tests.hf_exports import plant_run
from tests.support import HANGS_AFTER_S
from tests.variants import build, variant

NO_TEXT = 3 + 256
"""<unk>, <s>, </s> and the bytes come first in the vocabulary."""


def write_text_run(folder: Path, name: str, max_seq_len: int, **sizes: int) -> Path:
    """Write a run of a variant with positions for `max_seq_len` tokens; its answers are words."""
    data = folder / "data"
    make_data_folder(data, [[sentence(seed, 60) for seed in range(9)]], [sentence(9, 60)])
    model = build(replace(variant(name), vocab_size=300, max_seq_len=max_seq_len, **sizes))
    with torch.no_grad():
        model.output.weight[:NO_TEXT] = 0.0
    plant_run(folder / "run", model, data=data)
    return folder / "run"


@dataclass
class Served:
    """A running server."""

    process: Command
    url: str
    stdout: Path
    stderr: Path

    def health(self) -> dict[str, Any]:
        with urllib.request.urlopen(f"{self.url}/health", timeout=HANGS_AFTER_S) as response:
            return json.loads(response.read())

    def wait_until_idle(self) -> None:
        """Wait until no row is in use and nothing waits."""
        deadline = time.monotonic() + HANGS_AFTER_S
        while (load := self.health()) and load["rows"] + load["waiting"]:
            assert time.monotonic() < deadline, load
            time.sleep(0.05)


@contextlib.contextmanager
def serve(run: Path, *options: object) -> Iterator[Served]:
    """Serve `run` at a free port; end the server after the block if it still runs."""
    stdout, stderr = run.parent / "serve.out", run.parent / "serve.err"
    stdout.write_text("")
    process = Command(
        "canon", "serve", run, "--port", 0, *options, stdout=stdout, stderr=stderr, interrupts=True
    )
    deadline = time.monotonic() + HANGS_AFTER_S
    try:
        while "http://" not in stdout.read_text():
            assert process.poll() is None, stderr.read_text()
            assert time.monotonic() < deadline
            time.sleep(0.05)
        url = stdout.read_text().split(" at ")[1].split("/v1")[0]
        yield Served(process, url, stdout, stderr)
    finally:
        process.kill()
        process.wait()
