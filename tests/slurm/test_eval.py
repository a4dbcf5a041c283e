"""slurm/eval.sh on a real Slurm: one checkpoint, one suite, whatever happens to the job."""

import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from canon_pretrain.run.results import PartialResults, read_results
from eval.schedule import leases_of
from tests.eval_text_runs import TRAIN, text_run, write_text_data
from tests.ranks import launch
from tests.slurm_jobs import CPUS, SITE, Job, Jobs, processes_of
from tests.support import ROOT

pytestmark = pytest.mark.slurm
SCRIPT = "slurm/eval.sh"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("trained")
    write_text_data(base / "data")
    launch("--config", TRAIN, *text_run(base / "data", base / "run"), output=base / "out")
    return base / "run"


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    """A copy of it, of one's own, in a folder that a shell would stumble over."""
    folder = tmp_path / 'it\'s "a run"; $(touch HIT) %j'
    shutil.copytree(trained, folder)
    return folder


def submit(jobs: Jobs, run: Path, *more: object, **variables: object) -> None:
    environ = jobs.environ({"PYTHONPATH": f"{SITE}:{ROOT}", **variables})
    command = [sys.executable, "-m", "eval", "submit", run, f"--sbatch={CPUS}", *more]
    done = subprocess.run(
        [*map(str, command)], cwd=jobs.folder, env=environ, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


def only_job(jobs: Jobs, run: Path, step: int, suite: str) -> Job:
    lease = leases_of(run, step, suite).current()
    assert lease is not None and lease.number == 1 and lease.job is not None
    log = run / "evals" / f"step-{step}" / suite / f"slurm-{lease.job}.log"
    return Job(jobs.cluster, lease.job, log)


def write_pair(folder: Path) -> Path:
    zen = ROOT / "eval" / "tasks" / "zen_of_python"
    shutil.copy(zen / "utils.py", folder)
    for name in ("zen_one", "zen_two"):
        text = (zen / "zen_of_python.yaml").read_text()
        (folder / f"{name}.yaml").write_text(text.replace("task: zen_of_python", f"task: {name}"))
    (folder / "pair.yaml").write_text("group: pair\ntask:\n  - zen_one\n  - zen_two\n")
    return folder / "pair.yaml"


def test_the_time_limit_costs_the_running_task_at_most(jobs, run, tmp_path):
    """Two ranks; USR1 when one task of two is answered: requeued, and it goes on after that one."""
    jobs.set(RANKS_PER_NODE=2)
    tasks, gate = tmp_path / "my tasks", tmp_path / "gate"
    tasks.mkdir()
    gate.touch()
    trusted = ("--suites", write_pair(tasks), "--trust_task_files")
    submit(jobs, run, *trusted, "--every", 12, "--once", TEST_EVAL_GATE=gate)
    job = only_job(jobs, run, 12, "pair")
    suite = run / "evals/step-12/pair"
    job.until(lambda: [*suite.glob("*/unfinished/*.task.json")], "the first task's answers")

    jobs.cluster.run("scancel", "--signal=USR1", "--batch", job.id)  # as --signal=B:USR1@60 does
    job.until_requeued(1)
    assert not any("eval run" in line for line in processes_of(str(tmp_path)).values())
    gate.unlink()
    assert job.until_ended() == "COMPLETED", job.text()
    assert "resumed after 1 tasks of an earlier call" in job.text()
    (path,) = suite.glob("*/results.json")
    results = read_results(path)
    assert set(results.scores) == {"zen_one", "zen_two"}
    assert PartialResults(path.parent, results.asked).read() == {}
    assert not [*tmp_path.glob("**/HIT")] and not (ROOT / "HIT").exists()


def test_a_job_that_another_has_overtaken_does_nothing(jobs, run):
    """What a watcher submits that slept between its claim and sbatch."""
    checkpoint = run / "checkpoint/step-12"
    script = (SCRIPT, "--lease", "0123456789abcdef", checkpoint, "validation")
    job = jobs.submit(*script, flags=(CPUS,))
    assert job.until_ended() == "COMPLETED"
    assert "another job has this work" in job.text()
    assert not (run / "evals/step-12/validation").exists()


def test_by_hand_and_scancel(jobs, run, tmp_path):
    """A job that a person submits, from elsewhere; and one that is cancelled leaves no process."""
    work = (SCRIPT, run / "checkpoint/step-3", "validation", "--batch_tokens", 4096)
    job = jobs.submit(*work, flags=(CPUS,))
    assert job.until_ended() == "COMPLETED", job.text()
    (path,) = (run / "evals/step-3/validation").glob("*/results.json")
    assert read_results(path).asked["step"] == 3

    job = jobs.submit(*work[:2], "no-such-suite", flags=(CPUS,))
    assert job.until_ended() == "FAILED" and job.restarts == 0
    assert "unknown suite 'no-such-suite'" in job.text()

    job = jobs.submit(SCRIPT, run / "checkpoint/step-6", "validation", flags=(CPUS,))
    job.until(lambda: "eval run" in str(processes_of(f"{run}/checkpoint/step-6")), "it")
    job.cancel()
    assert job.until_ended() == "CANCELLED"
    began = time.monotonic()
    job.until(lambda: not processes_of(f"{run}/checkpoint/step-6"), "the end of its processes")
    assert time.monotonic() - began < 20, "SIGTERM was not obeyed; KillWait is 25 s"
    assert not [*(run / "evals/step-6").glob("*/*/results.json")]


def test_an_evaluation_takes_one_gpu_of_a_node(jobs, run):
    """By sbatch as by `eval submit`; EVAL_GPUS and flags say another number."""
    jobs.set(CANON_CPU=0)
    work = (run / "checkpoint/step-3", "validation")

    def asked(*command: object, **variables: object) -> list[str]:
        words = [*map(str, command), str(ROOT / SCRIPT), *map(str, work)]
        submitted = jobs.cluster.run(*words, cwd=ROOT, environ=jobs.environ(variables))
        job = Job(jobs.cluster, submitted.stdout.strip(), jobs.folder)
        assert job.field("OverSubscribe") == "OK"
        found = [job.field("NumCPUs"), job.field("TresPerNode").replace("/", ":")]
        job.cancel()
        return found

    sbatch = ("sbatch", "--parsable", "--hold")
    submit = ("bash", ROOT / "slurm/submit.sh", *sbatch[1:])
    assert asked(*sbatch) == asked(*submit) == ["8", "gres:gpu:1"]
    assert asked(*submit, EVAL_GPUS=2, CPUS_PER_GPU=3) == ["6", "gres:gpu:2"]
    assert asked(*submit, "--gres=gpu:8", CPUS_PER_GPU=1) == ["8", "gres:gpu:8"]
