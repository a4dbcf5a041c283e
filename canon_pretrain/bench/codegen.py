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
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from canon_pretrain import kernels
from canon_pretrain.bench.fake_gpu import ATTENTION, NAME, OpaqueAttend, fake_gpu, lower
from canon_pretrain.bench.limits import RATES, block_traffic, step_seconds
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

KIB = 1024
RECORD = Path(kernels.__file__).with_name("codegen.json")
PAGE = RECORD.with_name("CODEGEN.md")
GPUS_OF_A_NODE = 8
MICRO_BATCH, NUM_TOKENS = 6, 4096
OURS = "torch.ops.canon_pretrain."
BACKENDS = ("compiled", "triton")
SETS = ("A", "B", "C", "D", "AC", "ABCD")
BRIEF_SETS = ("AC", "ABCD")
_NOPE = {"position": "nope"}
_STANDARD = {"ffn": "standard"}
MODELS: dict[str, dict[str, Any]] = {
    "nope": _NOPE,
    "rope": {},
    "partial_rope_a": {"position": "partial_rope_a"},
    "partial_rope_b": {"position": "partial_rope_b"},
    "partial_rope_c": {"position": "partial_rope_c"},
    "nope_documents": _NOPE | {"document_mask": True},
    "rope_documents": {"document_mask": True},
    "rope_relu2": {"ffn_activation": "relu2"},
    "rope_standard_relu2": _STANDARD | {"ffn_activation": "relu2"},
    "rope_standard_gelu": _STANDARD | {"ffn_activation": "gelu"},
    "nope_qk_per_head": _NOPE | {"qk_norm": "per_head"},
    "released_1b": {"position": "partial_rope_c", "qk_norm": "full"},
}
"""Name -> what it changes in a 1b3 model (released_1b: in 1b3_released)."""


@dataclass(frozen=True)
class Case:
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
    rows: list[dict[str, Any]] = []
    head = {"counted_for": NAME, "micro_batch": MICRO_BATCH, "num_tokens": NUM_TOKENS}
    versions = machine.facts()["versions"]
    recorded = head | {"versions": {name: versions[name] for name in ("torch", "triton")}}
    for case in cases(arguments.models, arguments.sets, arguments.backends):
        rows.append(dataclasses.asdict(case) | count(case))
        say(f"{case.model}: {case.canon_set or 'no Canon'} {case.backend}")
        if arguments.record:
            record(recorded, rows)
    return head | {"rows": rows, "computed": [computed(row, rows) for row in rows]}


def record(head: dict[str, Any], counted: list[dict[str, Any]]) -> None:
    """Replace these rows in RECORD, and write PAGE of all of its rows.

    Rows of other versions of torch and Triton are dropped.
    """
    found = json.loads(RECORD.read_text())
    same = all(found.get(name) == value for name, value in head.items())
    rows = {_key(row): row for row in [*(found["rows"] if same else ()), *counted]}
    order = cases(list(MODELS), None, BACKENDS)
    known = [rows.pop(case) for case in order if case in rows]
    ordered = [*known, *rows.values()]
    lines = ",\n".join(json.dumps(row) for row in ordered)
    top = json.dumps(head)[:-1]
    write_atomic(RECORD, f'{top}, "rows": [\n{lines}\n]}}\n'.encode())
    write_atomic(PAGE, page(head | {"rows": ordered}).encode())


def _key(row: dict[str, Any]) -> Case:
    return Case(row["model"], row["canon_set"], row["backend"])


def cases(models: Sequence[str], sets: Sequence[str] | None, backends: Sequence[str]) -> list[Case]:
    """Return what to count, each model first without Canon. Raises UserError."""
    found = []
    for model in models:
        check_choice("--models", model, tuple(MODELS))
        found.append(Case(model, "", "compiled"))
        for canon_set in canon_sets_of(sets or (SETS if model == "nope" else BRIEF_SETS)):
            for backend in backends:
                check_choice("--backends", backend, BACKENDS)
                found.append(Case(model, canon_set, backend))
    return found


def count(case: Case) -> dict[str, Any]:
    """Return launches and KiB per token of both directions, and the bytes saved between them."""
    counter = _Counter()
    if case.backend == "triton":  # a traced function can't import
        import_module("canon_pretrain.kernels.triton.fused")
    with fake_gpu():
        _train_block(case, counter)
    return counter.found


def _train_block(case: Case, counter: "_Counter") -> None:
    """Compile forward and backward of one block; nothing but empty tensors is computed."""
    from torch._inductor.compile_fx import compile_fx

    options = compile_options("cuda", case.backend)

    def backend(gm: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        return compile_fx(gm, inputs, inner_compile=counter.compile, config_patches=options)

    torch._dynamo.reset()
    args = dataclasses.replace(case.args, max_seq_len=NUM_TOKENS)
    rope = Rope(args) if args.rope_dim else None
    with torch.device("meta"):
        block = TransformerBlock(args, rope, OpaqueAttend(args), case.backend)
    block.to(torch.bfloat16).to_empty(device="cpu")
    near_BN = None
    if args.document_mask:
        near_BN = torch.empty(MICRO_BATCH, args.canon_kernel - 1 + NUM_TOKENS, dtype=torch.int32)
    shape = MICRO_BATCH, NUM_TOKENS, args.dim
    h_BTD = torch.empty(shape, dtype=torch.bfloat16, requires_grad=True)
    # as titan/parallelize.py compiles it
    y_BTD = torch.compile(block, backend=backend, fullgraph=True)(h_BTD, None, near_BN)
    y_BTD.backward(torch.empty_like(y_BTD))


class _Counter:
    """Inductor's inner compiler, which counts the code of a graph instead of compiling it."""

    def __init__(self) -> None:
        self.found: dict[str, Any] = {}

    def compile(
        self,
        gm: torch.fx.GraphModule,
        example_inputs: Sequence[Any],
        *,
        is_backward: bool = False,
        is_inference: bool = False,
        **_: Any,
    ) -> Any:
        assert not is_inference
        (returned,) = next(node for node in gm.graph.nodes if node.op == "output").args
        values = [out.meta["val"] if isinstance(out, torch.fx.Node) else out for out in returned]
        if not is_backward:
            self.found["saved_bytes"] = _bytes_of(returned[1:]) / (MICRO_BATCH * NUM_TOKENS)
        self.found["backward" if is_backward else "forward"] = self._count(gm, is_backward)

        def run(inputs: list[Any]) -> list[Any]:
            inputs.clear()
            return [
                torch.empty_strided(value.shape, value.stride(), dtype=value.dtype)
                if isinstance(value, Tensor)
                else value
                for value in values
            ]

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    def _count(self, gm: torch.fx.GraphModule, is_backward: bool) -> dict[str, Any]:
        code, kernels = lower(gm, is_backward)
        kib = {"gemm": 0.0, "attention": 0.0, "other": 0.0}
        for name, num_bytes in kernels:
            kind = "attention" if name.startswith(ATTENTION) else "other"
            if name.startswith("extern_kernels."):
                kind = "gemm"
            kib[kind] += num_bytes / (MICRO_BATCH * NUM_TOKENS) / KIB
        return {
            "launches": len(re.findall(r"^\s+triton_\w+\.run\(", code, re.MULTILINE)),
            "operators": sum(name.startswith(OURS) for name, _ in kernels),
            "gemms": sum(name.startswith("extern_kernels.") for name, _ in kernels),
            "kib": {kind: round(value, 2) for kind, value in kib.items()},
        }


def _bytes_of(nodes: Sequence[Any]) -> int:
    """Return the bytes of what nodes of a graph hold, without its parameters and inputs."""
    values = [
        n.meta["val"] for n in nodes if isinstance(n, torch.fx.Node) and n.op != "placeholder"
    ]
    return sum(math.prod(v.shape) * v.itemsize for v in values if isinstance(v, Tensor))


def _base_of(row: dict[str, Any], rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return next(one for one in rows if one["model"] == row["model"] and not one["canon_set"])


def _both(row: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    return row["forward"], row["backward"]


def _total_kib(row: dict[str, Any]) -> float:
    """Return KiB per token of forward and backward, products and attention included."""
    return sum(sum(one["kib"].values()) for one in _both(row))


def computed(row: dict[str, Any], rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return what follows from a row: the least KiB, the ratio to them, and a training step's time.

    `steps`: GPU of RATES -> seconds, MFU and the price over no Canon, each with low rates, middle
    and high ones. Computed, not measured.
    """
    least = sum(one.total for one in block_traffic(_key(row).args, itemsize=2).values()) / KIB
    counted = sum(one["kib"]["other"] for one in _both(row))
    flops = flops_per_token(_key(row).args, NUM_TOKENS) * MICRO_BATCH * NUM_TOKENS
    steps = {}
    for gpu, rates in RATES.items():
        took = [_step_s(row, gpu, bar) for bar in range(3)]
        base = [_step_s(_base_of(row, rows), gpu, bar) for bar in range(3)]
        steps[gpu] = {
            "seconds": took,
            "mfu": [flops / seconds / rates.peak_flops for seconds in took],
            "over_none": [own / none - 1 for own, none in zip(took, base, strict=True)],
        }
    return {"least_kib": least, "counted_kib": counted, "ratio": counted / least, "steps": steps}


def _step_s(row: dict[str, Any], gpu: str, bar: int) -> float:
    launches = sum(one["launches"] + one["operators"] + one["gemms"] for one in _both(row))
    launches += row["backward"]["operators"] + 3  # a second stage of weight gradients; attention
    return step_seconds(
        _key(row).args,
        RATES[gpu],
        bar,
        num_tokens=MICRO_BATCH * NUM_TOKENS,
        seq_len=NUM_TOKENS,
        world_size=GPUS_OF_A_NODE,
        layer_bytes=KIB * sum(one["kib"]["other"] for one in _both(row)),
        layer_launches=launches,
    )


COLUMNS = (
    "model", "Canon", "backend", "launches", "operators", "KiB", "extra", "saved B", "least",
    "ratio", "H100 ms", "MFU %", "over none %", "H200 ms", "MFU %", "over none %",
)  # fmt: skip


def cells(row: dict[str, Any], rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return a row of the table, in the order of COLUMNS."""
    base = _base_of(row, rows)
    found = computed(row, rows)
    words = [
        row["model"],
        row["canon_set"] or "none",
        row["backend"] if row["canon_set"] else "",
        " + ".join(str(one["launches"]) for one in _both(row)),
        " + ".join(str(one["operators"]) for one in _both(row)),
        f"{_total_kib(row):,.1f}",
        f"{_total_kib(row) - _total_kib(base):+,.1f}" if row is not base else "",
        f"{row['saved_bytes']:,.0f}",
        f"{found['least_kib']:.1f}",
        f"{found['ratio']:.2f}",
    ]
    for step in found["steps"].values():
        low, middle, high = (f"{1e3 * value:.0f}" for value in step["seconds"])
        words.append(f"{middle} ({high}-{low})")
        low, middle, high = (f"{100 * value:.0f}" for value in step["mfu"])
        words.append(f"{middle} ({low}-{high})")
        price = [f"{100 * value:+.1f}" for value in step["over_none"]]
        words.append(f"{price[1]} ({price[2]}, {price[0]})" if row is not base else "")
    return words


def legend(result: dict[str, Any]) -> list[str]:
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
        bars = {
            "products (TFLOP/s)": [value / 1e12 for value in rates.gemm_flops],
            "attention (TFLOP/s of the causal half)": [v / 1e12 for v in rates.attention_flops],
            "memory (TB/s)": [value / 1e12 for value in rates.memory_bytes],
            "gap between kernels (us)": [1e6 * value for value in rates.launch_gap_s],
            "NVLink (GB/s)": [value / 1e9 for value in rates.network_bytes],
            "share of it exposed": list(rates.exposed_network),
        }
        told = "; ".join(
            f"{name} {middle:g} ({low:g}, {high:g})" for name, (low, middle, high) in bars.items()
        )
        lines.append(f"{gpu.upper()}: {told}. MFU is of {rates.peak_flops / 1e12:.0f} TFLOP/s.")
    return lines


def print_result(result: dict[str, Any], console: Console) -> None:
    rows = [cells(row, result["rows"]) for row in result["rows"]]
    print_lines(console, *legend(result), *_markdown(COLUMNS, rows))


def page(result: dict[str, Any]) -> str:
    """Return PAGE: the same in Markdown, and the least bytes site by site."""
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    rows = [cells(row, result["rows"]) for row in result["rows"]]
    sites = []
    for model in ("nope", "rope"):
        with_all, none = (
            block_traffic(Case(model, canon_set, "").args, itemsize=2) for canon_set in ("ABCD", "")
        )
        for site, traffic in with_all.items():
            words = [model, site]
            for name in ("forward", "backward"):
                least, base = (getattr(one, name) / KIB for one in (traffic, none[site]))
                words += [f"{least:.1f}", f"{least - base:.1f}"]
            sites.append(words)
    lines = [
        "# What a block launches and moves on an H100, counted without one",
        "",
        f"Written by `python -m canon_pretrain.bench codegen --record` ({versions}).",
        "",
        *(f"{line}\n" for line in legend(result)),
        *_markdown(COLUMNS, rows),
        "",
        "## The least KiB per token and layer, site by site (`block_traffic` in bench/limits.py)",
        "",
        *_markdown(("model", "site", "forward", "Canon's", "backward", "Canon's"), sites),
    ]
    return "\n".join(lines) + "\n"


def _markdown(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    table = [columns, ["---"] * len(columns), *rows]
    return [f"| {' | '.join(words)} |" for words in table]
