"""From training to the report on a real Slurm: watches of a running run.

Two watch jobs and two `eval submit` processes submit the same work; one evaluation is killed.
Training keeps only two checkpoints, so that others must be held until they are evaluated.
"""

import contextlib
import json
import subprocess
import sys
from typing import NamedTuple

import pytest

from canon_pretrain.checkpoint.folder import CheckpointFolder
from canon_pretrain.checkpoint.manifest import Manifest
from canon_pretrain.run.results import read_results
from eval.schedule import leases_of
from tests.eval_text_runs import TRAIN, text_run, write_text_data
from tests.slurm_jobs import CPUS, ENDED, SITE, processes_of
from tests.support import HANGS_AFTER_S, ROOT

pytestmark = pytest.mark.slurm
STEPS = (6, 12)
SUITES = ("validation", "zen_of_python")


class JobRow(NamedTuple):
    """A row of squeue."""

    name: str
    state: str


def all_jobs(cluster):
    """Return the rows of squeue by job number, of ended jobs too."""
    shown = cluster.run("squeue", "--noheader", "--states=all", "--format=%i|%j|%T").stdout
    rows = [line.split("|") for line in shown.splitlines()]
    return {number: JobRow(name, state) for number, name, state in rows}


def test_a_run_is_trained_watched_and_reported(slurm, jobs, tmp_path):
    write_text_data(tmp_path / "data")
    run = tmp_path / "chain's run"
    pace = tmp_path / "pace"
    pace.write_text('{"training": 2}')
    python_path = f"{SITE}:{ROOT}"
    earlier_jobs = {*all_jobs(slurm)}
    watch_options = [
        *(run, "--suites", ",".join(SUITES)),
        *("--every", 6, "--max_in_flight", 2),
        f"--sbatch={CPUS}",
    ]

    def submit_watch():
        return jobs.submit(
            "slurm/eval_watch.sh", *watch_options, WATCH_MINUTES=0.05, PYTHONPATH=python_path
        )

    # a watch job before there is a run, training, another watch job
    first = submit_watch()
    assert first.until_ended() == "COMPLETED", first.text()
    training = jobs.submit(
        *("slurm/pretrain_1b3.sh", TRAIN, *text_run(tmp_path / "data", run)),
        *("--checkpoint.keep_latest_k", 2),
        flags=(CPUS,),
        TEST_PACE=pace,
        PYTHONPATH=python_path,
    )
    training.until(lambda: (run / "config.json").exists(), "the run's begin")
    submit_watch()

    # two more watchers; one evaluation is killed
    eval_submit = [sys.executable, "-m", "eval", "submit"]
    command = [*eval_submit, *map(str, watch_options), "--interval_s", "2"]
    environ = jobs.environ({"PYTHONPATH": python_path})
    with contextlib.ExitStack() as stack:
        watchers = []
        for k in range(2):
            out = stack.enter_context(open(tmp_path / f"watcher-{k}.txt", "w"))
            watcher = subprocess.Popen(command, env=environ, cwd=tmp_path, stdout=out, stderr=out)
            stack.callback(watcher.kill)
            watchers.append(watcher)

        # step 6 is held from now on: let training continue
        slurm.until((run / "evals/holds/step-6.submit").exists, "a hold", 240)
        assert not (run / "checkpoint/step-9").exists()
        pace.write_text("{}")

        work = f"eval run --checkpoint {run}/checkpoint/step-6 --suite validation"
        slurm.until(lambda: processes_of(work), "ranks at work", 240)
        killed = next(lease.job for lease in leases_of(run, 6, "validation").all() if lease.job)
        slurm.run("scancel", "--signal=KILL", "--full", killed)
        codes = [watcher.wait(HANGS_AFTER_S) for watcher in watchers]

    printed = [(tmp_path / f"watcher-{k}.txt").read_text() for k in range(2)]
    assert codes == [0, 0], printed
    assert training.until_ended() == "COMPLETED"
    assert (run / "DONE").exists()

    def our_jobs():
        return [row for number, row in all_jobs(slurm).items() if number not in earlier_jobs]

    training.until(lambda: all(job.state in ENDED for job in our_jobs()), "the watch's end")
    log = (run / "evals/watch.log").read_text()

    # each evaluation was done once, by one job; the killed one was submitted again
    completed = [job.name for job in our_jobs() if job.state == "COMPLETED"]
    submitted = [job.name for job in our_jobs()]
    for step in STEPS:
        for suite in SUITES:
            name = f"step-{step}-{suite}-"
            expected = 2 if (step, suite) == (6, "validation") else 1
            assert sum(name in other for other in completed) == 1, (completed, log, printed)
            assert sum(name in other for other in submitted) == expected, (submitted, log, printed)
            (path,) = (run / "evals" / f"step-{step}" / suite).glob("*/results.json")
            assert read_results(path).asked["step"] == step
    assert len(leases_of(run, 6, "validation").all()) >= 2

    # one report, of all suites
    assert sum("eval-report" in name for name in submitted) == 1
    assert (run / "report/index.html").exists()
    report = json.loads((run / "report/report.json").read_text())
    assert {suite["suite"] for suite in report["suites"]} == set(SUITES)

    # two checkpoints are kept, and the weights of step 6; no holds are left
    folder = CheckpointFolder(run / "checkpoint")
    assert folder.steps() == [6, 9, 12]
    assert Manifest.read(folder.step_path(6)).kind == "weights"
    assert [*(run / "evals/holds").iterdir()] == []

    done = subprocess.run(
        [*eval_submit, run, "--json"], env=environ, capture_output=True, text=True, check=True
    )
    status = json.loads(done.stdout)
    assert status["finished"]
    assert status["report"] == "done"
