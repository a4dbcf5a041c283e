"""The staged data of the suites' tasks, read back and verified without any network.

    DIR/KEY/SPLIT.parquet   the rows of one split
    DIR/KEY/manifest.json   written last: where the rows are from, how many, the files' SHA-256

A task's YAML names them: `custom_dataset: !function eval.staging.staged.load`, with
`dataset_kwargs: {dataset: KEY}`.
"""

import hashlib
import io
import json
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from canon_pretrain.core.errors import UserError, check_choice
from canon_pretrain.core.files import (
    UnreadableFile,
    fsync_folder,
    publish,
    read_record,
    remove_leftovers,
    write_atomic,
    write_json,
)
from eval.staging.catalogue import CATALOGUE, DataSet

if TYPE_CHECKING:
    import datasets

FOLDER_VARIABLE = "CANON_EVAL_DATA"
DEFAULT_FOLDER = Path("outputs") / "eval_data"
MANIFEST = "manifest.json"
MANIFEST_VERSION = 1


@dataclass(frozen=True)
class Split:
    """One file of a data set; `sha256` is the file's, `rows_sha256` that of its rows as JSON."""

    file: str
    rows: int
    bytes: int
    sha256: str
    rows_sha256: str


@dataclass(frozen=True)
class Manifest:
    """The content of manifest.json."""

    version: int
    key: str
    path: str
    config: str | None
    revision: str
    splits: dict[str, Split]


def staged_folder(given: str | Path | None = None) -> Path:
    """Return the folder of staged data: `given`, else $CANON_EVAL_DATA, else outputs/eval_data."""
    return Path(given or os.environ.get(FOLDER_VARIABLE) or DEFAULT_FOLDER).expanduser()


def load(*, dataset: str, staged: str | None = None, **_: Any) -> dict[str, "datasets.Dataset"]:
    """Load a data set as lm_eval's `custom_dataset`, which passes metadata and dataset_kwargs."""
    return {data_set(dataset).split: load_staged(dataset, staged)}


def load_staged(key: str, folder: str | Path | None = None) -> "datasets.Dataset":
    """Return the rows of the data set `key`, in memory; UserError unless they are as staged."""
    import datasets
    import pyarrow.parquet

    _, content = verify(key, staged_folder(folder))
    # not Dataset.from_parquet: that would copy it into a cache, which may be read-only
    return datasets.Dataset(pyarrow.parquet.read_table(io.BytesIO(content)))


def read_manifest(key: str, folder: Path) -> Manifest:
    """Return the manifest of `key`; UserError if missing, damaged or of other data."""
    data, path = data_set(key), folder / key / MANIFEST
    try:
        manifest = read_record(path, Manifest)
    except UnreadableFile as error:
        fault = f"{path.parent}: not staged" if error.is_missing else str(error)
        raise UserError(f"{fault}; {restage(key, folder)}") from None
    expected = {"version": MANIFEST_VERSION, "key": key, "path": data.path, "config": data.config}
    found = {name: getattr(manifest, name) for name in expected}
    if found != expected or set(manifest.splits) != {data.split}:
        raise UserError(
            f"{path}: of {found} with splits {', '.join(manifest.splits)}, expected {expected} "
            f"with {data.split}; {restage(key, folder)}"
        )
    return manifest


def verify(key: str, folder: Path) -> tuple[Manifest, bytes]:
    """Return the manifest of `key` and its file, if that has the bytes that were staged."""
    manifest = read_manifest(key, folder)
    (known,) = manifest.splits.values()
    path = folder / key / known.file
    try:
        content = path.read_bytes()
    except OSError as error:
        fault = f"cannot be read: {error.strerror}"
    else:
        found = hashlib.sha256(content).hexdigest()
        if found == known.sha256:
            return manifest, content
        fault = f"was changed after it was staged (sha256 {found[:16]}, not {known.sha256[:16]})"
    raise UserError(f"{path}: {fault}; {restage(key, folder)}")


def restage(key: str, folder: Path) -> str:
    """Return what to do if the data set `key` is not whole in `folder`."""
    command = f"python -m eval stage --suite {CATALOGUE[key].suite} --only {key} --to {folder}"
    return f"on a machine with network: {command}"


def data_set(key: str) -> DataSet:
    """Return the catalogue's entry. Raises UserError for an unknown key."""
    check_choice("data set", key, CATALOGUE)
    return CATALOGUE[key]


def write_staged(
    folder: str | Path,
    key: str,
    rows: "datasets.Dataset | Iterable[dict[str, Any]]",
    *,
    revision: str,
) -> Manifest:
    """Write the data set `key`; a reader sees the old, an error, or the new."""
    import datasets
    import pyarrow.parquet

    data, target = data_set(key), Path(folder) / key
    if not isinstance(rows, datasets.Dataset):
        rows = datasets.Dataset.from_list([*rows])
    # the column types travel in the schema, where Dataset finds them again
    table = rows.with_format("arrow")[:].cast(rows.features.arrow_schema)
    buffer = io.BytesIO()
    pyarrow.parquet.write_table(table, buffer)
    content = buffer.getvalue()
    rows_sha256 = hashlib.sha256()
    for row in rows.with_format(None):
        rows_sha256.update(json.dumps(row, sort_keys=True, ensure_ascii=False).encode() + b"\n")
    file, sha256 = f"{data.split}.parquet", hashlib.sha256(content).hexdigest()
    splits = {data.split: Split(file, len(rows), len(content), sha256, rows_sha256.hexdigest())}
    manifest = Manifest(MANIFEST_VERSION, key, data.path, data.config, revision, splits)
    target.mkdir(parents=True, exist_ok=True)
    remove_leftovers(target)
    write_atomic(target / f"{file}.next", content)  # a full disk leaves what is staged
    (target / MANIFEST).unlink(missing_ok=True)
    fsync_folder(target)  # or a crash could leave the old manifest beside a new file
    publish(target / f"{file}.next", target / file)
    write_json(target / MANIFEST, asdict(manifest))
    return manifest
