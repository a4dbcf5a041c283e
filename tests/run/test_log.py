"""The log of a run: truncated lines, resumes, non-finite numbers, concurrent readers."""

import errno
import itertools
import json
import math
import multiprocessing
import os
import random
import time
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

from canon_pretrain.run.log import LogFollower, RunLog, read_log, read_tail
from tests.support import refused

FORK = multiprocessing.get_context("fork")


def steps(path):
    return [event["step"] for event in read_log(path) if event["event"] == "step"]


def write_steps(path, *numbers, **values):
    log = RunLog(path)
    for step in numbers:
        log.write("step", step=step, **values)
    log.close()


def test_lines_of_a_replaced_launch_are_dropped(tmp_path):
    """Launch 1 goes on after launch 2, with other losses; a restored run.json repeats a number."""
    path, run_file = tmp_path / "log.jsonl", tmp_path / "run.json"

    def launch(number):
        run_file.write_text(json.dumps({"run_id": "a", "created": "t", "launches": number}))
        return RunLog(path)

    def write(log, head, *numbers, loss, **values):
        if head is not None:
            log.write(head, **values)
        for step in numbers:
            log.write("step", step=step, loss=loss)
        log.flush()

    first = launch(1)
    write(first, "start", 1, 2, 3, loss=1.0)
    second = launch(2)
    second.write("quarantine", checkpoint="step-9")
    write(second, "resume", 3, loss=2.0, from_step=2)
    write(first, None, 4, loss=1.0)
    write(first, "checkpoint", loss=1.0, step=4)
    losses = [(e["step"], e["loss"]) for e in read_log(path) if e["event"] == "step"]
    assert losses == [(1, 1.0), (2, 1.0), (3, 2.0)]
    assert read_tail(path)[-1]["segment"] == 2
    write(launch(1), "resume", 4, loss=3.0, from_step=3)
    assert steps(path) == [1, 2, 3, 4] and read_log(path)[-1]["loss"] == 3.0


@pytest.mark.parametrize("cut", [1, 20])
def test_only_a_truncated_last_line_is_lost(tmp_path, cut):
    path = tmp_path / "log.jsonl"
    write_steps(path, 1, 2)
    os.truncate(path, path.stat().st_size - cut)
    # without its newline a line is complete
    survivors = [1, 2] if cut == 1 else [1]
    assert steps(path) == survivors
    write_steps(path, 3)
    with path.open("ab") as file:  # not events
        file.write(b'3\n[]\n{"event": "step"}\n\0\0\n{"event": "step", "step": 4, "loss": "x"}\n')
    assert steps(path) == [*survivors, 3]


def test_numbers_that_are_not_finite_are_strings_on_disk(tmp_path):
    log = RunLog(tmp_path / "log.jsonl")
    values = {"a": math.nan, "b": math.inf, "c": -math.inf, "d": None, "e": 1}
    sources = {"web": {"loss": math.inf, "bits_per_byte": None, "tokens": 5}}
    log.write("validation", step=1, loss=math.nan, scores=values, sources=sources)
    log.close()
    stored = json.loads((tmp_path / "log.jsonl").read_text())
    assert (stored["loss"], stored["scores"]["c"]) == ("NaN", "-Infinity")
    for read in (read_log, LogFollower.poll, read_tail):
        source = LogFollower(log.path) if read is LogFollower.poll else log.path
        (event,) = read(source) if read is not read_tail else read(source, until=None)
        np.testing.assert_equal(event["loss"], math.nan)
        np.testing.assert_equal(event["scores"], values)
        assert event["sources"] == sources


@pytest.mark.parametrize("odd", ["fast", True, [], {}, 10**400])
@pytest.mark.parametrize("name", ["loss", "mfu", "tokens", "world_size", "time", "scores"])
def test_a_line_with_a_field_of_a_wrong_type_is_left_out(name, odd, tmp_path):
    """Of `time` and `scores`, a text and an empty object are right."""
    path = tmp_path / "log.jsonl"
    good = {"event": "step", "step": 1, "loss": 2.0}
    lines = (json.dumps(event) + "\n" for event in (good, good | {"step": 2, name: odd}, good))
    path.write_text("".join(lines))
    is_right = (name, odd) in (("time", "fast"), ("scores", {}), ("scores", []))
    assert steps(path) == ([1, 2, 1] if is_right else [1, 1])


def test_lines_of_two_writers_never_mix(tmp_path):
    path = tmp_path / "log.jsonl"
    both = [{"writer": writer, "filler": "x" * 200} for writer in range(2)]
    writers = [FORK.Process(target=write_steps, args=(path, *range(300)), kwargs=x) for x in both]
    for process in writers:
        process.start()
    for process in writers:
        process.join()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    written_steps = sorted((e["writer"], e["step"]) for e in lines)
    assert written_steps == list(itertools.product(range(2), range(300)))


def _write_in_pieces(path, count):
    """Write steps 1 to `count`, some lines in two writes."""
    pieces = random.Random(0)
    with open(path, "ab", buffering=0) as file:
        for step in range(1, count + 1):
            line = json.dumps({"event": "step", "step": step, "filler": "x" * 300}).encode() + b"\n"
            cut = pieces.randrange(len(line)) if step % 3 == 0 else 0
            file.write(line[:cut])
            if cut:
                time.sleep(0.0005)
            file.write(line[cut:])


def test_concurrent_readers_see_whole_lines_in_order(tmp_path):
    path, count = tmp_path / "log.jsonl", 900
    follower = LogFollower(path)
    assert follower.poll() == []  # there is no file yet
    path.touch()
    writer = FORK.Process(target=_write_in_pieces, args=(path, count))
    writer.start()
    followed, looks = [], 0
    while writer.is_alive():
        followed += [event["step"] for event in follower.poll()]
        seen = steps(path)
        assert seen == list(range(1, len(seen) + 1))
        if seen:
            last = [event["step"] for event in read_tail(path, 1000)]
            assert len(last) in (1, 2, 3) and last[-1] >= seen[-1]
        looks += 0 < len(seen) < count
    writer.join()
    followed += [event["step"] for event in follower.poll()]
    assert followed == list(range(1, count + 1))
    assert looks > 3, "the readers did not overlap with the writer"
    assert follower.poll() == []
    path.rename(tmp_path / "archived.jsonl")
    path.write_text('{"event": "step", "step": 7}\n' * 20)
    assert [event["step"] for event in follower.poll()] == [7] * 20, "from its beginning"


def _superseded_by_hand(events):
    """The rule as specified, event by event."""
    kept, dropped = [], ("step", "validation")
    for event in events:
        if event["event"] in ("start", "resume"):
            last = event.get("from_step", 0)
            kept = [e for e in kept if e["event"] not in dropped or e["step"] <= last]
        kept.append(event)
    return kept


@pytest.mark.parametrize("seed", range(5))
def test_superseded_events_are_dropped_in_any_order(tmp_path, seed):
    chance = random.Random(seed)
    kinds = ["step"] * 6 + ["validation", "skip", "checkpoint", "resume", "start"]
    events = []
    for place in range(200):
        kind = chance.choice(kinds)
        step = {"from_step" if kind == "resume" else "step": chance.randrange(1, 40)}
        events.append({"event": kind, "place": place} | (step if kind != "start" else {}))
    path = tmp_path / "log.jsonl"
    path.write_text("".join(json.dumps(event) + "\n" for event in events))
    assert read_log(path) == read_tail(path, until=None) == _superseded_by_hand(events)


def test_lines_that_cannot_be_written_are_written_later(tmp_path, caplog):
    log = RunLog(tmp_path / "log.jsonl")
    log.write("start", world_size=1)
    assert log.flush()
    refuse = mock.patch("os.write", side_effect=OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
    with refuse:
        for step in (1, 2):
            log.write("step", step=step)
            assert not log.flush()
    log.write("step", step=3)
    assert log.flush() and steps(log.path) == [1, 2, 3]
    with refuse:
        log.write("step", step=4)
        log.close()
    log.close()  # twice does no harm
    assert steps(log.path) == [1, 2, 3]
    assert len(caplog.records) == 3, "twice full, and one line lost"


def test_a_removed_or_replaced_log_is_continued(tmp_path, caplog):
    """`rm log.jsonl` or `sed -i` in training. A log that a fresh start archived is left alone."""
    log, run_file = RunLog(tmp_path / "log.jsonl"), tmp_path / "run.json"

    def write(step):
        log.write("step", step=step)
        assert log.flush()

    write(1)
    log.path.unlink()
    write(2)
    write(3)
    assert steps(log.path) == [1, 2, 3] and len(caplog.records) == 1
    log.path.rename(tmp_path / "old")
    log.path.write_text('{"event": "step", "step": 7}\n{"torn')
    write(8)
    assert len(caplog.records) == 2 and steps(log.path) == [7, 8]
    run_file.write_text('{"run_id": "another", "created": "t", "launches": 1}')
    log.path.rename(tmp_path / "archived")
    write(9)
    log.close()
    assert not log.path.exists() and steps(tmp_path / "archived") == [7, 8, 9]


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("/dev/zero"), Path.mkdir])
def test_a_log_that_is_not_a_regular_file_is_refused(tmp_path, make):
    """Issue 17, item 23: a FIFO blocked forever."""
    make(path := tmp_path / "log.jsonl")
    for use in (RunLog, read_log, read_tail, lambda path: LogFollower(path).poll()):
        with refused("file.unreadable", path=path):
            use(path)
