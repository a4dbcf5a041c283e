"""Experiment files: `extends`, unknown keys and wrong types."""

import datetime
import os
import tomllib
from dataclasses import dataclass, field
from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from canon_pretrain.run.config import build, read_experiment, to_toml
from tests.support import refused


@dataclass
class Inner:
    steps: int = 1
    kind: Literal["a", "b"] = "a"
    parts: list[str] = field(default_factory=list)
    on: bool = False


@dataclass
class Outer:
    training: Inner = field(default_factory=Inner)


def test_extends_merges_keys_and_later_files_win(tmp_path):
    base, top = tmp_path / "base", tmp_path / "top.toml"
    base.mkdir()
    (base / "size.toml").write_text("[training]\nsteps = 1\nlr = 0.5\n")
    (base / "data.toml").write_text("[data]\npath = 'x'\n[training]\nsteps = 2\n")
    (base / "mid.toml").write_text('extends = ["size.toml", "data.toml"]\n')
    top.write_text('extends = "base/mid.toml"\n[training]\nname = "n"\n')
    assert read_experiment(top) == {
        "training": {"steps": 2, "lr": 0.5, "name": "n"},
        "data": {"path": "x"},
    }


@pytest.mark.parametrize(
    ("content", "code", "name"),
    [
        (b'extends = "gone.toml"', "config.unreadable", "gone.toml"),
        (b'extends = "."', "config.unreadable", ""),
        (b'extends = "top.toml"', "config.extends_loop", "top.toml"),
        (b"extends = 3", "config.type", None),
        (b"[training\n", "config.toml", "top.toml"),
        (b"deep = " + b"[" * 100_000, "config.toml", "top.toml"),
        (b'a = "\xe9"', "config.toml", "top.toml"),
        (b"#" * 2**21, "config.unreadable", "top.toml"),
        (os.mkfifo, "config.unreadable", "top.toml"),
    ],
)
def test_unreadable_files_are_named(tmp_path, content, code, name):
    """Issue 17, items 23 and 25: also other encodings, large files, FIFOs."""
    path, fields = tmp_path / "top.toml", {"path": tmp_path / (name or "")}
    content(path) if callable(content) else path.write_bytes(content)
    with refused(code, **({"key": "extends"} if name is None else fields)):
        read_experiment(path)


@pytest.mark.parametrize(
    ("values", "code", "fields"),
    [
        ({"trainin": {}}, "unknown_key", {"key": "trainin", "nearest": "training"}),
        ({"training": {"step": 1}}, "unknown_key", {"key": "training.step", "nearest": "steps"}),
        ({"training": {"zzz": 1}}, "unknown_key", {"key": "training.zzz", "nearest": None}),
        ({"training": 3}, "type", {"key": "training"}),
        ({"training": {"steps": "5"}}, "type", {"key": "training.steps"}),
        ({"training": {"steps": True}}, "type", {"key": "training.steps"}),
        ({"training": {"on": 1}}, "type", {"key": "training.on"}),
        ({"training": {"kind": "c"}}, "type", {"key": "training.kind"}),
        ({"training": {"parts": [1]}}, "type", {"key": "training.parts"}),
    ],
)
def test_wrong_keys_and_types_are_refused(values, code, fields):
    with refused(f"config.{code}", **fields):
        build(Outer, values, source="f.toml")


NAMES = st.text(st.characters(exclude_categories=["Cs"]), max_size=6)
VALUES = st.recursive(
    st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False) | NAMES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=100, deadline=None)
@given(st.dictionaries(NAMES, VALUES, max_size=4))
def test_written_toml_is_read_back(values):
    assert tomllib.loads(to_toml(values)) == values
    assert tomllib.loads(to_toml({"day": (day := datetime.date(2026, 1, 2))})) == {"day": day}
