"""The report's verdicts, score tables, score curves and accuracy over length, of planted items."""

import json
import math
import random
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from canon_pretrain.report.comparison import comparison_content
from canon_pretrain.report.content import report_content
from canon_pretrain.report.eval_report import html_page, report
from canon_pretrain.report.evaluations import Evaluation, read_runs
from canon_pretrain.report.figures import ALL_POINTS, CURVES, points_per_line
from canon_pretrain.report.score_tables import PUBLISHED, anchors
from canon_pretrain.report.verdicts import MAX_REAL, verdict_summary
from canon_pretrain.report.words import figure, interval, p_value, signed
from canon_pretrain.run.folder import RunFolder
from canon_pretrain.run.results import Results, Score
from eval.__main__ import main
from tests.eval_simulation import evaluated
from tests.report_pages import Page, content, markdown
from tests.report_runs import TOKENS_A_STEP, launch, plant_items, plant_results, plant_run, step

EVENTS = [launch("start"), *(step(k, 7 - k / 10) for k in (10, 20, 30))]
NUM_ITEMS = 400
TASKS = {
    "piqa": {"version": 1, "primary": "acc", "chance": 0.5},
    "boolq": {"version": 1, "primary": ["acc"], "chance": 0.5},
    "lambada_openai": {"version": 1, "primary": ["acc", "perplexity"]},
}


@pytest.fixture(scope="module", autouse=True)
def without_fsync() -> Iterator[None]:
    """Thousands of small files are planted here; none has to outlive the machine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("os.fsync", lambda _: None)
        yield


def coins(chance: float, seed: int, num_items: int = NUM_ITEMS) -> list[float]:
    draw = random.Random(seed)
    return [float(draw.random() < chance) for _ in range(num_items)]


def answers(piqa: float, seed: int) -> dict[str, dict[str, Sequence[float]]]:
    """Three tasks; only piqa's chance of a right answer is given, the others are as good always."""
    likelihoods = random.Random(-1 - seed)
    return {
        "piqa": {"acc": coins(piqa, seed), "acc_norm": coins(piqa, seed + 50)},
        "boolq": {"acc": coins(0.5, seed + 100)},
        "lambada_openai": {
            "perplexity": [likelihoods.gauss(-2.5, 1.0) for _ in range(NUM_ITEMS)],
            "acc": coins(0.4, seed + 200),
        },
    }


def losses(run: RunFolder, loss: float) -> None:
    scores = {"validation": {"nats_per_token": Score(loss), "bits_per_byte": Score(loss / 3)}}
    plant_results(run, 30, "validation", scores, tasks={"validation": {"version": 2}})


@pytest.fixture(scope="module")
def six(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """rope and nope, two learning rates; two seeds of the better one. nope is better on piqa."""
    folder = tmp_path_factory.mktemp("six")
    paths = []
    for position, piqa in (("rope", 0.5), ("nope", 0.85)):
        for k, (rate, seed, loss) in enumerate(((2, 1, 3.5), (4, 1, 3.25), (4, 2, 3.25))):
            run = plant_run(
                folder / f"{position}-lr{rate}-seed{seed}",
                EVENTS,
                done=True,
                model__position=position,
                optimizer__lr=rate / 1000,
                model__init_seed=seed,
            )
            at = {"rope": 0, "nope": 10}[position] + k
            plant_items(run, 20, "discriminative", answers(0.5, at + 1000), tasks=TASKS)
            plant_items(run, 30, "discriminative", answers(piqa, at), tasks=TASKS)
            losses(run, loss)
            paths.append(run.path)
    return paths


@pytest.fixture(scope="module")
def page(six: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return report(six, tmp_path_factory.mktemp("out"))


def test_a_planted_difference_is_real_and_the_others_are_noise(page: Path) -> None:
    (summary,) = content(page)["verdicts"]["architectures"]
    assert (summary["architecture"], summary["baseline"]) == ("nope", "rope")
    counts = summary["counts"]
    assert (counts["better"], counts["worse"]) == (2, 0)
    assert sum(counts.values()) == len(content(page)["comparison"]["pairs"]) == 5
    mean, real = summary["real"]
    assert mean["mean_of"] == ["piqa", "boolq", "lambada_openai"]
    assert (real["task"], real["metric"]) == ("piqa", "acc")
    assert real["difference"] == pytest.approx(0.35, abs=0.06)
    words = (
        f"{figure(real['baseline_value'])} → {figure(real['value'])} ({signed(real['difference'])}"
    )
    for text in (Page(page).text, markdown(page)):
        assert "2 better, 0 worse" in text and words in text
        assert "within noise, however large it looks" in text


def test_the_verdicts_come_first_and_every_section_after_it_in_order(page: Path) -> None:
    titles = [
        "Which differences are real",
        "Every difference",
        "Scores by architecture",
        "One learning rate an architecture, chosen on validation loss",
        "Best of learning rates, as in the paper",
        "Training curves",
        "Evaluations",
    ]
    for text in (Page(page).text, markdown(page)):
        places = [text.index(title) for title in titles]
        assert places == sorted(places)


def test_held_out_loss_is_the_headline_with_its_curve(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Issue 17, item 1: the verdict is said first, then the curves by architecture."""
    runs = []
    for name, canon, shift in (("nope", "", 0.0), ("canon", "ABCD", -0.1)):
        for seed in range(2):
            folder = tmp_path / f"{name}{seed}"
            evaluated(folder, canon, 6.0 + shift + 0.002 * seed, seed, at=10)
            runs.append(evaluated(folder, canon, 5.0 + shift + 0.002 * seed, seed))
    page = report(runs, tmp_path / "out")
    found, text = content(page), Page(page).text
    (headline,) = found["comparison"]["held_out"]
    assert headline in text and headline in markdown(page).splitlines()[2]
    assert " ".join(capsys.readouterr().out.split()).startswith(headline)
    places = [text.index(x) for x in (headline, "nats per token, from", "Which differences are")]
    assert places == sorted(places) and "better by 0.1 nats/token" in headline
    nope, canon = found["held_out"]["lines"]
    assert nope["values"] == pytest.approx([6.001, 5.001]) and nope["n"] == [2, 2]
    assert canon["low"] == pytest.approx([5.9, 4.9]) and canon["tokens"] == [10 * 2048, 20 * 2048]
    (summary,) = found["verdicts"]["architectures"] or [{"counts": {}}]
    assert sum(summary["counts"].values()) == 0  # the headline is no task


def test_a_row_of_the_table_of_differences_says_what_the_comparison_found(page: Path) -> None:
    (pair,) = (p for p in content(page)["comparison"]["pairs"] if p["task"] == "piqa")
    shown = [
        pair["verdict"],
        signed(pair["difference"]),
        interval(pair["ci"]),
        p_value(pair["p_holm"]),
        figure(pair["value"]),
        figure(pair["baseline_value"]),
    ]
    (row,) = (row for row in Page(page).rows if row[:4] == ["piqa acc", *shown[:3]])
    assert row[1:7] == shown and row[9:11] == [f"{NUM_ITEMS}", "discriminative"]
    assert " | ".join(["| piqa acc", *shown]).replace("<", "&lt;") in markdown(page)


def test_tables_go_by_suite_in_the_papers_order(tmp_path: Path) -> None:
    paths = []
    for name in ("rope", "nope"):
        run = plant_run(tmp_path / name, EVENTS, model__position=name)
        for suite in ("mine", "birth-year", "discriminative", "babilong", "a", "jrt"):
            tasks = {f"task of {suite}": {"version": 1, "primary": ["acc"], "chance": 0.5}}
            values = {task: {"acc": coins(0.5, len(suite))} for task in tasks}
            plant_items(run, 30, suite, values, tasks=tasks)
        paths.append(run.path)
    shown = content(report(paths, tmp_path / "out"))
    for name in ("pairs", "chosen", "best_of", "every_run"):
        suites = [row["suite"] for row in shown["comparison"][name]]
        assert suites == ["discriminative", "jrt", "babilong", "birth-year", "a", "mine"]


def test_the_learning_rate_is_chosen_on_loss_and_the_best_of_is_labelled(page: Path) -> None:
    comparison = content(page)["comparison"]
    for architecture in comparison["architectures"]:
        assert architecture["chosen"]["learning_rate"] == 0.004
        assert architecture["chosen"]["loss"] == pytest.approx(3.25)
    (best,) = (r for r in comparison["best_of"] if r["task"] == "boolq")
    (chosen,) = (r for r in comparison["chosen"] if r["task"] == "boolq")
    parsed = Page(page)
    for row, words in ((best, "best of 3"), (chosen, "2 runs")):
        cells = [f"{cell['value']:.4f}" for cell in row["cells"]]
        (found,) = (
            shown
            for shown in parsed.rows
            if shown[0] == "boolq acc" and words in shown[1] and words in shown[2]
        )
        assert [text.split()[0] for text in found[1:3]] == cells
        assert all(f"{cell} (" in markdown(page) for cell in cells)
    assert comparison["best_of_words"].split(";")[0] in parsed.text


def test_published_scores_stand_beside_ours_in_no_verdict(page: Path) -> None:
    found = content(page)["anchors"]
    assert {row["task"] for row in found["rows"]} == set(TASKS)
    rows = [r for r in Page(page).rows if r[0] == "piqa acc" and r[-1] == "0.7225"]
    assert [row[-3:] for row in rows] == [["0.7002", "0.7187", "0.7225"]] * 3
    assert " | 18.3200 | 12.5600 | 12.1700 |" in markdown(page)
    for text in (Page(page).text, markdown(page)):
        assert "part of no verdict" in text and "1.3B parameters" in text
    assert "Mamba2" not in json.dumps(content(page)["comparison"])


def test_anchors_are_those_of_the_specification_as_fractions() -> None:
    everything = anchors(PUBLISHED)
    assert everything is not None and len(everything["rows"]) == 10
    values = {(row["task"], row["metric"]): row["values"] for row in everything["rows"]}
    assert values["lambada_openai", "acc"] == [0.426, 0.4566, 0.4665]
    assert values["wikitext", "word_perplexity"] == [18.53, 16.56, 16.42]
    assert anchors([("mine", "acc")]) is None


def test_score_curves_have_every_step_with_tokens_and_items(page: Path, six: list[Path]) -> None:
    curves = content(page)["score_curves"]
    names = [(curve["task"], curve["metric"]) for curve in curves]
    assert names == [
        ("piqa", "acc"),
        ("boolq", "acc"),
        ("lambada_openai", "acc"),
        ("lambada_openai", "perplexity"),
    ]
    for curve in curves:
        assert [line["run"] for line in curve["lines"]] == [path.name for path in six]
        for line in curve["lines"]:
            assert line["steps"] == [20, 30] and line["counts"] == [NUM_ITEMS] * 2
            assert line["tokens"] == [20 * TOKENS_A_STEP, 30 * TOKENS_A_STEP]
    (stored,) = (six[3] / "evals/step-30/discriminative").glob("*/results.json")
    score = json.loads(stored.read_text())["scores"]["piqa"]["acc"]
    assert curves[0]["lines"][3]["values"][1] == score["value"]
    assert curves[0]["lines"][3]["stderrs"][1] == score["stderr"]


def test_baseline_is_taken_by_label_or_run_and_an_unknown_one_is_refused(
    six: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["report", *map(str, six), "--out", str(tmp_path)]
    main([*arguments, "--baseline", "nope"])
    assert "rope against nope: 0 better, 2 worse" in capsys.readouterr().out
    with pytest.raises(SystemExit) as exit_code:
        main([*arguments, "--baseline", "alibi"])
    assert exit_code.value.code == 2
    assert "'alibi'" in capsys.readouterr().err


def test_a_seed_noise_that_is_given_is_named(six: list[Path], tmp_path: Path) -> None:
    main(["report", *map(str, six), "--out", str(tmp_path), "--seed_sigma", "piqa=0.2"])
    page = tmp_path / "index.html"
    (pair,) = (p for p in content(page)["comparison"]["pairs"] if p["task"] == "piqa")
    assert pair["verdict"] == "within noise" and pair["seed_noise"]["sigma"] == 0.2
    for text in (Page(page).text, markdown(page)):
        assert "Seed noise of piqa: as given with --seed_sigma." in text


def test_one_run_has_no_verdicts_and_no_empty_sections(six: list[Path], tmp_path: Path) -> None:
    page = report(six[:1], tmp_path)
    headings = [attributes.get("id") for tag, attributes in Page(page).tags if tag == "h2"]
    assert headings == [
        *("held-out", "runs", "curves", "evaluations", "over-steps", "published"),
    ]
    titles = re.findall("^## (.*)$", markdown(page), re.MULTILINE)
    assert titles == [
        *("Held-out loss", "Run", "Training curves", "Evaluations"),
        *("Scores over training", "Published scores"),
    ]


def test_one_architecture_is_no_comparison_but_has_tables(six: list[Path], tmp_path: Path) -> None:
    page = report(six[:3], tmp_path)
    assert content(page)["verdicts"]["architectures"] == []
    for text in (Page(page).text, markdown(page)):
        assert "there is nothing to compare it with" in text
        assert "Best of learning rates" in text and "Every difference" not in text


def test_tasks_missing_and_trials_are_said_and_no_verdict_rests_on_them(tmp_path: Path) -> None:
    rope, nope, trial = (
        plant_run(tmp_path / name, EVENTS, model__position=name) for name in ("rope", "nope", "x")
    )
    there = answers(0.5, 1)
    plant_items(rope, 30, "discriminative", there, tasks=TASKS)
    fewer = {"piqa": there["piqa"]}
    plant_items(nope, 30, "discriminative", fewer, tasks={"piqa": TASKS["piqa"]})
    plant_items(trial, 30, "discriminative", answers(0.9, 2), tasks=TASKS, limit=7)
    page = report([rope.path, nope.path, trial.path], tmp_path / "out")
    comparison = content(page)["comparison"]
    assert {(p["architecture"], p["task"]) for p in comparison["pairs"]} == {("nope", "piqa")}
    assert {r["task"] for r in comparison["refused"] if r["architecture"] == "nope"} == {
        "boolq",
        "lambada_openai",
    }
    for text in (Page(page).text, markdown(page)):
        assert re.search(r"nope, boolq, lambada_openai: nope has no", text)
        assert "first 7 items only: not a result" in text
        assert "x: only results with --limit" in text


def plant_lengths(folder: Path, name: str, seed: int, shift: float) -> RunFolder:
    """The probes at three L, and Babilong at two lengths without qa5 at the second."""
    run = plant_run(folder / f"{name}{seed}", EVENTS, model__position=name, model__init_seed=seed)
    probes = {
        f"{kind}-{length}": {
            "exact": Score(0.5 + shift - length / 4096),
            "rank": Score(0.6 + shift),
        }
        for kind in ("1-hop", "1-hop-random", "2-hop")
        for length in (1024, 0, 256)
    }
    plant_results(run, 30, "birth-year", probes)
    babilong = {
        f"babilong_qa{k}_{length}k": {"acc": Score(k / 10 + shift)}
        for k in range(1, 6)
        for length in (0, 4)
        if (k, length) != (5, 4)
    }
    plant_results(run, 30, "babilong", babilong)
    return run


def test_accuracy_over_length_by_architecture_with_chance_for_rank(tmp_path: Path) -> None:
    runs = [
        plant_lengths(tmp_path, "rope", 1, 0.0),
        plant_lengths(tmp_path, "rope", 2, 0.1),
        plant_lengths(tmp_path, "nope", 1, 0.2),
    ]
    page = report([run.path for run in runs], tmp_path / "out")
    probes, babilong = content(page)["lengths"]
    panels = {(panel["series"], panel["metric"]): panel for panel in probes["panels"]}
    kinds = ("1-hop", "1-hop-random", "2-hop")
    assert list(panels) == [(kind, metric) for metric in ("exact", "rank") for kind in kinds]
    chances = [panel["chance"] for panel in panels.values()]
    assert chances == [None, None, None, 0.2, 0.2, pytest.approx(1 / 3)]
    exact = panels["1-hop", "exact"]
    assert exact["lengths"] == [0, 256, 1024]
    rope, nope = exact["lines"]
    assert rope["values"] == pytest.approx([0.55, 0.4875, 0.3]) and rope["n"] == [2, 2, 2]
    assert rope["low"] == pytest.approx([0.5, 0.4375, 0.25])
    assert rope["high"] == pytest.approx([0.6, 0.5375, 0.35])
    assert nope["values"] == pytest.approx([0.7, 0.6375, 0.45])
    series = {panel["series"]: panel for panel in babilong["panels"]}
    assert list(series) == ["mean of qa1 to qa5", "qa1", "qa2", "qa3", "qa4", "qa5"]
    mean = series["mean of qa1 to qa5"]
    assert mean["lengths"] == [0]  # qa5 is missing at 4k
    assert mean["lines"][1]["values"] == pytest.approx([0.3 + 0.2])
    parsed = Page(page)
    assert ["1-hop rank, chance 0.200", "0", "256", "1,024"] in parsed.rows
    assert ["rope", "0.5500", "0.4875", "0.3000"] in parsed.rows
    assert "| rope | 0.5500 | 0.4875 | 0.3000 |" in markdown(page)
    assert "2-hop rank, chance 0.333" in markdown(page)


def test_a_chance_that_the_task_declares_counts_before_ours(tmp_path: Path) -> None:
    run = plant_run(tmp_path / "run", EVENTS)
    part = {"part_of": "1-hop-0", "part": "rank", "primary": ["rank"], "chance": 0.25}
    tasks = {"1-hop-0": {"primary": ["exact"]}, "1-hop-0_rank": part}
    scores = {"1-hop-0": {"exact": Score(0.5), "rank": Score(0.5)}}
    plant_results(run, 30, "birth-year", scores, tasks=tasks)
    (figure_,) = content(report([run.path], tmp_path / "out"))["lengths"]
    assert [(p["metric"], p["chance"]) for p in figure_["panels"]] == [
        ("exact", None),
        ("rank", 0.25),
    ]


def test_trials_do_not_hide_in_the_figures_over_length(tmp_path: Path) -> None:
    run = plant_run(tmp_path / "run", EVENTS)
    plant_results(run, 30, "birth-year", {"1-hop-0": {"exact": Score(1.0)}}, limit=3)
    page = report([run.path], tmp_path / "out")
    assert content(page)["lengths"][0]["limited"] == ["run"]
    for text in (Page(page).text, markdown(page)):
        assert "run: first items only: not a result." in text


def primary_metrics(scores: dict[str, Any], tasks: Any, task: str) -> list[str]:
    asked = {"checkpoint": "c", "step": 1, "suite": "s", "limit": None, "train_fingerprint": "f"}
    return Evaluation(
        "run", Results({**asked, "tasks": tasks}, scores, {}), Path()
    ).primary_metrics(task)


def test_the_primary_metric_is_the_declared_one_else_the_first() -> None:
    scores = {"t": {"a": Score(1.0), "b": Score(2.0)}}
    assert primary_metrics(scores, {"t": {"primary": "b"}}, "t") == ["b"]
    assert primary_metrics(scores, {"t": {"primary": ["b", "a"]}}, "t") == ["b", "a"]
    for unknown in ({}, {"t": 3}, None, {"t": {"primary": "gone"}}, {"t": {"primary": None}}):
        assert primary_metrics(scores, unknown, "t") == ["a"]
    assert primary_metrics(scores, {}, "other") == []


def test_points_of_many_runs_stay_within_the_budget() -> None:
    assert points_per_line(3) == 4000
    assert points_per_line(40 * len(CURVES)) * 40 * len(CURVES) <= ALL_POINTS
    assert points_per_line(10_000) == 300


def pair(verdict: str, task: str, p: float | None = 0.5, **more: Any) -> dict[str, Any]:
    return {
        "suite": "s",
        "task": task,
        "metric": "acc",
        "architecture": "a",
        "baseline": "b",
        "verdict": verdict,
        "p": p,
        "mean_of": None,
        "p_holm": p,
        "detectable": 0.01,
        "log_difference": None,
        "seed_noise": {"source": "paper"},
        "asked_differently": [],
        **more,
    }


def test_the_summary_counts_and_picks_and_leaves_perplexities_out_of_the_range() -> None:
    pairs = [
        pair("worse", "w", 0.001),
        *(pair("better", f"b{k}", 0.01 / (k + 1)) for k in range(MAX_REAL + 3)),
        pair("within noise", "n0", detectable=0.02),
        pair("uninformative", "u", detectable=None, uninformative="floor"),
        pair("better", "validation", suite="validation"),
        pair("within noise", "n1", detectable=0.05, asked_differently=["max_length: 1 / 2"]),
        pair("within noise", "n2", detectable=0.03, seed_noise={"source": "own"}),
        pair("within noise", "n2", architecture="c"),
        pair("within noise", "ppl", detectable=9.0, log_difference=0.1),
        *(
            pair("not judged", task, None, detectable=None, seed_noise=None, words=words)
            for task in ("j0", "j1")
            for words in [f"not judged: no noise: give {task}:acc=SIGMA"]
        ),
    ]
    refused = [
        {"architecture": "a", "task": task, "suite": "jrt", "why": why}
        for task, why in (("x", "one"), ("y", "one"), (None, "two"))
    ]
    found = verdict_summary(pairs, refused)
    tally, other = found["architectures"]
    assert (tally["architecture"], other["architecture"]) == ("a", "c")
    assert tally["counts"] == {
        "better": MAX_REAL + 3,
        "worse": 1,
        "within noise": 4,
        "not judged": 2,
        "uninformative": 1,
    }
    assert tally["detectable"] == [0.02, 0.03, 0.05]
    clearest = [f"b{k}" for k in reversed(range(3, MAX_REAL + 3))]
    assert [p["task"] for p in tally["real"]] == [*clearest, "w"]  # the worse one is not hidden
    assert tally["more_real"] == 3
    noises = {entry["source"]: entry["tasks"] for entry in found["seed_noise"]}
    assert len(noises["paper"]) == MAX_REAL + 10
    assert noises["own"] == ["n2 (some pairs)"] and "n2 (some pairs)" in noises["paper"]
    assert [entry["tasks"] for entry in found["refused"]] == [["x", "y"], ["the whole suite jrt"]]
    why = "no noise: give TASK:METRIC=SIGMA"
    assert found["not_judged"] == [{"why": why, "tasks": ["j0", "j1"]}]
    assert found["asked_differently"] == [
        {"architecture": "a", "what": "max_length: 1 / 2", "tasks": ["n1"]}
    ]


def test_figures_and_signs() -> None:
    assert [signed(x) for x in (0.04, -0.04, 1234.5, None)] == [
        "+0.0400",
        "−0.0400",
        "+1,234.50",
        "–",
    ]
    assert interval([-0.1, 0.2]) == "−0.1000 to +0.2000" and interval(None) == "–"
    assert [p_value(x) for x in (0.04999, 0.00001, None)] == ["0.0500", "< 0.0001", "–"]
    assert figure("Infinity") == "not finite (Infinity)" and figure(123.456) == "123.46"
    assert math.isclose(float(figure(0.12345)), 0.1235, abs_tol=1e-4)


def test_forty_runs_of_seventy_tasks_fit_one_page(page: Path, tmp_path: Path) -> None:
    """40 architectures: 2,730 differences, each as one that the comparison found."""
    draw = random.Random(0)
    names = [f"task_{k}" for k in range(70)]
    tasks = {name: {"version": 1, "primary": ["acc"]} for name in names}
    log = [launch("start"), *(step(k, draw.gauss(3, 0.1), draw.random()) for k in range(1, 1001))]
    runs = []
    for k in range(40):
        runs.append(plant_run(tmp_path / f"run-{k:02}", log, model__dim=128 + k, done=True))
        for at in (500, 1000):
            scores = {name: {"acc": Score(draw.random(), draw.random() / 50)} for name in names}
            plant_results(runs[-1], at, "suite", scores, tasks=tasks)
    read = read_runs([run.path for run in runs])
    (real, *_), everything = content(page)["comparison"]["pairs"], comparison_content(read)
    labels = [each["label"] for each in everything["architectures"]]
    everything["pairs"] = [
        real | {"suite": "suite", "task": name, "architecture": label, "baseline": labels[0]}
        for label in labels[1:]
        for name in names
    ]
    everything["family"]["pairs"] = [[label, labels[0]] for label in labels[1:]]
    shown = html_page(report_content(read, everything))
    assert len(shown.encode()) < 8_000_000
    assert shown.count("<tr data-suite=") > 39 * 70
    assert "what each is judged by is in report.json" in shown
