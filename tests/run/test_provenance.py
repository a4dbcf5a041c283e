"""What a launch writes down about itself, in real run folders and about real git repositories."""

import json
import os
import shutil
import sys
from dataclasses import dataclass
from importlib.metadata import distributions, version
from pathlib import Path
from typing import Any

import pytest
import setuptools

from canon_pretrain.run import launches as provenance
from canon_pretrain.run.folder import RunFolder
from canon_pretrain.run.launches import (
    LaunchRecord,
    RunFacts,
    begin_launch,
    command_again,
    config_hash,
    launch_numbers,
    newest_launch,
    packages,
    read_run,
)
from tests.checkpoint_folders import fill, small_disk
from tests.ranks import Ended, events, launch
from tests.support import debug_run

SECRETS = {
    "HF_TOKEN": "planted-in-a-token-1",
    "DB_PASS": "planted-in-a-pass-2",
    "SLURM_JWT": "planted-in-jwt-3",
}


def json_of(path: Path) -> Any:
    return json.loads(path.read_text())


def all_text(folder: Path) -> bytes:
    return b"".join(path.read_bytes() for path in folder.rglob("*") if path.is_file())


# ---- whole launches


@dataclass(frozen=True)
class Launched:
    """A run folder after a launch, a refused one, one that goes on and one that finds nothing to
    do; and after a fresh start."""

    first: Path
    refused: Path
    second: Path
    idle: Path
    fresh: Path
    output: str
    data: Path


@pytest.fixture(scope="module")
def launched(data_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Launched:
    base = tmp_path_factory.mktemp("launched")
    run, output = base / "run", []

    def start(name: str, *more: object, check: bool = True) -> Path:
        ended: Ended = launch(
            *debug_run(data_folder, run),
            *("--job.description", "tried by me"),
            *more,
            output=base / "output",
            ranks=1,
            environment=SECRETS | {"SLURM_JOB_ID": "812", "SLURM_JOB_NODELIST": "n[1-2]"},
            check=check,
        )
        output.append(ended.output)
        return Path(shutil.copytree(run, base / name))

    return Launched(
        start("first", "--run.stop_at", 2),
        start("refused", "--optimizer.lr", 1, check=False),
        start("second", "--run.stop_at=3"),
        start("idle", "--run.stop_at=3"),
        start("fresh", "--checkpoint.fresh", "--run.stop_at", 1),
        "".join(output),
        data_folder,
    )


def test_secrets_of_the_environment_are_not_recorded(launched: Launched) -> None:
    """Issue 17, item 20: the environment is an allow-list, and a record is its user's alone."""
    found = all_text(launched.fresh)
    assert b"tried by me" in found
    for secret in SECRETS.values():
        assert secret.encode() not in found
    record = RunFolder(launched.fresh).launch_path(1)
    assert json_of(record / "environment.json")["SLURM_JOB_ID"] == "812"
    assert {path.stat().st_mode & 0o777 for path in record.iterdir()} == {0o600}


def test_a_launch_says_what_it_was(launched: Launched) -> None:
    run = RunFolder(launched.first)
    record = json_of(run.launch_path(1) / "launch.json")
    facts = read_run(run)
    assert facts is not None and facts.launches == 1 and len(facts.run_id) == 8
    int(facts.run_id, 16)
    assert (record["run_id"], record["launch"], record["from_step"]) == (facts.run_id, 1, 0)
    assert record["job"] == {"id": "812", "restart_count": 0, "nodes": "n[1-2]"}
    assert record["data"]["folders"] == [str(launched.data)]
    identity = run.read_config()["identity"]
    assert record["data"]["fingerprint"] == identity["data_fingerprint"]
    assert record["command"]["arguments"][-2:] == ["--run.stop_at", "2"]
    assert "--run.stop_at" not in record["command"]["again"]
    assert record["world_size"] == 1 and len(record["hosts"]) == 1
    assert json_of(run.launch_path(1) / "config.json") == json_of(run.config_file)
    assert f"torch=={version('torch')}" in (run.launch_path(1) / "packages.txt").read_text()
    names = {path.name for path in run.launch_path(1).iterdir()}
    assert names - {"source.patch"} == {
        *("launch.json", "config.json", "packages.txt", "environment.json")
    }
    assert ("source.patch" in names) == (record["git"]["patch"] is not None)


def test_the_log_names_run_and_launch_in_every_line(launched: Launched) -> None:
    record = newest_launch(RunFolder(launched.second))
    assert record is not None
    text = RunFolder(launched.second).log_file.read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    assert {line["run_id"] for line in lines} == {record["run_id"]}
    heads = [line for line in lines if line["event"] in ("start", "resume")]
    assert [(head["event"], head["segment"]) for head in heads] == [("start", 1), ("resume", 2)]
    assert heads[1]["from_step"] == 2
    assert [line["segment"] for line in lines] == sorted(line["segment"] for line in lines)
    for head in heads:
        assert head["git_commit"] == record["git"]["commit"]
        assert head["git_dirty"] == record["git"]["dirty"]
        assert (head["config_hash"], head["job_id"]) == (record["config_hash"], "812")
        assert head["hosts"] == record["hosts"]


def test_only_launches_that_train_are_counted(launched: Launched) -> None:
    assert "going on would change it" in launched.output and "nothing to do" in launched.output
    first, refused = RunFolder(launched.first), RunFolder(launched.refused)
    for name in ("run.json", "config.json", "log.jsonl", "README.md"):
        assert (first.path / name).read_bytes() == (refused.path / name).read_bytes(), name
    second, idle, fresh = map(RunFolder, (launched.second, launched.idle, launched.fresh))
    before, facts, new = read_run(first), read_run(second), read_run(fresh)
    assert before is not None and new is not None
    assert facts == RunFacts(before.run_id, before.created, 2) == read_run(idle)
    newest = newest_launch(second)
    assert newest is not None and newest["from_step"] == 2
    assert [event["step"] for event in events(second.path, "step")] == [1, 2, 3]
    # a fresh start is another run
    archive = RunFolder(fresh.path / "archive" / "1-before-a-fresh-start")
    assert new.run_id != before.run_id and new.launches == 1 and read_run(archive) == facts
    folders = (refused, second, idle, fresh, archive)
    assert [launch_numbers(run) for run in folders] == [[1], [1, 2], [1, 2], [1], [1, 2]]


def test_the_readme_names_what_is_there_and_what_to_type(launched: Launched) -> None:
    text = RunFolder(launched.second).readme_file.read_text()
    for entry in launched.second.iterdir():
        if entry.name != "README.md":
            assert entry.name in text, entry.name
    again = next(line for line in text.splitlines() if "canon_pretrain.train" in line)
    assert f"--data.path {launched.data}" in again and "stop_at" not in again
    assert "python -m eval run --checkpoint" in text and "run status" in text
    assert f"cd {os.getcwd()}\n" in text
    assert "launch 2" in text.lower()


# ---- the record, by itself


@pytest.fixture(autouse=True)
def few_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading the metadata of all that is installed takes a while; whole launches do it."""
    monkeypatch.setattr(provenance, "packages", lambda: ["numpy==1"])


def write_record(run: RunFolder, facts: RunFacts, **options: Any) -> list[str]:
    """A record of `facts` with made-up configuration; what it says went wrong."""
    record = LaunchRecord(
        facts, options.pop("arguments", []), fingerprint="f", folders=["d"], **options
    )
    record.header()
    made_up = {"world_size": 1, "versions": {}}
    return record.write(run, config={"job": {}}, identity={}, facts=made_up)


FACTS = RunFacts("0123abcd", "2026-11-20T12:00:00+00:00", 7)


def test_a_persons_own_readme_stays(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    write_record(run, FACTS)
    ours = run.readme_file.read_text()
    write_record(run, RunFacts(FACTS.run_id, FACTS.created, 8))
    assert run.readme_file.read_text() != ours, "ours is written anew"
    run.readme_file.write_text("# my notes\n")
    write_record(run, RunFacts(FACTS.run_id, FACTS.created, 9))
    assert run.readme_file.read_text() == "# my notes\n"
    assert launch_numbers(run) == [7, 8, 9]


def test_a_full_disk_gives_one_sentence_and_leaves_no_half_record(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "size=64k") as disk:
        filler = fill(disk)
        assert begin_launch(RunFolder(disk))[1] is not None
        problems = write_record(RunFolder(disk), FACTS)
        assert len(problems) == 1 and "No space left" in problems[0]
        filler.unlink()
        assert launch_numbers(RunFolder(disk)) == []
        assert [path.name for path in disk.rglob("*") if path.is_file()] == []


def test_packages_are_those_that_are_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    without = packages()
    monkeypatch.setattr(sys, "path", [*sys.path, str(Path(setuptools.__file__).parent / "_vendor")])
    assert packages() == without
    path = [folder for folder in sys.path if "_vendor" not in folder]
    pairs = ((each.metadata["Name"], each.version) for each in distributions(path=path))
    assert packages() == sorted({f"{name}=={version}" for name, version in pairs}, key=str.lower)


@pytest.mark.parametrize(
    ("environ", "program"),
    [
        ({}, "python -m canon_pretrain.train"),
        (
            {"WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "8"},
            "torchrun --nproc-per-node 8 -m canon_pretrain.train",
        ),
        (
            {"WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8", "TORCHELASTIC_RUN_ID": "7"},
            "torchrun --nnodes 2 --rdzv-backend c10d --rdzv-endpoint HOST:PORT "
            "--nproc-per-node 8 -m canon_pretrain.train",
        ),
    ],
)
def test_the_command_that_goes_on(environ: dict[str, str], program: str) -> None:
    given = ["--config", "a b.toml", "--run.stop-at", "5", "--checkpoint.fresh", "--optimizer.lr=2"]
    given += ["--checkpoint.load_step=3", "--run.allow_changes", "a.b", "c.d", "--compile.enable"]
    assert command_again(given, environ) == (
        f"{program} --config 'a b.toml' --optimizer.lr=2 --compile.enable"
    )


def test_equal_configurations_have_equal_hashes() -> None:
    config, turned = {"a": {"x": 1, "y": [1, 2]}, "c": 3}, {"c": 3, "a": {"y": [1, 2], "x": 1}}
    other = {"a": {"x": 2, "y": [1, 2]}, "c": 3}
    assert config_hash(config) == config_hash(turned) != config_hash(other)
    assert config_hash(config, ["a.x"]) == config_hash(other, ["a.x"])
