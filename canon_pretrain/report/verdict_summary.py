"""The verdicts of a comparison in short: what a reader wants to know before any table.

Takes the value of `eval.comparison` and counts, groups and picks; it decides nothing. A part of the
report's content (content.py): numbers unrounded, JSON values only. No torch.
"""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from canon_pretrain.report.lengths import Entry
from canon_pretrain.report.standing import VALIDATION

VERDICTS = ("better", "worse", "within noise", "not judged", "uninformative")

MAX_REAL, FEW_REAL = 6, 2
"""Real differences that an architecture's summary names, of the better and of the worse ones each.

The latter where there are more than MANY architectures; the table has them all.
"""

MANY = 6


def verdict_summary(comparison: Mapping[str, Any]) -> dict[str, Any]:
    """For each architecture its tally against the baseline; the seed noise used; what was refused,
    and what was compared although the question was not put in the same way.

    `detectable` is lowest, median and highest of the smallest differences that could have been
    shown, over the differences within noise; perplexities are left out, as they have another scale.
    """
    against: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for pair in comparison["pairs"]:
        if pair["suite"] == VALIDATION:
            continue  # the headline says it
        against.setdefault((pair["architecture"], pair["baseline"]), []).append(pair)
    most = MAX_REAL if len(against) <= MANY else FEW_REAL
    return {
        "architectures": [
            _tally(architecture, baseline, pairs, most)
            for (architecture, baseline), pairs in against.items()
        ],
        "seed_noise": _seed_noise(comparison["pairs"]),
        "refused": _refused(comparison["refused"]),
        "not_judged": _not_judged(comparison["pairs"]),
        "asked_differently": _asked_differently(comparison["pairs"]),
    }


def entries(comparison: Mapping[str, Any]) -> list[Entry]:
    """The architectures, with the runs of the chosen learning rate for each; else all of its."""
    return [
        Entry(each["label"], tuple((each["chosen"] or each)["runs"]))
        for each in comparison["architectures"]
    ]


def _tally(
    architecture: str, baseline: str, pairs: Sequence[dict[str, Any]], most: int
) -> dict[str, Any]:
    # the clearest of each kind: many that are better shall not hide those that are worse
    real: list[dict[str, Any]] = []
    for verdict in ("better", "worse"):
        alike = [pair for pair in pairs if pair["verdict"] == verdict]
        real += sorted(alike, key=lambda pair: (not pair["mean_of"], pair["p_holm"]))[:most]
    counts = {name: sum(pair["verdict"] == name for pair in pairs) for name in VERDICTS}
    noise = [pair for pair in pairs if pair["verdict"] == "within noise"]
    detectable = [
        pair["detectable"]
        for pair in noise
        if pair["detectable"] is not None and pair["log_difference"] is None
    ]
    return {
        "architecture": architecture,
        "baseline": baseline,
        "counts": counts,
        "real": real,
        "more_real": counts["better"] + counts["worse"] - len(real),
        "detectable": [min(detectable), statistics.median(detectable), max(detectable)]
        if detectable
        else None,
    }


def _seed_noise(pairs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Where the seed noise of the judged tasks comes from: source -> tasks, as told by the rows.

    A task's noise may come from elsewhere in one pair than in another; that is said.
    """
    found: dict[str, dict[str, None]] = {}
    for pair in pairs:
        if pair["p"] is not None:
            noise = pair["seed_noise"]
            source = noise["source"] if noise else "none"
            found.setdefault(source, {})[pair["task"]] = None
    several = {task for task in set().union(*found.values()) if _times(task, found) > 1}
    return [
        {
            "source": source,
            "tasks": [f"{task} (some pairs)" if task in several else task for task in tasks],
        }
        for source, tasks in found.items()
    ]


def _times(task: str, found: Mapping[str, Mapping[str, None]]) -> int:
    return sum(task in tasks for tasks in found.values())


def _refused(refused: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The comparisons that could not be made, those of one reason together."""
    found: dict[tuple[str, str], dict[str, None]] = {}
    for entry in refused:
        what = entry["task"] or f"the whole suite {entry['suite']}"
        found.setdefault((entry["architecture"], entry["why"]), {})[what] = None
    return [
        {"architecture": architecture, "why": why, "tasks": list(tasks)}
        for (architecture, why), tasks in found.items()
    ]


def _not_judged(pairs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The pairs without a verdict, those of one reason together."""
    found: dict[str, dict[str, None]] = {}
    for pair in pairs:
        if pair["verdict"] == "not judged":
            # the reason may name the task, as a part of a command
            why = pair["words"].replace(f"{pair['task']}:{pair['metric']}", "TASK:METRIC")
            found.setdefault(why.removeprefix("not judged: "), {})[pair["task"]] = None
    return [{"why": why, "tasks": list(tasks)} for why, tasks in found.items()]


def _asked_differently(pairs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    found: dict[tuple[str, str], dict[str, None]] = {}
    for pair in pairs:
        for what in pair.get("asked_differently") or ():
            found.setdefault((pair["architecture"], what), {})[pair["task"]] = None
    return [
        {"architecture": architecture, "what": what, "tasks": list(tasks)}
        for (architecture, what), tasks in found.items()
    ]
