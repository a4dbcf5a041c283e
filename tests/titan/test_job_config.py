"""The job: what a file and a command line come to, and what is refused."""

import ast
import dataclasses
import re

import pytest

from canon_pretrain.core.errors import UserError
from canon_pretrain.model.args import FLAVORS
from canon_pretrain.titan.command_line import parse_job
from canon_pretrain.titan.job_config import CanonJobConfig, micro_batch_size, shard_degree
from tests.support import ROOT

DEBUG = str(ROOT / "train_configs" / "debug.toml")


def test_the_command_line_wins_over_the_file():
    words = "--training.steps 7 --model.canon-set=ca --run.stop_at 3 --compile.enable".split()
    job = parse_job(["--config", DEBUG, *words])
    assert (job.training.steps, job.run.stop_at, job.compile.enable) == (7, 3, True)
    assert job.model_args.canon_set == "AC"
    assert job.optimizer.lr == 3e-3  # the file's
    assert parse_job([f"--job.config_file={DEBUG}"]).training.steps == 12


def test_defaults_are_the_papers_and_not_torchtitans():
    """spec/model.md, "Training settings": torchtitan's own defaults are never relied on."""
    job = CanonJobConfig()
    optimizer, schedule = job.optimizer, job.lr_scheduler
    assert (optimizer.name, optimizer.beta1, optimizer.beta2) == ("AdamW", 0.9, 0.98)
    assert (optimizer.eps, optimizer.weight_decay) == (1e-6, 0.03)
    assert (schedule.warmup_steps, schedule.decay_type, schedule.min_lr_factor) == (
        1000,
        "cosine",
        0.1,
    )
    assert job.checkpoint.enable
    assert not job.checkpoint.last_save_model_only
    assert job.activation_checkpoint.mode == "none"


def test_every_model_key_reaches_the_model():
    text = "vocab_size=77 num_layers=3 dim=128 num_heads=8 num_kv_heads=4 ffn_dim=96 bias=True "
    text += "ffn='standard' ffn_activation='gelu' norm='layernorm' norm_eps=1e-6 canon_set='BD' "
    text += "position='partial_rope_c' partial_rope_dim=6 rope_theta=500.0 canon_kernel=3 eos_id=3 "
    text += "canon_residual=False canon_activation=True canon_trainable=False init='lingua' "
    text += "tie_embeddings=True document_mask=True qk_norm='per_head' init_seed=9 flavor='162M'"
    words = [f"--model.{word}".replace("'", "") for word in text.split()]
    job = parse_job(["--config", DEBUG, *words])
    values = {k: ast.literal_eval(v) for k, v in (word.split("=") for word in text.split())}
    base = FLAVORS[values.pop("flavor")]
    assert values.keys() == vars(job.model).keys() & vars(base).keys()
    assert job.model_args == dataclasses.replace(base, max_seq_len=job.training.seq_len, **values)


@pytest.mark.parametrize("world_size", [1, 3, 16, 48])
@pytest.mark.parametrize("bound", [1, 5, 100])
def test_micro_batches_always_make_up_the_global_batch(world_size, bound):
    job = CanonJobConfig()
    job.training.global_batch_size = 48
    job.training.local_batch_size = bound
    size = micro_batch_size(job, world_size)
    assert 1 <= size <= bound
    assert 48 % (size * world_size) == 0
    larger = range(size + 1, bound + 1)
    assert not any(48 % (other * world_size) == 0 for other in larger)


def test_a_world_size_that_does_not_divide_names_the_ones_that_do():
    job = CanonJobConfig()
    job.training.global_batch_size = 12
    with pytest.raises(UserError, match=r"12 can't be shared by 5 ranks.*: 1, 2, 3, 4, 6, 12$"):
        micro_batch_size(job, 5)
    job.parallelism.data_parallel_replicate_degree = 4
    assert [shard_degree(job, ranks) for ranks in (4, 12)] == [1, 3]
    with pytest.raises(UserError, match=r"6 ranks can't be that many.*: 4, 12$"):
        shard_degree(job, 6)


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("run.stop_at 13", "run.stop_at = 13"),
        ("lr_scheduler.warmup_steps 13", "warmup_steps = 13"),
        ("parallelism.tensor_parallel_degree 2", "parallelism.tensor_parallel_degree = 2"),
        ("parallelism.data_parallel_shard_degree 2", "parallelism.data_parallel_shard_degree = 2"),
        ("validation.dataset x", "validation.dataset = 'x'"),
        ("model.converters float8", "model.converters = "),
        ("training.dataset c4", "training.dataset = 'c4'"),
        ("checkpoint.last_save_model_only", "checkpoint.last_save_model_only = True"),
        ("checkpoint.keep_latest_k 1", "checkpoint.keep_latest_k = 1"),
        ("checkpoint.no-enable --run.stop_at 3", "checkpoint.enable"),
        ("checkpoint.fresh --checkpoint.load_step 3", "checkpoint.load_step = 3"),
        ("loss.z_loss 1e-4 --loss.squared_loss 1e-4", "loss.squared_loss = 0.0001"),
        ("validation.windows 0", "validation.windows = 0"),
        ("validation.steps 5", "validation.steps = 5"),
        ("profiling.enable_profiling --profiling.profile_freq 3", "profile_freq = 3"),
        ("model.name llama3", "'llama3'"),
        ("model.canon_set ABE", '"ABE"'),
        ("model.flavor 1b4", '"1b4"'),
        ("model.attention_backend flash_attn --model.position h_alibi", '"flash_attn"'),
        ("model.position ropee", 'Did you mean "rope"'),
        ("data.path a --data.paths b --data.weights 1", "data.path = 'a' and data.paths"),
        ("data.paths a b", "data.weights has 0"),
        ("data.path a --data.weights 1", "data.weights has 1"),
        ("data.paths a b --data.weights 1 0", "data.weights has 0"),
        ("data.paths a b --data.weights 1 2 --data.order permute", "'permute' takes one"),
        ("data.read_ahead=-1", "data.read_ahead = -1"),
        ("lr_scheduler.decay_steps 5 --lr_scheduler.decay_ratio .1", "unset decay_ratio"),
        ("lr_scheduler.decay_steps 5 --lr_scheduler.total_steps 30", "and total_steps"),
        ("lr_scheduler.warmup_steps 31 --lr_scheduler.total_steps 30", "fit into total_steps"),
        ("lr_scheduler.total_steps 11", "total_steps = 11 is less than training.steps = 12"),
        ("lr_scheduler.decay_ratio .9", "a decay of 11 steps"),
        ("lr_scheduler.decay_ratio .95 --lr_scheduler.total_steps 24", "a decay of 23 steps"),
    ],
)
def test_what_makes_no_sense_is_refused(words, named):
    with pytest.raises(UserError, match=re.escape(named)):
        parse_job(["--config", DEBUG, *f"--{words}".split()])


@pytest.mark.parametrize(
    "words",
    [
        *("optimizer.lr nan", "optimizer.beta1 nan", "optimizer.beta1 -0.1", "optimizer.beta2 1"),
        *("comm.init_timeout_seconds 0", "comm.train_timeout_seconds -5"),
        *("comm.train_timeout_seconds 1000000000000000", "training.gc_freq 0"),
        *("training.steps 0", "training.steps 1000000000000000000000000000000"),
        *("training.global_batch_size -1", "training.global_batch_size 1000000000000000000"),
        *("lr_scheduler.warmup_steps -3", "lr_scheduler.decay_steps 0"),
        *("lr_scheduler.decay_ratio 0", "lr_scheduler.decay_ratio 1.01"),
        *("lr_scheduler.decay_ratio nan", "loss.z_loss -1", "loss.squared_loss nan"),
        *("loss.chunk_tokens -1", "parallelism.data_parallel_replicate_degree 0"),
        *("data.data_seed -1", "validation.freq 0", "checkpoint.max_held -3"),
        *("run.heartbeat_s inf", "run.heartbeat_s nan", "run.heartbeat_s 0"),
        *("guards.outlier_sigma 0", "activation_checkpoint.memory_budget 2", "job.dump_folder "),
        *("job.dump_folder ~/x", "job.dump_folder a\0b", "checkpoint.folder ~me/x"),
    ],
)
def test_a_value_outside_its_range_is_named(words):
    """Issue 17, item 25."""
    name, _, value = words.partition(" ")
    with pytest.raises(UserError, match=re.escape(f"{name} = ")):
        parse_job(["--config", DEBUG, f"--{name}={value}"])


@pytest.mark.parametrize("words", [["--training.stepz", "3"], ["--training.steps", "many"]])
def test_a_wrong_override_suggests_and_exits_with_2(words, capsys):
    with pytest.raises(SystemExit) as left:
        parse_job(["--config", DEBUG, *words])
    assert left.value.code == 2
    assert "--training.steps" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        parse_job(["--config", DEBUG, *words], quiet=True)
    printed = capsys.readouterr()
    assert printed.out + printed.err == ""
