"""slurm/pretrain_1b3.sh on a real Slurm: whatever happens to a job, the run comes to the same.

Each event of the life of a long job is made to happen by Slurm itself, on two nodes. The traps are
those of Slurm scripts, as torchrun and Slurm were measured: (1) a trap that waits for a foreground
srun, (2) USR1 without `B:`, which kills torchrun's agent, (3) the agent's SIGKILL 30 s after its
SIGTERM, (4) exit codes that torchrun makes 1, (5) rank 0 on another node than the first, (6)
SIGTERM to batch, agent and workers at once.
"""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from canon_pretrain.run.folder import RunFolder
from tests.fault_runs import resumed_from, steps
from tests.ranks import assert_same_run, events, launch, logged_step, status
from tests.slurm_jobs import ENDED, SITE, Job, log_of, processes_of
from tests.support import ROOT, debug_run

pytestmark = pytest.mark.slurm
SCRIPT = "slurm/pretrain_1b3.sh"
STEPS = 60
LONG = ("--training.steps", STEPS, "--checkpoint.interval", 1000, "--run.heartbeat_s", 0.5)
"""The only checkpoints are those that a launch leaves at its end."""
SLOW = {"training": 1.0}
"""Slurm looks at time limits each 30 seconds."""


@pytest.fixture(scope="module")
def reference(data_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of STEPS steps that met nothing: two ranks on one machine, without Slurm."""
    folder = tmp_path_factory.mktemp("reference")
    launch(*debug_run(data_folder, folder / "run"), *LONG, output=folder / "out")
    return folder / "run"


def train(data: Path, run: Path, *more: object) -> list[object]:
    return [*debug_run(data, run)[1:], *more]


def set_pace(file: Path, **seconds: float) -> None:
    temporary = file.with_suffix(".tmp")
    temporary.write_text(json.dumps(seconds))
    os.replace(temporary, file)


def assert_stopped_and_requeued(job: Job, run: Path, *, restarts: int, reason: str) -> int:
    """The launch saved, the job is in the queue again; gives the step that is saved."""
    job.until_requeued(restarts)
    found = status(run)
    assert found.state == "stopped" and reason in found.reason, found
    assert found.restart_count == restarts - 1 and found.job_id == job.id
    assert steps(run)[-1] == found.step == logged_step(run)
    assert not (run / "STOP").exists() and not (run / "lock.json").exists()
    return found.step


def test_a_run_that_meets_everything_is_the_run_that_met_nothing(
    jobs, reference, data_folder, tmp_path
):
    """Two nodes; the time limit, a leftover STOP, preemption with its grace time, kill -9 and the
    stale lock it leaves, a node that fails; then DONE. Rank 0 lives on the second node."""
    run, pace = tmp_path / 'it\'s "a run"; $(touch HIT)', tmp_path / "pace"
    set_pace(pace, **SLOW)
    odd = 'it\'s "one"; $(touch HIT) `touch HIT` \\ *'
    cluster = jobs.cluster
    jobs.set(PREFLIGHT=1)
    job = jobs.submit(
        SCRIPT,
        *train(data_folder, run, *LONG, "--job.description", odd),
        flags=("--nodes=2", "--time=60"),
        TEST_PACE=pace,
        TEST_RANK_0_ON="n2",
        # trap 3: an agent that had got SIGTERM would kill the workers in the middle of their save
        TORCH_ELASTIC_SHUTDOWN_TIMEOUT=1,
    )
    job.until_step(run, 3)
    assert status(run).job_id == job.id and status(run).nodes == "n[1-2]"
    assert status(run).host == "n2", "trap 5: rank 0 is on the second node"
    assert "preflight: 2 node(s), 2 ranks: fit" in log_of(run)
    jobs.set()

    # the time limit comes near: Slurm's own signal, to the script alone. Trap 1: it is heard now
    hours, minutes, _ = map(int, job.field("RunTime").split(":"))
    job.update(f"TimeLimit={60 * hours + minutes + 5}")
    first = assert_stopped_and_requeued(job, run, restarts=1, reason="the file STOP")
    assert "requeue: stopped at step" in log_of(run) and "before the time limit" in log_of(run)
    job.update("TimeLimit=60")
    (run / "STOP").touch()  # a leftover of whatever kind must not end the next launch

    # preemption, with a grace time; trap 6: the workers get SIGTERM from Slurm, and save for longer
    # than torchrun's agent would have waited
    job.until_step(run, first + 2)
    set_pace(pace, saving=4, **SLOW)
    urgent = cluster.run(
        "sbatch", "--parsable", "--partition=high", "--nodes=2", "--exclusive",
        "--output=/dev/null", "--wrap", "sleep 1",
    ).stdout.strip()  # fmt: skip
    second = assert_stopped_and_requeued(job, run, restarts=2, reason="SIGTERM")
    assert second > first and f"preempted at step {second}" in log_of(run)
    set_pace(pace, **SLOW)
    assert Job(cluster, urgent, tmp_path).until_ended() == "COMPLETED"

    # kill -9 of rank 0: the lock stays behind, and so do the steps that were not saved
    job.until_step(run, second + 2)
    assert (run / "lock.json").exists()
    os.kill(status(run).pid, signal.SIGKILL)
    job.until_requeued(3)
    assert (run / "lock.json").exists() and steps(run)[-1] == second
    assert "requeue: the launch failed: it was killed at step" in log_of(run)

    # a node is gone: Slurm requeues by itself
    job.until(
        lambda: status(run).restart_count == 3 and status(run).step > second,
        "a launch that takes the stale lock over, and goes on",
    )
    cluster.run("scontrol", "update", "NodeName=n2", "State=DOWN", "Reason=test")
    job.until_requeued(4)
    job.until(lambda: "slurm: leave" in log_of(run), "the script's end")
    cluster.run("scontrol", "update", "NodeName=n2", "State=RESUME", check=False)

    set_pace(pace)
    assert job.until_ended() == "COMPLETED", log_of(run)
    assert (run / "DONE").exists() and status(run).state == "done"
    assert resumed_from(run)[:3] == [first, second, second]
    assert_same_run(run, reference, step=STEPS)
    assert RunFolder(run).read_config()["config"]["job"]["description"] == odd
    assert not [*tmp_path.glob("**/HIT")] and not (ROOT / "HIT").exists()
    assert "canon_pretrain" not in str(processes_of(str(tmp_path)))


OTHER_LOSS = """
_before = head_loss

def head_loss(*arguments, **options):
    inner = _before(*arguments, **options)
    return lambda *inputs: tuple(1.7 * value for value in inner(*inputs))
"""


def test_code_that_changes_in_mid_chain_changes_no_run(jobs, data_folder, tmp_path):
    """Between two links another loss, a check that crashes, other job scripts and a config with
    unknown keys come into the repository; then a new job asks for that loss."""
    once = ("--checkpoint.interval", 1000)
    launch(*debug_run(data_folder, tmp_path / "alone"), *once, ranks=1, output=tmp_path / "out")
    repository, run, other = tmp_path / "repository", tmp_path / "run", tmp_path / "other"
    for name in ("canon_pretrain", "slurm", "train_configs"):
        unwanted = shutil.ignore_patterns("__pycache__", "cluster.env")
        shutil.copytree(ROOT / name, repository / name, ignore=unwanted)
    set_pace(pace := tmp_path / "pace", **SLOW)
    where = {"cwd": repository, "TEST_PACE": pace}
    config = repository / "train_configs" / "debug.toml"
    job = jobs.submit(SCRIPT, config, *train(data_folder, run, *once)[1:], **where)
    job.until_step(run, 2)
    # not 1: the port of the rendezvous may be another cluster's on this machine
    restarts = job.restarts + 1
    jobs.cluster.run("scancel", "--signal=USR1", "--batch", job.id)
    step = assert_stopped_and_requeued(job, run, restarts=restarts, reason="the file STOP")
    shutil.copytree(run, other)

    package = repository / "canon_pretrain"
    with open(package / "titan" / "spec.py", "a") as loss:
        loss.write(OTHER_LOSS)
    broken = [package / "preflight.py", repository / "slurm" / "lib.sh", config]
    kept = [path.read_text() for path in broken]
    broken[0].write_text("raise RuntimeError\n")
    broken[1].write_text(kept[1] + "pretrain_link() { exit 9; }\n")
    config.write_text(kept[2] + "\n[made_up_later]\nkey = 1\n")
    set_pace(pace)
    assert job.until_ended() == "COMPLETED", job.text() + log_of(run)
    assert_same_run(run, tmp_path / "alone", step=12)
    assert resumed_from(run) == [step] and events(run, "changed") == []
    assert f"the run's code is {run}/code/001, not this repository's: " in log_of(run)

    for path, text in zip(broken, kept, strict=True):
        path.write_text(text)
    allow = ("--run.allow_changes", "code")
    job = jobs.submit(SCRIPT, *train(data_folder, other, *once, *allow), **where)
    assert job.until_ended() == "COMPLETED", job.text() + log_of(other)
    assert sorted(path.name for path in (other / "code").iterdir()) == ["001", "002"]
    (changed,) = events(other, "changed")
    assert changed["code"].keys() == {"titan/spec.py"}
    before, after = (
        next(e["loss"] for e in events(folder, "step") if e["step"] == step + 1)
        for folder in (run, other)
    )
    assert after == pytest.approx(1.7 * before, rel=1e-5)


def test_usr1_to_the_steps_requeues_and_scancel_does_not(jobs, data_folder, tmp_path):
    """Trap 2: what --signal without B: sends, to agents and workers but not to the script."""
    run, pace = tmp_path / "run", tmp_path / "pace"
    set_pace(pace, **SLOW)
    job = jobs.submit(SCRIPT, *train(data_folder, run, *LONG), TEST_PACE=pace)
    job.until_step(run, 2)
    jobs.cluster.run("scancel", "--signal=USR1", job.id)
    step = assert_stopped_and_requeued(job, run, restarts=1, reason="SIGUSR1")
    assert "canon_pretrain.train" not in str(processes_of(str(run)))

    job.until_step(run, step + 2)
    job.cancel()
    job.until(lambda: "slurm: leave" in log_of(run), "the script's end")
    assert job.until_ended() == "CANCELLED"
    assert status(run).state == "stopped" and steps(run)[-1] > step, "scancel loses no step"
    assert job.restarts == 1 and not (run / "STOP").exists()
    assert "Traceback" not in log_of(run)


def test_a_persons_stop_ends_the_job(jobs, data_folder, tmp_path):
    """A second job on the folder does not, nor does an environment that sbatch was not to take."""
    run, pace = tmp_path / "run", tmp_path / "pace"
    set_pace(pace, **SLOW)
    jobs.set(TEST_PACE=pace)
    taken = "--export=CANON_CLUSTER_ENV,PYTHONPATH,OMP_NUM_THREADS,SLURM_CONF"
    job = jobs.submit(SCRIPT, *train(data_folder, run, *LONG), flags=(taken,))
    job.until_step(run, 2)
    # the same submitted again, by mistake: it ends, and neither stops nor spoils the first one
    twin = jobs.submit(SCRIPT, *train(data_folder, run, *LONG))
    assert twin.until_ended() == "FAILED" and twin.restarts == 0
    said = f"in use by another launch (host n1, pid {status(run).pid}, Slurm job {job.id}"
    assert said in log_of(run)
    assert job.state == "RUNNING" and not (run / "STOP").exists()
    assert json.loads((run / "restarts.json").read_text())["job"] == job.id
    (run / "STOP").touch()
    assert job.until_ended() == "COMPLETED" and job.restarts == 0
    assert "stop: stopped at step" in log_of(run) and not (run / "DONE").exists()


def test_a_crash_loop_stops_and_says_why(jobs, data_folder, tmp_path):
    """Trap 4: torchrun's exit code is 1 for everything; the run folder tells what happened."""
    run = tmp_path / "run"
    jobs.set(MAX_RESTARTS_WITHOUT_PROGRESS=1)
    job = jobs.submit(SCRIPT, *train(data_folder, run, *LONG), TEST_CRASH_AT=3)
    assert job.until_ended() == "FAILED"
    assert job.restarts == 1, "one restart without a new step was allowed"
    assert status(run).state == "failed"
    assert "1 restart(s) in a row from the start failed" in status(run).reason
    assert log_of(run).count("slurm: requeue:") == 1


def test_a_refused_run_is_not_requeued(jobs, reference, data_folder, tmp_path):
    """The same folder with another learning rate: the trainer refuses it, and always would."""
    run = tmp_path / "run"
    shutil.copytree(reference, run, ignore=shutil.ignore_patterns("DONE"))
    job = jobs.submit(SCRIPT, *train(data_folder, run, *LONG, "--optimizer.lr", 1e-4))
    assert job.until_ended() == "FAILED" and job.restarts == 0
    assert "slurm: failed: UserError" in log_of(run) and "optimizer.lr" in log_of(run)


def test_a_node_that_is_not_fit_is_named_and_left_out(jobs, data_folder, tmp_path):
    """n1 does not report: the job goes on on n2, to DONE. It knows its repository by CANON_REPO.
    Of two nodes n2 alone has a full disk: nothing is trained on it."""
    jobs.set(PREFLIGHT=1)
    faults = (("dead", "n1", "no report", ()), ("full", "n2", "0 bytes are free", ("--nodes=2",)))
    for fault, node, why, flags in faults:
        run, where = tmp_path / fault, {"CANON_REPO": ROOT, f"TEST_{fault.upper()}_NODE": node}
        script = (str(ROOT / SCRIPT), *train(data_folder, run))
        job = jobs.submit(*script, flags=flags, cwd=tmp_path, **where)
        job.until_requeued(1)
        job.until(lambda job=job, node=node: job.field("ExcNodeList") == node, "the exclusion")  # type: ignore[misc]
        assert f"node {node} is not fit: {why}" in log_of(run)
        if fault == "dead":
            assert job.until_ended() == "COMPLETED", log_of(run)
            assert status(run).host == "n2" and status(run).state == "done"
        else:
            job.cancel()
            assert not RunFolder(run).log_file.exists(), "nothing was trained"


def test_nodes_that_do_not_divide_the_batch_are_refused(jobs, tmp_path):
    """By the job at once, and by slurm/submit.sh before anything is queued."""
    folder = ("--job.dump_folder", tmp_path / "run")
    words = "Numbers of nodes that can: 1, 2, 3, 6"
    began = time.monotonic()
    jobs.set(RANKS_PER_NODE=8)
    job = jobs.submit(SCRIPT, *folder, flags=("--nodes=2",), RDZV_TIMEOUT_S=1, CANON_CPU=1)
    submitted = jobs.script("submit.sh", "--nodes", 5, SCRIPT, *folder)
    assert submitted.returncode == 2 and words in submitted.stderr, submitted
    assert "5 node(s) of 8 can't share training.global_batch_size = 48" in submitted.stderr
    # two nodes can: what this job is refused for is the data, which is not there
    assert job.until_ended() == "FAILED" and job.restarts == 0
    assert time.monotonic() - began < 120 and "error: " in job.text()
    jobs.set(RANKS_PER_NODE=5)
    job = jobs.submit(SCRIPT, *folder, flags=("--nodes=2",))
    assert job.until_ended() == "FAILED" and job.restarts == 0
    assert "2 node(s) of 5 can't share" in job.text() and not (tmp_path / "run").exists()


def test_submit_passes_settings_and_flags_on(jobs, data_folder, tmp_path):
    jobs.settings.write_text(
        jobs.settings.read_text()
        + "export SBATCH_PARTITION=high\nSBATCH_FLAGS=(--hold '--comment=a b; $(c)')\n"
    )
    run = tmp_path / "run"
    flags = ("--parsable", "--nodes=2", "-J", "mine")
    done = jobs.script("submit.sh", *flags, SCRIPT, *train(data_folder, run))
    assert done.returncode == 0, done
    job = Job(jobs.cluster, done.stdout.strip(), tmp_path)
    assert job.field("Partition") == "high" and job.field("JobName") == "mine"
    assert job.field("NumNodes").startswith("2") and job.state == "PENDING"
    shown = jobs.cluster.run("scontrol", "show", "job", job.id).stdout
    assert "Comment=a b; $(c)" in shown
    job.cancel()


def test_local_is_the_same_without_slurm(reference, data_folder, tmp_path):
    """kill -9 of a rank: the script starts again by itself. Ctrl-C: it saves, and stays ended."""
    run, pace = tmp_path / "a run", tmp_path / "pace"
    set_pace(pace, **SLOW)
    environ = os.environ | {
        "CANON_CPU": "1", "TEST_PACE": str(pace), "PYTHONPATH": str(SITE),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }  # fmt: skip
    command = ["bash", str(ROOT / SCRIPT), "--local", *map(str, train(data_folder, run, *LONG))]

    def start() -> subprocess.Popen[str]:
        # a shell's background job, as this suite may be, hands an ignored SIGINT on
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            return subprocess.Popen(
                command, cwd=tmp_path, env=environ, stderr=subprocess.STDOUT,
                stdout=subprocess.PIPE, text=True, start_new_session=True,
            )  # fmt: skip
        finally:
            signal.signal(signal.SIGINT, before)

    def wait_for_step(step: int) -> None:
        end = time.monotonic() + 240
        while logged_step(run) < step or status(run).phase != "training":
            assert script.poll() is None and time.monotonic() < end, script.communicate()[0]
            time.sleep(0.1)

    script = start()
    wait_for_step(2)
    first = status(run).pid
    os.kill(first, signal.SIGKILL)
    while status(run).pid == first:
        time.sleep(0.1)
    wait_for_step(3)
    os.killpg(script.pid, signal.SIGINT)  # as a terminal does
    output = script.communicate(timeout=120)[0]
    assert script.returncode == 0, output
    assert "requeue: the launch failed: it was killed at step" in output
    assert status(run).state == "stopped" and not (run / "STOP").exists(), output
    set_pace(pace)
    script = start()
    output = script.communicate(timeout=240)[0]
    assert script.returncode == 0 and "done: step" in output, output
    assert_same_run(run, reference, step=STEPS)


def preflight_ranks(node: str) -> list[int]:
    """Processes on this machine that are ranks of a node's preflight."""
    found = []
    for pid, line in processes_of("canon_pretrain.preflight ranks ").items():
        with contextlib.suppress(OSError):
            environ = Path(f"/proc/{pid}/environ").read_bytes()
            if (
                "torch.distributed.run" not in line
                and f"SLURMD_NODENAME={node}".encode() in environ
            ):
                found.append(pid)
    return found


def test_a_slow_node_is_named_and_the_run_goes_on(jobs, data_folder, tmp_path):
    """The ranks on n2 run a quarter of the time, by signals; on CPUs that is a warning."""
    run = tmp_path / "run"
    jobs.set(PREFLIGHT=1)
    job = jobs.submit(SCRIPT, *train(data_folder, run), flags=("--nodes=2",))
    while job.state not in ENDED and not logged_step(run):
        for pid in preflight_ranks("n2"):
            with contextlib.suppress(ProcessLookupError):  # until it has ended
                while True:
                    os.kill(pid, signal.SIGSTOP)
                    time.sleep(0.03)
                    os.kill(pid, signal.SIGCONT)
                    time.sleep(0.01)
    assert job.until_ended() == "COMPLETED", job.text() + log_of(run)
    words = log_of(run)
    assert "WARNING: n2: cpu:0 is slow: matmul" in words
    assert "preflight: 2 node(s), 2 ranks: fit" in words
