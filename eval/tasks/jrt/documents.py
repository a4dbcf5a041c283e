"""The items of the JRT tasks: prompts from staged rows, cut with the evaluated model's tokenizer.

Options in the task's metadata: `jrt_tokens`, the length of a cut context; per data set
`jrt_swde_context`, the field to cut, and `jrt_swde_answers`, the fields to cut around, "key,value"
or ["key", "value"] (none: its first tokens are kept, and no row is dropped).
"""

import hashlib
import json
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import datasets

from canon_pretrain.core.errors import UserError, check_choice
from eval.staged import load_staged
from eval.task_tokenizer import TaskTokenizer, known_max_length, lengths_over, task_tokenizer

ANSWER_TOKENS = 48
NUM_TOKENS = 950  # of 1,000, with 50 left for the answer
# what a cut is centred on; ALTERNATIVE and TOKEN_POSITION are also fields of some rows
ANSWER = "answer"
ALTERNATIVE = "alt_answers"  # further answers
TOKEN_POSITION = "tok_pos"  # of the answer
NOTHING = "nothing"  # no answer occurs: the end of the document is kept
BEGINNING = "beginning"  # no answers are searched
CENTRES = (ANSWER, ALTERNATIVE, TOKEN_POSITION, NOTHING, BEGINNING)
OPTION = "jrt_"
# lm_eval prints the records of loggers below its own name
LOG = logging.getLogger(f"lm_eval.{__name__}")
Row = Mapping[str, Any]


class Options(NamedTuple):
    """The options of a data set: its field to cut, to how many tokens, and around which fields."""

    num_tokens: int
    context: str
    answers: tuple[str, ...]


class MadeItem(NamedTuple):
    """The fields of an item, and whether its text was not cut."""

    fields: dict[str, Any]
    whole: bool


class Prefix(NamedTuple):
    """The text before a token up to its last whole character, and whether that is all of it."""

    text: str
    is_whole: bool


@dataclass(frozen=True)
class Style:
    """One data set: the fields to cut, to cut around and of the labels, and its prompts.

    `passage(row)` is the text without its question, `prompt(row, passage, twice)` the prompt.
    `clean` is applied to `context` before the cut, `finish` after it. Rows share a source by a
    field of `documents`, or else by their passage.
    """

    context: str
    answers: tuple[str, ...]
    labels: str
    passage: Callable[[Row], str]
    prompt: Callable[[Row, str, bool], str]
    clean: Callable[[str], str] = str.strip
    finish: Callable[[str], str] = str
    documents: tuple[str, ...] = ()

    def finish_row(self, row: Row) -> Row:
        return {**row, self.context: self.finish(row[self.context])}


def without_trailing(text: str, copy: str) -> str:
    """Return `text` without copies of `copy` at its end, case ignored, and without spaces."""
    text = text.rstrip()
    copy = copy.strip()
    pattern = re.compile(re.escape(copy), re.IGNORECASE)
    size = len(copy)
    while copy and pattern.fullmatch(text, max(0, len(text) - size)):
        text = text[:-size].rstrip()
    return text.strip()


def _keyed_prompt(row: Row, text: str, twice: bool) -> str:
    key = row["key"].strip()
    key = key[:1].upper() + key[1:]
    text = text.strip(".")
    if not twice:
        return f"{text}. {key}:"
    text = text.strip()
    return f"Information about {key}. {text}.\n{text}. {key}:"


def _asked_prompt(row: Row, text: str, twice: bool, end: str = "") -> str:
    question = row["question"].strip()
    text = text.strip(".")
    if not twice:
        return f"{text}. {question}"
    text = text.strip()
    original_question = row["orig_question"].strip(end)
    return f"{original_question} {text}.\n{text}. {question}"


def _squad_prompt(row: Row, text: str, twice: bool) -> str:
    prompt = str(row["text"]).strip()
    return f"{row['question']} {text}\n{prompt}" if twice else prompt


_PAGE = Style(
    context="text",
    answers=("key", "value"),
    labels="value",
    passage=lambda row: without_trailing(row["text"], f"{row['key'].strip()}:"),
    prompt=_keyed_prompt,
    documents=("file_name", "doc_id"),
)
_ASKED = Style(
    context="context",
    answers=(),
    labels="answers",
    passage=lambda row: without_trailing(row["context"], row["question"]),
    prompt=_asked_prompt,
)
_NQ_PROMPT = partial(_asked_prompt, end=":")
STYLES: dict[str, Style] = {
    # SWDE's own summary contains the answers
    "jrt_swde": replace(
        _PAGE,
        clean=lambda text: text.partition("Summary of information above")[0],
    ),
    "jrt_fda": _PAGE,
    "jrt_squad": Style(
        context="text",
        answers=("value",),
        labels="value",
        passage=lambda row: str(row["context"]).partition("Question:")[0],
        prompt=_squad_prompt,
    ),
    "jrt_triviaqa": replace(
        _ASKED,
        finish=lambda text: re.sub(r"\[PAR\]|\[DOC\]|\[TLE\]", "", text),
    ),
    "jrt_nq": replace(_ASKED, answers=("answers",), prompt=_NQ_PROMPT),
    "jrt_drop": replace(_ASKED, prompt=_NQ_PROMPT),
}


@dataclass(frozen=True)
class Cut:
    """A document after the cut; `centre` is one of CENTRES, `whole`: nothing was cut."""

    text: str
    centre: str
    whole: bool


def first_hit(text: str, answer: str) -> int | None:
    """Return the first position of `answer` in `text`, ignoring case; None if there is none."""
    # not lower(), which may change the length of a text
    if not answer:
        return None
    match = re.search(re.escape(answer), text, re.IGNORECASE)
    return match.start() if match else None


def _hits(text: str, answers: Sequence[str]) -> list[int]:
    """Return the first position of each answer that occurs in `text`."""
    hits = (first_hit(text, answer) for answer in answers)
    return [hit for hit in hits if hit is not None]


def window(num_tokens: int, position: int, limit: int) -> tuple[int, int]:
    """Return the tokens to keep, [start, end): `limit` of them, half before `position`."""
    # at the end of a document only the first half remains (the cut rule of JRT)
    start = max(0, position - limit // 2)
    return start, min(num_tokens, start + limit)


def cut(
    text: str,
    answers: Sequence[str] | None,
    tokenizer: TaskTokenizer,
    *,
    limit: int = NUM_TOKENS,
    alternatives: Sequence[str] = (),
    token_position: int | None = None,
) -> Cut:
    """Return at most `limit` tokens of `text` around the earliest of `answers`; None: the first.

    If none occurs: around the first of `alternatives` that does, else around `token_position`, else
    the last `limit` / 2 tokens. A text that is not cut is returned unchanged.
    """
    text = text.strip()
    tokens = tokenizer.encode(text)

    # Where to cut. As upstream, a hit is at the number of tokens of the text before it.
    hits = _hits(text, answers or ())
    if answers is None:
        centre = BEGINNING
        position = 0
    elif hits:
        centre = ANSWER
        position = len(tokenizer.encode(text[: min(hits)]))
    elif alternative_hits := _hits(text, alternatives):
        centre = ALTERNATIVE
        position = len(tokenizer.encode(text[: alternative_hits[0]]))
    elif token_position is not None and token_position >= 0:
        centre = TOKEN_POSITION
        position = token_position
    else:
        centre = NOTHING
        position = len(tokens)

    # the text before a hit may have more tokens than the whole; `tok_pos` of another tokenizer too
    position = min(position, len(tokens))
    start, end = window(len(tokens), position, limit)
    if start == 0 and end == len(tokens):
        return Cut(text, centre, whole=True)
    return Cut(_part(text, tokens, start, end, tokenizer), centre, whole=False)


def _part(text: str, tokens: list[int], start: int, end: int, tokenizer: TaskTokenizer) -> str:
    """Return the complete characters of `text` in the tokens [start, end), stripped.

    Tokenizers decode incomplete characters differently. So the part is taken out of the text, or
    decoded if the tokenizer does not reproduce texts.
    """

    def decode_before(border: int) -> Prefix:
        if border == len(tokens):
            return Prefix(text, is_whole=True)
        decoded = tokenizer.decode(tokens[:border])
        complete = decoded.rstrip("\ufffd")
        return Prefix(complete, complete == decoded or not text.startswith(complete))

    # shrink to borders between characters
    before_start = decode_before(start)
    while not before_start.is_whole and start < end:
        start += 1
        before_start = decode_before(start)
    before_end = decode_before(end)
    while not before_end.is_whole and start < end:
        end -= 1
        before_end = decode_before(end)

    for prefix in (before_start, before_end):
        if not prefix.is_whole or not text.startswith(prefix.text):
            return tokenizer.decode(tokens[start:end]).strip()
    return text[len(before_start.text) : len(before_end.text)].strip()


def load(
    *, dataset: str, twice: bool = False, staged: str | None = None, **metadata: Any
) -> dict[str, datasets.Dataset]:
    """Return the items of one task: row, prompt, labels, target, centre of the cut and source."""
    tokenizer = task_tokenizer(metadata)
    options = _options(dataset, metadata)
    rows = load_staged(dataset, staged).to_list()

    items: list[dict[str, Any]] = []
    num_cut = 0
    for number, row in enumerate(rows):
        try:
            item = _item(STYLES[dataset], row, tokenizer, options, twice)
        except KeyError as error:
            raise UserError(
                "jrt.field",
                f"{dataset}: the staged rows have no field {error}, only {', '.join(row)}; "
                f"see the options {dataset}_context and {dataset}_answers",
                field=error.args[0],
            ) from None
        if item is not None:
            items.append({"row": number, **item.fields})
            num_cut += not item.whole
    if not items:
        raise UserError(
            "jrt.no_rows",
            f"{dataset}: no row has an answer of two characters in {options.answers}",
        )

    # harness.py adds these counts to the results
    centres = [item["centre"] for item in items]
    counts = {
        "rows": len(rows),
        "dropped": len(rows) - len(items),
        "kept": len(items),
        "cut": num_cut,
        **{centre: centres.count(centre) for centre in CENTRES},
    }

    # Prompts that are too long are counted, not refused: lm_eval cuts them at the beginning.
    max_length = known_max_length(metadata)
    if max_length is not None:
        prompts = [str(item["prompt"]) for item in items]
        num_too_long = len(lengths_over(prompts, max_length - ANSWER_TOKENS, metadata))
        counts["too_long"] = num_too_long
        if num_too_long:
            LOG.warning("%s: %d prompts are cut at the beginning", dataset, num_too_long)

    documents = datasets.Dataset.from_list(items)
    documents.info.description = json.dumps(counts)
    return {"validation": documents}


def _item(
    style: Style, raw: Row, tokenizer: TaskTokenizer, options: Options, twice: bool
) -> MadeItem | None:
    """Return the item of a row; None if an answer has less than two characters."""
    row = {**raw, style.context: style.clean(raw[style.context] or "")}

    # Of a field with several answers the first counts.
    answers = [next(iter(_texts(row[name])), "") for name in options.answers]
    if any(len(answer) <= 1 for answer in answers):
        return None

    # Cut the field around the answers, unless none are to be searched.
    part = cut(
        row[options.context] or "",
        answers or None,
        tokenizer,
        limit=options.num_tokens,
        alternatives=_texts(row.get(ALTERNATIVE)),
        token_position=row.get(TOKEN_POSITION),
    )

    # rows share a source by their document or, without one, by their whole passage
    sources = [str(row[name]) for name in style.documents if row.get(name)]
    source = sources[0] if sources else style.passage(style.finish_row(row))

    finished = style.finish_row({**row, options.context: part.text})
    labels = _texts(row[style.labels])
    fields = {
        "prompt": style.prompt(finished, style.passage(finished), twice),
        "labels": labels,
        "target": labels[0] if labels else "",
        "centre": part.centre,
        "source": hashlib.sha256(source.encode()).hexdigest()[:16],
    }
    return MadeItem(fields, part.whole)


def score(doc: Mapping[str, Any], results: Sequence[str]) -> dict[str, float]:
    """Return the metric `contains`: whether the answer's first line has a nonempty label."""
    line = results[0].split("\n", 1)[0]
    is_contained = any(first_hit(line, label) is not None for label in doc["labels"])
    return {"contains": float(is_contained)}


def _options(dataset: str, metadata: Mapping[str, Any]) -> Options:
    """Read the options of a data set; raises UserError for unknown or invalid ones."""
    style = STYLES[dataset]

    # Metadata may have options of other data sets too, but none that are unknown.
    tokens_key = f"{OPTION}tokens"
    field_keys = [f"{key}_{name}" for key in STYLES for name in ("context", "answers")]
    for name in metadata:
        if name.startswith(OPTION):
            check_choice("option", name, sorted([tokens_key, *field_keys]))

    num_tokens = str(metadata.get(tokens_key, NUM_TOKENS))
    if not num_tokens.isdecimal() or int(num_tokens) < 2:
        raise UserError(
            "eval.option_range",
            f"{tokens_key} {num_tokens!r}: expected a number of tokens, at least 2",
            option=tokens_key,
        )

    answers = metadata.get(f"{dataset}_answers", style.answers)
    if isinstance(answers, str):
        answers = answers.split(",")
    names = [str(name).strip() for name in answers]
    return Options(
        num_tokens=int(num_tokens),
        context=str(metadata.get(f"{dataset}_context", style.context)).strip(),
        answers=tuple(filter(None, names)),
    )


def _texts(value: Any) -> list[str]:
    values = value if isinstance(value, list | tuple) else [value]
    return [str(text) for text in values if text is not None]
