"""Which differences are real: one row per task and pair of architectures, judged as one family.

Pairs the items of both sides (items.py), estimates their noise (noise.py) and decides on all rows
of a suite together (decide.py). No torch.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from canon_pretrain.report import decide, evaluations, noise
from canon_pretrain.report.architectures import Recipe
from canon_pretrain.report.decide import ALPHA
from canon_pretrain.report.evaluations import differing_questions
from canon_pretrain.report.items import Evaluation, Items, Question, Records, Scale, is_loss
from canon_pretrain.report.noise import Answers, Clusters, Paired, SeedNoise
from canon_pretrain.report.record import RunRecord
from canon_pretrain.run.results import VALIDATION

BETTER, WORSE, WITHIN, NOT_JUDGED = "better", "worse", "within noise", "not judged"
UNINFORMATIVE = "uninformative"
"""Within noise or not judged, with both sides at floor, ceiling or chance."""
VERDICTS = (BETTER, WORSE, WITHIN, NOT_JUDGED, UNINFORMATIVE)

BABILONG = re.compile(r"babilong_(qa[1-5])_(\d+)k")
NO_NOISE = SeedNoise(0.0, math.inf, "none", "none known")
TOLERANCE = 1e-6  # between a score and the mean over its items, relative
NO_TEST = dict.fromkeys(
    ("ci", "log_difference", "log_ci", "stderr", "stderr_items", "stderr_seeds", "p", "p_holm")
    + ("detectable", "seeds_needed", "why")
)

Row = dict[str, Any]
Side = tuple[str, Sequence[RunRecord]]  # an architecture's label and its runs
Evaluated = Sequence[Sequence[Evaluation]]  # of a side and of the baseline


@dataclass(frozen=True)
class Options:
    """What a user asks of a comparison; None: all."""

    seed_sigma: Mapping[str, float] = field(default_factory=dict)  # by TASK or TASK:METRIC
    own_noise_only: bool = False  # never the paper's
    step: int | None = None
    suites: Sequence[str] | None = None


class Refused(Exception):
    """Two sides that cannot be compared on a task; the message is the reason."""


class Task(NamedTuple):
    """What both sides answered to one question; `clusters_N` are places in `sources`."""

    question: Question
    sides: tuple[Answers, Answers]
    sources: np.ndarray
    values: list[float]
    bounded: bool  # the metric is between 0 and 1
    chance: float | None
    extreme: str | None  # see `_extreme`
    differing: list[str]


class Test(NamedTuple):
    """One row before the family is known."""

    row: Row
    found: Paired | None  # None if it cannot be judged
    bounded: bool
    weight: float  # its share of the family's error rate, in any unit


@dataclass
class Measure:
    """Measures pairs; seed noise is estimated from `recipes`."""

    recipes: Sequence[Recipe]
    options: Options
    records: Records = field(default_factory=Records)

    def noise(
        self, asked: Sequence[Question], *, bounded: bool, sides: Evaluated = ()
    ) -> SeedNoise | None:
        """Return the seed noise of one task, or of several as if they moved as one.

        Recipes whose seeds all score 0, or all 1, are left out, but for `sides`, the two compared,
        if both have several seeds.
        """
        scale, suite, options = Scale.of(asked[0].metric), asked[0].suite, self.options
        ours = {each.run for side in sides for each in side}
        each_tells = bool(sides) and all(len(side) > 1 for side in sides)
        groups, compared = [], []
        for recipe in self.recipes:
            by_step = [evaluations.answers(run, suite, options.step) for run in recipe.runs]
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
                f"{task}:{metric}", None if scale.is_log else options.seed_sigma.get(task)
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

    def task(self, question: Question, sides: Evaluated) -> Task:
        """Return what both sides answered. Raises Refused."""
        (a, items), (b, others) = (self._answers(question, side) for side in sides)
        metric, both = question.metric, [*sides[0], *sides[1]]
        differing = differing_questions(both, question.task)
        _check_items(items, others, differing)
        if differing and is_loss(metric):
            raise Refused(f"asked differently, on which it depends ({'; '.join(differing)})")
        # records of an older version may lack the sources
        coarse = min(items, others, key=lambda each: each.sources.size)
        a = a._replace(clusters_N=coarse.clusters_N)
        b = Answers(b.values_RN, *a[1:])
        values = [_score(metric, side.values_RN.mean(axis=0), a.weights_N) for side in (a, b)]
        is_share = all(((x.values_RN >= 0) & (x.values_RN <= 1)).all() for x in (a, b))
        bounded = is_share and not is_loss(metric)
        chance = both[0].chance(question.task, metric)
        if chance is None and metric.startswith("acc"):
            chance = items.chance
        extreme = _extreme((a, b), chance) if bounded and coarse.sources.size > 1 else None
        return Task(question, (a, b), coarse.sources, values, bounded, chance, extreme, differing)

    def row(self, tasks: Sequence[Task], sides: Evaluated) -> tuple[Row, Paired | None]:
        """Return the row of a task, or of the mean of several; a shared source is one draw."""
        first, asked = tasks[0], [task.question for task in tasks]
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
            about |= {"words": seeds.words, "scale": "log" if scale.is_log else "metric"}
            if all(task.sources.size > 1 for task in tasks):
                a, b = zip(*answers, strict=True)
                found = noise.paired(a, b, seeds)
        row = {
            **asked[0]._asdict(),
            "metric": ", ".join(dict.fromkeys(question.metric for question in asked)),
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
            "mean_of": None if single else [question.task for question in asked],
            **(_of_these_runs(first, base) if single else {"items_ci": None, "mcnemar": None}),
            "chance": _mean_if_all([task.chance for task in tasks]),
            "uninformative": extremes.pop() if len(extremes) == 1 else None,
            "seed_noise": about,
        }
        return row, found

    def stderr(
        self, question: Question, evaluated: Sequence[Evaluation], seeds: SeedNoise
    ) -> float | None:
        """Return the standard error of one side, on the scale that is averaged; None if unknown."""
        try:
            return noise.one_side(self._answers(question, evaluated)[0], seeds)[1].stderr
        except Refused:
            return None

    def _answers(
        self, question: Question, evaluated: Sequence[Evaluation]
    ) -> tuple[Answers, Items]:
        """What the runs of a side answered, item by item. Raises Refused."""
        rows: list[tuple[np.ndarray, np.ndarray]] = []
        read: list[Items] = []
        for each in evaluated:
            score = each.score(question)
            if score is None:
                raise Refused(f"{each.run} has no {question.metric} of it")
            items = self.records.of(each.folder, question.task, question.metric)
            found = items.of_metric(question.metric) if items else None
            if items is None or found is None:
                raise Refused(f"{each.run} kept no records of its items: evaluate again")
            if not np.isfinite(found[0]).all():
                raise Refused(f"{each.run} has an item without a finite value")
            mean = _score(question.metric, *found)
            if not math.isclose(score, mean, rel_tol=TOLERANCE, abs_tol=TOLERANCE):
                no_mean = f"which is no mean over its items ({mean:.6g})"
                raise Refused(f"{each.run} scores {score:.6g}, {no_mean}")
            rows.append(found)
            read.append(items)
            _check_items(read[0], items, differing_questions(evaluated, question.task))
        values_RN = np.stack([values_N for values_N, _ in rows])
        return Answers(values_RN, rows[0][1], read[0].clusters_N), read[0]


def _score(metric: str, values_N: np.ndarray, weights_N: np.ndarray) -> float:
    return Scale.of(metric).score(float(np.average(values_N, weights=weights_N)))


def _check_items(a: Items, b: Items, differing: Sequence[str]) -> None:
    """Raise Refused for other items."""
    if a.keys != b.keys:
        common = len(set(a.keys) & set(b.keys))
        asked = f"; asked differently ({'; '.join(differing)})" if differing else ""
        raise Refused(
            f"other items: {len(a.keys)} and {len(b.keys)}, of them {common} in common{asked}. "
            "Evaluate both on the same data with the same options"
        )


def _of_these_runs(task: Task, base: float) -> Row:
    """What the items of these very runs say, seeds apart."""
    a, b = (side.values_RN for side in task.sides)
    clusters = Clusters.of(a.mean(axis=0) - b.mean(axis=0), *task.sides[0][1:])
    ends = noise.bootstrap_interval(clusters, np.random.default_rng(0))
    single = len(a) == len(b) == 1 and np.isin([a, b], (0.0, 1.0)).all()
    return {
        "items_ci": [Scale.of(task.question.metric).change(x, base) for x in ends],
        "mcnemar": noise.mcnemar_test(a[0], b[0]) if single else None,
    }


def _mean_if_all(values: Sequence[float | None]) -> float | None:
    known = [x for x in values if x is not None]
    return math.fsum(known) / len(known) if len(known) == len(values) else None


def _extreme(sides: Sequence[Answers], chance: float | None) -> str | None:
    """ "floor" (0), "ceiling" (1) or "chance" if all sides score that, by the noise of items."""
    found = [noise.one_side(side, NO_NOISE) for side in sides]
    ends = [(mean, decide.critical_value(ALPHA, *of_items)) for mean, of_items in found]
    for name, level in (("floor", 0.0), ("ceiling", 1.0), ("chance", chance)):
        if level is not None and all(abs(mean - level) <= half for mean, half in ends):
            return name
    return None


# -- the family -----------------------------------------------------------------------------------


def verdicts(
    measure: Measure, pairs: Sequence[tuple[Side, Side]]
) -> tuple[list[Row], list[Row], list[str]]:
    """Return rows and refusals of each (side, baseline), and notes on runs that were left out."""
    options = measure.options
    tests: dict[str, list[Test]] = {}
    refused: list[Row] = []
    notes: dict[str, None] = {}
    for (label, runs), (baseline, base_runs) in pairs:
        both = [*runs, *base_runs]
        names = {"architecture": label, "baseline": baseline}
        for suite in evaluations.suites_of(both, options.suites):
            nothing: Row = {"suite": suite, "task": None, "metric": None, **names}
            sides = evaluations.side_by_side(runs, base_runs, suite, options.step)
            if not sides[0]:
                refused.append(nothing | {"why": "no whole result at a step that both have"})
                continue
            here = {each.run for side in sides for each in side}
            if left := [run.label for run in both if run.label not in here]:
                at = f"{suite} at step {sides[0][0].step}"
                notes[f"{at}: no whole result of {', '.join(left)}"] = None
            tasks = []
            for question in evaluations.questions([*sides[0], *sides[1]], suite):
                if suite == VALIDATION and question.task != VALIDATION:
                    continue  # the count models beside it
                try:
                    tasks.append(measure.task(question, sides))
                except Refused as reason:
                    refused.append(nothing | question._asdict() | {"why": str(reason)})
            for name, members, weight in _tests(suite, tasks, sides):
                row, paired = measure.row(members, sides)
                row |= {"task": name, **names}
                test = Test(row, paired, members[0].bounded, weight)
                tests.setdefault(suite, []).append(test)
    ordered = sorted(tests, key=evaluations.suite_order)
    return [row for suite in ordered for row in _family(tests[suite])], refused, list(notes)


def _tests(
    suite: str, tasks: Sequence[Task], sides: Evaluated
) -> Iterator[tuple[str, Sequence[Task], float]]:
    """Name, tasks and weight of each test: the mean of all first, Babilong as means per length.

    A task counts in a mean by its first metric between 0 and 1; the mean has half of the weight.
    """
    scored: dict[str, Task] = {}
    for task in tasks:
        if task.bounded and sides[0][0].higher_is_better(task.question):
            scored.setdefault(task.question.task, task)
    rows = [(x.question.task, [x]) for x in tasks if not BABILONG.fullmatch(x.question.task)]
    lengths: dict[int, list[Task]] = {}
    for name, task in scored.items():
        if match := BABILONG.fullmatch(name):
            lengths.setdefault(int(match[2]), []).append(task)
    for length, members in sorted(lengths.items()):
        mean = f"babilong_{length}k, mean of {len(members)} tasks"
        rows.append((mean if len(members) > 1 else members[0].question.task, members))
    if len(scored) > 1:
        yield f"{suite}, mean of {len(scored)} tasks", list(scored.values()), float(len(rows))
    yield from ((name, members, 1.0) for name, members in rows)


def _family(tests: Sequence[Test]) -> Iterator[Row]:
    """The rows of one suite, which is a family, with p, Holm's p and verdicts."""
    found = [each.found for each in tests if each.found]
    p = np.array([decide.two_sided_p(x.difference, *x.noise) for x in found])
    weights = np.array([each.weight for each in tests if each.found])
    firsts = ALPHA * weights / weights.sum() if found else weights
    numbers = zip(p, decide.holm(p, weights), decide.holm_levels(p, weights), firsts, strict=True)
    for each in tests:
        row = each.row
        if each.found is not None:
            yield row | _judged(each, each.found, *map(float, next(numbers)))
        elif row["uninformative"]:
            yield row | NO_TEST | {"verdict": UNINFORMATIVE}
        else:
            of = "of each task" if row["mean_of"] else f"{row['task']}:{row['metric']}=SIGMA"
            why = f"no seed noise known: give a second seed, or --seed_sigma {of}"
            if row["num_clusters"] == 1:
                why = "its items are of one source, so their noise is unknown"
            yield row | NO_TEST | {"verdict": NOT_JUDGED, "why": why}


def _judged(
    each: Test, found: Paired, p: float, p_holm: float, level: float, first_level: float
) -> Row:
    # `ci` is at the level of this test, which begins at `first_level`
    row, scale = each.row, Scale.of(each.row["metric"])
    size, of_both = found.difference, found.noise
    half = decide.critical_value(level, *of_both)
    ci = [size - half, size + half]
    is_real = p_holm <= ALPHA
    says_nothing = row["uninformative"] is not None and not is_real
    direction = BETTER if (size > 0) == row["higher_is_better"] else WORSE
    verdict = direction if is_real else UNINFORMATIVE if says_nothing else WITHIN
    detectable = decide.detectable(first_level, *of_both)
    # None if it is more than there can be, or all sides are at floor
    is_shown = not (says_nothing or (each.bounded and detectable > 1))
    needed = None  # a difference beyond noise has been shown already
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


def held_out_words(rows: Sequence[Row], refused: Sequence[Row], pair: tuple[Side, Side]) -> str:
    """Return the verdict on held-out loss; without evaluations what training logged, and none."""
    start, ((side, runs), (baseline, base_runs)) = "held-out loss:", pair
    names = {"architecture": side, "baseline": baseline, "suite": VALIDATION}
    for row in (x for x in (*rows, *refused) if names.items() <= x.items()):
        if "verdict" not in row:
            return f"{start} not compared: {row['why']}"
        is_lower = row["difference"] < 0
        size = f"{'lower' if is_lower else 'higher'} by {abs(row['difference']):.3g} nats/token"
        ends = row["items_ci"] if row["ci"] is None else row["ci"]
        low, high = sorted(-x if is_lower else x for x in ends)
        found = f"{side} {size} than {baseline} (95 % {low:.3g} to {high:.3g}"
        if row["p"] is None:
            return f"{start} {NOT_JUDGED} ({row['why']}); {found} over documents)"
        return f"{start} {row['verdict']}; {found}, p {row['p_holm']:.2g})"
    how = "`python -m eval run --suite validation` evaluates a checkpoint"
    logged = [[evaluations.logged_losses(run) for run in of] for of in (runs, base_runs)]
    scored = set.intersection(*(set(losses) for of in logged for losses in of))
    if not scored:
        return f"{start} not evaluated; {how}"
    at = max(scored)
    ours, theirs = (math.fsum(losses[at] for losses in of) / len(of) for of in logged)
    return (
        f"{start} no verdict; in training, at step {at[0]}: {side} {ours:.4f}, "
        f"{baseline} {theirs:.4f} nats/token ({how})"
    )
