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
        texts = TEXTS[file::3]
        path = folder / f"{file}{suffix}"
        if suffix == ".parquet":
            pyarrow.parquet.write_table(pyarrow.table({"text": texts}), path, row_group_size=20)
            continue
        lines = "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()
        path.write_bytes(gzip.compress(lines) if suffix.endswith(".gz") else lines)
    return folder


def survey_of(*files, **options):
    """Survey local files."""
    return survey(SourceOptions("local", list(files), **options))


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz", ".parquet"])
def test_rows_of_small_files_are_counted(suffix, tmp_path):
    result = survey_of(write(tmp_path, suffix))

    assert result.num_files == 3
    assert result.num_documents == 400
    assert result.num_bytes == NUM_BYTES
    assert result.sampled == NUM_BYTES
    assert sorted(result.sample) == sorted(TEXTS)


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz", ".parquet"])
def test_rows_of_large_files_are_estimated(suffix, tmp_path, monkeypatch):
    monkeypatch.setattr(surveys, "SAMPLE_BYTES", 15_000)
    monkeypatch.setattr("data_prep.readers.READ_BYTES", 512)
    monkeypatch.setattr("data_prep.readers.PACKED_READ_BYTES", 512)

    result = survey_of(write(tmp_path, suffix))

    assert result.sampled < NUM_BYTES
    assert result.num_documents == pytest.approx(400, rel=0.1)
    assert result.num_bytes == pytest.approx(NUM_BYTES, rel=0.1)


def test_a_sample_of_many_text_files(tmp_path, monkeypatch):
    monkeypatch.setattr(surveys, "SAMPLE_BYTES", 5_000)
    for number, text in enumerate(TEXTS):
        (tmp_path / f"{number}.txt").write_text(text)

    result = survey_of(tmp_path)

    assert (result.num_documents, result.num_bytes) == (400, NUM_BYTES)
    assert 2_500 < result.sampled < 10_000
    assert set(result.sample) <= set(TEXTS)


def test_a_sample_of_one_large_text_file_is_its_start(tmp_path, monkeypatch):
    monkeypatch.setattr(surveys, "SAMPLE_BYTES", 5_000)
    (tmp_path / "one.txt").write_text("\n".join(TEXTS))

    result = survey_of(tmp_path)

    assert (result.num_documents, result.sampled) == (1, 5_000)


@pytest.fixture
def texts_of_many_suffixes(tmp_path):
    """Return a folder of two texts whose suffix says so, and of files that are not read."""
    (tmp_path / "a.md").write_text("# naïve\n" * 1000)
    (tmp_path / "b.rst").write_text("text")
    (tmp_path / "c.png").write_bytes(b"\x89PNG\0\0")
    (tmp_path / "d.dat").write_bytes(b"\xff\xfe" * 9)
    (tmp_path / "LICENSE").write_text("free")
    return tmp_path


def test_plain_text_of_any_suffix(texts_of_many_suffixes):
    result = survey_of(texts_of_many_suffixes)
    assert result.suffixes == [".md", ".rst"]
    assert result.num_documents == 2
    assert result.skipped == {".png": 1, ".dat": 1, "": 1}

    assert survey_of(texts_of_many_suffixes / "b.rst").suffixes == [".rst"]
    with refused("input.unknown_format"):
        survey_of(texts_of_many_suffixes / "c.png")


def test_plain_text_next_to_a_known_format_must_be_requested(texts_of_many_suffixes):
    (texts_of_many_suffixes / "e.txt").write_text("known")

    result = survey_of(texts_of_many_suffixes)
    assert result.num_documents == 1
    assert result.skipped[".md"] == 1
    assert not result.suffixes

    assert survey_of(texts_of_many_suffixes, text_suffixes=[".md"]).num_documents == 2


def test_tokens_per_byte(tmp_path):
    words = ["".join(random.Random(i).choices("etaoinshrdlu", k=6)) for i in range(60)]
    (tmp_path / "a.txt").write_text(" ".join(words) + " ")
    result = survey_of(tmp_path)

    # few words: 2048 tokens cannot be trained
    vocab_size, tokens_per_byte = result.tokens_per_byte(2048)

    model = train_tokenizer(result.sample, vocab_size)
    processor = sentencepiece.SentencePieceProcessor(model_proto=model)
    ids = [processor.encode(text) for text in result.sample]
    assert vocab_size < 2048
    assert processor.vocab_size() == vocab_size
    assert tokens_per_byte == (sum(map(len, ids)) + len(ids)) / result.sampled


def test_rare_characters_are_bytes_of_a_small_vocabulary(tmp_path):
    # two halves of the text: of 50 characters, and of 700 others
    common = "".join(map(chr, range(0x3041, 0x3041 + 50))) * 280
    rare = "".join(map(chr, range(0x4E00, 0x4E00 + 700))) * 20
    (tmp_path / "a.txt").write_text(f"{common}\n{rare}")

    result = survey_of(tmp_path)

    # (512 - 259) // 2 characters have a place of their own
    assert result.rare_share(512) == pytest.approx((700 - 76) / 1400, abs=0.01)
    assert result.rare_share(2048) == 0.0
    vocab_size, tokens_per_byte = result.tokens_per_byte(512)
    assert vocab_size == 512
    assert tokens_per_byte > 0.3


def test_the_sample_is_spread_over_large_files(tmp_path, monkeypatch):
    monkeypatch.setattr(surveys, "SAMPLE_BYTES", 3_000)
    for number in range(40):
        (tmp_path / f"{number:02}.txt").write_text(chr(0x4E00 + number) * 2_000)
        (tmp_path / f"{number:02}.jsonl").write_text(json.dumps({"text": "a" * 6000}))

    result = survey_of(tmp_path)

    assert len(result.sample) == surveys.SPREAD_FILES
    assert len(set("".join(result.sample))) >= 8
    # no character is cut in two
    assert result.num_damaged == 0


def test_a_parquet_file_is_not_read_whole(tmp_path, monkeypatch):
    write(tmp_path, ".parquet")
    monkeypatch.setattr(surveys.InputReader, "_chunks", None)
    assert survey_of(tmp_path).num_documents == 400


def test_text_that_is_not_utf8_is_counted(tmp_path):
    (tmp_path / "good.txt").write_text("é" * 100)
    (tmp_path / "latin.txt").write_bytes(b"\xe9" * 100)
    (tmp_path / "zeros.txt").write_text("a\0b")
    (tmp_path / "rows.jsonl").write_bytes(b'{"text": "\xe9"}\n{"text": "e"}\n')

    result = survey_of(tmp_path)

    assert (result.num_probed, result.num_damaged) == (5, 3)


def test_skipped_text_is_measured(tmp_path):
    (tmp_path / "known.txt").write_text("known")
    (tmp_path / "a.md").write_text("12345678")
    (tmp_path / "b.gz").write_bytes(gzip.compress(b"packed"))
    (tmp_path / "c.md").symlink_to(tmp_path / "nowhere")
    os.mkfifo(tmp_path / "d.pipe")

    result = survey_of(tmp_path)

    assert result.skipped_text == {".md": 8}
    assert result.skipped == {".md": 1, ".gz": 1, ".pipe": 1}
