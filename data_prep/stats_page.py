"""The page of `python -m data_prep stats --html`: tables and plots in one file.

The page holds everything it needs, plotly.js included, and asks the network for nothing: its
Content-Security-Policy forbids that, and any script but the two whose hashes it names.
"""

import base64
import hashlib
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from plotly.offline import get_plotlyjs

from data_prep.stats_table import facts, notes, ratio, span

TEMPLATES = Path(__file__).parent / "templates"


def html_page(content: dict[str, Any]) -> str:
    """The self-contained page of `stats.data_content`."""
    # autoescape covers every value; only files of ours and plotly's are marked as safe
    scripts = [get_plotlyjs(), (TEMPLATES / "stats.js").read_text("utf-8")]
    hashes = [base64.b64encode(hashlib.sha256(s.encode()).digest()).decode() for s in scripts]
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.policies["json.dumps_kwargs"] = {
        "allow_nan": False,
        "ensure_ascii": False,
        "separators": (",", ":"),
    }
    environment.filters |= {"facts": facts, "notes": notes, "span": span}
    environment.globals |= {"ratio": ratio}
    plotted = ("split", "documents", "tokens", "lengths", "frequencies", "groups")
    return environment.get_template("stats.html").render(
        content=content,
        plotted=[{key: split[key] for key in plotted} for split in content["splits"]],
        style=Markup((TEMPLATES / "stats.css").read_text("utf-8")),
        scripts=[Markup(script) for script in scripts],
        script_hashes=Markup(" ".join(f"'sha256-{digest}'" for digest in hashes)),
    )
