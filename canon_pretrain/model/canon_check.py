"""Check a Canon backend on this machine: values and gradients against the formula in float64.

A case is Canon at one site with its neighbors, built from the model's own modules: the norm before
A and C, the rotation after B, the activation after D. `bench canon` times the same cases.

Shapes: B batch, T tokens, C channels, N = K - 1 + T.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from canon_pretrain.kernels.backends import TRITON_TAPS, backend_problem, check_canon_backend
from canon_pretrain.kernels.compiled import Segments
from canon_pretrain.kernels.decode_step import Parts
from canon_pretrain.model.args import ModelArgs
from canon_pretrain.model.attend import Attend
from canon_pretrain.model.attention import Attention, Rope
from canon_pretrain.model.cache import document_numbers, window_segments
from canon_pretrain.model.canon import Canon, CanonGate, CanonOfParts, norm_canon, per_reader
from canon_pretrain.model.transformer import MIXERS, make_norm

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2**-4, torch.float16: 2**-7}
"""Several roundings: unfused backends round between norm, Canon and activation."""
MAX_TOKENS = 1 << 15
"""Checked per micro-batch: 1.3 GB per activation of 1b3's feed-forward in float64."""
HEAD_TOKENS = 8
Run = Callable[..., Parts]


class CanonMismatch(Exception):
    """A kernel's results differ from the formula's; the message says which and by how much."""


class Case(NamedTuple):
    """A module of activations [B, T, C]; `moved`: the least elements per token and direction."""

    name: str
    widths: tuple[int, ...]
    moved: tuple[int, int]
    build: Callable[[str], nn.Module]


def bench_cases(args: ModelArgs) -> list[Case]:
    """Return each site of a gated model alone and with its neighbors."""
    args = dataclasses.replace(args, canon_set="ABCD")
    qkv, ffn = args.qkv_dims, (args.ffn_dim, args.ffn_dim)
    found = [_canon("A, C", "A", (args.dim,), args), _canon("B", "B", qkv, args)]
    found += [_canon("D", "D", ffn, args), _norm("norm + A, C", args, "A")]
    return [*found, *([_heads(args)] if args.rope_dim else []), _gate(args)]


def training_cases(args: ModelArgs) -> list[Case]:
    """Return the cases of a training step of `args`."""
    gated = args.ffn == "gated"
    readers = MIXERS[args.mixer].readers
    every = {
        "A": lambda: _norm("norm + A", args, "A", readers=readers),
        "C": lambda: _norm("norm + C", args, "C", adds=True, readers=2 if gated else 1),
        "B": lambda: _heads(args),
        "D": lambda: _gate(args) if gated else _canon("D", "D", (args.ffn_dim,), args),
    }
    return [make() for site, make in every.items() if site in args.canon_set]


def _canon(name: str, site: str, widths: tuple[int, ...], args: ModelArgs) -> Case:
    moved = (2 * sum(widths), 3 * sum(widths))
    return Case(name, widths, moved, lambda backend: _Parts(CanonOfParts(args, site, backend)))


def _norm(name: str, args: ModelArgs, site: str, adds: bool = False, readers: int = 1) -> Case:
    # forward reads both and writes both; backward reads their gradients and h, and writes dh
    moved, widths = (4 * args.dim, 4 * args.dim), (args.dim, args.dim)
    return Case(name, widths, moved, lambda backend: _Norm(args, site, backend, adds, readers))


def _heads(args: ModelArgs) -> Case:
    moved = (2 * sum(args.qkv_dims), 3 * sum(args.qkv_dims))
    name = "B + rotation" if args.rope_dim else "B + heads"
    return Case(name, args.qkv_dims, moved, lambda backend: _Heads(args, backend))


def _gate(args: ModelArgs) -> Case:
    moved, widths = (3 * args.ffn_dim, 5 * args.ffn_dim), (args.ffn_dim, args.ffn_dim)
    return Case("D + activation", widths, moved, lambda name: _Parts(CanonGate(args, "D", name)))


class _Parts(nn.Module):
    def __init__(self, canon: CanonOfParts) -> None:
        super().__init__()
        self.canon = canon

    def forward(self, *parts: Tensor, segments_BN: Tensor | None = None) -> tuple[Tensor, ...]:
        mixed: Tensor | tuple[Tensor, ...] = self.canon(parts, segments_BN)
        return mixed if isinstance(mixed, tuple) else (mixed,)


class _Norm(nn.Module):
    def __init__(self, args: ModelArgs, site: str, backend: str, adds: bool, readers: int) -> None:
        super().__init__()
        self.norm = make_norm(args)
        self.canon = Canon(args, site, backend)
        self.adds, self.readers = adds, readers

    def forward(
        self, h_BTD: Tensor, added_BTD: Tensor, segments_BN: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        # the residual stream continues, and its gradient meets the norm's
        added = added_BTD if self.adds else None
        h_BTD, x_BTD = norm_canon(
            self.norm, self.canon, h_BTD, added, segments_BN, readers=self.readers
        )
        h_BTD = h_BTD if self.adds else h_BTD + added_BTD
        return h_BTD, *per_reader(x_BTD, self.readers)


class _Heads(Attention):
    """The part of attention between its projections and its softmax."""

    def __init__(self, args: ModelArgs, backend: str) -> None:
        super().__init__(args, Rope(args) if args.rope_dim else None, Attend(args), backend)
        del self.wq, self.wk, self.wv, self.wo

    def forward(  # type: ignore[override]
        self, q: Tensor, k: Tensor, v: Tensor, segments_BN: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        return self.heads(q, k, v, segments_BN, None)


def training_problem(
    args: ModelArgs, backend: str, shape: tuple[int, int], dtype: torch.dtype, device: torch.device
) -> str | None:
    """Return why a training step with micro-batches of `shape` must not use `backend`, or None."""
    if problem := backend_problem(backend, device.type, dtype):
        return problem
    # the backend would silently fall back to `compiled`
    if args.canon_filter == "dynamic":
        return 'it has static filters only, but model.canon_filter = "dynamic"'
    if backend == "triton" and args.canon_kernel > TRITON_TAPS:
        return f"it supports {TRITON_TAPS} taps, but model.canon_kernel = {args.canon_kernel}"
    if backend == "fla" and args.document_mask:
        return "it has no document mask, but model.document_mask = true"
    shape = (max(1, min(shape[0], MAX_TOKENS // shape[1])), shape[1])
    forked = [device] if device.type == "cuda" else []
    for case in training_cases(args):
        try:
            with torch.random.fork_rng(forked):
                torch.manual_seed(0)
                module = make_module(case, backend, dtype, device)
                inputs = make_inputs(case, shape, dtype, device)
                segments_BN = None
                if args.document_mask:  # short documents, as the model numbers them
                    numbers_BT = document_numbers(torch.randint(4, shape, device=device), 0)
                    segments_BN = window_segments(numbers_BT, shape[1], args.canon_kernel - 1)
                compare(case, module, module, inputs, segments_BN)
        except CanonMismatch as error:
            return f"{case.name}: {error}"
        except Exception as error:  # of Triton, its compiler, the driver
            first = next(iter(str(error).strip().splitlines()), "")
            return f"{case.name}: {type(error).__name__}: {first}"
    return None


def make_module(case: Case, backend: str, dtype: torch.dtype, device: torch.device) -> nn.Module:
    """Return the case's module with gains other than 1; raise UserError if it can't run here."""
    check_canon_backend(backend, device.type)
    with device:
        module = case.build(backend).to(device, dtype)
    for parameter in module.parameters():
        if parameter.ndim == 1:
            nn.init.uniform_(parameter, 0.5, 1.5)
    return module


def make_inputs(
    case: Case, shape: tuple[int, int], dtype: torch.dtype, device: torch.device
) -> list[Tensor]:
    """Return random activations that require gradients."""
    drawn = [torch.randn(*shape, width, device=device) for width in case.widths]
    return [x.to(dtype).requires_grad_() for x in drawn]


def compare(
    case: Case, module: nn.Module, run: Run, inputs: Sequence[Tensor], segments_BN: Segments = None
) -> float:
    """Return the largest error of `run` against float64. Raises CanonMismatch."""
    weights = {name: p for name, p in module.named_parameters() if p.requires_grad}
    options: dict[str, Any] = {} if segments_BN is None else {"segments_BN": segments_BN}
    outputs = run(*inputs, **options)
    grads = [torch.randn_like(y) / 16 for y in outputs]
    for grad in grads:
        # amplify a row's first tokens: otherwise errors there vanish in the weight gradient
        grad[:, :HEAD_TOKENS] *= 16
    wanted = [*inputs, *weights.values()]
    found = torch.autograd.grad(outputs, wanted, grads, allow_unused=True)
    names = [f"gradient of input {i}" for i in range(len(inputs))]

    with inputs[0].device:
        exact = case.build("reference").to(inputs[0].device, torch.float64)
    exact.load_state_dict(module.state_dict())
    exact_weights = [p for p in exact.parameters() if p.requires_grad]
    sums = [torch.zeros_like(p) for p in exact_weights]
    tolerance, errors = TOLERANCE[inputs[0].dtype], [0.0]
    # row by row: a whole micro-batch in float64 needs much memory
    for i in range(inputs[0].shape[0]):
        row = slice(i, i + 1)
        own_options = {} if segments_BN is None else {"segments_BN": segments_BN[row]}
        own_inputs = [x[row].detach().double().requires_grad_() for x in inputs]
        truth, own_grads = exact(*own_inputs, **own_options), [g[row].double() for g in grads]
        truth_grads = torch.autograd.grad(truth, [*own_inputs, *exact_weights], own_grads)
        for j, (y, true) in enumerate(zip(outputs, truth, strict=True)):
            errors.append(_error(f"output {j}", y, true, tolerance, row))
        for name, own, true in zip(names, found, truth_grads, strict=False):
            errors.append(_error(name, own, true, tolerance, row))
        for total, true in zip(sums, truth_grads[len(inputs) :], strict=True):
            total += true
    for name, own, total in zip(weights, found[len(inputs) :], sums, strict=True):
        errors.append(_error(f"gradient of {name}", own, total, tolerance))
    return max(errors)


def _error(
    name: str, own: Tensor | None, true: Tensor, tolerance: float, row: slice | None = None
) -> float:
    """Return the largest relative error; `row`: of activations, which are scaled per token."""
    if own is None:
        raise CanonMismatch(f"there is no {name}")
    dims = [0] if row is None else list(range(2, true.ndim))
    size = true.square().mean(dims, keepdim=True).sqrt() + 1e-3 * true.abs().max()
    own = own if row is None else own[row]
    error = ((own.double() - true).abs() / (true.abs() + size).clamp(min=1e-30)).max().item()
    if not error <= tolerance:  # NaN too
        raise CanonMismatch(f"{name} is {error:.2g} away from float64, expected {tolerance:.2g}")
    return error
