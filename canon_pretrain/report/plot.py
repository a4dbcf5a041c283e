"""`python -m canon_pretrain.run plot RUN... --out FILE.html`: runs over each other, on one page.

The runs' logs and evaluations become one file that needs no network: `history.py` reads,
`charts.py` says what is shown, templates/plot.* show it.
"""

import argparse
from pathlib import Path
from typing import Any

from canon_pretrain.core.errors import UserError
from canon_pretrain.core.files import write_atomic
from canon_pretrain.report.charts import page_content
from canon_pretrain.report.history import read_history
from canon_pretrain.run.names import named_runs, unique_labels

TEMPLATES = Path(__file__).parent / "templates"
PAGE_ENDINGS = (".html", ".htm")


def plot(paths: list[Path], out: Path) -> dict[str, Any]:
    """Write the page of the runs that `paths` name to `out`; returns what it shows.

    Raises UserError.
    """
    if out.suffix.lower() not in PAGE_ENDINGS or out.is_dir():
        raise UserError(f"--out {out}: expected the name of a page, such as curves.html")
    paths = named_runs(paths)
    labels = unique_labels(paths)
    runs = [read_history(path, label) for path, label in zip(paths, labels, strict=True)]
    content = page_content(runs)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(out, html_page(content).encode())
    except OSError as error:
        raise UserError(f"--out {out}: {error.strerror}; choose another place") from None
    return content


def html_page(content: dict[str, Any]) -> str:
    """The self-contained page of `charts.page_content`."""
    from canon_pretrain.core import page  # plotly takes a while to import

    plotted = {name: content[name] for name in ("runs", "entries", "sections")}
    return page.html_page(
        TEMPLATES,
        "plot",
        plotted,
        filters={"figure": figure, "setting": setting},
        dark=False,
        content=content,
    )


def figure(value: object, form: str = ",.4f") -> str:
    """A figure for a table; – for what is not known, words as they are ("NaN")."""
    if value is None:
        return "–"
    return format(value, form) if isinstance(value, int | float) else str(value)


def setting(value: object) -> str:
    """A value of config.json, readable: a fingerprint is cut."""
    text = "–" if value is None else '""' if value == "" else str(value)
    return text if len(text) <= 24 else text[:12] + "…"


def add_parser(subparsers: Any) -> None:
    """The sub-command `plot`."""
    parser = subparsers.add_parser(
        "plot",
        help="curves of several runs on one page",
        description="Overlay the curves of runs on one HTML page that works offline: loss over "
        "tokens and over time, gradient norm with skipped steps, throughput and MFU with restarts, "
        "learning rate, validation, evaluations. Runs that differ in their seeds alone are drawn "
        "as their mean in a band.",
        epilog="example: python -m canon_pretrain.run plot outputs/* --out curves.html",
    )
    parser.add_argument(
        "runs", nargs="+", type=Path, metavar="RUN", help="a run, or a folder of runs"
    )
    parser.add_argument(
        "--out", type=Path, required=True, metavar="FILE.html", help="the page to write"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """`python -m canon_pretrain.run plot` with parsed arguments. Raises UserError."""
    count = len(plot(arguments.runs, arguments.out)["runs"])
    size = arguments.out.stat().st_size / 1e6
    print(f"plot: {arguments.out} ({count} run{'s' * (count > 1)}, {size:.1f} MB)")
    return 0
