"""Kernel launches and bytes of a 1.3B block on an H100, counted in Inductor's code without a GPU.

Nothing is executed: `fake_block.py` compiles the blocks, in a process of its own.
"""

import argparse
import contextlib
import dataclasses
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from canon_pretrain import kernels
from canon_pretrain.core.errors import UserError, check_choice, reason_in
from canon_pretrain.core.files import read_json, write_atomic
from canon_pretrain.core.terminal import Console
from canon_pretrain.kernels.work import Work
from canon_pretrain.machine.gpus import GPUS, GPUS_PER_NODE
from canon_pretrain.model.args import ModelArgs, flavor
from canon_pretrain.model.counts import flops_per_token
from canon_pretrain.titan.step_time import (
    Layout,
    StepCounts,
    count_model,
    step_seconds,
)
from tests.bench.limits import Machine, min_block_bytes
from tests.bench.tables import Columns, print_lines
from tests.bench.variants import Bench, Log, Result, normalize_canon_sets, with_canon

H100 = GPUS["h100"]
Row = dict[str, Any]
KIB = 1024
RECORD = Path(kernels.__file__).with_name("codegen.json")
PAGE = RECORD.with_name("CODEGEN.md")
MICRO_BATCH = 6
NUM_TOKENS = 4096
BACKENDS = ("compiled", "triton")
DEFAULT_SETS = ("AC", "ABCD")
SETS = {
    "nope": ("A", "B", "C", "D", "AC", "ABCD", "FKOV", "ABCDFO"),
    "rope": (*DEFAULT_SETS, "FKOV"),
    "rope_documents": (*DEFAULT_SETS, "FKOV"),
    "nope_qk_per_head": (*DEFAULT_SETS, "FKOV"),
    "released_1b": (*DEFAULT_SETS, "FKOV"),
}
"""The Canon sets of a model, if not DEFAULT_SETS."""
NOPE = {"position": "nope"}
STANDARD = {"ffn": "standard"}
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
"""Name -> changes to 1b3 (released_1b: to 1b3_released)."""


class Case(NamedTuple):
    """A model of MODELS with a Canon set (may be empty) and a backend."""

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
    record_help = (
        f"write the counts to kernels/{RECORD.name} and kernels/{PAGE.name}; recorded rows of "
        "other models and sets stay, if they are of the same versions"
    )
    add("--record", action="store_true", help=record_help)


def measure(arguments: argparse.Namespace, machine: Machine, log: Log) -> Result:
    rows = count_blocks([*cases(arguments.models, arguments.sets)], log)
    versions = machine.facts()["versions"]
    result: Row = {
        "counted_for": H100.name,
        "micro_batch": MICRO_BATCH,
        "num_tokens": NUM_TOKENS,
        "versions": {name: versions[name] for name in ("torch", "triton")},
        "rows": rows,
    }
    if arguments.record:
        write_record(with_recorded_rows(result, read_json(RECORD)))
    return result | {"computed": [computed(row, rows) for row in rows]}


def with_recorded_rows(result: Row, recorded: Row) -> Row:
    """Return the result with the recorded rows that it lacks, in the order of `cases`.

    Raises UserError if they are of other versions.
    """
    rows = {_case(row): row for row in result["rows"]}
    missing = {_case(row): row for row in recorded["rows"] if _case(row) not in rows}
    for name in ("versions", "counted_for", "micro_batch", "num_tokens"):
        if missing and recorded[name] != result[name]:
            raise UserError(
                "bench.codegen",
                f"{RECORD.name} has rows of other {name} ({recorded[name]}, here {result[name]}): "
                "count all with --record alone",
                given=recorded[name],
                expected=result[name],
            )
    rows |= missing
    order = [case for case in cases(MODELS, None) if case in rows]
    others = [case for case in rows if case not in order]
    return result | {"rows": [rows[case] for case in (*order, *others)]}


def _case(row: Row) -> Case:
    return Case(row["model"], row["canon_set"], row["backend"])


def write_record(result: Row) -> None:
    """Write RECORD, a line per row, and PAGE."""
    lines = ",\n".join(map(json.dumps, result["rows"]))
    head = json.dumps(result | {"rows": []}).removesuffix("]}")
    write_atomic(RECORD, f"{head}\n{lines}\n]}}\n".encode())
    write_atomic(PAGE, page(result).encode())


def cases(models: Iterable[str], sets: Sequence[str] | None) -> Iterator[Case]:
    """Yield the cases, each model first without Canon. Raises UserError."""
    for model in models:
        check_choice("--models", model, MODELS)
        yield Case(model, "", "compiled")
        for canon_set in normalize_canon_sets(sets or SETS.get(model, DEFAULT_SETS)):
            yield from (Case(model, canon_set, backend) for backend in BACKENDS)


# -- counts


def count_blocks(cases: Sequence[Case], log: Log) -> list[Row]:
    """Return the rows of `cases`, counted in a process with a fake H100. Raises UserError."""
    request = {
        "micro_batch": MICRO_BATCH,
        "num_tokens": NUM_TOKENS,
        "cases": [{"args": vars(case.args), "backend": case.backend} for case in cases],
    }
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.bench.fake_block"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )

    # The process answers with a line per case; its errors are read at the same time.
    with process, ThreadPoolExecutor(1) as pool:
        assert process.stdin and process.stdout and process.stderr
        errors = pool.submit(process.stderr.read)
        with contextlib.suppress(BrokenPipeError):  # it has ended, and says why
            process.stdin.write(json.dumps(request))
            process.stdin.close()
        rows = []
        for case, line in zip(cases, process.stdout, strict=False):
            rows.append(case._asdict() | json.loads(line))
            log(f"{case.model}: {case.canon_set or 'no Canon'} {case.backend}")
        code = process.wait()

    if code or len(rows) < len(cases):
        text = errors.result()
        reason = reason_in(text) or text.strip()[-2000:]
        raise UserError("bench.codegen", f"no counts: {reason}", exit_code=code)
    return rows


def _kib(row: Row, kind: str) -> float:
    """Return the KiB per token of forward and backward, "other" or "gemm"."""
    return sum(counts["kib"][kind] for counts in _passes(row))


def _total_kib(row: Row) -> float:
    return sum(sum(counts["kib"].values()) for counts in _passes(row))


def _passes(row: Row) -> tuple[Row, Row]:
    """Return the counts of forward and backward."""
    return row["forward"], row["backward"]


def _args(row: Row) -> ModelArgs:
    return _case(row).args


def _step(row: Row) -> StepCounts:
    """Return the counts of a step of the whole model on a node, by those of a row's block."""
    args = _args(row)
    tokens = MICRO_BATCH * NUM_TOKENS
    launches = sum(
        counts["launches"] + counts["operators"] + counts["gemms"] for counts in _passes(row)
    )
    projection_dims = sum(args.qkv_dims) + args.qkv_dims[0] + args.ffn_in_dim + args.ffn_dim
    block = Work(
        # and the second stage of weight gradients
        launches=launches + row["backward"]["operators"],
        bytes_moved=tokens * KIB * _kib(row, "other"),
        product_bytes=tokens * KIB * _kib(row, "gemm"),
        flops=Counter({"bfloat16": 6 * tokens * args.dim * projection_dims}),
    )
    layout = Layout(world_size=GPUS_PER_NODE, num_shards=GPUS_PER_NODE, tokens=tokens)
    return count_model(args, layout, block)


def computed(row: Row, rows: Sequence[Row]) -> Row:
    """Return what follows from a row's counts: KiB per token, and a step with low to high rates."""
    without_canon = next(
        other for other in rows if other["model"] == row["model"] and not other["canon_set"]
    )
    least_bytes = sum(map(sum, min_block_bytes(_args(row), itemsize=2).values()))
    least_kib = least_bytes / KIB
    counted_kib = _kib(row, "other")
    flops = flops_per_token(_args(row), NUM_TOKENS) * MICRO_BATCH * NUM_TOKENS
    seconds = step_seconds(_step(row), H100)
    seconds_without = step_seconds(_step(without_canon), H100)
    return {
        "least_kib": least_kib,
        "counted_kib": counted_kib,
        "ratio": counted_kib / least_kib,
        "total_kib": _total_kib(row),
        "extra_kib": _total_kib(row) - _total_kib(without_canon),
        "seconds": seconds,
        "mfu": [flops / s / H100.peak_flops for s in seconds],
        "over_none": [own / base - 1 for own, base in zip(seconds, seconds_without, strict=True)],
    }


COLUMNS: Columns = {
    "model": lambda row: row["model"],
    "Canon": lambda row: row["canon_set"] or "none",
    "backend": lambda row: row["backend"] if row["canon_set"] else "",
    "launches": lambda row: " + ".join(str(counts["launches"]) for counts in _passes(row)),
    "own": lambda row: " + ".join(str(counts["operators"]) for counts in _passes(row)),
    "KiB": lambda row: f"{row['total_kib']:.1f}",
    "extra": lambda row: f"{row['extra_kib']:+.1f}" if row["canon_set"] else "",
    "least": lambda row: f"{row['least_kib']:.1f}",
    "ratio": lambda row: f"{row['ratio']:.2f}",
    "saved B": lambda row: f"{row['saved_bytes']:,.0f}",
    "step s": lambda row: f"{row['seconds'][1]:.3f}",
    "MFU": lambda row: f"{row['mfu'][1]:.0%}",
    "cost": lambda row: f"{row['over_none'][1]:+.1%}" if row["canon_set"] else "",
}


def page(result: Row) -> str:
    """Return PAGE: an explanation of the columns, the rates, and the table."""
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    speeds = vars(H100.speeds)
    rates = [f"{name} {speed.likely:.3g}" for name, speed in speeds.items()]
    lines = [
        "# Launches and bytes of a block on an H100, counted without one",
        f"Written by `python -m tests.bench codegen --record` ({versions}) for "
        f"{result['counted_for']}: one block of 1.3B, {result['micro_batch']} x "
        f"{result['num_tokens']:,} tokens, bfloat16; nothing was run.",
        "launches: Inductor's kernels, forward + backward; own: our operators. KiB: read and "
        "written per token and layer; extra: over no Canon; least: lower bound outside matmuls "
        "and attention (limits.py); ratio: counted over least. saved B: bytes per token saved for "
        "backward, without the block's input.",
        f"Computed, not measured: a training step of the whole model on {GPUS_PER_NODE} GPUs, one "
        f"micro-batch each; cost: over no Canon. Rates assumed: {', '.join(rates)}; MFU of "
        f"{H100.peak_flops / 1e12:.0f} TFLOP/s.",
    ]
    text = "".join(f"{line}\n\n" for line in lines)

    cells = [list(COLUMNS), ["---"] * len(COLUMNS)]
    for row in result["rows"]:
        columns = row | computed(row, result["rows"])
        cells.append([cell(columns) for cell in COLUMNS.values()])
    return text + "".join(f"|{'|'.join(line)}|\n" for line in cells)


def print_result(result: Row, console: Console) -> None:
    print_lines(console, *page(result).splitlines())


BENCHES = {"codegen": Bench(add_arguments, measure, print_result)}
