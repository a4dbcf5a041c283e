"""The content of a board's page: scores by arm and task, what is decided, and how it was measured.

The score of a cell is that of its seeds at the last step, at the learning rate of the best mean.
No torch.
"""

import hashlib
import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from itertools import chain
from typing import Any

from canon_pretrain.boards.results import (
    RACED,
    BoardPlan,
    Choice,
    Json,
    Result,
    Score,
    choose,
    read_results,
    size_of,
)
from canon_pretrain.model.args import ModelArgs
from canon_pretrain.model.counts import flops_per_token, num_parameters, state_bytes
from canon_pretrain.report.curves import Band, rounded
from canon_pretrain.report.items import HELD_OUT
from canon_pretrain.report.record import Curve, RunRecord, collapse_repeats, unix_time
from canon_pretrain.run.launches import newest_launch
from canon_pretrain.run.log import json_value
from canon_pretrain.stats import cells as board
from canon_pretrain.stats.cells import Cells
from canon_pretrain.stats.decide import ALPHA

VERSION = 1
PAGE = "report.html"
POINTS = 200  # of a curve, at most
COUNTS: dict[str, Callable[[ModelArgs], int]] = {
    "parameters": num_parameters,
    "flops_per_token": lambda args: flops_per_token(args, args.max_seq_len),
    "state_bytes_per_token": lambda args: state_bytes(args, itemsize=2)[0],
    "state_bytes": lambda args: state_bytes(args, itemsize=2)[1],
}
VERSIONS = ("canon_pretrain", "git_commit", "torch", "torchtitan", "python", "hosts")


def board_content(plan: BoardPlan, now: datetime) -> Json:
    """Return all content of the page, JSON values only."""
    results, scores = read_results(plan, now)
    lower = [task for task, score in scores.items() if score.lower_is_better]
    choices = {
        (task, arm): choose(
            [r for r in results if (r.run.task, r.run.arm) == (task, arm)], task in lower
        )
        for task in plan.tasks
        for arm in plan.arms
    }
    shown: dict[str, dict[str, list[float]]] = {arm: {} for arm in plan.arms}
    for (task, arm), choice in choices.items():
        if values := [r.score for r in choice.shown if r.score is not None and r.has_score]:
            shown[arm][task] = values
    items = {task: score.items or board.UNBOUNDED for task, score in scores.items()}
    how: Json = {"items": items, "lower_is_better": lower}
    how["choices"] = {(arm, task): each.choices for (task, arm), each in choices.items()}
    cells = board.measure(shown, **how) if any(shown.values()) else {}
    final = _final(cells, choices)
    pairs = _differences(plan, final, lower)
    tasks = [{"task": task, **scores[task]._asdict()} for task in plan.tasks]
    rows = [
        _cell(task, arm, choice, cells.get(task, {}).get(arm), pairs)
        for (task, arm), choice in choices.items()
    ]
    _mark_bimodal(rows, scores)
    content = {
        "version": VERSION,
        "title": plan.title,
        "alpha": ALPHA,
        "share": plan.share,
        "written": now.isoformat(timespec="seconds"),
        "arms": _best_first(plan.arms, rows, lower),
        "tasks": tasks,
        "seeds": sorted({run.seed for run in plan.runs}),
        "cells": rows,
        "claims": _claims(plan, final, lower),
        "differences": pairs,
        "reference": plan.reference and _reference(plan.reference, final, lower),
        "rankings": list(_rankings(final, lower)),
        "curves": _curves(plan, choices),
        "models": [_model(plan, arm, results) for arm in plan.arms],
        "data": _data(plan, results),
        "stops": list(plan.stops),
        "runs": [_run(result) for result in results],
        "facts": _facts(results) | {"share_of_steps": _share_of_steps(results)},
    }
    return json_value(content)


def _final(cells: Cells, choices: Mapping[tuple[str, str], Choice]) -> Cells:
    """Return the cells that are tested: every planned run is over, and those shown have scores."""
    return {
        task: {
            arm: cell
            for arm, cell in by_arm.items()
            if choices[task, arm].complete and all(r.has_score for r in choices[task, arm].shown)
        }
        for task, by_arm in cells.items()
    }


def _by_size(cells: Cells) -> Cells:
    """Return TASK@SIZE -> cells: only arms of one size are compared pairwise."""
    found: Cells = {}
    for task, by_arm in cells.items():
        for arm, cell in by_arm.items():
            found.setdefault(f"{task}@{size_of(arm)}", {})[arm] = cell
    return found


def _by_size_names(tasks: Sequence[str], arms: Sequence[str]) -> Iterator[str]:
    return (f"{task}@{size}" for task in tasks for size in {size_of(arm) for arm in arms})


def _differences(plan: BoardPlan, final: Cells, lower: Sequence[str]) -> list[Json]:
    """Return all pairs of final scores, and those that a race decided, with its `step`."""
    names = ("task", "a", "b", "difference", "interval", "p", "p_holm", "better")
    rows: list[Json] = []
    tested = board.differences(_by_size(final), lower_is_better=[*_by_size_names(lower, plan.arms)])
    for each in tested:
        row = {name: getattr(each, name) for name in names} | {"step": None}
        row["task"] = each.task.partition("@")[0]
        if each.p_holm is not None:
            row["p_holm"] = min(each.p_holm / plan.share, 1.0)
            row["better"] = each.better if row["p_holm"] <= ALPHA else None
        rows.append(row)
    for order in plan.orders:
        if not {order["arm"], order["better"]} <= final.get(order["task"], {}).keys():
            row = dict.fromkeys(names) | {"task": order["task"], "p_holm": order["p"]}
            pair = {"a": order["better"], "b": order["arm"], "better": order["better"]}
            rows.append(row | pair | {"step": order["step"]})
    return rows


def _claims(plan: BoardPlan, final: Cells, lower: Sequence[str]) -> list[Json]:
    """Test the claims on final scores, or take them from the race that decided them."""
    there = [c for c in plan.claims if {c.better, c.worse} <= final.get(c.task, {}).keys()]
    tested = {each.claim: each for each in board.check_claims(final, there, lower_is_better=lower)}
    orders = {(x["task"], x["better"], x["arm"]): x for x in plan.orders}
    rows = []
    for claim in plan.claims:
        row: Json = {**claim._asdict(), "difference": None, "p": None, "p_holm": None, "step": None}
        verdict = "open"
        if found := tested.get(claim):
            adjusted = None if found.p_holm is None else min(found.p_holm / plan.share, 1.0)
            row |= {"difference": found.difference, "p": found.p, "p_holm": adjusted}
            verdict = "seen" if adjusted is not None and adjusted <= ALPHA else "not seen"
        elif order := orders.get((claim.task, claim.better, claim.worse)):
            row |= {"p_holm": order["p"], "step": order["step"]}
            verdict = "seen"
        elif not claim.margin and (claim.task, claim.worse, claim.better) in orders:
            verdict = "not seen"
        rows.append(row | {"verdict": verdict})
    return rows


def _reference(reference: Mapping[str, Any], final: Cells, lower: Sequence[str]) -> Json:
    """Return the reference's values and ranks, and how the order of the means correlates."""
    rows = []
    for task, values in reference["values"].items():
        sign, by_arm = 1 if task in lower else -1, final.get(task, {})
        ranks = {
            arm: 1 + sum(sign * x < sign * value for x in values.values())
            for arm, value in values.items()
        }
        row = {"task": task, "values": values, "ranks": ranks}
        row["num_compared"] = len(values.keys() & by_arm.keys())
        rows.append(row | {"rank_correlation": board.rank_correlation(by_arm, values)})
    return {"source": reference["source"], "tasks": rows}


def _cell(
    task: str, arm: str, choice: Choice, cell: board.Cell | None, pairs: Sequence[Json]
) -> Json:
    own = [x for x in pairs if x["task"] == task and arm in (x["a"], x["b"]) and x["better"]]
    beats = [x["b"] if x["a"] == arm else x["a"] for x in own if x["better"] == arm]
    below = [x["better"] for x in own if x["better"] != arm]
    raced = [r.raced_score for r in choice.shown if r.raced_score is not None]
    over = [r for r in choice.shown if r.is_over]
    judged, is_raced = bool(cell or below), all(r.state == RACED for r in choice.shown)
    verdicts = {(True, False): "best", (True, True): "between", (False, True): "worst"}
    return {
        **{"task": task, "arm": arm, "learning_rate": choice.rate},
        "edge": choice.edge,
        "level_rates": choice.level,
        "rates": choice.rates,
        "complete": choice.complete,
        "seeds": [{"seed": r.run.seed, "score": r.score, "state": r.state} for r in choice.shown],
        "num_without_score": sum(not r.has_score for r in over if r.state != RACED),
        "raced": statistics.fmean(raced) if is_raced and raced else None,
        "mean": cell and cell.mean,
        "interval": cell and cell.interval,
        "num_seeds": cell.num_seeds if cell else 0,
        "learned": None,
        **{"beats": beats, "below": below},
        "verdict": verdicts.get((bool(beats), bool(below)), "undecided") if judged else "missing",
    }


def _mark_bimodal(rows: Sequence[Json], scores: Mapping[str, Score]) -> None:
    """Set `learned`, the seeds above the middle of a task's range, where a cell has both kinds."""
    for task in {row["task"] for row in rows}:
        own = [row for row in rows if row["task"] == task]
        known = {
            id(row): [s["score"] for s in row["seeds"] if s["score"] is not None] for row in own
        }
        values = [x for each in known.values() for x in each if math.isfinite(x)]
        if not values or max(values) == min(values):
            continue
        low, high = min(values), max(values)
        apart = board.APART * (1.0 if scores[task].items else high - low)
        for row in own:
            ordered = sorted(x for x in known[id(row)] if math.isfinite(x))
            gaps = [b - a for a, b in zip(ordered, ordered[1:], strict=False)]
            learned = sum(x > (low + high) / 2 for x in ordered)
            if 0 < learned < len(ordered) and max(gaps) > apart:
                row["learned"] = learned


def _best_first(arms: Sequence[str], rows: Sequence[Json], lower: Sequence[str]) -> list[Json]:
    """Return the arms, sizes in the board's order, by the mean rank over tasks at that size."""
    ranks: dict[str, list[float]] = {arm: [] for arm in arms}
    beside: dict[tuple[str, str], list[tuple[tuple[bool, float], str]]] = {}
    for row in rows:
        is_raced = row["mean"] is None  # those are behind the others
        if (value := row["raced"] if is_raced else row["mean"]) is not None:
            key = is_raced, value if row["task"] in lower else -value
            beside.setdefault((row["task"], size_of(row["arm"])), []).append((key, row["arm"]))
    for group in beside.values():
        keys = [key for key, _ in group]
        for key, arm in group:
            ranks[arm].append(sum(x < key for x in keys) + (keys.count(key) + 1) / 2)
    sizes = [*dict.fromkeys(size_of(arm) for arm in arms)]
    found: list[Json] = [
        {"arm": arm, "rank": statistics.fmean(own) if own else None} for arm, own in ranks.items()
    ]
    last = len(arms) + 1
    return sorted(found, key=lambda x: (sizes.index(size_of(x["arm"])), x["rank"] or last))


def _rankings(final: Cells, lower: Sequence[str]) -> Iterator[Json]:
    for name, by_arm in _by_size(final).items():
        task, _, size = name.partition("@")
        found = board.ranking(by_arm, lower_is_better=task in lower)
        if found and len(by_arm) > 1:
            yield {"task": task, "size": size, **found._asdict()}


def _curves(plan: BoardPlan, choices: Mapping[tuple[str, str], Choice]) -> list[Json]:
    """Return per task and size a line per arm: mean and range of its seeds at common steps."""
    found = []
    for task in plan.tasks:
        for size in dict.fromkeys(size_of(arm) for arm in plan.arms):
            lines = []
            for arm in plan.arms:
                runs = [r for r in choices[task, arm].shown if r.curve and size_of(arm) == size]
                curves = [Curve.of(r.curve.items()) for r in runs]
                band = Band.of([*curves, *curves[:1]] if len(curves) == 1 else curves, POINTS)
                if band is None:
                    continue
                named = zip(("steps", "values", "low", "high"), band[:4], strict=True)
                lines.append({"arm": arm, "n": len(runs)} | {k: rounded(x) for k, x in named})
            found += [{"task": task, "size": size, "lines": lines}] if lines else []
    return found


def _model(plan: BoardPlan, arm: str, results: Sequence[Result]) -> Json:
    """Return the counts of an arm's model by task."""
    tasks = {}
    for task in plan.tasks:
        own = (r.record for r in results if (r.run.task, r.run.arm) == (task, arm) and r.record)
        if (record := next(own, None)) and (args := record.model_args):
            tasks[task] = {name: count(args) for name, count in COUNTS.items()}
    return {"arm": arm, "tasks": tasks}


def _data(plan: BoardPlan, results: Sequence[Result]) -> list[Json]:
    """Return a digest of the training batches and the held-out data per task and seed.

    `different`: the runs whose batches at some step, or whose held-out data, are not those of most
    runs. `covered`: of the steps of a run, at least this share has digests; a launch that was
    killed loses the last ones.
    """
    groups: dict[tuple[str, int], list[RunRecord]] = {}
    for result in results:
        if result.record is not None and result.record.steps:
            groups.setdefault((result.run.task, result.run.seed), []).append(result.record)
    rows = []
    for (task, seed), runs in groups.items():
        seen = [_batches(run) for run in runs]
        held_out = [run.identity.get(HELD_OUT) for run in runs]
        usual, text = max(seen, key=len), Counter(held_out).most_common(1)[0][0]
        if any(own != usual for own in seen):
            by_step: dict[int, Counter[str]] = {}
            for step, digest in chain.from_iterable(own.items() for own in seen):
                by_step.setdefault(step, Counter())[digest] += 1
            usual = {step: by_step[step].most_common(1)[0][0] for step in sorted(by_step)}
        rows.append(
            {
                **{"task": task, "seed": seed, "runs": len(runs), "batches": len(usual)},
                "digest": hashlib.sha256("".join(usual.values()).encode()).hexdigest()[:16],
                "held_out": text and text[:16],
                "covered": min(
                    len(own) / run.steps[-1]["step"] for run, own in zip(runs, seen, strict=True)
                ),
                "different": [
                    run.label
                    for run, own, other in zip(runs, seen, held_out, strict=True)
                    if other != text or (own is not usual and not own.items() <= usual.items())
                ],
            }
        )
    return rows


def _batches(run: RunRecord) -> dict[int, str]:
    """Return the digest of each global batch by step."""
    found: dict[int, str] = {}
    for event in run.steps:
        digests = event.get("data_digests", ())
        found |= dict(enumerate(digests, event["step"] - len(digests) + 1))
    return found


def _run(result: Result) -> Json:
    run = result.run
    return {
        **run._asdict(),
        **{"state": result.state, "reason": result.reason, "step": result.step},
        "is_over": result.is_over,
        "score": result.score,
        "hours": result.record and _hours(result.record),
    }


def _hours(record: RunRecord) -> float | None:
    hours = record.clock.training_hours
    return None if hours is None else float(hours[-1])


def _share_of_steps(results: Sequence[Result]) -> float:
    """Return the steps that were trained over those planned."""
    planned = {r.run.task: r.record.identity.get("training.steps") for r in results if r.record}
    total = sum(planned.get(r.run.task) or 0 for r in results)
    return sum(r.step for r in results) / total if total else 0.0


def _facts(results: Sequence[Result]) -> Json:
    """Return versions, machines, dates and times of all launches."""
    records = [r.record for r in results if r.record is not None]
    events = [event for record in records for event in record.launch_events]
    ends = [record.events[k].get("time") for record in records for k in (0, -1) if record.events]
    times = sorted((time for time in ends if math.isfinite(unix_time(time))), key=unix_time)
    hours = [x for record in records if (x := _hours(record)) is not None]
    newest = [newest_launch(record.folder) for record in records[:: max(1, len(records) // 8)]]
    cpu = [event.get("cpu_seconds") for record in records for event in record.events]
    versions: Json = {}
    for name in VERSIONS:
        values = (event.get(name) for event in events)
        flat = (x for each in values for x in (each if isinstance(each, list) else [each]))
        versions[name] = [*dict.fromkeys(map(str, collapse_repeats(flat)))]
    return {
        **versions,
        "platforms": [*dict.fromkeys(x["platform"] for x in newest if x and "platform" in x)],
        **{"first_event": times[0] if times else None, "last_event": times[-1] if times else None},
        "wall_seconds": unix_time(times[-1]) - unix_time(times[0]) if times else None,
        "training_seconds": 3600 * math.fsum(hours),
        "cpu_seconds": math.fsum(filter(None, cpu)) or None,
        "launches": len(events),
    }


def write_page(plan: BoardPlan, now: datetime) -> list[str]:
    """Write report.html, .json and .md into the board's folder; return what to print."""
    from canon_pretrain.boards import tables as board_tables  # plotly takes a while to import
    from canon_pretrain.report import eval_report

    content = board_content(plan, now)
    labels = {"entry": board_tables.architectures(content)}
    eval_report.write_report(plan.folder, PAGE, content, labels, "board", board=board_tables)
    found = [*board_tables.errors(content), *board_tables.headline(content)]
    return [*found, f"report: {(plan.folder / PAGE).resolve()}"]
