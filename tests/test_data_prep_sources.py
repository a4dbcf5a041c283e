"""The source stdlib: order, decoding, and what is left out or skipped."""

import codecs
import os
import pydoc_data.topics
from pathlib import Path

import pytest

from canon_pretrain.errors import UserError
from data_prep.sources import (
    TOPICS,
    Document,
    Skipped,
    list_inputs,
    natural_key,
    read_documents,
    source_root,
)


def test_natural_order() -> None:
    paths = ["chunk10/a", "chunk2/b", "chunk2/a10", "chunk2/a9", "Z", "7"]
    assert sorted(paths, key=natural_key) == [
        "7", "Z", "chunk2/a9", "chunk2/a10", "chunk2/b", "chunk10/a",
    ]  # fmt: skip


def test_inputs_are_topics_then_sources_without_tests(tmp_path: Path) -> None:
    left_out = ["x/test/a.py", "x/tests/a.py", "idlelib/idle_test/a.py", "x/__pycache__/a.py"]
    left_out += ["site-packages/a.py", "d.txt"]
    for path in ["b10.py", "b9.py", TOPICS, "a/c.py", "x/testing.py", *left_out]:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text("1")
    assert list_inputs(tmp_path) == [TOPICS, "a/c.py", "b9.py", "b10.py", "x/testing.py"]


def test_the_running_python_has_topics_and_sources() -> None:
    root = source_root("stdlib")
    inputs = list_inputs(root)
    assert inputs[0] == TOPICS and {"os.py", "json/decoder.py"} <= set(inputs)
    assert 8e6 < sum(os.path.getsize(root / path) for path in inputs) < 3e7
    documents = list(read_documents(TOPICS, (root / TOPICS).read_bytes()))
    topics = pydoc_data.topics.topics
    assert documents == [Document(topics[key], topics[key].encode()) for key in sorted(topics)]


def test_decoding() -> None:
    def only(content: bytes) -> Document | Skipped:
        (row,) = read_documents("a.py", content)
        return row

    assert only("é\r\n".encode()) == Document("é\r\n", "é\r\n".encode())
    latin = "# coding: latin-1\né"
    assert only(latin.encode("latin-1")) == Document(latin, latin.encode())
    assert only(codecs.BOM_UTF8 + b"x") == Document("x", b"x")
    for broken in [b"\xff\xfe", b"# coding: klingon\n", b"# ok\n# ok\n\n\xff"]:
        assert only(broken) == Skipped("undecodable")
    assert only(b"") == Skipped("empty")


def test_topics_that_are_no_documents() -> None:
    rows = list(read_documents(TOPICS, b"topics = {'b': '', 'a': '\\ud800', 'c': 'x'}"))
    assert rows == [Skipped("lone surrogate"), Skipped("empty"), Document("x", b"x")]
    with pytest.raises(UserError, match="no dict of topics"):
        list(read_documents(TOPICS, b"x = 1"))


def test_errors(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="'pile' is unknown; expected one of: stdlib"):
        source_root("pile")
    with pytest.raises(UserError, match="no .py sources"):
        list_inputs(tmp_path)
