"""The output of `eval report`, parsed for tests."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lxml import etree, html

from eval.__main__ import main


class Page:
    """The elements of a page, the texts of its table rows, and all text outside of scripts."""

    def __init__(self, page: Path) -> None:
        tree = html.parse(str(page), html.HTMLParser(encoding="utf-8", huge_tree=True)).getroot()
        self.tags = [(x.tag, dict(x.attrib)) for x in tree.iter() if isinstance(x.tag, str)]
        self.rows = [[_text(cell) for cell in row] for row in tree.iter("tr")]
        etree.strip_elements(tree, "script", "style", with_tail=False)
        self.text = _text(tree)


def _text(element: Any) -> str:
    return " ".join(" ".join(element.itertext()).split())


def report(runs: Sequence[Path], out: Path | None) -> Path:
    """Run the command; return the path of its page."""
    main(["report", *map(str, runs), *([] if out is None else ["--out", str(out)])])
    return (out or runs[0] / "report") / "index.html"


def content(page: Path) -> dict[str, Any]:
    return json.loads((page.parent / "report.json").read_text())


def markdown(page: Path) -> str:
    return (page.parent / "report.md").read_text()
