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


def plant_evaluations(run, k, at, rng):
    """Plant choices (piqa is easy for the second run), three texts and probes over length."""
    right = [right_or_wrong(300, 0.9 if (task, k) == ("piqa", 1) else 0.4, rng) for task in TASKS]
    choices = {task: records({"acc": acc}) for task, acc in zip(TASKS, right, strict=True)}
    plant_answers(run, at, "discriminative", choices)

    texts = {}
    for n, mean in enumerate((-2.0, -7.5, -4.0)):
        texts[f"text_{n}"] = records({"word_perplexity": rng.normal(mean, 0.1, 300).tolist()})
    plant_answers(run, at, "texts", texts)

    names = [f"{kind}-{length}" for kind in ("1-hop", "2-hop") for length in (0, 256, 1024)]
    probes = {name: {"exact": Score(0.5 + k / 10), "rank": Score(0.9)} for name in names}
    plant_results(run, at, "birth-year", probes, items=1000)


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """Three architectures at two steps, with a restart, a NaN norm and a large difference."""
    folder = tmp_path_factory.mktemp("report")
    rng = np.random.default_rng(3)
    sample = {"prompt": EVIL, "text": f" {EVIL}\n{'x' * 900}", "tokens": 9}
    paths = []
    for k, (name, position) in enumerate(((LONG, "rope"), (EVIL, "nope"), ("short", "alibi"))):
        loss = [8 + k / 4 - math.log(n) / 2 for n in range(1, 502)]
        events = [
            launch("start"),
            *(step(n, loss[n], 1 / n) for n in range(1, 251, 3)),
            launch("resume", 4, from_step=250),
            *(step(n, loss[n], 1 / n, 17_000.0) for n in range(251, 501, 3)),
            *({"event": "samples", "step": at, "samples": [sample]} for at in (250, 500)),
        ]
        events[24]["grad_norm"] = "NaN"
        run = plant_run(folder / name, events, model__position=position, done=True)
        for at in (250, 500):
            plant_evaluations(run, k, at, rng)
        paths.append(run.path)
    return report(paths, folder / "out")


def draw_all(browser):
    """Draw every plot, as for printing."""
    browser.run("dispatchEvent(new Event('beforeprint'))")
    browser.wait_for(
        "return [...document.querySelectorAll('.plot')].every((p) => p.querySelector('.main-svg'))"
    )


def label_plots(browser):
    """Give each plot a selector; return the selectors by the label of the plot."""
    labels = browser.run(
        """return [...document.querySelectorAll('.plot')].map((plot, k) => {
        plot.dataset.place = k; return plot.ariaLabel; })"""
    )
    return {label: f"[data-place='{k}']" for k, label in reversed([*enumerate(labels)])}


def column(browser, table, at):
    """Return the texts of the visible cells of a column."""
    return browser.run(
        """return [...document.getElementById(arguments[0]).tBodies[0].rows]
        .filter((row) => row.getClientRects().length > 0)
        .map((row) => row.cells[arguments[1]].textContent.trim())""",
        table,
        at,
    )


def test_plots_are_drawn_when_they_are_seen(browser, page):
    browser.open(page, *DESKTOP)
    folded = "return document.querySelectorAll('details:not([open]) .plot').length"
    assert browser.run("return document.querySelectorAll('.plot .main-svg').length") == 0
    assert browser.run(folded) > 0

    draw_all(browser)

    assert browser.run(folded) == 0  # printing opens them


def test_plots_hover_and_hide(browser, page):
    browser.open(page, *DESKTOP)
    draw_all(browser)
    plots = label_plots(browser)

    text = browser.hover(plots["Loss "], 100 * TOKENS_A_STEP)
    assert EVIL in text  # as text
    for loss_at_1 in (8, 8.25, 8.5):
        assert f"{loss_at_1 - math.log(101) / 2:.4f}, step 100" in text

    point = content(page)["score_curves"][0]["lines"][1]["points"][1]
    text = browser.hover(plots["piqa acc"], 500 * TOKENS_A_STEP)
    assert f"{point['value']:.4f} ± {point['stderr']:.4f}step 500, n = 300" in text
    assert "nope: 0.6000" in browser.hover(plots["1-hop exact"], 1)
    late_loss = content(page)["late_loss"][1]["lines"][1]["values"]
    assert set(np.round(late_loss, 9)) == {0.25}

    visible = "return document.querySelector(arguments[0]).data.map((trace) => trace.visible)"
    browser.run("document.querySelector('[data-of=\"entry 1\"]').click()")
    assert browser.run(visible, plots["1-hop exact"]) == [True, False, True]
    scale = "return document.querySelector(arguments[0])._fullLayout.yaxis.type"
    assert browser.run(scale, plots["Gradient norm "]) == "log"


def test_tables_are_sorted(browser, page):
    def numbers():
        cells = column(browser, "chosen", 1)
        return [float(cell.split()[0].replace(",", "")) for cell in cells]

    browser.open(page, *DESKTOP)
    original = numbers()
    assert max(original) > 1000  # as strings, 1,809 is before 7.4
    assert min(original) < 1

    browser.run(
        """const head = document.getElementById(arguments[0]).tHead.rows[0].cells[arguments[1]];
        head.querySelector("button").click(); return head.ariaSort""",
        "chosen",
        1,
    )

    assert numbers() == sorted(original)


def test_tables_filter_and_show_more(browser, page):
    browser.open(page, *DESKTOP)
    pairs = content(page)["comparison"]["pairs"]
    set_to = """const bar = document.getElementById("pairs").closest(".table");
        const control = bar.querySelector(arguments[0]);
        control.value = arguments[1]; control.dispatchEvent(new Event("input", {bubbles: true}));
        return bar.querySelector("output").textContent"""

    for name in ("suite", "verdict", "architecture"):
        value = pairs[0][name]
        count = sum(pair[name] == value for pair in pairs)
        shown = browser.run(set_to, f"[name={name}]", value)
        assert shown == f"{count} of {len(pairs)} rows"
        assert len(column(browser, "pairs", 0)) == count
        browser.run(set_to, f"[name={name}]", "")
    assert browser.run(set_to, "[type=search]", "BOOL nope") == f"1 of {len(pairs)} rows"

    has_mcnemar = "return document.getElementById('pairs').innerText.includes('McNemar')"
    assert not browser.run(has_mcnemar)
    browser.run("document.querySelector('input.more').click()")
    assert browser.run(has_mcnemar)
    browser.run("document.querySelector('input.more').click()")


@pytest.mark.parametrize("size", [DESKTOP, PHONE])
def test_pages_fit_their_windows(browser, page, size):
    browser.open(page, *size, dark=size == DESKTOP)
    draw_all(browser)

    browser.assert_fits(page, size[0])


# ---- run plot

NAMES = (*(f"nope_canon_abcd_1b3_seed{seed}" for seed in range(3)), EVIL)


def test_a_page_of_empty_plots_fits_a_phone(browser, tmp_path):
    bare = report([plant_run(tmp_path / "bare", [launch("start")]).path], None)
    browser.open(bare, *PHONE)
    draw_all(browser)

    browser.assert_fits(bare, PHONE[0])


def learning(seed, steps, reason="loss is not finite"):
    """Return an event every 10 steps, a restart at 400, and a skipped step without loss at 200."""
    rng = random.Random(seed)
    events = [test_plot.at(0, "start", world_size=8)]
    for number in range(10, steps + 1, 10):
        hours = number / 100 + (5 if number > 400 else 0)
        speed = 400_000.0 if number <= 400 else 200_000.0
        if number == 410:
            events.append(test_plot.at(9.0, "resume", world_size=4, from_step=400))
        if number == 200:
            events.append(
                test_plot.at(hours, "skip", step=200, reason=reason, loss="NaN", grad_norm=3.5)
            )

        loss = "NaN" if number == 200 else 4 + 5 / number + rng.random() / 10
        events.append(
            test_plot.step(
                hours,
                number,
                loss,
                grad_norm=1 + rng.random(),
                tokens_per_second=speed,
                mfu=0.5,
                lr=1e-3,
            )
        )
        if number % 200 == 0:
            events.append(test_plot.validation(number, 1 + 1 / number, web=1.0, books=2.0))
    return events


def losses_of(seed):
    """Return the losses of 1,000 steps of a run, one every 10 steps."""
    return [float(event["loss"]) for event in learning(seed, 1000) if event["event"] == "step"]


@pytest.fixture(scope="module")
def plot_page(tmp_path_factory):
    """Three seeds, one of which still trains, and a run with an evil name."""
    folder = tmp_path_factory.mktemp("plot")
    logs = [learning(0, 1000), learning(1, 1000), learning(2, 800), learning(3, 1000, EVIL)]
    paths = []
    for k, (name, events) in enumerate(zip(NAMES, logs, strict=True)):
        identity: dict[str, Any] = {"model__init_seed": k} if k < 3 else {"model__position": "rope"}
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
    wanted = roles or ("raw", "smooth", "mean")
    return [trace for trace in drawn if trace["role"] in wanted]


@pytest.mark.parametrize("size", [DESKTOP, PHONE])
def test_the_page_opens_without_errors_and_fits(browser, plot_page, size):
    browser.open(plot_page, *size, dark=True)

    browser.assert_fits(plot_page, size[0])
    charts = browser.run("return [...document.querySelectorAll('.plot')].map((p) => p.id)")
    assert [chart.removeprefix("curve-") for chart in charts] == [
        "loss",
        "grad_norm",
        "tokens_per_second",
        "mfu",
        "lr",
        "validation",
        "eval_0",
    ]


@pytest.mark.parametrize("size", [DESKTOP, PHONE])
def test_points_hover_and_variants_are_chosen(browser, plot_page, size):
    browser.open(plot_page, *size, dark=True)

    choose(browser, ("#over", "steps"), ("#seeds", "lines"))
    text = browser.hover("curve-loss", 200)
    for shown in ("NaN", "200", "3.5"):
        assert shown in text
    assert size == PHONE or EVIL in text  # as text; a phone's names are cut
    assert "2026-11-01 17:00" in browser.hover("curve-tokens_per_second", 400)

    choose(browser, ("[data-variant=eval_0]", "1"), ("[data-variant=validation]", "2"))
    scores = [trace["y"] for trace in traces(browser, "eval_0")]
    assert scores == [[0.5, 0.5], [0.5, 0.5], [0.5, 0.5], [0.5]]
    assert traces(browser, "validation")[0]["y"] == [2] * 5


def test_seeds_are_a_band_or_single_lines(browser, plot_page):
    legend = "return [...document.querySelectorAll('#legend button')].map((b) => b.textContent)"
    losses = np.array([losses_of(seed)[:80] for seed in range(3)])
    browser.open(plot_page, *DESKTOP)

    choose(browser, ("#smoothing", 0), ("#over", "steps"))
    assert len(browser.run(legend)) == 2
    (area,) = traces(browser, "loss", "band")
    steps = {x for x in area["x"] if x is not None}
    heights = [y for y in area["y"] if y is not None]
    assert steps == set(range(10, 810, 10)) - {200}
    assert min(heights) == pytest.approx(np.nanmin(losses), rel=1e-6)
    assert max(heights) == pytest.approx(np.nanmax(losses), rel=1e-6)
    mean, _ = traces(browser, "loss")
    assert mean["y"][0] == pytest.approx(losses[:, 0].mean(), rel=1e-6)

    choose(browser, ("#seeds", "lines"))
    assert browser.run(legend) == list(NAMES)
    assert not traces(browser, "loss", "band")

    browser.run("document.querySelectorAll('#legend button')[3].click()")
    browser.wait_for("return document.documentElement.dataset.drawn")
    assert len(traces(browser, "loss")) == 3


def bias_corrected_average(values, every, width):
    """Average each finite value with those before it, in explicit loops.

    Each is weighted by its age and by the steps since the previous finite one.
    """
    finite = [k for k, value in enumerate(values) if math.isfinite(value)]
    averages = []
    for number, last in enumerate(finite):
        past = np.array(finite[: number + 1])
        steps_since = every * np.diff(past, prepend=-1)
        ages = every * (last - past)
        weights = (1 - np.exp(-steps_since / width)) * np.exp(-ages / width)
        averages.append(float(np.average(np.array(values)[past], weights=weights)))
    return averages


def test_smoothing_is_a_bias_corrected_average(browser, plot_page):
    losses = losses_of(0)
    browser.open(plot_page, *DESKTOP)

    choose(browser, ("#seeds", "lines"), ("#smoothing", 4))

    raw, smooth = traces(browser, "loss")[:2]
    averages = bias_corrected_average(losses, every=10, width=30)
    for line, expected in ((smooth, averages), (raw, losses)):
        shown = [math.nan if y is None else y for y in line["y"]]
        assert shown == pytest.approx(expected, rel=1e-6, nan_ok=True)
    assert len(traces(browser, "lr")) == 4  # the learning rate is not smoothed


def test_the_x_axis_can_be_chosen(browser, plot_page):
    browser.open(plot_page, *DESKTOP)
    choose(browser, ("#smoothing", 0), ("#seeds", "lines"))
    assert traces(browser, "lr")[0]["x"][:2] == [10 * TOKENS_A_STEP, 20 * TOKENS_A_STEP]

    # the launch at 9 h continues from 4 h, and logs 10 steps later
    choose(browser, ("#over", "training_hours"))
    hours = dict(zip(range(10, 1010, 10), traces(browser, "lr")[0]["x"], strict=True))
    at_restart = [hours[number] for number in (10, 400, 410, 420)]
    assert at_restart == pytest.approx([0.1, 4.0, 4.1, 4.2], abs=1e-3)

    choose(browser, ("#over", "wall_hours"))
    wall_hours = traces(browser, "lr")[0]["x"]
    restart = traces(browser, "mfu", "restart")[0]["x"]
    shown = [wall_hours[39], wall_hours[-1], restart[0]]
    assert shown == pytest.approx([4.0, 15, 9.0], abs=1e-3)

    choose(browser, ("#from", "0.5"))
    starts = [next(x for x in line["x"] if x is not None) for line in traces(browser, "lr")]
    assert min(starts) == pytest.approx(10.0, abs=1e-3)

    choose(browser, ("[data-log=loss]", True), ("#log-x", True))
    types = "const l = document.getElementById('curve-loss')._fullLayout; return "
    assert browser.run(types + "[l.xaxis.type, l.yaxis.type]") == ["log", "log"]


def test_a_page_that_was_copied_alone_says_what_it_needs(browser, page, tmp_path):
    is_shown = "return document.getElementById('without-plotly').offsetHeight > 0"
    browser.open(page, *DESKTOP)
    assert not browser.run(is_shown)

    alone = tmp_path / "index.html"
    alone.write_bytes(page.read_bytes())
    browser.open(alone, *DESKTOP)

    assert browser.run(is_shown)
    (library,) = page.parent.glob("plotly-*.min.js")
    text = browser.run("return document.getElementById('without-plotly').textContent")
    assert library.name in text
    assert browser.run("return document.querySelectorAll('tbody tr').length") > 0
