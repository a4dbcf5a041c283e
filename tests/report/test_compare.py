"""`eval compare`: the table of one pair, and what it refuses."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from canon_pretrain.core.errors import UserError
from canon_pretrain.report.eval_compare import add_arguments, execute
from canon_pretrain.report.eval_report import report
from tests.eval_simulation import evaluated, plant_answers, planted_run, records, right_or_wrong

ACC = {"boolq": {"primary": ["acc"], "higher_is_better": {"acc": True}, "chance": 0.5}}
SUITE = "discriminative"


def run(
    folder: Path, share: float, seed: int = 0, at: int = 20, canon: str = "", **more: Any
) -> Path:
    """A run that gets that share of boolq right; results.json lies in it."""
    found = planted_run(folder, seed, model__canon_set=canon)
    rng = np.random.default_rng(1000 * seed + round(100 * share))
    items = records({"acc": right_or_wrong(1000, share, rng)})
    return plant_answers(found, at, SUITE, {"boolq": items}, described=ACC, **more)


def _only(run_folder: Path, at: int) -> Path:
    """The one results.json of a step, from the suite's folder on."""
    (found,) = (run_folder / "evals" / f"step-{at}" / SUITE).glob("*/results.json")
    return found.relative_to(run_folder / "evals" / f"step-{at}" / SUITE)


def compare(*words: object) -> None:
    import argparse

    parser = argparse.ArgumentParser()
    add_arguments(parser)
    execute(parser.parse_args([str(word) for word in words]))


def test_as_a_user_types_it(tmp_path: Path) -> None:
    run(tmp_path / "nope", 0.55)
    run(tmp_path / "canon", 0.85, canon="ABCD")
    out = tmp_path / "out" / "pair.json"
    done = subprocess.run(
        [sys.executable, "-m", "eval", "compare", tmp_path / "nope", tmp_path / "canon"]
        + ["--json", out],
        capture_output=True,
        text=True,
        env={**os.environ, "COLUMNS": "140"},
    )
    assert (done.returncode, done.stderr) == (0, "")
    line = next(line for line in done.stdout.splitlines() if "boolq acc" in line)
    cells = line.split()
    assert cells[:5] == ["boolq", "acc", "0.550", "0.850", "+0.300"]
    assert cells[8] == "better"
    assert "A: nope" in done.stdout and "B: canon" in done.stdout
    assert "discriminative 1 test: 1 pair with the baseline" in done.stdout
    assert "boolq acc: seed noise the paper's: 8 seeds within 3 %" in done.stdout
    (row,) = json.loads(out.read_text())["pairs"]
    assert row["verdict"] == "better" and row["difference"] == pytest.approx(0.3)


def test_a_sweep_means_all_of_its_runs(tmp_path: Path) -> None:
    """Issue 17, item 10: one on each side, or one of two architectures; and in the report."""
    for name, canon, share in (("nope", "", 0.55), ("canon", "ABCD", 0.85)):
        for seed in range(2):
            run(tmp_path / name / f"seed{seed}", share, seed, canon=canon)
    outs = [tmp_path / "outs" / name for name in ("two.json", "one.json")]
    compare(tmp_path / "nope", tmp_path / "canon", "--json", outs[0])
    compare(tmp_path, "--json", outs[1])
    two, one = (json.loads(out.read_text())["pairs"][0] for out in outs)
    assert two["difference"] == pytest.approx(0.3, abs=0.05)
    assert one["difference"] == -two["difference"]  # in the order of their names: canon is A
    with pytest.raises(UserError, match="has 1 "):
        compare(tmp_path / "nope")
    with pytest.raises(UserError, match="is not a run folder and holds none"):
        compare(tmp_path / "outs", tmp_path / "nope")
    page = report([tmp_path], None)
    assert page == tmp_path / "report" / "index.html"
    assert len(json.loads((page.parent / "report.json").read_text())["runs"]) == 4


def test_held_out_loss_is_the_first_verdict(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Issue 17, item 1: printed first, and judged with `--suite validation` alone."""
    for name, canon, loss in (("a", "", 5.0), ("b", "A", 4.9)):
        for seed in range(2):
            evaluated(tmp_path / f"{name}{seed}", canon, loss + 0.002 * seed, seed)
            run(tmp_path / f"{name}{seed}", 0.5, seed, canon=canon)
    sides = [*("--a", tmp_path / "a0", tmp_path / "a1"), *("--b", tmp_path / "b0", tmp_path / "b1")]
    out = tmp_path / "pair.json"
    for words, count in (([], 2), (["--suite", "validation"], 1)):
        compare(*sides, *words, "--json", out)
        first = capsys.readouterr().out.splitlines()[0]
        assert first.startswith("held-out loss: B better by 0.1 nats/token (95 % ")
        assert json.loads(out.read_text())["held_out"] == first
        rows = json.loads(out.read_text())["pairs"]
        assert len(rows) == count and rows[0]["task"] == "validation"
    compare(*sides, "--suite", SUITE)
    assert "held-out" not in capsys.readouterr().out


def test_no_torch_is_imported(tmp_path: Path) -> None:
    run(tmp_path / "a", 0.5)
    run(tmp_path / "b", 0.5, seed=1)
    code = (
        "import sys; from eval.__main__ import main; "
        f"main(['compare', {str(tmp_path / 'a')!r}, {str(tmp_path / 'b')!r}]); "
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_groups_of_seeds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a = [run(tmp_path / f"a{k}", 0.6 + 0.01 * k, k).parents[4] for k in range(4)]
    b = [run(tmp_path / f"b{k}", 0.9 + 0.01 * k, k, canon="A").parents[4] for k in range(4)]
    out = tmp_path / "pair.json"
    compare("--a", *a, "--b", *b, "--json", out)
    (row,) = json.loads(out.read_text())["pairs"]
    assert row["num_runs"] == [4, 4] and row["difference"] == pytest.approx(0.3)
    assert row["seed_noise"]["source"] == "own" and row["seed_noise"]["df"] == 6
    assert row["seed_noise"]["sigma"] == pytest.approx(np.std([0, 1, 2, 3], ddof=1) / 100)
    assert json.loads(out.read_text())["notes"] == []
    compare("--a", *a[:2], "--b", *b[:2], "--own_noise_only", "--json", out)
    (row,) = json.loads(out.read_text())["pairs"]
    assert row["seed_noise"]["df"] == 2
    capsys.readouterr()
    compare("--a", *a[:2], b[0], "--b", *b[1:])
    assert "A: its runs differ in more than their seeds." in capsys.readouterr().out


def test_single_results_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two steps of one run, and a file that lies outside any run."""
    run(tmp_path / "a", 0.5)
    first = run(tmp_path / "a", 0.5, at=10)
    second = run(tmp_path / "b", 0.9, at=10, canon="A")
    compare(first, second, "--json", tmp_path / "pair.json")
    (row,) = json.loads((tmp_path / "pair.json").read_text())["pairs"]
    assert (row["step"], row["verdict"]) == (10, "better")
    capsys.readouterr()
    compare(first.parents[4] / "evals" / "step-20" / SUITE / _only(tmp_path / "a", 20), first)
    assert "discriminative, A at step 20, B at step 10" in capsys.readouterr().out
    moved = tmp_path / "moved"
    second.parent.rename(moved)
    compare(first, moved / "results.json")
    assert "better" in capsys.readouterr().out


def test_the_step_and_the_suite_are_the_users(tmp_path: Path) -> None:
    for name, canon in (("a", ""), ("b", "A")):
        for at, share in ((10, 0.5), (20, 0.9)):
            run(tmp_path / name, share, at=at, canon=canon)
    out = tmp_path / "pair.json"
    pair = [tmp_path / "a", tmp_path / "b"]
    for words, at in (([], 20), (["--step", 10], 10), (["--suite", SUITE], 20)):
        compare(*pair, *words, "--json", out)
        assert json.loads(out.read_text())["pairs"][0]["step"] == at
    with pytest.raises(UserError, match="no suite in common at step 15: a has disc.* at step 10"):
        compare(*pair, "--step", 15)
    with pytest.raises(UserError, match="no suite in common"):
        compare(*pair, "--suite", "jrt")


def test_a_given_seed_noise(tmp_path: Path) -> None:
    run(tmp_path / "a", 0.5)
    run(tmp_path / "b", 0.6, canon="A")
    out = tmp_path / "pair.json"
    for sigma, verdict in ((0.001, "better"), (0.2, "within noise")):
        compare(tmp_path / "a", tmp_path / "b", "--seed_sigma", f"boolq={sigma}", "--json", out)
        assert json.loads(out.read_text())["pairs"][0]["verdict"] == verdict
    for words in ("boolq", "boolq=x", "=1"):
        with pytest.raises(UserError, match="expected TASK=SIGMA"):
            compare(tmp_path / "a", tmp_path / "b", "--seed_sigma", words)


def test_other_items_say_what_was_asked_otherwise(tmp_path: Path) -> None:
    run(tmp_path / "a", 0.5)
    other = planted_run(tmp_path / "b", model__canon_set="A")
    items = records({"acc": [1.0, 0.0]}, names=["x", "y"])
    plant_answers(other, 20, SUITE, {"boolq": items}, described=ACC, max_length=64)
    with pytest.raises(UserError, match="nothing to compare") as refused:
        compare(tmp_path / "a", tmp_path / "b")
    assert "of them 0 in common" in str(refused.value)
    assert "max_length: 64 / 256" in str(refused.value)


def test_trials_are_no_results(tmp_path: Path) -> None:
    run(tmp_path / "a", 0.5)
    run(tmp_path / "b", 0.5, canon="A", limit=10)
    with pytest.raises(UserError, match=r"b has only results with --limit \(not a result\)"):
        compare(tmp_path / "a", tmp_path / "b")
    with pytest.raises(UserError, match="not a result"):
        compare(tmp_path / "a", run(tmp_path / "b", 0.5, canon="A", limit=10))


def test_nothing_in_common(tmp_path: Path) -> None:
    run(tmp_path / "a", 0.5)
    planted_run(tmp_path / "b")
    with pytest.raises(UserError, match="a has discriminative at step 20; b has no results"):
        compare(tmp_path / "a", tmp_path / "b")
    with pytest.raises(UserError, match="is not a run folder"):
        compare(tmp_path / "a", tmp_path / "nowhere")
    with pytest.raises(UserError, match="given twice"):
        compare(tmp_path / "a", tmp_path / "a")


@pytest.mark.parametrize(
    "words", [[], ["a"], ["a", "b", "c"], ["--a", "a"], ["a", "b", "--a", "c"]]
)
def test_two_sides_are_needed(words: list[str]) -> None:
    with pytest.raises(UserError, match="two runs|either A B"):
        compare(*words)


def test_a_file_that_cannot_be_written(tmp_path: Path) -> None:
    run(tmp_path / "a", 0.5)
    run(tmp_path / "b", 0.6, canon="A")
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="--json .* cannot be written"):
        compare(tmp_path / "a", tmp_path / "b", "--json", tmp_path / "file" / "x.json")
