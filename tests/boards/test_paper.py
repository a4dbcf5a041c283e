"""The paper's figures as boards: each is planned in all tiers, within its budget."""

import re
from pathlib import Path

import pytest

from canon_pretrain.boards import paper
from canon_pretrain.boards.board import read_board, read_board_file
from canon_pretrain.boards.claims import task_name
from canon_pretrain.boards.models import planned_models
from canon_pretrain.boards.plan import board_values, plan_board, planned_runs
from canon_pretrain.boards.price import CORE, board_price
from canon_pretrain.cluster.planned import (
    num_steps,
    planned_identity,
    planned_model,
    planned_values,
)
from canon_pretrain.core.files import write_atomic
from tests.support import ROOT, canon_stage, command_error

main = canon_stage("playground")

FOLDER = ROOT / "train_configs" / "playground" / "boards" / "paper"
ALL = {figure.path.stem: figure for figure in paper.find_figures(FOLDER)}
TEXT = ("figure17", "figure17_seeds")
FIGURES = [name for name in ALL if name not in TEXT]
NUMBERS = {4, 5, *range(7, 18), *range(19, 24), *range(26, 31)}
FOUR_SIZES = ["8L512D", "8L768D", "12L512D", "12L768D"]


def price_of(board):
    return board_price(board, planned_runs(board, Path()), planned_models(board_values(board)))


def test_every_figure_of_synthetic_tasks_has_its_file():
    numbers = [figure.number for figure in ALL.values()]
    assert {*numbers} == NUMBERS
    assert numbers == sorted(numbers)
    for name, figure in ALL.items():
        file = read_board_file(figure.path)
        assert file.tiers == (["paper"] if name in TEXT else ["laptop", "node", "paper"])
        assert file.question.endswith("?")


@pytest.mark.parametrize("name", FIGURES)
def test_a_figure_is_planned_at_the_laptop_tier_in_45_minutes(name, tmp_path):
    """On two cores, by the estimate; each config also says what its runs are scored on."""
    board = read_board(FOLDER / f"{name}.toml", "laptop")

    sweep, _ = plan_board(board, tmp_path)

    price = board_price(board, sweep.runs, planned_models(board_values(board)))
    assert price.here is not CORE or price.cost_here.on(2) < 45 * 60
    assert price.num_runs == len(sweep.runs)


@pytest.mark.parametrize("name", FIGURES)
def test_a_figure_is_planned_at_the_node_tier_in_a_weekend(name, tmp_path):
    """On eight H100, from Friday evening to Monday morning; a third of the paper's steps."""
    path = FOLDER / f"{name}.toml"
    board = read_board(path, "node")

    plan_board(board, tmp_path)

    assert price_of(board).cost_h100.on(8) < 62 * 3600
    if "capo" in board.config_of([*board.settings][0]) or name in ("figure5", "figure19"):
        return
    assert [*board.sizes] == ["8L512D"]
    for (setting, _), values in board_values(board).items():
        printed = num_steps(planned_values(Path(board.config_of(setting))))
        assert num_steps(values) / printed == pytest.approx(1 / 3, abs=0.01)


@pytest.mark.parametrize("tier", ["laptop", "node", "paper"])
@pytest.mark.parametrize("name", FIGURES)
def test_the_claims_of_a_figure_are_over_whole_grids(name, tier):
    board = read_board(FOLDER / f"{name}.toml", tier)
    assert board.claims
    for claim in board.claims:
        tasks = claim.tasks or [claim.task]
        settings = [setting for setting in board.settings if task_name(setting) in tasks]
        num_sizes = max(1, len(board.sizes))
        assert len(board.cells_of(claim)) == len(settings) * num_sizes


@pytest.mark.long
@pytest.mark.parametrize("name", ALL)
def test_a_figure_is_planned_at_the_paper_tier(name, tmp_path):
    plan_board(read_board(FOLDER / f"{name}.toml", "paper"), tmp_path)


@pytest.mark.parametrize("name", FIGURES)
def test_the_paper_tier_is_the_appendix(name):
    """All rates of appendix A, its difficulties, and the configs as they are."""
    board = read_board(FOLDER / f"{name}.toml", "paper")
    for setting in board.settings:
        config = Path(board.config_of(setting))
        assert config.parent == FOLDER.parent.parent
        assert not board.settings[setting]  # nothing but what the config says

        task = board.task_of(setting)
        rates = {*task.learning_rates}
        printed = planned_values(config)["optimizer"]["lr"]
        assert printed in rates
        if config.stem.startswith("capo"):
            assert rates == ({5e-4, 3e-4} if config.stem == "capo_2m" else {1e-3, 5e-4})
        else:
            assert len(rates) == 4
        assert board.seeds_of(setting) == ([0, 1] if setting.startswith("mano") else [0])


@pytest.mark.parametrize("name", FIGURES)
def test_the_paper_tier_has_the_sizes_of_its_figure(name):
    expected = FOUR_SIZES
    if name == "figure8":
        expected = ["8L512D"]
    elif name in ("figure10", "figure14", "figure16", "figure23"):
        expected = ["12L768D"]
    elif name in ("figure5", "figure19"):
        expected = ["d16", "d32", "d64", "d128", "d256"]
    elif "capo" in name or name == "figure11":
        expected = ["2_2", "4_4", "8_6", "12_8", "12_12", "20_16", "24_20"]
    assert [*read_board(FOLDER / f"{name}.toml", "paper").sizes] == expected


def test_the_rates_of_mixtures_are_those_of_appendix_a_3():
    board = read_board(FOLDER / "figure11.toml", "paper")
    rates = {setting: board.rates_of(setting, "moe/8_6") for setting in board.settings}
    assert rates == {
        "capo_50k": [5e-3, 2e-3, 1e-3],
        "capo_100k": [5e-3, 2e-3, 1e-3],
        "capo_200k": [5e-3, 2e-3, 1e-3],
        "capo_500k": [2e-3, 1e-3],
        "capo_1m": [2e-3, 1e-3],
        "capo_2m": [1e-3, 5e-4],
    }
    assert board.rates_of("capo_2m", "rope/8_6") == [5e-4, 3e-4]


def test_models_of_the_figures_have_the_sizes_of_llama():
    """At 12L768D within 6 %, which Mamba2 has; GLA within 1 %."""
    counts = {}
    for name in ("figure12", "figure13", "figure15"):
        board = read_board(FOLDER / f"{name}.toml", "paper")
        for (setting, arm), values in board_values(board).items():
            if setting == "lano/cfg3f" and arm.endswith("12L768D"):
                counts[arm.partition("/")[0]] = planned_model(values)
    layers = {name: args.num_layers for name, args in counts.items()}
    assert layers["mamba2"] == layers["mamba2_noconv"] == layers["mamba2_canon"] == 24
    assert layers["mamba2_mlp"] == layers["gla"] == layers["nope_canon"] == 12
    assert {counts[name].num_heads for name in layers if name.startswith("gla")} == {4}
    assert {counts[name].num_heads for name in layers if name.startswith("mamba2")} == {16}
    assert counts["mamba2"].mixer_conv and not counts["mamba2_noconv"].mixer_conv
    assert not counts["gla"].mixer_conv and counts["gla_conv"].mixer_conv


def test_the_numbers_of_figure_27_are_its_reference():
    board = read_board(FOLDER / "figure27.toml", "paper")
    values = board.reference.values
    assert sum(map(len, values.values())) == 520
    # read by hand: RoPE + Canon-ABCD on Depo1 at N = 375; RoPE on Brevo1 at N = 70
    row = [values["depo1/n375"][f"rope_canon/{size}"] for size in FOUR_SIZES]
    assert row == [0.76, 0.53, 0.16, 0.97]
    row = [values["brevo1/n70"][f"rope/{size}"] for size in FOUR_SIZES]
    assert row == [0.456, 0.769, 0.798, 0.885]
    assert "lano/cfg3f" not in values  # lost


# Architectures of figure17.toml -> the config of the same run in train_configs/.
TEXT_RUNS = {
    "rope": "rope",
    "rope_canon": "rope_canon",
    "quarter_canon": "partial_rope_canon",
    "nope": "nope",
    "nope_canon": "nope_canon",
    "gpt2": "gpt2_rope",
    "gpt2_r2": "gpt2_rope_r2",
    "gla": "gla",
    "gla_canon": "gla_canon",
    "mamba2_noconv": "mamba2_noconv",
    "mamba2": "mamba2",
    "mamba2_canon": "mamba2_canon",
    "mamba2_mlp": "mamba2_mlp",
    "mamba2_mlp_canon": "mamba2_mlp_canon",
    "gated_deltanet": "gated_deltanet",
}


def test_runs_on_text_are_those_of_the_files_at_1b3():
    """The same identity: model, data, optimizer and schedule."""
    board = read_board(FOLDER / "figure17.toml", "paper")
    assert [*board.architectures] == [*TEXT_RUNS]
    values = board_values(board)
    for arm, name in TEXT_RUNS.items():
        for task, prefix in (("fineweb_edu", ""), ("slimpajama", "slimpajama_")):
            config = ROOT / "train_configs" / f"{prefix}{name}.toml"
            if config.exists():
                expected = planned_identity(planned_values(config))
                assert planned_identity(values[task, arm]) == expected, (task, arm)

    rates = board.rates_of("slimpajama", "rope"), board.rates_of("fineweb_edu", "mamba2_mlp")
    assert rates == ([1e-3, 2e-3], [5e-4, 1e-3, 2e-3])
    seeds = read_board(FOLDER / "figure17_seeds.toml", "paper")
    assert ([*seeds.architectures], seeds.seeds) == (["rope"], [*range(8)])


# -- the command and the format

TIERED = """
question = "What?"
only = ["b", "a"]
[architectures.a]
[architectures.b]
canon_set = "A"
[architectures.c]
[tiers.small]
seeds = [7]
[tiers.small.tasks.copy]
config = "COPY"
difficulties = { x = { config = "NARROW" }, y = { "data.task.n" = 4 } }
seeds = [1, 2]
[tiers.large.tasks.copy]
config = "COPY"
"""


@pytest.fixture
def tiered(tmp_path):
    copy = ROOT / "train_configs" / "playground" / "tiny" / "copy.toml"
    narrow = tmp_path / "narrow.toml"
    write_atomic(narrow, f'extends = "{copy}"\n[model]\ndim = 16\n'.encode())
    path = tmp_path / "figure3_x.toml"
    path.write_text(TIERED.replace("COPY", str(copy)).replace("NARROW", "narrow.toml"))
    return path


def test_a_tier_is_merged_over_the_file(tiered, tmp_path):
    board = read_board(tiered, "small")
    assert read_board_file(tiered).tiers == ["small", "large"]
    assert [*board.architectures] == ["b", "a"]
    assert board.seeds == [7]
    assert read_board(tiered, "large").seeds == [0, 1, 2]

    sweep, _ = plan_board(board, tmp_path / "out")

    assert [run.name for run in sweep.runs[:4]] == [
        "copy-x-b-seed1",
        "copy-x-a-seed1",
        "copy-x-b-seed2",
        "copy-x-a-seed2",
    ]
    dims = {arm: planned_model(values).dim for arm, values in board_values(board).items()}
    assert dims == {
        ("copy/x", "b"): 16,
        ("copy/x", "a"): 16,
        ("copy/y", "b"): 32,
        ("copy/y", "a"): 32,
    }


@pytest.mark.parametrize(
    ("old", "new", "words", "code"),
    [
        ("", "", [], "board.tier"),
        ("", "", ["--tier", "smal"], "board.tier"),
        ('"b", "a"', '"d"', ["--tier", "small"], "board.claim"),
        ('["b", "a"]', "3", ["--tier", "small"], "board.type"),
        ("[tiers.small]\nseeds = [7]", "[tiers]\nsmall = 3", ["--tier", "small"], "config.toml"),
        ('"narrow.toml"', '"none.toml"', ["--tier", "small"], "config.unreadable"),
        ("seeds = [1, 2]", "seeds = [1, 1]", ["--tier", "small"], "board.repeated"),
    ],
)
def test_a_bad_tier_is_refused(old, new, words, code, tiered, tmp_path, capsys):
    tiered.write_text(tiered.read_text().replace(old, new))
    assert command_error(capsys, main, ["plan", str(tiered), "--out", "x", *words]) == code


def test_a_board_without_tiers_takes_none(capsys):
    board = FOLDER.parent / "quickstart.toml"
    code = command_error(capsys, main, ["plan", str(board), "--tier", "laptop"])
    assert code == "board.tier"


def test_the_command_lists_tiers_prices_and_what_is_done(tiered, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    main(["plan", str(tiered), "--tier", "small"])
    (done,) = Path("outputs/boards").glob("*/sweep.json")
    assert done.parent.name == "figure3_x-small"
    run = done.parent / "copy-x-b-seed1"
    run.mkdir()
    (run / "DONE").touch()
    capsys.readouterr()

    main(["paper", "--folder", str(tmp_path)])

    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "3 x: What? 2 architectures"
    assert [line.split()[:2] for line in lines[1:3]] == [["small", "8"], ["large", "6"]]
    assert [re.findall(r"(\d+) of (\d+)", line) for line in lines[1:3]] == [[("1", "8")], []]

    code = command_error(capsys, main, ["paper", "4", "--folder", str(tmp_path)])
    assert code == "board.figure"
