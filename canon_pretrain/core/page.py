"""HTML pages with plots: NAME.html, .css and .js of a folder extend those of templates/page.*.

Without a NAME.js, templates/figures.js draws what is plotted: figures by the name of their place.

A page is small and works offline: plotly.js is next to it, once for all pages of a folder. Its
Content-Security-Policy allows scripts of the page's folder or site, and those whose hashes it
lists; no request to anywhere else.
"""

import base64
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from plotly.offline import get_plotlyjs, get_plotlyjs_version

from canon_pretrain.core.files import write_atomic
from canon_pretrain.core.terminal import printable

COMMON = Path(__file__).parent / "templates"


def environment(templates: Path, *, autoescape: bool, **filters: Callable[..., Any]) -> Environment:
    """Return the environment of `templates` and the common ones; undefined names are errors.

    Control characters of values are replaced: a page shows text of logs, configs and models.
    """
    page_environment = Environment(
        loader=FileSystemLoader([templates, COMMON]),
        autoescape=autoescape,
        undefined=StrictUndefined,
        finalize=_without_controls,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    # JSON within a page: compact, and JavaScript has no NaN in JSON
    page_environment.policies["json.dumps_kwargs"] = {
        "allow_nan": False,
        "ensure_ascii": False,
        "separators": (",", ":"),
    }
    page_environment.filters |= filters
    return page_environment


def _without_controls(value: Any) -> Any:
    """Return text with control characters replaced, except in our own markup and JSON."""
    if isinstance(value, str) and not isinstance(value, Markup):
        return printable(value, "\n\t")
    return value


def write_page(
    path: Path, templates: Path, name: str, plotted: Any, *, dark: bool = True, **values: Any
) -> None:
    """Write the page `name` of `templates` to `path`, and plotly.js next to it, once for all.

    `values` are those of the template; `plotted` (JSON) is what its script draws.
    """
    library = path.with_name(f"plotly-{get_plotlyjs_version()}.min.js")
    source = get_plotlyjs().encode()
    if not library.exists() or library.stat().st_size != len(source):
        write_atomic(library, source)

    # A page's own sheet comes last: its rules win.
    sheets = [COMMON / "page.css", templates / f"{name}.css"]
    if dark:
        sheets.insert(1, COMMON / "dark.css")
    drawing_script = templates / f"{name}.js"
    if not drawing_script.exists():
        drawing_script = COMMON / "figures.js"
    scripts = [script.read_text("utf-8") for script in (COMMON / "page.js", drawing_script)]

    # The Content-Security-Policy allows scripts by these hashes. Autoescape covers every value:
    # only our own files are marked as safe.
    digests = [hashlib.sha256(script.encode()).digest() for script in scripts]
    sources = [f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests]
    template = environment(templates, autoescape=True).get_template(f"{name}.html")
    page = template.render(
        **values,
        plotted=plotted,
        library=library.name,
        color_scheme="light dark" if dark else "light",
        style=Markup("".join(sheet.read_text("utf-8") for sheet in sheets)),
        scripts=[Markup(script) for script in scripts],
        script_hashes=Markup(" ".join(sources)),
    )
    write_atomic(path, page.encode())
