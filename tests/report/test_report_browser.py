"""The report in headless Chromium: no errors, no requests, hover, tables, and room on a phone."""

import math
import random
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from canon_pretrain.report.eval_report import report
from canon_pretrain.report.words import signed
from canon_pretrain.run.results import Score
from tests.browser import Browser, chromium
from tests.report_pages import content
from tests.report_runs import TOKENS_A_STEP, launch, plant_items, plant_results, plant_run, step

EVIL = '"><img src=x onerror=alert(1)>%{y}'
LONG = "nope_canon_abcd_1b3_fineweb_edu_seed_0_lr_4e-3"
DESKTOP, PHONE = (1280, 900), (390, 844)
TASKS = ("piqa", "boolq", "task_2", "task_10", EVIL)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with chromium(tmp_path_factory.mktemp("profile")) as started:
        yield started


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three architectures on two kinds of data, evaluated at two steps, each with one restart and
    one step without a finite norm; one large difference, and perplexities above 1,000."""
    folder, draw = tmp_path_factory.mktemp("report"), random.Random(3)
    paths = []
    for k, (name, position) in enumerate(((LONG, "rope"), (EVIL, "nope"), ("short", "alibi"))):
        loss = [8 + k / 4 - math.log(n) / 2 for n in range(1, 502)]
        events = [launch("start"), *(step(n, loss[n], 1 / n) for n in range(1, 251, 3))]
        events += [launch("resume", 4, from_step=250)]
        events += [step(n, loss[n], 1 / n, 17_000.0) for n in range(251, 501, 3)]
        events[24]["grad_norm"] = "NaN"
        run = plant_run(
            folder / name,
            events,
            description="NoPE + Canon-ABCD, " * 4,
            data_fingerprint=str(k // 2) * 64,
            model__position=position,
            done=True,
        )
        for at in (250, 500):
            shares = {task: 0.4 + 0.5 * (task == "piqa" and k == 1) for task in TASKS}
            values = {
                task: {"acc": [float(draw.random() < share) for _ in range(300)]}
                for task, share in shares.items()
            }
            tasks = {task: {"version": 1, "primary": ["acc"]} for task in TASKS}
            plant_items(run, at, "discriminative", values, tasks=tasks)
            perplexity = {
                f"text_{n}": {"word_perplexity": [draw.gauss(-nats, 0.1) for _ in range(300)]}
                for n, nats in enumerate((2.0, 7.5, 4.0))
            }
            plant_items(run, at, "texts", perplexity)
            lengths = {
                f"{kind}-{length}": {"exact": Score(0.5 + k / 10), "rank": Score(0.9)}
                for kind in ("1-hop", "2-hop")
                for length in (0, 256, 1024)
            }
            plant_results(run, at, "birth-year", lengths, items=1000)
        paths.append(run.path)
    plant_results(run, 500, "trial", {"only_tried": {"acc": Score(0.25)}}, limit=8, items=8)
    return report(paths, folder / "out")


def draw_all(browser: Browser) -> None:
    """Draw every plot, as for print: else each is drawn when it is scrolled to."""
    browser.run("dispatchEvent(new Event('beforeprint'))")
    browser.wait_for(
        "return [...document.querySelectorAll('.plot')].every((p) => p.querySelector('.main-svg'))"
    )


def hover(browser: Browser, selector: str, x: object, y: float | None = None) -> str:
    """The hover label of a plot at `x`; halfway up without `y`."""
    browser.wait_for(
        """const plot = document.querySelector(arguments[0]);
        plot.closest("details")?.setAttribute("open", "");
        plot.scrollIntoView({ block: "center" });
        const top = plot.getBoundingClientRect().top, still = page.top === top;
        page.top = top;
        return still && plot._fullLayout !== undefined""",
        selector,
    )
    left, top = browser.run(
        """const plot = document.querySelector(arguments[0]);
        const box = plot.getBoundingClientRect(), { xaxis, yaxis } = plot._fullLayout;
        const up = arguments[2] === null ? yaxis._length / 2 : yaxis.d2p(arguments[2]);
        const across = xaxis._offset + xaxis.d2p(arguments[1]);
        return [box.left + across, box.top + yaxis._offset + up]""",
        selector,
        x,
        y,
    )
    for dx in (-1, 0):
        browser.move_to(left + dx, top)
    return browser.wait_for(
        """const layer = document.querySelector(`${arguments[0]} .hoverlayer`);
        const box = layer.querySelector(".legend") ?? layer.querySelector(".hovertext");
        return box?.textContent""",
        selector,
    )


def column(browser: Browser, table: str, at: int) -> list[str]:
    """The texts of one column's visible cells, top to bottom."""
    return browser.run(
        """return [...document.getElementById(arguments[0]).tBodies[0].rows]
        .filter((row) => row.getClientRects().length > 0)
        .map((row) => row.cells[arguments[1]].textContent.trim())""",
        table,
        at,
    )


def click_head(browser: Browser, table: str, at: int) -> str | None:
    """Click a column's name; how the column says that it is sorted now."""
    return browser.run(
        """const head = document.getElementById(arguments[0]).tHead.rows[0].cells[arguments[1]];
        head.querySelector("button").click(); return head.getAttribute("aria-sort")""",
        table,
        at,
    )


def numbers(cells: list[str]) -> list[float]:
    """Those of the cells that begin with one."""
    texts = [cell.replace("−", "-").replace(",", "").lstrip("<+ ") for cell in cells]
    return [float(match[0]) for text in texts if (match := re.match(r"-?[\d.]+", text))]


def test_plots_draw_hover_and_hide(browser: Browser, page: Path) -> None:
    browser.requests()
    browser.open(page, *DESKTOP)
    assert browser.run("return document.querySelectorAll('.plot .main-svg').length") == 0
    browser.run("document.getElementById('curve-loss').scrollIntoView()")
    browser.wait_for("return document.querySelector('#curve-loss .main-svg') !== null")
    draw_all(browser)
    lines = "return document.querySelectorAll('.plot[id^=curve-] .trace .js-line').length"
    assert browser.run(lines) == 9 + 3  # three runs, three curves; each norm has a gap
    buttons = "return [...document.querySelectorAll('#curve-loss .modebar-btn')]"
    titles = browser.run(f"{buttons}.map((button) => button.dataset.title)")
    assert titles == ["Download plot as a PNG", "Zoom", "Pan", "Reset axes"]

    text = hover(browser, "#curve-loss", 100 * TOKENS_A_STEP)
    assert f"{100 * TOKENS_A_STEP:,} tokens" in text and EVIL in text  # as text
    for top in (8, 8.25, 8.5):
        assert f"{top - math.log(101) / 2:.4f}, step 100" in text
    assert "not finite, step 70" in hover(browser, "#curve-grad_norm", 70 * TOKENS_A_STEP)
    speed = hover(browser, "#curve-tokens_per_second", 250 * TOKENS_A_STEP)
    assert "restart from step 250" in speed
    curve = content(page)["score_curves"][0]
    line = curve["lines"][1]
    assert (curve["task"], line["run"]) == ("piqa", EVIL)
    text = hover(browser, "[data-steps='0']", 500 * TOKENS_A_STEP, line["values"][1])
    assert f"{line['values'][1]:.4f} ± {line['stderrs'][1]:.4f}step 500, " in text
    assert text.endswith(f"{500 * TOKENS_A_STEP:,} tokens, n = 300")
    assert hover(browser, "[data-length='0']", 1, 0.6) == "nope256: 0.6000"
    notes = "return [...document.querySelectorAll('[data-length] .annotation-text')]"
    assert browser.run(f"{notes}.map((n) => n.textContent)") == ["chance 0.200", "chance 0.333"]
    for kind in ("values", "differences"):
        drawn = f"return document.querySelector('[data-late={kind}]').data[1].y"
        expected = content(page)["late_loss"]["lines"][1][kind]
        assert browser.run(drawn) == pytest.approx(expected, rel=1e-6, abs=1e-6)

    browser.run("document.querySelector('[data-entry=\"1\"]').click()")
    visible = "return document.querySelector(arguments[0]).data.map((trace) => trace.visible)"
    assert browser.run(visible, "[data-length='0']") == [True, False, True]
    for legend, is_shown in (("over-steps", False), ("curves", True)):  # both are one legend
        browser.run(
            f"document.querySelector('[aria-labelledby={legend}] [data-run=\"2\"]').click()"
        )
        assert browser.run(visible, "[data-steps='0']") == [True, True, is_shown]
        assert browser.run(visible, "#curve-loss")[4] is is_shown
    browser.run("document.querySelector('[data-log=grad_norm]').click()")
    axis = "return document.getElementById('curve-grad_norm')._fullLayout.yaxis.type"
    assert browser.wait_for(f"{axis} === 'linear'")
    assert browser.run("return document.querySelectorAll('img').length") == 0
    assert browser.requests() == [page.resolve().as_uri()]
    assert browser.console() == []


def test_tables_sort_filter_and_show_more(browser: Browser, page: Path) -> None:
    browser.open(page, *DESKTOP)
    original = column(browser, "chosen-table", 1)
    given = numbers(original)
    assert max(given) > 1000 and min(given) < 1  # 1,809 comes before 7.4 among strings
    for expected in ("descending", "ascending", None):
        assert click_head(browser, "chosen-table", 1) == expected
        found = numbers(column(browser, "chosen-table", 1))
        order = sorted(given, reverse=expected == "descending") if expected else given
        assert found == order
    assert column(browser, "chosen-table", 1) == original
    # p of tasks whose seed noise is unknown is missing: last both ways
    for expected in ("ascending", "descending"):
        assert click_head(browser, "pairs", 5) == expected
        cells = column(browser, "pairs", 5)
        given = numbers(cells)
        assert 0 < len(given) < len(cells) and set(cells[len(given) :]) == {"–"}
        assert given == sorted(given, reverse=expected == "descending")
    before = dict(zip(*(column(browser, "chosen-table", k) for k in (0, 2)), strict=True))
    assert click_head(browser, "chosen-table", 0) == "ascending"
    names = column(browser, "chosen-table", 0)
    places = [next(k for k, name in enumerate(names) if task in name) for task in TASKS[2:4]]
    assert places[0] < places[1]  # task_2 before task_10
    assert dict(zip(names, column(browser, "chosen-table", 2), strict=True)) == before

    pairs = content(page)["comparison"]["pairs"]
    set_to = """const control = document.querySelector(
        `[data-filters-of=pairs] ${arguments[0]}`);
        control.value = arguments[1]; control.dispatchEvent(new Event("input", {bubbles: true}));
        return document.querySelector("[data-filters-of=pairs] .count").textContent"""
    for name in ("suite", "verdict", "architecture"):
        for value in {pair[name] for pair in pairs}:
            count = sum(pair[name] == value for pair in pairs)
            found = browser.run(set_to, f"[data-filter={name}]", value)
            assert found == f"{count} of {len(pairs)} rows"
            assert len(column(browser, "pairs", 0)) == count
        browser.run(set_to, f"[data-filter={name}]", "")
    assert browser.run(set_to, "input[type=search]", "BOOL nope") == f"1 of {len(pairs)} rows"
    assert click_head(browser, "pairs", 3) == "descending"
    assert column(browser, "pairs", 0) == ["boolq acc"]  # sorting keeps the filter
    visible = """return [...document.getElementById(arguments[0]).tHead.rows[0].cells]
        .filter((cell) => cell.getClientRects().length > 0).map((cell) => cell.textContent)"""
    for table, name in (("pairs", "McNemar"), ("chosen-table", "Mamba2published")):
        for is_shown in (False, True):
            assert (name in browser.run(visible, table)) == is_shown
            browser.run("document.querySelector(`[data-of='${arguments[0]}']`).click()", table)
    assert browser.console() == []


@pytest.mark.parametrize("size", [DESKTOP, PHONE])
@pytest.mark.parametrize("dark", [False, True])
def test_the_page_fits_its_window(
    browser: Browser, page: Path, size: tuple[int, int], dark: bool
) -> None:
    browser.open(page, *size, dark=dark)
    browser.run(
        "for (const c of document.querySelectorAll('.tabled')) c.classList.remove('tabled')"
    )
    height = "return document.documentElement.scrollHeight"
    folded = browser.run(height)
    draw_all(browser)
    assert folded < 0.55 * browser.run(height)
    browser.run("document.querySelectorAll('[data-columns]').forEach((box) => box.click())")
    width, inner = browser.run("return [document.documentElement.scrollWidth, innerWidth]")
    assert inner == size[0] and width <= inner
    plots = "return [...document.querySelectorAll('.main-svg')].map((s) => s.clientWidth)"
    assert all(0 < svg <= inner for svg in browser.run(plots))
    hover(browser, "#curve-loss", TOKENS_A_STEP)
    left, right = browser.run(
        "const box = document.querySelector('#curve-loss .hoverlayer .legend .bg')"
        ".getBoundingClientRect(); return [box.left, box.right]"
    )
    assert 0 <= left < right <= inner
    wide, pinned = browser.run(
        "const table = document.getElementById('pairs'), box = table.parentElement;"
        "box.scrollLeft = 300; const cell = table.tBodies[0].rows[0].cells[0];"
        "const left = (element) => element.getBoundingClientRect().left;"
        "return [box.scrollWidth > box.clientWidth, left(cell) - left(box)]"
    )
    assert wide and abs(pinned) < 2  # the task's name stays
    under = browser.run(
        "const cell = document.querySelector('#pairs td[data-difference]');"
        "return getComputedStyle(cell, '::after').content"
    )
    pair = content(page)["comparison"]["pairs"][0]
    assert under == (f'"{signed(pair["difference"])}"' if size == PHONE else "none")
    shade = "return getComputedStyle(document.body).backgroundColor"
    assert browser.run(shade) == ("rgb(16, 19, 25)" if dark else "rgb(246, 247, 249)")
    browser.resize(*PHONE)
    svgs = "[...document.querySelectorAll('.main-svg')]"
    assert browser.wait_for(f"return {svgs}.every((svg) => svg.clientWidth < 390)")
    assert browser.console() == []


def test_a_run_without_steps_draws_empty_plots(browser: Browser, tmp_path: Path) -> None:
    browser.open(report([plant_run(tmp_path / "bare", [launch("start")]).path], None), *PHONE)
    draw_all(browser)
    assert browser.console() == []
