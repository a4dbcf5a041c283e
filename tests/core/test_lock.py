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
from tests.support import ROOT, refused, wait_until

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
        self.process = subprocess.Popen(
            [sys.executable, "-c", LAUNCH],
            env=os.environ | {"PYTHONPATH": str(ROOT)} | environ,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
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

    def start(**environ):
        launches.append(Launch(**environ))
        return launches[-1]

    yield start
    for launch in launches:
        launch.process.kill()
        launch.process.communicate()


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run" / "lock.json"


def stale(path, age_s=0.0, **changes):
    """Write the lock of a dead launch on another machine."""
    holder = replace(Holder.of_this_process(), host="n9", pid=77, boot=ELSEWHERE)
    holder = replace(holder, **changes)
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content_of(holder))

    modified = time.time() - age_s
    os.utime(path, (modified, modified))
    return holder


def test_a_killed_holder_on_this_machine_is_replaced_at_once(path, launch):
    first = launch()
    assert first.acquire(path)["held"]
    os.kill(first.pid, signal.SIGKILL)
    # not waited for: it stays in the process table, as under a hung torchrun
    wait_until(lambda: live_holder(path) is None)

    began = time.monotonic()
    LinkLock.acquire(path, **QUIET | {"heartbeat_s": 10.0}).release()

    assert time.monotonic() - began < 4.0
    assert os.listdir(path.parent) == []


def test_a_process_with_a_reused_pid_is_not_the_holder(path):
    ours = Holder.of_this_process()
    assert ours.boot is not None
    started_earlier = f"{ours.boot.rpartition('/')[0]}/1"

    stale(path, host=ours.host, pid=os.getpid(), boot=started_earlier)

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

    assert answer["held"] is takes_over
    assert time.monotonic() - began < 4.0
    if not takes_over:
        assert (answer["code"], answer["pid"]) == ("lock.held", first.pid)
        assert first.ask("lost") is False
        return

    wait_until(lambda: first.ask("lost"))
    first.ask("release")
    holder = read_holder(path)
    assert holder is not None
    assert holder.id == answer["id"]
    assert second.ask("is_owner")
    assert os.listdir(path.parent) == ["lock.json"]


@pytest.mark.system
@pytest.mark.parametrize("kind", ["free", "stale", "stale and slow"])
def test_exactly_one_of_four_racing_launches_wins(path, launch, kind):
    racers = [launch() for _ in range(4)]
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    ours = Holder.of_this_process()
    is_slow = kind == "stale and slow"

    for turn in range(20):
        lock = path.with_name(f"race-{turn}") / "lock.json"
        lock.parent.mkdir(parents=True)
        if kind != "free":
            stale(lock, host=ours.host, pid=dead.pid, boot=ours.boot)

        begin = time.monotonic() + 0.02
        for racer in racers:
            racer.send("acquire", str(lock), begin, is_slow, None, FAST)
        answers = {racer: racer.answer() for racer in racers}

        [winner] = [racer for racer, answer in answers.items() if answer["held"]]
        holder = read_holder(lock)
        assert holder is not None
        assert holder.id == answers[winner]["id"]
        assert os.listdir(lock.parent) == ["lock.json"]
        assert winner.ask("lost") is False
        winner.ask("release")


def test_a_read_that_overlaps_a_release_is_no_heartbeat(path):
    """It reads the lock file before it is unlinked, and looks for the claim after its removal."""
    holder = replace(Holder.of_this_process(), id="other", boot=ELSEWHERE)
    path.parent.mkdir(parents=True, exist_ok=True)
    other = LinkLock(path, **QUIET)

    # held
    path.write_bytes(content_of(holder))
    assert not other.try_acquire()

    # the release begins with the claim
    claim = claim_of(path, holder.id)
    claim.write_bytes(content_of(replace(holder, id=LEAVING + holder.id)))
    assert not other.try_acquire()

    claim.unlink()
    assert not other.try_acquire()
    assert other.rival is None

    path.unlink()
    assert other.try_acquire()
    other.release()


def test_a_takeover_that_was_stopped_for_too_long_fails(path, monkeypatch):
    """Another launch may have taken over meanwhile."""
    stale(path, age_s=3600)
    replace_file = os.replace

    def replace_late(*names):
        time.sleep(0.4)
        replace_file(*names)

    monkeypatch.setattr(os, "replace", replace_late)
    with refused("lock.lost", path=path):
        LinkLock.acquire(path, **QUIET | {"expiry_s": 0.3})


def test_a_launch_killed_during_its_takeover_is_replaced(path):
    """Its claim holds the lock, though lock.json still names the previous holder."""
    first = stale(path)
    second = replace(first, id="b" * 32, pid=78)
    claim_of(path, first.id).write_bytes(content_of(second))
    assert read_holder(path) == second

    lock = LinkLock.acquire(path, **QUIET | {"expiry_s": 0.3})

    assert os.listdir(path.parent) == ["lock.json"]
    assert lock.is_owner()
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

    # the first holder wakes up and notices
    first.send("may_write")  # before its first heartbeat
    os.kill(first.pid, signal.SIGCONT)
    assert first.answer() is False
    wait_until(lambda: first.ask("lost"))
    first.ask("release")

    if has_ended:
        assert os.listdir(path.parent) == []
    else:
        assert os.listdir(path.parent) == ["lock.json"]
        assert lock.is_owner()
    lock.release()


def test_a_missing_file_loses_the_lock_at_the_second_heartbeat(path):
    """One may be a mount that comes back."""
    lock = LinkLock.acquire(path, **QUIET | {"heartbeat_s": 60.0, "expiry_s": 60.0})
    aside = path.with_name("aside")

    # missing once, then back
    path.rename(aside)
    lock._write_heartbeat()
    aside.rename(path)
    lock._write_heartbeat()

    # missing twice in a row
    path.rename(aside)
    lock._write_heartbeat()
    assert not lock.lost
    assert not lock.is_owner()
    lock._write_heartbeat()
    assert lock.lost
    lock.release()


@pytest.mark.parametrize("content", [b"", b'{"id": "x"'])
def test_a_damaged_lock_expires_like_any_other(path, content):
    path.parent.mkdir()
    path.write_bytes(content)
    holder = read_holder(path)
    assert holder is not None
    assert holder.host == "unknown"
    assert live_holder(path) == holder

    lock = LinkLock.acquire(path, **QUIET | {"expiry_s": 0.3})

    # damage of a held lock is repaired by the next heartbeat
    path.write_bytes(content)
    wait_until(lock.is_owner)
    assert not lock.lost
    lock.release()


def test_a_full_disk_does_not_lose_the_lock(tmp_path):
    with checkpoint_folders.small_disk(tmp_path / "disk", "size=64k") as disk:
        path = disk / "lock.json"
        other = disk / "other" / "lock.json"
        lock = LinkLock.acquire(path, **FAST)
        checkpoint_folders.fill(disk)

        # heartbeats continue
        times: set[int] = set()

        def has_beaten_twice():
            times.add(path.stat().st_mtime_ns)
            return len(times) > 2

        wait_until(has_beaten_twice)
        assert lock.failures == 0
        assert not lock.lost

        # the held lock is refused as held, a new one for the lack of space
        with refused("lock.held", path=path, holder=lock.holder):
            LinkLock.acquire(path, **QUIET)
        with refused("lock.unavailable", path=other, errno=errno.ENOSPC):
            LinkLock.acquire(other, **FAST)

        lock.release()
        assert not path.exists()
        assert not claim_of(path, lock.holder.id).exists()


def test_a_failing_heartbeat_is_reported_once(path):
    messages: list[str] = []
    lock = LinkLock.acquire(path, **FAST, log=messages.append)

    with mock.patch("os.utime", side_effect=OSError(errno.EIO, "injected")):
        wait_until(lambda: lock.failures > 3)

    assert len(messages) == 1
    wait_until(lambda: lock.failures == 0)
    assert not lock.lost
    assert lock.is_owner()
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
    folder = tmp_path / "locks"
    used = folder / "used"
    on_wait = mock.Mock()

    with locked(used, "x"):
        with locked(folder / "unused", "x"):
            pass
        remove_locks(folder)
        assert {path.name.partition(".")[0] for path in folder.iterdir()} == {"used"}

        with (
            refused("lock.held", path=used),
            locked(used, "x", patience_s=0.1, on_wait=on_wait),
        ):
            pass
    assert on_wait.call_count == 1

    # now free
    with locked(used, "x", on_wait=on_wait):
        assert on_wait.call_count == 1

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
    folder = tmp_path / "locks"
    done = threading.Event()
    inside: list[int] = []
    numbers_inside: list[int] = []

    def take(_):
        for _ in range(30):
            with locked(folder / "one", "x", patience_s=60):
                inside.append(1)
                numbers_inside.append(len(inside))
                inside.pop()

    def remove():
        while not done.is_set():
            remove_locks(folder)

    with ThreadPoolExecutor(4) as pool:
        removing = pool.submit(remove)
        list(pool.map(take, range(3)))
        done.set()
        removing.result()

    assert numbers_inside == [1] * 3 * 30


@pytest.mark.parametrize("lives", [True, False])
def test_a_lock_beats_only_while_the_main_thread_lives(tmp_path, monkeypatch, lives):
    """Other threads may go on for ever; what holds the lock is over."""
    ended = threading.Thread(target=time.sleep, args=(0,))
    ended.start()
    ended.join()
    main = threading.main_thread() if lives else ended
    monkeypatch.setattr(threading, "main_thread", lambda: main)
    on_heartbeat = mock.Mock()

    lock = LinkLock.acquire(tmp_path / "lock", on_heartbeat=on_heartbeat, heartbeat_s=0.02)
    time.sleep(0.2)

    assert on_heartbeat.called == lives
    lock.release()
