"""The training command: check the TOML against the machine and the data, then train.

    torchrun --nproc-per-node 2 -m canon_pretrain.train --config train_configs/quickstart.toml

Any `--section.key value` overrides the file; see --help.
"""

import argparse
import os
import sys
import time
from pathlib import Path
from typing import NoReturn

from canon_pretrain.core.children import end_with_torchrun, separate_sessions
from canon_pretrain.core.cli import Parser, check_encoding, resilient_output, run_process
from canon_pretrain.core.errors import UserError, exit_with
from canon_pretrain.core.terminal import Console
from canon_pretrain.machine.device import check_cuda
from canon_pretrain.run.folder import RunFolder
from canon_pretrain.run.session import Session
from canon_pretrain.titan import device
from canon_pretrain.titan.console import init_logging, logger
from canon_pretrain.titan.keys import answer_early

QUIET_S = 10.0
"""How long a rank waits for another one to print the error that both have."""


def main(argv: list[str] | None = None) -> None:
    """Train one job; exit with code 2 on bad input."""
    argv = sys.argv[1:] if argv is None else argv
    end_with_torchrun()

    # What needs no torch, which takes seconds to import.
    # print an error of all ranks once per node: a file may be missing on one node only
    quiet = os.environ.get("LOCAL_RANK", "0") != "0" and "LOCAL_WORLD_SIZE" in os.environ
    try:
        check_encoding()
        answer_early(_split_options(argv)[1], quiet=quiet)
        device.prepare_process()
    except UserError as error:
        _exit_with(error, quiet=quiet)

    device.prepare_device()
    with separate_sessions(), resilient_output(), device.single_rank_environment():
        import torch.distributed

        try:
            device.check_launch()
            device.check_compiler_cache()
            device.bind_device()
            _run(argv, quiet=quiet)
        except UserError as error:
            # remove the traceback that torchtitan wrote for torchrun: the message is enough
            if report := os.environ.get("TORCHELASTIC_ERROR_FILE"):
                Path(report).unlink(missing_ok=True)
            # in a process group a single rank may fail, and prints its own message
            connected = torch.distributed.is_initialized()
            printed_by_rank_0 = error.shared and os.environ.get("RANK", "0") != "0"
            _exit_with(error, quiet=printed_by_rank_0 or quiet and not connected)


def _exit_with(error: UserError, *, quiet: bool) -> NoReturn:
    """Print `error` and exit with code 2; if `quiet`, let the rank that prints it end first.

    torchrun ends all ranks when the first one fails: if that were this one, the error would not be
    printed.
    """
    if quiet:
        time.sleep(QUIET_S)
    exit_with(error)


def _run(argv: list[str], *, quiet: bool) -> None:
    """Parse, check, train, and destroy the process group."""
    # torchtitan looks up the device when imported: import it after prepare_device()
    import torch

    from canon_pretrain.titan import dry_run
    from canon_pretrain.titan.command_line import parse_job
    from canon_pretrain.titan.data import open_data
    from canon_pretrain.titan.job_config import check_cpu_offload, micro_batch_size, shard_degree
    from canon_pretrain.titan.launch import checkpoints_outside, prepare_folder
    from canon_pretrain.titan.optimizers import parameter_groups
    from canon_pretrain.titan.trainer import CanonTrainer

    rank = int(os.environ["RANK"])
    world_size = int(os.environ["WORLD_SIZE"])
    options, argv = _split_options(argv)
    job = parse_job(argv, quiet=quiet)
    check_cpu_offload(job, on_gpu=device.has_accelerator() or options.gpu is not None)
    if options.dry_run:  # on every rank, so that all fail with the same error
        plans = dry_run.make_plans(
            job, gpu=options.gpu, world=options.world, mfu=options.mfu, ranks=world_size
        )
        if not quiet:
            dry_run.print_plans(job, plans, Console())
        return

    # Check the job against the machine and the data, before the run folder is touched.
    check_cuda()
    micro_batch_size(job, world_size)
    shard_degree(job, world_size)
    data = None
    notes = []
    if os.environ["LOCAL_RANK"] == "0":  # the node's other ranks receive it by broadcast
        data = open_data(job)
        if job.optimizer.groups:  # of whose patterns only the model tells what they match
            parameter_groups(job.optimizer, dry_run.on_meta(job.model_args))
        machine = dry_run.this_machine(int(os.environ["LOCAL_WORLD_SIZE"]))
        if job.compile.enable:
            device.check_compiler_cache(device.CACHE_BYTES)
        if not options.force:
            dry_run.check_memory(job, machine, world_size)
        notes += data.notices
        notes += dry_run.startup_notes(job, data.training, machine, world_size)
    init_logging(rank)
    for note in notes:
        logger.info(f"NOTE: {note}")

    # Train. The session holds the lock of the run folder until the end.
    trainer = None
    record = None
    with Session(
        RunFolder(Path(job.job.dump_folder)),
        rank=rank,
        world_size=world_size,
        steps=job.training.steps,
        heartbeat_s=job.run.heartbeat_s,
        checkpoints=checkpoints_outside(job),
        log=logger.info,
    ) as session:
        if rank == 0 and data is not None:
            record = prepare_folder(
                job, session, fingerprint=data.training.fingerprint, arguments=argv
            )
        try:
            trainer = CanonTrainer(
                job, world_size=world_size, data=data, session=session, record=record
            )
            trainer.train()
        finally:
            if trainer is not None:
                trainer.close()
            if record is not None and session.is_owner():
                record.release_if_unused(session.folder)
    torch.distributed.destroy_process_group()


def launch_options() -> argparse.ArgumentParser:
    """Return the parser of --force and --dry-run with its options."""
    parser = Parser(add_help=False, exit_on_error=False)
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--force", action="store_true")
    parser.add_argument("--gpu")
    parser.add_argument("--world", type=int)
    parser.add_argument("--mfu", type=float)
    return parser


def _split_options(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Split `argv` into the options of a launch and the arguments of the job."""
    try:
        options, rest = launch_options().parse_known_args(argv)
    except argparse.ArgumentError as error:
        raise UserError("option.invalid", str(error)) from None
    if not options.dry_run and {options.gpu, options.world, options.mfu} != {None}:
        raise UserError("option.conflict", "--gpu, --world and --mfu require --dry-run")
    return options, rest


if __name__ == "__main__":
    run_process(main)
