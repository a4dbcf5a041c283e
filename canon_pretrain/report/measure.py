"""Two sides on one task: their scores, their difference and its noise; no verdict. No torch.

Pairs the items of both (items.py) and estimates their noise (noise.py, seeds.py); verdicts.py
decides on all rows together.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

from canon_pretrain.report.architectures import Recipe
from canon_pretrain.report.decide import ALPHA, critical_value
from canon_pretrain.report.evaluations import (
    Evaluation,
    Question,
    answers,
    differing_questions,
    is_loss,
)
from canon_pretrain.report.items import Items, Records, Scale
from canon_pretrain.report.noise import (
    Answers,
    Clusters,
    Paired,
    bootstrap_interval,
    mcnemar_test,
    one_side,
    paired,
)
from canon_pretrain.report.record import RunRecord
from canon_pretrain.report.seeds import SeedNoise, published_spread, seed_noise

NO_NOISE = SeedNoise(0.0, math.inf, "none", "none known")
TOLERANCE = 1e-6
"""By how much a score and the mean over its items may differ, relatively."""


@dataclass(frozen=True)
class Side:
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
    """Two sides that cannot be compared on a task; the message says why."""


@dataclass(frozen=True)
class Measured:
    """One row before the family is known; `bounded`: the metric is between 0 and 1.

    `weight`: its share of the family's error rate, in any unit. `answers` and the `sources` of
    their clusters are for means over tasks.
    """

    row: dict[str, Any]
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
            scores = [
                [found[max(several)].score(question) for question in asked]
                for found in by_step
                if max(several) in found
            ]
            group = [
                sum(scale.mean(score) for score in known) / len(asked)
                for each in scores
                if len(known := [score for score in each if score is not None]) == len(asked)
            ]
            is_ours = any(run.label in ours for run in recipe.runs)
            at_bound = bounded and group and (max(group) <= 0 or min(group) >= 1)
            if np.isfinite(group).all() and (not at_bound or (is_ours and each_tells)):
                groups.append(group)
                compared.append(is_ours)
        own_only = self.options.own_noise_only
        spreads = [
            published_spread(question.task, suite) if bounded and not own_only else None
            for question in asked
        ]
        given = self.options.seed_sigma
        sigmas = [
            given.get(f"{q.task}:{q.metric}", None if scale.is_log else given.get(q.task))
            for q in asked
        ]
        return seed_noise(
            groups,
            spread=_mean_if_all(spreads),
            given=_mean_if_all(sigmas),
            own_only=own_only,
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
        scale = Scale.of(question.metric)
        differing = differing_questions([*ours, *theirs], question.task)
        if items.keys is not others.keys:
            raise Refused(_other_items(items, others, differing))
        if differing and is_loss(question.metric):
            raise Refused(f"asked differently, on which it depends ({'; '.join(differing)})")
        # records of an older version may lack the sources
        coarse = min(items, others, key=lambda each: each.sources.size)
        clusters_N, num_clusters = coarse.clusters_N, int(coarse.sources.size)
        sides = (a_RN, b_RN)
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
        test = None
        if len(a_RN) == len(b_RN) == 1 and np.isin([a_RN, b_RN], (0.0, 1.0)).all():
            test = asdict(mcnemar_test(a_RN[0], b_RN[0]))
        extreme = None
        if bounded and num_clusters > 1:
            extreme = _extreme(sides, weights_N, clusters_N, guess)
        row = {
            **asdict(question),
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
            "mcnemar": test,
            "chance": guess,
            "seed_noise": _noise_content(noise, scale),
            "uninformative": extreme,
        }
        on_items = Answers(a_RN, b_RN, weights_N, clusters_N)
        found = paired([on_items], noise) if noise and num_clusters > 1 else None
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
        asked = [Question(row["suite"], row["task"], row["metric"]) for row in rows]
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
            "asked_differently": list(
                dict.fromkeys(x for row in rows for x in row["asked_differently"])
            ),
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
        """Return the standard error of one side's mean, on the scale that is averaged."""
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


def _noise_content(noise: SeedNoise | None, scale: Scale) -> dict[str, Any] | None:
    if noise is None:
        return None
    return {
        "sigma": noise.sigma,
        "df": noise.df if math.isfinite(noise.df) else None,
        "source": noise.source,
        "words": noise.words,
        "scale": "log" if scale.is_log else "metric",
    }


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
            abs(mean - level) <= critical_value(ALPHA, *noise.parts) for mean, noise in found
        ):
            return name
    return None
