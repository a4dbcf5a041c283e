"""Downloads, against a hub on this machine that speaks what huggingface_hub asks for.

The client is the real one, in a process of its own: it reads HF_ENDPOINT and HF_HOME when it is
imported. The hub counts what it is asked, so the tests see what went over the network.
"""

import hashlib
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest

from data_prep import hub
from data_prep.sources import HUB_SOURCES, select

FINEWEB = HUB_SOURCES["fineweb-edu"]
COMMIT = FINEWEB.commit
MOVED = "9" * 40
FOLDER = "sample/100BT"


class FakeHub(ThreadingHTTPServer):
    """One dataset at two commits; `faults` maps a path's end to what goes wrong there."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.files = {
            f"{FOLDER}/{i:03d}_{j:05d}.parquet": f"file {i} {j} ".encode() * 4000
            for i in (10, 2)
            for j in (0, 1)
        }
        self.files[f"{FOLDER}/README.md"] = b"not of the pattern"
        self.faults: dict[str, str] = {}
        self.refusals: dict[str, int] = {}
        self.asked: list[str] = []
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def take_asked(self, kind: str) -> list[str]:
        """The requests since the last call whose line contains `kind`."""
        taken = [line for line in self.asked if kind in line]
        self.asked.clear()
        return taken


class Handler(BaseHTTPRequestHandler):
    server: FakeHub
    protocol_version = "HTTP/1.1"

    def log_message(self, *arguments: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self.answer(body=False)

    def do_GET(self) -> None:
        self.answer(body=True)

    def answer(self, body: bool) -> None:
        server = self.server
        path = unquote(self.path.partition("?")[0])
        server.asked.append(f"{self.command} {path} {self.headers.get('Range', '')}".strip())
        for commit, status in server.refusals.items():
            if commit in path:
                code = {401: "RepoNotFound", 403: "GatedRepo"}.get(status, "")
                return self.reply(status, b"{}", {"X-Error-Code": code}, body)
        api = f"/api/datasets/{FINEWEB.repo}"
        if match := re.fullmatch(f"{api}/revision/(.*)", path):
            commits = {"main": MOVED, COMMIT: COMMIT}
            if match[1] not in commits:
                return self.reply(404, b"{}", {"X-Error-Code": "RevisionNotFound"}, body)
            info = {"id": FINEWEB.repo, "sha": commits[match[1]], "siblings": [], "tags": []}
            return self.reply(200, json.dumps(info).encode(), {}, body)
        if re.fullmatch(f"{api}/tree/[0-9a-f]{{40}}/{FOLDER}", path):
            return self.tree(body)
        if match := re.fullmatch(f"/datasets/{FINEWEB.repo}/resolve/([0-9a-f]+)/(.*)", path):
            return self.file(match[1], match[2], body)
        return self.reply(404, b"{}", {"X-Error-Code": "EntryNotFound"}, body)

    def tree(self, body: bool) -> None:
        """Two pages, as the real hub sends 1,000 files a page."""
        names = list(self.server.files)
        second = "cursor=2" in self.path
        entries = [
            self.entry(name, self.server.files[name])
            for name in (names[3:] if second else names[:3])
        ]
        link = f'<{self.server.url}{self.path}&cursor=2>; rel="next"'
        self.reply(200, json.dumps(entries).encode(), {} if second else {"Link": link}, body)

    def entry(self, name: str, content: bytes) -> dict[str, Any]:
        sha256 = hashlib.sha256(content).hexdigest()
        entry = {"type": "file", "path": name, "size": len(content), "oid": "c" * 40}
        if name.endswith(".parquet"):
            entry["lfs"] = {"oid": sha256, "size": len(content), "pointerSize": 130}
        return entry

    def file(self, commit: str, name: str, body: bool) -> None:
        content = self.server.files[name]
        fault = self.server.faults.get(name, "")
        etag = hashlib.sha256(content).hexdigest()
        headers = {"X-Repo-Commit": commit, "ETag": f'"{etag}"', "Accept-Ranges": "bytes"}
        if fault == "wrong bytes":
            content = content[:-1] + b"?"
        first = int((self.headers.get("Range") or "bytes=0-")[6:].rstrip("-"))
        if first:
            headers["Content-Range"] = f"bytes {first}-{len(content) - 1}/{len(content)}"
        if fault == "broken once" and body and not first:
            self.server.faults.clear()
            self.reply(200, content, headers, body, stop=len(content) // 2)
            self.close_connection = True
            return
        self.reply(206 if first else 200, content[first:], headers, body)

    def reply(
        self, status: int, content: bytes, headers: dict[str, str], body: bool, stop: int = -1
    ) -> None:
        self.send_response(status)
        for key, value in {**headers, "Content-Length": str(len(content))}.items():
            self.send_header(key, value)
        self.end_headers()
        if body:
            self.wfile.write(content[:stop] if stop >= 0 else content)
            self.wfile.flush()


@pytest.fixture
def fake_hub() -> Iterator[FakeHub]:
    with FakeHub() as server:
        yield server
        server.shutdown()


SCRIPT = """
import sys
from canon_pretrain.core.errors import UserError
from data_prep.sources import fetch, open_input, select
counts = []
for step in sys.argv[1:]:
    try:
        exec(step)
    except UserError as error:
        print("error:", error)
"""
SELECT = "s = select('fineweb-edu'{}); print(s.version, len(s.inputs), s.root)"
FETCH = "fetch(s.source, s.version, s.root, s.inputs[{}], counts.append)"
SUM = "print(sum(counts))"
READ = "list(open_input(s.root, s.inputs[0], s.text_field, s.group_field).rows())"


def run(home: Path, endpoint: str, *steps: str, **more: str) -> str:
    """What the steps print, in a process with that hub and that cache."""
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
        cwd=Path(__file__).parents[2],
    )
    assert result.returncode == 0, result.stderr
    assert "Traceback" not in result.stderr
    return result.stdout


def test_listing_and_download(fake_hub: FakeHub, tmp_path: Path) -> None:
    out = run(tmp_path, fake_hub.url, SELECT.format(""), "print(*s.inputs, sep='\\n')")
    root = tmp_path / f"hub/datasets--HuggingFaceFW--fineweb-edu/snapshots/{COMMIT}"
    assert f"{COMMIT} 4 {root}" in out
    assert "4 files, the whole dataset has 140" in out and "fetched when they are needed" in out
    names = [f"{FOLDER}/{name}" for name in ("002_00000", "002_00001", "010_00000", "010_00001")]
    listed = out.splitlines()[-4:]
    for name, line in zip(names, listed, strict=True):
        content = fake_hub.files[f"{name}.parquet"]
        sha256 = hashlib.sha256(content).hexdigest()
        assert line == f"Input(path='{name}.parquet', size={len(content)}, sha256='{sha256}')"
    assert len(fake_hub.take_asked("/tree/")) == 2
    assert not list(root.glob("**/*.parquet"))

    # the listing is kept, and of two files asked for, two come
    out = run(tmp_path, fake_hub.url, SELECT.format(""), FETCH.format("1:3"), SUM)
    size = sum(len(fake_hub.files[f"{name}.parquet"]) for name in names[1:3])
    assert out.splitlines()[-1] == str(size)
    asked = fake_hub.take_asked("")
    assert not any("/tree/" in line or "/revision/" in line for line in asked)
    assert sum(line.startswith("GET") for line in asked) == 2
    for name in names[1:3]:
        assert (root / f"{name}.parquet").read_bytes() == fake_hub.files[f"{name}.parquet"]

    # without a network, what is there is enough; what is missing is an error
    steps = [SELECT.format(""), FETCH.format("1:3"), SUM, FETCH.format(":")]
    out = run(tmp_path, "http://127.0.0.1:1", *steps, HF_HUB_OFFLINE="1")
    assert out.splitlines()[-2] == "0"
    assert "error: HuggingFaceFW/fineweb-edu@87f09149ef47 sample/100BT/002_00000.parquet: " in out
    assert "the hub cannot be reached" in out and "--files FOLDER" in out
    # a cache that is named as a mirror gives the same inputs
    mirror = select("fineweb-edu", [root])
    assert (mirror.version, mirror.root) == (COMMIT, root)
    assert [f"{known}" for known in mirror.inputs] == listed[1:3]


def test_a_connection_that_breaks_is_continued(fake_hub: FakeHub, tmp_path: Path) -> None:
    name = f"{FOLDER}/002_00000.parquet"
    # huggingface_hub writes 10 MB at a time: two of them arrive before the break
    fake_hub.files[name] = os.urandom(1000) * 42_000
    fake_hub.faults[name] = "broken once"
    out = run(tmp_path, fake_hub.url, SELECT.format(""), FETCH.format(":1"), SUM)
    content = fake_hub.files[name]
    assert out.splitlines()[-1] == str(len(content))
    assert (Path(out.splitlines()[-2].split()[2]) / name).read_bytes() == content
    ranges = [line for line in fake_hub.take_asked("GET /datasets/") if "bytes=" in line]
    assert len(ranges) == 1 and 0 < int(ranges[0].split("bytes=")[1].rstrip("-")) < len(content)


def test_bytes_that_are_not_the_hubs_are_seen_when_read(fake_hub: FakeHub, tmp_path: Path) -> None:
    fake_hub.faults[f"{FOLDER}/002_00000.parquet"] = "wrong bytes"
    out = run(tmp_path, fake_hub.url, SELECT.format(""), FETCH.format(":1"), READ)
    assert re.search(r"error: .*002_00000\.parquet: sha256 .*, expected .*fetch it again", out)


def test_branches_are_resolved_once(fake_hub: FakeHub, tmp_path: Path) -> None:
    steps = [SELECT.format(", revision='main'"), SELECT.format(", revision='typo'")]
    out = run(tmp_path, fake_hub.url, *steps)
    assert f"{MOVED} 4 {tmp_path}" in out
    assert [line for line in fake_hub.take_asked("/tree/") if MOVED in line]
    assert "error: HuggingFaceFW/fineweb-edu@typo: no such revision; give --revision" in out


def test_refusals(fake_hub: FakeHub, tmp_path: Path) -> None:
    expected = {
        401: "the hub has no such dataset, or not for you: log in (HF_TOKEN), or give a copy",
        403: "access must be granted first: accept its terms on the hub and log in (HF_TOKEN)",
        418: "the hub answered 418; try again later, or give a copy of the files with --files",
    }
    fake_hub.refusals = {str(status)[-1] * 40: status for status in expected}
    steps = [SELECT.format(f", revision='{commit}'") for commit in fake_hub.refusals]
    lines = run(tmp_path, fake_hub.url, *steps).splitlines()
    for commit, message, line in zip(fake_hub.refusals, expected.values(), lines, strict=True):
        assert line.startswith(f"error: HuggingFaceFW/fineweb-edu@{commit[:12]}: {message}")


def test_no_network(tmp_path: Path) -> None:
    # a listing is tried for 25 s, a branch once
    cases = [("", {"HF_HUB_OFFLINE": "1"}, "87f09149ef47"), (", revision='main'", {}, "main")]
    for arguments, more, revision in cases:
        out = run(tmp_path, "http://127.0.0.1:1", SELECT.format(arguments), **more)
        assert out.startswith(f"error: HuggingFaceFW/fineweb-edu@{revision}: the hub cannot be ")
        assert "or give a copy of the files with --files FOLDER" in out


def test_a_commit_without_the_files(fake_hub: FakeHub, tmp_path: Path) -> None:
    fake_hub.files = {f"{FOLDER}/README.md": b"x"}
    out = run(tmp_path, fake_hub.url, SELECT.format(""))
    assert "no files sample/100BT/[0-9]{3}_[0-9]{5}\\.parquet in it; give the --revision" in out


def test_a_damaged_listing_is_made_again(fake_hub: FakeHub, tmp_path: Path) -> None:
    first = run(tmp_path, fake_hub.url, SELECT.format(""))
    (kept,) = tmp_path.glob("hub/datasets--*/listing-*.json")
    good = kept.read_bytes()
    for damaged in [b"", b"[1]", b'{"version": 1, "files": [[1]]}', b'{"version": 2}', good[:99]]:
        kept.write_bytes(damaged)
        assert hub._load_listing(kept) is None
    fake_hub.take_asked("")
    assert run(tmp_path, fake_hub.url, SELECT.format("")) == first
    assert len(fake_hub.take_asked("/tree/")) == 2
    assert kept.read_bytes() == good


def test_too_little_room_is_said_before(fake_hub: FakeHub, tmp_path: Path) -> None:
    scarce = "from data_prep import hub; hub.free_bytes = lambda path: 9"
    out = run(tmp_path, fake_hub.url, scarce, SELECT.format(""), FETCH.format(":1"))
    assert "0.0 GB are free" in out and "HF_HOME" in out
    assert not [line for line in fake_hub.take_asked("GET") if "/resolve/" in line]
