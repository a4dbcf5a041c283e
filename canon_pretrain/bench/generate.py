"""Canon's price in generation: each set beside the same model without Canon, prompt and answer.

`model/decode.py` as whoever generates calls it, greedily, with the clock read at every token: until
the first one the prompts were read (prefill), after it each is one step of decoding. On a CPU two
models take turns, on a GPU each is in memory alone, the one without Canon first and last.
"""

import argparse
import dataclasses
import gc
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from canon_pretrain.bench import variants
from canon_pretrain.bench.bare import fill
from canon_pretrain.bench.machine import Machine, heading
from canon_pretrain.bench.operators import count_operators
from canon_pretrain.bench.tables import make_table, print_lines
from canon_pretrain.bench.targets import GENERATION, show
from canon_pretrain.bench.timing import (
    Block,
    Comparison,
    around,
    no_garbage,
    now,
    paired,
    synchronize,
)
from canon_pretrain.bench.variants import Variant
from canon_pretrain.core.terminal import Console
from canon_pretrain.kernels.backends import BACKENDS
from canon_pretrain.model.args import ModelArgs, num_parameters
from canon_pretrain.model.decode import generate
from canon_pretrain.model.transformer import Transformer

PREFILL, DECODE = "prefill", "decode"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command line of `generate`."""
    add = parser.add_argument
    variants.add_model_arguments(parser)
    add("--batches", nargs="+", type=int, default=[1, 8, 32], metavar="B", help="rows at a time")
    add("--prompt-tokens", type=int, default=128, metavar="T", help="(default: %(default)s)")
    add("--new-tokens", type=int, default=64, metavar="T", help="(default: %(default)s)")
    add("--sets", nargs="+", default=list(variants.SETS), metavar="SET", help="Canon sets, as AC")
    add("--backend", choices=BACKENDS, default="auto", help="of Canon (default: %(default)s)")
    add("--pairs", type=int, default=9, help="pairs of calls (default: %(default)s)")


def measure(
    arguments: argparse.Namespace, machine: Machine, say: Callable[[str], None]
) -> dict[str, Any]:
    """The figures of one run, as JSON can hold them; seconds. Raises UserError."""
    variants.check_at_least(
        1, batches=min(arguments.batches), prompt_tokens=arguments.prompt_tokens
    )
    variants.check_at_least(1, pairs=arguments.pairs)
    variants.check_at_least(2, new_tokens=arguments.new_tokens)
    lengths = (arguments.prompt_tokens, arguments.new_tokens)
    args = variants.model_args(arguments, on_gpu=machine.on_gpu, num_tokens=sum(lengths))
    dtype = variants.dtype_of(arguments, on_gpu=machine.on_gpu)
    if arguments.backend != "auto":
        variants.available([arguments.backend], machine.device, dtype)
    chosen = variants.variants(arguments.sets, [arguments.backend], [arguments.backend])
    prompts = {batch: _prompts(args, batch, lengths[0]) for batch in arguments.batches}
    compare_all = measure_alone if machine.on_gpu else measure_in_turns
    rows = []
    for variant, batch, found in compare_all(args, chosen, prompts, dtype, arguments, machine):
        rows.append(
            {
                "variant": variant.name,
                "canon_set": variant.canon_set,
                "backend": variant.backend,
                "batch": batch,
                "operators": found.operators,
                "base_operators": found.base_operators,
                **{part: dataclasses.asdict(each) for part, each in found.parts.items()},
            }
        )
        extra = {part: f"{each.extra:+.1%}" for part, each in found.parts.items()}
        say(f"{variant.name}, batch {batch}: {extra}")
    weights = (num_parameters(args) - args.vocab_size * args.dim) * dtype.itemsize
    return {
        "bench": "generate",
        **machine.facts(),
        "model": variants.describe(args),
        "args": dataclasses.asdict(args),
        "dtype": str(dtype).removeprefix("torch."),
        "prompt_tokens": lengths[0],
        "new_tokens": lengths[1],
        "operators_are": "kernels" if machine.on_gpu else "operators",
        "copy_bandwidth": machine.copy_bandwidth,
        "weight_bytes": weights,
        "weights_read_s": weights / machine.copy_bandwidth,
        "rows": rows,
    }


@dataclasses.dataclass(frozen=True)
class Found:
    """A variant beside the model without Canon: each part, and operators per token of both."""

    parts: dict[str, Comparison]
    operators: float
    base_operators: float


Rows = Iterator[tuple[Variant, int, Found]]
Prompts = Mapping[int, Sequence[Sequence[int]]]
"""Batch size -> that many prompts."""


def measure_in_turns(
    args: ModelArgs,
    chosen: Sequence[Variant],
    prompts: Prompts,
    dtype: torch.dtype,
    arguments: argparse.Namespace,
    machine: Machine,
) -> Rows:
    """The model without Canon stays in memory, beside one other; calls in turn."""
    base = _model(args, variants.NONE, dtype, machine.device)
    counts = {batch: operators_per_token(base, prompts[batch], machine) for batch in prompts}
    for variant in chosen:
        other = _model(args, variant, dtype, machine.device)
        for batch, texts in prompts.items():
            own, others = (generation(x, texts, arguments.new_tokens) for x in (base, other))
            for block in (own, others):
                block()
            parts = paired(own, others, arguments.pairs)
            operators = operators_per_token(other, texts, machine)
            yield variant, batch, Found(parts, operators, counts[batch])
        del other, own, others, block
        gc.collect()


def measure_alone(
    args: ModelArgs,
    chosen: Sequence[Variant],
    prompts: Prompts,
    dtype: torch.dtype,
    arguments: argparse.Namespace,
    machine: Machine,
) -> Rows:
    """One model in memory at a time: none, each variant, and none again."""

    def calls(variant: Variant) -> dict[int, Calls]:
        machine.free_memory()
        model = _model(args, variant, dtype, machine.device)
        found = {}
        for batch, texts in prompts.items():
            block = generation(model, texts, arguments.new_tokens)
            block()
            times = [block() for _ in range(arguments.pairs)]
            found[batch] = Calls(times, operators_per_token(model, texts, machine))
        return found

    before, *others, after = map(calls, (variants.NONE, *chosen, variants.NONE))
    for variant, found in zip(chosen, others, strict=True):
        for batch, other in found.items():
            parts = {}
            for part in (PREFILL, DECODE):
                sides = (before[batch], other, after[batch])
                parts[part], _ = around(*([t[part] for t in side.times] for side in sides))
            yield variant, batch, Found(parts, other.operators, before[batch].operators)


@dataclasses.dataclass(frozen=True)
class Calls:
    """Seconds of some calls by part, and operators per token; the model is gone."""

    times: list[Mapping[str, float]]
    operators: float


def _model(
    args: ModelArgs, variant: Variant, dtype: torch.dtype, device: torch.device
) -> Transformer:
    own = variants.with_canon(args, variant.canon_set)
    with torch.device("meta"):
        model = Transformer(own, canon_backend=variant.backend).to(dtype)
    model.to_empty(device=device)
    fill(model)
    return model.requires_grad_(False).eval()


def _prompts(args: ModelArgs, batch: int, num_tokens: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    shape = (batch, num_tokens)
    return torch.randint(args.vocab_size, shape, generator=generator).tolist()


def generation(model: Transformer, prompts: Sequence[Sequence[int]], new_tokens: int) -> Block:
    """A block of one call: seconds until the first token, and of each later one, for all rows."""
    batch_tokens = len(prompts) * (len(prompts[0]) + new_tokens)

    def block() -> Mapping[str, float]:
        stamps: list[float] = []

        def stop(i: int, tokens: list[int]) -> bool:
            if i == 0:  # once a step; the tokens are on the host then, so the device is done
                stamps.append(now())
            return False

        gc.collect()
        synchronize()
        with no_garbage():
            begin = now()
            generate(
                model, prompts, max_new_tokens=new_tokens, stop=stop, batch_tokens=batch_tokens
            )
        return {
            PREFILL: stamps[0] - begin,
            DECODE: (stamps[-1] - stamps[0]) / (len(stamps) - 1),
        }

    return block


def operators_per_token(
    model: Transformer, prompts: Sequence[Sequence[int]], machine: Machine
) -> float:
    """Operators (on a GPU: kernels) of a step of decoding: those of 9 tokens less those of 1."""
    steps = 8

    def operators(count: int) -> int:
        call = lambda: generate(model, prompts, max_new_tokens=count)  # noqa: E731
        return count_operators(call, on_gpu=machine.on_gpu)

    return (operators(1 + steps) - operators(1)) / steps


def print_result(result: dict[str, Any], console: Console) -> None:
    """The table that a person reads."""
    print_lines(console, heading(result))
    print_lines(
        console,
        f"{result['model']}, {result['dtype']}, prompts of {result['prompt_tokens']:,} tokens, "
        f"answers of {result['new_tokens']:,}",
    )
    table = make_table(
        *("batch", "Canon", "prefill ms", "over none", "decode ms", "over none", "spread"),
        *("target", f"{result['operators_are']} a step"),
    )
    for batch in dict.fromkeys(row["batch"] for row in result["rows"]):
        rows = [row for row in result["rows"] if row["batch"] == batch]
        none = [
            1000 * statistics.median(row[p]["base_s"] for row in rows) for p in (PREFILL, DECODE)
        ]
        operators = f"{rows[0]['base_operators']:.0f}"
        table.add_row(
            str(batch), "none", f"{none[0]:.2f}", "", f"{none[1]:.3f}", "", "", "", operators
        )
        for row in rows:
            table.add_row("", row["canon_set"], *_cells(row))
        table.add_section()
    console.print(table)
    print_lines(
        console,
        f"decode: ms a step, which makes one token in every row; medians of "
        f"{result['rows'][0][DECODE]['pairs']} pairs of calls. The limit: a step reads the weights "
        f"once, {1000 * result['weights_read_s']:.3f} ms at the measured copy bandwidth of "
        f"{result['copy_bandwidth'] / 1e9:,.1f} GB/s; Canon adds well under 1 % to those bytes",
    )


def _cells(row: dict[str, Any]) -> list[str]:
    prefill, decode = row[PREFILL], row[DECODE]
    return [
        f"{1000 * prefill['other_s']:.2f}",
        f"{prefill['ratio'] - 1:+.1%}",
        f"{1000 * decode['other_s']:.3f}",
        f"{decode['ratio'] - 1:+.1%}",
        f"{decode['ratio_low'] - 1:+.1%} to {decode['ratio_high'] - 1:+.1%}",
        show(GENERATION.get(row["canon_set"]), decode["ratio"] - 1),
        f"{row['operators']:.0f}",
    ]
