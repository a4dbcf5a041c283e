"""Which differences are significant: one row per task and pair of architectures.

Pairs the items of both sides (items.py), estimates the noise (noise.py) and tests all rows of a
suite as one family (decide.py). No torch.
"""

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import fmean
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
from canon_pretrain.report.evaluations import LOSS_UNITS, EvaluationPair, differing_task_options
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
NO_EVALUATIONS = EvaluationPair([], [])
NO_NOISE = SeedNoise(0.0, math.inf, "none", "none known")
TOLERANCE = 1e-6  # relative, between a score and the mean over its items


class Side(NamedTuple):
    """An architecture's label and its runs."""

    label: str
    runs: Sequence[RunRecord]


class Pair(NamedTuple):
    """An architecture, and the baseline that it is compared with."""

    side: Side
    baseline: Side


@dataclass(frozen=True)
class Options:
    """The options of a comparison; None: all."""

    seed_sigma: Mapping[str, float] = field(default_factory=dict)  # by TASK or TASK:METRIC
    own_noise_only: bool = False  # never the paper's
    step: int | None = None
    suites: Sequence[str] | None = None

    def sigma_of(self, key: ScoreKey) -> float | None:
        """Return the seed sigma that the user set for a score; TASK=SIGMA is of its plain one."""
        name = f"{key.task}:{key.metric}"
        if name in self.seed_sigma:
            return self.seed_sigma[name]
        if key.metric == GOLD_BITS or Scale.of(key.metric).is_log:
            return None
        return self.seed_sigma.get(key.task)


class NotComparable(Exception):
    """Two sides cannot be compared on a task; the message is the reason."""


class TaskPair(NamedTuple):
    """The item scores of both sides on one task; `clusters_N` are indices into `sources`."""

    key: ScoreKey
    side: ItemScores
    baseline: ItemScores
    sources: np.ndarray
    value: float
    baseline_value: float
    bounded: bool  # the metric is between 0 and 1
    chance: float | None
    extreme: str | None  # see `_extreme`
    differing: list[str]


class PlannedTest(NamedTuple):
    """A test on one task, or on the mean of several with metrics of one kind."""

    name: str
    tasks: Sequence[TaskPair]
    weight: float = 1.0  # relative share of the family's error rate

    @property
    def bounded(self) -> bool:
        """Return whether the metric is between 0 and 1, which is equal for all tasks of a mean."""
        return self.tasks[0].bounded


class Test(NamedTuple):
    """One row before the correction for its family."""

    row: Verdict
    paired: Difference | None  # None if there is no test
    planned: PlannedTest


class Correction(NamedTuple):
    """What Holm's correction makes of one test."""

    p: float
    p_holm: float
    level: float  # at which the test was made
    first_level: float  # without other rejections


class RunItems(NamedTuple):
    """The items of one run on one task, their values and their weights."""

    items: Items
    values_N: np.ndarray
    weights_N: np.ndarray


@dataclass
class Comparator:
    """Compares pairs of sides; estimates seed noise from `recipes`."""

    recipes: Sequence[Recipe]
    options: Options
    items: ItemCache = field(default_factory=ItemCache)

    def noise(
        self, keys: Sequence[ScoreKey], *, bounded: bool, compared: EvaluationPair = NO_EVALUATIONS
    ) -> SeedNoise | None:
        """Return the seed noise of one task, or of the mean of several as if perfectly correlated.

        Recipes whose seeds all score 0, or all 1, are excluded, unless they are one of the
        `compared` sides and both sides have several seeds.
        """
        compared_runs = {evaluation.run for evaluation in compared.both}
        both_have_seeds = all(len(evaluated) > 1 for evaluated in compared)

        # Seeds that all fail, or all succeed, do not show how much others vary.
        recipe_means = []
        is_compared = []
        for recipe in self.recipes:
            means = self._seed_means(recipe, keys)
            is_side = any(run.label in compared_runs for run in recipe.runs)
            if not np.isfinite(means).all():
                continue
            at_bound = False
            if bounded and means:
                at_bound = max(means) <= 0 or min(means) >= 1
            if at_bound and not (is_side and both_have_seeds):
                continue
            recipe_means.append(means)
            is_compared.append(is_side)

        # The paper's ranges are of accuracies.
        spread = None
        if bounded and not self.options.own_noise_only:
            spreads = [noise.published_spread(key.task, key.suite) for key in keys]
            spread = _mean_if_all(spreads)
        user_sigmas = [self.options.sigma_of(key) for key in keys]
        return noise.seed_noise(
            recipe_means,
            spread=spread,
            user_sigma=_mean_if_all(user_sigmas),
            own_only=self.options.own_noise_only,
            compared=is_compared,
        )

    def _seed_means(self, recipe: Recipe, keys: Sequence[ScoreKey]) -> list[float]:
        """Return the mean score over `keys` per run, at the last step that two runs have."""
        suite = keys[0].suite
        runs_at_step: Counter[int] = Counter()
        for run in recipe.runs:
            results = evaluations.full_results(run, suite, self.options.step)
            runs_at_step.update(results.keys())
        common_steps = [step for step, num_runs in runs_at_step.items() if num_runs > 1]
        last = max(common_steps, default=None)

        # A run counts if it has all of the scores.
        scale = Scale.of(keys[0].metric)
        means = []
        for evaluation in evaluations.results_at(last, recipe.runs, suite):
            scores = [evaluation.score(key) for key in keys]
            item_means = [scale.mean(score) for score in scores if score is not None]
            if len(item_means) == len(keys):
                means.append(sum(item_means) / len(keys))
        return means

    def task(self, key: ScoreKey, evaluated: EvaluationPair) -> TaskPair:
        """Return the item scores of both sides. Raises NotComparable."""
        side, items = self._item_scores(key, evaluated.side)
        baseline, baseline_items = self._item_scores(key, evaluated.baseline)
        differing = differing_task_options(evaluated.both, key.task)
        _check_items(items, baseline_items, differing)
        if differing and is_loss(key.metric):
            raise NotComparable(f"a loss with different options ({'; '.join(differing)})")

        # Records of an older version may have no sources: use the coarser ones for both sides.
        coarse = min(items, baseline_items, key=lambda side_items: side_items.sources.size)
        side = side._replace(clusters_N=coarse.clusters_N)
        baseline = side._replace(values_RN=baseline.values_RN)

        # Scores at a bound, or at chance, say nothing about a difference.
        bounded = noise.is_bounded(side, baseline, is_loss=is_loss(key.metric))
        chance = self.items.chance(evaluated.side[0], key.task, key.metric)
        extreme = None
        if bounded and coarse.sources.size > 1:
            extreme = _extreme((side, baseline), chance)

        # Both sides have the items, and thus the weights, of `side`.
        values_N = side.values_RN.mean(axis=0)
        baseline_values_N = baseline.values_RN.mean(axis=0)
        return TaskPair(
            key=key,
            side=side,
            baseline=baseline,
            sources=coarse.sources,
            value=_score(key.metric, values_N, side.weights_N),
            baseline_value=_score(key.metric, baseline_values_N, side.weights_N),
            bounded=bounded,
            chance=chance,
            extreme=extreme,
            differing=differing,
        )

    def test(self, planned: PlannedTest, evaluated: EvaluationPair, pair: Pair) -> Test:
        """Estimate the noise of a planned test; its row has no verdict yet."""
        tasks = planned.tasks
        keys = [task.key for task in tasks]
        suite = keys[0].suite
        metrics = dict.fromkeys(key.metric for key in keys)
        metric = ", ".join(metrics)
        seeds = self.noise(keys, bounded=planned.bounded, compared=evaluated)

        # The test is paired by item. A source that tasks share is one cluster.
        tasks_of_clusters, num_clusters = _with_common_clusters(tasks)
        paired = None
        has_clusters = all(task.sources.size >= MIN_CLUSTERS for task in tasks)
        if seeds is not None and has_clusters:
            paired = noise.paired_difference(
                [task.side for task in tasks_of_clusters],
                [task.baseline for task in tasks_of_clusters],
                seeds,
                is_loss=is_loss(keys[0].metric),
            )

        # The value of a mean is the plain mean of its tasks; it says nothing if none of them does.
        value = fmean(task.value for task in tasks)
        baseline_value = fmean(task.baseline_value for task in tasks)
        uninformative = tasks[0].extreme
        if any(task.extreme != uninformative for task in tasks):
            uninformative = None
        bits_per_nat = None
        if (suite, metric) == (VALIDATION, NATS):
            bits_per_nat = evaluations.bits_per_nat(evaluated.baseline[0])

        # Some statistics are of a single task.
        mean_of = None
        items_ci = None
        mcnemar = None
        if len(tasks) > 1:
            mean_of = [key.task for key in keys]
        else:
            items_ci = _items_interval(tasks[0])
            mcnemar = _mcnemar(tasks[0])

        first_evaluation = evaluated.side[0]
        differing = [option for task in tasks for option in task.differing]
        row = Verdict(
            suite=suite,
            task=planned.name,
            metric=metric,
            higher_is_better=first_evaluation.higher_is_better(keys[0]),
            step=first_evaluation.step,
            baseline_step=evaluated.baseline[0].step,
            value=value,
            baseline_value=baseline_value,
            difference=value - baseline_value,
            num_items=sum(task.side.weights_N.size for task in tasks),
            num_clusters=num_clusters,
            num_runs=[len(evaluated.side), len(evaluated.baseline)],
            asked_differently=[*dict.fromkeys(differing)],
            mean_of=mean_of,
            items_ci=items_ci,
            mcnemar=mcnemar,
            chance=_mean_if_all([task.chance for task in tasks]),
            uninformative=uninformative,
            seed_noise=seeds and SeedSigma.of(seeds, Scale.of(metric).is_log),
            bits_per_nat=bits_per_nat,
            architecture=pair.side.label,
            baseline=pair.baseline.label,
        )
        return Test(row, paired, planned)

    def stderr(
        self, key: ScoreKey, evaluated: Sequence[Evaluation], seeds: SeedNoise
    ) -> float | None:
        """Return the standard error of one side on the averaged scale; None if unknown."""
        try:
            scores, _ = self._item_scores(key, evaluated)
        except NotComparable:
            return None
        return noise.mean_score(scores, seeds).noise.stderr

    def _item_scores(
        self, key: ScoreKey, evaluated: Sequence[Evaluation]
    ) -> tuple[ItemScores, Items]:
        """Read the item scores of a side's runs. Raises NotComparable."""
        differing = differing_task_options(evaluated, key.task)
        by_run: list[RunItems] = []
        for evaluation in evaluated:
            run = self._run_items(key, evaluation)
            by_run.append(run)
            _check_items(by_run[0].items, run.items, differing)

        # All runs have the items, and thus the weights and clusters, of the first.
        items, _, weights_N = by_run[0]
        values_RN = np.stack([run.values_N for run in by_run])
        return ItemScores(values_RN, weights_N, items.clusters_N), items

    def _run_items(self, key: ScoreKey, evaluation: Evaluation) -> RunItems:
        """Read the items of one run with their values and weights. Raises NotComparable."""
        score = evaluation.score(key)
        if score is None:
            raise NotComparable(evaluation.why_missing(key))
        try:
            items = self.items.get(evaluation, key.task, key.metric)
        except UserError as error:
            raise NotComparable(f"{evaluation.run}: {error}") from None

        weighted = items.metric_values(key.metric) if items else None
        if items is None or weighted is None:
            raise NotComparable(f"{evaluation.run} has no item records: evaluate it again")
        values_N, weights_N = weighted
        if not np.isfinite(values_N).all():
            raise NotComparable(f"{evaluation.run} has an item without a finite value")

        # Damaged or mixed records do not have the score of results.json.
        mean = _score(key.metric, values_N, weights_N)
        if not math.isclose(score, mean, rel_tol=TOLERANCE, abs_tol=TOLERANCE):
            raise NotComparable(
                f"{evaluation.run} scores {score:.6g}, but the mean over its items is {mean:.6g}"
            )
        return RunItems(items, values_N, weights_N)


def _score(metric: str, values_N: np.ndarray, weights_N: np.ndarray) -> float:
    mean = float(np.average(values_N, weights=weights_N))
    return Scale.of(metric).score(mean)


def _with_common_clusters(tasks: Sequence[TaskPair]) -> tuple[list[TaskPair], int]:
    """Number the clusters over the sources of all tasks; return the tasks and the count."""
    sources_of_tasks = [task.sources for task in tasks]
    all_sources = np.unique(np.concatenate(sources_of_tasks))
    renumbered = []
    for task in tasks:
        indices_G = np.searchsorted(all_sources, task.sources)
        clusters_N = indices_G[task.side.clusters_N]  # equal for the baseline
        side = task.side._replace(clusters_N=clusters_N)
        baseline = task.baseline._replace(clusters_N=clusters_N)
        renumbered.append(task._replace(side=side, baseline=baseline))
    return renumbered, int(all_sources.size)


def _check_items(a: Items, b: Items, differing: Sequence[str]) -> None:
    if a.keys != b.keys:
        num_common = len(set(a.keys) & set(b.keys))
        counts = f"{len(a.keys)} and {len(b.keys)} items, {num_common} in common"
        options = ""
        if differing:
            options = f"; different options ({'; '.join(differing)})"
        raise NotComparable(
            f"{counts}{options}: evaluate both on the same data with the same options"
        )


def _items_interval(task: TaskPair) -> list[float] | None:
    """Return the interval over the items of these runs, without seed noise."""
    metric = task.key.metric
    clusters = Clusters.of_difference(task.side, task.baseline)
    bounded = noise.are_shares(task.side, task.baseline, is_loss=is_loss(metric))
    ends = noise.items_interval(clusters, bounded=bounded)
    scale = Scale.of(metric)
    return ends and [scale.change(end, task.baseline_value) for end in ends]


def _mcnemar(task: TaskPair) -> noise.McNemar | None:
    """Test two single runs on items that are right or wrong; None for others."""
    a_RN = task.side.values_RN
    b_RN = task.baseline.values_RN
    if not len(a_RN) == len(b_RN) == 1:
        return None
    are_binary = np.isin([a_RN, b_RN], (0.0, 1.0))
    if not are_binary.all():
        return None
    return noise.mcnemar_test(a_RN[0], b_RN[0])


def _mean_if_all(values: Sequence[float | None]) -> float | None:
    """Return the mean; None if any value is None."""
    present = [x for x in values if x is not None]
    if len(present) < len(values):
        return None
    return fmean(present)


def _extreme(sides: Sequence[ItemScores], chance: float | None) -> str | None:
    """Return "floor" (0), "ceiling" (1) or "chance" if both sides are within item noise of it."""
    intervals = []
    for side in sides:
        mean, item_noise = noise.mean_score(side, NO_NOISE)
        half_width = decide.critical_value(ALPHA, item_noise)
        intervals.append((mean, half_width))

    levels = {"floor": 0.0, "ceiling": 1.0}
    if chance is not None:
        levels["chance"] = chance
    for name, level in levels.items():
        is_near = [abs(mean - level) <= half_width for mean, half_width in intervals]
        if all(is_near):
            return name
    return None


class Verdicts(NamedTuple):
    """Rows and refusals of (side, baseline) pairs, and notes on runs that were left out."""

    rows: list[Verdict]
    refused: list[Refusal]
    notes: list[str]


def verdicts(comparator: Comparator, pairs: Sequence[Pair]) -> Verdicts:
    """Judge each pair on every suite that its runs have; all pairs share a suite's family."""
    options = comparator.options
    tests: dict[str, list[Test]] = {}
    refused: list[Refusal] = []
    notes: dict[str, None] = {}
    for pair in pairs:
        side, baseline = pair
        runs = [*side.runs, *baseline.runs]
        for suite in evaluations.suites_of(runs, options.suites):
            refuse = partial(Refusal, suite, architecture=side.label, baseline=baseline.label)

            # Both sides at one step.
            evaluated = evaluations.pair_evaluations(
                side.runs,
                baseline.runs,
                suite,
                options.step,
            )
            if not evaluated.side:
                refused.append(refuse(None, None, why="no full results at a common step"))
                continue

            # Runs without results at the common step do not count.
            labels = {evaluation.run for evaluation in evaluated.both}
            left_out = [run.label for run in runs if run.label not in labels]
            if left_out:
                step = evaluated.side[0].step
                note = f"{suite} at step {step}: no full results of {', '.join(left_out)}"
                notes[note] = None

            # The tasks on which they can be compared.
            tasks = []
            for key in evaluations.score_keys(evaluated.both, suite):
                if suite == VALIDATION and key.task != VALIDATION:
                    continue  # the count models
                try:
                    tasks.append(comparator.task(key, evaluated))
                except NotComparable as reason:
                    refused.append(refuse(key.task, key.metric, why=str(reason)))

            for planned in _planned_tests(suite, tasks, evaluated):
                test = comparator.test(planned, evaluated, pair)
                tests.setdefault(suite, []).append(test)

    # Holm's correction is over the tests of all pairs on a suite.
    rows: list[Verdict] = []
    for suite in sorted(tests, key=evaluations.suite_order):
        rows += _family(tests[suite])
    return Verdicts(rows, refused, list(notes))


def _planned_tests(
    suite: str, tasks: Sequence[TaskPair], evaluated: EvaluationPair
) -> Iterator[PlannedTest]:
    """Yield the tests of a suite: first the mean of all tasks; Babilong by length.

    A task enters a mean with its first metric between 0 and 1, and another with GOLD_BITS; the
    means have half of the weight.
    """
    # What enters the means: one accuracy of each task, and its GOLD_BITS.
    scored: dict[str, TaskPair] = {}
    for task in tasks:
        if task.bounded and evaluated.side[0].higher_is_better(task.key):
            scored.setdefault(task.key.task, task)
    gold = [task for task in tasks if task.key.metric == GOLD_BITS]

    # A test per task; Babilong's tasks of one length are one test.
    rows = []
    by_length: dict[int, list[TaskPair]] = {}
    for task in tasks:
        name = task.key.task
        match = BABILONG.fullmatch(name)
        if match is None:
            rows.append(PlannedTest(name, [task]))
        elif task is scored.get(name):
            by_length.setdefault(int(match[2]), []).append(task)
    for length, members in sorted(by_length.items()):
        name = members[0].key.task
        if len(members) > 1:
            name = f"babilong_{length}k, mean of {len(members)} tasks"
        rows.append(PlannedTest(name, members))

    # Equal shares of as much weight as the rows have.
    means = []
    for members in ([*scored.values()], gold):
        if len(members) > 1:
            means.append(members)
    for members in means:
        name = f"{suite}, mean of {len(members)} tasks"
        yield PlannedTest(name, members, weight=len(rows) / len(means))
    yield from rows


def _family(tests: Sequence[Test]) -> Iterator[Verdict]:
    """Yield the rows of one suite, a family, with p, Holm's p and verdicts."""
    # Rows without a test do not count in the correction.
    paired = [test.paired for test in tests if test.paired]
    weights = np.array([test.planned.weight for test in tests if test.paired])
    corrections = iter(_corrections(paired, weights))
    for test in tests:
        if test.paired is None:
            yield _not_judged(test.row)
        else:
            yield _judged(test, test.paired, next(corrections))


def _corrections(paired: Sequence[Difference], weights: np.ndarray) -> list[Correction]:
    """Test the differences of a family, and correct for their number (Holm)."""
    if not paired:
        return []

    p_values = [decide.two_sided_p(test.difference, test.noise) for test in paired]
    p = np.array(p_values)
    p_holm = decide.holm(p, weights)
    levels = decide.holm_levels(p, weights)
    first_levels = ALPHA * weights / weights.sum()
    rows = np.stack([p, p_holm, levels, first_levels], axis=1)
    return [Correction(*row) for row in rows.tolist()]


def _not_judged(row: Verdict) -> Verdict:
    """Return a row without a test: both sides are uninformative, or a noise is unknown."""
    if row.uninformative:
        return replace(row, verdict=UNINFORMATIVE)
    if row.num_clusters >= MIN_CLUSTERS and row.seed_noise is None:
        return replace(row, why="how much seeds differ is unknown: train a second seed")

    sources = "documents" if row.suite == VALIDATION else "sources of items"
    return replace(row, why=f"fewer than {MIN_CLUSTERS} {sources}, so their noise is unknown")


def _judged(test: Test, paired: Difference, corrected: Correction) -> Verdict:
    """Return the row of a test with its verdict, interval and power."""
    row = test.row
    scale = Scale.of(row.metric)
    size = paired.difference

    if corrected.p_holm <= ALPHA:
        verdict = BETTER if (size > 0) == row.higher_is_better else WORSE
        row = replace(row, uninformative=None)
    elif row.uninformative:
        verdict = UNINFORMATIVE
    else:
        verdict = WITHIN

    # The interval is at Holm's level for this test.
    half_width = decide.critical_value(corrected.level, paired.noise)
    ends = [size - half_width, size + half_width]

    # Power is at the level without other rejections. A share cannot differ by more than 1, and
    # what is significant needs no more seeds.
    detectable = None
    if verdict != UNINFORMATIVE:
        smallest = decide.detectable(corrected.first_level, paired.noise)
        if smallest <= 1 or not test.planned.bounded:
            detectable = scale.change(smallest, row.baseline_value)
    seeds_needed = None
    if verdict == WITHIN:
        seeds_needed = decide.seeds_needed(size, corrected.first_level, paired.noise_with)

    # The test of a perplexity is of its logarithm.
    if scale.is_log:
        row = replace(row, log_difference=size, log_ci=ends)
    return replace(
        row,
        ci=[scale.change(end, row.baseline_value) for end in ends],
        stderr=paired.noise.stderr,
        stderr_items=math.sqrt(paired.noise.item_variance),
        stderr_seeds=math.sqrt(paired.noise.seed_variance),
        p=corrected.p,
        p_holm=corrected.p_holm,
        detectable=detectable,
        seeds_needed=seeds_needed,
        verdict=verdict,
    )


def held_out_summary(rows: Sequence[Verdict], refused: Sequence[Refusal], pair: Pair) -> str:
    """Return a sentence on held-out loss: the verdict, or the logged losses if not evaluated."""
    side = pair.side.label
    baseline = pair.baseline.label
    outcomes: list[Refusal | Verdict] = [*refused, *rows]
    for row in outcomes:
        if (row.suite, row.architecture, row.baseline) == (VALIDATION, side, baseline):
            if isinstance(row, Refusal):
                return f"{side} is not compared with {baseline} on held-out text: {row.why}"
            summary = SUMMARIES[row.verdict].format(side=side, baseline=baseline, why=row.why)
            return f"{summary}: {held_out_difference(row)}"

    # Training may have logged losses: take the last step and text that all runs have in common.
    # Bits per byte are comparable over tokenizers; a task without text has nats only.
    way_out = "`canon eval run --suite validation` scores it"
    metric = NATS
    if any(evaluations.logged_losses(run, BITS) for run in pair.side.runs):
        metric = BITS
    ours = [evaluations.logged_losses(run, metric) for run in pair.side.runs]
    theirs = [evaluations.logged_losses(run, metric) for run in pair.baseline.runs]
    scored = [set(losses) for losses in (*ours, *theirs)]
    common = set.intersection(*scored)
    if not common:
        return f"No verdict on held-out text, not scored at a common step: {way_out}"

    last = max(common)
    our_mean = fmean(losses[last] for losses in ours)
    their_mean = fmean(losses[last] for losses in theirs)
    return (
        f"No verdict on held-out text; of {side} and {baseline}, training logged "
        f"{our_mean:.4f} and {their_mean:.4f} {LOSS_UNITS[metric]} at step {last.step}: {way_out}"
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
    documents; 0.143 nats per token)"; nats per token alone if the text's bytes are not known, and a
    number alone for losses from elsewhere.
    """
    nats = abs(row.difference)
    scale = 1.0
    unit = LOSS_UNITS.get(row.metric, "")
    if row.bits_per_nat is not None:
        scale = row.bits_per_nat
        unit = LOSS_UNITS[BITS]
    direction = "lower" if row.difference < 0 else "higher"

    # The interval and p; what is not judged has an interval over documents at most.
    details = []
    if row.ci is not None:
        details.append(f"95 % {_interval_words(row.ci, scale)}")
    elif row.items_ci is not None:
        details.append(f"95 % over documents alone {_interval_words(row.items_ci, scale)}")
    if row.p is not None:
        details.append(f"p {row.p_holm:.2g}")

    # What was measured.
    details.append(_seeds_words(*row.num_runs))
    if row.num_clusters == 1:
        documents = "document"
    details.append(f"{row.num_clusters:,} {documents}")
    if row.bits_per_nat is not None:
        details.append(f"{nats:.3g} {LOSS_UNITS[NATS]}")
    size = f"{scale * nats:.3g} {unit}".rstrip()
    return f"{size} {direction} on held-out text ({'; '.join(details)})"


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
