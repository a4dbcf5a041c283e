"""The items of the JRT tasks: staged rows, cut with the evaluated model's tokenizer, as prompts.

`load` is lm_eval's `custom_dataset`: it passes the task's metadata and dataset_kwargs. Options come
through metadata (`eval run --option NAME=VALUE`, `lm_eval --metadata '{"NAME": VALUE}'`):

    jrt_tokens           the tokens that a context is cut to (950)
    jrt_swde_context     the field that is cut, of one data set: jrt_swde_, jrt_fda_, jrt_squad_,
                         jrt_triviaqa_, jrt_nq_, jrt_drop_ (text; of the last three context)
    jrt_swde_answers     the fields that it is cut around, "key,value" or ["key", "value"]; if there
                         are none (TriviaQA, DROP) its first tokens are kept and no row is dropped
"""

import functools
import hashlib
import json
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import datasets

from canon_pretrain.core.errors import UserError, check_choice
from eval.staging.staged import load_staged, staged_folder, staged_sha256
from eval.task_tokenizer import (
    TaskTokenizer,
    known_max_length,
    lengths_beyond,
    task_tokenizer,
)
from eval.tasks.jrt.cut import CENTRES, NUM_TOKENS, contains, cut

SPLIT = "validation"
ANSWER_TOKENS = 48
ALTERNATIVES, TOKEN_POSITION = "alt_answers", "tok_pos"
"""Fields that a data set may have: further answers to look for, and where the answer is."""
OPTION = "jrt_"
# below its own name the harness shows what is logged
LOG = logging.getLogger(f"lm_eval.{__name__}")
Row = Mapping[str, Any]
Template = Callable[[Row], str]

SUMMARY = "Summary of information above"
"""What begins SWDE's own summary, which holds the answers."""
MARKS = re.compile(r"\[PAR\]|\[DOC\]|\[TLE\]")
QUESTION = "Question:"


# -- prompts --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Style:
    """One data set: the field that is cut, those it is centred on, the labels', and its prompts.

    `clean` is applied to `context` first. Rows of one `passage` share a source, unless a field of
    `documents` says so.
    """

    context: str
    answers: tuple[str, ...]
    labels: str
    once: Template
    twice: Template
    passage: Template
    clean: Callable[[str], str] = str.strip
    documents: tuple[str, ...] = ()


def without_trailing(text: str, copy: str) -> str:
    """`text` without the copies of `copy` at its end, case ignored, and without spaces there."""
    text, copy = text.rstrip(), copy.strip()
    pattern = re.compile(re.escape(copy), re.IGNORECASE)
    while copy and pattern.fullmatch(text, max(0, len(text) - len(copy))):
        text = text[: -len(copy)].rstrip()
    return text


def _key(row: Row) -> str:
    key = row["key"].strip()
    return key[:1].upper() + key[1:]


def _keyed_text(row: Row) -> str:
    return without_trailing(row["text"], f"{row['key'].strip()}:").strip()


def _keyed_twice(row: Row) -> str:
    text = _keyed_text(row).strip(".").strip()
    return f"Information about {_key(row)}. {text}.\n{text}. {_key(row)}:"


def _squad_context(row: Row) -> str:
    return str(row["context"]).partition(QUESTION)[0]


def _asked_text(row: Row) -> str:
    return without_trailing(row["context"], row["question"]).strip()


def _asked(row: Row) -> str:
    return f"{_asked_text(row).strip('.')}. {row['question'].strip()}"


def _asked_twice(row: Row, end: str = "") -> str:
    """Return the prompt; `end` is cut off the first question."""
    text, first = _asked_text(row).strip(".").strip(), row["orig_question"]
    return f"{first.strip(end) if end else first} {text}.\n{text}. {row['question'].strip()}"


def _unmarked(made: Template) -> Template:
    """`made` of a row whose context is without TriviaQA's marks, which upstream cuts and counts."""
    return lambda row: made({**row, "context": MARKS.sub("", row["context"])})


_PAGE = Style(
    context="text",
    answers=("key", "value"),
    labels="value",
    once=lambda row: f"{_keyed_text(row).strip('.')}. {_key(row)}:",
    twice=_keyed_twice,
    passage=_keyed_text,
    documents=("file_name", "doc_id"),
)
_NQ = Style(
    context="context",
    answers=("answers",),
    labels="answers",
    once=_asked,
    twice=lambda row: _asked_twice(row, end=":"),
    passage=_asked_text,
)
STYLES: dict[str, Style] = {
    "jrt_swde": replace(_PAGE, clean=lambda text: text.partition(SUMMARY)[0]),
    "jrt_fda": _PAGE,
    "jrt_squad": Style(
        context="text",
        answers=("value",),
        labels="value",
        once=lambda row: str(row["text"]).strip(),
        twice=lambda row: f"{row['question']} {_squad_context(row)}\n{str(row['text']).strip()}",
        passage=_squad_context,
    ),
    "jrt_triviaqa": replace(
        _NQ,
        answers=(),
        once=_unmarked(_asked),
        twice=_unmarked(_asked_twice),
        passage=_unmarked(_asked_text),
    ),
    "jrt_nq": _NQ,
    "jrt_drop": replace(_NQ, answers=()),
}
"""By key of the catalogue."""


# -- items ----------------------------------------------------------------------------------------


def load(
    *, dataset: str, twice: bool = False, staged: str | None = None, **metadata: Any
) -> dict[str, datasets.Dataset]:
    """Return the items of one task: row, prompt, labels, target, centre (of the cut) and source.

    Raises UserError for data that is not staged, lacks a field or has no answers, for an unknown
    option and if no tokenizer is named.
    """
    tokenizer, folder, style = task_tokenizer(metadata), staged_folder(staged), STYLES[dataset]
    options, sha256 = _options(dataset, metadata), staged_sha256(dataset, folder)
    rows, counts = _cut_rows(dataset, str(folder), sha256, tokenizer, *options)
    template = style.twice if twice else style.once
    items = []
    for row in rows:
        labels = _texts(_field(row.fields, style.labels, dataset))
        try:
            prompt = template(row.fields)
        except KeyError as error:
            _field(row.fields, error.args[0], dataset)
            raise
        items.append(
            {
                "row": row.number,
                "prompt": prompt,
                "labels": labels,
                "target": next(iter(labels), ""),
                "centre": row.centre,
                "source": row.source,
            }
        )
    max_length = known_max_length(metadata)
    if max_length is not None:
        prompts = [str(item["prompt"]) for item in items]
        long = lengths_beyond(prompts, max_length - ANSWER_TOKENS, metadata)
        counts = counts | {"too_long": len(long)}
    text = ", ".join(f"{name} {count}" for name, count in counts.items())
    level = logging.WARNING if counts.get("too_long") else logging.INFO
    LOG.log(level, "%s%s: %s (%s)", dataset, "_twice" if twice else "", text, tokenizer.name)
    made = datasets.Dataset.from_list(items)
    # rows, dropped (an answer of at most one character), kept, cut, the centres, and too_long
    # (prompts that lose their beginning): the harness makes them part of the results
    made.info.description = json.dumps(counts)
    return {SPLIT: made}


def score(doc: Mapping[str, Any], results: Sequence[str]) -> dict[str, float]:
    """Return the metric `contains` of one item: lm_eval's `process_results`."""
    return {"contains": contains(results[0], doc["labels"])}


def _options(dataset: str, metadata: Mapping[str, Any]) -> tuple[int, str, tuple[str, ...]]:
    """Return how rows are cut: to how many tokens, which field, around what. Raises UserError."""
    style, tokens = STYLES[dataset], f"{OPTION}tokens"
    known = {tokens, *(f"{key}_{name}" for key in STYLES for name in ("context", "answers"))}
    for name in metadata:
        if name.startswith(OPTION):
            check_choice("option", name, sorted(known))
    given = str(metadata.get(tokens, NUM_TOKENS))
    if not given.isdecimal() or int(given) < 2:
        raise UserError(f"{tokens} {given!r}: expected a number of tokens, at least 2")
    answers = metadata.get(f"{dataset}_answers", style.answers)
    names = answers.split(",") if isinstance(answers, str) else answers
    fields = tuple(stripped for name in names if (stripped := str(name).strip()))
    return int(given), str(metadata.get(f"{dataset}_context", style.context)).strip(), fields


@dataclass(frozen=True)
class _CutRow:
    number: int
    fields: dict[str, Any]
    centre: str
    source: str


# a task and its twice variant, which follows it, share the work
@functools.lru_cache(maxsize=2)
def _cut_rows(
    dataset: str,
    folder: str,
    sha256: str,
    tokenizer: TaskTokenizer,
    num_tokens: int,
    field: str,
    around: tuple[str, ...],
) -> tuple[list[_CutRow], dict[str, int]]:
    """Return the kept rows, cut, and what became of all; `sha256` is theirs, for the cache."""
    style = STYLES[dataset]
    rows: list[_CutRow] = []
    counts = {"rows": 0, "dropped": 0, "kept": 0, "cut": 0} | dict.fromkeys(CENTRES, 0)
    for number, raw in enumerate(load_staged(dataset, folder).to_list()):
        counts["rows"] += 1
        row = {**raw, style.context: style.clean(_field(raw, style.context, dataset) or "")}
        answers = [next(iter(_texts(_field(row, name, dataset))), "") for name in around]
        if any(len(answer) <= 1 for answer in answers):
            counts["dropped"] += 1
            continue
        found = cut(
            _field(row, field, dataset) or "",
            answers if around else None,
            tokenizer,
            limit=num_tokens,
            alternatives=_texts(row.get(ALTERNATIVES)),
            token_position=row.get(TOKEN_POSITION),
        )
        counts["kept"] += 1
        counts["cut"] += not found.whole
        counts[found.centre] += 1
        # the document: that of a field which names it, or its text
        named = next((row[name] for name in style.documents if row.get(name)), None)
        document = style.passage(row) if named is None else str(named)
        source = hashlib.sha256(document.encode()).hexdigest()[:16]
        rows.append(_CutRow(number, {**row, field: found.text}, found.centre, source))
    if not rows:
        raise UserError(
            f"{Path(folder) / dataset}: none of {counts['rows']} rows has an answer of two "
            f"characters or more in {', '.join(around)}"
        )
    return rows, counts


def _field(row: Row, name: str, dataset: str) -> Any:
    if name not in row:
        raise UserError(
            f"{dataset}: the staged rows have no field '{name}', only {', '.join(row)}; the "
            f"options {dataset}_context and {dataset}_answers name what to cut and what to look for"
        )
    return row[name]


def _texts(value: Any) -> list[str]:
    """Return the answers in a field: a text is one, a list several, and None none."""
    values = value if isinstance(value, list | tuple) else [value]
    return [str(text) for text in values if text is not None]
