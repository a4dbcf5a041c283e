"""What a job is checked for before and on its nodes, so that a broken one is named, not guessed.

    python -m canon_pretrain.preflight job --nodes 2 --ranks_per_node 8 -- --config FILE.toml ...
    python -m canon_pretrain.preflight node --report DIR --run RUN --bytes N [--gpus 8]
    torchrun ... -m canon_pretrain.preflight ranks --report DIR [--gpus 8]
    python -m canon_pretrain.preflight verdict --report DIR --nodes n1,n2 [--ranks]

slurm/lib.sh calls them in this order before each launch: `job` on the first node (and before
sbatch, by slurm/submit.sh), `node` once on each node, `ranks` as all ranks of the run. Nodes and
ranks leave reports in DIR, which `verdict` puts together; it names the nodes at fault. `ranks` also
measures products, memory and all-reduces: a node below 80 % of the usual speed is warned of, a GPU
below 50 % is a fault of its node.
"""

import argparse
import os
import sys
from pathlib import Path

from canon_pretrain.core.cli import command
from canon_pretrain.core.files import write_json
from canon_pretrain.core.holder import host_name
from canon_pretrain.preflight.job import plan_job, scontrol, words_on_waits
from canon_pretrain.preflight.reports import report_node, report_ranks
from canon_pretrain.preflight.verdict import (
    describe_speeds,
    judge_nodes,
    judge_ranks,
    read_reports,
)
from canon_pretrain.run.folder import RunFolder

EXIT_BROKEN_NODES = 3
"""Exit code of `verdict` where leaving out the nodes that it names may help; 1 where not."""


def main(argv: list[str] | None = None) -> None:
    """See the module. `job` prints the run folder and the bytes, each ended by a NUL byte."""
    argv = sys.argv[1:] if argv is None else argv
    own, rest = _split(argv)
    with command(prints=own[:1] in (["job"], ["verdict"])):
        arguments = _parser().parse_args(own)
        if arguments.command == "job":
            sizes = (arguments.nodes, arguments.ranks_per_node)
            folder, size = plan_job(rest, *sizes, data=arguments.data)
            if text := words_on_waits(RunFolder(folder), scontrol):
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


def _verdict(arguments: argparse.Namespace) -> int:
    """Tell what is wrong on stderr, and the names of the nodes to leave out on stdout."""
    nodes = [name for name in arguments.nodes.split(",") if name]
    reports = read_reports(arguments.report, nodes, ranks=arguments.ranks)
    verdict = judge_ranks(reports) if arguments.ranks else judge_nodes(reports)
    for node, report in reports.items():
        if report and (text := describe_speeds(report)):
            print(f"{node}: {text}", file=sys.stderr)
    for text in verdict.warnings:
        print(f"WARNING: {text}", file=sys.stderr)
    for text in verdict.common:
        print(f"not fit: {text}", file=sys.stderr)
    for node, texts in verdict.nodes.items():
        print(f"node {node} is not fit: {'; '.join(texts)}", file=sys.stderr)
    if verdict.common:
        return 1
    if verdict.nodes:
        print(",".join(verdict.nodes))
        return EXIT_BROKEN_NODES
    return 0


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
    job.add_argument("--data", action="store_true", help="look for the data too")
    node = commands.add_parser("node", help="check the node that this runs on")
    node.add_argument("--run", type=Path, required=True)
    node.add_argument("--bytes", type=int, default=0, help="about the size of a checkpoint")
    ranks = commands.add_parser(
        "ranks", help="try and measure each rank's device, and let all ranks meet; under torchrun"
    )
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
