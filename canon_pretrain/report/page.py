"""A report as a self-contained HTML page and as Markdown: both show the blocks of sections.py."""

import re
from pathlib import Path
from typing import Any

from canon_pretrain.core import page
from canon_pretrain.report.sections import Content, entries, report_blocks

DIGITS = 7
"""Significant digits of a value that the page's script draws."""
TEMPLATES = Path(__file__).parent / "templates"


def html_page(content: Content) -> str:
    """Return the self-contained page of `report_content`."""
    return page.html_page(
        TEMPLATES,
        "report",
        _plotted(content),
        filters={},
        scripts=("tables.js", "lazy.js", "scores.js"),
        title=content["title"],
        blocks=report_blocks(content),
    )


def markdown_page(content: Content) -> str:
    """Return the same as Markdown; curves are there as their key figures."""
    environment = page.environment(TEMPLATES, {"md": escape_markdown}, autoescape=False)
    template = environment.get_template("report.md.jinja")
    return template.render(title=content["title"], blocks=report_blocks(content))


def escape_markdown(text: object) -> str:
    """Return `text` on one line, without any character that could begin markup or a table cell."""
    line = " ".join(str(text).split())
    line = line.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return re.sub(r"([\\`*\[\]|~])", r"\\\1", line)


def _plotted(content: Content) -> dict[str, Any]:
    """What the page's script draws, in few bytes: report.json has it unrounded."""
    late = content["late_loss"]
    return {
        "runs": [{name: run[name] for name in ("label", "restarts")} for run in content["runs"]],
        "entries": entries(content),
        "curves": [
            {**curve, "lines": [_short_line(line) for line in curve["lines"]]}
            for curve in content["curves"]
        ],
        "score_curves": [
            {"lines": [{k: _once(_rounded(v)) for k, v in line.items()} for line in curve["lines"]]}
            for curve in content["score_curves"]
        ],
        "late_loss": late
        and {
            "tokens": _rounded(late["tokens"]),
            "lines": [{k: _rounded(v) for k, v in line.items()} for line in late["lines"]],
        },
        "lengths": content["lengths"],
        "held_out": content["held_out"],
    }


def _short_line(line: Content) -> dict[str, Any]:
    """Of a training curve: rounded, with one number for its tokens if each step has as many."""
    short = {"run": line["run"], "figures": line["figures"], "values": _rounded(line["values"])}
    steps, tokens = line["steps"], line["tokens"]
    ratios = {t / s for s, t in zip(steps, tokens, strict=True) if s}
    if len(ratios) == 1 and 0 not in steps:
        return {**short, "steps": steps, "tokens_a_step": ratios.pop()}
    return {**short, "steps": steps, "tokens": tokens}


def _once(values: Any) -> Any:
    """One value for a list that repeats it: the items of a task, a limit that there is not."""
    alike = isinstance(values, list) and len(values) > 1 and values == [values[0]] * len(values)
    return values[0] if alike else values


def _rounded(values: Any) -> Any:
    if not isinstance(values, list):
        return values
    return [float(f"{v:.{DIGITS}g}") if isinstance(v, float) else v for v in values]
