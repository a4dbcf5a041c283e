"""Self-contained HTML pages with plots: NAME.html, .css and .js extend those of templates/page.*.

A page includes plotly.js; its Content-Security-Policy allows no network access and only scripts
whose hashes it lists.
"""

import base64
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from plotly.offline import get_plotlyjs

from canon_pretrain.core.terminal import printable

COMMON = Path(__file__).parent / "templates"


def environment(templates: Path, *, autoescape: bool, **filters: Callable[..., Any]) -> Environment:
    """Return the environment of `templates` and the common ones; undefined names are errors.

    Control characters of values are replaced: a page shows text of logs, configs and models.
    """
    made = Environment(
        loader=FileSystemLoader([templates, COMMON]),
        autoescape=autoescape,
        undefined=StrictUndefined,
        finalize=_without_controls,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    compact = {"allow_nan": False, "ensure_ascii": False, "separators": (",", ":")}
    made.policies["json.dumps_kwargs"] = compact
    made.filters |= filters
    return made


def _without_controls(value: Any) -> Any:
    """Return text with control characters replaced, except in our own markup and JSON."""
    is_text = isinstance(value, str) and not isinstance(value, Markup)
    return printable(value, "\n\t") if is_text else value


def html_page(templates: Path, name: str, plotted: Any, *, dark: bool = True, **values: Any) -> str:
    """Render the page `name` with `values`; its script plots `plotted` (JSON)."""
    # autoescape covers every value; only our own files and plotly's are marked as safe
    sheets = [COMMON / "page.css", *[COMMON / "dark.css"] * dark, templates / f"{name}.css"]
    scripts = [path.read_text("utf-8") for path in (COMMON / "page.js", templates / f"{name}.js")]
    scripts.insert(0, get_plotlyjs())
    digests = [base64.b64encode(hashlib.sha256(x.encode()).digest()).decode() for x in scripts]
    template = environment(templates, autoescape=True).get_template(f"{name}.html")
    return template.render(
        **values,
        plotted=plotted,
        color_scheme="light dark" if dark else "light",
        style=Markup("".join(path.read_text("utf-8") for path in sheets)),
        scripts=[Markup(script) for script in scripts],
        script_hashes=Markup(" ".join(f"'sha256-{digest}'" for digest in digests)),
    )
