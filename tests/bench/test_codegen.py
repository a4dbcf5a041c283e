"""What a block launches and moves on an H100: counted again, and compared with the record."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from canon_pretrain.bench.codegen import PAGE, RECORD, computed, page
from canon_pretrain.bench.limits import Rates, min_block_bytes, step_seconds
from canon_pretrain.model.args import flavor
from tests.support import ROOT

RECORDED = json.loads(RECORD.read_text())


def counted(folder: Path, *options: str) -> dict[str, Any]:
    """What the bench counts: a process of its own, since it pretends that there is a GPU."""
    for package, expected in RECORDED["versions"].items():
        if version(package) != expected:
            pytest.skip(f"counted with {package} {expected}; here is {version(package)}")
    file = folder / "codegen.json"
    words = [sys.executable, "-m", "canon_pretrain.bench", "codegen", *options, "--json", str(file)]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(file.read_text())
    return result


@pytest.fixture(scope="module")
def brief(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("codegen")
    return counted(folder, "--models", "nope", "--sets", "ABCD")


def figures(rows: list[dict[str, Any]]) -> dict[str, float]:
    found: dict[str, float] = {}
    for row in rows:
        name = f"{row['model']} {row['canon_set']} {row['backend']}"
        for direction in ("forward", "backward"):
            counts = row[direction] | row[direction]["kib"]
            found |= {
                f"{name} {direction} {kind}": v for kind, v in counts.items() if kind != "kib"
            }
        found[f"{name} saved"] = row["saved_bytes"]
        found[f"{name} extra"] = computed(row, rows)["extra_kib"]
    return found


def risen(rows: list[dict[str, Any]]) -> dict[str, float]:
    most = {n: value + 0.02 * abs(value) + 0.01 for n, value in figures(RECORDED["rows"]).items()}
    return {name: value for name, value in figures(rows).items() if value > most[name]}


def test_no_figure_of_a_block_rises(brief):
    assert [row["canon_set"] for row in brief["rows"]] == ["", "ABCD", "ABCD"]
    assert brief["rows"][-1]["backend"] == "triton"
    assert risen(brief["rows"]) == {}


@pytest.mark.system
def test_no_figure_of_other_blocks_rises(tmp_path):
    models = ("rope", "partial_rope_c", "rope_documents", "rope_standard_gelu", "released_1b")
    rows = counted(tmp_path, "--models", *models, "--sets", "ABCD")["rows"]
    assert len(rows) == 3 * len(models)
    assert risen(rows) == {}


def test_the_page_is_that_of_the_record():
    assert PAGE.read_text() == page(RECORDED)


def test_inductor_counts_what_is_counted_by_hand(brief):
    none, *_, fused = brief["rows"]
    dim, width = 2048, 5504
    # norm; stream and norm; activation; stream: 2 + 3 + 4 D (the stream is added twice), 3 F
    assert none["forward"]["kib"]["other"] == pytest.approx(2 * (9 * dim + 3 * width) / 1024, 1e-3)
    weights = 2 * (4 * dim * dim + 3 * dim * width) / (6 * 4096)  # each is read once
    moved = 2 * (4 * 2 * dim + 3 * (dim + width))  # q, k, v and output; gate, up and down
    assert none["forward"]["kib"]["gemm"] * 1024 == pytest.approx(moved + weights, rel=1e-3)
    for row in (none, fused):
        found = computed(row, brief["rows"])
        least = min_block_bytes(
            replace(flavor("1b3"), position="nope", canon_set=row["canon_set"]), 2
        )
        assert found["least_kib"] == pytest.approx(sum(map(sum, least.values())) / 1024)
        assert 1 <= found["ratio"] < 1.25


def test_a_step_takes_what_its_parts_take():
    """Each rate by itself, the others without limit."""
    args = replace(flavor("1b3"), position="nope")
    limitless = dict.fromkeys(("gemm_flops", "attention_flops", "memory_bytes"), float("inf"))
    limitless |= {"launch_gap_s": 0.0, "exposed_network": 0.0}
    job = {"num_tokens": 1000, "seq_len": 4096, "world_size": 8}

    def seconds(**rates: float) -> float:
        bars: dict[str, Any] = {name: (0, rate, 0) for name, rate in (limitless | rates).items()}
        rated = Rates(**bars)
        return step_seconds(args, 1, rated, layer_bytes=1e5, layer_launches=50, **job)

    assert seconds() == 0
    matrices = 24 * (4 * 2048**2 + 3 * 2048 * 5504) + 32000 * 2048
    assert seconds(gemm_flops=1e14) == pytest.approx(1000 * 6 * matrices / 1e14)
    pairs = 4096 / 2 * 2048 * 24  # causal: half of the tokens, a product of 2 FLOPs
    attended = 1000 * pairs * 2 * (2 + 5)  # forward two products, backward five
    assert seconds(attention_flops=1e14) == pytest.approx(attended / 1e14)
    assert seconds(launch_gap_s=1e-6) == pytest.approx(24 * 50 * 1e-6)
    moved = seconds(memory_bytes=1e12)
    assert 24 * 1000 * 1e5 / 1e12 < moved < 24 * 1000 * 1e5 / 1e12 + 0.01
