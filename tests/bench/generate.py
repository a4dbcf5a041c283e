"""The cost of Canon in generation: each set against the same model without Canon.

`model/decode.py` generates greedily; the time to the first token is prefill, the time per later
token decoding. See `timing.compare_candidates` for the order.
"""

import argparse
import gc
import itertools
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from canon_pretrain.core.cli import positive
from canon_pretrain.core.terminal import Console
from canon_pretrain.hf.loading import load_model, load_transformers
from canon_pretrain.model.counts import num_parameters
from canon_pretrain.model.decode import generate
from canon_pretrain.model.transformer import Transformer
from canon_pretrain.titan.spec import random_model
from tests.bench import tables, variants
from tests.bench.limits import Machine
from tests.bench.timing import (
    BASE,
    Candidate,
    Seconds,
    compare_steps,
    gc_disabled,
    now,
    synchronize,
)
from tests.bench.variants import Log, Result, Variant

PREFILL = "prefill"
DECODE = "decode"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    shapes = dict.fromkeys(("cuda", "cpu"), (0, 0))  # set by the options below
    variants.add_options(parser, ["sets", "pairs"], pairs=9, shapes=shapes, micro_batch=None)
    add_shape_options(parser, batches=[1, 8, 32])


def add_shape_options(parser: argparse.ArgumentParser, batches: list[int]) -> None:
    """Add the batch sizes and the lengths of prompts and answers."""
    parser.add_argument(
        "--batches",
        nargs="+",
        type=positive,
        default=batches,
        help=f"batch sizes (default: {' '.join(map(str, batches))})",
    )
    for option, tokens in (("--prompt-tokens", 128), ("--new-tokens", 64)):
        parser.add_argument(option, type=positive, default=tokens, help="(default: %(default)s)")


def measure(arguments: argparse.Namespace, machine: Machine, log: Log) -> Result:
    num_prompt = arguments.prompt_tokens
    num_new = arguments.new_tokens
    arguments.tokens = num_prompt + num_new
    work = variants.workload(arguments, machine)
    vocab_size = work.args.vocab_size
    chosen = variants.variants(arguments.sets, ["auto"], ["auto"])
    generator = torch.Generator().manual_seed(0)
    prompts = {
        batch: torch.randint(vocab_size, (batch, num_prompt), generator=generator).tolist()
        for batch in arguments.batches
    }

    def make(variant: Variant) -> Candidate:
        log(f"{variant.name} ...")
        args = variants.with_canon(work.args, variant.canon_set)
        model = random_model(args, work.device, work.dtype, canon_backend=variant.backend)
        counts = {b: operators_per_token(model, texts, machine) for b, texts in prompts.items()}

        def block() -> dict[str, float]:
            times: dict[str, float] = {}
            for batch, texts in prompts.items():
                for part, seconds in time_generation(model, texts, num_new).items():
                    times[f"{part} {batch}"] = seconds
            return times

        block()  # warm up
        return Candidate(block, lambda: {"operators": counts})

    parts, facts, _ = variants.compare_variants(make, chosen, arguments.pairs, machine)
    rows = []
    for batch, variant in itertools.product(prompts, chosen):
        row = {
            **variant.row(),
            "batch": batch,
            "operators": facts[variant.name]["operators"][batch],
            "base_operators": facts[BASE]["operators"][batch],
            PREFILL: parts[variant.name][f"{PREFILL} {batch}"],
            DECODE: parts[variant.name][f"{DECODE} {batch}"],
        }
        rows.append(row)

    # a step of decoding reads all weights but the embedding
    num_weights = num_parameters(work.args) - vocab_size * work.args.dim
    return {
        **work.facts(),
        "prompt_tokens": num_prompt,
        "new_tokens": num_new,
        "operators_are": "kernels" if machine.on_gpu else "operators",
        "copy_bandwidth": machine.copy_bandwidth,
        "weights_read_s": num_weights * work.dtype.itemsize / machine.copy_bandwidth,
        "rows": rows,
    }


def time_generation(
    model: Transformer, prompts: Sequence[Sequence[int]], new_tokens: int
) -> Seconds:
    """Generate once; return seconds until the first token, and per later one, for the batch."""
    batch_tokens = len(prompts) * (len(prompts[0]) + new_tokens)
    stamps: list[float] = []

    def stop(i: int, tokens: list[int]) -> bool:
        if i == 0:  # when the host has read the token: the first, then in blocks
            stamps.append(now())
        return False

    gc.collect()
    synchronize()
    with gc_disabled():
        begin = now()
        generate(model, prompts, max_new_tokens=new_tokens, stop=stop, batch_tokens=batch_tokens)
    return {PREFILL: stamps[0] - begin, DECODE: (stamps[-1] - stamps[0]) / max(1, len(stamps) - 1)}


def operators_per_token(
    model: Transformer, prompts: Sequence[Sequence[int]], machine: Machine
) -> float:
    """Return operators (on a GPU: kernels) per decoding step."""
    of_nine = machine.count_operators(partial(generate, model, prompts, max_new_tokens=9))
    of_one = machine.count_operators(partial(generate, model, prompts, max_new_tokens=1))
    return (of_nine - of_one) / 8


def print_result(result: dict[str, Any], console: Console) -> None:
    columns: tables.Columns = {
        "batch": lambda row: str(row["batch"]),
        "Canon": lambda row: row["canon_set"],
        "prefill ms": lambda row: tables.ms(row[PREFILL]["other_s"]),
        "over none": lambda row: tables.extra(row[PREFILL]),
        "decode ms": lambda row: tables.ms(row[DECODE]["other_s"], 3),
        "none ms": lambda row: tables.ms(row[DECODE]["base_s"], 3),
        "decode over none": lambda row: tables.extra(row[DECODE]),
        "spread": lambda row: tables.spread(row[DECODE]),
        "target": lambda row: tables.verdict(tables.GENERATION, row | row[DECODE]),
        f"{result['operators_are']} per step": lambda row: f"{row['operators']:.0f}",
        "none's": lambda row: f"{row['base_operators']:.0f}",
    }
    line = (
        f"{result['model']}, {result['dtype']}, prompts of {result['prompt_tokens']:,} tokens, "
        f"answers of {result['new_tokens']:,}; decode: ms per step of one token per row; medians "
        f"of {result['rows'][0][DECODE]['pairs']} pairs. Lower bound of a step: reading the "
        f"weights once, {1000 * result['weights_read_s']:.3f} ms at the measured copy bandwidth "
        f"of {result['copy_bandwidth'] / 1e9:,.1f} GB/s"
    )
    tables.print_table(console, result["rows"], columns, line)


# -- beside transformers


def add_transformers_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("export", type=Path, help="an exported folder")
    parser.add_argument("--pairs", type=positive, default=7, help="(default: %(default)s)")
    add_shape_options(parser, batches=[1, 8])


def measure_transformers(arguments: argparse.Namespace, machine: Machine, log: Log) -> Result:
    """Compare whole greedy generations of one export, with a cache in both."""
    ours = load_model(arguments.export, machine.device)
    theirs = load_transformers(arguments.export, machine.device)
    num_new = arguments.new_tokens
    generator = torch.Generator().manual_seed(0)

    rows = []
    for batch in arguments.batches:
        shape = (batch, arguments.prompt_tokens)
        prompts = torch.randint(3, ours.args.vocab_size, shape, generator=generator).tolist()
        run_ours = partial(generate, ours, prompts, max_new_tokens=num_new)
        run_theirs = partial(theirs, prompts, num_new)
        num_equal = sum(a == b for a, b in zip(run_ours(), run_theirs(), strict=True))
        log(f"batch {batch}: {num_equal} of {batch} answers are equal")
        times = compare_steps(run_ours, run_theirs, pairs=arguments.pairs, block_s=0.0)
        rows.append({"batch": batch, "tokens": batch * num_new, "equal": num_equal, **times})
    return {
        "parameters": num_parameters(ours.args),
        "prompt_tokens": arguments.prompt_tokens,
        "new_tokens": num_new,
        "rows": rows,
    }


def print_transformers(result: dict[str, Any], console: Console) -> None:
    columns: tables.Columns = {
        "batch": lambda row: str(row["batch"]),
        "tokens/s": lambda row: f"{row['tokens'] / row['base_s']:,.0f}",
        "transformers": lambda row: f"{row['tokens'] / row['other_s']:,.0f}",
        "ratio": lambda row: f"{row['ratio']:.2f}",
        "10th to 90th": lambda row: f"{row['ratio_low']:.2f} to {row['ratio_high']:.2f}",
    }
    line = (
        f"{result['parameters']:,} parameters, float32, prompts of {result['prompt_tokens']} "
        f"tokens, answers of {result['new_tokens']}, greedy, prompts read included"
    )
    tables.print_table(console, result["rows"], columns, line)


BENCHES = {
    "generate": variants.Bench(add_arguments, measure, print_result),
    "transformers": variants.Bench(
        add_transformers_arguments, measure_transformers, print_transformers
    ),
}
