"""What a Babilong question looks like: the parts from prompts.toml (or a file like it), and layout.

Used by task.py, which makes the documents. The layout is that of spec/eval.md section 3; the parts'
wording is ours and can be replaced. Pure but for reading the file.
"""

import hashlib
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from canon_pretrain.errors import UserError, nearest
from eval.staging.catalogue import BABILONG_TASKS

OWN_PROMPTS = Path(__file__).with_name("prompts.toml")
PARTS = ("instruction", "answer_format", "examples")
EXAMPLE_PARTS = ("context", "question", "answer")


@dataclass(frozen=True)
class Prompts:
    """What stands before the context of one task's questions.

    `head` is the instruction, ending with the sentence on the answer's format, and the examples;
    `sha256` is that of `head`: it names the prompts in what is recorded.
    """

    head: str

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.head.encode()).hexdigest()

    def of(self, context: str, question: str) -> str:
        """The whole prompt of one question."""
        return f"{self.head}\n\n{ask_about(context, question)}"


def ask_about(context: str, question: str) -> str:
    """The context and its question: the end of a prompt, and the beginning of an example."""
    return f"<context>\n{context.strip()}\n</context>\n\nQuestion: {question.strip()}\nAnswer:"


def read_prompts(task: str, path: Path | None = None) -> Prompts:
    """The prompts of `task` (qa1 to qa5) in the file `path`, by default our own.

    Raises UserError where the file cannot be read, lacks the task or a part of it, or has something
    that is no part.
    """
    path = path or OWN_PROMPTS
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"babilong_prompts {path}: cannot be read: {error.strerror}") from None
    except ValueError as error:  # no UTF-8, no TOML
        raise UserError(
            f"babilong_prompts {path}: is not TOML: {error}. Start from a copy of {OWN_PROMPTS}"
        ) from None
    where = f"babilong_prompts {path}"
    _only(content, BABILONG_TASKS, where)
    section = content.get(task)
    if not isinstance(section, dict):
        raise UserError(f"{where}: has no section [{task}], which the task asks for")
    where = f"{where} [{task}]"
    _only(section, PARTS, where)
    instruction = _text(section, "instruction", where)
    if "answer_format" in section:
        instruction = f"{instruction} {_text(section, 'answer_format', where)}"
    examples = section.get("examples")
    if not isinstance(examples, list) or not examples:
        raise UserError(f"{where}: expected at least one [[{task}.examples]]")
    return Prompts("\n\n".join([instruction, *(_example(one, where) for one in examples)]))


def _example(example: Any, where: str) -> str:
    if not isinstance(example, dict):
        raise UserError(f"{where}: an example is {example!r}, expected a table of {EXAMPLE_PARTS}")
    _only(example, EXAMPLE_PARTS, f"{where} example")
    context, question, answer = (_text(example, part, where) for part in EXAMPLE_PARTS)
    if answer.endswith("."):
        raise UserError(
            f"{where}: the example's answer {answer!r} ends with '.': leave it out, the layout "
            "adds it"
        )
    return f"{ask_about(context, question)} {answer}."


def _text(section: Mapping[str, Any], part: str, where: str) -> str:
    value = section.get(part)
    if not isinstance(value, str) or not value.strip():
        raise UserError(f"{where}: {part} is {value!r}, expected a text")
    return value.strip()


def _only(found: Mapping[str, Any], known: tuple[str, ...], where: str) -> None:
    for name in found:
        if name not in known:
            near = nearest(name, known)
            raise UserError(
                f"{where}: unknown key '{name}'{f', did you mean {near!r}?' if near else ''}; "
                f"known: {', '.join(known)}"
            )
