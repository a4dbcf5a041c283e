"""What was staged, read back and verified: the data of the suites' tasks, without any network.

`stage.py` writes it on a machine that reaches the hub; tasks load it, on machines that may not:

    DIR/KEY/SPLIT.parquet   the rows of one split
    DIR/KEY/manifest.json   written last: where the rows are from, how many, the files' SHA-256

Tasks name it in their YAML, with a key of catalogue.py:

    custom_dataset: !function eval.staging.staged.load
    dataset_kwargs: {dataset: piqa}
"""

import hashlib
import io
import json
import os
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from canon_pretrain.core.errors import UserError, nearest
from canon_pretrain.core.files import create_file, fsync_folder, publish, write_json
from eval.staging.catalogue import CATALOGUE, DataSet

if TYPE_CHECKING:
    import datasets

FOLDER_VARIABLE = "CANON_EVAL_DATA"
DEFAULT_FOLDER = Path("outputs") / "eval_data"
MANIFEST = "manifest.json"
MANIFEST_VERSION = 1


def staged_folder(given: str | Path | None = None) -> Path:
    """The folder of staged data: `given`, else $CANON_EVAL_DATA, else outputs/eval_data."""
    return Path(given or os.environ.get(FOLDER_VARIABLE) or DEFAULT_FOLDER).expanduser()


def load(*, dataset: str, staged: str | None = None, **_: Any) -> dict[str, "datasets.Dataset"]:
    """lm_eval's `custom_dataset`: it passes a task's metadata and dataset_kwargs.

    Raises UserError as `load_staged`.
    """
    return load_staged(dataset, staged)


def load_staged(key: str, folder: str | Path | None = None) -> dict[str, "datasets.Dataset"]:
    """The rows of each split of the data set `key`, in memory; verified against its manifest.

    Raises UserError, with the command that stages it, where it is missing or not what was staged.
    """
    import datasets
    import pyarrow
    import pyarrow.parquet

    root = staged_folder(folder)
    loaded = {}
    for split, known in read_manifest(key, root)["splits"].items():
        path = root / key / known["file"]
        content = _read(path, known, restage(key, root))
        try:
            table = pyarrow.parquet.read_table(io.BytesIO(content))
        except pyarrow.ArrowException as error:
            raise UserError(
                f"{path}: is what was staged, but pyarrow {pyarrow.__version__} cannot read it "
                f"({error}); {restage(key, root)}"
            ) from None
        if table.num_rows != known["rows"]:
            raise UserError(
                f"{path}: {table.num_rows:,} rows, {MANIFEST} says {known['rows']:,}; "
                f"{restage(key, root)}"
            )
        # not Dataset.from_parquet: that would copy it into a cache, which may be read-only
        loaded[split] = datasets.Dataset(table)
    return loaded


def staged_sha256(key: str, folder: str | Path | None = None) -> str:
    """The SHA-256 of the rows: the same wherever and with whatever pyarrow they were staged."""
    splits = read_manifest(key, staged_folder(folder))["splits"]
    lines = [f"{split} {splits[split]['rows_sha256']}\n" for split in sorted(splits)]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def verify(key: str, folder: Path) -> dict[str, Any]:
    """The manifest of `key`, once all its files have the bytes that it names. Raises UserError."""
    manifest = read_manifest(key, folder)
    for known in manifest["splits"].values():
        _read(folder / key / known["file"], known, restage(key, folder))
    return manifest


def read_manifest(key: str, folder: Path) -> dict[str, Any]:
    """The manifest of `key` in `folder`.

    Raises UserError where it is missing, damaged, or of another data set than the catalogue's.
    """
    data = data_set(key)
    path = folder / key / MANIFEST
    try:
        manifest = json.loads(path.read_bytes())
        named = {name: manifest[name] for name in ("key", "path", "config")}
        version, splits = manifest["version"], manifest["splits"]
        for known in splits.values():
            _ = known["file"], known["rows"], known["sha256"], known["rows_sha256"]
    except FileNotFoundError:
        raise UserError(f"{path.parent}: not staged; {restage(key, folder)}") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise UserError(f"{path}: is damaged; {restage(key, folder)}") from None
    expected = {"key": data.key, "path": data.path, "config": data.config}
    if version != MANIFEST_VERSION or named != expected or set(splits) != {data.split}:
        raise UserError(
            f"{path}: of {named} with splits {', '.join(splits)} (version {version}), expected "
            f"{expected} with {data.split} (version {MANIFEST_VERSION}); "
            f"{restage(key, folder)}"
        )
    return manifest


def _read(path: Path, known: Mapping[str, Any], way_out: str) -> bytes:
    """The bytes of a staged file: hashed as they are used, so that nothing changes in between."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        raise UserError(f"{path}: is missing; {way_out}") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None
    found = hashlib.sha256(content).hexdigest()
    if found != known["sha256"]:
        raise UserError(
            f"{path}: was changed after it was staged ({len(content):,} bytes, sha256 "
            f"{found[:16]}, expected {known['sha256'][:16]}); {way_out}"
        )
    return content


def restage(key: str, folder: Path) -> str:
    """What to do where the data set `key` is not whole in `folder`."""
    return (
        "on a machine with network: python -m eval stage "
        f"--suite {CATALOGUE[key].suite} --only {key} --to {folder}"
    )


def data_set(key: str) -> DataSet:
    """The catalogue's entry. Raises UserError for an unknown key."""
    if key not in CATALOGUE:
        near = nearest(key, CATALOGUE)
        raise UserError(
            f"unknown data set '{key}'{f', did you mean {near!r}?' if near else ''}; known: "
            f"{', '.join(CATALOGUE)}"
        )
    return CATALOGUE[key]


def write_staged(
    folder: str | Path,
    key: str,
    splits: Mapping[str, "datasets.Dataset | Iterable[dict[str, Any]]"],
    *,
    revision: str,
) -> dict[str, Any]:
    """Write the data set `key` so that it is staged: files first, manifest.json last.

    What was staged there before goes only once the new files are written: a reader sees the old, an
    error, or the new. One writer a folder at a time: `stage.py` locks it. Returns the manifest.
    """
    import datasets
    import pyarrow

    data, target = data_set(key), Path(folder) / key
    target.mkdir(parents=True, exist_ok=True)
    tables = {
        split: rows if isinstance(rows, datasets.Dataset) else datasets.Dataset.from_list([*rows])
        for split, rows in splits.items()
    }
    written = {split: _write_split(target, split, rows) for split, rows in tables.items()}
    manifest = {
        "version": MANIFEST_VERSION,
        "key": key,
        "path": data.path,
        "config": data.config,
        "revision": revision,
        "splits": written,
        "features": {split: rows.features.to_dict() for split, rows in tables.items()},
        "packages": {"datasets": datasets.__version__, "pyarrow": pyarrow.__version__},
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }
    (target / MANIFEST).unlink(missing_ok=True)
    # or a crash could leave the old manifest beside new files
    fsync_folder(target)
    for known in written.values():
        path = target / known["file"]
        publish(_temporary(path), path)
    write_json(target / MANIFEST, manifest)
    return manifest


def _temporary(path: Path) -> Path:
    return path.with_name(path.name + ".tmp")


def _write_split(target: Path, split: str, rows: "datasets.Dataset") -> dict[str, Any]:
    """Write the rows under a temporary name; what the manifest says of them."""
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
    except OSError:  # a full disk: give the room back
        _temporary(path).unlink(missing_ok=True)
        raise
    return {
        "file": path.name,
        "rows": table.num_rows,
        "bytes": len(content),
        "sha256": hashlib.sha256(content).hexdigest(),
        "rows_sha256": _rows_sha256(rows),
    }


def _rows_sha256(rows: "datasets.Dataset") -> str:
    digest = hashlib.sha256()
    for row in rows.with_format(None):
        digest.update(json.dumps(row, sort_keys=True, ensure_ascii=False).encode() + b"\n")
    return digest.hexdigest()
