"""The plan of a run: its figures against a real tiny model's, and what it refuses."""

import types

import pytest
import torch

import canon_pretrain.train as entry
from canon_pretrain.cluster.preflight import plan_job
from canon_pretrain.data.shards import TokenShards
from canon_pretrain.machine import memory
from canon_pretrain.model.counts import active_parameters, num_parameters
from canon_pretrain.model.transformer import Transformer
from canon_pretrain.run.sections import Loss
from canon_pretrain.titan import dry_run
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
from canon_pretrain.titan.spec import head_loss
from canon_pretrain.train import main
from tests.support import ROOT, debug_run, error_codes, refused, write_split

CONFIGS = ROOT / "train_configs"


def plan_of(job, gpu, world_size, mfu=0.4):
    return Plan(job, reference(gpu, mfu), world_size)


def job_of(name, *words):
    return parse_job(["--config", str(CONFIGS / f"{name}.toml"), *words])


def test_the_1b3_figures_of_the_specification(data_folder):
    plan = plan_of(job_of("nope_canon"), "h100", 8, 0.5)
    assert plan.parameters == 1_347_463_168
    assert plan.tokens == pytest.approx(100.2e9, rel=1e-3)
    # spec/operations.md: 100.2B tokens on 8 H100 at 50 % MFU take 2.96 days (without Canon)
    assert plan.seconds / 86_400 == pytest.approx(2.97, abs=0.01)
    bare = plan_of(job_of("rope"), "h100", 8, 0.5)
    assert bare.flops_per_token == pytest.approx(10.10e9, rel=1e-3)
    assert bare.seconds / 86_400 == pytest.approx(2.96, abs=0.01)
    assert world_sizes(job_of("nope_canon")) == [1, 2, 3, 4, 6, 8, 12, 16, 24, 48]
    assert plan.checkpoint_bytes == 12 * plan.parameters
    assert plan.data_fingerprint == ""
    assert plan.data_bytes == 2 * plan.tokens
    plan = plan_of(job_of("debug", "--data.path", str(data_folder)), "h200", 2)
    with TokenShards.open(data_folder / "train") as shards:  # existing data are measured
        assert plan.data_fingerprint == shards.fingerprint
        assert plan.data_bytes == 2 * shards.num_tokens


def test_epochs_over_each_source(data_folder, tmp_path, monkeypatch):
    """By hand: each source's share of the run's tokens, over the tokens that it has."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    write_split(tmp_path / "b" / "train", 3, 10)
    folders = [str(data_folder), str(tmp_path / "b")]
    mixed = ("--data.paths", *folders, "--data.weights", "3", "1", "--training.steps", "1000")
    job = job_of("debug", *mixed)
    tokens = 1000 * 12 * 64
    with open_shards(job) as data:
        first, second = count_draws(job, data)
        assert (first.available, second.available) == (100 * 200, 10 * 200)
        assert (first.drawn, second.drawn) == (tokens * 3 // 4, tokens // 4)
        assert (first.epochs, second.epochs) == (28.8, 96.0)
        device = Device("CPU", 1.0, 1e12, "")
        (note,) = startup_notes(job, data, device, 1)
    plan = plan_of(job, "h100", 1)
    assert plan.epochs == [first.text(), second.text()]
    assert all(text in note for text in plan.epochs)
    assert "28.8" in first.text() and "96.0" in second.text()
    # without data, and for a task, which has no end
    assert plan_of(job_of("debug"), "h100", 1).epochs == ["no data yet"]
    assert plan_of(job_of("playground/tiny/copy"), "h100", 1).epochs == []


VARIANTS = [
    *("canon_trainable=False", "position=rope canon_set=AC ffn=standard ffn_activation=relu2"),
    "position=rope canon_set=D num_kv_heads=2 tie_embeddings=True qk_norm=full",
    *("mixer=gla", "mixer=mamba2 canon_set=AB", "mixer=gated_deltanet canon_set="),
    "ffn=moe num_experts=4 canon_set=ABC",
]


@pytest.mark.parametrize("words", VARIANTS)
def test_memory_equals_what_a_real_tiny_model_holds(words):
    batch = 3
    job = job_of("debug", *(f"--model.{word}" for word in words.split()))
    job.training.global_batch_size = job.training.local_batch_size = batch
    args = job.model_args
    model = Transformer(args)
    model.init_weights()
    tokens = torch.arange(batch * args.max_seq_len).reshape(batch, -1) % args.vocab_size

    def forward():
        return model(tokens, labels_BT=tokens, loss=head_loss(Loss()))[1]

    planned = count_memory(job, model, 1)

    # activations
    saved = count_saved(forward, model)
    block = block_bytes(args, batch, torch.float32)
    head = head_bytes(args, batch, torch.float32, head_loss(Loss()))
    assert planned["activations"] == args.num_layers * block
    # the whole model keeps the token ids as well, and a block's output once where we count it in
    # the next block and in the head
    assert args.num_layers * block + head == pytest.approx(saved, rel=0.02)

    # weights, gradients and moments, after a step
    optimizer = torch.optim.AdamW(p for p in model.parameters() if p.requires_grad)
    forward().backward()
    optimizer.step()
    assert planned["weights"] == sum(p.nbytes for p in model.parameters())
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    assert planned["gradients"] == 0, "there are none yet in the loss of the only micro-batch"
    job.training.global_batch_size = 2 * batch
    accumulating = count_memory(job, model, 1)
    assert accumulating["gradients"] == sum(grad.nbytes for grad in grads)
    moments = [t for state in optimizer.state.values() for t in state.values() if t.ndim]
    assert planned["optimizer (two moments)"] == sum(t.nbytes for t in moments)


def test_parts_of_the_plan_by_hand():
    """Full checkpointing: the blocks' inputs and one block; cst-Canon: weights; FSDP2's share."""

    def plan_of_config(*words):
        return plan_of(job_of("nope_canon", *words), "h100", 1)

    plain = plan_of_config()

    # full checkpointing: 24 layers, 4096 tokens, D = 2048, bfloat16
    full = plan_of_config("--activation_checkpoint.mode", "full")
    inputs = 24 * plain.micro_batch * 4096 * 2048 * 2
    activations = inputs + plain.memory["activations"] // 24
    assert full.memory == plain.memory | {"activations": activations}

    # Canon weights that are not trained
    fixed = plan_of_config("--model.canon_trainable", "False")
    canon = 2_039_808
    assert plain.trained == plain.parameters == fixed.parameters == fixed.trained + canon
    # 48 sequences on one rank, 6 at once: gradients are there from the second micro-batch on
    for name, num_bytes in {"weights": 0, "gradients": 4, "optimizer (two moments)": 8}.items():
        assert plain.memory[name] - fixed.memory[name] == num_bytes * canon
    assert plain.checkpoint_bytes - fixed.checkpoint_bytes == 8 * canon

    # what FSDP2 gathers: two blocks at a time, or all
    job = job_of("debug", "--training.mixed_precision_param", "bfloat16")
    sizes = {name: p.numel() for name, p in Transformer(job.model_args).named_parameters()}
    block = sum(n for name, n in sizes.items() if name.startswith("layers.1."))
    ends = sizes["tok_embeddings.weight"] + sizes["norm.weight"] + sizes["output.weight"]
    plan = plan_of(job, "h100", 4)
    assert plan.memory["gathered by FSDP2"] == 2 * (2 * block + ends)
    assert plan.checkpoints_kept == 2, "every 6 of 12 steps; up to 10 would be kept"
    job.parallelism.fsdp_reshard_after_forward = "never"
    kept = plan_of(job, "h100", 4).memory["gathered by FSDP2"]
    assert kept == 2 * sum(sizes.values())


def with_gpus(monkeypatch, name, count, gib):
    monkeypatch.setattr(dry_run, "has_accelerator", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: name)
    memory = types.SimpleNamespace(total_memory=round(gib * 2**30))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: memory)


def test_this_machine_is_planned_beside_the_reference(monkeypatch):
    small = job_of("quickstart", "--model.flavor", "quickstart", "--model.vocab_size", "2048")
    big = job_of("nope_canon")
    monkeypatch.setattr(dry_run, "has_accelerator", lambda: False)
    monkeypatch.setattr(dry_run, "available_cores", lambda: 3)
    (here,) = make_plans(small, None, None, None, ranks=1).values()
    assert (here.world_size, here.device.is_gpu) == (2, False)
    assert here.tokens / here.seconds == pytest.approx(9_000, rel=0.1)  # measured: see the module
    both = make_plans(big, None, None, None, ranks=1)
    assert (both["this machine"].world_size, both["reference"].world_size) == (3, 8)
    assert both["reference"].device.name == "H100" and not both["this machine"].fits
    with_gpus(monkeypatch, "NVIDIA B200", 4, 178.4)
    (here,) = make_plans(small, None, None, None, ranks=1).values()
    assert (here.world_size, here.device.name) == (4, "NVIDIA B200")
    asked = make_plans(big, "h200", 16, 0.5, ranks=1)
    assert asked["this machine"].device.flops_per_s == 0.5 * 2.25e15
    assert asked["this machine"].device.memory_gib == pytest.approx(178.4)
    assert (asked["reference"].device.name, asked["reference"].world_size) == ("H200", 16)
    with_gpus(monkeypatch, "NVIDIA L4", 1, 22.0)
    assert "an A100" in make_plans(big, None, None, None, ranks=1)["this machine"].device.assumed


def test_one_rank_prints_the_plan_and_nothing_is_written(tmp_path, capsys, monkeypatch):
    """What it prints: tests/snapshots/test_titan.py."""
    monkeypatch.chdir(tmp_path)
    ranks = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "x", "MASTER_PORT": "1"}
    for rank in ("0", "1"):
        for name, value in (ranks | {"RANK": rank, "LOCAL_RANK": rank}).items():
            monkeypatch.setenv(name, value)
        main(["--config", str(CONFIGS / "quickstart.toml"), "--dry_run"])
        assert bool(capsys.readouterr().out) == (rank == "0")
    assert list(tmp_path.iterdir()) == []


def test_a_job_is_refused_by_the_least_that_it_needs():
    """base/1b3.toml: 6 sequences on one GPU are 86 GiB eager and 72 compiled, of 79.6."""
    compiled = job_of("nope_canon")
    check_memory(compiled, reference("h100"), 1)
    eager = job_of("nope_canon", "--compile.no-enable")
    with refused("memory.too_small") as caught:
        check_memory(eager, reference("h100"), 1)
    parts = caught.value.fields["parts"]
    assert [round(parts[name] / 2**30) for name in ("activations", "loss")] == [61, 1]
    for words in (["full"], ["selective"]):
        eager = job_of("nope_canon", "--compile.no-enable", "--activation_checkpoint.mode", *words)
        check_memory(eager, reference("h100"), 1)
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
    with pytest.raises(SystemExit):
        main(arguments)
    assert error_codes(capsys.readouterr().err) == ["memory.too_small"]
    with pytest.raises(Begun):
        main([*arguments, "--force"])
    assert plan_job([*arguments, "--force"], 1, 2) == plan_job(arguments, 1, 2)


def test_replicas_hold_all_states_each_and_share_the_batch():
    replicas = ("--parallelism.data_parallel_replicate_degree", "2")
    hsdp = plan_of(job_of("nope_canon", *replicas), "h100", 16)
    node, two = (plan_of(job_of("nope_canon"), "h100", world) for world in (8, 16))
    for part in ("weights", "gradients", "optimizer (two moments)"):
        assert hsdp.memory[part] == node.memory[part] == pytest.approx(2 * two.memory[part])
    assert (hsdp.micro_batch, hsdp.seconds) == (two.micro_batch, two.seconds)
    assert world_sizes(job_of("nope_canon", *replicas)) == [2, 4, 6, 8, 12, 16, 24, 48]
    with refused("config.world_size", given=5):
        world_sizes(job_of("nope_canon", replicas[0], "5"))


@pytest.mark.parametrize(
    ("code", "words"),
    [
        *(("option.conflict", "--gpu h100"), ("option.invalid", "--dry_run --world many")),
        ("config.unknown_choice", "--dry_run --gpu h10"),
        *(("config.world_size", "--dry_run --world 5"), ("option.invalid", "--dry_run --world 0")),
        ("option.invalid", "--dry_run --mfu 1.5"),
    ],
)
def test_wrong_options_exit_with_2(code, words, capsys):
    with pytest.raises(SystemExit) as left:
        main(["--config", str(CONFIGS / "nope_canon.toml"), *words.split()])
    assert left.value.code == 2
    assert error_codes(capsys.readouterr().err) == [code]


def test_a_recurrence_is_planned_by_its_state(capsys):
    words = "--model.mixer mamba2 --model.canon_set AB --model.position nope --dry_run".split()
    main(["--config", str(CONFIGS / "playground" / "tiny" / "mano.toml"), *words])
    printed = capsys.readouterr().out
    # 4 layers: 16 heads of 64 x 8 float32, and 3 sums of 64 + 400 channels of Canon
    assert f"{4 * 4 * (16 * 64 * 8 + 3 * (64 + 400)) / 1000:.2f} kB per sequence" in printed
    assert "12LHKV" in printed and "rope" not in printed


def test_facts_of_linear_models_and_experts(capsys):
    """Per layer of GLA: 4 states of 8 x 16, and 3 sums of Canon's 608 channels, in float32."""
    main(["--config", str(CONFIGS / "debug.toml"), "--model.mixer", "gla", "--dry_run"])
    text = " ".join(capsys.readouterr().out.split())
    assert "F 176, gla, states 8 x 16, no conv1d, Canon-ABCD parameters" in text
    assert 2 * 4 * (4 * 8 * 16 + 3 * 608) == 18_688 and "18.69 kB per sequence" in text
    words = ("--model.ffn=moe", "--model.num_experts=4", "--model.canon_set=ABC")
    args = job_of("debug", *words).model_args
    experts = 4 * 2 * args.ffn_dim * args.dim
    assert num_parameters(args) - active_parameters(args) == 2 * experts * 3 // 4
    gathered = []
    for degree in (1, 2):  # with 2, a rank gathers half of the experts
        job = job_of("debug", *words, f"--parallelism.expert_parallel_degree={degree}")
        parts = count_memory(job, Transformer(args), 2)
        gathered.append(parts["gathered by FSDP2"])
    assert gathered[0] - gathered[1] == 2 * 4 * experts // 2


@pytest.mark.parametrize(("mixer", "is_gpu"), [("attention", True), ("gla", False)])
def test_a_compiled_block_keeps_less(mixer, is_gpu):
    eager, compiled = (
        job_of("debug", f"--model.mixer={mixer}", f"--compile.{word}")
        for word in ("no-enable", "enable")
    )
    model = Transformer(eager.model_args)
    counted, kept = (
        count_memory(job, model, 1, is_gpu=is_gpu)["activations"] for job in (eager, compiled)
    )
    assert 0.3 * counted < kept < counted
