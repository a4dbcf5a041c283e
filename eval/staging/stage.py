"""`eval stage`: download the suites' data sets once, at fixed commits, for offline machines.

    python -m eval stage --suite all --to outputs/eval_data
    python -m eval stage --suite all --to outputs/eval_data --check    # hashes only, no network

Before `eval run`, on a login node. It goes through catalogue.py: commit (pins.py), rows (hub.py),
their number and columns against the catalogue, then the files (staged.py). A data set that is
staged is not touched again: the same command goes on where it was interrupted. DIR may be copied.
"""

import argparse
import errno
import fcntl
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from canon_pretrain.core.errors import UserError, nearest
from eval.staging.catalogue import SUITES, DataSet, of_suites
from eval.staging.hub import StagingEnds, fetch, find_commit
from eval.staging.pins import PINS, Pins
from eval.staging.staged import (
    DEFAULT_FOLDER,
    FOLDER_VARIABLE,
    data_set,
    staged_folder,
    verify,
    write_staged,
)

if TYPE_CHECKING:
    import datasets

LOCK = ".stage.lock"
DOWNLOADS = ".stage.tmp"
ALL = "all"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds those of `eval stage`."""
    parser.description = (
        "Download the suites' data sets at fixed commits, once, on a machine with network; "
        "evaluation then needs none. What is staged is not downloaded again."
    )
    parser.add_argument("--suite", default=ALL, help=f"{', '.join(SUITES)} or {ALL} (%(default)s)")
    parser.add_argument(
        "--to",
        type=Path,
        metavar="DIR",
        help=f"the folder (default: ${FOLDER_VARIABLE}, else {DEFAULT_FOLDER})",
    )
    parser.add_argument("--only", nargs="+", metavar="KEY", help="these data sets of the suite")
    parser.add_argument(
        "--pin",
        nargs="+",
        default=[],
        metavar="KEY=COMMIT",
        help=f"stage this commit of KEY's repository, now and later; kept in DIR/{PINS}",
    )
    parser.add_argument(
        "--allow_count",
        "--allow-count",
        action="store_true",
        help="accept another number of documents than the catalogue's",
    )
    parser.add_argument(
        "--check", action="store_true", help="only verify the hashes of what is staged; no network"
    )


def execute(arguments: argparse.Namespace) -> None:
    """Stage what the arguments name, or check it. Raises UserError where anything is not whole."""
    folder = staged_folder(arguments.to)
    chosen = choose(arguments.suite, arguments.only)
    if arguments.check:
        _check(folder, chosen)
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder):
            pins = Pins(folder)
            pins.choose(arguments.pin)
            _stage_all(folder, chosen, pins, arguments.allow_count)
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        way_out = "make room" if full else "choose another folder with --to"
        raise UserError(
            f"{folder}: cannot be written: {error.strerror}; {way_out} and run the same command "
            "again: what is staged stays"
        ) from None


def choose(suite: str, only: Sequence[str] | None) -> list[DataSet]:
    """The data sets of a suite, or of all, and of them those of `only`. Raises UserError."""
    if suite not in (*SUITES, ALL):
        near = nearest(suite, [*SUITES, ALL])
        raise UserError(
            f"--suite {suite}: has no staged data{f', did you mean {near!r}?' if near else ''}; "
            f"expected {', '.join(SUITES)} or {ALL} (validation needs none, "
            "birth-year only wikitext of discriminative)"
        )
    found = of_suites(SUITES if suite == ALL else [suite])
    if only is None:
        return found
    wanted = [data_set(key) for key in only]
    for data in wanted:
        if data not in found:
            raise UserError(f"--only {data.key}: is of --suite {data.suite}, not of {suite}")
    return [data for data in found if data in wanted]


def _stage_all(folder: Path, chosen: list[DataSet], pins: Pins, allow_count: bool) -> None:
    downloads = folder / DOWNLOADS
    # what a killed one left
    shutil.rmtree(downloads, ignore_errors=True)
    refused: list[str] = []
    try:
        for number, data in enumerate(chosen, 1):
            where = f"[{number}/{len(chosen)}] {data.key}:"
            try:
                print(where, _stage_one(folder, data, pins, allow_count, downloads), flush=True)
            except StagingEnds:
                raise
            except UserError as error:
                print(where, f"refused: {error}", flush=True)
                refused.append(data.key)
    finally:
        shutil.rmtree(downloads, ignore_errors=True)
    if refused:
        raise UserError(
            f"{len(refused)} of {len(chosen)} data sets were not staged in {folder}: "
            f"{', '.join(refused)}; the reasons are above"
        )
    print(f"staged in {folder}: {len(chosen)} of {len(chosen)} data sets", flush=True)


def _stage_one(folder: Path, data: DataSet, pins: Pins, allow_count: bool, downloads: Path) -> str:
    """What was done for one data set, as a line. Raises UserError."""
    commit = pins.get(data)
    staged = _staged(folder, data)
    if staged and commit in (None, staged["revision"]):
        # without a pins.json: the folder came from elsewhere, and goes on at its own commit
        if commit is None:
            pins.add(data, staged["revision"])
        return f"is staged, {_described(staged, data)}"
    began = time.monotonic()
    found = find_commit(data.path, commit)
    if commit is None:
        pins.add(data, found)
    print(f"    {data.path}@{found[:12]} {data.config or ''} {data.split} ...", flush=True)
    rows = fetch(data, found, downloads)
    _expect(rows, data, found, allow_count)
    manifest = write_staged(folder, data.key, {data.split: rows}, revision=found)
    return f"{_described(manifest, data)}, {time.monotonic() - began:.0f} s"


def _staged(folder: Path, data: DataSet) -> dict[str, Any] | None:
    """The manifest of what is whole in the folder, whatever its commit."""
    try:
        return verify(data.key, folder)
    except UserError:
        return None


def _expect(rows: "datasets.Dataset", data: DataSet, commit: str, allow_count: bool) -> None:
    """Raise UserError where rows are not those that the catalogue expects."""
    what = f"{data.path}@{commit[:12]} {data.split}"
    missing = [name for name in data.columns if name not in rows.column_names]
    if missing:
        raise UserError(
            f"{what}: has no column {', '.join(missing)} (but {', '.join(rows.column_names)}), "
            f"which its task needs; choose another commit with --pin {data.key}=COMMIT"
        )
    if not len(rows) or (not allow_count and len(rows) != data.documents):
        raise UserError(
            f"{what}: {len(rows):,} documents, expected {data.documents:,}; choose another commit "
            f"with --pin {data.key}=COMMIT, or accept them with --allow_count"
        )


def _described(manifest: dict[str, Any], data: DataSet) -> str:
    known = manifest["splits"][data.split]
    odd = f" (expected {data.documents:,})" if known["rows"] != data.documents else ""
    return (
        f"{known['rows']:,} documents{odd}, {known['bytes'] / 1e6:.1f} MB, "
        f"commit {manifest['revision'][:12]}"
    )


def _check(folder: Path, chosen: list[DataSet]) -> None:
    broken: list[str] = []
    for data in chosen:
        try:
            print(f"{data.key}: {_described(verify(data.key, folder), data)}", flush=True)
        except UserError as error:
            print(f"{data.key}: {error}", flush=True)
            broken.append(data.key)
    if broken:
        raise UserError(
            f"{len(broken)} of {len(chosen)} data sets are not whole in {folder}: "
            f"{', '.join(broken)}"
        )
    print(f"whole in {folder}: {len(chosen)} of {len(chosen)} data sets", flush=True)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold `folder` for this process alone; the kernel gives it back however the process ends."""
    with open(folder / LOCK, "a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"waits: another process is staging into {folder}", flush=True)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
