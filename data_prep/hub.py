"""Datasets of the Hugging Face hub at one commit: what files there are, and their download.

Used by `sources.py` through huggingface_hub, which brings login (HF_TOKEN), mirrors (HF_ENDPOINT),
retries and its cache (HF_HOME): files lie in the cache's snapshot folder of the commit, a finished
one is never fetched again, and one that is interrupted within a process continues. A listing is
kept beside the snapshot, so later runs and other jobs need no network for it.
"""

import errno
import json
import os
import re
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from canon_pretrain.core.errors import UserError
from canon_pretrain.core.files import free_bytes
from data_prep.plan import Input

COMMIT = re.compile("[0-9a-f]{40}")
SHA256 = re.compile("[0-9a-f]{64}")
LISTING_VERSION = 1
_SNAPSHOT = "datasets--{}/snapshots/{}"
_MIRROR = "or give a copy of the files with --files FOLDER"


def resolve(repo: str, revision: str) -> str:
    """The commit of a branch, tag or commit. Raises UserError."""
    if COMMIT.fullmatch(revision):
        return revision
    from huggingface_hub import HfApi

    try:
        sha = HfApi().dataset_info(repo, revision=revision).sha
    except _errors() as error:
        _refuse(error, repo, revision)
    if not sha or not COMMIT.fullmatch(sha):
        raise UserError(f"{repo}@{revision}: the hub names no commit; give --revision a commit")
    return sha


def snapshot(repo: str, commit: str) -> Path:
    """The folder in huggingface_hub's cache that holds the commit's files."""
    from huggingface_hub import constants

    cache = Path(constants.HF_HUB_CACHE).expanduser().resolve()
    return cache / _SNAPSHOT.format(repo.replace("/", "--"), commit)


def is_snapshot(root: Path, repo: str, commit: str) -> bool:
    """Whether `root` is the commit's folder in a cache: this one, or where HF_HOME was before."""
    return root.parts[-3:] == Path(_SNAPSHOT.format(repo.replace("/", "--"), commit)).parts


def list_files(repo: str, commit: str, folder: str) -> list[Input]:
    """All files below `folder` with sizes and, where the hub has them, hashes; unsorted.

    Raises UserError without network or access.
    """
    kept = snapshot(repo, commit).parents[1] / f"listing-{commit}-{folder.replace('/', '--')}.json"
    listing = _load_listing(kept)
    if listing is not None:
        return listing
    from huggingface_hub import HfApi
    from huggingface_hub.hf_api import RepoFile

    try:
        entries = HfApi().list_repo_tree(
            repo, folder, recursive=True, revision=commit, repo_type="dataset"
        )
        listing = [
            Input(entry.path, entry.size, entry.lfs.sha256 if entry.lfs else "")
            for entry in entries
            if isinstance(entry, RepoFile)
        ]
    except _errors() as error:
        _refuse(error, repo, commit)
    _save_listing(kept, listing)
    return listing


def _load_listing(path: Path) -> list[Input] | None:
    try:
        stored = json.loads(path.read_bytes())
        if stored["version"] == LISTING_VERSION:
            return [Input(name, size, sha256) for name, size, sha256 in stored["files"]]
    except (OSError, ValueError, KeyError, TypeError):
        # none, or not ours: listing again is all that it costs
        pass
    return None


def _save_listing(path: Path, listing: Iterable[Input]) -> None:
    files = [[known.path, known.size, known.sha256] for known in listing]
    content = json.dumps({"version": LISTING_VERSION, "files": files}).encode()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # a name of its own: several jobs may list at once
        descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name)
        with open(descriptor, "wb") as file:
            file.write(content)
        os.replace(temporary, path)
    except OSError as error:
        raise UserError(
            f"{path.parent}: cannot be written: {error.strerror}; set HF_HOME to a folder with "
            f"room for the dataset, {_MIRROR}"
        ) from None


def fetch(
    repo: str,
    commit: str,
    root: Path,
    inputs: Sequence[Input],
    advance: Callable[[int], None] | None = None,
) -> None:
    """Make sure that the inputs are in `root`, the commit's snapshot folder, with their sizes.

    `advance` gets the number of bytes that arrived, again and again, in all the files' sizes at
    least. Processes may fetch at once. Raises UserError.
    """
    for known in inputs:
        path = root / known.path
        if not path.exists():
            _need_room(root, known)
            _download(repo, commit, root, known, advance)
        size = path.stat().st_size
        if size != known.size:
            raise UserError(
                f"{path}: {size:,} bytes, the hub has {known.size:,}; delete it and its target in "
                f"blobs/, and run the same command again"
            )


def _download(
    repo: str, commit: str, root: Path, known: Input, advance: Callable[[int], None] | None
) -> None:
    from huggingface_hub import hf_hub_download

    arrived = 0

    def count(num_bytes: int) -> None:
        nonlocal arrived
        arrived += num_bytes
        if advance:
            advance(num_bytes)

    try:
        hf_hub_download(
            repo,
            known.path,
            repo_type="dataset",
            revision=commit,
            cache_dir=root.parents[2],
            **_progress(count),
        )
    except _errors() as error:
        _refuse(error, repo, commit, known.path)
    # what came from elsewhere, or from a release that tells nothing on the way
    if arrived < known.size:
        count(known.size - arrived)


def _need_room(root: Path, known: Input) -> None:
    free = free_bytes(root)
    if free < known.size:
        raise UserError(
            f"{root}: {free / 1e9:.1f} GB are free, {known.path} needs {known.size / 1e9:.1f} GB; "
            f"make room, or set HF_HOME to a folder on another disk and run the same command again"
        )


def _progress(count: Callable[[int], None]) -> dict[str, Any]:
    """huggingface_hub's argument for a progress bar that draws nothing and counts."""
    import inspect

    from huggingface_hub import hf_hub_download
    from huggingface_hub.utils import tqdm

    class Counter(tqdm):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **{**options, "disable": True})

        def update(self, n: float | None = 1) -> None:
            count(int(n or 0))

    # not in its first releases, which draw their own bar on a terminal
    known = inspect.signature(hf_hub_download).parameters
    return {"tqdm_class": Counter} if "tqdm_class" in known else {}


def known_hashes(root: Path, paths: dict[str, Path]) -> tuple[str, dict[str, str]]:
    """What huggingface_hub left beside files that it once fetched: (commit, {path: sha256}).

    Its cache links each file to a blob that is named by its hash; `hf download --local-dir` writes
    commit and hash into .cache/huggingface. The commit is "" where there is none, or several.
    """
    commits = set()
    hashes = {}
    for path, file in paths.items():
        commit, sha256 = _from_cache(root, file) or _from_metadata(root, path) or ("", "")
        commits.add(commit)
        if sha256:
            hashes[path] = sha256
    return (commits.pop() if len(commits) == 1 else ""), hashes


def _from_cache(root: Path, file: Path) -> tuple[str, str] | None:
    if not (file.is_symlink() and root.parent.name == "snapshots"):
        return None
    blob = Path(os.readlink(file))
    if blob.parent.name != "blobs" or not COMMIT.fullmatch(root.name):
        return None
    return root.name, blob.name if SHA256.fullmatch(blob.name) else ""


def _from_metadata(root: Path, path: str) -> tuple[str, str] | None:
    metadata = root / ".cache" / "huggingface" / "download" / f"{path}.metadata"
    try:
        commit, etag = metadata.read_text().split("\n")[:2]
    except (OSError, ValueError):
        return None
    if not COMMIT.fullmatch(commit):
        return None
    return commit, etag if SHA256.fullmatch(etag) else ""


def _errors() -> tuple[type[Exception], ...]:
    """What huggingface_hub raises for the outside world: its own, its transport's, the system's.

    The transport changed with its releases (requests, httpx, httpx2): its root is found from the
    exception that derives from it.
    """
    from huggingface_hub.errors import HfHubHTTPError

    ours = (Exception, BaseException, object, OSError)
    transport = [base for base in HfHubHTTPError.__mro__ if base not in ours]
    return (transport[-1], OSError)


def _refuse(error: Exception, repo: str, revision: str, path: str = "") -> NoReturn:
    """Raise UserError: what was asked for, what went wrong, the way out."""
    from huggingface_hub import errors

    what = f"{repo}@{revision[:12]}" + (f" {path}" if path else "")
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        problem = "the disk of huggingface_hub's cache is full; make room or set HF_HOME"
    elif isinstance(error, errors.GatedRepoError):
        problem = "access must be granted first: accept its terms on the hub and log in (HF_TOKEN)"
    elif isinstance(error, errors.RevisionNotFoundError):
        problem = "no such revision; give --revision a commit, tag or branch of it"
    elif isinstance(error, errors.RepositoryNotFoundError):
        problem = "the hub has no such dataset, or not for you: log in (HF_TOKEN)"
    elif isinstance(error, errors.EntryNotFoundError) and not isinstance(
        error, errors.LocalEntryNotFoundError
    ):
        problem = "not in this revision; give the --revision of a commit that has it"
    elif isinstance(error, errors.HfHubHTTPError) and error.response is not None:
        problem = f"the hub answered {error.response.status_code}; try again later"
    else:
        problem = "the hub cannot be reached; run this where there is a network"
    detail = " ".join(str(error).split())[:200]
    raise UserError(f"{what}: {problem}, {_MIRROR} ({type(error).__name__}: {detail})") from None
