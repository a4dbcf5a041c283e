"""Downloads, against a hub on this machine that speaks what huggingface_hub asks for.

The client is the real one, in a process of its own: it reads HF_ENDPOINT and HF_HOME when it is
imported. The hub counts what it is asked, so the tests see what went over the network.
"""

import hashlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from data_prep.sources import HUB_SOURCES, select
from tests.fake_hub import FakeHub, Files
from tests.support import ROOT

FINEWEB = HUB_SOURCES["fineweb-edu"]
COMMIT = FINEWEB.commit
MOVED = "9" * 40
FOLDER = "sample/100BT"
NAMES = [f"{FOLDER}/{stem}.parquet" for stem in ("002_00000", "002_00001", "010_00000")]


@pytest.fixture
def files() -> Files:
    """Of both commits, not in the stream's order."""
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
        print(type(error).__name__, error)
"""
SELECT = "s = select('fineweb-edu'{}); print(s.version, len(s.inputs), s.root)"
FETCH = "fetch(s.source, s.version, s.root, s.inputs[{}])"
READ = "list(InputReader(s.root, s.inputs[0], s.text_field, s.group_field).rows())"


def run(home: Path, endpoint: str, *steps: str, **more: str) -> list[str]:
    """The lines that the steps print, in a process with that hub and that cache."""
    result = subprocess.run(
        [sys.executable, "-W", "error::ResourceWarning", "-c", SCRIPT, *steps],
        env={
            **{k: v for k, v in os.environ.items() if not k.startswith(("HF_", "HUGGING"))},
            "HF_ENDPOINT": endpoint,
            "HF_HOME": str(home),
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            **more,
        },
        capture_output=True,
        text=True,
        timeout=120,
        cwd=ROOT,
    )
    assert result.returncode == 0, result.stderr
    assert "Traceback" not in result.stderr
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

    # the listing is kept, and of two files asked for, two come
    run(tmp_path, hub.url, SELECT.format(""), FETCH.format("1:3"))
    asked = hub.take_asked("")
    assert len(asked) == 2 and all("/resolve/" in line for line in asked)
    assert all((root / name).read_bytes() == files[name] for name in NAMES[1:3])

    # without a network, what is there is enough; what is missing is an error
    steps = [SELECT.format(""), FETCH.format("1:3"), FETCH.format(":")]
    out = run(tmp_path, "http://127.0.0.1:1", *steps, HF_HUB_OFFLINE="1")
    assert out[-1].startswith(f"HubUnavailable {FINEWEB.repo}@{COMMIT[:12]} {NAMES[0]}: ")
    assert "HF_HUB_OFFLINE" in out[-1] and "--files FOLDER" in out[-1]
    # a cache that is named as a mirror gives the same inputs
    mirror = select("fineweb-edu", [root])
    assert (mirror.version, mirror.root) == (COMMIT, root)
    assert [str(one) for one in mirror.inputs] == expected[1:3]


def test_bytes_that_are_not_the_hubs_are_seen_when_read(hub, tmp_path):
    hub.wrong.add(NAMES[0])
    out = run(tmp_path, hub.url, SELECT.format(""), FETCH.format(":1"), READ)
    assert re.search(r"UserError .*002_00000\.parquet: sha256 .*, expected ", out[-1])


def test_refusals(hub, tmp_path):
    expected = {"HF_TOKEN": 401, "accept its terms": 403}
    hub.refusals = {str(status)[-1] * 40: status for status in expected.values()}
    revisions = [*hub.refusals, "main", "typo"]
    steps = [SELECT.format(f", revision='{revision}'") for revision in revisions]
    scarce = "from canon_pretrain.data import hub; hub.free_bytes = lambda path: 9"
    out = run(tmp_path, hub.url, *steps, SELECT.format(""), scarce, FETCH.format(":1"))
    for revision, words, line in zip(hub.refusals, expected, out[:2], strict=True):
        assert line.startswith(f"UserError {FINEWEB.repo}@{revision[:12]}: ") and words in line
    # a branch is resolved once
    assert any(line.startswith(f"{MOVED} 3 {tmp_path}") for line in out)
    assert any(line.startswith(f"UserError {FINEWEB.repo}@typo: ") for line in out)
    # too little room is said before anything is asked for
    assert out[-1].startswith("HubUnavailable ") and "HF_HOME" in out[-1]
    assert not hub.take_asked()
