"""The checks of `kernels/triton/` against the plain parts of the model, on any device.

`kernels/test_triton.py` runs `CASES` in one process with Triton's interpreter (as
`python -m tests.triton_cases OUT.json`), `kernels/test_triton_gpu.py` the same functions on a GPU.
Nothing here imports triton before a case runs: TRITON_INTERPRET is read when it is imported.
"""

import importlib
import json
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor

from canon_pretrain.kernels.reference import canon_reference
from canon_pretrain.model.positions import apply_rope, rope_tables

# one rounding to the dtype at the end of sums in float32: half a unit in the last place
ROUNDING = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
SHARES = {"rope": (1, 1), "a": (2, 2), "b": (4, 1), "c": (1, 4)}
FUSED = "canon_pretrain.kernels.triton.fused"


def fused() -> Any:
    """The module under test."""
    return importlib.import_module(FUSED)


def small_blocks(block: int = 32, run: int = 16) -> AbstractContextManager[None]:
    """Several programs along channels and tokens even for few of them."""
    blocks = importlib.import_module("canon_pretrain.kernels.triton.blocks")
    made: AbstractContextManager[None] = mock.patch.multiple(blocks, _BLOCK=block, _MAX_RUN=run)
    return made


def random(
    *shape: int, seed: int, dtype: torch.dtype, device: str, low: float = -1.0, high: float = 1.0
) -> Tensor:
    """Uniform values that ask for gradients."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.empty(shape).uniform_(low, high, generator=generator)
    return x.to(device, dtype).requires_grad_()


def random_segments(rows: int, num_tokens: int, taps: int, device: str) -> Tensor:
    """int32 [rows, taps - 1 + T] of short documents that begin inside the row and before it."""
    generator = torch.Generator().manual_seed(9)
    ends = torch.rand(rows, taps - 1 + num_tokens, generator=generator) < 1 / 4
    return ends.cumsum(1).to(device, torch.int32)


def agree(
    run: Callable[..., Any], exact: Callable[..., Any], inputs: list[Tensor], extra: float = 2e-6
) -> None:
    """Outputs and all gradients of `run` are those of `exact` in float64, rounded once.

    `extra`: what float32 sums may be off by, as a share of the largest value.
    """
    y = _tuple(run(*inputs))
    dy = [random(*part.shape, seed=i + 70, dtype=part.dtype, device=part.device.type) for i, part in
          enumerate(y)]  # fmt: skip
    got = (*y, *torch.autograd.grad(y, inputs, dy))
    doubles = [x.detach().double().requires_grad_() for x in inputs]
    y64 = _tuple(exact(*doubles))
    want = (*y64, *torch.autograd.grad(y64, doubles, [part.double() for part in dy]))
    for i, (ours, truth) in enumerate(zip(got, want, strict=True)):
        assert ours.shape == truth.shape, (i, ours.shape, truth.shape)
        assert ours.dtype == (*y, *inputs)[i].dtype
        unit = 1.001 * ROUNDING[ours.dtype]
        if ours.device.type == "cpu" and ours.dtype == torch.bfloat16:
            unit *= 2  # Triton's interpreter (3.6 to 3.9) cuts a bfloat16 off
        bound = unit * truth.abs() + extra * truth.abs().max() + 1e-30
        excess = ((ours.double() - truth).abs() / bound).max().item()
        assert excess <= 1, f"value {i} of shape {tuple(ours.shape)} is off by {excess:.3g} bounds"


def _tuple(y: Any) -> tuple[Tensor, ...]:
    return y if isinstance(y, tuple) else (y,)


def check_canon(
    device: str, dtype: torch.dtype, rows: int, num_tokens: int, width: int, taps: int = 4, *,
    residual: bool = True, activation: bool = False, norm: bool = False, documents: bool = False,
    weight_dtype: torch.dtype = torch.float32, extra: float = 2e-6,
) -> None:  # fmt: skip
    """`canon_triton`, with `norm` after RMSNorm, and its gradients."""
    x = random(rows, num_tokens, width, seed=1, dtype=dtype, device=device, low=-2, high=3)
    weight = random(width, 1, taps, seed=2, dtype=weight_dtype, device=device)
    gain = random(width, seed=3, dtype=weight_dtype, device=device, low=0.5, high=1.5)
    segments = random_segments(rows, num_tokens, taps, device) if documents else None
    options = {"residual": residual, "activation": activation, "segments_BN": segments}

    def run(x: Tensor, weight: Tensor, gain: Tensor | None = None) -> Tensor:
        if gain is None:
            return fused().canon_triton(x, weight, **options)
        return fused().canon_triton(x, weight, gain=gain, norm="full", eps=1e-5, **options)

    def exact(x: Tensor, weight: Tensor, gain: Tensor | None = None) -> Tensor:
        if gain is not None:
            x = F.rms_norm(x, gain.shape, gain, 1e-5)
        return canon_reference(x, weight, **options)

    agree(run, exact, [x, weight, gain] if norm else [x, weight], extra)


def check_qkv(
    device: str, dtype: torch.dtype, rows: int, num_tokens: int, heads: int, kv_heads: int,
    head_dim: int, taps: int = 4, *, norm: str = "none", rope: str = "", residual: bool = True,
    activation: bool = False, documents: bool = False, extra: float = 2e-6,
) -> None:  # fmt: skip
    """`canon_qkv_triton` and its gradients."""
    widths = [heads * head_dim, kv_heads * head_dim, kv_heads * head_dim]
    parts = [
        random(rows, num_tokens, width, seed=i, dtype=dtype, device=device)
        for i, width in enumerate(widths)
    ]
    weight = random(sum(widths), 1, taps, seed=4, dtype=torch.float32, device=device)
    sizes = {"full": widths[:2], "per_head": [head_dim] * 2}.get(norm, [])
    gains = [
        random(size, seed=5 + i, dtype=torch.float32, device=device, low=0.5, high=1.5)
        for i, size in enumerate(sizes)
    ]
    segments = random_segments(rows, num_tokens, taps, device) if documents else None
    options = {"residual": residual, "activation": activation, "segments_BN": segments}
    head_share, dim_share = SHARES.get(rope, (1, 1))
    q_turns, k_turns = heads // head_share, kv_heads // head_share
    cos, sin = rope_tables(num_tokens, head_dim // dim_share, 100.0)
    cos, sin = cos.to(device), sin.to(device)

    def run(q: Tensor, k: Tensor, v: Tensor, weight: Tensor, *gains: Tensor) -> Any:
        return fused().canon_qkv_triton(
            q, k, v, weight, head_dim=head_dim, qk_norm=norm, q_gain=gains[0] if gains else None,
            k_gain=gains[1] if gains else None, eps=1e-5, cos_TR=cos if rope else None,
            sin_TR=sin if rope else None, rope_share=head_share, **options,
        )  # fmt: skip

    def exact(q: Tensor, k: Tensor, v: Tensor, weight: Tensor, *gains: Tensor) -> Any:
        if norm == "full":
            q, k = (F.rms_norm(x, g.shape, g, 1e-5) for x, g in zip((q, k), gains, strict=True))
        mixed = canon_reference(torch.cat((q, k, v), dim=-1), weight, **options)
        q, k, v = (part.unflatten(-1, (-1, head_dim)) for part in mixed.split(widths, dim=-1))
        if norm == "per_head":
            q, k = (F.rms_norm(x, g.shape, g, 1e-5) for x, g in zip((q, k), gains, strict=True))
        if rope:
            q, k = apply_rope(q, cos, sin, q_turns), apply_rope(k, cos, sin, k_turns)
        return q, k, v

    agree(run, exact, [*parts, weight, *gains], extra)


def check_gate(
    device: str, dtype: torch.dtype, rows: int, num_tokens: int, width: int, taps: int = 4, *,
    act: str = "silu", residual: bool = True, activation: bool = False, documents: bool = False,
    extra: float = 2e-6,
) -> None:  # fmt: skip
    """`canon_gate_triton` and its gradients."""
    gate = random(rows, num_tokens, width, seed=1, dtype=dtype, device=device, low=-2, high=3)
    up = random(rows, num_tokens, width, seed=2, dtype=dtype, device=device)
    weight = random(2 * width, 1, taps, seed=3, dtype=torch.float32, device=device)
    segments = random_segments(rows, num_tokens, taps, device) if documents else None
    options = {"residual": residual, "activation": activation, "segments_BN": segments}

    def run(gate: Tensor, up: Tensor, weight: Tensor) -> Tensor:
        return fused().canon_gate_triton(gate, up, weight, relu2=act == "relu2", **options)

    def exact(gate: Tensor, up: Tensor, weight: Tensor) -> Tensor:
        gate, up = canon_reference(torch.cat((gate, up), -1), weight, **options).chunk(2, -1)
        return (F.relu(gate).square() if act == "relu2" else F.silu(gate)) * up

    agree(run, exact, [gate, up, weight], extra)


def _cases() -> dict[str, Callable[[], None]]:
    """Every check of the interpreter by its name."""
    from tests import triton_properties as properties
    from tests import triton_systems as systems

    cpu, fp32, bf16, fp16 = "cpu", torch.float32, torch.bfloat16, torch.float16
    yes: Any = {"activation": True}
    no: Any = {"residual": False}
    docs: Any = {"documents": True}
    norm: Any = {"norm": True}
    return {
        **{f"canon T={t}": _case(check_canon, cpu, fp32, 2, t, 7) for t in (1, 2, 3, 5)},
        "canon 17 tokens, C 40": _case(check_canon, cpu, fp32, 2, 17, 40),
        "canon bf16 over a block": _case(check_canon, cpu, bf16, 1, 130, 8),
        "canon k2 no residual": _case(check_canon, cpu, fp32, 2, 17, 9, 2, **no),
        "canon k3 documents fp16": _case(check_canon, cpu, fp16, 2, 18, 9, 3, **docs),
        "canon act documents": _case(check_canon, cpu, fp32, 2, 18, 9, **yes, **docs),
        "canon act bf16 weight": _case(
            check_canon, cpu, bf16, 1, 5, 9, **yes, **no, weight_dtype=bf16
        ),
        **{f"norm T={t}": _case(check_canon, cpu, fp32, 2, t, 7, **norm) for t in (1, 2, 3)},
        "norm over a block": _case(check_canon, cpu, fp32, 1, 35, 40, **norm),
        "norm bf16 documents": _case(check_canon, cpu, bf16, 2, 18, 33, **norm, **docs),
        "norm k2 no residual": _case(check_canon, cpu, fp32, 1, 17, 12, 2, **norm, **no),
        "norm act": _case(check_canon, cpu, fp32, 2, 17, 12, **norm, **yes),
        "norm k3 act no residual documents": _case(
            check_canon, cpu, fp32, 2, 17, 12, 3, **norm, **yes, **no, **docs
        ),
        "qkv plain gqa": _case(check_qkv, cpu, fp32, 2, 5, 4, 2, 6, **docs),
        "qkv rope bf16": _case(check_qkv, cpu, bf16, 1, 17, 2, 1, 8, rope="rope"),
        "qkv full rope a": _case(check_qkv, cpu, fp32, 1, 17, 4, 2, 4, norm="full", rope="a"),
        "qkv full act documents rope c": _case(
            check_qkv, cpu, fp32, 2, 5, 3, 1, 8, norm="full", rope="c", **yes, **docs
        ),
        "qkv full k2 no residual": _case(check_qkv, cpu, fp32, 1, 3, 2, 1, 5, 2, norm="full", **no),
        "qkv per head rope b documents": _case(
            check_qkv, cpu, fp32, 1, 17, 8, 4, 8, norm="per_head", rope="b", **docs
        ),
        "qkv per head act k3 rope c": _case(
            check_qkv, cpu, bf16, 2, 5, 2, 2, 8, 3, norm="per_head", rope="c", **yes
        ),
        "qkv per head, odd head dim": _case(
            check_qkv, cpu, fp32, 1, 18, 3, 1, 5, norm="per_head", **no
        ),
        **{f"gate T={t}": _case(check_gate, cpu, fp32, 2, t, 7) for t in (1, 2, 3)},
        "gate over a block": _case(check_gate, cpu, fp32, 1, 35, 40),
        "gate bf16 relu2 documents": _case(check_gate, cpu, bf16, 2, 5, 9, act="relu2", **docs),
        "gate act k3": _case(check_gate, cpu, fp32, 1, 17, 9, 3, **yes),
        "gate act no residual k2 relu2": _case(
            check_gate, cpu, fp32, 1, 5, 9, 2, **yes, **no, **docs, act="relu2"
        ),
        **properties.CASES,
        **systems.CASES,
        **systems.CPU_CASES,
    }


def _case(check: Callable[..., None], *args: Any, **options: Any) -> Callable[[], None]:
    return lambda: check(*args, **options)


CASES = _cases()


def quicken_interpreter() -> None:
    """Let the interpreter replace triton.language's functions once a kernel, not once a call.

    It does so again for every function that a kernel calls, which takes two thirds of the time.
    And let it take a length from a tensor, which Triton 3.6 can't with numpy 2.4.
    """
    interpreter = importlib.import_module("triton.runtime.interpreter")
    tensor = importlib.import_module("triton.language").tensor
    patch, run = interpreter._patch_lang, interpreter.GridExecutor.__call__
    done: set[int] = set()

    def patch_once(function: Any) -> Any:
        if id(function.__globals__) not in done:
            done.add(id(function.__globals__))
            scope = patch(function)
            tensor.__index__ = lambda self: int(self.handle.data.item())
            return scope
        return None

    def run_kernel(self: Any, *args: Any, **kwargs: Any) -> Any:
        done.clear()
        return run(self, *args, **kwargs)

    interpreter._patch_lang, interpreter.GridExecutor.__call__ = patch_once, run_kernel


def main() -> None:
    """Run all cases (or those named) and write {name: [error or "", seconds]} to argv[1]."""
    torch.set_num_threads(1)
    quicken_interpreter()
    results = {}
    with small_blocks():
        for name in sys.argv[2:] or CASES:
            start, error = time.monotonic(), ""
            try:
                CASES[name]()
            except Exception:
                error = traceback.format_exc()
            results[name] = (error, time.monotonic() - start)
    Path(sys.argv[1]).write_text(json.dumps(results))


if __name__ == "__main__":
    main()
