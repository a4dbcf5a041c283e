"""Measure the cost of Canon and of the trainer, on a GPU if there is one, else on the CPU."""

import argparse
import sys
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from canon_pretrain.bench import tables
from canon_pretrain.core.cli import Parser, command, program, run_process
from canon_pretrain.core.errors import EPILOG, UserError
from canon_pretrain.core.files import write_json
from canon_pretrain.core.terminal import Console

COMMANDS = {
    "step": ("step", "cost of Canon in a training step, by set and backend"),
    "canon": ("kernels", "each Canon kernel alone: time and bytes"),
    "generate": ("generate", "cost of Canon in generation"),
    "transformers": ("generate", "generation over that of transformers, on one export"),
    "memory": ("step", "memory saved for backward, and peak memory on a GPU"),
    "attention": ("kernels", "attention implementations compared"),
    "mixers": ("mixers", "recurrent mixers over SDPA, by length, and their layers over Llama's"),
    "trainer": ("trainer", "the trainer's step over a bare loop; cost of a save"),
    "codegen": ("codegen", "launches and bytes of a block on an H100, counted without one"),
}
"""Name -> the module that has it in its BENCHES, and its help."""
ALL = "all"
ALL_OPTIONS = {
    "step": ["--sets", "AC", "ABCD", "--pairs", "7"],
    "canon": ["--pairs", "5"],
    "generate": ["--sets", "AC", "ABCD", "--pairs", "5", "--new-tokens", "32"],
    "memory": ["--sets", "ABCD"],
    **{"attention": [], "mixers": [], "trainer": []},
}
"""The options of each in `all`; codegen needs a process of its own, transformers an export."""


def main(argv: list[str] | None = None) -> None:
    """Run one bench, or all, and print the tables; exit with code 2 on bad input."""
    with command():
        arguments = _parse(sys.argv[1:] if argv is None else argv)
        # after parsing: they import torch
        from canon_pretrain.bench.limits import Machine
        from canon_pretrain.titan.console import init_logging

        file: Path | None = arguments.json
        if file is not None and not (folder := file.absolute().parent).is_dir():
            raise UserError("bench.no_folder", f"--json {file}: the folder {folder} does not exist")
        init_logging(rank=1)  # warnings and errors only
        console, machine = tables.make_console(), Machine.here()
        if arguments.command == ALL:
            _run_all(file, machine, console)
        else:
            result = _run_one(arguments, machine, console)
            if file is not None:
                write_json(file, result)


def _run_all(file: Path | None, machine: Any, console: Console) -> None:
    """Run every bench, continuing after failures; exit with code 1 after an unexpected one."""
    results: dict[str, Any] = {}
    exit_code = 0
    for name, options in ALL_OPTIONS.items():
        console.rule(f"{' '.join([name, *options])}: {COMMANDS[name][1]}")
        try:
            results[name] = _run_one(_parse([name, *options]), machine, console)
        except UserError as error:
            tables.print_lines(console, f"error[{error.code}]: {error}")
            results[name] = {"bench": name, "error": str(error)}
        except Exception as error:
            console.print_exception(show_locals=False)
            results[name], exit_code = {"bench": name, "error": repr(error)}, 1
        if file is not None:  # after each, in case a later one hangs
            write_json(file, {"bench": ALL, "results": results})
    if exit_code:
        raise SystemExit(exit_code)


def _load_bench(name: str) -> Any:
    from canon_pretrain.titan.device import prepare_device

    prepare_device()  # torchtitan reads the device when it is imported
    return import_module(f"canon_pretrain.bench.{COMMANDS[name][0]}").BENCHES[name]


def _run_one(arguments: argparse.Namespace, machine: Any, console: Console) -> dict[str, Any]:
    import torch

    from canon_pretrain.bench.variants import failures_as_not_measured

    bench, log = _load_bench(arguments.command), partial(tables.print_lines, console)
    # the variants of a block share code, and each compiles it for its own shapes
    limits: Any = {"recompile_limit": 256, "accumulated_recompile_limit": 256}
    with torch._dynamo.config.patch(**limits), failures_as_not_measured():
        found = bench.measure(arguments, machine, log)
    result: dict[str, Any] = {"bench": arguments.command, **machine.facts(), **found}
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


def _parse(words: list[str]) -> argparse.Namespace:
    """Parse the command line, importing only the chosen command's module."""
    parser = Parser(prog=program("canon_pretrain.bench"), description=__doc__, epilog=EPILOG)
    commands = parser.add_subparsers(dest="command", required=True)
    abouts = {name: about for name, (_, about) in COMMANDS.items()}
    for name, about in (
        abouts | {ALL: "all but codegen and transformers, with few repeats"}
    ).items():
        sub = commands.add_parser(name, help=about, description=about + ".")
        if name in COMMANDS and name in words:
            _load_bench(name).add_arguments(sub)
        sub.add_argument("--json", type=Path, metavar="FILE", help="also write the results here")
    parsed, overrides = parser.parse_known_args(words)
    if overrides and parsed.command != "trainer":
        parser.error(f"unrecognized arguments: {' '.join(overrides)}")
    parsed.overrides = overrides
    return parsed


if __name__ == "__main__":
    run_process(main)
