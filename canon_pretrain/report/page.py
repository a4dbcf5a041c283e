"""Show the report's content to people: one self-contained HTML page, and Markdown."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from canon_pretrain.core import page
from canon_pretrain.report import words
from canon_pretrain.report.words import number
from canon_pretrain.run.results import bound_words

WORDS = (
    "aligned",
    "best_note",
    "caveats",
    "chosen_note",
    "detectable",
    "family",
    "figure",
    "interval",
    "mcnemar",
    "noise_words",
    "other_step",
    "p_value",
    "pair_cells",
    "real",
    "refusals",
    "seed_sigma",
    "settings",
    "signed",
    "tally",
    "verdict",
)
"""The functions of words.py that templates use."""

MAX_ROWS = 1000
"""Of the page's tables that list every step: browsers lay out more of them slowly."""

SHORT_ROWS = 8
"""Figures of a row of the table of differences where it has more than MAX_ROWS rows."""

DIGITS = 7
"""Significant digits of a value that the page's script draws."""

TEMPLATES = Path(__file__).parent / "templates"


def html_page(content: dict[str, Any]) -> str:
    """The self-contained page of `report_content`."""
    return page.html_page(
        TEMPLATES,
        "report",
        _plotted(content),
        filters=_filters(),
        scripts=("tables.js", "lazy.js", "scores.js"),
        content=content,
        max_rows=MAX_ROWS,
        short_rows=SHORT_ROWS,
    )


def _plotted(content: dict[str, Any]) -> dict[str, Any]:
    """What the page's script draws, in few bytes: report.json has it unrounded."""
    return {
        "runs": [{name: run[name] for name in ("label", "restarts")} for run in content["runs"]],
        "entries": entry_labels(content),
        "curves": [
            {**curve, "lines": [_short_line(line) for line in curve["lines"]]}
            for curve in content["curves"]
        ],
        "score_curves": [
            {"lines": [{k: _once(_rounded(v)) for k, v in line.items()} for line in curve["lines"]]}
            for curve in content["score_curves"]
        ],
        "late_loss": _late(content["late_loss"]),
        "lengths": content["lengths"],
        "held_out": content["held_out"],
    }


def _late(found: dict[str, Any] | None) -> dict[str, Any] | None:
    return found and {
        "tokens": _rounded(found["tokens"]),
        "lines": [{name: _rounded(v) for name, v in line.items()} for line in found["lines"]],
    }


def _short_line(line: dict[str, Any]) -> dict[str, Any]:
    """Of a training curve: rounded, and with one number for its tokens where a step has as many."""
    short = {"run": line["run"], "figures": line["figures"], "values": _rounded(line["values"])}
    steps, tokens = line["steps"], line["tokens"]
    ratios = {t / s for s, t in zip(steps, tokens, strict=True) if s}
    if len(ratios) == 1 and 0 not in steps:
        return {**short, "steps": steps, "tokens_a_step": ratios.pop()}
    return {**short, "steps": steps, "tokens": tokens}


def _once(values: Any) -> Any:
    """One value for a list that repeats it: the items of a task, a limit that there is not."""
    alike = isinstance(values, list) and len(values) > 1 and values == [values[0]] * len(values)
    return values[0] if alike else values


def _rounded(values: Any) -> Any:
    """The floats of a list to DIGITS significant digits."""
    if not isinstance(values, list):
        return values
    return [float(f"{v:.{DIGITS}g}") if isinstance(v, float) else v for v in values]


def markdown_page(content: dict[str, Any]) -> str:
    """The same as Markdown; curves are there as their key figures."""
    environment = page.environment(TEMPLATES, _filters(), autoescape=False)
    return environment.get_template("report.md.jinja").render(content=content)


def _filters() -> dict[str, Callable[..., Any]]:
    return {
        "facts": facts,
        "failures": failures,
        "score": score,
        "number": number,
        "limit": limit_words,
        "restarts": restart_words,
        "gaps": gap_words,
        "md": escape_markdown,
        "setting": setting,
        "entry_labels": entry_labels,
        **{name: getattr(words, name) for name in WORDS},
    }


def entry_labels(content: dict[str, Any]) -> list[str]:
    """The lines of the figures over length, each once: their place is their colour."""
    panels = [panel for figure in content["lengths"] for panel in figure["panels"]]
    known = [architecture["label"] for architecture in content["comparison"]["architectures"]]
    lines = (content["held_out"] or {"lines": []})["lines"]
    lines = [*lines, *(line for panel in panels for line in panel["lines"])]
    drawn = dict.fromkeys(line["label"] for line in lines)
    return [label for label in known if label in drawn] + [x for x in drawn if x not in known]


def escape_markdown(text: object) -> str:
    """`text` on one line, without any character that could begin markup or a table cell."""
    line = " ".join(str(text).split())
    line = line.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return re.sub(r"([\\`*\[\]|~])", r"\\\1", line)


def score(cell: dict[str, Any] | None) -> tuple[str, str, str]:
    """(value, ± standard error or Wilson bound, n = items) of a cell; what is unknown is empty."""
    if cell is None:
        return "–", "", ""
    value, stderr, count = cell["value"], cell["stderr"], cell["num_samples"]
    items = "" if count is None else f"n = {count:,}"
    if isinstance(value, str):
        return f"not finite ({value})", "", items
    decimals = 4 if abs(value) < 100 else 2
    if cell["bound"] is not None:
        return number(value), bound_words(value, cell["bound"]), items
    if stderr is None:
        return number(value, decimals), "", items
    shown = stderr if isinstance(stderr, str) else number(stderr, decimals)
    return number(value, decimals), f"± {shown}", items


def limit_words(limit: int | None) -> str:
    """The mark of an evaluation that was cut short; empty for a whole one."""
    return "" if limit is None else f"first {limit:,} items only: not a result"


def setting(value: object) -> str:
    """One value of config.json, readable: a fingerprint is cut."""
    text = "–" if value is None else '""' if value == "" else str(value)
    return text if len(text) <= 24 else text[:12] + "…"


def state_words(run: dict[str, Any]) -> str:
    """Where a run stands."""
    step, total = run["step"], run["total_steps"]
    of = f" of {total:,}" if isinstance(total, int) else ""
    return {
        "done": f"done, step {step:,}{of}",
        "failed": f"failed at step {step:,}{of}: {run['failure']}",
        "stopped": f"stopped on request at step {step:,}{of}",
        "unfinished": f"not done, at step {step:,}{of}",
    }[run["state"]]


def failures(content: dict[str, Any]) -> list[str]:
    """A sentence for each run whose last launch failed: the first thing to know of it."""
    return [
        f"{run['label']} {state_words(run)}" for run in content["runs"] if run["state"] == "failed"
    ]


def facts(run: dict[str, Any]) -> list[tuple[str, str]]:
    """The header of a run: (name, words), without what is unknown."""
    model = run["model"]
    qk_norm = model.get("qk_norm")
    shape = [
        f"{model[field]:,} {words}"
        for field, words in (
            ("num_layers", "layers"),
            ("dim", "wide"),
            ("num_heads", "heads"),
            ("ffn_dim", "FFN"),
            ("vocab_size", "vocabulary"),
        )
        if isinstance(model.get(field), int)
    ]
    variant = [
        f"position {model['position']}" if "position" in model else "",
        f"Canon-{model['canon_set']}" if model.get("canon_set") else "no Canon",
        f"QK-norm {qk_norm}" if qk_norm not in (None, False, "none") else "",
    ]
    flavor = f"{run['flavor']}: " if run["flavor"] else ""
    seq_len, batch = run["seq_len"], run["global_batch_size"]
    known = {
        "State": state_words(run),
        "Tokens": f"{run['tokens']:,}",
        "Parameters": f"{run['num_parameters']:,}" if run["num_parameters"] else "",
        "Model": flavor + ", ".join(shape) if shape else "",
        "Variant": ", ".join(filter(None, variant)) if model else "",
        "Batch": f"{batch:,} × {seq_len:,} tokens a step" if batch and seq_len else "",
        "Optimizer": _joined([run["optimizer"], run["learning_rate"], run["schedule"]]),
        "Data": str(run["data_fingerprint"] or "")[:12],
        "Seeds": _joined([f"data {run['data_seed']}", f"init {run['init_seed']}"]),
        "Devices": ", then ".join(str(size) for size in run["world_sizes"]),
        "Software": _joined(
            [
                *(f"torch {version}" for version in run["torch"]),
                *(f"torchtitan {version}" for version in run["torchtitan"]),
            ]
        ),
        "Began": _time(run["first_event"]),
        "Last event": _time(run["last_event"]),
    }
    return [(name, words) for name, words in known.items() if words]


def _joined(values: list[Any]) -> str:
    return ", ".join(str(value) for value in values if value is not None)


def _time(time: str | None) -> str:
    """2026-11-20 10:05 UTC, of the log's ISO time."""
    return f"{time[:16].replace('T', ' ')} UTC" if isinstance(time, str) else ""


def restart_words(run: dict[str, Any]) -> list[str]:
    """A sentence for each restart."""
    sentences = []
    for restart in run["restarts"]:
        size = restart["world_size"]
        devices = f" on {size} device{'s' if size != 1 else ''}" if size else ""
        when = f", {_time(restart['time'])}" if restart["time"] else ""
        sentences.append(
            f"{run['label']}: resumed from step {restart['from_step']:,}{devices}{when}"
        )
    return sentences


def gap_words(curve: dict[str, Any]) -> list[str]:
    """Sentences on what a curve does not show: values that are not finite, and thinned points."""
    sentences = []
    for line in curve["lines"]:
        logged, shown = line["logged"], len(line["values"])
        if not logged:
            sentences.append(f"{line['run']}: no step logged yet.")
        if line["not_finite"]:
            sentences.append(
                f"{line['run']}: {line['not_finite']:,} of {logged:,} logged values are missing or "
                f"not finite (the first at step {line['first_not_finite_step']:,}): gaps in the "
                "curve."
            )
        if shown < logged:
            sentences.append(
                f"{line['run']}: {shown:,} of {logged:,} logged points are drawn: of each "
                "stretch the lowest and the highest."
            )
    return sentences
