"""Each kernel by itself: seconds against the reference's, and bytes against the copy bandwidth.

Every form of model/canon_check.py by every backend, compiled as a block is. Before anything is
timed its values and gradients are compared with the formula in float64.
"""

import argparse
import dataclasses
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from canon_pretrain.bench import variants
from canon_pretrain.bench.machine import Machine
from canon_pretrain.bench.tables import (
    heading,
    make_table,
    peaks_line,
    print_lines,
    ratio_cells,
    unavailable_lines,
)
from canon_pretrain.bench.timing import Step, compare_steps
from canon_pretrain.core.terminal import Console
from canon_pretrain.kernels.backends import OPTIONAL, compile_options
from canon_pretrain.model.canon_check import (
    Form,
    WrongCanon,
    compare,
    forms,
    make_inputs,
    make_module,
)

REFERENCE = "reference"
CPU_SHAPE, GPU_SHAPE = (4, 1024), (16, 4096)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command line of `canon`."""
    add = parser.add_argument
    variants.add_model_arguments(parser)
    parser.set_defaults(position="rope")  # B's neighbour is the rotation
    add("--tokens", type=int, metavar="T", help="(default: 4096 on a GPU, 1024 on a CPU)")
    add("--micro-batch", type=int, metavar="B", help="(default: 16 on a GPU, 4 on a CPU)")
    add("--backends", nargs="+", metavar="B", help="(default: all that can be had here)")
    variants.add_timing_arguments(parser, pairs=11, block_s=0.05)


def measure(
    arguments: argparse.Namespace, machine: Machine, say: Callable[[str], None]
) -> dict[str, Any]:
    """The figures of one run, as JSON can hold them; seconds, bytes. Raises UserError."""
    variants.check_at_least(
        1, tokens=arguments.tokens, micro_batch=arguments.micro_batch, pairs=arguments.pairs
    )
    rows_default, tokens_default = GPU_SHAPE if machine.on_gpu else CPU_SHAPE
    batch = arguments.micro_batch or rows_default
    num_tokens = arguments.tokens or tokens_default
    args = variants.model_args(arguments, on_gpu=machine.on_gpu, num_tokens=num_tokens)
    dtype = variants.dtype_of(arguments, on_gpu=machine.on_gpu)
    backends, missing = variants.available(arguments.backends, machine.device, dtype)
    peaks = machine.peaks(dtype)
    rows: list[dict[str, Any]] = []
    with ExitStack() as patches:
        patches.enter_context(variants.many_compilations())
        # a backward pass is timed again and again on what one forward pass has kept
        patches.enter_context(torch._functorch.config.patch(donated_buffer=False))
        for form in forms(args):
            inputs = make_inputs(form, (batch, num_tokens), dtype, machine.device)
            base = Timed(form, REFERENCE, inputs)
            for backend in backends:
                timed = base if backend == REFERENCE else Timed(form, backend, inputs)
                try:
                    rows += measure_form(form, backend, base, timed, arguments, machine)
                except WrongCanon as why:
                    missing[f"{form.name} by {backend}"] = str(why)
                    continue
                except Exception as why:
                    if backend not in OPTIONAL:
                        raise
                    missing[f"{form.name} by {backend}"] = variants.failure(why)
                    continue
                say(f"{form.name}, {backend}: {rows[-2]['ratio']:.2f}, {rows[-1]['ratio']:.2f}")
    return {
        "bench": "canon",
        **machine.facts(),
        **variants.model_facts(args, dtype),
        "micro_batch": batch,
        "num_tokens": num_tokens,
        "peaks": peaks,
        "unavailable": missing,
        "rows": rows,
    }


def measure_form(
    form: Form,
    backend: str,
    base: "Timed",
    timed: "Timed",
    arguments: argparse.Namespace,
    machine: Machine,
) -> list[dict[str, Any]]:
    """Forward and backward of a form by `backend`, beside the reference's; checked first."""
    error = compare(form, timed.module, timed.compiled, timed.inputs)
    rows = []
    for direction, moved in zip(("forward", "backward"), form.moved, strict=True):
        found = compare_steps(
            getattr(base, direction)(),
            getattr(timed, direction)(),
            pairs=arguments.pairs,
            block_s=arguments.block_seconds,
        )
        x_BTC = timed.inputs[0]
        least = moved * x_BTC.shape[0] * x_BTC.shape[1] * x_BTC.dtype.itemsize
        rows.append(
            {
                "form": form.name,
                "backend": backend,
                "direction": direction,
                **dataclasses.asdict(found),
                "least_bytes": least,
                "bandwidth": least / found.other_s,
                "of_copy": least / found.other_s / machine.copy_bandwidth,
                "max_error": error,
            }
        )
    return rows


class Timed:
    """A form's module, compiled, its inputs, and the two passes as steps."""

    def __init__(self, form: Form, backend: str, inputs: Sequence[Tensor]) -> None:
        self.form, self.inputs = form, inputs
        x_BTC = inputs[0]
        self.module = make_module(form, backend, x_BTC.dtype, x_BTC.device)
        options = compile_options(x_BTC.device.type, backend)
        self.compiled = torch.compile(self.module, fullgraph=True, dynamic=False, options=options)
        self.differentiated = (*inputs, *self.module.parameters())

    def forward(self) -> Step:
        """The pass that keeps what backward needs, as in training."""
        return lambda: self.compiled(*self.inputs)

    def backward(self) -> Step:
        """Gradients of every input and weight, from one forward pass."""
        outputs = self.compiled(*self.inputs)
        grads = [torch.randn_like(y) for y in outputs]
        return lambda: torch.autograd.grad(outputs, self.differentiated, grads, retain_graph=True)


def print_result(result: dict[str, Any], console: Console) -> None:
    """The table that a person reads."""
    print_lines(
        console,
        heading(result),
        f"widths of {result['model']}, {result['micro_batch']} x {result['num_tokens']:,} tokens, "
        f"{result['dtype']}, each compiled",
    )
    table = make_table(
        *("kernel", "backend", "pass", "ms", "over reference", "spread"),
        *("MB at least", "GB/s", "of copy", "max error"),
    )
    for row in result["rows"]:
        table.add_row(
            row["form"],
            row["backend"],
            row["direction"],
            f"{1000 * row['other_s']:.3f}",
            *ratio_cells(row),
            f"{row['least_bytes'] / 1e6:,.2f}",
            f"{row['bandwidth'] / 1e9:,.1f}",
            f"{row['of_copy']:.0%}",
            f"{row['max_error']:.0e}",
        )
    console.print(table)
    print_lines(
        console,
        f"{peaks_line(result['peaks'])}; the limit is that every operand is read or written once, "
        "at the copy bandwidth: 100 % of copy",
        *unavailable_lines(result["unavailable"]),
    )
