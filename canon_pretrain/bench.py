"""Compare speeds on this machine, on the GPU if there is one.

Two candidates run in alternating order, so that load of the machine affects both. Benches of
kernels, mixers and backends are for authors: `python -m tests.bench`.
"""

import argparse
import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from operator import eq
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from rich import box
from rich.table import Table

from canon_pretrain.core.cli import positive, usage_error
from canon_pretrain.core.errors import UserError
from canon_pretrain.core.files import write_json
from canon_pretrain.core.terminal import Console
from canon_pretrain.machine.device import check_cuda
from canon_pretrain.machine.timing import Step, Timing, compare
from canon_pretrain.model.args import POSITIONS, ModelArgs, flavor

if TYPE_CHECKING:  # imports torch
    import torch

BASE = "no Canon"


class Defaults(NamedTuple):
    """What options are by default on a kind of device."""

    flavor: str
    micro_batch: int
    tokens: int
    dtype: str


DEFAULTS = {
    "cuda": Defaults("1b3", micro_batch=3, tokens=4096, dtype="bfloat16"),
    "cpu": Defaults("8L512D", micro_batch=1, tokens=1024, dtype="float32"),
}
NUM_PAIRS = 7
BLOCK_S = 0.3
"""How long a block of steps takes; a pair has one of each candidate."""
FIRST_TOKEN = 3
"""Ids below are special tokens."""
Generate = Callable[[list[list[int]], int], list[list[int]]]
"""Returns the answers to prompts, of a number of tokens."""


@dataclass(frozen=True)
class Row:
    """The speed of a candidate.

    `equal_answers`: the share of its answers that are those of transformers.
    """

    name: str
    batch: int
    tokens_per_second: float
    timing: Timing
    equal_answers: float | None = None


def add_step_arguments(parser: argparse.ArgumentParser) -> None:
    _add_common_arguments(parser)
    add = parser.add_argument
    add("--position", default="nope", choices=POSITIONS, help="(default: %(default)s)")
    add("--tokens", type=positive, metavar="N", help="per row (default: 4096 on a GPU, else 1024)")
    add("--micro-batch", type=positive, metavar="N", help="rows (default: 3 on a GPU, else 1)")
    add(
        "--dtype",
        choices=("float32", "bfloat16"),
        help="(default: bfloat16 on a GPU, else float32)",
    )


def add_generate_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "export",
        type=Path,
        nargs="?",
        metavar="EXPORT",
        help="a folder of `canon hf export`: compare with transformers",
    )
    _add_common_arguments(parser)
    add = partial(parser.add_argument, type=positive, metavar="N")
    add("--batches", nargs="+", default=[1, 8], help="numbers of prompts (default: 1 8)")
    add("--prompt-tokens", default=32, help="per prompt (default: %(default)s)")
    add("--new-tokens", default=64, help="per answer (default: %(default)s)")


def _add_common_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--flavor", metavar="F", help="size of the model (default: 1b3 on a GPU, else 8L512D)")
    add("--sets", nargs="+", metavar="SET", help="Canon sets (default: AC ABCD)")
    add("--json", type=Path, metavar="FILE", help="also write the rows here")


def run_step(arguments: argparse.Namespace) -> None:
    """Time forward and backward without Canon and with each set. Raises UserError."""
    with _bench(arguments.json) as device:
        import torch

        from canon_pretrain.kernels.backends import backend_problem
        from canon_pretrain.titan.spec import BareStep, job_of, one_rank

        on_gpu = device.type == "cuda"
        defaults = DEFAULTS[device.type]
        batch = arguments.micro_batch or defaults.micro_batch
        num_tokens = arguments.tokens or defaults.tokens
        dtype = getattr(torch, arguments.dtype or defaults.dtype)
        backend = "auto" if backend_problem("triton", device.type, dtype) else "triton"
        models = _models(arguments, device, num_tokens, arguments.position)

        def build(args: ModelArgs) -> Step:
            if not on_gpu:  # one block, and a small output layer, take long enough
                args = replace(args, num_layers=1, vocab_size=256)
            job = job_of(
                args,
                num_tokens=num_tokens,
                micro_batch=batch,
                dtype=dtype,
                canon_backend=backend,
            )
            return BareStep(job, device, plain=True)

        builders = {name: partial(build, args) for name, args in models.items()}
        with one_rank():
            rows = _compare(builders, batch, num_tokens)

    base = models[BASE]
    layers = f"{base.num_layers}L" if on_gpu else "one block of "
    title = (
        f"{layers}{base.dim}D, {base.position}, {batch} x {num_tokens:,} tokens, {dtype}, "
        f"{device.type}"
    )
    _report(rows, title, arguments.json)


def run_generate(arguments: argparse.Namespace) -> None:
    """Time generation by Canon set, or by an export and transformers. Raises UserError."""
    export: Path | None = arguments.export
    if export is not None and (arguments.flavor or arguments.sets):
        raise usage_error("canon bench generate", "--flavor and --sets do not apply to EXPORT")

    with _bench(arguments.json) as device:
        from canon_pretrain.hf.loading import load_model, load_transformers
        from canon_pretrain.hf.reading import folder_args
        from canon_pretrain.titan.spec import random_model

        def load_random(args: ModelArgs) -> Generate:
            return _greedy(random_model(args, device))

        # An export is loaded once for all batch sizes; random models are made when needed.
        loaders: Mapping[str, Callable[[], Generate]]
        if export is not None:
            base = folder_args(export)
            loaders = {
                "canon_pretrain": cache(lambda: _greedy(load_model(export, device))),
                "transformers": cache(lambda: load_transformers(export, device)),
            }
        else:
            num_tokens = arguments.prompt_tokens + arguments.new_tokens
            models = _models(arguments, device, num_tokens, position="nope")
            base = models[BASE]
            loaders = {name: partial(load_random, args) for name, args in models.items()}

        rows: list[Row] = []
        for batch in arguments.batches:
            rows += _time_generation(loaders, base.vocab_size, batch, arguments)

    title = (
        f"{base.num_layers}L{base.dim}D, float32, {device.type}; prompts of "
        f"{arguments.prompt_tokens:,} tokens, answers of {arguments.new_tokens:,}; prompts included"
    )
    _report(rows, title, arguments.json)


def _greedy(model: Any) -> Generate:
    from canon_pretrain.model.decode import generate

    return lambda prompts, num_new: generate(model, prompts, max_new_tokens=num_new)


def _time_generation(
    loaders: Mapping[str, Callable[[], Generate]], vocab_size: int, batch: int, arguments: Any
) -> list[Row]:
    import torch

    shape = (batch, arguments.prompt_tokens)
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(FIRST_TOKEN, vocab_size, shape, generator=generator).tolist()

    def build(load: Callable[[], Generate]) -> Step:
        return partial(load(), prompts, arguments.new_tokens)

    builders = {name: partial(build, load) for name, load in loaders.items()}
    rows = _compare(builders, batch, arguments.new_tokens)
    if arguments.export is None:
        return rows

    # Both models of an export should generate the same.
    ours, theirs = (build()() for build in builders.values())
    num_equal = sum(map(eq, ours, theirs))
    return [replace(rows[0], equal_answers=num_equal / batch), rows[1]]


def _compare(builders: Mapping[str, Callable[[], Step]], batch: int, num_tokens: int) -> list[Row]:
    timings = compare(builders, num_pairs=NUM_PAIRS, block_s=BLOCK_S)
    return [
        Row(
            name=name,
            batch=batch,
            tokens_per_second=batch * num_tokens / timing.seconds,
            timing=timing,
        )
        for name, timing in timings.items()
    ]


def check_json(file: Path | None) -> None:
    """Raise UserError if the results cannot be written to FILE, before minutes of measuring."""
    if file is None:
        return
    folder = file.absolute().parent
    if not folder.is_dir():
        raise UserError("bench.no_folder", f"--json {file}: the folder {folder} does not exist")


@contextlib.contextmanager
def _bench(file: Path | None) -> Iterator["torch.device"]:
    """Prepare torch, and yield the device. Raises UserError for a bad FILE or a lack of memory."""
    check_json(file)
    import torch

    from canon_pretrain.titan.console import init_logging
    from canon_pretrain.titan.device import prepare_device

    check_cuda()
    prepare_device()  # torchtitan reads the device when it is imported
    init_logging(rank=1)  # warnings and errors only

    # All models compile the same code of a block, each for its own shapes.
    try:
        with torch._dynamo.config.patch(recompile_limit=256, accumulated_recompile_limit=256):
            yield torch.device("cuda" if torch.cuda.is_available() else "cpu")
    except torch.OutOfMemoryError:
        raise UserError(
            "bench.out_of_memory", "out of GPU memory; choose a smaller --flavor, or fewer tokens"
        ) from None


def _report(rows: list[Row], title: str, file: Path | None) -> None:
    """Print the rows as a table, and write them to `file`."""
    table = Table(
        *("", "batch", "ms", "tokens/s", "ratio", "quartiles", "GiB", "equal"),
        box=box.SIMPLE,
        pad_edge=False,
    )
    for row in rows:
        # The base has no ratio; the others only in some benches.
        ratio = quartiles = peak = equal = ""
        if row.timing.ratio:
            ratio = f"{row.timing.ratio.median:.3f}"
            quartiles = f"{row.timing.ratio.low:.3f}-{row.timing.ratio.high:.3f}"
        if row.timing.peak_bytes:
            peak = f"{row.timing.peak_bytes / 2**30:.1f}"
        if row.equal_answers is not None:
            equal = f"{row.equal_answers:.0%}"
        table.add_row(
            row.name,
            str(row.batch),
            f"{1000 * row.timing.seconds:,.2f}",
            f"{row.tokens_per_second:,.0f}",
            ratio,
            quartiles,
            peak,
            equal,
        )

    Console(highlight=False).print(title, table, sep="\n", markup=False)

    if file is not None:
        write_json(file, [asdict(row) for row in rows])


def _models(
    arguments: argparse.Namespace, device: "torch.device", num_tokens: int, position: str
) -> dict[str, ModelArgs]:
    """Return the model without Canon and with each set, by name. Raises UserError."""
    args = flavor(arguments.flavor or DEFAULTS[device.type].flavor)
    max_seq_len = max(args.max_seq_len, num_tokens)
    models = {BASE: replace(args, canon_set="", position=position, max_seq_len=max_seq_len)}
    for canon_set in arguments.sets or ("AC", "ABCD"):
        with_canon = replace(models[BASE], canon_set=canon_set)
        models[f"Canon-{with_canon.canon_set}"] = with_canon
    return models
