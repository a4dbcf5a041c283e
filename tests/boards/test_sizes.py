"""Boards: sizes of every mixer, values that are set twice, and the windows that score a run."""

import re
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from canon_pretrain.boards.plan import WINDOWS
from canon_pretrain.cluster.sweep import config_hash, read_sweep
from canon_pretrain.core.files import write_json
from canon_pretrain.titan.command_line import parse_job
from tests.support import ROOT, canon_stage, command_error

main = canon_stage("playground")

PAPER = ROOT / "train_configs" / "playground"
ROPE = '[architectures.rope]\nposition = "rope"\n'
MAMBA = '[architectures.m]\nmixer = "mamba2"\nposition = "nope"\n'
GLA = '[architectures.gla]\nmixer = "gla"\nposition = "nope"\n'
STANDARD = '[architectures.relu]\nffn = "standard"\n'
DELTANET = '[architectures.gdn]\nmixer = "gated_deltanet"\nposition = "nope"\n'
MOE = '[architectures.moe]\nffn = "moe"\n'
WIDE = "[sizes.wide]\ndim = 512\n{}\n"


def plan(
    folder: Path,
    text: str,
    config: Path = PAPER / "depo1_n225.toml",
    *,
    top: str = "",
    task: str = "",
):
    """Plan a board of one task; return the jobs by architecture.

    `top`: keys before the first table. `task`: keys of the task.
    """
    board = folder / "board.toml"
    board.write_text(f'seeds = [0]\n{top}\n{text}\n[tasks.t]\nconfig = "{config}"\n{task}\n')
    main(["plan", str(board), "--out", str(folder / "out")])
    sweep = read_sweep(folder / "out")
    jobs = [parse_job(["--config", *sweep.launch(run, folder / "out")]) for run in sweep.runs]
    return {Path(run.config).stem: job for run, job in zip(sweep.runs, jobs, strict=True)}


def refused(capsys, folder, text):
    """Return the code of the error that ends the planning of a board."""
    code = command_error(capsys, plan, folder, text)
    assert not (folder / "out").exists()
    return code


def test_a_size_by_flavor_is_completed_for_each_mixer(tmp_path):
    jobs = plan(tmp_path, ROPE + MAMBA + GLA + '[sizes.s]\nflavor = "8L512D"')

    layers = {name: job.model_args.num_layers for name, job in jobs.items()}
    assert layers == {"t-rope-s": 8, "t-m-s": 16, "t-gla-s": 8}
    assert jobs["t-m-s"].model_args.ffn == "none"
    assert jobs["t-gla-s"].model_args.num_heads == 4


SMALL = "num_layers = 8\ndim = 512\nnum_heads = 8\nffn_dim = 1368"


@pytest.mark.parametrize("place", ["sizes.s", "tasks.t.set"])
@pytest.mark.parametrize(
    ("architecture", "expected"),
    [
        (ROPE, (8, 512, 8, 1368)),
        (GLA, (8, 512, 4, 1368)),
        (MAMBA, (16, 512, 16, 1368)),  # which has no feed-forward
        (MAMBA + 'ffn = "gated"\n', (8, 512, 16, 1024)),
        (DELTANET, (8, 512, 12, 1024)),
        (STANDARD, (8, 512, 8, 2048)),
        (MOE, (8, 512, 8, 512)),
    ],
)
def test_sizes_of_attention_are_completed_for_each_mixer(architecture, expected, place, tmp_path):
    keys = SMALL
    if place == "tasks.t.set":
        keys = re.sub(r"^(\w+) =", r'"model.\1" =', SMALL, flags=re.MULTILINE)

    (job,) = plan(tmp_path, f"{architecture}[{place}]\n{keys}\n").values()

    args = job.model_args
    assert (args.num_layers, args.dim, args.num_heads, args.ffn_dim) == expected


def test_an_architectures_own_sizes_are_not_completed(tmp_path):
    (job,) = plan(tmp_path, MAMBA + "num_heads = 8\n[sizes.s]\nnum_layers = 3\n").values()
    assert (job.model_args.num_layers, job.model_args.num_heads) == (6, 8)


def test_sizes_are_a_list_of_flavors(tmp_path):
    jobs = plan(tmp_path, ROPE, top='sizes = ["8L512D", "8-6"]')
    sizes = {name: (job.model_args.num_layers, job.model_args.dim) for name, job in jobs.items()}
    assert sizes == {"t-rope-8L512D": (8, 512), "t-rope-8_6": (8, 384)}


def test_an_unknown_flavor_is_refused(tmp_path, capsys):
    assert refused(capsys, tmp_path, ROPE + '[sizes.s]\nflavor = "8-0"\n') == "model.unknown_flavor"


def test_models_that_are_not_equally_large_are_named(tmp_path, capsys):
    plan(tmp_path, ROPE + GLA + MOE + MAMBA, top='sizes = ["8-6"]', config=PAPER / "capo_50k.toml")

    (line,) = [line for line in capsys.readouterr().out.splitlines() if "Parameters" in line]

    gaps = re.findall(r"(\S+) ([+-][\d.]+) % \((\S+) \S+ (\S+)\)", line)
    assert gaps == [("moe/8_6", "+431.2", "81.5M", "15.3M"), ("m/8_6", "+6.3", "16.3M", "15.3M")]


RATES = """
[rates]
moe = [5e-3, 2e-3]
linear = [1e-2]
rope = [4e-3]
"""


def rates_of(folder, text, task=""):
    """Return the learning rates of each architecture's runs, from the lowest on."""
    plan(folder, ROPE + STANDARD + GLA + MOE + text, task=f"learning_rates = [1e-3, 2e-3]\n{task}")
    rates: dict[str, list[float]] = {}
    for run in read_sweep(folder / "out").runs:
        rates.setdefault(Path(run.config).stem, []).append(run.learning_rate)
    return {name: sorted(numbers) for name, numbers in rates.items()}


def test_a_family_has_its_own_learning_rates(tmp_path):
    assert rates_of(tmp_path, RATES) == {
        "t-rope": [4e-3],
        "t-relu": [1e-3, 2e-3],
        "t-gla": [1e-2],
        "t-moe": [2e-3, 5e-3],
    }


def test_the_rates_of_a_task_are_before_those_of_the_board(tmp_path):
    task = "rates = { linear = [7e-3], gla = [6e-3, 5e-3] }"
    rates = rates_of(tmp_path, RATES, task)
    assert rates["t-gla"] == [5e-3, 6e-3]
    assert rates["t-moe"] == [2e-3, 5e-3]


def test_a_rate_has_one_name_in_all_architectures(tmp_path):
    """Runs of equal rates stay next to each other, and a cell's runs are all of its rates."""
    rates_of(tmp_path, "[rates]\nmoe = [2e-3, 4e-3]\n")
    names = [run.name for run in read_sweep(tmp_path / "out").runs]
    assert names == [
        "t-rope-lr1e-3-seed0",
        "t-relu-lr1e-3-seed0",
        "t-gla-lr1e-3-seed0",
        "t-rope-lr2e-3-seed0",
        "t-relu-lr2e-3-seed0",
        "t-gla-lr2e-3-seed0",
        "t-moe-lr2e-3-seed0",
        "t-moe-lr4e-3-seed0",
    ]


@pytest.mark.parametrize(
    ("rates", "code"),
    [
        ("mo = [1e-3]", "board.rates"),
        ("moe = [1e-3, 1e-3]", "board.repeated"),
        ("moe = [0.0]", "board.type"),
        ("moe = 1e-3", "board.type"),
    ],
)
def test_rates_of_nothing_are_refused(rates, code, tmp_path, capsys):
    assert refused(capsys, tmp_path, f"{ROPE}[rates]\n{rates}\n") == code


def test_a_task_may_not_set_the_rate_that_a_family_has(tmp_path, capsys):
    text = ROPE + '[rates]\nrope = [1e-3]\n[tasks.t.set]\n"optimizer.lr" = 1e-3\n'
    assert refused(capsys, tmp_path, text) == "board.own_key"


@pytest.mark.parametrize(
    ("text", "num_layers"),
    [(ROPE + WIDE.format("num_heads = 8"), 12), (MAMBA + WIDE.format(""), 24)],
)
def test_sizes_that_fit_the_mixer_are_taken(text, num_layers, tmp_path):
    (job,) = plan(tmp_path, text).values()
    assert (job.model_args.dim, job.model_args.num_layers) == (512, num_layers)


def test_architectures_set_sizes_of_their_own(tmp_path):
    text = ROPE + "num_heads = 12\nnum_layers = 2\n" + GLA + MAMBA + "num_layers = 6\n"

    jobs = plan(tmp_path, text)

    layers = {name: job.model_args.num_layers for name, job in jobs.items()}
    assert layers == {"t-rope": 2, "t-gla": 12, "t-m": 6}


@pytest.mark.parametrize("place", ["set", "difficulties.n9"])
@pytest.mark.parametrize(
    "arms", [ROPE + "[sizes.d32]\ndim = 32\n", "[architectures.rope]\ndim = 32\n"]
)
def test_a_value_of_a_task_is_not_dropped_for_an_arms(arms, place, tmp_path, capsys):
    config = PAPER / "copy_1l.toml"
    table = f'[tasks.two]\nconfig = "{config}"\n[tasks.two.{place}]\n"model.dim" = 16\n'
    assert refused(capsys, tmp_path, arms + table) == "board.repeated"


def test_a_board_scores_a_run_on_more_windows_than_a_trainer(tmp_path):
    (job,) = plan(tmp_path, ROPE).values()
    assert job.validation.windows == WINDOWS


def test_the_windows_of_a_config_are_kept(tmp_path):
    config = tmp_path / "nine.toml"
    config.write_text(f'extends = "{PAPER / "copy_1l.toml"}"\n[validation]\nwindows = 9\n')

    (job,) = plan(tmp_path, ROPE, config).values()

    assert job.validation.windows == 9


def test_a_board_planned_without_windows_keeps_its_configs(tmp_path):
    """As earlier versions did."""
    plan(tmp_path, ROPE)
    (config,) = (tmp_path / "out" / "configs").iterdir()
    lines = config.read_text().splitlines(keepends=True)
    config.write_text("".join(line for line in lines if "windows" not in line))
    hashes = {str(config): config_hash(str(config))}
    sweep = replace(read_sweep(tmp_path / "out"), configs=hashes)
    write_json(tmp_path / "out" / "sweep.json", asdict(sweep))

    (job,) = plan(tmp_path, ROPE).values()

    assert job.validation.windows is None
