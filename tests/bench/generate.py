"""The cost of Canon in generation: each set against the same model without Canon, or Llama.

`model/decode.py` generates greedily; the time to the first token is prefill, the time per later
token decoding. See `timing.compare_candidates` for the order.
"""

import argparse
import gc
import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import transformers
from torch import Tensor

from canon_pretrain.core.cli import positive
from canon_pretrain.core.terminal import Console
from canon_pretrain.hf.classes import to_hf
from canon_pretrain.hf.config import llama_fields, to_fields
from canon_pretrain.hf.modeling_canon import LlamaCanonConfig, LlamaCanonForCausalLM
from canon_pretrain.hf.reading import interleave_orders
from canon_pretrain.model.counts import num_parameters
from canon_pretrain.model.decode import generate
from canon_pretrain.model.transformer import Transformer
from canon_pretrain.titan.spec import random_model
from tests.bench import tables, variants
from tests.bench.limits import Machine
from tests.bench.timing import (
    BASE,
    Block,
    Candidate,
    Seconds,
    gc_disabled,
    now,
    synchronize,
    time_pairs,
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
        run = partial(generate_by_decoder, model)
        counts = {b: operators_of(run, texts, machine) for b, texts in prompts.items()}

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
    return decode_block(partial(generate_by_decoder, model), prompts, new_tokens)()


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


# -- over transformers


def add_transformers_arguments(parser: argparse.ArgumentParser) -> None:
    shapes = dict.fromkeys(("cuda", "cpu"), (0, 0))  # set by the options below
    # Llama has RoPE
    defaults: dict[str, Any] = {"sets": ["ABCD"], "pairs": 9, "position": "rope"}
    variants.add_options(parser, ["sets", "pairs"], shapes=shapes, micro_batch=None, **defaults)
    add_shape_options(parser, batches=[1, 8])
    parser.set_defaults(prompt_tokens=64, new_tokens=48)


def measure_transformers(arguments: argparse.Namespace, machine: Machine, log: Log) -> Result:
    """Compare greedy decoding, without and with Canon, with transformers' Llama of equal size.

    Our decoder is compared with a bare loop around Llama's forward pass and with its `generate`;
    the class of our exports in transformers with the latter. All have the same weights in the same
    memory, caches that grow, SDPA, and no rule that stops them before the last token.
    """
    arguments.tokens = arguments.prompt_tokens + arguments.new_tokens
    work = variants.workload(arguments, machine)
    llama = llama_model(random_model(work.args, work.device, work.dtype))
    bases = {"loop": partial(generate_in_loop, llama), "generate": partial(hf_generate, llama)}

    rows = []
    for canon_set in ("", *variants.normalize_canon_sets(arguments.sets)):
        ours = random_model(variants.with_canon(work.args, canon_set), work.device, work.dtype)
        share_weights(ours, llama)
        export = export_model(ours)
        decoder = partial(generate_by_decoder, ours)
        pairs = {
            "our decoder / its loop": (bases["loop"], decoder),
            "our decoder / its generate": (bases["generate"], decoder),
            "our export / its generate": (bases["generate"], partial(hf_generate, export)),
        }
        for batch, (name, (base, other)) in itertools.product(arguments.batches, pairs.items()):
            log(f"{canon_set or 'no Canon'}, {name}, batch {batch} ...")
            prompts = random_prompts(work.args.vocab_size, batch, arguments.prompt_tokens)
            answers = [run(prompts, arguments.new_tokens) for run in (base, other)]
            num_equal = sum(ours == theirs for ours, theirs in zip(*answers, strict=True))
            blocks = [decode_block(run, prompts, arguments.new_tokens) for run in (base, other)]
            row = {
                "canon_set": canon_set,
                "batch": batch,
                "pair": name,
                "equal": num_equal,
                "operators": operators_of(other, prompts, machine),
                "base_operators": operators_of(base, prompts, machine),
                **time_pairs(*blocks, arguments.pairs)[DECODE],
            }
            rows.append(row)
    return {
        **work.facts(),
        "prompt_tokens": arguments.prompt_tokens,
        "new_tokens": arguments.new_tokens,
        "operators_are": "kernels" if machine.on_gpu else "operators",
        "rows": rows,
    }


Prompts = Sequence[Sequence[int]]
OnToken = Callable[[], None]
Generate = Callable[..., list[list[int]]]
"""Generates `num_new` tokens after each prompt, and calls an `OnToken` after each step."""


def random_prompts(vocab_size: int, batch: int, num_tokens: int) -> Prompts:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(vocab_size, (batch, num_tokens), generator=generator).tolist()


def llama_model(ours: Transformer) -> Any:
    """Return transformers' Llama with the weights of our model, which it shares with it.

    All but those of Q and K, whose rows it has in another order.
    """
    fields = llama_fields(ours.args)
    assert fields is not None
    config = transformers.AutoConfig.for_model(**fields)
    model: Any = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")

    orders = interleave_orders(ours.args)
    state = {}
    for name, tensor in ours.state_dict().items():
        if name in orders:
            tensor = tensor[orders[name].argsort()]
        state[to_hf(name, "llama")] = tensor
    model.load_state_dict(state, assign=True)
    return model.to(ours.tok_embeddings.weight.device).eval()


def share_weights(ours: Transformer, llama: Any) -> None:
    """Let our model have the weights of `llama`, in the same memory where the order is the same."""
    state = ours.state_dict()
    theirs = llama.state_dict()
    orders = interleave_orders(ours.args)
    for name in state:
        their_name = to_hf(name, "llama")
        if their_name in theirs:
            tensor = theirs[their_name]
            state[name] = tensor[orders[name]] if name in orders else tensor
    ours.load_state_dict(state, assign=True)


def export_model(ours: Transformer) -> Any:
    """Return the class of our exports with the weights of our model."""
    model = LlamaCanonForCausalLM(LlamaCanonConfig(**to_fields(ours.args)))
    state = {to_hf(name): tensor for name, tensor in ours.state_dict().items()}
    model.load_state_dict(state, assign=True)
    return model.to(ours.tok_embeddings.weight.device).eval()


def ignore_token() -> None:
    """Do nothing when the host has read a token."""


def generate_by_decoder(
    model: Transformer, prompts: Prompts, num_new: int, on_token: OnToken = ignore_token
) -> list[list[int]]:
    def stop(i: int, tokens: list[int]) -> bool:
        if i == 0:
            on_token()
        return False

    num_tokens = sum(map(len, prompts)) + len(prompts) * num_new
    return generate(model, prompts, max_new_tokens=num_new, stop=stop, batch_tokens=num_tokens)


def hf_generate(
    model: Any, prompts: Prompts, num_new: int, on_token: OnToken = ignore_token
) -> list[list[int]]:
    """Generate by transformers' `generate`, which stops at the number of tokens only."""

    def goes_on(ids_BT: Tensor, scores: Any, **arguments: Any) -> Tensor:
        on_token()
        return torch.zeros(len(ids_BT), dtype=torch.bool, device=ids_BT.device)

    prompts_BT = torch.tensor(prompts, device=model.device)
    answers_BT = model.generate(
        prompts_BT,
        attention_mask=torch.ones_like(prompts_BT),
        max_new_tokens=num_new,
        do_sample=False,
        eos_token_id=None,
        stopping_criteria=[goes_on],
    )
    return answers_BT[:, prompts_BT.shape[1] :].tolist()


@torch.no_grad()
def generate_in_loop(
    model: Any, prompts: Prompts, num_new: int, on_token: OnToken = ignore_token
) -> list[list[int]]:
    """Generate by nothing but a model's forward passes with its cache."""
    tokens_BT = torch.tensor(prompts, device=model.device)
    cache = None
    answers = []
    for _ in range(num_new):
        output = model(tokens_BT, past_key_values=cache, use_cache=True, logits_to_keep=1)
        cache = output.past_key_values
        tokens_BT = output.logits[:, -1].argmax(-1, keepdim=True)
        answers.append(tokens_BT)
        on_token()
    return torch.cat(answers, dim=1).tolist()


def decode_block(run: Generate, prompts: Prompts, num_new: int) -> Block:
    """Return a block that is the time to the first token, and the mean per later one."""

    def block() -> Seconds:
        # when the host has read a token; on a GPU our decoder reads them in blocks
        stamps: list[float] = []
        gc.collect()
        synchronize()
        with gc_disabled():
            begin = now()
            run(prompts, num_new, lambda: stamps.append(now()))

        decode_s = (stamps[-1] - stamps[0]) / max(1, len(stamps) - 1)
        return {PREFILL: stamps[0] - begin, DECODE: decode_s}

    return block


def operators_of(run: Generate, prompts: Prompts, machine: Machine) -> float:
    """Return operators (on a GPU: kernels) per decoding step."""
    of_nine = machine.count_operators(partial(run, prompts, 9))
    of_one = machine.count_operators(partial(run, prompts, 1))
    return (of_nine - of_one) / 8


def print_transformers(result: dict[str, Any], console: Console) -> None:
    columns: tables.Columns = {
        "batch": lambda row: str(row["batch"]),
        "Canon": lambda row: row["canon_set"] or "none",
        "ours / Llama's": lambda row: row["pair"],
        "ms": lambda row: tables.ms(row["other_s"], 3),
        "Llama ms": lambda row: tables.ms(row["base_s"], 3),
        "over Llama": tables.extra,
        "10th to 90th": tables.spread,
        "target": lambda row: tables.verdict(tables.OVER_LLAMA, row),
        f"{result['operators_are']} per step": lambda row: f"{row['operators']:.0f}",
        "Llama's": lambda row: f"{row['base_operators']:.0f}",
        "equal answers": lambda row: str(row["equal"]),
    }
    line = (
        f"{result['model']}, {result['dtype']}, prompts of {result['prompt_tokens']} tokens, "
        f"{result['new_tokens']} decoded greedily; ms per step of one token per row; medians of "
        f"{result['rows'][0]['pairs']} pairs"
    )
    tables.print_table(console, result["rows"], columns, line)


BENCHES = {
    "generate": variants.Bench(add_arguments, measure, print_result),
    "transformers": variants.Bench(
        add_transformers_arguments, measure_transformers, print_transformers
    ),
}
