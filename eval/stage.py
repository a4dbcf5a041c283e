"""`eval stage`: download the suites' data sets once, at fixed commits, for offline machines.

DIR/pins.json has the commits of repositories that the catalogue does not pin or the user chose.
"""

import argparse
import math
import shutil
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from canon_pretrain.core.errors import UserError, check_choice
from canon_pretrain.core.files import UnreadableFile, read_record, write_json
from canon_pretrain.core.lock import locked
from canon_pretrain.core.terminal import size
from canon_pretrain.data import hub
from eval.staged import (
    CATALOGUE,
    DEFAULT_FOLDER,
    FOLDER_VARIABLE,
    SUITES,
    DataSet,
    Manifest,
    data_set,
    staged_folder,
    verify,
    write_staged,
)

if TYPE_CHECKING:
    import datasets

Commit = Annotated[str, Field(pattern=f"^{hub.COMMIT.pattern}$")]

LOCK = ".stage.lock"
DOWNLOADS = ".stage.tmp"
PINS = "pins.json"
ALL = "all"
HUB_HINTS = hub.HubHints(
    revision="choose another commit with --pin KEY=COMMIT",
    without_hub="run `canon eval stage` on a machine with network and copy the folder of --to",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument

    # Which data sets, and where to.
    add("--suite", default=ALL, help=f"{', '.join(SUITES)} or {ALL} (%(default)s)")
    add(
        "--out",
        "--to",
        dest="to",
        type=Path,
        metavar="DIR",
        help=f"the folder (default: ${FOLDER_VARIABLE}, else {DEFAULT_FOLDER})",
    )
    add("--only", nargs="+", metavar="KEY", help="only these data sets of the suite")

    # Which versions are accepted.
    add(
        "--pin",
        nargs="+",
        default=[],
        metavar="KEY=COMMIT",
        help=f"use this commit of KEY's repository from now on; stored in DIR/{PINS}",
    )
    add(
        "--allow-count",
        action="store_true",
        help="accept a different number of documents than the catalogue's",
    )
    add("--check", action="store_true", help="only verify the staged files' hashes; no network")


def run(arguments: argparse.Namespace) -> None:
    """Stage the chosen data sets, or verify them."""
    folder = staged_folder(arguments.to)
    chosen = select_data_sets(arguments.suite, arguments.only)

    if arguments.check:
        _process_each(
            folder,
            chosen,
            lambda data: _summary(verify(data.key, folder).manifest, data),
            "whole",
        )
        return

    # One process at a time stages into a folder: the others wait.
    downloads = folder / DOWNLOADS
    waiting = f"waiting: another process is staging into {folder}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with locked(
            folder / LOCK,
            str(folder),
            patience_s=math.inf,
            on_wait=lambda: print(waiting, flush=True),
        ):
            add_pins(folder, parse_pins(arguments.pin))
            shutil.rmtree(downloads, ignore_errors=True)  # of a killed process
            try:
                _process_each(
                    folder,
                    chosen,
                    lambda data: _stage(folder, data, arguments.allow_count),
                    "staged",
                )
            finally:
                shutil.rmtree(downloads, ignore_errors=True)
    except OSError as error:
        raise UserError(
            "eval.cannot_write",
            f"{folder} can't be written: {error.strerror}; make room or choose another "
            "folder with --to, and repeat the command, which resumes",
            path=folder,
        ) from None


def select_data_sets(suite: str, only: Sequence[str] | None) -> list[DataSet]:
    """Return the data sets of a suite or of all, restricted to `only`."""
    check_choice("--suite", suite, (*SUITES, ALL))
    of_suite = [data for data in CATALOGUE.values() if suite in (ALL, data.suite)]
    for key in only or ():
        if data_set(key) not in of_suite:
            raise UserError("stage.only", f"--only {key}: not of --suite {suite}", key=key)
    return [data for data in of_suite if only is None or data.key in only]


def read_pins(folder: Path) -> dict[str, str]:
    """Return the pinned commit by repository from `folder`/pins.json."""
    try:
        return read_record(folder / PINS, dict[str, Commit])
    except UnreadableFile as error:
        if error.is_missing:
            return {}
        raise UserError("stage.pins", f"{error}; restore it, or delete it to pin again") from None


def add_pins(folder: Path, commits: dict[str, str]) -> None:
    """Add commits by repository to `folder`/pins.json."""
    before = read_pins(folder)
    after = before | commits
    if after != before:
        write_json(folder / PINS, dict(sorted(after.items())))


def parse_pins(pins: Sequence[str]) -> dict[str, str]:
    """Return the commit by repository for arguments KEY=COMMIT."""
    commits: dict[str, str] = {}
    for pin in pins:
        key, _, commit = pin.partition("=")
        if not hub.COMMIT.fullmatch(commit):
            raise UserError(
                "stage.pin",
                f"--pin {pin}: expected KEY=COMMIT with the commit's 40 hex digits",
                given=pin,
            )

        # several data sets may be of one repository
        repository = data_set(key).path
        if commits.setdefault(repository, commit) != commit:
            raise UserError("stage.pin", f"--pin {pin}: two commits for {repository}", given=pin)
    return commits


def _process_each(
    folder: Path, chosen: list[DataSet], act: Callable[[DataSet], str], state: str
) -> None:
    """Print the line that `act` returns of each data set, or its error, and continue."""
    failed: list[str] = []
    total = len(chosen)
    for number, data in enumerate(chosen, 1):
        try:
            line = act(data)
        except hub.HubUnavailable:  # the others would fail too
            raise
        except UserError as error:
            line = f"error[{error.code}]: {error}"
            failed.append(data.key)
        print(f"[{number}/{total}] {data.key}: {line}", flush=True)

    if failed:
        raise UserError(
            "stage.incomplete",
            f"{len(failed)} of {total} data sets are not {state} in {folder}: "
            f"{', '.join(failed)}; see above",
            failed=failed,
        )
    print(f"{state} in {folder}: {total} of {total} data sets", flush=True)


def _stage(folder: Path, data: DataSet, allow_count: bool) -> str:
    """Download a data set unless it is staged at its pinned commit; return a summary."""
    # A whole data set is not downloaded again.
    pinned = read_pins(folder).get(data.path) or data.revision
    with suppress(UserError):  # not staged or damaged
        manifest = verify(data.key, folder).manifest
        if pinned in (None, manifest.revision):
            # the folder was copied without its pins.json: keep its commit
            if pinned is None:
                add_pins(folder, {data.path: manifest.revision})
            return f"is staged, {_summary(manifest, data)}"

    # Download it at its pinned commit, else at the newest, which is pinned from now on.
    commit = hub.find_commit(data.path, pinned, HUB_HINTS)
    if pinned is None:
        add_pins(folder, {data.path: commit})
    source = f"{data.path}@{commit[:12]} {data.split}"
    print(f"    {source} ...", flush=True)
    rows = download(data, commit, folder / DOWNLOADS)

    # The repository may have changed since the catalogue was written.
    remedy = f"choose another commit with --pin {data.key}=COMMIT"
    missing = [name for name in data.columns if name not in rows.column_names]
    if missing:
        raise UserError(
            "stage.columns",
            f"{source}: no column {', '.join(missing)} (but {', '.join(rows.column_names)}); "
            f"{remedy}",
        )
    if not len(rows) or (not allow_count and len(rows) != data.documents):
        raise UserError(
            "stage.documents",
            f"{source}: {len(rows):,} documents, expected {data.documents:,}; {remedy}, or pass "
            "--allow-count",
        )
    return _summary(write_staged(folder, data.key, rows, revision=commit), data)


def download(data: DataSet, commit: str, cache: Path) -> "datasets.Dataset":
    """Return the rows of `data` at `commit`; they are memory-mapped from `cache`."""
    import datasets
    from datasets.exceptions import DatasetsError
    from huggingface_hub.utils import disable_progress_bars

    datasets.disable_progress_bars()
    disable_progress_bars()
    # ValueError: no such configuration, no such split
    unexpected = (DatasetsError, ValueError)
    with hub.hub_errors(data.path, commit, HUB_HINTS, unexpected=unexpected):
        # `cache` must have no other revision: `datasets` falls back to it if the hub fails
        return datasets.load_dataset(
            data.path,
            data.config,
            split=data.split,
            revision=commit,
            cache_dir=str(cache),
        )


def _summary(manifest: Manifest, data: DataSet) -> str:
    split = manifest.splits[data.split]
    documents = f"{split.rows:,} documents"
    if split.rows != data.documents:
        documents = f"{documents} (expected {data.documents:,})"
    return f"{documents}, {size(split.bytes)}, commit {manifest.revision[:12]}"
