"""A run folder whose file system blocks every call for a while, as Lustre does in a failover."""

import os
import shutil
import signal
import subprocess
import threading
import time
from datetime import UTC, datetime
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
from tests.support import ROOT, debug_run, error_codes, refused

MAX_PAUSE_S = 5.0
"""Between two steps on a busy machine; the disk blocks for much longer."""


def test_a_disk_that_blocks_stalls_and_ends_no_step(data_folder, tmp_path):
    """Two ranks under torchrun; for `block_s` all calls on the run folder wait."""
    block_s, base, command = 25.0, tmp_path, debug_run(data_folder, tmp_path / "run")
    if (compiler := shutil.which("cc") or shutil.which("gcc")) is None:
        pytest.skip("no C compiler for tests/blocked_disk.c")
    library, flag, run = base / "blocked_disk.so", base / "blocked", base / "run"
    source = ROOT / "tests" / "blocked_disk.c"
    build = [compiler, "-shared", "-fPIC", "-w", "-o", library, source, "-ldl"]
    subprocess.run(build, check=True)
    run.mkdir()
    options = [
        *("--training.global_batch_size", 24, "--training.local_batch_size", 12),
        *("--training.steps", 100_000, "--checkpoint.interval", 100_000),
        *("--run.heartbeat_s", 0.5, "--comm.train_timeout_seconds", 10),
    ]
    shim = {"LD_PRELOAD": str(library), "BLOCKED_FOLDER": str(run), "BLOCKED_FLAG": str(flag)}
    with open(run / "stdout.txt", "w") as output:
        trainer = start_torchrun(*command, *options, output=output, environment=shim)
    try:
        wait_for(lambda: logged_step(run) >= 3, trainer)
        began = datetime.now(UTC)
        flag.touch()
        time.sleep(block_s / 2)
        with open(base / "second.txt", "w") as output:  # a launch that meets the blocked disk
            second = start_torchrun(*command, output=output, environment=shim, ranks=1)
        time.sleep(block_s / 2)
        flag.unlink()
        ended = datetime.now(UTC)
        assert second.wait(120) == 2
        assert error_codes((base / "second.txt").read_text()) == ["lock.held"]
        here = logged_step(run)
        wait_for(lambda: logged_step(run) > here, trainer)
        workers = Path(f"/proc/{trainer.pid}/task/{trainer.pid}/children").read_text().split()
        (other,) = {*map(int, workers)} - {status(run).pid}
        os.kill(other, signal.SIGTERM)  # a signal to one worker stops all, with exit code 0
        assert trainer.wait(60) == 0, (run / "stdout.txt").read_text()
        assert not any(Path(f"/proc/{pid}").exists() for pid in workers)
    finally:
        flag.unlink(missing_ok=True)
        trainer.terminate()  # torchrun then ends its workers
        trainer.wait(60)

    calls = [line.split(maxsplit=3) for line in Path(f"{flag}.calls").read_text().splitlines()]
    calls = [call for call in calls if int(call[0]) != second.pid]
    assert {"STOP", "lock.json", "stdout.txt"} <= {Path(call[3]).name for call in calls}
    # two of the lock, one each for STOP, stdout, and the log, which asks the lock first
    assert len({call[1] for call in calls}) >= 5
    assert not [call for call in calls if call[0] == call[1]], "the main thread accessed the disk"
    steps = events(run, "step")
    last = steps[-1]["step"]
    assert [event["step"] for event in steps] == list(range(1, last + 1))
    assert not events(run, "lines_dropped")
    times = [datetime.fromisoformat(event["time"]) for event in steps]
    times = [began, *(time for time in times if began < time < ended), ended]
    assert len(times) > block_s / MAX_PAUSE_S
    pauses = [(b - a).total_seconds() for a, b in zip(times, times[1:], strict=False)]
    assert max(pauses) < MAX_PAUSE_S, max(pauses)
    found, stopped = status(run), read_log(RunFolder(run).log_file)[-1]
    assert (found.state, found.reason, found.step) == ("stopped", "SIGTERM", last)
    assert (stopped["event"], stopped["reason"], stopped["step"]) == ("stop", "SIGTERM", last)
    assert [e["step"] for e in events(run, "checkpoint")] == [last]

    undisturbed = Trial(data_folder, base / "undisturbed")
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
            assert is_back.wait(60)
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
    disk.clear()
    for step in range(1, 101):
        log.write("step", step=step)
    disk.set()
    log.flush()
    for step in (101, 102):
        log.write("step", step=step)
    log.close()
    logged = read_log(log.path)
    names = [event["event"] for event in logged]
    gap = names.index("lines_dropped")
    kept = [event["step"] for event in logged[:gap]]
    assert kept == list(range(1, gap + 1)) and 5 < gap < 20
    assert logged[gap]["lines"] == 100 - gap
    assert [event.get("step") for event in logged[gap + 1 :]] == [101, 102]
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def test_time_on_a_blocked_disk_does_not_expire_a_lock(disk, tmp_path):
    """The holder's heartbeat was blocked as well: it has to get its time again."""
    path, holder = tmp_path / "lock.json", Holder.of_this_process()
    path.write_bytes(content_of(holder))

    def block_disk(text):
        """Block the disk for longer than the expiry, then renew the lock."""
        disk.clear()
        threading.Timer(1.2, disk.set).start()
        threading.Timer(1.5, lambda: os.utime(path)).start()

    with refused("lock.held"):
        LinkLock.acquire(path, heartbeat_s=0.1, expiry_s=0.6, log=block_disk)
