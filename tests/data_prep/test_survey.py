"""A first look at text: what is exact, what a sample estimates, and what is plain text."""

import gzip
import json
import os
import random

import pyarrow
import pyarrow.parquet
import pytest
import sentencepiece

from data_prep import survey as surveys
from data_prep.planning import train_tokenizer
from data_prep.sources import SourceOptions
from data_prep.survey import survey
from tests.data_folders import sentence
from tests.support import refused

TEXTS = [sentence(i, 50 + i % 40) for i in range(400)]
NUM_BYTES = sum(map(len, TEXTS))


def write(folder, suffix):
    """Write TEXTS in three files of the format."""
    for file in range(3):
        texts, path = TEXTS[file::3], folder / f"{file}{suffix}"
        lines = "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()
        if suffix == ".parquet":
            pyarrow.parquet.write_table(pyarrow.table({"text": texts}), path, row_group_size=20)
        else:
            path.write_bytes(gzip.compress(lines) if suffix.endswith(".gz") else lines)
    return folder


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz", ".parquet"])
def test_rows_are_counted_or_estimated(suffix, tmp_path, monkeypatch):
    folder = write(tmp_path, suffix)
    found = survey(SourceOptions("local", [folder]))
    exact = (found.num_files, found.num_documents, found.num_bytes, found.sampled)
    assert exact == (3, 400, NUM_BYTES, NUM_BYTES) and sorted(found.sample) == sorted(TEXTS)
    monkeypatch.setattr(surveys, "SAMPLE_BYTES", 15_000)
    for name in ("READ_BYTES", "PACKED_READ_BYTES"):
        monkeypatch.setattr(f"data_prep.readers.{name}", 512)
    found = survey(SourceOptions("local", [folder]))
    assert found.sampled < NUM_BYTES
    assert found.num_documents == pytest.approx(400, rel=0.1)
    assert found.num_bytes == pytest.approx(NUM_BYTES, rel=0.1)


def test_a_sample_of_many_text_files(tmp_path, monkeypatch):
    monkeypatch.setattr(surveys, "SAMPLE_BYTES", 5_000)
    for number, text in enumerate(TEXTS):
        (tmp_path / f"{number}.txt").write_text(text)
    found = survey(SourceOptions("local", [tmp_path]))
    assert (found.num_documents, found.num_bytes) == (400, NUM_BYTES)
    assert 2_500 < found.sampled < 10_000 and set(found.sample) <= set(TEXTS)
    # one large file: its start
    (tmp_path / "big").mkdir()
    (tmp_path / "big/one.txt").write_text("\n".join(TEXTS))
    found = survey(SourceOptions("local", [tmp_path / "big"]))
    assert (found.num_documents, found.sampled) == (1, 5_000)


def test_plain_text_of_any_suffix(tmp_path):
    (tmp_path / "a.md").write_text("# naïve\n" * 1000)
    (tmp_path / "b.rst").write_text("text")
    (tmp_path / "c.png").write_bytes(b"\x89PNG\0\0")
    (tmp_path / "d.dat").write_bytes(b"\xff\xfe" * 9)
    (tmp_path / "LICENSE").write_text("free")
    found = survey(SourceOptions("local", [tmp_path]))
    assert (found.suffixes, found.num_documents) == ([".md", ".rst"], 2)
    assert found.skipped == {".png": 1, ".dat": 1, "": 1}
    # beside a known format it is skipped unless requested
    (tmp_path / "e.txt").write_text("known")
    found = survey(SourceOptions("local", [tmp_path]))
    assert (found.num_documents, found.skipped[".md"]) == (1, 1) and not found.suffixes
    assert survey(SourceOptions("local", [tmp_path], text_suffixes=[".md"])).num_documents == 2
    assert survey(SourceOptions("local", [tmp_path / "b.rst"])).suffixes == [".rst"]
    with refused("input.unknown_format"):
        survey(SourceOptions("local", [tmp_path / "c.png"]))


def test_tokens_per_byte(tmp_path):
    words = ["".join(random.Random(i).choices("etaoinshrdlu", k=6)) for i in range(60)]
    (tmp_path / "a.txt").write_text(" ".join(words) + " ")
    found = survey(SourceOptions("local", [tmp_path]))
    # few words: 2048 tokens cannot be trained
    vocab_size, share = found.tokens_per_byte(2048)
    model = train_tokenizer(found.sample, vocab_size)
    processor = sentencepiece.SentencePieceProcessor(model_proto=model)
    ids = [processor.encode(text) for text in found.sample]
    assert vocab_size < 2048 and processor.vocab_size() == vocab_size
    assert share == (sum(map(len, ids)) + len(ids)) / found.sampled


def test_rare_characters_are_bytes_of_a_small_vocabulary(tmp_path):
    # two halves of the text: of 50 characters, and of 700 others
    common = "".join(map(chr, range(0x3041, 0x3041 + 50))) * 280
    many = "".join(map(chr, range(0x4E00, 0x4E00 + 700))) * 20
    (tmp_path / "a.txt").write_text(f"{common}\n{many}")
    found = survey(SourceOptions("local", [tmp_path]))
    # (512 - 259) // 2 characters have a place of their own
    assert found.rare_share(512) == pytest.approx((700 - 76) / 1400, abs=0.01)
    assert found.rare_share(2048) == 0.0
    vocab_size, tokens_per_byte = found.tokens_per_byte(512)
    assert vocab_size == 512 and tokens_per_byte > 0.3


def test_the_sample_is_spread_over_large_files(tmp_path, monkeypatch):
    monkeypatch.setattr(surveys, "SAMPLE_BYTES", 3_000)
    for number in range(40):
        (tmp_path / f"{number:02}.txt").write_text(chr(0x4E00 + number) * 2_000)
        (tmp_path / f"{number:02}.jsonl").write_text(json.dumps({"text": "a" * 6000}))
    found = survey(SourceOptions("local", [tmp_path]))
    assert len(found.sample) == surveys.SPREAD_FILES and len(set("".join(found.sample))) >= 8
    # no character is cut in two
    assert found.num_damaged == 0


def test_a_parquet_file_is_not_read_whole(tmp_path, monkeypatch):
    write(tmp_path, ".parquet")
    monkeypatch.setattr(surveys.InputReader, "_chunks", None)
    assert survey(SourceOptions("local", [tmp_path])).num_documents == 400


def test_text_that_is_not_utf8_is_counted(tmp_path):
    (tmp_path / "good.txt").write_text("é" * 100)
    (tmp_path / "latin.txt").write_bytes(b"\xe9" * 100)
    (tmp_path / "zeros.txt").write_text("a\0b")
    (tmp_path / "rows.jsonl").write_bytes(b'{"text": "\xe9"}\n{"text": "e"}\n')
    found = survey(SourceOptions("local", [tmp_path]))
    assert (found.num_probed, found.num_damaged) == (5, 3)


def test_skipped_text_is_measured(tmp_path):
    (tmp_path / "known.txt").write_text("known")
    (tmp_path / "a.md").write_text("12345678")
    (tmp_path / "b.gz").write_bytes(gzip.compress(b"packed"))
    (tmp_path / "c.md").symlink_to(tmp_path / "nowhere")
    os.mkfifo(tmp_path / "d.pipe")
    found = survey(SourceOptions("local", [tmp_path]))
    assert found.skipped_text == {".md": 8} and found.skipped == {".md": 1, ".gz": 1, ".pipe": 1}
