"""Batches that a thread reads ahead: the same ones, the same states, the same errors."""

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from canon_pretrain.core.errors import UserError
from canon_pretrain.data.loader import BatchLoader, samples_digest
from canon_pretrain.data.shard_writer import write_shards
from canon_pretrain.data.shards import ShardError, TokenShards
from canon_pretrain.titan.command_line import parse_job
from canon_pretrain.titan.data import CLOSE_S, CanonDataLoader, build_dataloader
from canon_pretrain.titan.read_ahead import ReadAhead
from tests.support import EOS_ID, ROOT, VOCAB_SIZE, token_documents

SEQ_LEN, GLOBAL, LOCAL = 64, 6, 2
THREAD = "read ahead"


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    yield
    assert not threads()


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == THREAD]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """More than one 64-KiB block, so that damage can lie behind what is whole."""
    folder = tmp_path / "data" / "train"
    write_shards(folder, token_documents(3, 200, length=400), vocab_size=VOCAB_SIZE, eos_id=EOS_ID)
    return folder


def loader(folder: Path, read_ahead: int) -> CanonDataLoader:
    batches = BatchLoader(
        TokenShards.open(folder),
        data_seed=1,
        seq_len=SEQ_LEN,
        global_batch_size=GLOBAL,
        local_batch_size=LOCAL,
    )
    return CanonDataLoader(batches, read_ahead)


def take(iterator: Iterator[Any]) -> torch.Tensor:
    """The next micro-batch as one tensor."""
    inputs, labels = next(iterator)
    return torch.cat([inputs["input"], labels], dim=1)


def counter(stop_at: int | None = None) -> Any:
    numbers = iter(range(10**6))

    def read() -> int:
        if (number := next(numbers)) == stop_at:
            raise ShardError(f"nothing behind {number}")
        return number

    return read


def test_all_comes_in_order_and_an_error_in_its_place() -> None:
    ahead = ReadAhead(counter(stop_at=5), depth=3)
    time.sleep(0.05)
    assert [ahead.take() for _ in range(5)] == [0, 1, 2, 3, 4]
    for _ in range(2):
        with pytest.raises(ShardError, match="nothing behind 5"):
            ahead.take()
    assert ahead.close()


def test_no_more_is_read_than_was_asked_for() -> None:
    count, seen = counter(), []

    def read() -> int:
        seen.append(number := count())
        return number

    ahead = ReadAhead(read, depth=3)
    for taken in range(4):
        deadline = time.monotonic() + 5
        while len(seen) < taken + 3 and time.monotonic() < deadline:
            time.sleep(0.001)
        time.sleep(0.02)
        assert len(seen) == taken + 3
        assert ahead.take() == taken
    assert ahead.close()
    with pytest.raises(RuntimeError, match=r"close\(\) was called"):
        ahead.take()


def test_a_read_that_hangs_does_not_hang_the_end() -> None:
    free = threading.Event()
    ahead = ReadAhead(free.wait, depth=1)
    assert not ahead.close(timeout_s=0.01)
    assert all(thread.daemon for thread in threads())
    free.set()
    assert ahead.close(timeout_s=5)


def test_who_waits_hears_of_the_close() -> None:
    free = threading.Event()
    ahead = ReadAhead(free.wait, depth=1)
    threading.Timer(0.05, lambda: ahead.close(timeout_s=0)).start()
    with pytest.raises(RuntimeError, match="close"):
        ahead.take()
    free.set()
    assert ahead.close(timeout_s=5)


def test_a_slow_disk_is_not_waited_for() -> None:
    """A read takes 30 ms; computing, which takes 45, hides it."""
    pause = 0.03

    def read() -> int:
        time.sleep(pause)
        return 0

    waits = {}
    for depth in (0, 4):
        ahead = ReadAhead(read, depth) if depth else None
        source = read if ahead is None else ahead.take
        waited = 0.0
        for index in range(12):
            begin = time.perf_counter()
            source()
            waited += (time.perf_counter() - begin) * (index > 0)
            time.sleep(1.5 * pause)
        waits[depth] = waited
        if ahead is not None:
            ahead.close()
    assert waits[0] >= 11 * pause
    assert waits[4] < 0.3 * waits[0]


@pytest.mark.parametrize("depth", [1, 3, 50])
def test_batches_states_and_digests_are_those_of_a_loader_without(data: Path, depth: int) -> None:
    plain, ahead = loader(data, 0), loader(data, depth)
    ours, theirs = iter(ahead), iter(plain)
    assert ahead.state_dict() == plain.state_dict()
    for _ in range(7):
        assert torch.equal(take(ours), take(theirs))
        assert ahead.state_dict() == plain.state_dict()
        assert ahead.source_tokens == plain.source_tokens
    digests = plain.take_digests()
    assert ahead.take_digests() == digests and len(digests) == 3
    samples = BatchLoader(
        TokenShards.open(data),
        data_seed=1,
        seq_len=SEQ_LEN,
        global_batch_size=GLOBAL,
        local_batch_size=GLOBAL,
    )
    assert digests[:2] == [samples_digest(samples.next_batch()) for _ in range(2)]
    ahead.close()


def test_a_state_is_gone_on_from_exactly(data: Path) -> None:
    ahead = loader(data, 4)
    batches = iter(ahead)
    for _ in range(3):
        take(batches)
    state = ahead.state_dict()
    after = [take(batches) for _ in range(3)]
    ahead.load_state_dict(state)  # back, in the middle of iterating, with more in the queue
    assert ahead.state_dict() == state
    for expected in after:
        assert torch.equal(take(batches), expected)
    other = loader(data, 2)
    other.load_state_dict(state)
    rest = iter(other)
    assert torch.equal(take(rest), after[0])
    assert len(threads()) == 2
    rest.close()  # type: ignore[attr-defined]
    assert len(threads()) == 1
    # and closing goes back to what was taken
    ahead.close()
    assert not threads()
    assert ahead.loader.state_dict() == ahead.state_dict()
    reference = loader(data, 0)
    reference.load_state_dict(ahead.state_dict())
    assert torch.equal(take(batches), take(iter(reference)))
    ahead.close()


def test_a_refused_state_leaves_it_where_it_was(data: Path) -> None:
    ahead = loader(data, 4)
    batches = iter(ahead)
    first = take(batches)
    state = ahead.state_dict()
    with pytest.raises(UserError, match="seed is 9 in the checkpoint"):
        ahead.load_state_dict(state | {"seed": 9})
    second = take(batches)
    reference = iter(loader(data, 0))
    assert torch.equal(first, take(reference)) and torch.equal(second, take(reference))
    ahead.close()


def test_damage_is_told_when_its_batch_is_due_and_as_ever(data: Path) -> None:
    file = next(data.glob("*.bin"))
    content = bytearray(file.read_bytes())
    content[-1] ^= 1  # in the last block
    file.write_bytes(content)
    found = []
    for depth in (0, 6):
        batches = loader(data, depth)
        iterator, taken = iter(batches), []
        with pytest.raises(ShardError, match="damaged: 64-KiB block") as caught:
            while len(taken) < 500:
                taken.append(take(iterator))
        assert not threads()
        assert taken, "the first batch has the damage: choose another seed"
        found.append((len(taken), str(caught.value), batches.state_dict()))
        batches.close()
    assert found[0] == found[1]


def test_a_job_reads_ahead_as_its_file_says(data: Path) -> None:
    words = [
        "--config",
        str(ROOT / "train_configs" / "debug.toml"),
        "--data.path",
        str(data.parent),
    ]
    for more, expected in (([], True), (["--data.read_ahead", "0"], False)):
        batches = build_dataloader(1, 0, None, parse_job([*words, *more]))
        assert not threads()  # nothing is read before the first batch is asked for
        iterator = iter(batches)
        inputs, _ = next(iterator)
        assert inputs["input"].dtype == torch.int64 and inputs["input"].is_contiguous()
        assert bool(threads()) == expected
        del iterator
        assert not threads()
    with pytest.raises(UserError, match="data.read_ahead = -1: expected 0 or more"):
        parse_job([*words, "--data.read_ahead", "-1"])


def test_a_read_that_hangs_holds_up_neither_the_last_checkpoint_nor_the_end_twice(
    data: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    batches = loader(data, 3)
    free, read = threading.Event(), batches.loader.next_batch
    calls = iter(range(100))

    def hang_at_the_third() -> Any:
        if next(calls) == 2:
            free.wait()
        return read()

    monkeypatch.setattr(batches.loader, "next_batch", hang_at_the_third)
    steps = iter(batches)
    for _ in range(2):
        take(steps)
    state = batches.state_dict()
    begin = time.monotonic()
    steps.close()  # type: ignore[attr-defined]
    assert time.monotonic() - begin < CLOSE_S / 2
    assert not caplog.records
    batches.close(timeout_s=0.01)
    assert [record.getMessage() for record in caplog.records] == [
        "the data could not be let go: a read takes more than 0.01 s"
    ]
    assert batches.state_dict() == state
    free.set()
    batches.close()
    assert batches.loader.state_dict() == state


def test_a_state_that_was_given_away_is_written_into_without_effect(data: Path) -> None:
    """As torch's distributed checkpoint does in loading, before the loader could refuse it."""
    batches = loader(data, 2)
    before = batches.state_dict()
    given = batches.state_dict()
    given["next_sample"] = 6
    given["source_tokens"][0] = 5
    assert batches.state_dict() == before
    assert set(batches.source_tokens.values()) == {0}


def test_windows_do_not_share_memory_with_what_is_read_next(data: Path) -> None:
    batches = loader(data, 2)
    iterator = iter(batches)
    first = next(iterator)[0]["input"]
    copy = first.clone()
    for _ in range(5):
        next(iterator)
    assert torch.equal(first, copy)
    batches.close()
