"""The job: the file and the command line merged, its checks, and --help."""

import ast
import dataclasses
import re

import pytest

from canon_pretrain.model.args import FLAVORS
from canon_pretrain.titan.command_line import SHORT_HELP, parse_job
from canon_pretrain.titan.job_config import CanonJobConfig, micro_batch_size, shard_degree, value_of
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


def test_defaults_are_the_papers_and_not_torchtitans():
    """Those of rope.toml, which tests/test_train_configs.py compares with the paper."""
    job, paper = CanonJobConfig(), parse_job(["--config", str(ROOT / "train_configs/rope.toml")])
    assert (job.optimizer, job.lr_scheduler) == (paper.optimizer, paper.lr_scheduler)
    assert job.checkpoint.enable and not job.checkpoint.last_save_model_only
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


REFUSED = {
    "config.conflict": [
        *("run.stop_at 13", "checkpoint.no-enable --run.stop_at 3"),
        *("checkpoint.fresh --checkpoint.load_step 3", "data.paths a b"),
        "loss.z_loss 1e-4 --loss.squared_loss 1e-4",
        "profiling.enable_profiling --profiling.profile_freq 3",
        *("data.path a --data.paths b --data.weights 1", "data.path a --data.weights 1"),
        *("job.dump_folder=", "job.dump_folder=~/x", "checkpoint.folder=a\0b"),
    ],
    "config.unsupported": [
        *("parallelism.tensor_parallel_degree 2", "parallelism.data_parallel_shard_degree 2"),
        *("validation.dataset x", "validation.steps 5", "model.converters float8"),
        *("training.dataset c4", "checkpoint.last_save_model_only", "model.name llama3"),
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
    with refused(code):
        parse_job(["--config", DEBUG, *f"--{words}".split(" ")])


@pytest.mark.parametrize(
    "words",
    [
        *("optimizer.lr nan", "optimizer.beta1 -0.1", "optimizer.beta2 1", "training.steps 0"),
        *("comm.init_timeout_seconds 0", "comm.train_timeout_seconds 1000000000000000"),
        *("training.gc_freq 0", "training.global_batch_size 1000000000000000000"),
        *("lr_scheduler.warmup_steps -3", "lr_scheduler.decay_ratio 1.01", "loss.z_loss -1"),
        *("loss.chunk_tokens -1", "parallelism.data_parallel_replicate_degree 0"),
        *("data.data_seed -1", "data.read_ahead -1", "validation.freq 0", "run.heartbeat_s inf"),
        *("guards.outlier_sigma 0", "activation_checkpoint.memory_budget 2"),
        *("validation.windows 0", "checkpoint.keep_latest_k 1", "checkpoint.max_held -3"),
    ],
)
def test_a_value_outside_its_range_is_named(words):
    name, _, value = words.partition(" ")
    with refused("config.invalid_value", key=name):
        parse_job(["--config", DEBUG, f"--{name}={value}"])


@pytest.mark.parametrize(
    ("code", "words", "hint"),
    [
        ("config.unknown_key", "--training.stepz 3", "--training.steps"),
        # the short help omits these
        ("config.unknown_key", "--comm.trace-buf-sise=2", "--comm.trace_buf_size"),
        ("config.unknown_key", "--quantize.linear.mx.recipe 2", "--quantize.linear.mx.recipe_name"),
        ("config.unknown_key", "--foo", ""),
        ("config.invalid_value", "--training.steps many", "--training.steps"),
        ("config.invalid_value", "--training.steps", "--training.steps"),
        ("config.invalid_value", "positional", "positional"),
        ("option.invalid", "--config", ""),
        ("config.unknown_choice", "--model.position ropee", "rope"),
    ],
)
def test_a_wrong_override_names_the_nearest_key(code, words, hint):
    with refused(code) as caught:
        parse_job(["--config", DEBUG, *words.split()])
    assert hint in caught.value.message


def test_help_shows_the_files_values(capsys):
    """Short by default, all keys by --help-all, nothing if quiet; all exit with 0."""
    keys = re.findall(r"^ +--(\w+\.\w+)", SHORT_HELP.read_text(), re.MULTILINE)
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
