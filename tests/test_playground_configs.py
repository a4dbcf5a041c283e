"""train_configs/playground: the settings of the paper's appendix A, one file per task and size."""

import dataclasses
import math
import re

import pytest

from canon_pretrain.boards.board import read_board
from canon_pretrain.boards.plan import plan_board
from canon_pretrain.model.args import fill_sizes, flavor
from canon_pretrain.model.counts import active_parameters, layer_parameters, num_parameters
from canon_pretrain.synthetic.tasks import TASKS
from canon_pretrain.titan.command_line import parse_job
from canon_pretrain.train import main
from tests.support import ROOT

FOLDER = ROOT / "train_configs" / "playground"
OTHER_TASKS = {"automata", "mqar", "state"}  # not the paper's
NAMES = sorted(path.stem for path in FOLDER.glob("*.toml"))
SIZES = {"8L512D": (8, 512), "8L768D": (8, 768), "12L512D": (12, 512), "12L768D": (12, 768)}

# Read from the appendix, by hand: context, global batch, weight decay, one of the learning rates.
FAMILIES = {
    "depo1": (2048, 128, 0.03, {3e-4, 5e-4, 1e-3, 2e-3}, {"vocab": 50, "name_tokens": (1, 2)}),
    "depo2": (2048, 128, 0.03, {3e-4, 5e-4, 1e-3, 2e-3}, {"vocab": 4, "name_tokens": (5, 7)}),
    "brevo1": (1024, 256, 0.03, {3e-4, 5e-4, 1e-3, 2e-3}, {}),
    "brevo2": (1536, 192, 0.03, {3e-4, 5e-4, 1e-3, 2e-3}, {"vocab": 4, "name_tokens": (2, 4)}),
    "mano": (1024, 64, 0.1, {1e-4, 2e-4, 3e-4, 5e-4}, {"modulus": 23}),
    "lano": (None, 96, 0.1, {2e-4, 3e-4, 5e-4, 1e-3}, {}),
    "copy": (1024, 32, 0.03, {5e-4, 1e-3, 2e-3, 5e-3}, {"n": 500}),
    "capo": (512, None, 0.01, {1e-3, 5e-4, 3e-4}, {"exposures": 100}),
}
# Thousands of steps and settings of each file.
ROWS = {
    "depo1_n225": (87.5, {"n": 225, "k": 8}),
    "depo1_n300": (100, {"n": 300, "k": 8}),
    "depo1_n375": (112.5, {"n": 375, "k": 8}),
    "depo2_n75": (100, {"n": 75, "k": 16}),
    "depo2_n100": (125, {"n": 100, "k": 16}),
    "depo2_n125": (150, {"n": 125, "k": 16}),
    "brevo1_n70": (100, {"n": 70}),
    "brevo1_n90": (125, {"n": 90}),
    "brevo1_n110": (150, {"n": 110}),
    "brevo2_n30": (200, {"n": 30}),
    "brevo2_n40": (225, {"n": 40}),
    "brevo2_n50": (250, {"n": 50}),
    "mano_l10": (80, {"l": 10}),
    "mano_l13": (95, {"l": 13}),
    "mano_l16": (110, {"l": 16}),
    "lano_cfg3f": (100, {"grammar": "cfg3f", "seq_len": 512}),
    "lano_cfg3j": (100, {"grammar": "cfg3j", "seq_len": 1536}),
    "lano_cfg3k": (100, {"grammar": "cfg3k", "seq_len": 1536}),
    "copy_1l": (50, {}),
    "copy_2l": (50, {}),
}
ROWS |= {
    f"{name}_k4": (kilosteps, settings | {"k": 4})
    for name, (kilosteps, settings) in ROWS.items()
    if "k" in settings
}
CAPO = {"50k": 12, "100k": 24, "200k": 48, "500k": 96, "1m": 192, "2m": 384}  # global batches


def job_of(name):
    """Return the job of a file of the playground."""
    return parse_job(["--config", str(FOLDER / f"{name}.toml")])


def test_every_task_of_the_paper_has_its_files():
    assert {*NAMES} == {*ROWS, *(f"capo_{people}" for people in CAPO)}
    assert {name.partition("_")[0] for name in NAMES} == {*TASKS} - OTHER_TASKS


def test_every_task_has_a_tiny_file():
    """Depo and Brevo have a file for both of their kinds."""
    tiny = {path.stem for path in (FOLDER / "tiny").glob("*.toml")}
    assert tiny == {name.rstrip("12") for name in TASKS}


def people_of(size):
    """Return the number in a name such as 50k or 2m."""
    return int(size[:-1]) * {"k": 1000, "m": 1_000_000}[size[-1]]


@pytest.mark.parametrize("name", NAMES)
def test_settings_are_the_appendixs(name):
    job = job_of(name)
    family, size = name.split("_", 1)
    context, batch, decay, rates, settings = FAMILIES[family]

    # the task
    if family == "capo":
        batch = CAPO[size]
        steps = math.ceil(people_of(size) * 100 / 8 / batch)
        file_settings = {"people": people_of(size)}
        assert job.task.per_window == 8
        assert job.model_args.tie_embeddings
    else:
        kilosteps, file_settings = ROWS[name]
        steps = 1000 * kilosteps
    settings = settings | {"seq_len": context} | file_settings
    assert {key: job.task.settings[key] for key in settings} == settings
    assert job.task.loss_on == ("all" if family in ("mano", "lano", "capo") else "answers")
    for quirk in ("exact_n", "exact_k", "exact_l", "last_query", "synonyms"):
        assert not getattr(job.task, quirk, False)

    # training
    training = job.training
    assert (job.task.name, training.global_batch_size, training.steps) == (family, batch, steps)
    optimizer = job.optimizer
    assert optimizer.lr in rates
    assert optimizer.weight_decay == decay
    assert (optimizer.name, optimizer.eps) == ("AdamW", 1e-6)
    assert (optimizer.beta1, optimizer.beta2) == (0.9, 0.98)
    schedule = job.lr_scheduler
    expected = (0, "linear", 0.0) if family == "lano" else (1000, "cosine", 0.1)
    assert (schedule.warmup_steps, schedule.decay_type, schedule.min_lr_factor) == expected

    # the model
    num_layers = {"copy_1l": 1, "copy_2l": 2}.get(name, 12)
    assert job.model_args.num_layers == num_layers
    assert job.model_args.canon_set == ""


@pytest.mark.system
@pytest.mark.parametrize("name", NAMES)
def test_the_dry_run_plans_it(name, capsys):
    main(["--config", str(FOLDER / f"{name}.toml"), "--dry_run"])
    job = job_of(name)
    args = dataclasses.replace(job.model_args, vocab_size=job.task.vocab_size)
    text = " ".join(capsys.readouterr().out.split())
    assert f"{num_parameters(args):,}" in text
    assert f"{job.training.steps:,} of" in text


def parameters_of_canon(args):
    """Return the number of parameters that Canon-ABCD adds."""
    return num_parameters(dataclasses.replace(args, canon_set="ABCD")) - num_parameters(args)


@pytest.mark.parametrize("size", SIZES)
def test_sizes_have_the_papers_parameters(size):
    """The paper prints no counts, but 12 d^2 per layer, and below 0.45 % for Canon at 12L768D."""
    layers, dim = SIZES[size]
    tasks = [job_of(name).task for name in NAMES if not name.startswith(("copy", "capo"))]

    for vocab_size in {task.vocab_size for task in tasks}:
        args = dataclasses.replace(flavor(size), vocab_size=vocab_size)
        assert (args.num_layers, args.dim, args.num_heads) == (layers, dim, dim // 64)

        blocks = num_parameters(args) - (2 * vocab_size + 1) * dim
        assert blocks == pytest.approx(12 * layers * dim**2, rel=3e-3)
        if size == "12L768D":
            assert 0.004 < parameters_of_canon(args) / blocks < 0.0045


# Parameters of the blocks over those of Llama's, measured; section 3 and appendix C: l layers, or
# 2 l without feed-forward, and 4, 16 or 12 heads at every size.
LINEAR = {
    "gla": ({}, 1, 4, (1.003, 1.004)),
    "mamba2": ({}, 2, 16, (1.034, 1.050)),
    "mamba2(mlp)": ({"ffn": "gated"}, 1, 16, (1.017, 1.025)),
    "gated_deltanet": ({}, 1, 12, (1.004, 1.005)),
}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", LINEAR)
def test_linear_models_have_the_sizes_of_llama(name, size):
    changes, depth, heads, (low, high) = LINEAR[name]
    layers, dim = SIZES[size]
    base = flavor(size)
    mixer = name.removesuffix("(mlp)")

    args = dataclasses.replace(base, **fill_sizes(base, {"mixer": mixer, **changes}))

    assert (args.num_layers, args.dim, args.num_heads) == (depth * layers, dim, heads)
    blocks = depth * layers * layer_parameters(args)
    ratio = blocks / (layers * layer_parameters(base))
    assert low <= round(ratio, 3) <= high
    matrices = 6 if args.ffn == "none" else 12
    assert layer_parameters(args) == pytest.approx(matrices * dim**2, rel=0.06)


# Capo's 8-6: 8 layers, 6 heads, width 384 (appendix C). Counted; heads are those of the appendix.
CAPO_8_6 = {
    "llama": ({}, 15_341_568, 8, 6),
    "gla": ({"mixer": "gla"}, 15_417_600, 8, 4),
    "mamba2": ({"mixer": "mamba2"}, 16_311_040, 16, 16),
    "mamba2(mlp)": ({"mixer": "mamba2", "ffn": "gated"}, 15_826_304, 8, 16),
    "gated_deltanet": ({"mixer": "gated_deltanet"}, 15_452_736, 8, 12),
    "gpt2": ({"ffn": "standard"}, 15_341_568, 8, 6),
    "moe": ({"ffn": "moe"}, 81_500_160, 8, 6),
}


@pytest.mark.parametrize("name", CAPO_8_6)
def test_sizes_of_capo_are_completed_for_each_mixer(name):
    changes, parameters, layers, heads = CAPO_8_6[name]
    position = "nope" if "mixer" in changes else "rope"
    options = {"flavor": "8-6", "position": position} | changes
    words = [word for key, value in options.items() for word in (f"--model.{key}", value)]
    job = parse_job(["--config", str(FOLDER / "capo_50k.toml"), *words])

    args = dataclasses.replace(job.model_args, vocab_size=job.task.vocab_size)

    assert (args.num_layers, args.num_heads, args.dim) == (layers, heads, 384)
    assert num_parameters(args) == parameters
    if name == "moe":  # 32 experts of width D: 6 of 68 D^2 are active, the 8.8 % of part 3.3
        assert args.ffn_dim == args.dim
        assert active_parameters(args) / num_parameters(args) == pytest.approx(0.1, abs=0.02)
    if name == "gla":
        assert parameters == pytest.approx(CAPO_8_6["llama"][1], rel=0.03)


@pytest.mark.parametrize(("name", "dim", "ffn_dim"), [("1-1", 64, 176), ("12-12", 768, 2048)])
def test_a_size_l_h_has_l_layers_and_h_heads_of_64(name, dim, ffn_dim):
    args = flavor(name)
    layers, heads = map(int, name.split("-"))
    assert (args.num_layers, args.num_heads, args.dim) == (layers, heads, dim)
    assert args.ffn_dim == ffn_dim


@pytest.mark.parametrize("path", sorted((FOLDER / "boards").glob("*.toml")), ids=lambda x: x.stem)
def test_a_board_is_planned_and_its_configs_parse(path, tmp_path):
    board = read_board(path)
    assert len(board.seeds) > 1
    assert board.claims

    sweep, _ = plan_board(board, tmp_path)

    for config in sweep.configs:
        job = parse_job(["--config", config])
        assert job.training.steps % job.validation.freq == 0  # scored at the last step
        assert job.compile.enable or path.stem == "quickstart"  # which ends before it has compiled


def test_the_board_of_tiny_stories_has_its_table():
    """The evaluation losses of the runs that train_configs/tiny repeats."""
    losses = {}
    for path in (FOLDER.parent / "tiny").glob("*.toml"):
        model = parse_job(["--config", str(path)]).model
        [line] = [line for line in path.read_text().splitlines() if "valuation loss" in line]
        losses[model.position, model.canon_set] = float(re.findall(r"1\.\d{4}", line)[0])

    board = read_board(FOLDER / "boards" / "lm.toml")

    values = board.reference.values["text"]
    assert values.keys() == board.architectures.keys()
    shown = {}
    for name, model in board.architectures.items():
        shown[model["position"], model["canon_set"]] = values[name]
    assert shown == losses
