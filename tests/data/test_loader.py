"""The order of samples, mixtures, and the loader at any world size and through resumes."""

from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from canon_pretrain.data.loader import BatchLoader, samples_digest
from canon_pretrain.data.mixture import Mixture, exact_weight, thresholds
from canon_pretrain.data.sampler import permuted, permuted_offset, philox_blocks
from canon_pretrain.data.shard_writer import write_shards
from canon_pretrain.data.shards import TokenShards
from tests.corpora import flip
from tests.support import refused

LARGEST = 2**64 - 1
SEED = 7
SEQ_LEN = 16
GLOBAL_BATCH = 12
STEPS = 10
WEIGHTS = (0.2, 0.7, 0.1)
EOS = 2


def philox(seed, sample, words):
    """Return the first words of NumPy's stream, which increments the counter before each block."""
    return np.random.Philox(key=seed, counter=(sample - 1) % 2**256).random_raw(words).tolist()


def test_first_values_are_pinned():
    """Another order would change every resumed run."""
    first_block = philox_blocks(0, 0, 1)[0].tolist()
    assert first_block == [
        0x16554D9ECA36314C,
        0xDB20FE9D672D0FDC,
        0xD7E772CEE186176B,
        0x7E68B68AEC7BA23B,
    ]
    assert philox_blocks(1337, 12345, 1)[0, 0] == 0x61AF58222B24F8E5

    offsets = [permuted_offset(1337, i, 116_000_000_000, 4096) for i in range(3)]
    assert offsets == [35743023104, 47157264384, 64071282688]
    offsets_of_few = [permuted_offset(0, i, 100, 9) for i in range(11)]
    assert offsets_of_few == [36, 81, 0, 45, 18, 9, 90, 27, 54, 63, 72]
    documents = [permuted(1337, i, 2_119_719) for i in (0, 1, 2_119_719)]
    assert documents == [1528900, 2106758, 1530200]


@pytest.mark.parametrize("seed", [0, 1337, LARGEST])
@pytest.mark.parametrize("first", [0, 1, 24_480_000, 2**53 + 1, LARGEST - 6])
def test_blocks_of_many_samples_equal_single_ones(seed, first):
    for count in (1, 3, 4, 7):
        blocks = philox_blocks(seed, first, count)

        assert blocks.dtype == np.uint64
        assert blocks.shape == (count, 4)
        assert blocks.tolist() == [philox(seed, first + j, words=4) for j in range(count)]


@settings(derandomize=True, deadline=None, max_examples=100)
@given(
    seed=st.integers(0, LARGEST),
    epoch=st.integers(0, 10**9),
    more_tokens=st.integers(2, 3000),
    seq_len=st.integers(1, 40),
)
def test_permute_visits_each_window_once_per_epoch(seed, epoch, more_tokens, seq_len):
    num_tokens = more_tokens + seq_len
    starts = list(range(0, num_tokens - seq_len, seq_len))
    samples = range(epoch * len(starts), (epoch + 1) * len(starts))

    offsets = [permuted_offset(seed, i, num_tokens, seq_len) for i in samples]

    assert sorted(offsets) == starts


# ---- mixtures


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Return three data folders with tokens 0 to 99, 100 to 199 and 200 to 299."""
    base = tmp_path_factory.mktemp("mixed")
    folders = []
    for k, length in enumerate((900, 2000, 400)):
        tokens = 100 * k + np.random.default_rng(k).integers(0, 100, length)
        documents = np.split(tokens, 10)
        folder = base / f"source{k}"
        write_shards(folder / "train", documents, vocab_size=500, eos_id=EOS, max_shard_tokens=300)
        folders.append(folder)
    return folders


@pytest.fixture(scope="module")
def stories(tmp_path_factory):
    """Return a data folder of documents with fewer and more tokens than a window, in shards."""
    folder = tmp_path_factory.mktemp("stories")
    rng = np.random.default_rng(9)
    documents = [rng.integers(3, 500, length) for length in (*range(1, 2 * SEQ_LEN), *range(4, 18))]
    for document in documents:
        document[-1] = EOS
    write_shards(folder / "train", documents, vocab_size=500, eos_id=EOS, max_shard_tokens=200)
    return folder


def write(folder, k, **changed):
    """Write a data folder of one document of 100 + k tokens."""
    options = {"vocab_size": 500, "eos_id": 2, **changed}
    write_shards(folder / "train", [np.arange(100 + k)], **options)
    return folder


@settings(derandomize=True, deadline=None)
@given(st.lists(st.integers(1, 10**6), min_size=1, max_size=8), st.lists(st.integers(0, LARGEST)))
def test_words_select_sources_by_exact_intervals(weights, words):
    total = sum(weights)
    bounds = thresholds([Fraction(weight, total) for weight in weights])
    # also at each bound, where floating point would round
    for bound in bounds:
        words = [*words, int(bound) - 1, int(bound), int(bound) + 1]
    words = [*words, 0, LARGEST]

    sources = np.searchsorted(bounds, np.array(words, dtype=np.uint64), side="right")

    ends = np.cumsum(weights).tolist()
    for word, source in zip(words, sources.tolist(), strict=True):
        # integers only: word < floor(end * 2**64 / total)
        assert source == next(k for k, end in enumerate(ends) if word < (end << 64) // total)


@pytest.mark.parametrize(
    ("weight", "exact"), [(0.7, Fraction(7, 10)), (7, 7), (1e-05, Fraction(1, 100_000))]
)
def test_a_weight_is_the_decimal_number_that_was_written(weight, exact):
    assert exact_weight(weight) == exact


def test_fingerprint_depends_on_data_shares_and_order(folders, tmp_path):
    web, books, code = folders
    other = write(tmp_path / "source2", 9)
    fingerprint = Mixture.open(folders, [0.5, 0.3, 0.2]).fingerprint

    # the same order of the same samples
    assert Mixture.open(folders, [5, 3, 2]).fingerprint == fingerprint
    others = [
        Mixture.open(folders, [0.5, 0.2, 0.3]),
        Mixture.open([books, web, code], [0.3, 0.5, 0.2]),
        Mixture.open([web, books], [0.5, 0.5]),
        Mixture.open([web, books, other], [0.5, 0.3, 0.2]),
    ]
    assert len({fingerprint, *(mixture.fingerprint for mixture in others)}) == 5

    alone = TokenShards.open(web / "train").fingerprint
    assert Mixture.open([web], [0.7]).fingerprint == alone


@pytest.mark.parametrize(
    "weights",
    [
        [1, 1],
        [1, 1, 0],
        [1, -1, 2],
        [1, 1, float("nan")],
        [1, 1, float("inf")],
        [1, 1e-30, 1],
    ],
    ids=str,
)
def test_bad_weights_are_refused(folders, weights):
    with refused("data.weights"):
        Mixture.open(folders, weights)


@pytest.mark.parametrize(
    ("field", "value"), [("tokenizer_sha256", "u"), ("vocab_size", 501), ("eos_id", 3)]
)
def test_sources_of_different_tokenizers_are_refused(folders, tmp_path, field, value):
    other = write(tmp_path / field, 7, **{field: value})
    with refused("data.tokenizers_differ", field=field):
        Mixture.open([folders[0], other], [1, 1])


def test_the_same_source_twice_is_refused(tmp_path):
    with refused("data.same_twice"):
        Mixture.open([write(tmp_path / name, 0) for name in "ab"], [1, 1])


# ---- the loader


@pytest.fixture
def opened(folders, stories, request):
    """Return a function that opens the data, and the order of its samples."""
    if request.param == "documents":
        return lambda: Mixture.open([stories]), request.param
    if request.param == "mixture":
        return lambda: Mixture.open(folders, WEIGHTS), "random"
    return lambda: Mixture.open(folders[:1]), request.param


all_kinds = pytest.mark.parametrize(
    "opened", ["random", "permute", "documents", "mixture"], indirect=True
)


def loaders(data, world, local_batch=1, **changed):
    """Return the loader of each rank; `data` opens the mixture."""
    options = {
        "data_seed": SEED,
        "seq_len": SEQ_LEN,
        "global_batch_size": GLOBAL_BATCH,
        "local_batch_size": local_batch,
        **changed,
    }
    return [
        BatchLoader(data(), dp_rank=rank, dp_world_size=world, **options) for rank in range(world)
    ]


def source_by_formula(word):
    """Return the source of a sample of WEIGHTS: of a word over 2**64 below 0.2, 0.9 and 1."""
    if 10 * word < 2 * 2**64:
        return 0
    return 1 if 10 * word < 9 * 2**64 else 2


def step(ranks):
    """Return a global batch in sample order, [GLOBAL_BATCH, SEQ_LEN + 1]."""
    goal = ranks[0].next_sample + GLOBAL_BATCH
    rows = []
    while ranks[0].next_sample < goal:
        rows += [loader.next_batch() for loader in ranks]
        assert len({loader.next_sample for loader in ranks}) == 1
    return np.concatenate(rows)


def expected(mixture, order):
    """Return the batches [STEPS, GLOBAL_BATCH, SEQ_LEN + 1], and the source of each sample."""
    streams = [source.read(0, source.num_tokens) for source in mixture.sources]
    rows = []
    sources = []
    for i in range(STEPS * GLOBAL_BATCH):
        offset_word, source_word = philox(SEED, i, words=2)
        source = source_by_formula(source_word) if len(streams) > 1 else 0
        stream = streams[source]
        if order == "documents":
            documents = np.split(stream, mixture.sources[0].document_ends()[:-1])
            row = documents[permuted(SEED, i, len(documents))][: SEQ_LEN + 1]
            row = [*row, *[~EOS] * (SEQ_LEN + 1 - len(row))]
            rows.append(np.array(row))
            sources.append(0)
            continue
        if order == "permute":
            offset = permuted_offset(SEED, i, len(stream), SEQ_LEN)
        else:
            offset = offset_word * (len(stream) - SEQ_LEN) // 2**64
        rows.append(stream[offset : offset + SEQ_LEN + 1])
        sources.append(source)
    return np.stack(rows).reshape(STEPS, GLOBAL_BATCH, SEQ_LEN + 1), sources


@all_kinds
@pytest.mark.parametrize(("world", "local"), [(1, 12), (1, 4), (2, 3), (2, 6), (3, 4), (4, 1)])
def test_order_is_the_formula_at_every_world_size(opened, world, local):
    data, order = opened
    batches, sources = expected(data(), order)
    num_sources = len(data().sources)
    ranks = loaders(data, world, local, order=order)

    for k in range(STEPS):
        batch = step(ranks)

        assert batch.dtype == np.int64
        np.testing.assert_array_equal(batch, batches[k])
        sources_so_far = sources[: (k + 1) * GLOBAL_BATCH]
        counts = [SEQ_LEN * sources_so_far.count(source) for source in range(num_sources)]
        assert all(loader.source_tokens == counts for loader in ranks)
    assert ranks[0].source_names == tuple(data().names)
    assert min(counts) > 0


def test_each_document_is_seen_once_per_epoch_in_its_own_window(stories):
    """Labels are those of the document, without its first token and what the window cuts off."""
    with TokenShards.open(stories / "train") as shards:
        ends = shards.document_ends().tolist()
        stream = shards.read(0, shards.num_tokens).tolist()
    documents = [stream[start:end] for start, end in pairwise([0, *ends])]
    size = len(documents)
    options = {"order": "documents", "global_batch_size": size}
    (loader,) = loaders(lambda: Mixture.open([stories]), 1, size, **options)
    assert loader.is_masked

    epochs = []
    for _ in range(3):
        batch = loader.next_batch()
        is_label = batch >= 0
        inputs = np.where(is_label, batch, ~batch)
        rows = []
        for row, labels in zip(inputs.tolist(), is_label.tolist(), strict=True):
            num_tokens = sum(labels)
            assert labels == [True] * num_tokens + [False] * (SEQ_LEN + 1 - num_tokens)
            assert set(row[num_tokens:]) <= {EOS}
            rows.append(row[:num_tokens])
        assert sorted(rows) == sorted(document[: SEQ_LEN + 1] for document in documents)
        epochs.append(rows)
    assert epochs[0] != epochs[1] != epochs[2]

    # of the other orders, every token but the first is a label
    for order in ("random", "permute"):
        (other,) = loaders(lambda: Mixture.open([stories]), 1, 4, order=order)
        assert not other.is_masked


@all_kinds
def test_resume_at_other_world_sizes(opened):
    data, order = opened
    batches = []
    state = None

    for world, local, steps in [(4, 3, 3), (1, 2, 2), (3, 1, 1), (2, 6, 4)]:
        ranks = loaders(data, world, local, order=order)
        if state is not None:
            for loader in ranks:
                loader.load_state_dict(state)
        batches += [step(ranks) for _ in range(steps)]
        states = [loader.state_dict() for loader in ranks]
        step(ranks)  # must not change the states
        assert all(other == states[0] for other in states)
        state = states[0]

    np.testing.assert_array_equal(np.stack(batches), expected(data(), order)[0])
    assert state is not None
    assert sum(state["source_tokens"]) == STEPS * GLOBAL_BATCH * SEQ_LEN


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("version", 1),
        ("fingerprint", "0" * 64),
        ("seed", 8),
        ("mode", "permute"),
        ("mode", "documents"),
        ("seq_len", 32),
        ("global_batch", 24),
    ],
)
def test_a_changed_state_is_refused_unless_allowed(folders, field, value):
    (loader,) = loaders(lambda: Mixture.open(folders, WEIGHTS), 1, 12)
    loader.next_batch()
    state = loader.state_dict()
    changed_state = {**state, field: value}

    with refused("data.order_changed", field=field):
        loader.load_state_dict(changed_state)
    assert loader.state_dict() == state

    # if allowed, resume there; tokens of new data are counted from there
    loader.load_state_dict(changed_state, allow={field})
    assert loader.next_sample == GLOBAL_BATCH
    assert loader.at_step_start
    if field == "fingerprint":
        assert loader.source_tokens == [0] * 3
    else:
        assert loader.source_tokens == state["source_tokens"]


@pytest.mark.parametrize(
    ("changed", "code"),
    [
        ({"global_batch_size": 0}, "data.out_of_range"),
        ({"seq_len": 0}, "data.out_of_range"),
        ({"local_batch": 0}, "data.out_of_range"),
        ({"data_seed": -1}, "data.out_of_range"),
        ({"global_batch_size": 10}, "data.batch_size"),
        ({"seq_len": 900}, "data.too_short"),
        ({"order": "shuffle"}, "config.unknown_choice"),
        ({"order": "permute"}, "data.order"),
        ({"order": "documents"}, "data.order"),
    ],
    ids=str,
)
def test_bad_sizes_and_orders_are_refused(folders, changed, code):
    with refused(code):
        loaders(lambda: Mixture.open(folders, WEIGHTS), 2, **{"local_batch": 3, **changed})


def test_documents_may_be_shorter_than_a_window(tmp_path):
    """Padding fills the window; only data without any label is refused."""
    folder = write(tmp_path / "short", 0)
    (loader,) = loaders(lambda: Mixture.open([folder]), 1, order="documents", seq_len=200)
    (row,) = loader.next_batch()
    assert row[:100].tolist() == Mixture.open([folder]).sources[0].read(0, 100).tolist()
    assert row[100:].tolist() == [~EOS] * 101

    for name, documents in {"empty": [], "one_token": [[3]]}.items():
        write_shards(tmp_path / name / "train", documents, vocab_size=500, eos_id=EOS)
        with refused("data.too_short"):
            loaders(lambda name=name: Mixture.open([tmp_path / name]), 1, order="documents")


def test_a_state_inside_a_step_needs_its_batch_size(folders):
    data = lambda: Mixture.open(folders, WEIGHTS)  # noqa: E731
    (loader,) = loaders(data, 1, 4)
    (loader_of_large_batches,) = loaders(data, 1, 12)
    loader.next_batch()

    with refused("data.inside_step"):
        loader_of_large_batches.load_state_dict(loader.state_dict())


def test_the_digest_of_a_batch_is_a_sum_over_samples():
    batch = np.arange(6 * 9, dtype=np.int64).reshape(6, 9)
    whole = samples_digest(batch)

    assert whole == samples_digest(batch[::-1])
    assert whole == (samples_digest(batch[:2]) + samples_digest(batch[2:])) % 2**64
    assert samples_digest(batch[:0]) == 0

    # every token counts
    for place in np.ndindex(batch.shape):
        changed = batch.copy()
        changed[place] += 1
        assert samples_digest(changed) != whole


def test_damaged_data_leaves_position_and_counts(tmp_path):
    for name, low in (("a", 0), ("b", 50)):
        write_shards(tmp_path / name / "train", [low + np.arange(50)], vocab_size=100, eos_id=2)
    (loader,) = loaders(lambda: Mixture.open([tmp_path / "a", tmp_path / "b"], [1, 1]), 1, 12)
    loader.next_batch()
    state = loader.state_dict()

    path = tmp_path / "b/train/part-00000-0.bin"
    flip(path, 0)
    with refused("shard.damaged", path=path, block=0):
        loader.next_batch()
    assert loader.state_dict() == state

    flip(path, 0)
    loader.next_batch()
    assert sum(loader.source_tokens) == 24 * SEQ_LEN
