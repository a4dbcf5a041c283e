"""The words and figures of a report, for the page, the Markdown and the terminal.

Pure functions of the report's content (content.py): they round and phrase, nothing else.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from canon_pretrain.report.content import named
from canon_pretrain.report.verdicts import UNINFORMATIVE, at_level
from canon_pretrain.run.results import bound_words

NONE = "–"

NOISE_SOURCES = {
    "own": "pooled from these runs' own seeds",
    "own and paper": "these runs' own seeds together with the paper's published spread",
    "paper": "the paper's published spread of eight seeds",
    "given": "as given with --seed_sigma",
    "none": "none known: items only",
}

READING = (
    "± is one standard error over the sources of a task’s items (n): items on one text are not "
    "independent. If all items are wrong or all are right, ≤ or ≥ is the other end of Wilson’s "
    "95 % interval. Differences under about two standard errors may be chance, and the standard "
    "error does not include training seeds: runs that differ in the seed alone differ by more. So "
    "no table of a suite says that one run is better; “Which differences are real” does, with both "
    "counted in."
)

Content = Mapping[str, Any]


def number(value: float | None, decimals: int = 4) -> str:
    """Return a figure for a table, with commas between thousands."""
    return NONE if value is None else f"{value:,.{decimals}f}"


def figure(value: float | str | None) -> str:
    """Return a score: 4 decimals, 2 from 100 on; a value that is not finite is named."""
    if isinstance(value, str):
        return f"not finite ({value})"
    return number(value, 4 if value is None or abs(value) < 100 else 2)


def signed(value: float | None) -> str:
    """Return a difference with its sign."""
    if value is None:
        return NONE
    return f"{value:+,.{4 if abs(value) < 100 else 2}f}".replace("-", "−")


def interval(bounds: Sequence[float] | None) -> str:
    return NONE if bounds is None else f"{signed(bounds[0])} to {signed(bounds[1])}"


def p_value(value: float | None) -> str:
    if value is None:
        return NONE
    return "< 0.0001" if value < 1e-4 else f"{value:.4f}"


def score(cell: Content | None) -> tuple[str, str, str]:
    """Return value, ± standard error or Wilson bound, and n = items; empty if unknown."""
    if cell is None:
        return NONE, "", ""
    value, stderr, count = cell["value"], cell["stderr"], cell["num_samples"]
    items = "" if count is None else f"n = {count:,}"
    if isinstance(value, str):
        return figure(value), "", items
    decimals = 4 if abs(value) < 100 else 2
    if cell["bound"] is not None:
        return number(value), bound_words(value, cell["bound"]), items
    shown = stderr if isinstance(stderr, str) else number(stderr, decimals)
    return number(value, decimals), "" if stderr is None else f"± {shown}", items


def limit(count: int | None) -> str:
    """Return the mark of an evaluation that was cut short; empty for a whole one."""
    return "" if count is None else f"first {count:,} items only: not a result"


def other_step(step: int | None, suite_step: int | None) -> str:
    """Return the step of a score that is not at the step of its table; else empty."""
    return "" if step == suite_step or step is None else f"step {step:,}"


def setting(value: object) -> str:
    """Return one value of config.json; a fingerprint is cut."""
    text = NONE if value is None else '""' if value == "" else str(value)
    return text if len(text) <= 24 else text[:12] + "…"


# -- runs


def state_words(run: Content) -> str:
    step, total = run["step"], run["total_steps"]
    of = f" of {total:,}" if isinstance(total, int) else ""
    return {
        "done": f"done, step {step:,}{of}",
        "failed": f"failed at step {step:,}{of}: {run['failure']}",
        "stopped": f"stopped on request at step {step:,}{of}",
        "unfinished": f"not done, at step {step:,}{of}",
    }[run["state"]]


def failures(content: Content) -> list[str]:
    """Return a sentence for each run whose last launch failed."""
    failed = [run for run in content["runs"] if run["state"] == "failed"]
    return [f"{run['label']} {state_words(run)}" for run in failed]


def facts(run: Content) -> list[tuple[str, str]]:
    """Return the header of a run as (name, words), without what is unknown."""
    model, qk_norm = run["model"], run["model"].get("qk_norm")
    units = {"num_layers": "layers", "dim": "wide", "num_heads": "heads", "ffn_dim": "FFN"}
    units["vocab_size"] = "vocabulary"
    shape = [f"{model[k]:,} {unit}" for k, unit in units.items() if isinstance(model.get(k), int)]
    variant = [
        f"position {model['position']}" if "position" in model else "",
        f"Canon-{model['canon_set']}" if model.get("canon_set") else "no Canon",
        f"QK-norm {qk_norm}" if qk_norm not in (None, False, "none") else "",
    ]
    flavor = f"{run['flavor']}: " if run["flavor"] else ""
    seq_len, batch = run["seq_len"], run["global_batch_size"]
    software = [f"{name} {x}" for name in ("torch", "torchtitan") for x in run[name]]
    known = {
        "State": state_words(run),
        "Tokens": f"{run['tokens']:,}",
        "Parameters": f"{run['num_parameters']:,}" if run["num_parameters"] else "",
        "Model": flavor + ", ".join(shape) if shape else "",
        "Variant": ", ".join(filter(None, variant)) if model else "",
        "Batch": f"{batch:,} × {seq_len:,} tokens a step" if batch and seq_len else "",
        "Optimizer": _joined([run["optimizer"], run["learning_rate"], run["schedule"]]),
        "Data": str(run["data_fingerprint"] or "")[:12],
        "Seeds": f"data {run['data_seed']}, init {run['init_seed']}",
        "Devices": ", then ".join(str(size) for size in run["world_sizes"]),
        "Software": _joined(software),
        "Began": _time(run["first_event"]),
        "Last event": _time(run["last_event"]),
    }
    return [(name, words) for name, words in known.items() if words]


def _joined(values: Sequence[Any]) -> str:
    return ", ".join(str(value) for value in values if value is not None)


def _time(time: str | None) -> str:
    """2026-11-20 10:05 UTC, of the log's ISO time."""
    return f"{time[:16].replace('T', ' ')} UTC" if isinstance(time, str) else ""


def restart_words(run: Content) -> list[str]:
    """Return a sentence for each restart."""
    sentences = []
    for restart in run["restarts"]:
        size = restart["world_size"]
        devices = f" on {size} device{'s' if size != 1 else ''}" if size else ""
        when = f", {_time(restart['time'])}" if restart["time"] else ""
        step = restart["from_step"]
        sentences.append(f"{run['label']}: resumed from step {step:,}{devices}{when}.")
    return sentences


def gap_words(curve: Content) -> list[str]:
    """Return sentences on what a curve does not show: gaps, and thinned points."""
    sentences = []
    for line in curve["lines"]:
        run, logged, shown, gaps = (
            line["run"],
            line["logged"],
            len(line["values"]),
            line["not_finite"],
        )
        if not logged:
            sentences.append(f"{run}: no step logged yet.")
        if gaps:
            first = line["first_not_finite_step"]
            sentences.append(
                f"{run}: {gaps:,} of {logged:,} logged values are missing or not finite (the first "
                f"at step {first:,}): gaps in the curve."
            )
        if shown < logged:
            sentences.append(
                f"{run}: {shown:,} of {logged:,} logged points are drawn: of each stretch the "
                "lowest and the highest."
            )
    return sentences


# -- verdicts


def verdict(pair: Content) -> str:
    """Return the verdict, and the level of both sides if it is uninformative."""
    if pair["verdict"] == UNINFORMATIVE:
        return f"{pair['verdict']}, {at_level(pair)}"
    return str(pair["verdict"])


def tally(summary: Content) -> str:
    """Return how many verdicts of each kind an architecture has."""
    counts = summary["counts"]
    always = ("better", "worse", "within noise")
    words = [f"{n} {name}" for name, n in counts.items() if n or name in always]
    if counts[UNINFORMATIVE]:
        words[-1] += " (both at floor, ceiling or chance)"
    return ", ".join(words)


def detectable(summary: Content) -> str:
    """Return what could have been shown where nothing was; empty without such a row."""
    if summary["detectable"] is None:
        return ""
    low, middle, high = summary["detectable"]
    if low == high:
        return f"Where it is within noise, a difference of {figure(low)} could have been shown."
    return (
        "Where it is within noise, the smallest difference that could have been shown is "
        f"{figure(low)} to {figure(high)}, by task (median {figure(middle)})."
    )


def real(pair: Content) -> str:
    """Return one real difference: values (difference; 95 % CI; Holm's p), and another step."""
    # a line never ends between p and its value
    p = f"p\N{NO-BREAK SPACE}{p_value(pair['p_holm'])}"
    at = other_step(pair["step"], pair["suite_step"])
    found = f"{signed(pair['difference'])}; {interval(pair['ci'])}; {p}"
    values = f"{figure(pair['baseline_value'])} → {figure(pair['value'])}"
    return f"{values} ({found})" + (f" at {at}" if at else "")


def caveats(verdicts: Content) -> list[str]:
    """Return what was compared although it was asked differently, a sentence each."""
    return [
        f"{entry['architecture']}: asked differently than the baseline ({entry['what']}) in "
        f"{named(entry['tasks'])}: their difference may come from that."
        for entry in verdicts["asked_differently"]
    ]


def refusals(verdicts: Content) -> list[str]:
    """Return what has no verdict and why, a sentence each."""
    return [
        *(f"Not judged, {named(e['tasks'])}: {e['why']}" for e in verdicts["not_judged"]),
        *(
            f"Not compared, {e['architecture']}, {named(e['tasks'])}: {e['why']}"
            for e in verdicts["refused"]
        ),
    ]


def family(comparison: Content) -> str:
    """Return which tests share one error rate, and what is in the brackets of the summary."""
    words = comparison["family"]["words"]
    return (
        f"{words[:1].upper()}{words[1:].rstrip('.')}. What is not called better or worse is within "
        "noise, however large it looks. In brackets: the difference, its 95 % confidence interval "
        "and p, both after Holm: the interval excludes 0 exactly if p is at most 0.05."
    )


def noise_words(seed_noise: Sequence[Content]) -> list[str]:
    """Return where the seed noise comes from, a sentence per source."""
    sources = [NOISE_SOURCES.get(entry["source"], entry["source"]) for entry in seed_noise]
    if len(sources) == 1:
        return [f"Seed noise: {sources[0]}."]
    return [
        f"Seed noise of {named(entry['tasks'])}: {source}."
        for entry, source in zip(seed_noise, sources, strict=True)
    ]


def _seed_sigma(pair: Content) -> str:
    noise = pair["seed_noise"]
    if noise is None:
        return NONE
    scale = " of the log" if noise["scale"] == "log" else ""
    return f"{figure(noise['sigma'])}{scale} ({noise['source']})"


def _mcnemar(pair: Content) -> str:
    found = pair["mcnemar"]
    if found is None:
        return NONE
    return f"{found['only_a']:,} : {found['only_b']:,}, p {p_value(found['p'])}"


def pair_columns(value: str, baseline: str) -> list[tuple[str, bool, Callable[[Content], str]]]:
    """Return the columns of the table of differences: name, whether low is first, and its words.

    `value`, `baseline`: the names of the columns of the two scores.
    """
    return [
        ("difference", False, lambda pair: signed(pair["difference"])),
        ("95 % CI (Holm)", False, lambda pair: interval(pair["ci"])),
        ("p (Holm)", True, lambda pair: p_value(pair["p_holm"])),
        (value, False, lambda pair: figure(pair["value"])),
        (baseline, False, lambda pair: figure(pair["baseline_value"])),
        ("could have shown", True, lambda pair: figure(pair["detectable"])),
        ("seeds needed", True, lambda pair: number(pair["seeds_needed"], 0)),
        ("items", False, lambda pair: number(pair["num_items"], 0)),
        ("suite", False, lambda pair: pair["suite"]),
        ("p alone", True, lambda pair: p_value(pair["p"])),
        ("standard error", True, lambda pair: figure(pair["stderr"])),
        ("of items", False, lambda pair: figure(pair["stderr_items"])),
        ("of seeds", False, lambda pair: figure(pair["stderr_seeds"])),
        ("seed σ", False, _seed_sigma),
        ("CI alone, of these runs’ items only", False, lambda pair: interval(pair["items_ci"])),
        ("McNemar", False, _mcnemar),
        ("sources", False, lambda pair: number(pair["num_clusters"], 0)),
        ("runs", False, lambda pair: " : ".join(map(str, pair["num_runs"]))),
        ("chance", False, lambda pair: number(pair["chance"], 3)),
        ("step", False, lambda pair: number(pair["step"], 0)),
    ]


def best_note(cell: Content, suite_step: int) -> str:
    """Return how much too good the best of several runs is, and another step than the table's."""
    runs = "1 run" if cell["num_runs"] < 2 else f"best of {cell['num_runs']}"
    bias = "" if cell["bias"] is None or cell["num_runs"] < 2 else figure(cell["bias"])
    parts = [runs, bias and f"about {bias} too good", other_step(cell["step"], suite_step)]
    return ", ".join(filter(None, parts))


def chosen_note(cell: Content, suite_step: int) -> str:
    """Return the standard error of a chosen learning rate's score, its runs, and another step."""
    error = "" if cell["stderr"] is None else f"± {figure(cell['stderr'])}"
    runs = "1 run" if cell["num_runs"] == 1 else f"{cell['num_runs']} runs"
    return ", ".join(filter(None, [error, runs, other_step(cell["step"], suite_step)]))


def settings(architecture: Content) -> str:
    """Return what tells an architecture from the others."""
    each = architecture["settings"].items()
    return ", ".join(f"{name.removeprefix('model.')} {value or 'none'}" for name, value in each)
