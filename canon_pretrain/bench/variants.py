"""What the benches compare: Canon sets by backends, at sizes that fit the machine."""

import argparse
import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from canon_pretrain.core.errors import UserError, check_choice
from canon_pretrain.kernels import backends
from canon_pretrain.kernels.backends import BACKENDS, OPTIONAL, compile_options
from canon_pretrain.model.args import POSITIONS, ModelArgs, flavor
from canon_pretrain.model.attend import Attend
from canon_pretrain.model.positions import Rope
from canon_pretrain.model.transformer import TransformerBlock

SETS = ("A", "AC", "ABCD")
MEASURED = tuple(name for name in BACKENDS if name != "auto")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
MANY_COMPILATIONS = 256


@dataclass(frozen=True)
class Variant:
    """A Canon set and what computes it; no set is the model without Canon."""

    canon_set: str
    backend: str

    @property
    def name(self) -> str:
        return f"{self.canon_set} {self.backend}" if self.canon_set else "no Canon"


NONE = Variant("", "auto")


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options that say which model."""
    add = parser.add_argument
    add("--flavor", help="size of the model (default: 1b3 on a GPU, 8L512D on a CPU)")
    add("--position", default="nope", choices=POSITIONS, help="(default: %(default)s)")
    add("--layers", type=int, help="so many layers instead of the flavor's")
    add("--dtype", choices=tuple(DTYPES), help="(default: bfloat16 on a GPU, float32 on a CPU)")


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


def check_at_least(least: float, **given: float | None) -> None:
    """Raise UserError unless each option is `least` or more, or was not given."""
    for name, value in given.items():
        if value is not None and value < least:
            option = "--" + name.replace("_", "-")
            raise UserError(f"{option} {value:g}: expected at least {least:g}")


def model_args(arguments: argparse.Namespace, *, on_gpu: bool, num_tokens: int) -> ModelArgs:
    """Return the model that the options describe, without Canon. Raises UserError."""
    check_at_least(1, layers=arguments.layers)
    base = flavor(arguments.flavor or ("1b3" if on_gpu else "8L512D"))
    return dataclasses.replace(
        base,
        position=arguments.position,
        num_layers=arguments.layers or base.num_layers,
        max_seq_len=max(base.max_seq_len, num_tokens),
    )


def dtype_of(arguments: argparse.Namespace, *, on_gpu: bool) -> torch.dtype:
    """Return the dtype that was asked for, or the device's usual one."""
    return DTYPES[arguments.dtype or ("bfloat16" if on_gpu else "float32")]


def model_facts(args: ModelArgs, dtype: torch.dtype) -> dict[str, Any]:
    """Return the model and its dtype, for the JSON."""
    return {
        "model": f"{args.num_layers}L{args.dim}D, F {args.ffn_dim}, {args.position}",
        "args": dataclasses.asdict(args),
        "dtype": str(dtype).removeprefix("torch."),
    }


def with_canon(args: ModelArgs, canon_set: str) -> ModelArgs:
    """Return `args` with these Canon sites."""
    return dataclasses.replace(args, canon_set=canon_set)


def available(
    asked: Sequence[str] | None, device: torch.device, dtype: torch.dtype
) -> tuple[list[str], dict[str, str]]:
    """Return the backends to measure, of `asked` or of all, and why others can't be.

    Raises UserError for an unknown one, or if none is left.
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
    first = next(iter(str(why).strip().splitlines()), "")
    return f"{type(why).__name__}: {first}" if first else type(why).__name__


def variants(
    canon_sets: Sequence[str], asked: Sequence[str] | None, usable: Sequence[str]
) -> list[Variant]:
    """Return every set by every backend that was `asked` for and is usable.

    If none was asked for: every set by what `auto` takes in a run whose check passes, and the last
    set by the others. Raises UserError for a set that can't be.
    """
    sets = [with_canon(ModelArgs(), canon_set).canon_set for canon_set in canon_sets]
    if "" in sets:
        raise UserError('--sets "": no Canon is what the others are compared with')
    usual = list(usable) if asked else ["triton" if "triton" in usable else "compiled"]
    others = [Variant(sets[-1], backend) for backend in usable if backend not in usual]
    found = [Variant(canon_set, backend) for canon_set in sets for backend in usual]
    return list(dict.fromkeys([*found, *others]))


def compiled_block(
    args: ModelArgs, variant: Variant, attention: str, device: torch.device, dtype: torch.dtype
) -> tuple[TransformerBlock, Any]:
    """Return a block of `args` with the variant's Canon, and the same compiled as in training."""
    args = with_canon(args, variant.canon_set)
    rope = Rope(args) if args.rope_dim else None
    block = TransformerBlock(args, rope, Attend(args, attention), variant.backend)
    block.to(device, dtype)
    if rope is not None:
        rope.reset(device)
    options = compile_options(device.type, variant.backend)
    return block, torch.compile(block, fullgraph=True, dynamic=False, options=options)


@contextmanager
def many_compilations() -> Iterator[None]:
    """Let the variants of a block, which share their code, be compiled each for its own shapes."""
    with torch._dynamo.config.patch(
        recompile_limit=MANY_COMPILATIONS, accumulated_recompile_limit=MANY_COMPILATIONS
    ):
        yield
