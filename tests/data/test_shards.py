"""The disk format: round trips against NumPy, and every error by damaging files."""

import json
import os
import tempfile
import zlib
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from canon_pretrain.data import blocks, shard_writer
from canon_pretrain.data.shard_writer import ShardWriter, committed_records, write_shards
from canon_pretrain.data.shards import ShardError, TokenShards
from tests.corpora import flip
from tests.support import refused

VOCAB = 1000


@pytest.fixture
def split(tmp_path):
    """Two shards: one of several 64-KiB blocks, and a small one."""
    folder = tmp_path / "train"
    documents = [np.arange(100_000) % VOCAB, np.arange(5)]
    write_shards(folder, documents, vocab_size=VOCAB, eos_id=2, max_shard_tokens=100_000)
    return folder


@settings(derandomize=True, deadline=None, max_examples=15)
@given(
    lengths=st.lists(st.integers(1, 12), max_size=20),
    max_shard_tokens=st.integers(12, 40),
    vocab_size=st.sampled_from([300, 65_535, 65_536, 200_000]),
    data=st.data(),
)
def test_round_trip(lengths, max_shard_tokens, vocab_size, data):
    random = np.random.default_rng(len(lengths))
    documents = [random.integers(0, vocab_size, length) for length in lengths]
    stream = np.concatenate([np.empty(0, dtype=np.int64), *documents])

    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "split"
        write_shards(
            folder,
            documents,
            eos_id=0,
            num_bytes=lengths,
            vocab_size=vocab_size,
            max_shard_tokens=max_shard_tokens,
        )

        with TokenShards.open(folder) as shards:
            assert shards.num_tokens == len(stream)
            assert shards.num_documents == len(documents)
            assert shards.num_bytes == sum(lengths)
            assert shards.vocab_size == vocab_size
            ends = np.cumsum(lengths).tolist()
            assert shards.document_ends().tolist() == ends
            # in any order, so that each shard's ends are read when they are needed
            spans = [shards.document(number) for number in reversed(range(len(ends)))]
            assert spans[::-1] == list(pairwise([0, *ends]))
            for _ in range(5):
                offset = data.draw(st.integers(0, len(stream)))
                count = data.draw(st.integers(0, len(stream) - offset))
                tokens = shards.read(offset, count)
                assert tokens.dtype == np.int64
                assert tokens.shape == (count,)
                np.testing.assert_array_equal(tokens, stream[offset : offset + count])


def num_open_files():
    return len(os.listdir("/proc/self/fd"))


def test_more_shards_than_open_files(tmp_path, monkeypatch):
    monkeypatch.setattr(blocks, "MAX_OPEN_FILES", 3)
    random = np.random.default_rng(0)
    documents = [random.integers(0, VOCAB, random.integers(1, 11)) for _ in range(30)]
    write_shards(tmp_path, documents, vocab_size=VOCAB, eos_id=2, max_shard_tokens=10)
    num_before = num_open_files()

    with TokenShards.open(tmp_path) as shards:
        for _ in range(2):
            tokens = shards.read(0, shards.num_tokens)
            np.testing.assert_array_equal(tokens, np.concatenate(documents))
        assert num_open_files() == num_before + 3
    assert num_open_files() == num_before


@pytest.mark.parametrize(("vocab_size", "token_bytes"), [(1000, 2), (70_000, 4)])
def test_reads_larger_than_the_buffer(tmp_path, vocab_size, token_bytes):
    documents = np.split(np.random.default_rng(2).integers(0, vocab_size, 700_000), 7)
    write_shards(tmp_path, documents, vocab_size=vocab_size, eos_id=2, max_shard_tokens=600_000)
    stream = np.concatenate(documents)
    buffered = blocks.BUFFER_BYTES // token_bytes

    with TokenShards.open(tmp_path) as shards:
        for offset in (0, 1, buffered - 1, buffered, 599_999, 400_001):
            for count in (1, buffered, buffered + 1, 3 * buffered + 7, len(stream) - offset):
                end = min(offset + count, len(stream))
                tokens = shards.read(offset, end - offset)
                np.testing.assert_array_equal(tokens, stream[offset:end])

        # only the array that is passed is written
        array = np.full(12, -1, dtype=np.int64)
        shards.read_into(array[1:-1], 99_995)
        assert array.tolist() == [-1, *stream[99_995:100_005], -1]


def test_shards_are_little_endian_and_end_with_a_document(tmp_path):
    documents = [np.array([1, 2]), np.array([258])]
    write_shards(tmp_path / "a", documents, vocab_size=300, eos_id=2, max_shard_tokens=2)
    assert (tmp_path / "a/part-00000-0.bin").read_bytes() == b"\x01\x00\x02\x00"
    assert (tmp_path / "a/part-00000-1.bin").read_bytes() == b"\x02\x01"

    write_shards(tmp_path / "b", [np.array([65_537])], vocab_size=65_538, eos_id=2)
    assert (tmp_path / "b/part-00000-0.bin").read_bytes() == b"\x01\x00\x01\x00"


@pytest.mark.parametrize(
    ("ids", "options", "code", "refused_value"),
    [
        ([5, VOCAB, 1], {}, "data.outside_vocab", VOCAB),
        ([70_000], {}, "data.outside_vocab", 70_000),
        ([-1, 3], {}, "data.outside_vocab", -1),
        ([], {}, "data.document_length", 0),
        ([1, 2, 3], {"max_shard_tokens": 2}, "data.document_length", 3),
        ([], {"eos_id": VOCAB}, "data.outside_vocab", VOCAB),
    ],
)
def test_bad_documents_are_refused(tmp_path, ids, options, code, refused_value):
    folder = tmp_path / "x"
    with refused(code, given=refused_value):
        write_shards(folder, [np.array(ids)], vocab_size=VOCAB, **{"eos_id": 2, **options})
    assert list(folder.iterdir()) == []


def write_input_group(folder, *, finish):
    """Write input group 3 of three shards; `finish` completes it."""
    with ShardWriter(folder, 3, vocab_size=VOCAB, eos_id=2, max_shard_tokens=4) as writer:
        for row in range(3):
            writer.add(np.arange(3), num_bytes=1, row=row)
        if finish:
            writer.finish({"empty": 2})


def test_an_input_group_without_its_last_record_is_incomplete(tmp_path):
    write_input_group(tmp_path, finish=False)

    names = ["part-00003-0.json", "part-00003-1.json"]
    assert sorted(path.name for path in tmp_path.glob("*.json")) == names
    assert not list(tmp_path.glob("*.tmp"))
    assert committed_records(tmp_path, 3, "") is None
    with refused("shard.damaged", path=tmp_path / "part-00000-0.json"):
        shard_writer.write_manifest(tmp_path, 1, vocab_size=VOCAB, eos_id=2)

    shard_writer.remove_input_group(tmp_path, 3)
    assert list(tmp_path.iterdir()) == []


def test_the_last_commit_record_completes_an_input_group(tmp_path):
    write_input_group(tmp_path, finish=True)

    records = committed_records(tmp_path, 3, "")
    assert records is not None
    assert [record.last_in_unit for record in records] == [False, False, True]
    assert [record.rows for record in records] == [(0, 1), (1, 2), (2, 3)]
    assert records[-1].skipped == {"empty": 2}

    # not complete for another plan, nor after damage
    assert committed_records(tmp_path, 3, "another plan") is None
    (tmp_path / "part-00003-1.crc").write_bytes(b"")
    assert committed_records(tmp_path, 3, "") is None


@pytest.mark.parametrize("crc32", [blocks.crc32, zlib.crc32])  # with and without isal
def test_damaged_hashes_and_ends_are_found(split, monkeypatch, crc32):
    monkeypatch.setattr(blocks, "crc32", crc32)
    flip(split / "part-00000-0.crc", 2)
    flip(split / "part-00000-0.docs", 2)

    with TokenShards.open(split) as shards:
        with refused("shard.damaged", path=split / "part-00000-0.crc"):
            shards.read(0, 1)
        with refused("shard.damaged", path=split / "part-00000-0.docs"):
            shards.document_ends()


@pytest.mark.parametrize("crc32", [blocks.crc32, zlib.crc32])  # with and without isal
def test_damage_is_found_where_it_is_read(split, monkeypatch, crc32):
    monkeypatch.setattr(blocks, "crc32", crc32)
    path = split / "part-00000-0.bin"
    flip(path, 70_000)

    with TokenShards.open(split) as shards:
        assert shards.read(0, 32_768)[-3:].tolist() == [765, 766, 767]
        with refused("shard.damaged", path=path, block=1):
            shards.read(32_768, 1)
        shards.read(65_536, 100)

        # cut while it is open
        os.truncate(path, 100_001)
        shards.read(0, 10)
        with refused("shard.damaged", end=100_001):
            shards.read(60_000, 10)


MANIFEST = ("shard.manifest", "manifest.json")


def edited(drop="", **changes):
    """Return a function that changes fields of a split's manifest and drops one."""

    def edit(folder):
        path = folder / "manifest.json"
        manifest = json.loads(path.read_text()) | changes
        manifest.pop(drop, None)
        path.write_text(json.dumps(manifest))

    return edit


def changed(change, file):
    """Return the damage that changes a file of a split, as a value of DAMAGES."""
    return lambda folder: change(folder / file), "shard.damaged", file


def write_and_open(folder, documents, tokenizer_sha256):
    """Return the fingerprint of a new split."""
    write_shards(folder, documents, vocab_size=VOCAB, eos_id=2, tokenizer_sha256=tokenizer_sha256)
    return TokenShards.open(folder).fingerprint


DAMAGES: dict[str, tuple[Any, ...]] = {
    "no split": (lambda f: [path.unlink() for path in f.iterdir()], "shard.no_split", ""),
    "bin truncated": changed(lambda path: os.truncate(path, 7), "part-00000-0.bin"),
    "bin missing": changed(Path.unlink, "part-00000-1.bin"),
    "record missing": changed(Path.unlink, "part-00000-0.json"),
    "record edited": changed(lambda path: flip(path, 60), "part-00000-1.json"),
    "manifest missing": (lambda f: (f / "manifest.json").unlink(), "shard.unfinished", ""),
    "manifest cut": (lambda f: os.truncate(f / "manifest.json", 99), *MANIFEST),
    "manifest a list": (lambda f: (f / "manifest.json").write_text("[]"), *MANIFEST),
    "other version": (edited(version=9), *MANIFEST),
    "count edited": (edited(num_tokens=5), *MANIFEST),
    "field dropped": (edited(drop="eos_id"), *MANIFEST),
}


@pytest.mark.parametrize(("damage", "code", "file"), DAMAGES.values(), ids=DAMAGES)
def test_opening_a_damaged_split_is_refused(split, damage, code, file):
    damage(split)
    with refused(code, kind=ShardError, path=split / file):
        TokenShards.open(split)


def test_the_fingerprint_depends_on_stream_and_tokenizer(tmp_path):
    documents = [np.arange(5), np.arange(5, 20)]

    fingerprint = write_and_open(tmp_path / "0", documents, "x")

    assert write_and_open(tmp_path / "1", documents, "x") == fingerprint
    of_other_tokenizer = write_and_open(tmp_path / "2", documents, "y")
    of_other_order = write_and_open(tmp_path / "3", documents[::-1], "x")
    assert len({fingerprint, of_other_tokenizer, of_other_order}) == 3
