"""Check a job before it starts, and its nodes, to identify broken ones.

    python -m canon_pretrain.cluster.preflight job --nodes 2 --ranks-per-node 8 -- --config F ...
    python -m canon_pretrain.cluster.preflight node --report DIR --run RUN --bytes N [--gpus 8]
    torchrun ... -m canon_pretrain.cluster.preflight ranks --report DIR [--gpus 8]
    python -m canon_pretrain.cluster.preflight verdict --report DIR --nodes n1,n2 [--ranks]

slurm/lib.sh calls them in this order before each launch. `verdict` prints the broken nodes.
"""

import argparse
import json
import operator
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from canon_pretrain.cluster.leases import parse_config
from canon_pretrain.core.children import end_with_torchrun
from canon_pretrain.core.cli import Parser, command, run_process
from canon_pretrain.core.errors import EPILOG, UserError
from canon_pretrain.core.files import (
    UnreadableFile,
    find_record,
    free_bytes,
    sha256_text,
    write_json,
)
from canon_pretrain.core.holder import host_name
from canon_pretrain.machine.device import check_cuda
from canon_pretrain.machine.timing import copy_bandwidth, matmul_flops
from canon_pretrain.run.config import split_arguments, valid_world_sizes
from canon_pretrain.run.folder import RunFolder
from canon_pretrain.run.log import read_tail
from canon_pretrain.run.source import code_hashes

if TYPE_CHECKING:
    import torch

TIMEOUT_S = 600
MIN_FREE = 0.9  # fraction of a GPU's memory: processes of earlier jobs may use it
MATMUL_SIZE = {"cuda": 8192, "cpu": 512}
SECONDS = {"cuda": 1.0, "cpu": 0.1}
CPU_BYTES = 1 << 25
ELEMENTS = {"cuda": 1 << 26, "cpu": 1 << 20}
ALL_REDUCES = 5
PACKAGES = ("torch", "torchtitan", "numpy")
# names of the measured speeds
MATMUL = "matmul"
MEMORY = "memory"
IN_NODE = "all-reduce in the node"
TWO_NODES = "all-reduce of two nodes"
ALL_NODES = "all-reduce"
# differences from the median clock; a silent run counts as dead after a minute
CLOCK_WARNING_S = 2.0
CLOCK_FAULT_S = 30.0
# fractions of the median speed; a slow CPU, which others may use, is never a fault
SLOW_WARNING = 0.8
SLOW_FAULT = 0.5
# exit codes of `verdict`
EXIT_COMMON = 1
EXIT_BROKEN_NODES = 3  # the job may run without the printed nodes


# -- the job


def check_nodes(global_batch_size: int, nodes: int, ranks_per_node: int) -> None:
    """Raise UserError if the number of ranks does not divide the global batch."""
    if nodes < 1 or ranks_per_node < 1:
        raise UserError(
            "slurm.value", f"{nodes} nodes of {ranks_per_node} ranks: expected 1 or more"
        )
    world_sizes = valid_world_sizes(global_batch_size, ranks_per_node)
    if nodes * ranks_per_node not in world_sizes:
        valid = [world_size // ranks_per_node for world_size in world_sizes]
        raise UserError(
            "config.world_size",
            f"{nodes} node(s) of {ranks_per_node} ranks do not divide training.global_batch_size = "
            f"{global_batch_size}; valid numbers of nodes: {', '.join(map(str, valid)) or 'none'}",
            valid=valid,
        )


class Plan(NamedTuple):
    """What a job writes: its run folder, and the approximate bytes of a checkpoint."""

    run: Path
    checkpoint_bytes: int


def plan_job(
    arguments: Sequence[str], nodes: int, ranks_per_node: int, data: bool = False, gpus: int = 0
) -> Plan:
    """Check a job as its trainer will, and plan its output; with `data`, open its data too.

    `gpus`: number of GPUs of each node, 0 to train on CPUs. Raises UserError.
    """
    from canon_pretrain.titan.device import prepare_device

    prepare_device()
    import torch

    from canon_pretrain.model.counts import num_parameters
    from canon_pretrain.titan.command_line import parse_job
    from canon_pretrain.titan.data import open_data, open_task
    from canon_pretrain.titan.job_config import check_cpu_offload, shard_degree
    from canon_pretrain.titan.optimizers import num_moments, parameter_groups
    from canon_pretrain.titan.spec import on_meta

    # --force is an option of slurm/lib.sh
    trainer_arguments = [argument for argument in arguments if argument != "--force"]
    job = parse_job(trainer_arguments)
    check_nodes(job.training.global_batch_size, nodes, ranks_per_node)
    shard_degree(job, nodes * ranks_per_node)
    check_cpu_offload(job, on_gpu=gpus > 0)
    if open_task(job) is None and data:
        open_data(job)

    # The weights and the optimizer's moments.
    groups = parameter_groups(job.optimizer, on_meta(job.model_args))
    num_elements = num_parameters(job.model_args) + num_moments(groups)
    itemsize = getattr(torch, job.training.dtype).itemsize
    run = Path(job.job.dump_folder).absolute()
    return Plan(run, num_elements * itemsize)


def slow_save_warning(run: RunFolder, show: Callable[[str], str]) -> str | None:
    """Return a warning if the last save took longer than Slurm's KillWait; `show`: scontrol."""
    try:
        events = read_tail(run.log_file, until="checkpoint")
    except UnreadableFile:
        return None

    # Slurm sends SIGTERM, and SIGKILL after KillWait: the last save must fit in between.
    save_times = [event["seconds"] for event in events if event.kind == "checkpoint"]
    config = parse_config(show("config"))
    kill_wait = re.match(r"\d+", config.get("KillWait", ""))  # 30 sec
    if not save_times or kill_wait is None:
        return None
    save_s = save_times[-1]
    if save_s <= int(kill_wait[0]):
        return None

    grace_s = "0"
    if partition := os.environ.get("SLURM_JOB_PARTITION"):
        grace = re.search(r"GraceTime=(\d+)", show(f"partition {partition}"))
        if grace is not None:
            grace_s = grace[1]
    return (
        f"the last checkpoint took {save_s:.0f} s; Slurm kills a job {kill_wait[0]} s "
        f"after SIGTERM (KillWait), plus {grace_s} s if it is preempted "
        "(GraceTime). Lower checkpoint.interval, and raise sbatch --signal=B:USR1@SECONDS"
    )


def scontrol(entity: str) -> str:
    """Return the output of `scontrol show ENTITY`, or its errors; empty without Slurm."""
    command = ["scontrol", "show", *entity.split()]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout or done.stderr


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
    faults = []
    if gpus:
        import torch

        num_gpus = torch.cuda.device_count()
        if num_gpus < gpus:
            faults.append(f"{num_gpus} of {gpus} GPUs are usable")
            try:
                check_cuda()
            except UserError as error:
                faults.append(str(error))

    versions = {name: metadata.version(name) for name in PACKAGES}
    versions["python"] = platform.python_version()
    code_hash = sha256_text(json.dumps(code_hashes()))
    versions["canon_pretrain (its source's SHA-256)"] = code_hash[:12]
    return Report(faults, disk_faults(run, checkpoint_bytes), versions)


def disk_faults(run: Path, checkpoint_bytes: int) -> list[str]:
    """Check that the disk of `run` has space for a checkpoint, and can be written."""
    # An OSError of either is a fault, too.
    faults = []
    try:
        free = free_bytes(run)
        if free < checkpoint_bytes:
            faults.append(
                f"{free:,} bytes are free in {run}, a checkpoint has about {checkpoint_bytes:,}"
            )
        # fsync: a disk that is full or gone may fail only here
        with tempfile.NamedTemporaryFile(dir=run, prefix=f".preflight-{host_name()}-") as file:
            file.write(os.urandom(1 << 20))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        faults.append(f"{run} cannot be written: {error.strerror}")
    return faults


def report_ranks(gpus: int) -> Report:
    """Test this rank's device, then all-reduce within nodes, between neighbors, over all ranks."""
    import torch.distributed as dist

    end_with_torchrun()
    dist.init_process_group("gloo", timeout=timedelta(seconds=TIMEOUT_S))
    try:
        return _test_rank(gpus)
    except RuntimeError as error:
        # of a collective, perhaps by the fault of another rank: no fault of this node
        reason = str(error).splitlines()[0]
        return Report(left_alone=f"a collective failed: {reason}")
    finally:
        dist.destroy_process_group()


def _test_rank(gpus: int) -> Report:
    """Test the device and the network of this rank. RuntimeError: a collective failed."""
    import torch
    import torch.distributed as dist

    node = host_name()
    rank_nodes = _all_gather(node)

    # after a barrier all ranks read their clocks at the same time
    dist.barrier()
    clock_s = time.time()

    # The device alone: with one broken, the collectives of all ranks would fail.
    local_rank = os.environ["LOCAL_RANK"]
    device = torch.device("cpu")
    if gpus:
        device = torch.device("cuda", int(local_rank))
    faults, speeds = check_device(device)
    if gpus and not faults:
        torch.cuda.empty_cache()  # NCCL allocates memory outside of torch
    if any(_all_gather(faults)):
        return Report(faults)

    # The network: within each node, between neighbors, over all.
    for measure, ranks in rank_groups(rank_nodes):
        # every rank creates every group
        group = dist.new_group(
            ranks,
            backend="nccl" if gpus else "gloo",
            timeout=timedelta(seconds=TIMEOUT_S),
        )
        if dist.get_rank() not in ranks:
            continue
        bandwidth = all_reduce_bandwidth(group, len(ranks), device)
        if bandwidth is None:
            tested = f"{len(ranks)} of {len(rank_nodes)} ranks, including those of {node}"
            return Report([f"an all-reduce over {tested}, returned wrong sums"])
        if len(ranks) > 1:  # a neighbor may be slow: keep the faster one
            speeds[measure] = max(bandwidth, speeds.get(measure, 0.0))
    dist.barrier()
    device_name = f"{device.type}:{local_rank}"
    return Report(clock_s=clock_s, speeds={device_name: speeds})


def _all_gather(value: Any) -> list[Any]:
    """Return the values of all ranks, by rank."""
    import torch.distributed as dist

    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


class DeviceCheck(NamedTuple):
    """The faults of a device; FLOP/s and bytes per second of one without faults."""

    faults: list[str]
    speeds: dict[str, float]


def check_device(device: "torch.device") -> DeviceCheck:
    """Multiply matrices and copy memory on a device; verify the results and time them."""
    import torch

    def fault(text: str) -> DeviceCheck:
        return DeviceCheck([f"{device}: {text}"], {})

    size = MATMUL_SIZE[device.type]
    seconds = SECONDS[device.type]
    num_bytes = CPU_BYTES
    dtype = torch.float32
    try:
        # A GPU must be free; a quarter of its memory is tested.
        if device.type == "cuda":
            torch.cuda.set_device(device)
            free, total = torch.cuda.mem_get_info()
            if free < MIN_FREE * total:
                used_gib = (total - free) / 2**30
                total_gib = total / 2**30
                return fault(f"{used_gib:.1f} of {total_gib:.1f} GiB are in use")
            num_bytes = free // 4
            dtype = torch.bfloat16

        # Values of which the results are known exactly.
        ones = torch.ones(size, size, device=device, dtype=dtype)
        source = torch.full((num_bytes,), 90, device=device, dtype=torch.uint8)
        target = torch.zeros_like(source)
        speeds = {
            MATMUL: matmul_flops(device, dtype, size=size, seconds=seconds),
            MEMORY: copy_bandwidth(source, target, seconds=seconds / 2),
        }
        if not bool((ones @ ones == size).all()):
            return fault("a product of ones is wrong")
        if not torch.equal(source, target):
            return fault(f"a copy of {num_bytes:,} bytes is wrong")
        return DeviceCheck([], speeds)
    except RuntimeError as error:
        return fault(str(error).splitlines()[0])


class RankGroup(NamedTuple):
    """Ranks that all-reduce together, and the name of the measure."""

    measure: str
    ranks: list[int]


def rank_groups(rank_nodes: Sequence[str]) -> list[RankGroup]:
    """Return each node's ranks, those of neighbors on a ring of nodes, and all, to use in order.

    `rank_nodes`: the node of each rank.
    """
    node_ranks: dict[str, list[int]] = {}
    for rank, node in enumerate(rank_nodes):
        node_ranks.setdefault(node, []).append(rank)
    nodes = list(node_ranks)
    groups = [RankGroup(IN_NODE, ranks) for ranks in node_ranks.values()]
    if len(nodes) == 1:
        return groups

    if len(nodes) > 2:  # two neighbors are all nodes
        next_nodes = nodes[1:] + nodes[:1]
        neighbors = list(zip(nodes, next_nodes, strict=True))
        # disjoint pairs first, to run in parallel
        for node, neighbor in neighbors[::2] + neighbors[1::2]:
            ranks = sorted(node_ranks[node] + node_ranks[neighbor])
            groups.append(RankGroup(TWO_NODES, ranks))
    all_ranks = list(range(len(rank_nodes)))
    groups.append(RankGroup(ALL_NODES, all_ranks))
    return groups


def all_reduce_bandwidth(group: Any, num_ranks: int, device: "torch.device") -> float | None:
    """Return the bus bandwidth of nccl-tests in bytes/s; None if the sums are wrong."""
    import torch
    import torch.distributed as dist

    # In a sum over n ranks that is right, each element is n.
    ones = torch.ones(ELEMENTS[device.type], device=device)
    dist.all_reduce(ones, group=group)  # connects and synchronizes
    begin = time.perf_counter()
    for _ in range(ALL_REDUCES):
        dist.all_reduce(ones.fill_(1), group=group)
    if not bool((ones == num_ranks).all()):  # waits for the GPU
        return None
    seconds = (time.perf_counter() - begin) / ALL_REDUCES
    # a ring all-reduce sends 2 (n - 1) / n of the bytes from each rank
    sent_share = 2 * (num_ranks - 1) / num_ranks
    return sent_share * ones.nbytes / seconds


# -- the verdict


class Finding(NamedTuple):
    """A difference of a node from the others: a fault, else a warning."""

    node: str
    text: str
    is_fault: bool


class Verdict(NamedTuple):
    """Faults by node; `common`: faults that exclude no node, since all have them."""

    nodes: dict[str, list[str]]
    common: list[str]
    warnings: list[str]


def judge(reports: Mapping[str, Report | None]) -> Verdict:
    """Judge the reports of `report_node`, or of `report_ranks` merged by node; None: missing."""
    present = {node: report for node, report in reports.items() if report is not None}
    # If no node can write to the run folder, the disk is at fault and not the nodes.
    is_disk_broken = all(report.disk for report in present.values())
    common: list[str] = []
    nodes: dict[str, list[str]] = {}
    for node, report in reports.items():
        if report is None:
            nodes[node] = ["no report"]
            continue
        faults = [*report.faults]
        if is_disk_broken:
            common += [text for text in report.disk if text not in common]
        else:
            faults += report.disk
        if faults:
            nodes[node] = faults

    # A fault of one node explains why collectives failed on the others.
    if not nodes:
        for node, report in present.items():
            if report.left_alone:
                common.append(f"{node}: {report.left_alone}")

    # What sets a node apart from the others.
    warnings = []
    for probe in (_other_versions, _wrong_clocks, _slow_devices):
        for node, text, is_fault in probe(present):
            if is_fault:
                nodes.setdefault(node, []).append(text)
            else:
                warnings.append(f"{node}: {text}")
    return Verdict(nodes, common, warnings)


def _other_versions(reports: Mapping[str, Report]) -> Iterator[Finding]:
    """Find nodes whose software is not that of most nodes."""
    names: set[str] = set()
    for report in reports.values():
        names |= report.versions.keys()
    for name in sorted(names):
        versions = [report.versions.get(name, "unknown") for report in reports.values()]
        usual = statistics.mode(versions)
        for node, version in zip(reports, versions, strict=True):
            if version != usual:
                text = f"{name} is {version}, on other nodes {usual}"
                yield Finding(node, text, is_fault=True)


def _wrong_clocks(reports: Mapping[str, Report]) -> Iterator[Finding]:
    """Find nodes whose clocks differ from the median."""
    clocks = {
        node: report.clock_s for node, report in reports.items() if report.clock_s is not None
    }
    for node, clock_s in clocks.items():
        difference_s = abs(clock_s - statistics.median_low(clocks.values()))
        if difference_s > CLOCK_WARNING_S:
            is_fault = difference_s > CLOCK_FAULT_S
            yield Finding(node, f"clock differs by {difference_s:.1f} s", is_fault)


def _slow_devices(reports: Mapping[str, Report]) -> Iterator[Finding]:
    """Find nodes whose slowest device is slower than the median of the nodes' medians."""
    # By measure, node and device.
    speeds: dict[str, dict[str, dict[str, float]]] = defaultdict(lambda: defaultdict(dict))
    for node, report in reports.items():
        for device, device_speeds in report.speeds.items():
            for measure, speed in device_speeds.items():
                speeds[measure][node][device] = speed

    for measure, node_speeds in speeds.items():
        # high: of two nodes or devices, the faster one
        medians = [statistics.median_high(x.values()) for x in node_speeds.values()]
        usual = statistics.median_high(medians)
        unit = "GB/s"
        scale = 1e9
        if measure == MATMUL:
            unit = "TFLOP/s"
            scale = 1e12

        # A node is as slow as its slowest device: ranks wait for each other.
        for node, by_device in node_speeds.items():
            device, speed = min(by_device.items(), key=operator.itemgetter(1))
            share = speed / usual
            if share < SLOW_WARNING:
                text = (
                    f"{device} is slow: {measure} {speed / scale:.3g} {unit}, {share:.0%} "
                    f"of the median {usual / scale:.3g} {unit}"
                )
                is_fault = share < SLOW_FAULT and not device.startswith("cpu")
                yield Finding(node, text, is_fault)


def read_reports(folder: Path, nodes: Sequence[str], *, ranks: bool) -> dict[str, Report | None]:
    """Return the reports by node, None if missing; those of a node's ranks are merged."""
    suffix = ".rank*.json" if ranks else ".json"
    reports: dict[str, Report | None] = dict.fromkeys(nodes)
    for node in nodes:
        for path in sorted(folder.glob(f"{node}{suffix}")):
            report = find_record(path, Report)
            if report is None:
                continue  # truncated by a full disk or a crash

            # The faults and speeds of all ranks of the node, and one failure of a collective.
            merged = reports[node]
            if merged is not None:
                report = replace(
                    report,
                    faults=list(dict.fromkeys(merged.faults + report.faults)),
                    left_alone=report.left_alone or merged.left_alone,
                    speeds=merged.speeds | report.speeds,
                )
            reports[node] = report
    return reports


def print_verdict(folder: Path, nodes: Sequence[str], *, ranks: bool) -> int:
    """Print faults to stderr and the nodes to exclude to stdout; return the exit code."""
    reports = read_reports(folder, nodes, ranks=ranks)
    broken_nodes, common, warnings = judge(reports)
    if ranks and not any(reports.values()):
        common = ["the ranks could not connect: no node has a report"]

    # stderr is for a user, stdout for slurm/lib.sh.
    for text in warnings:
        print(f"WARNING: {text}", file=sys.stderr)
    for text in common:
        print(f"FAULT: {text}", file=sys.stderr)
    for node, faults in broken_nodes.items():
        print(f"FAULT of node {node}: {'; '.join(faults)}", file=sys.stderr)

    if common:
        return EXIT_COMMON
    if broken_nodes:
        print(",".join(broken_nodes))
        return EXIT_BROKEN_NODES
    return 0


# -- the command


def main(argv: list[str] | None = None) -> None:
    """Run a command; `job` prints the run folder and a checkpoint's bytes, NUL-terminated."""
    arguments, trainer_arguments = split_arguments(argv)
    with command(prints=arguments[:1] in (["job"], ["verdict"])):
        options = _parse(arguments)
        if options.command == "job":
            plan = plan_job(
                trainer_arguments,
                options.nodes,
                options.ranks_per_node,
                data=options.data,
                gpus=options.gpus,
            )
            if text := slow_save_warning(RunFolder(plan.run), scontrol):
                print(f"WARNING: {text}", file=sys.stderr)
            sys.stdout.write(f"{plan.run}\0{plan.checkpoint_bytes}\0")

        elif options.command == "node":
            report = report_node(options.run, options.bytes, options.gpus)
            path = options.report / f"{host_name()}.json"
            write_json(path, asdict(report))

        elif options.command == "ranks":
            report = report_ranks(options.gpus)
            local_rank = os.environ["LOCAL_RANK"]
            path = options.report / f"{host_name()}.rank{local_rank}.json"
            write_json(path, asdict(report))

        else:  # verdict
            nodes = [node for node in options.nodes.split(",") if node]
            raise SystemExit(print_verdict(options.report, nodes, ranks=options.ranks))


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = Parser(
        prog="python -m canon_pretrain.cluster.preflight",
        description="Used by slurm/lib.sh.",
        epilog=EPILOG,
    )
    commands = parser.add_subparsers(dest="command", required=True)

    job = commands.add_parser("job")
    job.add_argument("--nodes", type=int, required=True)
    job.add_argument("--ranks-per-node", type=int, required=True)
    job.add_argument("--data", action="store_true", help="also check the data")

    node = commands.add_parser("node")
    node.add_argument("--run", type=Path, required=True)
    node.add_argument("--bytes", type=int, default=0, help="approximate size of a checkpoint")

    ranks = commands.add_parser("ranks")

    verdict = commands.add_parser("verdict")
    verdict.add_argument("--nodes", required=True, help="comma-separated names of all nodes")
    verdict.add_argument("--ranks", action="store_true", help="read the ranks' reports")

    for subparser in (node, ranks, verdict):
        subparser.add_argument("--report", type=Path, required=True, metavar="DIR")
    for subparser in (job, node, ranks):
        subparser.add_argument("--gpus", type=int, default=0, help="expected GPUs; 0: CPUs")
    return parser.parse_args(argv)


if __name__ == "__main__":
    run_process(main)
