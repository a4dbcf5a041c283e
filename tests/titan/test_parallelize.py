"""Canon's backend; initial weights and gradients on any number of ranks."""

import functools
import importlib
import json
import logging
import math
import os
import subprocess
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torchtitan.distributed import ParallelDims

from canon_pretrain.kernels import fla_mixers
from canon_pretrain.model import canon_check
from canon_pretrain.model.args import ModelArgs
from canon_pretrain.model.init import plain_name
from canon_pretrain.model.transformer import Transformer
from canon_pretrain.run.sections import Loss
from canon_pretrain.titan import parallelize as canon_choice
from canon_pretrain.titan.command_line import parse_job
from canon_pretrain.titan.costs import planned_backend
from canon_pretrain.titan.job_config import CanonJobConfig
from canon_pretrain.titan.parallelize import (
    BackendChoice,
    check_attention,
    choose_canon,
    choose_mixer,
    clip_gradients,
    fsdp_mesh,
    log_expert_loop,
    parallelize,
    shard,
    write_shard,
)
from canon_pretrain.titan.spec import head_loss
from tests.flash_packages import flash_attn_package, flash_impl
from tests.ranks import events, launch
from tests.support import ROOT, debug_run, refused, selected
from tests.variants import SOME_VARIANTS, VARIANTS, random_tokens, variant

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
    monkeypatch.setattr(canon_choice, "DEVICE_TYPES", ("cpu",))
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
        assert (choice.backend, choice.refused) == ("triton", None)
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
    assert (choice.backend, choice.refused) == ("compiled", "a planted fault")
    assert choose_canon(job, CPU, CODE).backend == "triton"

    # a named backend
    for name in ("triton", "fla"):
        checks += ["a planted fault"]
        by_name = gpu_job(data_folder, "--model.canon_backend", name, "--training.seq_len", "32")
        with refused("canon.backend_failed", backend=name, problem="a planted fault"):
            choose_canon(by_name, CPU, CODE)

    # a lost device
    monkeypatch.setattr(canon_choice, "_is_lost", lambda device: True)
    lost = gpu_job(data_folder, "--training.seq_len", "32")
    checks += ["an illegal memory access"]
    with refused("canon.backend_failed", problem="an illegal memory access"):
        choose_canon(lost, CPU, CODE)
    choice = choose_canon(lost, CPU, CODE)
    assert choice.backend == "compiled"
    assert choice.refused.startswith("an illegal")


def test_rank_0_checks_the_recurrences_kernels(alone, data_folder, monkeypatch, caplog):
    problems: list[str | None] = []
    monkeypatch.setattr(fla_mixers, "check_mixer", lambda *arguments: problems.pop())

    def choose(*options):
        return choose_mixer(gpu_job(data_folder, "--model.mixer", "gla", *options), CPU)

    # nothing to check
    assert choose_mixer(gpu_job(data_folder), CPU) is None
    assert choose("--model.mixer_backend", "chunked") == BackendChoice("chunked")
    assert choose("--debug.deterministic") == BackendChoice("chunked")

    # a fault: a named backend is refused
    problems += ["a planted fault"]
    with refused("mixer.unavailable", backend="fla", problem="a planted fault"):
        choose("--model.mixer_backend", "fla")
    assert caplog.records == []

    # a fault: auto falls back, with a warning
    problems += ["a planted fault"]
    assert choose() == BackendChoice(
        "chunked", "auto; fla was refused", refused="a planted fault", slowdown=1.4
    )
    (warning,) = caplog.records
    assert warning.levelname == "WARNING"
    assert "1.8" in warning.getMessage()
    assert "a planted fault" in warning.getMessage()

    # no fault
    problems += [None]
    assert choose() == BackendChoice("fla", "equal to chunked")


def decide_as_on_a_gpu(rank):
    canon_choice.DEVICE_TYPES = ("cpu",)


@pytest.mark.system
def test_a_run_without_fla_says_what_that_costs(data_folder, tmp_path):
    ended = launch(
        *debug_run(data_folder, tmp_path / "run"),
        *("--model.mixer", "gla", "--model.canon_set="),
        *("--run.stop_at", 1),
        ranks=1,
        output=tmp_path / "out",
        before=decide_as_on_a_gpu,
    )
    (fallback,) = events(tmp_path / "run", "mixer_fallback")
    assert (fallback["step"], fallback["refused"], fallback["slowdown"]) == (0, "fla", 1.4)
    assert "pip install" in fallback["reason"]
    assert ended.output.count(fallback["reason"]) == 1


def on_a_gpu(rank, notes):
    """Decide as on a GPU, where rank 0's check fails; before a rank runs."""

    def check(*arguments):
        assert rank == 0  # the other ranks check nothing
        return "a planted fault"

    canon_choice.DEVICE_TYPES = ("cpu",)
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


ROWS = 6
NUM_TOKENS = 24
STEPS = 2
ADAMW: dict[str, Any] = {
    "lr": 0.01,
    "betas": (0.9, 0.98),
    "weight_decay": 0.1,
    # as large as the gradients, so that rounding of tiny ones does not change whole steps
    "eps": 1e-2,
}
MAX_NORM = 0.5


@dataclass
class Steps:
    """Losses, norms, first gradients and weights of steps; of a rank: its rows of them."""

    losses: list[tuple[float, float]] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    first_gradients: dict[str, Tensor] = field(default_factory=dict)
    weights: dict[str, Tensor] = field(default_factory=dict)


def batches(args):
    """Return the global batches, [ROWS, NUM_TOKENS + 1], with several documents per row."""
    return [random_tokens(args, ROWS, NUM_TOKENS + 1, seed=step) for step in range(STEPS)]


def sharded_steps(model, args, loss, rank, world_size, rounds):
    """Take the steps on this rank's rows, in `rounds` micro-batches, as the trainer does."""
    out = Steps()
    function = head_loss(loss)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, **ADAMW, fused=True)
    for batch in batches(args):
        optimizer.zero_grad()

        # gradients and losses of the micro-batches add up
        local_batch = batch.tensor_split(world_size)[rank]
        sums = torch.zeros(2)
        for micro_batch in local_batch.chunk(rounds):
            nats, objective = model(
                micro_batch[:, :-1], labels_BT=micro_batch[:, 1:], loss=function
            )
            both = torch.stack([nats.sum(), objective]) / (ROWS * NUM_TOKENS)
            both[1].backward()
            sums += both.detach()
        out.losses.append((sums[0].item(), sums[1].item()))

        norm = clip_gradients(list(model.parameters()), MAX_NORM)
        out.norms.append(norm.item())
        if not out.first_gradients:
            out.first_gradients = {
                plain_name(name): p.grad.to_local().clone()
                for name, p in model.named_parameters()
                if p.grad is not None
            }
        optimizer.step()

    out.weights = {
        plain_name(name): p.detach().to_local().clone() for name, p in model.named_parameters()
    }
    return out


@functools.cache
def whole_steps(args, loss):
    """Take the same steps in one process, without FSDP2, micro-batches and our loss."""
    out = Steps()
    model = Transformer(args)
    model.init_weights()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, **ADAMW)
    for batch in batches(args):
        optimizer.zero_grad()

        # z: logarithm of the softmax's denominator; nats: cross-entropy
        logits = model(batch[:, :-1])
        z = logits.exp().sum(dim=-1).log()
        nats = z - logits.gather(2, batch[:, 1:, None])[..., 0]
        objective = (nats + loss.z_loss * z**2 + loss.squared_loss * nats**2).mean()
        objective.backward()
        out.losses.append((nats.mean().item(), objective.item()))

        norm = torch.nn.utils.clip_grad_norm_(trained, MAX_NORM)
        out.norms.append(norm.item())
        if not out.first_gradients:
            out.first_gradients = {
                name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None
            }
        optimizer.step()

    out.weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    return out


def assert_equal_steps(parts, whole, shards=None):
    """Check that the ranks' joined parts equal the unsharded steps, to float32's rounding.

    Replicas of `shards` ranks (default: one) see parts of the batch, and hold all of its gradient.
    """
    for step in range(STEPS):
        for k, expected in enumerate(whole.losses[step]):
            total = sum(part.losses[step][k] for part in parts)
            assert abs(total - expected) < 2e-5 * abs(expected), (step, k)
        for part in parts:
            assert abs(part.norms[step] - whole.norms[step]) < 1e-4 * whole.norms[step], step

    replica = parts[:shards]
    gradients = [part.first_gradients for part in replica]
    assert_equal_when_joined(gradients, whole.first_gradients)
    assert_equal_when_joined([part.weights for part in replica], whole.weights)


def assert_equal_when_joined(shards, expected):
    """Check tensors by name, to a 50,000th of the largest entry: float32 sums in another order."""
    assert shards[0].keys() == expected.keys()
    for name, value in expected.items():
        joined = torch.cat([tensors[name] for tensors in shards])
        assert joined.shape == value.shape, name
        max_error = (joined - value).abs().max().item()
        assert max_error <= 2e-5 * value.abs().max().item(), (name, max_error)


WORLD_SIZES = (1, 2, 3, 4)
LAYOUTS = ((2, 2), (4, 1))
"""Replicas and ranks per replica, of 4 ranks."""
UNEVEN = ModelArgs(
    vocab_size=37,
    num_layers=2,
    dim=24,
    num_heads=2,
    ffn_dim=40,
    max_seq_len=24,
    position="partial_rope_a",
    canon_set="ABCD",
    qk_norm="full",
)
"""Has widths that 2, 3 and 4 ranks cannot divide evenly."""
ARGS = [
    UNEVEN,
    replace(UNEVEN, init="lingua", init_seed=5, tie_embeddings=True, canon_trainable=False),
    variant("mamba2 conv mimetic"),
    variant("gdn ABCD gate_rank"),
    VARIANTS["last_attention"],
    VARIANTS["olmo_hybrid"],
    VARIANTS["relative_in_some"],
]
TIED = replace(
    UNEVEN, init="lingua", tie_embeddings=True, document_mask=True, num_kv_heads=2, position="alibi"
)
Z_LOSS = Loss(z_loss=0.01, chunk_tokens=20)
SELECTIVE: dict[str, Any] = {
    "activation_checkpoint.mode": "selective",
    "activation_checkpoint.selective_ac_option": "op",
}
PLANS: dict[str, dict[str, Any]] = {
    "plain": {},
    "never": {"parallelism.fsdp_reshard_after_forward": "never"},
    "always": {"parallelism.fsdp_reshard_after_forward": "always"},
    "full": {"activation_checkpoint.mode": "full"},
    "selective": SELECTIVE,
    "compiled": SELECTIVE | {"compile.enable": True, "compile.backend": "aot_eager"},
}
# one chunk, several, and whole logits; each variant takes one in turn
LOSSES = [Loss(), Z_LOSS, Loss(squared_loss=0.01, chunk_tokens=16), Loss(chunk_tokens=0)]
PLANNED = variant("h_alibi ABCD tied cst documents")
SHARDED = [
    pytest.param(name, marks=pytest.mark.system if name in SOME_VARIANTS else pytest.mark.long)
    for name in VARIANTS
]


def loss_of(variant_name):
    return LOSSES[list(VARIANTS).index(variant_name) % len(LOSSES)]


def _planned(plan):
    """Return the model that a plan trains: with torch.compile, Canon's weights are trained too."""
    return replace(PLANNED, canon_trainable=plan == "compiled")


def _job(keys):
    """Return a job in float32 with these dotted keys."""
    job = CanonJobConfig()
    job.training.mixed_precision_param = "float32"
    for key, value in keys.items():
        section, name = key.split(".")
        setattr(getattr(job, section), name, value)
    return job


def _on_rank(rank, folder, variants):
    """Initialize and train over the first n of 4 gloo ranks; each rank saves its part."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # use the CPU on machines with GPUs too
    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=4)

    for world_size in WORLD_SIZES:
        mesh = DeviceMesh("cpu", torch.arange(world_size), mesh_dim_names=("fsdp",))
        if rank < world_size:
            _save_initial_weights(rank, world_size, mesh, folder)
        if rank < world_size <= 3:
            _save_tied_steps(rank, world_size, mesh, folder)
    for replicas, shards in LAYOUTS:
        _save_replicas(rank, replicas, shards, folder)

    if rank < 2:
        mesh = DeviceMesh("cpu", torch.arange(2), mesh_dim_names=("fsdp",))
        _save_plans(rank, mesh, folder)
        _save_variants(rank, mesh, folder, variants)
    dist.destroy_process_group()


def _on_meta(args):
    with torch.device("meta"):
        return Transformer(args)


def _fill(model):
    """Give the sharded model memory, and its initial weights."""
    model.to_empty(device="cpu")
    model.init_weights(write=write_shard)


def _sharded(args, mesh):
    """Return a model over the mesh, with its initial weights."""
    model = _on_meta(args)
    shard(model, mesh)
    _fill(model)
    return model


def _save_initial_weights(rank, world_size, mesh, folder):
    for k, args in enumerate(ARGS):
        model = _sharded(args, mesh)
        whole = {name: p.full_tensor().detach() for name, p in model.named_parameters()}
        local_sizes = {name: p.to_local().numel() for name, p in model.named_parameters()}
        buffers = dict(model.named_buffers())
        if rank == 0:
            torch.save((whole, local_sizes, buffers), folder / f"{world_size}-{k}.pt")


def _save_tied_steps(rank, world_size, mesh, folder):
    rounds = 2 if world_size < 3 else 1
    model = _sharded(TIED, mesh)
    steps = sharded_steps(model, TIED, Z_LOSS, rank, world_size, rounds)
    torch.save(steps, folder / f"tied-{world_size}-{rank}.pt")


def _save_replicas(rank, replicas, shards, folder):
    """Save initial weights, steps, and the norm of gradients of which one replica's is NaN."""
    mesh = fsdp_mesh(ParallelDims(replicas, shards, 1, 1, 1, 1, 1, world_size=4))
    model = _sharded(TIED, mesh)
    initial = {name: p.detach().to_local().clone() for name, p in model.named_parameters()}
    steps = sharded_steps(model, TIED, Z_LOSS, rank, 4, rounds=1)

    # a fault of one GPU
    if rank == 3:
        first_gradient = next(p.grad for p in model.parameters())
        first_gradient.to_local().view(-1)[0] = torch.nan
    norm = clip_gradients(list(model.parameters()), 1.0).item()
    torch.save((initial, steps, norm), folder / f"hsdp-{replicas}-{rank}.pt")


def _save_plans(rank, mesh, folder):
    steps = {}
    for name, keys in PLANS.items():
        dims = ParallelDims(1, 2, 1, 1, 1, 1, 1, world_size=2)
        dims._meshes = {"fsdp": mesh}  # of two ranks in a world of four
        model = _on_meta(_planned(name))
        parallelize(model, dims, _job(keys))
        _fill(model)
        steps[name] = sharded_steps(model, _planned(name), Loss(), rank, 2, rounds=1)
    torch.save(steps, folder / f"plans-{rank}.pt")


def _save_variants(rank, mesh, folder, variants):
    steps = {}
    for name in variants:
        model = _sharded(VARIANTS[name], mesh)
        steps[name] = sharded_steps(model, VARIANTS[name], loss_of(name), rank, 2, rounds=1)
    torch.save(steps, folder / f"variants-{rank}.pt")


@pytest.fixture(scope="module")
def results(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    variants = selected(request, "name")
    mp.start_processes(_on_rank, (folder, variants), nprocs=4, start_method="forkserver")
    return folder


@pytest.mark.system
@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("k", range(len(ARGS)))
def test_initial_weights_are_the_same_at_every_world_size(results, world_size, k):
    whole, local_sizes, buffers = torch.load(results / f"{world_size}-{k}.pt")
    alone = Transformer(ARGS[k])
    alone.init_weights()

    expected = dict(alone.named_parameters())
    assert whole.keys() == expected.keys()
    for name, parameter in expected.items():
        assert torch.equal(whole[name], parameter), name
        if world_size > 1:  # it was sharded at all
            assert local_sizes[name] < parameter.numel()
    for name, buffer in alone.named_buffers():
        assert torch.equal(buffers[name], buffer), name


@pytest.mark.system
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_tied_embedding_gets_both_of_its_gradients(results, world_size):
    whole = whole_steps(TIED, Z_LOSS)
    assert_equal_steps(parts_of(results, f"tied-{world_size}", world_size), whole)

    # neither the gradient as an input nor that as an output would be enough
    untied = whole_steps(replace(TIED, tie_embeddings=False), Z_LOSS)
    tied = whole.first_gradients["tok_embeddings.weight"]
    for name in ("tok_embeddings.weight", "output.weight"):
        assert not torch.allclose(tied, untied.first_gradients[name], rtol=0.1, atol=1e-3)


@pytest.mark.system
@pytest.mark.parametrize(("replicas", "shards"), LAYOUTS)
def test_replicas_take_the_steps_of_one_process(results, replicas, shards):
    """Rank r holds shard r % shards of its replica."""
    parts = parts_of(results, f"hsdp-{replicas}", 4)

    # the first replica begins with the weights of one process
    alone = Transformer(TIED)
    alone.init_weights()
    for name, value in alone.named_parameters():
        joined = torch.cat([initial[name] for initial, *_ in parts[:shards]])
        assert torch.equal(joined, value), name

    # the others are bitwise equal to the first
    for rank, (initial, steps, norm_with_nan) in enumerate(parts):
        first_initial, first, _ = parts[rank % shards]
        assert steps.norms == first.norms
        for name, value in steps.weights.items():
            assert torch.equal(initial[name], first_initial[name]), (rank, name)
            assert torch.equal(value, first.weights[name]), (rank, name)
        assert math.isnan(norm_with_nan)

    assert_equal_steps([steps for _, steps, _ in parts], whole_steps(TIED, Z_LOSS), shards)


def parts_of(results, name, count):
    """Return what `count` ranks saved as `name`-RANK.pt."""
    paths = [results / f"{name}-{rank}.pt" for rank in range(count)]
    return [torch.load(path, weights_only=False) for path in paths]


@pytest.mark.system
@pytest.mark.parametrize("plan", PLANS)
def test_plans_to_save_memory_change_no_number(results, plan):
    parts = [part[plan] for part in parts_of(results, "plans", 2)]
    assert_equal_steps(parts, whole_steps(_planned(plan), Loss()))


@pytest.mark.parametrize("name", SHARDED)
def test_a_sharded_variant_takes_the_unsharded_steps(results, name):
    whole = whole_steps(VARIANTS[name], loss_of(name))
    parts = [part[name] for part in parts_of(results, "variants", 2)]
    assert_equal_steps(parts, whole)
    assert whole.losses[0] != whole.losses[1]


def check_attention_of(variant_words, backend, device, dtype="bfloat16"):
    """Check whether the variant can be trained with an attention backend."""
    job = CanonJobConfig()
    job.model.attention_backend = backend
    job.training.mixed_precision_param = dtype  # type: ignore[assignment]
    with torch.device("meta"):
        model = Transformer(variant(variant_words), attention_backend=backend)
    check_attention(model, job, device)


@pytest.mark.parametrize("masked", ["alibi", "h_alibi", "relative", "rope documents"])
def test_flex_is_refused_for_masks_on_a_cpu(masked):
    with refused("attention.unsupported", selected="flex"):
        check_attention_of(masked, "flex", "cpu")
    check_attention_of(masked, "flex", "cuda")
    check_attention_of(masked, "auto", "cpu")
    check_attention_of("rope", "flex", "cpu")  # SDPA takes what has no mask


@pytest.mark.parametrize(
    ("backend", "package"), [("flash_attn", flash_attn_package), ("fa3", lambda: flash_impl("fa3"))]
)
def test_flash_attention_is_refused_on_cpus_and_in_float32(backend, package):
    with package():
        check_attention_of("rope", backend, "cuda")
        with refused("attention.unsupported", selected=backend):
            check_attention_of("rope", backend, "cpu")
        with refused("attention.unsupported", selected=backend):
            check_attention_of("rope", backend, "cuda", dtype="float32")


@pytest.mark.parametrize(
    ("dim", "dtype", "device", "named"),
    [
        (16, "bfloat16", "cuda", None),
        (20, "bfloat16", "cuda", "20"),
        (16, "float32", "cuda", "float32"),
        (20, "float32", "cpu", None),
    ],
)
def test_a_loop_over_experts_is_explained(caplog, dim, dtype, device, named):
    args = replace(variant("rope moe"), dim=dim, num_heads=2, num_kv_heads=2, ffn_dim=24)
    job = CanonJobConfig()
    job.training.mixed_precision_param = dtype
    with torch.device("meta"):
        model = Transformer(args)

    with caplog.at_level(logging.INFO, logger="root"):
        log_expert_loop(model, job, device)

    warned = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert len(warned) == (named is not None)
    assert all(named in message for message in warned)
