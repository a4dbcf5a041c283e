"""Data sets of the Hugging Face hub at one commit: finding the commit, fetching the rows.

Used by `stage.py` alone, on a machine with network; nothing that evaluates imports it. Login
(HF_TOKEN), mirrors (HF_ENDPOINT) and the cache of downloads (HF_HOME) are huggingface_hub's.
"""

import errno
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from canon_pretrain.core.errors import UserError
from eval.staging.catalogue import DataSet

if TYPE_CHECKING:
    import datasets

COMMIT = re.compile("[0-9a-f]{40}")
TIMEOUT_S = 30.0
NO_NETWORK = (
    "run `python -m eval stage` on a machine with network, such as a login node, and copy the "
    "folder of --to here"
)


class StagingEnds(UserError):
    """What no other data set would survive either: no hub, a full disk."""


def find_commit(path: str, revision: str | None) -> str:
    """The commit of `revision` (None: the present one) of the repository `path`.

    Asks the hub, also about a commit: what is not there is then said before any download. Raises
    UserError, StagingEnds where the hub cannot be reached.
    """
    from huggingface_hub import HfApi, constants

    if constants.HF_HUB_OFFLINE:
        raise StagingEnds(
            f"{path}: HF_HUB_OFFLINE or TRANSFORMERS_OFFLINE is set, so that nothing can be "
            f"downloaded; unset it, or {NO_NETWORK}"
        )
    try:
        found = HfApi().dataset_info(path, revision=revision, timeout=TIMEOUT_S).sha
    except _outside() as error:
        _refuse(error, path, revision or "main")
    if not found or not COMMIT.fullmatch(found):
        raise UserError(f"{path}: the hub names no commit; choose one with --pin KEY=COMMIT")
    if revision and COMMIT.fullmatch(revision) and found != revision:
        raise UserError(f"{path}: asked for commit {revision}, the hub (HF_ENDPOINT) has {found}")
    return found


def fetch(data: DataSet, commit: str, cache: Path) -> "datasets.Dataset":
    """The rows of `data` at `commit`; they may lie in `cache`, and live as long as it does.

    `cache` is not shared with other revisions: where the hub fails, `datasets` takes what is there.
    Raises UserError, StagingEnds.
    """
    import datasets
    from datasets.exceptions import DatasetsError

    try:
        with _no_bars():
            return datasets.load_dataset(
                data.path, data.config, split=data.split, revision=commit, cache_dir=str(cache)
            )
    # ValueError: no such configuration, no such split
    except (*_outside(), DatasetsError, ValueError) as error:
        _refuse(error, data.path, commit)


@contextmanager
def _no_bars() -> Iterator[None]:
    import datasets
    from huggingface_hub import utils

    shown = not datasets.are_progress_bars_disabled(), not utils.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    utils.disable_progress_bars()
    try:
        yield
    finally:
        if shown[0]:
            datasets.enable_progress_bars()
        if shown[1]:
            utils.enable_progress_bars()


def _outside() -> tuple[type[Exception], ...]:
    """What is raised for the outside world: by huggingface_hub, its transport, the system.

    The transport changed with its releases (requests, httpx): its root is found from the exception
    that derives from it.
    """
    from huggingface_hub.errors import HfHubHTTPError

    ours = (Exception, BaseException, object, OSError)
    transport = [base for base in HfHubHTTPError.__mro__ if base not in ours]
    return (transport[-1], OSError)


def _refuse(error: Exception, path: str, revision: str) -> NoReturn:
    """Raise UserError or StagingEnds: what was asked for, what went wrong, the way out."""
    from datasets.exceptions import DatasetsError
    from huggingface_hub import errors

    what = f"{path}@{revision[:12]}"
    detail = f"({type(error).__name__}: {' '.join(str(error).split())[:300]})"
    causes = _causes(error)
    if any(_is_full(e) for e in causes):
        raise StagingEnds(
            f"{what}: the disk of --to or of huggingface_hub's cache (HF_HOME) is full; make room "
            f"and run the same command again: what is staged stays {detail}"
        ) from None
    if any(isinstance(e, errors.GatedRepoError) for e in causes):
        problem = "access must be granted first: accept its terms on the hub and log in (HF_TOKEN)"
    elif any(isinstance(e, errors.RevisionNotFoundError) for e in causes):
        problem = "no such revision; choose another with --pin KEY=COMMIT"
    elif any(isinstance(e, errors.RepositoryNotFoundError) for e in causes):
        problem = "the hub has no such data set, or not for you: log in (HF_TOKEN)"
    elif isinstance(error, DatasetsError | ValueError):
        problem = "is not what the catalogue expects; choose another commit with --pin KEY=COMMIT"
    elif isinstance(error, errors.HfHubHTTPError) and error.response is not None:
        problem = f"the hub answered {error.response.status_code}; run the same command again later"
    elif isinstance(error, OSError) and error.filename:
        problem = f"{error.filename}: {error.strerror}; set HF_HOME to a folder of yours"
    else:
        raise StagingEnds(f"{what}: the hub cannot be reached; {NO_NETWORK} {detail}") from None
    raise UserError(f"{what}: {problem} {detail}") from None


def _is_full(error: BaseException) -> bool:
    # `datasets` looks beforehand, and raises a bare OSError
    looked = isinstance(error, OSError) and str(error).startswith("Not enough disk space")
    return looked or getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT)


def _causes(error: BaseException | None) -> list[BaseException]:
    """The error and what it was raised from: `datasets` wraps what happens to it."""
    causes: list[BaseException] = []
    while error is not None and error not in causes:
        causes.append(error)
        error = error.__cause__ or error.__context__
    return causes
