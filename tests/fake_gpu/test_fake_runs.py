"""The trainer on fake H100s: what runs, what it costs, and planted faults that must be found."""

import pytest

from canon_pretrain.core.terminal import Console
from canon_pretrain.fake_gpu.check import problems_of, show_fake_run, warnings_of
from canon_pretrain.machine.gpus import GPUS
from canon_pretrain.titan.command_line import parse_job
from canon_pretrain.titan.dry_run import count_memory
from canon_pretrain.titan.spec import on_meta
from canon_pretrain.titan.step_time import count_step, step_seconds
from tests.fake_gpu_server import FakeRuns
from tests.support import ROOT, canon_stage

CONFIGS = ROOT / "train_configs"
LAYERS = ("--model.num_layers", "2")
SHORT = ("--training.seq_len", "512")  # the host unrolls a loop over the chunks
EXPERTS = ("--model.ffn", "moe", "--model.canon_set", "ABC")
CASES = {
    "nope_canon": ("nope_canon", 8, ()),
    "documents": ("nope_canon", 8, ("--model.document_mask", "true", "--model.eos_id", "2")),
    "gla": ("gla_canon", 8, SHORT),
    "gated_deltanet": ("gated_deltanet_canon", 8, SHORT),
    "mamba2": ("mamba2_canon", 8, SHORT),
    "hybrid": ("gated_deltanet_hybrid_canon", 8, SHORT),
    "experts": ("nope_canon", 8, (*EXPERTS, "--parallelism.expert_parallel_degree", "8")),
    "replicas": (
        "nope_canon",
        64,
        (
            *("--parallelism.data_parallel_replicate_degree", "8"),
            *("--training.global_batch_size", "64"),
        ),
    ),
}

TIERS = dict.fromkeys(CASES, pytest.mark.system)
TIERS |= {"nope_canon": (), "experts": ()}
TIERS |= dict.fromkeys(("gated_deltanet", "mamba2", "replicas"), pytest.mark.long)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    server = FakeRuns(tmp_path_factory.mktemp("fake_runs"))
    yield server
    server.close()


def arguments_of(case):
    """Return the trainer's arguments of a case with two layers, and its world size."""
    name, world_size, options = CASES[case]
    arguments = ["--config", str(CONFIGS / f"{name}.toml"), *LAYERS, *options]
    return arguments, world_size


@pytest.mark.parametrize(
    "case",
    [pytest.param(name, marks=TIERS[name]) for name in CASES],
)
def test_a_config_runs_without_waits(case, runs, capsys):
    arguments, world_size = arguments_of(case)
    report = runs.run(*arguments, world_size=world_size)
    assert problems_of(report) == []

    # nothing is compiled in a quiet step, and the host waits for sizes of experts alone
    quiet = report.phase("quiet step")
    assert not quiet.graphs
    assert not quiet.recompiles
    assert not quiet.graph_breaks
    num_layers = 2
    assert quiet.waits.total() == (num_layers if case == "experts" else 0), quiet.waits

    # neither what is traced nor what DTensor propagates counts
    assert report.phase("first step").peak_bytes <= quiet.peak_bytes
    # nothing grows from step to step
    assert report.phase("logged step").end_bytes == quiet.end_bytes

    if case == "nope_canon":  # others at full size: test_recorded.py
        assert_dry_run_agrees(report, arguments, world_size)
        show_fake_run(report, Console())
        printed = " ".join(capsys.readouterr().out.split())
        assert f"a step takes about {1000 * report.step_seconds[1]:,.1f} ms" in printed


def assert_dry_run_agrees(report, arguments, world_size):
    """Check planned memory to 5 %, and planned seconds to 10 %."""
    job = parse_job(arguments, quiet=True)
    planned = sum(count_memory(job, on_meta(job.model_args), world_size).values())
    peaks = [phase.peak_bytes for phase in report.phases if "step" in phase.name]
    assert planned == pytest.approx(max(peaks), rel=0.05)
    seconds = step_seconds(count_step(job, world_size), GPUS["h100"]).likely
    assert report.step_seconds[1] == pytest.approx(seconds, rel=0.1)


PLAYGROUND = (
    "brevo1_n70",
    "brevo2_n30",
    "capo_100k",
    "copy_2l",
    "depo1_n225_k4",
    "depo2_n75_k4",
    "lano_cfg3f",
    "mano_l10",
)
BOARDS = {
    "laptop": ("playground/tiny/depo", ("--model.canon_set", "ABCD")),
    "quickstart": ("playground/tiny/copy", ("--model.position", "nope")),
}


@pytest.mark.long
@pytest.mark.parametrize("name", PLAYGROUND)
def test_each_task_of_the_playground_runs(name, runs):
    report = runs.run("--config", CONFIGS / "playground" / f"{name}.toml", world_size=1)
    assert problems_of(report) == []
    assert not report.phase("quiet step").waits


@pytest.mark.long
@pytest.mark.parametrize("name", BOARDS)
def test_models_of_boards_run(name, runs):
    config, options = BOARDS[name]
    report = runs.run("--config", CONFIGS / f"{config}.toml", *options, world_size=1)
    assert problems_of(report) == []


def faulty(runs, fault, *options, case="nope_canon"):
    """Return the report of a case with a planted fault."""
    arguments, world_size = arguments_of(case)
    return runs.run(*arguments, *options, fault=fault, world_size=world_size, saves=False)


def test_what_the_trainer_refuses_is_said(capsys):
    config = str(CONFIGS / "nope_canon.toml")
    with pytest.raises(SystemExit) as exit_info:
        canon_stage("doctor")(["--fake", "h100", config, *LAYERS, "--training.enable_cpu_offload"])
    assert exit_info.value.code == 1
    assert "training.enable_cpu_offload = True" in " ".join(capsys.readouterr().out.split())


@pytest.mark.system
def test_a_wait_in_the_step_is_found(runs):
    report = faulty(runs, "item_in_the_step")
    assert not report.error
    (wait,) = report.phase("quiet step").waits
    assert "item() at" in wait
    assert "tests/fake_gpu_faults.py:" in wait
    assert wait.endswith(" step")
    assert any(wait in warning for warning in warnings_of(report))


@pytest.mark.system
@pytest.mark.parametrize("fault", ["cpu_scalar_in_a_stack", "cpu_tensor_in_the_model"])
def test_a_tensor_on_the_cpu_ends_the_run_with_its_line(fault, runs):
    report = faulty(runs, fault)
    (problem,) = problems_of(report)
    assert "device" in report.error
    assert "cpu" in report.error
    assert "tests/fake_gpu_faults.py:" in report.error_line
    assert report.error_line in problem
    assert "fake_gpu_faults" in report.traceback


@pytest.mark.system
def test_a_graph_break_ends_a_run(runs):
    report = faulty(runs, "break_in_a_block")
    assert report.error.startswith("Unsupported")
    assert "graph_break" in report.error
    assert problems_of(report)


@pytest.mark.system
def test_a_shape_that_changes_is_compiled_again(runs):
    report = faulty(runs, "growing_batch")
    quiet = report.phase("quiet step")
    assert quiet.graphs
    assert quiet.recompiles
    assert "size" in quiet.recompiles[0]
    assert any(warning.startswith("recompiled, quiet step") for warning in warnings_of(report))


@pytest.mark.system
def test_a_leak_is_seen_from_step_to_step(runs):
    report = faulty(runs, "leak_of_an_activation")
    grown = report.phase("logged step").end_bytes - report.phase("quiet step").end_bytes
    assert grown == report.micro_batch * report.seq_len * 2048 * 2


@pytest.mark.system
def test_experts_on_the_wrong_mesh_are_found(runs):
    report = faulty(runs, "experts_on_the_wrong_mesh", case="experts")
    assert problems_of(report)


@pytest.mark.system
@pytest.mark.parametrize(
    "options",
    [
        ("--activation_checkpoint.mode", "full"),
        ("--activation_checkpoint.mode", "selective"),
        ("--model.position", "alibi"),
        ("--model.position", "relative", "--model.relative_extent", "64"),
        ("--compile.no-enable",),
    ],
)
def test_other_ways_to_train_run(options, runs):
    report = faulty(runs, "", *options, "--training.seq_len", "512")
    assert problems_of(report) == []
    assert not report.phase("quiet step").waits
