"""The loader: one order at every world size, through resumes, and states that do not fit."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from canon_pretrain.data.loader import BatchLoader, samples_digest
from canon_pretrain.data.shard_writer import write_shards
from canon_pretrain.data.shards import ShardError, TokenShards
from canon_pretrain.errors import UserError

SEED, SEQ_LEN, GLOBAL_BATCH, STEPS = 7, 16, 12, 10


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data") / "train"
    documents = np.split(np.random.default_rng(1).integers(0, 500, 5000), 50)
    write_shards(folder, documents, vocab_size=500, eos_id=2, max_part_tokens=700)
    return folder


def loaders(folder: Path, world: int, local_batch: int = 1, **changed: Any) -> list[BatchLoader]:
    sizes = {"data_seed": SEED, "seq_len": SEQ_LEN, "global_batch_size": GLOBAL_BATCH, **changed}
    return [
        BatchLoader(
            TokenShards.open(folder),
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


def test_resume_between_micro_batches(folder: Path, expected: np.ndarray) -> None:
    (loader,) = loaders(folder, 1, 4)
    loader.next_batch()
    (again,) = loaders(folder, 1, 2)
    again.load_state_dict(loader.state_dict())
    np.testing.assert_array_equal(again.next_batch(), expected[0, 4:6])
    three = loaders(folder, 3, 1)[0]
    with pytest.raises(UserError, match="next_sample is 4, expected a multiple of .* = 3"):
        three.load_state_dict(loader.state_dict())


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("version", 2),
        ("fingerprint", "0" * 64),
        ("seed", 8),
        ("mode", "permute"),
        ("seq_len", 32),
        ("global_batch", 24),
        ("next_sample", -12),
        ("next_sample", "12"),
    ],
)
def test_a_state_that_differs_is_refused(folder: Path, field: str, value: object) -> None:
    (loader,) = loaders(folder, 1, 12)
    loader.next_batch()
    state = loader.state_dict()
    with pytest.raises(UserError, match=rf"{field} is {value!r}") as caught:
        loader.load_state_dict({**state, field: value})
    if field != "next_sample":
        assert f"{state[field]!r} now; " in str(caught.value)
    assert loader.state_dict() == state


def test_a_state_without_a_field_is_refused(folder: Path) -> None:
    (loader,) = loaders(folder, 1, 12)
    for field in loader.state_dict():
        state = {key: value for key, value in loader.state_dict().items() if key != field}
        with pytest.raises(UserError, match=f"has no '{field}'"):
            loader.load_state_dict(state)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"global_batch_size": 10}, "10 is not a multiple of dp_world_size 2 \\* local_batch"),
        ({"global_batch_size": 0}, "global_batch_size is 0"),
        ({"seq_len": 0}, "seq_len is 0"),
        ({"seq_len": 5000}, "needs at least 5001"),
        ({"data_seed": -1}, "data_seed is -1"),
        ({"dp_rank": 2}, "dp_rank is 2, expected 0 to 1"),
        ({"local_batch_size": 0}, "local_batch_size is 0"),
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


def test_damage_leaves_the_position(tmp_path: Path) -> None:
    write_shards(tmp_path, [np.arange(50)], vocab_size=50, eos_id=2)
    (loader,) = loaders(tmp_path, 1, 12)
    path = tmp_path / "part-00000-0.bin"
    content = path.read_bytes()
    path.write_bytes(b"\xff" + content[1:])
    with pytest.raises(ShardError, match="block 0"):
        loader.next_batch()
    assert loader.next_sample == 0
    path.write_bytes(content)
    assert loader.next_batch().shape == (12, SEQ_LEN + 1)


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
