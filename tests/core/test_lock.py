"""Locks: LinkLock with real processes (takeovers, races, signals, full disks), and `locked`."""

import errno
import fcntl
import json
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest

from canon_pretrain.core.holder import LEAVING, Holder, content_of
from canon_pretrain.core.lock import (
    LinkLock,
    claim_of,
    live_holder,
    locked,
    read_holder,
    remove_locks,
)
from tests import checkpoint_folders
from tests.support import ROOT, refused

# an expiry of 100 heartbeats: on a busy machine a live holder may miss some
FAST: dict[str, Any] = {"heartbeat_s": 0.05, "expiry_s": 5.0}
QUIET = FAST | {"log": lambda message: None}
ELSEWHERE = "another-boot/pid:[1]/1"

# A process that executes one command per line of stdin and prints the result as JSON. With `slow`,
# every step of a takeover that others can see is delayed at random, by more than the settle time.
LAUNCH = """
import json, os, random, sys, time
from dataclasses import replace
from pathlib import Path
from canon_pretrain.core.errors import UserError
from canon_pretrain.core.holder import Holder
from canon_pretrain.core.lock import LinkLock

def delayed(call):
    def wrapper(*arguments, **options):
        time.sleep(random.random() * 0.03)
        result = call(*arguments, **options)
        time.sleep(random.random() * 0.03)
        return result
    return wrapper

link, replace_file = os.link, os.replace
for line in sys.stdin:
    name, *rest = json.loads(line)
    if name == "acquire":
        path, begin, slow, boot, options = rest
        if slow:
            os.link, os.replace = delayed(link), delayed(replace_file)
        ours = Holder.of_this_process()
        ours = replace(ours, boot=boot or ours.boot)
        while time.monotonic() < begin:
            pass
        try:
            lock = LinkLock.acquire(Path(path), holder=ours, log=str, **options)
            answer = {"held": True, "id": ours.id}
        except UserError as error:
            answer = {"held": False, "code": error.code, "pid": error.fields["holder"].pid}
    elif name == "release":
        answer = lock.release()
    else:
        answer = lock.lost if name == "lost" else getattr(lock, name)()
    print(json.dumps(answer), flush=True)
"""


class Launch:
    """A process that runs LAUNCH."""

    def __init__(self, **environ):
        variables = os.environ | {"PYTHONPATH": str(ROOT)} | environ
        pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.process = subprocess.Popen([sys.executable, "-c", LAUNCH], env=variables, **pipes)
        self.pid = self.process.pid

    def send(self, *words):
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(words) + "\n")
        self.process.stdin.flush()

    def answer(self):
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())

    def ask(self, *words):
        self.send(*words)
        return self.answer()

    def acquire(self, path, boot=None, **options):
        return self.ask("acquire", str(path), 0, False, boot, FAST | options)


@pytest.fixture
def launch():
    """Start launches, and kill them at the end of the test."""
    launches: list[Launch] = []
    yield lambda **environ: launches.append(Launch(**environ)) or launches[-1]
    for each in launches:
        each.process.kill()
        each.process.communicate()


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run" / "lock.json"


def wait_until(condition, seconds=10.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "timeout"
        time.sleep(0.01)


def stale(path, age_s=0.0, **changes):
    """Write the lock of a dead launch on another machine."""
    holder = replace(Holder.of_this_process(), host="n9", pid=77, boot=ELSEWHERE)
    holder = replace(holder, **changes)
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content_of(holder))
    os.utime(path, (time.time() - age_s,) * 2)
    return holder


def test_a_killed_holder_on_this_machine_is_replaced_at_once(path, launch):
    first = launch()
    assert first.acquire(path)["held"]
    os.kill(first.pid, signal.SIGKILL)
    # not waited for: it stays in the process table, as under a hung torchrun
    wait_until(lambda: live_holder(path) is None)
    began = time.monotonic()
    LinkLock.acquire(path, **QUIET | {"heartbeat_s": 10.0}).release()
    assert time.monotonic() - began < 4.0 and os.listdir(path.parent) == []
    ours = Holder.of_this_process()
    assert ours.boot is not None  # a process with a reused pid is not the holder either
    stale(path, host=ours.host, pid=os.getpid(), boot=f"{ours.boot.rpartition('/')[0]}/1")
    assert live_holder(path) is None


@pytest.mark.system
@pytest.mark.parametrize(
    ("job", "count", "takes_over"), [("5", "3", True), ("5", "2", False), ("6", "9", False)]
)
def test_only_a_restart_of_the_job_takes_over_a_live_lock(path, launch, job, count, takes_over):
    """Whatever the mtime, which another machine's clock writes, says."""
    first = launch(SLURM_JOB_ID="5", SLURM_RESTART_COUNT="2")
    second = launch(SLURM_JOB_ID=job, SLURM_RESTART_COUNT=count)
    # the heartbeat comes after the takeover
    assert first.acquire(path, boot=ELSEWHERE, heartbeat_s=0.5)["held"]
    began = time.monotonic()
    os.utime(path, (0, 0))
    answer = second.acquire(path, heartbeat_s=0.5)
    assert answer["held"] is takes_over and time.monotonic() - began < 4.0
    if not takes_over:
        assert (answer["code"], answer["pid"]) == ("lock.held", first.pid)
        assert first.ask("lost") is False
        return
    wait_until(lambda: first.ask("lost"))
    first.ask("release")
    holder = read_holder(path)
    assert holder is not None and holder.id == answer["id"] and second.ask("is_owner")
    assert os.listdir(path.parent) == ["lock.json"]


@pytest.mark.system
@pytest.mark.parametrize("kind", ["free", "stale", "stale and slow"])
def test_exactly_one_of_four_racing_launches_wins(path, launch, kind):
    racers = [launch() for _ in range(4)]
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    ours = Holder.of_this_process()
    for turn in range(20):
        lock = path.with_name(f"race-{turn}") / "lock.json"
        lock.parent.mkdir(parents=True)
        if kind != "free":
            stale(lock, host=ours.host, pid=dead.pid, boot=ours.boot)
        begin, slow = time.monotonic() + 0.02, kind == "stale and slow"
        for racer in racers:
            racer.send("acquire", str(lock), begin, slow, None, FAST)
        answers = [racer.answer() for racer in racers]
        ((winner, answer),) = [
            pair for pair in zip(racers, answers, strict=True) if pair[1]["held"]
        ]
        holder = read_holder(lock)
        assert holder is not None and holder.id == answer["id"]
        assert os.listdir(lock.parent) == ["lock.json"] and winner.ask("lost") is False
        winner.ask("release")


def test_a_read_that_overlaps_a_release_is_no_heartbeat(path):
    """It reads the lock file before it is unlinked, and looks for the claim after its removal."""
    holder = replace(Holder.of_this_process(), id="other", boot=ELSEWHERE)
    path.parent.mkdir(parents=True, exist_ok=True)
    other = LinkLock(path, **QUIET)
    path.write_bytes(content_of(holder))
    assert not other.try_acquire()
    claim = claim_of(path, holder.id)
    claim.write_bytes(content_of(replace(holder, id=LEAVING + holder.id)))
    assert not other.try_acquire()
    claim.unlink()
    assert not other.try_acquire() and other.rival is None
    path.unlink()
    assert other.try_acquire()
    other.release()


def test_a_takeover_that_was_stopped_for_too_long_fails(path, monkeypatch):
    """Another launch may have taken over meanwhile."""
    stale(path, age_s=3600)
    replace_file = os.replace
    monkeypatch.setattr(os, "replace", lambda *names: (time.sleep(0.4), replace_file(*names)))
    with refused("lock.lost", path=path):
        LinkLock.acquire(path, **QUIET | {"expiry_s": 0.3})


def test_a_launch_killed_during_its_takeover_is_replaced(path):
    """Its claim holds the lock, though lock.json still names the previous holder."""
    first = stale(path)
    second = replace(first, id="b" * 32, pid=78)
    claim_of(path, first.id).write_bytes(content_of(second))
    assert read_holder(path) == second
    lock = LinkLock.acquire(path, **QUIET | {"expiry_s": 0.3})
    assert os.listdir(path.parent) == ["lock.json"] and lock.is_owner()
    lock.release()


@pytest.mark.system
@pytest.mark.parametrize("has_ended", [False, True])
def test_a_silent_holder_elsewhere_is_replaced_after_the_expiry(path, launch, has_ended):
    """Also if the successor has released the lock by then, so that lock.json is missing."""
    first = launch()
    assert first.acquire(path, boot=ELSEWHERE, expiry_s=0.8)["held"]
    os.kill(first.pid, signal.SIGSTOP)
    began = time.monotonic()
    lock = LinkLock.acquire(path, **QUIET | {"expiry_s": 0.8})
    assert 0.8 <= time.monotonic() - began < 5.0
    if has_ended:
        lock.release()
    first.send("may_write")  # before its first heartbeat
    os.kill(first.pid, signal.SIGCONT)
    assert first.answer() is False
    wait_until(lambda: first.ask("lost"))
    first.ask("release")
    assert os.listdir(path.parent) == ([] if has_ended else ["lock.json"])
    assert has_ended or lock.is_owner()
    lock.release()


def test_a_missing_file_loses_the_lock_at_the_second_heartbeat(path):
    """One may be a mount that comes back."""
    lock = LinkLock.acquire(path, **QUIET | {"heartbeat_s": 60.0, "expiry_s": 60.0})
    aside = path.with_name("aside")
    path.rename(aside)
    lock._write_heartbeat()
    aside.rename(path)
    lock._write_heartbeat()
    path.rename(aside)
    lock._write_heartbeat()
    assert not lock.lost and not lock.is_owner()
    lock._write_heartbeat()
    assert lock.lost
    lock.release()


@pytest.mark.parametrize("content", [b"", b'{"id": "x"'])
def test_a_damaged_lock_expires_like_any_other(path, content):
    path.parent.mkdir()
    path.write_bytes(content)
    holder = read_holder(path)
    assert holder is not None and holder.host == "unknown" and live_holder(path) == holder
    lock = LinkLock.acquire(path, **QUIET | {"expiry_s": 0.3})
    # damage of a held lock is repaired by the next heartbeat
    path.write_bytes(content)
    wait_until(lock.is_owner)
    assert not lock.lost
    lock.release()


def test_a_full_disk_does_not_lose_the_lock(tmp_path):
    with checkpoint_folders.small_disk(tmp_path / "disk", "size=64k") as disk:
        path, other = disk / "lock.json", disk / "other" / "lock.json"
        lock = LinkLock.acquire(path, **FAST)
        checkpoint_folders.fill(disk)
        times: set[int] = set()
        wait_until(lambda: times.add(path.stat().st_mtime_ns) or len(times) > 2)
        assert lock.failures == 0 and not lock.lost
        with refused("lock.held", path=path, holder=lock.holder):
            LinkLock.acquire(path, **QUIET)
        with refused("lock.unavailable", path=other, errno=errno.ENOSPC):
            LinkLock.acquire(other, **FAST)
        lock.release()
        assert not path.exists() and not claim_of(path, lock.holder.id).exists()


def test_a_failing_heartbeat_is_reported_once(path):
    messages: list[str] = []
    lock = LinkLock.acquire(path, **FAST, log=messages.append)
    with mock.patch("os.utime", side_effect=OSError(errno.EIO, "injected")):
        wait_until(lambda: lock.failures > 3)
    assert len(messages) == 1
    wait_until(lambda: lock.failures == 0)
    assert not lock.lost and lock.is_owner()
    lock.release()


def test_the_lock_works_without_hard_links(path):
    error = OSError(errno.EPERM, "Operation not permitted")
    with mock.patch("os.link", side_effect=error):
        lock = LinkLock.acquire(path, **FAST)
        with refused("lock.held", path=path, holder=lock.holder):
            LinkLock.acquire(path, **QUIET)
        lock.release()
    assert os.listdir(path.parent) == []


NO_FLOCK = ("ENOLCK", "EOPNOTSUPP", "ENOSYS")


@pytest.fixture(params=["flock", *NO_FLOCK])
def file_system(request, monkeypatch):
    """Run the test with flock, and with each error of a file system without it."""
    if request.param != "flock":
        error = OSError(getattr(errno, request.param), "injected")
        monkeypatch.setattr(fcntl, "flock", mock.Mock(side_effect=error))
    return request.param


@pytest.mark.usefixtures("file_system")
def test_held_locks_are_refused_after_a_wait_and_not_removed(tmp_path):
    folder, waited = tmp_path / "locks", list[int]()
    with locked(folder / "used", "x"):
        with locked(folder / "unused", "x"):
            pass
        remove_locks(folder)
        assert {path.name.partition(".")[0] for path in folder.iterdir()} == {"used"}
        options = {"patience_s": 0.1, "on_wait": lambda: waited.append(1)}
        with refused("lock.held", path=folder / "used"), locked(folder / "used", "x", **options):
            pass
    assert waited == [1]
    with locked(folder / "used", "x", on_wait=lambda: waited.append(2)):
        assert waited == [1]
    remove_locks(folder)
    assert not folder.exists()
    remove_locks(folder)


def test_a_lock_that_was_taken_meanwhile_is_an_error(tmp_path, file_system):
    if file_system == "flock":
        pytest.skip("the kernel keeps a flock")
    with refused("lock.lost"), locked(tmp_path / "one", "x"):
        (tmp_path / "one.link").unlink()


@pytest.mark.usefixtures("file_system")
def test_exclusion_while_the_folder_is_removed_repeatedly(tmp_path):
    folder, done = tmp_path / "locks", threading.Event()
    inside, most = list[int](), list[int]()

    def take(_):
        for _ in range(30):
            with locked(folder / "one", "x", patience_s=60):
                inside.append(1)
                most.append(len(inside))
                inside.pop()

    def remove():
        while not done.is_set():
            remove_locks(folder)

    with ThreadPoolExecutor(4) as pool:
        removing = pool.submit(remove)
        list(pool.map(take, range(3)))
        done.set()
        removing.result()
    assert most == [1] * 90


def test_a_lock_beats_only_while_the_main_thread_lives(tmp_path, monkeypatch):
    """Other threads may go on for ever; what holds the lock is over."""
    over = threading.Thread(target=time.sleep, args=(0,))
    over.start()
    over.join()
    beats = []
    for main, lives in ((threading.main_thread(), True), (over, False)):
        monkeypatch.setattr(threading, "main_thread", lambda main=main: main)
        lock = LinkLock.acquire(
            tmp_path / "lock", on_heartbeat=lambda: beats.append(1), heartbeat_s=0.02
        )
        time.sleep(0.2)
        assert bool(beats) == lives
        beats.clear()
        lock.release()
