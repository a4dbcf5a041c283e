"""Downloads from a fake hub on this machine, which records the requests.

The client is huggingface_hub in a new process, because it reads HF_ENDPOINT and HF_HOME at import.
"""

import hashlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from data_prep.sources import HUB_SOURCES, select
from tests.fake_hub import FakeHub, Files
from tests.support import ROOT

pytestmark = pytest.mark.system
FINEWEB = HUB_SOURCES["fineweb-edu"]
COMMIT = FINEWEB.commit
MOVED = "9" * 40
FOLDER = "sample/100BT"
NAMES = [f"{FOLDER}/{stem}.parquet" for stem in ("002_00000", "002_00001", "010_00000")]


@pytest.fixture
def files() -> Files:
    """Return the files of both commits, not in the stream's order."""
    files = {name: f"content of {name} ".encode() * 4000 for name in reversed(NAMES)}
    return files | {f"{FOLDER}/README.md": b"not of the pattern", "x.parquet": b"elsewhere"}


@pytest.fixture
def hub(files: Files) -> Iterator[FakeHub]:
    with FakeHub({FINEWEB.repo: {COMMIT: files, MOVED: files}}) as server:
        server.page_files = 3
        yield server
        server.shutdown()


SCRIPT = """
import sys
from canon_pretrain.core.errors import UserError
from data_prep.readers import InputReader
from data_prep.sources import fetch, select
for step in sys.argv[1:]:
    try:
        exec(step)
    except UserError as error:
        print(type(error).__name__, error.code, error)
"""
SELECT = "s = select('fineweb-edu'{}); print(s.version, len(s.inputs), s.root)"
FETCH = "fetch(s.source, s.version, s.root, s.inputs[{}])"
READ = "list(InputReader(s.root, s.inputs[0], s.text_field, s.group_field).rows())"


def run(home: Path, endpoint: str, *steps: str, **more: str) -> list[str]:
    """Return the lines that the steps print, in a process with that hub and cache."""
    known = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "HUGGING"))}
    known |= {"HF_ENDPOINT": endpoint, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1"}
    known["HF_HUB_DISABLE_TELEMETRY"] = "1"
    command = [sys.executable, "-W", "error::ResourceWarning", "-c", SCRIPT, *steps]
    options: dict[str, Any] = {"capture_output": True, "text": True, "timeout": 120, "cwd": ROOT}
    result = subprocess.run(command, env=known | more, **options)
    assert result.returncode == 0 and "Traceback" not in result.stderr, result.stderr
    return result.stdout.splitlines()


def test_listing_and_download(hub, files, tmp_path):
    listing = [SELECT.format(""), "print(*s.inputs, sep='\\n')"]
    first = run(tmp_path, hub.url, *listing)
    root = tmp_path / f"hub/datasets--HuggingFaceFW--fineweb-edu/snapshots/{COMMIT}"
    assert f"{COMMIT} 3 {root}" in first
    known = {name: (len(files[name]), hashlib.sha256(files[name]).hexdigest()) for name in NAMES}
    expected = [f"Input(path='{n}', size={k[0]}, sha256='{k[1]}')" for n, k in known.items()]
    assert first[-3:] == expected
    assert len(hub.take_asked("/tree/")) == 2  # pages
    assert not list(root.glob("**/*.parquet"))

    # the listing is saved, and only missing files are downloaded
    run(tmp_path, hub.url, SELECT.format(""), FETCH.format("1:3"))
    asked = hub.take_asked("")
    assert len(asked) == 2 and all("/resolve/" in line for line in asked)
    assert all((root / name).read_bytes() == files[name] for name in NAMES[1:3])

    # without a network, only a missing file is an error
    steps = [SELECT.format(""), FETCH.format("1:3"), FETCH.format(":")]
    out = run(tmp_path, "http://127.0.0.1:1", *steps, HF_HUB_OFFLINE="1")
    assert out[-1].startswith(f"HubUnavailable hub.unavailable {FINEWEB.repo}@")
    # the cache given as a copy has the same inputs
    mirror = select("fineweb-edu", [root])
    assert (mirror.version, mirror.root) == (COMMIT, root)
    assert [str(one) for one in mirror.inputs] == expected[1:3]


def test_wrong_bytes_from_the_hub_are_an_error_when_read(hub, tmp_path):
    hub.wrong.add(NAMES[0])
    out = run(tmp_path, hub.url, SELECT.format(""), FETCH.format(":1"), READ)
    assert out[-1].startswith("UserError input.changed ") and NAMES[0] in out[-1]


def test_refusals(hub, tmp_path):
    hub.refusals = {"1" * 40: 401, "3" * 40: 403}
    revisions = [*hub.refusals, "main", "typo"]
    steps = [SELECT.format(f", revision='{revision}'") for revision in revisions]
    scarce = "from canon_pretrain.data import hub; hub.free_bytes = lambda path: 9"
    out = run(tmp_path, hub.url, *steps, SELECT.format(""), scarce, FETCH.format(":1"))
    # a branch is resolved once
    assert any(line.startswith(f"{MOVED} 3 {tmp_path}") for line in out)
    errors = [line.split()[:3] for line in out if line.startswith(("UserError", "Hub"))]
    assert errors[:3] == [
        ["UserError", "hub.no_access", f"{FINEWEB.repo}@{'1' * 12}:"],
        ["UserError", "hub.no_access", f"{FINEWEB.repo}@{'3' * 12}:"],
        ["UserError", "hub.not_found", f"{FINEWEB.repo}@typo:"],
    ]
    # the free space is checked before the download
    assert errors[3][:2] == ["HubUnavailable", "disk.full"] and not hub.take_asked()
