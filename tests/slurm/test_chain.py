"""From training to the report on a real Slurm: watches of a running run.

Two watch jobs and two `eval submit` processes submit the same work; one evaluation is killed.
Training keeps only two checkpoints, so that others must be held until they are evaluated.
"""

import contextlib
import json
import subprocess
import sys

import pytest

from canon_pretrain.checkpoint.folder import CheckpointFolder
from canon_pretrain.checkpoint.manifest import Manifest
from canon_pretrain.run.results import read_results
from eval.schedule import leases_of
from tests.eval_text_runs import TRAIN, text_run, write_text_data
from tests.slurm_jobs import CPUS, ENDED, SITE, processes_of
from tests.support import ROOT

pytestmark = pytest.mark.slurm
STEPS, SUITES = (6, 12), ("validation", "zen_of_python")


def all_jobs(cluster):
    shown = cluster.run("squeue", "--noheader", "--states=all", "--format=%i|%j|%T").stdout
    rows = [line.split("|") for line in shown.splitlines()]
    return {number: (name, state) for number, name, state in rows}


def test_a_run_is_trained_watched_and_reported(slurm, jobs, tmp_path):
    write_text_data(tmp_path / "data")
    run, pace = tmp_path / "chain's run", tmp_path / "pace"
    pace.write_text('{"training": 2}')
    site = f"{SITE}:{ROOT}"
    before = {*all_jobs(slurm)}

    watched = (
        run, "--suites", ",".join(SUITES), "--every", 6, "--max_in_flight", 2,
        f"--sbatch={CPUS}",
    )  # fmt: skip
    environment = {"WATCH_MINUTES": 0.05, "PYTHONPATH": site}
    # before there is a run
    first = jobs.submit("slurm/eval_watch.sh", *watched, **environment)
    assert first.until_ended() == "COMPLETED", first.text()
    training = jobs.submit(
        "slurm/pretrain_1b3.sh", TRAIN, *text_run(tmp_path / "data", run),
        "--checkpoint.keep_latest_k", 2, flags=(CPUS,), TEST_PACE=pace, PYTHONPATH=site,
    )  # fmt: skip
    training.until(lambda: (run / "config.json").exists(), "the run's begin")
    jobs.submit("slurm/eval_watch.sh", *watched, **environment)
    command = [sys.executable, "-m", "eval", "submit", *map(str, watched), "--interval_s", "2"]
    environ = jobs.environ({"PYTHONPATH": site})
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
        codes = [watcher.wait(400) for watcher in watchers]
    said = [(tmp_path / f"watcher-{k}.txt").read_text() for k in range(2)]
    assert codes == [0, 0], said
    assert training.until_ended() == "COMPLETED" and (run / "DONE").exists()

    def ours():
        return [row for job, row in all_jobs(slurm).items() if job not in before]

    training.until(lambda: all(state in ENDED for _, state in ours()), "the watch's end")
    log = (run / "evals/watch.log").read_text()

    # each evaluation was done once, by one job; the killed one was submitted again
    done = [name for name, state in ours() if state == "COMPLETED"]
    submitted = [name for name, _ in ours() if "step-" in name]
    for step in STEPS:
        for suite in SUITES:
            name = f"step-{step}-{suite}-"
            assert sum(name in other for other in done) == 1, (done, log, said)
            count = sum(name in other for other in submitted)
            assert count == 1 + ((step, suite) == (6, "validation")), (submitted, log, said)
            (path,) = (run / "evals" / f"step-{step}" / suite).glob("*/results.json")
            assert read_results(path).asked["step"] == step
    assert len(leases_of(run, 6, "validation").all()) >= 2
    assert sum("eval-report" in name for name, _ in ours()) == 1
    assert (run / "report/index.html").exists()
    reported = json.loads((run / "report/report.json").read_text())
    assert {suite["suite"] for suite in reported["suites"]} == set(SUITES)

    folder = CheckpointFolder(run / "checkpoint")
    assert folder.steps() == [6, 9, 12], "two are kept, and step 6"
    assert Manifest.read(folder.step_path(6)).kind == "weights"
    assert [*(run / "evals/holds").iterdir()] == [], "no holds are left"
    status = subprocess.run(
        [sys.executable, "-m", "eval", "submit", run, "--json"],
        env=jobs.environ({"PYTHONPATH": site}), capture_output=True, text=True, check=True,
    )  # fmt: skip
    shown = json.loads(status.stdout)
    assert shown["finished"] and shown["report"] == "done"
