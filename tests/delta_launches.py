"""What the gated delta rule's Triton kernels cost at 1.3B: launches as recorded without a GPU.

`python -m tests.delta_launches OUT.json COMPUTE_CAPABILITY DTYPE` compiles each launch, without
TRITON_INTERPRET; `python -m tests.delta_launches` prints the bytes of each operand.
"""

import importlib
import json
import sys
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch

from tests.recurrence_launches import compiled
from tests.triton_compiled import resources

PACKAGE = "canon_pretrain.kernels.triton.recurrence"
KERNELS = ("chunks", "forward", "backward", "gradients")
SIZES = {"num_heads": 12, "key_dim": 128, "value_dim": 256}
"""Of appendix C's GatedDeltaNet at 1.3B."""


class Launch(NamedTuple):
    kernel: str
    grid: tuple[int, ...]
    arguments: dict[str, Any]

    @property
    def name(self):
        if "for_backward" in self.arguments:
            return f"{self.kernel} {self.arguments['for_backward']}"
        return self.kernel


class Recorder:
    """Stands in for a kernel and records its launches."""

    def __init__(self, kernel, launches):
        self.kernel = kernel
        self.launches = launches

    def __getitem__(self, grid):
        def launch(**arguments):
            self.launches.append(Launch(self.kernel, grid, arguments))

        return launch


def recorded(dtype, batch=6, num_tokens=4096, *, num_heads, key_dim, value_dim):
    """Return the launches of forward, and those of backward."""
    operator = importlib.import_module(f"{PACKAGE}.delta_operator")
    kernels = importlib.import_module(f"{PACKAGE}.delta")
    tokens = (batch, num_tokens, num_heads)

    def empty(*shape, dtype=torch.float32):
        return torch.empty(shape, dtype=dtype, device="meta")

    q = empty(*tokens, key_dim, dtype=dtype)
    v = empty(*tokens, value_dim, dtype=dtype)
    inputs = operator._inputs(q, q.clone(), v, empty(*tokens), empty(*tokens))
    launches = []
    recorders = {
        f"delta_{name}_kernel": Recorder(f"delta_{name}_kernel", launches) for name in KERNELS
    }
    with mock.patch.multiple(kernels, **recorders):
        _, _, matrices = kernels.forward(inputs, None)
        num_forward = len(launches)
        dfinal = empty(batch, num_heads, key_dim, value_dim)
        kernels.backward(v.clone(), dfinal, inputs, matrices, None)
    return launches[:num_forward], launches[num_forward:]


# -- bytes --------------------------------------------------------------------------------------

# kernel: operands read, and written, each once; a walk reads q, k, T and P once per tile of values,
# from the second on from the cache
OPERANDS = {
    "delta_chunks_kernel": ("q k g beta", "inverse scores"),
    "delta_forward_kernel False": ("q k v g beta inverse scores", "o last_state"),
    "delta_forward_kernel True": ("k v g beta inverse", "z states"),
    "delta_backward_kernel": ("q k g beta inverse scores do dfinal", "dv dstates dfirst"),
    "delta_gradients_kernel": ("q k g beta z do dv states dstates", "dq dk dg dbeta"),
}
# What no kernel can avoid: inputs read and results written once in each pass. In backward dq and dk
# are sums over all values, which no program has: states, z and dv pass through memory.
LEAST = {
    "forward": "q k v g beta o",
    "backward": "q k v g beta do dq dk dv dg dbeta states states dstates dstates z z dv",
}


def bytes_of(launch):
    """Return {operand: bytes} of a launch."""
    reads, writes = OPERANDS[launch.name]
    return {name: launch.arguments[name].nbytes for name in (*reads.split(), *writes.split())}


def cost(launches, way):
    """Return the bytes that launches move, and the least."""
    sizes = {}
    moved = 0
    for launch in launches:
        sizes |= bytes_of(launch)
        moved += sum(bytes_of(launch).values())
    return moved, sum(sizes[name] for name in LEAST[way].split())


def main() -> None:
    """Write {launch: [PTX, resources, bytes of shared memory]}, or print the bytes."""
    if len(sys.argv) > 1:
        out, capability, dtype = sys.argv[1:]
        forward, backward = recorded(getattr(torch, dtype), **SIZES)
        result = {}
        for launch in {each.name: each for each in (*forward, *backward)}.values():
            kernels = importlib.import_module(f"{PACKAGE}.delta")
            kernel = getattr(kernels, launch.kernel)
            code = compiled(launch._replace(kernel=kernel), int(capability))
            shared = code.metadata.shared
            result[launch.name] = (code.asm["ptx"], resources(code.asm["cubin"]), shared)
        Path(out).write_text(json.dumps(result))
        return

    num_tokens = 6 * 4096
    forward, backward = recorded(torch.bfloat16, **SIZES)
    for way, launches in (("forward", forward), ("backward", backward)):
        for launch in launches:
            operands = {k: round(v / num_tokens / 1024, 2) for k, v in bytes_of(launch).items()}
            print(launch.name, launch.grid, operands, "KiB per token")
        moved, least = cost(launches, way)
        kib, least_kib = (round(x / num_tokens / 1024, 1) for x in (moved, least))
        print(f"{way}: {kib} KiB per token, least {least_kib}, ratio {moved / least:.2f}")


if __name__ == "__main__":
    main()
