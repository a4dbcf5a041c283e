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
from eval.task_tokenizer import (
    TaskTokenizer,
    known_max_length,
    lengths_beyond,
    task_tokenizer,
)
from eval.tasks.jrt.cut import CENTRES, NUM_TOKENS, contains, cut
from eval.tasks.jrt.prompts import STYLES, Row

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
        """Return the options of `dataset` in a task's metadata. Raises UserError."""
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
    """Return the items of one task: row, prompt, labels, target, centre (of the cut) and source.

    `read_counts` returns what became of the rows. Raises UserError for data that is not staged,
    lacks a field or has no answers, for an unknown option and if no tokenizer is named.
    """
    tokenizer, folder, style = task_tokenizer(metadata), staged_folder(staged), STYLES[dataset]
    options, sha256 = Options.read(dataset, metadata), staged_sha256(dataset, folder)
    rows, counts = _cut_rows(dataset, str(folder), sha256, tokenizer, options)
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
    made.info.description = json.dumps(counts)
    return {SPLIT: made}


def read_counts(loaded: datasets.Dataset) -> dict[str, int]:
    """Return what `load` counted: rows, dropped, kept, cut, the centres' names, and too_long.

    `dropped` have an answer, in a field that is searched, of at most one character. Of the kept,
    `cut` lost something, and each of the names in CENTRES counts those centred so: `nothing` had no
    hit. `too_long`, if a max_length is known, counts prompts that do not fit it with their answer:
    they lose their beginning.
    """
    return dict(json.loads(loaded.info.description))


def score(doc: Mapping[str, Any], results: Sequence[str]) -> dict[str, float]:
    """Return the metric `contains` of one item: lm_eval's `process_results`."""
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
    """Return the kept rows, cut, and what became of all; `sha256` is theirs, for the cache."""
    style = STYLES[dataset]
    rows: list[_CutRow] = []
    counts = {"rows": 0, "dropped": 0, "kept": 0, "cut": 0} | dict.fromkeys(CENTRES, 0)
    for number, raw in enumerate(load_staged(dataset, folder)[SPLIT].to_list()):
        counts["rows"] += 1
        context = style.clean(_field(raw, style.context, dataset) or "")
        row = {**raw, style.context: context}
        answers = [next(iter(_texts(_field(row, f, dataset))), "") for f in options.answers]
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
        # the document: that of a field which names it, or its text
        named = next((row[field] for field in style.documents if row.get(field)), None)
        document = style.passage(row) if named is None else str(named)
        source = hashlib.sha256(document.encode()).hexdigest()[:16]
        rows.append(_CutRow(number, {**row, options.context: found.text}, found.centre, source))
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


def _texts(value: Any) -> list[str]:
    """Return the answers in a field: a text is one, a list several, and None none."""
    values = value if isinstance(value, list | tuple) else [value]
    return [str(text) for text in values if text is not None]
