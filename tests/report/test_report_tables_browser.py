"""The report's tables and small plots in Chromium: sorted, filtered, hovered, on a phone."""

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

DESKTOP, PHONE = (1280, 900), (390, 844)
EVIL = '"><img src=x onerror=alert(1)>'
TASKS = ("piqa", "boolq", "task_2", "task_10", EVIL)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with chromium(tmp_path_factory.mktemp("profile")) as started:
        yield started


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three architectures, two steps; one large difference, and perplexities above 1,000."""
    folder, draw = tmp_path_factory.mktemp("report"), random.Random(3)
    paths = []
    events = [launch("start"), *(step(k, 7 - k / 100) for k in range(10, 501, 10))]
    for k, position in enumerate(("rope", "nope", "alibi")):
        run = plant_run(folder / position, events, model__position=position, done=True)
        for at in (250, 500):
            right = {task: 0.4 + 0.5 * (task == "piqa" and k == 1) for task in TASKS}
            values = {
                task: {"acc": [float(draw.random() < chance) for _ in range(300)]}
                for task, chance in right.items()
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
    trial = {"only_tried": {"acc": Score(0.25, 0.1)}}
    plant_results(run, 500, "trial", trial, limit=8, items=8)
    return report(paths, folder / "out")


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


def numbers(cells: list[str]) -> list[float | None]:
    found = [
        re.match(r"-?[\d.]+", cell.replace("−", "-").replace(",", "").lstrip("<+ "))
        for cell in cells
    ]
    return [float(match[0]) if match else None for match in found]


def show(browser: Browser, table: str) -> None:
    browser.run("document.getElementById(arguments[0]).scrollIntoView()", table)


def test_numbers_sort_as_numbers_and_what_is_missing_stands_last(
    browser: Browser, page: Path
) -> None:
    browser.open(page, *DESKTOP)
    show(browser, "chosen-table")
    original = column(browser, "chosen-table", 1)
    given = [x for x in numbers(original) if x is not None]
    assert max(given) > 1000 and min(given) < 1  # 1,809 comes before 7.4 among strings
    assert click_head(browser, "chosen-table", 1) == "descending"
    falling = numbers(column(browser, "chosen-table", 1))
    assert click_head(browser, "chosen-table", 1) == "ascending"
    rising = numbers(column(browser, "chosen-table", 1))
    assert [x for x in rising if x is not None] == sorted(given)
    assert [x for x in falling if x is not None] == sorted(given, reverse=True)
    assert click_head(browser, "chosen-table", 1) is None
    assert column(browser, "chosen-table", 1) == original
    # p of tasks whose seed noise nobody knows is not there: last both ways
    show(browser, "pairs")
    for expected in ("ascending", "descending"):
        assert click_head(browser, "pairs", 5) == expected
        found = numbers(column(browser, "pairs", 5))
        given = [x for x in found if x is not None]
        assert 0 < len(given) < len(found) and None not in found[: len(given)]
        assert given == sorted(given, reverse=expected == "descending")
    assert browser.console() == []


def test_names_sort_with_their_numbers_and_rows_stay_whole(browser: Browser, page: Path) -> None:
    browser.open(page, *DESKTOP)
    show(browser, "chosen-table")
    before = dict(
        zip(column(browser, "chosen-table", 0), column(browser, "chosen-table", 2), strict=True)
    )
    assert click_head(browser, "chosen-table", 0) == "ascending"
    names = column(browser, "chosen-table", 0)
    places = [next(k for k, name in enumerate(names) if task in name) for task in TASKS[2:4]]
    assert places[0] < places[1]  # task_2 before task_10
    after = dict(zip(names, column(browser, "chosen-table", 2), strict=True))
    assert after == before


def test_differences_are_filtered_by_suite_verdict_and_name(browser: Browser, page: Path) -> None:
    browser.open(page, *DESKTOP)
    show(browser, "pairs")
    pairs = content(page)["comparison"]["pairs"]
    set_to = """const control = document.querySelector(
        `[data-filters-of=pairs] ${arguments[0]}`);
        control.value = arguments[1]; control.dispatchEvent(new Event("input", {bubbles: true}));
        return document.querySelector("[data-filters-of=pairs] .count").textContent"""
    for name in ("suite", "verdict", "architecture"):
        for value in {pair[name] for pair in pairs}:
            found = browser.run(set_to, f"[data-filter={name}]", value)
            count = sum(pair[name] == value for pair in pairs)
            assert found == f"{count} of {len(pairs)} rows"
            assert len(column(browser, "pairs", 0)) == count
        browser.run(set_to, f"[data-filter={name}]", "")
    assert browser.run(set_to, "input[type=search]", "BOOL nope") == f"1 of {len(pairs)} rows"
    assert column(browser, "pairs", 0) == ["boolq acc"]
    assert click_head(browser, "pairs", 3) == "descending"
    assert column(browser, "pairs", 0) == ["boolq acc"]  # sorting keeps the filter
    assert browser.run(set_to, "input[type=search]", "") == f"{len(pairs)} rows"
    assert browser.console() == []


def test_boxes_show_how_it_was_judged_and_what_was_published(browser: Browser, page: Path) -> None:
    browser.open(page, *DESKTOP)
    visible = """return [...document.getElementById(arguments[0]).tHead.rows[0].cells]
        .filter((cell) => cell.getClientRects().length > 0).map((cell) => cell.textContent)"""
    tick = "document.querySelector(`[data-of='${arguments[0]}']`).click()"
    for table, name in (("pairs", "McNemar"), ("chosen-table", "Mamba2published")):
        show(browser, table)
        assert name not in browser.run(visible, table)
        browser.run(tick, table)
        assert name in browser.run(visible, table)
        browser.run(tick, table)
        assert name not in browser.run(visible, table)


def draw(browser: Browser, selector: str) -> None:
    """Scroll to a small plot and wait until it is drawn and stands still."""
    # cards get their true heights, and plots are drawn, as they come near: the page moves
    browser.wait_for(
        """const plot = document.querySelector(arguments[0]);
        plot.closest("details")?.setAttribute("open", "");
        plot.scrollIntoView({ block: "center" });
        const top = plot.getBoundingClientRect().top, still = page.top === top;
        page.top = top;
        return still && plot._fullLayout !== undefined""",
        selector,
    )


def hover(browser: Browser, selector: str, x: object, y: float) -> str:
    """The hover label of a small plot at one of its points."""
    draw(browser, selector)
    at = browser.run(
        """const plot = document.querySelector(arguments[0]);
        const box = plot.getBoundingClientRect(), { xaxis, yaxis } = plot._fullLayout;
        return [box.left + xaxis._offset + xaxis.d2p(arguments[1]),
          box.top + yaxis._offset + yaxis.d2p(arguments[2])]""",
        selector,
        x,
        y,
    )
    for dx in (-2, 0):
        browser.move_to(at[0] + dx, at[1])
    return browser.wait_for(
        "return document.querySelector(`${arguments[0]} .hoverlayer .hovertext`)?.textContent",
        selector,
    )


def test_hover_shows_a_scores_value_error_step_tokens_and_items(
    browser: Browser, page: Path
) -> None:
    browser.open(page, *DESKTOP)
    curve = content(page)["score_curves"][0]
    line = curve["lines"][1]
    assert (curve["task"], line["run"]) == ("piqa", "nope")
    text = hover(browser, "[data-steps='0']", 500 * TOKENS_A_STEP, line["values"][1])
    assert text == (
        f"nope{line['values'][1]:.4f} ± {line['stderrs'][1]:.4f}"
        f"step 500, {500 * TOKENS_A_STEP:,} tokens, n = 300"
    )
    assert browser.console() == []


def test_hover_shows_accuracy_over_length_and_the_chance_line_is_drawn(
    browser: Browser, page: Path
) -> None:
    browser.open(page, *DESKTOP)
    assert hover(browser, "[data-length='0']", 1, 0.6) == "nope256: 0.6000"
    panels = content(page)["lengths"][0]["panels"]
    (at,) = (k for k, p in enumerate(panels) if (p["series"], p["metric"]) == ("2-hop", "rank"))
    draw(browser, f"[data-length='{at}']")
    assert browser.run(
        "return document.querySelector(`[data-length='${arguments[0]}'] .annotation-text`)"
        ".textContent",
        at,
    ) == ("chance 0.333")
    # an architecture is turned off in all of these plots, and in no other
    browser.run("document.querySelector('[data-entry=\"1\"]').click()")
    off = "return document.querySelector(arguments[0]).data.map((trace) => trace.visible)"
    assert browser.run(off, "[data-length='0']") == [True, False, True]
    assert browser.run("return page.content.entries[1]") == "nope"
    assert browser.console() == []


def test_plots_wait_until_they_are_scrolled_to(browser: Browser, page: Path) -> None:
    browser.open(page, *DESKTOP)
    drawn = "return document.querySelectorAll('.plot .main-svg').length"
    assert browser.run(drawn) == 0
    browser.run("document.getElementById('curve-loss').scrollIntoView()")
    assert browser.wait_for("return document.querySelector('#curve-loss .main-svg') !== null")


def test_a_run_is_turned_off_by_either_legend_in_every_plot(browser: Browser, page: Path) -> None:
    browser.open(page, *DESKTOP)
    draw(browser, "[data-steps='0']")
    first, second = "[aria-labelledby=over-steps]", "[aria-labelledby=curves]"
    click = "document.querySelector(`${arguments[0]} [data-run='2']`).click()"
    pressed = "return document.querySelector(`${arguments[0]} [data-run='2']`).ariaPressed"
    shown = "return document.querySelector(\"[data-steps='0']\").data[2].visible"
    browser.run(click, first)
    assert browser.run(pressed, second) == "false" and browser.run(shown) is False
    browser.run(click, second)
    assert browser.run(pressed, first) == "true" and browser.run(shown) is True


@pytest.mark.parametrize("size", [DESKTOP, PHONE])
def test_small_plots_are_folded_and_the_page_is_short(
    browser: Browser, page: Path, size: tuple[int, int]
) -> None:
    """Issue 17, item 3: 18,938 px of a demo report became 7,019, and 35,352 on a phone 9,292."""
    browser.open(page, *size)
    browser.run(
        "for (const c of document.querySelectorAll('.tabled')) c.classList.remove('tabled')"
    )
    height = "return document.documentElement.scrollHeight"
    folded = browser.run(height)
    browser.run("for (const d of document.querySelectorAll('details')) d.open = true")
    assert folded < 0.55 * browser.run(height)
    small = "return [...document.querySelectorAll('.plot[data-steps], .plot[data-length]')]"
    assert browser.run(f"{small}.every((plot) => plot.closest('details'))")


def test_the_difference_is_under_the_chip_on_a_phone(browser: Browser, page: Path) -> None:
    """Issue 17, item 3: it can be read without scrolling sideways."""
    under = """const cell = document.querySelector("#pairs td[data-difference]");
        return [getComputedStyle(cell, "::after").content, cell.getBoundingClientRect().right]"""
    pair = content(page)["comparison"]["pairs"][0]
    browser.open(page, *PHONE)
    text, right = browser.run(under)
    assert text == f'"{signed(pair["difference"])}"' and right <= PHONE[0]
    browser.open(page, *DESKTOP)
    assert browser.run(under)[0] == "none"


def test_the_late_loss_is_smoothed_and_less_the_baselines(browser: Browser, tmp_path: Path) -> None:
    """Issue 17, item 3: the last half of the loss, and the difference to the baseline."""
    paths = []
    for k, position in enumerate(("rope", "nope")):
        events = [launch("start"), *(step(n, 5 - k / 10 + n % 2 / 10) for n in range(1, 201))]
        paths.append(plant_run(tmp_path / position, events, model__position=position).path)
    page = report(paths, tmp_path / "out")
    late = content(page)["late_loss"]
    assert len(late["tokens"]) == 20 and late["tokens"][0] > 100 * TOKENS_A_STEP
    for k, line in enumerate(late["lines"]):
        assert line["values"] == pytest.approx([5.05 - k / 10] * 20, abs=0.011)
        assert line["differences"] == pytest.approx([-k / 10] * 20)
    browser.open(page, *DESKTOP)
    for kind in ("values", "differences"):
        draw(browser, f"[data-late={kind}]")
        drawn = browser.run(
            "return document.querySelector(`[data-late=${arguments[0]}]`).data[1].y", kind
        )
        assert drawn == pytest.approx(late["lines"][1][kind], rel=1e-6)
    assert browser.console() == []


@pytest.mark.parametrize("size", [DESKTOP, PHONE])
def test_wide_tables_scroll_inside_their_cards(
    browser: Browser, page: Path, size: tuple[int, int]
) -> None:
    browser.requests()  # those of other tests
    browser.open(page, *size)
    browser.run("document.querySelectorAll('details').forEach((d) => { d.open = true; })")
    browser.run("document.querySelectorAll('[data-columns]').forEach((box) => box.click())")
    browser.run(
        "document.querySelectorAll('.tabled').forEach((c) => { c.style.contentVisibility"
        " = 'visible'; })"
    )
    width, inner = browser.run("return [document.documentElement.scrollWidth, innerWidth]")
    assert width <= inner == size[0]
    wide = browser.run(
        "const box = document.getElementById('pairs').parentElement;"
        "box.scrollLeft = 300; return [box.scrollWidth > box.clientWidth, box.scrollLeft]"
    )
    assert wide == [True, 300]
    pinned = browser.run(
        "const table = document.getElementById('pairs'), cell = table.tBodies[0].rows[0].cells[0];"
        "const left = (element) => element.getBoundingClientRect().left;"
        "return left(cell) - left(table.parentElement)"
    )
    assert abs(pinned) < 2  # the task's name stays
    assert browser.run("return document.querySelectorAll('img').length") == 0
    assert browser.console() == []
    assert browser.requests() == [page.resolve().as_uri()]
