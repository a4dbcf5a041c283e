"""The report in headless Chromium: no errors, no requests, values on hover, room on a phone."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from canon_pretrain.report.eval_report import report
from canon_pretrain.run.results import Score
from tests.browser import Browser, chromium
from tests.report_runs import TOKENS_A_STEP, launch, plant_results, plant_run, step

EVIL_NAME = '"><img src=x onerror=alert(1)>%{y}'
DESKTOP, PHONE = (1280, 900), (390, 844)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with chromium(tmp_path_factory.mktemp("profile")) as started:
        yield started


def learning(top: float, *more: dict[str, Any]) -> list[dict[str, Any]]:
    """A log of 50 logged steps, one of them without a finite norm, and one restart."""
    events = [launch("start"), *(step(k, top - math.log(k) / 2, 1 / k) for k in range(1, 251, 10))]
    events += [launch("resume", 4, from_step=241)]
    events += [step(k, top - math.log(k) / 2, 1 / k, 17_000.0) for k in range(251, 501, 10)]
    events[8]["grad_norm"] = "NaN"
    return [*events, *more]


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three runs with long and evil names on different data; wide tables."""
    folder = tmp_path_factory.mktemp("report")
    names = ("nope_canon_abcd_1b3_fineweb_edu_seed_0_lr_4e-3", EVIL_NAME, "rope")
    runs = []
    for k, name in enumerate(names):
        runs.append(
            plant_run(
                folder / name,
                learning(8 + k / 4),
                description="NoPE + Canon-ABCD, " * 4,
                data_fingerprint=str(k // 2) * 64,
                model__position="rope" if name == "rope" else "nope",
                done=True,
            )
        )
        tasks = ("lambada_openai", "hellaswag", "arc_challenge_with_a_very_long_name_indeed")
        scores = {task: {"acc": Score(0.4 + k / 50, 0.0158), "bits": Score(1.5)} for task in tasks}
        for at in (250, 500)[k % 2 :]:
            limit = 100 if k == 1 else None
            plant_results(runs[-1], at, "discriminative", scores, limit=limit, items=limit or 1838)
    return report([planted.path for planted in runs], folder / "out")


def open_whole(browser: Browser, page: Path, size: tuple[int, int], *, dark: bool = False) -> None:
    """Open a page with all its plots drawn, as for print: else each is when it is scrolled to."""
    browser.open(page, *size, dark=dark)
    browser.run("dispatchEvent(new Event('beforeprint'))")
    browser.wait_for(
        "return [...document.querySelectorAll('.plot')].every((p) => p.querySelector('.main-svg'))"
    )


def hover(browser: Browser, field: str, tokens: int) -> str:
    """The hover box's text, with the pointer on a curve at `tokens`."""
    x, y = browser.run(
        """const plot = document.getElementById(arguments[0]);
        plot.scrollIntoView({block: "center"});
        const box = plot.getBoundingClientRect(), layout = plot._fullLayout;
        const x = box.left + layout.xaxis._offset + layout.xaxis.d2p(arguments[1]);
        return [x, box.top + layout.yaxis._offset + layout.yaxis._length / 2];""",
        f"curve-{field}",
        tokens,
    )
    for dx in (-3, 0):
        browser.move_to(x + dx, y)
    return browser.wait_for(
        "return document.querySelector(`#${arguments[0]} .hoverlayer .legend`)?.textContent",
        f"curve-{field}",
    )


def test_opens_without_errors_or_requests(browser: Browser, page: Path) -> None:
    open_whole(browser, page, DESKTOP)
    assert browser.console() == []
    assert browser.requests() == [page.resolve().as_uri()]
    drawn = "return document.querySelectorAll('.curve .plot .scatterlayer .trace .js-line').length"
    assert browser.run(drawn) == 9 + 3  # three runs, three curves; each norm has a gap
    assert browser.run("return document.querySelectorAll('img').length") == 0


def test_plotly_offers_a_picture_but_not_to_send_the_chart_away(
    browser: Browser, page: Path
) -> None:
    open_whole(browser, page, DESKTOP)
    titles = browser.run(
        "return [...document.querySelectorAll('#curve-loss .modebar-btn')]"
        ".map((button) => button.dataset.title)"
    )
    assert titles == ["Download plot as a PNG", "Zoom", "Pan", "Reset axes"]
    picture = "return Plotly.toImage('curve-loss', {format: 'png', width: 300, height: 200})"
    assert browser.run(picture).startswith("data:image/png;base64,")
    assert browser.console() == []


def test_hover_shows_value_step_and_run(browser: Browser, page: Path) -> None:
    open_whole(browser, page, DESKTOP)
    text = hover(browser, "loss", 101 * TOKENS_A_STEP)
    assert f"{101 * TOKENS_A_STEP:,} tokens" in text
    for top in (8, 8.25, 8.5):
        assert f"{top - math.log(101) / 2:.4f}, step 101" in text
    assert "rope: " in text
    assert EVIL_NAME in text  # as text
    assert "not finite, step 71" in hover(browser, "grad_norm", 71 * TOKENS_A_STEP)
    assert "restart from step 241" in hover(browser, "tokens_per_second", 241 * TOKENS_A_STEP)
    assert browser.console() == []


def test_the_hover_box_fits_a_phone(browser: Browser, page: Path) -> None:
    open_whole(browser, page, PHONE)
    for field, at in (("loss", 1), ("grad_norm", 71), ("tokens_per_second", 241)):
        hover(browser, field, at * TOKENS_A_STEP)
        left, right = browser.run(
            "const box = document.querySelector(`#curve-${arguments[0]} .hoverlayer .legend .bg`)"
            ".getBoundingClientRect(); return [box.left, box.right];",
            field,
        )
        assert 0 <= left < right <= PHONE[0]


def test_a_run_can_be_hidden_and_an_axis_made_linear(browser: Browser, page: Path) -> None:
    open_whole(browser, page, DESKTOP)
    browser.run("document.querySelector('[data-run=\"2\"]').click()")
    browser.run("document.querySelector('[data-log=grad_norm]').click()")
    assert "rope" not in hover(browser, "loss", 101 * TOKENS_A_STEP)
    axis = "return document.getElementById('curve-grad_norm')._fullLayout.yaxis.type"
    assert browser.run(axis) == "linear"
    assert browser.console() == []


@pytest.mark.parametrize("size", [DESKTOP, PHONE])
@pytest.mark.parametrize("dark", [False, True])
def test_nothing_runs_over_the_page(
    browser: Browser, page: Path, size: tuple[int, int], dark: bool
) -> None:
    open_whole(browser, page, size, dark=dark)
    browser.run("document.querySelectorAll('details').forEach((d) => { d.open = true; })")
    width, inner = browser.run("return [document.documentElement.scrollWidth, innerWidth]")
    assert inner == size[0] and width <= inner
    plots = "return [...document.querySelectorAll('.main-svg')].map((s) => s.clientWidth)"
    assert all(0 < svg <= inner for svg in browser.run(plots))
    shade = "return getComputedStyle(document.body).backgroundColor"
    assert browser.run(shade) == ("rgb(16, 19, 25)" if dark else "rgb(246, 247, 249)")
    assert browser.console() == []


def test_plots_follow_the_window(browser: Browser, page: Path) -> None:
    open_whole(browser, page, DESKTOP)
    browser.resize(*PHONE)
    svgs = "[...document.querySelectorAll('.main-svg')]"
    assert browser.wait_for(f"return {svgs}.every((svg) => svg.clientWidth < 390)")
    width, inner = browser.run("return [document.documentElement.scrollWidth, innerWidth]")
    assert width <= inner == PHONE[0]


def test_a_run_without_steps_draws_empty_plots(browser: Browser, tmp_path: Path) -> None:
    bare = report([plant_run(tmp_path / "bare", [launch("start")]).path], None)
    open_whole(browser, bare, PHONE)
    assert browser.console() == []
