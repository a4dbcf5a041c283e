"""What the benches compare: Canon sets by backends, at sizes that fit the machine."""

import argparse
import dataclasses
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch

from canon_pretrain.bench.limits import Machine
from canon_pretrain.bench.timing import Compared, NotMeasured, Subject, compare_subjects
from canon_pretrain.core.cli import positive
from canon_pretrain.core.errors import UserError, check_choice
from canon_pretrain.core.terminal import Console
from canon_pretrain.kernels import backends
from canon_pretrain.kernels.backends import BACKENDS, OPTIONAL, compile_options
from canon_pretrain.model.args import POSITIONS, ModelArgs, flavor
from canon_pretrain.model.attend import Attend
from canon_pretrain.model.attention import Rope
from canon_pretrain.model.transformer import TransformerBlock

MEASURED = tuple(name for name in BACKENDS if name != "auto")
Say = Callable[[str], None]
Result = dict[str, Any]
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class Bench(NamedTuple):
    """A bench: adds its options, measures (`say` is called with each step), and prints.

    The figures are returned as JSON can hold them: seconds, bytes, FLOPs. Raises UserError.
    """

    add_arguments: Callable[[argparse.ArgumentParser], None]
    measure: Callable[[argparse.Namespace, Machine, Say], Result]
    print_result: Callable[[Result, Console], None]


class Variant(NamedTuple):
    """A Canon set and what computes it; the empty set is the model without Canon."""

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
        args, dtype = self.args, str(self.dtype).removeprefix("torch.")
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
    "layers": {"type": positive, "help": "so many layers instead of the flavor's"},
    "dtype": {"choices": tuple(DTYPES), "help": "(default: bfloat16 on a GPU, else float32)"},
    "micro-batch": {"type": positive, "help": "rows (default: fits the device)"},
    "tokens": {"type": positive, "help": "of a row (default: fits the device)"},
    "sets": {"nargs": "+", "default": ["A", "AC", "ABCD"], "help": "Canon sets, as AC"},
    "backends": {"nargs": "+", "help": f"of {', '.join(MEASURED)} (default: all here)"},
    "pairs": {"type": positive, "help": "pairs of blocks (default: %(default)s)"},
    "block-seconds": {"type": float, "help": "in whole steps (default: %(default)s)"},
}
MODEL = ("flavor", "position", "layers", "dtype")
SHAPE = ("micro-batch", "tokens")
TIMING = ("pairs", "block-seconds")


def add_options(parser: argparse.ArgumentParser, *names: str, **defaults: Any) -> None:
    """Add MODEL and these of OPTIONS; `shapes`: rows and tokens of a micro-batch by device."""
    for name in (*MODEL, *names):
        parser.add_argument(f"--{name}", **OPTIONS[name])
    parser.set_defaults(**defaults)


def workload(arguments: argparse.Namespace, machine: Machine) -> Workload:
    """Return what the options mean here. Raises UserError."""
    rows, tokens = arguments.shapes[machine.device.type]
    rows, tokens = arguments.micro_batch or rows, arguments.tokens or tokens
    args = flavor(arguments.flavor or ("1b3" if machine.on_gpu else "8L512D"))
    layers, length = arguments.layers or args.num_layers, max(args.max_seq_len, tokens)
    changes = {"position": arguments.position, "num_layers": layers, "max_seq_len": length}
    dtype = DTYPES[arguments.dtype or ("bfloat16" if machine.on_gpu else "float32")]
    return Workload(dataclasses.replace(args, **changes), dtype, machine.device, rows, tokens)


def with_canon(args: ModelArgs, canon_set: str) -> ModelArgs:
    """Return `args` with these Canon sites."""
    return dataclasses.replace(args, canon_set=canon_set)


def available(asked: Sequence[str] | None, work: Workload) -> tuple[list[str], dict[str, str]]:
    """Return the backends of `asked` (or all) to measure, and why others can't be."""
    missing: dict[str, str] = {}
    for name in asked or MEASURED:
        check_choice("--backends", name, MEASURED)
        problem = backends.backend_problem(name, work.device.type, work.dtype)
        if name in OPTIONAL and work.device.type == "cpu":
            problem = "needs a GPU"  # an interpreter says nothing about speed
        missing |= {name: problem} if problem else {}
    found = [name for name in asked or MEASURED if name not in missing]
    check_any("--backends", found, missing)
    return found, missing


def check_any(option: str, usable: Collection[str], missing: Mapping[str, str]) -> None:
    """Raise UserError, with the reasons, if nothing is usable."""
    if not usable:
        reasons = "; ".join(f"{name}: {why}" for name, why in missing.items())
        raise NotMeasured(
            "todo.variants", f"{option} {' '.join(missing)}: none can be had here. {reasons}"
        )


@contextmanager
def failing(backend: str = "") -> Iterator[None]:
    """Raise NotMeasured if the block needs too much memory, or fails by an optional backend."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise NotMeasured(
            "todo.variants",
            "it does not fit in this GPU's memory; give a smaller --micro-batch, --batches or "
            "--tokens, or fewer --layers",
        ) from None
    except Exception as why:
        if backend not in OPTIONAL:
            raise
        first = str(why).strip().partition("\n")[0]
        raise NotMeasured("todo.variants", f"{type(why).__name__}: {first}") from None


def variants(
    canon_sets: Sequence[str], asked: Sequence[str] | None, usable: Sequence[str]
) -> list[Variant]:
    """Return every set by every backend that was `asked` for and is usable.

    If none was asked for: every set by what `auto` is, and the last set by the others.
    """
    sets = canon_sets_of(canon_sets)
    usual = usable if asked else ["triton" if "triton" in usable else "compiled"]
    found = [Variant(canon_set, backend) for canon_set in sets for backend in usual]
    return list(dict.fromkeys([*found, *(Variant(sets[-1], backend) for backend in usable)]))


def compare_variants(
    make: Callable[[Variant], Subject], chosen: Sequence[Variant], pairs: int, machine: Machine
) -> Compared:
    """Compare the `chosen` with no Canon; see compare_subjects."""
    others = {variant.name: partial(make, variant) for variant in chosen}
    how: Any = {"pairs": pairs, "alone": machine.alone, "free": machine.free_memory}
    return compare_subjects(partial(make, NONE), others, **how)


def canon_sets_of(given: Sequence[str]) -> list[str]:
    """Return the sets with their letters in order. Raises UserError for one that can't be."""
    sets = [with_canon(ModelArgs(), canon_set).canon_set for canon_set in given]
    if "" in sets:
        raise UserError("todo.variants", '--sets "": no Canon is what the others are compared with')
    return sets


def compiled_block(work: Workload, variant: Variant) -> tuple[TransformerBlock, Any]:
    """Return a block with the variant's Canon, and the same compiled as in training."""
    args = with_canon(work.args, variant.canon_set)
    rope = Rope(args) if args.rope_dim else None
    block = TransformerBlock(args, rope, Attend(args, "auto"), variant.backend)
    block.to(work.device, work.dtype)
    if rope is not None:
        rope.reset(work.device)
    options = compile_options(work.device.type, variant.backend)
    return block, torch.compile(block, fullgraph=True, dynamic=False, options=options)
