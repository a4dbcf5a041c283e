"""The job as a whole, before anything starts: its nodes, its run folder, Slurm's waits.

preflight/__main__.py's `job` calls it, on one node of the job or where it is submitted.
"""

import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from canon_pretrain.core.errors import UserError
from canon_pretrain.core.files import UnreadableFile
from canon_pretrain.run.folder import RunFolder
from canon_pretrain.run.log import read_tail

if TYPE_CHECKING:  # it imports torchtitan, which must wait for prepare_device()
    from canon_pretrain.titan.job_config import CanonJobConfig


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


def plan_job(
    arguments: list[str], nodes: int, ranks_per_node: int, *, data: bool = False
) -> tuple[Path, int]:
    """The run folder of a job, absolute, and about how many bytes a checkpoint of it takes.

    `arguments` are those of canon_pretrain.train. Raises UserError for a job that can't be; with
    `data`, also where its shards are not there.
    """
    from canon_pretrain.titan.device import prepare_device

    prepare_device()
    from torchtitan.config import TORCH_DTYPE_MAP

    from canon_pretrain.model.args import num_parameters
    from canon_pretrain.titan.command_line import parse_job
    from canon_pretrain.titan.data import open_shards
    from canon_pretrain.titan.job_config import shard_degree
    from canon_pretrain.titan.key_names import FORCE

    job = parse_job([word for word in arguments if word != FORCE])
    check_nodes(job, nodes, ranks_per_node)
    shard_degree(job, nodes * ranks_per_node)
    if data:
        open_shards(job).close()
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
    except (UnreadableFile, StopIteration, ValueError, TypeError):
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
        "checkpoint: a lower checkpoint.interval makes them fewer. The time limit's signal should "
        "come earlier than that, too (sbatch --signal=B:USR1@SECONDS; 300 unless given)"
    )


def _number(pattern: str, text: str) -> int | None:
    found = re.search(pattern, text)
    return int(found[1]) if found else None


def scontrol(what: str) -> str:
    """The output of `scontrol show WHAT`; empty where there is none."""
    try:
        command = ["scontrol", "show", *what.split()]
        return subprocess.run(command, capture_output=True, text=True, timeout=30).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""
