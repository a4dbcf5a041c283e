"""Whether a Canon backend computes the formula here: values and gradients against float64.

`titan/canon_choice.py` asks before a run takes a kernel, `bench canon` before it times one.

Shapes: B batch, T tokens, C channels, N = K - 1 + T.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from canon_pretrain.kernels.backends import TRITON_TAPS, backend_problem
from canon_pretrain.model.args import ModelArgs
from canon_pretrain.model.cache import near_segments
from canon_pretrain.model.canon_forms import Form, forms_of
from canon_pretrain.model.documents import document_numbers

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2**-4, torch.float16: 2**-7}
"""Several roundings: backends that are not fused round between norm, Canon and activation."""
MAX_TOKENS = 1 << 15
"""Of the micro-batch that is checked: 1.3 GB an activation of 1b3's feed-forward in float64."""
HEAD_TOKENS = 8


class WrongCanon(Exception):
    """A kernel that computes something else than the formula; says what differs, and how far."""


def training_problem(
    args: ModelArgs, backend: str, shape: tuple[int, int], dtype: torch.dtype, device: torch.device
) -> str | None:
    """Why a training step of `args` must not take `backend` on `device`; None if it may.

    `shape`: rows and tokens of a micro-batch; rows past MAX_TOKENS are left out. A kernel that
    does not compile, or fails, is a reason too. No random state is used but its own.
    """
    if problem := backend_problem(backend, device.type, dtype) or _untaken(args, backend):
        return problem
    shape = (max(1, min(shape[0], MAX_TOKENS // shape[1])), shape[1])
    forked = [device] if device.type == "cuda" else []
    for form in forms_of(args):
        try:
            with torch.random.fork_rng(forked):
                torch.manual_seed(0)
                module = make_module(form, backend, dtype, device)
                inputs = make_inputs(form, shape, dtype, device)
                near_BN = _documents(args, shape, device) if args.document_mask else None
                compare(form, module, module, inputs, near_BN)
        except WrongCanon as error:
            return f"{form.name}: {error}"
        except Exception as error:  # of Triton, its compiler, the driver: whatever it is
            first = next(iter(str(error).strip().splitlines()), "")
            return f"{form.name}: {type(error).__name__}: {first}"
    return None


def _untaken(args: ModelArgs, backend: str) -> str | None:
    """What of `args` the kernels would silently leave to `compiled`."""
    if backend == "triton" and args.canon_kernel > TRITON_TAPS:
        return f"it takes at most {TRITON_TAPS} taps, and model.canon_kernel = {args.canon_kernel}"
    if backend == "fla" and args.document_mask:
        return "it knows no document borders, and model.document_mask = true"
    return None


def make_module(form: Form, backend: str, dtype: torch.dtype, device: torch.device) -> nn.Module:
    """The form's module with gains that are not 1."""
    with device:
        module = form.make(backend, device.type).to(device, dtype)
    for parameter in module.parameters():
        if parameter.ndim == 1:
            nn.init.uniform_(parameter, 0.5, 1.5)
    return module


def make_inputs(
    form: Form, shape: tuple[int, int], dtype: torch.dtype, device: torch.device
) -> list[Tensor]:
    """Random activations that ask for gradients."""
    return [
        torch.randn(*shape, width, device=device).to(dtype).requires_grad_()
        for width in form.widths
    ]


def compare(
    form: Form,
    module: nn.Module,
    run: Callable[..., tuple[Tensor, ...]],
    inputs: Sequence[Tensor],
    near_BN: Tensor | None = None,
) -> float:
    """Return the largest error of the values and gradients of `run`, which is `module` or its
    compiled form, against the formula in float64. Raises WrongCanon if it is more than rounding.

    An error is a share of its own value and the usual size of a channel, or a weight, beside it.
    """
    weights = {name: p for name, p in module.named_parameters() if p.requires_grad}
    options: dict[str, Any] = {} if near_BN is None else {"near_BN": near_BN}
    outputs = run(*inputs, **options)
    grads = [_output_gradient(y) for y in outputs]
    wanted = [*inputs, *weights.values()]
    found = torch.autograd.grad(outputs, wanted, grads, allow_unused=True)
    own_grads = dict(zip([*range(len(inputs)), *weights], found, strict=True))

    with inputs[0].device:
        exact = form.make("reference").to(inputs[0].device, torch.float64)
    exact.load_state_dict(module.state_dict())
    exact_weights = [p for p in exact.parameters() if p.requires_grad]
    sums = [torch.zeros_like(p) for p in exact_weights]
    tolerance, errors = TOLERANCE[inputs[0].dtype], [0.0]
    # row by row: float64 of a whole micro-batch is large
    for i in range(inputs[0].shape[0]):
        row = slice(i, i + 1)
        own_options = {} if near_BN is None else {"near_BN": near_BN[row]}
        own_inputs = [x[row].detach().double().requires_grad_() for x in inputs]
        truth = exact(*own_inputs, **own_options)
        truth_grads = torch.autograd.grad(
            truth, [*own_inputs, *exact_weights], [grad[row].double() for grad in grads]
        )
        for j, (y, true) in enumerate(zip(outputs, truth, strict=True)):
            errors.append(_error(f"output {j}", y, true, tolerance, row))
        for j, true in enumerate(truth_grads[: len(inputs)]):
            errors.append(_error(f"gradient of input {j}", own_grads[j], true, tolerance, row))
        for total, true in zip(sums, truth_grads[len(inputs) :], strict=True):
            total += true
    for name, total in zip(weights, sums, strict=True):
        errors.append(_error(f"gradient of {name}", own_grads[name], total, tolerance))
    return max(errors)


def _output_gradient(y: Tensor) -> Tensor:
    """Random, and small behind the first tokens of a row: their border is a share of the weight
    gradient that shows."""
    grad = torch.randn_like(y) / 16
    grad[:, :HEAD_TOKENS] *= 16
    return grad


def _error(
    name: str, own: Tensor | None, true: Tensor, tolerance: float, row: slice | None = None
) -> float:
    """The largest error, relative; `row` of activations, whose tokens differ in size."""
    if own is None:
        raise WrongCanon(f"there is no {name}")
    dims = [0] if row is None else list(range(2, true.ndim))
    size = true.square().mean(dims, keepdim=True).sqrt() + 1e-3 * true.abs().max()
    own = own if row is None else own[row]
    error = ((own.double() - true).abs() / (true.abs() + size).clamp(min=1e-30)).max().item()
    if not error <= tolerance:  # NaN too
        raise WrongCanon(f"{name} is {error:.2g} away from float64, expected {tolerance:.2g}")
    return error


def _documents(args: ModelArgs, shape: tuple[int, int], device: torch.device) -> Tensor:
    """near_BN of short documents, as the model numbers them."""
    tokens_BT = torch.randint(4, shape, device=device)
    return near_segments(document_numbers(tokens_BT, 0), shape[1], args.canon_kernel - 1)
