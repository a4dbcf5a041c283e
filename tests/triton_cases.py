"""The checks of `kernels/triton/` against the plain parts of the model, on any device.

`kernels/test_triton.py` runs `CASES` in one process with Triton's interpreter (as
`python -m tests.triton_cases OUT.json`), `kernels/test_triton_gpu.py` the same functions on a GPU.
Nothing here imports triton before a case runs: TRITON_INTERPRET is read when it is imported.
"""

import functools
import importlib
import json
import sys
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from canon_pretrain.kernels.backends import canon_reference
from canon_pretrain.model.attention import apply_rope, rope_tables
from tests.variants import build, random_tokens, variant

DEVICE = "cpu"
FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
# one rounding to the dtype at the end of sums in float32: half a unit in the last place
ROUNDING = {FP32: 2.0**-24, BF16: 2.0**-8, FP16: 2.0**-11}
SHARES = {"rope": (1, 1), "a": (2, 2), "b": (4, 1), "c": (1, 4)}
PLAIN: dict[str, Any] = {"residual": True, "activation": False}


def fused() -> Any:
    return importlib.import_module("canon_pretrain.kernels.triton.fused")


def norm_canon(h: Tensor, gain: Tensor, weight: Tensor, **options: Any) -> Any:
    return fused().canon_triton(h, weight, gain=gain, norm="full", eps=1e-5, **options)


def small_blocks(block: int = 32, run: int = 16) -> AbstractContextManager[None]:
    blocks = importlib.import_module("canon_pretrain.kernels.triton.blocks")
    made: AbstractContextManager[None] = mock.patch.multiple(blocks, _BLOCK=block, _MAX_RUN=run)
    return made


def random(
    *shape: int, seed: int, dtype: torch.dtype = FP32, low: float = -1.0, high: float = 1.0
) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.empty(shape).uniform_(low, high, generator=generator)
    return x.to(DEVICE, dtype).requires_grad_()


def random_segments(rows: int, num_tokens: int, taps: int) -> Tensor:
    """int32 [rows, taps - 1 + T] of short documents that begin inside the row and before it."""
    generator = torch.Generator().manual_seed(9)
    ends = torch.rand(rows, taps - 1 + num_tokens, generator=generator) < 1 / 4
    return ends.cumsum(1).to(DEVICE, torch.int32)


def agree(
    run: Callable[..., Any], exact: Callable[..., Any], inputs: list[Tensor], extra: float = 2e-6
) -> None:
    """Outputs and all gradients of `run` are those of `exact` in float64, rounded once."""
    y = _tuple(run(*inputs))
    dy = [random(*part.shape, seed=i + 70, dtype=part.dtype).detach() for i, part in enumerate(y)]
    got = (*y, *torch.autograd.grad(y, inputs, dy))
    doubles = [x.detach().double().requires_grad_() for x in inputs]
    y64 = _tuple(exact(*doubles))
    want = (*y64, *torch.autograd.grad(y64, doubles, [part.double() for part in dy]))
    for i, (ours, truth) in enumerate(zip(got, want, strict=True)):
        assert ours.shape == truth.shape, (i, ours.shape, truth.shape)
        assert ours.dtype == (*y, *inputs)[i].dtype
        unit = 1.001 * ROUNDING[ours.dtype]
        if DEVICE == "cpu" and ours.dtype == BF16:
            unit *= 2  # Triton's interpreter (3.6 to 3.9) cuts a bfloat16 off
        bound = unit * truth.abs() + extra * truth.abs().max() + 1e-30
        excess = ((ours.double() - truth).abs() / bound).max().item()
        assert excess <= 1, f"value {i} of shape {tuple(ours.shape)} is off by {excess:.3g} bounds"


def _tuple(y: Any) -> tuple[Tensor, ...]:
    return y if isinstance(y, tuple) else (y,)


def _options(rows: int, num_tokens: int, taps: int, kind: dict[str, bool]) -> dict[str, Any]:
    documents = kind.pop("documents", False)
    segments = random_segments(rows, num_tokens, taps) if documents else None
    return PLAIN | kind | {"segments_BN": segments}


def rms_norm(x: Tensor, gain: Tensor) -> Tensor:
    return F.rms_norm(x, gain.shape, gain, 1e-5)


def check_canon(
    dtype: torch.dtype, rows: int, num_tokens: int, width: int, taps: int = 4, *,
    norm: bool = False, weight_dtype: torch.dtype = FP32, extra: float = 2e-6, **kind: bool,
) -> None:  # fmt: skip
    inputs = [random(rows, num_tokens, width, seed=1, dtype=dtype, low=-2, high=3)]
    inputs.append(random(width, 1, taps, seed=2, dtype=weight_dtype))
    if norm:
        inputs.append(random(width, seed=3, dtype=weight_dtype, low=0.5, high=1.5))
    options = _options(rows, num_tokens, taps, kind)

    def run(x: Tensor, weight: Tensor, *gain: Tensor) -> Any:
        if gain:
            return norm_canon(x, gain[0], weight, **options)
        return fused().canon_triton(x, weight, **options)

    def exact(x: Tensor, weight: Tensor, *gain: Tensor) -> Tensor:
        return canon_reference(rms_norm(x, *gain) if gain else x, weight, **options)

    agree(run, exact, inputs, extra)


def check_qkv(
    dtype: torch.dtype, rows: int, num_tokens: int, heads: int, kv_heads: int, head_dim: int,
    taps: int = 4, *, norm: str = "none", rope: str = "", extra: float = 2e-6, **kind: bool,
) -> None:  # fmt: skip
    widths = [heads * head_dim, kv_heads * head_dim, kv_heads * head_dim]
    inputs = [random(rows, num_tokens, n, seed=i, dtype=dtype) for i, n in enumerate(widths)]
    inputs.append(random(sum(widths), 1, taps, seed=4))
    sizes = {"full": widths[:2], "per_head": [head_dim] * 2}.get(norm, [])
    inputs += [random(size, seed=5 + i, low=0.5, high=1.5) for i, size in enumerate(sizes)]
    options = _options(rows, num_tokens, taps, kind)
    head_share, dim_share = SHARES.get(rope, (1, 1))
    tables = rope_tables(num_tokens, head_dim // dim_share, 100.0)
    cos, sin = (table.to(DEVICE) for table in tables) if rope else (None, None)

    def run(q: Tensor, k: Tensor, v: Tensor, weight: Tensor, *gains: Tensor) -> Any:
        names = dict(zip(("q_gain", "k_gain"), gains, strict=False))
        return fused().canon_qkv_triton(
            q, k, v, weight, head_dim=head_dim, qk_norm=norm, eps=1e-5, cos_TR=cos, sin_TR=sin,
            rope_share=head_share, **names, **options,
        )  # fmt: skip

    def exact(q: Tensor, k: Tensor, v: Tensor, weight: Tensor, *gains: Tensor) -> Any:
        if norm == "full":
            q, k = (rms_norm(*pair) for pair in zip((q, k), gains, strict=True))
        mixed = canon_reference(torch.cat((q, k, v), dim=-1), weight, **options)
        q, k, v = (part.unflatten(-1, (-1, head_dim)) for part in mixed.split(widths, dim=-1))
        if norm == "per_head":
            q, k = (rms_norm(*pair) for pair in zip((q, k), gains, strict=True))
        if cos is not None and sin is not None:
            q, k = (apply_rope(x, cos, sin, x.shape[2] // head_share) for x in (q, k))
        return q, k, v

    agree(run, exact, inputs, extra)


def check_gate(
    dtype: torch.dtype, rows: int, num_tokens: int, width: int, taps: int = 4, *,
    relu2: bool = False, extra: float = 2e-6, **kind: bool,
) -> None:  # fmt: skip
    gate = random(rows, num_tokens, width, seed=1, dtype=dtype, low=-2, high=3)
    up = random(rows, num_tokens, width, seed=2, dtype=dtype)
    options = _options(rows, num_tokens, taps, kind)

    def exact(gate: Tensor, up: Tensor, weight: Tensor) -> Tensor:
        gate, up = canon_reference(torch.cat((gate, up), -1), weight, **options).chunk(2, -1)
        return (F.relu(gate).square() if relu2 else F.silu(gate)) * up

    run = functools.partial(fused().canon_gate_triton, relu2=relu2, **options)
    agree(run, exact, [gate, up, random(2 * width, 1, taps, seed=3)], extra)


# -- what holds whatever the numbers ------------------------------------------------------------


def all_sites() -> Callable[..., Tensor]:
    return functools.partial(_sites, fused())


def _sites(
    fused: Any, h: Tensor, gain: Tensor, weights: Tensor, cos: Tensor, sin: Tensor
) -> Tensor:
    h, x, *xs = fused.norm_canon_stream_triton(
        h, gain, weights, eps=1e-5, added_BTD=h.sin(), readers=3, **PLAIN
    )
    q, k, v = fused.canon_qkv_triton(
        x, xs[0][..., :4], xs[1][..., 4:], torch.cat((weights,) * 2), head_dim=4, eps=1e-5,
        qk_norm="per_head", q_gain=gain[:4], k_gain=gain[4:], cos_TR=cos, sin_TR=sin, **PLAIN,
    )  # fmt: skip
    up = fused.canon_triton((q.flatten(2) * torch.cat((k, v), 2).flatten(2)), weights, **PLAIN)
    both = torch.cat((weights, weights))
    inner: Tensor = fused.canon_gate_triton(x, up, both, relu2=False, **PLAIN)
    return h + inner


def sites_inputs() -> list[Tensor]:
    inputs = [random(1, 3, 8, seed=1), random(8, seed=2), random(8, 1, 4, seed=3)]
    return [*inputs, *(table.to(DEVICE) for table in rope_tables(3, 4, 100.0))]


def gradients(function: Callable[..., Tensor], inputs: list[Tensor]) -> tuple[Tensor, ...]:
    y = function(*inputs)
    dy = random(*y.shape, seed=5).detach().to(y.dtype)
    return y.detach(), *torch.autograd.grad(y, inputs[:3], dy)


def assert_equal(got: tuple[Tensor, ...], want: tuple[Tensor, ...]) -> None:
    for ours, theirs in zip(got, want, strict=True):
        assert torch.equal(ours, theirs)


def additions_beside_the_norm_are_the_streams() -> None:
    _check_additions(8, 37, activation=False)
    _check_additions(2050, 4, activation=True)  # too wide for three gradients in one kernel
    _check_additions(2050, 4, activation=False)


def _check_additions(width: int, num_tokens: int, *, activation: bool) -> None:
    inputs = [random(2, num_tokens, width, seed=1), random(width, seed=2)]
    inputs.append(random(width, 1, 4, seed=3))
    segments = torch.arange(3 + num_tokens, device=DEVICE, dtype=torch.int32) // 5
    options = {"residual": True, "activation": activation, "segments_BN": segments.expand(2, -1)}
    scales = [random(num_tokens, width, seed=i).detach() for i in (4, 5, 6)]

    def together(h: Tensor, ys: list[Tensor]) -> Tensor:
        a, b, c = (y * scale.to(h.dtype) for y, scale in zip(ys, scales, strict=True))
        return h.cos() + a + b + c

    def run(h: Tensor, gain: Tensor, weight: Tensor) -> Tensor:
        h, *ys = fused().norm_canon_stream_triton(
            h, gain, weight, eps=1e-5, added_BTD=h.sin(), readers=3, **options
        )
        return together(h, ys)

    def apart(h: Tensor, gain: Tensor, weight: Tensor) -> Tensor:
        h = h + h.sin()
        return together(h, [norm_canon(h, gain, weight, **options)] * 3)

    def exact(h: Tensor, gain: Tensor, weight: Tensor) -> Tensor:
        h = h + h.sin()
        return together(h, [canon_reference(rms_norm(h, gain), weight, **options)] * 3)

    doubles = [x.detach().double().requires_grad_() for x in inputs]
    for ours, truth in zip(gradients(run, inputs), gradients(exact, doubles), strict=True):
        torch.testing.assert_close(ours.double(), truth, rtol=1e-5, atol=1e-5)
    halves = [x.detach().bfloat16().requires_grad_() for x in inputs]
    # the interpreter cuts a bfloat16 off
    for given in (inputs,) if DEVICE == "cpu" else (inputs, halves):
        assert torch.equal(gradients(run, given)[0], gradients(apart, given)[0])


def what_needs_no_gradient_gets_none() -> None:
    x, weight = random(1, 5, 8, seed=1), random(8, 1, 4, seed=2)
    empty = x[:0].detach().requires_grad_()
    dx, dweight = torch.autograd.grad(
        fused().canon_triton(empty, weight, **PLAIN).sum(), (empty, weight)
    )
    assert dx.shape == empty.shape and not dweight.any()
    dy = random(1, 5, 8, seed=5).detach()
    want = torch.autograd.grad(fused().canon_triton(x, weight, **PLAIN), (x, weight), dy)
    for inputs, index in (((x, weight.detach()), 0), ((x.detach(), weight), 1)):
        y = fused().canon_triton(*inputs, **PLAIN)
        (gradient,) = torch.autograd.grad(y, [inputs[index]], dy)
        assert torch.equal(gradient, want[index])


def any_strides_are_taken() -> None:
    inputs = [random(8, 5, 2, seed=1).transpose(0, 2), random(16, seed=3)[::2]]
    inputs.append(random(8, 1, 5, seed=2)[..., 1:])
    dy = torch.ones(1, 1, 8, device=DEVICE).expand(2, 5, 8)
    copies = [x.detach().clone(memory_format=torch.contiguous_format) for x in inputs]
    results = []
    for each, gradient in ((inputs, dy), ([x.requires_grad_() for x in copies], dy.contiguous())):
        y = norm_canon(*each, residual=True, activation=True)
        results.append((y, *torch.autograd.grad(y, each, gradient)))
    assert_equal(*results)


def nothing_leaks_out_of_a_document() -> None:
    """NaN and inf in one document leave the values and gradients of the others as they are."""
    segments = torch.tensor([[-2, -2, -2, 0, 0, 0, 1, 1, 2, 2]], dtype=torch.int32, device=DEVICE)
    clean = random(1, 7, 8, seed=1).detach()
    dirty = clean.clone()
    dirty[:, 3], dirty[:, 4] = torch.nan, torch.inf
    gain, weight, weights = random(8, seed=2), random(8, 1, 4, seed=3), random(16, 1, 4, seed=4)
    options = {"residual": True, "activation": True, "segments_BN": segments}
    functions = (
        lambda x: fused().canon_triton(x, weight, **options),
        lambda x: norm_canon(x, gain, weight, **options),
        lambda x: fused().canon_gate_triton(x, x, weights, relu2=False, **options),
    )
    others = [0, 1, 2, 5, 6]
    for function in functions:
        values = []
        for x in (clean, dirty):
            x = x.clone().requires_grad_()
            with numpy.errstate(invalid="ignore"):  # the interpreter's
                y = function(x)
                (dx,) = torch.autograd.grad(y.sum(), x)
            values.append((y[:, others], dx[:, others]))
        assert values[1][0].isfinite().all() and not y.isfinite().all()
        assert_equal(*values)


def too_wide_a_row_takes_the_norm_of_pytorch() -> None:
    inputs, options = sites_inputs()[:3], {"eps": 1e-5, **PLAIN}

    def stream(h: Tensor, gain: Tensor, weight: Tensor) -> Tensor:
        h, y = fused().norm_canon_stream_triton(h, gain, weight, **options)
        return h * y

    def heads(h: Tensor, gain: Tensor, weight: Tensor) -> Tensor:
        gains = {"q_gain": gain, "k_gain": gain, "qk_norm": "full", "head_dim": 4}
        weights = torch.cat((weight,) * 3)
        q, k, v = fused().canon_qkv_triton(h, h, h, weights, **gains, **options)
        return q * k * v

    for function in (stream, heads):
        want = gradients(function, inputs)
        with mock.patch.object(fused(), "MAX_ROW", 4):
            got = gradients(function, inputs)
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


# -- what PyTorch does to them ------------------------------------------------------------------


def one_graph_under_compile() -> None:
    inputs = sites_inputs()
    compiled = torch.compile(all_sites(), fullgraph=True, backend="aot_eager")
    assert_equal(gradients(compiled, inputs), gradients(all_sites(), inputs))


def activation_checkpointing_keeps_the_bits() -> None:
    inputs = sites_inputs()
    want = gradients(all_sites(), inputs)

    def policy(_: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        kept = "canon" in str(op)
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    selective = {"context_fn": lambda: create_selective_checkpoint_contexts(policy)}
    for options in ({}, selective):
        run = functools.partial(checkpoint, all_sites(), use_reentrant=False, **options)
        assert_equal(gradients(run, inputs), want)


MODELS = (
    "partial_rope_b ABCD cst qk_per_head gqa",
    "partial_rope_b BD k3 no_res act standard qk_per_head gqa documents",
    "partial_rope_a ABCD k2 no_res act cst relu2",
)


def a_model_is_the_references(name: str) -> None:
    args = variant(name)
    models = [build(args, canon_backend=backend) for backend in ("reference", "triton")]
    tokens = random_tokens(args, rows=2, num_tokens=11)
    results = [model(tokens) for model in models]
    weights = torch.randn(results[0].shape, generator=torch.Generator().manual_seed(1))
    for logits in results:
        (logits * weights).sum().backward()
    pairs = zip(*([p.grad for p in model.parameters()] for model in models), strict=True)
    for one, other in (results, *pairs):
        assert one is None or (one - other).abs().max() < 1e-4 * one.abs().max()


PROPERTIES: dict[str, Callable[[], None]] = {
    function.__name__.replace("_", " "): function
    for function in (
        additions_beside_the_norm_are_the_streams,
        what_needs_no_gradient_gets_none,
        any_strides_are_taken,
        nothing_leaks_out_of_a_document,
        too_wide_a_row_takes_the_norm_of_pytorch,
        one_graph_under_compile,
        activation_checkpointing_keeps_the_bits,
    )
}


def _cases() -> dict[str, Callable[[], None]]:
    yes: Any = {"activation": True}
    no: Any = {"residual": False}
    docs: Any = {"documents": True}
    norm: Any = {"norm": True}
    relu2: Any = {"relu2": True}
    shapes: list[tuple[Any, ...]] = [
        *((check_canon, (FP32, 2, t, 40), {}) for t in (1, 3, 17)),
        (check_canon, (BF16, 1, 130, 8), {}),
        (check_canon, (FP32, 2, 17, 9, 2), no),
        (check_canon, (FP16, 2, 18, 9, 3), docs),
        (check_canon, (FP32, 2, 18, 9), yes | docs),
        (check_canon, (BF16, 1, 5, 9), yes | no | {"weight_dtype": BF16}),
        *((check_canon, (FP32, 1, t, 40), norm) for t in (1, 3, 35)),
        (check_canon, (BF16, 2, 18, 33), norm | docs),
        (check_canon, (FP32, 2, 17, 12, 3), norm | yes | no | docs),
        (check_qkv, (FP32, 2, 5, 4, 2, 6), docs),
        (check_qkv, (BF16, 1, 17, 2, 1, 8), {"rope": "rope"}),
        (check_qkv, (FP32, 2, 5, 3, 1, 8), {"norm": "full", "rope": "c"} | yes | docs),
        (check_qkv, (FP32, 1, 17, 4, 2, 4), {"norm": "full", "rope": "a"}),
        (check_qkv, (FP32, 1, 17, 8, 4, 8), {"norm": "per_head", "rope": "b"} | docs),
        (check_qkv, (BF16, 2, 5, 2, 2, 8, 3), {"norm": "per_head", "rope": "c"} | yes),
        (check_qkv, (FP32, 1, 18, 3, 1, 5), {"norm": "per_head"} | no),
        *((check_gate, (FP32, 1, t, 40), {}) for t in (1, 3, 35)),
        (check_gate, (BF16, 2, 5, 9), relu2 | docs),
        (check_gate, (FP32, 1, 17, 9, 3), yes),
        (check_gate, (FP32, 1, 5, 9, 2), yes | no | docs | relu2),
    ]
    return {
        **{
            f"{check.__name__} {shape} {options}": functools.partial(check, *shape, **options)
            for check, shape, options in shapes
        },
        **PROPERTIES,
        **{f"model {name}": functools.partial(a_model_is_the_references, name) for name in MODELS},
    }


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
    """Run all cases (or those named) and write {name: error or ""} to argv[1]."""
    torch.set_num_threads(1)
    quicken_interpreter()
    results = {}
    with small_blocks():
        for name in sys.argv[2:] or CASES:
            try:
                CASES[name]()
                results[name] = ""
            except Exception:
                results[name] = traceback.format_exc()
    Path(sys.argv[1]).write_text(json.dumps(results))


if __name__ == "__main__":
    main()
