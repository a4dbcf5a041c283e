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


def job(*more, config=DEBUG):
    return parse_job(["--config", config, *map(str, more)])


def recorded(folder, *more, config=DEBUG):
    first = job(*more, config=config)
    run = RunFolder(folder)
    run.write_config(first.to_dict(), run_identity(first, "shards"))
    return run


@pytest.mark.parametrize("config", sorted((ROOT / "train_configs").glob("*.toml")))
def test_the_same_experiment_again_is_the_same_run(config, tmp_path):
    run = recorded(tmp_path, config=str(config))
    again = job(config=str(config))
    assert check_identity(run, run_identity(again, "shards"), [], again.to_dict()) == {}
    assert config_changes(run, again.to_dict()) == {}


def test_code_is_compared_by_its_files(tmp_path):
    """An edited file, a new one, and one that training does not use."""
    package = Path(canon_pretrain.__file__).parent
    copied = tmp_path / "site-packages" / "canon_pretrain"
    shutil.copytree(package, copied, ignore=shutil.ignore_patterns("__pycache__"))
    code = code_hashes()
    assert code_hashes(copied) == code
    run, first = recorded(tmp_path / "run"), job()
    assert code_changes(run, code, refuse=True) == {}  # a run without a record
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


@pytest.mark.system
def test_the_code_that_is_hashed_is_what_the_trainer_imports():
    words = "from canon_pretrain.titan.device import prepare_device as prepare; prepare(); "
    words += "import sys, canon_pretrain.train, canon_pretrain.titan.trainer; "
    words += "print(*(module.__file__ for name, module in sys.modules.items() "
    words += "if name.startswith('canon_pretrain.')))"
    environment = os.environ | {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    output = subprocess.check_output([sys.executable, "-c", words], env=environment, text=True)
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
    words = [word for name, (_, new) in CHANGES.items() for word in (f"--{name}", new)]
    now = job(*words)
    identity = run_identity(now, "others")
    changes = CHANGES | {"data_fingerprint": ["shards", "others"]}
    with refused("run.changed", changes=CHANGES, allow=sorted(changes)) as caught:
        check_identity(run, identity, ["data_fingerprint"], now.to_dict())
    for name, (old, new) in CHANGES.items():
        assert f"{name}: {old!r} -> {new!r}" in caught.value.message
    assert f"--run.allow_changes {' '.join(sorted(changes))}" in caught.value.message
    assert check_identity(run, identity, [",".join(changes)], now.to_dict()) == changes


MIXED = ("--data.paths", "/data/a", "/data/b", "--data.weights", 1)
COPY = ("--data.task.name", "copy", "--data.task.n", 8)


@pytest.mark.parametrize(
    ("before", "after", "values"),
    [
        # other folders, the same one with other content, other weights, a task
        (("--data.path", "/data/a"), ("--data.path", "/data/b"), ["'/data/a'", "'/data/b'"]),
        (("--data.path", "/data/a"), ("--data.path", "/data/a"), ["aaaaaaaa", "bbbbbbbb"]),
        ((*MIXED, 1), (*MIXED, 3), ["[1.0, 1.0]", "[1.0, 3.0]"]),
        (("--data.path", "/data/a"), COPY, ["'/data/a'", "'copy'"]),
    ],
)
def test_a_change_of_data_names_what_was_and_is_read(before, after, values, tmp_path):
    """Not two hashes: the keys that select the data, and the option that allows the change."""
    run, first, now = RunFolder(tmp_path), job(*before), job(*after)
    old, new = "a" * 64, "b" * 64
    run.write_config(first.to_dict(), run_identity(first, old))
    with refused("run.changed", changes={"data_fingerprint": [old, new]}) as caught:
        check_identity(run, run_identity(now, new), [], now.to_dict())
    message = caught.value.message
    assert message.index("data_fingerprint: data.") < message.index(values[0])
    assert message.index(values[0]) < message.index(" -> ") < message.index(values[1])
    assert message.endswith("--run.allow_changes data_fingerprint")
    assert old not in message and new not in message


def test_a_change_of_the_held_out_split_names_its_folder():
    pair = ["a" * 64 + "+" + "c" * 64, "b" * 64]
    data = {"path": "/data/a", "paths": []}
    old, new = ({"data": data, "validation": {"path": path}} for path in ("", "/data/b"))
    (line,) = describe_changes({"held_out_fingerprint": pair}, old, new)
    assert line == (
        "held_out_fingerprint: data.path = '/data/a' (fingerprint aaaaaaaa+cccccccc) -> "
        "validation.path = '/data/b' (fingerprint bbbbbbbb)"
    )


def test_all_else_is_only_noted(tmp_path):
    """It cannot be allowed by name: such a name, or an unknown one, is refused."""
    names = ["optimizer.rate", "metrics.log_freq"]
    with refused("run.unknown_change", names=names):
        check_identity(RunFolder(tmp_path / "new"), run_identity(job(), "shards"), names, {})
    with refused("run.unknown_change", names=names):
        job("--run.allow_changes", *names)
    job("--run.allow_changes", "code,data.task.n", "held_out_fingerprint")
    run = recorded(tmp_path, "--run.stop_at", 5)
    words = ("--metrics.log_freq", 3, "--checkpoint.interval", 2, "--loss.chunk_tokens", 0)
    now = job(*words, "--checkpoint.fresh")
    assert check_identity(run, run_identity(now, "shards"), [], now.to_dict()) == {}
    assert config_changes(run, now.to_dict()) == {
        "checkpoint.interval": [6, 2],
        "loss.chunk_tokens": [4096, 0],
        "metrics.log_freq": [1, 3],
    }


def test_a_key_unknown_to_an_older_run_was_at_its_default(tmp_path):
    run = recorded(tmp_path)
    stored = run.read_config()
    del stored["identity"]["model.ffn"], stored["config"]["validation"]["windows"]
    del stored["identity"]["loss.z_loss"]
    run.write_config(stored["config"], stored["identity"])
    same, other = job(), job("--model.ffn", "standard", "--validation.windows", 8)
    assert check_identity(run, run_identity(same, "shards"), [], same.to_dict()) == {}
    assert config_changes(run, same.to_dict()) == {}
    ffn = {"model.ffn": ["gated", "standard"], "model.ffn_dim": [176, 256]}
    with refused("run.changed", changes=ffn):
        check_identity(run, run_identity(other, "shards"), [], other.to_dict())
    assert config_changes(run, other.to_dict())["validation.windows"] == [None, 8]
    # a key without a default counts as changed
    del stored["identity"]["optimizer.eps"]
    run.write_config(stored["config"], stored["identity"])
    with refused("run.changed", changes={"optimizer.eps": [None, 1e-6]}):
        check_identity(run, run_identity(same, "shards"), [], same.to_dict())
    run.config_file.write_text("{")
    with refused("file.unreadable", kind=UnreadableFile, path=run.config_file):
        check_identity(run, run_identity(same, "shards"), [], same.to_dict())
