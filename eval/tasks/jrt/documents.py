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

SPLIT = "validation"
ANSWER_TOKENS = 48
NUM_TOKENS = 950
"""Of 1,000, with 50 left for the answer."""
ANSWER, ALTERNATIVE, TOKEN_POSITION = "answer", "alt_answers", "tok_pos"
"""The last two are also fields of a data set: further answers to look for, and where it is."""
NOTHING, BEGINNING = "nothing", "beginning"
CENTRES = (ANSWER, ALTERNATIVE, TOKEN_POSITION, NOTHING, BEGINNING)
"""What a cut can be centred on. NOTHING, if nothing that was searched occurs, keeps the end of the
document; BEGINNING, if nothing is searched, its first tokens."""
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
    text, first = _asked_text(row).strip(".").strip(), row["orig_question"]
    return f"{first.strip(end) if end else first} {text}.\n{text}. {row['question'].strip()}"


def _unmarked(made: Template) -> Template:
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


# -- the cut: so many tokens of a document around the answer -------------------------------------


@dataclass(frozen=True)
class Cut:
    """What is left of a document; `centre` is one of CENTRES, `whole`: nothing is gone."""

    text: str
    centre: str
    whole: bool


def first_hit(text: str, answer: str) -> int | None:
    """Return where `answer` first occurs in `text`, case ignored; None if it does not.

    By `re.IGNORECASE`, as upstream: no position shifts where a letter's other case is longer.
    """
    found = re.search(re.escape(answer), text, re.IGNORECASE) if answer else None
    return found.start() if found else None


def window(num_tokens: int, position: int, limit: int) -> tuple[int, int]:
    """Return the tokens to keep, [start, end): `limit` of them, half of it before `position`.

    At the end of a document only the half is left (spec/eval.md, section 2).
    """
    start = max(0, position - limit // 2)
    return start, min(num_tokens, position + limit - (position - start))


def cut(
    text: str,
    answers: Sequence[str] | None,
    tokenizer: TaskTokenizer,
    *,
    limit: int = NUM_TOKENS,
    alternatives: Sequence[str] = (),
    token_position: int | None = None,
) -> Cut:
    """Return at most `limit` tokens of `text` around the earliest of `answers`; None: its first.

    If none occurs: around the first of `alternatives` that does; else around `token_position`; else
    the last half of `limit`. A hit at a character becomes the number of tokens of the text before
    it, as upstream counts. A text that is not cut stays as it is.
    """
    text = text.strip()
    tokens = tokenizer.encode(text)
    hits = [hit for answer in answers or () if (hit := first_hit(text, answer)) is not None]
    centre = ANSWER
    if not hits:
        centre = ALTERNATIVE
        found = (first_hit(text, answer) for answer in alternatives)
        hits = [hit for hit in found if hit is not None][:1]
    if answers is None:
        centre, position = BEGINNING, 0
    elif hits:
        position = len(tokenizer.encode(text[: min(hits)]))
    elif token_position is not None and token_position >= 0:
        centre, position = TOKEN_POSITION, token_position
    else:
        centre, position = NOTHING, len(tokens)
    # a text cut in a word may have more tokens than the whole, `tok_pos` be another tokenizer's
    start, end = window(len(tokens), min(position, len(tokens)), limit)
    if start == 0 and end == len(tokens):
        return Cut(text, centre, whole=True)
    return Cut(_part(text, tokens, start, end, tokenizer), centre, whole=False)


def _part(text: str, tokens: list[int], start: int, end: int, tokenizer: TaskTokenizer) -> str:
    """Return the characters of `text` that are whole in the tokens [start, end), stripped.

    Tokenizers differ in what half a character decodes to: a part is cut out of the text, or decoded
    if the tokenizer does not reproduce texts.
    """

    def before(border: int) -> tuple[str, bool]:
        """Return the text before a token without half characters, and whether it had none."""
        if border == len(tokens):
            return text, True
        decoded = tokenizer.decode(tokens[:border])
        known = decoded.rstrip("\ufffd")
        return known, known == decoded or not text.startswith(known)

    while not (first := before(start))[1] and start < end:
        start += 1
    while not (last := before(end))[1] and start < end:
        end -= 1
    if not all(is_whole and text.startswith(known) for known, is_whole in (first, last)):
        return tokenizer.decode(tokens[start:end]).strip()
    return text[len(first[0]) : len(last[0])].strip()


def contains(prediction: str, labels: Sequence[str]) -> float:
    """Return 1.0 if a label that is not empty occurs in the first line of `prediction`."""
    line = prediction.split("\n", 1)[0]
    return float(any(first_hit(line, label) is not None for label in labels))


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
    for number, row, centre, source in rows:
        labels = _texts(_field(row, style.labels, dataset))
        try:
            prompt = template(row)
        except KeyError as error:
            _field(row, error.args[0], dataset)
            raise
        item = {"row": number, "prompt": prompt, "labels": labels, "target": [*labels, ""][0]}
        items.append(item | {"centre": centre, "source": source})
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
) -> tuple[list[tuple[int, Row, str, str]], dict[str, int]]:
    style = STYLES[dataset]
    rows: list[tuple[int, Row, str, str]] = []
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
            alternatives=_texts(row.get(ALTERNATIVE)),
            token_position=row.get(TOKEN_POSITION),
        )
        counts["kept"] += 1
        counts["cut"] += not found.whole
        counts[found.centre] += 1
        # the document: that of a field which names it, or its text
        named = next((row[name] for name in style.documents if row.get(name)), None)
        document = style.passage(row) if named is None else str(named)
        source = hashlib.sha256(document.encode()).hexdigest()[:16]
        rows.append((number, {**row, field: found.text}, found.centre, source))
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
    values = value if isinstance(value, list | tuple) else [value]
    return [str(text) for text in values if text is not None]
