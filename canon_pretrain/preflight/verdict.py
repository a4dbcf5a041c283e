"""Which nodes are at fault, from what all of them report.

preflight/__main__.py's `verdict` prints it for slurm/lib.sh, which requeues without those nodes.
"""

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from canon_pretrain.files import UnreadableFile, parsing, read_json

CLOCK_WARNING_S, CLOCK_FAULT_S = 2.0, 30.0
"""Half of the minute after which a silent run counts as dead, by another node's clock."""


class Verdict(NamedTuple):
    """What is wrong: with some nodes, by name; with all alike, so that no other would do better."""

    nodes: dict[str, list[str]]
    common: list[str]
    warnings: list[str]


def judge_nodes(reports: Mapping[str, Mapping[str, Any] | None]) -> Verdict:
    """The verdict on the reports of `report_node`, by node; None where there is none."""
    there = {node: report for node, report in reports.items() if report is not None}
    nodes = {node: [*there[node]["faults"]] if node in there else ["no report"] for node in reports}
    common: list[str] = []
    if there and all(report["disk"] for report in there.values()):
        common = list(dict.fromkeys(text for each in there.values() for text in each["disk"]))
    else:
        for node, report in there.items():
            nodes[node] += report["disk"]
    for name in sorted({name for each in there.values() for name in each["versions"]}):
        values = {node: each["versions"].get(name, "unknown") for node, each in there.items()}
        usual = Counter(values.values()).most_common(1)[0][0]
        for node, value in values.items():
            if value != usual:
                nodes[node].append(f"{name} is {value}, elsewhere {usual}")
    return Verdict({node: texts for node, texts in nodes.items() if texts}, common, [])


def judge_ranks(reports: Mapping[str, Mapping[str, Any] | None]) -> Verdict:
    """The same for those of `report_ranks`."""
    there = {node: report for node, report in reports.items() if report is not None}
    nodes = {node: [*report["faults"]] for node, report in there.items() if report["faults"]}
    if there:
        nodes |= {node: ["no report"] for node in reports if node not in there}
    common: list[str] = []
    if not there:
        common = ["the ranks could not meet: no node reports"]
    elif not nodes:
        common = [f"{n}: {each['left_alone']}" for n, each in there.items() if "left_alone" in each]
    clocks = {node: each["clock_s"] for node, each in there.items() if "clock_s" in each}
    middle = statistics.median_low(clocks.values()) if clocks else 0.0
    warnings = []
    for node, clock_s in clocks.items():
        if (off := abs(clock_s - middle)) > CLOCK_WARNING_S:
            text = f"its clock is {off:.1f} s off the others'"
            if off > CLOCK_FAULT_S:
                nodes.setdefault(node, []).append(text)
            else:
                warnings.append(f"{node}: {text}")
    return Verdict(nodes, common, warnings)


def read_reports(folder: Path, nodes: Sequence[str], *, ranks: bool) -> dict[str, Any]:
    """The reports by node; those of a node's ranks are one."""
    reports: dict[str, Any] = {}
    for node in nodes:
        found = sorted(folder.glob(f"{node}.rank*.json" if ranks else f"{node}.json"))
        reports[node] = None
        for path in found:
            try:
                report = read_json(path, finite=False)
                with parsing(path):
                    faults = (reports[node] or {"faults": []})["faults"] + report["faults"]
            except UnreadableFile:
                continue  # cut short by a full disk, or a crash
            reports[node] = {
                **(reports[node] or {}),
                **report,
                "faults": list(dict.fromkeys(faults)),
            }
    return reports
