"""Which differences are significant: one row per task and pair of architectures.

Pairs the items of both sides (items.py), estimates the noise (noise.py) and tests all rows of a
suite as one family (decide.py). No torch.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple

import numpy as np

from canon_pretrain.core.errors import UserError
from canon_pretrain.report import evaluations
from canon_pretrain.report.architectures import Recipe
from canon_pretrain.report.content import (
    BETTER,
    NOT_JUDGED,
    UNINFORMATIVE,
    WITHIN,
    WORSE,
    Refusal,
    SeedSigma,
    Verdict,
)
from canon_pretrain.report.evaluations import LOSS_UNITS, differing_task_options
from canon_pretrain.report.items import Evaluation, ItemCache, Items, Scale, ScoreKey, is_loss
from canon_pretrain.report.record import RunRecord
from canon_pretrain.run.results import BITS, GOLD_BITS, NATS, VALIDATION
from canon_pretrain.stats import decide, noise
from canon_pretrain.stats.decide import ALPHA
from canon_pretrain.stats.noise import (
    MIN_CLUSTERS,
    Clusters,
    Difference,
    ItemScores,
    SeedNoise,
)

BABILONG = re.compile(r"babilong_(qa[1-5])_(\d+)k")
NO_NOISE = SeedNoise(0.0, math.inf, "none", "none known")
TOLERANCE = 1e-6  # relative, between a score and the mean over its items


class Side(NamedTuple):
    """An architecture's label and its runs."""

    label: str
    runs: Sequence[RunRecord]


EvaluationPair = Sequence[Sequence[Evaluation]]  # of a side and of the baseline


@dataclass(frozen=True)
class Options:
    """The options of a comparison; None: all."""

    seed_sigma: Mapping[str, float] = field(default_factory=dict)  # by TASK or TASK:METRIC
    own_noise_only: bool = False  # never the paper's
    step: int | None = None
    suites: Sequence[str] | None = None

    def sigma_of(self, key: ScoreKey) -> float | None:
        """Return the seed sigma that the user set for a score; TASK=SIGMA is of its plain one."""
        is_plain = not Scale.of(key.metric).is_log and key.metric != GOLD_BITS
        of_task = self.seed_sigma.get(key.task) if is_plain else None
        return self.seed_sigma.get(f"{key.task}:{key.metric}", of_task)


class NotComparable(Exception):
    """Two sides cannot be compared on a task; the message is the reason."""


class TaskPair(NamedTuple):
    """The item scores of both sides on one task; `clusters_N` are indices into `sources`."""

    key: ScoreKey
    sides: tuple[ItemScores, ItemScores]
    sources: np.ndarray
    values: list[float]
    bounded: bool  # the metric is between 0 and 1
    chance: float | None
    extreme: str | None  # see `_extreme`
    differing: list[str]


class Test(NamedTuple):
    """One row before the correction for its family."""

    row: Verdict
    paired: Difference | None  # None if there is no test
    bounded: bool
    weight: float  # relative share of the family's error rate


class Correction(NamedTuple):
    """What Holm's correction makes of one test."""

    p: float
    p_holm: float
    level: float  # at which the test was made
    first_level: float  # without other rejections


@dataclass
class Comparator:
    """Compares pairs of sides; estimates seed noise from `recipes`."""

    recipes: Sequence[Recipe]
    options: Options
    items: ItemCache = field(default_factory=ItemCache)

    def noise(
        self, keys: Sequence[ScoreKey], *, bounded: bool, sides: EvaluationPair = ()
    ) -> SeedNoise | None:
        """Return the seed noise of one task, or of the mean of several as if perfectly correlated.

        Recipes whose seeds all score 0, or all 1, are excluded, unless they are one of `sides` and
        both sides have several seeds.
        """
        compared_runs = {evaluation.run for side in sides for evaluation in side}
        both_have_seeds = bool(sides) and all(len(side) > 1 for side in sides)
        recipe_means, is_compared = [], []
        for recipe in self.recipes:
            means = self._seed_means(recipe, keys)
            is_side = any(run.label in compared_runs for run in recipe.runs)
            at_bound = bounded and means and (max(means) <= 0 or min(means) >= 1)
            if np.isfinite(means).all() and (not at_bound or (is_side and both_have_seeds)):
                recipe_means.append(means)
                is_compared.append(is_side)

        use_paper = bounded and not self.options.own_noise_only
        spreads = [noise.published_spread(key.task, key.suite) for key in keys]
        return noise.seed_noise(
            recipe_means,
            spread=_mean_if_all(spreads) if use_paper else None,
            given=_mean_if_all([self.options.sigma_of(key) for key in keys]),
            own_only=self.options.own_noise_only,
            compared=is_compared if sides else None,
        )

    def _seed_means(self, recipe: Recipe, keys: Sequence[ScoreKey]) -> list[float]:
        """Return the mean score over `keys` per run, at the last step that two runs have."""
        by_step = [
            evaluations.full_results(run, keys[0].suite, self.options.step) for run in recipe.runs
        ]
        steps = [step for results in by_step for step in results]
        last = max((step for step in steps if steps.count(step) > 1), default=None)

        scale = Scale.of(keys[0].metric)
        means = []
        for results in by_step:
            if last in results:
                scores = [x for key in keys if (x := results[last].score(key)) is not None]
                if len(scores) == len(keys):
                    means.append(sum(map(scale.mean, scores)) / len(keys))
        return means

    def task(self, key: ScoreKey, sides: EvaluationPair) -> TaskPair:
        """Return the item scores of both sides. Raises NotComparable."""
        (a, items), (b, base_items) = (self._item_scores(key, side) for side in sides)
        evaluated = [*sides[0], *sides[1]]
        differing = differing_task_options(evaluated, key.task)
        _check_items(items, base_items, differing)
        if differing and is_loss(key.metric):
            raise NotComparable(f"a loss with different options ({'; '.join(differing)})")

        # Records of an older version may have no sources: the coarser ones are of both sides.
        coarse = min(items, base_items, key=lambda side: side.sources.size)
        a = a._replace(clusters_N=coarse.clusters_N)
        b = ItemScores(b.values_RN, a.weights_N, a.clusters_N)

        is_share = all(((x.values_RN >= 0) & (x.values_RN <= 1)).all() for x in (a, b))
        bounded = is_share and not is_loss(key.metric)
        chance = self.items.chance(evaluated[0], key.task, key.metric)
        return TaskPair(
            key,
            (a, b),
            coarse.sources,
            [_score(key.metric, x.values_RN.mean(axis=0), a.weights_N) for x in (a, b)],
            bounded,
            chance,
            _extreme((a, b), chance) if bounded and coarse.sources.size > 1 else None,
            differing,
        )

    def row(
        self, name: str, tasks: Sequence[TaskPair], sides: EvaluationPair, pair: tuple[Side, Side]
    ) -> tuple[Verdict, Difference | None]:
        """Return the row of a task, or of the mean of several, still without a verdict."""
        first, keys = tasks[0], [task.key for task in tasks]
        suite = first.key.suite
        seeds = self.noise(keys, bounded=first.bounded, sides=sides)

        # A source that tasks share is one cluster.
        joined = np.concatenate([task.sources for task in tasks])
        sources, codes = np.unique(joined, return_inverse=True)
        places = np.split(codes, np.cumsum([task.sources.size for task in tasks])[:-1])
        paired = None
        if seeds is not None and all(task.sources.size >= MIN_CLUSTERS for task in tasks):
            a, b = (
                [
                    task.sides[k]._replace(clusters_N=place_G[task.sides[k].clusters_N])
                    for task, place_G in zip(tasks, places, strict=True)
                ]
                for k in (0, 1)
            )
            paired = noise.paired_difference(a, b, seeds, is_loss=is_loss(first.key.metric))

        value, base = (math.fsum(task.values[k] for task in tasks) / len(tasks) for k in (0, 1))
        extremes = {task.extreme for task in tasks}
        metric = ", ".join(dict.fromkeys(key.metric for key in keys))
        is_single = len(tasks) == 1
        row = Verdict(
            suite=suite,
            task=name,
            metric=metric,
            higher_is_better=sides[0][0].higher_is_better(first.key),
            step=sides[0][0].step,
            baseline_step=sides[1][0].step,
            value=value,
            baseline_value=base,
            difference=value - base,
            num_items=sum(task.sides[0].weights_N.size for task in tasks),
            num_clusters=int(sources.size),
            num_runs=[len(side) for side in sides],
            asked_differently=[*dict.fromkeys(x for task in tasks for x in task.differing)],
            mean_of=None if is_single else [key.task for key in keys],
            items_ci=_items_interval(first, base) if is_single else None,
            mcnemar=_mcnemar(first) if is_single else None,
            chance=_mean_if_all([task.chance for task in tasks]),
            uninformative=extremes.pop() if len(extremes) == 1 else None,
            seed_noise=seeds and SeedSigma.of(seeds, Scale.of(metric).is_log),
            bits_per_nat=(
                evaluations.bits_per_nat(sides[1][0])
                if (suite, metric) == (VALIDATION, NATS)
                else None
            ),
            architecture=pair[0].label,
            baseline=pair[1].label,
        )
        return row, paired

    def stderr(
        self, key: ScoreKey, evaluated: Sequence[Evaluation], seeds: SeedNoise
    ) -> float | None:
        """Return the standard error of one side on the averaged scale; None if unknown."""
        try:
            return noise.mean_score(self._item_scores(key, evaluated)[0], seeds)[1].stderr
        except NotComparable:
            return None

    def _item_scores(
        self, key: ScoreKey, evaluated: Sequence[Evaluation]
    ) -> tuple[ItemScores, Items]:
        """Read the item scores of a side's runs. Raises NotComparable."""
        read: list[tuple[Items, np.ndarray, np.ndarray]] = []
        for evaluation in evaluated:
            read.append(self._run_scores(key, evaluation))
            _check_items(read[0][0], read[-1][0], differing_task_options(evaluated, key.task))
        items, _, weights_N = read[0]
        values_RN = np.stack([values_N for _, values_N, _ in read])
        return ItemScores(values_RN, weights_N, items.clusters_N), items

    def _run_scores(
        self, key: ScoreKey, evaluation: Evaluation
    ) -> tuple[Items, np.ndarray, np.ndarray]:
        """Read the items of one run with their values and weights. Raises NotComparable."""
        score = evaluation.score(key)
        if score is None:
            raise NotComparable(evaluation.why_missing(key))
        try:
            items = self.items.get(evaluation.folder, key.task, key.metric)
        except UserError as error:
            raise NotComparable(f"{evaluation.run}: {error}") from None

        weighted = items.metric_values(key.metric) if items else None
        if items is None or weighted is None:
            raise NotComparable(f"{evaluation.run} has no item records: evaluate it again")
        if not np.isfinite(weighted[0]).all():
            raise NotComparable(f"{evaluation.run} has an item without a finite value")
        mean = _score(key.metric, *weighted)
        if not math.isclose(score, mean, rel_tol=TOLERANCE, abs_tol=TOLERANCE):
            raise NotComparable(
                f"{evaluation.run} scores {score:.6g}, but the mean over its items is {mean:.6g}"
            )
        return items, *weighted


def _score(metric: str, values_N: np.ndarray, weights_N: np.ndarray) -> float:
    return Scale.of(metric).score(float(np.average(values_N, weights=weights_N)))


def _check_items(a: Items, b: Items, differing: Sequence[str]) -> None:
    """Raise NotComparable if the items differ."""
    if a.keys != b.keys:
        common = len(set(a.keys) & set(b.keys))
        options = f"; different options ({'; '.join(differing)})" if differing else ""
        raise NotComparable(
            f"{len(a.keys)} and {len(b.keys)} items, {common} in common{options}: evaluate both on "
            "the same data with the same options"
        )


def _items_interval(task: TaskPair, base: float) -> list[float] | None:
    """Return the interval over the items of these runs, without seed noise."""
    a, b = task.sides
    clusters = Clusters.of_difference(a, b)
    bounded = noise.are_shares(a, b, is_loss=is_loss(task.key.metric))
    ends = noise.items_interval(clusters, bounded=bounded)
    return ends and [Scale.of(task.key.metric).change(end, base) for end in ends]


def _mcnemar(task: TaskPair) -> noise.McNemar | None:
    """Test two single runs on items that are right or wrong; None for others."""
    a, b = (side.values_RN for side in task.sides)
    is_single = len(a) == len(b) == 1 and np.isin([a, b], (0.0, 1.0)).all()
    return noise.mcnemar_test(a[0], b[0]) if is_single else None


def _mean_if_all(values: Sequence[float | None]) -> float | None:
    present = [x for x in values if x is not None]
    return math.fsum(present) / len(present) if len(present) == len(values) else None


def _extreme(sides: Sequence[ItemScores], chance: float | None) -> str | None:
    """Return "floor" (0), "ceiling" (1) or "chance" if both sides are within item noise of it."""
    means = [noise.mean_score(side, NO_NOISE) for side in sides]
    ends = [(mean, decide.critical_value(ALPHA, *of_items)) for mean, of_items in means]
    for name, level in (("floor", 0.0), ("ceiling", 1.0), ("chance", chance)):
        if level is not None and all(abs(mean - level) <= half for mean, half in ends):
            return name
    return None


def verdicts(
    comparator: Comparator, pairs: Sequence[tuple[Side, Side]]
) -> tuple[list[Verdict], list[Refusal], list[str]]:
    """Return rows and refusals per (side, baseline), and notes on runs that were left out."""
    options = comparator.options
    tests: dict[str, list[Test]] = {}
    refused: list[Refusal] = []
    notes: dict[str, None] = {}
    for pair in pairs:
        runs = [*pair[0].runs, *pair[1].runs]
        for suite in evaluations.suites_of(runs, options.suites):
            refuse = partial(Refusal, suite, architecture=pair[0].label, baseline=pair[1].label)
            sides = evaluations.pair_evaluations(pair[0].runs, pair[1].runs, suite, options.step)
            if not sides[0]:
                refused.append(refuse(None, None, why="no full results at a common step"))
                continue

            evaluated = [*sides[0], *sides[1]]
            labels = {evaluation.run for evaluation in evaluated}
            if left := [run.label for run in runs if run.label not in labels]:
                note = f"{suite} at step {evaluated[0].step}: no full results of {', '.join(left)}"
                notes[note] = None

            tasks = []
            for key in evaluations.score_keys(evaluated, suite):
                if suite == VALIDATION and key.task != VALIDATION:
                    continue  # the count models
                try:
                    tasks.append(comparator.task(key, sides))
                except NotComparable as reason:
                    refused.append(refuse(key.task, key.metric, why=str(reason)))

            for name, members, weight in _tests(suite, tasks, sides):
                row, paired = comparator.row(name, members, sides, pair)
                test = Test(row, paired, members[0].bounded, weight)
                tests.setdefault(suite, []).append(test)
    ordered = sorted(tests, key=evaluations.suite_order)
    return [row for suite in ordered for row in _family(tests[suite])], refused, list(notes)


def _tests(
    suite: str, tasks: Sequence[TaskPair], sides: EvaluationPair
) -> Iterator[tuple[str, Sequence[TaskPair], float]]:
    """Yield name, tasks and weight per test: first the mean of all tasks; Babilong by length.

    A task enters a mean with its first metric between 0 and 1, and another with GOLD_BITS; the
    means have half of the weight.
    """
    scored: dict[str, TaskPair] = {}
    for task in tasks:
        if task.bounded and sides[0][0].higher_is_better(task.key):
            scored.setdefault(task.key.task, task)
    gold = [task for task in tasks if task.key.metric == GOLD_BITS]

    # Babilong's tasks of one length are one test.
    rows = [(x.key.task, [x]) for x in tasks if not BABILONG.fullmatch(x.key.task)]
    lengths: dict[int, list[TaskPair]] = {}
    for name, task in scored.items():
        if match := BABILONG.fullmatch(name):
            lengths.setdefault(int(match[2]), []).append(task)
    for length, members in sorted(lengths.items()):
        mean = f"babilong_{length}k, mean of {len(members)} tasks"
        rows.append((mean if len(members) > 1 else members[0].key.task, members))

    means = [members for members in ([*scored.values()], gold) if len(members) > 1]
    for members in means:
        yield f"{suite}, mean of {len(members)} tasks", members, len(rows) / len(means)
    yield from ((name, members, 1.0) for name, members in rows)


def _family(tests: Sequence[Test]) -> Iterator[Verdict]:
    """Yield the rows of one suite, a family, with p, Holm's p and verdicts."""
    paired = [test.paired for test in tests if test.paired]
    weights = np.array([test.weight for test in tests if test.paired])
    p = np.array([decide.two_sided_p(x.difference, *x.noise) for x in paired])
    corrections = zip(
        p,
        decide.holm(p, weights),
        decide.holm_levels(p, weights),
        ALPHA * weights / weights.sum() if paired else weights,
        strict=True,
    )
    for test in tests:
        if test.paired is not None:
            yield _judged(test, test.paired, Correction(*map(float, next(corrections))))
        else:
            yield _not_judged(test.row)


def _not_judged(row: Verdict) -> Verdict:
    """Return a row without a test: both sides are uninformative, or a noise is unknown."""
    if row.uninformative:
        return replace(row, verdict=UNINFORMATIVE)
    if row.num_clusters >= MIN_CLUSTERS and row.seed_noise is None:
        return replace(row, why="how much seeds differ is unknown: train a second seed")
    sources = "documents" if row.suite == VALIDATION else "sources of items"
    return replace(row, why=f"fewer than {MIN_CLUSTERS} {sources}, so their noise is unknown")


def _judged(test: Test, paired: Difference, corrected: Correction) -> Verdict:
    row, scale = test.row, Scale.of(test.row.metric)
    size, of_both = paired.difference, paired.noise

    is_real = corrected.p_holm <= ALPHA
    says_nothing = row.uninformative is not None and not is_real
    verdict = UNINFORMATIVE if says_nothing else WITHIN
    if is_real:
        verdict = BETTER if (size > 0) == row.higher_is_better else WORSE

    # The interval is at Holm's level for this test, power at the level without other rejections.
    half = decide.critical_value(corrected.level, *of_both)
    ends = [size - half, size + half]
    detectable = decide.detectable(corrected.first_level, *of_both)
    is_shown = not (says_nothing or (test.bounded and detectable > 1))
    seeds_needed = None  # if significant already
    if verdict == WITHIN:
        seeds_needed = decide.seeds_needed(size, corrected.first_level, paired.noise_with)
    return replace(
        row,
        ci=[scale.change(end, row.baseline_value) for end in ends],
        log_difference=size if scale.is_log else None,
        log_ci=ends if scale.is_log else None,
        stderr=of_both.stderr,
        stderr_items=math.sqrt(of_both.item_variance),
        stderr_seeds=math.sqrt(of_both.seed_variance),
        p=corrected.p,
        p_holm=corrected.p_holm,
        detectable=scale.change(detectable, row.baseline_value) if is_shown else None,
        seeds_needed=seeds_needed,
        verdict=verdict,
        uninformative=row.uninformative if says_nothing else None,
    )


def held_out_summary(
    rows: Sequence[Verdict], refused: Sequence[Refusal], pair: tuple[Side, Side]
) -> str:
    """Return a sentence on held-out loss: the verdict, or the logged losses if not evaluated."""
    side, baseline = pair[0].label, pair[1].label
    outcomes: list[Refusal | Verdict] = [*refused, *rows]
    for row in outcomes:
        if (row.suite, row.architecture, row.baseline) == (VALIDATION, side, baseline):
            if isinstance(row, Refusal):
                return f"{side} is not compared with {baseline} on held-out text: {row.why}"
            summary = SUMMARIES[row.verdict].format(side=side, baseline=baseline, why=row.why)
            return f"{summary}: {held_out_difference(row)}"

    how = "`canon eval run --suite validation` scores it"
    has_bytes = any(evaluations.logged_losses(run, BITS) for run in pair[0].runs)
    metric = BITS if has_bytes else NATS
    logged = [[evaluations.logged_losses(run, metric) for run in group.runs] for group in pair]
    scored = set.intersection(*(set(losses) for of_side in logged for losses in of_side))
    if not scored:
        return f"No verdict on held-out text, not scored at a common step: {how}"
    last = max(scored)
    ours, theirs = (math.fsum(losses[last] for losses in x) / len(x) for x in logged)
    return (
        f"No verdict on held-out text; of {side} and {baseline}, training logged "
        f"{ours:.4f} and {theirs:.4f} {LOSS_UNITS[metric]} at step {last[0]}: {how}"
    )


SUMMARIES = {
    BETTER: "{side} is better than {baseline}",
    WORSE: "{side} is worse than {baseline}",
    WITHIN: "{side} is within noise of {baseline}",
    UNINFORMATIVE: "{side} cannot be told from {baseline}",
    NOT_JUDGED: "{side} is not judged against {baseline} ({why})",
}
"""Verdict on held-out loss -> how a summary begins."""


def held_out_difference(row: Verdict, documents: str = "documents") -> str:
    """Return the difference of held-out losses, its interval, and what it is measured on.

    Such as "0.086 bits per byte lower on held-out text (95 % 0.043 to 0.128; 2 seeds each; 31
    documents; 0.143 nats per token)"; nats per token alone if the text's bytes are not known.
    """
    nats = abs(row.difference)
    scale = 1.0 if row.bits_per_nat is None else row.bits_per_nat
    unit = LOSS_UNITS[NATS if row.bits_per_nat is None else BITS]
    direction = "lower" if row.difference < 0 else "higher"

    details = []
    if row.ci is not None:
        details.append(f"95 % {_interval_words(row.ci, scale)}")
    elif row.items_ci is not None:  # not judged
        details.append(f"95 % over documents alone {_interval_words(row.items_ci, scale)}")
    if row.p is not None:
        details.append(f"p {row.p_holm:.2g}")

    details.append(_seeds_words(*row.num_runs))
    count = row.num_clusters
    details.append(f"{count:,} document" if count == 1 else f"{count:,} {documents}")
    if row.bits_per_nat is not None:
        details.append(f"{nats:.3g} {LOSS_UNITS[NATS]}")
    return f"{scale * nats:.3g} {unit} {direction} on held-out text ({'; '.join(details)})"


def _interval_words(ends: Sequence[float], scale: float) -> str:
    """Return the interval of a difference: of its size, or with directions if it contains 0."""
    low, high = sorted(scale * end for end in ends)
    if low < 0 < high:
        return f"from {-low:.3g} lower to {high:.3g} higher"
    smallest, largest = sorted((abs(low), abs(high)))
    return f"{smallest:.3g} to {largest:.3g}"


def _seeds_words(ours: int, theirs: int) -> str:
    if ours != theirs:
        return f"{ours} and {theirs} seeds"
    return "1 seed each" if ours == 1 else f"{ours} seeds each"
