"""Each kernel by itself: seconds against the reference's, and bytes against the copy bandwidth.

Every form of model/canon_check.py by every backend, compiled as a block is. Before anything is
timed its values and gradients are compared with the formula in float64.
"""

import argparse
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from canon_pretrain.bench import tables, variants
from canon_pretrain.bench.machine import Machine
from canon_pretrain.bench.timing import NotMeasured, Step, compare_steps
from canon_pretrain.core.terminal import Console
from canon_pretrain.kernels.backends import compile_options
from canon_pretrain.model.canon_check import (
    Form,
    WrongCanon,
    compare,
    forms,
    make_inputs,
    make_module,
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    names = (*variants.SHAPE, "backends", *variants.TIMING)
    shapes = {"cuda": (16, 4096), "cpu": (4, 1024)}
    variants.add_options(parser, *names, shapes=shapes, pairs=11, block_seconds=0.05)
    parser.set_defaults(position="rope")  # B's neighbor is the rotation


def measure(
    arguments: argparse.Namespace, machine: Machine, say: Callable[[str], None]
) -> dict[str, Any]:
    """Return the figures as JSON can hold them; seconds, bytes. Raises UserError."""
    work = variants.workload(arguments, machine)
    backends, missing = variants.available(arguments.backends, work)
    tokens = work.micro_batch * work.num_tokens
    rows: list[dict[str, Any]] = []

    def measure_form(form: Form, base: Timed, timed: Timed) -> None:
        error = compare(form, timed.module, timed.compiled, timed.inputs)
        for direction, moved in zip(("forward", "backward"), form.moved, strict=True):
            steps = (getattr(one, direction)() for one in (base, timed))
            found = compare_steps(*steps, pairs=arguments.pairs, block_s=arguments.block_seconds)
            least = moved * tokens * work.dtype.itemsize
            bandwidth = least / found["other_s"]
            row = {"form": form.name, "backend": timed.backend, "direction": direction, **found}
            row |= {"least_bytes": least, "bandwidth": bandwidth, "max_error": error}
            rows.append(row | {"of_copy": bandwidth / machine.copy_bandwidth})
            say(f"{form.name} {direction} by {timed.backend}: {found['ratio']:.2f}")

    # a backward pass is timed again and again on what one forward pass has kept
    with torch._functorch.config.patch(donated_buffer=False):
        for form in forms(work.args):
            shape = (work.micro_batch, work.num_tokens)
            inputs = make_inputs(form, shape, work.dtype, work.device)
            base = Timed(form, "reference", inputs)
            for backend in backends:
                try:
                    with variants.failing(backend):
                        same = backend == base.backend
                        measure_form(form, base, base if same else Timed(form, backend, inputs))
                except (NotMeasured, WrongCanon) as why:
                    missing[f"{form.name} by {backend}"] = str(why)
    peaks = machine.peaks(work.dtype)
    return {**work.facts(), "peaks": peaks, "unavailable": missing, "rows": rows}


class Timed:
    """A form's module, compiled, its inputs, and the two passes as steps."""

    def __init__(self, form: Form, backend: str, inputs: Sequence[Tensor]) -> None:
        self.backend, self.inputs = backend, inputs
        self.module = make_module(form, backend, inputs[0].dtype, inputs[0].device)
        options = compile_options(inputs[0].device.type, backend)
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


def print_result(result: dict[str, Any], console: Console) -> None:
    columns: tables.Columns = {
        "kernel": lambda row: row["form"],
        "backend": lambda row: row["backend"],
        **tables.PASS,
        "MB at least": lambda row: f"{row['least_bytes'] / 1e6:,.2f}",
        "GB/s": lambda row: f"{row['bandwidth'] / 1e9:,.1f}",
        "of copy": lambda row: f"{row['of_copy']:.0%}",
    }
    line = (
        f"{result['work']}, each compiled; factor over the reference; "
        f"{tables.peaks_line(result['peaks'])}; the limit is that every operand is read or written "
        "once, at the copy bandwidth: 100 % of copy"
    )
    tables.print_table(console, result["rows"], columns, line)
