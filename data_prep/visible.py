"""Text of the data made safe to look at: nothing in it can act on a terminal or hide.

Used by `show` and `stats`. What a document holds was written by anyone: an escape sequence could
move the cursor or set the window's title, a bidirectional override could reorder a line.
"""

import unicodedata

# Cc control, Cf format (bidirectional overrides, zero width), Co private, Cs surrogate, line and
# paragraph separators
_HIDDEN = frozenset({"Cc", "Cf", "Co", "Cs", "Zl", "Zp"})
_PICTURES = 0x2400


def visible(text: str, *, keep: str = "\n\t") -> str:
    """`text` with each control and invisible character, but those in `keep`, replaced by a sign.

    The ASCII controls become Unicode's pictures of them (ESC is ␛), others <U+202E>.
    """
    if text.isprintable():
        return text
    return "".join(c if c in keep or c.isprintable() else _sign(c) for c in text)


def _sign(character: str) -> str:
    code = ord(character)
    if code < 0x20:
        return chr(_PICTURES + code)
    if code == 0x7F:
        return "\N{SYMBOL FOR DELETE}"
    if unicodedata.category(character) in _HIDDEN:
        return f"<U+{code:04X}>"
    # unassigned characters, and spaces other than U+0020: they cannot act, and fonts show them
    return character
