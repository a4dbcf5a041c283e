"""The words and figures of verdicts and score tables, for the page, the Markdown and the terminal.

Pure functions of the report's content (content.py): they round and phrase, nothing else.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from canon_pretrain.report.suite_tables import named
from canon_pretrain.report.verdicts import UNINFORMATIVE, at_level

NONE = "–"

NOISE_SOURCES = {
    "own": "pooled from these runs' own seeds",
    "own and paper": "these runs' own seeds together with the paper's published spread",
    "paper": "the paper's published spread of eight seeds",
    "given": "as given with --seed_sigma",
    "none": "none known: items only",
}


def number(value: float | None, decimals: int = 4) -> str:
    """A figure for a table; thousands are parted by commas."""
    return NONE if value is None else f"{value:,.{decimals}f}"


def figure(value: float | str | None) -> str:
    """A score: 4 decimals, 2 from 100 on; a value that is not finite is named."""
    if isinstance(value, str):
        return f"not finite ({value})"
    return number(value, 4 if value is None or abs(value) < 100 else 2)


def signed(value: float | None) -> str:
    """A difference, with its sign."""
    if value is None:
        return NONE
    return f"{value:+,.{4 if abs(value) < 100 else 2}f}".replace("-", "−")


def interval(bounds: Sequence[float] | None) -> str:
    """A confidence interval."""
    return NONE if bounds is None else f"{signed(bounds[0])} to {signed(bounds[1])}"


def p_value(value: float | None) -> str:
    """A probability; a very small one is not written out."""
    if value is None:
        return NONE
    return "< 0.0001" if value < 1e-4 else f"{value:.4f}"


def verdict(pair: Mapping[str, Any]) -> str:
    """The verdict, and where both sides are if it is uninformative."""
    if pair["verdict"] == UNINFORMATIVE:
        return f"{pair['verdict']}, {at_level(pair)}"
    return str(pair["verdict"])


def tally(summary: Mapping[str, Any]) -> str:
    """How many verdicts of each kind an architecture has."""
    counts = summary["counts"]
    words = [f"{counts['better']} better", f"{counts['worse']} worse"]
    words.append(f"{counts['within noise']} within noise")
    if counts["not judged"]:
        words.append(f"{counts['not judged']} not judged")
    if counts[UNINFORMATIVE]:
        words.append(f"{counts[UNINFORMATIVE]} {UNINFORMATIVE} (both at floor, ceiling or chance)")
    return ", ".join(words)


def detectable(summary: Mapping[str, Any]) -> str:
    """What could have been shown where nothing was; empty without such a row."""
    if summary["detectable"] is None:
        return ""
    low, middle, high = summary["detectable"]
    if low == high:
        return f"Where it is within noise, a difference of {figure(low)} could have been shown."
    return (
        "Where it is within noise, the smallest difference that could have been shown is "
        f"{figure(low)} to {figure(high)}, by task (median {figure(middle)})."
    )


def other_step(step: int | None, suite_step: int | None) -> str:
    """The step of a score that is not at the step of its table; else empty."""
    return "" if step == suite_step or step is None else f"step {step:,}"


def real(pair: Mapping[str, Any]) -> str:
    """One difference that is real, without its task: values, (difference; 95 % CI; Holm's p)."""
    # a line never ends between p and its value
    p = f"p\N{NO-BREAK SPACE}{p_value(pair['p_holm'])}"
    at = other_step(pair["step"], pair["suite_step"])
    return (
        f"{figure(pair['baseline_value'])} → {figure(pair['value'])} "
        f"({signed(pair['difference'])}; {interval(pair['ci'])}; {p})" + (f" at {at}" if at else "")
    )


def caveats(verdicts: Mapping[str, Any]) -> list[str]:
    """What was compared although it was asked differently, a sentence each."""
    return [
        f"{entry['architecture']}: asked differently than the baseline ({entry['what']}) in "
        f"{named(entry['tasks'])}: their difference may come from that."
        for entry in verdicts["asked_differently"]
    ]


def refusals(verdicts: Mapping[str, Any]) -> list[str]:
    """What has no verdict and why, a sentence each."""
    return [
        *(f"Not judged, {named(e['tasks'])}: {e['why']}" for e in verdicts["not_judged"]),
        *(
            f"Not compared, {e['architecture']}, {named(e['tasks'])}: {e['why']}"
            for e in verdicts["refused"]
        ),
    ]


def family(comparison: Mapping[str, Any]) -> str:
    """Which tests share one error rate, and what stands in the brackets of the summary."""
    words = comparison["family"]["words"]
    return (
        f"{words[:1].upper()}{words[1:].rstrip('.')}. What is not called better or worse is within "
        "noise, however large it looks. In brackets: the difference, its 95 % confidence interval "
        "and p, both after Holm: the interval excludes 0 exactly if p is at most 0.05."
    )


def noise_words(seed_noise: Sequence[Mapping[str, Any]]) -> list[str]:
    """Where the seed noise comes from, a sentence a source."""
    sources = [NOISE_SOURCES.get(entry["source"], entry["source"]) for entry in seed_noise]
    if len(sources) == 1:
        return [f"Seed noise: {sources[0]}."]
    return [
        f"Seed noise of {named(entry['tasks'])}: {source}."
        for entry, source in zip(seed_noise, sources, strict=True)
    ]


def seed_sigma(pair: Mapping[str, Any]) -> str:
    """The seed noise of one row: sigma and where it comes from."""
    noise = pair["seed_noise"]
    if noise is None:
        return NONE
    scale = " of the log" if noise["scale"] == "log" else ""
    return f"{figure(noise['sigma'])}{scale} ({noise['source']})"


def mcnemar(pair: Mapping[str, Any]) -> str:
    """Items that one side alone has right, and the test of these two runs on their items."""
    found = pair["mcnemar"]
    if found is None:
        return NONE
    return f"{found['only_a']:,} : {found['only_b']:,}, p {p_value(found['p'])}"


def pair_cells(pair: Mapping[str, Any]) -> list[str]:
    """The figures of one row of the table of differences, in the order of its columns."""
    return [
        signed(pair["difference"]),
        interval(pair["ci"]),
        p_value(pair["p_holm"]),
        figure(pair["value"]),
        figure(pair["baseline_value"]),
        figure(pair["detectable"]),
        number(pair["seeds_needed"], 0),
        number(pair["num_items"], 0),
        p_value(pair["p"]),
        figure(pair["stderr"]),
        figure(pair["stderr_items"]),
        figure(pair["stderr_seeds"]),
        seed_sigma(pair),
        interval(pair["items_ci"]),
        mcnemar(pair),
        number(pair["num_clusters"], 0),
        " : ".join(str(count) for count in pair["num_runs"]),
        number(pair["chance"], 3),
        number(pair["step"], 0),
        pair["suite"],
    ]


def best_note(cell: Mapping[str, Any], suite_step: int) -> str:
    """How much too good the best of several runs is, and another step than the table's."""
    runs = "1 run" if cell["num_runs"] < 2 else f"best of {cell['num_runs']}"
    bias = "" if cell["bias"] is None or cell["num_runs"] < 2 else figure(cell["bias"])
    parts = [runs, bias and f"about {bias} too good", other_step(cell["step"], suite_step)]
    return ", ".join(filter(None, parts))


def chosen_note(cell: Mapping[str, Any], suite_step: int) -> str:
    """The standard error of a chosen learning rate's score, its runs, and another step."""
    error = "" if cell["stderr"] is None else f"± {figure(cell['stderr'])}"
    runs = "1 run" if cell["num_runs"] == 1 else f"{cell['num_runs']} runs"
    return ", ".join(filter(None, [error, runs, other_step(cell["step"], suite_step)]))


def aligned(
    cells: Sequence[Mapping[str, Any]], key: str, labels: Sequence[str]
) -> list[Mapping[str, Any] | None]:
    """The cells in the order of `labels`; None where one has none."""
    by_label = {cell[key]: cell for cell in cells}
    return [by_label.get(label) for label in labels]


def settings(architecture: Mapping[str, Any]) -> str:
    """What tells an architecture from the others."""
    each = architecture["settings"].items()
    return ", ".join(f"{name.removeprefix('model.')} {value or 'none'}" for name, value in each)
