"""Who computes a run's Canon layers: the start-up check, its cache, and what all ranks do then."""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from canon_pretrain.core.errors import UserError
from canon_pretrain.model import canon_check
from canon_pretrain.model.args import ModelArgs
from canon_pretrain.titan import parallelize as canon_choice
from canon_pretrain.titan.command_line import parse_job
from canon_pretrain.titan.parallelize import CanonChoice, choose_canon
from tests.ranks import events, launch
from tests.support import ROOT, debug_run

CPU = torch.device("cpu")
CODE = {"kernels/triton/rows.py": "1", "model/canon.py": "2", "titan/trainer.py": "3"}


FOUND = {
    "none": None,
    "wrong tap": "D + activation: output 0 is",
    "wrong tap in the gradient": "norm + A: gradient of input 0 is",
    "no halo": "norm + A: output 1 is",
    "first tokens": "D + activation: output 0 is",
    "document border": "B + heads: gradient of canon_b.weight is",
    "no gradient": "norm + C: there is no gradient of canon.weight",
    "not a number": "norm + A: output 1 is nan",
    "does not compile": "B + rotation: InterpreterError: AttributeError",
}


def test_faults_in_the_kernels_source_are_found_and_named():
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONWARNINGS": "default"}
    command = [sys.executable, "-m", "tests.canon_check_faults"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    results = {name: problem for name, (problem, _) in json.loads(done.stdout).items()}
    assert results.keys() == FOUND.keys()
    assert results.pop("none") is None
    for name, problem in results.items():
        assert (problem or "").startswith(FOUND[name] or "?"), (name, problem)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "options",
    [
        {"canon_set": "ABCD", "position": "nope"},
        {"canon_set": "ABCD", "norm": "layernorm", "qk_norm": "full", "document_mask": True},
        {"canon_set": "BD", "ffn": "standard", "canon_activation": True, "canon_kernel": 2},
        {"canon_set": "C", "canon_trainable": False, "canon_residual": False},
    ],
)
def test_a_right_backend_passes_and_leaves_the_random_state(options, dtype):
    args = ModelArgs(dim=24, num_heads=2, num_kv_heads=1, ffn_dim=40, max_seq_len=50, **options)
    before = torch.get_rng_state()
    assert canon_check.training_problem(args, "compiled", (3, 50), dtype, CPU) is None
    assert torch.equal(torch.get_rng_state(), before)


def test_what_kernels_would_leave_to_compiled_is_no_pass(monkeypatch):
    monkeypatch.setattr(canon_check, "backend_problem", lambda *where: None)
    args = ModelArgs(dim=8, num_heads=2, canon_set="A", canon_kernel=5, document_mask=True)
    for backend, key in (("triton", "canon_kernel = 5"), ("fla", "document_mask")):
        problem = canon_check.training_problem(args, backend, (1, 8), torch.float32, CPU)
        assert key in (problem or "")


@pytest.fixture
def alone(tmp_path, monkeypatch):
    """A process group of one rank; `auto` decides on this CPU as on a GPU; a cache of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(canon_choice, "DEVICE_TYPES", ("cpu",))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield tmp_path / "cache"
    dist.destroy_process_group()


@pytest.fixture
def checks(monkeypatch):
    """What each check finds, last first; it ends with the list empty."""
    found: list[str | None] = []
    monkeypatch.setattr(canon_check, "training_problem", lambda *what: found.pop())
    return found


def _job(data_folder: Path, *words: str):
    return parse_job([*map(str, debug_run(data_folder, Path("run"))), *words])


def test_without_a_gpu_nothing_is_checked(data_folder, checks):
    assert choose_canon(_job(data_folder), CPU, CODE) == CanonChoice("compiled", "auto")
    named = _job(data_folder, "--model.canon_backend", "reference")
    assert choose_canon(named, torch.device("cuda"), CODE) == CanonChoice("reference")
    none = _job(data_folder, "--model.canon_set", "")
    assert choose_canon(none, torch.device("cuda"), CODE) is None


def test_a_pass_is_kept_until_something_that_it_depends_on_changes(
    alone, checks, data_folder, monkeypatch
):
    def choose(*words: str, code: dict[str, str] = CODE) -> str:
        choice = choose_canon(_job(data_folder, *words), CPU, code)
        assert choice is not None and choice.refused is None
        return choice.backend

    checks += [None]
    assert choose() == "triton"
    assert choose() == "triton" and choose(code=CODE | {"titan/trainer.py": "4"}) == "triton"
    assert checks == []
    (kept,) = alone.rglob("*.json")
    for damage in (b"", b"{", b"[]", b'{"problem": 3}', b"\xff"):
        kept.write_bytes(damage)
        checks += [None]
        assert choose() == "triton" and checks == []
    for words, code in (
        (("--training.local_batch_size", "2"), CODE),
        (("--training.seq_len", "32"), CODE),
        (("--training.mixed_precision_param", "bfloat16"), CODE),
        (("--model.canon_set", "AC"), CODE),
        ((), CODE | {"kernels/triton/rows.py": "4"}),
    ):
        checks += [None]
        assert choose(*words, code=code) == "triton" and checks == []
    monkeypatch.setattr(torch, "__version__", "9.9")
    checks += [None]
    assert choose() == "triton" and checks == []


def test_a_failure_is_not_kept(alone, checks, data_folder):
    checks += [None, "a planted fault"]
    choice = choose_canon(_job(data_folder), CPU, CODE)
    assert (choice.backend, choice.refused) == ("compiled", "a planted fault")
    assert choose_canon(_job(data_folder), CPU, CODE).backend == "triton"


def test_a_lost_device_ends_the_launch_and_the_next_one_takes_compiled(
    alone, checks, data_folder, monkeypatch
):
    monkeypatch.setattr(canon_choice, "_is_lost", lambda device: True)
    checks += ["an illegal memory access"]
    with pytest.raises(UserError, match="illegal memory access"):
        choose_canon(_job(data_folder), CPU, CODE)
    choice = choose_canon(_job(data_folder), CPU, CODE)
    assert choice.backend == "compiled" and "illegal memory access" in choice.refused


@pytest.mark.parametrize("name", ["triton", "fla"])
def test_a_named_backend_that_fails_is_refused(alone, checks, data_folder, name):
    checks += ["a planted fault"]
    with pytest.raises(UserError, match=f'canon_backend = "{name}".*a planted fault'):
        choose_canon(_job(data_folder, "--model.canon_backend", name), CPU, CODE)


def on_a_gpu(rank: int, problem: str | None, notes: Path) -> None:
    """Before a rank runs: it decides as on a GPU, where rank 0's check finds `problem`."""

    def check(*what: object) -> str | None:
        assert rank == 0, "the other ranks check nothing"
        return problem

    canon_choice.DEVICE_TYPES = ("cpu",)
    canon_check.training_problem = check
    decide = canon_choice.choose_canon
    trainer = importlib.import_module("canon_pretrain.titan.trainer")
    transformer = importlib.import_module("canon_pretrain.model.transformer")

    def choose(*what):
        choice = decide(*what)
        (notes / f"{rank}.txt").write_text(choice.backend)
        return choice

    trainer.choose_canon = choose
    transformer.check_canon_backend = lambda backend: None  # on this CPU compiled stands in


def test_all_ranks_take_what_rank_0_found_and_the_log_says_so(data_folder, tmp_path):
    run = tmp_path / "run"
    options = {"output": tmp_path / "output", "environment": {"XDG_CACHE_HOME": str(tmp_path)}}

    def start(problem: str | None, *more: object) -> tuple[str, list[str]]:
        ended = launch(
            *debug_run(data_folder, run), *more,
            before=on_a_gpu, before_args=(problem, tmp_path), **options,
        )  # fmt: skip
        return ended.output, [(tmp_path / f"{rank}.txt").read_text() for rank in (0, 1)]

    output, taken = start(None, "--run.stop_at", 2)
    assert taken == ["triton", "triton"] and "Canon by triton" in output
    assert [event["canon_backend"] for event in events(run, "start")] == ["triton"]
    assert events(run, "canon_fallback") == [] and len(list(tmp_path.rglob("canon_check/*"))) == 1
    for kept in tmp_path.rglob("canon_check/*"):
        kept.unlink()
    output, taken = start("a planted fault", "--run.stop_at", 4)
    assert taken == ["compiled", "compiled"] and output.count("a planted fault") == 1
    (fallback,) = events(run, "canon_fallback")
    assert (fallback["step"], fallback["reason"]) == (2, "a planted fault")
    assert events(run, "changed")[0]["config"] == {"canon_backend": ["triton", "compiled"]}
    (resume,) = events(run, "resume")
    assert resume["canon_backend"] == "compiled"
    record = json.loads((run / "launches" / "002" / "launch.json").read_text())
    assert record["canon_backend"] == "compiled"
    assert json.loads((run / "config.json").read_text())["config"]["model"]["canon_backend"] == (
        "auto"
    )
