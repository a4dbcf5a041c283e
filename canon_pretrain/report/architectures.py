"""Which runs are one architecture, what it is called, and which of its learning rates counts.

An architecture is all that a run is but its learning rate and its seeds. Between the runs as read
and the tables and verdicts of this package. No torch.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache
from typing import Any

from canon_pretrain.core.text import printable
from canon_pretrain.model.args import ModelArgs
from canon_pretrain.report.evaluations import Run, text_of
from canon_pretrain.run.log import number

LEARNING_RATE = "optimizer.lr"
SEEDS = ("model.init_seed", "data.data_seed")
TELLING = ("model.position", "model.canon_set", "model.num_layers", "model.dim", "model.num_heads")
"""What names an architecture before any other field does."""
HELD_OUT = "held_out_fingerprint"
"""The text of a held-out loss: part of a run's identity, and nothing that it is trained by."""
VALIDATION = "validation"
BY_SUITE, BY_LOG = "the suite `validation`", "the loss that training logs on held-out text"


@dataclass(frozen=True)
class Recipe:
    """Runs that differ in the seed alone: one architecture at one learning rate.

    `repeats`: runs with the seeds of an earlier one, which are no further draw; not in `runs`.
    """

    learning_rate: float | None
    runs: list[Run]
    repeats: list[Run]


@dataclass(frozen=True)
class Architecture:
    """`settings`: the fields that tell it from the others; `recipes` in order of appearance."""

    label: str
    settings: dict[str, Any]
    recipes: list[Recipe]

    @property
    def runs(self) -> list[Run]:
        """All of them, without repeats."""
        return [run for recipe in self.recipes for run in recipe.runs]


@dataclass(frozen=True)
class Choice:
    """The recipe that counts, or None and why; `losses` of all recipes at `step`, as found."""

    recipe: Recipe | None
    words: str
    losses: list[float | None]
    step: int | None = None

    @property
    def loss(self) -> float | None:
        return min((x for x in self.losses if x is not None), default=None)


@cache
def _defaults() -> dict[str, Any]:
    return {f"model.{field.name}": field.default for field in fields(ModelArgs)}


def setting(run: Run, name: str) -> Any:
    """A field of the run's identity; one that its version did not have was at its default."""
    return run.identity.get(name, _defaults().get(name))


def architectures(runs: Sequence[Run]) -> list[Architecture]:
    """The runs by architecture, then by learning rate; labels are unique."""
    known = {name for run in runs for name in run.identity}
    names = sorted(known - {LEARNING_RATE, *SEEDS, HELD_OUT})
    grouped: dict[str, list[Run]] = {}
    for run in runs:
        key = json.dumps([setting(run, name) for name in names], sort_keys=True)
        grouped.setdefault(key, []).append(run)
    members = list(grouped.values())
    differing = [
        name
        for name in names
        if len({json.dumps(setting(group[0], name), sort_keys=True) for group in members}) > 1
    ]
    labels = _labels([group[0] for group in members], differing)
    return [
        Architecture(label, {name: setting(group[0], name) for name in differing}, _recipes(group))
        for label, group in zip(labels, members, strict=True)
    ]


def _recipes(runs: Sequence[Run]) -> list[Recipe]:
    rates: dict[Any, list[Run]] = {}
    for run in runs:
        rates.setdefault(run.identity.get(LEARNING_RATE), []).append(run)
    return [recipe_of(group) for group in rates.values()]


def recipe_of(runs: Sequence[Run]) -> Recipe:
    """The runs as one recipe; of those that are alike, seeds too, the first counts."""
    known = [
        _defaults() | run.identity | {HELD_OUT: None} if run.identity else None for run in runs
    ]
    is_first = [each is None or each not in known[:k] for k, each in enumerate(known)]
    return Recipe(
        runs[0].identity.get(LEARNING_RATE),
        [run for run, first in zip(runs, is_first, strict=True) if first],
        [run for run, first in zip(runs, is_first, strict=True) if not first],
    )


def _labels(runs: Sequence[Run], differing: Sequence[str]) -> list[str]:
    """The fewest telling words for each, by one run of each architecture."""
    if len(runs) == 1:
        model = runs[0].config.get("config", {}).get("model", {})
        flavor = model.get("flavor") if isinstance(model, dict) else None
        return [printable(str(flavor or runs[0].label))]
    order = [name for name in TELLING if name in differing]
    order += [name for name in differing if name not in TELLING]
    chosen: list[str] = []

    def words(run: Run, names: Sequence[str]) -> str:
        return printable(", ".join(_word(name, setting(run, name)) for name in names))

    def told(names: Sequence[str]) -> int:
        return len({words(run, names) for run in runs})

    for name in order:
        if told([*chosen, name]) > told(chosen) or not chosen:
            chosen.append(name)
        if told(chosen) == len(runs):
            break
    labels = [words(run, chosen) for run in runs]
    # values that differ in more characters than a word shows
    return [
        label if labels.count(label) == 1 else f"{label} ({run.label})"
        for label, run in zip(labels, runs, strict=True)
    ]


def _word(name: str, value: Any) -> str:
    if name == "model.position":
        return str(value)
    if name == "model.canon_set":
        return f"Canon-{value}" if value else "no Canon"
    short = name.rpartition(".")[2]
    text = str(value)
    return f"{short} {text if len(text) <= 16 else text[:12]}"


def choose(architecture: Architecture) -> Choice:
    """The learning rate with the lowest held-out loss, at the last step that all of them have.

    Losses of different texts are never set beside each other. By the suite `validation`, or by the
    log where that goes further; never by the scores that are to be compared. A loss that is no
    number is worse than any.
    """
    recipes = architecture.recipes
    found = []
    for words, losses_of in ((BY_SUITE, suite_losses), (BY_LOG, logged_losses)):
        by_run = [[losses_of(run) for run in recipe.runs] for recipe in recipes]
        scored = set.intersection(*(set(losses) for group in by_run for losses in group))
        if scored:
            found.append((max(scored, key=_step_and_own_text(recipes)), words, by_run))
    if found:
        # the suite, of equal steps
        at, words, by_run = max(found, key=lambda each: each[0][0])
        step = at[0]
        means = [math.fsum(losses[at] for losses in group) / len(group) for group in by_run]
        losses = [x if math.isfinite(x) else None for x in means]
        if len(recipes) == 1:
            return Choice(recipes[0], "its only learning rate", losses, step)
        if all(x is None for x in losses):
            return Choice(None, f"no learning rate has a finite loss at step {step}", losses, step)
        finite = [math.inf if x is None else x for x in losses]
        best = finite.index(min(finite))
        return Choice(recipes[best], f"lowest loss at step {step} by {words}", losses, step)
    nothing: list[float | None] = [None] * len(recipes)
    if len(recipes) == 1:
        return Choice(recipes[0], "its only learning rate", nothing)
    return Choice(
        None,
        f"{len(recipes)} learning rates and no held-out loss at a step and of a text that they "
        "share: evaluate them on the suite `validation` (--held_out names a text), or name the "
        "runs of one learning rate only",
        nothing,
    )


Scored = tuple[int, str]
"""A step, and the text that a loss is of: its fingerprint, "None" if it was not recorded."""


def _step_and_own_text(recipes: Sequence[Recipe]) -> Callable[[Scored], tuple[int, bool, str]]:
    """The sort key of what was scored: the step, then whether it is the text of the runs."""
    own = [str(run.identity.get(HELD_OUT)) for recipe in recipes for run in recipe.runs]
    return lambda scored: (scored[0], scored[1] in own, scored[1])


def suite_losses(run: Run) -> Mapping[Scored, float]:
    """The held-out losses of the suite `validation`, by step and text."""
    found = {}
    for results in run.evaluations:
        score = results.scores.get(VALIDATION, {}).get("nats_per_token")
        if results.asked["suite"] == VALIDATION and results.asked["limit"] is None and score:
            found[results.asked["step"], text_of(results)] = score.value
    return found


def logged_losses(run: Run) -> Mapping[Scored, float]:
    """The held-out losses that training logged, by step and text."""
    found = {}
    for event in run.events:
        if event["event"] == "validation" and "step" in event and "loss" in event:
            text = event.get(HELD_OUT, run.identity.get(HELD_OUT))
            found[event["step"], str(text)] = number(event["loss"])
    return found
