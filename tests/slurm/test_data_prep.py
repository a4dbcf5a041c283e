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
    """Write a corpus, in a folder with an odd name, and a tokenizer; return both paths."""
    corpus = folder / f"text {ODD}"
    write_corpus(corpus, files=FILES)
    return corpus, write_tokenizer(folder / "tokenizer.model")


def options(corpus, tokenizer, out):
    """Return the arguments of a build of the corpus into `out`."""
    return [
        *("--source", "local", "--files", corpus),
        *("--tokenizer", tokenizer),
        *("--out", out),
        *("--holdout", 0.1, "--workers", 1),
    ]


def submitted(done):
    """Return the job numbers that data_prep.sh has printed, by kind."""
    assert done.returncode == 0, done
    rows = re.findall(r"^job (\d+): (\w+)", done.stdout, re.MULTILINE)
    return {kind: number for number, kind in rows}


@pytest.mark.slurm
def test_failures_of_jobs_do_not_change_a_sharded_build(slurm, jobs, tmp_path):
    """All shards wait in their second input group. One reaches its time limit, is requeued, and
    reaches it again without progress; one is killed. A second submission does the rest."""
    corpus, tokenizer = corpus_in(tmp_path)
    out = tmp_path / ODD
    held = tmp_path / "held"
    held.mkdir()
    for number in (4, 5, 6):
        (held / f"part{number}.jsonl").touch()
    environ = jobs.environ({"TEST_UNIT_BYTES": 1, "TEST_HELD": held})

    def submit():
        return script(
            "data_prep.sh",
            *("submit", f"--shards={SHARDS}", "--cpus-per-task=1", "--mem=100"),
            *("--", *options(corpus, tokenizer, ODD)),
            environ=environ,
            cwd=tmp_path,
        )

    def finish_job(submission):
        return Job(slurm, submitted(submission)["finish"], tmp_path)

    submission = submit()
    array = submitted(submission)["shards"]
    shards = [Job(slurm, f"{array}_{i}", tmp_path) for i in range(1, SHARDS + 1)]
    finished, killed, limited = shards

    def log_of_limited():
        return (Path(f"{out}.logs") / f"{array}_{SHARDS}.log").read_text()

    def built():
        return {int(path.name[5:10]) for path in (out / "train").glob("part-*.json")}

    # all wait; a second submission is refused
    limited.until(lambda: built() == {0, 1, 2}, "the first input group of each")
    twice = submit()
    assert twice.returncode == 2
    assert error_codes(twice.stderr) == ["slurm.queued"]

    # a time limit: requeued, alone, although the last task has the array's own id, by which
    # scontrol would requeue all tasks
    assert limited.field("JobId") == array
    limited.update("TimeLimit=1")
    limited.until_requeued(1)
    limited.update("TimeLimit=UNLIMITED")
    assert [job.restarts for job in shards] == [0, 0, 1]
    limited.until(
        lambda: "restart 1" in log_of_limited() and "1 of 3" in log_of_limited(), "its restart"
    )

    # a second one without progress, as Slurm signals it, which looks for limits every 30 seconds
    slurm.run("scancel", "--signal=USR1", "--batch", limited.id)
    assert limited.until_ended() == "FAILED"
    assert limited.restarts == 1

    # kill -9 of a build
    (build,) = [
        pid
        for pid, line in processes_of(str(tmp_path)).items()
        if " data_prep " in line and line.endswith("--shard 2/3 ")
    ]
    assert killed.state == "RUNNING"
    os.kill(build, signal.SIGKILL)
    assert killed.until_ended() == "FAILED"

    # the other one completes, and the finishing job cannot begin
    for path in held.iterdir():
        path.unlink()
    assert finished.until_ended() == "COMPLETED"
    assert finished.restarts == 0
    finish = finish_job(submission)
    assert finish.until_ended() == "CANCELLED"
    assert finish.field("Reason") == "DependencyNeverSatisfied"
    assert not (out / "train" / "manifest.json").exists()

    # a second submission does the rest
    again = submit()
    assert "2,3 of 3" in again.stdout
    assert finish_job(again).until_ended() == "COMPLETED"

    # the files are those of one build
    command = [sys.executable, "-m", "data_prep", "build", *options(corpus, tokenizer, "whole")]
    python_path = f"{environ['PYTHONPATH']}:{ROOT}"
    subprocess.run(
        [str(word) for word in command],
        cwd=tmp_path,
        env=environ | {"PYTHONPATH": python_path},
        check=True,
    )
    assert snapshot(out) == snapshot(tmp_path / "whole")

    # a third one has no shards to build
    last = submit()
    assert [*submitted(last)] == ["finish"]
    assert finish_job(last).until_ended() == "COMPLETED"
    assert not [*tmp_path.rglob("HIT")]
    assert not (ROOT / "HIT").exists()


@pytest.mark.system
def test_a_local_build_is_the_same(tmp_path):
    corpus, tokenizer = corpus_in(tmp_path)
    settings = tmp_path / "cluster.env"
    settings.write_text(f"VENV='{sys.prefix}'\n")
    environ = os.environ | {"CANON_CLUSTER_ENV": str(settings)}

    def build_locally(out, *flags):
        done = script(
            "data_prep.sh",
            *("--local", *flags, *options(corpus, tokenizer, out)),
            environ=environ,
            cwd=tmp_path,
        )
        assert done.returncode == 0, done
        assert (tmp_path / out / "train/manifest.json").exists()

    # in one, and in two shards; the last call finds all of it done
    build_locally("one")
    build_locally(ODD, "--shards", 2, "--")
    build_locally(ODD, "--shards", 2, "--")

    assert snapshot(tmp_path / ODD) == snapshot(tmp_path / "one")
    assert not [*tmp_path.rglob("HIT")]
