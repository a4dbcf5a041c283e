"""Read the prompts of a BABILong prompts.py: texts and dicts of texts, never executed.

The file assigns texts, f-strings of earlier texts and dicts of both to names; all else in it, such
as functions and imports, is skipped.
"""

import ast
from typing import Any

# (prompts by task, template or templates by task): of the paper's release, and of BABILong itself
NAMES = (
    ("DEFAULT_PROMPTS_ZEYUAN", "DEFAULT_TEMPLATE_ZEYUAN"),
    ("DEFAULT_PROMPTS", "DEFAULT_TEMPLATE"),
)
PARTS = ("instruction", "examples", "post_prompt")
MAX_TEXT = 1 << 20  # characters: names that double each other would fill the memory


def read_release(source: str, task: str) -> tuple[dict[str, str], str | None]:
    """Return the texts of PARTS of `task`, and its template, None if the source has none.

    Raises SyntaxError, KeyError and ValueError.
    """
    values = _assigned_values(ast.parse(source))
    # the first pair of names whose prompts the file has; without any, it lacks the first
    pairs = [pair for pair in NAMES if pair[0] in values]
    prompts_name, template_name = pairs[0] if pairs else NAMES[0]

    section = {"post_prompt": "", **values[prompts_name][task]}
    parts = {name: section[name] for name in PARTS}
    for name, text in parts.items():
        if not isinstance(text, str) or not (text.strip() or name == "post_prompt"):
            raise ValueError(f"{prompts_name}: {name} is {text!r:.80}, expected a text")

    template = values.get(template_name)
    if isinstance(template, dict):
        template = template[task]
    return parts, template


def _assigned_values(module: ast.Module) -> dict[str, Any]:
    """Return the names that the module assigns texts and dicts of texts to."""
    values: dict[str, Any] = {}
    for statement in module.body:
        match statement:
            case (
                ast.Assign(targets=[ast.Name(id=name)], value=node)
                | ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as node)
            ):
                try:
                    values[name] = _value(node, values)
                except ValueError:
                    # no text: the name no longer has an earlier one either
                    values.pop(name, None)
            case ast.FunctionDef() | ast.ClassDef() | ast.Import() | ast.ImportFrom():
                pass
            case _:
                # it may change any variable that it names
                for part in ast.walk(statement):
                    if isinstance(part, ast.Name):
                        values.pop(part.id, None)
    return values


def _value(node: ast.expr, values: dict[str, Any]) -> Any:
    """Return the text, or the dict of texts, that an expression is. Raises ValueError."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.Name(id=name) if name in values:
            return values[name]
        case ast.JoinedStr(values=pieces):
            return _join([_value(piece, values) for piece in pieces])
        case ast.FormattedValue(value=inner, conversion=-1, format_spec=None):
            return _value(inner, values)
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return _join([_value(left, values), _value(right, values)])
        case ast.Dict(keys=keys, values=items) if None not in keys:
            pairs = zip(keys, items, strict=True)
            return {_value(key, values): _value(item, values) for key, item in pairs if key}
        case _:
            source = ast.unparse(node)
            raise ValueError(f"line {node.lineno}: {source[:40]} is not a text")


def _join(texts: list[Any]) -> str:
    are_texts = all(isinstance(text, str) for text in texts)
    if not are_texts or sum(map(len, texts)) > MAX_TEXT:
        raise ValueError(f"expected texts of at most {MAX_TEXT} characters")
    return "".join(texts)
