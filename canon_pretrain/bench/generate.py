"""Canon's price in generation: each set beside the same model without Canon, prompt and answer.

`model/decode.py` as whoever generates calls it, greedily, with the clock read at every token: until
the first one the prompts were read (prefill), after it each is one step of decoding.
"""

import argparse
import dataclasses
import gc
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from canon_pretrain.bench import variants
from canon_pretrain.bench.bare import fill
from canon_pretrain.bench.machine import Machine, heading
from canon_pretrain.bench.operators import count_operators
from canon_pretrain.bench.tables import make_table, print_lines
from canon_pretrain.bench.targets import GENERATION, show
from canon_pretrain.bench.timing import Block, Comparison, no_garbage, now, paired, synchronize
from canon_pretrain.kernels.backends import BACKENDS
from canon_pretrain.model.args import ModelArgs, num_parameters
from canon_pretrain.model.decode import generate
from canon_pretrain.model.transformer import Transformer
from canon_pretrain.terminal import Console

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
    base = _model(args, "auto", dtype, machine.device)
    prompts = {batch: _prompts(args, batch, lengths[0]) for batch in arguments.batches}
    base_operators = {
        batch: operators_per_token(base, prompts[batch], machine) for batch in prompts
    }
    rows = []
    for variant in chosen:
        own = variants.with_canon(args, variant.canon_set)
        other = _model(own, variant.backend, dtype, machine.device)
        for batch in prompts:
            found = compare(base, other, prompts[batch], lengths[1], arguments.pairs)
            row = {
                "variant": variant.name,
                "canon_set": variant.canon_set,
                "backend": variant.backend,
                "batch": batch,
                "operators": operators_per_token(other, prompts[batch], machine),
                "base_operators": base_operators[batch],
                **{part: dataclasses.asdict(each) for part, each in found.items()},
            }
            rows.append(row)
            extra = {part: f"{each.extra:+.1%}" for part, each in found.items()}
            say(f"{variant.name}, batch {batch}: {extra}")
        del other
        gc.collect()
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


def compare(
    base: Transformer,
    other: Transformer,
    prompts: Sequence[Sequence[int]],
    new_tokens: int,
    pairs: int,
) -> dict[str, Comparison]:
    """The two's generation side by side, PREFILL and DECODE apart."""
    own, others = (generation(model, prompts, new_tokens) for model in (base, other))
    for block in (own, others):
        block()
    return paired(own, others, pairs)


def _model(args: ModelArgs, backend: str, dtype: torch.dtype, device: torch.device) -> Transformer:
    with torch.device("meta"):
        model = Transformer(args, canon_backend=backend).to(dtype)
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
