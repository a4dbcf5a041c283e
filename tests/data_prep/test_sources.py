"""Sources: what each selects, in which order, and how stdlib's files become rows."""

import os
from pathlib import Path

import pytest

from canon_pretrain.core.errors import UserError
from data_prep import sources
from data_prep.readers import TOPICS
from data_prep.sources import Selection, select

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
    with pytest.raises(UserError, match="no .py sources"):
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
    with pytest.raises(UserError, match="loop was reached before"):
        select("local", [folder])


def test_a_mirror_is_the_same_wherever_it_is_named(tmp_path, capsys):
    names = [FINEWEB.format(i, j) for i in (10, 9) for j in (1, 0)]
    mirror = make(tmp_path, "README.md", "sample/10BT/000_00000.parquet", *names)
    make(tmp_path, "data/CC-MAIN-2013-20/train-00000-of-00014.parquet")
    for folder in [mirror, mirror / "sample", mirror / "sample" / "100BT"]:
        selection = select("fineweb-edu", [folder])
        assert selection.root == mirror
        assert paths(selection) == sorted(names)
    assert "fineweb-edu: 4 files, the whole dataset has 140" in capsys.readouterr().out
    assert (selection.version, selection.unit_files, selection.unit_bytes) == ("files", 1, None)
    assert (selection.text_field, selection.group_field) == ("text", "dump")
    some = select("fineweb-edu", [mirror / name for name in names[:2]])
    assert paths(some) == sorted(names[:2])
    elsewhere = make(tmp_path / "other", "000_00001.parquet", "000_00000.parquet", "notes.txt")
    assert paths(select("fineweb-edu", [elsewhere])) == ["000_00000.parquet", "000_00001.parquet"]


COMMIT, OTHER = "1" * 40, "2" * 40


def cache_with(root: Path, commit: str, **blobs: str) -> Path:
    """A snapshot as huggingface_hub's cache holds it; blobs maps number to hash."""
    dataset = root / "datasets--HuggingFaceFW--fineweb-edu"
    for number, blob in blobs.items():
        path = dataset / "snapshots" / commit / FINEWEB.format(0, int(number[1:]))
        path.parent.mkdir(parents=True, exist_ok=True)
        make(dataset, f"blobs/{blob}")
        path.symlink_to(Path(os.path.relpath(dataset / "blobs" / blob, path.parent)))
    return dataset / "snapshots" / commit


def test_hashes_that_the_hub_left_behind(tmp_path):
    snapshot = cache_with(tmp_path, COMMIT, f0="a" * 64, f1="b" * 40)
    selection = select("fineweb-edu", [snapshot])
    assert (selection.version, selection.root) == (COMMIT, snapshot)
    assert [known.sha256 for known in selection.inputs] == ["a" * 64, ""]
    assert select("fineweb-edu", [snapshot], revision=COMMIT).version == COMMIT
    with pytest.raises(UserError, match=f"were fetched at commit {COMMIT}"):
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
    ("source", "files", "more", "message"),
    [
        ("pile", [], {}, '"pile" is not known; expected one of stdlib, fineweb-edu'),
        ("stdlib", ["a"], {}, "--files with --source stdlib"),
        ("local", ["a"], {"revision": "main"}, "--revision with --source local"),
        ("fineweb-edu", ["a"], {"text_field": "body"}, "--text-field with --source fineweb-edu"),
        ("local", [], {}, "needs --files FILE_OR_FOLDER"),
        ("local", ["c"], {}, "--files .*/c: no file or folder"),
        ("local", ["a/y.csv"], {}, r"y\.csv: no file of a known format"),
        ("local", ["a", "a/x.jsonl"], {}, r"x\.jsonl is already given by"),
        ("local", ["loop"], {}, "loop/a was reached before"),
        ("slimpajama", ["a"], {}, "no files train/chunk.* of slimpajama"),
        ("fineweb-edu", ["two"], {}, "several folders hold"),
        # no folder is ever guessed: of two samples, neither is the one of 100BT
        ("fineweb-edu", ["samples"], {}, "several folders hold"),
        ("fineweb-edu", ["m"], {}, "this is 350BT by its name, fineweb-edu is 100BT"),
        ("fineweb-edu", ["d", "x.parquet"], {}, r"x\.parquet: no files sample/100BT/"),
        ("fineweb-edu", ["d"], {"revision": "main"}, "a copy on disk has no branches"),
    ],
)
def test_refusals(tmp_path, source, files, more, message):
    make(tmp_path, "a/x.jsonl", "a/y.csv", "b/z.csv", "x.parquet", "d/" + FINEWEB.format(0, 0))
    make(tmp_path / "two", FINEWEB.format(0, 0), "copy/" + FINEWEB.format(0, 0))
    make(tmp_path / "samples", "10BT/000_00000.parquet", "350BT/000_00000.parquet")
    make(tmp_path / "m", "sample/350BT/000_00000.parquet")
    (make(tmp_path / "loop", "x.jsonl") / "a").symlink_to(tmp_path / "loop")
    with pytest.raises(UserError, match=message):
        select(source, [tmp_path / name for name in files], **more)
