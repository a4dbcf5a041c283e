"""Damaged checkpoints are found, named, quarantined, and never resumed from."""

import io
import os
import pickle
import shutil
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torchtitan.components.checkpoint import ModelWrapper

from canon_pretrain.checkpoint.folder import CheckpointFolder
from canon_pretrain.checkpoint.manifest import FileEntry, Manifest, verify
from canon_pretrain.checkpoint.safe_load import read_metadata
from canon_pretrain.checkpoint.weights import load_no_dist
from canon_pretrain.core.files import sha256_file
from canon_pretrain.model.transformer import Transformer
from canon_pretrain.run.folder import RunFolder
from canon_pretrain.titan.command_line import parse_job
from canon_pretrain.titan.resume import RankZero, Resume
from tests.checkpoint_folders import contents
from tests.fault_runs import (
    EVERY_2,
    FAULTS,
    STEPS,
    checkpoint,
    copy,
    flip,
    grow,
    missing,
    quarantine,
    resumed_from,
    steps,
    truncate,
)
from tests.ranks import assert_refused, assert_same_run, differences, events, status
from tests.support import debug_run, refused

NEWEST = STEPS


@pytest.fixture(scope="module")
def model(base):
    """The base run's model; each test loads other weights into it."""
    job = parse_job([str(word) for word in debug_run(base, base)])
    return Transformer(job.model_args)


@pytest.fixture(scope="module")
def resume(model, tmp_path_factory):
    """Resume as a launch does, into `model`; return the step and the logged events."""
    store = tmp_path_factory.mktemp("store") / "store"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)

    def run_resume(run, load_step=-1):
        logged: list[dict[str, Any]] = []
        search = Resume(
            CheckpointFolder(run / "checkpoint"),
            RunFolder(run),
            RankZero(),
            ModelWrapper([model]),
            {},
            lambda name, **fields: logged.append({"event": name, **fields}),
        )
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(torch.nan)
        return search.resume(load_step, initial="", initial_model_only=False), logged

    yield run_resume
    dist.destroy_process_group()


def assert_holds(model, base, step):
    """Check that the model has the weights of the unharmed run at `step`."""
    assert step is not None
    assert differences(model.state_dict(), saved_weights(model, checkpoint(base, step))) == []


@cache
def saved_weights(model, path):
    weights = {name: torch.empty_like(tensor) for name, tensor in model.state_dict().items()}
    load_no_dist(weights, path)
    return weights


def two_steps(base, target):
    """Create a run with two checkpoints, steps 10 and 12."""
    for step in (10, NEWEST):
        shutil.copytree(checkpoint(base, step), checkpoint(target, step))
    return target


FILES = ["__0_0.distcp", "__1_0.distcp", ".metadata", "manifest.json"]


@pytest.mark.parametrize("file", FILES)
def test_a_damaged_file_is_named_and_an_older_step_resumed(base, resume, model, tmp_path, file):
    for fault in FAULTS:
        run = two_steps(base, tmp_path / fault.__name__)
        fault(checkpoint(run, NEWEST) / file)
        damaged = contents(checkpoint(run, NEWEST))

        step, logged = resume(run)

        # a manifest has no hash: it may mean the same in spite of the change
        may_mean_the_same = file == "manifest.json" and fault in (flip, grow)
        assert step == 10 or (step == NEWEST and may_mean_the_same), fault
        assert_holds(model, base, step)
        if step == NEWEST:
            continue

        (event,) = logged
        assert event["event"] == "quarantine", fault
        assert event["checkpoint"] == "step-12"
        # a hash that changed in the manifest makes its file differ
        assert file in event["reason"] or (file, fault) == ("manifest.json", flip), fault
        assert event["reason"] in quarantine(run)["step-12.1"], fault
        assert contents(run / "checkpoint" / "quarantine" / "step-12.1") == damaged
        assert steps(run) == [10]


def test_any_flipped_bit_of_a_manifest_loads_whole_steps(base, resume, model, tmp_path):
    """The manifest has no checksum: try many positions."""
    run = two_steps(base, tmp_path / "run")
    path = checkpoint(run, NEWEST) / "manifest.json"
    undamaged = path.read_bytes()
    resumed_steps = []
    for number, position in enumerate(range(0, len(undamaged), 37)):
        content = bytearray(undamaged)
        content[position] ^= 1 << number % 8
        path.write_bytes(content)

        step, _ = resume(run)

        assert_holds(model, base, step)
        resumed_steps.append(step)
        if step == 10:  # put the newest back for the next position
            (in_quarantine,) = (run / "checkpoint" / "quarantine").glob("step-12.?")
            in_quarantine.rename(path.parent)
            shutil.rmtree(run / "checkpoint" / "quarantine")

    assert resumed_steps.count(10) > len(resumed_steps) / 2


class Plant:
    """Pickles to a call that creates a folder, the proof that it was executed."""

    def __init__(self, proof):
        self.proof = proof

    def __reduce__(self):
        return os.mkdir, (str(self.proof),)


def plant_in_an_entry(newest, proof):
    """Replace the training state by an entry at the end of a file."""
    metadata = read_metadata(newest)
    index = next(i for i in metadata.storage_data if i.fqn.startswith("train_state"))
    info = metadata.storage_data[index]
    buffer = io.BytesIO()
    torch.save({"step": Plant(proof)}, buffer)
    entry = buffer.getvalue()

    path = newest / info.relative_path
    info.offset = path.stat().st_size
    info.length = len(entry)
    path.write_bytes(path.read_bytes() + entry)
    (newest / ".metadata").write_bytes(pickle.dumps(metadata))
    vouch(newest)


def vouch(newest):
    """Update the manifest to the files."""
    manifest = Manifest.read(newest)
    for name in manifest.files:
        path = newest / name
        manifest.files[name] = FileEntry(path.stat().st_size, sha256_file(path))
    manifest.write(newest)
    verify(newest)


def test_a_launch_skips_damaged_checkpoints(base, trial):
    """Four faults, found by two ranks that share the files; it ends as the unharmed run."""
    run = copy(base, trial.run)
    proof = trial.folder / "proof"
    flip(checkpoint(run, 12) / "__1_0.distcp")
    truncate(checkpoint(run, 10) / ".metadata")
    plant_in_an_entry(checkpoint(run, 8), proof)
    (checkpoint(run, 6) / ".metadata").write_bytes(pickle.dumps(Plant(proof)))
    vouch(checkpoint(run, 6))

    trial.launch(*EVERY_2)

    assert resumed_from(run) == [4]
    assert_same_run(run, base, step=STEPS)
    assert not proof.exists()
    reasons = quarantine(run)
    assert list(reasons) == ["step-10.1", "step-12.1", "step-6.1", "step-8.1"]
    logged = {event["checkpoint"]: event["reason"] for event in events(run, "quarantine")}
    for step, cause in ((12, "__1_0.distcp"), (10, ".metadata"), (8, "mkdir")):
        assert cause in reasons[f"step-{step}.1"]
        assert cause in logged[f"step-{step}"]


def test_a_requested_step_is_not_replaced_by_another(base, resume, trial):
    run = copy(base, trial.run)
    flip(checkpoint(run, 8) / "__1_0.distcp")
    before = contents(run / "checkpoint")

    ended = trial.launch(*EVERY_2, "--checkpoint.load_step", 8, check=False)

    assert_refused(ended, "checkpoint.damaged")
    assert status(run).state == "failed"
    assert contents(run / "checkpoint") == before
    assert steps(run) == steps(base)
    assert not (run / "archive").exists()
    assert not quarantine(run)
    assert events(run, "step") == events(base, "step")

    # the same for the newest, and for one that is not there
    missing(checkpoint(run, 12) / ".metadata")
    with refused("checkpoint.damaged", path=checkpoint(run, 12)):
        resume(run, load_step=12)
    with refused("checkpoint.missing", given=99, available=steps(base)):
        resume(run, load_step=99)
