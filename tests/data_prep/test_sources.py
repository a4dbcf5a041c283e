"""Sources: which files each selects, and in which order."""

import os
from pathlib import Path

import pytest

from data_prep import sources
from data_prep.readers import TOPICS
from data_prep.sources import Selection, select
from tests.support import refused

FINEWEB = "sample/100BT/{:03d}_{:05d}.parquet"


def make(root: Path, *paths: str) -> Path:
    for path in paths:
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text("1")
    return root


def paths(selection: Selection) -> list[str]:
    assert all((selection.root / known.path).stat().st_size == 1 for known in selection.inputs)
    return [known.path for known in selection.inputs]


def test_inputs_are_topics_then_sources_without_tests(tmp_path, monkeypatch):
    left_out = ["x/test/a.py", "x/tests/a.py", "idlelib/idle_test/a.py", "x/__pycache__/a.py"]
    left_out += ["site-packages/a.py", "d.txt"]
    make(tmp_path, "b10.py", "b9.py", TOPICS, "a/c.py", "x/testing.py", *left_out)
    monkeypatch.setattr(sources, "source_root", lambda source: tmp_path)
    assert paths(select("stdlib")) == [TOPICS, "a/c.py", "b9.py", "b10.py", "x/testing.py"]
    make(tmp_path / "y", "z.txt")
    monkeypatch.setattr(sources, "source_root", lambda source: tmp_path / "y")
    with refused("input.none"):
        select("stdlib")


def test_local_folders_and_files(tmp_path):
    a, b = tmp_path / "a", tmp_path / "b"
    make(a, "10.jsonl", "9.jsonl.zst", "deep/x.parquet", ".cache/y.jsonl", ".z.txt")
    make(a, "README.md", "data.csv")
    make(b, "x.txt", "w.jsonl.gz")
    selection = select("local", [a], text_field="body")
    assert paths(selection) == ["9.jsonl.zst", "10.jsonl", "deep/x.parquet"]
    assert (selection.root, selection.text_field, selection.version) == (a, "body", "files")
    both = select("local", [b / "x.txt", a])
    assert (both.root, both.text_field) == (tmp_path, "text")
    assert paths(both) == ["a/9.jsonl.zst", "a/10.jsonl", "a/deep/x.parquet", "b/x.txt"]


def test_links_are_followed_but_never_twice(tmp_path):
    blob = make(tmp_path, "blobs/1f") / "blobs" / "1f"
    folder = make(tmp_path / "data", "a.jsonl")
    (folder / "b.jsonl").symlink_to(blob)
    (folder / "more").symlink_to(make(tmp_path / "elsewhere", "c.jsonl"))
    assert paths(select("local", [folder])) == ["a.jsonl", "b.jsonl", "more/c.jsonl"]
    (folder / "loop").symlink_to(folder)
    with refused("input.given_twice", path=folder / "loop"):
        select("local", [folder])


def test_a_copy_is_the_same_from_any_of_its_folders(tmp_path):
    names = [FINEWEB.format(i, j) for i in (10, 9) for j in (1, 0)]
    mirror = make(tmp_path, "README.md", "sample/10BT/000_00000.parquet", *names)
    make(tmp_path, "data/CC-MAIN-2013-20/train-00000-of-00014.parquet")
    for folder in [mirror, mirror / "sample", mirror / "sample" / "100BT"]:
        selection = select("fineweb-edu", [folder])
        assert selection.root == mirror
        assert paths(selection) == sorted(names)
    assert (selection.version, selection.unit_files, selection.unit_bytes) == ("files", 1, None)
    assert (selection.text_field, selection.group_field) == ("text", "dump")
    some = select("fineweb-edu", [mirror / name for name in names[:2]])
    assert paths(some) == sorted(names[:2])
    elsewhere = make(tmp_path / "other", "000_00001.parquet", "000_00000.parquet", "notes.txt")
    assert paths(select("fineweb-edu", [elsewhere])) == ["000_00000.parquet", "000_00001.parquet"]


COMMIT, OTHER = "1" * 40, "2" * 40


def cache_with(root: Path, commit: str, **blobs: str) -> Path:
    """Make a snapshot as in huggingface_hub's cache; blobs maps number to hash."""
    dataset = root / "datasets--HuggingFaceFW--fineweb-edu"
    for number, blob in blobs.items():
        path = dataset / "snapshots" / commit / FINEWEB.format(0, int(number[1:]))
        path.parent.mkdir(parents=True, exist_ok=True)
        make(dataset, f"blobs/{blob}")
        path.symlink_to(Path(os.path.relpath(dataset / "blobs" / blob, path.parent)))
    return dataset / "snapshots" / commit


def test_commits_and_hashes_from_the_hubs_metadata(tmp_path):
    snapshot = cache_with(tmp_path, COMMIT, f0="a" * 64, f1="b" * 40)
    selection = select("fineweb-edu", [snapshot])
    assert (selection.version, selection.root) == (COMMIT, snapshot)
    assert [known.sha256 for known in selection.inputs] == ["a" * 64, ""]
    assert select("fineweb-edu", [snapshot], revision=COMMIT).version == COMMIT
    with refused("option.conflict", option="--revision"):
        select("fineweb-edu", [snapshot], revision=OTHER)

    local = make(tmp_path / "local", FINEWEB.format(0, 0), FINEWEB.format(0, 1))
    assert select("fineweb-edu", [local], revision=OTHER).version == OTHER

    def left(number: int, commit: str) -> None:
        name = f".cache/huggingface/download/{FINEWEB.format(0, number)}.metadata"
        path = make(local, name) / name
        path.write_text(f"{commit}\n{str(number) * 64}\n1718000000.5\n")

    left(0, COMMIT)
    left(1, COMMIT)
    selection = select("fineweb-edu", [local / "sample" / "100BT"])
    assert (selection.version, selection.root) == (COMMIT, local)
    assert [known.sha256 for known in selection.inputs] == ["0" * 64, "1" * 64]
    left(1, OTHER)
    assert select("fineweb-edu", [local]).version == "files"


@pytest.mark.parametrize(
    ("source", "files", "more", "code"),
    [
        ("pile", [], {}, "config.unknown_choice"),
        ("stdlib", ["a"], {}, "option.conflict"),
        ("local", ["a"], {"revision": "main"}, "option.conflict"),
        ("fineweb-edu", ["a"], {"text_field": "body"}, "option.conflict"),
        ("fineweb-edu", ["d"], {"revision": "main"}, "option.conflict"),
        ("local", [], {}, "option.missing"),
        ("local", ["c"], {}, "input.none"),
        ("local", ["a/y.csv"], {}, "input.unknown_format"),
        ("local", ["a", "a/x.jsonl"], {}, "input.given_twice"),
        ("slimpajama", ["a"], {}, "input.wrong_files"),
        ("fineweb-edu", ["two"], {}, "input.wrong_files"),
        # no folder is guessed: neither of these two samples is 100BT
        ("fineweb-edu", ["samples"], {}, "input.wrong_files"),
        ("fineweb-edu", ["m"], {}, "input.wrong_files"),
        ("fineweb-edu", ["d", "x.parquet"], {}, "input.wrong_files"),
    ],
)
def test_refusals(tmp_path, source, files, more, code):
    make(tmp_path, "a/x.jsonl", "a/y.csv", "b/z.csv", "x.parquet", "d/" + FINEWEB.format(0, 0))
    make(tmp_path / "two", FINEWEB.format(0, 0), "copy/" + FINEWEB.format(0, 0))
    make(tmp_path / "samples", "10BT/000_00000.parquet", "350BT/000_00000.parquet")
    make(tmp_path / "m", "sample/350BT/000_00000.parquet")
    with refused(code):
        select(source, [tmp_path / name for name in files], **more)
