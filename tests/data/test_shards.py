"""The disk format: round trips against numpy, and every error by really damaging files."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from canon_pretrain.data import blocks
from canon_pretrain.data.shard_writer import (
    UnitWriter,
    remove_unit,
    unit_marks,
    write_manifest,
    write_shards,
)
from canon_pretrain.data.shards import ShardError, TokenShards

VOCAB = 1000


def some_documents(count: int, longest: int, vocab: int = VOCAB) -> list[np.ndarray]:
    random = np.random.default_rng(0)
    return [random.integers(0, vocab, random.integers(1, longest + 1)) for _ in range(count)]


@pytest.fixture
def split(tmp_path: Path) -> Path:
    """Two parts: one of several 64-KiB blocks, and a small one."""
    folder = tmp_path / "train"
    big = np.arange(100_000) % VOCAB
    small = np.arange(5)
    write_shards(folder, [big, small], vocab_size=VOCAB, eos_id=2, max_part_tokens=100_000)
    return folder


@settings(derandomize=True, deadline=None, max_examples=25)
@given(
    lengths=st.lists(st.integers(1, 12), max_size=20),
    max_part_tokens=st.integers(12, 40),
    vocab_size=st.sampled_from([300, 65_535, 65_536, 200_000]),
    data=st.data(),
)
def test_round_trip(
    lengths: list[int], max_part_tokens: int, vocab_size: int, data: st.DataObject
) -> None:
    random = np.random.default_rng(len(lengths))
    documents = [random.integers(0, vocab_size, length) for length in lengths]
    stream = np.concatenate([np.empty(0, dtype=np.int64), *documents])
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "split"
        write_shards(
            folder,
            documents,
            vocab_size=vocab_size,
            eos_id=0,
            num_bytes=lengths,
            max_part_tokens=max_part_tokens,
        )
        with TokenShards.open(folder) as shards:
            assert (shards.num_tokens, shards.num_documents) == (len(stream), len(documents))
            assert (shards.num_bytes, shards.vocab_size) == (sum(lengths), vocab_size)
            assert shards.document_ends().tolist() == np.cumsum(lengths).tolist()
            for _ in range(5):
                offset = data.draw(st.integers(0, len(stream)))
                count = data.draw(st.integers(0, len(stream) - offset))
                tokens = shards.read(offset, count)
                assert tokens.dtype == np.int64 and tokens.shape == (count,)
                np.testing.assert_array_equal(tokens, stream[offset : offset + count])


def test_more_parts_than_open_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "MAX_OPEN_FILES", 3)
    documents = some_documents(30, 10)
    write_shards(tmp_path, documents, vocab_size=VOCAB, eos_id=2, max_part_tokens=10)
    before = len(os.listdir("/proc/self/fd"))
    with TokenShards.open(tmp_path) as shards:
        for _ in range(2):
            np.testing.assert_array_equal(
                shards.read(0, shards.num_tokens), np.concatenate(documents)
            )
        assert len(os.listdir("/proc/self/fd")) == before + 3
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("vocab_size", [1000, 70_000])
def test_a_read_over_many_blocks_goes_in_pieces(tmp_path: Path, vocab_size: int) -> None:
    documents = np.split(np.random.default_rng(2).integers(0, vocab_size, 700_000), 7)
    write_shards(tmp_path, documents, vocab_size=vocab_size, eos_id=2, max_part_tokens=600_000)
    stream = np.concatenate(documents)
    pieces = blocks.BUFFER_BYTES // (2 if vocab_size == 1000 else 4)
    with TokenShards.open(tmp_path) as shards:
        for offset in (0, 1, pieces - 1, pieces, 599_999, 400_001):
            for count in (1, pieces, pieces + 1, 3 * pieces + 7, len(stream) - offset):
                count = min(count, len(stream) - offset)
                np.testing.assert_array_equal(
                    shards.read(offset, count), stream[offset : offset + count]
                )
        into = np.full(12, -1, dtype=np.int64)
        shards.read_into(into[1:-1], 99_995)
        assert into.tolist() == [-1, *stream[99_995:100_005], -1]


def test_without_isal_reading_is_checked_by_zlib_and_says_so_once(split: Path) -> None:
    flip(split / "part-00000-0.bin", 70_000)
    program = """
import logging, sys, zlib
sys.modules["isal"] = None
logging.basicConfig(level=logging.INFO, format="%(message)s")
from pathlib import Path
from canon_pretrain.data import blocks, shards
assert blocks.crc32 is zlib.crc32
for _ in range(2):
    opened = shards.TokenShards.open(Path(sys.argv[1]))
    print(opened.read(0, 3).tolist())
opened.read(32_768, 1)
"""
    command = [sys.executable, "-c", program, str(split)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.stdout == "[0, 1, 2]\n[0, 1, 2]\n"
    assert done.stderr.count("pip install isal") == 1
    assert "ShardError" in done.stderr and "64-KiB block 1" in done.stderr


def test_parts_are_little_endian_and_cut_at_document_ends(tmp_path: Path) -> None:
    both = [np.array([1, 2]), np.array([258])]
    write_shards(tmp_path / "a", both, vocab_size=300, eos_id=2, max_part_tokens=2)
    assert (tmp_path / "a/part-00000-0.bin").read_bytes() == b"\x01\x00\x02\x00"
    assert (tmp_path / "a/part-00000-1.bin").read_bytes() == b"\x02\x01"
    write_shards(tmp_path / "b", [np.array([65_537])], vocab_size=65_538, eos_id=2)
    assert (tmp_path / "b/part-00000-0.bin").read_bytes() == b"\x01\x00\x01\x00"


def test_fingerprint_names_the_stream(tmp_path: Path) -> None:
    documents = some_documents(5, 9)
    found = []
    for name, tokens, sha in [("a", documents, "x"), ("b", documents, "x"), ("c", documents, "y")]:
        write_shards(
            tmp_path / name, tokens, vocab_size=VOCAB, eos_id=2, tokenizer_sha256=sha
        )  # fmt: skip
        found.append(TokenShards.open(tmp_path / name).fingerprint)
    write_shards(tmp_path / "d", documents[::-1], vocab_size=VOCAB, eos_id=2)
    found.append(TokenShards.open(tmp_path / "d").fingerprint)
    assert found[0] == found[1] and len(set(found)) == 3


@pytest.mark.parametrize("ids", [[5, VOCAB, 1], [70_000], [-1, 3]])
def test_ids_outside_the_vocabulary_are_refused(tmp_path: Path, ids: list[int]) -> None:
    with pytest.raises(ShardError, match="outside the vocabulary of 1000"):
        write_shards(tmp_path / "x", [np.array(ids)], vocab_size=VOCAB, eos_id=2)
    assert list((tmp_path / "x").iterdir()) == []


def test_documents_that_cannot_be_stored_are_refused(tmp_path: Path) -> None:
    for name, ids, message in [("a", [], "of 0 tokens"), ("b", [1, 2, 3], "of 3 tokens")]:
        with pytest.raises(ShardError, match=message):
            write_shards(
                tmp_path / name, [np.array(ids)], vocab_size=VOCAB, eos_id=2, max_part_tokens=2
            )
    with pytest.raises(ShardError, match="eos id 7"):
        write_shards(tmp_path / "c", [], vocab_size=7, eos_id=7)


def test_a_unit_is_complete_with_its_last_mark(tmp_path: Path) -> None:
    def write(finish: bool) -> None:
        with UnitWriter(tmp_path, 3, vocab_size=VOCAB, eos_id=2, max_part_tokens=4) as writer:
            for row in range(3):
                writer.add(np.arange(3), num_bytes=1, row=row)
            if finish:
                writer.finish({"empty": 2})

    write(finish=False)
    assert sorted(p.name for p in tmp_path.glob("*.json")) == [
        "part-00003-0.json",
        "part-00003-1.json",
    ]
    assert not list(tmp_path.glob("*.tmp"))
    assert unit_marks(tmp_path, 3, "") is None
    with pytest.raises(ShardError, match="part-00000-0.json: cannot be read"):
        write_manifest(tmp_path, 1, vocab_size=VOCAB, eos_id=2)
    remove_unit(tmp_path, 3)
    assert list(tmp_path.iterdir()) == []
    write(finish=True)
    marks = unit_marks(tmp_path, 3, "")
    assert marks is not None
    assert [mark.last_in_unit for mark in marks] == [False, False, True]
    assert [mark.rows for mark in marks] == [(0, 1), (1, 2), (2, 3)]
    assert marks[-1].skipped == {"empty": 2}
    assert unit_marks(tmp_path, 3, "another plan") is None
    (tmp_path / "part-00003-1.crc").write_bytes(b"")
    assert unit_marks(tmp_path, 3, "") is None


@pytest.mark.parametrize(("offset", "count"), [(-1, 1), (0, 100_006), (100_006, 0)])
def test_a_range_outside_the_stream_is_refused(split: Path, offset: int, count: int) -> None:
    with TokenShards.open(split) as shards, pytest.raises(ValueError, match="100005 tokens"):
        shards.read(offset, count)


def flip(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


def test_a_flipped_byte_is_found_where_it_is_read(split: Path) -> None:
    flip(split / "part-00000-0.bin", 70_000)
    with TokenShards.open(split) as shards:
        shards.read(0, 32_768)
        with pytest.raises(
            ShardError, match=r"part-00000-0.bin: damaged: 64-KiB block 1 \(byte offset 65536\)"
        ):
            shards.read(32_768, 1)
        shards.read(65_536, 100)


@pytest.mark.parametrize("suffix", ["crc", "docs"])
def test_flipped_bytes_of_the_small_files_are_found(split: Path, suffix: str) -> None:
    flip(split / f"part-00000-0.{suffix}", 2)
    with TokenShards.open(split) as shards:
        with pytest.raises(ShardError, match=rf"part-00000-0.{suffix}: damaged: sha256"):
            shards.read(0, 1) if suffix == "crc" else shards.document_ends()


def test_a_file_truncated_under_the_reader_is_a_short_read(split: Path) -> None:
    with TokenShards.open(split) as shards:
        shards.read(0, 10)
        os.truncate(split / "part-00000-0.bin", 100_001)
        shards.read(0, 10)
        with pytest.raises(ShardError, match="short read: the file ends at byte 100001"):
            shards.read(60_000, 10)


def edit_manifest(folder: Path, edit: Callable[[dict], object]) -> None:
    path = folder / "manifest.json"
    manifest = json.loads(path.read_text())
    edit(manifest)
    path.write_text(json.dumps(manifest))


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "no split": (lambda f: [path.unlink() for path in f.iterdir()], "data_prep build"),
    "bin truncated": (lambda f: os.truncate(f / "part-00000-0.bin", 7), "7 bytes, expected 200000"),
    "bin missing": (lambda f: (f / "part-00000-1.bin").unlink(), "part-00000-1.bin: is missing"),
    "docs missing": (lambda f: (f / "part-00000-0.docs").unlink(), "0.docs: is missing, expected"),
    "crc longer": (lambda f: (f / "part-00000-0.crc").write_bytes(b"1" * 99), "99 bytes, expected"),
    "mark missing": (lambda f: (f / "part-00000-0.json").unlink(), "0.json: cannot be read"),
    "mark edited": (lambda f: flip(f / "part-00000-1.json", 60), "does not fit the manifest's"),
    "manifest missing": (lambda f: (f / "manifest.json").unlink(), "the build is unfinished"),
    "manifest cut": (lambda f: os.truncate(f / "manifest.json", 99), "is damaged"),
    "manifest a list": (lambda f: (f / "manifest.json").write_text("[]"), "should be an object"),
    "other format": (lambda f: edit_manifest(f, lambda m: m.update(format="mds")), "canon-shards"),
    "other version": (lambda f: edit_manifest(f, lambda m: m.update(version=9)), "2 or 3"),
    "count edited": (
        lambda f: edit_manifest(f, lambda m: m.update(num_tokens=5)),
        "does not fit its own fingerprint",
    ),
    "vocabulary edited": (
        lambda f: edit_manifest(f, lambda m: m.update(vocab_size=70_000)),
        "does not fit its own fingerprint",
    ),
    "part dropped": (
        lambda f: edit_manifest(f, lambda m: m["parts"].pop()),
        "does not fit its own fingerprint",
    ),
    "field dropped": (
        lambda f: edit_manifest(f, lambda m: m.pop("eos_id")),
        "is damaged: eos_id",
    ),
    "parts dropped": (lambda f: edit_manifest(f, lambda m: m.pop("parts")), "is damaged: parts"),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGES)
def test_opening_a_damaged_split_is_refused(split: Path, name: str) -> None:
    damage, message = DAMAGES[name]
    damage(split)
    with pytest.raises(ShardError, match=message) as caught:
        TokenShards.open(split)
    assert str(split) in str(caught.value)


def test_a_finished_split_is_not_written_over(split: Path) -> None:
    with pytest.raises(ShardError, match="holds a split"):
        write_shards(split, [], vocab_size=VOCAB, eos_id=2)
