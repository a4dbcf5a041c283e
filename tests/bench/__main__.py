"""Benches for authors: `python -m tests.bench NAME`; users have `canon bench`.

python -m tests.bench canon|attention|mixers|trainer|codegen|all    see --help
python -m tests.bench data       tokenizers, build and loader beside other libraries
python -m tests.bench eval       our evaluation model beside lm_eval's own on one export
python -m tests.bench synthetic  tokens per second of each synthetic task
"""

import sys
from importlib import import_module

from canon_pretrain.bench.__main__ import Command
from canon_pretrain.bench.__main__ import main as run_benches
from canon_pretrain.core.cli import Parser, command, run_process

COMMANDS = {
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
STAGES = {
    "data": "tests.bench.data_prep",
    "eval": "tests.bench.eval",
    "synthetic": "tests.bench.synthetic",
}


def main(argv: list[str] | None = None) -> None:
    """Run a bench of models and kernels, or of a stage."""
    words = sys.argv[1:] if argv is None else argv
    if words[:1] and words[0] in STAGES:
        with command():
            module = import_module(STAGES[words[0]])
            parser = Parser(prog=f"python -m tests.bench {words[0]}", description=module.__doc__)
            module.add_arguments(parser)
            module.run(parser.parse_args(words[1:]))
        return
    run_benches(words, COMMANDS, "python -m tests.bench")


if __name__ == "__main__":
    run_process(main)
