"""A run folder whose file system blocks every call for a while, as Lustre does in a failover."""

import os
import shutil
import signal
import subprocess
import threading
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path

import pytest

from canon_pretrain.core import lock as lock_module
from canon_pretrain.core.holder import Holder, content_of
from canon_pretrain.core.lock import LinkLock
from canon_pretrain.run import log as log_module
from canon_pretrain.run.folder import RunFolder
from canon_pretrain.run.log import RunLog, read_log
from tests.fault_runs import Trial, start_torchrun, wait_for
from tests.ranks import assert_same_run, events, logged_step, status
from tests.support import HANGS_AFTER_S, ROOT, debug_run, error_codes, refused

BLOCKED_S = 25.0
"""How long all calls on the run folder wait."""
MAX_PAUSE_S = 5.0
"""Between two steps on a busy machine; the disk blocks for much longer."""


@dataclass(frozen=True)
class BlockedCall:
    """A call that waited, as tests/blocked_disk.c writes it: PID THREAD FUNCTION PATH."""

    pid: int
    thread: int
    path: Path


@dataclass(frozen=True)
class BlockableDisk:
    """A library for LD_PRELOAD: calls on `folder` wait while the file `flag` exists."""

    library: Path
    folder: Path
    flag: Path

    def environment(self):
        return {
            "LD_PRELOAD": str(self.library),
            "BLOCKED_FOLDER": str(self.folder),
            "BLOCKED_FLAG": str(self.flag),
        }

    def calls(self):
        lines = Path(f"{self.flag}.calls").read_text().splitlines()
        rows = [line.split(maxsplit=3) for line in lines]
        return [BlockedCall(int(pid), int(thread), Path(path)) for pid, thread, _, path in rows]


@pytest.fixture
def blockable(tmp_path):
    """A disk with the folder RUN, that can be blocked."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler for tests/blocked_disk.c")
    library = tmp_path / "blocked_disk.so"
    source = ROOT / "tests" / "blocked_disk.c"
    command = [compiler, "-shared", "-fPIC", "-w", "-o", library, source, "-ldl"]
    subprocess.run(command, check=True)
    (tmp_path / "run").mkdir()
    return BlockableDisk(library, tmp_path / "run", tmp_path / "blocked")


def test_a_disk_that_blocks_stalls_and_ends_no_step(blockable, data_folder, tmp_path):
    """Two ranks under torchrun, and a second launch that meets the blocked disk."""
    run = blockable.folder
    command = debug_run(data_folder, run)
    options = [
        *("--training.global_batch_size", 24, "--training.local_batch_size", 12),
        *("--training.steps", 100_000, "--checkpoint.interval", 100_000),
        *("--run.heartbeat_s", 0.5, "--comm.train_timeout_seconds", 10),
    ]
    shim = blockable.environment()
    with open(run / "stdout.txt", "w") as output:
        trainer = start_torchrun(*command, *options, output=output, environment=shim)
    try:
        wait_for(lambda: logged_step(run) >= 3, trainer)

        # the disk blocks
        began = datetime.now(UTC)
        blockable.flag.touch()
        time.sleep(BLOCKED_S / 2)
        with open(tmp_path / "second.txt", "w") as output:
            second = start_torchrun(*command, output=output, environment=shim, ranks=1)
        time.sleep(BLOCKED_S / 2)
        blockable.flag.unlink()
        ended = datetime.now(UTC)

        # the second launch is refused, the first one trains
        assert second.wait(HANGS_AFTER_S) == 2
        assert error_codes((tmp_path / "second.txt").read_text()) == ["lock.held"]
        step_when_free = logged_step(run)
        wait_for(lambda: logged_step(run) > step_when_free, trainer)

        # a signal to one worker stops all, with exit code 0
        children = Path(f"/proc/{trainer.pid}/task/{trainer.pid}/children")
        workers = [int(pid) for pid in children.read_text().split()]
        (other,) = {*workers} - {status(run).pid}
        os.kill(other, signal.SIGTERM)
        assert trainer.wait(HANGS_AFTER_S) == 0, (run / "stdout.txt").read_text()
        assert not any(Path(f"/proc/{pid}").exists() for pid in workers)
    finally:
        blockable.flag.unlink(missing_ok=True)
        trainer.terminate()  # torchrun then ends its workers
        trainer.wait(HANGS_AFTER_S)

    # what waited: two threads of the lock, one each for STOP, stdout, and the log, which asks the
    # lock first; never the main thread
    calls = [call for call in blockable.calls() if call.pid != second.pid]
    assert {"STOP", "lock.json", "stdout.txt"} <= {call.path.name for call in calls}
    assert len({call.thread for call in calls}) >= 5
    assert not [call for call in calls if call.thread == call.pid]

    # all steps are in the log
    steps = events(run, "step")
    last = steps[-1]["step"]
    assert [event["step"] for event in steps] == list(range(1, last + 1))
    assert not events(run, "lines_dropped")

    # steps went on while the disk was blocked
    step_times = [datetime.fromisoformat(event["time"]) for event in steps]
    times = [began, *(time for time in step_times if began < time < ended), ended]
    assert len(times) > BLOCKED_S / MAX_PAUSE_S
    pauses = [(after - before).total_seconds() for before, after in pairwise(times)]
    assert max(pauses) < MAX_PAUSE_S, max(pauses)

    # the stop is recorded, with a checkpoint
    now = status(run)
    assert (now.state, now.reason, now.step) == ("stopped", "SIGTERM", last)
    stop = read_log(RunFolder(run).log_file)[-1]
    assert (stop["event"], stop["reason"], stop["step"]) == ("stop", "SIGTERM", last)
    assert [event["step"] for event in events(run, "checkpoint")] == [last]

    undisturbed = Trial(data_folder, tmp_path / "undisturbed")
    assert undisturbed.start(*options, "--run.stop_at", last).wait(600).succeeded
    assert_same_run(run, undisturbed.run, step=last)


@pytest.fixture
def disk(monkeypatch):
    """An event; while it is cleared, writes and look-ups of names block."""
    is_back = threading.Event()
    is_back.set()

    def block(owner, name):
        original = getattr(owner, name)

        def call(*arguments, **options):
            assert is_back.wait(HANGS_AFTER_S)
            return original(*arguments, **options)

        monkeypatch.setattr(owner, name, call)

    block(os, "write")
    block(os.path, "exists")
    block(lock_module, "read_lock")
    yield is_back
    is_back.set()


def test_what_waits_is_bounded_and_a_gap_is_counted(disk, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(log_module, "MAX_WAITING_BYTES", 1000)
    log = RunLog(tmp_path / "log.jsonl")

    # 100 lines are written while the disk is blocked, 2 afterwards
    disk.clear()
    for step in range(1, 101):
        log.write("step", step=step)
    disk.set()
    log.flush()
    for step in (101, 102):
        log.write("step", step=step)
    log.close()

    logged = read_log(log.path)
    gap = [event["event"] for event in logged].index("lines_dropped")
    assert 5 < gap < 20
    assert [event["step"] for event in logged[:gap]] == list(range(1, gap + 1))
    assert logged[gap]["lines"] == 100 - gap
    assert [event.get("step") for event in logged[gap + 1 :]] == [101, 102]
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def test_time_on_a_blocked_disk_does_not_expire_a_lock(disk, tmp_path):
    """The holder's heartbeat was blocked as well: it has to get its time again."""
    path = tmp_path / "lock.json"
    path.write_bytes(content_of(Holder.of_this_process()))

    def block_disk(text):
        """Block the disk for longer than the expiry, then renew the lock."""
        disk.clear()
        threading.Timer(1.2, disk.set).start()
        threading.Timer(1.5, lambda: os.utime(path)).start()

    with refused("lock.held"):
        LinkLock.acquire(path, heartbeat_s=0.1, expiry_s=0.6, log=block_disk)
