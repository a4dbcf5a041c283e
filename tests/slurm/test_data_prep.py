"""slurm/data_prep.sh: a sharded build by an array job, with failures of its tasks."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.corpora import snapshot, write_corpus, write_tokenizer
from tests.slurm_jobs import Job, processes_of, script
from tests.support import ROOT, error_codes

ODD = 'it\'s "a"; $(touch HIT) 100%d'
SHARDS = 3
FILES = 9


def corpus_in(folder):
    write_corpus(folder / f"text {ODD}", files=FILES)
    return folder / f"text {ODD}", write_tokenizer(folder / "tokenizer.model")


def options(corpus, tokenizer, out):
    return ["--source", "local", "--files", corpus, "--tokenizer", tokenizer, "--out", out,
            "--holdout", 0.1, "--workers", 1]  # fmt: skip


def submitted(done):
    assert done.returncode == 0, done
    return {what: number for number, what in re.findall(r"^job (\d+): (\w+)", done.stdout, re.M)}


@pytest.mark.slurm
def test_failures_of_jobs_do_not_change_a_sharded_build(slurm, jobs, tmp_path):
    """All shards wait in their second input group. One reaches its time limit, is requeued, and
    reaches it again without progress; one is killed. A second submission does the rest."""
    corpus, tokenizer = corpus_in(tmp_path)
    held, out = tmp_path / "held", tmp_path / ODD
    held.mkdir()
    for number in (4, 5, 6):
        (held / f"part{number}.jsonl").touch()
    environ = jobs.environ({"TEST_UNIT_BYTES": 1, "TEST_HELD": held})
    words = ("submit", f"--shards={SHARDS}", "--cpus-per-task=1", "--mem=100", "--", *options(
        corpus, tokenizer, ODD))  # fmt: skip

    def submit():
        return script("data_prep.sh", *words, environ=environ, cwd=tmp_path)

    first = submitted(submit())
    array = first["shards"]
    finish = Job(slurm, first["finish"], tmp_path)
    shards = [Job(slurm, f"{array}_{i}", tmp_path) for i in range(1, SHARDS + 1)]
    logs = Path(f"{out}.logs")

    def log(number):
        return (logs / f"{array}_{number}.log").read_text()

    def built():
        return {int(path.name[5:10]) for path in (out / "train").glob("part-*.json")}

    shards[2].until(lambda: built() == {0, 1, 2}, "the first input group of each")
    twice = submit()
    assert (twice.returncode, error_codes(twice.stderr)) == (2, ["slurm.queued"])

    # the last task has the array's own id, by which scontrol would requeue all tasks
    assert shards[2].field("JobId") == array
    shards[2].update("TimeLimit=1")
    shards[2].until_requeued(1)
    shards[2].update("TimeLimit=UNLIMITED")
    assert [job.restarts for job in shards] == [0, 0, 1]
    shards[2].until(lambda: "restart 1" in log(3) and "1 of 3" in log(3), "its restart")
    # as Slurm does near a time limit, for which it looks every 30 seconds
    slurm.run("scancel", "--signal=USR1", "--batch", shards[2].id)
    assert shards[2].until_ended() == "FAILED" and shards[2].restarts == 1

    builds = processes_of(str(tmp_path)).items()
    shown = " data_prep ", "--shard 2/3 "
    killed = [pid for pid, line in builds if shown[0] in line and line.endswith(shown[1])]
    assert len(killed) == 1 and shards[1].state == "RUNNING"
    os.kill(killed[0], signal.SIGKILL)
    assert shards[1].until_ended() == "FAILED"
    for path in held.iterdir():
        path.unlink()
    assert shards[0].until_ended() == "COMPLETED" and shards[0].restarts == 0
    assert finish.until_ended() == "CANCELLED"
    assert finish.field("Reason") == "DependencyNeverSatisfied"
    assert not (out / "train" / "manifest.json").exists()

    again = submit()
    assert "2,3 of 3" in again.stdout
    finish = Job(slurm, submitted(again)["finish"], tmp_path)
    assert finish.until_ended() == "COMPLETED"

    whole = [sys.executable, "-m", "data_prep", "build", *options(corpus, tokenizer, "whole")]
    path = f"{environ['PYTHONPATH']}:{ROOT}"
    subprocess.run([*map(str, whole)], cwd=tmp_path, env=environ | {"PYTHONPATH": path}, check=True)
    assert snapshot(out) == snapshot(tmp_path / "whole")

    last = submit()
    assert [*submitted(last)] == ["finish"]
    finish = Job(slurm, submitted(last)["finish"], tmp_path)
    assert finish.until_ended() == "COMPLETED"
    assert not [*tmp_path.rglob("HIT")] and not (ROOT / "HIT").exists()


@pytest.mark.system
def test_a_local_build_is_the_same(tmp_path):
    corpus, tokenizer = corpus_in(tmp_path)
    environ = os.environ | {"CANON_CLUSTER_ENV": str(tmp_path / "cluster.env")}
    (tmp_path / "cluster.env").write_text(f"VENV='{sys.prefix}'\n")
    split = ("--shards", 2, "--", *options(corpus, tokenizer, ODD))
    for words, out in ((options(corpus, tokenizer, "one"), "one"), (split, ODD), (split, ODD)):
        done = script("data_prep.sh", "--local", *words, environ=environ, cwd=tmp_path)
        assert done.returncode == 0 and (tmp_path / str(out) / "train/manifest.json").exists(), done
    assert snapshot(tmp_path / ODD) == snapshot(tmp_path / "one")
    assert not [*tmp_path.rglob("HIT")]
