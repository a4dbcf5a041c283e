"""The tables of a report, for both page and Markdown, with all numbers rounded here.

templates/report.body.jinja has their order and the text around them.
"""

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from canon_pretrain.report.evaluations import WHOLE_TEXT
from canon_pretrain.report.verdicts import BETTER, VERDICTS, WITHIN, WORSE
from canon_pretrain.run.results import BITS, GOLD_BITS, VALIDATION, format_bound

MAX_ROWS = 1000  # browsers are slow with longer tables
SHORT_COLUMNS = 13  # of the table of differences; the others are hidden, or missing if it is long
FEWEST_FILTERED = 8  # rows of a table that can be searched
MISSING = "–"

CHOSEN_TITLE = "Chosen learning rate per architecture, by validation loss"
BEST_TITLE = "Best of all learning rates, as in the paper"
EVERY_RUN_TITLE = "Every run"

Table = dict[str, Any]
Content = Mapping[str, Any]
Cell = str | dict[str, str]
Column = str | tuple[str, str]  # title, and its small print
ScoreRow = tuple[Content, list[Cell]]  # a score, and what the table shows of it


def number(value: float | None, decimals: int = 4) -> str:
    return MISSING if value is None else f"{value:,.{decimals}f}"


def _decimals(value: float | None) -> int:
    return 4 if value is None or abs(value) < 100 else 2


def rounded(value: float | str | None) -> str:
    """Return a score with 4 decimals, 2 from 100 on, or the name of a value that is not finite."""
    return f"not finite ({value})" if isinstance(value, str) else number(value, _decimals(value))


def signed(value: float | None) -> str:
    return MISSING if value is None else f"{value:+,.{_decimals(value)}f}".replace("-", "−")


def interval(bounds: Sequence[float] | None) -> str:
    return MISSING if bounds is None else f"{signed(bounds[0])} to {signed(bounds[1])}"


def p_value(value: float | None) -> str:
    return MISSING if value is None else "< 0.0001" if value < 1e-4 else f"{value:.4f}"


def score_notes(suites: Sequence[Content]) -> Iterator[str]:
    """Yield what a reader must know about the scores in the tables of `suites`."""
    if suites:
        yield (
            "± is one standard error over the sources of a task’s n items. Of a held-out loss, n "
            "are tokens, and the sources documents, at least 8. If all items are wrong or all are "
            "right, ≤ or ≥ is the other end of Wilson’s 95 % interval."
        )
    if any(row["metric"].startswith(GOLD_BITS) for suite in suites for row in suite["rows"]):
        yield (
            f"{GOLD_BITS}: -log2 of the probability of the right answer per byte of it. Lower is "
            "better; it tells models apart before accuracy does."
        )
    if any(x["limit"] is not None for suite in suites for x in suite["columns"]):
        yield "A trial used only the first items of a task: it is no result."


def percent(value: float | None) -> str:
    return MISSING if value is None else f"{100 * value:.0f} %"


def score_parts(cell: Content | None) -> tuple[str, str, str]:
    """Return value, ± standard error or Wilson bound, and n = items; "" if unknown.

    A value that could not be computed has the reason instead of its error.
    """
    if cell is None:
        return MISSING, "", ""
    value, stderr, count = cell["value"], cell["stderr"], cell["num_samples"]
    error = ""
    if value is None:
        error = cell.get("why", "")
    elif cell["bound"] is not None:
        error = format_bound(value, cell["bound"])
    elif stderr is not None and not isinstance(value, str):
        error = f"± {stderr if isinstance(stderr, str) else number(stderr, _decimals(value))}"
    items = "" if count is None else f"n = {count:,}"
    sources = cell["num_sources"]
    if count and sources and sources < count:
        items += f", {sources:,} sources"
    return rounded(value), error, items


def state_text(run: Content) -> str:
    reason = f": {run['failure']}" if run["failure"] else ""
    return f"{run['state']} at step {run['step']:,} of {run['total_steps'] or '?'}{reason}"


def failures(content: Content) -> list[str]:
    """Return a sentence per run whose last launch failed."""
    return [f"{x['label']} {state_text(x)}" for x in content["runs"] if x["state"] == "failed"]


def verdicts_by_architecture(content: Content) -> dict[str, dict[str, list[Content]]]:
    """Return architecture -> verdict -> rows, without held-out loss, which is in the headline."""
    found: dict[str, dict[str, list[Content]]] = {}
    for pair in content["comparison"]["pairs"]:
        if pair["suite"] != VALIDATION:
            empty: dict[str, list[Content]] = {verdict: [] for verdict in VERDICTS}
            found.setdefault(pair["architecture"], empty)[pair["verdict"]].append(pair)
    return found


def by_run(suite: Content, row: Content) -> dict[str, Content | None]:
    return {x["run"]: cell for x, cell in zip(suite["columns"], row["cells"], strict=True)}


def _step_note(step: int | None, suite_step: int | None = None) -> str:
    return "" if step is None or step == suite_step else f"step {step:,}"


def _join(*parts: object) -> str:
    return ", ".join(str(part) for part in parts if part not in (None, ""))


def _value(value: Any) -> str:
    """Return a fact or setting as text; fingerprints are cut."""
    if isinstance(value, list):
        return ", ".join(map(_value, value)) or MISSING
    text = MISSING if value in (None, "") else f"{value:,}" if type(value) is int else str(value)
    return text[:12] + "…" if len(text) == 64 else text


def make_cell(text: str, *small: object, error: str = "", chip: str = "", heat: str = "") -> Cell:
    """Return a cell; `chip` colors its text, `heat` from 0 to 1 its background."""
    return {"text": text, "small": _join(*small), "error": error, "chip": chip, "heat": heat}


def make_table(
    columns: Sequence[Column],
    rows: Sequence[Sequence[Cell]],
    name: str = "",
    *,
    text: int = 1,
    shown: int | None = None,
    more: str = "",
    filters: Sequence[str] = (),
) -> Table:
    """Return a table of (name, small print) columns, the first `text` of them text.

    A table with a `name` can be sorted; `more` labels the control that shows the columns after the
    first `shown`; `filters` are the columns by whose values rows can be chosen.
    """
    titled = [(column, "") if isinstance(column, str) else column for column in columns]
    titles = [title for title, _ in titled]
    options = []
    for column in filters:
        at = titles.index(column)
        values = {cell if isinstance(cell, str) else cell["text"] for cell in column_of(rows, at)}
        options.append({"name": column, "column": at, "values": sorted(values)})
    return {
        "id": name,
        "columns": [{"text": title, "small": small} for title, small in titled],
        "num_text": min(text, len(titled)),
        "num_shown": shown if more else None,
        "options": options,
        "more": more,
        "rows": rows,
    }


def column_of(rows: Sequence[Sequence[Cell]], at: int) -> list[Cell]:
    return [row[at] for row in rows]


def held_out(shown: Content) -> Table:
    """Return the last point of each architecture's held-out loss, with the range of its seeds."""
    rows: list[list[Cell]] = []
    for line in shown["lines"]:
        last, value, low, high, n = (
            line[name][-1] for name in ("steps", "values", "low", "high", "n")
        )
        seeds = f"{number(low)} to {number(high)} ({n})"
        cells = [number(last, 0), number(value), seeds, number(line["whole_text"])]
        rows.append([line["label"], *cells])
    columns = ["last step", shown["source"], "seeds", WHOLE_TEXT]
    if all(line["whole_text"] in (None, line["values"][-1]) for line in shown["lines"]):
        del columns[-1]
        rows = [row[:-1] for row in rows]
    return make_table([f"{shown['unit']} of the held-out text", *columns], rows)


def tally(content: Content) -> Table:
    """Return the number of tests per architecture and verdict, and what they can detect."""
    rows: list[list[Cell]] = []
    for label, verdicts in verdicts_by_architecture(content).items():
        cells = [make_cell(label, f"against {content['comparison']['baseline']}")]
        for verdict, found in verdicts.items():
            real = [f"{x['task']} {x['metric']} {signed(x['difference'])}" for x in found]
            cells.append(make_cell(str(len(found)), *(real if verdict in (BETTER, WORSE) else ())))
        # perplexities have another scale
        within = [x["detectable"] for x in verdicts[WITHIN] if x["log_difference"] is None]
        known = [x for x in within if x is not None]
        ends = (rounded(f(known)) for f in (min, max, statistics.median)) if known else ()
        rows.append([*cells, "{} to {}, median {}".format(*ends) if known else MISSING])
    return make_table(["architecture", *VERDICTS, "detectable"], rows, "tally")


def reasons(comparison: Content) -> Table:
    rows = [
        [x["architecture"], _join(x["suite"], x["task"], x["metric"]), why]
        for x in (*comparison["pairs"], *comparison["refused"])
        for why in (x["why"], *(f"different options: {y}" for y in x.get("asked_differently", ())))
        if why
    ]
    return make_table(["architecture", "task", "why"], rows[:MAX_ROWS], "reasons", text=3)


PAIR_COLUMNS: dict[str, Callable[[Content], Cell]] = {
    "task": lambda x: make_cell(x["task"], x["metric"], _step_note(x["step"], x["suite_step"])),
    "architecture": lambda x: x["architecture"],
    "verdict": lambda x: make_cell(
        x["verdict"],
        x["uninformative"],
        chip=x["verdict"] if x["verdict"] in (BETTER, WORSE) else "",
    ),
    "difference": lambda x: signed(x["difference"]),
    "95 % CI (Holm)": lambda x: interval(x["ci"]),
    "p (Holm)": lambda x: p_value(x["p_holm"]),
    "value": lambda x: rounded(x["value"]),
    "baseline": lambda x: rounded(x["baseline_value"]),
    "detectable": lambda x: rounded(x["detectable"]),
    "seeds needed": lambda x: number(x["seeds_needed"], 0),
    "decision accuracy": lambda x: percent(x["decision_accuracy"]),
    "items": lambda x: number(x["num_items"], 0),
    "suite": lambda x: x["suite"],
    "p alone": lambda x: p_value(x["p"]),
    "standard error": lambda x: rounded(x["stderr"]),
    "of items": lambda x: rounded(x["stderr_items"]),
    "of seeds": lambda x: rounded(x["stderr_seeds"]),
    "seed σ": lambda x: _filled("{sigma} ({scale}), {source}", x["seed_noise"], "sigma", rounded),
    "CI alone, of these runs’ items only": lambda x: interval(x["items_ci"]),
    "McNemar": lambda x: _filled("{only_a} : {only_b}, p {p}", x["mcnemar"], "p", p_value),
    "sources": lambda x: number(x["num_clusters"], 0),
    "runs": lambda x: " : ".join(map(str, x["num_runs"])),
    "chance": lambda x: number(x["chance"], 3),
    "step": lambda x: number(x["step"], 0),
}


def _filled(text: str, test: Content | None, name: str, form: Callable[[Any], str]) -> str:
    return MISSING if test is None else text.format_map({**test, name: form(test[name])})


IN_NATS = (
    *("value", "baseline_value", "difference", "detectable"),
    *("stderr", "stderr_items", "stderr_seeds"),
)
"""Of a comparison of held-out losses, what is in nats per token."""


def in_bits(row: Content) -> Content:
    """Return the comparison of held-out losses in bits per byte; any other one as it is."""
    scale = row["bits_per_nat"]
    if scale is None:
        return row
    changes: Table = {}
    for name in IN_NATS:
        changes[name] = None if row[name] is None else scale * row[name]
    for name in ("ci", "items_ci"):
        changes[name] = row[name] and [scale * end for end in row[name]]
    if noise := row["seed_noise"]:
        changes["seed_noise"] = {**noise, "sigma": scale * noise["sigma"]}
    return {**row, **changes, "metric": BITS}


def pairs(comparison: Content) -> Table:
    """Return a row per comparison; columns that say nothing are left out."""
    found = [in_bits(row) for row in comparison["pairs"]]
    is_long = len(found) > MAX_ROWS
    cells = {name: [cell_of(pair) for pair in found] for name, cell_of in PAIR_COLUMNS.items()}
    short = [*PAIR_COLUMNS][:SHORT_COLUMNS]
    known = [name for name, column in cells.items() if any(cell != MISSING for cell in column)]
    if len({row["suite"] for row in found}) == 1:
        known.remove("suite")
    columns = [name for name in known if name in short or not is_long]

    rows = [[cells[name][k] for name in columns] for k in range(len(found))]
    filters = [name for name in ("suite", "verdict", "architecture") if name in columns]
    return make_table(
        columns,
        rows,
        "pairs",
        text=3,
        shown=sum(name in short for name in columns),
        more="" if is_long else "details",
        filters=filters if len(found) >= FEWEST_FILTERED else (),
    )


def scores(content: Content) -> list[tuple[str, Table]]:
    comparison, runs = content["comparison"], [run["label"] for run in content["runs"]]
    labels = [each["label"] for each in comparison["architectures"]]
    decides, known = comparison["decision"], list[tuple[str, str]]()
    if decides:
        known = [("decision accuracy", f"published, at {decides['size']}")]
    share = {(x["task"], x["metric"]): x["decision_accuracy"] for x in comparison["scores"]}
    found: list[tuple[str, list[Column], list[ScoreRow]]] = []
    for kind, title in (("chosen", CHOSEN_TITLE), ("best", BEST_TITLE)):
        heads, lines, most = _by_architecture(comparison["scores"], labels, kind)
        if kind == "chosen" or most > 1:  # the best of one run is that run
            found.append((title, heads, lines))
    if len(runs) > len(labels):
        every: list[ScoreRow] = [
            (row, [score_parts(by_run(suite, row).get(run))[0] for run in runs])
            for suite in content["suites"]
            for row in suite["rows"]
            if row["primary"] and suite["suite"] != VALIDATION
        ]
        found.append((EVERY_RUN_TITLE, [*runs], every))
    anchors = content["anchors"] or {"models": [], "rows": []}
    published = {(row["task"], row["metric"]): row["values"] for row in anchors["rows"]}
    beside, nothing = [(x, "published") for x in anchors["models"]], [None] * len(anchors["models"])
    more = "published scores" if beside else ""
    tables = []
    for title, names, lines in found:
        rows = [
            [make_cell(row["task"], row["metric"]), *cells]
            + [percent(share.get((row["task"], row["metric"]))) for _ in known]
            + [rounded(x) for x in published.get((row["task"], row["metric"]), nothing)]
            for row, cells in lines
        ]
        name = title.split()[0].lower()
        columns: list[Column] = ["task", *names, *known, *beside]
        shown = 1 + len(names) + len(known)
        tables.append((title, make_table(columns, rows, name, shown=shown, more=more)))
    return tables


def _by_architecture(
    scores: Sequence[Content], labels: Sequence[str], kind: str
) -> tuple[list[Column], list[ScoreRow], int]:
    """Return the columns of architectures, the rows, and the largest number of runs of a cell.

    A number of runs that a whole column shares is said once, at its head.
    """
    rows: list[ScoreRow] = [(row, []) for row in scores]
    heads: list[Column] = []
    most = 0
    for label in labels:
        cells = [
            next((x for x in row["cells"] if x["architecture"] == label and x[kind]), None)
            for row in scores
        ]
        counts = {cell[kind]["num_runs"] for cell in cells if cell}
        most = max(most, *counts, 0)
        is_shared = len(counts) == 1
        heads.append((label, _num_runs(kind, *counts)) if is_shared else label)
        for (row, shown), cell in zip(rows, cells, strict=True):
            shown.append(_score_cell(row, cell, kind, says_count=not is_shared))
    return heads, rows, most


def _num_runs(kind: str, count: int) -> str:
    return f"{count} run(s)" if kind == "chosen" else f"best of {count}"


def _score_cell(row: Content, cell: Content | None, kind: str, *, says_count: bool) -> Cell:
    if cell is None:
        return MISSING
    shown, at = cell[kind], _step_note(cell["step"], row["suite_step"])
    count = shown["num_runs"]
    of = _num_runs(kind, count) if says_count else ""
    if kind == "chosen":
        error = "" if shown["stderr"] is None else f"± {rounded(shown['stderr'])}"
        return make_cell(rounded(shown["value"]), error, of, at)
    bias = f"biased by about {rounded(shown['bias'])}" if shown["bias"] and count > 1 else ""
    return make_cell(rounded(shown["value"]), of, bias, at)


def published(shown: Content) -> Table:
    """Return the scores of own runs and of all published models, a row each."""
    rows: list[list[Cell]] = []
    for model in shown["models"]:
        cells = [
            MISSING
            if value is None
            else make_cell(rounded(value[0]), rounded(value[1]) if value[0] != value[1] else "")
            for value in model["values"]
        ]
        rows.append([model["name"], model["size"], number(model["tokens"], 0), *cells])
    columns = ["model", "size", "tokens", *shown["tasks"]]
    return make_table(columns, rows, "published", text=2, filters=["size"])


def architectures(comparison: Content) -> Table:
    rows: list[list[Cell]] = []
    for each in comparison["architectures"]:
        settings = each["settings"].items()
        differs = _join(*(_setting(name, value) for name, value in settings))
        is_chosen = any(recipe["chosen"] for recipe in each["recipes"])
        for recipe in each["recipes"]:
            why = each["choice"] if recipe["chosen"] or not is_chosen else ""
            loss = make_cell(number(recipe["loss"]), _step_note(each["step"]))
            rate, runs = str(recipe["learning_rate"]), str(len(recipe["runs"]))
            rows.append([each["label"], differs, why, rate, runs, loss])
    columns = ["architecture", "settings", "chosen", "learning rate", "runs", "validation loss"]
    return make_table(columns, rows, "architectures", text=3)


def _setting(name: str, value: Any) -> str:
    if name == "model.canon_set" and not value:
        return "no Canon"
    return f"{name.removeprefix('model.')} {value or 'none'}"


def over_length(panel: Content) -> Table:
    name, metric, chance = panel["series"], panel["metric"], panel["chance"]
    guess = "" if chance is None else f"chance {number(chance, 3)}"
    lengths = [number(length, 0) for length in panel["lengths"]]
    rows = [
        [make_cell(line["label"], _step_note(line["step"])), *map(number, line["values"])]
        for line in panel["lines"]
    ]
    return make_table([_join(f"{name} {metric}", guess), *lengths], rows)


def facts(content: Content) -> Table:
    runs = [{"": run["label"], "state": state_text(run), **run["facts"]} for run in content["runs"]]
    head, *rows = [[name, *(_value(run[name]) for run in runs)] for name in runs[0]]
    return make_table(head, rows, text=len(head))


def settings(content: Content) -> Table:
    columns = ["setting", *(run["label"] for run in content["runs"])]
    rows = [[x["setting"], *map(_value, x["values"])] for x in content["differing_settings"]]
    return make_table(columns, rows, "settings", text=len(columns))


def curve(shown: Content) -> Table:
    form = f"{{:{shown['form']}}}".format
    rows: list[list[Cell]] = []
    for line in shown["lines"]:
        points = zip(line["values"], line["steps"], strict=True)
        known = [(value, step) for value, step in points if value is not None]
        ends = (known[-1], min(known), max(known)) if known else ()
        cells = [make_cell(form(value), _step_note(step)) for value, step in ends] or [MISSING] * 3
        rows.append([line["run"], *cells])
    return make_table(["run", "last", "lowest", "highest"], rows)


def samples(shown: Content, runs: Sequence[str]) -> Table:
    rows = [[number(row["step"], 0), *map(_text_cell, row["cells"])] for row in shown["rows"]]
    return make_table(["step", *runs], rows, text=1 + len(runs))


def _text_cell(cell: Content | None) -> Cell:
    if cell is None:
        return MISSING
    text = cell["text"]
    return (
        make_cell("not finite", chip="worse")
        if text is None
        else make_cell(text if text.strip() else "(no text)", chip="text")
    )


def suite(shown: Content) -> Table:
    columns = []
    for each in shown["columns"]:
        cut = f"trial of {each['limit']:,} items" if each["limit"] else ""
        columns.append((each["run"], _join(_step_note(each["step"]), cut)))
    rows: list[list[Cell]] = []
    for row in shown["rows"]:
        # A number of items that all runs share is said once.
        parts = [score_parts(scored) for scored in row["cells"]]
        known = {items for scored, (_, _, items) in zip(row["cells"], parts, strict=True) if scored}
        shared = known.pop() if len(known) == 1 and len(parts) > 1 else ""
        cells: list[Cell] = [make_cell(row["task"], row["metric"], shared)]

        for scored, at, (value, error, items) in zip(
            row["cells"], shown["columns"], parts, strict=True
        ):
            other = _step_note(at["step"], shown["suite_step"]) if scored else ""
            cells.append(make_cell(value, "" if shared else items, other, error=error))
        rows.append(cells)
    return make_table(["task", *columns], rows, f"suite-{shown['suite']}")
