"""Headless Chromium for tests of pages: no network, a new profile, console and requests recorded.

Needs Debian's chromium and chromium-driver and the package selenium; tests are skipped without.
"""

import json
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

DESKTOP, PHONE = (1280, 900), (390, 844)
EVIL = '"><img src=x onerror=alert(1)>%{y}'
"""A name that no page may interpret as markup."""
FLAGS = (
    "headless=new no-sandbox disable-gpu disable-quic disable-dev-shm-usage no-first-run "
    "disable-background-networking disable-component-update disable-sync hide-scrollbars"
)


class Browser:
    """One Chromium."""

    def __init__(self, driver: Any) -> None:
        self.driver = driver

    def open(self, page: Path, width: int, height: int, *, dark: bool = False) -> None:
        """Open a local page, below 600 px as on a phone, and wait until it is drawn."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})
        self.requests()
        self.driver.get(page.resolve().as_uri())
        self.wait_for("return document.documentElement.dataset.drawn")

    def assert_fits(self, page: Path, width: int) -> None:
        """Assert no requests, no console messages, and that page and plots are not too wide."""
        assert self.console() == []
        [library] = page.resolve().parent.glob("plotly-*.min.js")
        assert self.requests() == [page.resolve().as_uri(), library.as_uri()]
        needed, inner = self.run("return [document.documentElement.scrollWidth, innerWidth]")
        assert needed <= inner == width
        svgs = "return [...document.querySelectorAll('.main-svg')].map((s) => s.clientWidth)"
        assert all(0 < svg <= inner for svg in self.run(svgs))
        assert self.run("return document.querySelectorAll('img').length") == 0

    def wait_for(self, script: str, *arguments: Any) -> Any:
        """Return the first true value of `script`; fail after 20 s."""
        from selenium.webdriver.support.ui import WebDriverWait

        return WebDriverWait(self.driver, 20, poll_frequency=0.05).until(
            lambda driver: driver.execute_script(script, *arguments)
        )

    def hover(self, plot: str, x: object, y: float | None = None) -> str:
        """Return the text of the hover box at (x, y) of a plot, given by id or selector."""
        plot = plot if plot.startswith("[") else f"#{plot}"
        self.wait_for(
            """const plot = document.querySelector(arguments[0]);
            plot.scrollIntoView({ block: "center" });
            const top = plot.getBoundingClientRect().top, still = page.top === top;
            page.top = top;
            return still && plot._fullLayout !== undefined""",
            plot,
        )
        left, top = self.run(
            """const plot = document.querySelector(arguments[0]);
            const box = plot.getBoundingClientRect(), { xaxis, yaxis } = plot._fullLayout;
            const up = arguments[2] === null ? yaxis._length / 2 : yaxis.d2p(arguments[2]);
            const across = xaxis._offset + xaxis.d2p(arguments[1]);
            return [box.left + across, box.top + yaxis._offset + up]""",
            *(plot, x, y),
        )
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:  # a busy page may miss an event
            for dx in (-1, 0):
                moved = {"type": "mouseMoved", "x": left + dx, "y": top}
                self.driver.execute_cdp_cmd("Input.dispatchMouseEvent", moved)
            if text := self.run(
                """const layer = document.querySelector(`${arguments[0]} .hoverlayer`);
                const box = layer.querySelector(".legend") ?? layer.querySelector(".hovertext");
                return box?.textContent""",
                plot,
            ):
                return text
        raise AssertionError(f"no hover box on {plot} at {x}")

    def run(self, script: str, *arguments: Any) -> Any:
        """Return the value of JavaScript `script`."""
        return self.driver.execute_script(script, *arguments)

    def console(self) -> list[str]:
        """Return the console messages since the last call, with network errors."""
        return [entry["message"] for entry in self.driver.get_log("browser")]

    def requests(self) -> list[str]:
        """Return the URLs requested since the last call."""
        messages = [json.loads(e["message"])["message"] for e in self.driver.get_log("performance")]
        sent = [x["params"] for x in messages if x["method"] == "Network.requestWillBeSent"]
        return [each["request"]["url"] for each in sent]


@contextmanager
def chromium(profile: Path) -> Iterator[Browser]:
    """Start a browser with its own `profile` folder; skip the test if there is none."""
    webdriver = pytest.importorskip("selenium.webdriver", reason="needs selenium")
    for name in ("chromium", "chromedriver"):
        if shutil.which(name) is None:
            pytest.skip(f"needs {name}: apt-get install chromium chromium-driver")
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium")
    for flag in (*FLAGS.split(), f"user-data-dir={profile}"):
        options.add_argument(f"--{flag}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    service = webdriver.ChromeService(shutil.which("chromedriver"))
    driver = webdriver.Chrome(options=options, service=service)
    try:
        driver.get("about:blank")  # leave Chromium's start page
        yield Browser(driver)
    finally:
        driver.quit()
