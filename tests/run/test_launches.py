"""The launches of a run: numbers, one-shot options, and records."""

import json
import os
import shlex
import shutil
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import pytest

from canon_pretrain.run import launches
from canon_pretrain.run.folder import RunFolder
from canon_pretrain.run.launches import RunFacts, already_applied, mark_applied, read_run
from tests.checkpoint_folders import fill, small_disk
from tests.ranks import events, launch
from tests.support import debug_run

OPTION = "checkpoint.load_step=4"


def slurm(job, restart=None):
    """Return Slurm's variables of a job."""
    if restart is None:
        return {"SLURM_JOB_ID": job}
    return {"SLURM_JOB_ID": job, "SLURM_RESTART_COUNT": restart}


def torchrun(run, attempt):
    """Return torchrun's variables of a worker."""
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


def test_one_shot_options_are_applied_once_per_torchrun_agent(tmp_path, monkeypatch):
    """Without a run id, agents are told apart by their process."""
    path = tmp_path / "obeyed.json"
    mark_applied(path, OPTION, torchrun("none", 0))
    assert already_applied(path, OPTION, torchrun("none", 1))

    monkeypatch.setattr("os.getppid", lambda: 1)
    assert not already_applied(path, OPTION, torchrun("none", 1))


@pytest.fixture(autouse=True)
def few_packages(monkeypatch):
    """Reading the metadata of all packages is slow; whole launches do it."""
    monkeypatch.setattr(launches, "packages", lambda: ["numpy==1"])


def write_record(run, facts):
    """Write a record of `facts` with an empty configuration; return the problems."""
    if not run.config_file.exists():
        run.write_config({"job": {}}, {})
    record = launches.LaunchRecord(facts, [], fingerprint="f", folders=["d"])
    return record.write(run, {"world_size": 1, "versions": {}})


def test_launches_are_counted_without_run_json(tmp_path):
    run = RunFolder(tmp_path)
    first, problem = launches.begin_launch(run)
    assert first.launches == 1
    assert problem is None

    second, _ = launches.begin_launch(run)
    assert second == replace(first, launches=2)

    # then from the records
    write_record(run, second)
    run.run_file.write_text("{")
    assert read_run(run) is None
    third, _ = launches.begin_launch(run)
    assert third == replace(first, launches=3)


def test_a_users_own_readme_is_kept(tmp_path):
    run = RunFolder(tmp_path)
    facts = RunFacts("0123abcd", "2026-11-20T12:00:00+00:00", launches=7)

    # ours is rewritten
    write_record(run, facts)
    text = run.readme_file.read_text()
    write_record(run, replace(facts, launches=8))
    assert run.readme_file.read_text() != text

    run.readme_file.write_text("# my notes\n")
    write_record(run, replace(facts, launches=9))
    assert run.readme_file.read_text() == "# my notes\n"
    assert launches.launch_numbers(run) == [7, 8, 9]


def test_a_full_disk_leaves_no_partial_record(tmp_path):
    with small_disk(tmp_path / "disk", "size=64k") as disk:
        run = RunFolder(disk)
        run.write_config({"job": {}}, {})
        filler = fill(disk)

        facts, problem = launches.begin_launch(run)
        assert problem is not None
        assert len(write_record(run, facts)) == 1

        filler.unlink()
        assert launches.launch_numbers(run) == []
        assert [path.name for path in disk.rglob("*") if path.is_file()] == ["config.json"]


@pytest.mark.parametrize(
    ("environ", "nodes"),
    [("", 0), ("WORLD_SIZE=8", 1), ("WORLD_SIZE=16 TORCHELASTIC_RUN_ID=7", 2)],
)
def test_the_resume_command(environ, nodes):
    kept = ["--config", "a b.toml", "--optimizer.lr=2", "--compile.enable"]
    one_shot = ["--run.stop-at", "5", "--checkpoint.fresh", "--checkpoint.load_step=3"]
    allowed = ["--run.allow_changes", "a.b", "c.d"]
    arguments = [*kept[:2], *one_shot[:3], kept[2], one_shot[3], *allowed, kept[3]]
    variables = dict(word.split("=") for word in environ.split())

    command = launches.resume_command(arguments, variables | {"LOCAL_WORLD_SIZE": "8"})

    words = shlex.split(command)
    place = words.index("-m")
    assert words[place + 2 :] == kept
    launcher, *options = words[:place]
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
    base = tmp_path_factory.mktemp("launched")
    command = [*debug_run(data_folder, base / "run"), "--job.description", "tried by me"]

    runs = {}
    for name, words in STARTS.items():
        ended = launch(
            *command,
            *words,
            ranks=1,
            environment=SECRETS | {"SLURM_JOB_ID": "812", "SLURM_JOB_NODELIST": "n[1-2]"},
            output=base / "output",
            check=False,
        )
        assert ended.codes == [2 if name == "refused" else 0]
        runs[name] = RunFolder(Path(shutil.copytree(base / "run", base / name)))
    return runs


def json_of(path):
    return json.loads(path.read_text())


@pytest.mark.system
def test_secrets_of_the_environment_are_not_recorded(launched):
    """Issue 17, item 20: the environment is an allow-list, and records have mode 0600."""
    paths = [path for path in launched["fresh"].path.rglob("*") if path.is_file()]
    content = b"".join(path.read_bytes() for path in paths)
    assert b"tried by me" in content
    for secret in SECRETS.values():
        assert secret.encode() not in content

    folder = launched["fresh"].launch_path(1)
    assert json_of(folder / "environment.json")["SLURM_JOB_ID"] == "812"
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o600}


@pytest.mark.system
def test_the_record_of_a_launch(launched, data_folder):
    run = launched["first"]
    folder = run.launch_path(1)
    facts = read_run(run)
    assert facts.launches == 1
    assert len(f"{int(facts.run_id, 16):08x}") == 8

    record = json_of(folder / "launch.json")
    assert (record["run_id"], record["launch"], record["from_step"]) == (facts.run_id, 1, 0)
    assert record["job"] == {"id": "812", "restart_count": 0, "nodes": "n[1-2]"}
    assert record["data"]["folders"] == [str(data_folder)]
    assert record["data"]["fingerprint"] == run.read_config()["identity"]["data_fingerprint"]
    assert record["command"]["arguments"][-2:] == ["--run.stop_at", "2"]
    assert "--run.stop_at" not in record["command"]["again"]
    assert record["world_size"] == 1
    assert len(record["hosts"]) == 1

    names = {path.name for path in folder.iterdir()} - {"source.patch"}
    assert names == {"launch.json", "config.json", "packages.txt", "environment.json"}
    assert json_of(folder / "config.json") == json_of(run.config_file)
    assert f"torch=={version('torch')}" in (folder / "packages.txt").read_text()


@pytest.mark.system
def test_log_lines_have_run_id_and_segment(launched):
    run = launched["second"]
    record = launches.newest_launch(run)
    lines = [json.loads(line) for line in run.log_file.read_text().splitlines()]

    assert {line["run_id"] for line in lines} == {record["run_id"]}
    segments = [line["segment"] for line in lines]
    assert segments == sorted(segments)

    heads = [line for line in lines if line["event"] in ("start", "resume")]
    assert [(head["event"], head["segment"]) for head in heads] == [("start", 1), ("resume", 2)]
    assert heads[1]["from_step"] == record["from_step"] == 2
    for head in heads:
        assert head["git_commit"] == record["git"]["commit"]
        assert head["git_dirty"] == record["git"]["dirty"]
        assert head["config_hash"] == record["config_hash"]
        assert head["hosts"] == record["hosts"]
        assert head["job_id"] == "812"


@pytest.mark.system
def test_only_launches_that_train_are_counted(launched):
    first, refused, second, idle, fresh = launched.values()
    for name in ("run.json", "config.json", "log.jsonl", "README.md"):
        assert (first.path / name).read_bytes() == (refused.path / name).read_bytes(), name
    assert launches.launch_numbers(refused) == [1]

    facts = read_run(second)
    assert facts == replace(read_run(first), launches=2) == read_run(idle)
    assert [event["step"] for event in events(second.path, "step")] == [1, 2, 3]
    assert launches.launch_numbers(second) == [1, 2]
    assert launches.launch_numbers(idle) == [1, 2]

    # a fresh start is another run
    archive = RunFolder(fresh.path / "archive" / "1-before-a-fresh-start")
    assert read_run(archive) == facts
    assert read_run(fresh).run_id != facts.run_id
    assert read_run(fresh).launches == 1
    assert launches.launch_numbers(fresh) == [1]
    assert launches.launch_numbers(archive) == [1, 2]


@pytest.mark.system
def test_the_readme_lists_files_and_commands(launched, data_folder):
    run = launched["second"]
    text = run.readme_file.read_text()

    names = {path.name for path in run.path.iterdir()} - {"README.md"}
    assert [name for name in names if name not in text] == []

    command = next(line for line in text.splitlines() if "canon_pretrain.train" in line)
    assert f"--data.path {data_folder}" in command
    assert "stop_at" not in command
    assert f"cd {os.getcwd()}\n" in text
    assert "launch 2" in text.lower()
