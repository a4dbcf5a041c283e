"""The sections of a report as blocks, which the page and the Markdown show alike.

A block is JSON for templates/report.html and report.md.jinja: a section, text, card, table, legend
or plots. The Markdown skips what it cannot show. Numbers are rounded here and nowhere else.
"""

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from canon_pretrain.report import drawing
from canon_pretrain.report.verdicts import BETTER, UNINFORMATIVE, VERDICTS, WITHIN, WORSE
from canon_pretrain.run.results import VALIDATION, bound_words

MAX_ROWS = 1000
"""Browsers lay out longer tables slowly."""
SHORT_COLUMNS = 12
"""Columns that the table of differences shows at once, or has at all if long."""
NONE = "–"

READING = (
    "± is one standard error over the sources of a task’s items (n). If all items are wrong or all "
    "are right, ≤ or ≥ is the other end of Wilson’s 95 % interval. The standard error does not "
    "include training seeds: no table of a suite says that one run is better; “Which differences "
    "are real” does, with both counted in."
)
CHOSEN = "Chosen learning rates: one an architecture, by validation loss"
CHOSEN_BY = "No score had a part in the choice. ± is the standard error over items and seeds."
BEST = "Best of learning rates, as in the paper"
BEST_OF = (
    "The best run of each architecture, over learning rates and seeds, task by task: too good by "
    "what the small print says. No verdict rests on this table."
)

Block = dict[str, Any]
Content = Mapping[str, Any]
Cell = str | dict[str, str]


# -- figures in words -----------------------------------------------------------------------------


def number(value: float | None, decimals: int = 4) -> str:
    return NONE if value is None else f"{value:,.{decimals}f}"


def figure(value: float | str | None) -> str:
    """Return a score: 4 decimals, 2 from 100 on; a value that is not finite is named."""
    if isinstance(value, str):
        return f"not finite ({value})"
    return number(value, 4 if value is None or abs(value) < 100 else 2)


def signed(value: float | None) -> str:
    if value is None:
        return NONE
    return f"{value:+,.{4 if abs(value) < 100 else 2}f}".replace("-", "−")


def interval(bounds: Sequence[float] | None) -> str:
    return NONE if bounds is None else f"{signed(bounds[0])} to {signed(bounds[1])}"


def p_value(value: float | None) -> str:
    return NONE if value is None else "< 0.0001" if value < 1e-4 else f"{value:.4f}"


def score(cell: Content | None) -> tuple[str, str, str]:
    """Return value, ± standard error or Wilson bound, and n = items; empty if unknown."""
    if cell is None:
        return NONE, "", ""
    value, stderr, count = cell["value"], cell["stderr"], cell["num_samples"]
    error = ""
    if cell["bound"] is not None:
        error = bound_words(value, cell["bound"])
    elif stderr is not None and not isinstance(value, str):
        is_known = isinstance(stderr, float | int)
        error = f"± {number(stderr, 4 if abs(value) < 100 else 2) if is_known else stderr}"
    return figure(value), error, "" if count is None else f"n = {count:,}"


def state_words(run: Content) -> str:
    words = {"stopped": "stopped on request", "unfinished": "not done"}
    of = "" if run["total_steps"] is None else f" of {run['total_steps']:,}"
    why = f": {run['failure']}" if run["state"] == "failed" else ""
    return f"{words.get(run['state'], run['state'])} at step {run['step']:,}{of}{why}"


def failures(content: Content) -> list[str]:
    """Return a sentence for each run whose last launch failed."""
    failed = [run for run in content["runs"] if run["state"] == "failed"]
    return [f"{run['label']} {state_words(run)}" for run in failed]


def tallies(content: Content) -> dict[str, dict[str, list[Content]]]:
    """Return architecture -> verdict -> rows; held-out loss is the headline's."""
    found: dict[str, dict[str, list[Content]]] = {}
    for pair in content["comparison"]["pairs"]:
        if pair["suite"] != VALIDATION:
            empty: dict[str, list[Content]] = {verdict: [] for verdict in VERDICTS}
            found.setdefault(pair["architecture"], empty)[pair["verdict"]].append(pair)
    return found


def by_run(suite: Content, row: Content) -> dict[str, Content | None]:
    """Return the cells of a suite's row by the run's label."""
    return {x["run"]: cell for x, cell in zip(suite["columns"], row["cells"], strict=True)}


def _other_step(step: int | None, suite_step: int | None) -> str:
    """The step of a score that is not at the step of its table."""
    return "" if step is None or step == suite_step else f"step {step:,}"


def _joined(*parts: object) -> str:
    return ", ".join(str(part) for part in parts if part not in (None, ""))


def _value(value: Any) -> str:
    """A fact or setting; lists in a row, and fingerprints cut."""
    if isinstance(value, list):
        return ", ".join(map(_value, value)) or NONE
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    text = NONE if value in (None, "") else str(value)
    return text[:12] + "…" if len(text) == 64 else text


# -- blocks ---------------------------------------------------------------------------------------


def _text(look: str, *sentences: str) -> list[Block]:
    return [{"kind": "text", "look": look, "words": sentence} for sentence in sentences if sentence]


def _section(name: str, title: str, *blocks: Block) -> Block:
    return {"kind": "section", "id": name, "title": title, "blocks": blocks}


def _card(title: str, *blocks: Block, small: str = "", folded: bool | None = None) -> Block:
    """`folded` or not if it can be opened and closed."""
    return {"kind": "card", "title": title, "small": small, "folded": folded, "blocks": blocks}


def _plots(*plots: tuple[str, str, drawing.Figure | None], small: bool = True) -> list[Block]:
    shown = [plot for plot in plots if plot[2] is not None]
    return [{"kind": "plots", "plots": shown, "small": small}] * bool(shown)


def _legend(of: str, labels: Sequence[str]) -> list[Block]:
    return [{"kind": "legend", "of": of, "labels": labels}] * (len(labels) > 1)


def _cell(text: str, *small: object, error: str = "", chip: str = "") -> Cell:
    """`error` is beside the text, `small` below it."""
    return {"text": text, "small": _joined(*small), "error": error, "chip": chip}


def _table(
    columns: Sequence[str | tuple[str, str]],
    rows: Sequence[Sequence[Cell]],
    name: str = "",
    *,
    text: int = 1,
    shown: int | None = None,
    more: str = "",
    filters: Sequence[Mapping[str, str]] = (),
) -> Block:
    """A table of (name, small print) columns; with a `name` it is sorted by a click.

    The first `text` columns are words, the others numbers; those after the first `shown` are there
    when asked for by `more`. `filters`: of each row the data to filter by.
    """
    heads = []
    for k, column in enumerate(columns):
        words, small = (column, "") if isinstance(column, str) else column
        look = "" if k < text else "num" if shown is None or k < shown else "num more"
        heads.append({"text": words, "small": small, "look": look})
    options = {key: sorted({row[key] for row in filters}) for key in (filters or [{}])[0]}
    pairs = list(zip(rows, filters or [{}] * len(rows), strict=True))
    table = {"kind": "table", "id": name, "columns": heads, "rows": pairs}
    return {**table, "options": options, "more": more}


# -- sections -------------------------------------------------------------------------------------


def report_blocks(content: Content) -> list[Block]:
    """The report: verdicts first if there are several runs, else the run."""
    first = _text("warning", *failures(content))
    first += _text("headline", *content["comparison"]["held_out"])
    first += _held_out(content) if content["held_out"] else []
    middle = _scores(content) if content["comparison"]["scores"] else []
    middle += _figures(content)
    if len(content["runs"]) == 1:
        return [*first, *_runs(content), *middle]
    return [*first, _verdicts(content), *middle, *_runs(content)]


def _held_out(content: Content) -> list[Block]:
    held_out, labels = content["held_out"], drawing.entries(content)
    rows = []
    for line in held_out["lines"]:
        step, value, low, high, n = (line[x][-1] for x in ("steps", "values", "low", "high", "n"))
        seeds = f"{number(low)} to {number(high)} ({n})"
        rows.append([line["label"], number(step, 0), number(value), seeds])
    columns = [f"nats per token, from {held_out['source']}", "last step", "loss", "seeds"]
    places = [line["tokens"] for line in held_out["lines"]]
    drawn = drawing.by_architecture(held_out["lines"], places, labels, "tokens")
    plots = _plots(("", "", drawn), small=False)
    card = _card("", *_legend("entry", labels), *plots, _table(columns, rows))
    return [_section("held-out", "Held-out loss", card)]


def _verdicts(content: Content) -> Block:
    comparison = content["comparison"]
    pairs, refused = comparison["pairs"], comparison["refused"]
    tests = ", ".join(f"{suite} {count} tests" for suite, count in comparison["family"].items())
    how = (
        f"{tests or 'No test could be made'}. A suite is a family: the chance of one wrong verdict "
        f"or more in it is at most {100 * comparison['alpha']:g} % (Holm; half of it is that of "
        "the mean of its tasks). What is not called better or worse is within noise, however large "
        "it looks. Intervals are after Holm, too."
    )
    noises: dict[str, dict[str, None]] = {}
    for pair in pairs:
        if pair["p"] is not None:
            noises.setdefault(pair["seed_noise"]["source"], {})[pair["task"]] = None
    noise = [f"Seed noise of {_joined(*tasks)}: {source}." for source, tasks in noises.items()]
    notes = _text("note", how, *noise, *comparison["notes"])
    blocks = _text("warning", *content["warnings"])
    blocks.append(_card("How this is judged, and what is left out", *notes, folded=True))
    rows: list[list[Cell]] = []
    for label, tally in tallies(content).items():
        cells = [_cell(label, f"against {comparison['baseline']}")]
        for verdict, found in tally.items():
            clearest = sorted(found, key=lambda x: (not x["mean_of"], x["p_holm"] or 0))
            real = [f"{x['task']} {signed(x['difference'])}" for x in clearest]
            cells.append(_cell(str(len(found)), *(real if verdict in (BETTER, WORSE) else ())))
        # a perplexity has another scale
        within = [x["detectable"] for x in tally[WITHIN] if x["log_difference"] is None]
        known = sorted(x for x in within if x is not None)
        median = figure(statistics.median(known)) if known else NONE
        ends = f"{figure(known[0])} to {figure(known[-1])}, median {median}" if known else NONE
        rows.append([*cells, ends])
    columns = ["architecture", *VERDICTS, "could have shown"]
    blocks += [_card("", _table(columns, rows, "tally"))] if rows else []
    rows = [
        [x["architecture"], _joined(x["suite"], x["task"], x["metric"]), why]
        for x in (*pairs, *refused)
        for why in (x["why"], *(f"asked differently: {y}" for y in x.get("asked_differently", ())))
        if why
    ][:MAX_ROWS]
    if rows:
        table = _table(["architecture", "task", "why"], rows, "reasons", text=3)
        title = "What has no verdict, or was asked differently"
        blocks.append(_card(title, table, folded=True))
    blocks += [_pairs(comparison)] if pairs else []
    return _section("verdicts", "Which differences are real", *blocks)


PAIR_COLUMNS: dict[str, Callable[[Content], Cell]] = {
    "task": lambda x: _cell(x["task"], x["metric"], _other_step(x["step"], x["suite_step"])),
    "architecture": lambda x: x["architecture"],
    "verdict": lambda x: _cell(
        x["verdict"],
        f"both at {x['uninformative']}" if x["verdict"] == UNINFORMATIVE else "",
        chip=x["verdict"],
    ),
    "difference": lambda x: signed(x["difference"]),
    "95 % CI (Holm)": lambda x: interval(x["ci"]),
    "p (Holm)": lambda x: p_value(x["p_holm"]),
    "value": lambda x: figure(x["value"]),
    "baseline": lambda x: figure(x["baseline_value"]),
    "could have shown": lambda x: figure(x["detectable"]),
    "seeds needed": lambda x: number(x["seeds_needed"], 0),
    "items": lambda x: number(x["num_items"], 0),
    "suite": lambda x: x["suite"],
    "p alone": lambda x: p_value(x["p"]),
    "standard error": lambda x: figure(x["stderr"]),
    "of items": lambda x: figure(x["stderr_items"]),
    "of seeds": lambda x: figure(x["stderr_seeds"]),
    "seed σ": lambda x: _seed_sigma(x["seed_noise"]),
    "CI alone, of these runs’ items only": lambda x: interval(x["items_ci"]),
    "McNemar": lambda x: _mcnemar(x["mcnemar"]),
    "sources": lambda x: number(x["num_clusters"], 0),
    "runs": lambda x: " : ".join(map(str, x["num_runs"])),
    "chance": lambda x: number(x["chance"], 3),
    "step": lambda x: number(x["step"], 0),
}


def _seed_sigma(noise: Content | None) -> str:
    return f"{figure(noise['sigma'])} ({noise['scale']}), {noise['source']}" if noise else NONE


def _mcnemar(test: Content | None) -> str:
    return f"{test['only_a']} : {test['only_b']}, p {p_value(test['p'])}" if test else NONE


def _pairs(comparison: Content) -> Block:
    pairs = comparison["pairs"]
    short = len(pairs) > MAX_ROWS
    columns = [*PAIR_COLUMNS][: SHORT_COLUMNS if short else None]
    rows = [[PAIR_COLUMNS[name](pair) for name in columns] for pair in pairs]
    note = (
        f"A difference is the architecture minus {comparison['baseline']}. “Could have shown”: the "
        f"smallest that these items and seeds show with {100 * comparison['power']:g} % "
        "probability. “Seeds needed”: of each architecture, to show a difference as large as this."
    )
    note += " So many rows: what each is judged by is in report.json." * short
    filters = [{name: x[name] for name in ("suite", "verdict", "architecture")} for x in pairs]
    more = "" if short else "how it was judged"
    table = _table(columns, rows, "pairs", text=3, shown=SHORT_COLUMNS, more=more, filters=filters)
    return _card("Every difference", table, *_text("note", note))


def _scores(content: Content) -> list[Block]:
    comparison, runs = content["comparison"], [run["label"] for run in content["runs"]]
    labels = [each["label"] for each in comparison["architectures"]]
    anchors = content["anchors"] or {"models": [], "rows": [], "source": ""}
    published = {(row["task"], row["metric"]): row["values"] for row in anchors["rows"]}
    tables: list[tuple[str, str, list[str], list[Any]]] = []
    for kind, title, about in (("chosen", CHOSEN, CHOSEN_BY), ("best", BEST, BEST_OF)):
        rows = []
        for row in comparison["scores"]:
            cells = {cell["architecture"]: cell for cell in row["cells"] if cell[kind]}
            rows.append((row, [_score_cell(row, cells.get(label), kind) for label in labels]))
        tables += [(title, about, labels, rows)] if kind == "chosen" or len(runs) > 1 else []
    if len(runs) > len(labels):
        rows = [
            (row, [score(by_run(suite, row).get(run))[0] for run in runs])
            for suite in content["suites"]
            for row in suite["rows"]
            if row["primary"] and suite["suite"] != VALIDATION
        ]
        about = "Each task’s primary metric; the suites’ own tables have the rest, with errors."
        tables.append(("Every run", about, runs, rows))
    blocks = [_architectures(comparison), *_text("note", anchors["source"])]
    more = "published scores beside them" if anchors["models"] else ""
    beside, nothing = [(x, "published") for x in anchors["models"]], [None] * len(anchors["models"])
    for title, about, names, rows in tables:
        lines = [
            [_cell(row["task"], row["metric"]), *cells]
            + [figure(x) for x in published.get((row["task"], row["metric"]), nothing)]
            for row, cells in rows
        ]
        columns: list[str | tuple[str, str]] = ["task", *names, *beside]
        name = title.split()[0].lower()
        table = _table(columns, lines, name, shown=1 + len(names), more=more)
        folded = title != CHOSEN or None
        blocks.append(_card(title, *_text("note", about), table, folded=folded))
    return [_section("tables", "Scores by architecture", *blocks)]


def _score_cell(row: Content, cell: Content | None, kind: str) -> Cell:
    if cell is None:
        return NONE
    shown, at = cell[kind], _other_step(cell["step"], row["suite_step"])
    count = shown["num_runs"]
    if kind == "chosen":
        error = "" if shown["stderr"] is None else f"± {figure(shown['stderr'])}"
        return _cell(figure(shown["value"]), error, f"{count} run(s)", at)
    bias = f"about {figure(shown['bias'])} too good" if shown["bias"] and count > 1 else ""
    return _cell(figure(shown["value"]), f"best of {count}", bias, at)


def _architectures(comparison: Content) -> Block:
    rows: list[list[Cell]] = []
    for each in comparison["architectures"]:
        settings = each["settings"].items()
        differs = _joined(*(f"{x.removeprefix('model.')} {y or 'none'}" for x, y in settings))
        is_chosen = any(recipe["chosen"] for recipe in each["recipes"])
        for recipe in each["recipes"]:
            why = each["choice"] if recipe["chosen"] or not is_chosen else ""
            loss = _cell(number(recipe["loss"]), _other_step(each["step"], None))
            rate, runs = str(recipe["learning_rate"]), str(len(recipe["runs"]))
            rows.append([each["label"], differs, why, rate, runs, loss])
    columns = ["architecture", "settings", "chosen", "learning rate", "runs", "validation loss"]
    title = "The architectures, and which learning rate stands for each"
    return _card(title, _table(columns, rows, "architectures", text=3), folded=len(rows) > 6)


def _figures(content: Content) -> list[Block]:
    sections, labels = [], [run["label"] for run in content["runs"]]
    drawn: dict[str, list[Any]] = {}
    for curve in content["score_curves"]:
        plot = (curve["task"], curve["metric"], drawing.over_training(curve, labels))
        drawn.setdefault(curve["suite"], []).append(plot)
    if drawn:
        about = "A bar, where there are few runs, is one standard error over the items."
        cards = [_card(suite, *_plots(*plots), folded=True) for suite, plots in drawn.items()]
        blocks = [*_legend("run", labels), *_text("note", about), *cards]
        sections.append(_section("over-steps", "Scores over training", *blocks))
    if content["lengths"]:
        entries = drawing.entries(content)
        about = (
            "A point is the mean over the runs of an architecture (those of its chosen learning "
            "rate, else all); a bar is their lowest and highest. Lengths are evenly spaced."
        )
        blocks = [*_legend("entry", entries), *_text("note", about)]
        blocks += [_length(shown, entries) for shown in content["lengths"]]
        sections.append(_section("over-length", "Accuracy over length", *blocks))
    return sections


def _length(shown: Content, entries: Sequence[str]) -> Block:
    plots, tables = [], []
    for panel in shown["panels"]:
        name, metric, chance = panel["series"], panel["metric"], panel["chance"]
        plots.append((name, metric, drawing.over_length(panel, shown["unit"], entries)))
        guess = "" if chance is None else f"chance {number(chance, 3)}"
        lengths = [number(length, 0) for length in panel["lengths"]]
        rows = [
            [_cell(line["label"], _other_step(line["step"], None)), *map(number, line["values"])]
            for line in panel["lines"]
        ]
        tables.append(_table([_joined(f"{name} {metric}", guess), *lengths], rows))
    limited = [f"{x}: first items only: not a result." for x in shown["limited"]]
    blocks = [*_text("warning", *limited), *_plots(*plots), *tables]
    return _card(shown["title"], *blocks, small=f"over {shown['unit']}", folded=True)


def _runs(content: Content) -> list[Block]:
    runs, labels = content["runs"], [run["label"] for run in content["runs"]]
    several, words = len(runs) > 1, len(runs) + 1
    rows = [["state", *map(state_words, runs)]]
    rows.append(["tokens", *(_value(run["tokens"]) for run in runs)])
    rows.append(["resumed at", *(_value(run["restarts"]) for run in runs)])
    rows += [[name, *(_value(run["facts"][name]) for run in runs)] for name in runs[0]["facts"]]
    facts = _table(["", *labels], rows, text=words)
    blocks = [_card("Facts", facts, folded=several or None)]
    # of one run all settings
    rows = [[x["setting"], *map(_value, x["values"])] for x in content["differing_settings"]]
    if rows:
        title = "Settings that differ" if several else "Settings"
        table = _table(["setting", *labels], rows, "settings", text=words)
        blocks.append(_card(title, table, folded=None if several else True))
    curves = [_curve(content, curve) for curve in content["curves"]]
    left = "no evaluation results yet; python -m eval run writes them"
    notes = [f"{x}: {left}." for x in content["without_evaluations"]]
    notes += [READING] * bool(content["suites"])
    suites = [_suite(suite, k, several=several) for k, suite in enumerate(content["suites"])]
    warned = _text("warning", *content["warnings"])
    return [
        _section("runs", "Runs" if several else "Run", *blocks),
        _section("curves", "Training curves", *warned, *_legend("run", labels), *curves),
        _section("evaluations", "Evaluations", *_text("note", *notes), *suites),
    ]


def _curve(content: Content, curve: Content) -> Block:
    labels = [run["label"] for run in content["runs"]]
    field, late = curve["field"], content["late_loss"]
    blocks = _text("note", f"Over tokens trained; {curve['about']}.")
    blocks += _plots(("", "", drawing.training(curve, labels)), small=False)
    if field == "loss" and late:
        width = late["tokens"][1] - late["tokens"][0]
        title = f"Smoothed, less {content['comparison']['baseline']}"
        blocks += _plots(
            ("The last half, smoothed", "", drawing.late(late, "values", labels)),
            (title, "", drawing.late(late, "differences", labels)),
        )
        about = "a baseline is the mean of its runs: its own lines show the spread of seeds"
        blocks += _text("note", f"Each point is the mean over {width:,.0f} tokens; {about}.")
    rows: list[list[Cell]] = []
    notes, names = [], ("last", "lowest", "highest")
    for line in curve["lines"]:
        ends, logged, drawn = line["figures"], line["logged"], len(line["values"])
        cells: list[Cell] = [NONE] * 4
        if ends:
            values = [number(ends[x]["value"], curve["decimals"]) for x in names]
            cells = [
                _cell(v, f"step {ends[x]['step']:,}") for v, x in zip(values, names, strict=True)
            ]
            cells.append(number(ends["median"], curve["decimals"]))
        rows.append([line["run"], *cells])
        if line["not_finite"]:
            notes.append(
                f"{line['run']}: {line['not_finite']:,} of {logged:,} logged values are missing or "
                f"not finite (the first at step {line['first_not_finite_step']:,})."
            )
        if drawn < logged:
            notes.append(f"{line['run']}: {drawn:,} of {logged:,} logged points are drawn.")
    blocks += [_table(["run", *names, "median"], rows), *_text("note", *notes)]
    folded = (len(labels) > 1 and field != "loss") or None
    return _card(curve["title"], *blocks, small=curve["unit"], folded=folded)


def _suite(suite: Content, place: int, *, several: bool) -> Block:
    columns = []
    for each in suite["columns"]:
        cut = f"first {each['limit']:,} items only: not a result" if each["limit"] else ""
        columns.append((each["run"], _joined(f"step {each['step']:,}", cut)))
    rows: list[list[Cell]] = []
    for row in suite["rows"]:
        cells = [_cell(row["task"], row["metric"])]
        for scored, at in zip(row["cells"], suite["columns"], strict=True):
            value, error, items = score(scored)
            other = _other_step(at["step"], suite["suite_step"]) if scored else ""
            cells.append(_cell(value, items, other, error=error))
        rows.append(cells)
    table = _table(["task", *columns], rows, f"suite-{place}")
    small = f"step {suite['suite_step']:,}, {len(rows)} scores per run"
    warnings = _text("warning", *suite["warnings"])
    return _card(suite["suite"], *warnings, table, small=small, folded=several or None)
