"""Losses from elsewhere, of CSV files, as runs that `eval compare` judges.

A row is one item of held-out data. Columns: `item` or `document`, `loss`, and if known `weight`
(tokens or bytes) and `seed`. With both of the former, items of one document are not independent. No
torch.
"""

import csv
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from canon_pretrain.core.errors import UserError, nearest
from canon_pretrain.report.items import Evaluation, Items
from canon_pretrain.report.record import SEEDS, RunRecord, StoredResults
from canon_pretrain.run.folder import unique_labels
from canon_pretrain.run.results import LOSS, VALIDATION, Results, Score

ITEM, DOCUMENT, WEIGHT, SEED = "item", "document", "weight", "seed"
NAMES = (ITEM, DOCUMENT)
COLUMNS = (*NAMES, LOSS, WEIGHT, SEED)
TOTAL = "total"
"""Name of the one item of a file without items."""


class _Row(NamedTuple):
    """A line of a file; `document` is the item itself if the file has no such column."""

    line: int
    item: str
    document: str
    loss: float
    weight: float


class LossRun(RunRecord):
    """The losses of one seed, in place of a run folder: without config, launches and log."""

    def __init__(self, path: Path, label: str, seed: str, items: Items) -> None:
        super().__init__(path, f"{label}, seed {seed}" if seed else label)
        self.items = items
        self.config = {}
        self.identity = dict.fromkeys(SEEDS, seed or label)

        losses_N, weights_N = items.values[LOSS].T
        score = Score(float(np.average(losses_N, weights=weights_N)))
        task = {"version": 1, "primary": [LOSS], "higher_is_better": {LOSS: False}}
        asked = {
            "checkpoint": self.label,
            "step": None,
            "suite": VALIDATION,
            "limit": None,
            "train_fingerprint": None,
            "tasks": {VALIDATION: task},
        }
        results = Results(asked, {VALIDATION: {LOSS: score}}, {VALIDATION: len(items.keys)})
        evaluation = Evaluation(self.label, results, path, items)
        self._results = StoredResults([evaluation], [], [])

    @property
    def is_total(self) -> bool:
        return self.items.keys == (TOTAL,)

    @property
    def is_weighted(self) -> bool:
        return bool((self.items.values[LOSS][:, 1] != 1).any())


def read_sides(a: Sequence[Path], b: Sequence[Path]) -> list[list[LossRun]]:
    """Read the files of both sides: a run per seed of a file, or per file without seeds.

    Raises UserError for a bad file, and unless all seeds have the same items and weights.
    """
    paths = [*a, *b]
    runs_by_file = []
    for path, label in zip(paths, unique_labels(paths), strict=True):
        runs_by_file.append(_read_file(path, label))
    sides = []
    for files in (runs_by_file[: len(a)], runs_by_file[len(a) :]):
        sides.append([run for runs in files for run in runs])

    first, *others = sides[0] + sides[1]
    for run in others:
        _check_pair(first, run)
    return sides


def limits(sides: Sequence[Sequence[LossRun]]) -> list[str]:
    """Return what cannot be judged from the files, a sentence each."""
    sentences = []
    run = sides[0][0]
    if run.is_total:
        sentences.append("Only totals: the noise over items is unknown, so nothing is judged.")
    elif not run.is_weighted:
        sentences.append("No weights: each item counts as much as any other.")
    num_seeds = {name: len(side) for name, side in zip("AB", sides, strict=True)}
    for name, other in ("AB", "BA"):
        if num_seeds[name] == 1 < num_seeds[other]:
            sentences.append(f"{name} has one seed: seeds of {other} show how much seeds differ.")
    return sentences


def _read_file(path: Path, label: str) -> list[LossRun]:
    """Return a run per seed of a file, in the order of the file. Raises UserError."""
    by_seed: dict[str, list[_Row]] = {}
    for seed, row in _rows(path):
        by_seed.setdefault(seed, []).append(row)
    if not by_seed:
        raise UserError("losses.empty", f"{path} has no losses", path=path)

    return [LossRun(path, label, seed, _items(path, rows)) for seed, rows in by_seed.items()]


def _rows(path: Path) -> Iterator[tuple[str, _Row]]:
    """Yield the seed and the other columns of each line; the seed is "" without such a column."""
    try:
        with open(path, encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(file)
            columns = [name.strip() for name in reader.fieldnames or ()]
            _check_columns(path, columns)
            reader.fieldnames = columns
            for cells in reader:
                yield _row(path, reader.line_num, cells)
    except (UnicodeDecodeError, csv.Error) as error:
        raise UserError(
            "losses.not_csv", f"{path} is no CSV of UTF-8: {error}", path=path
        ) from None


def _check_columns(path: Path, columns: Sequence[str]) -> None:
    """Raise UserError for a missing, unknown or repeated column; what is ignored could matter."""
    unknown = [name for name in columns if name not in COLUMNS or columns.count(name) > 1]
    near = ""
    if LOSS not in columns:
        problem = f"no column {LOSS!r}"
        near = nearest(LOSS, unknown) or ""
    elif unknown:
        problem = f"a column {unknown[0]!r}"
        near = nearest(unknown[0], set(COLUMNS) - set(columns)) or ""
    else:
        return
    suggestion = f" Did you mean {near!r}?" if near else ""
    raise UserError(
        "losses.column",
        f"{path} has {problem}: expected item or document, loss, and if known weight and seed, "
        f"once each.{suggestion}",
        path=path,
        given=columns,
        expected=COLUMNS,
    )


def _row(path: Path, line: int, cells: dict[str, Any]) -> tuple[str, _Row]:
    """Return the seed of a line and its row. Raises UserError."""
    if None in cells or None in cells.values():
        raise UserError(
            "losses.value",
            f"{path}, line {line}: another number of cells than the header has",
            path=path,
            line=line,
        )
    texts = {name: text.strip() for name, text in cells.items()}
    for name in (*NAMES, SEED):
        if texts.get(name) == "":
            raise UserError(
                "losses.value", f"{path}, line {line}: {name} is empty", path=path, line=line
            )

    document = texts.get(DOCUMENT, "")
    item = texts.get(ITEM, document or TOTAL)
    row = _Row(
        line=line,
        item=item,
        document=document or item,
        loss=_number(path, line, LOSS, texts[LOSS]),
        weight=_number(path, line, WEIGHT, texts.get(WEIGHT, "1")),
    )
    return texts.get(SEED, ""), row


def _number(path: Path, line: int, name: str, text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    expected = "a finite number"
    is_valid = math.isfinite(number)
    if name == WEIGHT:
        expected = "a finite number above 0"
        is_valid = is_valid and number > 0
    if not is_valid:
        raise UserError(
            "losses.value",
            f"{path}, line {line}: {name} is {text[:40]!r}, expected {expected}",
            path=path,
            line=line,
            given=text,
        )
    return number


def _items(path: Path, rows: Sequence[_Row]) -> Items:
    """Return the items of one seed, sorted by name. Raises UserError if one repeats."""
    by_key: dict[str, _Row] = {}
    for row in rows:
        key = row.item
        if row.document != row.item:
            key = f"{row.document} {row.item}"
        if key in by_key:
            raise UserError(
                "losses.repeated",
                f"{path}, line {row.line}: {key!r} is also in line {by_key[key].line}. Expected "
                "a row per item and seed: name items in a column `item`, seeds in a column `seed`",
                path=path,
                given=key,
            )
        by_key[key] = row

    keys = tuple(sorted(by_key))
    ordered = [by_key[key] for key in keys]
    sources, clusters_N = np.unique([row.document for row in ordered], return_inverse=True)
    values_N2 = np.array([(row.loss, row.weight) for row in ordered])
    return Items(keys, sources, clusters_N, {LOSS: values_N2})


def _check_pair(run: LossRun, other: LossRun) -> None:
    """Raise UserError unless two runs have the same items with the same weights."""
    keys = run.items.keys
    other_keys = other.items.keys
    for has, lacks in ((run, other), (other, run)):
        missing = sorted({*has.items.keys} - {*lacks.items.keys})
        if missing:
            num_common = len({*keys} & {*other_keys})
            raise UserError(
                "losses.items",
                f"{lacks.label} lacks {len(missing):,} of the {len(has.items.keys):,} items of "
                f"{has.label}, such as {missing[0]!r}; {num_common:,} in common. Differences are "
                "judged on equal items: score both on the same, with equal names",
                missing=missing[:10],
            )

    weights_N = run.items.values[LOSS][:, 1]
    other_weights_N = other.items.values[LOSS][:, 1]
    differing_N = np.flatnonzero(weights_N != other_weights_N)
    if differing_N.size:
        first = int(differing_N[0])
        raise UserError(
            "losses.weights",
            f"the weight of {keys[first]!r} is {weights_N[first]:g} in {run.label} and "
            f"{other_weights_N[first]:g} in {other.label}, and so of {differing_N.size:,} items. "
            "Expected equal weights: of other tokenizers, losses per byte with bytes as weights",
            given=keys[first],
        )
