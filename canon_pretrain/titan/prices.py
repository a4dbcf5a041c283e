"""Compute the time of a step of several configs, for `canon_pretrain.cluster.prices`.

    python -m canon_pretrain.titan.prices '{"gpu": "h100", "world_size": 1}' < CONFIGS

Reads a JSON list of the trainer's arguments per config from standard input, and prints a JSON list
of {"seconds": [slow, likely, fast], "steps": N, "mixer_backend": "triton"}.
"""

import json
import sys

from canon_pretrain.core.cli import command, run_process
from canon_pretrain.core.errors import check_choice
from canon_pretrain.machine.gpus import GPUS
from canon_pretrain.titan.command_line import parse_job
from canon_pretrain.titan.dry_run import Plan, reference


def main() -> None:
    with command(prints=True):
        options = json.loads(sys.argv[1])
        gpu = options["gpu"].lower()
        check_choice("--gpu", gpu, GPUS)
        device = reference(gpu)

        rows = []
        for arguments in json.load(sys.stdin):
            job = parse_job(arguments, quiet=True)
            plan = Plan(job, device, options["world_size"])
            rows.append(
                {
                    "seconds": plan.step_seconds,
                    "steps": job.last_step,
                    "mixer_backend": plan.recurrence,
                }
            )
        print(json.dumps(rows))


if __name__ == "__main__":
    run_process(main)
