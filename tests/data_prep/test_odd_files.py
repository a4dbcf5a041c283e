"""Odd files at both doors, `canon new` (its survey) and `data build`: documents, or an error."""

import gzip
import io
import json
import zipfile

import pyarrow
import pyarrow.ipc
import pyarrow.parquet
import pytest
import zstandard

from canon_pretrain.core.errors import UserError
from canon_pretrain.data.shards import TokenShards, read_commit
from data_prep.build import build
from data_prep.plan import Options
from data_prep.sources import SourceOptions
from data_prep.survey import survey
from tests.corpora import write_tokenizer
from tests.support import refused

TEXT = "Plain words of a text.\nAnd a second line.\n" * 20
RUSSIAN = "Привет, мир!\n" * 20
CHINESE = "一二三四, 五六\n" * 20
ROWS = b'{"text": "one"}\n{"text": "two"}\n'
ZST = zstandard.ZstdCompressor().compress
OTHER = "input.other_format"
UNKNOWN = "input.unknown_format"


def parquet(values, name="text"):
    out = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table({name: values}), out)
    return out.getvalue()


def arrow():
    out = io.BytesIO()
    table = pyarrow.table({"text": ["one"]})
    with pyarrow.ipc.new_file(out, table.schema) as file:
        file.write_table(table)
    return out.getvalue()


UTF16_ROWS = ROWS.decode().encode("utf-16")
LONG_ROW = json.dumps({"text": TEXT * 100}).encode()


def archive():
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as file:
        file.writestr("a.txt", TEXT)
    return out.getvalue()


STRUCTS = [{"text": "one", "n": 1}, None, {"text": None, "n": 2}, {"text": "two", "n": 3}]
NESTED = b'{"doc": {"text": "one"}}\n{"doc": null}\n{"doc": {"text": null}}\n'
PDF = b"%PDF-1.4\n1 0 obj\n"

# name, content -> documents or code, at both doors
CASES = [
    # lines of JSON under every name
    ("a.jsonl", ROWS, 2),
    ("a.ndjson", ROWS, 2),
    ("a.json", ROWS, 2),
    ("a.JSONL", ROWS, 2),
    ("a.Json", ROWS, 2),
    ("a.jsonl.gz", gzip.compress(ROWS), 2),
    ("a.ndjson.gz", gzip.compress(ROWS), 2),
    ("a.json.gz", gzip.compress(ROWS), 2),
    ("a.jsonl.zst", ZST(ROWS), 2),
    ("a.ndjson.zst", ZST(ROWS), 2),
    ("a.json.zst", ZST(ROWS), 2),
    ("a.JSON.GZ", gzip.compress(ROWS), 2),
    ("a.PARQUET", parquet(["one", "two"]), 2),
    ("a.TXT", TEXT.encode(), 1),
    ("blank.json", b"\xef\xbb\xbf\n \n" + ROWS, 2),
    ("long.json", LONG_ROW, 1),
    # a .json of another shape, or of another field
    ("list.json", b'[{"text": "one"}]', UNKNOWN),
    ("indented.json", b'{\n  "text": "one"\n}\n', UNKNOWN),
    ("empty.json", b"", UNKNOWN),
    ("field.json", b'{"body": "one"}\n', "input.bad_row"),
    # encodings
    ("utf8.txt", TEXT.encode("utf-8-sig"), 1),
    ("latin1.txt", "naïve café".encode("latin-1"), 1),
    ("utf16-bom.txt", TEXT.encode("utf-16"), OTHER),
    ("utf32-bom.txt", TEXT.encode("utf-32"), OTHER),
    ("utf16-le.txt", TEXT.encode("utf-16-le"), OTHER),
    ("utf16-le-russian.txt", RUSSIAN.encode("utf-16-le"), OTHER),
    ("utf16-le-chinese.txt", CHINESE.encode("utf-16-le"), OTHER),
    ("utf16-be.txt", TEXT.encode("utf-16-be"), OTHER),
    ("utf16-be-russian.txt", RUSSIAN.encode("utf-16-be"), OTHER),
    ("utf16-be-chinese.txt", CHINESE.encode("utf-16-be"), OTHER),
    ("utf32-le.txt", TEXT.encode("utf-32-le"), OTHER),
    ("utf16.jsonl", UTF16_ROWS, OTHER),
    ("utf16-le.ndjson", ROWS.decode().encode("utf-16-le"), OTHER),
    ("utf16-be.jsonl.gz", gzip.compress(ROWS.decode().encode("utf-16-be")), OTHER),
    # a name that does not say what the file holds
    ("rows.txt", ROWS, OTHER),
    ("long.txt", LONG_ROW, OTHER),
    ("gzip.txt", gzip.compress(ROWS), OTHER),
    ("zst.txt", ZST(ROWS), OTHER),
    ("parquet.txt", parquet(["a"]), OTHER),
    ("arrow.txt", arrow(), OTHER),
    ("zip.txt", archive(), OTHER),
    ("pdf.txt", PDF, OTHER),
    ("packed.jsonl", gzip.compress(ROWS), OTHER),
    ("plain.jsonl.gz", ROWS, OTHER),
    ("other.jsonl.gz", ZST(ROWS), OTHER),
    ("other.jsonl.zst", gzip.compress(ROWS), OTHER),
    ("twice.jsonl.gz", gzip.compress(gzip.compress(ROWS)), OTHER),
    ("rows.parquet", ROWS, OTHER),
    # text that only resembles another format
    ("brace.txt", b'{"unfinished": 1\n', 1),
    ("number.txt", b"[1, 2]\n{}\n", 1),
    ("words.txt", b"PAR1 is a gene. PARENTS, BZh and PK too.", 1),
    ("nul.txt", b"a\0b", 1),
]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return str(write_tokenizer(tmp_path_factory.mktemp("tokenizer") / "tokenizer.model"))


def at_survey(files, **options):
    return survey(SourceOptions("local", files, **options)).num_documents


def at_build(files, out, tokenizer, **options):
    source = SourceOptions("local", files, **options)
    build(out, source, tokenizer, Options(holdout=0), 1)
    return TokenShards.open(out / "train").num_documents


def outcome(door, *arguments, **options):
    """Return the number of documents, or the code of the error."""
    try:
        return door(*arguments, **options)
    except UserError as error:
        return error.code


# not by content, which holds times: the processes that share the tests would have different names
@pytest.mark.parametrize(("name", "content", "expected"), CASES, ids=[name for name, *_ in CASES])
def test_both_doors(name, content, expected, tmp_path, tokenizer):
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / name).write_bytes(content)

    assert outcome(at_survey, [folder]) == expected
    assert outcome(at_build, [folder], tmp_path / "data", tokenizer) == expected


@pytest.mark.parametrize(
    ("name", "content", "num_documents", "num_skipped"),
    [
        ("a.parquet", parquet(pyarrow.array(STRUCTS), "doc"), 2, 2),
        ("a.parquet", parquet(pyarrow.nulls(3), "doc.text"), 0, 3),
        ("a.parquet", parquet(pyarrow.nulls(3), "doc"), 0, 3),
        ("a.parquet", parquet(["one", None], "doc.text"), 1, 1),
        ("a.parquet", parquet(pyarrow.array([{"text": None}] * 4), "doc"), 0, 4),
        ("a.jsonl", NESTED, 1, 2),
    ],
    ids=("structs", "null in struct", "null", "text", "null structs", "lines"),
)
def test_fields_of_fields_and_columns_without_values(
    name, content, num_documents, num_skipped, tmp_path, tokenizer
):
    field = "doc.text"
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / name).write_bytes(content)

    assert at_survey([folder], text_field=field) == num_documents
    if not num_documents:
        with refused("data.no_documents", skipped={"empty": num_skipped}):
            at_build([folder], tmp_path / "none", tokenizer, text_field=field)

    # next to others they are counted
    (folder / "b.jsonl").write_bytes(b'{"doc": {"text": "good"}}\n')
    assert at_survey([folder], text_field=field) == num_documents + 1
    num_built = at_build([folder], tmp_path / "data", tokenizer, text_field=field)
    assert num_built == num_documents + 1
    record = read_commit(tmp_path / "data/train", "part-00000-0").record
    assert record.skipped == {"empty": num_skipped}


def test_a_json_that_describes_other_files(tmp_path, tokenizer):
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "a.jsonl").write_bytes(ROWS)
    (folder / "b.json").write_bytes(ROWS)
    (folder / "dataset_infos.json").write_bytes(b'{"default": {"splits": 1}}\n')
    (folder / "state.json").write_bytes(b'{\n  "split": "train"\n}')

    # skipped in a folder, refused by name
    assert at_survey([folder]) == 4
    assert at_build([folder], tmp_path / "data", tokenizer) == 4
    for name, code in (("dataset_infos.json", "input.bad_row"), ("state.json", UNKNOWN)):
        files = [folder / "a.jsonl", folder / name]
        assert outcome(at_survey, files) == code
        assert outcome(at_build, files, tmp_path / name, tokenizer) == code

    # as text, if the user says so, but never lines of JSON
    (folder / "dataset_infos.json").unlink()
    assert at_survey([folder], text_suffixes=[".json"]) == 5
    assert at_build([folder], tmp_path / "more", tokenizer, text_suffixes=[".json"]) == 5


def test_other_formats_are_never_text(tmp_path, tokenizer):
    (tmp_path / "a.foo").write_bytes(ROWS)
    (tmp_path / "b.pdf").write_bytes(PDF)
    (tmp_path / "c.MD").write_bytes(TEXT.encode())
    (tmp_path / "d.bin").write_bytes(TEXT.encode("utf-16-le"))
    assert survey(SourceOptions("local", [tmp_path])).suffixes == [".md"]

    for suffix in (".foo", ".PDF", ".bin"):
        suffixes = [".md", suffix]
        out = tmp_path / "out" / suffix
        assert outcome(at_survey, [tmp_path], text_suffixes=suffixes) == OTHER
        assert outcome(at_build, [tmp_path], out, tokenizer, text_suffixes=suffixes) == OTHER
        assert not (out / "plan.json").exists()


def test_equal_files_that_are_all_held_out(tmp_path, tokenizer):
    files = [tmp_path / f"{number}.txt" for number in range(6)]
    for path in files:
        path.write_text(TEXT)
    source = SourceOptions("local", files)

    for name, requested in (("read", tokenizer), ("trained", "train:300")):
        with refused("data.all_held_out", documents=6):
            build(tmp_path / name, source, requested, Options(holdout=0.999), 1)
