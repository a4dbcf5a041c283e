"""The tables that the doctor prints, at 80 and 160 columns."""

import io

import pytest

from canon_pretrain.cluster.doctor import judge, show
from canon_pretrain.core.terminal import Console

FINDINGS = (
    judge("CPU", "2 of 2 cores, AMD EPYC", None, "data, evaluation, training without a GPU"),
    judge("GPU", "", "none: the CPU trains", "training and evaluation", "", "note"),
    judge("wandb", "", "no login", "metrics.enable_wandb", "wandb login", "missing"),
    judge(
        "training",
        "",
        "exit code 1\nerror[model.heads]: dim = 33\x1b[2J is no multiple of num_heads = 2",
        "training",
        "train it yourself: python -m canon_pretrain.train --config FILE.toml",
    ),
)


@pytest.mark.parametrize("width", [80, 160])
def test_tables(width, snapshot):
    console = Console(file=io.StringIO(), width=width, color_system=None)
    show(console, "everything", FINDINGS)
    lines = console.file.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    assert "\n".join(line.rstrip() for line in lines) == snapshot
