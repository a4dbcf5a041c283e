"""What runs say about architectures: planted answers give the verdicts that they must."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from lm_eval.api import metrics
from scipy import stats

from canon_pretrain.core.errors import UserError
from canon_pretrain.report.architectures import architectures, choose
from canon_pretrain.report.comparison import comparison_content
from canon_pretrain.report.evaluations import read_runs
from canon_pretrain.report.figures import score_curves
from canon_pretrain.report.items import Records, Scale, _values
from canon_pretrain.report.measure import Options
from canon_pretrain.run.folder import RunFolder
from canon_pretrain.run.results import Score
from tests.eval_simulation import (
    evaluated,
    plant_answers,
    planted_run,
    records,
    right_or_wrong,
    validations,
)
from tests.report_runs import plant_results, plant_run

ACC = {"boolq": {"primary": ["acc"], "higher_is_better": {"acc": True}, "chance": 0.5}}
SUITE = "discriminative"


def generator() -> np.random.Generator:
    return np.random.default_rng(7)


def content(*folders: Path, baseline: str | None = None, **options: Any) -> dict[str, Any]:
    found = comparison_content(read_runs(folders), baseline, Options(**options))
    json.dumps(found, allow_nan=False)
    return found


def two_architectures(
    tmp_path: Path, a: float, b: float, count: int = 2000, seeds: int = 1
) -> list[Path]:
    """NoPE runs with a share `a` of the answers right, then Canon runs with `b`."""
    rng = generator()
    for name, share, canon in (("nope", a, ""), ("canon", b, "ABCD")):
        for seed in range(seeds):
            run = planted_run(tmp_path / f"{name}-{seed}", seed, model__canon_set=canon)
            answers = right_or_wrong(count, share + 0.002 * seed, rng)
            plant_answers(run, 20, SUITE, {"boolq": records({"acc": answers})}, described=ACC)
    return [tmp_path / f"{name}-{seed}" for name in ("nope", "canon") for seed in range(seeds)]


def planted_pair(
    folder: Path, first: Any, second: Any, suite: str = SUITE, task: str = "boolq", **more: Any
) -> list[Path]:
    """Run a, and run b with Canon, which have those records of one task."""
    for name, canon, items in (("a", "", first), ("b", "A", second)):
        run = planted_run(folder / name, model__canon_set=canon)
        plant_answers(run, 20, suite, {task: items}, **({"described": ACC} | more))
    return [folder / "a", folder / "b"]


# -- architectures --------------------------------------------------------------------------------


def test_runs_are_grouped_by_all_but_learning_rate_and_seeds(tmp_path: Path) -> None:
    planted_run(tmp_path / "a", 1, optimizer__lr=0.001)
    planted_run(tmp_path / "b", 2, optimizer__lr=0.001)
    planted_run(tmp_path / "c", 1, optimizer__lr=0.002)
    planted_run(tmp_path / "d", 1, optimizer__lr=0.001, model__position="rope")
    planted_run(tmp_path / "e", 1, optimizer__lr=0.001, lr_scheduler__decay_type="linear")
    planted_run(tmp_path / "f", 1, optimizer__lr=0.001, model__position="rope", model__dim=96)
    found = architectures(read_runs([tmp_path / name for name in "abcdef"]))
    assert [[run.label for run in each.runs] for each in found] == [
        ["a", "b", "c"],
        ["d"],
        ["e"],
        ["f"],
    ]
    assert [r.learning_rate for r in found[0].recipes] == [0.001, 0.002]
    assert [each.label for each in found] == [
        "nope, dim 128, decay_type cosine",
        "rope, dim 128, decay_type cosine",
        "nope, dim 128, decay_type linear",
        "rope, dim 96, decay_type cosine",
    ]
    assert found[3].settings == {
        "lr_scheduler.decay_type": "cosine",
        "model.dim": 96,
        "model.position": "rope",
    }


def test_labels_are_short_and_unique(tmp_path: Path) -> None:
    planted_run(tmp_path / "a", model__canon_set="")
    planted_run(tmp_path / "b", model__canon_set="ABCD")
    planted_run(tmp_path / "c", model__canon_set="ABCD", model__position="rope")
    labels = [each.label for each in architectures(read_runs([tmp_path / n for n in "abc"]))]
    assert labels == ["nope, no Canon", "nope, Canon-ABCD", "rope, Canon-ABCD"]
    one = architectures(read_runs([tmp_path / "a"]))
    assert [each.label for each in one] == ["quickstart"]
    # equal in all that a word shows
    for name, end in (("x", "0"), ("y", "1")):
        planted_run(tmp_path / name, data_fingerprint="f" * 40 + end)
    same = [each.label for each in architectures(read_runs([tmp_path / "x", tmp_path / "y"]))]
    assert len(set(same)) == 2


def test_a_field_that_an_older_version_lacks_is_at_its_default(tmp_path: Path) -> None:
    planted_run(tmp_path / "old", 1)
    planted_run(tmp_path / "new", 2, model__qk_norm="none", model__ffn="gated")
    assert len(architectures(read_runs([tmp_path / "old", tmp_path / "new"]))) == 1


def test_a_repeat_of_the_same_seeds_is_no_further_seed(tmp_path: Path) -> None:
    paths = two_architectures(tmp_path, 0.5, 0.5)
    again = planted_run(tmp_path / "again", 0, model__canon_set="ABCD")
    answers = right_or_wrong(2000, 0.9, generator())
    plant_answers(again, 20, SUITE, {"boolq": records({"acc": answers})}, described=ACC)
    found = content(*paths, again.path)
    assert found["pairs"][0]["num_runs"] == [1, 1]
    assert any("again" in note and "no further seed" in note for note in found["notes"])
    assert "again" in [cell["run"] for cell in found["every_run"][0]["cells"]]


# -- learning rates -------------------------------------------------------------------------------


def rated(folder: Path, rate: float, losses: dict[int, Any]) -> Path:
    plant_run(folder, validations(losses), optimizer__lr=rate)
    return folder


def test_the_learning_rate_is_chosen_by_the_logged_held_out_loss(tmp_path: Path) -> None:
    paths = [
        rated(tmp_path / "low", 0.001, {10: 3.0, 20: 2.5}),
        rated(tmp_path / "high", 0.002, {10: 2.9, 20: 2.6, 30: 1.0}),
        rated(tmp_path / "nan", 0.004, {10: 2.0, 20: "NaN"}),
    ]
    (one,) = architectures(read_runs(paths))
    choice = choose(one)
    assert choice.recipe is one.recipes[0] and choice.step == 20
    assert choice.losses == [2.5, 2.6, None]
    assert "the loss that training logs" in choice.words
    found = content(*paths)
    assert [row["chosen"] for row in found["selection"]] == [True, False, False]
    assert found["architectures"][0]["chosen"]["loss"] == 2.5


def test_the_validation_suite_goes_before_the_log(tmp_path: Path) -> None:
    paths = [
        rated(tmp_path / "low", 0.001, {20: 2.5}),
        rated(tmp_path / "high", 0.002, {20: 2.6}),
    ]
    for path, loss in zip(paths, (2.7, 2.4), strict=True):
        run = read_runs([path])[0].folder
        scores = {"validation": {"nats_per_token": loss}}
        empty = {"validation": records({"x": [1.0]})}
        plant_answers(run, 20, "validation", empty, scores=scores)
    (one,) = architectures(read_runs(paths))
    choice = choose(one)
    assert choice.recipe is one.recipes[1] and "the suite `validation`" in choice.words
    assert "the suite `validation`" in content(*paths)["selection_words"]


def test_losses_of_different_texts_choose_no_learning_rate(tmp_path: Path) -> None:
    """Issue 17, item 17: nor are they one row or curve; they make no other architecture, and
    no further seed."""
    texts = {"low": "a" * 64, "high": "b" * 64}
    for name, rate in (("low", 0.001), ("high", 0.002)):
        run = rated(tmp_path / name, rate, {20: 2.5 if name == "low" else 2.6})
        stored = RunFolder(run).read_config()
        stored["identity"]["held_out_fingerprint"] = texts[name]
        RunFolder(run).write_config(stored["config"], stored["identity"])
        for at in (10, 20):
            asked = {"held_out_fingerprint": texts[name]}
            scores = {"validation": {"nats_per_token": Score(3.0)}}
            plant_results(RunFolder(run), at, "validation", scores, **asked)
    paths = [tmp_path / "low", tmp_path / "high"]
    (one,) = architectures(read_runs(paths))
    choice = choose(one)
    assert choice.recipe is None and choice.losses == [None, None]
    rows = content(*paths)["every_run"]
    assert [[cell["run"] for cell in row["cells"]] for row in rows] == [["low"], ["high"]]
    curves = score_curves(read_runs(paths))
    assert [[line["run"] for line in curve["lines"]] for curve in curves] == [["low"], ["high"]]
    # both on one text, on purpose: that one counts
    asked = {"held_out_fingerprint": texts["low"]}
    scores = {"validation": {"nats_per_token": Score(2.9)}}
    plant_results(RunFolder(tmp_path / "high"), 20, "validation", scores, **asked)
    (one,) = architectures(read_runs(paths))
    assert choose(one).losses == [3.0, 2.9]
    # what the run records is shown, however old
    assert [row["cells"][0]["value"] for row in content(*paths)["every_run"]] == [3.0, 3.0]
    again = rated(tmp_path / "again", 0.001, {20: 2.5})
    (one,) = architectures(read_runs([*paths, again]))
    assert [run.label for run in one.recipes[0].repeats] == ["again"]


def test_several_learning_rates_without_a_held_out_loss_are_not_judged(tmp_path: Path) -> None:
    paths = two_architectures(tmp_path, 0.5, 0.9)
    other = planted_run(tmp_path / "other", 5, model__canon_set="ABCD", optimizer__lr=0.001)
    found = content(*paths, other.path)
    assert found["pairs"] == []
    why = found["architectures"][1]["why_not"]
    assert "2 learning rates and no held-out loss" in why and "suite `validation`" in why
    assert found["best_of"] and [c["num_runs"] for c in found["best_of"][0]["cells"]] == [1, 1]


def test_verdicts_are_of_the_chosen_rate_and_the_papers_table_of_the_best(tmp_path: Path) -> None:
    rng = generator()
    base = planted_run(tmp_path / "base")
    plant_answers(
        base, 20, SUITE, {"boolq": records({"acc": right_or_wrong(1000, 0.5, rng)})}, described=ACC
    )
    for name, rate, loss, share in (("good", 0.001, 2.0, 0.52), ("lucky", 0.002, 3.0, 0.7)):
        run = plant_run(
            tmp_path / name, validations({20: loss}), optimizer__lr=rate, model__canon_set="A"
        )
        answers = {"boolq": records({"acc": right_or_wrong(1000, share, rng)})}
        plant_answers(run, 20, SUITE, answers, described=ACC)
    found = content(tmp_path / "base", tmp_path / "good", tmp_path / "lucky")
    (pair,) = found["pairs"]
    assert pair["value"] == pytest.approx(0.52) and pair["verdict"] == "uninformative"
    best = {cell["architecture"]: cell for cell in found["best_of"][0]["cells"]}
    assert best["Canon-A"]["value"] == pytest.approx(0.7) and best["Canon-A"]["run"] == "lucky"
    assert best["Canon-A"]["bias"] == pytest.approx(0.5642 * 0.03 / 2.847, rel=1e-3)
    assert best["no Canon" if "no Canon" in best else "Canon-ABCD"]["bias"] == 0
    chosen = {cell["architecture"]: cell for cell in found["chosen"][0]["cells"]}
    assert chosen["Canon-A"]["value"] == pytest.approx(0.52)
    assert chosen["Canon-A"]["learning_rate"] == 0.001


# -- verdicts -------------------------------------------------------------------------------------


def test_a_large_difference_is_real_and_a_small_one_within_noise(tmp_path: Path) -> None:
    found = content(*two_architectures(tmp_path / "large", 0.5, 0.8))
    (row,) = found["pairs"]
    assert (row["architecture"], row["baseline"]) == ("Canon-ABCD", "no Canon")
    assert (row["verdict"], row["difference"]) == ("better", pytest.approx(0.3))
    assert row["ci"][0] < 0.3 < row["ci"][1] and row["ci"][0] > 0
    assert (
        row["seed_noise"]["source"] == "paper"
        and "8 seeds within 3 %" in row["seed_noise"]["words"]
    )
    (row,) = content(*two_architectures(tmp_path / "small", 0.6, 0.62))["pairs"]
    assert row["verdict"] == "within noise" and row["uninformative"] is None
    assert row["p_holm"] > 0.05 and row["detectable"] >= row["detectable_alone"] > 0.02
    assert row["seeds_needed"] > 1 and f"with {row['seeds_needed']} seeds" in row["words"]
    (row,) = content(*two_architectures(tmp_path / "chance", 0.5, 0.51))["pairs"]
    assert row["verdict"] == "uninformative" and row["uninformative"] == "chance"
    assert row["detectable"] is row["detectable_alone"] is row["seeds_needed"] is None


@pytest.mark.parametrize(
    ("shares", "chance", "found"),
    [
        ((0.0, 0.0), None, "floor"),
        ((0.001, 0.003), None, "floor"),
        ((0.0, 0.02), None, None),
        ((1.0, 0.998), None, "ceiling"),
        ((0.5, 0.51), 0.5, "chance"),
        ((0.5, 0.51), None, None),
        ((0.2, 0.21), 0.2, "chance"),
        ((0.5, 0.9), 0.5, None),
    ],
)
def test_floor_ceiling_and_chance_on_both_sides_are_uninformative(
    tmp_path: Path, shares: tuple[float, float], chance: float | None, found: str | None
) -> None:
    """Issue 17, item 1: nothing is claimed to be detectable where nothing could show."""
    described = {"t": {"primary": ["exact"], "chance": chance}}
    for judged in (True, False):  # without seed noise too: birth-year probes of one seed
        items = [records({"exact": right_or_wrong(1000, x, generator())}) for x in shares]
        folder = tmp_path / f"{judged}"
        paths = planted_pair(folder, *items, "birth-year", "t", described=described)
        more = {"seed_sigma": {"t": 0.02}} if judged else {}
        (row,) = content(*paths, **more)["pairs"]
        assert row["uninformative"] == found
        assert (row["verdict"] == "uninformative") == (found is not None)
        assert found is None or row["detectable"] is row["seeds_needed"] is None


def test_chance_of_undeclared_tasks_is_by_their_number_of_choices(tmp_path: Path) -> None:
    """Issue 17, item 1: a task of the user's that declares no chance."""
    items = [
        [x | {"answers": [[-1.0, False]] * 3} for x in records({"acc": answers})]
        for answers in (right_or_wrong(1000, share, generator()) for share in (0.33, 0.34))
    ]
    (row,) = content(*planted_pair(tmp_path, *items, "mine", "t", described={}))["pairs"]
    assert row["chance"] == pytest.approx(1 / 3) and row["uninformative"] == "chance"


# -- held-out loss --------------------------------------------------------------------------------


def test_held_out_loss_is_paired_over_documents_and_seeds(tmp_path: Path) -> None:
    """Issue 17, item 1: the token-weighted mean, as a ratio, against formulas by hand."""
    losses = {"a": (5.0, 5.02), "b": (4.9, 4.93)}
    paths = [
        evaluated(tmp_path / f"{name}{seed}", "A" * (name == "b"), loss, seed)
        for name, both in losses.items()
        for seed, loss in enumerate(both)
    ]
    found = content(*paths)
    (row,) = found["pairs"]
    assert (row["task"], row["num_runs"], row["num_items"]) == ("validation", [2, 2], 400)
    assert row["difference"] == pytest.approx(4.915 - 5.01) and not row["higher_is_better"]
    assert row["verdict"] == "better" and row["seed_noise"]["source"] == "own"
    assert row["seed_noise"]["sigma"] == pytest.approx(math.sqrt((0.0002 + 0.00045) / 2))
    assert found["held_out"][0].startswith("held-out loss: Canon-A better by 0.095 nats/token")
    low, high = row["ci"]
    assert low < row["difference"] < high < 0 and row["p"] < 0.05
    # over documents: the linearized variance of a ratio of sums
    nats = {
        p.name: Records().of(f, "validation", "nats_per_token")
        for p in paths
        for f in p.glob("evals/*/*/*")
    }
    values = {name: items.of_metric("nats_per_token") for name, items in nats.items() if items}
    weights = values["a0"][1]
    each = sum(values[n][0] for n in ("b0", "b1")) / 2 - sum(values[n][0] for n in ("a0", "a1")) / 2
    assert np.average(each, weights=weights) == pytest.approx(row["difference"])
    residuals = weights * (each - row["difference"]) / weights.sum()
    half = np.diff(row["items_ci"])[0] / 2
    assert half == pytest.approx(1.96 * math.sqrt((residuals**2).sum()), rel=0.08)


def test_one_seed_each_has_a_held_out_interval_and_no_verdict(tmp_path: Path) -> None:
    """Issue 17, item 1: documents alone say nothing of other seeds."""
    paths = [evaluated(tmp_path / "a", "", 5.0), evaluated(tmp_path / "b", "A", 4.9)]
    found = content(*paths)
    (row,) = found["pairs"]
    assert row["verdict"] == "not judged" and row["items_ci"][1] < 0
    assert "lower by 0.1 nats/token" in found["held_out"][0]
    sigma = {"validation:nats_per_token": 0.01}
    assert content(*paths, seed_sigma=sigma)["pairs"][0]["verdict"] == "better"
    assert content(*paths, baseline="Canon-A", seed_sigma=sigma)["pairs"][0]["verdict"] == "worse"


def test_without_evaluations_the_logged_held_out_loss_is_said(tmp_path: Path) -> None:
    """Issue 17, item 1: losses of the training logs at a step that all runs have."""
    for name, canon, losses in (("a", "", {10: 5.5, 20: 5.0}), ("b", "A", {10: 5.25})):
        plant_run(tmp_path / name, validations(losses), model__canon_set=canon)
    (words,) = content(tmp_path / "a", tmp_path / "b")["held_out"]
    assert "step 10" in words and "5.2500" in words and "5.5000" in words and "no verdict" in words


def test_the_baseline_may_be_named_and_turns_the_signs(tmp_path: Path) -> None:
    paths = two_architectures(tmp_path, 0.5, 0.8)
    (one,) = content(*paths)["pairs"]
    for name in ("Canon-ABCD", "canon-0"):
        (other,) = content(*paths, baseline=name)["pairs"]
        assert (other["verdict"], other["baseline"]) == ("worse", "Canon-ABCD")
        assert other["difference"] == pytest.approx(-one["difference"])
        assert other["p"] == pytest.approx(one["p"])
        assert other["ci"] == pytest.approx([-one["ci"][1], -one["ci"][0]])
    with pytest.raises(UserError, match="no architecture and no run here; there are 'no Canon'"):
        content(*paths, baseline="Mamba")


def test_one_row_by_hand(tmp_path: Path) -> None:
    """All that a row says of two single runs, from formulas written out here."""
    (row,) = content(*two_architectures(tmp_path, 0.5, 0.6), seed_sigma={"boolq": 0.02})["pairs"]
    rng = generator()
    a, b = (np.array(right_or_wrong(2000, share, rng)) for share in (0.5, 0.6))
    difference = np.append(b - a, [1, -1])
    items = difference.var(ddof=1) / difference.size
    items *= (2002 / 2002) ** 2
    error = math.sqrt(items + 2 * 0.02**2)
    assert row["stderr"] == pytest.approx(error, rel=2e-3)
    assert row["stderr_seeds"] == pytest.approx(0.02 * math.sqrt(2))
    assert row["p"] == pytest.approx(2 * stats.norm.sf(0.1 / error), rel=0.02)
    half = stats.norm.isf(0.025) * error
    assert row["ci"] == pytest.approx([0.1 - half, 0.1 + half], rel=5e-3)
    assert row["detectable"] == pytest.approx((1.959964 + 0.841621) * error, rel=5e-3)
    assert row["mcnemar"]["only_a"] - row["mcnemar"]["only_b"] == 200
    assert row["mcnemar"]["only_a"] == int(((b == 1) & (a == 0)).sum())
    wide = 1.96 * math.sqrt((b - a).var() / 2000)
    assert row["items_ci"] == pytest.approx([0.1 - wide, 0.1 + wide], abs=0.003)
    assert row["seed_noise"] == {
        "sigma": pytest.approx(0.02), "df": None, "source": "given", "words": "given: 0.02",
        "scale": "metric",
    }  # fmt: skip


@pytest.mark.parametrize("seeds", [1, 2, 6])
def test_seeds_needed_and_intervals_agree_with_the_verdict(tmp_path: Path, seeds: int) -> None:
    """Issue 17, item 3: what is within noise needs more seeds; an interval excludes 0 iff real."""
    rng, tasks = generator(), [f"task_{k}" for k in range(12)]
    for name, canon in (("nope", ""), ("canon", "ABCD")):
        for seed in range(seeds):
            run = planted_run(tmp_path / f"{name}-{seed}", seed, model__canon_set=canon)
            answers = {}
            for k, task in enumerate(tasks):
                share = 0.5 + 0.003 * k**2 * bool(canon) + rng.normal(0, 0.003)
                answers[task] = records({"acc": right_or_wrong(1000, share, rng)})
            described = {task: {"primary": ["acc"]} for task in tasks}
            plant_answers(run, 20, SUITE, answers, described=described)
    mean, *rows = content(*sorted(tmp_path.iterdir(), reverse=True))["pairs"]
    assert mean["mean_of"] == tasks
    noise = [row for row in rows if row["verdict"] == "within noise"]
    assert noise and len(noise) < len(rows) == 12
    for row in rows:
        excludes_0 = row["ci"][0] > 0 or row["ci"][1] < 0
        assert excludes_0 == (row["verdict"] != "within noise")
        assert row["seeds_needed"] is None or (not excludes_0 and row["seeds_needed"] > seeds)
    assert any(row["seeds_needed"] for row in noise)


def test_seeds_are_averaged_and_their_spread_is_pooled(tmp_path: Path) -> None:
    found = content(*two_architectures(tmp_path, 0.5, 0.8, seeds=4))
    (row,) = found["pairs"]
    assert row["num_runs"] == [4, 4] and row["mcnemar"] is None
    assert row["difference"] == pytest.approx(0.3)
    noise = row["seed_noise"]
    assert (noise["source"], noise["df"]) == ("own", 6.0)
    assert noise["sigma"] == pytest.approx(np.std([0, 0.002, 0.004, 0.006], ddof=1))
    assert "8 runs of 2 recipes" in noise["words"]
    (chosen,) = found["chosen"]
    assert [cell["num_runs"] for cell in chosen["cells"]] == [4, 4]


def test_items_of_one_source_count_as_one_draw(tmp_path: Path) -> None:
    errors = []
    for name, width in (("own", 1), ("shared", 20)):
        for run_name, canon, share in (("a", "", 0.5), ("b", "ABCD", 0.6)):
            run = planted_run(tmp_path / name / run_name, model__canon_set=canon)
            blocks = right_or_wrong(100, share, np.random.default_rng(len(canon)))
            answers = np.repeat(blocks, 20).tolist()
            sources = [f"source {k // width}" for k in range(2000)]
            items = records({"acc": answers}, sources=sources)
            plant_answers(run, 20, SUITE, {"boolq": items}, described=ACC)
        paths = [tmp_path / name / run_name for run_name in "ab"]
        (row,) = content(*paths)["pairs"]
        assert row["num_clusters"] == 2000 // width
        errors.append(row["stderr_items"])
    assert errors[1] / errors[0] == pytest.approx(math.sqrt(20), rel=0.02)


def test_items_of_one_source_alone_are_not_judged(tmp_path: Path) -> None:
    items = records({"acc": [1.0, 0.0, 1.0]}, sources=["one"] * 3)
    (row,) = content(*planted_pair(tmp_path, items, items))["pairs"]
    assert (row["verdict"], row["p"], row["num_clusters"]) == ("not judged", None, 1)
    assert "of one source" in row["words"]


def test_holm_is_over_every_task_and_pair_of_a_suite(tmp_path: Path) -> None:
    rng = generator()
    tasks = [f"task{k}" for k in range(6)]
    described = dict.fromkeys(tasks, ACC["boolq"])
    for name, canon, shift in (("a", "", 0.0), ("b", "A", 0.065), ("c", "AB", 0.0)):
        run = planted_run(tmp_path / name, model__canon_set=canon)
        answers = {t: records({"acc": right_or_wrong(4000, 0.6 + shift, rng)}) for t in tasks}
        plant_answers(run, 20, SUITE, answers, described=described)
        plant_answers(run, 20, "mine", {"x": answers["task0"]}, described={"x": ACC["boolq"]})
    both = content(*(tmp_path / name for name in "abc"), seed_sigma={"x": 0.02})
    assert both["family"]["suites"] == {SUITE: 14, "mine": 2}
    found = content(*(tmp_path / name for name in "abc"), suites=[SUITE])
    assert [r["p_holm"] for r in both["pairs"] if r["suite"] == SUITE] == [
        row["p_holm"] for row in found["pairs"]
    ]
    assert found["family"]["tests"] == 14 and len(found["family"]["tasks"]) == 7
    assert found["family"]["pairs"] == [["Canon-A", "no Canon"], ["Canon-AB", "no Canon"]]
    # the two means have half of the error rate, the twelve tasks the other half
    first = [row["p"] * (4 if row["mean_of"] else 24) for row in found["pairs"]]
    for row in found["pairs"]:
        assert row["p_holm"] >= row["p"]
        assert (row["verdict"] == "within noise") == (row["p_holm"] > 0.05)
    assert min(row["p_holm"] for row in found["pairs"]) == pytest.approx(min(1, min(first)))
    few = content(*(tmp_path / name for name in "ab"), suites=[SUITE])
    assert few["family"]["tests"] == 7


def test_a_suite_is_judged_by_the_mean_of_its_tasks_first(tmp_path: Path) -> None:
    """Issue 17, item 3: seven points on every task, which no task shows alone."""
    rng, tasks = generator(), [f"jrt_{k}" for k in range(8)]
    described = dict.fromkeys(tasks, {"primary": ["contains"]})
    for name, canon, share in (("a", "", 0.4), ("b", "A", 0.49)):
        run = planted_run(tmp_path / name, model__canon_set=canon)
        answers = {t: records({"contains": right_or_wrong(1000, share, rng)}) for t in tasks}
        plant_answers(run, 20, "jrt", answers, described=described)
    mean, *rows = content(tmp_path / "a", tmp_path / "b")["pairs"]
    assert mean["mean_of"] == tasks and mean["metric"] == "contains"
    assert mean["difference"] == pytest.approx(0.09) and mean["verdict"] == "better"
    assert {row["verdict"] for row in rows} == {"within noise"}
    assert (mean["num_items"], mean["num_clusters"]) == (8000, 1000)  # the same documents
    # the paper's spread, as if all tasks had the same luck
    assert mean["seed_noise"]["sigma"] == pytest.approx(0.05 / 2.847)


def test_babilong_is_one_test_per_length(tmp_path: Path) -> None:
    """Issue 17, item 3: 20 cells are four tests and the mean of all."""
    rng = generator()
    tasks = [f"babilong_qa{k}_{length}k" for k in range(1, 6) for length in (0, 1, 2, 4)]
    for name, canon in (("a", ""), ("b", "A")):
        run = planted_run(tmp_path / name, model__canon_set=canon)
        answers = {t: records({"acc": right_or_wrong(100, 0.4, rng)}) for t in tasks}
        plant_answers(run, 20, "babilong", answers, described=dict.fromkeys(tasks, ACC["boolq"]))
    rows = content(tmp_path / "a", tmp_path / "b")["pairs"]
    assert [len(row["mean_of"]) for row in rows] == [20, 5, 5, 5, 5]
    assert rows[4]["mean_of"] == [f"babilong_qa{k}_4k" for k in range(1, 6)]


def test_a_perplexity_is_compared_in_nats_and_shown_on_its_scale(tmp_path: Path) -> None:
    rng = generator()
    weights = rng.integers(50, 400, 60)
    nats = rng.normal(3.0, 0.3, 60)
    described = {
        "wikitext": {"primary": ["word_perplexity"], "higher_is_better": {"word_perplexity": False}}
    }
    for name, canon, better in (("a", "", 0.0), ("b", "ABCD", 0.1)):
        run = planted_run(tmp_path / name, model__canon_set=canon)
        each = nats - better + rng.normal(0, 0.01, 60)
        pairs = [[-float(x * w), int(w)] for x, w in zip(each, weights, strict=True)]
        items = records({"word_perplexity": pairs, "bits_per_byte": pairs})
        plant_answers(run, 20, SUITE, {"wikitext": items}, described=described)
    paths = [tmp_path / "a", tmp_path / "b"]
    (row,) = content(*paths)["pairs"]
    assert row["verdict"] == "not judged" and "no seed noise known" in row["words"]
    assert row["p"] is None and row["items_ci"][1] < 0
    (row,) = content(*paths, seed_sigma={"wikitext:word_perplexity": 0.005})["pairs"]
    assert row["verdict"] == "better" and row["difference"] < 0
    assert row["log_difference"] == pytest.approx(math.log(row["value"] / row["baseline_value"]))
    assert row["log_difference"] == pytest.approx(-0.1, abs=0.01)
    for shown, log in zip(row["ci"], row["log_ci"], strict=True):
        assert shown == pytest.approx(row["baseline_value"] * math.expm1(log))
    assert row["seed_noise"]["scale"] == "log"


def test_a_perplexity_of_log_likelihoods(tmp_path: Path) -> None:
    for seed in range(4):
        for name, canon, nats in (("a", "", 3.0), ("b", "ABCD", 2.0)):
            run = planted_run(tmp_path / f"{name}{seed}", seed, model__canon_set=canon)
            values = [-(nats + 0.1 * seed + 0.001 * k) for k in range(100)]
            plant_answers(run, 20, SUITE, {"lambada_openai": records({"perplexity": values})})
    paths = [tmp_path / f"{name}{seed}" for name in "ab" for seed in range(4)]
    (row,) = content(*paths)["pairs"]
    assert row["higher_is_better"] is False and row["verdict"] == "better"
    assert row["log_difference"] == pytest.approx(-1.0)
    assert row["seed_noise"]["sigma"] == pytest.approx(np.std([0, 0.1, 0.2, 0.3], ddof=1))


# -- what is refused ------------------------------------------------------------------------------


def refusal(tmp_path: Path, first: Any, second: Any, **more: Any) -> str:
    """Why two single runs with those records of boolq cannot be compared."""
    found = content(*planted_pair(tmp_path, first, second, **more))
    assert found["pairs"] == []
    (row,) = found["refused"]
    return row["why"]


def test_other_items_are_refused_with_counts(tmp_path: Path) -> None:
    first = records({"acc": [1.0, 0.0, 1.0]}, names=["a", "b", "c"])
    second = records({"acc": [1.0, 0.0]}, names=["b", "d"])
    assert "other items: 2 and 3, of them 1 in common" in refusal(tmp_path, first, second)


def test_what_was_asked_otherwise_is_told_and_refused_where_it_matters(tmp_path: Path) -> None:
    for name, canon, length, settings in (("a", "", 256, "x"), ("b", "ABCD", 512, "y")):
        run = planted_run(tmp_path / name, model__canon_set=canon)
        items = records({"acc": [1.0, 0.0, 1.0], "perplexity": [-1.0, -2.0, -3.0]})
        described = {"lambada": {"primary": ["acc", "perplexity"], "config_sha256": settings}}
        plant_answers(
            run, 20, SUITE, {"lambada": items}, described=described, max_length=length, lm_eval=name
        )
    found = content(tmp_path / "a", tmp_path / "b")
    (row,), (refused,) = found["pairs"], found["refused"]
    told = ["max_length: 512 / 256", 'settings of the task: "y" / "x"']
    assert row["metric"] == "acc" and row["asked_differently"] == told
    assert refused["metric"] == "perplexity"
    assert refused["why"] == f"asked differently, on which it depends ({'; '.join(told)})"


def test_the_order_of_the_records_does_not_matter(tmp_path: Path) -> None:
    items = records({"acc": [1.0, 0.0, 1.0, 1.0]}, names=["a", "b", "a", "c"])
    (row,) = content(*planted_pair(tmp_path, items, [items[3], *items[:3]]))["pairs"]
    assert row["difference"] == 0 and row["num_items"] == 4
    assert (row["mcnemar"]["only_a"], row["mcnemar"]["only_b"]) == (0, 0)


def test_a_score_that_is_no_mean_over_its_items_is_refused(tmp_path: Path) -> None:
    items = records({"acc": [1.0, 0.0]})
    why = refusal(tmp_path, items, items, scores={"boolq": {"acc": 0.7}})
    assert "scores 0.7, which is no mean over its items (0.5)" in why


def test_items_without_finite_values_or_records_are_refused(tmp_path: Path) -> None:
    fine = records({"acc": [1.0, 0.0]})
    why = refusal(tmp_path / "inf", fine, records({"acc": [1.0, math.inf]}))
    assert "b has an item without a finite value" in why
    refusal_without = refusal(tmp_path / "none", fine, [{"doc_id": 0, "acc": 1.0}])
    assert "b kept no records of its items" in refusal_without


def test_trials_and_other_steps_are_no_results(tmp_path: Path) -> None:
    rng = generator()
    for name, canon in (("a", ""), ("b", "ABCD")):
        run = planted_run(tmp_path / name, model__canon_set=canon)
        for at, limit in ((10, None), (20, 5 if name == "b" else None)):
            answers = {"boolq": records({"acc": right_or_wrong(100, 0.5, rng)})}
            plant_answers(run, at, SUITE, answers, limit=limit, described=ACC)
    paths = [tmp_path / "a", tmp_path / "b"]
    assert [row["step"] for row in content(*paths)["pairs"]] == [10]
    found = content(*paths, step=20)
    assert found["pairs"] == []
    assert [row["why"] for row in found["refused"]] == ["no whole result at a step that both have"]


def test_a_run_without_the_suite_at_that_step_is_named(tmp_path: Path) -> None:
    paths = two_architectures(tmp_path, 0.5, 0.8, seeds=2)
    planted_run(tmp_path / "late", 9, model__canon_set="ABCD")
    found = content(*paths, tmp_path / "late")
    assert "discriminative at step 20: no whole result of late" in found["notes"]
    assert found["pairs"][0]["num_runs"] == [2, 2]


def test_little_is_no_error(tmp_path: Path) -> None:
    one = planted_run(tmp_path / "one")
    found = content(one.path)
    assert found["pairs"] == found["every_run"] == found["best_of"] == found["refused"] == []
    assert found["family"]["words"] == "no test could be made"
    assert found["notes"] == ["One architecture only: there is nothing to compare it with."]
    assert comparison_content([])["baseline"] is None


def test_seed_sigma_of_nothing_is_an_error(tmp_path: Path) -> None:
    paths = two_architectures(tmp_path, 0.5, 0.8)
    with pytest.raises(UserError, match='Did you mean "boolq"'):
        content(*paths, seed_sigma={"boolqq": 0.1})
    with pytest.raises(UserError, match="above 0"):
        content(*paths, seed_sigma={"boolq": -0.1})


def test_a_score_that_is_infinite_is_no_number_in_json(tmp_path: Path) -> None:
    items = records({"perplexity": [-1.0, -2.0]})
    scores = {"boolq": {"perplexity": math.inf}}
    found = content(*planted_pair(tmp_path, items, items, scores=scores, described={}))
    assert [cell["value"] for cell in found["every_run"][0]["cells"]] == [None, None]
    assert found["best_of"][0]["cells"] == []


def test_equal_items_are_kept_in_memory_once(tmp_path: Path) -> None:
    paths = two_architectures(tmp_path, 0.5, 0.8, count=50)
    known = Records()
    runs = read_runs(paths)
    first, second = (known.of(run.folders[0], "boolq", "acc") for run in runs)
    assert first is not None and second is not None and first.keys is second.keys
    assert known.of(runs[0].folders[0], "piqa", "acc") is None


@pytest.mark.parametrize("metric", ["word_perplexity", "bits_per_byte", "perplexity", "acc"])
def test_scores_follow_from_items_as_lm_eval_aggregates_them(metric: str) -> None:
    rng = generator()
    aggregations = {
        "word_perplexity": metrics.weighted_perplexity,
        "bits_per_byte": metrics.bits_per_byte,
        "perplexity": metrics.perplexity,
        "acc": metrics.mean,
    }
    if metric in ("word_perplexity", "bits_per_byte"):
        values: list[Any] = [(float(-x), int(10 * x)) for x in rng.uniform(5, 90, 30)]
    else:
        values = rng.uniform(-3, -1, 30).tolist()
    items = records({metric: [list(x) if isinstance(x, tuple) else x for x in values]})
    ours = _values(items)[metric]
    scale = Scale.of(metric)
    mean = np.average(ours[:, 0] * scale.factor, weights=ours[:, 1])
    assert scale.score(float(mean)) == pytest.approx(aggregations[metric](values), rel=1e-12)
    assert scale.mean(scale.score(float(mean))) == pytest.approx(float(mean))


def test_each_filter_of_the_answers_is_compared_with_itself(tmp_path: Path) -> None:
    described = {"gsm": {"primary": ["match, strict"], "higher_is_better": {"match": True}}}
    for name, canon, share in (("a", "", 0.2), ("b", "ABCD", 0.8)):
        run = planted_run(tmp_path / name, model__canon_set=canon)
        shares = {"strict": share, "flexible": 1 - share}
        items = [
            record | {"filter": kind}
            for kind, part in shares.items()
            for record in records({"match": right_or_wrong(400, part, generator())})
        ]
        scores = {"gsm": {f"match, {kind}": part for kind, part in shares.items()}}
        plant_answers(run, 20, SUITE, {"gsm": items}, scores=scores, described=described)
    (row,) = content(tmp_path / "a", tmp_path / "b")["pairs"]
    assert (row["metric"], row["num_items"]) == ("match, strict", 400)
    assert (row["difference"], row["verdict"]) == (pytest.approx(0.6), "better")
