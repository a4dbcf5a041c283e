"""slurm/pretrain_1b3.sh on a real Slurm of two nodes: events in a job's life do not change the run.

Pitfalls of Slurm scripts, each found with torchrun and Slurm: (1) a trap that waits for a
foreground srun, (2) USR1 without `B:`, which kills torchrun's agent, (3) the agent's SIGKILL 30 s
after its SIGTERM, (4) torchrun's exit code, which is always 1, (5) rank 0 not on the first node,
(6) SIGTERM to script, agent and workers at once.
"""

import json
import os
import shutil
import signal

import pytest

from canon_pretrain.run.folder import RunFolder
from tests.fault_runs import resumed_from, steps
from tests.ranks import assert_same_run, events, launch, logged_step, status
from tests.slurm_jobs import Job, ended, log_of, processes_of
from tests.support import ROOT, debug_run, error_codes

pytestmark = pytest.mark.slurm
SCRIPT = "slurm/pretrain_1b3.sh"
STEPS = 60
LONG = ("--training.steps", STEPS, "--checkpoint.interval", 1000, "--run.heartbeat_s", 0.5)
"""A launch saves a checkpoint only at its end."""
SLOW = {"training": 1.0}
"""Slurm checks time limits every 30 seconds."""


@pytest.fixture(scope="module")
def reference(data_folder, tmp_path_factory):
    """The run of STEPS steps without events: two ranks on one machine, without Slurm."""
    folder = tmp_path_factory.mktemp("reference")
    launch(*debug_run(data_folder, folder / "run"), *LONG, output=folder / "out")
    return folder / "run"


def train(data, run, *options):
    """Return the script's arguments for the debug run: its config comes first."""
    return [*debug_run(data, run)[1:], *options]


def set_pace(file, **seconds):
    """Write the seconds to sleep per phase, at once."""
    temporary = file.with_suffix(".tmp")
    temporary.write_text(json.dumps(seconds))
    os.replace(temporary, file)


def assert_stopped_and_requeued(job, run, *, restarts, reason):
    """Assert that the launch has saved and the job is requeued; return the saved step."""
    job.until_requeued(restarts)
    assert ended(run) == "requeue"
    now = status(run)
    assert now.state == "stopped"
    assert reason in now.reason
    assert now.restart_count == restarts - 1
    assert now.job_id == job.id
    assert now.step == steps(run)[-1] == logged_step(run)
    assert not (run / "STOP").exists()
    assert not (run / "lock.json").exists()
    return now.step


def test_events_do_not_change_a_run(jobs, reference, data_folder, tmp_path):
    """Time limit, stale STOP, preemption with grace time, kill -9 and a stale lock, a node failure,
    then DONE. Two nodes, rank 0 on the second one."""
    run = tmp_path / 'it\'s "a run"; $(touch HIT)'
    pace = tmp_path / "pace"
    set_pace(pace, **SLOW)
    description = 'it\'s "one"; $(touch HIT) `touch HIT` \\ *'
    cluster = jobs.cluster
    jobs.set(PREFLIGHT=1)
    job = jobs.submit(
        SCRIPT,
        *train(data_folder, run, *LONG, "--job.description", description),
        flags=("--nodes=2", "--time=60"),
        TEST_PACE=pace,
        TEST_RANK_0_ON="n2",
        # (3): on SIGTERM the agent would kill the workers while they save
        TORCH_ELASTIC_SHUTDOWN_TIMEOUT=1,
    )

    # on two nodes, rank 0 on the second one (5)
    job.until_step(run, 3)
    assert status(run).job_id == job.id
    assert status(run).nodes == "n[1-2]"
    assert status(run).host == "n2"
    reports = {path.name for path in run.glob("preflight/*/*")}
    assert reports == {"n1.json", "n2.json", "n1.rank0.json", "n2.rank0.json"}
    jobs.set()

    # near the time limit: Slurm's signal to the script alone (1)
    hours, minutes, _ = map(int, job.field("RunTime").split(":"))
    job.update(f"TimeLimit={60 * hours + minutes + 5}")
    first = assert_stopped_and_requeued(job, run, restarts=1, reason="the file STOP")
    job.update("TimeLimit=60")
    (run / "STOP").touch()  # a stale one must not end the next launch

    # preemption with grace time: the workers get SIGTERM from Slurm (6), and save for longer than
    # torchrun's agent would wait
    job.until_step(run, first + 2)
    set_pace(pace, saving=4, **SLOW)
    submission = cluster.run(
        *("sbatch", "--parsable", "--partition=high", "--nodes=2", "--exclusive"),
        *("--output=/dev/null", "--wrap", "sleep 1"),
    )
    urgent = Job(cluster, submission.stdout.strip(), tmp_path)
    second = assert_stopped_and_requeued(job, run, restarts=2, reason="SIGTERM")
    assert second > first
    set_pace(pace, **SLOW)
    assert urgent.until_ended() == "COMPLETED"

    # kill -9 of rank 0 leaves the lock, and steps that were not saved
    job.until_step(run, second + 2)
    assert (run / "lock.json").exists()
    os.kill(status(run).pid, signal.SIGKILL)
    job.until_requeued(3)
    assert (run / "lock.json").exists()
    assert steps(run)[-1] == second
    assert ended(run) == "requeue"

    # a node failure: Slurm requeues by itself
    job.until(lambda: status(run).restart_count == 3 and status(run).step > second, "a new step")
    cluster.run("scontrol", "update", "NodeName=n2", "State=DOWN", "Reason=test")
    job.until_requeued(4)
    job.until(lambda: ended(run) == "leave", "the script's end")
    cluster.run("scontrol", "update", "NodeName=n2", "State=RESUME", check=False)

    # to its end, which is that of the undisturbed run
    set_pace(pace)
    assert job.until_ended() == "COMPLETED", log_of(run)
    assert (run / "DONE").exists()
    assert status(run).state == "done"
    assert resumed_from(run)[:3] == [first, second, second]
    assert_same_run(run, reference, step=STEPS)

    # odd names are names, and no process is left
    assert RunFolder(run).read_config()["config"]["job"]["description"] == description
    assert not [*tmp_path.glob("**/HIT")]
    assert not (ROOT / "HIT").exists()
    assert "canon_pretrain" not in str(processes_of(str(tmp_path)))


def test_code_changes_do_not_change_a_run(jobs, data_folder, tmp_path):
    """Between two launches the repository gets modules that crash, other job scripts and a config
    with unknown keys."""
    once = ("--checkpoint.interval", 1000)
    alone = tmp_path / "alone"
    launch(*debug_run(data_folder, alone), *once, ranks=1, output=tmp_path / "out")

    # a job from a repository of its own
    repository = tmp_path / "repository"
    for name in ("canon_pretrain", "slurm", "train_configs"):
        unwanted = shutil.ignore_patterns("__pycache__", "cluster.env")
        shutil.copytree(ROOT / name, repository / name, ignore=unwanted)
    config = repository / "train_configs" / "debug.toml"
    run = tmp_path / "run"
    _, *options = train(data_folder, run, *once)
    pace = tmp_path / "pace"
    set_pace(pace, **SLOW)
    job = jobs.submit(SCRIPT, config, *options, cwd=repository, TEST_PACE=pace)

    # it is stopped, and the repository changes
    job.until_step(run, 2)
    jobs.cluster.run("scancel", "--signal=USR1", "--batch", job.id)
    step = assert_stopped_and_requeued(job, run, restarts=job.restarts + 1, reason="the file STOP")
    additions = {
        "canon_pretrain/titan/spec.py": "raise RuntimeError\n",
        "canon_pretrain/cluster/preflight.py": "raise RuntimeError\n",
        "slurm/lib.sh": "pretrain_link() { exit 9; }\n",
        "train_configs/debug.toml": "[made_up_later]\nkey = 1\n",
    }
    for name, text in additions.items():
        with open(repository / name, "a") as file:
            file.write(text)

    # its next launch has the code and the config of the first
    set_pace(pace)
    assert job.until_ended() == "COMPLETED", job.text() + log_of(run)
    assert_same_run(run, alone, step=12)
    assert resumed_from(run) == [step]
    assert events(run, "changed") == []
    assert [path.name for path in (run / "code").iterdir()] == ["001"]


def test_usr1_to_the_steps_requeues_but_scancel_does_not(jobs, data_folder, tmp_path):
    """(2): --signal without B: sends it to agents and workers, not to the script."""
    run = tmp_path / "run"
    pace = tmp_path / "pace"
    set_pace(pace, **SLOW)
    job = jobs.submit(SCRIPT, *train(data_folder, run, *LONG), TEST_PACE=pace)
    job.until_step(run, 2)
    jobs.cluster.run("scancel", "--signal=USR1", job.id)
    step = assert_stopped_and_requeued(job, run, restarts=1, reason="SIGUSR1")
    assert "canon_pretrain.train" not in str(processes_of(str(run)))

    job.until_step(run, step + 2)
    job.cancel()
    job.until(lambda: ended(run) == "leave", "the script's end")
    assert job.until_ended() == "CANCELLED"
    assert job.restarts == 1
    assert status(run).state == "stopped"
    assert steps(run)[-1] > step  # it was saved
    assert not (run / "STOP").exists()
    assert "Traceback" not in log_of(run)


def test_stopped_second_and_refused_jobs_are_not_requeued(jobs, data_folder, tmp_path):
    """With an environment that sbatch does not pass on."""
    run = tmp_path / "run"
    arguments = train(data_folder, run, *LONG)
    pace = tmp_path / "pace"
    set_pace(pace, **SLOW)
    jobs.set(TEST_PACE=pace)
    passed_on = "--export=CANON_CLUSTER_ENV,PYTHONPATH,OMP_NUM_THREADS,SLURM_CONF"
    job = jobs.submit(SCRIPT, *arguments, flags=(passed_on,))
    job.until_step(run, 2)

    # submitted again by mistake: it fails without an effect on the first one
    twin = jobs.submit(SCRIPT, *arguments)
    assert twin.until_ended() == "FAILED"
    assert twin.restarts == 0
    assert f"Slurm job {job.id}" in log_of(run)
    assert job.state == "RUNNING"
    assert not (run / "STOP").exists()
    assert json.loads((run / "restarts.json").read_text())["job"] == job.id

    # stopped by the file
    (run / "STOP").touch()
    assert job.until_ended() == "COMPLETED"
    assert job.restarts == 0
    assert ended(run) == "stop"
    assert not (run / "DONE").exists()

    # the trainer refuses another learning rate
    refused = jobs.submit(SCRIPT, *arguments, "--optimizer.lr", 1e-4)
    assert refused.until_ended() == "FAILED"
    assert refused.restarts == 0
    assert ended(run) == "failed"
    assert "optimizer.lr" in status(run).reason


def test_a_faulty_node_is_excluded(jobs, data_folder, tmp_path):
    """With CANON_REPO, from another folder."""
    jobs.set(PREFLIGHT=1)

    def submit(run, flags, **fault):
        arguments = train(data_folder, run)
        return jobs.submit(
            ROOT / SCRIPT, *arguments, flags=flags, cwd=tmp_path, CANON_REPO=ROOT, **fault
        )

    # n1 does not report: the job continues on n2, to DONE
    run = tmp_path / "dead"
    job = submit(run, flags=(), TEST_DEAD_NODE="n1")
    job.until_requeued(1)
    job.until(lambda: job.field("ExcNodeList") == "n1", "the exclusion")
    assert job.until_ended() == "COMPLETED", log_of(run)
    assert status(run).host == "n2"
    assert status(run).state == "done"

    # of two nodes n2 has a full disk: nothing is trained
    run = tmp_path / "full"
    full = submit(run, flags=("--nodes=2",), TEST_FULL_NODE="n2")
    full.until_requeued(1)
    full.until(lambda: full.field("ExcNodeList") == "n2", "the exclusion")
    full.cancel()
    assert not RunFolder(run).log_file.exists()


def test_nodes_that_do_not_divide_the_batch_are_refused(jobs, tmp_path):
    """By the job, and by slurm/submit.sh before it is queued."""
    folder = ("--job.dump_folder", tmp_path / "run")
    jobs.set(RANKS_PER_NODE=5)

    job = jobs.submit(SCRIPT, *folder, flags=("--nodes=2",))
    submission = jobs.script("submit.sh", "--nodes", 2, SCRIPT, *folder)

    assert submission.returncode == 2
    assert error_codes(submission.stderr) == ["config.world_size"]
    assert job.until_ended() == "FAILED"
    assert job.restarts == 0
    assert error_codes(job.text()) == ["config.world_size"]
    assert not (tmp_path / "run").exists()
