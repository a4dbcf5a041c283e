"""Numbers that others published, shown beside one's own and never used in a verdict.

Scores of 1.3B models, the decision accuracy of tasks, and the curves in a clone of PhysicsLM4,
whose plotly pages are read as text: nothing in the clone is executed. No torch.
"""

import hashlib
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from canon_pretrain.core.errors import UserError
from canon_pretrain.core.files import parsing, read_bytes
from canon_pretrain.core.terminal import printable
from canon_pretrain.model.counts import num_parameters
from canon_pretrain.report import evaluations
from canon_pretrain.report.content import (
    DECISION_SIZES,
    Anchor,
    Anchors,
    Decision,
    PublishedCurves,
    PublishedLine,
    PublishedModel,
    PublishedPlot,
    RunLine,
    TaskScores,
    Verdict,
)
from canon_pretrain.report.figures import logged_values
from canon_pretrain.report.record import RunRecord

Key = tuple[str, str]
"""A task and a metric, or LOSS."""

SOURCE = (
    "Published: Gated DeltaNet paper, models of 1.3B parameters trained on 100B tokens of "
    "FineWeb-Edu. Other tokenizer and data order: not used in any verdict."
)
MODELS = ("Transformer++", "Mamba2", "Gated DeltaNet")
PUBLISHED = {
    ("wikitext", "word_perplexity"): (18.53, 16.56, 16.42),
    ("lambada_openai", "perplexity"): (18.32, 12.56, 12.17),
    ("lambada_openai", "acc"): (42.60, 45.66, 46.65),
    ("piqa", "acc"): (70.02, 71.87, 72.25),
    ("hellaswag", "acc_norm"): (50.23, 55.67, 55.76),
    ("winogrande", "acc"): (53.51, 55.24, 57.45),
    ("arc_easy", "acc"): (68.83, 72.47, 71.21),
    ("arc_challenge", "acc_norm"): (35.10, 37.88, 38.39),
    ("social_iqa", "acc"): (40.66, 40.20, 40.63),
    ("boolq", "acc"): (57.09, 60.13, 60.24),
}
"""(task, metric): the scores of MODELS; accuracies in percent, as published."""

DECISION_NOTE = (
    "Decision accuracy, published: how often accuracy on the task orders two models of {} as it "
    "orders models of 1B trained on the same two data sets (25 of DataDecide; near 50 % is a coin "
    "flip). Heineman et al. 2025, Signal and Noise, arXiv 2508.13144: table in the README of "
    "github.com/allenai/signal-and-noise, commit 48fbb34. Their prompts differ, and the pairs "
    "differ in data, not in architecture."
)


def published_scores(shown: Iterable[Key]) -> Anchors | None:
    """Return the published scores of the (task, metric) pairs, as fractions; None if none."""
    rows = []
    for task, metric in dict.fromkeys(shown):
        if (task, metric) in PUBLISHED:
            scale = 100 if metric.startswith("acc") else 1
            published = PUBLISHED[task, metric]
            scores = [round(score / scale, 6) for score in published]
            rows.append(Anchor(task, metric, scores))
    return Anchors(SOURCE, MODELS, rows) if rows else None


def decision(run: RunRecord, rows: Iterable[Verdict | TaskScores]) -> Decision | None:
    """Return the decision accuracy of the published size nearest to the run's.

    None if it is not known for any of the rows.
    """
    size = _nearest_size(DECISION_SIZES, run, default=min(DECISION_SIZES.values()))
    nearest = Decision(size, DECISION_NOTE.format(size))
    if any(nearest.accuracy(row.task, row.metric) for row in rows):
        return nearest
    return None


CLONE = "https://github.com/facebookresearch/PhysicsLM4"
CLONE_NOTE = (
    "Published: curves of {models} models in {clone}, commit {commit} ({files}), named as there. "
    "Other data, tokenizer and settings of lm_eval: not used in any verdict, and their training "
    "loss per token is not comparable with yours. The plots show the models of {size}, the nearest "
    "to yours."
)
LOSS = ("training loss", "")
POINTS = 60  # drawn of a line
LOSS_WINDOW = 50  # logged steps of their moving average

# In a page: Plotly.newPlot("id", [traces], {layout}), whose layout has the title of the plot.
_PLOT = re.compile(r"Plotly\.newPlot\(")
_SEPARATOR = re.compile(r"\s*,?\s*")
_TASK = re.compile(r"Task: (\S+) \((\S+)\)")
# In the name of a model: its size in billions of parameters, and its learning rate.
_SIZE = re.compile(r"(?:^|-)(\d+(?:\.\d+)?)B(?=-|$)")
_RATE = re.compile(r"-lr[\d.]+$")


class Curve(NamedTuple):
    """One line of a published plot: float64 [n] tokens and values."""

    tokens: np.ndarray
    values: np.ndarray


Curves = dict[Key, dict[str, Curve]]
"""curves[key][model]"""


def read_clone(clone: Path) -> tuple[Curves, dict[str, str]]:
    """Return the curves in a clone of PhysicsLM4, and the SHA-256 of each page that has any.

    Raises UserError if there is none or a page is damaged.
    """
    curves: Curves = {}
    pages: dict[str, str] = {}
    for path in sorted(clone.rglob("*.html")):
        content = read_bytes(path)
        text = content.decode(errors="replace")
        name = str(path.relative_to(clone))
        with parsing(path):
            for key, plot_curves in _plots(text):
                curves.setdefault(key, {}).update(plot_curves)
                pages[name] = hashlib.sha256(content).hexdigest()
    if not curves:
        raise UserError(
            "report.published",
            f"--published {clone}: no plotly page of benchmarks or training loss; expected "
            f"a clone of {CLONE}",
            path=clone,
        )
    return curves, pages


def _plots(text: str) -> Iterator[tuple[Key, dict[str, Curve]]]:
    """Yield the curves of each plot with a known title; raises ValueError and the like."""
    for match in _PLOT.finditer(text):
        _, position = _argument(text, match.end())  # the element's id
        traces, position = _argument(text, position)
        layout, _ = _argument(text, position)

        # A plot is of a benchmark, of the training loss, or of something else.
        title = layout.get("title", {}).get("text")
        y_title = layout.get("yaxis", {}).get("title", {}).get("text")
        if task := _TASK.fullmatch(str(title)):
            key = printable(task[1]), printable(task[2])
        elif y_title == "Training loss":
            key = LOSS
        else:
            continue
        curves = {}
        for trace in traces:
            name = printable(str(trace["name"]))
            curve = _curve(trace)
            if curve.tokens.size:
                curves[name] = curve
        yield key, curves


def _argument(text: str, position: int) -> tuple[Any, int]:
    """Return the JSON argument that begins at `position`, and the position of its end."""
    separator = _SEPARATOR.match(text, position)
    if separator:
        position = separator.end()
    try:
        return json.JSONDecoder().raw_decode(text, position)
    except RecursionError:
        raise ValueError("a plot is nested too deeply") from None


def _curve(trace: Mapping[str, Any]) -> Curve:
    """Return the finite points of a line, sorted by tokens."""
    tokens = np.array(trace["x"], np.float64)
    values = np.array(trace["y"], np.float64)
    if not tokens.shape == values.shape == (tokens.size,) or not tokens.size:
        raise ValueError(f"the line {trace['name']!r:.60} has no list of numbers in x and y")

    is_finite = np.isfinite(values) & np.isfinite(tokens)
    is_shown = is_finite & (tokens > 0)  # the axis is logarithmic
    tokens = tokens[is_shown]
    order = np.argsort(tokens, kind="stable")
    return Curve(tokens[order], values[is_shown][order])


def commit_of(clone: Path) -> str | None:
    """Return the commit that a clone has checked out, from its files; None if unknown."""
    folder = clone / ".git"
    try:
        head = (folder / "HEAD").read_text().strip()
        ref = head.removeprefix("ref: ")
        if ref == head:  # detached
            return head
        ref_file = folder / ref
        if ref_file.is_file():
            return ref_file.read_text().strip()
        packed_refs = (folder / "packed-refs").read_text()
    except (OSError, ValueError):
        return None

    for line in packed_refs.splitlines():
        if line.endswith(f" {ref}"):
            return line.split()[0]
    return None


def beside_published(
    clone: Path, runs: Sequence[RunRecord], shown: Iterable[Key]
) -> PublishedCurves:
    """Return the published curves of the (task, metric) pairs `shown` and of the training loss.

    `plots`: own runs, and the published models of the size nearest to the first run's;
    `models`: every model's score at the tokens of the longest run, or at its first ones.
    """
    # The models of the shown plots, and their sizes; "" if the name of a model has none.
    curves, pages = read_clone(clone)
    keys = [key for key in (*dict.fromkeys(shown), LOSS) if key in curves]
    sizes: dict[str, str] = {}
    for key in keys:
        for name in curves[key]:
            match = _SIZE.search(name)
            sizes[name] = match[1] if match else ""
    num_parameters_of = {size: 1e9 * float(size) for size in sizes.values() if size}
    nearest_size = _nearest_size(num_parameters_of, runs[0], default=1e9)

    # Plots show the models of the nearest size; those of several learning rates are a family.
    families = {}
    for name, size in sizes.items():
        if size == nearest_size:
            families[name] = _RATE.sub("", name)
    run_curves = {}
    for run in runs:
        run_curves[run.label] = {key: _own_curve(run, key) for key in keys}
    plots = []
    for key in keys:
        lines = []
        for name, family in families.items():
            if name in curves[key]:
                tokens, values = _points(curves[key][name])
                lines.append(PublishedLine(name, family, tokens, values))

        run_lines = []
        for label, curve_by_key in run_curves.items():
            curve = curve_by_key[key]
            if curve.tokens.size:
                tokens, values = _points(curve)
                run_lines.append(RunLine(label, tokens, values))
        plots.append(PublishedPlot(*key, run_lines, lines))

    # The table shows own runs at their end, and all models.
    rows = []
    for label, curve_by_key in run_curves.items():
        rows.append(_model(label, "yours", curve_by_key, math.inf))
    longest = max(run.clock.tokens[-1] for run in runs)
    for name, size in sizes.items():
        model_curves = {key: curves[key].get(name) for key in keys}
        shown_size = f"{size or '?'}B"
        rows.append(_model(name, shown_size, model_curves, longest))

    shown_size = f"{nearest_size}B parameters" if nearest_size else "unknown size"
    note = CLONE_NOTE.format(
        models=len(sizes),
        clone=printable(str(clone)),
        commit=printable(commit_of(clone) or "unknown")[:12],
        files=printable(", ".join(pages)),
        size=shown_size,
    )
    return PublishedCurves(
        source=note,
        pages_sha256=pages,
        families=[*dict.fromkeys(families.values())],
        tasks=keys,
        plots=plots,
        models=rows,
    )


def _nearest_size(sizes: Mapping[str, float], run: RunRecord, *, default: float) -> str:
    """Return the name of the size that is nearest to the run's, or to `default` if unknown."""
    args = run.model_args
    log_size = math.log(num_parameters(args) if args else default)

    def log_distance(name: str) -> float:
        return abs(math.log(sizes[name]) - log_size)

    return min(sizes, key=log_distance, default="")


def _own_curve(run: RunRecord, key: Key) -> Curve:
    """Return a run's scores, or its training loss as a moving average, over tokens."""
    # The mean of the last LOSS_WINDOW losses, by differences of their running sum.
    if key == LOSS:
        _, tokens, losses = logged_values(run, "loss")
        is_shown = np.isfinite(losses) & (tokens > 0)
        cumulative = np.append(0, np.cumsum(losses[is_shown]))
        ends = np.arange(1, len(cumulative))
        starts = np.maximum(ends - LOSS_WINDOW, 0)
        sums = cumulative[ends] - cumulative[starts]
        means = sums / (ends - starts)
        return Curve(tokens[is_shown].astype(float), means)

    task, metric = key
    points: dict[int, float] = {}
    for evaluation in run.evaluations:
        score = evaluation.results.scores.get(task, {}).get(metric)
        if evaluation.limit is not None:
            continue
        if score is None or not math.isfinite(score.number):
            continue
        tokens_seen = evaluations.tokens_at(run, evaluation.step)
        if tokens_seen:
            points[tokens_seen] = score.number
    token_counts = sorted(points)
    scores = [points[num_tokens] for num_tokens in token_counts]
    return Curve(np.array(token_counts, np.float64), np.array(scores, np.float64))


def _points(curve: Curve) -> tuple[list[float], list[float]]:
    """Return tokens and values of at most POINTS, evenly spaced on a logarithmic axis."""
    tokens = curve.tokens
    last = tokens.size - 1
    spaced = np.geomspace(tokens[0], tokens[last], POINTS)
    points = np.append(np.searchsorted(tokens, spaced), last)
    indices = np.unique(points.clip(0, last))
    return tokens[indices].tolist(), curve.values[indices].tolist()


def _model(
    name: str, size: str, curves: Mapping[Key, Curve | None], max_tokens: float
) -> PublishedModel:
    """Return a model's values by task at its last scores up to `max_tokens`, and at its end."""
    values: list[list[float] | None] = []
    tokens_of_scores = 0.0
    for key, curve in curves.items():
        if curve is None or not curve.tokens.size:
            values.append(None)
            continue

        # Losses, which are last, are at the tokens of the scores.
        until = max_tokens
        if key == LOSS and tokens_of_scores:
            until = tokens_of_scores
        num_until = int(np.searchsorted(curve.tokens, until, side="right"))
        index = max(num_until - 1, 0)
        tokens_of_scores = max(tokens_of_scores, float(curve.tokens[index]))
        values.append(curve.values[[index, -1]].tolist())
    return PublishedModel(name, size, tokens_of_scores, values)
