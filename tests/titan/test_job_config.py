"""The job: the file and the command line merged, its checks, --help, and the learning rate."""

import ast
import dataclasses
import math
import re
from collections.abc import Callable

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
    words = "--training.steps 7 --model.canon-set=ca --run.stop_at 3 --compile.enable".split()
    job = parse_job(["--config", DEBUG, *words])
    assert (job.training.steps, job.run.stop_at, job.compile.enable) == (7, 3, True)
    assert job.model_args.canon_set == "AC"
    assert job.optimizer.lr == 3e-3  # the file's
    assert parse_job([f"--job.config_file={DEBUG}"]).training.steps == 12
    with refused("option.missing"):
        parse_job([])


@pytest.mark.parametrize("word", ["=false", " false", " False"])
def test_an_optional_bool_is_written_as_in_toml(word):
    job = parse_job(["--config", DEBUG, *f"--model.document_mask{word}".split()])
    assert job.model.document_mask is False


def test_defaults_are_the_papers_and_not_torchtitans():
    """Those of rope.toml, which tests/test_train_configs.py compares with the paper."""
    job, paper = CanonJobConfig(), parse_job(["--config", str(ROOT / "train_configs/rope.toml")])
    assert (job.optimizer, job.lr_scheduler) == (paper.optimizer, paper.lr_scheduler)
    assert job.checkpoint.enable and not job.checkpoint.last_save_model_only
    assert job.activation_checkpoint.mode == "none"


EVERY_MODEL_KEY = (
    """vocab_size=77 num_layers=3 dim=128 num_heads=8 num_kv_heads=4 ffn_dim=96 bias=True
    ffn='standard' ffn_activation='gelu' norm='layernorm' norm_eps=1e-6 canon_set='BD'
    position='partial_rope_c' partial_rope_dim=6 rope_theta=500.0 canon_kernel=3 eos_id=3
    canon_residual=False canon_activation=True canon_trainable=False init='lingua'
    tie_embeddings=True document_mask=True qk_norm='per_head' init_seed=9 flavor='162M'""",
    """flavor='162M' mixer='gla' position='nope' num_heads=2 mixer_conv=True expand_k=1.0
    expand_v=2.0 output_gate_rank=16 gla_feature_map='elu' canon_set='A' canon_filter='dynamic'""",
    """flavor='162M' mixer='mamba2' position='nope' num_heads=2 mixer_conv=False state_dim=32
    mimetic_init=True canon_set='AB' ffn='moe' ffn_dim=96 num_experts=6 experts_per_token=2
    num_shared_experts=1 moe_gated=True moe_capacity=2. moe_balance='loss' moe_balance_rate=0.01""",
)


def test_every_model_key_reaches_the_model():
    names = set()
    for text in EVERY_MODEL_KEY:
        words = [f"--model.{word}".replace("'", "") for word in text.split()]
        job = parse_job(["--config", DEBUG, *words])
        values = {k: ast.literal_eval(v) for k, v in (word.split("=") for word in text.split())}
        base = dataclasses.replace(FLAVORS[values.pop("flavor")], max_seq_len=job.training.seq_len)
        assert job.model_args == dataclasses.replace(base, **values)
        names |= values.keys()
    assert names == vars(job.model).keys() & vars(base).keys()


@pytest.mark.parametrize("world_size", [1, 3, 16, 48])
def test_micro_batches_always_make_up_the_global_batch(world_size):
    job = CanonJobConfig()
    job.training.global_batch_size = 48
    for bound in (1, 5, 100):
        job.training.local_batch_size = bound
        size = micro_batch_size(job, world_size)
        assert 48 % (size * world_size) == 0 and 1 <= size <= bound
        assert not any(48 % (more * world_size) == 0 for more in range(size + 1, bound + 1))


def test_a_world_size_that_does_not_divide_names_valid_ones():
    job = CanonJobConfig()
    job.training.global_batch_size = 12
    with refused("config.world_size", given=5, valid=[1, 2, 3, 4, 6, 12]):
        micro_batch_size(job, 5)
    job.parallelism.data_parallel_replicate_degree = 4
    assert [shard_degree(job, ranks) for ranks in (4, 12)] == [1, 3]
    with refused("config.world_size", given=6, valid=[4, 12]):
        shard_degree(job, 6)


BESIDE_A_TASK = (
    *("data.path a", "data.paths a b --data.weights 1 1", "data.order permute"),
    *("validation.path a", "validation.windows=-1", "model.document_mask True"),
)
REFUSED = {
    "config.conflict": [
        *("run.stop_at 13", "checkpoint.no-enable --run.stop_at 3"),
        *("checkpoint.fresh --checkpoint.load_step 3", "data.paths a b"),
        "loss.z_loss 1e-4 --loss.squared_loss 1e-4",
        "profiling.enable_profiling --profiling.profile_freq 3",
        *("data.path a --data.paths b --data.weights 1", "data.path a --data.weights 1"),
        *("job.dump_folder=", "job.dump_folder=~/x", "checkpoint.folder=a\0b"),
        *(f"{words} --data.task.name copy" for words in BESIDE_A_TASK),
        *("data.task.n 8", "samples.interval 5"),
        "samples.interval 5 --samples.prompts a --data.task.name copy",
    ],
    "config.unknown_choice": ["data.task.name kopy"],
    "task.unknown_setting": ["data.task.name copy --data.task.k 8"],
    "task.setting": ["data.task.name copy --data.task.n 0"],
    "task.too_long": ["data.task.name copy --data.task.n 40"],
    "config.unsupported": [
        *("parallelism.tensor_parallel_degree 2", "parallelism.data_parallel_shard_degree 2"),
        *("validation.dataset x", "validation.steps 5", "model.converters float8"),
        *("training.dataset c4", "checkpoint.last_save_model_only", "model.name llama3"),
    ],
    "config.invalid_value": [
        *("optimizer.lr=nan", "optimizer.beta1=-0.1", "optimizer.beta2=1", "training.steps=0"),
        *("comm.init_timeout_seconds=0", "comm.train_timeout_seconds=1000000000000000"),
        *("training.gc_freq=0", "training.global_batch_size=1000000000000000000"),
        *("lr_scheduler.warmup_steps=-3", "lr_scheduler.decay_ratio=1.01", "loss.z_loss=-1"),
        *("loss.chunk_tokens=-1", "parallelism.data_parallel_replicate_degree=0"),
        *("data.data_seed=-1", "data.read_ahead=-1", "validation.freq=0", "run.heartbeat_s=inf"),
        *("guards.outlier_sigma=0", "activation_checkpoint.memory_budget=2"),
        *("validation.windows=0", "checkpoint.keep_latest_k=1", "checkpoint.max_held=-3"),
        *("samples.interval=-1", "samples.max_tokens=0", "samples.temperature=nan"),
    ],
    "config.schedule": [
        *("lr_scheduler.warmup_steps 13", "lr_scheduler.decay_ratio .9"),
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
    "data.order": ["data.paths a b --data.weights 1 2 --data.order permute"],
}


@pytest.mark.parametrize(
    ("code", "words"), [(code, words) for code, each in REFUSED.items() for words in each]
)
def test_what_makes_no_sense_is_refused(code, words):
    key = {"key": words.partition("=")[0]} if code == "config.invalid_value" else {}
    with refused(code, **key):
        parse_job(["--config", DEBUG, *f"--{words}".split(" ")])


@pytest.mark.parametrize(
    ("code", "words", "hint"),
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
def test_a_wrong_override_names_the_nearest_key(code, words, hint):
    with refused(code) as caught:
        parse_job(["--config", DEBUG, *words.split()])
    assert hint in caught.value.message


def test_help_shows_the_files_values(capsys):
    """Short by default, all keys by --help-all, nothing if quiet; all exit with 0."""
    keys = re.findall(r"^ +--(\w+\.[\w.]+)", SHORT_HELP.read_text(), re.MULTILINE)
    assert len(keys) > 35 and [value_of(CanonJobConfig(), key) for key in keys]
    printed = {}
    for word, quiet in (("-h", False), ("-h", True), ("--help-all", False)):
        with pytest.raises(SystemExit) as left:
            parse_job(["--config", DEBUG, word], quiet=quiet)
        assert left.value.code == 0
        printed[word, quiet] = capsys.readouterr().out
    assert re.search(r"--training\.steps N .* \[12\]\n", printed["-h", False])
    assert printed["-h", True] == ""
    assert "--comm.trace-buf-size" in printed["--help-all", False]


STEPS, WARMUP, FLOOR = 20, 3, 0.1


def job_of(**schedule):
    values = {"min_lr_factor": FLOOR, "warmup_steps": WARMUP} | schedule
    words = [f"--lr_scheduler.{name}={value}" for name, value in values.items()]
    return parse_job(["--config", DEBUG, f"--training.steps={STEPS}", "--optimizer.lr=1", *words])


def rates(job, count=STEPS):
    model = torch.nn.Linear(2, 2)
    optimizers = OptimizersContainer([model], torch.optim.AdamW, {"lr": job.optimizer.lr})
    schedule = build_schedule(optimizers, job.lr_scheduler, job.training.steps)
    out = []
    for _ in range(count):
        out.append(schedule.schedulers[0].get_last_lr()[0])
        optimizers.step()
        schedule.step()
    return out


SHAPES: dict[str, Callable[[float], float]] = {
    "linear": lambda progress: 1 - progress,
    "cosine": lambda progress: (1 + math.cos(math.pi * progress)) / 2,
    "sqrt": lambda progress: 1 - progress**0.5,
}


def expected(begin, length, shape, floor=FLOOR):
    """Return warmup over 3 steps, 1 up to step `begin` (from 0), then decay over `length` steps."""
    out = []
    for step in range(STEPS):
        progress = min(max(0, step - begin) / length, 1)
        rate = floor + (1 - floor) * shape(progress)
        out.append((step + 1) / WARMUP if step < WARMUP else rate)
    return out


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize(
    ("more", "begin", "length"),
    [
        ({}, WARMUP, STEPS - WARMUP),
        ({"decay_ratio": 0.85}, WARMUP, STEPS - WARMUP),  # the longest that fits
        ({"decay_ratio": 0.2}, STEPS - 4, 4),  # WSD
        ({"decay_steps": 8}, WARMUP, 8),  # then it stays at its floor
    ],
)
def test_the_rate_of_each_step(name, more, begin, length):
    found = rates(job_of(decay_type=name, **more))
    assert found == pytest.approx(expected(begin, length, SHAPES[name]))


def test_a_run_prolonged_at_a_stable_rate_is_the_longer_run():
    """WSD and InfiniteLR do not depend on the run's length there; a cosine does."""
    for schedule in ({"decay_ratio": 0.25}, {"decay_steps": 8}, {}):
        long = job_of(**schedule)
        long.training.steps = 40
        assert (rates(long, 15) == rates(job_of(**schedule), 15)) is bool(schedule)


def test_a_config_without_its_option_is_suggested():
    with refused("option.missing") as caught:
        parse_job(["mine.toml"])
    assert "--config mine.toml" in str(caught.value)


def test_the_synonyms_of_other_trainers_name_keys():
    known = {*dict(dotted(CanonJobConfig().to_dict()))}
    assert SYNONYMS.keys() <= known
