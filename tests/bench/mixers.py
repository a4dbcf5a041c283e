"""Recurrent mixers: their kernels over SDPA and by length, and their blocks over Llama's.

`sdpa`: forward and backward of each recurrence over SDPA with as many heads of (K + V) / 2 dims, as
many FLOPs per pair of tokens. `length`: a token of a longer row over one of the first `--lengths`.
`layers`: all compiled blocks of the model, without embedding and head, over those of Llama.
"""

import argparse
import dataclasses
import itertools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from canon_pretrain.core.terminal import Console
from canon_pretrain.kernels.backends import RECURRENCES, mixer_problem, recurrence
from canon_pretrain.kernels.recurrences import CHUNKED
from canon_pretrain.model.args import fill_sizes
from canon_pretrain.model.init import initial_value
from tests.bench import tables, variants
from tests.bench.limits import Machine
from tests.bench.timing import Step, compare_steps
from tests.bench.variants import NONE, Log, Result, Workload

HEADS = 4
KEYS = 64
VALUES = 128
MODELS: dict[str, dict[str, Any]] = {
    "gla": {"mixer": "gla"},
    "mamba2": {"mixer": "mamba2"},
    "mamba2 mlp": {"mixer": "mamba2", "ffn": "gated"},
    "gated_deltanet": {"mixer": "gated_deltanet"},
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    variants.add_options(
        parser,
        (*variants.SHAPE, *variants.TIMING),
        shapes={"cuda": (6, 4096), "cpu": (1, 1024)},
        pairs=7,
        block_seconds=0.3,
    )
    parser.set_defaults(flavor="12L768D")
    parser.add_argument(
        "--lengths",
        nargs="+",
        type=int,
        default=[1024, 4096, 16384],
        help="tokens per row (default: 1024 4096 16384)",
    )


def measure(arguments: argparse.Namespace, machine: Machine, log: Log) -> Result:
    work = variants.workload(arguments, machine)
    rows: list[dict[str, Any]] = []
    missing: dict[str, str] = {}

    def compare(part: str, name: str, base: Step, other: Step, factor: float = 1.0) -> None:
        times = compare_steps(base, other, pairs=arguments.pairs, block_s=arguments.block_seconds)
        for ratio in ("ratio", "ratio_low", "ratio_high"):
            times[ratio] *= factor
        rows.append({"part": part, "name": name, **times})
        log(f"{part}: {name}: {times['ratio']:.2f}")

    # kernels over SDPA, and over themselves by length
    for mixer, backend in itertools.product(CHUNKED, ("chunked", *RECURRENCES)):
        if problem := mixer_problem(mixer, KEYS, backend):
            missing[f"{mixer} by {backend}"] = problem
            continue
        name = f"{mixer} {backend}"
        compare("sdpa", name, kernel_step("sdpa", "", work), kernel_step(mixer, backend, work))
        first_length, *longer = arguments.lengths
        for length in longer:
            short = kernel_step(mixer, backend, work, first_length)
            long = kernel_step(mixer, backend, work, length)
            compare("length", f"{name} {length:,}", short, long, first_length / length)

    # layers over Llama's
    for name, changes in MODELS.items():
        args = dataclasses.replace(work.args, **fill_sizes(work.args, changes))
        llama = layer_step(work)
        layer = layer_step(dataclasses.replace(work, args=args))
        compare("layers", name, llama, layer, args.num_layers / work.args.num_layers)
    return {**work.facts(), "unavailable": missing, "rows": rows}


def kernel_step(mixer: str, backend: str, work: Workload, num_tokens: int = 0) -> Step:
    """Return forward and backward of a recurrence (compiled), or of SDPA, on random inputs."""
    shape = (work.micro_batch, num_tokens or work.num_tokens, HEADS)
    if mixer == "sdpa":
        widths = ((KEYS + VALUES) // 2,) * 3
    else:
        widths = (KEYS, KEYS, VALUES)
    q, k, v = (
        F.normalize(torch.randn(*shape, width, device=work.device), dim=-1).to(work.dtype)
        for width in widths
    )
    log = F.logsigmoid(torch.randn(*shape, KEYS, device=work.device))
    gate = log[..., 0]
    per_head = log[0, 0, :, 0]
    inputs = {
        "sdpa": (q, k, v),
        "gla": (q, k, v, log / 16),
        "mamba2": (v, -gate, per_head, k[:, :, 0], q[:, :, 0], per_head),
        "gated_deltanet": (q, k, v, gate, gate.exp()),
    }[mixer]
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    options = {"scale": 0.1} if mixer == "gla" else {}

    def run(*inputs: Tensor) -> Tensor:
        if mixer == "sdpa":
            q, k, v = (x.transpose(1, 2) for x in inputs)
            return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        return recurrence(mixer, backend)(*inputs, state=None, starts_BT=None, **options)[0]

    compiled: Any = torch.compile(run, fullgraph=True, dynamic=False)
    grad = torch.randn_like(v)
    return lambda: torch.autograd.grad(compiled(*leaves), leaves, grad)


def layer_step(work: Workload) -> Step:
    """Return forward and backward of a compiled block with its initial weights."""
    block, compiled = variants.compiled_block(work, NONE)
    with torch.no_grad():
        for name, parameter in block.named_parameters():
            value = initial_value(work.args, f"layers.0.{name}", parameter.shape)
            parameter.copy_(value.rows(0, len(parameter)))

    shape = (work.micro_batch, work.num_tokens, work.args.dim)
    h_BTD = torch.randn(shape, device=work.device).to(work.dtype).requires_grad_()
    leaves = [h_BTD, *block.parameters()]
    grad = torch.randn_like(h_BTD)
    return lambda: torch.autograd.grad(compiled(h_BTD), leaves, grad)


def print_result(result: Result, console: Console) -> None:
    columns: tables.Columns = {
        "over": lambda row: row["part"],
        "mixer": lambda row: row["name"],
        "base ms": lambda row: tables.ms(row["base_s"]),
        "ms": lambda row: tables.ms(row["other_s"]),
        **tables.FACTOR,
    }
    line = f"{HEADS} heads, K {KEYS}, V {VALUES}; layers: {result['work']}; forward and backward"
    tables.print_table(console, result["rows"], columns, line)


BENCHES = {"mixers": variants.Bench(add_arguments, measure, print_result)}
