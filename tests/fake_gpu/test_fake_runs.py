"""The trainer on fake H100s: what runs, what it costs, and planted faults that must be found."""

import pytest

from canon_pretrain.fake_gpu.check import problems_of
from canon_pretrain.titan.command_line import parse_job
from canon_pretrain.titan.dry_run import count_memory, on_meta
from tests.fake_gpu_server import FakeRuns
from tests.support import ROOT

CONFIGS = ROOT / "train_configs"
LAYERS = ("--model.num_layers", "2")
EXPERTS = ("--model.ffn", "moe", "--model.canon_set", "ABC")
CASES = {
    "nope_canon": ("nope_canon", 8, ()),
    "documents": ("nope_canon", 8, ("--model.document_mask", "true", "--model.eos_id", "2")),
    "gla": ("gla_canon", 8, ()),
    "mamba2": ("mamba2_canon", 8, ()),
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


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    server = FakeRuns(tmp_path_factory.mktemp("fake_runs"))
    yield server
    server.close()


def words_of(case):
    name, world_size, words = CASES[case]
    arguments = ("--config", CONFIGS / f"{name}.toml", *LAYERS, *words)
    return list(map(str, arguments)), world_size


@pytest.mark.parametrize("case", CASES)
def test_a_config_runs_and_needs_what_the_dry_run_says(case, runs):
    arguments, world_size = words_of(case)
    report = runs.run(*arguments, world_size=world_size)
    assert problems_of(report) == []
    quiet = report.phase("quiet step")
    assert not quiet.graphs and not quiet.recompiles and not quiet.graph_breaks
    waits = quiet.waits.total()
    if case == "experts":
        assert waits == 2, "one for each layer's sizes"
    else:
        assert waits == 0, quiet.waits
    # nothing grows from step to step
    assert report.phase("logged step").end_bytes == quiet.end_bytes

    job = parse_job(arguments, quiet=True)
    planned = sum(count_memory(job, on_meta(job.model_args), world_size).values())
    steps = [phase.peak_bytes for phase in report.phases if "step" in phase.name]
    assert planned == pytest.approx(max(steps), rel=0.15 if case in ("experts", "mamba2") else 0.05)
