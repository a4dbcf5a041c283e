"""The pages of `eval report` and `run plot` in headless Chromium."""

import math
import random
from typing import Any

import numpy as np
import pytest

from canon_pretrain.run.results import Score
from tests.browser import DESKTOP, EVIL, PHONE
from tests.report import test_plot
from tests.report_pages import content, report
from tests.report_runs import (
    TOKENS_A_STEP,
    launch,
    plant_answers,
    plant_results,
    plant_run,
    records,
    right_or_wrong,
    run_command,
    step,
)

pytestmark = pytest.mark.system

LONG = "nope_canon_abcd_1b3_fineweb_edu_seed_0_lr_4e-3"
TASKS = ("piqa", "boolq", "task_2", "task_10", EVIL)


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """Three architectures at two steps, with a restart, a NaN norm and a large difference."""
    folder, rng, paths = tmp_path_factory.mktemp("report"), np.random.default_rng(3), []
    for k, (name, position) in enumerate(((LONG, "rope"), (EVIL, "nope"), ("short", "alibi"))):
        loss = [8 + k / 4 - math.log(n) / 2 for n in range(1, 502)]
        events = [launch("start"), *(step(n, loss[n], 1 / n) for n in range(1, 251, 3))]
        events += [launch("resume", 4, from_step=250)]
        events += [step(n, loss[n], 1 / n, 17_000.0) for n in range(251, 501, 3)]
        events[24]["grad_norm"] = "NaN"
        sample = {"prompt": EVIL, "text": f" {EVIL}\n{'x' * 900}", "tokens": 9}
        events += [{"event": "samples", "step": at, "samples": [sample]} for at in (250, 500)]
        run = plant_run(folder / name, events, model__position=position, done=True)
        for at in (250, 500):
            right = [right_or_wrong(300, 0.9 if (x, k) == ("piqa", 1) else 0.4, rng) for x in TASKS]
            items = {task: records({"acc": x}) for task, x in zip(TASKS, right, strict=True)}
            nats = [rng.normal(mean, 0.1, 300).tolist() for mean in (-2.0, -7.5, -4.0)]
            texts = {f"text_{n}": records({"word_perplexity": x}) for n, x in enumerate(nats)}
            plant_answers(run, at, "discriminative", items)
            plant_answers(run, at, "texts", texts)
            names = [f"{kind}-{length}" for kind in ("1-hop", "2-hop") for length in (0, 256, 1024)]
            lengths = {name: {"exact": Score(0.5 + k / 10), "rank": Score(0.9)} for name in names}
            plant_results(run, at, "birth-year", lengths, items=1000)
        paths.append(run.path)
    return report(paths, folder / "out")


def draw_all(browser):
    """Draw every plot, as for printing."""
    browser.run("dispatchEvent(new Event('beforeprint'))")
    browser.wait_for(
        "return [...document.querySelectorAll('.plot')].every((p) => p.querySelector('.main-svg'))"
    )


def column(browser, table, at):
    """Return the texts of the visible cells of a column."""
    return browser.run(
        """return [...document.getElementById(arguments[0]).tBodies[0].rows]
        .filter((row) => row.getClientRects().length > 0)
        .map((row) => row.cells[arguments[1]].textContent.trim())""",
        table,
        at,
    )


def test_plots_draw_hover_and_hide(browser, page):
    browser.open(page, *DESKTOP)
    assert browser.run("return document.querySelectorAll('.plot .main-svg').length") == 0
    folded = "return document.querySelectorAll('details:not([open]) .plot').length"
    assert browser.run(folded) > 0  # printing opens them
    draw_all(browser)
    assert browser.run(folded) == 0
    plots = browser.run(
        """return [...document.querySelectorAll('.plot')].map((plot, k) => {
        plot.dataset.place = k; return plot.ariaLabel; })"""
    )
    found = [f"[data-place='{k}']" for k in range(len(plots))]
    length, piqa = (found[plots.index(name)] for name in ("1-hop exact", "piqa acc"))
    loss, norm = (found[plots.index(f"{name} ")] for name in ("Loss", "Gradient norm"))
    text = browser.hover(loss, 100 * TOKENS_A_STEP)
    assert EVIL in text  # as text
    for top in (8, 8.25, 8.5):
        assert f"{top - math.log(101) / 2:.4f}, step 100" in text
    point = content(page)["score_curves"][0]["lines"][1]["points"][1]
    text = browser.hover(piqa, 500 * TOKENS_A_STEP)
    assert f"{point['value']:.4f} ± {point['stderr']:.4f}step 500, n = 300" in text
    assert "nope: 0.6000" in browser.hover(length, 1)
    assert set(np.round(content(page)["late_loss"][1]["lines"][1]["values"], 9)) == {0.25}

    visible = "return document.querySelector(arguments[0]).data.map((trace) => trace.visible)"
    browser.run("document.querySelector('[data-of=\"entry 1\"]').click()")
    assert browser.run(visible, length) == [True, False, True]
    scale = "return document.querySelector(arguments[0])._fullLayout.yaxis.type"
    assert browser.run(scale, norm) == "log"


def test_tables_sort_filter_and_show_more(browser, page):
    browser.open(page, *DESKTOP)
    click = """const head = document.getElementById(arguments[0]).tHead.rows[0].cells[arguments[1]];
        head.querySelector("button").click(); return head.ariaSort"""
    original = column(browser, "chosen", 1)
    given = [float(cell.split()[0].replace(",", "")) for cell in original]
    assert max(given) > 1000 and min(given) < 1  # as strings, 1,809 is before 7.4
    browser.run(click, "chosen", 1)
    cells = column(browser, "chosen", 1)
    assert [float(cell.split()[0].replace(",", "")) for cell in cells] == sorted(given)

    pairs = content(page)["comparison"]["pairs"]
    set_to = """const bar = document.getElementById("pairs").closest(".table");
        const control = bar.querySelector(arguments[0]);
        control.value = arguments[1]; control.dispatchEvent(new Event("input", {bubbles: true}));
        return bar.querySelector("output").textContent"""
    for name in ("suite", "verdict", "architecture"):
        value = pairs[0][name]
        count = sum(pair[name] == value for pair in pairs)
        found = browser.run(set_to, f"[name={name}]", value)
        assert found == f"{count} of {len(pairs)} rows"
        assert len(column(browser, "pairs", 0)) == count
        browser.run(set_to, f"[name={name}]", "")
    assert browser.run(set_to, "[type=search]", "BOOL nope") == f"1 of {len(pairs)} rows"
    shown = "return document.getElementById('pairs').innerText.includes('McNemar')"
    for is_shown in (False, True):
        assert browser.run(shown) == is_shown
        browser.run("document.querySelector('input.more').click()")


def test_pages_fit_their_windows(browser, page, tmp_path):
    bare = report([plant_run(tmp_path / "bare", [launch("start")]).path], None)  # empty plots
    for each, size in ((page, DESKTOP), (page, PHONE), (bare, PHONE)):
        browser.open(each, *size, dark=size == DESKTOP)
        draw_all(browser)
        browser.assert_fits(each, size[0])


# ---- run plot

NAMES = (*(f"nope_canon_abcd_1b3_seed{seed}" for seed in range(3)), EVIL)


def learning(seed, steps, reason="loss is not finite"):
    """Return an event every 10 steps, a restart at 400, and a skipped step without loss at 200."""
    rng = random.Random(seed)
    events = [test_plot.at(0, "start", world_size=8)]
    for number in range(10, steps + 1, 10):
        if number == 410:
            events.append(test_plot.at(9.0, "resume", world_size=4, from_step=400))
        hours = number / 100 + (5 if number > 400 else 0)
        if number == 200:
            events.append(
                test_plot.at(hours, "skip", step=200, reason=reason, loss="NaN", grad_norm=3.5)
            )
        loss = "NaN" if number == 200 else 4 + 5 / number + rng.random() / 10
        speed = 400_000.0 if number <= 400 else 200_000.0
        more = {"grad_norm": 1 + rng.random(), "tokens_per_second": speed, "mfu": 0.5, "lr": 1e-3}
        events.append(test_plot.step(hours, number, loss, **more))
        if number % 200 == 0:
            events.append(test_plot.validation(number, 1 + 1 / number, web=1.0, books=2.0))
    return events


def losses_of(seed):
    return [float(e["loss"]) for e in learning(seed, 1000) if e["event"] == "step"]


@pytest.fixture(scope="module")
def plot_page(tmp_path_factory):
    """Three seeds, one of which still trains, and a run with an evil name."""
    folder = tmp_path_factory.mktemp("plot")
    paths = []
    for k, name in enumerate(NAMES):
        identity: dict[str, Any] = {"model__init_seed": k} if k < 3 else {"model__position": "rope"}
        events = learning(k, 1000, EVIL) if k == 3 else learning(k, 800 if k == 2 else 1000)
        run = plant_run(folder / name, events, **identity)
        scores = {"arc": {"acc": Score(0.3 + k / 50, 0.01)}, "lambada": {"acc": Score(0.5)}}
        plant_results(run, 400, "discriminative", scores, limit=100 if k == 3 else None)
        plant_results(run, 800, "discriminative", scores)
        paths.append(run.path)
    assert run_command("plot", *paths, "--out", folder / "curves.html") == 0
    return folder / "curves.html"


def choose(browser, *chosen):
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


def traces(browser, chart, *roles):
    """Return the drawn traces of a chart with one of `roles`; without, its lines."""
    drawn: list[dict[str, Any]] = browser.run(
        """return document.getElementById(`curve-${arguments[0]}`).data.map((trace) => ({
        x: trace.x, y: trace.y, role: trace.meta.role}));""",
        chart,
    )
    return [trace for trace in drawn if trace["role"] in (roles or ("raw", "smooth", "mean"))]


@pytest.mark.parametrize("size", [DESKTOP, PHONE])
def test_the_page_opens_without_errors_and_fits(browser, plot_page, size):
    browser.open(plot_page, *size, dark=True)
    browser.assert_fits(plot_page, size[0])
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


def test_seeds_are_a_band_or_single_lines(browser, plot_page):
    browser.open(plot_page, *DESKTOP)
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


def test_smoothing_is_a_bias_corrected_average(browser, plot_page):
    browser.open(plot_page, *DESKTOP)
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


def test_the_x_axis_can_be_chosen(browser, plot_page):
    browser.open(plot_page, *DESKTOP)
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


def test_a_page_that_was_copied_alone_says_what_it_needs(browser, page, tmp_path):
    shown = "return document.getElementById('without-plotly').offsetHeight > 0"
    browser.open(page, *DESKTOP)
    assert not browser.run(shown)

    alone = tmp_path / "index.html"
    alone.write_bytes(page.read_bytes())
    browser.open(alone, *DESKTOP)
    [library] = page.parent.glob("plotly-*.min.js")
    assert browser.run(shown)
    text = "return document.getElementById('without-plotly').textContent"
    assert library.name in browser.run(text)
    rows = "return document.querySelectorAll('tbody tr').length"
    assert browser.run(rows) > 0
