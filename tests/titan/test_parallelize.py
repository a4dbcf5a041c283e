"""Canon's backend; initial weights and gradients on any number of ranks."""

import functools
import importlib
import json
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
from canon_pretrain.titan.job_config import CanonJobConfig
from canon_pretrain.titan.parallelize import (
    BackendChoice,
    check_attention,
    choose_canon,
    choose_mixer,
    clip_gradients,
    fsdp_mesh,
    parallelize,
    shard,
    write_shard,
)
from canon_pretrain.titan.spec import head_loss
from tests.flash_packages import flash_attn_package, flash_impl
from tests.ranks import events, launch
from tests.support import ROOT, debug_run, refused
from tests.variants import VARIANTS, random_tokens, variant

CPU = torch.device("cpu")
CODE = {"kernels/triton/rows.py": "1", "model/canon.py": "2", "titan/trainer.py": "3"}

FOUND = {
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
    results = json.loads(done.stdout)
    assert results.keys() == FOUND.keys()
    assert results.pop("none") is None
    for name, problem in results.items():
        assert (problem or "").startswith(FOUND[name] or "?"), (name, problem)


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
        assert key in (problem or "")


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
    found: list[str | None] = []
    monkeypatch.setattr(canon_check, "training_problem", lambda *what: found.pop())
    return found


def gpu_job(data_folder, *words):
    return parse_job([*map(str, debug_run(data_folder, Path("run"))), *words])


def test_without_a_gpu_nothing_is_checked(data_folder, checks):
    assert choose_canon(gpu_job(data_folder), CPU, CODE) == BackendChoice("compiled", "auto")
    named = gpu_job(data_folder, "--model.canon_backend", "reference")
    assert choose_canon(named, torch.device("cuda"), CODE) == BackendChoice("reference")
    none = gpu_job(data_folder, "--model.canon_set", "")
    assert choose_canon(none, torch.device("cuda"), CODE) is None


def test_a_pass_is_kept_until_what_it_depends_on_changes(alone, checks, data_folder, monkeypatch):
    def is_checked(*words, code=CODE):
        checks[:] = [None]
        choice = choose_canon(gpu_job(data_folder, *words), CPU, code)
        assert choice is not None and (choice.backend, choice.refused) == ("triton", None)
        return not checks

    assert is_checked()
    assert not is_checked() and not is_checked(code=CODE | {"titan/trainer.py": "4"})
    (kept,) = alone.rglob("*.json")
    kept.write_bytes(b'{"problem": 3}')
    assert is_checked() and is_checked(code=CODE | {"kernels/triton/rows.py": "4"})
    for key, value in (
        *(("training.local_batch_size", "2"), ("training.seq_len", "32")),
        *(("training.mixed_precision_param", "bfloat16"), ("model.canon_set", "AC")),
    ):
        assert is_checked(f"--{key}", value)
    monkeypatch.setattr(torch, "__version__", "9.9")
    assert is_checked()


def test_a_failure_is_not_kept(alone, checks, data_folder, monkeypatch):
    """A named backend that fails is refused; after a lost device, the next launch compiles."""
    checks += [None, "a planted fault"]
    choice = choose_canon(gpu_job(data_folder), CPU, CODE)
    assert (choice.backend, choice.refused) == ("compiled", "a planted fault")
    assert choose_canon(gpu_job(data_folder), CPU, CODE).backend == "triton"
    for name in ("triton", "fla"):
        checks += ["a planted fault"]
        named = gpu_job(data_folder, "--model.canon_backend", name, "--training.seq_len", "32")
        with refused("canon.backend_failed", backend=name, problem="a planted fault"):
            choose_canon(named, CPU, CODE)
    monkeypatch.setattr(canon_choice, "_is_lost", lambda device: True)
    lost = gpu_job(data_folder, "--training.seq_len", "32")
    checks += ["an illegal memory access"]
    with refused("canon.backend_failed", problem="an illegal memory access"):
        choose_canon(lost, CPU, CODE)
    choice = choose_canon(lost, CPU, CODE)
    assert choice.backend == "compiled" and choice.refused.startswith("an illegal")


def test_rank_0_checks_the_recurrences_kernels(alone, data_folder, monkeypatch, caplog):
    problems: list[str | None] = []
    monkeypatch.setattr(fla_mixers, "check_mixer", lambda *what: problems.pop())

    def choose(*words):
        return choose_mixer(gpu_job(data_folder, "--model.mixer", "gla", *words), CPU)

    assert choose_mixer(gpu_job(data_folder), CPU) is None
    for words in (("--model.mixer_backend", "chunked"), ("--debug.deterministic",)):
        assert choose(*words) == BackendChoice("chunked")
    problems += [None, "a planted fault", "a planted fault"]
    with refused("mixer.unavailable", backend="fla", problem="a planted fault"):
        choose("--model.mixer_backend", "fla")
    assert caplog.records == []
    refusal = {"refused": "a planted fault", "slowdown": 1.8}
    assert choose() == BackendChoice("chunked", "auto; fla was refused", **refusal)
    (warned,) = caplog.records
    assert warned.levelname == "WARNING"
    assert "1.8" in warned.getMessage() and "a planted fault" in warned.getMessage()
    assert choose() == BackendChoice("fla", "equal to chunked")


def decide_as_on_a_gpu(rank):
    canon_choice.DEVICE_TYPES = ("cpu",)


@pytest.mark.system
def test_a_run_without_fla_says_what_that_costs(data_folder, tmp_path):
    words = [*debug_run(data_folder, tmp_path / "run"), "--model.mixer", "gla"]
    words += ["--model.canon_set=", "--run.stop_at", 1]
    options = {"ranks": 1, "output": tmp_path / "out", "before": decide_as_on_a_gpu}
    ended = launch(*words, **options)
    (fallback,) = events(tmp_path / "run", "mixer_fallback")
    assert (fallback["step"], fallback["refused"], fallback["slowdown"]) == (0, "fla", 1.8)
    assert "pip install" in fallback["reason"] and ended.output.count(fallback["reason"]) == 1


def on_a_gpu(rank, notes):
    """Decide as on a GPU, where rank 0's check fails; before a rank runs."""

    def check(*what):
        assert rank == 0  # the other ranks check nothing
        return "a planted fault"

    canon_choice.DEVICE_TYPES = ("cpu",)
    canon_check.training_problem = check
    trainer = importlib.import_module("canon_pretrain.titan.trainer")

    def choose(*what):
        choice = choose_canon(*what)
        (notes / f"{rank}.txt").write_text(choice.backend)
        return choice

    trainer.choose_canon = choose


@pytest.mark.system
def test_all_ranks_use_rank_0s_choice_and_the_log_has_it(data_folder, tmp_path):
    run = tmp_path / "run"
    options = {"output": tmp_path / "output", "environment": {"XDG_CACHE_HOME": str(tmp_path)}}
    words = debug_run(data_folder, run)
    launch(*words, "--run.stop_at", 2, "--model.canon_backend", "reference", **options)
    ended = launch(*words, "--run.stop_at", 4, before=(on_a_gpu, tmp_path), **options)
    assert [(tmp_path / f"{rank}.txt").read_text() for rank in (0, 1)] == ["compiled"] * 2
    assert ended.output.count("a planted fault") == 1
    (fallback,) = events(run, "canon_fallback")
    assert (fallback["step"], fallback["reason"]) == (2, "a planted fault")
    changed = events(run, "changed")[0]["config"]
    assert changed["model.canon_backend"] == ["reference", "auto"]
    assert [event["canon_backend"] for event in events(run, "start", "resume")] == [
        "reference",
        "compiled",
    ]
    record = json.loads((run / "launches" / "002" / "launch.json").read_text())
    assert record["canon_backend"] == "compiled"
    config = json.loads((run / "config.json").read_text())["config"]
    assert config["model"]["canon_backend"] == "auto"


ROWS, NUM_TOKENS, STEPS = 6, 24, 2
ADAMW: dict[str, Any] = {"lr": 0.01, "betas": (0.9, 0.98), "weight_decay": 0.1}
# eps as large as the gradients, so that rounding of tiny ones does not change whole steps
ADAMW["eps"] = 1e-2
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

        norm = clip_gradients(list(model.parameters()), MAX_NORM)
        if not out.first_gradients:
            out.first_gradients = {
                plain_name(name): p.grad.to_local().clone()
                for name, p in model.named_parameters()
                if p.grad is not None
            }
        optimizer.step()
        out.losses.append((sums[0].item(), sums[1].item()))
        out.norms.append(norm.item())

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

        norm = torch.nn.utils.clip_grad_norm_(trained, MAX_NORM)
        if not out.first_gradients:
            named = model.named_parameters()
            out.first_gradients = {n: p.grad.clone() for n, p in named if p.grad is not None}
        optimizer.step()
        out.losses.append((nats.mean().item(), objective.item()))
        out.norms.append(norm.item())

    out.weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    return out


def assert_equal_steps(parts, whole, shards=None):
    """Check that the ranks' joined parts equal the unsharded steps, to float32's rounding.

    Replicas of `shards` ranks (default: one) see parts of the batch, and hold all of its gradient.
    """
    for step, expected in enumerate(whole.losses):
        for k in range(2):
            total = sum(part.losses[step][k] for part in parts)
            assert abs(total - expected[k]) < 2e-5 * abs(expected[k]), (step, k)
        for part in parts:
            assert abs(part.norms[step] - whole.norms[step]) < 1e-4 * whole.norms[step], step
    for found, expected in (
        ([part.first_gradients for part in parts[:shards]], whole.first_gradients),
        ([part.weights for part in parts[:shards]], whole.weights),
    ):
        assert found[0].keys() == expected.keys()
        for name, value in expected.items():
            joined = torch.cat([part[name] for part in found])
            assert joined.shape == value.shape, name
            # a hundred-thousandth of the largest entry: float32 sums in another order
            worst = (joined - value).abs().max().item()
            assert worst <= 2e-5 * value.abs().max().item(), (name, worst)


WORLD_SIZES = (1, 2, 3, 4)
LAYOUTS = ((2, 2), (4, 1))
"""Replicas and ranks per replica, of 4 ranks."""
# widths that 2, 3 and 4 ranks cannot divide evenly
SIZES = {"vocab_size": 37, "num_layers": 2, "dim": 24, "num_heads": 2, "ffn_dim": 40}
SIZES |= {"max_seq_len": 24}
UNEVEN = ModelArgs(**SIZES, position="partial_rope_a", canon_set="ABCD", qk_norm="full")
ARGS = [
    UNEVEN,
    replace(UNEVEN, init="lingua", init_seed=5, tie_embeddings=True, canon_trainable=False),
    variant("mamba2 conv mimetic"),
    variant("gdn ABCD gate_rank"),
]
TIED = replace(
    UNEVEN, init="lingua", tie_embeddings=True, document_mask=True, num_kv_heads=2, position="alibi"
)
Z_LOSS = Loss(z_loss=0.01, chunk_tokens=20)
SELECTIVE: dict[str, Any] = {"activation_checkpoint.mode": "selective"}
SELECTIVE["activation_checkpoint.selective_ac_option"] = "op"
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


def loss_of(variant_name):
    return LOSSES[list(VARIANTS).index(variant_name) % len(LOSSES)]


def _planned(plan):
    """Return the model that a plan trains: with torch.compile, Canon's weights are trained too."""
    return replace(PLANNED, canon_trainable=plan == "compiled")


def _job(keys):
    job = CanonJobConfig()
    job.training.mixed_precision_param = "float32"
    for key, value in keys.items():
        section, name = key.split(".")
        setattr(getattr(job, section), name, value)
    return job


def _on_rank(rank, folder):
    """Initialize and train over the first n of 4 gloo ranks; each rank saves its part."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # use the CPU on machines with GPUs too
    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=4)

    def fresh(args):
        with torch.device("meta"):
            return Transformer(args)

    def fill(model):
        model.to_empty(device="cpu")
        model.init_weights(write=write_shard)

    # initial weights, and steps of a tied model, at each world size
    for n in WORLD_SIZES:
        mesh = DeviceMesh("cpu", torch.arange(n), mesh_dim_names=("fsdp",))
        if rank >= n:
            continue
        for k, args in enumerate(ARGS):
            model = fresh(args)
            shard(model, mesh)
            fill(model)
            whole = {name: p.full_tensor().detach() for name, p in model.named_parameters()}
            local = {name: p.to_local().numel() for name, p in model.named_parameters()}
            if rank == 0:
                torch.save((whole, local, dict(model.named_buffers())), folder / f"{n}-{k}.pt")
        if n <= 3:
            model = fresh(TIED)
            shard(model, mesh)
            fill(model)
            steps = sharded_steps(model, TIED, Z_LOSS, rank, n, rounds=2 if n < 3 else 1)
            torch.save(steps, folder / f"tied-{n}-{rank}.pt")

    # replicas
    for replicas, shards in LAYOUTS:
        mesh = fsdp_mesh(ParallelDims(replicas, shards, 1, 1, 1, 1, 1, world_size=4))
        model = fresh(TIED)
        shard(model, mesh)
        fill(model)
        initial = {n: p.detach().to_local().clone() for n, p in model.named_parameters()}
        steps = sharded_steps(model, TIED, Z_LOSS, rank, 4, rounds=1)
        if rank == 3:  # a fault of one GPU, in one replica only
            next(p.grad for p in model.parameters()).to_local().view(-1)[0] = torch.nan
        broken = clip_gradients(list(model.parameters()), 1.0).item()
        torch.save((initial, steps, broken), folder / f"hsdp-{replicas}-{rank}.pt")

    # plans and variants on two ranks
    if rank < 2:
        mesh = DeviceMesh("cpu", torch.arange(2), mesh_dim_names=("fsdp",))
        results = {}
        for name, keys in PLANS.items():
            dims = ParallelDims(1, 2, 1, 1, 1, 1, 1, world_size=2)
            dims._meshes = {"fsdp": mesh}  # of two ranks in a world of four
            model = fresh(_planned(name))
            parallelize(model, dims, _job(keys))
            fill(model)
            results[name] = sharded_steps(model, _planned(name), Loss(), rank, 2, rounds=1)
        torch.save(results, folder / f"plans-{rank}.pt")

        results = {}
        for name, args in VARIANTS.items():
            model = fresh(args)
            shard(model, mesh)
            fill(model)
            results[name] = sharded_steps(model, args, loss_of(name), rank, 2, rounds=1)
        torch.save(results, folder / f"variants-{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    mp.start_processes(_on_rank, (folder,), nprocs=4, start_method="forkserver")
    return folder


@pytest.mark.system
@pytest.mark.parametrize("n", WORLD_SIZES)
@pytest.mark.parametrize("k", range(len(ARGS)))
def test_initial_weights_are_the_same_at_every_world_size(results, n, k):
    whole, local, buffers = torch.load(results / f"{n}-{k}.pt")
    alone = Transformer(ARGS[k])
    alone.init_weights()
    expected = dict(alone.named_parameters())
    assert whole.keys() == expected.keys()
    for name, parameter in expected.items():
        assert torch.equal(whole[name], parameter), name
        if n > 1:  # it was sharded at all
            assert local[name] < parameter.numel()
    for name, buffer in alone.named_buffers():
        assert torch.equal(buffers[name], buffer), name


@pytest.mark.system
@pytest.mark.parametrize("n", [1, 2, 3])
def test_a_tied_embedding_gets_both_of_its_gradients(results, n):
    whole = whole_steps(TIED, Z_LOSS)
    assert_equal_steps(parts_of(results, f"tied-{n}", n), whole)
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
    alone, whole = Transformer(TIED), whole_steps(TIED, Z_LOSS)
    alone.init_weights()
    for name, value in alone.named_parameters():
        joined = torch.cat([initial[name] for initial, *_ in parts[:shards]])
        assert torch.equal(joined, value), name
    for rank, (initial, steps, broken) in enumerate(parts):
        assert math.isnan(broken)
        first_initial, first, _ = parts[rank % shards]
        assert steps.norms == first.norms
        for name, value in steps.weights.items():
            assert torch.equal(initial[name], first_initial[name]), (rank, name)
            assert torch.equal(value, first.weights[name]), (rank, name)
    assert_equal_steps([steps for _, steps, _ in parts], whole, shards)


def parts_of(results, name, count):
    """Return what `count` ranks saved as `name`-RANK.pt."""
    return [torch.load(results / f"{name}-{r}.pt", weights_only=False) for r in range(count)]


@pytest.mark.system
@pytest.mark.parametrize("plan", PLANS)
def test_plans_to_save_memory_change_no_number(results, plan):
    parts = [part[plan] for part in parts_of(results, "plans", 2)]
    assert_equal_steps(parts, whole_steps(_planned(plan), Loss()))


@pytest.mark.system
@pytest.mark.parametrize("name", VARIANTS)
def test_a_sharded_variant_takes_the_unsharded_steps(results, name):
    whole = whole_steps(VARIANTS[name], loss_of(name))
    assert_equal_steps([part[name] for part in parts_of(results, "variants", 2)], whole)
    assert whole.losses[0] != whole.losses[1]


def test_an_attention_without_a_training_step_is_refused():
    def check(words, name, device, dtype="bfloat16"):
        job = CanonJobConfig()
        job.model.attention_backend, job.training.mixed_precision_param = name, dtype  # type: ignore
        with torch.device("meta"):
            model = Transformer(variant(words), attention_backend=name)
        check_attention(model, job, device)

    for words in ("alibi", "h_alibi", "rope documents"):
        with refused("attention.unsupported", selected="flex"):
            check(words, "flex", "cpu")
        check(words, "flex", "cuda")
        check(words, "auto", "cpu")
    check("rope", "flex", "cpu")  # SDPA takes what has no mask
    for name, package in (("flash_attn", flash_attn_package()), ("fa3", flash_impl("fa3"))):
        with package:
            check("rope", name, "cuda")
            for device, dtype in (("cpu", "bfloat16"), ("cuda", "float32")):
                with refused("attention.unsupported", selected=name):
                    check("rope", name, device, dtype)
