"""`eval compare`: its options and errors."""

import argparse
import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest

from canon_pretrain.core.errors import UserError
from canon_pretrain.report.comparison import add_arguments, execute
from tests.report_runs import ACC, evaluated, plant_answers, planted_run, records, right_or_wrong
from tests.support import refused

Output = pytest.CaptureFixture[str]
SUITE = "discriminative"


def run(
    folder: Path, share: float, seed: int = 0, at: int = 20, canon: str = "", **more: Any
) -> Path:
    found = planted_run(folder, seed, model__canon_set=canon)
    rng = np.random.default_rng(1000 * seed + round(100 * share))
    items = {"boolq": records({"acc": right_or_wrong(1000, share, rng)})}
    return plant_answers(found, at, SUITE, items, described={"boolq": ACC}, **more)


def compare(*words: object) -> dict[str, Any]:
    """Run the command and return its --json."""
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    with TemporaryDirectory() as folder:
        out = Path(folder) / "pair.json"
        execute(parser.parse_args(["--json", str(out), *map(str, words)]))
        return json.loads(out.read_text())


def test_a_sweep_is_all_of_its_runs(tmp_path):
    for name, canon, share in (("nope", "", 0.55), ("canon", "ABCD", 0.85)):
        for seed in range(2):
            run(tmp_path / "sweep" / name / f"seed{seed}", share, seed, canon=canon)
    sweep = tmp_path / "sweep"
    (two,) = compare(sweep / "nope", sweep / "canon")["pairs"]
    (one,) = compare(sweep)["pairs"]
    assert two["difference"] == pytest.approx(0.3, abs=0.05)
    assert one["difference"] == -two["difference"]  # sorted by name: canon is A
    with refused("compare.sides"):
        compare(sweep / "nope")


def test_held_out_loss_is_the_first_verdict(tmp_path, capsys):
    for name, canon, loss in (("a", "", 5.0), ("b", "A", 4.9)):
        for seed in range(2):
            evaluated(tmp_path / f"{name}{seed}", canon, loss + 0.002 * seed, seed)
            run(tmp_path / f"{name}{seed}", 0.5, seed, canon=canon)
    sides = [*("--a", tmp_path / "a0", tmp_path / "a1"), *("--b", tmp_path / "b0", tmp_path / "b1")]
    for words, count in (([], 2), (["--suite", "validation"], 1)):
        found = compare(*sides, *words)
        first = capsys.readouterr().out.splitlines()[0]
        assert first == found["held_out"] and found["pairs"][0]["verdict"] == "better"
        assert len(found["pairs"]) == count and found["pairs"][0]["task"] == "validation"
    assert compare(*sides, "--suite", SUITE)["held_out"] is None


def test_groups_of_seeds(tmp_path):
    a = [run(tmp_path / f"a{k}", 0.6 + 0.01 * k, k).parents[4] for k in range(4)]
    b = [run(tmp_path / f"b{k}", 0.9 + 0.01 * k, k, canon="A").parents[4] for k in range(4)]
    found = compare("--a", *a, "--b", *b)
    (row,) = found["pairs"]
    assert row["num_runs"] == [4, 4] and row["difference"] == pytest.approx(0.3)
    assert row["seed_noise"]["source"] == "own" and row["seed_noise"]["df"] == 6
    assert row["seed_noise"]["sigma"] == pytest.approx(np.std([0, 1, 2, 3], ddof=1) / 100)
    assert found["notes"] == []
    (row,) = compare("--a", *a[:2], "--b", *b[:2], "--own_noise_only")["pairs"]
    assert row["seed_noise"]["df"] == 2
    assert len(compare("--a", *a[:2], b[0], "--b", *b[1:])["notes"]) == 1  # A is not one recipe


def test_options_set_step_suite_and_seed_noise(tmp_path):
    for name, canon in (("a", ""), ("b", "A")):
        for at, share in ((10, 0.5), (20, 0.6 if canon else 0.5)):
            run(tmp_path / name, share, at=at, canon=canon)
    pair = [tmp_path / "a", tmp_path / "b"]
    for words, at in (([], 20), (["--step", 10], 10), (["--suite", SUITE], 20)):
        assert compare(*pair, *words)["pairs"][0]["step"] == at
    for sigma, verdict in ((0.001, "better"), (0.2, "within noise")):
        (row,) = compare(*pair, "--seed_sigma", f"boolq={sigma}")["pairs"]
        assert row["verdict"] == verdict
    for words in (["--step", 15], ["--suite", "jrt"]):
        with refused("compare.nothing"):
            compare(*pair, *words)
    for given in ("boolq", "boolqq=0.1", "boolq=-1"):
        with refused("compare.seed_sigma", given=given):
            compare(*pair, "--seed_sigma", given)


def test_sides_that_cannot_be_compared_are_errors(tmp_path):
    run(tmp_path / "a", 0.5)
    other = planted_run(tmp_path / "b", model__canon_set="A")
    items = {"boolq": records({"acc": [1.0, 0.0]}, names=["x", "y"])}
    plant_answers(other, 20, SUITE, items, described={"boolq": ACC}, max_length=64)
    run(tmp_path / "trial", 0.5, canon="A", limit=10)
    planted_run(tmp_path / "bare")
    for name, has in (("b", 1), ("trial", 1), ("bare", 0)):
        with refused("compare.nothing") as caught:
            compare(tmp_path / "a", tmp_path / name)
        fields = caught.value.fields
        assert [len(x) for x in fields["found"].values()] == [1, has]
        assert [x["task"] for x in fields["refused"]] == ["boolq" if name == "b" else None]
    for name in ("nowhere", "a"):
        with pytest.raises(UserError):
            compare(tmp_path / "a", tmp_path / name)
    a, b = tmp_path / "a", tmp_path / "b"
    for words in ([], [a, b, tmp_path / "trial"], ["--a", a], [a, b, "--a", tmp_path / "bare"]):
        with refused("compare.sides"):
            compare(*words)
