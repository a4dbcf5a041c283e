"""Readers: the schemas of both datasets, and files that are broken on purpose.

The known size is that of the broken file and its hash unknown, unless a test is about them: so it
is the format's own reader that has to see the damage.
"""

import functools
import gzip
import hashlib
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import zstandard

from canon_pretrain.core.errors import UserError
from data_prep import readers
from data_prep.plan import Input
from data_prep.readers import Document, InputReader, Skipped

TEXTS = [f"Document {i}: " + "déjà vu 😀 " * (i % 7 + 1) for i in range(40)]
DOCUMENTS = [Document(text, text.encode()) for text in TEXTS]


def reader(
    path: Path, *, sha256: str = "", text_field: str = "text", group_field: str | None = None
) -> InputReader:
    known = Input(path.name, path.stat().st_size, sha256)
    return InputReader(path.parent, known, text_field, group_field)


def rows(path: Path, **options: str) -> list[Document | Skipped]:
    return list(reader(path, **options).rows())


def texts(found: list[Document | Skipped]) -> list[str]:
    return [row.text for row in found if isinstance(row, Document)]


def jsonl(values: list[str] = TEXTS, **more: object) -> bytes:
    return b"".join(json.dumps({"text": text, **more}).encode() + b"\n" for text in values)


def zst(content: bytes, *, checksum: bool = True) -> bytes:
    return zstandard.ZstdCompressor(write_checksum=checksum).compress(content)


def write(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


def write_parquet(path: Path, texts: list[str | None] | pyarrow.Array, **options: object) -> Path:
    column = texts if isinstance(texts, pyarrow.Array) else pyarrow.array(texts, pyarrow.string())
    pyarrow.parquet.write_table(pyarrow.table({"text": column}), path, **options)
    return path


def any_file(folder: Path, suffix: str) -> Path:
    """TEXTS in the format of the suffix, in several frames, members or row groups."""
    path = folder / f"x{suffix}"
    if suffix == ".parquet":
        return write_parquet(path, TEXTS, row_group_size=16, write_page_checksum=True)
    halves = [jsonl(TEXTS[:20]), jsonl(TEXTS[20:])]
    pack: dict[str, Callable[[bytes], bytes]] = {".jsonl.zst": zst, ".jsonl.gz": gzip.compress}
    return write(path, b"".join(map(pack.get(suffix, bytes), halves)))


FORMATS = [".jsonl", ".jsonl.zst", ".jsonl.gz", ".parquet"]


@pytest.mark.parametrize("suffix", FORMATS)
def test_rows_and_hash(suffix, tmp_path):
    path = any_file(tmp_path, suffix)
    one = reader(path)
    assert list(one.rows()) == DOCUMENTS
    assert one.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    # a reader may read again, and an earlier hash is not believed before the end
    again = one.rows()
    next(again)
    assert one.sha256 == "" or suffix == ".parquet"
    assert list(again) == DOCUMENTS[1:] and one.sha256


@pytest.mark.parametrize("suffix", [*FORMATS, ".txt"])
def test_another_file_than_the_known_one(suffix, tmp_path):
    path = any_file(tmp_path, suffix)
    with pytest.raises(UserError, match=rf"x\{suffix}: sha256 .* expected 0000000000000000"):
        rows(path, sha256="0" * 64)
    right = hashlib.sha256(path.read_bytes()).hexdigest()
    assert rows(path, sha256=right)
    one = reader(path, sha256=right)
    path.write_bytes(path.read_bytes() + b"\n")
    with pytest.raises(UserError, match=r"changed or cut short since it was listed"):
        list(one.rows())
    path.unlink()
    with pytest.raises(UserError, match=r"row 1: No such file or directory; every input"):
        list(one.rows())


def test_a_file_that_grows_or_shrinks_under_the_reader(tmp_path, monkeypatch):
    monkeypatch.setattr(readers, "READ_BYTES", 512)
    for size in (len(jsonl()) + 100, len(jsonl()) // 2):
        iterator = reader(write(tmp_path / "x.jsonl", jsonl())).rows()
        next(iterator)
        os.truncate(tmp_path / "x.jsonl", size)
        with pytest.raises(UserError, match=r"x\.jsonl"):
            list(iterator)


def test_both_schemas_are_read_as_datasets_reads_them(tmp_path):
    import datasets

    count = len(TEXTS)
    dumps = [f"CC-MAIN-2013-{20 + i % 2}" for i in range(count)]
    columns: dict[str, Any] = {"text": TEXTS, "dump": dumps}
    columns |= {name: [f"{name} of it"] * count for name in ("id", "url", "file_path", "language")}
    columns |= {name: [0.97] * count for name in ("language_score", "score")}
    columns |= {name: [3] * count for name in ("token_count", "int_score")}
    parquet = tmp_path / "000_00000.parquet"
    pyarrow.parquet.write_table(pyarrow.table(columns), parquet, row_group_size=16)
    sets = [{"redpajama_set_name": f"RedPajama{i % 3}"} for i in range(count)]
    lines = b"".join(jsonl([text], meta=one) for text, one in zip(TEXTS, sets, strict=True))
    packed = write(tmp_path / "example_train_0.jsonl.zst", zst(lines))
    for kind, path, group, fields in (
        ("parquet", parquet, "dump", set(columns)),
        ("json", packed, "meta.redpajama_set_name", {"text", "meta"}),
    ):
        found = datasets.load_dataset(kind, data_files=str(path), split="train", streaming=True)
        theirs = list(found)
        assert set(theirs[0]) == fields and [row["text"] for row in theirs] == TEXTS
        groups = [functools.reduce(dict.__getitem__, group.split("."), row) for row in theirs]
        expected = zip(TEXTS, groups, strict=True)
        assert rows(path, group_field=group) == [Document(t, t.encode(), g) for t, g in expected]
        assert len(set(groups)) > 1


@pytest.mark.parametrize("checksum", [True, False])
def test_a_zst_that_is_cut_anywhere(checksum, tmp_path):
    frames = [zst(jsonl(half), checksum=checksum) for half in (TEXTS[:20], TEXTS[20:])]
    content, first = b"".join(frames), len(frames[0])
    # without the checksum that ends a frame, all its rows are there
    rest = 4 if checksum else 0
    for length in set(range(len(content))) - {first}:
        path = write(tmp_path / "x.jsonl.zst", content[:length])
        with pytest.raises(UserError, match=r"x\.jsonl\.zst, row (1|21|41): damaged") as raised:
            rows(path)
        assert ("row 1:" in str(raised.value)) == (length < first - rest)
    # a whole file, as far as the format goes: the known size alone tells
    assert texts(rows(write(path, content[:first]))) == TEXTS[:20]
    whole = Input(path.name, len(content), "")
    with pytest.raises(UserError, match=f"{first:,} bytes, expected {len(content):,}"):
        list(InputReader(tmp_path, whole, "text", None).rows())


@pytest.mark.parametrize("suffix", [".jsonl.gz", ".parquet"])
def test_a_gz_or_parquet_that_is_cut_anywhere(suffix, tmp_path):
    content = any_file(tmp_path, suffix).read_bytes()
    member = len(gzip.compress(jsonl(TEXTS[:20]))) if suffix == ".jsonl.gz" else -1
    for length in set(range(0, len(content), 7)) - {member}:
        path = write(tmp_path / f"y{suffix}", content[:length])
        with pytest.raises(UserError, match=rf"y\{suffix}, row [0-9]+: damaged"):
            rows(path)


def flips(content: bytes, step: int) -> Iterator[bytes]:
    for bit in range(0, 8 * len(content), step):
        broken = bytearray(content)
        broken[bit // 8] ^= 1 << bit % 8
        yield bytes(broken)


@pytest.mark.parametrize(
    ("suffix", "step"), [(".jsonl.zst", 13), (".jsonl.gz", 13), (".parquet", 41)]
)
def test_a_flipped_bit_is_an_error_or_harmless(suffix, step, tmp_path):
    content = any_file(tmp_path, suffix).read_bytes()
    right = hashlib.sha256(content).hexdigest()
    silent = errors = 0
    for broken in flips(content, step):
        path = write(tmp_path / f"y{suffix}", broken)
        try:
            found = rows(path)
            assert len(found) == len(TEXTS)  # never fewer documents
            silent += found != DOCUMENTS
        except UserError as error:
            assert f"y{suffix}" in str(error) and "row " in str(error)
            errors += 1
        with pytest.raises(UserError, match=r"row "):
            rows(path, sha256=right)
    # a parquet's page headers and footer have no checksum: only the known hash covers them
    assert silent <= (2 if suffix == ".parquet" else 0)
    # the rest are bits that carry nothing, such as a time in a gzip header
    assert suffix == ".parquet" or errors > 0.9 * len(content) * 8 / step


@pytest.mark.parametrize("suffix", [".jsonl.zst", ".jsonl.gz"])
def test_garbage_after_the_end_is_damage_and_an_empty_frame_is_none(suffix, tmp_path):
    content = any_file(tmp_path, suffix).read_bytes()
    with pytest.raises(UserError, match="row 41: damaged"):
        rows(write(tmp_path / f"x{suffix}", content + b"garbage"))
    if suffix == ".jsonl.zst":
        skippable = b"\x50\x2a\x4d\x18" + (5).to_bytes(4, "little") + b"index"
        assert rows(write(tmp_path / "y.jsonl.zst", skippable + content + skippable)) == DOCUMENTS


def test_unicode_that_is_no_unicode(tmp_path):
    lines = {
        rb'{"text": "a\ud800b"}': ("a\ufffdb", "lone surrogate"),
        rb'{"text": "a\ud83d\ude00b"}': ("a😀b", ""),
        b'{"text": "a\xe2\x82b\xff"}': ("a\ufffdb\ufffd", "invalid UTF-8"),
        b'{"text": "fine", "url": "\xff"}': ("fine", ""),
        b'{"text": "a\\ud800", "url": "\xff"}': ("a\ufffd", "invalid UTF-8"),
        b'{"text": "\xff\\ud800x\\udc80"}': ("\ufffd\ufffdx\ufffd", "invalid UTF-8"),
        rb'{"text": "\udc80"}': ("\ufffd", "lone surrogate"),
        b'{"text": "nul\\u0000 \xe2\x96\x81 <s> </s>"}': ("nul\0 \u2581 <s> </s>", ""),
    }
    found = rows(write(tmp_path / "x.jsonl", b"\n".join(lines)))
    assert found == [Document(text, text.encode(), "", why) for text, why in lines.values()]
    repaired = Document("a\ufffdb", "a\ufffdb".encode(), "", "invalid UTF-8")
    assert rows(write(tmp_path / "x.txt", b"a\xffb")) == [repaired]
    array = pyarrow.array([b"a\xffb", b"ok", None, b""]).view(pyarrow.string())
    expected = [repaired, Document("ok", b"ok"), Skipped("empty"), Skipped("empty")]
    assert rows(write_parquet(tmp_path / "x.parquet", array)) == expected


def test_lines(tmp_path):
    content = b'\xef\xbb\xbf{"text": "a"}\r\n\n  \n{"text": null}\n{"text": ""}\n{"text": "b\\n"}'
    found = rows(write(tmp_path / "x.jsonl", content))
    assert found == [
        Document("a", b"a"), Skipped("empty"), Skipped("empty"), Document("b\n", b"b\n"),
    ]  # fmt: skip
    assert rows(write(tmp_path / "x.txt", b"\xef\xbb\xbfa\r\nb")) == [Document("a\r\nb", b"a\r\nb")]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"content": "x", "id": 1}', "no field 'text' for the text; there are 'content', 'id';"),
        (b"{}", "no field 'text' for the text; there are ; .*--text-field"),
        (b'{"text": 5}', "the field 'text' is a int, no string"),
        (b'["x"]', "a JSON list, expected an object with 'text'"),
        (b'{"text": "x"', "no JSON: .*cut short"),
        (b"\0\0\0\0", "no JSON"),
        (b'{"text": "x", "n": ' + b"9" * 5000 + b"}", "no JSON: Exceeds the limit"),
        (b'{"text": "x", "n": ' + b"[" * 200_000, "no JSON"),
        (b'{"\\u001b[31m": 1}', r".*there are '\\x1b\[31m'"),
    ],
)
def test_rows_that_are_no_rows(line, message, tmp_path):
    path = write(tmp_path / "x.jsonl", jsonl(["fine", "fine"]) + line + b"\n" + jsonl(["fine"]))
    with pytest.raises(UserError, match=r"x\.jsonl, row 3: " + message):
        rows(path)


def test_columns(tmp_path):
    path = tmp_path / "x.parquet"
    groups = pyarrow.array(["g", None, "h"]).dictionary_encode()
    for kind in [pyarrow.large_string(), pyarrow.string_view(), pyarrow.binary()]:
        column = pyarrow.array(["a", None, "c"]).cast(kind)
        pyarrow.parquet.write_table(pyarrow.table({"body": column, "g": groups}), path)
        found = rows(path, text_field="body", group_field="g")
        assert found == [Document("a", b"a", "g"), Skipped("empty"), Document("c", b"c", "h")]
        pyarrow.parquet.write_table(pyarrow.table({"g": groups, "n": groups, "body": column}), path)
        assert rows(path, text_field="body", group_field="g") == found
    with pytest.raises(UserError, match=r"x\.parquet, row 1: no field 'text'.* 'g', 'n', 'body'"):
        rows(path)
    write_parquet(path, pyarrow.array([1, 2]))
    with pytest.raises(UserError, match="the column 'text' holds int64, expected strings"):
        rows(path)


def test_a_line_that_never_ends(tmp_path):
    """--max-line-bytes, also of a line that ends."""
    for end in (b"", b"\n"):
        path = write(tmp_path / "x.jsonl.zst", zst(jsonl(["fine"]) + b" " * (1 << 24) + end))
        limited = reader(path)
        limited.max_line_bytes = 1 << 20
        with pytest.raises(UserError, match=r"row 2: a line of more than 1,048,576 bytes"):
            list(limited.rows())


def test_a_parquet_is_read_in_bounded_memory(tmp_path):
    texts = [hashlib.sha256(i.to_bytes(4, "little")).hexdigest() * 40 for i in range(20_000)]
    path = write_parquet(tmp_path / "x.parquet", texts, row_group_size=20_000, compression="none")
    assert path.stat().st_size > 50_000_000
    # one row group and huge documents, and a footer that says so
    pages = {"use_dictionary": False, "write_batch_size": 1, "compression": "none"}
    big = write_parquet(tmp_path / "y.parquet", ["x" * 10_000_000] * 9, **pages)
    before = pyarrow.total_allocated_bytes()
    for file, most in ((big, 45_000_000), (path, 12_000_000)):
        for _ in reader(file).rows():
            assert pyarrow.total_allocated_bytes() - before < most
