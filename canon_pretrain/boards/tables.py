"""The tables and plots of a board's page, with all numbers rounded here; see board_content.py.

templates/board.body.jinja has their order and the text around them.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from canon_pretrain.core.terminal import duration
from canon_pretrain.report.figures import Json, MeanLine, Plot, draw_means
from canon_pretrain.report.sections import (
    MISSING,
    Cell,
    Table,
    make_cell,
    make_table,
    number,
    p_value,
    rounded,
    signed,
)

Content = Mapping[str, Any]

SYMBOLS = {"best": "▲", "between": "◆", "worst": "▼", "undecided": "", "missing": ""}
VERSIONS = ("torch", "torchtitan", "python", "hosts", "platforms")
STATES = ("failed", "damaged", "dead", "hung", "stopped", "unknown")
SHOWN_RUNS = 1000
NAMED = 4  # cells in a sentence
CLAIM_VERDICTS = {"seen": "✓ confirmed", "not seen": "not confirmed", "open": "not decided yet"}


def headline(content: Content) -> list[str]:
    """Return what is decided, in sentences."""
    runs, claims, found = content["runs"], content["claims"], []
    over = sum(run["is_over"] for run in runs)
    if over < len(runs):
        found.append(f"{over} of {len(runs)} runs are over: what follows is provisional.")
    if claims:
        seen = [f"{x['better']} over {x['worse']} on {x['task']}" for x in claims if is_seen(x)]
        waits = sum(x["verdict"] == "open" for x in claims)
        differences = (
            "1 planned difference" if len(claims) == 1 else f"{len(claims)} planned differences"
        )
        text = f"This board compares {differences}: {len(seen)} confirmed"
        text += f", {waits} not decided yet" if waits else ""
        found.append(f"{text} ({'; '.join(seen)})." if 0 < len(seen) <= NAMED else f"{text}.")
    winners: dict[str, list[str]] = {}
    for task in content["tasks"]:
        for arm in _winners(content, task["task"]):
            winners.setdefault(arm, []).append(task["task"])
    for arm, tasks in winners.items():
        found.append(f"{arm} is better than all others on {', '.join(tasks)}.")
    pairs = content["differences"]
    decided = sum(x["better"] is not None for x in pairs)
    if len(content["seeds"]) == 1:
        found.append("With one seed per cell, nothing can be decided.")
    elif pairs:
        found.append(f"{decided} of {len(pairs)} pairwise differences are decided.")
    else:
        found.append("No two architectures have all of their scores, to be compared.")
    return found + references(content)


def references(content: Content) -> list[str]:
    """Return how the order on each task correlates with the reference's."""
    return [
        f"The order of {x['num_compared']} architectures on {x['task']} has a rank correlation "
        f"(Spearman) of {x['rank_correlation']:.2f} with: {content['reference']['source']}."
        for x in _by_reference(content).values()
        if x["rank_correlation"] is not None
    ]


def _by_reference(content: Content) -> dict[str, Content]:
    reference = content["reference"]
    return {x["task"]: x for x in reference["tasks"]} if reference else {}


def is_seen(claim: Content) -> bool:
    return bool(claim["verdict"] == "seen")


def _winners(content: Content, task: str) -> list[str]:
    """Return the arms that beat every other arm of their size."""
    rows = [row for row in content["cells"] if row["task"] == task]
    found = []
    for row in rows:
        size = row["arm"].partition("/")[2]
        others = [x["arm"] for x in rows if x["arm"].partition("/")[2] == size]
        if len(others) > 1 and len(row["beats"]) == len(others) - 1:
            found.append(row["arm"])
    return found


def errors(content: Content) -> list[str]:
    """Return a sentence per task and seed whose runs saw different data."""
    return [
        f"{row['task']}, seed {row['seed']}: not the same data as the others: "
        f"{', '.join(row['different'])}. Do not compare these runs."
        for row in content["data"]
        if row["different"]
    ]


def warnings(content: Content) -> list[str]:
    """Return sentences on cells without a score, and on learning rates at an end of their grid."""
    cells = content["cells"]
    grids = [row for row in cells if len(row["rates"]) > 1]
    lost = [row for row in cells if row["num_without_score"]]
    sentences = [(lost, cells, "cells a run diverged or failed, at any rate: no test has them")]
    for edge in ("lowest", "highest"):
        at = [row for row in grids if row["edge"] == edge]
        text = f"grids the best learning rate is the {edge}: a better one may be outside"
        sentences.append((at, grids, text))
    return [
        f"In {len(rows)} of {len(of)} {text} ({_listed(rows)})."
        for rows, of, text in sentences
        if rows
    ]


def _listed(rows: Sequence[Content]) -> str:
    names = [f"{row['arm']} on {row['task']}" for row in rows]
    more = len(names) - NAMED
    return ", ".join(names[:NAMED]) + (f", and {more} more" if more > 0 else "")


def rate_text(rate: float | None) -> str:
    return "of its config" if rate is None else f"{rate:g}"


def score_text(task: Content) -> str:
    if not task["name"]:  # no run has started
        return ""
    return f"{task['name']}, {'lower' if task['lower_is_better'] else 'higher'} is better"


def _by_place(content: Content) -> dict[tuple[str, str], Content]:
    return {(row["task"], row["arm"]): row for row in content["cells"]}


def short(value: float) -> str:
    return f"{value:.3f}" if abs(value) < 10 else f"{value:,.1f}"


def bounds(interval: Sequence[float] | None) -> str:
    return "no interval" if interval is None else f"{short(interval[0])} to {short(interval[1])}"


def matrix(content: Content) -> Table:
    """Return the scores, arms best first."""
    cells, beside = _by_place(content), _by_reference(content)
    columns: list[str | tuple[str, str]] = ["architecture"]
    rows: list[list[Cell]] = [
        [make_cell(arm["arm"], f"mean rank {number(arm['rank'], 1)}")] for arm in content["arms"]
    ]
    for task in content["tasks"]:
        name, other = task["task"], beside.get(task["task"])
        columns.append((name, score_text(task)))
        if other:
            correlation = rounded(other["rank_correlation"])
            columns.append((f"{name}, reference", f"rank correlation {correlation}"))
        for arm, row in zip(content["arms"], rows, strict=True):
            row.append(_matrix_cell(cells[name, arm["arm"]]))
            if other:
                row.append(_reference_cell(other, arm["arm"]))
    return make_table(columns, rows, "matrix")


def _reference_cell(other: Content, arm: str) -> Cell:
    value = other["values"].get(arm)
    return MISSING if value is None else make_cell(rounded(value), f"rank {other['ranks'][arm]}")


def _matrix_cell(row: Content) -> Cell:
    if row["mean"] is None:
        lost = row["num_without_score"]
        if row["raced"] is not None:
            text = f"{SYMBOLS[row['verdict']]} {short(row['raced'])}".strip()
            return make_cell(text, "stopped by the race", _judged(row), chip=row["verdict"])
        return make_cell(MISSING, f"{lost} run(s) without a score" if lost else "not trained yet")
    verdict, planned = row["verdict"], len(row["seeds"])
    count = f"{row['num_seeds']} of {planned} seeds" if row["num_seeds"] < planned else ""
    learned = row["learned"]
    split = "" if learned is None else f"{learned} of {row['num_seeds']} seeds learned"
    text = f"{SYMBOLS[verdict]} {short(row['mean'])}".strip()
    return make_cell(text, bounds(row["interval"]), _judged(row), split, count, chip=verdict)


def _judged(row: Content) -> str:
    found = [f"{word} {len(row[word])}" for word in ("beats", "below") if row[word]]
    return ", ".join(found) or "undecided"


def claims(content: Content) -> Table:
    rows: list[list[Cell]] = []
    for x in content["claims"]:
        margin = f"at most {x['margin']:g} worse" if x["margin"] else ""
        early = "" if x["step"] is None else f"by the race, at step {x['step']:,}"
        chip = "best" if is_seen(x) else ""
        numbers = [signed(x["difference"]), p_value(x["p"]), p_value(x["p_holm"])]
        verdict = make_cell(CLAIM_VERDICTS[x["verdict"]], early, chip=chip)
        rows.append([verdict, x["task"], make_cell(x["better"], margin), x["worse"], *numbers])
    columns = ["verdict", "task", "expected better", "than", "difference", "p", "p (Holm)"]
    return make_table(columns, rows, "claims", text=4)


def curves(content: Content) -> list[Plot]:
    """Return the plots of learning curves, one per task and size."""
    names, tasks = architectures(content), {x["task"]: x for x in content["tasks"]}
    found: list[Plot] = []
    for shown in content["curves"]:
        lines = [
            MeanLine(
                label=line["arm"].partition("/")[0],
                values=line["values"],
                low=line["low"],
                high=line["high"],
                n=[line["n"]] * len(line["steps"]),
            )
            for line in shown["lines"]
        ]
        steps = [line["steps"] for line in shown["lines"]]
        task, figure = tasks[shown["task"]], draw_means(lines, steps, names, "steps", bands=True)
        if task["items"]:
            figure["layout"]["yaxis"] |= {"range": [-0.03, 1.03]}
        found.append((f"{task['task']} {shown['size']}".strip(), task["name"], figure))
    return found


def architectures(content: Content) -> list[str]:
    return [*dict.fromkeys(arm["arm"].partition("/")[0] for arm in content["arms"])]


def heat_maps(content: Content) -> list[tuple[str, Table]]:
    """Return sizes x difficulties of each task and architecture, where a board has both."""
    cells = _by_place(content)
    sizes = [*dict.fromkeys(arm["arm"].partition("/")[2] for arm in content["arms"])]
    by_task: dict[str, list[Content]] = {}
    for task in content["tasks"]:
        by_task.setdefault(task["task"].partition("/")[0], []).append(task)
    found = []
    for name, tasks in by_task.items():
        if len(sizes) < 2 or len(tasks) < 2:
            continue
        known = [
            row["mean"]
            for (task, _), row in cells.items()
            if task in {x["task"] for x in tasks} and row["mean"] is not None
        ]
        low, high = (0.0, 1.0) if tasks[0]["items"] else (min(known), max(known))
        for architecture in architectures(content):
            rows: list[list[Cell]] = []
            for size in sizes:
                means = [cells[x["task"], f"{architecture}/{size}"]["mean"] for x in tasks]
                shares = [_share(x, low, high, tasks[0]["lower_is_better"]) for x in means]
                pairs = zip(means, shares, strict=True)
                rows.append([size, *(make_cell(rounded(x), heat=share) for x, share in pairs)])
            columns = ["size", *(x["task"].partition("/")[2] for x in tasks)]
            found.append((f"{name}: {architecture}", make_table(columns, rows)))
    return found


def _share(value: float | None, low: float, high: float, lower_is_better: bool) -> str:
    if value is None:
        return ""
    share = (value - low) / (high - low) if high > low else 0.5
    return f"{min(max(1 - share if lower_is_better else share, 0.0), 1.0):.2f}"


def rankings(content: Content) -> Table:
    rows: list[list[Cell]] = []
    for x in content["rankings"]:
        best = sorted(x["best"].items(), key=lambda item: -item[1])
        chances = ", ".join(f"{arm} {share:.0%}" for arm, share in best if share >= 0.005)
        order = " > ".join(arm.partition("/")[0] for arm in x["order"])
        rows.append([make_cell(x["task"], x["size"]), order, chances, f"{x['holds']:.0%}"])
    columns = ["task", "order, best first", "probability of being the best", "the order holds"]
    return make_table(columns, rows, "rankings", text=3)


def rates(content: Content) -> Table:
    """Return the mean score of each learning rate, the best in color."""
    grids = [row for row in content["cells"] if len(row["rates"]) > 1]
    tried = sorted({each["rate"] for row in grids for each in row["rates"]})
    rows: list[list[Cell]] = []
    for row in grids:
        by_rate = {each["rate"]: each for each in row["rates"]}
        edge = f"{row['edge']} tried" if row["edge"] else "inside" if row["complete"] else MISSING
        cells = [_rate_cell(by_rate.get(rate), row) for rate in tried]
        rows.append([make_cell(row["arm"], row["task"]), edge, *cells])
    columns = ["architecture", "best in the grid", *map(rate_text, tried)]
    return make_table(columns, rows, "rates", text=2)


def _rate_cell(each: Content | None, row: Content) -> Cell:
    if each is None:
        return MISSING
    is_best, is_level = each["rate"] == row["learning_rate"], each["rate"] in row["level_rates"]
    if each["mean"] is not None:
        small = "best" if is_best else "level" * is_level
        return make_cell(rounded(each["mean"]), small, chip="best" * is_best)
    known = sum(isinstance(x, float | int) for x in each["scores"])
    return make_cell(MISSING, "stopped" if each["stopped"] else f"{known} score(s)")


MODEL_COLUMNS = {
    "parameters": ("parameters", ""),
    "flops_per_token": ("FLOPs per token", "training"),
    "state_bytes_per_token": ("state per token", "bytes to decode, at 16 bits"),
    "state_bytes": ("state at any length", "bytes to decode, at 16 bits"),
}


def models(content: Content) -> Table:
    """Return the counts of each architecture, from the smallest to the largest over tasks."""
    by_arm = {x["arm"]: x["tasks"].values() for x in content["models"]}
    rows: list[list[Cell]] = []
    for arm in (x["arm"] for x in content["arms"]):
        cells: list[Cell] = [arm]
        for name in MODEL_COLUMNS:
            values = sorted({counts[name] for counts in by_arm[arm]})
            cells.append(" to ".join(f"{x:,}" for x in values[:1] + values[1:][-1:]) or MISSING)
        rows.append(cells)
    return make_table(["architecture", *MODEL_COLUMNS.values()], rows, "models")


def differences(content: Content) -> Table:
    rows: list[list[Cell]] = []
    for x in content["differences"]:
        interval = MISSING if x["interval"] is None else " to ".join(map(signed, x["interval"]))
        early = "" if x["step"] is None else f"by the race, at step {x['step']:,}"
        better = make_cell(x["better"] or "undecided", early, chip="best" * bool(x["better"]))
        numbers = [signed(x["difference"]), interval, p_value(x["p"]), p_value(x["p_holm"])]
        rows.append([x["task"], x["a"], x["b"], better, *numbers])
    columns = ["task", "a", "b", "better", "a minus b", "95 % interval", "p", "p (Holm)"]
    return make_table(columns, rows, "pairs", text=4, filters=["task"])


def data(content: Content) -> Table:
    rows: list[list[Cell]] = [
        [
            *(x["task"], str(x["seed"]), number(x["runs"], 0), number(x["batches"], 0)),
            *(f"{math.floor(100 * x['covered'])} %", x["digest"], x["held_out"] or MISSING),
            make_cell("different", chip="worst") if x["different"] else "equal",
        ]
        for x in content["data"]
    ]
    columns = ["task", "seed", "runs", "batches", "covered", "digest", "held-out data", ""]
    return make_table(columns, rows, "data", text=len(columns))


def same_data(content: Content) -> list[str]:
    """Return a sentence on what the digests prove, if they do."""
    if not content["data"] or errors(content):
        return []
    covered = min(x["covered"] for x in content["data"])
    return [
        "All runs of a task and seed saw the same batches in the same order, by digests of at "
        f"least {math.floor(100 * covered)} % of the steps of each, and are scored on the same "
        "held-out data."
    ]


def stops(content: Content) -> Table:
    rows: list[list[Cell]] = []
    for x in content["stops"]:
        better = make_cell(x["better"], rate_text(x["better_rate"]))
        numbers = [number(x["step"], 0), number(x["num_seeds"], 0), p_value(x["p"])]
        stopped = make_cell(x["arm"], rate_text(x["learning_rate"]))
        rows.append([x["task"], stopped, better, *numbers, x["time"][:19]])
    heads = [("stopped", "learning rate"), ("worse than", "learning rate")]
    return make_table(["task", *heads, "at step", "seeds", "p", "time"], rows, "stops", text=3)


def problems(content: Content) -> Table:
    """Return the runs that have failed, diverged, or not ended."""
    bad = [run for run in content["runs"] if run["reason"] or run["state"] in STATES]
    rows: list[list[Cell]] = [
        [run["name"], run["state"], run["reason"] or MISSING, number(run["step"], 0)]
        for run in bad[:SHOWN_RUNS]
    ]
    return make_table(["run", "state", "why", "step"], rows, text=3)


def runs(content: Content) -> Table:
    rows: list[list[Cell]] = [
        [
            *(run["name"], run["state"], number(run["step"], 0)),
            MISSING if run["score"] is None else rounded(run["score"]),
            MISSING if run["hours"] is None else duration(3600 * run["hours"]),
        ]
        for run in content["runs"][:SHOWN_RUNS]
    ]
    return make_table(["run", "state", "step", "score", "training"], rows, "runs", text=2)


def facts(content: Content) -> Table:
    shown = content["facts"]
    given: Json = {
        "page written": content["written"],
        "first and last event": " to ".join(
            str(x)[:19] for x in (shown["first_event"], shown["last_event"]) if x
        ),
        "wall time from first to last event": _seconds(shown["wall_seconds"]),
        "training time of all runs": _seconds(shown["training_seconds"]),
        "CPU time of launches that ended in order": _seconds(shown["cpu_seconds"]),
        "launches": number(shown["launches"], 0),
        "canon_pretrain": ", ".join(
            shown["canon_pretrain"] + [x[:12] for x in shown["git_commit"]]
        ),
        **{name: ", ".join(shown[name]) for name in VERSIONS},
    }
    rows: list[list[Cell]] = [[name, str(value) or MISSING] for name, value in given.items()]
    return make_table(["", ""], rows, text=2)


def _seconds(value: float | None) -> str:
    return MISSING if value is None else duration(value)
