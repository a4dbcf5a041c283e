"""The launches of a run: numbers, one-shot options, and records."""

import json
import os
import shlex
import shutil
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from canon_pretrain.run import launches
from canon_pretrain.run.folder import RunFolder
from canon_pretrain.run.launches import RunFacts, already_applied, mark_applied, read_run
from tests.checkpoint_folders import fill, small_disk
from tests.ranks import events, launch
from tests.support import debug_run

OPTION = "checkpoint.load_step=4"


def slurm(job, restart=None):
    return {"SLURM_JOB_ID": job} | ({} if restart is None else {"SLURM_RESTART_COUNT": restart})


def torchrun(run, attempt):
    return {"TORCHELASTIC_RUN_ID": run, "TORCHELASTIC_RESTART_COUNT": str(attempt)}


@pytest.mark.parametrize(
    ("first", "now", "expected"),
    [
        ({}, {}, False),  # started twice
        (slurm("7"), slurm("7", "1"), True),  # requeued
        (slurm("7", "1"), slurm("7", "2"), True),
        (slurm("7", "1"), slurm("7", "1"), False),  # a second srun in one job
        (slurm("7"), slurm("8"), False),  # submitted anew
        (torchrun("a", 0), torchrun("a", 1), True),  # torchrun restarted its workers
        (torchrun("a", 0), torchrun("a", 0), False),
        (torchrun("none", 0), torchrun("none", 1), True),  # no run id, the same parent
        (slurm("7") | torchrun("a", 0), slurm("8") | torchrun("a", 1), False),
        (slurm("7") | torchrun("7-0", 2), slurm("7", "1") | torchrun("7-1", 0), True),
    ],
)
def test_one_shot_options_are_applied_once_per_job(first, now, expected, tmp_path, monkeypatch):
    path = tmp_path / "obeyed.json"
    path.write_text("damaged")
    assert not already_applied(path, OPTION, now)
    mark_applied(path, OPTION, first)
    assert already_applied(path, OPTION, now) is expected
    # other options are independent
    assert not already_applied(path, "checkpoint.load_step=5", now)
    if now == torchrun("none", 1):  # the same run id of another torchrun agent
        monkeypatch.setattr("os.getppid", lambda: 1)
        assert not already_applied(path, OPTION, now)


@pytest.fixture(autouse=True)
def few_packages(monkeypatch):
    """Reading the metadata of all packages is slow; whole launches do it."""
    monkeypatch.setattr(launches, "packages", lambda: ["numpy==1"])


def write_record(run, run_record):
    """Write a record of `run_record` with an empty configuration; return the problems."""
    if not run.config_file.exists():
        run.write_config({"job": {}}, {})
    record = launches.LaunchRecord(run_record, [], fingerprint="f", folders=["d"])
    return record.write(run, {"world_size": 1, "versions": {}})


def test_launches_are_counted_without_run_json(tmp_path):
    run = RunFolder(tmp_path)
    first, problem = launches.begin_launch(run)
    assert first.launches == 1 and problem is None
    second = launches.begin_launch(run)[0]
    assert second == replace(first, launches=2)
    write_record(run, second)
    run.run_file.write_text("{")
    assert read_run(run) is None
    assert launches.begin_launch(run)[0] == replace(first, launches=3), "from the records"


def test_a_users_own_readme_is_kept(tmp_path):
    run, texts = RunFolder(tmp_path), []
    for number in (7, 8):
        write_record(run, RunFacts("0123abcd", "2026-11-20T12:00:00+00:00", number))
        texts.append(run.readme_file.read_text())
    assert texts[0] != texts[1], "ours is rewritten"
    run.readme_file.write_text("# my notes\n")
    write_record(run, RunFacts("0123abcd", "2026-11-20T12:00:00+00:00", 9))
    assert run.readme_file.read_text() == "# my notes\n"
    assert launches.launch_numbers(run) == [7, 8, 9]


def test_a_full_disk_leaves_no_partial_record(tmp_path):
    with small_disk(tmp_path / "disk", "size=64k") as disk:
        RunFolder(disk).write_config({"job": {}}, {})
        filler = fill(disk)
        run_record, problem = launches.begin_launch(RunFolder(disk))
        assert problem is not None
        assert len(write_record(RunFolder(disk), run_record)) == 1
        filler.unlink()
        assert launches.launch_numbers(RunFolder(disk)) == []
        assert [path.name for path in disk.rglob("*") if path.is_file()] == ["config.json"]


@pytest.mark.parametrize(
    ("environ", "nodes"),
    [("", 0), ("WORLD_SIZE=8", 1), ("WORLD_SIZE=16 TORCHELASTIC_RUN_ID=7", 2)],
)
def test_the_resume_command(environ, nodes):
    arguments = [
        "--config",
        "a b.toml",
        "--run.stop-at",
        "5",
        "--checkpoint.fresh",
        "--optimizer.lr=2",
    ]
    arguments += [
        "--checkpoint.load_step=3",
        "--run.allow_changes",
        "a.b",
        "c.d",
        "--compile.enable",
    ]
    variables = dict(word.split("=") for word in environ.split())
    command = shlex.split(launches.resume_command(arguments, variables | {"LOCAL_WORLD_SIZE": "8"}))
    place = command.index("-m")
    assert command[place + 2 :] == ["--config", "a b.toml", "--optimizer.lr=2", "--compile.enable"]
    launcher, *options = command[:place]
    values = dict(zip(options[::2], options[1::2], strict=True))
    assert launcher == ("torchrun" if nodes else "python")
    assert values.get("--nproc-per-node") == ("8" if nodes else None)
    assert values.get("--nnodes") == ("2" if nodes > 1 else None)


SECRETS = {"HF_TOKEN": "planted-token-1", "DB_PASS": "planted-pass-2", "SLURM_JWT": "planted-jwt-3"}
STARTS: dict[str, tuple[object, ...]] = {
    "first": ("--run.stop_at", 2),
    "refused": ("--optimizer.lr", 1),
    "second": ("--run.stop_at=3",),
    "idle": ("--run.stop_at=3",),
    "fresh": ("--checkpoint.fresh", "--run.stop_at", 1),
}


@pytest.fixture(scope="module")
def launched(data_folder, tmp_path_factory):
    """Copies of one run's folder, after each of STARTS."""
    base, runs = tmp_path_factory.mktemp("launched"), {}
    command = [*debug_run(data_folder, base / "run"), "--job.description", "tried by me"]
    environment = SECRETS | {"SLURM_JOB_ID": "812", "SLURM_JOB_NODELIST": "n[1-2]"}
    options: dict[str, Any] = {"ranks": 1, "environment": environment, "output": base / "output"}
    for name, start_options in STARTS.items():
        codes = launch(*command, *start_options, check=False, **options).codes
        assert codes == [2 if name == "refused" else 0]
        runs[name] = RunFolder(Path(shutil.copytree(base / "run", base / name)))
    return runs


def json_of(path):
    return json.loads(path.read_text())


@pytest.mark.system
def test_secrets_of_the_environment_are_not_recorded(launched):
    """Issue 17, item 20: the environment is an allow-list, and records have mode 0600."""
    paths = (path for path in launched["fresh"].path.rglob("*") if path.is_file())
    content = b"".join(path.read_bytes() for path in paths)
    assert b"tried by me" in content
    assert not [secret for secret in SECRETS.values() if secret.encode() in content]
    folder = launched["fresh"].launch_path(1)
    assert json_of(folder / "environment.json")["SLURM_JOB_ID"] == "812"
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o600}


@pytest.mark.system
def test_the_record_of_a_launch(launched, data_folder):
    run = launched["first"]
    record, run_record = json_of(run.launch_path(1) / "launch.json"), read_run(run)
    assert (
        run_record is not None
        and run_record.launches == 1
        and len(f"{int(run_record.run_id, 16):08x}") == 8
    )
    assert (record["run_id"], record["launch"], record["from_step"]) == (run_record.run_id, 1, 0)
    assert record["job"] == {"id": "812", "restart_count": 0, "nodes": "n[1-2]"}
    assert record["data"]["folders"] == [str(data_folder)]
    assert record["data"]["fingerprint"] == run.read_config()["identity"]["data_fingerprint"]
    assert record["command"]["arguments"][-2:] == ["--run.stop_at", "2"]
    assert "--run.stop_at" not in record["command"]["again"]
    assert record["world_size"] == 1 and len(record["hosts"]) == 1
    assert json_of(run.launch_path(1) / "config.json") == json_of(run.config_file)
    assert f"torch=={version('torch')}" in (run.launch_path(1) / "packages.txt").read_text()
    names = {path.name for path in run.launch_path(1).iterdir()} - {"source.patch"}
    assert names == {"launch.json", "config.json", "packages.txt", "environment.json"}


@pytest.mark.system
def test_log_lines_have_run_id_and_segment(launched):
    record = launches.newest_launch(launched["second"])
    assert record is not None
    lines = [json.loads(line) for line in launched["second"].log_file.read_text().splitlines()]
    assert {line["run_id"] for line in lines} == {record["run_id"]}
    heads = [line for line in lines if line["event"] in ("start", "resume")]
    assert [(head["event"], head["segment"]) for head in heads] == [("start", 1), ("resume", 2)]
    assert heads[1]["from_step"] == record["from_step"] == 2
    assert [line["segment"] for line in lines] == sorted(line["segment"] for line in lines)
    for head in heads:
        git = {"commit": head["git_commit"], "dirty": head["git_dirty"]}
        assert git.items() <= record["git"].items()
        assert (head["config_hash"], head["job_id"]) == (record["config_hash"], "812")
        assert head["hosts"] == record["hosts"]


@pytest.mark.system
def test_only_launches_that_train_are_counted(launched):
    first, refused, second, idle, fresh = launched.values()
    for name in ("run.json", "config.json", "log.jsonl", "README.md"):
        assert (first.path / name).read_bytes() == (refused.path / name).read_bytes(), name
    before, continued, new = read_run(first), read_run(second), read_run(fresh)
    assert before is not None and new is not None
    assert continued == RunFacts(before.run_id, before.created, 2) == read_run(idle)
    assert [event["step"] for event in events(second.path, "step")] == [1, 2, 3]
    # a fresh start is another run
    archive = RunFolder(fresh.path / "archive" / "1-before-a-fresh-start")
    assert new.run_id != before.run_id and new.launches == 1 and read_run(archive) == continued
    folders = (refused, second, idle, fresh, archive)
    assert [launches.launch_numbers(run) for run in folders] == [[1], [1, 2], [1, 2], [1], [1, 2]]


@pytest.mark.system
def test_the_readme_lists_files_and_commands(launched, data_folder):
    text = launched["second"].readme_file.read_text()
    names = {path.name for path in launched["second"].path.iterdir()} - {"README.md"}
    assert [name for name in names if name not in text] == []
    again = next(line for line in text.splitlines() if "canon_pretrain.train" in line)
    assert f"--data.path {data_folder}" in again and "stop_at" not in again
    assert f"cd {os.getcwd()}\n" in text and "launch 2" in text.lower()
