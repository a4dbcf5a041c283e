"""slurm/eval.sh on a real Slurm: time limits, failures and scancel."""

import shutil
import subprocess
import sys
import time

import pytest

from canon_pretrain.run.results import PartialResults, read_results
from eval.schedule import leases_of
from tests.eval_text_runs import TRAIN, text_run, write_text_data
from tests.ranks import launch
from tests.slurm_jobs import CPUS, SITE, Job, processes_of
from tests.support import ROOT, error_codes

pytestmark = pytest.mark.slurm
SCRIPT = "slurm/eval.sh"


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    base = tmp_path_factory.mktemp("trained")
    write_text_data(base / "data")
    launch("--config", TRAIN, *text_run(base / "data", base / "run"), output=base / "out")
    return base / "run"


@pytest.fixture
def run(trained, tmp_path):
    """A copy, in a folder with shell metacharacters in its name."""
    folder = tmp_path / 'it\'s "a run"; $(touch HIT) %j'
    shutil.copytree(trained, folder)
    return folder


def write_pair(folder):
    """Write a group of two tasks, both copies of zen_of_python; return its file."""
    zen = ROOT / "eval" / "tasks" / "zen_of_python"
    shutil.copy(zen / "utils.py", folder)
    text = (zen / "zen_of_python.yaml").read_text()
    for name in ("zen_one", "zen_two"):
        (folder / f"{name}.yaml").write_text(text.replace("task: zen_of_python", f"task: {name}"))
    (folder / "pair.yaml").write_text("group: pair\ntask:\n  - zen_one\n  - zen_two\n")
    return folder / "pair.yaml"


def test_a_time_limit_costs_at_most_one_task(jobs, run, tmp_path):
    """Two ranks; USR1 after one task of two: requeued, it continues with the second one."""
    jobs.set(RANKS_PER_NODE=2)
    tasks = tmp_path / "my tasks"
    tasks.mkdir()
    gate = tmp_path / "gate"
    gate.touch()
    command = [
        *(sys.executable, "-m", "eval", "submit", str(run)),
        *(f"--sbatch={CPUS}", "--once"),
        *("--suites", str(write_pair(tasks)), "--trust_task_files"),
        *("--every", "12"),
    ]
    environ = jobs.environ({"PYTHONPATH": f"{SITE}:{ROOT}", "TEST_EVAL_GATE": gate})
    subprocess.run(command, cwd=tmp_path, env=environ, check=True)

    lease = leases_of(run, 12, "pair").current()
    assert lease is not None
    assert lease.number == 1
    assert lease.job is not None
    suite = run / "evals/step-12/pair"
    job = Job(jobs.cluster, lease.job, suite / f"slurm-{lease.job}.log")

    def results_of_tasks():
        return [*suite.glob("*/unfinished/*.task.json")]

    job.until(results_of_tasks, "the first task's result")
    (first,) = results_of_tasks()
    written_at = first.stat().st_mtime_ns

    # the signal of --signal=B:USR1@60; the first task is not repeated
    jobs.cluster.run("scancel", "--signal=USR1", "--batch", job.id)
    job.until_requeued(1)
    assert not any("eval run" in line for line in processes_of(str(tmp_path)).values())
    job.until(lambda: len(results_of_tasks()) == 2, "the second task's result")
    assert first.stat().st_mtime_ns == written_at

    gate.unlink()
    assert job.until_ended() == "COMPLETED", job.text()
    (path,) = suite.glob("*/results.json")
    results = read_results(path)
    assert set(results.scores) == {"zen_one", "zen_two"}
    assert PartialResults(path.parent, results.asked).read() == {}
    assert not [*tmp_path.glob("**/HIT")]
    assert not (ROOT / "HIT").exists()


def test_by_hand_and_scancel(jobs, run, tmp_path):
    """With sbatch: one job completes, one fails, one is cancelled and leaves no process."""
    step_3 = run / "checkpoint/step-3"
    step_6 = run / "checkpoint/step-6"

    completed = jobs.submit(SCRIPT, step_3, "validation", "--batch_tokens", 4096, flags=(CPUS,))
    assert completed.until_ended() == "COMPLETED", completed.text()
    (path,) = (run / "evals/step-3/validation").glob("*/results.json")
    assert read_results(path).asked["step"] == 3

    failed = jobs.submit(SCRIPT, step_3, "no-such-suite", flags=(CPUS,))
    assert failed.until_ended() == "FAILED"
    assert failed.restarts == 0
    assert len({*error_codes(failed.text())}) == 1

    # its processes obey SIGTERM: KillWait is 60 s
    cancelled = jobs.submit(SCRIPT, step_6, "validation", flags=(CPUS,))
    cancelled.until(lambda: "eval run" in str(processes_of(str(step_6))), "its processes")
    cancelled.cancel()
    assert cancelled.until_ended() == "CANCELLED"
    began = time.monotonic()
    cancelled.until(lambda: not processes_of(str(step_6)), "the end of its processes")
    assert time.monotonic() - began < 20
    assert not [*(run / "evals/step-6").glob("*/*/results.json")]
