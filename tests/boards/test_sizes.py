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
WIDE = "[sizes.wide]\ndim = 512\n{}\n"


def plan(folder: Path, text: str, config: Path = PAPER / "depo1_n225.toml"):
    """Plan a board of one task; return the jobs by architecture."""
    board = folder / "board.toml"
    board.write_text(f'seeds = [0]\n{text}\n[tasks.t]\nconfig = "{config}"\n')
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


@pytest.mark.parametrize(
    ("architectures", "keys"),
    [
        (MAMBA, "num_layers = 8"),
        (ROPE + MAMBA, "num_layers = 8\nnum_heads = 8"),
        (GLA, "num_heads = 8"),
        (ROPE + GLA, "num_heads = 8"),
        (STANDARD, "ffn_dim = 1368"),
        (MAMBA, "num_heads = 8"),
    ],
)
def test_sizes_of_attention_are_refused_for_other_mixers(architectures, keys, tmp_path, capsys):
    assert refused(capsys, tmp_path, architectures + WIDE.format(keys)) == "board.size"

    # the same keys in a task
    dotted = re.sub(r"^(\w+) =", r'"model.\1" =', keys, flags=re.MULTILINE)
    table = f'[tasks.t2]\nconfig = "{PAPER / "depo1_n225.toml"}"\n[tasks.t2.set]\n{dotted}\n'
    assert refused(capsys, tmp_path, architectures + table) == "board.size"


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
