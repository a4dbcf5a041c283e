"""Measure the cost of Canon and of the trainer, on a GPU if there is one, else on the CPU."""

import argparse
import sys
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from canon_pretrain.bench import tables
from canon_pretrain.core.cli import Parser, command, run_process
from canon_pretrain.core.errors import EPILOG, UserError
from canon_pretrain.core.files import write_json
from canon_pretrain.core.terminal import Console


@dataclass(frozen=True)
class Command:
    """A bench: the module that has it in its BENCHES, its help, and its options in `all`."""

    module: str
    about: str
    in_all: tuple[str, ...] | None = None  # None: not in `all`
    takes_keys: bool = False  # --section.key of a config as well


Commands = dict[str, Command]


BENCH = "canon_pretrain.bench"
COMMANDS = {
    "step": Command(
        f"{BENCH}.step",
        "cost of Canon in a training step, by set and backend",
        ("--sets", "AC", "ABCD", "--pairs", "7"),
    ),
    "memory": Command(
        f"{BENCH}.step",
        "memory saved for backward, and peak memory on a GPU",
        ("--sets", "ABCD"),
    ),
    "generate": Command(
        f"{BENCH}.generate",
        "cost of Canon in generation",
        ("--sets", "AC", "ABCD", "--pairs", "5", "--new-tokens", "32"),
    ),
    "transformers": Command(
        f"{BENCH}.generate", "generation over that of transformers, on one export"
    ),
}
ALL = "all"


def main(
    argv: list[str] | None = None, commands: Commands = COMMANDS, program: str = "canon bench"
) -> None:
    """Run one of `commands`, or all, and print the tables; exit with code 2 on bad input."""
    with command():
        arguments = _parse(sys.argv[1:] if argv is None else argv, commands, program)
        # after parsing: they import torch
        from canon_pretrain.bench.limits import Machine
        from canon_pretrain.titan.console import init_logging

        file: Path | None = arguments.json
        if file is not None and not (folder := file.absolute().parent).is_dir():
            raise UserError("bench.no_folder", f"--json {file}: the folder {folder} does not exist")
        init_logging(rank=1)  # warnings and errors only
        console, machine = tables.make_console(), Machine.here()

        if arguments.command == ALL:
            _run_all(file, machine, console, commands, program)
        else:
            bench = _load_bench(commands[arguments.command], arguments.command)
            result = _run_one(bench, arguments, machine, console)
            if file is not None:
                write_json(file, result)


def _run_all(
    file: Path | None, machine: Any, console: Console, commands: Commands, program: str
) -> None:
    """Run every bench, continuing after failures; exit with code 1 after an unexpected one."""
    results: dict[str, Any] = {}
    exit_code = 0
    for name, chosen in commands.items():
        if chosen.in_all is None:
            continue
        words = [name, *chosen.in_all]
        console.rule(f"{' '.join(words)}: {chosen.about}")
        try:
            bench = _load_bench(chosen, name)
            results[name] = _run_one(bench, _parse(words, commands, program), machine, console)
        except UserError as error:
            tables.print_lines(console, f"error[{error.code}]: {error}")
            results[name] = {"bench": name, "error": str(error)}
        except Exception as error:
            console.print_exception(show_locals=False)
            results[name] = {"bench": name, "error": repr(error)}
            exit_code = 1
        if file is not None:  # after each, in case a later one hangs
            write_json(file, {"bench": ALL, "results": results})
    if exit_code:
        raise SystemExit(exit_code)


def _load_bench(chosen: Command, name: str) -> Any:
    from canon_pretrain.titan.device import prepare_device

    prepare_device()  # torchtitan reads the device when it is imported
    return import_module(chosen.module).BENCHES[name]


def _run_one(
    bench: Any, arguments: argparse.Namespace, machine: Any, console: Console
) -> dict[str, Any]:
    import torch

    from canon_pretrain.bench.variants import failures_as_not_measured

    log = partial(tables.print_lines, console)
    # the variants of a block share code, and each compiles it for its own shapes
    limits: Any = {"recompile_limit": 256, "accumulated_recompile_limit": 256}
    with torch._dynamo.config.patch(**limits), failures_as_not_measured():
        measured = bench.measure(arguments, machine, log)
    result: dict[str, Any] = {"bench": arguments.command, **machine.facts(), **measured}

    facts = [result["device"], *(f"{what} {v}" for what, v in result["versions"].items() if v)]
    facts += [result["time"], f"{result['seconds_are']} time"]
    log("; ".join([*facts, *(f"{fact} {v}" for fact, v in (result["gpu"] or {}).items())]))
    bench.print_result(result, console)
    for what, why in result.get("unavailable", {}).items():
        log(f"not measured: {what}: {why}")

    # start the next bench without compiled shapes and with free memory
    torch._dynamo.reset()
    machine.free_memory()
    return result


def make_bench_parser(words: list[str], commands: Commands, program: str) -> Parser:
    """Return the parser; only the modules of benches among `words` are imported."""
    parser = Parser(prog=program, description=__doc__, epilog=EPILOG)
    subparsers = parser.add_subparsers(dest="command", required=True)
    all_benches = Command("", "the others with few repeats, except those that need an argument")
    for name, chosen in (commands | {ALL: all_benches}).items():
        sub = subparsers.add_parser(name, help=chosen.about, description=chosen.about + ".")
        if name in commands and name in words:
            _load_bench(chosen, name).add_arguments(sub)
        sub.add_argument("--json", type=Path, metavar="FILE", help="also write the results here")
    return parser


def _parse(words: list[str], commands: Commands, program: str) -> argparse.Namespace:
    parser = make_bench_parser(words, commands, program)
    parsed, overrides = parser.parse_known_args(words)
    if overrides and not (parsed.command in commands and commands[parsed.command].takes_keys):
        parser.error(f"unrecognized arguments: {' '.join(overrides)}")
    parsed.overrides = overrides
    return parsed


if __name__ == "__main__":
    run_process(main)
