"""A fake hub for `datasets` and huggingface_hub, and a client process that stages from it.

The client libraries read HF_ENDPOINT and HF_HOME at import. The hub records requests, and fails on
request.
"""

import hashlib
import io
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote

import datasets
import pyarrow.parquet

from tests.support import HANGS_AFTER_S, ROOT

Files = dict[str, bytes]


def dataset_files(splits: dict[tuple[str, str], datasets.Dataset]) -> Files:
    """Return a repository's files for these (config, split): parquet and a dataset card."""
    files: Files = {}
    card: dict[str, str] = {}
    for (config, split), rows in splits.items():
        buffer = io.BytesIO()
        pyarrow.parquet.write_table(rows.with_format("arrow")[:], buffer)
        files[f"{config}/{split}-00000-of-00001.parquet"] = buffer.getvalue()
        start = card.get(config, f"- config_name: {config}\n  data_files:\n")
        card[config] = f"{start}  - split: {split}\n    path: {config}/{split}-*\n"
    files["README.md"] = f"---\nconfigs:\n{''.join(card.values())}---\n".encode()
    return files


class FakeHub(ThreadingHTTPServer):
    """Server of `repos`: repository -> commit (the last one is main) -> files.

    A file whose name ends with `stalled` is sent after `released` is set; files in `wrong` are sent
    with wrong bytes; `refusals` maps part of a path to a status. Parquet files are in LFS, as on
    the real hub; a listing has `page_files` entries per page.
    """

    daemon_threads = True

    def __init__(
        self, repos: dict[str, dict[str, Files]], handler: type["_Handler"] | None = None
    ) -> None:
        super().__init__(("127.0.0.1", 0), handler or _Handler)
        self.repos = repos
        self.asked: list[str] = []
        self.status = 0
        self.refusals: dict[str, int] = {}
        self.wrong: set[str] = set()
        self.page_files = 1000
        self.stalled = ""
        self.waiting, self.released = threading.Event(), threading.Event()
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def handle_error(self, request: Any, address: Any) -> None:
        """Print nothing, because tests kill clients."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def take_asked(self, kind: str = "/resolve/") -> list[str]:
        taken = [line for line in self.asked if line.startswith("GET") and kind in line]
        self.asked.clear()
        return taken


class _Handler(BaseHTTPRequestHandler):
    server: FakeHub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        sent = self.rfile.read(int(self.headers.get("Content-Length") or 0)).decode()
        server, path = self.server, unquote(self.path.partition("?")[0])
        server.asked.append(f"{self.command} {path} {self.headers.get('Range', '')}".strip())
        if server.status:
            return self.reply(b"{}", server.status)
        for part, status in server.refusals.items():
            if part in path:
                code = {401: "RepoNotFound", 403: "GatedRepo"}.get(status, "")
                return self.reply(b"{}", status, {"X-Error-Code": code})
        for repo, commits in server.repos.items():
            main = list(commits)[-1]
            prefix = f"/api/datasets/{repo}"
            if match := re.fullmatch(f"{prefix}(?:/revision/(.+))?", path):
                commit = main if match[1] in (None, "main") else match[1]
                if commit not in commits:
                    return self.missing("Revision")
                info = {"id": repo, "sha": commit, "siblings": [], "tags": []}
                return self.reply(json.dumps(info).encode())
            if match := re.fullmatch(f"{prefix}/(tree|paths-info)/([0-9a-f]+)/?(.*)", path):
                files = commits[match[2]]
                if match[1] == "paths-info":
                    wanted = parse_qs(sent).get("paths") or json.loads(sent)["paths"]
                elif "recursive=true" in self.path.lower():
                    wanted = [name for name in files if name.startswith(f"{match[3]}/")]
                else:
                    start = f"{match[3]}/" if match[3] else ""
                    inside = [name[len(start) :] for name in files if name.startswith(start)]
                    wanted = sorted({start + name.split("/")[0] for name in inside})
                return self.listing(files, wanted)
            if match := re.fullmatch(f"/datasets/{repo}/resolve/([^/]+)/(.*)", path):
                commit = main if match[1] == "main" else match[1]
                if match[2] in commits.get(commit, {}):
                    return self.file(commit, match[2], commits[commit][match[2]])
                return self.missing("Entry")
        return self.missing("Repo")

    do_HEAD = do_POST = do_GET

    def listing(self, files: Files, names: Sequence[str]) -> None:
        entries: list[dict[str, Any]] = []
        query = parse_qs(self.path.partition("?")[2])
        first = int(query.get("cursor", ["0"])[0])
        end = first + self.server.page_files
        for name in names[first:end]:
            if name in files:
                content = files[name]
                entry = {"type": "file", "path": name, "size": len(content), "oid": _sha1(content)}
                if name.endswith(".parquet"):
                    sha256 = hashlib.sha256(content).hexdigest()
                    entry["lfs"] = {"oid": sha256, "size": len(content), "pointerSize": 130}
                entries.append(entry)
            elif any(known.startswith(f"{name}/") for known in files):
                entries.append({"type": "directory", "path": name, "size": 0, "oid": "d" * 40})
        page = self.path.partition("&cursor=")[0]
        link = {"Link": f'<{self.server.url}{page}&cursor={end}>; rel="next"'}
        self.reply(json.dumps(entries).encode(), 200, link if end < len(names) else {})

    def file(self, commit: str, name: str, content: bytes) -> None:
        server = self.server
        if self.command == "GET" and server.stalled and name.endswith(server.stalled):
            server.waiting.set()
            server.released.wait(HANGS_AFTER_S)
        etag = hashlib.sha256(content).hexdigest() if name.endswith(".parquet") else _sha1(content)
        headers = {"X-Repo-Commit": commit, "ETag": f'"{etag}"', "Accept-Ranges": "bytes"}
        if name in server.wrong:
            content = content[:-1] + b"?"
        first, _, last = (self.headers.get("Range") or "bytes=0-")[6:].partition("-")
        end = min(int(last or len(content)) + 1, len(content))
        if is_part := "Range" in self.headers:
            headers["Content-Range"] = f"bytes {first}-{end - 1}/{len(content)}"
        self.reply(content[int(first) : end], 206 if is_part else 200, headers)

    def missing(self, what: str) -> None:
        self.reply(b"{}", 404, {"X-Error-Code": f"{what}NotFound"})

    def reply(self, body: bytes, status: int = 200, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


def _sha1(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()


# ---- the client

# One process for many commands, one per line, because importing datasets is slow; "counts" replaces
# the numbers of documents in the catalogue.
CLIENT = """
import argparse, dataclasses, json, sys
import datasets, huggingface_hub
from canon_pretrain.core.errors import UserError
from eval import staged
from canon_pretrain.core.cli import Parser
from eval.stage import add_arguments, run

real = dict(staged.CATALOGUE)
for line in sys.stdin:
    asked = json.loads(line)
    for key, data in real.items():
        count = asked["counts"].get(key, data.documents)
        staged.CATALOGUE[key] = dataclasses.replace(data, documents=count)
    parser = Parser()
    add_arguments(parser)
    try:
        run(parser.parse_args(asked["words"]))
    except UserError as error:
        print(f"error[{error.code}]: {error}")
    print("----", flush=True)
"""


class Client:
    """A process that stages; `run` returns a command's output."""

    def __init__(self, url: str, home: Path, **environment: str) -> None:
        known = {"HF_ENDPOINT": url, "HF_HOME": str(home), "PYTHONPATH": str(ROOT)}
        env, pipe = os.environ | known | environment, subprocess.PIPE
        command = [sys.executable, "-c", CLIENT]
        self.process = subprocess.Popen(command, env=env, stdin=pipe, stdout=pipe, text=True)

    def start(self, *words: object, counts: dict[str, int] | None = None) -> None:
        asked = {"words": [str(word) for word in words], "counts": counts or {}}
        assert self.process.stdin
        self.process.stdin.write(json.dumps(asked) + "\n")
        self.process.stdin.flush()

    def output(self, until: str = "----\n") -> str:
        """Return what it prints, up to a line, the end of the command, or of a killed process."""
        assert self.process.stdout
        lines = []
        for line in self.process.stdout:
            if line == "----\n":
                break
            lines.append(line)
            if line.startswith(until):
                break
        return "".join(lines)

    def run(self, *words: object, counts: dict[str, int] | None = None) -> str:
        self.start(*words, counts=counts)
        return self.output()

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()
