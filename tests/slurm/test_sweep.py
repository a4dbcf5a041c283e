"""slurm/sweep.sh: a sweep as an array job, with failures of its tasks, and without Slurm."""

import os
import signal
import subprocess
import sys
import time
from datetime import UTC, datetime

import pytest

from canon_pretrain.cluster.sweep import read_sweep, sweep_rows
from tests.fault_runs import steps
from tests.ranks import assert_same_run, launch, logged_step, status
from tests.slurm_jobs import SITE, Job, ended, script
from tests.support import ROOT, canon_stage, debug_run, error_codes

main = canon_stage("sweep")

SCRIPT = str(ROOT / "slurm" / "sweep.sh")
PACED = '{"training": 2}'
CONFIG = ROOT / "train_configs" / "debug.toml"
STEPS = 12
RUNS = ["debug-lr3e-3-seed0", "debug-lr3e-3-seed1", "debug-lr1e-3-seed0", "debug-lr1e-3-seed1"]


def plan(sweep, data, *words, rates=("3e-3", "1e-3")):
    main([
        "plan", str(sweep), "--configs", str(CONFIG), "--lr", *rates, "--seeds", "0", "1",
        "--data.path", str(data), "--checkpoint.interval", "1000", "--run.heartbeat_s", "0.5",
        *map(str, words),
    ])  # fmt: skip


def states(sweep):
    return [row.state for row in sweep_rows(read_sweep(sweep), sweep, datetime.now(UTC))]


def alone(data, folder, rate, seed):
    launch(
        *debug_run(data, folder / "run"), "--optimizer.lr", rate, "--model.init_seed", seed,
        "--data.data_seed", seed, "--checkpoint.interval", 1000, ranks=1, output=folder / "out",
    )  # fmt: skip
    return folder / "run"


@pytest.mark.slurm
def test_failures_of_tasks_do_not_change_a_sweep(slurm, jobs, data_folder, tmp_path):
    """Four runs, two at a time: a cancelled one waits for the next submission, a killed one is
    requeued alone; each run is bitwise the same as without Slurm."""
    sweep, pace = tmp_path / 'it\'s "a sweep"; $(touch HIT) 100%d', tmp_path / "pace"
    pace.write_text(PACED)
    plan(sweep, data_folder, "--job.description", 'it\'s "one"; $(touch HIT)')
    paced = {"TEST_PACE": pace}

    wrong = jobs.script("sweep.sh", "submit", sweep, "--nodes=5", **paced)
    assert (wrong.returncode, error_codes(wrong.stderr)) == (2, ["config.world_size"])
    first = jobs.script("sweep.sh", "submit", sweep, "--throttle", 2, **paced)
    elements = jobs.array(first, 1, 2, 3, 4)
    runs = [sweep / name for name in RUNS]
    elements[0].until_step(runs[0], 2)
    assert [job.state for job in elements] == ["RUNNING", "RUNNING", "PENDING", "PENDING"]
    twice = jobs.script("sweep.sh", "submit", sweep, **paced)
    assert twice.returncode == 0 and "batch job" not in twice.stdout, twice
    elements[0].cancel()
    elements[0].until(lambda: ended(runs[0]) == "leave", "the script's end")
    saved = steps(runs[0])[-1]

    # the task that starts last has the array's own id, by which scontrol would requeue all
    elements[3].until_step(runs[3], 2)
    array = elements[3].id.partition("_")[0]
    assert elements[3].field("JobId") == array == status(runs[3]).job_id
    os.kill(status(runs[3]).pid, signal.SIGKILL)
    elements[3].until_requeued(1)
    assert ended(runs[3]) == "requeue"
    pace.write_text("{}")
    assert [job.until_ended() for job in elements] == ["CANCELLED", *["COMPLETED"] * 3]
    assert [job.restarts for job in elements] == [0, 0, 0, 1]
    assert states(sweep) == ["stopped", "done", "done", "done"]

    (again,) = jobs.array(jobs.script("sweep.sh", "submit", sweep, **paced), 1)
    shown = slurm.run("scontrol", "show", "job", "-o", again.id.partition("_")[0]).stdout
    assert len(shown.splitlines()) == 1 and "ArrayTaskId=1 " in shown
    assert again.until_ended() == "COMPLETED"
    assert states(sweep) == ["done"] * 4
    assert status(runs[0]).launches == 2 and logged_step(runs[0]) == STEPS > saved
    assert [status(run).launches for run in runs[1:]] == [1, 1, 2]
    assert_same_run(runs[0], alone(data_folder, tmp_path / "one", "3e-3", 0), step=STEPS)
    assert_same_run(runs[3], alone(data_folder, tmp_path / "four", "1e-3", 1), step=STEPS)

    # an array submitted with sbatch: nothing is trained, since all runs are DONE
    own = jobs.submit(SCRIPT, sweep, flags=("--array=2-3",))
    for number in (2, 3):
        assert Job(slurm, f"{own.id}_{number}", tmp_path).until_ended() == "COMPLETED"
    assert [status(run).launches for run in runs] == [2, 1, 1, 2]
    assert not [*tmp_path.rglob("HIT")] and not (ROOT / "HIT").exists()


def local(folder, **variables):
    settings = {"VENV": sys.prefix, "CANON_CPU": 1, "RANKS_PER_NODE": 1} | variables
    lines = [f"export {name}='{value}'\n" for name, value in settings.items()]
    (folder / "cluster.env").write_text("".join(lines))
    kept = {name: value for name, value in os.environ.items() if "SLURM" not in name}
    return kept | {"CANON_CLUSTER_ENV": str(folder / "cluster.env"), "PYTHONPATH": str(SITE)}


@pytest.mark.system
def test_a_local_sweep_restarts_and_stops(data_folder, tmp_path):
    """kill -9 of a rank: the run restarts. Ctrl-C: it saves, and the next run does not start."""
    sweep, pace = tmp_path / "a sweep", tmp_path / "pace"
    plan(sweep, data_folder, rates=("3e-3",))
    pace.write_text(PACED)
    environ = local(tmp_path) | {"TEST_PACE": str(pace)}
    one, two = (sweep / name for name in RUNS[:2])
    # a background job of a shell, as this suite may be, ignores SIGINT, and so would its children
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    with open(tmp_path / "out", "wb") as out:
        command = ["bash", SCRIPT, "--local", str(sweep)]
        options = {"cwd": ROOT, "env": environ, "stdout": out, "stderr": out}
        process = subprocess.Popen(command, start_new_session=True, **options)
    signal.signal(signal.SIGINT, before)

    def wait_for(happened):
        end = time.monotonic() + 240
        while not happened():
            assert process.poll() is None and time.monotonic() < end, (tmp_path / "out").read_text()
            time.sleep(0.1)

    wait_for(lambda: logged_step(one) >= 2)
    first = status(one).pid
    os.kill(first, signal.SIGKILL)
    wait_for(lambda: status(one).pid != first and logged_step(one) >= 3)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    process.wait(120)
    assert states(sweep) == ["stopped", "waiting"] and not two.exists()
    assert steps(one)[-1] == logged_step(one) < STEPS and not (one / "STOP").exists()

    pace.write_text("{}")
    done = script("sweep.sh", "--local", sweep, environ=environ)
    assert done.returncode == 0 and states(sweep) == ["done"] * 2, done
    assert_same_run(one, alone(data_folder, tmp_path / "alone", "3e-3", 0), step=STEPS)
    assert "run 1" not in script("sweep.sh", "--local", sweep, environ=environ).stdout
