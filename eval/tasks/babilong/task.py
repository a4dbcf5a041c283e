"""The Babilong tasks for the YAML files here: documents, prompts, score (spec/eval.md section 3).

The layout of a prompt is the specification's, the wording ours (prompts.toml), a file's like it,
lm_eval's own or the paper's release's; whatever it is from is read as data and never run. Answers
that list every place, or that repeat the question's, are not right; for the harness's own they are.
"""

import ast
import hashlib
import json
import string
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any

import datasets
from pydantic import Field, StringConstraints

from canon_pretrain.core.errors import UserError, check_choice
from canon_pretrain.core.files import parse_record
from eval.staging.catalogue import BABILONG_TASKS
from eval.staging.staged import load_staged
from eval.task_tokenizer import check_fit

ANSWER_TOKENS = 20
"""Of the greedy answer; `max_gen_toks` in _base.yaml."""
PLACES = ("bathroom", "bedroom", "garden", "hallway", "kitchen", "office")
GIVING = ("Bill", "Fred", "Jeff", "Mary", "apple", "football", "milk")
LABELS = {"qa1": PLACES, "qa2": PLACES, "qa3": PLACES, "qa4": PLACES, "qa5": GIVING}
ENDS = (".", "<context>", "<example>")
"""What an answer ends before: its sentence, or a further example that the model makes up."""
OWN_PROMPTS = Path(__file__).with_name("prompts.toml")
LM_EVAL = "lm_eval"
"""Instead of a file: the wording of the installed lm_eval package."""
RELEASED, RELEASED_LAYOUT = "DEFAULT_PROMPTS_ZEYUAN", "DEFAULT_TEMPLATE_ZEYUAN"
"""What the prompts.py of the paper's release calls them."""
LAYOUT = (
    "{instruction}\n\n{examples}\n\n<context>\n{context}\n</context>\n\n"
    "Question: {question}\nAnswer:"
)
EXAMPLE = "<context>\n{}\n</context>\n\nQuestion: {}\nAnswer: {}."
Text = Annotated[str, StringConstraints(strip_whitespace=True, min_length=1)]


def load(
    *, qa: str, context: str, staged: str | None = None, **metadata: Any
) -> dict[str, datasets.Dataset]:
    """Return the split `test` of `qa` at length `context` ("4k"): lm_eval's `custom_dataset`.

    Metadata: `staged`; `babilong_prompts`, "lm_eval" or a file (read_prompts); `max_length`,
    `tokenizer` and `pretrained` to check that prompts fit. Raises UserError if one of these does
    not serve, or a row is none of the task's.
    """
    given = metadata.get("babilong_prompts")
    prompts = read_prompts(qa, given or None)
    key = f"babilong_{qa}_{context}"
    documents = []
    for place, row in enumerate(load_staged(key, staged)[qa]):
        # the question's last space is in the paper's prompts too
        question, target = row["question"], row["target"].strip()
        if target.lower() not in {label.lower() for label in LABELS[qa]}:
            raise UserError(
                f"{key}, row {place}: the target {target!r} is none of {', '.join(LABELS[qa])}: "
                "this is not the data set that the task is about"
            )
        documents.append(
            {
                "task": qa,
                "prompt": prompts.of(row["input"], question),
                "question": question,
                "target": target,
                "prompts": prompts.sha256,
            }
        )
    texts = (document["prompt"] for document in documents)
    check_fit(key, texts, answer_tokens=ANSWER_TOKENS, metadata=metadata)
    return {"test": datasets.Dataset.from_list(documents)}


def score(document: dict[str, Any], answers: list[str]) -> dict[str, float]:
    """Return the metric `acc` of one document: lm_eval's `process_results`."""
    right = is_right(document["task"], document["question"], document["target"], answers[0])
    return {"acc": float(right)}


def is_right(task: str, question: str, target: str, answer: str) -> bool:
    """Return whether the labels that only the answer names are exactly the target.

    Case is ignored. A label is named if it occurs in the text: "bedrooms" names the bedroom.
    """
    answer, question = answer.lower(), question.lower()
    for end in ENDS:
        answer = answer.partition(end)[0]
    labels = {label.lower() for label in LABELS[task]}
    named = {label for label in labels if label in answer and label not in question}
    return named == {target.lower()}


@dataclass(frozen=True)
class Example:
    """One answered question of an instruction."""

    context: Text
    question: Text
    answer: Text


@dataclass(frozen=True)
class Section:
    """One task's part of a file like prompts.toml."""

    instruction: Text
    examples: Annotated[tuple[Example, ...], Field(min_length=1)]
    answer_format: Text | None = None


@dataclass(frozen=True)
class Prompts:
    """One task's prompts: the text before a question's context, between the two, and after it."""

    before: str
    between: str
    after: str

    @property
    def sha256(self) -> str:
        """The name of the prompts in what is recorded."""
        words = json.dumps([self.before, self.between, self.after])
        return hashlib.sha256(words.encode()).hexdigest()

    def of(self, context: str, question: str) -> str:
        """Return the whole prompt of one question. Both are kept as they are in the data."""
        return f"{self.before}{context}{self.between}{question}{self.after}".strip()


def read_prompts(task: str, source: str | Path | None = None) -> Prompts:
    """Return the prompts of `task` (qa1 to qa5).

    `source`: None for our own; "lm_eval"; a .py file, read as the paper's release; or another file
    like prompts.toml. Raises UserError if it is not whole, or has something that is no part.
    """
    if str(source) == LM_EVAL:
        return _of_section(_lm_eval_section(task), f"babilong_prompts {LM_EVAL} [{task}]")
    path = Path(source or OWN_PROMPTS)
    where = f"babilong_prompts {path}"
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"{where}: cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise UserError(f"{where}: is not UTF-8 text: {error}") from None
    if path.suffix == ".py":
        return _of_release(text, task, where)
    try:
        content = tomllib.loads(text)
    except ValueError as error:
        raise UserError(
            f"{where}: is not TOML: {error}. Start from a copy of {OWN_PROMPTS}"
        ) from None
    _only(content, BABILONG_TASKS, where)
    section = content.get(task)
    if not isinstance(section, dict):
        raise UserError(f"{where}: has no section [{task}], which the task asks for")
    return _of_section(section, f"{where} [{task}]")


def _of_section(section: Mapping[str, Any], where: str) -> Prompts:
    _only(section, (f.name for f in fields(Section)), where)
    for example in section.get("examples") or ():
        _only(example, (f.name for f in fields(Example)), f"{where} example")
    try:
        found = parse_record(json.dumps(section, default=str), Section)
    except ValueError as error:
        raise UserError(f"{where}: {error}") from None
    for one in found.examples:
        if one.answer.endswith("."):
            raise UserError(
                f"{where}: the example's answer {one.answer!r} ends with '.': leave it out, the "
                "layout adds it"
            )
    instruction = f"{found.instruction} {found.answer_format or ''}".rstrip()
    examples = (EXAMPLE.format(one.context, one.question, one.answer) for one in found.examples)
    return _laid_out(LAYOUT, {"instruction": instruction, "examples": "\n\n".join(examples)}, where)


def _lm_eval_section(task: str) -> dict[str, Any]:
    """Return the instruction and examples of lm_eval's own task, as prompts.toml names them."""
    import lm_eval.tasks
    from lm_eval.tasks._yaml_loader import load_yaml

    path = Path(lm_eval.tasks.__file__).with_name("babilong") / f"babilong_{task}.yaml"
    try:
        found = load_yaml(path, resolve_func=False, recursive=False)
        examples = [
            # the layout adds the final "."
            {
                "context": one["input"],
                "question": one["question"],
                "answer": one["target"].rstrip("."),
            }
            for one in found["fewshot_config"]["samples"]
        ]
        return {"instruction": found["description"], "examples": examples}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"babilong_prompts {LM_EVAL}: {path} has no instruction and examples ({error!r}), as "
            "version 0.4.13 has: install that, or give a file"
        ) from None


def _of_release(text: str, task: str, where: str) -> Prompts:
    """Return the prompts of a Python file with literals RELEASED (and RELEASED_LAYOUT)."""
    found = _literals(text, (RELEASED, RELEASED_LAYOUT), where)
    tasks = found.get(RELEASED)
    parts = tasks.get(task) if isinstance(tasks, dict) else None
    if not isinstance(parts, dict):
        raise UserError(f"{where}: has no {RELEASED}[{task!r}], as the paper's release has")
    where = f"{where} {RELEASED}[{task!r}]"
    texts: dict[str, str] = {}
    for name in ("instruction", "examples", "post_prompt"):
        value = parts.get(name, "")
        if not isinstance(value, str) or not (value.strip() or name == "post_prompt"):
            raise UserError(f"{where}: {name} is {value!r}, expected a text")
        texts[name] = value
    layout = found.get(RELEASED_LAYOUT)
    if layout is None:
        texts = {name: text.strip() for name, text in texts.items()}
        texts["instruction"] = f"{texts['instruction']} {texts['post_prompt']}".strip()
        layout = LAYOUT
    return _laid_out(layout, texts, where)


def _literals(text: str, names: tuple[str, ...], where: str) -> dict[str, Any]:
    """Return the values of these names at the top level of a Python source, without running it."""
    values: dict[str, Any] = {}
    try:
        assigned = (node for node in ast.parse(text).body if isinstance(node, ast.Assign))
        for node in assigned:
            for target in node.targets:
                if isinstance(target, ast.Name) and target.id in names:
                    values[target.id] = ast.literal_eval(node.value)
        return values
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError) as error:
        raise UserError(
            f"{where}: expected Python source in which {' and '.join(names)} are literal texts "
            f"and dictionaries, as in the paper's release ({type(error).__name__}: {error}). "
            f"Nothing of it is run; write the prompts like {OWN_PROMPTS} instead"
        ) from None


def _laid_out(layout: object, parts: Mapping[str, str], where: str) -> Prompts:
    """Return `layout` with all fields filled in except {context} and {question}."""
    pieces, places = [""], []
    try:
        for literal, field, *_ in string.Formatter().parse(str(layout)):
            pieces[-1] += literal
            if field in ("context", "question"):
                places.append(field)
                pieces.append("")
            elif field is not None:
                pieces[-1] += parts[field]
    except (ValueError, KeyError):
        places = []
    if places != ["context", "question"]:
        raise UserError(
            f"{where}: the layout {layout!r} is not one of "
            f"{', '.join(f'{{{name}}}' for name in parts)}, then {{context}}, then {{question}}"
        )
    return Prompts(*pieces)


def _only(found: Any, names: Iterable[str], where: str) -> None:
    """Raise UserError for a key of a table that is none of `names`."""
    known = list(names)
    for name in found if isinstance(found, dict) else ():
        check_choice(f"{where}: key", name, known)
