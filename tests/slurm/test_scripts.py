"""The job scripts with stubs of Slurm's commands; the other files use a real Slurm."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support import ROOT, error_codes

LIBRARY = 'set -euo pipefail; CANON_REPO=$1; shift; source "$CANON_REPO/slurm/lib.sh"; '


@pytest.fixture
def programs(tmp_path):
    """A folder that is first on PATH; its `calls` has a line per call of a stub."""
    folder = tmp_path / "programs"
    folder.mkdir()
    return folder


def stub(folder, name, body=""):
    """Write a program that logs its call, then runs `body` in bash."""
    path = folder / name
    path.write_text(f'#!/bin/bash\necho "{name} $*" >>"{folder}/calls"\n{body}\n')
    path.chmod(0o755)


def calls(folder, start):
    """Return the calls of stubs that start with this text."""
    path = folder / "calls"
    lines = path.read_text().splitlines() if path.exists() else []
    return [line for line in lines if line.startswith(start)]


def library(programs, body, *arguments, **variables):
    """Run `body` with the functions of slurm/lib.sh."""
    return bash(programs, "-c", f"{LIBRARY} {body}", "bash", ROOT, *arguments, **variables)


def bash(programs, *arguments, **variables):
    """Run bash with the stubs first on PATH and an empty cluster.env, which is not the user's."""
    settings = programs / "cluster.env"
    settings.touch()
    environ = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("SLURM_", "SBATCH_"))
    }
    environ |= {
        "PATH": f"{programs}:{os.environ['PATH']}",
        "CANON_CPU": "1",
        "CANON_CLUSTER_ENV": str(settings),
    }
    environ |= {name: str(value) for name, value in variables.items()}
    command = ["bash", *map(str, arguments)]
    return subprocess.run(command, env=environ, cwd=programs, capture_output=True, text=True)


def test_signal_handlers_contain_no_command_substitution(programs):
    """Bash 5.2 fails to parse the trap of a second signal in one, and exits."""
    handlers = ("on_term", "on_limit", "ask_to_stop", "say")
    done = library(programs, f"declare -f {' '.join(handlers)}")
    assert done.stdout.count("\n}") == len(handlers)
    assert "$(" not in done.stdout


@pytest.mark.parametrize(
    ("answer", "tries", "code"), [("Unable to contact", 3, 0), ("presently disabled", 1, 1)]
)
def test_requeue_retries_if_the_controller_is_down(programs, answer, tries, code):
    is_third_call = f'(($(grep -c . "{programs}/calls") > 2))'
    stub(programs, "scontrol", f'{is_third_call} || {{ echo "{answer}" >&2; exit 1; }}')
    done = library(programs, "requeue", SLURM_JOB_ID=7, REQUEUE_PAUSE_S=0)
    assert done.returncode == code
    assert answer in done.stderr
    assert calls(programs, "scontrol") == ["scontrol requeue 7"] * tries


@pytest.mark.parametrize("is_ours", [False, True])
def test_a_job_that_has_not_begun_writes_no_stop_file(programs, tmp_path, is_ours):
    """Cancelled in its first seconds, it must not stop another job that uses its run folder."""
    done = library(programs, f"RUN=$1 OURS={int(is_ours)}; on_term", tmp_path)
    assert done.returncode == 0
    assert (tmp_path / "STOP").exists() == is_ours


@pytest.mark.parametrize(
    ("once", "finished", "ends"), [(0, 0, True), (0, 1, False), (1, 0, True), (1, 1, False)]
)
def test_a_watch_ends_when_all_is_finished(programs, tmp_path, once, finished, ends):
    """`eval submit --once` exits with 1 for its own failure, and for failed evaluations."""
    body = f"case $* in *--once) exit {once} ;; *--is_finished) exit {finished} ;; esac"
    stub(programs, "python", body)
    stub(programs, "squeue", "echo 12")
    stub(programs, "scancel")
    run = tmp_path / "run"
    run.mkdir()
    done = bash(programs, ROOT / "slurm/eval_watch.sh", run, SLURM_JOB_ID=11)
    assert done.returncode == 0, done
    assert calls(programs, "scancel") == (["scancel 12"] if ends else [])


def test_an_evaluation_that_another_job_does_is_skipped(programs):
    """`eval.schedule begin` exits with 3 if another job has the lease."""
    stub(programs, "python", 'case $* in *" begin "*) exit 3 ;; *) exit 1 ;; esac')
    done = bash(
        programs,
        slurm_script("eval.sh"),
        *("--lease", "0123456789abcdef"),
        *("run/checkpoint/step-12", "validation"),
        SLURM_JOB_ID=7,
        SLURM_JOB_NODELIST="n1",
    )
    assert done.returncode == 0, done
    assert len(calls(programs, "python")) == 1


def slurm_script(name):
    return ROOT / "slurm" / name


TRAIN = ("submit.sh", slurm_script("pretrain_1b3.sh"), "a.toml", "--made.up", 1)
EVAL = ("submit.sh", slurm_script("eval.sh"), "RUN/checkpoint/step-1", "jrt", "--limit", 9)
BUILD = ("data_prep.sh", "submit", "--shards", 2, "--", "--out", "x")
CHECKS = [
    (TRAIN, "-m canon_pretrain.cluster.chain code --job none -- --config a.toml --made.up 1"),
    (EVAL, "-m eval.schedule check RUN/checkpoint/step-1 jrt --limit 9"),
    (("submit.sh", slurm_script("eval_watch.sh"), "RUN"), "-m eval submit RUN --is_finished"),
    (
        ("submit.sh", slurm_script("sweep.sh"), "SWEEP"),
        "-m canon_pretrain sweep todo SWEEP",
    ),
    (("sweep.sh", "submit", "."), "-m canon_pretrain sweep todo . --besides "),
    (BUILD, "-m data_prep build --unbuilt-of 2 --out x"),
]
"""Scripts with arguments, and the program that checks them, which here refuses all."""


@pytest.mark.parametrize(("command", "check"), CHECKS)
def test_what_a_check_refuses_is_not_submitted(programs, command, check):
    script, *arguments = command
    stub(programs, "squeue")
    stub(programs, "sbatch")
    stub(programs, "python", "echo 'error[a.code]: a reason' >&2; exit 2")

    done = bash(programs, slurm_script(script), *arguments)

    assert done.returncode == 2, done
    assert error_codes(done.stderr) == ["a.code"]
    assert calls(programs, "python") == [f"python {check}"]
    assert not calls(programs, "sbatch")
    assert not (programs / "x.logs").exists()


@pytest.mark.parametrize(
    ("command", "squeue", "code"),
    [
        (("sweep.sh", "submit", "."), "exit 1", "slurm.queue"),
        (("data_prep.sh", "submit", "--shards", 0, "--", "--out", "x"), "", "slurm.value"),
        (("data_prep.sh", "submit", "--", "--out", "x"), "", "slurm.usage"),
        (("submit.sh", slurm_script("eval_report.sh"), "none"), "", "run.not_a_run"),
        (("submit.sh", slurm_script("eval_report.sh"), "--out", "x"), "", "slurm.usage"),
    ],
)
def test_what_a_script_refuses_is_not_submitted(programs, command, squeue, code):
    script, *arguments = command
    stub(programs, "squeue", squeue)
    stub(programs, "sbatch")

    done = bash(programs, slurm_script(script), *arguments)

    assert done.returncode == 2, done
    assert error_codes(done.stderr) == [code]
    assert not calls(programs, "sbatch")
    assert not (programs / "x.logs").exists()


@pytest.mark.parametrize(
    ("flags", "is_checked"),
    [((), True), (("--dependency=afterok:5",), False), (("-d", "afterok:5"), False)],
)
def test_data_and_checkpoints_of_earlier_jobs_may_be_missing(programs, flags, is_checked):
    stub(programs, "sbatch")
    stub(programs, "python", "printf '%s\\0' /run 1")

    def submit(script, *arguments):
        assert bash(programs, slurm_script(script), *flags, *arguments).returncode == 0

    # data
    submit(*TRAIN)
    _, plan = calls(programs, "python")
    assert "preflight job" in plan
    assert ("--nodes 1 --data -- --config a.toml" in plan) == is_checked

    # checkpoints, of which a report needs none
    (programs / "calls").unlink()
    submit(*EVAL)
    submit("submit.sh", slurm_script("eval_report.sh"), ".")
    assert len(calls(programs, "python")) == (1 if is_checked else 0)
    assert len(calls(programs, "sbatch")) == 2


@pytest.mark.parametrize(
    ("answer", "code", "submitted"),
    [
        ("", 1, 1),  # not finished
        ("error[run.not_a_run]: RUN has no config.json", 2, 1),  # not yet
        ("error[eval.unknown_suite]: no such suite", 2, 0),
    ],
)
def test_a_watch_may_be_submitted_before_its_runs(programs, answer, code, submitted):
    stub(programs, "sbatch")
    stub(programs, "python", f"echo '{answer}' >&2; exit {code}")
    done = bash(
        programs,
        *(slurm_script("submit.sh"), slurm_script("eval_watch.sh")),
        *("RUN", "--suites", "jrt"),
    )
    assert len(calls(programs, "sbatch")) == submitted, done
    assert (done.returncode == 0) == bool(submitted)


@pytest.mark.parametrize("command", [BUILD, TRAIN, EVAL, ("sweep.sh", "submit", ".")])
def test_without_slurm_nothing_is_checked(programs, command):
    script, *arguments = command
    bare = programs / "bare"
    bare.mkdir()
    for name in ("bash", "dirname", "sed", "grep"):
        (bare / name).symlink_to(shutil.which(name))

    done = bash(programs, slurm_script(script), *arguments, PATH=bare)

    assert done.returncode == 2, done
    assert error_codes(done.stderr) == ["slurm.no_slurm"]


def test_a_finish_job_that_sbatch_refuses_is_an_error(programs, tmp_path):
    stub(programs, "squeue")
    stub(programs, "sbatch", "case $* in *canon-data-finish*) exit 1 ;; esac; echo 5")
    stub(programs, "python", f"printf '%s\\0' 1,2 '{tmp_path}/data' '{tmp_path}/data'")
    script, *arguments = BUILD

    done = bash(programs, slurm_script(script), *arguments)

    assert done.returncode == 1, done
    assert len(calls(programs, "sbatch")) == 2


WHOLE = ["--exclusive", "--mem=0"]
SHARED = "GPUS_PER_NODE=2 SHARED_NODES=1 CPUS_PER_GPU=6 MEM_PER_GPU=50G"
SHARES = [
    ("sweep.sh", "GPUS_PER_NODE=4 GPU_FLAG=--gres=gpu:h100:", "", ["--gres=gpu:h100:4", *WHOLE]),
    ("pretrain_1b3.sh", "CANON_CPU=1", "", WHOLE),
    ("sweep.sh", SHARED, "", ["--gpus-per-node=2", "--cpus-per-task=12", "--mem=100G"]),
    ("pretrain_1b3.sh", "SBATCH_GRES=gpu:4", "--exclusive=user --mem-per-cpu=4G", []),
    ("eval.sh", "EVAL_GPUS=2 CPUS_PER_GPU=4", "", ["--gpus-per-node=2", "--cpus-per-task=8"]),
    ("eval.sh", "", "--gpus-per-node=8 -c 64", []),
]
"""Script, settings, sbatch's flags, and the flags that submit.sh adds."""


@pytest.mark.parametrize(("script", "settings", "flags", "added_flags"), SHARES)
def test_settings_determine_the_resources_of_a_job(programs, script, settings, flags, added_flags):
    """They replace the script's #SBATCH lines."""
    stub(programs, "sbatch", 'while [[ $1 != *.sh ]]; do shift; done; grep ^#SBATCH "$1"')
    stub(programs, "python", "printf '%s\\0' /run 1")
    defaults = {"CANON_CPU": "0"}
    variables = defaults | dict(setting.split("=", 1) for setting in settings.split())

    done = bash(
        programs, slurm_script("submit.sh"), *flags.split(), slurm_script(script), **variables
    )

    assert done.returncode == 0, done
    (call,) = calls(programs, "sbatch")
    _, *sbatch_flags, copy_of_script = call.split()
    assert sbatch_flags == [*added_flags, *flags.split()]
    assert not Path(copy_of_script).exists()

    # the lines of the copy, which sbatch reads
    assert "--requeue" in done.stdout
    assert "--nodes=1" in done.stdout
    assert not any(name in done.stdout for name in ("gpus", "exclusive", "mem", "cpus"))


def test_commands_run_with_modules_and_in_a_container(programs):
    """On the batch host and on all nodes; arguments may contain spaces."""
    (programs / "cluster.env").write_text(
        'module() { echo "$*"; }\nMODULES=(cuda/12 gcc)\nCONTAINER=(box --bind "/a b")\n'
        'SRUN_FLAGS=(--container-image="my image")\n'
    )
    log = programs / "arguments"
    for name in ("box", "srun"):
        stub(programs, name, f'printf "<%s>" "$@" >>"{log}"')

    # in a job: by srun
    for command in ("on_head python -m m", "NODES=1 RANKS=1 HOSTS=(n1); start_ranks 0 m; wait"):
        log.unlink(missing_ok=True)
        done = library(programs, f"load_cluster; {command}", SLURM_JOB_ID=7)
        assert done.returncode == 0, done
        assert done.stdout == "load cuda/12 gcc\n"
        assert "<--container-image=my image>" in log.read_text()
        assert "<box><--bind></a b><python><-m>" in log.read_text()

    # without one: in the container alone
    log.unlink()
    library(programs, "load_cluster; on_head python -m m")
    assert log.read_text() == "<--bind></a b><python><-m><m>"


@pytest.mark.parametrize(
    "name", ["pretrain_1b3", "sweep", "eval", "eval_report", "eval_watch", "data_prep"]
)
def test_help_and_a_job_script_without_slurm(programs, name):
    script = slurm_script(f"{name}.sh")

    shown = bash(programs, script, "--help")
    assert shown.returncode == 0
    assert f"slurm/{name}.sh" in shown.stdout
    assert "#SBATCH --" not in shown.stdout
    assert "set -euo" not in shown.stdout

    refused = bash(programs, script, ".")
    assert refused.returncode == 2, refused
    assert len(error_codes(refused.stderr)) == 1


def test_compiler_caches_are_in_a_folder_of_the_user(programs, tmp_path):
    def cache_folders():
        """Return the folders of Inductor and Triton that prepare_node sets."""
        done = library(
            programs,
            'prepare_node; echo "$TORCHINDUCTOR_CACHE_DIR $TRITON_CACHE_DIR"',
            TMPDIR=tmp_path,
            TORCHINDUCTOR_CACHE_DIR="",
            TRITON_CACHE_DIR="",
        )
        inductor, triton = map(Path, done.stdout.split())
        return inductor, triton

    folder = tmp_path / f"canon_pretrain-{os.getuid()}"
    assert cache_folders() == (folder / "inductor", folder / "triton")
    assert folder.stat().st_mode & 0o777 == 0o700

    # that name is taken, as another user may leave it in /tmp
    folder.rmdir()
    folder.symlink_to("/usr")
    inductor, _ = cache_folders()
    assert inductor.parent.parent == tmp_path
    assert inductor.parent != folder
    assert not inductor.parent.is_symlink()
