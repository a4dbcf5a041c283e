"""Which differences are real: one row per task and pair of architectures, judged as one family.

Pairs the items of both sides (items.py), estimates their noise (noise.py) and decides on all rows
of a suite together (decide.py). No torch.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from canon_pretrain.report import decide
from canon_pretrain.report.architectures import Recipe
from canon_pretrain.report.decide import ALPHA, critical_value
from canon_pretrain.report.evaluations import (
    Evaluation,
    Question,
    answers,
    differing_questions,
    is_loss,
    logged_losses,
    questions,
    side_by_side,
    suite_order,
    suites_of,
)
from canon_pretrain.report.items import Items, Records, Scale
from canon_pretrain.report.noise import (
    Answers,
    Clusters,
    Paired,
    SeedNoise,
    bootstrap_interval,
    mcnemar_test,
    one_side,
    paired,
    published_spread,
    seed_noise,
)
from canon_pretrain.report.record import RunRecord
from canon_pretrain.run.results import VALIDATION

BETTER, WORSE, WITHIN, NOT_JUDGED = "better", "worse", "within noise", "not judged"
UNINFORMATIVE = "uninformative"
"""Within noise or not judged, with both sides at floor, ceiling or chance."""
VERDICTS = (BETTER, WORSE, WITHIN, NOT_JUDGED, UNINFORMATIVE)

BABILONG = re.compile(r"babilong_(qa[1-5])_(\d+)k")
NO_NOISE = SeedNoise(0.0, math.inf, "none", "none known")
TOLERANCE = 1e-6
"""By how much a score and the mean over its items may differ, relatively."""
NO_TEST = dict.fromkeys(
    ("ci", "log_difference", "log_ci", "stderr", "stderr_items", "stderr_seeds", "p", "p_holm")
    + ("detectable", "seeds_needed")
)

Row = dict[str, Any]


class Side(NamedTuple):
    """One side of a pair: an architecture's runs."""

    label: str
    runs: Sequence[RunRecord]


@dataclass(frozen=True)
class Options:
    """`seed_sigma`: TASK or TASK:METRIC -> the standard deviation of one run's score over seeds.

    `own_noise_only`: never the paper's. `step`, `suites`: those only. `any_step`: the two sides may
    be at different steps.
    """

    seed_sigma: Mapping[str, float] = field(default_factory=dict)
    own_noise_only: bool = False
    step: int | None = None
    suites: Sequence[str] | None = None
    any_step: bool = False


class Refused(Exception):
    """Two sides that cannot be compared on a task; the message is the reason."""


@dataclass(frozen=True)
class Measured:
    """One row before the family is known; `found` is None if it cannot be judged.

    `bounded`: the metric is between 0 and 1. `weight`: its share of the family's error rate, in any
    unit. `answers` and the `sources` of their clusters are for means over tasks.
    """

    row: Row
    found: Paired | None
    scale: Scale
    bounded: bool
    answers: Answers | None = None
    sources: np.ndarray | None = None
    weight: float = 1.0


@dataclass
class Measure:
    """Measures pairs; seed noise is estimated from `recipes`."""

    recipes: Sequence[Recipe]
    options: Options
    records: Records = field(default_factory=Records)

    def noise(
        self,
        asked: Sequence[Question],
        *,
        bounded: bool,
        sides: Sequence[Sequence[Evaluation]] = (),
    ) -> SeedNoise | None:
        """Return the seed noise of one task, or of the mean of several of a suite.

        What is published or given of each task does not say how they move together: they are taken
        to move as one, which can only make the noise of the mean too large. Recipes whose seeds all
        score 0, or all 1, vary no more for that reason and are left out; `sides`, the two compared,
        count if both have several seeds.
        """
        scale, suite = Scale.of(asked[0].metric), asked[0].suite
        ours = {each.run for side in sides for each in side}
        each_tells = bool(sides) and all(len(side) > 1 for side in sides)
        groups, compared = [], []
        for recipe in self.recipes:
            by_step = [answers(run, suite, self.options.step) for run in recipe.runs]
            steps = [at for found in by_step for at in found]
            several = [at for at in steps if steps.count(at) > 1]
            if not several:
                continue
            at = max(several)
            runs = [[f[at].score(question) for question in asked] for f in by_step if at in f]
            group = [
                sum(scale.mean(score) for score in known) / len(asked)
                for scores in runs
                if len(known := [score for score in scores if score is not None]) == len(asked)
            ]
            is_ours = any(run.label in ours for run in recipe.runs)
            at_bound = bounded and group and (max(group) <= 0 or min(group) >= 1)
            if np.isfinite(group).all() and (not at_bound or (is_ours and each_tells)):
                groups.append(group)
                compared.append(is_ours)
        given = self.options.seed_sigma
        only = self.options.own_noise_only
        spreads = [published_spread(q.task, suite) if bounded and not only else None for q in asked]
        sigmas = [
            given.get(f"{q.task}:{q.metric}", None if scale.is_log else given.get(q.task))
            for q in asked
        ]
        return seed_noise(
            groups,
            spread=_mean_if_all(spreads),
            given=_mean_if_all(sigmas),
            own_only=only,
            compared=compared if sides else None,
        )

    def pair(
        self,
        question: Question,
        ours: Sequence[Evaluation],
        theirs: Sequence[Evaluation],
        names: Mapping[str, str],
    ) -> Measured:
        """Return one row, without what depends on the family. Raises Refused."""
        a_RN, weights_N, items = self._answers(question, ours)
        b_RN, _, others = self._answers(question, theirs)
        differing = differing_questions([*ours, *theirs], question.task)
        if items.keys is not others.keys:
            raise Refused(_other_items(items, others, differing))
        if differing and is_loss(question.metric):
            raise Refused(f"asked differently, on which it depends ({'; '.join(differing)})")
        # records of an older version may lack the sources
        coarse = min(items, others, key=lambda each: each.sources.size)
        clusters_N, num_clusters = coarse.clusters_N, int(coarse.sources.size)
        scale, sides = Scale.of(question.metric), (a_RN, b_RN)
        value, baseline_value = (
            scale.score(float(np.average(x.mean(axis=0), weights=weights_N))) for x in sides
        )
        bounded = not is_loss(question.metric) and all(((x >= 0) & (x <= 1)).all() for x in sides)
        noise = self.noise([question], bounded=bounded, sides=[ours, theirs])
        guess = ours[0].chance(question.task, question.metric)
        if guess is None and question.metric.startswith("acc"):
            guess = items.chance
        # of these very runs, seeds apart
        difference = Clusters.of(a_RN.mean(axis=0) - b_RN.mean(axis=0), weights_N, clusters_N)
        items_ci = bootstrap_interval(difference, np.random.default_rng(0))
        single = len(a_RN) == len(b_RN) == 1 and np.isin([a_RN, b_RN], (0.0, 1.0)).all()
        several = num_clusters > 1
        extreme = _extreme(sides, weights_N, clusters_N, guess) if bounded and several else None
        row = {
            **question._asdict(),
            "higher_is_better": ours[0].higher_is_better(question),
            **names,
            "step": ours[0].step,
            "baseline_step": theirs[0].step,
            "value": value,
            "baseline_value": baseline_value,
            "difference": value - baseline_value,
            "num_items": len(items.keys),
            "num_clusters": num_clusters,
            "num_runs": [len(a_RN), len(b_RN)],
            "asked_differently": differing,
            "mean_of": None,
            "items_ci": [scale.change(x, baseline_value) for x in items_ci],
            "mcnemar": mcnemar_test(a_RN[0], b_RN[0]) if single else None,
            "chance": guess,
            "seed_noise": _noise_content(noise, scale),
            "uninformative": extreme,
        }
        on_items = Answers(a_RN, b_RN, weights_N, clusters_N)
        found = paired([on_items], noise) if noise and several else None
        return Measured(row, found, scale, bounded, on_items, coarse.sources)

    def mean(
        self,
        name: str,
        tasks: Sequence[Measured],
        ours: Sequence[Evaluation],
        theirs: Sequence[Evaluation],
    ) -> Measured:
        """Return the row of the plain mean of the scores of `tasks`: of one suite, and bounded.

        A source that several of them share is one draw.
        """
        rows = [each.row for each in tasks]
        given = [(x.answers, x.sources) for x in tasks if x.answers and x.sources is not None]
        sources, codes = np.unique(np.concatenate([x for _, x in given]), return_inverse=True)
        ends = np.cumsum([x.size for _, x in given])[:-1]
        shared = [
            replace(on_items, clusters_N=place_G[on_items.clusters_N])
            for (on_items, _), place_G in zip(given, np.split(codes, ends), strict=True)
        ]
        asked = [Question(x["suite"], x["task"], x["metric"]) for x in rows]
        noise = self.noise(asked, bounded=True, sides=[ours, theirs])
        value, baseline_value = (
            math.fsum(row[key] for row in rows) / len(rows) for key in ("value", "baseline_value")
        )
        extremes = {row["uninformative"] for row in rows}
        row = rows[0] | {
            "task": name,
            "metric": ", ".join(dict.fromkeys(row["metric"] for row in rows)),
            "value": value,
            "baseline_value": baseline_value,
            "difference": value - baseline_value,
            "num_items": sum(row["num_items"] for row in rows),
            "num_clusters": int(sources.size),
            "asked_differently": [*dict.fromkeys(x for r in rows for x in r["asked_differently"])],
            "items_ci": None,
            "mcnemar": None,
            "chance": _mean_if_all([row["chance"] for row in rows]),
            "seed_noise": _noise_content(noise, tasks[0].scale),
            "uninformative": extremes.pop() if len(extremes) == 1 else None,
            "mean_of": [row["task"] for row in rows],
        }
        is_judged = noise is not None and all(row["num_clusters"] > 1 for row in rows)
        found = paired(shared, noise) if noise is not None and is_judged else None
        return Measured(row, found, tasks[0].scale, True)

    def stderr(
        self, question: Question, evaluations: Sequence[Evaluation], noise: SeedNoise
    ) -> float | None:
        """Return the standard error of one side, on the scale that is averaged; None if unknown."""
        try:
            values_RN, weights_N, items = self._answers(question, evaluations)
        except Refused:
            return None
        found = one_side(values_RN, weights_N, items.clusters_N, noise)[1].stderr
        return found if math.isfinite(found) else None

    def _answers(
        self, question: Question, evaluations: Sequence[Evaluation]
    ) -> tuple[np.ndarray, np.ndarray, Items]:
        """The runs' values by item, the items' weights, and the items. Raises Refused."""
        scale, rows = Scale.of(question.metric), []
        first: tuple[np.ndarray, Items] | None = None
        for each in evaluations:
            score = each.score(question)
            if score is None:
                raise Refused(f"{each.run} has no {question.metric} of it")
            items = self.records.of(each.folder, question.task, question.metric)
            found = items.of_metric(question.metric) if items else None
            if items is None or found is None:
                raise Refused(f"{each.run} kept no records of its items: evaluate again")
            values_N, weights_N = found
            if not np.isfinite(values_N).all():
                raise Refused(f"{each.run} has an item without a finite value")
            mean = scale.score(float(np.average(values_N, weights=weights_N)))
            if not math.isclose(score, mean, rel_tol=TOLERANCE, abs_tol=TOLERANCE):
                raise Refused(
                    f"{each.run} scores {score:.6g}, which is no mean over its items ({mean:.6g})"
                )
            first = first or (weights_N, items)
            if items.keys is not first[1].keys:
                differing = differing_questions(evaluations, question.task)
                raise Refused(_other_items(first[1], items, differing))
            rows.append(values_N)
        assert first is not None  # a side has a run
        return np.stack(rows), *first


def _mean_if_all(values: Sequence[float | None]) -> float | None:
    known = [x for x in values if x is not None]
    return math.fsum(known) / len(known) if len(known) == len(values) else None


def _other_items(a: Items, b: Items, differing: Sequence[str]) -> str:
    common = len(set(a.keys) & set(b.keys))
    asked = f"; asked differently ({'; '.join(differing)})" if differing else ""
    return (
        f"other items: {len(a.keys)} and {len(b.keys)}, of them {common} in common{asked}. "
        "Evaluate both on the same data with the same options"
    )


def _noise_content(noise: SeedNoise | None, scale: Scale) -> Row | None:
    if noise is None:
        return None
    df = noise.df if math.isfinite(noise.df) else None
    named = {"source": noise.source, "words": noise.words}
    return {"sigma": noise.sigma, "df": df, **named, "scale": "log" if scale.is_log else "metric"}


def _extreme(
    sides: Sequence[np.ndarray],
    weights_N: np.ndarray,
    clusters_N: np.ndarray,
    chance: float | None,
) -> str | None:
    """ "floor" (0), "ceiling" (1) or "chance" if all sides score that, by the noise of items."""
    found = [one_side(values_RN, weights_N, clusters_N, NO_NOISE) for values_RN in sides]
    for name, level in (("floor", 0.0), ("ceiling", 1.0), ("chance", chance)):
        if level is not None and all(
            abs(mean - level) <= critical_value(ALPHA, *noise) for mean, noise in found
        ):
            return name
    return None


# -- the family -----------------------------------------------------------------------------------


def verdicts(
    measure: Measure, pairs: Sequence[tuple[Side, Side]]
) -> tuple[list[Row], list[Row], list[str]]:
    """Return rows and refusals of each (side, baseline), and notes on runs that were left out."""
    options = measure.options
    measured: list[Measured] = []
    refused: list[Row] = []
    notes: dict[str, None] = {}
    for side, baseline in pairs:
        both = [*side.runs, *baseline.runs]
        names = {"architecture": side.label, "baseline": baseline.label}
        for suite in suites_of(both, options.suites):
            nothing: Row = {"suite": suite, "task": None, "metric": None, **names}
            ours, theirs = side_by_side(
                side.runs, baseline.runs, suite, options.step, any_step=options.any_step
            )
            if not ours:
                refused.append(nothing | {"why": "no whole result at a step that both have"})
                continue
            here = {each.run for each in (*ours, *theirs)}
            if left := [run.label for run in both if run.label not in here]:
                note = f"{suite} at step {ours[0].step}: no whole result of {', '.join(left)}"
                notes[note] = None
            found = []
            for question in questions([*ours, *theirs], suite):
                if suite == VALIDATION and question.task != VALIDATION:
                    continue  # the count models beside it
                try:
                    found.append(measure.pair(question, ours, theirs, names))
                except Refused as reason:
                    refused.append(nothing | question._asdict() | {"why": str(reason)})
            measured += _with_means(measure, found, ours, theirs)
    measured.sort(key=lambda each: suite_order(each.row["suite"]))
    rows: list[Row] = []
    for suite in dict.fromkeys(each.row["suite"] for each in measured):
        rows += _family([each for each in measured if each.row["suite"] == suite])
    return rows, refused, list(notes)


def _with_means(
    measure: Measure,
    tasks: Sequence[Measured],
    ours: Sequence[Evaluation],
    theirs: Sequence[Evaluation],
) -> list[Measured]:
    """The rows of one suite and pair: the mean of its tasks first, Babilong as means per length.

    A task counts in a mean by its first metric between 0 and 1. The mean has half of the family's
    error rate, the others share the other half.
    """
    scored: dict[str, Measured] = {}
    for each in tasks:
        if each.bounded and each.row["higher_is_better"]:
            scored.setdefault(each.row["task"], each)
    cells: dict[int, list[Measured]] = {}
    for task, each in scored.items():
        if match := BABILONG.fullmatch(task):
            cells.setdefault(int(match[2]), []).append(each)
    rows = [each for each in tasks if not BABILONG.fullmatch(each.row["task"])]
    for length, members in sorted(cells.items()):
        name = f"babilong_{length}k, mean of {len(members)} tasks"
        single = len(members) == 1
        rows.append(members[0] if single else measure.mean(name, members, ours, theirs))
    if len(scored) > 1:
        name = f"{tasks[0].row['suite']}, mean of {len(scored)} tasks"
        mean = measure.mean(name, list(scored.values()), ours, theirs)
        rows.insert(0, replace(mean, weight=sum(each.weight for each in rows)))
    return rows


def _family(measured: Sequence[Measured]) -> list[Row]:
    """The rows of one suite, which is a family, with p, Holm's p and verdicts."""
    tests = [(each, each.found) for each in measured if each.found]
    p = np.array([float(decide.two_sided_p(x.difference, *x.noise)) for _, x in tests])
    weights = np.array([each.weight for each, _ in tests])
    adjusted, levels = decide.holm(p, weights), decide.holm_levels(p, weights)
    first = ALPHA * weights / weights.sum() if tests else weights
    judged = {
        id(each): _judged(each, found, *map(float, numbers))
        for (each, found), *numbers in zip(tests, p, adjusted, levels, first, strict=True)
    }
    return [each.row | (judged.get(id(each)) or _not_judged(each)) for each in measured]


def _not_judged(each: Measured) -> Row:
    row = each.row
    if row["uninformative"]:
        return {**NO_TEST, "verdict": UNINFORMATIVE, "why": None}
    why = "its items are of one source, so their noise is unknown"
    if row["num_clusters"] > 1:
        of = "of each task" if row["mean_of"] else f"{row['task']}:{row['metric']}=SIGMA"
        why = f"no seed noise known: give a second seed, or --seed_sigma {of}"
    return {**NO_TEST, "verdict": NOT_JUDGED, "why": why}


def _judged(
    each: Measured, found: Paired, p: float, p_holm: float, level: float, first_level: float
) -> Row:
    # `ci` is at the level of this test, which begins at `first_level`
    scale, row = each.scale, each.row
    size, noise = found.difference, found.noise
    half = decide.critical_value(level, *noise)
    ci = [size - half, size + half]
    is_real = p_holm <= ALPHA
    says_nothing = row["uninformative"] is not None and not is_real
    direction = BETTER if (size > 0) == row["higher_is_better"] else WORSE
    verdict = direction if is_real else UNINFORMATIVE if says_nothing else WITHIN
    detectable = decide.detectable(first_level, *noise)
    # None if it is more than there can be, or all sides are at floor
    is_shown = not (says_nothing or (each.bounded and detectable > 1))
    return {
        "ci": [scale.change(x, row["baseline_value"]) for x in ci],
        "log_difference": size if scale.is_log else None,
        "log_ci": ci if scale.is_log else None,
        "stderr": noise.stderr,
        "stderr_items": math.sqrt(noise.item_variance),
        "stderr_seeds": math.sqrt(noise.seed_variance),
        "p": p,
        "p_holm": p_holm,
        "detectable": scale.change(detectable, row["baseline_value"]) if is_shown else None,
        # a difference beyond noise has been shown already
        "seeds_needed": decide.seeds_needed(size, first_level, found.noise_with)
        if verdict == WITHIN
        else None,
        "verdict": verdict,
        "uninformative": row["uninformative"] if says_nothing else None,
        "why": None,
    }


def held_out_words(rows: Sequence[Row], refused: Sequence[Row], pair: tuple[Side, Side]) -> str:
    """Return the first verdict of a report: on held-out loss, where lower is better.

    Without evaluations the losses that training logged, and no verdict.
    """
    start, (side, baseline) = "held-out loss:", pair
    names = {"architecture": side.label, "baseline": baseline.label, "suite": VALIDATION}
    for row in rows:
        if names.items() <= row.items():
            size = abs(row["difference"])
            is_lower = row["difference"] < 0
            found = f"{'lower' if is_lower else 'higher'} by {size:.3g} nats/token"
            found = f"{side.label} {found} than {baseline.label}"
            ends = row["items_ci"] if row["ci"] is None else row["ci"]
            low, high = sorted(-x if is_lower else x for x in ends)
            interval = f"95 % {low:.3g} to {high:.3g}"
            if row["p"] is None:
                return f"{start} {NOT_JUDGED} ({row['why']}); {found} ({interval} over documents)"
            return f"{start} {row['verdict']}; {found} ({interval}, p {row['p_holm']:.2g})"
    for row in refused:
        if names.items() <= row.items():
            return f"{start} not compared: {row['why']}"
    how = "`python -m eval run --suite validation` evaluates a checkpoint"
    logged = [[logged_losses(run) for run in runs] for _, runs in pair]
    scored = set.intersection(*(set(losses) for runs in logged for losses in runs))
    if not scored:
        return f"{start} not evaluated; {how}"
    at = max(scored)
    ours, theirs = (math.fsum(x[at] for x in runs) / len(runs) for runs in logged)
    return (
        f"{start} no verdict; in training, at step {at[0]}: {side.label} {ours:.4f}, "
        f"{baseline.label} {theirs:.4f} nats/token ({how})"
    )
