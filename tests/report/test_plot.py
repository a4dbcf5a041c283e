"""`run plot`: curves against explicit loops, bands against numpy, and the page's errors."""

import itertools
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
    """An event at that many hours after START."""
    return {"event": event, "time": (START + timedelta(hours=hours)).isoformat(), **fields}


def step(hours, number, loss, **fields):
    """A `step` event."""
    return at(hours, "step", step=number, tokens=TOKENS_A_STEP * number, loss=loss, **fields)


def validation(number, bits, **sources):
    """A `validation` event with bits per byte, whole and by source."""
    parts = {name: {"bits_per_byte": value} for name, value in sources.items()}
    return at(number / 100, "validation", step=number, bits_per_byte=bits, sources=parts)


def record(path, events, **identity):
    """Plant a run and read it."""
    return RunRecord(plant_run(path, events, **identity).path)


def drawn(content, chart_id, role):
    """Return the first trace of that role in a chart."""
    charts = {chart["id"]: chart for section in content["sections"] for chart in section["charts"]}
    traces = charts[chart_id]["variants"][0]["traces"]
    return next(trace for trace in traces if trace["meta"]["role"] == role)


LEARNS = [at(0, "start"), step(0.1, 10, 9.0), step(0.2, 20, 8.0)]


@pytest.fixture
def restarted(tmp_path):
    """A run that was restarted twice, with skipped steps and losses that are not finite."""
    return record(
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


def test_a_run_with_restarts_is_one_curve(restarted):
    loss = restarted.curve("loss")
    assert loss.steps.tolist() == [10, 20, 30, 40, 50, 60]
    np.testing.assert_array_equal(loss.values, [9.0, 8.0, 7.0, math.nan, math.inf, 5.0])

    # without gaps and lost work (0.3 to 0.4 h)
    clock = restarted.clock
    assert clock.tokens.tolist() == [TOKENS_A_STEP * k for k in range(0, 70, 10)]
    assert clock.training_hours == pytest.approx([0, 0.2, 0.3, 0.5, 0.7, 0.8, 0.9])
    assert clock.wall_hours == pytest.approx([0, 0.2, 0.3, 2.2, 2.4, 5.1, 5.2])
    assert [skip["step"] for skip in restarted.skips] == [35]


def test_restarts_and_gaps_are_marked(restarted):
    content = page_content([restarted])

    raw = drawn(content, "loss", "raw")
    assert raw["x"] == [10, 20, 30, 40, 50, 60]
    assert raw["y"] == [9, 8, 7, None, None, 5]

    gaps = drawn(content, "loss", "gap")
    assert gaps["x"] == [40, 50]
    assert "NaN" in gaps["text"][0]
    assert "Infinity" in gaps["text"][1]
    assert drawn(content, "loss", "skip")["x"] == [35]

    restarts = drawn(content, "loss", "restart")
    hours = restarts["meta"]["at"]
    assert restarts["x"][::3] == [20, 40]
    assert hours["training_hours"][::3] == pytest.approx([0.3, 0.7])
    assert hours["wall_hours"][::3] == pytest.approx([2.0, 5.0])


def test_downsampling_keeps_extremes_gaps_and_ends():
    num_segments = 300
    values = np.random.default_rng(3).normal(3.0, 0.1, 20_000)
    values[[17, 10_000, 19_960]] = 50.0, -20.0, 80.0
    values[[100, 101, 5000]] = np.nan, np.inf, -np.inf

    bounds = segments(len(values), num_segments)
    assert (bounds[0], bounds[-1]) == (0, len(values))
    assert len(bounds) == num_segments + 1
    assert set(np.diff(bounds).tolist()) <= {66, 67}

    # by explicit loops: both ends, and the extremes and the first gap of each segment
    expected = {0, len(values) - 1}
    for begin, end in itertools.pairwise(bounds.tolist()):
        finite = [(values[i], i) for i in range(begin, end) if math.isfinite(values[i])]
        gaps = [i for i in range(begin, end) if not math.isfinite(values[i])]
        expected |= {min(finite)[1], max(finite)[1], *gaps[:1]}
    kept = downsample(values, bounds).tolist()
    assert kept == sorted(expected)
    assert {17, 10_000, 19_960, 100, 5000} <= set(kept)

    # as many values as segments are all kept
    few = values[:num_segments]
    assert downsample(few, segments(num_segments, num_segments)).tolist() == [*range(num_segments)]


def test_a_band_is_minimum_and_maximum_at_common_steps():
    values = np.random.default_rng(5).normal(3, 1, (3, 40))
    steps = np.arange(0, 400, 10)
    curves = [
        Curve(steps, values[0]),
        Curve(steps[:30], values[1, :30]),  # still trains
        Curve(steps[::2], values[2, ::2]),  # logs every second step
    ]

    band = Band.of(curves, 2000)

    common = values[:, :30:2]
    assert band.steps.tolist() == list(range(0, 300, 20))
    np.testing.assert_allclose(band.low, common.min(axis=0))
    np.testing.assert_allclose(band.high, common.max(axis=0))
    np.testing.assert_allclose(band.mean, common.mean(axis=0))
    np.testing.assert_allclose(band.members, common)

    # a value that is not finite in one run is a gap in the band
    curves[0].values[4] = math.inf
    with_gap = Band.of(curves, 2000)
    assert np.isnan(with_gap.low[2])
    assert np.isnan(with_gap.mean[2])
    assert with_gap.high[1] == band.high[1]

    for without_common_steps in (None, Curve(np.array([5]), np.array([1.0]))):
        assert Band.of([curves[0], without_common_steps], 2000) is None


def test_a_downsampled_band_covers_whole_segments():
    values = np.random.default_rng(6).normal(3, 1, (3, 9000))

    band = Band.of([Curve(np.arange(9000), run_values) for run_values in values], 100)

    by_segment = values.reshape(3, 100, 90)
    np.testing.assert_allclose(band.high, by_segment.max(axis=(0, 2)))
    np.testing.assert_allclose(band.low, by_segment.min(axis=(0, 2)))
    np.testing.assert_allclose(band.members, by_segment.mean(axis=2))


def test_only_runs_that_differ_in_seeds_are_grouped(tmp_path):
    identities = {
        "a": {"model__init_seed": 0},
        "b": {"optimizer__lr": 0.1},
        "c": {"model__init_seed": 1},
        "d": {"model__init_seed": 0, "data__data_seed": 9},
        # the same seeds twice are not a sample
        "e": {"training__steps": 7},
        "f": {"training__steps": 7},
    }
    runs = [record(tmp_path / name, LEARNS, **identity) for name, identity in identities.items()]

    entries = {entry.runs: entry.label for entry in group_seeds(runs)}

    assert list(entries) == [(0, 2, 3), (1,), (4,), (5,)]
    assert entries[1,] == "b"


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
    values = [variant["traces"][0]["y"] for variant in chart["variants"]]
    assert names[1:] == ["web", "books"]
    assert values == [[1.5, None], [1.25, 0.5], [2, 1.5]]

    # a curve is of one text, here changed at step 20
    events[1] |= {"held_out_fingerprint": "old"}
    events[-1] |= {"held_out_fingerprint": "new"}
    run = record(tmp_path / "changed", events, held_out_fingerprint="new")
    assert run.validation[""].steps.tolist() == [20]
    assert len(run.notices) == 1


@pytest.fixture
def task_runs(tmp_path):
    """Two runs of a synthetic task, which differ in the last exact score."""

    def plant(name, last_exact):
        first = {"exact": 0.5, "kl": "NaN"}
        last = {"exact": last_exact, "kl": 0.125}
        events = [
            *LEARNS,
            at(0.1, "validation", step=10, loss=2.0, scores=first),
            at(0.2, "validation", step=20, loss=2.0, scores=last),
        ]
        return record(tmp_path / name, events)

    return [plant("a", 1.0), plant("b", 0.75)]


def test_scores_of_a_task_are_drawn_and_exported(task_runs):
    content = page_content(task_runs)

    (chart,) = content["sections"][1]["charts"]
    values = {
        variant["name"]: [trace["y"] for trace in variant["traces"]]
        for variant in chart["variants"]
    }
    assert list(values) == ["loss", "exact", "kl"]
    assert values["loss"] == [[2, 2], [2, 2]]
    assert values["exact"] == [[0.5, 1], [0.5, 0.75]]

    row = row_from_event(task_runs[0].events[-1])
    assert row is not None
    assert row.values == {"validation/loss": 2.0, "scores/exact": 1.0, "scores/kl": 0.125}


def test_scores_of_a_task_are_compared(task_runs, tmp_path, capsys):
    run_command("diff", tmp_path / "a", tmp_path / "b", "--json")

    scores = json.loads(capsys.readouterr().out)["scores"]
    assert scores["exact"]["first_unequal"] == 20
    assert scores["kl"]["first_unequal"] is None


def test_only_full_results_are_drawn_and_others_are_named(tmp_path):
    run = plant_run(tmp_path / "run", LEARNS)
    scores = {"hellaswag": {"acc": Score(0.25, 0.01), "acc_norm": Score(0.5)}}
    plant_results(run, 10, "tasks", scores, limit=5)
    plant_results(run, 20, "tasks", {"hellaswag": {"acc": Score(0.4, 0.02)}})
    plant_results(run, 20, "tasks", {"hellaswag": {"acc": Score(0.9, 0.02)}}, limit=5)
    plant_results(run, 20, "other", scores, train_fingerprint="0" * 64)
    damaged = plant_results(run, 20, "torn", scores)
    damaged.write_text(damaged.read_text()[:-30])

    content = page_content([RunRecord(run.path)])

    trace = drawn(content, "eval_0", "raw")
    assert (trace["x"], trace["y"], trace["error_y"]["array"]) == ([20], [0.4], [0.02])
    other, torn = [note for note in content["notes"] if "left out" in note]
    assert "evals/step-20/other" in other
    assert "evals/step-20/torn" in torn


def test_a_band_of_scores_is_of_full_results(tmp_path):
    seed0 = plant_run(tmp_path / "seed0", LEARNS, model__init_seed=0)
    seed1 = plant_run(tmp_path / "seed1", LEARNS, model__init_seed=1)
    plant_results(seed0, 10, "tasks", {"t": {"acc": Score(0.1)}})
    plant_results(seed0, 20, "tasks", {"t": {"acc": Score(0.2)}})
    plant_results(seed1, 10, "tasks", {"t": {"acc": Score(1.1)}}, limit=5)
    plant_results(seed1, 20, "tasks", {"t": {"acc": Score(1.2)}})

    content = page_content([RunRecord(seed0.path), RunRecord(seed1.path)])

    band = drawn(content, "eval_0", "band")
    assert (band["x"], band["meta"]["low"]) == ([20], [0.2])


def test_the_command_draws_a_folder_of_runs(tmp_path, capsys):
    for name in ("lr10", "lr2"):
        plant_run(tmp_path / "sweep" / name, LEARNS)

    code = run_command("plot", tmp_path / "sweep", "--out", tmp_path / "new" / "page.html")

    assert code == 0
    assert "(2 runs, " in capsys.readouterr().out


def test_errors_of_the_command(tmp_path, capsys):
    run = plant_run(tmp_path / "run", LEARNS)
    no_log = plant_run(tmp_path / "no_log", LEARNS)
    no_log.log_file.unlink()
    out = tmp_path / "page.html"

    for runs, to in (
        ([run.path], run.log_file),
        ([run.path], run.log_file / "page.html"),
        ([run.path, run.path], out),
        ([tmp_path / "nothing"], out),
        ([no_log.path], out),
    ):
        assert run_command("plot", *runs, "--out", to) == 2
        (code,) = error_codes(capsys.readouterr().err)
        assert (code == "plot.out") == (to == run.log_file)

    assert not out.exists()
    assert run.log_file.read_text().startswith("{")


def test_a_step_without_tokens_is_refused(tmp_path):
    without_tokens = {name: value for name, value in LEARNS[1].items() if name != "tokens"}
    damaged = record(tmp_path / "damaged", [LEARNS[0], without_tokens])

    with refused("file.unreadable", path=damaged.folder.log_file):
        page_content([damaged])
