"""The table of error codes, drawn from every error that the product raises."""

import ast
import re

from canon_pretrain.core.errors import UserError
from tests.weight import ROOT, modules

TABLE = ROOT / "canon_pretrain" / "error_codes.txt"


def _kinds(base):
    for kind in base.__subclasses__():
        yield kind.__name__
        yield from _kinds(kind)


def _message(node):
    """The message's text; each value in it is an ellipsis."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(map(_message, node.values))
    return "..."


def _rows():
    named = {"UserError", *_kinds(UserError)} - {"UnreadableFile"}
    calls = [
        call
        for path in modules().values()
        for call in ast.walk(ast.parse(path.read_text()))
        if isinstance(call, ast.Call) and getattr(call.func, "id", "") in named
    ]
    rows = {}
    for call in calls:
        code, message = call.args[0].value, " ".join(_message(call.args[1]).split())
        rows.setdefault(code, []).append(message)
    return rows


def test_the_table_of_error_codes_is_current(request):
    rows = _rows()
    wrong = [code for code in rows if not re.fullmatch(r"[a-z]+\.[a-z0-9_]+", code)]
    assert not wrong
    text = "".join(f"{code:32} {min(messages)[:120]}\n" for code, messages in sorted(rows.items()))
    if request.config.getoption("--snapshot-update"):
        TABLE.write_text(text)
    assert TABLE.read_text() == text
