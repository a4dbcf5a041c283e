"""Benches for authors: `python -m tests.bench NAME`; users have `canon bench`.

python -m tests.bench NAME       step, memory, generate, transformers, canon, attention, mixers,
                                 trainer, codegen, or all: see --help
python -m tests.bench data       tokenizers, build and loader beside other libraries
python -m tests.bench eval       our evaluation model beside lm_eval's own on one export
python -m tests.bench synthetic  tokens per second of each synthetic task

Two candidates are timed in turn in one process, and the ratio is printed with its spread, on a GPU
if there is one, else on the CPU. `step.py`, `generate.py`, `kernels.py`, `mixers.py`, `trainer.py`
and `codegen.py` are the benches; `variants.py` holds what they compare, `timing.py` paired timing,
`limits.py` lower bounds (the machine's speeds, the bytes of a block), `tables.py` the targets.
"""

import argparse
import sys
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from canon_pretrain.bench import check_json
from canon_pretrain.core.cli import Parser, command, run_process
from canon_pretrain.core.errors import EPILOG, UserError
from canon_pretrain.core.files import write_json
from canon_pretrain.core.terminal import Console
from tests.bench import tables


@dataclass(frozen=True)
class Command:
    """A bench: the module that has it in its BENCHES, its help, and its options in `all`."""

    module: str
    help: str
    in_all: tuple[str, ...] | None = None  # None: not in `all`
    takes_keys: bool = False  # --section.key of a config as well


PROGRAM = "python -m tests.bench"
ABOUT = "Measure the cost of Canon and of the trainer, on a GPU if there is one, else on the CPU."
COMMANDS = {
    "step": Command(
        "tests.bench.step",
        "cost of Canon in a training step, by set and backend",
        ("--sets", "AC", "ABCD", "--pairs", "7"),
    ),
    "memory": Command(
        "tests.bench.step",
        "memory saved for backward, and peak memory on a GPU",
        ("--sets", "ABCD"),
    ),
    "generate": Command(
        "tests.bench.generate",
        "cost of Canon in generation",
        ("--sets", "AC", "ABCD", "--pairs", "5", "--new-tokens", "32"),
    ),
    "transformers": Command(
        "tests.bench.generate", "decoding over that of transformers' Llama of equal size"
    ),
    "canon": Command(
        "tests.bench.kernels", "each Canon kernel alone: time and bytes", ("--pairs", "5")
    ),
    "attention": Command("tests.bench.kernels", "attention implementations compared", ()),
    "mixers": Command(
        "tests.bench.mixers",
        "recurrent mixers over SDPA, by length, and their layers over Llama's",
        (),
    ),
    "trainer": Command(
        "tests.bench.trainer",
        "the trainer's step over a bare loop; cost of a save",
        (),
        takes_keys=True,
    ),
    # a process of its own: not in `all`
    "codegen": Command(
        "tests.bench.codegen", "launches and bytes of a block on an H100, counted without one"
    ),
}
ALL = "all"
STAGES = {
    "data": "tests.bench.data_prep",
    "eval": "tests.bench.eval",
    "synthetic": "tests.bench.synthetic",
}


def main(argv: list[str] | None = None) -> None:
    """Run a bench, or all, and print the tables; exit with code 2 on bad input."""
    words = sys.argv[1:] if argv is None else argv
    with command():
        if words[:1] and words[0] in STAGES:
            _run_stage(words)
            return

        arguments = _parse(words)
        # after parsing: they import torch
        from canon_pretrain.titan.console import init_logging
        from tests.bench.limits import Machine

        file: Path | None = arguments.json
        check_json(file)
        init_logging(rank=1)  # warnings and errors only
        console = tables.make_console()
        machine = Machine.here()

        if arguments.command == ALL:
            _run_all(file, machine, console)
        else:
            result = _run_one(_load_bench(arguments.command), arguments, machine, console)
            if file is not None:
                write_json(file, result)


def _run_stage(words: list[str]) -> None:
    """Run the bench of a stage, which parses and prints for itself."""
    module = import_module(STAGES[words[0]])
    parser = Parser(prog=f"{PROGRAM} {words[0]}", description=module.__doc__)
    module.add_arguments(parser)
    module.run(parser.parse_args(words[1:]))


def _run_all(file: Path | None, machine: Any, console: Console) -> None:
    """Run every bench, continuing after failures; exit with code 1 after an unexpected one."""
    results: dict[str, Any] = {}
    exit_code = 0
    for name, entry in COMMANDS.items():
        if entry.in_all is None:
            continue
        words = [name, *entry.in_all]
        console.rule(f"{' '.join(words)}: {entry.help}")
        try:
            results[name] = _run_one(_load_bench(name), _parse(words), machine, console)
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


def _load_bench(name: str) -> Any:
    from canon_pretrain.titan.device import prepare_device

    prepare_device()  # torchtitan reads the device when it is imported
    return import_module(COMMANDS[name].module).BENCHES[name]


def _run_one(
    bench: Any, arguments: argparse.Namespace, machine: Any, console: Console
) -> dict[str, Any]:
    import torch

    from tests.bench.variants import failures_as_not_measured

    log = partial(tables.print_lines, console)
    # the variants of a block share code, and each compiles it for its own shapes
    with (
        torch._dynamo.config.patch(recompile_limit=256, accumulated_recompile_limit=256),
        failures_as_not_measured(),
    ):
        measured = bench.measure(arguments, machine, log)
    result: dict[str, Any] = {"bench": arguments.command, **machine.facts(), **measured}

    versions = [f"{name} {number}" for name, number in result["versions"].items() if number]
    gpu = [f"{name} {value}" for name, value in (result["gpu"] or {}).items()]
    log(
        "; ".join(
            [result["device"], *versions, result["time"], f"{result['seconds_are']} time", *gpu]
        )
    )
    bench.print_result(result, console)
    for name, reason in result.get("unavailable", {}).items():
        log(f"not measured: {name}: {reason}")

    # start the next bench without compiled shapes and with free memory
    torch._dynamo.reset()
    machine.free_memory()
    return result


def _parse(words: list[str]) -> argparse.Namespace:
    parser = Parser(prog=PROGRAM, description=ABOUT, epilog=EPILOG)
    subparsers = parser.add_subparsers(dest="command", required=True)
    all_benches = Command("", "the others with few repeats, except those that need an argument")
    for name, entry in (COMMANDS | {ALL: all_benches}).items():
        sub = subparsers.add_parser(name, help=entry.help, description=entry.help + ".")
        if name in COMMANDS and name in words:  # imports the module
            _load_bench(name).add_arguments(sub)
        sub.add_argument("--json", type=Path, metavar="FILE", help="also write the results here")

    parsed, overrides = parser.parse_known_args(words)
    if overrides and not (parsed.command in COMMANDS and COMMANDS[parsed.command].takes_keys):
        parser.error(f"unrecognized arguments: {' '.join(overrides)}")
    parsed.overrides = overrides
    return parsed


if __name__ == "__main__":
    run_process(main)
