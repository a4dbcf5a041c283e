"""What a plan says of a run, compared with what the trainer makes of the same words."""

import pytest

from canon_pretrain.cluster.planned import (
    data_fingerprint,
    planned_identity,
    planned_values,
)
from canon_pretrain.run.sections import Sections
from canon_pretrain.titan.command_line import parse_job
from canon_pretrain.titan.data import open_data
from canon_pretrain.titan.job_config import CanonJobConfig, value_of
from canon_pretrain.titan.launch import run_identity
from tests.support import ROOT

TINY = ROOT / "train_configs" / "playground" / "tiny"


def test_defaults_are_the_trainers():
    job = CanonJobConfig()
    for section, keys in vars(Sections()).items():
        assert vars(keys) == {key: value_of(job, f"{section}.{key}") for key in vars(keys)}
    identity = run_identity(job, "")
    del identity["data_fingerprint"], identity["model.vocab_size"]
    assert planned_identity({}) == identity


@pytest.mark.parametrize(
    ("config", "options"),
    [
        ("copy", ""),
        ("depo", "--data.task.name_tokens 1 1 --model.canon_set ca --model.position=nope"),
        ("mano", "--optimizer.lr 1 --model.canon-residual false --loss.z-loss 1e-4"),
        ("lano", "--model.ffn none --model.canon_set AB --model.qk_norm none --training.steps 400"),
        (
            "capo",
            "--model.mixer mamba2 --model.position nope --model.canon_set A --model.num_heads 4",
        ),
        ("brevo", "--lr_scheduler.decay_ratio None --model.tie_embeddings True"),
        ("copy", "--model.ffn moe --model.canon_set ABC --model.num_experts 4"),
        ("copy", "--guards.outlier_sigma 6 --model.init lingua --model.init_seed 7"),
        ("copy", "--model.flavor quickstart --model.num_kv_heads 2"),
    ],
)
def test_the_planned_identity_is_the_trainers(config, options, tmp_path):
    path, options = TINY / f"{config}.toml", options.split()
    job = parse_job(["--config", str(path), *options])
    data = open_data(job)
    trained = run_identity(job, data.training.fingerprint, data.identity)
    planned = planned_identity(planned_values(path, options))
    data_fields = {"model.vocab_size", "data_fingerprint", "held_out_fingerprint"}
    assert trained.keys() - planned.keys() <= data_fields
    assert planned == {name: trained[name] for name in planned}


def test_the_fingerprint_is_that_of_the_planned_data(data_folder, tmp_path):
    debug = ROOT / "train_configs" / "debug.toml"
    for options in (
        ["--data.path", str(data_folder)],
        ["--data.path", "", "--data.paths", str(data_folder), "--data.weights", "1"],
    ):
        job = parse_job(["--config", str(debug), *options])
        values = planned_values(debug, options)
        assert data_fingerprint(values) == open_data(job).training.fingerprint
    assert data_fingerprint(planned_values(debug, ["--data.path", str(tmp_path)])) is None
