"""Reading weights from a checkpoint, and errors that name the file."""

import shutil
from pathlib import Path

import pytest
import torch

from canon_pretrain.checkpoint.manifest import MANIFEST, DamagedCheckpoint, Manifest
from canon_pretrain.checkpoint.safe_load import METADATA
from canon_pretrain.checkpoint.weights import (
    TRAINING_STATE,
    check_checkpoint,
    checkpoint_step,
    load_no_dist,
    read_weights,
    stored_tensors,
    strip_to_weights,
)
from canon_pretrain.checkpoint.writer import save_no_dist
from canon_pretrain.run.folder import RunFolder
from tests.checkpoint_folders import flip_byte
from tests.support import refused

DATA = "__0_0.distcp"


def new_weights():
    generator = torch.Generator().manual_seed(3)
    return {
        "tok_embeddings.weight": torch.randn(50, 8, generator=generator),
        "layers.0.norm.weight": torch.randn(8, generator=generator).bfloat16(),
        "output.scale": torch.tensor(0.5, dtype=torch.float64),
    }


def new_state():
    weights = new_weights()
    moments = {
        name: {"step": torch.tensor(3.0), "exp_avg": torch.ones_like(w), "exp_avg_sq": w.float()}
        for name, w in weights.items()
    }
    return weights | {
        "optimizer": {"state": moments, "param_groups": {"lr": 0.1, "betas": (0.9, 0.95)}},
        "lr_scheduler": {"last_epoch": 3, "base_lrs": [0.1]},
        "dataloader": {"next_sample": 36},
        "train_state": {"step": 3},
        "guards": {"skipped": torch.tensor(0), "in_a_row": 0},
    }


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    run = tmp_path_factory.mktemp("run")
    for step in (1, 3):
        save_no_dist(new_state(), run / "checkpoint" / f"step-{step}", step=step)
    return run


@pytest.fixture
def checkpoint(saved, tmp_path):
    """A copy of RUN/checkpoint/step-3, beside step-1."""
    shutil.copytree(saved, tmp_path / "run")
    return tmp_path / "run" / "checkpoint" / "step-3"


def check_equal(found, expected):
    assert {name: t.dtype for name, t in found.items()} == {n: t.dtype for n, t in expected.items()}
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def on_meta():
    return {name: tensor.to("meta") for name, tensor in new_weights().items()}


def test_read_weights_returns_what_was_saved(checkpoint):
    check_equal(read_weights(checkpoint, on_meta()), new_weights())
    assert checkpoint_step(checkpoint) == 3
    shapes = {name: entry.size for name, entry in stored_tensors(checkpoint).items()}
    assert {n: s for n, s in shapes.items() if not n.startswith(TRAINING_STATE)} == {
        name: tensor.shape for name, tensor in new_weights().items()
    }
    assert "optimizer.state.output.scale.exp_avg" in shapes
    stripped = checkpoint.with_name("stripped")
    strip_to_weights(checkpoint, stripped)
    shutil.rmtree(checkpoint)
    stripped.rename(checkpoint)
    check_equal(read_weights(checkpoint, on_meta()), new_weights())
    assert set(stored_tensors(checkpoint)) == set(new_weights())
    assert Manifest.read(checkpoint).kind == "weights"


@pytest.mark.parametrize(
    ("name", "like"),
    [("output.scale", torch.empty(2)), ("more", torch.empty(1)), ("tok_embeddings.weight", None)],
)
def test_another_model_is_refused(checkpoint, name, like):
    wanted = {key: t for key, t in (on_meta() | {name: like}).items() if t is not None}
    with refused("checkpoint.other_model", path=checkpoint, name=name):
        read_weights(checkpoint, wanted)


@pytest.mark.parametrize(("name", "harm"), [(DATA, flip_byte), (METADATA, Path.unlink)])
def test_damage_is_found_and_the_file_is_named(checkpoint, name, harm):
    harm(checkpoint / name)
    for read in (
        lambda: read_weights(checkpoint, on_meta()),
        lambda: strip_to_weights(checkpoint, checkpoint.with_name("new")),
    ):
        with refused("checkpoint.damaged", path=checkpoint) as caught:
            read()
        assert name in str(caught.value.fields["faults"])
    assert not checkpoint.with_name("new").exists()  # damage must not get a valid manifest
    if name == DATA:  # without the manifest
        (checkpoint / DATA).write_bytes((checkpoint / DATA).read_bytes()[:100])
    for tensor in ("tok_embeddings.weight", "absent"):
        with refused("checkpoint.damaged", kind=DamagedCheckpoint, path=checkpoint):
            load_no_dist({tensor: torch.empty(50, 8)}, checkpoint)


def test_a_folder_without_a_manifest_is_not_a_checkpoint(checkpoint):
    """Neither is a copy by hand, or an interrupted save; the error names the other steps."""
    parent = checkpoint.parent
    for name in ("step-3.backup", ".saving-step-9", "step-12"):
        shutil.copytree(checkpoint, parent / name)
    (parent / "step-12" / MANIFEST).write_text("{}")
    (parent / "step-7").mkdir()
    check_checkpoint(checkpoint)
    codes = {12: "checkpoint.damaged", 7: "checkpoint.damaged", 5: "checkpoint.missing"}
    for step, code in codes.items():
        with refused(code, path=parent / f"step-{step}", steps=[1, 3, 7, 12]):
            check_checkpoint(parent / f"step-{step}")
    for name in ("step-3.backup", "step-", "3"):
        with refused("checkpoint.not_a_step", path=parent / name):
            check_checkpoint(parent / name)


def test_what_is_no_checkpoint_is_described(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    for number in range(5):
        RunFolder(tmp_path / "runs" / f"run-{number}").write_config({}, {})
    said = {}
    for name in ("nowhere", "empty", "file", "runs", "."):
        with refused("checkpoint.not_a_step", path=tmp_path / name) as caught:
            check_checkpoint(tmp_path / name)
        said[name] = str(caught.value)
    assert len({text.replace(name, "") for name, text in said.items()}) >= 4
    assert "run-2" in said["runs"] and "run-3" not in said["runs"]
