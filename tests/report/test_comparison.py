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


def content(*folders, baseline=None, **options):
    return json_value(comparison_content(read_runs(folders)[0], baseline, Options(**options)))


def only_pair(*folders, **options):
    (row,) = content(*folders, **options)["pairs"]
    return row


def right(share, count=1000, rng=None):
    """Return item records with that share of right answers."""
    return records({"acc": right_or_wrong(count, share, rng or RNG(7))})


def plant(folder, tasks, canon="", seed=0, at=20, **more):
    """Plant a run with item records by task, or of boolq."""
    run = planted_run(folder, seed, model__canon_set=canon)
    by_task = tasks if isinstance(tasks, dict) else {"boolq": tasks}
    asked = {"described": {"boolq": ACC}} | more
    plant_answers(run, at, asked.pop("suite", SUITE), by_task, **asked)
    return folder


def versus(folder, *runs, **more):
    """Plant runs a, b, c without Canon, with A, with AB."""
    pairs = zip("abc", ("", "A", "AB"), runs, strict=False)
    return [plant(folder / name, tasks, canon, **more) for name, canon, tasks in pairs]


def test_runs_are_grouped_by_architecture(tmp_path):
    changes = [
        {},
        {},
        {"optimizer__lr": 0.002},
        {"model__position": "rope"},
        {"lr_scheduler__decay_type": "linear"},
        {"model__position": "rope", "model__dim": 96},
        # a field that an older version lacks has its default
        {"model__qk_norm": "none", "model__ffn": "gated"},
    ]
    for k, change in enumerate(changes):
        planted_run(tmp_path / "abcdefg"[k], k, **({"optimizer__lr": 0.001} | change))
    found = architectures(read_runs([tmp_path / name for name in "abcdefg"])[0])
    assert ["".join(run.label for run in each.runs) for each in found] == ["abgc", "d", "e", "f"]
    assert [r.learning_rate for r in found[0].recipes] == [0.001, 0.002]
    assert found[3].label.split(", ") == ["rope", "dim 96", "decay_type cosine"]


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
    for k, change in enumerate(changes):
        planted_run(tmp_path / "abcdef"[k], k, **change)
    runs = [tmp_path / name for name in "abcdef"]
    labels = [each.label.split(", ") for each in architectures(read_runs(runs)[0])]
    assert [(each[0], each[-1]) for each in labels] == [
        ("attention", "ffn gated"),
        ("gla", "ffn gated"),
        ("mamba2", "ffn gated"),
        ("mamba2", "ffn gated"),
        ("mamba2", "ffn gated"),
        ("attention", "ffn moe"),
    ]
    assert [each[1:3] for each in labels[2:5]] == [
        ["no conv1d", "no Canon"],
        ["conv1d", "no Canon"],
        ["no conv1d", "Canon-AB"],
    ]
    pair = [each.label for each in architectures(read_runs(runs[1:3])[0])]
    assert pair == ["gla", "mamba2"]
    (one,) = architectures(read_runs(runs[1:2])[0])
    assert one.label.endswith(", gla")


def rated(folder, rate, losses, **identity):
    return plant_run(folder, validations(losses), optimizer__lr=rate, **identity).path


def scored(run, at, loss, **asked):
    scores = {"validation": {"nats_per_token": Score(loss)}}
    plant_results(RunFolder(run), at, "validation", scores, **asked)


def chosen(*paths):
    (one,) = architectures(read_runs(paths)[0])
    return one, choose(one)


def test_learning_rate_is_chosen_by_logged_loss(tmp_path):
    low = rated(tmp_path / "low", 0.001, {10: 3.0, 20: 2.5})
    high = rated(tmp_path / "high", 0.002, {10: 2.9, 20: 2.6, 30: 1.0})
    one, choice = chosen(low, high, rated(tmp_path / "nan", 0.004, {10: 2.0, 20: "NaN"}))
    assert choice.recipe is one.recipes[0]
    assert (choice.step, choice.losses) == (20, [2.5, 2.6, None])


def test_learning_rate_is_chosen_at_the_last_step(tmp_path):
    """At equal steps the suite `validation` is preferred to the log."""
    paths = []
    for name, rate, early, late in (("slow", 1, 5.0, 2.0), ("fast", 2, 4.0, 3.0)):
        paths.append(rated(tmp_path / name, rate, {5: early, 500: late}))
        scored(paths[-1], 5, early)
    _, choice = chosen(*paths)
    assert (choice.step, choice.losses) == (500, [2.0, 3.0])
    for path, loss in zip(paths, (2.7, 2.4), strict=True):
        scored(path, 500, loss)
    one, choice = chosen(*paths)
    assert choice.recipe is one.recipes[1] and choice.losses == [2.7, 2.4]


def test_losses_of_different_texts_are_not_compared(tmp_path):
    texts, paths = {"low": "a" * 64, "high": "b" * 64}, []
    for (name, text), loss in zip(texts.items(), (2.5, 2.6), strict=True):
        paths.append(rated(tmp_path / name, loss, {20: loss}, held_out_fingerprint=text))
        for at in (10, 20):
            scored(paths[-1], at, 3.0, held_out_fingerprint=text)
    _, choice = chosen(*paths)
    assert choice.recipe is None and choice.losses == [None, None]
    curves = score_curves(read_runs(paths)[0])
    assert [[line.run for line in curve.lines] for curve in curves] == [["low"], ["high"]]
    # both evaluated on the same text
    scored(paths[1], 20, 2.9, held_out_fingerprint=texts["low"])
    assert chosen(*paths)[1].losses == [3.0, 2.9]
    one, _ = chosen(*paths, rated(tmp_path / "again", 2.5, {20: 2.5}))
    assert [run.label for run in one.recipes[0].repeats] == ["again"]


def test_without_a_chosen_learning_rate_there_are_no_verdicts(tmp_path):
    paths = versus(tmp_path, right(0.5), right(0.9))
    found = content(*paths, plant(tmp_path / "again", right(0.5), "A"))
    assert found["pairs"][0]["num_runs"] == [1, 1]  # a repeated seed is not used
    assert any("again" in note for note in found["notes"])
    planted_run(tmp_path / "other", 5, model__canon_set="A", optimizer__lr=0.001)
    for baseline in ("a", "b"):
        found = content(*paths, tmp_path / "other", baseline=baseline)
        assert found["pairs"] == [] and found["notes"]
    assert not any(recipe["chosen"] for recipe in found["architectures"][1]["recipes"])


def test_verdicts_use_the_chosen_rate_and_best_uses_all(tmp_path):
    rng = RNG(7)
    paths = [plant(tmp_path / "base", right(0.5, rng=rng), "ABCD")]
    for name, rate, loss, share in (("good", 0.001, 2.0, 0.52), ("lucky", 0.002, 3.0, 0.7)):
        log = validations({20: loss})
        run = plant_run(tmp_path / name, log, optimizer__lr=rate, model__canon_set="A")
        plant_answers(run, 20, SUITE, {"boolq": right(share, rng=rng)}, described={"boolq": ACC})
        paths.append(run.path)
    found = content(*paths)
    (pair,) = found["pairs"]
    assert pair["value"] == pytest.approx(0.52) and pair["verdict"] == "uninformative"
    cells = {cell["architecture"]: cell for cell in found["scores"][0]["cells"]}
    best, mean = (cells["Canon-A"][kind] for kind in ("best", "chosen"))
    assert best["value"] == pytest.approx(0.7) and best["run"] == "lucky"
    assert best["bias"] == pytest.approx(0.5642 * 0.03 / 2.847, rel=1e-3)
    assert cells["Canon-ABCD"]["best"]["bias"] == 0 and mean["value"] == pytest.approx(0.52)
    assert [x["chosen"] for x in found["architectures"][1]["recipes"]] == [True, False]
    assert len(found["notes"]) == 1 and not content(*paths[:2])["notes"]  # of unequal tuning


@pytest.mark.parametrize(
    ("shares", "chance", "found"),
    [
        ((0.0, 0.0), None, "floor"),
        ((0.0, 0.02), None, None),
        ((1.0, 0.998), None, "ceiling"),
        ((0.5, 0.51), 0.5, "chance"),
        ((0.5, 0.51), None, None),
        ((0.5, 0.9), 0.5, None),
    ],
)
def test_floor_ceiling_and_chance_are_uninformative(tmp_path, shares, chance, found):
    described = {"t": {"primary": ["acc"], "chance": chance}}
    tasks = ({"t": right(share)} for share in shares)
    paths = versus(tmp_path, *tasks, suite="birth-year", described=described)
    for more in ({"seed_sigma": {"t": 0.02}}, {}):  # also without seed noise
        row = only_pair(*paths, **more)
        assert row["uninformative"] == found
        assert (row["verdict"] == "uninformative") == (found is not None)
        assert found is None or row["detectable"] is row["seeds_needed"] is None


def test_chance_follows_from_the_number_of_choices(tmp_path):
    items = [[x | {"answers": [[-1.0, False]] * 3} for x in right(share)] for share in (0.33, 0.34)]
    row = only_pair(*versus(tmp_path, *({"t": each} for each in items), suite="mine"))
    assert row["chance"] == pytest.approx(1 / 3) and row["uninformative"] == "chance"


def test_held_out_loss_against_formulas_by_hand(tmp_path):
    losses = (("", 0, 5.0), ("", 1, 5.02), ("A", 0, 4.9), ("A", 1, 4.93))
    paths = [evaluated(tmp_path / f"{x}{seed}", x, loss, seed) for x, seed, loss in losses]
    assert content(*paths, suites=[SUITE])["pairs"] == []
    row = only_pair(*paths)
    assert (row["task"], row["num_runs"], row["num_items"]) == ("validation", [2, 2], 400)
    assert row["difference"] == pytest.approx(4.915 - 5.01) and not row["higher_is_better"]
    assert row["verdict"] == "better" and row["seed_noise"]["source"] == "own"
    assert row["seed_noise"]["sigma"] == pytest.approx(math.sqrt((0.0002 + 0.00045) / 2))
    low, high = row["ci"]
    assert low < row["difference"] < high < 0 and row["p"] < 0.05
    # over documents: the linearized variance of a ratio of sums
    read = (evaluation for run in read_runs(paths)[0] for evaluation in run.evaluations)
    found = [ItemCache().get(each.folder, "validation", "nats_per_token") for each in read]
    a0, a1, b0, b1 = (items.values["nats_per_token"] for items in found if items)
    weights, each = a0[:, 1], (b0 + b1 - a0 - a1)[:, 0] / 2
    assert np.average(each, weights=weights) == pytest.approx(row["difference"])
    residuals = weights * (each - row["difference"]) / weights.sum()
    half = np.diff(row["items_ci"])[0] / 2
    assert half == pytest.approx(1.96 * math.sqrt((residuals**2).sum()), rel=0.08)


def test_one_seed_per_side_has_an_interval_and_no_verdict(tmp_path):
    paths = [evaluated(tmp_path / "a", "", 5.0), evaluated(tmp_path / "b", "A", 4.9)]
    row = only_pair(*paths)
    assert row["verdict"] == "not judged" and row["items_ci"][1] < 0
    sigma = {"validation:nats_per_token": 0.01}
    for baseline, verdict in ((None, "better"), ("Canon-A", "worse"), ("b", "worse")):
        assert only_pair(*paths, baseline=baseline, seed_sigma=sigma)["verdict"] == verdict
    with refused("compare.baseline", given="Mamba", expected=["no Canon", "Canon-A"]):
        content(*paths, baseline="Mamba")


@pytest.mark.parametrize("count", [1, 2, 7, 8])
def test_below_eight_documents_is_no_interval_or_verdict(tmp_path, count):
    sides = [("a0", "", 5.0, 0), ("a1", "", 5.01, 1), ("b0", "A", 4.0, 0), ("b1", "A", 4.01, 1)]
    paths = [
        evaluated(tmp_path / name, canon, loss, seed, count) for name, canon, loss, seed in sides
    ]
    found = content(*paths)
    (row,) = found["pairs"]
    is_enough = count == 8
    assert (row["num_clusters"], row["difference"]) == (count, pytest.approx(-1.0))
    assert (row["items_ci"] is not None) == (row["p"] is not None) == is_enough
    assert (row["verdict"] == "not judged") != is_enough
    (text,) = found["held_out"]
    assert f"{count} document" in text and ("95 %" in text) == is_enough


def test_without_evaluations_the_logged_loss_is_shown(tmp_path):
    for name, canon, losses in (("a", "", {10: 5.5, 20: 5.0}), ("b", "A", {10: 5.25})):
        plant_run(tmp_path / name, validations(losses), model__canon_set=canon)
    (text,) = content(tmp_path / "a", tmp_path / "b")["held_out"]
    assert all(shown in text for shown in ("step 10", "5.2500", "5.5000"))


def test_one_row_by_hand(tmp_path):
    rng = RNG(7)
    a, b = (np.array(right_or_wrong(2000, share, rng)) for share in (0.5, 0.6))
    paths = versus(tmp_path, *(records({"acc": x.tolist()}) for x in (a, b)))
    row = only_pair(*paths, seed_sigma={"boolq": 0.02})
    difference = np.append(b - a, [1, -1])
    error = math.sqrt(difference.var(ddof=1) / difference.size + 2 * 0.02**2)
    assert row["stderr"] == pytest.approx(error, rel=2e-3)
    assert row["stderr_seeds"] == pytest.approx(0.02 * math.sqrt(2))
    assert row["p"] == pytest.approx(2 * stats.norm.sf(0.1 / error), rel=0.02)
    half = stats.norm.isf(0.025) * error
    assert row["ci"] == pytest.approx([0.1 - half, 0.1 + half], rel=5e-3)
    assert row["detectable"] == pytest.approx((1.959964 + 0.841621) * error, rel=5e-3)
    only = [int((better > worse).sum()) for better, worse in ((b, a), (a, b))]
    assert [row["mcnemar"]["only_a"], row["mcnemar"]["only_b"]] == only
    wide = 1.96 * math.sqrt((b - a).var() / 2000)
    assert row["items_ci"] == pytest.approx([0.1 - wide, 0.1 + wide], abs=0.003)
    given = {"sigma": pytest.approx(0.02), "df": None, "source": "given", "scale": "metric"}
    assert row["seed_noise"] == {**given, "words": row["seed_noise"]["words"]}


GOLD = "gold_bits_per_byte"
CHOICE = {"primary": ["acc", GOLD], "higher_is_better": {"acc": True, GOLD: False}, "chance": 0.5}


def gold(level, rng, count=1000):
    """Return records with half of the answers right, and gold answers of about `level` bits."""
    bits = RNG(5).gamma(9, 0.04, count) + level + rng.normal(0, 0.02, count)
    return records({"acc": right_or_wrong(count, 0.5, RNG(7)), GOLD: bits.tolist()})


def test_bits_of_gold_answers_by_hand(tmp_path):
    """Lower is better; bits below 1 are no shares, so no pseudo-items widen the interval."""
    sides = [gold(level, RNG(k)) for k, level in enumerate((0.10, 0.09))]
    paths = versus(tmp_path, *sides, described={"boolq": CHOICE})
    acc, row = content(*paths, seed_sigma={"boolq": 0.02, f"boolq:{GOLD}": 0.001})["pairs"]
    a, b = (np.array([record[GOLD] for record in side]) for side in sides)
    assert max(a.max(), b.max()) < 1 and (acc["metric"], row["metric"]) == ("acc", GOLD)
    error = math.sqrt((b - a).var(ddof=1) / 1000 + 2 * 0.001**2)
    assert row["difference"] == pytest.approx((b - a).mean()) and row["difference"] < 0
    assert row["stderr"] == pytest.approx(error, rel=2e-3) and not row["higher_is_better"]
    assert row["p"] == pytest.approx(2 * stats.norm.sf(-row["difference"] / error), rel=0.05)
    assert (row["verdict"], acc["verdict"], row["chance"]) == ("better", "uninformative", None)
    back = content(*reversed(paths), seed_sigma={f"boolq:{GOLD}": 0.001})["pairs"][1]
    assert back["verdict"] == "worse" and back["difference"] == -row["difference"]
    # the noise of an accuracy is not that of its bits
    row = content(*paths, seed_sigma={"boolq": 0.02})["pairs"][1]
    assert row["verdict"] == "not judged" and row["items_ci"][1] < 0


def test_bits_of_several_tasks_have_a_mean(tmp_path):
    paths = []
    for canon, level in (("", 0.10), ("A", 0.095)):
        for seed in range(2):
            rng = RNG([seed, len(canon)])
            items = {x: gold(level + rng.normal(0, 2e-4), rng) for x in ("piqa", "boolq", "mine")}
            described = dict.fromkeys(items, CHOICE)
            paths.append(
                plant(tmp_path / f"{canon}{seed}", items, canon, seed, described=described)
            )
    acc, mean, *rows = content(*paths)["pairs"]
    assert (mean["metric"], mean["mean_of"]) == (GOLD, ["piqa", "boolq", "mine"])
    tasks = [row for row in rows if row["metric"] == GOLD]
    assert mean["difference"] == pytest.approx(np.mean([row["difference"] for row in tasks]))
    assert mean["verdict"] == "better" and mean["stderr"] < min(row["stderr"] for row in tasks)
    # half of the error rate is for the two means
    assert min(x["p_holm"] for x in (acc, mean, *rows)) == pytest.approx(4 * mean["p"])


def test_results_without_bits_stay_comparable(tmp_path):
    new = gold(0.1, RNG(0))
    old = [{name: x for name, x in record.items() if name != GOLD} for record in new]
    before = CHOICE | {"primary": ["acc"], "higher_is_better": {"acc": True}}
    paths = [
        plant(tmp_path / "old", old, described={"boolq": before}),
        plant(tmp_path / "new", new, "A", described={"boolq": CHOICE}),
    ]
    found = content(*paths)
    assert [row["metric"] for row in found["pairs"]] == ["acc"]
    assert [row["metric"] for row in found["refused"]] == [GOLD]
    assert found["pairs"][0]["difference"] == 0 and Page(report(paths, tmp_path / "page")).rows


@pytest.mark.parametrize(
    ("dim", "size", "shares"), [(512, "150M", (48, 83)), (1536, "750M", (70, 76))]
)
def test_decision_accuracy_of_the_nearest_size(tmp_path, compare, dim, size, shares):
    """As published, for accuracies; none for bits and for tasks that were not studied."""
    identity = {"model__dim": dim, "model__ffn_dim": 4 * dim, "model__num_layers": 24}
    paths, tasks = [], {x: gold(0.1, RNG(0)) for x in ("boolq", "arc_challenge", "mine")}
    for name, canon in (("a", ""), ("b", "A")):
        run = planted_run(tmp_path / name, model__canon_set=canon, **identity)
        plant_answers(run, 20, SUITE, tasks, described=dict.fromkeys(tasks, CHOICE))
        paths.append(tmp_path / name)
    found, pair = content(*paths), compare(*paths)
    assert found["decision"]["size"] == pair["decision"]["size"] == size
    for rows in (found["pairs"], found["scores"], pair["pairs"]):
        known = {(r["task"], r["metric"]): r["decision_accuracy"] for r in rows}
        asked = [known.pop((task, "acc")) for task in ("boolq", "arc_challenge")]
        assert asked == [share / 100 for share in shares] and set(known.values()) == {None}
    page = Page(report(paths, tmp_path / "page"))
    shown = [row for row in page.rows if row[0] == "boolq acc"]
    assert len(shown) >= 2 and all(f"{shares[0]} %" in row for row in shown[:2])
    assert found["decision"]["source"] in page.text


def test_intervals_and_seeds_needed_agree_with_the_verdict(tmp_path):
    rng, tasks, paths = RNG(7), [f"task_{k}" for k in range(4)], []
    for canon in ("", "A"):
        for seed in range(2):
            shares = [0.5 + 0.027 * k**2 * bool(canon) + rng.normal(0, 0.003) for k in range(4)]
            items = {x: right(share, rng=rng) for x, share in zip(tasks, shares, strict=True)}
            paths.append(plant(tmp_path / f"{canon}-{seed}", items, canon, seed))
    mean, *rows = content(*paths)["pairs"]
    assert mean["mean_of"] == tasks
    noise = [row for row in rows if row["verdict"] == "within noise"]
    assert noise and len(noise) < len(rows) == 4
    for row in rows:
        excludes_0 = row["ci"][0] > 0 or row["ci"][1] < 0
        assert excludes_0 == (row["verdict"] != "within noise")
        assert row["seeds_needed"] is None or (not excludes_0 and row["seeds_needed"] > 2)
    assert any(row["seeds_needed"] for row in noise)


@pytest.mark.parametrize("older", [0, 1])
@pytest.mark.parametrize("sources", ["abcdefgh", "a"])
def test_sources_missing_on_one_side_are_the_other_sides(tmp_path, sources, older):
    sides = [records({"acc": [1.0, 0.0] * 20}, sources=[*sources] * 40) for _ in range(2)]
    for record in sides[older]:
        del record["source"]
    row = only_pair(*versus(tmp_path, *sides))
    assert row["num_clusters"] == len(sources)
    assert (row["p"] is None) == (row["verdict"] == "not judged") == (sources == "a")


def test_holm_is_over_every_task_and_pair_of_a_suite(tmp_path):
    rng, tasks = RNG(7), [f"task{k}" for k in range(3)]
    runs = [{task: right(share, 2000, rng) for task in tasks} for share in (0.6, 0.665, 0.6)]
    described = dict.fromkeys([*tasks, "x"], ACC)
    versus(tmp_path, *({"x": run["task0"]} for run in runs), suite="mine", described=described)
    paths = versus(tmp_path, *runs, described=described)
    both = content(*paths, seed_sigma={"x": 0.02})
    assert both["family"] == {SUITE: 8, "mine": 2}
    found = [row for row in both["pairs"] if row["suite"] == SUITE]
    # the two means have half of the error rate, the six tasks the other half
    first = [row["p"] * (4 if row["mean_of"] else 12) for row in found]
    for row in found:
        assert row["p_holm"] >= row["p"]
        assert (row["verdict"] == "within noise") == (row["p_holm"] > 0.05)
    assert min(row["p_holm"] for row in found) == pytest.approx(min(1, *first))
    assert content(*paths[:2], suites=[SUITE])["family"] == {SUITE: 4}


def test_the_mean_of_a_suite_finds_what_no_task_does(tmp_path):
    rng, tasks = RNG(7), [f"jrt_{k}" for k in range(8)]
    runs = [{task: right(share, rng=rng) for task in tasks} for share in (0.4, 0.49)]
    mean, *rows = content(*versus(tmp_path, *runs, suite="jrt"))["pairs"]
    assert mean["mean_of"] == tasks and mean["metric"] == "acc"
    assert mean["difference"] == pytest.approx(0.09) and mean["verdict"] == "better"
    assert {row["verdict"] for row in rows} == {"within noise"}
    assert (mean["num_items"], mean["num_clusters"]) == (8000, 1000)  # the same documents
    # the paper's spread, as if all tasks were perfectly correlated
    assert mean["seed_noise"]["sigma"] == pytest.approx(0.05 / 2.847)


def test_babilong_is_one_test_per_length(tmp_path):
    tasks = [f"babilong_qa{k}_{length}k" for k in range(1, 6) for length in (0, 1, 2, 4)]
    run = dict.fromkeys(tasks, right(0.4, 100))
    rows = content(*versus(tmp_path, run, run, suite="babilong"))["pairs"]
    assert [len(row["mean_of"]) for row in rows] == [20, 5, 5, 5, 5]
    assert rows[4]["mean_of"] == [f"babilong_qa{k}_4k" for k in range(1, 6)]


def test_perplexities_are_compared_in_nats(tmp_path):
    rng, runs = RNG(7), []
    weights, nats = rng.integers(50, 400, 60), rng.normal(3.0, 0.3, 60)
    for better in (0.0, 0.1):
        each = nats - better + rng.normal(0, 0.01, 60)
        pairs = [[-float(x * w), int(w)] for x, w in zip(each, weights, strict=True)]
        runs.append({"wikitext": records({"word_perplexity": pairs, "bits_per_byte": pairs})})
    paths = versus(tmp_path, *runs)
    assert only_pair(*paths)["seed_noise"] is None
    row = only_pair(*paths, seed_sigma={"wikitext:word_perplexity": 0.005})
    assert row["verdict"] == "better" and row["difference"] < 0
    assert row["log_difference"] == pytest.approx(math.log(row["value"] / row["baseline_value"]))
    assert row["log_difference"] == pytest.approx(-0.1, abs=0.01)
    for shown, log in zip(row["ci"], row["log_ci"], strict=True):
        assert shown == pytest.approx(row["baseline_value"] * math.expm1(log))
    assert row["seed_noise"]["scale"] == "log"


def test_simulated_verdicts_equal_those_of_a_report(tmp_path, monkeypatch):
    drawn, answers, tasks = {}, simulate.answers, ("lambada_openai", "boolq", "piqa")

    def kept(*given):
        return drawn.setdefault(tasks[len(drawn)], answers(*given))

    monkeypatch.setattr(simulate, "answers", kept)
    monkeypatch.setattr(simulate, "SUITES", (tasks,))
    simulated = simulate.compare_all(simulate.Scenario("", 3, 2, "own"), 0.03, RNG(1))
    (p,) = simulate.p_values([simulated])
    significant = simulate._rejected([simulated])[0]
    for recipe, canon in enumerate(("", "A", "AB")):
        for seed in range(2):
            items = {}
            for task, runs in drawn.items():
                sources = [f"{task} {k // simulate.PER_SOURCE}" for k in range(simulate.NUM_ITEMS)]
                items[task] = records({"acc": runs[recipe, seed].tolist()}, sources=sources)
            folder = tmp_path / f"{recipe}{seed}"
            plant(folder, items, canon, seed, described=dict.fromkeys(tasks, ACC))
    found = content(*sorted(tmp_path.iterdir()), own_noise_only=True)
    rows = {(row["architecture"], row["task"]): row for row in found["pairs"]}
    all_tests = (*tasks, f"{SUITE}, mean of 3 tasks")
    expected = [(label, task) for label in ("Canon-A", "Canon-AB") for task in all_tests]
    assert len(rows) == 8
    for key, test, own, is_real in zip(expected, simulated, p, significant, strict=True):
        assert rows[key]["difference"] == pytest.approx(test.pair.difference, abs=1e-12)
        assert rows[key]["p"] == pytest.approx(own)
        assert (rows[key]["verdict"] in ("better", "worse")) == is_real


def test_seeds_that_all_score_one_are_excluded(tmp_path):
    paths = [plant(tmp_path / f"a{k}", right(1.0, 400), seed=k) for k in range(3)]
    paths.append(plant(tmp_path / "b", right(0.97, 400, RNG(0)), "A", 7))
    row = only_pair(*paths)
    assert (row["seed_noise"]["source"], row["verdict"]) == ("paper", "within noise")
    assert only_pair(*paths, own_noise_only=True)["verdict"] == "not judged"
    # unless the other side has several seeds, too
    row = only_pair(*paths, plant(tmp_path / "c", right(0.975, 400, RNG(1)), "A", 8))
    assert row["seed_noise"]["source"] == "own and paper"


def test_tables_show_the_step_of_the_verdict(tmp_path):
    for at, shares in ((20, (0.6, 0.7, 0.7)), (40, (0.7, 0.8))):
        paths = [*versus(tmp_path, *(right(share, 400) for share in shares), at=at), tmp_path / "c"]
    # a trial on one side: the earlier common step is judged
    plant(paths[0], right(0.5, 400), at=60)
    plant(paths[1], right(0.9, 400), "A", at=60, limit=100)
    found = content(*paths)
    rows = {row["architecture"]: row for row in found["pairs"]}
    assert {name: row["step"] for name, row in rows.items()} == {"Canon-A": 40, "Canon-AB": 20}
    assert all(row["suite_step"] == 40 for row in (*rows.values(), *found["scores"]))
    cells = {cell["architecture"]: cell for cell in found["scores"][0]["cells"]}
    for label, row in rows.items():
        assert cells[label]["step"] == row["step"]
        for kind in ("chosen", "best"):
            assert cells[label][kind]["value"] == pytest.approx(row["value"])
    page = Page(report(paths, tmp_path / "out"))
    boolq = [" ".join(row) for row in page.rows if row[0].startswith("boolq acc")]
    marked = [row for row in boolq if "step 20" in row]
    assert len(marked) == 3  # differences, scores, suite
    assert not any("step 40" in row for row in marked)


FINE = records({"acc": [1.0, 0.0]})


@pytest.mark.parametrize(
    ("second", "scores", "named"),
    [
        (records({"acc": [1.0, 0.0]}, names=["b", "d"]), {}, "0 in common"),
        (FINE, {"acc": 0.7}, "0.7"),
        (records({"acc": [1.0, math.inf]}), {}, "b "),
        ([{"doc_id": 0, "acc": 1.0}], {}, "b "),
    ],
)
def test_what_cannot_be_paired_is_refused(tmp_path, second, scores, named):
    found = content(*versus(tmp_path, FINE, second, scores={"boolq": scores}))
    (row,) = found["refused"]
    assert found["pairs"] == [] and named in row["why"]


def test_items_are_paired_in_any_order(tmp_path):
    """A repeated item is one cluster."""
    items = records({"acc": [1.0, 0.0, 1.0, 1.0]}, names=["a", "b", "a", "c"])
    row = only_pair(*versus(tmp_path, items, [items[3], *items[:3]]))
    assert (row["difference"], row["num_items"], row["num_clusters"]) == (0, 4, 3)
    assert (row["mcnemar"]["only_a"], row["mcnemar"]["only_b"]) == (0, 0)


def test_different_options_are_listed_and_losses_refused(tmp_path):
    items = {"lambada": records({"acc": [1.0, 0.0, 1.0], "perplexity": [-1.0, -2.0, -3.0]})}
    for name, canon, length, settings in (("a", "", 256, "x"), ("b", "ABCD", 512, "y")):
        described = {"lambada": {"primary": ["acc", "perplexity"], "config_sha256": settings}}
        asked = {"described": described, "max_length": length, "lm_eval": name}
        plant(tmp_path / name, items, canon, **asked)
    found = content(tmp_path / "a", tmp_path / "b")
    (row,), (without,) = found["pairs"], found["refused"]
    length, settings = row["asked_differently"]
    assert length == "max_length: 512 / 256" and settings.startswith("config_sha256 ")
    assert (row["metric"], without["metric"]) == ("acc", "perplexity")
    assert length in without["why"] and settings in without["why"]


@pytest.mark.parametrize("metric", ["word_perplexity", "bits_per_byte", "perplexity", "acc"])
def test_scores_are_lm_evals_aggregates_of_items(metric):
    values = RNG(7).uniform(-3, -1, 30).tolist()
    if metric in ("word_perplexity", "bits_per_byte"):
        values = [(float(-x), int(10 * x)) for x in RNG(7).uniform(5, 90, 30)]
    names = {"word_perplexity": "weighted_perplexity", "acc": "mean"}
    aggregation = getattr(metrics, names.get(metric, metric))
    items = records({metric: [list(x) if isinstance(x, tuple) else x for x in values]})
    ours, scale = _values(items)[metric], Scale.of(metric)
    mean = float(np.average(ours[:, 0] * scale.factor, weights=ours[:, 1]))
    assert scale.score(mean) == pytest.approx(aggregation(values), rel=1e-12)
    assert scale.mean(scale.score(mean)) == pytest.approx(mean)


@pytest.fixture
def compare(tmp_path_factory):
    def run(*words):
        """Run the command and return its --json."""
        parser, out = Parser(), tmp_path_factory.mktemp("pair") / "pair.json"
        add_arguments(parser)
        run_compare(parser.parse_args(["--json", str(out), *map(str, words)]))
        return json.loads(out.read_text())

    return run


def test_groups_of_seeds_and_folders_of_runs(tmp_path, compare):
    seeds = range(4)
    a = [plant(tmp_path / f"nope/seed{k}", right(0.6 + 0.01 * k), "", k) for k in seeds]
    b = [plant(tmp_path / f"canon/seed{k}", right(0.9 + 0.01 * k), "A", k) for k in seeds]
    found = compare("--a", *a, "--b", *b)
    (row,) = found["pairs"]
    assert compare(tmp_path / "nope", tmp_path / "canon")["pairs"] == [row]
    assert compare(tmp_path)["pairs"][0]["difference"] == -row["difference"]  # canon is A
    with refused("compare.sides"):
        compare(tmp_path / "nope")
    assert row["num_runs"] == [4, 4] and row["difference"] == pytest.approx(0.3)
    assert (row["seed_noise"]["source"], row["seed_noise"]["df"]) == ("own", 6)
    assert row["seed_noise"]["sigma"] == pytest.approx(np.std(seeds, ddof=1) / 100)
    assert found["notes"] == []
    mixed = compare("--a", *a[:2], b[0], "--b", *b[1:], "--own_noise_only")
    assert len(mixed["notes"]) == 1  # A is not one recipe


def test_options_set_step_suite_and_seed_noise(tmp_path, compare):
    for at, share in ((10, 0.5), (20, 0.6)):
        pair = [plant(tmp_path / "a", right(0.5), at=at)]
        pair += [plant(tmp_path / "b", right(share, rng=RNG(8)), "A", at=at)]
    for words, step in (([], 20), (["--step", 10], 10), (["--suite", SUITE], 20)):
        assert compare(*pair, *words)["pairs"][0]["step"] == step
    for sigma, verdict in ((0.001, "better"), (0.2, "within noise")):
        (row,) = compare(*pair, "--seed_sigma", f"boolq={sigma}")["pairs"]
        assert row["verdict"] == verdict
    for words in (["--step", 15], ["--suite", "jrt"]):
        with refused("compare.nothing"):
            compare(*pair, *words)
    for given in ("boolq", "boolqq=0.1", "boolq=-1"):
        with refused("compare.seed_sigma", given=given):
            compare(*pair, "--seed_sigma", given)


def test_seed_noise_of_held_out_loss_is_in_nats(tmp_path, compare):
    losses = {"validation": {"bits_per_byte": Score(2.0), "nats_per_token": Score(5.0)}}
    pair = [
        plant_run(tmp_path / name, validations({20: 5.0}), model__canon_set=name) for name in "AB"
    ]
    for run in pair:
        plant_results(run, 20, "validation", losses)
    paths = [run.path for run in pair]
    with refused("compare.seed_sigma"):
        compare(*paths, "--seed_sigma", "validation:bits_per_byte=0.1")
    with refused("compare.nothing"):  # it is known, but these results have no documents
        compare(*paths, "--seed_sigma", "validation:nats_per_token=0.1")


def test_sides_that_cannot_be_compared_are_errors(tmp_path, compare):
    a, b, trial, bare = (tmp_path / name for name in ("a", "b", "trial", "bare"))
    plant(a, right(0.5))
    plant(b, records({"acc": [1.0, 0.0]}, names=["x", "y"]), "A", max_length=64)
    plant(trial, right(0.5), "A", limit=10)
    planted_run(bare)
    for other, task, has in ((b, "boolq", 1), (trial, None, 1), (bare, None, 0)):
        with refused("compare.nothing") as caught:
            compare(a, other)
        fields = caught.value.fields
        assert [len(x) for x in fields["found"].values()] == [1, has]
        assert [x["task"] for x in fields["refused"]] == [task]
    for other, code in ((tmp_path / "nowhere", "run.not_a_run"), (a, "run.given_twice")):
        with refused(code):
            compare(a, other)
    for words in ([], [a, b, trial], ["--a", a], [a, b, "--a", bare]):
        with refused("compare.sides"):
            compare(*words)


def test_a_suite_that_the_chosen_rate_lacks_is_reported(tmp_path):
    """Of such a suite there is no step to compare at, and no reason to fail."""
    for rate, loss in ((0.002, 5.0), (0.004, 4.0)):
        run = plant_run(tmp_path / str(rate), validations({20: loss}), optimizer__lr=rate)
        if loss == 5.0:
            plant_results(run, 20, SUITE, {"piqa": {"acc": Score(0.5, 0.1)}})
    found = content_of(report([tmp_path], tmp_path / "out"))
    (suite,) = found["suites"]
    assert suite["columns"] == [{"run": "0.002", "step": 20, "limit": None}]
    assert found["comparison"]["steps"] == {}
