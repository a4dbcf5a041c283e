"""Launches and bytes of a block on an H100, counted again and compared with the record."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from importlib.metadata import version

import pytest

from canon_pretrain.model.args import flavor
from canon_pretrain.titan.costs import auto_backend
from tests.bench.codegen import PAGE, RECORD, Case, computed, page, with_recorded_rows
from tests.bench.limits import min_block_bytes
from tests.support import ROOT, refused

RECORDED = json.loads(RECORD.read_text())
SOME_MODELS = ("nope",)
OTHER_MODELS = ("released_1b", "rope_documents", "rope_standard_gelu")


def _count(folder, models, canon_set="ABCD"):
    """Count the blocks again; skip if the record is of other versions."""
    for package, expected in RECORDED["versions"].items():
        if version(package) != expected:
            pytest.skip(f"recorded with {package} {expected}")

    # in its own process, since it fakes a GPU
    file = folder / "codegen.json"
    subprocess.run(
        [
            *(sys.executable, "-m", "tests.bench", "codegen"),
            *("--models", *models, "--sets", canon_set, "--json", str(file)),
        ],
        cwd=ROOT,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        check=True,
    )
    return json.loads(file.read_text())["rows"]


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    return _count(tmp_path_factory.mktemp("codegen"), SOME_MODELS)


def _figures(rows):
    """Return every count of the rows by a name of its own."""
    figures = {}
    for row in rows:
        name = f"{row['model']} {row['canon_set']} {row['backend']}"
        for direction in ("forward", "backward"):
            counts = dict(row[direction], **row[direction]["kib"], kib=0)
            for kind, count in counts.items():
                figures[f"{name} {direction} {kind}"] = count
        figures[f"{name} saved"] = row["saved_bytes"]
        figures[f"{name} extra"] = computed(row, rows)["extra_kib"]
    return figures


def _assert_no_figure_rises(rows):
    """By more than 2 percent."""
    recorded = _figures(RECORDED["rows"])
    for name, value in _figures(rows).items():
        assert value <= recorded[name] + 0.02 * abs(recorded[name]) + 0.01, name


@pytest.mark.system
def test_no_figure_of_a_block_rises_by_more_than_2_percent(rows):
    assert len(rows) == 3 * len(SOME_MODELS)
    _assert_no_figure_rises(rows)


@pytest.mark.long
def test_no_figure_of_other_blocks_rises(tmp_path):
    rows = _count(tmp_path, OTHER_MODELS)
    assert len(rows) == 3 * len(OTHER_MODELS)
    _assert_no_figure_rises(rows)


@pytest.mark.long
def test_figures_of_other_places_do_not_rise(tmp_path):
    rows = _count(tmp_path, ["rope"], "FKOV")
    assert len(rows) == 3
    _assert_no_figure_rises(rows)


@pytest.mark.parametrize("canon_set", ["FKOV", "ABCDFO", "ABCD"])
def test_auto_takes_the_backend_that_costs_least(canon_set):
    """In bytes and time of a step, in every model that is recorded with these sets. Of AC at
    released_1b, which is not among them, the two differ by 0.1 % of a step."""
    rows = [row for row in RECORDED["rows"] if row["canon_set"] == canon_set]
    models = dict.fromkeys(row["model"] for row in rows)
    assert "nope" in models
    for model in models:
        by_backend = {row["backend"]: row for row in rows if row["model"] == model}
        taken = auto_backend(Case(model, canon_set, "auto").args)
        (other,) = by_backend.keys() - {taken}
        costs = computed(by_backend[taken], RECORDED["rows"])
        other_costs = computed(by_backend[other], RECORDED["rows"])
        assert costs["total_kib"] <= other_costs["total_kib"], model
        assert costs["seconds"][1] <= other_costs["seconds"][1], model


@pytest.mark.parametrize("canon_set", ["FKOV", "ABCDFO", "ABCD"])
def test_triton_launches_less_than_compiled(canon_set):
    def launches(backend, direction):
        counts = _recorded("nope", canon_set, backend)[direction]
        return counts["launches"] + counts["operators"]

    for direction in ("forward", "backward"):
        assert launches("triton", direction) < launches("compiled", direction)


def test_other_places_keep_their_inputs_for_backward():
    """K, V, O and F have D channels each, in bfloat16; nothing else is kept, and taps are few."""
    without = _recorded("nope", "", "compiled")
    places = _recorded("nope", "FKOV", "triton")
    assert places["saved_bytes"] - without["saved_bytes"] == pytest.approx(4 * 2048 * 2, rel=1e-3)
    # a kernel of ours for each site
    assert places["forward"]["operators"] == places["backward"]["operators"] == 4


def _recorded(model, canon_set, backend):
    (row,) = (
        row
        for row in RECORDED["rows"]
        if (row["model"], row["canon_set"], row["backend"]) == (model, canon_set, backend)
    )
    return row


def test_a_part_of_the_record_can_be_renewed():
    counted = RECORDED["rows"][3] | {"saved_bytes": 1}
    new = RECORDED["rows"][3] | {"canon_set": "K"}
    result = RECORDED | {"rows": [new, counted]}

    merged = with_recorded_rows(result, RECORDED)["rows"]

    assert merged == [*RECORDED["rows"][:3], counted, *RECORDED["rows"][4:], new]
    with refused("bench.codegen", given={"torch": "0"}):
        with_recorded_rows(result, RECORDED | {"versions": {"torch": "0"}})


def test_the_page_is_current():
    assert PAGE.read_text() == page(RECORDED)


@pytest.mark.system
def test_inductor_counts_equal_counts_by_hand(rows):
    none, _, fused = rows[:3]
    dim = 2048
    width = 5504
    num_tokens = 6 * 4096
    value_bytes = 2

    # norm; stream and norm; activation; stream: 2 + 3 + 4 D (the stream is added twice), 3 F
    other = value_bytes * (9 * dim + 3 * width)
    assert none["forward"]["kib"]["other"] == pytest.approx(other / 1024, 1e-3)

    # q, k, v and output; gate, up and down; each weight is read once
    activations = value_bytes * (4 * 2 * dim + 3 * (dim + width))
    weights = value_bytes * (4 * dim * dim + 3 * dim * width) / num_tokens
    gemm = activations + weights
    assert none["forward"]["kib"]["gemm"] * 1024 == pytest.approx(gemm, rel=1e-3)

    for row in (none, fused):
        args = replace(flavor("1b3"), position="nope", canon_set=row["canon_set"])
        least_bytes = sum(map(sum, min_block_bytes(args, value_bytes).values()))
        derived = computed(row, rows)
        assert derived["least_kib"] == pytest.approx(least_bytes / 1024)
        assert 1 <= derived["ratio"] < 1.25
