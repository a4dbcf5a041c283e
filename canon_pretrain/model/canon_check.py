"""Check a Canon backend on this machine: values and gradients against the formula in float64.

A case is Canon at one site with its neighbors, built from the model's own modules: the norm before
A and C if there is one, the rotation after B, the activation after D. `bench canon` times the same
cases.

Shapes: B batch, T tokens, C channels, N = K - 1 + T.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from canon_pretrain.kernels.backends import TRITON_TAPS, backend_problem, check_canon_backend
from canon_pretrain.kernels.compiled import Segments
from canon_pretrain.kernels.decode_step import Parts
from canon_pretrain.model.args import ModelArgs
from canon_pretrain.model.attend import Attend
from canon_pretrain.model.attention import Attention, Rope, num_readers
from canon_pretrain.model.cache import Context, document_numbers, window_segments
from canon_pretrain.model.canon import Canon, CanonGate, ShortConv, add_norm_canon, per_reader
from canon_pretrain.model.mixers import mixer_class
from canon_pretrain.model.transformer import make_norm

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2**-4, torch.float16: 2**-7}
"""Several roundings: unfused backends round between norm, Canon and activation."""
MAX_TOKENS = 1 << 15
"""Checked per micro-batch: 1.3 GB per activation of 1b3's feed-forward in float64."""
HEAD_TOKENS = 8  # first tokens of each row, whose output gradients are amplified
HEAD_GAIN = 16
SMALLEST_SCALE = 1e-3  # of an error, over the largest value: where a token's values are small
TOKENS_PER_DOCUMENT = 4
Run = Callable[..., Parts]


class CanonMismatch(Exception):
    """A kernel's results differ from the formula's; the message says which and by how much."""


class Case(NamedTuple):
    """A module of activations [B, T, C], one for each of the `widths` C."""

    name: str
    widths: tuple[int, ...]
    build: Callable[[str], nn.Module]  # (canon backend) -> the module


def training_cases(args: ModelArgs) -> list[Case]:
    """Return the cases of a training step of `args`."""
    is_gated = args.ffn == "gated"
    cases = []
    norms_input = args.norm_place == "input"
    if "A" in args.canon_set and norms_input:
        if args.mixer == "attention":
            readers = num_readers(args)
        else:
            readers = mixer_class(args.mixer).readers
        cases.append(norm_case("norm + A", args, "A", readers=readers))
    if "C" in args.canon_set and norms_input:
        cases.append(norm_case("norm + C", args, "C", readers=2 if is_gated else 1))
    if "B" in args.canon_set and args.mixer == "attention":
        cases.append(heads_case(args))
    elif "B" in args.canon_channels:
        cases.append(canon_case("B", "B", args.mixer_parts, args))
    if args.has_conv_kernel:
        parts = args.mixer_parts
        cases.append(Case("conv1d", parts, lambda backend: _Parts(ShortConv(args, backend))))
    # Alone: q, k or v, the outputs of mixer and feed-forward, and their inputs without a norm.
    for site in "QKVOF" if norms_input else "QKVOFAC":
        if site in args.canon_channels:
            cases.append(canon_case(site, site, (args.canon_channels[site],), args))
    if "D" in args.canon_set and is_gated:
        cases.append(gate_case(args))
    elif "D" in args.canon_set:
        cases.append(canon_case("D", "D", (args.ffn_dim,), args))
    return cases


def canon_case(name: str, site: str, widths: tuple[int, ...], args: ModelArgs) -> Case:
    """Return Canon of a site alone."""
    return Case(name, widths, lambda backend: _Parts(Canon(args, site, backend)))


def norm_case(name: str, args: ModelArgs, site: str, *, readers: int = 1) -> Case:
    """Return Canon of a site after its norm, for C also after the sum before the norm."""
    widths = (args.dim, args.dim)
    return Case(name, widths, lambda backend: _Norm(args, site, backend, readers))


def heads_case(args: ModelArgs) -> Case:
    """Return Canon-B with QK-norm and the rotation."""
    name = "B + rotation" if args.rope_dim else "B + heads"
    return Case(name, args.qkv_dims, lambda backend: _Heads(args, backend))


def gate_case(args: ModelArgs) -> Case:
    """Return Canon-D with the gate and its activation."""
    widths = (args.ffn_dim, args.ffn_dim)
    return Case("D + activation", widths, lambda backend: _Parts(CanonGate(args, "D", backend)))


class _Parts(nn.Module):
    def __init__(self, canon: Canon | ShortConv) -> None:
        super().__init__()
        self.canon = canon

    def forward(self, *parts: Tensor, segments_BN: Segments = None) -> Parts:
        return self.canon(parts, Context(segments_BN=segments_BN))


class _Norm(nn.Module):
    def __init__(self, args: ModelArgs, site: str, backend: str, readers: int) -> None:
        super().__init__()
        self.norm = make_norm(args)
        self.canon = Canon(args, site, backend)
        self.adds = site == "C"
        self.readers = readers

    def forward(self, h_BTD: Tensor, y_BTD: Tensor, segments_BN: Segments = None) -> Parts:
        added_BTD = y_BTD if self.adds else None
        context = Context(segments_BN=segments_BN)
        h_BTD, x_BTD = add_norm_canon(
            h_BTD, added_BTD, self.norm, self.canon, context, readers=self.readers
        )
        # the residual stream continues, and its gradient meets the norm's
        if not self.adds:
            h_BTD = h_BTD + y_BTD
        return h_BTD, *per_reader(x_BTD, self.readers)


class _Heads(nn.Module):
    """The part of attention between its projections and its softmax."""

    def __init__(self, args: ModelArgs, backend: str) -> None:
        super().__init__()
        rope = Rope(args) if args.rope_dim else None
        self.attention = Attention(args, rope, Attend(args), backend)
        del self.attention.wq, self.attention.wk, self.attention.wv, self.attention.wo
        self.attention.wg = None

    def forward(self, q: Tensor, k: Tensor, v: Tensor, segments_BN: Segments = None) -> Parts:
        return self.attention.heads(q, k, v, Context(segments_BN=segments_BN))


def training_problem(
    args: ModelArgs, backend: str, shape: tuple[int, int], dtype: torch.dtype, device: torch.device
) -> str | None:
    """Return why a training step with micro-batches of `shape` must not use `backend`, or None."""
    if problem := backend_problem(backend, device.type, dtype):
        return problem
    for name, kind in args.kinds.items():
        has_kernel = kind.canon_set or kind.has_conv_kernel
        if has_kernel and (problem := _layer_problem(kind, backend, shape, dtype, device)):
            return f"{name}: {problem}" if args.pattern else problem
    return None


def _layer_problem(
    args: ModelArgs, backend: str, shape: tuple[int, int], dtype: torch.dtype, device: torch.device
) -> str | None:
    """Return why a kind of layer must not be trained with `backend`, or None."""
    # Where the backend would silently fall back to `compiled`.
    if any(map(args.is_dynamic_at, args.canon_set)):
        return f'it has static filters only, but model.canon_filter = "{args.canon_filter}"'
    if backend == "triton" and args.canon_kernel > TRITON_TAPS:
        return f"it supports {TRITON_TAPS} taps, but model.canon_kernel = {args.canon_kernel}"
    if backend == "fla" and args.document_mask:
        return "it has no document mask, but model.document_mask = true"

    # Fewer rows than a micro-batch has, if it is large.
    num_rows, num_tokens = shape
    shape = (max(1, min(num_rows, MAX_TOKENS // num_tokens)), num_tokens)
    cuda_devices = [device] if device.type == "cuda" else []
    for case in training_cases(args):
        try:
            # the check must not change what the run draws afterwards
            with torch.random.fork_rng(cuda_devices):
                torch.manual_seed(0)
                module = make_module(case, backend, dtype, device)
                inputs = make_inputs(case, shape, dtype, device)
                segments_BN = None
                if args.document_mask:
                    segments_BN = _short_documents(args, shape, device)
                compare(case, module, module, inputs, segments_BN)
        except CanonMismatch as error:
            return f"{case.name}: {error}"
        except Exception as error:  # of Triton, its compiler, the driver
            first_line = next(iter(str(error).strip().splitlines()), "")
            return f"{case.name}: {type(error).__name__}: {first_line}"
    return None


def _short_documents(args: ModelArgs, shape: tuple[int, int], device: torch.device) -> Tensor:
    """Return segments of random short documents, numbered as the model does."""
    tokens_BT = torch.randint(TOKENS_PER_DOCUMENT, shape, device=device)
    return window_segments(document_numbers(tokens_BT, eos_id=0), shape[1], args.canon_kernel - 1)


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
    return [
        torch.randn(*shape, width, device=device).to(dtype).requires_grad_()
        for width in case.widths
    ]


def compare(
    case: Case, module: nn.Module, run: Run, inputs: Sequence[Tensor], segments_BN: Segments = None
) -> float:
    """Return the largest error of `run` against float64. Raises CanonMismatch.

    `run` is `module`, or a compiled form of it.
    """
    # Forward and backward in the dtype of the inputs, with random gradients of the outputs.
    weights = {name: p for name, p in module.named_parameters() if p.requires_grad}
    outputs = run(*inputs, segments_BN=segments_BN)
    output_grads = [torch.randn_like(y) / HEAD_GAIN for y in outputs]
    for grad in output_grads:
        # amplify a row's first tokens: otherwise errors there vanish in the weight gradient
        grad[:, :HEAD_TOKENS] *= HEAD_GAIN
    grads = torch.autograd.grad(
        outputs, [*inputs, *weights.values()], output_grads, allow_unused=True
    )
    input_names = [f"input {i}" for i in range(len(inputs))]
    for name, grad in zip([*input_names, *weights], grads, strict=True):
        if grad is None:
            raise CanonMismatch(f"there is no gradient of {name}")

    # The same module by the formula in float64.
    device = inputs[0].device
    with device:
        exact = case.build("reference").to(device, torch.float64)
    exact.load_state_dict(module.state_dict())
    exact_weights = [p for p in exact.parameters() if p.requires_grad]
    exact_weight_grads = [torch.zeros_like(p) for p in exact_weights]

    # Compare row by row: a whole micro-batch in float64 needs much memory.
    names = [f"output {i}" for i in range(len(outputs))]
    names += [f"gradient of {name}" for name in input_names]
    activations = [*outputs, *grads[: len(inputs)]]
    tolerance = TOLERANCE[inputs[0].dtype]
    errors = [0.0]
    for i in range(len(inputs[0])):
        row = slice(i, i + 1)
        exact_inputs = [x[row].detach().double().requires_grad_() for x in inputs]
        row_segments = None if segments_BN is None else segments_BN[row]
        exact_outputs = exact(*exact_inputs, segments_BN=row_segments)
        exact_grads = torch.autograd.grad(
            exact_outputs,
            [*exact_inputs, *exact_weights],
            [grad[row].double() for grad in output_grads],
        )

        # [B, T, C], or [B, T, H, K] of heads; each token has its own scale
        exact_activations = [*exact_outputs, *exact_grads[: len(inputs)]]
        for name, x, exact_x in zip(names, activations, exact_activations, strict=True):
            errors.append(_error(name, x[row], exact_x, range(2, x.ndim), tolerance))
        for total, exact_grad in zip(exact_weight_grads, exact_grads[len(inputs) :], strict=True):
            total += exact_grad

    # The gradient of a weight is the sum over the rows.
    for name, grad, total in zip(weights, grads[len(inputs) :], exact_weight_grads, strict=True):
        # of scalar taps, which have one row, the scale is that of all taps
        dims = [0] if len(total) > 1 else list(range(total.ndim))
        errors.append(_error(f"gradient of {name}", grad, total, dims, tolerance))
    return max(errors)


def _error(name: str, x: Tensor, exact: Tensor, dims: Sequence[int], tolerance: float) -> float:
    """Return the largest error relative to the value and to the root mean square over `dims`.

    Raises CanonMismatch if it is larger than `tolerance`.
    """
    rms = exact.square().mean(list(dims), keepdim=True).sqrt()
    scale = exact.abs() + (rms + SMALLEST_SCALE * exact.abs().max())
    error = ((x.double() - exact).abs() / scale.clamp(min=1e-30)).max().item()  # 0 / 0 is 0
    if not error <= tolerance:  # NaN too
        raise CanonMismatch(f"{name} is {error:.2g} away from float64, expected {tolerance:.2g}")
    return error
