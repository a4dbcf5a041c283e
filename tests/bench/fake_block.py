"""Launches and bytes of blocks on a fake H100: the process of `python -m tests.bench codegen`.

    python -m tests.bench.fake_block < REQUEST.json

A request names micro_batch, num_tokens and cases, each with a block's `args` (fields of ModelArgs)
and `backend`. Prints a line of JSON per case: by pass the launches of generated kernels, our
operators, products, and KiB per token by kind; and the bytes per token that are kept for backward.
"""

import json
import os
import sys
from typing import TYPE_CHECKING, Any

from canon_pretrain.core.cli import run_process
from canon_pretrain.fake_gpu import hooks

if TYPE_CHECKING:  # torch is imported after the hooks are loaded
    from torch import fx

    from canon_pretrain.kernels.graphs import Generated

KIB = 2**10
ATTENTION = "torch.ops.canon_pretrain_opaque.attention"
OWN_OPERATORS = "torch.ops.canon_pretrain."
PRODUCTS = "extern_kernels."


def main() -> None:
    """Count the cases of the request on stdin."""
    request = json.load(sys.stdin)
    hooks.load(hooks.build())
    from canon_pretrain.fake_gpu import device
    from canon_pretrain.fake_gpu.tracker import Tracker
    from canon_pretrain.machine.gpus import GPUS

    device.install(GPUS["h100"], num_devices=1, tracker=Tracker())
    for case in request["cases"]:
        row = count_block(
            case["args"], case["backend"], request["micro_batch"], request["num_tokens"]
        )
        print(json.dumps(row), flush=True)
    os._exit(0)  # threads may wait for a device


def count_block(
    values: dict[str, Any], backend: str, micro_batch: int, num_tokens: int
) -> dict[str, Any]:
    """Compile a block as in training, and return its counts. Attention is an opaque operator."""
    import torch

    from canon_pretrain.kernels.graphs import generate_code
    from canon_pretrain.model.args import ModelArgs
    from canon_pretrain.titan.costs import empty_results, trace_block

    args = ModelArgs(**values | {"max_seq_len": num_tokens})
    counts: dict[str, Any] = {}
    tokens = micro_batch * num_tokens

    def count(
        graph: "fx.GraphModule", inputs: Any, *, is_backward: bool = False, **options: Any
    ) -> Any:
        """Stand for Inductor's inner compiler: count the generated code."""
        if not is_backward:
            counts["saved_bytes"] = _kept_bytes(graph) / tokens
        run = empty_results(graph)
        mode = torch._guards.detect_fake_mode()
        generated = generate_code(graph, inputs, mode, is_backward=is_backward)
        direction = "backward" if is_backward else "forward"
        counts[direction] = _count_kernels(generated, tokens)
        return run

    trace_block(args, torch.bfloat16, backend, count, micro_batch=micro_batch, device="cuda")
    return counts


def _kept_bytes(graph: "fx.GraphModule") -> int:
    """Return the bytes of what a forward graph computes for backward: no parameter, no input."""
    from torch import Tensor, fx

    from canon_pretrain.kernels.graphs import results_of
    from canon_pretrain.kernels.traffic import num_bytes_of

    kept = [
        node.meta["val"]
        for node in results_of(graph)[1:]
        if isinstance(node, fx.Node) and node.op != "placeholder"
    ]
    return sum(num_bytes_of(value) for value in kept if isinstance(value, Tensor))


def _count_kernels(generated: "Generated", tokens: int) -> dict[str, Any]:
    """Return launches, and KiB per token by kind of kernel."""
    kib = {"gemm": 0.0, "attention": 0.0, "other": 0.0}
    num_products = 0
    num_operators = 0
    for kernel in generated.kernels:
        kind = "other"
        if kernel.name.startswith(ATTENTION):
            kind = "attention"
        elif kernel.name.startswith(PRODUCTS):
            kind = "gemm"
            num_products += 1
        num_operators += kernel.name.startswith(OWN_OPERATORS)
        kib[kind] += kernel.num_bytes / tokens / KIB

    return {
        "launches": generated.num_launches,
        "operators": num_operators,
        "gemms": num_products,
        "kib": {kind: round(value, 2) for kind, value in kib.items()},
    }


if __name__ == "__main__":
    run_process(main)
