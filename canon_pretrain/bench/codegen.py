"""What a 1.3B block would launch and move on an H100, counted in Inductor's code without a GPU.

A `TransformerBlock` is compiled as the trainer compiles it, for a fake GPU (fake_gpu.py). Launches
are counted in the generated code, bytes by Inductor's own count of what each kernel reads and
writes. Nothing is executed: spills and what caches save are not in it.
"""

import argparse
import dataclasses
import json
import math
import re
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, is_tensor

from canon_pretrain import kernels
from canon_pretrain.bench.fake_gpu import ATTENTION, NAME, OpaqueAttend, fake_gpu, lower
from canon_pretrain.bench.limits import RATES, Rates, block_traffic, step_seconds
from canon_pretrain.bench.machine import Machine
from canon_pretrain.bench.tables import print_lines
from canon_pretrain.bench.variants import canon_sets_of, with_canon
from canon_pretrain.core.errors import check_choice
from canon_pretrain.core.files import write_atomic
from canon_pretrain.core.terminal import Console
from canon_pretrain.kernels.backends import compile_options
from canon_pretrain.model.args import ModelArgs, flavor, flops_per_token
from canon_pretrain.model.attention import Rope
from canon_pretrain.model.transformer import TransformerBlock

Row = dict[str, Any]
KIB = 1024
RECORD = Path(kernels.__file__).with_name("codegen.json")
PAGE = RECORD.with_name("CODEGEN.md")
GPUS_OF_A_NODE = 8
MICRO_BATCH, NUM_TOKENS = 6, 4096
OURS, GEMM = "torch.ops.canon_pretrain.", "extern_kernels."
BACKENDS = ("compiled", "triton")
SETS = ("A", "B", "C", "D", "AC", "ABCD")
BRIEF_SETS = ("AC", "ABCD")
NOPE, STANDARD = {"position": "nope"}, {"ffn": "standard"}
MODELS: dict[str, dict[str, Any]] = {
    "nope": NOPE,
    "rope": {},
    "partial_rope_a": {"position": "partial_rope_a"},
    "partial_rope_b": {"position": "partial_rope_b"},
    "partial_rope_c": {"position": "partial_rope_c"},
    "nope_documents": NOPE | {"document_mask": True},
    "rope_documents": {"document_mask": True},
    "rope_relu2": {"ffn_activation": "relu2"},
    "rope_standard_relu2": STANDARD | {"ffn_activation": "relu2"},
    "rope_standard_gelu": STANDARD | {"ffn_activation": "gelu"},
    "nope_qk_per_head": NOPE | {"qk_norm": "per_head"},
    "released_1b": {"position": "partial_rope_c", "qk_norm": "full"},
}
"""Name -> what it changes in a 1b3 model (released_1b: in 1b3_released)."""


class Case(NamedTuple):
    """A model of MODELS with a Canon set by a backend; no set is the model without Canon."""

    model: str
    canon_set: str
    backend: str

    @property
    def args(self) -> ModelArgs:
        base = flavor("1b3_released" if self.model == "released_1b" else "1b3")
        return with_canon(dataclasses.replace(base, **MODELS[self.model]), self.canon_set)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--models", nargs="+", default=list(MODELS), metavar="M", help=f"of {', '.join(MODELS)}")
    add("--sets", nargs="+", metavar="SET", help="Canon sets (default: more for nope)")
    add("--backends", nargs="+", default=list(BACKENDS), metavar="B", help=", ".join(BACKENDS))
    about = f"write the counted rows to {RECORD.name} and {PAGE.name} in {RECORD.parent}"
    add("--record", action="store_true", help=about)


def measure(
    arguments: argparse.Namespace, machine: Machine, say: Callable[[str], None]
) -> dict[str, Any]:
    """Return the counts as JSON can hold them. Raises UserError."""
    rows: list[Row] = []
    head: Row = {"counted_for": NAME, "micro_batch": MICRO_BATCH, "num_tokens": NUM_TOKENS}
    for case in cases(arguments.models, arguments.sets, arguments.backends):
        rows.append(case._asdict() | count(case))
        say(f"{case.model}: {case.canon_set or 'no Canon'} {case.backend}")
    if arguments.record:
        versions = machine.facts()["versions"]
        record(head | {"versions": {name: versions[name] for name in ("torch", "triton")}}, rows)
    return head | {"rows": rows, "computed": [computed(row, rows) for row in rows]}


def record(head: Row, counted: list[Row]) -> None:
    """Replace these rows in RECORD, and write PAGE of all of its rows.

    Rows of other versions of torch and Triton are dropped.
    """
    found = json.loads(RECORD.read_text())
    same = all(found.get(name) == value for name, value in head.items())
    rows = {_case(row): row for row in [*(found["rows"] if same else ()), *counted]}
    order = {case: i for i, case in enumerate(cases(list(MODELS), None, BACKENDS))}
    ordered = sorted(rows.values(), key=lambda row: order.get(_case(row), len(order)))
    lines = ",\n".join(json.dumps(row) for row in ordered)
    write_atomic(RECORD, f'{json.dumps(head)[:-1]}, "rows": [\n{lines}\n]}}\n'.encode())
    write_atomic(PAGE, page(head | {"rows": ordered}).encode())


def _case(row: Row) -> Case:
    return Case(row["model"], row["canon_set"], row["backend"])


def cases(models: Sequence[str], sets: Sequence[str] | None, backends: Sequence[str]) -> list[Case]:
    """Return what to count, each model first without Canon. Raises UserError."""
    for option, given, known in (("--models", models, MODELS), ("--backends", backends, BACKENDS)):
        for name in given:
            check_choice(option, name, known)
    found = []
    for model in models:
        own = canon_sets_of(sets or (SETS if model == "nope" else BRIEF_SETS))
        found.append(Case(model, "", "compiled"))
        found += [Case(model, canon_set, backend) for canon_set in own for backend in backends]
    return found


def count(case: Case) -> Row:
    """Compile a block for the fake GPU, forward and backward; return what `_count` finds of both.

    `saved_bytes`: what is kept per token between them.
    """
    from torch._inductor.compile_fx import compile_fx

    if case.backend == "triton":  # a traced function can't import
        import_module("canon_pretrain.kernels.triton.fused")
    found: Row = {}

    def inner(gm: torch.fx.GraphModule, _: Any, *, is_backward: bool = False, **__: Any) -> Any:
        """Count the code of a graph; what is returned makes empty results in its place."""
        (returned,) = next(node for node in gm.graph.nodes if node.op == "output").args
        values = [out.meta["val"] if isinstance(out, torch.fx.Node) else out for out in returned]
        if not is_backward:  # the block's parameters and inputs are placeholders
            nodes = [out for out in returned[1:] if isinstance(out, torch.fx.Node)]
            kept = [node.meta["val"] for node in nodes if node.op != "placeholder"]
            num_bytes = sum(math.prod(v.shape) * v.itemsize for v in kept if is_tensor(v))
            found["saved_bytes"] = num_bytes / (MICRO_BATCH * NUM_TOKENS)
        found["backward" if is_backward else "forward"] = _count(*lower(gm, is_backward))

        def run(inputs: list[Any]) -> list[Any]:
            inputs.clear()
            return [
                torch.empty_strided(v.shape, v.stride(), dtype=v.dtype) if is_tensor(v) else v
                for v in values
            ]

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    def backend(gm: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        options = compile_options("cuda", case.backend)
        return compile_fx(gm, inputs, inner_compile=inner, config_patches=options)

    with fake_gpu():
        torch._dynamo.reset()
        args = dataclasses.replace(case.args, max_seq_len=NUM_TOKENS)
        rope = Rope(args) if args.rope_dim else None
        with torch.device("meta"):
            block = TransformerBlock(args, rope, OpaqueAttend(args), case.backend)
        block.to(torch.bfloat16).to_empty(device="cpu")
        near_shape = MICRO_BATCH, args.canon_kernel - 1 + NUM_TOKENS
        near_BN = torch.empty(near_shape, dtype=torch.int32) if args.document_mask else None
        shape = MICRO_BATCH, NUM_TOKENS, args.dim
        h_BTD = torch.empty(shape, dtype=torch.bfloat16, requires_grad=True)
        # as titan/parallelize.py compiles it; nothing but empty tensors is computed
        y_BTD = torch.compile(block, backend=backend, fullgraph=True)(h_BTD, None, near_BN)
        y_BTD.backward(torch.empty_like(y_BTD))
    return found


def _count(code: str, kernels: list[tuple[str, int]]) -> Row:
    """Return launches, and KiB per token by what reads and writes them."""
    kib = {"gemm": 0.0, "attention": 0.0, "other": 0.0}
    for name, num_bytes in kernels:
        kind = "attention" if name.startswith(ATTENTION) else "other"
        kind = "gemm" if name.startswith(GEMM) else kind
        kib[kind] += num_bytes / (MICRO_BATCH * NUM_TOKENS) / KIB
    return {
        "launches": len(re.findall(r"^\s+triton_\w+\.run\(", code, re.MULTILINE)),
        "operators": sum(name.startswith(OURS) for name, _ in kernels),
        "gemms": sum(name.startswith(GEMM) for name, _ in kernels),
        "kib": {kind: round(value, 2) for kind, value in kib.items()},
    }


def _both(row: Row) -> tuple[Row, Row]:
    return row["forward"], row["backward"]


def computed(row: Row, rows: Sequence[Row]) -> Row:
    """Return what follows from a row: the least KiB, the ratio to them, and a training step's time.

    `total_kib`: per token, forward and backward, products and attention included; `extra_kib`: over
    no Canon. `steps`: GPU of RATES -> seconds, MFU and the price over no Canon, each with low
    rates, middle and high ones. Computed, not measured.
    """

    def step_s(row: Row, rates: Rates, bar: int) -> float:
        launches = sum(one["launches"] + one["operators"] + one["gemms"] for one in _both(row))
        return step_seconds(
            _case(row).args,
            rates,
            bar,
            num_tokens=MICRO_BATCH * NUM_TOKENS,
            seq_len=NUM_TOKENS,
            world_size=GPUS_OF_A_NODE,
            layer_bytes=KIB * sum(one["kib"]["other"] for one in _both(row)),
            # a second stage of weight gradients; attention
            layer_launches=launches + row["backward"]["operators"] + 3,
        )

    none = next(one for one in rows if one["model"] == row["model"] and not one["canon_set"])
    args = _case(row).args
    least = sum(map(sum, block_traffic(args, itemsize=2).values())) / KIB
    counted = sum(one["kib"]["other"] for one in _both(row))
    total, base = (sum(sum(one["kib"].values()) for one in _both(each)) for each in (row, none))
    flops = flops_per_token(args, NUM_TOKENS) * MICRO_BATCH * NUM_TOKENS
    found = {"least_kib": least, "counted_kib": counted, "ratio": counted / least, "steps": {}}
    for gpu, rates in RATES.items():
        own, others = ([step_s(one, rates, bar) for bar in range(3)] for one in (row, none))
        found["steps"][gpu] = {
            "seconds": own,
            "mfu": [flops / seconds / rates.peak_flops for seconds in own],
            "over_none": [one / other - 1 for one, other in zip(own, others, strict=True)],
        }
    return found | {"total_kib": total, "extra_kib": total - base}


RATE_WORDS = {
    "gemm_flops": ("products (TFLOP/s)", 1e12),
    "attention_flops": ("attention (TFLOP/s of the causal half)", 1e12),
    "memory_bytes": ("memory (TB/s)", 1e12),
    "launch_gap_s": ("gap between kernels (us)", 1e-6),
    "network_bytes": ("NVLink (GB/s)", 1e9),
    "exposed_network": ("share of it exposed", 1),
}
"""Field of Rates -> what it is, and its unit."""
COLUMNS = (
    "model", "Canon", "backend", "launches", "operators", "KiB", "extra", "saved B", "least",
    "ratio", "H100 ms", "MFU %", "over none %", "H200 ms", "MFU %", "over none %",
)  # fmt: skip


def cells(row: Row, rows: Sequence[Row]) -> list[str]:
    """Return a row of the table, in the order of COLUMNS."""
    found, has_canon = computed(row, rows), bool(row["canon_set"])
    words = [
        row["model"],
        row["canon_set"] or "none",
        row["backend"] if has_canon else "",
        " + ".join(str(one["launches"]) for one in _both(row)),
        " + ".join(str(one["operators"]) for one in _both(row)),
        f"{found['total_kib']:,.1f}",
        f"{found['extra_kib']:+,.1f}" if has_canon else "",
        f"{row['saved_bytes']:,.0f}",
        f"{found['least_kib']:.1f}",
        f"{found['ratio']:.2f}",
    ]
    for step in found["steps"].values():
        low, middle, high = (f"{1e3 * value:.0f}" for value in step["seconds"])
        words.append(f"{middle} ({high}-{low})")
        low, middle, high = (f"{100 * value:.0f}" for value in step["mfu"])
        words.append(f"{middle} ({low}-{high})")
        low, middle, high = (f"{100 * value:+.1f}" for value in step["over_none"])
        words.append(f"{middle} ({high}, {low})" if has_canon else "")
    return words


def legend(result: Row) -> list[str]:
    """Return what the columns are, and which rates the times are computed from."""
    lines = [
        f"Counted for {result['counted_for']}: one block of 1.3B, {result['micro_batch']} x "
        f"{result['num_tokens']:,} tokens, bfloat16; nothing was run.",
        "launches: Inductor's kernels, forward + backward; operators: our own. KiB: read and "
        "written per token and layer, by Inductor's count; extra: over no Canon. saved B: bytes "
        "kept for backward per token, without the block's input. least: the KiB around products "
        "and attention that must move (limits.py); ratio: counted over least.",
        f"Computed, not measured: a training step of the whole model on {GPUS_OF_A_NODE} GPUs, one "
        "micro-batch each; in brackets with the best and the worst rates.",
    ]
    for gpu, rates in RATES.items():
        words = []
        for name, (what, unit) in RATE_WORDS.items():
            low, middle, high = (value / unit for value in getattr(rates, name))
            words.append(f"{what} {middle:g} ({low:g}, {high:g})")
        peak = f"MFU is of {rates.peak_flops / 1e12:.0f} TFLOP/s."
        lines.append(f"{gpu.upper()}: {'; '.join(words)}. {peak}")
    return lines


def print_result(result: Row, console: Console) -> None:
    print_lines(console, *legend(result), *_table(result["rows"]))


def page(result: Row) -> str:
    """Return PAGE: the same in Markdown, and the least bytes site by site."""
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    sites = []
    for model in ("nope", "rope"):
        every, none = (block_traffic(Case(model, s, "").args, itemsize=2) for s in ("ABCD", ""))
        for site, traffic in every.items():
            pairs = [
                (getattr(traffic, name), getattr(none[site], name))
                for name in ("forward", "backward")
            ]
            figures = [value / KIB for least, base in pairs for value in (least, least - base)]
            sites.append([model, site, *(f"{value:.1f}" for value in figures)])
    lines = [
        "# What a block launches and moves on an H100, counted without one",
        "",
        f"Written by `python -m canon_pretrain.bench codegen --record` ({versions}).",
        "",
        *(f"{line}\n" for line in legend(result)),
        *_table(result["rows"]),
        "",
        "## The least KiB per token and layer, site by site (`block_traffic` in bench/limits.py)",
        "",
        *_markdown(("model", "site", "forward", "Canon's", "backward", "Canon's"), sites),
    ]
    return "\n".join(lines) + "\n"


def _table(rows: Sequence[Row]) -> list[str]:
    return _markdown(COLUMNS, [cells(row, rows) for row in rows])


def _markdown(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    table = [columns, ["---"] * len(columns), *rows]
    return [f"| {' | '.join(words)} |" for words in table]
