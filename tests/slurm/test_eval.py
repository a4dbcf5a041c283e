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
    zen = ROOT / "eval" / "tasks" / "zen_of_python"
    shutil.copy(zen / "utils.py", folder)
    for name in ("zen_one", "zen_two"):
        text = (zen / "zen_of_python.yaml").read_text()
        (folder / f"{name}.yaml").write_text(text.replace("task: zen_of_python", f"task: {name}"))
    (folder / "pair.yaml").write_text("group: pair\ntask:\n  - zen_one\n  - zen_two\n")
    return folder / "pair.yaml"


def test_a_time_limit_costs_at_most_one_task(jobs, run, tmp_path):
    """Two ranks; USR1 after one task of two: requeued, it continues with the second one."""
    jobs.set(RANKS_PER_NODE=2)
    tasks, gate = tmp_path / "my tasks", tmp_path / "gate"
    tasks.mkdir()
    gate.touch()
    environ = jobs.environ({"PYTHONPATH": f"{SITE}:{ROOT}", "TEST_EVAL_GATE": gate})
    command = [sys.executable, "-m", "eval", "submit", str(run), f"--sbatch={CPUS}", "--once"]
    command += ["--suites", str(write_pair(tasks)), "--trust_task_files", "--every", "12"]
    subprocess.run(command, cwd=tmp_path, env=environ, check=True)
    lease = leases_of(run, 12, "pair").current()
    assert lease is not None and lease.number == 1 and lease.job is not None
    suite = run / "evals/step-12/pair"
    job = Job(jobs.cluster, lease.job, suite / f"slurm-{lease.job}.log")

    def finished():
        return [*suite.glob("*/unfinished/*.task.json")]

    job.until(finished, "the first task's result")
    written = {path: path.stat().st_mtime_ns for path in finished()}

    jobs.cluster.run("scancel", "--signal=USR1", "--batch", job.id)  # as --signal=B:USR1@60
    job.until_requeued(1)
    assert not any("eval run" in line for line in processes_of(str(tmp_path)).values())
    job.until(lambda: len(finished()) == 2, "the second task's result")
    assert [path.stat().st_mtime_ns for path in written] == [*written.values()], "not repeated"
    gate.unlink()
    assert job.until_ended() == "COMPLETED", job.text()
    (path,) = suite.glob("*/results.json")
    results = read_results(path)
    assert set(results.scores) == {"zen_one", "zen_two"}
    assert PartialResults(path.parent, results.asked).read() == {}
    assert not [*tmp_path.glob("**/HIT")] and not (ROOT / "HIT").exists()


def test_by_hand_and_scancel(jobs, run, tmp_path):
    """With sbatch: one job completes, one fails, one is cancelled and leaves no process."""
    work = (SCRIPT, run / "checkpoint/step-3", "validation", "--batch_tokens", 4096)
    job = jobs.submit(*work, flags=(CPUS,))
    assert job.until_ended() == "COMPLETED", job.text()
    (path,) = (run / "evals/step-3/validation").glob("*/results.json")
    assert read_results(path).asked["step"] == 3

    job = jobs.submit(*work[:2], "no-such-suite", flags=(CPUS,))
    assert job.until_ended() == "FAILED" and job.restarts == 0
    assert len({*error_codes(job.text())}) == 1

    job = jobs.submit(SCRIPT, run / "checkpoint/step-6", "validation", flags=(CPUS,))
    job.until(lambda: "eval run" in str(processes_of(f"{run}/checkpoint/step-6")), "it")
    job.cancel()
    assert job.until_ended() == "CANCELLED"
    began = time.monotonic()
    job.until(lambda: not processes_of(f"{run}/checkpoint/step-6"), "the end of its processes")
    assert time.monotonic() - began < 20, "ignored SIGTERM; KillWait is 60 s"
    assert not [*(run / "evals/step-6").glob("*/*/results.json")]
