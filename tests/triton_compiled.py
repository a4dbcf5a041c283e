"""Compile every kernel of `kernels/triton/` for a GPU that need not be there:
`python -m tests.triton_compiled OUT.json COMPUTE_CAPABILITY`, without TRITON_INTERPRET.

The interpreter accepts programs that the compiler refuses.
"""

import importlib
import itertools
import json
import subprocess
import sys
import tempfile
from pathlib import Path

FOLDER = "canon_pretrain.kernels.triton"
SIZES = ("num_tokens", "width", "run", "rope_pairs", "rope_heads", "num_programs")
FLOATS = ("rstd", "cos", "sin", "sums")


def variants():
    common = {"taps": 4, "residual": True, "stages": 3, "num_sums": 4, "want_sums": True}
    plain = {"norm": 0, "rope": False, "head_dim": 1, "dims": 1, "adds": False, "grads": 1}
    heads = {"head_dim": 64, "dims": 64}
    found = []
    for way, (activation, seg) in itertools.product(
        ("forward", "backward"), ((False, False), (True, True))
    ):
        some = common | {"activation": activation, "seg": seg}
        for site, block, warps in (
            ({}, 256, 1),
            ({"norm": 1, "adds": True, "grads": 3}, 2048, 8),
            ({"norm": 1, "adds": True, "grads": 1 if activation else 3, "stages": 2}, 4096, 16),
            ({"rope": True} | heads, 256, 1),
            ({"norm": 1, "rope": True} | heads, 2048, 8),
            ({"norm": 2, "rope": seg} | heads, 256, 1),
            ({"norm": 2, "rope": True, "head_dim": 96, "dims": 128}, 256, 1),
        ):
            constants = some | plain | site | {"block": block}
            constants["num_sums"] += constants["norm"] == 2 or constants["norm"] * activation
            found.append(("rows", f"canon_rows_{way}_kernel", constants, warps))
        constants = some | {"relu2": seg, "block": 256}
        found.append(("gate", f"canon_gate_{way}_kernel", constants, 1 if way == "forward" else 2))
    for module, kernel, constants, warps in list(found):
        if constants["block"] != 4096:
            two_taps = {"taps": 2, "num_sums": constants["num_sums"] - 2}
            # Triton specializes arguments that are 1
            ones = ("rope_pairs", "rope_heads") if constants.get("rope") else ("width",)
            two_taps |= dict.fromkeys(("num_tokens", *ones), 1)
            found.append((module, kernel, constants | two_taps, warps))
    for norm, num_sums in ((False, 4), (True, 4), (True, 5)):
        constants = common | {"norm": norm, "num_sums": num_sums, "block": 32, "programs": 32}
        found.append(("blocks", "canon_sums_kernel", constants, 4))
    return found


def compiled(module, kernel, constants, warps, dtype, capability):
    triton = importlib.import_module("triton")
    backends = importlib.import_module("triton.backends.compiler")
    function = getattr(importlib.import_module(f"{FOLDER}.{module}"), kernel)
    types = dict.fromkeys(SIZES, "i32") | {"eps": "fp32", "segments": "*i32"}
    types |= dict.fromkeys(FLOATS, "*fp32") | dict.fromkeys(constants, "constexpr")
    signature = {name: types.get(name, f"*{dtype}") for name in function.arg_names}
    aligned = [n for n, kind in signature.items() if n in SIZES[:2] or kind.startswith("*")]
    attributes = {(function.arg_names.index(n),): [["tt.divisibility", 16]] for n in aligned}
    known = {name: constants[name] for name in function.arg_names if name in constants}
    source = triton.compiler.ASTSource(function, signature, constexprs=known, attrs=attributes)
    target = backends.GPUTarget("cuda", capability, 32)
    # as the launches
    options = {"num_warps": warps, "enable_fp_fusion": True}
    return triton.compile(source, target=target, options=options)


def resources(cubin):
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
        made = compiled(module, kernel, constants, warps, dtype, int(sys.argv[2]))
        name = f"{kernel} {dtype} {constants}"
        result[name] = (made.asm["ptx"], resources(made.asm["cubin"]))
    Path(sys.argv[1]).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
