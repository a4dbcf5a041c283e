"""The trainer's ranks as processes, forked from a server that has imported torch and the trainer.

A rank calls `before(rank)` first, a function that patches what a test breaks.
"""

import contextlib
import os
import signal
import sys
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

from canon_pretrain.run.folder import RunFolder
from canon_pretrain.run.log import read_log
from canon_pretrain.run.status import Status, read_status
from tests.commands import fork_server
from tests.ports import free_port
from tests.support import error_codes

TIMEOUT_S = 120.0
Before = Callable[..., None] | tuple[Any, ...] | None
"""What a rank runs first: a function of its rank, or that and further arguments."""


@dataclass(frozen=True)
class Ended:
    """Exit codes of a launch's ranks (-9 after a kill -9), and all their output."""

    codes: list[int]
    output: str

    @property
    def succeeded(self) -> bool:
        return not any(self.codes)


class Launch:
    """`ranks` processes that run `canon_pretrain.train.main(arguments)`."""

    def __init__(
        self,
        *arguments: object,
        output: Path,
        ranks: int = 2,
        before: Before = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        port = free_port()
        output.mkdir(parents=True, exist_ok=True)
        number = len(list(output.glob("launch-*-rank-0.txt")))
        self._outputs = [output / f"launch-{number}-rank-{rank}.txt" for rank in range(ranks)]
        self.processes: list[BaseProcess] = []
        for rank in range(ranks):
            variables = dict.fromkeys(("RANK", "LOCAL_RANK"), str(rank))
            variables |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(ranks))
            variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            variables |= environment or {}
            words, out = list(map(str, arguments)), self._outputs[rank]
            process = fork_server.Process(target=_rank, args=(words, out, variables, before))
            process.start()
            self.processes.append(process)

    @property
    def pids(self) -> list[int]:
        return [process.pid or 0 for process in self.processes]

    def send(self, number: signal.Signals, ranks: list[int] | None = None) -> None:
        """Send a signal to those of these ranks (default: all) that have not ended."""
        for rank, process in enumerate(self.processes):
            if process.is_alive() and (ranks is None or rank in ranks):
                with contextlib.suppress(ProcessLookupError):  # it has just ended
                    os.kill(self.pids[rank], number)

    def kill(self, ranks: list[int] | None = None) -> None:
        """kill -9."""
        self.send(signal.SIGKILL, ranks)

    def wait_for(self, condition: Callable[[], bool], timeout_s: float = TIMEOUT_S) -> None:
        """Wait for `condition()`; fail the test if a rank ends before, or on timeout."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            alive = all(process.is_alive() for process in self.processes)
            if not alive or time.monotonic() > deadline:
                self.kill()
                pytest.fail(f"the condition was not met:\n{self.text()}")
            time.sleep(0.01)

    def wait(self, timeout_s: float = TIMEOUT_S) -> Ended:
        """Wait for all ranks; as torchrun: SIGTERM once one failed, SIGKILL 5 s later."""
        deadline = time.monotonic() + timeout_s
        failed_at = None
        while any(process.is_alive() for process in self.processes):
            now = time.monotonic()
            if failed_at is None and any(process.exitcode for process in self.processes):
                failed_at = now
                self.send(signal.SIGTERM)
            if now > deadline or failed_at is not None and now > failed_at + 5:
                self.kill()
            time.sleep(0.01)
        for process in self.processes:
            process.join()
        return Ended([process.exitcode or 0 for process in self.processes], self.text())

    def text(self) -> str:
        return "".join(path.read_text(errors="replace") for path in self._outputs if path.exists())


def launch(*arguments: object, output: Path, check: bool = True, **options: Any) -> Ended:
    """Start a launch and wait for its end; with `check`, a failure fails the test."""
    ended = Launch(*arguments, output=output, **options).wait()
    if check and not ended.succeeded:
        pytest.fail(f"exit codes {ended.codes}\n{ended.output}")
    return ended


def assert_refused(ended: Ended, code: str) -> None:
    """Check for exit code 2 and one error with `code`; a SIGTERM may hit ranks as they exit."""
    assert 2 in ended.codes and {*ended.codes} <= {2, -signal.SIGTERM}, ended
    assert error_codes(ended.output) == [code] and "Traceback" not in ended.output, ended


def events(run: Path, *names: str) -> list[dict[str, Any]]:
    """Return the events with these names (none: all) in a run's log, without superseded steps."""
    found = read_log(RunFolder(run).log_file)
    return [event for event in found if event["event"] in names or not names]


def status(run: Path) -> Status:
    """Read the status.json of a run."""
    found = read_status(RunFolder(run).status_file)
    assert found is not None
    return found


def assert_same_run(run: Path, other: Path, *, step: int) -> None:
    """Check that both ran to `step` with bitwise equal losses, norms, data and state."""
    names = ("step", "loss", "max_loss", "grad_norm", "lr", "tokens", "data_digests")
    mine, theirs = ([[e[n] for n in names] for e in events(r, "step")] for r in (run, other))
    assert [fields[0] for fields in mine] == list(range(1, step + 1))
    assert mine == theirs[:step]
    one, two = (whole_state(folder / "checkpoint" / f"step-{step}") for folder in (run, other))
    assert any(name.startswith("optimizer.") for name in one)
    assert differences(one, two) == []


def logged_step(folder: Path) -> int:
    """Return the newest step in a run's log, 0 without one."""
    if not RunFolder(folder).log_file.exists():
        return 0
    return max((event["step"] for event in events(folder, "step")), default=0)


def whole_state(checkpoint: Path) -> dict[str, Any]:
    """Return all tensors and host values of a checkpoint, by name."""
    from torch.distributed.checkpoint import FileSystemReader
    from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

    state: dict[str, Any] = {}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        _load_state_dict(
            state,
            storage_reader=FileSystemReader(checkpoint),
            planner=_EmptyStateDictLoadPlanner(),
            no_dist=True,
        )
    return flat(state)


def flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested dicts as one, by dotted name."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        is_inner = isinstance(value, dict) and value
        found |= flat(value, f"{prefix}{name}.") if is_inner else {prefix + name: value}
    return found


def differences(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """Return the names of what is not bitwise equal in two results of `whole_state`."""
    import torch

    def same(a: Any, b: Any) -> bool:
        if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
            return a.dtype == b.dtype and torch.equal(a, b)
        return type(a) is type(b) and a == b

    names = sorted(one.keys() | other.keys())
    return [n for n in names if n not in one or n not in other or not same(one[n], other[n])]


def _rank(arguments: list[str], output: Path, variables: dict[str, str], before: Before) -> None:
    """Run one rank's process, with its output in a file."""
    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    sys.stdout.flush()
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.environ.update(variables)
    import torch

    from canon_pretrain.train import main

    torch.set_num_threads(1)  # OMP_NUM_THREADS was read when the server imported torch
    if before is not None:
        function, *words = before if isinstance(before, tuple) else (before,)
        function(int(variables["RANK"]), *words)
    main(arguments)
