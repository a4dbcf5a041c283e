"""Upload an export to a model repository of the Hugging Face Hub, in one commit.

huggingface_hub does login (HF_TOKEN), endpoints (HF_ENDPOINT), large files and retries. Files are
uploaded first, and appear all at once: a push that fails leaves the repository as it was, or empty.
"""

import contextlib
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from canon_pretrain.core.errors import UserError
from canon_pretrain.core.files import read_json
from canon_pretrain.data.hub import (
    BAD_ANSWER,
    NOT_THE_HUB,
    causes_of,
    is_page,
    transport_error,
)
from canon_pretrain.hf.export import PLACE, RECORD, files_of_export

README = "README.md"
CARD_HASH = "card_sha256"
_FILES_OF_NEW_REPOSITORY = {".gitattributes", README, "LICENSE", "LICENSE.md", "LICENSE.txt"}
"""Files that a repository may have before its first push."""


@dataclass(frozen=True)
class Upload:
    """What a push adds to the repository `repo`: `files` by name, as paths or bytes."""

    repo: str
    message: str
    files: dict[str, Path | bytes]

    @classmethod
    def of(cls, export: Path, repo: str, revision: str | None = None) -> "Upload":
        """Return the files that the record of `export` lists. Raises UserError.

        README.md names repository and branch, and the record no folder of this machine.
        """
        # All files must be there, and be files of this folder.
        names = files_of_export(export)
        # a record that was tampered with may list a link to any file of this machine
        links = [name for name in (*names, RECORD) if (export / name).is_symlink()]
        if links:
            raise UserError(
                "hf.not_an_export",
                f"{export}: {', '.join(links)} are links, maybe out of it; export it again",
                path=export,
                links=links,
            )
        missing = [name for name in names if not (export / name).is_file()]
        if missing:
            raise UserError(
                "hf.incomplete_export",
                f"{export} is incomplete: {', '.join(missing)} missing; export it again",
                path=export,
                missing=missing,
            )

        # The record, without the folders of this machine.
        files: dict[str, Path | bytes] = {name: export / name for name in sorted(names)}
        record = read_json(export / RECORD, finite=False)
        if record.get("checkpoint"):
            # RUN/checkpoint/step-N
            record["checkpoint"] = "/".join(Path(record["checkpoint"]).parts[-3:])

        # The README, with the repository for the placeholder. Its hash tells the next push whether
        # the page was edited on the hub.
        if README in files:
            page = (export / README).read_text(encoding="utf-8")
            if revision is not None:
                page = page.replace(f'"{PLACE}"', f'"{PLACE}", revision="{revision}"')
                page = page.replace(f"={PLACE}", f"={PLACE},revision={revision}")
            content = page.replace(PLACE, repo).encode()
            files[README] = content
            record[CARD_HASH] = sha256(content).hexdigest()
        files[RECORD] = (json.dumps(record, indent=2) + "\n").encode()
        return cls(repo, f"Step {record.get('step')} of run {record.get('run_id')}", files)

    @property
    def sizes(self) -> dict[str, int]:
        """The sizes of `files` in bytes."""
        return {
            name: len(file) if isinstance(file, bytes) else file.stat().st_size
            for name, file in self.files.items()
        }


def check_name(repo: str) -> None:
    """Raise UserError unless `repo` can name a repository."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(repo)
    except HFValidationError as error:
        raise UserError(
            "hub.repo_name",
            f"{repo}: expected USER/NAME, ORGANIZATION/NAME or NAME: {error}",
            given=repo,
        ) from None


def full_name(repo: str) -> str:
    """Log in; return `repo` with the user's name before it if it has no owner."""
    from huggingface_hub import HfApi

    with _errors(repo):
        user = HfApi().whoami()["name"]
        if not isinstance(user, str):
            raise TypeError(f"the user's name is {user!r}")
    return repo if "/" in repo else f"{user}/{repo}"


def push(upload: Upload, *, private: bool, revision: str | None) -> str:
    """Commit `upload` to the branch `revision` (None: main); return the commit's address.

    The repository and the branch are created if missing. Files of an earlier export that are not in
    this one are deleted by the same commit; any other file, and a card that was edited on the hub,
    are kept. Raises UserError.
    """
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi

    api = HfApi()
    repo = upload.repo
    with _errors(repo):
        # The repository and the branch.
        api.create_repo(repo, private=private or None, exist_ok=True)
        if revision is not None:
            api.create_branch(repo, branch=revision, exist_ok=True)
        info = api.model_info(repo, revision=revision)
        if private and not info.private:
            raise UserError(
                "hub.public_repo",
                f"{repo} is public: make it private in its settings, or choose another name",
                repo=repo,
            )

        # Only a repository that is new or has an earlier export is written to.
        hub_files = {sibling.rfilename for sibling in info.siblings or ()}
        old_files: list[str] = []
        is_card_edited = False
        if RECORD in hub_files:
            record = Path(api.hf_hub_download(repo, RECORD, revision=info.sha))
            with contextlib.suppress(UserError):  # damaged
                old_files = files_of_export(record.parent)
                card_hash = read_json(record, finite=False).get(CARD_HASH)
                if card_hash and README in hub_files:
                    card = Path(api.hf_hub_download(repo, README, revision=info.sha))
                    is_card_edited = sha256(card.read_bytes()).hexdigest() != card_hash
        elif foreign_files := hub_files - _FILES_OF_NEW_REPOSITORY:
            raise UserError(
                "hub.name_taken",
                f"{repo} has files of another model ({min(foreign_files)}): choose another name",
                repo=repo,
            )

        # Add the new files, and delete those of the earlier export that are not replaced.
        if is_card_edited:
            print(
                f"NOTE: {README} was edited on the hub, and is kept: delete it there for a new one",
                file=sys.stderr,
            )
        changes: list[Any] = [
            CommitOperationAdd(name, content)
            for name, content in upload.files.items()
            if name != README or not is_card_edited
        ]
        for name in sorted(set(old_files) & hub_files - set(upload.files)):
            changes.append(CommitOperationDelete(name, is_folder=False))

        try:
            return api.create_commit(
                repo,
                changes,
                commit_message=upload.message,
                revision=revision,
                parent_commit=info.sha,  # fails if another push was faster
            ).commit_url
        except Exception:
            print(file=sys.stderr)  # ends the line of a progress bar
            raise


@contextlib.contextmanager
def _errors(repo: str) -> Iterator[None]:
    """Raise UserError with the way out for errors of the hub or the network in the block."""
    try:
        yield
    except (OSError, RuntimeError, ValueError, *BAD_ANSWER, transport_error()) as error:
        user_error = _user_error(repo, error)
        if user_error is None:
            raise
        raise user_error from None


def _user_error(repo: str, error: BaseException) -> UserError | None:
    """Return what went wrong for the user; None for a file of this machine."""
    from huggingface_hub import errors

    causes = causes_of(error)
    if any(isinstance(cause, errors.LocalTokenNotFoundError) for cause in causes):
        return UserError(
            "hub.no_token",
            "not logged in: run `hf auth login`, or set HF_TOKEN to a token that may write",
        )

    # The reply of the hub, if it was one, decides; the root cause is shown in brackets.
    root_cause = causes[-1]
    detail = f"({type(root_cause).__name__}: {' '.join(str(root_cause).split())[:300]})"
    replies = [cause.response for cause in causes if isinstance(cause, errors.HfHubHTTPError)]
    status = next((reply.status_code for reply in replies if reply is not None), None)

    # An answer of something between here and the hub, such as a proxy's page.
    if isinstance(error, BAD_ANSWER) or any(map(is_page, replies)):
        return UserError(
            "hub.unexpected",
            f"{repo}: {NOT_THE_HUB}; it confirmed no commit {detail}",
            status=status,
        )

    # Answers of the hub, by their HTTP status.
    if status in (401, 403, 404):
        return UserError(
            "hub.no_access",
            f"{repo}: the token has no write access: log in (`hf auth login` or HF_TOKEN) "
            f"with one that has, or choose a name under your own account {detail}",
            status=status,
        )
    if status in (409, 412):
        return UserError(
            "hub.conflict",
            f"{repo} was changed during the push; nothing was committed: run it again {detail}",
            status=status,
        )
    if status == 400 or (status is None and isinstance(error, ValueError)):
        return UserError(
            "hub.rejected",
            f"{repo}: the hub refused the content; nothing was committed {detail}",
            status=status,
        )
    if status is not None:
        return UserError(
            "hub.http_error",
            f"{repo}: the hub returned status {status}, and confirmed no commit: run the "
            f"same command again later {detail}",
            status=status,
        )

    # No answer: a file of this machine, or the network.
    if isinstance(error, OSError) and error.filename:
        return None
    return UserError(
        "hub.unavailable",
        f"{repo}: the hub cannot be reached or the upload broke off, and it confirmed no "
        f"commit: check HF_HUB_OFFLINE and the network, and run it again {detail}",
    )
