"""A sweep: configs x learning rates x seeds, each a run in a folder of its own, resumed as a whole.

    python -m canon_pretrain.sweep plan SWEEP --configs A.toml B.toml [--lr 1e-3 2e-3] [--seeds 0 1]
        [--seed_of init|data|both] [--extend] [--section.key value ...]
    python -m canon_pretrain.sweep table SWEEP [--json]
    python -m canon_pretrain.sweep run SWEEP NUMBER [--ranks N]

Each run is a launch of train.py into SWEEP/NAME: `run` by torchrun on this machine, slurm/sweep.sh
as an element of an array job. A run that is DONE is skipped, any other resumes from its newest
checkpoint. No torch.
"""

import argparse
import functools
import json
import os
import re
import shlex
import sys
from datetime import UTC, datetime
from pathlib import Path

from canon_pretrain.cluster.sweep import (
    SEED_KEYS,
    config_hash,
    data_differences,
    make_sweep,
    read_sweep,
    write_plan,
)
from canon_pretrain.cluster.sweep_table import held_out_verdicts, look_at_sweep, show_table
from canon_pretrain.core.cli import command
from canon_pretrain.core.errors import UserError
from canon_pretrain.core.holder import read_count
from canon_pretrain.run.folder import RunFolder
from canon_pretrain.run.names import PLAN

_OPTION = re.compile(r"--[A-Za-z_][\w-]*\.[\w.-]+(=.*)?", re.DOTALL)
_OWN = {"--configs", "--lr", "--seeds", "--seed_of", "--extend"}


def main(argv: list[str] | None = None) -> None:
    """Run `python -m canon_pretrain.sweep`; exit with code 2 on bad input."""
    words = sys.argv[1:] if argv is None else argv
    place = next((i for i, word in enumerate(words) if _OPTION.fullmatch(word)), len(words))
    own, passed_on = words[:place], words[place:]
    with command(prints=own[:1] != ["plan"]):
        given = _parse(own)
        if given.command == "plan":
            return plan(given, passed_on)
        if passed_on:
            raise UserError(
                f"{passed_on[0]}: options of the runs belong to `plan`, so that all have the same"
            )
        given.show(given)


def plan(given: argparse.Namespace, passed_on: list[str]) -> None:
    """Write the plan, or add to it, and print what it holds."""
    if given.seed_of and not given.seeds:
        raise UserError(f"--seed_of {given.seed_of} needs --seeds, such as --seeds 0 1 2")
    if misplaced := _OWN.intersection(passed_on):
        raise UserError(f"{', '.join(misplaced)}: write it before {passed_on[0]}")
    new = make_sweep(given.configs, given.lr, given.seeds, given.seed_of or "both", passed_on)
    sweep, num_new = write_plan(given.sweep, new, extend=given.extend)
    for key in data_differences(sweep):
        print(f"NOTE: the configs differ in {key}: runs of one seed do not see the same data")
    print(f"{given.sweep}: {len(sweep.runs)} runs, {num_new} of them new")
    show_table(look_at_sweep(sweep, given.sweep, datetime.now(UTC)))
    name = shlex.quote(str(given.sweep))
    print(f"on a cluster: bash slurm/sweep.sh submit {name} [--throttle K] [sbatch flags]")
    print(f"without Slurm: bash slurm/sweep.sh --local {name}")


def table(given: argparse.Namespace) -> None:
    sweep = read_sweep(given.sweep)
    rows = look_at_sweep(sweep, given.sweep, datetime.now(UTC))
    if given.json:
        print(json.dumps([row._asdict() for row in rows], indent=2, ensure_ascii=False))
    else:
        show_table(rows, held_out_verdicts(sweep, rows))


def run(given: argparse.Namespace) -> None:
    """Replace this process by the run's trainer under torchrun; with --print0 name it instead.

    Printed: the config and the options, each ended by a NUL byte; nothing if the run is DONE.
    """
    folder: Path = given.sweep
    sweep = read_sweep(folder)
    planned = sweep.run(given.number)
    if RunFolder(folder / planned.name).done_file.exists():
        print(f"{planned.name}: DONE, nothing to do", file=sys.stderr)
        return
    # a requeued job reads the config that it began with
    is_restart = read_count(os.environ, "SLURM_RESTART_COUNT") > 0
    if not is_restart and config_hash(planned.config) != sweep.configs[planned.config]:
        raise UserError(
            f"{planned.config} (or what it extends) has changed since {folder / PLAN} was written, "
            "and the runs of a sweep must differ in its grid alone. Put it back, or plan a sweep "
            "in another folder"
        )
    words = [planned.config, *sweep.options(planned, folder)]
    if given.print0:
        sys.stdout.write("".join(f"{word}\0" for word in words))
        return
    if given.ranks < 1:
        raise UserError(f"--ranks {given.ranks}: expected at least 1")
    launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={given.ranks}"]
    launch += ["-m", "canon_pretrain.train", "--config", *words]
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, *launch])


def print_todo(given: argparse.Namespace) -> None:
    """Print the runs that are not DONE, and one of them per config: for slurm/sweep.sh."""
    besides = {int(n) for n in given.besides.split(",") if n}
    left: list[str] = []
    first: dict[str, str] = {}
    for number, planned in enumerate(read_sweep(given.sweep).runs, 1):
        if number not in besides and not RunFolder(given.sweep / planned.name).done_file.exists():
            left.append(str(number))
            first.setdefault(planned.config, str(number))
    print(",".join(left), " ".join(first.values()), sep="\n")


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m canon_pretrain.sweep",
        description="Configs x learning rates x seeds, each a run in a folder of its own.",
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="{plan,table,run}")
    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument("sweep", type=Path, metavar="SWEEP", help="the folder of its runs")
    new = functools.partial(commands.add_parser, parents=[shared], allow_abbrev=False)
    about = "What follows the first --section.key is handed to every run."
    add = new("plan", help="write SWEEP/sweep.json, which stays", description=about).add_argument
    add("--configs", nargs="+", required=True, metavar="FILE.toml")
    add("--lr", nargs="+", default=[], metavar="RATE", help="default: the configs' own")
    add("--seeds", nargs="+", default=[], metavar="SEED", help="default: the configs' own")
    add("--seed_of", choices=SEED_KEYS, help="what the seeds are of (default: both)")
    add("--extend", action="store_true", help="add runs to the plan that is there")
    shown = new("table", help="how the runs stand")
    shown.add_argument("--json", action="store_true", help="one document, for scripts")
    shown.set_defaults(show=table)
    one = new("run", help="train one run, or resume it")
    one.add_argument("number", type=int, metavar="NUMBER", help="as in the table, from 1")
    one.add_argument("--ranks", type=int, default=1, help="processes, one a GPU (default: 1)")
    one.add_argument("--print0", action="store_true", help="print the launch, for scripts")
    one.set_defaults(show=run)
    todo = new("todo", description=print_todo.__doc__)
    todo.add_argument("--besides", default="", metavar="N,N", help="leave these out")
    todo.set_defaults(show=print_todo)
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
