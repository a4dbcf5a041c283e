"""The page of `run plot` in headless Chromium."""

import math
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from canon_pretrain.run.results import Score
from tests.browser import DESKTOP, EVIL, PHONE, Browser
from tests.report.test_plot import Json, at, step, validation
from tests.report_runs import TOKENS_A_STEP, plant_results, plant_run, run_command

pytestmark = pytest.mark.system
NAMES = (*(f"nope_canon_abcd_1b3_seed{seed}" for seed in range(3)), EVIL)


def learning(seed: int, steps: int, reason: str = "loss is not finite") -> list[Json]:
    """Return an event every 10 steps, a restart at 400, and a skipped step without loss at 200."""
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


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three seeds, one of which still trains, and a run with an evil name."""
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
    assert run_command("plot", *paths, "--out", folder / "curves.html") == 0
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


def traces(browser: Browser, chart: str, *roles: str) -> list[Json]:
    """Return the drawn traces of a chart with one of `roles`; without, its lines."""
    drawn: list[Json] = browser.run(
        """return document.getElementById(`curve-${arguments[0]}`).data.map((trace) => ({
        x: trace.x, y: trace.y, role: trace.meta.role}));""",
        chart,
    )
    return [trace for trace in drawn if trace["role"] in (roles or ("raw", "smooth", "mean"))]


@pytest.mark.parametrize("size", [DESKTOP, PHONE])
def test_the_page_opens_without_errors_and_fits(browser, page, size):
    browser.open(page, *size, dark=True)
    browser.assert_fits(page, size[0])
    charts = browser.run("return [...document.querySelectorAll('.plot')].map((p) => p.id)")
    assert [chart.removeprefix("curve-") for chart in charts] == [
        *("loss", "grad_norm", "tokens_per_second", "mfu", "lr", "validation", "eval_0")
    ]
    choose(browser, ("#over", "steps"), ("#seeds", "lines"))
    text = browser.hover("curve-loss", 200)
    assert "NaN" in text and "200" in text and "3.5" in text
    assert size == PHONE or EVIL in text  # as text; a phone's names are cut
    assert "2026-11-01 17:00" in browser.hover("curve-tokens_per_second", 400)
    choose(browser, ("[data-variant=eval_0]", "1"), ("[data-variant=validation]", "2"))
    assert [t["y"] for t in traces(browser, "eval_0")] == [*[[0.5, 0.5]] * 3, [0.5]]
    assert traces(browser, "validation")[0]["y"] == [2] * 5


def test_seeds_are_a_band_or_single_lines(browser, page):
    browser.open(page, *DESKTOP)
    choose(browser, ("#smoothing", 0), ("#over", "steps"))
    legend = "return [...document.querySelectorAll('#legend button')].map((b) => b.textContent)"
    assert len(browser.run(legend)) == 2
    table = np.array([losses_of(k)[:80] for k in range(3)])
    (area,), (mean, _other) = traces(browser, "loss", "band"), traces(browser, "loss")
    assert {x for x in area["x"] if x is not None} == set(range(10, 810, 10)) - {200}
    ends = [f(y for y in area["y"] if y is not None) for f in (min, max)]
    assert ends == pytest.approx([np.nanmin(table), np.nanmax(table)], rel=1e-6)
    assert mean["y"][0] == pytest.approx(table[:, 0].mean(), rel=1e-6)
    choose(browser, ("#seeds", "lines"))
    assert browser.run(legend) == list(NAMES) and not traces(browser, "loss", "band")
    browser.run("document.querySelectorAll('#legend button')[3].click()")
    browser.wait_for("return document.documentElement.dataset.drawn")
    assert len(traces(browser, "loss")) == 3


def test_smoothing_is_a_bias_corrected_average(browser, page):
    browser.open(page, *DESKTOP)
    choose(browser, ("#seeds", "lines"), ("#smoothing", 4))
    losses, expected = losses_of(0), []
    finite = [k for k, value in enumerate(losses) if math.isfinite(value)]
    for k, last in enumerate(finite):
        past = np.array(finite[: k + 1])
        # each finite value is weighted by its age and by the steps since the previous finite one
        widths = 10 * np.diff(past, prepend=-1)
        weights = (1 - np.exp(-widths / 30)) * np.exp(-10 * (last - past) / 30)
        expected.append(float(np.average(np.array(losses)[past], weights=weights)))
    raw, smooth = traces(browser, "loss")[:2]
    for line, wanted in ((smooth, expected), (raw, losses)):
        shown = [math.nan if y is None else y for y in line["y"]]
        assert shown == pytest.approx(wanted, rel=1e-6, nan_ok=True)
    assert len(traces(browser, "lr")) == 4  # the learning rate is not smoothed


def test_the_x_axis_can_be_chosen(browser, page):
    browser.open(page, *DESKTOP)
    choose(browser, ("#smoothing", 0), ("#seeds", "lines"))
    assert traces(browser, "lr")[0]["x"][:2] == [10 * TOKENS_A_STEP, 20 * TOKENS_A_STEP]
    choose(browser, ("#over", "training_hours"))
    hours = dict(zip(range(10, 1010, 10), traces(browser, "lr")[0]["x"], strict=True))
    # the launch at 9 h continues from 4 h, and logs 10 steps later
    assert [hours[k] for k in (10, 400, 410, 420)] == pytest.approx([0.1, 4.0, 4.1, 4.2], abs=1e-3)
    choose(browser, ("#over", "wall_hours"))
    shown, restart = traces(browser, "lr")[0]["x"], traces(browser, "mfu", "restart")[0]["x"]
    assert [shown[39], shown[-1], restart[0]] == pytest.approx([4.0, 15, 9.0], abs=1e-3)
    choose(browser, ("#from", "0.5"))
    starts = [next(x for x in t["x"] if x is not None) for t in traces(browser, "lr")]
    assert min(starts) == pytest.approx(10.0, abs=1e-3)
    choose(browser, ("[data-log=loss]", True), ("#log-x", True))
    types = "const l = document.getElementById('curve-loss')._fullLayout; return "
    assert browser.run(types + "[l.xaxis.type, l.yaxis.type]") == ["log", "log"]
