"""Readers of every format, and files that are damaged on purpose.

Unless a test is about the known size and hash, the size is that of the damaged file and the hash
unknown, so that the format's own reader must find the damage.
"""

import gzip
import hashlib
import json
import os
from collections.abc import Callable

import pyarrow
import pyarrow.parquet
import pytest
import zstandard

from canon_pretrain.core.errors import UserError
from data_prep import readers
from data_prep.plan import Input
from data_prep.readers import Document, InputReader, Skipped, cut_documents
from tests.support import refused

TEXTS = [f"Document {i}: " + "déjà vu 😀 " * (i % 7 + 1) for i in range(40)]
DOCUMENTS = [Document(text, text.encode()) for text in TEXTS]


def reader(path, *, sha256="", text_field="text", group_field=None):
    known = Input(path.name, path.stat().st_size, sha256)
    return InputReader(path.parent, known, text_field, group_field)


def rows(path, **options):
    return list(reader(path, **options).rows())


def jsonl(values=TEXTS, **more):
    return b"".join(json.dumps({"text": text, **more}).encode() + b"\n" for text in values)


def zst(content, *, checksum=True):
    return zstandard.ZstdCompressor(write_checksum=checksum).compress(content)


def write(path, content):
    path.write_bytes(content)
    return path


def write_parquet(path, texts, **options):
    column = texts if isinstance(texts, pyarrow.Array) else pyarrow.array(texts, pyarrow.string())
    pyarrow.parquet.write_table(pyarrow.table({"text": column}), path, **options)
    return path


def any_file(folder, suffix):
    """Write TEXTS in the format of the suffix, in several frames, members or row groups."""
    path = folder / f"x{suffix}"
    if suffix == ".txt":
        return write(path, "\n".join(TEXTS).encode())
    if suffix == ".parquet":
        return write_parquet(path, TEXTS, row_group_size=16, write_page_checksum=True)
    halves = [jsonl(TEXTS[:20]), jsonl(TEXTS[20:])]
    pack: dict[str, Callable[[bytes], bytes]] = {".jsonl.zst": zst, ".jsonl.gz": gzip.compress}
    return write(path, b"".join(map(pack.get(suffix, bytes), halves)))


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.zst", ".jsonl.gz", ".parquet", ".txt"])
def test_rows_and_hash(suffix, tmp_path):
    path = any_file(tmp_path, suffix)
    right = hashlib.sha256(path.read_bytes()).hexdigest()
    one = reader(path, sha256=right)
    found = list(one.rows())
    assert found == DOCUMENTS or suffix == ".txt"
    assert one.sha256 == right
    # a reader may read again; the hash is unknown before the end
    again = one.rows()
    next(again)
    assert one.sha256 == "" or suffix in (".parquet", ".txt")
    assert list(again) == found[1:] and one.sha256
    with refused("input.changed", path=path):
        rows(path, sha256="0" * 64)
    path.write_bytes(path.read_bytes() + b"\n")
    with refused("input.changed", path=path):
        list(one.rows())
    path.unlink()
    with refused("input.unreadable", path=path, row=1):
        list(one.rows())


def test_a_file_that_grows_or_shrinks_while_read(tmp_path, monkeypatch):
    monkeypatch.setattr(readers, "READ_BYTES", 512)
    for size in (len(jsonl()) + 100, len(jsonl()) // 2):
        iterator = reader(path := write(tmp_path / "x.jsonl", jsonl())).rows()
        next(iterator)
        os.truncate(path, size)
        with pytest.raises(UserError) as caught:
            list(iterator)
        assert caught.value.fields["path"] == path


@pytest.mark.parametrize("checksum", [True, False])
def test_a_zst_that_is_cut_anywhere(checksum, tmp_path):
    frames = [zst(jsonl(half), checksum=checksum) for half in (TEXTS[:20], TEXTS[20:])]
    content, first, path = b"".join(frames), len(frames[0]), tmp_path / "x.jsonl.zst"
    # without the checksum that ends a frame, all its rows are complete
    rest = 4 if checksum else 0
    for length in set(range(len(content))) - {first}:
        with refused("input.damaged", path=path) as caught:
            rows(write(path, content[:length]))
        row = caught.value.fields["row"]
        assert row in (1, 21, 41) and (row == 1) == (length < first - rest)
    # a complete frame: only the known size shows that the file was cut
    assert rows(write(path, content[:first])) == DOCUMENTS[:20]
    with refused("input.changed", path=path):
        list(InputReader(tmp_path, Input(path.name, len(content), ""), "text", None).rows())


@pytest.mark.parametrize("suffix", [".jsonl.gz", ".parquet"])
def test_a_gz_or_parquet_that_is_cut_anywhere(suffix, tmp_path):
    content, path = any_file(tmp_path, suffix).read_bytes(), tmp_path / f"y{suffix}"
    member = len(gzip.compress(jsonl(TEXTS[:20]))) if suffix == ".jsonl.gz" else -1
    for length in set(range(0, len(content), 7)) - {member}:
        with refused("input.damaged", path=path):
            rows(write(path, content[:length]))


@pytest.mark.parametrize(
    ("suffix", "step"), [(".jsonl.zst", 13), (".jsonl.gz", 13), (".parquet", 41)]
)
def test_a_flipped_bit_is_an_error_or_harmless(suffix, step, tmp_path):
    content = any_file(tmp_path, suffix).read_bytes()
    right = hashlib.sha256(content).hexdigest()
    silent = errors = 0
    for bit in range(0, 8 * len(content), step):
        broken = bytearray(content)
        broken[bit // 8] ^= 1 << bit % 8
        path = write(tmp_path / f"y{suffix}", broken)
        try:
            found = rows(path)
            assert len(found) == len(TEXTS)  # never fewer documents
            silent += found != DOCUMENTS
        except UserError as error:
            assert error.fields["path"] == path and error.fields["row"]
            errors += 1
        with pytest.raises(UserError):
            rows(path, sha256=right)
    # a parquet's page headers and footer have no checksum: only the known hash covers them
    assert silent <= (2 if suffix == ".parquet" else 0)
    # the others are bits without meaning, such as a time in a gzip header
    assert suffix == ".parquet" or errors > 0.9 * len(content) * 8 / step


@pytest.mark.parametrize("suffix", [".jsonl.zst", ".jsonl.gz"])
def test_garbage_after_the_end_is_damage_an_empty_frame_is_not(suffix, tmp_path):
    content = any_file(tmp_path, suffix).read_bytes()
    with refused("input.damaged", row=41):
        rows(write(tmp_path / f"x{suffix}", content + b"garbage"))
    if suffix == ".jsonl.zst":
        skippable = b"\x50\x2a\x4d\x18" + (5).to_bytes(4, "little") + b"index"
        assert rows(write(tmp_path / "y.jsonl.zst", skippable + content + skippable)) == DOCUMENTS


def test_invalid_unicode_is_repaired(tmp_path):
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


def test_lines_and_byte_order_marks(tmp_path):
    content = b'\xef\xbb\xbf{"text": "a"}\r\n\n  \n{"text": null}\n{"text": ""}\n{"text": "b\\n"}'
    empty = Skipped("empty")
    found = rows(write(tmp_path / "x.jsonl", content))
    assert found == [Document("a", b"a"), empty, empty, Document("b\n", b"b\n")]
    assert rows(write(tmp_path / "x.txt", b"\xef\xbb\xbfa\r\nb")) == [Document("a\r\nb", b"a\r\nb")]


def test_bad_rows_are_errors_with_their_number(tmp_path):
    path = tmp_path / "x.jsonl"
    deep = b'{"text": "x", "n": ' + b"[" * 200_000
    number = b'{"text": "x", "n": ' + b"9" * 5000 + b"}"
    other = [b'{"content": "x", "id": 1}', b"{}", b'{"text": 5}', b'["x"]', b'{"text": "x"']
    for line in [*other, b"\0\0\0\0", number, deep, b'{"\\u001b[31m": 1}']:
        write(path, jsonl(["fine", "fine"]) + line + b"\n" + jsonl(["fine"]))
        with refused("input.bad_row", path=path, row=3) as caught:
            rows(path)
        assert "\x1b" not in str(caught.value)
    for end in (b"", b"\n"):  # --max-line-bytes
        limited = reader(write(path, jsonl(["fine"]) + b" " * (1 << 21) + end))
        limited.max_line_bytes = 1 << 20
        with refused("input.bad_row", path=path, row=2):
            list(limited.rows())


def test_parquet_columns(tmp_path):
    path = tmp_path / "x.parquet"
    groups = pyarrow.array(["g", None, "h"]).dictionary_encode()
    for kind in [pyarrow.large_string(), pyarrow.string_view(), pyarrow.binary()]:
        column = pyarrow.array(["a", None, "c"]).cast(kind)
        pyarrow.parquet.write_table(pyarrow.table({"body": column, "g": groups}), path)
        found = rows(path, text_field="body", group_field="g")
        assert found == [Document("a", b"a", "g"), Skipped("empty"), Document("c", b"c", "h")]
        pyarrow.parquet.write_table(pyarrow.table({"g": groups, "n": groups, "body": column}), path)
        assert rows(path, text_field="body", group_field="g") == found
    with refused("input.bad_row", path=path):
        rows(path)
    with refused("input.bad_row", path=path):
        rows(write_parquet(path, pyarrow.array([1, 2])))


def test_a_parquet_is_read_in_bounded_memory(tmp_path):
    texts = [hashlib.sha256(i.to_bytes(4, "little")).hexdigest() * 40 for i in range(20_000)]
    path = write_parquet(tmp_path / "x.parquet", texts, row_group_size=20_000, compression="none")
    assert path.stat().st_size > 50_000_000
    # one row group and huge documents, according to the footer
    pages = {"use_dictionary": False, "write_batch_size": 1, "compression": "none"}
    big = write_parquet(tmp_path / "y.parquet", ["x" * 10_000_000] * 9, **pages)
    before = pyarrow.total_allocated_bytes()
    for file, most in ((big, 45_000_000), (path, 12_000_000)):
        for _ in reader(file).rows():
            assert pyarrow.total_allocated_bytes() - before < most


@pytest.mark.parametrize("mark", ["\n\n", "\n", " ", ""])
def test_long_documents_are_cut_after_paragraphs_lines_or_words(mark):
    text = mark.join("naïve😀" * (1 + i % 9) for i in range(200))
    whole = [Skipped("empty"), Document(text, text.encode(), "g"), Document("short", b"short")]
    skipped, *parts, short = cut_documents(iter(whole), 400)
    assert (skipped, short) == (whole[0], whole[2]) and len(parts) > 2
    assert "".join(part.text for part in parts) == text
    for part in parts:
        assert part.utf8 == part.text.encode() and part.group == "g"
        assert len(part.utf8) <= 400
    assert all(len(part.utf8) > 150 and part.text.endswith(mark) for part in parts[:-1])
    assert list(cut_documents(iter(whole), None)) == whole


@pytest.mark.parametrize("suffix", [".jsonl.zst", ".jsonl.gz", ".parquet"])
@pytest.mark.parametrize("unit", [b"\n", b" \n", b'{"text": ""}\n', b'{"text": "a"}\n'])
def test_a_file_that_unpacks_without_end_is_refused(suffix, unit, tmp_path, monkeypatch):
    monkeypatch.setattr(readers, "FREE_EXPANSION", 1 << 12)
    monkeypatch.setattr(readers, "MAX_EXPANSION", 20)
    path = tmp_path / f"x{suffix}"
    content = unit * ((1 << 20) // len(unit))
    if suffix == ".parquet":
        text = unit.decode().strip()[-4:]
        array = pyarrow.array([text] * (1 << 18)).dictionary_encode()
        pyarrow.parquet.write_table(pyarrow.table({"text": array}), path)
    else:
        write(path, zst(content) if suffix == ".jsonl.zst" else gzip.compress(content))
    with refused("input.bad_row", path=path):
        rows(path)
    # what real text is packed by
    monkeypatch.setattr(readers, "MAX_EXPANSION", 100_000)
    assert len(rows(path)) >= content.count(b"{")


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.zst"])
def test_blank_lines_of_any_kind_are_skipped(suffix, tmp_path, monkeypatch):
    lines = [b"", b"\r", b" \t", b"\n\n", jsonl(["a"])[:-1], b"", b"  " + jsonl(["b"])[:-1], b" \r"]
    content = b"\n".join([*lines, *lines[::-1]])
    pack = {".jsonl": bytes, ".jsonl.zst": zst}[suffix]
    for size in (1, 2, 3, 7, 1 << 16):
        for name in ("READ_BYTES", "PACKED_READ_BYTES"):
            monkeypatch.setattr(readers, name, size)
        found = rows(write(tmp_path / f"x{suffix}", pack(content)))
        assert [document.text for document in found] == ["a", "b", "b", "a"]
