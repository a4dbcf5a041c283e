"""Locks of launches, with real processes: takeovers, races, kill -9, SIGSTOP, a full disk."""

import errno
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from canon_pretrain.core.errors import UserError
from canon_pretrain.core.holder import Holder, content_of
from canon_pretrain.core.lock import LinkLock, claim_of, live_holder, read_holder
from canon_pretrain.run.status import StatusWriter, read_status
from tests import checkpoint_folders
from tests.support import ROOT

BEAT_S = 0.05
# an expiry of 100 beats: on a busy machine a live holder may miss some
FAST: dict[str, Any] = {"heartbeat_s": BEAT_S, "expiry_s": 5.0, "way_out": "the way out"}
QUIET = FAST | {"say": lambda message: None}
ELSEWHERE = "another-boot/pid:[1]/1"

# Acquires as it is told, says how that went, then obeys one word a line. With `slow`, it dawdles at
# random in every step that another launch may see: longer than the settle time.
LAUNCH = """
import json, os, random, sys, time
from dataclasses import replace
from pathlib import Path
from canon_pretrain.core.errors import UserError
from canon_pretrain.core.holder import Holder
from canon_pretrain.core.lock import LinkLock

def dawdle(call):
    def slow(*arguments, **options):
        time.sleep(random.random() * 0.03)
        done = call(*arguments, **options)
        time.sleep(random.random() * 0.03)
        return done
    return slow

link, replace_file = os.link, os.replace

def tell(**answer):
    print(json.dumps(answer), flush=True)

for line in sys.stdin:
    word, *rest = json.loads(line)
    if word == "acquire":
        path, begin, slow, boot, options = rest
        if slow:
            os.link, os.replace = dawdle(link), dawdle(replace_file)
        ours = Holder.of_this_process()
        ours = replace(ours, boot=boot) if boot else ours
        said = []
        while time.monotonic() < begin:
            pass
        try:
            lock = LinkLock.acquire(Path(path), holder=ours, say=said.append, **options)
            tell(held=True, id=ours.id, said=said)
        except UserError as error:
            tell(held=False, message=str(error), said=said)
    elif word == "lost":
        tell(lost=lock.lost, still_ours=lock.still_ours(), said=said)
    elif word == "may_write":
        tell(may_write=lock.may_write())
    elif word == "release":
        if rest:  # seconds between the steps of letting go
            os.link = lambda *names: (link(*names), time.sleep(rest[0]))
        lock.release()
        tell()
"""


class Launch:
    """A process that holds, or tries to hold, a lock."""

    def __init__(self, **environ: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", LAUNCH],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": str(ROOT)} | environ,
        )
        self.pid = self.process.pid

    def send(self, *words: object) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(words) + "\n")
        self.process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())

    def ask(self, *words: object) -> dict[str, Any]:
        self.send(*words)
        return self.answer()

    def acquire(self, path: Path, boot: str | None = None, **options: object) -> dict[str, Any]:
        return self.ask("acquire", str(path), 0, False, boot, FAST | options)


Start = Callable[..., Launch]


@pytest.fixture
def launch() -> Iterator[Start]:
    """Starts launches, and ends them when the test does."""
    launches: list[Launch] = []

    def start(**environ: str) -> Launch:
        launches.append(Launch(**environ))
        return launches[-1]

    yield start
    for each in launches:
        each.process.kill()
        each.process.communicate()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run" / "lock.json"


def wait_until(true: Callable[[], bool], seconds: float = 10.0) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it never became true"
        time.sleep(0.01)


def wait_for_beats(path: Path, count: int = 2, seconds: float = 10.0) -> None:
    times: set[int] = set()
    wait_until(lambda: times.add(path.stat().st_mtime_ns) or len(times) > count, seconds * count)


def stale(path: Path, age_s: float = 0.0, **changes: Any) -> Holder:
    """Leave the lock of a launch that will never beat again; it is of another machine."""
    holder = replace(Holder.of_this_process(), host="n9", pid=77, boot=ELSEWHERE)
    holder = replace(holder, **changes)
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content_of(holder))
    os.utime(path, (time.time() - age_s,) * 2)
    return holder


def test_kill_9_on_this_machine_is_seen_at_once(path, launch):
    first, second = launch(), launch()
    assert first.acquire(path)["held"]
    os.kill(first.pid, signal.SIGKILL)
    # nobody has waited for it: it stays in the process table, as under a hung torchrun
    wait_until(lambda: live_holder(path) is None)
    began = time.monotonic()
    answer = second.acquire(path, heartbeat_s=10.0)
    assert answer["held"] and "its process is gone" in answer["said"][0]
    assert time.monotonic() - began < 4.0
    assert os.listdir(path.parent) == ["lock.json"]
    ours = Holder.of_this_process()
    assert ours.boot is not None  # nor is a process that was given the pid again the holder
    stale(path, host=ours.host, pid=os.getpid(), boot=f"{ours.boot.rpartition('/')[0]}/1")
    assert live_holder(path) is None


@pytest.mark.parametrize(
    ("job", "count", "takes_over"), [("5", "3", True), ("5", "2", False), ("6", "9", False)]
)
def test_only_a_later_start_of_the_same_job_takes_over_from_a_live_one(
    path, launch, job, count, takes_over
):
    """Whatever the clock of the live one says, which is on another machine."""
    first = launch(SLURM_JOB_ID="5", SLURM_RESTART_COUNT="2")
    second = launch(SLURM_JOB_ID=job, SLURM_RESTART_COUNT=count)
    # its heartbeat comes after the takeover is long done
    assert first.acquire(path, boot=ELSEWHERE, heartbeat_s=0.5)["held"]
    began = time.monotonic()
    os.utime(path, (0, 0))  # it seems to have been silent since 1970
    answer = second.acquire(path, heartbeat_s=0.5)
    assert answer["held"] is takes_over and time.monotonic() - began < 4.0
    if not takes_over:
        assert f"pid {first.pid}" in answer["message"]
        assert first.ask("lost")["lost"] is False
        return
    wait_until(lambda: first.ask("lost")["lost"])
    first.ask("release")
    holder = read_holder(path)
    assert holder is not None and holder.id == answer["id"]
    assert os.listdir(path.parent) == ["lock.json"]
    assert second.ask("lost")["still_ours"] is True


@pytest.mark.parametrize("kind", ["free", "stale", "stale and slow"])
def test_of_launches_that_race_exactly_one_wins(path, launch, kind):
    racers = [launch() for _ in range(4)]
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    ours = Holder.of_this_process()
    for turn in range(20):
        folder = path.with_name(f"race-{turn}")
        folder.mkdir(parents=True)
        lock = folder / "lock.json"
        if kind != "free":
            stale(lock, host=ours.host, pid=dead.pid, boot=ours.boot)
        begin, slow = time.monotonic() + 0.02, kind == "stale and slow"
        for racer in racers:
            racer.send("acquire", str(lock), begin, slow, None, FAST)
        answers = [racer.answer() for racer in racers]
        (winner,) = (answer for answer in answers if answer["held"])
        holder = read_holder(lock)
        assert holder is not None and holder.id == winner["id"]
        assert os.listdir(folder) == ["lock.json"]
        for racer, answer in zip(racers, answers, strict=True):
            if answer["held"]:
                assert racer.ask("lost")["lost"] is False
                racer.ask("release")


@pytest.mark.parametrize("between_s", [0.0, 0.3])
def test_a_lock_that_is_let_go_while_another_waits_is_taken(path, launch, between_s):
    """Also by a launch that looks between the two steps of letting go."""
    first, second = launch(), launch()
    assert first.acquire(path, boot=ELSEWHERE, heartbeat_s=60.0)["held"]
    second.send("acquire", str(path), 0, False, None, FAST | {"expiry_s": 60.0})
    time.sleep(0.3)
    first.ask("release", between_s)
    assert second.answer()["held"]
    assert second.ask("lost")["still_ours"] is True


def test_a_launch_that_was_stopped_while_it_took_over_gives_up(path, monkeypatch):
    """Another may have counted it as dead meanwhile, and have taken over too."""
    stale(path, age_s=3600)
    replace_file = os.replace
    monkeypatch.setattr(os, "replace", lambda *names: (time.sleep(0.4), replace_file(*names)))
    with pytest.raises(UserError, match="was stopped for .* start it again"):
        LinkLock.acquire(path, **QUIET | {"expiry_s": 0.3})


def test_a_launch_killed_while_it_took_over_is_taken_over_from(path):
    """Its claim holds the lock, though lock.json still names the one before."""
    first = stale(path)
    second = replace(first, id="b" * 32, pid=78)
    claim_of(path, first.id).write_bytes(content_of(second))
    assert read_holder(path) == second
    lock = LinkLock.acquire(path, **QUIET | {"expiry_s": 0.3})
    assert os.listdir(path.parent) == ["lock.json"] and lock.still_ours()
    lock.release()


@pytest.mark.parametrize("has_ended", [False, True])
def test_a_silent_holder_elsewhere_loses_the_lock_after_the_expiry_only(path, launch, has_ended):
    """Also if the successor has released the lock by then, so that lock.json is missing."""
    first, messages = launch(), list[str]()
    assert first.acquire(path, boot=ELSEWHERE, expiry_s=0.8)["held"]
    os.kill(first.pid, signal.SIGSTOP)
    began = time.monotonic()
    lock = LinkLock.acquire(path, **FAST | {"expiry_s": 0.8}, say=messages.append)
    assert 0.8 <= time.monotonic() - began < 5.0
    assert "took over" in messages[1] and f"pid {first.pid}" in messages[1]
    if has_ended:
        lock.release()
    first.send("may_write")  # the very first thing that it does may be to ask
    os.kill(first.pid, signal.SIGCONT)
    assert first.answer()["may_write"] is False
    wait_until(lambda: first.ask("lost")["lost"])
    first.ask("release")
    assert os.listdir(path.parent) == ([] if has_ended else ["lock.json"])
    assert has_ended or lock.still_ours()
    lock.release()


def test_a_file_that_is_gone_loses_the_lock_at_the_second_beat(path):
    """Once is no proof: it may be a mount that comes back."""
    lock = LinkLock.acquire(path, **QUIET | {"heartbeat_s": 60.0, "expiry_s": 60.0})
    aside = path.with_name("aside")
    path.rename(aside)
    lock._beat()
    aside.rename(path)
    lock._beat()
    path.rename(aside)
    lock._beat()
    assert not lock.lost and not lock.still_ours(), "missing, it is nobody's"
    lock._beat()
    assert lock.lost
    lock.release()


@pytest.mark.parametrize("content", [b"", b'{"id": "x"'])
def test_a_damaged_lock_expires_like_any_other(path, content):
    path.parent.mkdir()
    path.write_bytes(content)
    holder = read_holder(path)
    assert holder is not None and holder.host == "unknown" and live_holder(path) == holder
    lock = LinkLock.acquire(path, **QUIET | {"expiry_s": 0.3})
    # damage while we hold it proves nothing against us, and the next beat writes it anew
    path.write_bytes(content)
    wait_until(lock.still_ours)
    assert not lock.lost
    lock.release()


def test_a_full_disk_costs_neither_the_lock_nor_the_run(tmp_path, launch):
    with checkpoint_folders.small_disk(tmp_path / "disk", "size=64k") as disk:
        path, results = disk / "lock.json", list[bool]()
        writer = StatusWriter(disk / "status.json", steps=9, world_size=1)

        def step_when(is_written: bool) -> int:
            results.clear()
            wait_until(lambda: is_written in results)
            status = read_status(writer.path)
            return -1 if status is None else status.step

        lock = LinkLock.acquire(path, **FAST, on_beat=lambda: results.append(writer.write()))
        assert step_when(True) == 0
        filler = checkpoint_folders.fill(disk)
        writer.progress(step=7)
        wait_for_beats(path)
        assert step_when(False) == 0, "the old file stays whole"
        assert lock.failures == 0 and not lock.lost
        assert not launch().acquire(path)["held"]
        filler.unlink()
        assert step_when(True) == 7
        checkpoint_folders.fill(disk)
        with pytest.raises(UserError, match="other/lock.json cannot be taken: No space left"):
            LinkLock.acquire(disk / "other" / "lock.json", **FAST)
        lock.release()
        assert not path.exists() and not claim_of(path, lock.holder.id).exists()


def test_a_heartbeat_that_fails_is_reported_once_and_costs_nothing(path):
    messages: list[str] = []
    lock = LinkLock.acquire(path, **FAST, say=messages.append)
    with mock.patch("os.utime", side_effect=OSError(errno.EIO, "injected")):
        wait_until(lambda: lock.failures > 3)
    assert len(messages) == 1 and "injected" in messages[0]
    wait_until(lambda: lock.failures == 0)
    assert not lock.lost and lock.still_ours()
    lock.release()


def test_without_hard_links_the_lock_holds_as_well(path):
    refusal = OSError(errno.EPERM, "Operation not permitted")
    with mock.patch("os.link", side_effect=refusal):
        lock = LinkLock.acquire(path, **FAST)
        with pytest.raises(UserError, match="in use by another launch"):
            LinkLock.acquire(path, **QUIET)
        lock.release()
    assert os.listdir(path.parent) == []
