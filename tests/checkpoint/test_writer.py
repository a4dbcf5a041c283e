"""Atomic saves on one rank and two; malicious checkpoints, of which nothing is run."""

import json
import os
import pickle
import warnings
from contextlib import contextmanager
from pathlib import PosixPath
from typing import Any, NamedTuple
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
    names = set(files_of(checkpoint))
    assert names == {".metadata", *(f"__{rank}_0.distcp" for rank in range(world_size))}
    assert manifest.files.keys() == names
    for name, entry in manifest.files.items():
        assert entry.sha256 == sha256_file(checkpoint / name)
        assert entry.bytes == (checkpoint / name).stat().st_size
    assert (manifest.step, manifest.world_size) == (step, world_size)
    assert manifest.torch == torch.__version__
    verify(checkpoint)
    return manifest


class FileOperation(NamedTuple):
    """A call of fsync or rename, the name of its file, and the size of that file."""

    call: str
    name: str
    size: int = 0


@contextmanager
def recorded_operations():
    """Collect the fsyncs and renames of the block; os.sync is refused."""
    operations: list[FileOperation] = []
    fsync = os.fsync
    rename = os.rename

    def record_fsync(descriptor):
        fsync(descriptor)
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        size = os.fstat(descriptor).st_size if os.path.isfile(path) else 0
        operations.append(FileOperation("fsync", os.path.basename(path), size))

    def record_rename(old, new):
        rename(old, new)
        operations.append(FileOperation("rename", new.name))

    with (
        mock.patch("os.fsync", record_fsync),
        mock.patch("os.rename", record_rename),
        mock.patch("os.sync", side_effect=AssertionError),
    ):
        yield operations


def test_all_files_are_synced_before_the_rename(tmp_path):
    with recorded_operations() as operations:
        save_no_dist(STATE, tmp_path / "step-3", step=3)

    renamed = operations.index(FileOperation("rename", "step-3"))
    before = operations[:renamed]
    files = Manifest.read(tmp_path / "step-3").files
    for name in ("__0_0.distcp", ".metadata"):  # complete then; .metadata has its temporary name
        synced = [op for op in before if op.call == "fsync" and op.name.startswith(name)]
        assert any(op.size == files[name].bytes for op in synced), name

    # the manifest, then the folder; after the rename, the folder that holds the name
    names = [op.name for op in before]
    manifest = next(k for k, name in enumerate(names) if name.startswith("manifest.json."))
    assert FileOperation("fsync", ".saving-step-3") in before[manifest:]
    assert operations[renamed + 1 :] == [FileOperation("fsync", tmp_path.name)]


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
    assert failure.code == "checkpoint.not_shared"
    assert "__0_0.distcp" in failure.fields["faults"][0]
    assert not (tmp_path / "step-3").exists()
    assert writer.manifest is None


def full_disk_for(name):
    """Make this process write the file `name` to /dev/full, for a real ENOSPC."""

    def opened(path, mode):
        if os.path.basename(path) == name:
            return open("/dev/full", "wb")
        return open(path, mode)

    return mock.patch.object(writer_module, "open", opened, create=True)


def _on_two_ranks(rank, base):
    """Save well and badly; write the outcome of each save, as a rank sees it, to a file."""
    dist.init_process_group("gloo", init_method=f"file://{base}/store", rank=rank, world_size=2)
    warnings.filterwarnings("error", message="Detected an existing checkpoint")
    mesh = dist.init_device_mesh("cpu", (2,))
    sharded = distribute_tensor(torch.arange(30_000.0).reshape(3000, 10), mesh, [Shard(0)])
    uneven = distribute_tensor(torch.arange(5.0), mesh, [Shard(0)])
    state = {"w": sharded, "u": uneven, "b": torch.ones(7), "train_state": {"step": 1}}
    outcomes: dict[str, Any] = {}

    def attempt(name, step, state, save):
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
            outcomes[name] = bool(writer.manifest)
        except CheckpointException as error:
            outcomes[name] = {r: repr(e) for r, (e, _) in error.failures.items()}
        dist.barrier()

    attempt("sync", 1, state, dcp.save)
    attempt("async", 2, state, dcp.async_save)
    attempt("one rank without data", 3, {"b": torch.ones(7)}, dcp.save)
    attempt("existing", 1, {"b": torch.zeros(7)}, dcp.save)

    # the disk of a rank is full, or only when the coordinator writes the metadata
    with full_disk_for("__1_0.distcp"):
        attempt("full", 4, state, dcp.save)
        attempt("full, async", 5, state, dcp.async_save)
    with full_disk_for(".metadata.tmp"):
        attempt("full for metadata", 6, state, dcp.save)
    if rank == 0:
        outcomes["left"] = sorted(os.listdir(base / ".saving-step-4"))
    dist.barrier()
    attempt("after full", 4, state, dcp.save)

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

    state = {"w": torch.zeros(3000, 10), "u": torch.zeros(5), "b": torch.zeros(7)}
    load_no_dist(state, two_ranks / f"step-{step}")
    assert torch.equal(state["w"], torch.arange(30_000.0).reshape(3000, 10))
    assert torch.equal(state["u"], torch.arange(5.0))
    assert torch.equal(state["b"], torch.ones(7))


@pytest.mark.system
def test_a_rank_without_data_writes_an_empty_file(two_ranks):
    manifest = check_whole(two_ranks / "step-3", step=3, world_size=2)
    sizes = sorted(manifest.files[f"__{rank}_0.distcp"].bytes for rank in range(2))
    assert sizes[0] == 0 < sizes[1]


@pytest.mark.system
def test_all_ranks_receive_the_outcome_of_a_save(two_ranks):
    """Also if the checkpoint existed, or one rank's disk is full."""
    no_space = repr(OSError(28, os.strerror(28)))
    outcomes = [json.loads((two_ranks / f"outcomes-{rank}.json").read_text()) for rank in range(2)]
    for rank, of_rank in enumerate(outcomes):
        assert of_rank["existing"]["0"].startswith("FileExistsError(17,")
        assert of_rank["async"] == (rank == 0)
        assert of_rank["after full"] == (rank == 0)
        assert of_rank["full, async"] == {"1": no_space}  # in the background
        assert of_rank["full for metadata"] == {"0": no_space}  # the coordinator's
    assert outcomes[0]["left"] == ["__0_0.distcp"]
    for step in (5, 6):
        assert not (two_ranks / f"step-{step}").exists()


def new_state(k=1):
    return {
        "w": k * torch.arange(6.0).reshape(2, 3),
        "groups": [{"lr": 0.1 * k, "betas": (0.9 * k, 0.95), "fused": k > 0}],
        "train_state": {"step": 3 * k},
        "dataloader": {"mode": "random" * k, "fingerprint": "ab" * k},
    }


def load(checkpoint):
    """Return the state of new_state(), read by the safe reader."""
    state = new_state(0)
    reader = SafeReader(checkpoint)
    dcp.load(state, storage_reader=reader, planner=safe_load.SafePlanner(), no_dist=True)
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
    """Change the metadata of a checkpoint by `edit`, with a matching manifest."""
    metadata = read_metadata(checkpoint)
    edit(metadata)
    replace_file(checkpoint, METADATA, pickle.dumps(metadata))


def test_a_saved_state_is_read_as_torch_reads_it(checkpoint):
    assert check_safe(checkpoint) == pickle.loads((checkpoint / METADATA).read_bytes())

    state = load(checkpoint)
    expected = new_state()
    assert torch.equal(state.pop("w"), expected.pop("w"))
    assert state == expected


def test_checkpoints_of_torchs_writer_and_of_every_dtype(tmp_path):
    names = "float64 float32 float16 bfloat16 int64 int32 int16 int8 uint8 bool float8_e4m3fn"
    state = {name: torch.ones(2).to(getattr(torch, name)) for name in names.split()}
    dcp.save(state, checkpoint_id=tmp_path / "step-1", no_dist=True)

    metadata_bytes = (tmp_path / "step-1" / METADATA).read_bytes()
    assert b"PosixPath" in metadata_bytes
    assert check_safe(tmp_path / "step-1") == pickle.loads(metadata_bytes)


def test_the_enum_as_python_3_11_2_pickles_it(checkpoint):
    """Debian 12's Python calls getattr, which is replaced by a lookup in that enum."""

    def reduce_old(self, protocol):
        return getattr, (self.__class__, self._name_)

    with mock.patch.object(_MEM_FORMAT_ENCODING, "__reduce_ex__", reduce_old):
        edit_metadata(checkpoint, lambda metadata: None)

    metadata_bytes = (checkpoint / METADATA).read_bytes()
    assert b"getattr" in metadata_bytes
    assert check_safe(checkpoint) == pickle.loads(metadata_bytes)


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

    # torch's own reader runs it
    dcp.load(new_state(0), checkpoint_id=checkpoint, no_dist=True)
    assert (tmp_path / "run").is_dir()


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
    pushed = b""
    for text in (module, name):
        pushed += b"\x8c" + bytes([len(text)]) + text.encode()
    return b"\x80\x04" + pushed + b"\x93."


@pytest.mark.parametrize(
    ("content", "global_name"),
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
def test_every_other_global_is_refused(checkpoint, content, global_name):
    replace_file(checkpoint, METADATA, content)
    with refused("checkpoint.damaged", path=checkpoint / METADATA) as caught:
        read_metadata(checkpoint)
    assert global_name in str(caught.value)


def test_an_allowed_class_is_not_changed(checkpoint):
    """BUILD on a class would set its attributes for the whole process."""
    state = pickle.dumps((None, {"planted": 1}), protocol=2)[2:-1]
    content = f"c{Metadata.__module__}\nMetadata\n".encode() + state + b"b."
    assert getattr(pickle.loads(content), "planted", None) == 1
    del Metadata.planted  # type: ignore[attr-defined]

    replace_file(checkpoint, METADATA, content)
    with refused("checkpoint.damaged", path=checkpoint / METADATA):
        read_metadata(checkpoint)
    assert not hasattr(Metadata, "planted")


STEP = MetadataIndex("train_state.step")
W = MetadataIndex("w", (0, 0))


def test_nothing_on_the_allow_list_has_side_effects():
    """The allow-list: torch's records, an enum, two constructors, dtypes, two lookups."""
    places = {"torch", "torch.serialization", "pathlib", "pathlib._local", "builtins"}
    records = {f"torch.distributed.checkpoint.{name}" for name in ("metadata", "filesystem")}
    assert {module for module, _ in safe_load.ALLOWED} == places | records
    assert safe_load.ALLOWED["builtins", "getattr"] is not getattr
    for (module, name), value in safe_load.ALLOWED.items():
        assert isinstance(value, torch.dtype) or module != "torch" or name == "Size"


@pytest.mark.parametrize(
    ("index", "fields"),
    [
        (STEP, {"offset": -5, "length": 100}),
        (STEP, {"offset": 10**9, "length": 100}),
        (STEP, {"offset": 0, "length": 10}),
        (STEP, {"offset": 0, "length": -3}),
        (STEP, None),
        (W, {"relative_path": "/etc/passwd"}),
        (W, {"relative_path": "a/../../b"}),
    ],
    ids=["before", "after", "short", "negative", "missing", "absolute", "outside"],
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
    damaged = [whole[:k] for k in range(0, len(whole), 37)]
    for k in range(0, len(whole), 11):
        flipped = bytearray(whole)
        flipped[k] ^= 1 << (k % 8)
        damaged.append(bytes(flipped))

    num_refused = 0
    for content in damaged:
        (checkpoint / METADATA).write_bytes(content)
        try:
            read_metadata(checkpoint)
        except DamagedCheckpoint as error:
            num_refused += 1
            assert error.fields["path"] == checkpoint / METADATA
            assert "\n" not in str(error)
    assert num_refused > len(damaged) // 2  # the manifest finds a flip in a name or a number
