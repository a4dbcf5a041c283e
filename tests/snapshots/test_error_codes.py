"""The table of error codes, drawn from all errors of the product and of the Slurm scripts."""

import ast
import re

from tests.weight import ROOT, modules

TABLE = ROOT / "canon_pretrain" / "error_codes.txt"


def _kinds(nodes):
    """Return the names of UserError and its subclasses that have no code of their own."""
    kinds, classes = {"UserError"}, [node for node in nodes if isinstance(node, ast.ClassDef)]
    for node in classes * 3:  # levels of subclasses
        if kinds & {getattr(base, "id", "") for base in node.bases}:
            kinds.add(node.name)
    return kinds - {"UnreadableFile"}


def _message(node):
    """Return the message's text, with an ellipsis for each value."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(map(_message, node.values))
    if isinstance(node, ast.BinOp):
        return _message(node.left) + _message(node.right)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.args:
        return _message(node.args[0])
    return "..."


def _rows():
    trees = [list(ast.walk(ast.parse(path.read_text()))) for path in modules().values()]
    named = _kinds([node for nodes in trees for node in nodes])
    rows = {}
    for nodes in trees:
        assigned = [node for node in nodes if isinstance(node, ast.Assign)]
        for call in nodes:
            if not (isinstance(call, ast.Call) and getattr(call.func, "id", "") in named):
                continue
            message = call.args[1]
            if isinstance(message, ast.Call) and isinstance(message.func, ast.Name):
                message = message.args[0] if message.args else message
            if isinstance(message, ast.Name):  # the last assignment to it before the call
                before = [
                    (node.lineno, node.value)
                    for node in assigned
                    if getattr(node.targets[0], "id", "") == message.id
                    and node.lineno < call.lineno
                ]
                message = max([(0, message), *before], key=lambda pair: pair[0])[1]
            rows.setdefault(call.args[0].value, []).append(" ".join(_message(message).split()))
    for path in sorted((ROOT / "slurm").glob("*.sh")):
        for code, message in re.findall(r'\bdie ([\w.]+) "(.*)"', path.read_text()):
            rows.setdefault(code, []).append(re.sub(r"\$(\{[^}]*\}|\w+)", "...", message))
    return rows


def test_the_table_of_error_codes_is_current(request):
    rows = _rows()
    wrong = [code for code in rows if not re.fullmatch(r"[a-z_]+\.[a-z0-9_]+", code)]
    assert not wrong
    letters = lambda message: sum(map(str.isalpha, message[:120]))  # noqa: E731
    longest = {code: max(sorted(each), key=letters)[:120] for code, each in rows.items()}
    text = "".join(f"{code:32} {message}\n" for code, message in sorted(longest.items()))
    if request.config.getoption("--snapshot-update"):
        TABLE.write_text(text)
    assert TABLE.read_text() == text
