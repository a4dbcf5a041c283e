"""The variants that benches compare: Canon sets and backends, at sizes that fit the machine."""

import argparse
import dataclasses
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch

from canon_pretrain.core.cli import positive
from canon_pretrain.core.errors import UserError, check_choice
from canon_pretrain.core.terminal import Console
from canon_pretrain.kernels import backends
from canon_pretrain.kernels.backends import BACKENDS, OPTIONAL, compile_options
from canon_pretrain.model.args import POSITIONS, ModelArgs, flavor
from canon_pretrain.model.attend import Attend
from canon_pretrain.model.attention import Rope
from canon_pretrain.model.transformer import TransformerBlock
from tests.bench.limits import Machine
from tests.bench.timing import Candidate, CompareResult, NotMeasured, compare_candidates

MEASURED = tuple(name for name in BACKENDS if name != "auto")
Log = Callable[[str], None]
Result = dict[str, Any]
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class Bench(NamedTuple):
    """A bench; `measure` logs progress and returns JSON: seconds, bytes, FLOPs."""

    add_arguments: Callable[[argparse.ArgumentParser], None]
    measure: Callable[[argparse.Namespace, Machine, Log], Result]
    print_result: Callable[[Result, Console], None]


class Variant(NamedTuple):
    """A Canon set and its backend; the empty set is the model without Canon."""

    canon_set: str
    backend: str

    @property
    def name(self) -> str:
        return f"{self.canon_set} {self.backend}" if self.canon_set else "no Canon"

    def row(self) -> dict[str, Any]:
        return {"variant": self.name, **self._asdict()}


NONE = Variant("", "auto")


@dataclasses.dataclass(frozen=True)
class Workload:
    """A model without Canon, and the micro-batch that is measured."""

    args: ModelArgs
    dtype: torch.dtype
    device: torch.device
    micro_batch: int
    num_tokens: int

    def facts(self) -> dict[str, Any]:
        args = self.args
        dtype = str(self.dtype).removeprefix("torch.")
        model = f"{args.num_layers}L{args.dim}D, F {args.ffn_dim}, {args.position}"
        return {
            "model": model,
            "args": dataclasses.asdict(args),
            "dtype": dtype,
            "micro_batch": self.micro_batch,
            "num_tokens": self.num_tokens,
            "work": f"{model}, {self.micro_batch} x {self.num_tokens:,} tokens, {dtype}",
        }


OPTIONS: dict[str, dict[str, Any]] = {
    "flavor": {"help": "size of the model (default: 1b3 on a GPU, 8L512D on a CPU)"},
    "position": {"default": "nope", "choices": POSITIONS, "help": "(default: %(default)s)"},
    "layers": {"type": positive, "help": "number of layers (default: the flavor's)"},
    "dtype": {"choices": tuple(DTYPES), "help": "(default: bfloat16 on a GPU, else float32)"},
    "micro-batch": {"type": positive, "help": "rows (default: by device)"},
    "tokens": {"type": positive, "help": "tokens per row (default: by device)"},
    "sets": {"nargs": "+", "default": ["A", "AC", "ABCD"], "help": "Canon sets, such as AC"},
    "backends": {"nargs": "+", "help": f"of {', '.join(MEASURED)} (default: all available)"},
    "pairs": {"type": positive, "help": "pairs of blocks (default: %(default)s)"},
    "block-seconds": {"type": float, "help": "seconds per block (default: %(default)s)"},
}
MODEL = ("flavor", "position", "layers", "dtype")
SHAPE = ("micro-batch", "tokens")
TIMING = ("pairs", "block-seconds")


def add_options(parser: argparse.ArgumentParser, names: Iterable[str], **defaults: Any) -> None:
    """Add MODEL and `names` of OPTIONS; `shapes` in `defaults`: (rows, tokens) by device."""
    for name in (*MODEL, *names):
        parser.add_argument(f"--{name}", **OPTIONS[name])
    parser.set_defaults(**defaults)


def workload(arguments: argparse.Namespace, machine: Machine) -> Workload:
    """Return the workload of the options on this machine. Raises UserError."""
    usual_rows, usual_tokens = arguments.shapes[machine.device.type]
    rows = arguments.micro_batch or usual_rows
    tokens = arguments.tokens or usual_tokens
    args = flavor(arguments.flavor or ("1b3" if machine.on_gpu else "8L512D"))
    args = dataclasses.replace(
        args,
        position=arguments.position,
        num_layers=arguments.layers or args.num_layers,
        max_seq_len=max(args.max_seq_len, tokens),
    )
    dtype = DTYPES[arguments.dtype or ("bfloat16" if machine.on_gpu else "float32")]
    return Workload(args, dtype, machine.device, rows, tokens)


def with_canon(args: ModelArgs, canon_set: str) -> ModelArgs:
    return dataclasses.replace(args, canon_set=canon_set)


def available_backends(
    requested: Sequence[str] | None, work: Workload
) -> tuple[list[str], dict[str, str]]:
    """Return the available backends of `requested` (None: all), and why others are not."""
    available: list[str] = []
    missing: dict[str, str] = {}
    for name in requested or MEASURED:
        check_choice("--backends", name, MEASURED)
        problem = backends.backend_problem(name, work.device.type, work.dtype)
        if name in OPTIONAL and work.device.type == "cpu":
            problem = "needs a GPU"  # interpreted kernels are not worth timing
        if problem:
            missing[name] = problem
        else:
            available.append(name)
    require_any("--backends", available, missing)
    return available, missing


def require_any(option: str, usable: Collection[str], missing: Mapping[str, str]) -> None:
    """Raise NotMeasured, with the reasons, if nothing is usable."""
    if not usable:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in missing.items())
        message = f"{option} {' '.join(missing)}: none is available here. {reasons}"
        raise NotMeasured("bench.unavailable", message, option=option)


@contextmanager
def failures_as_not_measured(backend: str = "") -> Iterator[None]:
    """Turn a lack of GPU memory, or a failure of an optional backend, into NotMeasured."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise NotMeasured(
            "bench.out_of_memory",
            "out of GPU memory; lower --micro-batch, --batches, --tokens or --layers",
        ) from None
    except Exception as error:
        if backend not in OPTIONAL:
            raise
        first_line = str(error).strip().partition("\n")[0]
        raise NotMeasured("bench.failed", f"{type(error).__name__}: {first_line}") from None


def variants(
    canon_sets: Sequence[str], requested: Sequence[str] | None, usable: Sequence[str]
) -> list[Variant]:
    """Return every set with the `requested` backends, or with auto's and the last set with all."""
    sets = normalize_canon_sets(canon_sets)
    usual = usable if requested else ["triton" if "triton" in usable else "compiled"]
    chosen = [Variant(canon_set, backend) for canon_set in sets for backend in usual]
    chosen += [Variant(sets[-1], backend) for backend in usable]
    return list(dict.fromkeys(chosen))


def compare_variants(
    make: Callable[[Variant], Candidate], chosen: Sequence[Variant], pairs: int, machine: Machine
) -> CompareResult:
    """Compare the `chosen` with no Canon; see compare_candidates."""
    others = {variant.name: partial(make, variant) for variant in chosen}
    return compare_candidates(
        partial(make, NONE),
        others,
        pairs=pairs,
        exclusive=machine.exclusive,
        free_memory=machine.free_memory,
    )


def normalize_canon_sets(canon_sets: Sequence[str]) -> list[str]:
    """Return the sets with their letters sorted. Raises UserError for an invalid one."""
    sets = [with_canon(ModelArgs(), canon_set).canon_set for canon_set in canon_sets]
    if "" in sets:
        raise UserError("bench.sets", '--sets "": every set is compared with no Canon anyway')
    return sets


def compiled_block(work: Workload, variant: Variant) -> tuple[TransformerBlock, Any]:
    """Return a block with the variant's Canon, and the same block compiled as in training."""
    args = with_canon(work.args, variant.canon_set)
    rope = Rope(args) if args.rope_dim else None
    block = TransformerBlock(args, rope, Attend(args, "auto"), variant.backend)
    block.to(work.device, work.dtype)
    if rope is not None:
        rope.reset(work.device)
    options = compile_options(work.device.type, variant.backend)
    return block, torch.compile(block, fullgraph=True, dynamic=False, options=options)
