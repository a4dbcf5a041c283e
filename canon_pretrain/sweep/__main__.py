"""A sweep: configs x learning rates x seeds, each a run in a folder of its own, resumed as a whole.

    python -m canon_pretrain.sweep plan SWEEP --configs A.toml B.toml [--lr 1e-3 2e-3] [--seeds 0 1]
        [--seed_of init|data|both] [--extend] [--section.key value ...]
    python -m canon_pretrain.sweep table SWEEP [--json]
    python -m canon_pretrain.sweep run SWEEP NUMBER [--ranks N]

Stands beside train.py, which each run is a launch of: `run` by torchrun on this machine,
slurm/sweep.sh as the elements of an array job. A run that is DONE is left alone, any other goes on
from its newest checkpoint. Bad input is one message and exit code 2.
"""

import argparse
import json
import os
import re
import shlex
import sys
from datetime import UTC, datetime
from pathlib import Path

from canon_pretrain.core.cli import command
from canon_pretrain.core.errors import UserError
from canon_pretrain.core.holder import read_count
from canon_pretrain.sweep.grid import (
    SEED_KEYS,
    SeedOf,
    check_config,
    data_differences,
    is_done,
    make_sweep,
    read_sweep,
    write_plan,
)
from canon_pretrain.sweep.table import held_out_verdicts, look_at_sweep, show_table

EXIT_INTERRUPTED = 130
_OPTION = re.compile(r"--[A-Za-z_][\w-]*\.[\w.-]+(=.*)?", re.DOTALL)
_OWN = {"--configs", "--lr", "--seeds", "--seed_of", "--extend"}


def main(argv: list[str] | None = None) -> None:
    """`python -m canon_pretrain.sweep`; exits with code 2 on bad input."""
    own, passed_on = _split(sys.argv[1:] if argv is None else argv)
    with command(prints=own[:1] != ["plan"]):
        arguments = _parser().parse_args(own)
        if passed_on and arguments.command != "plan":
            raise UserError(
                f"{passed_on[0]}: options of the runs belong to `plan`, so that all have the same"
            )
        if arguments.command == "plan":
            plan(arguments, passed_on)
        elif arguments.command == "table":
            print_table(arguments.sweep, as_json=arguments.json)
        elif arguments.command == "run":
            run(arguments)
        else:
            print_todo(arguments.sweep, {int(n) for n in arguments.besides.split(",") if n})


def plan(arguments: argparse.Namespace, passed_on: list[str]) -> None:
    """Write the plan, or add to it, and say what it holds."""
    folder: Path = arguments.sweep
    if arguments.seed_of and not arguments.seeds:
        raise UserError(f"--seed_of {arguments.seed_of} needs --seeds, such as --seeds 0 1 2")
    if misplaced := _OWN.intersection(passed_on):
        raise UserError(f"{', '.join(misplaced)}: write it before {passed_on[0]}")
    seed_of: SeedOf = arguments.seed_of or "both"
    new = make_sweep(arguments.configs, arguments.lr, arguments.seeds, seed_of, passed_on)
    sweep, num_new = write_plan(folder, new, extend=arguments.extend)
    for key in data_differences(sweep):
        print(f"NOTE: the configs differ in {key}: runs of one seed do not see the same data")
    print(f"{folder}: {len(sweep.runs)} runs, {num_new} of them new")
    show_table(look_at_sweep(sweep, folder, datetime.now(UTC)))
    name = shlex.quote(str(folder))
    print(f"on a cluster: bash slurm/sweep.sh submit {name} [--throttle K] [sbatch flags]")
    print(f"without Slurm: bash slurm/sweep.sh --local {name}")


def print_table(folder: Path, *, as_json: bool) -> None:
    """How the sweep's runs stand."""
    sweep = read_sweep(folder)
    rows = look_at_sweep(sweep, folder, datetime.now(UTC))
    if as_json:
        print(json.dumps([row._asdict() for row in rows], indent=2, ensure_ascii=False))
    else:
        show_table(rows, held_out_verdicts(sweep, rows))


def run(arguments: argparse.Namespace) -> None:
    """Replace this process by the run's trainer under torchrun; with --print0 name it instead.

    Printed: the config and the options, each ended by a NUL byte; nothing where the run is DONE.
    """
    folder: Path = arguments.sweep
    sweep = read_sweep(folder)
    planned = sweep.run(arguments.number)
    if is_done(folder / planned.name):
        print(f"{planned.name}: DONE, nothing to do", file=sys.stderr)
        return
    if not read_count(os.environ, "SLURM_RESTART_COUNT"):  # it reads the config that it began with
        check_config(sweep, planned, folder)
    words = sweep.options(planned, folder)
    if arguments.print0:
        sys.stdout.write("".join(f"{word}\0" for word in (planned.config, *words)))
        return
    if arguments.ranks < 1:
        raise UserError(f"--ranks {arguments.ranks}: expected at least 1")
    launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={arguments.ranks}"]
    train = ["-m", "canon_pretrain.train", "--config", planned.config, *words]
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, *launch, *train])


def print_todo(folder: Path, besides: set[int]) -> None:
    """Two lines for slurm/sweep.sh: the runs that are not DONE, and one of them of each config."""
    sweep = read_sweep(folder)
    left = [number for number in sweep.unfinished(folder) if number not in besides]
    first: dict[str, int] = {}
    for number in left:
        first.setdefault(sweep.run(number).config, number)
    print(",".join(map(str, left)), " ".join(map(str, first.values())), sep="\n")


def _split(argv: list[str]) -> tuple[list[str], list[str]]:
    """Our own words, and from the first --section.key on those of every run."""
    for place, word in enumerate(argv):
        if _OPTION.fullmatch(word):
            return argv[:place], argv[place:]
    return argv, []


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m canon_pretrain.sweep",
        description="Configs x learning rates x seeds, each a run in a folder of its own.",
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="{plan,table,run}")
    add = commands.add_parser(
        "plan",
        help="write SWEEP/sweep.json, which then stays as it is",
        description="What follows the first --section.key is handed to every run.",
        allow_abbrev=False,
    ).add_argument
    add("sweep", type=Path, metavar="SWEEP", help="the folder of the sweep and of its runs")
    add("--configs", nargs="+", required=True, metavar="FILE.toml")
    add("--lr", nargs="+", default=[], metavar="RATE", help="default: the configs' own")
    add("--seeds", nargs="+", default=[], metavar="SEED", help="default: the configs' own")
    add("--seed_of", choices=SEED_KEYS, help="what the seeds are of (default: both)")
    add("--extend", action="store_true", help="add runs to the plan that is there")
    table = commands.add_parser("table", help="how the runs stand", allow_abbrev=False)
    table.add_argument("sweep", type=Path, metavar="SWEEP")
    table.add_argument("--json", action="store_true", help="one document, for scripts")
    one = commands.add_parser("run", help="train one run, or go on with it", allow_abbrev=False)
    one.add_argument("sweep", type=Path, metavar="SWEEP")
    one.add_argument("number", type=int, metavar="NUMBER", help="as in the table, from 1")
    one.add_argument("--ranks", type=int, default=1, help="processes, one a GPU (default: 1)")
    one.add_argument("--print0", action="store_true", help="print the launch, for scripts")
    todo = commands.add_parser("todo", description=print_todo.__doc__, allow_abbrev=False)
    todo.add_argument("sweep", type=Path, metavar="SWEEP")
    todo.add_argument("--besides", default="", metavar="N,N", help="leave these out")
    return parser


if __name__ == "__main__":
    main()
