"""The whole story on a test cluster, as `make slurm-demo` tells it: text to report, by Slurm jobs.

A real Slurm of two nodes starts on this machine (slurm_cluster.py). Every command is printed before
it runs, and is what a user types on a cluster but for its CPU settings; what it prints follows.
Takes about five minutes on two cores. Root and Debian's slurm packages are needed.
"""

import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from tests.slurm_cluster import SlurmCluster, missing, slurm_cluster
from tests.support import ROOT

DEMO = Path("outputs/slurm-demo")
RUN = DEMO / "run"
STEPS, EVERY = 120, 60
SETTINGS = """VENV='{venv}'
export CANON_CPU=1 RANKS_PER_NODE=1
export SBATCH_GPUS_PER_NODE=0
export WATCH_MINUTES=0.1
"""
TRAIN = (
    "train_configs/quickstart.toml", "--data.path", DEMO / "data", "--job.dump_folder", RUN,
    "--training.steps", STEPS, "--checkpoint.interval", EVERY,
)  # fmt: skip


class Story:
    """Runs commands as a user of `cluster` does, and shows them."""

    def __init__(self, cluster: SlurmCluster) -> None:
        self.environ = cluster.environ | {
            "CANON_CLUSTER_ENV": str((DEMO / "cluster.env").resolve()),
            "OMP_NUM_THREADS": "1",
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "COLUMNS": "110",
        }
        self._hurried: dict[str, int] = {}

    def say(self, words: str) -> None:
        print(f"\n== {words}", flush=True)

    def run(self, *command: object, shown: bool = True) -> str:
        words = [str(word) for word in command]
        if shown:
            print(f"$ {shlex.join(words)}", flush=True)
        done = subprocess.run(
            words, env=self.environ, cwd=ROOT, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        if shown:
            print(done.stdout.rstrip(), flush=True)
        if done.returncode:
            sys.exit(f"that failed with code {done.returncode}\n{'' if shown else done.stdout}")
        return done.stdout

    def restarts(self, job: str) -> int:
        shown = self.run("scontrol", "show", "job", "-o", job, shown=False)
        return int(re.findall(r"Restarts=(\d+)", shown)[0])

    def until(self, happened: Callable[[], object], what: str, timeout_s: float = 300) -> None:
        """Wait; a requeued training job starts in seconds, for which Slurm takes two minutes."""
        end = time.monotonic() + timeout_s
        while not happened():
            if time.monotonic() > end:
                sys.exit(f"waited {timeout_s:.0f} s for {what}")
            waiting = self.run("squeue", "-h", "-t", "PENDING", "-o", "%A %j %r", shown=False)
            for job in re.findall(r"^(\d+) canon-pretrain BeginTime$", waiting, re.MULTILINE):
                if (restarts := self.restarts(job)) > self._hurried.get(job, 0):
                    self._hurried[job] = restarts
                    self.run("scontrol", "update", f"JobId={job}", "StartTime=now+4", shown=False)
            time.sleep(0.5)

    def queue(self) -> None:
        self.run("squeue", "--format=%.6i %.24j %.10T %.8M %.6D %R")

    def is_running(self) -> bool:
        return bool(self.run("squeue", "-h", "-t", "PENDING,RUNNING,COMPLETING", shown=False))


def tell(story: Story) -> None:
    story.say("two nodes")
    story.run("sinfo")
    story.say("text -> shards: an array of two jobs, then one that finishes and verifies")
    story.run(
        "bash", "slurm/data_prep.sh", "submit", "--shards", 2, "--cpus-per-task=1",
        "--gpus-per-node=0", "--", "--source", "stdlib", "--tokenizer", "train:2048",
        "--holdout", "0.03", "--out", DEMO / "data",
    )  # fmt: skip
    story.queue()
    story.until(lambda: not story.is_running(), "the shards")
    story.run("tail", "-n", 3, *sorted((DEMO / "data.logs").glob("*-finish.log")))

    story.say("a world size that does not divide the batch is refused before it is queued")
    refused = subprocess.run(
        ["bash", "slurm/submit.sh", "--nodes", "3", "slurm/pretrain_1b3.sh", *map(str, TRAIN)],
        env=story.environ, cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    print("$ bash slurm/submit.sh --nodes 3 slurm/pretrain_1b3.sh ...")
    print(refused.stderr.strip().splitlines()[-1])

    story.say("train on two nodes; a watch evaluates checkpoints as they come")
    # evaluations are to run beside it, on these two nodes
    sent = story.run(
        "bash", "slurm/submit.sh", "--nodes", 2, "--exclusive=user", "--cpus-per-task=4",
        "slurm/pretrain_1b3.sh", *TRAIN,
    )  # fmt: skip
    job = re.findall(r"Submitted batch job (\d+)", sent)[0]
    story.run(
        "bash", "slurm/submit.sh", "slurm/eval_watch.sh", RUN, "--suites",
        "validation,zen_of_python", "--every", EVERY, "--sbatch=--gpus-per-node=0",
        "--sbatch=--exclusive=user", "--sbatch=--cpus-per-task=4",
    )  # fmt: skip
    log = RUN / "log.jsonl"
    story.until(lambda: log.exists() and '"step": 20,' in log.read_text(), "step 20")
    story.queue()
    story.run("python", "-m", "canon_pretrain.run", "status", RUN)

    story.say("the time limit comes near: Slurm's signal; the trainer saves, the job is requeued")
    story.run("scancel", "--batch", "--signal=USR1", job)

    story.until(lambda: story.restarts(job) == 1, "the requeue")
    story.queue()
    story.until(lambda: (RUN / "DONE").exists(), "the end of training")
    story.until(lambda: (RUN / "report/index.html").exists(), "the report")
    story.until(lambda: not story.is_running(), "the watch's end")

    story.say("everything is done, once")
    story.run("python", "-m", "eval", "submit", RUN, "--status")
    story.run("python", "-m", "canon_pretrain.run", "status", RUN)
    story.run("squeue", "--states=all", "--format=%.6i %.40j %.10T %.8M %.6D")
    story.run("grep", "-v", "step ", RUN / "slurm.log")
    print(f"\nreport: {(RUN / 'report/index.html').resolve()}")


def main() -> None:
    if why := missing():
        sys.exit(f"no Slurm can be started here: {why}")
    os.chdir(ROOT)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))  # no jobs are left over
    if DEMO.exists():
        sys.exit(f"{DEMO} is there from an earlier time: remove it first")
    DEMO.mkdir(parents=True)
    (DEMO / "cluster.env").write_text(SETTINGS.format(venv=sys.prefix))
    with (
        tempfile.TemporaryDirectory(prefix="slurm-demo-") as state,
        slurm_cluster(Path(state), kill_wait=30, grace=60) as cluster,
    ):
        tell(Story(cluster))


if __name__ == "__main__":
    main()
