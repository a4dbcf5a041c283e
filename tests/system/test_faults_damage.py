"""Checkpoints that are not what was saved: found, named, set aside, and never trained on from."""

import io
import os
import pickle
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torchtitan.components.checkpoint import ModelWrapper

from canon_pretrain.checkpoint.folder import CheckpointFolder
from canon_pretrain.checkpoint.manifest import FileEntry, Manifest, verify
from canon_pretrain.checkpoint.safe_load import read_metadata
from canon_pretrain.checkpoint.weights import load_alone
from canon_pretrain.core.errors import UserError
from canon_pretrain.core.files import sha256_file
from canon_pretrain.model.transformer import Transformer
from canon_pretrain.run.folder import RunFolder
from canon_pretrain.titan.command_line import parse_job
from canon_pretrain.titan.resume import RankZero, Resume
from tests.checkpoint_folders import contents
from tests.fault_runs import (
    EVERY_2,
    STEPS,
    a_folder,
    checkpoint,
    copy,
    empty,
    flip,
    grow,
    missing,
    quarantine,
    resumed_from,
    steps,
    truncate,
    zero_4k,
)
from tests.ranks import assert_refused, assert_same_run, events, status
from tests.support import debug_run

NEWEST = STEPS


@pytest.fixture(scope="module")
def rank_zero(tmp_path_factory):
    store = tmp_path_factory.mktemp("store") / "store"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield RankZero()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def model(base):
    """The base run's model; each test loads other weights into it."""
    return Transformer(parse_job([str(word) for word in debug_run(base, base)]).model_args)


def resume(
    run: Path,
    rank_zero: RankZero,
    model: Transformer,
    asked: int = -1,
    *,
    folder: str = "checkpoint",
) -> tuple[int | None, list[dict[str, Any]]]:
    """What a launch would go on from, loaded into `model`; and the events that it would log."""
    said: list[dict[str, Any]] = []
    search = Resume(
        CheckpointFolder(run / folder),
        RunFolder(run),
        rank_zero,
        ModelWrapper([model]),
        {},
        lambda name, **fields: said.append({"event": name, **fields}),
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(torch.nan)
    return search.resume(asked, initial="", initial_model_only=False), said


def assert_holds(model: Transformer, base: Path, step: int | None) -> None:
    """The model has the weights that the unharmed run had at `step`."""
    assert step is not None
    own = model.state_dict()
    saved = saved_weights(model, checkpoint(base, step))
    for name, tensor in own.items():
        assert torch.equal(tensor, saved[name]), name


@cache
def saved_weights(model: Transformer, path: Path) -> dict[str, torch.Tensor]:
    weights = {name: torch.empty_like(tensor) for name, tensor in model.state_dict().items()}
    load_alone(weights, path)
    return weights


def two_steps(base: Path, target: Path) -> Path:
    """A run of two checkpoints: steps 10 and 12."""
    for step in (10, NEWEST):
        shutil.copytree(checkpoint(base, step), checkpoint(target, step))
    return target


FILES = ["__0_0.distcp", "__1_0.distcp", ".metadata", "manifest.json"]
FAULTS = [flip, truncate, empty, grow, zero_4k, missing, a_folder]


@pytest.mark.parametrize("file", FILES)
def test_damage_of_a_file_is_found_named_and_gone_around(base, rank_zero, model, tmp_path, file):
    for fault in FAULTS:
        run = two_steps(base, tmp_path / fault.__name__)
        fault(checkpoint(run, NEWEST) / file)
        damaged = contents(checkpoint(run, NEWEST))
        step, said = resume(run, rank_zero, model)
        if (file, fault) in (("manifest.json", flip), ("manifest.json", grow)):
            # a manifest has no hash: it may still say the same, and then it does no harm
            assert step in (10, NEWEST)
        else:
            assert step == 10, fault
        assert_holds(model, base, step)
        if step == 10:
            assert [event["event"] for event in said] == ["quarantine"], fault
            assert said[0]["checkpoint"] == "step-12"
            reason = said[0]["reason"]
            # a byte of a hash makes the file that it is of differ
            assert file in reason or (file, fault) == ("manifest.json", flip), fault
            assert reason in quarantine(run)["step-12.1"], fault
            assert contents(run / "checkpoint" / "quarantine" / "step-12.1") == damaged
            assert steps(run) == [10]


def test_damage_of_the_folder_is_found(base, rank_zero, model, tmp_path):
    def another(newest: Path, source: str) -> None:
        shutil.rmtree(newest)
        shutil.copytree(newest.with_name(source), newest)

    faults: list[tuple[str, Callable[[Path], object]]] = [
        ("__2_0.distcp is not in the manifest", lambda p: (p / "__2_0.distcp").write_bytes(b"x")),
        ("has no manifest.json: it was never finished", lambda p: another(p, "empty")),
        ("its manifest is that of step 10", lambda p: another(p, "step-10")),
    ]
    for number, (reason, fault) in enumerate(faults):
        run = two_steps(base, tmp_path / str(number))
        (run / "checkpoint" / "empty").mkdir()
        fault(checkpoint(run, NEWEST))
        step, said = resume(run, rank_zero, model)
        assert step == 10 and reason in said[0]["reason"] and reason in quarantine(run)["step-12.1"]
        assert_holds(model, base, 10)


def test_whatever_bit_of_a_manifest_flips_weights_are_a_steps(base, rank_zero, model, tmp_path):
    """Nothing vouches for the manifest itself, so it is tried at many places."""
    run = two_steps(base, tmp_path / "run")
    path = checkpoint(run, NEWEST) / "manifest.json"
    good = path.read_bytes()
    taken = []
    for number, position in enumerate(range(0, len(good), 37)):
        content = bytearray(good)
        content[position] ^= 1 << number % 8
        path.write_bytes(content)
        step, _ = resume(run, rank_zero, model)
        assert_holds(model, base, step)
        taken.append(step)
        if step == 10:
            (aside,) = (run / "checkpoint" / "quarantine").glob("step-12.?")
            aside.rename(path.parent)
            shutil.rmtree(run / "checkpoint" / "quarantine")
    assert taken.count(10) > len(taken) / 2


class Plant:
    """Pickles to a call that makes a folder: the proof that it was run."""

    def __init__(self, proof: Path) -> None:
        self.proof = proof

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str]]:
        return os.mkdir, (str(self.proof),)


def plant_in_metadata(newest: Path, proof: Path) -> None:
    (newest / ".metadata").write_bytes(pickle.dumps(Plant(proof)))
    vouch(newest)


def plant_in_an_entry(newest: Path, proof: Path) -> None:
    """The training state of the checkpoint, at a new place at the end of a file."""
    metadata = read_metadata(newest)
    index = next(i for i in metadata.storage_data if i.fqn.startswith("train_state"))
    info = metadata.storage_data[index]
    buffer = io.BytesIO()
    torch.save({"step": Plant(proof)}, buffer)
    path = newest / info.relative_path
    info.offset, info.length = path.stat().st_size, len(buffer.getvalue())
    path.write_bytes(path.read_bytes() + buffer.getvalue())
    (newest / ".metadata").write_bytes(pickle.dumps(metadata))
    vouch(newest)


def vouch(newest: Path) -> None:
    """Make the manifest fit the files."""
    manifest = Manifest.read(newest)
    for name in manifest.files:
        path = newest / name
        manifest.files[name] = FileEntry(path.stat().st_size, sha256_file(path))
    manifest.write(newest)
    verify(newest)


def test_a_launch_passes_damaged_checkpoints_and_ends_as_the_unharmed_run(base, trial):
    """Four faults at once, found by two ranks that share the files: back to step 4."""
    run, proof = copy(base, trial.run), trial.folder / "proof"
    flip(checkpoint(run, 12) / "__1_0.distcp")
    truncate(checkpoint(run, 10) / ".metadata")
    plant_in_an_entry(checkpoint(run, 8), proof)
    plant_in_metadata(checkpoint(run, 6), trial.folder / "proof-2")
    ended = trial.launch(*EVERY_2)
    assert resumed_from(run) == [4]
    assert not proof.exists() and not (trial.folder / "proof-2").exists()
    aside = quarantine(run)
    assert list(aside) == ["step-10.1", "step-12.1", "step-6.1", "step-8.1"]
    logged = {event["checkpoint"]: event["reason"] for event in events(run, "quarantine")}
    for step, word in ((12, "__1_0.distcp has SHA-256"), (10, ".metadata has"), (8, "mkdir")):
        assert word in aside[f"step-{step}.1"] and word in logged[f"step-{step}"]
        assert f"DAMAGED CHECKPOINT: {checkpoint(run, step)}: " in ended.output
    assert_same_run(run, base, step=STEPS)


def test_a_damaged_step_asked_for_by_number_is_not_replaced_by_another(
    base, rank_zero, model, trial
):
    run = copy(base, trial.run)
    flip(checkpoint(run, 8) / "__1_0.distcp")
    before = contents(run / "checkpoint")
    ended = trial.launch(*EVERY_2, "--checkpoint.load_step", 8, check=False)
    assert_refused(ended)
    assert f"checkpoint.load_step = 8: {checkpoint(run, 8)} is damaged: __1_0" in ended.output
    assert status(run).state == "failed" and "load_step = 8" in status(run).reason
    assert contents(run / "checkpoint") == before and steps(run) == steps(base)
    assert not (run / "archive").exists() and not quarantine(run)
    assert events(run, "step") == events(base, "step")
    with pytest.raises(UserError, match="checkpoint.load_step = 12: .* is damaged: .*metadata"):
        missing(checkpoint(run, 12) / ".metadata")
        resume(run, rank_zero, model, asked=12)
    with pytest.raises(UserError, match="load_step = 99: not in .*: 2, 4, 6, 8, 10, 12"):
        resume(run, rank_zero, model, asked=99)
