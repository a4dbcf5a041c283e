"""Two things side by side in one run, as ratios: on a GPU where there is one, else on the CPU."""

import argparse
import sys
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from canon_pretrain.bench import tables
from canon_pretrain.core.cli import command
from canon_pretrain.core.errors import UserError
from canon_pretrain.core.files import write_json
from canon_pretrain.core.terminal import Console
from canon_pretrain.titan.console import init_logging
from canon_pretrain.titan.device import prepare_device

COMMANDS = {
    "step": ("step", "Canon's price in a training step, by set and backend"),
    "canon": ("kernels", "each kernel alone, and the bytes that it must move"),
    "generate": ("generate", "Canon's price in generation"),
    "memory": ("step", "what is kept for backward, and what fits on a GPU"),
    "attention": ("kernels", "the ways of attention, one against another"),
    "trainer": ("trainer", "the trainer's step over a bare loop; what a save costs"),
    "codegen": ("codegen", "launches and bytes of a block on an H100, counted without one"),
}
"""Name -> the module of this package that has it in its BENCHES, and what it is."""
ALL = "all"
BRIEFLY = {
    "step": ["--sets", "AC", "ABCD", "--pairs", "7"],
    "canon": ["--pairs", "5"],
    "generate": ["--sets", "AC", "ABCD", "--pairs", "5", "--new-tokens", "32"],
    "memory": ["--sets", "ABCD"],
    "attention": [],
    "trainer": [],
}
"""What `all` asks of each. Not of codegen, which needs a process that pretends to have a GPU."""


def main(argv: list[str] | None = None) -> None:
    """Run one bench, or all, and print the tables; exits with code 2 on bad input."""
    prepare_device()  # torchtitan reads the device at import time
    from canon_pretrain.bench.limits import Machine

    with command():
        arguments = _parse(sys.argv[1:] if argv is None else argv)
        file: Path | None = arguments.json
        if file is not None and not (folder := file.absolute().parent).is_dir():
            raise UserError(
                "todo.__main__",
                f"--json {file}: the folder {folder} does not exist; create it first",
            )
        init_logging(rank=1)  # warnings and errors alone
        console, machine = tables.make_console(), Machine.here()
        if arguments.command == ALL:
            _all(file, machine, console)
        else:
            result = _one(arguments, machine, console)
            if file is not None:
                write_json(file, result)


def _all(file: Path | None, machine: Any, console: Console) -> None:
    """Run every bench in brief, also after one that failed; exit with code 1 after a fault."""
    results: dict[str, Any] = {}
    exit_code = 0
    for name, options in BRIEFLY.items():
        console.rule(f"{' '.join([name, *options])}: {COMMANDS[name][1]}")
        try:
            results[name] = _one(_parse([name, *options]), machine, console)
        except UserError as error:
            tables.print_lines(console, f"error: {error}")
            results[name] = {"bench": name, "error": str(error)}
        except Exception as error:
            console.print_exception(show_locals=False)
            results[name], exit_code = {"bench": name, "error": repr(error)}, 1
        if file is not None:  # the results so far, in case a later one does not end
            write_json(file, {"bench": ALL, "results": results})
    if exit_code:
        raise SystemExit(exit_code)


def _bench(name: str) -> Any:
    return import_module(f"canon_pretrain.bench.{COMMANDS[name][0]}").BENCHES[name]


def _one(arguments: argparse.Namespace, machine: Any, console: Console) -> dict[str, Any]:
    import torch

    from canon_pretrain.bench.variants import failing

    bench, say = _bench(arguments.command), partial(tables.print_lines, console)
    # the variants of a block share their code, and each is compiled for its own shapes
    limits: Any = {"recompile_limit": 256, "accumulated_recompile_limit": 256}
    with torch._dynamo.config.patch(**limits), failing():
        found = bench.measure(arguments, machine, say)
    result: dict[str, Any] = {"bench": arguments.command, **machine.facts(), **found}
    facts = [result["device"], *(f"{what} {v}" for what, v in result["versions"].items() if v)]
    facts += [result["time"], f"{result['seconds_are']} time"]
    say("; ".join([*facts, *(f"{fact} {v}" for fact, v in (result["gpu"] or {}).items())]))
    bench.print_result(result, console)
    for what, why in result.get("unavailable", {}).items():
        say(f"not measured: {what}: {why}")
    # the next bench finds no shapes that were seen and no memory that is held
    torch._dynamo.reset()
    machine.free_memory()
    return result


def _parse(words: list[str]) -> argparse.Namespace:
    """Return the arguments of the one command among `words`; only its module is imported."""
    parser = argparse.ArgumentParser(prog="python -m canon_pretrain.bench", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    abouts = {name: about for name, (_, about) in COMMANDS.items()}
    for name, about in (abouts | {ALL: "all of them but codegen, in brief"}).items():
        sub = commands.add_parser(name, help=about, description=about + ".")
        if name in COMMANDS and name in words:
            _bench(name).add_arguments(sub)
        sub.add_argument("--json", type=Path, metavar="FILE", help="write the figures here too")
    parsed, overrides = parser.parse_known_args(words)
    if overrides and parsed.command != "trainer":
        parser.error(f"unrecognized arguments: {' '.join(overrides)}")
    parsed.overrides = overrides
    return parsed


if __name__ == "__main__":
    main()
