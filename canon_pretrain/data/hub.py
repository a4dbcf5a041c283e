"""Datasets of the Hugging Face Hub at one commit: listings, downloads and errors.

huggingface_hub does login (HF_TOKEN), mirrors (HF_ENDPOINT), retries and the cache (HF_HOME);
interrupted downloads resume. A listing is saved in the cache, so that other jobs need no network.
"""

import errno
import json
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from canon_pretrain.core.errors import UserError
from canon_pretrain.core.files import UnreadableFile, free_bytes, read_record, write_json
from canon_pretrain.core.terminal import size

COMMIT = re.compile("[0-9a-f]{40}")
SHA256 = re.compile("[0-9a-f]{64}")
TIMEOUT_S = 30.0
BAD_ANSWER = (json.JSONDecodeError, KeyError, TypeError, AttributeError)
"""What huggingface_hub raises for an answer that is not the hub's, such as the page of a proxy."""
NOT_THE_HUB = "what answered is not the hub; check HF_ENDPOINT, and the network's proxy or login"


class HubUnavailable(UserError):
    """The hub cannot be reached or the disk is full: any other download would fail too."""


class HubFile(NamedTuple):
    """A file of a repository: path, size, and SHA-256 ("" if the hub does not have it)."""

    path: str
    size: int
    sha256: str


@dataclass(frozen=True)
class HubHints:
    """Ends of a command's messages: how to give another revision, and work without the hub."""

    revision: str
    without_hub: str


def find_commit(repo: str, revision: str | None, hints: HubHints) -> str:
    """Ask the hub for the commit of `revision` (None: the main branch)."""
    from huggingface_hub import HfApi

    with hub_errors(repo, revision or "main", hints):
        found = HfApi().dataset_info(repo, revision=revision, timeout=TIMEOUT_S).sha
    if not found or (revision and COMMIT.fullmatch(revision) and found != revision):
        raise UserError(
            "hub.unexpected",
            f"{repo}: requested {revision}, the hub (HF_ENDPOINT) returned {found}",
            repo=repo,
        )
    return found


def snapshot_folder(repo: str, commit: str) -> Path:
    """Return the folder in huggingface_hub's cache that holds the commit's files."""
    from huggingface_hub import constants

    cache = Path(constants.HF_HUB_CACHE).expanduser().resolve()
    return cache / f"datasets--{repo.replace('/', '--')}" / "snapshots" / commit


def is_cached_snapshot(root: Path, repo: str, commit: str) -> bool:
    """Return whether `root` is the commit's folder in a cache, also under another HF_HOME."""
    return root.parts[-3:] == snapshot_folder(repo, commit).parts[-3:]


@dataclass(frozen=True)
class _Listing:
    version: Literal[1]
    files: tuple[HubFile, ...]


def list_files(repo: str, commit: str, folder: str, hints: HubHints) -> list[HubFile]:
    """Return all files below `folder`, unsorted. Raises UserError."""
    kept = (
        snapshot_folder(repo, commit).parents[1]
        / f"listing-{commit}-{folder.replace('/', '--')}.json"
    )
    try:
        return list(read_record(kept, _Listing).files)
    except UnreadableFile:
        pass  # list it again
    from huggingface_hub import HfApi
    from huggingface_hub.hf_api import RepoFile

    # paginated: dataset_info(files_metadata=True) returns SlimPajama's 59,166 files at once
    with hub_errors(repo, commit, hints):
        entries = HfApi().list_repo_tree(
            repo, folder, recursive=True, revision=commit, repo_type="dataset"
        )
        listing = tuple(
            HubFile(entry.path, entry.size, entry.lfs.sha256 if entry.lfs else "")
            for entry in entries
            if isinstance(entry, RepoFile)
        )
        kept.parent.mkdir(parents=True, exist_ok=True)
        write_json(kept, asdict(_Listing(1, listing)))
    return list(listing)


def fetch(repo: str, commit: str, root: Path, files: Sequence[HubFile], hints: HubHints) -> None:
    """Download those of `files` that are not in `root`, the commit's folder. Raises UserError."""
    from huggingface_hub import hf_hub_download

    for known in files:
        path = root / known.path
        if not path.exists():
            if (free := free_bytes(root)) < known.size:
                needed = f"{known.path} needs {size(known.size)}"
                raise HubUnavailable(
                    "disk.full",
                    f"{root}: {size(free)} free, {needed}; free some space or set HF_HOME",
                    path=root,
                )
            place: dict[str, Any] = {"revision": commit, "cache_dir": root.parents[2]}
            with hub_errors(repo, commit, hints, known.path):
                hf_hub_download(repo, known.path, repo_type="dataset", **place)


def known_hashes(root: Path, paths: dict[str, Path]) -> tuple[str, dict[str, str]]:
    """Return (commit or "", {path: sha256}) from huggingface_hub's metadata of downloaded files."""
    commits = set()
    hashes = {}
    for path, file in paths.items():
        commit = sha256 = ""
        if file.is_symlink() and root.parent.name == "snapshots":
            blob = Path(os.readlink(file))
            if blob.parent.name == "blobs":
                commit, sha256 = root.name, blob.name
        if not COMMIT.fullmatch(commit):
            metadata = root / ".cache" / "huggingface" / "download" / f"{path}.metadata"
            with suppress(OSError, ValueError):
                commit, sha256 = metadata.read_text().split("\n")[:2]
        is_known = COMMIT.fullmatch(commit) is not None
        commits.add(commit if is_known else "")
        if is_known and SHA256.fullmatch(sha256):
            hashes[path] = sha256
    return (commits.pop() if len(commits) == 1 else ""), hashes


@contextmanager
def hub_errors(
    repo: str,
    revision: str,
    hints: HubHints,
    path: str = "",
    *,
    unexpected: tuple[type[Exception], ...] = (),
) -> Iterator[None]:
    """Raise UserError for errors of the hub, the network or the disk in the block.

    Exceptions of the types `unexpected` mean that the data is not as expected.
    """
    try:
        yield
    except (transport_error(), OSError, *BAD_ANSWER, *unexpected) as error:
        what = f"{repo}@{revision[:12]}" + (f" {path}" if path else "")
        raise _user_error(
            error,
            hints,
            unexpected,
            what,
            f"({type(error).__name__}: {' '.join(str(error).split())[:300]})",
        ) from None


def transport_error() -> Any:
    """Return the base class of network errors: of requests or httpx, depending on the version."""
    from huggingface_hub import errors

    builtin = (Exception, BaseException, object, OSError)
    # it is above the hub's own error
    return [base for base in errors.HfHubHTTPError.__mro__ if base not in builtin][-1]


def is_page(response: Any) -> bool:
    """Return whether the reply to a failed request (None: there is none) is a page of another."""
    if response is None or response.status_code >= 500:
        return False
    headers = response.headers
    return "html" in headers.get("Content-Type", "") and "X-Error-Code" not in headers


def causes_of(error: BaseException) -> list[BaseException]:
    """Return `error`, what caused it, and so on."""
    causes: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and cause not in causes:
        causes.append(cause)
        cause = cause.__cause__ or cause.__context__
    return causes


def _user_error(
    error: Exception,
    hints: HubHints,
    unexpected: tuple[type[Exception], ...],
    what: str,
    detail: str,
) -> UserError:
    """Classify `error` by its causes, because `datasets` wraps the hub's errors."""
    from huggingface_hub import constants, errors

    def message(problem: str) -> str:
        return f"{what}: {problem} {detail}"

    causes = causes_of(error)

    def is_any(*kinds: type[BaseException]) -> bool:
        return any(isinstance(one, kinds) for one in causes)

    full = (errno.ENOSPC, errno.EDQUOT)
    # `datasets` checks the free space first and raises a bare OSError
    bare = "Not enough disk space"
    if any(getattr(one, "errno", None) in full or str(one).startswith(bare) for one in causes):
        problem = (
            "the disk is full, here or in huggingface_hub's cache; free some space or set HF_HOME"
        )
        return HubUnavailable("disk.full", message(problem))
    replies = [one.response for one in causes if isinstance(one, errors.HfHubHTTPError)]
    if isinstance(error, BAD_ANSWER) or any(map(is_page, replies)):
        return UserError("hub.unexpected", message(f"{NOT_THE_HUB}, {hints.without_hub}"))
    login = f"log in (HF_TOKEN), {hints.without_hub}"
    if not is_any(errors.LocalEntryNotFoundError):
        if is_any(errors.GatedRepoError):
            return UserError("hub.no_access", message(f"accept its terms and {login}"))
        if is_any(errors.RevisionNotFoundError):
            return UserError("hub.not_found", message(f"no such revision; {hints.revision}"))
        if is_any(errors.RepositoryNotFoundError):
            return UserError("hub.no_access", message(f"no such dataset, or {login}"))
        if is_any(errors.EntryNotFoundError):
            return UserError("hub.not_found", message(f"not in this revision; {hints.revision}"))
        if isinstance(error, unexpected):
            return UserError("hub.unexpected", message(f"not the expected data; {hints.revision}"))
    if isinstance(error, errors.HfHubHTTPError) and error.response is not None:
        status = error.response.status_code
        problem = f"the hub returned status {status}; run the same command again later"
        return UserError("hub.http_error", message(problem), status=status)
    if isinstance(error, OSError) and error.filename:
        problem = f"{error.filename}: {error.strerror}; set HF_HOME to a folder of yours"
        return UserError("hub.cache", message(problem), path=error.filename)
    why = " (HF_HUB_OFFLINE or TRANSFORMERS_OFFLINE is set)" if constants.HF_HUB_OFFLINE else ""
    problem = f"the hub cannot be reached{why}; {hints.without_hub}"
    return HubUnavailable("hub.unavailable", message(problem))
