"""The loader: one order at any world size and through resumes, and states that do not match."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from canon_pretrain.data.loader import BatchLoader, samples_digest
from canon_pretrain.data.mixture import Mixture
from canon_pretrain.data.sampler import permuted_offset
from canon_pretrain.data.shard_writer import write_shards
from tests.corpora import flip
from tests.support import refused

SEED, SEQ_LEN, GLOBAL_BATCH, STEPS = 7, 16, 12, 10
WEIGHTS = (0.2, 0.7, 0.1)
KINDS = ("random", "permute", "mixture")
Open = Callable[[], Mixture]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Return three data folders with tokens 0 to 99, 100 to 199 and 200 to 299."""
    base = tmp_path_factory.mktemp("mixed")
    found = []
    for k, length in enumerate((900, 2000, 400)):
        found.append(base / f"source{k}")
        tokens = 100 * k + np.random.default_rng(k).integers(0, 100, length)
        documents = np.split(tokens, 10)
        write_shards(found[-1] / "train", documents, vocab_size=500, eos_id=2, max_shard_tokens=300)
    return found


@pytest.fixture
def opened(folders: list[Path], request: pytest.FixtureRequest) -> tuple[Open, str]:
    """Return data of one of KINDS, and its order."""
    if request.param == "mixture":
        return lambda: Mixture.open(folders, WEIGHTS), "random"
    return lambda: Mixture.open(folders[:1]), request.param


all_kinds = pytest.mark.parametrize("opened", KINDS, indirect=True)


def loaders(data: Open, world: int, local_batch: int = 1, **changed: Any) -> list[BatchLoader]:
    sizes = {"data_seed": SEED, "seq_len": SEQ_LEN, "global_batch_size": GLOBAL_BATCH, **changed}
    return [
        BatchLoader(
            data(), local_batch_size=local_batch, dp_rank=rank, dp_world_size=world, **sizes
        )
        for rank in range(world)
    ]


def step(ranks: list[BatchLoader]) -> np.ndarray:
    """Return a global batch in sample order, [GLOBAL_BATCH, SEQ_LEN + 1]."""
    goal = ranks[0].next_sample + GLOBAL_BATCH
    rows = []
    while ranks[0].next_sample < goal:
        rows += [loader.next_batch() for loader in ranks]
        assert len({loader.next_sample for loader in ranks}) == 1
    return np.concatenate(rows)


def expected(mixture: Mixture, order: str) -> tuple[np.ndarray, list[int]]:
    """Compute all steps and each sample's source from NumPy's Philox and the streams alone."""
    streams = [source.read(0, source.num_tokens) for source in mixture.sources]
    rows, sources = [], []
    for i in range(STEPS * GLOBAL_BATCH):
        word0, word1 = np.random.Philox(key=SEED, counter=(i - 1) % 2**256).random_raw(2).tolist()
        source = 0 if 10 * word1 < 2 * 2**64 else 1 if 10 * word1 < 9 * 2**64 else 2
        sources.append(source if len(streams) > 1 else 0)
        stream = streams[sources[-1]]
        offset = word0 * (len(stream) - SEQ_LEN) // 2**64
        if order == "permute":
            offset = permuted_offset(SEED, i, len(stream), SEQ_LEN)
        rows.append(stream[offset : offset + SEQ_LEN + 1])
    return np.stack(rows).reshape(STEPS, GLOBAL_BATCH, SEQ_LEN + 1), sources


@all_kinds
@pytest.mark.parametrize(("world", "local"), [(1, 12), (1, 4), (2, 3), (2, 6), (3, 4), (4, 1)])
def test_order_is_the_formula_at_every_world_size(opened, world, local):
    data, order = opened
    batches, sources = expected(data(), order)
    ranks = loaders(data, world, local, order=order)
    for k in range(STEPS):
        batch = step(ranks)
        assert batch.dtype == np.int64
        np.testing.assert_array_equal(batch, batches[k])
        seen = sources[: (k + 1) * GLOBAL_BATCH]
        counts = [SEQ_LEN * seen.count(source) for source in range(len(data().sources))]
        assert all(loader.source_tokens == counts for loader in ranks)
    assert ranks[0].source_names == ("source0", "source1", "source2")[: len(counts)]
    assert min(counts) > 0


@all_kinds
def test_resume_at_other_world_sizes(opened):
    data, order = opened
    batches, state = [], None
    for world, local, steps in [(4, 3, 3), (1, 2, 2), (3, 1, 1), (2, 6, 4)]:
        ranks = loaders(data, world, local, order=order)
        for loader in ranks:
            if state is not None:
                loader.load_state_dict(state)
        batches += [step(ranks) for _ in range(steps)]
        states = [loader.state_dict() for loader in ranks]
        step(ranks)  # must not change the states
        assert all(one == states[0] for one in states)
        state = states[0]
    np.testing.assert_array_equal(np.stack(batches), expected(data(), order)[0])
    assert state and sum(state["source_tokens"]) == STEPS * GLOBAL_BATCH * SEQ_LEN


def test_a_changed_state_is_refused_unless_allowed(folders):
    (loader,) = loaders(lambda: Mixture.open(folders, WEIGHTS), 1, 12)
    loader.next_batch()
    state = loader.state_dict()
    changes = {"version": 1, "fingerprint": "0" * 64, "seed": 8, "mode": "permute", "seq_len": 32}
    for field, value in (changes | {"global_batch": 24}).items():
        with refused("data.order_changed", field=field):
            loader.load_state_dict({**state, field: value})
        assert loader.state_dict() == state
        # if allowed, resume there; tokens of new data are counted from there
        loader.load_state_dict({**state, field: value}, allow={field})
        assert loader.next_sample == GLOBAL_BATCH and loader.at_step_start
        kept = field != "fingerprint"
        assert loader.source_tokens == (state["source_tokens"] if kept else [0] * 3)
        loader.load_state_dict(state)


def test_a_state_inside_a_step_needs_its_world_size(folders):
    (loader,) = loaders(lambda: Mixture.open(folders, WEIGHTS), 1, 4)
    loader.next_batch()
    with refused("data.inside_step"):
        loaders(lambda: Mixture.open(folders, WEIGHTS), 1, 12)[0].load_state_dict(
            loader.state_dict()
        )


@pytest.mark.parametrize(
    ("changed", "code"),
    [
        ({"global_batch_size": 10}, "data.batch_size"),
        ({"global_batch_size": 0}, "data.out_of_range"),
        ({"seq_len": 0}, "data.out_of_range"),
        ({"seq_len": 900}, "data.too_short"),
        ({"data_seed": -1}, "data.out_of_range"),
        ({"local_batch": 0}, "data.out_of_range"),
        ({"order": "shuffle"}, "config.unknown_choice"),
        ({"order": "permute"}, "data.order"),
    ],
)
def test_bad_sizes_and_orders_are_refused(folders, changed, code):
    with refused(code):
        loaders(lambda: Mixture.open(folders, WEIGHTS), 2, **{"local_batch": 3, **changed})


def test_the_digest_of_a_batch_is_a_sum_over_samples():
    batch = np.arange(6 * 9, dtype=np.int64).reshape(6, 9)
    whole = samples_digest(batch)
    assert whole == samples_digest(batch[::-1])
    assert whole == (samples_digest(batch[:2]) + samples_digest(batch[2:])) % 2**64
    for place in np.ndindex(batch.shape):  # every token counts
        changed = batch.copy()
        changed[place] += 1
        assert samples_digest(changed) != whole
    assert samples_digest(batch[:0]) == 0


def test_damaged_data_leaves_position_and_counts(tmp_path):
    for name, low in (("a", 0), ("b", 50)):
        write_shards(tmp_path / name / "train", [low + np.arange(50)], vocab_size=100, eos_id=2)
    (loader,) = loaders(lambda: Mixture.open([tmp_path / "a", tmp_path / "b"], [1, 1]), 1, 12)
    loader.next_batch()
    state, path = loader.state_dict(), tmp_path / "b/train/part-00000-0.bin"
    flip(path, 0)
    with refused("shard.damaged", path=path, block=0):
        loader.next_batch()
    assert loader.state_dict() == state
    flip(path, 0)
    loader.next_batch()
    assert sum(loader.source_tokens) == 24 * SEQ_LEN
