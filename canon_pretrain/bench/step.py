"""Canon's price in a training step: each set and backend beside the same model without Canon.

`--unit block` is forward and backward of one compiled block. `--unit model` is on a CPU the whole
step (bare.py: forward, loss, backward, clipping, fused AdamW, blocks compiled as the trainer does,
FSDP2 at one rank), and on a GPU the model's forward and backward, of which MFU is a share; what
FSDP2 and AdamW take on top is measured apart, of the model without Canon.

On a CPU the two models of a comparison take turns. A GPU holds one at a time, with all of its
memory, as in a run: each is built, measured and freed, the one without Canon first and last.
"""

import argparse
import dataclasses
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from canon_pretrain.bench import targets, variants
from canon_pretrain.bench.bare import BareStep, job_of, one_rank
from canon_pretrain.bench.limits import block_flops_per_token, fused, one_kernel_a_site
from canon_pretrain.bench.machine import Machine
from canon_pretrain.bench.memory_plan import fitting_micro_batch
from canon_pretrain.bench.step_table import print_result as print_result
from canon_pretrain.bench.timing import (
    STEP,
    Comparison,
    Step,
    around,
    block_of,
    compare_steps,
    seconds_of,
    steps_for,
)
from canon_pretrain.bench.variants import NONE, Variant
from canon_pretrain.core.errors import UserError
from canon_pretrain.kernels.backends import OPTIONAL, compile_options
from canon_pretrain.model.args import FLOPS_FORMULA, ModelArgs, flops_per_token
from canon_pretrain.model.attend import BACKENDS as ATTENTION
from canon_pretrain.model.attend import Attend
from canon_pretrain.model.positions import Rope
from canon_pretrain.model.transformer import TransformerBlock

UNITS = ("block", "model")
CPU_TOKENS, CPU_MICRO_BATCH = 1024, 2
MANY_COMPILATIONS = 256
"""All variants of a block share the code that torch.compile counts recompilations of."""


@dataclasses.dataclass(frozen=True)
class Setting:
    """What all variants of one run have in common."""

    args: ModelArgs
    unit: str
    num_tokens: int
    micro_batch: int
    dtype: torch.dtype
    attention_backend: str
    alone: bool
    """One model in memory at a time."""

    @property
    def tokens_per_step(self) -> int:
        return self.micro_batch * self.num_tokens

    def facts(self, machine: Machine) -> dict[str, Any]:
        """All of it, for the JSON."""
        attend = Attend(self.args, self.attention_backend)
        return {
            "unit": self.unit,
            "timed": "forward and backward" if self.is_plain else "step",
            "model": variants.describe(self.args),
            "args": dataclasses.asdict(self.args),
            "num_tokens": self.num_tokens,
            "micro_batch": self.micro_batch,
            "dtype": str(self.dtype).removeprefix("torch."),
            "attention": attend.describe(machine.device.type),
        }

    @property
    def is_plain(self) -> bool:
        """Whether what is compared is forward and backward, without FSDP2 and AdamW."""
        return self.alone or self.unit == "block"

    def args_of(self, variant: Variant) -> ModelArgs:
        return variants.with_canon(self.args, variant.canon_set)

    def flops_per_token(self, variant: Variant) -> int:
        count = block_flops_per_token if self.unit == "block" else flops_per_token
        return count(self.args_of(variant), self.num_tokens)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command line of `step`."""
    add = parser.add_argument
    variants.add_model_arguments(parser)
    add("--unit", choices=UNITS, help="(default: model on a GPU, block on a CPU)")
    add("--tokens", type=int, metavar="T", help="(default: the flavor's on a GPU, 1024 on a CPU)")
    add("--micro-batch", type=int, metavar="B", help="sequences (default: what fits, 2 on a CPU)")
    add("--attention", default="auto", choices=ATTENTION, help="(default: %(default)s)")
    variants.add_variant_arguments(parser)
    variants.add_timing_arguments(parser, pairs=15, block_s=0.5)


def measure(
    arguments: argparse.Namespace, machine: Machine, say: Callable[[str], None]
) -> dict[str, Any]:
    """The figures of one run, as JSON can hold them; seconds, bytes, FLOPs. Raises UserError."""
    setting = _setting(arguments, machine)
    backends, missing = variants.available(arguments.backends, machine.device, setting.dtype)
    chosen = variants.variants(arguments.sets, arguments.backends, backends)
    peaks = machine.peaks(setting.dtype)
    context = one_rank() if setting.unit == "model" else nullcontext()
    with context, many_compilations():
        in_turn = measure_alone if setting.alone else measure_in_turns
        base, rows = in_turn(setting, chosen, missing, arguments, machine, say)
        whole = None
        if setting.alone and setting.unit == "model" and rows:
            whole = measure_whole(setting, machine, arguments)
    if not rows:
        raise UserError("no variant could be measured: give a smaller --micro-batch")
    base_s = statistics.median(row["base_s"] for row in rows)
    return {
        "bench": "step",
        **machine.facts(),
        **setting.facts(machine),
        "flops_formula": FLOPS_FORMULA,
        "peaks": peaks,
        "unavailable": missing,
        "base": {
            "variant": NONE.name,
            **base,
            "s": base_s,
            **speed(setting, NONE, base_s, peaks),
        },
        "whole": whole,
        "rows": rows,
        "targets": asked_of(setting, machine),
    }


Found = tuple[dict[str, Any], list[dict[str, Any]]]
"""Facts of the model without Canon, and the rows of the others."""


def measure_in_turns(
    setting: Setting,
    chosen: Sequence[Variant],
    missing: dict[str, str],
    arguments: argparse.Namespace,
    machine: Machine,
    say: Callable[[str], None],
) -> Found:
    """The model without Canon stays in memory, beside one other; blocks in turn."""
    rows = []
    base = _built(setting, NONE, machine)
    if isinstance(base, str):
        raise UserError(f"{base}: give a smaller --micro-batch, or fewer --layers")
    for variant in chosen:
        other = _built(setting, variant, machine)
        if isinstance(other, str):
            missing[variant.name] = other
            continue
        found = compare_steps(
            base.step, other.step, pairs=arguments.pairs, block_s=arguments.block_seconds
        )
        rows.append(_row(setting, variant, found, other.facts, machine))
        say(f"{variant.name}: {found.extra:+.1%}")
    return base.facts, rows


def measure_alone(
    setting: Setting,
    chosen: Sequence[Variant],
    missing: dict[str, str],
    arguments: argparse.Namespace,
    machine: Machine,
    say: Callable[[str], None],
) -> Found:
    """One model in memory at a time: none, each variant, and none again."""
    timed = {}
    before = _alone(setting, NONE, arguments, machine)
    if isinstance(before, str):
        raise UserError(f"{before}: give a smaller --micro-batch, or fewer --layers")
    for variant in chosen:
        found = _alone(setting, variant, arguments, machine)
        if isinstance(found, str):
            missing[variant.name] = found
            continue
        timed[variant] = found
        say(f"{variant.name}: {1000 * statistics.median(found.seconds):.2f} ms")
    after = _alone(setting, NONE, arguments, machine)
    if isinstance(after, str):  # memory in fragments, say
        missing["no Canon, once more"] = after
        after = before
    rows, drift = [], 1.0
    for variant, found in timed.items():
        beside, drift = around(before.seconds, found.seconds, after.seconds)
        rows.append(_row(setting, variant, beside, found.facts, machine))
    return {**before.facts, "drift": drift}, rows


@dataclasses.dataclass(frozen=True)
class Alone:
    """Seconds of a step in each of some blocks; its model is gone."""

    facts: dict[str, Any]
    seconds: list[float]


def _alone(
    setting: Setting, variant: Variant, arguments: argparse.Namespace, machine: Machine
) -> Alone | str:
    built = _built(setting, variant, machine)
    if isinstance(built, str):
        return built
    block = block_of(built.step, steps_for(built.step, arguments.block_seconds))
    return Alone(built.facts, [block()[STEP] for _ in range(arguments.pairs)])


def measure_whole(
    setting: Setting, machine: Machine, arguments: argparse.Namespace
) -> dict[str, Any]:
    """The step without Canon in its parts: forward and backward under FSDP2, and the update."""
    built = _built(dataclasses.replace(setting, alone=False), NONE, machine)
    if isinstance(built, str):
        return {"error": built}
    step = built.step
    assert isinstance(step, BareStep)
    parts = {"forward_backward_s": step.forward_backward, "update_s": step.update}
    counts = {name: steps_for(part, arguments.block_seconds) for name, part in parts.items()}
    blocks = {
        name: [seconds_of(part, counts[name]) / counts[name] for _ in range(arguments.pairs)]
        for name, part in parts.items()
    }
    return {**built.facts, **{name: statistics.median(each) for name, each in blocks.items()}}


@dataclasses.dataclass(frozen=True)
class Built:
    """A step of one variant, the seconds of its first one, and its peak of a GPU's memory."""

    step: Step
    compile_s: float
    peak_bytes: int | None

    @property
    def facts(self) -> dict[str, Any]:
        return {"compile_s": self.compile_s, "peak_bytes": self.peak_bytes}


def _built(setting: Setting, variant: Variant, machine: Machine) -> Built | str:
    """`variant` after its first step, most of which is compilation; or why it can't be."""
    machine.free_memory()  # of the variant before this one
    before = 0
    if machine.on_gpu:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    try:
        step = build(setting, variant, machine.device)
        compile_s = seconds_of(step)
    except torch.OutOfMemoryError:
        return f"a micro-batch of {setting.micro_batch} does not fit in this GPU's memory"
    except Exception as why:
        if variant.backend not in OPTIONAL:
            raise
        return variants.failure(why)
    peak = torch.cuda.max_memory_allocated() - before if machine.on_gpu else None
    return Built(step, compile_s, peak)


def _row(
    setting: Setting, variant: Variant, found: Comparison, facts: dict[str, Any], machine: Machine
) -> dict[str, Any]:
    """What is known of `variant` beside the model without Canon."""
    return {
        "variant": variant.name,
        "canon_set": variant.canon_set,
        "backend": variant.backend,
        **facts,
        **dataclasses.asdict(found),
        **speed(setting, variant, found.other_s, machine.peaks(setting.dtype)),
        "limits": limits(setting, variant, found.base_s, machine),
    }


def _setting(arguments: argparse.Namespace, machine: Machine) -> Setting:
    """The options as what they mean on this machine."""
    variants.check_at_least(
        1, tokens=arguments.tokens, micro_batch=arguments.micro_batch, pairs=arguments.pairs
    )
    variants.check_at_least(0, block_seconds=arguments.block_seconds)
    num_tokens = arguments.tokens or (4096 if machine.on_gpu else CPU_TOKENS)
    setting = Setting(
        args=variants.model_args(arguments, on_gpu=machine.on_gpu, num_tokens=num_tokens),
        unit=arguments.unit or ("model" if machine.on_gpu else "block"),
        num_tokens=num_tokens,
        micro_batch=arguments.micro_batch or CPU_MICRO_BATCH,
        dtype=variants.dtype_of(arguments, on_gpu=machine.on_gpu),
        attention_backend=arguments.attention,
        alone=machine.on_gpu,
    )
    if machine.on_gpu and not arguments.micro_batch:
        size = fitting_micro_batch(
            variants.with_canon(setting.args, "ABCD"),
            num_tokens,
            setting.dtype,
            room=torch.cuda.mem_get_info()[0],
        )
        setting = dataclasses.replace(setting, micro_batch=size)
    return setting


def build(setting: Setting, variant: Variant, device: torch.device) -> Step:
    """A step of `variant`, whose first call compiles it."""
    args = setting.args_of(variant)
    if setting.unit == "block":
        return block_step(setting, args, variant.backend, device)
    job = job_of(
        args,
        num_tokens=setting.num_tokens,
        micro_batch=setting.micro_batch,
        dtype=setting.dtype,
        canon_backend=variant.backend,
        attention_backend=setting.attention_backend,
    )
    return BareStep(job, device, plain=setting.alone)


def block_step(setting: Setting, args: ModelArgs, backend: str, device: torch.device) -> Step:
    """Forward and backward of one compiled block, from and to the residual stream."""
    rope = Rope(args) if args.rope_dim else None
    block = TransformerBlock(args, rope, Attend(args, setting.attention_backend), backend)
    block.to(device, setting.dtype)
    if rope is not None:
        rope.reset(device)
    options = compile_options(device.type, backend)
    compiled = torch.compile(block, fullgraph=True, options=options)
    shape = (setting.micro_batch, setting.num_tokens, args.dim)
    h_BTD = torch.randn(shape, device=device).to(setting.dtype).requires_grad_()
    grad_BTD = torch.randn_like(h_BTD)

    def step() -> None:
        block.zero_grad()
        h_BTD.grad = None
        compiled(h_BTD).backward(grad_BTD)

    return step


def speed(
    setting: Setting, variant: Variant, seconds: float, peaks: dict[str, float | None]
) -> dict[str, float | None]:
    """Tokens a second, and the share of both peaks that their FLOPs are."""
    per_second = setting.tokens_per_step / seconds
    flops = setting.flops_per_token(variant) * per_second
    measured, stated = peaks["matmul_flops"], peaks["stated_flops"]
    return {
        "tokens_per_second": per_second,
        "mfu_of_measured": flops / measured if measured else None,
        "mfu_of_stated": flops / stated if stated else None,
    }


def limits(setting: Setting, variant: Variant, base_s: float, machine: Machine) -> dict[str, float]:
    """What Canon's bytes alone would add at the copy bandwidth, as a share of the base."""
    args = setting.args_of(variant)
    layers = args.num_layers if setting.unit == "model" else 1
    per_byte = layers * setting.tokens_per_step / machine.copy_bandwidth / base_s
    forms = {"one_kernel_a_site": one_kernel_a_site, "fused": fused}
    return {
        name: count(args, setting.dtype.itemsize).total * per_byte for name, count in forms.items()
    }


def asked_of(setting: Setting, machine: Machine) -> dict[str, dict[str, Any]]:
    """The targets that speak of this setting, by Canon set."""
    args = setting.args
    known: Mapping[str, targets.Target] = {}
    if machine.on_gpu and setting.unit == "model" and args.dim == 2048:
        known = targets.STEP
    elif not machine.on_gpu and setting.unit == "block" and setting.dtype == torch.float32:
        known = targets.CPU_BLOCK if (args.dim, args.ffn_dim) == (512, 1368) else {}
    return {canon_set: dataclasses.asdict(target) for canon_set, target in known.items()}


@contextmanager
def many_compilations() -> Iterator[None]:
    """Let the variants of a block be compiled side by side, each for its own shapes."""
    with torch._dynamo.config.patch(
        recompile_limit=MANY_COMPILATIONS, accumulated_recompile_limit=MANY_COMPILATIONS
    ):
        yield
