"""Comparisons where something is odd: seeds that score alike, items twice, runs at other steps; and
that the simulated verdicts are the ones that a report gives."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from canon_pretrain.report.comparison import comparison_content
from canon_pretrain.report.eval_report import report
from canon_pretrain.report.evaluations import read_runs
from canon_pretrain.report.measure import Options
from tests import simulate_statistics as simulate
from tests.eval_simulation import plant_answers, planted_run, records, right_or_wrong, validations
from tests.report_pages import Page
from tests.report_runs import plant_run

ACC = {"primary": ["acc"], "higher_is_better": {"acc": True}, "chance": 0.5}
SUITE = "discriminative"
OWN_ONLY = Options(own_noise_only=True)


def plant(
    folder: Path,
    seed: int,
    answers: Sequence[float],
    canon: str = "",
    at: int = 20,
    **identity: float,
) -> Path:
    run = planted_run(folder, seed, model__canon_set=canon, **identity)
    items = {"boolq": records({"acc": answers})}
    plant_answers(run, at, SUITE, items, described={"boolq": ACC})
    return folder


def test_simulated_verdicts_are_those_of_a_report(tmp_path: Path) -> None:
    """The same answers, once through files, joins and tables, once through the simulation."""
    scenario = simulate.Scenario("", 3, 2, "own")
    kinds = [task for tasks in simulate.SUITES for task in tasks]
    drawn: list[np.ndarray] = []
    answers = simulate.answers

    def kept(*given: object) -> np.ndarray:
        drawn.append(answers(*given))  # type: ignore[arg-type]
        return drawn[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(simulate, "answers", kept)
        simulated = simulate.compare_all(scenario, 0.03, np.random.default_rng(1))
    p = simulate.p_values([test.pair for test in simulated])
    is_real = simulate._rejected([simulated])[0]
    places = [k // simulate.PER_SOURCE for k in range(simulate.NUM_ITEMS)]
    paths = []
    for recipe, canon in enumerate(("", "A", "AB")):
        for seed in range(2):
            run = planted_run(tmp_path / f"{recipe}-{seed}", seed, model__canon_set=canon)
            items = {
                task: records(
                    {"acc": runs[recipe, seed].tolist()},
                    sources=[f"{task} source {k}" for k in places],
                    names=[f"{task} {k}" for k in range(simulate.NUM_ITEMS)],
                )
                for task, runs in zip(kinds, drawn, strict=True)
            }
            for suite, tasks in zip((SUITE, "jrt"), simulate.SUITES, strict=True):
                here = {task: items[task] for task in tasks}
                plant_answers(run, 20, suite, here, described=dict.fromkeys(tasks, ACC))
            paths.append(run.path)
    found = comparison_content(read_runs(paths), options=OWN_ONLY)
    assert found["family"]["tests"] == len(simulated) == 34
    assert found["family"]["suites"] == {SUITE: 18, "jrt": 16}
    rows = {(row["task"], row["architecture"]): row for row in found["pairs"]}
    labels = [pair[0] for pair in found["family"]["pairs"]]
    expected = [
        (task, label)
        for suite, tasks in zip((SUITE, "jrt"), simulate.SUITES, strict=True)
        for label in labels
        for task in (*tasks, f"{suite}, mean of {len(tasks)} tasks")
    ]
    for key, test, own, real in zip(expected, simulated, p, is_real, strict=True):
        row = rows[key]
        assert row["difference"] == pytest.approx(test.pair.difference, abs=1e-12)
        assert row["stderr"] == pytest.approx(test.pair.noise.stderr)
        assert row["p"] == pytest.approx(own)
        assert (row["verdict"] in ("better", "worse")) == real


def test_seeds_that_all_score_one_do_not_judge_a_single_run(tmp_path: Path) -> None:
    sure = [plant(tmp_path / f"a{k}", k, [1.0] * 400) for k in range(3)]
    other = plant(tmp_path / "b", 7, right_or_wrong(400, 0.97, np.random.default_rng(0)), "A")
    (row,) = comparison_content(read_runs([*sure, other]))["pairs"]
    assert row["seed_noise"]["source"] == "paper"
    assert row["verdict"] == "within noise"
    (row,) = comparison_content(read_runs([*sure, other]), options=OWN_ONLY)["pairs"]
    assert row["verdict"] == "not judged"
    # where the other side has seeds of its own, both sides tell
    second = plant(tmp_path / "c", 8, right_or_wrong(400, 0.975, np.random.default_rng(1)), "A")
    (row,) = comparison_content(read_runs([*sure, other, second]))["pairs"]
    assert row["seed_noise"]["source"] == "own and paper"
    assert "5 runs of 2 recipes" in row["seed_noise"]["words"]


def test_an_item_that_the_data_hold_twice_is_one_draw(tmp_path: Path) -> None:
    names = [f"{k // 2}" for k in range(400)]
    rng = np.random.default_rng(0)
    for folder, canon in (("a", ""), ("b", "A")):
        run = planted_run(tmp_path / folder, model__canon_set=canon)
        answers = np.repeat(right_or_wrong(200, 0.5, rng), 2).tolist()
        items = {"boolq": records({"acc": answers}, names=names)}
        plant_answers(run, 20, SUITE, items, described={"boolq": ACC})
    (row,) = comparison_content(read_runs([tmp_path / "a", tmp_path / "b"]))["pairs"]
    assert (row["num_items"], row["num_clusters"]) == (400, 200)


def test_what_no_accuracy_can_differ_by_could_not_have_been_shown(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    paths = [
        plant(tmp_path / f"{canon}{k}", k, right_or_wrong(100, share, rng), canon)
        for canon, share in (("A", 0.4), ("B", 0.5))
        for k, share in enumerate((share, share + 0.1))
    ]
    one = [paths[0], paths[2], paths[3]]  # one degree of freedom
    (row,) = comparison_content(read_runs(one), options=OWN_ONLY)["pairs"]
    assert row["detectable"] is None and "no difference at all" in row["words"]


def test_scores_by_architecture_are_of_one_step(tmp_path: Path) -> None:
    """A seed that is evaluated further than the other would else be averaged with it."""
    rng = np.random.default_rng(0)
    first = plant(tmp_path / "a", 1, right_or_wrong(400, 0.5, rng))
    second = plant(tmp_path / "b", 2, right_or_wrong(400, 0.52, rng))
    later = right_or_wrong(400, 0.9, rng)
    plant_answers(
        read_runs([second])[0].folder,
        40,
        SUITE,
        {"boolq": records({"acc": later})},
        described={"boolq": ACC},
    )
    found = comparison_content(read_runs([first, second]))
    for name in ("chosen", "best_of"):
        (cell,) = found[name][0]["cells"]
        assert (cell["step"], cell["num_runs"], cell["value"]) == (40, 1, pytest.approx(0.9))
    assert any("left out" in note and "a (20)" in note for note in found["notes"])
    (row,) = found["every_run"]
    assert [cell["step"] for cell in row["cells"]] == [20, 40] and row["suite_step"] == 40


def test_one_lagging_run_does_not_pull_the_tables_to_its_step(tmp_path: Path) -> None:
    """Issue 17, item 3: a table shows the step of the verdict, and each cell says its step."""
    rng = np.random.default_rng(0)
    paths = []
    for canon, steps in (("", (20, 40)), ("A", (20, 40)), ("ABCD", (20,))):
        for at in steps:
            share = 0.5 + 0.005 * at + 0.1 * bool(canon)
            plant(tmp_path / f"run-{canon}", 1, right_or_wrong(400, share, rng), canon, at=at)
        paths.append(tmp_path / f"run-{canon}")
    found = comparison_content(read_runs(paths))
    rows = {row["architecture"]: row for row in found["pairs"]}
    assert {name: row["step"] for name, row in rows.items()} == {"Canon-A": 40, "Canon-ABCD": 20}
    for name in ("chosen", "best_of"):
        (table,) = found[name]
        cells = {cell["architecture"]: cell for cell in table["cells"]}
        assert cells["no Canon"]["step"] == table["suite_step"] == 40
        for label, row in rows.items():
            assert cells[label]["step"] == row["step"] and row["suite_step"] == 40
            assert cells[label]["value"] == pytest.approx(row["value"])
    assert any("Canon-ABCD at 20" in note for note in found["notes"])
    page = report(paths, tmp_path / "out")
    marked = [row for row in Page(page).rows if any("step 20" in cell for cell in row)]
    tables = [row for row in marked if row[0].startswith("boolq acc")]
    assert len(tables) == 4  # the difference, the chosen rate, the best, and the run's own scores
    assert not any("step 40" in cell for row in tables for cell in row)


def test_no_step_in_common_is_told(tmp_path: Path) -> None:
    first = plant(tmp_path / "a", 1, [0.0, 1.0] * 50, at=20)
    second = plant(tmp_path / "b", 2, [0.0, 1.0] * 50, "A", at=40)
    found = comparison_content(read_runs([first, second]))
    assert [cell["step"] for cell in found["chosen"][0]["cells"]] == [20, 40]
    assert any("Canon-A at 40" in note for note in found["notes"])


def test_the_error_of_a_chosen_score_is_of_items_and_seeds(tmp_path: Path) -> None:
    run = plant(tmp_path / "a", 1, [0.0, 1.0] * 200)
    (cell,) = comparison_content(read_runs([run]), options=Options({"boolq": 0.02}))["chosen"][0][
        "cells"
    ]
    assert cell["stderr"] == pytest.approx(np.hypot(0.02, np.sqrt(0.25 / 399)))


def test_more_learning_rates_for_one_architecture_are_told(tmp_path: Path) -> None:
    paths = []
    for name, canon, rate, loss in (("a", "", 1, 3.0), ("b", "A", 1, 3.0), ("c", "A", 2, 2.9)):
        run = plant_run(
            tmp_path / name, validations({20: loss}), model__canon_set=canon, optimizer__lr=rate
        )
        paths.append(run.path)
    found = comparison_content(read_runs(paths))
    assert "1 to 2 learning rates" in found["selection_words"]
    assert "by luck" not in comparison_content(read_runs(paths[:2]))["selection_words"]


def test_a_validation_of_an_early_step_does_not_choose_for_a_late_one(tmp_path: Path) -> None:
    paths = []
    for name, rate, early, late in (("slow", 1, 5.0, 2.0), ("fast", 2, 4.0, 3.0)):
        run = plant_run(tmp_path / name, validations({5: early, 500: late}), optimizer__lr=rate)
        empty = {"validation": records({"x": [1.0]})}
        scores = {"validation": {"nats_per_token": early}}
        plant_answers(run, 5, "validation", empty, scores=scores)
        paths.append(run.path)
    (selected,) = [x for x in comparison_content(read_runs(paths))["selection"] if x["chosen"]]
    assert (selected["runs"], selected["step"], selected["loss"]) == (["slow"], 500, 2.0)
