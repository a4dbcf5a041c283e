"""The items of the JRT tasks: staged rows, cut with the evaluated model's tokenizer, as prompts.

The task files here name `load` and `score`. `load` is lm_eval's `custom_dataset`: it passes the
task's metadata and dataset_kwargs. Options come through metadata (`eval run --option NAME=VALUE`,
`lm_eval --metadata '{"NAME": VALUE}'`), NAME being

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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets

from canon_pretrain.core.errors import UserError, nearest
from eval.staging.staged import load_staged, staged_folder, staged_sha256
from eval.task_length import known_max_length
from eval.task_tokenizer import TaskTokenizer, task_tokenizer
from eval.tasks.jrt.cut import CENTRES, NUM_TOKENS, contains, cut
from eval.tasks.jrt.prompts import STYLES, Row, Template

SPLIT = "validation"
ANSWER_TOKENS = 48
ALTERNATIVES, TOKEN_POSITION = "alt_answers", "tok_pos"
"""Fields that a data set may have: further answers to look for, and where the answer is."""
OPTION = "jrt_"
# below its own name the harness shows what is logged
LOG = logging.getLogger(f"lm_eval.{__name__}")


@dataclass(frozen=True)
class Options:
    """How the rows of one data set are cut: which field, around what, to how many tokens."""

    num_tokens: int
    context: str
    answers: tuple[str, ...]

    @classmethod
    def read(cls, dataset: str, metadata: Mapping[str, Any]) -> "Options":
        """The options of `dataset` in a task's metadata. Raises UserError."""
        style, tokens = STYLES[dataset], f"{OPTION}tokens"
        known = {tokens}.union(*({f"{key}_context", f"{key}_answers"} for key in STYLES))
        for name in metadata:
            if name.startswith(OPTION) and name not in known:
                near = nearest(name, known)
                raise UserError(
                    f"unknown option '{name}'{f', did you mean {near!r}?' if near else ''}; known: "
                    f"{', '.join(sorted(known))}"
                )
        given = metadata.get(tokens, NUM_TOKENS)
        try:
            num_tokens = int(str(given))
        except ValueError:
            num_tokens = 0
        if num_tokens < 2:
            raise UserError(f"{tokens} {given!r}: expected a number of tokens, at least 2")
        answers = metadata.get(f"{dataset}_answers", style.answers)
        names = answers.split(",") if isinstance(answers, str) else answers
        context = metadata.get(f"{dataset}_context", style.context)
        fields = tuple(stripped for name in names if (stripped := str(name).strip()))
        return cls(num_tokens, str(context).strip(), fields)


def load(
    *, dataset: str, twice: bool = False, staged: str | None = None, **metadata: Any
) -> dict[str, datasets.Dataset]:
    """The items of one task: row, prompt, labels, target, centre (of the cut) and source.

    `read_counts` tells what became of the rows. Raises UserError for data that is not staged, lacks
    a field or has no answers, for an unknown option and where no tokenizer is named.
    """
    tokenizer = task_tokenizer(metadata)
    folder = staged_folder(staged)
    options = Options.read(dataset, metadata)
    rows, counts = _cut_rows(
        dataset, str(folder), staged_sha256(dataset, folder), tokenizer, options
    )
    style = STYLES[dataset]
    template = style.twice if twice else style.once
    items = []
    for row in rows:
        labels = _texts(_field(row.fields, style.labels, dataset))
        items.append(
            {
                "row": row.number,
                "prompt": _prompt(template, row.fields, dataset),
                "labels": labels,
                "target": next(iter(labels), ""),
                "centre": row.centre,
                "source": row.source,
            }
        )
    counts = counts | _too_long(items, tokenizer, known_max_length(metadata))
    told = ", ".join(f"{name} {count}" for name, count in counts.items())
    level = logging.WARNING if counts.get("too_long") else logging.INFO
    LOG.log(level, "%s%s: %s (%s)", dataset, "_twice" if twice else "", told, tokenizer.name)
    made = datasets.Dataset.from_list(items)
    made.info.description = json.dumps(counts)
    return {SPLIT: made}


def read_counts(loaded: datasets.Dataset) -> dict[str, int]:
    """What `load` counted: rows, dropped, kept, cut, the centres' names, and too_long.

    `dropped` have an answer, in a field that is searched, of at most one character. Of the kept,
    `cut` lost something, and each of the names in CENTRES says how many were centred so: `nothing`
    had no hit. `too_long`, if a max_length is known, counts prompts that do not fit it with their
    answer: they lose their beginning.
    """
    return dict(json.loads(loaded.info.description))


def score(doc: Mapping[str, Any], results: Sequence[str]) -> dict[str, float]:
    """lm_eval's `process_results`: the metric `contains` of one item."""
    return {"contains": contains(results[0], doc["labels"])}


@dataclass(frozen=True)
class _CutRow:
    number: int
    fields: dict[str, Any]
    centre: str
    source: str


# a task and its twice variant, which follows it, share the work
@functools.lru_cache(maxsize=2)
def _cut_rows(
    dataset: str, folder: str, sha256: str, tokenizer: TaskTokenizer, options: Options
) -> tuple[list[_CutRow], dict[str, int]]:
    """The rows that are kept, cut, and what became of all; `sha256` is theirs, for the memory."""
    style = STYLES[dataset]
    rows: list[_CutRow] = []
    counts = {"rows": 0, "dropped": 0, "kept": 0, "cut": 0} | dict.fromkeys(CENTRES, 0)
    for number, raw in enumerate(load_staged(dataset, folder)[SPLIT].to_list()):
        counts["rows"] += 1
        context = style.clean(_field(raw, style.context, dataset) or "")
        row = {**raw, style.context: context}
        answers = [_first(_field(row, name, dataset)) for name in options.answers]
        if any(len(answer) <= 1 for answer in answers):
            counts["dropped"] += 1
            continue
        found = cut(
            _field(row, options.context, dataset) or "",
            answers if options.answers else None,
            tokenizer,
            limit=options.num_tokens,
            alternatives=_texts(row.get(ALTERNATIVES)),
            token_position=row.get(TOKEN_POSITION),
        )
        counts["kept"] += 1
        counts["cut"] += not found.whole
        counts[found.centre] += 1
        fields = {**row, options.context: found.text}
        rows.append(_CutRow(number, fields, found.centre, _source(dataset, row)))
    if not rows:
        raise UserError(
            f"{Path(folder) / dataset}: none of {counts['rows']} rows has an answer of two "
            f"characters or more in {', '.join(options.answers)}"
        )
    return rows, counts


def _field(row: Row, name: str, dataset: str) -> Any:
    if name not in row:
        raise UserError(
            f"{dataset}: the staged rows have no field '{name}', only {', '.join(row)}; the "
            f"options {dataset}_context and {dataset}_answers name what to cut and what to look for"
        )
    return row[name]


def _prompt(template: Template, row: Row, dataset: str) -> str:
    try:
        return template(row)
    except KeyError as error:
        _field(row, error.args[0], dataset)
        raise


def _texts(value: Any) -> list[str]:
    """The answers in a field: a text is one, a list several, and nothing is none."""
    values = value if isinstance(value, list | tuple) else [value]
    return [str(text) for text in values if text is not None]


def _first(value: Any) -> str:
    return next(iter(_texts(value)), "")


def _source(dataset: str, row: Row) -> str:
    """A hash of the document that a row is from: that of a field which names it, or its text."""
    style = STYLES[dataset]
    named = next((row[field] for field in style.documents if row.get(field)), None)
    words = style.passage(row) if named is None else str(named)
    return hashlib.sha256(words.encode()).hexdigest()[:16]


def _too_long(
    items: Sequence[Mapping[str, Any]], tokenizer: TaskTokenizer, max_length: int | None
) -> dict[str, int]:
    """How many prompts leave no room for their answer; empty without a known `max_length`."""
    if max_length is None:
        return {}
    room = max_length - ANSWER_TOKENS
    # a token is a letter at least, and there may be one for the space before a text: what is short
    # needs no count (beyond ASCII, normalisation makes several letters of one)
    prompts = [item["prompt"] for item in items]
    unsure = [text for text in prompts if len(text) + 1 > room or not text.isascii()]
    return {"too_long": sum(len(tokenizer.encode(text)) > room for text in unsure)}
