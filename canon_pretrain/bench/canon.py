"""Each kernel by itself: seconds against the reference's, and bytes against the copy bandwidth.

Every form of model/canon_check.py by every backend, compiled as a block is. Before anything is
timed its values and gradients are compared with the formula in float64.
"""

import argparse
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from canon_pretrain.bench import tables, variants
from canon_pretrain.bench.machine import Machine
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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    variants.add_model_arguments(parser, gpu=(16, 4096), cpu=(4, 1024))
    parser.set_defaults(position="rope")  # B's neighbor is the rotation
    parser.add_argument("--backends", nargs="+", metavar="B", help="(default: all that can be had)")
    variants.add_timing_arguments(parser, pairs=11, block_s=0.05)


def measure(
    arguments: argparse.Namespace, machine: Machine, say: Callable[[str], None]
) -> dict[str, Any]:
    """Return the figures as JSON can hold them; seconds, bytes. Raises UserError."""
    work = variants.workload(arguments, machine)
    backends, missing = variants.available(arguments.backends, work.device, work.dtype)
    rows: list[dict[str, Any]] = []
    # a backward pass is timed again and again on what one forward pass has kept
    kept = torch._functorch.config.patch(donated_buffer=False)
    with variants.many_compilations(), kept:
        for form in forms(work.args):
            shape = (work.micro_batch, work.num_tokens)
            inputs = make_inputs(form, shape, work.dtype, work.device)
            base = Timed(form, REFERENCE, inputs)
            for backend in backends:
                timed = base if backend == REFERENCE else Timed(form, backend, inputs)
                try:
                    rows += measure_form(base, timed, arguments, machine)
                except WrongCanon as why:
                    missing[f"{form.name} by {backend}"] = str(why)
                except Exception as why:
                    if backend not in OPTIONAL:
                        raise
                    missing[f"{form.name} by {backend}"] = variants.failure(why)
                else:
                    say(f"{form.name}, {backend}: {rows[-2]['ratio']:.2f}, {rows[-1]['ratio']:.2f}")
    return {
        **work.facts(),
        "peaks": machine.peaks(work.dtype),
        "unavailable": missing,
        "rows": rows,
    }


class Timed:
    """A form's module, compiled, its inputs, and the two passes as steps."""

    def __init__(self, form: Form, backend: str, inputs: Sequence[Tensor]) -> None:
        self.form, self.backend, self.inputs = form, backend, inputs
        x_BTC = inputs[0]
        self.module = make_module(form, backend, x_BTC.dtype, x_BTC.device)
        options = compile_options(x_BTC.device.type, backend)
        self.compiled = torch.compile(self.module, fullgraph=True, dynamic=False, options=options)

    def forward(self) -> Step:
        """Return the pass that keeps what backward needs, as in training."""
        return lambda: self.compiled(*self.inputs)

    def backward(self) -> Step:
        """Return the gradients of every input and weight, from one forward pass."""
        outputs = self.compiled(*self.inputs)
        grads = [torch.randn_like(y) for y in outputs]
        wanted = (*self.inputs, *self.module.parameters())
        return lambda: torch.autograd.grad(outputs, wanted, grads, retain_graph=True)


def measure_form(
    base: Timed, timed: Timed, arguments: argparse.Namespace, machine: Machine
) -> list[dict[str, Any]]:
    """Return forward and backward beside the reference's; checked first. Raises WrongCanon."""
    form, x_BTC = timed.form, timed.inputs[0]
    error = compare(form, timed.module, timed.compiled, timed.inputs)
    rows = []
    for direction, moved in zip(("forward", "backward"), form.moved, strict=True):
        steps = (getattr(one, direction)() for one in (base, timed))
        found = compare_steps(*steps, pairs=arguments.pairs, block_s=arguments.block_seconds)
        least = moved * x_BTC.shape[0] * x_BTC.shape[1] * x_BTC.dtype.itemsize
        rows.append(
            {
                "form": form.name,
                "backend": timed.backend,
                "direction": direction,
                **dataclasses.asdict(found),
                "least_bytes": least,
                "bandwidth": least / found.other_s,
                "of_copy": least / found.other_s / machine.copy_bandwidth,
                "max_error": error,
            }
        )
    return rows


def print_result(result: dict[str, Any], console: Console) -> None:
    columns: tables.Columns = {
        "kernel": lambda row: row["form"],
        "backend": lambda row: row["backend"],
        "pass": lambda row: row["direction"],
        "ms": lambda row: tables.ms(row["other_s"], 3),
        **tables.FACTOR,
        "MB at least": lambda row: f"{row['least_bytes'] / 1e6:,.2f}",
        "GB/s": lambda row: f"{row['bandwidth'] / 1e9:,.1f}",
        "of copy": lambda row: f"{row['of_copy']:.0%}",
        "max error": lambda row: f"{row['max_error']:.0e}",
    }
    tables.print_table(console, result["rows"], columns)
    tables.print_lines(
        console,
        f"{tables.work_line(result)}, each compiled; factor over the reference; "
        f"{tables.peaks_line(result['peaks'])}; the limit is that every operand is read or written "
        "once, at the copy bandwidth: 100 % of copy",
    )
