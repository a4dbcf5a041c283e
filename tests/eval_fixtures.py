"""Small data sets in the schema of every staged one, written as by `eval stage`.

SQuAD's `context` holds "Question:" since the public task code cuts there. The rows never differ.
"""

import random
from collections.abc import Collection
from pathlib import Path
from typing import Any

import datasets
from datasets import ClassLabel, Features, Sequence, Value

from eval.staged import CATALOGUE, write_staged

Rows = list[dict[str, Any]]
TEXT = Value("string")
THINGS = "lamp river candle window letter stone market engine violin harbour forest mirror".split()
NAMES = "Ada Boris Clara Dmitri Elena Farid Greta Hugo Irene Jonas Katya Lars".split()
PLACES = "bathroom bedroom garden hallway kitchen office".split()


def words(seed: object, count: int) -> str:
    """A text of so many words in sentences of nine, without digits."""
    draw = random.Random(f"words {seed}")
    texts = [draw.choice([*THINGS, "the", "of", "and", "in", "is", "was"]) for _ in range(count)]
    lines = [" ".join(texts[at : at + 9]).capitalize() for at in range(0, count, 9)]
    return ". ".join(lines) + "."


def arc(word: str) -> Rows:
    """Questions with three to five choices, labeled by letters or digits."""
    rows: Rows = []
    for at, thing in enumerate(THINGS):
        count = (4, 4, 3, 5)[at % 4]
        names = list("ABCDE" if at % 5 else "12345")[:count]
        texts = [f"{word} {THINGS[at - k]}{' and more' * (k % 3)}" for k in range(count)]
        row = {"question": f"Which one is made of {thing}?", "answerKey": names[at % count]}
        rows.append({**row, "choices": {"text": texts, "label": names}})
    return rows


def item(key: str, at: int, name: str, thing: str) -> dict[str, Any]:
    """One row of the suite `discriminative`; HellaSwag's has the markup that its task removes."""
    before, opposite, kind = THINGS[at - 1], NAMES[-1 - at], at // 3
    rows: dict[str, dict[str, Any]] = {
        "piqa": {
            "goal": f"How do you move a {thing}?",
            "sol1": f"Lift the {thing} with both hands, {'slowly ' * (at % 3)}then walk.",
            "sol2": f"Paint the {thing}.",
            "label": at % 2,
        },
        "hellaswag": {
            "activity_label": f"Carrying a {thing}",
            "ctx_a": f"[header] How to carry a {thing} [title] Lift it. [step] {name} bends.",
            "ctx_b": "the man" if at % 2 else "",
            "endings": [
                f"sings to the {thing}  for an hour",
                f"lifts it [substeps] and walks{' on' * (at % 4)}.",
                "runs.",
                f"eats the {thing} and then {opposite} eats it too.",
            ],
            "source_id": f"wikihow~{kind}",
            "label": str(at % 4),
        },
        "winogrande": {
            "sentence": f"{name} saw a {thing} near the {before} because the _ was large .",
            "option1": thing,
            "option2": before,
            "answer": "12"[at % 2],
        },
        "social_iqa": {
            "context": f"{NAMES[kind]} gave {NAMES[-1 - kind]} a {THINGS[kind]}.",
            "question": ("Why?", "How would others feel?", "What will happen next?")[at % 3],
            "answerA": f"glad about the {thing}",
            "answerB": "sad",
            "answerC": f"wanted to see {name} again soon",
            "label": "123"[at % 3],
        },
        "boolq": {
            "question": f"is the {thing} older than the {before}",
            "passage": words(("boolq", at // 2), 30 + 20 * (at // 2)),
            "label": kind % 2,
        },
        "lambada_openai": {
            "text": f"“Is it the {thing}?” {name} asked. {words(('lambada', at), 12 + 5 * at)} "
            f"{name} looked at it, à la mode, and sighed: it was a {thing}"
        },
        "wikitext": {  # tokenized: " @-@ ", " @,@ ", " = Title = ", spaces before stops
            "page": f" = {thing.capitalize()} = \n \n The {thing} is a well @-@ known {thing} of 1 "
            f"@,@ {at}00 m , and {name} 's . \n {words(('wiki', at), 60 + 90 * at)} \n"
        },
    }
    return rows[key]


def document(seed: object, before: int, fact: str, after: int) -> str:
    parts = [words((seed, "before"), before) if before else "", fact]
    parts += [words((seed, "after"), after)] if after else []
    return " ".join(filter(None, parts))


# words before and after the fact: short documents, and long ones with it early, late, in between
SHAPES = ((0, 20), (40, 0), (700, 700), (5, 1500), (1500, 5), (300, 300))


def jrt(key: str) -> Rows:
    """Documents with one fact, in the columns of all six data sets; two rows share a document."""
    mark = "[DOC] [TLE] A page [PAR] " if key == "jrt_triviaqa" else ""
    tails = {"jrt_swde": "\nSummary of information above...\nborn in:", "jrt_fda": " born in:"}
    rows: Rows = []
    for at, (before, after) in enumerate(SHAPES):
        place, question = f"New {THINGS[at].capitalize()}", f"{NAMES[at]} was born in"
        text = document((key, at), before, f"{question} {place}.", after)
        answers = [place, place.upper(), NAMES[-1 - at]]
        asked = f"\nQuestion: {question}" if key == "jrt_squad" else f" {question}" * (at % 2)
        row = {"text": text + tails.get(key, f" {question} "), "context": mark + text + asked}
        row |= {"key": "born in", "question": question, "doc_id": f"{key}-{at}"}
        row |= {"orig_question": f"Where was {NAMES[at]} born?{':' * (at % 2)}", "tok_pos": 40}
        rows.append({**row, "value": place, "answers": answers, "alt_answers": answers[2:]})
    # an answer of one character, which some drop, and one that does not occur
    return rows + [rows[2] | {"value": text, "answers": [text]} for text in ("7", "nowhere")]


# of qa1 to qa5: facts | question | target
BABILONG = """\
{who} went to the {a}. {other} moved to the {c}. {who} went to the {b}. | Where is {who}? | {b}
{who} went to the {a}. {who} took the {it}. {who} went to the {b}. | Where is the {it}? | {b}
{who} took the {it} to the {a}, the {b}. Then to the {c}. | Where was it before the {c}? | {b}
The {a} is north of the {b}. The {c} is south of the {b}. | What is north of the {b}? | {a}
Bill took the {it} there. Bill gave the {it} to Jeff. | What did Bill give to Jeff? | {it}
""".splitlines()


def babilong(task: str, length: str, at: int) -> dict[str, Any]:
    """Facts of the task among filler; at 0k without filler."""
    fill = {"0k": 0, "1k": 500, "2k": 1000, "4k": 2000}[length]
    who, other = ("Mary", "John") if at % 2 else ("John", "Mary")
    named = dict(zip("abc", (PLACES[(at + k) % 6] for k in range(3)), strict=True))
    named |= {"who": who, "other": other, "it": ("apple", "football", "milk")[at % 3]}
    text, question, target = BABILONG[int(task[2]) - 1].format(**named).split(" | ")
    if fill:
        first, _, last = text.rpartition(". ")
        text = words((task, at, "a"), fill // 2) + f" {first}. "
        text += words((task, at, "b"), fill - fill // 2) + " " + last
    return {"target": target, "question": f"{question} ", "input": text}


_TEXTS = Sequence(TEXT)
_CHOICES = {"choices": {"text": _TEXTS, "label": _TEXTS}}
# the types of columns that are no strings
_TYPES: dict[str, dict[str, Any]] = {
    "piqa": {"label": Value("int64")},
    "hellaswag": {"endings": _TEXTS},
    **{"arc_easy": _CHOICES, "arc_challenge": _CHOICES},
    "boolq": {"label": ClassLabel(names=["False", "True"])},
    "jrt": {"answers": _TEXTS, "alt_answers": _TEXTS, "tok_pos": Value("int64")},
}


def rows_of(key: str) -> Rows:
    suite, _, length = key.partition("_")
    if suite == "babilong":
        return [babilong(*length.split("_"), at) for at in range(6)]
    if suite == "arc":
        return arc("soft" if key == "arc_easy" else "hard")
    if suite == "jrt":
        return jrt(key)
    found = [item(key, at, *pair) for at, pair in enumerate(zip(NAMES, THINGS, strict=True))]
    return found[:4] if key == "wikitext" else found


def fixture(key: str) -> datasets.Dataset:
    """The rows with the column types of the real data set."""
    rows, types = rows_of(key), _TYPES.get("jrt" if key.startswith("jrt") else key, {})
    features = Features({name: types.get(name, TEXT) for name in rows[0]})
    return datasets.Dataset.from_list(rows, features=features)


def stage_fixtures(folder: Path, keys: Collection[str] | None = None) -> Path:
    """Write the fixtures of `keys` (default: all) into `folder` as if staged; return `folder`."""
    for key in CATALOGUE if keys is None else keys:
        write_staged(folder, key, fixture(key), revision="f" * 40)
    return folder
