"""Every experiment parses, builds, states only what it changes, and marks what is assumed."""

import itertools
import math
import re
import tomllib
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, Mamba2Config

from canon_pretrain.model.args import CANON_SITES, CHOICES, MIXERS, ROTARY, ModelArgs
from canon_pretrain.model.counts import layer_parameters, num_parameters, state_size
from canon_pretrain.model.init import initial_value
from canon_pretrain.model.transformer import Transformer, TransformerBlock
from canon_pretrain.run.config import build, merge, read_experiment
from canon_pretrain.run.sections import Loss
from canon_pretrain.titan.command_line import parse_job
from canon_pretrain.titan.job_config import CanonJobConfig, check_job
from tests.ranks import flat
from tests.support import ROOT

FOLDER = ROOT / "train_configs"
ALL = sorted(p for p in FOLDER.rglob("*.toml") if "boards" not in p.parts)
EXPERIMENTS = [p for p in ALL if p.parent.name != "base"]


def name_of(path):
    return str(path.relative_to(FOLDER).with_suffix(""))


def job_of(name):
    return parse_job(["--config", str(FOLDER / f"{name}.toml")])


@pytest.mark.parametrize("path", ALL, ids=name_of)
def test_a_file_states_only_what_it_changes(path):
    with open(path, "rb") as file:
        content = tomllib.load(file)
    bases = content.pop("extends", [])
    parents = [path.parent / base for base in ([bases] if isinstance(bases, str) else bases)]

    inherited: dict[str, Any] = {}
    for parent in parents:
        inherited |= flat(read_experiment(parent))
    for key, value in flat(content).items():
        assert key not in inherited or inherited[key] != value, key

    # it differs from its first parent in more than [job]
    if parents:
        first = flat(read_experiment(parents[0]))
        merged = flat(read_experiment(path))
        changed = [key for key, value in merged.items() if first.get(key) != value]
        assert [key for key in changed if not key.startswith("job.")]


def test_no_two_experiments_are_one_or_share_a_run_folder():
    jobs = [parse_job(["--config", str(path)]) for path in EXPERIMENTS]

    folders = [job.job.dump_folder for job in jobs]
    assert len(set(folders)) == len(folders)

    experiments = [
        (job.model_args, job.data, job.optimizer.lr, job.training.steps, job.training.seq_len)
        for job in jobs
    ]
    for one, other in itertools.combinations(experiments, 2):
        assert one != other


@pytest.mark.parametrize(
    ("name", "position", "canon_set", "residual"),
    [
        ("rope", "rope", "", True),
        ("nope", "nope", "", True),
        ("rope_canon", "rope", "ABCD", True),
        ("nope_canon", "nope", "ABCD", True),
        ("partial_rope_canon", "partial_rope_a", "ABCD", True),
        ("canon_a", "rope", "A", True),
        ("canon_ac", "rope", "AC", True),
        ("canon_b", "rope", "B", True),
        ("canon_abcd_nores", "rope", "ABCD", False),
        ("gpt2_rope", "rope", "", True),
        ("gpt2_rope_r2", "rope", "", True),
    ],
)
def test_the_1b3_runs_differ_in_the_architecture_alone(name, position, canon_set, residual):
    job = job_of(name)

    args = job.model_args
    assert (args.position, args.canon_set, args.canon_residual) == (position, canon_set, residual)
    # appendix C: 8D/3 where it is gated, else 4D
    ffn = {"gpt2_rope": ("standard", "silu"), "gpt2_rope_r2": ("standard", "relu2")}
    assert (args.ffn, args.ffn_activation) == ffn.get(name, ("gated", "silu"))
    ffn_dim = 8192 if args.ffn == "standard" else 5504
    assert (args.dim, args.num_layers, args.num_heads, args.ffn_dim) == (2048, 24, 32, ffn_dim)

    rope = job_of("rope")
    for section in ("training", "optimizer", "lr_scheduler", "data", "loss"):
        assert getattr(job, section) == getattr(rope, section)


def test_the_1b3_runs_have_the_papers_training():
    job = job_of("rope")

    training = job.training
    assert (training.global_batch_size, training.seq_len, training.steps) == (48, 4096, 510_000)

    optimizer = job.optimizer
    assert (optimizer.lr, optimizer.beta1, optimizer.beta2) == (1e-3, 0.9, 0.98)
    assert (optimizer.name, optimizer.eps, optimizer.weight_decay) == ("AdamW", 1e-6, 0.03)

    schedule = job.lr_scheduler
    assert (schedule.warmup_steps, schedule.decay_type) == (1000, "cosine")
    assert schedule.min_lr_factor == 0.1

    assert job.data.path == "data/fineweb_edu"


SLIMPAJAMA = [
    path.stem.removeprefix("slimpajama_")
    for path in sorted(FOLDER.glob("slimpajama_*.toml"))
    if (FOLDER / f"{path.stem.removeprefix('slimpajama_')}.toml").exists()
]


@pytest.mark.parametrize("name", SLIMPAJAMA)
def test_the_runs_on_slimpajama_differ_in_the_data_alone(name):
    job = job_of(f"slimpajama_{name}")
    fineweb = job_of(name)

    assert job.data.path == "data/slimpajama"
    for section in ("model_args", "training", "optimizer", "lr_scheduler", "loss"):
        assert getattr(job, section) == getattr(fineweb, section)


@pytest.mark.parametrize(
    ("name", "mixer", "canon_set", "conv", "sizes"),
    [
        ("gla", "gla", "", False, (24, 4, 5504)),
        ("gla_canon", "gla", "ABCD", False, (24, 4, 5504)),
        ("mamba2", "mamba2", "", True, (48, 16, 0)),
        ("mamba2_noconv", "mamba2", "", False, (48, 16, 0)),
        ("mamba2_canon", "mamba2", "AB", False, (48, 16, 0)),
        ("mamba2_canon_nores", "mamba2", "AB", False, (48, 16, 0)),
        ("mamba2_mlp", "mamba2", "", True, (24, 16, 4096)),
        ("mamba2_mlp_canon", "mamba2", "ABCD", False, (24, 16, 4096)),
        ("gated_deltanet", "gated_deltanet", "", True, (24, 12, 4096)),
        ("gated_deltanet_canon", "gated_deltanet", "ABCD", False, (24, 12, 4096)),
    ],
)
def test_the_linear_runs_are_those_of_figure_17(name, mixer, canon_set, conv, sizes):
    """On both corpora; they differ from Llama's in the architecture alone.

    One is without residual links, as section 7 recommends.
    """
    llama = job_of("nope")
    jobs = (job_of(name), job_of(f"slimpajama_{name}"))

    assert [job.data.path for job in jobs] == ["data/fineweb_edu", "data/slimpajama"]
    for job in jobs:
        args = job.model_args
        assert (args.mixer, args.canon_set, args.mixer_conv) == (mixer, canon_set, conv)
        assert (args.canon_residual, args.init) == (not name.endswith("_nores"), "paper")
        ffn_dim = 0 if args.ffn == "none" else args.ffn_dim
        assert (args.dim, args.num_layers, args.num_heads, ffn_dim) == (2048, *sizes)

        training = replace(job.training, local_batch_size=llama.training.local_batch_size)
        assert training == llama.training
        for section in ("optimizer", "lr_scheduler", "loss"):
            assert getattr(job, section) == getattr(llama, section)
    assert jobs[0].model_args == jobs[1].model_args


def tokens_of(job):
    """Return the number of tokens that a job trains on."""
    return job.training.steps * job.training.global_batch_size * job.training.seq_len


def test_the_run_on_300b_tokens():
    job = job_of("slimpajama_300b_canon")

    assert tokens_of(job) == pytest.approx(301.5e9, 1e-3)
    assert job.training.seq_len == 4096
    # the stream of the other runs on SlimPajama has a third of these tokens
    assert job.data.path == "data/slimpajama_300m"
    args = job.model_args
    assert (args.dim, args.num_heads, args.ffn_dim) == (2304, 24, 6144)


def test_the_released_run():
    job = job_of("released_1b")

    args = job.model_args
    assert (args.ffn_dim, args.rope_share, args.rope_dim) == (5632, 1, 16)
    assert (args.qk_norm, args.init) == ("full", "lingua")

    optimizer = job.optimizer
    assert (optimizer.lr, optimizer.beta2, optimizer.eps) == (2e-3, 0.95, 1e-8)
    assert (optimizer.weight_decay, job.training.max_norm) == (0.02, 1)
    assert (job.lr_scheduler.warmup_steps, job.lr_scheduler.min_lr_factor) == (8000, 0.01)
    assert tokens_of(job) == 1_006_632_960_000
    assert (job.loss.z_loss, job.loss.squared_loss) == (0, 1e-4)


@pytest.mark.parametrize("name", ["rope", "slimpajama_300b", "tiny/llama"])
def test_other_runs_have_the_plain_loss(name):
    assert job_of(name).loss == Loss()


def test_the_custom_run():
    args = job_of("custom_canon_162m").model_args
    assert (args.num_layers, args.dim, args.num_heads, args.ffn_dim) == (16, 768, 8, 2048)
    assert (args.position, args.canon_set, args.qk_norm) == ("nope", "A", "per_head")


def test_the_custom_runs_baseline_differs_in_what_is_listed():
    custom = job_of("custom_canon_162m")
    baseline = job_of("custom_llama_162m")

    listed = {"position": "rope", "canon_set": "", "qk_norm": "none"}
    assert baseline.model_args == replace(custom.model_args, **listed)
    for section in ("training", "optimizer", "lr_scheduler", "data", "loss", "validation"):
        assert getattr(baseline, section) == getattr(custom, section)


@cache
def variants():
    """Return (name, ModelArgs, cells after them) of each row of the tables of variants."""
    text = (ROOT / "canon_pretrain" / "model" / "README.md").read_text()
    tables = text.split("| the paper's row |")[1:]
    rows = []
    for base, table in zip(("rope", "nope"), tables, strict=True):
        experiment = read_experiment(FOLDER / f"{base}.toml")
        for line in table.partition("\n\n")[0].splitlines()[2:]:
            name, _, toml, *cells = (cell.strip() for cell in line.strip("|").split("|"))
            model = tomllib.loads("\n".join(re.findall("`([^`]+)`", toml)))
            job = build(CanonJobConfig, merge(experiment, {"model": model}), source=name)
            check_job(job)
            rows.append((name, job.model_args, cells))
    return rows


def test_rows_of_the_readme_have_the_stated_sizes():
    """As the model built with one layer."""
    for name, args, (count, *per_layer) in variants():
        assert num_parameters(args) == int(count.replace(",", "")), name
        for cell in per_layer:
            assert cell == f"{layer_parameters(args) / args.dim**2:.3f} D^2", name

        one_layer = replace(args, num_layers=1)
        with torch.device("meta"):
            model = Transformer(one_layer)
        assert sum(p.numel() for p in model.parameters()) == num_parameters(one_layer), name


VARIED_OPTIONS = (
    "canon_residual",
    "canon_activation",
    "canon_trainable",
    "canon_kernel",
    "qk_norm",
    "num_kv_heads",
    "mixer_conv",
    "mimetic_init",
    "mimetic_rate",
    "output_gate_rank",
    "allow_neg_eigval",
    "embed_norm",
    "relative_dim",
    "relative_extent",
    "smear",
    "tie_embeddings",
    "document_mask",
)


def test_every_choice_has_a_row_in_the_readme():
    rows = [args for _, args, _ in variants()]
    for one, other in itertools.combinations(rows, 2):
        assert one != other

    assert {args.mixer for args in rows} == set(MIXERS)
    assert {site for args in rows for site in args.canon_set} >= set(CANON_SITES)
    options = ("position", "norm_place", "ffn", "canon_filter", "canon_scale", "gla_feature_map")
    for option in (*options, "attention_gate"):
        assert {getattr(args, option) for args in rows} == set(CHOICES[option]), option
    for option in VARIED_OPTIONS:
        assert len({getattr(args, option) for args in rows}) > 1, option

    feed_forwards = set(itertools.product(("gated", "standard"), CHOICES["ffn_activation"]))
    feed_forwards -= {("gated", "gelu")}
    assert {(args.ffn, args.ffn_activation) for args in rows} >= feed_forwards


def test_the_table_of_experiments_is_true():
    """Parameters and tokens, to the stated digits, of each row that names one file."""
    pattern = r"^\| `(\w+)` \|.*\| ([\d,]+) \| ([\d,.]+)([MB]?) \|$"
    rows = re.findall(pattern, (FOLDER / "README.md").read_text(), re.MULTILINE)
    assert len(rows) > 10

    for name, count, tokens, unit in rows:
        job = job_of(name)
        assert f"{num_parameters(job.model_args):,}" == count, name

        num_tokens = tokens_of(job) / {"M": 1e6, "B": 1e9}.get(unit, 1)
        digits = len(tokens.partition(".")[2])
        assert f"{num_tokens:,.{digits}f}" == tokens, name


# Parameters of a layer with d = 2048: a d^2 + b d + c. Appendix C, F = 5504 where it says 8d/3.
MATRICES = {
    ("attention", "gated"): (4 + 3 * 2.6875, 2, 0),
    ("attention", "moe"): (4 + 2 * 32, 2 + 32, 0),
    ("gla", "gated"): (0.5 + 0.5 + 1 + 1 + 1 + 3 * 2.6875, 2 + 16 * 1.5 + 0.5 + 0.25, 0),
    ("mamba2", "none"): (6, 144 + 1 + 2, 3 * 16),
    ("mamba2", "gated"): (6 + 6, 144 + 2 + 2, 3 * 16),
    ("gated_deltanet", "gated"): (6 + 6, 2 + 2 * 12, 2 * 12 + 256),
}


def is_in_appendix_c(name, args):
    """Return whether appendix C has the sizes of a row of the README."""
    if (args.mixer, args.ffn) not in MATRICES or "release" in name:
        return False
    if args.qk_norm != "none" or args.bias or args.num_kv_heads:
        return False
    if args.attention_gate != "none" or args.bias_extent:
        return False
    return args.canon_filter == "static" and not args.smear


def test_counts_are_those_of_appendix_c():
    """Section 7: Canon-B of Mamba2 has 4d + 144 channels; its conv1d has 2d + 128 and biases."""
    d = 2048
    qkv = {"attention": 3 * d, "gla": 2 * d, "mamba2": 4 * d + 144, "gated_deltanet": 3 * d}

    checked = set()
    for name, args, _ in variants():
        if not is_in_appendix_c(name, args):
            continue
        a, b, c = MATRICES[args.mixer, args.ffn]
        layer = a * d**2 + b * d + c

        if args.mixer_conv:
            layer += 5 * (2 * d + 128) if args.mixer == "mamba2" else 4 * qkv[args.mixer]
        channels = {"A": d, "B": qkv[args.mixer], "C": d, "D": 2 * args.ffn_dim, "O": d, "F": d}
        channels |= {"Q": d, "K": d, "V": d}  # of attention
        layer += args.canon_kernel * sum(channels[site] for site in args.canon_set)

        embeddings = (1 if args.tie_embeddings else 2) * 32000 * d
        assert num_parameters(args) == embeddings + d + args.num_layers * layer, name
        checked.add((args.mixer, args.ffn))
    assert checked == set(MATRICES)


# The release's 48 recipes (facebookresearch/PhysicsLM4, canon_linear_recipes): 3, 3 and 2 learning
# rates of each size, with and without Canon-ACD. Layers, d, heads, F, vocabulary:
RECIPES = {
    "1B": (24, 2048, 16, 4096, 32000),
    "3B": (26, 3072, 24, 6144, 32000),
    "8B": (32, 4096, 32, 9472, 128256),
}


def recipe_args(mixer, size):
    """Return the ModelArgs of a recipe: head_dim 128, expand_v 2, gates of rank 16, state 128."""
    num_layers, dim, num_heads, ffn_dim, vocab_size = RECIPES[size]
    args = ModelArgs(
        num_layers=num_layers,
        dim=dim,
        num_heads=num_heads,
        ffn_dim=ffn_dim,
        vocab_size=vocab_size,
        position="nope",
        mixer=mixer,
        mixer_conv=True,
    )
    if mixer == "mamba2":
        return replace(args, state_dim=128)
    return replace(args, expand_k=1.0, expand_v=2.0, output_gate_rank=16)


def recipe_shapes(mixer, size):
    """Return the shapes of a mixer's parameters by name, from the recipe's numbers."""
    _, d, heads, _, _ = RECIPES[size]
    if mixer == "mamba2":
        channels = 2 * d + 256
        return {
            "in_proj.weight": (2 * d + channels + heads, d),
            "conv1d.weight": (channels, 1, 4),
            "conv1d.bias": (channels,),
            "A_log": (heads,),
            "dt_bias": (heads,),
            "D": (heads,),
            "norm.weight": (2 * d,),
            "out_proj.weight": (d, 2 * d),
        }

    gates = {
        "gla": {"gk.down.weight": (16, d), "gk.up.weight": (d, 16), "gk.up.bias": (d,)},
        "gated_deltanet": {
            "wa.weight": (heads, d),
            "wb.weight": (heads, d),
            "A_log": (heads,),
            "dt_bias": (heads,),
        },
    }
    return gates[mixer] | {
        "wq.weight": (d, d),
        "wk.weight": (d, d),
        "wv.weight": (2 * d, d),
        "conv1d.weight": (4 * d, 1, 4),
        "wg.down.weight": (16, d),
        "wg.up.weight": (2 * d, 16),
        "wg.up.bias": (2 * d,),
        "o_norm.weight": (256,),
        "wo.weight": (d, 2 * d),
    }


@pytest.mark.parametrize("size", RECIPES)
@pytest.mark.parametrize("mixer", ["gla", "gated_deltanet", "mamba2"])
def test_the_releases_recipes_can_be_expressed(mixer, size):
    num_layers, d, _, ffn_dim, vocab_size = RECIPES[size]
    args = recipe_args(mixer, size)
    shapes = recipe_shapes(mixer, size)

    with torch.device("meta"):
        block = TransformerBlock(args, None, None)
    assert {name: tuple(p.shape) for name, p in block.attention.named_parameters()} == shapes

    feed_forward = 3 * d * ffn_dim
    norms = 2 * d
    layer = sum(map(math.prod, shapes.values())) + feed_forward + norms
    assert num_parameters(args) == num_layers * layer + (2 * vocab_size + 1) * d

    canon = num_parameters(replace(args, canon_set="ACD")) - num_parameters(args)
    assert canon == num_layers * 4 * (2 * d + 2 * ffn_dim)
    assert state_size(args) == 256 * d  # the release's table


@pytest.mark.parametrize("name", ["wg.down", "gk.up"])
def test_gates_of_low_rank_start_as_one_matrix(name):
    """The standard deviation of the product is that of one matrix: sqrt(0.02) / 16^(1/4) each."""
    shape = torch.Size(recipe_shapes("gla", "1B")[f"{name}.weight"])
    parameter = f"layers.0.attention.{name}.weight"

    value = initial_value(recipe_args("gla", "1B"), parameter, shape)

    assert value.scale == pytest.approx(0.02**0.5 / 2)


def papers_norm_eps(mixer):
    """Return the eps of LlamaConfig and of flash-linear-attention's configs, or of Mamba2Config."""
    assert LlamaConfig().rms_norm_eps == 1e-6
    return Mamba2Config().layer_norm_epsilon if mixer == "mamba2" else 1e-6


@pytest.mark.parametrize("path", EXPERIMENTS, ids=name_of)
def test_it_builds_with_the_norms_eps_and_rope_theta_written(path):
    """The paper's files use LlamaConfig's, the released recipe its code's."""
    name = name_of(path)
    job = job_of(name)
    args = job.model_args

    with torch.device("meta"):
        Transformer(replace(args, num_layers=1))
    assert job.job.description != "default job"
    if name in ("debug", "quickstart"):
        assert args.norm_eps == 1e-5  # as their golden losses
        return

    model = read_experiment(path)["model"]
    assert "norm_eps" in model
    if name.startswith(("tiny/", "playground/tiny/", "custom", "released")):
        assert args.norm_eps == 1e-5
    else:
        assert args.norm_eps == papers_norm_eps(args.mixer)

    assert "rope_theta" in model or args.position not in ROTARY
    assert args.rope_theta == 10000


# keys of each file with values that its source states
STATED = {
    "base/1b3": "flavor vocab_size seq_len global_batch_size steps name lr beta1 beta2 eps",
    "base/linear": "position canon_set",
    "mamba2": "mixer",
    "released_1b": "flavor position qk_norm norm_eps init global_batch_size local_batch_size steps "
    "lr beta2 eps weight_decay warmup_steps min_lr_factor squared_loss",
    "playground/base/playground": "flavor position canon_set mixed_precision_param name beta1 "
    "beta2 eps warmup_steps decay_type min_lr_factor",
    "playground/base/copy": "dim name n seq_len global_batch_size steps lr weight_decay",
    "playground/base/capo": "tie_embeddings name exposures loss_on lr weight_decay",
    "slimpajama_300b": "flavor global_batch_size steps",
    "custom_canon_162m": "flavor vocab_size position canon_set qk_norm",
    "custom_llama_162m": "position canon_set qk_norm",
    "tiny/llama": "flavor vocab_size position canon_set path seq_len global_batch_size lr "
    "warmup_steps decay_steps decay_type min_lr_factor",
}


@pytest.mark.parametrize("name", STATED)
def test_what_the_sources_leave_open_is_marked(name):
    """Each value is stated by its source (STATED), or marked as assumed or ours."""
    section = ""
    for line in (FOLDER / f"{name}.toml").read_text().splitlines():
        if line.startswith("["):
            section = line
        key, equals, value_and_comment = line.partition(" = ")
        is_setting = equals and not line.startswith("#")
        if not is_setting or section == "[job]" or key == "extends":
            continue

        if key not in STATED[name].split():
            assert "assumed" in value_and_comment or "# ours" in value_and_comment, line


TINY = [
    ("", "nope"),
    ("", "rope"),
    ("A", "rope"),
    ("AB", "rope"),
    ("ABCD", "nope"),
    ("ABCD", "rope"),
    ("AC", "rope"),
    ("B", "rope"),
    ("BD", "rope"),
]


def test_the_nine_runs_of_the_tiny_stories_ablation():
    jobs = [job_of(f"tiny/{path.stem}") for path in (FOLDER / "tiny").glob("*.toml")]

    assert sorted((job.model_args.canon_set, job.model_args.position) for job in jobs) == TINY
    for job in jobs:
        schedule = job.lr_scheduler
        assert (schedule.warmup_steps, schedule.decay_steps) == (500, 50_000)
        assert (schedule.decay_type, schedule.decay_ratio) == ("cosine", None)
        assert schedule.min_lr_factor == pytest.approx(0.1)
        assert job.optimizer.lr == 1e-3
        assert (job.training.global_batch_size, job.training.seq_len) == (32, 512)
        # one epoch of a tenth of the stories, a story a window
        assert job.data.order == "documents"
        num_stories = job.training.steps * job.training.global_batch_size
        assert num_stories == pytest.approx(2_119_719 / 10, abs=32)
