"""`make slurm-demo`: from text to report by Slurm jobs, on a test cluster of two nodes.

Prints each command, which is what a user types on a cluster except for the CPU settings, and its
output. Takes about five minutes on two cores. Needs root and Debian's slurm packages.
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
SETTINGS = f"""VENV='{sys.prefix}'
export CANON_CPU=1 RANKS_PER_NODE=1
export SBATCH_GPUS_PER_NODE=0
export WATCH_MINUTES=0.1
"""
BUILD = f"""bash slurm/data_prep.sh submit --shards 2 --cpus-per-task=1 --gpus-per-node=0
-- --source stdlib --tokenizer train:1024 --holdout 0.03 --out {DEMO}/data"""
TRAIN = f"""slurm/pretrain_1b3.sh train_configs/quickstart.toml --data.path {DEMO}/data
--job.dump_folder {RUN} --training.steps 120 --checkpoint.interval 60"""
SHARED = "--exclusive=user --cpus-per-task=4"  # evaluations run on the same two nodes
WATCH = f"""bash slurm/submit.sh slurm/eval_watch.sh {RUN} --suites validation,zen_of_python
--every 60 --sbatch=--gpus-per-node=0 --sbatch=--exclusive=user --sbatch=--cpus-per-task=4"""
QUEUE = "squeue --format='%.6i %.24j %.10T %.8M %.6D %R'"


def show(cluster: SlurmCluster) -> None:
    """Run the commands of a user of `cluster` and print them."""
    environ = cluster.environ | {
        "CANON_CLUSTER_ENV": str((DEMO / "cluster.env").resolve()),
        "OMP_NUM_THREADS": "1",
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "COLUMNS": "110",
    }

    def run(command: str, code: int = 0) -> str:
        words = shlex.split(command)
        print(f"$ {shlex.join(words)}", flush=True)
        done = subprocess.run(
            words,
            env=environ,
            cwd=ROOT,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        print(done.stdout.rstrip(), flush=True)
        if done.returncode != code:
            sys.exit(f"failed with code {done.returncode}")
        return str(done.stdout)

    def is_idle() -> bool:
        return not cluster.run("squeue", "-h", "-t", "PENDING,RUNNING,COMPLETING").stdout

    print("\n== text -> shards: an array of two jobs, then one that finishes and verifies")
    run(BUILD)
    run(QUEUE)
    cluster.until(is_idle, "the shards", 300)
    for path in (DEMO / "data.logs").glob("*-finish.log"):
        run(f"tail -n 3 {path}")

    print("\n== a number of nodes that does not divide the batch is refused before it is queued")
    run(f"bash slurm/submit.sh --nodes 3 {TRAIN}", code=2)

    print("\n== train on two nodes; a watch evaluates the checkpoints")
    printed = run(f"bash slurm/submit.sh --nodes 2 {SHARED} {TRAIN}")
    job = Job(cluster, re.findall(r"Submitted batch job (\d+)", printed)[0], RUN / "slurm.log")
    run(WATCH)
    job.until_step(RUN, 20)
    run(QUEUE)
    run(f"python -m canon_pretrain.run status {RUN}")

    print("\n== the signal of a time limit: the trainer saves, the job is requeued")
    run(f"scancel --batch --signal=USR1 {job.id}")
    job.until_requeued(1)
    run(QUEUE)
    job.until((RUN / "DONE").exists, "the end of training")
    job.until((RUN / "report/index.html").exists, "the report")
    job.until(is_idle, "the end of the watch")

    print("\n== done")
    run(f"python -m eval submit {RUN} --status")
    run(f"python -m canon_pretrain.run status {RUN}")
    run("squeue --states=all --format='%.6i %.40j %.10T %.8M %.6D'")


def main() -> None:
    """Run the demo in a cluster of its own."""
    if problem := missing():
        sys.exit(f"no Slurm can be started here: {problem}")
    os.chdir(ROOT)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))  # with all jobs
    if DEMO.exists():
        sys.exit(f"{DEMO} exists: remove it first")
    DEMO.mkdir(parents=True)
    (DEMO / "cluster.env").write_text(SETTINGS)
    with (
        tempfile.TemporaryDirectory(prefix="slurm-demo-") as state,
        slurm_cluster(Path(state), kill_wait=30, grace=60) as cluster,
    ):
        show(cluster)


if __name__ == "__main__":
    main()
