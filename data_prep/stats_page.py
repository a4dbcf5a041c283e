"""The page of `python -m data_prep stats --html`: tables and plots in one self-contained file."""

from pathlib import Path
from typing import Any

from canon_pretrain.core import page
from data_prep.stats_table import facts, notes, ratio, span

TEMPLATES = Path(__file__).parent / "templates"
PLOTTED = ("split", "documents", "tokens", "lengths", "frequencies", "groups")


def html_page(content: dict[str, Any]) -> str:
    """The self-contained page of `stats.data_content`."""
    return page.html_page(
        TEMPLATES,
        "stats",
        [{key: split[key] for key in PLOTTED} for split in content["splits"]],
        filters={"facts": facts, "notes": notes, "span": span},
        ratio=ratio,
        content=content,
    )
