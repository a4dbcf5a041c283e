"""Atomic saves on one rank and two; malicious checkpoints, of which nothing is run."""

import json
import os
import pickle
import warnings
from pathlib import PosixPath
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, Metadata, MetadataIndex
from torch.distributed.tensor import Shard, distribute_tensor

from canon_pretrain.checkpoint import safe_load
from canon_pretrain.checkpoint import writer as writer_module
from canon_pretrain.checkpoint.manifest import DamagedCheckpoint, Manifest, files_of, verify
from canon_pretrain.checkpoint.safe_load import METADATA, SafeReader, check_safe, read_metadata
from canon_pretrain.checkpoint.weights import load_no_dist
from canon_pretrain.checkpoint.writer import VerifiedWriter, save_no_dist
from canon_pretrain.core.files import sha256_file
from tests.checkpoint_folders import Plant, write_manifest
from tests.support import refused

pytestmark = pytest.mark.filterwarnings(
    # torch.distributed.checkpoint on itself, when it saves without ranks
    "ignore:torch.distributed is disabled:UserWarning"
)

STATE = {"w": torch.arange(12.0), "train_state": {"step": 3}}


def check_whole(checkpoint, *, step, world_size):
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

    def note_fsync(descriptor):
        fsync(descriptor)
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        size = os.fstat(descriptor).st_size if os.path.isfile(path) else 0
        order.append((f"sync {size}" if size else "sync", os.path.basename(path)))

    def note_rename(old, new):
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
        def write_data(self, plan, planner):
            results = super().write_data(plan, planner)
            (self.temporary / "__0_0.distcp").rename(tmp_path / "elsewhere")
            return results

    writer = Elsewhere(tmp_path / "step-3", tmp_path / "t", step=3, world_size=1)
    with pytest.raises(CheckpointException) as caught:
        dcp.save(STATE, storage_writer=writer, no_dist=True)
    failure: Any = caught.value.failures[0][0]
    assert failure.code == "checkpoint.not_shared" and "__0_0.distcp" in failure.fields["faults"][0]
    assert not (tmp_path / "step-3").exists() and writer.manifest is None


def full_disk_for(name):
    """Make this process write the file `name` to /dev/full, for a real ENOSPC."""

    def opened(path, mode):
        if os.path.basename(path) == name:
            return open("/dev/full", "wb")
        return open(path, mode)

    return mock.patch.object(writer_module, "open", opened, create=True)


def _on_two_ranks(rank, base):
    dist.init_process_group("gloo", init_method=f"file://{base}/store", rank=rank, world_size=2)
    warnings.filterwarnings("error", message="Detected an existing checkpoint")
    mesh = dist.init_device_mesh("cpu", (2,))
    sharded = distribute_tensor(torch.arange(30_000.0).reshape(3000, 10), mesh, [Shard(0)])
    uneven = distribute_tensor(torch.arange(5.0), mesh, [Shard(0)])
    state = {"w": sharded, "u": uneven, "b": torch.ones(7), "train_state": {"step": 1}}
    outcomes: dict[str, Any] = {}

    def attempt(step, state, save):
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
def two_ranks(tmp_path_factory):
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


def new_state(k=1):
    return {
        "w": k * torch.arange(6.0).reshape(2, 3),
        "groups": [{"lr": 0.1 * k, "betas": (0.9 * k, 0.95), "fused": k > 0}],
        "train_state": {"step": 3 * k},
        "dataloader": {"mode": "random" * k, "fingerprint": "ab" * k},
    }


def load(checkpoint):
    state, planner = new_state(0), safe_load.SafePlanner()
    dcp.load(state, storage_reader=SafeReader(checkpoint), planner=planner, no_dist=True)
    return state


@pytest.fixture
def checkpoint(tmp_path):
    save_no_dist(new_state(), tmp_path / "step-3", step=3)
    return tmp_path / "step-3"


def replace_file(checkpoint, name, content):
    """Put `content` into a checkpoint, with a matching manifest."""
    (checkpoint / name).write_bytes(content)
    write_manifest(checkpoint, 3, "full")
    verify(checkpoint)


def edit_metadata(checkpoint, edit):
    metadata = read_metadata(checkpoint)
    edit(metadata)
    replace_file(checkpoint, METADATA, pickle.dumps(metadata))


def test_a_saved_state_is_read_as_torch_reads_it(checkpoint):
    assert check_safe(checkpoint) == pickle.loads((checkpoint / METADATA).read_bytes())
    state, expected = load(checkpoint), new_state()
    assert torch.equal(state.pop("w"), expected.pop("w")) and state == expected


def test_checkpoints_of_torchs_writer_and_of_every_dtype(tmp_path):
    names = "float64 float32 float16 bfloat16 int64 int32 int16 int8 uint8 bool float8_e4m3fn"
    state = {name: torch.ones(2).to(getattr(torch, name)) for name in names.split()}
    dcp.save(state, checkpoint_id=tmp_path / "step-1", no_dist=True)
    raw = (tmp_path / "step-1" / METADATA).read_bytes()
    assert b"PosixPath" in raw
    assert check_safe(tmp_path / "step-1") == pickle.loads(raw)


def test_the_enum_as_python_3_11_2_pickles_it(checkpoint):
    """Debian 12's Python calls getattr, which is replaced by a lookup in that enum."""

    def reduce_old(self, protocol):
        return getattr, (self.__class__, self._name_)

    with mock.patch.object(_MEM_FORMAT_ENCODING, "__reduce_ex__", reduce_old):
        edit_metadata(checkpoint, lambda metadata: None)
    raw = (checkpoint / METADATA).read_bytes()
    assert b"getattr" in raw
    assert check_safe(checkpoint) == pickle.loads(raw)


@pytest.mark.parametrize("nested", [False, True])
def test_a_call_planted_in_the_metadata_is_not_run(checkpoint, tmp_path, nested):
    plant = Plant(os.mkdir, str(tmp_path / "run"))
    if nested:
        edit_metadata(checkpoint, lambda metadata: metadata.planner_data.update(x=plant))
    else:
        replace_file(checkpoint, METADATA, pickle.dumps(plant))
    for read in (read_metadata, check_safe, lambda path: SafeReader(path).read_metadata()):
        with pytest.raises(DamagedCheckpoint, match=r"posix\.mkdir"):
            read(checkpoint)
    with pytest.raises(CheckpointException):
        load(checkpoint)
    assert not (tmp_path / "run").exists()
    # it would have been run
    pickle.loads((checkpoint / METADATA).read_bytes())
    assert (tmp_path / "run").is_dir()


def test_a_call_planted_in_an_entry_is_not_run(tmp_path):
    plant = Plant(os.mkdir, str(tmp_path / "run"))
    checkpoint = tmp_path / "step-3"
    state = new_state() | {"dataloader": {"mode": "random", "fingerprint": plant}}
    save_no_dist(state, checkpoint, step=3)
    with refused("checkpoint.damaged", path=checkpoint, entry="dataloader.fingerprint"):
        check_safe(checkpoint)
    with pytest.raises(CheckpointException) as failed:
        load(checkpoint)
    assert safe_load.describe(failed.value).startswith("rank 0: DamagedCheckpoint: ")
    assert not (tmp_path / "run").exists()
    dcp.load(new_state(0), checkpoint_id=checkpoint, no_dist=True)
    assert (tmp_path / "run").is_dir()  # torch's own reader runs it


def test_the_metadata_of_a_rank_is_not_read_instead(checkpoint, tmp_path):
    """torch asks for it if the first can't be read."""
    (checkpoint / METADATA).unlink()
    plant = Plant(os.mkdir, str(tmp_path / "run"))
    (checkpoint / f"__0{METADATA}").write_bytes(pickle.dumps(plant))
    with pytest.raises(CheckpointException):
        load(checkpoint)
    assert not (tmp_path / "run").exists()


def dotted(module, name):
    """Return a pickle of protocol 4 that names a global whose name may have dots."""
    texts = b"".join(b"\x8c" + bytes([len(t)]) + t.encode() for t in (module, name))
    return b"\x80\x04" + texts + b"\x93."


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (dotted("os", "system"), "os.system"),
        (dotted("builtins", "eval"), "builtins.eval"),
        (dotted("torch", "hub.load"), "torch.hub.load"),
        (dotted("pathlib", "PosixPath.unlink"), "pathlib.PosixPath.unlink"),
        (dotted(Metadata.__module__, "Metadata.__init__.__globals__"), "__init__.__globals__"),
        (b"(S'touch x'\niposix\nsystem\n.", "posix.system"),
        (pickle.dumps(Plant(getattr, PosixPath, "home")), "memory format"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_every_other_global_is_refused(checkpoint, content, named):
    replace_file(checkpoint, METADATA, content)
    with refused("checkpoint.damaged", path=checkpoint / METADATA) as caught:
        read_metadata(checkpoint)
    assert named in str(caught.value)


def test_an_allowed_class_is_not_changed(checkpoint):
    """BUILD on a class would set its attributes for the whole process."""
    state = pickle.dumps((None, {"planted": 1}), protocol=2)[2:-1]
    name = f"c{Metadata.__module__}\nMetadata\n".encode()
    assert getattr(pickle.loads(name + state + b"b."), "planted", None) == 1
    del Metadata.planted  # type: ignore[attr-defined]
    replace_file(checkpoint, METADATA, name + state + b"b.")
    with refused("checkpoint.damaged", path=checkpoint / METADATA):
        read_metadata(checkpoint)
    assert not hasattr(Metadata, "planted")


def test_nothing_on_the_allow_list_has_side_effects():
    """The allow-list: torch's records, an enum, two constructors, dtypes, two lookups."""
    places = {"torch", "torch.serialization", "pathlib", "pathlib._local", "builtins"}
    records = {f"torch.distributed.checkpoint.{name}" for name in ("metadata", "filesystem")}
    assert {module for module, _ in safe_load.ALLOWED} == places | records
    assert safe_load.ALLOWED["builtins", "getattr"] is not getattr
    for (module, name), value in safe_load.ALLOWED.items():
        assert isinstance(value, torch.dtype) or module != "torch" or name == "Size"


STEP, W = MetadataIndex("train_state.step"), MetadataIndex("w", (0, 0))
PLACES = ((-5, 100), (10**9, 100), (0, 10), (0, -3))


@pytest.mark.parametrize(
    ("index", "fields"),
    [
        *((STEP, {"offset": k, "length": n}) for k, n in PLACES),
        (STEP, None),
        *((W, {"relative_path": path}) for path in ("/etc/passwd", "a/../../b")),
    ],
)
def test_an_entry_at_a_wrong_place_is_damage(checkpoint, index, fields):
    def move(metadata):
        info = metadata.storage_data.pop(index)
        if fields is not None:
            vars(info).update(fields)
            metadata.storage_data[index] = info

    edit_metadata(checkpoint, move)
    with refused("checkpoint.damaged", kind=DamagedCheckpoint):
        check_safe(checkpoint)


def test_damaged_metadata_always_raises_damaged_checkpoint(checkpoint):
    whole = (checkpoint / METADATA).read_bytes()
    torn = [whole[:k] for k in range(0, len(whole), 37)]
    flips = ((k, bytes([whole[k] ^ 1 << (k % 8)])) for k in range(0, len(whole), 11))
    torn += [whole[:k] + flipped + whole[k + 1 :] for k, flipped in flips]
    found = 0
    for content in torn:
        (checkpoint / METADATA).write_bytes(content)
        try:
            read_metadata(checkpoint)
        except DamagedCheckpoint as error:
            found += 1
            assert error.fields["path"] == checkpoint / METADATA and "\n" not in str(error)
    assert found > len(torn) // 2  # the manifest finds a flip in a name or a number
