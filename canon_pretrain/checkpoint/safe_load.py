"""Read a checkpoint without running its pickles: an allow-list, and torch's weights-only load.

`.metadata` may contain only what torch 2.11 to 2.13 write into it, and entries that are not tensors
only what torch.load(weights_only=True) accepts; torch's own reader runs anything.

    dcp.load(state, storage_reader=SafeReader(checkpoint), planner=SafePlanner())
"""

import io
import pathlib
import pickle
import re
from collections.abc import Callable
from enum import Enum
from pathlib import Path, PurePosixPath
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import metadata as records
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem
from torch.serialization import _get_layout

from canon_pretrain.checkpoint.manifest import DamagedCheckpoint

METADATA = ".metadata"

RECORDS = (
    _StorageInfo,
    Metadata,
    MetadataIndex,
    records.StorageMeta,
    records.ChunkStorageMetadata,
    records.BytesStorageMetadata,
    records.TensorProperties,
    records.TensorStorageMetadata,
)
_FORMATS: type[Enum] = records._MEM_FORMAT_ENCODING
_DTYPES = [dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)]


def _memory_format(encoding: object, name: str) -> Enum:
    """Replace `getattr`: return a member of torch's enum of memory formats, and nothing else."""
    if encoding is not _FORMATS:
        raise pickle.UnpicklingError("it takes an attribute of something else than a memory format")
    return _FORMATS[name]


ALLOWED: dict[tuple[str, str], Callable[..., Any] | torch.dtype] = {
    **{(record.__module__, record.__name__): record for record in RECORDS},
    (_FORMATS.__module__, _FORMATS.__name__): _FORMATS,
    # how Python 3.11.2 (Debian 12) pickles a member of an enum; newer ones call the class
    ("builtins", "getattr"): _memory_format,
    ("torch.serialization", "_get_layout"): _get_layout,
    ("torch", "Size"): torch.Size,
    **{("torch", str(dtype).removeprefix("torch.")): dtype for dtype in _DTYPES},
    # the path it was written to
    ("pathlib", "PosixPath"): pathlib.PosixPath,
    ("pathlib._local", "PosixPath"): pathlib.PosixPath,  # its name in Python 3.13
}
"""The globals that `.metadata` may name, by module and name. None of them has side effects."""


class _MetadataUnpickler(pickle._Unpickler):
    """The standard library's Python unpickler, whose BUILD can be restricted."""

    def find_class(self, module: str, name: str) -> Any:
        try:
            return ALLOWED[module, name]
        except KeyError:
            raise pickle.UnpicklingError(f"it names {module}.{name}; it was not run") from None

    def _build(self) -> None:
        # otherwise a pickle could set attributes of the allowed classes, for the whole process
        if type(self.stack[-2]) not in RECORDS:  # type: ignore[attr-defined]
            raise pickle.UnpicklingError("it sets attributes of something else than a record")
        self.load_build()  # type: ignore[attr-defined]

    dispatch = pickle._Unpickler.dispatch | {pickle.BUILD[0]: _build}  # type: ignore[assignment]


def read_metadata(checkpoint: Path, content: bytes | None = None) -> Metadata:
    """Return a checkpoint's metadata, from the file or `content`. Raises DamagedCheckpoint."""
    path = checkpoint / METADATA
    try:
        if content is None:
            content = path.read_bytes()
        metadata = _MetadataUnpickler(io.BytesIO(content)).load()
        _check_metadata(metadata)
        return metadata
    except FileNotFoundError:
        raise DamagedCheckpoint("checkpoint.damaged", f"{path} is missing", path=path) from None
    except Exception as error:  # from damaged bytes an unpickler may raise anything
        reason = describe(error)
        if isinstance(error, pickle.UnpicklingError):
            reason = str(error)
        raise DamagedCheckpoint(
            "checkpoint.damaged", f"{path} is damaged: {reason}", path=path
        ) from error


def _check_metadata(metadata: object) -> None:
    """Raise UnpicklingError unless all entries are stored in files of the checkpoint."""
    if not isinstance(metadata, Metadata):
        raise pickle.UnpicklingError(f"it holds a {type(metadata).__name__}, expected Metadata")

    # A reader must not open files outside of the checkpoint.
    for info in metadata.storage_data.values():
        path = PurePosixPath(info.relative_path)
        if path.is_absolute() or ".." in path.parts or not path.parts:
            raise pickle.UnpicklingError(f"it names the file {info.relative_path!r}")

    for name, entry in metadata.state_dict_metadata.items():
        # a tensor has a location per chunk, any other entry one
        chunks = getattr(entry, "chunks", None)
        offsets = [None] if chunks is None else [chunk.offsets for chunk in chunks]
        for offset in offsets:
            if MetadataIndex(name, offset) not in metadata.storage_data:
                raise pickle.UnpicklingError(f"it has no location of {name}")


class SafeReader(dcp.FileSystemReader):
    """torch's reader with `metadata`, or with that of `read_metadata`."""

    def __init__(self, path: Path, metadata: Metadata | None = None) -> None:
        super().__init__(path)
        self._metadata = metadata

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        # if this fails torch asks again for a rank's own metadata, which we do not write: ignore
        # the arguments, so that a planted one is not read
        metadata = self._metadata or read_metadata(Path(self.path))
        if metadata.storage_meta is None:
            metadata.storage_meta = records.StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


class SafePlanner(DefaultLoadPlanner):
    """torch's load planner, which loads only plain values from entries that are not tensors."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Load an entry that is not a tensor, as torch's planner does except for weights_only."""
        name = read_item.dest_index.fqn
        try:
            loaded = torch.load(value, map_location="cpu", weights_only=True)
        except Exception as error:  # from damaged bytes torch.load may raise anything
            fault = f"cannot be loaded: {describe(error)}"
            # torch's message of a pickle that names a function or class
            if match := re.search(r"GLOBAL (\S+)", str(error)):
                fault = f"names {match[1]}, which is not a plain value; it was not run"
            raise DamagedCheckpoint(
                "checkpoint.damaged",
                f"the checkpoint is damaged: its entry {name} {fault}",
                entry=name,
            ) from error

        # where the value belongs: in nested dicts, which torch flattens, or under its name
        if self.flatten_state_dict:
            set_element(self.original_state_dict, self.mappings[name], loaded)
        else:
            self.state_dict[name] = loaded


def check_safe(checkpoint: Path, content: bytes | None = None) -> Metadata:
    """Return the metadata of a checkpoint, after loading all that is pickled. DamagedCheckpoint."""
    metadata = read_metadata(checkpoint, content)

    # Plan to load all entries that are not tensors: they are pickled, and have no size.
    items: list[ReadItem] = []
    no_size = torch.Size(())
    for name, entry in metadata.state_dict_metadata.items():
        if isinstance(entry, records.BytesStorageMetadata):
            index = MetadataIndex(name)
            items.append(
                ReadItem(
                    type=LoadItemType.BYTE_IO,
                    dest_index=index,
                    dest_offsets=no_size,
                    storage_index=index,
                    storage_offsets=no_size,
                    lengths=no_size,
                )
            )

    # Load them; the values are not needed.
    reader = SafeReader(checkpoint)
    reader.set_up_storage_reader(metadata, True)
    planner = SafePlanner(flatten_state_dict=False)
    planner.set_up_planner({}, metadata)
    try:
        reader.read_data(LoadPlan(items), planner)
    except DamagedCheckpoint as error:
        fields: Any = error.fields | {"path": checkpoint}
        raise DamagedCheckpoint("checkpoint.damaged", f"{checkpoint}: {error}", **fields) from error
    except (OSError, ValueError, TypeError) as error:  # an offset outside the file, or no file
        raise DamagedCheckpoint(
            "checkpoint.damaged", f"{checkpoint} is damaged: {describe(error)}", path=checkpoint
        ) from error
    return metadata


def describe(error: BaseException) -> str:
    """Return an error in one line; of a CheckpointException, that of the lowest failed rank."""
    if isinstance(error, CheckpointException) and error.failures:
        rank, (failure, _) = min(error.failures.items())
        return f"rank {rank}: {describe(failure)}"
    kind = type(error).__name__
    message = str(error).strip()
    if not message:
        return kind
    first_line = message.splitlines()[0].rstrip()
    return f"{kind}: {first_line}"
