"""Two things side by side in one run, as ratios.

    python -m canon_pretrain.bench step       Canon's price in a training step, by set and backend
    python -m canon_pretrain.bench canon      each kernel alone, and the bytes that it must move
    python -m canon_pretrain.bench generate   Canon's price in generation
    python -m canon_pretrain.bench memory     what is kept for backward, and what fits on a GPU
    python -m canon_pretrain.bench attention  the ways of attention, one against another
    python -m canon_pretrain.bench trainer    the trainer's step over a bare loop; what a save costs
    python -m canon_pretrain.bench codegen    launches and bytes on an H100, counted without one
    python -m canon_pretrain.bench all        all of them but codegen, in brief

On a GPU where there is one, else on the CPU with smaller sizes. --json FILE keeps the figures. Exit
code 2 with one message for bad input.
"""

import argparse
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from canon_pretrain.bench.tables import make_console, print_lines
from canon_pretrain.core.cli import command
from canon_pretrain.core.errors import UserError
from canon_pretrain.core.files import write_json
from canon_pretrain.core.terminal import Console
from canon_pretrain.titan.device import prepare_device

EXIT_INTERRUPTED = 130
COMMANDS = {
    "step": "Canon's price in a training step, by set and backend",
    "canon": "each kernel alone, and the bytes that it must move",
    "generate": "Canon's price in generation",
    "memory": "what is kept for backward, and what fits on a GPU",
    "attention": "the ways of attention, one against another",
    "trainer": "the trainer's step over a bare loop; what a save costs",
    "codegen": "launches and bytes of a block on an H100, counted without one",
}
ALL = "all"
BRIEFLY = {
    "step": ["--sets", "AC", "ABCD", "--pairs", "7"],
    "canon": ["--pairs", "5"],
    "generate": ["--sets", "AC", "ABCD", "--pairs", "5", "--new-tokens", "32"],
    "memory": ["--sets", "ABCD", "--counted-only"],
}
"""What `all` asks of each, so that a GPU's page takes minutes; each by itself does more."""


def main(argv: list[str] | None = None) -> None:
    """Run one bench, or all, and print the tables; exits with code 2 on bad input."""
    words = sys.argv[1:] if argv is None else argv
    prepare_device()  # torchtitan reads the device at import time
    with command():
        arguments = _parse(words)
        if arguments.json is not None and not arguments.json.absolute().parent.is_dir():
            raise UserError(
                f"--json {arguments.json}: the folder {arguments.json.absolute().parent} does not "
                "exist; create it first"
            )
        result = run(arguments, make_console())
        if arguments.json is not None:
            write_json(arguments.json, result)


def run(arguments: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Measure and print what was asked for; gives what the JSON holds. Raises UserError.

    `all` goes on where one fails, and exits with code 1 at its end if that was a fault of ours.
    """
    from canon_pretrain.bench.machine import Machine
    from canon_pretrain.titan.console import init_logging

    init_logging(rank=1)  # warnings and errors alone
    machine = Machine.here()
    if arguments.command != ALL:
        return _one(arguments.command, arguments, machine, console)
    results: dict[str, Any] = {}
    for name in COMMANDS:
        if name == "codegen":  # pretends that there is a GPU: in a process of its own
            continue
        words = [name, *BRIEFLY.get(name, [])]
        console.rule(f"{' '.join(words)}: {COMMANDS[name]}")
        try:
            results[name] = _one(name, _parse(words), machine, console)
        except UserError as error:  # the others are worth having all the same
            print_lines(console, f"error: {error}")
            results[name] = {"bench": name, "error": str(error)}
        except Exception as error:
            console.print_exception(show_locals=False)
            results[name] = {"bench": name, "error": repr(error), "is_a_fault": True}
        if arguments.json is not None:  # what is there, should a later one not end
            write_json(arguments.json, {"bench": ALL, "results": results})
    if any("is_a_fault" in result for result in results.values()):
        raise SystemExit(1)
    return {"bench": ALL, "results": results}


def _one(
    name: str, arguments: argparse.Namespace, machine: Any, console: Console
) -> dict[str, Any]:
    import torch

    bench = _module(name)
    try:
        result: dict[str, Any] = bench.measure(
            arguments, machine, lambda line: print_lines(console, line)
        )
    except torch.OutOfMemoryError:
        raise UserError(
            f"{name}: these sizes do not fit in this GPU's memory; give fewer of what its --help "
            "names: --micro-batch, --batches, --tokens or --layers"
        ) from None
    bench.print_result(result, console)
    # the next bench finds no shapes that were seen and no memory that is held
    torch._dynamo.reset()
    machine.free_memory()
    return result


def _parse(words: list[str]) -> argparse.Namespace:
    """The arguments of the one command among `words`; only its module is imported."""
    parser = argparse.ArgumentParser(
        prog="python -m canon_pretrain.bench",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True)
    wanted = next((word for word in words if word in COMMANDS), None)
    for name, about in (COMMANDS | {ALL: "all of them but codegen, in brief"}).items():
        command = commands.add_parser(name, help=about, description=about + ".")
        if name == wanted:
            _module(name).add_arguments(command)
        add = command.add_argument
        add("--json", type=Path, metavar="FILE", help="write the figures to this file too")
    arguments, overrides = parser.parse_known_args(words)
    if overrides and arguments.command != "trainer":
        parser.error(f"unrecognized arguments: {' '.join(overrides)}")
    arguments.overrides = overrides
    return arguments


def _module(name: str) -> ModuleType:
    return import_module(f"canon_pretrain.bench.{name}")


if __name__ == "__main__":
    main()
