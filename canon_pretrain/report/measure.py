"""Two sides on one task: their scores, their difference and its noise, before any verdict.

Sets the items of both beside each other (records.py, standing.py) and asks eval/stats for the
noise; verdicts.py decides on all rows together. No torch.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

from canon_pretrain.report import decide
from canon_pretrain.report.architectures import Recipe
from canon_pretrain.report.evaluations import Run
from canon_pretrain.report.items import Items, Records, Scale, agrees
from canon_pretrain.report.noise import Clusters, bootstrap_interval, mcnemar_test
from canon_pretrain.report.pair import Answers, Paired, one_side, paired
from canon_pretrain.report.seeds import SeedNoise, published_spread, seed_noise
from canon_pretrain.report.standing import (
    Question,
    Standing,
    by_step,
    chance,
    differing_questions,
    higher_is_better,
    is_loss,
    score_of,
)

NO_NOISE = SeedNoise(0.0, math.inf, "none", "none known")


@dataclass(frozen=True)
class Side:
    """One side of a pair: an architecture's runs."""

    label: str
    runs: Sequence[Run]


@dataclass(frozen=True)
class Options:
    """`seed_sigma`: TASK or TASK:METRIC -> the standard deviation of one run's score over seeds.

    `own_noise_only`: never the paper's. `step`: that one only. `suites`: those only.
    `any_step`: the two sides may stand at different steps.
    """

    seed_sigma: Mapping[str, float] = field(default_factory=dict)
    own_noise_only: bool = False
    step: int | None = None
    suites: Sequence[str] | None = None
    any_step: bool = False


class Refused(Exception):
    """Two sides that cannot be compared on a task; the message says why."""


@dataclass
class Measured:
    """One row before the family is known; `bounded`: the metric lies between 0 and 1.

    `weight`: its share of the family's error rate, in any unit. `answers` and the `sources` of
    their clusters: for means over tasks.
    """

    row: dict[str, Any]
    found: Paired | None
    scale: Scale
    bounded: bool
    baseline_value: float
    answers: Answers | None = None
    sources: np.ndarray | None = None
    weight: float = 1.0


@dataclass
class Measure:
    """Measures pairs; `recipes` are all that may tell the seed noise."""

    recipes: Sequence[Recipe]
    options: Options
    records: Records = field(default_factory=Records)

    def noise(
        self, asked: Sequence[Question], *, bounded: bool, of: Sequence[Sequence[Standing]] = ()
    ) -> SeedNoise | None:
        """The seed noise of one task, on the scale that is averaged; `of` the sides compared.

        Of several tasks of a suite, that of the mean of their scores. What is published or given of
        each says nothing of how they move together: they are taken to move as one, which can only
        make the noise of the mean too large.

        Recipes whose seeds all score 0, or all 1, vary no more for that reason: they tell nothing
        of others. Of the sides they count where both have several seeds.
        """
        scale, suite = Scale.of(asked[0].metric), asked[0].suite
        compared_runs = [standing.run for side in of for standing in side]
        each_tells = bool(of) and all(len(side) > 1 for side in of)
        groups, compared = [], []
        for recipe in self.recipes:
            standings = [by_step(run, suite, self.options.step) for run in recipe.runs]
            steps = [at for found in standings for at in found]
            several = [at for at in steps if steps.count(at) > 1]
            if several:
                here = [found[max(several)] for found in standings if max(several) in found]
                scores = [[score_of(x, question) for question in asked] for x in here]
                group = [
                    sum(scale.mean(s) for s in known) / len(asked)
                    for each in scores
                    if len(known := [s for s in each if s is not None]) == len(asked)
                ]
                is_of = any(run in compared_runs for run in recipe.runs)
                at_bound = bounded and group and (max(group) <= 0 or min(group) >= 1)
                if np.isfinite(group).all() and (not at_bound or (is_of and each_tells)):
                    groups.append(group)
                    compared.append(is_of)
        spreads = [
            published_spread(question.task, suite)
            if bounded and not self.options.own_noise_only
            else None
            for question in asked
        ]
        return seed_noise(
            groups,
            spread=_mean_if_all(spreads),
            given=_mean_if_all([self._given(question) for question in asked]),
            own_only=self.options.own_noise_only,
            compared=compared if of else None,
        )

    def _given(self, question: Question) -> float | None:
        given = self.options.seed_sigma.get(f"{question.task}:{question.metric}")
        if given is None and not Scale.of(question.metric).is_log:
            given = self.options.seed_sigma.get(question.task)
        return given

    def pair(
        self,
        question: Question,
        ours: Sequence[Standing],
        theirs: Sequence[Standing],
        names: Mapping[str, str],
    ) -> Measured:
        """One row, without what depends on the family. Raises Refused."""
        a_RN, weights_N, items = self._answers(question, ours)
        b_RN, _, others = self._answers(question, theirs)
        scale = Scale.of(question.metric)
        differing = differing_questions([*ours, *theirs], question.task)
        if items.keys is not others.keys:
            raise Refused(_other_items(items, others, differing))
        if differing and is_loss(question.metric):
            raise Refused(f"asked differently, on which it depends ({'; '.join(differing)})")
        # records of an older version may lack the sources
        coarse = min(items, others, key=lambda each: each.num_clusters)
        value, baseline_value = (
            scale.score(float(np.average(x.mean(axis=0), weights=weights_N))) for x in (a_RN, b_RN)
        )
        row: dict[str, Any] = {
            **question.words,
            "higher_is_better": higher_is_better(ours[0].results, question),
            **names,
            "step": ours[0].results.asked["step"],
            "baseline_step": theirs[0].results.asked["step"],
            "value": value,
            "baseline_value": baseline_value,
            "difference": value - baseline_value,
            "num_items": len(items.keys),
            "num_clusters": coarse.num_clusters,
            "num_runs": [len(a_RN), len(b_RN)],
            "asked_differently": differing,
            "mean_of": None,
            **_items_alone(a_RN, b_RN, weights_N, coarse.clusters_N, scale, baseline_value),
        }
        sides = (a_RN, b_RN)
        bounded = not is_loss(question.metric) and all(((x >= 0) & (x <= 1)).all() for x in sides)
        noise = self.noise([question], bounded=bounded, of=[ours, theirs])
        guess = chance(ours[0].results, question)
        if guess is None and question.metric.startswith("acc"):
            guess = items.chance
        row["chance"] = guess
        row["seed_noise"] = None if noise is None else _noise_words(noise, scale)
        row["uninformative"] = None
        if bounded and coarse.num_clusters > 1:
            row["uninformative"] = _extreme(sides, weights_N, coarse.clusters_N, guess)
        judged = noise if coarse.num_clusters > 1 else None
        answers = Answers(a_RN, b_RN, weights_N, coarse.clusters_N)
        found = paired([answers], judged) if judged else None
        return Measured(row, found, scale, bounded, baseline_value, answers, coarse.sources)

    def mean(
        self,
        name: str,
        tasks: Sequence[Measured],
        ours: Sequence[Standing],
        theirs: Sequence[Standing],
    ) -> Measured:
        """The row of the plain mean of the scores of `tasks`, which are of one suite and bounded.

        A source that several of them share is one draw.
        """
        rows = [each.row for each in tasks]
        found = [(each.answers, each.sources) for each in tasks]
        given = [(x, sources) for x, sources in found if x is not None and sources is not None]
        names, codes = np.unique(
            np.concatenate([sources for _, sources in given]), return_inverse=True
        )
        ends = np.cumsum([sources.size for _, sources in given])[:-1]
        shared = [
            replace(x, clusters_N=place_G[x.clusters_N])
            for (x, _), place_G in zip(given, np.split(codes, ends), strict=True)
        ]
        asked = [Question(row["suite"], row["task"], row["metric"]) for row in rows]
        noise = self.noise(asked, bounded=True, of=[ours, theirs])
        metrics = dict.fromkeys(row["metric"] for row in rows)
        value, baseline_value = (
            math.fsum(row[key] for row in rows) / len(rows) for key in ("value", "baseline_value")
        )
        extremes = {row["uninformative"] for row in rows}
        row = rows[0] | {
            "task": name,
            "metric": ", ".join(metrics),
            "value": value,
            "baseline_value": baseline_value,
            "difference": value - baseline_value,
            "num_items": sum(row["num_items"] for row in rows),
            "num_clusters": int(names.size),
            "asked_differently": list(
                dict.fromkeys(x for r in rows for x in r["asked_differently"])
            ),
            "items_ci": None,
            "mcnemar": None,
            "chance": _mean_if_all([row["chance"] for row in rows]),
            "seed_noise": None if noise is None else _noise_words(noise, tasks[0].scale),
            "uninformative": extremes.pop() if len(extremes) == 1 else None,
            "mean_of": [row["task"] for row in rows],
        }
        judged = noise if all(row["num_clusters"] > 1 for row in rows) else None
        mean = paired(shared, judged) if judged else None
        return Measured(row, mean, tasks[0].scale, True, baseline_value)

    def stderr(
        self, question: Question, standings: Sequence[Standing], noise: SeedNoise
    ) -> float | None:
        """The standard error of one side's mean, on the scale that is averaged; None if unknown."""
        try:
            values_RN, weights_N, items = self._answers(question, standings)
        except Refused:
            return None
        found = one_side(values_RN, weights_N, items.clusters_N, noise)[1].stderr
        return found if math.isfinite(found) else None

    def _answers(
        self, question: Question, standings: Sequence[Standing]
    ) -> tuple[np.ndarray, np.ndarray, Items]:
        """The runs' values by item, the items' weights, and the items. Raises Refused."""
        rows, weights, first = [], None, None
        for standing in standings:
            score = score_of(standing, question)
            if score is None:
                raise Refused(f"{standing.run.label} has no {question.metric} of it")
            items = self.records.of(standing.folder, question.task, question.metric)
            found = items.of_metric(question.metric) if items else None
            if items is None or found is None:
                raise Refused(f"{standing.run.label} kept no records of its items: evaluate again")
            scale = Scale.of(question.metric)
            values_N, weights_N = found
            if not np.isfinite(values_N).all():
                raise Refused(f"{standing.run.label} has an item without a finite value")
            mean = scale.score(float(np.average(values_N, weights=weights_N)))
            if not agrees(score, mean):
                raise Refused(
                    f"{standing.run.label} scores {score:.6g}, which is no mean over its items "
                    f"({mean:.6g})"
                )
            if first is not None and items.keys is not first.keys:
                raise Refused(
                    _other_items(first, items, differing_questions(standings, question.task))
                )
            first = first or items
            weights = weights_N if weights is None else weights
            rows.append(values_N)
        assert weights is not None and first is not None  # a side has a run
        return np.stack(rows), weights, first


def _items_alone(
    a_RN: np.ndarray,
    b_RN: np.ndarray,
    weights_N: np.ndarray,
    clusters_N: np.ndarray,
    scale: Scale,
    baseline_value: float,
) -> dict[str, Any]:
    """What the items say of these very runs, seeds apart: the bootstrap, and McNemar's test."""
    difference_N = a_RN.mean(axis=0) - b_RN.mean(axis=0)
    clusters = Clusters.of(difference_N, weights_N, clusters_N)
    interval = bootstrap_interval(clusters, np.random.default_rng(0))
    test = None
    if len(a_RN) == len(b_RN) == 1 and np.isin([a_RN, b_RN], (0.0, 1.0)).all():
        test = asdict(mcnemar_test(a_RN[0], b_RN[0]))
    return {"items_ci": [scale.change(x, baseline_value) for x in interval], "mcnemar": test}


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


def _noise_words(noise: SeedNoise, scale: Scale) -> dict[str, Any]:
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
    """ "floor" (0), "ceiling" (1) or "chance" if all sides score that; else None.

    It is within the 95 % interval of each side's score, of the items alone.
    """
    found = [one_side(values_RN, weights_N, clusters_N, NO_NOISE) for values_RN in sides]
    for name, level in (("floor", 0.0), ("ceiling", 1.0), ("chance", chance)):
        if level is not None and all(
            abs(mean - level) <= decide.critical_value(decide.ALPHA, *noise.parts)
            for mean, noise in found
        ):
            return name
    return None
