"""The loader: one order at every world size, through resumes, and states that do not fit."""

import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from canon_pretrain.core.errors import UserError
from canon_pretrain.data.loader import BatchLoader, samples_digest
from canon_pretrain.data.mixture import Mixture
from canon_pretrain.data.sampler import num_windows, permuted_offset
from canon_pretrain.data.shard_writer import write_shards
from canon_pretrain.data.shards import ShardError, TokenShards

SEED, SEQ_LEN, GLOBAL_BATCH, STEPS = 7, 16, 12, 10


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data") / "train"
    documents = np.split(np.random.default_rng(1).integers(0, 500, 5000), 50)
    write_shards(folder, documents, vocab_size=500, eos_id=2, max_part_tokens=700)
    return folder


def loaders(
    data: Path | Callable[[], Mixture], world: int, local_batch: int = 1, **changed: Any
) -> list[BatchLoader]:
    sizes = {"data_seed": SEED, "seq_len": SEQ_LEN, "global_batch_size": GLOBAL_BATCH, **changed}
    return [
        BatchLoader(
            data() if callable(data) else TokenShards.open(data),
            local_batch_size=local_batch,
            dp_rank=rank,
            dp_world_size=world,
            **sizes,
        )
        for rank in range(world)
    ]


def step(ranks: list[BatchLoader]) -> np.ndarray:
    """One global batch in global order, [GLOBAL_BATCH, SEQ_LEN + 1]."""
    goal = ranks[0].next_sample + GLOBAL_BATCH
    rows = []
    while ranks[0].next_sample < goal:
        rows += [loader.next_batch() for loader in ranks]
        assert len({loader.next_sample for loader in ranks}) == 1
    return np.concatenate(rows)


@pytest.fixture(scope="module")
def expected(folder: Path) -> np.ndarray:
    """The steps from the formula alone: numpy's Philox and the concatenated stream."""
    with TokenShards.open(folder) as shards:
        stream = shards.read(0, shards.num_tokens)
    rows = []
    for i in range(STEPS * GLOBAL_BATCH):
        word = int(np.random.Philox(key=SEED, counter=(i - 1) % 2**256).random_raw())
        offset = word * (len(stream) - SEQ_LEN) // 2**64
        rows.append(stream[offset : offset + SEQ_LEN + 1])
    return np.stack(rows).reshape(STEPS, GLOBAL_BATCH, SEQ_LEN + 1)


@pytest.mark.parametrize(("world", "local"), [(1, 12), (1, 4), (2, 3), (2, 6), (3, 4), (4, 1)])
def test_order_is_the_same_at_every_world_size(
    folder: Path, expected: np.ndarray, world: int, local: int
) -> None:
    ranks = loaders(folder, world, local)
    batches = np.stack([step(ranks) for _ in range(STEPS)])
    assert batches.dtype == np.int64
    np.testing.assert_array_equal(batches, expected)


def test_resume_at_other_world_sizes(folder: Path, expected: np.ndarray) -> None:
    batches, state = [], None
    for world, local, steps in [(4, 3, 3), (1, 2, 2), (3, 1, 1), (2, 6, 4)]:
        ranks = loaders(folder, world, local)
        for loader in ranks:
            if state is not None:
                loader.load_state_dict(state)
        batches += [step(ranks) for _ in range(steps)]
        states = [loader.state_dict() for loader in ranks]
        assert all(one == states[0] for one in states)
        state = states[0]
    np.testing.assert_array_equal(np.stack(batches), expected)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("version", 1),
        ("fingerprint", "0" * 64),
        ("seed", 8),
        ("mode", "permute"),
        ("seq_len", 32),
        ("global_batch", 24),
    ],
)
def test_a_state_that_differs_is_refused(folder: Path, field: str, value: object) -> None:
    (loader,) = loaders(folder, 1, 12)
    loader.next_batch()
    state = loader.state_dict()
    with pytest.raises(UserError, match=re.escape(f"{field} is {value!r}")) as caught:
        loader.load_state_dict({**state, field: value})
    assert f"{state[field]!r} now; " in str(caught.value)
    assert loader.state_dict() == state


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"global_batch_size": 10}, "10 is not a multiple of dp_world_size 2 \\* local_batch"),
        ({"global_batch_size": 0}, "global_batch_size is 0"),
        ({"seq_len": 0}, "seq_len is 0"),
        ({"seq_len": 5000}, "needs at least 5001"),
        ({"data_seed": -1}, "data_seed is -1"),
        ({"local_batch_size": 0}, "local_batch_size is 0"),
        ({"order": "shuffle"}, 'data.order = "shuffle" is not known'),
    ],
)
def test_sizes_that_do_not_fit_are_refused(folder: Path, changed: dict, message: str) -> None:
    sizes = {
        "data_seed": SEED,
        "seq_len": SEQ_LEN,
        "global_batch_size": GLOBAL_BATCH,
        "local_batch_size": 3,
        "dp_rank": 0,
        "dp_world_size": 2,
    }
    with TokenShards.open(folder) as shards, pytest.raises(UserError, match=message):
        BatchLoader(shards, **{**sizes, **changed})


def test_the_digest_of_a_batch_is_the_sum_of_its_shares_in_any_order() -> None:
    batch = np.arange(6 * 9, dtype=np.int64).reshape(6, 9)
    whole = samples_digest(batch)
    assert whole == samples_digest(batch[::-1])
    assert whole == (samples_digest(batch[:2]) + samples_digest(batch[2:])) % 2**64
    for place in np.ndindex(batch.shape):  # one other token anywhere is another digest
        changed = batch.copy()
        changed[place] += 1
        assert samples_digest(changed) != whole
    assert samples_digest(batch[:0]) == 0


# -- order "permute" ---------------------------------------------------------------------------


def test_permute_serves_each_window_once_an_epoch_at_every_world_size(folder: Path) -> None:
    windows = num_windows(5000, SEQ_LEN)
    steps = -(-2 * windows // GLOBAL_BATCH)  # into the third epoch
    with TokenShards.open(folder) as shards:
        stream = shards.read(0, shards.num_tokens)
    offsets = [permuted_offset(SEED, i, 5000, SEQ_LEN) for i in range(steps * GLOBAL_BATCH)]
    expected = np.stack([stream[offset : offset + SEQ_LEN + 1] for offset in offsets])
    for epoch in (0, 1):
        seen = Counter(offsets[epoch * windows : (epoch + 1) * windows])
        assert seen == Counter(range(0, windows * SEQ_LEN, SEQ_LEN))
    for world, local in [(1, 12), (3, 2)]:
        ranks = loaders(folder, world, local, order="permute")
        batches = np.concatenate([step(ranks) for _ in range(steps)])
        np.testing.assert_array_equal(batches, expected)


def test_permute_resumes_at_another_world_size_and_not_as_random(folder: Path) -> None:
    whole = loaders(folder, 1, 12, order="permute")
    expected = [step(whole) for _ in range(6)]
    first, second = loaders(folder, 4, order="permute"), loaders(folder, 2, 3, order="permute")
    for k in range(3):
        np.testing.assert_array_equal(step(first), expected[k])
    state = first[0].state_dict()
    for loader in second:
        loader.load_state_dict(state)
    for k in range(3, 6):
        np.testing.assert_array_equal(step(second), expected[k])
    (other,) = loaders(folder, 1, 12)
    with pytest.raises(UserError, match="mode is 'permute' in the checkpoint, 'random' now"):
        other.load_state_dict(state)
    other.load_state_dict(state, allow={"mode"})
    assert other.next_sample == 3 * GLOBAL_BATCH


# -- mixtures ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Three folders of data whose tokens tell where they are from: 0 to 99, 100 to 199, ..."""
    base = tmp_path_factory.mktemp("mixed")
    found = []
    for k, length in enumerate((900, 2000, 400)):
        found.append(base / f"source{k}")
        tokens = 100 * k + np.random.default_rng(k).integers(0, 100, length)
        write_shards(found[-1] / "train", [tokens], vocab_size=500, eos_id=2, max_part_tokens=2000)
    return found


WEIGHTS = (0.2, 0.7, 0.1)


def test_a_mixture_is_the_formula_at_every_world_size_and_counts_its_sources(
    folders: list[Path],
) -> None:
    streams = []
    for one in folders:
        with TokenShards.open(one / "train") as shards:
            streams.append(shards.read(0, shards.num_tokens))
    rows, sources = [], []
    for i in range(STEPS * GLOBAL_BATCH):
        word0, word1 = np.random.Philox(key=SEED, counter=(i - 1) % 2**256).random_raw(2).tolist()
        source = 0 if 10 * word1 < 2 * 2**64 else 1 if 10 * word1 < 9 * 2**64 else 2
        offset = word0 * (len(streams[source]) - SEQ_LEN) // 2**64
        rows.append(streams[source][offset : offset + SEQ_LEN + 1])
        sources.append(source)
    expected = np.stack(rows).reshape(STEPS, GLOBAL_BATCH, SEQ_LEN + 1)
    for world, local in [(1, 12), (2, 3), (4, 1), (3, 4)]:
        ranks = loaders(lambda: Mixture.open(folders, WEIGHTS), world, local)
        for k in range(STEPS):
            np.testing.assert_array_equal(step(ranks), expected[k])
            seen = sources[: (k + 1) * GLOBAL_BATCH]
            counts = [SEQ_LEN * seen.count(source) for source in range(3)]
            assert all(loader.source_tokens == counts for loader in ranks)
        assert ranks[0].source_names == ("source0", "source1", "source2")
        assert min(counts) > 0


def test_a_mixture_resumes_with_its_counts(folders: list[Path]) -> None:
    whole = loaders(lambda: Mixture.open(folders, WEIGHTS), 1, 12)
    expected = [step(whole) for _ in range(6)]
    first = loaders(lambda: Mixture.open(folders, WEIGHTS), 3, 2)
    for k in range(3):
        np.testing.assert_array_equal(step(first), expected[k])
    states = [loader.state_dict() for loader in first]
    assert all(state == states[0] for state in states)
    step(first)  # a state that was given is not what the loader counts on
    assert states[0] == states[1]
    second = loaders(lambda: Mixture.open(folders, WEIGHTS), 4, 3)
    for loader in second:
        loader.load_state_dict(states[0])
    for k in range(3, 6):
        np.testing.assert_array_equal(step(second), expected[k])
    assert all(loader.state_dict() == whole[0].state_dict() for loader in second)
    assert sum(states[0]["source_tokens"]) == 3 * GLOBAL_BATCH * SEQ_LEN


def test_permute_of_a_mixture_is_refused(folders: list[Path]) -> None:
    with pytest.raises(UserError, match="not a weighted mixture"):
        loaders(lambda: Mixture.open(folders, WEIGHTS), 1, 12, order="permute")


@pytest.mark.parametrize("change", ["weights", "order of folders", "folders"])
def test_a_state_of_another_mixture_is_refused(folders: list[Path], change: str) -> None:
    before = loaders(lambda: Mixture.open(folders, WEIGHTS), 1, 12)[0]
    before.next_batch()
    chosen, weights = {
        "weights": (folders, (0.2, 0.6, 0.2)),
        "order of folders": ([folders[1], folders[0], folders[2]], (0.7, 0.2, 0.1)),
        "folders": (folders[:2], (0.2, 0.8)),
    }[change]
    after = loaders(lambda: Mixture.open(chosen, weights), 1, 12)[0]
    with pytest.raises(UserError, match="fingerprint is .* in the checkpoint"):
        after.load_state_dict(before.state_dict())
    # told to, it goes on there and counts the new sources from there
    after.load_state_dict(before.state_dict(), allow={"fingerprint"})
    assert after.next_sample == GLOBAL_BATCH and after.source_tokens == [0] * len(chosen)


def test_damage_in_a_mixture_leaves_position_and_counts(tmp_path: Path) -> None:
    for name, low in (("a", 0), ("b", 50)):
        write_shards(tmp_path / name / "train", [low + np.arange(50)], vocab_size=100, eos_id=2)
    both = [tmp_path / "a", tmp_path / "b"]
    (loader,) = loaders(lambda: Mixture.open(both, [1, 1]), 1, 12)
    loader.next_batch()
    state = loader.state_dict()
    path = tmp_path / "b/train/part-00000-0.bin"
    content = path.read_bytes()
    path.write_bytes(b"\xff" + content[1:])
    with pytest.raises(ShardError, match="b/train/part-00000-0.bin: damaged: 64-KiB block 0"):
        loader.next_batch()
    assert loader.state_dict() == state
    path.write_bytes(content)
    loader.next_batch()
    assert sum(loader.source_tokens) == 24 * SEQ_LEN
