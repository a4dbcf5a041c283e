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
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from canon_pretrain.core.errors import UserError, check_choice
from canon_pretrain.core.files import (
    UnreadableFile,
    create_file,
    fsync_folder,
    publish,
    read_record,
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
    """The content of manifest.json; `features` are the columns' types by split."""

    version: int
    key: str
    path: str
    config: str | None
    revision: str
    splits: dict[str, Split]
    features: dict[str, Any]
    packages: dict[str, str]
    time: str


def staged_folder(given: str | Path | None = None) -> Path:
    """Return the folder of staged data: `given`, else $CANON_EVAL_DATA, else outputs/eval_data."""
    return Path(given or os.environ.get(FOLDER_VARIABLE) or DEFAULT_FOLDER).expanduser()


def load(*, dataset: str, staged: str | None = None, **_: Any) -> dict[str, "datasets.Dataset"]:
    """Load a data set as lm_eval's `custom_dataset`, which passes metadata and dataset_kwargs."""
    return load_staged(dataset, staged)


def load_staged(key: str, folder: str | Path | None = None) -> dict[str, "datasets.Dataset"]:
    """Return the rows of each split of the data set `key`, in memory, verified.

    Raises UserError, with the command that stages it, if it is missing or not what was staged.
    """
    import datasets
    import pyarrow
    import pyarrow.parquet

    root = staged_folder(folder)
    loaded = {}
    for split, known in read_manifest(key, root).splits.items():
        path = root / key / known.file
        content = _read(path, known, restage(key, root))
        try:
            table = pyarrow.parquet.read_table(io.BytesIO(content))
        except pyarrow.ArrowException as error:
            raise UserError(
                f"{path}: is what was staged, but pyarrow {pyarrow.__version__} cannot read it "
                f"({error}); {restage(key, root)}"
            ) from None
        if table.num_rows != known.rows:
            raise UserError(
                f"{path}: {table.num_rows:,} rows, {MANIFEST} says {known.rows:,}; "
                f"{restage(key, root)}"
            )
        # not Dataset.from_parquet: that would copy it into a cache, which may be read-only
        loaded[split] = datasets.Dataset(table)
    return loaded


def staged_sha256(key: str, folder: str | Path | None = None) -> str:
    """Return the SHA-256 of the rows: the same wherever and with whatever pyarrow it was staged."""
    splits = read_manifest(key, staged_folder(folder)).splits
    lines = [f"{split} {splits[split].rows_sha256}\n" for split in sorted(splits)]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def verify(key: str, folder: Path) -> Manifest:
    """Return the manifest of `key` if all its files have the bytes that it names."""
    manifest = read_manifest(key, folder)
    for known in manifest.splits.values():
        _read(folder / key / known.file, known, restage(key, folder))
    return manifest


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


def _read(path: Path, known: Split, way_out: str) -> bytes:
    """Return the bytes of a staged file: hashed as used, so that nothing changes in between."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        raise UserError(f"{path}: is missing; {way_out}") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None
    found = hashlib.sha256(content).hexdigest()
    if found != known.sha256:
        raise UserError(
            f"{path}: was changed after it was staged ({len(content):,} bytes, sha256 "
            f"{found[:16]}, expected {known.sha256[:16]}); {way_out}"
        )
    return content


def restage(key: str, folder: Path) -> str:
    """Return what to do if the data set `key` is not whole in `folder`."""
    return (
        "on a machine with network: python -m eval stage "
        f"--suite {CATALOGUE[key].suite} --only {key} --to {folder}"
    )


def data_set(key: str) -> DataSet:
    """Return the catalogue's entry. Raises UserError for an unknown key."""
    check_choice("data set", key, CATALOGUE)
    return CATALOGUE[key]


def write_staged(
    folder: str | Path,
    key: str,
    splits: Mapping[str, "datasets.Dataset | Iterable[dict[str, Any]]"],
    *,
    revision: str,
) -> Manifest:
    """Write the data set `key` so that it is staged: files first, manifest.json last.

    A reader sees the old, an error, or the new. One writer per folder at a time: `stage.py` locks
    it.
    """
    import datasets
    import pyarrow

    data, target = data_set(key), Path(folder) / key
    target.mkdir(parents=True, exist_ok=True)
    tables = {
        split: rows if isinstance(rows, datasets.Dataset) else datasets.Dataset.from_list([*rows])
        for split, rows in splits.items()
    }
    manifest = Manifest(
        MANIFEST_VERSION,
        key,
        data.path,
        data.config,
        revision,
        splits={split: _write_split(target, split, rows) for split, rows in tables.items()},
        features={split: rows.features.to_dict() for split, rows in tables.items()},
        packages={"datasets": datasets.__version__, "pyarrow": pyarrow.__version__},
        time=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    )
    (target / MANIFEST).unlink(missing_ok=True)
    # or a crash could leave the old manifest beside new files
    fsync_folder(target)
    for known in manifest.splits.values():
        path = target / known.file
        publish(_temporary(path), path)
    write_json(target / MANIFEST, asdict(manifest))
    return manifest


def _temporary(path: Path) -> Path:
    return path.with_name(path.name + ".tmp")


def _write_split(target: Path, split: str, rows: "datasets.Dataset") -> Split:
    """Write the rows under a temporary name; return what the manifest says of them."""
    import pyarrow.parquet

    path = target / f"{split}.parquet"
    # the column types travel in the schema, where Dataset finds them again
    table = rows.with_format("arrow")[:].cast(rows.features.arrow_schema)
    buffer = io.BytesIO()
    pyarrow.parquet.write_table(table, buffer)
    content = buffer.getvalue()
    try:
        _temporary(path).unlink(missing_ok=True)  # a killed staging's
        with create_file(_temporary(path)) as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
    except OSError:  # a full disk: free the room again
        _temporary(path).unlink(missing_ok=True)
        raise
    digest = hashlib.sha256()
    for row in rows.with_format(None):
        digest.update(json.dumps(row, sort_keys=True, ensure_ascii=False).encode() + b"\n")
    sha256 = hashlib.sha256(content).hexdigest()
    return Split(path.name, table.num_rows, len(content), sha256, digest.hexdigest())
