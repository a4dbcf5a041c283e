"""The table of `eval submit --status`: steps x suites of each run, and how far each is."""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict

from rich.table import Table
from rich.text import Text

from canon_pretrain.core.terminal import Console
from eval.schedule.schedule import Entry, Schedule
from eval.suite_names import suite_name

Found = Sequence[tuple[Schedule, Sequence[Entry]]]
ORDER = (
    "done", "running", "queued", "claimed", "waiting", "to come", "failed", "missing", "damaged",
)  # fmt: skip
STYLES = {"done": "green", "running": "cyan", "failed": "red", "damaged": "red", "missing": "red"}


def summary(overview: Found) -> str:
    """How many evaluations are in which state: `3 done, 1 running`."""
    counts = Counter(str(entry.state) for _, found in overview for entry in found)
    return ", ".join(f"{counts[state]} {state}" for state in ORDER if counts[state]) or "none"


def show_status(
    overview: Found, finished: bool, report: tuple[str, str], console: Console, *, as_json: bool
) -> None:
    """Print what `overview` found: a table a run, or one JSON object."""
    if as_json:
        runs = {str(s.run.path): [asdict(entry) for entry in found] for s, found in overview}
        content = {"runs": runs, "report": report[0], "finished": finished}
        console.file.write(json.dumps(content, indent=1) + "\n")
        return
    for schedule, found in overview:
        console.print(_table(schedule, found))
        for entry in found:
            if entry.why and entry.state in ("failed", "missing", "damaged", "waiting"):
                line = f"step {entry.step} {suite_name(entry.suite)}: {entry.state}: {entry.why}"
                console.print(Text(line), soft_wrap=True)
    what = "finished" if finished else "going on"
    words = f"{what}: {summary(overview)}; report: {' '.join(filter(None, report))}"
    console.print(Text(words), soft_wrap=True)


def _table(schedule: Schedule, found: Sequence[Entry]) -> Table:
    """Steps that training has reached, a row each."""
    table = Table(title=Text(str(schedule.run.path)), title_justify="left")
    table.add_column("step", justify="right")
    suites = list(dict.fromkeys(entry.suite for entry in found))
    for suite in suites:
        table.add_column(Text(suite_name(suite)))
    steps = list(dict.fromkeys(entry.step for entry in found if entry.state != "to come"))
    cells = {(entry.step, entry.suite): _cell(entry) for entry in found}
    for step in steps:
        table.add_row(f"{step:,}", *(cells[step, suite] for suite in suites))
    later = sorted({entry.step for entry in found} - set(steps))
    if later:
        table.add_row("…", *(["to come"] * len(suites)))
        table.caption = f"{len(later)} steps to come, the next is {later[0]:,}"
    return table


def _cell(entry: Entry) -> Text:
    words: str = entry.state
    if entry.state in ("running", "queued") and entry.lease is not None:
        words += f" {entry.lease.job}"
    if entry.attempts > 1 or (entry.attempts and entry.state in ("waiting", "failed")):
        words += f" ({entry.attempts} tries)" if entry.attempts > 1 else " (1 try)"
    return Text(words, style=STYLES.get(entry.state, ""))
