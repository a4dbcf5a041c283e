"""The documents behind a training step: their texts, losses and gradients, outliers first.

    canon explain RUN --step N               a table, and the texts of the outliers
    canon explain RUN --step N --around 5    also of the five steps before
    canon explain RUN --step N --out page.html

Losses and gradients are computed on this machine, by the last checkpoint before the step.
"""

import argparse
import json
import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from markupsafe import Markup
from rich.table import Table
from rich.text import Text

from canon_pretrain.checkpoint.folder import CheckpointFolder
from canon_pretrain.core import page
from canon_pretrain.core.cli import number_type, positive
from canon_pretrain.core.errors import UserError
from canon_pretrain.core.files import write_atomic
from canon_pretrain.core.terminal import Console
from canon_pretrain.report.record import RunRecord
from canon_pretrain.run.log import json_value
from canon_pretrain.stats.outliers import OUTLIER, Sample, deviations

if TYPE_CHECKING:  # imports torch
    from canon_pretrain.data.tokenizer import Tokenizer
    from canon_pretrain.hf.window_losses import StepLosses
    from canon_pretrain.model.transformer import Transformer
    from canon_pretrain.report.windows import Part, StepReader, Window

TEMPLATES = Path(__file__).parent / "report" / "templates"
TOP = 10
SHOWN_CHARACTERS = 400
"""Of a text in the terminal."""
DARKEST_NATS = 16.0
"""Nats of a token on the darkest background of the page."""


@dataclass(frozen=True)
class PartRow:
    """A document's tokens in a window of a step, and how a model predicts them.

    The tokens are `tokens` from `start` on of the document's `document_tokens`. `nats[k]` is the
    loss of `ids[k]`, None of the window's first token, which is not predicted, and without a
    checkpoint. `deviations`: how far `nats_per_token` is above that of the step's other
    documents (stats/outliers.py). `gradient_share`: the norm of the window's gradient over the sum
    of those of all windows of the step.
    """

    sample: int
    source: str
    fingerprint: str
    document: int
    document_tokens: int
    start: int
    tokens: int
    nats_per_token: float | None
    deviations: float | None
    gradient_share: float | None
    text: str
    ids: Sequence[int]
    nats: Sequence[float | None]

    @property
    def is_outlier(self) -> bool:
        return self.deviations is not None and self.deviations >= OUTLIER


@dataclass(frozen=True)
class StepContent:
    """A step: the rows of its windows' documents, outliers first, and its loss and gradient norm.

    `logged_...`: what training logged; None if it did not. `checkpoint`: the step of the checkpoint
    that computed the losses; None without one.
    """

    step: int
    checkpoint: int | None
    num_windows: int
    loss: float | None
    logged_loss: float | None
    gradient_norm: float | None
    logged_gradient_norm: float | None
    documents: Sequence[PartRow]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Show the documents of a training step as text, with losses and gradients by the last "
        "checkpoint before it, outliers first. The run may have had any number of ranks."
    )
    add = parser.add_argument
    add("run", type=Path, metavar="RUN", help="a run folder")
    add("--step", type=positive, required=True, metavar="N", help="the step, from 1")
    add(
        "--around",
        type=number_type(int, lambda number: number >= 0, "an integer of at least 0"),
        default=0,
        metavar="K",
        help="also the K steps before it",
    )
    add("--top", type=positive, default=TOP, help="documents to show (default: %(default)s)")
    add("--data", type=Path, nargs="+", default=[], metavar="DIR", help="where the data are now")
    add(
        "--exclude",
        type=Path,
        metavar="FILE",
        help="add the outliers to the list FILE, for --data.exclude of `canon train`",
    )
    add(
        "--deviations",
        type=number_type(float, lambda number: 0 < number < math.inf, "a number above 0"),
        default=OUTLIER,
        metavar="D",
        help="deviations from which on a document is an outlier (default: %(default)g)",
    )
    add("--out", type=Path, metavar="FILE", help="write a page: the top documents by token")
    add("--json", action="store_true", help="print one JSON document, with all documents")


def run(arguments: argparse.Namespace) -> None:
    """Print, or write, the documents of the steps. Raises UserError."""
    # Before torch is imported: these errors come at once.
    record = RunRecord(arguments.run)
    num_steps = record.config.get("training", {}).get("steps", math.inf)
    if arguments.step > num_steps:
        raise UserError(
            "explain.step",
            f"--step {arguments.step:,}: {arguments.run} has the steps 1 to {num_steps:,}",
            given=arguments.step,
        )
    from canon_pretrain.hf.loading import find_tokenizer
    from canon_pretrain.report.windows import StepReader

    data_folder = arguments.data[0] if arguments.data else None
    with StepReader(record, arguments.data) as reader:
        tokenizer = find_tokenizer(record.folder.path, record.folder, data_folder)
        first = max(1, arguments.step - arguments.around)
        contents = list(step_contents(record, reader, tokenizer, range(first, arguments.step + 1)))

    if arguments.exclude:
        exclude_outliers(arguments.exclude, contents, arguments.deviations)
    if arguments.json:
        steps = [asdict(content) for content in contents]
        print(json.dumps(json_value({"run": str(arguments.run), "steps": steps}), allow_nan=False))
    else:
        for content in contents:
            print_step(content, arguments.top)
    if arguments.out:
        write_explained(arguments.out, record, contents, tokenizer, arguments.top)


def step_contents(
    record: RunRecord, reader: "StepReader", tokenizer: "Tokenizer", steps: range
) -> Iterator[StepContent]:
    """Yield the content of each step; the model of a checkpoint is loaded once."""
    checkpoints = CheckpointFolder.of_run(record.folder)
    saved_steps = checkpoints.steps()
    logged = {event.step: event for event in _logged_steps(record)}
    loaded_step = None
    model = None
    for step in steps:
        windows = reader.read(step, tokenizer)

        # The weights with which the step began, or older ones; else the oldest there are.
        nearest = None
        if saved_steps:
            before = [saved for saved in saved_steps if saved < step]
            nearest = before[-1] if before else saved_steps[0]
        if nearest is not None and nearest != loaded_step:
            model = _load(record, checkpoints.step_path(nearest))
            loaded_step = nearest

        losses = None
        if model is not None:
            from canon_pretrain.hf.window_losses import step_losses

            losses = step_losses(model, [window.ids for window in windows])
        event = logged.get(step, {})
        yield StepContent(
            step=step,
            checkpoint=nearest,
            num_windows=len(windows),
            loss=_mean_loss(losses),
            logged_loss=event.get("loss"),
            gradient_norm=losses and losses.gradient_norm,
            logged_gradient_norm=event.get("grad_norm"),
            documents=part_rows(windows, losses),
        )


def exclude_outliers(path: Path, contents: Sequence[StepContent], least: float) -> None:
    """Add the documents with at least so many deviations to the list in a file.

    Raises UserError if there are none.
    """
    from canon_pretrain.data.exclusion import read_excluded, write_excluded

    documents: dict[str, set[int]] = {}
    if path.exists():
        for fingerprint, numbers in read_excluded(path).documents.items():
            documents[fingerprint] = {*numbers}

    largest = -math.inf
    num_outliers = 0
    for content in contents:
        for row in content.documents:
            if row.deviations is None:
                continue
            largest = max(largest, row.deviations)
            if row.deviations >= least:
                num_outliers += 1
                documents.setdefault(row.fingerprint, set()).add(row.document)
    if not num_outliers:
        raise UserError(
            "explain.no_outlier",
            f"no document is {least:g} deviations above the others (the largest: {largest:.1f}); "
            "set --deviations, or write the list yourself (canon_pretrain/data/exclusion.py)",
            largest=largest,
        )
    write_excluded(path, documents)


def _logged_steps(record: RunRecord) -> Sequence[Any]:
    return record.steps if record.folder.log_file.exists() else ()


def _load(record: RunRecord, checkpoint: Path) -> "Transformer":
    import torch

    from canon_pretrain.hf.loading import load_model
    from canon_pretrain.machine.device import check_cuda

    check_cuda()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return load_model(checkpoint, device, run=record.folder)


def _mean_loss(losses: "StepLosses | None") -> float | None:
    """Return the mean over all tokens of a step; None without losses."""
    if losses is None:
        return None
    return statistics.fmean(nats for window_nats in losses.nats for nats in window_nats)


def part_rows(windows: "Sequence[Window]", losses: "StepLosses | None") -> list[PartRow]:
    """Return the rows of all documents in the windows: by deviations, else in their order."""
    # The parts of all windows, each with the nats of its tokens.
    parts: list[tuple[Window, Part]] = []
    nats_by_part: list[list[float | None]] = []
    shares: list[float | None] = []
    for k, window in enumerate(windows):
        nats: list[float | None] = [None] * len(window.ids)
        share = None
        if losses is not None:
            nats = [None, *losses.nats[k]]
            total_norm = math.fsum(losses.gradient_norms)
            share = losses.gradient_norms[k] / total_norm if total_norm else None
        for part in window.parts:
            parts.append((window, part))
            nats_by_part.append(nats[part.first : part.first + len(part.ids)])
            shares.append(share)

    # How the means differ; a part without a predicted token has none.
    samples = {}
    for k, part_nats in enumerate(nats_by_part):
        known = [nats for nats in part_nats if nats is not None]
        if known:
            stdev = statistics.stdev(known) if len(known) > 1 else math.nan
            samples[k] = Sample(statistics.fmean(known), stdev, len(known))
    deviation_of = dict(zip(samples, deviations([*samples.values()]), strict=True))

    rows = []
    for k, (window, part) in enumerate(parts):
        rows.append(
            PartRow(
                sample=window.sample,
                source=part.source,
                fingerprint=part.fingerprint,
                document=part.document,
                document_tokens=part.document_tokens,
                start=part.start,
                tokens=len(part.ids),
                nats_per_token=samples[k].mean if k in samples else None,
                deviations=deviation_of.get(k),
                gradient_share=shares[k],
                text=part.text,
                ids=part.ids,
                nats=nats_by_part[k],
            )
        )
    return sorted(
        rows, key=lambda row: -math.inf if row.deviations is None else row.deviations, reverse=True
    )


# -- the terminal


def headline(content: StepContent) -> str:
    """Return a line on a step: its loss and gradient norm here, and as logged."""
    text = f"step {content.step:,}: {content.num_windows:,} windows"
    if content.checkpoint is None:
        return f"{text}; no checkpoint, so no losses"
    parts = [
        _with_logged("loss", content.loss, content.logged_loss),
        _with_logged("gradient norm", content.gradient_norm, content.logged_gradient_norm),
    ]
    return f"{text}, by the checkpoint of step {content.checkpoint:,}: {', '.join(parts)}"


def _with_logged(name: str, value: float | None, logged: float | None) -> str:
    logged_text = "" if logged is None else f" (logged {logged:.4g})"
    return f"{name} {_number(value, '.4g')}{logged_text}"


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def cells(row: PartRow) -> list[str]:
    """Return the cells of a row, in the order of COLUMNS."""
    return [
        _number(row.deviations, "+.1f"),
        _number(row.nats_per_token, ".2f"),
        _number(row.gradient_share, ".1%"),
        f"{row.tokens:,}",
        row.source,
        f"{row.document:,}",
        f"{row.start:,}",
        f"{row.sample:,}",
    ]


COLUMNS = (
    "deviations",
    "nats/token",
    "gradient",
    "tokens",
    "source",
    "document",
    "from token",
    "window",
)


def print_step(content: StepContent, top: int) -> None:
    """Print a table of the first documents of a step, and the texts of the outliers among them."""
    console = Console(highlight=False)
    console.print(Text(headline(content), style="bold"), soft_wrap=True)
    table = Table(box=None, pad_edge=False)
    for name in COLUMNS:
        table.add_column(name, justify="left" if name == "source" else "right", no_wrap=True)
    shown = content.documents[:top]
    for row in shown:
        table.add_row(*map(Text, cells(row)), style="red" if row.is_outlier else None)
    console.print(table)
    if len(content.documents) > top:
        console.print(f"and {len(content.documents) - top:,} more (--top)")

    # Texts of the outliers, or of the first document.
    outliers = [row for row in shown if row.is_outlier]
    for row in outliers or shown[:1]:
        place = f"{row.source}, document {row.document:,}, tokens from {row.start:,} on"
        console.print(Text(f"== {place}", style="dim"), soft_wrap=True)
        more = "\u2026" if len(row.text) > SHOWN_CHARACTERS else ""
        console.print(Text(row.text[:SHOWN_CHARACTERS] + more), soft_wrap=True)


# -- the page


def write_explained(
    path: Path,
    record: RunRecord,
    contents: Sequence[StepContent],
    tokenizer: "Tokenizer",
    top: int,
) -> None:
    """Write the first documents of each step as a page, each token with its nats as background."""
    steps = []
    for content in contents:
        documents = []
        for row in content.documents[:top]:
            documents.append({"row": row, "cells": cells(row), "tokens": _shaded(row, tokenizer)})
        steps.append({"headline": headline(content), "documents": documents})
    template = page.environment(TEMPLATES, autoescape=True).get_template("explain.html")
    sheets = [page.COMMON / name for name in ("page.css", "dark.css")]
    text = template.render(
        title=record.label,
        style=Markup("".join(sheet.read_text("utf-8") for sheet in sheets)),
        columns=COLUMNS,
        steps=steps,
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, text.encode())


class ShadedToken(NamedTuple):
    """What a token adds to the text, its nats, and how dark its background is, 0 to 100 %."""

    text: str
    nats: float | None
    shade: int


def _shaded(row: PartRow, tokenizer: "Tokenizer") -> list[ShadedToken]:
    """Return the tokens of a document; the last one has what is left of the text."""
    from canon_pretrain.hf.sampling import Detokenizer
    from canon_pretrain.report.windows import ANCHOR

    # A text that begins inside a document is decoded after another, for its first space.
    detokenizer = Detokenizer(lambda ids: tokenizer.decode(list(ids)))
    if row.start:
        detokenizer.add(tokenizer.encode(ANCHOR).tolist())
    tokens = []
    for token, nats in zip(row.ids, row.nats, strict=True):
        shade = 0.0 if nats is None else 100 * min(1.0, nats / DARKEST_NATS)
        tokens.append(ShadedToken(detokenizer.add([token]), nats, round(shade)))
    last = tokens[-1]
    tokens[-1] = last._replace(text=last.text + detokenizer.flush())
    return tokens
