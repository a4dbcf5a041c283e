"""Runs with experts: equal at any number of ranks, resumed bitwise, with their load in the log."""

import pytest
import torch

from canon_pretrain.titan.command_line import parse_job
from canon_pretrain.titan.job_config import shard_degree
from canon_pretrain.titan.trainer import expert_statistics
from tests.ranks import assert_same_run, events, launch, whole_state
from tests.support import debug_run, refused

EXPERTS = ["--model.ffn", "moe", "--model.num_experts", 4, "--model.canon_set", "ABC"]
EXCHANGED = ["--parallelism.expert_parallel_degree", 2]
REPLICAS = ["--parallelism.data_parallel_replicate_degree", 2]
CAPACITY = ["--model.moe_capacity", 1, "--model.moe_balance", "loss", "--model.moe_gated", "true"]
CAPACITY += ["--model.experts_per_token", 2]
LAYOUTS = [(2, []), (4, []), (2, EXCHANGED), (4, EXCHANGED), (4, EXCHANGED + REPLICAS)]


@pytest.mark.system
@pytest.mark.parametrize("options", [[], CAPACITY], ids=["dropless", "capacity"])
def test_ranks_and_exchanged_tokens_change_no_number(data_folder, tmp_path, options):
    def steps(number, ranks, words):
        run = tmp_path / str(number)
        words = [*debug_run(data_folder, run), *EXPERTS, *options, *words]
        launch(*words, "--run.stop_at", 4, output=tmp_path / f"out-{number}", ranks=ranks)
        state = whole_state(run / "checkpoint" / "step-4")
        return events(run, "step"), {n: x for n, x in state.items() if n.startswith("layers.")}

    alone, weights = steps("alone", 1, ["--training.local_batch_size", 12])
    for number, (ranks, words) in enumerate(LAYOUTS):
        found, state = steps(number, ranks, words)
        for step, expected in zip(found, alone, strict=True):
            assert abs(step["loss"] - expected["loss"]) < 2e-6
            assert abs(step["grad_norm"] - expected["grad_norm"]) < 2e-6
            for name in ("expert_load_max", "expert_dropped"):
                assert step[name] == expected[name]
            assert any(step["expert_dropped"]) == bool(options)
            assert ("objective" in step) == bool(options)
        assert state.keys() == weights.keys()
        for name, value in weights.items():
            torch.testing.assert_close(state[name], value, rtol=0, atol=2e-6, msg=name)
            if name.endswith("expert_bias"):
                assert torch.equal(state[name], value) and value.any()


@pytest.mark.system
def test_a_run_with_exchanged_tokens_resumes_bitwise(data_folder, tmp_path):
    runs = [tmp_path / "whole", tmp_path / "resumed"]
    for run in runs:
        words = [*debug_run(data_folder, run), *EXPERTS, *EXCHANGED]
        if run is runs[1]:
            launch(*words, "--run.stop_at", 5, output=tmp_path / "first")
        launch(*words, output=tmp_path / run.name)
    assert_same_run(*runs, step=12)


def test_the_logged_load_of_each_layer():
    load_LE = torch.tensor([[4.0, 0.0, 4.0, 0.0], [3.0, 3.0, 0.0, 3.0]])
    found = expert_statistics(load_LE)
    assert found["expert_load_max"] == [1.5, 1.5]
    assert found["expert_dropped"] == [0.0, 0.5]
    assert expert_statistics(torch.zeros(0, 1)) == {}


def test_degrees_that_fit_no_experts_or_ranks_are_refused(data_folder, tmp_path):
    dense = [*map(str, debug_run(data_folder, tmp_path))]
    words = [*dense, *map(str, EXPERTS)]
    key = "parallelism.expert_parallel_degree"
    for refused_words in ([*words, f"--{key}", "3"], [*dense, f"--{key}", "2"]):
        with refused("config.conflict", key=key):
            parse_job(refused_words)
    with refused("config.unsupported", key="parallelism.expert_parallel_comm_backend"):
        parse_job([*words, "--parallelism.expert_parallel_comm_backend", "deepep"])
    job = parse_job([*words, *map(str, [*EXCHANGED, *REPLICAS])])
    assert shard_degree(job, 4) == 2
    with refused("config.world_size", given=6, valid=[4, 12]):
        shard_degree(job, 6)
