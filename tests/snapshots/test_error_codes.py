"""The table of error codes, drawn from all errors of the product and of the Slurm scripts."""

import ast
import re

from tests.weight import ROOT, modules

TABLE = ROOT / "canon_pretrain" / "error_codes.txt"


MAX_CHARACTERS = 120
"""Of a message in the table."""


def _error_classes(nodes):
    """Return the names of UserError and its subclasses that have no code of their own."""
    names = {"UserError"}
    classes = [node for node in nodes if isinstance(node, ast.ClassDef)]
    for node in classes * 3:  # levels of subclasses
        if names & {getattr(base, "id", "") for base in node.bases}:
            names.add(node.name)
    return names - {"UnreadableFile"}


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


def _message_argument(call, assignments):
    """Return the expression of the message in a call of an error class."""
    message = call.args[1]
    if isinstance(message, ast.Call) and isinstance(message.func, ast.Name) and message.args:
        message = message.args[0]
    if not isinstance(message, ast.Name):
        return message

    # a name: the last assignment to it before the call
    line_of_last = 0
    value = message
    for node in assignments:
        is_its_name = getattr(node.targets[0], "id", "") == message.id
        if is_its_name and line_of_last < node.lineno < call.lineno:
            line_of_last = node.lineno
            value = node.value
    return value


def _messages_of_python():
    """Yield the code and the message of each error of the product."""
    trees = [list(ast.walk(ast.parse(path.read_text()))) for path in modules().values()]
    error_classes = _error_classes([node for nodes in trees for node in nodes])
    for nodes in trees:
        assignments = [node for node in nodes if isinstance(node, ast.Assign)]
        for node in nodes:
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") in error_classes:
                message = _message(_message_argument(node, assignments))
                yield node.args[0].value, " ".join(message.split())


def _messages_of_scripts():
    """Yield the code and the message of each error of the Slurm scripts."""
    for path in sorted((ROOT / "slurm").glob("*.sh")):
        for code, message in re.findall(r'\bdie ([\w.]+) "(.*)"', path.read_text()):
            yield code, re.sub(r"\$(\{[^}]*\}|\w+)", "...", message)


def _num_letters(message):
    return sum(map(str.isalpha, message[:MAX_CHARACTERS]))


def test_the_table_of_error_codes_is_current(request):
    messages = {}
    for code, message in (*_messages_of_python(), *_messages_of_scripts()):
        assert re.fullmatch(r"[a-z_]+\.[a-z0-9_]+", code)
        messages.setdefault(code, []).append(message)

    # of several messages of a code, the one with the most text
    lines = []
    for code, choices in sorted(messages.items()):
        message = max(sorted(choices), key=_num_letters)
        lines.append(f"{code:32} {message[:MAX_CHARACTERS]}\n")
    text = "".join(lines)

    if request.config.getoption("--snapshot-update"):
        TABLE.write_text(text)
    assert TABLE.read_text() == text
