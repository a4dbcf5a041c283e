"""Which differences are real: one row per task and pair, judged as one family, and their summary.

The rows are measured by measure.py; here they get Holm's p, verdicts, what could have been shown,
and words. No torch.
"""

import math
import re
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from canon_pretrain.report import decide
from canon_pretrain.report.evaluations import (
    Evaluation,
    logged_losses,
    questions,
    side_by_side,
    suites_of,
)
from canon_pretrain.report.measure import Measure, Measured, Refused, Side
from canon_pretrain.report.noise import Paired
from canon_pretrain.run.results import VALIDATION

BETTER, WORSE, WITHIN, NOT_JUDGED = "better", "worse", "within noise", "not judged"
UNINFORMATIVE = "uninformative"
"""Within noise or not judged, with all sides at floor, ceiling or chance."""
VERDICTS = (BETTER, WORSE, WITHIN, NOT_JUDGED, UNINFORMATIVE)

ROW = ("suite", "task", "metric", "architecture", "baseline")
"""What names a row."""
BABILONG = re.compile(r"babilong_(qa[1-5])_(\d+)k")

MAX_REAL, FEW_REAL, MANY = 6, 2, 6
"""Real differences that a summary names, of the better and of the worse ones each: FEW_REAL where
there are more than MANY architectures. The table has them all."""

Rows = list[dict[str, Any]]


def verdicts(measure: Measure, pairs: Sequence[tuple[Side, Side]]) -> tuple[Rows, Rows, list[str]]:
    """Return rows and refusals of each (side, baseline), and notes on runs that were left out."""
    options = measure.options
    measured: list[Measured] = []
    refused: Rows = []
    notes: dict[str, None] = {}
    for side, baseline in pairs:
        both = [*side.runs, *baseline.runs]
        names = {"architecture": side.label, "baseline": baseline.label}
        for suite in suites_of(both, options.suites):
            ours, theirs = side_by_side(
                side.runs, baseline.runs, suite, options.step, any_step=options.any_step
            )
            if not ours:
                why = "no whole result at a step that both have"
                nothing = {"suite": suite, "task": None, "metric": None, **names, "why": why}
                refused.append(nothing)
                continue
            here = {each.run for each in (*ours, *theirs)}
            if left := [run.label for run in both if run.label not in here]:
                notes[f"{suite} at step {ours[0].step}: no whole result of {', '.join(left)}"] = (
                    None
                )
            found = []
            for question in questions([*ours, *theirs], suite):
                if suite == VALIDATION and question.task != VALIDATION:
                    continue  # the count models beside it
                try:
                    found.append(measure.pair(question, ours, theirs, names))
                except Refused as reason:
                    named = {"suite": suite, "task": question.task, "metric": question.metric}
                    refused.append({**named, **names, "why": str(reason)})
            measured += _with_means(measure, found, ours, theirs)
    return _decide(measured), refused, list(notes)


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


def _decide(measured: Sequence[Measured]) -> Rows:
    """The rows with p, Holm's p, verdicts and what could have been shown; a suite is a family."""
    rows = [each.row | _not_judged(each) for each in measured if each.found is None]
    for suite in dict.fromkeys(each.row["suite"] for each in measured):
        tests = [(x, x.found) for x in measured if x.found and x.row["suite"] == suite]
        p = np.array([float(decide.two_sided_p(x.difference, *x.noise.parts)) for _, x in tests])
        weights = np.array([each.weight for each, _ in tests])
        adjusted, levels = decide.holm(p, weights), decide.holm_levels(p, weights)
        first = decide.ALPHA * weights / weights.sum()
        for (each, found), *numbers in zip(tests, p, adjusted, levels, first, strict=True):
            rows.append(each.row | _judged(each, found, *map(float, numbers)))
    place = {tuple(each.row[name] for name in ROW): k for k, each in enumerate(measured)}
    return sorted(rows, key=lambda row: place[tuple(row[name] for name in ROW)])


def _not_judged(each: Measured) -> dict[str, Any]:
    row = each.row
    nothing: dict[str, Any] = dict.fromkeys(
        ("ci", "log_difference", "log_ci", "stderr", "stderr_items", "stderr_seeds", "p", "p_holm")
    )
    nothing |= dict.fromkeys(("detectable", "detectable_alone", "seeds_needed"))
    if row["uninformative"]:
        return {**nothing, "verdict": UNINFORMATIVE, "words": _uninformative(row)}
    why = "its items are of one source, so their noise is unknown"
    if row["num_clusters"] > 1:
        of = "of each task" if row["mean_of"] else f"{row['task']}:{row['metric']}=SIGMA"
        alike = " (of seeds that all score 0, or all 1, none is learnt)" * each.bounded
        log = " (of the logarithm)" * each.scale.is_log
        why = f"no seed noise known{alike}: give a second seed, or --seed_sigma {of}{log}"
    return {**nothing, "verdict": NOT_JUDGED, "words": f"{NOT_JUDGED}: {why}"}


def _judged(
    each: Measured, found: Paired, p: float, p_holm: float, level: float, first_level: float
) -> dict[str, Any]:
    """The verdict; `ci` is at the `level` of this test, which begins at `first_level`."""
    scale, row = each.scale, each.row
    size, noise = found.difference, found.noise
    half = decide.critical_value(level, *noise.parts)
    ci = [size - half, size + half]
    is_real = p_holm <= decide.ALPHA
    says_nothing = row["uninformative"] is not None and not is_real
    direction = BETTER if (size > 0) == row["higher_is_better"] else WORSE
    verdict = direction if is_real else UNINFORMATIVE if says_nothing else WITHIN
    family, alone = (
        # None if it is more than there can be, or all sides are at floor
        None if says_nothing or (each.bounded and x > 1) else scale.change(x, row["baseline_value"])
        for x in (decide.detectable(a, *noise.parts) for a in (first_level, decide.ALPHA))
    )
    more: dict[str, Any] = {
        "ci": [scale.change(x, row["baseline_value"]) for x in ci],
        "log_difference": size if scale.is_log else None,
        "log_ci": ci if scale.is_log else None,
        "stderr": noise.stderr,
        "stderr_items": math.sqrt(noise.item_variance),
        "stderr_seeds": math.sqrt(noise.seed_variance),
        "p": p,
        "p_holm": p_holm,
        "verdict": verdict,
        "uninformative": row["uninformative"] if says_nothing else None,
        "detectable": family,
        "detectable_alone": alone,
        # a difference beyond noise has been shown already
        "seeds_needed": decide.seeds_needed(size, first_level, found.noise_with)
        if verdict == WITHIN
        else None,
    }
    return more | {"words": _words(row | more, direction)}


def _words(row: Mapping[str, Any], direction: str) -> str:
    if row["verdict"] == UNINFORMATIVE:
        return _uninformative(row)
    found = f"{direction} by {abs(row['difference']):.4g}" if row["difference"] else "no difference"
    if row["verdict"] != WITHIN:
        return f"{found}, beyond noise (Holm p {row['p_holm']:.2g})"
    ends = "; no difference at all could have been shown"
    if row["detectable"] is not None:
        ends = f"; at least {row['detectable']:.4g} could have been shown"
    if row["difference"] and row["seeds_needed"] is not None:
        ends += f", this one with {row['seeds_needed']} seeds each or more"
    elif row["difference"]:
        ends += f", this one not with {decide.MOST_SEEDS:,} seeds: the items are too few"
    return f"{found} on these runs, within noise{ends}"


def _uninformative(row: Mapping[str, Any]) -> str:
    return f"{UNINFORMATIVE}: {at_level(row)}, so that no difference could show"


def at_level(row: Mapping[str, Any]) -> str:
    """Return at what level both sides of an uninformative row are."""
    levels = {"floor": "floor (0)", "ceiling": "ceiling (1)"}
    level = levels.get(row["uninformative"]) or f"chance ({row['chance']:.3g})"
    return f"both at {level}"


def held_out_words(
    rows: Rows, refused: Rows, pair: tuple[Side, Side], names: tuple[str, str]
) -> str:
    """Return the first verdict: on held-out loss, where lower is better.

    `names`: of the side, and " than BASELINE" or nothing. Without evaluations the losses that
    training logged, and no verdict.
    """
    start, (name, than) = "held-out loss:", names
    labels = {"architecture": pair[0].label, "baseline": pair[1].label, "suite": VALIDATION}
    for row in rows:
        if not labels.items() <= row.items():
            continue
        is_lower = row["difference"] < 0
        size = f"by {abs(row['difference']):.3g} nats/token{than}"
        found = f"{name} {'lower' if is_lower else 'higher'} {size}"
        ends = row["items_ci"] if row["ci"] is None else row["ci"]
        low, high = sorted(-x if is_lower else x for x in ends)
        interval = f"{low:.3g} to {high:.3g}"
        if row["p"] is None:
            over = f"95 % over documents {interval}"
            return f"{start} {found} on these runs ({over}); {row['words']}"
        verdict = f"{name} {row['verdict']} {size}"
        verdict = f"{WITHIN}; {found}" if row["verdict"] == WITHIN else verdict
        return f"{start} {verdict} (95 % {interval}, p {row['p_holm']:.2g})"
    for entry in refused:
        if labels.items() <= entry.items():
            return f"{start} not compared: {entry['why']}"
    logged = [[logged_losses(run) for run in side.runs] for side in pair]
    scored = set.intersection(*(set(losses) for side in logged for losses in side))
    how = "`python -m eval run --suite validation` evaluates a checkpoint"
    if not scored:
        return f"{start} not evaluated; {how}"
    at = max(scored)
    ours, theirs = (math.fsum(x[at] for x in side) / len(side) for side in logged)
    return (
        f"{start} not evaluated; in training, at step {at[0]}, {name} had {ours:.4f} "
        f"nats/token and {than.removeprefix(' than ') or 'A'} {theirs:.4f}: no verdict ({how})"
    )


def family(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the tests; those of a suite share one error rate, which Holm's correction keeps."""
    judged = [row for row in rows if row["p"] is not None]
    tasks = {tuple(row[name] for name in ROW[:3]): None for row in judged}
    suites = Counter(row["suite"] for row in judged)
    pairs = {(row["architecture"], row["baseline"]): None for row in judged}
    words = "no test could be made"
    if judged:
        left = len(rows) - len(judged)
        counts = ", ".join(f"{suite} {_count(count, 'test')}" for suite, count in suites.items())
        words = (
            f"{counts}: {_count(len(pairs), 'pair')} with the baseline. A suite is a family: the "
            f"chance of one wrong verdict or more in it is at most {100 * decide.ALPHA:g} % (Holm; "
            "half of it is that of the mean of its tasks)"
            + (f"; {left} more could not be judged" if left else "")
        )
    return {
        "tests": len(judged),
        "suites": dict(suites),
        "tasks": [dict(zip(ROW, each, strict=False)) for each in tasks],
        "pairs": [list(pair) for pair in pairs],
        "words": words,
    }


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def verdict_summary(pairs: Rows, refused: Rows) -> dict[str, Any]:
    """Return the tally of each architecture against the baseline, and what has no verdict and why.

    `detectable`: the lowest, median and highest of the smallest differences that could have been
    shown, over the rows within noise; perplexities are left out, as they have another scale.
    """
    against: dict[tuple[str, str], Rows] = {}
    for pair in pairs:
        if pair["suite"] != VALIDATION:  # the headline says it
            against.setdefault((pair["architecture"], pair["baseline"]), []).append(pair)
    most = MAX_REAL if len(against) <= MANY else FEW_REAL
    sources = _grouped(
        ((pair["seed_noise"] or {"source": "none"})["source"], pair["task"])
        for pair in pairs
        if pair["p"] is not None
    )
    times = Counter(task for tasks in sources.values() for task in tasks)
    not_judged = _grouped(
        # the reason may name the task, as a part of a command
        (
            pair["words"]
            .replace(f"{pair['task']}:{pair['metric']}", "TASK:METRIC")
            .removeprefix(f"{NOT_JUDGED}: "),
            pair["task"],
        )
        for pair in pairs
        if pair["verdict"] == NOT_JUDGED
    )
    reasons = _grouped(
        ((row["architecture"], row["why"]), row["task"] or f"the whole suite {row['suite']}")
        for row in refused
    )
    differing = _grouped(
        ((pair["architecture"], what), pair["task"])
        for pair in pairs
        for what in pair["asked_differently"]
    )
    return {
        "architectures": [_tally(*names, rows, most) for names, rows in against.items()],
        "seed_noise": [
            {
                "source": source,
                "tasks": [f"{task} (some pairs)" if times[task] > 1 else task for task in tasks],
            }
            for source, tasks in sources.items()
        ],
        "refused": [
            {"architecture": label, "why": why, "tasks": tasks}
            for (label, why), tasks in reasons.items()
        ],
        "not_judged": [{"why": why, "tasks": tasks} for why, tasks in not_judged.items()],
        "asked_differently": [
            {"architecture": label, "what": what, "tasks": tasks}
            for (label, what), tasks in differing.items()
        ],
    }


def _grouped(entries: Iterable[tuple[Any, str]]) -> dict[Any, list[str]]:
    """(key, task) as key -> tasks, each once, in order of appearance."""
    found: dict[Any, dict[str, None]] = {}
    for key, task in entries:
        found.setdefault(key, {})[task] = None
    return {key: list(tasks) for key, tasks in found.items()}


def _tally(architecture: str, baseline: str, pairs: Rows, most: int) -> dict[str, Any]:
    # the clearest of each kind: many that are better must not hide those that are worse
    real: Rows = []
    for verdict in (BETTER, WORSE):
        alike = [pair for pair in pairs if pair["verdict"] == verdict]
        real += sorted(alike, key=lambda pair: (not pair["mean_of"], pair["p_holm"]))[:most]
    counts = {name: sum(pair["verdict"] == name for pair in pairs) for name in VERDICTS}
    shown = [
        pair["detectable"]
        for pair in pairs
        if pair["verdict"] == WITHIN
        and pair["detectable"] is not None
        and pair["log_difference"] is None
    ]
    return {
        "architecture": architecture,
        "baseline": baseline,
        "counts": counts,
        "real": real,
        "more_real": counts[BETTER] + counts[WORSE] - len(real),
        "detectable": [min(shown), statistics.median(shown), max(shown)] if shown else None,
    }
