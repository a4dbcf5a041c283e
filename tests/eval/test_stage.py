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
from tests.support import refused

pytestmark = pytest.mark.system

OLD, NEW = "a" * 40, "b" * 40
COUNTS = {key: len(rows_of(key)) for key in CATALOGUE}


def codes(out):
    return re.findall(r"error\[([\w.]+)\]", out)


@pytest.fixture(scope="module")
def module_hub():
    """The catalogue's repositories with the fixtures at the pinned commit, or OLD."""
    splits: dict[str, dict[Any, Any]] = {}
    for key, data in CATALOGUE.items():
        splits.setdefault(data.path, {})[data.config or "default", data.split] = fixture(key)
    repos = {p: {REVISIONS.get(p, OLD): dataset_files(found)} for p, found in splits.items()}
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
    module_hub.repos, module_hub.status, module_hub.stalled = repos, 0, ""
    module_hub.released.clear()
    module_hub.waiting.clear()


@pytest.fixture(scope="module")
def client(module_hub, tmp_path_factory):
    with closing(Client(module_hub.url, tmp_path_factory.mktemp("home"))) as client:
        yield client


def test_all_suites_are_downloaded_once(hub, client, tmp_path):
    out = client.run("--to", tmp_path, counts=COUNTS)
    assert "35 of 35" in out and not codes(out)
    for key, data in CATALOGUE.items():
        loaded = load_staged(key, tmp_path)
        assert loaded.to_list() == rows_of(key) and loaded.features == fixture(key).features
        manifest = json.loads((tmp_path / key / "manifest.json").read_text())
        assert manifest["revision"] == REVISIONS.get(data.path, OLD)
    pins = json.loads((tmp_path / "pins.json").read_text())
    unpinned = {data.path for data in CATALOGUE.values()} - set(REVISIONS)
    assert pins == dict.fromkeys(unpinned, OLD) and len(unpinned) == 7
    assert {path.name for path in tmp_path.iterdir()} == {*CATALOGUE, "pins.json", ".stage.lock"}

    hub.take_asked()
    hub.status = 500  # the hub is not needed
    assert client.run("--to", tmp_path, counts=COUNTS).count("is staged, ") == 35
    assert not hub.asked
    assert "35 of 35" in client.run("--to", tmp_path, "--check")


def test_commits_are_kept_and_chosen(hub, client, tmp_path):
    path = CATALOGUE["jrt_fda"].path
    here, there = tmp_path / "here", tmp_path / "there"
    words = ("--suite", "jrt", "--only", "jrt_fda", "--to")
    client.run(*words, here, counts=COUNTS)
    # the hub has new commits
    changed = fixture("jrt_fda").select(range(5))
    hub.repos[path][NEW] = dataset_files({("default", "validation"): changed})
    # equal pins give equal rows; a chosen commit replaces them
    there.mkdir()
    (there / "pins.json").write_bytes((here / "pins.json").read_bytes())
    client.run(*words, there, counts=COUNTS)
    assert load_staged("jrt_fda", there).to_list() == rows_of("jrt_fda")
    out = client.run(*words, there, "--pin", f"jrt_fda={NEW}", counts=COUNTS)
    assert codes(out) == ["stage.documents", "stage.incomplete"]
    assert len(load_staged("jrt_fda", there)) == COUNTS["jrt_fda"]
    assert not codes(client.run(*words, there, "--allow_count", counts=COUNTS))
    assert len(load_staged("jrt_fda", there)) == 5
    # a folder without its pins keeps its commits
    (here / "pins.json").unlink()
    assert "is staged" in client.run(*words, here, counts=COUNTS)
    assert json.loads((here / "pins.json").read_text()) == {path: OLD}
    lacking = {("default", "validation"): fixture("piqa").remove_columns("sol2")}
    hub.repos["baber/piqa"] = {NEW: dataset_files(lacking)}
    out = client.run("--only", "piqa", "--to", here, "--pin", f"piqa={NEW}", counts=COUNTS)
    assert codes(out) == ["stage.columns", "stage.incomplete"] and not (here / "piqa").exists()


def test_a_killed_download_is_resumed(hub, client, tmp_path):
    words = ("--only", "arc_easy", "social_iqa", "wikitext", "--to", tmp_path / "out")
    hub.stalled = "default/validation-00000-of-00001.parquet"  # Social IQa's
    with closing(Client(hub.url, tmp_path / "home")) as killed:
        killed.start(*words, counts=COUNTS)
        assert hub.waiting.wait(60)
        killed.process.send_signal(signal.SIGKILL)
        assert "[1/3] arc_easy: 12 documents" in killed.output()
    assert (tmp_path / "out" / stage.DOWNLOADS).exists()
    check = client.run(*words, "--check", counts=COUNTS)
    assert "arc_easy: 12 documents" in check
    assert codes(check) == ["stage.missing", "stage.missing", "stage.incomplete"]
    hub.released.set()
    hub.take_asked()
    out = client.run(*words, counts=COUNTS)
    assert "arc_easy: is staged" in out and "3 of 3" in out
    assert not [line for line in hub.take_asked() if "ai2_arc" in line]
    assert not (tmp_path / "out" / stage.DOWNLOADS).exists()


def test_two_at_once_wait_for_each_other(hub, client, tmp_path):
    words = ("--only", "piqa", "lambada_openai", "--to", tmp_path / "out")
    hub.stalled = "default/validation-00000-of-00001.parquet"  # PIQA's
    with closing(Client(hub.url, tmp_path / "home")) as first:
        first.start(*words, counts=COUNTS)
        assert hub.waiting.wait(60)
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
