"""The page of `run plot`: curves against loops by hand, bands against numpy, and a browser."""

import json
import math
import random
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from canon_pretrain.report.curves import Band, downsample, group_seeds, segments
from canon_pretrain.report.plot import page_content
from canon_pretrain.report.record import Curve, RunRecord
from canon_pretrain.run.__main__ import main
from canon_pretrain.run.results import Score
from tests.browser import DESKTOP, EVIL, PHONE, Browser
from tests.report_runs import TOKENS_A_STEP, plant_results, plant_run
from tests.support import refused

START = datetime(2026, 11, 1, 8, tzinfo=UTC)

Json = dict[str, Any]


def at(hours: float, event: str, **fields: Any) -> Json:
    """An event so many hours after START."""
    return {"event": event, "time": (START + timedelta(hours=hours)).isoformat(), **fields}


def step(hours: float, number: int, loss: Any, **fields: Any) -> Json:
    return at(hours, "step", step=number, tokens=TOKENS_A_STEP * number, loss=loss, **fields)


def validation(number: int, bits: Any, **sources: float) -> Json:
    parts = {name: {"bits_per_byte": value} for name, value in sources.items()}
    return at(number / 100, "validation", step=number, bits_per_byte=bits, sources=parts)


def record(path: Path, events: list[Json], **identity: Any) -> RunRecord:
    return RunRecord(plant_run(path, events, **identity).path)


def drawn(content: Json, chart: str, role: str) -> Json:
    """The first trace of that role in a chart."""
    charts = {each["id"]: each for part in content["sections"] for each in part["charts"]}
    traces: list[Json] = charts[chart]["variants"][0]["traces"]
    return next(trace for trace in traces if trace["meta"]["role"] == role)


LEARNS = [at(0, "start"), step(0.1, 10, 9.0), step(0.2, 20, 8.0)]


# ---- one run


def test_two_kills_and_another_world_size_give_one_clean_curve(tmp_path):
    run = record(
        tmp_path / "run",
        [
            at(0.0, "start", world_size=8),
            step(0.2, 10, 9.0),
            step(0.3, 20, 8.0),
            step(0.4, 30, 7.5),  # lost: the checkpoint is of step 20
            at(0.35, "skip", step=25, reason="gone", loss="NaN", grad_norm=1.0),
            at(2.0, "resume", world_size=4, from_step=20),
            step(2.2, 30, 7.0),
            at(2.3, "skip", step=35, reason="loss is not finite", loss="NaN", grad_norm=1.0),
            step(2.4, 40, "NaN"),
            at(5.0, "resume", world_size=8, from_step=40),
            step(5.1, 50, "Infinity"),
            step(5.2, 60, 5.0),
        ],
    )
    loss = run.curve("loss")
    assert loss is not None and loss.steps.tolist() == [10, 20, 30, 40, 50, 60]
    np.testing.assert_array_equal(loss.values, [9.0, 8.0, 7.0, math.nan, math.inf, 5.0])
    assert run.clock.tokens.tolist() == [TOKENS_A_STEP * k for k in range(0, 70, 10)]
    # gaps and the lost work (0.3 to 0.4 h) do not count as training
    assert run.clock.training_hours == pytest.approx([0, 0.2, 0.3, 0.5, 0.7, 0.8, 0.9])
    assert run.clock.wall_hours == pytest.approx([0, 0.2, 0.3, 2.2, 2.4, 5.1, 5.2])
    assert [skip["step"] for skip in run.skips] == [35]
    content = page_content([run])
    raw = drawn(content, "loss", "raw")
    assert raw["x"] == [10, 20, 30, 40, 50, 60] and raw["y"] == [9, 8, 7, None, None, 5]
    gaps = drawn(content, "loss", "gap")
    assert gaps["x"] == [40, 50]
    assert gaps["text"] == ["<b>NaN</b>, step 40", "<b>Infinity</b>, step 50"]
    assert drawn(content, "loss", "skip")["x"] == [35]
    restarts = drawn(content, "loss", "restart")
    assert restarts["x"][::3] == [20, 40]
    assert restarts["meta"]["at"]["training_hours"][::3] == pytest.approx([0.3, 0.7])
    assert restarts["meta"]["at"]["wall_hours"][::3] == pytest.approx([2.0, 5.0])


# ---- thinning


def test_thinning_keeps_each_stretch_s_extremes_its_first_gap_and_the_ends():
    values = np.random.default_rng(3).normal(3.0, 0.1, 20_000)
    values[[17, 10_000, 19_960]] = 50.0, -20.0, 80.0
    values[[100, 101, 5000]] = np.nan, np.inf, -np.inf
    bounds = segments(len(values), 300)
    assert bounds[0] == 0 and bounds[-1] == len(values) and len(bounds) == 301
    assert set(np.diff(bounds).tolist()) <= {66, 67}
    kept = downsample(values, bounds)
    expected = {0, len(values) - 1}
    for begin, end in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
        finite = [(values[i], i) for i in range(begin, end) if math.isfinite(values[i])]
        expected |= {min(finite)[1], max(finite)[1]}
        expected |= set([i for i in range(begin, end) if not math.isfinite(values[i])][:1])
    assert kept.tolist() == sorted(expected)
    assert {17, 10_000, 19_960, 100, 5000} <= set(kept.tolist())
    assert downsample(values[:300], segments(300, 300)).tolist() == list(range(300))


def test_half_a_million_steps_are_a_page_of_a_few_megabytes(tmp_path, monkeypatch):
    values = np.random.default_rng(0).normal(3, 0.1, 500_000)
    values[123_456] = 77.0
    monkeypatch.setattr(RunRecord, "curve", lambda *_: Curve(np.arange(1, 500_001), values))
    runs = [record(tmp_path / f"seed{k}", LEARNS, model__init_seed=k) for k in (0, 1)]
    content = page_content(runs)
    assert len(json.dumps(content, separators=(",", ":"))) < 3e6  # beside plotly itself
    assert 77 in drawn(content, "loss", "raw")["y"]
    assert 77 in drawn(content, "loss", "band")["meta"]["high"]


# ---- seeds


def test_a_band_is_numpy_s_minimum_and_maximum_at_common_steps():
    values = np.random.default_rng(5).normal(3, 1, (3, 40))
    steps = np.arange(0, 400, 10)
    logged = [
        Curve(steps, values[0]),
        Curve(steps[:30], values[1][:30]),  # still running
        Curve(steps[::2], values[2][::2]),  # logs every second one
    ]
    made = Band.of(logged, 2000)
    assert made is not None
    common = values[:, :30:2]
    assert made.steps.tolist() == list(range(0, 300, 20))
    np.testing.assert_allclose(made.low, common.min(axis=0))
    np.testing.assert_allclose(made.high, common.max(axis=0))
    np.testing.assert_allclose(made.mean, common.mean(axis=0))
    np.testing.assert_allclose(made.members, common)
    # a value that is not finite in one of them is a gap, not a band of the others
    logged[0].values[4] = math.inf
    again = Band.of(logged, 2000)
    assert again is not None and np.isnan([again.low[2], again.mean[2]]).all()
    assert again.high[1] == made.high[1]
    assert Band.of([logged[0], None], 2000) is None
    assert Band.of([logged[0], Curve(np.array([5]), np.array([1.0]))], 2000) is None
    # thinned, it holds all that is in its segments
    values = np.random.default_rng(6).normal(3, 1, (3, 9000))
    values[1, 4321] = 90.0
    made = Band.of([Curve(np.arange(9000), row) for row in values], 100)
    assert made is not None and made.high.max() == 90
    cut = values.reshape(3, 100, 90)
    np.testing.assert_allclose(made.low, cut.min(axis=(0, 2)))
    np.testing.assert_allclose(made.members, cut.mean(axis=2))


def test_only_runs_that_differ_in_seeds_alone_are_joined(tmp_path):
    planted: dict[str, Json] = {
        "rope_seed0": {"model__init_seed": 0},
        "nope_lr": {"optimizer__lr": 0.1},
        "rope_seed1": {"model__init_seed": 1},
        "rope_data2": {"model__init_seed": 0, "data__data_seed": 9},
        "twin": {"training__steps": 7},
        "twin_again": {"training__steps": 7},
    }
    runs = [record(tmp_path / name, LEARNS, **identity) for name, identity in planted.items()]
    assert [(entry.label, entry.runs) for entry in group_seeds(runs)] == [
        ("rope_seed0 and 2 more", (0, 2, 3)),
        ("nope_lr", (1,)),
        ("twin", (4,)),  # the same seeds twice are no sample
        ("twin_again", (5,)),
    ]


# ---- validation and evaluations


def test_validation_is_drawn_whole_and_by_source(tmp_path):
    events = [
        at(0, "start"),
        validation(10, 1.5, web=1.25, books=2.0),
        step(0.2, 20, 8.0),
        validation(20, 1.0, web=0.75, books=1.5),  # repeated
        at(0.3, "resume", from_step=10),
        step(0.4, 20, 8.0),
        validation(20, "NaN", web=0.5, books=1.5),
    ]
    content = page_content([record(tmp_path / "run", events)])
    (chart,) = content["sections"][1]["charts"]
    assert [(v["name"], v["traces"][0]["y"]) for v in chart["variants"]] == [
        ("all sources", [1.5, None]),
        ("source web", [1.25, 0.5]),
        ("source books", [2, 1.5]),
    ]
    # a curve is of one text, which was changed at step 20, as run.allow_changes lets it
    events[1] |= {"held_out_fingerprint": "old"}
    events[-1] |= {"held_out_fingerprint": "new"}
    run = record(tmp_path / "changed", events, held_out_fingerprint="new")
    assert run.validation[""].steps.tolist() == [20] and len(run.notices) == 1


def test_evaluations_are_whole_results_and_the_rest_is_named(tmp_path):
    run = plant_run(tmp_path / "run", LEARNS)
    score = {"hellaswag": {"acc": Score(0.25, 0.01), "acc_norm": Score(0.5)}}
    plant_results(run, 10, "tasks", score, limit=5)
    plant_results(run, 20, "tasks", {"hellaswag": {"acc": Score(0.4, 0.02)}})
    plant_results(run, 20, "tasks", {"hellaswag": {"acc": Score(0.9, 0.02)}}, limit=5)
    plant_results(run, 20, "other", score, train_fingerprint="0" * 64)
    damaged = plant_results(run, 20, "torn", score)
    damaged.write_text(damaged.read_text()[:-30])
    content = page_content([RunRecord(run.path)])
    (chart,) = content["sections"][1]["charts"]
    ((variant),) = chart["variants"]  # a trial is no result
    (trace,) = variant["traces"]
    assert (chart["title"], variant["name"]) == ("tasks", "hellaswag, acc")
    assert (trace["x"], trace["y"], trace["error_y"]["array"]) == ([20], [0.4], [0.02])
    runs = []
    for seed in (0, 1):
        run = plant_run(tmp_path / f"seed{seed}", LEARNS, model__init_seed=seed)
        for where in (10, 20):
            limit = 5 if (seed, where) == (1, 10) else None
            values = {"t": {"acc": Score(seed + where / 100)}}
            plant_results(run, where, "tasks", values, limit=limit)
        runs.append(RunRecord(run.path))
    made = drawn(page_content(runs), "eval_0", "band")
    assert (made["x"], made["meta"]["low"]) == ([20], [0.2]), "a trial is no part of a mean"
    other, torn = (note for note in content["notes"] if "left out" in note)
    assert "evals/step-20/other" in other and "evals/step-20/torn" in torn


# ---- the command


def run_command(*arguments: object) -> object:
    with pytest.raises(SystemExit) as left:
        main(["plot", *map(str, arguments)])
    return left.value.code


def test_a_sweep_means_all_of_its_runs_and_bad_input_is_one_message(tmp_path, capsys):
    for name in ("lr10", "lr2"):
        plant_run(tmp_path / "sweep" / name, LEARNS)
    assert run_command(tmp_path / "sweep", "--out", tmp_path / "new" / "page.html") == 0
    assert "page.html (2 runs, " in capsys.readouterr().out
    run, no_log = (plant_run(tmp_path / name, LEARNS) for name in ("run", "no_log"))
    no_log.log_file.unlink()
    out = tmp_path / "page.html"
    for given, *arguments in (
        (run.log_file, run.path, "--out", run.log_file),
        (run.log_file, run.path, "--out", run.log_file / "page.html"),
        (run.path, run.path, run.path, "--out", out),
        (tmp_path / "nothing", tmp_path / "nothing", "--out", out),
        (no_log.path, no_log.path, "--out", out),
    ):
        assert run_command(*arguments) == 2
        assert str(given) in capsys.readouterr().err
    assert not out.exists() and run.log_file.read_text().startswith("{")
    without_tokens = {name: value for name, value in LEARNS[1].items() if name != "tokens"}
    damaged = record(tmp_path / "damaged", [LEARNS[0], without_tokens])
    with refused("file.unreadable", path=damaged.folder.log_file):
        page_content([damaged])


# ---- the page


def learning(seed: int, steps: int, reason: str = "loss is not finite") -> list[Json]:
    """A line every 10 steps, a restart at 400, a gap in the loss at 200 where a step is skipped."""
    rng = random.Random(seed)
    events = [at(0, "start", world_size=8)]
    for number in range(10, steps + 1, 10):
        if number == 410:
            events.append(at(9.0, "resume", world_size=4, from_step=400))
        hours = number / 100 + (5 if number > 400 else 0)
        if number == 200:
            events.append(at(hours, "skip", step=200, reason=reason, loss="NaN", grad_norm=3.5))
        loss = "NaN" if number == 200 else 4 + 5 / number + rng.random() / 10
        speed = 400_000.0 if number <= 400 else 200_000.0
        more = {"grad_norm": 1 + rng.random(), "tokens_per_second": speed, "mfu": 0.5, "lr": 1e-3}
        events.append(step(hours, number, loss, **more))
        if number % 200 == 0:
            events.append(validation(number, 1 + 1 / number, web=1.0, books=2.0))
    return events


def losses_of(seed: int) -> list[float]:
    return [float(e["loss"]) for e in learning(seed, 1000) if e["event"] == "step"]


NAMES = (*(f"nope_canon_abcd_1b3_seed{seed}" for seed in range(3)), EVIL)


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three seeds, one still running, and a run with an evil name."""
    folder = tmp_path_factory.mktemp("plot")
    paths = []
    for k, name in enumerate(NAMES):
        identity: Json = {"model__init_seed": k} if k < 3 else {"model__position": "rope"}
        events = learning(k, 1000, EVIL) if k == 3 else learning(k, 800 if k == 2 else 1000)
        run = plant_run(folder / name, events, **identity)
        scores = {"arc": {"acc": Score(0.3 + k / 50, 0.01)}, "lambada": {"acc": Score(0.5)}}
        plant_results(run, 400, "discriminative", scores, limit=100 if k == 3 else None)
        plant_results(run, 800, "discriminative", scores)
        paths.append(run.path)
    assert run_command(*paths, "--out", folder / "curves.html") == 0
    return folder / "curves.html"


def choose(browser: Browser, *chosen: tuple[str, Any]) -> None:
    """Set controls of the page as a user would, and wait for the drawing."""
    browser.run(
        """for (const [name, value] of arguments[0]) {
          const control = document.querySelector(name);
          if (control.type === "checkbox") control.checked = value;
          else control.value = value;
          for (const event of ["input", "change"]) control.dispatchEvent(new Event(event));
        }""",
        [list(pair) for pair in chosen],
    )
    browser.wait_for("return document.documentElement.dataset.drawn")


def traces(browser: Browser, chart: str) -> list[Json]:
    """What is drawn in a chart."""
    return browser.run(
        """return document.getElementById(`curve-${arguments[0]}`).data.map((trace) => ({
        x: trace.x, y: trace.y, role: trace.meta.role}));""",
        chart,
    )


def lines(browser: Browser, chart: str) -> list[Json]:
    """The lines alone, without areas and marks."""
    return [t for t in traces(browser, chart) if t["role"] in ("raw", "smooth", "mean")]


@pytest.mark.parametrize("size", [DESKTOP, PHONE])
def test_the_page_opens_without_errors_or_requests_and_fits(browser, page, size):
    browser.open(page, *size, dark=True)
    browser.assert_fits(page, size[0])
    charts = browser.run("return [...document.querySelectorAll('.plot')].map((p) => p.id)")
    assert [chart.removeprefix("curve-") for chart in charts] == [
        *("loss", "grad_norm", "tokens_per_second", "mfu", "lr", "validation", "eval_0")
    ]
    choose(browser, ("#over", "steps"), ("#seeds", "lines"))
    text = browser.hover("curve-loss", 200)
    for words in ("NaN, step 200", "skipped step 200", "loss NaN, norm 3.5"):
        assert words in text
    assert size == PHONE or EVIL in text  # as text; a phone's names are cut
    text = browser.hover("curve-tokens_per_second", 400)
    assert "restart from step 400" in text and "on 4 devices, 2026-11-01 17:00" in text
    choose(browser, ("[data-variant=eval_0]", "1"), ("[data-variant=validation]", "2"))
    assert [t["y"] for t in lines(browser, "eval_0")] == [*[[0.5, 0.5]] * 3, [0.5]]
    assert lines(browser, "validation")[0]["y"] == [2] * 5


def test_seeds_are_a_band_and_can_be_single_lines(browser, page):
    browser.open(page, *DESKTOP)
    choose(browser, ("#smoothing", 0), ("#over", "steps"))
    legend = "return [...document.querySelectorAll('#legend button')].map((b) => b.textContent)"
    assert browser.run(legend) == [f"{NAMES[0]} and 2 more (n = 3)", EVIL]
    table = np.array([losses_of(k)[:80] for k in range(3)])
    area = next(t for t in traces(browser, "loss") if t["role"] == "band")
    drawn = {x for x in area["x"] if x is not None}
    assert drawn == set(range(10, 810, 10)) - {200}  # it is not finite
    assert max(y for y in area["y"] if y is not None) == pytest.approx(np.nanmax(table), rel=1e-6)
    assert min(y for y in area["y"] if y is not None) == pytest.approx(np.nanmin(table), rel=1e-6)
    mean, _other = lines(browser, "loss")
    assert mean["y"][0] == pytest.approx(table[:, 0].mean(), rel=1e-6)
    choose(browser, ("#seeds", "lines"))
    assert browser.run(legend) == list(NAMES)
    assert not any(t["role"] == "band" for t in traces(browser, "loss"))
    browser.run("document.querySelectorAll('#legend button')[3].click()")
    browser.wait_for("return document.documentElement.dataset.drawn")
    assert len(lines(browser, "loss")) == 3


def test_smoothing_is_the_average_that_the_page_describes(browser, page):
    browser.open(page, *DESKTOP)
    choose(browser, ("#seeds", "lines"), ("#smoothing", 4))
    losses = losses_of(0)
    raw, smooth = lines(browser, "loss")[:2]
    expected = []
    for k, value in enumerate(losses):
        if math.isnan(value):
            continue
        # each finite value weighs by its age and by the steps since the finite one before it
        past = [j for j in range(k + 1) if not math.isnan(losses[j])]
        widths = [10 if j == 0 or not math.isnan(losses[j - 1]) else 20 for j in past]
        weights = [
            (1 - math.exp(-width / 30)) * math.exp(-10 * (k - j) / 30)
            for j, width in zip(past, widths, strict=True)
        ]
        expected.append(float(np.average([losses[j] for j in past], weights=weights)))
    for line, wanted in ((smooth, expected), (raw, losses)):
        shown = [math.nan if y is None else y for y in line["y"]]
        assert shown == pytest.approx(wanted, rel=1e-6, nan_ok=True)
    assert len(lines(browser, "lr")) == 4  # the learning rate is no noise


def test_what_the_curves_are_drawn_over_can_be_chosen(browser, page):
    browser.open(page, *DESKTOP)
    choose(browser, ("#smoothing", 0), ("#seeds", "lines"))
    assert lines(browser, "lr")[0]["x"][:2] == [10 * TOKENS_A_STEP, 20 * TOKENS_A_STEP]
    choose(browser, ("#over", "training_hours"))
    hours = dict(zip(range(10, 1010, 10), lines(browser, "lr")[0]["x"], strict=True))
    # closed: the launch at 9 h continues from 4 h, and its first line comes 10 steps later
    assert [hours[k] for k in (10, 400, 410, 420)] == pytest.approx([0.1, 4.0, 4.1, 4.2], abs=1e-3)
    choose(browser, ("#over", "wall_hours"))
    shown = lines(browser, "lr")[0]["x"]
    assert [shown[39], shown[-1]] == pytest.approx([4.0, 15], abs=1e-3)  # the gap is shown
    restart = next(t for t in traces(browser, "mfu") if t["role"] == "restart")
    assert restart["x"][0] == pytest.approx(9.0)
    choose(browser, ("#from", "0.5"))
    starts = [next(x for x in t["x"] if x is not None) for t in lines(browser, "lr")]
    assert min(starts) == pytest.approx(10.0, abs=1e-3)
    choose(browser, ("[data-log=loss]", True), ("#log-x", True))
    types = "const l = document.getElementById('curve-loss')._fullLayout; return "
    assert browser.run(types + "[l.xaxis.type, l.yaxis.type]") == ["log", "log"]
