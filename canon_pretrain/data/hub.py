"""Datasets of the Hugging Face hub at one commit: their files, downloads and errors.

huggingface_hub brings login (HF_TOKEN), mirrors (HF_ENDPOINT), retries and the cache (HF_HOME): a
finished file is never fetched again, an interrupted one continues. A listing is kept beside the
cache's snapshot, so that other jobs need no network.
"""

import errno
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


class HubUnavailable(UserError):
    """No hub or no room: any other download would fail as well."""


class HubFile(NamedTuple):
    """A file of a repository: its path, size and, if the hub has it, SHA-256 ("" otherwise)."""

    path: str
    size: int
    sha256: str


@dataclass(frozen=True)
class HubHints:
    """The ends of a command's messages: how to name another revision, and work without the hub."""

    revision: str
    without_hub: str


def find_commit(repo: str, revision: str | None, hints: HubHints) -> str:
    """Return the commit of `revision` (None: the main branch), asking the hub in every case."""
    from huggingface_hub import HfApi

    with hub_errors(repo, revision or "main", hints):
        found = HfApi().dataset_info(repo, revision=revision, timeout=TIMEOUT_S).sha
    if not found or (revision and COMMIT.fullmatch(revision) and found != revision):
        raise UserError(
            "todo.hub", f"{repo}: asked for {revision}, the hub (HF_ENDPOINT) has {found}"
        )
    return found


def snapshot_folder(repo: str, commit: str) -> Path:
    """Return the folder in huggingface_hub's cache that holds the commit's files."""
    from huggingface_hub import constants

    cache = Path(constants.HF_HUB_CACHE).expanduser().resolve()
    return cache / f"datasets--{repo.replace('/', '--')}" / "snapshots" / commit


def is_cached_snapshot(root: Path, repo: str, commit: str) -> bool:
    """Whether `root` is the commit's folder in a cache: this one, or where HF_HOME was before."""
    return root.parts[-3:] == snapshot_folder(repo, commit).parts[-3:]


@dataclass(frozen=True)
class _Listing:
    version: Literal[1]
    files: tuple[HubFile, ...]


def list_files(repo: str, commit: str, folder: str, hints: HubHints) -> list[HubFile]:
    """Return all files below `folder`, unsorted. Raises UserError without network or access."""
    kept = (
        snapshot_folder(repo, commit).parents[1]
        / f"listing-{commit}-{folder.replace('/', '--')}.json"
    )
    try:
        return list(read_record(kept, _Listing).files)
    except UnreadableFile:
        pass  # listing again is all that it costs
    from huggingface_hub import HfApi
    from huggingface_hub.hf_api import RepoFile

    # page by page: dataset_info(files_metadata=True) sends SlimPajama's 59,166 in one answer
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
    """Make sure that `files` are in `root`, the commit's snapshot. Raises UserError."""
    from huggingface_hub import hf_hub_download

    for known in files:
        path = root / known.path
        if not path.exists():
            if (free := free_bytes(root)) < known.size:
                raise HubUnavailable(
                    "todo.hub",
                    f"{root}: {size(free)} are free, {known.path} needs {size(known.size)}; make "
                    f"room, or set HF_HOME to a folder on another disk and run the same command "
                    f"again",
                )
            place: dict[str, Any] = {"revision": commit, "cache_dir": root.parents[2]}
            with hub_errors(repo, commit, hints, known.path):
                hf_hub_download(repo, known.path, repo_type="dataset", **place)


def known_hashes(root: Path, paths: dict[str, Path]) -> tuple[str, dict[str, str]]:
    """Return (commit or "", {path: sha256}) that huggingface_hub left beside files it fetched."""
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
    """Raise UserError for what the hub, the network or the disk does within the block.

    Exceptions of the types `unexpected` mean that the data is not what was expected.
    """
    from huggingface_hub import errors

    # the transport changes with the releases (requests, httpx): its root is above their own error
    ours = (Exception, BaseException, object, OSError)
    transport: Any = [base for base in errors.HfHubHTTPError.__mro__ if base not in ours][-1]
    try:
        yield
    except (transport, OSError, *unexpected) as error:
        kind, problem = _problem(error, hints, unexpected)
        what = f"{repo}@{revision[:12]}" + (f" {path}" if path else "")
        detail = f"({type(error).__name__}: {' '.join(str(error).split())[:300]})"
        raise kind("todo.hub", f"{what}: {problem} {detail}") from None


def _problem(
    error: Exception, hints: HubHints, unexpected: tuple[type[Exception], ...]
) -> tuple[type[UserError], str]:
    """What went wrong and the way out of it; `datasets` wraps what happens to it."""
    from huggingface_hub import constants, errors

    causes: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and cause not in causes:
        causes.append(cause)
        cause = cause.__cause__ or cause.__context__
    full = (errno.ENOSPC, errno.EDQUOT)
    # `datasets` checks the room beforehand and raises a bare OSError
    bare = "Not enough disk space"
    if any(getattr(one, "errno", None) in full or str(one).startswith(bare) for one in causes):
        return HubUnavailable, (
            "the disk is full, here or under huggingface_hub's cache; make room or set HF_HOME, "
            "and run the same command again"
        )
    login = f"log in (HF_TOKEN), {hints.without_hub}"
    problems: list[tuple[Any, Sequence[BaseException], str]] = [
        (errors.GatedRepoError, causes, f"accept its terms and {login}"),
        (errors.RevisionNotFoundError, causes, f"no such revision; {hints.revision}"),
        (errors.RepositoryNotFoundError, causes, f"no such dataset, or {login}"),
        (errors.EntryNotFoundError, causes, f"not in this revision; {hints.revision}"),
        (unexpected, [error], f"not the expected data; {hints.revision}"),
    ]
    is_offline = any(isinstance(one, errors.LocalEntryNotFoundError) for one in causes)
    for kind, raised, problem in problems:
        if not is_offline and any(isinstance(one, kind) for one in raised):
            return UserError, problem
    if isinstance(error, errors.HfHubHTTPError) and error.response is not None:
        status = error.response.status_code
        return UserError, f"the hub answered {status}; run the same command again later"
    if isinstance(error, OSError) and error.filename:
        return UserError, f"{error.filename}: {error.strerror}; set HF_HOME to a folder of yours"
    why = " (HF_HUB_OFFLINE or TRANSFORMERS_OFFLINE is set)" if constants.HF_HUB_OFFLINE else ""
    return HubUnavailable, f"the hub cannot be reached{why}; {hints.without_hub}"
