"""The job: the file and the command line merged, its checks, --help, and the learning rate."""

import dataclasses
import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torchtitan.components.optimizer import OptimizersContainer

from canon_pretrain.model.args import FLAVORS
from canon_pretrain.titan.command_line import parse_job
from canon_pretrain.titan.job_config import CanonJobConfig, micro_batch_size, shard_degree, value_of
from canon_pretrain.titan.keys import SHORT_HELP, SYNONYMS, dotted
from canon_pretrain.titan.spec import build_schedule
from tests.support import ROOT, refused

DEBUG = str(ROOT / "train_configs" / "debug.toml")


def test_the_command_line_wins_over_the_file():
    job = parse_job([
        *("--config", DEBUG),
        *("--training.steps", "7"),
        "--model.canon-set=ca",
        *("--run.stop_at", "3"),
        "--compile.enable",
    ])  # fmt: skip
    assert job.training.steps == 7
    assert job.model_args.canon_set == "AC"
    assert job.run.stop_at == 3
    assert job.compile.enable is True
    assert job.optimizer.lr == 3e-3  # the file's


def test_a_file_is_required():
    assert parse_job([f"--job.config_file={DEBUG}"]).training.steps == 12
    with refused("option.missing"):
        parse_job([])


@pytest.mark.parametrize("value", ["=false", " false", " False"])
def test_an_optional_bool_is_written_as_in_toml(value):
    job = parse_job(["--config", DEBUG, *f"--model.document_mask{value}".split()])
    assert job.model.document_mask is False


def test_defaults_are_the_papers_and_not_torchtitans():
    """Those of rope.toml, which tests/test_train_configs.py compares with the paper."""
    job = CanonJobConfig()
    paper = parse_job(["--config", str(ROOT / "train_configs/rope.toml")])
    assert job.optimizer == paper.optimizer
    assert job.lr_scheduler == paper.lr_scheduler
    assert job.checkpoint.enable
    assert not job.checkpoint.last_save_model_only
    assert job.activation_checkpoint.mode == "none"


ATTENTION_KEYS: dict[str, Any] = {
    "vocab_size": 77,
    "num_layers": 3,
    "dim": 128,
    "num_heads": 8,
    "num_kv_heads": 4,
    "ffn_dim": 96,
    "bias": True,
    "ffn": "standard",
    "ffn_activation": "gelu",
    "norm": "layernorm",
    "norm_eps": 1e-6,
    "norm_place": "output",
    "position": "partial_rope_c",
    "partial_rope_dim": 6,
    "rope_theta": 500.0,
    "qk_norm": "per_head",
    "attention_gate": "per_channel",
    "document_mask": True,
    "eos_id": 3,
    "canon_set": "BD",
    "canon_kernel": 3,
    "canon_residual": False,
    "canon_activation": True,
    "canon_trainable": False,
    "window": 100,
    "smear": True,
    "init": "lingua",
    "init_seed": 9,
    "tie_embeddings": True,
}
GLA_KEYS: dict[str, Any] = {
    "mixer": "gla",
    "position": "nope",
    "num_heads": 2,
    "mixer_conv": True,
    "expand_k": 1.0,
    "expand_v": 2.0,
    "output_gate_rank": 16,
    "o_norm_eps": 1e-3,
    "gla_feature_map": "elu",
    "canon_set": "A",
    "canon_filter": "dynamic",
    "canon_scale": "sqrt",
}
H_ALIBI_KEYS: dict[str, Any] = {"position": "h_alibi", "h_alibi_heads": 3, "canon_set": "FKOV"}
GATED_DELTANET_KEYS: dict[str, Any] = {
    "mixer": "gated_deltanet",
    "position": "nope",
    "num_heads": 2,
    "mixer_conv": True,
    "allow_neg_eigval": True,
    "expand_k": 1.0,
    "expand_v": 2.0,
    "ffn_dim": 96,
    "canon_set": "A",
}
RELATIVE_KEYS: dict[str, Any] = {
    "position": "relative",
    "relative_dim": 4,
    "relative_extent": 24,
    "embed_norm": True,
    "canon_set": "KV",
}
MAMBA2_AND_EXPERT_KEYS: dict[str, Any] = {
    "mixer": "mamba2",
    "position": "nope",
    "num_heads": 2,
    "mixer_conv": False,
    "state_dim": 32,
    "mimetic_init": True,
    "mimetic_rate": 4.0,
    "canon_set": "AB",
    "ffn": "moe",
    "ffn_dim": 96,
    "num_experts": 6,
    "experts_per_token": 2,
    "num_shared_experts": 1,
    "moe_gated": True,
    "moe_capacity": 2.0,
    "moe_balance": "loss",
    "moe_balance_rate": 0.01,
}


@pytest.mark.parametrize(
    "keys",
    [
        pytest.param(ATTENTION_KEYS, id="attention"),
        pytest.param(H_ALIBI_KEYS, id="h_alibi"),
        pytest.param(RELATIVE_KEYS, id="relative"),
        pytest.param(GLA_KEYS, id="gla"),
        pytest.param(GATED_DELTANET_KEYS, id="gated_deltanet"),
        pytest.param(MAMBA2_AND_EXPERT_KEYS, id="mamba2 experts"),
    ],
)
def test_a_model_key_reaches_the_model(keys):
    options = [f"--model.{name}={value}" for name, value in keys.items()]
    job = parse_job(["--config", DEBUG, "--model.flavor=162M", *options])
    flavor = dataclasses.replace(FLAVORS["162M"], max_seq_len=job.training.seq_len)
    assert job.model_args == dataclasses.replace(flavor, **keys)


def test_a_pattern_and_its_sections_reach_the_model(tmp_path):
    config = tmp_path / "pattern.toml"
    config.write_text(
        f'extends = "{DEBUG}"\n[model]\npattern = ["gla", "local"]\n'
        "[model.layers.local]\nwindow = 8\n[model.layers.gla]\nnum_heads = 2\n"
    )

    args = parse_job(["--config", str(config)]).model_args

    assert args.pattern == ("gla", "local")
    assert args.kinds["gla"].num_heads == 2
    assert args.kinds["local"].window == 8
    other = parse_job(
        ["--config", str(config), "--model.pattern", "local", "gla", "gla"]
    ).model_args
    assert other.pattern == ("local", "gla", "gla")


def test_every_model_key_is_among_them():
    tried = ATTENTION_KEYS.keys() | GLA_KEYS.keys() | MAMBA2_AND_EXPERT_KEYS.keys()
    tried |= H_ALIBI_KEYS.keys() | GATED_DELTANET_KEYS.keys() | RELATIVE_KEYS.keys()
    tried |= {"pattern", "layers"}  # test_a_pattern_and_its_sections_reach_the_model
    assert tried == vars(CanonJobConfig().model).keys() & vars(FLAVORS["162M"]).keys()


@pytest.mark.parametrize("world_size", [1, 3, 16, 48])
def test_micro_batches_always_make_up_the_global_batch(world_size):
    job = CanonJobConfig()
    job.training.global_batch_size = 48
    for bound in (1, 5, 100):
        job.training.local_batch_size = bound
        size = micro_batch_size(job, world_size)
        assert 1 <= size <= bound
        assert 48 % (size * world_size) == 0
        for larger in range(size + 1, bound + 1):
            assert 48 % (larger * world_size) != 0


def test_a_world_size_that_does_not_divide_names_valid_ones():
    job = CanonJobConfig()
    job.training.global_batch_size = 12
    with refused("config.world_size", given=5, valid=[1, 2, 3, 4, 6, 12]):
        micro_batch_size(job, 5)

    job.parallelism.data_parallel_replicate_degree = 4
    assert shard_degree(job, 4) == 1
    assert shard_degree(job, 12) == 3
    with refused("config.world_size", given=6, valid=[4, 12]):
        shard_degree(job, 6)


REFUSED = {
    "config.conflict": [
        "run.stop_at 13",
        "checkpoint.no-enable --run.stop_at 3",
        "checkpoint.fresh --checkpoint.load_step 3",
        "checkpoint.folder=a\0b",
        "job.dump_folder=",
        "job.dump_folder=~/x",
        "loss.z_loss 1e-4 --loss.squared_loss 1e-4",
        "profiling.enable_profiling --profiling.profile_freq 3",
        "data.paths a b",
        "data.path a --data.paths b --data.weights 1",
        "data.path a --data.weights 1",
        "data.task.n 8",
        "samples.interval 5",
        # with a task
        "data.path a --data.task.name copy",
        "data.paths a b --data.weights 1 1 --data.task.name copy",
        "data.order permute --data.task.name copy",
        "validation.path a --data.task.name copy",
        "validation.windows=-1 --data.task.name copy",
        "model.document_mask True --data.task.name copy",
        "samples.interval 5 --samples.prompts a --data.task.name copy",
    ],
    "config.unknown_choice": ["data.task.name kopy"],
    "task.unknown_setting": ["data.task.name copy --data.task.k 8"],
    "task.setting": ["data.task.name copy --data.task.n 0"],
    "task.too_long": ["data.task.name copy --data.task.n 40"],
    "config.unsupported": [
        "parallelism.tensor_parallel_degree 2",
        "parallelism.data_parallel_shard_degree 2",
        "validation.dataset x",
        "validation.steps 5",
        "model.converters float8",
        "model.name llama3",
        "training.dataset c4",
        "checkpoint.last_save_model_only",
    ],
    "config.invalid_value": [
        "optimizer.lr=nan",
        "optimizer.beta1=-0.1",
        "optimizer.beta2=1",
        "training.steps=0",
        "training.gc_freq=0",
        "training.global_batch_size=1000000000000000000",
        "comm.init_timeout_seconds=0",
        "comm.train_timeout_seconds=1000000000000000",
        "lr_scheduler.warmup_steps=-3",
        "lr_scheduler.decay_ratio=1.01",
        "loss.z_loss=-1",
        "loss.chunk_tokens=-1",
        "parallelism.data_parallel_replicate_degree=0",
        "data.data_seed=-1",
        "data.read_ahead=-1",
        "run.heartbeat_s=inf",
        "guards.outlier_sigma=0",
        "activation_checkpoint.memory_budget=2",
        "validation.freq=0",
        "validation.windows=0",
        "checkpoint.keep_latest_k=1",
        "checkpoint.max_held=-3",
        "samples.interval=-1",
        "samples.max_tokens=0",
        "samples.temperature=nan",
    ],
    "config.schedule": [
        "lr_scheduler.warmup_steps 13",
        "lr_scheduler.decay_ratio .9",
        "lr_scheduler.decay_steps 5 --lr_scheduler.decay_ratio .1",
        "lr_scheduler.decay_steps 5 --lr_scheduler.total_steps 30",
        "lr_scheduler.warmup_steps 31 --lr_scheduler.total_steps 30",
        "lr_scheduler.decay_ratio .95 --lr_scheduler.total_steps 24",
        "lr_scheduler.total_steps 11",
    ],
    "model.canon_set": ["model.canon_set ABE"],
    "model.unknown_flavor": ["model.flavor 1b4"],
    "attention.unsupported": ["model.attention_backend flash_attn --model.position h_alibi"],
    "data.weights": ["data.paths a b --data.weights 1 0"],
    "data.order": [
        "data.paths a b --data.weights 1 2 --data.order permute",
        "data.paths a b --data.weights 1 2 --data.order documents",
    ],
}


@pytest.mark.parametrize(
    ("code", "options"), [(code, options) for code, rows in REFUSED.items() for options in rows]
)
def test_what_makes_no_sense_is_refused(code, options):
    with refused(code) as caught:
        parse_job(["--config", DEBUG, *f"--{options}".split(" ")])
    if code == "config.invalid_value":
        key, _, _ = options.partition("=")
        assert caught.value.fields["key"] == key


@pytest.mark.parametrize(
    ("code", "options", "hint"),
    [
        ("config.unknown_key", "--training.stepz 3", "--training.steps"),
        # the short help omits these
        ("config.unknown_key", "--comm.trace-buf-sise=2", "--comm.trace_buf_size"),
        ("config.unknown_key", "--quantize.linear.mx.recipe 2", "--quantize.linear.mx.recipe_name"),
        ("config.unknown_key", "--foo", ""),
        ("config.unknown_key", "--lr 1e-3", "--optimizer.lr"),
        ("config.unknown_key", "--learning_rate 1e-3", "--optimizer.lr"),
        ("config.unknown_key", "--learning-rate=1e-3", "--optimizer.lr"),
        ("config.unknown_key", "--steps 3", "--training.steps"),
        ("config.unknown_key", "--training.batch_size 3", "--training.global_batch_size"),
        ("config.unknown_key", "--nodes 2", "--nnodes"),
        ("config.unknown_key", "--gpus 2", "--nproc-per-node"),
        ("config.invalid_value", "--training.steps many", "--training.steps"),
        ("config.invalid_value", "--training.steps", "--training.steps"),
        ("config.invalid_value", "positional", "positional"),
        ("option.invalid", "--config", ""),
        ("config.unknown_choice", "--model.position ropee", "rope"),
        ("config.unknown_choice", "--model.mixer mamba", "mamba2"),
    ],
)
def test_a_wrong_override_names_the_nearest_key(code, options, hint):
    with refused(code) as caught:
        parse_job(["--config", DEBUG, *options.split()])
    assert hint in caught.value.message


def help_text(capsys, option, quiet=False):
    """Return what the option prints; check that it exits with 0."""
    with pytest.raises(SystemExit) as exit_info:
        parse_job(["--config", DEBUG, option], quiet=quiet)
    assert exit_info.value.code == 0
    return capsys.readouterr().out


def test_help_shows_the_files_values(capsys):
    """Short by default, all keys by --help-all, nothing if quiet."""
    assert re.search(r"--training\.steps N .* \[12\]\n", help_text(capsys, "-h"))
    assert "--comm.trace-buf-size" in help_text(capsys, "--help-all")
    assert help_text(capsys, "-h", quiet=True) == ""


def test_the_short_help_has_keys_of_the_config():
    keys = re.findall(r"^ +--(\w+\.[\w.]+)", SHORT_HELP.read_text(), re.MULTILINE)
    assert len(keys) > 35
    for key in keys:
        value_of(CanonJobConfig(), key)  # raises for an unknown one


STEPS = 20
WARMUP = 3
FLOOR = 0.1


def job_of(**schedule):
    """Return a job of 20 steps at a rate of 1 with these keys of [lr_scheduler]."""
    values = {"min_lr_factor": FLOOR, "warmup_steps": WARMUP} | schedule
    return parse_job([
        *("--config", DEBUG),
        f"--training.steps={STEPS}",
        "--optimizer.lr=1",
        *(f"--lr_scheduler.{name}={value}" for name, value in values.items()),
    ])  # fmt: skip


def rates(job, count=STEPS):
    """Return the rates of the first `count` steps."""
    model = torch.nn.Linear(2, 2)
    optimizers = OptimizersContainer([model], torch.optim.AdamW, {"lr": job.optimizer.lr})
    schedule = build_schedule(optimizers, job.lr_scheduler, job.training.steps)
    rates_of_steps = []
    for _ in range(count):
        rates_of_steps.append(schedule.schedulers[0].get_last_lr()[0])
        optimizers.step()
        schedule.step()
    return rates_of_steps


SHAPES: dict[str, Callable[[float], float]] = {
    "linear": lambda progress: 1 - progress,
    "cosine": lambda progress: (1 + math.cos(math.pi * progress)) / 2,
    "sqrt": lambda progress: 1 - progress**0.5,
}


def expected_rate(step, begin, length, shape):
    """Return warmup over 3 steps, 1 up to step `begin` (from 0), then decay over `length` steps."""
    if step < WARMUP:
        return (step + 1) / WARMUP
    progress = min(max(0, step - begin) / length, 1)
    return FLOOR + (1 - FLOOR) * shape(progress)


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize(
    ("schedule", "begin", "length"),
    [
        ({}, WARMUP, STEPS - WARMUP),
        ({"decay_ratio": 0.85}, WARMUP, STEPS - WARMUP),  # the longest that fits
        ({"decay_ratio": 0.2}, STEPS - 4, 4),  # WSD
        ({"decay_steps": 8}, WARMUP, 8),  # then it stays at its floor
    ],
)
def test_the_rate_of_each_step(name, schedule, begin, length):
    job = job_of(decay_type=name, **schedule)
    expected = [expected_rate(step, begin, length, SHAPES[name]) for step in range(STEPS)]
    assert rates(job) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("schedule", "is_equal"),
    [
        pytest.param({"decay_ratio": 0.25}, True, id="WSD"),
        pytest.param({"decay_steps": 8}, True, id="InfiniteLR"),
        pytest.param({}, False, id="cosine"),
    ],
)
def test_a_run_prolonged_at_a_stable_rate_is_the_longer_run(schedule, is_equal):
    """WSD and InfiniteLR do not depend on the run's length there; a cosine does."""
    short = job_of(**schedule)
    long = job_of(**schedule)
    long.training.steps = 40
    assert (rates(long, 15) == rates(short, 15)) is is_equal


def test_a_config_without_its_option_is_suggested():
    with refused("option.missing") as caught:
        parse_job(["mine.toml"])
    assert "--config mine.toml" in str(caught.value)


def test_the_synonyms_of_other_trainers_name_keys():
    keys = dict(dotted(CanonJobConfig().to_dict())).keys()
    assert SYNONYMS.keys() <= keys
