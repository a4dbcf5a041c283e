"""Muon against torch.optim.Muon, on one rank and over shards, replicas and ranks with experts.

Lion against its formula, and what both have in common.
"""

import os
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torchtitan.distributed import ParallelDims

from canon_pretrain.kernels.work import Work
from canon_pretrain.model.init import plain_name
from canon_pretrain.model.transformer import Transformer
from canon_pretrain.run.sections import Optimizer, ParameterGroup
from canon_pretrain.titan.checkpoint import full_bytes
from canon_pretrain.titan.command_line import parse_job
from canon_pretrain.titan.dry_run import Plan, count_memory, reference
from canon_pretrain.titan.job_config import CanonJobConfig
from canon_pretrain.titan.muon import (
    assign_owners,
    orthogonalize,
    orthogonalize_flops,
    rows_by_rank,
    update_costs,
)
from canon_pretrain.titan.optimizers import Optimizers, parameter_groups
from canon_pretrain.titan.parallelize import parallelize, write_shard
from canon_pretrain.titan.step_time import StepCounts, add_muon
from tests.ranks import assert_refused, assert_same_run, launch
from tests.support import debug_run, refused, write_data
from tests.variants import BASE

# rows that 2 and 4 ranks cannot divide evenly, and fewer rows than ranks
ARGS = replace(BASE, dim=36, num_heads=6, num_kv_heads=3, ffn_dim=34, num_layers=2, canon_set="ABC")
ARGS = replace(ARGS, ffn="moe", num_experts=4, experts_per_token=2, num_shared_experts=1)
NUM_MATRICES = 2 * 9
"""Parameters that Muon updates, of two layers."""
CONFIG = Optimizer(name="muon", lr=0.01, muon_lr=0.02, weight_decay=0.1)
LION = replace(CONFIG, name="lion", beta1=0.9, beta2=0.99)
STEPS = 4
SKIPPED_STEP = 2
"""Whose gradients are NaN."""
LAYOUTS = {"2": (1, 2, 1), "4": (1, 4, 1), "2 x 2": (2, 2, 1), "experts": (1, 4, 2)}
"""Replicas, shards, ranks with different experts"""


def gradient(name, shape, step):
    """Return the whole gradient of a parameter at a step."""
    generator = torch.Generator().manual_seed(sum(name.encode()) + 1000 * step)
    return torch.randn(shape, generator=generator)


def new_model():
    torch.manual_seed(0)
    model = Transformer(ARGS)
    model.init_weights()
    return model


def reference_steps(config, steps):
    """Return the weights after torch's optimizers took these steps, each expert a parameter."""
    weights = {name: p.detach().clone() for name, p in new_model().named_parameters()}
    muon, adamw = [], []
    for name, weight in weights.items():
        if ".experts." in name:
            muon += [(name, k, nn.Parameter(one)) for k, one in enumerate(weight)]
        elif name.startswith("layers.") and weight.ndim == 2:
            muon.append((name, None, nn.Parameter(weight)))
        else:
            adamw.append((name, None, nn.Parameter(weight)))
    optimizers = [
        torch.optim.Muon(
            [parameter for _, _, parameter in muon],
            lr=config.muon_lr,
            weight_decay=config.weight_decay,
            momentum=config.muon_momentum,
            ns_steps=config.muon_ns_steps,
            adjust_lr_fn=config.muon_adjust_lr,
        ),
        torch.optim.AdamW(
            [parameter for _, _, parameter in adamw],
            lr=config.lr,
            betas=(config.beta1, config.beta2),
            eps=config.eps,
            weight_decay=config.weight_decay,
        ),
    ]
    for step in steps:
        for name, expert, parameter in (*muon, *adamw):
            grad = gradient(name, weights[name].shape, step)
            parameter.grad = grad if expert is None else grad[expert]
        for optimizer in optimizers:
            optimizer.step()
    return weights


def take_steps(model, config, steps, *, skipped=()):
    """Take these steps with the gradients of all ranks; return the optimizers."""
    optimizers = Optimizers(model, config)
    for step in steps:
        for name, parameter in model.named_parameters():
            grad = gradient(plain_name(name), parameter.shape, step)
            if step in skipped:
                grad.fill_(torch.nan)
            if isinstance(parameter, DTensor):
                grad = distribute_tensor(grad, parameter.device_mesh, parameter.placements)
            parameter.grad = grad
        for optimizer in optimizers:
            optimizer.grad_scale = None
            optimizer.found_inf = torch.tensor(float(step in skipped))
        optimizers.step()
    return optimizers


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def largest_difference(weights, expected):
    assert weights.keys() == expected.keys()
    return max((weights[name] - expected[name]).abs().max().item() for name in expected)


@pytest.mark.parametrize("adjust_lr", ["original", "match_rms_adamw"])
@pytest.mark.parametrize("values", [{}, {"muon_momentum": 0.5, "muon_ns_steps": 3}])
def test_one_rank_equals_torch(adjust_lr, values):
    config = replace(CONFIG, muon_adjust_lr=adjust_lr, **values)
    model = new_model()
    take_steps(model, config, range(STEPS))
    expected = reference_steps(config, range(STEPS))
    weights = {name: p.detach() for name, p in model.named_parameters()}
    assert largest_difference(weights, expected) < 1e-7
    # they have moved
    before = {name: p.detach() for name, p in new_model().named_parameters()}
    assert largest_difference(weights, before) > 1e-2


def test_a_skipped_step_changes_nothing():
    """Gradients that are NaN: weights and momenta are bitwise those without the step."""
    model, other = new_model(), new_model()
    optimizers = take_steps(model, CONFIG, range(STEPS), skipped=[SKIPPED_STEP])
    steps = [step for step in range(STEPS) if step != SKIPPED_STEP]
    other_optimizers = take_steps(other, CONFIG, steps)
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(one, two)
    state, other_state = optimizers.state_dict(), other_optimizers.state_dict()
    momenta = [name for name in state if name.endswith("momentum_buffer")]
    assert len(momenta) == NUM_MATRICES
    assert all(torch.equal(state[name], other_state[name]) for name in momenta)


def lion_steps(config, steps):
    """Return the weights after Algorithm 2 of Chen et al. (2023) took these steps, in float64."""
    weights = {name: p.detach().double() for name, p in new_model().named_parameters()}
    for name, weight in weights.items():
        momentum = torch.zeros_like(weight)
        for step in steps:
            grad = gradient(name, weight.shape, step).double()
            update = torch.sign(config.beta1 * momentum + (1 - config.beta1) * grad)
            weight -= config.lr * (update + config.weight_decay * weight)
            momentum = config.beta2 * momentum + (1 - config.beta2) * grad
    return weights


def test_lion_is_algorithm_2_and_skips_bad_steps():
    model = new_model()
    take_steps(model, LION, range(STEPS), skipped=[SKIPPED_STEP])
    expected = lion_steps(LION, [step for step in range(STEPS) if step != SKIPPED_STEP])
    weights = {name: p.detach().double() for name, p in model.named_parameters()}
    assert largest_difference(weights, expected) < 1e-6


def on_rank(rank, folder):
    """Take the steps in each layout; rank 0 saves the whole weights, and reloaded states."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=4)
    for name, (replicas, shards, experts) in LAYOUTS.items():
        for config in (CONFIG, LION):
            model = parallel_model(replicas, shards, experts, rank)
            if model is not None:
                optimizers = take_steps(model, config, range(STEPS), skipped=[SKIPPED_STEP])
                weights = {plain_name(n): whole(p.detach()) for n, p in model.named_parameters()}
                state = {n: whole(value) for n, value in optimizers.state_dict().items()}
                if rank == 0:
                    torch.save((weights, state), folder / f"{config.name} {name}.pt")
            dist.barrier()

    # A state of 2 x 2 ranks is loaded by four shards.
    saved = take_steps(parallel_model(2, 2, 1, rank), CONFIG, range(STEPS))
    dcp.save({"optimizer": saved.state_dict()}, checkpoint_id=folder / "saved")
    loading = Optimizers(parallel_model(1, 4, 1, rank), CONFIG)
    state = loading.state_dict()
    dcp.load({"optimizer": state}, checkpoint_id=folder / "saved")
    loading.load_state_dict(state)
    before, after = ({n: whole(v) for n, v in o.state_dict().items()} for o in (saved, loading))
    if rank == 0:
        torch.save((before, after), folder / "loaded.pt")
    dist.destroy_process_group()


def parallel_model(replicas, shards, experts, rank):
    """Return the model in a layout; None on a rank that it does not need."""
    world_size = replicas * shards
    job = CanonJobConfig()
    job.training.mixed_precision_param = "float32"
    dims = ParallelDims(replicas, shards, 1, 1, 1, experts, 1, world_size=world_size)
    if world_size < 4:
        mesh = dist.device_mesh.DeviceMesh("cpu", range(shards), mesh_dim_names=("fsdp",))
        dims._meshes = {"fsdp": mesh}
        if rank >= world_size:
            return None
    with torch.device("meta"):
        model = Transformer(ARGS)
    parallelize(model, dims, job)
    model.to_empty(device="cpu")
    model.init_weights(write=write_shard)
    return model


@pytest.fixture(scope="module")
def sharded(tmp_path_factory):
    folder = tmp_path_factory.mktemp("muon")
    mp.start_processes(on_rank, (folder,), nprocs=4, start_method="forkserver")
    return folder


@pytest.mark.system
@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_layout_equals_torch(sharded, layout):
    """Equal gradients have equal updates, of which a NaN on all ranks changes none."""
    weights, state = torch.load(sharded / f"{CONFIG.name} {layout}.pt")
    model = new_model()
    one_rank = take_steps(model, CONFIG, range(STEPS), skipped=[SKIPPED_STEP])
    expected = reference_steps(CONFIG, [s for s in range(STEPS) if s != SKIPPED_STEP])
    assert largest_difference(weights, expected) < 1e-6

    # Muon's are bitwise those of one rank; torch's AdamW rounds by the length of a shard
    parameters = dict(model.named_parameters())
    momenta = {n: v for n, v in one_rank.state_dict().items() if n.endswith("momentum_buffer")}
    assert len(momenta) == NUM_MATRICES
    for name, momentum in momenta.items():
        assert torch.equal(state[name], momentum), name
        of_parameter = name.removeprefix("state.").removesuffix(".momentum_buffer")
        assert torch.equal(weights[of_parameter], parameters[of_parameter]), name


@pytest.mark.system
@pytest.mark.parametrize("layout", LAYOUTS)
def test_lion_in_any_layout_equals_one_rank(sharded, layout):
    """Weights and momenta bitwise, with a NaN on all ranks at one step."""
    weights, state = torch.load(sharded / f"{LION.name} {layout}.pt")
    model = new_model()
    one_rank = take_steps(model, LION, range(STEPS), skipped=[SKIPPED_STEP])
    for name, parameter in model.named_parameters():
        assert torch.equal(weights[name], parameter), name
    momenta = {n: v for n, v in one_rank.state_dict().items() if n.endswith("exp_avg")}
    assert len(momenta) == len(weights)
    for name, momentum in momenta.items():
        assert torch.equal(state[name], momentum), name


@pytest.mark.system
def test_other_ranks_load_the_state(sharded):
    before, after = torch.load(sharded / "loaded.pt")
    assert before.keys() == after.keys()
    assert sum(name.endswith("momentum_buffer") for name in before) == NUM_MATRICES
    for name, value in before.items():
        is_tensor = isinstance(value, torch.Tensor)
        assert torch.equal(value, after[name]) if is_tensor else value == after[name], name


def test_owners_are_balanced_by_cost():
    """As many equal matrices as ranks times three, and one that costs as much as three."""
    small, large = torch.Size([64, 64]), torch.Size([256, 64])
    owners = assign_owners([small] * 12, 4)
    assert sorted(owners) == sorted([0, 1, 2, 3] * 3)

    shapes = [large, *[small] * 13]
    owners = assign_owners(shapes, 2)
    loads = [
        sum(
            orthogonalize_flops(shape, 5)
            for shape, owner in zip(shapes, owners, strict=True)
            if owner == rank
        )
        for rank in range(2)
    ]
    assert max(loads) < 1.05 * min(loads)
    assert owners == assign_owners(shapes, 2)


def test_rows_are_those_of_chunks():
    for num_rows in (1, 5, 8, 36):
        chunks = torch.arange(num_rows).chunk(4)
        sizes = [len(chunk) for chunk in chunks]
        assert rows_by_rank(num_rows, 4) == sizes + [0] * (4 - len(sizes))


def test_flops_are_those_that_torch_counts():
    counter = torch.utils.flop_counter.FlopCounterMode(display=False)
    with counter:
        orthogonalize(torch.randn(24, 40).bfloat16(), 5)
    assert orthogonalize_flops((24, 40), 5) == counter.get_total_flops()
    assert orthogonalize_flops((3, 40, 24), 5) == 3 * counter.get_total_flops()


def test_an_exchange_keeps_at_most_what_is_planned():
    """The busiest of two owners, both messages, and copies in bfloat16."""
    shapes = [torch.Size([64, 64])] * 4
    costs = update_costs(shapes, 2, 5)
    assert costs.flops == 2 * orthogonalize_flops((64, 64), 5)
    assert costs.received_bytes == 2 * 2 * 64 * 64 * 4 / 2 / 2
    assert costs.peak_bytes == 2 * (3 * 2 * 64 * 64 + 3 * 64 * 64)
    assert update_costs(shapes, 1, 5).received_bytes == 0


def test_what_muon_updates():
    with torch.device("meta"):
        model = Transformer(replace(ARGS, smear=True, qk_norm="full"))
    config = replace(CONFIG, groups=[ParameterGroup("norm", lr_scale=0.5)])
    groups = parameter_groups(config, model)
    assert [(g.title, g.optimizer, g.lr) for g in groups] == [
        ("norm", "AdamW", 0.005),
        ("", "AdamW", 0.01),
        ("", "Muon", 0.02),
    ]
    layer = {name for name in groups[2].parameters if name.startswith("layers.0.")}
    attention = {f"attention.w{letter}.weight" for letter in "qkvo"}
    experts = {f"feed_forward.experts.w{k}" for k in (1, 2)}
    shared = {f"feed_forward.shared_experts.w{k}.weight" for k in (1, 2)}
    router = {"feed_forward.router.gate.weight"}
    assert layer == {f"layers.0.{name}" for name in attention | experts | shared | router}
    assert {name.split(".")[1] for name in groups[2].parameters} == {"0", "1"}


@pytest.mark.parametrize("name", ["muon", "lion"])
def test_planned_memory_and_disk_count_one_moment(name):
    """Of Muon's matrices and all that Lion updates, beside the state that the optimizers have."""
    job = parse_job([*map(str, debug_run("data", "run")), "--optimizer.name", name])
    with torch.device("meta"):
        model = Transformer(job.model_args)
    model.to_empty(device="cpu")
    optimizers = Optimizers(model, job.optimizer)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizers.step()
    tensors = [
        v for state in optimizers for values in state.state.values() for v in values.values()
    ]
    state_bytes = sum(tensor.nbytes for tensor in tensors if tensor.ndim)

    assert count_memory(job, model, 1, is_gpu=False)["optimizer (moments)"] == state_bytes
    plan = Plan(job, reference("h100"), 1)
    assert plan.checkpoint_bytes == 4 * plan.parameters + state_bytes
    two_moments = 8 * plan.parameters
    assert two_moments / 2 <= state_bytes < two_moments

    # what a launch makes room for: 1 % and 1 MiB more
    room = full_bytes(model.state_dict(), optimizers.num_moments)
    assert room == int(1.01 * plan.checkpoint_bytes) + (1 << 20)


def test_the_planned_step_is_longer_by_the_iterations():
    shapes = [torch.Size([64, 64])] * 4
    counts = StepCounts(Work(flops=Counter(bfloat16=7)), node_bytes=5)
    with_muon = add_muon(counts, shapes, 2, 5)
    assert with_muon.work.flops["bfloat16"] == 7 + 2 * orthogonalize_flops((64, 64), 5)
    assert with_muon.node_bytes == 5 + update_costs(shapes, 2, 5).received_bytes
    assert counts.work.flops["bfloat16"] == 7


def test_betas_of_muon_are_refused():
    with torch.device("meta"):
        model = Transformer(ARGS)
    config = replace(CONFIG, groups=[ParameterGroup("attention", betas=[0.9, 0.9])])
    with refused("optimizer.muon_betas", key="optimizer.groups[0].betas"):
        parameter_groups(config, model)


@pytest.mark.parametrize(
    ("name", "known"),
    [("muon", "Muon"), ("MUON", "Muon"), ("adamw", "AdamW"), ("adam", "Adam"), ("LION", "Lion")],
)
def test_names_are_of_any_case(name, known):
    assert Optimizer(name=name).name == known


@pytest.mark.system
@pytest.mark.parametrize("name", ["muon", "lion"])
def test_a_run_resumes_bitwise(tmp_path, name):
    """Also in the memory of a bad step; another optimizer's checkpoint is refused."""
    data = tmp_path / "data"
    write_data(data)
    straight, run = tmp_path / "straight", tmp_path / "run"
    options = ("--optimizer.name", name, "--checkpoint.interval", 8)

    def start(folder, *more, **options: Any):
        return launch(*debug_run(data, folder), *more, output=tmp_path / "out", **options)

    start(straight, *options)
    start(run, *options, "--run.stop_at", 5)
    start(run, *options, "--run.stop_at", 8)
    assert_same_run(run, straight, step=8)

    names = ("--run.allow_changes", "optimizer.name")
    assert_refused(start(run, *names, check=False), "checkpoint.other_optimizer")
