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
    """Ends of a command's messages: how to pass another revision, and work without the hub."""

    revision: str
    without_hub: str


def find_commit(repo: str, revision: str | None, hints: HubHints) -> str:
    """Ask the hub for the commit of `revision` (None: the main branch)."""
    from huggingface_hub import HfApi

    with hub_errors(repo, revision or "main", hints):
        commit = HfApi().dataset_info(repo, revision=revision, timeout=TIMEOUT_S).sha

    # A mirror may answer without a commit, or with another than the requested one.
    is_commit = revision is not None and COMMIT.fullmatch(revision)
    if not commit or (is_commit and commit != revision):
        raise UserError(
            "hub.unexpected",
            f"{repo}: requested {revision}, the hub (HF_ENDPOINT) returned {commit}",
            repo=repo,
        )
    return commit


def snapshot_folder(repo: str, commit: str) -> Path:
    """Return the folder in huggingface_hub's cache that holds the commit's files."""
    from huggingface_hub import constants

    cache = Path(constants.HF_HUB_CACHE).expanduser().resolve()
    repo_folder = f"datasets--{repo.replace('/', '--')}"
    return cache / repo_folder / "snapshots" / commit


def is_cached_snapshot(root: Path, repo: str, commit: str) -> bool:
    """Return whether `root` is the commit's folder in a cache, also under another HF_HOME."""
    snapshot = snapshot_folder(repo, commit)
    return root.parts[-3:] == snapshot.parts[-3:]


@dataclass(frozen=True)
class _Listing:
    version: Literal[1]
    files: tuple[HubFile, ...]


def list_files(repo: str, commit: str, folder: str, hints: HubHints) -> list[HubFile]:
    """Return all files below `folder`, unsorted. Raises UserError."""
    repo_cache = snapshot_folder(repo, commit).parents[1]
    flat_folder = folder.replace("/", "--")
    saved_listing = repo_cache / f"listing-{commit}-{flat_folder}.json"
    with suppress(UnreadableFile):  # then list it again
        return list(read_record(saved_listing, _Listing).files)

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
        repo_cache.mkdir(parents=True, exist_ok=True)
        write_json(saved_listing, asdict(_Listing(version=1, files=listing)))
    return list(listing)


def fetch(repo: str, commit: str, root: Path, files: Sequence[HubFile], hints: HubHints) -> None:
    """Download those of `files` that are not in `root`, the commit's folder. Raises UserError."""
    from huggingface_hub import hf_hub_download

    for file in files:
        if (root / file.path).exists():
            continue
        free = free_bytes(root)
        if free < file.size:
            raise HubUnavailable(
                "disk.full",
                f"{root}: {size(free)} free, {file.path} needs {size(file.size)}; "
                "free some space or set HF_HOME",
                path=root,
            )
        with hub_errors(repo, commit, hints, file.path):
            hf_hub_download(
                repo,
                file.path,
                repo_type="dataset",
                revision=commit,
                cache_dir=root.parents[2],
            )


def known_hashes(root: Path, paths: dict[str, Path]) -> tuple[str, dict[str, str]]:
    """Return (commit or "", {path: sha256}) from huggingface_hub's metadata of downloaded files."""
    commits = set()
    hashes = {}
    for path, file in paths.items():
        commit = sha256 = ""
        # In the cache a file is a link from its commit's folder to a blob named by its hash.
        if file.is_symlink() and root.parent.name == "snapshots":
            blob = Path(os.readlink(file))
            if blob.parent.name == "blobs":
                commit = root.name
                sha256 = blob.name

        # With local_dir the first two lines of a file next to it are commit and hash.
        if not COMMIT.fullmatch(commit):
            metadata = root / ".cache" / "huggingface" / "download" / f"{path}.metadata"
            with suppress(OSError, ValueError):
                commit, sha256 = metadata.read_text().split("\n")[:2]

        # Files of one folder may be of several commits, or of none.
        is_commit = COMMIT.fullmatch(commit) is not None
        commits.add(commit if is_commit else "")
        if is_commit and SHA256.fullmatch(sha256):
            hashes[path] = sha256
    if len(commits) == 1:
        return commits.pop(), hashes
    return "", hashes


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
        source = f"{repo}@{revision[:12]}"
        if path:
            source = f"{source} {path}"
        raise _user_error(error, hints, unexpected, source) from None


def transport_error() -> Any:
    """Return the base class of network errors: of requests or httpx, depending on the version."""
    from huggingface_hub import errors

    # The last class above the hub's own error that is not Python's.
    builtin = (Exception, BaseException, object, OSError)
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
    error: Exception, hints: HubHints, unexpected: tuple[type[Exception], ...], source: str
) -> UserError:
    """Classify `error` by its causes, because `datasets` wraps the hub's errors."""
    from huggingface_hub import constants, errors

    text = " ".join(str(error).split())
    detail = f"({type(error).__name__}: {text[:300]})"
    causes = causes_of(error)

    def message(problem: str) -> str:
        return f"{source}: {problem} {detail}"

    def is_any(kind: type[BaseException]) -> bool:
        return any(isinstance(cause, kind) for cause in causes)

    # The disk: `datasets` checks the free space first and raises a bare OSError.
    disk_full = (errno.ENOSPC, errno.EDQUOT)
    for cause in causes:
        is_bare = str(cause).startswith("Not enough disk space")
        if is_bare or getattr(cause, "errno", None) in disk_full:
            problem = "the disk is full, here or in huggingface_hub's cache"
            return HubUnavailable(
                "disk.full", message(f"{problem}; free some space or set HF_HOME")
            )

    # A page of another server, such as a proxy.
    responses = [cause.response for cause in causes if isinstance(cause, errors.HfHubHTTPError)]
    if isinstance(error, BAD_ANSWER) or any(map(is_page, responses)):
        return UserError("hub.unexpected", message(f"{NOT_THE_HUB}, {hints.without_hub}"))

    # The hub's own reply, a subclass before its base. LocalEntryNotFoundError, the error without a
    # network, is an EntryNotFoundError too.
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

    # A file of the cache; what is left is the network.
    if isinstance(error, OSError) and error.filename:
        problem = f"{error.filename}: {error.strerror}; set HF_HOME to a folder of yours"
        return UserError("hub.cache", message(problem), path=error.filename)
    offline = ""
    if constants.HF_HUB_OFFLINE:
        offline = " (HF_HUB_OFFLINE or TRANSFORMERS_OFFLINE is set)"
    problem = f"the hub cannot be reached{offline}; {hints.without_hub}"
    return HubUnavailable("hub.unavailable", message(problem))
