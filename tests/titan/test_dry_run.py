"""The plan of a run: its figures against a real tiny model's, and what it refuses."""

import types
from dataclasses import replace

import pytest
import torch

import canon_pretrain.train as entry
from canon_pretrain.cluster.preflight import plan_job
from canon_pretrain.data.shards import TokenShards
from canon_pretrain.machine import memory
from canon_pretrain.model.args import FLAVORS
from canon_pretrain.model.counts import active_parameters, num_parameters
from canon_pretrain.model.transformer import Transformer
from canon_pretrain.run.sections import Loss
from canon_pretrain.titan import costs, dry_run
from canon_pretrain.titan.command_line import parse_job
from canon_pretrain.titan.costs import block_bytes, count_saved, head_bytes
from canon_pretrain.titan.data import open_shards
from canon_pretrain.titan.dry_run import (
    Device,
    Plan,
    check_memory,
    count_draws,
    count_memory,
    make_plans,
    reference,
    startup_notes,
    world_sizes,
)
from canon_pretrain.titan.job_config import micro_batch_size
from canon_pretrain.titan.spec import head_loss
from canon_pretrain.train import main
from tests.support import ROOT, command_error, debug_run, refused, write_split
from tests.variants import variant

CONFIGS = ROOT / "train_configs"


DAY_S = 86_400


def plan_of(job, gpu, world_size, mfu=0.4):
    return Plan(job, reference(gpu, mfu), world_size)


def job_of(name, *options):
    """Parse a config of train_configs with these options."""
    return parse_job(["--config", str(CONFIGS / f"{name}.toml"), *options])


def test_the_1b3_figures_of_the_specification():
    """spec/operations.md: 100.2B tokens on 8 H100 at 50 % MFU take 2.96 days (without Canon)."""
    with_canon = plan_of(job_of("nope_canon"), "h100", 8, mfu=0.5)
    assert with_canon.parameters == 1_347_463_168
    assert with_canon.tokens == pytest.approx(100.2e9, rel=1e-3)
    assert with_canon.seconds / DAY_S == pytest.approx(2.97, abs=0.01)
    assert with_canon.checkpoint_bytes == 12 * with_canon.parameters
    assert world_sizes(job_of("nope_canon")) == [1, 2, 3, 4, 6, 8, 12, 16, 24, 48]

    without_canon = plan_of(job_of("rope"), "h100", 8, mfu=0.5)
    assert without_canon.flops_per_token == pytest.approx(10.10e9, rel=1e-3)
    assert without_canon.seconds / DAY_S == pytest.approx(2.96, abs=0.01)


def test_data_are_measured_if_they_exist(data_folder):
    without_data = plan_of(job_of("nope_canon"), "h100", 8)
    assert without_data.data_fingerprint == ""
    assert without_data.data_bytes == 2 * without_data.tokens

    with_data = plan_of(job_of("debug", "--data.path", str(data_folder)), "h200", 2)
    with TokenShards.open(data_folder / "train") as shards:
        assert with_data.data_fingerprint == shards.fingerprint
        assert with_data.data_bytes == 2 * shards.num_tokens


def test_epochs_over_each_source(data_folder, tmp_path, monkeypatch):
    """By hand: each source's share of the run's tokens, over the tokens that it has."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    write_split(tmp_path / "b" / "train", 3, 10)
    job = job_of(
        "debug",
        *("--data.paths", str(data_folder), str(tmp_path / "b")),
        *("--data.weights", "3", "1"),
        *("--training.steps", "1000"),
    )
    tokens = 1000 * 12 * 64

    with open_shards(job) as data:
        first, second = count_draws(job, data)
        device = Device("CPU", 1.0, 1e12, "")
        (note,) = startup_notes(job, data, device, 1)

    assert (first.available, second.available) == (100 * 200, 10 * 200)
    assert (first.drawn, second.drawn) == (tokens * 3 // 4, tokens // 4)
    assert (first.epochs, second.epochs) == (28.8, 96.0)
    assert "28.8" in first.text()
    assert "96.0" in second.text()

    # the plan and the note at the start have them
    plan = plan_of(job, "h100", 1)
    assert plan.epochs == [first.text(), second.text()]
    assert all(text in note for text in plan.epochs)

    # of windows with a document each, the documents are counted
    job = job_of("debug", "--data.path", str(data_folder), "--data.order", "documents")
    job.training.steps = 25
    with open_shards(job) as data:
        (draws,) = count_draws(job, data)
    assert (draws.drawn, draws.available, draws.unit) == (25 * 12, 100, "documents")
    assert plan_of(job, "h100", 1).epochs == [draws.text()]

    # without data, and for a task, which has no end
    assert plan_of(job_of("debug"), "h100", 1).epochs == ["no data yet"]
    assert plan_of(job_of("playground/tiny/copy"), "h100", 1).epochs == []


VARIANTS = [
    "canon_trainable=False",
    "position=rope canon_set=AC ffn=standard ffn_activation=relu2",
    "position=rope canon_set=D num_kv_heads=2 tie_embeddings=True qk_norm=full",
    "canon_set=ACFO norm_place=output qk_norm=full",
    "mixer=gla",
    "mixer=mamba2 canon_set=AB",
    "mixer=gated_deltanet canon_set=",
    "ffn=moe num_experts=4 canon_set=ABC",
]


@pytest.mark.parametrize("variant", VARIANTS)
def test_memory_equals_what_a_real_tiny_model_holds(variant):
    batch = 3
    job = job_of("debug", *(f"--model.{setting}" for setting in variant.split()))
    job.training.global_batch_size = batch
    job.training.local_batch_size = batch
    args = job.model_args
    model = Transformer(args)
    model.init_weights()
    tokens = torch.arange(batch * args.max_seq_len).reshape(batch, -1) % args.vocab_size

    def forward():
        return model(tokens, labels_BT=tokens, loss=head_loss(Loss()))[1]

    planned = count_memory(job, model, 1)

    # activations: the whole model keeps the token ids as well, and a block's output once where we
    # count it in the next block and in the head
    saved = count_saved(forward, model)
    block = block_bytes(args, batch, torch.float32)
    head = head_bytes(args, batch, torch.float32, head_loss(Loss()))
    assert planned["activations"] == args.num_layers * block
    assert args.num_layers * block + head == pytest.approx(saved, rel=0.02)

    # weights and moments, after a step
    optimizer = torch.optim.AdamW(p for p in model.parameters() if p.requires_grad)
    forward().backward()
    optimizer.step()
    assert planned["weights"] == sum(p.nbytes for p in model.parameters())
    moments = [t for state in optimizer.state.values() for t in state.values() if t.ndim]
    assert planned["optimizer (moments)"] == sum(t.nbytes for t in moments)

    # gradients: in the loss of the only micro-batch there are none yet, in that of a second one all
    assert planned["gradients"] == 0
    job.training.global_batch_size = 2 * batch
    accumulating = count_memory(job, model, 1)
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    assert accumulating["gradients"] == sum(grad.nbytes for grad in grads)


def plan_of_1b3(*options):
    """Plan the 1.3B model with these options on one H100."""
    return plan_of(job_of("nope_canon", *options), "h100", 1)


def test_full_checkpointing_keeps_inputs_and_one_block():
    """By hand: 24 layers, 4096 tokens, D = 2048, bfloat16."""
    plain = plan_of_1b3()
    full = plan_of_1b3("--activation_checkpoint.mode", "full")

    inputs = 24 * plain.micro_batch * 4096 * 2048 * 2
    activations = inputs + plain.memory["activations"] // 24
    assert full.memory == plain.memory | {"activations": activations}


def test_canon_weights_that_are_not_trained_are_only_weights():
    """48 sequences on one rank, 6 at once: gradients are held from the second micro-batch on."""
    plain = plan_of_1b3()
    fixed = plan_of_1b3("--model.canon_trainable", "False")

    canon = 2_039_808
    assert plain.parameters == plain.trained
    assert fixed.parameters == fixed.trained + canon == plain.parameters
    assert plain.memory["weights"] == fixed.memory["weights"]
    assert plain.memory["gradients"] - fixed.memory["gradients"] == 4 * canon
    moments = "optimizer (moments)"
    assert plain.memory[moments] - fixed.memory[moments] == 8 * canon
    assert plain.checkpoint_bytes - fixed.checkpoint_bytes == 8 * canon


def test_fsdp_gathers_two_blocks_at_a_time_or_all():
    job = job_of("debug", "--training.mixed_precision_param", "bfloat16")
    sizes = {name: p.numel() for name, p in Transformer(job.model_args).named_parameters()}
    block = sum(size for name, size in sizes.items() if name.startswith("layers.1."))
    ends = sizes["tok_embeddings.weight"] + sizes["norm.weight"] + sizes["output.weight"]

    plan = plan_of(job, "h100", 4)
    assert plan.memory["gathered by FSDP2"] == 2 * (2 * block + ends)
    assert plan.checkpoints_kept == 2, "every 6 of 12 steps; up to 10 would be kept"

    job.parallelism.fsdp_reshard_after_forward = "never"
    plan = plan_of(job, "h100", 4)
    assert plan.memory["gathered by FSDP2"] == 2 * sum(sizes.values())


def with_gpus(monkeypatch, name, count, gib):
    """Let this machine have `count` GPUs of this name and memory."""
    monkeypatch.setattr(dry_run, "has_accelerator", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: name)
    properties = types.SimpleNamespace(total_memory=round(gib * 2**30))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)


def small_job():
    return job_of("quickstart", "--model.flavor", "quickstart", "--model.vocab_size", "2048")


def test_cores_of_this_machine_are_planned_next_to_h100s(monkeypatch):
    monkeypatch.setattr(dry_run, "has_accelerator", lambda: False)
    monkeypatch.setattr(dry_run, "available_cores", lambda: 3)

    # a small model: this machine alone
    (here,) = make_plans(small_job(), None, None, None, ranks=1).values()
    assert (here.world_size, here.device.is_gpu) == (2, False)
    assert here.tokens / here.seconds == pytest.approx(9_000, rel=0.1)  # measured: see the module

    # a large one: both
    plans = make_plans(job_of("nope_canon"), None, None, None, ranks=1)
    assert plans["this machine"].world_size == 3
    assert not plans["this machine"].fits
    assert plans["reference"].world_size == 8
    assert plans["reference"].device.name == "H100"


def test_gpus_of_this_machine_are_planned_next_to_others(monkeypatch):
    big = job_of("nope_canon")
    with_gpus(monkeypatch, "NVIDIA B200", 4, 178.4)

    (here,) = make_plans(small_job(), None, None, None, ranks=1).values()
    assert (here.world_size, here.device.name) == (4, "NVIDIA B200")

    plans = make_plans(big, "h200", 16, 0.5, ranks=1)
    assert plans["this machine"].device.flops_per_s == 0.5 * 2.25e15
    assert plans["this machine"].device.memory_gib == pytest.approx(178.4)
    assert plans["reference"].device.name == "H200"
    assert plans["reference"].world_size == 16

    # a GPU that the table lacks
    with_gpus(monkeypatch, "NVIDIA L4", 1, 22.0)
    plans = make_plans(big, None, None, None, ranks=1)
    assert "an A100" in plans["this machine"].device.assumed


@pytest.mark.parametrize("rank", ["0", "1"])
def test_rank_0_prints_the_plan_and_nothing_is_written(rank, tmp_path, capsys, monkeypatch):
    """What it prints: tests/snapshots/test_titan.py."""
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "LOCAL_RANK"):
        monkeypatch.setenv(name, rank)
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, "2")
    monkeypatch.setenv("MASTER_ADDR", "x")
    monkeypatch.setenv("MASTER_PORT", "1")

    main(["--config", str(CONFIGS / "quickstart.toml"), "--dry_run"])

    assert bool(capsys.readouterr().out) == (rank == "0")
    assert list(tmp_path.iterdir()) == []


def test_a_job_is_refused_by_the_least_that_it_needs():
    """base/1b3.toml: 6 sequences on one GPU are 86 GiB eager and 72 compiled, of 79.6."""
    h100 = reference("h100")
    compiled = job_of("nope_canon")
    check_memory(compiled, h100, 1)

    # eager: refused, unless blocks are recomputed
    eager = ("nope_canon", "--compile.no-enable")
    with refused("memory.too_small") as caught:
        check_memory(job_of(*eager), h100, 1)
    parts = caught.value.fields["parts"]
    assert round(parts["activations"] / 2**30) == 61
    assert round(parts["loss"] / 2**30) == 1
    check_memory(job_of(*eager, "--activation_checkpoint.mode", "full"), h100, 1)
    check_memory(job_of(*eager, "--activation_checkpoint.mode", "selective"), h100, 1)

    # a laptop: refused, unless states are offloaded
    laptop = Device("CPU core", 16.0, 1e10, "", is_gpu=False)
    with refused("memory.too_small"):
        check_memory(compiled, laptop, 1)
    check_memory(job_of("nope_canon", "--training.enable_cpu_offload"), laptop, 1)


def test_force_starts_it_all_the_same(data_folder, tmp_path, monkeypatch, capsys):
    class Begun(Exception):
        pass

    def begin(rank):
        raise Begun

    monkeypatch.setattr(memory, "available_memory", lambda: 2**20)
    monkeypatch.setattr(entry, "init_logging", begin)
    arguments = list(map(str, debug_run(data_folder, tmp_path / "run")))

    assert command_error(capsys, main, arguments) == "memory.too_small"

    with pytest.raises(Begun):
        main([*arguments, "--force"])

    # it is no part of the plan
    assert plan_job([*arguments, "--force"], 1, 2) == plan_job(arguments, 1, 2)


def test_replicas_hold_all_states_each_and_share_the_batch():
    degree = "--parallelism.data_parallel_replicate_degree"
    with_replicas = job_of("nope_canon", degree, "2")

    replicas_on_16 = plan_of(with_replicas, "h100", 16)
    sharded_on_8 = plan_of(job_of("nope_canon"), "h100", 8)
    sharded_on_16 = plan_of(job_of("nope_canon"), "h100", 16)

    for part in ("weights", "gradients", "optimizer (moments)"):
        assert replicas_on_16.memory[part] == sharded_on_8.memory[part]
        assert replicas_on_16.memory[part] == pytest.approx(2 * sharded_on_16.memory[part])
    assert replicas_on_16.micro_batch == sharded_on_16.micro_batch
    assert replicas_on_16.seconds == sharded_on_16.seconds

    assert world_sizes(with_replicas) == [2, 4, 6, 8, 12, 16, 24, 48]
    with refused("config.world_size", given=5):
        world_sizes(job_of("nope_canon", degree, "5"))


@pytest.mark.parametrize(
    ("code", "options"),
    [
        ("option.conflict", "--gpu h100"),
        ("config.unknown_choice", "--dry_run --gpu h10"),
        ("config.world_size", "--dry_run --world 5"),
        ("option.invalid", "--dry_run --world 0"),
        ("option.invalid", "--dry_run --world many"),
        ("option.invalid", "--dry_run --mfu 1.5"),
    ],
)
def test_wrong_options_exit_with_2(code, options, capsys):
    arguments = ["--config", str(CONFIGS / "nope_canon.toml"), *options.split()]
    assert command_error(capsys, main, arguments) == code


def test_mamba2_is_planned_by_its_state(capsys):
    """4 layers: 16 heads of 64 x 8 float32, and 3 sums of 64 + 400 channels of Canon."""
    config = CONFIGS / "playground" / "tiny" / "mano.toml"
    options = "--model.mixer mamba2 --model.canon_set AB --model.position nope".split()

    main(["--config", str(config), *options, "--dry_run"])

    printed = capsys.readouterr().out
    state_bytes = 4 * 4 * (16 * 64 * 8 + 3 * (64 + 400))
    assert f"{state_bytes / 1000:.2f} kB per sequence" in printed
    assert "12LHKV" in printed
    assert "rope" not in printed


def test_gla_is_planned_by_its_state(capsys):
    """2 layers: 4 states of 8 x 16, and 3 sums of Canon's 608 channels, in float32."""
    main(["--config", str(CONFIGS / "debug.toml"), "--model.mixer", "gla", "--dry_run"])

    printed = " ".join(capsys.readouterr().out.split())
    state_bytes = 2 * 4 * (4 * 8 * 16 + 3 * 608)
    assert f"{state_bytes / 1000:.2f} kB per sequence" in printed
    assert "F 176, gla, states 8 x 16, no conv1d, Canon-ABCD parameters" in printed


def test_experts_are_counted_where_they_are_used_and_held():
    options = ("--model.ffn=moe", "--model.num_experts=4", "--model.canon_set=ABC")
    args = job_of("debug", *options).model_args
    experts_of_a_layer = 4 * 2 * args.ffn_dim * args.dim

    # one of four is active, in 2 layers
    inactive = num_parameters(args) - active_parameters(args)
    assert inactive == 2 * experts_of_a_layer * 3 // 4

    # with a degree of 2, a rank gathers half of the experts
    def gathered_bytes(degree):
        job = job_of("debug", *options, f"--parallelism.expert_parallel_degree={degree}")
        return count_memory(job, Transformer(args), 2)["gathered by FSDP2"]

    assert gathered_bytes(1) - gathered_bytes(2) == 2 * 4 * experts_of_a_layer // 2


@pytest.mark.parametrize(("mixer", "is_gpu"), [("attention", True), ("gla", False)])
def test_a_compiled_block_keeps_less(mixer, is_gpu):
    eager = job_of("debug", f"--model.mixer={mixer}", "--compile.no-enable")
    compiled = job_of("debug", f"--model.mixer={mixer}", "--compile.enable")
    model = Transformer(eager.model_args)

    eager_memory = count_memory(eager, model, 1, is_gpu=is_gpu)
    compiled_memory = count_memory(compiled, model, 1, is_gpu=is_gpu)

    kept = compiled_memory["activations"] / eager_memory["activations"]
    assert 0.3 < kept < 1


@pytest.mark.parametrize(
    ("words", "reach"),
    [("nope smear documents", 1), ("AC k3 documents", 2), ("nope smear", None)],
)
def test_a_traced_block_receives_segments_as_in_the_model(words, reach, monkeypatch):
    """Of the tokens, and of those before them on which a layer depends."""
    args = variant(words)
    expected = None if reach is None else (1, reach + args.max_seq_len)
    received = []

    class Received(Exception):
        """Ends the trace before anything is compiled."""

    def context(*, segments_BN):
        received.append(None if segments_BN is None else tuple(segments_BN.shape))
        raise Received

    monkeypatch.setattr(costs, "Context", context)
    with pytest.raises(Received):
        costs.trace_block(args, torch.float32, "compiled", None)
    assert received == [expected]


def test_learned_biases_are_kept_for_backward():
    """Those of distances, with their channels; SDPA also keeps those of scores."""
    nope = replace(FLAVORS["debug"], position="nope")
    relative = replace(nope, position="relative", relative_dim=8, relative_extent=32)
    num_tokens = 2 * nope.max_seq_len
    expected = 2 * num_tokens * nope.num_heads * (8 + 32)  # bfloat16
    kept = block_bytes(relative, 2, torch.bfloat16)
    assert kept - block_bytes(nope, 2, torch.bfloat16) == expected

    def activations(backend):
        options = ["position=relative", "relative_dim=8", "relative_extent=32"]
        options.append(f"attention_backend={backend}")
        job = job_of("debug", "--compile.no-enable", *(f"--model.{option}" for option in options))
        return count_memory(job, Transformer(job.model_args), 1)["activations"], job

    flex, job = activations("flex")
    sdpa, _ = activations("sdpa")
    args = job.model_args
    num_scores = micro_batch_size(job, 1) * args.num_heads * args.max_seq_len**2
    assert sdpa - flex == 4 * num_scores * args.num_layers  # float32


@pytest.mark.parametrize("position", ["alibi", "h_alibi"])
def test_positions_without_parameters_keep_what_nope_keeps(position):
    nope = replace(FLAVORS["debug"], position="nope")
    heads = {"h_alibi_heads": 1} if position == "h_alibi" else {}
    args = replace(nope, position=position, **heads)
    assert block_bytes(args, 1, torch.float32) == block_bytes(nope, 1, torch.float32)
