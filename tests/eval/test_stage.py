"""`eval stage` against a local hub, with the real `datasets` and huggingface_hub clients."""

import json
import re
import signal
from contextlib import closing
from typing import Any

import pytest

from eval import stage
from eval.staged import CATALOGUE, REVISIONS, load_staged
from tests.checkpoint_folders import fill, small_disk
from tests.eval_fixtures import fixture, rows_of
from tests.fake_hub import Client, FakeHub, dataset_files
from tests.support import HANGS_AFTER_S, refused

pytestmark = pytest.mark.system

OLD = "a" * 40
NEW = "b" * 40
COUNTS = {key: len(rows_of(key)) for key in CATALOGUE}


def codes(out):
    """Return the codes of the errors in an output, also in the middle of a line."""
    return re.findall(r"error\[([\w.]+)\]", out)


@pytest.fixture(scope="module")
def module_hub():
    """The catalogue's repositories with the fixtures at the pinned commit, or OLD."""
    splits: dict[str, dict[Any, Any]] = {}
    for key, data in CATALOGUE.items():
        splits.setdefault(data.path, {})[data.config or "default", data.split] = fixture(key)
    repos = {
        path: {REVISIONS.get(path, OLD): dataset_files(of_repo)} for path, of_repo in splits.items()
    }
    with FakeHub(repos) as hub:
        yield hub
        hub.shutdown()


@pytest.fixture
def hub(module_hub):
    """The hub in its first state; the clients' cache may have files of it."""
    module_hub.take_asked()
    repos = {path: dict(commits) for path, commits in module_hub.repos.items()}
    yield module_hub
    module_hub.released.set()
    module_hub.repos = repos
    module_hub.status = 0
    module_hub.stalled = ""
    module_hub.released.clear()
    module_hub.waiting.clear()


@pytest.fixture(scope="module")
def client(module_hub, tmp_path_factory):
    """A client of the hub."""
    with closing(Client(module_hub.url, tmp_path_factory.mktemp("home"))) as client:
        yield client


def test_all_suites_are_downloaded_once(hub, client, tmp_path):
    out = client.run("--to", tmp_path, counts=COUNTS)

    assert "35 of 35" in out
    assert not codes(out)
    for key, data in CATALOGUE.items():
        loaded = load_staged(key, tmp_path)
        manifest = json.loads((tmp_path / key / "manifest.json").read_text())
        assert loaded.to_list() == rows_of(key)
        assert loaded.features == fixture(key).features
        assert manifest["revision"] == REVISIONS.get(data.path, OLD)
    unpinned = {data.path for data in CATALOGUE.values()} - set(REVISIONS)
    assert len(unpinned) == 7
    pins = json.loads((tmp_path / "pins.json").read_text())
    assert pins == dict.fromkeys(unpinned, OLD)
    assert {path.name for path in tmp_path.iterdir()} == {*CATALOGUE, "pins.json", ".stage.lock"}

    # the hub is not needed again
    hub.take_asked()
    hub.status = 500
    assert client.run("--to", tmp_path, counts=COUNTS).count("is staged, ") == 35
    assert not hub.asked
    assert "35 of 35" in client.run("--to", tmp_path, "--check")


FDA = ("--suite", "jrt", "--only", "jrt_fda", "--to")


def test_commits_are_kept_and_chosen(hub, client, tmp_path):
    path = CATALOGUE["jrt_fda"].path
    here = tmp_path / "here"
    there = tmp_path / "there"
    client.run(*FDA, here, counts=COUNTS)
    # the hub has new commits
    five_rows = fixture("jrt_fda").select(range(5))
    hub.repos[path][NEW] = dataset_files({("default", "validation"): five_rows})

    # equal pins give equal rows
    there.mkdir()
    (there / "pins.json").write_bytes((here / "pins.json").read_bytes())
    client.run(*FDA, there, counts=COUNTS)
    assert load_staged("jrt_fda", there).to_list() == rows_of("jrt_fda")

    # a chosen commit replaces them, if its number of rows is allowed
    out = client.run(*FDA, there, "--pin", f"jrt_fda={NEW}", counts=COUNTS)
    assert codes(out) == ["stage.documents", "stage.incomplete"]
    assert len(load_staged("jrt_fda", there)) == COUNTS["jrt_fda"]
    assert not codes(client.run(*FDA, there, "--allow_count", counts=COUNTS))
    assert len(load_staged("jrt_fda", there)) == 5

    # a folder without its pins keeps its commits
    (here / "pins.json").unlink()
    assert "is staged" in client.run(*FDA, here, counts=COUNTS)
    assert json.loads((here / "pins.json").read_text()) == {path: OLD}


def test_a_commit_without_a_column_is_refused(hub, client, tmp_path):
    lacking = {("default", "validation"): fixture("piqa").remove_columns("sol2")}
    hub.repos["baber/piqa"] = {NEW: dataset_files(lacking)}

    out = client.run("--only", "piqa", "--to", tmp_path, "--pin", f"piqa={NEW}", counts=COUNTS)

    assert codes(out) == ["stage.columns", "stage.incomplete"]
    assert not (tmp_path / "piqa").exists()


def test_a_killed_download_is_resumed(hub, client, tmp_path):
    words = ("--only", "arc_easy", "social_iqa", "wikitext", "--to", tmp_path / "out")
    downloads = tmp_path / "out" / stage.DOWNLOADS
    hub.stalled = "default/validation-00000-of-00001.parquet"  # Social IQa's
    with closing(Client(hub.url, tmp_path / "home")) as killed:
        killed.start(*words, counts=COUNTS)
        assert hub.waiting.wait(HANGS_AFTER_S)
        killed.process.send_signal(signal.SIGKILL)
        assert "[1/3] arc_easy: 12 documents" in killed.output()
    assert downloads.exists()

    check = client.run(*words, "--check", counts=COUNTS)
    assert "arc_easy: 12 documents" in check
    assert codes(check) == ["stage.missing", "stage.missing", "stage.incomplete"]

    hub.released.set()
    hub.take_asked()
    out = client.run(*words, counts=COUNTS)
    assert "arc_easy: is staged" in out
    assert "3 of 3" in out
    assert not [line for line in hub.take_asked() if "ai2_arc" in line]
    assert not downloads.exists()


def test_two_at_once_wait_for_each_other(hub, client, tmp_path):
    words = ("--only", "piqa", "lambada_openai", "--to", tmp_path / "out")
    hub.stalled = "default/validation-00000-of-00001.parquet"  # PIQA's
    with closing(Client(hub.url, tmp_path / "home")) as first:
        first.start(*words, counts=COUNTS)
        assert hub.waiting.wait(HANGS_AFTER_S)
        client.start(*words, counts=COUNTS)
        assert client.output("waiting").startswith("waiting")
        hub.released.set()
        assert "2 of 2" in first.output()
        assert client.output().count("is staged, ") == 2


def test_a_full_disk(hub, client, tmp_path):
    words = ("--only", "winogrande", "piqa", "--to", tmp_path / "disk")
    with small_disk(tmp_path / "disk", "size=400k") as folder:
        client.run("--only", "winogrande", "--to", folder, counts=COUNTS)
        filler = fill(folder)
        assert codes(client.run(*words, counts=COUNTS)) == ["disk.full"]
        assert len(load_staged("winogrande", folder)) == 12
        with refused("stage.missing"):
            load_staged("piqa", folder)
        filler.unlink()
        assert "2 of 2" in client.run(*words, counts=COUNTS)


def test_without_a_hub(hub, client, tmp_path):
    words = ("--only", "piqa", "boolq", "--to", tmp_path / "out")
    with closing(Client("http://127.0.0.1:1", tmp_path / "home")) as nowhere:
        assert codes(nowhere.run(*words)) == ["hub.unavailable"]
    del hub.repos["baber/piqa"]
    hub.repos["aps/super_glue"] = {NEW: {}}
    assert codes(client.run(*words)) == ["hub.no_access", "hub.not_found", "stage.incomplete"]
