"""The job scripts with programs that stand in for Slurm's: what a cluster does too seldom to wait.

test_slurm_*.py beside this run them on a real Slurm.
"""

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.support import ROOT

LIBRARY = 'set -euo pipefail; CANON_REPO=$1; shift; source "$CANON_REPO/slurm/lib.sh"; '


@pytest.fixture
def programs(tmp_path: Path) -> Path:
    """A folder that is first on PATH; `calls` gets a line for each call of a stand-in."""
    folder = tmp_path / "programs"
    folder.mkdir()
    return folder


def stand_in(folder: Path, name: str, body: str = "") -> None:
    path = folder / name
    path.write_text(f'#!/bin/bash\necho "{name} $*" >>"{folder}/calls"\n{body}\n')
    path.chmod(0o755)


def calls(folder: Path, start: str) -> list[str]:
    lines = (folder / "calls").read_text().splitlines() if (folder / "calls").exists() else []
    return [line for line in lines if line.startswith(start)]


def library(programs: Path, body: str, *words: object, **variables: object) -> Any:
    return bash(programs, "-c", f"{LIBRARY} {body}", "bash", ROOT, *words, **variables)


def bash(programs: Path, *words: object, **variables: object) -> subprocess.CompletedProcess[str]:
    (programs / "cluster.env").touch()  # not the user's own
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "SBATCH_"))}
    environ = kept | {
        "PATH": f"{programs}:{os.environ['PATH']}", "CANON_CPU": "1",
        "CANON_CLUSTER_ENV": str(programs / "cluster.env"),
    }  # fmt: skip
    environ |= {name: str(value) for name, value in variables.items()}
    command = ["bash", *map(str, words)]
    return subprocess.run(command, env=environ, cwd=programs, capture_output=True, text=True)


@pytest.mark.parametrize(
    ("words", "tries", "code"),
    [
        ("slurm_requeue error: Unable to contact slurm controller (connect failure)", 3, 0),
        ("Requested operation is presently disabled for job 7", 1, 1),
    ],
)
def test_a_controller_that_restarts_ends_no_chain(programs, words, tries, code):
    count = f'(($(grep -c . "{programs}/calls") > 2)) || {{ echo "{words}" >&2; exit 1; }}'
    stand_in(programs, "scontrol", count)
    done = library(programs, "requeue", SLURM_JOB_ID=7, REQUEUE_PAUSE_S=0)
    assert done.returncode == code and words in done.stderr
    assert calls(programs, "scontrol") == ["scontrol requeue 7"] * tries


def test_a_job_that_has_not_begun_stops_nobody(programs, tmp_path):
    """Cancelled in its first seconds, a job must not stop the one that has its run folder."""
    for ours in (0, 1):
        done = library(programs, f"RUN=$1 OURS={ours}; on_term", tmp_path)
        assert done.returncode == 0 and (tmp_path / "STOP").exists() == bool(ours)


@pytest.mark.parametrize(
    ("once", "finished", "ends"), [(0, 0, True), (0, 1, False), (1, 0, True), (1, 1, False)]
)
def test_a_watch_ends_when_nothing_is_left_though_some_failed(
    programs, tmp_path, once, finished, ends
):
    """`eval submit --once` exits with 1 for a failed look, and for evaluations failed for good."""
    body = f"case $* in *--once) exit {once} ;; *--is_finished) exit {finished} ;; esac"
    stand_in(programs, "python", body)
    stand_in(programs, "squeue", "echo 12")
    stand_in(programs, "scancel")
    run = tmp_path / "run"
    run.mkdir()
    done = bash(programs, ROOT / "slurm/eval_watch.sh", run, SLURM_JOB_ID=11)
    assert done.returncode == 0, done
    log = (run / "evals/watch.log").read_text()
    assert calls(programs, "scancel") == (["scancel 12"] if ends else []), log
    assert ("the watch ends" in log) == ends


def test_a_queue_that_cannot_be_read_is_no_empty_one(programs, tmp_path):
    stand_in(programs, "squeue", "exit 1")
    stand_in(programs, "sbatch")
    done = bash(programs, ROOT / "slurm/sweep.sh", "submit", tmp_path)
    assert done.returncode == 2 and "squeue failed" in done.stderr, done
    assert not calls(programs, "sbatch")


def test_a_finish_that_sbatch_refuses_is_an_error(programs, tmp_path):
    stand_in(programs, "squeue")
    stand_in(programs, "sbatch", "case $* in *canon-data-finish*) exit 1 ;; esac; echo 5")
    stand_in(programs, "python", f"printf '%s\\0' 1,2 '{tmp_path}/data' '{tmp_path}/data'")
    done = bash(programs, ROOT / "slurm/data_prep.sh", "submit", "--shards", 2, "--", "--out", "x")
    assert done.returncode == 1 and "finish and verify" not in done.stdout, done
    assert len(calls(programs, "sbatch")) == 2


WHOLE = ["--exclusive", "--mem=0"]
SHARES = [
    ("sweep.sh", "GPUS_PER_NODE=4 GPU_FLAG=--gres=gpu:h100:", "", ["--gres=gpu:h100:4", *WHOLE]),
    ("pretrain_1b3.sh", "CANON_CPU=1", "", WHOLE),
    (
        "sweep.sh",
        "GPUS_PER_NODE=2 SHARED_NODES=1 CPUS_PER_GPU=6 MEM_PER_GPU=50G",
        "",
        ["--gpus-per-node=2", "--cpus-per-task=12", "--mem=100G"],
    ),
    ("pretrain_1b3.sh", "SBATCH_GRES=gpu:4", "--exclusive=user --mem-per-cpu=4G", []),
    ("eval.sh", "EVAL_GPUS=2 CPUS_PER_GPU=4", "", ["--gpus-per-node=2", "--cpus-per-task=8"]),
    ("eval.sh", "", "--gpus-per-node=8 -c 64", []),
]
"""A script, cluster.env's settings, sbatch's flags, and the flags that come before them."""


@pytest.mark.parametrize(("script", "settings", "flags", "asked"), SHARES)
def test_cluster_env_says_which_part_of_a_node_a_job_takes(
    programs, script, settings, flags, asked
):
    """No #SBATCH line says otherwise; sbatch by itself has the lines of the script."""
    stand_in(programs, "sbatch", 'while [[ $1 != *.sh ]]; do shift; done; grep ^#SBATCH "$1"')
    stand_in(programs, "python", "printf '%s\\0' /run 1")
    variables = {"CANON_CPU": "0"} | dict(word.split("=", 1) for word in settings.split())
    words = (ROOT / "slurm/submit.sh", *flags.split(), ROOT / "slurm" / script)
    done = bash(programs, *words, **variables)
    assert done.returncode == 0, done
    (call,) = calls(programs, "sbatch")
    *given, copy = call.split()[1:]
    assert given == [*asked, *flags.split()] and not Path(copy).exists()
    assert "--requeue" in done.stdout and "--nodes=1" in done.stdout
    assert not any(name in done.stdout for name in ("gpus", "exclusive", "mem", "cpus"))


def test_modules_and_a_container_stand_before_each_command(programs):
    """cluster.env's, on the batch host and on all nodes; their words may have spaces."""
    (programs / "cluster.env").write_text(
        'module() { echo "module $*"; }\nMODULES=(cuda/12 gcc)\nCONTAINER=(box --bind "/a b")\n'
        'SRUN_FLAGS=(--container-image="my image")\n'
    )
    for name in ("box", "srun"):
        stand_in(programs, name, f'printf "<%s>" "$@" >>"{programs}/words"')
    for command in ("on_head python -m m", "NODES=1 RANKS=1 HOSTS=(n1); start_ranks 0 m; wait"):
        (programs / "words").unlink(missing_ok=True)
        done = library(programs, f"load_cluster; {command}", SLURM_JOB_ID=7)
        assert done.returncode == 0 and done.stdout == "module load cuda/12 gcc\n", done
        words = (programs / "words").read_text()
        assert "<--container-image=my image>" in words
        assert "<box><--bind></a b><python><-m>" in words
    (programs / "words").unlink()
    library(programs, "load_cluster; on_head python -m m")
    assert (programs / "words").read_text() == "<--bind></a b><python><-m><m>", "no job, no srun"


@pytest.mark.parametrize(
    "name", ["pretrain_1b3", "sweep", "eval", "eval_report", "eval_watch", "data_prep"]
)
def test_help_is_the_header_and_a_script_is_no_job_without_slurm(programs, name):
    script = ROOT / "slurm" / f"{name}.sh"
    shown = bash(programs, script, "--help")
    assert shown.returncode == 0 and f"slurm/{name}.sh" in shown.stdout
    assert "#SBATCH --" not in shown.stdout and "set -euo" not in shown.stdout
    refused = bash(programs, script, ".")
    assert refused.returncode == 2 and refused.stderr.startswith("error: "), refused


def test_what_a_node_compiles_is_in_a_folder_of_the_users_own(programs, tmp_path):
    own = tmp_path / f"canon_pretrain-{os.getuid()}"
    unset = {"TMPDIR": tmp_path, "TORCHINDUCTOR_CACHE_DIR": "", "TRITON_CACHE_DIR": ""}
    show = 'prepare_node; echo "$TORCHINDUCTOR_CACHE_DIR $TRITON_CACHE_DIR"'
    assert library(programs, show, **unset).stdout == f"{own}/inductor {own}/triton\n"
    assert own.stat().st_mode & 0o777 == 0o700
    own.rmdir()
    own.symlink_to("/usr")  # as another user may leave it in /tmp
    folder = Path(library(programs, show, **unset).stdout.split()[0]).parent
    assert folder.parent == tmp_path and folder != own and not folder.is_symlink()
