"""A report's page as its rows, tags and text, and the JSON and Markdown beside it, for tests."""

import argparse
import json
from collections.abc import Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from canon_pretrain.report.eval_report import add_arguments, execute


class Page(HTMLParser):
    """A page's elements, the texts of its table rows, and all text outside of scripts."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.rows: list[list[str]] = []
        self.text = ""
        self._inside: list[str] = []
        self.feed(page.read_text())
        self.text = " ".join(self.text.split())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "link", "input"):
            self._inside.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        assert self._inside.pop() == tag

    def handle_data(self, data: str) -> None:
        if self._inside and self._inside[-1] not in ("script", "style"):
            self.text += " " + data
        if "td" in self._inside or "th" in self._inside:
            self.rows[-1][-1] = " ".join(f"{self.rows[-1][-1]} {data}".split())


def report(runs: Sequence[Path], out: Path | None) -> Path:
    """Run the command; the page that it wrote."""
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    where = [] if out is None else ["--out", str(out)]
    execute(parser.parse_args([*map(str, runs), *where]))
    return (out or runs[0] / "report") / "index.html"


def content(page: Path) -> dict[str, Any]:
    return json.loads((page.parent / "report.json").read_text())


def markdown(page: Path) -> str:
    return (page.parent / "report.md").read_text()
