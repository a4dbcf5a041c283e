"""`eval stage`: download the suites' data sets once, at fixed commits, for offline machines.

DIR/pins.json names a commit per repository that the catalogue does not pin, or that the user chose.
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
from eval import staged
from eval.staged import CATALOGUE, SUITES, DataSet, Manifest

if TYPE_CHECKING:
    import datasets

Commit = Annotated[str, Field(pattern=f"^{hub.COMMIT.pattern}$")]

LOCK, DOWNLOADS, PINS = ".stage.lock", ".stage.tmp", "pins.json"
ALL = "all"
HUB_HINTS = hub.HubHints(
    revision="choose another commit with --pin KEY=COMMIT",
    without_hub=(
        "run `python -m eval stage` on a machine with network, such as a login node, and copy the "
        "folder of --to here"
    ),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `eval stage`."""
    add = parser.add_argument
    add("--suite", default=ALL, help=f"{', '.join(SUITES)} or {ALL} (%(default)s)")
    about = f"the folder (default: ${staged.FOLDER_VARIABLE}, else {staged.DEFAULT_FOLDER})"
    add("--to", type=Path, metavar="DIR", help=about)
    add("--only", nargs="+", metavar="KEY", help="these data sets of the suite")
    about = f"stage this commit of KEY's repository, now and later; kept in DIR/{PINS}"
    add("--pin", nargs="+", default=[], metavar="KEY=COMMIT", help=about)
    about = "accept another number of documents than the catalogue's"
    add("--allow_count", "--allow-count", action="store_true", help=about)
    add("--check", action="store_true", help="only verify the hashes of what is staged; no network")


def execute(arguments: argparse.Namespace) -> None:
    """Stage what the arguments name, or check it."""
    folder = staged.staged_folder(arguments.to)
    chosen = choose(arguments.suite, arguments.only)
    if arguments.check:
        check = lambda data: _described(staged.verify(data.key, folder)[0], data)  # noqa: E731
        return _each(folder, chosen, check, "whole")
    waits = f"waits: another process is staging into {folder}"
    wait = lambda: print(waits, flush=True)  # noqa: E731
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with locked(folder / LOCK, str(folder), patience_s=math.inf, on_wait=wait):
            add_pins(folder, parse_pins(arguments.pin))
            shutil.rmtree(folder / DOWNLOADS, ignore_errors=True)  # what a killed one left
            try:
                allows = arguments.allow_count
                _each(folder, chosen, lambda data: _stage(folder, data, allows), "staged")
            finally:
                shutil.rmtree(folder / DOWNLOADS, ignore_errors=True)
    except OSError as error:
        raise UserError(
            "todo.stage",
            f"{folder}: cannot be written: {error.strerror}; make room, or choose another folder "
            "with --to, and run the same command again: what is staged stays",
        ) from None


def choose(suite: str, only: Sequence[str] | None) -> list[DataSet]:
    """Return the data sets of a suite, or of all, and of them those of `only`."""
    check_choice("--suite", suite, (*SUITES, ALL))
    found = [data for data in CATALOGUE.values() if suite in (ALL, data.suite)]
    for key in only or ():
        if staged.data_set(key) not in found:
            raise UserError("todo.stage", f"--only {key}: is of another suite than --suite {suite}")
    return [data for data in found if only is None or data.key in only]


def read_pins(folder: Path) -> dict[str, str]:
    """Return the commit by repository of `folder`/pins.json."""
    try:
        return read_record(folder / PINS, dict[str, Commit])
    except UnreadableFile as error:
        if error.is_missing:
            return {}
        raise UserError("todo.stage", f"{error}; restore it, or delete it to pin anew") from None


def add_pins(folder: Path, commits: dict[str, str]) -> None:
    """Pin repositories from now on."""
    known = read_pins(folder)
    if known | commits != known:
        write_json(folder / PINS, dict(sorted((known | commits).items())))


def parse_pins(given: Sequence[str]) -> dict[str, str]:
    """Return the commit by repository of the words KEY=COMMIT."""
    chosen: dict[str, str] = {}
    for pin in given:
        key, _, commit = pin.partition("=")
        if not hub.COMMIT.fullmatch(commit):
            raise UserError(
                "todo.stage", f"--pin {pin}: expected KEY=COMMIT, 40 hex digits of a commit"
            )
        path = staged.data_set(key).path
        if chosen.setdefault(path, commit) != commit:
            raise UserError(
                "todo.stage", f"--pin {pin}: two commits of {path}; a repository has one"
            )
    return chosen


def _each(folder: Path, chosen: list[DataSet], act: Callable[[DataSet], str], state: str) -> None:
    failed: list[str] = []
    for number, data in enumerate(chosen, 1):
        try:
            line = act(data)
        except hub.HubUnavailable:
            raise
        except UserError as error:
            line = f"refused: {error}"
            failed.append(data.key)
        print(f"[{number}/{len(chosen)}] {data.key}: {line}", flush=True)
    if failed:
        count = f"{len(failed)} of {len(chosen)} data sets"
        raise UserError(
            "todo.stage", f"{count} are not {state} in {folder}: {', '.join(failed)}; see above"
        )
    print(f"{state} in {folder}: {len(chosen)} of {len(chosen)} data sets", flush=True)


def _stage(folder: Path, data: DataSet, allow_count: bool) -> str:
    pinned = read_pins(folder).get(data.path) or data.revision
    with suppress(UserError):  # not staged, or not whole
        manifest, _ = staged.verify(data.key, folder)
        if pinned in (None, manifest.revision):
            # without a pins.json: the folder came from elsewhere, and keeps its own commit
            if pinned is None:
                add_pins(folder, {data.path: manifest.revision})
            return f"is staged, {_described(manifest, data)}"
    commit = hub.find_commit(data.path, pinned, HUB_HINTS)
    if pinned is None:
        add_pins(folder, {data.path: commit})
    what, way_out = f"{data.path}@{commit[:12]} {data.split}", f"--pin {data.key}=COMMIT"
    print(f"    {what} ...", flush=True)
    rows = fetch(data, commit, folder / DOWNLOADS)
    if missing := [name for name in data.columns if name not in rows.column_names]:
        raise UserError(
            "todo.stage",
            f"{what}: has no column {', '.join(missing)} (but {', '.join(rows.column_names)}); "
            f"choose another commit with {way_out}",
        )
    if not len(rows) or (not allow_count and len(rows) != data.documents):
        raise UserError(
            "todo.stage",
            f"{what}: {len(rows):,} documents, expected {data.documents:,}; choose another commit "
            f"with {way_out}, or accept them with --allow_count",
        )
    return _described(staged.write_staged(folder, data.key, rows, revision=commit), data)


def fetch(data: DataSet, commit: str, cache: Path) -> "datasets.Dataset":
    """Return the rows of `data` at `commit`, for as long as `cache` is there."""
    import datasets
    from datasets.exceptions import DatasetsError
    from huggingface_hub.utils import disable_progress_bars

    datasets.disable_progress_bars()
    disable_progress_bars()
    # ValueError: no such configuration, no such split
    unexpected = (DatasetsError, ValueError)
    with hub.hub_errors(data.path, commit, HUB_HINTS, unexpected=unexpected):
        # `cache` has no other revision: if the hub fails, `datasets` takes what is there
        return datasets.load_dataset(
            data.path, data.config, split=data.split, revision=commit, cache_dir=str(cache)
        )


def _described(manifest: Manifest, data: DataSet) -> str:
    known = manifest.splits[data.split]
    odd = f" (expected {data.documents:,})" if known.rows != data.documents else ""
    return f"{known.rows:,} documents{odd}, {size(known.bytes)}, commit {manifest.revision[:12]}"
