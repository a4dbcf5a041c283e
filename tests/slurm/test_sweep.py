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
from tests.support import HANGS_AFTER_S, ROOT, canon_stage, debug_run, error_codes

main = canon_stage("sweep")

SCRIPT = str(ROOT / "slurm" / "sweep.sh")
PACED = '{"training": 2}'
CONFIG = ROOT / "train_configs" / "debug.toml"
STEPS = 12
RUNS = ["debug-lr3e-3-seed0", "debug-lr3e-3-seed1", "debug-lr1e-3-seed0", "debug-lr1e-3-seed1"]


def plan(sweep, data, *options, rates=("3e-3", "1e-3")):
    """Plan a sweep of the debug run: each rate with two seeds."""
    main([
        *("plan", sweep, "--configs", CONFIG),
        *("--lr", *rates),
        *("--seeds", 0, 1),
        *("--data.path", data),
        *("--checkpoint.interval", 1000),
        *("--run.heartbeat_s", 0.5),
        *options,
    ])  # fmt: skip


def states(sweep):
    """Return the states of a sweep's runs."""
    return [row.state for row in sweep_rows(read_sweep(sweep), sweep, datetime.now(UTC))]


def run_alone(data, folder, rate, seed):
    """Train one run of the sweep without a script; return its folder."""
    launch(
        *debug_run(data, folder / "run"),
        *("--optimizer.lr", rate),
        *("--model.init_seed", seed, "--data.data_seed", seed),
        *("--checkpoint.interval", 1000),
        ranks=1,
        output=folder / "out",
    )
    return folder / "run"


@pytest.mark.slurm
def test_failures_of_tasks_do_not_change_a_sweep(slurm, jobs, data_folder, tmp_path):
    """Four runs, two at a time: a cancelled one waits for the next submission, a killed one is
    requeued alone; each run is bitwise the same as without Slurm."""
    sweep = tmp_path / 'it\'s "a sweep"; $(touch HIT) 100%d'
    runs = [sweep / name for name in RUNS]
    pace = tmp_path / "pace"
    pace.write_text(PACED)
    plan(sweep, data_folder, "--job.description", 'it\'s "one"; $(touch HIT)')

    def submit(*flags):
        return jobs.script("sweep.sh", "submit", sweep, *flags, TEST_PACE=pace)

    # submitted once, and refused if no run could begin
    wrong = submit("--nodes=5")
    assert wrong.returncode == 2
    assert error_codes(wrong.stderr) == ["config.world_size"]
    elements = jobs.array(submit("--throttle", 2), 1, 2, 3, 4)
    elements[0].until_step(runs[0], 2)
    assert [job.state for job in elements] == ["RUNNING", "RUNNING", "PENDING", "PENDING"]
    twice = submit()
    assert twice.returncode == 0, twice
    assert "batch job" not in twice.stdout

    # the first task is cancelled
    elements[0].cancel()
    elements[0].until(lambda: ended(runs[0]) == "leave", "the script's end")
    step_when_cancelled = steps(runs[0])[-1]

    # kill -9 in the task that starts last, which has the array's own id, by which scontrol would
    # requeue all
    elements[3].until_step(runs[3], 2)
    array, _, _ = elements[3].id.partition("_")
    assert elements[3].field("JobId") == array
    assert status(runs[3]).job_id == array
    os.kill(status(runs[3]).pid, signal.SIGKILL)
    elements[3].until_requeued(1)
    assert ended(runs[3]) == "requeue"

    # all end, each in its way
    pace.write_text("{}")
    final_states = [job.until_ended() for job in elements]
    assert final_states == ["CANCELLED", "COMPLETED", "COMPLETED", "COMPLETED"]
    assert [job.restarts for job in elements] == [0, 0, 0, 1]
    assert states(sweep) == ["stopped", "done", "done", "done"]

    # the next submission continues the cancelled run alone
    (again,) = jobs.array(submit(), 1)
    array, _, _ = again.id.partition("_")
    (shown,) = slurm.run("scontrol", "show", "job", "-o", array).stdout.splitlines()
    assert "ArrayTaskId=1 " in shown
    assert again.until_ended() == "COMPLETED"
    assert states(sweep) == ["done"] * 4
    assert [status(run).launches for run in runs] == [2, 1, 1, 2]
    assert step_when_cancelled < STEPS
    assert logged_step(runs[0]) == STEPS
    assert_same_run(runs[0], run_alone(data_folder, tmp_path / "one", "3e-3", 0), step=STEPS)
    assert_same_run(runs[3], run_alone(data_folder, tmp_path / "four", "1e-3", 1), step=STEPS)

    # an array submitted with sbatch: nothing is trained, since all runs are DONE
    by_sbatch = jobs.submit(SCRIPT, sweep, flags=("--array=2-3",))
    for number in (2, 3):
        assert Job(slurm, f"{by_sbatch.id}_{number}", tmp_path).until_ended() == "COMPLETED"
    assert [status(run).launches for run in runs] == [2, 1, 1, 2]
    assert not [*tmp_path.rglob("HIT")]
    assert not (ROOT / "HIT").exists()


def local(folder):
    """Write a cluster.env; return the environment of a script on this machine."""
    settings = {"VENV": sys.prefix, "CANON_CPU": 1, "RANKS_PER_NODE": 1}
    lines = [f"export {name}='{value}'\n" for name, value in settings.items()]
    (folder / "cluster.env").write_text("".join(lines))
    kept = {name: value for name, value in os.environ.items() if "SLURM" not in name}
    return kept | {"CANON_CLUSTER_ENV": str(folder / "cluster.env"), "PYTHONPATH": str(SITE)}


@pytest.mark.system
def test_a_local_sweep_restarts_and_stops(data_folder, tmp_path):
    """kill -9 of a rank: the run restarts. Ctrl-C: it saves, and the next run does not start."""
    sweep = tmp_path / "a sweep"
    first = sweep / RUNS[0]
    second = sweep / RUNS[1]
    plan(sweep, data_folder, rates=("3e-3",))
    pace = tmp_path / "pace"
    pace.write_text(PACED)
    environ = local(tmp_path) | {"TEST_PACE": str(pace)}

    # a background job of a shell, as this suite may be, ignores SIGINT, and so would its children
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    with open(tmp_path / "out", "wb") as out:
        process = subprocess.Popen(
            ["bash", SCRIPT, "--local", str(sweep)],
            start_new_session=True,
            cwd=ROOT,
            env=environ,
            stdout=out,
            stderr=out,
        )
    signal.signal(signal.SIGINT, before)

    def wait_for(happened):
        end = time.monotonic() + HANGS_AFTER_S
        while not happened():
            assert process.poll() is None and time.monotonic() < end, (tmp_path / "out").read_text()
            time.sleep(0.1)

    # kill -9 of a rank
    wait_for(lambda: logged_step(first) >= 2)
    killed = status(first).pid
    os.kill(killed, signal.SIGKILL)
    wait_for(lambda: status(first).pid != killed and logged_step(first) >= 3)

    # Ctrl-C, as a terminal sends it
    os.killpg(process.pid, signal.SIGINT)
    process.wait(HANGS_AFTER_S)
    assert states(sweep) == ["stopped", "waiting"]
    assert not second.exists()
    assert steps(first)[-1] == logged_step(first) < STEPS
    assert not (first / "STOP").exists()

    # the same command finishes both
    pace.write_text("{}")
    done = script("sweep.sh", "--local", sweep, environ=environ)
    assert done.returncode == 0, done
    assert states(sweep) == ["done"] * 2
    assert_same_run(first, run_alone(data_folder, tmp_path / "alone", "3e-3", 0), step=STEPS)

    # and has nothing to do afterwards
    assert "run 1" not in script("sweep.sh", "--local", sweep, environ=environ).stdout
