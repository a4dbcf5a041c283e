"""The computed time of a step: each term by hand, with all other speeds infinite."""

import math
from dataclasses import replace

import pytest
import torch

from canon_pretrain.kernels.work import Work
from canon_pretrain.machine.gpus import GPUS, Range, Speeds, gpu_named
from canon_pretrain.model.args import flavor
from canon_pretrain.model.counts import num_parameters
from canon_pretrain.titan import step_time
from canon_pretrain.titan.command_line import parse_job
from canon_pretrain.titan.dry_run import Plan, reference
from canon_pretrain.titan.step_time import Layout, StepCounts, count_model, count_step, step_seconds
from tests.support import ROOT

NOPE = replace(flavor("1b3"), position="nope", max_seq_len=4096)
LAYOUT = Layout(world_size=8, num_shards=8, tokens=8192)
ALWAYS = Range(math.inf, math.inf, math.inf)
NEVER = Range(0, 0, 0)


@pytest.fixture
def seconds(monkeypatch):
    """Return the seconds of counts with some speeds of a GPU, all else taking no time."""
    for name in ("LAUNCH_S", "HOST_LAUNCH_S", "HOST_BLOCK_S", "HOST_STEP_S", "EXPOSED"):
        monkeypatch.setattr(step_time, name, NEVER)

    def compute(counts, **finite_speeds):
        speeds = dict.fromkeys(Speeds.__dataclass_fields__, ALWAYS)
        for name, speed in finite_speeds.items():
            speeds[name] = Range(speed, speed, speed)
        gpu = replace(GPUS["h100"], speeds=Speeds(**speeds))
        return step_seconds(counts, gpu).likely

    return compute


def test_products_and_attention(seconds):
    """Of 24 layers, for 8192 tokens in sequences of 4096."""
    matrices = 4 * 2048**2 + 3 * 2048 * 5504
    block = Work(flops={"bfloat16": 6 * 8192 * matrices})
    counts = count_model(NOPE, LAYOUT, block)

    head = 32000 * 2048
    product_flops = 6 * 8192 * (24 * matrices + head)
    assert seconds(counts, dense_flops=1e14) == pytest.approx(product_flops / 1e14)

    # two products forward, five backward, of 2 FLOPs
    pairs = 4096 / 2 * 2048 * 24  # causal: half of the tokens
    attention_flops = 8192 * pairs * 2 * 7
    assert seconds(counts, attention_flops=1e14) == pytest.approx(attention_flops / 1e14)

    # recomputed: two more
    counts = count_model(NOPE, replace(LAYOUT, recomputes=True), block)
    assert seconds(counts, attention_flops=1e14) == pytest.approx(attention_flops * 9 / 7 / 1e14)


def test_bytes_of_a_step_without_blocks(seconds):
    optimizer = 40 * num_parameters(NOPE)
    copies = (4 + 6) * num_parameters(NOPE)  # also by one rank
    head = 8192 * (9 * 32000 + 100 * 2048) + 2 * 12 * 32000 * 2048
    products = 3 * 8192 * 2 * (32000 + 2048)  # of the head: bound by memory here

    one_gpu = Layout(world_size=1, num_shards=1, tokens=8192)
    alone = count_model(NOPE, one_gpu, Work())
    bytes_moved = optimizer + head + products + copies
    assert seconds(alone, memory_bytes=1e12) == pytest.approx(bytes_moved / 1e12)

    sharded = count_model(NOPE, LAYOUT, Work())
    bytes_moved = optimizer / 8 + head + products + copies
    assert seconds(sharded, memory_bytes=1e12) == pytest.approx(bytes_moved / 1e12)


@pytest.mark.parametrize(("world_size", "link"), [(8, "node_bytes"), (16, "network_bytes")])
def test_shards_are_exchanged_within_or_between_nodes(seconds, world_size, link):
    layout = replace(LAYOUT, world_size=world_size, num_shards=world_size)
    counts = count_model(NOPE, layout, Work())
    received = 6 * num_parameters(NOPE) * (world_size - 1) / world_size
    assert seconds(counts, **{link: 1e11}) == pytest.approx(received / 1e11)


def test_replicas_add_up_their_shards_over_the_network(seconds):
    """Two nodes, each of which is sharded."""
    replicas = count_model(NOPE, replace(LAYOUT, world_size=16), Work())
    parameters = num_parameters(NOPE)
    assert replicas.node_bytes == 6 * parameters * 7 / 8
    assert replicas.network_bytes == 2 * 4 * parameters / 8 / 2
    assert seconds(replicas, network_bytes=1e11) == pytest.approx(replicas.network_bytes / 1e11)


def test_rows_that_travel_to_experts():
    experts = replace(NOPE, ffn="moe", num_experts=8, experts_per_token=2)
    layout = replace(LAYOUT, expert_degree=8)

    # experts stay where they are; a row has 2048 channels of 2 bytes, four times
    counts = count_model(experts, layout, Work())
    routed = 24 * 8 * 2 * 2048 * 5504
    dense_bytes = 6 * (num_parameters(experts) - routed) * 7 / 8
    rows = 24 * 8192 * 2 * 7 / 8
    assert counts.node_bytes == pytest.approx(dense_bytes + 4 * rows * 2048 * 2)

    # recomputed: twice more
    recomputed = count_model(experts, replace(layout, recomputes=True), Work())
    assert recomputed.node_bytes - counts.node_bytes == pytest.approx(2 * rows * 2048 * 2)


def test_the_host_is_a_floor():
    counts = StepCounts(Work(launches=1000), num_blocks=10)
    slow, likely, fast = (
        step_time.HOST_STEP_S[bar]
        + 10 * step_time.HOST_BLOCK_S[bar]
        + 1000 * step_time.HOST_LAUNCH_S[bar]
        for bar in range(3)
    )
    assert step_seconds(counts, GPUS["h100"]) == pytest.approx((slow, likely, fast))
    assert slow > likely > fast > 1e-3


def job_of(name, *options):
    """Parse a config of train_configs with these options."""
    config = ROOT / "train_configs" / f"{name}.toml"
    return parse_job(["--config", str(config), *options], quiet=True)


def h100():
    return reference("h100")


def test_micro_batches_repeat_all_but_the_optimizer():
    once = count_step(job_of("nope_canon", "--training.local_batch_size", "6"), 8)
    twice = count_step(job_of("nope_canon", "--training.local_batch_size", "3"), 8)

    assert twice.num_blocks == 2 * once.num_blocks
    assert twice.work.flops == once.work.flops
    assert once.work.bytes_moved < twice.work.bytes_moved < 1.2 * once.work.bytes_moved
    assert once.node_bytes > 0
    assert twice.node_bytes == 2 * once.node_bytes
    assert twice.network_bytes == 0


def test_a_small_model_waits_for_the_host():
    """Two micro-batches of a sequence take less than twice as long as one."""

    def plan_of(global_batch_size):
        job = job_of(
            "playground/copy_1l",
            *("--training.local_batch_size", "1"),
            *("--training.global_batch_size", global_batch_size),
        )
        return Plan(job, h100(), 1)

    once = plan_of("1")
    twice = plan_of("2")
    assert once.micro_batch == 1
    assert twice.micro_batch == 1
    assert 1 < twice.step_seconds.likely / once.step_seconds.likely < 1.5


@pytest.mark.parametrize(
    ("config", "least_mfu"),
    [("gla", 0.4), ("mamba2", 0.35), ("mamba2_mlp", 0.4), ("gated_deltanet", 0.4)],
)
def test_linear_models_are_planned_by_triton(config, least_mfu):
    job = job_of(config)
    auto = Plan(job, h100(), 8)
    chunked = Plan(job_of(config, "--model.mixer_backend", "chunked"), h100(), 8)
    fla = Plan(job_of(config, "--model.mixer_backend", "fla"), h100(), 8)

    assert auto.recurrence == "triton"
    assert auto.mfu > least_mfu
    assert auto.chunked_seconds == chunked.seconds
    # the table's times, of which Mamba2's are without a feed-forward
    step_times = job.model_args.recurrent.step_times
    assert auto.seconds < chunked.seconds
    if config != "mamba2_mlp":
        assert auto.seconds < fla.seconds < chunked.seconds
        ratio = chunked.seconds / auto.seconds
        assert ratio == pytest.approx(step_times["chunked"], rel=0.03)


def test_a_stated_mfu_replaces_the_model():
    plan = Plan(job_of("nope_canon"), reference("h100", 0.4), 8)
    assert plan.mfu is None
    flops_per_s = plan.tokens * plan.flops_per_token / plan.seconds / 8
    assert flops_per_s == pytest.approx(0.4 * 989e12)


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA H100 PCIe", None),
        ("NVIDIA H20", None),
        ("NVIDIA GH200 480GB", None),
        ("NVIDIA A100 80GB PCIe", None),
        ("NVIDIA A100-SXM4-40GB", None),
    ],
)
def test_a_gpu_is_known_by_its_name(name, key):
    assert gpu_named(name) is (GPUS[key] if key else None)


@pytest.mark.parametrize(
    "options",
    [("--compile.no-enable",), ("--activation_checkpoint.mode", "selective")],
    ids=["eager", "selective"],
)
def test_what_is_not_counted_is_priced_by_mfu(options):
    plan = Plan(job_of("nope_canon", *options), h100(), 8)
    assert plan.gpu is None
    assert plan.mfu is None
    assert plan.step_seconds.slow == plan.step_seconds.fast


def test_float32_is_slower_than_bfloat16(seconds):
    layout = replace(LAYOUT, dtype=torch.float32)
    counts = count_model(NOPE, layout, Work())
    attention = 7 * 2 * 2048 * 4096 * 8192 * 24
    assert counts.work.flops == {"float32": 6 * 8192 * 32000 * 2048 + attention}
    assert seconds(counts, float32_flops=1e14) > 0
