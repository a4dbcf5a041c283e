"""`run plot`: curves against explicit loops, bands against numpy, and the page's errors."""

import json
import math
from datetime import UTC, datetime, timedelta

import numpy as np
import pytest

from canon_pretrain.report.curves import Band, downsample, group_seeds, segments
from canon_pretrain.report.export import row_from_event
from canon_pretrain.report.plot import page_content
from canon_pretrain.report.record import Curve, RunRecord
from canon_pretrain.run.results import Score
from tests.report_runs import TOKENS_A_STEP, plant_results, plant_run, run_command
from tests.support import error_codes, refused

START = datetime(2026, 11, 1, 8, tzinfo=UTC)


def at(hours, event, **fields):
    return {"event": event, "time": (START + timedelta(hours=hours)).isoformat(), **fields}


def step(hours, number, loss, **fields):
    return at(hours, "step", step=number, tokens=TOKENS_A_STEP * number, loss=loss, **fields)


def validation(number, bits, **sources):
    parts = {name: {"bits_per_byte": value} for name, value in sources.items()}
    return at(number / 100, "validation", step=number, bits_per_byte=bits, sources=parts)


def record(path, events, **identity):
    return RunRecord(plant_run(path, events, **identity).path)


def drawn(content, chart, role):
    """Return the first trace of that role in a chart."""
    charts = {each["id"]: each for part in content["sections"] for each in part["charts"]}
    traces = charts[chart]["variants"][0]["traces"]
    return next(trace for trace in traces if trace["meta"]["role"] == role)


LEARNS = [at(0, "start"), step(0.1, 10, 9.0), step(0.2, 20, 8.0)]


def test_a_run_with_restarts_is_one_curve(tmp_path):
    run = record(
        tmp_path / "run",
        [
            at(0.0, "start", world_size=8),
            step(0.2, 10, 9.0),
            step(0.3, 20, 8.0),
            step(0.4, 30, 7.5),  # lost: the checkpoint is at step 20
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
    assert loss.steps.tolist() == [10, 20, 30, 40, 50, 60]
    np.testing.assert_array_equal(loss.values, [9.0, 8.0, 7.0, math.nan, math.inf, 5.0])
    assert run.clock.tokens.tolist() == [TOKENS_A_STEP * k for k in range(0, 70, 10)]
    # without gaps and lost work (0.3 to 0.4 h)
    assert run.clock.training_hours == pytest.approx([0, 0.2, 0.3, 0.5, 0.7, 0.8, 0.9])
    assert run.clock.wall_hours == pytest.approx([0, 0.2, 0.3, 2.2, 2.4, 5.1, 5.2])
    assert [skip["step"] for skip in run.skips] == [35]
    content = page_content([run])
    raw, gaps, restarts = (drawn(content, "loss", role) for role in ("raw", "gap", "restart"))
    assert raw["x"] == [10, 20, 30, 40, 50, 60] and raw["y"] == [9, 8, 7, None, None, 5]
    assert gaps["x"] == [40, 50] and "NaN" in gaps["text"][0] and "Infinity" in gaps["text"][1]
    assert drawn(content, "loss", "skip")["x"] == [35]
    assert restarts["x"][::3] == [20, 40]
    assert restarts["meta"]["at"]["training_hours"][::3] == pytest.approx([0.3, 0.7])
    assert restarts["meta"]["at"]["wall_hours"][::3] == pytest.approx([2.0, 5.0])


def test_downsampling_keeps_extremes_gaps_and_ends():
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


def test_a_band_is_minimum_and_maximum_at_common_steps():
    values = np.random.default_rng(5).normal(3, 1, (3, 40))
    steps = np.arange(0, 400, 10)
    # the second still trains, the third logs every second step
    slices = (slice(None), slice(30), slice(None, None, 2))
    logged = [Curve(steps[s], own[s]) for s, own in zip(slices, values, strict=True)]
    made, common = Band.of(logged, 2000), values[:, :30:2]
    assert made.steps.tolist() == list(range(0, 300, 20))
    np.testing.assert_allclose(made.low, common.min(axis=0))
    np.testing.assert_allclose(made.high, common.max(axis=0))
    np.testing.assert_allclose(made.mean, common.mean(axis=0))
    np.testing.assert_allclose(made.members, common)
    # a value that is not finite in one run is a gap in the band
    logged[0].values[4] = math.inf
    again = Band.of(logged, 2000)
    assert np.isnan([again.low[2], again.mean[2]]).all() and again.high[1] == made.high[1]
    for other in (None, Curve(np.array([5]), np.array([1.0]))):
        assert Band.of([logged[0], other], 2000) is None
    # downsampled, it covers whole segments
    values = np.random.default_rng(6).normal(3, 1, (3, 9000))
    made = Band.of([Curve(np.arange(9000), x) for x in values], 100)
    cut = values.reshape(3, 100, 90)
    np.testing.assert_allclose(made.high, cut.max(axis=(0, 2)))
    np.testing.assert_allclose(made.low, cut.min(axis=(0, 2)))
    np.testing.assert_allclose(made.members, cut.mean(axis=2))


def test_only_runs_that_differ_in_seeds_are_grouped(tmp_path):
    planted = [{"model__init_seed": 0}, {"optimizer__lr": 0.1}, {"model__init_seed": 1}]
    planted += [{"model__init_seed": 0, "data__data_seed": 9}]
    planted += [{"training__steps": 7}] * 2  # the same seeds twice are not a sample
    runs = [record(tmp_path / "abcdef"[k], LEARNS, **x) for k, x in enumerate(planted)]
    entries = {entry.runs: entry.label for entry in group_seeds(runs)}
    assert list(entries) == [(0, 2, 3), (1,), (4,), (5,)] and entries[1,] == "b"


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
    names = [variant["name"].removeprefix("source ") for variant in chart["variants"]]
    assert names[1:] == ["web", "books"]
    values = [variant["traces"][0]["y"] for variant in chart["variants"]]
    assert values == [[1.5, None], [1.25, 0.5], [2, 1.5]]
    # a curve is of one text, here changed at step 20
    events[1] |= {"held_out_fingerprint": "old"}
    events[-1] |= {"held_out_fingerprint": "new"}
    run = record(tmp_path / "changed", events, held_out_fingerprint="new")
    assert run.validation[""].steps.tolist() == [20] and len(run.notices) == 1


def test_scores_of_a_task_are_curves_in_all_views(tmp_path, capsys):
    runs = []
    for name, last in (("a", 1.0), ("b", 0.75)):
        scores = [{"exact": 0.5, "kl": "NaN"}, {"exact": last, "kl": 0.125}]
        events = [
            at(n / 100, "validation", step=n, loss=2.0, scores=each)
            for n, each in zip((10, 20), scores, strict=True)
        ]
        runs.append(record(tmp_path / name, [*LEARNS, *events]))
    content = page_content(runs)
    (chart,) = content["sections"][1]["charts"]
    values = {each["name"]: [trace["y"] for trace in each["traces"]] for each in chart["variants"]}
    assert values["loss"] == [[2, 2]] * 2 and values["exact"] == [[0.5, 1], [0.5, 0.75]]
    assert list(values) == ["loss", "exact", "kl"]
    row = row_from_event(runs[0].events[-1])
    assert row is not None and row.values == {
        "validation/loss": 2.0,
        "scores/exact": 1.0,
        "scores/kl": 0.125,
    }
    run_command("diff", tmp_path / "a", tmp_path / "b", "--json")
    found = json.loads(capsys.readouterr().out)["scores"]
    assert found["exact"]["first_unequal"] == 20 and found["kl"]["first_unequal"] is None


def test_only_full_results_are_drawn_and_others_are_named(tmp_path):
    run = plant_run(tmp_path / "run", LEARNS)
    score = {"hellaswag": {"acc": Score(0.25, 0.01), "acc_norm": Score(0.5)}}
    plant_results(run, 10, "tasks", score, limit=5)
    plant_results(run, 20, "tasks", {"hellaswag": {"acc": Score(0.4, 0.02)}})
    plant_results(run, 20, "tasks", {"hellaswag": {"acc": Score(0.9, 0.02)}}, limit=5)
    plant_results(run, 20, "other", score, train_fingerprint="0" * 64)
    damaged = plant_results(run, 20, "torn", score)
    damaged.write_text(damaged.read_text()[:-30])
    content = page_content([RunRecord(run.path)])
    trace = drawn(content, "eval_0", "raw")
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
    assert (made["x"], made["meta"]["low"]) == ([20], [0.2])
    other, torn = (note for note in content["notes"] if "left out" in note)
    assert "evals/step-20/other" in other and "evals/step-20/torn" in torn


def test_the_command_and_its_errors(tmp_path, capsys):
    for name in ("lr10", "lr2"):
        plant_run(tmp_path / "sweep" / name, LEARNS)
    assert run_command("plot", tmp_path / "sweep", "--out", tmp_path / "new" / "page.html") == 0
    assert "(2 runs, " in capsys.readouterr().out
    run, no_log = (plant_run(tmp_path / name, LEARNS) for name in ("run", "no_log"))
    no_log.log_file.unlink()
    out = tmp_path / "page.html"
    cases = [(run.path, run.log_file), (run.path, run.log_file / "page.html")]
    cases += [(run.path, run.path, out), (tmp_path / "nothing", out), (no_log.path, out)]
    for *paths, to in cases:
        assert run_command("plot", *paths, "--out", to) == 2
        codes = error_codes(capsys.readouterr().err)
        assert len(codes) == 1 and (codes == ["plot.out"]) == (to == run.log_file)
    assert not out.exists() and run.log_file.read_text().startswith("{")
    without_tokens = {name: value for name, value in LEARNS[1].items() if name != "tokens"}
    damaged = record(tmp_path / "damaged", [LEARNS[0], without_tokens])
    with refused("file.unreadable", path=damaged.folder.log_file):
        page_content([damaged])
