"""data.exclude: windows with excluded documents are replaced, at any world size."""

import json

import numpy as np
import pytest

from canon_pretrain.data.exclusion import Spans, read_excluded, write_excluded
from canon_pretrain.data.loader import BatchLoader
from canon_pretrain.data.mixture import Mixture
from canon_pretrain.data.shards import TokenShards
from tests.support import refused, write_split

SEQ_LEN = 30
BATCH = 8
ORDERS = ["random", "permute", "documents"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Two folders of 20 documents of 50 tokens."""
    base = tmp_path_factory.mktemp("exclusion")
    for seed, name in enumerate("ab"):
        write_split(base / name / "train", seed, 20, length=50)
    return [base / "a", base / "b"]


def excluded(folder, numbers, file):
    """Write a list of documents of a folder; return the file."""
    fingerprint = TokenShards.open(folder / "train").fingerprint
    write_excluded(file, {fingerprint: numbers})
    return file


def loader(data, *, order="random", rank=0, world_size=1, local=1):
    return BatchLoader(
        data,
        data_seed=5,
        seq_len=SEQ_LEN,
        global_batch_size=BATCH,
        local_batch_size=local,
        order=order,
        dp_rank=rank,
        dp_world_size=world_size,
    )


def places(data, order, count=400):
    return data.places(5, range(count), slice(None), order, SEQ_LEN)


@pytest.mark.parametrize("order", ORDERS)
def test_only_windows_with_excluded_documents_change(folders, tmp_path, order):
    numbers = [3, 4, 11]
    data = Mixture.open(folders[:1])
    left = Mixture.open(folders[:1], exclude=excluded(folders[0], numbers, tmp_path / "list"))
    assert left.fingerprint == data.fingerprint != left.order_fingerprint

    old, old_counts = places(data, order)
    new, new_counts = places(left, order)

    def has_excluded(place):
        documents = data.sources[0].documents_in(place.start, place.stop)
        return any(document.number in numbers for document in documents)

    assert new_counts == old_counts
    assert not any(map(has_excluded, new))
    changed = [a != b for a, b in zip(old, new, strict=True)]
    assert changed == [has_excluded(place) for place in old]
    assert 10 < sum(changed) < 300
    replaced = {b for a, b in zip(old, new, strict=True) if a != b}
    assert len(replaced) > 5


@pytest.mark.parametrize("order", ORDERS)
def test_windows_do_not_depend_on_the_world_size(folders, tmp_path, order):
    chosen = excluded(folders[0], [0, 7, 19], tmp_path / "list")
    expected = loader(Mixture.open(folders[:1], exclude=chosen), order=order, local=BATCH)
    batch = [expected.next_batch() for _ in range(5)][-1]

    for world_size in (2, 4):
        parts = []
        for rank in range(world_size):
            data = Mixture.open(folders[:1], exclude=chosen)
            own = loader(
                data, order=order, rank=rank, world_size=world_size, local=BATCH // world_size
            )
            parts.append([own.next_batch() for _ in range(5)][-1])
        assert np.array_equal(np.concatenate(parts), batch)


def test_a_mixture_keeps_its_sources(folders, tmp_path):
    chosen = excluded(folders[1], [*range(10)], tmp_path / "list")
    old, old_counts = places(Mixture.open(folders, [3, 1]), "random")
    new, new_counts = places(Mixture.open(folders, [3, 1], chosen), "random")

    assert old_counts == new_counts
    assert [place.source for place in old] == [place.source for place in new]
    for before, after in zip(old, new, strict=True):
        assert before == after or (after.source == 1 and after.start >= 500)


@pytest.mark.parametrize("stride", [1, 7, 30])
def test_windows_left_by_brute_force(folders, stride):
    shards = TokenShards.open(folders[0] / "train")
    for numbers in ([], [0], [19], [2, 3, 9], [*range(1, 20)], [*range(20)]):
        spans = Spans(shards, numbers)
        taken = {token for k in numbers for token in range(*shards.document(k))}
        windows = [range(start, start + 31) for start in range(0, 1000 - 30, stride)]
        free = [taken.isdisjoint(window) for window in windows]
        assert spans.num_windows_left(1000, 31, stride) == sum(free)
        assert [not spans.overlap(w.start, w.stop) for w in windows] == free


def test_lists_that_do_not_fit_are_refused(folders, tmp_path):
    file = tmp_path / "list"
    everything = [*range(20)]
    for numbers, order in (([20], "random"), (everything, "random"), (everything, "documents")):
        chosen = excluded(folders[0], numbers, file)
        with refused("data.exclude"):
            loader(Mixture.open(folders[:1], exclude=chosen), order=order)
    with refused("data.exclude"):
        Mixture.open(folders[:1], exclude=excluded(folders[1], [1], file))
    valid = json.loads(file.read_text())
    for change in ({"version": 2}, {"format": "x"}, {"documents": {"x": [-1]}}, {"documents": [1]}):
        file.write_text(json.dumps(valid | change))
        with refused("file.unreadable"):
            read_excluded(file)


def test_the_hash_is_of_the_documents_alone(folders, tmp_path):
    file = tmp_path / "list"
    first = read_excluded(excluded(folders[0], [3, 1, 3], file))
    content = json.loads(file.read_text())
    content["documents"] = {name: [1, 3] for name in content["documents"]}
    file.write_text(json.dumps(content))
    assert read_excluded(file).sha256 == first.sha256
    other = read_excluded(excluded(folders[0], [1, 2, 3], file))
    assert other.sha256 != first.sha256


def test_a_resumed_run_goes_on_with_the_next_sample(folders, tmp_path):
    chosen = excluded(folders[0], [3, 4], tmp_path / "list")
    before = loader(Mixture.open(folders[:1]), local=BATCH)
    for _ in range(3):
        before.next_batch()
    data = Mixture.open(folders[:1], exclude=chosen)
    resumed = loader(data, local=BATCH)

    with refused("data.order_changed", field="fingerprint"):
        resumed.load_state_dict(before.state_dict())
    resumed.load_state_dict(before.state_dict(), allow=["fingerprint"])

    expected, _ = data.read(5, range(3 * BATCH, 4 * BATCH), slice(None), "random", SEQ_LEN)
    assert np.array_equal(resumed.next_batch(), expected)
