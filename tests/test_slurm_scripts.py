"""The job scripts with programs that stand in for Slurm's: what a cluster does too seldom to wait.

test_slurm_*.py beside this run them on a real Slurm.
"""

import os
import subprocess
from pathlib import Path

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
    """A program that notes its call, then does `body`."""
    path = folder / name
    path.write_text(f'#!/bin/bash\necho "{name} $*" >>"{folder}/calls"\n{body}\n')
    path.chmod(0o755)


def calls(folder: Path, start: str) -> list[str]:
    lines = (folder / "calls").read_text().splitlines() if (folder / "calls").exists() else []
    return [line for line in lines if line.startswith(start)]


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
        ("slurm_requeue error: Socket timed out on send/recv operation", 3, 0),
        ("Requested operation is presently disabled for job 7", 1, 1),
    ],
)
def test_a_controller_that_restarts_ends_no_chain(
    programs: Path, words: str, tries: int, code: int
) -> None:
    count = f'(($(grep -c . "{programs}/calls") > 2)) || {{ echo "{words}" >&2; exit 1; }}'
    stand_in(programs, "scontrol", count)
    done = bash(
        programs, "-c", f"{LIBRARY} requeue", "bash", ROOT, SLURM_JOB_ID=7, REQUEUE_PAUSE_S=0
    )
    assert done.returncode == code and words in done.stderr
    assert calls(programs, "scontrol") == ["scontrol requeue 7"] * tries


def test_a_job_that_has_not_begun_stops_nobody(programs: Path, tmp_path: Path) -> None:
    """Cancelled in its first seconds, a job must not stop the one that has its run folder."""
    for ours in (0, 1):
        done = bash(
            programs, "-c", f"{LIBRARY} RUN=$1 OURS={ours}; on_term", "bash", ROOT, tmp_path
        )
        assert done.returncode == 0 and (tmp_path / "STOP").exists() == bool(ours)


def test_ranks_get_the_environment_whatever_sbatch_was_told(programs: Path) -> None:
    stand_in(programs, "srun", 'echo "export: ${SLURM_EXPORT_ENV-all}"')
    start = (
        f"{LIBRARY} NODES=1 RANKS=1 HOSTS=(n1) CONTAINER=() SRUN_FLAGS=(); start_ranks 0 m; wait"
    )
    done = bash(programs, "-c", start, "bash", ROOT, SLURM_JOB_ID=7, SLURM_EXPORT_ENV="NONE")
    assert done.stdout == "export: all\n", done


@pytest.mark.parametrize(
    ("once", "finished", "ends"), [(0, 0, True), (0, 1, False), (1, 0, True), (1, 1, False)]
)
def test_a_watch_ends_when_nothing_is_left_though_some_failed(
    programs: Path, tmp_path: Path, once: int, finished: int, ends: bool
) -> None:
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


def test_a_queue_that_cannot_be_read_is_no_empty_one(programs: Path, tmp_path: Path) -> None:
    stand_in(programs, "squeue", "exit 1")
    stand_in(programs, "sbatch")
    done = bash(programs, ROOT / "slurm/sweep.sh", "submit", tmp_path)
    assert done.returncode == 2 and "squeue failed" in done.stderr, done
    assert not calls(programs, "sbatch")


def test_a_finish_that_sbatch_refuses_is_an_error(programs: Path, tmp_path: Path) -> None:
    stand_in(programs, "squeue")
    stand_in(programs, "sbatch", "case $* in *canon-data-finish*) exit 1 ;; esac; echo 5")
    stand_in(programs, "python", f"printf '%s\\0' 1,2 '{tmp_path}/data' '{tmp_path}/data'")
    done = bash(programs, ROOT / "slurm/data_prep.sh", "submit", "--shards", 2, "--", "--out", "x")
    assert done.returncode == 1 and "finish and verify" not in done.stdout, done
    assert len(calls(programs, "sbatch")) == 2


@pytest.mark.parametrize(
    ("flags", "ranks"),
    [
        (("--gpus-per-node", "4"), 4),
        (("--gpus-per-node=h100:4",), 4),
        ((), 8),
    ],
)
def test_the_check_knows_the_gpus_that_sbatch_is_asked_for(
    programs: Path, tmp_path: Path, flags: tuple[str, ...], ranks: int
) -> None:
    stand_in(programs, "sbatch")
    stand_in(programs, "python", "printf '%s\\0' /run 1")
    script = ROOT / "slurm/pretrain_1b3.sh"
    done = bash(programs, ROOT / "slurm/submit.sh", *flags, "--nodes=3", script, CANON_CPU=0)
    assert done.returncode == 0, done
    (checked,) = calls(programs, "python")
    assert f"--ranks_per_node {ranks} --nodes 3" in checked


def test_modules_and_a_container_stand_before_each_command(programs: Path) -> None:
    """cluster.env's, on the batch host and on all nodes; their words may have spaces."""
    (programs / "cluster.env").write_text(
        'module() { echo "module $*"; }\nMODULES=(cuda/12 gcc)\nCONTAINER=(box --bind "/a b")\n'
        'SRUN_FLAGS=(--container-image="my image")\n'
    )
    for name in ("box", "srun"):
        stand_in(programs, name, f'printf "<%s>" "$@" >>"{programs}/words"')
    for command in ("on_head python -m m", "NODES=1 RANKS=1 HOSTS=(n1); start_ranks 0 m; wait"):
        (programs / "words").unlink(missing_ok=True)
        start = f"{LIBRARY} load_cluster; {command}"
        done = bash(programs, "-c", start, "bash", ROOT, SLURM_JOB_ID=7)
        assert done.returncode == 0 and done.stdout == "module load cuda/12 gcc\n", done
        words = (programs / "words").read_text()
        assert "<--container-image=my image>" in words
        assert "<box><--bind></a b><python><-m>" in words
    (programs / "words").unlink()
    bash(programs, "-c", f"{LIBRARY} load_cluster; on_head python -m m", "bash", ROOT)
    assert (programs / "words").read_text() == "<--bind></a b><python><-m><m>", "no job, no srun"
