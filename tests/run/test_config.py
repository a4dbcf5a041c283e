"""Experiment files: `extends`, and errors that name the key and the way out."""

import datetime
import os
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from canon_pretrain.core.errors import UserError
from canon_pretrain.run.config import build, read_experiment, to_toml


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


def test_extends_merges_key_by_key_and_the_later_file_wins(tmp_path):
    write(tmp_path, "base/size.toml", "[training]\nsteps = 1\nlr = 0.5\n")
    write(tmp_path, "base/data.toml", "[data]\npath = 'x'\n[training]\nsteps = 2\n")
    write(tmp_path, "mid.toml", 'extends = ["base/size.toml", "base/data.toml"]\n')
    top = write(tmp_path, "top.toml", 'extends = "mid.toml"\n[training]\nname = "n"\n')
    assert read_experiment(top) == {
        "training": {"steps": 2, "lr": 0.5, "name": "n"},
        "data": {"path": "x"},
    }


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('extends = "gone.toml"', r"gone\.toml is missing \(named by `extends` in .*top\.toml"),
        ('extends = "."', "cannot be read: Is a directory"),
        ('extends = "top.toml"', r"circle.*top\.toml -> .*top\.toml"),
        ("extends = 3", "`extends` must be a path or a list of paths, not 3"),
        ("[training\n", r"top\.toml is not valid TOML"),
    ],
)
def test_files_that_cannot_be_read(tmp_path, text, message):
    with pytest.raises(UserError, match=message):
        read_experiment(write(tmp_path, "top.toml", text))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"trainin": {}}, "unknown section 'trainin': did you mean 'training'"),
        ({"training": {"step": 1}}, r"unknown key 'training\.step': did you mean 'steps'"),
        ({"training": {"zzz": 1}}, r"'training\.zzz': known are: kind, on, parts, steps"),
        ({"training": 3}, r"'training' is a section, written \[training\]"),
        ({"training": {"steps": "5"}}, "'training.steps' = '5': "),
        ({"training": {"steps": True}}, "= True: .* valid integer"),
        ({"training": {"on": 1}}, "valid boolean"),
        ({"training": {"kind": "c"}}, "'a' or 'b'"),
        ({"training": {"parts": [1]}}, "valid string"),
    ],
)
def test_wrong_keys_and_types_are_refused(values, message):
    with pytest.raises(UserError, match=f"^f.toml: .*{message}"):
        build(Outer, values, source="f.toml")


ODD = {"deep": b"a = " + b"[" * 100_000, "latin-1": b'a = "\xe9"', "large": b"#" * 2**21}


@pytest.mark.parametrize("kind", [*ODD, "fifo"])
def test_an_odd_config_is_one_message(tmp_path, kind):
    """Issue 17, items 23 and 25: nested-list bombs, other encodings, FIFOs."""
    path = tmp_path / "odd.toml"
    os.mkfifo(path) if kind == "fifo" else path.write_bytes(ODD[kind])
    with pytest.raises(UserError, match=r"odd\.toml"):
        read_experiment(path)


NAMES = st.text(st.characters(exclude_categories=["Cs"]), max_size=6)
VALUES = st.recursive(
    st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False) | NAMES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=100, deadline=None)
@given(st.dictionaries(NAMES, VALUES, max_size=4))
def test_what_was_read_can_be_written(values):
    assert tomllib.loads(to_toml(values)) == values
    assert tomllib.loads(to_toml({"day": (day := datetime.date(2026, 1, 2))})) == {"day": day}
