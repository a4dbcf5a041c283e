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
    """Return a training state of new_weights()."""
    weights = new_weights()
    moments = {}
    for name, weight in weights.items():
        moments[name] = {
            "step": torch.tensor(3.0),
            "exp_avg": torch.ones_like(weight),
            "exp_avg_sq": weight.float(),
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
    """Return a copy of RUN/checkpoint/step-3, next to step-1."""
    shutil.copytree(saved, tmp_path / "run")
    return tmp_path / "run" / "checkpoint" / "step-3"


def assert_equal_weights(weights, expected):
    """Names, dtypes and values are equal."""
    assert weights.keys() == expected.keys()
    for name, tensor in expected.items():
        assert weights[name].dtype == tensor.dtype
        assert torch.equal(weights[name], tensor)


def on_meta():
    return {name: tensor.to("meta") for name, tensor in new_weights().items()}


def test_read_weights_returns_what_was_saved(checkpoint):
    assert_equal_weights(read_weights(checkpoint, on_meta()), new_weights())
    assert checkpoint_step(checkpoint) == 3

    shapes = {name: entry.size for name, entry in stored_tensors(checkpoint).items()}
    assert "optimizer.state.output.scale.exp_avg" in shapes
    of_weights = {n: shape for n, shape in shapes.items() if not n.startswith(TRAINING_STATE)}
    assert of_weights == {name: tensor.shape for name, tensor in new_weights().items()}


def test_stripped_weights_are_those_of_the_checkpoint(checkpoint):
    stripped = checkpoint.with_name("stripped")
    strip_to_weights(checkpoint, stripped)
    shutil.rmtree(checkpoint)
    stripped.rename(checkpoint)

    assert_equal_weights(read_weights(checkpoint, on_meta()), new_weights())
    assert set(stored_tensors(checkpoint)) == set(new_weights())
    assert Manifest.read(checkpoint).kind == "weights"


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("output.scale", {"output.scale": torch.empty(2)}),
        ("more", {"more": torch.empty(1)}),
        ("tok_embeddings.weight", {"tok_embeddings.weight": None}),
    ],
    ids=["shape", "more", "fewer"],
)
def test_another_model_is_refused(checkpoint, name, changes):
    model = {key: tensor for key, tensor in (on_meta() | changes).items() if tensor is not None}
    with refused("checkpoint.other_model", path=checkpoint, name=name):
        read_weights(checkpoint, model)


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


def cut(path):
    path.write_bytes(path.read_bytes()[:100])


@pytest.mark.parametrize(("name", "harm"), [(DATA, cut), (METADATA, Path.unlink)])
@pytest.mark.parametrize("tensor", ["tok_embeddings.weight", "absent"])
def test_damage_is_found_without_the_manifest(checkpoint, name, harm, tensor):
    harm(checkpoint / name)
    with refused("checkpoint.damaged", kind=DamagedCheckpoint, path=checkpoint):
        load_no_dist({tensor: torch.empty(50, 8)}, checkpoint)


@pytest.fixture
def folder_of_odd_steps(checkpoint):
    """Return RUN/checkpoint with steps 1 and 3, two damaged ones, a copy and an unfinished one."""
    folder = checkpoint.parent
    for name in ("step-3.backup", ".saving-step-9", "step-12"):
        shutil.copytree(checkpoint, folder / name)
    (folder / "step-12" / MANIFEST).write_text("{}")
    (folder / "step-7").mkdir()
    return folder


@pytest.mark.parametrize(
    ("step", "code"),
    [(12, "checkpoint.damaged"), (7, "checkpoint.damaged"), (5, "checkpoint.missing")],
)
def test_the_error_names_the_other_steps(folder_of_odd_steps, step, code):
    check_checkpoint(folder_of_odd_steps / "step-3")
    path = folder_of_odd_steps / f"step-{step}"
    with refused(code, path=path, steps=[1, 3, 7, 12]):
        check_checkpoint(path)


@pytest.mark.parametrize("name", ["step-3.backup", "step-", "3"])
def test_a_folder_of_another_name_is_not_a_checkpoint(folder_of_odd_steps, name):
    with refused("checkpoint.not_a_step", path=folder_of_odd_steps / name):
        check_checkpoint(folder_of_odd_steps / name)


def test_what_is_no_checkpoint_is_described(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    for number in range(5):
        RunFolder(tmp_path / "runs" / f"run-{number}").write_config({}, {})

    messages = {}
    for name in ("nowhere", "empty", "file", "runs", "."):
        with refused("checkpoint.not_a_step", path=tmp_path / name) as caught:
            check_checkpoint(tmp_path / name)
        messages[name] = str(caught.value)

    assert len({message.replace(name, "") for name, message in messages.items()}) >= 4
    assert "run-2" in messages["runs"]
    assert "run-3" not in messages["runs"]
