"""The backends of Canon and of recurrences: checks on rank 0, choices, records and events."""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from canon_pretrain.kernels import recurrence_check
from canon_pretrain.model import canon_check
from canon_pretrain.model.args import ModelArgs
from canon_pretrain.titan import backend_choice
from canon_pretrain.titan.backend_choice import BackendChoice, Refusal, choose_canon, choose_mixer
from canon_pretrain.titan.command_line import parse_job
from canon_pretrain.titan.costs import planned_backend
from tests.ranks import events, launch
from tests.support import ROOT, debug_run, refused

CPU = torch.device("cpu")
CODE = {"kernels/triton/rows.py": "1", "model/canon.py": "2", "titan/trainer.py": "3"}
"""Hashes of source files."""

WHERE_FOUND = {
    "none": None,
    "wrong tap": "D + activation",
    "wrong tap in the gradient": "norm + A",
    "no halo": "norm + A",
    "first tokens": "D + activation",
    "document border": "B + heads",
    "no gradient": "norm + C",
    "not a number": "norm + A",
    "does not compile": "B + rotation",
}
"""Planted fault -> where the check finds it."""


@pytest.mark.system
def test_faults_in_the_kernels_source_are_found_and_named():
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONWARNINGS": "default"}
    command = [sys.executable, "-m", "tests.canon_check_faults"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]

    problems = json.loads(done.stdout)
    assert problems.keys() == WHERE_FOUND.keys()
    for name, where in WHERE_FOUND.items():
        problem = problems[name]
        if where is None:
            assert problem is None, name
        else:
            assert problem is not None, name
            assert problem.startswith(where), name


RECURRENT = {"position": "nope", "num_kv_heads": 0}


@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        (torch.float32, {"canon_set": "ABCD", "norm": "layernorm", "document_mask": True}),
        (torch.bfloat16, {"canon_set": "ABCD", "qk_norm": "full"}),
        (torch.float32, {"canon_set": "BD", "ffn": "standard", "canon_activation": True}),
        (torch.bfloat16, {"canon_set": "C", "canon_trainable": False, "canon_residual": False}),
        (torch.float32, {"canon_set": "ABCD", "mixer": "gla", **RECURRENT}),
        (torch.float32, {"canon_set": "ABCD", "mixer": "gated_deltanet", **RECURRENT}),
        (torch.float32, {"canon_set": "AB", "mixer": "mamba2", "ffn": "none", **RECURRENT}),
    ],
)
def test_a_right_backend_passes_and_keeps_the_random_state(dtype, options):
    sizes = {"dim": 24, "num_heads": 2, "num_kv_heads": 1, "ffn_dim": 40, "max_seq_len": 50}
    args = ModelArgs(**sizes | options)
    before = torch.get_rng_state()
    assert canon_check.training_problem(args, "compiled", (3, 50), dtype, CPU) is None
    assert torch.equal(torch.get_rng_state(), before)


def test_a_backend_that_would_fall_back_does_not_pass(monkeypatch):
    monkeypatch.setattr(canon_check, "backend_problem", lambda *where: None)
    args = ModelArgs(dim=8, num_heads=2, canon_set="A", canon_kernel=5, document_mask=True)
    for backend, key in (("triton", "canon_kernel = 5"), ("fla", "document_mask")):
        problem = canon_check.training_problem(args, backend, (1, 8), torch.float32, CPU)
        assert problem is not None
        assert key in problem


@pytest.fixture
def alone(tmp_path, monkeypatch):
    """A process group of one rank, with `auto` deciding as on a GPU, and an empty cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(backend_choice, "DEVICE_TYPES", ("cpu",))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield tmp_path / "cache"
    dist.destroy_process_group()


@pytest.fixture
def checks(monkeypatch):
    """Results of the next checks, last first."""
    problems: list[str | None] = []
    monkeypatch.setattr(canon_check, "training_problem", lambda *arguments: problems.pop())
    return problems


def gpu_job(data_folder, *options):
    """Parse the debug run's command line with these options."""
    return parse_job([*map(str, debug_run(data_folder, Path("run"))), *options])


def test_without_a_gpu_nothing_is_checked(data_folder, checks):
    cuda = torch.device("cuda")
    auto = gpu_job(data_folder)
    by_name = gpu_job(data_folder, "--model.canon_backend", "reference")
    without_canon = gpu_job(data_folder, "--model.canon_set", "")

    assert choose_canon(auto, CPU, CODE) == BackendChoice("compiled", "auto")
    assert choose_canon(by_name, cuda, CODE) == BackendChoice("reference")
    assert choose_canon(without_canon, cuda, CODE) is None


def test_auto_compiles_where_that_costs_less(data_folder, checks):
    """Nothing is checked: there is no other backend to fall back to."""
    cuda = torch.device("cuda")
    job = gpu_job(data_folder, "--model.canon_set", "FKOV", "--model.qk_norm", "full")
    assert choose_canon(job, cuda, CODE) == BackendChoice("compiled", "auto")
    assert planned_backend(job) == "compiled"

    by_name = gpu_job(
        data_folder,
        *("--model.canon_set", "K", "--model.qk_norm", "full", "--model.canon_backend", "triton"),
    )
    assert planned_backend(by_name) == "triton"
    for options in (("FKOV", "none"), ("FOV", "full"), ("ABCD", "full")):
        canon_set, qk_norm = options
        other = gpu_job(data_folder, "--model.canon_set", canon_set, "--model.qk_norm", qk_norm)
        assert planned_backend(other) == "triton"
    without = gpu_job(data_folder, "--model.canon_set", "")
    assert planned_backend(without) == "compiled"

    # before A and C there is no norm that our kernels could compute with them
    for canon_set, backend in (("A", "compiled"), ("ABCD", "compiled"), ("BD", "triton")):
        options = ("--model.norm_place", "output", "--model.canon_set", canon_set)
        assert planned_backend(gpu_job(data_folder, *options)) == backend


def test_a_pass_is_kept_until_what_it_depends_on_changes(alone, checks, data_folder, monkeypatch):
    def is_checked(*options, code=CODE):
        checks[:] = [None]
        choice = choose_canon(gpu_job(data_folder, *options), CPU, code)
        assert choice is not None
        assert (choice.backend, choice.refused) == ("triton", ())
        return not checks

    # once, also if the trainer's code changes
    assert is_checked()
    assert not is_checked()
    assert not is_checked(code=CODE | {"titan/trainer.py": "4"})

    # again: a result that cannot be read, other kernels, shapes, a dtype, torch
    (result_file,) = alone.rglob("*.json")
    result_file.write_bytes(b'{"problem": 3}')
    assert is_checked()
    assert is_checked(code=CODE | {"kernels/triton/rows.py": "4"})
    assert is_checked("--training.local_batch_size", "2")
    assert is_checked("--training.seq_len", "32")
    assert is_checked("--training.mixed_precision_param", "bfloat16")
    assert is_checked("--model.canon_set", "AC")
    monkeypatch.setattr(torch, "__version__", "9.9")
    assert is_checked()


def test_a_failure_is_not_kept(alone, checks, data_folder, monkeypatch):
    """A named backend that fails is refused; after a lost device, the next launch compiles."""
    job = gpu_job(data_folder)
    checks += [None, "a planted fault"]
    choice = choose_canon(job, CPU, CODE)
    assert choice.backend == "compiled"
    assert choice.refused == (Refusal("triton", "a planted fault"),)
    assert choose_canon(job, CPU, CODE).backend == "triton"

    # a named backend
    for name in ("triton", "fla"):
        checks += ["a planted fault"]
        by_name = gpu_job(data_folder, "--model.canon_backend", name, "--training.seq_len", "32")
        with refused("canon.backend_failed", backend=name, problem="a planted fault"):
            choose_canon(by_name, CPU, CODE)

    # a lost device
    monkeypatch.setattr(backend_choice, "_is_lost", lambda device: True)
    lost = gpu_job(data_folder, "--training.seq_len", "32")
    checks += ["an illegal memory access"]
    with refused("canon.backend_failed", problem="an illegal memory access"):
        choose_canon(lost, CPU, CODE)
    choice = choose_canon(lost, CPU, CODE)
    assert choice.backend == "compiled"
    assert choice.refused[0].problem.startswith("an illegal")


@pytest.fixture
def mixer_problems(monkeypatch):
    """What the checks of recurrences find, by backend; none may be checked that is missing."""
    problems: dict[str, str | None] = {}
    monkeypatch.setattr(recurrence_check, "check_mixer", lambda backend, *rest: problems[backend])
    return problems


def chosen(data_folder, *options):
    """Return the choice for a model of GLA layers."""
    return choose_mixer(gpu_job(data_folder, "--model.mixer", "gla", *options), CPU, CODE)


def test_no_recurrence_or_a_named_form_needs_no_check(alone, data_folder, mixer_problems):
    assert choose_mixer(gpu_job(data_folder), CPU, CODE) is None
    assert chosen(data_folder, "--model.mixer_backend", "chunked") == BackendChoice("chunked")


def test_auto_takes_the_first_kernels_that_pass(alone, data_folder, mixer_problems, caplog):
    # triton: fla is not even checked
    mixer_problems["triton"] = None
    choice = chosen(data_folder)
    assert choice.backend == "triton"
    assert choice.reason.startswith("auto; equal to float64")
    assert not choice.refused
    assert chosen(data_folder).reason.startswith("auto; checked before")
    assert caplog.records == []

    # triton fails: fla, except where sums must not depend on the process
    mixer_problems |= {"triton": "a planted fault", "fla": None}
    by_fla = chosen(data_folder, "--training.mixed_precision_param", "bfloat16")
    assert by_fla.backend == "fla"
    (refusal,) = by_fla.refused
    assert (refusal.backend, refusal.problem) == ("triton", "a planted fault")
    (warning,) = caplog.records
    assert warning.levelname == "WARNING"
    assert f"{refusal.slowdown:.3g} times" in warning.getMessage()
    assert "a planted fault" in warning.getMessage()

    deterministic = ("--debug.deterministic", "--training.mixed_precision_param", "bfloat16")
    assert chosen(data_folder, *deterministic).backend == "chunked"


def test_without_kernels_the_chunked_form_and_its_price(alone, data_folder, mixer_problems):
    mixer_problems |= {"triton": "a planted fault", "fla": "not installed"}
    choice = chosen(data_folder)
    assert choice.backend == "chunked"
    assert [refusal.backend for refusal in choice.refused] == ["triton", "fla"]
    assert all(refusal.slowdown > 1 for refusal in choice.refused)


def test_named_kernels_are_never_replaced(alone, data_folder, mixer_problems, monkeypatch):
    mixer_problems |= {"triton": "a planted fault", "fla": "not installed"}
    for backend, problem in mixer_problems.items():
        with refused("mixer.unavailable", backend=backend, problem=problem):
            chosen(data_folder, "--model.mixer_backend", backend)

    # a lost device ends this launch; the next one does not try it again
    monkeypatch.setattr(backend_choice, "_is_lost", lambda device: True)
    with refused("mixer.unavailable", backend="triton"):
        chosen(data_folder)
    monkeypatch.setattr(backend_choice, "_is_lost", lambda device: False)
    mixer_problems["triton"] = None
    next_choice = chosen(data_folder)
    assert next_choice.backend == "chunked"
    assert "recorded in" in next_choice.refused[0].problem


def decide_as_on_a_gpu(rank):
    """Let a launch try kernels on its CPU, where none run; before a rank runs."""
    backend_choice.DEVICE_TYPES = ("cpu",)


@pytest.mark.system
def test_a_run_without_kernels_says_what_that_costs(data_folder, tmp_path):
    run = tmp_path / "run"
    ended = launch(
        *debug_run(data_folder, run),
        *("--model.mixer", "gla", "--model.canon_set="),
        *("--run.stop_at", 1),
        ranks=1,
        output=tmp_path / "out",
        before=decide_as_on_a_gpu,
    )
    by_triton, by_fla = events(run, "mixer_fallback")
    assert (by_triton["step"], by_triton["refused"], by_fla["refused"]) == (0, "triton", "fla")
    assert "TRITON_INTERPRET" in by_triton["reason"]
    assert "pip install" in by_fla["reason"]
    assert by_triton["slowdown"] > 1
    assert ended.output.count(by_fla["reason"]) == 1
    (start,) = events(run, "start")
    assert start["mixer_backend"] == "chunked"


def on_a_gpu(rank, notes):
    """Decide as on a GPU, where rank 0's check fails; before a rank runs."""

    def check(*arguments):
        assert rank == 0  # the other ranks check nothing
        return "a planted fault"

    backend_choice.DEVICE_TYPES = ("cpu",)
    canon_check.training_problem = check
    trainer = importlib.import_module("canon_pretrain.titan.trainer")

    def choose(*arguments):
        choice = choose_canon(*arguments)
        (notes / f"{rank}.txt").write_text(choice.backend)
        return choice

    trainer.choose_canon = choose


@pytest.mark.system
def test_all_ranks_use_rank_0s_choice_and_the_log_has_it(data_folder, tmp_path):
    run = tmp_path / "run"

    def launch_to(step, *options, before=None):
        return launch(
            *debug_run(data_folder, run),
            *("--run.stop_at", step),
            *options,
            output=tmp_path / "output",
            environment={"XDG_CACHE_HOME": str(tmp_path)},
            before=before,
        )

    launch_to(2, "--model.canon_backend", "reference")
    ended = launch_to(4, before=(on_a_gpu, tmp_path))

    # the choice of both ranks
    for rank in (0, 1):
        assert (tmp_path / f"{rank}.txt").read_text() == "compiled"

    # one message, and the log's events
    assert ended.output.count("a planted fault") == 1
    (fallback,) = events(run, "canon_fallback")
    assert (fallback["step"], fallback["reason"]) == (2, "a planted fault")
    change = events(run, "changed")[0]
    assert change["config"]["model.canon_backend"] == ["reference", "auto"]
    first, second = events(run, "start", "resume")
    assert first["canon_backend"] == "reference"
    assert second["canon_backend"] == "compiled"

    # the launch has the choice, the config what was set
    record = json.loads((run / "launches" / "002" / "launch.json").read_text())
    assert record["canon_backend"] == "compiled"
    config = json.loads((run / "config.json").read_text())["config"]
    assert config["model"]["canon_backend"] == "auto"
