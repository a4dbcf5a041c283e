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
from pathlib import Path

from tests.slurm_cluster import SlurmCluster, missing, slurm_cluster
from tests.slurm_jobs import Job
from tests.support import ROOT

DEMO = Path("outputs/slurm-demo")
RUN = DEMO / "run"
STEPS, EVERY = 120, 60
SETTINGS = f"""VENV='{sys.prefix}'
export CANON_CPU=1 RANKS_PER_NODE=1
export SBATCH_GPUS_PER_NODE=0
export WATCH_MINUTES=0.1
"""
TRAIN = (
    "train_configs/quickstart.toml", "--data.path", DEMO / "data", "--job.dump_folder", RUN,
    "--training.steps", STEPS, "--checkpoint.interval", EVERY,
)  # fmt: skip


def tell(cluster: SlurmCluster) -> None:
    """Run commands as a user of `cluster` does, and show them."""
    environ = cluster.environ | {
        "CANON_CLUSTER_ENV": str((DEMO / "cluster.env").resolve()),
        "OMP_NUM_THREADS": "1",
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "COLUMNS": "110",
    }

    def say(words: str) -> None:
        print(f"\n== {words}", flush=True)

    def run(*command: object, code: int = 0) -> str:
        words = [str(word) for word in command]
        print(f"$ {shlex.join(words)}", flush=True)
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        done = subprocess.run(words, env=environ, cwd=ROOT, text=True, **pipes)
        print(done.stdout.rstrip(), flush=True)
        if done.returncode != code:
            sys.exit(f"that failed with code {done.returncode}")
        return str(done.stdout)

    def show_queue() -> None:
        run("squeue", "--format=%.6i %.24j %.10T %.8M %.6D %R")

    def is_idle() -> bool:
        return not cluster.run("squeue", "-h", "-t", "PENDING,RUNNING,COMPLETING").stdout

    say("text -> shards: an array of two jobs, then one that finishes and verifies")
    run(
        "bash", "slurm/data_prep.sh", "submit", "--shards", 2, "--cpus-per-task=1",
        "--gpus-per-node=0", "--", "--source", "stdlib", "--tokenizer", "train:2048",
        "--holdout", "0.03", "--out", DEMO / "data",
    )  # fmt: skip
    show_queue()
    cluster.until(is_idle, "the shards", 300)
    run("tail", "-n", 3, *sorted((DEMO / "data.logs").glob("*-finish.log")))

    say("a world size that does not divide the batch is refused before it is queued")
    run("bash", "slurm/submit.sh", "--nodes", "3", "slurm/pretrain_1b3.sh", *TRAIN, code=2)

    say("train on two nodes; a watch evaluates checkpoints as they come")
    # evaluations are to run beside it, on these two nodes
    sent = run(
        "bash", "slurm/submit.sh", "--nodes", 2, "--exclusive=user", "--cpus-per-task=4",
        "slurm/pretrain_1b3.sh", *TRAIN,
    )  # fmt: skip
    job = Job(cluster, re.findall(r"Submitted batch job (\d+)", sent)[0], RUN / "slurm.log")
    run(
        "bash", "slurm/submit.sh", "slurm/eval_watch.sh", RUN, "--suites",
        "validation,zen_of_python", "--every", EVERY, "--sbatch=--gpus-per-node=0",
        "--sbatch=--exclusive=user", "--sbatch=--cpus-per-task=4",
    )  # fmt: skip
    job.until_step(RUN, 20)
    show_queue()
    run("python", "-m", "canon_pretrain.run", "status", RUN)

    say("the time limit comes near: Slurm's signal; the trainer saves, the job is requeued")
    run("scancel", "--batch", "--signal=USR1", job.id)
    job.until_requeued(1)
    show_queue()
    job.until((RUN / "DONE").exists, "the end of training")
    job.until((RUN / "report/index.html").exists, "the report")
    job.until(is_idle, "the watch's end")

    say("everything is done, once")
    run("python", "-m", "eval", "submit", RUN, "--status")
    run("python", "-m", "canon_pretrain.run", "status", RUN)
    run("squeue", "--states=all", "--format=%.6i %.40j %.10T %.8M %.6D")


def main() -> None:
    if why := missing():
        sys.exit(f"no Slurm can be started here: {why}")
    os.chdir(ROOT)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))  # no jobs are left over
    if DEMO.exists():
        sys.exit(f"{DEMO} is there from an earlier time: remove it first")
    DEMO.mkdir(parents=True)
    (DEMO / "cluster.env").write_text(SETTINGS)
    with (
        tempfile.TemporaryDirectory(prefix="slurm-demo-") as state,
        slurm_cluster(Path(state), kill_wait=30, grace=60) as cluster,
    ):
        tell(cluster)


if __name__ == "__main__":
    main()
