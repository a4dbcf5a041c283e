"""What a job is checked for before and on its nodes, so that a broken one is named, not guessed.

    python -m canon_pretrain.preflight job --nodes 2 --ranks_per_node 8 -- --config FILE.toml ...
    python -m canon_pretrain.preflight node --report DIR --run RUN --bytes N [--gpus 8]
    torchrun ... -m canon_pretrain.preflight ranks --report DIR [--gpus 8]
    python -m canon_pretrain.preflight verdict --report DIR --nodes n1,n2 [--ranks]

slurm/lib.sh calls them in this order before each launch: `job` on the first node (and before
sbatch, by slurm/submit.sh), `node` once on each node, `ranks` as all ranks of the run. Nodes and
ranks leave reports in DIR, which `verdict` puts together; it names the nodes at fault.
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
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from canon_pretrain.errors import UserError, exit_with
from canon_pretrain.files import free_bytes, write_json
from canon_pretrain.run.folder import RunFolder
from canon_pretrain.run.holder import host_name
from canon_pretrain.run.log import read_tail

if TYPE_CHECKING:  # it imports torchtitan, which must wait for prepare_device()
    from canon_pretrain.titan.job_config import CanonJobConfig

EXIT_BROKEN_NODES = 3
"""Exit code of `verdict` where leaving out the nodes that it names may help."""
CLOCK_WARNING_S, CLOCK_FAULT_S = 2.0, 30.0
"""Half of the minute after which a silent run counts as dead, by another node's clock."""
TIMEOUT_S = 120
WRITE_BYTES = 1 << 20
ELEMENTS = 1 << 20
PACKAGES = ("torch", "torchtitan", "numpy")


# -- job: on one node, before anything starts ---------------------------------------------------


def valid_node_counts(global_batch_size: int, ranks_per_node: int) -> list[int]:
    """The numbers of nodes, of `ranks_per_node` ranks each, that can share a global batch."""
    counts = range(1, global_batch_size // ranks_per_node + 1)
    return [nodes for nodes in counts if global_batch_size % (nodes * ranks_per_node) == 0]


def check_nodes(job: "CanonJobConfig", nodes: int, ranks_per_node: int) -> None:
    """Raise UserError, with the numbers that can be, where these ranks can't share a batch."""
    total = job.training.global_batch_size
    if nodes < 1 or ranks_per_node < 1:
        raise UserError(f"{nodes} node(s) of {ranks_per_node} rank(s): expected at least 1 of each")
    valid = valid_node_counts(total, ranks_per_node)
    if nodes in valid:
        return
    given = f"{nodes} node(s) of {ranks_per_node} can't share training.global_batch_size = {total}"
    if not valid:
        fitting = [n for n in range(1, total + 1) if total % n == 0]
        raise UserError(
            f"{given}, nor can any other number of nodes of {ranks_per_node}. Numbers of ranks per "
            f"node that can, on 1 node: {', '.join(map(str, fitting))} (GPUS_PER_NODE, or "
            "RANKS_PER_NODE)"
        )
    raise UserError(
        f"{given}. Numbers of nodes that can: {', '.join(map(str, valid))} (sbatch --nodes), of "
        f"{ranks_per_node} each"
    )


def plan_job(arguments: list[str], nodes: int, ranks_per_node: int) -> tuple[Path, int]:
    """The run folder of a job, absolute, and about how many bytes a checkpoint of it takes.

    `arguments` are those of canon_pretrain.train. Raises UserError for a job that can't be.
    """
    from canon_pretrain.titan.device import prepare_device

    prepare_device()
    from torchtitan.config import TORCH_DTYPE_MAP

    from canon_pretrain.model.args import num_parameters
    from canon_pretrain.titan.command_line import parse_job

    job = parse_job(arguments)
    check_nodes(job, nodes, ranks_per_node)
    # weights and AdamW's two moments; an upper bound where a part is not trained
    numbers = 3 * num_parameters(job.model_args)
    size = numbers * TORCH_DTYPE_MAP[job.training.dtype].itemsize
    return Path(job.job.dump_folder).absolute(), size


def words_on_waits(run: RunFolder, show: Callable[[str], str]) -> str | None:
    """A warning where Slurm kills sooner after SIGTERM than this run's last save took.

    `show` gives the output of `scontrol show ...`. None where all is well, or nothing is known.
    """
    try:
        saves = [e for e in read_tail(run.log_file, until="checkpoint") if "seconds" in e]
        save_s = next(float(e["seconds"]) for e in reversed(saves) if e["event"] == "checkpoint")
    except (OSError, StopIteration, ValueError, TypeError):
        return None
    partition = os.environ.get("SLURM_JOB_PARTITION", "")
    kill = _number(r"KillWait\s*=\s*(\d+)", show("config"))
    grace = _number(r"GraceTime=(\d+)", show(f"partition {partition}")) if partition else 0
    if kill is None or save_s <= kill:
        return None
    text = f"the last checkpoint took {save_s:.0f} s, and Slurm kills {kill} s after SIGTERM"
    text += f" (KillWait), {grace or 0} s later where partition {partition} preempts (GraceTime)."
    return (
        f"{text} A cancelled, preempted or failed job may then lose the steps since its last "
        "checkpoint: a lower checkpoint.interval makes them fewer. The time limit's signal comes "
        "early enough by itself (#SBATCH --signal)"
    )


def _number(pattern: str, text: str) -> int | None:
    found = re.search(pattern, text)
    return int(found[1]) if found else None


def _scontrol(what: str) -> str:
    """The output of `scontrol show WHAT`; empty where there is none."""
    try:
        command = ["scontrol", "show", *what.split()]
        return subprocess.run(command, capture_output=True, text=True, timeout=30).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""


# -- node and ranks: their reports --------------------------------------------------------------


def report_node(run: Path, checkpoint_bytes: int, gpus: int) -> dict[str, Any]:
    """This node's report: `faults`, which end a launch, and the versions that all must share."""
    faults = []
    try:
        if (free := free_bytes(run)) < checkpoint_bytes:
            faults.append(
                f"{free:,} bytes are free in {run}, a checkpoint takes about {checkpoint_bytes:,}"
            )
        with tempfile.NamedTemporaryFile(dir=run, prefix=f".preflight-{host_name()}-") as file:
            file.write(content := os.urandom(WRITE_BYTES))
            file.flush()
            os.fsync(file.fileno())
            if Path(file.name).read_bytes() != content:
                faults.append(f"{run}: what was written is not what is read")
    except OSError as error:
        faults.append(f"{run} cannot be written to: {error.strerror}")
    if gpus:
        import torch

        if (found := torch.cuda.device_count()) < gpus:
            faults.append(f"{found} of {gpus} GPUs can be used")
    return {"faults": faults, "versions": _versions()}


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = "not installed"
    digest = hashlib.sha256()
    root = Path(__file__).resolve().parent
    for path in sorted(root.rglob("*.py")):
        digest.update(f"{path.relative_to(root)}\n".encode() + path.read_bytes())
    return versions | {"canon_pretrain (its source's SHA-256)": digest.hexdigest()[:12]}


def report_ranks(gpus: int) -> dict[str, Any]:
    """What this rank finds when all ranks meet: `faults`, and `clock_s` just after a barrier.

    All of a node's ranks add up numbers first, then all ranks do: a GPU or a link that does not
    work is found before the model is built, and a node's own fault on that node.
    """
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo", timeout=timedelta(seconds=TIMEOUT_S))
    try:
        world, node = dist.get_world_size(), host_name()
        everyone: list[str] = [""] * world
        dist.all_gather_object(everyone, node)
        dist.barrier()
        clock_s = time.time()
        device = torch.device("cpu")
        if gpus:
            device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
            torch.cuda.set_device(device)
        backend = "nccl" if gpus else "gloo"
        nodes = list(dict.fromkeys(everyone))
        parts = [[rank for rank in range(world) if everyone[rank] == each] for each in nodes]
        for ranks in (*parts, list(range(world))):
            group = dist.new_group(ranks, backend=backend, timeout=timedelta(seconds=TIMEOUT_S))
            if dist.get_rank() not in ranks:
                continue
            ones = torch.ones(ELEMENTS, device=device)
            dist.all_reduce(ones, group=group)
            if not bool((ones == len(ranks)).all()):
                there = f"the ranks of {node}" if len(ranks) < world else "all ranks"
                return {"faults": [f"an all-reduce of ones over {there} gave other sums"]}
        dist.barrier()
        return {"faults": [], "clock_s": clock_s}
    except RuntimeError as error:
        # another rank's fault may be the reason: this one counts where no rank has one of its own
        return {"faults": [], "left_alone": f"a collective failed: {str(error).splitlines()[0]}"}
    finally:
        dist.destroy_process_group()


# -- verdict ------------------------------------------------------------------------------------


def judge(
    reports: Mapping[str, Mapping[str, Any] | None], *, ranks: bool = False
) -> tuple[dict[str, list[str]], list[str]]:
    """The faults of each node that has any, and warnings.

    `reports` is by node, None where there is none; with `ranks`, what `report_ranks` gave.
    """
    faults: dict[str, list[str]] = {}
    warnings = []
    for node, report in reports.items():
        if report is None:
            faults[node] = ["it did not report"]
        elif report["faults"]:
            faults[node] = list(report["faults"])
    there = {node: report for node, report in reports.items() if report is not None}
    if ranks:
        if not faults:
            left_alone = {n: each["left_alone"] for n, each in there.items() if "left_alone" in each}
            faults = {node: [text] for node, text in left_alone.items()}
        clocks = {node: each["clock_s"] for node, each in there.items() if "clock_s" in each}
        middle = statistics.median_low(clocks.values()) if clocks else 0.0
        for node, clock_s in clocks.items():
            if (off := abs(clock_s - middle)) > CLOCK_WARNING_S:
                text = f"its clock is {off:.1f} s off the others'"
                if off > CLOCK_FAULT_S:
                    faults.setdefault(node, []).append(text)
                else:
                    warnings.append(f"{node}: {text}")
        return faults, warnings
    for name in sorted({name for each in there.values() for name in each["versions"]}):
        values = {node: each["versions"].get(name, "unknown") for node, each in there.items()}
        common = Counter(values.values()).most_common(1)[0][0]
        for node, value in values.items():
            if value != common:
                text = f"{name} is {value}, elsewhere {common}"
                faults.setdefault(node, []).append(text)
    return faults, warnings


def read_reports(folder: Path, nodes: Sequence[str], *, ranks: bool) -> dict[str, Any]:
    """The reports by node; those of a node's ranks are one."""
    reports: dict[str, Any] = {}
    for node in nodes:
        found = sorted(folder.glob(f"{node}.rank*.json" if ranks else f"{node}.json"))
        reports[node] = None
        for path in found:
            try:
                report = json.loads(path.read_bytes())
            except ValueError:
                continue  # cut short by a full disk, or a crash
            faults = (reports[node] or {"faults": []})["faults"] + report["faults"]
            reports[node] = {**(reports[node] or {}), **report, "faults": list(dict.fromkeys(faults))}
    return reports


def main(argv: list[str] | None = None) -> None:
    """See the module. `job` prints the run folder and the bytes, each ended by a NUL byte."""
    argv = sys.argv[1:] if argv is None else argv
    own, rest = _split(argv)
    arguments = _parser().parse_args(own)
    try:
        if arguments.command == "job":
            folder, size = plan_job(rest, arguments.nodes, arguments.ranks_per_node)
            if text := words_on_waits(RunFolder(folder), _scontrol):
                print(f"WARNING: {text}", file=sys.stderr)
            sys.stdout.write(f"{folder}\0{size}\0")
        elif arguments.command == "node":
            report = report_node(arguments.run, arguments.bytes, arguments.gpus)
            write_json(arguments.report / f"{host_name()}.json", report)
        elif arguments.command == "ranks":
            report = report_ranks(arguments.gpus)
            name = f"{host_name()}.rank{os.environ['LOCAL_RANK']}.json"
            write_json(arguments.report / name, report)
        else:
            raise SystemExit(_verdict(arguments))
    except UserError as error:
        exit_with(error)


def _verdict(arguments: argparse.Namespace) -> int:
    """Tell faults on stderr; where some nodes have none, the others' names on stdout."""
    nodes = [name for name in arguments.nodes.split(",") if name]
    reports = read_reports(arguments.report, nodes, ranks=arguments.ranks)
    faults, warnings = judge(reports, ranks=arguments.ranks)
    for text in warnings:
        print(f"WARNING: {text}", file=sys.stderr)
    for node, texts in faults.items():
        print(f"node {node} is not fit: {'; '.join(texts)}", file=sys.stderr)
    if not faults:
        return 0
    if len(faults) == len(nodes):
        return 1
    print(",".join(faults))
    return EXIT_BROKEN_NODES


def _split(argv: list[str]) -> tuple[list[str], list[str]]:
    """What stands before and after `--`."""
    place = argv.index("--") if "--" in argv else len(argv)
    return argv[:place], argv[place + 1 :]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m canon_pretrain.preflight", description=(__doc__ or "").split("\n")[0]
    )
    commands = parser.add_subparsers(dest="command", required=True)
    job = commands.add_parser("job", help="check a job's arguments (after --) and its nodes")
    job.add_argument("--nodes", type=int, required=True)
    job.add_argument("--ranks_per_node", type=int, required=True)
    node = commands.add_parser("node", help="check the node that this runs on")
    node.add_argument("--run", type=Path, required=True)
    node.add_argument("--bytes", type=int, default=0, help="about the size of a checkpoint")
    ranks = commands.add_parser("ranks", help="let all ranks meet; under torchrun")
    verdict = commands.add_parser("verdict", help="put the reports together")
    verdict.add_argument("--nodes", required=True, help="comma-separated names of all nodes")
    verdict.add_argument("--ranks", action="store_true", help="judge the ranks' reports")
    for each in (node, ranks, verdict):
        each.add_argument("--report", type=Path, required=True, metavar="DIR")
    for each in (node, ranks):
        each.add_argument("--gpus", type=int, default=0, help="GPUs that must be there; 0: CPUs")
    return parser


if __name__ == "__main__":
    main()
