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
from typing import Any

import datasets

from canon_pretrain.core.errors import UserError, check_choice
from eval.staged import load_staged
from eval.task_tokenizer import TaskTokenizer, known_max_length, lengths_over, task_tokenizer

ANSWER_TOKENS = 48
NUM_TOKENS = 950  # of 1,000, with 50 left for the answer
# centres of a cut; these two are also fields: further answers, and the answer's position
ALTERNATIVE, TOKEN_POSITION = "alt_answers", "tok_pos"
# nothing: no answer occurs, the document's end is kept; beginning: no answers are searched
ANSWER, NOTHING, BEGINNING = "answer", "nothing", "beginning"
CENTRES = (ANSWER, ALTERNATIVE, TOKEN_POSITION, NOTHING, BEGINNING)
OPTION = "jrt_"
# lm_eval prints the records of loggers below its own name
LOG = logging.getLogger(f"lm_eval.{__name__}")
Row = Mapping[str, Any]
Options = tuple[int, str, tuple[str, ...]]  # tokens, field to cut, fields to cut around


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

    def passage_of(self, row: Row) -> tuple[Row, str]:
        """Return a row with its finished context, and its passage."""
        row = {**row, self.context: self.finish(row[self.context])}
        return row, self.passage(row)


def without_trailing(text: str, copy: str) -> str:
    """Return `text` without copies of `copy` at its end, case ignored, and without spaces."""
    text, copy = text.rstrip(), copy.strip()
    pattern = re.compile(re.escape(copy), re.IGNORECASE)
    while copy and pattern.fullmatch(text, max(0, len(text) - len(copy))):
        text = text[: -len(copy)].rstrip()
    return text.strip()


def _keyed_prompt(row: Row, text: str, twice: bool) -> str:
    key = row["key"].strip()
    key = key[:1].upper() + key[1:]
    text = text.strip(".")
    if not twice:
        return f"{text}. {key}:"
    return f"Information about {key}. {text.strip()}.\n{text.strip()}. {key}:"


def _asked_prompt(row: Row, text: str, twice: bool, end: str = "") -> str:
    question, text = row["question"].strip(), text.strip(".")
    if not twice:
        return f"{text}. {question}"
    return f"{row['orig_question'].strip(end)} {text.strip()}.\n{text.strip()}. {question}"


def _squad_prompt(row: Row, text: str, twice: bool) -> str:
    known = str(row["text"]).strip()
    return f"{row['question']} {text}\n{known}" if twice else known


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
        _PAGE, clean=lambda text: text.partition("Summary of information above")[0]
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
        _ASKED, finish=lambda text: re.sub(r"\[PAR\]|\[DOC\]|\[TLE\]", "", text)
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
    found = re.search(re.escape(answer), text, re.IGNORECASE) if answer else None
    return found.start() if found else None


def window(num_tokens: int, position: int, limit: int) -> tuple[int, int]:
    """Return the tokens to keep, [start, end): `limit` of them, half before `position`."""
    # at the end of a document only the first half remains (the cut rule of JRT)
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
    """Return at most `limit` tokens of `text` around the earliest of `answers`; None: the first.

    If none occurs: around the first of `alternatives` that does, else around `token_position`, else
    the last `limit` / 2 tokens. A text that is not cut is returned unchanged.
    """
    text = text.strip()
    tokens = tokenizer.encode(text)
    hits = [hit for answer in answers or () if (hit := first_hit(text, answer)) is not None]
    others = (hit for one in alternatives if (hit := first_hit(text, one)) is not None)
    other = None if hits else next(others, None)
    if answers is None:
        centre, position = BEGINNING, 0
    elif hits or other is not None:
        # the position is the number of tokens of the text before it, as upstream
        centre = ANSWER if hits else ALTERNATIVE
        position = len(tokenizer.encode(text[: min(hits, default=other)]))
    elif token_position is not None and token_position >= 0:
        centre, position = TOKEN_POSITION, token_position
    else:
        centre, position = NOTHING, len(tokens)
    # the text before a hit may have more tokens than the whole; `tok_pos` of another tokenizer too
    start, end = window(len(tokens), min(position, len(tokens)), limit)
    if start == 0 and end == len(tokens):
        return Cut(text, centre, whole=True)
    return Cut(_part(text, tokens, start, end, tokenizer), centre, whole=False)


def _part(text: str, tokens: list[int], start: int, end: int, tokenizer: TaskTokenizer) -> str:
    """Return the complete characters of `text` in the tokens [start, end), stripped."""
    # tokenizers decode incomplete characters differently: cut the part out of the text, or decode
    # it if the tokenizer does not reproduce texts

    def before(border: int) -> tuple[str, bool]:
        """Return the text before a token up to its last whole character, and whether it is all."""
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


def load(
    *, dataset: str, twice: bool = False, staged: str | None = None, **metadata: Any
) -> dict[str, datasets.Dataset]:
    """Return the items of one task: row, prompt, labels, target, centre of the cut and source."""
    tokenizer, options = task_tokenizer(metadata), _options(dataset, metadata)
    rows, items, num_cut = load_staged(dataset, staged).to_list(), [], 0
    for number, raw in enumerate(rows):
        try:
            found = _item(STYLES[dataset], raw, tokenizer, options, twice)
        except KeyError as error:
            raise UserError(
                "jrt.field",
                f"{dataset}: the staged rows have no field {error}, only {', '.join(raw)}; "
                f"see the options {dataset}_context and {dataset}_answers",
                field=error.args[0],
            ) from None
        if found is not None:
            items.append({"row": number, **found[0]})
            num_cut += not found[1]
    if not items:
        raise UserError(
            "jrt.no_rows", f"{dataset}: no row has an answer of two characters in {options[2]}"
        )
    dropped = len(rows) - len(items)
    counts = {"rows": len(rows), "dropped": dropped, "kept": len(items), "cut": num_cut}
    centres = [item["centre"] for item in items]
    counts |= {centre: centres.count(centre) for centre in CENTRES}
    max_length = known_max_length(metadata)
    if max_length is not None:
        prompts = [str(item["prompt"]) for item in items]
        counts["too_long"] = len(lengths_over(prompts, max_length - ANSWER_TOKENS, metadata))
        if counts["too_long"]:
            LOG.warning("%s: %d prompts are cut at the beginning", dataset, counts["too_long"])
    documents = datasets.Dataset.from_list(items)
    # harness.py adds them to the results; too_long: prompts that are cut at the beginning
    documents.info.description = json.dumps(counts)
    return {"validation": documents}


def _item(
    style: Style, raw: Row, tokenizer: TaskTokenizer, options: Options, twice: bool
) -> tuple[dict[str, Any], bool] | None:
    """Return an item and whether it is whole; None if an answer has less than two characters."""
    limit, field, around = options
    row = {**raw, style.context: style.clean(raw[style.context] or "")}
    answers = [next(iter(_texts(row[name])), "") for name in around]
    if any(len(answer) <= 1 for answer in answers):
        return None
    found = cut(
        row[field] or "",
        answers if around else None,
        tokenizer,
        limit=limit,
        alternatives=_texts(row.get(ALTERNATIVE)),
        token_position=row.get(TOKEN_POSITION),
    )
    document = next((str(row[name]) for name in style.documents if row.get(name)), None)
    source = document if document is not None else style.passage_of(row)[1]
    shown, passage = style.passage_of({**row, field: found.text})
    labels = _texts(row[style.labels])
    item = {
        "prompt": style.prompt(shown, passage, twice),
        "labels": labels,
        "target": [*labels, ""][0],
        "centre": found.centre,
        "source": hashlib.sha256(source.encode()).hexdigest()[:16],
    }
    return item, found.whole


def score(doc: Mapping[str, Any], results: Sequence[str]) -> dict[str, float]:
    """Return the metric `contains`: whether the answer's first line has a nonempty label."""
    line = results[0].split("\n", 1)[0]
    return {"contains": float(any(first_hit(line, label) is not None for label in doc["labels"]))}


def _options(dataset: str, metadata: Mapping[str, Any]) -> Options:
    style, tokens = STYLES[dataset], f"{OPTION}tokens"
    known = {tokens, *(f"{key}_{name}" for key in STYLES for name in ("context", "answers"))}
    for name in metadata:
        if name.startswith(OPTION):
            check_choice("option", name, sorted(known))
    given = str(metadata.get(tokens, NUM_TOKENS))
    if not given.isdecimal() or int(given) < 2:
        raise UserError(
            "eval.option_range",
            f"{tokens} {given!r}: expected a number of tokens, at least 2",
            option=tokens,
        )
    answers = metadata.get(f"{dataset}_answers", style.answers)
    names = answers.split(",") if isinstance(answers, str) else answers
    fields = tuple(stripped for name in names if (stripped := str(name).strip()))
    return int(given), str(metadata.get(f"{dataset}_context", style.context)).strip(), fields


def _texts(value: Any) -> list[str]:
    values = value if isinstance(value, list | tuple) else [value]
    return [str(text) for text in values if text is not None]
