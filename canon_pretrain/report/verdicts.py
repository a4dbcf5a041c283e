"""Which differences are significant: one row per task and pair of architectures.

Pairs the items of both sides (items.py), estimates the noise (noise.py) and tests all rows of a
suite as one family (decide.py). No torch.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from canon_pretrain.core.errors import UserError
from canon_pretrain.report import evaluations
from canon_pretrain.report.architectures import Recipe
from canon_pretrain.report.evaluations import differing_task_options
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

BETTER, WORSE, WITHIN, NOT_JUDGED = "better", "worse", "within noise", "not judged"
UNINFORMATIVE = "uninformative"
"""Within noise or not judged, with both sides at floor, ceiling or chance."""
VERDICTS = (BETTER, WORSE, WITHIN, NOT_JUDGED, UNINFORMATIVE)

BABILONG = re.compile(r"babilong_(qa[1-5])_(\d+)k")
NO_NOISE = SeedNoise(0.0, math.inf, "none", "none known")
TOLERANCE = 1e-6  # relative, between a score and the mean over its items
NO_TEST = dict.fromkeys(
    ("ci", "log_difference", "log_ci", "stderr", "stderr_items", "stderr_seeds", "p", "p_holm")
    + ("detectable", "seeds_needed", "why")
)

Row = dict[str, Any]
Side = tuple[str, Sequence[RunRecord]]  # an architecture's label and its runs
EvaluationPair = Sequence[Sequence[Evaluation]]  # of a side and of the baseline


@dataclass(frozen=True)
class Options:
    """The options of a comparison; None: all."""

    seed_sigma: Mapping[str, float] = field(default_factory=dict)  # by TASK or TASK:METRIC
    own_noise_only: bool = False  # never the paper's
    step: int | None = None
    suites: Sequence[str] | None = None


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

    row: Row
    found: Difference | None  # None if there is no test
    bounded: bool
    weight: float  # relative share of the family's error rate


@dataclass
class Comparator:
    """Compares pairs of sides; estimates seed noise from `recipes`."""

    recipes: Sequence[Recipe]
    options: Options
    items: ItemCache = field(default_factory=ItemCache)

    def noise(
        self, asked: Sequence[ScoreKey], *, bounded: bool, sides: EvaluationPair = ()
    ) -> SeedNoise | None:
        """Return the seed noise of one task, or of the mean of several as if perfectly correlated.

        Recipes whose seeds all score 0, or all 1, are excluded, unless they are one of `sides` and
        both sides have several seeds.
        """
        scale, suite, options = Scale.of(asked[0].metric), asked[0].suite, self.options
        ours = {each.run for side in sides for each in side}
        is_plain = not scale.is_log and asked[0].metric != GOLD_BITS  # then TASK=SIGMA is of it
        each_tells = bool(sides) and all(len(side) > 1 for side in sides)
        groups, compared = [], []
        for recipe in self.recipes:
            by_step = [evaluations.full_results(run, suite, options.step) for run in recipe.runs]
            steps = [at for found in by_step for at in found]
            last = max((at for at in steps if steps.count(at) > 1), default=None)
            scores = [[found[last].score(q) for q in asked] for found in by_step if last in found]
            known = [[scale.mean(x) for x in each if x is not None] for each in scores]
            group = [sum(each) / len(asked) for each in known if len(each) == len(asked)]
            is_ours = any(run.label in ours for run in recipe.runs)
            at_bound = bounded and group and (max(group) <= 0 or min(group) >= 1)
            if np.isfinite(group).all() and (not at_bound or (is_ours and each_tells)):
                groups.append(group)
                compared.append(is_ours)
        given = [
            options.seed_sigma.get(
                f"{task}:{metric}", options.seed_sigma.get(task) if is_plain else None
            )
            for _, task, metric in asked
        ]
        spreads = [
            noise.published_spread(task, suite) if bounded and not options.own_noise_only else None
            for _, task, _ in asked
        ]
        return noise.seed_noise(
            groups,
            spread=_mean_if_all(spreads),
            given=_mean_if_all(given),
            own_only=options.own_noise_only,
            compared=compared if sides else None,
        )

    def task(self, key: ScoreKey, sides: EvaluationPair) -> TaskPair:
        """Return the item scores of both sides. Raises NotComparable."""
        (a, items), (b, others) = (self._item_scores(key, side) for side in sides)
        metric, both = key.metric, [*sides[0], *sides[1]]
        differing = differing_task_options(both, key.task)
        _check_items(items, others, differing)
        if differing and is_loss(metric):
            raise NotComparable(f"a loss with different options ({'; '.join(differing)})")
        # records of an older version may have no sources
        coarse = min(items, others, key=lambda each: each.sources.size)
        a = a._replace(clusters_N=coarse.clusters_N)
        b = ItemScores(b.values_RN, *a[1:])
        values = [_score(metric, side.values_RN.mean(axis=0), a.weights_N) for side in (a, b)]
        is_share = all(((x.values_RN >= 0) & (x.values_RN <= 1)).all() for x in (a, b))
        bounded = is_share and not is_loss(metric)
        chance = both[0].chance(key.task, metric)
        if chance is None and metric.startswith("acc"):
            chance = items.chance
        extreme = _extreme((a, b), chance) if bounded and coarse.sources.size > 1 else None
        return TaskPair(key, (a, b), coarse.sources, values, bounded, chance, extreme, differing)

    def row(
        self, tasks: Sequence[TaskPair], sides: EvaluationPair
    ) -> tuple[Row, Difference | None]:
        """Return the row of a task, or of the mean of several; a shared source is one cluster."""
        first, asked = tasks[0], [task.key for task in tasks]
        scale, single = Scale.of(asked[0].metric), len(tasks) == 1
        seeds = self.noise(asked, bounded=first.bounded, sides=sides)
        value, base = (math.fsum(task.values[k] for task in tasks) / len(tasks) for k in (0, 1))
        joined = np.concatenate([task.sources for task in tasks])
        sources, codes = np.unique(joined, return_inverse=True)
        places = np.split(codes, np.cumsum([task.sources.size for task in tasks])[:-1])
        answers = [
            [side._replace(clusters_N=place_G[side.clusters_N]) for side in task.sides]
            for task, place_G in zip(tasks, places, strict=True)
        ]
        found, extremes, about = None, {task.extreme for task in tasks}, None
        if seeds is not None:
            about = {"sigma": seeds.sigma, "df": seeds.df, "source": seeds.source}
            about |= {"words": seeds.description, "scale": "log" if scale.is_log else "metric"}
            if all(task.sources.size >= MIN_CLUSTERS for task in tasks):
                a, b = zip(*answers, strict=True)
                found = noise.paired_difference(a, b, seeds, is_loss=is_loss(asked[0].metric))
        row = {
            **asked[0]._asdict(),
            "metric": ", ".join(dict.fromkeys(key.metric for key in asked)),
            "higher_is_better": sides[0][0].higher_is_better(asked[0]),
            "step": sides[0][0].step,
            "baseline_step": sides[1][0].step,
            "value": value,
            "baseline_value": base,
            "difference": value - base,
            "num_items": sum(task.sides[0].weights_N.size for task in tasks),
            "num_clusters": int(sources.size),
            "num_runs": [len(side) for side in sides],
            "asked_differently": [*dict.fromkeys(x for task in tasks for x in task.differing)],
            "mean_of": None if single else [key.task for key in asked],
            **(_item_statistics(first, base) if single else {"items_ci": None, "mcnemar": None}),
            "chance": _mean_if_all([task.chance for task in tasks]),
            "uninformative": extremes.pop() if len(extremes) == 1 else None,
            "seed_noise": about,
        }
        return row, found

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
        rows: list[tuple[np.ndarray, np.ndarray]] = []
        read: list[Items] = []
        for each in evaluated:
            score = each.score(key)
            if score is None:
                raise NotComparable(each.why_missing(key))
            try:
                items = self.items.get(each.folder, key.task, key.metric)
            except UserError as error:
                raise NotComparable(f"{each.run}: {error}") from None
            found = items.metric_values(key.metric) if items else None
            if items is None or found is None:
                raise NotComparable(f"{each.run} has no item records: evaluate it again")
            if not np.isfinite(found[0]).all():
                raise NotComparable(f"{each.run} has an item without a finite value")
            mean = _score(key.metric, *found)
            if not math.isclose(score, mean, rel_tol=TOLERANCE, abs_tol=TOLERANCE):
                expected = f"the mean over its items is {mean:.6g}"
                raise NotComparable(f"{each.run} scores {score:.6g}, but {expected}")
            rows.append(found)
            read.append(items)
            _check_items(read[0], items, differing_task_options(evaluated, key.task))
        values_RN = np.stack([values_N for values_N, _ in rows])
        return ItemScores(values_RN, rows[0][1], read[0].clusters_N), read[0]


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


def _item_statistics(task: TaskPair, base: float) -> Row:
    """Return the statistics over the items of these runs, without seed noise."""
    a, b = (side.values_RN for side in task.sides)
    clusters = Clusters.of(a.mean(axis=0) - b.mean(axis=0), *task.sides[0][1:])
    bounded = noise.are_shares(*task.sides, is_loss=is_loss(task.key.metric))
    ends = noise.items_interval(clusters, bounded=bounded)
    single = len(a) == len(b) == 1 and np.isin([a, b], (0.0, 1.0)).all()
    return {
        "items_ci": ends and [Scale.of(task.key.metric).change(x, base) for x in ends],
        "mcnemar": noise.mcnemar_test(a[0], b[0]) if single else None,
    }


def _mean_if_all(values: Sequence[float | None]) -> float | None:
    known = [x for x in values if x is not None]
    return math.fsum(known) / len(known) if len(known) == len(values) else None


def _extreme(sides: Sequence[ItemScores], chance: float | None) -> str | None:
    """Return "floor" (0), "ceiling" (1) or "chance" if both sides are within item noise of it."""
    found = [noise.mean_score(side, NO_NOISE) for side in sides]
    ends = [(mean, decide.critical_value(ALPHA, *of_items)) for mean, of_items in found]
    for name, level in (("floor", 0.0), ("ceiling", 1.0), ("chance", chance)):
        if level is not None and all(abs(mean - level) <= half for mean, half in ends):
            return name
    return None


def verdicts(
    comparator: Comparator, pairs: Sequence[tuple[Side, Side]]
) -> tuple[list[Row], list[Row], list[str]]:
    """Return rows and refusals per (side, baseline), and notes on runs that were left out."""
    options = comparator.options
    tests: dict[str, list[Test]] = {}
    refused: list[Row] = []
    notes: dict[str, None] = {}
    for (label, runs), (baseline, base_runs) in pairs:
        both = [*runs, *base_runs]
        names = {"architecture": label, "baseline": baseline}
        for suite in evaluations.suites_of(both, options.suites):
            nothing: Row = {"suite": suite, "task": None, "metric": None, **names}
            sides = evaluations.pair_evaluations(runs, base_runs, suite, options.step)
            if not sides[0]:
                refused.append(nothing | {"why": "no full results at a common step"})
                continue
            here = {each.run for side in sides for each in side}
            if left := [run.label for run in both if run.label not in here]:
                at = f"{suite} at step {sides[0][0].step}"
                notes[f"{at}: no full results of {', '.join(left)}"] = None
            tasks = []
            for key in evaluations.score_keys([*sides[0], *sides[1]], suite):
                if suite == VALIDATION and key.task != VALIDATION:
                    continue  # the count models
                try:
                    tasks.append(comparator.task(key, sides))
                except NotComparable as reason:
                    refused.append(nothing | key._asdict() | {"why": str(reason)})
            for name, members, weight in _tests(suite, tasks, sides):
                row, paired = comparator.row(members, sides)
                is_loss_of_text = (suite, row["metric"]) == (VALIDATION, NATS)
                of_text = evaluations.bits_per_nat(sides[1][0]) if is_loss_of_text else None
                row |= {"task": name, "bits_per_nat": of_text, **names}
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


def _family(tests: Sequence[Test]) -> Iterator[Row]:
    """Yield the rows of one suite, a family, with p, Holm's p and verdicts."""
    found = [each.found for each in tests if each.found]
    p = np.array([decide.two_sided_p(x.difference, *x.noise) for x in found])
    weights = np.array([each.weight for each in tests if each.found])
    firsts = ALPHA * weights / weights.sum() if found else weights
    numbers = zip(p, decide.holm(p, weights), decide.holm_levels(p, weights), firsts, strict=True)
    for each in tests:
        row = each.row
        if each.found is not None:
            yield row | _verdict_fields(each, each.found, *map(float, next(numbers)))
        elif row["uninformative"]:
            yield row | NO_TEST | {"verdict": UNINFORMATIVE}
        else:
            why = "how much seeds differ is unknown: train a second seed"
            if row["num_clusters"] < MIN_CLUSTERS or row["seed_noise"] is not None:
                sources = "documents" if row["suite"] == VALIDATION else "sources of items"
                why = f"fewer than {MIN_CLUSTERS} {sources}, so their noise is unknown"
            yield row | NO_TEST | {"verdict": NOT_JUDGED, "why": why}


def _verdict_fields(
    each: Test, found: Difference, p: float, p_holm: float, level: float, first_level: float
) -> Row:
    # `ci` is at Holm's level for this test, `first_level` is the level without other rejections
    row, scale = each.row, Scale.of(each.row["metric"])
    size, of_both = found.difference, found.noise
    half = decide.critical_value(level, *of_both)
    ci = [size - half, size + half]
    is_real = p_holm <= ALPHA
    says_nothing = row["uninformative"] is not None and not is_real
    direction = BETTER if (size > 0) == row["higher_is_better"] else WORSE
    verdict = direction if is_real else UNINFORMATIVE if says_nothing else WITHIN
    detectable = decide.detectable(first_level, *of_both)
    # None if it exceeds the range of the metric, or both sides are uninformative
    is_shown = not (says_nothing or (each.bounded and detectable > 1))
    needed = None  # if significant already
    if verdict == WITHIN:
        needed = decide.seeds_needed(size, first_level, found.noise_with)
    return {
        "ci": [scale.change(x, row["baseline_value"]) for x in ci],
        "log_difference": size if scale.is_log else None,
        "log_ci": ci if scale.is_log else None,
        "stderr": of_both.stderr,
        "stderr_items": math.sqrt(of_both.item_variance),
        "stderr_seeds": math.sqrt(of_both.seed_variance),
        **{"p": p, "p_holm": p_holm},
        "detectable": scale.change(detectable, row["baseline_value"]) if is_shown else None,
        **{"seeds_needed": needed, "verdict": verdict},
        "uninformative": row["uninformative"] if says_nothing else None,
        "why": None,
    }


def held_out_summary(rows: Sequence[Row], refused: Sequence[Row], pair: tuple[Side, Side]) -> str:
    """Return a sentence on held-out loss: the verdict, or the logged losses if not evaluated."""
    (side, runs), (baseline, base_runs) = pair
    names = {"architecture": side, "baseline": baseline, "suite": VALIDATION}
    for row in refused:
        if names.items() <= row.items():
            return f"{side} is not compared with {baseline} on held-out text: {row['why']}"
    for row in rows:
        if names.items() <= row.items():
            words = SUMMARIES[row["verdict"]].format(side=side, baseline=baseline, why=row["why"])
            return f"{words}: {held_out_difference(row)}"

    how = "`canon eval run --suite validation` scores it"
    has_bytes = any(evaluations.logged_losses(run, BITS) for run in runs)
    metric = BITS if has_bytes else NATS
    unit = evaluations.LOSS_UNITS[metric]
    logged = [[evaluations.logged_losses(run, metric) for run in of] for of in (runs, base_runs)]
    scored = set.intersection(*(set(losses) for of in logged for losses in of))
    if not scored:
        return f"No verdict on held-out text, not scored at a common step: {how}"
    at = max(scored)
    ours, theirs = (math.fsum(losses[at] for losses in of) / len(of) for of in logged)
    return (
        f"No verdict on held-out text; of {side} and {baseline}, training logged "
        f"{ours:.4f} and {theirs:.4f} {unit} at step {at[0]}: {how}"
    )


SUMMARIES = {
    BETTER: "{side} is better than {baseline}",
    WORSE: "{side} is worse than {baseline}",
    WITHIN: "{side} is within noise of {baseline}",
    UNINFORMATIVE: "{side} cannot be told from {baseline}",
    NOT_JUDGED: "{side} is not judged against {baseline} ({why})",
}
"""Verdict on held-out loss -> how a summary begins."""


def held_out_difference(row: Row, documents: str = "documents") -> str:
    """Return the difference of held-out losses, its interval, and what it is measured on.

    Such as "0.086 bits per byte lower on held-out text (95 % 0.043 to 0.128; 2 seeds each; 31
    documents; 0.143 nats per token)"; nats per token alone if the text's bytes are not known.
    """
    has_bytes = row["bits_per_nat"] is not None
    scale = row["bits_per_nat"] if has_bytes else 1.0
    unit = evaluations.LOSS_UNITS[BITS if has_bytes else NATS]
    nats = abs(row["difference"])
    direction = "lower" if row["difference"] < 0 else "higher"

    facts = []
    if row["ci"] is not None:
        facts.append(f"95 % {_interval_words(row['ci'], scale)}")
    elif row["items_ci"] is not None:  # not judged
        facts.append(f"95 % over documents alone {_interval_words(row['items_ci'], scale)}")
    if row["p"] is not None:
        facts.append(f"p {row['p_holm']:.2g}")

    facts.append(_seeds_words(*row["num_runs"]))
    count = row["num_clusters"]
    facts.append(f"{count:,} document" if count == 1 else f"{count:,} {documents}")
    if has_bytes:
        facts.append(f"{nats:.3g} {evaluations.LOSS_UNITS[NATS]}")
    return f"{scale * nats:.3g} {unit} {direction} on held-out text ({'; '.join(facts)})"


def _interval_words(ends: Sequence[float], scale: float) -> str:
    """Return the interval of a difference: of its size, or with directions if it contains 0."""
    low, high = sorted(scale * end for end in ends)
    if low < 0 < high:
        return f"from {-low:.3g} lower to {high:.3g} higher"
    least, most = sorted((abs(low), abs(high)))
    return f"{least:.3g} to {most:.3g}"


def _seeds_words(ours: int, theirs: int) -> str:
    if ours != theirs:
        return f"{ours} and {theirs} seeds"
    return "1 seed each" if ours == 1 else f"{ours} seeds each"
