"""What the benches compare: Canon sets by backends, at sizes that fit the machine."""

import argparse
import dataclasses
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from canon_pretrain.bench.machine import Machine
from canon_pretrain.core.errors import UserError, check_choice
from canon_pretrain.kernels import backends
from canon_pretrain.kernels.backends import BACKENDS, OPTIONAL, compile_options
from canon_pretrain.model.args import POSITIONS, ModelArgs, flavor
from canon_pretrain.model.attend import Attend
from canon_pretrain.model.attention import Rope
from canon_pretrain.model.transformer import TransformerBlock

SETS = ("A", "AC", "ABCD")
MEASURED = tuple(name for name in BACKENDS if name != "auto")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
MANY_COMPILATIONS = 256


@dataclass(frozen=True)
class Variant:
    """A Canon set and what computes it; the empty set is the model without Canon."""

    canon_set: str
    backend: str

    @property
    def name(self) -> str:
        return f"{self.canon_set} {self.backend}" if self.canon_set else "no Canon"


NONE = Variant("", "auto")


@dataclass(frozen=True)
class Workload:
    """A model without Canon, and the micro-batch that is measured."""

    args: ModelArgs
    dtype: torch.dtype
    device: torch.device
    micro_batch: int
    num_tokens: int

    def facts(self) -> dict[str, Any]:
        args = self.args
        return {
            "model": f"{args.num_layers}L{args.dim}D, F {args.ffn_dim}, {args.position}",
            "args": dataclasses.asdict(args),
            "dtype": str(self.dtype).removeprefix("torch."),
            "micro_batch": self.micro_batch,
            "num_tokens": self.num_tokens,
        }


def add_model_arguments(
    parser: argparse.ArgumentParser, *, gpu: tuple[int, int] = (1, 0), cpu: tuple[int, int] = (1, 0)
) -> None:
    """Add the options that say which model; `gpu`, `cpu`: rows and tokens of a micro-batch."""
    add = parser.add_argument
    add("--flavor", help="size of the model (default: 1b3 on a GPU, 8L512D on a CPU)")
    add("--position", default="nope", choices=POSITIONS, help="(default: %(default)s)")
    add("--layers", type=int, help="so many layers instead of the flavor's")
    add("--dtype", choices=tuple(DTYPES), help="(default: bfloat16 on a GPU, float32 on a CPU)")
    if gpu[1]:
        for i, (option, letter) in enumerate((("--micro-batch", "B"), ("--tokens", "T"))):
            about = f"(default: {gpu[i]} on a GPU, {cpu[i]} on a CPU)"
            add(option, type=int, metavar=letter, help=about)
    parser.set_defaults(shapes={"cuda": gpu, "cpu": cpu})


def add_variant_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options that say what is compared with no Canon."""
    add = parser.add_argument
    add("--sets", nargs="+", default=list(SETS), metavar="SET", help="Canon sets, as AC")
    add("--backends", nargs="+", metavar="B", help=f"of {', '.join(MEASURED)}, for all sets")


def add_timing_arguments(parser: argparse.ArgumentParser, *, pairs: int, block_s: float) -> None:
    """Add the options that say how long."""
    add, about = parser.add_argument, "a block's length, in whole steps (default: %(default)s)"
    add("--pairs", type=int, default=pairs, help="pairs of blocks (default: %(default)s)")
    add("--block-seconds", type=float, default=block_s, metavar="S", help=about)


def workload(arguments: argparse.Namespace, machine: Machine, num_tokens: int = 0) -> Workload:
    """Return what the options mean here, or of `num_tokens`. Raises UserError."""
    rows, tokens = arguments.shapes[machine.device.type]
    tokens = num_tokens or arguments.tokens or tokens
    base = flavor(arguments.flavor or ("1b3" if machine.on_gpu else "8L512D"))
    args = dataclasses.replace(
        base,
        position=arguments.position,
        num_layers=arguments.layers or base.num_layers,
        max_seq_len=max(base.max_seq_len, tokens),
    )
    dtype = DTYPES[arguments.dtype or ("bfloat16" if machine.on_gpu else "float32")]
    rows = getattr(arguments, "micro_batch", None) or rows
    return Workload(args, dtype, machine.device, rows, tokens)


def with_canon(args: ModelArgs, canon_set: str) -> ModelArgs:
    """Return `args` with these Canon sites."""
    return dataclasses.replace(args, canon_set=canon_set)


def available(
    asked: Sequence[str] | None, device: torch.device, dtype: torch.dtype
) -> tuple[list[str], dict[str, str]]:
    """Return the backends of `asked` (or all) to measure, and why others can't be.

    Raises UserError.
    """
    for name in asked or ():
        check_choice("--backends", name, MEASURED)
    reasons = {name: backend_problem(name, device, dtype) for name in asked or MEASURED}
    missing = {name: reason for name, reason in reasons.items() if reason is not None}
    if len(missing) == len(reasons):
        told = "; ".join(f"{name}: {reason}" for name, reason in missing.items())
        raise UserError(f"--backends {' '.join(asked or ())}: none can be had here. {told}")
    return [name for name in reasons if name not in missing], missing


def backend_problem(backend: str, device: torch.device, dtype: torch.dtype) -> str | None:
    """Return why `backend` can't be measured here, if it can't."""
    if backend in OPTIONAL and device.type == "cpu":  # an interpreter says nothing about speed
        return "needs a GPU"
    return backends.backend_problem(backend, device.type, dtype)


def failure(why: Exception) -> str:
    """Return an exception in one line."""
    return f"{type(why).__name__}: {str(why).strip().partition(chr(10))[0]}"


def variants(
    canon_sets: Sequence[str], asked: Sequence[str] | None, usable: Sequence[str]
) -> list[Variant]:
    """Return every set by every backend that was `asked` for and is usable.

    If none was asked for: every set by what `auto` is, and the last set by the others.
    """
    sets = canon_sets_of(canon_sets)
    usual = list(usable) if asked else ["triton" if "triton" in usable else "compiled"]
    others = [Variant(sets[-1], backend) for backend in usable if backend not in usual]
    found = [Variant(canon_set, backend) for canon_set in sets for backend in usual]
    return list(dict.fromkeys([*found, *others]))


def canon_sets_of(given: Sequence[str]) -> list[str]:
    """Return the sets with their letters in order. Raises UserError for one that can't be."""
    sets = [with_canon(ModelArgs(), canon_set).canon_set for canon_set in given]
    if "" in sets:
        raise UserError('--sets "": no Canon is what the others are compared with')
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


def many_compilations() -> AbstractContextManager[None]:
    """Let the variants of a block, which share their code, be compiled each for its own shapes."""
    patched: AbstractContextManager[None] = torch._dynamo.config.patch(
        recompile_limit=MANY_COMPILATIONS, accumulated_recompile_limit=MANY_COMPILATIONS
    )
    return patched
