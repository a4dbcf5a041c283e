"""Other cuts of the Triton kernels' work, one number at a time, beside the ones chosen by shape.

`bench canon --tune`, on a GPU. Nothing is chosen here: kernels/triton/blocks.py decides by shape
alone, and whoever changes it does so by these figures.
"""

import dataclasses
import importlib
from collections.abc import Callable, Iterator
from typing import Any

from canon_pretrain.bench.tables import make_table
from canon_pretrain.bench.timing import Step, compare_steps
from canon_pretrain.core.terminal import Console

TRIED = {
    "run": (16, 32, 64, 128, 256, 512),
    "warps": (1, 2, 4, 8, 16),
    "stages": (1, 2, 3, 4, 5),
    "block": (64, 128, 256, 512),
}
"""Fields of `Blocks`, and the values that are tried of each."""


def sweep(
    passes: dict[str, Callable[[], Step]], *, pairs: int, block_s: float
) -> Iterator[dict[str, Any]]:
    """For each pass (its name, and what makes its step) and each value tried: it over the choice.

    A cut that the kernel can't have is given with the reason.
    """
    override = importlib.import_module("canon_pretrain.kernels.triton.blocks").override
    for direction, make in passes.items():
        chosen = make()
        for field, values in TRIED.items():
            for value in values:
                row = {"direction": direction, "field": field, "value": value}
                forced = _under(override, {field: value}, chosen)
                try:
                    found = compare_steps(chosen, forced, pairs=pairs, block_s=block_s)
                except Exception as why:  # whatever Triton raises: out of resources, a bad size
                    yield row | {"problem": str(why).strip().splitlines()[0]}
                    continue
                yield row | dataclasses.asdict(found)


def _under(override: Callable[..., Any], forced: dict[str, int], step: Step) -> Step:
    def run() -> None:
        with override(**forced):
            step()

    return run


def print_sweep(rows: list[dict[str, Any]], console: Console) -> None:
    """The best value of each field, and how much it gives."""
    table = make_table("kernel", "pass", "field", "best", "over the choice", "others", title="tune")
    keys = dict.fromkeys((row["form"], row["direction"], row["field"]) for row in rows)
    for key in keys:
        own = [row for row in rows if (row["form"], row["direction"], row["field"]) == key]
        timed = sorted((row for row in own if "ratio" in row), key=lambda row: row["ratio"])
        if not timed:
            table.add_row(*key, "none", "", own[0]["problem"])
            continue
        others = ", ".join(f"{row['value']}: {row['ratio'] - 1:+.1%}" for row in timed[1:])
        table.add_row(*key, str(timed[0]["value"]), f"{timed[0]['ratio'] - 1:+.1%}", others)
    console.print(table)
