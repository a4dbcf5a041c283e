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
RUSSIAN, CHINESE = "Привет, мир!\n" * 20, "一二三四, 五六\n" * 20
ROWS = b'{"text": "one"}\n{"text": "two"}\n'
ZST = zstandard.ZstdCompressor().compress
OTHER, UNKNOWN = "input.other_format", "input.unknown_format"


def parquet(values, name="text"):
    out = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table({name: values}), out)
    return out.getvalue()


def arrow():
    out, table = io.BytesIO(), pyarrow.table({"text": ["one"]})
    with pyarrow.ipc.new_file(out, table.schema) as file:
        file.write_table(table)
    return out.getvalue()


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
    *((f"a{suffix}", ROWS, 2) for suffix in (".jsonl", ".ndjson", ".json", ".JSONL", ".Json")),
    *((f"a{suffix}.gz", gzip.compress(ROWS), 2) for suffix in (".jsonl", ".ndjson", ".json")),
    *((f"a{suffix}.zst", ZST(ROWS), 2) for suffix in (".jsonl", ".ndjson", ".json")),
    ("a.JSON.GZ", gzip.compress(ROWS), 2),
    ("a.PARQUET", parquet(["one", "two"]), 2),
    ("a.TXT", TEXT.encode(), 1),
    ("blank.json", b"\xef\xbb\xbf\n \n" + ROWS, 2),
    ("long.json", json.dumps({"text": TEXT * 100}).encode(), 1),
    # a .json of another shape, or of another field
    ("list.json", b'[{"text": "one"}]', UNKNOWN),
    ("indented.json", b'{\n  "text": "one"\n}\n', UNKNOWN),
    ("empty.json", b"", UNKNOWN),
    ("field.json", b'{"body": "one"}\n', "input.bad_row"),
    # encodings
    ("utf8.txt", TEXT.encode("utf-8-sig"), 1),
    ("latin1.txt", "naïve café".encode("latin-1"), 1),
    *((f"{i}.txt", TEXT.encode(name), OTHER) for i, name in enumerate(("utf-16", "utf-32"))),
    *((f"{i}.txt", x.encode("utf-16-le"), OTHER) for i, x in enumerate((TEXT, RUSSIAN, CHINESE))),
    *((f"{i}.txt", x.encode("utf-16-be"), OTHER) for i, x in enumerate((TEXT, RUSSIAN, CHINESE))),
    ("utf32.txt", TEXT.encode("utf-32-le"), OTHER),
    ("rows.jsonl", ROWS.decode().encode("utf-16"), OTHER),
    ("rows.ndjson", ROWS.decode().encode("utf-16-le"), OTHER),
    ("rows.jsonl.gz", gzip.compress(ROWS.decode().encode("utf-16-be")), OTHER),
    # a name that does not say what the file holds
    ("rows.txt", ROWS, OTHER),
    ("long.txt", json.dumps({"text": TEXT * 100}).encode(), OTHER),
    *(
        (f"{i}.txt", content, OTHER)
        for i, content in enumerate(
            (gzip.compress(ROWS), ZST(ROWS), parquet(["a"]), arrow(), archive(), PDF)
        )
    ),
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


def outcome(door, *words, **options):
    try:
        return door(*words, **options)
    except UserError as error:
        return error.code


IDS = [f"{number}-{name}" for number, (name, *_) in enumerate(CASES)]


# not by content, which holds times: the processes that share the tests would have different names
@pytest.mark.parametrize(("name", "content", "expected"), CASES, ids=IDS)
def test_both_doors(name, content, expected, tmp_path, tokenizer):
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / name).write_bytes(content)
    assert outcome(at_survey, [folder]) == expected
    assert outcome(at_build, [folder], tmp_path / "data", tokenizer) == expected


@pytest.mark.parametrize(
    ("name", "content", "found"),
    [
        ("a.parquet", parquet(pyarrow.array(STRUCTS), "doc"), (2, 2)),
        ("a.parquet", parquet(pyarrow.nulls(3), "doc.text"), (0, 3)),
        ("a.parquet", parquet(pyarrow.nulls(3), "doc"), (0, 3)),
        ("a.parquet", parquet(["one", None], "doc.text"), (1, 1)),
        ("a.parquet", parquet(pyarrow.array([{"text": None}] * 4), "doc"), (0, 4)),
        ("a.jsonl", NESTED, (1, 2)),
    ],
    ids=("structs", "null in a struct", "null", "text", "struct of nulls", "lines"),
)
def test_fields_of_fields_and_columns_without_values(name, content, found, tmp_path, tokenizer):
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / name).write_bytes(content)
    num_documents, num_skipped = found
    options = {"text_field": "doc.text"}
    assert at_survey([folder], **options) == num_documents
    if not num_documents:
        with refused("data.no_documents", skipped={"empty": num_skipped}):
            at_build([folder], tmp_path / "none", tokenizer, **options)
    # next to others they are counted
    (folder / "b.jsonl").write_bytes(b'{"doc": {"text": "good"}}\n')
    assert at_survey([folder], **options) == num_documents + 1
    assert at_build([folder], tmp_path / "data", tokenizer, **options) == num_documents + 1
    record = read_commit(tmp_path / "data/train", "part-00000-0").record
    assert record.skipped == {"empty": num_skipped}


def test_a_json_that_describes_other_files(tmp_path, tokenizer):
    (tmp_path / "texts").mkdir()
    for name, content in (
        ("a.jsonl", ROWS),
        ("b.json", ROWS),
        ("dataset_infos.json", b'{"default": {"splits": 1}}\n'),
        ("state.json", b'{\n  "split": "train"\n}'),
    ):
        (tmp_path / "texts" / name).write_bytes(content)
    files = [tmp_path / "texts"]
    assert at_survey(files) == at_build(files, tmp_path / "data", tokenizer) == 4
    for name, code in (("dataset_infos.json", "input.bad_row"), ("state.json", UNKNOWN)):
        named = [tmp_path / "texts/a.jsonl", tmp_path / "texts" / name]
        assert outcome(at_survey, named) == code
        assert outcome(at_build, named, tmp_path / name, tokenizer) == code
    # as text, if the user says so, but never lines of JSON
    options = {"text_suffixes": [".json"]}
    (tmp_path / "texts/dataset_infos.json").unlink()
    assert at_survey(files, **options) == 5
    assert at_build(files, tmp_path / "more", tokenizer, **options) == 5


def test_other_formats_are_never_text(tmp_path, tokenizer):
    for name, content in (("a.foo", ROWS), ("b.pdf", PDF), ("c.MD", TEXT.encode())):
        (tmp_path / name).write_bytes(content)
    (tmp_path / "d.bin").write_bytes(TEXT.encode("utf-16-le"))
    assert survey(SourceOptions("local", [tmp_path])).suffixes == [".md"]
    for suffix in (".foo", ".PDF", ".bin"):
        options = {"text_suffixes": [".md", suffix]}
        assert outcome(at_survey, [tmp_path], **options) == OTHER
        out = tmp_path / "out" / suffix
        assert outcome(at_build, [tmp_path], out, tokenizer, **options) == OTHER
        assert not (out / "plan.json").exists()


def test_equal_files_that_are_all_held_out(tmp_path, tokenizer):
    for number in range(6):
        (tmp_path / f"{number}.txt").write_text(TEXT)
    source = SourceOptions("local", [tmp_path / f"{number}.txt" for number in range(6)])
    for requested in (tokenizer, "train:300"):
        with refused("data.all_held_out", documents=6):
            build(tmp_path / f"data{len(requested)}", source, requested, Options(holdout=0.999), 1)
