"""The prompts of the JRT suite: what a data set's rows hold, and how they are asked.

Pure functions of a row whose context was cut (cut.py); used by documents.py. The templates are
those of spec/eval.md, section 2. Where it is silent this is what the public code does
(HazyResearch/prefix-linear-attention): dots around a context are not doubled, and only the twice
variant closes the space before one. Prompts end with the question or the key, without a space.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

Row = Mapping[str, Any]
Template = Callable[[Row], str]

SUMMARY = "Summary of information above"
"""What begins SWDE's own summary, which holds the answers."""
MARKS = re.compile(r"\[PAR\]|\[DOC\]|\[TLE\]")
QUESTION = "Question:"


@dataclass(frozen=True)
class Style:
    """One data set: the field that is cut, those it is centred on (if any), the labels', and its
    prompts.

    `clean` is applied to `context` before anything else. `passage` is what the question is about,
    in an uncut row: rows of one passage share a source, unless a field of `documents` is there to
    say so.
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


def _keyed(row: Row) -> str:
    return f"{_keyed_text(row).strip('.')}. {_key(row)}:"


def _keyed_twice(row: Row) -> str:
    text = _keyed_text(row).strip(".").strip()
    return f"Information about {_key(row)}. {text}.\n{text}. {_key(row)}:"


def _squad_context(row: Row) -> str:
    return str(row["context"]).partition(QUESTION)[0]


def _squad_twice(row: Row) -> str:
    return f"{row['question']} {_squad_context(row)}\n{str(row['text']).strip()}"


def _asked_text(row: Row) -> str:
    return without_trailing(row["context"], row["question"]).strip()


def _asked(row: Row) -> str:
    return f"{_asked_text(row).strip('.')}. {row['question'].strip()}"


def _asked_twice(row: Row) -> str:
    text = _asked_text(row).strip(".").strip()
    return f"{row['orig_question']} {text}.\n{text}. {row['question'].strip()}"


def _asked_twice_without_colon(row: Row) -> str:
    return _asked_twice({**row, "orig_question": row["orig_question"].strip(":")})


def _unmarked(made: Template) -> Template:
    """`made` of a row whose context is without TriviaQA's marks, which upstream cuts and counts."""
    return lambda row: made({**row, "context": MARKS.sub("", row["context"])})


_PAGE = Style(
    context="text",
    answers=("key", "value"),
    labels="value",
    once=_keyed,
    twice=_keyed_twice,
    passage=_keyed_text,
    documents=("file_name", "doc_id"),
)
_PASSAGE = Style(
    context="context",
    answers=("answers",),
    labels="answers",
    once=_asked,
    twice=_asked_twice,
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
        twice=_squad_twice,
        passage=_squad_context,
    ),
    "jrt_triviaqa": replace(
        _PASSAGE,
        answers=(),
        once=_unmarked(_asked),
        twice=_unmarked(_asked_twice),
        passage=_unmarked(_asked_text),
    ),
    "jrt_nq": replace(_PASSAGE, twice=_asked_twice_without_colon),
    "jrt_drop": replace(_PASSAGE, answers=(), twice=_asked_twice_without_colon),
}
"""By key of the catalogue."""
