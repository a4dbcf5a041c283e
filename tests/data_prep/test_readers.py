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
    """Return a reader of a file of its present size."""
    source_input = Input(path.name, path.stat().st_size, sha256)
    return InputReader(path.parent, source_input, text_field, group_field)


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

    packers: dict[str, Callable[[bytes], bytes]] = {
        ".jsonl": bytes,
        ".jsonl.zst": zst,
        ".jsonl.gz": gzip.compress,
    }
    pack = packers[suffix]
    return write(path, pack(jsonl(TEXTS[:20])) + pack(jsonl(TEXTS[20:])))


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.zst", ".jsonl.gz", ".parquet", ".txt"])
def test_rows_and_hash(suffix, tmp_path):
    path = any_file(tmp_path, suffix)
    sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
    file_reader = reader(path, sha256=sha256)

    documents = list(file_reader.rows())

    assert documents == DOCUMENTS or suffix == ".txt"
    assert file_reader.sha256 == sha256

    # a reader may read again; the hash is unknown before the end
    again = file_reader.rows()
    next(again)
    assert file_reader.sha256 == "" or suffix in (".parquet", ".txt")
    assert list(again) == documents[1:]
    assert file_reader.sha256


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.zst", ".jsonl.gz", ".parquet", ".txt"])
def test_a_file_that_changed_since_the_plan_is_refused(suffix, tmp_path):
    path = any_file(tmp_path, suffix)
    with refused("input.changed", path=path):
        rows(path, sha256="0" * 64)

    file_reader = reader(path, sha256=hashlib.sha256(path.read_bytes()).hexdigest())
    path.write_bytes(path.read_bytes() + b"\n")
    with refused("input.changed", path=path):
        list(file_reader.rows())

    path.unlink()
    with refused("input.unreadable", path=path, row=1):
        list(file_reader.rows())


@pytest.mark.parametrize(
    "new_size", [len(jsonl()) + 100, len(jsonl()) // 2], ids=["grows", "shrinks"]
)
def test_a_file_that_changes_its_size_while_read(tmp_path, monkeypatch, new_size):
    monkeypatch.setattr(readers, "READ_BYTES", 512)
    path = write(tmp_path / "x.jsonl", jsonl())
    iterator = reader(path).rows()
    next(iterator)

    os.truncate(path, new_size)
    with pytest.raises(UserError) as caught:
        list(iterator)

    assert caught.value.fields["path"] == path


@pytest.mark.parametrize("checksum", [True, False])
def test_a_zst_that_is_cut_anywhere(checksum, tmp_path):
    first_frame = zst(jsonl(TEXTS[:20]), checksum=checksum)
    content = first_frame + zst(jsonl(TEXTS[20:]), checksum=checksum)
    path = tmp_path / "x.jsonl.zst"
    # without the checksum that ends a frame, all its rows are complete
    checksum_bytes = 4 if checksum else 0

    for length in range(len(content)):
        if length == len(first_frame):
            continue
        with refused("input.damaged", path=path) as caught:
            rows(write(path, content[:length]))
        row = caught.value.fields["row"]
        assert row in (1, 21, 41)
        assert (row == 1) == (length < len(first_frame) - checksum_bytes)

    # a complete frame: only the known size shows that the file was cut
    assert rows(write(path, first_frame)) == DOCUMENTS[:20]
    whole = Input(path.name, len(content), "")
    with refused("input.changed", path=path):
        list(InputReader(tmp_path, whole, "text", None).rows())


@pytest.mark.parametrize("suffix", [".jsonl.gz", ".parquet"])
def test_a_gz_or_parquet_that_is_cut_anywhere(suffix, tmp_path):
    content = any_file(tmp_path, suffix).read_bytes()
    path = tmp_path / f"y{suffix}"
    lengths = set(range(0, len(content), 7))
    if suffix == ".jsonl.gz":  # a whole member is a whole file
        lengths.discard(len(gzip.compress(jsonl(TEXTS[:20]))))

    for length in lengths:
        with refused("input.damaged", path=path):
            rows(write(path, content[:length]))


@pytest.mark.parametrize(
    ("suffix", "step"), [(".jsonl.zst", 13), (".jsonl.gz", 13), (".parquet", 41)]
)
def test_a_flipped_bit_is_an_error_or_harmless(suffix, step, tmp_path):
    content = any_file(tmp_path, suffix).read_bytes()
    sha256 = hashlib.sha256(content).hexdigest()
    bits = range(0, 8 * len(content), step)

    num_silent = 0
    num_errors = 0
    for bit in bits:
        broken = bytearray(content)
        broken[bit // 8] ^= 1 << bit % 8
        path = write(tmp_path / f"y{suffix}", broken)
        try:
            documents = rows(path)
            assert len(documents) == len(TEXTS)  # never fewer documents
            num_silent += documents != DOCUMENTS
        except UserError as error:
            assert error.fields["path"] == path
            assert error.fields["row"]
            num_errors += 1
        with pytest.raises(UserError):
            rows(path, sha256=sha256)

    # a parquet's page headers and footer have no checksum: only the known hash covers them
    assert num_silent <= (2 if suffix == ".parquet" else 0)
    # the others are bits without meaning, such as a time in a gzip header
    assert suffix == ".parquet" or num_errors > 0.9 * len(content) * 8 / step


@pytest.mark.parametrize("suffix", [".jsonl.zst", ".jsonl.gz"])
def test_garbage_after_the_end_is_damage(suffix, tmp_path):
    content = any_file(tmp_path, suffix).read_bytes()
    with refused("input.damaged", row=41):
        rows(write(tmp_path / f"x{suffix}", content + b"garbage"))


def test_a_skippable_frame_is_no_damage(tmp_path):
    content = any_file(tmp_path, ".jsonl.zst").read_bytes()
    skippable = b"\x50\x2a\x4d\x18" + (5).to_bytes(4, "little") + b"index"
    assert rows(write(tmp_path / "y.jsonl.zst", skippable + content + skippable)) == DOCUMENTS


# a line, its text, and what was repaired
UNICODE_LINES = [
    (rb'{"text": "a\ud800b"}', "a\ufffdb", "lone surrogate"),
    (rb'{"text": "a\ud83d\ude00b"}', "a😀b", ""),
    (b'{"text": "a\xe2\x82b\xff"}', "a\ufffdb\ufffd", "invalid UTF-8"),
    (b'{"text": "fine", "url": "\xff"}', "fine", ""),
    (b'{"text": "a\\ud800", "url": "\xff"}', "a\ufffd", "invalid UTF-8"),
    (b'{"text": "\xff\\ud800x\\udc80"}', "\ufffd\ufffdx\ufffd", "invalid UTF-8"),
    (rb'{"text": "\udc80"}', "\ufffd", "lone surrogate"),
    (b'{"text": "nul\\u0000 \xe2\x96\x81 <s> </s>"}', "nul\0 \u2581 <s> </s>", ""),
]


def test_invalid_unicode_of_lines_is_repaired(tmp_path):
    path = write(tmp_path / "x.jsonl", b"\n".join(line for line, _, _ in UNICODE_LINES))

    expected = [Document(text, text.encode(), "", repair) for _, text, repair in UNICODE_LINES]
    assert rows(path) == expected


def test_invalid_unicode_of_other_formats_is_repaired(tmp_path):
    repaired = Document("a\ufffdb", "a\ufffdb".encode(), "", "invalid UTF-8")
    assert rows(write(tmp_path / "x.txt", b"a\xffb")) == [repaired]

    array = pyarrow.array([b"a\xffb", b"ok", None, b""]).view(pyarrow.string())
    expected = [repaired, Document("ok", b"ok"), Skipped("empty"), Skipped("empty")]
    assert rows(write_parquet(tmp_path / "x.parquet", array)) == expected


def test_lines_and_byte_order_marks(tmp_path):
    content = b'\xef\xbb\xbf{"text": "a"}\r\n\n  \n{"text": null}\n{"text": ""}\n{"text": "b\\n"}'
    documents = rows(write(tmp_path / "x.jsonl", content))
    empty = Skipped("empty")
    assert documents == [Document("a", b"a"), empty, empty, Document("b\n", b"b\n")]

    assert rows(write(tmp_path / "x.txt", b"\xef\xbb\xbfa\r\nb")) == [Document("a\r\nb", b"a\r\nb")]


BAD_LINES = {
    "other field": b'{"content": "x", "id": 1}',
    "no field": b"{}",
    "number": b'{"text": 5}',
    "list": b'["x"]',
    "cut": b'{"text": "x"',
    "zeros": b"\0\0\0\0",
    "long number": b'{"text": "x", "n": ' + b"9" * 5000 + b"}",
    "deep": b'{"text": "x", "n": ' + b"[" * 200_000,
    "escape code": b'{"\\u001b[31m": 1}',
}


@pytest.mark.parametrize("line", BAD_LINES.values(), ids=BAD_LINES)
def test_bad_rows_are_errors_with_their_number(tmp_path, line):
    path = write(tmp_path / "x.jsonl", jsonl(["fine", "fine"]) + line + b"\n" + jsonl(["fine"]))
    with refused("input.bad_row", path=path, row=3) as caught:
        rows(path)
    assert "\x1b" not in str(caught.value)


@pytest.mark.parametrize("end", [b"", b"\n"], ids=["file", "line"])
def test_a_line_above_max_line_bytes_is_an_error(tmp_path, end):
    path = write(tmp_path / "x.jsonl", jsonl(["fine"]) + b" " * (1 << 21) + end)
    limited = reader(path)
    limited.max_line_bytes = 1 << 20
    with refused("input.bad_row", path=path, row=2):
        list(limited.rows())


@pytest.mark.parametrize(
    "kind",
    [pyarrow.large_string(), pyarrow.string_view(), pyarrow.binary()],
    ids=["large_string", "string_view", "binary"],
)
def test_parquet_columns(tmp_path, kind):
    path = tmp_path / "x.parquet"
    groups = pyarrow.array(["g", None, "h"]).dictionary_encode()
    body = pyarrow.array(["a", None, "c"]).cast(kind)
    expected = [Document("a", b"a", "g"), Skipped("empty"), Document("c", b"c", "h")]

    # in any order, and next to others
    for table in ({"body": body, "g": groups}, {"g": groups, "n": groups, "body": body}):
        pyarrow.parquet.write_table(pyarrow.table(table), path)
        assert rows(path, text_field="body", group_field="g") == expected

    with refused("input.bad_row", path=path):
        rows(path)


def test_a_parquet_column_of_numbers_is_refused(tmp_path):
    path = write_parquet(tmp_path / "x.parquet", pyarrow.array([1, 2]))
    with refused("input.bad_row", path=path):
        rows(path)


def assert_read_within(path, max_bytes):
    """Read a file; Arrow never allocates more than this."""
    before = pyarrow.total_allocated_bytes()
    for _ in reader(path).rows():
        assert pyarrow.total_allocated_bytes() - before < max_bytes


def test_a_large_row_group_is_read_in_bounded_memory(tmp_path):
    texts = [hashlib.sha256(i.to_bytes(4, "little")).hexdigest() * 40 for i in range(20_000)]
    path = write_parquet(tmp_path / "x.parquet", texts, row_group_size=20_000, compression="none")
    assert path.stat().st_size > 50_000_000
    assert_read_within(path, 12_000_000)


def test_huge_documents_are_read_in_bounded_memory(tmp_path):
    path = write_parquet(
        tmp_path / "y.parquet",
        ["x" * 10_000_000] * 9,
        use_dictionary=False,
        write_batch_size=1,
        compression="none",
    )
    assert_read_within(path, 45_000_000)


@pytest.mark.parametrize("mark", ["\n\n", "\n", " ", ""])
def test_long_documents_are_cut_after_paragraphs_lines_or_words(mark):
    text = mark.join("naïve😀" * (1 + i % 9) for i in range(200))
    empty = Skipped("empty")
    long_document = Document(text, text.encode(), "g")
    short_document = Document("short", b"short")
    documents = [empty, long_document, short_document]
    max_bytes = 400

    first, *parts, last = cut_documents(iter(documents), max_bytes)

    assert (first, last) == (empty, short_document)
    assert len(parts) > 2
    assert "".join(part.text for part in parts) == text
    for part in parts:
        assert part.utf8 == part.text.encode()
        assert part.group == "g"
        assert len(part.utf8) <= max_bytes
    for part in parts[:-1]:
        assert len(part.utf8) > 150
        assert part.text.endswith(mark)
    assert list(cut_documents(iter(documents), None)) == documents


@pytest.mark.parametrize("suffix", [".jsonl.zst", ".jsonl.gz", ".parquet"])
@pytest.mark.parametrize("unit", [b"\n", b" \n", b'{"text": ""}\n', b'{"text": "a"}\n'])
def test_a_file_that_unpacks_without_end_is_refused(suffix, unit, tmp_path, monkeypatch):
    path = tmp_path / f"x{suffix}"
    content = unit * ((1 << 20) // len(unit))
    if suffix == ".parquet":
        text = unit.decode().strip()[-4:]
        array = pyarrow.array([text] * (1 << 18)).dictionary_encode()
        pyarrow.parquet.write_table(pyarrow.table({"text": array}), path)
    elif suffix == ".jsonl.zst":
        write(path, zst(content))
    else:
        write(path, gzip.compress(content))

    monkeypatch.setattr(readers, "FREE_EXPANSION", 1 << 12)
    monkeypatch.setattr(readers, "MAX_EXPANSION", 20)
    with refused("input.bad_row", path=path):
        rows(path)

    # what real text is packed by
    monkeypatch.setattr(readers, "MAX_EXPANSION", 100_000)
    assert len(rows(path)) >= content.count(b"{")


@pytest.mark.parametrize("pack", [bytes, zst], ids=["plain", "zst"])
@pytest.mark.parametrize("read_bytes", [1, 2, 3, 7, 1 << 16])
def test_blank_lines_of_any_kind_are_skipped(pack, read_bytes, tmp_path, monkeypatch):
    monkeypatch.setattr(readers, "READ_BYTES", read_bytes)
    monkeypatch.setattr(readers, "PACKED_READ_BYTES", read_bytes)
    first = jsonl(["a"]).rstrip(b"\n")
    second = b"  " + jsonl(["b"]).rstrip(b"\n")
    lines = [b"", b"\r", b" \t", b"\n\n", first, b"", second, b" \r"]
    content = b"\n".join([*lines, *lines[::-1]])
    suffix = ".jsonl" if pack is bytes else ".jsonl.zst"

    documents = rows(write(tmp_path / f"x{suffix}", pack(content)))

    assert [document.text for document in documents] == ["a", "b", "b", "a"]
