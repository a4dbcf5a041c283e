"""Shared helpers: token streams, expected errors, and the trainer as a user starts it."""

import contextlib
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from canon_pretrain.__main__ import main as canon
from canon_pretrain.core.errors import UserError
from canon_pretrain.data.shard_writer import write_shards

ROOT = Path(__file__).resolve().parent.parent
VOCAB_SIZE = 512
EOS_ID = 2
HANGS_AFTER_S = 400
"""A process that still runs then hangs: no test needs as long on a slow, busy machine either."""


def canon_stage(*stage: str) -> Callable[[Sequence[str]], None]:
    """Return the function that runs `canon STAGE` with more words."""
    return lambda words: canon([*stage, *map(str, words)])


@contextlib.contextmanager
def refused(
    code: str, *, kind: type[UserError] = UserError, **fields: object
) -> Iterator[pytest.ExceptionInfo[UserError]]:
    """Expect a UserError of `kind` with `code`, and `fields` among its fields, in the block."""
    with pytest.raises(kind) as caught:
        yield caught
    assert (caught.value.code, caught.value.fields | fields) == (code, caught.value.fields)


def error_codes(stderr: str) -> list[str]:
    """Return the codes of the errors that a command printed."""
    return re.findall(r"^error\[([\w.]+)\]: ", stderr, re.MULTILINE)


def command_error(capture: Any, command: Callable[..., object], *arguments: object) -> str:
    """Call a command that ends with exit code 2; return the code of its one error.

    `capture` is pytest's capsys or capfd.
    """
    capture.readouterr()
    with pytest.raises(SystemExit) as left:
        command(*arguments)
    assert left.value.code == 2
    (code,) = error_codes(capture.readouterr().err)
    return code


def selected(request: pytest.FixtureRequest, parameter: str) -> list[Any]:
    """Return a parameter's values in the selected tests of the file that use this fixture."""
    values = []
    for test in request.session.items:
        assert isinstance(test, pytest.Function)
        if test.path == request.path and request.fixturename in test.fixturenames:
            parameters = test.callspec.params if hasattr(test, "callspec") else {}
            if parameter in parameters:
                values.append(parameters[parameter])
    return values


def wait_until(condition: Callable[[], bool], timeout_s: float = HANGS_AFTER_S) -> None:
    """Poll until `condition()` is true."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "timeout"
        time.sleep(0.01)


def is_running(pid: int) -> bool:
    """Return whether a process exists and is no zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


def token_documents(seed: int, count: int, length: int) -> list[np.ndarray]:
    """Return `count` learnable documents: each id follows from the last, with some noise.

    Only NumPy's raw Philox words are used, which never change between versions.
    """
    words = np.random.Philox(key=seed).random_raw(count * length).astype(np.uint64)
    noise = (words >> np.uint64(32)) % np.uint64(7)
    documents = []
    for k in range(count):
        ids = [3 + int(words[k * length]) % (VOCAB_SIZE - 3)]
        for step in noise[k * length + 1 : (k + 1) * length - 1]:
            ids.append(3 + (ids[-1] * 5 + int(step)) % (VOCAB_SIZE - 3))
        documents.append(np.array([*ids, EOS_ID]))
    return documents


def write_split(
    folder: Path, seed: int, count: int, length: int = 200, bytes_per_token: int = 3, **more: Any
) -> None:
    """Write the shards of `count` documents of vocab_size 512, as data_prep does."""
    num_bytes = [bytes_per_token * length] * count
    options: dict[str, Any] = {"vocab_size": VOCAB_SIZE, "eos_id": EOS_ID, "num_bytes": num_bytes}
    write_shards(folder, token_documents(seed, count, length), **options | more)


def write_data(folder: Path) -> None:
    """Write `folder`/train and `folder`/validation."""
    write_split(folder / "train", 1, 100)
    write_split(folder / "validation", 2, 8)


def debug_run(data: Path, folder: Path) -> list[object]:
    """Return the command line of the debug experiment on `data` into `folder`."""
    config = ROOT / "train_configs" / "debug.toml"
    return ["--config", config, "--data.path", data, "--job.dump_folder", folder]


def train(
    *arguments: object,
    ranks: int | None = None,
    check: bool = True,
    on_gpu: bool = False,
    timeout: float = HANGS_AFTER_S,
) -> subprocess.CompletedProcess[str]:
    """Run `python -m canon_pretrain.train`, or torchrun if `ranks` is given.

    With `check`, a failure fails the test and shows the output.
    """
    launch = [sys.executable, "-m"]
    if ranks is not None:
        # a free port per launch, since tests may run in parallel
        launch += ["torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "-m"]
    command = [*launch, "canon_pretrain.train", *map(str, arguments)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    if not on_gpu:
        # use the CPU on machines with GPUs too, which may be fewer than the ranks
        environment["CUDA_VISIBLE_DEVICES"] = ""
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=timeout
    )
    if check and done.returncode:
        pytest.fail(f"{' '.join(command)}\n{done.stdout}\n{done.stderr}")
    return done
