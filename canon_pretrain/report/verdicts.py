"""Which differences are real: one row a task and pair, judged as one family.

The rows come measured from measure.py; here they get Holm's p, verdicts, what could have been
shown, and words. No torch.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from canon_pretrain.report import decide
from canon_pretrain.report.architectures import logged_losses
from canon_pretrain.report.lengths import BABILONG
from canon_pretrain.report.measure import Measure, Measured, Refused, Side
from canon_pretrain.report.pair import Paired
from canon_pretrain.report.standing import VALIDATION, Standing, questions, side_by_side, suites_of

BETTER, WORSE, WITHIN, NOT_JUDGED = "better", "worse", "within noise", "not judged"
UNINFORMATIVE = "uninformative"
"""Within noise or not judged, with all sides at floor, ceiling or chance."""

ROW = ("suite", "task", "metric", "architecture", "baseline")
"""What names a row."""

Rows = list[dict[str, Any]]


def verdicts(measure: Measure, pairs: Sequence[tuple[Side, Side]]) -> tuple[Rows, Rows, list[str]]:
    """Rows and refusals of each (side, baseline), and notes on runs that were left out."""
    measured: list[Measured] = []
    refused: Rows = []
    notes: dict[str, None] = {}
    for side, baseline in pairs:
        both = [*side.runs, *baseline.runs]
        names = {"architecture": side.label, "baseline": baseline.label}
        for suite in suites_of(both, measure.options.suites):
            ours, theirs = side_by_side(
                side.runs,
                baseline.runs,
                suite,
                measure.options.step,
                any_step=measure.options.any_step,
            )
            if not ours:
                nothing = {"suite": suite, "task": None, "metric": None, **names}
                refused.append(nothing | {"why": "no whole result at a step that both have"})
                continue
            here = [standing.run for standing in (*ours, *theirs)]
            left = ", ".join(run.label for run in both if run not in here)
            if left:
                at = ours[0].results.asked["step"]
                notes[f"{suite} at step {at}: no whole result of {left}"] = None
            found = []
            for question in questions([*ours, *theirs], suite):
                if suite == VALIDATION and question.task != VALIDATION:
                    continue  # the count models beside it
                try:
                    found.append(measure.pair(question, ours, theirs, names))
                except Refused as reason:
                    refused.append({**question.words, **names, "why": str(reason)})
            measured += _with_means(measure, found, ours, theirs)
    return _decide(measured), refused, list(notes)


def _with_means(
    measure: Measure,
    tasks: Sequence[Measured],
    ours: Sequence[Standing],
    theirs: Sequence[Standing],
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
    rows += [
        members[0]
        if len(members) == 1
        else measure.mean(
            f"babilong_{length}k, mean of {len(members)} tasks", members, ours, theirs
        )
        for length, members in sorted(cells.items())
    ]
    if len(scored) > 1:
        name = f"{tasks[0].row['suite']}, mean of {len(scored)} tasks"
        mean = measure.mean(name, list(scored.values()), ours, theirs)
        rows.insert(0, replace(mean, weight=sum(each.weight for each in rows)))
    return rows


def held_out_words(
    rows: Rows, refused: Rows, pair: tuple[Side, Side], names: tuple[str, str]
) -> str:
    """The first verdict: on held-out loss, where lower is better.

    `names`: of the side, and " than BASELINE" or nothing. Without evaluations the losses that
    training logged, and no verdict.
    """
    start, (name, than) = "held-out loss:", names
    labels = {"architecture": pair[0].label, "baseline": pair[1].label}

    def of_pair(entries: Rows) -> Rows:
        return [x for x in entries if x["suite"] == VALIDATION and labels.items() <= x.items()]

    for row in of_pair(rows):
        size = f"by {abs(row['difference']):.3g} nats/token{than}"
        is_lower = row["difference"] < 0
        ends = row["items_ci"] if row["ci"] is None else row["ci"]
        low, high = sorted(-x if is_lower else x for x in ends)
        interval = f"{low:.3g} to {high:.3g}"
        if row["p"] is None:
            found = f"{name} {'lower' if is_lower else 'higher'} {size} on these runs"
            return f"{start} {found} (95 % over documents {interval}); {row['words']}"
        if row["verdict"] == WITHIN:
            size = f"within noise; {name} {'lower' if is_lower else 'higher'} {size}"
        else:
            size = f"{name} {row['verdict']} {size}"
        return f"{start} {size} (95 % {interval}, p {row['p_holm']:.2g})"
    for entry in of_pair(refused):
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


def _decide(measured: Sequence[Measured]) -> list[dict[str, Any]]:
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
    names = (
        "ci", "log_difference", "log_ci", "stderr", "stderr_items", "stderr_seeds", "p", "p_holm",
        "detectable", "detectable_alone", "seeds_needed",
    )  # fmt: skip
    row = each.row
    if row["uninformative"]:
        words = _uninformative(row)
        return {**dict.fromkeys(names), "verdict": UNINFORMATIVE, "words": words}
    why = (
        "its items are of one source, so their noise is unknown"
        if row["num_clusters"] < 2
        else "no seed noise known"
        + (" (of seeds that all score 0, or all 1, none is learnt)" * each.bounded)
        + ": give a second seed, or --seed_sigma "
        + ("of each task" if row["mean_of"] else f"{row['task']}:{row['metric']}=SIGMA")
        + (" (of the logarithm)" if each.scale.is_log else "")
    )
    return {**dict.fromkeys(names), "verdict": NOT_JUDGED, "words": f"{NOT_JUDGED}: {why}"}


def _judged(
    each: Measured, found: Paired, p: float, p_holm: float, level: float, first_level: float
) -> dict[str, Any]:
    """The verdict; `ci` is at the `level` of this test, which begins at `first_level`."""
    scale, row = each.scale, each.row
    size, noise = found.difference, found.noise
    half = decide.critical_value(level, *noise.parts)
    ci = [size - half, size + half]

    def shown(x: float) -> float:
        return scale.change(x, each.baseline_value)

    def possible(x: float) -> float | None:
        """What could be shown; None if it is more than there can be, or all sides are at floor."""
        return None if says_nothing or (each.bounded and x > 1) else shown(x)

    levels = decide.ALPHA, first_level
    alone, family = (decide.detectable(level, *noise.parts) for level in levels)
    is_up = (size > 0) == row["higher_is_better"]
    is_real = p_holm <= decide.ALPHA
    says_nothing = row["uninformative"] is not None and not is_real
    verdict = UNINFORMATIVE if says_nothing else WITHIN
    if is_real:
        verdict = BETTER if is_up else WORSE
    more: dict[str, Any] = {
        "ci": [shown(x) for x in ci],
        "log_difference": size if scale.is_log else None,
        "log_ci": ci if scale.is_log else None,
        "stderr": noise.stderr,
        "stderr_items": math.sqrt(noise.item_variance),
        "stderr_seeds": math.sqrt(noise.seed_variance),
        "p": p,
        "p_holm": p_holm,
        "verdict": verdict,
        "uninformative": row["uninformative"] if says_nothing else None,
        "detectable": possible(family),
        "detectable_alone": possible(alone),
        # a difference beyond noise has been shown already
        "seeds_needed": decide.seeds_needed(size, first_level, found.noise_with)
        if verdict == WITHIN
        else None,
    }
    return more | {"words": _words(row | more, is_up)}


def _words(row: Mapping[str, Any], is_up: bool) -> str:
    direction = BETTER if is_up else WORSE
    if row["difference"] == 0:
        found = "no difference"
    else:
        found = f"{direction} by {abs(row['difference']):.4g}"
    if row["verdict"] == UNINFORMATIVE:
        return _uninformative(row)
    if row["verdict"] != WITHIN:
        return f"{found}, beyond noise (Holm p {row['p_holm']:.2g})"
    ends = "; no difference at all could have been shown"
    if row["detectable"] is not None:
        ends = f"; at least {row['detectable']:.4g} could have been shown"
    if row["difference"] and row["seeds_needed"] is not None:
        ends += f", this one with {row['seeds_needed']} seeds each or more"
    elif row["difference"]:
        ends += f", this one not with {decide.MOST_SEEDS:,} seeds: the items are too few"
    return f"{found} on these runs, within noise" + ends


def _uninformative(row: Mapping[str, Any]) -> str:
    return f"{UNINFORMATIVE}: {at_level(row)}, so that no difference could show"


def at_level(row: Mapping[str, Any]) -> str:
    """At what level both sides of an uninformative row are."""
    levels = {"floor": "floor (0)", "ceiling": "ceiling (1)"}
    level = levels.get(row["uninformative"]) or f"chance ({row['chance']:.3g})"
    return f"both at {level}"
