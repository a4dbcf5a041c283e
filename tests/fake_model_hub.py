"""A stand-in of the hub for uploads of models: repositories, branches, large files, commits."""

import base64
import hashlib
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from huggingface_hub import constants
from huggingface_hub.utils import _http

from tests.fake_hub import FakeHub, Files, _Handler

TOKEN, USER = "hf_fake", "me"


class ModelHub(FakeHub):
    """Server of `models`: repository -> branch -> commits, the files of each; `private` ones.

    `statuses` maps a part of "METHOD path" to a status that is returned instead, `answers` to a
    status, a body and its type; after `cut` bytes of a large file the connection is closed.
    """

    def __init__(self) -> None:
        super().__init__({}, _ModelHandler)
        self.models: dict[str, dict[str, list[Files]]] = {}
        self.private: set[str] = set()
        self.statuses: dict[str, int] = {}
        self.answers: dict[str, tuple[int, bytes, str]] = {}
        self.large: Files = {}
        self.cut: int | None = None

    def files(self, repo: str = f"{USER}/model", branch: str = "main") -> Files:
        return self.models[repo][branch][-1]

    def sha(self, repo: str, branch: str) -> str:
        count = f"{repo} {branch} {len(self.models[repo][branch])}"
        return hashlib.sha1(count.encode()).hexdigest()


class _ModelHandler(_Handler):
    server: ModelHub

    def do_GET(self) -> None:
        server, path = self.server, self.path.partition("?")[0]
        body = b"" if server.cut is not None and self.command == "PUT" else self.body()
        server.asked.append(f"{self.command} {path}")
        for part, status in server.statuses.items():
            if part in server.asked[-1]:
                return self.json({"error": "refused by the test"}, status)
        for part, (status, answer, kind) in server.answers.items():
            if part in server.asked[-1]:
                return self.reply(answer, status, {"Content-Type": kind})
        if self.command == "PUT":
            return self.large(path, body)
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return self.json({"error": "Invalid credentials"}, 401)
        if path == "/api/whoami-v2":
            return self.json({"name": USER, "type": "user"})
        if path == "/api/validate-yaml":
            return self.validated(json.loads(body)["content"])
        if path == "/api/repos/create":
            return self.created(json.loads(body))
        if match := re.fullmatch("/([^/]+/[^/]+?)[.]git/info/lfs/objects/batch", path):
            actions = [
                {**x, "actions": {"upload": {"href": f"{server.url}/large/{x['oid']}"}}}
                for x in json.loads(body)["objects"]
            ]
            return self.json({"transfer": "basic", "objects": actions})
        if match := re.fullmatch("/([^/]+/[^/]+)/resolve/([^/]+)/(.*)", path):
            return self.sent(*match.groups())
        match = re.fullmatch("/api/models/([^/]+/[^/]+)(?:/([a-z]+)/([^/]+))?", path)
        if match is None or match[1] not in server.models:
            return self.missing("Repo")
        return self.api(match[1], match[2], match[3] or "main", body)

    do_HEAD = do_POST = do_PUT = do_GET

    def body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        parts = []
        while size := int(self.rfile.readline(), 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def json(self, content: Any, status: int = 200) -> None:
        self.reply(json.dumps(content).encode(), status, {"Content-Type": "application/json"})

    def created(self, asked: dict[str, Any]) -> None:
        owner, server = asked.get("organization") or USER, self.server
        repo = f"{owner}/{asked['name']}"
        if owner != USER:
            return self.json({"error": "You don't have the rights"}, 403)
        if repo in server.models:
            return self.json({"url": f"{server.url}/{repo}"}, 409)
        server.models[repo] = {"main": [{".gitattributes": b"*.safetensors filter=lfs\n"}]}
        if asked.get("visibility") == "private" or asked.get("private"):
            server.private.add(repo)
        return self.json({"url": f"{server.url}/{repo}"})

    def api(self, repo: str, verb: str | None, branch: str, body: bytes) -> None:
        branches = self.server.models[repo]
        if verb == "branch":
            branches.setdefault(branch, [branches["main"][-1]])
            return self.json({}, 200)
        if branch not in branches:
            return self.missing("Revision")
        if verb in (None, "revision"):
            siblings = [{"rfilename": name} for name in branches[branch][-1]]
            facts = {"id": repo, "private": repo in self.server.private, "tags": []}
            return self.json({**facts, "sha": self.server.sha(repo, branch), "siblings": siblings})
        if verb == "preupload":
            modes = [
                {
                    "path": x["path"],
                    "uploadMode": "lfs" if x["path"].endswith(".safetensors") else "regular",
                    "shouldIgnore": False,
                }
                for x in json.loads(body)["files"]
            ]
            return self.json({"files": modes})
        assert verb == "commit"
        return self.committed(repo, branch, [json.loads(line) for line in body.splitlines()])

    def committed(self, repo: str, branch: str, lines: list[dict[str, Any]]) -> None:
        parent = lines[0]["value"]["parentCommit"]
        if parent != self.server.sha(repo, branch):
            return self.json({"error": "A commit has happened since"}, 412)
        files = dict(self.server.models[repo][branch][-1])
        for line in lines[1:]:
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.server.large[value["oid"]]
            else:
                del files[value["path"]]
        self.server.models[repo][branch].append(files)
        sha = self.server.sha(repo, branch)
        url = f"{self.server.url}/{repo}/commit/{sha}"
        return self.json({"commitUrl": url, "commitOid": sha})

    def large(self, path: str, body: bytes) -> None:
        if self.server.cut is not None:
            self.rfile.read(self.server.cut)
            self.close_connection = True
            return self.connection.close()
        oid = path.rpartition("/")[2]
        assert hashlib.sha256(body).hexdigest() == oid
        self.server.large[oid] = body
        return self.reply(b"")

    def sent(self, repo: str, sha: str, name: str) -> None:
        for branch, commits in self.server.models[repo].items():
            if sha in (branch, self.server.sha(repo, branch)) and name in commits[-1]:
                return self.file(self.server.sha(repo, branch), name, commits[-1][name])
        return self.missing("Entry")

    def validated(self, content: str) -> None:
        """Check what the hub's specification of model cards (modelcard.md) requires."""
        _, front, text = content.split("---\n", 2)
        found, errors = yaml.safe_load(front), []
        if not text.strip():
            errors.append("no text")
        if "license" in found and not re.fullmatch("[a-z0-9.-]+", found["license"]):
            errors.append('"license" must be one of the known ids')
        for index in found.get("model-index", []):
            for result in index["results"]:
                metrics = result["metrics"]
                values = [index["name"], result["task"]["type"]]
                values += map(result["dataset"].get, ("name", "type"))
                values += [metric["type"] for metric in metrics]
                if not all(isinstance(x, str) and x for x in values) or not metrics:
                    errors.append("a required field of model-index is missing")
                if not all(isinstance(metric["value"], float) for metric in metrics):
                    errors.append("a value is no number")
        messages = [{"message": each} for each in errors]
        self.json({"errors": messages, "warnings": []}, 400 if errors else 200)


@contextmanager
def model_hub(monkeypatch: pytest.MonkeyPatch, cache: Path) -> Iterator[ModelHub]:
    """Serve a hub to huggingface_hub in this process, logged in, with retries that do not wait."""
    server = ModelHub()
    address = server.url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "ENDPOINT", server.url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", address)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(_http.time, "sleep", lambda seconds: None)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    yield server
    server.shutdown()
    server.server_close()
