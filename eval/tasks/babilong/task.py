"""The Babilong tasks for the YAML files: documents, prompts, score."""

import hashlib
import json
import string
import sys
import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import datasets
from pydantic import ConfigDict, Field, StringConstraints

from canon_pretrain.core.errors import UserError
from canon_pretrain.core.files import parse_record
from eval.staged import load_staged
from eval.task_tokenizer import check_fit, known_max_length, lengths_over
from eval.tasks.babilong.release import read_release

ANSWER_TOKENS = 20  # of the greedy answer; `max_gen_toks` in _base.yaml
PLACE_LABELS = ("bathroom", "bedroom", "garden", "hallway", "kitchen", "office")
QA5_LABELS = ("Bill", "Fred", "Jeff", "Mary", "apple", "football", "milk")
LABELS = {
    "qa1": PLACE_LABELS,
    "qa2": PLACE_LABELS,
    "qa3": PLACE_LABELS,
    "qa4": PLACE_LABELS,
    "qa5": QA5_LABELS,
}
# text at which an answer ends: the end of its sentence, or an example that the model generates
ENDS = (".", "<context>", "<example>")
OWN_PROMPTS = Path(__file__).with_name("prompts.toml")
LM_EVAL = "lm_eval"  # instead of a file: the prompts of the installed lm_eval package
LAYOUT = (
    "{instruction}\n\n{examples}\n\n<context>\n{context}\n</context>\n\n"
    "Question: {question}\nAnswer:"
)
EXAMPLE = "<context>\n{}\n</context>\n\nQuestion: {}\nAnswer: {}."
PARSER_ERRORS = (AttributeError, RecursionError, MemoryError)
TaskName = Annotated[str, StringConstraints(pattern="^qa[1-5]$")]
Text = Annotated[str, StringConstraints(strip_whitespace=True, min_length=1)]


@dataclass(frozen=True)
class Document:
    """One question of a task, and the hash of its prompts; a row of lm_eval's data set."""

    task: str
    prompt: str
    question: str
    target: str
    prompts: str


def load(
    *, qa: str, context: str, staged: str | None = None, **metadata: Any
) -> dict[str, datasets.Dataset]:
    """Return the split `test` of `qa` at length `context` ("4k"): lm_eval's `custom_dataset`."""
    prompts = read_prompts(qa, metadata.get("babilong_prompts"))
    key = f"babilong_{qa}_{context}"
    labels = {label.lower() for label in LABELS[qa]}

    documents: list[Document] = []
    for number, row in enumerate(load_staged(key, staged)):
        # the question's trailing space is also in the paper's prompts
        question = row["question"]
        target = row["target"].strip()
        if target.lower() not in labels:
            raise UserError(
                "babilong.target",
                f"{key}, row {number}: target {target!r}, expected one of {LABELS[qa]}",
                row=number,
            )
        prompt = prompts.of(row["input"], question)
        documents.append(Document(qa, prompt, question, target, prompts.sha256))

    # Refuse prompts that lm_eval would cut: the facts may be at their beginning.
    room = (known_max_length(metadata) or sys.maxsize) - ANSWER_TOKENS
    too_long = lengths_over((document.prompt for document in documents), room, metadata)
    check_fit(key, max(too_long, default=0), answer_tokens=ANSWER_TOKENS, metadata=metadata)
    return {"test": datasets.Dataset.from_list([asdict(document) for document in documents])}


def score(document: dict[str, Any], answers: list[str]) -> dict[str, float]:
    """Return the metric `acc` of one document: lm_eval's `process_results`."""
    item = Document(**document)
    right = is_right(item.task, item.question, item.target, answers[0])
    return {"acc": float(right)}


def is_right(task: str, question: str, target: str, answer: str) -> bool:
    """Return whether the target is the only label in the answer that the question lacks."""
    answer = answer.lower()
    for end in ENDS:
        answer = answer.partition(end)[0]

    question = question.lower()
    labels = {label.lower() for label in LABELS[task]}
    new_labels = {label for label in labels if label in answer and label not in question}
    return new_labels == {target.lower()}


@dataclass(frozen=True)
class Example:
    """One worked example; the layout adds the answer's final "."."""

    context: Text
    question: Text
    answer: Annotated[Text, StringConstraints(pattern=r"[^.]$")]
    __pydantic_config__ = ConfigDict(extra="forbid")


@dataclass(frozen=True)
class Section:
    """One task's part of a file like prompts.toml."""

    instruction: Text
    examples: Annotated[tuple[Example, ...], Field(min_length=1)]
    answer_format: Text = ""
    __pydantic_config__ = ConfigDict(extra="forbid")


@dataclass(frozen=True)
class Prompts:
    """One task's prompts: the text before a question's context, between the two, and after it."""

    before: str
    between: str
    after: str

    @property
    def sha256(self) -> str:
        """The hash that identifies the prompts in results."""
        content = json.dumps([self.before, self.between, self.after])
        return hashlib.sha256(content.encode()).hexdigest()

    def of(self, context: str, question: str) -> str:
        """Return one prompt; contexts are stripped as in the paper, questions are not."""
        context = context.strip()
        prompt = f"{self.before}{context}{self.between}{question}{self.after}"
        return prompt.strip()


def read_prompts(task: str, source: str | Path | None = None) -> Prompts:
    """Return the prompts of `task`: our own (None), "lm_eval", a release's .py, or a .toml file."""
    label = f"babilong_prompts {source or OWN_PROMPTS}"
    try:
        if str(source) == LM_EVAL:
            return _of_sections({task: _lm_eval_section(task)}, task)

        text = Path(source or OWN_PROMPTS).read_text(encoding="utf-8")
        if str(source).endswith(".py"):
            return _of_release(text, task)
        return _of_sections(tomllib.loads(text), task)
    except OSError as error:
        raise UserError("babilong.prompts", f"{label}: {error.strerror}") from None
    except (UserError, SyntaxError, ValueError, TypeError, LookupError, *PARSER_ERRORS) as error:
        # the message of a KeyError is the name only
        lacks = "has no " if isinstance(error, KeyError) else ""
        raise UserError(
            "babilong.prompts",
            f"{label} [{task}]: {lacks}{error}. See {OWN_PROMPTS} for the format",
        ) from None


def _of_sections(content: Mapping[str, Any], task: str) -> Prompts:
    """Return the prompts of a file like prompts.toml. Raises UserError and KeyError."""
    sections = parse_record(json.dumps(content, default=str), dict[TaskName, Section])
    section = sections[task]
    examples = [EXAMPLE.format(x.context, x.question, x.answer) for x in section.examples]
    return _fill_layout(
        LAYOUT,
        {
            "instruction": f"{section.instruction} {section.answer_format}".rstrip(),
            "examples": "\n\n".join(examples),
        },
    )


def _lm_eval_section(task: str) -> dict[str, Any]:
    """Return the task's prompts in the installed lm_eval, as a section of prompts.toml."""
    import lm_eval.tasks
    from lm_eval.tasks._yaml_loader import load_yaml

    folder = Path(lm_eval.tasks.__file__).with_name("babilong")
    config = load_yaml(folder / f"babilong_{task}.yaml", resolve_func=False, recursive=False)
    examples = [
        {
            "context": sample["input"],
            "question": sample["question"],
            "answer": sample["target"].rstrip("."),  # the layout adds the final "."
        }
        for sample in config["fewshot_config"]["samples"]
    ]
    return {"instruction": config["description"], "examples": examples}


def _of_release(text: str, task: str) -> Prompts:
    """Return the prompts of a prompts.py; without a template, in the paper's layout."""
    parts, template = read_release(text, task)
    if template is not None:
        return _fill_layout(template, parts)

    # the paper's layout has no field for the text after a question: it joins the instruction
    texts = {name: value.strip() for name, value in parts.items()}
    texts["instruction"] = f"{texts['instruction']} {texts['post_prompt']}".strip()
    return _fill_layout(LAYOUT, texts)


def _fill_layout(layout: object, parts: Mapping[str, str]) -> Prompts:
    """Return the pieces of a layout before, between and after its fields context and question."""
    # Literals and other fields extend the last piece; `context` and `question` begin another one.
    pieces = [""]
    fields: list[str] = []
    for literal, field, spec, conversion in string.Formatter().parse(str(layout)):
        pieces[-1] += literal
        if spec or conversion:
            raise ValueError(f"the layout {layout!r} formats {field}, expected names only")
        if field in ("context", "question"):
            fields.append(field)
            pieces.append("")
        elif field is not None:
            pieces[-1] += parts[field]

    if fields != ["context", "question"]:
        raise ValueError(f"the layout {layout!r} lacks a context, then a question")
    return Prompts(*pieces)
