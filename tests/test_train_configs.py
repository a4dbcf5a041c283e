"""Every experiment parses, builds, states only what it changes, and marks what is assumed."""

import math
import re
import tomllib
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, Mamba2Config

from canon_pretrain.model.args import CHOICES, MIXERS, ROTARY, ModelArgs
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
ALL = sorted(p for p in FOLDER.rglob("*.toml") if p.parent.name != "boards")
EXPERIMENTS = [p for p in ALL if p.parent.name != "base"]


def name_of(path):
    return str(path.relative_to(FOLDER).with_suffix(""))


def job_of(name):
    return parse_job(["--config", str(FOLDER / f"{name}.toml")])


@pytest.mark.parametrize("path", ALL, ids=name_of)
def test_a_file_states_only_what_it_changes(path):
    with open(path, "rb") as file:
        own = tomllib.load(file)
    bases = own.pop("extends", [])
    inherited: dict[str, Any] = {}
    for base in [bases] if isinstance(bases, str) else bases:
        inherited |= flat(read_experiment(path.parent / base))
    repeated = {k: v for k, v in flat(own).items() if k in inherited and inherited[k] == v}
    assert not repeated
    if bases:  # it differs from its first parent in more than [job]
        first = path.parent / (bases if isinstance(bases, str) else bases[0])
        parent = flat(read_experiment(first))
        changed = {k: v for k, v in flat(read_experiment(path)).items() if parent.get(k) != v}
        assert [key for key in changed if not key.startswith("job.")]


def test_no_two_experiments_are_one_or_share_a_run_folder():
    jobs = [parse_job(["--config", str(path)]) for path in EXPERIMENTS]
    folders = [job.job.dump_folder for job in jobs]
    assert len(set(folders)) == len(folders)
    facts = [
        (job.model_args, job.data, job.optimizer.lr, job.training.steps, job.training.seq_len)
        for job in jobs
    ]
    assert all(facts[i] != facts[j] for i in range(len(facts)) for j in range(i))


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
    job, base = job_of(name), job_of("rope")
    args = job.model_args
    assert (args.position, args.canon_set, args.canon_residual) == (position, canon_set, residual)
    same = ("training", "optimizer", "lr_scheduler", "data", "loss")
    assert all(getattr(job, part) == getattr(base, part) for part in same)
    # appendix C: 8D/3 where it is gated, else 4D
    ffn = {"gpt2_rope": ("standard", "silu"), "gpt2_rope_r2": ("standard", "relu2")}
    assert (args.ffn, args.ffn_activation) == ffn.get(name, ("gated", "silu"))
    ffn_dim = 8192 if args.ffn == "standard" else 5504
    assert (args.dim, args.num_layers, args.num_heads, args.ffn_dim) == (2048, 24, 32, ffn_dim)
    training, optimizer = job.training, job.optimizer
    assert (training.global_batch_size, training.seq_len, training.steps) == (48, 4096, 510_000)
    assert (optimizer.lr, optimizer.beta1, optimizer.beta2) == (1e-3, 0.9, 0.98)
    assert (optimizer.name, optimizer.eps, optimizer.weight_decay) == ("AdamW", 1e-6, 0.03)
    schedule = (job.lr_scheduler.warmup_steps, job.lr_scheduler.min_lr_factor)
    assert (*schedule, job.lr_scheduler.decay_type) == (1000, 0.1, "cosine")
    assert job.data.path == "data/fineweb_edu"
    if (FOLDER / f"slimpajama_{name}.toml").exists():
        other = job_of(f"slimpajama_{name}")
        assert other.data.path == "data/slimpajama" and other.model_args == args
        assert all(getattr(other, part) == getattr(job, part) for part in same if part != "data")


@pytest.mark.parametrize(
    ("name", "mixer", "canon_set", "conv", "sizes"),
    [
        ("gla", "gla", "", False, (24, 4, 5504)),
        ("gla_canon", "gla", "ABCD", False, (24, 4, 5504)),
        ("mamba2", "mamba2", "", True, (48, 16, 0)),
        ("mamba2_noconv", "mamba2", "", False, (48, 16, 0)),
        ("mamba2_canon", "mamba2", "AB", False, (48, 16, 0)),
        ("mamba2_mlp", "mamba2", "", True, (24, 16, 4096)),
        ("mamba2_mlp_canon", "mamba2", "ABCD", False, (24, 16, 4096)),
        ("gated_deltanet", "gated_deltanet", "", True, (24, 12, 4096)),
        ("gated_deltanet_canon", "gated_deltanet", "ABCD", False, (24, 12, 4096)),
    ],
)
def test_the_linear_runs_are_those_of_figure_17(name, mixer, canon_set, conv, sizes):
    """On both corpora; they differ from Llama's in the architecture alone."""
    jobs, llama = (job_of(name), job_of(f"slimpajama_{name}")), job_of("nope")
    args = jobs[0].model_args
    found = args.mixer, args.canon_set, args.mixer_conv, args.canon_residual, args.init
    assert found == (mixer, canon_set, conv, True, "paper")
    ffn_dim = 0 if args.ffn == "none" else args.ffn_dim
    assert (args.dim, args.num_layers, args.num_heads, ffn_dim) == (2048, *sizes)
    assert [job.data.path for job in jobs] == ["data/fineweb_edu", "data/slimpajama"]
    for job in jobs:
        training = replace(job.training, local_batch_size=llama.training.local_batch_size)
        assert job.model_args == args and training == llama.training
        for part in ("optimizer", "lr_scheduler", "loss"):
            assert getattr(job, part) == getattr(llama, part)


def test_the_other_runs_of_the_specification():
    big = job_of("slimpajama_300b_canon")
    tokens = big.training.steps * big.training.global_batch_size * 4096
    assert tokens == pytest.approx(301.5e9, 1e-3)
    args = big.model_args
    assert (args.dim, args.num_heads, args.ffn_dim) == (2304, 24, 6144)
    released = job_of("released_1b")
    args, training = released.model_args, released.training
    assert (args.ffn_dim, args.rope_share, args.rope_dim) == (5632, 1, 16)
    assert (args.qk_norm, args.init) == ("full", "lingua")
    schedule, optimizer = released.lr_scheduler, released.optimizer
    assert (optimizer.lr, optimizer.beta2, optimizer.eps) == (2e-3, 0.95, 1e-8)
    assert (optimizer.weight_decay, training.max_norm) == (0.02, 1)
    assert (schedule.warmup_steps, schedule.min_lr_factor) == (8000, 0.01)
    assert training.steps * training.global_batch_size * training.seq_len == 1_006_632_960_000
    assert (released.loss.z_loss, released.loss.squared_loss) == (0, 1e-4)
    assert all(job_of(name).loss == Loss() for name in ("rope", "slimpajama_300b", "tiny/llama"))
    small = job_of("custom_canon_162m").model_args
    assert (small.num_layers, small.dim, small.num_heads, small.ffn_dim) == (16, 768, 8, 2048)
    assert (small.position, small.canon_set, small.qk_norm) == ("nope", "A", "per_head")


@cache
def variants():
    """Return (name, ModelArgs, cells after them) of each row of the tables of variants."""
    text = (ROOT / "canon_pretrain" / "model" / "README.md").read_text()
    rows = []
    for base, table in zip(("rope", "nope"), text.split("| the paper's row |")[1:], strict=True):
        experiment = read_experiment(FOLDER / f"{base}.toml")
        for line in table.partition("\n\n")[0].splitlines()[2:]:
            name, _, toml, *cells = (cell.strip() for cell in line.strip("|").split("|"))
            model = tomllib.loads("\n".join(re.findall("`([^`]+)`", toml)))
            job = build(CanonJobConfig, merge(experiment, {"model": model}), source=name)
            check_job(job)
            rows.append((name, job.model_args, cells))
    return rows


def test_the_readmes_tables_are_true():
    """Each row has the stated size, as the model built with one layer; every choice has a row."""
    seen = list[ModelArgs]()
    for name, args, (count, *per_layer) in variants():
        assert num_parameters(args) == int(count.replace(",", "")), name
        for cell in per_layer:
            assert cell == f"{layer_parameters(args) / args.dim**2:.3f} D^2", name
        assert args not in seen, name
        seen.append(args)
        one = replace(args, num_layers=1)
        with torch.device("meta"):
            assert sum(p.numel() for p in Transformer(one).parameters()) == num_parameters(one)
    assert {args.mixer for args in seen} == set(MIXERS)
    for option in ("position", "ffn", "canon_filter", "canon_scale", "gla_feature_map"):
        assert {getattr(args, option) for args in seen} == set(CHOICES[option]), option
    assert {site for args in seen for site in args.canon_set} >= set("ABCDFKOQV")
    assert {(args.ffn, args.ffn_activation) for args in seen} >= {
        (ffn, activation)
        for ffn in ("gated", "standard")
        for activation in CHOICES["ffn_activation"]
    } - {("gated", "gelu")}
    options = "canon_residual canon_activation canon_trainable canon_kernel qk_norm num_kv_heads "
    options += "mixer_conv mimetic_init mimetic_rate output_gate_rank smear "
    for option in f"{options} tie_embeddings document_mask".split():
        assert len({getattr(args, option) for args in seen}) > 1, option


def test_the_table_of_experiments_is_true():
    """Parameters and tokens, to the stated digits, of each row that names one file."""
    pattern = r"^\| `(\w+)` \|.*\| ([\d,]+) \| ([\d,.]+)([MB]?) \|$"
    rows = re.findall(pattern, (FOLDER / "README.md").read_text(), re.MULTILINE)
    assert len(rows) > 10
    for name, count, tokens, unit in rows:
        job = job_of(name)
        assert f"{num_parameters(job.model_args):,}" == count, name
        training, digits = job.training, len(tokens.partition(".")[2])
        number = training.steps * training.global_batch_size * training.seq_len
        assert f"{number / {'M': 1e6, 'B': 1e9}.get(unit, 1):,.{digits}f}" == tokens, name


# Parameters of a layer with d = 2048: a d^2 + b d + c. Appendix C, F = 5504 where it says 8d/3.
MATRICES = {
    ("attention", "gated"): (4 + 3 * 2.6875, 2, 0),
    ("attention", "moe"): (4 + 2 * 32, 2 + 32, 0),
    ("gla", "gated"): (0.5 + 0.5 + 1 + 1 + 1 + 3 * 2.6875, 2 + 16 * 1.5 + 0.5 + 0.25, 0),
    ("mamba2", "none"): (6, 144 + 1 + 2, 3 * 16),
    ("mamba2", "gated"): (6 + 6, 144 + 2 + 2, 3 * 16),
    ("gated_deltanet", "gated"): (6 + 6, 2 + 2 * 12, 2 * 12 + 256),
}


def test_counts_are_those_of_appendix_c():
    """Section 7: Canon-B of Mamba2 has 4d + 144 channels; its conv1d has 2d + 128 and biases."""
    d, checked = 2048, set()
    for name, args, _ in variants():
        kind = args.mixer, args.ffn
        usual = args.qk_norm == "none" and not args.bias and args.canon_filter == "static"
        if kind not in MATRICES or "release" in name or not usual or args.num_kv_heads:
            continue
        a, b, c = MATRICES[kind]
        qkv = {"attention": 3 * d, "gla": 2 * d, "mamba2": 4 * d + 144, "gated_deltanet": 3 * d}
        channels = {"A": d, "B": qkv[args.mixer], "C": d, "D": 2 * args.ffn_dim, "O": d, "F": d}
        channels |= {"Q": d, "K": d, "V": d}  # of attention
        conv = 5 * (2 * d + 128) if args.mixer == "mamba2" else 4 * qkv[args.mixer]
        if args.smear or args.canon_filter != "static":
            continue
        layer = a * d**2 + b * d + c + conv * args.mixer_conv
        layer += args.canon_kernel * sum(channels[site] for site in args.canon_set)
        ends = (1 if args.tie_embeddings else 2) * 32000 * d + d
        assert num_parameters(args) == ends + args.num_layers * layer, name
        checked.add(kind)
    assert checked == set(MATRICES)


# The release's 48 recipes (facebookresearch/PhysicsLM4, canon_linear_recipes): 3, 3 and 2 learning
# rates of each size, with and without Canon-ACD. Layers, d, heads, F, vocabulary:
RECIPES = {
    "1B": (24, 2048, 16, 4096, 32000),
    "3B": (26, 3072, 24, 6144, 32000),
    "8B": (32, 4096, 32, 9472, 128256),
}


@pytest.mark.parametrize("size", RECIPES)
@pytest.mark.parametrize("mixer", ["gla", "gated_deltanet", "mamba2"])
def test_the_releases_recipes_can_be_expressed(mixer, size):
    """Shapes from the recipes' numbers: head_dim 128, expand_v 2, gates of rank 16, state 128."""
    num_layers, d, heads, ffn_dim, vocab_size = RECIPES[size]
    given: dict[str, Any] = {"mixer": mixer, "mixer_conv": True, "position": "nope"}
    given |= {"num_layers": num_layers, "dim": d, "num_heads": heads}
    given |= {"ffn_dim": ffn_dim, "vocab_size": vocab_size}
    shapes = {"wq.weight": (d, d), "wk.weight": (d, d), "wv.weight": (2 * d, d)}
    shapes |= {"wo.weight": (d, 2 * d), "o_norm.weight": (256,), "conv1d.weight": (4 * d, 1, 4)}
    shapes |= {"wg.down.weight": (16, d), "wg.up.weight": (2 * d, 16), "wg.up.bias": (2 * d,)}
    if mixer == "gla":
        shapes |= {"gk.down.weight": (16, d), "gk.up.weight": (d, 16), "gk.up.bias": (d,)}
    elif mixer == "gated_deltanet":
        shapes |= {"wa.weight": (heads, d), "wb.weight": (heads, d)}
        shapes |= {"A_log": (heads,), "dt_bias": (heads,)}
    else:
        given |= {"state_dim": 128}
        channels = 2 * d + 256
        shapes = {"in_proj.weight": (2 * d + channels + heads, d), "out_proj.weight": (d, 2 * d)}
        shapes |= {"conv1d.weight": (channels, 1, 4), "conv1d.bias": (channels,)}
        shapes |= dict.fromkeys(("A_log", "dt_bias", "D"), (heads,)) | {"norm.weight": (2 * d,)}
    if mixer != "mamba2":
        given |= {"expand_k": 1.0, "expand_v": 2.0, "output_gate_rank": 16}
    args = ModelArgs(**given)
    with torch.device("meta"):
        block = TransformerBlock(args, None, None)
    assert {k: tuple(p.shape) for k, p in block.attention.named_parameters()} == shapes
    layer = sum(map(math.prod, shapes.values())) + 3 * d * ffn_dim + 2 * d
    assert num_parameters(args) == num_layers * layer + (2 * vocab_size + 1) * d
    canon = num_parameters(replace(args, canon_set="ACD")) - num_parameters(args)
    assert canon == num_layers * 4 * (2 * d + 2 * ffn_dim)
    assert state_size(args) == 256 * d  # the release's table
    if mixer == "gla" and size == "1B":  # the deviation of one matrix: sqrt(0.02) / 16^(1/4) each
        for name in ("wg.down", "gk.up"):
            shape = torch.Size(shapes[f"{name}.weight"])
            value = initial_value(args, f"layers.0.attention.{name}.weight", shape)
            assert value.scale == pytest.approx(0.02**0.5 / 2)


@pytest.mark.parametrize("path", EXPERIMENTS, ids=name_of)
def test_it_builds_with_the_norms_eps_and_rope_theta_written(path):
    """The paper's files use LlamaConfig's, the released recipe its code's."""
    job, name = job_of(name_of(path)), name_of(path)
    model, args = read_experiment(path)["model"], job.model_args
    with torch.device("meta"):
        Transformer(replace(args, num_layers=1))
    assert job.job.description != "default job"
    if name in ("debug", "quickstart"):
        assert args.norm_eps == 1e-5  # as their golden losses
        return
    rotates = args.position in ROTARY
    assert "norm_eps" in model and ("rope_theta" in model or not rotates)
    is_papers = not name.startswith(("tiny/", "playground/tiny/", "custom", "released"))
    papers = Mamba2Config().layer_norm_epsilon if args.mixer == "mamba2" else 1e-6
    assert LlamaConfig().rms_norm_eps == 1e-6  # and of flash-linear-attention's configs
    assert args.norm_eps == (papers if is_papers else 1e-5)
    assert args.rope_theta == 10000


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
    "tiny/llama": "flavor vocab_size position canon_set path seq_len global_batch_size lr "
    "warmup_steps decay_steps decay_type min_lr_factor",
}


@pytest.mark.parametrize("name", STATED)
def test_what_the_sources_leave_open_is_marked(name):
    """Each value is stated by its source (STATED), or marked as assumed or ours."""
    section = ""
    for line in (FOLDER / f"{name}.toml").read_text().splitlines():
        section = line if line.startswith("[") else section
        key, equals, rest = line.partition(" = ")
        if not equals or line.startswith("#") or section == "[job]" or key == "extends":
            continue
        if key not in STATED[name].split():
            assert "assumed" in rest or "# ours" in rest, line


def test_the_nine_runs_of_seed_000():
    jobs = [job_of(f"tiny/{path.stem}") for path in (FOLDER / "tiny").glob("*.toml")]
    variants = {(job.model_args.canon_set, job.model_args.position) for job in jobs}
    rope = {(canon_set, "rope") for canon_set in ("", "A", "AB", "AC", "B", "BD", "ABCD")}
    assert variants == rope | {("", "nope"), ("ABCD", "nope")} and len(jobs) == 9
    for job in jobs:
        schedule, training = job.lr_scheduler, job.training
        assert (schedule.warmup_steps, schedule.decay_steps) == (500, 50_000)
        assert (schedule.decay_type, schedule.decay_ratio) == ("cosine", None)
        assert (job.optimizer.lr, schedule.min_lr_factor) == (1e-3, pytest.approx(0.1))
        assert (training.global_batch_size, training.seq_len) == (32, 512)
