"""A model by Triton's interpreter against the same by the reference; run as a process of its own.

TRITON_INTERPRET must be set before triton is imported. Prints the largest relative difference of
the logits and of the gradients of each variant, and which kernels ran, as JSON.
"""

import json
import sys
from typing import Any

import torch

from canon_pretrain.kernels import backends
from tests.triton_cases import quicken_interpreter
from tests.variants import build, random_tokens, variant

KERNELS = ("canon_triton", "norm_canon_stream_triton", "canon_qkv_triton", "canon_gate_triton")


def main(names: list[str]) -> None:
    backends.check_canon_backend("triton")
    quicken_interpreter()
    print(json.dumps({name: _compare(name) for name in names}))


def _compare(name: str) -> dict[str, Any]:
    args = variant(name)
    expected = build(args, canon_backend="reference")
    given = build(args, canon_backend="triton")
    module = backends._module(backends._TRITON)
    used: list[str] = []
    whole = {kernel: getattr(module, kernel) for kernel in KERNELS}
    for kernel, function in whole.items():
        setattr(module, kernel, _noting(function, kernel, used))
    tokens = random_tokens(args, rows=2, num_tokens=11)
    errors = []
    results = [model(tokens) for model in (expected, given)]
    weights = torch.randn(results[0].shape, generator=torch.Generator().manual_seed(1))
    for logits in results:
        (logits * weights).sum().backward()
    for kernel, function in whole.items():
        setattr(module, kernel, function)
    errors.append(_error(*results))
    pairs = zip(expected.parameters(), given.parameters(), strict=True)
    errors += [_error(one.grad, other.grad) for one, other in pairs if one.grad is not None]
    return {"error": max(errors), "used": sorted(set(used))}


def _noting(function: Any, name: str, used: list[str]) -> Any:
    def noting(*args: Any, **options: Any) -> Any:
        used.append(name)
        return function(*args, **options)

    return noting


def _error(one: Any, other: Any) -> float:
    return float((one - other).abs().max() / one.abs().max())


if __name__ == "__main__":
    main(sys.argv[1:])
