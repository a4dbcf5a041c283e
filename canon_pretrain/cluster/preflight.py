"""Which nodes of a job are broken, by what all of them report, so that they are named, not guessed.

The commands are described in canon_pretrain/preflight.py, which adds the check of the job itself.
`verdict` names the nodes at fault for slurm/lib.sh, which requeues without them. A node below 80 %
of the usual speed is warned of, a GPU below 50 % is a fault of its node.
"""

import argparse
import os
import re
import statistics
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import NamedTuple

from canon_pretrain.cluster.node_report import MATMUL, Report, report_node, report_ranks
from canon_pretrain.core.cli import command
from canon_pretrain.core.files import UnreadableFile, read_record, write_json
from canon_pretrain.core.holder import host_name
from canon_pretrain.run.folder import RunFolder
from canon_pretrain.run.log import read_tail

CLOCK_WARNING_S, CLOCK_FAULT_S = 2.0, 30.0
"""Half of the minute after which a silent run counts as dead, by another node's clock."""
SLOW_WARNING, SLOW_FAULT = 0.8, 0.5
"""Shares of the usual speed. All ranks wait for the slowest: below the second, a run on the other
nodes is worth the wait for another one. On CPUs, which jobs may share, a warning is all."""
EXIT_COMMON, EXIT_BROKEN_NODES = 1, 3
"""Exit codes of `verdict`; after the second, leaving out the nodes that it names may help."""

Reports = Mapping[str, Report | None]
"""By node; None without one."""
PlanJob = Callable[[list[str], int, int, bool], tuple[Path, int]]


class Verdict(NamedTuple):
    """Faults of some nodes, by name; faults of all alike, so that no other would do better."""

    nodes: dict[str, list[str]]
    common: list[str]
    warnings: list[str]


def judge_nodes(reports: Reports) -> Verdict:
    """Judge the reports of `report_node`."""
    there = {node: report for node, report in reports.items() if report is not None}
    nodes = {node: [*there[node].faults] if node in there else ["no report"] for node in reports}
    common: list[str] = []
    if there and all(report.disk for report in there.values()):
        common = list(dict.fromkeys(text for each in there.values() for text in each.disk))
    else:
        for node, report in there.items():
            nodes[node] += report.disk
    for name in sorted({name for each in there.values() for name in each.versions}):
        values = {node: each.versions.get(name, "unknown") for node, each in there.items()}
        usual = Counter(values.values()).most_common(1)[0][0]
        for node, value in values.items():
            if value != usual:
                nodes[node].append(f"{name} is {value}, elsewhere {usual}")
    return Verdict({node: texts for node, texts in nodes.items() if texts}, common, [])


def judge_ranks(reports: Reports) -> Verdict:
    """Judge the reports of `report_ranks`, those of a node's ranks merged."""
    there = {node: report for node, report in reports.items() if report is not None}
    nodes = {node: [*report.faults] for node, report in there.items() if report.faults}
    common, warnings = [], []
    if not there:
        common = ["the ranks could not meet: no node reports"]
    nodes |= {node: ["no report"] for node in reports if there and node not in there}
    if not nodes:
        common += [f"{node}: {each.left_alone}" for node, each in there.items() if each.left_alone]
    clocks = {node: each.clock_s for node, each in there.items() if each.clock_s is not None}
    middle = statistics.median_low(clocks.values()) if clocks else 0.0
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


def slow_devices(reports: Mapping[str, Report]) -> Iterator[tuple[str, str, str, float]]:
    """Yield each node's slowest device by each measure if it is slow: node, device, words, share.

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


def node_speeds(report: Report) -> dict[str, dict[str, float]]:
    """Return the speeds of a node's devices, by measure and device."""
    found: dict[str, dict[str, float]] = {}
    for device, speeds in report.speeds.items():
        for name, value in speeds.items():
            found.setdefault(name, {})[device] = value
    return found


def _rate(name: str, value: float) -> str:
    if name == MATMUL:
        return f"{value / 1e12:.3g} TFLOP/s"
    return f"{value / 1e9:.3g} GB/s"


def read_reports(folder: Path, nodes: Sequence[str], *, ranks: bool) -> dict[str, Report | None]:
    """Return the reports by node; those of a node's ranks as one."""
    reports: dict[str, Report | None] = dict.fromkeys(nodes)
    for node in nodes:
        for path in sorted(folder.glob(f"{node}.rank*.json" if ranks else f"{node}.json")):
            try:
                report = read_record(path, Report)
            except UnreadableFile:
                continue  # cut short by a full disk, or a crash
            if (before := reports[node]) is not None:
                faults = list(dict.fromkeys(before.faults + report.faults))
                left_alone = report.left_alone or before.left_alone
                clock_s = before.clock_s if report.clock_s is None else report.clock_s
                report = replace(report, faults=faults, left_alone=left_alone, clock_s=clock_s)
                report = replace(report, speeds=before.speeds | report.speeds)
            reports[node] = report
    return reports


def slow_save(run: RunFolder, show: Callable[[str], str]) -> str | None:
    """Return a warning if Slurm kills sooner after SIGTERM than this run's last save took.

    `show` returns the output of `scontrol show ...`. None if all is well, or nothing is known.
    """
    try:
        saves = [e for e in read_tail(run.log_file, until="checkpoint") if "seconds" in e]
        save_s = next(float(e["seconds"]) for e in reversed(saves) if e["event"] == "checkpoint")
    except (UnreadableFile, StopIteration, ValueError, TypeError):
        return None
    partition = os.environ.get("SLURM_JOB_PARTITION", "")
    kill = re.search(r"KillWait\s*=\s*(\d+)", show("config"))
    grace = re.search(r"GraceTime=(\d+)", show(f"partition {partition}")) if partition else None
    if kill is None or save_s <= int(kill[1]):
        return None
    text = f"the last checkpoint took {save_s:.0f} s, and Slurm kills {kill[1]} s after SIGTERM"
    text += f" (KillWait), {grace[1] if grace else 0} s later where partition {partition} preempts"
    return (
        f"{text} (GraceTime). A cancelled, preempted or failed job may then lose the steps since "
        "its last checkpoint: a lower checkpoint.interval makes them fewer. The time limit's "
        "signal should come earlier than that, too (sbatch --signal=B:USR1@SECONDS; 300 unless "
        "given)"
    )


def scontrol(what: str) -> str:
    """Return the output of `scontrol show WHAT`; empty if there is none."""
    try:
        command = ["scontrol", "show", *what.split()]
        return subprocess.run(command, capture_output=True, text=True, timeout=30).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""


def main(argv: list[str], plan_job: PlanJob) -> None:
    """Run a command. `job` prints the run folder and the bytes, each ended by a NUL byte."""
    place = argv.index("--") if "--" in argv else len(argv)
    with command(prints=argv[:1] in (["job"], ["verdict"])):
        given = _parse(argv[:place])
        if given.command == "job":
            rest = argv[place + 1 :]
            folder, size = plan_job(rest, given.nodes, given.ranks_per_node, given.data)
            if text := slow_save(RunFolder(folder), scontrol):
                print(f"WARNING: {text}", file=sys.stderr)
            sys.stdout.write(f"{folder}\0{size}\0")
        elif given.command == "node":
            report = report_node(given.run, given.bytes, given.gpus)
            write_json(given.report / f"{host_name()}.json", asdict(report))
        elif given.command == "ranks":
            name = f"{host_name()}.rank{os.environ['LOCAL_RANK']}.json"
            write_json(given.report / name, asdict(report_ranks(given.gpus)))
        else:
            raise SystemExit(print_verdict(given.report, given.nodes, ranks=given.ranks))


def print_verdict(folder: Path, names: str, *, ranks: bool) -> int:
    """Print faults to stderr and the nodes to leave out to stdout; return the exit code."""
    reports = read_reports(folder, [name for name in names.split(",") if name], ranks=ranks)
    verdict = judge_ranks(reports) if ranks else judge_nodes(reports)
    for node, report in reports.items():
        if report is not None and report.speeds:
            lowest = {name: min(speeds.values()) for name, speeds in node_speeds(report).items()}
            text = ", ".join(f"{name} {_rate(name, value)}" for name, value in lowest.items())
            print(f"{node}: {text}", file=sys.stderr)
    for text in verdict.warnings:
        print(f"WARNING: {text}", file=sys.stderr)
    for text in verdict.common:
        print(f"not fit: {text}", file=sys.stderr)
    for node, texts in verdict.nodes.items():
        print(f"node {node} is not fit: {'; '.join(texts)}", file=sys.stderr)
    if verdict.common:
        return EXIT_COMMON
    if verdict.nodes:
        print(",".join(verdict.nodes))
        return EXIT_BROKEN_NODES
    return 0


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m canon_pretrain.preflight", description=(__doc__ or "").split("\n")[0]
    )
    commands = parser.add_subparsers(dest="command", required=True)
    job = commands.add_parser("job", help="check a job's arguments (after --) and its nodes")
    job.add_argument("--nodes", type=int, required=True)
    job.add_argument("--ranks_per_node", type=int, required=True)
    job.add_argument("--data", action="store_true", help="look for the data too")
    node = commands.add_parser("node", help="check the node that this runs on")
    node.add_argument("--run", type=Path, required=True)
    node.add_argument("--bytes", type=int, default=0, help="about the size of a checkpoint")
    ranks = commands.add_parser("ranks", help="check each rank's device, under torchrun")
    verdict = commands.add_parser("verdict", help="put the reports together")
    verdict.add_argument("--nodes", required=True, help="comma-separated names of all nodes")
    verdict.add_argument("--ranks", action="store_true", help="judge the ranks' reports")
    for each in (node, ranks, verdict):
        each.add_argument("--report", type=Path, required=True, metavar="DIR")
    for each in (node, ranks):
        each.add_argument("--gpus", type=int, default=0, help="GPUs that must be there; 0: CPUs")
    return parser.parse_args(argv)
