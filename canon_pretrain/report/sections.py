"""The sections of a report as blocks, which the page and the Markdown show alike.

A block is JSON for templates/report.html and report.md.jinja: a section, text, card, table, legend
or plots. The Markdown skips what it cannot show. Numbers are rounded here and nowhere else.
"""

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from canon_pretrain.report import drawing
from canon_pretrain.report.verdicts import BETTER, UNINFORMATIVE, VERDICTS, WITHIN, WORSE
from canon_pretrain.run.results import VALIDATION, bound_words

MAX_ROWS = 1000
"""Browsers lay out longer tables slowly."""
SHORT_COLUMNS = 9
"""Columns after the verdict that the table of differences shows at once, or has at all if long."""
MAX_NAMED = 6
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
    "As in the paper: the best run of each architecture, over learning rates and seeds, task by "
    "task. The best of N equally good runs is too good by 0.56 sigma of the seed noise for N = 2, "
    "0.85 for 3, 1.03 for 4, as said in small print. No verdict rests on this table."
)

Block = dict[str, Any]
Content = Mapping[str, Any]
Cell = str | dict[str, str]


class Column(NamedTuple):
    """`look`: num, and more for a column that is shown when asked for; empty for text."""

    text: str
    look: str = "num"
    small: str = ""


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
    items = "" if count is None else f"n = {count:,}"
    if isinstance(value, str):
        return figure(value), "", items
    if cell["bound"] is not None:
        return figure(value), bound_words(value, cell["bound"]), items
    decimals = 4 if abs(value) < 100 else 2
    error = number(stderr, decimals) if isinstance(stderr, float | int) else stderr
    return figure(value), "" if stderr is None else f"± {error}", items


def cut(limit: int | None) -> str:
    """Return the mark of an evaluation that was cut short; empty for a whole one."""
    return "" if limit is None else f"first {limit:,} items only: not a result"


def other_step(step: int | None, suite_step: int | None) -> str:
    """Return the step of a score that is not at the step of its table; else empty."""
    return "" if step is None or step == suite_step else f"step {step:,}"


def state_words(run: Content) -> str:
    total = run["total_steps"]
    words = {"stopped": "stopped on request", "unfinished": "not done"}
    of = f" of {total:,}" if isinstance(total, int) else ""
    why = f": {run['failure']}" if run["state"] == "failed" else ""
    return f"{words.get(run['state'], run['state'])} at step {run['step']:,}{of}{why}"


def failures(content: Content) -> list[str]:
    """Return a sentence for each run whose last launch failed."""
    failed = [run for run in content["runs"] if run["state"] == "failed"]
    return [f"{run['label']} {state_words(run)}" for run in failed]


def named(labels: Sequence[str]) -> str:
    """Return labels in a row; of many the first few and how many more."""
    more = f" and {len(labels) - MAX_NAMED} more" if len(labels) > MAX_NAMED else ""
    return ", ".join(labels[:MAX_NAMED]) + more


def tallies(content: Content) -> dict[str, dict[str, list[Content]]]:
    """Return architecture -> verdict -> rows; held-out loss is the headline's."""
    found: dict[str, dict[str, list[Content]]] = {}
    for pair in content["comparison"]["pairs"]:
        if pair["suite"] != VALIDATION:
            empty: dict[str, list[Content]] = {verdict: [] for verdict in VERDICTS}
            found.setdefault(pair["architecture"], empty)[pair["verdict"]].append(pair)
    return found


def _joined(*parts: object) -> str:
    return ", ".join(str(part) for part in parts if part not in (None, ""))


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


def _cell(text: str, small: str = "", *, error: str = "", chip: str = "") -> Cell:
    """`error` is beside the text, `small` below it."""
    return {"text": text, "small": small, "error": error, "chip": chip}


def _table(
    columns: Sequence[Column],
    rows: Sequence[Sequence[Cell]],
    name: str = "",
    *,
    filters: Sequence[Mapping[str, str]] = (),
    more: str = "",
) -> Block:
    """A table; with a `name` it is sorted by a click. `filters`: of each row the data to filter by.

    `more`: what shows the columns that look like that.
    """
    assert all(len(row) == len(columns) for row in rows)
    options = {key: sorted({row[key] for row in filters}) for key in (filters or [{}])[0]}
    data = filters or [{}] * len(rows)
    table = {"kind": "table", "id": name, "columns": columns, "options": options, "more": more}
    return {**table, "rows": list(zip(rows, data, strict=True))}


# -- sections -------------------------------------------------------------------------------------


def report_blocks(content: Content) -> list[Block]:
    """The report: verdicts first if there are several runs, else the run."""
    blocks = _text("warning", *failures(content))
    blocks += _text("headline", *content["comparison"]["held_out"])
    if content["held_out"]:
        blocks.append(_held_out(content))
    scores = [_scores(content)] if content["comparison"]["scores"] else []
    if len(content["runs"]) == 1:
        return [*blocks, *_runs(content), *scores, *_figures(content)]
    return [*blocks, _verdicts(content), *scores, *_figures(content), *_runs(content)]


def _held_out(content: Content) -> Block:
    held_out = content["held_out"]
    columns = [Column(f"nats per token, from {held_out['source']}", "")]
    columns += map(Column, ("last step", "loss", "seeds"))
    rows = [
        [
            line["label"],
            number(line["steps"][-1], 0),
            number(line["values"][-1]),
            f"{number(line['low'][-1])} to {number(line['high'][-1])} ({line['n'][-1]})",
        ]
        for line in held_out["lines"]
    ]
    labels = drawing.entries(content)
    plots = _plots(("", "", drawing.held_out(held_out, labels)), small=False)
    card = _card("", *_legend("entry", labels), *plots, _table(columns, rows))
    return _section("held-out", "Held-out loss", card)


def _verdicts(content: Content) -> Block:
    comparison = content["comparison"]
    pairs, refused = comparison["pairs"], comparison["refused"]
    tests = ", ".join(f"{suite} {count} tests" for suite, count in comparison["family"].items())
    how = (
        f"{tests or 'No test could be made'}. A suite is a family: the chance of one wrong verdict "
        f"or more in it is at most {100 * comparison['alpha']:g} % (Holm; half of it is that of "
        "the mean of its tasks). What is not called better or worse is within noise, however large "
        "it looks. The 95 % confidence interval is after Holm, too: it excludes 0 exactly if p is "
        "at most 0.05."
    )
    noises: dict[str, dict[str, None]] = {}
    for pair in pairs:
        if pair["p"] is not None:
            noises.setdefault(pair["seed_noise"]["source"], {})[pair["task"]] = None
    noise = [f"Seed noise of {named([*tasks])}: {source}." for source, tasks in noises.items()]
    notes = _text("note", how, *noise, *comparison["notes"])
    blocks = _text("warning", *content["warnings"])
    blocks.append(_card("How this is judged, and what is left out", *notes, folded=True))
    rows = []
    for label, tally in tallies(content).items():
        cells: list[Cell] = [_cell(label, f"against {comparison['baseline']}")]
        for verdict, found in tally.items():
            clearest = sorted(found, key=lambda x: (not x["mean_of"], x["p_holm"] or 0))
            real = [f"{x['task']} {signed(x['difference'])}" for x in clearest]
            cells.append(_cell(str(len(found)), named(real) if verdict in (BETTER, WORSE) else ""))
        rows.append([*cells, _detectable(tally[WITHIN])])
    columns = [Column("architecture", ""), *map(Column, VERDICTS), Column("could have shown")]
    blocks += [_card("", _table(columns, rows, "tally"))] if rows else []
    reasons = [(x, x["why"]) for x in (*pairs, *refused) if x["why"]]
    reasons += [(x, f"asked differently: {what}") for x in pairs for what in x["asked_differently"]]
    rows = [
        [x["architecture"], _joined(x["suite"], x["task"], x["metric"]), why]
        for x, why in reasons[:MAX_ROWS]
    ]
    if rows:
        columns = [Column(name, "") for name in ("architecture", "task", "why")]
        title = "What has no verdict, or was asked differently"
        blocks.append(_card(title, _table(columns, rows, "reasons"), folded=True))
    return _section("verdicts", "Which differences are real", *blocks, *_pairs(comparison))


def _detectable(within: Sequence[Content]) -> str:
    # a perplexity has another scale
    rows = [x for x in within if x["log_difference"] is None and x["detectable"] is not None]
    known = [x["detectable"] for x in rows]
    ends = figure(min(known, default=None)), figure(max(known, default=None))
    return f"{ends[0]} to {ends[1]}, median {figure(statistics.median(known))}" if known else NONE


PAIR_COLUMNS: tuple[tuple[str, Callable[[Content], str]], ...] = (
    ("difference", lambda pair: signed(pair["difference"])),
    ("95 % CI (Holm)", lambda pair: interval(pair["ci"])),
    ("p (Holm)", lambda pair: p_value(pair["p_holm"])),
    ("value", lambda pair: figure(pair["value"])),
    ("baseline", lambda pair: figure(pair["baseline_value"])),
    ("could have shown", lambda pair: figure(pair["detectable"])),
    ("seeds needed", lambda pair: number(pair["seeds_needed"], 0)),
    ("items", lambda pair: number(pair["num_items"], 0)),
    ("suite", lambda pair: pair["suite"]),
    ("p alone", lambda pair: p_value(pair["p"])),
    ("standard error", lambda pair: figure(pair["stderr"])),
    ("of items", lambda pair: figure(pair["stderr_items"])),
    ("of seeds", lambda pair: figure(pair["stderr_seeds"])),
    ("seed σ", lambda pair: _seed_sigma(pair["seed_noise"])),
    ("CI alone, of these runs’ items only", lambda pair: interval(pair["items_ci"])),
    ("McNemar", lambda pair: _mcnemar(pair["mcnemar"])),
    ("sources", lambda pair: number(pair["num_clusters"], 0)),
    ("runs", lambda pair: " : ".join(map(str, pair["num_runs"]))),
    ("chance", lambda pair: number(pair["chance"], 3)),
    ("step", lambda pair: number(pair["step"], 0)),
)


def _seed_sigma(noise: Content | None) -> str:
    of = "of the log" if noise and noise["scale"] == "log" else ""
    return _joined(figure(noise["sigma"]), of, noise["source"]) if noise else NONE


def _mcnemar(test: Content | None) -> str:
    return NONE if test is None else f"{test['only_a']} : {test['only_b']}, p {p_value(test['p'])}"


def _pairs(comparison: Content) -> list[Block]:
    pairs = comparison["pairs"]
    short = len(pairs) > MAX_ROWS
    shown = PAIR_COLUMNS[: SHORT_COLUMNS if short else None]
    columns = [Column(name, "") for name in ("task", "architecture", "verdict")]
    columns += [
        Column(name, "num" if k < SHORT_COLUMNS else "num more")
        for k, (name, _) in enumerate(shown)
    ]
    rows: list[list[Cell]] = []
    for pair in pairs:
        verdict = pair["verdict"]
        level = f"both at {pair['uninformative']}" if verdict == UNINFORMATIVE else ""
        small = _joined(pair["metric"], other_step(pair["step"], pair["suite_step"]))
        first = [_cell(pair["task"], small), pair["architecture"]]
        rows.append([*first, _cell(verdict, level, chip=verdict), *(x(pair) for _, x in shown)])
    note = (
        f"A difference is the architecture minus {comparison['baseline']}. “Could have shown”: the "
        "smallest difference that these items and seeds show with "
        f"{100 * comparison['power']:g} % probability among the tests of its suite. “Seeds needed”:"
        " of each architecture, to show a difference within noise that is as large as the one "
        f"seen; {NONE} if it was shown already, or takes more than 1,024."
    )
    note += " So many rows: what each is judged by is in report.json." * short
    filters = [{name: x[name] for name in ("suite", "verdict", "architecture")} for x in pairs]
    more = "" if short else "how it was judged"
    table = _table(columns, rows, "pairs", filters=filters, more=more)
    return [_card("Every difference", table, *_text("note", note))] if pairs else []


def _scores(content: Content) -> Block:
    comparison, runs = content["comparison"], [run["label"] for run in content["runs"]]
    labels = [each["label"] for each in comparison["architectures"]]
    anchors = content["anchors"] or {"models": [], "rows": [], "source": ""}
    published = {(row["task"], row["metric"]): row["values"] for row in anchors["rows"]}
    beside = [Column(model, "num more", "published") for model in anchors["models"]]
    nothing = [None] * len(beside)

    def card(
        title: str, about: str, names: Sequence[str], rows: Sequence[tuple[Content, list[Cell]]]
    ) -> Block:
        cells = [
            [_cell(row["task"], row["metric"]), *shown]
            + [figure(x) for x in published.get((row["task"], row["metric"]), nothing)]
            for row, shown in rows
        ]
        columns = [Column("task", ""), *map(Column, names), *beside]
        more = "published scores beside them" if beside else ""
        table = _table(columns, cells, title.split()[0].lower(), more=more)
        folded = title != CHOSEN or None
        return _card(title, *_text("note", about), table, folded=folded)

    blocks = [_architectures(comparison), *_text("note", anchors["source"])]
    for kind, title, about in (("chosen", CHOSEN, CHOSEN_BY), ("best", BEST, BEST_OF)):
        rows = []
        for row in comparison["scores"]:
            cells = {cell["architecture"]: cell for cell in row["cells"] if cell[kind]}
            rows.append((row, [_score_cell(row, cells.get(label), kind) for label in labels]))
        blocks += [card(title, about, labels, rows)] if kind == "chosen" or len(runs) > 1 else []
    primary: list[tuple[Content, list[Cell]]] = []
    for suite in content["suites"]:
        at = [column["run"] for column in suite["columns"]]
        for row in suite["rows"]:
            cells = dict(zip(at, row["cells"], strict=True))
            if row["primary"] and suite["suite"] != VALIDATION:
                primary.append((row, [score(cells.get(run))[0] for run in runs]))
    if len(runs) > len(labels):
        about = "Each task’s primary metric; the suites’ own tables have the rest, with errors."
        blocks.append(card("Every run", about, runs, primary))
    return _section("tables", "Scores by architecture", *blocks)


def _score_cell(row: Content, cell: Content | None, kind: str) -> Cell:
    if cell is None:
        return NONE
    shown = cell[kind]
    count, at = shown["num_runs"], other_step(cell["step"], row["suite_step"])
    if kind == "chosen":
        error = "" if shown["stderr"] is None else f"± {figure(shown['stderr'])}"
        return _cell(figure(shown["value"]), _joined(error, f"{count} run(s)", at))
    bias = f"about {figure(shown['bias'])} too good" if shown["bias"] and count > 1 else ""
    return _cell(figure(shown["value"]), _joined(f"best of {count}", bias, at))


def _architectures(comparison: Content) -> Block:
    names = ("architecture", "settings", "learning rate", "runs", "validation loss", "chosen")
    rows = []
    for each in comparison["architectures"]:
        settings = each["settings"].items()
        differs = _joined(*(f"{x.removeprefix('model.')} {y or 'none'}" for x, y in settings))
        at = "" if each["step"] is None else f"step {each['step']:,}"
        is_chosen = any(recipe["chosen"] for recipe in each["recipes"])
        for recipe in each["recipes"]:
            why = each["choice"] if recipe["chosen"] or not is_chosen else ""
            rate, runs = str(recipe["learning_rate"]), str(len(recipe["runs"]))
            rows.append(
                [each["label"], differs, rate, runs, _cell(number(recipe["loss"]), at), why]
            )
    columns = [Column(name, "num" if k in (2, 3, 4) else "") for k, name in enumerate(names)]
    title = "The architectures, and which learning rate stands for each"
    return _card(title, _table(columns, rows, "architectures"), folded=len(rows) > 6)


def _figures(content: Content) -> list[Block]:
    sections = []
    labels = [run["label"] for run in content["runs"]]
    if curves := content["score_curves"]:
        about = "A bar, where there are few runs, is one standard error over the items."
        blocks = [*_legend("run", labels), *_text("note", about)]
        for suite in dict.fromkeys(curve["suite"] for curve in curves):
            drawn = [
                (curve["task"], curve["metric"], drawing.over_training(curve, labels))
                for curve in curves
                if curve["suite"] == suite
            ]
            blocks.append(_card(suite, *_plots(*drawn), folded=len(curves) > 3))
        sections.append(_section("over-steps", "Scores over training", *blocks))
    if content["lengths"]:
        entries = drawing.entries(content)
        about = (
            "A point is the mean over the runs of an architecture (those of its chosen learning "
            "rate, else all); a bar is their lowest and highest. Lengths are evenly spaced."
        )
        blocks = [*_legend("entry", entries), *_text("note", about)]
        for shown in content["lengths"]:
            drawn, tables = [], []
            for panel in shown["panels"]:
                name, metric, chance = panel["series"], panel["metric"], panel["chance"]
                drawn.append((name, metric, drawing.over_length(panel, shown["unit"], entries)))
                guess = "" if chance is None else f"chance {number(chance, 3)}"
                columns = [Column(_joined(f"{name} {metric}", guess), "")]
                columns += [Column(number(length, 0)) for length in panel["lengths"]]
                rows = [
                    [_cell(line["label"], other_step(line["step"], None))]
                    + [number(value) for value in line["values"]]
                    for line in panel["lines"]
                ]
                tables.append(_table(columns, rows))
            limited = [f"{x}: first items only: not a result." for x in shown["limited"]]
            inside = [*_text("warning", *limited), *_plots(*drawn), *tables]
            over = f"over {shown['unit']}"
            blocks.append(_card(shown["title"], *inside, small=over, folded=True))
        sections.append(_section("over-length", "Accuracy over length", *blocks))
    return sections


def _runs(content: Content) -> list[Block]:
    runs, labels = content["runs"], [run["label"] for run in content["runs"]]
    several = len(runs) > 1
    rows: list[list[Cell]] = [
        ["state", *map(state_words, runs)],
        ["tokens", *(number(run["tokens"], 0) for run in runs)],
        ["resumed at", *(_value([x["from_step"] for x in run["restarts"]]) for run in runs)],
    ]
    rows += [[name, *(_value(run["facts"][name]) for run in runs)] for name in runs[0]["facts"]]
    columns = [Column("", ""), *(Column(label, "") for label in labels)]
    blocks = [_card("Facts", _table(columns, rows), folded=several or None)]
    # of one run all settings
    settings = content["differing_settings"]
    rows = [[x["setting"], *map(_value, x["values"])] for x in settings]
    columns = [Column("setting", ""), *columns[1:]]
    if rows:
        title = "Settings that differ" if several else "Settings"
        card = _card(title, _table(columns, rows, "settings"), folded=None if several else True)
        blocks.append(card)
    sections = [_section("runs", "Runs" if several else "Run", *blocks)]

    warnings = _text("warning", *content["warnings"])
    curves = [_curve(content, curve) for curve in content["curves"]]
    blocks = [*warnings, *_legend("run", labels), *curves]
    sections.append(_section("curves", "Training curves", *blocks))

    left = "no evaluation results yet; python -m eval run writes them"
    blocks = _text("note", *(f"{x}: {left}." for x in content["without_evaluations"]))
    blocks += _text("note", READING) if content["suites"] else []
    blocks += [_suite(suite, k, several=several) for k, suite in enumerate(content["suites"])]
    return [*sections, _section("evaluations", "Evaluations", *blocks)]


def _value(value: Any) -> str:
    """A fact or setting; lists in a row, and fingerprints cut."""
    if isinstance(value, list):
        return ", ".join(map(_value, value)) or NONE
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    text = NONE if value in (None, "") else str(value)
    return text[:12] + "…" if len(text) == 64 else text


def _curve(content: Content, curve: Content) -> Block:
    labels = [run["label"] for run in content["runs"]]
    field, late = curve["field"], content["late_loss"]
    restarts = [run["restarts"] for run in content["runs"] if field == "tokens_per_second"]
    blocks = _text("note", f"Over tokens trained; {curve['about']}.")
    blocks += _plots(("", "", drawing.training(curve, labels, restarts)), small=False)
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
    notes = []
    for line in curve["lines"]:
        figures, logged, drawn = line["figures"], line["logged"], len(line["values"])
        cells: list[Cell] = [NONE] * 4
        if figures:
            ends = [figures[name] for name in ("last", "lowest", "highest")]
            form = curve["decimals"]
            cells = [_cell(number(x["value"], form), f"step {x['step']:,}") for x in ends]
            cells.append(number(figures["median"], form))
        rows.append([line["run"], *cells])
        if line["not_finite"]:
            notes.append(
                f"{line['run']}: {line['not_finite']:,} of {logged:,} logged values are missing or "
                f"not finite (the first at step {line['first_not_finite_step']:,})."
            )
        if drawn < logged:
            notes.append(f"{line['run']}: {drawn:,} of {logged:,} logged points are drawn.")
    columns = [Column("run", ""), *map(Column, ("last", "lowest", "highest", "median"))]
    blocks += [_table(columns, rows), *_text("note", *notes)]
    folded = (len(labels) > 1 and field != "loss") or None
    return _card(curve["title"], *blocks, small=curve["unit"], folded=folded)


def _suite(suite: Content, place: int, *, several: bool) -> Block:
    columns, suite_step = [Column("task", "")], suite["suite_step"]
    for each in suite["columns"]:
        columns.append(
            Column(each["run"], "num", _joined(f"step {each['step']:,}", cut(each["limit"])))
        )
    rows: list[list[Cell]] = []
    for row in suite["rows"]:
        cells: list[Cell] = [_cell(row["task"], row["metric"])]
        for scored, at in zip(row["cells"], suite["columns"], strict=True):
            value, error, items = score(scored)
            small = _joined(items, other_step(at["step"], suite_step) if scored else "")
            cells.append(_cell(value, small, error=error))
        rows.append(cells)
    table = _table(columns, rows, f"suite-{place}")
    small = f"step {suite_step:,}, {len(rows)} scores per run"
    warnings = _text("warning", *suite["warnings"])
    return _card(suite["suite"], *warnings, table, small=small, folded=several or None)
