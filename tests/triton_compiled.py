"""Compile every kernel of `kernels/triton/` for a GPU that need not be there:
`python -m tests.triton_compiled OUT.json COMPUTE_CAPABILITY`, without TRITON_INTERPRET.

The interpreter accepts programs that the compiler refuses.
"""

import importlib
import json
import subprocess
import sys
import tempfile
from pathlib import Path

FOLDER = "canon_pretrain.kernels.triton"
SIZES = ("num_tokens", "width", "run", "rope_pairs", "rope_heads", "num_programs")
FLOATS = ("rstd", "cos", "sin", "sums")


# constants of all kernels, and of the kernels of rows
COMMON = {"taps": 4, "residual": True, "stages": 3, "num_sums": 4, "want_sums": True}
ROW = {"norm": 0, "rope": False, "head_dim": 1, "dims": 1, "adds": False, "grads": 1}


def variants():
    """Return (module, kernel, constants, warps) of everything that is compiled."""
    four_taps = []
    for way in ("forward", "backward"):
        for activation in (False, True):  # with an activation, also documents
            four_taps += rows_variants(way, activation)
            four_taps.append(gate_variant(way, activation))

    found = [*four_taps]
    for module, kernel, constants, warps in four_taps:
        if constants["block"] != 4096:
            found.append((module, kernel, constants | of_two_taps(constants), warps))
    for norm, num_sums in ((False, 4), (True, 4), (True, 5)):
        constants = COMMON | {"norm": norm, "num_sums": num_sums, "block": 32, "programs": 32}
        found.append(("blocks", "canon_sums_kernel", constants, 4))
    return found


def rows_variants(way, activation):
    """Return the variants of a kernel of rows: plain, norm and stream, heads with RoPE and norm."""
    heads = {"head_dim": 64, "dims": 64}
    wide = {"norm": 1, "adds": True, "grads": 1 if activation else 3, "stages": 2}
    sites = (
        ({}, 256, 1),
        ({"norm": 1, "adds": True, "grads": 3}, 2048, 8),
        (wide, 4096, 16),
        ({"rope": True} | heads, 256, 1),
        ({"norm": 1, "rope": True} | heads, 2048, 8),
        ({"norm": 2, "rope": activation} | heads, 256, 1),
        ({"norm": 2, "rope": True, "head_dim": 96, "dims": 128}, 256, 1),
    )
    variants = []
    for site, block, warps in sites:
        constants = COMMON | ROW | site
        constants |= {"activation": activation, "seg": activation, "block": block}
        if constants["norm"] == 2 or (constants["norm"] == 1 and activation):
            constants["num_sums"] += 1
        variants.append(("rows", f"canon_rows_{way}_kernel", constants, warps))
    return variants


def gate_variant(way, activation):
    """Return a variant of a kernel of the gate; with an activation, it is relu2."""
    constants = COMMON | {"activation": activation, "seg": activation}
    constants |= {"relu2": activation, "block": 256}
    return ("gate", f"canon_gate_{way}_kernel", constants, 1 if way == "forward" else 2)


def of_two_taps(constants):
    """Return the constants that change for two taps, one token, and a size that is 1."""
    # Triton specializes arguments that are 1
    ones = ("rope_pairs", "rope_heads") if constants.get("rope") else ("width",)
    sizes = dict.fromkeys(("num_tokens", *ones), 1)
    return {"taps": 2, "num_sums": constants["num_sums"] - 2} | sizes


def compiled(module, kernel, constants, warps, dtype, capability):
    """Return a kernel compiled for a GPU, with tensors of `dtype`."""
    triton = importlib.import_module("triton")
    backends = importlib.import_module("triton.backends.compiler")
    function = getattr(importlib.import_module(f"{FOLDER}.{module}"), kernel)

    types = {"eps": "fp32", "segments": "*i32"}
    types |= dict.fromkeys(SIZES, "i32")
    types |= dict.fromkeys(FLOATS, "*fp32")
    types |= dict.fromkeys(constants, "constexpr")
    signature = {name: types.get(name, f"*{dtype}") for name in function.arg_names}

    attributes = {}
    for index, (name, kind) in enumerate(signature.items()):
        if name in SIZES[:2] or kind.startswith("*"):
            attributes[index,] = [["tt.divisibility", 16]]
    constexprs = {name: constants[name] for name in function.arg_names if name in constants}

    return triton.compile(
        triton.compiler.ASTSource(function, signature, constexprs=constexprs, attrs=attributes),
        target=backends.GPUTarget("cuda", capability, 32),
        options={"num_warps": warps, "enable_fp_fusion": True},  # as the launches
    )


def resources(cubin):
    """Return the line of cuobjdump about registers and the stack, "" without the tool."""
    tool = Path(importlib.import_module("triton").__file__ or "").parent
    tool = tool / "backends" / "nvidia" / "bin" / "cuobjdump"
    if not tool.exists():
        return ""

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [tool, "--dump-resource-usage", file.name]
        lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return next(line.strip() for line in lines.splitlines() if "STACK:" in line)


def main() -> None:
    """Write {variant: [PTX, resources]} to argv[1]."""
    result = {}
    for i, (module, kernel, constants, warps) in enumerate(variants()):
        dtype = ("bf16", "fp32", "bf16", "fp16")[i % 4]
        assembly = compiled(module, kernel, constants, warps, dtype, int(sys.argv[2])).asm
        name = f"{kernel} {dtype} {constants}"
        result[name] = (assembly["ptx"], resources(assembly["cubin"]))
    Path(sys.argv[1]).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
