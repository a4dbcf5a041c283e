"""The sections of a report as blocks, which the page and the Markdown show alike.

A block is JSON for templates/report.html and report.md.jinja: a section, text, table, plot, fold or
card. What only one of the two can show (plots, filters, columns on demand) the other skips.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from canon_pretrain.report import words
from canon_pretrain.report.words import figure, number, other_step, signed

MAX_ROWS = 1000
"""Of the page's tables of differences and of every step: browsers lay out more of them slowly."""
SHORT_COLUMNS = 9
"""Columns after the verdict of the table of differences if it has more than MAX_ROWS rows."""

Block = dict[str, Any]
Content = Mapping[str, Any]


def _text(look: str, *sentences: str) -> list[Block]:
    """Paragraphs that look like a warning, headline, note, about or reading."""
    return [{"kind": "text", "look": look, "words": sentence} for sentence in sentences if sentence]


def _bullets(sentences: Sequence[str]) -> list[Block]:
    return [{"kind": "bullets", "items": list(sentences)}] if sentences else []


def _section(name: str, title: str, *blocks: Block) -> Block:
    return {"kind": "section", "id": name, "title": title, "blocks": blocks}


def _card(title: str, *blocks: Block, small: str = "", look: str = "") -> Block:
    return {"kind": "card", "title": title, "small": small, "look": look, "blocks": blocks}


def _fold(title: str, *blocks: Block, small: str = "", is_open: bool = False) -> Block:
    look = {"title": title, "small": small, "is_open": is_open}
    return {"kind": "fold", **look, "blocks": blocks}


def _plot(label: str, **data: Any) -> Block:
    """A plot that the script draws by its `data-*` attribute, or by its id."""
    return {"kind": "plot", "label": label, "data": data}


def _minis(plots: Sequence[tuple[str, str, Block]], look: str = "") -> Block:
    """Small plots beside each other, with title and subtitle."""
    return {"kind": "minis", "plots": plots, "look": look}


def _legend(of: str, labels: Sequence[str], about: str) -> list[Block]:
    """Buttons that hide runs ("run") or architectures ("entry"); none for one line."""
    return [{"kind": "legend", "of": of, "labels": labels, "about": about}] * (len(labels) > 1)


def _column(text: str, small: str = "", *, rising: bool = False, look: str = "num") -> Block:
    return {"text": text, "small": small, "rising": rising, "look": look}


def _cell(text: str, small: str = "", more: str = "", **other: Any) -> Block:
    """`more` is beside the text, `small` below it; `chip` and `cut` say how the text looks."""
    cell = {"text": text, "small": small, "more": more, "look": "num", "chip": "", "title": ""}
    return {**cell, "difference": "", "cut": False, **other}


def _row(head: str, cells: Sequence[Block], small: str = "", **data: str) -> Block:
    return {"head": head, "small": small, "cells": cells, "data": data}


def _table(
    columns: Sequence[Block],
    rows: Sequence[Block],
    name: str = "",
    *,
    filters: str | None = None,
    boxes: Sequence[tuple[str, str]] = (),
    look: str = "",
) -> Block:
    """A table; with a `name` it is sorted by a click. `filters`: the rows' data to filter by.

    `boxes`: (class of columns, words) that a reader can show.
    """
    content = {"columns": columns, "rows": rows, "id": name, "look": look}
    return {"kind": "table", **content, "filters": filters, "boxes": boxes}


def report_blocks(content: Content) -> list[Block]:
    """The report: verdicts first if there are several runs, else the run."""
    comparison = content["comparison"]
    top = _text("warning", *words.failures(content)) + _text("headline", *comparison["held_out"])
    if content["held_out"]:
        top.append(_held_out(content))
    if len(content["runs"]) == 1:
        return [*top, *_runs(content), *_plots(content), *_published(content)]
    scores = [_scores(content)] if comparison["every_run"] else []
    return [*top, _verdicts(content), *scores, *_plots(content), *_runs(content)]


def _held_out(content: Content) -> Block:
    held_out = content["held_out"]
    head = f"nats per token, from {held_out['source']}"
    columns = [_column(head, look=""), *map(_column, ("last step", "loss", "seeds"))]
    rows = [
        _row(
            line["label"],
            [
                _cell(number(line["steps"][-1], 0)),
                _cell(number(line["values"][-1])),
                _cell(f"{number(line['low'][-1])} to {number(line['high'][-1])} ({line['n'][-1]})"),
            ],
        )
        for line in held_out["lines"]
    ]
    plot = _plot("Held-out loss over training tokens by architecture", held_out="")
    legend = _legend("entry", entries(content), "Architectures shown in this plot")
    card = _card("", *legend, plot, _table(columns, rows), look="curve")
    return _section("held-out", "Held-out loss", card)


def _verdicts(content: Content) -> Block:
    comparison, verdicts = content["comparison"], content["verdicts"]
    blocks = _text("warning", *content["warnings"], *words.caveats(verdicts))
    how = _text("note", *comparison["notes"])
    if comparison["pairs"]:
        noise = " ".join(words.noise_words(verdicts["seed_noise"]))
        how = _text("reading", f"{words.family(comparison)} {noise}") + how
    left = ", and what is left out" if comparison["notes"] else ""
    blocks += [_fold(f"How this is judged{left}", *how)] if how else []
    cards = []
    for summary in verdicts["architectures"]:
        items = [
            {"chip": pair["verdict"], "strong": pair["task"], "words": pair["metric"]}
            | {"figures": words.real(pair)}
            for pair in summary["real"]
        ]
        more = [f"{summary['more_real']} more in the table below"] * bool(summary["more_real"])
        body = _text("tally", words.tally(summary))
        body += [{"kind": "real", "items": items, "more": more}] if items else []
        body += _text("note", words.detectable(summary))
        small = f"against {summary['baseline']}"
        cards.append(_card(summary["architecture"], *body, small=small, look="verdicts"))
    blocks += [{"kind": "cards", "blocks": cards}]
    if refusals := words.refusals(verdicts):
        blocks.append(_fold("What has no verdict, and why", *_bullets(refusals)))
    if comparison["pairs"]:
        blocks.append(_pairs(comparison))
    return _section("verdicts", "Which differences are real", *blocks)


def _pairs(comparison: Content) -> Block:
    pairs, baseline = comparison["pairs"], comparison["baseline"]
    short, single = len(pairs) > MAX_ROWS, len(comparison["family"]["pairs"]) < 2
    value = pairs[0]["architecture"] if single else "value"
    shown = words.pair_columns(value, baseline)[: SHORT_COLUMNS if short else None]
    columns = [_column("task", look="")]
    columns += [] if single else [_column("architecture", look="")]
    columns += [_column("verdict", look="")]
    columns += [
        _column(name, rising=rising, look="num" if k < SHORT_COLUMNS else "num more")
        for k, (name, rising, _) in enumerate(shown)
    ]
    rows = []
    for pair in pairs:
        chip = {"chip": pair["verdict"], "difference": signed(pair["difference"]), "look": ""}
        cells = [] if single else [_cell(pair["architecture"], look="")]
        cells.append(_cell(words.verdict(pair), title="" if short else pair["words"], **chip))
        cells += [
            _cell(show(pair), look=column["look"])
            for (_, _, show), column in zip(shown, columns[-len(shown) :], strict=True)
        ]
        at = other_step(pair["step"], pair["suite_step"])
        small = ", ".join(filter(None, (pair["metric"], at)))
        data = {name: pair[name] for name in ("suite", "verdict", "architecture")}
        rows.append(_row(pair["task"], cells, small, **data))
    note = (
        f"A difference is {value if single else 'the architecture'} minus {baseline}. “Could have "
        "shown”: the smallest difference that these items and seeds show with "
        f"{100 * comparison['power']:g} % probability among the tests of its suite. “Seeds needed”:"
        " of each architecture, to show a difference within noise that is as large as the one "
        "seen; – if it was shown already, or takes more than 1,024."
    )
    note += " So many rows: what each is judged by is in report.json." * short
    boxes = [] if short else [("more", "how it was judged")]
    look = "pairs single" if single else "pairs"
    filters = "suite verdict architecture"
    table = _table(columns, rows, "pairs", filters=filters, boxes=boxes, look=look)
    return _card("Every difference", table, *_text("note", note), look="tabled")


def _scores(content: Content) -> Block:
    comparison, labels = content["comparison"], [run["label"] for run in content["runs"]]
    names = [each["label"] for each in comparison["architectures"]]
    anchors = content["anchors"] or {"models": [], "rows": [], "source": ""}
    published = {(row["task"], row["metric"]): row["values"] for row in anchors["rows"]}

    def table(
        name: str, rows: Sequence[Content], key: str, names: Sequence[str], note: Any
    ) -> list[Block]:
        columns = [_column("task", look=""), *map(_column, names)]
        columns += [_column(m, "published", look="num published") for m in anchors["models"]]
        found = []
        for row in rows:
            by_name = {cell[key]: cell for cell in row["cells"]}
            cells = [
                _cell(figure(cell["value"]), note(cell, row["suite_step"])) if cell else _cell("–")
                for cell in map(by_name.get, names)
            ]
            beside = published.get((row["task"], row["metric"]), [None] * len(anchors["models"]))
            cells += [_cell(figure(value), look="num published") for value in beside]
            found.append(_row(row["task"], cells, row["metric"], suite=row["suite"]))
        boxes = [("published", "published scores beside them")] * bool(published)
        made = _table(columns, found, name, filters="suite", boxes=boxes)
        return [made, *_text("note", anchors["source"])]

    blocks = [_architectures(comparison)]
    if comparison["chosen"]:
        about = "No score had a part in the choice. ± is the standard error over items and seeds."
        rows = table("chosen-table", comparison["chosen"], "architecture", names, words.chosen_note)
        title = "One learning rate an architecture, chosen on validation loss"
        blocks.append(_card(title, *_text("about", about), *rows, look="tabled"))
    if comparison["best_of"]:
        rows = table("best-table", comparison["best_of"], "architecture", names, words.best_note)
        about = comparison["best_of_words"]
        title = "Best of learning rates, as in the paper"
        blocks.append(_fold(title, *_text("about", about), *rows))
    primary = [row for row in comparison["every_run"] if row["primary"]]
    if primary and len(labels) > len(names):
        about = "Each task’s primary metric; the suites’ own tables have the others, with errors."

        def step_note(cell: Content, suite_step: int) -> str:
            return other_step(cell["step"], suite_step)

        rows = table("runs-table", primary, "run", labels, step_note)
        blocks.append(_fold("Every run", *_text("about", about), *rows))
    return _section("tables", "Scores by architecture", *blocks)


def _architectures(comparison: Content) -> Block:
    columns = [_column(name, look="") for name in ("architecture", "settings")]
    columns += [_column("runs"), _column("learning rates", look=""), _column("chosen", look="")]
    rows = []
    for each in comparison["architectures"]:
        chosen = each["chosen"] or {"loss": None, "step": None, "learning_rate": each["why_not"]}
        at = "" if chosen["step"] is None else f"step {chosen['step']:,}"
        cells = [
            _cell(words.settings(each), look=""),
            _cell(str(len(each["runs"]))),
            _cell(", ".join(map(str, each["learning_rates"])), look=""),
            _cell(str(chosen["learning_rate"]), look=""),
            _cell(number(chosen["loss"]), at),
        ]
        rows.append(_row(each["label"], cells))
    return _fold(
        "The architectures, and which learning rate stands for each",
        *_text("about", comparison["selection_words"]),
        _table([*columns, _column("validation loss")], rows, "architectures"),
        is_open=len(rows) < 7,
    )


def _published(content: Content) -> list[Block]:
    """Beside one run, whose report has no scores by architecture."""
    if not (anchors := content["anchors"]):
        return []
    columns = [_column("task", look=""), *map(_column, anchors["models"])]
    rows = [
        _row(row["task"], [_cell(figure(value)) for value in row["values"]], row["metric"])
        for row in anchors["rows"]
    ]
    fold = _fold("Scores of models of 1.3B parameters", _table(columns, rows))
    return [
        _section("published", "Published scores", *_text("note", anchors["source"]), fold),
    ]


def _plots(content: Content) -> list[Block]:
    sections = []
    labels = [run["label"] for run in content["runs"]]
    if curves := content["score_curves"]:
        blocks = _legend("run", labels, "Runs shown in these curves")
        about = "A bar, where there are few runs, is one standard error over the items."
        blocks += _text("about", about)
        for suite in dict.fromkeys(curve["suite"] for curve in curves):
            plots = [
                (x["task"], x["metric"], _plot(f"{x['task']} {x['metric']} over training", steps=k))
                for k, x in enumerate(curves)
                if x["suite"] == suite
            ]
            small = f"{len(plots)} plot{'s' if len(plots) > 1 else ''}"
            blocks.append(_fold(suite, _minis(plots), small=small, is_open=len(curves) <= 3))
        sections.append(_section("over-steps", "Scores over training", *blocks))
    blocks, place = _legend("entry", entries(content), "Architectures shown in these plots"), 0
    for drawn in content["lengths"]:
        plots, tables = [], []
        for panel in drawn["panels"]:
            name, metric = panel["series"], panel["metric"]
            plots.append((name, metric, _plot(f"{name} {metric} over length", length=place)))
            place += 1
            guess = "" if panel["chance"] is None else f", chance {number(panel['chance'], 3)}"
            columns = [_column(f"{name} {metric}{guess}", look="")]
            columns += [_column(number(length, 0)) for length in panel["lengths"]]
            rows = [
                _row(
                    line["label"],
                    [_cell(number(value)) for value in line["values"]],
                    f"step {line['step']:,}" if line["step"] else "",
                )
                for line in panel["lines"]
            ]
            tables.append(_table(columns, rows))
        cut = ", ".join(drawn["limited"])
        warning = _text("warning", f"{cut}: first items only: not a result." if cut else "")
        small = f"{len(plots)} plots and their values, over {drawn['unit']}"
        blocks.append(_fold(drawn["title"], *warning, _minis(plots), *tables, small=small))
    if content["lengths"]:
        note = (
            "A point is the mean over the runs of an architecture (those of its chosen learning "
            "rate, else all); a bar is their lowest and highest. Lengths are evenly spaced."
        )
        blocks += _text("note", note)
        sections.append(_section("over-length", "Accuracy over length", *blocks))
    return sections


def _runs(content: Content) -> list[Block]:
    runs, labels = content["runs"], [run["label"] for run in content["runs"]]
    several = len(runs) > 1
    cards: Block = {
        "kind": "runs",
        "runs": [
            {name: run[name] for name in ("label", "state", "description")}
            | {"facts": [*words.facts(run), ("Folder", run["folder"])]}
            for run in runs
        ],
    }
    states = ", ".join(dict.fromkeys(run["state"] for run in runs))
    blocks = [_fold(f"Facts of the {len(runs)} runs", cards, small=states) if several else cards]
    if content["differing_settings"]:
        columns = [_column("setting", look=""), *map(_column, labels)]
        rows = [
            _row(row["setting"], [_cell(words.setting(value)) for value in row["values"]])
            for row in content["differing_settings"]
        ]
        blocks.append(_card("Settings that differ", _table(columns, rows, "settings")))
    sections = [_section("runs", "Runs" if several else "Run", *blocks)]

    warnings = _text("warning", *content["warnings"])
    blocks = [*warnings, *_legend("run", labels, "Runs shown in the curves")]
    blocks += [_curve(content, curve) for curve in content["curves"]]
    sections.append(_section("curves", "Training curves", *blocks))

    blocks = [
        *_text(
            "note",
            *(
                f"{label}: no evaluation results yet; python -m eval run writes them."
                for label in content["without_evaluations"]
            ),
        ),
        *(warnings if content["suites"] else []),
        *(_text("reading", words.READING) if content["suites"] else []),
    ]
    blocks += [_suite(suite, k, several=several) for k, suite in enumerate(content["suites"])]
    return [*sections, _section("evaluations", "Evaluations", *blocks)]


def _curve(content: Content, curve: Content) -> Block:
    several, field, late = len(content["runs"]) > 1, curve["field"], content["late_loss"]
    blocks = _text("about", f"Over tokens trained; {curve['about']}.")
    blocks.append({"kind": "log", "field": field, "is_on": curve["log_scale"]})
    blocks.append(_plot(f"{curve['title']} over tokens", id=f"curve-{field}"))
    if field == "loss" and late:
        plots = [("The last half, smoothed", "", _plot("Smoothed loss", late="values"))]
        note = f"Each point is the mean over {late['tokens'][1] - late['tokens'][0]:,.0f} tokens"
        if late["lines"][0]["differences"]:
            title = f"Smoothed, less {content['comparison']['baseline']}"
            plots.append((title, "", _plot(title, late="differences")))
            note += "; the baseline is the mean of its runs, so that its own lines show the spread "
            note += "of seeds"
        blocks += [_minis(plots, "late"), *_text("note", f"{note}.")]
    names = ("last", "lowest", "highest")
    rows = []
    for line in curve["lines"]:
        figures = line["figures"]
        cells = [_cell("–")] * 4
        if figures:
            shown = [(figures[name]["value"], figures[name]["step"]) for name in names]
            cells = [_cell(number(x, curve["decimals"]), f"step {at:,}") for x, at in shown]
            cells.append(_cell(number(figures["median"], curve["decimals"])))
        rows.append(_row(line["run"], cells))
    columns = [_column("run", look=""), *map(_column, (*names, "median"))]
    blocks += [_table(columns, rows), *_text("note", *words.gap_words(curve))]
    if field == "tokens_per_second":
        blocks += _text("note", *(x for run in content["runs"] for x in words.restart_words(run)))
    if several and field != "loss":
        return _fold(curve["title"], *blocks, small=curve["unit"])
    return _card(curve["title"], *blocks, small=curve["unit"], look="curve")


def _suite(suite: Content, place: int, *, several: bool) -> Block:
    name, suite_step = f"suite-{place}", suite["suite_step"]

    def cell(score: Content | None, step: int, limit: int | None) -> Block:
        value, error, items = words.score(score)
        small = ", ".join(filter(None, (items, other_step(step, suite_step) if score else "")))
        return _cell(value, small, error, cut=limit is not None)

    columns = [_column("task", look="")]
    for each in suite["columns"]:
        small = ", ".join(filter(None, (f"step {each['step']:,}", words.limit(each["limit"]))))
        columns.append(_column(each["run"], small))
    rows = []
    for row in suite["rows"]:
        pairs = zip(row["cells"], suite["columns"], strict=True)
        cells = [cell(score, each["step"], each["limit"]) for score, each in pairs]
        rows.append(_row(row["task"], cells, row["metric"]))
    blocks = _text("warning", *suite["warnings"])
    blocks.append(_table(columns, rows, name, filters=""))
    every = suite["every_step"]
    if len(every) > MAX_ROWS:
        many = f"{len(every):,} scores, too many here; the curves show them, report.json has them."
        blocks += _text("note", f"Every step: {many}")
    elif every:
        columns = [_column("task", look=""), _column("run", look=""), _column("step")]
        rows = [
            _row(
                row["task"],
                [
                    _cell(row["run"], look=""),
                    _cell(number(row["step"], 0), words.limit(row["limit"])),
                    cell(row, suite_step, row["limit"]),
                ],
                row["metric"],
                task=row["task"],
                runName=row["run"],
            )
            for row in every
        ]
        table = _table([*columns, _column("value")], rows, f"{name}-steps", filters="task runName")
        blocks.append(_fold("Every step", table))
    if several:
        small = f"step {suite_step:,}, {len(suite['rows'])} scores a run"
        return _fold(suite["suite"], *blocks, small=small)
    return _card(suite["suite"], *blocks, look="tabled")


def entries(content: Content) -> list[str]:
    """The lines of the figures over length, each once: their place is their color."""
    panels = [panel for figure in content["lengths"] for panel in figure["panels"]]
    known = [architecture["label"] for architecture in content["comparison"]["architectures"]]
    lines = (content["held_out"] or {"lines": []})["lines"]
    lines = [*lines, *(line for panel in panels for line in panel["lines"])]
    drawn = dict.fromkeys(line["label"] for line in lines)
    return [label for label in known if label in drawn] + [x for x in drawn if x not in known]
