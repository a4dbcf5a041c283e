"""A run's identity: which changes are refused, allowed by name, or only noted."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import canon_pretrain
from canon_pretrain.core.files import UnreadableFile
from canon_pretrain.run.folder import RunFolder
from canon_pretrain.run.source import code_hashes
from canon_pretrain.titan.command_line import parse_job
from canon_pretrain.titan.launch import (
    check_identity,
    code_changes,
    config_changes,
    describe_changes,
    run_identity,
)
from tests.support import ROOT, refused

DEBUG = str(ROOT / "train_configs" / "debug.toml")


def job(*options, config=DEBUG):
    """Parse a config with these options."""
    return parse_job(["--config", config, *map(str, options)])


def recorded(folder, *options, config=DEBUG):
    """Return the folder of a run whose first launch was of this job, on data called `shards`."""
    first = job(*options, config=config)
    run = RunFolder(folder)
    run.write_config(first.to_dict(), run_identity(first, "shards"))
    return run


def identity_changes(run, now, fingerprint="shards", allowed=()):
    """Return how a launch of the job `now` changes the run's identity, or refuse it."""
    return check_identity(run, run_identity(now, fingerprint), list(allowed), now.to_dict())


@pytest.mark.parametrize("config", sorted((ROOT / "train_configs").glob("*.toml")))
def test_the_same_experiment_again_is_the_same_run(config, tmp_path):
    run = recorded(tmp_path, config=str(config))
    again = job(config=str(config))
    assert identity_changes(run, again) == {}
    assert config_changes(run, again.to_dict()) == {}


def test_code_is_compared_by_its_files(tmp_path):
    """An edited file, a new one, and one that training does not use."""
    package = Path(canon_pretrain.__file__).parent
    copied = tmp_path / "site-packages" / "canon_pretrain"
    shutil.copytree(package, copied, ignore=shutil.ignore_patterns("__pycache__"))
    code = code_hashes()
    assert code_hashes(copied) == code

    # a run without a record of its code, and with one
    run = recorded(tmp_path / "run")
    assert code_changes(run, code, refuse=True) == {}
    first = job()
    run.write_config(first.to_dict(), run_identity(first, "shards"), code)
    assert code_changes(run, code, refuse=True) == {}

    loss = copied / "titan" / "spec.py"
    loss.write_text(loss.read_text() + "\nSCALE = 1.7\n")
    (copied / "titan" / "more.py").touch()
    (copied / "report" / "plot.py").unlink()  # training does not use it

    changed = code_changes(run, code_hashes(copied), refuse=False)
    assert changed.keys() == {"titan/spec.py", "titan/more.py"}
    assert changed["titan/more.py"][0] is None
    with refused("run.code_changed", files=sorted(changed)):
        code_changes(run, code_hashes(copied), refuse=True)


PRINT_IMPORTED_FILES = """
from canon_pretrain.titan.device import prepare_device
prepare_device()
import sys, canon_pretrain.train, canon_pretrain.titan.trainer
for name, module in sys.modules.items():
    if name.startswith("canon_pretrain."):
        print(module.__file__)
"""


@pytest.mark.system
def test_the_code_that_is_hashed_is_what_the_trainer_imports():
    output = subprocess.check_output(
        [sys.executable, "-c", PRINT_IMPORTED_FILES],
        env=os.environ | {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""},
        text=True,
    )
    package = Path(canon_pretrain.__file__).parent
    files = {Path(name).relative_to(package).as_posix() for name in output.split()}
    assert "model/transformer.py" in files
    assert {name for name in files if not name.endswith("__init__.py")} <= code_hashes().keys()


CHANGES: dict[str, list[Any]] = {
    "data.data_seed": [0, 1],
    "data.order": ["random", "permute"],
    "lr_scheduler.decay_type": ["cosine", "linear"],
    "lr_scheduler.warmup_steps": [4, 2],
    "model.canon_set": ["ABCD", "A"],
    "model.init_seed": [0, 3],
    "optimizer.beta2": [0.98, 0.95],
    "optimizer.lr": [0.003, 0.001],
    "training.global_batch_size": [12, 8],
    "training.max_norm": [1.0, 0.5],
    "training.mixed_precision_param": ["float32", "bfloat16"],
    "training.steps": [12, 50],
    "guards.outlier_sigma": [None, 6.0],
    "guards.outlier_window": [128, 16],
    "loss.z_loss": [0.0, 0.0001],
}


def test_changes_are_refused_until_they_are_named(tmp_path):
    run = recorded(tmp_path)
    new_values = [word for name, (_, new) in CHANGES.items() for word in (f"--{name}", new)]
    now = job(*new_values)
    all_changes = CHANGES | {"data_fingerprint": ["shards", "others"]}

    # one of them is named
    with refused("run.changed", changes=CHANGES, allow=sorted(all_changes)) as caught:
        identity_changes(run, now, "others", allowed=["data_fingerprint"])
    message = caught.value.message
    for name, (old, new) in CHANGES.items():
        assert f"{name}: {old!r} -> {new!r}" in message
    assert f"--run.allow_changes {' '.join(sorted(all_changes))}" in message

    # all are named
    assert identity_changes(run, now, "others", allowed=[",".join(all_changes)]) == all_changes


ONE_FOLDER = ("--data.path", "/data/a")
OTHER_FOLDER = ("--data.path", "/data/b")
MIXED = ("--data.paths", "/data/a", "/data/b", "--data.weights", 1, 1)
OTHER_WEIGHTS = ("--data.paths", "/data/a", "/data/b", "--data.weights", 1, 3)
COPY = ("--data.task.name", "copy", "--data.task.n", 8)


@pytest.mark.parametrize(
    ("before", "after", "old_value", "new_value"),
    [
        pytest.param(ONE_FOLDER, OTHER_FOLDER, "'/data/a'", "'/data/b'", id="other folder"),
        pytest.param(ONE_FOLDER, ONE_FOLDER, "aaaaaaaa", "bbbbbbbb", id="other content"),
        pytest.param(MIXED, OTHER_WEIGHTS, "[1.0, 1.0]", "[1.0, 3.0]", id="other weights"),
        pytest.param(ONE_FOLDER, COPY, "'/data/a'", "'copy'", id="a task"),
    ],
)
def test_a_change_of_data_names_what_was_and_is_read(before, after, old_value, new_value, tmp_path):
    """Not two hashes: the keys that select the data, and the option that allows the change."""
    old_hash = "a" * 64
    new_hash = "b" * 64
    run = RunFolder(tmp_path)
    first = job(*before)
    run.write_config(first.to_dict(), run_identity(first, old_hash))

    with refused("run.changed", changes={"data_fingerprint": [old_hash, new_hash]}) as caught:
        identity_changes(run, job(*after), new_hash)

    message = caught.value.message
    assert message.index("data_fingerprint: data.") < message.index(old_value)
    assert message.index(old_value) < message.index(" -> ") < message.index(new_value)
    assert message.endswith("--run.allow_changes data_fingerprint")
    assert old_hash not in message
    assert new_hash not in message


def test_a_change_of_the_held_out_split_names_its_folder():
    data = {"path": "/data/a", "paths": []}
    old_config = {"data": data, "validation": {"path": ""}}
    new_config = {"data": data, "validation": {"path": "/data/b"}}
    fingerprints = ["a" * 64 + "+" + "c" * 64, "b" * 64]

    (line,) = describe_changes({"held_out_fingerprint": fingerprints}, old_config, new_config)

    assert line == (
        "held_out_fingerprint: data.path = '/data/a' (fingerprint aaaaaaaa+cccccccc) -> "
        "validation.path = '/data/b' (fingerprint bbbbbbbb)"
    )


def test_a_name_that_cannot_be_allowed_is_refused(tmp_path):
    """One of a key that is only noted, or an unknown one."""
    names = ["optimizer.rate", "metrics.log_freq"]
    with refused("run.unknown_change", names=names):
        identity_changes(RunFolder(tmp_path / "new"), job(), allowed=names)
    with refused("run.unknown_change", names=names):
        job("--run.allow_changes", *names)
    job("--run.allow_changes", "code,data.task.n", "held_out_fingerprint")


def test_all_else_is_only_noted(tmp_path):
    run = recorded(tmp_path, "--run.stop_at", 5)
    now = job(
        *("--metrics.log_freq", 3),
        *("--checkpoint.interval", 2),
        *("--loss.chunk_tokens", 0),
        "--checkpoint.fresh",
    )
    assert identity_changes(run, now) == {}
    assert config_changes(run, now.to_dict()) == {
        "checkpoint.interval": [6, 2],
        "loss.chunk_tokens": [4096, 0],
        "metrics.log_freq": [1, 3],
    }


def test_a_key_unknown_to_an_older_run_was_at_its_default(tmp_path):
    run = recorded(tmp_path)
    record = run.read_config()
    del record["identity"]["model.ffn"]
    del record["identity"]["loss.z_loss"]
    del record["config"]["validation"]["windows"]
    run.write_config(record["config"], record["identity"])

    same = job()
    assert identity_changes(run, same) == {}
    assert config_changes(run, same.to_dict()) == {}

    other = job("--model.ffn", "standard", "--validation.windows", 8)
    ffn = {"model.ffn": ["gated", "standard"], "model.ffn_dim": [176, 256]}
    with refused("run.changed", changes=ffn):
        identity_changes(run, other)
    assert config_changes(run, other.to_dict())["validation.windows"] == [None, 8]


def test_a_key_without_a_default_counts_as_changed(tmp_path):
    run = recorded(tmp_path)
    record = run.read_config()
    del record["identity"]["optimizer.eps"]
    run.write_config(record["config"], record["identity"])
    with refused("run.changed", changes={"optimizer.eps": [None, 1e-6]}):
        identity_changes(run, job())


def test_an_unreadable_record_is_refused(tmp_path):
    run = recorded(tmp_path)
    run.config_file.write_text("{")
    with refused("file.unreadable", kind=UnreadableFile, path=run.config_file):
        identity_changes(run, job())
