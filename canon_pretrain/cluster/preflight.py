"""Check a job before it starts, and its nodes, to identify broken ones.

    python -m canon_pretrain.cluster.preflight job --nodes 2 --ranks-per-node 8 -- --config F ...
    python -m canon_pretrain.cluster.preflight node --report DIR --run RUN --bytes N [--gpus 8]
    torchrun ... -m canon_pretrain.cluster.preflight ranks --report DIR [--gpus 8]
    python -m canon_pretrain.cluster.preflight verdict --report DIR --nodes n1,n2 [--ranks]

slurm/lib.sh calls them in this order before each launch. `verdict` prints the broken nodes.
"""

import argparse
import hashlib
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from canon_pretrain.core.children import end_with_torchrun
from canon_pretrain.core.cli import Parser, command, run_process
from canon_pretrain.core.errors import EPILOG, UserError
from canon_pretrain.core.files import UnreadableFile, free_bytes, read_record, write_json
from canon_pretrain.core.holder import host_name
from canon_pretrain.machine.device import check_cuda
from canon_pretrain.machine.timing import copy_bandwidth, matmul_flops
from canon_pretrain.run.config import valid_world_sizes
from canon_pretrain.run.folder import RunFolder
from canon_pretrain.run.log import read_tail
from canon_pretrain.run.source import code_hashes

if TYPE_CHECKING:
    import torch

TIMEOUT_S = 600
LEAST_FREE = 0.9  # fraction of a GPU's memory: processes of earlier jobs may use it
MATMUL_SIZE = {"cuda": 8192, "cpu": 512}
SECONDS = {"cuda": 1.0, "cpu": 0.1}
CPU_BYTES = 1 << 25
ELEMENTS = {"cuda": 1 << 26, "cpu": 1 << 20}
ALL_REDUCES = 5
MATMUL, MEMORY = "matmul", "memory"
IN_NODE, TWO_NODES, ALL_NODES = "all-reduce in the node", "all-reduce of two nodes", "all-reduce"
PACKAGES = ("torch", "torchtitan", "numpy")
CLOCK_WARNING_S, CLOCK_FAULT_S = 2.0, 30.0  # a silent run counts as dead after a minute
SLOW_WARNING, SLOW_FAULT = 0.8, 0.5  # of the median speed; CPUs, perhaps shared, only give warnings
EXIT_COMMON, EXIT_BROKEN_NODES = 1, 3  # of `verdict`; 3: the job may run without the printed nodes


# -- the job


def check_nodes(global_batch_size: int, nodes: int, ranks_per_node: int) -> None:
    """Raise UserError if the number of ranks does not divide the global batch."""
    if nodes < 1 or ranks_per_node < 1:
        raise UserError(
            "slurm.value", f"{nodes} nodes of {ranks_per_node} ranks: expected 1 or more"
        )
    worlds = valid_world_sizes(global_batch_size, ranks_per_node)
    if nodes * ranks_per_node in worlds:
        return
    valid = [world // ranks_per_node for world in worlds]
    raise UserError(
        "config.world_size",
        f"{nodes} node(s) of {ranks_per_node} ranks do not divide training.global_batch_size = "
        f"{global_batch_size}; valid numbers of nodes: {', '.join(map(str, valid)) or 'none'}",
        valid=valid,
    )


def plan_job(
    arguments: list[str], nodes: int, ranks_per_node: int, data: bool = False, gpus: int = 0
) -> tuple[Path, int]:
    """Return a job's run folder and the bytes of a checkpoint; with `data` open its data too.

    `gpus`: of each node, 0 to train on CPUs.
    """
    from canon_pretrain.titan.device import prepare_device

    prepare_device()
    import torch

    from canon_pretrain.model.counts import num_parameters
    from canon_pretrain.titan.command_line import parse_job
    from canon_pretrain.titan.data import open_data, open_task
    from canon_pretrain.titan.job_config import check_cpu_offload, shard_degree

    job = parse_job([word for word in arguments if word != "--force"])
    check_nodes(job.training.global_batch_size, nodes, ranks_per_node)
    shard_degree(job, nodes * ranks_per_node)
    check_cpu_offload(job, on_gpu=gpus > 0)
    if open_task(job) is None and data:
        open_data(job)
    # weights and AdamW's two moments; an upper bound if not all weights are trained
    numbers = 3 * num_parameters(job.model_args)
    size = numbers * getattr(torch, job.training.dtype).itemsize
    return Path(job.job.dump_folder).absolute(), size


def slow_save_warning(run: RunFolder, show: Callable[[str], str]) -> str | None:
    """Return a warning if the last save took longer than Slurm's KillWait; `show`: scontrol."""
    try:
        tail = read_tail(run.log_file, until="checkpoint")
    except UnreadableFile:
        return None
    save_s = next((e["seconds"] for e in reversed(tail) if e.kind == "checkpoint"), 0.0)
    partition = os.environ.get("SLURM_JOB_PARTITION", "")
    kill = re.search(r"KillWait\s*=\s*(\d+)", show("config"))
    grace = re.search(r"GraceTime=(\d+)", show(f"partition {partition}")) if partition else None
    if kill is None or save_s <= int(kill[1]):
        return None
    return (
        f"the last checkpoint took {save_s:.0f} s; Slurm kills a job {kill[1]} s after SIGTERM "
        f"(KillWait), plus {grace[1] if grace else 0} s if it is preempted (GraceTime). Lower "
        "checkpoint.interval, and raise sbatch --signal=B:USR1@SECONDS"
    )


def scontrol(what: str) -> str:
    """Return the output of `scontrol show WHAT`, or its errors; empty without Slurm."""
    try:
        words = ["scontrol", "show", *what.split()]
        done = subprocess.run(words, capture_output=True, text=True, timeout=30)
        return done.stdout or done.stderr
    except (OSError, subprocess.TimeoutExpired):
        return ""


# -- reports of nodes and ranks


@dataclass(frozen=True)
class Report:
    """The findings of a node or a rank, a JSON file.

    `disk`: faults of the run folder, which all nodes may share. `versions`: must be the same on all
    nodes. `left_alone`: a collective that failed, perhaps because of another rank. `clock_s`: after
    a barrier. `speeds`: FLOP/s and bytes per second, by device and measure.
    """

    faults: list[str] = field(default_factory=list)
    disk: list[str] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=dict)
    left_alone: str | None = None
    clock_s: float | None = None
    speeds: dict[str, dict[str, float]] = field(default_factory=dict)


def report_node(run: Path, checkpoint_bytes: int, gpus: int) -> Report:
    """Check this node's GPUs, software versions and access to `run`."""
    faults: list[str] = []
    disk: list[str] = []
    try:
        if (free := free_bytes(run)) < checkpoint_bytes:
            disk.append(
                f"{free:,} bytes are free in {run}, a checkpoint has about {checkpoint_bytes:,}"
            )
        with tempfile.NamedTemporaryFile(dir=run, prefix=f".preflight-{host_name()}-") as file:
            file.write(os.urandom(1 << 20))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        disk.append(f"{run} cannot be written: {error.strerror}")
    if gpus:
        import torch

        if (found := torch.cuda.device_count()) < gpus:
            faults.append(f"{found} of {gpus} GPUs are usable")
            try:
                check_cuda()
            except UserError as error:
                faults.append(str(error))
    code = hashlib.sha256(json.dumps(code_hashes()).encode()).hexdigest()[:12]
    versions = {name: metadata.version(name) for name in PACKAGES}
    versions |= {"python": platform.python_version(), "canon_pretrain (its source's SHA-256)": code}
    return Report(faults, disk, versions)


def report_ranks(gpus: int) -> Report:
    """Test this rank's device, then all-reduce within nodes, between neighbors, over all ranks."""
    import torch
    import torch.distributed as dist

    end_with_torchrun()
    timeout = timedelta(seconds=TIMEOUT_S)
    dist.init_process_group("gloo", timeout=timeout)
    try:
        world, node = dist.get_world_size(), host_name()
        everyone: list[str] = [""] * world
        dist.all_gather_object(everyone, node)
        dist.barrier()
        clock_s = time.time()
        device = torch.device("cpu")
        if gpus:
            device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        faults, speeds = check_device(device)
        if gpus and not faults:
            torch.cuda.empty_cache()  # NCCL allocates memory outside of torch
        found: list[list[str]] = [[]] * world
        dist.all_gather_object(found, faults)
        if any(found):
            return Report(faults)
        for name, ranks in rank_groups(everyone):
            group = dist.new_group(ranks, backend="nccl" if gpus else "gloo", timeout=timeout)
            if dist.get_rank() not in ranks:
                continue
            rate = all_reduce_bandwidth(group, len(ranks), device)
            if rate is None:
                there = f"{len(ranks)} of {world} ranks, including those of {node}"
                return Report([f"an all-reduce over {there}, returned wrong sums"])
            if len(ranks) > 1:  # a neighbor may be slow: keep the faster one
                speeds[name] = max(rate, speeds.get(name, 0.0))
        dist.barrier()
        label = f"{device.type}:{os.environ['LOCAL_RANK']}"
        return Report(clock_s=clock_s, speeds={label: speeds})
    except RuntimeError as error:
        # perhaps another rank's fault
        return Report(left_alone=f"a collective failed: {str(error).splitlines()[0]}")
    finally:
        dist.destroy_process_group()


def check_device(device: "torch.device") -> tuple[list[str], dict[str, float]]:
    """Return a device's faults and its FLOP/s and bytes per second."""
    import torch

    size, seconds = MATMUL_SIZE[device.type], SECONDS[device.type]
    num_bytes, dtype = CPU_BYTES, torch.float32
    try:
        if device.type == "cuda":
            torch.cuda.set_device(device)
            free, total = torch.cuda.mem_get_info()
            if free < LEAST_FREE * total:
                held = (total - free) / 2**30
                return [f"{device}: {held:.1f} of {total / 2**30:.1f} GiB are in use"], {}
            num_bytes, dtype = free // 4, torch.bfloat16
        ones = torch.ones(size, size, device=device, dtype=dtype)
        source = torch.full((num_bytes,), 90, device=device, dtype=torch.uint8)
        target = torch.zeros_like(source)
        speeds = {
            MATMUL: matmul_flops(device, dtype, size=size, seconds=seconds),
            MEMORY: copy_bandwidth(source, target, seconds=seconds / 2),
        }
        if not bool((ones @ ones == size).all()):
            return [f"{device}: a product of ones is wrong"], {}
        if not torch.equal(source, target):
            return [f"{device}: a copy of {num_bytes:,} bytes is wrong"], {}
        return [], speeds
    except RuntimeError as error:
        return [f"{device}: {str(error).splitlines()[0]}"], {}


def rank_groups(nodes: Sequence[str]) -> list[tuple[str, list[int]]]:
    """Return each node's ranks, those of neighbors on a ring of nodes, and all, to use in order."""
    names = list(dict.fromkeys(nodes))
    own = {name: [rank for rank, node in enumerate(nodes) if node == name] for name in names}
    groups = [(IN_NODE, own[name]) for name in names]
    if len(names) == 1:
        return groups
    if len(names) > 2:
        ring = [(i, (i + 1) % len(names)) for i in range(len(names))]
        for i, j in ring[::2] + ring[1::2]:  # disjoint pairs first, to run in parallel
            groups.append((TWO_NODES, sorted(own[names[i]] + own[names[j]])))
    return [*groups, (ALL_NODES, list(range(len(nodes))))]


def all_reduce_bandwidth(group: Any, count: int, device: "torch.device") -> float | None:
    """Return the bus bandwidth of nccl-tests in bytes/s; None if the sums are wrong."""
    import torch
    import torch.distributed as dist

    ones = torch.ones(ELEMENTS[device.type], device=device)
    dist.all_reduce(ones, group=group)  # connects and synchronizes
    begin = time.perf_counter()
    for _ in range(ALL_REDUCES):
        dist.all_reduce(ones.fill_(1), group=group)
    if not bool((ones == count).all()):  # waits for the GPU
        return None
    seconds = (time.perf_counter() - begin) / ALL_REDUCES
    return 2 * (count - 1) / count * ones.nbytes / seconds


# -- the verdict

Reports = Mapping[str, Report | None]  # by node; None if missing
Finding = tuple[str, str, bool]  # node, description, whether it is a fault (else a warning)


class Verdict(NamedTuple):
    """Faults by node; `common`: faults that exclude no node, since all have them."""

    nodes: dict[str, list[str]]
    common: list[str]
    warnings: list[str]


def judge(reports: Reports) -> Verdict:
    """Judge the reports of `report_node`, or of `report_ranks` merged by node."""
    there = {node: report for node, report in reports.items() if report is not None}
    faults = {node: [*each.faults] if each else ["no report"] for node, each in reports.items()}
    common, warnings = [], []
    if there and all(report.disk for report in there.values()):
        common = list(dict.fromkeys(text for each in there.values() for text in each.disk))
    else:
        for node, report in there.items():
            faults[node] += report.disk
    nodes = {node: texts for node, texts in faults.items() if texts}
    if not nodes:
        common += [f"{node}: {each.left_alone}" for node, each in there.items() if each.left_alone]
    for find in (_other_versions, _wrong_clocks, _slow_devices):
        for node, text, is_fault in find(there):
            if is_fault:
                nodes.setdefault(node, []).append(text)
            else:
                warnings.append(f"{node}: {text}")
    return Verdict(nodes, common, warnings)


def _other_versions(reports: Mapping[str, Report]) -> Iterator[Finding]:
    for name in sorted({name for each in reports.values() for name in each.versions}):
        values = {node: each.versions.get(name, "unknown") for node, each in reports.items()}
        usual = Counter(values.values()).most_common(1)[0][0]
        for node, value in values.items():
            if value != usual:
                yield node, f"{name} is {value}, on other nodes {usual}", True


def _wrong_clocks(reports: Mapping[str, Report]) -> Iterator[Finding]:
    clocks = {node: each.clock_s for node, each in reports.items() if each.clock_s is not None}
    for node, clock_s in clocks.items():
        if (off := abs(clock_s - statistics.median_low(clocks.values()))) > CLOCK_WARNING_S:
            yield node, f"clock differs by {off:.1f} s", off > CLOCK_FAULT_S


def _slow_devices(reports: Mapping[str, Report]) -> Iterator[Finding]:
    found: dict[str, dict[str, dict[str, float]]] = {}
    for node, report in reports.items():
        for device, speeds in report.speeds.items():
            for name, value in speeds.items():
                found.setdefault(name, {}).setdefault(node, {})[device] = value
    for name, nodes in found.items():
        unit, scale = ("TFLOP/s", 1e12) if name == MATMUL else ("GB/s", 1e9)
        # of two nodes, that of the faster one
        usual = statistics.median_high(statistics.median_high(s.values()) for s in nodes.values())
        for node, speeds in nodes.items():
            device = min(speeds, key=speeds.__getitem__)
            if (share := speeds[device] / usual) < SLOW_WARNING:
                text = (
                    f"{device} is slow: {name} {speeds[device] / scale:.3g} {unit}, {share:.0%} "
                    f"of the median {usual / scale:.3g} {unit}"
                )
                yield node, text, share < SLOW_FAULT and not device.startswith("cpu")


def read_reports(folder: Path, nodes: Sequence[str], *, ranks: bool) -> dict[str, Report | None]:
    """Return the reports by node; those of a node's ranks are merged."""
    reports: dict[str, Report | None] = dict.fromkeys(nodes)
    for node in nodes:
        for path in sorted(folder.glob(f"{node}.rank*.json" if ranks else f"{node}.json")):
            try:
                report = read_record(path, Report)
            except UnreadableFile:
                continue  # truncated by a full disk or a crash
            if (before := reports[node]) is not None:
                report = replace(
                    report,
                    faults=list(dict.fromkeys(before.faults + report.faults)),
                    left_alone=report.left_alone or before.left_alone,
                    speeds=before.speeds | report.speeds,
                )
            reports[node] = report
    return reports


def print_verdict(folder: Path, names: str, *, ranks: bool) -> int:
    """Print faults to stderr and the nodes to exclude to stdout; return the exit code."""
    reports = read_reports(folder, [name for name in names.split(",") if name], ranks=ranks)
    nodes, common, warnings = judge(reports)
    if ranks and not any(reports.values()):
        common = ["the ranks could not connect: no node has a report"]
    lines = [f"WARNING: {text}" for text in warnings] + [f"FAULT: {text}" for text in common]
    lines += [f"FAULT of node {node}: {'; '.join(texts)}" for node, texts in nodes.items()]
    for line in lines:
        print(line, file=sys.stderr)
    if common:
        return EXIT_COMMON
    if nodes:
        print(",".join(nodes))
    return EXIT_BROKEN_NODES if nodes else 0


# -- the command


def main(argv: list[str] | None = None) -> None:
    """Run a command; `job` prints the run folder and a checkpoint's bytes, NUL-terminated."""
    words = sys.argv[1:] if argv is None else argv
    place = words.index("--") if "--" in words else len(words)
    with command(prints=words[:1] in (["job"], ["verdict"])):
        given = _parse(words[:place])
        if given.command == "job":
            rest = words[place + 1 :]
            folder, size = plan_job(rest, given.nodes, given.ranks_per_node, given.data, given.gpus)
            if text := slow_save_warning(RunFolder(folder), scontrol):
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


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = Parser(
        prog="python -m canon_pretrain.cluster.preflight",
        description="Used by slurm/lib.sh.",
        epilog=EPILOG,
    )
    commands = parser.add_subparsers(dest="command", required=True)
    names = ("job", "node", "ranks", "verdict")
    job, node, ranks, verdict = (commands.add_parser(name) for name in names)
    job.add_argument("--nodes", type=int, required=True)
    job.add_argument("--ranks-per-node", type=int, required=True)
    job.add_argument("--data", action="store_true", help="also check the data")
    node.add_argument("--run", type=Path, required=True)
    node.add_argument("--bytes", type=int, default=0, help="approximate size of a checkpoint")
    verdict.add_argument("--nodes", required=True, help="comma-separated names of all nodes")
    verdict.add_argument("--ranks", action="store_true", help="read the ranks' reports")
    for each in (node, ranks, verdict):
        each.add_argument("--report", type=Path, required=True, metavar="DIR")
    for each in (job, node, ranks):
        each.add_argument("--gpus", type=int, default=0, help="expected GPUs; 0: CPUs")
    return parser.parse_args(argv)


if __name__ == "__main__":
    run_process(main)
