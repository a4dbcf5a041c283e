"""Text for users: printable characters, durations and sizes."""

import unicodedata


class Rendered(str):
    """Text whose control characters are our own: colors, and moves of the cursor."""


def printable(text: str, keep: str = "") -> str:
    """Replace what can't be shown or encoded, except for the characters in `keep`, by U+FFFD."""
    if text.isprintable():
        return text
    return "".join(
        c if c.isprintable() or c in keep or unicodedata.category(c) == "Zs" else "\ufffd"
        for c in text
    )


def duration(seconds: float) -> str:
    """Return `seconds` in the largest fitting unit: 12 s, 12 min, 5.2 h, 3.1 d."""
    for unit, scale in (("s", 1), ("min", 60)):
        if seconds < 100 * scale:
            return f"{seconds / scale:.0f} {unit}"
    hours = seconds / 3600
    return f"{hours:.1f} h" if hours < 48 else f"{hours / 24:,.1f} d"


def size(num_bytes: float) -> str:
    """Return `num_bytes` in decimal units, as `df -H` shows them: 340 B, 1.25 MB, 15.36 GB."""
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= scale:
            return f"{num_bytes / scale:,.2f} {unit}"
    return f"{num_bytes:.0f} B"
