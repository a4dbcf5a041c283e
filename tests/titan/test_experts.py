"""Runs with experts: equal at any number of ranks, resumed bitwise, with their load in the log."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed._functional_collectives import (
    all_to_all_single,
    all_to_all_single_autograd,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils._python_dispatch import TorchDispatchMode

from canon_pretrain.model.args import flavor
from canon_pretrain.model.moe import GroupedExperts
from canon_pretrain.titan.command_line import parse_job
from canon_pretrain.titan.job_config import shard_degree
from canon_pretrain.titan.parallelize import ExpertExchange
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
        logged, state = steps(number, ranks, words)

        # the log
        for step, expected in zip(logged, alone, strict=True):
            assert abs(step["loss"] - expected["loss"]) < 2e-6
            assert abs(step["grad_norm"] - expected["grad_norm"]) < 2e-6
            for name in ("expert_load_max", "expert_dropped"):
                assert step[name] == expected[name]
            assert any(step["expert_dropped"]) == bool(options)
            assert ("objective" in step) == bool(options)

        # the weights
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


class ThreeWaits(ExpertExchange):
    """The exchange written plainly: sizes are read where they are used."""

    def _token_dispatch(self, mod, inputs, device_mesh):
        x_SD, count_E = inputs
        group, degree = device_mesh.get_group(), device_mesh.size()
        received_RE = all_to_all_single(count_E, None, None, group).view(degree, -1)
        self.input_splits = count_E.view(degree, -1).sum(dim=1).tolist()
        self.output_splits = received_RE.sum(dim=1).tolist()
        x_SD = all_to_all_single_autograd(x_SD, self.output_splits, self.input_splits, group)
        expert_E = torch.arange(received_RE.shape[1]).repeat(degree)
        expert_S = expert_E.repeat_interleave(received_RE.flatten())
        self.permuted_indices = expert_S.argsort(stable=True)
        self.input_shape = (len(x_SD) + 1, x_SD.shape[1])
        return x_SD[self.permuted_indices], received_RE.sum(dim=0)


class Sizes(TorchDispatchMode):
    """Records the sizes that operators with a shape of data are given."""

    def __init__(self):
        super().__init__()
        self.given = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.repeat_interleave.Tensor:
            self.given.append((kwargs or {}).get("output_size"))
        return func(*args, **kwargs or {})


def exchange(rank, folder):
    """Compute each case by both exchanges; save what this rank found."""
    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
    mesh = DeviceMesh("cpu", [0, 1], mesh_dim_names=("ep",))
    args = replace(flavor("debug"), ffn="moe", num_experts=4, ffn_dim=24, moe_gated=True)

    # shapes of the tensors that the host reads
    reads = []
    tolist = torch.Tensor.tolist
    torch.Tensor.tolist = lambda tensor: reads.append(tensor.shape) or tolist(tensor)

    for case, counts in enumerate(COUNTS):
        results = []
        for style in (ExpertExchange(), ThreeWaits()):
            torch.manual_seed(5)
            experts = GroupedExperts(args)
            for weight in experts.parameters():
                torch.nn.init.normal_(weight, std=0.1)
            parallelize_module(experts, mesh, style)

            count_E = torch.tensor(counts[rank])
            torch.manual_seed(rank)
            x_SD = torch.randn(sum(counts[rank]), args.dim, requires_grad=True)

            reads.clear()
            with Sizes() as sizes:
                y_SD = experts(x_SD, count_E)
            waits = [shape for shape in reads if len(shape) != 1 or shape[0] != 2]
            (y_SD * torch.randn_like(y_SD)).sum().backward()
            grads = [weight.grad.to_local() for weight in experts.parameters()]
            results.append(([y_SD.detach() + 0, x_SD.grad, *grads], waits, sizes.given))
        torch.save(results, folder / f"{case}-{rank}.pt")
    dist.destroy_process_group()


COUNTS = (
    ((3, 0, 5, 1), (2, 2, 2, 2)),
    ((0, 0, 4, 4), (0, 0, 1, 0)),  # the first rank's experts get none
    ((7, 1, 0, 0), (0, 0, 3, 3)),  # no rank sends to the other
)
"""Of each rank, its tokens for each expert."""


@pytest.mark.system
def test_the_exchange_reads_its_sizes_once_and_changes_no_bit(tmp_path):
    mp.start_processes(exchange, (tmp_path,), nprocs=2, start_method="forkserver")
    for case, counts in enumerate(COUNTS):
        for rank in (0, 1):
            (ours, reads, sizes), (plain, _, plain_sizes) = torch.load(
                tmp_path / f"{case}-{rank}.pt"
            )
            assert len(ours) == len(plain) == 5
            for tensor, expected in zip(ours, plain, strict=True):
                assert torch.equal(tensor, expected)
            # input and output splits of both ranks, in one
            assert reads == [torch.Size([2, 2])]
            received = sum(sum(row[2 * rank : 2 * rank + 2]) for row in counts)
            assert sizes == [received] and plain_sizes == [None]


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
