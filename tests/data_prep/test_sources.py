"""Sources: which files each selects, in which order, and downloads from a fake hub.

The client is huggingface_hub in a new process, because it reads HF_ENDPOINT and HF_HOME at import.
"""

import hashlib
import os
import subprocess
import sys

import pytest

from data_prep import sources
from data_prep.readers import TOPICS
from data_prep.sources import HUB_SOURCES, SourceOptions
from tests.fake_hub import FakeHub
from tests.support import HANGS_AFTER_S, ROOT, refused

PATH = "sample/100BT/{:03d}_{:05d}.parquet"


def make(root, *paths):
    """Create files of one byte; return `root`."""
    for path in paths:
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text("1")
    return root


def select(source, files=(), **options):
    return sources.select(SourceOptions(source, files, **options))


def paths(selection):
    """Return the paths of a selection of files of `make`."""
    for source_input in selection.inputs:
        assert (selection.root / source_input.path).stat().st_size == 1
    return [source_input.path for source_input in selection.inputs]


def test_inputs_are_topics_then_sources_without_tests(tmp_path, monkeypatch):
    make(tmp_path, "b10.py", "b9.py", TOPICS, "a/c.py", "x/testing.py")
    make(tmp_path, "x/test/a.py", "x/tests/a.py", "idlelib/idle_test/a.py", "x/__pycache__/a.py")
    make(tmp_path, "site-packages/a.py", "d.txt")
    monkeypatch.setattr(sources, "stdlib_root", lambda: tmp_path)

    assert paths(select("stdlib")) == [TOPICS, "a/c.py", "b9.py", "b10.py", "x/testing.py"]


def test_a_library_without_sources_is_refused(tmp_path, monkeypatch):
    make(tmp_path, "z.txt")
    monkeypatch.setattr(sources, "stdlib_root", lambda: tmp_path)
    with refused("input.none"):
        select("stdlib")


def test_local_folders_and_files(tmp_path):
    a = make(tmp_path / "a", "10.jsonl", "9.jsonl.zst", "deep/x.parquet")
    make(a, ".cache/y.jsonl", ".z.txt", "README.md", "data.csv")
    b = make(tmp_path / "b", "x.txt", "w.jsonl.gz")

    folder = select("local", [a], text_field="body")
    assert paths(folder) == ["9.jsonl.zst", "10.jsonl", "deep/x.parquet"]
    assert (folder.root, folder.text_field, folder.version) == (a, "body", "files")

    file_and_folder = select("local", [b / "x.txt", a])
    assert (file_and_folder.root, file_and_folder.text_field) == (tmp_path, "text")
    in_order = ["a/9.jsonl.zst", "a/10.jsonl", "a/deep/x.parquet", "b/x.txt"]
    assert paths(file_and_folder) == in_order


def test_links_are_followed_but_never_twice(tmp_path, capsys):
    blob = make(tmp_path, "blobs/1f") / "blobs" / "1f"
    folder = make(tmp_path / "data", "a.jsonl")
    (folder / "b.jsonl").symlink_to(blob)
    (folder / "more").symlink_to(make(tmp_path / "elsewhere", "c.jsonl"))
    assert paths(select("local", [folder])) == ["a.jsonl", "b.jsonl", "more/c.jsonl"]

    # a link to nothing is skipped
    (folder / "gone.jsonl").symlink_to(tmp_path / "nowhere")
    assert paths(select("local", [folder])) == ["a.jsonl", "b.jsonl", "more/c.jsonl"]
    assert capsys.readouterr().out.count("gone.jsonl") == 1

    # a circle is refused
    (folder / "loop").symlink_to(folder)
    with refused("input.given_twice", path=folder / "loop") as caught:
        select("local", [folder], files_option="--data")
    assert "--data" in str(caught.value)
    assert "--files" not in str(caught.value)


def test_a_copy_is_the_same_from_any_of_its_folders(tmp_path):
    names = [PATH.format(i, j) for i in (10, 9) for j in (1, 0)]
    mirror = make(tmp_path, "README.md", "sample/10BT/000_00000.parquet", *names)
    make(tmp_path, "data/CC-MAIN-2013-20/train-00000-of-00014.parquet")

    for folder in [mirror, mirror / "sample", mirror / "sample" / "100BT"]:
        selection = select("fineweb-edu", [folder])
        assert selection.root == mirror
        assert paths(selection) == sorted(names)
    assert (selection.version, selection.unit_files, selection.unit_bytes) == ("files", 1, None)
    assert (selection.text_field, selection.group_field) == ("text", "dump")

    some_files = select("fineweb-edu", [mirror / name for name in names[:2]])
    assert paths(some_files) == sorted(names[:2])

    # in a folder of any name
    elsewhere = make(tmp_path / "other", "000_00001.parquet", "000_00000.parquet", "notes.txt")
    assert paths(select("fineweb-edu", [elsewhere])) == ["000_00000.parquet", "000_00001.parquet"]


STORIES = [f"data/train-0000{i}-of-00004-{i}d5a1467fff1081b.parquet" for i in range(4)]
STORIES_OF_VALIDATION = "data/validation-00000-of-00001-869c898b519ad725.parquet"


def test_tiny_stories_are_four_files_and_one_of_validation(tmp_path):
    mirror = make(tmp_path, "README.md", "TinyStories-train.txt", STORIES_OF_VALIDATION, *STORIES)
    make(tmp_path, "default/train/0000.parquet")

    for folder in (mirror, mirror / "data"):
        stories = select("tinystories", [folder])
        assert paths(stories) == STORIES
        assert (stories.text_field, stories.group_field, stories.unit_files) == ("text", None, 1)
        assert paths(select("tinystories-validation", [folder])) == [STORIES_OF_VALIDATION]
    with refused("input.wrong_files"):
        select("tinystories", [mirror / "default"])


COMMIT = "1" * 40
OTHER = "2" * 40


def test_the_cache_of_the_hub_has_the_commit_and_hashes(tmp_path):
    dataset = tmp_path / "datasets--HuggingFaceFW--fineweb-edu"
    snapshot = dataset / "snapshots" / COMMIT
    # the name of a large file's blob is its SHA-256
    for number, blob in enumerate(("a" * 64, "b" * 40)):
        make(dataset, f"blobs/{blob}")
        path = snapshot / PATH.format(0, number)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.symlink_to(os.path.relpath(dataset / "blobs" / blob, path.parent))

    selection = select("fineweb-edu", [snapshot])

    assert (selection.version, selection.root) == (COMMIT, snapshot)
    assert [source_input.sha256 for source_input in selection.inputs] == ["a" * 64, ""]
    assert select("fineweb-edu", [snapshot], revision=COMMIT).version == COMMIT
    with refused("option.conflict", option="--revision"):
        select("fineweb-edu", [snapshot], revision=OTHER)


def write_metadata(folder, number, commit):
    """Write what a download to a local folder leaves: the commit and hash of a file."""
    name = f".cache/huggingface/download/{PATH.format(0, number)}.metadata"
    path = make(folder, name) / name
    path.write_text(f"{commit}\n{str(number) * 64}\n1718000000.5\n")


def test_downloads_to_a_folder_have_the_commit_and_hashes(tmp_path):
    folder = make(tmp_path, PATH.format(0, 0), PATH.format(0, 1))
    assert select("fineweb-edu", [folder], revision=OTHER).version == OTHER

    write_metadata(folder, 0, COMMIT)
    write_metadata(folder, 1, COMMIT)
    selection = select("fineweb-edu", [folder / "sample" / "100BT"])
    assert (selection.version, selection.root) == (COMMIT, folder)
    assert [source_input.sha256 for source_input in selection.inputs] == ["0" * 64, "1" * 64]

    # of two commits
    write_metadata(folder, 1, OTHER)
    assert select("fineweb-edu", [folder]).version == "files"


@pytest.mark.parametrize(
    ("code", "source", "files", "options"),
    [
        ("config.unknown_choice", "pile", [], {}),
        ("option.conflict", "stdlib", ["a"], {}),
        ("option.conflict", "local", ["a"], {"revision": "main"}),
        ("option.conflict", "fineweb-edu", ["a"], {"text_field": "body"}),
        ("option.conflict", "fineweb-edu", ["d"], {"revision": "main"}),
        ("option.missing", "local", [], {}),
        ("input.none", "local", ["c"], {}),
        ("input.unknown_format", "local", ["a/y.csv"], {}),
        ("input.given_twice", "local", ["a", "a/x.jsonl"], {}),
        ("input.wrong_files", "slimpajama", ["a"], {}),
        # no folder is guessed: neither of the two samples is 100BT
        ("input.wrong_files", "fineweb-edu", ["two"], {}),
        ("input.wrong_files", "fineweb-edu", ["samples"], {}),
        ("input.wrong_files", "fineweb-edu", ["m"], {}),
        ("input.wrong_files", "fineweb-edu", ["d", "x.parquet"], {}),
    ],
)
def test_refusals(tmp_path, code, source, files, options):
    make(tmp_path, "a/x.jsonl", "a/y.csv", "b/z.csv", "x.parquet", "d/" + PATH.format(0, 0))
    make(tmp_path / "two", PATH.format(0, 0), "copy/" + PATH.format(0, 0))
    make(tmp_path / "samples", "10BT/000_00000.parquet", "350BT/000_00000.parquet")
    make(tmp_path / "m", "sample/350BT/000_00000.parquet")

    with refused(code):
        select(source, [tmp_path / name for name in files], **options)


# ---- the hub

FINEWEB = HUB_SOURCES["fineweb-edu"]
MOVED = "9" * 40
FOLDER = "sample/100BT"
NAMES = [f"{FOLDER}/{stem}.parquet" for stem in ("002_00000", "002_00001", "010_00000")]


@pytest.fixture
def files():
    """Return the files of the dataset by name."""
    files = {name: f"content of {name} ".encode() * 4000 for name in reversed(NAMES)}
    files[f"{FOLDER}/README.md"] = b"not of the pattern"
    files["x.parquet"] = b"elsewhere"
    return files


@pytest.fixture
def hub(files):
    with FakeHub({FINEWEB.repo: {FINEWEB.commit: files, MOVED: files}}) as server:
        server.page_files = 3
        yield server
        server.shutdown()


SCRIPT = """
import sys
from canon_pretrain.core.errors import UserError
from data_prep.readers import InputReader
from data_prep.sources import SourceOptions, fetch, select
for step in sys.argv[1:]:
    try:
        exec(step)
    except UserError as error:
        print(type(error).__name__, error.code, error)
"""
SELECT = "s = select(SourceOptions('fineweb-edu'{})); print(s.version, len(s.inputs), s.root)"
FETCH = "fetch(s.source, s.version, s.root, s.inputs[{}])"
READ = "list(InputReader(s.root, s.inputs[0], s.text_field, s.group_field).rows())"


def run(home, endpoint, *steps, **variables):
    """Run the steps in a new process, with a hub and a home of its own; return its lines."""
    inherited = {
        name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGING"))
    }
    hub_variables = {
        "HF_ENDPOINT": endpoint,
        "HF_HOME": str(home),
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
    }
    result = subprocess.run(
        [sys.executable, "-W", "error::ResourceWarning", "-c", SCRIPT, *steps],
        env=inherited | hub_variables | variables,
        capture_output=True,
        text=True,
        timeout=HANGS_AFTER_S,
        cwd=ROOT,
    )
    assert result.returncode == 0, result.stderr
    assert "Traceback" not in result.stderr, result.stderr
    return result.stdout.splitlines()


@pytest.mark.system
def test_listing_and_download(hub, files, tmp_path):
    root = tmp_path / f"hub/datasets--HuggingFaceFW--fineweb-edu/snapshots/{FINEWEB.commit}"
    expected = []
    for name in NAMES:
        sha256 = hashlib.sha256(files[name]).hexdigest()
        expected.append(f"Input(path='{name}', size={len(files[name])}, sha256='{sha256}')")

    # the listing names all files, and downloads none
    listing = run(tmp_path, hub.url, SELECT.format(""), "print(*s.inputs, sep='\\n')")
    assert f"{FINEWEB.commit} 3 {root}" in listing
    assert listing[-3:] == expected
    assert len(hub.take_asked("/tree/")) == 2  # pages
    assert not list(root.glob("**/*.parquet"))

    # the listing is saved, and only missing files are downloaded
    run(tmp_path, hub.url, SELECT.format(""), FETCH.format("1:3"))
    requests = hub.take_asked("")
    assert len(requests) == 2
    assert all("/resolve/" in line for line in requests)
    assert all((root / name).read_bytes() == files[name] for name in NAMES[1:3])

    # without a network, only a missing file is an error
    steps = [SELECT.format(""), FETCH.format("1:3"), FETCH.format(":")]
    out = run(tmp_path, "http://127.0.0.1:1", *steps, HF_HUB_OFFLINE="1")
    assert out[-1].startswith(f"HubUnavailable hub.unavailable {FINEWEB.repo}@")

    # wrong bytes are an error when they are read
    hub.wrong.add(NAMES[0])
    out = run(tmp_path, hub.url, SELECT.format(""), FETCH.format(":1"), READ)
    assert out[-1].startswith("UserError input.changed ")
    assert NAMES[0] in out[-1]

    # the cache passed as a copy has the same inputs
    (root / NAMES[0]).unlink()
    mirror = select("fineweb-edu", [root])
    assert (mirror.version, mirror.root) == (FINEWEB.commit, root)
    assert [str(source_input) for source_input in mirror.inputs] == expected[1:3]


@pytest.mark.system
def test_tiny_stories_are_those_of_the_pinned_commit(tmp_path):
    """Each of the two sources lists and downloads its own files of the dataset's folder."""
    source = HUB_SOURCES["tinystories"]
    files = {name: name.encode() for name in (*STORIES, STORIES_OF_VALIDATION, "data/x.txt")}
    root = tmp_path / f"hub/datasets--roneneldan--TinyStories/snapshots/{source.commit}"
    with FakeHub({source.repo: {source.commit: files, MOVED: {}}}) as server:
        for name, expected in (
            ("tinystories", STORIES),
            ("tinystories-validation", [STORIES_OF_VALIDATION]),
        ):
            step = f"s = select(SourceOptions('{name}')); print(*[i.path for i in s.inputs])"
            assert " ".join(expected) in run(tmp_path, server.url, step, FETCH.format(":"))
        server.shutdown()
    for name in (*STORIES, STORIES_OF_VALIDATION):
        assert (root / name).read_bytes() == files[name]
    assert not (root / "data/x.txt").exists()


@pytest.mark.system
def test_hub_refusals(hub, tmp_path):
    hub.refusals = {"1" * 40: 401, "3" * 40: 403}
    steps = [
        SELECT.format(f", revision='{revision}'") for revision in (*hub.refusals, "main", "typo")
    ]
    fill_disk = "from canon_pretrain.data import hub; hub.free_bytes = lambda path: 9"

    out = run(tmp_path, hub.url, *steps, SELECT.format(""), fill_disk, FETCH.format(":1"))

    # a branch is resolved once
    assert any(line.startswith(f"{MOVED} 3 {tmp_path}") for line in out)
    errors = [line.split()[:3] for line in out if line.startswith(("UserError", "Hub"))]
    assert errors[:3] == [
        ["UserError", "hub.no_access", f"{FINEWEB.repo}@{'1' * 12}:"],
        ["UserError", "hub.no_access", f"{FINEWEB.repo}@{'3' * 12}:"],
        ["UserError", "hub.not_found", f"{FINEWEB.repo}@typo:"],
    ]
    # the free space is checked before the download
    assert errors[3][:2] == ["HubUnavailable", "disk.full"]
    assert not hub.take_asked()
