"""The report in headless Chromium."""

import math
from pathlib import Path

import numpy as np
import pytest

from canon_pretrain.run.results import Score
from tests.browser import DESKTOP, EVIL, PHONE, Browser
from tests.report_pages import content, report
from tests.report_runs import (
    TOKENS_A_STEP,
    launch,
    plant_answers,
    plant_results,
    plant_run,
    records,
    right_or_wrong,
    step,
)

pytestmark = pytest.mark.system

LONG = "nope_canon_abcd_1b3_fineweb_edu_seed_0_lr_4e-3"
TASKS = ("piqa", "boolq", "task_2", "task_10", EVIL)


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three architectures at two steps, with a restart, a NaN norm and a large difference."""
    folder, rng, paths = tmp_path_factory.mktemp("report"), np.random.default_rng(3), []
    for k, (name, position) in enumerate(((LONG, "rope"), (EVIL, "nope"), ("short", "alibi"))):
        loss = [8 + k / 4 - math.log(n) / 2 for n in range(1, 502)]
        events = [launch("start"), *(step(n, loss[n], 1 / n) for n in range(1, 251, 3))]
        events += [launch("resume", 4, from_step=250)]
        events += [step(n, loss[n], 1 / n, 17_000.0) for n in range(251, 501, 3)]
        events[24]["grad_norm"] = "NaN"
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


def draw_all(browser: Browser) -> None:
    """Draw every plot, as for printing."""
    browser.run("dispatchEvent(new Event('beforeprint'))")
    browser.wait_for(
        "return [...document.querySelectorAll('.plot')].every((p) => p.querySelector('.main-svg'))"
    )


def column(browser: Browser, table: str, at: int) -> list[str]:
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
