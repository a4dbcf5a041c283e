"""Which nodes are at fault, from what all of them report.

preflight/__main__.py's `verdict` prints it for slurm/lib.sh, which requeues without those nodes.
"""

import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from canon_pretrain.core.files import UnreadableFile, parsing, read_json
from canon_pretrain.preflight.reports import MATMUL

CLOCK_WARNING_S, CLOCK_FAULT_S = 2.0, 30.0
"""Half of the minute after which a silent run counts as dead, by another node's clock."""

SLOW_WARNING, SLOW_FAULT = 0.8, 0.5
"""Shares of the usual speed. All ranks wait for the slowest: below the second, a run on the other
nodes is worth the wait for another one. On CPUs, which jobs may share, a warning is all."""


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
    for node, device, text, share in slow_devices(there):
        if share < SLOW_FAULT and not device.startswith("cpu"):
            nodes.setdefault(node, []).append(text)
        else:
            warnings.append(f"{node}: {text}")
    return Verdict(nodes, common, warnings)


def slow_devices(reports: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[str, str, str, float]]:
    """Each node's slowest device by each measure, where it is slow: node, device, words, share.

    The usual speed is the upper median of the nodes' upper medians: of two, the better one's.
    """
    for name in dict.fromkeys(name for each in reports.values() for name in node_speeds(each)):
        values = {node: node_speeds(each).get(name, {}) for node, each in reports.items()}
        there = {node: speeds for node, speeds in values.items() if speeds}
        usual = statistics.median_high(
            statistics.median_high(speeds.values()) for speeds in there.values()
        )
        for node, speeds in there.items():
            device = min(speeds, key=speeds.__getitem__)
            if (share := speeds[device] / usual) < SLOW_WARNING:
                text = f"{device} is slow: {name} {_rate(name, speeds[device])}, {share:.0%} of "
                yield node, device, text + f"the usual {_rate(name, usual)}", share


def node_speeds(report: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """The speeds of a node's devices, by measure and device."""
    found: dict[str, dict[str, float]] = {}
    for device, speeds in report.get("speeds", {}).items():
        for name, value in speeds.items():
            found.setdefault(name, {})[device] = value
    return found


def describe_speeds(report: Mapping[str, Any]) -> str:
    """A node's slowest figures in one line."""
    lowest = {name: min(speeds.values()) for name, speeds in node_speeds(report).items()}
    return ", ".join(f"{name} {_rate(name, value)}" for name, value in lowest.items())


def _rate(name: str, value: float) -> str:
    if name == MATMUL:
        return f"{value / 1e12:.3g} TFLOP/s"
    return f"{value / 1e9:.3g} GB/s"


def read_reports(folder: Path, nodes: Sequence[str], *, ranks: bool) -> dict[str, Any]:
    """The reports by node; those of a node's ranks are one."""
    reports: dict[str, Any] = {}
    for node in nodes:
        found = sorted(folder.glob(f"{node}.rank*.json" if ranks else f"{node}.json"))
        reports[node] = None
        for path in found:
            before = reports[node] or {"faults": []}
            try:
                report = read_json(path, finite=False)
                with parsing(path):
                    faults = before["faults"] + report["faults"]
                    speeds = {**before.get("speeds", {}), **report.get("speeds", {})}
            except UnreadableFile:
                continue  # cut short by a full disk, or a crash
            merged = {"faults": list(dict.fromkeys(faults)), "speeds": speeds}
            reports[node] = {**before, **report, **merged}
    return reports
