"""Atomic saves: hashes, order of syncs, full disks, on one rank and on two."""

import json
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.tensor import Shard, distribute_tensor

from canon_pretrain.checkpoint import writer as writer_module
from canon_pretrain.checkpoint.manifest import Manifest, files_of, verify
from canon_pretrain.checkpoint.weights import load_no_dist
from canon_pretrain.checkpoint.writer import VerifiedWriter, save_no_dist
from canon_pretrain.core.files import sha256_file

pytestmark = pytest.mark.filterwarnings(
    # torch.distributed.checkpoint on itself, when it saves without ranks
    "ignore:torch.distributed is disabled:UserWarning"
)

STATE = {"w": torch.arange(12.0), "train_state": {"step": 3}}


def check_whole(checkpoint: Path, *, step: int, world_size: int) -> Manifest:
    """Compare the manifest with the files, independently of `verify`; return it."""
    manifest = Manifest.read(checkpoint)
    hashes = {name: sha256_file(checkpoint / name) for name in files_of(checkpoint)}
    assert {name: entry.sha256 for name, entry in manifest.files.items()} == hashes
    sizes = {name: (checkpoint / name).stat().st_size for name in hashes}
    assert {name: entry.bytes for name, entry in manifest.files.items()} == sizes
    expected = {".metadata", *(f"__{rank}_0.distcp" for rank in range(world_size))}
    assert set(hashes) == expected
    assert (manifest.step, manifest.world_size) == (step, world_size)
    assert manifest.torch == torch.__version__
    verify(checkpoint)
    return manifest


def test_all_files_are_synced_before_the_rename(tmp_path):
    order: list[tuple[str, str]] = []
    fsync, rename = os.fsync, os.rename

    def note_fsync(descriptor: int) -> None:
        fsync(descriptor)
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        size = os.fstat(descriptor).st_size if os.path.isfile(path) else 0
        order.append((f"sync {size}" if size else "sync", os.path.basename(path)))

    def note_rename(old: Path, new: Path) -> None:
        rename(old, new)
        order.append(("rename", new.name))

    with (
        mock.patch("os.fsync", note_fsync),
        mock.patch("os.rename", note_rename),
        mock.patch("os.sync", side_effect=AssertionError),
    ):
        save_no_dist(STATE, tmp_path / "step-3", step=3)
    renamed = order.index(("rename", "step-3"))
    files = Manifest.read(tmp_path / "step-3").files
    for name in ("__0_0.distcp", ".metadata"):  # complete then; .metadata has its temporary name
        first = f"sync {files[name].bytes}"
        assert any(what == first and path.startswith(name) for what, path in order[:renamed]), name
    names = [path for _, path in order[:renamed]]
    manifest = next(k for k, name in enumerate(names) if name.startswith("manifest.json."))
    assert ("sync", ".saving-step-3") in order[manifest:renamed]
    assert order[renamed + 1 :] == [("sync", tmp_path.name)]


def test_a_folder_that_is_not_shared_by_the_ranks_is_found(tmp_path):
    class Elsewhere(VerifiedWriter):
        def write_data(self, plan: Any, planner: Any) -> Any:
            results = super().write_data(plan, planner)
            (self.temporary / "__0_0.distcp").rename(tmp_path / "elsewhere")
            return results

    writer = Elsewhere(tmp_path / "step-3", tmp_path / "t", step=3, world_size=1)
    with pytest.raises(CheckpointException) as caught:
        dcp.save(STATE, storage_writer=writer, no_dist=True)
    failure: Any = caught.value.failures[0][0]
    assert failure.code == "checkpoint.not_shared" and "__0_0.distcp" in failure.fields["faults"][0]
    assert not (tmp_path / "step-3").exists() and writer.manifest is None


def full_disk_for(name: str) -> Any:
    """Make this process write the file `name` to /dev/full, for a real ENOSPC."""

    def opened(path: Any, mode: str) -> Any:
        if os.path.basename(path) == name:
            return open("/dev/full", "wb")
        return open(path, mode)

    return mock.patch.object(writer_module, "open", opened, create=True)


def _on_two_ranks(rank: int, base: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{base}/store", rank=rank, world_size=2)
    warnings.filterwarnings("error", message="Detected an existing checkpoint")
    mesh = dist.init_device_mesh("cpu", (2,))
    sharded = distribute_tensor(torch.arange(30_000.0).reshape(3000, 10), mesh, [Shard(0)])
    uneven = distribute_tensor(torch.arange(5.0), mesh, [Shard(0)])
    state = {"w": sharded, "u": uneven, "b": torch.ones(7), "train_state": {"step": 1}}
    outcomes: dict[str, Any] = {}

    def attempt(step: int, state: dict[str, Any], save: Callable[..., Any]) -> None:
        temporary = base / f".saving-step-{step}"
        writer = VerifiedWriter(base / f"step-{step}", temporary, step=step, world_size=2)
        try:
            future = save(state, storage_writer=writer, process_group=dist.group.WORLD)
            if save is dcp.async_save:
                sharded.to_local().add_(1)  # training continues during the save
                try:
                    future.result()
                finally:
                    sharded.to_local().sub_(1)
            outcomes[str(step)] = bool(writer.manifest)
        except CheckpointException as error:
            outcomes[str(step)] = {r: repr(e) for r, (e, _) in error.failures.items()}
        dist.barrier()

    attempt(1, state, dcp.save)
    attempt(2, state, dcp.async_save)
    attempt(3, {"b": torch.ones(7)}, dcp.save)  # one of the ranks has nothing to write
    attempt(1, {"b": torch.zeros(7)}, dcp.save)
    outcomes["1 again"] = outcomes.pop("1")
    with full_disk_for("__1_0.distcp"):
        attempt(4, state, dcp.save)
        attempt(5, state, dcp.async_save)
    with full_disk_for(".metadata.tmp"):
        attempt(6, state, dcp.save)
    if rank == 0:
        outcomes["left"] = sorted(os.listdir(base / ".saving-step-4"))
    dist.barrier()
    attempt(4, state, dcp.save)
    (base / f"outcomes-{rank}.json").write_text(json.dumps(outcomes))
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("two")
    with mock.patch.dict(os.environ, {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}):
        mp.spawn(_on_two_ranks, args=(base,), nprocs=2)
    return base


@pytest.mark.system
@pytest.mark.parametrize("step", [1, 2, 4])
def test_two_ranks_save_a_complete_checkpoint(two_ranks, step):
    """Synchronously (1), asynchronously (2), and at a second attempt (4)."""
    check_whole(two_ranks / f"step-{step}", step=step, world_size=2)
    whole = {"w": torch.zeros(3000, 10), "u": torch.zeros(5), "b": torch.zeros(7)}
    load_no_dist(whole, two_ranks / f"step-{step}")
    assert torch.equal(whole["w"], torch.arange(30_000.0).reshape(3000, 10))
    assert torch.equal(whole["u"], torch.arange(5.0)) and torch.equal(whole["b"], torch.ones(7))


@pytest.mark.system
def test_all_ranks_receive_the_outcome_of_a_save(two_ranks):
    """Also if the checkpoint existed, or one rank's disk is full."""
    manifest = check_whole(two_ranks / "step-3", step=3, world_size=2)
    sizes = sorted(manifest.files[f"__{rank}_0.distcp"].bytes for rank in range(2))
    assert sizes[0] == 0 < sizes[1]  # a rank with nothing to write
    full = repr(OSError(28, os.strerror(28)))
    outcomes = [json.loads((two_ranks / f"outcomes-{rank}.json").read_text()) for rank in range(2)]
    for rank, of_rank in enumerate(outcomes):
        assert of_rank["1 again"]["0"].startswith("FileExistsError(17,")
        assert of_rank["2"] == of_rank["4"] == (rank == 0)
        assert of_rank["5"] == {"1": full}  # in the background
        assert of_rank["6"] == {"0": full}  # the coordinator's, when all else was written
    assert outcomes[0]["left"] == ["__0_0.distcp"]
    assert not any((two_ranks / f"step-{step}").exists() for step in (5, 6))
