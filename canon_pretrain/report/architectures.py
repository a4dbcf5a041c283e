"""Group runs by architecture, label each, and choose its learning rate. No torch.

An architecture is the identity of a run without its learning rate and seeds.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import fields
from statistics import fmean
from typing import Any, NamedTuple

from canon_pretrain.core.terminal import printable
from canon_pretrain.model.args import ModelArgs
from canon_pretrain.report.evaluations import logged_losses, suite_losses
from canon_pretrain.report.items import HELD_OUT
from canon_pretrain.report.record import SEEDS, RunRecord

LEARNING_RATE = "optimizer.lr"
LABEL_FIELDS = (
    "model.mixer",
    "model.mixer_conv",
    "model.position",
    "model.canon_set",
    "model.ffn",
    "model.num_layers",
    "model.dim",
    "model.num_heads",
)
"""In a label before any other field."""

DEFAULTS = {f"model.{field.name}": field.default for field in fields(ModelArgs)}
"""Settings of runs whose version did not have the field yet."""


class Recipe(NamedTuple):
    """Runs that differ in their seeds only; `repeats` have the same seeds as one of `runs`."""

    learning_rate: float | None
    runs: list[RunRecord]
    repeats: list[RunRecord]


class Architecture(NamedTuple):
    """`settings`: the fields that differ between architectures; `recipes` in order of the runs."""

    label: str
    settings: dict[str, Any]
    recipes: list[Recipe]

    @property
    def runs(self) -> list[RunRecord]:
        return [run for recipe in self.recipes for run in recipe.runs]


class Choice(NamedTuple):
    """The chosen recipe, None if there is none, and why; `losses` of all recipes at `step`."""

    recipe: Recipe | None
    reason: str
    losses: list[float | None]
    step: int | None


def _setting(run: RunRecord, name: str) -> Any:
    return run.identity.get(name, DEFAULTS.get(name))


def _grouped(runs: Sequence[RunRecord], names: Sequence[str]) -> list[list[RunRecord]]:
    """Group runs with equal values of the settings `names`."""
    groups: dict[str, list[RunRecord]] = {}
    for run in runs:
        values = [_setting(run, name) for name in names]
        key = json.dumps(values, sort_keys=True)
        groups.setdefault(key, []).append(run)
    return list(groups.values())


def architectures(runs: Sequence[RunRecord]) -> list[Architecture]:
    """Group runs by architecture, then by learning rate; labels are unique."""
    recorded = {name for run in runs for name in run.identity}
    names = sorted(recorded - {LEARNING_RATE, *SEEDS, HELD_OUT})
    groups = _grouped(runs, names)

    # All runs of an architecture have its settings, so one of them represents it.
    representatives = [group[0] for group in groups]
    differing = []
    for name in names:
        groups_by_value = _grouped(representatives, [name])
        if len(groups_by_value) > 1:
            differing.append(name)
    labels = _labels(representatives, differing)
    grouped = []
    for label, group in zip(labels, groups, strict=True):
        settings = {name: _setting(group[0], name) for name in differing}
        recipes = [recipe_of(recipe_runs) for recipe_runs in _grouped(group, [LEARNING_RATE])]
        grouped.append(Architecture(label, settings, recipes))
    return grouped


def recipe_of(runs: Sequence[RunRecord]) -> Recipe:
    """Return the recipe of runs that differ in their seeds only."""
    seen: list[dict[str, Any]] = []
    learning_rate = runs[0].identity.get(LEARNING_RATE)
    recipe = Recipe(learning_rate, [], [])
    for run in runs:
        identity = DEFAULTS | run.identity | {HELD_OUT: None}
        if run.identity and identity in seen:
            recipe.repeats.append(run)
        else:
            recipe.runs.append(run)
        seen.append(identity)
    return recipe


def _labels(runs: Sequence[RunRecord], differing: Sequence[str]) -> list[str]:
    """Return a short unique label per architecture; `runs`: one run of each."""
    if len(runs) == 1:
        [run] = runs
        label = run.flavor or run.label
        mixer = _setting(run, "model.mixer")
        if mixer not in (None, "attention"):
            label = f"{label}, {mixer}"
        return [printable(label)]

    # Add a field if labels with it distinguish more runs; LABEL_FIELDS come first, in their order.
    labels: list[str] = []
    fields_first = sorted(differing, key=lambda name: (*LABEL_FIELDS, name).index(name))
    for name in fields_first:
        longer_labels = [printable(_label_part(run, name)) for run in runs]
        if labels:
            pairs = zip(labels, longer_labels, strict=True)
            longer_labels = [", ".join(pair) for pair in pairs]
        if len({*longer_labels}) > len({*labels}):
            labels = longer_labels

    # Values may be equal in the characters that a label shows.
    unique_labels = []
    for label, run in zip(labels, runs, strict=True):
        if labels.count(label) > 1:
            label = f"{label} ({run.label})"
        unique_labels.append(label)
    return unique_labels


def _label_part(run: RunRecord, name: str) -> str:
    value = _setting(run, name)
    if name == "model.canon_set":
        return f"Canon-{value}" if value else "no Canon"
    if name == "model.mixer_conv":
        return "conv1d" if value else "no conv1d"

    text = str(value)[:16]
    if name in ("model.mixer", "model.position"):
        return text
    _, _, field_name = name.rpartition(".")
    return f"{field_name} {text}"


def choose(architecture: Architecture) -> Choice:
    """Choose the learning rate with the lowest held-out loss at the last common step of one text.

    From the suite `validation`, or the training log if it has a later step. NaN is the worst.
    """
    recipes = architecture.recipes
    own_texts = [str(run.identity.get(HELD_OUT)) for run in architecture.runs]
    losses: list[float | None] = [None] * len(recipes)
    step = None
    chosen_source = ""
    sources = {
        "the suite `validation`": suite_losses,
        "the training log": logged_losses,
    }
    for source, losses_of in sources.items():
        # The last step at which all runs have a loss of one text; of several, of their own text.
        losses_by_run = {run: losses_of(run) for run in architecture.runs}
        common = set.intersection(*map(set, losses_by_run.values()))
        last = max(
            common,
            key=lambda scored: (scored.step, scored.text in own_texts, scored.text),
            default=None,
        )

        # The suite is first, so it wins at equal steps.
        if last is not None and (step is None or last.step > step):
            step = last.step
            chosen_source = source
            losses = []
            for recipe in recipes:
                recipe_losses = [losses_by_run[run][last] for run in recipe.runs]
                mean = fmean(recipe_losses)
                losses.append(mean if math.isfinite(mean) else None)

    # The recipe with the lowest loss; a single one needs no loss.
    if len(recipes) == 1:
        return Choice(recipes[0], "its only learning rate", losses, step)
    finite_losses = [loss for loss in losses if loss is not None]
    if not finite_losses:
        reason = (
            f"{len(recipes)} learning rates without a finite held-out loss at a common step and "
            "text: evaluate them on the suite `validation`, or pass the runs of one only"
        )
        return Choice(None, reason, losses, step)
    best = losses.index(min(finite_losses))
    reason = f"lowest loss at step {step} in {chosen_source}"
    return Choice(recipes[best], reason, losses, step)
