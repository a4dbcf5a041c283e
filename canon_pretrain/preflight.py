"""Check a job before and on its nodes, so that a broken node is named, not guessed.

    python -m canon_pretrain.preflight job --nodes 2 --ranks_per_node 8 -- --config FILE.toml ...
    python -m canon_pretrain.preflight node --report DIR --run RUN --bytes N [--gpus 8]
    torchrun ... -m canon_pretrain.preflight ranks --report DIR [--gpus 8]
    python -m canon_pretrain.preflight verdict --report DIR --nodes n1,n2 [--ranks]

slurm/lib.sh calls them in this order before each launch: `job` on the first node (and before
sbatch, by slurm/submit.sh), `node` once on each node, `ranks` as all ranks of the run. Nodes and
ranks leave reports in DIR, which `verdict` judges (cluster/preflight.py). An entry point, as
train.py is: `job` reads the job as the trainer will.
"""

import sys
from pathlib import Path

from canon_pretrain.cluster import preflight
from canon_pretrain.core.errors import UserError


def check_nodes(global_batch_size: int, nodes: int, ranks_per_node: int) -> None:
    """Raise UserError, with the numbers that fit, if these ranks can't share a global batch."""
    from canon_pretrain.run.config import valid_world_sizes

    if nodes < 1 or ranks_per_node < 1:
        raise UserError(f"{nodes} node(s) of {ranks_per_node} rank(s): expected at least 1 of each")
    worlds = valid_world_sizes(global_batch_size, ranks_per_node)
    if nodes * ranks_per_node in worlds:
        return
    given = (
        f"{nodes} node(s) of {ranks_per_node} can't share training.global_batch_size = "
        f"{global_batch_size}"
    )
    if not worlds:
        fitting = ", ".join(map(str, valid_world_sizes(global_batch_size)))
        raise UserError(
            f"{given}, nor can any other number of nodes of {ranks_per_node}. Numbers of ranks per "
            f"node that can, on 1 node: {fitting} (GPUS_PER_NODE, or RANKS_PER_NODE)"
        )
    raise UserError(
        f"{given}. Numbers of nodes that can: {', '.join(str(n // ranks_per_node) for n in worlds)}"
        f" (sbatch --nodes), of {ranks_per_node} each"
    )


def plan_job(
    arguments: list[str], nodes: int, ranks_per_node: int, data: bool = False
) -> tuple[Path, int]:
    """Return the run folder of a job, absolute, and about how many bytes its checkpoints take.

    `arguments` are those of canon_pretrain.train. Raises UserError for a job that can't be; with
    `data`, also if its shards are not there.
    """
    from canon_pretrain.titan.device import prepare_device

    prepare_device()
    import torch

    from canon_pretrain.model.args import num_parameters
    from canon_pretrain.titan.command_line import FORCE, parse_job
    from canon_pretrain.titan.data import open_shards
    from canon_pretrain.titan.job_config import shard_degree

    job = parse_job([word for word in arguments if word != FORCE])
    check_nodes(job.training.global_batch_size, nodes, ranks_per_node)
    shard_degree(job, nodes * ranks_per_node)
    if data:
        open_shards(job).close()
    # weights and AdamW's two moments; an upper bound where a part is not trained
    numbers = 3 * num_parameters(job.model_args)
    size = numbers * getattr(torch, job.training.dtype).itemsize
    return Path(job.job.dump_folder).absolute(), size


def main(argv: list[str] | None = None) -> None:
    preflight.main(sys.argv[1:] if argv is None else argv, plan_job)


if __name__ == "__main__":
    main()
