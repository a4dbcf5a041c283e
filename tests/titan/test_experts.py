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
CAPACITY = [
    *("--model.moe_capacity", 1),
    *("--model.moe_balance", "loss"),
    *("--model.moe_gated", "true"),
    *("--model.experts_per_token", 2),
]
LAYOUTS = [(2, []), (4, []), (2, EXCHANGED), (4, EXCHANGED), (4, EXCHANGED + REPLICAS)]
"""Ranks, and options."""


@pytest.mark.system
@pytest.mark.parametrize("options", [[], CAPACITY], ids=["dropless", "capacity"])
def test_ranks_and_exchanged_tokens_change_no_number(data_folder, tmp_path, options):
    def train(name, ranks, layout):
        """Take 4 steps; return their log and the layers' weights."""
        run = tmp_path / name
        launch(
            *debug_run(data_folder, run),
            *EXPERTS,
            *options,
            *layout,
            *("--run.stop_at", 4),
            output=tmp_path / f"out-{name}",
            ranks=ranks,
        )
        state = whole_state(run / "checkpoint" / "step-4")
        weights = {name: value for name, value in state.items() if name.startswith("layers.")}
        return events(run, "step"), weights

    steps_alone, weights_alone = train("alone", 1, ["--training.local_batch_size", 12])
    for number, (ranks, layout) in enumerate(LAYOUTS):
        steps, weights = train(str(number), ranks, layout)

        # the log
        for step, expected in zip(steps, steps_alone, strict=True):
            assert abs(step["loss"] - expected["loss"]) < 2e-6
            assert abs(step["grad_norm"] - expected["grad_norm"]) < 2e-6
            assert step["expert_load_max"] == expected["expert_load_max"]
            assert step["expert_dropped"] == expected["expert_dropped"]
            assert any(step["expert_dropped"]) == bool(options)
            assert ("objective" in step) == bool(options)

        # the weights
        assert weights.keys() == weights_alone.keys()
        for name, expected in weights_alone.items():
            torch.testing.assert_close(weights[name], expected, rtol=0, atol=2e-6, msg=name)
            if name.endswith("expert_bias"):
                assert torch.equal(weights[name], expected)
                assert expected.any()


@pytest.mark.system
def test_a_run_with_exchanged_tokens_resumes_bitwise(data_folder, tmp_path):
    whole = tmp_path / "whole"
    resumed = tmp_path / "resumed"
    options = [*EXPERTS, *EXCHANGED]

    launch(*debug_run(data_folder, whole), *options, output=tmp_path / "out-whole")
    command = [*debug_run(data_folder, resumed), *options]
    launch(*command, "--run.stop_at", 5, output=tmp_path / "out-first")
    launch(*command, output=tmp_path / "out-resumed")

    assert_same_run(whole, resumed, step=12)


class ThreeWaits(ExpertExchange):
    """The exchange written plainly: sizes are read where they are used."""

    def _token_dispatch(self, mod, inputs, device_mesh):
        x_SD, count_E = inputs
        group = device_mesh.get_group()
        degree = device_mesh.size()

        # the tokens, by sender
        received_RE = all_to_all_single(count_E, None, None, group).view(degree, -1)
        self.input_splits = count_E.view(degree, -1).sum(dim=1).tolist()
        self.output_splits = received_RE.sum(dim=1).tolist()
        x_SD = all_to_all_single_autograd(x_SD, self.output_splits, self.input_splits, group)

        # the tokens, by expert
        expert_E = torch.arange(received_RE.shape[1]).repeat(degree)
        expert_S = expert_E.repeat_interleave(received_RE.flatten())
        self.permuted_indices = expert_S.argsort(stable=True)
        self.input_shape = (len(x_SD) + 1, x_SD.shape[1])
        return x_SD[self.permuted_indices], received_RE.sum(dim=0)


class Sizes(TorchDispatchMode):
    """Records the `output_size` of each repeat_interleave, which waits for data without one."""

    def __init__(self):
        super().__init__()
        self.output_sizes = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.repeat_interleave.Tensor:
            self.output_sizes.append((kwargs or {}).get("output_size"))
        return func(*args, **kwargs or {})


def exchange(rank, folder):
    """Compute each case by both exchanges; save tensors, reads and sizes of this rank."""
    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
    mesh = DeviceMesh("cpu", [0, 1], mesh_dim_names=("ep",))
    args = replace(flavor("debug"), ffn="moe", num_experts=4, ffn_dim=24, moe_gated=True)

    # shapes of the tensors that the host reads
    reads = []
    original_tolist = torch.Tensor.tolist

    def tolist(tensor):
        reads.append(tensor.shape)
        return original_tolist(tensor)

    torch.Tensor.tolist = tolist

    for case, counts in enumerate(COUNTS):
        results = []
        for style in (ExpertExchange(), ThreeWaits()):
            # equal experts for both exchanges, equal inputs of this rank
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
            waits = [shape for shape in reads if shape != (2,)]
            (y_SD * torch.randn_like(y_SD)).sum().backward()

            grads = [weight.grad.to_local() for weight in experts.parameters()]
            tensors = [y_SD.detach() + 0, x_SD.grad, *grads]
            results.append((tensors, waits, sizes.output_sizes))
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
            results, plain_results = torch.load(tmp_path / f"{case}-{rank}.pt")
            tensors, reads, output_sizes = results
            plain_tensors, _, plain_output_sizes = plain_results

            # outputs, and the gradients of inputs and three weights
            assert len(tensors) == len(plain_tensors) == 5
            for tensor, expected in zip(tensors, plain_tensors, strict=True):
                assert torch.equal(tensor, expected)

            # input and output splits of both ranks, in one read
            assert reads == [torch.Size([2, 2])]

            # the number of tokens for this rank's two experts needs no other one
            num_received = sum(sum(row[2 * rank : 2 * rank + 2]) for row in counts)
            assert output_sizes == [num_received]
            assert plain_output_sizes == [None]


def test_the_logged_load_of_each_layer():
    load_LE = torch.tensor([[4.0, 0.0, 4.0, 0.0], [3.0, 3.0, 0.0, 3.0]])
    fields = expert_statistics(load_LE)
    assert fields["expert_load_max"] == [1.5, 1.5]
    assert fields["expert_dropped"] == [0.0, 0.5]
    assert expert_statistics(torch.zeros(0, 1)) == {}


def test_degrees_that_fit_no_experts_or_ranks_are_refused(data_folder, tmp_path):
    dense = [*map(str, debug_run(data_folder, tmp_path))]
    with_experts = [*dense, *map(str, EXPERTS)]

    # 4 experts by 3, and none by 2
    key = "parallelism.expert_parallel_degree"
    with refused("config.conflict", key=key):
        parse_job([*with_experts, f"--{key}", "3"])
    with refused("config.conflict", key=key):
        parse_job([*dense, f"--{key}", "2"])

    with refused("config.unsupported", key="parallelism.expert_parallel_comm_backend"):
        parse_job([*with_experts, "--parallelism.expert_parallel_comm_backend", "deepep"])

    # 2 replicas of 2 ranks
    job = parse_job([*with_experts, *map(str, [*EXCHANGED, *REPLICAS])])
    assert shard_degree(job, 4) == 2
    with refused("config.world_size", given=6, valid=[4, 12]):
        shard_degree(job, 6)
