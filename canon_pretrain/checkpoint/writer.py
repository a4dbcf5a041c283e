"""Write a checkpoint atomically: it exists completely or not at all.

The steps are DCP's own calls, so every rank receives any rank's failure as CheckpointException:

    coordinator   prepare_global_plan   check that the final name is free; create a temporary folder
    every rank    write_data            write, hash and sync a file
    coordinator   finish                write .metadata and the manifest, sync the folder, rename

A folder with the final name is therefore complete; a failed save leaves the temporary one.
"""

import errno
import hashlib
import os
import shutil
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from canon_pretrain.checkpoint.folder import remove_tree
from canon_pretrain.checkpoint.manifest import (
    DamagedCheckpoint,
    FileEntry,
    Kind,
    Manifest,
    find_faults,
)
from canon_pretrain.core.files import fsync_folder, rename
from canon_pretrain.core.holder import utc_now


class _HashedFile:
    """A new file that hashes (SHA-256) what is written to it, and syncs on close."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.flush = file.flush
        self.fileno = file.fileno
        self.digest = hashlib.sha256()
        self.bytes = 0
        self.failure: OSError | None = None  # of a write, which torch may hide

    def write(self, data: Any) -> int:
        try:
            written = self._file.write(data)
        except OSError as error:
            self.failure = self.failure or error
            raise
        self.digest.update(data)
        self.bytes += written
        return written

    def tell(self) -> int:
        return self.bytes

    def close(self) -> None:
        if self.failure is not None:
            raise self.failure
        if not self._file.closed:  # torch closes it too
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()


class _HashingFileSystem(FileSystem):
    """torch's FileSystem, which records size and hash of every file written."""

    def __init__(self) -> None:
        self.written: dict[str, FileEntry] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike, mode: str) -> Iterator[Any]:
        with open(path, "xb") as file:
            stream = _HashedFile(file)
            try:
                yield stream
                stream.close()
            except RuntimeError as error:
                # torch.save raises "unexpected pos 704 vs 598" on a full disk
                raise stream.failure or error from None
        entry = FileEntry(stream.bytes, stream.digest.hexdigest())
        self.written[os.path.basename(path)] = entry

    def rename(self, path: str | os.PathLike, new_path: str | os.PathLike) -> None:
        super().rename(path, new_path)
        entry = self.written.pop(os.path.basename(path))
        self.written[os.path.basename(new_path)] = entry


@dataclass(frozen=True)
class _WrittenFile(WriteResult):
    """A file of one rank, reported to the coordinator even if it contains no item."""

    name: str
    entry: FileEntry


class VerifiedWriter(dcp.FileSystemWriter):
    """Saves to `temporary`, and renames it to `final` after all files and the manifest are synced.

    One per save, with the same paths on all ranks. If the paths are equal, the caller renames. If
    it fails, with FileExistsError or any rank's OSError, the caller removes `temporary`.
    The coordinator calls `may_commit` before the rename. `origin`: run_id, launch, weights_of.
    """

    def __init__(
        self,
        final: Path,
        temporary: Path,
        *,
        step: int,
        kind: Kind = "full",
        world_size: int,
        may_commit: Callable[[], bool] | None = None,
        **origin: Any,
    ) -> None:
        assert temporary.parent == final.parent, "the checkpoint is published by a rename"
        # One thread: torch loses the errors of further ones. No copying ahead: it uses the stream
        # of the thread's current device, which in a new thread is device 0 on every rank. No sync
        # by torch: _HashedFile syncs.
        super().__init__(
            temporary, sync_files=False, thread_count=1, per_thread_copy_ahead=0, overwrite=False
        )
        self.final = final
        self.temporary = temporary
        self.step = step
        self._may_commit = may_commit
        self._description = {"step": step, "kind": kind, "world_size": world_size, **origin}
        self.manifest: Manifest | None = None  # on the coordinator, after the rename
        self._hashing_files = _HashingFileSystem()
        self.fs = self._hashing_files

    def storage_meta(self) -> StorageMeta:
        # a plain string, so that no path is pickled
        return StorageMeta(checkpoint_id=str(self.final), save_id=self.save_id)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan  # the coordinator creates the folder later

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        self._refuse_existing()
        remove_tree(self.temporary)  # what an interrupted save left
        if not self.final.parent.is_dir():
            self.final.parent.mkdir(parents=True)
            fsync_folder(self.final.parent.parent)
        self.temporary.mkdir()
        return super().prepare_global_plan(plans)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """On every rank: write its file; return its items, and its files with their hashes."""
        # it exists; on NFS this refreshes another node's view of the parent folder
        self.temporary.mkdir(exist_ok=True)
        results = super().write_data(plan, planner).value()

        # torch collects these results on the coordinator, where `finish` takes the files out
        for name, entry in self._hashing_files.written.items():
            results.append(
                _WrittenFile(
                    index=MetadataIndex(name),
                    size_in_bytes=entry.bytes,
                    storage_data=None,
                    name=name,
                    entry=entry,
                )
            )

        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """On the coordinator, after all ranks: write .metadata and the manifest, and publish."""
        # Torch's part: write .metadata from the items of all ranks, without our file records.
        files: dict[str, FileEntry] = {}
        items: list[list[WriteResult]] = []
        for rank_results in results:
            rank_items: list[WriteResult] = []
            for result in rank_results:
                if isinstance(result, _WrittenFile):
                    files[result.name] = result.entry
                else:
                    rank_items.append(result)
            items.append(rank_items)
        super().finish(metadata, items)

        # The manifest of all files, which must be here if all ranks write to one file system.
        files |= self._hashing_files.written  # .metadata
        manifest = Manifest(
            torch=str(torch.__version__),
            saved=utc_now(),
            files=dict(sorted(files.items())),
            **self._description,
        )
        if faults := find_faults(self.temporary, manifest, hashes=False):
            raise DamagedCheckpoint(
                "checkpoint.not_shared",
                f"{self.temporary} must be shared by all nodes: {'; '.join(faults)}",
                faults=faults,
            )
        manifest.write(self.temporary)  # syncs the names in the folder too

        # Publish.
        if self.final != self.temporary:
            self._refuse_existing()  # again: it may have been created during the save
            if self._may_commit is not None and not self._may_commit():
                raise PermissionError(f"{self.final} belongs to another launch now")
            rename(self.temporary, self.final)
        fsync_folder(self.final.parent)
        self.manifest = manifest

    def _refuse_existing(self) -> None:
        if os.path.lexists(self.final):
            raise FileExistsError(
                errno.EEXIST, "exists, and checkpoints are never overwritten", str(self.final)
            )


@contextmanager
def ignore_no_dist_warning() -> Iterator[None]:
    """Suppress torch's warning that it assumes no_dist."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def save_no_dist(
    state: dict[str, Any], checkpoint: Path, *, step: int, in_place: bool = False, **origin: Any
) -> None:
    """Save `state` as a checkpoint without a process group; `origin`: also `kind`."""
    temporary = checkpoint if in_place else checkpoint.with_name(f".saving-{checkpoint.name}")
    writer = VerifiedWriter(checkpoint, temporary, step=step, world_size=1, **origin)
    try:
        with ignore_no_dist_warning():
            dcp.save(state, storage_writer=writer, no_dist=True)
    except CheckpointException as error:
        failure, _ = error.failures[0]  # of the only rank
        # an existing checkpoint is not ours to remove: in place, `temporary` is its path
        if not isinstance(failure, FileExistsError):
            shutil.rmtree(temporary, ignore_errors=True)
        raise failure from None
