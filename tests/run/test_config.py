"""Experiment files: `extends`, unknown keys and wrong types."""

import datetime
import os
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
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


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_extends_merges_keys_and_later_files_win(tmp_path):
    write(tmp_path, "base/size.toml", "[training]\nsteps = 1\nlr = 0.5\n")
    write(tmp_path, "base/data.toml", "[data]\npath = 'x'\n[training]\nsteps = 2\n")
    write(tmp_path, "mid.toml", 'extends = ["base/size.toml", "base/data.toml"]\n')
    top = write(tmp_path, "top.toml", 'extends = "mid.toml"\n[training]\nname = "n"\n')
    assert read_experiment(top) == {
        "training": {"steps": 2, "lr": 0.5, "name": "n"},
        "data": {"path": "x"},
    }


@pytest.mark.parametrize(
    ("text", "code", "name"),
    [
        ('extends = "gone.toml"', "config.unreadable", "gone.toml"),
        ('extends = "."', "config.unreadable", ""),
        ('extends = "top.toml"', "config.extends_loop", "top.toml"),
        ("extends = 3", "config.type", None),
        ("[training\n", "config.toml", "top.toml"),
        ("deep = " + "[" * 100_000, "config.toml", "top.toml"),
    ],
)
def test_unreadable_files_are_named(tmp_path, text, code, name):
    path = {"key": "extends"} if name is None else {"path": tmp_path / name}
    with refused(code, **path):
        read_experiment(write(tmp_path, "top.toml", text))


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


@pytest.mark.parametrize("content", [b'a = "\xe9"', b"#" * 2**21, None])
def test_odd_config_files_are_refused(tmp_path, content):
    """Issue 17, items 23 and 25: other encodings, large files, FIFOs."""
    path = tmp_path / "odd.toml"
    os.mkfifo(path) if content is None else path.write_bytes(content)
    with refused("config.toml" if content == b'a = "\xe9"' else "config.unreadable", path=path):
        read_experiment(path)


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
