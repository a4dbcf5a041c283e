"""slurm/sweep.sh: a sweep as an array job, whatever happens to its elements, and without Slurm."""

import os
import re
import signal
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

import pytest

from canon_pretrain.sweep import main, read_sweep, sweep_rows
from tests.fault_runs import steps
from tests.ranks import assert_same_run, launch, logged_step, status
from tests.slurm_jobs import SITE, Job, log_of, script
from tests.support import ROOT, debug_run

SCRIPT = str(ROOT / "slurm" / "sweep.sh")
PACED = '{"training": 2}'
CONFIG = ROOT / "train_configs" / "debug.toml"
STEPS = 12
RUNS = ["debug-lr3e-3-seed0", "debug-lr3e-3-seed1", "debug-lr1e-3-seed0", "debug-lr1e-3-seed1"]


def plan(
    sweep: Path, data: Path, *words: object, rates: tuple[str, ...] = ("3e-3", "1e-3")
) -> None:
    main([
        "plan", str(sweep), "--configs", str(CONFIG), "--lr", *rates, "--seeds", "0", "1",
        "--data.path", str(data), "--checkpoint.interval", "1000", "--run.heartbeat_s", "0.5",
        *map(str, words),
    ])  # fmt: skip


def states(sweep: Path) -> list[str]:
    return [row.state for row in sweep_rows(read_sweep(sweep), sweep, datetime.now(UTC))]


def alone(data: Path, folder: Path, rate: str, seed: int) -> Path:
    launch(
        *debug_run(data, folder / "run"), "--optimizer.lr", rate, "--model.init_seed", seed,
        "--data.data_seed", seed, "--checkpoint.interval", 1000, ranks=1, output=folder / "out",
    )  # fmt: skip
    return folder / "run"


@pytest.mark.slurm
def test_a_sweep_of_four_two_at_a_time_one_killed_one_cancelled(slurm, jobs, data_folder, tmp_path):
    """What is cancelled waits for the next submission, what is killed comes back by itself, alone;
    each run is bitwise the one that was trained by itself."""
    sweep, pace = tmp_path / 'it\'s "a sweep"; $(touch HIT) 100%d', tmp_path / "pace"
    pace.write_text(PACED)
    plan(sweep, data_folder, "--job.description", 'it\'s "one"; $(touch HIT)')
    paced = {"TEST_PACE": pace}

    wrong = jobs.script("sweep.sh", "submit", sweep, "--nodes=5", **paced)
    assert wrong.returncode == 2 and "Numbers of nodes that can: 1, 2, 3, 4, 6" in wrong.stderr
    first = jobs.script("sweep.sh", "submit", sweep, "--throttle", 2, **paced)
    elements = jobs.array(first, 1, 2, 3, 4)
    runs = [sweep / name for name in RUNS]
    elements[0].until_step(runs[0], 2)
    assert [job.state for job in elements] == ["RUNNING", "RUNNING", "PENDING", "PENDING"]
    twice = jobs.script("sweep.sh", "submit", sweep, **paced)
    assert twice.returncode == 0 and "nothing to submit" in twice.stdout, twice
    elements[0].cancel()
    elements[0].until(lambda: "slurm: leave" in log_of(runs[0]), "the script's end")
    saved = steps(runs[0])[-1]

    # the element that starts last has the array's own number, by which scontrol would requeue all
    elements[3].until_step(runs[3], 2)
    array = elements[3].id.partition("_")[0]
    assert elements[3].field("JobId") == array == status(runs[3]).job_id
    os.kill(status(runs[3]).pid, signal.SIGKILL)
    elements[3].until_requeued(1)
    assert "requeue: the launch failed: it was killed" in log_of(runs[3])
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

    # an array of one's own making, over all of them: nothing is trained, since all are DONE
    own = jobs.submit(SCRIPT, sweep, flags=("--array=2-3",))
    for number in (2, 3):
        assert Job(slurm, f"{own.id}_{number}", tmp_path).until_ended() == "COMPLETED"
    assert [status(run).launches for run in runs] == [2, 1, 1, 2]
    assert "nothing to submit" in jobs.script("sweep.sh", "submit", sweep, **paced).stdout
    assert not [*tmp_path.rglob("HIT")] and not (ROOT / "HIT").exists()


@pytest.mark.slurm
def test_runs_of_one_gpu_share_a_node(slurm, jobs, data_folder, tmp_path):
    """Two elements train at once on n1, each with a GPU of its own, as Slurm sees it."""
    sweep, pace = tmp_path / "sweep", tmp_path / "pace"
    pace.write_text(PACED)
    plan(sweep, data_folder, rates=("3e-3",))
    jobs.set(SHARED_NODES=1, CPUS_PER_GPU=2, GPUS_PER_NODE=1)
    flags = ("--gpus-per-node=1", "--nodelist=n1")  # of CANON_CPU no GPU would be asked for
    elements = jobs.array(jobs.script("sweep.sh", "submit", sweep, *flags, TEST_PACE=pace), 1, 2)
    runs = [sweep / name for name in RUNS[:2]]
    for element, run in zip(elements, runs, strict=True):
        element.until_step(run, 2)
    assert [element.state for element in elements] == ["RUNNING"] * 2
    gpus = set()
    for element in elements:
        assert element.field("NodeList") == "n1" and element.field("OverSubscribe") == "OK"
        assert element.field("NumCPUs") == "2"
        shown = slurm.run("scontrol", "show", "job", "-d", "-o", element.id).stdout
        gpus |= {*re.findall(r"GRES=gpu(?::\w+)?:1\(IDX:(\d)\)", shown)}
    assert len(gpus) == 2, "not the same one"
    pace.write_text("{}")
    assert [element.until_ended() for element in elements] == ["COMPLETED"] * 2
    assert states(sweep) == ["done"] * 2


def local(folder: Path, **variables: object) -> dict[str, str]:
    settings = {"VENV": sys.prefix, "CANON_CPU": 1, "RANKS_PER_NODE": 1} | variables
    lines = [f"export {name}='{value}'\n" for name, value in settings.items()]
    (folder / "cluster.env").write_text("".join(lines))
    kept = {name: value for name, value in os.environ.items() if "SLURM" not in name}
    return kept | {"CANON_CLUSTER_ENV": str(folder / "cluster.env"), "PYTHONPATH": str(SITE)}


@pytest.mark.system
def test_locally_one_after_the_other_and_stopped_in_between(data_folder, tmp_path):
    """SIGTERM to the script: the run that trains saves, the next one does not begin."""
    sweep, pace = tmp_path / "a sweep", tmp_path / "pace"
    plan(sweep, data_folder, rates=("3e-3",))
    pace.write_text(PACED)
    environ = local(tmp_path) | {"TEST_PACE": str(pace)}
    with open(tmp_path / "out", "wb") as out:
        command = ["bash", SCRIPT, "--local", str(sweep)]
        process = subprocess.Popen(command, cwd=ROOT, env=environ, stdout=out, stderr=out)
        one, two = (sweep / name for name in RUNS[:2])
        end = time.monotonic() + 300
        while logged_step(one) < 3:
            assert process.poll() is None and time.monotonic() < end, (tmp_path / "out").read_text()
            time.sleep(0.1)
        process.terminate()
        process.wait(300)
    assert "asked to stop: the same command goes on" in (tmp_path / "out").read_text()
    assert states(sweep) == ["stopped", "waiting"] and not two.exists()
    assert steps(one)[-1] == logged_step(one) < STEPS

    pace.write_text("{}")
    done = script("sweep.sh", "--local", sweep, environ=environ)
    assert done.returncode == 0 and "2 runs: 2 done" in done.stdout, done
    assert_same_run(one, alone(data_folder, tmp_path / "alone", "3e-3", 0), step=STEPS)
    assert "run 1" not in script("sweep.sh", "--local", sweep, environ=environ).stdout
