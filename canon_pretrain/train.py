"""The entry point: read the TOML, check it against the machine and the data, hand over.

    torchrun --nproc-per-node 2 -m canon_pretrain.train --config train_configs/quickstart.toml
    python -m canon_pretrain.train --config train_configs/quickstart.toml        (one rank)

Any `--section.key value` after it wins over the file; --help lists them all. `--dry_run [--gpu
h100|h200|a100] [--world N] [--mfu F]` prints what the run would take, and trains nothing; `--force`
starts a run that by the estimate does not fit in this machine's memory. Bad input is one message
and exit code 2. (torchrun itself turns any failure of a worker into its own report and exit code 1;
the message stands above that report.)
"""

import argparse
import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from canon_pretrain.core.cli import check_encoding, words
from canon_pretrain.core.errors import UserError, exit_with
from canon_pretrain.kernels.hardware import check_cuda
from canon_pretrain.run.folder import RunFolder
from canon_pretrain.run.session import Session
from canon_pretrain.titan.device import device_count, has_accelerator, prepare_device
from canon_pretrain.titan.environment import (
    check_launch,
    prepare_process,
    stand_alone,
    take_device,
)
from canon_pretrain.titan.key_names import FORCE, check_names
from canon_pretrain.titan.logs import init_logging

if TYPE_CHECKING:  # it imports torchtitan, which must wait for prepare_device()
    from canon_pretrain.titan.dry_run import Device
    from canon_pretrain.titan.job_config import CanonJobConfig


def main(argv: list[str] | None = None) -> None:
    """Run one training job; `argv` defaults to the command line. Exits with code 2 on bad input."""
    argv = sys.argv[1:] if argv is None else argv
    # a fault that all ranks share is printed once per node: files may be missing on one node alone
    quiet = os.environ.get("LOCAL_RANK", "0") != "0" and "LOCAL_WORLD_SIZE" in os.environ
    try:
        check_encoding()
        check_names(argv)  # torch takes seconds to import
        prepare_process()
    except UserError as error:
        exit_with(error, quiet=quiet)
    prepare_device()
    with words(), stand_alone():
        _main(argv, quiet=quiet)


def _main(argv: list[str], *, quiet: bool) -> None:
    is_first = os.environ.get("RANK", "0") == "0"
    try:
        check_launch()
        take_device()
        _run(argv, quiet=quiet)
    except UserError as error:
        # torchtitan wrote its traceback for torchrun's report; the message is all there is to say
        if report := os.environ.get("TORCHELASTIC_ERROR_FILE"):
            Path(report).unlink(missing_ok=True)
        exit_with(error, quiet=error.shared and not is_first or quiet and not _training())


def _training() -> bool:
    """Whether the ranks have met: from then on a rank may fail alone, and speaks for itself."""
    import torch.distributed

    return torch.distributed.is_initialized()


def _run(argv: list[str], *, quiet: bool) -> None:
    """Parse, check, train, and take the process group down again."""
    # torchtitan reads the device at import time: only after prepare_device()
    import torch

    from canon_pretrain.titan.command_line import parse_job
    from canon_pretrain.titan.dry_run import check_memory, this_machine
    from canon_pretrain.titan.job_config import micro_batch_size, shard_degree
    from canon_pretrain.titan.launch import checkpoints_outside, leave_folder, prepare_folder
    from canon_pretrain.titan.opened import open_data
    from canon_pretrain.titan.trainer import CanonTrainer

    world_size = int(os.environ["WORLD_SIZE"])
    options, argv = _own_options(argv)
    job = parse_job(argv, quiet=quiet)
    if options.dry_run:
        _print_dry_run(job, options, world_size, quiet=quiet)
        return
    check_cuda()
    micro_batch_size(job, world_size)
    shard_degree(job, world_size)
    data, warnings = None, []
    if os.environ["LOCAL_RANK"] == "0":  # the others of its node take over what it has read
        data = open_data(job)
        here = this_machine(int(os.environ["LOCAL_WORLD_SIZE"]))
        if not options.force:
            check_memory(job, here, world_size)
        warnings = [*data.notices, *_first_words(job, here, world_size)]
    rank = int(os.environ["RANK"])
    init_logging(rank)
    for warning in warnings:
        _say(f"NOTE: {warning}")
    trainer = None
    with Session(
        RunFolder(Path(job.job.dump_folder)),
        rank=rank,
        world_size=world_size,
        steps=job.training.steps,
        heartbeat_s=job.run.heartbeat_s,
        checkpoints=checkpoints_outside(job),
        say=_say,
    ) as session:
        record = None
        if rank == 0 and data is not None:
            fingerprint = data.training.fingerprint
            record = prepare_folder(job, session, fingerprint=fingerprint, arguments=argv)
        try:
            trainer = CanonTrainer(
                job,
                world_size=world_size,
                data=data,
                session=session,
                record=record,
            )
            trainer.train()
        finally:
            if trainer is not None:
                trainer.close()
            if record is not None:
                leave_folder(session, record)
    torch.distributed.destroy_process_group()


def _say(text: str) -> None:
    logging.getLogger().info(text)


def _own_options(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """--force, and --dry_run with its options; and the words that are left for the job."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--dry_run", "--dry-run", action="store_true")
    parser.add_argument(FORCE, action="store_true")
    parser.add_argument("--gpu")
    parser.add_argument("--world", type=int)
    parser.add_argument("--mfu", type=float)
    try:
        options, rest = parser.parse_known_args(argv)
    except argparse.ArgumentError as error:
        raise UserError(str(error)) from None
    given = [f"--{name}" for name in ("gpu", "world", "mfu") if getattr(options, name) is not None]
    if given and not options.dry_run:
        raise UserError(f"{', '.join(given)} belong(s) to --dry_run, which is not given")
    return options, rest


def _print_dry_run(
    job: "CanonJobConfig", options: argparse.Namespace, world_size: int, *, quiet: bool
) -> None:
    """Make the plan on every rank, so that all fail alike; one prints it."""
    from canon_pretrain.core.terminal import Console
    from canon_pretrain.titan import dry_run

    plans = dry_run.make_plans(job, options.gpu, options.world, options.mfu, world_size)
    if not quiet:
        dry_run.print_plans(job, plans, Console())


def _first_words(job: "CanonJobConfig", here: "Device", world_size: int) -> Iterator[str]:
    """What a person should know before a real run begins to use up their time."""
    from canon_pretrain.titan.dry_run import describe_duration

    ranks, devices = int(os.environ["LOCAL_WORLD_SIZE"]), device_count()
    if has_accelerator() and ranks < devices:
        yield (
            f"this run uses {ranks} of the {devices} GPUs of this node; torchrun "
            f"--nproc-per-node {devices} would use all"
        )
    if duration := describe_duration(job, here, world_size):
        yield duration


if __name__ == "__main__":
    main()
