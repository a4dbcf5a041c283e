"""What the Triton kernels of GLA and Mamba2 cost at 1.3B: launches as recorded without a GPU.

`python -m tests.recurrence_launches OUT.json COMPUTE_CAPABILITY DTYPE` compiles each launch,
without TRITON_INTERPRET; `python -m tests.recurrence_launches` prints the bytes of each operand.
"""

import contextlib
import importlib
import json
import sys
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch

from tests.triton_compiled import resources

PACKAGE = "canon_pretrain.kernels.triton.recurrence"
OPTIONS = ("num_warps", "num_stages", "enable_fp_fusion")
TYPES = {
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.uint8: "*u8",
}
BATCH = 6
NUM_TOKENS = 4096
# heads, key dim (Mamba2: state) and value dim at 1.3B
SIZES = {
    "gla": (4, 256, 512),
    "gla of 16 heads": (16, 128, 256),
    "mamba2": (64, 64, 64),
    "mamba2 of 128 states": (64, 128, 64),
}


class Launch(NamedTuple):
    kernel: Any
    grid: tuple[int, ...]
    arguments: dict[str, Any]

    @property
    def name(self):
        return self.kernel.__name__

    @property
    def code(self):
        """What the compiled code depends on."""
        sizes = {k: str(v) for k, v in self.arguments.items() if not torch.is_tensor(v)}
        return f"{self.name} {sizes}"


class Recorder:
    """Stands in for a kernel and records its launches."""

    def __init__(self, kernel, launches):
        self.kernel = kernel
        self.launches = launches

    def __getitem__(self, grid):
        def launch(*positional, **arguments):
            named = dict(zip(self.kernel.arg_names, positional, strict=False))
            self.launches.append(Launch(self.kernel, grid, named | arguments))

        return launch


def recorded(model, dtype):
    """Return the launches of forward, and those of backward, with documents and a state."""
    modules = [importlib.import_module(f"{PACKAGE}.{name}") for name in ("chunks", "gla", "ssd")]
    _, gla, ssd = modules
    heads, key_dim, value_dim = SIZES[model]
    tokens = (BATCH, NUM_TOKENS)

    def empty(*shape, dtype=torch.float32):
        return torch.empty(shape, dtype=dtype, device="meta")

    v = empty(*tokens, heads, value_dim, dtype=dtype)
    state = empty(BATCH, heads, key_dim, value_dim)
    starts = empty(*tokens, dtype=torch.bool)
    if model.startswith("gla"):
        q, k = (empty(*tokens, heads, key_dim, dtype=dtype) for _ in range(2))
        log_decay = empty(*tokens, heads, key_dim)
        module = gla
        inputs = gla.Inputs(q, k, v, log_decay, starts, 1.0)
    else:
        B, C = (empty(*tokens, key_dim, dtype=dtype) for _ in range(2))
        module = ssd
        inputs = ssd.Inputs(v, empty(*tokens, heads), empty(heads), B, C, empty(heads), starts)

    launches = []
    with contextlib.ExitStack() as patches:
        for each in modules:
            for name in [name for name in vars(each) if name.endswith("_kernel")]:
                recorder = Recorder(getattr(each, name), launches)
                patches.enter_context(mock.patch.object(each, name, recorder))
        module.forward(inputs, state)
        num_forward = len(launches)
        module.backward(torch.empty_like(v), state.clone(), inputs, state)
    return launches[:num_forward], launches[num_forward:]


# -- bytes --------------------------------------------------------------------------------------

IN_PLACE = {"gla_pair_gradients_kernel": ("dq", "dk")}
"""Operands that are read and written."""
# What a pass moves: inputs and results once; states, and their gradients, written and read once,
# but by GLA's forward walk, which keeps them in registers.
LEAST = {
    "gla": (
        "q k log_decay values out",
        "q k log_decay v do dq dk dlog_decay out states states dstates dstates",
    ),
    "mamba2": (
        "x dt B C y states states",
        "x dt B C dy dx ddt dB dC states states dstates dstates",
    ),
}


def bytes_of(launch):
    """Return {operand: bytes} of a launch, of operands that many programs read once.

    A tensor that stands in for an operand that is not read counts once.
    """
    in_place = IN_PLACE.get(launch.name, ())
    operands = {}  # by tensor
    for name, value in launch.arguments.items():
        if torch.is_tensor(value):
            operands[id(value)] = (name, value.nbytes * (2 if name in in_place else 1))
    return dict(operands.values())


def cost(model, launches, way):
    """Return the bytes that launches move, and the least; way 0 is forward, 1 backward."""
    sizes = {}
    for launch in launches:
        sizes |= {k: v.nbytes for k, v in launch.arguments.items() if torch.is_tensor(v)}
    moved = sum(sum(bytes_of(launch).values()) for launch in launches)
    least = LEAST[model.partition(" ")[0]][way].split()
    return moved, sum(sizes[name] for name in least)


# -- code ---------------------------------------------------------------------------------------


def compiled(launch, capability):
    """Return a launch's kernel compiled for a GPU."""
    triton = importlib.import_module("triton")
    backends = importlib.import_module("triton.backends.compiler")

    signature = {}
    attributes = {}
    constants = {}
    for index, parameter in enumerate(launch.kernel.params):
        value = launch.arguments[parameter.name]
        is_tensor = torch.is_tensor(value)
        if parameter.is_constexpr:
            signature[parameter.name] = "constexpr"
            constants[parameter.name] = value
        elif is_tensor:
            signature[parameter.name] = TYPES[value.dtype]
        else:
            signature[parameter.name] = "fp32" if isinstance(value, float) else "i32"
        # as Triton specializes them
        if is_tensor or (signature[parameter.name] == "i32" and value % 16 == 0):
            attributes[index,] = [["tt.divisibility", 16]]

    options = {name: launch.arguments[name] for name in OPTIONS if name in launch.arguments}
    return triton.compile(
        triton.compiler.ASTSource(launch.kernel, signature, constexprs=constants, attrs=attributes),
        target=backends.GPUTarget("cuda", capability, 32),
        options=options,
    )


def main() -> None:
    """Write {launch: [PTX, resources, bytes of shared memory]}, or print the bytes."""
    if len(sys.argv) > 1:
        out, capability, dtype = sys.argv[1:]
        launches = []
        for model in SIZES:
            for of_way in recorded(model, getattr(torch, dtype)):
                launches += of_way
        result = {}
        for launch in {each.code: each for each in launches}.values():
            code = compiled(launch, int(capability))
            shared = code.metadata.shared
            result[launch.code] = (code.asm["ptx"], resources(code.asm["cubin"]), shared)
        Path(out).write_text(json.dumps(result))
        return

    kib = 1024 * BATCH * NUM_TOKENS
    for model in SIZES:
        for way, launches in enumerate(recorded(model, torch.bfloat16)):
            for launch in launches:
                operands = {name: round(n / kib, 2) for name, n in bytes_of(launch).items()}
                print(launch.name, launch.grid, operands, "KiB per token")
            moved, least = cost(model, launches, way)
            numbers = f"{moved / kib:.1f} KiB, least {least / kib:.1f}, {moved / least:.2f}"
            print(model, ("forward", "backward")[way], len(launches), numbers)


if __name__ == "__main__":
    main()
