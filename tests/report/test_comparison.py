"""Architectures and `eval compare`: planted item scores give the expected verdicts."""

import json
import math

import numpy as np
import pytest
from lm_eval.api import metrics
from scipy import stats

from canon_pretrain.core.cli import Parser
from canon_pretrain.report.architectures import architectures, choose
from canon_pretrain.report.comparison import add_arguments, comparison_content
from canon_pretrain.report.comparison import run as run_compare
from canon_pretrain.report.figures import score_curves
from canon_pretrain.report.items import ItemCache, Scale, _values
from canon_pretrain.report.record import read_runs
from canon_pretrain.report.verdicts import Options
from canon_pretrain.run.folder import RunFolder
from canon_pretrain.run.log import json_value
from canon_pretrain.run.results import Score
from tests import simulate_statistics as simulate
from tests.report_pages import Page, report
from tests.report_pages import content as content_of
from tests.report_runs import (
    ACC,
    evaluated,
    plant_answers,
    plant_results,
    plant_run,
    planted_run,
    records,
    right_or_wrong,
    validations,
)
from tests.support import refused

SUITE = "discriminative"
RNG = np.random.default_rng


# Cohen's quantiles of a two-sided test at 5 % with 80 % power
QUANTILES = 1.959964 + 0.841621


# mean range of 8 normal draws in standard deviations: the paper prints ranges of 8 seeds
RANGE_OF_8 = 2.847


def content(*folders, baseline=None, **options):
    """Return the comparison of run folders as it is written to report.json."""
    runs, _ = read_runs(folders)
    return json_value(comparison_content(runs, baseline, Options(**options)))


def only_pair(*folders, **options):
    """Return the one row of a comparison."""
    (row,) = content(*folders, **options)["pairs"]
    return row


def right(share, count=1000, rng=None):
    """Return item records with that share of right answers."""
    return records({"acc": right_or_wrong(count, share, rng or RNG(7))})


def plant(folder, tasks, canon="", seed=0, at=20, suite=SUITE, described=None, **asked):
    """Plant a run with item records by task, or of boolq; return its folder."""
    run = planted_run(folder, seed, model__canon_set=canon)
    by_task = tasks if isinstance(tasks, dict) else {"boolq": tasks}
    if described is None:
        described = {"boolq": ACC}
    plant_answers(run, at, suite, by_task, described=described, **asked)
    return folder


def versus(folder, *runs, **options):
    """Plant runs a, b, c without Canon, with A, with AB; return their folders."""
    canon_sets = {"a": "", "b": "A", "c": "AB"}
    return [
        plant(folder / name, tasks, canon_sets[name], **options)
        for name, tasks in zip("abc", runs, strict=False)
    ]


def test_runs_are_grouped_by_architecture(tmp_path):
    changes = {
        "a": {},
        "b": {},
        "c": {"optimizer__lr": 0.002},
        "d": {"model__position": "rope"},
        "e": {"lr_scheduler__decay_type": "linear"},
        "f": {"model__position": "rope", "model__dim": 96},
        # a field that an older version lacks has its default
        "g": {"model__qk_norm": "none", "model__ffn": "gated"},
    }
    for seed, (name, change) in enumerate(changes.items()):
        identity = {"optimizer__lr": 0.001} | change
        planted_run(tmp_path / name, seed, **identity)
    runs, _ = read_runs([tmp_path / name for name in changes])

    groups = architectures(runs)

    names = ["".join(run.label for run in group.runs) for group in groups]
    assert names == ["abgc", "d", "e", "f"]
    assert [recipe.learning_rate for recipe in groups[0].recipes] == [0.001, 0.002]
    assert groups[3].label.split(", ") == ["rope", "dim 96", "decay_type cosine"]


def test_labels_name_the_mixer(tmp_path):
    """A run of a version without the field is attention's."""
    linear = {"model__position": "nope", "model__canon_set": "", "model__mixer_conv": False}
    mamba = linear | {"model__mixer": "mamba2"}
    changes = [
        {"model__position": "rope"},
        linear | {"model__mixer": "gla"},
        mamba,
        mamba | {"model__mixer_conv": True},
        mamba | {"model__canon_set": "AB"},
        {"model__position": "rope", "model__ffn": "moe"},
    ]
    for seed, change in enumerate(changes):
        planted_run(tmp_path / f"run{seed}", seed, **change)
    runs, _ = read_runs([tmp_path / f"run{seed}" for seed in range(len(changes))])

    labels = [group.label.split(", ") for group in architectures(runs)]
    assert [(label[0], label[-1]) for label in labels] == [
        ("attention", "ffn gated"),
        ("gla", "ffn gated"),
        ("mamba2", "ffn gated"),
        ("mamba2", "ffn gated"),
        ("mamba2", "ffn gated"),
        ("attention", "ffn moe"),
    ]
    assert [label[1:3] for label in labels[2:5]] == [
        ["no conv1d", "no Canon"],
        ["conv1d", "no Canon"],
        ["no conv1d", "Canon-AB"],
    ]

    # fields that all runs share are left out
    assert [group.label for group in architectures(runs[1:3])] == ["gla", "mamba2"]
    (alone,) = architectures(runs[1:2])
    assert alone.label.endswith(", gla")


def rated(folder, rate, losses, **identity):
    """Plant a run with that learning rate and logged losses by step; return its folder."""
    return plant_run(folder, validations(losses), optimizer__lr=rate, **identity).path


def scored(run, at, loss, **asked):
    """Write results of the suite `validation` with that loss."""
    scores = {"validation": {"nats_per_token": Score(loss)}}
    plant_results(RunFolder(run), at, "validation", scores, **asked)


def chosen(*paths):
    """Return the one architecture of these runs, and the learning rate chosen for it."""
    (architecture,) = architectures(read_runs(paths)[0])
    return architecture, choose(architecture)


def test_learning_rate_is_chosen_by_logged_loss(tmp_path):
    low = rated(tmp_path / "low", 0.001, {10: 3.0, 20: 2.5})
    high = rated(tmp_path / "high", 0.002, {10: 2.9, 20: 2.6, 30: 1.0})
    diverged = rated(tmp_path / "nan", 0.004, {10: 2.0, 20: "NaN"})

    architecture, choice = chosen(low, high, diverged)

    assert choice.recipe is architecture.recipes[0]
    assert (choice.step, choice.losses) == (20, [2.5, 2.6, None])


def test_learning_rate_is_chosen_at_the_last_step(tmp_path):
    """At equal steps the suite `validation` is preferred to the log."""
    slow = rated(tmp_path / "slow", 1, {5: 5.0, 500: 2.0})
    fast = rated(tmp_path / "fast", 2, {5: 4.0, 500: 3.0})
    scored(slow, 5, 5.0)
    scored(fast, 5, 4.0)
    _, choice = chosen(slow, fast)
    assert (choice.step, choice.losses) == (500, [2.0, 3.0])

    scored(slow, 500, 2.7)
    scored(fast, 500, 2.4)
    architecture, choice = chosen(slow, fast)
    assert choice.recipe is architecture.recipes[1]
    assert choice.losses == [2.7, 2.4]


def test_losses_of_different_texts_are_not_compared(tmp_path):
    low_text = "a" * 64
    high_text = "b" * 64
    low = rated(tmp_path / "low", 2.5, {20: 2.5}, held_out_fingerprint=low_text)
    high = rated(tmp_path / "high", 2.6, {20: 2.6}, held_out_fingerprint=high_text)
    for run, text in ((low, low_text), (high, high_text)):
        for at in (10, 20):
            scored(run, at, 3.0, held_out_fingerprint=text)

    _, choice = chosen(low, high)
    assert choice.recipe is None
    assert choice.losses == [None, None]
    curves = score_curves(read_runs([low, high])[0])
    assert [[line.run for line in curve.lines] for curve in curves] == [["low"], ["high"]]

    # both evaluated on the same text
    scored(high, 20, 2.9, held_out_fingerprint=low_text)
    _, choice = chosen(low, high)
    assert choice.losses == [3.0, 2.9]

    again = rated(tmp_path / "again", 2.5, {20: 2.5})
    architecture, _ = chosen(low, high, again)
    assert [run.label for run in architecture.recipes[0].repeats] == ["again"]


def test_without_a_chosen_learning_rate_there_are_no_verdicts(tmp_path):
    paths = versus(tmp_path, right(0.5), right(0.9))
    repeat = plant(tmp_path / "again", right(0.5), "A")
    with_repeat = content(*paths, repeat)
    assert with_repeat["pairs"][0]["num_runs"] == [1, 1]  # a repeated seed is not used
    assert any("again" in note for note in with_repeat["notes"])

    # no loss tells which of two learning rates to choose
    planted_run(tmp_path / "other", 5, model__canon_set="A", optimizer__lr=0.001)
    for baseline in ("a", "b"):
        comparison = content(*paths, tmp_path / "other", baseline=baseline)
        assert comparison["pairs"] == []
        assert comparison["notes"]
    assert not any(recipe["chosen"] for recipe in comparison["architectures"][1]["recipes"])


def test_verdicts_use_the_chosen_rate_and_best_uses_all(tmp_path):
    rng = RNG(7)
    base = plant(tmp_path / "base", right(0.5, rng=rng), "ABCD")
    good = plant_run(
        tmp_path / "good", validations({20: 2.0}), optimizer__lr=0.001, model__canon_set="A"
    )
    lucky = plant_run(
        tmp_path / "lucky", validations({20: 3.0}), optimizer__lr=0.002, model__canon_set="A"
    )
    for run, share in ((good, 0.52), (lucky, 0.7)):
        plant_answers(run, 20, SUITE, {"boolq": right(share, rng=rng)}, described={"boolq": ACC})

    comparison = content(base, good.path, lucky.path)

    (pair,) = comparison["pairs"]
    assert pair["value"] == pytest.approx(0.52)
    assert pair["verdict"] == "uninformative"

    cells = {cell["architecture"]: cell for cell in comparison["scores"][0]["cells"]}
    best = cells["Canon-A"]["best"]
    mean = cells["Canon-A"]["chosen"]
    expected_maximum_of_two = 0.5642
    assert (best["value"], best["run"]) == (pytest.approx(0.7), "lucky")
    assert best["bias"] == pytest.approx(expected_maximum_of_two * 0.03 / RANGE_OF_8, rel=1e-3)
    assert cells["Canon-ABCD"]["best"]["bias"] == 0
    assert mean["value"] == pytest.approx(0.52)

    recipes = comparison["architectures"][1]["recipes"]
    assert [recipe["chosen"] for recipe in recipes] == [True, False]
    # a note about unequal tuning
    assert len(comparison["notes"]) == 1
    assert not content(base, good.path)["notes"]


@pytest.mark.parametrize(
    ("shares", "chance", "reason"),
    [
        ((0.0, 0.0), None, "floor"),
        ((0.0, 0.02), None, None),
        ((1.0, 0.998), None, "ceiling"),
        ((0.5, 0.51), 0.5, "chance"),
        ((0.5, 0.51), None, None),
        ((0.5, 0.9), 0.5, None),
    ],
)
@pytest.mark.parametrize("seed_sigma", [{"t": 0.02}, None], ids=["seed-noise", "no-seed-noise"])
def test_floor_ceiling_and_chance_are_uninformative(tmp_path, shares, chance, reason, seed_sigma):
    described = {"t": {"primary": ["acc"], "chance": chance}}
    runs = [{"t": right(share)} for share in shares]
    paths = versus(tmp_path, *runs, suite="birth-year", described=described)

    row = only_pair(*paths) if seed_sigma is None else only_pair(*paths, seed_sigma=seed_sigma)

    assert row["uninformative"] == reason
    assert (row["verdict"] == "uninformative") == (reason is not None)
    if reason is not None:
        assert row["detectable"] is None
        assert row["seeds_needed"] is None


def test_chance_follows_from_the_number_of_choices(tmp_path):
    three_answers = [[-1.0, False]] * 3
    runs = []
    for share in (0.33, 0.34):
        items = [record | {"answers": three_answers} for record in right(share)]
        runs.append({"t": items})

    row = only_pair(*versus(tmp_path, *runs, suite="mine"))

    assert row["chance"] == pytest.approx(1 / 3)
    assert row["uninformative"] == "chance"


def test_held_out_loss_against_formulas_by_hand(tmp_path):
    a0 = evaluated(tmp_path / "a0", "", 5.0, 0)
    a1 = evaluated(tmp_path / "a1", "", 5.02, 1)
    b0 = evaluated(tmp_path / "b0", "A", 4.9, 0)
    b1 = evaluated(tmp_path / "b1", "A", 4.93, 1)
    paths = [a0, a1, b0, b1]
    assert content(*paths, suites=[SUITE])["pairs"] == []

    row = only_pair(*paths)

    assert (row["task"], row["num_runs"], row["num_items"]) == ("validation", [2, 2], 400)
    assert row["difference"] == pytest.approx(4.915 - 5.01)
    assert not row["higher_is_better"]
    assert row["verdict"] == "better"
    assert row["p"] < 0.05
    low, high = row["ci"]
    assert low < row["difference"] < high < 0

    # variances of two runs each: (5.02 - 5.0)^2 / 2 and (4.93 - 4.9)^2 / 2
    assert row["seed_noise"]["source"] == "own"
    assert row["seed_noise"]["sigma"] == pytest.approx(math.sqrt((0.0002 + 0.00045) / 2))

    # over documents: the linearized variance of a ratio of sums
    nats = []
    for run in read_runs(paths)[0]:
        (evaluation,) = run.evaluations
        items = ItemCache().get(evaluation, "validation", "nats_per_token")
        nats.append(items.values["nats_per_token"])
    weights = nats[0][:, 1]
    differences = (nats[2] + nats[3] - nats[0] - nats[1])[:, 0] / 2
    assert np.average(differences, weights=weights) == pytest.approx(row["difference"])
    residuals = weights * (differences - row["difference"]) / weights.sum()
    half_width = np.diff(row["items_ci"])[0] / 2
    assert half_width == pytest.approx(1.96 * math.sqrt((residuals**2).sum()), rel=0.08)


def test_one_seed_per_side_has_an_interval_and_no_verdict(tmp_path):
    paths = [evaluated(tmp_path / "a", "", 5.0), evaluated(tmp_path / "b", "A", 4.9)]

    row = only_pair(*paths)
    assert row["verdict"] == "not judged"
    assert row["items_ci"][1] < 0

    sigma = {"validation:nats_per_token": 0.01}
    for baseline, verdict in ((None, "better"), ("Canon-A", "worse"), ("b", "worse")):
        row = only_pair(*paths, baseline=baseline, seed_sigma=sigma)
        assert row["verdict"] == verdict

    with refused("compare.baseline", given="Mamba", expected=["no Canon", "Canon-A"]):
        content(*paths, baseline="Mamba")


@pytest.mark.parametrize("count", [1, 2, 7, 8])
def test_below_eight_documents_is_no_interval_or_verdict(tmp_path, count):
    is_enough = count == 8
    paths = [
        evaluated(tmp_path / "a0", "", 5.0, 0, count),
        evaluated(tmp_path / "a1", "", 5.01, 1, count),
        evaluated(tmp_path / "b0", "A", 4.0, 0, count),
        evaluated(tmp_path / "b1", "A", 4.01, 1, count),
    ]

    comparison = content(*paths)

    (row,) = comparison["pairs"]
    assert (row["num_clusters"], row["difference"]) == (count, pytest.approx(-1.0))
    assert (row["items_ci"] is not None) == is_enough
    assert (row["p"] is not None) == is_enough
    assert (row["verdict"] == "not judged") != is_enough
    (text,) = comparison["held_out"]
    assert f"{count} document" in text
    assert ("95 %" in text) == is_enough


def test_without_evaluations_the_logged_loss_is_shown(tmp_path):
    plant_run(tmp_path / "a", validations({10: 5.5, 20: 5.0}), model__canon_set="")
    plant_run(tmp_path / "b", validations({10: 5.25}), model__canon_set="A")

    (text,) = content(tmp_path / "a", tmp_path / "b")["held_out"]

    for shown in ("step 10", "5.2500", "5.5000"):
        assert shown in text


def test_one_row_by_hand(tmp_path):
    num_items = 2000
    sigma = 0.02
    rng = RNG(7)
    a = np.array(right_or_wrong(num_items, 0.5, rng))
    b = np.array(right_or_wrong(num_items, 0.6, rng))
    paths = versus(tmp_path, records({"acc": a.tolist()}), records({"acc": b.tolist()}))

    row = only_pair(*paths, seed_sigma={"boolq": sigma})

    # two pseudo-items, one for each side
    difference = np.append(b - a, [1, -1])
    error = math.sqrt(difference.var(ddof=1) / difference.size + 2 * sigma**2)
    assert row["stderr"] == pytest.approx(error, rel=2e-3)
    assert row["stderr_seeds"] == pytest.approx(sigma * math.sqrt(2))
    assert row["p"] == pytest.approx(2 * stats.norm.sf(0.1 / error), rel=0.02)
    half_width = stats.norm.isf(0.025) * error
    assert row["ci"] == pytest.approx([0.1 - half_width, 0.1 + half_width], rel=5e-3)
    assert row["detectable"] == pytest.approx(QUANTILES * error, rel=5e-3)

    assert row["mcnemar"]["only_a"] == int((b > a).sum())
    assert row["mcnemar"]["only_b"] == int((a > b).sum())
    items_half_width = 1.96 * math.sqrt((b - a).var() / num_items)
    expected = [0.1 - items_half_width, 0.1 + items_half_width]
    assert row["items_ci"] == pytest.approx(expected, abs=0.003)

    assert row["seed_noise"] == {
        "sigma": pytest.approx(sigma),
        "df": None,
        "source": "given",
        "scale": "metric",
        "words": row["seed_noise"]["words"],
    }


GOLD = "gold_bits_per_byte"
CHOICE = {"primary": ["acc", GOLD], "higher_is_better": {"acc": True, GOLD: False}, "chance": 0.5}


def gold(level, rng, count=1000):
    """Return records with half of the answers right, and gold answers of about `level` bits."""
    bits = RNG(5).gamma(9, 0.04, count) + level + rng.normal(0, 0.02, count)
    return records({"acc": right_or_wrong(count, 0.5, RNG(7)), GOLD: bits.tolist()})


def test_bits_of_gold_answers_by_hand(tmp_path):
    """Lower is better; bits below 1 are no shares, so no pseudo-items widen the interval."""
    sigma = 0.001
    side_a = gold(0.10, RNG(0))
    side_b = gold(0.09, RNG(1))
    a = np.array([record[GOLD] for record in side_a])
    b = np.array([record[GOLD] for record in side_b])
    assert max(a.max(), b.max()) < 1
    paths = versus(tmp_path, side_a, side_b, described={"boolq": CHOICE})

    acc, bits = content(*paths, seed_sigma={"boolq": 0.02, f"boolq:{GOLD}": sigma})["pairs"]

    error = math.sqrt((b - a).var(ddof=1) / 1000 + 2 * sigma**2)
    assert (acc["metric"], bits["metric"]) == ("acc", GOLD)
    assert (acc["verdict"], bits["verdict"]) == ("uninformative", "better")
    assert bits["difference"] == pytest.approx((b - a).mean())
    assert bits["difference"] < 0
    assert bits["stderr"] == pytest.approx(error, rel=2e-3)
    assert bits["p"] == pytest.approx(2 * stats.norm.sf(-bits["difference"] / error), rel=0.05)
    assert not bits["higher_is_better"]
    assert bits["chance"] is None

    _, turned = content(*reversed(paths), seed_sigma={f"boolq:{GOLD}": sigma})["pairs"]
    assert turned["verdict"] == "worse"
    assert turned["difference"] == -bits["difference"]

    # the noise of an accuracy is not that of its bits
    _, unjudged = content(*paths, seed_sigma={"boolq": 0.02})["pairs"]
    assert unjudged["verdict"] == "not judged"
    assert unjudged["items_ci"][1] < 0


def test_bits_of_several_tasks_have_a_mean(tmp_path):
    tasks = ("piqa", "boolq", "mine")
    described = dict.fromkeys(tasks, CHOICE)
    paths = []
    for canon, level in (("", 0.10), ("A", 0.095)):
        for seed in range(2):
            rng = RNG([seed, len(canon)])
            items = {task: gold(level + rng.normal(0, 2e-4), rng) for task in tasks}
            folder = tmp_path / f"{canon}{seed}"
            paths.append(plant(folder, items, canon, seed, described=described))

    acc, mean, *rows = content(*paths)["pairs"]

    of_tasks = [row for row in rows if row["metric"] == GOLD]
    assert (mean["metric"], mean["mean_of"]) == (GOLD, list(tasks))
    assert mean["difference"] == pytest.approx(np.mean([row["difference"] for row in of_tasks]))
    assert mean["verdict"] == "better"
    assert mean["stderr"] < min(row["stderr"] for row in of_tasks)
    # half of the error rate is for the two means
    smallest_p = min(row["p_holm"] for row in (acc, mean, *rows))
    assert smallest_p == pytest.approx(4 * mean["p"])


def test_results_without_bits_stay_comparable(tmp_path):
    new_items = gold(0.1, RNG(0))
    old_items = [
        {name: value for name, value in record.items() if name != GOLD} for record in new_items
    ]
    old_choice = CHOICE | {"primary": ["acc"], "higher_is_better": {"acc": True}}
    old = plant(tmp_path / "old", old_items, described={"boolq": old_choice})
    new = plant(tmp_path / "new", new_items, "A", described={"boolq": CHOICE})

    comparison = content(old, new)

    assert [row["metric"] for row in comparison["pairs"]] == ["acc"]
    assert comparison["pairs"][0]["difference"] == 0
    assert [row["metric"] for row in comparison["refused"]] == [GOLD]
    assert Page(report([old, new], tmp_path / "page")).rows


@pytest.mark.parametrize(
    ("dim", "size", "percentages"),
    [
        (512, "150M", {"boolq": 48, "arc_challenge": 83}),
        (1536, "750M", {"boolq": 70, "arc_challenge": 76}),
    ],
    ids=["150M", "750M"],
)
def test_decision_accuracy_of_the_nearest_size(tmp_path, compare, dim, size, percentages):
    """As published, for accuracies; none for bits and for tasks that were not studied."""
    items = {task: gold(0.1, RNG(0)) for task in (*percentages, "mine")}
    described = dict.fromkeys(items, CHOICE)
    paths = []
    for name, canon in (("a", ""), ("b", "A")):
        run = planted_run(
            tmp_path / name,
            model__canon_set=canon,
            model__dim=dim,
            model__ffn_dim=4 * dim,
            model__num_layers=24,
        )
        plant_answers(run, 20, SUITE, items, described=described)
        paths.append(run.path)

    comparison = content(*paths)
    pair = compare(*paths)

    assert comparison["decision"]["size"] == pair["decision"]["size"] == size
    for rows in (comparison["pairs"], comparison["scores"], pair["pairs"]):
        accuracies = {(row["task"], row["metric"]): row["decision_accuracy"] for row in rows}
        for task, percentage in percentages.items():
            assert accuracies.pop((task, "acc")) == percentage / 100
        assert set(accuracies.values()) == {None}

    page = Page(report(paths, tmp_path / "page"))
    boolq = [row for row in page.rows if row[0] == "boolq acc"]
    assert len(boolq) >= 2
    for row in boolq[:2]:
        assert f"{percentages['boolq']} %" in row
    assert comparison["decision"]["source"] in page.text


def test_intervals_and_seeds_needed_agree_with_the_verdict(tmp_path):
    rng = RNG(7)
    tasks = [f"task_{k}" for k in range(4)]
    paths = []
    for canon in ("", "A"):
        for seed in range(2):
            # Canon helps more from task to task
            shares = [0.5 + 0.027 * k**2 * bool(canon) + rng.normal(0, 0.003) for k in range(4)]
            items = {task: right(share, rng=rng) for task, share in zip(tasks, shares, strict=True)}
            paths.append(plant(tmp_path / f"{canon}-{seed}", items, canon, seed))

    mean, *rows = content(*paths)["pairs"]

    assert mean["mean_of"] == tasks
    assert len(rows) == 4
    within_noise = [row for row in rows if row["verdict"] == "within noise"]
    assert 0 < len(within_noise) < 4
    assert any(row["seeds_needed"] for row in within_noise)
    for row in rows:
        low, high = row["ci"]
        excludes_0 = low > 0 or high < 0
        assert excludes_0 == (row["verdict"] != "within noise")
        if row["seeds_needed"] is not None:
            assert not excludes_0
            assert row["seeds_needed"] > 2


@pytest.mark.parametrize("older", [0, 1])
@pytest.mark.parametrize("sources", ["abcdefgh", "a"])
def test_sources_missing_on_one_side_are_the_other_sides(tmp_path, sources, older):
    sides = [records({"acc": [1.0, 0.0] * 20}, sources=[*sources] * 40) for _ in range(2)]
    for record in sides[older]:
        del record["source"]

    row = only_pair(*versus(tmp_path, *sides))

    is_one_source = sources == "a"
    assert row["num_clusters"] == len(sources)
    assert (row["p"] is None) == is_one_source
    assert (row["verdict"] == "not judged") == is_one_source


def test_holm_is_over_every_task_and_pair_of_a_suite(tmp_path):
    rng = RNG(7)
    tasks = [f"task{k}" for k in range(3)]
    runs = [{task: right(share, 2000, rng) for task in tasks} for share in (0.6, 0.665, 0.6)]
    runs_of_mine = [{"x": run["task0"]} for run in runs]
    described = dict.fromkeys([*tasks, "x"], ACC)
    versus(tmp_path, *runs_of_mine, suite="mine", described=described)
    paths = versus(tmp_path, *runs, described=described)

    comparison = content(*paths, seed_sigma={"x": 0.02})

    assert comparison["family"] == {SUITE: 8, "mine": 2}
    rows = [row for row in comparison["pairs"] if row["suite"] == SUITE]
    for row in rows:
        assert row["p_holm"] >= row["p"]
        assert (row["verdict"] == "within noise") == (row["p_holm"] > 0.05)
    # the two means have half of the error rate, the six tasks the other half
    first = [row["p"] * (4 if row["mean_of"] else 12) for row in rows]
    assert min(row["p_holm"] for row in rows) == pytest.approx(min(1, *first))

    assert content(*paths[:2], suites=[SUITE])["family"] == {SUITE: 4}


def test_the_mean_of_a_suite_finds_what_no_task_does(tmp_path):
    rng = RNG(7)
    tasks = [f"jrt_{k}" for k in range(8)]
    runs = [{task: right(share, rng=rng) for task in tasks} for share in (0.4, 0.49)]

    mean, *rows = content(*versus(tmp_path, *runs, suite="jrt"))["pairs"]

    assert (mean["mean_of"], mean["metric"]) == (tasks, "acc")
    assert mean["difference"] == pytest.approx(0.09)
    assert mean["verdict"] == "better"
    assert {row["verdict"] for row in rows} == {"within noise"}
    assert (mean["num_items"], mean["num_clusters"]) == (8000, 1000)  # the same documents
    # the paper's spread, as if all tasks were perfectly correlated
    assert mean["seed_noise"]["sigma"] == pytest.approx(0.05 / RANGE_OF_8)


def test_babilong_is_one_test_per_length(tmp_path):
    tasks = [f"babilong_qa{qa}_{length}k" for qa in range(1, 6) for length in (0, 1, 2, 4)]
    run = dict.fromkeys(tasks, right(0.4, 100))

    rows = content(*versus(tmp_path, run, run, suite="babilong"))["pairs"]

    assert [len(row["mean_of"]) for row in rows] == [20, 5, 5, 5, 5]
    assert rows[4]["mean_of"] == [f"babilong_qa{qa}_4k" for qa in range(1, 6)]


def test_perplexities_are_compared_in_nats(tmp_path):
    rng = RNG(7)
    weights = rng.integers(50, 400, 60)
    nats = rng.normal(3.0, 0.3, 60)
    runs = []
    for better in (0.0, 0.1):
        nats_of_run = nats - better + rng.normal(0, 0.01, 60)
        pairs = [[-float(x * w), int(w)] for x, w in zip(nats_of_run, weights, strict=True)]
        runs.append({"wikitext": records({"word_perplexity": pairs, "bits_per_byte": pairs})})
    paths = versus(tmp_path, *runs)
    assert only_pair(*paths)["seed_noise"] is None

    row = only_pair(*paths, seed_sigma={"wikitext:word_perplexity": 0.005})

    assert row["verdict"] == "better"
    assert row["difference"] < 0
    assert row["log_difference"] == pytest.approx(math.log(row["value"] / row["baseline_value"]))
    assert row["log_difference"] == pytest.approx(-0.1, abs=0.01)
    for shown, log in zip(row["ci"], row["log_ci"], strict=True):
        assert shown == pytest.approx(row["baseline_value"] * math.expm1(log))
    assert row["seed_noise"]["scale"] == "log"


def simulate_and_keep_answers(monkeypatch, tasks):
    """Simulate three recipes of two seeds; return the pairs and the answers drawn, by task."""
    drawn = {}
    draw = simulate.answers

    def draw_and_keep(*arguments):
        task = tasks[len(drawn)]
        drawn[task] = draw(*arguments)
        return drawn[task]

    monkeypatch.setattr(simulate, "answers", draw_and_keep)
    monkeypatch.setattr(simulate, "SUITES", (tasks,))
    pairs = simulate.compare_all(simulate.Scenario("", 3, 2, "own"), 0.03, RNG(1))
    return pairs, drawn


def test_simulated_verdicts_equal_those_of_a_report(tmp_path, monkeypatch):
    tasks = ("lambada_openai", "boolq", "piqa")
    simulated, drawn = simulate_and_keep_answers(monkeypatch, tasks)
    (simulated_p,) = simulate.p_values([simulated])
    (is_rejected,) = simulate._rejected([simulated])

    # the same answers as runs
    for recipe, canon in enumerate(("", "A", "AB")):
        for seed in range(2):
            items = {}
            for task, runs in drawn.items():
                sources = [f"{task} {k // simulate.PER_SOURCE}" for k in range(simulate.NUM_ITEMS)]
                items[task] = records({"acc": runs[recipe, seed].tolist()}, sources=sources)
            folder = tmp_path / f"{recipe}{seed}"
            plant(folder, items, canon, seed, described=dict.fromkeys(tasks, ACC))

    comparison = content(*sorted(tmp_path.iterdir()), own_noise_only=True)

    rows = {(row["architecture"], row["task"]): row for row in comparison["pairs"]}
    assert len(rows) == 8
    all_tests = (*tasks, f"{SUITE}, mean of 3 tasks")
    keys = [(label, task) for label in ("Canon-A", "Canon-AB") for task in all_tests]
    for key, test, p, is_real in zip(keys, simulated, simulated_p, is_rejected, strict=True):
        assert rows[key]["difference"] == pytest.approx(test.pair.difference, abs=1e-12)
        assert rows[key]["p"] == pytest.approx(p)
        assert (rows[key]["verdict"] in ("better", "worse")) == is_real


def test_seeds_that_all_score_one_are_excluded(tmp_path):
    perfect = [plant(tmp_path / f"a{k}", right(1.0, 400), seed=k) for k in range(3)]
    one_seed = plant(tmp_path / "b", right(0.97, 400, RNG(0)), "A", 7)

    row = only_pair(*perfect, one_seed)
    assert row["seed_noise"]["source"] == "paper"
    assert row["verdict"] == "within noise"
    assert only_pair(*perfect, one_seed, own_noise_only=True)["verdict"] == "not judged"

    # unless the other side has several seeds, too
    second_seed = plant(tmp_path / "c", right(0.975, 400, RNG(1)), "A", 8)
    row = only_pair(*perfect, one_seed, second_seed)
    assert row["seed_noise"]["source"] == "own and paper"


def test_tables_show_the_step_of_the_verdict(tmp_path):
    versus(tmp_path, right(0.6, 400), right(0.7, 400), right(0.7, 400), at=20)
    versus(tmp_path, right(0.7, 400), right(0.8, 400), at=40)
    paths = [tmp_path / name for name in "abc"]
    # a trial on one side: the earlier common step is judged
    plant(tmp_path / "a", right(0.5, 400), at=60)
    plant(tmp_path / "b", right(0.9, 400), "A", at=60, limit=100)

    comparison = content(*paths)

    rows = {row["architecture"]: row for row in comparison["pairs"]}
    steps = {name: row["step"] for name, row in rows.items()}
    assert steps == {"Canon-A": 40, "Canon-AB": 20}
    for row in (*rows.values(), *comparison["scores"]):
        assert row["suite_step"] == 40

    cells = {cell["architecture"]: cell for cell in comparison["scores"][0]["cells"]}
    for label, row in rows.items():
        assert cells[label]["step"] == row["step"]
        for kind in ("chosen", "best"):
            assert cells[label][kind]["value"] == pytest.approx(row["value"])

    page = Page(report(paths, tmp_path / "out"))
    boolq = [" ".join(row) for row in page.rows if row[0].startswith("boolq acc")]
    marked = [row for row in boolq if "step 20" in row]
    assert len(marked) == 3  # differences, scores, suite
    assert not any("step 40" in row for row in marked)


TWO_ITEMS = records({"acc": [1.0, 0.0]})


@pytest.mark.parametrize(
    ("second", "scores", "reason"),
    [
        (records({"acc": [1.0, 0.0]}, names=["b", "d"]), {}, "0 in common"),
        (TWO_ITEMS, {"acc": 0.7}, "0.7"),
        (records({"acc": [1.0, math.inf]}), {}, "b "),
        ([{"doc_id": 0, "acc": 1.0}], {}, "b "),
    ],
    ids=["other-items", "other-score", "infinite", "no-hash"],
)
def test_what_cannot_be_paired_is_refused(tmp_path, second, scores, reason):
    paths = versus(tmp_path, TWO_ITEMS, second, scores={"boolq": scores})

    comparison = content(*paths)

    (row,) = comparison["refused"]
    assert comparison["pairs"] == []
    assert reason in row["why"]


def test_items_are_paired_in_any_order(tmp_path):
    """A repeated item is one cluster."""
    items = records({"acc": [1.0, 0.0, 1.0, 1.0]}, names=["a", "b", "a", "c"])
    rotated = [items[3], *items[:3]]

    row = only_pair(*versus(tmp_path, items, rotated))

    assert (row["difference"], row["num_items"], row["num_clusters"]) == (0, 4, 3)
    assert (row["mcnemar"]["only_a"], row["mcnemar"]["only_b"]) == (0, 0)


def test_different_options_are_listed_and_losses_refused(tmp_path):
    items = {"lambada": records({"acc": [1.0, 0.0, 1.0], "perplexity": [-1.0, -2.0, -3.0]})}
    for name, canon, length, settings in (("a", "", 256, "x"), ("b", "ABCD", 512, "y")):
        described = {"lambada": {"primary": ["acc", "perplexity"], "config_sha256": settings}}
        plant(tmp_path / name, items, canon, described=described, max_length=length, lm_eval=name)

    comparison = content(tmp_path / "a", tmp_path / "b")

    (row,) = comparison["pairs"]
    assert row["metric"] == "acc"
    length, settings = row["asked_differently"]
    assert length == "max_length: 512 / 256"
    assert settings.startswith("config_sha256 ")

    (refused_row,) = comparison["refused"]
    assert refused_row["metric"] == "perplexity"
    assert length in refused_row["why"]
    assert settings in refused_row["why"]


@pytest.mark.parametrize("metric", ["word_perplexity", "bits_per_byte", "perplexity", "acc"])
def test_scores_are_lm_evals_aggregates_of_items(metric):
    # lm_eval aggregates logs, or tuples of a log and a weight
    values = RNG(7).uniform(-3, -1, 30).tolist()
    if metric in ("word_perplexity", "bits_per_byte"):
        values = [(float(-x), int(10 * x)) for x in RNG(7).uniform(5, 90, 30)]
    lm_eval_names = {"word_perplexity": "weighted_perplexity", "acc": "mean"}
    aggregation = getattr(metrics, lm_eval_names.get(metric, metric))
    items = records({metric: [list(x) if isinstance(x, tuple) else x for x in values]})

    scale = Scale.of(metric)
    sums_and_weights = _values(items)[metric]
    mean = float(np.average(sums_and_weights[:, 0] * scale.factor, weights=sums_and_weights[:, 1]))

    assert scale.score(mean) == pytest.approx(aggregation(values), rel=1e-12)
    assert scale.mean(scale.score(mean)) == pytest.approx(mean)


@pytest.fixture
def compare(tmp_path_factory):
    """Return the function that runs the command and returns its --json."""

    def run(*words):
        out = tmp_path_factory.mktemp("pair") / "pair.json"
        parser = Parser()
        add_arguments(parser)
        run_compare(parser.parse_args(["--json", str(out), *map(str, words)]))
        return json.loads(out.read_text())

    return run


def test_groups_of_seeds_and_folders_of_runs(tmp_path, compare):
    seeds = range(4)
    a = [plant(tmp_path / f"nope/seed{k}", right(0.6 + 0.01 * k), "", k) for k in seeds]
    b = [plant(tmp_path / f"canon/seed{k}", right(0.9 + 0.01 * k), "A", k) for k in seeds]

    comparison = compare("--a", *a, "--b", *b)

    (row,) = comparison["pairs"]
    assert row["num_runs"] == [4, 4]
    assert row["difference"] == pytest.approx(0.3)
    assert (row["seed_noise"]["source"], row["seed_noise"]["df"]) == ("own", 6)
    assert row["seed_noise"]["sigma"] == pytest.approx(np.std(seeds, ddof=1) / 100)
    assert comparison["notes"] == []

    # folders of runs are sides too
    assert compare(tmp_path / "nope", tmp_path / "canon")["pairs"] == [row]
    assert compare(tmp_path)["pairs"][0]["difference"] == -row["difference"]  # canon is A
    with refused("compare.sides"):
        compare(tmp_path / "nope")

    mixed = compare("--a", *a[:2], b[0], "--b", *b[1:], "--own_noise_only")
    assert len(mixed["notes"]) == 1  # A is not one recipe


@pytest.fixture
def pair_at_two_steps(tmp_path):
    """Folders of two runs: they score equally at step 10, at step 20 the second is better."""
    for at, share in ((10, 0.5), (20, 0.6)):
        plant(tmp_path / "a", right(0.5), at=at)
        plant(tmp_path / "b", right(share, rng=RNG(8)), "A", at=at)
    return [tmp_path / "a", tmp_path / "b"]


def test_options_set_step_and_suite(pair_at_two_steps, compare):
    for words, step in (([], 20), (["--step", 10], 10), (["--suite", SUITE], 20)):
        (row,) = compare(*pair_at_two_steps, *words)["pairs"]
        assert row["step"] == step

    for words in (["--step", 15], ["--suite", "jrt"]):
        with refused("compare.nothing"):
            compare(*pair_at_two_steps, *words)


def test_an_option_sets_seed_noise(pair_at_two_steps, compare):
    for sigma, verdict in ((0.001, "better"), (0.2, "within noise")):
        (row,) = compare(*pair_at_two_steps, "--seed_sigma", f"boolq={sigma}")["pairs"]
        assert row["verdict"] == verdict

    for word in ("boolq", "boolqq=0.1", "boolq=-1"):
        with refused("compare.seed_sigma", given=word):
            compare(*pair_at_two_steps, "--seed_sigma", word)


def test_seed_noise_of_held_out_loss_is_in_nats(tmp_path, compare):
    losses = {"validation": {"bits_per_byte": Score(2.0), "nats_per_token": Score(5.0)}}
    paths = []
    for canon in "AB":
        run = plant_run(tmp_path / canon, validations({20: 5.0}), model__canon_set=canon)
        plant_results(run, 20, "validation", losses)
        paths.append(run.path)

    with refused("compare.seed_sigma"):
        compare(*paths, "--seed_sigma", "validation:bits_per_byte=0.1")
    with refused("compare.nothing"):  # nats are right, but these results have no documents
        compare(*paths, "--seed_sigma", "validation:nats_per_token=0.1")


def test_sides_that_cannot_be_compared_are_errors(tmp_path, compare):
    a = plant(tmp_path / "a", right(0.5))
    other_items = records({"acc": [1.0, 0.0]}, names=["x", "y"])
    b = plant(tmp_path / "b", other_items, "A", max_length=64)
    trial = plant(tmp_path / "trial", right(0.5), "A", limit=10)
    bare = planted_run(tmp_path / "bare").path

    for other, task, num_evaluations in ((b, "boolq", 1), (trial, None, 1), (bare, None, 0)):
        with refused("compare.nothing") as caught:
            compare(a, other)
        fields = caught.value.fields
        assert [len(x) for x in fields["found"].values()] == [1, num_evaluations]
        assert [row["task"] for row in fields["refused"]] == [task]

    for other, code in ((tmp_path / "nowhere", "run.not_a_run"), (a, "run.given_twice")):
        with refused(code):
            compare(a, other)

    for words in ([], [a, b, trial], ["--a", a], [a, b, "--a", bare]):
        with refused("compare.sides"):
            compare(*words)


def test_a_suite_that_the_chosen_rate_lacks_is_reported(tmp_path):
    """Of such a suite there is no step to compare at, and no reason to fail."""
    worse = plant_run(tmp_path / "0.002", validations({20: 5.0}), optimizer__lr=0.002)
    plant_run(tmp_path / "0.004", validations({20: 4.0}), optimizer__lr=0.004)
    plant_results(worse, 20, SUITE, {"piqa": {"acc": Score(0.5, 0.1)}})

    written = content_of(report([tmp_path], tmp_path / "out"))

    (suite,) = written["suites"]
    assert suite["columns"] == [{"run": "0.002", "step": 20, "limit": None}]
    assert written["comparison"]["steps"] == {}
