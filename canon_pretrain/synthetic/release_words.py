"""The words and sentences of Capo in the author's release, in GPT-2's tokens.

Lists and templates are read from the user's clone of facebookresearch/PhysicsLM4 (its folder
data-synthetic-pretrain/Capo-bioS-bioR), tokens from GPT-2's tokenizer.json, a file of the user;
neither is part of this package.

The ids of a text are those of the whole text. GPT-2 first splits a text at spaces and between
letters, digits and other signs, so texts may be encoded in parts that are joined at such a place. A
value may end in a dot, which forms one token with the dot that ends its sentence: so sentences are
encoded with each of their values. Names end in a letter and dates in a digit; what follows is
neither.

Ids: 0 unused, <bos> 1 (GPT-2's <|endoftext|>), then the tokens in use in the order of GPT-2's
numbers. With <bos> these are 3275 ids, the number that the paper prints.
"""

import ast
import functools
import hashlib
import itertools
import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, NoReturn

import numpy as np

from canon_pretrain.core.errors import UserError
from canon_pretrain.synthetic.capo import SIZES

FOLDER = Path("data-synthetic-pretrain", "Capo-bioS-bioR")
SOURCE = "Capo-bioS-bioR.py"
TEXT_FUNCTION = "get_text_simple3"
FIRST, MIDDLE, LAST, DAYS, _, YEARS, CITIES, UNIVERSITIES, MAJORS, EMPLOYERS = SIZES
LISTS = {
    "first_name": FIRST,
    "middle_name": MIDDLE,
    "last_name": LAST,
    "city": CITIES,
    "university": UNIVERSITIES,
    "field": MAJORS,
    "company": EMPLOYERS,
}
"""The release's lists, one word a line, and their sizes; of companies, "name; city"."""
TEMPLATES = {
    "sentence_structures1": "{birthday}",
    "sentence_structures2": "{birthcity}",
    "sentence_structures3": "{university}",
    "sentence_structures4": "{field}",
    "sentence_structures6": "{company1name}",
    "sentence_structures5": "{company1city}",
}
"""The release's lists of templates in the order of ATTRIBUTES, and what a value replaces."""
MONTHS = (
    "January", "February", "March", "April", "May", "June", "July", "August", "September",
    "October", "November", "December",
)  # fmt: skip
FIRST_YEAR = 1900
PRONOUNS = ("He", "She")
SAMPLE_DATE = "May 2, 1999"
SAMPLE_PARTS = (" Ann", " Lee", "'s birthday falls on", " May", " 2", ",", " 1999", ".", " He")
"""Parts that GPT-2 must encode to the same tokens as their concatenation; checked on loading."""
FIRST_ID = 2
"""The id of the first token; those before it are unused and <bos>."""


class Encoded(NamedTuple):
    """A text's tokens by GPT-2's numbers, and where those of a part of it start and end."""

    tokens: list[int]
    start: int
    end: int


class Table(NamedTuple):
    """Encoded texts as an array `ids` [..., longest], 0 past the end; `start` and `end` [...]."""

    ids: np.ndarray
    start: np.ndarray
    end: np.ndarray


@dataclass(frozen=True)
class Release:
    """The release's words and sentences as ids.

    `words` are first, middle and last names, days, months, years and pronouns, each [n, longest];
    `comma` is the id between day and year. `openings` and `closings` [templates, longest] are the
    first sentence before and after the date. `sentences` are those of the other attributes behind
    the pronoun, each [templates, values]. `work_city` [employers] are numbers in the last of them.
    """

    words: list[np.ndarray]
    comma: int
    openings: np.ndarray
    closings: np.ndarray
    sentences: list[Table]
    work_city: np.ndarray
    vocabulary: list[str]

    @functools.cached_property
    def num_templates(self) -> list[int]:
        """The number of templates of each attribute."""
        return [len(self.openings), *(len(table.ids) for table in self.sentences)]

    @functools.cached_property
    def sha256(self) -> str:
        """The hash of all that determines the ids of a biography, and of the ids' texts."""
        digest = hashlib.sha256(json.dumps([self.comma, self.vocabulary]).encode())
        tables = itertools.chain.from_iterable(self.sentences)
        for array in (*self.words, self.openings, self.closings, *tables, self.work_city):
            digest.update(json.dumps(array.shape).encode())
            digest.update(array.astype("<i8").tobytes())
        return digest.hexdigest()

    @functools.cached_property
    def names(self) -> list[dict[tuple[int, ...], int]]:
        """The numbers of first, middle and last names by their ids."""
        return [
            {_unpadded(row): number for number, row in enumerate(words)} for words in self.words[:3]
        ]

    @functools.cached_property
    def values(self) -> list[set[tuple[int, ...]]]:
        """The ids of all values of each attribute."""
        days, months, years = (list(map(_unpadded, words)) for words in self.words[3:6])
        dates = {
            (*month, *day, self.comma, *year)
            for month, day, year in itertools.product(months, days, years)
        }
        values = [dates]
        for ids, start, end in self.sentences:
            rows = zip(ids.reshape(start.size, -1).tolist(), start.flat, end.flat, strict=True)
            values.append({tuple(row[begin:stop]) for row, begin, stop in rows})
        return values

    @functools.cached_property
    def longest_value(self) -> int:
        return max(map(len, itertools.chain.from_iterable(self.values)))

    @functools.cached_property
    def beginnings(self) -> set[tuple[int, ...]]:
        """The ids with which some longer value begins."""
        values = itertools.chain.from_iterable(self.values)
        return {value[:length] for value in values for length in range(len(value))}


def _unpadded(row: np.ndarray) -> tuple[int, ...]:
    return tuple(row[row > 0].tolist())


class Pieces:
    """GPT-2's tokens, from a tokenizer.json. Raises UserError if it is another tokenizer's."""

    def __init__(self, path: Path) -> None:
        import tokenizers  # slow to import

        # with threads, the package warns after every fork
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        try:
            self._tokenizer = tokenizers.Tokenizer.from_str(path.read_text("utf-8"))
        except Exception as error:  # the package raises nothing more precise
            _refuse(path, f"no tokenizer.json: {error}")

        parts = self.encode(("", part, "") for part in SAMPLE_PARTS)
        [whole] = self.encode([("", "".join(SAMPLE_PARTS), "")])
        if list(itertools.chain.from_iterable(part.tokens for part in parts)) != whole.tokens:
            _refuse(path, "it does not split text into words as GPT-2's tokenizer does")

    def encode(self, texts: Iterable[tuple[str, str, str]]) -> list[Encoded]:
        """Encode texts of three parts each; `start` and `end` are those of the middle part."""
        texts = list(texts)
        encodings = self._tokenizer.encode_batch(list(map("".join, texts)))
        encoded = []
        for (before, middle, _), encoding in zip(texts, encodings, strict=True):
            first = len(before)
            last = first + len(middle)
            # A token that only reaches into the middle part is one of it.
            is_middle = [start < last and end > first for start, end in encoding.offsets]
            start = is_middle.index(True)
            encoded.append(Encoded(encoding.ids, start, start + sum(is_middle)))
        return encoded

    def text(self, number: int) -> str:
        """Return a token as GPT-2's vocabulary has it, with a sign for the space."""
        return str(self._tokenizer.id_to_token(number))


@functools.cache
def read_release(clone: str, tokenizer: str) -> Release:
    """Read the release's lists and templates from `clone`, the folder of the repository, and encode
    them with `tokenizer`, the path of a tokenizer.json. Raises UserError."""
    folder = Path(clone) / FOLDER
    lists = {name: _read_words(folder / "fields" / f"{name}.txt", LISTS[name]) for name in LISTS}
    openings, *templates = _read_templates(folder / SOURCE)
    companies = [line.partition("; ") for line in lists["company"]]
    employers = [employer for employer, _, _ in companies]
    work_cities = list(dict.fromkeys(city for _, _, city in companies))
    if "" in work_cities:
        _refuse(folder / "fields" / "company.txt", "a company has no city")

    # All that is ever encoded: words behind a space, and sentences with each of their values
    pieces = Pieces(Path(tokenizer))
    texts_of_words = (
        lists["first_name"],
        lists["middle_name"],
        lists["last_name"],
        [str(day) for day in range(1, 1 + DAYS)],
        MONTHS,
        [str(year) for year in range(FIRST_YEAR, FIRST_YEAR + YEARS)],
        PRONOUNS,
    )
    words = [pieces.encode(("", f" {word}", "") for word in texts) for texts in texts_of_words]
    dated = pieces.encode((before, SAMPLE_DATE, after) for before, after in openings)
    [comma] = pieces.encode([("", ",", "")])
    values = (lists["city"], lists["university"], lists["field"], employers, work_cities)
    sentences = [
        pieces.encode((before, value, after) for (before, after), value in itertools.product(*pair))
        for pair in zip(templates, values, strict=True)
    ]

    # Ids are in the order of GPT-2's numbers.
    all_texts = itertools.chain([comma], dated, *words, *sentences)
    numbers = sorted({number for text in all_texts for number in text.tokens})
    ids = {number: FIRST_ID + place for place, number in enumerate(numbers)}

    def padded(rows: Iterable[Sequence[int]]) -> np.ndarray:
        """Return rows of tokens as ids, 0 past their ends."""
        rows_of_ids = ([ids[number] for number in row] for row in rows)
        columns = itertools.zip_longest(*rows_of_ids, fillvalue=0)
        return np.array(list(columns)).T

    tables = []
    for texts, of_attribute in zip(sentences, values, strict=True):
        shape = (-1, len(of_attribute))
        start = np.array([text.start for text in texts]).reshape(shape)
        end = np.array([text.end for text in texts]).reshape(shape)
        rows = padded(text.tokens for text in texts)
        tables.append(Table(rows.reshape(*start.shape, -1), start, end))
    return Release(
        words=[padded(text.tokens for text in texts) for texts in words],
        comma=ids[comma.tokens[0]],
        openings=padded(text.tokens[: text.start] for text in dated),
        closings=padded(text.tokens[text.end :] for text in dated),
        sentences=tables,
        work_city=np.array([work_cities.index(city) for _, _, city in companies]),
        vocabulary=["<unused>", "<bos>", *map(pieces.text, numbers)],
    )


def _read_words(path: Path, size: int) -> list[str]:
    """Return the lines of a list of the release. Raises UserError unless there are `size`."""
    words = [line.strip() for line in _read(path).splitlines()]
    if len(words) != size:
        _refuse(path, f"it has {len(words)} lines, expected {size}")
    return words


def _read_templates(path: Path) -> list[list[tuple[str, str]]]:
    """Return the templates of each attribute: the texts between name and value, and behind it."""
    lists = {}
    source = _read(path)
    try:
        tree = ast.parse(source)
    except SyntaxError as error:
        _refuse(path, str(error))
    for function in tree.body:
        if isinstance(function, ast.FunctionDef) and function.name == TEXT_FUNCTION:
            for statement in function.body:
                if isinstance(statement, ast.Assign):
                    lists[ast.unparse(statement.targets[0])] = statement.value

    templates = []
    for name, placeholder in TEMPLATES.items():
        if name not in lists:
            _refuse(path, f"{TEXT_FUNCTION} has no {name}")
        try:
            texts = ast.literal_eval(lists[name])
        except ValueError as error:
            _refuse(path, f"{name}: {error}")
        if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
            _refuse(path, f"{name} is no list of texts")

        of_attribute = []
        for template in texts:
            nothing, _, text = template.partition("{name}")
            before, value, after = text.partition(placeholder)
            if nothing or not value:
                _refuse(path, f"{template!r} does not begin with a name, or has no {placeholder}")
            of_attribute.append((before, after))
        templates.append(of_attribute)
    return templates


def _read(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except (OSError, ValueError) as error:  # no file, no UTF-8, or no path at all
        _refuse(path, str(error))


def _refuse(path: Path, problem: str) -> NoReturn:
    raise UserError(
        "task.release",
        f"{path}: {problem}. Set data.task.release_path to a clone of facebookresearch/PhysicsLM4, "
        "and data.task.release_tokenizer to GPT-2's tokenizer.json",
        path=path,
    )
