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
    path = folder / name
    path.write_text(f'#!/bin/bash\necho "{name} $*" >>"{folder}/calls"\n{body}\n')
    path.chmod(0o755)


def calls(folder, start):
    lines = (folder / "calls").read_text().splitlines() if (folder / "calls").exists() else []
    return [line for line in lines if line.startswith(start)]


def library(programs, body, *words, **variables):
    return bash(programs, "-c", f"{LIBRARY} {body}", "bash", ROOT, *words, **variables)


def bash(programs, *words, **variables):
    (programs / "cluster.env").touch()  # not the user's own
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "SBATCH_"))}
    environ = kept | {
        "PATH": f"{programs}:{os.environ['PATH']}", "CANON_CPU": "1",
        "CANON_CLUSTER_ENV": str(programs / "cluster.env"),
    }  # fmt: skip
    environ |= {name: str(value) for name, value in variables.items()}
    command = ["bash", *map(str, words)]
    return subprocess.run(command, env=environ, cwd=programs, capture_output=True, text=True)


def test_signal_handlers_contain_no_command_substitution(programs):
    """Bash 5.2 fails to parse the trap of a second signal in one, and exits."""
    handlers = "on_term on_limit ask_to_stop say"
    done = library(programs, f"declare -f {handlers}")
    assert done.stdout.count("\n}") == len(handlers.split()) and "$(" not in done.stdout


@pytest.mark.parametrize(
    ("words", "tries", "code"), [("Unable to contact", 3, 0), ("presently disabled", 1, 1)]
)
def test_requeue_retries_if_the_controller_is_down(programs, words, tries, code):
    count = f'(($(grep -c . "{programs}/calls") > 2)) || {{ echo "{words}" >&2; exit 1; }}'
    stub(programs, "scontrol", count)
    done = library(programs, "requeue", SLURM_JOB_ID=7, REQUEUE_PAUSE_S=0)
    assert done.returncode == code and words in done.stderr
    assert calls(programs, "scontrol") == ["scontrol requeue 7"] * tries


def test_a_job_that_has_not_begun_writes_no_stop_file(programs, tmp_path):
    """Cancelled in its first seconds, it must not stop another job that uses its run folder."""
    for ours in (0, 1):
        done = library(programs, f"RUN=$1 OURS={ours}; on_term", tmp_path)
        assert done.returncode == 0 and (tmp_path / "STOP").exists() == bool(ours)


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
    words = ("--lease", "0123456789abcdef", "run/checkpoint/step-12", "validation")
    done = bash(programs, ROOT / "slurm/eval.sh", *words, SLURM_JOB_ID=7, SLURM_JOB_NODELIST="n1")
    assert done.returncode == 0 and len(calls(programs, "python")) == 1, done


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


@pytest.mark.parametrize(("words", "check"), CHECKS)
def test_what_a_check_refuses_is_not_submitted(programs, words, check):
    for name in ("squeue", "sbatch"):
        stub(programs, name)
    stub(programs, "python", "echo 'error[a.code]: a reason' >&2; exit 2")
    done = bash(programs, slurm_script(words[0]), *words[1:])
    assert done.returncode == 2 and error_codes(done.stderr) == ["a.code"], done
    assert calls(programs, "python") == [f"python {check}"] and not calls(programs, "sbatch")
    assert not (programs / "x.logs").exists()


@pytest.mark.parametrize(
    ("words", "squeue", "code"),
    [
        (("sweep.sh", "submit", "."), "exit 1", "slurm.queue"),
        (("data_prep.sh", "submit", "--shards", 0, "--", "--out", "x"), "", "slurm.value"),
        (("data_prep.sh", "submit", "--", "--out", "x"), "", "slurm.usage"),
        (("submit.sh", slurm_script("eval_report.sh"), "none"), "", "run.not_a_run"),
        (("submit.sh", slurm_script("eval_report.sh"), "--out", "x"), "", "slurm.usage"),
    ],
)
def test_what_a_script_refuses_is_not_submitted(programs, words, squeue, code):
    stub(programs, "squeue", squeue)
    stub(programs, "sbatch")
    done = bash(programs, slurm_script(words[0]), *words[1:])
    assert done.returncode == 2 and error_codes(done.stderr) == [code], done
    assert not calls(programs, "sbatch") and not (programs / "x.logs").exists()


@pytest.mark.parametrize(
    ("flags", "checked"),
    [((), True), (("--dependency=afterok:5",), False), (("-d", "afterok:5"), False)],
)
def test_data_and_checkpoints_of_earlier_jobs_may_be_missing(programs, flags, checked):
    stub(programs, "sbatch")
    stub(programs, "python", "printf '%s\\0' /run 1")
    assert bash(programs, slurm_script(TRAIN[0]), *flags, *TRAIN[1:]).returncode == 0
    _, plan = calls(programs, "python")
    assert "preflight job" in plan and ("--nodes 1 --data -- --config a.toml" in plan) == checked
    (programs / "calls").unlink()
    for words in (EVAL, ("submit.sh", slurm_script("eval_report.sh"), ".")):
        assert bash(programs, slurm_script(words[0]), *flags, *words[1:]).returncode == 0
    assert len(calls(programs, "python")) == checked and len(calls(programs, "sbatch")) == 2


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
    words = (slurm_script("eval_watch.sh"), "RUN", "--suites", "jrt")
    done = bash(programs, slurm_script("submit.sh"), *words)
    assert len(calls(programs, "sbatch")) == submitted == (done.returncode == 0), done


@pytest.mark.parametrize("words", [BUILD, TRAIN, EVAL, ("sweep.sh", "submit", ".")])
def test_without_slurm_nothing_is_checked(programs, words):
    bare = programs / "bare"
    bare.mkdir()
    for name in ("bash", "dirname", "sed", "grep"):
        (bare / name).symlink_to(shutil.which(name))
    done = bash(programs, slurm_script(words[0]), *words[1:], PATH=bare)
    assert done.returncode == 2 and error_codes(done.stderr) == ["slurm.no_slurm"], done


def test_a_finish_job_that_sbatch_refuses_is_an_error(programs, tmp_path):
    stub(programs, "squeue")
    stub(programs, "sbatch", "case $* in *canon-data-finish*) exit 1 ;; esac; echo 5")
    stub(programs, "python", f"printf '%s\\0' 1,2 '{tmp_path}/data' '{tmp_path}/data'")
    done = bash(programs, ROOT / "slurm/data_prep.sh", "submit", "--shards", 2, "--", "--out", "x")
    assert done.returncode == 1 and len(calls(programs, "sbatch")) == 2, done


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


@pytest.mark.parametrize(("script", "settings", "flags", "asked"), SHARES)
def test_settings_determine_the_resources_of_a_job(programs, script, settings, flags, asked):
    """They replace the script's #SBATCH lines."""
    stub(programs, "sbatch", 'while [[ $1 != *.sh ]]; do shift; done; grep ^#SBATCH "$1"')
    stub(programs, "python", "printf '%s\\0' /run 1")
    variables = {"CANON_CPU": "0"} | dict(word.split("=", 1) for word in settings.split())
    words = (ROOT / "slurm/submit.sh", *flags.split(), ROOT / "slurm" / script)
    done = bash(programs, *words, **variables)
    assert done.returncode == 0, done
    (call,) = calls(programs, "sbatch")
    *given, copy = call.split()[1:]
    assert given == [*asked, *flags.split()] and not Path(copy).exists()
    assert "--requeue" in done.stdout and "--nodes=1" in done.stdout
    assert not any(name in done.stdout for name in ("gpus", "exclusive", "mem", "cpus"))


def test_commands_run_with_modules_and_in_a_container(programs):
    """On the batch host and on all nodes; arguments may contain spaces."""
    (programs / "cluster.env").write_text(
        'module() { echo "$*"; }\nMODULES=(cuda/12 gcc)\nCONTAINER=(box --bind "/a b")\n'
        'SRUN_FLAGS=(--container-image="my image")\n'
    )
    for name in ("box", "srun"):
        stub(programs, name, f'printf "<%s>" "$@" >>"{programs}/words"')
    for command in ("on_head python -m m", "NODES=1 RANKS=1 HOSTS=(n1); start_ranks 0 m; wait"):
        (programs / "words").unlink(missing_ok=True)
        done = library(programs, f"load_cluster; {command}", SLURM_JOB_ID=7)
        assert done.returncode == 0 and done.stdout == "load cuda/12 gcc\n", done
        words = (programs / "words").read_text()
        assert "<--container-image=my image>" in words
        assert "<box><--bind></a b><python><-m>" in words
    (programs / "words").unlink()
    library(programs, "load_cluster; on_head python -m m")
    assert (programs / "words").read_text() == "<--bind></a b><python><-m><m>"


@pytest.mark.parametrize(
    "name", ["pretrain_1b3", "sweep", "eval", "eval_report", "eval_watch", "data_prep"]
)
def test_help_and_a_job_script_without_slurm(programs, name):
    script = ROOT / "slurm" / f"{name}.sh"
    shown = bash(programs, script, "--help")
    assert shown.returncode == 0 and f"slurm/{name}.sh" in shown.stdout
    assert "#SBATCH --" not in shown.stdout and "set -euo" not in shown.stdout
    refused = bash(programs, script, ".")
    assert refused.returncode == 2 and len(error_codes(refused.stderr)) == 1, refused


def test_compiler_caches_are_in_a_folder_of_the_user(programs, tmp_path):
    own = tmp_path / f"canon_pretrain-{os.getuid()}"
    unset = {"TMPDIR": tmp_path, "TORCHINDUCTOR_CACHE_DIR": "", "TRITON_CACHE_DIR": ""}
    show = 'prepare_node; echo "$TORCHINDUCTOR_CACHE_DIR $TRITON_CACHE_DIR"'
    assert library(programs, show, **unset).stdout == f"{own}/inductor {own}/triton\n"
    assert own.stat().st_mode & 0o777 == 0o700
    own.rmdir()
    own.symlink_to("/usr")  # as another user may leave it in /tmp
    folder = Path(library(programs, show, **unset).stdout.split()[0]).parent
    assert folder.parent == tmp_path and folder != own and not folder.is_symlink()
